"""What pipeline stages do: one `lax.scan` over the ticks of `jzero.parallel.timetable`. In a tick

    forward    a stage runs a chunk of its layers on the activation that it was sent (the first stage: on an embedding)
               and leaves in a ring of slots what the backward pass needs, but the weights
    backward   it takes those from the ring, and the cotangent that it was sent (the last stage: its head's)
    send       the activation goes one stage forward, the cotangent one stage back

A stage that is idle in one direction skips it. Whether it does depends on the tick and the stage alone, so ranks that
talk over the data or tensor axis inside always agree. The ring has as many slots as passes are in flight, whatever the
number of micro-batches. It and the sums of gradients are changed in place: skipping is a loop of one round or none
(`when`), since both branches of a `lax.cond` copy whatever goes through it (found in the module compiled for H100).

Letters: S stages, V chunks per stage, M micro-batches, L layers, l = L / (S V) layers of a chunk, B samples of a
micro-batch on this rank, T positions, D model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jzero.fp8.parameters import as_arrays
from jzero.fp8.slots import Slots, record
from jzero.parallel.kinds import Kinds, zeros
from jzero.parallel.pipeline import AXIS, Pipeline
from jzero.parallel.stack import at
from jzero.parallel.timetable import IDLE, Timetable, Work, forward_passes


class Model(NamedTuple):
    """The model as stages run it. `batch` is one micro-batch, a dict of arrays [B, ...]."""

    embed: Callable[[Any, Any], Array]  # (outer, batch) -> x [B, T, D]
    block: Kinds  # (a layer's weights, x, batch, its number, slots) -> x
    finish: Callable[[Any, Array, Any], Any]  # (outer, x, batch) -> what is summed over micro-batches: the loss


class Sums(NamedTuple):
    """What adds up over micro-batches on this stage."""

    loss: Array  # float32 []
    outer: Any  # gradients of the parameters outside of the layers
    layers: Any  # gradients of this stage's layers, each [V l, ...]
    seen: Slots | None = None  # what they found in their FP8 products, each [V l, ...]


@dataclasses.dataclass(frozen=True)
class Stage:
    """This stage's part of the model, and how its gradients are added.

    Attributes:
        pipeline: the axis.
        model: the model's functions.
        outer: the parameters outside of the layers, varying over the axis.
        layer: (number among this stage's [V l], after=None) -> a layer's weights, whole; on CPU made after `after`.
        count: V l, the number of this stage's layers.
        in_order: (first, then) -> `then`, which on CPU waits for `first`; see `collectives.after`.
        gathers: whether `layer` gathers shards.
        slots: of this stage's FP8 products, each [V l, ...], varying as activations do; None: there are none.
    """

    pipeline: Pipeline
    model: Model
    outer: Any
    layer: Callable[..., Any]
    count: int
    in_order: Callable[[Any, Any], Any]
    gathers: bool = False
    slots: Slots | None = None

    @property
    def per_chunk(self) -> int:
        """Layers of a chunk, l."""
        return self.count // self.pipeline.chunks

    def is_first(self, work: Work) -> Array:
        """Whether this is the model's first chunk."""
        return (jax.lax.axis_index(AXIS) == 0) & (work.chunk == 0)

    def is_last(self, work: Work) -> Array:
        """Whether this is the model's last chunk."""
        return (jax.lax.axis_index(AXIS) == self.pipeline.size - 1) & (work.chunk == self.pipeline.chunks - 1)

    def number(self, work: Work, j: Array) -> Array:
        """The number, in the whole model, of layer j of a chunk."""
        return (work.chunk * self.pipeline.size + jax.lax.axis_index(AXIS)) * self.per_chunk + j

    def own(self, works: Work) -> Work:
        """This stage's work of a tick, from that of all stages."""
        return Work(*(jax.lax.dynamic_index_in_dim(x, jax.lax.axis_index(AXIS), 0, keepdims=False) for x in works))

    def enter(self, work: Work, x: Array, batch: Any) -> Array:
        """What a chunk begins with: the embedding, or the activation that was sent."""
        return when(self.is_first(work), lambda x: self.model.embed(self.outer, batch), x)


def train(
    stage: Stage, table: Timetable, batches: Any, sums: Sums, add: tuple[Callable[..., Any], Callable[..., Any]]
) -> Sums:
    """Forward and backward passes of all micro-batches.

    Args:
        stage: this stage's part.
        table: the ticks.
        batches: the micro-batches, a dict of arrays [M, B, ...].
        sums: what losses and gradients are added to.
        add: (sums of the outer parameters, gradients) -> sums, and (sums of the layers, number of a layer among this
            stage's, its gradients) -> sums.

    Returns:
        This stage's sums: the loss on the last stage; gradients of the outer parameters in parts.
    """
    blank = zeros(jax.eval_shape(lambda: stage.model.embed(stage.outer, at(batches, 0))))
    residuals, rebuild = _probe(stage, blank, at(batches, 0))
    ring = stage.pipeline.vary([zeros(x, (table.slots, stage.per_chunk)) for x in residuals])

    def tick(carry: Any, works: tuple[Work, Work]) -> tuple[Any, None]:
        ring, x, dx, sums = carry
        forward, backward = (stage.own(w) for w in works)
        run = lambda carry: _forward(stage, forward, carry[0], carry[1], batches)
        x, ring = when(forward.micro_batch != IDLE, run, (x, ring))
        run = lambda carry: _backward(stage, backward, carry[0], carry[1], x, batches, ring, rebuild, add)
        dx, sums = when(backward.micro_batch != IDLE, run, (dx, sums))
        x = stage.pipeline.send(stage.in_order(dx, x))
        dx = stage.pipeline.send(stage.in_order(x, dx), -1)
        return (ring, x, dx, sums), None

    (_, _, _, sums), _ = jax.lax.scan(tick, (ring, blank, blank, sums), (table.forward, table.backward))
    return sums


def _probe(stage: Stage, x: Array, batch: Any) -> tuple[list[Any], Callable]:
    """Types of what a layer's VJP needs besides weights and batch, and how it is put together."""
    rebuild: list[Callable] = []

    def run() -> list[Array]:
        zero = jnp.int32(0)
        number = stage.number(Work(zero, zero, zero), zero)
        layer, slots = stage.layer(zero), at(stage.slots, zero)
        _, residuals, put_together = stage.model.block.vjp(layer, x, batch, number, slots)
        rebuild.append(put_together)
        return residuals

    return jax.eval_shape(run), rebuild[0]


def _forward(stage: Stage, work: Work, x: Array, ring: list[Array], batches: Any) -> tuple[Array, list[Array]]:
    """A chunk's forward pass: its output, and the ring with what its backward pass needs."""
    batch = at(batches, work.micro_batch)

    def body(carry: tuple[Array, list[Array]], weights: Any, j: Array) -> tuple[Array, list[Array]]:
        x, ring = carry
        slots = at(stage.slots, work.chunk * stage.per_chunk + j)
        y, residuals, _ = stage.model.block.vjp(weights, x, batch, stage.number(work, j), slots)
        put = lambda r, v: r.at[work.slot, j].set(v, mode="promise_in_bounds")
        return y, [put(r, v) for r, v in zip(ring, residuals, strict=True)]

    return _layer_by_layer(stage, work, body, (stage.enter(work, x, batch), ring))


def _layer_by_layer(stage: Stage, work: Work, body: Callable[..., Any], carry: Any, *, reverse: bool = False) -> Any:
    """`carry = body(carry, weights, j)` for the layers j of a chunk; shards are gathered one layer ahead.

    The last layer gathers one more in vain, behind its own compute: taken out of the loop it would be compiled twice.
    """
    first, last, step = (stage.per_chunk - 1, 0, -1) if reverse else (0, stage.per_chunk - 1, 1)
    number = lambda j: work.chunk * stage.per_chunk + j
    if not stage.gathers or first == last:
        plain = lambda carry, j: (body(carry, stage.layer(number(j)), j), None)
        return jax.lax.scan(plain, carry, jnp.arange(stage.per_chunk, dtype=jnp.int32), reverse=reverse)[0]

    def ahead(both: tuple[Any, Any], j: Array) -> tuple[tuple[Any, Any], None]:
        carry, weights = both
        following = stage.layer(number(jnp.clip(j + step, 0, stage.per_chunk - 1)))
        return (body(carry, weights, j), following), None

    start = carry, stage.layer(number(jnp.int32(first)), carry[0])
    return jax.lax.scan(ahead, start, jnp.arange(stage.per_chunk, dtype=jnp.int32), reverse=reverse)[0][0]


def _backward(
    stage: Stage,
    work: Work,
    dy: Array,  # the cotangent that was sent
    sums: Sums,
    y: Array,  # what the forward pass of this tick gave: the last chunk's is of the same micro-batch
    batches: Any,
    ring: list[Array],
    rebuild: Callable,
    add: tuple[Callable, Callable],  # of the outer parameters, of the layers
) -> tuple[Array, Sums]:
    """A chunk's backward pass: the cotangent of its input, and the sums."""
    batch, outer = at(batches, work.micro_batch), stage.outer
    add_outer, add_layer = add

    def head(carry: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
        _, total, grads = carry
        loss, vjp = jax.vjp(lambda outer, y: stage.model.finish(outer, y, batch), outer, y)
        d_outer, dy = vjp(jnp.ones_like(loss))
        return dy, total + loss, add_outer(grads, d_outer)

    dy, loss, d_outer = when(stage.is_last(work), head, (dy, sums.loss, sums.outer))

    def body(carry: tuple[Array, Any, Any], weights: Any, j: Array) -> tuple[Array, Any, Any]:
        dy, sums, seen = carry
        n = work.chunk * stage.per_chunk + j
        known = (weights, batch, stage.number(work, j), at(stage.slots, n))
        dw, dx, found = rebuild(known, [r[work.slot, j] for r in ring])(dy)
        return dx, add_layer(sums, n, as_arrays(dw)), record(seen, n, found)

    dx, layers, seen = _layer_by_layer(stage, work, body, (dy, sums.layers, sums.seen), reverse=True)

    def embedding(total: Any) -> Any:
        float32 = jax.tree.map(lambda w: w.astype(jnp.float32), outer)  # frequent tokens get many small contributions
        return add_outer(total, jax.vjp(lambda outer: stage.model.embed(outer, batch), float32)[1](dx)[0])

    return dx, Sums(loss, when(stage.is_first(work), embedding, d_outer), layers, seen)


def apply(stage: Stage, batches: Any) -> Any:
    """Forward passes of all micro-batches, for evaluation: nothing is kept.

    Args:
        stage: this stage's part.
        batches: the micro-batches, a dict of arrays [M, B, ...].

    Returns:
        The sum of what `stage.model.finish` gives, the same on every stage.
    """
    blank = zeros(jax.eval_shape(lambda: stage.model.embed(stage.outer, at(batches, 0))))
    total = zeros(jax.eval_shape(lambda: stage.model.finish(stage.outer, blank, at(batches, 0))))

    def run(work: Work, x: Array, total: Any) -> tuple[Array, Any]:
        batch = at(batches, work.micro_batch)

        def layer(x: Array, j: Array) -> tuple[Array, None]:
            n = work.chunk * stage.per_chunk + j
            return stage.model.block(stage.layer(n), x, batch, stage.number(work, j), at(stage.slots, n)), None

        y, _ = jax.lax.scan(layer, stage.enter(work, x, batch), jnp.arange(stage.per_chunk, dtype=jnp.int32))
        add = lambda total: jax.tree.map(jnp.add, total, stage.model.finish(stage.outer, y, batch))
        return y, when(stage.is_last(work), add, total)

    def tick(carry: Any, works: Work) -> tuple[Any, None]:
        x, total = carry
        work = stage.own(works)
        y, total = when(work.micro_batch != IDLE, lambda carry: run(work, *carry), (x, total))
        return (stage.pipeline.send(stage.in_order(total, y)), total), None

    works = forward_passes(stage.pipeline.size, stage.pipeline.chunks, jax.tree.leaves(batches)[0].shape[0])
    (x, total), _ = jax.lax.scan(tick, (blank, total), works)
    return stage.pipeline.sum(stage.in_order(x, total))


def when(condition: Array, f: Callable[[Any], Any], carry: Any) -> Any:
    """`f(carry)` if the condition holds, else `carry`, in place: a loop of one round or none."""
    body = lambda state: (state[0] & False, f(state[1]))
    return jax.lax.while_loop(lambda state: state[0], body, (condition, carry))[1]
