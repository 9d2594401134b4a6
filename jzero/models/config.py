"""The architecture of a transformer as data, with the names that NeMo gives it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from jzero.errors import JzeroError
from jzero.fp8.recipes import Recipe

_POSITIVE = ("vocab_size", "num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_POSITIVE_IF_SET = ("ffn_hidden_size", "num_query_groups", "kv_channels")
_CHOICES = {
    "normalization": ("layernorm", "rmsnorm"),
    "activation": ("gelu", "gelu_exact", "swiglu"),
    "transformer_block_type": ("pre_ln", "post_ln"),
    "position_embedding_type": ("learned_absolute", "rope"),
    "attention_implementation": ("auto", "xla", "cudnn"),
}


class Piece(NamedTuple):
    """Layers that follow one another and are alike."""

    wide: bool  # their products have the type of the activations, although the model's are in FP8
    start: int  # number of the first
    stop: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """What every transformer of this package has; names and defaults are those of NeMo's `model` section.

    Args:
        vocab_size: rows of the token embedding, padding to a convenient multiple included.
        vocab_padding: how many of the last rows are padding: tokens that do not exist take no part in a loss.
        num_layers, hidden_size, num_attention_heads: the sizes everybody quotes.
        max_position_embeddings: rows of the learned position table; not used by rotary positions.
        ffn_hidden_size: width of the feed-forward layer; None: 4 × hidden_size.
        num_query_groups: heads that keys and values have (grouped-query attention); None: num_attention_heads.
        kv_channels: width of one head; None: hidden_size / num_attention_heads.
        init_method_std: standard deviation of initial weights.
        use_scaled_init_method: divide it by √(2 · num_layers) in the two projections that write to the residual stream.
        hidden_dropout, attention_dropout: rates in [0, 1), applied only where a `Dropout` is handed in.
        normalization: "layernorm" or "rmsnorm"; layernorm_epsilon: what is added to the variance.
        activation: "gelu" (tanh approximation), "gelu_exact" (with the error function) or "swiglu".
        bias: whether the four projections of a block have one (a LayerNorm always has).
        transformer_block_type: "pre_ln": norms before attention and feed-forward layer; "post_ln": after their sums
            with what goes past them (Vaswani et al. 2017).
        position_embedding_type: "learned_absolute" or "rope"; rotary_base, rotary_percentage: of "rope" alone.
        attention_implementation: "auto" (cuDNN on a GPU in 16 bits, else written out), "xla" or "cudnn"
            (`jax.nn.dot_product_attention`'s).
        do_layer_norm_weight_decay: whether weight decay applies to norms and biases too.
        fp8: recipe of the layers' four products; None: they have the type of the activations. Embedding, head and norms
            are never in FP8.
        first_last_layers_bf16: with `fp8`: in the first and the last layers all products have the type of the
            activations; num_layers_at_start_in_bf16, num_layers_at_end_in_bf16: in how many.
        param_dtype: type of the parameters. Activations have the type of the embedding they start from.

    Raises:
        JzeroError: a value is out of range, or two values contradict one another.

    Example:
        >>> TransformerConfig(vocab_size=50304, num_layers=2, hidden_size=64, num_attention_heads=4).head_width
        16

    Attributes:
        causal: whether positions see only those up to their own; of a kind of model, not of a configuration.
    """

    causal: ClassVar[bool] = True

    vocab_size: int
    vocab_padding: int = 0
    num_layers: int = 12
    hidden_size: int = 768
    num_attention_heads: int = 12
    max_position_embeddings: int = 512
    ffn_hidden_size: int | None = None
    num_query_groups: int | None = None
    kv_channels: int | None = None
    init_method_std: float = 0.02
    use_scaled_init_method: bool = True
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    normalization: str = "layernorm"
    layernorm_epsilon: float = 1e-5
    activation: str = "gelu"
    bias: bool = True
    transformer_block_type: str = "pre_ln"
    position_embedding_type: str = "learned_absolute"
    rotary_base: float = 10000.0
    rotary_percentage: float = 1.0
    attention_implementation: str = "auto"
    do_layer_norm_weight_decay: bool = False
    fp8: Recipe | None = None
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        _check_ranges(self)
        _check_heads(self)
        _check_positions(self)
        if self.attention_implementation == "cudnn" and self.attention_dropout > 0:
            raise mistake(
                "attention_dropout",
                "0 with attention_implementation cudnn, which has no dropout",
                self.attention_dropout,
            )

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward layer (F)."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def query_groups(self) -> int:
        """Number of heads of keys and values (G)."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """Width of one attention head (K)."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def rotary_width(self) -> int:
        """How many of a head's first channels are rotated; the rest passes through."""
        return int(self.head_width * self.rotary_percentage)

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of the projections that write to the residual stream."""
        return (
            self.init_method_std / (2 * self.num_layers) ** 0.5 if self.use_scaled_init_method else self.init_method_std
        )

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All layers, those that follow one another and are alike in one piece.

        Example:
            >>> from jzero.fp8 import CurrentScaling
            >>> sizes = {"vocab_size": 64, "num_layers": 5, "hidden_size": 8, "num_attention_heads": 1}
            >>> TransformerConfig(**sizes, fp8=CurrentScaling(), first_last_layers_bf16=True).pieces[1]
            Piece(wide=False, start=1, stop=4)
        """
        count = self.num_layers
        if self.fp8 is None or not self.first_last_layers_bf16:
            return (Piece(False, 0, count),)
        first, last = self.num_layers_at_start_in_bf16, count - self.num_layers_at_end_in_bf16
        if first >= last:
            return (Piece(True, 0, count),)
        pieces = Piece(True, 0, first), Piece(False, first, last), Piece(True, last, count)
        return tuple(piece for piece in pieces if piece.start < piece.stop)


def check_split(config: TransformerConfig, tensor: int) -> None:
    """Refuse a number of tensor ranks that does not divide what they split: heads, feed-forward width, vocabulary.

    Raises:
        JzeroError: names the size and the number of ranks.

    Example:
        >>> check_split(TransformerConfig(vocab_size=50304, hidden_size=64, num_attention_heads=4), 2)
    """
    for key, value in (
        ("num_query_groups" if config.num_query_groups else "num_attention_heads", config.query_groups),
        ("ffn_hidden_size", config.ffn_width),
        ("vocab_size", config.vocab_size),
    ):
        if value % tensor:
            raise mistake(key, f"a multiple of tensor_model_parallel_size {tensor}", f"{value}; change one of the two")


def mistake(key: str, expected: str, found: object) -> JzeroError:
    """The error of a key of the model's configuration."""
    return JzeroError(f"model.{key}: expected {expected}, found {found}")


def _check_ranges(config: TransformerConfig) -> None:
    for key in (*_POSITIVE, *_POSITIVE_IF_SET):
        value = getattr(config, key)
        if value is None and key in _POSITIVE_IF_SET:
            continue
        if not isinstance(value, int) or value < 1:
            raise mistake(key, "a whole number of at least 1", value)
    for key, choices in _CHOICES.items():
        if getattr(config, key) not in choices:
            raise mistake(key, " or ".join(choices), getattr(config, key))
    for key in ("hidden_dropout", "attention_dropout"):
        if not 0 <= getattr(config, key) < 1:
            raise mistake(key, "a rate of at least 0 and below 1", getattr(config, key))
    for key in ("init_method_std", "layernorm_epsilon", "rotary_base"):
        if not getattr(config, key) > 0:
            raise mistake(key, "a number above 0", getattr(config, key))
    for key in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if not 0 <= getattr(config, key) <= config.num_layers:
            raise mistake(key, f"0 to num_layers {config.num_layers}", getattr(config, key))
    if not 0 <= config.vocab_padding < config.vocab_size:
        raise mistake("vocab_padding", f"at least 0 and below vocab_size {config.vocab_size}", config.vocab_padding)
    if not jnp.issubdtype(jnp.dtype(config.param_dtype), jnp.floating):
        raise mistake("param_dtype", "a floating-point type", config.param_dtype)


def _check_heads(config: TransformerConfig) -> None:
    heads = config.num_attention_heads
    if config.kv_channels is None and config.hidden_size % heads:
        expected = f"a divisor of hidden_size {config.hidden_size} (or kv_channels set)"
        raise mistake("num_attention_heads", expected, heads)
    if heads % config.query_groups:
        raise mistake("num_query_groups", f"a divisor of num_attention_heads {heads}", config.query_groups)


def _check_positions(config: TransformerConfig) -> None:
    if config.position_embedding_type == "rope":
        if not 0 < config.rotary_percentage <= 1:
            raise mistake("rotary_percentage", "a share above 0 and at most 1", config.rotary_percentage)
        if config.rotary_width < 2 or config.rotary_width % 2:
            expected = f"a share of the {config.head_width} channels of a head that is an even number of at least 2"
            raise mistake("rotary_percentage", expected, f"{config.rotary_percentage} ({config.rotary_width} channels)")
        return
    for key, default in (("rotary_base", 10000.0), ("rotary_percentage", 1.0)):
        if getattr(config, key) != default:
            expected = f"its default {default} unless position_embedding_type is rope"
            raise mistake(key, expected, getattr(config, key))
