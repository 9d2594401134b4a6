"""BERT: the configuration, the model as a Flax NNX module, and the same as pure functions. `gpt.py` comes first.

    tokens, token_types [B, T] → embedding → L × block → head   → logits of every token [B, T, V]
                                                       → pooler → whether sentence B follows A [B, 2]

Devlin et al., https://arxiv.org/abs/1810.04805. With `transformer_block_type` "post_ln" it is theirs: the embedding
ends in a norm, each block adds and then normalises, and nothing follows the last block. With "pre_ln" it is Megatron's
(Shoeybi et al., https://arxiv.org/abs/1909.08053): the embedding has no norm and one follows the last block.

Parameters are a nested dict; those of the L equal blocks are stacked in front, as a GPT's:

    {"embedding": {"token": [V, D], "position": [longest T, D], "token_type": [2, D],
                   "norm": {"gain": [D], "bias": [D]}},                                     # post_ln alone
     "blocks": {"attention_norm": {"gain": [L, D], "bias": [L, D]},
                "attention": {"qkv": {"weight": [L, D, G, R + 2, K], "bias": [L, G, R + 2, K]},
                              "out": {"weight": [L, H, K, D], "bias": [L, D]}},
                "mlp_norm": …, "mlp": {"up": {"weight": [L, D, F], "bias"}, "down": {"weight": [L, F, D], "bias"}}},
     "final_norm": {"gain": [D], "bias": [D]},                                              # pre_ln alone
     "head": {"transform": {"weight": [D, D], "bias": [D]}, "norm": {"gain": [D], "bias": [D]}, "bias": [V]},
     "pooler": {"weight": [D, D], "bias": [D]},                                             # bert_binary_head alone
     "binary_head": {"weight": [D, 2], "bias": [2]}}                                        # bert_binary_head alone

A linear layer is x · weight + bias; without grouped queries G = H, R = 1 and the three roles of `qkv` are query, key
and value. In a block "post_ln", `attention_norm` follows the attention and `mlp_norm` the feed-forward layer. The head
is norm(gelu(transform(x))) · token tableᵀ + bias, the pooler tanh(pooler(x of position 0)).

Letters: B batch, T sequence, D model, F feed-forward, G groups = heads of keys and values, R query heads of a group,
H = G · R heads, K head width, V vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.fp8 import Slots
from jzero.models import parameters
from jzero.models.config import TransformerConfig, check_split, mistake
from jzero.models.dropout import Dropout
from jzero.models.functions import Batch, Functions, Sums, functions, make_functions
from jzero.models.layers import Block, Embedding, Linear, Norm, apply_blocks, gelu, project_to_vocabulary
from jzero.models.parameters import Parameter, Tree
from jzero.parallel.tensor import TensorParallel

_ALONE = TensorParallel()


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig(TransformerConfig):
    """A `TransformerConfig` (its arguments are documented there) with BERT's embedding and heads.

    Args:
        num_tokentypes: kinds of segments that have an embedding, 2 for sentence A and B; 0: none.
        bert_binary_head: a pooler and a head that tells whether sentence B follows sentence A.

    Example:
        >>> config = BertConfig(vocab_size=384, num_layers=4, hidden_size=128, num_attention_heads=4)
        >>> config.causal, config.num_tokentypes
        (False, 2)
    """

    causal: ClassVar[bool] = False

    num_tokentypes: int = 2
    bert_binary_head: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.num_tokentypes < 0:
            raise mistake("num_tokentypes", "a whole number of at least 0", self.num_tokentypes)


class BertEmbedding(Embedding):
    """The token embedding, plus those of the position and of the kind of segment, then a norm for "post_ln"."""

    token_type: nnx.Param | None  # [kinds, D]

    @staticmethod
    def parameters(config: TransformerConfig) -> Tree:
        """Records of the tables and the norm."""
        assert isinstance(config, BertConfig)
        tree = Embedding.parameters(config)
        if config.num_tokentypes:
            shape, init = (config.num_tokentypes, config.hidden_size), parameters.normal(config.init_method_std)
            tree["token_type"] = Parameter(shape, (None, "embed"), config.param_dtype, init)
        return {**tree, "norm": Norm.parameters(config)} if _is_post(config) else tree

    def __init__(self, config: TransformerConfig, values: Tree, tensor: TensorParallel = _ALONE):
        super().__init__(config, values, tensor)
        self.token_type = nnx.Param(values["token_type"]) if "token_type" in values else None
        self.norm = Norm(config, values["norm"]) if _is_post(config) else None

    def typed(
        self,
        tokens: jax.Array,
        token_types: jax.Array | None,
        positions: jax.Array | None = None,
        dropout: Dropout | None = None,
    ) -> jax.Array:
        """Int [B, T] -> [B, T, D], or this rank's positions of it; `token_types` None: all are 0."""
        x = self.rows(tokens, positions)
        if self.token_type is not None:
            kinds = jnp.zeros_like(tokens) if token_types is None else token_types
            # Two or three rows: a product adds up their gradient, where a lookup would scatter into them.
            own = jax.nn.one_hot(self.tensor.own_positions(kinds, 1), self.token_type.shape[0], dtype=x.dtype)
            x = x + jnp.einsum("btk,kd->btd", own, self.token_type[...].astype(x.dtype))
        return self.drop(x if self.norm is None else self.norm(x), dropout)


class BertHead(nnx.Module):
    """What comes before the product with the token table, and the bias after it."""

    bias: nnx.Param  # [V]

    @staticmethod
    def parameters(config: TransformerConfig) -> Tree:
        """Records of the dense layer, the norm and the bias."""
        bias = Parameter(
            (config.vocab_size,),
            ("vocab",),
            config.param_dtype,
            parameters.constant(0),
            config.do_layer_norm_weight_decay,
        )
        return {"transform": _square(config), "norm": Norm.parameters(config), "bias": bias}

    def __init__(self, config: TransformerConfig, values: Tree, tensor: TensorParallel = _ALONE):
        self.transform, self.norm = Linear(values["transform"]), Norm(config, values["norm"])
        self.activation, self.tensor = gelu(config), tensor
        self.bias = nnx.Param(values["bias"])

    def __call__(self, x: jax.Array, table: jax.Array) -> jax.Array:
        """[B, T, D] -> logits, float32 [B, T, V], or this rank's part of them."""
        x = self.norm(self.activation(self.transform(x)))
        return project_to_vocabulary(self.tensor.enter(x), table) + self.bias[...].astype(jnp.float32)


class BinaryHead(nnx.Module):
    """Whether sentence B follows sentence A: class 0 if it does, 1 if it is a random one."""

    @staticmethod
    def parameters(config: TransformerConfig) -> dict[str, Tree]:
        """Records of the pooler and of the head."""
        two = Linear.parameters(config, config.init_method_std, {"embed": config.hidden_size}, {"_classes": 2})
        return {"pooler": _square(config), "binary_head": two}

    def __init__(self, pooler: Tree, values: Tree, tensor: TensorParallel = _ALONE):
        self.pooler, self.head, self.tensor = Linear(pooler), Linear(values), tensor

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> logits, float32 [B, 2]. Where the sequence is split, the first rank's count."""
        pooled = jnp.tanh(self.pooler(x[:, 0]))
        return self.tensor.from_first_position(self.head(pooled).astype(jnp.float32))


class BERT(nnx.Module):
    """A BERT whose `nnx.state(model, nnx.Param)` is the tree of parameters described at the top of this file.

    Args:
        config: the architecture.
        rngs: makes initial parameters from its stream `params`.
        params: uses these instead: a nested dict of arrays.

    Raises:
        TypeError: neither `rngs` nor `params` are given, or both.

    Example:
        >>> config = BertConfig(vocab_size=256, num_layers=2, hidden_size=32, num_attention_heads=2)
        >>> model = BERT(config, rngs=nnx.Rngs(0))
        >>> tokens, binary = model(jnp.zeros((1, 8), jnp.int32))
        >>> tokens.shape, binary.shape
        ((1, 8, 256), (1, 2))
    """

    def __init__(self, config: BertConfig, rngs: nnx.Rngs | None = None, *, params: Tree | None = None):
        params = parameters.given_or_drawn(params, rngs, describe(config), "BERT")
        self.config = config
        self.embedding = BertEmbedding(config, params["embedding"])
        self.blocks = Block(config, params["blocks"])
        self.final_norm = None if _is_post(config) else Norm(config, params["final_norm"])
        self.head = BertHead(config, params["head"])
        self.pooler = Linear(params["pooler"]) if config.bert_binary_head else None
        self.binary_head = Linear(params["binary_head"]) if config.bert_binary_head else None

    def __call__(
        self,
        tokens: jax.Array,
        token_types: jax.Array | None = None,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        dropout: Dropout | None = None,
        slots: Slots | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Scores of every token, and of the second sentence's following the first.

        Args:
            tokens: int [B, T].
            token_types: int [B, T], 0 in sentence A and 1 in B; None: 0.
            segments: int [B, T]; tokens see only those of their own segment: 1 for text, 0 for padding. None: all is
                text.
            positions: int [B, T]; None: 0 … T-1.
            dropout: None: no dropout.
            slots: of the layers' FP8 products: scales [L, 4, 3], which `config.fp8=DelayedScaling(…)` needs.

        Returns:
            Logits, float32 [B, T, V]; and float32 [B, 2], or None without `bert_binary_head`.
        """
        x = self.embedding.typed(tokens, token_types, positions, dropout)
        context = {"positions": positions, "segments": segments, "dropout": dropout}
        x = apply_blocks(self.blocks, x, self.config.pieces, slots, **context)
        x = x if self.final_norm is None else self.final_norm(x)
        logits = self.head(x, self.embedding.token[...])
        if self.pooler is None or self.binary_head is None:
            return logits, None
        return logits, self.binary_head(jnp.tanh(self.pooler(x[:, 0]))).astype(jnp.float32)


def describe(config: BertConfig) -> Tree:
    """The nested dict of `Parameter` records from which all else about a BERT's parameters follows."""
    tree = {
        "embedding": BertEmbedding.parameters(config),
        "blocks": parameters.stack(Block.parameters(config), config.num_layers),
        "head": BertHead.parameters(config),
    }
    if not _is_post(config):
        tree["final_norm"] = Norm.parameters(config)
    return {**tree, **BinaryHead.parameters(config)} if config.bert_binary_head else tree


@dataclasses.dataclass(frozen=True)
class _Ends:
    """What follows the last block, of a part of a batch: `outer` and `batch` as for `Functions`, x its output."""

    config: BertConfig
    tensor: TensorParallel

    def end(self, outer: Tree, x: jax.Array) -> jax.Array:
        return x if _is_post(self.config) else Norm(self.config, outer["final_norm"])(x)

    def scores(self, outer: Tree, y: jax.Array) -> jax.Array:  # this rank's logits, from what `end` gives
        return BertHead(self.config, outer["head"], self.tensor)(y, outer["embedding"]["token"])

    def binary(self, outer: Tree, y: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:  # losses [B], hits [B]
        logits, label = BinaryHead(outer["pooler"], outer["binary_head"], self.tensor)(y), batch["is_random"]
        own = jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None], -1)[:, 0]
        return -own, (jnp.argmax(logits, -1) == label).astype(jnp.float32)

    def losses(self, outer: Tree, x: jax.Array, batch: Batch) -> jax.Array:
        return self.cross_entropy(self.scores(outer, self.end(outer, x)), batch["labels"])

    def cross_entropy(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        return self.tensor.cross_entropy(logits, labels, self.config.vocab_padding)

    def loss(self, outer: Tree, x: jax.Array, batch: Batch) -> jax.Array:
        y = self.end(outer, x)
        of_tokens = jnp.sum(self.cross_entropy(self.scores(outer, y), batch["labels"]) * batch["weight"])
        return of_tokens + jnp.sum(self.binary(outer, y, batch)[0] * batch["sample_weight"])

    def measures(self, outer: Tree, x: jax.Array, batch: Batch) -> Sums:
        y, labels, mask = self.end(outer, x), batch["labels"], batch["loss_mask"]
        logits = self.scores(outer, y)
        hits = (self.tensor.likeliest(logits, self.config.vocab_padding) == labels) * mask
        found = {"lm_loss": jnp.sum(self.cross_entropy(logits, labels) * mask), "lm_accuracy": jnp.sum(hits)}
        if not self.config.bert_binary_head:
            return found
        of_samples, hits = self.binary(outer, y, batch)
        return {**found, "nsp_loss": jnp.sum(of_samples), "nsp_accuracy": jnp.sum(hits)}

    def counts(self, batch: Batch) -> Sums:
        tokens, samples = jnp.sum(batch["loss_mask"]), jnp.float32(batch["tokens"].shape[0])
        found = {"lm_loss": tokens, "lm_accuracy": tokens}
        return {**found, "nsp_loss": samples, "nsp_accuracy": samples} if self.config.bert_binary_head else found

    def logits(self, outer: Tree, x: jax.Array) -> jax.Array:
        return self.tensor.whole_vocabulary(self.scores(outer, self.end(outer, x)))


@functions.register
def _bert_functions(config: BertConfig, tensor: TensorParallel | None = None) -> Functions:
    """Reads "token_types" and "segments" int [B, T] of a batch, and "is_random" int [B] for the binary head's loss."""
    tensor = tensor or TensorParallel()
    check_split(config, tensor.size)
    ends, binary = _Ends(config, tensor), config.bert_binary_head

    def embed(outer: Tree, batch: Batch, dropout: Dropout | None) -> jax.Array:
        embedding = BertEmbedding(config, outer["embedding"], tensor)
        return embedding.typed(batch["tokens"], batch.get("token_types"), batch.get("positions"), dropout)

    inputs = {"tokens": 2, "labels": 2, "loss_mask": 2, "token_types": 2, "segments": 2}
    return make_functions(
        config,
        describe(config),
        tensor,
        embed=embed,
        losses=ends.losses,
        loss=ends.loss if binary else None,
        measures=ends.measures,
        counts=ends.counts,
        logits=ends.logits,
        inputs={**inputs, "is_random": 1} if binary else inputs,
    )


def _is_post(config: TransformerConfig) -> bool:
    return config.transformer_block_type == "post_ln"


def _square(config: TransformerConfig) -> Tree:
    """Records of a dense layer of the model's width, which every tensor rank has whole."""
    width = config.hidden_size
    return Linear.parameters(config, config.init_method_std, {"embed": width}, {"_width": width})
