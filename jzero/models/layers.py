"""The parts of a transformer. Each says which parameters it has (`parameters`) and takes their values as a dict.

Every computation that is elementwise or a reduction keeps only its inputs for the backward pass (`jax.checkpoint`):
recomputing it is cheaper than writing its intermediate values to memory and reading them back.

Letters: B batch, T sequence, D model, F feed-forward, G groups = heads of keys and values, R query heads of a group,
H = G · R heads, K head width, V vocabulary.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jzero.errors import JzeroError
from jzero.models.attention import attend, einsum32, rotate
from jzero.models.config import TransformerConfig
from jzero.models.dropout import Dropout, Site, drop_attention, drop_features
from jzero.models.parameters import Parameter, Tree, constant, normal

SAVED_BY_SELECTIVE = ("qkv", "context", "projection", "up")
"""Names of what "selective" checkpointing keeps: results of the projections, and what attention hands to one."""

_keep_inputs = functools.partial(jax.checkpoint, prevent_cse=False)


class Linear(nnx.Module):
    """y = x · weight + bias, over the last `inputs` dimensions of x."""

    weight: nnx.Param  # [inputs..., outputs...]
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

    def __init__(self, values: Tree, inputs: int = 1):
        self.weight = nnx.Param(values["weight"])
        self.bias = nnx.Param(values["bias"]) if "bias" in values else None
        self.inputs = inputs

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, inputs...] -> [B, T, outputs...]."""
        y = jnp.tensordot(x, self.weight[...].astype(x.dtype), self.inputs)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


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
    """Causal self-attention with grouped queries (https://arxiv.org/abs/2305.13245).

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

    def __init__(self, config: TransformerConfig, values: Tree):
        self.config = config
        self.qkv = Linear(values["qkv"])
        self.out = Linear(values["out"], inputs=2)

    def __call__(
        self,
        x: jax.Array,
        *,
        index: int | jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        dropout: Dropout | None = None,
    ) -> jax.Array:
        """[B, T, D] -> [B, T, D]. Arguments as for `Block`."""
        config = self.config
        fused = checkpoint_name(self.qkv(x), "qkv")  # [B, T, G, R + 2, K]
        turning, value = fused[..., :-1, :], fused[..., -1, :]
        if config.position_embedding_type == "rope":
            positions = jnp.arange(x.shape[1]) if positions is None else positions
            turning = rotate(turning, positions, config.rotary_width, config.rotary_base)
        rate = config.attention_dropout
        drop = None if dropout is None or rate == 0 else lambda w: drop_attention(w, rate, dropout, index)
        context = attend(
            turning[..., :-1, :],
            turning[..., -1, :],
            value,
            segments=segments,
            implementation=config.attention_implementation,
            drop=drop,
        )
        return checkpoint_name(self.out(checkpoint_name(context, "context")), "projection")


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

    def __init__(self, config: TransformerConfig, values: Tree):
        self.activation = _swiglu if config.activation == "swiglu" else _gelu
        self.up = Linear(values["up"])
        self.down = Linear(values["down"])

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        return self.down(self.activation(checkpoint_name(self.up(x), "up")))


@_keep_inputs
def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


@_keep_inputs
def _swiglu(x: jax.Array) -> jax.Array:
    return jax.nn.silu(x[..., 0, :]) * x[..., 1, :]


class Block(nnx.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    @staticmethod
    def parameters(config: TransformerConfig) -> Tree:
        """Records of one layer."""
        return {
            "attention_norm": Norm.parameters(config),
            "attention": Attention.parameters(config),
            "mlp_norm": Norm.parameters(config),
            "mlp": MLP.parameters(config),
        }

    def __init__(self, config: TransformerConfig, values: Tree):
        self.attention_norm = Norm(config, values["attention_norm"])
        self.attention = Attention(config, values["attention"])
        self.mlp_norm = Norm(config, values["mlp_norm"])
        self.mlp = MLP(config, values["mlp"])
        self.rate = config.hidden_dropout

    def __call__(
        self,
        x: jax.Array,
        *,
        index: int | jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        dropout: Dropout | None = None,
    ) -> jax.Array:
        """Apply the layer.

        Args:
            x: [B, T, D].
            index: number of the layer, part of the dropout masks' keys.
            positions: int [B, T], for rotary positions; None: 0 … T-1.
            segments: int [B, T]; positions see only those of their own segment. None: all are one.
            dropout: None: no dropout.

        Returns:
            [B, T, D].
        """
        attended = self.attention(
            self.attention_norm(x), index=index, positions=positions, segments=segments, dropout=dropout
        )
        x = x + drop_features(attended, self.rate, dropout, Site.ATTENTION_OUT, index)
        return x + drop_features(self.mlp(self.mlp_norm(x)), self.rate, dropout, Site.MLP_OUT, index)


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

    def __init__(self, config: TransformerConfig, values: Tree):
        self.token = nnx.Param(values["token"])
        self.position = nnx.Param(values["position"]) if "position" in values else None
        self.rate = config.hidden_dropout

    def __call__(
        self, tokens: jax.Array, positions: jax.Array | None = None, dropout: Dropout | None = None
    ) -> jax.Array:
        """Int [B, T] -> [B, T, D]. Arguments as for `Block`."""
        x = self.token[...][tokens]
        if self.position is not None:
            table, length = self.position[...], tokens.shape[1]
            if length > table.shape[0]:
                expected = f"expected at most {table.shape[0]} positions (model.max_position_embeddings)"
                raise JzeroError(f"tokens: {expected}, found {length}; shorten the sequences")
            x = x + (table[:length] if positions is None else table[positions])
        return drop_features(x, self.rate, dropout, Site.EMBEDDING, 0)


@jax.custom_vjp
def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-log softmax(logits)[label] of each token.

    The backward pass needs the logits and makes their cotangent in one pass, softmax - one-hot, without a scatter.

    Args:
        logits: float32 [B, T, V].
        labels: int [B, T].

    Returns:
        Float32 [B, T].
    """
    return _cross_entropy_forward(logits, labels)[0]


def _cross_entropy_forward(logits, labels):
    largest = logits.max(-1)
    log_total = jnp.log(jnp.exp(logits - largest[..., None]).sum(-1)) + largest
    own = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return log_total - own, (logits, labels, log_total)


def _cross_entropy_backward(saved, cotangent):
    logits, labels, log_total = saved
    own = jnp.arange(logits.shape[-1]) == labels[..., None]
    return (jnp.exp(logits - log_total[..., None]) - own) * cotangent[..., None], None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def project_to_vocabulary(x: jax.Array, table: jax.Array) -> jax.Array:
    """[B, T, D] and a table [V, D] -> logits, float32 [B, T, V], multiplied in the type of x."""
    return einsum32("btd,vd->btv", x, table.astype(x.dtype))
