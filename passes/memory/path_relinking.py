"""Between plans that fit and cheaper ones that do not: equal layers part ways.

Take a base plan and others, and let D be the nodes where any of them differs from the base. No edge joins two
components of the graph on D, so each component can follow any of the plans on its own, and the changes in seconds and
bytes add up exactly:

    seconds(mix)  =  seconds(base)  +  sum_c dt[c, k_c]          bytes_r(mix) likewise, with d_r[c, k_c]    -> _items

Which plan k_c each component follows is a multiple-choice knapsack. Of 32 equal layers that every plan treats alike,
each is a component, so that some may shard a weight and others not: the gap between plans with equal layers alike and
the others closes without any search. Where the hub between the layers differs there is one component only, so such
plans are left out by the caller.

The knapsack is solved by price: every component takes its cheapest option at a price of bytes, the price is bisected to
the lowest that fits, and what is left of the budget is filled by the best gain per byte (P. Sinha, A. A. Zoltners, "The
multiple-choice knapsack problem", Operations Research 27, 1979). Bytes are weighed by the multipliers of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.ir.problem import Floats, Ints
from autopar.passes.memory.presolve import ConstrainedProblem

BISECTIONS = 60
DEAREST = 1e6  # highest price, in units of all seconds at stake for the largest change of bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Items:
    """component[v]: that of node v, -1 where all plans agree; change of seconds (c, k), and of bytes (c, k, R).

    Option 0 is the base plan, whose changes are zero.
    """

    component: Ints
    seconds: Floats
    usage: Floats

    def fits(self, chosen: Ints, usage: Floats, budget: float) -> bool:
        return bool((usage + self.usage[np.arange(len(chosen)), chosen].sum(axis=0) <= budget).all())


def relink(
    constrained: ConstrainedProblem,
    base: Ints,
    others: Sequence[Ints],
    usage: Floats,
    budget: float,
    multipliers: Floats,
) -> Ints | None:
    """The best mix found that fits on the rows of `constrained`; None if none does, or there is nothing to mix.

    Args:
        constrained: the unfolded problem and its rows.
        base, others: feasible plans; one of them at least should fit.
        usage: bytes of `base` in each row, shape (R,).
        budget: bytes.
        multipliers: s/byte of each row, shape (R,), as weights; equal if all are zero.
    """
    items = _items(constrained, base, others)
    if not len(items.seconds):
        return None
    weight = items.usage @ (multipliers if multipliers.any() else np.ones_like(multipliers))
    chosen = _priced(items, weight, usage, budget)
    if chosen is None:
        return None
    chosen = _filled(items, weight, chosen, usage, budget)
    mixed = np.stack([base, *others])
    moved = items.component >= 0
    return np.where(moved, mixed[np.where(moved, chosen[items.component], 0), np.arange(len(base))], base)


def _priced(items: _Items, weight: Floats, usage: Floats, budget: float) -> Ints | None:
    """The cheapest options at the lowest price of weight that fits."""

    def at(price: float) -> Ints:
        score = items.seconds + price * weight
        return score.argmin(axis=1)

    if items.fits(at(0.0), usage, budget):
        return at(0.0)
    span, most = float(np.ptp(items.seconds)), float(np.abs(weight).max())
    if not span * most > 0:
        return None
    low, high = 0.0, DEAREST * span / most
    if not items.fits(at(high), usage, budget):
        return None
    for _ in range(BISECTIONS):
        middle = float(np.sqrt(max(low, 1e-12 * high) * high))
        low, high = (low, middle) if items.fits(at(middle), usage, budget) else (middle, high)
    return at(high)


def _filled(items: _Items, weight: Floats, chosen: Ints, usage: Floats, budget: float) -> Ints:
    """Single components change their option while that saves seconds and fits, best gain per weight first."""
    chosen = chosen.copy()
    every = np.arange(len(chosen))
    usage = usage + items.usage[every, chosen].sum(axis=0)
    while True:
        gain = items.seconds - items.seconds[every, chosen][:, None]
        change = items.usage - items.usage[every, chosen][:, None]
        able = (gain < -1e-15) & (usage + change <= budget).all(axis=2)
        if not able.any():
            return chosen
        extra = weight - weight[every, chosen][:, None]
        ratio = np.where(able, gain / np.maximum(extra, np.finfo(float).tiny), np.inf)
        c, k = np.unravel_index(int(ratio.argmin()), ratio.shape)
        usage = usage + change[c, k]
        chosen[c] = k


def _items(constrained: ConstrainedProblem, base: Ints, others: Sequence[Ints]) -> _Items:
    differ = np.zeros(len(base), dtype=bool)
    for plan in others:
        differ |= plan != base
    component = _components(constrained, differ)
    size = int(component.max(initial=-1)) + 1
    seconds, usage = np.zeros((size, 1 + len(others))), np.zeros((size, 1 + len(others), constrained.rows))
    plans = np.stack([base, *others])
    for v in np.flatnonzero(differ).tolist():
        c, cost = component[v], constrained.problem.nodes[v].cost[plans[:, v]]
        seconds[c] += cost - cost[0]
        if v in constrained.nodes:
            own = constrained.nodes[v][:, plans[:, v]].T
            usage[c] += own - own[0]
    of = component.tolist()
    for i, e in enumerate(constrained.problem.edges):
        c = max(of[e.u], of[e.v])
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
    """The connected components of the graph on the nodes `inside`, numbered by first node; -1 outside."""
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
