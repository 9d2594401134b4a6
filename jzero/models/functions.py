"""A model as pure functions, whatever its kind: what a training step and everything around it know of a model.

Each kind of model registers how it makes them from its configuration (`functions.register`, as in `gpt.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jzero.errors import JzeroError
from jzero.fp8 import Slots
from jzero.fp8.recipes import Recipe
from jzero.models import parameters
from jzero.models.config import Piece, TransformerConfig
from jzero.models.dropout import Dropout
from jzero.models.layers import PRODUCTS, SAVED_BY_SELECTIVE, Block
from jzero.models.parameters import Tree
from jzero.parallel.tensor import TensorParallel

Batch = Mapping[str, jax.Array]
"""Arrays by name. int32 [B, T] each: "tokens", "labels" (for losses), and optionally "positions" and "segments"; what
else a kind of model reads is said there. For `loss`, float32: "weight" [B, T] and "sample_weight" [B]."""
Sums = dict[str, jax.Array]
"""What an evaluation adds up, float32 [] each, by the name of the mean. The loss is the sum of all means whose names
end in "loss"; that of the tokens is the first of them in the alphabet."""


class Functions(NamedTuple):
    """A model as pure functions of plain dicts, for a training step that writes the scan over layers by hand.

    `outer` is the tree of parameters without "blocks", `layer` one layer's part of "blocks" (no leading L). Inside a
    manual region over the tensor axis both are this rank's part, and so is x where the sequence is split.
    """

    abstract: Tree  # the parameters' tree, of jax.ShapeDtypeStruct
    axes: Tree  # of tuples: a logical name or None per dimension
    decay: Tree  # of bool: whether weight decay applies
    init: Callable[..., Tree]  # (key, chunks=1) -> parameters, see `parameters.initialize`
    embed: Callable[[Tree, Batch, Dropout | None], jax.Array]  # (outer, batch, dropout) -> x [B, T, D]
    block: Callable[..., jax.Array]  # (layer, x, batch, dropout, index, FP8 slots or None, wide=False) -> x
    losses: Callable[[Tree, jax.Array, Batch], jax.Array]  # (outer, x, batch) -> float32 [B, T]
    loss: Callable[[Tree, jax.Array, Batch], jax.Array]  # (outer, x, batch) -> float32 [], the weighted sum of all
    measures: Callable[[Tree, jax.Array, Batch], Sums]  # (outer, x, batch) -> sums over the batch
    counts: Callable[[Batch], Sums]  # batch -> how many terms each of `measures` has
    logits: Callable[[Tree, jax.Array], jax.Array]  # (outer, x) -> float32 [B, T, V], whole
    selective_policy: Callable[..., Any]  # for jax.checkpoint(block): recompute the core of attention only
    tensor: TensorParallel  # how the model is spread over the tensor axis
    inputs: dict[str, int]  # arrays of a training batch -> their number of dimensions
    fp8: Recipe | None  # of the layers' products
    pieces: tuple[Piece, ...]  # which layers are wide
    products: tuple[tuple[str, ...], ...]  # paths in a layer's tree of what may be in FP8, in the order of its slots
    has_sample_loss: bool  # whether `loss` has terms per sample besides those per token


@functools.singledispatch
def functions(config: Any, tensor: TensorParallel | None = None) -> Functions:
    """The pure functions of a model.

    Their only collectives are those of `tensor`; without it they run inside and outside of `jax.shard_map`. Activations
    have the type of the embedding's result. "selective" follows Korthikanti et al. (https://arxiv.org/abs/2205.05198).

    Args:
        config: the architecture; its type says which kind of model.
        tensor: how the model is spread over the tensor axis; None: not at all.

    Raises:
        JzeroError: the tensor axis does not divide the model, or it is of no known kind.

    Example:
        >>> from jzero.models import GPTConfig
        >>> f = functions(GPTConfig(vocab_size=256, num_layers=2, hidden_size=32, num_attention_heads=2))
        >>> params = f.init(jax.random.key(0))
        >>> f.embed(params, {"tokens": jnp.zeros((1, 8), jnp.int32)}, None).shape
        (1, 8, 32)
    """
    raise JzeroError(f"model: expected the configuration of a known kind of model, found {type(config).__name__}")


def make_functions(
    config: TransformerConfig,
    tree: Tree,
    tensor: TensorParallel,
    *,
    embed: Callable[..., jax.Array],
    losses: Callable[..., jax.Array],
    logits: Callable[..., jax.Array],
    inputs: dict[str, int],
    loss: Callable[..., jax.Array] | None = None,
    measures: Callable[..., Sums] | None = None,
    counts: Callable[[Batch], Sums] | None = None,
) -> Functions:
    """The `Functions` of a model described by a tree of `Parameter` records, whose layers are `layers.Block`s.

    Without `loss`, `measures` and `counts` the tokens' losses are all there is.
    """

    def weighted(outer: Tree, x: jax.Array, batch: Batch) -> jax.Array:
        return jnp.sum(losses(outer, x, batch) * batch["weight"])

    def measured(outer: Tree, x: jax.Array, batch: Batch) -> Sums:
        return {"loss": jnp.sum(losses(outer, x, batch) * batch["loss_mask"])}

    return Functions(
        abstract=parameters.abstract(tree),
        axes=parameters.logical_axes(tree),
        decay=parameters.decays(tree),
        init=lambda key, chunks=1: parameters.initialize(tree, key, chunks),
        embed=embed,
        block=_block(config, tensor),
        losses=losses,
        loss=loss or weighted,
        measures=measures or measured,
        counts=counts or (lambda batch: {"loss": jnp.sum(batch["loss_mask"])}),
        logits=logits,
        selective_policy=jax.checkpoint_policies.save_only_these_names(*SAVED_BY_SELECTIVE),
        tensor=tensor,
        inputs=inputs,
        fp8=config.fp8,
        pieces=config.pieces,
        products=PRODUCTS,
        has_sample_loss=loss is not None,
    )


def _block(config: TransformerConfig, tensor: TensorParallel) -> Callable[..., jax.Array]:
    """`Functions.block`."""

    def block(
        layer: Tree,
        x: jax.Array,
        batch: Batch,
        dropout: Dropout | None,
        index: int | jax.Array,
        slots: Slots | None = None,
        *,
        wide: bool = False,
    ) -> jax.Array:
        context = {name: batch.get(name) for name in ("positions", "segments")}
        return Block(config, layer, tensor)(x, index=index, dropout=dropout, slots=slots, wide=wide, **context)

    return block
