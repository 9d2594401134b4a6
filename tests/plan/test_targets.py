"""Facts of the GPUs, and what happens where the GPU compiler is missing or did not start."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jzero import JzeroError
from jzero.plan import TARGETS, available, devices, targets

ROOT = Path(__file__).parents[2]


def test_the_targets_of_the_documentation():
    assert set(TARGETS) == {
        "a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm-80gb", "h100-pcie-80gb", "h200-sxm-141gb", "b200-sxm-180gb",
        "gb200-nvl72-186gb",
    }  # fmt: skip
    rows = [line.strip("| ").split(" | ") for line in (ROOT / "docs" / "plan.md").read_text().splitlines()]
    table = {row[0].strip("`"): row[1:] for row in rows if row[0].startswith("`") and len(row) == 9}
    tera = lambda value: f"{value / 1e12:.0f}"
    for name, t in TARGETS.items():
        fp8 = tera(t.rates["fp8"]) if "fp8" in t.rates else "–"
        rates = [tera(t.rates["bf16"]), fp8, tera(t.rates["tf32"])]
        links = [f"{t.link / 1e9:.0f}", f"{t.network / 1e9:.0f}"]
        memory = [f"{t.memory / 2**30:.1f}", f"{t.bandwidth / 1e12:.2f}"]
        assert table[name] == [*memory, *rates, *links, f"{t.efficiency:.0%}"]


@pytest.mark.parametrize("name", TARGETS)
def test_facts_are_plausible(name):
    target = TARGETS[name]
    size = int(name.rsplit("-", 1)[1].removesuffix("gb"))
    assert 0.95 * size * 1e9 < target.memory < 1.1 * size * 1e9
    assert target.rates["tf32"] == target.rates["bf16"] / 2
    assert target.rate("f16") == target.rate("bf16") > target.rate("f32") > target.rate("fp32")
    # an fp32 unit adds and multiplies once per clock; B200 and GB200 publish a lower clock than CUDA reports
    assert target.rates["fp32"] == pytest.approx(2 * target.cores * target.fpus * target.clock * 1e9, rel=0.03)
    assert target.link > target.network
    assert f'name: "{target.name}"' in target.config


def test_only_hopper_and_blackwell_have_fp8():
    fp8 = {name for name, target in TARGETS.items() if target.rate("f8e4m3fn") > target.rate("bf16")}
    assert fp8 == {name for name in TARGETS if not name.startswith("a100")}


@pytest.mark.gpu_compiler
@pytest.mark.skipif(not available(), reason="needs the GPU compiler: pip install -e '.[plan]'")
def test_described_devices_say_what_they_are():
    gpus = devices("h100-sxm-80gb", 16, hosts=2)
    assert {gpu.device_kind for gpu in gpus} == {TARGETS["h100-sxm-80gb"].name}
    assert [gpu.process_index for gpu in gpus] == [0] * 8 + [1] * 8
    assert all(gpu.platform in ("gpu", "cuda") for gpu in gpus)


def test_without_the_extra_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(targets, "_PLUGINS", ("jax_plugins.no_such_plugin", "no_such_package.plugin"))
    assert not available()
    with pytest.raises(JzeroError, match=r"the GPU compiler is not installed: pip install 'jzero\[plan\]'") as error:
        devices("h100-sxm-80gb", 8)
    assert "\n" not in str(error.value)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("JAX", "XLA"))} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT, check=False)


@pytest.mark.gpu_compiler
@pytest.mark.skipif(not available(), reason="needs the GPU compiler: pip install -e '.[plan]'")
def test_nothing_needs_to_be_set_before_jax_starts():
    done = run("from jzero.plan import devices; print(len(devices('h100-sxm-80gb', 8)))")
    assert (done.stdout, done.stderr) == ("8\n", "")


@pytest.mark.gpu_compiler
@pytest.mark.skipif(
    not available() or os.path.exists("/dev/nvidiactl"), reason="needs the GPU compiler, and no driver of a GPU"
)
def test_where_jax_gave_the_compiler_up_the_error_says_what_to_set():
    code = """if True:
        import jax
        jax.devices()  # as a notebook may have done, with the plugin looking for a driver
        from jzero import JzeroError
        from jzero.plan import devices
        try:
            devices('h100-sxm-80gb', 8)
        except JzeroError as error:
            print(error)"""
    assert "set JAX_PLATFORMS=cpu before jax is used" in run(code).stdout


@pytest.mark.gpu_compiler
@pytest.mark.skipif(not available(), reason="needs the GPU compiler: pip install -e '.[plan]'")
def test_the_trainer_is_not_disturbed_by_the_plugin():
    """It neither warns nor waits: no GPU is looked for where the kernel shows none."""
    code = """if True:
        import sys, time
        from jzero.train import devices
        from jzero.train.config import Trainer
        devices.accelerator_present = lambda *_: False
        import jax
        start = time.perf_counter()
        devices.start_devices(Trainer(devices=2), lambda line: None)
        print(len(jax.devices()), time.perf_counter() - start < 3)"""
    done = run(code)
    assert (done.stdout, done.stderr) == ("2 True\n", "")


def test_this_process_still_computes_on_its_cpus():
    available()
    assert {d.platform for d in jax.devices()} == {"cpu"}
