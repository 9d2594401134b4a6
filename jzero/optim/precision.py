"""How one array of optimizer state is stored: pairs of pure functions between float32 and the stored form.

No mesh and no tree appears here. A codec's `encode` takes the float32 value that the update computed; its `decode`
gives the float32 value that the next update starts from.
"""

from __future__ import annotations

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
        encode: float32 array -> what is stored (a tree of arrays of the same leading shape).
        decode: what is stored -> float32 array.
    """

    name: str
    encode: Callable[[Array], Any]
    decode: Callable[[Any], Array]


def cast(dtype: Any) -> Codec:
    """Storage in a plain floating dtype, rounded to nearest.

    Example:
        >>> cast("bfloat16").decode(cast("bfloat16").encode(jnp.float32(1.001)))
        Array(1., dtype=float32)
    """
    dtype = jnp.dtype(dtype)
    return Codec(dtype.name, lambda x: x.astype(dtype), lambda x: x.astype(jnp.float32))


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
