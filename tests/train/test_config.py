"""Reading, overriding, refusing, deriving and writing a configuration."""

import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from jzero.errors import JzeroError
from jzero.train.config import Config, Data, Model, Optim, Sched, Trainer, load_config, to_yaml
from jzero.train.config_check import validate
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
        ("trainer.devices=0", "trainer.devices: expected at least 1, or -1 for all there are, found 0"),
        ("trainer.devices=-2", "trainer.devices: expected at least 1, or -1 for all there are, found -2"),
        ("model.activation=relu", "model.activation: expected one of gelu, swiglu, found relu"),
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
        ("model.fp8", "FP8 is not available in this version"),
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
        for named in re.findall(r"\b(?:trainer|model|exp_manager)\.[a-z_.]*[a-z_]", text):
            assert [k for k in known if k == named or k.startswith(named + ".")], named


def test_defaults_satisfy_their_own_limits():
    assert load_config(None, []) == Config()


# Derived values and rules between keys


def test_derived_values():
    config = load_config(
        None,
        ["trainer.devices=4", "trainer.num_nodes=4", "model.replica_parallel_size=2", "model.global_batch_size=128"],
    )
    assert config.mesh_shape == {"pipeline": 1, "replica": 2, "data": 8, "tensor": 1}
    assert list(config.mesh_shape) == ["pipeline", "replica", "data", "tensor"]
    assert (config.num_devices, config.data_parallel_size, config.batch_parallel_size) == (16, 8, 16)
    assert config.num_micro_batches == 2
    assert (config.policy, config.zero, config.master) == ("replicated", True, "fp32")
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
    assert [config.padded_vocab_size(v) for v in (1, 512, 513, 50257)] == [512, 512, 1024, 50688]


@pytest.mark.parametrize(
    ("overrides", "policy", "dtype", "master"),
    [
        ([], "replicated", jnp.bfloat16, "fp32"),
        (["model.optim.overlap_param_sync=true"], "gather_on_forward", jnp.bfloat16, "fp32"),
        (["model.optim.policy=gather_twice", "trainer.precision=32"], "gather_twice", jnp.float32, "none"),
        (
            ["model.optim.policy=gather_twice", "model.optim.overlap_param_sync=true", "model.optim.master=none"],
            "gather_twice",
            jnp.bfloat16,
            "none",
        ),
        (["model.optim.policy=gather_on_forward"], "gather_on_forward", jnp.bfloat16, "fp32"),
    ],
)
def test_policy_dtype_master(overrides, policy, dtype, master):
    config = validate(load_config(None, overrides), 1)
    assert (config.policy, config.param_dtype, config.master) == (policy, dtype, master)


def test_sync_dtypes():
    config = load_config(None, ["model.optim.grad_sync_dtype=bf16", "model.optim.param_sync_dtype=fp32"])
    assert (config.grad_sync_dtype, config.param_sync_dtype) == (jnp.bfloat16, jnp.float32)


def test_validate_resolves_all_devices():
    config = load_config(None, ["trainer.devices=-1", "trainer.num_nodes=2", "model.global_batch_size=32"])
    with pytest.raises(JzeroError, match=r"trainer\.devices: expected a number of devices, found -1"):
        _ = config.num_devices
    resolved = validate(config, 8)
    assert (resolved.trainer.devices, resolved.data_parallel_size) == (4, 8)
    assert validate(resolved, 8) == resolved
    assert validate(resolved) == resolved


def test_fewer_devices_than_there_are_is_fine_on_one_node():
    assert validate(load_config(None, ["trainer.devices=2"]), 8).num_devices == 2


@pytest.mark.parametrize(
    ("overrides", "n_devices", "message"),
    [
        (
            ["trainer.devices=4", "model.global_batch_size=24"],
            4,
            "model.global_batch_size: 24 is not divisible by model.micro_batch_size 4 × data-parallel size 4 = 16; "
            "nearest valid: 16 or 32",
        ),
        (["trainer.devices=4"], 4, "4 × data-parallel size 4 = 16; nearest valid: 16"),
        (
            ["trainer.devices=4", "model.replica_parallel_size=2"],
            4,
            "model.micro_batch_size 4 × data-parallel size 4 = 16; nearest valid: 16",
        ),
        (
            ["trainer.devices=6", "model.replica_parallel_size=4"],
            6,
            "trainer.devices × trainer.num_nodes = 6 is not divisible by model.tensor_model_parallel_size 1 × "
            "model.pipeline_model_parallel_size 1 × model.replica_parallel_size 4 = 4; nearest valid: 4 or 8 devices",
        ),
        (["trainer.devices=4"], 2, "trainer.devices: 4 × trainer.num_nodes 1 = 4 devices, but there are 2"),
        (["trainer.num_nodes=2"], 4, "trainer.devices: 1 × trainer.num_nodes 2 = 2 devices, but there are 4"),
        (
            ["trainer.devices=-1", "trainer.num_nodes=3"],
            8,
            "trainer.num_nodes: 8 devices cannot be split evenly over 3",
        ),
        (["trainer.devices=-1"], None, "trainer.devices: -1 stands for all devices, but none are known here"),
        (
            ["model.tensor_model_parallel_size=2"],
            8,
            "model.tensor_model_parallel_size: 2 is not supported by this version; set it to 1",
        ),
        (["model.pipeline_model_parallel_size=2"], 8, "model.pipeline_model_parallel_size: 2 is not supported"),
        (["model.virtual_pipeline_model_parallel_size=2"], 8, "2 is not supported by this version; set it to null"),
        (["model.sequence_parallel=true"], 8, "model.sequence_parallel: true is not supported by this version"),
        (
            ["model.hidden_size=770"],
            1,
            "model.hidden_size: 770 is not divisible by model.num_attention_heads 12; nearest valid: 768 or 780",
        ),
        (["model.num_query_groups=5"], 1, "model.num_query_groups: 5 does not divide model.num_attention_heads 12"),
        (["model.num_query_groups=24"], 1, "model.num_query_groups: 24 does not divide"),
        (
            ["model.max_position_embeddings=100"],
            1,
            "model.max_position_embeddings: 100 is below model.encoder_seq_length 512",
        ),
        (
            ["model.position_embedding_type=rope", "model.rotary_percentage=0.3"],
            1,
            "model.rotary_percentage: 0.3 of 64 channels per head is 19",
        ),
        (["model.position_embedding_type=rope", "model.kv_channels=9"], 1, "1 of 9 channels per head is 9"),
        (["model.megatron_amp_O2=false"], 1, "model.megatron_amp_O2: trainer.precision bf16 keeps the weights in bf16"),
        (
            ["model.attention_implementation=cudnn", "trainer.precision=32"],
            1,
            "model.attention_implementation: cudnn computes in 16 bits only",
        ),
        (
            ["model.attention_implementation=cudnn"],
            1,
            "cudnn has no dropout, found model.attention_dropout 0.1",
        ),
        (
            ["model.optim.master=fp32", "trainer.precision=32"],
            1,
            "model.optim.master: fp32 parameters (trainer.precision 32) are their own master",
        ),
        (["model.optim.overlap_grad_sync=false"], 1, "model.optim.overlap_grad_sync: gradients are always reduced"),
        (
            ["model.optim.overlap_param_sync=true", "model.optim.policy=replicated"],
            1,
            "model.optim.policy: replicated contradicts model.optim.overlap_param_sync true",
        ),
        (
            ["model.optim.name=fused_adam", "model.optim.policy=gather_twice"],
            1,
            "model.optim.policy: gather_twice needs the sharded state of model.optim.name=distributed_fused_adam",
        ),
        (
            ["model.optim.name=fused_adam", "model.optim.overlap_param_sync=true"],
            1,
            "model.optim.overlap_param_sync: true needs the sharded state",
        ),
        (
            ["model.optim.name=fused_adam", "model.optim.param_sync_dtype=bf16"],
            1,
            "model.optim.param_sync_dtype: bf16 needs the sharded state",
        ),
        (
            ["model.optim.name=fused_adam", "model.grad_accumulation=sharded"],
            1,
            "model.grad_accumulation: sharded needs the sharded state",
        ),
        (["model.optim.lr=1e-6"], 1, "model.optim.lr: 1e-06 is below model.optim.sched.min_lr 2e-05"),
        (["model.tokenizer.library=tokenizers"], 1, "model.tokenizer.model: the library tokenizers needs the path"),
        (["model.tokenizer.model=t.json"], 1, "model.tokenizer.model: the library bytes reads no file, found t.json"),
        (
            ["model.tokenizer.library=tokenizers", "model.tokenizer.model=t.json"],
            1,
            "model.data.data_prefix: stdlib holds byte tokens, found model.tokenizer.library tokenizers",
        ),
        (
            ["model.tokenizer={library: tokenizers, model: t.json}", "model.data.data_prefix=[1, a, 2, stdlib]"],
            1,
            "model.data.data_prefix: stdlib holds byte tokens, found model.tokenizer.library tokenizers",
        ),
    ],
)
def test_rules_between_keys(overrides, n_devices, message):
    config = load_config(None, overrides)
    with pytest.raises(JzeroError) as error:
        validate(config, n_devices)
    assert message in one_line(error)


def test_the_default_configuration_is_valid_without_zero_too():
    assert validate(load_config(None, ["model.optim.name=fused_adam"]), 1).zero is False


# The reference page


def test_reference_page_is_up_to_date():
    command = [sys.executable, "-m", "jzero.train.config"]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    page = (REPOSITORY / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == printed, "run: python -m jzero.train.config > docs/config.md"
    for key, field in keys(Config):
        assert f"| `{key}` | " in page
        assert field.metadata["option"].meaning in page
