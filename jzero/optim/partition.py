"""Which part of each parameter a data rank owns: the plan, as data, and nothing else.

A leaf is split along one dimension that no other mesh axis splits and that the data axis divides evenly. Where there
is no such dimension, this rank's part of the leaf (what the tensor and pipeline axes leave of it) is flattened, padded
with zeros and cut into equal pieces. Nothing is ever replicated silently: `partition_report` shows every leaf.

    [V, D], spec (tensor, None), data d        split along D: shard [V, D/d], spec (tensor, data)
    [7], data 4                                flattened, padded to 8: shard [2], global [8], spec (data,)
    [6], spec (tensor,), tensor 2, data 2      its parts flattened: shard [2], global [8], spec ((data, tensor),)
    [L, 7], one stacked dimension, data 4      flattened per layer: shard [L, 2], global [L, 8], spec (None, data)
    [8], spec (tensor,), 2 x 2, `share`        its parts split: shard [2], global [8], spec ((tensor, data),)

With `share`, a dimension that other axes split is split further where no other one divides, so that the shards lie in
the parameter's own order. Without it such a leaf is flattened: a region that binds the data axis alone can then still
tell its shards.

A plan is static and hashable; it travels inside the optimizer's state, so `update` needs nothing but its arguments.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jzero.fp8.numerics import Quantised
from jzero.fp8.parameters import is_quantised
from jzero.optim.precision import Scaled

Spec = tuple[tuple[str, ...], ...]
"""The mesh axes that split each dimension; one entry per dimension, empty where it is whole."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """How one parameter is cut into shards.

    Attributes:
        path: where it stands in the tree, as `jax.tree_util.keystr` writes it.
        shape: its global shape.
        dtype: name of its dtype.
        spec: the mesh axes that already split it, per dimension (`axis` among them where `resident`).
        ranks: number of shards (size of the data axis).
        axis: name of the data axis, or None where state is not sharded.
        split: the dimension that `axis` splits; None where the leaf is flattened and padded.
        stacked: leading dimensions that enumerate layers; they are never split or flattened.
        others: sizes of the mesh axes in `spec` but `axis`, per dimension.
        resident: the parameter itself is stored as a shard (`spec` contains `axis`).
        quantised: the parameter is `Quantised`: FP8 values of this shape, and a scale per layer.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    ranks: int
    axis: str | None
    split: int | None
    stacked: int
    others: tuple[int, ...]
    resident: bool = False
    quantised: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape on one device of the parameter before any split over the data axis."""
        return tuple(n // o for n, o in zip(self.shape, self.others, strict=True))

    @property
    def flat_size(self) -> int:
        """Elements of one flattened shard, padding included (only where `split` is None)."""
        return -(-math.prod(self.local_shape[self.stacked :]) // self.ranks)

    @property
    def padding(self) -> int:
        """Elements of padding in the whole leaf."""
        return math.prod(self.shard_shape) - math.prod(self.shape)

    @property
    def _kept(self) -> range:
        """Dimensions in front of the flat one; they keep the axes that split them."""
        return range(self.stacked, max(len(self.spec) - 1, self.stacked))

    @property
    def shares_flat_dimension(self) -> bool:
        """Whether other axes split the flat dimension too: data is the outer one there."""
        return self.split is None and len(self.spec) > self.stacked and self.others[-1] > 1

    @property
    def shares_split_dimension(self) -> bool:
        """Whether other axes split the dimension `split` too: data is the inner one there."""
        return self.split is not None and self.others[self.split] > 1

    @property
    def shard_local_shape(self) -> tuple[int, ...]:
        """Shape of one shard on its device. A flattened shard has its leaf's number of dimensions, at least one."""
        if self.split is None:
            return (*self.local_shape[: self.stacked], *(1 for _ in self._kept), self.flat_size)
        return tuple(n // self.ranks if i == self.split else n for i, n in enumerate(self.local_shape))

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Global shape of the array that holds all shards."""
        if self.split is None:
            parts = self.ranks * (self.others[-1] if len(self.spec) > self.stacked else 1)
            return (*self.shape[: self.stacked], *(self.others[i] for i in self._kept), self.flat_size * parts)
        return self.shape

    @property
    def shard_spec(self) -> PartitionSpec:
        """Sharding of the array that holds all shards."""
        own = () if self.axis is None or self.resident else (self.axis,)
        if self.split is None:
            last = self.spec[-1] if len(self.spec) > self.stacked else ()
            return _partition_spec((*self.spec[: self.stacked], *(self.spec[i] for i in self._kept), (*own, *last)))
        return _partition_spec(tuple((*names, *own) if i == self.split else names for i, names in enumerate(self.spec)))

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Global shape of the scales of a scaled array: one per stacked layer of each shard; sharded as the shards."""
        if self.split is None:
            return (*self.shard_shape[:-1], self.ranks * (self.others[-1] if self.shares_flat_dimension else 1))
        parts = (o * self.ranks if i == self.split else o for i, o in enumerate(self.others))
        return tuple(n if i < self.stacked else o for i, (n, o) in enumerate(zip(self.shape, parts, strict=True)))

    @property
    def param_spec(self) -> PartitionSpec:
        """Sharding of the parameter itself."""
        return _partition_spec(self.spec)

    @property
    def layers(self) -> tuple[int, ...]:
        """Global shape of what there is one of per layer, the scale of an FP8 parameter: the stacked dimensions."""
        return self.shape[: self.stacked]

    @property
    def layers_spec(self) -> PartitionSpec:
        """Sharding of what there is one of per layer."""
        return _partition_spec(self.spec[: self.stacked])

    @property
    def param_specs(self) -> Any:
        """`param_spec`; of an FP8 parameter, those of its value and its scale."""
        return Quantised(self.param_spec, self.layers_spec) if self.quantised else self.param_spec

    @property
    def axes(self) -> tuple[str, ...]:
        """Every mesh axis over which the shards differ."""
        own = () if self.axis is None or self.resident else (self.axis,)
        return (*(name for names in self.spec for name in names), *own)

    def layer(self) -> Leaf:
        """The plan of one layer of a stacked leaf."""
        if not self.stacked:
            raise ValueError(f"{self.path}: expected a leaf with stacked dimensions, found none")
        return dataclasses.replace(
            self,
            shape=self.shape[self.stacked :],
            spec=self.spec[self.stacked :],
            others=self.others[self.stacked :],
            split=None if self.split is None else self.split - self.stacked,
            stacked=0,
        )


class Plan(NamedTuple):
    """The plan of a whole tree of parameters: one `Leaf` each, and the structure they stand in."""

    leaves: tuple[Leaf, ...]
    treedef: Any

    def unflatten(self, values: Sequence[Any]) -> Any:
        """A tree of the parameters' structure with one value per leaf."""
        return jax.tree.unflatten(self.treedef, values)

    def like(self, params: Any) -> Plan:
        """This plan for the same leaves in other nodes: NNX gives Variables to `init`, and to `update` their arrays."""
        named, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantised)
        if treedef == self.treedef:
            return self
        plain = lambda path: path.replace(".value", "")
        names = [jax.tree_util.keystr(path) for path, _ in named]
        alike = [plain(name) for name in names] == [plain(leaf.path) for leaf in self.leaves]
        return self._replace(treedef=treedef) if alike else self

    def flatten(self, tree: Any, what: str) -> list[Any]:
        """The values of a tree of the same structure, one per leaf; `what` names it in the error.

        Raises:
            ValueError: the tree has another structure; names the first place where they differ.
        """
        try:
            return self.treedef.flatten_up_to(tree)
        except ValueError:
            raise ValueError(_structure_message(self, tree, what)) from None


def owners(state: Any, plan: Plan) -> list[Leaf | None]:
    """Which parameter each array of an inner transformation's abstract state belongs to, in order; None: to none.

    An array belongs to the parameter whose path ends its own, as in `state.mu["w"]`, if it has the shape of its shards;
    so do value and scale of a scaled one, `state.mu["w"].scale`. Unlike `optax.tree.map_params`, this takes masks and
    labels that are functions of the parameters.
    """
    named = jax.tree_util.tree_leaves_with_path(plan.unflatten(plan.leaves))
    by_path: dict[tuple[Any, ...], Leaf] = {tuple(path): leaf for path, leaf in named}

    def owner(path: Sequence[Any], x: Any) -> Leaf | None:
        ends = (by_path.get(tuple(path[i:])) for i in range(len(path) + 1))
        found = next((leaf for leaf in ends if leaf and leaf.shard_shape == x.shape), None)
        if found is None and path and getattr(path[-1], "name", None) in Scaled._fields:
            ends = (by_path.get(tuple(path[i:-1])) for i in range(len(path)))
            shape = lambda leaf: leaf.scale_shape if path[-1].name == "scale" else leaf.shard_shape
            found = next((leaf for leaf in ends if leaf and shape(leaf) == x.shape), None)
        return found

    return [owner(path, x) for path, x in jax.tree_util.tree_leaves_with_path(state)]


def _structure_message(plan: Plan, tree: Any, what: str) -> str:
    named = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantised)
    found = {jax.tree_util.keystr(path) for path, _ in named}
    expected = [leaf.path for leaf in plan.leaves]
    missing = [path for path in expected if path not in found]
    extra = sorted(found - set(expected))
    first = (
        f"{missing[0]} is missing" if missing else f"{extra[0]} is not a parameter" if extra else "node types differ"
    )
    return f"{what}: expected the structure of the parameters given to init, found another: {first or 'the root'}"


def make_plan(
    params: Any,
    mesh: Mesh,
    *,
    axis: str | None,
    param_specs: Any = None,
    stacked: Callable[[str], int] | None = None,
    share: bool = False,
) -> Plan:
    """Decide for every leaf of `params` how it is split.

    Args:
        params: tree of arrays or `jax.ShapeDtypeStruct`s of floating dtype, or `Quantised` ones.
        mesh: the device mesh.
        axis: the mesh axis that shards the state; None shards nothing.
        param_specs: tree of `PartitionSpec`s (a prefix of `params` will do); default: read from each array's sharding.
        stacked: function from a leaf's path to its number of leading layer dimensions; default 0, or that of the scale
            of an FP8 parameter.
        share: split a dimension that other axes split too, rather than flatten a leaf. For shards that are used in
            regions over the whole mesh.

    Raises:
        ValueError: an axis that the mesh lacks, a leaf that is not floating point or lies on another mesh, or a
            dimension that its own axes do not divide; names the leaf.

    Example:
        >>> from jzero import make_mesh
        >>> plan = make_plan({"w": jax.ShapeDtypeStruct((8, 4), "float32")}, make_mesh(data=-1), axis="data")
        >>> plan.leaves[0].path, plan.leaves[0].split
        ("['w']", 0)
    """
    if axis is not None and axis not in mesh.shape:
        raise ValueError(f"axis '{axis}': expected one of the mesh's axes {mesh.axis_names}; choose one of them")
    flat, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantised)
    specs: list[Any] = [None] * len(flat)
    if param_specs is not None:
        is_spec = lambda x: x is None or isinstance(x, PartitionSpec | Quantised)
        like = treedef.unflatten(range(len(flat)))
        specs = jax.tree.leaves(jax.tree.broadcast(param_specs, like, is_leaf=is_spec), is_leaf=is_spec)
    leaves = []
    for (path, value), spec in zip(flat, specs, strict=True):
        name = jax.tree_util.keystr(path)
        lead = stacked(name) if stacked else None
        if fp8 := is_quantised(value):
            lead, value = _checked_layers(name, value, lead), value.value
        own = _own_spec(name, value, spec.value if is_quantised(spec) else spec, mesh)
        leaf = _plan_leaf(name, value, own, mesh, axis, lead or 0, share)
        leaves.append(dataclasses.replace(leaf, quantised=fp8))
    return Plan(tuple(leaves), treedef)


def _checked_layers(path: str, x: Quantised, stacked: int | None) -> int:
    """The number of stacked dimensions of an FP8 parameter: one scale per layer tells it."""
    value, scale = x
    if value.dtype != jax.numpy.float8_e4m3fn or scale.dtype != jax.numpy.float32:
        raise ValueError(
            f"{path}: expected an FP8 parameter Quantised(float8_e4m3fn, float32), found "
            f"Quantised({value.dtype}, {scale.dtype}); make it with jzero.fp8.quantise"
        )
    layers = scale.ndim if stacked is None else stacked
    if scale.shape != value.shape[:layers]:
        raise ValueError(
            f"{path}: expected one scale per layer, {list(value.shape[:layers])}, found {list(scale.shape)}; give "
            "jzero.fp8.quantise and zero the same `stacked`"
        )
    return layers


def _own_spec(path: str, value: Any, spec: PartitionSpec | None, mesh: Mesh) -> Spec:
    """The axes that already split a leaf: as told, or as its own sharding says."""
    sharding = getattr(value, "sharding", None)
    if spec is None and isinstance(value, Tracer):
        sharding = _traced_sharding(path, value, mesh)
    if spec is None and isinstance(sharding, NamedSharding):
        if sharding.mesh.shape != mesh.shape and sharding.spec != PartitionSpec():
            raise ValueError(
                f"{path}: expected an array on the mesh {dict(mesh.shape)}, found {dict(sharding.mesh.shape)}; give "
                "zero the mesh that the parameters lie on"
            )
        spec = sharding.spec
    names = [() if n is None else (n,) if isinstance(n, str) else tuple(n) for n in (spec or ())]
    for name in (n for group in names for n in group):
        if name not in mesh.shape:
            raise ValueError(
                f"{path}: its sharding names the axis '{name}', which the mesh {mesh.axis_names} lacks; give zero the "
                "mesh that the parameters lie on"
            )
    ndim = np.ndim(value)
    if len(names) > ndim:
        raise ValueError(f"{path}: expected a spec of at most {ndim} entries, found {spec}")
    return (*names, *[()] * (ndim - len(names)))


def _traced_sharding(path: str, value: Tracer, mesh: Mesh) -> NamedSharding | None:
    """The sharding of what `jit` traces, where its type shows it: on Explicit axes."""
    sharding = jax.typeof(value).sharding
    hidden = any(t == AxisType.Auto and sharding.mesh.shape[n] > 1 for n, t in zip(
        sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))  # fmt: skip
    if (sharding.mesh.empty or hidden) and mesh.size > 1:
        explicit = any(t == AxisType.Explicit for t in mesh.axis_types)
        place = ", or place them with jax.device_put(params, NamedSharding(mesh, spec)) first" if explicit else ""
        raise ValueError(
            f"{path}: inside jit the sharding of the parameters does not show; call init outside of jit, or tell it by "
            "param_specs: PartitionSpec() where they are whole on every device, else "
            f"jax.tree.map(lambda x: x.sharding.spec, params){place}"
        )
    return sharding


def _plan_leaf(path: str, value: Any, spec: Spec, mesh: Mesh, axis: str | None, stacked: int, share: bool) -> Leaf:
    if not hasattr(value, "dtype"):
        raise ValueError(f"{path}: expected an array, found {type(value).__name__}; wrap it in jnp.asarray")
    shape, dtype = tuple(np.shape(value)), jax.dtypes.canonicalize_dtype(value.dtype)
    if not jax.numpy.issubdtype(dtype, jax.numpy.floating):
        raise ValueError(f"{path}: expected a floating-point parameter, found {dtype}; keep it out with optax.masked")
    ranks = 1 if axis is None else mesh.shape[axis]
    split = next((i for i, names in enumerate(spec) if axis in names), None)
    resident = split is not None
    others = tuple(math.prod(mesh.shape[n] for n in names if n != axis) for names in spec)
    if not 0 <= stacked <= len(shape):
        raise ValueError(f"{path}: expected stacked between 0 and its {len(shape)} dimensions, found {stacked}")
    if split is not None and split < stacked:
        raise ValueError(f"{path}: '{axis}' splits dimension {split}, one of its {stacked} stacked ones; split another")
    for i, (n, o) in enumerate(zip(shape, others, strict=True)):
        if n % o:
            raise ValueError(
                f"{path}: dimension {i} of {shape} is split over {spec[i]}, and {o} does not divide {n}; pad it, or "
                "split another dimension"
            )
    if split is None:
        even = [i for i in range(stacked, len(shape)) if shape[i] and shape[i] // others[i] % ranks == 0]
        split = next((i for i in even if others[i] == 1), even[0] if even and share else None)
    elif shape[split] // others[split] % ranks:
        raise ValueError(
            f"{path}: dimension {split} of {shape} is split over '{axis}', and {ranks} does not divide it; pad it, or "
            "split another dimension"
        )
    return Leaf(path, shape, str(dtype), spec, ranks, axis, split, stacked, others, resident)


def _partition_spec(spec: Spec) -> PartitionSpec:
    """Without trailing Nones, as XLA returns it, so that arrays look the same before and after a step."""
    entries = [None if not names else names[0] if len(names) == 1 else names for names in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
