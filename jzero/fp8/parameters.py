"""FP8 parameters: chosen leaves of any tree, stored as one byte per element and one scale per tensor or layer.

    params = quantise(params, where=r"kernel")              {"kernel": Quantised(E4M3 [4, 3], float32 []), "bias": ...}
    grads = jax.grad(loss)(params, batch)                   whose layers use fp8.dot.dot(x, w), or dequantise(w)
    params, state = tx.step(grads, state, params)           jzero.zero keeps the masters and the scales

A `Quantised` leaf is one parameter: its path is that of the array it replaced. Its gradient is an array of the value's
shape, in 16 or 32 bits; `jax.grad` gives it as `Quantised(gradient, zero)`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jzero.errors import JzeroError
from jzero.fp8 import numerics
from jzero.fp8.numerics import E4M3, Quantised, largest
from jzero.fp8.recipes import CurrentScaling, DelayedScaling

Where = str | Callable[[str], bool]
PerTensor = CurrentScaling | DelayedScaling


def is_quantised(x: Any) -> bool:
    """Whether `x` is a `Quantised` node (an `is_leaf` predicate)."""
    return isinstance(x, Quantised)


def over_layers(scale: Array, like: Any) -> Array:
    """A scale per layer [*stacked], broadcastable to an array whose first dimensions are the layers."""
    return scale.reshape(*scale.shape, *[1] * (like.ndim - scale.ndim))


def quantise(
    params: Any, where: Where, *, recipe: PerTensor | None = None, stacked: Callable[[str], int] | None = None
) -> Any:
    """Turn chosen leaves of a tree into FP8 parameters, with scales from their own largest magnitudes.

    Args:
        params: any tree of arrays; outside of `shard_map`.
        where: which leaves: a regular expression that is searched for in a leaf's path (`jax.tree_util.keystr`), or a
            function of the path.
        recipe: margin and power of two of the scales, as given to `zero(fp8_recipe=...)`; default `DelayedScaling()`.
        stacked: function from a leaf's path to its number of leading layer dimensions, as given to `zero`: each layer
            has a scale of its own. Default: one scale per leaf.

    Returns:
        The tree, with `Quantised(E4M3 [...], float32 [*stacked])` in place of the chosen leaves.

    Raises:
        JzeroError: no leaf is chosen; a chosen one is no floating-point array, or is FP8 already.

    Example:
        >>> params = {"kernel": jnp.full((2, 3), 0.5), "bias": jnp.zeros(3)}
        >>> fp8 = quantise(params, "kernel")
        >>> fp8["kernel"].value.dtype, float(fp8["kernel"].scale), fp8["bias"].dtype
        (dtype(float8_e4m3fn), 896.0, dtype('float32'))
    """
    recipe = checked(recipe or DelayedScaling(), "quantise: recipe")
    chosen = where if callable(where) else lambda path: re.search(where, path) is not None
    paths = []

    def one(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path)
        paths.append(name)
        if not chosen(name):
            return x
        if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
            found = getattr(x, "dtype", type(x).__name__)
            raise JzeroError(f"{name}: expected a floating-point array to store as FP8, found {found}; narrow `where`")
        sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
        return _quantising(stacked(name) if stacked else 0, recipe, sharding)(x)

    out = jax.tree_util.tree_map_with_path(one, params, is_leaf=is_quantised)
    if not any(map(chosen, paths)):
        raise JzeroError(f"quantise: expected `where` to choose a leaf, found none that it does among {paths[:8]}")
    return out


def dequantise(params: Any, dtype: Any = jnp.bfloat16) -> Any:
    """A tree whose FP8 parameters are plain arrays; differentiable: the gradient passes as it is, in `dtype`.

    Args:
        params: any tree; leaves that are not `Quantised` stay.
        dtype: of the arrays.

    Example:
        >>> w = quantise({"w": jnp.full((2, 3), 0.5)}, "w")
        >>> dequantise(w)["w"].dtype, float(dequantise(w)["w"][0, 0])
        (dtype(bfloat16), 0.5)
        >>> jax.grad(lambda w: 3 * dequantise(w, jnp.float32)["w"].sum())(w)["w"].value[0]
        Array([3., 3., 3.], dtype=float32)
    """
    one = lambda x: _dequantised(x, jnp.dtype(dtype)) if is_quantised(x) else x
    return jax.tree.map(one, params, is_leaf=is_quantised)


def from_values(x: Array, *, stacked: int, recipe: PerTensor) -> Quantised:
    """A floating array as FP8 parameter, with scales from its own largest magnitudes; arguments as for `quantise`."""
    amax = numerics.amax(x, tuple(range(stacked, x.ndim)))
    scale = recipe.scale(amax, jnp.ones_like(amax), largest(E4M3))
    return Quantised(numerics.quantise(x, over_layers(scale, x), E4M3), scale)


def as_arrays(grads: Any) -> Any:
    """Gradients as `jax.grad` gives them, with one array for each FP8 parameter: that of its value."""
    return jax.tree.map(lambda g: g.value if is_quantised(g) else g, grads, is_leaf=is_quantised)


def checked(recipe: Any, where: str) -> PerTensor:
    """The recipe, if it is one that FP8 parameters can have."""
    if not isinstance(recipe, PerTensor):
        raise JzeroError(
            f"{where}: FP8 parameters have a scale per tensor or layer: expected DelayedScaling or CurrentScaling, "
            f"found {type(recipe).__name__}"
        )
    return recipe


@functools.lru_cache(maxsize=64)
def _quantising(stacked: int, recipe: PerTensor, sharding: Any) -> Callable[[Array], Quantised]:
    """The cast of a leaf that lies so; its scale lies as its layers do."""

    quantise = functools.partial(from_values, stacked=stacked, recipe=recipe)
    if not isinstance(sharding, NamedSharding):
        return jax.jit(quantise)
    spec = list(sharding.spec[:stacked])
    while spec and spec[-1] is None and AxisType.Explicit not in sharding.mesh.axis_types:
        spec.pop()  # as `jit` writes it, or a step would be compiled twice
    layers = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return jax.jit(quantise, out_shardings=Quantised(sharding, layers))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _dequantised(w: Quantised, dtype: Any) -> Array:
    return numerics.dequantise(w.value, over_layers(w.scale, w.value), dtype)


def _dequantised_forward(w: Quantised, dtype: Any) -> tuple[Array, Array]:
    return _dequantised(w, dtype), w.scale


def _dequantised_backward(dtype: Any, scale: Array, g: Array) -> tuple[Quantised]:
    return (Quantised(g, jnp.zeros_like(scale)),)


_dequantised.defvjp(_dequantised_forward, _dequantised_backward)
