"""Eight-bit floating point: the cast, the largest magnitude, the scale. One place for each.

| dtype | sign, exponent, mantissa | largest | smallest normal | smallest | overflow of the cast |
|---|---|---|---|---|---|
| `E4M3` (float8_e4m3fn) | 1, 4, 3 | 448 | 2⁻⁶ | 2⁻⁹ | ±448; it has no infinity |
| `E5M2` (float8_e5m2) | 1, 5, 2 | 57344 | 2⁻¹⁴ | 2⁻¹⁶ | ±57344, not infinity |

A tensor is stored as `cast(x * scale)` and read as `value / scale`. Sources: Micikevicius et al., FP8 Formats for Deep
Learning, arXiv 2209.05433; the formula of the scale is Transformer Engine's (`DelayedScaling`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
E5M2 = jnp.dtype(jnp.float8_e5m2)


class Quantised(NamedTuple):
    """An array stored as FP8; it is worth `value / scale`.

    Example:
        >>> scale = jnp.float32(128)
        >>> stored = Quantised(quantise(jnp.float32([1, 2]), scale, E4M3), scale)
        >>> dequantise(*stored)
        Array([1., 2.], dtype=float32)
    """

    value: Any  # E4M3 or E5M2
    scale: Any  # float32, []; as a parameter [*stacked], one per layer


LARGEST_SCALE = 2.0**126
"""Scales are not larger, so that their inverse is a normal float32 (GPUs flush the others to zero)."""


def largest(dtype: Any) -> float:
    """The largest finite value of a dtype.

    Example:
        >>> largest(E4M3), largest(E5M2)
        (448.0, 57344.0)
    """
    return float(jnp.finfo(dtype).max)


def cast(x: Array, dtype: Any) -> Array:
    """`x` in E4M3 or E5M2: to the nearest value, ties to even; beyond the largest, the largest.

    Infinities become ±largest too, as by the GPU's own instruction (`cvt.rn.satfinite`); NaN stays NaN; zero keeps its
    sign. The value is rounded in float32 before the dtype changes, so that nothing changes where the GPU compiler
    removes a cast down and up again.

    Args:
        x: floating, any shape; computed in float32.
        dtype: `E4M3` or `E5M2`.

    Returns:
        `dtype`, of the shape of `x`.

    Example:
        >>> cast(jnp.float32([0.3, 17, 1e6, -jnp.inf]), E4M3).astype(jnp.float32)
        Array([ 3.125e-01,  1.600e+01,  4.480e+02, -4.480e+02], dtype=float32)
    """
    info = jnp.finfo(dtype)
    limit, unit = float(info.max), float(info.smallest_subnormal)
    y = jnp.clip(x.astype(jnp.float32), -limit, limit)
    normal = jax.lax.reduce_precision(y, exponent_bits=8, mantissa_bits=info.nmant)
    subnormal = jnp.round(y * (1 / unit)) * unit  # the distance of subnormal numbers is constant
    return jnp.where(jnp.abs(y) < float(info.tiny), subnormal, normal).astype(dtype)


def amax(x: Array, axis: tuple[int, ...] | None = None) -> Array:
    """The largest magnitude over `axis` (default all), float32; 0 of an empty array, NaN where any element is NaN.

    Example:
        >>> amax(jnp.bfloat16([1, -3]))
        Array(3., dtype=float32)
    """
    return jnp.max(jnp.abs(x), axis, initial=0).astype(jnp.float32)


def scale_from_amax(
    amax: Array, previous: Array, limit: float | Array, *, margin: int = 0, power_of_two: bool = False
) -> Array:
    """What a tensor is multiplied by before the cast: limit / amax / 2^margin.

    Args:
        amax: float32, largest magnitudes, any shape.
        previous: float32, the scales so far: they stay where amax is 0 or not finite.
        limit: `largest` of the dtype; or an array of them.
        margin: powers of two kept free above amax.
        power_of_two: round the scale down to a power of two, so that scaling itself never rounds.

    Returns:
        Float32, at most `LARGEST_SCALE`, of the common shape.

    Example:
        >>> scale_from_amax(jnp.float32([3.5, 0, jnp.inf]), jnp.float32(1), largest(E4M3))
        Array([128.,   1.,   1.], dtype=float32)
        >>> scale_from_amax(jnp.float32(3), jnp.float32(1), largest(E4M3), margin=1, power_of_two=True)
        Array(64., dtype=float32)
    """
    usable = (amax > 0) & jnp.isfinite(amax)
    scale = jnp.asarray(limit, jnp.float32) / jnp.where(usable, amax, 1) * 2.0**-margin
    scale = jnp.minimum(scale, LARGEST_SCALE)
    if power_of_two:
        bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
        scale = jax.lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
    return jnp.where(usable, scale, previous)


def quantise(x: Array, scale: Array, dtype: Any) -> Array:
    """`cast(x * scale)`, the product in float32.

    Args:
        x: floating, any shape.
        scale: float32, [] or broadcastable to `x`.
        dtype: `E4M3` or `E5M2`.

    Example:
        >>> quantise(jnp.bfloat16([1, 2]), jnp.float32(100), E4M3)
        Array([96, 192], dtype=float8_e4m3fn)
    """
    return cast(x.astype(jnp.float32) * scale, dtype)


def dequantise(value: Array, scale: Array, dtype: Any = jnp.float32) -> Array:
    """`value * (1 / scale)` in float32, then in `dtype`; arguments as `quantise` took and gave.

    Example:
        >>> dequantise(quantise(jnp.float32([1, 2]), jnp.float32(128), E4M3), jnp.float32(128))
        Array([1., 2.], dtype=float32)
    """
    return (value.astype(jnp.float32) * (1 / scale)).astype(dtype)


def losses(x: Array, scale: Array, dtype: Any) -> tuple[Array, Array]:
    """Shares of the elements that the cast saturates and that it flushes to zero.

    Args:
        x, scale, dtype: as for `quantise`. NaN counts as neither; zeros are not flushed.

    Returns:
        Two float32 [], 0 to 1.

    Example:
        >>> losses(jnp.float32([0, 1e-9, 1, 1e9]), jnp.float32(1), E4M3)
        (Array(0.25, dtype=float32), Array(0.25, dtype=float32))
    """
    scaled = jnp.abs(x.astype(jnp.float32) * scale)
    flushed = (x != 0) & (scaled <= float(jnp.finfo(dtype).smallest_subnormal) / 2)  # a tie goes to zero, the even one
    return jnp.mean(scaled > largest(dtype), dtype=jnp.float32), jnp.mean(flushed, dtype=jnp.float32)
