"""Dead-end elimination: removes strategies that at least one optimal plan does not use.

Strategy a of node v is removed if it is

    infeasible    cost(a) = inf, or some edge forbids a with every live class of its other end     -> _feasible
    equivalent    some b has the same class on every edge and costs no more                        -> problem.cheapest
    dominated     cost(a) - cost(b) + sum_e min_t (T_e[a,t] - T_e[b,t]) >= 0 for some b            -> _undominated

The last is Goldstein's criterion (R. F. Goldstein, "Efficient rotamer elimination", Biophys. J. 66, 1994). There t runs
over the live classes of the neighbour, those of the strategies it still has. A removal may therefore enable others, and
nodes are visited until nothing changes -> eliminate. Of two strategies that dominate each other, the one with the
higher index is removed. All criteria work on class tables. Results are cached by (signature of the node, keys of its
edges, live classes of its neighbours), so that equal layers are solved once -> _State._answer.

Under a memory budget, b must not need more memory than a either. `Footprints` gives the bytes of each strategy and of
each pair of classes at several program points, and b dominates a only if none of them is larger -> _thriftier.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.errors import SolverError
from autopar.ir.problem import Edge, Floats, Ints, Problem, cheapest, renumber, restrict, used


@dataclass(frozen=True, slots=True)
class DeadEndEffort:
    """How many strategies of a node are tried as those that dominate others."""

    # most strategies of a node for which every pair is compared; larger nodes compare with leaders only (settled on the
    # zoo; `bench sensitivity`, 2026-11: no effect on small programs)
    full: int = 160
    # leaders by cost alone; every score gives half as many, and without bytes there are two scores (settled on the zoo;
    # `bench sensitivity`, 2026-11: no effect on small programs)
    leaders: int = 64
    # weights of bytes in the scores of leaders; at 1 the spread of all bytes weighs as much as that of all seconds
    # (settled on the zoo)
    rates: tuple[float, ...] = (0.01, 0.1, 1.0, 10.0)


DEAD_ENDS = DeadEndEffort()


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """`problem` has the strategies `keep[v]` (ascending) of each node v of the problem before elimination."""

    problem: Problem
    keep: tuple[Ints, ...]

    def lift(self, assignment: Ints) -> Ints:
        """Strategy indices in the problem before elimination, shape (nodes,)."""
        return np.array([k[s] for k, s in zip(self.keep, assignment, strict=True)], dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Footprints:
    """Bytes of strategies and of pairs of classes at k program points, compared point by point.

    Nodes with equal signatures and edges with equal keys must have equal bytes.

    Attributes:
        nodes: node -> bytes, shape (k, strategies); nodes without bytes are absent.
        edges: edge -> bytes, shape (k, *table.shape); edges without bytes are absent.
    """

    nodes: Mapping[int, Floats] = field(default_factory=dict)
    edges: Mapping[int, Floats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """An edge seen from one of its nodes.

    Attributes:
        edge: the edge.
        other: the neighbour.
        classes: class of each strategy of this node.
        other_classes: class of each strategy of the neighbour.
        table: seconds, rows for the classes of this node, columns for those of the neighbour.
        label: key of the edge, and 0 or 1 for the end.
        finite: whether the table forbids nothing.
        usage: bytes, shape (k, *table.shape); None if the edge has none.
    """

    edge: Edge
    other: int
    classes: Ints
    other_classes: Ints
    table: Floats
    label: tuple[int, ...]
    finite: bool
    usage: Floats | None = None

    def live(self, keep: Ints) -> Ints:
        """Classes of the strategies `keep` of this node, ascending."""
        return used(self.classes[keep], len(self.table))

    def columns(self, keep: Ints) -> Ints:
        """Classes of the strategies `keep` of the neighbour, ascending."""
        return used(self.other_classes[keep], self.table.shape[1])


NONE = Footprints()


def eliminate(
    problem: Problem,
    rounds: int = 8,
    start: tuple[Ints, ...] | None = None,
    footprints: Footprints = NONE,
    effort: DeadEndEffort = DEAD_ENDS,
) -> Reduced:
    """Remove infeasible strategies to the fixpoint, and dominated ones during the first `rounds` sweeps.

    Args:
        problem: the problem.
        rounds: sweeps that remove equivalent and dominated strategies; with 0 only infeasible ones are removed.
        start: strategies still allowed at each node, ascending; all when absent.
        footprints: a strategy dominates another only if it has no more of these bytes.
        effort: how many strategies are tried as dominating ones.

    Raises:
        SolverError: a node has no strategy left; the message names the node and its neighbours.
    """
    state = _State(problem, start, footprints, effort)
    dirty = list(range(len(problem.nodes)))
    while dirty:
        dirty = state.sweep(dirty, full=rounds > 0)
        rounds -= 1
    return Reduced(restrict(problem, state.keep), tuple(state.keep))


class _State:
    """The live strategies, and the caches.

    Attributes:
        keep: live strategies of each node, ascending.
        sides: per node, its edges.
        usage: node -> bytes, shape (k, strategies).
        answers: (signature, edges, live classes) -> positions that stay, None if there is none.
        gaps: (edge, classes) -> result of `_differences`.
        seen: (node, position of an edge) -> result of `_seen`.
        kinds: numbers of hashable keys, so that long keys are hashed once.
        costs: number of the signature of each node.
    """

    def __init__(
        self, problem: Problem, start: tuple[Ints, ...] | None, footprints: Footprints, effort: DeadEndEffort
    ) -> None:
        self.problem = problem
        self.effort = effort
        self.keep = list(start) if start else [np.arange(len(n.cost)) for n in problem.nodes]
        self.sides = _sides(problem, footprints)
        self.usage = footprints.nodes
        self.answers: dict[Hashable, Ints | None] = {}
        self.gaps: dict[Hashable, Floats] = {}
        self.seen: dict[tuple[int, int], tuple[Ints, Ints, int]] = {}
        self.kinds: dict[Hashable, int] = {}
        self.costs = [self._kind(n.signature) for n in problem.nodes]

    def sweep(self, nodes: list[int], full: bool) -> list[int]:
        """Visit nodes. Returns, sorted, the nodes with a neighbour that lost a live class."""
        dirty: dict[int, None] = {}
        for v in nodes:
            if not full and self._allows_all(v):
                continue
            live = self._answer(v, full)
            if len(live) == len(self.keep[v]):
                continue
            before = self.keep[v]
            self.keep[v] = before[live]
            for side in self.sides[v]:
                if len(side.live(before)) > len(side.live(self.keep[v])):
                    dirty[side.other] = None
        return sorted(dirty)

    def _allows_all(self, v: int) -> bool:
        """Whether all strategies of a node are feasible, whatever those of its neighbours."""
        cost = self.problem.nodes[v].cost[self.keep[v]]
        return len(cost) > 0 and all(side.finite for side in self.sides[v]) and bool(np.isfinite(cost).all())

    def _answer(self, v: int, full: bool) -> Ints:
        """Positions in keep[v] that stay, from the cache if an equal node has been solved. Raises SolverError."""
        seen = [self._seen(v, i, s) for i, s in enumerate(self.sides[v])]
        columns = [c for _, c, _ in seen]
        kind = self._kind((self.costs[v], self.keep[v].tobytes()))
        key = (full, kind, tuple(sorted(around for _, _, around in seen)))
        if key not in self.answers:
            self.answers[key] = self._live(v, columns, full)
        live = self.answers[key]
        if live is None:
            raise SolverError(f"no plan exists: {self._complaint(v)}")
        return live

    def _seen(self, v: int, place: int, side: _Side) -> tuple[Ints, Ints, int]:
        """The neighbour's live strategies, their classes, and a number for (side, classes); cached."""
        keep = self.keep[side.other]
        cached = self.seen.get((v, place))
        if cached is None or cached[0] is not keep:
            columns = side.columns(keep)
            cached = self.seen[v, place] = keep, columns, self._kind((side.label, columns.tobytes()))
        return cached

    def _kind(self, key: Hashable) -> int:
        """A number for a key, equal for equal keys."""
        return self.kinds.setdefault(key, len(self.kinds))

    def _live(self, v: int, columns: list[Ints], full: bool) -> Ints | None:
        """Positions in keep[v] that stay; None if there is none. `columns`: the neighbours' live classes by edge."""
        keep = self.keep[v]
        sides = self.sides[v]
        cost = self.problem.nodes[v].cost[keep]
        live = np.flatnonzero(_feasible(cost, sides, columns, keep))
        if not len(live):
            return None
        if not full or len(live) == 1:
            return live
        usage = self.usage[v][:, keep] if v in self.usage else np.zeros((0, len(keep)))
        # equivalent strategies need equal bytes as well, so each row of bytes counts as one more edge
        equal = [np.unique(row[live], return_inverse=True)[1].ravel() for row in usage]
        live = live[cheapest(cost[live], [s.classes[keep[live]] for s in sides] + equal)]
        parts: list[Part] = []
        for s, cols in zip(sides, columns, strict=True):
            rows = s.live(keep[live])
            parts.append((s, rows, renumber(s.classes[keep[live]], rows, len(s.table)), cols))
        return live[_undominated(cost[live], parts, self.gaps, usage[:, live], self.effort)]

    def _complaint(self, v: int) -> str:
        """The message of the error that node v has no strategy left."""
        node = self.problem.nodes[v]
        keep = self.keep[v]
        keep = keep[np.isfinite(node.cost[keep])]
        if not len(keep):
            return f"all {len(node.cost)} strategies of {node.name!r} are forbidden"
        blocking = [
            s for s in self.sides[v] if not np.isfinite(s.table[s.live(keep)][:, s.columns(self.keep[s.other])]).any()
        ]
        names = ", ".join(repr(self.problem.nodes[s.other].name) for s in blocking or self.sides[v])
        return f"none of the {len(keep)} strategies left of {node.name!r} fits with {names}"


def _sides(problem: Problem, footprints: Footprints) -> list[list[_Side]]:
    """Per node, its edges as seen from it."""
    sides: list[list[_Side]] = [[] for _ in problem.nodes]
    finite: dict[int, bool] = {}  # of a table, by identity: equal edges share theirs
    for i, e in enumerate(problem.edges):
        usage = footprints.edges.get(i)
        if id(e.table) not in finite:
            finite[id(e.table)] = bool(np.isfinite(e.table).all())
        allows = finite[id(e.table)]
        sides[e.u].append(_Side(e, e.v, e.gu, e.gv, e.table, (*e.key, 0), allows, usage))
        flipped = None if usage is None else usage.transpose(0, 2, 1)
        sides[e.v].append(_Side(e, e.u, e.gv, e.gu, e.table.T, (*e.key, 1), allows, flipped))
    return sides


def _feasible(cost: Floats, sides: list[_Side], columns: list[Ints], keep: Ints) -> NDArray[np.bool_]:
    """Whether each strategy of `keep`, of these costs, is finite with some live class of every neighbour."""
    live = np.isfinite(cost)
    for side, cols in zip(sides, columns, strict=True):
        if side.finite:  # every node has some strategy left, or there would be no plan
            continue
        live &= np.logical_or.reduce(np.isfinite(side.table[:, cols]), axis=1)[side.classes[keep]]
    return live


Part = tuple[_Side, Ints, Ints, Ints]  # edge, live classes of the node, row of each strategy, live classes opposite


def _undominated(
    cost: Floats, parts: list[Part], gaps: dict[Hashable, Floats], usage: Floats, effort: DeadEndEffort
) -> Ints:
    """Strategies that no leader dominates, ascending; `usage` are the bytes of the node, shape (k, strategies)."""
    leaders = _leaders(cost, parts, usage, effort)
    gap = cost[:, None] - cost[leaders][None, :]
    for side, rows, row_of, cols in parts:
        lead = used(row_of[leaders], len(rows))
        lead_of = renumber(row_of[leaders], lead, len(rows))
        key = (side.label, rows.tobytes(), lead.tobytes(), cols.tobytes())
        if key not in gaps:
            gaps[key] = _differences(side.table[rows[:, None], cols], lead)
        gap += gaps[key][row_of[:, None], lead_of]
    if len(usage) or any(side.usage is not None for side, *_ in parts):
        gap[~_thriftier(usage, leaders, parts)] = -1.0
    # no strategy dominates itself
    gap[leaders, np.arange(len(leaders))] = -1.0
    live = np.ones(len(cost), dtype=bool)
    # from the highest index down, so that of two strategies that dominate each other the lower index stays
    for a in np.flatnonzero((gap >= 0).any(axis=1))[::-1]:
        live[a] = not (gap[a] >= 0)[live[leaders]].any()
    return np.flatnonzero(live)


def _thriftier(usage: Floats, leaders: Ints, parts: list[Part]) -> NDArray[np.bool_]:
    """ok[a, j]: leader j has no more bytes than a, at the node and, for every class of the neighbours, on its edges."""
    ok = np.ones((usage.shape[1], len(leaders)), dtype=bool)
    for row in usage:
        ok &= row[leaders][None, :] <= row[:, None]
    for side, rows, row_of, cols in parts:
        if side.usage is None:
            continue
        table = side.usage[:, rows[:, None], cols]
        lead = used(row_of[leaders], len(rows))
        fits = np.stack([(table[:, [j]] <= table).all(axis=(0, 2)) for j in lead], axis=1)
        ok &= fits[row_of][:, renumber(row_of[leaders], lead, len(rows))]
    return ok


def _leaders(cost: Floats, parts: list[Part], usage: Floats, effort: DeadEndEffort) -> Ints:
    """Candidates for dominating others, ascending: all strategies, or the cheapest of more than `effort.full`."""
    if len(cost) <= effort.full:
        return np.arange(len(cost))
    share = effort.leaders // 2
    scores = _scores(cost, parts, usage, effort.rates)
    return np.unique(np.concatenate([np.argsort(s, kind="stable")[:share] for s in scores]))


def _scores(cost: Floats, parts: list[Part], usage: Floats, rates: Sequence[float]) -> list[Floats]:
    """The cost with the best and with the average classes of the neighbours; with bytes, also plus bytes at `rates`."""
    best, mean = cost.copy(), cost.copy()
    for side, rows, row_of, cols in parts:
        table = side.table[rows[:, None], cols]
        finite = np.where(np.isfinite(table), table, table[np.isfinite(table)].max())
        best += finite.min(axis=1)[row_of]
        mean += finite.mean(axis=1)[row_of]
    scores = [best, mean]
    if len(usage):
        weight = usage.sum(axis=0)
        price = np.ptp(best[np.isfinite(best)]) / max(np.ptp(weight), np.finfo(float).tiny)
        scores += [best + price * p * weight for p in rates]
    return scores


def _differences(table: Floats, lead: Ints) -> Floats:
    """D[a, j] = min_t (table[a,t] - table[lead[j],t]), without the t that both forbid."""
    out = np.full((len(table), len(lead)), np.inf)
    diff = np.empty_like(out)
    with np.errstate(invalid="ignore"):
        for column in np.ascontiguousarray(table.T):
            np.subtract(column[:, None], column[lead], out=diff)
            np.fmin(out, diff, out=out)  # inf - inf is nan, which fmin ignores
    return out
