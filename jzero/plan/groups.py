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
            into 4 rows of 2, `[4,2]<=[2,4]T(1,0)` numbers a 2 × 4 grid, transposes it, and cuts that into 4 rows of 2;
            or axes of a mesh of the compiler's: `mesh['a'=2,'b'=4] {'a'}`.
        devices: devices in all.

    Raises:
        JzeroError: another notation.

    Example:
        >>> replica_groups("[4,2]<=[2,4]T(1,0)", 8)
        ((0, 4), (1, 5), (2, 6), (3, 7))
    """
    text = text.strip()
    if iota := re.fullmatch(r"\[([\d,]+)\](<=.*)", text):
        return _rows(_enumeration(iota[2]).reshape(_numbers(iota[1])))
    if mesh := re.fullmatch(r"mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*)\}", text):
        return _mesh_groups(*mesh.groups())
    if not re.fullmatch(r"\{[\d,{}\s]*\}", text):
        raise JzeroError(
            f"replica groups {text[:60]}: expected {{{{0,1}},{{2,3}}}}, [2,2]<=[4] or mesh['a'=2] {{'a'}}; use another "
            "jaxlib"
        )
    rows = re.findall(r"\{([\d,\s]+)\}", text)
    return tuple(tuple(int(n) for n in row.split(",")) for row in rows) or (tuple(range(devices)),)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _rows(grid: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in grid)


def _enumeration(text: str) -> np.ndarray:
    """`<=[2,4]T(1,0)` -> the transposed grid of 0 to 7."""
    found = re.fullmatch(r"<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not found:
        raise JzeroError(f"replica groups {text[:60]}: expected <=[2,4] or <=[2,4]T(1,0); use another jaxlib")
    grid = np.arange(math.prod(_numbers(found[1]))).reshape(_numbers(found[1]))
    return grid.transpose(_numbers(found[2])) if found[2] else grid


def _mesh_groups(axes: str, order: str | None, grouped: str) -> Groups:
    """Groups along axes of a mesh; `'a':(2)4` is a part of an axis: of its shape (2, 4, rest), the middle."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([^=,']+)'?=(\d+)", axes)}
    numbers = np.arange(math.prod(sizes.values()))
    if order is not None:
        at = order.find("<=")
        numbers = np.array(_numbers(order)) if at < 0 else _enumeration(order[at:]).reshape(-1)
    wanted: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}  # parts as (product before, product with)
    for name, before, part in re.findall(r"'?([^,':{}]+)'?(?::\((\d+)\)(\d+))?", grouped):
        wanted[name].append((int(before), int(before) * int(part)) if before else (1, sizes[name]))
    shape: list[int] = []
    inside: list[int] = []
    for name, size in sizes.items():
        edges = sorted({1, size, *(edge for part in wanted[name] for edge in part)})
        for low, high in itertools.pairwise(edges):
            if any(first <= low and high <= last for first, last in wanted[name]):
                inside.append(len(shape))
            shape.append(high // low)
    outside = [i for i in range(len(shape)) if i not in inside]
    members = math.prod(shape[i] for i in inside)
    return _rows(numbers.reshape(shape).transpose(outside + inside).reshape(-1, members))


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
