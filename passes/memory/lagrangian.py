"""Dual ascent with multipliers: the bound under memory rows, and a pool of plans around the budget.

    D(lambda)  =  min_x  seconds(x) + sum_r lambda_r (bytes_r(x) - budget)      <=   seconds of every plan that fits

for any multipliers lambda >= 0 (s/byte). TRW-S bounds the minimum from below (`dual_ascent`). Its messages are kept
when the multipliers change, because a pass makes a valid bound of any messages. Plans decoded on the way go to the
pool, and the pool gives the next multipliers (`Objective.multipliers`). With several rows the cutting-plane model
oscillates, so the next multipliers are between the model's and the best so far (A. Ruszczynski, "Nonlinear
Optimization", 2006, chapter 7: stabilised cuts): halfway, or, in a long ascent, farther after a success and nearer
after a failure.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from autopar.ir.problem import Floats, Ints, Problem
from autopar.passes.memory.cutting_plane import smallest, within
from autopar.passes.memory.evaluate import Evaluator
from autopar.passes.memory.presolve import ConstrainedProblem
from autopar.passes.solver.dual_ascent import End, ends_of, initial, sweep

FIRST, NEXT = 10, 4  # passes at the first multipliers, and after each change of multipliers
CHANGES = 200  # most changes of multipliers
CEILING, RELIEF = 10.0, 1e-3  # of the made-up plan of the model: seconds, of the dearest plan known; excess below zero
STEP, GROWTH = (
    0.1,
    3.0,
)  # multipliers at which a budget is worth a tenth of all seconds; multipliers grow to thrice at a time
PATIENCE = 6  # changes of multipliers over which the gap has to shrink by PROGRESS, else the ascent stops
PROGRESS = 0.15
FARTHEST, NEAREST, BOLDER, SHYER = (
    0.9,
    0.05,
    1.2,
    0.8,
)  # of the way to the model's multipliers: bounds, and what moves it
SCANS, GAIN = 8, 0.03  # rounds of passes around the best multipliers, and the share of the gap that each has to close
FACTORS = (0.5, 0.7, 1.0, 1.4)
CLOSED = 1e-7  # relative distance between the bound and the model that no multipliers can better


class Pool:
    """Distinct plans of one problem with rows, with their totals."""

    def __init__(self, constrained: ConstrainedProblem) -> None:
        self._evaluator = Evaluator(constrained)
        self._known: dict[bytes, int] = {}
        self.plans: list[Ints] = []
        self.totals = np.zeros((0, 1 + constrained.rows))

    def add(self, plans: Iterable[Ints]) -> None:
        """Put plans in; known ones are left out."""
        start = len(self.plans)
        for plan in plans:
            if self._known.setdefault(plan.tobytes(), len(self.plans)) == len(self.plans):
                self.plans.append(plan)
        if len(self.plans) > start:
            self.totals = np.vstack([self.totals, self._evaluator.totals(np.stack(self.plans[start:]))])

    @property
    def seconds(self) -> Floats:
        """Shape (plans,)."""
        return self.totals[:, 0]

    @property
    def usage(self) -> Floats:
        """Bytes at each point, shape (plans, R)."""
        return self.totals[:, 1:]

    def fitting(self, budget: float) -> Ints:
        """Indices of finite plans that fit on all rows, cheapest first."""
        fits = (self.usage <= budget).all(axis=1) & np.isfinite(self.seconds)
        found = np.flatnonzero(fits)
        return found[np.argsort(self.seconds[found], kind="stable")]


class Messages:
    """TRW-S on seconds + multipliers x bytes, with messages that outlive the multipliers."""

    def __init__(self, constrained: ConstrainedProblem, counts: Ints) -> None:
        self.constrained = constrained
        self._ends = ends_of(constrained.problem)
        self._state = initial(constrained.problem, counts)
        self._priced = constrained.problem
        self._multipliers = np.zeros(constrained.rows)
        self._penalty: Mapping[int, Floats] = {}
        self._stale = False
        self._slots = _slots(constrained, self._ends)

    def set(self, multipliers: Floats) -> None:
        """Prices (s/byte), shape (R,)."""
        if np.array_equal(multipliers, self._multipliers) and not self._stale:
            return
        self._multipliers, self._stale = multipliers, False
        nodes = list(self.constrained.problem.nodes)
        for v, usage in self.constrained.nodes.items():
            nodes[v] = replace(nodes[v], cost=nodes[v].cost + multipliers @ usage)
        for v, extra in self._penalty.items():
            nodes[v] = replace(nodes[v], cost=nodes[v].cost + extra)
        self._priced = Problem(tuple(nodes), self.constrained.problem.edges)
        for i, usage in self.constrained.edges.items():
            e = self.constrained.problem.edges[i]
            table = e.table + np.tensordot(multipliers, usage, 1)
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
        """Per node and strategy the bound (s) on the priced cost of plans with it, at the present multipliers."""
        return tuple(self._state.bounds)

    @property
    def pairs(self) -> tuple[tuple[Floats, Floats], ...]:
        """The messages as in `dual_ascent.Ascent.messages`."""
        return tuple((low, high) for low, high in self._state.into)

    def copy(self) -> list[list[Floats]]:
        """The messages, for `restore`."""
        return [list(pair) for pair in self._state.into]

    def rewind(self, messages: list[list[Floats]], multipliers: Floats) -> None:
        """Back to these messages and multipliers, with the penalty as it is."""
        self.restore(messages, self._penalty)
        self.set(multipliers)

    def restore(self, messages: list[list[Floats]], penalty: Mapping[int, Floats]) -> None:
        """Go on from these messages, with these extra seconds per strategy of some nodes."""
        self._state.into = [list(pair) for pair in messages]
        self._penalty = penalty
        self._stale = True


def _slots(
    constrained: ConstrainedProblem, ends: list[list[End]]
) -> dict[int, tuple[tuple[int, int], tuple[int, int]]]:
    """Edge with bytes -> (node, position among its ends) of u and of v."""
    at = {(x.edge, v): place for v, around in enumerate(ends) for place, x in enumerate(around)}
    found = {i: constrained.problem.edges[i] for i in constrained.edges}
    return {i: ((e.u, at[i, e.u]), (e.v, at[i, e.v])) for i, e in found.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Dual:
    """A lower bound and where it was reached.

    Attributes:
        lower: bound on all plans (s; bytes for `PeakObjective`).
        multipliers: shape (R,), s/byte.
    """

    lower: float
    multipliers: Floats


class Objective(Protocol):
    """What the multipliers are for: a cutting-plane model of the pool, and what it makes of bounds and plans."""

    def start(self) -> Floats:
        """Prices to begin with."""
        ...

    def multipliers(self, pool: Pool) -> tuple[Floats, float]:
        """The best multipliers that the plans of the pool allow, and the model's value there."""
        ...

    def next(self, wanted: Floats, best: Floats, share: float) -> Floats:
        """The multipliers to try, this share of the way from the best so far to those that the model wants."""
        ...

    def around(self, multipliers: Floats) -> list[Floats]:
        """Prices near these."""
        ...

    def lower(self, bound: float, multipliers: Floats) -> float:
        """The bound on plans from that on the priced problem."""
        ...

    def known(self, pool: Pool) -> float:
        """The value of the best plan in the pool, inf without one."""
        ...


class BudgetObjective:
    """Fewest seconds under a budget (bytes). `upper` is the value of a plan known elsewhere (s)."""

    def __init__(self, constrained: ConstrainedProblem, budget: float, pool: Pool, upper: float = np.inf) -> None:
        self.budget = budget
        self.upper = upper
        self._constants = constrained.constants
        self._unit = max(budget, 1.0)
        finite = pool.seconds[np.isfinite(pool.seconds)]
        ceiling = CEILING * float(np.abs(finite).max(initial=0.0))
        self._master = within(constrained.rows, ceiling or 1.0, RELIEF)
        self._floor = STEP * (float(finite.min(initial=np.inf)) if len(finite) else 1.0) / self._unit
        self._seen = 0

    def start(self) -> Floats:
        return np.zeros_like(self._constants)

    def multipliers(self, pool: Pool) -> tuple[Floats, float]:
        new = pool.totals[self._seen :]
        new = new[np.isfinite(new[:, 0])]
        self._seen = len(pool.plans)
        self._master.add(new[:, 0], (new[:, 1:] - self.budget) / self._unit)
        multipliers, value = self._master.solve()
        return multipliers / self._unit, value

    def next(self, wanted: Floats, best: Floats, share: float) -> Floats:
        """As long as no plan fits the model wants multipliers without bound; so they grow in steps."""
        most = GROWTH * np.maximum(best, self._floor)
        return np.minimum(wanted if len(best) == 1 else best + share * (wanted - best), most)

    def around(self, multipliers: Floats) -> list[Floats]:
        return [multipliers * factor for factor in FACTORS] if multipliers.any() else [multipliers]

    def lower(self, bound: float, multipliers: Floats) -> float:
        return bound + float(multipliers @ (self._constants - self.budget))

    def known(self, pool: Pool) -> float:
        fitting = pool.fitting(self.budget)
        return min(self.upper, float(pool.seconds[fitting[0]])) if len(fitting) else self.upper


class PeakObjective:
    """The least peak (bytes) over the rows; seconds must be 0 or inf."""

    def __init__(self, constrained: ConstrainedProblem, pool: Pool) -> None:
        self._constants = constrained.constants
        ceiling = constrained.constants.max() + sum(
            b.max() for b in (*constrained.nodes.values(), *constrained.edges.values())
        )
        self._unit = max(float(ceiling), 1.0)
        self._master = smallest(constrained.rows, 1.0)
        self._seen = 0

    def start(self) -> Floats:
        return np.full_like(self._constants, 1.0 / len(self._constants))

    def multipliers(self, pool: Pool) -> tuple[Floats, float]:
        new = pool.totals[self._seen :]
        new = new[np.isfinite(new[:, 0])]
        self._seen = len(pool.plans)
        self._master.add(np.zeros(len(new)), new[:, 1:] / self._unit)
        multipliers, value = self._master.solve()
        total = float(multipliers.sum())  # zero where a plan holds nothing at all
        return multipliers / total if total > 0 else self.start(), value * self._unit

    def next(self, wanted: Floats, best: Floats, share: float) -> Floats:
        return wanted if len(best) == 1 else best + share * (wanted - best)

    def around(self, multipliers: Floats) -> list[Floats]:
        return [multipliers]

    def lower(self, bound: float, multipliers: Floats) -> float:
        return bound + float(multipliers @ self._constants)

    def known(self, pool: Pool) -> float:
        peaks = pool.usage.max(axis=1)[np.isfinite(pool.seconds)]
        return float(peaks.min(initial=np.inf))


def ascend(
    messages: Messages,
    pool: Pool,
    objective: Objective,
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
        objective: what the multipliers are for.
        start: multipliers to begin with, shape (R,).
        target: gap to the best plan known, relative to it, at which to stop.
        deadline: of `time.monotonic()`.
        changes: most changes of multipliers.
        scan: try multipliers around the best at the end.
        patience: changes of multipliers within which the gap has to shrink.
        enough: share of the gap at which to stop, once no multipliers can close more of it.
        adapt: move farther towards the model after success.
        passes: at the first multipliers, and after each change of multipliers.
    """
    share, done = 0.5, False
    multipliers = objective.start() if start is None else start
    best = Dual(-np.inf, multipliers)
    objective.multipliers(pool)
    first, following = passes
    gaps: list[float] = []
    kept = messages.copy()
    for change in range(changes):
        messages.set(multipliers)
        bound, plans = messages.run(following if change else first)
        lower = objective.lower(bound, multipliers)
        pool.add(plans)
        wanted, value = objective.multipliers(pool)
        better = lower > best.lower
        if better:
            best, kept = Dual(lower, multipliers), messages.copy()
        share = _step(share, better) if adapt else share
        known = objective.known(pool)
        gaps.append(min(value, known) - best.lower)
        done = settled(value, known, best.lower, target, enough)
        stalled = len(gaps) > patience and gaps[-1] > gaps[-1 - patience] * (1 - PROGRESS)
        if done or stalled or time.monotonic() > deadline:
            break
        multipliers = objective.next(wanted, best.multipliers, share)
    messages.rewind(kept, best.multipliers)
    return best if done or not scan else _scan(messages, pool, objective, best, gaps[-1], deadline)


def settled(value: float, known: float, lower: float, target: float, enough: float) -> bool:
    """Whether no multipliers can raise a bound by much; all but shares in seconds, or in bytes for the least peak.

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
    """The next share of the way to the model's multipliers."""
    return min(FARTHEST, share * BOLDER) if better else max(NEAREST, share * SHYER)


def _scan(messages: Messages, pool: Pool, objective: Objective, best: Dual, gap: float, deadline: float) -> Dual:
    """Passes at multipliers around the best, as long as a round closes a share of the gap.

    Where the model stalls, messages are not at rest and the pool is thin: both get better here.
    """
    for _ in range(SCANS):
        before = best.lower
        for multipliers in objective.around(best.multipliers):
            messages.set(multipliers)
            bound, plans = messages.run(2 * NEXT)
            pool.add(plans)
            lower = objective.lower(bound, multipliers)
            best = Dual(lower, multipliers) if lower > best.lower else best
        if best.lower - before < GAIN * gap or time.monotonic() > deadline:
            break
    return best
