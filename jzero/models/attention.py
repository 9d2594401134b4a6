"""Attention without parameters: rotary positions, and the product of softmax(query · key) with the values.

Letters: B batch, T sequence (S: as keys), G groups = heads of keys and values, R query heads of a group,
H = G · R heads, K head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jzero.errors import JzeroError

_MASKED = -1e30
_SIXTEEN_BITS = (jnp.bfloat16, jnp.float16)
_CUDNN_WIDEST_HEAD = 128  # what every GPU with flash attention in cuDNN can do


def rotate(x: jax.Array, positions: jax.Array, width: int, base: float) -> jax.Array:
    """Rotary positions (Su et al., https://arxiv.org/abs/2104.09864), two halves of a head against one another.

    Channel pair (i, i + width/2) is turned by the angle position · base^(-2i/width).

    Args:
        x: [B, T, ..., K].
        positions: [T] or [B, T], whole numbers.
        width: how many of the first channels turn; even.
        base: of the geometric series of frequencies.

    Returns:
        Like x; computed in float32.
    """
    frequencies = (base ** (-np.arange(0, width, 2) / width)).astype(np.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    angles = angles.reshape(*angles.shape[:-1], *(1,) * (x.ndim - 3), width // 2)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = (half.astype(jnp.float32) for half in jnp.split(x[..., :width], 2, axis=-1))
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*(half.astype(x.dtype) for half in turned), x[..., width:]], axis=-1)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    segments: jax.Array | None = None,
    causal: bool = True,
    implementation: str = "auto",
    drop: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Each position's mean of the values (up to its own), weighted by softmax(query · key / √K).

    Args:
        query: [B, T, G, R, K].
        key, value: [B, T, G, K].
        segments: int [B, T] or None; positions see only those of their own segment.
        causal: positions see only those up to their own.
        implementation: "auto": cuDNN on a GPU in 16 bits where it can, else written out here, which on CPU is faster
            than `jax.nn.dot_product_attention` (it divides by the softmax's sum after the product with the values);
            "xla" or "cudnn": that function's.
        drop: dropout of the weights [B, H, T, S], for which there is only the written-out form; None: no dropout.

    Returns:
        [B, T, H, K], in the type of the query.

    Raises:
        JzeroError: cuDNN was asked for and cannot do it.
    """
    batch, length, groups, per_group, width = query.shape
    if drop is None:
        chosen = library(implementation, query.dtype, width)
        if chosen is not None:
            mask = None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None]
            flat = query.reshape(batch, length, groups * per_group, width)
            return jax.nn.dot_product_attention(flat, key, value, mask=mask, is_causal=causal, implementation=chosen)
    elif implementation == "cudnn":
        raise JzeroError(
            "model.attention_implementation: expected auto or xla with attention dropout, found cudnn, which has none"
        )
    return _written_out(query, key, value, segments, causal, drop)


def flash_attention_fits(dtype: jnp.dtype, head_width: int, platform: str) -> bool:
    """Whether cuDNN's flash attention, which has no dropout, takes heads of this width and type.

    Args:
        dtype: of the activations; it takes 16 bits only.
        head_width: K, a multiple of 8.
        platform: of the devices, as `jax.Device.platform` or `jax.default_backend()` names it.

    Example:
        >>> flash_attention_fits(jnp.bfloat16, 64, "gpu"), flash_attention_fits(jnp.float32, 64, "gpu")
        (True, False)
    """
    fits = dtype in _SIXTEEN_BITS and head_width <= _CUDNN_WIDEST_HEAD and head_width % 8 == 0
    return fits and platform in ("gpu", "cuda")


def library(
    implementation: str, dtype: jnp.dtype, width: int, platform: str | None = None
) -> Literal["xla", "cudnn"] | None:
    """The implementation of `jax.nn.dot_product_attention` for heads of this width; None: the written-out form.

    The platform is that of the devices; None: JAX's default backend.
    """
    if implementation == "auto":
        return "cudnn" if flash_attention_fits(dtype, width, platform or jax.default_backend()) else None
    if implementation == "cudnn" and dtype not in _SIXTEEN_BITS:
        raise JzeroError(
            f"model.attention_implementation: expected auto or xla for {dtype.name} activations, found cudnn, "
            "which takes bfloat16 or float16"
        )
    return "cudnn" if implementation == "cudnn" else "xla"


def _written_out(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    causal: bool,
    drop: Callable[[jax.Array], jax.Array] | None,
) -> jax.Array:
    batch, length, groups, per_group, width = query.shape
    query, key, value = query.transpose(0, 2, 3, 1, 4), key.swapaxes(1, 2), value.swapaxes(1, 2)
    scores = einsum32("bgrtk,bgsk->bgrts", query, key) * width**-0.5
    visible = _visible(length, segments, causal)
    scores = scores if visible is None else jnp.where(visible, scores, _MASKED)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    total = weights.sum(-1, keepdims=True)
    if drop is not None:
        weights = drop(weights.reshape(batch, groups * per_group, length, length)).reshape(weights.shape)
    mean = einsum32("bgrts,bgsk->bgrtk", weights.astype(value.dtype), value) / total
    return mean.astype(value.dtype).transpose(0, 3, 1, 2, 4).reshape(batch, length, groups * per_group, width)


def _visible(length: int, segments: jax.Array | None, causal: bool) -> jax.Array | None:
    """Bool, broadcasts against [B, G, R, T, S]; computed, since a constant would be kept for the backward pass."""
    past = jnp.arange(length)[:, None] >= jnp.arange(length) if causal else None
    if segments is None:
        return past
    same = (segments[:, :, None] == segments[:, None, :])[:, None, None]
    return same if past is None else same & past


def einsum32(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`jnp.einsum` whose result is float32, while its backward pass multiplies in the type of the operands.

    Plain differentiation would multiply the float32 cotangent with a 16-bit operand, which a GPU does in float32.
    """
    if a.dtype == jnp.float32:
        return jnp.einsum(spec, a, b)
    return _einsum32(spec, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _einsum32(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _einsum32_forward(spec, a, b):
    return _einsum32(spec, a, b), (a, b)


def _einsum32_backward(spec, operands, cotangent):
    _, vjp = jax.vjp(functools.partial(jnp.einsum, spec), *operands)
    return vjp(cotangent.astype(operands[0].dtype))


_einsum32.defvjp(_einsum32_forward, _einsum32_backward)
