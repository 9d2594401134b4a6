"""The training loop: `train(config)`.

    devices, mesh, data, program        nothing is written yet, so a mistake leaves nothing behind
    run folder, checkpoint or init      the folder is locked; metrics after the checkpoint's step are cut
    steps, evaluations, checkpoints     each line of metrics stands before the checkpoint that covers it
    final evaluation, checkpoint, text

A run is a function of its configuration: the state (parameters, optimizer, step) and the step decide what comes next,
so a run that was killed and started again gives the same numbers as one that was not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import shlex
import time
from collections import deque
from pathlib import Path
from typing import Any

import jax

from jzero.data.loader import batches, build_datasets, config_tokenizer
from jzero.errors import JzeroError
from jzero.train.config import Config, to_yaml
from jzero.train.devices import as_process_0, build_mesh, together
from jzero.train.files import RunFolder, disk_errors, write_atomic
from jzero.train.fill import MASK, fill
from jzero.train.generate import generate
from jzero.train.memory import memory_errors
from jzero.train.metrics import Metrics, means
from jzero.train.progress import Reporter
from jzero.train.record import Record
from jzero.train.signals import StopSignals
from jzero.train.start import (
    check_old_files,
    open_checkpoints,
    open_metrics,
    plain,
    to_resume,
    validation,
    what_changed,
)
from jzero.train.step import build_program
from jzero.train.weights import initial_values


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a run came to."""

    run: Path  # its folder
    step: int  # steps done, over all its starts
    loss: float | None  # of the last step; None if this start did none
    val_loss: float | None  # of the last evaluation
    stopped: bool  # a signal ended it before max_steps; the same command continues it
    sample: str | None  # the text at the end
    state: Any  # TrainState
    program: Any


def train(config: Config) -> TrainResult:
    """Trains a model as a configuration says, from its last checkpoint if there is one.

    SIGTERM, or Ctrl-C once, ends the run after the current step with a checkpoint; a second Ctrl-C ends it at once.

    Args:
        config: from `load_config`.

    Returns:
        A `TrainResult`; the files are in `exp_manager.exp_dir/exp_manager.name`.

    Raises:
        JzeroError: something asked for cannot be done: the mesh, the data, the run folder, the checkpoint, the disk or
            the memory; or the loss is not finite any more.

    Example:
        >>> from jzero.train.config import load_config
        >>> result = train(load_config("configs/gpt_tiny.yaml", ["trainer.max_steps=2"]))  # doctest: +SKIP
    """
    reporter = Reporter(total=config.trainer.max_steps, every=config.trainer.log_every_n_steps)
    config, mesh = build_mesh(config, reporter.note)
    is_main = jax.process_index() == 0
    reporter.console.quiet = not is_main
    with together("model.data"):
        tokenizer = config_tokenizer(config)
        data = build_datasets(config, tokenizer)
    program = build_program(config, mesh, config.model.vocab_size or tokenizer.vocab_size)
    check = functools.partial(check_old_files, config.exp_manager)
    with memory_errors(config), RunFolder(config.run_folder, writer=is_main, agree=as_process_0, check=check) as folder:
        return Run(config, program, data, tokenizer, folder, reporter).run()


class Run:
    """One start of a run: what its steps share.

    Args:
        config: validated, with a number of devices.
        program: of `jzero.train.step.build_program`.
        data: the datasets by split, of `jzero.data.loader.build_datasets`.
        tokenizer: for the text at the end.
        folder: the run folder, entered.
        report: what the user sees.
    """

    def __init__(self, config: Config, program: Any, data: Any, tokenizer: Any, folder: RunFolder, report: Reporter):
        self.config, self.program, self.tokenizer = config, program, tokenizer
        self.folder, self.report = folder, report
        self.batch_size = config.model.global_batch_size
        self.rows = program.local_rows(self.batch_size)
        self.train_data, self.val_data, self.val_batches = data["train"], *validation(config, data["validation"])
        self.on_cpu = program.mesh.devices.flat[0].platform == "cpu"
        self.in_flight: deque[tuple[int, Record, float]] = deque()  # (step, metrics on the device, when it was given)
        self.done_at = 0.0
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.val_step = 0  # of the last evaluation
        self.spoiled: int | None = None  # the first step whose loss or gradient was not finite
        self.metrics: Metrics | None = None
        report.note(f"run folder: {folder.path}")
        self.checkpoints = open_checkpoints(config, folder.path, report.note, program.layout.plan)
        try:
            self.state, self.step = self._restore_or_init()
            jax.block_until_ready(self.state)
            self.metrics = open_metrics(config, folder, self.step)
        except BaseException:
            self._abandon()
            raise

    def run(self) -> TrainResult:
        """Everything from the table to the text."""
        try:
            if self.folder.writer:
                with disk_errors(f"run {self.folder.path}"):
                    write_atomic(self.folder.path / "config.yaml", to_yaml(self.config))
            self.report.table(self.program.summary())
            if self.step >= self.config.trainer.max_steps:
                self.report.note(f"already finished: step {self.step} is the last; a larger trainer.max_steps goes on")
            with StopSignals() as stop:
                with self.report:
                    self._steps(stop)
                stopped = stop.seen  # from here on a signal changes nothing: the last checkpoint is being written
                sample = None if stopped else self._sample()
                self._finish()
            if not stopped:
                self._say_goodbye()
        except BaseException:
            self._abandon()
            raise
        return TrainResult(
            run=self.folder.path,
            step=self.step,
            loss=self.loss,
            val_loss=self.val_loss,
            stopped=stopped,
            sample=sample,
            state=self.state,
            program=self.program,
        )

    def _restore_or_init(self) -> tuple[Any, int]:
        """The state and the number of steps it has behind it."""
        model = plain(self.config.model)
        restored = self.checkpoints and self.checkpoints.restore(self.program.abstract, model)
        if not restored:
            if (self.folder.path / "metrics.jsonl").exists():
                self.report.note(f"no checkpoint in {self.folder.path}: starting again from step 0")
            if self.config.model.restore_from_path is None:
                return self.program.init(), 0
            vocab_size = self.config.model.vocab_size or self.tokenizer.vocab_size
            return self.program.start(initial_values(self.config, self.program, vocab_size, self.report.note)), 0
        state, record = restored
        for line in what_changed(record, self.config):
            self.report.note(line)
        self.val_loss, self.val_step = record["val_loss"], record["val_step"]
        return state, record["step"]

    # --- steps -------------------------------------------------------------------------------------------------------

    def _steps(self, stop: StopSignals) -> None:
        """Steps, evaluations and checkpoints until `max_steps` or a signal."""
        trainer = self.config.trainer
        self._evaluate_if_due(stop)  # the signal that stopped the run may have cut this evaluation short
        data = batches(
            self.train_data,
            batch_size=self.batch_size,
            start_step=self.step,
            rows=self.rows,
            num_workers=self.config.model.data.num_workers,
        )
        try:
            while self.step < trainer.max_steps and not stop.at(self.step):
                self._one_step(next(data))
                self._evaluate_if_due(stop)
                self._save_if_due(stop)
        finally:
            data.close()
        self._drain(0)
        if stop.seen:
            saved = self._save()
            then = "and saved; the same command continues from there" if saved else "without a checkpoint"
            self.report.note(f"stopped after step {self.step} {then}")

    def _one_step(self, batch: dict[str, Any]) -> None:
        started = time.perf_counter()
        placed = self.program.place(batch)
        self.state, metrics = self.program.step(self.state, placed)
        self.step += 1
        self.in_flight.append((self.step, metrics, started))
        if self.on_cpu:  # several steps in flight starve the threads of the virtual devices
            jax.block_until_ready(self.state)
        self._drain(0 if self.on_cpu or self.step == 1 else 1)
        every = self.config.trainer.log_fp8_every_n_steps
        if every and self.step % every == 0:
            self._drain(0)
            found = self.program.layout.scaling.named(self.program.observe(self.state, placed))
            self._record({"step": self.step, **found})

    def _drain(self, keep: int) -> None:
        """Records the steps in flight, oldest first, until `keep` are left; waits for them."""
        tokens = self.batch_size * self.config.model.encoder_seq_length
        while len(self.in_flight) > keep:
            step, metrics, started = self.in_flight.popleft()
            values = {name: float(metrics[name]) for name in ("loss", "grad_norm", "lr")}
            now = time.perf_counter()
            seconds = now - max(started, self.done_at)
            self.done_at = now
            self.loss = values["loss"]
            record = {"step": step, **values, "step_time_s": seconds, "tokens_per_s": tokens / seconds}
            self._record(record)
            self.report.step(record)
            self._check_finite(record)

    def _record(self, record: Record) -> None:
        if self.metrics:
            with disk_errors(f"run {self.folder.path}"):
                self.metrics.write(record)
        self.folder.keep()

    def _evaluate_if_due(self, stop: StopSignals) -> None:
        trainer = self.config.trainer
        due = self.step > 0 and (self.step % trainer.val_check_interval == 0 or self.step == trainer.max_steps)
        if not due or not self.val_batches or self.val_step == self.step:
            return
        self._drain(0)
        sums = []
        data = batches(self.val_data, batch_size=self.batch_size, rows=self.rows)
        try:
            for _ in range(self.val_batches):
                sums.append(self._evaluate(next(data)))
                if self.on_cpu:
                    jax.block_until_ready(sums[-1])
                if stop.at_once:
                    return
        finally:
            data.close()
        self.val_step, measured = self.step, means(sums)
        self.val_loss = measured["val_loss"]
        record = {"step": self.step, **measured}
        self._record(record)
        self.report.evaluation(record)
        self._check_finite(record)

    def _evaluate(self, batch: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        return self.program.measure(self.state.params, self.program.place(batch), self.state.fp8)

    def _check_finite(self, record: Record) -> None:
        """Ends the run, or warns once, where a number says that the parameters are spoiled from here on.

        Before the next checkpoint: it would take the place of the last good one.
        """
        names = [name for name in ("loss", "grad_norm", "val_loss") if not math.isfinite(record.get(name, 0.0))]
        if not names or self.spoiled:
            return
        found = " and ".join(f"{name} {record[name]}" for name in names)
        if self.config.trainer.skip_nonfinite and not math.isfinite(record.get("grad_norm", 0.0)):
            self.report.warn(f"step {record['step']}: expected finite numbers, found {found}; the update was skipped")
            return
        self.spoiled = record["step"]
        last = self.checkpoints.steps[-1:] if self.checkpoints else []
        kept = f"the last checkpoint is of step {last[0]}" if last else "there is no checkpoint"
        happened = f"step {self.spoiled}: expected finite numbers, found {found}"
        if not self.config.trainer.terminate_on_nan:
            self.report.warn(
                f"{happened}; the update was applied and has spoiled the parameters; training on without saving "
                f"({kept})"
            )
            return
        raise JzeroError(
            f"{happened}; the update was applied and has spoiled the parameters, {kept}; the same settings would come "
            "here again: lower model.optim.lr, lengthen model.optim.sched.warmup_steps or change model.seed "
            "(trainer.terminate_on_nan=false trains on)"
        )

    # --- checkpoints and the end -------------------------------------------------------------------------------------

    def _save_if_due(self, stop: StopSignals) -> None:
        every = self.config.exp_manager.checkpoint.every_n_steps
        if not stop.seen and (self.step % every == 0 or self.step == self.config.trainer.max_steps):
            self._drain(0)
            self._save()

    def _save(self) -> bool:
        """Saves a checkpoint, if this state is worth one; returns whether there is one of it."""
        if self.checkpoints is None or self.spoiled:
            return False
        if self.step in self.checkpoints.steps:
            return True
        record = {
            **to_resume(self.config, self.step),
            "samples": self.step * self.batch_size,
            "val_loss": self.val_loss,
            "val_step": self.val_step,
        }
        measured = self.val_loss if self.val_step == self.step else None  # of other parameters: says nothing of these
        self.checkpoints.save(self.step, self.state, record, val_loss=measured)
        return True

    def _sample(self) -> str | None:
        options = self.config.generate
        if not options.tokens:
            return None
        if self.config.model.type == "bert":
            if MASK not in options.prompt:
                return None
            text = fill(self.program, self.state.params, self.tokenizer, options.prompt)
            self.report.note(f"\n{options.prompt}\n{text}\n")
            return text
        text = generate(
            self.program,
            self.state.params,
            self.tokenizer,
            options.prompt,
            tokens=options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=self.config.model.seed,
            fp8=self.state.fp8,
        )
        self.report.note(f"\n{text}\n")
        return text

    def _finish(self) -> None:
        if self.checkpoints:
            self.checkpoints.close()
        if self.metrics:
            self.metrics.close()

    def _say_goodbye(self) -> None:
        measured = "" if self.val_loss is None else f" with val_loss {self.val_loss:.4f}"
        use = ""
        if self.checkpoints and self.checkpoints.steps:
            prompt = shlex.quote(self.config.generate.prompt)
            use = f"; more: jzero generate {shlex.quote(str(self.folder.path))} --prompt {prompt}"
        self.report.note(f"finished after step {self.step}{measured}{use}")

    def _abandon(self) -> None:
        """Closes what is open after an error, which is the one to be seen, not its consequences."""
        for resource in (self.checkpoints, self.metrics):
            with contextlib.suppress(Exception):
                if resource:
                    resource.close()
