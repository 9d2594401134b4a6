"""The benchmarks run in short versions and write sane JSON; their timings are not judged here."""

import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jzero.data import GPTDataset, IndexedDataset, IndexedWriter
from jzero.plan import available

ROOT = pathlib.Path(__file__).parent.parent
SMALL = ("model.num_layers=1", "model.hidden_size=32", "model.encoder_seq_length=16", "trainer.limit_val_batches=2")


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python(folder: pathlib.Path, *arguments: str, rc: int = 0) -> str:
    """Output of a fresh interpreter that has not started JAX and has an empty cache folder."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == rc, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


# --- bigram ---------------------------------------------------------------------------------------------------------


def toy(tmp_path, texts, **options) -> GPTDataset:
    with IndexedWriter(tmp_path / "toy", "uint16") as writer:
        for text in texts:
            writer.add(text)
    return GPTDataset(IndexedDataset(tmp_path / "toy"), seed=1, vocab_size=3, **options)


def test_bigrams_are_counted_in_the_range_of_the_dataset_only(tmp_path):
    dataset = toy(tmp_path, [[2, 2, 2], [0, 1, 0, 1], [1, 2], [2, 0]], seq_length=2, documents=(1, 3))
    counts = load("bigram").bigram_counts(dataset, 3)
    assert counts.tolist() == [[0, 2, 0], [1, 1, 1], [0, 0, 0]]  # 0 1 0 1 1 2


def test_bigram_loss_is_that_of_a_loop_and_its_constant_the_best():
    counts = np.array([[0, 6, 1], [4, 1, 1], [0, 3, 0]])
    tokens, labels, mask = [0, 1, 2, 0, 2], [1, 2, 1, 0, 2], [1, 1, 1, 1, 0]
    batch = {"tokens": np.array([tokens]), "labels": np.array([labels]), "loss_mask": np.array([mask], np.float32)}

    def by_hand(k):
        losses = [
            -math.log((counts[a][b] + k) / (sum(counts[a]) + 3 * k))
            for a, b, counted in zip(tokens, labels, mask, strict=True)
            if counted
        ]
        return sum(losses) / len(losses)

    constant, loss = load("bigram").best_bigram(counts, [batch])
    assert loss == pytest.approx(by_hand(constant), rel=1e-12)
    assert loss <= min(by_hand(0.9 * constant), by_hand(1.1 * constant))
    assert 1e-5 < constant < 10


def check_bigram(result):
    assert result["train_tokens"] > 1_000_000
    assert result["validation_tokens"] == 2 * 16 * 16
    for side in ("bigram", "gpt"):
        assert 1 < result[side]["loss"] < math.log(257) + 0.5
    assert result["difference"] == result["gpt"]["loss"] - result["bigram"]["loss"]


@pytest.mark.slow
def test_bigram_trains_and_compares(tmp_path):
    script = str(ROOT / "benchmarks" / "bigram.py")
    output = python(tmp_path, script, "--steps", "3", "--json", "out.json", "--overrides", *SMALL)
    result = json.loads((tmp_path / "out.json").read_text())
    check_bigram(result)
    assert result["gpt"]["step"] == result["gpt"]["max_steps"] == 3
    assert f"{result['bigram']['loss']:.4f}" in output
    assert f"{result['gpt']['loss']:.4f}" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "out.json"]


@pytest.mark.slow
def test_bigram_reads_a_run(tmp_path):
    config, script = str(ROOT / "configs" / "gpt_tiny.yaml"), str(ROOT / "benchmarks" / "bigram.py")
    python(tmp_path, "-m", "jzero", "train", config, "trainer.max_steps=2", "generate.tokens=0", *SMALL)
    python(tmp_path, script, "--run", "runs/gpt_tiny", "--json", "out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    check_bigram(result)
    lines = [json.loads(line) for line in (tmp_path / "runs/gpt_tiny/metrics.jsonl").read_text().splitlines()]
    assert result["gpt"] == {"step": 2, "loss": lines[-1]["val_loss"], "max_steps": 2}

    (tmp_path / "runs/gpt_tiny/metrics.jsonl").unlink()
    assert "expected an evaluation in metrics.jsonl, found none" in python(
        tmp_path, script, "--run", "runs/gpt_tiny", rc=2
    )


# --- step time ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_step_time_runs_every_side(tmp_path):
    script = str(ROOT / "benchmarks" / "step_time.py")
    python(tmp_path, script, "--rounds", "3", "--devices", "4", "--json", "out.json", "--overrides", *SMALL)
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["devices"], result["rounds"]) == (4, 3)
    assert set(result["rows"]) == {"jzero", "plain JAX", "plain JAX, remat"}
    for row in result["rows"].values():
        assert set(row) == {"median_ms", "ratio"}
        assert min(row.values()) > 0
    assert result["rows"]["jzero"]["ratio"] == 1


# --- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="needs the GPU compiler: pip install -e '.[plan]'")
def test_plans_are_read_for_what_is_exposed(tmp_path):
    script = str(ROOT / "benchmarks" / "plan.py")
    short = ["--micro-batches", "1", "--policies", "gather_twice", "--overrides", "model.num_layers=1"]
    output = python(tmp_path, script, "overlap", *short, "--json", "out.json")
    [row] = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (row["policy"], row["micro_batches"], row["accumulation"]) == ("gather_twice", 1, "local")
    assert 0 < row["exposed_ms"] < row["step_ms"]
    assert all(0 <= share <= 1 for share in row["layers"].values())
    assert f"{row['step_ms']:.1f}" in output


# --- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_layouts_have_the_losses_and_save_the_memory_that_they_should(tmp_path):
    script, small = str(ROOT / "benchmarks" / "layouts.py"), ["model.num_layers=2", "model.hidden_size=32"]
    planned = "gpt_tiny" if available() else "none"
    arguments = [
        "--layouts",
        "d2p2",
        "--precisions",
        "bf16",
        "--rounds",
        "2",
        "--planned",
        planned,
        "--json",
        "out.json",
    ]
    output = python(tmp_path, script, *arguments, "--overrides", *small)
    result = json.loads((tmp_path / "out.json").read_text())
    off, on = result["rows"]
    assert (off["zero"], on["zero"], on["data"], on["pipeline"]) == (False, True, 2, 2)
    assert on["parameters_mib"] == off["parameters_mib"]
    assert on["state_mib"] < off["state_mib"] < off["needed_mib"]
    [pair] = result["pairs"]
    assert pair["largest_loss_difference"] <= 1e-3
    assert pair["saved_mib"] == pytest.approx(pair["expected_mib"], rel=1e-3)
    assert min(pair["speed_on_of_off"], on["steps_per_s"]) > 0
    assert f"{on['val_loss']:.4f}" in output
    if available():
        without, with_zero = result["planned"]
        assert without["state"] - with_zero["state"] == with_zero["saved"]
        assert with_zero["saved"] == pytest.approx(with_zero["expected"], rel=1e-3)
    assert "expected something like d2t2p2v2" in python(tmp_path, script, "--layouts", "2x2", rc=2)


# --- optimizer and precision -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_optimizer_is_timed_against_what_computes_the_same(tmp_path):
    script = str(ROOT / "benchmarks" / "optimizer.py")
    python(tmp_path, script, "--width", "8", "--rounds", "2", "--json", "out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    assert {f"jzero / optax.adamw, {state}" for state in ("warm", "cold")} <= set(result["rows"])
    assert ("C loop / optax.adamw, warm" in result["rows"]) == result["notes"][0].startswith("C loop: ")
    assert min(result["rows"].values()) > 0

    python(tmp_path, script, "--width", "8", "--rounds", "2", "--devices", "4", "--json", "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert set(rows) == {
        "sharded update / replicated update",
        "scatter + update + gather / all-reduce + replicated update",
    }


@pytest.mark.slow
def test_low_precision_ends_where_float32_state_does(tmp_path):
    """A short version of the convergence run: the narrowest modes, within 1% of the reference."""
    script = str(ROOT / "benchmarks" / "precision.py")
    modes = ["the same, rounded stochastically", "bf16, remainder, scaled fp8 m, scaled fp16 v"]
    small = ("model.num_layers=2", "model.hidden_size=64", "model.encoder_seq_length=64", "trainer.limit_val_batches=4")
    python(tmp_path, script, "--steps", "40", "--json", "out.json", "--modes", *modes, "--overrides", *small)
    result = json.loads((tmp_path / "out.json").read_text())
    assert set(result["rows"]) == {result["reference"], *modes}
    assert result["rows"][result["reference"]]["loss"] < 4  # it has learned: a byte in 257 is log 257 = 5.5
    for row in result["rows"].values():
        assert abs(row["of_reference"] - 1) < 0.01


@pytest.mark.slow
def test_fp8_products_end_where_bfloat16_does(tmp_path):
    script = str(ROOT / "benchmarks" / "fp8.py")
    names = ["fp8, delayed scaling", "fp8 parameters too", "fp8, current scaling"]
    small = ("model.num_layers=2", "model.hidden_size=64", "model.encoder_seq_length=64", "trainer.limit_val_batches=4")
    python(tmp_path, script, "--steps", "40", "--seeds", "1", "--json", "out.json", "--overrides", *small)
    result = json.loads((tmp_path / "out.json").read_text())
    assert list(result["rows"]) == [result["reference"], *names]
    assert result["rows"][result["reference"]]["mean"] < 4  # it has learned: a byte in 257 is log 257 = 5.5
    for name in names:
        [loss] = result["rows"][name]["losses"]
        assert loss != result["rows"][result["reference"]]["mean"]
        assert result["rows"][name]["largest_deviation"] < 0.01
