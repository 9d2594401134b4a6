"""Rounding that survives every compiler, and the pairs of functions that store a state array."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.optim import precision

DTYPES = ["bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "float32"]
EDGES = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.9, 65520, 448, 463.9, 464, 464.1, 480, 57344, 61439, 61440,
         2.0**-24, 2.0**-25, 1.001 * 2.0**-25, 6e-5, 6.1e-5, -3e-5, 2.0**-9, 2.0**-10, 3.4e38, -3.4e38]  # fmt: skip


def same_as_casting(x, dtype):
    x = np.asarray(x, np.float32)
    found = np.asarray(jax.jit(precision.round_to, static_argnums=1)(x, dtype))
    with np.errstate(all="ignore"):
        expected = x.astype(jnp.dtype(dtype)).astype(np.float32)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_to_is_casting_there_and_back(dtype):
    draw = np.random.default_rng(0)
    same_as_casting(np.concatenate([EDGES, draw.normal(size=4096) * 10.0 ** draw.uniform(-37, 38, 4096)]), dtype)


@given(st.floats(width=32, allow_subnormal=False), st.sampled_from(DTYPES))
@settings(max_examples=200, deadline=None)
def test_round_to_of_any_number(x, dtype):
    same_as_casting(np.full(8, x), dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_the_rounding_is_in_the_program_and_not_a_pair_of_casts(dtype):
    """The GPU compiler removes a cast there and back; it keeps reduce_precision."""
    text = jax.jit(precision.round_to, static_argnums=1).lower(jnp.ones(8), dtype).as_text()
    assert "reduce_precision" in text
    assert not re.search(r"tensor<8xb?f16>", text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_cast_codec(dtype):
    codec = precision.cast(dtype)
    x = jnp.asarray([0.1, -3.0, 1e-3, 0.0])
    assert codec.name == dtype
    assert codec.encode(x).dtype == dtype
    assert codec.decode(codec.encode(x)).dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(codec.decode(codec.encode(x))), np.asarray(x.astype(dtype), np.float32))
