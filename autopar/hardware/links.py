"""Links between devices, levels of equal groups, and the links that an axis of a logical mesh crosses.

Devices are numbered row-major over the levels of a cluster, outermost first. An axis of size s with inner stride a
covers the device strides [a, a s). Split at the borders of levels, these are the levels of the axis   -> axis_levels_of

    inside one level                       that level's link
    across a border, dividing it evenly    one level per part, outermost first (a 16-way axis on hosts of 8 is 2 x 8)
    across a border, not evenly            one level on the slowest link of the cluster

On a switch, a part of a level has the link of the whole level. Along one dimension of a torus it does not: neighbours
of the part are `stride` hops apart, so `stride` groups share every physical link. Only the outermost part of a
dimension with wrap-around closes to a ring; all others are lines, which can use one direction where a ring can use both
                                                                                                       -> segment_level

    part of n devices, every stride-th, size of them   alpha         beta                      network
    ring, stride size = n                              stride alpha  stride beta               ring
    ring, stride size < n                              stride alpha  2 stride beta             line
    line                                               stride alpha  stride beta               line

On a mesh of links between pairs, such as a hybrid cube mesh, a part of `size` devices has only the links among
themselves, size - 1 per device, so that beta = max(beta, pair / (size - 1)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.errors import ClusterError
from autopar.hardware.figures import is_figure

NETWORKS = ("switch", "ring", "line", "mesh", "memory")
NEIGHBOURS = ("ring", "line", "mesh")
"""Networks in which only neighbours communicate at the full rate."""


@dataclass(frozen=True, slots=True)
class Link:
    """Cost model of the network of one device: a message of n bytes takes alpha + n beta seconds (Hockney, 1994).

    Attributes:
        alpha: latency of one message, seconds.
        beta: inverse bandwidth of one device, s/byte, in one direction; for a ring in both directions together.
        network: pairs of devices that can communicate at this rate at once. "switch": any; "ring": neighbours, as along
            an axis of a torus with wrap-around; "line": neighbours, without wrap-around; "mesh": neighbours, each pair
            over a link of its own; "memory": threads of one host, which synchronize once per collective, with alpha
            for each thread, and copy.
        pair: inverse bandwidth in one direction of the link between two neighbours in a mesh, s/byte.
    """

    alpha: float
    beta: float
    network: str = "switch"
    pair: float = 0.0

    def __post_init__(self) -> None:
        valid_network = isinstance(self.network, str) and self.network in NETWORKS
        if not (valid_network and is_figure(self.alpha) and is_figure(self.beta) and is_figure(self.pair)):
            raise ClusterError(
                f"{self} is no link: alpha, beta and pair are >= 0, network is one of {', '.join(NETWORKS)}."
            )

    @property
    def bandwidth(self) -> float:
        """Bandwidth of one device, bytes/s; infinite if beta is 0."""
        return 1 / self.beta if self.beta else math.inf


@dataclass(frozen=True, slots=True)
class Segment:
    """A level as a part of one dimension of a torus, or of a mesh of links.

    Attributes:
        dimension: position of the dimension among the cluster's levels.
        length: number of devices along the whole dimension.
        link: its link.
        stride: distance from one neighbour of the level to the next, in devices.
    """

    dimension: int
    length: int
    link: Link
    stride: int


@dataclass(frozen=True, slots=True)
class Level:
    """Groups of devices that are connected by one link.

    Attributes:
        size: number of groups.
        link: link between them.
        part: their part of a dimension of a torus, or of a mesh of links; None on other networks.
    """

    size: int
    link: Link
    part: Segment | None = None


def slowest(levels: Sequence[Level]) -> Link:
    """The bottleneck of several levels. Levels of size 1 carry no messages, and count only if there are no others."""
    used = [v.link for v in levels if v.size > 1] or [v.link for v in levels]
    slow = max(used, key=lambda link: link.beta)
    return replace(slow, alpha=max(link.alpha for link in used))


def segment_level(size: int, part: Segment) -> Level:
    """The level of `size` devices along a torus dimension or in a mesh; see the table in the module's docstring."""
    link, stride = part.link, part.stride
    if link.network == "mesh":
        return Level(size, _submesh_link(link, size), part)
    closed = link.network == "ring" and stride * size == part.length
    directions = 2 if link.network == "ring" and not closed else 1
    beta = link.beta * stride * directions
    return Level(size, Link(link.alpha * stride, beta, "ring" if closed else "line"), part)


def _submesh_link(link: Link, size: int) -> Link:
    """The link of a device in a mesh that communicates only inside a group of `size`."""
    return replace(link, beta=max(link.beta, link.pair / max(size - 1, 1)))


def merge_levels(outer: Level, inner: Level) -> Level | None:
    """Two adjacent levels as one, if they are parts of a torus dimension or of a mesh, or of one switch or memory."""
    if outer.part is None or inner.part is None:
        same_network = outer.link == inner.link and inner.link.network not in NEIGHBOURS
        return Level(outer.size * inner.size, inner.link) if same_network else None
    follows = outer.part.dimension == inner.part.dimension and outer.part.stride == inner.part.stride * inner.size
    return segment_level(outer.size * inner.size, inner.part) if follows else None


def axis_levels_of(levels: Sequence[Level], stride: int, size: int) -> tuple[Level, ...]:
    """The levels, outermost first, of an axis of `size` groups that are `stride` devices apart."""
    extent = stride * size
    inner = inner_sizes(levels)
    borders = [low * v.size for low, v in zip(inner, levels, strict=True)]
    if any(max(edge, b) % min(edge, b) for edge in (stride, extent) for b in borders):
        return (Level(size, _irregular(slowest(levels))),)
    parts = [
        level_part(i, v, max(stride, low) // low, min(extent, high) // max(stride, low))
        for i, (low, high, v) in enumerate(zip(inner, borders, levels, strict=True))
        if max(stride, low) < min(extent, high)
    ]
    return tuple(parts) or (Level(1, levels[-1].link),)


def _irregular(link: Link) -> Link:
    """The link of an axis that uses an irregular part of a level: a line of a ring, one link of a mesh."""
    if link.network == "mesh":
        return _submesh_link(link, 2)
    return Link(link.alpha, 2 * link.beta, "line") if link.network == "ring" else link


def inner_sizes(levels: Sequence[Level]) -> list[int]:
    """Number of devices inside one group of each level."""
    return [math.prod(v.size for v in levels[i + 1 :]) for i in range(len(levels))]


def level_part(dimension: int, whole: Level, stride: int, size: int) -> Level:
    """The level of `size` groups of level `whole`, `stride` groups apart; `dimension`: position of `whole`."""
    if whole.link.network not in NEIGHBOURS:
        return Level(size, whole.link)
    return segment_level(size, Segment(dimension, whole.size, whole.link, stride))
