"""Weights that are there already: every bit reaches the masters on any layout, and the commands around them."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from jzero import make_mesh, to_optax
from jzero.cli import main
from jzero.data import IndexedDataset
from jzero.data.gpt import GPTDataset
from jzero.errors import JzeroError
from jzero.models import GPT, GPTConfig, functions, hf
from jzero.train.config import load_config
from jzero.train.evaluate import evaluate
from jzero.train.metrics import read_metrics
from jzero.train.step import build_program
from jzero.train.weights import initial_values

pytest.importorskip("safetensors")
V, T = 257, 16
ARCHITECTURE = GPTConfig(
    vocab_size=V, num_layers=4, hidden_size=24, num_attention_heads=4, num_query_groups=2, max_position_embeddings=T,
    normalization="rmsnorm", activation="swiglu", position_embedding_type="rope", bias=True, ffn_hidden_size=36,
    hidden_dropout=0.0, attention_dropout=0.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama-style model of Hugging Face's, with float32 weights that bfloat16 would round."""
    rng, path = np.random.default_rng(5), tmp_path_factory.mktemp("hf") / "model"
    draw = lambda x: rng.normal(size=x.shape).astype(np.float32) * 0.1
    hf.save(path, ARCHITECTURE, jax.tree.map(draw, functions(ARCHITECTURE).abstract))
    return path


def program(folder, *keys):
    config = load_config(
        None,
        [
            "model.encoder_seq_length=16", "model.num_layers=4", "model.hidden_size=24", "model.num_attention_heads=4",
            "model.num_query_groups=2", "model.normalization=rmsnorm", "model.activation=swiglu",
            "model.position_embedding_type=rope", "model.ffn_hidden_size=36", f"model.vocab_size={V}",
            "model.global_batch_size=8", "model.micro_batch_size=1", f"model.restore_from_path={folder}", *keys,
        ],
    )  # fmt: skip
    return build_program(config, make_mesh(**config.mesh_shape, devices=jax.devices()[: config.num_devices]))


@pytest.mark.parametrize(
    "keys",
    [
        ["trainer.devices=8", "model.optim.policy=gather_twice"],
        ["trainer.devices=8", "model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2",
         "model.virtual_pipeline_model_parallel_size=2"],
        ["trainer.devices=2", "model.optim.name=fused_adam", "model.optim.master=fp32"],
    ],
    ids=["gather_twice", "chunks", "without_zero"],
)  # fmt: skip
def test_every_bit_reaches_the_masters(folder, keys):
    """bfloat16 parameters, on layouts that flatten leaves, cut them and put layers into chunks."""
    prog = program(folder, *keys)
    state = prog.start(initial_values(prog.config, prog, V, print))
    described = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
    assert described(state) == described(prog.abstract)
    masters, inner = to_optax(prog.layout.tx, state.opt, state.params)
    padded = dataclasses.replace(ARCHITECTURE, vocab_size=384, vocab_padding=384 - V)
    for (path, expected), master in zip(
        jax.tree_util.tree_leaves_with_path(hf.load(folder, padded)), jax.tree.leaves(masters), strict=True
    ):
        layers = expected.shape[0] if path[0].key == "blocks" else 1
        found = master.reshape(layers, -1)[:, : expected.size // layers]  # without what pads a flattened leaf
        np.testing.assert_array_equal(found.ravel(), np.asarray(expected).ravel(), str(path))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(inner) if np.ndim(x))


@pytest.fixture(scope="module")
def data(tmp_path_factory, text_file):
    prefix = tmp_path_factory.mktemp("data") / "text"
    assert main(["data", "build", "--input", str(text_file), "--tokenizer", "bytes", "--output", str(prefix)]) == 0
    return prefix


def test_evaluation_is_the_mean_over_every_token(folder, data):
    """Against the module and NumPy; neither devices nor batches change it."""
    found = evaluate(folder, data=str(data), note=print)
    dataset = GPTDataset(IndexedDataset(data), seq_length=T, seed=1234, vocab_size=V)
    samples = [dataset.once(k) for k in range(len(dataset))]
    batch = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    logits = np.asarray(GPT(ARCHITECTURE, params=hf.load(folder))(batch["tokens"]), np.float64)
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    own = np.take_along_axis(chances, batch["labels"][..., None], -1)[..., 0] / chances.sum(-1)
    assert found["tokens"] == batch["loss_mask"].sum() == len(IndexedDataset(data).tokens) - 1
    assert found["loss"] == pytest.approx(-(np.log(own) * batch["loss_mask"]).sum() / found["tokens"], rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    again = evaluate(folder, ["trainer.devices=4", "model.global_batch_size=12"], data=str(data), note=print)
    assert again["loss"] == pytest.approx(found["loss"], rel=1e-6)


@pytest.mark.slow
def test_there_and_back_by_the_commands(folder, data, tmp_path, capsys):
    """convert, train from it, evaluate, convert back; another run starts from that one."""
    keys = [
        "trainer.max_steps=1", "trainer.precision=32", "model.micro_batch_size=1", f"model.data.data_prefix={data}",
        "model.optim.lr=0", "model.optim.sched.min_lr=0", f"exp_manager.exp_dir={tmp_path}/runs",
        "model.data.splits_string=1", "trainer.limit_val_batches=0",
    ]  # fmt: skip
    assert main(["convert", str(folder), str(tmp_path / "llama.yaml")]) == 0
    assert main(["train", str(tmp_path / "llama.yaml"), *keys]) == 0
    assert f"starting from the weights of {folder}" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "runs" / "llama"), str(tmp_path / "back")]) == 0
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "back"), hf.load(folder))
    again = [*keys, f"model.restore_from_path={tmp_path}/runs/llama", "exp_manager.name=again", "trainer.devices=2"]
    assert main(["train", str(tmp_path / "llama.yaml"), *again]) == 0
    losses = [read_metrics(tmp_path / "runs" / name / "metrics.jsonl")[0]["loss"] for name in ("llama", "again")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "runs" / "llama"), "--data", str(data), "--json"]) == 0
    expected = evaluate(folder, data=str(data), note=print)["loss"]
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["convert", "{hf}", "{new}"], "{new}: expected the name of a configuration, found no .yaml"),
        (["convert", "{hf}", "{old}.yaml"], "{old}.yaml: expected no such file, found one"),
        (
            ["convert", "no-run", "{new}"],
            "no-run: expected the folder of a run or of Hugging Face's, or a configuration",
        ),
        (["eval", "{hf}"], "{hf}: expected an indexed file to evaluate on, found none"),
        (["eval", "{hf}", "--data", "x", "--split", "all"], "--split: expected train, validation, test, found all"),
        (["eval", "{hf}", "--data", "{new}"], "{new}.idx: expected a readable file"),
        (["eval", "{old}.yaml"], "{old}.yaml: expected a run in"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(folder, tmp_path, capsys, arguments, line):
    (tmp_path / "old.yaml").write_text(
        "exp_manager: {exp_dir: no-such-folder}\nmodel: {num_layers: 2, hidden_size: 48}\n"
    )
    names = {"hf": folder, "new": tmp_path / "new", "old": tmp_path / "old"}
    assert main([argument.format(**names) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jzero: " + line.format(**names))
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["old.yaml"]


def test_weights_of_another_model_are_refused(folder):
    prog = program(folder, "model.num_layers=3")
    with pytest.raises(JzeroError, match=r"16 not of this model \(model\.layers\.3\..*`jzero convert` writes"):
        initial_values(prog.config, prog, V, print)
    prog = program(folder / "nowhere")
    with pytest.raises(JzeroError, match=r"model\.restore_from_path: expected a folder with config\.json"):
        initial_values(prog.config, prog, V, print)
