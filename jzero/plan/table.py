"""A report as a table for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jzero.plan.result import CollectiveUse, Report

if TYPE_CHECKING:
    from jzero.train.placement import Placement

GIB, MIB, KIB = 2**30, 2**20, 2**10
HOW = {"formula": "by a formula, not compiled", "compiled": "compiled"}


def render(report: Report) -> RenderableType:
    """The whole report."""
    axes = " × ".join(f"{name} {size}" for name, size in report.mesh.items() if size > 1) or "one device"
    parts: list[RenderableType] = [Text(f"{report.title}, {report.target}, {axes}", style="bold"), Text("")]
    parts += [_time(report), Text(""), _memory(report), Text(""), _largest(report), Text(""), _collectives(report)]
    parts += [Text(""), Text(f"compiled in {report.compile_seconds:,.1f} s")]
    for note in report.notes:
        parts += [Text(""), Text(f"note: {note}")]
    for advice in report.advice:
        parts += [Text(""), Text(f"advice: {advice.text}", style="bold")]
        if advice.overrides:
            parts.append(Text(f"    {' '.join(advice.overrides)}"))
        parts.append(Text(f"    {advice.effect} ({HOW[advice.how]})"))
    return Group(*parts)


def layout_table(rows: Sequence[Placement], title: str) -> RenderableType:
    """Which parameter lives where, and the sums."""
    from jzero.train.placement import total, words  # imports Flax

    columns = ("parameter", "shape", "type", "dimension/axes that split it", "size", "its state", "size of state")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column.startswith("size") else "left", overflow="fold")
    for row in rows:
        shape = " × ".join(map(str, row.shape))
        state = "the same" if row.state_split == row.split else words(row.state_split)
        table.add_row(row.path, shape, row.dtype, words(row.split), _size(row.bytes), state, _size(row.state_bytes))
    count, parameters, states = total(rows)
    sums = ("", "", _size(parameters), "", _size(states))
    table.add_section()
    table.add_row("a device holds", f"{count:,} in all", *sums, style="bold")
    return table


def _plain(*columns: str, title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        left = column in ("", "operation", "shape", "loop", "behind", "kind", "axis")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    return table


def _time(report: Report) -> Table:
    table = _plain("", "ms", "%", title="Estimated time of a step")
    rows = [
        ("compute", report.compute_ms),
        ("copies, fills, transposes", report.copies_ms),
        ("exposed communication", report.exposed_ms),
        ("step", report.step_ms),
    ]
    for name, value in rows:
        table.add_row(name, f"{value:,.2f}", f"{100 * value / report.step_ms:.1f}" if report.step_ms else "")
    if report.pipeline_idle:
        table.add_row("a stage waits for others", "", f"{100 * report.pipeline_idle:.1f}")
    if report.tokens_per_second is not None:
        table.add_row("tokens/s", f"{report.tokens_per_second:,.0f}", "")
    table.add_row("model FLOPs utilization", "", f"{100 * report.mfu:.1f}")
    return table


def _memory(report: Report) -> Table:
    memory = report.memory
    table = _plain("", "size", title="Memory of a device")
    for name in ("parameters", "optimizer", "batch", "other", "outputs", "temporaries", "peak", "limit"):
        value = getattr(memory, name)
        if value >= KIB or name not in ("other", "outputs"):  # the step's counter is no news
            table.add_row(name, _size(value))
    verdict = "yes" if memory.fits else f"no, {_size(memory.peak - memory.limit)} too much"
    table.add_row("fits", verdict)
    return table


def _size(value: int) -> str:
    unit, name = next(((u, n) for u, n in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if value >= u), (1, "B"))
    return f"{value / unit:,.2f} {name}" if unit > 1 else f"{value:,} B"


def _largest(report: Report) -> Table:
    table = _plain("MiB", "shape", "operation", title="Largest temporaries at the fullest moment")
    for t in report.memory.largest:
        times = f"{t.count} × " if t.count > 1 else ""
        table.add_row(f"{t.bytes / MIB:,.0f}", f"{times}{t.array}", t.name)
    return table


def _collectives(report: Report) -> Table:
    columns = ("kind", "axis", "calls", "MiB", "ms", "exposed ms", "hidden %", "async", "loop", "behind")
    table = _plain(*columns, title="Collectives of a step: one row per instruction, then the sums")
    for use in report.collectives:
        table.add_row(*_row(use))
    if not report.collectives:
        table.add_row("none")
    else:
        table.add_section()
    for use in report.totals().values():
        table.add_row(*_row(dataclasses.replace(use, loop="all")), style="bold")
    return table


def _row(use: CollectiveUse) -> tuple[str, ...]:
    behind = ", ".join(f"{name} {ms:.2f}" for name, ms in use.between[:2])
    numbers = (f"{use.count:,}", f"{use.bytes / MIB:,.2f}", f"{use.estimated_ms:,.2f}", f"{use.exposed_ms:,.2f}")
    share = f"{100 * use.hidden:.1f}"
    return use.kind, use.axis, *numbers, share, "yes" if use.asynchronous else "no", use.loop, behind
