"""A scheduled module as XLA prints it (`compiled.as_text()`), read into computations and instructions.

In a scheduled module the order of the lines is the order in which a device runs them. Only the text is used: it is what
JAX offers in public, and what a user can look at (`jzero plan --hlo FILE`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jzero.errors import JzeroError

_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([\d,<=]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")


class Array(NamedTuple):
    """The shape of one array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes, without padding by the allocator."""
        return self.size * bits(self.dtype) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


Shape = Array | tuple
"""An `Array`, or a (nested) tuple of shapes."""


class Frame(NamedTuple):
    """One entry of the Python stack that made an instruction."""

    function: str
    file: str
    line: int


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation.

    Attributes:
        name, opcode, operands: as printed, without `%`.
        shape: of the result.
        attributes: everything behind the operands, as printed.
        literal: what stands between the parentheses, as printed (a constant's value, a parameter's number).
    """

    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    literal: str

    @property
    def arrays(self) -> list[Array]:
        """The arrays of the result, flat."""
        return flat(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(a.bytes for a in self.arrays)

    def attribute(self, name: str) -> str | None:
        """An attribute's text up to the comma, `{...}` included: `dimensions`, `index`, `custom_call_target`."""
        value = (
            r'"[^"]*"'  # a string
            r"|\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}"  # {...}, {{...},{...}}
            r"|\[[^\]]*\](?:<=\[[^\]]*\](?:T\([^)]*\))?)?"  # [4,2]<=[2,4]T(1,0)
            r"|mesh\[[^\]]*\](?:, device_ids=\([^)]*(?:\([^)]*\))?\))? \{[^}]*\}"  # mesh['a'=4,'b'=2] {'a'}
            r"|[^,]*"
        )
        found = re.search(rf"(?:^|, ){name}=({value})", self.attributes)
        return found[1].strip('"') if found else None

    @functools.cached_property
    def callees(self) -> tuple[str, ...]:
        """Computations it calls, in the order in which they are named."""
        found = re.findall(
            r"(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)", self.attributes
        )
        return tuple(name for text in found for name in re.findall(r"%?([\w.\-]+)", text))

    @functools.cached_property
    def backend_config(self) -> dict[str, Any]:
        """The compiler's own annotations; {} where there are none or where they are no JSON."""
        at = self.attributes.find("backend_config=")
        try:
            return json.JSONDecoder().raw_decode(self.attributes, at + len("backend_config="))[0] if at >= 0 else {}
        except json.JSONDecodeError:
            return {}

    @property
    def op_name(self) -> str:
        """Where it comes from, as JAX names it: "jit(step)/while/body/dot_general"; "" if the compiler made it."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1].replace("\\'", "'") if found else ""

    @property
    def trip_count(self) -> int | None:
        """How often a loop runs, where the compiler knows."""
        count = self.backend_config.get("known_trip_count", {}).get("n")
        return None if count is None else int(count)


@dataclasses.dataclass(eq=False)
class Computation:
    """Instructions in the order of the schedule."""

    name: str
    instructions: list[Instruction] = dataclasses.field(default_factory=list)
    root: Instruction | None = None

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {i.name: i for i in self.instructions}

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """The parameters by number."""
        found = [i for i in self.instructions if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.literal))

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Who reads each instruction."""
        found: dict[str, list[Instruction]] = {}
        for i in self.instructions:
            for operand in dict.fromkeys(i.operands):
                found.setdefault(operand, []).append(i)
        return found

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that an instruction reads."""
        return [self.by_name[name] for name in instruction.operands]


@dataclasses.dataclass(eq=False)
class Module:
    """A compiled program of one device."""

    header: str
    computations: dict[str, Computation]
    entry: Computation
    tables: dict[str, list[str]]

    @property
    def partitions(self) -> int:
        """Number of devices that run it together."""
        found = re.search(r"num_partitions=(\d+)", self.header)
        return int(found[1]) if found else 1

    def called(self, instruction: Instruction) -> list[Computation]:
        """The computations that an instruction calls."""
        return [self.computations[name] for name in instruction.callees if name in self.computations]

    def frames(self, instruction: Instruction) -> list[Frame]:
        """The Python stack that made an instruction, innermost first; [] where the compiler made it."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        return self._stack(int(found[1])) if found else []

    @functools.cached_property
    def _tables(self) -> dict[str, dict[int, Any]]:
        text = {k: {int(row.split(" ", 1)[0]): row.split(" ", 1)[1] for row in v} for k, v in self.tables.items()}
        numbers = lambda rows: {i: {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", row)} for i, row in rows.items()}
        strings = lambda rows: {i: row.strip('"') for i, row in rows.items()}
        return {k: numbers(v) if k in ("FileLocations", "StackFrames") else strings(v) for k, v in text.items()}

    @functools.cached_property
    def _stack(self) -> Any:
        tables = self._tables
        frames = tables.get("StackFrames", {})
        # the parent is printed one too high where the outermost frame would be its own parent
        off = int(any(row.get("parent_frame_id") == i for i, row in frames.items()))

        @functools.cache
        def stack(number: int) -> list[Frame]:
            row = frames.get(number)
            if row is None:
                return []
            at = tables["FileLocations"][row["file_location_id"]]
            here = Frame(
                tables["FunctionNames"].get(at["function_name_id"], "?"),
                tables["FileNames"].get(at["file_name_id"], "?"),
                at.get("line", 0),
            )
            return [here, *stack(row.get("parent_frame_id", 0) - off)]

        return stack


def parse(text: str) -> Module:
    """Read a module.

    Args:
        text: `compiled.as_text()`.

    Raises:
        JzeroError: the text is no scheduled module.

    Example:
        >>> module = parse('''HloModule m, is_scheduled=true
        ...
        ... ENTRY %main (x: f32[2]) -> f32[2] {
        ...   %x = f32[2]{0} parameter(0)
        ...   ROOT %y = f32[2]{0} add(%x, %x)
        ... }
        ... ''')
        >>> module.entry.root.opcode, module.entry.root.operands, module.entry.root.bytes
        ('add', ('x', 'x'), 8)
    """
    lines = text.splitlines()
    if not lines or "is_scheduled=true" not in lines[0]:
        raise JzeroError("compiled module: expected the text of a scheduled module; compile for a GPU target")
    computations: dict[str, Computation] = {}
    tables: dict[str, list[str]] = {}
    entry = current = table = None
    for line in lines[1:]:
        head = _HEADER.match(line)
        if head:
            current, table = Computation(head[2]), None
            computations[head[2]] = current
            entry = current if head[1] else entry
        elif current is None and line and line[0].isdigit() and table is not None:
            table.append(line)
        elif current is None and line.isalpha():
            table = tables[line] = []
        elif current is not None and (found := _INSTRUCTION.match(line)):
            instruction = _instruction(found[2], found[3])
            current.instructions.append(instruction)
            current.root = instruction if found[1] else current.root
    if entry is None:
        raise JzeroError("compiled module: expected a computation named ENTRY, found none")
    return Module(lines[0], computations, entry, tables)


def flat(shape: Shape) -> list[Array]:
    """The arrays of a shape, in order."""
    return [shape] if isinstance(shape, Array) else [a for part in shape for a in flat(part)]


def walk(module: Module, computation: Computation, times: int = 1) -> Iterator[tuple[Instruction, Computation, int]]:
    """Every instruction that runs, with its computation and how often it runs; fusions are not entered."""
    for i in computation.instructions:
        yield i, computation, times
        if i.opcode in ("while", "call", "conditional"):
            often = times * (i.trip_count or 1) if i.opcode == "while" else times
            for callee in module.called(i):
                yield from walk(module, callee, often)


def bits(dtype: str) -> int:
    """Bits of one element: the width that XLA's names end in, or begin with (f8e4m3fn, s4, bf16)."""
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) if found else 0


def _instruction(name: str, text: str) -> Instruction:
    text = re.sub(r"/\*.*?\*/", "", text)
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shape, rest = _shape(text[:end]), text[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    close = _closing(rest, len(opcode))
    inside = rest[len(opcode) + 1 : close]
    operands = () if opcode in ("parameter", "constant") else tuple(_NAME.findall(inside))
    return Instruction(name, shape, opcode, operands, rest[close + 1 :].lstrip(", "), inside)


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` is closed."""
    depth = 0
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"|[()]', text[start:]):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0 and found[0] == ")":
            return start + found.start()
    raise JzeroError(f"compiled module: expected a closing parenthesis in {text[:80]!r}")


def _shape(text: str) -> Shape:
    text = text.strip()
    if not text.startswith("("):
        found = _ARRAY.match(text)
        if not found:
            return Array(text.split("[")[0], ())  # token[] and opaque[] print without dimensions
        return Array(found[1], tuple(int(n.lstrip("<=")) for n in found[2].split(",") if n))
    parts, depth, begin = [], 0, 1
    for at, char in enumerate(text[:-1]):
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(char, 0)
        if char == "," and depth == 1:
            parts.append(text[begin:at])
            begin = at + 1
    parts.append(text[begin:-1])
    return tuple(_shape(part) for part in parts if part.strip())
