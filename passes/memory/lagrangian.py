"""Dual ascent with prices: the bound under memory rows, and a pool of plans around the budget.

    D(lambda)  =  min_x  seconds(x) + sum_r lambda_r (bytes_r(x) - budget)      <=   seconds of every plan that fits

for any prices lambda >= 0 (s/byte). TRW-S bounds the minimum from below (`dual_ascent`); its messages stay when the
prices move, as a pass makes a valid bound of whatever messages it finds. Plans decoded on the way go to the pool, and
the pool moves the prices (`prices`). With several rows the cutting-plane model swings, so the next prices lie between
the model's and the best so far (A. Ruszczynski, "Nonlinear Optimization", 2006, chapter 7: stabilised cuts): halfway,
or, in an ascent that has time, farther after a price that was better and nearer after one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from autopar.ir.problem import Floats, Ints, Problem
from autopar.passes.memory.cutting_plane import smallest, within
from autopar.passes.memory.evaluate import Ledger
from autopar.passes.memory.presolve import Loaded
from autopar.passes.solver.dual_ascent import End, ends_of, initial, sweep

FIRST, NEXT = 10, 4  # passes at the first prices, and after each change of prices
CHANGES = 200  # most changes of prices
CEILING, RELIEF = 10.0, 1e-3  # of the made-up plan of the model: seconds, of the dearest plan known; excess below zero
STEP, GROWTH = 0.1, 3.0  # prices at which a budget is worth a tenth of all seconds; prices grow to thrice at a time
PATIENCE = 6  # changes of prices over which the gap has to shrink by PROGRESS, else the ascent stops
PROGRESS = 0.15
FARTHEST, NEAREST, BOLDER, SHYER = 0.9, 0.05, 1.2, 0.8  # of the way to the model's prices: bounds, and what moves it
SCANS, GAIN = 8, 0.03  # rounds of passes around the best prices, and the share of the gap that each has to close
FACTORS = (0.5, 0.7, 1.0, 1.4)
CLOSED = 1e-7  # relative distance between the bound and the model that no prices can better


class Pool:
    """Distinct plans of one problem with rows, with their totals."""

    def __init__(self, loaded: Loaded) -> None:
        self._ledger = Ledger(loaded)
        self._known: dict[bytes, int] = {}
        self.plans: list[Ints] = []
        self.totals = np.zeros((0, 1 + loaded.rows))

    def add(self, plans: Iterable[Ints]) -> None:
        """Put plans in; known ones are left out."""
        start = len(self.plans)
        for plan in plans:
            if self._known.setdefault(plan.tobytes(), len(self.plans)) == len(self.plans):
                self.plans.append(plan)
        if len(self.plans) > start:
            self.totals = np.vstack([self.totals, self._ledger.totals(np.stack(self.plans[start:]))])

    @property
    def seconds(self) -> Floats:
        """Shape (plans,)."""
        return self.totals[:, 0]

    @property
    def held(self) -> Floats:
        """Bytes at each point, shape (plans, R)."""
        return self.totals[:, 1:]

    def fitting(self, budget: float) -> Ints:
        """Indices of finite plans that fit on all rows, cheapest first."""
        fits = (self.held <= budget).all(axis=1) & np.isfinite(self.seconds)
        found = np.flatnonzero(fits)
        return found[np.argsort(self.seconds[found], kind="stable")]


class Messages:
    """TRW-S on seconds + prices x bytes, with messages that outlive the prices."""

    def __init__(self, loaded: Loaded, counts: Ints) -> None:
        self.loaded = loaded
        self._ends = ends_of(loaded.problem)
        self._state = initial(loaded.problem, counts)
        self._priced = loaded.problem
        self._prices = np.zeros(loaded.rows)
        self._penalty: Mapping[int, Floats] = {}
        self._stale = False
        self._slots = _slots(loaded, self._ends)

    def set(self, prices: Floats) -> None:
        """Prices (s/byte), shape (R,)."""
        if np.array_equal(prices, self._prices) and not self._stale:
            return
        self._prices, self._stale = prices, False
        nodes = list(self.loaded.problem.nodes)
        for v, held in self.loaded.nodes.items():
            nodes[v] = replace(nodes[v], cost=nodes[v].cost + prices @ held)
        for v, extra in self._penalty.items():
            nodes[v] = replace(nodes[v], cost=nodes[v].cost + extra)
        self._priced = Problem(tuple(nodes), self.loaded.problem.edges)
        for i, held in self.loaded.edges.items():
            e = self.loaded.problem.edges[i]
            table = e.table + np.tensordot(prices, held, 1)
            (u, at_u), (v, at_v) = self._slots[i]
            self._ends[u][at_u] = replace(self._ends[u][at_u], table=table)
            self._ends[v][at_v] = replace(self._ends[v][at_v], table=np.ascontiguousarray(table.T))
        self._state.settled = False
        for bound in self._state.bounds:
            bound.fill(-np.inf)

    def run(self, passes: int) -> tuple[float, list[Ints]]:
        """The best bound (s) of these passes on the priced problem, and the plans that they decode."""
        found = [sweep(self._priced, self._ends, self._state) for _ in range(passes)]
        return max(bound for bound, _ in found), [plan for _, plan in found]

    @property
    def bounds(self) -> tuple[Floats, ...]:
        """Per node and strategy the bound (s) on the priced cost of plans with it, at the present prices."""
        return tuple(self._state.bounds)

    @property
    def pairs(self) -> tuple[tuple[Floats, Floats], ...]:
        """The messages as in `dual_ascent.Ascent.messages`."""
        return tuple((low, high) for low, high in self._state.into)

    def copy(self) -> list[list[Floats]]:
        """The messages, for `restore`."""
        return [list(pair) for pair in self._state.into]

    def rewind(self, messages: list[list[Floats]], prices: Floats) -> None:
        """Back to these messages and prices, with the penalty as it is."""
        self.restore(messages, self._penalty)
        self.set(prices)

    def restore(self, messages: list[list[Floats]], penalty: Mapping[int, Floats]) -> None:
        """Go on from these messages, with these extra seconds per strategy of some nodes."""
        self._state.into = [list(pair) for pair in messages]
        self._penalty = penalty
        self._stale = True


def _slots(loaded: Loaded, ends: list[list[End]]) -> dict[int, tuple[tuple[int, int], tuple[int, int]]]:
    """Edge with bytes -> (node, position among its ends) of u and of v."""
    at = {(x.edge, v): place for v, around in enumerate(ends) for place, x in enumerate(around)}
    found = {i: loaded.problem.edges[i] for i in loaded.edges}
    return {i: ((e.u, at[i, e.u]), (e.v, at[i, e.v])) for i, e in found.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Dual:
    """lower: a bound on all plans (s; bytes when the peak is to be least); prices: where it was reached, shape (R,)."""

    lower: float
    prices: Floats


class Aim(Protocol):
    """What the prices are for: a cutting-plane model of the pool, and what it makes of bounds and plans."""

    def start(self) -> Floats:
        """Prices to begin with."""
        ...

    def prices(self, pool: Pool) -> tuple[Floats, float]:
        """The best prices that the plans of the pool allow, and the model's value there."""
        ...

    def next(self, wanted: Floats, best: Floats, share: float) -> Floats:
        """The prices to try, this share of the way from the best so far to those that the model wants."""
        ...

    def around(self, prices: Floats) -> list[Floats]:
        """Prices near these."""
        ...

    def lower(self, bound: float, prices: Floats) -> float:
        """The bound on plans from that on the priced problem."""
        ...

    def known(self, pool: Pool) -> float:
        """The value of the best plan in the pool, inf without one."""
        ...


class Within:
    """Fewest seconds under a budget (bytes). `upper` is the value of a plan known elsewhere (s)."""

    def __init__(self, loaded: Loaded, budget: float, pool: Pool, upper: float = np.inf) -> None:
        self.budget = budget
        self.upper = upper
        self._constants = loaded.constants
        self._unit = max(budget, 1.0)
        finite = pool.seconds[np.isfinite(pool.seconds)]
        ceiling = CEILING * float(np.abs(finite).max(initial=0.0))
        self._master = within(loaded.rows, ceiling or 1.0, RELIEF)
        self._floor = STEP * (float(finite.min(initial=np.inf)) if len(finite) else 1.0) / self._unit
        self._seen = 0

    def start(self) -> Floats:
        return np.zeros_like(self._constants)

    def prices(self, pool: Pool) -> tuple[Floats, float]:
        new = pool.totals[self._seen :]
        new = new[np.isfinite(new[:, 0])]
        self._seen = len(pool.plans)
        self._master.add(new[:, 0], (new[:, 1:] - self.budget) / self._unit)
        prices, value = self._master.solve()
        return prices / self._unit, value

    def next(self, wanted: Floats, best: Floats, share: float) -> Floats:
        """As long as no plan fits the model wants prices without bound; so they grow in steps."""
        most = GROWTH * np.maximum(best, self._floor)
        return np.minimum(wanted if len(best) == 1 else best + share * (wanted - best), most)

    def around(self, prices: Floats) -> list[Floats]:
        return [prices * factor for factor in FACTORS] if prices.any() else [prices]

    def lower(self, bound: float, prices: Floats) -> float:
        return bound + float(prices @ (self._constants - self.budget))

    def known(self, pool: Pool) -> float:
        fitting = pool.fitting(self.budget)
        return min(self.upper, float(pool.seconds[fitting[0]])) if len(fitting) else self.upper


class Smallest:
    """The least peak (bytes) over the rows; seconds must be 0 or inf."""

    def __init__(self, loaded: Loaded, pool: Pool) -> None:
        self._constants = loaded.constants
        ceiling = loaded.constants.max() + sum(b.max() for b in (*loaded.nodes.values(), *loaded.edges.values()))
        self._unit = max(float(ceiling), 1.0)
        self._master = smallest(loaded.rows, 1.0)
        self._seen = 0

    def start(self) -> Floats:
        return np.full_like(self._constants, 1.0 / len(self._constants))

    def prices(self, pool: Pool) -> tuple[Floats, float]:
        new = pool.totals[self._seen :]
        new = new[np.isfinite(new[:, 0])]
        self._seen = len(pool.plans)
        self._master.add(np.zeros(len(new)), new[:, 1:] / self._unit)
        prices, value = self._master.solve()
        total = float(prices.sum())  # zero where a plan holds nothing at all
        return prices / total if total > 0 else self.start(), value * self._unit

    def next(self, wanted: Floats, best: Floats, share: float) -> Floats:
        return wanted if len(best) == 1 else best + share * (wanted - best)

    def around(self, prices: Floats) -> list[Floats]:
        return [prices]

    def lower(self, bound: float, prices: Floats) -> float:
        return bound + float(prices @ self._constants)

    def known(self, pool: Pool) -> float:
        peaks = pool.held.max(axis=1)[np.isfinite(pool.seconds)]
        return float(peaks.min(initial=np.inf))


def ascend(
    messages: Messages,
    pool: Pool,
    aim: Aim,
    *,
    start: Floats | None = None,
    target: float = 0.0,
    deadline: float = np.inf,
    changes: int = CHANGES,
    scan: bool = True,
    patience: int = PATIENCE,
    enough: float = 0.0,
    adapt: bool = False,
    passes: tuple[int, int] = (FIRST, NEXT),
) -> Dual:
    """Prices and messages together, until bound and model meet, the bound stalls, or time is up.

    Args:
        messages, pool: of the same problem; the pool grows.
        aim: what the prices are for.
        start: prices to begin with, shape (R,).
        target: gap to the best plan known, relative to it, at which to stop.
        deadline: of `time.monotonic()`.
        changes: most changes of prices.
        scan: try prices around the best at the end.
        patience: changes of prices within which the gap has to shrink.
        enough: share of the gap at which to stop, once no prices can close more of it.
        adapt: move farther towards the model after success.
        passes: at the first prices, and after each change of prices.
    """
    share, done = 0.5, False
    prices = aim.start() if start is None else start
    best = Dual(-np.inf, prices)
    aim.prices(pool)
    first, following = passes
    gaps: list[float] = []
    kept = messages.copy()
    for change in range(changes):
        messages.set(prices)
        bound, plans = messages.run(following if change else first)
        lower = aim.lower(bound, prices)
        pool.add(plans)
        wanted, value = aim.prices(pool)
        better = lower > best.lower
        if better:
            best, kept = Dual(lower, prices), messages.copy()
        share = _step(share, better) if adapt else share
        known = aim.known(pool)
        gaps.append(min(value, known) - best.lower)
        done = settled(value, known, best.lower, target, enough)
        stalled = len(gaps) > patience and gaps[-1] > gaps[-1 - patience] * (1 - PROGRESS)
        if done or stalled or time.monotonic() > deadline:
            break
        prices = aim.next(wanted, best.prices, share)
    messages.rewind(kept, best.prices)
    return best if done or not scan else _scan(messages, pool, aim, best, gaps[-1], deadline)


def settled(value: float, known: float, lower: float, target: float, enough: float) -> bool:
    """Whether no prices can raise a bound by much; all but shares in seconds, or in bytes for the least peak.

    Args:
        value: of the model, the most that a bound may reach by the plans of the pool.
        known: of the best plan, inf without one.
        lower: the bound.
        target: a share of `known` that is little.
        enough: a share of what lies between `known` and `lower` that is little.
    """
    slack = max(CLOSED * abs(value), target * abs(known) if np.isfinite(known) else 0.0)
    slack = max(slack, enough * (known - lower) if np.isfinite(known - lower) else 0.0)
    return bool(min(value, known) - lower <= slack)


def _step(share: float, better: bool) -> float:
    """The next share of the way to the model's prices."""
    return min(FARTHEST, share * BOLDER) if better else max(NEAREST, share * SHYER)


def _scan(messages: Messages, pool: Pool, aim: Aim, best: Dual, gap: float, deadline: float) -> Dual:
    """Passes at prices around the best, as long as a round closes a share of the gap.

    Where the model stalls, messages are not at rest and the pool is thin: both get better here.
    """
    for _ in range(SCANS):
        before = best.lower
        for prices in aim.around(best.prices):
            messages.set(prices)
            bound, plans = messages.run(2 * NEXT)
            pool.add(plans)
            lower = aim.lower(bound, prices)
            best = Dual(lower, prices) if lower > best.lower else best
        if best.lower - before < GAIN * gap or time.monotonic() > deadline:
            break
    return best
