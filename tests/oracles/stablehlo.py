"""Every collective of a lowered program: kind, mesh axes, dtype, bytes on one device, and how often it runs.

Reads the StableHLO that JAX hands to XLA, before any pass of a backend: loops are `while` operations whose condition
compares a counter with a constant, and their bodies may call functions. A loop whose condition compares nothing is one
that a flag lets run once or never (`jzero.parallel.stages.when`): it counts as once.
"""

from __future__ import annotations

import collections
import itertools
import math
from typing import NamedTuple

import numpy as np

KINDS = {"stablehlo.all_gather": "all-gather", "stablehlo.reduce_scatter": "reduce-scatter",
         "stablehlo.all_reduce": "all-reduce", "stablehlo.all_to_all": "all-to-all",
         "stablehlo.collective_permute": "collective-permute"}  # fmt: skip


class Collective(NamedTuple):
    kind: str
    axes: tuple[str, ...]  # mesh axes it communicates over, in the mesh's order
    dtype: str
    bytes: int  # of the full array: a gather's result, a scatter's operand


def collectives(lowered, mesh) -> collections.Counter[Collective]:
    """How often each distinct collective runs in one call of a lowered function."""
    module = lowered.compiler_ir("stablehlo")
    functions = {str(op.attributes["sym_name"]).strip('"'): op for op in module.body.operations}
    found: collections.Counter[Collective] = collections.Counter()
    _walk(functions["main"], 1, functions, mesh, found)
    return found


def _walk(op, times, functions, mesh, found):
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                _visit(inner, times, functions, mesh, found)


def _visit(op, times, functions, mesh, found):
    name = op.operation.name
    if name in KINDS:
        found[_describe(op, KINDS[name], mesh)] += times
    elif name == "stablehlo.while":
        _walk(op, times * _trip_count(op), functions, mesh, found)
    elif name == "func.call":
        _walk(functions[str(op.attributes["callee"]).lstrip("@").strip('"')], times, functions, mesh, found)
    else:
        _walk(op, times, functions, mesh, found)


def _trip_count(op) -> int:
    """The constant that the loop's counter, which starts at 0, is compared with; 1 where nothing is compared."""
    condition = op.regions[0].blocks[0]
    if not any(inner.operation.name == "stablehlo.compare" for inner in condition.operations):
        return 1
    for inner in condition.operations:
        if inner.operation.name == "stablehlo.compare":
            for operand in inner.operands:
                value = _constant(operand)
                if value is not None:
                    return value
    raise AssertionError(f"no constant bound in the condition of {op}")


def _constant(value) -> int | None:
    owner = value.owner
    if hasattr(owner, "name") and owner.name == "stablehlo.constant":
        return int(np.array(owner.attributes["value"]).item())
    return None


def _describe(op, kind, mesh) -> Collective:
    if kind == "collective-permute":
        groups = np.array(op.attributes["source_target_pairs"]).reshape(-1, 2)
    else:
        groups = np.array(op.attributes["replica_groups"])
    operand, result = op.operands[0].type, op.results[0].type
    whole = result if kind == "all-gather" else operand
    width = {"i1": 1, "i8": 1, "ui8": 1, "bf16": 2, "f16": 2, "f32": 4, "i32": 4, "ui32": 4}[str(whole.element_type)]
    return Collective(kind, axes_of(groups, mesh), str(whole.element_type), math.prod(whole.shape) * width)


def axes_of(groups, mesh) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ, and that the groups are exactly those."""
    ids = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    wanted = {tuple(sorted(int(i) for i in group)) for group in groups}
    names = [name for name in mesh.axis_names if mesh.shape[name] > 1]
    for count in range(len(names) + 1):
        for chosen in itertools.combinations(names, count):
            order = [n for n in mesh.axis_names if n not in chosen] + list(chosen)
            moved = ids.transpose([mesh.axis_names.index(n) for n in order])
            size = math.prod(mesh.shape[n] for n in chosen)
            if {tuple(sorted(map(int, row))) for row in moved.reshape(-1, size)} == wanted:
                return tuple(chosen)
    raise AssertionError(f"replica groups {groups} do not follow the mesh axes")
