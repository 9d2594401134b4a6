"""What a plan says: numbers as data, as JSON, and as a table."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

from jzero.plan import names
from jzero.plan.compile import Compiled
from jzero.plan.hlo import Module, parse
from jzero.plan.memory import Buffers, Temporary
from jzero.plan.timeline import Call, Timeline, play

MEMORY_FRACTION = 0.9
"""Share of a GPU's memory that a run may use (XLA_PYTHON_CLIENT_MEM_FRACTION=0.9): CUDA and NCCL need the rest."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        parameters, optimizer, batch, other: arguments of the step.
        outputs: results that overwrite no argument.
        temporaries: everything else that the executable needs.
        peak: all of it.
        limit: what a run may use.
        largest: temporaries that live at the fullest moment.
    """

    parameters: int
    optimizer: int
    batch: int
    other: int
    outputs: int
    temporaries: int
    peak: int
    limit: int
    largest: list[Temporary]

    @property
    def fits(self) -> bool:
        """Whether the step can run."""
        return self.peak <= self.limit


@dataclasses.dataclass(frozen=True)
class CollectiveUse:
    """One collective instruction, over a step, on one device.

    Attributes:
        kind: as XLA names it.
        axis: mesh axes, joined by "+".
        count: calls.
        bytes: of all calls; of a gather's result, of the operand of the others.
        estimated_ms: of all calls.
        hidden: share of that time in which compute runs.
        asynchronous: compute may run meanwhile.
        loop: the loop that it is called in, "" outside of loops.
        between: what runs between its start and its done, the longest first: (operation, ms in one call).
        name: where the program asks for it.
    """

    kind: str
    axis: str
    count: int
    bytes: int
    estimated_ms: float
    hidden: float
    asynchronous: bool
    loop: str
    between: list[tuple[str, float]]
    name: str

    @property
    def exposed_ms(self) -> float:
        """Time in which nothing else runs."""
        return self.estimated_ms * (1.0 - self.hidden)


@dataclasses.dataclass(frozen=True)
class Advice:
    """Something to change.

    Attributes:
        text: what is wrong, and what to do.
        overrides: the configuration's keys that do it, () where there is no configuration.
        effect: the number that it would give.
        how: "formula", or "compiled" where the changed step was compiled.
    """

    text: str
    overrides: tuple[str, ...]
    effect: str
    how: str = "formula"


@dataclasses.dataclass(frozen=True)
class Report:
    """What a GPU would run, where its time and its memory go.

    Attributes:
        title: what was planned.
        target: name of the GPU.
        mesh: name and size of every mesh axis.
        memory: bytes on one device.
        collectives: in the order in which they run first.
        step_ms: compute_ms + copies_ms + exposed_ms.
        compute_ms: kernels that compute.
        copies_ms: kernels that only move numbers.
        exposed_ms: waiting for collectives.
        pipeline_idle: share of the time in which a stage of a pipeline waits for the others, from its timetable; 0
            without a pipeline. The times above count it as work: the module does not say which stage skips a tick.
        model_flops: operations of one step on one device, for `mfu`.
        mfu: model_flops against the GPU's rate.
        tokens_per_second: of all devices; None where tokens are unknown.
        compile_seconds: lowering and compiling took.
        notes: what the reader must know.
        advice: what to change.
        text: the scheduled module.
        timeline: the played step.
    """

    title: str
    target: str
    mesh: dict[str, int]
    memory: Memory
    collectives: list[CollectiveUse]
    step_ms: float
    compute_ms: float
    copies_ms: float
    exposed_ms: float
    pipeline_idle: float
    model_flops: float
    mfu: float
    tokens_per_second: float | None
    compile_seconds: float
    notes: list[str]
    advice: list[Advice]
    text: str = dataclasses.field(repr=False)
    timeline: Timeline = dataclasses.field(repr=False)

    @functools.cached_property
    def module(self) -> Module:
        """The compiled module."""
        return parse(self.text)

    def totals(self) -> dict[tuple[str, str], CollectiveUse]:
        """The collectives of one kind and axis together."""
        groups: dict[tuple[str, str], list[CollectiveUse]] = collections.defaultdict(list)
        for use in self.collectives:
            groups[use.kind, use.axis].append(use)
        return {key: _together(uses) for key, uses in groups.items()}

    def json(self) -> dict[str, Any]:
        """The report as JSON values: bytes on one device and per step, milliseconds, shares of 1."""
        memory = {f.name: getattr(self.memory, f.name) for f in dataclasses.fields(Memory) if f.name != "largest"}
        largest = [
            {"name": t.name, "shape": str(t.array), "bytes": t.bytes, "count": t.count} for t in self.memory.largest
        ]
        return {
            "title": self.title,
            "target": self.target,
            "mesh": self.mesh,
            "memory": memory | {"fits": self.memory.fits, "largest": largest},
            "collectives": [dataclasses.asdict(use) for use in self.collectives],
            "step_ms": self.step_ms,
            "compute_ms": self.compute_ms,
            "copies_ms": self.copies_ms,
            "exposed_ms": self.exposed_ms,
            "pipeline_idle": self.pipeline_idle,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "compile_seconds": self.compile_seconds,
            "notes": self.notes,
            "advice": [dataclasses.asdict(a) for a in self.advice],
        }

    def __rich__(self) -> Any:
        from jzero.plan.table import render

        return render(self)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=130, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get()


def make_report(
    compiled: Compiled,
    *,
    title: str,
    dtype: str = "bf16",
    flops: float | None = None,
    tokens: int | None = None,
    pipeline_idle: float = 0.0,
    notes: list[str] | None = None,
) -> Report:
    """Read a compiled step.

    Args:
        compiled: the executable.
        title: of the report.
        dtype: of the matrix products, for the rate that `mfu` is relative to.
        flops: operations that the model needs, of one step over all devices; None: the matrix products of the module.
        tokens: of one step, over all devices.
        pipeline_idle: share of the time in which a stage waits.
        notes: what the reader must know.
    """
    module = parse(compiled.text)
    timeline = play(module, compiled.target, compiled.mesh, compiled.domain)
    devices = max(module.partitions, 1)
    own = timeline.operations if flops is None else flops / devices
    notes = list(notes or [])
    if flops is None:
        notes.append(
            "MFU counts the matrix products of the compiled module, recomputed ones too: `flops=` gives the model's"
        )
    seconds = max(timeline.seconds, 1e-12)
    return Report(
        title=title,
        target=compiled.target.name,
        mesh=compiled.mesh,
        memory=_memory(compiled, module),
        collectives=[_use(module, call) for call in timeline.calls if call.collective.axis],
        step_ms=1e3 * timeline.seconds,
        compute_ms=1e3 * timeline.compute,
        copies_ms=1e3 * timeline.moves,
        exposed_ms=1e3 * timeline.exposed,
        pipeline_idle=pipeline_idle,
        model_flops=own,
        mfu=own / seconds / compiled.target.rate(dtype),
        tokens_per_second=None if tokens is None else tokens / seconds,
        compile_seconds=compiled.seconds,
        notes=notes,
        advice=[],
        text=compiled.text,
        timeline=timeline,
    )


def _memory(compiled: Compiled, module: Module) -> Memory:
    arguments = compiled.arguments
    return Memory(
        **arguments,
        outputs=compiled.outputs,
        temporaries=compiled.temporaries,
        peak=sum(arguments.values()) + compiled.outputs + compiled.temporaries,
        limit=int(compiled.target.memory * MEMORY_FRACTION),
        largest=Buffers(module).largest(),
    )


def _use(module: Module, call: Call) -> CollectiveUse:
    computation = module.computations[call.site[0]]
    whiles = {i.name: i for c in module.computations.values() for i in c.instructions if i.opcode == "while"}
    times: dict[str, float] = collections.defaultdict(float)
    for (where, name), seconds in call.between:
        times[names.kernel(module, module.computations[where].by_name[name])] += 1e3 * seconds
    return CollectiveUse(
        kind=call.collective.kind,
        axis=call.collective.axis,
        count=call.count,
        bytes=call.count * call.collective.bytes,
        estimated_ms=1e3 * call.seconds,
        hidden=min(max(call.hidden, 0.0), 1.0),
        asynchronous=call.collective.asynchronous,
        loop=" / ".join(names.loop(module, whiles[name]) for name in call.loops),
        between=sorted(times.items(), key=lambda item: -item[1])[:5],
        name=names.describe(module, computation, computation.by_name[call.site[1]]),
    )


def _together(uses: list[CollectiveUse]) -> CollectiveUse:
    total = sum(u.estimated_ms for u in uses)
    return dataclasses.replace(
        uses[0],
        count=sum(u.count for u in uses),
        bytes=sum(u.bytes for u in uses),
        estimated_ms=total,
        hidden=1.0 - sum(u.exposed_ms for u in uses) / total if total else 1.0,
        asynchronous=all(u.asynchronous for u in uses),
        loop="",
        between=[],
        name="",
    )
