"""What kind of gradient reaches the optimizer, and how it becomes a shard.

| kind | where it comes from | what is done to it |
|---|---|---|
| reduced | plain `jit` (GSPMD), or declared inside `shard_map` | already the mean: take this rank's shard |
| local | inside `shard_map`: this rank's gradient of its own mean loss | reduce-scatter, divided by data x replica |
| unreduced | Explicit axes, `P(..., unreduced={"data"})` | `jax.reshard` to the shard, not divided |
| scattered | the output of `scatter_gradients` | nothing: it is a shard |

Inside `shard_map`, autodiff *sums* over the ranks the gradient of parameters that do not vary: the mean if the loss was
one over all ranks (`jax.lax.pmean`), d times the mean if it was this rank's own. The type is the same, and Adam would
hide the factor, so "auto" refuses such a gradient there and says what to write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jzero.fp8.numerics import Quantised
from jzero.fp8.parameters import is_quantised
from jzero.optim import collectives, regions
from jzero.optim.partition import Leaf, Plan

Kind = Literal["reduced", "local", "unreduced", "scattered"]
KINDS = ("auto", "local", "reduced", "unreduced")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scattered:
    """A gradient's shard inside a manual region, with the plan it was cut by.

    A pytree node around one array, so that elementwise transformations pass through it.
    """

    shard: Array  # float32, leaf.shard_shape divided by the axes that the region binds
    leaf: Leaf = dataclasses.field(metadata={"static": True})


def is_scattered(x: Any) -> bool:
    """Whether `x` is a `Scattered` node (an `is_leaf` predicate)."""
    return isinstance(x, Scattered)


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
        if g.leaf != leaf:
            raise ValueError(
                f"gradient of {leaf.path}: scatter_gradients cut it by another plan than zero's; give both the same "
                "mesh, axis, param_specs and stacked"
            )
        return "scattered"
    names = [name for name in (leaf.axis, *replica) if name]
    bound = [name for name in names if name in regions.bound_axes()]
    if len(bound) < len(names) and bound:
        raise ValueError(
            f"gradient of {leaf.path}: shard_map binds {bound} of the axes {names}; bind all or none of them"
        )
    if stray := sorted(regions.varying_axes(g) - {*names, *leaf.axes}):
        raise ValueError(
            f"gradient of {leaf.path}: it varies over {stray}, which neither splits the parameter nor is averaged "
            "over; name it in replica_axis, or reduce the gradient over it first"
        )
    if not bound:
        return _kind_outside(g, leaf, names, declared)
    if not regions.tracks_varying(bound[0]):
        return _kind_untracked(leaf, declared)
    return _kind_resident(g, leaf, replica, declared) if leaf.resident else _kind_inside(g, leaf, bound, declared)


def _kind_outside(g: Any, leaf: Leaf, names: Sequence[str], declared: str) -> Kind:
    if declared == "local":
        where = f"inside shard_map over {names}" if names else "where zero has an axis or replica_axis to average over"
        raise ValueError(f"gradient of {leaf.path}: gradients='local' exist only {where}; declare 'auto' or 'reduced'")
    found = "unreduced" if unreduced_axes(g) & {*names} else "reduced"
    return _agreed(leaf, declared, found)


def _kind_untracked(leaf: Leaf, declared: str) -> Kind:
    if declared in ("auto", "unreduced"):
        raise ValueError(
            f"gradient of {leaf.path}: its kind cannot be told under check_vma=False; pass gradients='local' (the "
            "gradient of each rank's own mean loss) or gradients='reduced' (already the mean)"
        )
    return "local" if declared == "local" else "reduced"


def _kind_resident(g: Any, leaf: Leaf, replica: Sequence[str], declared: str) -> Kind:
    """A shard varies over the data axis whether it is the sum of local gradients or already the mean."""
    if declared in ("auto", "unreduced"):
        raise ValueError(
            f"gradient of {leaf.path}: the parameter is kept sharded over '{leaf.axis}', so the type does not tell its "
            "kind; pass gradients='local' (autodiff's sum over ranks of their mean losses) or 'reduced' (the mean)"
        )
    if declared == "reduced" and (varying := sorted(regions.varying_axes(g) & {*replica})):
        raise ValueError(
            f"gradient of {leaf.path}: declared gradients='reduced', but it varies over {varying}; take its mean over "
            "these axes (jax.lax.pmean), or pass gradients='local'"
        )
    return "local" if declared == "local" else "reduced"


def _kind_inside(g: Any, leaf: Leaf, bound: Sequence[str], declared: str) -> Kind:
    varying = [name for name in bound if name in regions.varying_axes(g)]
    if varying and len(varying) < len(bound):
        raise ValueError(
            f"gradient of {leaf.path}: it varies over {varying} but not over all of {bound}, so its kind cannot be "
            "told; make it vary over all of them (jax.lax.pcast of the parameters) or over none (jax.lax.pmean)"
        )
    if not varying and declared != "reduced":
        raise ValueError(
            f"gradient of {leaf.path}: {_wrongly(declared)}it is the same on every rank of {list(bound)}, so autodiff "
            "has summed it, and the type does not tell whether that is the mean; differentiate with respect to "
            f"jax.lax.pcast(params, {tuple(bound)}, to='varying') (local gradients, one reduce-scatter), or, if your "
            "loss is a mean over these ranks (jax.lax.pmean), pass gradients='reduced'"
        )
    return _agreed(leaf, declared, "local" if varying else "reduced")


def _wrongly(declared: str) -> str:
    return "" if declared == "auto" else f"declared gradients='{declared}', but "


def _agreed(leaf: Leaf, declared: str, found: Kind) -> Kind:
    if declared not in ("auto", found):
        raise ValueError(
            f"gradient of {leaf.path}: declared gradients='{declared}', but its type says '{found}'; pass 'auto'"
        )
    return found


def unreduced_axes(g: Any) -> frozenset[str]:
    """The axes over which an array of Explicit type still is a sum to be taken."""
    return frozenset(getattr(getattr(jax.typeof(g).sharding, "spec", None), "unreduced", ()))


def check_sync_dtype(dtype: Any, kinds: Sequence[Kind]) -> None:
    """Refuse a wire dtype for gradients that do not cross the wire here: XLA reduces them in their own."""
    if jnp.dtype(dtype) != jnp.float32 and not {"local", "scattered"} & {*kinds} and kinds:
        raise ValueError(
            f"grad_sync_dtype={jnp.dtype(dtype).name}: expected local gradients (inside shard_map), found "
            f"'{kinds[0]}' ones, which XLA reduces in their own dtype; cast the gradients, or leave it at float32"
        )


def arrives_split(leaf: Leaf, kind: Kind, bound: Sequence[str]) -> bool:
    """Whether a gradient enters the step's manual region as its shard, by `lay_out` or by `scatter_gradients`."""
    laid_out = leaf.axis not in bound and leaf.split is not None
    return kind == "scattered" or leaf.resident or laid_out


def to_shard(g: Array, leaf: Leaf, kind: Kind, replica: Sequence[str], dtype: Any, bound: Sequence[str]) -> Array:
    """Phase 1 for one leaf, in a region over the whole mesh: this rank's float32 shard of the mean gradient.

    Args:
        g: `leaf.shard_local_shape` where `arrives_split`, else `leaf.local_shape`.
        leaf: the plan.
        kind: what `g` is.
        replica: the replica axes.
        dtype: dtype on the wire.
        bound: the axes that the caller's own regions bind.
    """
    if kind == "local":
        if leaf.resident:
            return collectives.mean_of_sums(g, leaf, replica=replica)
        return collectives.scatter(g, leaf, replica=replica, dtype=dtype)
    g = g.astype(jnp.float32)
    return g if arrives_split(leaf, kind, bound) else collectives.take(g, leaf)


def lay_out(g: Array, leaf: Leaf, kind: Kind, mesh: Mesh) -> Array:
    """Ask for the layout in which a gradient enters the step's region: where the data axis is not bound, the shards'.

    XLA turns the sum that it owes into a reduce-scatter then. A leaf that has no dimension to split stays whole.
    """
    bound = regions.bound_axes()
    if kind == "scattered" or not set(mesh.axis_names) - set(bound):
        return g
    spec = leaf.shard_spec if arrives_split(leaf, kind, bound) else leaf.param_spec
    return regions.reshard(g, spec, mesh)


def numeric(extra: dict[str, Any]) -> dict[str, Any]:
    """The extra arguments that hold numbers alone; a function is for another member of the chain."""
    is_number = lambda x: isinstance(x, (int, float)) or hasattr(x, "dtype")
    return {name: x for name, x in extra.items() if all(map(is_number, jax.tree.leaves(x)))}


def check_parameter(p: Any, leaf: Leaf) -> None:
    """Refuse a parameter of another shape or dtype than the one given to init."""
    if leaf.quantised != is_quantised(p):
        kinds = ("a plain array", "an FP8 parameter")
        found, expected = kinds[is_quantised(p)], kinds[leaf.quantised]
        raise ValueError(f"parameter of {leaf.path}: expected {expected} as given to init, found {found}")
    p = p.value if is_quantised(p) else p
    check_shape(p, leaf, "parameter")
    if jax.dtypes.canonicalize_dtype(p.dtype) != leaf.dtype:
        raise ValueError(f"parameter of {leaf.path}: expected dtype {leaf.dtype} as given to init, found {p.dtype}")


def check_shape(x: Any, leaf: Leaf, what: str) -> None:
    """Refuse a gradient or parameter of another shape than the one given to init."""
    expected = regions.local_shape(leaf, regions.bound_axes())
    if jnp.shape(x) != expected:
        raise ValueError(f"{what} of {leaf.path}: expected shape {expected}, found {jnp.shape(x)}")


def prepare(
    grads: Any, plan: Plan, replica: Sequence[str], declared: str, dtype: Any, mesh: Mesh
) -> tuple[list[Array], tuple[Kind, ...]]:
    """What comes before phase 1: every gradient checked, its kind told, and laid out for the step's region."""
    nodes = [_of_value(g, leaf) for g, leaf in zip(plan.flatten(grads, "gradients"), plan.leaves, strict=True)]
    pairs = list(zip(nodes, plan.leaves, strict=True))
    for g, leaf in pairs:
        _check_region(leaf)
        if not is_scattered(g):
            check_shape(g, leaf, "gradient")
    kinds: tuple[Kind, ...] = tuple(kind_of(g, leaf, replica, declared) for g, leaf in pairs)
    check_sync_dtype(dtype, kinds)
    values = [
        lay_out(g.shard if is_scattered(g) else g, leaf, kind, mesh)
        for (g, leaf), kind in zip(pairs, kinds, strict=True)
    ]
    return values, kinds


def _of_value(g: Any, leaf: Leaf) -> Any:
    """The gradient of an FP8 parameter as an array; `jax.grad` gives one of its value and one of its scale."""
    g = g.value if isinstance(g, Quantised) else g
    if leaf.quantised and not is_scattered(g) and g.dtype.itemsize == 1:
        raise ValueError(
            f"gradient of {leaf.path}: expected 16 or 32 bits, found {g.dtype}, rounded without a scale; use the FP8 "
            "parameter through jzero.fp8.dot.dot or jzero.fp8.dequantise"
        )
    return g


def _check_region(leaf: Leaf) -> None:
    """Refuse a region that would read the flat dimension of a leaf's shards in another order than the devices'."""
    bound = {*regions.bound_axes()}
    if leaf.shares_flat_dimension and leaf.axis and leaf.axis not in bound and (inner := bound & {*leaf.spec[-1]}):
        raise ValueError(
            f"{leaf.path}: its shards are split over '{leaf.axis}' and {leaf.spec[-1]} in one dimension, but shard_map "
            f"binds {sorted(inner)} alone; bind '{leaf.axis}' too, or none of them"
        )


def grad_specs(plan: Plan, kinds: Sequence[Kind], bound: Sequence[str]) -> list[PartitionSpec]:
    """How the gradients lie when they enter the step's region."""
    return [
        leaf.shard_spec if arrives_split(leaf, kind, bound) else leaf.param_spec
        for leaf, kind in zip(plan.leaves, kinds, strict=True)
    ]
