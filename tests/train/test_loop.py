"""The loop with a small program: what it writes and when, and that a stopped run continues bit for bit."""

import functools
import os
import signal

import jax
import numpy as np
import pytest

from jzero import JzeroError
from jzero.data.loader import build_datasets, config_tokenizer
from jzero.train.checkpoint import Checkpoints
from jzero.train.config import load_config
from jzero.train.devices import build_mesh
from jzero.train.files import RunFolder
from jzero.train.loop import Run, TrainResult
from jzero.train.metrics import read_metrics
from jzero.train.progress import Reporter
from jzero.train.signals import StopSignals
from jzero.train.start import check_old_files


@pytest.fixture
def start(tmp_path, text_prefix, small_program):
    """Starts (or continues) the run tmp_path/run; `during(run, step)` is called before each step."""

    def run(*overrides: str, during=lambda run, step: None) -> TrainResult:
        keys = {
            "trainer.devices": 4,
            "trainer.precision": 32,
            "trainer.max_steps": 10,
            "trainer.log_every_n_steps": 4,
            "trainer.val_check_interval": 4,
            "trainer.limit_val_batches": 2,
            "exp_manager.exp_dir": tmp_path,
            "exp_manager.name": "run",
            "exp_manager.checkpoint.every_n_steps": 3,
            "model.encoder_seq_length": 16,
            "model.micro_batch_size": 1,
            "model.data.data_prefix": text_prefix,
            "model.optim.sched.warmup_steps": 1,
            "generate.tokens": 4,
        }
        keys.update(item.split("=", 1) for item in overrides)
        config, mesh = build_mesh(load_config(None, [f"{key}={value}" for key, value in keys.items()]), print)
        program = small_program(config, mesh)
        check = functools.partial(check_old_files, config.exp_manager)
        with RunFolder(config.run_folder, check=check) as folder:
            report = Reporter(total=config.trainer.max_steps, every=config.trainer.log_every_n_steps)
            one = Run(config, program, build_datasets(config), config_tokenizer(config), folder, report)
            step = program.step

            def counted(state, batch):
                during(one, one.step)
                return step(state, batch)

            program.step = counted
            return one.run()

    return run


class KilledError(BaseException):
    """As if the process were killed: nothing of the loop catches it but to close files."""


def kill_at(at: int):
    def during(run: Run, step: int) -> None:
        if step == at:
            raise KilledError

    return during


def test_a_run_writes_what_it_says(start, tmp_path, capsys):
    result = start()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in lines if "loss" in r] == list(range(1, 11))
    assert [r["step"] for r in lines if "val_loss" in r] == [4, 8, 10]
    assert set(lines[0]) == {"step", "loss", "grad_norm", "lr", "step_time_s", "tokens_per_s"}
    assert lines[0]["loss"] > result.loss
    assert lines[1]["tokens_per_s"] == pytest.approx(8 * 16 / lines[1]["step_time_s"])
    assert (result.step, result.stopped, result.val_loss) == (10, False, lines[-1]["val_loss"])
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "config.yaml",
        "lock",
        "metrics.jsonl",
        "tensorboard",
    ]
    assert load_config(tmp_path / "run" / "config.yaml").model.encoder_seq_length == 16
    out = capsys.readouterr().out
    assert out.count("lr 1.0e-02") == 3  # steps 4 and 8, and the last
    assert f"run folder: {tmp_path}/run\n" in out
    assert out.endswith(
        f"{result.sample}\n\nfinished after step 10 with val_loss {result.val_loss:.4f}; more: "
        f"jzero generate {tmp_path}/run --prompt 'def '\n"
    )
    assert result.sample.startswith("def ")


def test_two_runs_give_the_same_numbers(start, tmp_path, without_times):
    start("exp_manager.name=a")
    start("exp_manager.name=b", "exp_manager.checkpoint.every_n_steps=100")
    assert without_times(tmp_path / "a") == without_times(tmp_path / "b")


def test_a_step_in_flight_as_on_accelerators_changes_no_line(start, tmp_path, without_times):
    """Not waiting for each step is for accelerators; one CPU device can do it too."""
    most = 0

    def during(run: Run, step: int) -> None:
        nonlocal most
        run.on_cpu = False
        most = max(most, len(run.in_flight))

    start("exp_manager.name=one", "trainer.devices=1")
    start("exp_manager.name=two", "trainer.devices=1", during=during)
    assert without_times(tmp_path / "one") == without_times(tmp_path / "two")
    assert most == 1


@pytest.mark.parametrize("at", [2, 3, 8])
def test_a_killed_run_continues_bit_for_bit(start, tmp_path, at, without_times):
    """Killed before the first checkpoint; right after one; and between an evaluation and the next one."""
    whole = start("exp_manager.name=whole")
    with pytest.raises(KilledError):
        start(during=kill_at(at))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "los')  # the line that was being written
    continued = start()
    assert without_times(tmp_path / "run") == without_times(tmp_path / "whole")
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(continued.state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert continued.sample == whole.sample


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_after_the_step_and_the_run_continues_bit_for_bit(
    start, tmp_path, number, capsys, without_times
):
    start("exp_manager.name=whole")
    stopped = start(during=lambda run, step: step == 4 and os.kill(os.getpid(), number))
    assert (stopped.step, stopped.stopped, stopped.sample) == (5, True, None)
    assert "stopped after step 5 and saved" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())[-1] == "5"
    start()
    assert without_times(tmp_path / "run") == without_times(tmp_path / "whole")
    assert signal.getsignal(number) is not None


def test_a_signal_during_an_evaluation_ends_it_and_it_is_made_up_for(start, tmp_path, without_times):
    start("exp_manager.name=whole")

    def during(run: Run, step: int) -> None:
        if step == 3:
            measure = run.program.measure

            def interrupted(params, batch, fp8):
                signal.raise_signal(signal.SIGTERM)
                return measure(params, batch, fp8)

            run.program.measure = interrupted

    stopped = start(during=during)
    assert (stopped.step, stopped.val_loss) == (4, None)
    start()
    assert without_times(tmp_path / "run") == without_times(tmp_path / "whole")


def test_a_handler_that_python_did_not_set_becomes_the_default():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with StopSignals() as stop:
            stop._before[signal.SIGTERM] = None  # what `signal.signal` gives then
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_second_interrupt_ends_the_run_at_once(start):
    def during(run: Run, step: int) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        start(during=during)


def test_a_signal_while_the_last_checkpoint_is_written_does_not_break_it_off(start, tmp_path):
    def during(run: Run, step: int) -> None:
        if step == 9:
            close = run.checkpoints.close
            run.checkpoints.close = lambda: (signal.raise_signal(signal.SIGINT), close())

    result = start(during=during)
    assert (result.step, result.stopped, result.sample is None) == (10, False, False)
    assert (tmp_path / "run" / "checkpoints" / "10").is_dir()


def test_the_best_checkpoint_is_one_whose_step_was_evaluated(start, tmp_path):
    """Evaluations after steps 4, 8 and 10, checkpoints after 3, 6, 9 and 10."""
    start("exp_manager.checkpoint.save_last_k=9")
    checkpoints = Checkpoints(tmp_path / "run", read_only=True)
    assert (checkpoints.steps, checkpoints.best()) == ([3, 6, 9, 10], [10])
    checkpoints.close()


def test_a_finished_run_is_left_as_it_is(start, tmp_path, capsys):
    first = start()
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert "already" not in capsys.readouterr().out
    again = start()
    assert "already finished: step 10 is the last; a larger trainer.max_steps goes on\n" in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == lines
    assert (again.step, again.loss, again.val_loss, again.sample) == (10, None, first.val_loss, first.sample)


def test_changed_settings_are_named_when_a_run_continues(start, capsys):
    start("trainer.max_steps=4")
    start("model.optim.lr=1e-4", "model.data.num_workers=0", "model.hidden_dropout=0.3")
    out = capsys.readouterr().out
    assert "continuing from step 4; changed since: model.hidden_dropout, model.optim.lr\n" in out
    assert "learning rate of step 5: " in out


def test_a_longer_run_says_what_becomes_of_the_learning_rate(start, capsys):
    start("trainer.max_steps=4")
    capsys.readouterr()
    start("trainer.max_steps=8")
    out = capsys.readouterr().out
    assert (
        "learning rate of step 5: 0.00013, before the change 2e-05 (the schedule follows trainer.max_steps, "
        "4 and now 8; model.optim.sched.max_steps=4 keeps the old one)\n"
    ) in out
    start("trainer.max_steps=9", "model.optim.sched.max_steps=8")
    assert "learning rate of" not in capsys.readouterr().out


def test_another_mesh_is_named_when_a_run_continues(start, capsys):
    start("trainer.max_steps=4")
    start("trainer.max_steps=4", "trainer.devices=2")
    assert "continuing from step 4; changed since: mesh (data 4, now 2)\n" in capsys.readouterr().out


def test_another_batch_size_cannot_continue(start):
    start("trainer.max_steps=3")
    message = r"^model.global_batch_size: expected 8 as in checkpoint 3, found 16; the position in the data is a number"
    with pytest.raises(JzeroError, match=message):
        start("model.global_batch_size=16")


def test_an_old_folder_is_not_overwritten_without_resume(start, tmp_path):
    start("trainer.max_steps=1")
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(JzeroError, match=r"expected a new folder, found metrics.jsonl of an earlier run"):
        start("exp_manager.resume_if_exists=false")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == lines


def test_a_run_with_checkpoints_does_not_start_again_without_them(start, tmp_path):
    start("trainer.max_steps=3")
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    message = r"expected no checkpoints with exp_manager.create_checkpoint_callback=false, found those of an earlier"
    with pytest.raises(JzeroError, match=message):
        start("exp_manager.create_checkpoint_callback=false")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == lines


def test_two_processes_cannot_train_into_one_folder(start, tmp_path):
    start("trainer.max_steps=1")
    with RunFolder(tmp_path / "run"), pytest.raises(JzeroError, match=r"expected no other process training into it"):
        start()
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_without_checkpoints_and_evaluations_there_are_none(start, tmp_path):
    result = start("exp_manager.create_checkpoint_callback=false", "trainer.limit_val_batches=0", "generate.tokens=0")
    assert (result.val_loss, result.sample) == (None, None)
    assert [r["step"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 11))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_no_documents_for_validation(start, tmp_path):
    with pytest.raises(
        JzeroError, match=r"expected documents for validation, found none with 1,0,0; change it, or set"
    ):
        start("model.data.splits_string=1,0,0")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("prefix", ["{0}", "[1,{0},9,{0}]"])
def test_an_evaluation_takes_no_sample_twice(start, monkeypatch, text_prefix, prefix):
    """Also where one of the files comes so often that it would begin again long before the other ends."""
    seen = []

    def during(run: Run, step: int) -> None:
        if step == 0:
            place = run.program.place
            monkeypatch.setattr(run.program, "place", lambda batch: seen.append(batch) or place(batch))

    data = "model.data.data_prefix=" + prefix.format(text_prefix)
    start("trainer.max_steps=1", "trainer.limit_val_batches=1000", data, during=during)
    rows = np.concatenate([batch["tokens"] for batch in seen])  # of the evaluation: the step's was placed before
    assert 1 < len(seen) < 100
    assert np.unique(rows, axis=0, return_counts=True)[1].max() == prefix.count("{0}")  # each file gives it once


def spoil_at(at: int):
    """Multiplies what the tokens of one step count by nan: so are its loss and gradients."""

    def during(run: Run, step: int) -> None:
        if step == 0:
            place = run.program.place
            nan = lambda batch: {**batch, "loss_mask": batch["loss_mask"] * np.float32("nan")}
            run.program.place = lambda batch: place(nan(batch) if run.step == at - 1 else batch)

    return during


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(start, tmp_path):
    message = (
        r"^step 6: expected finite numbers, found loss nan and grad_norm nan; the update was applied and has spoiled "
        r"the parameters, the last checkpoint is of step 3; the same settings would come here again: lower"
    )
    with pytest.raises(JzeroError, match=message):
        start(during=spoil_at(6))
    assert [r["step"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in r] == list(range(1, 7))
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["3"]


def test_a_validation_loss_that_is_not_finite_ends_the_run_too(start):
    """The evaluation after step 4 uses what step 5 would."""
    with pytest.raises(JzeroError, match="step 4: expected finite numbers, found val_loss nan; the update was"):
        start(during=spoil_at(5))


def test_a_run_may_go_on_after_that_but_keeps_its_last_good_checkpoint(start, tmp_path, capsys):
    result = start("trainer.terminate_on_nan=false", during=spoil_at(6))
    assert result.step == 10
    out = capsys.readouterr().out
    assert out.count("warning: step 6: expected finite numbers, found loss nan and grad_norm nan; the update was") == 1
    assert "training on without saving (the last checkpoint is of step 3)" in out
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["3"]


def test_a_failure_before_the_first_step_leaves_nothing_behind(start, tmp_path):
    with pytest.raises(KilledError):
        start("exp_manager.exp_dir=" + str(tmp_path / "new" / "runs"), during=kill_at(0))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_every_line_of_the_metrics_is_whole(start, tmp_path):
    """/dev/full refuses every byte, as a full disk does."""

    def during(run: Run, step: int) -> None:
        if step == 5:
            run.metrics._file.close()
            run.metrics._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115

    with pytest.raises(JzeroError, match=r"run .*/run: expected room and permission to write, found No space left on"):
        start(during=during)
    assert [r["step"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl")][-1] == 5
    start()
    assert [r["step"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in r] == list(range(1, 11))
