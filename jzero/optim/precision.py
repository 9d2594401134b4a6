"""How one array of optimizer state is stored: pairs of pure functions between float32 and the stored form.

| codec | stored | bytes per element |
|---|---|---|
| `cast` | the value, rounded to a plain floating dtype | 4 or 2 |
| `scaled` | value / scale in a narrow dtype, and one float32 scale per layer of each rank's shard | 2 or 1 |
| `split`, `join` | the low 16 bits of a float32; a bfloat16 parameter holds the high ones | 2 |

No mesh and no tree appears here. `encode` takes the float32 value that the update computed; `decode` gives the float32
value that the next update starts from. Sources: Apex `DistributedFusedAdam` (`store_param_remainders`,
`with_scaled_states`); Peng et al., FP8-LM, arXiv 2310.18313 (scaled states).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Codec(NamedTuple):
    """A way to store a float32 array.

    Attributes:
        name: as written in options and reports.
        measure: float32 array -> its scale, [*stacked dimensions, 1, ..., 1]; None where the codec has none.
        store: float32 array and its scale -> what is stored: an array, or `Scaled`.
        decode: what is stored -> float32 array.
        dtype: of the stored values.
        scaled: whether `Scaled` is what is stored.
    """

    name: str
    measure: Callable[[Array], Array | None]
    store: Callable[[Array, Array | None], Any]
    decode: Callable[[Any], Array]
    dtype: Any
    scaled: bool = False

    def encode(self, x: Array) -> Any:
        """`store` with the array's own scale."""
        return self.store(x, self.measure(x))


class Scaled(NamedTuple):
    """An array stored as `value * scale`."""

    value: Any  # narrow dtype, of the array's shape
    scale: Any  # float32, [*stacked dimensions, 1, ..., 1] on each rank


def cast(dtype: Any) -> Codec:
    """Storage in a plain floating dtype, rounded to nearest.

    Example:
        >>> cast("bfloat16").decode(cast("bfloat16").encode(jnp.float32(1.001)))
        Array(1., dtype=float32)
    """
    dtype = jnp.dtype(dtype)
    return Codec(dtype.name, lambda x: None, lambda x, scale: x.astype(dtype), lambda x: x.astype(jnp.float32), dtype)


def scaled(dtype: Any, stacked: int = 0) -> Codec:
    """Storage in a narrow dtype with a scale that puts the largest magnitude at half of the dtype's range.

    scale = max|x| / (finfo(dtype).max / 2), in float32; stored = x * (1/scale if scale > 0 else 0); read = stored *
    scale. Apex's formula. A scale below the smallest normal float32 counts as 0, since its inverse may overflow.

    Args:
        dtype: of the stored values.
        stacked: leading dimensions that enumerate layers; each layer has its own scale.

    Example:
        >>> codec = scaled("float16")
        >>> codec.decode(codec.encode(jnp.float32([1e-9, 5e-10])))
        Array([1.e-09, 5.e-10], dtype=float32)
    """
    dtype = jnp.dtype(dtype)
    half = float(jnp.finfo(dtype).max) / 2

    def measure(x: Array) -> Array:
        return jnp.max(jnp.abs(x), axis=tuple(range(stacked, x.ndim)), initial=0.0, keepdims=True) / half

    def store(x: Array, scale: Any) -> Scaled:
        usable = scale >= float(jnp.finfo(jnp.float32).tiny)
        inverse = jnp.where(usable, 1.0 / jnp.where(usable, scale, 1.0), 0.0)
        return Scaled((x * inverse).astype(dtype), scale)

    decode = lambda s: s.value.astype(jnp.float32) * s.scale
    return Codec(f"scaled {dtype.name}", measure, store, decode, dtype, scaled=True)


def read_blocks(stored: Scaled) -> Array:
    """A whole scaled array as float32, whatever blocks its scales belong to: each dimension is cut evenly.

    Example:
        >>> read_blocks(Scaled(jnp.float16([1, 2, 3, 4]), jnp.float32([1, 10])))
        Array([ 1.,  2., 30., 40.], dtype=float32)
    """
    blocks, each = _blocks(stored.value, stored.scale.shape)
    return (blocks.astype(jnp.float32) * stored.scale.reshape(each)).reshape(stored.value.shape)


def store_blocks(x: Array, dtype: Any, shape: tuple[int, ...]) -> Scaled:
    """A whole float32 array, stored with scales of that shape: one per block, each dimension cut evenly."""
    blocks, each = _blocks(x, shape)
    codec = scaled(dtype)
    scale = jnp.max(jnp.abs(blocks), axis=tuple(range(1, blocks.ndim, 2)), initial=0.0, keepdims=True)
    scale = scale / (float(jnp.finfo(dtype).max) / 2)
    value, _ = codec.store(blocks, scale)
    assert scale.shape == each
    return Scaled(value.reshape(x.shape), scale.reshape(shape))


def _blocks(x: Array, shape: tuple[int, ...]) -> tuple[Array, tuple[int, ...]]:
    """[blocks, elements, blocks, elements, ...]: an array cut into so many blocks per dimension; the scales' shape."""
    cut = [(parts, n // parts) for n, parts in zip(x.shape, shape, strict=True)]
    return x.reshape([n for pair in cut for n in pair]), tuple(n for parts in shape for n in (parts, 1))


STATE_DTYPES: dict[str, Callable[[int], Codec]] = {
    "fp32": lambda stacked: cast("float32"),
    "bf16": lambda stacked: cast("bfloat16"),
    "fp16": lambda stacked: cast("float16"),
    "scaled_fp16": functools.partial(scaled, "float16"),
    "scaled_fp8": functools.partial(scaled, "float8_e4m3fn"),
}
"""The choices of `state_dtype`: from the number of stacked dimensions to a codec."""


def is_scaled(x: Any) -> bool:
    """Whether `x` is a `Scaled` node (an `is_leaf` predicate)."""
    return isinstance(x, Scaled)


# --- the two halves of a float32 ------------------------------------------------------------------------------------


def split(x: Array) -> tuple[Array, Array]:
    """A float32 array as bfloat16 and the 16 bits that bfloat16 lacks; `join` gives the same bits back.

    remainder = int16(low half); bfloat16 bits = high half + (remainder < 0): rounded to nearest, ties away from zero.
    A NaN becomes the quiet NaN with remainder 0, since the carry would turn 0x7FFFFFFF into -0.

    Returns:
        bfloat16 and int16 arrays of the shape of `x`.

    Example:
        >>> split(jnp.float32(1.001))
        (Array(1, dtype=bfloat16), Array(8389, dtype=int16))
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = jnp.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits & jnp.uint32(0x80000000)) | jnp.uint32(0x7FC00000), bits)
    low = bits & 0xFFFF
    high = (bits >> 16) + (low >> 15)
    remainder = jax.lax.bitcast_convert_type(low.astype(jnp.uint16), jnp.int16)
    return jax.lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16), remainder


def join(high: Array, remainder: Array) -> Array:
    """The float32 array whose halves `split` gave.

    Example:
        >>> join(*split(jnp.float32(1.001)))
        Array(1.001, dtype=float32)
    """
    low = jax.lax.bitcast_convert_type(remainder, jnp.uint16).astype(jnp.uint32)
    upper = jax.lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32) - (low >> 15)
    return jax.lax.bitcast_convert_type((upper << 16) | low, jnp.float32)


def remainder(x: Array, arrived: Array) -> Array:
    """The remainder of float32 `x` for the bfloat16 parameter `arrived`.

    Where `arrived` is not what `split` gives (`old + (new - old)` rounds in float32 if new is far smaller than old) it
    is the new value, and the remainder 0.
    """
    high, low = split(x)
    same = jax.lax.bitcast_convert_type(high, jnp.uint16) == jax.lax.bitcast_convert_type(arrived, jnp.uint16)
    return jnp.where(same, low, jnp.int16(0))


# --- rounding -------------------------------------------------------------------------------------------------------


def round_to(x: Array, dtype: Any) -> Array:
    """`x` rounded to the values of `dtype`, still in its own dtype.

    `x.astype(dtype).astype(x.dtype)` would do on CPU, but the GPU compiler removes the pair; it keeps this.

    Example:
        >>> round_to(jnp.float32(1.001), jnp.bfloat16)
        Array(1., dtype=float32)
    """
    info, wide = jnp.finfo(dtype), jnp.finfo(x.dtype)
    y = jax.lax.reduce_precision(x, exponent_bits=wide.nexp, mantissa_bits=min(info.nmant, wide.nmant))
    if info.nexp >= wide.nexp:
        return y
    # reduce_precision with fewer exponent bits would flush subnormal numbers to zero: 3e-5 in float16
    unit = float(info.smallest_subnormal)
    y = jnp.where(jnp.abs(x) < float(info.tiny), jnp.round(x / unit) * unit, y)
    beyond = float(np.float32(np.inf).astype(dtype))  # infinity, or NaN where dtype has none
    return jnp.where(jnp.abs(y) > float(info.max), jnp.copysign(beyond, x), y)


def stochastic_round(x: Array, key: Array) -> Array:
    """Float32 `x` rounded up or down to bfloat16, each as likely as `x` is near: right on average.

    A random number below the last place is added to the bits, and the low half dropped. Infinities and NaNs stay.

    Args:
        x: float32.
        key: a JAX random key; the same key gives the same result.

    Returns:
        bfloat16 values, still as float32.

    Example:
        >>> stochastic_round(jnp.float32([1.0, -2.5]), jax.random.key(0))
        Array([ 1. , -2.5], dtype=float32)
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    rounded = (bits + noise) & jnp.uint32(0xFFFF0000)
    finite = (bits & 0x7F800000) != 0x7F800000
    return jnp.where(finite, jax.lax.bitcast_convert_type(rounded, jnp.float32), round_to(x, jnp.bfloat16))


def difference(new: Array, old: Array) -> Array:
    """The update from one parameter to another, at least float32."""
    wide = jnp.promote_types(new.dtype, jnp.float32)
    return new.astype(wide) - old.astype(wide)


def applied(new: Array, old: Array) -> Array:
    """What `optax.apply_updates` makes of `difference(new, old)`: not quite `new` where that is far smaller than `old`.

    Example:
        >>> applied(jnp.bfloat16(3.0), jnp.bfloat16(1e9)), applied(jnp.bfloat16(3.0), jnp.bfloat16(2.0))
        (Array(0, dtype=bfloat16), Array(3, dtype=bfloat16))
    """
    update = difference(new, old)
    return (old.astype(update.dtype) + update).astype(old.dtype)


# --- the wire -------------------------------------------------------------------------------------------------------


def holds(wide: Any, narrow: Any) -> bool:
    """Whether every value of dtype `narrow` is one of `wide`; an integer dtype carries bits, so width decides.

    Example:
        >>> holds("float32", "bfloat16"), holds("float16", "bfloat16"), holds("int32", "float32")
        (True, False, True)
    """
    wide, narrow = jnp.dtype(wide), jnp.dtype(narrow)
    if jnp.issubdtype(wide, jnp.integer):
        return wide.itemsize >= narrow.itemsize
    a, b = jnp.finfo(wide), jnp.finfo(narrow)
    return a.nmant >= b.nmant and a.nexp >= b.nexp


def to_wire(x: Array, dtype: Any) -> Array:
    """A parameter's shard as it is sent: cast, or its bits as integers."""
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.integer):
        return x.astype(dtype)
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(dtype)


def from_wire(x: Array, dtype: Any) -> Array:
    """What was received, as a parameter of `dtype`."""
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(dtype)
    return jax.lax.bitcast_convert_type(x.astype(f"uint{8 * dtype.itemsize}"), dtype)
