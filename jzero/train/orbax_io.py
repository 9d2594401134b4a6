"""Around Orbax: which checkpoints it keeps, and how its failures are made quiet and complete."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from jzero.train.record import UnreadableError

# Orbax logs the traceback of every failed thread; each of those failures is raised here as well, as one line. It logs
# through the logger "absl", which others share and keep.
logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)


def reading(read: Callable[[], Any], what: str) -> Any:
    """Calls `read`; whatever a damaged checkpoint makes Orbax raise becomes UnreadableError about `what`."""
    with no_echo():
        try:
            return read()
        except (jax.errors.JaxRuntimeError, MemoryError):  # a device's trouble, not the file's
            raise
        except Exception:
            pass  # its text speaks of handlers and drivers, whatever the damage is
        time.sleep(0.1)  # other coroutines of the same read are still failing in Orbax's threads
        gc.collect()
    raise UnreadableError(f"{what} cannot be read back")


def join_threads(but: set[threading.Thread], seconds: float = 5.0) -> None:
    """Waits for the threads that started since `but` was all there were.

    When a write fails, Orbax leaves the other writes of the same save under way, and they would make files again.
    """
    deadline = time.monotonic() + seconds
    with no_echo():
        for thread in set(threading.enumerate()) - but:
            thread.join(max(0.0, deadline - time.monotonic()))


@contextmanager
def no_echo() -> Iterator[None]:
    """Keeps quiet the coroutines that Orbax leaves behind, each of which reports the same failure once more."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        sys.unraisablehook = hook


class Keep:
    """Orbax's question which checkpoints stay: the last few, and the best few by validation loss.

    Args:
        top_k: how many of the best (-1: all that have a loss).
        last_k: how many of the newest.
        loss: the validation loss of a step, or None.
    """

    def __init__(self, top_k: int, last_k: int, loss: Callable[[int], float | None]):
        self._top_k, self._last_k, self._loss = top_k, last_k, loss

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """For each checkpoint, oldest first, whether it stays."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = best_first(steps, self._loss)
        stay = {*(best if self._top_k < 0 else best[: self._top_k]), *steps[-self._last_k :]}
        return [step in stay for step in steps]


def best_first(steps: Sequence[int], loss: Callable[[int], float | None]) -> list[int]:
    """Those of the steps that have a validation loss, best first (the later one of two equal ones first).

    Example:
        >>> best_first([1, 2, 3, 4], {1: 2.0, 2: None, 3: 1.0, 4: 2.0}.get)
        [3, 4, 1]
    """
    losses = {step: loss(step) for step in steps}
    return sorted((s for s in steps if losses[s] is not None), key=lambda s: (losses[s], -s))
