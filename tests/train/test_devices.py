"""Devices of a run: virtual ones where there is no accelerator, several hosts, and what does not fit."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jzero import JzeroError
from jzero.train import devices
from jzero.train.config import Config, Model, Trainer, load_config
from jzero.train.metrics import read_metrics

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", ["nvidia0", "kfd", "dxg", "accel0", "vfio/0"])
def test_an_accelerator_shows_in_dev(tmp_path, name):
    assert not devices.accelerator_present(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert devices.accelerator_present(tmp_path)


@pytest.mark.parametrize(
    ("platforms", "shown", "wanted", "expected"),
    [
        ("cpu", False, 3, [3, ["no accelerator in use: running on 3 virtual CPU devices"]]),
        ("", False, 3, [3, ["no accelerator in use: running on 3 virtual CPU devices"]]),
        ("", True, 3, [3, ["no accelerator in use: running on 3 virtual CPU devices"]]),
        ("cpu", False, -1, [1, ["no accelerator in use: running on the CPU"]]),
    ],
)
def test_virtual_devices_are_created_as_asked(platforms, shown, wanted, expected):
    """In a process of its own, as JAX makes its devices once; "": the user said nothing about platforms.

    `shown`: whether the kernel shows an accelerator, for which JAX has no plugin here.
    """
    if shown and devices.accelerator_present():
        pytest.skip("there is one")
    code = f"""if True:
        import json
        from jzero.train import devices
        from jzero.train.config import Trainer
        devices.accelerator_present = lambda: {shown}
        notes = []
        print(json.dumps([devices.start_devices(Trainer(devices={wanted}), notes.append), notes]))"""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("JAX", "XLA"))}
    env["JAX_PLATFORMS"] = platforms
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT, check=True)
    assert json.loads(done.stdout) == expected


@pytest.mark.parametrize(("wanted", "kept"), [(2, False), (-1, True)])
def test_the_compilation_cache_is_off_on_several_cpu_devices(tmp_path, wanted, kept):
    """A training step that comes out of it crashes."""
    code = f"""if True:
        import jax
        from jzero.train import devices
        from jzero.train.config import Trainer
        devices.start_devices(Trainer(devices={wanted}))
        jax.jit(lambda x: x + 1)(1.0)"""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("JAX", "XLA"))}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT, check=True)
    assert bool(list(tmp_path.iterdir())) == kept
    assert ("JAX's compilation cache is off" in done.stdout) != kept


def test_a_mesh_uses_the_first_devices():
    config, mesh = devices.build_mesh(
        load_config(None, ["trainer.devices=4", "model.micro_batch_size=2"]), lambda line: None
    )
    assert (config.trainer.devices, dict(mesh.shape)) == (4, {"pipeline": 1, "replica": 1, "data": 4, "tensor": 1})


def test_more_devices_than_there_are():
    with pytest.raises(JzeroError, match="64 devices, but there are 8"):
        devices.build_mesh(Config(trainer=Trainer(devices=64), model=Model(global_batch_size=256)), lambda line: None)


def test_hosts_that_cannot_find_each_other(monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(JzeroError, match=r"trainer.num_nodes: expected 2 hosts to find each other, found: "):
        devices.start_devices(Trainer(num_nodes=2), lambda line: None)
    monkeypatch.setenv("JAX_PROCESS_ID", "zero")
    with pytest.raises(JzeroError, match="JAX_PROCESS_ID: expected a number, found 'zero'"):
        devices.start_devices(Trainer(num_nodes=2), lambda line: None)


@pytest.fixture
def on_two_hosts(tmp_path, text_prefix):
    """Starts `jzero train` as two processes with two devices each; `first`: more keys of one. The processes."""
    keys = {
        "trainer.devices": 2,
        "trainer.num_nodes": 2,
        "trainer.precision": 32,
        "trainer.val_check_interval": 5,
        "trainer.limit_val_batches": 1,
        "exp_manager.exp_dir": tmp_path,
        "exp_manager.checkpoint.every_n_steps": 4,
        "model.micro_batch_size": 1,
        "model.encoder_seq_length": 16,
        "model.num_layers": 2,
        "model.hidden_size": 32,
        "model.num_attention_heads": 2,
        "model.data.data_prefix": text_prefix,
        "model.optim.policy": "gather_on_forward",
        "model.optim.sched.warmup_steps": 1,
    }
    (tmp_path / "config.yaml").write_text("{}")

    def start(*overrides: str, first: tuple[str, ...] = ()) -> list[subprocess.Popen]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        env = {**os.environ, "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "PYTHONPATH": str(ROOT)}
        arguments = [f"{key}={value}" for key, value in keys.items()]
        command = [sys.executable, "-m", "jzero", "train", str(tmp_path / "config.yaml"), *arguments, *overrides]
        pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        each = [(command + list(more), {**env, "JAX_PROCESS_ID": str(i)}) for i, more in enumerate((first, ()))]
        return [subprocess.Popen(arguments, env=own, **pipes) for arguments, own in each]

    return start


def outputs(processes, code: int) -> list[str]:
    texts = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), "\n".join(texts)
    return texts


@pytest.mark.slow
def test_two_hosts_stop_after_the_same_step_and_continue(on_two_hosts, tmp_path):
    metrics = tmp_path / "gpt" / "metrics.jsonl"
    processes = on_two_hosts("trainer.max_steps=5000")
    while len(read_metrics(metrics)) < 6 and processes[0].poll() is None:
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGTERM)  # only one of them is told
    stopped = outputs(processes, 0)[0]
    lines = read_metrics(metrics)
    step = lines[-1]["step"]
    assert f"stopped after step {step} and saved" in stopped
    continued, other = outputs(on_two_hosts(f"trainer.max_steps={step + 3}"), 0)
    assert f"continuing from step {step}\n" in continued
    assert "continuing" not in other
    assert read_metrics(metrics)[: len(lines)] == lines
    assert [r["step"] for r in read_metrics(metrics) if "loss" in r] == list(range(1, step + 4))


@pytest.mark.slow
def test_a_mistake_ends_both_hosts(on_two_hosts, tmp_path):
    (tmp_path / "gpt").write_text("")
    one, other = outputs(on_two_hosts(), 2)
    assert f"jzero: run folder {tmp_path}/gpt: expected room and permission to write, found File exists" in one
    assert f"jzero: run folder {tmp_path}/gpt: expected process 0 to open it, found that it could not" in other


@pytest.mark.slow
def test_data_that_one_host_cannot_open_ends_both(on_two_hosts):
    one, other = outputs(on_two_hosts(first=("model.data.data_prefix=/no/such/file",)), 2)
    assert "jzero: /no/such/file" in one
    assert "jzero: model.data: expected every host to open it, found one that could not" in other
