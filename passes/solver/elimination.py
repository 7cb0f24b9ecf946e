"""Dynamic programming along an order of the nodes, bounded by the messages of a dual ascent.

    order      nodes one after another, so that few of those behind have edges to those ahead (the frontier)   -> order
    state      strategies of the frontier, up to what edges ahead tell apart; the seconds spent on the nodes behind
    step       every state with every strategy of the next node; of equal states the cheapest stays            -> _step
    bound      seconds spent + what the nodes ahead cost at least; states above the limit go
    width      of those left as many of the least bounds; the best bound that goes is a bound on all plans lost

A pass of TRW-S towards the first node (`dual_ascent`) leaves at every node w ahead, with p_e the shares that it sent,

    cost_w(s)  >=  rest_w + sum_{e to lower} p_e(s) - sum_{e to higher} m_{e->w}(s)         T_e + p_e - m_e >= 0

and summed over the nodes ahead, for whatever strategies the frontier has,

    seconds ahead  >=  sum_{w ahead} rest_w  +  sum_{e = (u, w), u behind} m_{e->u}(class_u)

which begins with the bound of the ascent and only rises. Where nothing but states above the limit is lost, the plan is
the optimum. This is bucket elimination (R. Dechter, AI 113, 1999) along a path decomposition, with bounds as in
mini-bucket heuristics (K. Kask, R. Dechter, AI 129, 2001) from reparametrised messages.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.problem import Floats, Ints, Problem, cheapest
from autopar.passes.solver.dual_ascent import Ascent, End, ends_of

STARTS = 8  # nodes that an order is tried from
SPARE = 4  # times the width that is looked at for equal states


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The best plan among the states kept, None if all went; lower (s) bounds all plans below the limit."""

    plan: Ints | None
    value: float
    lower: float


def order(problem: Problem) -> list[int]:
    """An order of the nodes with a narrow frontier: each time the neighbour that opens fewest combinations.

    The frontier is measured in bits: log2 of the strategies of its nodes. Orders from several nodes are compared, those
    of least degree first.
    """
    around: list[set[int]] = [set() for _ in problem.nodes]
    for e in problem.edges:
        around[e.u].add(e.v)
        around[e.v].add(e.u)
    bits = [float(np.log2(max(2, len(n.cost)))) for n in problem.nodes]
    starts = sorted(range(len(around)), key=lambda v: (len(around[v]), v))[:STARTS]
    found = [_order_from(v, around, bits) for v in starts]
    return min(found, key=lambda one: one[0])[1] if found else []


def ordered(problem: Problem) -> tuple[Problem, Ints, Ints]:
    """The problem with its nodes in `order`, that order, and the place of each node in it."""
    nodes = np.array(order(problem), dtype=np.int64)
    place = np.argsort(nodes)
    edges = tuple(replace(e, u=int(place[e.u]), v=int(place[e.v])) for e in problem.edges)
    return Problem(tuple(problem.nodes[v] for v in nodes), edges), nodes, place


def _order_from(start: int, around: Sequence[set[int]], bits: Sequence[float]) -> tuple[tuple[float, float], list[int]]:
    """(widest frontier, sum of frontiers) in bits, and the order."""
    ahead = [len(a) for a in around]  # neighbours that are not behind
    done = [False] * len(around)
    taken: list[int] = []
    now = widest = total = 0.0

    def opened(v: int) -> float:
        """Bits that the frontier gains."""
        own = bits[v] if ahead[v] else 0.0
        return own - sum(bits[u] for u in around[v] if done[u] and ahead[u] == 1)

    def key(v: int) -> tuple[float, int, int]:
        return opened(v), ahead[v] - len(around[v]), v

    rest = iter(range(len(around)))
    keys = {start: key(start)}  # of the nodes near what is taken
    heap = [keys[start]]  # with keys that are no longer so
    while len(taken) < len(around):
        if not keys:
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


def search(problem: Problem, ascent: Ascent, limit: float, width: int, deadline: float = np.inf) -> Found:
    """The best plan of at most `limit` (s) that so many states per node find.

    Nothing is found, and nothing proven, once `time.monotonic()` is at the deadline.
    """
    ends = ends_of(problem)
    last = [max((x.other for x in around), default=v) for v, around in enumerate(ends)]
    bounds = np.array([float(ascent.rest.sum())])
    frontier: dict[int, Ints] = {}
    steps: list[tuple[Ints, Ints]] = []
    lost = np.inf
    for v in range(len(problem.nodes)):
        if time.monotonic() >= deadline:
            return Found(None, np.inf, -np.inf)
        total = _step(problem, ascent, ends[v], v, bounds, frontier)
        kept = np.flatnonzero(total <= limit)
        if not len(kept):
            return Found(None, np.inf, min(lost, limit))
        kept, least = _least(total, kept, SPARE * width)
        parent, strategy = np.divmod(kept, len(problem.nodes[v].cost))
        frontier = {u: held[parent] for u, held in frontier.items() if last[u] > v}
        if last[v] > v:
            frontier[v] = strategy
        ahead = [x.classes[held] for u, held in frontier.items() for x in ends[u] if x.other > v]
        narrow, less = _least(total[kept], cheapest(total[kept], ahead), width)
        lost = min(lost, least, less)
        bounds = total[kept][narrow]
        frontier = {u: held[narrow] for u, held in frontier.items()}
        steps.append((parent[narrow], strategy[narrow]))
    best = int(bounds.argmin()) if len(bounds) else 0
    return Found(_traced(steps, best), float(bounds[best]), min(lost, float(bounds[best])))


def _step(
    problem: Problem, ascent: Ascent, ends: Sequence[End], v: int, bounds: Floats, frontier: dict[int, Ints]
) -> Floats:
    """Bounds of every state with every strategy of v, flat."""
    own = problem.nodes[v].cost - ascent.rest[v]
    for x in ends:
        if x.other > v:
            own = own + ascent.messages[x.edge][0][x.classes]
    total = bounds[:, None] + own
    for x in ends:
        if x.other < v:
            behind = x.others[frontier[x.other]]
            moved = x.table.T[behind] - ascent.messages[x.edge][0][behind][:, None]
            total += moved[:, x.classes]
    return total.ravel()


def _least(values: Floats, indices: Ints, most: int) -> tuple[Ints, float]:
    """The indices of at most so many least values, ascending, and the least of the others (inf if there are none)."""
    if len(indices) <= most:
        return indices, np.inf
    parted = indices[np.argpartition(values[indices], most)]
    return np.sort(parted[:most]), float(values[parted[most:]].min())


def _traced(steps: Sequence[tuple[Ints, Ints]], last: int) -> Ints:
    """The strategies that led to a state of the last step."""
    plan = np.zeros(len(steps), dtype=np.int64)
    for v in range(len(steps) - 1, -1, -1):
        parent, strategy = steps[v]
        plan[v], last = strategy[last], int(parent[last])
    return plan
