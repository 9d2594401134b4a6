"""Names of compiled instructions in the words of the program: the operation, the function, the line."""

from __future__ import annotations

import collections
import itertools
from pathlib import PurePath

from jzero.plan.hlo import Computation, Frame, Instruction, Module

_OWN = str(PurePath(__file__).parent)


def describe(module: Module, computation: Computation, instruction: Instruction) -> str:
    """An instruction in the program's words.

    Returns:
        "dot_general in Linear < MLP (layers.py:180)": the operation, the function it stands in, that one's caller and
        the caller's line. What the compiler made up is named after what it is made from ("copy of ..."), or made for.
    """
    for source in [instruction, *_inside(module, instruction)]:
        if source.op_name and (frames := program(module, source)):
            return f"{operation(source)} in {place(frames)}"
    if instruction.opcode == "copy":
        source = _source(computation, instruction)
        return instruction.name if source is None else f"copy of {describe(module, computation, source)}"
    for user in _readers(computation, instruction):
        if user.op_name and (frames := program(module, user)):
            return f"{operation(instruction)} for {operation(user)} in {place(frames)}"
    return operation(instruction)


def program(module: Module, instruction: Instruction) -> list[Frame]:
    """The Python stack that made an instruction, without the planner and what called it; [] where nothing is left."""
    return list(itertools.takewhile(lambda frame: not frame.file.startswith(_OWN), module.frames(instruction)))


def kernel(module: Module, instruction: Instruction) -> str:
    """A kernel in one word: its operation, or of a fusion without a name that of the last part with one."""
    named = (i for i in [instruction, *_inside(module, instruction)] if i.op_name)
    return (
        operation(next(named, instruction)).removesuffix(".double_buffer_clone").removesuffix(".peeled_double_buffer")
    )


def operation(instruction: Instruction) -> str:
    """The last part of JAX's name of an operation, else XLA's."""
    last = instruction.op_name.rsplit("/", 1)[-1].split(":")[-1].strip("()")
    target = instruction.attribute("custom_call_target") or ""
    if target.startswith("__cublas"):  # JAX's name may be that of a transpose, which is part of the product
        return last if "dot" in last else "matrix product"
    return last or target or instruction.name


def place(frames: list[Frame]) -> str:
    """The innermost function, and the line from which it was called."""
    function = short(frames[0])
    caller = next((f for f in frames[1:] if short(f) != function), None)
    if caller is None:
        return f"{function} ({PurePath(frames[0].file).name}:{frames[0].line})"
    return f"{function} < {short(caller)} ({PurePath(caller.file).name}:{caller.line})"


def short(frame: Frame) -> str:
    """A function's name without what only Python needs."""
    parts = [p for p in frame.function.split(".") if p != "<locals>" and p != "__call__"]
    named = [p for p in parts if not p.startswith("<")]
    return ".".join((named or parts)[-2:])


def loop(module: Module, instruction: Instruction) -> str:
    """A loop by the function that it stands in, else the one that most of its body comes from: "backward ×24"."""
    if own := program(module, instruction):
        return f"{short(own[0])} ×{instruction.trip_count or '?'}"
    body = next(c for c in module.called(instruction) if c.name in (instruction.attribute("body") or ""))
    stacks = [program(module, i) for i in body.instructions]
    stacks = [list(dict.fromkeys(reversed(stack))) for stack in stacks if stack]  # outermost first
    common = collections.Counter(frame for stack in stacks for frame in stack)
    shared = [f for f in max(stacks, key=len, default=[]) if common[f] >= 0.6 * len(stacks)]
    name = short(shared[-1]) if shared else instruction.name
    return f"{name} ×{instruction.trip_count or '?'}"


def _inside(module: Module, instruction: Instruction) -> list[Instruction]:
    """A fusion's own instructions, the last first."""
    if instruction.opcode != "fusion":
        return []
    return [i for c in module.called(instruction) for i in reversed(c.instructions)]


def _source(computation: Computation, instruction: Instruction) -> Instruction | None:
    """What a copy copies, where that was made in the same computation."""
    found = computation.by_name[instruction.operands[0]]
    while found.opcode in ("bitcast", "get-tuple-element"):
        found = computation.by_name[found.operands[0]]
    return None if found.opcode in ("parameter", "while", "copy") else found


def _readers(computation: Computation, instruction: Instruction) -> list[Instruction]:
    """Who reads a value, also as an element of its tuple."""
    users = computation.users.get(instruction.name, [])
    return users + [u for i in users if i.opcode in ("bitcast", "get-tuple-element") for u in _readers(computation, i)]
