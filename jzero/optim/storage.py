"""In which precision each parameter's master and each array of the inner state are kept: the rules, and their use.

`Storage` chooses a codec of `precision.py` for every leaf, refuses combinations that make no sense, and encodes and
decodes whole trees. Nothing here communicates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec

from jzero.optim import precision
from jzero.optim.partition import Leaf, Plan, owners
from jzero.optim.precision import STATE_DTYPES, Codec

MASTERS = ("auto", "fp32", "none", "remainder", "scaled_fp16")
StateDtype = str | Mapping[str, str] | None


class Slot(NamedTuple):
    """How one array of the inner state is stored."""

    leaf: Leaf | None  # the parameter it belongs to; None: to none
    field: str  # of the inner state, as in `state.mu["w"]`; "" where it belongs to no parameter
    codec: Codec | None  # None: as the inner transformation keeps it
    dtype: Any  # in which the inner transformation keeps it


@dataclasses.dataclass(frozen=True)
class Storage:
    """The options of `zero` that say how numbers are stored.

    Attributes:
        master: one of `MASTERS`.
        state_dtype: one of `STATE_DTYPES` for all of the inner state, or (field, choice) pairs; None: as it comes.
        param_sync_dtype: dtype on the wire of the all-gather, None for each parameter's own.
        stochastic_rounding: round bfloat16 that has neither master nor scale up or down at random.
    """

    master: str = "auto"
    state_dtype: str | tuple[tuple[str, str], ...] | None = None
    param_sync_dtype: Any = None
    stochastic_rounding: bool = False

    @staticmethod
    def of(master: str, state_dtype: StateDtype, param_sync_dtype: Any, stochastic_rounding: bool) -> Storage:
        """From what the caller wrote; raises a ValueError for an unknown choice."""
        pairs = state_dtype.items() if isinstance(state_dtype, Mapping) else [("", state_dtype)]
        for field, choice in pairs:
            option = f"state_dtype[{field!r}]" if field else "state_dtype"
            if choice is not None and choice not in STATE_DTYPES:
                names = ", ".join(map(repr, STATE_DTYPES))
                raise ValueError(f"{option}: expected one of {names}, found {choice!r}")
        if master not in MASTERS:
            raise ValueError(f"master: expected one of {', '.join(map(repr, MASTERS))}, found {master!r}")
        chosen = tuple(state_dtype.items()) if isinstance(state_dtype, Mapping) else state_dtype
        wire = None if param_sync_dtype is None else jnp.dtype(param_sync_dtype)
        return Storage(master, chosen, wire, bool(stochastic_rounding))

    # --- masters -----------------------------------------------------------------------------------------------------

    def wire(self, leaf: Leaf) -> Any:
        """The dtype in which a parameter is gathered; an FP8 one as it is."""
        if leaf.quantised:
            return jnp.dtype(leaf.dtype)
        return self.param_sync_dtype or jnp.dtype(leaf.dtype)

    def kept(self, leaf: Leaf) -> Any:
        """The narrowest dtype that a new parameter goes through: all that is left of it without a master."""
        wire, own = self.wire(leaf), jnp.dtype(leaf.dtype)
        return own if precision.holds(wire, own) else wire

    def mode(self, leaf: Leaf) -> str:
        """How the master of a leaf is kept: `master`, with "auto" resolved as the docstring of `zero` says."""
        if self.master != "auto":
            return self.master
        kept = self.kept(leaf)
        if precision.holds(kept, jnp.float32):
            return "none"
        if kept == leaf.dtype == {"bf16": "bfloat16", "fp16": "float16"}.get(str(self.state_dtype)):
            return "none"
        if kept != jnp.bfloat16 or leaf.dtype != "bfloat16":
            return "fp32"
        return "scaled_fp16" if self.state_dtype == "scaled_fp16" else "remainder"

    def has_master(self, leaf: Leaf) -> bool:
        """Whether the state keeps a master, or a part of one, of this leaf."""
        return self.mode(leaf) != "none"

    def check(self, plan: Plan) -> None:
        """Raise a ValueError for a leaf whose master cannot be kept as told; names what does make sense."""
        for leaf in plan.leaves:
            kept, wire = self.kept(leaf), self.wire(leaf)
            if jnp.issubdtype(wire, jnp.integer) and wire.itemsize < jnp.dtype(leaf.dtype).itemsize:
                raise ValueError(
                    f"{leaf.path}: param_sync_dtype={wire.name} would carry the bits of a {leaf.dtype} parameter and "
                    "has too few; expected a wider integer, or a floating dtype such as float8_e5m2"
                )
            if leaf.quantised and self.master in ("none", "remainder"):
                raise ValueError(
                    f"{leaf.path}: master={self.master!r} would leave an FP8 parameter without the value that it is "
                    "cast from; expected master='auto', 'fp32' or 'scaled_fp16'"
                )
            if self.master == "none" and kept != leaf.dtype:
                raise ValueError(
                    f"{leaf.path}: param_sync_dtype={wire.name} would round the only copy of a {leaf.dtype} parameter "
                    "in every step, since master='none'; expected master='auto' or 'fp32', or a dtype no narrower"
                )
            if self.master == "remainder" and not kept == leaf.dtype == "bfloat16":
                gathered = "" if kept == leaf.dtype else f" that is gathered as {wire.name}"
                raise ValueError(
                    f"{leaf.path}: master='remainder' needs a bfloat16 parameter that holds the other 16 bits, found a "
                    f"{leaf.dtype} one{gathered}; expected master='auto', or 'fp32'"
                )
            if self.master == "scaled_fp16" and precision.holds(kept, jnp.float16):
                raise ValueError(
                    f"{leaf.path}: master='scaled_fp16' would be no more precise than the {kept.name} parameter "
                    "itself; expected master='auto', 'fp32' or 'none'"
                )

    def master_codec(self, leaf: Leaf) -> Codec | None:
        """The codec of a master that is stored whole; None for a remainder or none."""
        mode = self.mode(leaf)
        if mode == "fp32":
            return precision.cast(jnp.float32)
        return precision.scaled("float16", leaf.stacked) if mode == "scaled_fp16" else None

    def whole(self, stored: Any, p: Array, leaf: Leaf) -> Array:
        """The float32 value that an update starts from.

        Args:
            stored: what the state keeps.
            p: the parameter's shard.
            leaf: the plan.
        """
        if codec := self.master_codec(leaf):
            return codec.decode(stored)
        return p.astype(jnp.float32) if self.mode(leaf) == "none" else precision.join(p, stored)

    def stored(self, n: Array, arrived: Array, leaf: Leaf, scale: Array | None = None) -> Any:
        """What the state keeps of a new float32 value, of which `arrived` reaches the parameter."""
        if codec := self.master_codec(leaf):
            return codec.store(n, scale)
        return optax.MaskedNode() if self.mode(leaf) == "none" else precision.remainder(n, arrived)

    def sent(self, n: Array, leaf: Leaf, key: Array | None = None) -> Array:
        """A new float32 value as the parameter it becomes: of the leaf's dtype, rounded as it is sent."""
        mode = self.mode(leaf)
        if mode == "remainder":
            return precision.split(n)[0]
        if key is not None and mode == "none" and leaf.dtype == "bfloat16":
            n = precision.stochastic_round(n, key)
        n = precision.round_to(n, leaf.dtype)
        kept = self.kept(leaf)
        return (n if kept == leaf.dtype else precision.round_to(n, kept)).astype(leaf.dtype)

    def abstract_master(self, leaf: Leaf) -> Any:
        """The stored master as `jax.ShapeDtypeStruct`s of global shape."""
        if codec := self.master_codec(leaf):
            return _abstract(leaf.shard_shape, codec, leaf)
        return jax.ShapeDtypeStruct(leaf.shard_shape, jnp.int16) if self.has_master(leaf) else optax.MaskedNode()

    # --- the inner state ---------------------------------------------------------------------------------------------

    def slots(self, abstract: Any, plan: Plan) -> list[Slot]:
        """How every array of the inner state is stored, in order; raises a ValueError for a choice that cannot apply.

        Args:
            abstract: the inner transformation's state on the whole shards, as `jax.ShapeDtypeStruct`s.
            plan: the parameters' plan.
        """
        paths = jax.tree_util.tree_leaves_with_path(abstract)
        found = []
        for (path, x), leaf in zip(paths, owners(abstract, plan), strict=True):
            own = leaf is not None and jnp.issubdtype(x.dtype, jnp.floating)
            found.append((leaf, _field(path, leaf) if leaf and own else "", x.dtype))
        fields = sorted({field for _, field, _ in found if field})
        choices = self._choices(fields)
        slots = [
            Slot(leaf, field, STATE_DTYPES[choices[field]](leaf.stacked) if leaf and field in choices else None, dtype)
            for leaf, field, dtype in found
        ]
        if self.stochastic_rounding:
            self._check_rounding(slots, plan)
        return slots

    def _choices(self, fields: Sequence[str]) -> dict[str, str]:
        if self.state_dtype is None:
            return {}
        if not fields:
            raise ValueError("state_dtype: the inner transformation keeps no arrays to store; leave the option out")
        by_field = isinstance(self.state_dtype, tuple)
        chosen = dict(
            self.state_dtype if isinstance(self.state_dtype, tuple) else [(f, self.state_dtype) for f in fields]
        )
        for field, choice in chosen.items():
            if field not in fields:
                raise ValueError(f"state_dtype: expected fields of the inner state, {fields}, found {field!r}")
            if field == "nu" and choice == "scaled_fp8":
                option = "state_dtype['nu']" if by_field else "state_dtype"
                raise ValueError(
                    f"{option}='scaled_fp8': second moments below 1/200000 of the largest would become 0 and their "
                    "updates be divided by eps; expected {'mu': 'scaled_fp8', 'nu': 'scaled_fp16'}"
                )
        return chosen

    def _check_rounding(self, slots: Sequence[Slot], plan: Plan) -> None:
        parameters = any(leaf.dtype == "bfloat16" and not self.has_master(leaf) for leaf in plan.leaves)
        if plan.leaves and not parameters and not any(_rounds_at_random(slot) for slot in slots):
            raise ValueError(
                "stochastic_rounding: nothing is stored as bfloat16 without a scale or a master; expected "
                "state_dtype='bf16', or bfloat16 parameters with master='none'"
            )

    def encode(
        self, inner: Any, slots: Sequence[Slot], scales: Sequence[Array | None], keys: Keys | None = None
    ) -> Any:
        """The inner transformation's state as it is stored."""
        arrays, treedef = jax.tree.flatten(inner)
        out = []
        for i, (x, slot, scale) in enumerate(zip(arrays, slots, scales, strict=True)):
            if slot.codec is not None:
                x = x.astype(jnp.float32)
                if keys is not None and slot.leaf is not None and _rounds_at_random(slot):
                    x = precision.stochastic_round(x, keys.of(i, slot.leaf))
                x = slot.codec.store(x, scale)
            out.append(x)
        return jax.tree.unflatten(treedef, out)

    def decode(self, inner: Any, slots: Sequence[Slot]) -> Any:
        """What is stored, as the inner transformation knows it."""
        arrays, treedef = jax.tree.flatten(inner, is_leaf=precision.is_scaled)
        pairs = zip(arrays, slots, strict=True)
        out = [x if slot.codec is None else slot.codec.decode(x).astype(slot.dtype) for x, slot in pairs]
        return jax.tree.unflatten(treedef, out)

    def abstract_inner(self, abstract: Any, slots: Sequence[Slot]) -> Any:
        """The stored inner state as `jax.ShapeDtypeStruct`s of global shape."""
        arrays, treedef = jax.tree.flatten(abstract)
        out = [
            x if slot.codec is None or slot.leaf is None else _abstract(x.shape, slot.codec, slot.leaf)
            for x, slot in zip(arrays, slots, strict=True)
        ]
        return jax.tree.unflatten(treedef, out)

    # --- random numbers ----------------------------------------------------------------------------------------------

    def first_key(self) -> Any:
        """The state of the random numbers before the first step: uint32 [2], seed and count; nothing where unused."""
        return jnp.zeros(2, jnp.uint32) if self.stochastic_rounding else optax.MaskedNode()

    def next_key(self, state: Any) -> Any:
        """The state after a step."""
        return state + jnp.asarray([0, 1], jnp.uint32) if self.stochastic_rounding else state

    def keys(self, state: Any, bound: Sequence[str]) -> Keys | None:
        """The keys of one step; None without stochastic rounding."""
        if not self.stochastic_rounding:
            return None
        return Keys(jax.random.wrap_key_data(state, impl="threefry2x32"), tuple(bound))


class Keys(NamedTuple):
    """The random keys of one step: by array, and by rank where ranks hold different parts of it."""

    step: Array
    axes: tuple[str, ...]  # of the mesh

    def of(self, number: int, leaf: Leaf) -> Array:
        """The key of one array, the same wherever the same shard is held."""
        key = jax.random.fold_in(self.step, number)
        for name in self.axes:
            if name in leaf.axes:
                key = jax.random.fold_in(key, jax.lax.axis_index(name))
        return key


def state_specs(state: Any, plan: Plan) -> Any:
    """The `PartitionSpec` of every array of a stored inner state or tree of masters, scales included."""
    specs = [PartitionSpec() if leaf is None else leaf.shard_spec for leaf in owners(state, plan)]
    return jax.tree.unflatten(jax.tree.structure(state), specs)


def _rounds_at_random(slot: Slot) -> bool:
    return slot.codec is not None and not slot.codec.scaled and slot.codec.dtype == jnp.bfloat16


def _abstract(shape: tuple[int, ...], codec: Codec, leaf: Leaf) -> Any:
    value = jax.ShapeDtypeStruct(shape, codec.dtype)
    return precision.Scaled(value, jax.ShapeDtypeStruct(leaf.scale_shape, jnp.float32)) if codec.scaled else value


def _field(path: Sequence[Any], leaf: Leaf) -> str:
    """The name of the inner state's field that holds an array: "mu" of `state[0].mu["w"]`."""
    written = lambda n: len(jax.tree_util.keystr(tuple(path[:n])))
    before = [key for n, key in enumerate(path, 1) if written(n) <= written(len(path)) - len(leaf.path)]
    fields = [key.name for key in before if isinstance(key, jax.tree_util.GetAttrKey)]
    keys = [str(getattr(key, "key", getattr(key, "idx", key))) for key in before]
    return fields[-1] if fields else keys[-1] if keys else "state"
