"""Pipeline parallelism: which layers a stage holds, and every collective over the mesh axis "pipeline".

Each stage holds some layers; the parameters outside of the layers are on every stage, and their gradients are summed
over the stages. The loop in which they work is in `stages.py`, who works when in `timetable.py`.

Letters: S stages, V chunks per stage, L layers, l = L / (S V) layers of a chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jzero.errors import JzeroError
from jzero.optim import collectives
from jzero.parallel.timetable import Timetable, timetable

AXIS = "pipeline"
LAYERS = "layers"
"""The logical dimension of parameters that the axis splits."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How layers are spread over the pipeline axis.

    With several chunks per stage stacked parameters are stored as [V, L / V, ...] instead of [L, ...]: the same numbers
    in the same order, of which the axis splits the second dimension, so that each stage holds V pieces.

    Args:
        size: S, the size of the mesh axis "pipeline".
        chunks: V, chunks of layers per stage.

    Example:
        >>> Pipeline(4).spec(("layers", "embed"), PartitionSpec(None, "tensor")) == PartitionSpec("pipeline", "tensor")
        True
        >>> Pipeline(2, 3).stacked((12, 8))
        (3, 4, 8)
    """

    size: int = 1
    chunks: int = 1

    @property
    def axes(self) -> tuple[str, ...]:
        """The axis, if there is more than one stage."""
        return (AXIS,) if self.size > 1 else ()

    @property
    def stacked_dimensions(self) -> int:
        """Number of leading dimensions that enumerate layers."""
        return 1 if self.chunks == 1 else 2

    def stacked(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape [L, ...] of a stacked parameter -> the one it is stored in."""
        return shape if self.chunks == 1 else (self.chunks, shape[0] // self.chunks, *shape[1:])

    def spec(self, axes: Sequence[str | None], spec: PartitionSpec) -> PartitionSpec:
        """The sharding of a parameter as stored, from its logical dimensions and its sharding over other axes."""
        if self.size == 1 or LAYERS not in axes:
            return spec
        return PartitionSpec(*[None] * (self.stacked_dimensions - 1), AXIS, *spec[1:])

    def timetable(self, micro_batches: int) -> Timetable:
        """The ticks of a step."""
        return timetable(self.size, self.chunks, micro_batches)

    def vary(self, tree: Any) -> Any:
        """Values that all stages share, marked as each stage's own."""
        return jax.tree.map(lambda x: collectives.vary(x, self.axes) if self.axes else x, tree)

    def sum(self, tree: Any) -> Any:
        """The sums over all stages, the same on each."""
        return jax.lax.psum(tree, AXIS) if self.axes else tree

    def own_layers(self, x: Array) -> Array:
        """This stage's entries [V l, ...] of an array [L, ...] that every stage has whole."""
        if self.size == 1:
            return x
        places = x.reshape(self.chunks, self.size, -1, *x.shape[1:])
        own = jax.lax.dynamic_index_in_dim(places, jax.lax.axis_index(AXIS), 1, keepdims=False)
        return own.reshape(-1, *x.shape[1:])

    def in_place(self, own: Array) -> Array:
        """The inverse of `own_layers`: [V l, ...] -> [L, ...], with zeros for the layers of other stages."""
        if self.size == 1:
            return own
        pieces = own.reshape(self.chunks, 1, -1, *own.shape[1:])
        others = jnp.zeros((self.chunks, self.size, *pieces.shape[2:]), own.dtype)
        whole = jax.lax.dynamic_update_slice_in_dim(others, pieces, jax.lax.axis_index(AXIS), 1)
        return whole.reshape(-1, *own.shape[1:])

    def send(self, x: Array, stages: int = 1) -> Array:
        """What the stage `stages` before this one has; the first follows the last."""
        return jax.lax.ppermute(x, AXIS, [(i, (i + stages) % self.size) for i in range(self.size)])


def make_pipeline(mesh: Mesh, chunks: int | None, layers: int) -> Pipeline:
    """How `layers` layers are spread over the pipeline axis of a mesh.

    Raises:
        JzeroError: stages and chunks do not divide the layers, or chunks are asked for without stages.

    Example:
        >>> from jzero import make_mesh
        >>> make_pipeline(make_mesh(data=-1), None, 5)
        Pipeline(size=1, chunks=1)
    """
    check_layers(layers, mesh.shape[AXIS], chunks)
    return Pipeline(mesh.shape[AXIS], chunks or 1)


def check_layers(layers: int, stages: int, chunks: int | None) -> None:
    """Refuse a number of layers that does not divide into chunks of equal size, and chunks without stages.

    Raises:
        JzeroError: names the two numbers.
    """
    if chunks is not None and stages == 1:
        raise JzeroError(
            f"model.virtual_pipeline_model_parallel_size: {chunks} chunks per stage need several stages, but "
            "model.pipeline_model_parallel_size is 1; set it to null"
        )
    if layers % (stages * (chunks or 1)):
        virtual = f" × model.virtual_pipeline_model_parallel_size {chunks}" if chunks else ""
        total = f" = {stages * chunks}" if chunks else ""
        raise JzeroError(
            f"model.num_layers: {layers} is not divisible by model.pipeline_model_parallel_size {stages}{virtual}"
            f"{total}; every chunk has as many layers; change one of them"
        )
