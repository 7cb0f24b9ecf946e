"""Dual ascent: sequential tree-reweighted message passing (TRW-S) for a lower bound and good plans.

V. Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 28, 2006, in message form over
layout classes. With nodes in index order, a pass visits each node v, takes what its neighbours sent,

    theta_v(s)  =  cost_v(s) + sum_e m_{e->v}(class_e(s))

and sends a share of it over each edge e = (v, w) to a node still to come:

    p_e(k)       =  min_{s in class k} gamma_v theta_v(s)  -  m_{e->v}(k)        gamma_v = 1 / max(#before, #after)
    m_{e->w}(l)  =  min_k T_e(k, l) + p_e(k)                                     -> _send

Every edge visited has T + p - m >= 0, so after a pass, whatever the messages were before,

    bound  =  sum_v min_s (1 - #after_v gamma_v) theta_v(s)                       -> sweep

and it never falls from pass to pass. When the pass is at v, nodes before v are in this pass's state and nodes after v
in that of the pass before, which went the other way; edges that jump over v hold both sides' shares, and are worth at
least min_l m_{e->w}(l) + p'_e(l). With those pending edges

    bound_v(a)  =  sum_{u<v} rest_u + sum_{w>v} rest'_w + sum_pending min_l (m + p')  +  theta_v(a)

bounds every plan that uses strategy a at v. Leaving the pending edges out gives wrong bounds. In a folded problem a
plan of the unfolded one may use a at a single member of a class of n, and only pays the n-th part of a's excess:

    bound_v(a)  =  (as above with min theta_v)  +  (theta_v(a) - min theta_v) / n_v     -> sweep, `counts`

Each pass decodes a plan: the best strategy given the nodes already decided and the messages of the others. The best
plan is improved by changing one node at a time -> descend.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.problem import Edge, Floats, Ints, Problem

PASSES = 400
PATIENCE = 12  # passes over which the gap has to shrink by PROGRESS or the bound to rise by RISE, else it stops
PROGRESS, RISE = 0.15, 1e-3  # shares of the gap and of the bound
TOLERANCE = 1e-10  # relative gap that counts as closed
REVIEW = 8  # passes between looks at how many strategies their bounds rule out
SHRINK = 0.4  # share of strategies ruled out at which it pays to stop and go on without them
SMALL = 100  # strategies below which it never does


@dataclass(frozen=True, slots=True)
class Gap:
    """A share of a plan's value, `constant` (s) included, at which the gap is small enough."""

    share: float = 0.0
    constant: float = 0.0

    def closed(self, gap: float, value: float) -> bool:
        return gap <= max(TOLERANCE * abs(value), self.share * abs(value + self.constant))


@dataclass(frozen=True, slots=True, eq=False)
class Ascent:
    """lower and value in seconds; value is inf and assignment None if no feasible plan was met.

    strategy_bounds[v][a] (s) bounds from below every plan that takes strategy a at node v. messages[e] are those into
    the lower and the higher node of edge e, per class (s), after a pass towards the first node, and rest[v] is what
    that pass kept at v (s).
    """

    lower: float
    value: float
    assignment: Ints | None
    strategy_bounds: tuple[Floats, ...]
    messages: tuple[tuple[Floats, Floats], ...]
    rest: Floats
    passes: int


@dataclass(frozen=True, slots=True, eq=False)
class End:
    """An edge seen from one of its nodes; sizes are class counts, table[k, l] with k this node's class."""

    edge: int
    other: int
    classes: Ints
    others: Ints  # the classes of the other node
    order: Ints | None  # strategies sorted by class, None when every strategy is its own class in order
    starts: Ints
    table: Floats


@dataclass(slots=True, eq=False)
class State:
    """Messages into the ends of each edge (lower index first), the shares they last sent, what nodes kept (s)."""

    into: list[list[Floats]]
    shares: list[list[Floats]]
    rest: Floats
    bounds: list[Floats]
    counts: Ints
    passes: int = 0
    settled: bool = False  # the last pass ran on the present costs, so strategies can be bounded


def ascend(
    problem: Problem,
    *,
    counts: Ints | None = None,
    upper: float = np.inf,
    deadline: float = np.inf,
    passes: int = PASSES,
    enough: Gap = Gap(),
    limit: float = np.inf,
) -> Ascent:
    """Passes in both directions until the bounds meet or stall, or `time.monotonic()` reaches `deadline`.

    Needs a problem from `eliminate`: every class in use, every strategy feasible with its neighbours. `counts` are the
    sizes of folded classes, for strategy bounds that hold unfolded; `upper` (s) is the value of a plan known elsewhere.
    The ascent also stops when it pays to go on without the strategies whose bounds exceed the best value, at a gap
    that is `enough`, and once the bound reaches `limit` (s).
    """
    ends = ends_of(problem)
    state = initial(problem, counts)
    lower, value, best = -np.inf, np.inf, None
    gaps: list[float] = []
    lowers: list[float] = []
    while not (
        _finished(gaps, lowers, min(value, upper), state, enough)
        or len(gaps) >= passes
        or (len(gaps) >= 2 and (lower >= limit or time.monotonic() > deadline))
    ):
        bound, plan = sweep(problem, ends, state)
        lower = max(lower, bound)
        found = problem.value(plan)
        if found < value or best is None:
            plan = descend(problem, ends, plan)
            found = problem.value(plan)
            if found < value:
                best, value = plan, found
        gaps.append(min(value, upper) - lower)
        lowers.append(lower)
    if state.passes % 2:
        lower = max(lower, sweep(problem, ends, state)[0])
    messages = tuple((low, high) for low, high in state.into)
    return Ascent(min(lower, value), value, best, tuple(state.bounds), messages, state.rest, state.passes)


def _finished(gaps: list[float], lowers: list[float], value: float, state: State, enough: Gap) -> bool:
    """Bounds met, or no progress, or enough strategies ruled out; never before both directions were gone."""
    if len(gaps) < 2:
        return False
    if np.isfinite(value) and enough.closed(gaps[-1], value):
        return True
    if np.isfinite(value) and len(gaps) % REVIEW == 0:
        bounds = np.concatenate(state.bounds)
        if len(bounds) > SMALL and np.count_nonzero(bounds > value + TOLERANCE * abs(value)) > SHRINK * len(bounds):
            return True
    if len(gaps) <= PATIENCE:
        return False
    rises = lowers[-1] - lowers[-1 - PATIENCE] > RISE * abs(lowers[-1] + enough.constant)
    return not (rises or gaps[-1] < gaps[-1 - PATIENCE] * (1 - PROGRESS))


def reparametrise(problem: Problem, messages: Sequence[tuple[Floats, Floats]]) -> Problem:
    """The same costs of plans, with `Ascent.messages` moved from tables to nodes, for another ascent to go on from."""
    costs = [n.cost.copy() for n in problem.nodes]
    edges: list[Edge] = []
    for e, (low, high) in zip(problem.edges, messages, strict=True):
        to_u, to_v = (low, high) if e.u < e.v else (high, low)
        costs[e.u] += to_u[e.gu]
        costs[e.v] += to_v[e.gv]
        edges.append(replace(e, table=e.table - to_u[:, None] - to_v, key=(-2, len(edges))))
    nodes = tuple(replace(n, cost=costs[v], signature=("moved", v)) for v, n in enumerate(problem.nodes))
    return Problem(nodes, tuple(edges))


def ends_of(problem: Problem) -> list[list[End]]:
    """Per node the edges seen from it."""
    ends: list[list[End]] = [[] for _ in problem.nodes]
    for i, e in enumerate(problem.edges):
        ends[e.u].append(end_of(i, e.v, e.gu, e.gv, np.ascontiguousarray(e.table)))
        ends[e.v].append(end_of(i, e.u, e.gv, e.gu, np.ascontiguousarray(e.table.T)))
    return ends


def end_of(edge: int, other: int, classes: Ints, others: Ints, table: Floats) -> End:
    """An edge seen from the node with these classes, the rows of `table`."""
    order = np.argsort(classes, kind="stable")
    starts = np.flatnonzero(np.diff(classes[order], prepend=-1))
    plain = len(starts) == len(classes) and bool((order == np.arange(len(order))).all())
    return End(edge, other, classes, others, None if plain else order, starts, table)


def initial(problem: Problem, counts: Ints | None) -> State:
    """No messages yet; `counts` as in `ascend`."""
    shapes = [e.table.shape if e.u < e.v else e.table.shape[::-1] for e in problem.edges]
    into = [[np.zeros(low), np.zeros(high)] for low, high in shapes]
    bounds = [np.full(len(n.cost), -np.inf) for n in problem.nodes]
    shares = [[np.zeros(0), np.zeros(0)] for _ in problem.edges]
    sizes = np.ones(len(problem.nodes), dtype=np.int64) if counts is None else counts
    return State(into, shares, np.zeros(len(problem.nodes)), bounds, sizes)


def sweep(problem: Problem, ends: list[list[End]], state: State) -> tuple[float, Ints]:
    """One pass, forward when state.passes is even: the lower bound (s) and a decoded plan. Updates state."""
    forward = state.passes % 2 == 0
    nodes = range(len(problem.nodes)) if forward else range(len(problem.nodes) - 1, -1, -1)
    plan = np.full(len(problem.nodes), -1, dtype=np.int64)
    held, pending = float(state.rest.sum()), 0.0
    jump: dict[int, float] = {}
    for v in nodes:
        before: list[End] = []
        after: list[End] = []
        theta = problem.nodes[v].cost.copy()
        for x in ends[v]:
            theta += state.into[x.edge][v > x.other][x.classes]
            (before if (x.other < v) == forward else after).append(x)
        plan[v] = _decode(theta, v, before, plan, state)
        held -= state.rest[v]
        pending -= sum(jump.pop(x.edge) for x in before)
        least = float(theta[theta.argmin()])  # a good deal cheaper than min() on arrays as short as these
        if state.settled:
            bound = (theta - least) / state.counts[v] + (held + pending + least)
            np.maximum(state.bounds[v], bound, out=state.bounds[v])
        gamma = 1.0 / max(len(before), len(after), 1)
        state.rest[v] = (1.0 - len(after) * gamma) * least
        held += state.rest[v]
        share = theta * gamma
        for x in after:
            jump[x.edge] = _send(x, v, share, state)
            pending += jump[x.edge]
    state.passes += 1
    state.settled = True
    return float(state.rest.sum()), plan


def _decode(theta: Floats, v: int, before: list[End], plan: Ints, state: State) -> int:
    """First best strategy of v when the nodes before it are decided; their messages give way to their tables."""
    score = theta
    for x in before:
        decided = x.table[:, x.others[plan[x.other]]] - state.into[x.edge][v > x.other]
        score = score + decided[x.classes]
    return int(score.argmin())


def _send(x: End, v: int, share: Floats, state: State) -> float:
    """Send v's share over x; returns what the edge is worth until its other end is visited."""
    side = int(v > x.other)
    least = share if x.order is None else np.minimum.reduceat(share[x.order], x.starts)
    mine = least - state.into[x.edge][side]
    message = np.minimum.reduce(x.table + mine[:, None])
    theirs = state.shares[x.edge][1 - side]
    state.shares[x.edge][side] = mine
    state.into[x.edge][1 - side] = message
    if not state.settled:
        return 0.0
    worth = message + theirs
    return float(worth[worth.argmin()])


def descend(problem: Problem, ends: list[list[End]], plan: Ints) -> Ints:
    """Change one node at a time to its best strategy given the others, until none gets better."""
    plan = plan.copy()
    improved = True
    while improved:
        improved = False
        for v, node in enumerate(problem.nodes):
            score = node.cost.copy()
            for x in ends[v]:
                score += x.table[:, x.others[plan[x.other]]][x.classes]
            best = int(score.argmin())
            if score[best] + TOLERANCE * abs(score[best]) < score[plan[v]]:
                plan[v], improved = best, True
    return plan
