"""Steps that are skipped where a gradient is not finite, and the dynamic loss scale of 16-bit training.

    loss   multiplied by the scale before autodiff, so that small gradients survive float16
    shard  divided by it after phase 1, in float32
    step   skipped where the global norm is not finite: parameters, moments and counts stay, the scale shrinks

A gradient that is not finite is never masked: the step is skipped as a whole, on all ranks, and counted in the state.
Rule of the scale: Micikevicius et al., arXiv 1710.03740; hysteresis as NeMo's `GradScaler`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array


class LossScaleState(NamedTuple):
    """State of `DynamicLossScale`."""

    scale: Array  # float32 scalar, multiplies the loss
    finite_steps: Array  # int32 scalar, in a row, since the scale last changed
    hysteresis: Array  # int32 scalar, steps that are not finite and still tolerated before the scale shrinks


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that grows while all goes well and shrinks where gradients overflow. Defaults are NeMo's.

    Attributes:
        initial: the first scale (NeMo: native_amp_init_scale).
        growth_factor: multiplies the scale after `growth_interval` finite steps in a row, unless it would overflow.
        backoff_factor: multiplies it after a step that is not finite.
        growth_interval: (NeMo: native_amp_growth_interval).
        hysteresis: how many steps in a row must not be finite until the scale shrinks (NeMo: hysteresis).
        minimum: the scale never shrinks below it.

    Raises:
        ValueError: a number is out of range; names it.

    Example:
        >>> rule = DynamicLossScale(initial=8.0, growth_interval=1, hysteresis=1)
        >>> state = rule.init()
        >>> float(rule.scale(jnp.float32(0.5), state)), float(rule.next(state, finite=jnp.bool_(False)).scale)
        (4.0, 4.0)
    """

    initial: float = 2.0**32
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0

    def __post_init__(self) -> None:
        ranges = {
            "initial": (0 < self.initial < math.inf, "a positive number"),
            "growth_factor": (self.growth_factor >= 1, "at least 1"),
            "backoff_factor": (0 < self.backoff_factor <= 1, "above 0 and at most 1"),
            "growth_interval": (self.growth_interval >= 1, "at least 1"),
            "hysteresis": (self.hysteresis >= 1, "at least 1"),
            "minimum": (0 < self.minimum <= self.initial, "above 0 and at most `initial`"),
        }
        for name, (fits, expected) in ranges.items():
            if not fits:
                raise ValueError(f"DynamicLossScale: {name}: expected {expected}, found {getattr(self, name)}")

    def init(self) -> LossScaleState:
        """The state before the first step."""
        return LossScaleState(jnp.float32(self.initial), jnp.int32(0), jnp.int32(self.hysteresis))

    def scale(self, loss: Array, state: LossScaleState) -> Array:
        """The loss whose gradient to take: float32, whatever the loss's dtype, since float16 cannot hold the scale."""
        return loss.astype(jnp.float32) * state.scale

    def unscale(self, grads: Any, state: LossScaleState) -> Any:
        """Gradients of the loss itself, float32, from those of the scaled one."""
        return jax.tree.map(lambda g: g.astype(jnp.float32) * (1 / state.scale), grads)

    def next(self, state: LossScaleState, finite: Array) -> LossScaleState:
        """The state after a step whose gradients were finite, or not (a boolean scalar, the same on all ranks)."""
        count = jnp.where(finite, state.finite_steps + 1, 0)
        grows = count == self.growth_interval
        grown = state.scale * self.growth_factor
        up = jnp.where(grows & jnp.isfinite(grown), grown, state.scale)
        left = jnp.where(finite, self.hysteresis, jnp.maximum(state.hysteresis - 1, 0))
        down = jnp.where(left <= 0, jnp.maximum(state.scale * self.backoff_factor, self.minimum), state.scale)
        return LossScaleState(
            jnp.where(finite, up, down), jnp.where(grows, 0, count).astype(jnp.int32), left.astype(jnp.int32)
        )


class GuardState(NamedTuple):
    """State of what skips steps, in `ZeroState.guard`."""

    skipped: Array  # int32 scalar, steps skipped so far
    loss_scale: Any  # LossScaleState; MaskedNode without a loss scale


class Guard(NamedTuple):
    """What skips a step of `zero` whose gradients are not finite."""

    loss_scale: DynamicLossScale | None

    def init(self) -> GuardState:
        """The state before the first step."""
        return GuardState(jnp.int32(0), self.loss_scale.init() if self.loss_scale else optax.MaskedNode())

    def unscale(self, shards: Sequence[Array], state: GuardState) -> list[Array]:
        """Mean-gradient shards of the loss itself."""
        return self.loss_scale.unscale(list(shards), state.loss_scale) if self.loss_scale else list(shards)

    def keep(self, finite: Array, new: Any, old: Any) -> Any:
        """`new` where all gradients are finite, else `old`: a select that XLA fuses into the update."""
        return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

    def next(self, state: GuardState, finite: Array) -> GuardState:
        """The state after a step."""
        scale = self.loss_scale.next(state.loss_scale, finite) if self.loss_scale else state.loss_scale
        return GuardState(state.skipped + jnp.where(finite, 0, 1).astype(jnp.int32), scale)


def make_guard(skip_nonfinite: bool, loss_scale: DynamicLossScale | None) -> Guard | None:
    """From the options of `zero`; a loss scale skips steps by its nature."""
    if loss_scale is not None and not isinstance(loss_scale, DynamicLossScale):
        raise ValueError(f"loss_scale: expected a jzero.DynamicLossScale or None, found {loss_scale!r}")
    return Guard(loss_scale) if skip_nonfinite or loss_scale is not None else None
