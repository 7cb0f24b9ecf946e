"""Seconds of a collective in the alpha-beta model, over one mesh axis or several at once.

One algorithm on one level of n groups takes S(n) messages and sends V(n) b bytes per device (b as in
`autopar.collective`), so it is a line in b:

    t(b) = S(n) alpha + V(n) beta b                                       -> Formula, COLLECTIVES

Which algorithms there are depends on the link's network: on a switch all of them; along a ring (an axis of a torus)
only those that talk to neighbours, because others would share links; in the memory of one host a single rendezvous
followed by copies. Everything else is algebra on sets of lines whose value is their minimum:

    choose between algorithms      union of the sets                      -> envelope (drops what never wins)
    do one after the other         all sums of one line from each         -> _chain
    on 1/k of the bytes            slopes divided by k                    -> _scaled

Over several levels (joint axes, or an axis that crosses hosts) neighbouring levels on the same link count as one
(except rings). For those that remain, of sizes s_1 .. s_k, outermost first, with p_l = s_(l+1) ... s_k devices inside a
group of level l, two families compete:

    by levels   all-gather = all-gather outside on b / s_k, then inside on b; reduce-scatter the same backwards;
                all-reduce = reduce-scatter inside, all-reduce outside on b / s_k, all-gather inside, or an all-reduce
                on b at each level; all-to-all = an all-to-all on b at each level      -> STAGED
    flat        a ring over all n devices, p_l of them side by side so that each device's own link crosses level l:
                alpha = max_l alpha_l, beta = max_l beta_l / p_l; all-to-all in n - 1 pairwise exchanges;
                a permute on the slowest link                                          -> FLAT

The time is the best of all, by size. The formulas are those of Chan, Heimlich, Purkayastha and van de Geijn (2007),
"Collective communication: theory, practice, and experience" (ring = bucket, recursive doubling and halving), Thakur,
Rabenseifner and Gropp (2005), "Optimization of collective communication operations in MPICH" (halving-doubling), and
Bruck et al. (1997), "Efficient algorithms for all-to-all communications" (any n, not only powers of two).
The cost of the additions in a reduction is left out: it hides behind the transport on every device modelled here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import overload

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Level, Link, LogicalMesh
from autopar.collective import wire_bytes
from autopar.errors import ArgumentError

__all__ = ["COLLECTIVES", "Formula", "Lines", "collective_time", "envelope", "linear_coefficients", "wire_bytes"]

Lines = tuple[tuple[float, float], ...]
"""(s, s/byte) pairs; the time of b bytes is min over pairs of first + second * b."""


@dataclass(frozen=True, slots=True)
class Formula:
    """One algorithm on one level of n >= 2 groups.

    Attributes:
        messages: n -> S(n), messages one after the other.
        volume: n -> V(n), bytes sent per device and byte of b.
        networks: the networks that it runs on at the link's full rate.
    """

    messages: Callable[[int], float]
    volume: Callable[[int], float]
    networks: tuple[str, ...] = ("switch",)

    def line(self, size: int, link: Link) -> tuple[float, float]:
        """(s, s/byte) over `size` groups on `link`."""
        return self.messages(size) * link.alpha, self.volume(size) * link.beta


def _log(n: int) -> int:
    """Rounds in which a message known to one device can reach n."""
    return (n - 1).bit_length()


def _share(n: int) -> float:
    """What a device lacks when it holds one of n pieces."""
    return (n - 1) / n


def _doubling_rounds(n: int) -> int:
    """Recursive doubling needs a power of two: the devices beyond it hand in before and get the result after."""
    return _log(n) if n & (n - 1) == 0 else n.bit_length() - 1 + 2


def _bruck_volume(n: int) -> float:
    """Round k of Bruck's all-to-all sends the pieces whose distance has bit k set."""
    return sum(j.bit_count() for j in range(n)) / n


def _once(n: int) -> int:
    return 1


_RING = Formula(lambda n: n - 1, _share, ("switch", "ring"))
_RING_ALL_REDUCE = Formula(lambda n: 2 * (n - 1), lambda n: 2 * _share(n), ("switch", "ring"))
_BRUCK = Formula(_log, _share)
_COPY = Formula(_once, _share, ("memory",))

COLLECTIVES: Mapping[str, Mapping[str, Formula]] = MappingProxyType(
    {
        "all-reduce": {
            "ring": _RING_ALL_REDUCE,
            "halving-doubling": Formula(lambda n: 2 * _log(n), lambda n: 2 * _share(n)),
            "recursive-doubling": Formula(_doubling_rounds, _doubling_rounds),
            "copy": Formula(_once, lambda n: 2 * _share(n), ("memory",)),
        },
        "all-gather": {"ring": _RING, "bruck": _BRUCK, "copy": _COPY},
        "reduce-scatter": {"ring": _RING, "bruck": _BRUCK, "copy": _COPY},
        "all-to-all": {
            "pairwise": Formula(lambda n: n - 1, _share),
            "bruck": Formula(_log, _bruck_volume),
            # The piece for the device at distance j goes min(j, n - j) hops; over all j that is floor(n^2 / 4).
            "shift": Formula(lambda n: n - 1, lambda n: (n * n // 4) / n, ("ring",)),
            # Pieces are cut apart before and joined after, which costs as much as the copy between the devices.
            "copy": Formula(_once, lambda n: 2 * _share(n), ("memory",)),
        },
        "collective-permute": {"direct": Formula(_once, lambda n: 1.0, ("switch", "ring", "memory"))},
    }
)


@dataclass(frozen=True, slots=True)
class Stage:
    """One way to do a collective level by level.

    Attributes:
        inside: the collectives on the innermost level, each on all b bytes.
        outside: the collective on the levels around it.
        scattered: the outside works on the innermost level's share of b only.
    """

    inside: tuple[str, ...]
    outside: str
    scattered: bool


STAGED: Mapping[str, tuple[Stage, ...]] = MappingProxyType(
    {
        "all-reduce": (
            Stage(("reduce-scatter", "all-gather"), "all-reduce", scattered=True),
            Stage(("all-reduce",), "all-reduce", scattered=False),
        ),
        "all-gather": (Stage(("all-gather",), "all-gather", scattered=True),),
        "reduce-scatter": (Stage(("reduce-scatter",), "reduce-scatter", scattered=True),),
        "all-to-all": (Stage(("all-to-all",), "all-to-all", scattered=False),),
        "collective-permute": (),
    }
)


def _inner_sizes(levels: Sequence[Level]) -> list[int]:
    """p_l: devices inside a group of each level."""
    return [math.prod(v.size for v in levels[i + 1 :]) for i in range(len(levels))]


def _flat_ring(levels: Sequence[Level], formula: Formula) -> Lines:
    inner = _inner_sizes(levels)
    link = Link(max(v.link.alpha for v in levels), max(v.link.beta / p for v, p in zip(levels, inner, strict=True)))
    return (formula.line(inner[0] * levels[0].size, link),)


def _flat_pairwise(levels: Sequence[Level]) -> Lines:
    """(s_l - 1) p_l exchanges cross level l, each of b / n bytes; along a ring distant pairs would share links."""
    if any(v.link.network == "ring" for v in levels):
        return ()
    inner = _inner_sizes(levels)
    n = inner[0] * levels[0].size
    exchanges = [(v.size - 1) * p for v, p in zip(levels, inner, strict=True)]
    alpha = sum(k * v.link.alpha for k, v in zip(exchanges, levels, strict=True))
    return ((alpha, sum(k * v.link.beta / n for k, v in zip(exchanges, levels, strict=True))),)


def _flat_permute(levels: Sequence[Level]) -> Lines:
    return ((max(v.link.alpha for v in levels), max(v.link.beta for v in levels)),)


FLAT: Mapping[str, Callable[[Sequence[Level]], Lines]] = MappingProxyType(
    {
        "all-reduce": lambda levels: _flat_ring(levels, _RING_ALL_REDUCE),
        "all-gather": lambda levels: _flat_ring(levels, _RING),
        "reduce-scatter": lambda levels: _flat_ring(levels, _RING),
        "all-to-all": _flat_pairwise,
        "collective-permute": _flat_permute,
    }
)


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


def _chain(*parts: Lines) -> Lines:
    return envelope([(sum(a for a, _ in combo), sum(s for _, s in combo)) for combo in product(*parts)])


def _scaled(lines: Lines, factor: float) -> Lines:
    return tuple((a, s * factor) for a, s in lines)


def _one_level(kind: str, level: Level) -> Lines:
    formulas = [f for f in COLLECTIVES[kind].values() if level.link.network in f.networks]
    return envelope([f.line(level.size, level.link) for f in formulas])


def _merged(levels: Sequence[Level]) -> tuple[Level, ...]:
    """Neighbouring levels on one link are one larger level, except along rings, which do not grow together."""
    merged: list[Level] = []
    for level in levels:
        if merged and merged[-1].link == level.link and level.link.network != "ring":
            merged[-1] = Level(merged[-1].size * level.size, level.link)
        else:
            merged.append(level)
    return tuple(merged)


def _over_levels(kind: str, levels: tuple[Level, ...]) -> Lines:
    if len(levels) == 1:
        return _one_level(kind, levels[0])
    lines = list(FLAT[kind](levels))
    for stage in STAGED[kind]:
        inside = [_one_level(k, levels[-1]) for k in stage.inside]
        outside = _scaled(_over_levels(stage.outside, levels[:-1]), 1 / levels[-1].size if stage.scattered else 1.0)
        lines.extend(_chain(outside, *inside))
    return envelope(lines)


@lru_cache(maxsize=4096)
def linear_coefficients(kind: str, axes: tuple[int, ...], mesh: LogicalMesh) -> Lines:
    """The time of a collective as a minimum of lines in the bytes per device.

    Args:
        kind: a key of `COLLECTIVES`.
        axes: positions of the mesh axes whose devices talk to each other; their order does not matter.
        mesh: the mesh, with the links of its axes.

    Returns:
        (s, s/byte) pairs, never empty: ((0, 0),) where the group is one device. Price tables with
        `min(a + b * nbytes for a, b in pairs)`.

    Raises:
        ArgumentError: an unknown kind.
    """
    if kind not in COLLECTIVES:
        raise ArgumentError(f"Collective {kind!r} not found. Known collectives: {', '.join(COLLECTIVES)}.")
    if kind == "reduce-scatter" and not mesh.device.reduce_scatter:
        kind = "all-reduce"  # followed by a local slice
    levels = _merged([level for axis in sorted(axes) for level in mesh.levels[axis] if level.size > 1])
    if not levels:
        return ((0.0, 0.0),)
    lines = _over_levels(kind, levels)
    share = mesh.device.combined_latency if kind == "all-reduce" else 1.0
    return tuple((a * share, s) for a, s in lines)


@overload
def collective_time(kind: str, nbytes: float, axes: tuple[int, ...], mesh: LogicalMesh) -> float: ...
@overload
def collective_time(
    kind: str, nbytes: NDArray[np.generic], axes: tuple[int, ...], mesh: LogicalMesh
) -> NDArray[np.float64]: ...
def collective_time(
    kind: str, nbytes: float | NDArray[np.generic], axes: tuple[int, ...], mesh: LogicalMesh
) -> float | NDArray[np.float64]:
    """Seconds of one collective of `nbytes` (bytes per device, any array shape) along the given mesh axes."""
    lines = linear_coefficients(kind, axes, mesh)
    if isinstance(nbytes, np.ndarray):
        sizes = nbytes.astype(np.float64)
        return np.min([a + s * sizes for a, s in lines], axis=0)
    return min(a + s * nbytes for a, s in lines)
