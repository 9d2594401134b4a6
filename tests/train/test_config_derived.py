"""What follows from a configuration: mesh, micro-batches, policy, dtypes, the model's own configuration."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from jzero.errors import JzeroError
from jzero.fp8 import DelayedScaling
from jzero.models import BertConfig, GPTConfig
from jzero.train.config import Config, Model, Trainer, load_config, model_config
from jzero.train.config_check import validate
from jzero.train.options import keys

REPOSITORY = Path(__file__).parents[2]


def test_derived_values():
    config = load_config(
        None,
        ["trainer.devices=4", "trainer.num_nodes=4", "model.replica_parallel_size=2", "model.global_batch_size=128"],
    )
    assert config.mesh_shape == {"pipeline": 1, "replica": 2, "data": 8, "tensor": 1}
    assert list(config.mesh_shape) == ["pipeline", "replica", "data", "tensor"]
    assert (config.num_devices, config.data_parallel_size, config.batch_parallel_size) == (16, 8, 16)
    assert config.num_micro_batches == 2
    assert (config.policy, config.zero) == ("replicated", True)
    assert config.param_dtype == jnp.bfloat16
    assert config.grad_sync_dtype is None


def test_mesh_shape_divides_by_every_other_axis():
    config = Config(
        trainer=Trainer(devices=8, num_nodes=4),
        model=Model(
            tensor_model_parallel_size=4,
            pipeline_model_parallel_size=2,
            replica_parallel_size=2,
            global_batch_size=64,
            make_vocab_size_divisible_by=128,
        ),
    )
    assert config.mesh_shape == {"pipeline": 2, "replica": 2, "data": 2, "tensor": 4}
    assert config.num_micro_batches == 4
    assert [config.padded_vocab_size(v) for v in (1, 512, 513, 50257)] == [128, 512, 640, 50304]


def test_the_padded_vocabulary_is_the_same_on_every_mesh_that_divides_it():
    size = lambda tensor, unit: Config(
        model=Model(tensor_model_parallel_size=tensor, make_vocab_size_divisible_by=unit)
    ).padded_vocab_size(50257)
    assert {size(tensor, 128) for tensor in (1, 2, 4, 8)} == {50304}
    assert (size(3, 128), size(2, 1), size(4, 6)) == (50304, 50258, 50268)


@pytest.mark.parametrize(
    ("overrides", "policy", "dtype"),
    [
        ([], "replicated", jnp.bfloat16),
        (["model.optim.overlap_param_sync=true"], "gather_on_forward", jnp.bfloat16),
        (["model.optim.policy=gather_twice", "trainer.precision=32"], "gather_twice", jnp.float32),
        (["model.optim.policy=gather_twice", "model.optim.overlap_param_sync=true"], "gather_twice", jnp.bfloat16),
        (["model.optim.policy=gather_on_forward"], "gather_on_forward", jnp.bfloat16),
    ],
)
def test_policy_and_dtype(overrides, policy, dtype):
    config = validate(load_config(None, overrides), 1)
    assert (config.policy, config.param_dtype) == (policy, dtype)


def test_sync_dtypes():
    config = load_config(None, ["model.optim.grad_sync_dtype=bf16", "model.optim.param_sync_dtype=fp32"])
    assert (config.grad_sync_dtype, config.param_sync_dtype) == (jnp.bfloat16, jnp.float32)


# The model's own configuration


def test_model_config_takes_every_key_of_the_model():
    overrides = [
        "trainer.precision=32",
        "model={encoder_seq_length: 64, num_layers: 3, hidden_size: 48, num_attention_heads: 4, num_query_groups: 2}",
        "model={ffn_hidden_size: 80, kv_channels: 8, init_method_std: 0.5, use_scaled_init_method: false}",
        "model={hidden_dropout: 0.25, attention_dropout: 0.5, normalization: rmsnorm, layernorm_epsilon: 1e-3}",
        "model={activation: swiglu, position_embedding_type: rope, rotary_base: 500, rotary_percentage: 0.5}",
        "model={bias: false, share_embeddings_and_output_weights: false, attention_implementation: xla}",
        "model={do_layer_norm_weight_decay: true, fp8: true}",
        "model={first_last_layers_bf16: true, num_layers_at_start_in_bf16: 0, num_layers_at_end_in_bf16: 2}",
        "model.make_vocab_size_divisible_by=100",
    ]
    found = model_config(load_config(None, overrides), 257)
    assert found == GPTConfig(
        vocab_size=300,
        vocab_padding=43,
        fp8=DelayedScaling(),
        num_layers=3,
        hidden_size=48,
        num_attention_heads=4,
        max_position_embeddings=64,
        ffn_hidden_size=80,
        num_query_groups=2,
        kv_channels=8,
        init_method_std=0.5,
        use_scaled_init_method=False,
        hidden_dropout=0.25,
        attention_dropout=0.5,
        normalization="rmsnorm",
        layernorm_epsilon=1e-3,
        activation="swiglu",
        bias=False,
        position_embedding_type="rope",
        rotary_base=500.0,
        rotary_percentage=0.5,
        attention_implementation="xla",
        do_layer_norm_weight_decay=True,
        first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=0,
        num_layers_at_end_in_bf16=2,
        param_dtype=jnp.dtype("float32"),
        share_embeddings_and_output_weights=False,
    )
    defaults = model_config(Config(), 257)
    kept = {f.name for f in dataclasses.fields(GPTConfig) if getattr(found, f.name) == getattr(defaults, f.name)}
    assert kept == {"transformer_block_type"}, "every field must be seen to change, but for what a GPT has not"


def test_model_config_of_a_bert():
    keys = ["type=bert", "transformer_block_type=post_ln", "num_tokentypes=0", "bert_binary_head=false"]
    found = model_config(load_config(None, [f"model.{key}" for key in keys]), 257)
    defaults = model_config(load_config(None, ["model.type=bert"]), 257)
    assert isinstance(found, BertConfig)
    assert (defaults.num_tokentypes, defaults.bert_binary_head) == (2, True)
    changed = {"transformer_block_type": "post_ln", "num_tokentypes": 0, "bert_binary_head": False}
    assert found == dataclasses.replace(defaults, **changed)


def test_defaults_of_the_model_are_those_of_the_file():
    assert model_config(load_config(None, ["trainer.precision=32"]), 384) == GPTConfig(vocab_size=384)
    assert model_config(Config(), 1).param_dtype == jnp.bfloat16


def test_vocabulary():
    fixed = load_config(None, ["model.vocab_size=50257", "model.max_position_embeddings=1000"])
    assert model_config(fixed).vocab_size == model_config(fixed, 300).vocab_size == 50304
    assert model_config(fixed).max_position_embeddings == 1000
    with pytest.raises(JzeroError, match=r"model\.vocab_size: expected at least the tokenizer's 50258, found 50257"):
        model_config(fixed, 50258)
    with pytest.raises(JzeroError, match=r"model\.vocab_size: expected a number of tokens where there is no tokenizer"):
        model_config(Config())


# The reference page


def test_the_run_folder_may_be_in_the_users_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    overrides = ["exp_manager.exp_dir=~/runs", "exp_manager.name=a/b"]
    assert load_config(None, overrides).run_folder == Path("/home/me/runs/a/b")


def test_reference_page_is_up_to_date():
    command = [sys.executable, "-m", "jzero.train.config"]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    page = (REPOSITORY / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == printed, "run: python -m jzero.train.config > docs/config.md"
    for key, field in keys(Config):
        assert f"| `{key}` | " in page
        assert field.metadata["option"].meaning in page
