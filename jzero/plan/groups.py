"""Which devices a collective joins, and along which mesh axes they lie."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

from jzero.errors import JzeroError

Groups = tuple[tuple[int, ...], ...]
"""Disjoint groups of device numbers; a device's number is its place in the flattened mesh."""

Axes = Mapping[str, int]
"""Name and size of every mesh axis, outermost first."""


def replica_groups(text: str, devices: int) -> Groups:
    """Groups as XLA prints them.

    Args:
        text: a list `{{0,1},{2,3}}`, `{}` for all devices, or the shape of an enumeration: `[4,2]<=[8]` cuts 0 to 7
            into 4 rows of 2, `[4,2]<=[2,4]T(1,0)` numbers a 2 × 4 grid, transposes it, and cuts that into 4 rows of 2.
        devices: devices in all.

    Raises:
        JzeroError: another notation.

    Example:
        >>> replica_groups("[4,2]<=[2,4]T(1,0)", 8)
        ((0, 4), (1, 5), (2, 6), (3, 7))
    """
    text = text.strip()
    iota = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        numbers = lambda part: [int(n) for n in part.split(",")]
        grid = np.arange(math.prod(numbers(iota[2]))).reshape(numbers(iota[2]))
        rows = grid.transpose(numbers(iota[3])) if iota[3] else grid
        return tuple(tuple(int(i) for i in row) for row in rows.reshape(numbers(iota[1])))
    if not re.fullmatch(r"\{[\d,{}\s]*\}", text):
        raise JzeroError(f"replica groups {text[:60]}: expected {{{{0,1}},{{2,3}}}} or [2,2]<=[4]; use another jaxlib")
    rows = re.findall(r"\{([\d,\s]+)\}", text)
    return tuple(tuple(int(n) for n in row.split(",")) for row in rows) or (tuple(range(devices)),)


def axes(groups: Groups, mesh: Axes) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ, in the mesh's order.

    Args:
        groups: of the device numbers.
        mesh: name and size of every axis, outermost first.

    Example:
        >>> axes(((0, 1, 2, 3), (4, 5, 6, 7)), {"replica": 2, "data": 4})
        ('data',)
    """
    members = [np.array(group) for group in groups if len(group) > 1]
    if not members:
        return ()
    coordinates = [np.unravel_index(group, tuple(mesh.values())) for group in members]
    differ = lambda i: any(len(set(c[i].tolist())) > 1 for c in coordinates)
    return tuple(name for i, name in enumerate(mesh) if differ(i))


def axis_name(groups: Groups, mesh: Axes) -> str:
    """`axes` in one word: "data", "replica+data"; "data (part)" where groups do not span it; "" within a device."""
    names = axes(groups, mesh)
    whole = math.prod(mesh[name] for name in names)
    partial = any(len(group) != whole for group in groups) if names else False
    return "+".join(names) + (" (part)" if partial else "")


def pairs(text: str) -> Groups:
    """Sources and targets of a permutation: `{{0,1},{1,2}}`."""
    rows = re.findall(r"\{(\d+),(\d+)\}", text)
    return tuple((int(a), int(b)) for a, b in rows)


def hosts_of(groups: Groups, per_domain: int) -> tuple[int, int]:
    """The largest number of link domains that one group spans, and the fewest of its members that share one of those.

    Args:
        groups: of device numbers.
        per_domain: devices that are joined by the fast links.
    """
    spans = [[len(list(same)) for _, same in itertools.groupby(sorted(i // per_domain for i in g))] for g in groups]
    return max(map(len, spans), default=1), min((min(s) for s in spans), default=1)
