"""Forward and backward of a step's micro-batches, and how their gradients add up to one gradient.

`grad_accumulation: local` sums in float32 on the rank and reduces once: the last micro-batch's backward pass adds the
earlier sums layer by layer and scatters the total. `sharded` reduces every micro-batch into the shard: M reductions, no
accumulator of full size. With `gather_on_forward` the first micro-batch gathers the weights and the others reuse them.

Letters: M micro-batches, B samples of a micro-batch on this rank, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jzero.fp8 import Slots
from jzero.models.dropout import Dropout
from jzero.models.functions import Functions
from jzero.optim import collectives
from jzero.parallel import stack
from jzero.parallel.stack import Layers
from jzero.train import pipelined
from jzero.train.layout import Layout, Weights


class Finish(NamedTuple):
    """What a micro-batch does with its gradients; both trees are (outer, blocks), float32."""

    scatter: bool  # reduce them to shards; otherwise sum them on the rank
    sums: Any  # what they are added to: shards, or of full size
    seen: Slots | None  # what earlier micro-batches found in FP8 products
    local: Any = None  # where shards: earlier micro-batches' local sums, to be reduced together with these


def accumulate_gradients(
    model: Functions, layout: Layout, params: Any, batch: dict[str, Array], count: int, slots: Slots | None = None
) -> tuple[Array, Any, Slots | None]:
    """Loss and gradient of all micro-batches of this rank.

    Args:
        model: the model's functions.
        layout: the policy and the plan.
        params: this rank's parameters as the policy stores them.
        batch: arrays [M * B, T], or [M * B]; with "weight" [M * B, T], what each token's loss counts in the sum, and
            "sample_weight" [M * B] for a loss that has terms per sample.
        count: M.
        slots: of this rank's FP8 products (`Scaling.slots`).

    Returns:
        Sum of this rank's weighted losses, float32 []; float32 shards of the mean gradient, a tree like the parameters;
        what FP8 products found, like `slots`.
    """
    batches = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)
    weights = layout.start(params, slots)
    if layout.pipeline.size > 1:
        loss, sums, seen = pipelined.accumulate_gradients(model, layout, weights, batches, count)
        return loss, layout.join(*sums), seen
    local = layout.accumulate_locally and count > 1
    keeps = layout.keeps_gathered and count > 1
    run = lambda weights, i, finish: _micro_batch(model, layout, weights, stack.at(batches, i), finish)
    loss, sums = collectives.vary(jnp.float32(0), layout.blocks.varying), layout.zero_sums(full=local)
    seen = layout.scaling.nothing_seen(slots)
    first, last = int(keeps), count - int(local)  # micro-batches [first, last) run in a scan

    if keeps:
        loss, sums, seen, blocks = run(weights, 0, Finish(not local, sums, seen))
        weights = Weights(weights.outer, blocks, slots)
    if last - first == 1 and not keeps and not local:
        loss, sums, seen, _ = run(weights, 0, Finish(True, sums, seen))
    elif last > first:

        def body(carry: tuple[Array, Any, Any], i: Array) -> tuple[tuple[Array, Any, Any], None]:
            value, sums, seen, _ = run(weights, i, Finish(not local, *carry[1:]))
            return (carry[0] + value, sums, seen), None

        (loss, sums, seen), _ = jax.lax.scan(body, (loss, sums, seen), jnp.arange(first, last))
    if local:
        weights = layout.in_order((loss, sums), weights)
        value, sums, seen, _ = run(weights, count - 1, Finish(True, layout.zero_sums(full=False), seen, sums))
        loss = loss + value
    return loss, layout.join(*layout.complete(sums)), seen


def layers_of(model: Functions, batch: Mapping[str, Array], dropout: Dropout | None = None) -> stack.Pieces:
    """All layers of a model, on this batch and with these dropout masks."""

    def block(*, wide: bool) -> stack.Block:
        return lambda w, x, i, slots: model.block(w, x, batch, dropout, i, slots, wide=wide)

    return [(block(wide=wide), start, stop) for wide, start, stop in model.pieces]


def _micro_batch(
    model: Functions, layout: Layout, weights: Weights, batch: dict[str, Array], finish: Finish
) -> tuple[Array, tuple[Any, Any], Slots | None, Layers]:
    """Forward and backward of one micro-batch.

    Returns:
        Weighted loss of this rank; the new sums; what FP8 products found so far; the layers' weights as the forward
        pass leaves them.
    """
    dropout = layout.dropout(batch["sample"])
    checkpointed = lambda block: stack.checkpointed(block, layout.granularity, model.selective_policy)
    pieces = [(checkpointed(block), start, stop) for block, start, stop in layers_of(model, batch, dropout)]
    # the lookup's gradient adds up in float32: frequent tokens get many small contributions
    outer = jax.tree.map(lambda w: w.astype(jnp.float32), weights.outer)
    x, embed_vjp = jax.vjp(lambda outer: model.embed(outer, batch, dropout).astype(layout.dtype), outer)
    x = layout.in_order(weights.outer, x)
    x, saved = stack.forward(pieces, weights.blocks, x, layout.blocks, keep=layout.keeps_gathered, slots=weights.slots)

    loss, head_vjp = jax.vjp(lambda outer, x: model.loss(outer, x, batch), weights.outer, x)
    d_outer, dy = head_vjp(collectives.vary(jnp.float32(1), layout.blocks.varying))
    local = finish.local or (None, None)
    dx, blocks, pending, seen = stack.backward(
        saved, dy, layout.blocks, sums=finish.sums[1], local=local[1], seen=finish.seen, scatter=finish.scatter
    )
    d_outer = jax.tree.map(lambda a, b: a.astype(jnp.float32) + b, d_outer, embed_vjp(dx)[0])
    if finish.local:
        d_outer = jax.tree.map(jnp.add, local[0], d_outer)
    if finish.scatter:
        blocks = stack.scatter_first(blocks, pending, layout.blocks, behind=d_outer)
        d_outer = layout.scatter_outer(layout.in_order((dx, blocks), d_outer), blocks)
    return loss, (jax.tree.map(jnp.add, finish.sums[0], d_outer), blocks), seen, saved.layers
