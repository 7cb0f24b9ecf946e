"""Contraction: eliminates nodes with at most two neighbours by min-plus products of their tables.

    degree 0    constant  +=  min_s cost(s)                                                 -> _drop_alone
    degree 1    cost_a(x) +=  min_s (T_a[x, s] + cost(s))                                   -> _fold_leaf
    degree 2    T_ab[x,y] +=  min_s (T_a[x, s] + cost(s) + T_b[s, y])                       -> _bridge

This is bucket elimination (R. Dechter, "Bucket elimination: a unifying framework for reasoning", AI 113, 1999),
stopped at width two. Rows and columns of a table are layout classes, so the new tables are as small as the old ones.
`Contracted.lift` replays the log backwards: an eliminated node takes the first argmin given its neighbours.

In a folded problem the lower bound must be valid for the unfolded problem as well. Degree 0, degree 1, and a bridge
between nodes without an edge do not change the LP bound, because local marginals along a path can be combined into a
joint distribution. A bridge that closes a triangle, or the sum of two edges between the same nodes, raises the bound.
The raised bound is valid for the unfolded problem only if both edges join the same members: class A may be joined to
class B shifted by one layer. `pairings` lists the joined members. If they differ, or are unknown, the two edges are not
added up, and the node is not eliminated -> _Contraction.add, _Contraction._allowed.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.problem import Edge, Floats, Ints, Node, Problem, runs


@dataclass(frozen=True, slots=True)
class ContractionEffort:
    """Limits of the min-plus products of contraction."""

    # most additions to eliminate one node; above it the node stays in the problem (guards against rare huge tables;
    # `bench sensitivity`, 2026-11: no effect on small programs)
    work: float = 2e8
    # most entries of an intermediate array of `min_plus`: 16 MiB (not recorded; `bench sensitivity`, 2026-11: no effect
    # on small programs)
    chunk: int = 1 << 21


CONTRACTION = ContractionEffort()


@dataclass(frozen=True, slots=True, eq=False)
class _Link:
    """An edge seen from one of its ends.

    Attributes:
        other: the node at the other end.
        here: class of each strategy of this node.
        there: class of each strategy of the other node.
        table: seconds, rows for the classes of this node, columns for those of the other node.
        pairs: joined members (here, there), as rows of `Folded.pairings`; None if unknown.
        preserved: index of the edge in the problem if it must not be changed, else -1.
    """

    other: int
    here: Ints
    there: Ints
    table: Floats
    pairs: Ints | None
    preserved: int = -1

    def flipped(self, other: int) -> _Link:
        """The edge seen from its other end; `other` is the node at this end."""
        pairs = self.pairs if self.pairs is None or len(self.pairs) == 1 else _sorted(self.pairs[:, ::-1])
        return _Link(other, self.there, self.here, self.table.T, pairs, self.preserved)


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One eliminated node, with its costs and links at the time of its elimination."""

    node: int
    cost: Floats
    links: tuple[_Link, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Contracted:
    """The contracted problem.

    Attributes:
        problem: the nodes and edges that remain.
        counts: class sizes of its nodes, as in `Folded`.
        pairings: joined members of its edges, as in `Folded`.
        nodes: original index of each of its nodes.
        constant: cost (s) of the eliminated nodes that does not depend on the others.
        log: eliminated nodes in order.
        preserved: index of an edge -> original index, for the edges that must not be changed.
    """

    problem: Problem
    counts: Ints
    pairings: tuple[Ints | None, ...]
    nodes: tuple[int, ...]
    constant: float
    log: tuple[_Step, ...]
    preserved: Mapping[int, int]

    def lift(self, assignment: Ints) -> Ints:
        """Strategies of all original nodes, shape (len(nodes) + len(log),), from those of the nodes that remain."""
        full = np.zeros(len(self.nodes) + len(self.log), dtype=np.int64)
        full[list(self.nodes)] = assignment
        for step in reversed(self.log):
            cost = step.cost
            for link in step.links:
                cost = cost + link.table[:, link.there[full[link.other]]][link.here]
            full[step.node] = cost.argmin()
        return full


def contract(
    problem: Problem,
    pairings: Sequence[Ints | None] | None = None,
    counts: Ints | None = None,
    nodes: frozenset[int] = frozenset(),
    edges: frozenset[int] = frozenset(),
    effort: ContractionEffort = CONTRACTION,
) -> Contracted:
    """Eliminate all nodes of degree 0, 1 and 2, except where the new table costs too much or is not valid.

    Args:
        problem: a problem without self edges.
        pairings: as in `Folded`; when absent, every edge joins one member to one member.
        counts: class sizes as in `Folded`; ones when absent.
        nodes: nodes that must not be eliminated.
        edges: edges that must not be changed; their ends are not eliminated either.
        effort: what a new table may cost.
    """
    pairing = np.zeros((1, 2), dtype=np.int64)
    ends = {w for i in sorted(edges) for w in (problem.edges[i].u, problem.edges[i].v)}
    sizes = [1] * len(problem.nodes) if counts is None else counts
    state = _Contraction([n.cost for n in problem.nodes], sizes, nodes | ends, effort)
    for i, e in enumerate(problem.edges):
        pairs = pairing if pairings is None else pairings[i]
        state.add(e.u, _Link(e.v, e.gu, e.gv, e.table, pairs, i if i in edges else -1))
    state.run()
    return state.result(problem)


class _Contraction:
    """The problem during contraction.

    Attributes:
        costs: seconds per strategy of each node.
        preserved: nodes that must not be eliminated.
        counts: class size of each node.
        links: per node, number of a link -> the link seen from that node; a link has one number at both ends.
        next_number: number of links made so far, which is the number of the next.
        log: eliminated nodes in order.
        gone: whether each node is eliminated.
        constant: seconds.
    """

    def __init__(
        self, costs: list[Floats], counts: Sequence[int] | Ints, preserved: frozenset[int], effort: ContractionEffort
    ) -> None:
        self.costs = costs
        self.effort = effort
        self.preserved = preserved
        self.counts = counts
        self.links: list[dict[int, _Link]] = [{} for _ in costs]
        self.next_number = 0
        self.log: list[_Step] = []
        self.gone = [False] * len(costs)
        self.constant = 0.0

    def add(self, u: int, link: _Link) -> None:
        """Add a link at u and at its other end.

        Links between the same nodes with equal pairs are merged. A link with one class at one end depends on the other
        end alone, and its costs are added to that node.
        """
        v = link.other
        for number, old in list(self.links[u].items()):
            if old.other == v and old.preserved == link.preserved == -1 and _same_pairs(old.pairs, link.pairs):
                self.remove(u, number)
                link = _merge(old, link)
        if link.preserved == -1 and link.table.shape[0] == 1:
            self.costs[v] = self.costs[v] + link.table[0][link.there]
        elif link.preserved == -1 and link.table.shape[1] == 1:
            self.costs[u] = self.costs[u] + link.table[:, 0][link.here]
        else:
            self.links[u][self.next_number] = link
            self.links[v][self.next_number] = link.flipped(u)
            self.next_number += 1

    def remove(self, u: int, number: int) -> None:
        """Remove a link of u at both ends."""
        other = self.links[u].pop(number).other
        del self.links[other][number]

    def run(self) -> None:
        """Eliminate nodes in the order of `rank` until none can be eliminated."""
        queue = [self.rank(v) for v in range(len(self.costs)) if len(self.links[v]) <= 2]
        heapq.heapify(queue)
        while queue:
            rank = heapq.heappop(queue)
            v = rank[-1]
            # an entry whose rank has changed is stale: a later entry replaces it
            if self.gone[v] or rank != self.rank(v) or not self._allowed(v):
                continue
            around = [link.other for link in self.links[v].values()]
            self._contract(v)
            for w in around:
                if len(self.links[w]) <= 2:
                    heapq.heappush(queue, self.rank(w))

    def rank(self, v: int) -> tuple[int, int, int, int]:
        """Key of the order of elimination: low degree first, then large classes, few strategies, low index.

        A hub of one member between two large classes comes last: its elimination loses the pairs of their members.
        """
        return len(self.links[v]), -int(self.counts[v]), len(self.costs[v]), v

    def _allowed(self, v: int) -> bool:
        """Whether eliminating v is possible, cheap enough, and keeps bounds valid for the unfolded problem."""
        links = list(self.links[v].values())
        if v in self.preserved:
            return False
        if len(links) < 2:
            return True
        a, b = links
        if a.other == b.other:
            return False
        rows, cols, inner = a.table.shape[1], b.table.shape[1], b.table.shape[0]
        if rows * (len(self.costs[v]) + inner * cols) > self.effort.work:
            return False
        facing = [link for link in self.links[a.other].values() if link.other == b.other]
        if not facing:
            return True
        pairs = _joined(a.pairs, b.pairs, int(self.counts[v]))
        return any(_same_pairs(link.pairs, pairs) for link in facing)

    def _contract(self, v: int) -> None:
        """Eliminate v, by the case of its degree."""
        links = dict(self.links[v])
        self.gone[v] = True
        self.log.append(_Step(v, self.costs[v], tuple(links.values())))
        for number in links:
            self.remove(v, number)
        (self._drop_alone, self._fold_leaf, self._bridge)[len(links)](v, tuple(links.values()))

    def _drop_alone(self, v: int, links: tuple[_Link, ...]) -> None:
        assert not links
        self.constant += float(self.costs[v].min())

    def _fold_leaf(self, v: int, links: tuple[_Link, ...]) -> None:
        (a,) = links
        inner = _class_min(self.costs[v][None], a.here, len(a.table))[0]
        self.costs[a.other] = self.costs[a.other] + (a.table + inner[:, None]).min(axis=0)[a.there]

    def _bridge(self, v: int, links: tuple[_Link, ...]) -> None:
        a, b = links
        reached = _class_min(a.table.T[:, a.here] + self.costs[v], b.here, len(b.table))
        pairs = _joined(a.pairs, b.pairs, int(self.counts[v]))
        self.add(a.other, _Link(b.other, a.there, b.there, min_plus(reached, b.table, self.effort), pairs))

    def result(self, problem: Problem) -> Contracted:
        """The problem of the nodes and links that remain."""
        nodes = tuple(v for v, gone in enumerate(self.gone) if not gone)
        new = {v: i for i, v in enumerate(nodes)}
        left = tuple(Node(problem.nodes[v].name, self.costs[v], ("core", v)) for v in nodes)
        links = [(v, n, link) for v in nodes for n, link in self.links[v].items() if v < link.other]
        edges = tuple(
            Edge(new[v], new[link.other], link.here, link.there, np.ascontiguousarray(link.table), (-1, number))
            for v, number, link in links
        )
        counts = np.array([self.counts[v] for v in nodes], dtype=np.int64)
        pairings = tuple(link.pairs for _, _, link in links)
        preserved = {i: link.preserved for i, (_, _, link) in enumerate(links) if link.preserved >= 0}
        return Contracted(Problem(left, edges), counts, pairings, nodes, self.constant, tuple(self.log), preserved)


def _class_min(values: Floats, classes: Ints, size: int) -> Floats:
    """out[r, k] = min of values[r, s] over the strategies s in class k; inf for an empty class."""
    order, starts = runs(classes)
    out = np.full((len(values), size), np.inf)
    out[:, classes[order[starts]]] = np.minimum.reduceat(values[:, order], starts, axis=1)
    return out


def min_plus(a: Floats, b: Floats, effort: ContractionEffort = CONTRACTION) -> Floats:
    """The min-plus product out[x, y] = min_k a[x, k] + b[k, y], in chunks of at most about `effort.chunk` entries."""
    out = np.empty((len(a), b.shape[1]))
    step = max(1, effort.chunk // max(1, b.size))
    for i in range(0, len(a), step):
        out[i : i + step] = (a[i : i + step, :, None] + b[None]).min(axis=1)
    return out


def _merge(a: _Link, b: _Link) -> _Link:
    """The sum of two links between the same nodes; its classes are the pairs of classes that strategies have."""
    here, rows_a, rows_b = _product(a.here, b.here)
    there, cols_a, cols_b = _product(a.there, b.there)
    table = a.table[np.ix_(rows_a, cols_a)] + b.table[np.ix_(rows_b, cols_b)]
    return _Link(a.other, here, there, table, a.pairs)


def _product(a: Ints, b: Ints) -> tuple[Ints, Ints, Ints]:
    """Classes of the pair (a, b): the new class of each strategy, then the classes in a and in b of each new class."""
    step = int(b.max()) + 1
    codes, both = np.unique(a * step + b, return_inverse=True)
    return both, *np.divmod(codes, step)


def _sorted(pairs: Ints) -> Ints:
    """The rows of `pairs` in lexicographic order."""
    return pairs if len(pairs) == 1 else pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]


def _same_pairs(a: Ints | None, b: Ints | None) -> bool:
    """Whether two edges are known to join the same members."""
    return a is not None and b is not None and (a is b or np.array_equal(a, b))


def _joined(a: Ints | None, b: Ints | None, count: int) -> Ints | None:
    """The pairs of members that a bridge joins, from the pairs (middle, end) of its two links.

    They are known if each of the `count` members of the middle node has one partner on each side. Otherwise None.
    """
    if a is b and count == 1:
        return a
    if a is None or b is None or len(a) != count or len(b) != count:
        return None  # members of a class have equally many partners, so `count` pairs are one for each
    step = int(b[:, 1].max()) + 1
    codes, times = np.unique(a[:, 1] * step + b[:, 1], return_counts=True)
    return np.stack(np.divmod(codes, step), axis=1) if (times == times[0]).all() else None
