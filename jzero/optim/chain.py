"""Phase 1 and clipping as members of an optax chain: `scatter_gradients` first, then whatever needs the mean gradient.

    optax.chain(scatter_gradients(mesh), clip_by_global_norm(1.0), distributed_fused_adam(1e-3, mesh=mesh))

`optax.clip_by_global_norm` in front of the optimizer clips every rank by its own norm inside `shard_map`, and outside
of it, with Explicit axes, makes XLA all-reduce the whole gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh

from jzero.optim import checks, collectives, regions
from jzero.optim import gradients as kinds_
from jzero.optim.partition import Plan, make_plan


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

    A norm taken *before* the gradients are scattered can cost an all-reduce of all of them. After this transformation
    each rank holds its shard only: outside `shard_map` the same arrays in the sharded layout, inside `Scattered` nodes.

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
        >>> adam = jzero.distributed_fused_adam(1e-3, mesh=mesh)
        >>> tx = optax.chain(jzero.scatter_gradients(mesh), jzero.clip_by_global_norm(1.0), adam)
        >>> params = {"w": jax.numpy.ones((8, 8))}
        >>> updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    """
    checks.check_mesh(mesh)
    replica = regions.replica_axes(replica_axis, mesh, axis)

    def init(params: Any) -> ScatterState:
        return ScatterState(make_plan(params, mesh, axis=axis, param_specs=param_specs, stacked=stacked))

    def update(updates: Any, state: ScatterState, params: Any = None, **_: Any) -> tuple[Any, ScatterState]:
        plan, bound = state.plan.like(updates), regions.bound_axes()
        values, kinds = kinds_.prepare(updates, plan, replica, gradients, grad_sync_dtype, mesh)
        if not bound:
            return plan.unflatten([g.astype(jnp.float32) for g in values]), state
        scatter = _scatter_program(plan, kinds, replica, jnp.dtype(grad_sync_dtype), mesh, bound)
        shards = [kinds_.Scattered(x, leaf) for x, leaf in zip(scatter(values), plan.leaves, strict=True)]
        return plan.unflatten(shards), state

    return optax.GradientTransformationExtraArgs(cast(Any, init), cast(Any, update))


@functools.lru_cache(maxsize=64)
def _scatter_program(
    plan: Plan, kinds: tuple[kinds_.Kind, ...], replica: tuple[str, ...], dtype: Any, mesh: Mesh, bound: tuple[str, ...]
) -> Callable[[list[Array]], list[Array]]:
    def scatter(values: list[Array]) -> list[Array]:
        return [
            kinds_.to_shard(g, leaf, kind, replica, dtype, bound)
            for g, leaf, kind in zip(values, plan.leaves, kinds, strict=True)
        ]

    out_specs = [leaf.shard_spec for leaf in plan.leaves]
    return regions.enter(scatter, mesh, (kinds_.grad_specs(plan, kinds, bound),), out_specs, bound)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Clip by the global norm with Apex's factor, and only where that norm is right.

    g <- g * min(1, max_norm / (|g| + 1e-6)), with |g| over all leaves.

    Args:
        max_norm: largest norm that passes unchanged; positive.

    Returns:
        An optax transformation without state. It takes mean gradients outside `shard_map`, gradients that do not vary
        inside it, and what `scatter_gradients` gives.

    Raises:
        ValueError: `max_norm` is not positive; or, on update, a gradient varies over a mesh axis (or may do so, under
            `check_vma=False`), so that the norm of this rank's part would clip every rank differently.

    Example:
        >>> updates, _ = clip_by_global_norm(1.0).update({"w": jnp.array([3.0, 4.0])}, optax.EmptyState())
        >>> round(float(updates["w"][1]), 3)
        0.8
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm: expected a positive number, found {max_norm}")

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        factor = clip_factor(_checked_norm(updates), max_norm)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _checked_norm(grads: Any) -> Array:
    nodes = jax.tree_util.tree_leaves_with_path(grads, is_leaf=kinds_.is_scattered)
    scattered = [x for _, x in nodes if kinds_.is_scattered(x)]
    total = jnp.square(collectives.global_norm([x.shard for x in scattered], [x.leaf for x in scattered]))
    for path, g in nodes:
        if not kinds_.is_scattered(g):
            _check_whole(jax.tree_util.keystr(path), g)
            total = total + jnp.sum(jnp.square(g.astype(jnp.float32)))
    return jnp.sqrt(total)


def _check_whole(path: str, g: Any) -> None:
    """Refuse a gradient whose norm, taken here, would be one rank's alone."""
    bound, owed = regions.bound_axes(), sorted(kinds_.unreduced_axes(g))
    varying = sorted(regions.varying_axes(g))
    if varying or owed:
        what = f"varies over {varying}" if varying else f"is still a sum over {owed}"
    elif bound and not regions.tracks_varying(bound[0]):
        what = "is inside shard_map with check_vma=False, which does not tell whether ranks differ"
    else:
        return
    raise ValueError(
        f"clip_by_global_norm: the gradient of {path} {what}, so its norm would be this rank's alone; put "
        "jzero.scatter_gradients(mesh) before it, or use zero(..., clip_norm=...)"
    )


def clip_factor(norm: Array, max_norm: float) -> Array:
    """min(1, max_norm / (norm + 1e-6)), as Apex's clip_grad_norm."""
    return jnp.minimum(1.0, max_norm / (norm + 1e-6))
