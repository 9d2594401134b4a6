"""Every file of configs/ loads, is valid on the devices it asks for, and says only what differs from the defaults."""

import math
from pathlib import Path

import jax
import pytest
from omegaconf import OmegaConf

from jzero.models.gpt import functions
from jzero.train.config import Config, load_config, model_config, to_yaml
from jzero.train.config_check import validate
from jzero.train.options import keys

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))


def test_the_files_are_these():
    berts = ["bert_55m", "bert_base", "bert_large", "bert_tiny"]
    names = [*berts, "gpt2_124m", "gpt3_1.3b", "gpt3_1.3b_fp8", "gpt3_175b", "gpt_tiny", "gpt_tiny_fp8"]
    assert [f.stem for f in FILES] == names


@pytest.mark.parametrize("name", ["gpt_tiny", "gpt3_1.3b"])
def test_fp8_is_the_only_difference_of_the_fp8_files(name):
    plain, eight = (load_config(CONFIGS / f"{name}{end}.yaml", ["trainer.precision=bf16"]) for end in ("", "_fp8"))
    differ = lambda a, b: {key for key, _ in keys(type(a)) if _value(a, key) != _value(b, key)}
    assert differ(plain, eight) - {"model.fp8_amax_history_len"} == {"model.fp8", "exp_manager.name"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_loads_validates_and_round_trips(path, tmp_path):
    config = load_config(path)
    assert validate(config, config.num_devices) == config
    assert config.num_micro_batches >= 1
    assert config.exp_manager.name == path.stem
    (tmp_path / "saved.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_short_enough_to_read(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    assert lines[0].startswith("# ")
    raw = OmegaConf.to_container(OmegaConf.load(path))
    essential = ("num_layers", "hidden_size", "num_attention_heads", "micro_batch_size", "max_steps", "lr", "min_lr")
    repeated = [
        k
        for k, field in keys(Config)
        if k.split(".")[-1] not in essential and _get(raw, k) == field.default is not None
    ]
    assert not repeated, "these lines repeat a default"


def _value(config, key):
    for name in key.split("."):
        config = getattr(config, name)
    return config


def _get(raw, key):
    for name in key.split("."):
        raw = raw.get(name) if isinstance(raw, dict) else None
    return raw


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads", "context", "devices", "parameters"),
    [
        ("gpt_tiny", 4, 128, 4, 128, 4, 858_880),
        ("bert_tiny", 2, 128, 4, 64, 2, 694_786),
        ("bert_55m", 12, 512, 8, 512, 4, 54_313_858),
        ("bert_base", 12, 768, 12, 512, 8, 110_106_428 + 70 * 769),
        ("bert_large", 24, 1024, 16, 512, 8, 336_226_108 + 70 * 1025),
        ("gpt2_124m", 12, 768, 12, 1024, 8, 124_439_808 + 47 * 768),
        ("gpt3_1.3b", 24, 2048, 16, 2048, 8, 1_315_819_520),
        ("gpt3_175b", 96, 12288, 96, 2048, 1024, 174_604_836_864),
    ],
)
def test_published_sizes(name, layers, hidden, heads, context, devices, parameters):
    """Parameters with the vocabulary padded.

    GPT-2 small is published with 50,257 tokens, here they are 50,304.

    BERT is published with 30,522, here they are 30,592.
    """
    config = load_config(CONFIGS / f"{name}.yaml")
    m = config.model
    found = (m.num_layers, m.hidden_size, m.num_attention_heads, m.encoder_seq_length, config.num_devices)
    assert found == (layers, hidden, heads, context, devices)
    abstract = functions(model_config(config, m.vocab_size or (2048 if m.type == "bert" else 257))).abstract
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract)) == parameters
