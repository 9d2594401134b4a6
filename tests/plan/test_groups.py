"""Groups of devices in every notation, and the mesh axes they lie along."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jzero import JzeroError
from jzero.plan import groups

MESH = {"pipeline": 2, "replica": 1, "data": 4, "tensor": 2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3),)),
        ("{{0,1,2,3}}", ((0, 1, 2, 3),)),
        ("[1,4]<=[4]", ((0, 1, 2, 3),)),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("mesh['a'=1,'b'=4] {'a'}", ((0,), (1,), (2,), (3,))),
        ("mesh[a=2,b=2] {a,b}", ((0, 1, 2, 3),)),
        ("mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2], device_ids=([0,2,1,3]) {'a'}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]<=[2,2]T(1,0)) {'a'}", ((0, 1), (2, 3))),
    ],
)
def test_notations(text, expected):
    assert groups.replica_groups(text, 4) == expected


def test_the_example_of_the_format():
    """`[8,2]<=[16]T(1,0)`-like text: the enumeration is reshaped, transposed, and cut into rows."""
    found = groups.replica_groups("[8,2]<=[2,8]T(1,0)", 16)
    assert found == tuple((i, i + 8) for i in range(8))


def test_an_unknown_notation_is_named():
    with pytest.raises(JzeroError, match="replica groups tiles"):
        groups.replica_groups("tiles<2>", 2)


def test_parts_of_an_axis_of_eight():
    """The example in XLA's own comment: `{a:(1)2, a:(4)2}` cuts [8] into [2,2,2] and groups the first and the last."""
    found = groups.replica_groups("mesh['a'=8] {'a':(1)2,'a':(4)2}", 8)
    grid = np.arange(8).reshape(2, 2, 2)
    assert found == tuple(tuple(int(i) for i in grid[:, j, :].reshape(-1)) for j in range(2))


def along(names: tuple[str, ...]) -> groups.Groups:
    """The groups of a collective over these axes of MESH, from NumPy alone."""
    ids = np.arange(16).reshape(tuple(MESH.values()))
    order = [n for n in MESH if n not in names] + list(names)
    size = int(np.prod([MESH[n] for n in names], dtype=int))
    rows = ids.transpose([list(MESH).index(n) for n in order]).reshape(-1, size)
    return tuple(tuple(int(i) for i in row) for row in rows)


@given(st.sets(st.sampled_from([n for n, size in MESH.items() if size > 1])))
def test_axes_of_any_combination(names):
    ordered = tuple(n for n in MESH if n in names)
    assert groups.axes(along(ordered), MESH) == ordered
    assert groups.axis_name(along(ordered), MESH) == "+".join(ordered)


def test_groups_that_span_a_part_of_an_axis_say_so():
    assert groups.axis_name(((0, 2), (4, 6)), MESH) == "data (part)"


def test_hosts_and_members_inside():
    everybody = (tuple(range(16)),)
    assert groups.hosts_of(everybody, 8) == (2, 8)
    assert groups.hosts_of(along(("data",)), 8) == (1, 4)
    assert groups.hosts_of(along(("pipeline",)), 8) == (2, 1)
    assert groups.hosts_of(everybody, 16) == (1, 16)
