"""MXFP8: blocks of 32 elements along the contraction, each with a power of two as its scale.

An element is worth `value * scale`, scale in E8M0 (float8_e8m0fnu: 8 bits of exponent). Source: OCP Microscaling
Formats (MX) 1.0. It rounds the scale down, so that the largest elements may saturate; here it is rounded up, so that
none does, as in Mishra et al., Recipes for Pre-training LLMs with MXFP8, arXiv 2506.08027.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jzero.errors import JzeroError
from jzero.fp8.numerics import cast

BLOCK = 32
E8M0 = jnp.dtype(jnp.float8_e8m0fnu)


class Blocks(NamedTuple):
    """A matrix in blocks along its last dimension."""

    value: Array  # E4M3 or E5M2 [rows, K]
    scale: Array  # E8M0 [rows, K / 32]


def quantise(x: Array, dtype: Any) -> Blocks:
    """Each 32 elements of a row, cast after a division by their own scale, 2^ceil(log2(amax / largest)).

    No scale is below 2⁻¹²⁶, the smallest that float32 keeps on GPUs; that of a block with an element that is not finite
    is NaN.

    Args:
        x: floating [rows, K]; K a multiple of 32.
        dtype: `E4M3` or `E5M2`.

    Raises:
        JzeroError: 32 does not divide K.

    Example:
        >>> blocks = quantise(jnp.full((1, 32), 3.0), jnp.float8_e4m3fn)
        >>> blocks.scale, blocks.value[0, :2]
        (Array([[0.0078125]], dtype=float8_e8m0fnu), Array([384, 384], dtype=float8_e4m3fn))
    """
    rows, width = x.shape
    if width % BLOCK:
        raise JzeroError(f"fp8 blocks: expected a multiple of {BLOCK} elements to contract, found {width}; pad them")
    cut = x.astype(jnp.float32).reshape(rows, width // BLOCK, BLOCK)
    largest = jnp.max(jnp.abs(cut), axis=-1)
    # integers, as a quotient could be subnormal; the largest of either dtype is 1.75 times a power of two
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    exponent = jnp.maximum((bits >> 23) - jnp.finfo(dtype).maxexp + 1 + ((bits & 0x7FFFFF) > 0x600000), 1)
    finite = jnp.isfinite(largest)
    inverse = jnp.where(finite, jax.lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32), jnp.nan)
    code = jnp.where(finite, exponent, 255).astype(jnp.uint8)  # 255 is E8M0's NaN
    value = cast(cut * inverse[..., None], dtype).reshape(rows, width)
    return Blocks(value, jax.lax.bitcast_convert_type(code, E8M0))


def dequantise(blocks: Blocks) -> Array:
    """Float32 [rows, K].

    Example:
        >>> dequantise(quantise(jnp.full((1, 32), 3.0), jnp.float8_e4m3fn))[0, :2]
        Array([3., 3.], dtype=float32)
    """
    rows, width = blocks.value.shape
    cut = blocks.value.astype(jnp.float32).reshape(rows, width // BLOCK, BLOCK)
    return (cut * blocks.scale.astype(jnp.float32)[..., None]).reshape(rows, width)


def matmul(a: Blocks, b: Blocks, dtype: Any) -> Array:
    """a · bᵀ: one kernel on GPUs that have block scaling, elsewhere a float32 product of the dequantised matrices.

    Args:
        a: [M, K].
        b: [N, K].
        dtype: of the result.

    Returns:
        [M, N].

    Example:
        >>> ones = quantise(jnp.ones((2, 32)), jnp.float8_e4m3fn)
        >>> matmul(ones, ones, jnp.bfloat16)[0]
        Array([32, 32], dtype=bfloat16)
    """
    wide = dtype if dtype in (jnp.bfloat16, jnp.float32) else jnp.float32

    def kernel(a: Blocks, b: Blocks) -> Array:
        batched = (a.value[None], b.value[None], a.scale[None], b.scale[None])
        y = jax.nn.scaled_matmul(*batched, preferred_element_type=wide)[0]
        # it forgets over which axes of a manual region its operands vary
        varying = [jax.typeof(x).manual_axis_type.varying for x in (a.value, b.value, y)]
        missing = tuple(sorted((varying[0] | varying[1]) - varying[2]))
        return jax.lax.pcast(y, missing, to="varying") if missing else y

    plain = lambda a, b: jnp.matmul(dequantise(a), dequantise(b).T).astype(wide)
    return jax.lax.platform_dependent(a, b, cuda=kernel, default=plain).astype(dtype)
