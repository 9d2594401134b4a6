"""START HERE. ZeRO around any elementwise optax transformation: `zero(inner, mesh=...)`.

The optimizer's state (float32 master parameters and whatever `inner` keeps, such as Adam's moments) is cut into one
shard per data rank. A step has three phases, and each is a function below:

    scatter   the gradient becomes this rank's shard of the mean                 (reduce-scatter)
    update    `inner` runs on the shards alone, in float32                       (no communication but the norm)
    gather    the new parameters, in their own dtype, reach every rank           (all-gather)

With d data ranks the state takes 1/d of the memory, the update 1/d of the time, and reduce-scatter + all-gather move as
many bytes as the all-reduce they replace (Rajbhandari et al., ZeRO, arXiv 1910.02054; Apex DistributedFusedAdam).

How a leaf is cut is in `partition.py`, the collectives in `collectives.py`, the kinds of gradient in `gradients.py`, in
which precision masters and moments are kept in `storage.py`, FP8 parameters in `fp8.py`.
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
from jax.sharding import Mesh, PartitionSpec

from jzero.fp8.parameters import PerTensor, checked
from jzero.fp8.recipes import DelayedScaling
from jzero.optim import chain, checks, collectives, elementwise, fp8, gradients, masters, precision, regions, scales
from jzero.optim.gradients import KINDS
from jzero.optim.loss_scale import DynamicLossScale, Guard, make_guard
from jzero.optim.partition import Plan, make_plan
from jzero.optim.storage import Keys, Slot, StateDtype, Storage, state_specs
from jzero.optim.transformation import ZeroState, ZeroTransformation

Inner = optax.GradientTransformation | Callable[[Any], optax.GradientTransformation]


def zero(
    inner: Inner,
    *,
    mesh: Mesh,
    axis: str | None = "data",
    replica_axis: str | Sequence[str] | None = None,
    master: str = "auto",
    state_dtype: StateDtype = None,
    stochastic_rounding: bool = False,
    gradients: str = "auto",
    grad_sync_dtype: Any = jnp.float32,
    param_sync_dtype: Any = None,
    clip_norm: float | None = None,
    skip_nonfinite: bool = False,
    loss_scale: DynamicLossScale | None = None,
    param_specs: Any = None,
    stacked: Callable[[str], int] | None = None,
    fp8_recipe: PerTensor | None = None,
) -> ZeroTransformation:
    """Shard the state of an elementwise optax transformation over a mesh axis (ZeRO).

    Args:
        inner: the elementwise transformation (adamw, lion, sgd with momentum, ...), or a function from the abstract
            parameters to one. Its masks and labels see the original, unsplit shapes. One that mixes positions of a leaf
            (adafactor, lamb, muon, a norm, ...) is refused by `init`, which names the operation.
        mesh: the device mesh, with Auto or Explicit axes.
        axis: the mesh axis that shards the state. None: no sharding (ZeRO off), for comparison.
        replica_axis: axis, or axes, over which gradients are averaged too but state is repeated (Apex: redundant
            group). Every axis that splits the batch is either `axis` or named here.
        master: what is kept beside each parameter's shard: "fp32" a float32 copy; "remainder" the 16 bits that a
            bfloat16 parameter lacks; "scaled_fp16" a float16 copy with a scale; "none" nothing, the parameter itself is
            updated. "auto" decides per leaf, as NeMo does: "none" where the parameter and what is gathered of it
            (`param_sync_dtype`) hold float32, or have the very dtype of all state (`state_dtype`); for bfloat16 ones
            "scaled_fp16" if that is the `state_dtype`, else "remainder"; "fp32" for all others, FP8 ones among them.
        state_dtype: how the arrays of the inner state are stored: "fp32", "bf16", "fp16", or with a scale per layer of
            each shard "scaled_fp16", "scaled_fp8" (e4m3); one for all, or by field, as
            `{"mu": "scaled_fp8", "nu": "scaled_fp16"}`. The update itself is float32. None: as `inner` keeps them.
        stochastic_rounding: round what is stored as bfloat16 without scale or master up or down at random, right on
            average. The state holds the seed and a count, so runs repeat exactly on the same mesh.
        gradients: kind of gradient, see `jzero.optim.gradients`: "auto" reads it from the type and raises where it
            cannot tell; "local", "reduced", "unreduced" declare it. Inside `shard_map` differentiate with respect to
            `jax.lax.pcast(params, axes, to="varying")`, or declare "reduced" where the loss is a mean over all ranks.
        grad_sync_dtype: dtype on the wire of the reduce-scatter, in which shards accumulate (Apex: the same name). Only
            local gradients cross the wire here; for others anything but float32 is an error.
        param_sync_dtype: dtype on the wire of the all-gather; default: the parameter's own. A floating dtype rounds, an
            integer one carries the bits. FP8 parameters cross it in one byte whatever it is.
        clip_norm: clip by the global norm of the scattered gradients, factor min(1, clip_norm / (norm + 1e-6)).
        skip_nonfinite: skip a step whose global gradient norm is not finite: parameters, moments, step count and
            schedule stay as they are, and `state.guard.skipped` counts it.
        loss_scale: a `jzero.DynamicLossScale`. Gradients are those of `tx.scale_loss(loss, state)`, and are divided by
            the scale before the norm is taken; includes `skip_nonfinite`.
        param_specs: tree (or prefix) of the parameters' `PartitionSpec`s; default: each array's own sharding. Needed
            only where `init` cannot see shardings (inside `jit` with Auto axes).
        stacked: function from a leaf's path to its number of leading layer dimensions, which are never split.
        fp8_recipe: how the scales of FP8 parameters (`jzero.fp8.Quantised` leaves, which may stand among others) are
            chosen: `DelayedScaling` (the default) or `CurrentScaling`. Such leaves need `step`.

    Returns:
        An optax `GradientTransformationExtraArgs` with `step`, `state_specs`, `partition_report` and `update_shards`.
        `update` returns float32 updates for `optax.apply_updates`, whatever the parameters' dtype: the sum with a
        parameter of 16 bits is then exactly the gathered new one.

    Raises:
        ValueError: an unknown option or axis; on init and update, a tree, leaf or gradient that does not fit (named).

    Example:
        >>> import jax, jax.numpy as jnp, jzero, optax
        >>> tx = jzero.zero(optax.lion(1e-3), mesh=jzero.make_mesh(data=-1))
        >>> params = {"w": jnp.ones((8, 4)), "b": jnp.zeros(3)}
        >>> state = tx.init(params)
        >>> params, state = jax.jit(tx.step)(jax.tree.map(jnp.ones_like, params), state, params)
    """
    checks.check_inner(inner)
    checks.check_mesh(mesh)
    core = Zero(
        inner=inner,
        mesh=mesh,
        axis=axis,
        replica=regions.replica_axes(replica_axis, mesh, axis),
        storage=Storage.of(master, state_dtype, param_sync_dtype, stochastic_rounding),
        gradients=checks.check_choice("gradients", gradients, KINDS),
        grad_sync_dtype=jnp.dtype(grad_sync_dtype or jnp.float32),
        clip_norm=clip_norm,
        guard=make_guard(skip_nonfinite, loss_scale),
        param_specs=param_specs,
        stacked=stacked,
        fp8_recipe=checked(fp8_recipe or DelayedScaling(), "fp8_recipe"),
    )
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm: expected a positive number or None, found {clip_norm}")
    tx = ZeroTransformation(cast(Any, core.init), cast(Any, core.apply))
    tx.core = core
    return tx


@dataclasses.dataclass(frozen=True, eq=False)
class Zero:
    """The options of one `zero(...)`, and the phases that use them."""

    inner: Inner
    mesh: Mesh
    axis: str | None
    replica: tuple[str, ...]
    storage: Storage
    gradients: str
    grad_sync_dtype: Any
    clip_norm: float | None
    guard: Guard | None
    param_specs: Any
    stacked: Callable[[str], int] | None
    fp8_recipe: PerTensor

    # --- state -------------------------------------------------------------------------------------------------------

    def plan(self, params: Any) -> Plan:
        """How every leaf of `params` is split."""
        plan = make_plan(params, self.mesh, axis=self.axis, param_specs=self.param_specs, stacked=self.stacked)
        for leaf in plan.leaves:
            if shared := sorted({*leaf.axes} & {*self.replica}):
                raise ValueError(
                    f"{leaf.path}: it is split over {shared}, over which its state is to be repeated; leave these out "
                    "of replica_axis"
                )
        self.storage.check(plan)
        return plan

    def init(self, params: Any, masters: Any = None) -> ZeroState:
        """The initial state; each device computes its own shards. Abstract for `jax.ShapeDtypeStruct`s.

        `masters`: a tree of plain arrays, the values that `params` are rounded from; default: the parameters' own.
        """
        leaves = jax.tree.leaves(params)
        if leaves and all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            return self.abstract_init(params)
        if bound := regions.bound_axes():
            raise ValueError(
                f"zero: init needs whole arrays, found a call inside shard_map over {bound}; call it outside"
            )
        plan = self.plan(params)
        with regions.explaining_closures(self.mesh):
            flat = plan.flatten(params, "params")
            given = flat if masters is None else plan.flatten(masters, "masters")
            return self._init_program(plan, masters is not None)(flat, given)

    @functools.cache  # noqa: B019  one entry per plan; the transformation lives as long as the program
    def _init_program(self, plan: Plan, given: bool) -> Callable[[list[Array], list[Array]], ZeroState]:
        def build(params: list[Array], values: list[Array]) -> ZeroState:
            own = [collectives.take(p, leaf) for p, leaf in zip(params, plan.leaves, strict=True)]
            whole = [fp8.float32(collectives.take(n, leaf)) for n, leaf in zip(values, plan.leaves, strict=True)]
            return self.first_state(whole, own, self.transformation(plan).init(plan.unflatten(whole)), plan)

        specs = [leaf.param_specs for leaf in plan.leaves]
        values = [leaf.param_spec for leaf in plan.leaves] if given else specs
        return regions.enter(build, self.mesh, (specs, values), self.specs(plan))

    def abstract_init(self, params: Any) -> ZeroState:
        """The state as `jax.ShapeDtypeStruct`s with their shardings; allocates nothing."""
        plan = self.plan(params)
        state = self.abstract(plan)
        return jax.tree.map(functools.partial(regions.placed, mesh=self.mesh), state, self.specs(plan))

    def specs(self, plan: Plan) -> ZeroState:
        """A `PartitionSpec` for every array of the state."""
        state = self.abstract(plan)
        scalars = jax.tree.map(lambda _: PartitionSpec(), (state.rounding, state.guard))
        scaling = fp8.state_specs(plan, self.fp8_recipe)
        return ZeroState(state_specs(state.master, plan), state_specs(state.inner, plan), plan, *scalars, fp8=scaling)

    @functools.cache  # noqa: B019  one entry per plan, as above
    def abstract(self, plan: Plan) -> ZeroState:
        """The state as `jax.ShapeDtypeStruct`s of global shapes."""
        master = [self.storage.abstract_master(leaf) for leaf in plan.leaves]
        inner = self.storage.abstract_inner(self.abstract_inner(plan), self.slots(plan))
        scalars = jax.eval_shape(lambda: (self.storage.first_key(), self.first_guard()))
        scaling = fp8.abstract_state(plan, self.fp8_recipe)
        return ZeroState(plan.unflatten(master), inner, plan, *scalars, fp8=scaling)

    def first_state(self, values: list[Array], arrived: list[Any], inner: Any, plan: Plan) -> ZeroState:
        """`encode`, with what only steps change as it is before the first one."""
        state = self.encode(values, arrived, inner, plan, self.storage.first_key())
        scaling = fp8.first_state(plan, self.fp8_recipe, arrived)
        return dataclasses.replace(state, guard=self.first_guard(), fp8=scaling)

    def first_guard(self) -> Any:
        """The state of what skips steps, before the first one."""
        return self.guard.init() if self.guard else optax.MaskedNode()

    def abstract_inner(self, plan: Plan) -> Any:
        """The inner transformation's own state as `jax.ShapeDtypeStruct`s of global shapes."""
        shapes = [jax.ShapeDtypeStruct(leaf.shard_shape, jnp.float32) for leaf in plan.leaves]
        return jax.eval_shape(self.transformation(plan).init, plan.unflatten(shapes))

    @functools.cache  # noqa: B019  one entry per plan, as above
    def slots(self, plan: Plan) -> list[Slot]:
        """How every array of the inner state is stored, in order."""
        return self.storage.slots(self.abstract_inner(plan), plan)

    def transformation(self, plan: Plan) -> optax.GradientTransformationExtraArgs:
        """The inner transformation for these parameters, on shards; it sees the original shapes."""
        inner = self.inner
        if not isinstance(inner, optax.GradientTransformation):
            shapes = plan.unflatten([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in plan.leaves])
            inner = checks.check_made(inner(shapes))
        return elementwise.on_shards(inner, plan)

    def encode(
        self,
        values: list[Array],
        arrived: list[Any],
        inner: Any,
        plan: Plan,
        key: Any,
        known: scales.Scales | None = None,
        keys: Keys | None = None,
    ) -> ZeroState:
        """The state that keeps float32 values and the inner state; `arrived` is what the parameters become."""
        known = known or scales.of(values, inner, self.storage, self.slots(plan), plan)
        each = zip(values, arrived, plan.leaves, known.masters, strict=True)
        master = [self.storage.stored(n, p, leaf, scale) for n, p, leaf, scale in each]
        stored = self.storage.encode(inner, self.slots(plan), known.inner, keys)
        return ZeroState(plan.unflatten(master), stored, plan, key)

    # --- the step ----------------------------------------------------------------------------------------------------

    def apply(self, updates: Any, state: ZeroState, params: Any = None, **extra: Any) -> tuple[Any, ZeroState]:
        """The three phases, as optax's `update`."""
        if params is not None and masters.is_concrete((updates, state, params)):
            checks.check_arguments(updates, state, params)
            masters.check(self, params, state)
        return self.run(updates, state, params, extra, direct=False)

    def run(
        self, grads: Any, state: ZeroState, params: Any, extra: dict[str, Any], *, direct: bool
    ) -> tuple[Any, ZeroState]:
        """The three phases. `direct` returns new parameters, otherwise updates."""
        if params is None:
            raise ValueError("zero: update needs the parameters; call tx.update(grads, state, params)")
        checks.check_arguments(grads, state, params)
        plan = state.plan.like(params)
        ranks = 1 if self.axis is None else self.mesh.shape[self.axis]
        checks.check_state(state, self.abstract(plan), plan, self.axis, ranks)
        if not direct:
            checks.check_updates(plan)
        flat = plan.flatten(params, "params")
        for p, leaf in zip(flat, plan.leaves, strict=True):
            gradients.check_parameter(p, leaf)
        values, kinds = gradients.prepare(grads, plan, self.replica, self.gradients, self.grad_sync_dtype, self.mesh)
        extra = gradients.numeric(extra)
        program = self._step_program(plan, kinds, direct, tuple(sorted(extra)), regions.bound_axes())
        with regions.explaining_closures(self.mesh):
            out, after = program(values, dataclasses.replace(state, plan=plan), flat, extra)
        return plan.unflatten(out), dataclasses.replace(after, plan=state.plan)

    @functools.cache  # noqa: B019  one entry per plan and kind of call, as above
    def _step_program(
        self,
        plan: Plan,
        kinds: tuple[gradients.Kind, ...],
        direct: bool,
        extra: tuple[str, ...],
        bound: tuple[str, ...],
    ) -> Callable[..., tuple[list[Array], ZeroState]]:
        def phases(values: list[Array], state: ZeroState, params: list[Array], extra: dict[str, Any]):
            shards = self.unscaled(self.scatter(values, plan, kinds, bound), state)
            norm = collectives.global_norm(shards, plan.leaves) if self.clip_norm or self.guard else None
            own = [collectives.take(p, leaf) for p, leaf in zip(params, plan.leaves, strict=True)]
            gather = lambda new, updates: self.gather(new, updates, params, plan, direct)
            return self.guarded(shards, state, own, norm, extra, gather, direct=direct)

        param_specs = [leaf.param_specs for leaf in plan.leaves]
        specs = self.specs(plan)
        extra_specs = {name: PartitionSpec() for name in extra}
        in_specs = (gradients.grad_specs(plan, kinds, bound), specs, param_specs, extra_specs)
        return regions.enter(phases, self.mesh, in_specs, (param_specs, specs), bound)

    def scatter(
        self, values: list[Array], plan: Plan, kinds: Sequence[gradients.Kind], bound: Sequence[str]
    ) -> list[Array]:
        """Phase 1: every gradient as this rank's float32 shard of the mean."""
        with jax.named_scope("zero_scatter"):
            return [
                gradients.to_shard(g, leaf, kind, self.replica, self.grad_sync_dtype, bound)
                for g, leaf, kind in zip(values, plan.leaves, kinds, strict=True)
            ]

    def unscaled(self, shards: Sequence[Array], state: ZeroState) -> list[Array]:
        """The shards of the loss's own gradient, where the loss was scaled."""
        return self.guard.unscale(shards, state.guard) if self.guard else list(shards)

    def guarded(
        self, shards: list, state: ZeroState, params: list, norm: Any, extra: dict, gather: Callable, direct: bool
    ) -> tuple[Any, ZeroState]:
        """Phase 2, or no change at all where a gradient is not finite and `guard` skips such steps; then phase 3.

        `gather` takes new shards and updates. FP8 parameters get their next scales after it.
        """
        with jax.named_scope("zero_update"):  # the phases' names in profiles
            new, flat, after, amaxes = self.update(shards, state, params, norm, extra, direct=direct)
        after, keep = dataclasses.replace(after, guard=state.guard), lambda new, old: new
        if self.guard is not None:
            finite, still = jnp.isfinite(norm), [jnp.zeros_like(u) for u in flat]
            keep = functools.partial(self.guard.keep, finite)
            new, flat, after = keep((new, flat, after), (list(params), still, state))
            after = dataclasses.replace(after, guard=self.guard.next(state.guard, finite))
        with jax.named_scope("zero_gather"):
            out = gather(new, flat)
        scaling = fp8.next_state(amaxes, state.fp8, state.plan, self.fp8_recipe, behind=out)
        return out, dataclasses.replace(after, fp8=keep(scaling, state.fp8))

    def update(
        self,
        shards: list[Array],
        state: ZeroState,
        params: list[Any],
        norm: Array | None,
        extra: dict[str, Any],
        *,
        direct: bool,
    ) -> tuple[list[Any], list[Array], ZeroState, dict[int, Array]]:
        """Phase 2: decode, clip, run the inner transformation, encode.

        Returns new parameters, updates, the state but for what `fp8.next_state` makes of the fourth result.
        """
        plan, tx = state.plan, self.transformation(state.plan)
        if self.clip_norm and norm is not None:
            factor = chain.clip_factor(norm, self.clip_norm)
            shards = [g * factor for g in shards]

        def compute(read: scales.Inputs) -> tuple[list[Array], list[Array], Any]:
            pairs = zip(read.masters, read.params, plan.leaves, strict=True)
            whole = [self.storage.whole(m, p, leaf) for m, p, leaf in pairs]
            inner = self.storage.decode(read.inner, self.slots(plan))
            updates, inner = tx.update(plan.unflatten(read.shards), inner, plan.unflatten(whole), **extra)
            flat = plan.flatten(updates, "updates of the inner transformation")
            return [w + u.astype(jnp.float32) for w, u in zip(whole, flat, strict=True)], flat, inner

        read = scales.Inputs(shards, plan.flatten(state.master, "master"), state.inner, params)
        read, known = scales.measured(compute, read, self.storage, self.slots(plan), plan)
        values, flat, inner = compute(read)
        amaxes = known.amaxes or fp8.amaxes(values, plan)
        eight_bit, pending = fp8.cast(values, amaxes, read.params, state.fp8, plan, self.fp8_recipe)
        keys, first = self.storage.keys(state.rounding, self.mesh.axis_names), len(self.slots(plan))
        pairs = enumerate(zip(values, plan.leaves, strict=True))
        new = [
            eight_bit.get(i) or self.storage.sent(n, leaf, keys and keys.of(first + i, leaf)) for i, (n, leaf) in pairs
        ]
        arrived = new if direct else [precision.applied(n, p) for n, p in zip(new, params, strict=True)]
        key = self.storage.next_key(state.rounding)
        after = self.encode(values, arrived, inner, plan, key, known, keys)
        return new, flat, dataclasses.replace(after, fp8=state.fp8), pending

    def gather(self, new: list[Any], updates: list[Array], params: list[Any], plan: Plan, direct: bool) -> list[Any]:
        """Phase 3: what every rank needs, from the shards: new parameters, or updates that lead to them."""
        each = zip(new, updates, params, plan.leaves, strict=True)
        return [collectives.share(n, u, p, leaf, self.storage.wire(leaf), direct=direct) for n, u, p, leaf in each]
