"""Scales of scaled states in two passes over the inputs, the least that a scale can cost.

A scale is the largest magnitude of the *new* values, so none of them can be stored before all are computed. Left to
itself XLA keeps new values in float32 between the passes (42 bytes per parameter for a master and two moments in scaled
float16). Computing them again costs no memory traffic but reading the narrow inputs once more (28 bytes), and a barrier
keeps XLA from merging the two computations.

    pass 1   read state and gradient -> the largest magnitudes            (nothing else is written)
    pass 2   read state and gradient -> new state, stored with the scales; new parameter
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jzero.optim import fp8, precision
from jzero.optim.partition import Plan
from jzero.optim.storage import Slot, Storage


class Inputs(NamedTuple):
    """What phase 2 reads; lists in the plan's order."""

    shards: list[Array]  # gradients, float32
    masters: list[Any]  # as stored
    inner: Any  # as stored
    params: list[Any]  # shards


class Scales(NamedTuple):
    """Float32 scales of what is to be stored; None where it has none."""

    masters: Sequence[Any]  # per parameter
    inner: Sequence[Any]  # per array of the inner state
    amaxes: Sequence[Any] | None = None  # `fp8.amaxes` of the new values, where pass 1 computed them


def of(values: Sequence[Array], inner: Any, storage: Storage, slots: Sequence[Slot], plan: Plan) -> Scales:
    """The scales of new float32 values and of an inner state."""
    codecs = [storage.master_codec(leaf) for leaf in plan.leaves]
    masters = [c.measure(n) if c else None for c, n in zip(codecs, values, strict=True)]
    pairs = zip(jax.tree.leaves(inner), slots, strict=True)
    moments = [slot.codec.measure(x.astype(jnp.float32)) if slot.codec else None for x, slot in pairs]
    return Scales(masters, moments, fp8.amaxes(values, plan))


def measured(
    compute: Callable[[Inputs], tuple[list[Array], Any, Any]],
    inputs: Inputs,
    storage: Storage,
    slots: Sequence[Slot],
    plan: Plan,
) -> tuple[Inputs, Scales]:
    """Pass 1, and the same inputs again for pass 2, which cannot start on a leaf before its scales are known.

    Args:
        compute: the update, from inputs to new float32 values, updates and inner state.
        inputs: what it reads.
        storage, slots, plan: how its results are stored.
    """
    codecs = [storage.master_codec(leaf) for leaf in plan.leaves]
    if not any(c and c.scaled for c in [*codecs, *(slot.codec for slot in slots)]):
        return inputs, Scales([None] * len(codecs), [None] * len(slots))
    new, _, inner = compute(inputs)
    found = of(new, inner, storage, slots, plan)
    masters, moments = list(found.masters), list(found.inner)
    # gradients stay outside of the barrier: it would have their mean and clipping written to memory first
    arrays, treedef = jax.tree.flatten(inputs.inner, is_leaf=precision.is_scaled)
    stored, params = list(inputs.masters), list(inputs.params)
    for i, leaf in enumerate(plan.leaves):
        mine = [j for j, slot in enumerate(slots) if slot.leaf == leaf]
        read = (stored[i], params[i], [arrays[j] for j in mine])
        known = (masters[i], [moments[j] for j in mine])
        if not jax.tree.leaves(known):
            continue
        (stored[i], params[i], again), (masters[i], own) = jax.lax.optimization_barrier((read, known))
        for j, x, scale in zip(mine, again, own, strict=True):
            arrays[j], moments[j] = x, scale
    return Inputs(inputs.shards, stored, jax.tree.unflatten(treedef, arrays), params), Scales(
        masters, moments, found.amaxes
    )
