"""The state of `zero` as plain optax keeps it, and back: other precisions, other meshes, other orders of parameters.

    to_optax     (tx, state, params)         -> float32 parameters and the inner state, whole arrays on the host
    from_optax   (tx, inner state, params)   -> parameters and state as `tx` keeps them, sharded
    convert      both, one array at a time, from one `zero` to another
    from_shards  (tx, values, like)          -> parameters and a first state, from float32 shards on the devices

Arrays go by their path in the tree ("0/mu/blocks/w"), so order does not matter, nor whether a node is a NamedTuple or
the dict that a checkpoint made of it. Everything passes through float32. A device never holds more than its shards and
one whole array.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.fp8.parameters import is_quantised
from jzero.optim import collectives, fp8, regions
from jzero.optim.partition import Leaf, Plan, owners
from jzero.optim.storage import state_specs
from jzero.optim.transformation import ZeroState, ZeroTransformation

Fetch = Callable[[], np.ndarray]


def to_optax(tx: ZeroTransformation, state: ZeroState, params: Any) -> tuple[Any, Any]:
    """What the transformation inside of `zero` would hold by itself, without shards, padding or low precision.

    Args:
        tx: the transformation that the state is of.
        state: its state.
        params: the parameters.

    Returns:
        Float32 parameters (the masters, where there are any), and the inner transformation's own state, such as
        `optax.adamw`'s: trees of whole NumPy arrays on the host of every process.

    Example:
        >>> import jzero, optax
        >>> tx = jzero.zero(optax.adamw(1e-3), mesh=jzero.make_mesh(data=-1))
        >>> params = {"w": jnp.ones((5, 3))}
        >>> whole, adam = to_optax(tx, tx.init(params), params)
        >>> adam[0].mu["w"].shape
        (5, 3)
    """
    values, inner = _sources(tx, state, params)
    fetched = lambda named, like: jax.tree.unflatten(jax.tree.structure(like), [fetch() for _, fetch in named])
    plan = state.plan
    return fetched(values, plan.unflatten(plan.leaves)), fetched(inner, tx.core.abstract_inner(plan))


def from_optax(
    tx: ZeroTransformation, inner: Any, params: Any, *, like: Any = None, lossy: bool = False
) -> tuple[Any, ZeroState]:
    """Parameters and state as `tx` keeps them, from those of the plain transformation; outside of `jit`.

    Args:
        tx: the transformation that will go on.
        inner: the plain transformation's state: whole arrays, in any tree whose paths have the same names.
        params: float32 parameters, likewise.
        like: arrays or `jax.ShapeDtypeStruct`s with the dtypes and shardings that the parameters shall have; default:
            those of `params`.
        lossy: whether numbers may be rounded, and arrays left out that `tx` does not keep.

    Returns:
        The parameters, like `like`, and the state. A loss scale and a count of skipped steps start anew.

    Raises:
        ValueError: an array is missing, or has another shape; or, without `lossy`, one has no place in the new state or
            cannot be stored exactly; names it.

    Example:
        >>> import jzero, optax
        >>> params = {"w": jnp.ones((5, 3))}
        >>> tx = jzero.zero(optax.adamw(1e-3), mesh=jzero.make_mesh(data=-1))
        >>> params, state = from_optax(tx, optax.adamw(1e-3).init(params), params)
    """
    hosted = lambda x: lambda: np.asarray(jax.device_get(x))
    named = lambda tree: {name: hosted(x) for name, x in _named(tree)}
    return _build(tx, named(inner), named(params), params if like is None else like, lossy)


def convert(
    old: ZeroTransformation, state: ZeroState, params: Any, new: ZeroTransformation, like: Any, *, lossy: bool = False
) -> tuple[Any, ZeroState]:
    """Parameters and state of one `zero`, as another keeps them: another precision, mesh or order of parameters.

    Args:
        old: the transformation that the state is of.
        state: its state.
        params: its parameters.
        new: the transformation that will go on. Its inner transformation names its state alike.
        like: arrays or `jax.ShapeDtypeStruct`s with the new parameters' dtypes and shardings.
        lossy: whether numbers may be rounded, and arrays left out.

    Returns:
        New parameters and state. Loss scale, skipped steps, random numbers, scales of FP8 parameters and their history
        go on where both have them.

    Raises:
        ValueError: as `from_optax`.

    Example:
        >>> import jzero
        >>> params = {"w": jnp.ones((5, 3), jnp.bfloat16)}
        >>> adam = lambda **options: jzero.distributed_fused_adam(1e-3, mesh=jzero.make_mesh(data=-1), **options)
        >>> old, new = adam(master="remainder"), adam(master="fp32")
        >>> params, state = convert(old, old.init(params), params, new, params)
    """
    values, inner = _sources(old, state, params)
    scales = {name: np.asarray(p.scale) for name, p in _named(params) if is_quantised(p)}
    made, after = _build(new, dict(inner), dict(values), like, lossy, scales)
    kept = {}
    looks = lambda tree: (jax.tree.structure(tree), [x.shape for x in jax.tree.leaves(tree)])
    for field in ("guard", "rounding", "fp8"):
        before, now = getattr(state, field), getattr(after, field)
        if looks(before) == looks(now):
            kept[field] = jax.tree.map(lambda x, y: jax.device_put(np.asarray(x), y.sharding), before, now)
    return made, dataclasses.replace(after, **kept)


def from_shards(tx: ZeroTransformation, values: Any, like: Any) -> tuple[Any, ZeroState]:
    """Parameters and a first state from float32 values, of which masters keep what the parameters' type rounds away.

    Args:
        tx: the transformation.
        values: float32 shards of the parameters, as the plan of `tx` cuts them: tree of arrays of `Leaf.shard_shape`,
            sharded as `Leaf.shard_spec`.
        like: arrays or `jax.ShapeDtypeStruct`s with the dtypes and shardings that the parameters shall have.

    Returns:
        Parameters and state; nothing leaves the devices, and a parameter is whole only where it is to be.

    Example:
        >>> import jzero
        >>> tx = jzero.distributed_fused_adam(1e-3, mesh=jzero.make_mesh(data=-1), master="fp32")
        >>> like = {"w": jnp.ones(8, jnp.bfloat16)}
        >>> params, state = from_shards(tx, {"w": jnp.full(8, 1.001)}, like)
        >>> float(params["w"][0]), round(float(state.master["w"][0]), 3)
        (1.0, 1.001)
    """
    core, plan = tx.core, tx.plan(like)

    def build(values: list[Array]) -> tuple[list[Array], ZeroState]:
        new = _narrowed(core, values, plan)
        inner = core.transformation(plan).init(plan.unflatten(values))
        return _whole(new, plan), core.first_state(values, new, inner, plan)

    shards, params = ([getattr(leaf, spec) for leaf in plan.leaves] for spec in ("shard_spec", "param_specs"))
    made, state = regions.enter(build, core.mesh, (shards,), (params, core.specs(plan)))(plan.flatten(values, "values"))
    return plan.unflatten(made), state


def _narrowed(
    core: Any, values: list[Array], plan: Plan, given: Mapping[int, Array] = MappingProxyType({})
) -> list[Any]:
    """Float32 shards in the types of the parameters; FP8 ones with the scales given by number, or with their own."""
    scales = fp8.fresh(values, plan, core.fp8_recipe, given)
    each = zip(values, plan.leaves, scales, strict=True)
    return [fp8.quantise(n, s) if leaf.quantised else core.storage.sent(n, leaf) for n, leaf, s in each]


def _whole(shards: list[Any], plan: Plan) -> list[Any]:
    """Shards as parameters: gathered, but for those that are stored so."""
    pairs = zip(shards, plan.leaves, strict=True)
    return [p if leaf.resident else collectives.gather(p, leaf, to="invarying") for p, leaf in pairs]


def _named(tree: Any) -> Iterator[tuple[str, Any]]:
    """Arrays, and FP8 parameters, by name: "0/mu/w"."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantised):
        yield jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"), x


# --- out of zero -----------------------------------------------------------------------------------------------------


def _sources(
    tx: ZeroTransformation, state: ZeroState, params: Any
) -> tuple[list[tuple[str, Fetch]], list[tuple[str, Fetch]]]:
    """Masters and arrays of the inner state by name, each fetched when asked for."""
    core, plan = tx.core, state.plan.like(params)
    abstract = core.abstract_inner(plan)
    slots = core.slots(plan)

    def decode(state: ZeroState, params: list[Any]) -> tuple[list[Array], list[Array]]:
        masters = plan.flatten(state.master, "master")
        own = [collectives.take(p, leaf) for p, leaf in zip(params, plan.leaves, strict=True)]
        whole = [core.storage.whole(m, p, leaf) for m, p, leaf in zip(masters, own, plan.leaves, strict=True)]
        return whole, jax.tree.leaves(core.storage.decode(state.inner, slots))

    specs, own = core.specs(plan), [leaf.param_specs for leaf in plan.leaves]
    inner_specs = jax.tree.leaves(state_specs(abstract, plan), is_leaf=lambda x: isinstance(x, PartitionSpec))
    out_specs = ([leaf.shard_spec for leaf in plan.leaves], inner_specs)
    program = regions.enter(decode, core.mesh, (specs, own), out_specs)
    arrived = dataclasses.replace(state, plan=plan)
    values, inner = program(arrived, plan.flatten(params, "params"))
    names = [name for name, _ in _named(plan.unflatten(plan.leaves))]
    pick = lambda x, leaf: functools.partial(_fetch, x, leaf, core.mesh)
    pairs = zip(_named(abstract), inner, owners(abstract, plan), strict=True)
    return (
        [(name, pick(x, leaf)) for name, x, leaf in zip(names, values, plan.leaves, strict=True)],
        [(name, pick(x, leaf)) for (name, _), x, leaf in pairs],
    )


def _fetch(x: Array, leaf: Leaf | None, mesh: Mesh) -> np.ndarray:
    """An array of shards (or one that belongs to no parameter), whole, on the host."""
    plan = None if leaf is None else dataclasses.replace(leaf, path="", dtype="float32")  # alike ones share a program
    return np.asarray(_gathering(plan, mesh)(x))


@functools.lru_cache(maxsize=256)
def _gathering(leaf: Leaf | None, mesh: Mesh) -> Callable[[Array], Array]:
    gather = lambda x: x
    if leaf is not None and not leaf.resident:
        one = lambda x: collectives.gather(x, leaf, to="invarying")
        gather = regions.enter(one, mesh, (leaf.shard_spec,), leaf.param_spec)
    return jax.jit(gather, out_shardings=NamedSharding(mesh, PartitionSpec()))


# --- into zero -------------------------------------------------------------------------------------------------------


def _build(
    tx: ZeroTransformation,
    inner: Mapping[str, Fetch],
    params: Mapping[str, Fetch],
    like: Any,
    lossy: bool,
    scales: Mapping[str, np.ndarray] | None = None,
) -> tuple[Any, ZeroState]:
    """Parameters and state; FP8 parameters are cast with these scales, by name, or with those of their values."""
    core, plan = tx.core, tx.plan(like)
    abstract = core.abstract_inner(plan)
    names = [name for name, _ in _named(plan.unflatten(plan.leaves))]
    inner_names = [name for name, _ in _named(abstract)]
    if not lossy:
        _check_all_used("parameter", params, names)
        _check_all_used("state", inner, inner_names)
    values = [_place(name, params, leaf, np.float32, core.mesh) for name, leaf in zip(names, plan.leaves, strict=True)]
    pairs = zip(inner_names, jax.tree.leaves(abstract), owners(abstract, plan), strict=True)
    arrays = [_place(name, inner, leaf or x, x.dtype, core.mesh) for name, x, leaf in pairs]
    scales = scales or {}
    fits = {i: name for i, name in enumerate(names) if name in scales and scales[name].shape == plan.leaves[i].layers}
    known = {i: scales[fits[i]] for i in fp8.numbers(plan) if i in fits}
    made, state, errors = _encoding(core, plan, tuple(known))(values, arrays, known)
    if not lossy:
        stored = [f"parameter {name}" for name in names] + [f"state {name}" for name in inner_names]
        for name, error in zip(stored, np.asarray(errors), strict=True):
            if error:
                raise ValueError(
                    f"{name}: the new state cannot hold it exactly, but rounds it by up to {error:.3g}; choose a wider "
                    "master or state_dtype, or pass lossy=True"
                )
    return plan.unflatten(made), state


def _check_all_used(what: str, given: Mapping[str, Fetch], names: list[str]) -> None:
    if left := sorted({*given} - {*names}):
        raise ValueError(
            f"{what} {left[0]}: it has no place in the new state, which has {(names or ['none'])[0]!r}; pass "
            "lossy=True to leave it out"
        )


def _place(name: str, given: Mapping[str, Fetch], like: Any, dtype: Any, mesh: Mesh) -> Array:
    """A whole array as the shards of its parameter, or on every device where `like` is no plan of one."""
    if name not in given:
        raise ValueError(
            f"{name}: expected such an array in what is converted, found {sorted(given)[:8]}; convert what a "
            "transformation of the same kind kept"
        )
    x = given[name]()
    if x.shape != like.shape:
        raise ValueError(f"{name}: expected shape {like.shape}, found {x.shape}; convert the same model's")
    x = x.astype(dtype)
    put = lambda spec: jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])
    if not isinstance(like, Leaf):
        return put(PartitionSpec())
    if like.split is not None:
        return put(like.shard_spec)
    return _cutting(dataclasses.replace(like, path=""), mesh)(put(like.param_spec))


@functools.lru_cache(maxsize=256)
def _cutting(leaf: Leaf, mesh: Mesh) -> Callable[[Array], Array]:
    return regions.enter(lambda x: collectives.take(x, leaf), mesh, (leaf.param_spec,), leaf.shard_spec)


def _encoding(core: Any, plan: Any, known: tuple[int, ...]) -> Callable[..., tuple[list[Any], ZeroState, Array]]:
    """(masters, arrays of the inner state, scales by number) -> parameters, state, by how much each array was rounded.

    `known`: the numbers of the FP8 parameters whose scales are given.
    """
    abstract = core.abstract_inner(plan)
    treedef = jax.tree.structure(abstract)

    def build(values: list[Array], arrays: list[Array], given: dict[int, Array]) -> tuple[list[Any], ZeroState, Array]:
        new = _narrowed(core, values, plan, given)
        state = core.first_state(values, new, jax.tree.unflatten(treedef, arrays), plan)
        masters = plan.flatten(state.master, "master")
        read = [core.storage.whole(m, p, leaf) for m, p, leaf in zip(masters, new, plan.leaves, strict=True)]
        read += jax.tree.leaves(core.storage.decode(state.inner, core.slots(plan)))
        errors = [_error(a, b, core.mesh) for a, b in zip([*values, *arrays], read, strict=True)]
        errors = jnp.stack([*errors, collectives.vary(jnp.float32(0), core.mesh.axis_names)])
        return _whole(new, plan), state, jax.lax.pmax(errors, core.mesh.axis_names)[:-1]

    inner_specs = jax.tree.leaves(state_specs(abstract, plan), is_leaf=lambda x: isinstance(x, PartitionSpec))
    in_specs = ([leaf.shard_spec for leaf in plan.leaves], inner_specs, {i: plan.leaves[i].layers_spec for i in known})
    out_specs = ([leaf.param_specs for leaf in plan.leaves], core.specs(plan), PartitionSpec())
    return regions.enter(build, core.mesh, in_specs, out_specs)


def _error(given: Array, read: Array, mesh: Mesh) -> Array:
    """The largest difference on this rank; infinity where a NaN came or went."""
    if not jnp.issubdtype(given.dtype, jnp.floating):
        return collectives.vary(jnp.float32(0), mesh.axis_names)
    given, read = given.astype(jnp.float32), read.astype(jnp.float32)
    same = (given == read) | (jnp.isnan(given) & jnp.isnan(read))
    difference = jnp.where(same, 0.0, jnp.nan_to_num(jnp.abs(given - read), nan=jnp.inf))
    return collectives.vary(jnp.max(difference, initial=0.0), mesh.axis_names)
