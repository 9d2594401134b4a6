"""What a run says while it runs: a table before the first step, then a bar, or plain lines without a terminal."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the process here; the command line does, after the run has closed its files."""
        raise BrokenPipeError


class Reporter:
    """Prints for one run; a context manager around its steps.

    Args:
        total: the last step of the run.
        every: steps between two plain lines, where there is no bar.
        console: where to; default: standard output.

    Example:
        >>> with Reporter(total=20, every=10) as report:
        ...     report.step({"step": 10, "loss": 2.5, "lr": 1e-3, "step_time_s": 0.5, "tokens_per_s": 2000.0})
        step 10/20 · loss 2.5000 · lr 1.0e-03 ·  2,000 tokens/s · 0:00:05 left
    """

    def __init__(self, *, total: int, every: int = 10, console: Console | None = None):
        self.console = console or _Console(highlight=False)
        self._total = total
        self._every = every
        self._times: deque[float] = deque(maxlen=20)
        self._compiled = False  # the first step's time is no guide to the others
        self._val: list[str] = []
        live = self.console.is_terminal or self.console.is_jupyter
        columns = (
            TextColumn("{task.completed}/{task.total}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None),  # what room the others leave
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        )
        self._bar = Progress(*columns, console=self.console, expand=True) if live else None
        self._task = None if self._bar is None else self._bar.add_task("compiling", total=total)

    def __enter__(self) -> Reporter:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._bar:
            self._bar.stop()

    def note(self, text: str) -> None:
        """Prints one line."""
        self.console.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Prints one line that should not be overlooked."""
        self.console.print(f"warning: {text}", style="bold yellow", markup=False, soft_wrap=True)

    def table(self, rows: Iterable[tuple[str, str]]) -> None:
        """Prints a table of two columns."""
        table = Table(show_header=False)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def step(self, record: dict[str, Any]) -> None:
        """Shows the record of a step, as it stands in metrics.jsonl."""
        if self._times and not self._compiled:
            self._times.clear()
            self._compiled = True
        self._times.append(record["step_time_s"])
        left = timedelta(seconds=round(statistics.median(self._times) * (self._total - record["step"])))
        parts = [f"loss {record['loss']:.4f}", *self._val, f"lr {record['lr']:.1e}"]
        speed = f"{record['tokens_per_s']:,.0f}"
        if self._bar and self._task is not None:
            text = " ".join([*parts, f"{speed} tok/s", f"ETA {left}"])  # fits 80 columns
            self._bar.update(self._task, completed=record["step"], description=text)
        elif record["step"] % self._every == 0 or record["step"] == self._total:
            self.note(" · ".join([self._place(record), *parts, f"{speed:>6} tokens/s", f"{left} left"]))

    def _place(self, record: dict[str, Any]) -> str:
        return f"step {record['step']:>{len(str(self._total))}}/{self._total}"

    def evaluation(self, record: dict[str, Any]) -> None:
        """Shows the record of an evaluation."""
        self._val = [f"val {record['val_loss']:.4f}"]
        if not self._bar:
            others = [f"{name} {record[name]:.4f}" for name in record if name not in ("step", "val_loss")]
            self.note(" · ".join([self._place(record), f"val_loss {record['val_loss']:.4f}", *others]))
