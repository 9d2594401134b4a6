"""Which parameter lives where: the mesh axes that split each one and its state, and the bytes on one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding

from jzero.fp8.parameters import is_quantised
from jzero.train.layout import bytes_per_device
from jzero.train.step import Program

Split = dict[str, tuple[str, ...]]
"""Name of a dimension -> the mesh axes that split it, the outer one first; whole dimensions are left out."""
FLAT = "flat"
"""The dimension of state that is flattened and padded, as no dimension of its parameter divides."""


class Placement(NamedTuple):
    """Where one parameter lives. Axes that are not named repeat it: every rank of them holds the same."""

    path: str  # "blocks/mlp/up/weight"
    shape: tuple[int, ...]  # of the model's parameter, layers stacked in front
    dtype: str
    split: Split  # of the parameter between steps
    bytes: int  # of the parameter on one device
    state_split: Split  # of the optimizer's state, master and moments
    state_bytes: int  # of the state on one device


def placements(program: Program) -> list[Placement]:
    """Where every parameter of a run lives. Nothing is compiled or allocated.

    Args:
        program: of any configuration and mesh, described devices too.

    Returns:
        One row per parameter, in the order of the model's tree. The bytes are all that the state's arrays take on a
        device, but for a few scalars that belong to no parameter.

    Example:
        >>> from jzero import make_mesh
        >>> from jzero.train.config import Config
        >>> from jzero.train.step import build_program
        >>> rows = placements(build_program(Config(), make_mesh(data=-1), 257))
        >>> rows[-3].path, rows[-3].shape, rows[-3].split, rows[-3].state_split
        ('embedding/token', (384, 768), {}, {'vocab': ('data',)})
    """
    layout, model = program.layout, program.model
    names = jax.tree.leaves(model.axes, is_leaf=lambda x: isinstance(x, tuple))
    shapes = [x.shape for x in jax.tree.leaves(model.abstract)]
    stored = layout.abstract_params()
    report = layout.tx.partition_report(stored)
    named = jax.tree_util.tree_leaves_with_path(stored, is_leaf=is_quantised)
    rows = zip(named, names, shapes, layout.plan.leaves, layout.tx.plan(stored).leaves, report, strict=True)
    out = []
    for (path, x), dimensions, shape, leaf, state, row in rows:
        extra = max(leaf.stacked - 1, 0)  # a dimension of chunks, which the model's parameter has not
        own = x.value if is_quantised(x) else x
        split = _split(_names(dimensions, leaf.split is None and layout.sharded), own.sharding, extra)
        sharding = NamedSharding(layout.mesh, state.shard_spec)
        state_split = _split(_names(dimensions, state.split is None), sharding, extra)
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        out.append(Placement(where, shape, leaf.dtype, split, bytes_per_device(x), state_split, row.state_bytes))
    return out


def _names(dimensions: Sequence[str | None], flat: bool) -> list[str]:
    """A name for every dimension of an array; the last one of a flattened array is `FLAT`."""
    names = [name or f"dimension {i}" for i, name in enumerate(dimensions)]
    return [*names[:-1], FLAT] if flat else names


def _split(names: Sequence[str], sharding: NamedSharding, extra: int) -> Split:
    """A sharding by names of dimensions, which begin after the first `extra`. Axes of one rank split nothing."""
    sizes, out = sharding.mesh.shape, {}
    for name, entry in zip(names, sharding.spec[extra:], strict=False):  # whole dimensions at the end have no entry
        axes = (entry,) if isinstance(entry, str) else entry or ()
        if axes := tuple(axis for axis in axes if sizes[axis] > 1):
            out[name] = axes
    return out


def total(rows: Sequence[Placement]) -> tuple[int, int, int]:
    """Numbers of the whole model, bytes of parameters on a device, bytes of state on a device."""
    return sum(math.prod(r.shape) for r in rows), sum(r.bytes for r in rows), sum(r.state_bytes for r in rows)


def words(split: Split) -> str:
    """A split in words: dimension/axes.

    Example:
        >>> words({"layers": ("pipeline",), "vocab": ("tensor", "data")}), words({})
        ('layers/pipeline, vocab/tensor+data', 'whole')
    """
    return ", ".join(f"{name}/{'+'.join(axes)}" for name, axes in split.items()) or "whole"
