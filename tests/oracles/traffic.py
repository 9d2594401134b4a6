"""Bytes that the kernels of a phase read and write in a module compiled for GPUs, counted here and not by the planner.

A kernel belongs to a phase where any of its instructions, fused ones included, was traced inside `jax.named_scope` of
the phase's name. Of an operand that is only sliced the slices are read; of an array that a kernel updates in place only
the update is read and written, where nothing but the kernel's result uses it.
"""

from __future__ import annotations

from collections.abc import Iterator

from jzero.plan import hlo

NOTHING = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "optimization-barrier",
           "partition-id", "replica-id", "while", "conditional", "call"}  # fmt: skip
SLICES = {"dynamic-slice", "slice", "gather"}


def kernels(module: hlo.Module) -> Iterator[tuple[hlo.Computation, hlo.Instruction, int]]:
    """Every instruction that runs as a kernel, with how often."""
    for instruction, computation, times in hlo.walk(module, module.entry):
        if instruction.opcode not in NOTHING:
            yield computation, instruction, times


def belongs(module: hlo.Module, instruction: hlo.Instruction, phase: str) -> bool:
    """Whether any part of a kernel was traced in the phase."""
    inside = [i for c in module.called(instruction) for i in c.instructions]
    return any(f"/{phase}/" in f"/{i.op_name}/" for i in [instruction, *inside])


def phase_bytes(module: hlo.Module, phase: str) -> int:
    """Bytes read and written by the kernels of a phase."""
    return sum(times * moved(module, c, i) for c, i, times in kernels(module) if belongs(module, i, phase))


def moved(module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction) -> int:
    """Bytes that one kernel reads and writes."""
    if instruction.opcode != "fusion":
        return sum(o.bytes for o in computation.operands(instruction)) + instruction.bytes
    (inside,) = module.called(instruction)
    assert inside.root is not None
    results = inside.operands(inside.root) if inside.root.opcode == "tuple" else [inside.root]
    written = 0
    for result in results:
        source = _unwrapped(inside, result)
        in_place = source.opcode == "dynamic-update-slice"
        written += inside.operands(source)[1].bytes if in_place else result.bytes
    return written + sum(_read(inside, p, {r.name for r in results}) for p in inside.parameters)


def _unwrapped(inside: hlo.Computation, value: hlo.Instruction) -> hlo.Instruction:
    return _unwrapped(inside, inside.operands(value)[0]) if value.opcode == "bitcast" else value


def _read(inside: hlo.Computation, value: hlo.Instruction, results: set[str]) -> int:
    """Bytes of one operand that are read."""
    total = 0
    for user in inside.users.get(value.name, []):
        first = user.operands[0] == value.name
        if user.opcode == "bitcast":
            total += _read(inside, user, results)
        elif first and user.opcode in SLICES:
            total += user.bytes
        elif not (first and user.opcode == "dynamic-update-slice" and _only_result(inside, user, results)):
            return value.bytes
    return min(total, value.bytes)


def _only_result(inside: hlo.Computation, value: hlo.Instruction, results: set[str]) -> bool:
    users = [u for u in inside.users.get(value.name, []) if u.opcode != "tuple"]
    return all(u.opcode == "bitcast" and _only_result(inside, u, results) for u in users) and (
        value.name in results or bool(users)
    )


def copies(module: hlo.Module) -> int:
    """Bytes that copies read and write."""
    return sum(times * moved(module, c, i) for c, i, times in kernels(module) if i.opcode in ("copy", "copy-start"))
