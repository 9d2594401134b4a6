"""`jzero plan` as a user calls it."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jzero.cli import main
from jzero.plan import available, command, plan, search, targets
from jzero.plan.hlo import parse
from jzero.plan.worker import Worker
from jzero.train.config import load_config
from jzero.train.config_check import validate

needs_compiler = pytest.mark.skipif(not available(), reason="needs the GPU compiler: pip install -e '.[plan]'")
CONFIG = """
exp_manager: {name: tiny}
trainer: {devices: 4}
model:
  num_layers: 1
  hidden_size: 32
  num_attention_heads: 2
  encoder_seq_length: 16
  micro_batch_size: 1
  global_batch_size: 8
  hidden_dropout: 0.0
  attention_dropout: 0.0
"""


@pytest.fixture
def config(tmp_path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def planned(monkeypatch, tmp_path_factory):
    """Plans of `jzero plan` are made once; the calls are recorded."""
    calls = []
    path = tmp_path_factory.getbasetemp() / "tiny.yaml"
    path.write_text(CONFIG)

    def once(*arguments):
        calls.append(arguments)
        if not hasattr(planned_once, "report"):
            planned_once.report = plan(load_config(path), "h100-sxm-80gb")
        return planned_once.report

    monkeypatch.setattr(command, "plan", once)
    return calls


class planned_once:  # noqa: N801  holds the one report
    pass


@needs_compiler
@pytest.mark.gpu_compiler
def test_a_plan_is_printed_and_written(config, tmp_path, capsys):
    files = [str(tmp_path / "plan.json"), str(tmp_path / "step.hlo")]
    arguments = ["--target", "a100-sxm-80gb", "--devices", "2", "--quick", "--json", files[0], "--hlo", files[1]]
    assert main(["plan", config, *arguments, "model.optim.policy=gather_twice"]) == 0
    out, err = capsys.readouterr()
    title = "tiny, gather_twice, 4 × 1 × 16 tokens per device, NVIDIA A100-SXM4-80GB, data 2"
    assert out.splitlines()[0].rstrip() == title
    assert err == ""
    found = json.loads(Path(files[0]).read_text())
    assert found["target"] == "NVIDIA A100-SXM4-80GB"
    assert found["mesh"]["data"] == 2
    assert {use["axis"] for use in found["collectives"]} == {"data"}
    assert found["tokens_per_second"] == pytest.approx(8 * 16 / found["step_ms"] * 1e3)
    assert parse(Path(files[1]).read_text()).partitions == 2


@needs_compiler
@pytest.mark.gpu_compiler
def test_a_layout_is_listed_without_compiling(config, tmp_path, capsys, planned):
    path = tmp_path / "layout.json"
    changes = ["model.tensor_model_parallel_size=2", "model.optim.policy=gather_on_forward"]
    assert main(["plan", config, "--layout", "--json", str(path), *changes]) == 0
    assert not planned
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].rstrip() == "tiny, gather_on_forward, data 2 × tensor 2: which parameter lives where"
    [token] = [line.split("  ") for line in lines if line.startswith("embedding/token")]
    cells = [cell.strip() for cell in token if cell.strip()]
    rows = {row["path"]: row for row in json.loads(path.read_text())}
    numbers = rows["embedding/token"]["shape"][0] * 32 // 4
    sizes = [f"{numbers * width / 2**10:.2f} KiB" for width in (2, 10)]  # bf16; remainder and two float32 moments
    shape, split = f"{numbers // 8} × 32", "vocab/tensor, embed/data"
    assert cells == ["embedding/token", shape, "bfloat16", split, sizes[0], "the same", sizes[1]]
    assert lines[-1].startswith("a device holds")

    assert main(["plan", config, "--layout", "--sweep"]) == 2
    assert "--layout compiles nothing, so --sweep cannot apply" in capsys.readouterr().err


@needs_compiler
@pytest.mark.gpu_compiler
def test_json_on_standard_output_is_all_there_is(config, planned, capsys):
    assert main(["plan", config, "--json", "-", "--quick"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["fits"] is True
    [(read, target, devices, hosts)] = planned
    assert (read.exp_manager.name, target, devices, hosts) == ("tiny", "h100-sxm-80gb", None, None)


@needs_compiler
@pytest.mark.gpu_compiler
@pytest.mark.parametrize("gain", [2.0, 0.5])
def test_advice_is_compiled_and_kept_if_it_helps(config, planned, capsys, monkeypatch, gain):
    first = command.plan

    def changed(*arguments):
        report = first(*arguments)
        if len(planned) == 1:
            return report
        return dataclasses.replace(report, tokens_per_second=gain * report.tokens_per_second, exposed_ms=0.0)

    monkeypatch.setattr(command, "plan", changed)
    assert main(["plan", config]) == 0
    out = capsys.readouterr().out
    tried = [call[0] for call in planned[1:]]
    assert len(tried) > 0
    assert all(c != load_config(config) for c in tried)
    speed = planned_once.report.tokens_per_second
    numbers = f"tokens/s {gain * speed:,.0f} instead of {speed:,.0f}"
    assert (out.count("(compiled)"), out.count("tried without gain")) == (
        (len(tried), 0) if gain > 1 else (0, len(tried))
    )
    assert numbers in " ".join(out.split())
    assert "by a formula" not in out


@needs_compiler
@pytest.mark.gpu_compiler
def test_a_quick_plan_estimates_what_advice_gives(config, planned, capsys):
    assert main(["plan", config, "--quick"]) == 0
    assert len(planned) == 1
    assert "(by a formula, not compiled)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "h100"], "target 'h100': expected one of h100-sxm-80gb, a100"),
        (["--devices", "3"], "model.global_batch_size: 8 is not divisible by model.micro_batch_size 1 × data-parallel"),
        (["--devices", "4", "--hosts", "3"], "devices 4: expected a multiple of the 3 hosts"),
        (["trainer.devices=-1"], "trainer.devices is -1, all that there are; say how many with --devices"),
        (["model.nmu_layers=2"], "model.num_layers"),
        (
            ["model.pipeline_model_parallel_size=2"],
            "model.num_layers: 1 is not divisible by model.pipeline_model_parallel_size 2",
        ),
        (["--write", "best.yaml"], "--write and --results belong to --sweep"),
        (["--json", "/no/such/folder/plan.json"], "/no/such/folder/plan.json: expected a file in a folder that exists"),
        (["--devices", "0"], "plan: --devices: expected at least 1, found 0"),
    ],
)
def test_mistakes_are_told_in_one_line(config, planned, capsys, arguments, message):
    command.plan = plan  # undone by the fixture
    assert main(["plan", config, *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("jzero: ")
    assert err.count("\n") == 1


def test_without_the_extra_the_command_says_what_to_install(config, monkeypatch, capsys):
    monkeypatch.setattr(targets, "_PLUGINS", ("no_such_package.plugin",))
    for more in ([], ["--sweep"]):
        assert main(["plan", config, *more]) == 2
        assert "pip install 'jzero[plan]'" in capsys.readouterr().err


def test_arguments_that_nobody_knows(config, capsys):
    with pytest.raises(SystemExit):
        main(["plan", config, "--devics", "8", "model.num_layers=2"])
    assert "unrecognized arguments: --devics 8" in capsys.readouterr().err


# --- sweeps ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def answers(monkeypatch):
    """Workers that answer at once: twice as many tokens/s with twice the micro-batch, which fits if recomputed."""

    def ask(self, overrides):
        values = dict(o.split("=", 1) for o in overrides)
        size, granularity = int(values["model.micro_batch_size"]), values["model.activations_checkpoint_granularity"]
        fits = size <= ask.limit or (size == 2 and granularity == "full" and ask.limit > 0)
        return {
            "fits": fits,
            "tokens_per_second": 1000.0 * size,
            "step_ms": 8.0,
            "exposed_ms": 0.4,
            "peak": 2**30,
            "mfu": 0.25,
        }

    ask.limit = 1
    monkeypatch.setattr(Worker, "ask", ask)
    monkeypatch.setattr(search.targets, "require", lambda: None)
    return ask


def test_a_sweep_ranks_and_writes_the_best_as_a_configuration(config, answers, tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("best.yaml", "results.jsonl", "sweep.json")]
    arguments = ["--sweep", "--write", files[0], "--results", files[1], "--json", files[2], "model.optim.lr=1e-3"]
    assert main(["plan", config, *arguments, "--workers", "1"]) == 0
    out = capsys.readouterr().out
    first = next(line for line in out.splitlines() if "gather" in line or "replicated" in line).split()
    assert first[1:4] == ["2", "full", "local"]
    assert "27 layouts: 21 fit, 3 do not, 3 need more than one of those" in out.replace("\n", " ")
    best = load_config(files[0])
    assert validate(best, 4) == best
    assert (best.model.micro_batch_size, best.model.activations_checkpoint_granularity) == (2, "full")
    assert best.model.optim.lr == 1e-3
    assert (
        Path(files[0]).read_text().startswith("# The best layout of tiny.yaml that `jzero plan --sweep --target h100")
    )
    rows = json.loads(Path(files[2]).read_text())
    assert len(rows) == 27
    assert "model.micro_batch_size=2" in rows[0]["overrides"]


def test_the_best_is_written_for_the_devices_that_were_asked_for(config, answers, tmp_path):
    files = [str(tmp_path / name) for name in ("best.yaml", "results.jsonl")]
    sizes = ["--devices", "8", "--hosts", "2", "model.optim.policy=gather_twice", "model.optim.overlap_param_sync=true"]
    assert main(["plan", config, "--sweep", "--write", files[0], "--results", files[1], *sizes]) == 0
    best = load_config(files[0])
    assert (best.trainer.devices, best.trainer.num_nodes, best.policy) == (4, 2, "gather_twice")


def test_a_sweep_in_which_nothing_fits(config, answers, tmp_path, capsys):
    answers.limit = 0
    results = str(tmp_path / "results.jsonl")
    assert main(["plan", config, "--sweep", "--results", results]) == 2
    assert "jzero: plan: none of 27 layouts fits on h100-sxm-80gb; use more devices" in capsys.readouterr().err


def test_results_go_to_the_users_cache(config, answers, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["plan", config, "--sweep", "--workers", "1"]) == 0
    [file] = (tmp_path / "cache" / "jzero" / "plan").iterdir()
    assert file.name.startswith("tiny-h100-sxm-80gb-4-")
    assert len(file.read_text().splitlines()) == 1 + 24


def test_help_needs_no_compiler():
    code = "import sys, jzero.cli\ntry: jzero.cli.main(['plan', '--help'])\nfinally: print('flax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--sweep" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"
