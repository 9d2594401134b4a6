"""Ending a run on request: SIGTERM or Ctrl-C is remembered, and the loop asks between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

import jax
from jax.experimental import multihost_utils


class StopSignals:
    """While entered, SIGTERM and the first SIGINT set `seen`; a second SIGINT interrupts as usual.

    On several hosts the signal (SIGTERM only) reaches whichever host it was sent to, and all must stop after the same
    step: JAX's preemption service agrees on one, and `at` is true there on every host.

    Example:
        >>> with StopSignals() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.at(7), stop.seen
        (True, True)
    """

    def __init__(self) -> None:
        self.seen = False
        self._many = jax.process_count() > 1
        self._before: dict[int, object] = {}

    @property
    def at_once(self) -> bool:
        """Whether this process may leave what it is doing now, without asking the others."""
        return self.seen and not self._many

    def at(self, step: int) -> bool:
        """Whether to stop after `step`; to be asked once after every step."""
        if self._many and multihost_utils.reached_preemption_sync_point(step):
            self.seen = True
        return self.seen

    def __enter__(self) -> StopSignals:
        # With several hosts the preemption service has the handler of SIGTERM.
        if not self._many and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: something other than Python had set it, and Python cannot give it back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
