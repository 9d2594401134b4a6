"""Manual regions: which mesh axes the `shard_map`s around the caller bind, and entering one over those that are left.

Outside of any region arrays are global; inside `shard_map` they are one device's part over the axes that it binds. The
phases of a step are written for one device's part over *all* axes, so each runs in a region over those not bound yet.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jzero.optim.partition import Leaf


def bound_axes() -> tuple[str, ...]:
    """The mesh axes bound by the `shard_map` regions around the caller; empty outside of any."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def tracks_varying(axis: str) -> bool:
    """Whether the region that binds `axis` tracks varying axes (`check_vma=True`)."""
    return axis in varying_axes(jax.lax.axis_index(axis))


def varying_axes(x: Any) -> frozenset[str]:
    """The bound axes over which a value differs between ranks; empty outside, and under `check_vma=False`."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def as_axes(axis: str | Sequence[str] | None) -> tuple[str, ...]:
    """One axis name, several, or none, as a tuple."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def replica_axes(replica_axis: str | Sequence[str] | None, mesh: Mesh, axis: str | None) -> tuple[str, ...]:
    """The `replica_axis` option as a tuple, checked against the mesh."""
    names = as_axes(replica_axis)
    for name in names:
        if name not in mesh.shape or name == axis:
            raise ValueError(
                f"replica_axis '{name}': expected an axis of the mesh {mesh.axis_names} other than '{axis}'"
            )
    return names


def restrict(spec: PartitionSpec, axes: frozenset[str]) -> PartitionSpec:
    """A spec with only those of its axes that are in `axes`."""
    kept = [tuple(n for n in as_axes(names) if n in axes) for names in spec]
    return PartitionSpec(*(None if not k else k[0] if len(k) == 1 else k for k in kept))


def local_shape(leaf: Leaf, bound: Sequence[str]) -> tuple[int, ...]:
    """The shape a parameter (or its gradient) has inside a region that binds `bound`."""
    sizes = [math.prod(jax.lax.axis_size(n) for n in names if n in bound) for names in leaf.spec]
    return tuple(n // size for n, size in zip(leaf.shape, sizes, strict=True))


def enter(f: Callable, mesh: Mesh, in_specs: Any, out_specs: Any, bound: Sequence[str] = ()) -> Callable:
    """`f` on one device's part of its arguments: a `shard_map` over the axes of `mesh` that are not in `bound`."""
    rest = frozenset(mesh.axis_names) - frozenset(bound)
    if not rest:
        return f
    if not bound:
        # on one device no rank differs from another, and without tracking a gather of one rank need not be written
        tracked = mesh.size > 1
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=tracked))
    is_spec = lambda x: isinstance(x, PartitionSpec)
    in_specs, out_specs = (
        jax.tree.map(lambda s: restrict(s, rest), specs, is_leaf=is_spec) for specs in (in_specs, out_specs)
    )
    checked = tracks_varying(bound[0])
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names=set(rest), check_vma=checked)


@contextlib.contextmanager
def explaining_closures(mesh: Mesh) -> Iterator[None]:
    """Add what to do to JAX's refusal of a region that uses an outer value on Explicit axes."""
    try:
        yield
    except NotImplementedError as error:
        if AxisType.Explicit in mesh.axis_types:
            error.add_note(
                "zero: on a mesh with Explicit axes the inner transformation cannot hold an array from outside; put "
                "optax.inject_hyperparams inside of zero, not around it, or use Auto axes"
            )
        raise


def placed(x: Any, spec: PartitionSpec, *, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """An abstract array with the very sharding that `jit` gives such a result.

    Shardings that mean the same but are written otherwise (a trailing None) would compile a step again.
    """
    if any(t == AxisType.Explicit for t in mesh.axis_types):
        spec = PartitionSpec(*spec, *[None] * (len(x.shape) - len(spec)))
    else:
        last = max((i for i, names in enumerate(spec) if names), default=-1)
        spec = PartitionSpec(*spec[: last + 1]) if math.prod(x.shape) else PartitionSpec()
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def reshard(x: Any, spec: PartitionSpec, mesh: Mesh) -> Any:
    """`x` laid out as `spec` says over the axes that no region binds: Explicit ones, then Auto ones."""
    bound = bound_axes()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    free = {kind: frozenset(n for n, t in types.items() if t == kind and n not in bound) for kind in AxisType}
    place = (lambda s: s) if bound else (lambda s: NamedSharding(mesh, s))
    if free[AxisType.Explicit]:
        x = jax.reshard(x, place(restrict(spec, free[AxisType.Explicit])))
    if free[AxisType.Auto]:
        x = jax.lax.with_sharding_constraint(x, place(restrict(spec, free[AxisType.Auto])))
    return x
