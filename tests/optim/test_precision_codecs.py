"""Codecs of the optimizer's state: remainders of every class of bits, scales, random rounding, the wire."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jzero.optim import precision

WORD = 0xFFFFFFFF
signs = st.sampled_from([0, 1 << 31])
CLASSES = {
    "any": st.integers(0, WORD),
    "subnormal": st.builds(lambda s, m: s | m, signs, st.integers(0, (1 << 23) - 1)),
    "tie": st.builds(lambda s, high: s | (high << 16) | 0x8000, signs, st.integers(0, 0x7F7F)),
    "carry": st.builds(lambda s, high: s | (high << 16) | 0xFFFF, signs, st.integers(0, 0x7F7F)),
    "infinite": st.builds(lambda s: s | 0x7F800000, signs),
    "largest": st.builds(lambda s, m: s | 0x7F7F0000 | m, signs, st.integers(0, 0xFFFF)),
}
nans = st.builds(lambda s, m: s | 0x7F800000 | m, signs, st.integers(1, (1 << 23) - 1))
split, join = jax.jit(precision.split), jax.jit(precision.join)


def floats(words):
    return np.asarray(words, np.uint32).view(np.float32)


def rebuilt(high, low):
    """The bits again, by the formula in NumPy: high half = bfloat16 bits - (remainder < 0)."""
    high, low = np.asarray(high).view(np.uint16).astype(np.int64), np.asarray(low).astype(np.int64)
    return (((high - (low < 0)) << 16) | (low & 0xFFFF)) & WORD


@pytest.mark.parametrize("kind", CLASSES)
def test_remainders_give_back_every_bit(kind):
    @given(st.lists(CLASSES[kind], min_size=8, max_size=8))
    @settings(max_examples=60, deadline=None)
    def check(words):
        words = np.asarray(words, np.uint32)
        words = np.where((words & 0x7FFFFFFF) > 0x7F800000, words & 0xFF800000, words).astype(np.uint32)  # no NaNs here
        high, low = split(floats(words))
        assert (high.dtype, low.dtype) == (jnp.bfloat16, jnp.int16)
        np.testing.assert_array_equal(np.asarray(join(high, low)).view(np.uint32), words)
        np.testing.assert_array_equal(rebuilt(high, low), words)

    check()


@given(st.lists(CLASSES["tie"], min_size=8, max_size=8))
@settings(max_examples=50, deadline=None)
def test_ties_round_away_from_zero(words):
    high, _ = split(floats(words))
    expected = ((np.asarray(words, np.uint32) >> 16) + 1).astype(np.uint16)
    np.testing.assert_array_equal(np.asarray(high).view(np.uint16), expected)


@given(st.lists(nans, min_size=8, max_size=8))
@example([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000, 0x7F80FFFF, 0x7FFF8000, 0xFFFF8000])
@settings(max_examples=50, deadline=None)
def test_nan_stays_nan_in_parameter_and_master(words):
    high, low = split(floats(words))
    assert np.isnan(np.asarray(high, np.float32)).all()
    assert np.isnan(np.asarray(join(high, low))).all()
    np.testing.assert_array_equal(np.signbit(np.asarray(high, np.float32)), np.asarray(words, np.uint32) >> 31 == 1)


def test_the_two_halves_of_all_high_patterns():
    """Every pattern of the high half, with the low halves around its rounding."""
    words = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16) | np.asarray(
        [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32
    )
    words = words[(words & 0x7FFFFFFF) <= 0x7F800000]
    high, low = split(floats(words))
    np.testing.assert_array_equal(np.asarray(join(high, low)).view(np.uint32), words)


def test_a_parameter_that_arrives_otherwise_is_the_new_master():
    x = jnp.float32([1.001, 3.0, -2.0])
    high, low = precision.split(x)
    arrived = high.at[1].set(0.0)
    kept = precision.remainder(x, arrived)
    np.testing.assert_array_equal(np.asarray(kept), [low[0], 0, low[2]])
    np.testing.assert_array_equal(np.asarray(precision.join(arrived, kept)), np.float32([1.001, 0.0, -2.0]))


SCALED = {"float16": 2.0**-11, "float8_e4m3fn": 2.0**-4}


@pytest.mark.parametrize("dtype", SCALED)
@given(st.lists(st.floats(-1, 1, width=32, allow_subnormal=False), min_size=8, max_size=8), st.integers(-90, 90))
@settings(max_examples=60, deadline=None)
def test_scaled_is_apexs_formula(dtype, values, exponent):
    x = (np.asarray(values, np.float32) * np.float32(2.0) ** exponent).astype(np.float32)
    x[np.abs(x) < 1e-30] = 0
    codec = precision.scaled(dtype)
    stored = codec.encode(jnp.asarray(x))
    half = float(jnp.finfo(dtype).max) / 2
    scale = np.float32(np.abs(x).max() / half)
    np.testing.assert_allclose(np.asarray(stored.scale), [scale], rtol=3e-7)
    found = np.asarray(codec.decode(stored))
    np.testing.assert_array_equal(found, np.asarray(stored.value, np.float32) * np.asarray(stored.scale))
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    assert (np.abs(found - x) <= 1.001 * np.maximum(np.abs(x) * SCALED[dtype], smallest * scale / 2)).all()
    assert np.isfinite(np.asarray(stored.value, np.float32)).all()


def test_scales_per_stacked_layer():
    x = jnp.float32([[1.0, 0.5], [1e-20, 5e-21], [0.0, 0.0]])
    stored = precision.scaled("float16", 1).encode(x)
    assert stored.scale.shape == (3, 1)
    np.testing.assert_allclose(np.asarray(precision.scaled("float16", 1).decode(stored)), np.asarray(x), rtol=1e-3)
    assert float(stored.scale[2, 0]) == 0


def test_what_is_not_finite_is_not_hidden_by_a_scale():
    for bad in (np.nan, np.inf):
        codec = precision.scaled("float16")
        assert not np.isfinite(np.asarray(codec.decode(codec.encode(jnp.float32([1.0, bad])))))[1]


def test_stochastic_rounding_is_one_of_both_neighbours_and_right_on_average():
    x = jnp.full(40_000, 1.0 + 0.3 * 2.0**-7, jnp.float32)
    found = np.asarray(precision.stochastic_round(x, jax.random.key(1)))
    assert set(np.unique(found)) == {np.float32(1.0), np.float32(1.0 + 2.0**-7)}
    assert np.mean(found > 1.0) == pytest.approx(0.3, abs=0.01)
    np.testing.assert_array_equal(found, np.asarray(precision.stochastic_round(x, jax.random.key(1))))
    assert (found != np.asarray(precision.stochastic_round(x, jax.random.key(2)))).any()


def test_stochastic_rounding_keeps_what_bfloat16_holds():
    x = jnp.float32([0.0, -0.0, 1.0, -2.5, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(np.asarray(precision.stochastic_round(x, jax.random.key(0))), np.asarray(x))


@pytest.mark.parametrize(("dtype", "wire"), [("float32", "int32"), ("bfloat16", "int32"), ("float16", "uint16")])
def test_integers_carry_the_bits(dtype, wire):
    x = jnp.asarray([1.5, -0.1, 0.0, jnp.inf], dtype)
    sent = precision.to_wire(x, wire)
    assert sent.dtype == wire
    np.testing.assert_array_equal(np.asarray(precision.from_wire(sent, dtype)), np.asarray(x))
