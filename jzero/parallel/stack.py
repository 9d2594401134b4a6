"""The scan over a model's layers, with its forward and its backward pass written out.

Autodiff of a scan decides by itself what is kept and when gradients appear. Here both are explicit, as both matter:

    forward    per layer: gather its weights (if they are shards), run it, keep what the backward pass needs
    backward   per layer, last first: gather again (if not kept), its VJP, then scatter or accumulate its gradient

So layer i's reduce-scatter can run while layer i-1's backward computes, weights never enter the residuals, and the
first micro-batch can gather while the last one scatters. All of it runs inside a manual region.

Letters: L layers, B samples of this rank, T positions, D model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jzero.optim import collectives
from jzero.optim.partition import Leaf

Block = Callable[[Any, Array, Array], Array]
"""One layer: (its weights, x [B, T, D], its number) -> x [B, T, D]."""


@dataclasses.dataclass(frozen=True)
class DataParallel:
    """How weights and gradients of some parameters cross the data axis.

    Attributes:
        leaves: the plan of each parameter, in flattening order.
        replica: axes over which the shards are repeated.
        varying: the axes that split the batch; weights are marked as varying over them.
        grad_dtype: dtype on the wire of the reduce-scatter.
        param_dtype: dtype on the wire of the all-gather; None: the parameter's own.
    """

    leaves: tuple[Leaf, ...]
    replica: tuple[str, ...]
    varying: tuple[str, ...]
    grad_dtype: Any
    param_dtype: Any = None

    def layer(self) -> DataParallel:
        """The same for one layer of stacked parameters."""
        return dataclasses.replace(self, leaves=tuple(leaf.layer() for leaf in self.leaves))

    def whole(self, shards: Any) -> Any:
        """Shards -> full weights in their own dtype, varying over the batch axes."""

        def one(x: Array, leaf: Leaf) -> Array:
            full = collectives.gather(x, leaf, dtype=self.param_dtype).astype(x.dtype)
            return collectives.vary(full, self.varying)

        return self._map(one, shards)

    def local(self, weights: Any) -> Any:
        """Replicated weights, marked as varying so that their gradients stay this rank's own."""
        return self._map(lambda x, leaf: collectives.vary(x, self.varying), weights)

    def scatter(self, grads: Any) -> Any:
        """Full gradients of this rank -> float32 shards of the mean."""
        return self._map(
            lambda g, leaf: collectives.scatter(g, leaf, replica=self.replica, dtype=self.grad_dtype), grads
        )

    def zeros(self) -> Any:
        """Float32 accumulators of full size, one per leaf, varying over the batch axes."""
        return [collectives.vary(jnp.zeros(leaf.local_shape, jnp.float32), self.varying) for leaf in self.leaves]

    def _map(self, f: Callable[[Array, Leaf], Array], tree: Any) -> Any:
        flat, treedef = jax.tree.flatten(tree)
        return treedef.unflatten([f(x, leaf) for x, leaf in zip(flat, self.leaves, strict=True)])


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass."""

    residuals: Sequence[Array]  # each [L, ...]: what the layers' VJPs need, without the weights
    weights: Any  # each [L, ...]: the gathered weights where they are kept, else the weights given to forward
    kept: bool  # whether `weights` are full
    rebuild: Callable[
        [Any, Sequence[Array]], Callable[[Array], tuple[Any, Array]]
    ]  # (weights, residuals) -> a layer's VJP


def checkpointed(block: Block, granularity: str | None, selective: Any) -> Block:
    """The block with activation checkpointing.

    Args:
        block: one layer.
        granularity: None keeps the results of matrix products and recomputes what is elementwise; "selective" keeps
            what the model names and recomputes the rest (Korthikanti et al., arXiv 2205.05198); "full" keeps only the
            input.
        selective: the `jax.checkpoint` policy of "selective".
    """
    policies = {
        None: jax.checkpoint_policies.dots_saveable,
        "selective": selective,
        "full": jax.checkpoint_policies.nothing_saveable,
    }
    return jax.checkpoint(block, policy=policies[granularity], prevent_cse=False)


def forward(
    block: Block, weights: Any, x: Array, parallel: DataParallel, *, shards: bool, keep: bool
) -> tuple[Array, Saved]:
    """Run all layers and keep what `backward` needs.

    Args:
        block: one layer.
        weights: tree of [L, ...]: full weights that vary over the batch axes, or shards.
        x: [B, T, D].
        parallel: the plan of the stacked weights.
        shards: whether `weights` are shards, to be gathered layer by layer.
        keep: whether gathered weights are kept for the backward pass (and for further micro-batches).

    Returns:
        Output of the last layer [B, T, D], and what to hand to `backward`.
    """
    per_layer = parallel.layer()
    rebuild: list[Callable[..., Any]] = []  # filled while the body is traced

    def body(x: Array, layer: tuple[Any, Array]) -> tuple[Array, tuple[list[Array], Any]]:
        stored, index = layer
        full = per_layer.whole(stored) if shards else stored
        y, vjp = jax.vjp(lambda w, x: block(w, x, index), full, x)
        residuals, put_together = _take_apart(vjp, full)
        rebuild.append(put_together)
        return y, (residuals, full if shards and keep else None)

    y, (residuals, gathered) = jax.lax.scan(body, x, (weights, _numbers(weights)))
    kept = not shards or keep
    return y, Saved(residuals, gathered if shards and keep else weights, kept, rebuild[-1])


def backward(
    saved: Saved, dy: Array, parallel: DataParallel, *, accumulated: Any = None, scatter: bool
) -> tuple[Array, Any]:
    """Gradients of all layers, last layer first.

    Args:
        saved: from `forward`.
        dy: [B, T, D], the cotangent of the last layer's output.
        parallel: the plan of the stacked weights.
        accumulated: float32 [L, ...] local sums of earlier micro-batches, or None.
        scatter: reduce each layer's gradient to this rank's shard as soon as it is known; otherwise sum it locally.

    Returns:
        Cotangent of the input [B, T, D]; gradients, float32 [L, ...]: shards of the mean, or full local sums.
    """
    per_layer = parallel.layer()

    def body(dy: Array, layer: tuple[Sequence[Array], Any, Any]) -> tuple[Array, Any]:
        residuals, stored, total = layer
        full = stored if saved.kept else per_layer.whole(stored)
        dw, dx = saved.rebuild(full, residuals)(dy)
        if total is not None:
            dw = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, dw)
        if scatter:
            return dx, per_layer.scatter(dw)
        return dx, jax.tree.map(lambda g: g.astype(jnp.float32), dw)

    return jax.lax.scan(body, dy, (saved.residuals, saved.weights, accumulated), reverse=True)


def apply(block: Block, weights: Any, x: Array, parallel: DataParallel, *, shards: bool) -> Array:
    """Run all layers, for evaluation: nothing is kept. Arguments as for `forward`."""
    per_layer = parallel.layer()

    def body(x: Array, layer: tuple[Any, Array]) -> tuple[Array, None]:
        stored, index = layer
        return block(per_layer.whole(stored) if shards else stored, x, index), None

    return jax.lax.scan(body, x, (weights, _numbers(weights)))[0]


def _numbers(weights: Any) -> Array:
    return jnp.arange(jax.tree.leaves(weights)[0].shape[0], dtype=jnp.int32)


def _take_apart(vjp: Any, weights: Any) -> tuple[list[Array], Callable[..., Any]]:
    """A VJP's own arrays, and how to put it together again from the weights and those arrays."""
    flat, treedef = jax.tree.flatten(vjp)
    position = {id(w): i for i, w in enumerate(jax.tree.leaves(weights))}
    weight_at = [position.get(id(x)) for x in flat]

    def rebuild(weights: Any, values: Sequence[Array]) -> Callable[[Array], tuple[Any, Array]]:
        own, full = iter(values), jax.tree.leaves(weights)
        return jax.tree.unflatten(treedef, [next(own) if at is None else full[at] for at in weight_at])

    return [x for x, at in zip(flat, weight_at, strict=True) if at is None], rebuild
