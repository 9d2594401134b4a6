"""Scheduled modules written by hand, and a GPU on which time is easy to know: a multiply of [n] moves 12 n bytes."""

import dataclasses

from jzero.plan import cost, targets
from jzero.plan.hlo import parse
from jzero.plan.timeline import play

# 1 byte/s-like units: 1 GB/s of memory and links, so that bytes are nanoseconds; nothing else costs anything
GPU = dataclasses.replace(
    targets.TARGETS["h100-sxm-80gb"],
    bandwidth=1e9 / cost.MEMORY_EFFICIENCY,
    link=1e9 / cost.LINK_EFFICIENCY,
    network=1e9 / cost.LINK_EFFICIENCY,
)
MESH = {"data": 4, "tensor": 2}
DATA = "replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true"
SYNC = 'backend_config={"collective_backend_config":{"is_sync":true}}'


def module(entry: str, others: str = "", partitions: int = 8):
    """A module with this body of its entry computation, whose parameter is `%x`, and other computations in front."""
    add = "%add (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
    add += "  ROOT %c = f32[] add(%a, %b)\n}\n"
    return parse(
        f"HloModule m, is_scheduled=true, num_partitions={partitions}\n\n{add}\n{others}\n"
        f"ENTRY %main (x: f32[1000]) -> f32[1000] {{\n  %x = f32[1000]{{0}} parameter(0)\n{entry}\n}}\n"
    )


def timeline(entry: str, others: str = "", **changes):
    return play(module(entry, others), GPU, changes.get("mesh", MESH), changes.get("domain", 8))


def multiply(name: str, of: str, size: int = 1000) -> str:
    return f"  %{name} = f32[{size}]{{0}} multiply(%{of}, %{of})"
