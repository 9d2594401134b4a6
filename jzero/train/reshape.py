"""A state saved on one number of ranks, taken up on another.

Most leaves have the same shape on every mesh, and only their shards differ. Three kinds depend on the number of ranks:

    flattened   a leaf no dimension of which divides evenly is stored flattened and padded (`jzero.optim.partition`):
                parameter [L, 5, 7], one stacked dimension: on 2 ranks [L, 1, 36], on 4 [L, 1, 36], on 5 [L, 5, 7].
                All of these forms hold the same numbers in the same order, then zeros: nothing is lost.
    chunked     stages with several chunks of layers store [V, L / V, ...] instead of [L, ...]: the same numbers in the
                same order.
    scaled      a state with one scale per rank (`value` and `scale`, `jzero.optim.precision`) is decoded with the
                scales it was saved with and stored with those of the new ranks: rounded once more, as in every step.

FP8 parameters (`value` and one `scale` per layer) are none of the last: no number of ranks changes their scales, and
the values move as those of any parameter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jzero.errors import JzeroError
from jzero.optim import precision
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


def orders(trees: Any, leaves: Leaves) -> dict[str, str]:
    """How the numbers of arrays lie where that depends on the mesh but may not show in the shape: by name.

    That is where other axes than data split a layer's parameter, and its shards are flattened besides. Such an array is
    at home on its mesh. (Axes that split the stack of layers change no order, and what is whole has the model's.)

    Args:
        trees: nested dicts of arrays, or of `jax.ShapeDtypeStruct`s with shardings.
        leaves: the parameters of the model.
    """
    found = {}
    for name, x in named(trees):
        leaf = parameter_of(_scaled_part(name, leaves)[0], leaves)
        if leaf is None or leaf.split is not None or not _over(x, leaf.axis):
            continue
        parts = math.prod(leaf.others[leaf.stacked :])
        if parts > 1:
            found[name] = f"flattened over data {leaf.ranks} inside of {parts} parts"
    return found


def check_orders(saved: Mapping[str, str], wanted: Any, leaves: Leaves) -> None:
    """Raises where what is wanted would come back with its numbers in another order.

    Args:
        saved: what `orders` gave when it was saved.
        wanted: nested dicts of `jax.ShapeDtypeStruct`s with shardings.
        leaves: the parameters of the model, on the mesh now.

    Raises:
        JzeroError: names the first such array.
    """
    now = orders(wanted, leaves)
    for name in sorted(name for name, _ in named(wanted)):
        if saved.get(name) != now.get(name):
            found, expected = saved.get(name, "whole"), now.get(name, "whole")
            raise JzeroError(
                f"checkpoint: {name} is {found}, expected {expected}: no dimension of it divides evenly, so it cannot "
                "move to another number of data or tensor ranks; use the mesh it was saved on"
            )


def _over(x: Any, axis: str | None) -> bool:
    """Whether an array is split over a mesh axis."""
    spec = getattr(x.sharding, "spec", ())
    return any(axis in ((names,) if isinstance(names, str) else names or ()) for names in spec)


def is_form(shape: tuple[int, ...], leaf: Leaf) -> bool:
    """Whether a shape is that of the whole parameter, or of it flattened and padded for some number of ranks; its
    layers in one dimension or, in chunks, in two.

    Where other axes than data split a layer's parameter, the order of the numbers depends on them: only its own shapes
    count.
    """
    layers, rest = leaf.shape[: leaf.stacked], leaf.shape[leaf.stacked :]
    lead = len(shape) - max(len(rest), 1)  # dimensions that enumerate layers
    if shape in (leaf.shape, leaf.shard_shape):
        return True
    if math.prod(shape[: max(lead, 0)]) != math.prod(layers) or lead not in ((1, 2) if layers else (0,)):
        return False
    if shape[lead:] in (rest, leaf.shard_shape[leaf.stacked :]):
        return True
    whole = math.prod(leaf.others[leaf.stacked :]) == 1
    return whole and math.prod(shape[lead:-1]) == 1 and shape[-1] >= math.prod(rest)


def readable(wanted: Any, found: Any, leaves: Leaves) -> Any:
    """What to read so as to get `wanted`: leaves that were saved in another form of their parameter, in that form.

    Args:
        wanted: nested dicts of `jax.ShapeDtypeStruct`s with shardings.
        found: nested dicts of what was saved (anything with a shape).
        leaves: the parameters of the model.
    """
    saved = {name: tuple(x.shape) for name, x in named(found)}

    def one(path: Any, want: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = _name(path)
        if name not in saved or saved[name] == want.shape:
            return want
        shape: tuple[int, ...] = saved[name]
        base, part = _scaled_part(name, leaves)
        leaf = parameter_of(base, leaves)
        if leaf is None:
            return want
        if part == "scale":
            fits = _cuts(shape, saved.get(f"{base}/value", ()))
        elif part == "layers":
            fits = math.prod(shape) == math.prod(want.shape)
        else:
            fits = is_form(shape, leaf) and is_form(want.shape, leaf)
        return _as_saved(shape, want) if fits else want

    return jax.tree_util.tree_map_with_path(one, wanted)


def to_wanted(loaded: Any, wanted: Any, leaves: Leaves, note: Callable[[str], None] = lambda text: None) -> Any:
    """What was read as `readable` says -> `wanted`.

    Args:
        loaded: nested dicts of arrays.
        wanted: nested dicts of `jax.ShapeDtypeStruct`s with shardings.
        leaves: the parameters of the model.
        note: called with one line where numbers were rounded.
    """
    arrays, wants = dict(named(loaded)), dict(named(wanted))
    done: dict[str, Array] = {}
    rounded: dict[str, str] = {}
    for name, x in arrays.items():
        base, part = _scaled_part(name, leaves)
        if part == "value" and any(arrays[n].shape != wants[n].shape for n in (name, f"{base}/scale")):
            stored = precision.Scaled(x, arrays[f"{base}/scale"])
            want = precision.Scaled(wants[name], wants[f"{base}/scale"])
            done[name], done[f"{base}/scale"] = _to_scales(stored, _leaf(base, leaves), want)
            rounded[base] = jnp.dtype(x.dtype).name
        elif part == "layers" and x.shape != wants[name].shape:
            done[name] = jax.device_put(x.reshape(wants[name].shape), wants[name].sharding)
        elif part != "scale" and x.shape != wants[name].shape:
            done[name] = _to_form(x, _leaf(base, leaves), wants[name])
    if rounded:
        note(
            f"{len(rounded)} arrays of optimizer state have one scale per data rank, and their number changed: rounded "
            f"once more to {' and '.join(sorted(set(rounded.values())))}, as in a step"
        )
    return jax.tree_util.tree_map_with_path(lambda path, x: done.get(_name(path), x), loaded)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _leaf(name: str, leaves: Leaves) -> Leaf:
    leaf = parameter_of(name, leaves)
    assert leaf is not None, name
    return leaf


def _scaled_part(name: str, leaves: Leaves) -> tuple[str, str]:
    """The name of what a leaf is a part of, and which: "value" or "scale" of a scaled array, "layers" where there is a
    number per layer (scales of FP8 parameters and their history), "" for any other leaf."""
    base, _, last = name.rpartition("/")
    inside = last in precision.Scaled._fields and parameter_of(name, leaves) is None
    leaf = parameter_of(base if inside else name, leaves)
    if leaf is not None and leaf.quantised:
        if inside and name.startswith("params/"):
            return base, "layers" if last == "scale" else ""
        if "/fp8/" in name:
            return name, "layers"
    return (base, last) if inside and leaf is not None else (name, "")


def _cuts(parts: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an array of that shape can be cut into that many blocks per dimension."""
    return len(parts) == len(shape) and all(n % p == 0 for n, p in zip(shape, parts, strict=True))


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
    return jax.jit(functools.partial(_formed, leaf=leaf, shape=wanted.shape), out_shardings=wanted.sharding)(x)


def _formed(x: Array, leaf: Leaf, shape: tuple[int, ...]) -> Array:
    if x.shape == shape:
        return x
    layers, size = (math.prod(part) for part in (leaf.shape[: leaf.stacked], leaf.shape[leaf.stacked :]))
    flat = x.reshape(layers, -1)[:, :size]
    room = math.prod(shape) // layers
    return jnp.pad(flat, [(0, 0), (0, room - size)]).reshape(shape)


def _to_scales(stored: precision.Scaled, leaf: Leaf, wanted: precision.Scaled) -> precision.Scaled:
    """A scaled array -> the form and the scales of `wanted`."""

    def change(stored: precision.Scaled) -> precision.Scaled:
        x = _formed(precision.read_blocks(stored), leaf, wanted.value.shape)
        return precision.store_blocks(x, wanted.value.dtype, wanted.scale.shape)

    shardings = precision.Scaled(wanted.value.sharding, wanted.scale.sharding)
    return jax.jit(change, out_shardings=shardings)(stored)
