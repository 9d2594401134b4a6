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

# Orbax logs the traceback of every failed thread; each of those failures is raised here as well, as one line. It logs
# through the logger "absl", which others share and keep.
logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)


class UnreadableError(Exception):
    """A checkpoint whose files cannot be read back as they were written."""


def reading(read: Callable[[], Any]) -> Any:
    """Calls `read`; whatever a damaged checkpoint makes Orbax raise becomes UnreadableError."""
    with no_echo():
        try:
            return read()
        except (jax.errors.JaxRuntimeError, MemoryError):  # a device's trouble, not the file's
            raise
        except Exception as error:
            why = " ".join(str(error).split())[:120]
        time.sleep(0.1)  # other coroutines of the same read are still failing in Orbax's threads
        gc.collect()
    raise UnreadableError(why)


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
    """Orbax's question which checkpoints stay: the last few, and the best few by validation loss."""

    def __init__(self, top_k: int, last_k: int):
        self._top_k, self._last_k = top_k, last_k

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """For each checkpoint, oldest first, whether it stays."""
        best = sorted((c.metrics["val_loss"], -c.step) for c in checkpoints if c.metrics)
        stay = {-step for _, step in (best if self._top_k < 0 else best[: self._top_k])}
        stay.update(c.step for c in checkpoints[-self._last_k :])
        return [c.step in stay for c in checkpoints]
