"""Cast, amax and scale against FP8 by hand, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import fp8 as oracle

from jzero.fp8 import numerics

NAMES = list(oracle.FORMATS)
cast = jax.jit(numerics.cast, static_argnums=1)


def codes(x):
    return np.asarray(x).view(np.uint8)


def neighbours(x):
    return np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_reads_codes_as_ml_dtypes_does(name):
    theirs = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name)).astype(np.float64)
    np.testing.assert_array_equal(oracle.decode(name), theirs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", [numerics.cast, cast], ids=["eager", "jit"])
def test_every_code_is_its_own_cast(name, form):
    values = oracle.decode(name).astype(np.float32)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(codes(form(values, name))[finite], np.arange(256, dtype=np.uint8)[finite])
    assert np.isnan(np.asarray(form(values, name)[np.isnan(values)], np.float32)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", [numerics.cast, cast], ids=["eager", "jit"])
def test_values_between_the_codes(name, form):
    """All codes, all midpoints between two of them, and the float32 just above and below each."""
    values = oracle.decode(name)
    values = np.sort(values[np.isfinite(values)])
    points = neighbours(np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32))
    np.testing.assert_array_equal(codes(form(points, name)), oracle.encode(points, name))


@pytest.mark.parametrize("name", NAMES)
def test_specials(name):
    limit = np.float32(numerics.largest(name))
    x = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-45, -1e-45, limit * 1.03, limit * 1.2, limit * 2])
    found, nan = cast(x, name), np.isnan(x)
    np.testing.assert_array_equal(codes(found)[~nan], oracle.encode(x, name)[~nan])
    np.testing.assert_array_equal(np.isnan(np.asarray(found, np.float32)), nan)


SIGN = st.sampled_from([0, 1 << 31])
MANTISSA = st.integers(0, (1 << 23) - 1)
CLASSES = {
    "any": st.integers(0, 0xFFFFFFFF),
    "within the range": st.builds(lambda s, e, m: s | (e << 23) | m, SIGN, st.integers(108, 144), MANTISSA),
    "nearly a tie": st.builds(
        lambda s, e, m, low: s | (e << 23) | (m << 19) | low,
        SIGN, st.integers(108, 144), st.integers(0, 15), st.sampled_from([0, 1, 0x7FFFF]),
    ),
    "subnormal": st.builds(lambda s, e, m: s | (e << 23) | m, SIGN, st.integers(0, 112), MANTISSA),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_classes_of_inputs(name, kind, dtype):
    @given(st.lists(CLASSES[kind], min_size=64, max_size=64))
    @settings(max_examples=25, deadline=None)
    def check(words):
        x = np.asarray(words, np.uint32).view(np.float32)
        if dtype == "bfloat16":
            x = (np.asarray(words, np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)
        wide = x.astype(np.float32)
        nan = np.isnan(wide)
        found = codes(cast(x, name))
        np.testing.assert_array_equal(found[~nan], oracle.encode(wide[~nan], name))  # NumPy warns of signalling NaNs
        assert np.isnan(found.view(getattr(ml_dtypes, name)).astype(np.float32)[nan]).all()

    check()


# --- amax and scale --------------------------------------------------------------------------------------------------


def test_amax():
    assert numerics.amax(jnp.bfloat16([[1, -7], [2, 3]])) == 7
    assert numerics.amax(jnp.zeros((0, 4))) == 0
    assert numerics.amax(jnp.float32([1, -np.inf])) == np.inf
    assert np.isnan(numerics.amax(jnp.float32([1, np.nan, 3])))


@pytest.mark.parametrize("margin", [0, 1, 3])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_scales(name, margin, power_of_two):
    limit = numerics.largest(name)
    amaxes = np.float32([0, np.inf, np.nan, 1, 3, 448, 447.9, 1e-30, 2e-38, 1e-37, 3e38, 7.1, limit, limit / 3])
    scale = jax.jit(functools.partial(numerics.scale_from_amax, margin=margin, power_of_two=power_of_two))
    found = np.asarray(scale(amaxes, np.float32(5), limit))
    expected = np.float32([oracle.scale(a, 5, limit, margin, power_of_two) for a in amaxes])
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    assert np.isfinite(1 / found).all()
    assert (1 / found >= np.finfo(np.float32).tiny).all()


@given(st.lists(st.floats(2**-100, 2**100, width=32), min_size=16, max_size=16), st.integers(0, 4))
@settings(max_examples=40, deadline=None)
def test_the_largest_magnitude_nearly_fills_the_format_and_never_saturates(amaxes, margin):
    amaxes = np.float32(amaxes)
    for power_of_two in (False, True):
        scale = np.asarray(numerics.scale_from_amax(amaxes, 1, 448.0, margin=margin, power_of_two=power_of_two))
        used = amaxes.astype(np.float64) * scale / 448 * 2**margin
        assert (used <= 1 + 2**-22).all()
        assert (used > (0.5 if power_of_two else 1) - 2**-22).all()


@pytest.mark.parametrize("name", NAMES)
def test_quantise_and_dequantise(name):
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    scale = np.float32(77.7)
    value = jax.jit(numerics.quantise, static_argnums=2)(x, scale, name)
    np.testing.assert_array_equal(codes(value), oracle.encode(x * scale, name))
    back = np.asarray(numerics.dequantise(value, scale))
    np.testing.assert_array_equal(back, oracle.decode(name)[codes(value)].astype(np.float32) * (np.float32(1) / scale))
    half = 2.0 ** -(oracle.FORMATS[name][1] + 1)
    normal = np.abs(x * scale) >= float(jnp.finfo(name).tiny)
    saturated = np.abs(x * scale) > numerics.largest(name)
    error = np.abs(back / x - 1)[normal & ~saturated]
    assert half / 2 < error.max() <= half * (1 + 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_counted(name):
    tie = float(jnp.finfo(name).smallest_subnormal) / 2
    x = np.float32([0, -0.0, tie, -tie, np.nextafter(np.float32(tie), np.float32(1)), 1, 1e9, -np.inf, np.nan, 2])
    saturated, flushed = numerics.losses(x, np.float32(1), name)
    value = np.asarray(numerics.cast(x, name), np.float32)
    assert saturated == np.float32(np.mean(np.abs(x) > numerics.largest(name))) == np.float32(0.2)
    assert flushed == np.float32(np.mean((x != 0) & (value == 0))) == np.float32(0.2)
