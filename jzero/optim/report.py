"""`partition_report`: how every leaf is split over the data ranks, and what its state costs one device."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from jzero.optim.partition import Leaf, owners


class ReportRow(NamedTuple):
    """One line of `partition_report`."""

    path: str  # where the leaf stands in the tree
    shape: tuple[int, ...]  # global shape of the parameter
    dtype: str  # of the parameter
    split: str  # "dimension 0 of 2", or "flattened, 3 of padding"
    shard: tuple[int, ...]  # shape of what one device holds of every state array
    state_bytes: int  # bytes of optimizer state on one device


class PartitionReport(tuple[ReportRow, ...]):
    """The rows of `tx.partition_report(params)`; `str()` of it is an aligned table."""

    def __str__(self) -> str:
        rows = [ReportRow._fields, *((r.path, r.shape, r.dtype, r.split, r.shard, f"{r.state_bytes:,}") for r in self)]
        cells = [[str(cell) for cell in row] for row in rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(ReportRow._fields))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        return "\n".join([*lines, f"total: {sum(r.state_bytes for r in self):,} bytes of state per device"])


def describe(leaf: Leaf) -> str:
    """How a leaf is split, in words."""
    if leaf.split is None:
        return f"flattened, {leaf.padding} of padding"
    return f"dimension {leaf.split} of {len(leaf.shape)}"


def partition_report(state: Any) -> PartitionReport:
    """The report of an abstract `ZeroState`."""
    sizes = dict.fromkeys((leaf.path for leaf in state.plan.leaves), 0)

    def add(x: Any, leaf: Leaf) -> None:
        sizes[leaf.path] += x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))

    for x, leaf in zip(jax.tree.leaves(state.inner), owners(state.inner, state.plan), strict=True):
        if leaf is not None:
            add(x, leaf)
    for stored, leaf in zip(state.plan.flatten(state.master, "master"), state.plan.leaves, strict=True):
        for x in jax.tree.leaves(stored):
            add(x, leaf)
    return PartitionReport(
        ReportRow(leaf.path, leaf.shape, leaf.dtype, describe(leaf), leaf.shard_local_shape, sizes[leaf.path])
        for leaf in state.plan.leaves
    )
