"""Micro-batches on a pipeline of stages: what `jzero.train.micro_batches` does where there is one stage.

    gather_on_forward   this stage's layers are gathered one by one before the first tick, and kept
    gather_twice        a layer is gathered while the one before it runs, forward and backward, for every micro-batch
    local               gradients add up on the rank; the layers are scattered one by one after the last tick
    sharded             every backward pass scatters a layer's gradient where it makes it

Gradients of the parameters outside of the layers are sums over the stages; they cross the pipeline as shards.

Letters: M micro-batches, B samples of a micro-batch on this rank, T positions.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jzero.fp8 import Slots
from jzero.models.functions import Functions
from jzero.optim import collectives
from jzero.parallel import stack, stages
from jzero.parallel.kinds import Kinds
from jzero.parallel.stack import Layers
from jzero.train.layout import Layout, Weights


def accumulate_gradients(
    model: Functions, layout: Layout, weights: Weights, batches: Any, count: int
) -> tuple[Array, tuple[Any, Any], Slots | None]:
    """Loss and gradient of all micro-batches of this rank's stage.

    Args:
        model: the model's functions.
        layout: the policy and the plan.
        weights: what `layout.start` gives.
        batches: arrays [M, B, T], or [M, B]; with "weight", what each token's loss counts in the sum, and
            "sample_weight" for a loss that has terms per sample.
        count: M.

    Returns:
        Sum of the weighted losses, float32 []; float32 shards of the mean gradient, (outer, blocks); what this stage's
        FP8 products found. Summed over the stages, not over the batch.
    """
    local, per_layer = layout.accumulate_locally, layout.blocks.layer()
    if layout.keeps_gathered:
        weights = weights._replace(blocks=gathered(layout, weights))
    outer, layers = layout.zero_sums(full=local)
    seen = layout.scaling.nothing_seen(weights.slots)
    sums = stages.Sums(collectives.vary(jnp.float32(0), layout.outer.varying), outer, layers, seen)

    def add(total: Any, grads: Any) -> Any:
        return jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, grads)

    def add_outer(total: Any, grads: Any) -> Any:
        return add(total, grads if local else layout.outer.scatter(grads))

    def add_layer(total: Any, n: Array, grads: Any) -> Any:
        return stack.add(total, n, grads if local else per_layer.scatter(grads))

    stage = make_stage(model, layout, weights, model.loss)
    sums = stages.train(stage, layout.pipeline.timetable(count), batches, sums, (add_outer, add_layer))
    outer, layers, seen = sums.outer, sums.layers, sums.seen
    if local:
        layers = jax.lax.scan(lambda _, grads: (None, per_layer.scatter(grads)), None, layers)[1]
        outer = layout.scatter_outer(layout.in_order(layers, outer), layers)
    outer, layers = layout.complete((outer, layers))
    loss, outer = layout.pipeline.sum(layout.in_order(layers, (sums.loss, outer)))
    return loss, (outer, layout.as_stored(layers)), seen


def gathered(layout: Layout, weights: Weights) -> Layers:
    """This stage's layers, gathered one by one."""
    whole = layout.blocks.layer().whole
    (shards,) = layout.in_order(weights.outer, weights.blocks.parts)
    return Layers((jax.lax.scan(lambda _, layer: (None, whole(layer)), None, shards)[1],))


def make_stage(
    model: Functions, layout: Layout, weights: Weights, finish: Any, *, train: bool = True, to: Any = "varying"
) -> stages.Stage:
    """This rank's stage of the model.

    Args:
        model: the model's functions.
        layout: the policy and the plan.
        weights: whole, or shards of the layers, which then are gathered where they are used.
        finish: (outer, x, batch) -> what the last stage makes.
        train: with dropout, and with activation checkpointing.
        to: "invarying" where every data rank computes the same.
    """
    dropout = lambda batch: layout.dropout(batch["sample"]) if train else None

    def block(*, wide: bool) -> Any:
        run: Any = lambda w, x, batch, number, slots: model.block(w, x, batch, dropout(batch), number, slots, wide=wide)
        return stack.checkpointed(run, layout.granularity, model.selective_policy) if train else run

    narrow = next((piece for piece in model.pieces if not piece.wide), None)
    kinds = Kinds(block(wide=narrow is None))
    if narrow and len(model.pieces) > 1:
        kinds = Kinds(kinds.block, block(wide=True), narrow.start, narrow.stop)

    def embed(outer: Any, batch: Any) -> Array:
        outer = jax.tree.map(lambda w: w.astype(jnp.float32), outer) if train else outer
        return model.embed(outer, batch, dropout(batch)).astype(layout.dtype)

    gathers = weights.blocks.shards

    def layer(n: Array, after: Any = None) -> Any:
        own = weights.blocks.at(n) if after is None else layout.in_order(after, weights.blocks.at(n))
        return layout.blocks.layer().whole(own, to) if gathers else own

    parts = stages.Model(embed, kinds, finish)
    outer = layout.pipeline.vary(weights.outer)
    count = weights.blocks.count
    return stages.Stage(layout.pipeline, parts, outer, layer, count, layout.in_order, gathers, weights.slots)


def evaluate(model: Functions, layout: Layout, weights: Weights, batch: Any, size: int) -> dict[str, Array]:
    """The sums of `model.measures` over this rank's samples, float32 [] each, the same on every stage.

    The batch goes through the stages in micro-batches of `size` samples where it divides, else in one piece.
    """
    rows = batch["tokens"].shape[0]
    size = rows if rows % size else size
    stage = make_stage(model, layout, weights, model.measures, train=False)
    return stages.apply(stage, jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), batch))


def logits(model: Functions, layout: Layout, weights: Weights, batch: dict[str, Array]) -> Array:
    """Logits of all tokens of a batch, float32 [B, T, V], the same on every rank."""
    finish = lambda outer, x, batch: model.logits(outer, x)
    stage = make_stage(model, layout, weights, finish, train=False, to="invarying")
    return stages.apply(stage, jax.tree.map(lambda x: x[None], batch))
