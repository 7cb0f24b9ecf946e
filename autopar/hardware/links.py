"""Links between devices, levels of equal groups, and which links an axis of a logical mesh crosses.

Devices are numbered row-major over the levels of a cluster, outermost first. An axis of size s with inner stride a
covers the device strides [a, a s); cut at the borders of the levels this gives the axis its own levels -> cut

    inside one level                       that level's link
    across a border, dividing it evenly    one level per piece, outermost first (a 16-way axis on hosts of 8 is 2 x 8)
    across a border, not evenly            one level on the slowest link of the cluster

On a switch a piece of a level has the link of the whole. Along one dimension of a torus it has not: neighbours of the
piece lie `stride` hops apart, so `stride` groups share every physical link, and only the outermost piece of a dimension
with a wrap-around closes to a ring; all others are lines, which have one direction where a ring has two -> stretch

    part of n devices, every stride-th, size of them   alpha         beta                      network
    ring, stride size = n                              stride alpha  stride beta               ring
    ring, stride size < n                              stride alpha  2 stride beta             line
    line                                               stride alpha  stride beta               line

Nor has it on a mesh of links between pairs, such as a hybrid cube mesh: `size` devices have the links among themselves,
each of them size - 1, and beta = max(beta, pair / (size - 1)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.errors import ClusterError
from autopar.hardware.figures import is_figure

NETWORKS = ("switch", "ring", "line", "mesh", "memory")
NEIGHBOURS = ("ring", "line", "mesh")
"""Networks in which only neighbours can talk at the full rate."""


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
        known = isinstance(self.network, str) and self.network in NETWORKS
        if not (known and is_figure(self.alpha) and is_figure(self.beta) and is_figure(self.pair)):
            raise ClusterError(
                f"{self} is no link: alpha, beta and pair are >= 0, network is one of {', '.join(NETWORKS)}."
            )

    @property
    def bandwidth(self) -> float:
        """Bandwidth of one device, bytes/s; infinite if beta is 0."""
        return 1 / self.beta if self.beta else math.inf


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where a level lies along one dimension of a torus, or in a mesh.

    Attributes:
        dimension: position of the dimension among the cluster's levels.
        length: devices along the whole dimension.
        link: its link.
        stride: devices from one neighbour of the level to the next.
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
    part: Stretch | None = None


def slowest(levels: Sequence[Level]) -> Link:
    """The bottleneck of several levels; levels of one group carry nothing unless there are only those."""
    used = [v.link for v in levels if v.size > 1] or [v.link for v in levels]
    slow = max(used, key=lambda link: link.beta)
    return replace(slow, alpha=max(link.alpha for link in used))


def stretch(size: int, part: Stretch) -> Level:
    """The level of `size` devices along a torus dimension or in a mesh; see the table in the module's text."""
    link, stride = part.link, part.stride
    if link.network == "mesh":
        return Level(size, _among(link, size), part)
    closed = link.network == "ring" and stride * size == part.length
    directions = 2 if link.network == "ring" and not closed else 1
    beta = link.beta * stride * directions
    return Level(size, Link(link.alpha * stride, beta, "ring" if closed else "line"), part)


def _among(link: Link, size: int) -> Link:
    """What a device sees of a mesh when it talks to those of a group of `size` alone."""
    return replace(link, beta=max(link.beta, link.pair / max(size - 1, 1)))


def joined(outer: Level, inner: Level) -> Level | None:
    """Both as one level, where they are: pieces of a torus dimension or a mesh, or one switch or memory."""
    if outer.part is None or inner.part is None:
        alike = outer.link == inner.link and inner.link.network not in NEIGHBOURS
        return Level(outer.size * inner.size, inner.link) if alike else None
    follows = outer.part.dimension == inner.part.dimension and outer.part.stride == inner.part.stride * inner.size
    return stretch(outer.size * inner.size, inner.part) if follows else None


def cut(levels: Sequence[Level], stride: int, size: int) -> tuple[Level, ...]:
    """The levels, outermost first, of an axis of `size` groups that lie `stride` devices apart."""
    extent = stride * size
    inner = inner_sizes(levels)
    borders = [low * v.size for low, v in zip(inner, levels, strict=True)]
    if any(max(edge, b) % min(edge, b) for edge in (stride, extent) for b in borders):
        return (Level(size, _open(slowest(levels))),)
    pieces = [
        piece(i, v, max(stride, low) // low, min(extent, high) // max(stride, low))
        for i, (low, high, v) in enumerate(zip(inner, borders, levels, strict=True))
        if max(stride, low) < min(extent, high)
    ]
    return tuple(pieces) or (Level(1, levels[-1].link),)


def _open(link: Link) -> Link:
    """What an axis sees that uses an irregular part: of a ring a line at best, of a mesh one link."""
    if link.network == "mesh":
        return _among(link, 2)
    return Link(link.alpha, 2 * link.beta, "line") if link.network == "ring" else link


def inner_sizes(levels: Sequence[Level]) -> list[int]:
    """Devices inside one group of each level."""
    return [math.prod(v.size for v in levels[i + 1 :]) for i in range(len(levels))]


def piece(dimension: int, whole: Level, stride: int, size: int) -> Level:
    """`size` groups of a level, `stride` groups apart; `dimension` is the level's position among the cluster's."""
    if whole.link.network not in NEIGHBOURS:
        return Level(size, whole.link)
    return stretch(size, Stretch(dimension, whole.size, whole.link, stride))
