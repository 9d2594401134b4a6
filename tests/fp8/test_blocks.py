"""Blocks of 32 against the formula in NumPy, bit for bit, and their product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import fp8 as oracle

from jzero.errors import JzeroError
from jzero.fp8 import blocks, numerics


def by_hand(x, name):
    """Codes of the elements and of the scales, float32 [rows, K] -> uint8."""
    cut = np.asarray(x, np.float64).reshape(x.shape[0], -1, 32)
    amax = np.abs(cut).max(-1)
    exponent = np.where(amax > 0, np.ceil(np.log2(np.where(amax > 0, amax, 1) / numerics.largest(name))), -126)
    exponent = np.maximum(exponent, -126)
    value = oracle.encode(cut * 2.0 ** -exponent[..., None], name).reshape(x.shape)
    return value, (exponent + 127).astype(np.uint8)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("form", [blocks.quantise, jax.jit(blocks.quantise, static_argnums=1)], ids=["eager", "jit"])
def test_elements_and_scales(name, form):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(16, 96)) * 10.0 ** rng.integers(-20, 20, (16, 96))).astype(np.float32)
    x[0, :32], x[1, :32], x[2, :32], x[3, 5] = 0, numerics.largest(name), 2e-38, 3.4e38
    found, (value, scale) = form(x, name), by_hand(x, name)
    np.testing.assert_array_equal(np.asarray(found.scale).view(np.uint8), scale)
    np.testing.assert_array_equal(np.asarray(found.value).view(np.uint8), value)


def test_nothing_saturates_and_the_error_is_the_formats():
    x = np.random.default_rng(1).normal(size=(64, 512)).astype(np.float32)
    found = blocks.quantise(x, numerics.E4M3)
    exact = np.abs(x).reshape(64, -1, 32) / np.asarray(found.scale, np.float32)[..., None]
    assert exact.max() <= 448
    assert exact.max(-1).min() > 224
    error = np.linalg.norm(blocks.dequantise(found) - x) / np.linalg.norm(x)
    assert 0.02 < error < 0.03


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_block_that_is_not_finite_is_not_a_number_and_others_are_unharmed(bad):
    x = np.ones((1, 64), np.float32)
    x[0, 3] = bad
    found = np.asarray(blocks.dequantise(blocks.quantise(x, numerics.E4M3)))
    assert np.isnan(found[0, :32]).all()
    assert (found[0, 32:] == 1).all()


def test_the_product():
    rng = np.random.default_rng(2)
    a = blocks.quantise(rng.normal(size=(8, 64)).astype(np.float32), numerics.E4M3)
    b = blocks.quantise(rng.normal(size=(5, 64)).astype(np.float32), numerics.E5M2)
    exact = np.asarray(blocks.dequantise(a), np.float64) @ np.asarray(blocks.dequantise(b), np.float64).T
    np.testing.assert_allclose(blocks.matmul(a, b, jnp.float32), exact, rtol=1e-5, atol=1e-5)
    assert blocks.matmul(a, b, jnp.bfloat16).dtype == jnp.bfloat16


def test_a_contraction_that_32_does_not_divide():
    with pytest.raises(JzeroError, match="expected a multiple of 32 elements to contract, found 40; pad them"):
        blocks.quantise(jnp.ones((2, 40)), numerics.E4M3)
