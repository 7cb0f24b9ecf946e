"""Seconds of a collective in the alpha-beta model, over one mesh axis or several at once: the planner's prices.

An algorithm on one level of n groups takes S(n) messages and sends V(n) b bytes one after the other (b as in
`autopar.ir.collective`; the closed forms are those of `autopar.hardware.algorithms`), so it is a line in b:

    t(b) = S(n) alpha + V(n) beta b                                       -> autopar.hardware.algorithms.line_of

Which of them a backend runs depends on the link's network (-> COLLECTIVES): on a switch all that may be the best;
along a ring or a line (an axis of a torus) only those that talk to neighbours, because others would share links; in the
memory of one host a single rendezvous, alpha for each who comes, followed by copies. Spanning trees, servers and the
other algorithms that no backend runs for these kinds are compared by `autopar bench collectives` instead. The cost of
the additions in a reduction is left out here (gamma = 0): it hides behind the transport on every device modelled.
Everything else is algebra on sets of lines whose value is their minimum:

    choose between algorithms      union of the sets                      -> envelope (drops what never wins)
    do one after the other         all sums of one line from each         -> _chain
    on 1/k of the bytes            slopes divided by k                    -> _scaled

Over several levels (joint axes, or an axis that crosses hosts) neighbouring levels on the same link count as one, and
so do neighbouring parts of one torus dimension (`autopar.hardware.links.merge_levels`). For those that remain, of sizes
s_1 .. s_k, outermost first, with p_l = s_(l+1) ... s_k devices inside a group of level l, three families compete:

    by levels   all-gather = all-gather outside on b / s_k, then inside on b; reduce-scatter the same backwards;
                all-reduce = reduce-scatter inside, all-reduce outside on b / s_k, all-gather inside, or an all-reduce
                on b at each level; all-to-all = an all-to-all on b at each level      -> STAGED
    flat        a ring over all n devices, p_l of them side by side so that each device's own link crosses level l:
                alpha = max_l alpha_l, beta = max_l beta_l / p_l; all-to-all in n - 1 pairwise exchanges;
                a permute on the slowest link                                          -> FLAT
    rotated     on a torus of k dimensions, by levels in k parts of b / k at once, part r starting with dimension r, so
                that no two use one dimension's links together; a phase ends with its slowest part     -> ROTATED

The time is the best of all, by size.

A collective that nothing waits for (`LogicalMesh.overlapped`) is combined into buckets of B bytes, as DDP and
Horovod do it, so that b bytes cost b / B of a latency, and a share of it hides behind computation:

    t(b) = (1 - overlap) min(t(b), (alpha / B + beta) b)                  -> _behind
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

from autopar.errors import ArgumentError
from autopar.hardware.algorithms import ALGORITHMS, COLLECTIVES, Lines, envelope, line_of, one_level
from autopar.hardware.cluster import Level, Link, LogicalMesh
from autopar.hardware.description import Device
from autopar.hardware.links import NEIGHBOURS, inner_sizes, merge_levels


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


def _flat_ring(kind: str, levels: Sequence[Level]) -> Lines:
    # the slowest latency and the slowest share of a link set the pace of the whole ring
    inner = inner_sizes(levels)
    link = Link(max(v.link.alpha for v in levels), max(v.link.beta / p for v, p in zip(levels, inner, strict=True)))
    return (line_of(ALGORITHMS[kind]["ring"], inner[0] * levels[0].size, link),)


def _flat_pairwise(levels: Sequence[Level]) -> Lines:
    """(s_l - 1) p_l exchanges cross level l, each of b / n bytes; along a ring distant pairs would share links."""
    if any(v.link.network in NEIGHBOURS for v in levels):
        return ()
    inner = inner_sizes(levels)
    n = inner[0] * levels[0].size
    exchanges = [(v.size - 1) * p for v, p in zip(levels, inner, strict=True)]
    alpha = sum(k * v.link.alpha for k, v in zip(exchanges, levels, strict=True))
    return ((alpha, sum(k * v.link.beta / n for k, v in zip(exchanges, levels, strict=True))),)


def _flat_permute(levels: Sequence[Level]) -> Lines:
    # All pairs send at once, each over the links of its own levels: the slowest level decides.
    alone = [line for v in levels for line in one_level("collective-permute", v)]
    return ((max(a for a, _ in alone), max(s for _, s in alone)),)


FLAT: Mapping[str, Callable[[Sequence[Level]], Lines]] = MappingProxyType(
    {
        "all-reduce": lambda levels: _flat_ring("all-reduce", levels),
        "all-gather": lambda levels: _flat_ring("all-gather", levels),
        "reduce-scatter": lambda levels: _flat_ring("reduce-scatter", levels),
        "all-to-all": _flat_pairwise,
        "collective-permute": _flat_permute,
    }
)


def _chain(*parts: Lines) -> Lines:
    return envelope([(sum(a for a, _ in combo), sum(s for _, s in combo)) for combo in product(*parts)])


def _scaled(lines: Lines, factor: float) -> Lines:
    return tuple((a, s * factor) for a, s in lines)


def _merged(levels: Sequence[Level]) -> tuple[Level, ...]:
    """Neighbouring levels that are one larger level, as such."""
    merged: list[Level] = []
    for level in levels:
        whole = merge_levels(merged[-1], level) if merged else None
        if whole is not None:
            merged[-1] = whole
        else:
            merged.append(level)
    return tuple(merged)


ROTATED: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "all-reduce": ("all-gather", 2),
        "all-gather": ("all-gather", 1),
        "reduce-scatter": ("all-gather", 1),
        "all-to-all": ("all-to-all", 1),
    }
)
"""Kind -> the kind of each phase, and how often all phases run; a reduce-scatter is an all-gather backwards."""


def _rotated(kind: str, levels: Sequence[Level]) -> Lines:
    """The line of the rotated algorithm, none where the levels are no distinct dimensions of a torus."""
    dimensions = [v.part.dimension for v in levels if v.part]
    if kind not in ROTATED or len(set(dimensions)) < len(levels):
        return ()
    part, runs = ROTATED[kind]
    count = len(levels)
    # A share 1 / count of the bytes takes each order, so that in every phase all dimensions are in use at once, and a
    # phase ends with its slowest dimension.
    orders = [(*levels[r:], *levels[:r]) for r in range(count)]
    phases = [[_phase(part, order[i], order[i + 1 :]) for order in orders] for i in range(count)]
    alpha = sum(max(a for a, _ in phase) for phase in phases)
    return ((runs * alpha, runs * sum(max(s for _, s in phase) for phase in phases) / count),)


def _phase(kind: str, level: Level, later: Sequence[Level]) -> tuple[float, float]:
    """One dimension's turn; an all-gather leaves what later dimensions multiply, so that the last sends the most."""
    ((alpha, slope),) = one_level(kind, level)
    return alpha, slope / (math.prod(v.size for v in later) if kind == "all-gather" else 1)


def _over_levels(kind: str, levels: tuple[Level, ...]) -> Lines:
    if len(levels) == 1:
        return one_level(kind, levels[0])
    lines = [*FLAT[kind](levels), *_rotated(kind, levels)]
    for stage in STAGED[kind]:
        inside = [one_level(k, levels[-1]) for k in stage.inside]
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
    return _behind(kind, lines, mesh.device) if mesh.overlapped else lines


def _behind(kind: str, lines: Lines, device: Device) -> Lines:
    """Lines of a collective that overlaps: one bucket of B bytes costs one latency, b bytes of it alpha b / B."""
    if device.bucket_bytes and kind in device.combines:
        lines = envelope([*lines, *((0.0, s + a / device.bucket_bytes) for a, s in lines)])
    return tuple((a * (1 - device.overlap), s * (1 - device.overlap)) for a, s in lines)


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
