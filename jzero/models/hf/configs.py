"""config.json of Hugging Face and the keys of a model here: one pair of functions per architecture.

Ours are the fields of `GPTConfig`, which have the names of the `model` section of a configuration file. What a file
asks for and no key here can say is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jzero.errors import JzeroError
from jzero.models.bert import BertConfig
from jzero.models.config import TransformerConfig
from jzero.models.gpt import GPTConfig

Keys = dict[str, Any]


def from_hf(values: Mapping[str, Any]) -> TransformerConfig:
    """config.json -> the architecture, with float32 parameters; dropout rates are those of the file.

    Raises:
        JzeroError: another architecture, or a variant of it that does not exist here.

    Example:
        >>> from_hf({"model_type": "gpt2", "vocab_size": 61, "n_embd": 48}).hidden_size
        48
    """
    name = values.get("model_type")
    if name not in _READ:
        raise JzeroError(
            f"config.json: model_type: expected {' or '.join(_READ)}, found {name}, which no model here computes"
        )
    return _CLASSES[name](**_SHAPE[name], **_READ[name](values))


def to_hf(config: TransformerConfig) -> Keys:
    """A model -> config.json, without padding of the vocabulary.

    Raises:
        JzeroError: no architecture at Hugging Face says what this model computes.

    Example:
        >>> to_hf(GPTConfig(vocab_size=64, vocab_padding=3, hidden_size=48))["vocab_size"]
        61
    """
    return _WRITE[kind(config)](config)


def kind(config: TransformerConfig) -> str:
    """The `model_type` of the architecture that a model has.

    Raises:
        JzeroError: it is none of those known here; names the keys that keep it from the nearest one.

    Example:
        >>> kind(GPTConfig(vocab_size=64, hidden_size=32, num_attention_heads=4))
        'gpt2'
    """
    fits = {name: fields for name, fields in _SHAPE.items() if isinstance(config, _CLASSES[name])}
    wrong = {
        name: [f"model.{key}={getattr(config, key)} (expected {value})"
               for key, value in fields.items() if getattr(config, key) != value]
        for name, fields in fits.items()
    }  # fmt: skip
    for name in wrong.keys() - {"llama"}:  # where every head has its own key, and a head's width follows
        if config.query_groups != config.num_attention_heads:
            wrong[name].append(f"model.num_query_groups={config.num_query_groups} (expected null)")
        if config.head_width * config.num_attention_heads != config.hidden_size:
            wrong[name].append(f"model.kv_channels={config.kv_channels} (expected null)")
    name = min(wrong, key=lambda name: len(wrong[name]))
    if wrong[name]:
        raise JzeroError(
            f"model: expected what an architecture of Hugging Face's computes, of which {name} is the nearest, found "
            f"{', '.join(wrong[name])}; train with what is expected"
        )
    return name


_SHAPE = {
    "gpt2": {
        "position_embedding_type": "learned_absolute",
        "normalization": "layernorm",
        "activation": "gelu",
        "bias": True,
    },
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "rotary_percentage": 1.0,
    },
    "bert": {
        "transformer_block_type": "post_ln",
        "position_embedding_type": "learned_absolute",
        "normalization": "layernorm",
        "bias": True,
    },
}
"""What the names of an architecture say by themselves."""


def _expect(values: Mapping[str, Any], key: str, *allowed: Any, default: Any = None) -> Any:
    """The value of a key, refused unless it is one of those allowed."""
    found = values.get(key, default)
    if found not in allowed:
        raise JzeroError(
            f"config.json: {key}: expected {' or '.join(map(str, allowed))}, found {found}, which no model here "
            "computes"
        )
    return found


def _from_gpt2(values: Mapping[str, Any]) -> Keys:
    _expect(values, "activation_function", "gelu_new", "gelu_pytorch_tanh", default="gelu_new")
    _expect(values, "scale_attn_weights", True, default=True)
    _expect(values, "scale_attn_by_inverse_layer_idx", False, default=False)
    _expect(values, "add_cross_attention", False, default=False)
    return {
        "vocab_size": values.get("vocab_size", 50257),
        "num_layers": values.get("n_layer", 12),
        "hidden_size": values.get("n_embd", 768),
        "num_attention_heads": values.get("n_head", 12),
        "max_position_embeddings": values.get("n_positions", 1024),
        "ffn_hidden_size": values.get("n_inner"),
        "init_method_std": values.get("initializer_range", 0.02),
        "layernorm_epsilon": values.get("layer_norm_epsilon", 1e-5),
        "hidden_dropout": values.get("resid_pdrop", 0.1),
        "attention_dropout": values.get("attn_pdrop", 0.1),
        "share_embeddings_and_output_weights": values.get("tie_word_embeddings", True),
    }


def _to_gpt2(config: GPTConfig) -> Keys:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "vocab_size": config.vocab_size - config.vocab_padding,
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_attention_heads,
        "n_positions": config.max_position_embeddings,
        "n_inner": config.ffn_width,
        "initializer_range": config.init_method_std,
        "layer_norm_epsilon": config.layernorm_epsilon,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "tie_word_embeddings": config.share_embeddings_and_output_weights,
    }


def _from_llama(values: Mapping[str, Any]) -> Keys:
    _expect(values, "hidden_act", "silu", default="silu")
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    _expect(rope, "rope_type", "default", default=rope.get("type", "default"))
    _expect(rope, "partial_rotary_factor", 1.0, default=1.0)
    width = values.get("hidden_size", 4096) // values.get("num_attention_heads", 32)
    bias = _expect(values, "attention_bias", True, False, default=False)
    _expect(values, "mlp_bias", bias, default=False)
    return {
        "bias": bias,
        "vocab_size": values.get("vocab_size", 32000),
        "num_layers": values.get("num_hidden_layers", 32),
        "hidden_size": values.get("hidden_size", 4096),
        "num_attention_heads": values.get("num_attention_heads", 32),
        "num_query_groups": values.get("num_key_value_heads"),
        "kv_channels": values.get("head_dim") if values.get("head_dim") != width else None,
        "max_position_embeddings": values.get("max_position_embeddings", 2048),
        "ffn_hidden_size": values.get("intermediate_size", 11008),
        "init_method_std": values.get("initializer_range", 0.02),
        "layernorm_epsilon": values.get("rms_norm_eps", 1e-6),
        "rotary_base": float(rope.get("rope_theta", values.get("rope_theta", 10000.0))),
        "hidden_dropout": 0.0,
        "attention_dropout": values.get("attention_dropout", 0.0),
        "share_embeddings_and_output_weights": values.get("tie_word_embeddings", False),
    }


def _to_llama(config: GPTConfig) -> Keys:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "vocab_size": config.vocab_size - config.vocab_padding,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_width,
        "max_position_embeddings": config.max_position_embeddings,
        "intermediate_size": config.ffn_width,
        "initializer_range": config.init_method_std,
        "rms_norm_eps": config.layernorm_epsilon,
        "rope_theta": config.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        "attention_dropout": config.attention_dropout,
        "tie_word_embeddings": config.share_embeddings_and_output_weights,
    }


_ACTIVATIONS = {"gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}


def _from_bert(values: Mapping[str, Any]) -> Keys:
    activation = _expect(values, "hidden_act", *_ACTIVATIONS, default="gelu")
    _expect(values, "position_embedding_type", "absolute", default="absolute")
    _expect(values, "is_decoder", False, default=False)
    _expect(values, "tie_word_embeddings", True, default=True)
    return {
        "activation": _ACTIVATIONS[activation],
        "vocab_size": values.get("vocab_size", 30522),
        "num_layers": values.get("num_hidden_layers", 12),
        "hidden_size": values.get("hidden_size", 768),
        "num_attention_heads": values.get("num_attention_heads", 12),
        "max_position_embeddings": values.get("max_position_embeddings", 512),
        "ffn_hidden_size": values.get("intermediate_size", 3072),
        "init_method_std": values.get("initializer_range", 0.02),
        "layernorm_epsilon": values.get("layer_norm_eps", 1e-12),
        "hidden_dropout": values.get("hidden_dropout_prob", 0.1),
        "attention_dropout": values.get("attention_probs_dropout_prob", 0.1),
        "num_tokentypes": values.get("type_vocab_size", 2),
        "bert_binary_head": "BertForPreTraining" in (values.get("architectures") or ()),
    }


def _to_bert(config: BertConfig) -> Keys:
    if not config.num_tokentypes:
        raise JzeroError(
            "model.num_tokentypes: expected at least 1, as Hugging Face's bert has kinds of segments, found 0; train "
            "with 2"
        )
    return {
        "architectures": ["BertForPreTraining" if config.bert_binary_head else "BertForMaskedLM"],
        "model_type": "bert",
        "hidden_act": {"gelu_exact": "gelu", "gelu": "gelu_new"}[config.activation],
        "vocab_size": config.vocab_size - config.vocab_padding,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "intermediate_size": config.ffn_width,
        "initializer_range": config.init_method_std,
        "layer_norm_eps": config.layernorm_epsilon,
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "type_vocab_size": config.num_tokentypes,
        "tie_word_embeddings": True,
    }


_CLASSES: dict[str, Any] = {"gpt2": GPTConfig, "llama": GPTConfig, "bert": BertConfig}
_READ: dict[str, Any] = {"gpt2": _from_gpt2, "llama": _from_llama, "bert": _from_bert}
_WRITE: dict[str, Any] = {"gpt2": _to_gpt2, "llama": _to_llama, "bert": _to_bert}
