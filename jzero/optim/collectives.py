"""The data-axis collectives: reduce-scatter of a gradient, all-gather of a parameter, all-reduce of a norm.

Every function works on one device's part, inside a manual region (`jax.shard_map`), and takes the leaf's plan. Nothing
else moves bytes over the data and replica axes.

    scatter  full gradient of this rank  -> this rank's shard of the mean
    gather   this rank's shard           -> full parameter
    take     full parameter              -> this rank's shard, without communication
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from jzero.fp8.numerics import Quantised
from jzero.optim import precision, regions
from jzero.optim.partition import Leaf


def take(x: Any, leaf: Leaf) -> Any:
    """This rank's shard of a full leaf, in the leaf's dtype. No communication.

    Args:
        x: `leaf.local_shape`, the same on every data rank; or such a `Quantised`. Where `leaf.resident`, the shard.
        leaf: the plan.

    Returns:
        `leaf.shard_local_shape`; of a `Quantised` also its scale, which is whole on every rank.
    """
    if isinstance(x, Quantised):
        return Quantised(take(x.value, leaf), x.scale)
    if leaf.resident:
        return x
    if leaf.axis is None:
        return x.reshape(leaf.shard_local_shape)
    rank = jax.lax.axis_index(leaf.axis)
    if leaf.split is None:
        flat = _flatten(x, leaf)
        piece = jax.lax.dynamic_slice_in_dim(flat, rank * leaf.flat_size, leaf.flat_size, axis=flat.ndim - 1)
        return piece.reshape(leaf.shard_local_shape)
    size = leaf.shard_local_shape[leaf.split]
    return jax.lax.dynamic_slice_in_dim(x, rank * size, size, axis=leaf.split)


def scatter(
    g: Array, leaf: Leaf, *, replica: Sequence[str] = (), dtype: Any = jnp.float32, behind: Any = None
) -> Array:
    """Phase 1: this rank's shard of the gradient's mean over the data and replica axes.

    A reduce-scatter over the data axis, then an all-reduce of the shard over the replica axes (Apex: distributed and
    redundant process groups, `average_grad_sync=True`).

    Args:
        g: `leaf.local_shape`, the gradient of this rank's own mean loss.
        leaf: the plan.
        replica: names of the axes over which the state is repeated.
        dtype: dtype on the wire, in which the sum accumulates (Apex: `grad_sync_dtype`).
        behind: arrays that are computed before the result is used, so that the reduce-scatter hides behind them.

    Returns:
        `leaf.shard_local_shape`, float32.
    """
    ranks = leaf.ranks
    for name in replica:
        ranks *= jax.lax.axis_size(name)
    if g.size == 0:
        return jnp.zeros(leaf.shard_local_shape, jnp.float32)
    g = g.astype(dtype)
    early = jnp.dtype(dtype) == jnp.float16  # a sum over many ranks overflows its range
    if early:
        g = g / ranks
    if leaf.axis is None:
        g = g.reshape(leaf.shard_local_shape)
    elif leaf.split is None:
        g = jax.lax.psum_scatter(_flatten(g, leaf), leaf.axis, scatter_dimension=leaf.stacked, tiled=True)
        g = g.reshape(leaf.shard_local_shape)
    else:
        g = _scatter_along(g, leaf.axis, leaf.split, leaf.ranks)
    g = g if behind is None else after(behind, g)
    if replica:
        g = jax.lax.psum(g, tuple(replica))
    g = g.astype(jnp.float32)
    return g if early or ranks == 1 else g / ranks


def mean_of_sums(shard: Array, leaf: Leaf, *, replica: Sequence[str] = ()) -> Array:
    """A shard that autodiff has summed over the data axis (a parameter kept sharded), as the mean; float32.

    Over the replica axes it may or may not be summed already: it is where it does not vary.
    """
    ranks = leaf.ranks
    for name in replica:
        ranks *= jax.lax.axis_size(name)
    total = shard.astype(jnp.float32)
    owed = tuple(n for n in replica if not regions.tracks_varying(n) or n in regions.varying_axes(shard))
    return (jax.lax.psum(total, owed) if owed else total) / ranks


def gather(shard: Any, leaf: Leaf, *, dtype: Any = None, to: Literal["varying", "invarying"] = "varying") -> Any:
    """Phase 3: the full leaf from its shards.

    Args:
        shard: `leaf.shard_local_shape`; or a `Quantised`, which crosses the wire as bytes, its scale not at all.
        leaf: the plan.
        dtype: dtype on the wire (Apex: `param_sync_dtype`); default: the shard's own.
        to: "varying" where autodiff should see a copy per rank; "invarying" where the result leaves the manual region
            as a replicated array.

    Returns:
        `leaf.local_shape`, in the wire's dtype.
    """
    if isinstance(shard, Quantised):
        full = gather(jax.lax.bitcast_convert_type(shard.value, jnp.uint8), leaf, to=to)
        return Quantised(jax.lax.bitcast_convert_type(full, shard.value.dtype), shard.scale)
    if leaf.resident and leaf.spec[leaf.split or 0][-1] != leaf.axis:
        raise ValueError(
            f"{leaf.path}: its dimension {leaf.split} is split over {leaf.spec[leaf.split or 0]}, so a gather over "
            f"'{leaf.axis}' alone gives no contiguous part; expected '{leaf.axis}' last"
        )
    x = shard if dtype is None else shard.astype(dtype)
    if x.size == 0:
        return jnp.zeros(leaf.local_shape, x.dtype)
    if leaf.axis is not None:
        dimension = leaf.stacked if leaf.split is None else leaf.split
        x = _flat_view(x, leaf) if leaf.split is None else x
        x = _gather_along(x, leaf.axis, dimension, to)
    if leaf.split is None:
        lead, size = _lead_and_size(leaf)
        x = x.reshape(*lead, leaf.ranks * leaf.flat_size)[..., :size]
    return x.reshape(leaf.local_shape)


def share(new: Any, update: Array, old: Any, leaf: Leaf, wire: Any, *, direct: bool) -> Any:
    """Phase 3 of one leaf: on every rank the new parameter, or the update that leads to it.

    Args:
        new: the new parameter's shard.
        update: the shard of what was added.
        old: the parameter so far, whole unless it is resident.
        leaf: the plan.
        wire: dtype on the wire; an integer one carries bits.
        direct: whether the parameter is wanted.
    """
    if leaf.quantised:
        return new if leaf.resident else gather(new, leaf, to="invarying")
    as_update = not direct and wire == old.dtype == jnp.float32  # old + update is what the owner computed, exactly
    value = update if as_update else precision.to_wire(new, wire)
    full = value if leaf.resident else gather(value, leaf, to="invarying")
    if not as_update:
        full = precision.from_wire(full, old.dtype)
    return full if as_update or direct else precision.difference(full, old)


def global_norm(shards: Sequence[Array], leaves: Sequence[Leaf]) -> Array:
    """L2 norm of a whole tree of gradients from its shards: float32 scalar, the same on every rank.

    Each element counts once, whatever axes split its leaf: leaves are grouped by those axes, and each group's sum of
    squares is one scalar all-reduce. Padding is zero and adds nothing. Axes that no region binds are XLA's to sum over.
    """
    total = jnp.float32(0)
    for axes, value in _squares(shards, leaves).items():
        total = total + (jax.lax.psum(vary(value, axes), axes) if axes else value)
    return jnp.sqrt(total)


def norm_and_totals(
    shards: Sequence[Array], leaves: Sequence[Leaf], values: Sequence[Array], axes: Sequence[str]
) -> tuple[Array, list[Array]]:
    """`global_norm`, and the sums of float32 scalars over all ranks of `axes`, in one all-reduce over `axes`.

    Leaves that other axes split too take one scalar all-reduce over those axes before it.

    Args:
        shards: gradient shards of a manual region over the whole mesh.
        leaves: their plan.
        values: scalars of this rank.
        axes: the axes that split the batch.

    Returns:
        The norm, and a sum for each of `values`: float32 scalars, the same on every rank.
    """
    squares = jnp.float32(0)
    for split, value in _squares(shards, leaves).items():
        across = tuple(name for name in split if name not in axes)
        value = jax.lax.psum(vary(value, across), across) if across else value
        copies = math.prod(jax.lax.axis_size(name) for name in axes if name not in split)
        squares = squares + value / copies
    sums = jax.lax.psum(vary(jnp.stack([squares, *(vary(v, axes) for v in values)]), axes), tuple(axes))
    return jnp.sqrt(sums[0]), list(sums[1:])


def _squares(shards: Sequence[Array], leaves: Sequence[Leaf]) -> dict[tuple[str, ...], Array]:
    """Sums of squares of this rank's shards, by the axes that split them."""
    bound = regions.bound_axes()
    sums: dict[tuple[str, ...], Array] = {}
    for shard, leaf in zip(shards, leaves, strict=True):
        key = tuple(sorted(name for name in leaf.axes if name in bound))
        with jax.named_scope("zero_norm"):
            square = jnp.sum(jnp.square(shard.astype(jnp.float32)))
        sums[key] = sums[key] + square if key in sums else square
    return sums


def after(first: Any, then: Any) -> Any:
    """`then` as it is, but what is computed from one of its arrays waits for `first`.

    A barrier's results vary over every axis that one of its operands varies over. So an array waits for those arrays
    of `first` alone that vary over none but its own axes.
    """
    flat, treedef = jax.tree.flatten(then)
    kinds = [regions.varying_axes(x) for x in flat]
    for axes in dict.fromkeys(kinds):  # the same order on every host
        mine = [i for i, own in enumerate(kinds) if own == axes]
        before = [x for x in jax.tree.leaves(first) if regions.varying_axes(x) <= axes]
        _, after = jax.lax.optimization_barrier((before, [flat[i] for i in mine]))
        for i, x in zip(mine, after, strict=True):
            flat[i] = x
    return treedef.unflatten(flat)


def total(values: Any, axes: Sequence[str]) -> Any:
    """The sum over all ranks of `axes` of scalars (a tree): what a step reports, the same on every rank."""
    return jax.lax.psum(values, tuple(axes))


def vary(x: Array, axes: Sequence[str]) -> Array:
    """`x`, marked as a value of each rank's own over `axes`, so that autodiff does not sum its gradient over them.

    Without varying-axes tracking (`check_vma=False`) there is nothing to mark and `x` comes back unchanged.
    """
    missing = tuple(name for name in axes if name not in regions.varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing and regions.tracks_varying(axes[0]) else x


def _gather_along(x: Array, axis: str, dimension: int, to: Literal["varying", "invarying"]) -> Array:
    """All-gather along a dimension; where others lie before it, as whole shards one after the other, then in order.

    NCCL puts shards one after the other. Left to itself XLA lays the *shard* out with `dimension` first, which takes
    the update apart: new values go to memory in float32 and are read again.
    """
    if jax.lax.axis_size(axis) == 1 and not regions.tracks_varying(axis):
        return x  # XLA's CPU compiler keeps a gather of one rank, and copies for it
    if math.prod(x.shape[:dimension]) == 1:
        return jax.lax.all_gather(x, axis, axis=dimension, tiled=True, to=to)
    parts = jnp.moveaxis(jax.lax.all_gather(x, axis, to=to), 0, dimension)
    return parts.reshape(*x.shape[:dimension], -1, *x.shape[dimension + 1 :])


def _scatter_along(g: Array, axis: str, dimension: int, ranks: int) -> Array:
    """Reduce-scatter along a dimension, in the same manner."""
    if math.prod(g.shape[:dimension]) == 1:
        return jax.lax.psum_scatter(g, axis, scatter_dimension=dimension, tiled=True)
    parts = g.reshape(*g.shape[:dimension], ranks, -1, *g.shape[dimension + 1 :])
    return jax.lax.psum_scatter(jnp.moveaxis(parts, dimension, 0), axis)


def _lead_and_size(leaf: Leaf) -> tuple[tuple[int, ...], int]:
    """Shape of the stacked dimensions, and the number of elements of one layer."""
    return leaf.local_shape[: leaf.stacked], math.prod(leaf.local_shape[leaf.stacked :])


def _flatten(x: Array, leaf: Leaf) -> Array:
    """[*stacked, ranks * flat_size]: the leaf as one padded vector per layer."""
    lead, size = _lead_and_size(leaf)
    flat = x.reshape(*lead, size)
    return jnp.pad(flat, [(0, 0)] * len(lead) + [(0, leaf.flat_size * leaf.ranks - size)])


def _flat_view(x: Array, leaf: Leaf) -> Array:
    return x.reshape(*leaf.shard_local_shape[: leaf.stacked], leaf.flat_size)
