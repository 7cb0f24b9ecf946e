"""Elimination: dynamic programming along an order of the nodes, bounded by the messages of a dual ascent.

Processed nodes are behind, the others ahead. The frontier is the set of nodes behind with an edge to a node ahead.

    order      the nodes in an order with a narrow frontier                                                    -> order
    state      strategies of the frontier, up to the classes on edges to nodes ahead; the cost of the nodes behind
    step       every state is combined with every strategy of the next node                                    -> _step
    bound      cost of the nodes behind + lower bound on the cost ahead; states above the limit are dropped    -> search
    merge      of states with equal classes, the cheapest is kept                                  -> problem.cheapest
    width      at most so many states of least bound are kept; the least bound dropped bounds all lost plans   -> _least

This is bucket elimination (R. Dechter, AI 113, 1999) along a path decomposition, with bounds as in mini-bucket
heuristics (K. Kask, R. Dechter, AI 129, 2001) from reparametrised messages. After a pass of TRW-S towards the first
node (`dual_ascent`), with p_e the shares that the pass sent, every node w ahead satisfies

    cost_w(s)  >=  rest_w + sum_{e to lower} p_e(s) - sum_{e to higher} m_{e->w}(s)         T_e + p_e - m_e >= 0

The sum over the nodes ahead is a bound for any strategies of the frontier,

    seconds ahead  >=  sum_{w ahead} rest_w  +  sum_{e = (u, w), u behind} m_{e->u}(class_u)

A state's bound starts as the bound of the ascent and never falls. If only states above the limit are dropped, the plan
found is optimal.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.problem import Edge, Floats, Ints, Problem, by_strategy, cheapest
from autopar.passes.solver.dual_ascent import Ascent, End


@dataclass(frozen=True, slots=True)
class EliminationEffort:
    """Limits of elimination, besides the width that its caller gives."""

    # orders that are compared, each from another first node (settled on the zoo; `bench sensitivity`, 2026-11: no
    # effect on small programs)
    starts: int = 8
    # states in which equal ones are searched for, as a multiple of the width (settled on the zoo; `bench sensitivity`,
    # 2026-11: no effect on small programs)
    spare: int = 4


ELIMINATION = EliminationEffort()


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The result of a search.

    Attributes:
        plan: the best plan among the states kept, shape (nodes,); None if all were dropped.
        value: its cost (s), inf without a plan.
        lower: lower bound (s) on all plans whose cost is at most the limit.
    """

    plan: Ints | None
    value: float
    lower: float


def order(problem: Problem, effort: EliminationEffort = ELIMINATION) -> list[int]:
    """An order of the nodes with a narrow frontier, by a greedy rule: next is the node that widens it least.

    The width of a frontier is log2 of the number of combinations of its nodes' strategies (bits). The best of several
    orders is returned, which start from the nodes of least degree.
    """
    around: list[set[int]] = [set() for _ in problem.nodes]
    for e in problem.edges:
        around[e.u].add(e.v)
        around[e.v].add(e.u)
    bits = [float(np.log2(max(2, len(n.cost)))) for n in problem.nodes]
    starts = sorted(range(len(around)), key=lambda v: (len(around[v]), v))[: effort.starts]
    orders = [_order_from(v, around, bits) for v in starts]
    return min(orders, key=lambda candidate: candidate[0])[1] if orders else []


def ordered(problem: Problem) -> tuple[Problem, Ints, Ints]:
    """The problem with its nodes in `order`, the order, and the place of each node in it; shape (nodes,) each.

    Classes are numbered `by_strategy`, which saves a dual ascent a quarter of its time.
    """
    nodes = np.array(order(problem), dtype=np.int64)
    place = np.argsort(nodes)
    at = place.tolist()
    edges = tuple([Edge(at[e.u], at[e.v], e.gu, e.gv, e.table, e.key) for e in problem.edges])
    return by_strategy(Problem(tuple(problem.nodes[v] for v in nodes), edges)), nodes, place


def _order_from(start: int, around: Sequence[set[int]], bits: Sequence[float]) -> tuple[tuple[float, float], list[int]]:
    """((widest frontier, sum of all frontiers) in bits, order) of the greedy order from a first node."""
    ahead = [len(a) for a in around]  # number of neighbours of each node that are ahead
    done = [False] * len(around)
    taken: list[int] = []
    now = widest = total = 0.0

    def opened(v: int) -> float:
        """Bits by which v widens the frontier.

        Node v is added unless no neighbour is ahead. A neighbour behind leaves if v is its last neighbour ahead.
        """
        own = bits[v] if ahead[v] else 0.0
        return own - sum(bits[u] for u in around[v] if done[u] and ahead[u] == 1)

    def key(v: int) -> tuple[float, int, int]:
        return opened(v), ahead[v] - len(around[v]), v

    rest = iter(range(len(around)))
    keys = {start: key(start)}  # of the nodes ahead with a neighbour behind
    heap = [keys[start]]  # may contain stale keys, which are skipped
    while len(taken) < len(around):
        if not keys:  # the next connected component
            first = next(v for v in rest if not done[v])
            keys[first] = key(first)
            heapq.heappush(heap, keys[first])
        best = heapq.heappop(heap)
        v = best[2]
        if keys.get(v) != best:
            continue
        now += best[0]
        done[v] = True
        taken.append(v)
        del keys[v]
        for u in around[v]:
            ahead[u] -= 1
        changed = {u for u in around[v] if not done[u]}
        for u in (v, *around[v]):
            if done[u] and ahead[u] == 1:
                changed.add(next(w for w in around[u] if not done[w]))
        for u in changed:
            keys[u] = key(u)
            heapq.heappush(heap, keys[u])
        widest, total = max(widest, now), total + now
    return (widest, total), taken


def search(
    problem: Problem,
    ascent: Ascent,
    limit: float,
    width: int,
    deadline: float = np.inf,
    effort: EliminationEffort = ELIMINATION,
) -> Found:
    """Search for the best plan that costs at most `limit`.

    Args:
        problem: the problem of the ascent.
        ascent: gives messages and rests.
        limit: s.
        width: most states kept per node.
        deadline: on the clock of `time.monotonic()`; at it, the search ends without a plan and with a bound of -inf.
        effort: how many states are compared.
    """
    ends = ascent.ends
    # the last neighbour of each node: the node is in the frontier until that one is processed
    last = [max((x.other for x in around), default=v) for v, around in enumerate(ends)]
    bounds = np.array([float(ascent.rest.sum())])
    frontier: dict[int, Ints] = {}
    steps: list[tuple[Ints, Ints]] = []  # per node: parent and strategy of each state kept
    lost = np.inf  # least bound (s) of the states dropped below the limit
    for v in range(len(problem.nodes)):
        if time.monotonic() >= deadline:
            return Found(None, np.inf, -np.inf)
        total = _step(problem, ascent, ends[v], v, bounds, frontier)
        kept = np.flatnonzero(total <= limit)
        if not len(kept):
            return Found(None, np.inf, min(lost, limit))
        kept, least = _least(total, kept, effort.spare * width)
        parent, strategy = np.divmod(kept, len(problem.nodes[v].cost))
        frontier = {u: states[parent] for u, states in frontier.items() if last[u] > v}
        if last[v] > v:
            frontier[v] = strategy
        ahead = [x.classes[states] for u, states in frontier.items() for x in ends[u] if x.other > v]
        narrow, less = _least(total[kept], cheapest(total[kept], ahead), width)
        lost = min(lost, least, less)
        bounds = total[kept][narrow]
        frontier = {u: states[narrow] for u, states in frontier.items()}
        steps.append((parent[narrow], strategy[narrow]))
    best = int(bounds.argmin()) if len(bounds) else 0
    return Found(_traced(steps, best), float(bounds[best]), min(lost, float(bounds[best])))


def _step(
    problem: Problem, ascent: Ascent, ends: Sequence[End], v: int, bounds: Floats, frontier: dict[int, Ints]
) -> Floats:
    """Bounds (s) of every state combined with every strategy of v, shape (states * strategies,)."""
    own = problem.nodes[v].cost - ascent.rest[v]
    for x in ends:
        if x.other > v:
            own = own + ascent.messages[x.edge][0][x.classes]
    total = bounds[:, None] + own
    for x in ends:
        if x.other < v:
            behind = x.other_classes[frontier[x.other]]
            moved = x.table.T[behind] - ascent.messages[x.edge][0][behind][:, None]
            total += moved[:, x.classes]
    return total.ravel()


def _least(values: Floats, indices: Ints, most: int) -> tuple[Ints, float]:
    """The indices of at most `most` least values, ascending, and the least other value (inf if there is none)."""
    if len(indices) <= most:
        return indices, np.inf
    parted = indices[np.argpartition(values[indices], most)]
    return np.sort(parted[:most]), float(values[parted[most:]].min())


def _traced(steps: Sequence[tuple[Ints, Ints]], last: int) -> Ints:
    """The plan, shape (nodes,), that leads to state `last` of the last step."""
    plan = np.zeros(len(steps), dtype=np.int64)
    for v in range(len(steps) - 1, -1, -1):
        parent, strategy = steps[v]
        plan[v], last = strategy[last], int(parent[last])
    return plan
