"""Lagrangian relaxation of the memory rows: a lower bound by dual ascent, and a pool of plans around the budget.

    D(lambda)  =  min_x  seconds(x) + sum_r lambda_r (bytes_r(x) - budget)      <=   seconds of every plan that fits

for any multipliers lambda >= 0 (s/byte) -> BudgetObjective.lower. The bound on the least peak has the same form

    min_x  sum_r mu_r bytes_r(x)      <=   peak of every plan,      mu >= 0,   sum_r mu_r = 1    -> PeakObjective.lower

TRW-S bounds the minimum over x from below (`dual_ascent`) -> Messages.run. When the multipliers change, its messages
stay, because a pass gives a valid bound whatever the messages were before. The plans that the passes decode go to the
pool, and the pool determines the next multipliers -> Objective.multipliers. With several rows the cutting-plane model
oscillates, so the next multipliers are halfway between those of the model and the best so far (A. Ruszczynski,
"Nonlinear Optimization", 2006, chapter 7: stabilised cuts) -> Objective.next.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from autopar.ir.problem import Floats, Ints
from autopar.passes.memory.cutting_plane import smallest, within
from autopar.passes.memory.evaluate import Evaluator
from autopar.passes.memory.presolve import ConstrainedProblem
from autopar.passes.solver.dual_ascent import ends_of, initial, sweep

# relative distance between bound and model that counts as zero: the model is solved to 1e-9 of its largest cost
MODEL_CLOSED = 1e-7


@dataclass(frozen=True, slots=True)
class MultiplierEffort:
    """Limits and steps of one dual ascent on the multipliers of memory rows."""

    # message passes at the first multipliers (settled on the zoo; `bench sensitivity`, 2026-11: no effect on small
    # programs)
    first: int = 10
    # message passes after each change of multipliers (settled on the zoo; `bench sensitivity`, 2026-11: no effect on
    # small programs)
    following: int = 4
    # most changes of multipliers in one ascent (settled on the zoo; `bench sensitivity`, 2026-11: no effect on small
    # programs)
    changes: int = 200
    # changes of multipliers over which the gap has to shrink by the share `progress` (settled on the zoo; `bench
    # sensitivity`, 2026-11: no effect on small programs)
    patience: int = 6
    # share of the gap that counts as progress over `patience` changes (settled on the zoo; `bench sensitivity`,
    # 2026-11: no effect on small programs)
    progress: float = 0.15
    # most rounds of `_scan` after the ascent; 0: none (settled on the zoo)
    scans: int = 8
    # message passes at each of the multipliers that a round of `_scan` tries (settled on the zoo)
    scan_passes: int = 8
    # share of the gap that a round of `_scan` has to close, else it is the last (settled on the zoo)
    gain: float = 0.03


#: The effort of an ascent of which nothing else is known.
MULTIPLIERS = MultiplierEffort()


@dataclass(frozen=True, slots=True)
class StepEffort:
    """How far one change of multipliers goes: they become best + share * (those of the model - best)."""

    # the share; 1 would be the plain cutting-plane method (settled on the zoo)
    share: float = 0.5
    # cost of the artificial plan of the master problem, as a multiple of the dearest plan of the pool (settled on the
    # zoo; `bench sensitivity`, 2026-11: no effect on small programs)
    ceiling: float = 10.0
    # how far the artificial plan stays below the budget, as a share of the budget (settled on the zoo; `bench
    # sensitivity`, 2026-11: no effect on small programs)
    relief: float = 1e-3
    # least scale of a multiplier: the whole budget, times it, costs this share of the fastest plan (settled on the zoo;
    # `bench sensitivity`, 2026-11: no effect on small programs)
    scale: float = 0.1
    # most factor by which a multiplier grows in one change, from its value or the least scale (settled on the zoo;
    # `bench sensitivity`, 2026-11: no effect on small programs)
    growth: float = 3.0
    # factors of the best multipliers that one round of `_scan` tries (settled on the zoo)
    factors: tuple[float, ...] = (0.5, 0.7, 1.0, 1.4)


STEPS = StepEffort()


class Pool:
    """Distinct plans of one problem with memory rows, and their seconds and bytes."""

    def __init__(self, constrained: ConstrainedProblem) -> None:
        self._evaluator = Evaluator(constrained)
        self._known: dict[bytes, int] = {}
        self.plans: list[Ints] = []
        self.totals = np.zeros((0, 1 + constrained.rows))

    def add(self, plans: Iterable[Ints]) -> None:
        """Add and evaluate the plans, shape (nodes,) each, that the pool does not contain."""
        start = len(self.plans)
        for plan in plans:
            if self._known.setdefault(plan.tobytes(), len(self.plans)) == len(self.plans):
                self.plans.append(plan)
        if len(self.plans) > start:
            self.totals = np.vstack([self.totals, self._evaluator.totals(np.stack(self.plans[start:]))])

    @property
    def seconds(self) -> Floats:
        """Seconds per step of each plan, without the constant of the presolved problem, shape (plans,)."""
        return self.totals[:, 0]

    @property
    def usage(self) -> Floats:
        """Bytes at each program point, shape (plans, R)."""
        return self.totals[:, 1:]

    def fitting(self, budget: float) -> Ints:
        """Indices of the feasible plans within the budget (bytes) on all rows of the problem, cheapest first."""
        fits = (self.usage <= budget).all(axis=1) & np.isfinite(self.seconds)
        indices = np.flatnonzero(fits)
        return indices[np.argsort(self.seconds[indices], kind="stable")]


class Messages:
    """TRW-S on the penalised problem, seconds + sum_r multiplier_r * bytes_r.

    Messages outlive a change of multipliers.

    Args:
        constrained: the problem and its R rows.
    """

    def __init__(self, constrained: ConstrainedProblem) -> None:
        self.constrained = constrained
        self._ends = ends_of(constrained.problem)
        self._state = initial(constrained.problem, self._ends, bounded=False)
        self._multipliers = np.zeros(constrained.rows)
        self._stale = False

    def set(self, multipliers: Floats) -> None:
        """Penalise bytes by these multipliers (s/byte), shape (R,). Messages stay."""
        if np.array_equal(multipliers, self._multipliers) and not self._stale:
            return
        self._multipliers, self._stale = multipliers, False
        problem, state = self.constrained.problem, self._state
        for v, usage in self.constrained.nodes.items():
            state.costs[v] = problem.nodes[v].cost + multipliers @ usage
        row = multipliers[None]
        for i, usage in self.constrained.edges.items():
            e = problem.edges[i]
            table = e.table + np.dot(row, usage.reshape(len(usage), -1)).reshape(e.table.shape)
            flipped = np.ascontiguousarray(table.T)
            state.tables[2 * i : 2 * i + 2] = (table, flipped) if e.u < e.v else (flipped, table)

    def run(self, passes: int) -> tuple[float, list[Ints]]:
        """The best lower bound (s) on the penalised cost from these passes, and the plans that they decode."""
        sweeps = [sweep(self._ends, self._state) for _ in range(passes)]
        return max(bound for bound, _ in sweeps), [plan for _, plan in sweeps]

    def copy(self) -> list[Floats]:
        """The messages, for `rewind`. Their arrays are shared: passes replace arrays and never write to them."""
        return list(self._state.into)

    def rewind(self, messages: list[Floats], multipliers: Floats) -> None:
        """Set these messages and multipliers."""
        self._state.into = list(messages)
        self._stale = True
        self.set(multipliers)


@dataclass(frozen=True, slots=True, eq=False)
class Dual:
    """A lower bound, and the multipliers that reach it.

    Attributes:
        lower: bound on all plans (s for `BudgetObjective`, bytes for `PeakObjective`).
        multipliers: shape (R,); s/byte for `BudgetObjective`, without unit for `PeakObjective`.
    """

    lower: float
    multipliers: Floats


class Objective(Protocol):
    """The quantity that a dual ascent bounds, with a cutting-plane model of the pool that proposes multipliers."""

    def start(self) -> Floats:
        """The multipliers to start from, shape (R,)."""
        ...

    def multipliers(self, pool: Pool) -> tuple[Floats, float]:
        """The multipliers that maximise the model of the pool, shape (R,), and the value of the model there."""
        ...

    def next(self, wanted: Floats, best: Floats) -> Floats:
        """The multipliers to try next, between the best and those of the model, within the limits of the objective."""
        ...

    def around(self, multipliers: Floats) -> list[Floats]:
        """The multipliers that a round of `_scan` tries."""
        ...

    def lower(self, bound: float, multipliers: Floats) -> float:
        """The lower bound on the objective of plans, from a bound on their penalised cost at these multipliers."""
        ...

    def incumbent(self, pool: Pool) -> float:
        """The objective of the best plan in the pool, inf without one."""
        ...


class BudgetObjective:
    """Fewest seconds under a budget (bytes).

    Args:
        constrained: the problem and its rows.
        budget: bytes.
        pool: gives the scale of costs for the master problem.
        upper: cost (s) of a known plan that need not be in the pool.
        steps: scales and limits of the multipliers.
    """

    def __init__(
        self,
        constrained: ConstrainedProblem,
        budget: float,
        pool: Pool,
        upper: float = np.inf,
        steps: StepEffort = STEPS,
    ) -> None:
        self._steps = steps
        self.budget = budget
        self.upper = upper
        self._constants = constrained.constants
        self._unit = max(budget, 1.0)  # bytes; the master problem has shares of the budget
        finite = pool.seconds[np.isfinite(pool.seconds)]
        ceiling = steps.ceiling * float(np.abs(finite).max(initial=0.0))
        self._master = within(constrained.rows, ceiling or 1.0, steps.relief)
        self._floor = steps.scale * (float(finite.min(initial=np.inf)) if len(finite) else 1.0) / self._unit
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

    def next(self, wanted: Floats, best: Floats) -> Floats:
        """As in `Objective`, but at most `StepEffort.growth` times the best.

        As long as no plan of the pool fits, only the artificial plan limits the multipliers of the model. With one row
        there is no oscillation to damp.
        """
        most = self._steps.growth * np.maximum(best, self._floor)
        return np.minimum(wanted if len(best) == 1 else best + self._steps.share * (wanted - best), most)

    def around(self, multipliers: Floats) -> list[Floats]:
        return [multipliers * factor for factor in self._steps.factors] if multipliers.any() else [multipliers]

    def lower(self, bound: float, multipliers: Floats) -> float:
        # penalised costs have neither the constant bytes nor the budget
        return bound + float(multipliers @ (self._constants - self.budget))

    def incumbent(self, pool: Pool) -> float:
        fitting = pool.fitting(self.budget)
        return min(self.upper, float(pool.seconds[fitting[0]])) if len(fitting) else self.upper


class PeakObjective:
    """The least peak (bytes) over the rows. Its bound is valid only if all costs are 0 or inf."""

    def __init__(self, constrained: ConstrainedProblem, pool: Pool, steps: StepEffort = STEPS) -> None:
        self._steps = steps
        self._constants = constrained.constants
        ceiling = constrained.constants.max() + sum(
            b.max() for b in (*constrained.nodes.values(), *constrained.edges.values())
        )
        self._unit = max(float(ceiling), 1.0)  # bytes; no plan has a higher peak
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
        total = float(multipliers.sum())  # zero if some plan has no bytes in any row
        return multipliers / total if total > 0 else self.start(), value * self._unit

    def next(self, wanted: Floats, best: Floats) -> Floats:
        return wanted if len(best) == 1 else best + self._steps.share * (wanted - best)

    def around(self, multipliers: Floats) -> list[Floats]:
        return [multipliers]

    def lower(self, bound: float, multipliers: Floats) -> float:
        return bound + float(multipliers @ self._constants)

    def incumbent(self, pool: Pool) -> float:
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
    effort: MultiplierEffort = MULTIPLIERS,
) -> Dual:
    """Dual ascent on multipliers and messages, until bound and model meet, the gap stalls, or the deadline passes.

    Args:
        messages: of the same problem as the pool; set to the messages and multipliers of the best bound at the end,
            from which a scan goes on.
        pool: the plans known; extended by those decoded.
        objective: the quantity to bound.
        start: multipliers to start from, shape (R,); those of the objective when absent.
        target: gap to the best known plan, as a share of its value, at which to stop.
        deadline: on the clock of `time.monotonic()`.
        effort: how long the ascent lasts.

    Returns:
        The best bound and its multipliers.
    """
    done = False
    multipliers = objective.start() if start is None else start
    best = Dual(-np.inf, multipliers)
    objective.multipliers(pool)  # adds the plans of the pool to the model
    gaps: list[float] = []
    kept = messages.copy()
    for change in range(effort.changes):
        messages.set(multipliers)
        bound, plans = messages.run(effort.following if change else effort.first)
        lower = objective.lower(bound, multipliers)
        pool.add(plans)
        wanted, value = objective.multipliers(pool)
        if lower > best.lower:
            best, kept = Dual(lower, multipliers), messages.copy()
        incumbent = objective.incumbent(pool)
        gaps.append(min(value, incumbent) - best.lower)
        done = _settled(value, incumbent, best.lower, target)
        before = -1 - effort.patience
        stalled = len(gaps) > effort.patience and gaps[-1] > gaps[before] * (1 - effort.progress)
        if done or stalled or time.monotonic() > deadline:
            break
        multipliers = objective.next(wanted, best.multipliers)
    messages.rewind(kept, best.multipliers)
    return best if done else _scan(messages, pool, objective, best, gaps[-1], deadline, effort)


def _settled(value: float, incumbent: float, lower: float, target: float) -> bool:
    """Whether no multipliers can raise a bound by much, that is whether min(value, incumbent) - lower is small.

    `value`, `incumbent` and `lower` have the unit of the objective: seconds, or bytes for the least peak.

    Args:
        value: the value of the model, which no bound exceeds.
        incumbent: objective of the best known plan, inf without one.
        lower: the bound.
        target: share of `incumbent` that counts as small.
    """
    slack = max(MODEL_CLOSED * abs(value), target * abs(incumbent) if np.isfinite(incumbent) else 0.0)
    return bool(min(value, incumbent) - lower <= slack)


def _scan(
    messages: Messages,
    pool: Pool,
    objective: Objective,
    best: Dual,
    gap: float,
    deadline: float,
    effort: MultiplierEffort,
) -> Dual:
    """Rounds of passes at multipliers around the best, as long as a round closes the share `effort.gain` of the gap.

    Where the model stalls, the messages have not converged and the pool has few plans. More passes improve both.
    """
    for _ in range(effort.scans):
        before = best.lower
        for multipliers in objective.around(best.multipliers):
            messages.set(multipliers)
            bound, plans = messages.run(effort.scan_passes)
            pool.add(plans)
            lower = objective.lower(bound, multipliers)
            best = Dual(lower, multipliers) if lower > best.lower else best
        if best.lower - before < effort.gain * gap or time.monotonic() > deadline:
            break
    return best
