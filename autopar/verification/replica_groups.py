"""The mesh axes over which a collective communicates, from the device groups in HLO text.

HLO has three syntaxes for groups, and XLA's passes use all of them. Each is first expanded to device ids. Device i of a
program has the row-major coordinates i in the mesh, so the ids determine the axes.

    {{0,1},{2,3}}                                      `_listed_groups`
    [4,2]<=[2,4]T(1,0)                                 `_iota_groups`
    mesh['a'=2,'b'=4], device_ids=(...) {'b':(2)2}     `_mesh_groups`
    device ids -> axes, or parts of axes               `group_axes`
    source_target_pairs={{0,1},{1,0}}                  `permuted_axes`

The syntaxes are those of XLA's CollectiveDeviceList, IotaReplicaGroupList and MeshAxesReplicaGroupList (openxla/xla,
xla/hlo/ir). Part of an axis is written as Shardy writes it: "y:(2)4" is the four coordinates that remain of y when its
more major part of 2 is fixed.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np

from autopar.errors import MeshError


def communicating_axes(attributes: str, names: Sequence[str], sizes: Sequence[int]) -> tuple[str, ...]:
    """Mesh axes that a collective runs over; () if each device is a group of its own.

    Args:
        attributes: text of the HLO instruction with its replica_groups or source_target_pairs.
        names: mesh axes, major to minor.
        sizes: number of devices along each.

    Raises:
        MeshError: a device outside the mesh takes part.
    """
    pairs = re.search(r"source_target_pairs=\{((?:\{[\d, ]*\},? ?)*)\}", attributes)
    if pairs:
        return permuted_axes(_numbers(pairs[1]), names, sizes)
    return group_axes(_replica_group(attributes, math.prod(sizes)), names, sizes)


def _coordinates(devices: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """Mesh coordinates of device ids, an array [devices, axes]."""
    total = math.prod(sizes)
    if max(devices, default=0) >= total:
        raise MeshError(f"The program runs on device {max(devices)}, but a mesh of {tuple(sizes)} has {total} devices.")
    return np.array(np.unravel_index(np.array(devices, dtype=np.int64), tuple(sizes))).reshape(len(sizes), -1).T


def permuted_axes(flat_pairs: Sequence[int], names: Sequence[str], sizes: Sequence[int]) -> tuple[str, ...]:
    """Axes along which data moves; `flat_pairs`: source and target, one pair after the other."""
    ends = _coordinates(flat_pairs, sizes).reshape(-1, 2, len(sizes))
    moved = (ends[:, 0] != ends[:, 1]).any(axis=0)
    return tuple(name for name, moves in zip(names, moved, strict=True) if moves)


def group_axes(group: Sequence[int], names: Sequence[str], sizes: Sequence[int]) -> tuple[str, ...]:
    """Axes along which the devices of one group differ. A group that is not a box in the mesh gets whole axes."""
    values = [np.unique(column) for column in _coordinates(group, sizes).T]
    box = math.prod(len(v) for v in values) == len(group)
    pairs = ((v, name, size) for v, name, size in zip(values, names, sizes, strict=True) if len(v) > 1)
    return tuple(_axis(v, name, size) if box else name for v, name, size in pairs)


def _axis(values: np.ndarray, name: str, size: int) -> str:
    """The axis, or its part that evenly spaced coordinates span: {0, 2} of 8 is "y:(2)2"."""
    step = int(values[1] - values[0])
    even = bool((np.diff(values) == step).all()) and size % (step * len(values)) == 0
    return name if len(values) == size or not even else f"{name}:({size // (step * len(values))}){len(values)}"


def _replica_group(text: str, devices: int) -> tuple[int, ...]:
    """Device ids of the first group with more than one member; () if there is none."""
    for pattern, read in _GROUP_SYNTAXES:
        if match := re.search(pattern, text):
            return next((tuple(g) for g in read(match, devices) if len(g) > 1), ())
    return ()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _listed_groups(match: re.Match[str], devices: int) -> list[tuple[int, ...]]:
    """{{0,1},{2,3}}; {} means all devices."""
    groups = [_numbers(g) for g in re.findall(r"\{([\d, ]+)\}", match[1])]
    return groups or [tuple(range(devices))]


def _iota_groups(match: re.Match[str], devices: int) -> list[list[int]]:
    """[4,2]<=[2,4]T(1,0): the iota of 2x4, transposed, cut into 4 groups of 2."""
    return _iota(match[2], match[3]).reshape(_numbers(match[1])).tolist()


def _mesh_groups(match: re.Match[str], devices: int) -> list[list[int]]:
    """mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(2)2}: a mesh of its own, and the axes of a group."""
    used: dict[str, list[tuple[int, int]]] = {}
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", match[5]):
        used.setdefault(name, []).append((int(before), int(before) * int(size)) if size else (1, sys.maxsize))
    shape, inner = list[int](), list[int]()
    for name, size in re.findall(r"'([^']+)'=(\d+)", match[1]):
        spans = used.get(name, [])
        # split the axis where a part in use begins or ends; a span counts positions from the major end
        edges = sorted({1, int(size), *(min(edge, int(size)) for span in spans for edge in span)})
        for begin, end in pairwise(edges):
            inner += [len(shape)] if any(low <= begin and end <= high for low, high in spans) else []
            shape.append(end // begin)
    ids = np.arange(math.prod(shape)) if match[2] is None else _device_ids(match[2], match[3], match[4])
    outer = [i for i in range(len(shape)) if i not in inner]
    return ids.reshape(shape).transpose(outer + inner).reshape(-1, math.prod(shape[i] for i in inner)).tolist()


def _device_ids(text: str, dims: str | None, permutation: str | None) -> np.ndarray:
    return np.array(_numbers(text)) if dims is None else _iota(dims, permutation).reshape(-1)


def _iota(dims: str, permutation: str | None) -> np.ndarray:
    ids = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return ids if permutation is None else ids.transpose(_numbers(permutation))


_GROUP_SYNTAXES: tuple[tuple[str, Callable[[re.Match[str], int], Iterable[Sequence[int]]]], ...] = (
    (
        r"replica_groups=mesh\[([^\]]*)\]"
        r"(?:, device_ids=\(((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|[\d, ]+))\))? ?\{([^}]*)\}",
        _mesh_groups,
    ),
    (r"replica_groups=(\[[\d,]+\])<=\[([\d,]+)\](?:T\(([\d,]+)\))?", _iota_groups),
    (r"replica_groups=\{((?:\{[\d, ]*\},? ?)*)\}", _listed_groups),
)
