"""The device mesh: the names of its axes, how it is made, and how a batch lies on it.

Axes, outermost first: `pipeline`, `replica`, `data`, `tensor`. Neighbouring devices (the fastest links) hold
neighbouring `tensor` ranks. Optimizer state is sharded over `data` and repeated over `replica`; on many hosts: shard
inside the host, replicate across. An axis of size 1 costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jzero.errors import JzeroError

AXES = ("pipeline", "replica", "data", "tensor")
BATCH_AXES = ("replica", "data")
"""The axes that split a batch by samples."""


def make_mesh(
    data: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    replica: int = 1,
    *,
    devices: Sequence[Any] | None = None,
    axis_type: AxisType = AxisType.Auto,
) -> Mesh:
    """A mesh with jzero's four axes.

    Args:
        data: ranks that split the optimizer state (and the batch). One of the four sizes may be -1: the rest of the
            devices.
        tensor: ranks that split single matrices.
        pipeline: stages that split the layers.
        replica: copies of the sharded state (the batch is split over them as well).
        devices: `jax.Device`s to build it from; default: all devices, as `jax.make_mesh` orders them for fast links.
        axis_type: `AxisType.Auto` (default) or `AxisType.Explicit` for all axes.

    Returns:
        A `jax.sharding.Mesh` with axes `("pipeline", "replica", "data", "tensor")`.

    Raises:
        JzeroError: a size is not positive, more than one is -1, or the sizes do not use exactly the devices there are.

    Example:
        >>> make_mesh(data=-1).axis_names
        ('pipeline', 'replica', 'data', 'tensor')
    """
    sizes = {"pipeline": pipeline, "replica": replica, "data": data, "tensor": tensor}
    count = len(jax.devices() if devices is None else devices)
    shape = _fill(sizes, count)
    return jax.make_mesh(shape, AXES, axis_types=(axis_type,) * len(AXES), devices=devices)


def _fill(sizes: dict[str, int], devices: int) -> tuple[int, ...]:
    """The four sizes, with a -1 replaced by what is left of the devices."""
    for name, size in sizes.items():
        if size == 0 or size < -1:
            raise JzeroError(f"mesh axis '{name}': expected a positive size or -1, found {size}")
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise JzeroError(f"mesh: at most one size may be -1, found {' and '.join(open_axes)}; set all but one")
    known = math.prod(size for size in sizes.values() if size != -1)
    asked = " x ".join(f"{name} {size}" for name, size in sizes.items())
    if devices % known or (not open_axes and known != devices):
        raise JzeroError(
            f"mesh {asked}: expected sizes whose product is the {devices} devices there are, found {known}"
        )
    return tuple(devices // known if size == -1 else size for size in sizes.values())


def batch_spec() -> PartitionSpec:
    """The sharding of an array of samples: its first dimension is split over replica and data, the rest is whole.

    A batch that is not placed so is computed whole on every device.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import NamedSharding
        >>> mesh = make_mesh(data=-1)
        >>> batch = jax.device_put(np.ones((16, 4)), NamedSharding(mesh, batch_spec()))
        >>> batch.addressable_shards[0].data.shape[0] * data_ranks(mesh)
        16
    """
    return PartitionSpec(BATCH_AXES)


def data_ranks(mesh: Mesh) -> int:
    """Number of ranks that split a batch: replica x data."""
    return math.prod(mesh.shape[name] for name in BATCH_AXES)
