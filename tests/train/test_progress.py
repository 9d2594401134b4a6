"""What the user sees: a bar on a terminal, plain lines elsewhere."""

import io

import pytest
from rich.console import Console

from jzero.train.progress import Reporter


def show(terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, highlight=False, color_system=None)
    with Reporter(total=4, every=2, console=console) as report:
        report.table([("parameters", "1,234")])
        for step in range(1, 5):
            seconds = 60.0 if step == 1 else 2.0  # the first step compiles
            report.step({"step": step, "loss": 1 / step, "lr": 1e-3, "step_time_s": seconds, "tokens_per_s": 5000.0})
            if step == 3:
                report.evaluation({"step": 3, "val_loss": 0.5})
        report.note("[all] done")
    return out.getvalue()


def test_plain_lines():
    lines = show(terminal=False).splitlines()
    assert "1,234" in lines[1]
    assert lines[3:] == [
        "step 2/4 · loss 0.5000 · lr 1.0e-03 ·  5,000 tokens/s · 0:00:04 left",
        "step 3/4 · val_loss 0.5000",
        "step 4/4 · loss 0.2500 · val 0.5000 · lr 1.0e-03 ·  5,000 tokens/s · 0:00:00 left",
        "[all] done",
    ]


def test_a_bar_on_a_terminal():
    out = show(terminal=True)
    assert "4/4 ━━━━━━━━━━━━━━━━━━ loss 0.2500 val 0.5000 lr 1.0e-03 5,000 tok/s ETA 0:00:00\n" in out
    assert "step 3/4 · val_loss" not in out
    assert "[all] done" in out


def test_a_quiet_process(capsys):
    report = Reporter(total=1)
    report.console.quiet = True  # as on processes other than 0
    report.note("text")
    report.step({"step": 1, "loss": 1.0, "lr": 1.0, "step_time_s": 1.0, "tokens_per_s": 1.0})
    assert capsys.readouterr().out == ""


def test_lines_are_aligned_and_a_warning_is_one_of_them():
    out = io.StringIO()
    with Reporter(total=100, every=1, console=Console(file=out, width=40, highlight=False)) as report:
        for step, speed in ((9, 987.0), (10, 12_345.0)):
            report.step({"step": step, "loss": 1.0, "lr": 1.0, "step_time_s": 1.0, "tokens_per_s": speed})
        report.warn("step 10: " + "x" * 80)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("step   9/100 · loss 1.0000 · lr 1.0e+00 ·    987 tokens/s · 0:01:31 left")
    assert lines[1].startswith("step  10/100 · loss 1.0000 · lr 1.0e+00 · 12,345 tokens/s · 0:01:30 left")
    assert lines[2] == "warning: step 10: " + "x" * 80


@pytest.mark.parametrize(("done", "left"), [(1, "0:01:00"), (3, "0:00:02")])
def test_the_time_left_follows_the_usual_step_not_the_first(done, left):
    out = io.StringIO()
    report = Reporter(total=4 if done == 3 else 2, every=1, console=Console(file=out, width=120, highlight=False))
    for step in range(1, done + 1):
        seconds = 60.0 if step == 1 else 2.0
        report.step({"step": step, "loss": 1.0, "lr": 1.0, "step_time_s": seconds, "tokens_per_s": 1.0})
    assert out.getvalue().splitlines()[-1].endswith(f"{left} left")
