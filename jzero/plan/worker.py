"""A process that plans layouts: `python -m jzero.plan.worker CONFIG TARGET DEVICES HOSTS`.

Reads one list of overrides per line, as JSON, and answers each with one line of JSON. A process of its own, since a
compiler that aborts takes its process along.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

KEPT = ("step_ms", "exposed_ms", "copies_ms", "tokens_per_second", "mfu", "compile_seconds")
KEPT_OF_MEMORY = ("parameters", "optimizer", "temporaries", "peak", "limit", "fits")


class WorkerError(Exception):
    """The process ended instead of answering."""


@dataclasses.dataclass
class Worker:
    """A worker as its parent sees it; starts when it is first asked, and again after it died.

    Attributes:
        arguments: of the process: configuration file, target, numbers of devices and hosts.
    """

    arguments: Sequence[str]
    _process: subprocess.Popen[str] | None = None
    _log: IO[bytes] | None = None

    def ask(self, overrides: Sequence[str]) -> dict[str, Any]:
        """The numbers of a layout, or {"error": ...}.

        Raises:
            WorkerError: the process ended; with its code and last line.
        """
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(list(overrides)) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return json.loads(answer)
        code, last = process.wait(), self._last_line()
        self.close()
        raise WorkerError(f"with {code}: {last}")

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        if self._log is not None:
            self._log.close()
        self._process = self._log = None

    def _start(self) -> subprocess.Popen[str]:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        command = [sys.executable, "-m", "jzero.plan.worker", *self.arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": _path()},
        )
        return self._process

    def _last_line(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "no output"


def _path() -> str:
    """So that the child finds this very package, also where it is not installed."""
    here = str(Path(__file__).parents[2])
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))


def main(argv: Sequence[str]) -> None:
    """Answer until there are no more questions.

    Args:
        argv: a configuration file, a target, numbers of devices and hosts.
    """
    path, target, devices, hosts = argv
    from jzero.errors import JzeroError
    from jzero.plan import plan
    from jzero.train.config import load_config

    answers, sys.stdout = sys.stdout, sys.stderr  # whatever is printed meanwhile is no answer
    for line in sys.stdin:
        try:
            found = plan(load_config(path, json.loads(line)), target, int(devices), int(hosts)).json()
            answer = {key: found[key] for key in KEPT} | {key: found["memory"][key] for key in KEPT_OF_MEMORY}
        except JzeroError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
