"""What lies in a device's memory: arguments from their shardings, temporaries from the compiled module.

XLA says how many bytes of temporaries an executable needs, not what they are. That is found again from the schedule:
values that share a buffer are joined, each buffer lives from its first to its last mention, and the largest ones at the
fullest moment are named after the operation of the program that fills them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from jzero.plan import names
from jzero.plan.cost import moves, results
from jzero.plan.hlo import Array, Computation, Instruction, Module, Shape

Path = tuple[int, ...]
Value = tuple[str, str, Path]
"""An array: computation, instruction, place in its tuple."""

_SAME = ("bitcast", "optimization-barrier", "dynamic-update-slice", "async-update")


@dataclasses.dataclass(frozen=True)
class Temporary:
    """A buffer that lives at the fullest moment.

    Attributes:
        name: the operation of the program that fills it.
        array: its shape.
        bytes: its size.
        count: buffers of this name and shape.
    """

    name: str
    array: Array
    bytes: int
    count: int = 1


@dataclasses.dataclass
class _Buffer:
    """One piece of memory, which several values may use one after the other.

    Attributes:
        bytes: its size.
        outside: it belongs to an argument, an output or a constant.
        spans: when each of its values lives: [first, last] moment.
        mentions: every instruction that makes or passes on one of its values, and that value's shape.
    """

    bytes: int = 0
    outside: bool = False
    spans: dict[Value, list[int]] = dataclasses.field(default_factory=dict)
    mentions: list[tuple[Computation, Instruction, Array]] = dataclasses.field(default_factory=list)

    @property
    def lives(self) -> Iterator[tuple[int, int]]:
        """Disjoint spans of moments."""
        end, begin = -1, 0
        for first, last in sorted(self.spans.values()):
            if first > end:
                if end >= 0:
                    yield begin, end
                begin = first
            end = max(end, last)
        if end >= 0:
            yield begin, end


class _Sets(dict):
    """Disjoint sets of values."""

    def find(self, value: Value) -> Value:
        root = value
        while self.get(root, root) != root:
            root = self[root]
        while self.get(value, value) != root:
            self[value], value = root, self[value]
        return root

    def join(self, a: Value, b: Value) -> None:
        self[self.find(a)] = self.find(b)


class Buffers:
    """The buffers of a module and when they live.

    Args:
        module: the compiled module.
    """

    def __init__(self, module: Module):
        self._module = module
        self._memory = _Sets()  # values that share a buffer
        self._values = _Sets()  # names of one and the same value; a loop's carry has a new one in every iteration
        self._time = 0
        self._moments: list[tuple[Value, int]] = []
        self._holding: dict[tuple[str, str], _Buffer] = {}  # of the first array of each value
        self._visit(module.entry)
        self._buffers = self._collect()

    # --- joining values that share a buffer --------------------------------------------------------------------------

    def _join(self, a: Value, b: Value, same: bool = True) -> None:
        self._memory.join(a, b)
        if same:
            self._values.join(a, b)

    def _join_all(
        self, a: tuple[str, str], at: Path, b: tuple[str, str], of: Path, shape: Shape, same: bool = True
    ) -> None:
        """Joins every array of `shape`, which is element `at` of value `a` and element `of` of value `b`."""
        for path, _ in _leaves(shape):
            self._join((*a, (*at, *path)), (*b, (*of, *path)), same)

    def _mention(self, computation: Computation, instructions: list[Instruction]) -> None:
        for i in instructions:
            self._moments += [((computation.name, i.name, path), self._time) for path, _ in _leaves(i.shape)]

    def _visit(self, computation: Computation) -> None:
        """Mentions of every value in the order of the schedule; a loop's body stands where the loop stands."""
        for i in computation.instructions:
            self._time += 1
            if i.opcode != "get-tuple-element":
                self._mention(computation, computation.operands(i))
            if i.opcode in ("while", "call", "conditional"):
                self._enter(computation, i)
                self._time += 1
            self._mention(computation, [i])
            self._alias(computation, i)

    def _enter(self, computation: Computation, i: Instruction) -> None:
        here = (computation.name, i.name)
        for number, callee in enumerate(self._module.called(i)):
            for parameter in callee.parameters:
                given = 1 + number if i.opcode == "conditional" else int(parameter.literal)
                operand = (computation.name, i.operands[0 if i.opcode == "while" else given])
                self._join_all((callee.name, parameter.name), (), operand, (), parameter.shape, same=False)
            if callee.root is not None and callee.name != (i.attribute("condition") or "").lstrip("%"):
                self._join_all(here, (), (callee.name, callee.root.name), (), i.shape, same=False)
            self._visit(callee)
        if i.opcode == "while":
            self._join_all(here, (), (computation.name, i.operands[0]), (), i.shape, same=False)

    def _alias(self, computation: Computation, i: Instruction) -> None:
        here, operand = (computation.name, i.name), [(computation.name, name) for name in i.operands]
        if i.opcode == "get-tuple-element":
            self._join_all(here, (), operand[0], (int(i.attribute("index") or 0),), i.shape)
        elif i.opcode == "tuple":
            for number, source in enumerate(computation.operands(i)):
                self._join_all(here, (number,), operand[number], (), source.shape)
        elif i.opcode in _SAME:
            self._join_all(here, (), operand[0], (), i.shape)
        elif i.opcode.endswith("-start") and isinstance(i.shape, tuple) and len(i.shape) > 1:
            inputs = [(0,)] if isinstance(i.shape[0], Array) else [(0, n) for n in range(len(i.shape[0]))]
            for at, source in zip(inputs, operand, strict=False):
                self._join((*here, at), (*source, ()))
        elif i.opcode.endswith("-done"):
            start = computation.by_name[i.operands[0]]
            at = (
                (1,)
                if isinstance(start.shape, tuple) and len(start.shape) > 1 and "all-reduce" not in start.opcode
                else ()
            )
            self._join_all(here, (), operand[0], at, i.shape)
        for output, number, of in _in_place(self._module, i):
            self._join((*here, output), (*operand[number], of))

    def _collect(self) -> list[_Buffer]:
        found: dict[Value, _Buffer] = {}
        for value, moment in self._moments:
            where, name, path = value
            computation = self._module.computations[where]
            i = computation.by_name[name]
            array = _at(i.shape, path)
            buffer = found.setdefault(self._memory.find(value), _Buffer())
            buffer.bytes = max(buffer.bytes, array.bytes)
            span = buffer.spans.setdefault(self._values.find(value), [moment, moment])
            span[1] = max(span[1], moment)
            entry = computation is self._module.entry
            buffer.outside |= i.opcode == "constant" or (entry and (i.opcode == "parameter" or i is computation.root))
            buffer.mentions.append((computation, i, array))
            self._holding.setdefault((where, name), buffer)
        return list(found.values())

    # --- results -----------------------------------------------------------------------------------------------------

    def fullest(self) -> list[_Buffer]:
        """The temporary buffers that live at the moment at which they are most."""
        inside = [b for b in self._buffers if not b.outside and b.bytes]
        change = [0] * (self._time + 2)
        for b in inside:
            for first, last in b.lives:
                change[first] += b.bytes
                change[last + 1] -= b.bytes
        best = total = moment = 0
        for t, delta in enumerate(change):
            total += delta
            if total > best:
                best, moment = total, t
        return [b for b in inside if any(first <= moment <= last for first, last in b.lives)]

    def largest(self, count: int = 10) -> list[Temporary]:
        """The largest temporaries of that moment, those of one name and shape together."""
        found: dict[tuple[str, Array], Temporary] = {}
        for buffer in self.fullest():
            name, array = self._origin(buffer)
            before = found.get((name, array), Temporary(name, array, 0, 0))
            found[name, array] = Temporary(name, array, before.bytes + buffer.bytes, before.count + 1)
        return sorted(found.values(), key=lambda t: -t.bytes)[:count]

    def _origin(self, buffer: _Buffer) -> tuple[str, Array]:
        """The operation that fills a buffer: what is written into it piece by piece, else what creates it."""
        writers = [v for v in buffer.mentions if list(_in_place(self._module, v[1]))]
        passing = (*_SAME, "parameter", "tuple", "get-tuple-element", "while")
        makers = [v for v in buffer.mentions if v[1].opcode not in passing]
        computation, i, array = next(iter(writers or makers or buffer.mentions))
        if writers:
            computation, i = _written_value(self._module, computation, i)
            array = max((v[2] for v in buffer.mentions), key=lambda a: a.bytes)
        elif i.opcode == "copy" or (i.opcode == "fusion" and len(i.operands) == 1 and moves(self._module, i)):
            copied = self._holding.get((computation.name, i.operands[0]))
            if copied is not None and copied is not buffer and all(v[1] is not i for v in copied.mentions):
                return "copy of " + self._origin(copied)[0].removeprefix("copy of "), array
        return names.describe(self._module, computation, i), array


def _leaves(shape: Shape, path: Path = ()) -> Iterator[tuple[Path, Array]]:
    if isinstance(shape, Array):
        yield path, shape
    else:
        for number, part in enumerate(shape):
            yield from _leaves(part, (*path, number))


def _at(shape: Any, path: Path) -> Array:
    for number in path:
        shape = shape[number]
    return shape


def _in_place(module: Module, i: Instruction) -> Iterator[tuple[Path, int, Path]]:
    """Results that overwrite an operand: (place in the result, operand, place in the operand)."""
    if i.opcode == "fusion":
        inside = module.called(i)[0]
        several = inside.root is not None and inside.root.opcode == "tuple"
        for number, name in enumerate(results(inside)):
            written = _same(inside, name)
            if written.opcode == "dynamic-update-slice":
                base = _same(inside, written.operands[0])
                if base.opcode == "parameter":
                    yield (number,) if several else (), int(base.literal), ()
    for output, number, of in re.findall(
        r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}", i.attribute("output_to_operand_aliasing") or ""
    ):
        place = lambda text: tuple(int(n) for n in text.split(",") if n.strip())
        yield place(output), int(number), place(of)


def _written_value(module: Module, computation: Computation, i: Instruction) -> tuple[Computation, Instruction]:
    """What an update in place writes: the value that a fusion gets, or that it computes."""
    if i.opcode != "fusion":
        return computation, i
    inside = module.called(i)[0]
    updates = [x for x in inside.instructions if x.opcode == "dynamic-update-slice"]
    if not updates:
        return computation, i
    source = _through(inside, updates[0].operands[1])
    if source.opcode != "parameter":
        return (inside, source) if names.program(module, source) else (computation, i)
    outer = computation.by_name[i.operands[int(source.literal)]]
    while outer.opcode in ("bitcast", "get-tuple-element"):
        outer = computation.by_name[outer.operands[0]]
    return (computation, i) if outer.opcode == "parameter" else (computation, outer)


def _same(computation: Computation, name: str) -> Instruction:
    """A value without the bitcasts around it."""
    found = computation.by_name[name]
    while found.opcode == "bitcast":
        found = computation.by_name[found.operands[0]]
    return found


def _through(computation: Computation, name: str) -> Instruction:
    """A value without what only changes its layout."""
    found = computation.by_name[name]
    while found.opcode in ("bitcast", "reshape", "copy", "transpose"):
        found = computation.by_name[found.operands[0]]
    return found
