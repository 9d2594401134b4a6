"""One record per parameter: all that is ever derived about a model's parameters is derived from a tree of these.

A model describes itself as a nested dict of `Parameter`. `abstract`, `logical_axes`, `decays` and `initialize` turn
that dict into dicts of the same structure; the modules take their arrays from such a dict.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.errors import JzeroError

Tree = dict[str, Any]
"""A nested dict; what its leaves are is said where it is used."""
Initializer = Callable[[jax.Array, tuple[int, ...]], jax.Array]
"""(key, shape) -> float32 array."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Shape, logical axes, type and initializer of one parameter.

    Args:
        shape: of one layer; `stack` puts the number of layers in front.
        axes: a logical name per dimension ("embed", "heads", …), None for one that nobody would ever split.
        dtype: what is stored; initial values are drawn in float32 and rounded once.
        initializer: (key, shape) -> float32 array.
        decay: whether weight decay applies.
        layers: 0, or how many independent copies are stacked in the first dimension of `shape`.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: Any
    initializer: Initializer
    decay: bool = True
    layers: int = 0

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"Parameter: expected an axis per dimension of {self.shape}, found {self.axes}")


def normal(std: float) -> Initializer:
    """Draws from the normal distribution with mean 0."""
    return lambda key, shape: std * jax.random.normal(key, shape, jnp.float32)


def constant(value: float) -> Initializer:
    """The same value everywhere."""
    return lambda key, shape: jnp.full(shape, value, jnp.float32)


def stack(tree: Tree, layers: int) -> Tree:
    """The records of `layers` equal layers whose parameters are stacked in front: logical axis "layers"."""

    def stacked(record: Parameter) -> Parameter:
        return dataclasses.replace(record, shape=(layers, *record.shape), axes=("layers", *record.axes), layers=layers)

    return jax.tree.map(stacked, tree)


def abstract(tree: Tree) -> Tree:
    """The tree with a `jax.ShapeDtypeStruct` in the place of each record."""
    return jax.tree.map(lambda record: jax.ShapeDtypeStruct(record.shape, record.dtype), tree)


def logical_axes(tree: Tree) -> Tree:
    """The tree with a tuple of logical axis names in the place of each record."""
    return jax.tree.map(lambda record: record.axes, tree)


def decays(tree: Tree) -> Tree:
    """The tree with a bool in the place of each record: whether weight decay applies to it."""
    return jax.tree.map(lambda record: record.decay, tree)


def initialize(tree: Tree, key: jax.Array, chunks: int = 1) -> Tree:
    """Initial values: a function of the key, a parameter's path and its layer alone.

    They depend neither on the mesh nor on what else the model has: the first two layers of a deep model are those of a
    shallow one (as long as the initializer's scale is the same). Runs under `jax.jit` with `out_shardings`, so that
    each device makes its own part only.

    Args:
        tree: nested dict of `Parameter`.
        key: a typed key (`jax.random.key`) whose values survive `vmap` and sharding (threefry).
        chunks: stacked layers come as [chunks, layers / chunks, ...], the same numbers in the same order. Drawn so, as
            a reshape of [layers, ...] would have each device of a sharded second dimension draw all layers.

    Returns:
        Nested dict of arrays.

    Raises:
        JzeroError: the key is of another kind.
    """
    check_key(key, "initialize")

    def leaf(path, record: Parameter) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        own = jax.random.fold_in(key, zlib.crc32(name.encode()))
        return _draw(record, own, chunks).astype(record.dtype)

    return jax.tree_util.tree_map_with_path(leaf, tree)


def given_or_drawn(params: Tree | None, rngs: nnx.Rngs | None, tree: Tree, name: str) -> Tree:
    """A module's parameters: those given, or initial values from the stream `params` of `rngs`.

    Raises:
        TypeError: neither is given, or both; `name` is the module's.
    """
    if (rngs is None) == (params is None):
        found = "neither" if rngs is None else "both"
        raise TypeError(
            f"{name}: expected either rngs or params, found {found}; write for example {name}(config, nnx.Rngs(0))"
        )
    return initialize(tree, cast(nnx.Rngs, rngs).params()) if params is None else params


def _draw(record: Parameter, key: jax.Array, chunks: int) -> jax.Array:
    if not record.layers:
        return record.initializer(key, record.shape)
    layer = lambda number: record.initializer(jax.random.fold_in(key, number), record.shape[1:])
    layers = jax.vmap(layer)
    if chunks == 1:
        return layers(jnp.arange(record.layers))
    return jax.vmap(layers)(jnp.arange(record.layers).reshape(chunks, -1))


def check_key(key: jax.Array, name: str) -> None:
    """Raises `JzeroError` unless draws from `key` stay the same under `vmap` and any sharding."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    found = str(jax.random.key_impl(key)) if typed else f"an array of {key.dtype}"
    if found != "threefry2x32":
        raise JzeroError(
            f"{name}: expected a threefry key, whose draws do not depend on vmap or sharding, found {found}; "
            'make it with jax.random.key(seed, impl="threefry2x32")'
        )
