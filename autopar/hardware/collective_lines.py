"""Seconds of a collective on one level of a network, as a minimum of lines in the bytes per device.

    t(b) = S(n) alpha + V(n) beta b    of one algorithm over n groups on one link                        -> line_of
    envelope                           of those that run on the link's network, by size                  -> one_level

`autopar.cost_models.collectives` composes these over several levels and mesh axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autopar.hardware.algorithms import ALGORITHMS, Algorithm
from autopar.hardware.links import Level, Link

Lines = tuple[tuple[float, float], ...]
"""(s, s/byte) pairs; the time of b bytes is min over pairs of first + second * b."""

_ALONG = {"ring": ("ring",), "line": ("ring",), "mesh": ("ring",)}
_HALVES = {**_ALONG, "switch": ("ring", "bruck"), "memory": ("copy",)}
_SHIFTED = {"ring": ("shift",), "mesh": ("shift",)}

COLLECTIVES: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "all-reduce": {**_HALVES, "switch": ("ring", "halving-doubling", "butterfly")},
        "all-gather": _HALVES,
        "reduce-scatter": _HALVES,
        "all-to-all": {**_SHIFTED, "switch": ("pairwise", "bruck"), "line": ("shift",), "memory": ("copy",)},
        "collective-permute": {**_SHIFTED, "switch": ("direct",), "line": ("direct",), "memory": ("copy",)},
    }
)
"""Kind -> network -> the algorithms that run on it at the link's full rate, by their names in `ALGORITHMS`."""


def line_of(algorithm: Algorithm, size: int, link: Link) -> tuple[float, float]:
    """(s, s/byte) over `size` groups on `link`."""
    return algorithm.messages(size) * link.alpha, algorithm.volume(size) * link.beta


def envelope(lines: Sequence[tuple[float, float]]) -> Lines:
    """The lines that are the minimum for some b >= 0, by rising intercept and falling slope."""
    hull: list[tuple[float, float]] = []
    for a, s in sorted(lines):
        if hull and s >= hull[-1][1]:
            continue
        # Drop the last line where this one takes over before the last has taken over from the one before it.
        while len(hull) > 1 and (a - hull[-2][0]) * (hull[-2][1] - hull[-1][1]) <= (hull[-1][0] - hull[-2][0]) * (
            hull[-2][1] - s
        ):
            hull.pop()
        hull.append((a, s))
    return tuple(hull)


def one_level(kind: str, level: Level) -> Lines:
    """The lines of the algorithms that run on a level of the network."""
    names = COLLECTIVES[kind][level.link.network]
    return envelope([line_of(ALGORITHMS[kind][name], level.size, level.link) for name in names])
