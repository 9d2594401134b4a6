"""The parts of a transformer. Each says which parameters it has (`parameters`) and takes their values as a dict.

Every computation that is elementwise or a reduction keeps only its inputs for the backward pass (`jax.checkpoint`):
recomputing it is cheaper than writing its intermediate values to memory and reading them back.

Over the tensor axis (`jzero.parallel.tensor`) each rank has its part of F, G, H and V, and of T between the projections
where the sequence is split.

Letters: B batch, T sequence, D model, F feed-forward, G groups = heads of keys and values, R query heads of a group,
H = G · R heads, K head width, V vocabulary, N tensor ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jzero.errors import JzeroError
from jzero.fp8 import CurrentScaling, Slots
from jzero.fp8.dot import MEASURED, Shared, dot
from jzero.fp8.recipes import Recipe
from jzero.models.attention import attend, einsum32, rotate
from jzero.models.config import Piece, TransformerConfig
from jzero.models.dropout import Dropout, Site, drop_attention, drop_features
from jzero.models.parameters import Parameter, Tree, constant, normal
from jzero.parallel.tensor import AXIS, TensorParallel

SAVED_BY_SELECTIVE = ("qkv", "context", "projection", "up", MEASURED)
"""Names of what "selective" checkpointing keeps: results of the projections, what attention hands to one, amaxes."""

PRODUCTS = (("attention", "qkv"), ("attention", "out"), ("mlp", "up"), ("mlp", "down"))
"""The projections of a block, in the order of its FP8 slots."""

_ALONE, _NO_SLOTS = TensorParallel(), Slots()
_keep_inputs = functools.partial(jax.checkpoint, prevent_cse=False)


class Linear(nnx.Module):
    """y = x · weight + bias, over the last `inputs` dimensions of x; the product in FP8 where `config.fp8` says so."""

    weight: nnx.Param  # [inputs..., outputs...]; may be `Quantised`
    bias: nnx.Param | None  # [outputs...]

    @staticmethod
    def parameters(config: TransformerConfig, std: float, inputs: dict[str, int], outputs: dict[str, int]) -> Tree:
        """Records of a projection between named dimensions; a name that begins with "_" is no logical axis."""
        named = {**inputs, **outputs}
        axes = tuple(None if name.startswith("_") else name for name in named)
        record = Parameter(tuple(named.values()), axes, config.param_dtype, normal(std))
        if not config.bias:
            return {"weight": record}
        bias = Parameter(
            record.shape[len(inputs) :],
            axes[len(inputs) :],
            config.param_dtype,
            constant(0),
            config.do_layer_norm_weight_decay,
        )
        return {"weight": record, "bias": bias}

    def __init__(
        self, values: Tree, inputs: int = 1, config: TransformerConfig | None = None, tensor: TensorParallel = _ALONE
    ):
        self.weight = nnx.Param(values["weight"])
        self.bias = nnx.Param(values["bias"]) if "bias" in values else None
        self.inputs, self.fp8, self.tensor = inputs, config and config.fp8, tensor

    def __call__(
        self, x: jax.Array, leave: Callable[[jax.Array], jax.Array] | None = None, slots: Slots | None = _NO_SLOTS
    ) -> jax.Array:
        """Apply the projection.

        Args:
            x: [B, T, inputs...].
            leave: sums products whose inputs are split over the tensor axis, before the bias; None: outputs are split.
            slots: of an FP8 product: scales [3]; None: the product has the type of x, whatever `config.fp8` says.

        Returns:
            [B, T, outputs...].
        """
        if self.fp8 is None or slots is None:
            y = jnp.tensordot(x, self.weight[...].astype(x.dtype), self.inputs)
        else:
            y = self._eight_bits(x, slots, self.fp8, inputs_split=leave is not None)
        y = y if leave is None else leave(y)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)

    def _eight_bits(self, x: jax.Array, slots: Slots, recipe: Recipe, *, inputs_split: bool) -> jax.Array:
        """The product in FP8; an operand that is cut along the tensor axis is cast with the scale of the whole."""
        weight, shared = self.weight.get_value(), None
        if isinstance(recipe, CurrentScaling) and self.tensor.size > 1:
            axis = (AXIS,)
            shared = Shared(x=axis, w=axis) if inputs_split else Shared(w=axis, gradient=axis)
        return dot(x, weight, slots.scales, recipe=recipe, contract=self.inputs, shared=shared, shares=slots.shares)


class Norm(nnx.Module):
    """LayerNorm (https://arxiv.org/abs/1607.06450) or RMSNorm (https://arxiv.org/abs/1910.07467), in float32."""

    gain: nnx.Param  # [D]
    bias: nnx.Param | None  # [D]; LayerNorm alone

    @staticmethod
    def parameters(config: TransformerConfig) -> Tree:
        """Records of one norm."""

        def record(value: float) -> Parameter:
            decay = config.do_layer_norm_weight_decay
            return Parameter((config.hidden_size,), ("embed",), config.param_dtype, constant(value), decay)

        return {"gain": record(1), "bias": record(0)} if config.normalization == "layernorm" else {"gain": record(1)}

    def __init__(self, config: TransformerConfig, values: Tree):
        self.gain = nnx.Param(values["gain"])
        self.bias = nnx.Param(values["bias"]) if "bias" in values else None
        self.epsilon = config.layernorm_epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> the same, each position normalised."""
        if self.bias is None:
            return _rms_norm(x, self.gain[...], self.epsilon)
        return _layer_norm(x, self.gain[...], self.bias[...], self.epsilon)


@functools.partial(_keep_inputs, static_argnums=2)
def _rms_norm(x: jax.Array, gain: jax.Array, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + epsilon)
    return (wide * scale * gain.astype(jnp.float32)).astype(x.dtype)


@functools.partial(_keep_inputs, static_argnums=3)
def _layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + epsilon)
    return (centred * scale * gain.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Self-attention, causal or not (`config.causal`), with grouped queries (https://arxiv.org/abs/2305.13245).

    One product makes queries, keys and values: for each group R queries, then its key, then its value.
    """

    @staticmethod
    def parameters(config: TransformerConfig) -> Tree:
        """Records of one attention layer."""
        model = {"embed": config.hidden_size}
        groups = config.query_groups
        fused = {"groups": groups, "_roles": config.num_attention_heads // groups + 2, "_width": config.head_width}
        heads = {"heads": config.num_attention_heads, "_width": config.head_width}
        return {
            "qkv": Linear.parameters(config, config.init_method_std, model, fused),
            "out": Linear.parameters(config, config.residual_std, heads, model),
        }

    def __init__(self, config: TransformerConfig, values: Tree, tensor: TensorParallel = _ALONE):
        self.config, self.tensor = config, tensor
        self.qkv = Linear(values["qkv"], 1, config, tensor)
        self.out = Linear(values["out"], 2, config, tensor)

    def __call__(
        self,
        x: jax.Array,
        *,
        index: int | jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        dropout: Dropout | None = None,
        slots: Sequence[Slots | None] = (_NO_SLOTS, _NO_SLOTS),
    ) -> jax.Array:
        """[B, T, D] -> [B, T, D]. Arguments as for `Block`; slots of qkv and out."""
        config, x = self.config, self.tensor.enter(x)
        fused = self.qkv(x, slots=slots[0])  # [B, T, G, R + 2, K], G and H this rank's from here on
        fused = checkpoint_name(fused, "qkv")
        turning, value = fused[..., :-1, :], fused[..., -1, :]
        if config.position_embedding_type == "rope":
            positions = jnp.arange(x.shape[1]) if positions is None else positions
            turning = rotate(turning, positions, config.rotary_width, config.rotary_base)
        rate = config.attention_dropout
        masked = lambda w: drop_attention(w, rate, dropout, index, self.tensor.first(w.shape[1]))
        drop = None if dropout is None or rate == 0 else masked
        context = attend(
            turning[..., :-1, :],
            turning[..., -1, :],
            value,
            segments=segments,
            causal=config.causal,
            implementation=config.attention_implementation,
            drop=drop,
        )
        context = checkpoint_name(context, "context")
        return checkpoint_name(self.out(context, self.tensor.leave, slots[1]), "projection")


class MLP(nnx.Module):
    """Feed-forward layer: down(gelu(up(x))), or down(silu(gate) · up) (https://arxiv.org/abs/2002.05202)."""

    @staticmethod
    def parameters(config: TransformerConfig) -> Tree:
        """Records of one feed-forward layer; for SwiGLU, `up` makes the gate first, then what it gates."""
        model, ffn = {"embed": config.hidden_size}, {"ffn": config.ffn_width}
        wide = {"_gate": 2, **ffn} if config.activation == "swiglu" else ffn
        return {
            "up": Linear.parameters(config, config.init_method_std, model, wide),
            "down": Linear.parameters(config, config.residual_std, ffn, model),
        }

    def __init__(self, config: TransformerConfig, values: Tree, tensor: TensorParallel = _ALONE):
        self.tensor = tensor
        self.activation = _swiglu if config.activation == "swiglu" else gelu(config)
        self.up = Linear(values["up"], 1, config, tensor)
        self.down = Linear(values["down"], 1, config, tensor)

    def __call__(self, x: jax.Array, slots: Sequence[Slots | None] = (_NO_SLOTS, _NO_SLOTS)) -> jax.Array:
        """[B, T, D] -> [B, T, D]; slots of up and down."""
        wide = checkpoint_name(self.up(self.tensor.enter(x), slots=slots[0]), "up")
        return checkpoint_name(self.down(self.activation(wide), self.tensor.leave, slots[1]), "projection")


def gelu(config: TransformerConfig) -> Callable[[jax.Array], jax.Array]:
    """The GELU of a configuration (https://arxiv.org/abs/1606.08415): with the error function, or its approximation."""
    return _gelu_exact if config.activation == "gelu_exact" else _gelu


@_keep_inputs
def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


@_keep_inputs
def _gelu_exact(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


@_keep_inputs
def _swiglu(x: jax.Array) -> jax.Array:
    return jax.nn.silu(x[..., 0, :]) * x[..., 1, :]


class Block(nnx.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)); or norm(x + attention(x)), then norm(x + mlp(x))."""

    @staticmethod
    def parameters(config: TransformerConfig) -> Tree:
        """Records of one layer."""
        return {
            "attention_norm": Norm.parameters(config),
            "attention": Attention.parameters(config),
            "mlp_norm": Norm.parameters(config),
            "mlp": MLP.parameters(config),
        }

    def __init__(self, config: TransformerConfig, values: Tree, tensor: TensorParallel = _ALONE):
        self.tensor = tensor
        self.attention_norm = Norm(config, values["attention_norm"])
        self.attention = Attention(config, values["attention"], tensor)
        self.mlp_norm = Norm(config, values["mlp_norm"])
        self.mlp = MLP(config, values["mlp"], tensor)
        self.rate, self.post = config.hidden_dropout, config.transformer_block_type == "post_ln"

    def __call__(
        self,
        x: jax.Array,
        *,
        index: int | jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        dropout: Dropout | None = None,
        slots: Slots | None = None,
        wide: bool = False,
    ) -> jax.Array:
        """Apply the layer.

        Args:
            x: [B, T, D]; T / N positions of it where the sequence is split.
            index: number of the layer, part of the dropout masks' keys.
            positions: int [B, T], for rotary positions; None: 0 … T-1.
            segments: int [B, T]; positions see only those of their own segment. None: all are one.
            dropout: None: no dropout.
            slots: of the four FP8 products, in the order of `PRODUCTS`; None: `config.fp8` needs none.
            wide: none of its products is in FP8.

        Returns:
            Like x.
        """
        of = lambda i: _NO_SLOTS if slots is None else slots.of(i)
        qkv, out, up, down = (None if wide else of(i) for i in range(len(PRODUCTS)))
        attended = self.attention(
            x if self.post else self.attention_norm(x),
            index=index,
            positions=positions,
            segments=segments,
            dropout=dropout,
            slots=(qkv, out),
        )
        first = self.tensor.first_position(x.shape[1])
        x = x + drop_features(attended, self.rate, dropout, Site.ATTENTION_OUT, index, first)
        x = self.attention_norm(x) if self.post else x
        fed = self.mlp(x if self.post else self.mlp_norm(x), (up, down))
        x = x + drop_features(fed, self.rate, dropout, Site.MLP_OUT, index, first)
        return self.mlp_norm(x) if self.post else x


def apply_blocks(
    blocks: Block, x: jax.Array, pieces: Sequence[Piece], slots: Slots | None = None, **context: Any
) -> jax.Array:
    """All layers of a module whose parameters (and slots) are stacked in front; `context` as for `Block`."""
    structure, layers = nnx.split(blocks)
    for wide, start, stop in pieces:

        def body(x: jax.Array, layer: tuple[Any, jax.Array, Slots | None], wide: bool = wide) -> tuple[jax.Array, None]:
            values, index, own = layer
            return nnx.merge(structure, values)(x, index=index, slots=own, wide=wide, **context), None

        values, own = jax.tree.map(lambda each, own=slice(start, stop): each[own], (layers, slots))
        x, _ = jax.lax.scan(body, x, (values, jnp.arange(start, stop), own))
    return x


class Embedding(nnx.Module):
    """Token embedding, plus that of the position where positions are learned."""

    token: nnx.Param  # [V, D]
    position: nnx.Param | None  # [longest T, D]

    @staticmethod
    def parameters(config: TransformerConfig) -> Tree:
        """Records of the tables."""
        init, width = normal(config.init_method_std), config.hidden_size
        tree = {"token": Parameter((config.vocab_size, width), ("vocab", "embed"), config.param_dtype, init)}
        if config.position_embedding_type == "learned_absolute":
            shape = (config.max_position_embeddings, width)
            tree["position"] = Parameter(shape, ("position", "embed"), config.param_dtype, init)
        return tree

    def __init__(self, config: TransformerConfig, values: Tree, tensor: TensorParallel = _ALONE):
        self.token = nnx.Param(values["token"])
        self.position = nnx.Param(values["position"]) if "position" in values else None
        self.rate, self.tensor, self.wire = config.hidden_dropout, tensor, config.param_dtype

    def __call__(
        self, tokens: jax.Array, positions: jax.Array | None = None, dropout: Dropout | None = None
    ) -> jax.Array:
        """Int [B, T] -> [B, T, D], or this rank's positions of it. Arguments as for `Block`."""
        return self.drop(self.rows(tokens, positions), dropout)

    def rows(self, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """The same without dropout."""
        own = self.tensor.own_positions
        x = self.tensor.lookup(self.token[...], tokens, self.wire)
        if self.position is not None:
            table, length = self.position[...], tokens.shape[1]
            if length > table.shape[0]:
                expected = f"expected at most {table.shape[0]} positions (model.max_position_embeddings)"
                raise JzeroError(f"tokens: {expected}, found {length}; shorten the sequences")
            x = x + (own(table[:length]) if positions is None else table[own(positions, 1)])
        return x

    def drop(self, x: jax.Array, dropout: Dropout | None) -> jax.Array:
        """Dropout of the embedding."""
        return drop_features(x, self.rate, dropout, Site.EMBEDDING, 0, self.tensor.first_position(x.shape[1]))


def project_to_vocabulary(x: jax.Array, table: jax.Array) -> jax.Array:
    """[B, T, D] and a table [V, D] -> logits, float32 [B, T, V], multiplied in the type of x."""
    return einsum32("btd,vd->btv", x, table.astype(x.dtype))
