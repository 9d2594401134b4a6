"""What a run measured: `metrics.jsonl`, one JSON object per line, and the same numbers for TensorBoard.

A line is `{"step", "loss", "grad_norm", "lr", "step_time_s", "tokens_per_s"}` after a step and `{"step", "val_loss"}`
after an evaluation, with whatever else the kind of model measures ("val_lm_accuracy"). Every line is handed to the
system as it is written, so a killed process loses at most the line it was writing. When a run continues from a
checkpoint, the lines after the checkpoint's step are cut: each step stands there once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboardX import RecordWriter
from tensorboardX.proto import event_pb2, summary_pb2

from jzero.train.files import write_atomic

Record = dict[str, Any]


def means(sums: Sequence[dict[str, tuple[Any, Any]]]) -> Record:
    """What an evaluation says, from what each of its batches gave: "val_loss" first.

    Args:
        sums: per batch and name of a mean, its sum and number of terms, as `jzero.train.step.Program.measure` gives it.

    Returns:
        The means, their names with "val_" in front. "val_loss" is the sum of all that end in "loss".

    Example:
        >>> means([{"lm_loss": (6.0, 2), "nsp_loss": (1.0, 2)}, {"lm_loss": (3.0, 1), "nsp_loss": (0.0, 0)}])
        {'val_loss': 3.5, 'val_lm_loss': 3.0, 'val_nsp_loss': 0.5}
    """
    found = {}
    for name in sums[0]:
        total, count = (sum(float(batch[name][i]) for batch in sums) for i in range(2))
        found[f"val_{name}"] = total / max(count, 1.0)
    return {"val_loss": sum(value for name, value in found.items() if name.endswith("loss")), **found}


def read_metrics(path: Path) -> list[Record]:
    """The lines of a `metrics.jsonl`, up to the first that is not whole (a process was killed while it wrote it).

    Args:
        path: the file; a missing one has no lines.

    Returns:
        One dict per line, in file order.

    Example:
        >>> read_metrics(Path("no-such-run/metrics.jsonl"))
        []
    """
    return [record for record, _ in _whole_lines(path)]


def cut_metrics(path: Path, after_step: int) -> list[Record]:
    """Rewrites a `metrics.jsonl` without the steps after `after_step` and without a half-written line.

    The new file replaces the old one in one move; a file that needs no change is not touched.

    Returns:
        The lines that stay.
    """
    if not path.exists():
        return []
    kept = [(record, line) for record, line in _whole_lines(path) if record["step"] <= after_step]
    text = "".join(line for _, line in kept)
    if text != path.read_text(encoding="utf-8", errors="replace"):
        write_atomic(path, text)
    return [record for record, _ in kept]


def _whole_lines(path: Path) -> list[tuple[Record, str]]:
    lines = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break
            if not line.endswith("\n") or not isinstance(record, dict) or not isinstance(record.get("step"), int):
                break
            lines.append((record, line))
    return lines


# protobuf makes these classes when it is imported, so a type checker does not see them
Event: Any = vars(event_pb2)["Event"]
SessionLog: Any = vars(event_pb2)["SessionLog"]
Summary: Any = vars(summary_pb2)["Summary"]


class Metrics:
    """Writes the metrics of one run: `metrics.jsonl` always, TensorBoard's event files if asked.

    Args:
        folder: the run folder.
        after_step: the step the run continues from; later lines are cut (0: a new run).
        tensorboard: also write `folder/tensorboard`. There, later points of an earlier process are marked as purged.
        tensorboard_every: steps between two points of TensorBoard.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> metrics = Metrics(folder, after_step=0, tensorboard=False)
        >>> metrics.write({"step": 1, "loss": 5.5})
        >>> metrics.close()
        >>> read_metrics(folder / "metrics.jsonl")
        [{'step': 1, 'loss': 5.5}]
    """

    def __init__(self, folder: Path, *, after_step: int, tensorboard: bool = True, tensorboard_every: int = 1):
        self.path = folder / "metrics.jsonl"
        cut_metrics(self.path, after_step)
        self._file = self.path.open("ab", buffering=0)
        self._size = self.path.stat().st_size
        self._every = tensorboard_every
        self._events = Events(folder / "tensorboard", purge_step=after_step + 1) if tensorboard else None

    def write(self, record: Record) -> None:
        """Appends one line, whole or not at all. A number that is not finite is written as null, as JSON has none."""
        line = json.dumps({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()})
        data = line.encode() + b"\n"
        try:
            written = self._file.write(data)
            if written != len(data):
                self._file.write(data[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, self._size)
            raise
        self._size += len(data)
        if self._events and ("val_loss" in record or record["step"] % self._every == 0):
            self._events.write(record)

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        if self._events:
            self._events.close()


class Events:
    """One event file of TensorBoard, written in the calling thread, so that a full disk is an error here and now.

    (`tensorboardX.SummaryWriter` writes from a thread that dies silently and then blocks the caller.)

    Args:
        folder: where TensorBoard looks.
        purge_step: TensorBoard hides points of earlier files from this step on.
    """

    def __init__(self, folder: Path, *, purge_step: int):
        folder.mkdir(exist_ok=True)
        now = time.time()
        self._writer = RecordWriter(str(folder / f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"))
        self._put(Event(wall_time=now, file_version="brain.Event:2"))
        self._put(Event(wall_time=now, step=purge_step, session_log=SessionLog(status=SessionLog.START)))
        self._writer.flush()

    def write(self, record: Record) -> None:
        """Writes every number of a record except its step as a scalar of that name."""
        values = [Summary.Value(tag=key, simple_value=value) for key, value in record.items() if key != "step"]
        self._put(Event(wall_time=time.time(), step=record["step"], summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _put(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
