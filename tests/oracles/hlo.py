"""Bytes per kind of collective in a compiled module, each counted as often as the loops around it run it.

A loop whose condition compares nothing is one that a flag lets run once or never (`jzero.parallel.stages.when`): it
counts as once.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterator

import numpy as np

Groups = frozenset[tuple[int, ...]]

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(-start)?\((.*?)\), "
)
_CALLS = re.compile(r"(?:body|to_apply|calls|called_computations)=\{?%?([\w.\-]+)")
_ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16|f8\w+)\[([\d,]*)\]")
_WIDTH = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}


def collective_bytes(text: str) -> collections.Counter[str]:
    """Total bytes per kind in one run of the module: of the full arrays (a gather's results, a scatter's operands)."""
    totals: collections.Counter[str] = collections.Counter()
    for (kind, _), size in collective_bytes_by_groups(text).items():
        totals[kind] += size
    return totals


def collective_bytes_by_groups(text: str) -> collections.Counter[tuple[str, Groups]]:
    """The same, per kind and groups of devices."""
    totals: collections.Counter[tuple[str, Groups]] = collections.Counter()
    shapes = {m[1]: m[2] for m in re.finditer(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\S.*?) [\w\-]+\(", text, re.M)}
    for line, times in _runs(text):
        found = _COLLECTIVE.search(line)
        if found:
            result, kind, _, operands = found.groups()
            totals[kind, _groups(line)] += times * _full_bytes(result, kind, operands, shapes)
    return totals


def library_calls(text: str) -> collections.Counter[tuple[str, str]]:
    """How often each library function runs, by its name and the type of its (first) result: "bf16[256,512]"."""
    totals: collections.Counter[tuple[str, str]] = collections.Counter()
    for line, times in _runs(text):
        found = re.search(r"= \(?(\w+\[[\d,]*\]).* custom-call\(.*custom_call_target=\"([^\"]+)\"", line)
        if found:
            totals[found[2], found[1]] += times
    return totals


def _runs(text: str) -> Iterator[tuple[str, int]]:
    """Every instruction that is no call, and how often it runs."""
    bodies, entry = _computations(text)

    def by_flag(loop: str) -> bool:
        condition = re.search(r"condition=%?([\w.\-]+)", loop)
        return condition is not None and not any(
            " compare(" in line or "fusion(" in line for line in bodies[condition[1]]
        )

    def visit(name: str, times: int) -> Iterator[tuple[str, int]]:
        for line in bodies[name]:
            if _COLLECTIVE.search(line):
                yield line, times
                continue
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            callees = {callee for callee in _CALLS.findall(line) if callee in bodies}
            for callee in callees:
                if " while(" in line:
                    assert trips or by_flag(line), f"a loop without a known trip count: {line[:200]}"
                yield from visit(callee, times * (int(trips[1]) if trips and " while(" in line else 1))
            if not callees:
                yield line, times

    return visit(entry, 1)


def _groups(line: str) -> Groups:
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}", line)
    if listed:
        return frozenset(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    counted = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    assert counted, f"a collective without groups: {line[:200]}"
    shape, sizes, order = ([int(n) for n in part.split(",")] if part else [] for part in counted.groups())
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return frozenset(map(tuple, (ids.transpose(order) if order else ids).reshape(shape).tolist()))


def loop_bodies(text: str) -> list[list[str]]:
    """The instructions of every loop's body, loop by loop."""
    bodies, _ = _computations(text)
    names = {m[1] for m in re.finditer(r" while\(.*?body=%?([\w.\-]+)", text)}
    return [bodies[name] for name in names]


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    current = entry = ""
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head and "=" not in line.split("(")[0]:
            current = head[2]
            bodies[current] = []
            entry = current if head[1] else entry
        elif current:
            bodies[current].append(line)
    return bodies, entry


def _full_bytes(result: str, kind: str, operands: str, shapes: dict[str, str]) -> int:
    names = re.findall(r"%([\w.\-]+)", operands)
    operand = sum(_bytes(shapes[name]) for name in names)
    if kind != "all-gather":
        return operand
    total = _bytes(result)
    both = len(_ARRAY.findall(result)) > len(names)  # an asynchronous start's result holds operands and results
    return total - operand if both else total


def _bytes(shape: str) -> int:
    return sum(
        _WIDTH.get(dtype, 1) * math.prod(int(n) for n in dims.split(",") if n) for dtype, dims in _ARRAY.findall(shape)
    )
