"""Reading, overriding, refusing, deriving and writing a configuration."""

import re
from pathlib import Path

import pytest

from jzero.errors import JzeroError
from jzero.train.config import Config, Data, Model, Optim, Sched, Trainer, load_config, to_yaml
from jzero.train.nemo_keys import HINTS
from jzero.train.options import keys

REPOSITORY = Path(__file__).parents[2]


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def load_text(tmp_path, text, overrides=()):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides)


# Loading


def test_defaults_are_nemo_s():
    config = load_config(None)
    assert config == Config()
    assert (config.model.global_batch_size, config.model.encoder_seq_length, config.model.seed) == (8, 512, 1234)
    assert config.model.optim == Optim(lr=2e-4, weight_decay=0.01, betas=(0.9, 0.98))
    assert config.model.optim.sched == Sched("CosineAnnealing", 500, 0, 2e-5, None)
    assert (config.trainer.max_steps, config.trainer.gradient_clip_val) == (100_000, 1.0)


def test_file_then_overrides_later_ones_win(tmp_path):
    text = "trainer: {devices: 2, max_steps: 5}\nmodel:\n  optim:\n    lr: 1e-3\n"
    config = load_text(tmp_path, text, ["trainer.devices=4", "trainer.devices=8", "model.optim.betas=[.9,.95]"])
    assert config.trainer == Trainer(devices=8, max_steps=5)
    assert config.model.optim == Optim(lr=1e-3, betas=(0.9, 0.95))


@pytest.mark.parametrize(
    ("override", "get", "wanted"),
    [
        ("model.optim.lr=3", lambda c: c.model.optim.lr, 3.0),
        ("model.optim.lr=3e-4", lambda c: c.model.optim.lr, 3e-4),
        ("trainer.precision=32", lambda c: c.trainer.precision, 32),
        ("trainer.gradient_clip_val=null", lambda c: c.trainer.gradient_clip_val, None),
        ("model.sequence_parallel=True", lambda c: c.model.sequence_parallel, True),
        ("model.data.data_prefix=[0.7,a,0.3,b]", lambda c: c.model.data.data_prefix, (0.7, "a", 0.3, "b")),
        ("model.data.data_prefix=[2,a,1,b]", lambda c: c.model.data.data_prefix, (2.0, "a", 1.0, "b")),
        ("model.data.data_prefix=[a,b]", lambda c: c.model.data.data_prefix, ("a", "b")),
        ("model.data.data_prefix=/d/x=y", lambda c: c.model.data.data_prefix, "/d/x=y"),
        ("model.data.splits_string=1", lambda c: c.model.data.splits_string, "1"),
        ("model.data.splits_string=900,50,50", lambda c: c.model.data.splits_string, "900,50,50"),
        ("model.data.cache_dir=null", lambda c: c.model.data.cache_dir, None),
        ("exp_manager.name=7", lambda c: c.exp_manager.name, "7"),
        ("generate.prompt=def f(x): # null", lambda c: c.generate.prompt, "def f(x): # null"),
        ("generate.prompt=", lambda c: c.generate.prompt, ""),
        ("generate.prompt=null", lambda c: c.generate.prompt, "null"),
        ("model.max_position_embeddings=${.encoder_seq_length}", lambda c: c.model.max_position_embeddings, 512),
        ("model.optim.sched.max_steps=${trainer.max_steps}", lambda c: c.model.optim.sched.max_steps, 100_000),
        ("model={num_layers: 2, optim: {lr: 1.0}}", lambda c: (c.model.num_layers, c.model.optim.lr), (2, 1.0)),
    ],
)
def test_override_values(override, get, wanted):
    found = get(load_config(None, [override]))
    assert found == wanted
    assert type(found) is type(wanted)


def test_an_empty_file_is_all_defaults(tmp_path):
    assert load_text(tmp_path, "# nothing\n") == Config()


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(
            trainer=Trainer(precision=32, gradient_clip_val=None),
            model=Model(data=Data(data_prefix=(0.7, "a", 0.3, "b"))),
        ),
        Config(model=Model(optim=Optim(betas=(0.5, 0.25), lr=1.0, eps=1e-12, policy="gather_twice"))),
        load_config(None, ["generate.prompt= a: 'b'\n\t# c", "exp_manager.name=1e3", "model.data.cache_dir=true"]),
    ],
)
def test_yaml_round_trip(tmp_path, config):
    assert load_text(tmp_path, to_yaml(config)) == config
    assert hash(config) == hash(load_text(tmp_path, to_yaml(config)))


def test_interpolations_are_saved_resolved():
    config = load_config(None, ["model.max_position_embeddings=${model.encoder_seq_length}"])
    assert "max_position_embeddings: 512" in to_yaml(config)


# Mistakes in a file or an override


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_layer=3", "unknown key model.num_layer; did you mean model.num_layers?"),
        ("model.lr=3", "unknown key model.lr; did you mean model.optim.lr?"),
        ("modle.num_layers=3", "unknown key modle.num_layers; did you mean model.num_layers?"),
        ("trainer.zzz=3", "unknown key trainer.zzz; trainer has devices, num_nodes, precision"),
        ("zzz=3", "unknown key zzz; the top level has trainer, exp_manager, model, generate"),
        ("model.num_layers=twelve", "model.num_layers: expected an integer, at least 1, found twelve (text)"),
        ("model.num_layers='3'", "model.num_layers: expected an integer, at least 1, found 3 (text)"),
        ("model.num_layers=3.5", "model.num_layers: expected an integer, at least 1, found 3.5 (a number)"),
        ("trainer.max_steps=1e5", "expected an integer, at least 1, found 100000.0 (a number); write 100000"),
        ("model.num_layers=true", "model.num_layers: expected an integer, at least 1, found true (a boolean)"),
        ("model.num_layers=", "model.num_layers: expected an integer, at least 1, found null"),
        ("model.num_layers=0", "model.num_layers: expected an integer, at least 1, found 0"),
        ("model.num_layers=[1]", "model.num_layers: expected an integer, at least 1, found [1] (a list)"),
        ("model.num_layers.x=1", "model.num_layers: expected an integer, at least 1, found {'x': 1} (a mapping)"),
        ("model.bias=1", "model.bias: expected true or false, found 1 (an integer)"),
        ("model.bias=3", "model.bias: expected true or false, found 3 (an integer)"),
        ("model.optim.lr=fast", "model.optim.lr: expected a number, at least 0, found fast (text)"),
        ("model.optim.lr=.nan", "model.optim.lr: expected a number, at least 0, found nan"),
        ("model.optim.lr=.inf", "model.optim.lr: expected a number, at least 0, found inf"),
        (f"model.optim.lr={10**400}", "model.optim.lr: expected a number, at least 0, found 1000"),
        ("model.optim.lr=-1", "model.optim.lr: expected a number, at least 0, found -1"),
        ("model.optim.eps=0", "model.optim.eps: expected a number, above 0, found 0"),
        ("model.hidden_dropout=1", "model.hidden_dropout: expected a number, at least 0, below 1, found 1"),
        ("model.rotary_percentage=1.5", "expected a number, above 0, at most 1, found 1.5"),
        ("model.optim.betas=[.9]", "model.optim.betas: expected a list of 2 numbers, at least 0, below 1, found [0.9]"),
        ("model.optim.betas=[.9,1.]", "expected a list of 2 numbers, at least 0, below 1, found [0.9, 1.0]"),
        ("model.optim.betas=.9", "expected a list of 2 numbers, at least 0, below 1, found 0.9 (a number)"),
        ("trainer.gradient_clip_val=-1", "expected a number or null, at least 0, found -1"),
        ("trainer.devices=0", "trainer.devices: expected 1 to 1024, or -1 for all there are, found 0"),
        ("trainer.devices=100000", "trainer.devices: expected 1 to 1024, or -1 for all there are, found 100000"),
        ("exp_manager.name=a\\b", r"exp_manager.name: expected some text without \, found a\b"),
        ("model.check_for_nan_in_grad=true", "use trainer.terminate_on_nan"),
        ("trainer.devices=-2", "trainer.devices: expected 1 to 1024, or -1 for all there are, found -2"),
        ("model.activation=relu", "model.activation: expected one of gelu, gelu_exact, swiglu, found relu"),
        ("model.optim.policy=zero3", "expected one of replicated, gather_on_forward, gather_twice, null, found zero3"),
        ("model.data.data_impl=lazy", "model.data.data_impl: expected mmap, found lazy"),
        ("trainer.precision=16", "expected one of bf16, 32, found 16 (fp16 with loss scaling is not available"),
        ("trainer.precision='32'", "trainer.precision: expected one of bf16, 32, found 32 (text)"),
        ("trainer.precision=3.5", "trainer.precision: expected one of bf16, 32, found 3.5 (a number)"),
        ("model.tokenizer.library=megatron", "found megatron (use model.tokenizer.library=tokenizers and"),
        ("model.data.data_prefix=[]", "model.data.data_prefix: expected stdlib, a path, a list of paths, or [weight"),
        ("model.data.data_prefix=[0.5,a,b]", "with weights above 0, found [0.5, a, b]"),
        ("model.data.data_prefix=[0.5,a,0,b]", "with weights above 0, found [0.5, a, 0, b]"),
        ("model.data.data_prefix=[a,0.5]", "with weights above 0, found [a, 0.5]"),
        ("model.data.data_prefix=3", "expected text or a list, found 3 (an integer)"),
        ("model.data.data_prefix=???", "expected text or a list, found ??? (a value that you must set)"),
        ("model.data.splits_string=900;50", 'expected up to three weights "train,validation,test" such as 900,50,50'),
        ("model.data.splits_string=1,1,1,1", "expected up to three weights"),
        ("model.data.splits_string=0,1,1", "the first above 0, found 0,1,1"),
        ("model.data.splits_string=1,-1,1", "the first above 0, found 1,-1,1"),
        ("exp_manager.name=", "exp_manager.name: expected some text, found ''"),
        ("model=3", "model: expected a mapping of keys, found 3 (an integer)"),
        ("trainer", "expected key=value such as trainer.devices=4"),
        ("=4", "expected key=value such as trainer.devices=4"),
        ("--devices=4", "expected key=value such as trainer.devices=4"),
        ("trainer..devices=4", "expected key=value such as trainer.devices=4"),
        ("model.optim.betas=[.9,", "not valid YAML"),
        ("model.seed=a: b", "not valid YAML"),
    ],
)
def test_override_mistakes_name_the_override(override, message):
    with pytest.raises(JzeroError) as error:
        load_config(None, [override])
    text = one_line(error)
    assert text.startswith(f"override {override}: ")
    assert message in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  num_layer: 3\n", "unknown key model.num_layer; did you mean model.num_layers?"),
        ("model:\n  optim:\n    lr: abc\n", "model.optim.lr: expected a number, at least 0, found abc (text)"),
        ("model.optim.lr: 3\n", "unknown key model.optim.lr: nest the sections in a file"),
        ("1: 2\n", "unknown key 1"),
        ("model:\n", "model: expected a mapping of keys, found null"),
        ("a: [1,2\n", "line 2: not valid YAML: "),
        ("model:\n\tseed: 1\n", "line 2: not valid YAML: found character "),
        ("model:\n  seed: 1\n  seed: 2\n", "line 3: not valid YAML: found duplicate key seed"),
        ("- trainer\n- model\n", "expected a mapping of keys such as trainer: and model:, found a list"),
        ("3\n", "expected a mapping of keys such as trainer: and model:, found one value"),
        ("model: {seed: '${nowhere}'}\n", "model.seed: cannot resolve the interpolation: Interpolation key 'nowhere'"),
        (
            "model: {seed: '${mul:2}'}\n",
            "model.seed: cannot resolve the interpolation: Unsupported interpolation type mul",
        ),
        (
            "model: {seed: '${.optim.lr}'}\n",
            "model.seed: expected an integer, at least 0, at most 2147483647, found 0.0002",
        ),
        ("model: {seed: '${seed'}\n", "model.seed: not a valid interpolation"),
        ("model: {seed: '${.seed}'}\n", "model.seed: cannot resolve the interpolation"),
    ],
)
def test_file_mistakes_name_the_file(tmp_path, text, message):
    with pytest.raises(JzeroError) as error:
        load_text(tmp_path, text)
    found = one_line(error)
    assert found.startswith(f"{tmp_path / 'run.yaml'}: ")
    assert message in found


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(JzeroError, match=r"none\.yaml: no such file; give the path of a YAML configuration") as error:
        load_config(tmp_path / "none.yaml")
    one_line(error)
    with pytest.raises(JzeroError, match="cannot be read: Is a directory"):
        load_config(tmp_path)
    (tmp_path / "binary").write_bytes(b"model: \xff\xfe")
    with pytest.raises(JzeroError, match="expected a YAML file in UTF-8, found byte 0xff at 7"):
        load_config(tmp_path / "binary")
    with pytest.raises(JzeroError, match="cannot be read: Not a directory"):
        load_config(tmp_path / "binary" / "run.yaml")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model.optim.contiguous_grad_buffer", "XLA plans the buffers"),
        ("model.optim.nccl_ub", "CUDA"),
        ("model.optim.pipeline_size", "XLA schedules"),
        ("model.rampup_batch_size", "not available in this version; model.global_batch_size is constant"),
        ("model.fp8_wgrad", "all three products of a layer are in FP8"),
        ("model.data.seq_length", "use model.encoder_seq_length"),
        ("model.nsys_profile.enabled", "profiler"),
        ("exp_manager.checkpoint_callback_params.monitor", "use exp_manager.checkpoint"),
        ("trainer.accelerator", "no PyTorch Lightning"),
    ],
)
def test_nemo_s_other_keys_say_why(key, message):
    with pytest.raises(JzeroError) as error:
        load_config(None, [f"{key}=1"])
    assert f"{key}: " in one_line(error)
    assert message in one_line(error)


def test_hints_are_for_keys_that_do_not_exist_and_values_that_are_refused():
    known = dict(keys(Config))
    for hint in HINTS:
        key, equals, value = hint.partition("=")
        if equals:
            assert value not in map(str, known[key].metadata["option"].choices)
        else:
            assert not [k for k in known if k == key or k.startswith(key + ".")]


def test_hints_name_only_keys_that_exist():
    known = [key for key, _ in keys(Config)]
    for text in set(HINTS.values()):
        for named in re.findall(r"\b(?:trainer|model|exp_manager)\.[a-z_.0-9]*[a-z_0-9]", text):
            assert [k for k in known if k == named or k.startswith(named + ".")], named


def test_defaults_satisfy_their_own_limits():
    assert load_config(None, []) == Config()
