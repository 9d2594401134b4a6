"""What a configuration derives, and the one line with which it refuses a mistake."""

import jax.numpy as jnp
import pytest

from jzero.errors import JzeroError
from jzero.models import GPTConfig


def test_defaults_are_nemos():
    config = GPTConfig(vocab_size=50304)
    assert (config.ffn_width, config.query_groups, config.head_width) == (3072, 12, 64)
    assert config.residual_std == pytest.approx(0.02 / 24**0.5)
    assert GPTConfig(vocab_size=50304, use_scaled_init_method=False).residual_std == 0.02


def test_set_sizes_win():
    config = GPTConfig(vocab_size=1, hidden_size=10, kv_channels=6, num_query_groups=4, ffn_hidden_size=7)
    assert (config.ffn_width, config.query_groups, config.head_width) == (7, 4, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, "model.num_layers: expected a whole number of at least 1, found 0"),
        ({"num_layers": 2.5}, "model.num_layers: expected a whole number of at least 1, found 2.5"),
        ({"kv_channels": 0}, "model.kv_channels: expected a whole number of at least 1, found 0"),
        ({"num_attention_heads": 7}, "model.num_attention_heads: expected a divisor of hidden_size 768 .*, found 7"),
        ({"num_query_groups": 5}, "model.num_query_groups: expected a divisor of num_attention_heads 12, found 5"),
        ({"normalization": "batchnorm"}, "model.normalization: expected layernorm or rmsnorm, found batchnorm"),
        ({"activation": "relu"}, "model.activation: expected gelu or gelu_exact or swiglu, found relu"),
        ({"attention_implementation": "flash"}, "model.attention_implementation: expected auto or xla or cudnn, found"),
        ({"hidden_dropout": 1.0}, "model.hidden_dropout: expected a rate of at least 0 and below 1, found 1.0"),
        ({"init_method_std": 0.0}, "model.init_method_std: expected a number above 0, found 0.0"),
        ({"param_dtype": jnp.int32}, "model.param_dtype: expected a floating-point type, found"),
        ({"attention_implementation": "cudnn"}, "model.attention_dropout: expected 0 with .* cudnn.*, found 0.1"),
        ({"rotary_percentage": 0.5}, "model.rotary_percentage: expected its default 1.0 unless .* rope, found 0.5"),
        ({"rotary_base": 500.0}, "model.rotary_base: expected its default 10000.0 unless .* rope, found 500.0"),
        (
            {"position_embedding_type": "rope", "rotary_percentage": 1.5},
            "model.rotary_percentage: expected a share above 0 and at most 1, found 1.5",
        ),
        (
            {"position_embedding_type": "rope", "kv_channels": 5},
            r"model.rotary_percentage: .* even number of at least 2, found 1.0 \(5 channels\)",
        ),
    ],
)
def test_mistakes_are_named_in_one_line(options, message):
    with pytest.raises(JzeroError, match=f"^{message}") as caught:
        GPTConfig(vocab_size=256, **options)
    assert "\n" not in str(caught.value)
