"""How long one kernel or one collective takes: the model of docs/plan.md, and nothing else.

    kernel       max(operations / (rate x efficiency), bytes / (memory bandwidth x 0.85)) + 2 us
    collective   bytes x (n-1)/n / (link rate x 0.8) + latency     (twice for an all-reduce; once for a permutation)

Bytes of a kernel are what it must read and write: slices count as slices, updates in place as the update.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from jzero.plan import groups
from jzero.plan.groups import Axes, Groups
from jzero.plan.hlo import Array, Computation, Instruction, Module, flat
from jzero.plan.targets import Target

MEMORY_EFFICIENCY = 0.85
LINK_EFFICIENCY = 0.80
KERNEL_SECONDS = 2e-6
COLLECTIVE_SECONDS, LINK_HOP_SECONDS, NETWORK_HOP_SECONDS = 10e-6, 2e-6, 5e-6

FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "optimization-barrier",
        "partition-id", "replica-id", "add-dependency", "domain", "send", "recv"}  # fmt: skip
"""Instructions that run nothing."""

MOVES = FREE | {"copy", "transpose", "reshape", "broadcast", "slice", "dynamic-slice", "dynamic-update-slice", "pad",
                "concatenate", "iota", "reverse", "gather", "copy-start"}  # fmt: skip
"""Instructions that move numbers without changing one."""

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
         "collective-broadcast")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What one instruction costs.

    Attributes:
        seconds: estimated.
        operations: of its matrix products.
        bytes: read and written.
        moves: it only moves numbers (copies, fills, transposes, slices).
    """

    seconds: float
    operations: float
    bytes: int
    moves: bool


@dataclasses.dataclass(frozen=True)
class Collective:
    """One call of a collective, on one device.

    Attributes:
        kind: as XLA names it: "all-gather".
        axis: mesh axes it communicates over, joined by "+".
        bytes: of the whole array: a gather's result, the operand of the others.
        asynchronous: compute may run meanwhile.
        seconds: estimated.
    """

    kind: str
    axis: str
    bytes: int
    asynchronous: bool
    seconds: float


# --- kernels ---------------------------------------------------------------------------------------------------------


def kernel(module: Module, computation: Computation, instruction: Instruction, target: Target) -> Kernel | None:
    """The cost of an instruction; None where it runs nothing or is a loop, a branch, or a collective."""
    if instruction.opcode in FREE or instruction.opcode.endswith(("-done", "-update")):
        return None
    if instruction.opcode == "async-start":  # a kernel on a stream of its own: counted as if it ran in turn
        inside = module.called(instruction)[0]
        return None if inside.root is None else kernel(module, inside, inside.root, target)
    products = list(_products(module, computation, instruction))
    operations = sum(n for n, _ in products)
    arithmetic = sum(n / (target.rate(dtype) * target.efficiency) for n, dtype in products)
    moved = traffic(module, computation, instruction)
    seconds = max(arithmetic, moved / (target.bandwidth * MEMORY_EFFICIENCY)) + KERNEL_SECONDS
    return Kernel(seconds, operations, moved, moves(module, instruction))


def moves(module: Module, instruction: Instruction) -> bool:
    """Whether nothing but single numbers (an index) is computed."""
    if instruction.opcode != "fusion":
        return instruction.opcode in MOVES
    single = lambda i: sum(a.size for a in i.arrays) <= 1
    inner = [(c, i) for c in module.called(instruction) for i in c.instructions]
    return all(i.opcode in MOVES or all(single(x) for x in [i, *c.operands(i)]) for c, i in inner)


def _products(module: Module, computation: Computation, instruction: Instruction) -> Iterator[tuple[float, str]]:
    """Operations and type of each matrix product in an instruction, fusions entered."""
    target = instruction.attribute("custom_call_target") or ""
    if instruction.opcode in ("fusion", "call"):
        for callee in module.called(instruction):
            for inner in callee.instructions:
                yield from _products(module, callee, inner)
    elif instruction.opcode == "dot":
        contracted = instruction.attribute("lhs_contracting_dims") or "{}"
        dims = [int(n) for n in contracted.strip("{}").split(",") if n]
        yield _product(computation, instruction, dims, "highest" in (instruction.attribute("operand_precision") or ""))
    elif target.startswith("__cublas$"):
        config = instruction.backend_config.get("gemm_backend_config", {})
        dims = [int(n) for n in config.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", [])]
        precision = config.get("precision_config", {}).get("operand_precision", [])
        yield _product(computation, instruction, dims, "HIGHEST" in precision)
    elif target.startswith("__cudnn$fmha"):
        yield _attention(computation, instruction, backward="Backward" in target)
    elif instruction.opcode == "convolution" or target.startswith("__cudnn$conv"):
        yield _convolution(computation, instruction)


def _product(
    computation: Computation, instruction: Instruction, contracted: list[int], exact: bool
) -> tuple[float, str]:
    left = computation.operands(instruction)[0].arrays[0]
    size = math.prod(left.dims[d] for d in contracted)
    dtype = "fp32" if exact and left.dtype == "f32" else left.dtype
    return 2.0 * instruction.arrays[0].size * size, dtype


def _attention(computation: Computation, instruction: Instruction, backward: bool) -> tuple[float, str]:
    """Flash attention: two products forward, five backward (one of them again); half of each under a causal mask."""
    config = instruction.backend_config.get("cudnn_fmha_backend_config", {})
    scores = [int(n) for n in config.get("intermediate_tensor_shape", {}).get("dimensions", [])]
    query = computation.operands(instruction)[0].arrays[0]
    width = query.size // max(math.prod(scores[:3]), 1)
    part = 0.5 if "CAUSAL" in config.get("mask_type", "") else 1.0
    return 2.0 * (5 if backward else 2) * part * math.prod(scores) * width, query.dtype


def _convolution(computation: Computation, instruction: Instruction) -> tuple[float, str]:
    kernel_labels = (instruction.attribute("dim_labels") or "_o->").split("_")[1].split("->")[0]
    weights = computation.operands(instruction)[1].arrays[0]
    features = weights.dims[kernel_labels.index("o")] if len(weights.dims) == len(kernel_labels) else 1
    return 2.0 * instruction.arrays[0].size * weights.size / features, weights.dtype


def traffic(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes that an instruction reads and writes."""
    operands = computation.operands(instruction)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * operands[1].bytes
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * instruction.bytes
    if instruction.opcode != "fusion":
        return sum(o.bytes for o in operands) + instruction.bytes
    inside = module.called(instruction)[0]
    read = sum(_read(inside, parameter) for parameter in inside.parameters)
    return read + sum(_written(inside, name) for name in results(inside))


def results(computation: Computation) -> list[str]:
    """The instructions that a computation returns, a tuple taken apart."""
    root = computation.root
    if root is None:
        return []
    return list(root.operands) if root.opcode == "tuple" else [root.name]


def _read(inside: Computation, value: Instruction) -> int:
    """Bytes of a fusion's operand that are read: of slices only the slice, of what is updated in place nothing."""
    total = 0
    for user in inside.users.get(value.name, []):
        first = user.operands[0] == value.name
        if user.opcode == "bitcast":
            total += _read(inside, user)
        elif first and user.opcode in ("dynamic-slice", "slice", "gather"):
            total += user.bytes
        elif not (first and user.opcode == "dynamic-update-slice"):
            return value.bytes
    return min(total, value.bytes)


def _written(inside: Computation, name: str) -> int:
    value = inside.by_name[name]
    if value.opcode == "bitcast":
        return _written(inside, value.operands[0])
    if value.opcode == "dynamic-update-slice":
        return inside.by_name[value.operands[1]].bytes
    return value.bytes


# --- collectives -----------------------------------------------------------------------------------------------------


def collective(
    module: Module, computation: Computation, instruction: Instruction, target: Target, mesh: Axes, domain: int
) -> Collective | None:
    """What an instruction communicates; None where it does not.

    Args:
        module, computation: where it stands.
        instruction: a collective, the start of one, or a fusion or asynchronous call that holds one.
        target: the GPU.
        mesh: name and size of every mesh axis, outermost first.
        domain: GPUs joined by the fast links.
    """
    found = _find(module, computation, instruction)
    if found is None:
        return None
    kind, inner, operands = found
    members = _groups(module, inner, kind)
    size = sum(a.bytes for a in operands) * (len(members[0]) if kind == "all-gather" and members else 1)
    started = instruction.opcode.endswith("-start") or instruction.opcode == "recv"
    synchronous = instruction.backend_config.get("collective_backend_config", {}).get("is_sync", False)
    seconds = collective_seconds(kind, size, members, target, domain)
    # the pairs of a permutation are no groups that could span an axis
    axis = "+".join(groups.axes(members, mesh)) if "permute" in kind else groups.axis_name(members, mesh)
    return Collective(kind, axis, size, started and not synchronous, seconds)


def _find(
    module: Module, computation: Computation, instruction: Instruction
) -> tuple[str, Instruction, list[Array]] | None:
    """Kind, the instruction that names the groups, and the arrays that are sent."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in KINDS:
        return opcode, instruction, [a for o in computation.operands(instruction) for a in o.arrays]
    if instruction.opcode == "recv":  # what is sent is received: one transfer
        return "collective-permute", instruction, flat(instruction.shape)[:1]
    if instruction.opcode in ("async-start", "fusion"):
        for callee in module.called(instruction):
            for inner in callee.instructions:
                found = _find(module, callee, inner)
                if found:
                    return found
    return None


def _groups(module: Module, instruction: Instruction, kind: str) -> Groups:
    if kind == "collective-permute":
        text = instruction.attribute("source_target_pairs") or instruction.attributes
        return groups.pairs(text)
    found = groups.replica_groups(instruction.attribute("replica_groups") or "{}", module.partitions)
    # without global numbers a group lists replicas (of which there is one), and every partition takes part
    partitions_join = instruction.attribute("channel_id") and kind in ("all-reduce", "all-gather", "reduce-scatter")
    if partitions_join and instruction.attribute("use_global_device_ids") is None and found == ((0,),):
        return (tuple(range(module.partitions)),)
    return found


def collective_seconds(kind: str, size: int, members: Groups, target: Target, domain: int) -> float:
    """Estimated time of one collective of `size` bytes.

    Args:
        kind: as XLA names it.
        size: bytes of the whole array.
        members: the groups of devices.
        target: the GPU.
        domain: GPUs joined by the fast links.
    """
    n = max((len(group) for group in members), default=1)
    if n == 1:
        return 0.0
    link, network = target.link * LINK_EFFICIENCY, target.network * LINK_EFFICIENCY
    hosts, inside = groups.hosts_of(members, domain)
    if kind in ("collective-permute", "collective-broadcast"):
        hop = NETWORK_HOP_SECONDS if hosts > 1 else LINK_HOP_SECONDS
        return size / (network if hosts > 1 else link) + COLLECTIVE_SECONDS + hop
    if kind in ("all-to-all", "ragged-all-to-all"):
        moved = max(size * (inside - 1) / n / link, size * (n - inside) / n / network)
        return moved + COLLECTIVE_SECONDS + (NETWORK_HOP_SECONDS if hosts > 1 else LINK_HOP_SECONDS)
    # a ring: all but the own part over the links; what other machines hold, over all network ports of the group at once
    moved = max(size * (n - 1) / n / link if inside > 1 else 0.0, size * (hosts - 1) / hosts / (network * inside))
    ring = (n - hosts) * LINK_HOP_SECONDS + (hosts - 1) * NETWORK_HOP_SECONDS
    if kind != "all-reduce":
        return moved + COLLECTIVE_SECONDS + ring
    tree = 2 * (math.ceil(math.log2(hosts)) * NETWORK_HOP_SECONDS + (n // hosts - 1) * LINK_HOP_SECONDS)
    return 2 * moved + COLLECTIVE_SECONDS + min(2 * ring, tree)
