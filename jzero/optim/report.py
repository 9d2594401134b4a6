"""`partition_report`: how every leaf is split over the data ranks, and what its state costs one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jzero.optim.partition import Leaf, owners
from jzero.optim.storage import Slot, Storage


class ReportRow(NamedTuple):
    """One line of `partition_report`."""

    path: str  # where the leaf stands in the tree
    shape: tuple[int, ...]  # global shape of the parameter
    dtype: str  # of the parameter
    split: str  # "dimension 0 of 2", or "flattened, 3 of padding"
    shard: tuple[int, ...]  # shape of what one device holds of every state array
    precision: str  # how its state is kept: "remainder, mu fp32, nu fp32"; the master first
    state_bytes: int  # bytes of optimizer state on one device


class PartitionReport(tuple[ReportRow, ...]):
    """The rows of `tx.partition_report(params)`; `str()` of it is an aligned table."""

    def __str__(self) -> str:
        rows = [ReportRow._fields, *((*r[:-1], f"{r.state_bytes:,}") for r in self)]
        cells = [[str(cell) for cell in row] for row in rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(ReportRow._fields))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        return "\n".join([*lines, f"total: {sum(r.state_bytes for r in self):,} bytes of state per device"])


def describe(leaf: Leaf) -> str:
    """How a leaf is split, in words."""
    if leaf.split is None:
        return f"flattened, {leaf.padding} of padding"
    return f"dimension {leaf.split} of {len(leaf.shape)}"


def kept(leaf: Leaf, storage: Storage, slots: Sequence[Slot]) -> str:
    """How master and state of a leaf are kept, in words."""
    mode = storage.mode(leaf)
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
    written = lambda dtype: short.get(str(dtype), str(dtype))
    fields = {
        slot.field: f"scaled {written(slot.codec.dtype)}" if slot.codec and slot.codec.scaled
        else written(slot.codec.dtype if slot.codec else slot.dtype)
        for slot in slots if slot.leaf == leaf and slot.field
    }  # fmt: skip
    master = {"none": "no master", "fp32": "fp32 master", "scaled_fp16": "scaled fp16 master"}.get(mode, mode)
    return ", ".join([master, *(f"{field} {codec}" for field, codec in fields.items())])


def partition_report(state: Any, storage: Storage, slots: Sequence[Slot]) -> PartitionReport:
    """The report of an abstract `ZeroState`, kept as `storage` and `slots` say."""
    sizes = dict.fromkeys((leaf.path for leaf in state.plan.leaves), 0)

    def add(x: Any, leaf: Leaf) -> None:
        sizes[leaf.path] += x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))

    for x, leaf in zip(jax.tree.leaves(state.inner), owners(state.inner, state.plan), strict=True):
        if leaf is not None:
            add(x, leaf)
    for stored, leaf in zip(state.plan.flatten(state.master, "master"), state.plan.leaves, strict=True):
        for x in jax.tree.leaves(stored):
            add(x, leaf)
    for tree in state.fp8[:2] if state.fp8 else ():  # scales and history of the FP8 parameters
        for stored, leaf in zip(state.plan.flatten(tree, "fp8"), state.plan.leaves, strict=True):
            for x in jax.tree.leaves(stored):
                add(x, leaf)
    return PartitionReport(
        ReportRow(
            leaf.path,
            leaf.shape,
            leaf.dtype,
            describe(leaf),
            leaf.shard_local_shape,
            kept(leaf, storage, slots),
            sizes[leaf.path],
        )
        for leaf in state.plan.leaves
    )
