"""Every layout that makes sense, compiled in parallel processes and ranked by estimated tokens/s among those that fit.

Results are kept, one line of JSON each, as soon as they are known; a sweep that was stopped continues with the rest.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jzero.errors import JzeroError
from jzero.plan import targets
from jzero.plan.layouts import KEYS, Layout, layouts
from jzero.plan.planner import on_devices
from jzero.plan.worker import Worker, WorkerError
from jzero.train.config import Config, to_yaml

SKIPPED = "skipped"
"""The error of an outcome whose layout needs no less memory than one that does not fit."""

ABORTED = "the compiler ended"
"""How the error of an outcome begins whose process died."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one layout.

    Attributes:
        layout: what was tried.
        numbers: of the report: step_ms, exposed_ms, tokens_per_second, mfu, peak, limit, fits, ...; {} if it failed.
        error: why there are no numbers, or `SKIPPED`.
    """

    layout: Layout
    numbers: dict[str, Any]
    error: str = ""

    @property
    def fits(self) -> bool:
        """Whether it was compiled and fits."""
        return bool(self.numbers.get("fits"))

    @property
    def speed(self) -> float:
        """Estimated tokens/s; 0 where it does not fit."""
        return self.numbers["tokens_per_second"] if self.fits else 0.0


def sweep(
    config: Config,
    target: str,
    devices: int | None = None,
    hosts: int | None = None,
    *,
    fixed: Iterable[str] = (),
    results: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Outcome]:
    """Plan all layouts of a configuration.

    Args:
        config: the run; its policy, micro-batch, checkpointing, accumulation and replicas are tried out.
        target: the GPU.
        devices, hosts: None: what the configuration says.
        fixed: keys that keep the configuration's value, such as "model.micro_batch_size".
        results: file that keeps what is known; None: one in the user's cache, named after everything that matters.
        workers: processes at a time; None: one per core.
        progress: called with the numbers of layouts that are done and of all.

    Returns:
        The outcomes, best first; those that do not fit or failed last.

    Raises:
        JzeroError: unknown target, no GPU compiler, a configuration that contradicts itself, a file of another sweep.
    """
    targets.find(target)
    targets.require()
    if KEYS["micro_batch_size"] not in (fixed := set(fixed)):  # the configuration's own need not suit the devices
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, micro_batch_size=1))
    config = on_devices(config, devices, hosts)
    job = _Job(config, target, Path(results) if results is not None else _cache(config, target))
    outcomes = job.run(layouts(config, fixed), workers or os.cpu_count() or 1, progress)
    return sorted(outcomes, key=lambda o: (-o.speed, not o.numbers, o.layout))


class _Job:
    def __init__(self, config: Config, target: str, results: Path):
        self.config, self.target, self.results = config, target, results
        self.stamp = _stamp(config, target)

    def run(self, todo: list[Layout], count: int, progress: Callable[[int, int], None]) -> list[Outcome]:
        known = self.read()
        done = [known[layout] for layout in todo if layout in known]
        waiting = [layout for layout in todo if layout not in known]
        progress(len(done), len(todo))
        trainer = self.config.trainer
        with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(count) as pool:
            path = Path(folder) / "config.yaml"
            path.write_text(to_yaml(self.config), encoding="utf-8")
            arguments = [str(path), self.target, str(self.config.num_devices), str(trainer.num_nodes)]
            workers = [Worker(arguments) for _ in range(count)]
            try:
                self.all(waiting, done, pool, workers, lambda: progress(len(done), len(todo)))
            finally:
                for worker in workers:
                    worker.close()
        return done

    def all(self, waiting: list[Layout], done: list[Outcome], pool, workers: list[Worker], progress) -> None:
        """Hands layouts to idle workers until none is left."""
        idle = list(workers)
        running: dict[concurrent.futures.Future[Outcome], Worker] = {}
        while waiting or running:
            while waiting and idle:
                layout = waiting.pop(0)
                if any(o.numbers and not o.fits and layout.needs_no_less_than(o.layout) for o in done):
                    done.append(Outcome(layout, {}, SKIPPED))
                else:
                    worker = idle.pop()
                    running[pool.submit(self.one, worker, layout)] = worker
            for future in concurrent.futures.wait(running, return_when="FIRST_COMPLETED").done:
                idle.append(running.pop(future))
                done.append(future.result())
                if not done[-1].error.startswith(ABORTED):  # memory may be short for once: try it again next time
                    self.write(done[-1])
            progress()

    def one(self, worker: Worker, layout: Layout) -> Outcome:
        try:
            numbers = worker.ask(layout.overrides)
        except WorkerError as error:
            return Outcome(layout, {}, f"{ABORTED} {error}")
        return Outcome(layout, {}, numbers["error"]) if "error" in numbers else Outcome(layout, numbers)

    # --- the file of results -----------------------------------------------------------------------------------------

    def read(self) -> dict[Layout, Outcome]:
        """What the file knows; a last line that was cut off is dropped."""
        if not self.results.exists():
            return {}
        lines = self.results.read_text(encoding="utf-8").splitlines()
        try:
            stamp = json.loads(lines[0])["sweep"] if lines else self.stamp
        except (json.JSONDecodeError, KeyError, TypeError):
            stamp = None
        if stamp != self.stamp:
            raise JzeroError(
                f"{self.results}: expected the results of this sweep, found those of another configuration, target or "
                "version; name another file with --results"
            )
        found = {}
        for line in lines[1:]:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            layout = Layout(**row["layout"])
            found[layout] = Outcome(layout, row["numbers"], row["error"])
        return found

    def write(self, outcome: Outcome) -> None:
        """Adds one line."""
        self.results.parent.mkdir(parents=True, exist_ok=True)
        new = not self.results.exists()
        with self.results.open("a", encoding="utf-8") as file:
            if new:
                file.write(json.dumps({"sweep": self.stamp}) + "\n")
            file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")


def _stamp(config: Config, target: str) -> str:
    """A hash of all that the numbers depend on: configuration, target, compiler, and jzero's own source."""
    digest = hashlib.sha256()
    for part in (to_yaml(config), target, version("jaxlib"), str(targets.cudnn_available())):
        digest.update(part.encode() + b"\0")
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cache(config: Config, target: str) -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(home) if home else Path.home() / ".cache") / "jzero" / "plan"
    return folder / f"{config.exp_manager.name}-{target}-{config.num_devices}-{_stamp(config, target)}.jsonl"
