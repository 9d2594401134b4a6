"""What `zero` returns and what it keeps: the transformation with its methods, and its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax import Array

from jzero.optim import collectives, masters
from jzero.optim.partition import Plan
from jzero.optim.report import PartitionReport, partition_report


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ZeroState:
    """State of `zero`: shards, and the plan they were cut by."""

    master: Any  # like the parameters: shards (Leaf.shard_shape) float32, int16 remainders or Scaled; MaskedNode: none
    inner: Any  # state of the inner transformation on the shards, stored as told; scalars (a step count) are replicated
    plan: Plan = dataclasses.field(metadata={"static": True})
    # uint32 [2], seed and count of stochastic rounding; MaskedNode without
    rounding: Any = dataclasses.field(default_factory=optax.MaskedNode)
    # GuardState: steps skipped, and the loss scale; MaskedNode where no step is ever skipped
    guard: Any = dataclasses.field(default_factory=optax.MaskedNode)
    # DelayedState of the FP8 parameters: the next scale and the history of each; MaskedNode without
    fp8: Any = dataclasses.field(default_factory=optax.MaskedNode)


class ZeroTransformation(optax.GradientTransformationExtraArgs):
    """What `zero` returns: an optax transformation `(init, update)` with a few methods more."""

    core: Any  # jzero.optim.zero.Zero, the options

    def step(self, grads: Any, state: ZeroState, params: Any, **extra: Any) -> tuple[Any, ZeroState]:
        """One whole step.

        The same numbers as `update` followed by `optax.apply_updates`, without the full-size updates in between. The
        only form for FP8 parameters, to which nothing can be added.

        Args:
            grads: a tree like the parameters, of any kind that `jzero.optim.gradients` names.
            state: of this transformation.
            params: the parameters.
            **extra: passed to the inner transformation.

        Returns:
            New parameters, in the dtypes and shardings of the old ones, and the new state.

        Raises:
            ValueError: a tree, leaf or gradient that does not fit (named), or the state of another transformation.

        Example:
            >>> import jax, jax.numpy as jnp, jzero, optax
            >>> tx = jzero.zero(optax.sgd(0.5), mesh=jzero.make_mesh(data=-1))
            >>> params = {"w": jnp.ones(8)}
            >>> params, state = jax.jit(tx.step)({"w": jnp.ones(8)}, tx.init(params), params)
            >>> float(params["w"][0])
            0.5
        """
        return self.core.run(grads, state, params, extra, direct=True)

    def init_with(self, params: Any, masters: Any) -> ZeroState:
        """`init` for parameters that are rounded: the masters keep what they are rounded from.

        Args:
            params: as for `init`.
            masters: a tree of plain arrays, shaped and sharded as the parameters.

        Returns:
            The state before the first step. Where the values are float32 shards already, see
            `jzero.optim.convert.from_shards`.

        Raises:
            ValueError: as `init`; names the leaf.

        Example:
            >>> import jax.numpy as jnp, jzero
            >>> from jzero import fp8
            >>> whole = {"w": jnp.full((8, 8), 0.3)}
            >>> tx = jzero.distributed_fused_adam(1e-3, mesh=jzero.make_mesh(data=-1))
            >>> state = tx.init_with(fp8.quantise(whole, "w"), whole)
            >>> round(float(state.master["w"][0, 0]), 6)
            0.3
        """
        return self.core.init(params, masters)

    def state_specs(self, params: Any) -> ZeroState:
        """The `PartitionSpec` of every array of the state, as `shard_map`'s in_specs and out_specs take them.

        Args:
            params: arrays or `jax.ShapeDtypeStruct`s.

        Example:
            >>> import jax, jax.numpy as jnp, jzero, optax
            >>> tx = jzero.zero(optax.sgd(0.1, momentum=0.9), mesh=jzero.make_mesh(data=-1))
            >>> tx.state_specs({"w": jnp.ones((8, 4))}).inner[0].trace["w"] == jax.sharding.PartitionSpec("data")
            True
        """
        return self.core.specs(self.core.plan(params))

    def partition_report(self, params: Any) -> PartitionReport:
        """How every leaf is split, kept, and what it costs: one row each, see `jzero.optim.report.ReportRow`.

        Example:
            >>> import jax, jzero
            >>> tx = jzero.distributed_fused_adam(1e-3, mesh=jzero.make_mesh(data=-1))
            >>> tx.partition_report({"w": jax.ShapeDtypeStruct((16, 4), "float32")})[0].split
            'dimension 0 of 2'
        """
        state = self.core.abstract_init(params)
        return partition_report(state, self.core.storage, self.core.slots(state.plan))

    def check_masters(self, params: Any, state: ZeroState) -> None:
        """Raise if parameters are no longer what their masters round to; outside of `jit`.

        Masters of float32 or scaled float16, that is; a 16-bit remainder has no value of its own to compare with.

        Something changed updates or parameters after `zero`, a later member of the chain or an edit between steps, and
        the next step would silently undo it. `update` checks by itself outside of `jit`; a compiled step cannot raise.

        Raises:
            ValueError: names the first such leaf.

        Example:
            >>> import jax.numpy as jnp, jzero
            >>> tx = jzero.distributed_fused_adam(1e-3, mesh=jzero.make_mesh(data=-1))
            >>> params = {"w": jnp.ones(8, jnp.bfloat16)}
            >>> tx.check_masters(params, tx.init(params))
        """
        masters.check(self.core, params, state)

    def plan(self, params: Any) -> Plan:
        """The plan of a tree of parameters: one `Leaf` per parameter (see `jzero.optim.partition`)."""
        return self.core.plan(params)

    def update_shards(
        self,
        shards: Sequence[Array],
        state: ZeroState,
        params: Sequence[Array],
        *,
        norm: Array | None = None,
        gather: Callable[[list[Any]], Any] = lambda new: new,
        **extra: Any,
    ) -> tuple[Any, ZeroState, Array]:
        """Phase 2 alone, for a step that scatters and gathers by itself; inside a manual region over the whole mesh.

        Args:
            shards: float32 mean-gradient shards, in the plan's order.
            state: this rank's part of the state.
            params: this rank's shards of the parameters, in the plan's order; an FP8 one is one `Quantised`.
            norm: the global norm of `shards`, where the caller has taken it; None: it is taken here.
            gather: what to do with the new shards as soon as they are there. The reduction of the magnitudes of FP8
                parameters comes after it, so that no gather waits for it.
            **extra: passed to the inner transformation.

        Returns:
            New parameter shards in the parameters' dtype, or what `gather` made of them; new state; and the gradients'
            global norm before clipping.
        """
        own = self.core.unscaled(shards, state)
        if norm is None:
            unscaled = collectives.global_norm(own, state.plan.leaves)
        else:
            [unscaled] = self.core.unscaled([norm], state)
        then = lambda new, _: gather(new)
        out, state = self.core.guarded(own, state, list(params), unscaled, extra, then, direct=True)
        return out, state, unscaled

    def scale_loss(self, loss: Array, state: ZeroState) -> Array:
        """The loss whose gradient to give to `update`: float32, multiplied by the dynamic loss scale.

        Raises:
            ValueError: `zero` was not given `loss_scale`.

        Example:
            >>> import jax.numpy as jnp, jzero, optax
            >>> scale = jzero.DynamicLossScale(initial=1024.0)
            >>> tx = jzero.zero(optax.sgd(0.1), mesh=jzero.make_mesh(data=-1), loss_scale=scale)
            >>> state = tx.init({"w": jnp.ones(8)})
            >>> float(tx.scale_loss(jnp.float32(2.0), state))
            2048.0
        """
        guard = self.core.guard
        if guard is None or guard.loss_scale is None:
            raise ValueError("scale_loss: zero has no loss scale; pass loss_scale=jzero.DynamicLossScale(...)")
        return guard.loss_scale.scale(loss, state.guard.loss_scale)
