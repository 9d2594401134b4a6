"""Plays a scheduled module on two streams, one of kernels and one of collectives, and sees who waits for whom.

    kernel         the kernel stream advances by its time
    start          the collective queues behind those that were started before
    done           the kernel stream waits until that collective has ended; the wait is exposed
    synchronous    a start and its done in one: the kernel stream waits for it, and for those before it

A kernel that only moves numbers (a copy, a fill, a transpose) hides nothing: while it runs no collective advances. So
the time of a step is exactly kernels + exposed, and a schedule does not look better for copies that it makes. Loops are
played three times and then counted as often as they run.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from typing import Any, NamedTuple

from jzero.plan import cost
from jzero.plan.cost import Collective, Kernel
from jzero.plan.dataflow import Dataflow, Site
from jzero.plan.groups import Axes
from jzero.plan.hlo import Computation, Instruction, Module
from jzero.plan.targets import Target

PLAYED = 3
"""Iterations of a loop that are played one by one; the last of them stands for the rest."""


class Event(NamedTuple):
    """Something that runs, for a picture of the first iterations of each loop."""

    stream: str  # "compute", "copy", "wait" or "collective"
    site: Site
    start: float  # seconds from the start of the step
    end: float
    loops: tuple[tuple[str, int], ...]  # (while instruction, iteration), outermost first


@dataclasses.dataclass
class Call:
    """What one collective instruction does in a step: `count` calls.

    Attributes:
        site, collective: the instruction.
        loops: the while instructions around it.
        count: calls.
        seconds: of all calls.
        exposed: seconds of all calls in which the kernel stream waited.
        between: kernels that run between start and done, in the last call that was played: (site, seconds).
    """

    site: Site
    collective: Collective
    loops: tuple[str, ...]
    count: int = 0
    seconds: float = 0.0
    exposed: float = 0.0
    between: list[tuple[Site, float]] = dataclasses.field(default_factory=list)

    @property
    def hidden(self) -> float:
        """Share of its time that is hidden behind compute."""
        return 1.0 - self.exposed / self.seconds if self.seconds else 1.0


@dataclasses.dataclass
class Timeline:
    """The played step.

    Attributes:
        seconds: of the step.
        compute: seconds of kernels that compute.
        moves: seconds of kernels that only move numbers.
        exposed: seconds in which the kernel stream waits for collectives.
        operations: of all matrix products.
        calls: the collectives, in the order in which they first start.
        kernels: seconds of every kernel of the step, over all its calls.
        events: for a picture; loops are cut short.
    """

    seconds: float
    compute: float
    moves: float
    exposed: float
    operations: float
    calls: list[Call]
    kernels: dict[Site, float]
    events: list[Event]


@dataclasses.dataclass
class _Flight:
    """A collective in the air; times of the link's clock."""

    call: Call
    begin: float
    end: float
    kernels: int  # kernels that had run when it was started


class _Player:
    def __init__(self, module: Module, target: Target, mesh: Axes, domain: int):
        self.module, self.target, self.mesh, self.domain = module, target, mesh, domain
        self.flow = Dataflow(module)
        self.costs: dict[Site, Kernel | Collective | None] = {}
        self.calls: dict[Site, Call] = {}
        self.lengths: dict[str, float] = {}  # of branches, by name
        self.kernels: dict[Site, float] = collections.defaultdict(float)
        self.sums = dict.fromkeys(("compute", "moves", "exposed", "operations"), 0.0)
        self.wall = 0.0  # seconds since the start of the step
        self.clock = 0.0  # the same without the kernels that only move numbers: time in which collectives advance
        self.link_free = 0.0
        self.marks: list[tuple[float, float]] = [(0.0, 0.0)]  # (clock, wall) after each kernel and wait
        self.flights: dict[Site, list[_Flight]] = collections.defaultdict(list)
        self.waits: list[tuple[float, float]] = []  # in time of the clock
        self.ran: list[tuple[Site, float]] = []
        self.events: list[Event] = []
        self.loops: list[tuple[str, int]] = []

    # --- one instruction ---------------------------------------------------------------------------------------------

    def play(self, computation: Computation) -> None:
        for instruction in computation.instructions:
            if instruction.opcode == "while":
                self.loop(instruction)
            elif instruction.opcode == "call":
                for callee in self.module.called(instruction):
                    self.play(callee)
            elif instruction.opcode == "conditional":
                self.branch(instruction)
            elif instruction.opcode.endswith("-done"):
                self.done(computation, instruction)
            else:
                self.run(computation, instruction)

    def run(self, computation: Computation, instruction: Instruction) -> None:
        site = (computation.name, instruction.name)
        found = self.cost(computation, instruction, site)
        if isinstance(found, Collective):
            self.start(site, found)
        elif isinstance(found, Kernel):
            self.kernels[site] += found.seconds
            self.sums["moves" if found.moves else "compute"] += found.seconds
            self.sums["operations"] += found.operations
            self.advance("copy" if found.moves else "compute", site, found.seconds)
            if not found.moves:
                self.ran.append((site, found.seconds))

    def cost(self, computation: Computation, instruction: Instruction, site: Site) -> Kernel | Collective | None:
        if site not in self.costs:
            where = (self.module, computation, instruction, self.target)
            self.costs[site] = cost.collective(*where, self.mesh, self.domain) or cost.kernel(*where)
        return self.costs[site]

    def start(self, site: Site, found: Collective) -> None:
        loops = tuple(name for name, _ in self.loops)
        call = self.calls.setdefault(site, Call(site, found, loops))
        call.count += 1
        call.seconds += found.seconds
        begin = max(self.clock, self.link_free)
        self.link_free = begin + found.seconds
        flight = _Flight(call, begin, self.link_free, len(self.ran))
        self.flights[site].append(flight)
        if not found.asynchronous:
            self.land(flight)

    def done(self, computation: Computation, instruction: Instruction) -> None:
        waiting = [f for site in self.flow.starts(computation, instruction) for f in self.flights.get(site, [])]
        if waiting:
            self.land(min(waiting, key=lambda f: f.end))  # the oldest: a pipelined loop may have started the next one

    def land(self, flight: _Flight) -> None:
        """Waits for the end of a collective."""
        call = flight.call
        self.flights[call.site].remove(flight)
        call.between = self.ran[flight.kernels :]
        if flight.end > self.clock:
            self.waits.append((self.clock, flight.end))
            self.sums["exposed"] += flight.end - self.clock
            self.advance("wait", call.site, flight.end - self.clock)
        call.exposed += self.waited(flight.begin, flight.end)
        span = (self.at_wall(flight.begin), self.at_wall(flight.end))
        self.events.append(Event("collective", call.site, *span, tuple(self.loops)))

    def at_wall(self, clock: float) -> float:
        """When the clock showed this."""
        at = bisect.bisect_left(self.marks, (clock, 0.0))
        if at == len(self.marks):
            return self.wall
        return self.marks[at][1] - (self.marks[at][0] - clock)

    def waited(self, begin: float, end: float) -> float:
        """Seconds of an interval of the clock in which the kernel stream waited."""
        at = bisect.bisect_right(self.waits, (begin, begin)) - 1
        return sum(max(0.0, min(end, b) - max(begin, a)) for a, b in self.waits[max(at, 0) :])

    def advance(self, stream: str, site: Site, seconds: float) -> None:
        self.events.append(Event(stream, site, self.wall, self.wall + seconds, tuple(self.loops)))
        self.wall += seconds
        if stream != "copy":
            self.clock += seconds
        self.marks.append((self.clock, self.wall))

    # --- loops and branches ------------------------------------------------------------------------------------------

    def branch(self, instruction: Instruction) -> None:
        """The longest of the branches, as other devices wait for it."""
        candidates = self.module.called(instruction)
        self.play(max(candidates, key=self.length))

    def length(self, computation: Computation) -> float:
        if computation.name not in self.lengths:
            alone = _Player(self.module, self.target, self.mesh, self.domain)
            alone.play(computation)
            self.lengths[computation.name] = alone.wall
        return self.lengths[computation.name]

    def loop(self, instruction: Instruction) -> None:
        body = self.module.computations[(instruction.attribute("body") or "").lstrip("%")]
        times = instruction.trip_count or 1
        for i in range(min(times, PLAYED)):
            before = self.snapshot() if i == PLAYED - 1 else {}
            waits = len(self.waits)
            self.loops.append((instruction.name, i))
            self.play(body)
            self.loops.pop()
        if times > PLAYED:
            self.repeat(before, waits, times - PLAYED)

    def snapshot(self) -> dict[str, Any]:
        return {
            "wall": self.wall,
            "clock": self.clock,
            "sums": dict(self.sums),
            "kernels": dict(self.kernels),
            "calls": {site: (c.count, c.seconds, c.exposed) for site, c in self.calls.items()},
        }

    def repeat(self, before: dict[str, Any], waits: int, times: int) -> None:
        """The last iteration again, `times` times."""
        for key, value in self.sums.items():
            self.sums[key] += times * (value - before["sums"][key])
        for site, value in self.kernels.items():
            self.kernels[site] += times * (value - before["kernels"].get(site, 0.0))
        for site, call in self.calls.items():
            count, seconds, exposed = before["calls"].get(site, (0, 0.0, 0.0))
            call.count += times * (call.count - count)
            call.seconds += times * (call.seconds - seconds)
            call.exposed += times * (call.exposed - exposed)
        later = times * (self.clock - before["clock"])
        self.wall += times * (self.wall - before["wall"])
        self.clock += later
        self.link_free += later
        self.waits[waits:] = [(a + later, b + later) for a, b in self.waits[waits:]]
        self.marks.append((self.clock, self.wall))
        for flight in (f for flights in self.flights.values() for f in flights):
            flight.begin, flight.end = flight.begin + later, flight.end + later


def play(module: Module, target: Target, mesh: Axes, domain: int) -> Timeline:
    """Play one step.

    Args:
        module: the compiled module.
        target: the GPU.
        mesh: name and size of every mesh axis, outermost first.
        domain: GPUs joined by the fast links.
    """
    player = _Player(module, target, mesh, domain)
    player.play(module.entry)
    for flight in [f for flights in player.flights.values() for f in flights]:
        player.land(flight)
    return Timeline(
        seconds=player.wall,
        **player.sums,
        calls=list(player.calls.values()),
        kernels=dict(player.kernels),
        events=player.events,
    )
