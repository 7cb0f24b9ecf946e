"""Path relinking: plans between one that fits and cheaper ones that do not, where equal layers differ.

Take a base plan and others, and let D be the set of nodes where any of them differs from the base. No edge joins two
connected components of the graph on D. Each component can therefore take the strategies of any of the plans, whatever
the other components take, and the changes of seconds and bytes add up exactly:

    seconds(mix)  =  seconds(base)  +  sum_c dt[c, k_c]          bytes_r(mix) likewise, with d_r[c, k_c]    -> _items

The choice of the plan k_c that each component follows is a multiple-choice knapsack problem. In plans with equal
strategies for 32 equal layers, each layer is a component, so that some layers may shard a weight and others not. The
gap between plans with equal strategies for equal layers and all others closes this way without a search. If the hub
between the layers differs, there is only one component, so the caller leaves such plans out.

The knapsack problem is solved by Lagrangian relaxation and a greedy step (P. Sinha, A. A. Zoltners, "The
multiple-choice knapsack problem", Operations Research 27, 1979). Bytes are weighted by the multipliers of the rows.

    relax      every component takes its best option for seconds + rate * weighted bytes; bisection finds the lowest
               rate at which the budget is kept                                                    -> _at_lowest_rate
    greedy     the rest of the budget goes to single components, by the gain per weighted byte      -> _filled_greedily
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.ir.problem import Floats, Ints
from autopar.passes.memory.presolve import ConstrainedProblem


@dataclass(frozen=True, slots=True)
class RelinkEffort:
    """The range of penalty rates that path relinking searches."""

    # bisections of the rate (not measured)
    bisections: int = 60
    # highest rate, as a multiple of (spread of all seconds) / (largest change of weighted bytes) (not measured)
    dearest: float = 1e6


RELINK = RelinkEffort()


@dataclass(frozen=True, slots=True, eq=False)
class _Items:
    """The knapsack problem. Option k of a component is to follow plan k; option 0 is the base plan.

    Attributes:
        component: component of each node, -1 where all plans agree, shape (nodes,).
        seconds: change (s) from the base plan, shape (components, options).
        usage: change (bytes) from the base plan, shape (components, options, R).
    """

    component: Ints
    seconds: Floats
    usage: Floats

    def fits(self, chosen: Ints, usage: Floats, budget: float) -> bool:
        """Whether options, shape (components,), fit; `usage` are the bytes of the base plan, shape (R,)."""
        return bool((usage + self.usage[np.arange(len(chosen)), chosen].sum(axis=0) <= budget).all())


def relink(
    constrained: ConstrainedProblem,
    base: Ints,
    other_plans: Sequence[Ints],
    usage: Floats,
    budget: float,
    multipliers: Floats,
    effort: RelinkEffort = RELINK,
) -> Ints | None:
    """The best combination found that fits on the rows of `constrained`; None if none fits or all plans are equal.

    Args:
        constrained: the unfolded problem and its rows.
        base: a feasible plan, shape (nodes,).
        other_plans: feasible plans; at least one of all plans should fit.
        usage: bytes of `base` in each row, shape (R,).
        budget: bytes.
        multipliers: weights of the bytes of each row (s/byte), shape (R,); equal weights if all are zero.
        effort: the rates that are tried.
    """
    items = _items(constrained, base, other_plans)
    if not len(items.seconds):
        return None
    weight = items.usage @ (multipliers if multipliers.any() else np.ones_like(multipliers))
    chosen = _at_lowest_rate(items, weight, usage, budget, effort)
    if chosen is None:
        return None
    chosen = _filled_greedily(items, weight, chosen, usage, budget)
    mixed = np.stack([base, *other_plans])
    moved = items.component >= 0
    return np.where(moved, mixed[np.where(moved, chosen[items.component], 0), np.arange(len(base))], base)


def _at_lowest_rate(items: _Items, weight: Floats, usage: Floats, budget: float, effort: RelinkEffort) -> Ints | None:
    """The best options, shape (components,), at the lowest rate at which they fit; None if they fit at no rate."""

    def at(rate: float) -> Ints:
        score = items.seconds + rate * weight
        return score.argmin(axis=1)

    if items.fits(at(0.0), usage, budget):
        return at(0.0)
    span, most = float(np.ptp(items.seconds)), float(np.abs(weight).max())
    if not span * most > 0:
        return None
    low, high = 0.0, effort.dearest * span / most
    if not items.fits(at(high), usage, budget):
        return None
    for _ in range(effort.bisections):
        # the geometric mean, as rates span many orders of magnitude
        middle = float(np.sqrt(max(low, 1e-12 * high) * high))
        low, high = (low, middle) if items.fits(at(middle), usage, budget) else (middle, high)
    return at(high)


def _filled_greedily(items: _Items, weight: Floats, chosen: Ints, usage: Floats, budget: float) -> Ints:
    """Change one option at a time, by the best gain per weighted byte, while that saves seconds and fits."""
    chosen = chosen.copy()
    every = np.arange(len(chosen))
    usage = usage + items.usage[every, chosen].sum(axis=0)
    while True:
        gain = items.seconds - items.seconds[every, chosen][:, None]
        change = items.usage - items.usage[every, chosen][:, None]
        # a gain of rounding alone would be taken and given back for ever
        able = (gain < -1e-15) & (usage + change <= budget).all(axis=2)
        if not able.any():
            return chosen
        extra = weight - weight[every, chosen][:, None]
        with np.errstate(over="ignore"):  # what takes no bytes more is best, at -inf
            ratio = np.where(able, gain / np.maximum(extra, np.finfo(float).tiny), np.inf)
        c, k = np.unravel_index(int(ratio.argmin()), ratio.shape)
        usage = usage + change[c, k]
        chosen[c] = k


def _items(constrained: ConstrainedProblem, base: Ints, other_plans: Sequence[Ints]) -> _Items:
    """The changes of seconds and bytes of every component under every plan."""
    differ = np.zeros(len(base), dtype=bool)
    for plan in other_plans:
        differ |= plan != base
    component = _components(constrained, differ)
    size = int(component.max(initial=-1)) + 1
    seconds, usage = np.zeros((size, 1 + len(other_plans))), np.zeros((size, 1 + len(other_plans), constrained.rows))
    plans = np.stack([base, *other_plans])
    for v in np.flatnonzero(differ).tolist():
        c, cost = component[v], constrained.problem.nodes[v].cost[plans[:, v]]
        seconds[c] += cost - cost[0]
        if v in constrained.nodes:
            own = constrained.nodes[v][:, plans[:, v]].T
            usage[c] += own - own[0]
    of = component.tolist()
    for i, e in enumerate(constrained.problem.edges):
        c = max(of[e.u], of[e.v])  # both ends are in the same component, or at least one has -1
        if c < 0:
            continue
        pairs = e.gu[plans[:, e.u]], e.gv[plans[:, e.v]]
        table = e.table[pairs]
        seconds[c] += table - table[0]
        if i in constrained.edges:
            own = constrained.edges[i][:, *pairs].T
            usage[c] += own - own[0]
    return _Items(component, seconds, usage)


def _components(constrained: ConstrainedProblem, inside: NDArray[np.bool_]) -> Ints:
    """The connected component of each node of the graph on the nodes `inside`, by first node; -1 outside; (nodes,)."""
    parent = list(range(len(inside)))

    def root(v: int) -> int:
        while parent[v] != v:
            parent[v] = parent[parent[v]]
            v = parent[v]
        return v

    for e in constrained.problem.edges:
        if inside[e.u] and inside[e.v]:
            low, high = sorted((root(e.u), root(e.v)))
            parent[high] = low
    number: dict[int, int] = {}
    return np.array([number.setdefault(root(v), len(number)) if inside[v] else -1 for v in range(len(inside))])
