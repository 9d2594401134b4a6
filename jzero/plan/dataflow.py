"""Which `-start` a `-done` waits for: through tuples, and through a loop's carry where a collective is pipelined."""

from __future__ import annotations

from jzero.plan.hlo import Computation, Instruction, Module

Site = tuple[str, str]
"""A place in the module: (computation, instruction)."""

_THROUGH = ("bitcast", "copy", "optimization-barrier", "async-update", "reshape")


class Dataflow:
    """Answers where a value comes from.

    Args:
        module: the compiled module.
    """

    def __init__(self, module: Module):
        self._module = module
        self._callers: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in module.computations.values():
            for instruction in computation.instructions:
                for callee in instruction.callees:
                    self._callers.setdefault(callee, []).append((computation, instruction))
        self._known: dict[Site, frozenset[Site]] = {}

    def starts(self, computation: Computation, done: Instruction) -> frozenset[Site]:
        """The starts that a done may wait for: its own, or where a loop carries it also that of another iteration."""
        key = (computation.name, done.name)
        if key not in self._known:
            found: set[Site] = set()
            for operand in done.operands:
                self._collect(computation, operand, (), found, set())
            self._known[key] = frozenset(found)
        return self._known[key]

    def _collect(self, where: Computation, name: str, path: tuple[int, ...], found: set[Site], seen: set) -> None:
        """Adds every start that element `path` of a value may be."""
        if (where.name, name, path) in seen or name not in where.by_name:
            return
        seen.add((where.name, name, path))
        value = where.by_name[name]
        into = lambda place, operand, rest: self._collect(place, operand, rest, found, seen)
        if value.opcode.endswith("-start") or value.opcode in ("send", "recv"):
            found.add((where.name, name))
        elif value.opcode == "get-tuple-element":
            into(where, value.operands[0], (int(value.attribute("index") or 0), *path))
        elif value.opcode == "tuple":
            for i, operand in enumerate(value.operands):
                if not path or path[0] == i:
                    into(where, operand, path[1:])
        elif value.opcode in _THROUGH:
            into(where, value.operands[0], path)
        elif value.opcode == "parameter":
            self._from_callers(where, int(value.literal), path, into)
        elif value.opcode in ("while", "call", "conditional"):
            for callee in self._module.called(value):
                if callee.root is not None and callee.name != value.attribute("condition"):
                    into(callee, callee.root.name, path)
            if value.opcode == "while":
                into(where, value.operands[0], path)

    def _from_callers(self, where: Computation, number: int, path: tuple[int, ...], into) -> None:
        for place, caller in self._callers.get(where.name, []):
            if caller.opcode == "while":
                into(place, caller.operands[0], path)
                if where.root is not None and where.name in (caller.attribute("body") or ""):
                    into(where, where.root.name, path)
            elif caller.opcode == "call" and number < len(caller.operands):
                into(place, caller.operands[number], path)
            elif caller.opcode == "conditional":
                branch = caller.callees.index(where.name)
                into(place, caller.operands[1 + branch], path)
