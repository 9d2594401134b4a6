"""How scales are chosen: by today's largest magnitude, by that of the last steps, or per block of 32.

| recipe | scale of a tensor from | cost |
|---|---|---|
| `CurrentScaling` | its own amax | the tensor is read twice; an amax that ranks share is a reduction of its own |
| `DelayedScaling` | the amaxes of earlier steps | read once; one reduction of all amaxes a step; may saturate |
| `BlockScaling` | amax of each 32 elements along the contraction (MX) | read once; GPUs since Blackwell |

Names and defaults are those of Transformer Engine's recipes and of NeMo's `model.fp8_*`. Scales and amaxes of many
tensors are one array [..., 3]; the last dimension is the three operands of a layer's products: input, weight, gradient.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jzero.errors import JzeroError
from jzero.fp8.numerics import E4M3, E5M2, largest, scale_from_amax

Format = Literal["hybrid", "e4m3"]


def _check(where: str, value: Any, valid: bool, expected: str) -> None:
    if not valid:
        raise JzeroError(f"{where}: expected {expected}, found {value!r}; change it")


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """What all recipes share.

    Attributes:
        fp8_format: "hybrid": E4M3 forward, E5M2 for gradients; "e4m3": E4M3 for all.
    """

    fp8_format: Format = "hybrid"

    def __post_init__(self):
        known = ("hybrid", "e4m3")
        _check("fp8_format", self.fp8_format, self.fp8_format in known, "one of hybrid, e4m3")

    @property
    def dtypes(self) -> tuple[np.dtype, np.dtype, np.dtype]:
        """Of input, weight and gradient."""
        return E4M3, E4M3, E5M2 if self.fp8_format == "hybrid" else E4M3

    @property
    def limits(self) -> np.ndarray:
        """The largest values of `dtypes`, float32 [3]."""
        return np.asarray([largest(dtype) for dtype in self.dtypes], np.float32)


@dataclasses.dataclass(frozen=True)
class _PerTensor(_Recipe):
    """What the recipes with one scale per tensor share.

    Attributes:
        margin: powers of two kept free above amax.
        power_of_two: scales are powers of two.
    """

    margin: int = 0
    power_of_two: bool = False

    def __post_init__(self):
        super().__post_init__()
        _check("margin", self.margin, isinstance(self.margin, int) and self.margin >= 0, "a whole number from 0")

    def scale(self, amax: Array, previous: Array, limits: Any = None) -> Array:
        """`numerics.scale_from_amax` with this recipe's margin; float32 [..., 3] unless `limits` says otherwise."""
        limits = self.limits if limits is None else limits
        return scale_from_amax(amax, previous, limits, margin=self.margin, power_of_two=self.power_of_two)


@dataclasses.dataclass(frozen=True)
class CurrentScaling(_PerTensor):
    """Each tensor's scale comes from its own amax, before the cast (TE's `Float8CurrentScaling`). No state.

    Attributes:
        fp8_format: "hybrid": E4M3 forward, E5M2 for gradients; "e4m3": E4M3 for all.
        margin: powers of two kept free above amax.
        power_of_two: scales are powers of two.

    Raises:
        JzeroError: a value out of range.

    Example:
        >>> CurrentScaling(fp8_format="e4m3").limits.tolist()
        [448.0, 448.0, 448.0]
    """


@dataclasses.dataclass(frozen=True)
class DelayedScaling(_PerTensor):
    """Each tensor's scale comes from the amaxes of earlier steps (TE's `DelayedScaling`).

    Attributes:
        fp8_format: "hybrid": E4M3 forward, E5M2 for gradients; "e4m3": E4M3 for all.
        margin: powers of two kept free above amax.
        power_of_two: scales are powers of two.
        interval: scales are computed by the first update and by every so many after it; amaxes are recorded by all.
        amax_history_len: steps that are remembered.
        amax_compute_algo: "max": the largest amax remembered; "most_recent": the last.

    Raises:
        JzeroError: a value out of range.

    Example:
        >>> recipe = DelayedScaling(amax_history_len=2)
        >>> state = init(recipe, (3,))
        >>> state = update(recipe, state, jnp.float32([3.5, 7, 56]))
        >>> state.scale
        Array([ 128.,   64., 1024.], dtype=float32)
    """

    interval: int = 1
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"

    def __post_init__(self):
        super().__post_init__()
        for name in ("interval", "amax_history_len"):
            value = getattr(self, name)
            _check(name, value, isinstance(value, int) and value >= 1, "a whole number from 1")
        known = ("max", "most_recent")
        _check("amax_compute_algo", self.amax_compute_algo, self.amax_compute_algo in known, "one of max, most_recent")


@dataclasses.dataclass(frozen=True)
class BlockScaling(_Recipe):
    """MXFP8: each 32 elements along the contraction share a power of two (OCP Microscaling Formats 1.0). No state.

    Attributes:
        fp8_format: "e4m3": E4M3 for all, as Transformer Engine's `MXFP8BlockScaling`; "hybrid": E5M2 for gradients.

    Raises:
        JzeroError: a value out of range.

    Example:
        >>> BlockScaling().fp8_format
        'e4m3'
    """

    fp8_format: Format = "e4m3"


Recipe = CurrentScaling | DelayedScaling | BlockScaling


# --- the state of delayed scaling -------------------------------------------------------------------------------------


class DelayedState(NamedTuple):
    """Scales and what they are computed from; of any number of tensors."""

    scale: Array  # float32 [...], what multiplies a tensor before the cast
    amax_history: Array  # float32 [amax_history_len, ...], a ring: update number n is at n modulo its length
    count: Array  # int32 [], updates so far


def init(recipe: DelayedScaling, shape: tuple[int, ...], amax: Any = None, limits: Any = None) -> DelayedState:
    """The state before the first step: an empty history.

    Args:
        recipe: margin and length of the history.
        shape: of the array of scales, [..., 3] unless `limits` says otherwise.
        amax: largest magnitudes that are known already, as of the initial weights; 0 where none is, whose scale is 1.
        limits: largest values of the dtypes, broadcastable to `shape`; None: those of input, weight and gradient.

    Example:
        >>> init(DelayedScaling(amax_history_len=4), (2, 3), amax=jnp.float32([0, 0.5, 0])).scale
        Array([[  1., 896.,   1.],
               [  1., 896.,   1.]], dtype=float32)
    """
    ones = jnp.ones(shape, jnp.float32)
    scale = ones if amax is None else recipe.scale(jnp.asarray(amax, jnp.float32), ones, limits)
    return DelayedState(scale, jnp.zeros((recipe.amax_history_len, *shape), jnp.float32), jnp.int32(0))


def update(recipe: DelayedScaling, state: DelayedState, amax: Array, limits: Any = None) -> DelayedState:
    """The state after a step, from the amaxes that the step saw.

    The scale of the next step is limit / max(history) / 2^margin (or of the last amax). An amax of 0 is recorded like
    any other. One that is not finite leaves the scale as it is, and 0 in the history, so that later steps recover.

    Args:
        recipe: how.
        state: before.
        amax: float32, shape of `state.scale`: the maximum over everything that was cast with it, over micro-batches and
            all ranks that share it.
        limits: as for `init`.

    Example:
        >>> recipe = DelayedScaling(amax_history_len=2, fp8_format="e4m3")
        >>> state = init(recipe, (3,))
        >>> for amax in (7.0, 3.5, 1.75, float("nan")):
        ...     state = update(recipe, state, jnp.full(3, amax))
        ...     print(float(state.scale[0]))
        64.0
        64.0
        128.0
        128.0
    """
    finite = jnp.isfinite(amax)
    entry = jnp.where(finite, amax, 0).astype(jnp.float32)
    history = state.amax_history.at[state.count % recipe.amax_history_len].set(entry)
    newest = recipe.amax_compute_algo == "most_recent"
    due = finite & (state.count % recipe.interval == 0)
    scale = recipe.scale(entry if newest else history.max(0), state.scale, limits)
    return DelayedState(jnp.where(due, scale, state.scale), history, state.count + 1)
