"""`jzero plan`: what the command does with its arguments."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jzero.errors import JzeroError
from jzero.plan.advice import helps, measured
from jzero.plan.planner import described, plan
from jzero.plan.result import Report
from jzero.plan.search import SKIPPED, Outcome, sweep
from jzero.plan.table import layout_table
from jzero.train.config import Config, load_config, to_yaml

GIB = 2**30


def run(arguments: argparse.Namespace) -> None:
    """Plan, and print or write what was asked for.

    Args:
        arguments: config, overrides, target, devices, hosts, layout, json, hlo, quick, sweep, results, workers, write.
    """
    with contextlib.suppress(RuntimeError):  # JAX is in use already: leave it
        if not jax.config.jax_platforms:  # type: ignore[attr-defined]  JAX adds it at run time
            jax.config.update("jax_platforms", "cpu")  # a GPU of this machine is not touched
    for path in (arguments.json, arguments.hlo, arguments.write):  # before minutes of compiling
        if path and path != "-" and not Path(path).absolute().parent.is_dir():
            raise JzeroError(f"{path}: expected a file in a folder that exists, found none; make the folder first")
    config = load_config(arguments.config, arguments.overrides)
    if arguments.layout:
        if other := next(
            (name for name in ("sweep", "hlo", "quick", "write", "results", "workers") if getattr(arguments, name)),
            None,
        ):
            raise JzeroError(f"plan: --layout compiles nothing, so --{other} cannot apply; leave one of them out")
        _layout(arguments, config)
    elif arguments.sweep:
        _sweep(arguments, config)
    elif arguments.write or arguments.results:
        raise JzeroError("plan: --write and --results belong to --sweep; add it")
    else:
        _plan(arguments, config)


def _plan(arguments: argparse.Namespace, config: Config) -> None:
    with _status(f"compiling for {arguments.target}"):
        report = plan(config, arguments.target, arguments.devices, arguments.hosts)
    if not arguments.quick:
        report = _try_advice(arguments, report)
    if arguments.hlo:
        _write(arguments.hlo, report.text)
    if arguments.json == "-":
        print(json.dumps(report.json(), indent=1))
        return
    if arguments.json:
        _write(arguments.json, json.dumps(report.json(), indent=1) + "\n")
    _console().print(report)


def _layout(arguments: argparse.Namespace, config: Config) -> None:
    """Which parameter lives where."""
    from jzero.train.placement import placements  # imports Flax

    config, program, _ = described(config, arguments.target, arguments.devices, arguments.hosts)
    rows = placements(program)
    text = json.dumps([row._asdict() for row in rows], indent=1)
    if arguments.json == "-":
        print(text)
        return
    if arguments.json:
        _write(arguments.json, text + "\n")
    axes = " × ".join(f"{name} {size}" for name, size in config.mesh_shape.items() if size > 1) or "one device"
    title = f"{config.exp_manager.name}, {config.policy}, {axes}: which parameter lives where"
    _console().print(layout_table(rows, title))


def _try_advice(arguments: argparse.Namespace, report: Report) -> Report:
    """The report, its advice with the numbers of the changed steps; what does not help is only told."""
    advice, notes = [], list(report.notes)
    for one in report.advice:
        if one.overrides:
            keys = " ".join(one.overrides)
            try:
                with _status(f"compiling with {keys}"):
                    changed = load_config(arguments.config, [*arguments.overrides, *one.overrides])
                    after = plan(changed, arguments.target, arguments.devices, arguments.hosts)
            except JzeroError:
                continue  # not with this configuration
            one = measured(one, report, after)
            if not helps(report, after):
                notes.append(f"tried without gain: {keys} ({one.effect})")
                continue
        advice.append(one)
    return dataclasses.replace(report, advice=advice, notes=notes)


def _sweep(arguments: argparse.Namespace, config: Config) -> None:
    fixed = [override.partition("=")[0] for override in arguments.overrides]
    columns = (TextColumn("planning"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("planning")
        outcomes = sweep(
            config,
            arguments.target,
            arguments.devices,
            arguments.hosts,
            fixed=fixed,
            results=arguments.results,
            workers=arguments.workers,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if arguments.json:
        rows = [dataclasses.asdict(o) | {"overrides": o.layout.overrides} for o in outcomes]
        _write(arguments.json, json.dumps(rows, indent=1) + "\n")
    _console().print(ranking(outcomes))
    best = next((o for o in outcomes if o.fits), None)
    if best is None:
        raise JzeroError(f"plan: none of {len(outcomes)} layouts fits on {arguments.target}; use more devices")
    if arguments.write:
        path = arguments.write
        _write(path, _best_yaml(arguments, best))
        _console().print(f"\nwrote {path}")


def _best_yaml(arguments: argparse.Namespace, best: Outcome) -> str:
    sizes = []
    if arguments.devices:
        hosts = arguments.hosts or load_config(arguments.config, arguments.overrides).trainer.num_nodes
        sizes = [f"trainer.devices={arguments.devices // hosts}", f"trainer.num_nodes={hosts}"]
    config = load_config(arguments.config, [*arguments.overrides, *sizes, *best.layout.overrides])
    n, name = best.numbers, Path(arguments.config).name
    return (
        f"# The best layout of {name} that `jzero plan --sweep --target {arguments.target}` found. Estimated:\n"
        f"# {n['tokens_per_second']:,.0f} tokens/s, step {n['step_ms']:,.1f} ms, peak {n['peak'] / GIB:,.1f} GiB.\n"
        f"{to_yaml(config)}"
    )


def ranking(outcomes: list[Outcome], rows: int = 15) -> Table:
    """The best outcomes as a table; what does not fit is counted."""
    errors = [o.error for o in outcomes if not o.numbers and o.error != SKIPPED]
    skipped = sum(1 for o in outcomes if o.error == SKIPPED)
    large = sum(1 for o in outcomes if o.numbers and not o.fits)
    fitting = [o for o in outcomes if o.fits]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), caption_justify="left")
    table.caption = (
        f"{len(outcomes)} layouts: {len(fitting)} fit, {large} do not, {skipped} need more than one of those"
        + (f", {len(errors)} failed ({errors[0]})" if errors else "")
    )
    for column in ("policy", "micro-batch", "checkpointing", "accumulation", "replica", "tensor", "pipeline"):
        words = column in ("policy", "checkpointing", "accumulation")
        table.add_column(column, justify="left" if words else "right")
    for column in ("tokens/s", "step ms", "exposed %", "MFU %", "peak GiB"):
        table.add_column(column, justify="right")
    for o in fitting[:rows]:
        n, layout = o.numbers, o.layout
        cells = (
            f"{n['tokens_per_second']:,.0f}",
            f"{n['step_ms']:,.1f}",
            f"{100 * n['exposed_ms'] / n['step_ms']:.1f}",
            f"{100 * n['mfu']:.1f}",
            f"{n['peak'] / GIB:.1f}",
        )
        chosen = (layout.policy, str(layout.micro_batch_size), layout.granularity or "none", layout.accumulation)
        table.add_row(*chosen, str(layout.replica), str(layout.tensor), str(layout.pipeline), *cells)
    return table


def _write(path: str | Path, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise JzeroError(f"{path}: expected a file that can be written, found {error.strerror}") from error


def _console() -> Console:
    """Standard output; wide enough for the table where it goes to a file."""
    return Console() if sys.stdout.isatty() else Console(width=140)


@contextlib.contextmanager
def _status(text: str) -> Iterator[None]:
    console = Console(stderr=True)
    with console.status(text) if console.is_terminal else contextlib.nullcontext():
        yield
