"""What a report draws as SVG: the devices with their stages, and which device has which part of a tensor.

Texts and lines take the colours of the page; fills are classes of its palette. Hovering over a part shows its title.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.layout import Layout, cuts
from autopar.plans.record import PlanRecord, Stage
from autopar.plans.views.groups import owner
from autopar.plans.views.picture import Tensor, tensors

MAX_DEVICES = 1024  # drawn one by one
SIDE = 16  # most parts along one side of a tensor that are drawn with their devices
TENSORS = 12
PALETTE_SIZE, WHOLE = 8, 8  # colours of parts, and the position of the colour of a whole tensor


@dataclass(frozen=True)
class Cell:
    """A rectangle of a picture.

    Attributes:
        x, y, width, height: in units of the picture.
        colour: position in the palette.
        text: written into it.
        title: shown when the pointer is over it.
    """

    x: float
    y: float
    width: float
    height: float
    colour: int
    text: str
    title: str


@dataclass(frozen=True)
class Picture:
    """A drawing of `width` x `height` units, with its cells, under a name and a caption."""

    name: str
    caption: str
    width: float
    height: float
    cells: tuple[Cell, ...]


# Devices


def devices(plan: PlanRecord) -> Picture | None:
    """A row for each host, a cell for each device, coloured by rank; None for more devices than can be told apart."""
    count = math.prod(plan.mesh_sizes)
    if count > MAX_DEVICES:
        return None
    per_host = plan.devices_per_host if 0 < plan.devices_per_host < count else min(count, 8)
    rank_of = [rank for rank, stages in enumerate(plan.ranks) for _ in range(stages[0].devices)]
    columns = max(1, min(4, 32 // per_host)) if count // per_host > 4 else 1
    cells = []
    for device in range(count):
        host, place = divmod(device, per_host)
        row, column = divmod(host, columns)
        title = f"device {device}, host {host}: {_role(plan, device, rank_of[device])}"
        x = column * (per_host + 0.5) + place
        cells.append(Cell(x, row, 1, 1, rank_of[device] % PALETTE_SIZE if plan.pipelined else 0, str(device), title))
    hosts = -(-count // per_host)
    width = min(columns, hosts) * (per_host + 0.5) - 0.5
    where = "1 host" if hosts == 1 else f"{hosts} hosts, a row of {per_host} devices each"
    return Picture("", f"{count} devices on {where}", width, -(-hosts // columns), tuple(cells))


def _role(plan: PlanRecord, device: int, rank: int) -> str:
    stages = plan.ranks[rank]
    first = sum(plan.ranks[r][0].devices for r in range(rank))
    place = ", ".join(f"{name}={n}" for name, n in _coordinates(stages[0].submesh, device - first).items())
    names = " and ".join(stage.name for stage in stages)
    return f"{names}, {place}" if plan.pipelined else place


def _coordinates(submesh: Mapping[str, int], number: int) -> Mapping[str, int]:
    """Axis -> position of a device, which are numbered row-major."""
    place: dict[str, int] = {}
    for name, n in reversed([*submesh.items()]):
        number, place[name] = divmod(number, n)
    return dict(reversed(place.items()))


# Tensors


def layouts(plan: PlanRecord) -> Iterator[Picture]:
    """The largest groups of equal tensors, cut as they are, with the devices that have each part."""
    distinct = {(re.sub(r" x\d+$", "", t.name), t.shape, t.spec, t.shards): t for t in reversed(tensors(plan))}
    for tensor in list(reversed(distinct.values()))[:TENSORS]:  # of equal ones in several stages the first
        position = tensor.position
        stage = owner(plan, position) or plan.stages[0]
        yield _layout(plan, tensor, plan.inputs[position], stage)


def _layout(plan: PlanRecord, tensor: Tensor, layout: Layout, stage: Stage) -> Picture:
    """The parts of a tensor along the dimensions that are drawn, at the first position along others."""
    parts = cuts(layout, tuple(stage.submesh.values()))
    members = _members(layout, stage, tensor.dimensions, sum(plan.ranks[r][0].devices for r in range(stage.rank)))
    rows, columns = (min(n, SIDE) for n in tensor.cells)
    cells = []
    for row, column in itertools.product(range(rows), range(columns)):
        position = (row, column)[2 - len(tensor.dimensions) :]
        devices = members[position]
        place = dict(zip(tensor.dimensions, position, strict=True))
        colour = (row * columns + column) % PALETTE_SIZE if tensor.shards > 1 else WHOLE
        title = f"[{_extents(tensor, parts, place)}] on devices {', '.join(map(str, devices))}"
        cells.append(Cell(column, row, 1, 1, colour, _few(devices), title))
    return Picture(tensor.name, _caption(tensor, parts), columns, rows, tuple(cells))


def _extents(tensor: Tensor, parts: Mapping[int, int], place: Mapping[int, int]) -> str:
    """The part of each dimension, as a slice."""
    lengths = {d: -(-tensor.shape[d] // parts.get(d, 1)) for d in place}
    return ", ".join(
        f"{min(place[d] * lengths[d], n)}:{min((place[d] + 1) * lengths[d], n)}" if d in place else ":"
        for d, n in enumerate(tensor.shape)
    )


def _caption(tensor: Tensor, parts: Mapping[int, int]) -> str:
    if tensor.shards == 1:
        divided = f"whole on each of {tensor.copies} devices"
    else:
        divided = f"{tensor.shards} parts" + (f", each on {tensor.copies} devices" if tensor.copies > 1 else "")
    if max(tensor.cells) > SIDE:
        divided += f"; the first {SIDE} of {max(tensor.cells)} along a side"
    along_rest = math.prod(n for d, n in parts.items() if d not in tensor.dimensions)
    return f"{list(tensor.shape)} {tensor.spec}: {divided}" + (
        f"; {along_rest} along other dimensions" if along_rest > 1 else ""
    )


def _members(layout: Layout, stage: Stage, drawn: Sequence[int], first: int) -> Mapping[tuple[int, ...], Sequence[int]]:
    """Position along the dimensions that are drawn -> the devices that have the part there."""
    members: dict[tuple[int, ...], list[int]] = {}
    for number in range(math.prod(stage.submesh.values())):
        at = dict.fromkeys(drawn, 0)
        for dim, (axis, place) in zip(layout, _coordinates(stage.submesh, number).items(), strict=True):
            if dim in at:
                at[dim] = at[dim] * stage.submesh[axis] + place
        members.setdefault(tuple(at.values()), []).append(first + number)
    return members


def _few(members: Sequence[int]) -> str:
    """Device numbers in a few characters: "0-7", "0, 4", "0, 8, ... 56"."""
    if len(members) == 1:
        return str(members[0])
    if members[-1] - members[0] == len(members) - 1:
        return f"{members[0]}-{members[-1]}"
    return f"{members[0]}, {members[1]}" if len(members) == 2 else f"{members[0]}, {members[1]}..{members[-1]}"
