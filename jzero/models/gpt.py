"""GPT: START HERE for the models. The configuration, the model as a Flax NNX module, and the same as pure functions.

    tokens [B, T] → embedding → L × block → norm → head → logits [B, T, V]

Parameters are a nested dict; those of the L equal blocks are stacked in front:

    {"embedding": {"token": [V, D], "position": [longest T, D]},
     "blocks": {"attention_norm": {"gain": [L, D], "bias": [L, D]},
                "attention": {"qkv": {"weight": [L, D, G, R + 2, K], "bias"}, "out": {"weight": [L, H, K, D], "bias"}},
                "mlp_norm": …, "mlp": {"up": {"weight": [L, D, F], "bias"}, "down": {"weight": [L, F, D], "bias"}}},
     "final_norm": {"gain": [D], "bias": [D]},
     "head": {"weight": [V, D]}}                               # where it is not tied to the embedding

Letters: B batch, T sequence, D model, F feed-forward, G groups = heads of keys and values, R query heads of a group,
H = G · R heads, K head width, V vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx

from jzero.fp8 import Slots
from jzero.models import parameters
from jzero.models.config import TransformerConfig, check_split, mistake
from jzero.models.dropout import Dropout
from jzero.models.functions import Batch, Functions, functions, make_functions
from jzero.models.layers import Block, Embedding, Norm, apply_blocks, project_to_vocabulary
from jzero.models.parameters import Parameter, Tree
from jzero.parallel.tensor import TensorParallel


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """A `TransformerConfig` (its arguments are documented there) with a language-modelling head.

    Args:
        share_embeddings_and_output_weights: use the token embedding as the head.

    Example:
        >>> config = GPTConfig(vocab_size=384, num_layers=4, hidden_size=128, num_attention_heads=4)
        >>> config.ffn_width, config.head_width
        (512, 32)
    """

    share_embeddings_and_output_weights: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.transformer_block_type != "pre_ln":
            raise mistake("transformer_block_type", "pre_ln for a GPT", self.transformer_block_type)


class Head(nnx.Module):
    """The head's own table of token vectors."""

    weight: nnx.Param  # [V, D]

    @staticmethod
    def parameters(config: TransformerConfig) -> Tree:
        """Record of the table."""
        shape, init = (config.vocab_size, config.hidden_size), parameters.normal(config.init_method_std)
        return {"weight": Parameter(shape, ("vocab", "embed"), config.param_dtype, init)}

    def __init__(self, values: Tree):
        self.weight = nnx.Param(values["weight"])


class GPT(nnx.Module):
    """A GPT whose `nnx.state(model, nnx.Param)` is the tree of parameters described at the top of this file.

    Args:
        config: the architecture.
        rngs: makes initial parameters from its stream `params`.
        params: uses these instead: a nested dict of arrays.

    Raises:
        TypeError: neither `rngs` nor `params` are given, or both.

    Example:
        >>> import jax.numpy as jnp
        >>> config = GPTConfig(vocab_size=256, num_layers=2, hidden_size=32, num_attention_heads=2)
        >>> model = GPT(config, rngs=nnx.Rngs(0))
        >>> model(jnp.zeros((1, 8), jnp.int32)).shape
        (1, 8, 256)
    """

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs | None = None, *, params: Tree | None = None):
        params = parameters.given_or_drawn(params, rngs, describe(config), "GPT")
        self.config = config
        self.embedding = Embedding(config, params["embedding"])
        self.blocks = Block(config, params["blocks"])
        self.final_norm = Norm(config, params["final_norm"])
        self.head = None if config.share_embeddings_and_output_weights else Head(params["head"])

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        dropout: Dropout | None = None,
        slots: Slots | None = None,
    ) -> jax.Array:
        """Scores of every next token.

        Args:
            tokens: int [B, T].
            positions: int [B, T]; None: 0 … T-1.
            segments: int [B, T]; tokens see only those of their own segment. None: all are one.
            dropout: None: no dropout.
            slots: of the layers' FP8 products: scales [L, 4, 3], which `config.fp8=DelayedScaling(…)` needs.

        Returns:
            Logits, float32 [B, T, V]; those of padding mean nothing.
        """
        x = self.embedding(tokens, positions, dropout)
        context = {"positions": positions, "segments": segments, "dropout": dropout}
        x = apply_blocks(self.blocks, x, self.config.pieces, slots, **context)
        table = self.embedding.token if self.head is None else self.head.weight
        return project_to_vocabulary(self.final_norm(x), table[...])


def describe(config: GPTConfig) -> Tree:
    """The nested dict of `Parameter` records from which all else about a GPT's parameters follows."""
    tree = {
        "embedding": Embedding.parameters(config),
        "blocks": parameters.stack(Block.parameters(config), config.num_layers),
        "final_norm": Norm.parameters(config),
    }
    return tree if config.share_embeddings_and_output_weights else {**tree, "head": Head.parameters(config)}


@functions.register
def _gpt_functions(config: GPTConfig, tensor: TensorParallel | None = None) -> Functions:
    tensor = tensor or TensorParallel()
    check_split(config, tensor.size)

    def embed(outer: Tree, batch: Batch, dropout: Dropout | None) -> jax.Array:
        return Embedding(config, outer["embedding"], tensor)(batch["tokens"], batch.get("positions"), dropout)

    def scores(outer: Tree, x: jax.Array) -> jax.Array:  # this rank's logits
        tied = config.share_embeddings_and_output_weights
        table = outer["embedding"]["token"] if tied else outer["head"]["weight"]
        return project_to_vocabulary(tensor.enter(Norm(config, outer["final_norm"])(x)), table)

    def losses(outer: Tree, x: jax.Array, batch: Batch) -> jax.Array:
        return tensor.cross_entropy(scores(outer, x), batch["labels"], config.vocab_padding)

    return make_functions(
        config,
        describe(config),
        tensor,
        embed=embed,
        losses=losses,
        logits=lambda outer, x: tensor.whole_vocabulary(scores(outer, x)),
        inputs={"tokens": 2, "labels": 2, "loss_mask": 2},
    )
