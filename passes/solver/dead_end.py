"""Dead-end elimination: strategies that no optimal plan needs.

Strategy a of node v goes when

    infeasible    cost(a) = inf, or some edge forbids a with every live class of its other end    -> _feasible
    equivalent    some b lies in the same class on every edge and costs no more                    -> problem.cheapest
    dominated     cost(a) - cost(b) + sum_e min_t (T_e[a,t] - T_e[b,t]) >= 0 for some b            -> _undominated

The last is Goldstein's criterion (R. F. Goldstein, "Efficient rotamer elimination", Biophys. J. 66, 1994); t runs
over the live classes of the neighbour, so a drop may enable others and nodes are visited until nothing changes. Of
two strategies that dominate each other the later index goes. Everything works on class tables, and the answer is kept
per (node kind, edge kinds, live classes around), so that equal layers are solved once.

Where plans have to fit into memory, b must not need more of it either: `Footprints` hold bytes that bound what a
strategy and a pair of classes can hold at any program point, and a goes for b only if none of them grows -> _thriftier.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.errors import SolverError
from autopar.ir.problem import Edge, Floats, Ints, Problem, cheapest, renumber, restrict, used

FULL = 160  # strategies up to which every pair is compared; above it only with the most promising dominators
LEADERS = 64  # how many of those
PRICES = (
    0.01,
    0.1,
    1.0,
    10.0,
)  # of bytes, for choosing leaders: 1 where all bytes at stake weigh as much as all seconds


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """`problem` over the strategies `keep[v]` of each node."""

    problem: Problem
    keep: tuple[Ints, ...]

    def lift(self, assignment: Ints) -> Ints:
        """Strategy indices of the problem before elimination, shape (nodes,)."""
        return np.array([k[s] for k, s in zip(self.keep, assignment, strict=True)], dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Footprints:
    """Bytes to compare, componentwise: `nodes[v]` of shape (k, strategies), `edges[e]` of shape (k, *table.shape).

    What never holds any is absent. Nodes with equal signatures and edges with equal keys must have equal ones.
    """

    nodes: Mapping[int, Floats] = field(default_factory=dict)
    edges: Mapping[int, Floats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """One end of an edge, seen from its own node: rows are this node's classes, columns the neighbour's.

    held: bytes of shape (k, *table.shape), None if the edge never holds any.
    """

    edge: Edge
    other: int
    classes: Ints
    others: Ints
    table: Floats
    label: tuple[int, ...]
    held: Floats | None = None

    def live(self, keep: Ints) -> Ints:
        """Classes of the strategies `keep` of this node."""
        return used(self.classes[keep], len(self.table))

    def columns(self, keep: Ints) -> Ints:
        """Classes of the strategies `keep` of the neighbour."""
        return used(self.others[keep], self.table.shape[1])


NONE = Footprints()


def eliminate(
    problem: Problem, rounds: int = 8, start: tuple[Ints, ...] | None = None, footprints: Footprints = NONE
) -> Reduced:
    """Drop infeasible strategies to the fixpoint, and unneeded ones during the first `rounds` sweeps.

    `rounds=0` only drops infeasible ones. `start` holds the strategies still allowed (ascending), all when absent.
    With `footprints` a strategy is only unneeded if another does as well with no more bytes.
    Raises SolverError, naming the node or edge, when a node has nothing left.
    """
    state = _State(problem, start, footprints)
    dirty = list(range(len(problem.nodes)))
    while dirty:
        dirty = state.sweep(dirty, full=rounds > 0)
        rounds -= 1
    return Reduced(restrict(problem, state.keep), tuple(state.keep))


class _State:
    """What is still alive, and what has been answered already."""

    def __init__(self, problem: Problem, start: tuple[Ints, ...] | None, footprints: Footprints) -> None:
        self.problem = problem
        self.keep = list(start) if start else [np.arange(len(n.cost)) for n in problem.nodes]
        self.sides = _sides(problem, footprints)
        self.held = footprints.nodes
        self.answers: dict[Hashable, Ints | None] = {}
        self.gaps: dict[Hashable, Floats] = {}
        self.seen: dict[tuple[int, int], tuple[Ints, Ints, int]] = {}
        self.kinds: dict[Hashable, int] = {}
        self.costs = [self._kind(n.signature) for n in problem.nodes]

    def sweep(self, nodes: list[int], full: bool) -> list[int]:
        """Visit nodes; the sorted neighbours whose live classes around changed."""
        dirty: dict[int, None] = {}
        for v in nodes:
            live = self._answer(v, full)
            if len(live) == len(self.keep[v]):
                continue
            before = self.keep[v]
            self.keep[v] = before[live]
            for side in self.sides[v]:
                if len(side.live(before)) > len(side.live(self.keep[v])):
                    dirty[side.other] = None
        return sorted(dirty)

    def _answer(self, v: int, full: bool) -> Ints:
        seen = [self._seen(v, i, s) for i, s in enumerate(self.sides[v])]
        columns = [c for _, c, _ in seen]
        kind = self._kind((self.costs[v], self.keep[v].tobytes()))
        key = (full, kind, tuple(sorted(around for _, _, around in seen)))
        if key not in self.answers:
            self.answers[key] = self._live(v, columns, full)
        live = self.answers[key]
        if live is None:
            raise SolverError(self._complaint(v))
        return live

    def _seen(self, v: int, place: int, side: _Side) -> tuple[Ints, Ints, int]:
        """The neighbour's live strategies, their classes, and a number for these at such a side, until some go."""
        keep = self.keep[side.other]
        known = self.seen.get((v, place))
        if known is None or known[0] is not keep:
            columns = side.columns(keep)
            known = self.seen[v, place] = keep, columns, self._kind((side.label, columns.tobytes()))
        return known

    def _kind(self, key: Hashable) -> int:
        return self.kinds.setdefault(key, len(self.kinds))

    def _live(self, v: int, columns: list[Ints], full: bool) -> Ints | None:
        """Positions in keep[v] that stay; None when there is none."""
        keep = self.keep[v]
        sides = self.sides[v]
        cost = self.problem.nodes[v].cost[keep]
        live = np.flatnonzero(_feasible(cost, sides, columns, keep))
        if not len(live):
            return None
        if not full or len(live) == 1:
            return live
        held = self.held[v][:, keep] if v in self.held else np.zeros((0, len(keep)))
        equal = [np.unique(row[live], return_inverse=True)[1].ravel() for row in held]
        live = live[cheapest(cost[live], [s.classes[keep[live]] for s in sides] + equal)]
        parts: list[Part] = []
        for s, cols in zip(sides, columns, strict=True):
            rows = s.live(keep[live])
            parts.append((s, rows, renumber(s.classes[keep[live]], rows, len(s.table)), cols))
        return live[_undominated(cost[live], parts, self.gaps, held[:, live])]

    def _complaint(self, v: int) -> str:
        node = self.problem.nodes[v]
        keep = self.keep[v]
        keep = keep[np.isfinite(node.cost[keep])]
        if not len(keep):
            return f"no plan exists: all {len(node.cost)} strategies of {node.name!r} are forbidden"
        blocking = [
            s for s in self.sides[v] if not np.isfinite(s.table[s.live(keep)][:, s.columns(self.keep[s.other])]).any()
        ]
        names = ", ".join(repr(self.problem.nodes[s.other].name) for s in blocking or self.sides[v])
        return f"no plan exists: none of the {len(keep)} strategies left of {node.name!r} fits with {names}"


def _sides(problem: Problem, footprints: Footprints) -> list[list[_Side]]:
    sides: list[list[_Side]] = [[] for _ in problem.nodes]
    for i, e in enumerate(problem.edges):
        held = footprints.edges.get(i)
        sides[e.u].append(_Side(e, e.v, e.gu, e.gv, e.table, (*e.key, 0), held))
        flipped = None if held is None else held.transpose(0, 2, 1)
        sides[e.v].append(_Side(e, e.u, e.gv, e.gu, e.table.T, (*e.key, 1), flipped))
    return sides


def _feasible(cost: Floats, sides: list[_Side], columns: list[Ints], keep: Ints) -> NDArray[np.bool_]:
    live = np.isfinite(cost)
    for side, cols in zip(sides, columns, strict=True):
        live &= np.logical_or.reduce(np.isfinite(side.table[:, cols]), axis=1)[side.classes[keep]]
    return live


Part = tuple[_Side, Ints, Ints, Ints]  # side, live rows (classes), row of each strategy, live columns


def _undominated(cost: Floats, parts: list[Part], gaps: dict[Hashable, Floats], held: Floats) -> Ints:
    """Strategies that no other dominates, ascending; `held` are their own bytes, shape (k, strategies)."""
    leaders = _leaders(cost, parts, held)
    gap = cost[:, None] - cost[leaders][None, :]
    for side, rows, row_of, cols in parts:
        lead = used(row_of[leaders], len(rows))
        lead_of = renumber(row_of[leaders], lead, len(rows))
        key = (side.label, rows.tobytes(), lead.tobytes(), cols.tobytes())
        if key not in gaps:
            gaps[key] = _differences(side.table[rows[:, None], cols], lead)
        gap += gaps[key][row_of[:, None], lead_of]
    if len(held) or any(side.held is not None for side, *_ in parts):
        gap[~_thriftier(held, leaders, parts)] = -1.0
    gap[leaders, np.arange(len(leaders))] = -1.0
    live = np.ones(len(cost), dtype=bool)
    for a in np.flatnonzero((gap >= 0).any(axis=1))[::-1]:
        live[a] = not (gap[a] >= 0)[live[leaders]].any()
    return np.flatnonzero(live)


def _thriftier(held: Floats, leaders: Ints, parts: list[Part]) -> NDArray[np.bool_]:
    """ok[a, j]: leader j holds no more than a, at the node and, whatever the neighbour does, on its edges."""
    ok = np.ones((held.shape[1], len(leaders)), dtype=bool)
    for row in held:
        ok &= row[leaders][None, :] <= row[:, None]
    for side, rows, row_of, cols in parts:
        if side.held is None:
            continue
        table = side.held[:, rows[:, None], cols]
        lead = used(row_of[leaders], len(rows))
        fits = np.stack([(table[:, [j]] <= table).all(axis=(0, 2)) for j in lead], axis=1)
        ok &= fits[row_of][:, renumber(row_of[leaders], lead, len(rows))]
    return ok


def _leaders(cost: Floats, parts: list[Part], held: Floats) -> Ints:
    """Candidates for dominating others: all of a small domain, else those cheapest at their best and on average.

    Where bytes count, the cheapest at several prices of them.
    """
    if len(cost) <= FULL:
        return np.arange(len(cost))
    best, mean = cost.copy(), cost.copy()
    for side, rows, row_of, cols in parts:
        table = side.table[rows[:, None], cols]
        finite = np.where(np.isfinite(table), table, table[np.isfinite(table)].max())
        best += finite.min(axis=1)[row_of]
        mean += finite.mean(axis=1)[row_of]
    scores = [best, mean]
    if len(held):
        weight = held.sum(axis=0)
        price = np.ptp(best[np.isfinite(best)]) / max(np.ptp(weight), np.finfo(float).tiny)
        scores += [best + price * p * weight for p in PRICES]
    share = LEADERS // 2
    return np.unique(np.concatenate([np.argsort(s, kind="stable")[:share] for s in scores]))


def _differences(table: Floats, lead: Ints) -> Floats:
    """D[a, j] = min_t (table[a,t] - table[lead[j],t]); where both are forbidden t says nothing."""
    out = np.full((len(table), len(lead)), np.inf)
    diff = np.empty_like(out)
    with np.errstate(invalid="ignore"):
        for column in np.ascontiguousarray(table.T):
            np.subtract(column[:, None], column[lead], out=diff)
            np.fmin(out, diff, out=out)  # the difference of two forbidden ones is no number
    return out
