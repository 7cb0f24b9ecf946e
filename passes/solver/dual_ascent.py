"""Dual ascent: sequential tree-reweighted message passing (TRW-S) for a lower bound and good plans.

V. Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 28, 2006, in message form over
layout classes. A pass visits the nodes in index order, or in reverse. At node v it adds the messages of all neighbours,

    theta_v(s)  =  cost_v(s) + sum_e m_{e->v}(class_e(s))

and sends a share of the sum over each edge e = (v, w) to a node not visited yet:

    p_e(k)       =  min_{s in class k} gamma_v theta_v(s)  -  m_{e->v}(k)        gamma_v = 1 / max(#before, #after)
    m_{e->w}(l)  =  min_k T_e(k, l) + p_e(k)                                     -> _send

Here #before and #after are the numbers of edges of v to nodes visited before and after v. Every visited edge has
T + p - m >= 0, so after a pass, whatever the messages were before it,

    bound  =  sum_v rest_v,     rest_v  =  min_s (1 - #after_v gamma_v) theta_v(s)                  -> sweep

is a lower bound, which never falls from pass to pass. While the pass is at v, the nodes before v have the rest_u of
this pass. The nodes after v have the rest'_w of the previous pass, which ran in the other direction. An edge between
the two sets is pending: both its shares, p of this pass and p' of the previous one, are in force, and it costs at least
min_l m_{e->w}(l) + p'_e(l). The sum

    bound_v(a)  =  sum_{u<v} rest_u + sum_{w>v} rest'_w + sum_pending min_l (m + p')  +  theta_v(a)

is a lower bound on every plan that uses strategy a at v. Without the pending edges it would not be valid. In a folded
problem, a plan of the unfolded problem may use a at only one of the n members of a class, and then has 1/n of the
excess cost of a:

    bound_v(a)  =  (as above with min theta_v)  +  (theta_v(a) - min theta_v) / n_v     -> sweep, `counts`

Each pass decodes a plan: v takes its best strategy given the nodes decided before and the messages of the others
-> _decode. Better plans are improved by changing one node at a time -> descend.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.problem import Edge, Floats, Ints, Problem, runs

# relative gap, or gain of a change, that is rounding: far above the 2e-16 of one sum, far below any gap of interest
ROUNDING = 1e-10


@dataclass(frozen=True, slots=True)
class AscentEffort:
    """Limits of one dual ascent."""

    # most passes of one ascent (settled on the zoo; `bench sensitivity`, 2026-11: no effect on small programs)
    passes: int = 400
    # passes over which the gap has to shrink by `progress` or the bound to rise by `rise` (settled on the zoo; `bench
    # sensitivity`, 2026-11: no effect on small programs)
    patience: int = 12
    # share of the gap that counts as progress over `patience` passes (settled on the zoo)
    progress: float = 0.15
    # share of the bound that counts as progress over `patience` passes (settled on the zoo)
    rise: float = 1e-3
    # every so many passes, the strategies ruled out by their bounds are counted (settled on the zoo; `bench
    # sensitivity`, 2026-11: no effect on small programs)
    review: int = 8
    # share of all strategies; the ascent stops to remove those ruled out if they are more (settled on the zoo; `bench
    # sensitivity`, 2026-11: no effect on small programs)
    shrink: float = 0.4
    # most strategies of a problem that the ascent does not stop for (settled on the zoo; `bench sensitivity`, 2026-11:
    # no effect on small programs)
    small: int = 100


#: The efforts of an ascent that is not given others.
ASCENT = AscentEffort()


@dataclass(frozen=True, slots=True)
class Gap:
    """A gap that is small enough: `share` of the cost of a plan, to which `constant` (s) is added."""

    share: float = 0.0
    constant: float = 0.0

    def closed(self, gap: float, value: float) -> bool:
        """Whether a gap (s) below a plan of cost `value` (s, without the constant) is small enough."""
        return gap <= max(ROUNDING * abs(value), self.share * abs(value + self.constant))


@dataclass(frozen=True, slots=True, eq=False)
class Ascent:
    """The result of a dual ascent.

    Attributes:
        lower: lower bound on all plans (s).
        value: cost of the best plan (s), inf if no feasible plan was found.
        assignment: the best plan, shape (nodes,), or None.
        strategy_bounds: [v][a] is a lower bound (s) on every plan that takes strategy a at node v; empty if not kept.
        messages: [e] has the messages (s per class) into the lower and into the higher node of edge e, after a pass
            towards the first node.
        rest: rest_v of that pass (s), shape (nodes,).
        passes: number of passes.
        ends: of the problem, per node.
    """

    lower: float
    value: float
    assignment: Ints | None
    strategy_bounds: tuple[Floats, ...]
    messages: tuple[tuple[Floats, Floats], ...]
    rest: Floats
    passes: int
    ends: list[list[End]]


@dataclass(frozen=True, slots=True, eq=False)
class End:
    """An edge seen from one of its nodes.

    Attributes:
        edge: index of the edge.
        other: the node at the other end.
        mine, theirs: the numbers of this end and of the other one: 2 e and 2 e + 1 of edge e, lower node first.
        classes: class of each strategy of this node.
        other_classes: class of each strategy of the other node.
        other_list: the same as numbers of Python, which are read one by one.
        order: strategies of this node sorted by class; None if strategy i has class i.
        starts: position in `order` of the first strategy of each class.
        table: seconds, rows for the classes of this node, columns for those of the other node.
        flipped: the same with rows for the classes of the other node.
    """

    edge: int
    other: int
    mine: int
    theirs: int
    classes: Ints
    other_classes: Ints
    other_list: Sequence[int]
    order: Ints | None
    starts: Ints
    table: Floats
    flipped: Floats


@dataclass(slots=True, eq=False)
class State:
    """The state of an ascent.

    Attributes:
        costs: cost of each strategy of each node (s).
        tables: [end] is the table (s), rows for the classes of this end; that of the other end is its transpose.
        lower, higher: per node, its edges to nodes before and after it.
        into: [end] is the message m into an end of an edge (s per class), numbered as `End.mine`.
        shares: [end] is the share p that this end last sent (s per class).
        rest: rest_v of the last visit of each node (s), shape (nodes,).
        bounds: [v][a] is the best lower bound so far (s) on plans with strategy a at node v; None: they are not kept.
        counts: class size of each node, shape (nodes,), over the members that a strategy bound is about.
        passes: number of passes so far; even before a forward pass.
        settled: whether the last pass ran on the present costs. Strategy bounds need its rests and shares.
    """

    costs: list[Floats]
    tables: list[Floats]
    lower: list[list[End]]
    higher: list[list[End]]
    into: list[Floats]
    shares: list[Floats]
    rest: Floats
    bounds: list[Floats] | None
    counts: Ints | Floats
    passes: int = 0
    settled: bool = False


def ascend(
    problem: Problem,
    *,
    counts: Ints | Floats | None = None,
    upper: float = np.inf,
    deadline: float = np.inf,
    enough: Gap = Gap(),
    limit: float = np.inf,
    effort: AscentEffort = ASCENT,
    bounded: bool = True,
) -> Ascent:
    """Run passes in both directions until the gap closes or stalls.

    The ascent also stops when so many strategies have bounds above the best plan that a problem without them is better
    solved anew.

    Args:
        problem: a problem from `dead_end.eliminate`: each class has a strategy, and each strategy is feasible with some
            strategy of every neighbour.
        counts: class sizes, for strategy bounds that are valid for the unfolded problem; ones when absent, for bounds
            on plans in which all members of a class have the strategy; n / k for bounds on plans in which k of n have.
        upper: cost (s) of a plan known to the caller.
        deadline: on the clock of `time.monotonic()`; at least two passes run.
        enough: gap at which to stop.
        limit: bound (s) at which to stop.
        effort: when to stop without a closed gap.
        bounded: keep strategy bounds, which take a third of the time of a pass; without them none is ruled out.
    """
    ends = ends_of(problem)
    state = initial(problem, ends, counts, bounded=bounded)
    lower, value, best = -np.inf, np.inf, None
    gaps: list[float] = []
    lowers: list[float] = []
    while not (
        _finished(gaps, lowers, min(value, upper), state, enough, effort)
        or len(gaps) >= effort.passes
        or (len(gaps) >= 2 and (lower >= limit or time.monotonic() > deadline))
    ):
        bound, plan = sweep(ends, state)
        lower = max(lower, bound)
        cost = problem.value(plan)
        if cost < value or best is None:
            plan = descend(problem, ends, plan)
            cost = problem.value(plan)
            if cost < value:
                best, value = plan, cost
        gaps.append(min(value, upper) - lower)
        lowers.append(lower)
    if state.passes % 2:  # the messages of `Ascent` are those after a backward pass
        lower = max(lower, sweep(ends, state, decode=False)[0])
    messages = tuple(zip(state.into[::2], state.into[1::2], strict=True))
    return Ascent(min(lower, value), value, best, tuple(state.bounds or ()), messages, state.rest, state.passes, ends)


def _finished(
    gaps: list[float], lowers: list[float], value: float, state: State, enough: Gap, effort: AscentEffort
) -> bool:
    """Whether the gap is closed or stalls, or many strategies are ruled out; never before a pass in each direction.

    `gaps` (s) and `lowers` (s) have one entry per pass; `value` (s) is the cost of the best plan.
    """
    if len(gaps) < 2:
        return False
    if np.isfinite(value) and enough.closed(gaps[-1], value):
        return True
    if state.bounds is not None and np.isfinite(value) and len(gaps) % effort.review == 0:
        bounds = np.concatenate(state.bounds)
        ruled_out = np.count_nonzero(bounds > value + ROUNDING * abs(value))
        if len(bounds) > effort.small and ruled_out > effort.shrink * len(bounds):
            return True
    if len(gaps) <= effort.patience:
        return False
    before = -1 - effort.patience
    rises = lowers[-1] - lowers[before] > effort.rise * abs(lowers[-1] + enough.constant)
    return not (rises or gaps[-1] < gaps[before] * (1 - effort.progress))


def reparametrise(problem: Problem, messages: Sequence[tuple[Floats, Floats]]) -> Problem:
    """A problem with the same costs of plans, in which messages are moved from tables to nodes, to resume an ascent."""
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
    """Per node, its edges as seen from it."""
    ends: list[list[End]] = [[] for _ in problem.nodes]
    by_class: dict[int, tuple[Ints | None, Ints]] = {}  # equal edges share their arrays: by identity
    lists: dict[int, Sequence[int]] = {}
    tables: dict[int, tuple[Floats, Floats]] = {}
    for i, e in enumerate(problem.edges):
        for classes in (e.gu, e.gv):
            if id(classes) not in by_class:
                by_class[id(classes)] = _by_class(classes)
                lists[id(classes)] = classes.tolist()
        if id(e.table) not in tables:
            tables[id(e.table)] = np.ascontiguousarray(e.table), np.ascontiguousarray(e.table.T)
        table, flipped = tables[id(e.table)]
        u, v = (2 * i, 2 * i + 1) if e.u < e.v else (2 * i + 1, 2 * i)
        ends[e.u].append(End(i, e.v, u, v, e.gu, e.gv, lists[id(e.gv)], *by_class[id(e.gu)], table, flipped))
        ends[e.v].append(End(i, e.u, v, u, e.gv, e.gu, lists[id(e.gu)], *by_class[id(e.gv)], flipped, table))
    return ends


def _by_class(classes: Ints) -> tuple[Ints | None, Ints]:
    """`End.order` and `End.starts`."""
    order, starts = runs(classes)
    plain = len(starts) == len(classes) and bool((order == np.arange(len(order))).all())
    return None if plain else order, starts


def initial(
    problem: Problem, ends: list[list[End]], counts: Ints | Floats | None = None, *, bounded: bool = True
) -> State:
    """The state before the first pass, with zero messages; `counts` and `bounded` as in `ascend`."""
    by_number = {x.mine: x.table for of_node in ends for x in of_node}
    tables = [by_number[number] for number in range(len(by_number))]
    lower = [[x for x in of_node if x.other < v] for v, of_node in enumerate(ends)]
    higher = [[x for x in of_node if x.other >= v] for v, of_node in enumerate(ends)]
    into = [np.zeros(len(table)) for table in tables]
    bounds = [np.full(len(n.cost), -np.inf) for n in problem.nodes] if bounded else None
    shares = [np.zeros(0) for _ in into]
    sizes = np.ones(len(problem.nodes), dtype=np.int64) if counts is None else counts
    costs = [n.cost for n in problem.nodes]
    return State(costs, tables, lower, higher, into, shares, np.zeros(len(costs)), bounds, sizes)


def sweep(ends: list[list[End]], state: State, *, decode: bool = True) -> tuple[float, Ints]:
    """Run one pass, forward if `state.passes` is even, and update the state.

    Args:
        ends: from `ends_of(problem)`.
        state: from `initial`; strategy bounds are raised if it has them.
        decode: decode a plan.

    Returns:
        The lower bound (s), and the decoded plan, shape (nodes,); -1 for every node if none is decoded.
    """
    forward = state.passes % 2 == 0
    count, messages = len(state.costs), state.into
    nodes = range(count) if forward else range(count - 1, -1, -1)
    visited, following = (state.lower, state.higher) if forward else (state.higher, state.lower)
    plan = [-1] * count
    # sums (s) over all nodes but v, and over the pending edges
    rest, pending = float(state.rest.sum()), 0.0
    jump: dict[int, float] = {}  # pending edge -> least cost (s)
    for v in nodes:
        before, after = visited[v], following[v]
        theta = state.costs[v].copy()
        for x in ends[v]:
            into = messages[x.mine]
            theta += into if x.order is None else into[x.classes]
        if decode:
            plan[v] = _decode(theta, before, plan, state)
        least = theta.item(theta.argmin())  # faster than min() on such short arrays
        gamma = 1.0 / max(len(before), len(after), 1)
        mine = (1.0 - len(after) * gamma) * least
        share = theta * gamma
        for x in after:
            _send(x, share, state)
        if state.bounds is not None:
            rest -= state.rest.item(v)
            pending -= sum([jump.pop(x.edge) for x in before])
            if state.settled:
                bound = (theta - least) / state.counts[v] + (rest + pending + least)
                np.maximum(state.bounds[v], bound, out=state.bounds[v])
            rest += mine
            for x in after:
                jump[x.edge] = least_of_edge = _least(x, state)
                pending += least_of_edge
        state.rest[v] = mine
    state.passes += 1
    state.settled = True
    return float(state.rest.sum()), np.array(plan, dtype=np.int64)


def _decode(theta: Floats, before: list[End], plan: Sequence[int], state: State) -> int:
    """The first best strategy, given the nodes visited before: their table entries replace their messages."""
    score = theta
    for x in before:
        decided = state.tables[x.theirs][x.other_list[plan[x.other]]] - state.into[x.mine]
        score = score + (decided if x.order is None else decided[x.classes])
    return int(score.argmin())


def _send(x: End, share: Floats, state: State) -> None:
    """Send a node's share over edge x."""
    least = share if x.order is None else np.minimum.reduceat(share[x.order], x.starts)
    state.shares[x.mine] = mine = least - state.into[x.mine]
    state.into[x.theirs] = np.minimum.reduce(state.tables[x.mine] + mine[:, None])


def _least(x: End, state: State) -> float:
    """The least cost (s) of edge x while it is pending, after `_send`."""
    if not state.settled:  # the share of the other end is not that of the present costs
        return 0.0
    worth = state.into[x.theirs] + state.shares[x.theirs]
    return worth.item(worth.argmin())


def descend(problem: Problem, ends: list[list[End]], plan: Ints) -> Ints:
    """The plan after changing one node at a time to its best strategy given the others, until no change improves it."""
    chosen: list[int] = plan.tolist()
    stale = [True] * len(chosen)  # a neighbour has changed since the node was looked at
    while any(stale):
        for v, node in enumerate(problem.nodes):
            if not stale[v]:
                continue
            stale[v] = False
            score = node.cost.copy()
            for x in ends[v]:
                of_class = x.flipped[x.other_list[chosen[x.other]]]
                score += of_class if x.order is None else of_class[x.classes]
            best = int(score.argmin())
            if score[best] + ROUNDING * abs(score[best]) < score[chosen[v]]:
                chosen[v] = best
                for x in ends[v]:
                    stale[x.other] = True
    return np.array(chosen, dtype=np.int64)
