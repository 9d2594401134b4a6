"""The scan over a model's layers, with its forward and its backward pass written out.

Autodiff of a scan decides by itself what is kept and when gradients appear. Here both are explicit, as both matter:

    forward    per layer: gather the next layer's weights (if they are shards), run it, keep what the backward needs
    backward   per layer, last first: gather the earlier layer's weights (if not kept), scatter the later layer's
               gradient, run its VJP

So layer i+1's reduce-scatter and layer i-1's all-gather run while layer i computes, weights never enter the residuals,
and the first micro-batch can gather while the last one scatters. The last layer (and the first, where weights are
gathered again) stands outside the loop: nothing is gathered in vain, nothing is moved only to line things up. All of it
runs inside a manual region.

Letters: L layers, B samples of this rank, T positions, D model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jzero.fp8.dot import MEASURED
from jzero.fp8.parameters import as_arrays, is_quantised
from jzero.fp8.slots import Slots, record
from jzero.optim import collectives
from jzero.optim.partition import Leaf
from jzero.parallel.tensor import AXIS, TensorParallel

Block = Callable[[Any, Array, Array, Any], Array]
"""One layer: (its weights, x [B, T, D], its number, its FP8 slots or None) -> x [B, T, D]."""

Pieces = Sequence[tuple[Block, int, int]]
"""Layers of one kind that follow one another: (their function, number of the first, after the last)."""

_ALONE = TensorParallel()
SUMMED = "projection"
"""The name (`jax.ad_checkpoint.checkpoint_name`) of what a block sums over the tensor axis and reads again later."""


@dataclasses.dataclass(frozen=True)
class DataParallel:
    """How weights and gradients of some parameters cross the data axis.

    Attributes:
        leaves: the plan of each parameter, in flattening order.
        replica: axes over which the shards are repeated.
        varying: the axes that split the batch; weights are marked as varying over them.
        tensor: the tensor axis; parameters whose gradients are parts of a sum over it are marked as varying there too.
        grad_dtype: dtype on the wire of the reduce-scatter.
        param_dtype: dtype on the wire of the all-gather; None: the parameter's own.
    """

    leaves: tuple[Leaf, ...]
    replica: tuple[str, ...]
    varying: tuple[str, ...]
    grad_dtype: Any
    param_dtype: Any = None
    tensor: TensorParallel = _ALONE

    def layer(self) -> DataParallel:
        """The same for one layer of stacked parameters."""
        return dataclasses.replace(self, leaves=tuple(leaf.layer() for leaf in self.leaves))

    def whole(self, shards: Any, to: Literal["varying", "invarying"] = "varying") -> Any:
        """Shards -> full weights in their own dtype: each rank's own, or the same on every rank."""

        def one(x: Any, leaf: Leaf) -> Any:
            full = collectives.gather(x, leaf, dtype=self.param_dtype, to=to)
            full = full if leaf.quantised else full.astype(x.dtype)
            return self._vary(full, leaf) if to == "varying" else full

        return self._map(one, shards)

    def local(self, weights: Any) -> Any:
        """Weights or shards as they are, marked as varying so that their gradients stay this rank's own."""
        return self._map(self._vary, weights)

    def varies(self, leaf: Leaf) -> tuple[str, ...]:
        """The axes over which a whole weight is marked as varying: its gradient is still to be summed over them."""
        return (*self.varying, *((AXIS,) if self.tensor.partial(leaf.axes) else ()))

    def scatter(self, grads: Any, behind: Any = None) -> Any:
        """Full gradients of this rank -> float32 shards of the mean, hidden behind the computation of `behind`."""
        flat, treedef = jax.tree.flatten(grads)
        return treedef.unflatten([self.scatter_one(g, i, behind) for i, g in enumerate(flat)])

    def scatter_one(self, grad: Array, number: int, behind: Any = None) -> Array:
        """`scatter` for the parameter of this number, in flattening order."""
        leaf = self.leaves[number]
        return collectives.scatter(grad, leaf, replica=self.replica, dtype=self.grad_dtype, behind=behind)

    def complete(self, shards: Any) -> Any:
        """Gradients' shards that are but a part of the sum on each tensor rank -> the sums, the same on every one."""
        flat, treedef = jax.tree.flatten(shards)
        parts = [i for i, leaf in enumerate(self.leaves) if self.tensor.partial(leaf.axes)]
        for i, whole in zip(parts, self.tensor.complete([flat[i] for i in parts]), strict=True):
            flat[i] = whole
        return treedef.unflatten(flat)

    def _vary(self, x: Any, leaf: Leaf) -> Any:
        return jax.tree.map(lambda x: collectives.vary(x, self.varies(leaf)), x)

    def _map(self, f: Callable[[Any, Leaf], Any], tree: Any) -> Any:
        flat, treedef = jax.tree.flatten(tree, is_leaf=is_quantised)
        return treedef.unflatten([f(x, leaf) for x, leaf in zip(flat, self.leaves, strict=True)])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layers:
    """The weights of all layers, whole or as shards."""

    parts: tuple[Any, ...]  # each [L, ...]; or several, of layers that follow one another, each out of its own scan
    last: Any = None  # each [...]: the last layer's, where the first L - 1 came out of scans without it
    # whether they are shards, to be gathered layer by layer
    shards: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def count(self) -> int:
        """Number of layers, L."""
        return sum(map(_length, self.parts)) + (self.last is not None)

    def at(self, i: Any, part: int = 0) -> Any:
        """Layer i's, of this part if there are several; `count - 1` as a Python int where the last stands apart."""
        if self.last is not None and isinstance(i, int) and i == self.count - 1:
            return self.last
        part = min(part, len(self.parts) - 1)
        before = sum(map(_length, self.parts[:part]))
        return at(self.parts[part], i - before if before else i)


class Part(NamedTuple):
    """What a scan over layers of one kind leaves for the backward pass."""

    start: int  # number of the first
    stop: int
    residuals: Sequence[Array]  # each [stop - start, ...]: what the layers' VJPs need, without the weights
    rebuild: Callable[..., Any]  # ((weights, slots), residuals) -> a layer's VJP


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass."""

    layers: Layers  # whole weights where they are kept, else the shards that forward was given
    slots: Slots | None  # as forward was given
    parts: Sequence[Part]  # of all layers but the last
    last: Callable[[Array], tuple[Any, Array, Any]]  # the last layer's VJP: of its weights, x and slots


class Passed(NamedTuple):
    """What the backward pass of a layer hands to that of the layer before it."""

    dx: Array  # [B, T, D], the cotangent of the layer's input
    gathered: Any  # whole weights of the layer before it; None where they are not gathered ahead
    pending: Any  # the layer's gradient, of full size, still to be scattered; None where none is
    sums: Any  # float32 [L, ...], with the gradients of all layers behind it
    seen: Slots | None  # likewise


def checkpointed(block: Block, granularity: str | None, selective: Any) -> Block:
    """The block with activation checkpointing.

    Args:
        block: one layer.
        granularity: None keeps the results of matrix products and recomputes what is elementwise; "selective" keeps
            what the model names and recomputes the rest (Korthikanti et al., arXiv 2205.05198); "full" keeps only the
            input. Of a product that is summed over the tensor axis, what the model names is kept: the sum. Of FP8
            products the amaxes are kept too.
        selective: the `jax.checkpoint` policy of "selective".
    """
    policies = {
        None: jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.save_only_these_names(SUMMED, MEASURED)
        ),
        "selective": selective,
        "full": jax.checkpoint_policies.nothing_saveable,
    }
    return jax.checkpoint(block, policy=policies[granularity], prevent_cse=False)


def forward(
    pieces: Pieces, layers: Layers, x: Array, parallel: DataParallel, *, keep: bool, slots: Slots | None = None
) -> tuple[Array, Saved]:
    """Run all layers and keep what `backward` needs. Shards are gathered one layer ahead.

    Args:
        pieces: all layers, a scan for each piece.
        layers: the weights: whole ones, which vary over the batch axes, or shards.
        x: [B, T, D].
        parallel: the plan of the stacked weights.
        keep: whether gathered weights are kept for the backward pass (and for further micro-batches).
        slots: of the layers' FP8 products, each [L, ...], varying as x does; None: there are none.

    Returns:
        Output of the last layer [B, T, D], and what to hand to `backward`.
    """
    whole = parallel.layer().whole
    final = layers.count - 1
    rebuild: list[Callable[..., Any]] = []  # filled while a body is traced

    def body(block: Block, part: int, carry: tuple[Array, Any], i: Array) -> tuple[tuple[Array, Any], Any]:
        x, gathered = carry
        following = whole(layers.at(i + 1)) if layers.shards else None
        weights = gathered if layers.shards else layers.at(i, part)
        own = at(slots, i)
        y, vjp = jax.vjp(lambda w, x, own: block(w, x, i, own), weights, x, own)
        residuals, put_together = take_apart(vjp, (weights, own))
        rebuild.append(put_together)
        return (y, following), (residuals, weights if layers.shards and keep else None)

    gathered, parts, kept = whole(layers.at(0)) if layers.shards else None, [], []
    for block, start, stop in pieces:
        numbers = jnp.arange(start, min(stop, final), dtype=jnp.int32)
        if numbers.size:
            run = functools.partial(body, block, len(parts))
            (x, gathered), (residuals, weights) = jax.lax.scan(run, (x, gathered), numbers)
            parts.append(Part(start, min(stop, final), residuals, rebuild[-1]))
            kept.append(weights)
    weights, block = gathered if layers.shards else layers.at(final), pieces[-1][0]
    y, last = jax.vjp(lambda w, x, own: block(w, x, jnp.int32(final), own), weights, x, at(slots, final))
    if layers.shards and keep:
        layers = Layers(tuple(kept), weights) if final else Layers((jax.tree.map(lambda w: w[None], weights),))
    return y, Saved(layers, slots, parts, last)


def backward(
    saved: Saved,
    dy: Array,
    parallel: DataParallel,
    *,
    sums: Any,
    local: Any = None,
    seen: Slots | None = None,
    scatter: bool,
) -> tuple[Array, Any, Any, Slots | None]:
    """Gradients of all layers, last layer first.

    A layer's gradient is scattered while the layer before it runs its VJP, and weights that were not kept are gathered
    one layer ahead, so that both can hide behind compute.

    Args:
        saved: from `forward`.
        dy: [B, T, D], the cotangent of the last layer's output.
        parallel: the plan of the stacked weights.
        sums: float32 [L, ...], what the gradients are added to: shards where `scatter`, else of full size.
        local: float32 [L, ...] local sums of earlier micro-batches, to be reduced together with this one's; or None.
        seen: what earlier micro-batches found in their FP8 products, as `slots` of `forward`; None: there are none.
        scatter: reduce each layer's gradient to this rank's shard; otherwise sum it locally.

    Returns:
        Cotangent of the input [B, T, D]; the new sums; the first layer's gradient, which `scatter_first` is to reduce
        (None where nothing is scattered); `seen` with this micro-batch.
    """
    per_layer = parallel.layer()
    layers, final = saved.layers, saved.layers.count - 1
    if layers.shards:  # or XLA would find that it gathered these before, and keep what the policy gives up
        layers = Layers(collectives.after(dy, layers.parts), shards=True)

    def finish(i: Any, dw: Any) -> Any:
        return dw if local is None else jax.tree.map(lambda a, g: a + g.astype(jnp.float32), at(local, i), dw)

    def one(number: int, passed: Passed, i: Any, *, ahead: bool) -> Passed:
        part = saved.parts[number]
        earlier = per_layer.whole(layers.at(i - 1)) if ahead else None
        weights = passed.gathered if layers.shards else layers.at(i, number)
        own = at(part.residuals, i - part.start if part.start else i)
        dw, dx, found = part.rebuild((weights, at(saved.slots, i)), own)(passed.dx)
        dw, seen = as_arrays(dw), record(passed.seen, i, found)
        if not scatter:
            return Passed(dx, earlier, None, add(passed.sums, i, dw), seen)
        # beside a gather XLA's scheduler spreads the two by itself; alone a scatter would be waited for at once
        hidden_by = None if ahead else dx
        sums = add(passed.sums, i + 1, per_layer.scatter(passed.pending, behind=hidden_by))
        return Passed(dx, earlier, finish(i, dw), sums, seen)

    dw, dx, found = saved.last(dy)
    dw = as_arrays(dw)
    pending, sums = (finish(final, dw), sums) if scatter else (None, add(sums, final, dw))
    gathered = per_layer.whole(layers.at(final - 1)) if layers.shards and final else None
    passed, first = Passed(dx, gathered, pending, sums, record(seen, final, found)), int(layers.shards and final > 0)
    for number, part in reversed(list(enumerate(saved.parts))):
        numbers = jnp.arange(max(part.start, first), part.stop, dtype=jnp.int32)
        body = lambda passed, i, number=number: (one(number, passed, i, ahead=layers.shards), None)
        passed = jax.lax.scan(body, passed, numbers, reverse=True)[0] if numbers.size else passed
    if first:  # the layer before which there is none to gather
        passed = one(0, passed, jnp.int32(0), ahead=False)
    return passed.dx, passed.sums, passed.pending, passed.seen


def scatter_first(sums: Any, pending: Any, parallel: DataParallel, behind: Any) -> Any:
    """The sums with the first layer's gradient in them; second and third result of `backward`.

    Args:
        sums: float32 shards [L, ...].
        pending: the first layer's gradient, of full size.
        parallel: the plan of the stacked weights.
        behind: arrays whose computation hides the reduce-scatter.
    """
    pending = collectives.after(sums, pending)  # or XLA merges the last two scatters, and both come late
    return add(sums, 0, parallel.layer().scatter(pending, behind))


def add(sums: Any, i: Any, value: Any) -> Any:
    """Float32 sums stacked along their first dimension, with `value` added to entry i."""
    put = lambda total, v: total.at[i].add(v.astype(jnp.float32), mode="promise_in_bounds")
    return jax.tree.map(put, sums, value)


def apply(
    pieces: Pieces,
    layers: Layers,
    x: Array,
    parallel: DataParallel,
    to: Literal["varying", "invarying"] = "varying",
    slots: Slots | None = None,
) -> Array:
    """Run all layers, for evaluation: nothing is kept. Arguments as for `forward`; "invarying": every rank has `x`."""
    whole = parallel.layer().whole

    for block, start, stop in pieces:

        def body(x: Array, i: Array, block: Block = block) -> tuple[Array, None]:
            weights = whole(layers.at(i), to) if layers.shards else layers.at(i)
            return block(weights, x, i, at(slots, i)), None

        x = jax.lax.scan(body, x, jnp.arange(start, stop, dtype=jnp.int32))[0]
    return x


def _length(stacked: Any) -> int:
    return jax.tree.leaves(stacked)[0].shape[0]


def at(stacked: Any, i: Any) -> Any:
    """Entry i of arrays stacked along their first dimension; read in place, wherever XLA can."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), stacked)


def take_apart(vjp: Any, known: Any) -> tuple[list[Array], Callable[..., Any]]:
    """A VJP's own arrays, and how to put it together again from the known ones and those.

    Args:
        vjp: second result of `jax.vjp`.
        known: a tree of arrays that the backward pass will have anyway: weights, and whatever else it can get.

    Returns:
        The arrays that are not known; a function (known, those arrays) -> VJP.
    """
    flat, treedef = jax.tree.flatten(vjp)
    position = {id(w): i for i, w in enumerate(jax.tree.leaves(known))}
    known_at = [position.get(id(x)) for x in flat]

    def rebuild(known: Any, values: Sequence[Array]) -> Callable[[Array], tuple[Any, Array]]:
        own, full = iter(values), jax.tree.leaves(known)
        return jax.tree.unflatten(treedef, [next(own) if at is None else full[at] for at in known_at])

    return [x for x, at in zip(flat, known_at, strict=True) if at is None], rebuild
