"""Forward and backward of a step's micro-batches, and how their gradients add up to one gradient.

`grad_accumulation: local` sums in float32 on the rank and reduces once: the last micro-batch's backward pass adds the
earlier sums layer by layer and scatters the total. `sharded` reduces every micro-batch into the shard: M reductions, no
accumulator of full size. With `gather_on_forward` the first micro-batch gathers the weights and the others reuse them.

Letters: M micro-batches, B samples of a micro-batch on this rank, T positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jzero.models.gpt import Functions
from jzero.optim import collectives
from jzero.parallel import stack
from jzero.train.layout import Layout, Weights


class Finish(NamedTuple):
    """What a micro-batch does with its gradients."""

    scatter: bool  # reduce them to shards; otherwise add them to the local sums
    total: Any = None  # (outer, blocks): float32 local sums so far; None: nothing yet


def accumulate_gradients(
    model: Functions, layout: Layout, params: Any, batch: dict[str, Array], count: int
) -> tuple[Array, Any]:
    """Loss and gradient of all micro-batches of this rank.

    Args:
        model: the model's functions.
        layout: the policy and the plan.
        params: this rank's parameters as the policy stores them.
        batch: arrays [M * B, T], or [M * B]; with "weight" [M * B, T], what each token's loss counts in the sum.
        count: M.

    Returns:
        Sum of this rank's weighted losses, float32 []; float32 shards of the mean gradient, a tree like the parameters.
    """
    batches = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)
    weights = layout.start(params)
    local = layout.accumulate_locally and count > 1
    keeps = layout.keeps_gathered and count > 1
    run = lambda weights, i, finish: _micro_batch(model, layout, weights, at(batches, i), finish)
    loss = collectives.vary(jnp.float32(0), layout.blocks.varying)
    if count == 1:
        loss, total, _ = run(weights, 0, Finish(scatter=True))
        return loss, layout.join(*total)

    total = layout.zero_sums(full=local)
    first, last = int(keeps), count - int(local)  # micro-batches [first, last) run in a scan
    if keeps:
        loss, total, blocks = run(weights, 0, Finish(not local, total))
        weights = Weights(weights.outer, blocks, shards=False)

    def body(carry: tuple[Array, Any], i: Array) -> tuple[tuple[Array, Any], None]:
        value, total, _ = run(weights, i, Finish(not local, carry[1]))
        return (carry[0] + value, total), None

    if last > first:
        (loss, total), _ = jax.lax.scan(body, (loss, total), jnp.arange(first, last))
    if local:
        value, total, _ = run(weights, count - 1, Finish(scatter=True, total=total))
        loss = loss + value
    return loss, layout.join(*total)


def at(batches: Any, i: int | Array) -> Any:
    """Micro-batch `i` of arrays stacked along their first dimension."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), batches)


def _micro_batch(
    model: Functions, layout: Layout, weights: Weights, batch: dict[str, Array], finish: Finish
) -> tuple[Array, tuple[Any, Any], Any]:
    """Forward and backward of one micro-batch.

    Returns:
        Weighted loss of this rank; (outer, blocks) gradients: new local sums, or (sums of) shards; the full weights of
        the layers where the policy keeps them.
    """
    dropout = layout.dropout(batch["sample"])
    block = stack.checkpointed(
        lambda w, x, i: model.block(w, x, batch, dropout, i), layout.granularity, model.selective_policy
    )
    # the lookup's gradient adds up in float32: frequent tokens get many small contributions
    wide = jax.tree.map(lambda w: w.astype(jnp.float32), weights.outer)
    dtype = jax.tree.leaves(weights.outer)[0].dtype
    x, embed_vjp = jax.vjp(lambda outer: model.embed(outer, batch, dropout).astype(dtype), wide)
    keep = layout.keeps_gathered
    x, saved = stack.forward(block, weights.blocks, x, layout.blocks, shards=weights.shards, keep=keep)

    def weighted_loss(outer: Any, x: Array) -> Array:
        return jnp.sum(model.losses(outer, x, batch) * batch["weight"])

    loss, head_vjp = jax.vjp(weighted_loss, weights.outer, x)
    d_outer, dy = head_vjp(collectives.vary(jnp.float32(1), layout.blocks.varying))
    # local sums are added before the reduction, shards after it
    local = finish.total if layout.accumulate_locally else None
    dx, d_blocks = stack.backward(saved, dy, layout.blocks, accumulated=local and local[1], scatter=finish.scatter)
    d_outer = jax.tree.map(lambda a, b: a.astype(jnp.float32) + b, d_outer, embed_vjp(dx)[0])
    if local is not None:
        d_outer = jax.tree.map(jnp.add, local[0], d_outer)
    if finish.scatter:
        d_outer = layout.outer.scatter(d_outer)
        if finish.total is not None and local is None:
            d_outer, d_blocks = jax.tree.map(jnp.add, finish.total, (d_outer, d_blocks))
    return loss, (d_outer, d_blocks), saved.weights if saved.kept else None
