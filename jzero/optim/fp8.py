"""FP8 parameters in the optimizer: the cast of every new shard, and the scales of the next one.

An FP8 parameter (`jzero.fp8.Quantised`) is one leaf: a byte per element, cast from a master that the state keeps, and a
scale per layer. In a step with delayed scaling nothing waits for anything:

    cast     every shard with the scale that the state holds for it; its largest magnitude is recorded
    gather   as bytes, each leaf as soon as it is cast
    share    when all are cast: one max-all-reduce of all magnitudes
    scale    of the next step, from the history                                      (`jzero.fp8.recipes.update`)

The scale beside a value is the one that it was cast with. With current scaling `share` comes first, and the cast waits
for it; then the state holds nothing. Source: NeMo's and Apex's distributed Adam with FP8 parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec

from jzero.fp8 import numerics, recipes
from jzero.fp8.numerics import E4M3, Quantised
from jzero.fp8.parameters import PerTensor, is_quantised, over_layers
from jzero.fp8.recipes import DelayedScaling, DelayedState
from jzero.optim import collectives
from jzero.optim.partition import Leaf, Plan

LIMIT = numerics.largest(E4M3)


def numbers(plan: Plan) -> list[int]:
    """Which leaves are FP8 parameters."""
    return [i for i, leaf in enumerate(plan.leaves) if leaf.quantised]


# --- the state --------------------------------------------------------------------------------------------------------


def make_state(plan: Plan, recipe: PerTensor, each: Any, history: Any, count: Any) -> Any:
    """A `DelayedState` of trees like the parameters: `each(i)`, `history(i)` for leaf i if it is FP8; or MaskedNode."""
    if not numbers(plan) or not isinstance(recipe, DelayedScaling):
        return optax.MaskedNode()
    tree = lambda f: plan.unflatten(
        [f(i) if leaf.quantised else optax.MaskedNode() for i, leaf in enumerate(plan.leaves)]
    )
    return DelayedState(tree(each), tree(history), count)


def first_state(plan: Plan, recipe: PerTensor, params: Sequence[Any]) -> Any:
    """The state before the first step, which casts with the scales that the parameters have."""
    length = recipe.amax_history_len if isinstance(recipe, DelayedScaling) else 0
    history = lambda i: jnp.zeros((length, *params[i].scale.shape), jnp.float32)
    return make_state(plan, recipe, lambda i: params[i].scale, history, jnp.int32(0))


def abstract_state(plan: Plan, recipe: PerTensor) -> Any:
    """The state as `jax.ShapeDtypeStruct`s of global shapes."""
    params = [Quantised(None, jax.ShapeDtypeStruct(leaf.layers, jnp.float32)) for leaf in plan.leaves]
    return jax.eval_shape(lambda params: first_state(plan, recipe, params), params)


def state_specs(plan: Plan, recipe: PerTensor) -> Any:
    """A `PartitionSpec` for every array of the state."""
    spec = lambda i: plan.leaves[i].layers_spec
    return make_state(plan, recipe, spec, lambda i: PartitionSpec(None, *spec(i)), PartitionSpec())


# --- one rank's part of a step ----------------------------------------------------------------------------------------


def amaxes(values: Sequence[Array], plan: Plan) -> list[Array | None]:
    """Largest magnitudes of the FP8 parameters' new values on this rank, per layer; None for other leaves.

    Infinity stands for NaN too, which a reduction over ranks may drop.
    """

    def one(x: Array, leaf: Leaf) -> Array | None:
        if not leaf.quantised:
            return None
        largest = numerics.amax(x, tuple(range(leaf.stacked, x.ndim)))
        return jnp.where(jnp.isfinite(largest), largest, jnp.inf)

    return [one(x, leaf) for x, leaf in zip(values, plan.leaves, strict=True)]


def over_ranks(own: Mapping[int, Array], plan: Plan) -> dict[int, Array]:
    """The maximum of each leaf's magnitudes over all ranks that hold parts of its layers: one packed all-reduce.

    An axis that cuts the stack of layers (pipeline) is none of these: its ranks have layers of their own. Leaves whose
    stacks are cut along other axes take an all-reduce each.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    stages = lambda leaf: tuple(name for names in leaf.spec[: leaf.stacked] for name in names)
    for i in own:
        groups.setdefault(stages(plan.leaves[i]), []).append(i)
    out = dict(own)
    for kept, members in groups.items():
        cut = (name for i in members for name in plan.leaves[i].axes if name not in kept)
        axes = tuple(dict.fromkeys(cut))
        if not axes:
            continue
        packed = jnp.concatenate([collectives.vary(own[i].reshape(-1), axes) for i in members])
        shared, start = jax.lax.pmax(packed, axes), 0
        for i in members:
            out[i] = shared[start : start + own[i].size].reshape(own[i].shape)
            start += own[i].size
    return out


def cast(
    values: Sequence[Array],
    amaxes: Sequence[Array | None],
    params: Sequence[Any],
    state: Any,
    plan: Plan,
    recipe: PerTensor,
) -> tuple[dict[int, Any], dict[int, Array]]:
    """New FP8 shards, and the magnitudes that `next_state` is to share; both by number of the leaf.

    Args:
        values: new float32 shards of all leaves.
        amaxes: of them, on this rank.
        params: the shards so far.
        state: the scales' state.
        plan, recipe: how.
    """
    own = {i: x for i, x in enumerate(amaxes) if x is not None}
    if not own:
        return {}, {}
    if isinstance(recipe, DelayedScaling):
        scales, pending = plan.flatten(state.scale, "state of the FP8 scales"), own
    else:
        scales = {i: recipe.scale(x, params[i].scale, LIMIT) for i, x in over_ranks(own, plan).items()}
        pending = {}
    return {i: quantise(values[i], scales[i]) for i in own}, pending


def next_state(own: Mapping[int, Array], state: Any, plan: Plan, recipe: PerTensor, *, behind: Any) -> Any:
    """The scales of the next step, from the magnitudes of this one.

    Args:
        own: this rank's, by number of the leaf.
        state: the scales' state.
        plan, recipe: how.
        behind: the gathered parameters. Left to itself, XLA starts the all-reduce before the gathers, which then wait
            until the last leaf is updated.
    """
    if not own:
        return state
    assert isinstance(recipe, DelayedScaling)
    with jax.named_scope("zero_amax"):
        seen = over_ranks(collectives.after(behind, dict(own)), plan)
    each = (plan.flatten(tree, "state of the FP8 scales") for tree in (state.scale, state.amax_history))
    scales, histories = each
    before = lambda i: DelayedState(scales[i], histories[i], state.count)
    after = {i: recipes.update(recipe, before(i), amax, LIMIT) for i, amax in seen.items()}
    return make_state(plan, recipe, lambda i: after[i].scale, lambda i: after[i].amax_history, state.count + 1)


def fresh(values: Sequence[Array], plan: Plan, recipe: PerTensor, given: Mapping[int, Array]) -> list[Any]:
    """Scales of FP8 parameters from values alone, or as `given`; None for other leaves."""
    own = {i: x for i, x in enumerate(amaxes(values, plan)) if x is not None and i not in given}
    found = {i: recipe.scale(amax, jnp.ones_like(amax), LIMIT) for i, amax in over_ranks(own, plan).items()}
    return [{**found, **given}.get(i) for i in range(len(plan.leaves))]


def quantise(x: Array, scale: Array) -> Quantised:
    """A shard of float32 values in E4M3, with the scale of each of its layers."""
    return Quantised(numerics.quantise(x, over_layers(scale, x), E4M3), scale)


def float32(p: Any) -> Array:
    """The values of a parameter's shard, FP8 or not, in float32."""
    return numerics.dequantise(p.value, over_layers(p.scale, p.value)) if is_quantised(p) else p.astype(jnp.float32)
