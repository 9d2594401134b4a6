"""Who waits for which collective, found by running a scheduled module instruction by instruction, loops unrolled.

Values are followed as they are: a start makes a call, which travels through tuples and loop carries to the done that
waits for it. Nothing is guessed from structure and nothing is extrapolated. What an instruction takes is given.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable
from typing import Any

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_PASS = ("bitcast", "copy", "optimization-barrier", "async-update", "reshape")


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a collective."""

    site: tuple[str, str]
    left: float  # seconds that it still needs
    exposed: float = 0.0


@dataclasses.dataclass
class Use:
    """All calls of one instruction."""

    calls: int = 0
    exposed: float = 0.0


Cost = Callable[[str, str], tuple[str, float]]
"""(computation, instruction) -> "compute", "copy", "async", "sync" or "", and its seconds."""


def run(text: str, cost: Cost) -> tuple[float, dict[tuple[str, str], Use]]:
    """Seconds of the step, and what became of every collective."""
    machine = _Machine(_computations(text), cost)
    machine.enter(machine.entry, [None])
    for call in list(machine.queue):
        machine.wait(call)
    uses: dict[tuple[str, str], Use] = collections.defaultdict(Use)
    for call in machine.made:
        uses[call.site].calls += 1
        uses[call.site].exposed += call.exposed
    return machine.now, dict(uses)


class _Machine:
    def __init__(self, computations, cost: Cost):
        self.bodies, self.entry = computations
        self.cost, self.now = cost, 0.0
        self.queue: collections.deque[Call] = collections.deque()  # one link: in the order of their starts
        self.made: list[Call] = []

    def enter(self, name: str, given: list[Any]) -> Any:
        values: dict[str, Any] = {}
        root = None
        for is_root, target, opcode, operands, rest in self.bodies[name]:
            known = [values.get(o) for o in operands]
            values[target] = self.step(name, target, opcode, known, rest, given)
            root = values[target] if is_root else root
        return root

    def step(self, where: str, target: str, opcode: str, known: list[Any], rest: str, given: list[Any]) -> Any:
        if opcode == "parameter":
            number = int(rest.split(")")[0])
            return given[number] if number < len(given) else None
        if opcode == "tuple":
            return tuple(known)
        if opcode == "get-tuple-element":
            return known[0][int(re.search(r"index=(\d+)", rest)[1])] if isinstance(known[0], tuple) else known[0]
        if opcode == "while":
            carry = known[0]
            for _ in range(int(re.search(r'known_trip_count":\{"n":"(\d+)"', rest)[1])):
                carry = self.enter(re.search(r"body=%?([\w.\-]+)", rest)[1], [carry])
            return carry
        if opcode == "call":
            return self.enter(re.search(r"to_apply=%?([\w.\-]+)", rest)[1], known)
        if opcode.endswith("-done"):
            if isinstance(known[0], Call):
                self.wait(known[0])
            return None
        kind, seconds = self.cost(where, target)
        if kind in ("async", "sync"):
            call = Call((where, target), seconds)
            self.made.append(call)
            self.queue.append(call)
            if kind == "sync":
                self.wait(call)
            return call
        self.now += seconds
        if kind == "compute":  # meanwhile the link works; during copies that does not count
            self.link(seconds, exposed=False)
        return known[0] if opcode in _PASS and known else None

    def wait(self, call: Call) -> None:
        while call in self.queue:
            self.now += self.link(self.queue[0].left, exposed=True)

    def link(self, seconds: float, exposed: bool) -> float:
        budget = seconds
        while self.queue and budget > 0:
            head = self.queue[0]
            part = min(budget, head.left)
            head.left -= part
            head.exposed += part * exposed
            budget -= part
            if head.left <= 1e-15:
                self.queue.popleft()
        if seconds == 0 and self.queue and self.queue[0].left <= 1e-15:
            self.queue.popleft()
        return seconds


def _computations(text: str):
    bodies: dict[str, list] = {}
    current = entry = ""
    for line in text.splitlines():
        head, found = _HEAD.match(line), _LINE.match(line)
        if head:
            current = head[2]
            bodies[current] = []
            entry = current if head[1] else entry
        elif found and current:
            opcode = re.search(r"(?:^|[\s)}\]])([a-z][a-z0-9\-]*)\((.*)$", found[3])
            operands = re.findall(r"%([\w.\-]+)", opcode[2].split("), ")[0])
            bodies[current].append((bool(found[1]), found[2], opcode[1], operands, opcode[2]))
    return bodies, entry
