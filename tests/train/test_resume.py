"""The real command in a process of its own, killed with SIGKILL at a random moment and started again.

The file of metrics must be that of a run never killed: every step once, none missing, the same numbers to the last bit.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jzero.train.metrics import read_metrics

ROOT = Path(__file__).parent.parent.parent
CONFIG = """
trainer: {max_steps: 60, log_every_n_steps: 20, val_check_interval: 15, limit_val_batches: 2}
exp_manager: {checkpoint: {every_n_steps: 4, save_top_k: 2}}
model:
  {global_batch_size: 8, micro_batch_size: 2, encoder_seq_length: 32, num_layers: 2, hidden_size: 32,
   num_attention_heads: 4, optim: {sched: {warmup_steps: 5}}}
generate: {tokens: 0}
"""
PLAIN = ("trainer.devices=1", "trainer.precision=32", "model.attention_dropout=0")
SHARDED = (
    "trainer.devices=4",
    "trainer.precision=bf16",
    "model.micro_batch_size=1",
    "model.optim.policy=gather_on_forward",
    "model.data.num_workers=1",
)


@pytest.fixture
def command(tmp_path, text_prefix):
    """Starts `jzero train` on run NAME in a process of its own."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}

    def start(name: str, *overrides: str) -> subprocess.Popen:
        keys = (f"exp_manager.exp_dir={tmp_path}", f"exp_manager.name={name}", f"model.data.data_prefix={text_prefix}")
        arguments = [sys.executable, "-m", "jzero", "train", str(tmp_path / "config.yaml"), *keys, *overrides]
        return subprocess.Popen(arguments, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    return start


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def wait_for_lines(process: subprocess.Popen, metrics: Path, lines: int) -> None:
    while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < lines):
        time.sleep(0.002)
    assert process.poll() is None, process.communicate()[0]


def kill_at_random(process: subprocess.Popen, metrics: Path, rng: random.Random, lines: int) -> None:
    wait_for_lines(process, metrics, lines)
    time.sleep(rng.uniform(0, 0.03))  # in the midst of a step, a line, an evaluation or a save
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_a_run_killed_at_a_random_moment(command, tmp_path, without_times):
    seed = random.randrange(1000)
    rng = random.Random(seed)
    finish(command("whole", *PLAIN))
    kill_at_random(command("killed", *PLAIN), tmp_path / "killed" / "metrics.jsonl", rng, rng.randrange(1, 50))
    output = finish(command("killed", *PLAIN))
    assert without_times(tmp_path / "killed") == without_times(tmp_path / "whole"), f"seed {seed}: {output}"
    assert [line["step"] for line in without_times(tmp_path / "whole") if "loss" in line] == list(range(1, 61))
    assert [line["step"] for line in without_times(tmp_path / "whole") if "val_loss" in line] == [15, 30, 45, 60]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [PLAIN, SHARDED], ids=["one device", "four devices"])
def test_a_run_killed_many_times(command, tmp_path, overrides, without_times):
    """At least ten times, wherever each start has come to; the last start runs to the end."""
    seed = random.randrange(1000)
    rng = random.Random(seed)
    finish(command("whole", *overrides))
    metrics = tmp_path / "killed" / "metrics.jsonl"
    for _ in range(10):
        done = len(read_metrics(metrics))
        if done > 50:
            break
        kill_at_random(command("killed", *overrides), metrics, rng, rng.randrange(max(done - 4, 1), done + 9))
    output = finish(command("killed", *overrides))
    assert without_times(tmp_path / "killed") == without_times(tmp_path / "whole"), f"seed {seed}: {output}"


@pytest.mark.slow
def test_sigterm_saves_and_ends_with_code_0(command, tmp_path, without_times):
    finish(command("whole", *SHARDED))
    process = command("stopped", *SHARDED)
    wait_for_lines(process, tmp_path / "stopped" / "metrics.jsonl", 7)
    process.terminate()
    output = finish(process)
    last = without_times(tmp_path / "stopped")[-1]["step"]
    assert f"stopped after step {last} and saved; the same command continues from there" in output
    assert last < 60
    assert f"continuing from step {last}\n" in finish(command("stopped", *SHARDED))
    assert without_times(tmp_path / "stopped") == without_times(tmp_path / "whole")
