"""Axis names and sizes of the mesh, and what is said about sizes that do not fit."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jzero
from jzero import mesh


def test_the_axes_and_their_order():
    made = jzero.make_mesh(data=2, tensor=2, pipeline=2)
    assert made.axis_names == jzero.AXES == ("pipeline", "replica", "data", "tensor")
    assert dict(made.shape) == {"pipeline": 2, "replica": 1, "data": 2, "tensor": 2}
    assert [d.id for d in made.devices[0, 0, 0]] == [0, 1]  # tensor ranks are neighbours
    assert made.axis_types == (AxisType.Auto,) * 4


@pytest.mark.parametrize("axis", jzero.AXES)
def test_one_size_may_be_the_rest_of_the_devices(axis):
    other = "tensor" if axis != "tensor" else "data"
    made = jzero.make_mesh(**{"data": 1} | {other: 2} | {axis: -1})
    assert made.shape[axis] == 4
    assert made.size == 8


def test_chosen_devices_and_explicit_axes():
    made = jzero.make_mesh(data=-1, devices=jax.devices()[:4], axis_type=AxisType.Explicit)
    assert made.shape["data"] == 4
    assert made.axis_types == (AxisType.Explicit,) * 4
    assert set(made.devices.flat) == set(jax.devices()[:4])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 0}, "mesh axis 'data': expected a positive size or -1, found 0"),
        ({"tensor": -2}, "mesh axis 'tensor': expected a positive size or -1, found -2"),
        ({"data": -1, "tensor": -1}, "mesh: at most one size may be -1, found data and tensor; set all but one"),
        ({"data": 3}, "expected sizes whose product is the 8 devices there are, found 3"),
        ({"data": 16}, "expected sizes whose product is the 8 devices there are, found 16"),
        ({"data": -1, "tensor": 3}, "expected sizes whose product is the 8 devices there are, found 3"),
        ({}, "mesh pipeline 1 x replica 1 x data 1 x tensor 1: expected sizes whose product is the 8 devices"),
    ],
)
def test_sizes_that_do_not_fit(sizes, message):
    with pytest.raises(jzero.JzeroError) as error:
        jzero.make_mesh(**sizes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_batch_is_split_over_replicas_and_data():
    made = jzero.make_mesh(data=2, replica=2, tensor=2)
    assert jzero.batch_spec() == PartitionSpec(("replica", "data"))
    assert mesh.data_ranks(made) == 4
    rows = jax.device_put(np.arange(8), NamedSharding(made, jzero.batch_spec()))
    assert {s.data.shape for s in rows.addressable_shards} == {(2,)}
    assert len({s.data.tobytes() for s in rows.addressable_shards}) == 4
