"""The command line with a real, very small model: what it does, and that a mistake is one line and leaves nothing."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jzero.cli import main
from jzero.data.indexed import IndexedDataset
from jzero.data.writer import IndexedWriter
from jzero.train.config import load_config, to_yaml
from jzero.train.metrics import read_metrics

ROOT = Path(__file__).parent.parent
CONFIG = """
trainer: {devices: 2, precision: 32, max_steps: 3, val_check_interval: 2, limit_val_batches: 1}
model:
  {global_batch_size: 4, micro_batch_size: 2, encoder_seq_length: 16, num_layers: 2, hidden_size: 32,
   num_attention_heads: 4, optim: {sched: {warmup_steps: 1}}}
generate: {tokens: 8}
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, text_file):
    """A folder with config.yaml and text.bin/.idx, which every run reads."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "config.yaml").write_text(f"{CONFIG}\nexp_manager: {{exp_dir: {folder}/runs}}\n")
    built = ["--input", str(text_file), "--tokenizer", "bytes", "--output", str(folder / "text")]
    assert main(["data", "build", *built]) == 0
    return folder


@pytest.fixture(scope="module")
def trained(inputs):
    """The folder of a finished run."""
    assert main(["train", str(inputs / "config.yaml"), f"model.data.data_prefix={inputs}/text"]) == 0
    return inputs / "runs" / "gpt"


@pytest.fixture
def refused(inputs, tmp_path, capsys):
    """Calls `jzero train` in a new folder; checks that the answer is one line, code 2, and nothing is left behind."""

    def call(*overrides: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        keys = [f"model.data.data_prefix={inputs}/text", f"exp_manager.exp_dir={tmp_path}/runs", *overrides]
        assert main(["train", str(inputs / "config.yaml"), *keys]) == 2
        error = capsys.readouterr().err
        assert error.startswith("jzero: ")
        assert error.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
        return error

    return call


def test_the_version_starts_without_the_libraries_of_training():
    code = "import sys, jzero.cli\ntry: jzero.cli.main(['--version'])\nfinally: print('orbax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines() == ["jzero 0.1.0", "False"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "jzero: the following arguments are required: COMMAND; see jzero --help"),
        (["train"], "jzero: the following arguments are required: CONFIG; see jzero train --help"),
        (["train", "c.yaml", "--lr", "1"], "jzero: unrecognized arguments: --lr 1; see jzero train --help"),
        (
            ["generate", "run", "--prompt", "x", "--tokens", "many"],
            "jzero: argument --tokens: invalid int value: 'many'",
        ),
        (
            ["data", "tokenizer", "--input", "a", "--output", "b", "--vocab-size", "9", "--kind", "x"],
            "jzero: argument --kind: invalid choice: 'x'",
        ),
        (["trian"], "jzero: argument COMMAND: invalid choice: 'trian'"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line(capsys, arguments, line):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, error = capsys.readouterr()
    assert (end.value.code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith(line)


@pytest.fixture
def command(inputs):
    """Starts `jzero train` in a process of its own."""

    def start(*overrides: str, **env: str) -> subprocess.Popen:
        arguments = [str(inputs / "config.yaml"), f"model.data.data_prefix={inputs}/text", *overrides]
        return subprocess.Popen(
            [sys.executable, "-m", "jzero", "train", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        )

    return start


def test_a_platform_that_is_not_there(command, tmp_path):
    out, error = command(f"exp_manager.exp_dir={tmp_path}/runs", JAX_PLATFORMS="nonsense").communicate(timeout=60)
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith(
        "jzero: JAX_PLATFORMS: expected a platform that JAX finds on this machine, found nonsense ("
    )
    assert list(tmp_path.iterdir()) == []


def test_nobody_reads_the_output(command, tmp_path):
    """As with `jzero train ... | head -1`: no traceback, and what there is can be continued."""
    process = command(f"exp_manager.exp_dir={tmp_path}", "trainer.max_steps=500", "trainer.log_every_n_steps=1")
    process.stdout.readline()
    process.stdout.close()
    with process.stderr as error:
        assert error.read() == ""
    assert process.wait(timeout=60) == 141


def test_sigterm_before_the_first_step_leaves_nothing(command, tmp_path):
    process = command(f"exp_manager.exp_dir={tmp_path}/runs")
    assert "no accelerator" in process.stdout.readline()
    process.terminate()
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (143, "jzero: ended by SIGTERM with nothing to save\n")
    assert list(tmp_path.iterdir()) == []


def test_data_build_writes_what_the_trainer_reads(inputs, text_file):
    file = IndexedDataset(inputs / "text")
    texts = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    assert bytes(file.get(0).astype(np.uint8)[:-1]).decode() == texts[0]
    assert len(file.documents) - 1 == len(texts)


def test_a_bert_from_text_to_filled_gaps(inputs, text_file, tmp_path, capsys):
    """A tokenizer of one's own, a file of sentences, a run that is evaluated, and what it puts into a gap."""
    vocabulary, data = tmp_path / "words.json", tmp_path / "sentences"
    made = ["--input", str(text_file), "--vocab-size", "200", "--kind", "wordpiece", "--output", str(vocabulary)]
    (tmp_path / "lines.txt").write_text("".join(f"{i} {i + 1} {i + 2}\n" * 4 for i in range(300)))
    lines = [str(tmp_path / "lines.txt")] * 12
    assert main(["data", "tokenizer", *made]) == 0
    built = ["--tokenizer", str(vocabulary), "--split-sentences", "--output", str(data)]
    assert main(["data", "build", "--input", *lines, *built]) == 0
    assert len(IndexedDataset(data)) == 12 * 1200
    keys = [
        "model.type=bert", f"model.tokenizer={{library: tokenizers, model: {vocabulary}}}",
        f"model.data.data_prefix={data}", f"exp_manager.exp_dir={tmp_path}/runs", "model.data.splits_string=80,20",
        "generate.prompt=1 [MASK] 3",
    ]  # fmt: skip
    assert main(["train", str(inputs / "config.yaml"), *keys]) == 0
    evaluations = [r for r in read_metrics(tmp_path / "runs" / "gpt" / "metrics.jsonl") if "val_loss" in r]
    last = evaluations[-1]
    assert set(last) == {"step", "val_loss", *(f"val_{n}_{m}" for n in ("lm", "nsp") for m in ("loss", "accuracy"))}
    assert last["val_loss"] == pytest.approx(last["val_lm_loss"] + last["val_nsp_loss"])
    assert "val_lm_accuracy" in capsys.readouterr().out
    assert main(["generate", str(tmp_path / "runs" / "gpt"), "--prompt", "1 [MASK] 3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 ")
    assert out.endswith(" 3\n")
    for prompt, message in (("1 2", "expected a text with [MASK]"), ("[MASK] " * 15, "at most 14 tokens")):
        assert main(["generate", str(tmp_path / "runs" / "gpt"), "--prompt", prompt]) == 2
        assert message in capsys.readouterr().err


def test_generate_continues_the_prompt_with_the_best_checkpoint(trained, capsys):
    options = ["--prompt", "12 34 ", "--tokens", "12", "--top-k", "3"]
    texts = []
    for more in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], ["--seed", "1", "--checkpoint", "last"]):
        assert main(["generate", str(trained), *options, *more]) == 0
        texts.append(capsys.readouterr().out)
    assert all(text.startswith("12 34 ") for text in texts)
    assert texts[0] == texts[1] == texts[3] != texts[2]


def test_generate_does_without_the_kernel_that_the_run_had(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / "run")
    config = load_config(trained / "config.yaml")
    model = dataclasses.replace(config.model, attention_implementation="cudnn", attention_dropout=0.0)
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(dataclasses.replace(config, model=model)))
    assert main(["generate", str(tmp_path / "run"), "--prompt", "12", "--tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("12")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-run"], "no-such-run: expected the folder of a run or of Hugging Face's, or a configuration"),
        (["RUN", "--checkpoint", "7"], "expected a readable checkpoint '7', found only steps [3]"),
        (["RUN", "--temperature", "-1"], "temperature: expected at least 0, found -1.0"),
        (["RUN", "--temperature", "nan"], "temperature: expected a number in 0..2147483647, found nan"),
        (["RUN", "--seed", "99999999999999999999"], "seed: expected a number in 0..2147483647, found 9999"),
    ],
)
def test_generate_refuses(trained, capsys, arguments, message):
    arguments = [str(trained) if a == "RUN" else a for a in arguments]
    assert main(["generate", *arguments, "--prompt", "x"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.hiden_size=64", "model.hidden_size"),
        ("model.num_layers=two", "model.num_layers"),
        (
            "trainer.devices=64 model.global_batch_size=128",
            "trainer.devices: 64 × trainer.num_nodes 1 = 64 devices, but there are 8",
        ),
        ("model.replica_parallel_size=3", "model.replica_parallel_size 3"),
        ("model.global_batch_size=5", "model.global_batch_size: 5 is not divisible"),
        ("model.hidden_size=30", "model.num_attention_heads"),
        ("model.data.data_prefix=/no/such/file", "/no/such/file"),
        ("exp_manager.exp_dir=/dev/null/runs", "run folder /dev/null/runs/gpt: expected room and permission to write"),
        ("model.vocab_size=50", "vocab"),
        (
            "exp_manager.exp_dir=/proc/no",
            "run folder /proc/no/gpt: expected to make it, found No such file or directory",
        ),
        ("model.hidden_size=1048576", "memory: expected room for the run, found none for another 32,768.00 GiB"),
    ],
)
def test_a_mistake_in_the_configuration(refused, override, message):
    assert message in refused(*override.split())


@pytest.mark.parametrize("how", ["missing", "truncated", "corrupt"])
def test_an_index_that_cannot_be_read(refused, inputs, tmp_path, how):
    for end in (".bin", ".idx"):
        shutil.copy(f"{inputs}/text{end}", tmp_path / f"bad{end}")
    index = tmp_path / "bad.idx"
    data = index.read_bytes()
    if how == "missing":
        index.unlink()
    else:
        index.write_bytes(data[:100] if how == "truncated" else b"something" + data[9:])
    assert f"{tmp_path}/bad.idx" in refused(f"model.data.data_prefix={tmp_path}/bad")


def test_a_token_that_the_vocabulary_has_not(refused, tmp_path):
    with IndexedWriter(tmp_path / "foreign", "int32") as writer:
        for _ in range(40):
            writer.add([*range(8), 257])
    message = f"{tmp_path}/foreign.bin: expected tokens in 0..256 (a vocabulary of 257), found 257 at position "
    assert message in refused(f"model.data.data_prefix={tmp_path}/foreign")


def test_a_run_folder_that_is_a_regular_file(refused, tmp_path):
    (tmp_path / "runs").write_text("")
    assert f"run folder {tmp_path}/runs/gpt: expected room and permission to write, found" in refused()


def test_a_checkpoint_of_another_model_stays_as_it_is(refused, trained, inputs):
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    error = refused(f"exp_manager.exp_dir={inputs}/runs", "model.hidden_size=64")
    assert f"checkpoint {trained}/checkpoints/3 is of another model: params/" in error
    assert "(model.hidden_size was 32, is 64); restore the old settings or train under another" in error
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before


@pytest.fixture
def on_a_disk(inputs, tmp_path):
    """Calls `jzero train` with its runs on a file system of a size of its own; gives code, error, files, metrics."""

    def call(size: str, *overrides: str) -> tuple[int, str, list[str], list[dict]]:
        keys = (f"model.data.data_prefix={inputs}/text", f"exp_manager.exp_dir={tmp_path}/runs", *overrides)
        script = f"""
            mount -t tmpfs -o size={size} tmpfs {tmp_path} || exit 99
            {sys.executable} -m jzero train {inputs}/config.yaml {" ".join(keys)} >/dev/null
            code=$?
            cd {tmp_path} && find . -mindepth 1 | sed 's/^/file /'
            test -e runs/gpt/metrics.jsonl && cat runs/gpt/metrics.jsonl
            exit $code
        """
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=False, env=env
        )
        if done.returncode == 99 or done.stderr.startswith("unshare"):
            pytest.skip("needs a mount namespace (unshare -rm)")
        lines = done.stdout.splitlines()
        files = [line.removeprefix("file ./") for line in lines if line.startswith("file ")]
        return done.returncode, done.stderr, files, [json.loads(line) for line in lines[len(files) :]]

    return call


@pytest.mark.slow
def test_a_run_continues_on_another_number_of_devices(inputs, trained, tmp_path):
    """Nothing is skipped or seen twice, so the numbers are those of one run, up to the order of sums."""
    data = f"model.data.data_prefix={inputs}/text"
    whole = [data, f"exp_manager.exp_dir={tmp_path}", "exp_manager.name=whole", "trainer.max_steps=5"]
    schedule = ["model.optim.sched.max_steps=3"]
    assert main(["train", str(inputs / "config.yaml"), *whole, *schedule]) == 0
    shutil.copytree(trained, tmp_path / "gpt")
    more = [data, f"exp_manager.exp_dir={tmp_path}", "trainer.max_steps=5", "trainer.devices=1", *schedule]
    assert main(["train", str(inputs / "config.yaml"), *more]) == 0
    one, other = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "gpt"))
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (one, other)]
    assert len(losses[0]) == 5
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_a_disk_that_is_full_from_the_start(on_a_disk, tmp_path):
    code, error, files, _ = on_a_disk("4k")
    found = "expected room and permission to write, found No space left on device"
    assert (code, error) == (2, f"jzero: run {tmp_path}/runs/gpt: {found}\n")
    assert files == []


def test_a_disk_that_is_full_at_the_second_checkpoint(on_a_disk, tmp_path):
    checkpoint = "exp_manager.checkpoint"
    code, error, files, lines = on_a_disk(
        "800k", "trainer.max_steps=9", f"{checkpoint}.every_n_steps=2", f"{checkpoint}.save_last_k=9"
    )
    folder = f"{tmp_path}/runs/gpt/checkpoints"
    found = "expected room and permission to write, found No space left on device"
    assert (code, error) == (2, f"jzero: checkpoint in {folder}: {found}\n")
    assert {f.split("/")[3] for f in files if f.startswith("runs/gpt/checkpoints/")} == {"2"}
    assert not [f for f in files if "tmp" in f]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 4
