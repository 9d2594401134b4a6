"""What kind of gradient reaches the optimizer, and how it becomes a shard.

| kind | where it comes from | what is done to it |
|---|---|---|
| reduced | plain `jit` (GSPMD), or invariant over data inside `shard_map` | already the mean: take this rank's shard |
| local | inside `shard_map`: this rank's gradient of its own mean loss | reduce-scatter, divided by data x replica |
| unreduced | Explicit axes, `P(..., unreduced={"data"})` | `jax.reshard` to the shard, not divided |
| scattered | the output of `scatter_gradients` | nothing: it is a shard |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding

from jzero.optim import collectives
from jzero.optim.partition import Leaf, Plan, make_plan

Kind = Literal["reduced", "local", "unreduced", "scattered"]
KINDS = ("auto", "local", "reduced", "unreduced")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scattered:
    """A gradient's shard inside a manual region, with the plan it was cut by.

    A pytree node around one array, so that elementwise transformations pass through it.
    """

    shard: Array  # leaf.shard_local_shape, float32
    leaf: Leaf = dataclasses.field(metadata={"static": True})


def is_scattered(x: Any) -> bool:
    """Whether `x` is a `Scattered` node (an `is_leaf` predicate)."""
    return isinstance(x, Scattered)


def manual_axes() -> tuple[str, ...]:
    """The mesh axes bound by the `shard_map` regions around the caller; empty outside of any."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def kind_of(g: Any, leaf: Leaf, replica: Sequence[str], declared: str) -> Kind:
    """Which kind one gradient is, read from its type, or as declared.

    Args:
        g: the gradient, or a `Scattered` node.
        leaf: the plan of its parameter.
        replica: the replica axes.
        declared: the `gradients` option.

    Raises:
        ValueError: it cannot be told, or what is declared contradicts the type; names the leaf and what to declare.
    """
    if is_scattered(g):
        return "scattered"
    names = [name for name in (leaf.axis, *replica) if name]
    bound = [name for name in names if name in manual_axes()]
    if len(bound) < len(names) and bound:
        raise ValueError(
            f"gradient of {leaf.path}: shard_map binds {bound} of the axes {names}; bind all or none of them"
        )
    if not bound:
        return _kind_outside(g, leaf, declared)
    if not collectives.tracks_varying(bound[0]):
        if declared in ("auto", "unreduced"):
            raise ValueError(
                f"gradient of {leaf.path}: its kind cannot be told under check_vma=False; pass gradients='local' (the "
                "gradient of each rank's own mean loss) or gradients='reduced' (already the mean)"
            )
        return "local" if declared == "local" else "reduced"
    varying = [name for name in bound if name in jax.typeof(g).manual_axis_type.varying]
    found = "local" if len(varying) == len(bound) else "reduced" if not varying else None
    if found is None:
        raise ValueError(
            f"gradient of {leaf.path}: it varies over {varying} but not over all of {bound}, so its kind cannot be told; "
            f"make it vary over all of them (jax.lax.pcast of the parameters) or over none (jax.lax.pmean)"
        )
    resident = leaf.resident and found == "local"  # a shard varies over data whether or not it is already the mean
    if declared not in ("auto", found) and not resident:
        raise ValueError(f"gradient of {leaf.path}: declared gradients='{declared}', but its type says '{found}'")
    return "reduced" if resident and declared == "reduced" else found  # type: ignore[return-value]


def _kind_outside(g: Any, leaf: Leaf, declared: str) -> Kind:
    if declared == "local":
        raise ValueError(f"gradient of {leaf.path}: gradients='local' exist only inside shard_map over '{leaf.axis}'")
    unreduced = getattr(getattr(jax.typeof(g).sharding, "spec", None), "unreduced", frozenset())
    found = "unreduced" if leaf.axis in unreduced else "reduced"
    if declared not in ("auto", found):
        raise ValueError(f"gradient of {leaf.path}: declared gradients='{declared}', but its type says '{found}'")
    return found


def to_shard(g: Any, leaf: Leaf, kind: Kind, replica: Sequence[str], dtype: Any) -> Array:
    """Phase 1 for one leaf, inside a manual region: this rank's float32 shard of the mean gradient."""
    if kind == "scattered":
        return g.shard.astype(jnp.float32)
    if kind == "local" and not leaf.resident:
        return collectives.scatter(g, leaf, replica=replica, dtype=dtype)
    if kind == "local":
        return collectives.mean_of_sums(g, leaf, replica=replica)
    if kind == "unreduced" or leaf.resident or g.shape != leaf.local_shape:
        return g.astype(jnp.float32)  # already laid out as the shards on the way in
    return collectives.take(g, leaf).astype(jnp.float32)


def lay_out(g: Array, leaf: Leaf, mesh: Mesh) -> Array:
    """Outside of any manual region: ask for the sharded layout, so that XLA emits a reduce-scatter."""
    if leaf.split is None and not leaf.resident:
        return reshard(g, NamedSharding(mesh, leaf.param_spec))
    return reshard(g, NamedSharding(mesh, leaf.shard_spec))


def reshard(x: Array, sharding: NamedSharding) -> Array:
    """`x` in another layout, under Auto and under Explicit axes."""
    if AxisType.Explicit in sharding.mesh.axis_types:
        return jax.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScatterState:
    """State of `scatter_gradients`: the plan, nothing else."""

    plan: Plan = dataclasses.field(metadata={"static": True})


def scatter_gradients(
    mesh: Mesh,
    *,
    axis: str = "data",
    replica_axis: str | Sequence[str] | None = None,
    gradients: str = "auto",
    grad_sync_dtype: Any = jnp.float32,
    param_specs: Any = None,
    stacked: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Phase 1 alone, to stand first in a chain whose next members need the mean gradient (clipping, norms, statistics).

    Clipping *before* the gradients are scattered makes XLA all-reduce the full gradient. After this transformation each
    rank holds its shard only: outside `shard_map` the same arrays in the sharded layout, inside it `Scattered` nodes.

    Args:
        mesh: the device mesh.
        axis: the axis that shards the optimizer's state.
        replica_axis: axis, or axes, over which the state is repeated.
        gradients: "auto", "local", "reduced" or "unreduced", as for `zero`.
        grad_sync_dtype: dtype on the wire.
        param_specs: shardings of the parameters, as for `zero`.
        stacked: as for `zero`.

    Returns:
        An optax transformation; its updates are float32 shards.

    Example:
        >>> import jax, jzero, optax
        >>> mesh = jzero.make_mesh(data=-1)
        >>> tx = optax.chain(
        ...     jzero.scatter_gradients(mesh), jzero.clip_by_global_norm(1.0), jzero.distributed_fused_adam(1e-3, mesh=mesh))
        >>> params = {"w": jax.numpy.ones((8, 8))}
        >>> updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    """
    replica = as_axes(replica_axis)

    def init(params: Any) -> ScatterState:
        return ScatterState(make_plan(params, mesh, axis=axis, param_specs=param_specs, stacked=stacked))

    def update(grads: Any, state: ScatterState, params: Any = None, **_: Any) -> tuple[Any, ScatterState]:
        leaves = state.plan.leaves
        flat = state.plan.flatten(grads, "gradients")
        kinds = [kind_of(g, leaf, replica, gradients) for g, leaf in zip(flat, leaves, strict=True)]
        if axis not in manual_axes():
            out = [lay_out(g, leaf, mesh).astype(jnp.float32) for g, leaf in zip(flat, leaves, strict=True)]
        else:
            out = [
                Scattered(to_shard(g, leaf, kind, replica, grad_sync_dtype), leaf)
                for g, leaf, kind in zip(flat, leaves, kinds, strict=True)
            ]
        return state.plan.unflatten(out), state

    return optax.GradientTransformationExtraArgs(init, update)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Clip by the global norm with Apex's factor, and only where that norm is right.

    g <- g * min(1, max_norm / (|g| + 1e-6)), with |g| over all leaves.

    Args:
        max_norm: largest norm that passes unchanged; positive.

    Returns:
        An optax transformation without state. It takes mean gradients outside `shard_map`, gradients that do not vary
        inside it, and what `scatter_gradients` gives.

    Raises:
        ValueError: `max_norm` is not positive; or, on update, a gradient varies over a mesh axis, so that a norm of this
            rank's part alone would clip every rank differently.

    Example:
        >>> updates, _ = clip_by_global_norm(1.0).update({"w": jnp.array([3.0, 4.0])}, optax.EmptyState())
        >>> round(float(updates["w"][1]), 3)
        0.8
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm: expected a positive number, found {max_norm}")

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        factor = clip_factor(_checked_norm(grads), max_norm)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _checked_norm(grads: Any) -> Array:
    nodes = jax.tree_util.tree_leaves_with_path(grads, is_leaf=is_scattered)
    scattered = [x for _, x in nodes if is_scattered(x)]
    total = jnp.square(collectives.global_norm([x.shard for x in scattered], [x.leaf for x in scattered]))
    for path, g in nodes:
        if is_scattered(g):
            continue
        varying = sorted(jax.typeof(g).manual_axis_type.varying)
        if varying:
            raise ValueError(
                f"clip_by_global_norm: the gradient of {jax.tree_util.keystr(path)} varies over {varying}, so its norm is "
                "this rank's alone; put jzero.scatter_gradients(mesh) before it, or use zero(..., clip_norm=...)"
            )
        total = total + jnp.sum(jnp.square(g.astype(jnp.float32)))
    return jnp.sqrt(total)


def clip_factor(norm: Array, max_norm: float) -> Array:
    """min(1, max_norm / (norm + 1e-6)), as Apex's clip_grad_norm."""
    return jnp.minimum(1.0, max_norm / (norm + 1e-6))


def as_axes(axis: str | Sequence[str] | None) -> tuple[str, ...]:
    """One axis name, several, or none, as a tuple."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
