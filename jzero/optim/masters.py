"""Whether the parameters still are what their masters round to.

`update` promises that the parameter plus its update is the new master, rounded. A transformation after it in a chain,
or anyone who edits parameters between steps, breaks that silently: the next step starts from the master and undoes the
edit. (A remainder has no value of its own: there the master follows the edit.) Compiled steps cannot raise without a
callback to the host, so the check is a program of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jzero.optim import collectives, fp8, regions
from jzero.optim.partition import Leaf, Plan

TOLERANCES = {"fp32": 2.0**-20, "scaled_fp16": 2.0**-7}
"""Of the leaf's largest parameter: float32 rounds `old + (new - old)` where `new` is far smaller than `old`; a scaled
master is itself rounded after the parameter was. That may take an FP8 parameter to the next value: 2^-3 of it."""


def check(core: Any, params: Any, state: Any) -> None:
    """Raise a ValueError that names the first leaf whose master has another value than its parameter."""
    plan = state.plan.like(params)
    kept = [i for i, leaf in enumerate(plan.leaves) if core.storage.mode(leaf) in TOLERANCES]
    if not kept:
        return
    flat, stored = plan.flatten(params, "params"), plan.flatten(state.master, "master")
    program = _program(core, plan, tuple(kept))
    differences, largest = jax.device_get(program([flat[i] for i in kept], [stored[i] for i in kept]))
    for i, difference, size in zip(kept, differences, largest, strict=True):
        mode = core.storage.mode(plan.leaves[i])
        tolerance = 2.0**-3 if plan.leaves[i].quantised and mode == "scaled_fp16" else TOLERANCES[mode]
        if not difference <= tolerance * size:
            raise ValueError(
                f"{plan.leaves[i].path}: the parameter differs by up to {difference:.3g} from what its "
                "master rounds to, so something changed updates or parameters after zero; put every transformation "
                "before zero in the chain, choose master='none', or call init again after editing parameters"
            )


def is_concrete(tree: Any) -> bool:
    """Whether a tree holds values, rather than what `jit` traces."""
    return not any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


@functools.lru_cache(maxsize=64)
def _program(core: Any, plan: Plan, kept: tuple[int, ...]) -> Any:
    leaves = [plan.leaves[i] for i in kept]

    def compare(params: list[Array], masters: list[Any]) -> tuple[Array, Array]:
        pairs = [_difference(core, p, m, leaf) for p, m, leaf in zip(params, masters, leaves, strict=True)]
        values = jnp.stack([jnp.stack(pair) for pair in zip(*pairs, strict=True)])
        whole = jax.lax.pmax(collectives.vary(values, core.mesh.axis_names), core.mesh.axis_names)
        return whole[0], whole[1]

    specs = [jax.tree.map(lambda _, leaf=leaf: leaf.shard_spec, core.storage.abstract_master(leaf)) for leaf in leaves]
    in_specs = ([leaf.param_specs for leaf in leaves], specs)
    return regions.enter(compare, core.mesh, in_specs, (PartitionSpec(), PartitionSpec()))


def _difference(core: Any, p: Any, master: Any, leaf: Leaf) -> tuple[Array, Array]:
    """Largest difference and largest magnitude on this rank."""
    shard = collectives.take(p, leaf)
    own, storage = fp8.float32(shard), core.storage
    value = storage.whole(master, shard, leaf)
    expected = fp8.float32(fp8.quantise(value, shard.scale) if leaf.quantised else storage.sent(value, leaf))
    same = (own == expected) | (jnp.isnan(own) & jnp.isnan(expected))
    difference = jnp.where(same, 0.0, jnp.nan_to_num(jnp.abs(own - expected), nan=jnp.inf))
    finite = jnp.where(jnp.isfinite(own), jnp.abs(own), 0.0)
    difference, finite = (collectives.vary(x, core.mesh.axis_names) for x in (difference, finite))
    return jnp.max(difference, initial=0.0), jnp.max(finite, initial=0.0)
