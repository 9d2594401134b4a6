"""A state saved on one number of ranks, taken up on another.

Most leaves have the same shape on every mesh, and only their shards differ. A leaf that no dimension of which divides
evenly is stored flattened and padded (`jzero.optim.partition`), and that shape depends on the number of ranks:

    parameter [L, 5, 7], one stacked dimension      on 2 ranks [L, 1, 36], on 4 ranks [L, 1, 36], on 5 ranks [L, 5, 7]

All of these forms hold the same numbers in the same order, then zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jzero.optim.partition import Leaf, Plan
from jzero.train.state_tree import named

Leaves = Mapping[str, Leaf]


def parameters(plan: Plan) -> Leaves:
    """The parameters of a model by name, as `state_tree.named` writes it: "blocks/mlp/up"."""
    return dict(named(plan.unflatten(plan.leaves)))


def parameter_of(name: str, leaves: Leaves) -> Leaf | None:
    """The parameter that a leaf of a state belongs to: "optimizer/opt/inner/0/mu/blocks/mlp/up" to "blocks/mlp/up"."""
    parts = name.split("/")
    for first in range(len(parts)):
        leaf = leaves.get("/".join(parts[first:]))
        if leaf is not None:
            return leaf
    return None


def is_form(shape: tuple[int, ...], leaf: Leaf) -> bool:
    """Whether a shape is that of the whole parameter, or of it flattened and padded for some number of ranks.

    Where other axes than data split the parameter, the order of the numbers depends on them: only its own shapes count.
    """
    if shape in (leaf.shape, leaf.shard_shape):
        return True
    lead, rest = leaf.shape[: leaf.stacked], leaf.shape[leaf.stacked :]
    return (
        math.prod(leaf.others) == 1
        and len(shape) == max(len(leaf.shape), leaf.stacked + 1)
        and shape[: leaf.stacked] == lead
        and math.prod(shape[leaf.stacked : -1]) == 1
        and shape[-1] >= math.prod(rest)
    )


def readable(wanted: Any, found: Any, leaves: Leaves) -> Any:
    """What to read so as to get `wanted`: leaves that were saved in another form of their parameter, in that form.

    Args:
        wanted: nested dicts of `jax.ShapeDtypeStruct`s with shardings.
        found: nested dicts of what was saved (anything with a shape).
        leaves: the parameters of the model.
    """
    saved = dict(named(found))

    def one(path: Any, want: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        leaf = parameter_of(name, leaves)
        if leaf is None or name not in saved or saved[name].shape == want.shape:
            return want
        shape = tuple(saved[name].shape)
        return _as_saved(shape, want) if is_form(shape, leaf) and is_form(want.shape, leaf) else want

    return jax.tree_util.tree_map_with_path(one, wanted)


def to_wanted(loaded: Any, wanted: Any, leaves: Leaves) -> Any:
    """What was read as `readable` says -> `wanted`."""

    def one(path: Any, x: Array, want: jax.ShapeDtypeStruct) -> Array:
        if x.shape == want.shape:
            return x
        leaf = parameter_of(jax.tree_util.keystr(path, simple=True, separator="/"), leaves)
        assert leaf is not None
        return _to_form(x, leaf, want)

    return jax.tree_util.tree_map_with_path(one, loaded, wanted)


def _as_saved(shape: tuple[int, ...], wanted: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """A leaf as it is to be read: of the saved shape, over as many of the devices of `wanted` as divide it."""
    sharding: Any = wanted.sharding
    if isinstance(sharding, NamedSharding):
        axes = tuple(name for names in sharding.spec for name in ((names,) if isinstance(names, str) else names or ()))
        size = math.prod(sharding.mesh.shape[name] for name in axes)
        dimension = next((i for i, n in enumerate(shape) if axes and n % size == 0), None)
        spec = PartitionSpec() if dimension is None else PartitionSpec(*[None] * dimension, axes)
        sharding = NamedSharding(sharding.mesh, spec)
    return jax.ShapeDtypeStruct(shape, wanted.dtype, sharding=sharding)


def _to_form(x: Array, leaf: Leaf, wanted: jax.ShapeDtypeStruct) -> Array:
    """A leaf in any of its forms -> the form of `wanted`, with its sharding."""

    def change(x: Array) -> Array:
        lead, size = leaf.shape[: leaf.stacked], math.prod(leaf.shape[leaf.stacked :])
        flat = x.reshape(*lead, -1)[..., :size]
        room = math.prod(wanted.shape[leaf.stacked :])
        return jnp.pad(flat, [(0, 0)] * len(lead) + [(0, room - size)]).reshape(wanted.shape)

    return jax.jit(change, out_shardings=wanted.sharding)(x)
