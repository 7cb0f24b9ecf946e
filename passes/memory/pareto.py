"""The Pareto front of step time and peak memory: the best plan at each of several budgets, with a bound on all plans.

Budgets range from the least peak to the peak of the optimum without a budget. One dual ascent bounds the plans of every
budget, because the dual function is affine in the budget. With D0(lambda) its value at budget 0,

    seconds(x)  >=  D0(lambda) - sum_r lambda_r B      for every plan x with peak <= B                    -> Front.lower

so the certified lower envelope is the maximum of these lines.

    presolve   once for the rows known, also for the plan with the least peak                    -> front, _presolved
    sweep      at most one ascent per budget; messages, plans and multipliers carry over to the next budget. A budget at
               which lines and plans are close already needs no ascent                                       -> _sweep
    fill       between neighbouring points, equal layers may take different strategies. These plans are between those
               with equal strategies for equal layers                                                         -> _fill

All points are plans evaluated on all rows. There is no branch and bound, and the ILP runs at most for the optimum
without a budget.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost_models.memory.row import RowSource
from autopar.ir.problem import Ints, Problem
from autopar.passes.memory.lagrangian import BudgetObjective, Messages, MultiplierEffort, Pool, ascend, settled
from autopar.passes.memory.local_search import LocalSearch
from autopar.passes.memory.min_memory import least_memory
from autopar.passes.memory.path_relinking import relink
from autopar.passes.memory.presolve import PresolvedProblem, attach, presolve
from autopar.passes.memory.search_state import SearchState
from autopar.passes.solver.optimize import optimize


@dataclass(frozen=True, slots=True)
class FrontEffort:
    """Limits of the search for a Pareto front."""

    # most sweeps over all budgets; one after the first runs only if the one before it added rows (settled on the zoo)
    sweeps: int = 3
    # most plans per budget and sweep that are evaluated on all rows (settled on the zoo)
    evaluated: int = 4
    # relative gap at which a budget is finished (settled on the zoo)
    target: float = 3e-4
    # points above a budget, the nearest ones, whose strategies `_fill` combines (settled on the zoo)
    nearest: int = 3


FRONT = FrontEffort()

#: The ascent of one budget: few passes, as messages carry over from the budget before.
AT_BUDGET = MultiplierEffort(first=4, following=2, patience=10, enough=0.05, adapt=True, scans=0)


Cut = tuple[float, float]
"""A line below all plans: its value at budget 0 (s), and its slope (s/byte), by which it falls with the budget."""


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A plan of the front.

    Attributes:
        seconds: s per step.
        peak_bytes: exact peak (bytes per device).
        assignment: strategy per node, shape (nodes,).
    """

    seconds: float
    peak_bytes: float
    assignment: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """A Pareto front and its certified bounds.

    Attributes:
        points: plans in order of falling peak and rising seconds; none is as good as another in both.
        cuts: lines below all plans.
        least_bytes: lower bound on the peak of every plan (bytes per device).
    """

    points: tuple[Point, ...]
    cuts: tuple[Cut, ...]
    least_bytes: float

    def lower(self, budget: float) -> float:
        """Lower bound (s) on all plans with a peak of at most `budget` (bytes); inf if provably none fits."""
        if budget < self.least_bytes:
            return np.inf
        return _lower(self.cuts, budget)

    def best(self, budget: float) -> Point | None:
        """The fastest point within the budget (bytes); None if none fits."""
        return next((p for p in self.points if p.peak_bytes <= budget), None)


def front(
    problem: Problem,
    source: RowSource,
    points: int = 8,
    *,
    time_limit: float = 60.0,
    fold: bool = True,
    effort: FrontEffort = FRONT,
) -> Front:
    """The front at `points` budgets, evenly spaced from the least peak to the peak of the optimum without a budget.

    Args:
        problem: the unfolded problem.
        source: its memory rows.
        points: number of budgets.
        time_limit: s.
        fold: share decisions among equal layers.
        effort: how long each budget is worked on.

    Raises:
        SolverError: no plan exists.
    """
    deadline = time.monotonic() + time_limit
    free = optimize(problem, time_limit=time_limit, fold=fold, rounds=0)
    state = SearchState(problem, source, np.inf, effort.target, deadline)
    evaluated = _EvaluatedPlans(state)
    evaluated.add(free.assignment)
    state.add_rows(source.rows())
    presolved = _presolved(state, fold)
    seeds = [free.assignment]
    least = least_memory(
        problem, source, rows=state.rows, seeds=seeds, deadline=deadline, exact=False, presolved=presolved
    )
    evaluated.add(least.assignment)
    state.add_rows(least.rows)
    cuts = [(free.lower_bound, 0.0)]
    # from the largest to the smallest; the peak of the free optimum itself is left out
    budgets = np.linspace(least.peak_bytes, evaluated.points[0].peak_bytes, points + 1)[:-1][::-1]
    for _ in range(effort.sweeps):
        rows_before = len(state.rows)
        presolved = presolved if presolved.constrained.rows == rows_before else _presolved(state, fold)
        _sweep(state, presolved, evaluated, budgets.tolist(), cuts, effort)
        if len(state.rows) == rows_before or state.late:
            break
    _fill(state, evaluated, budgets.tolist(), effort)
    return Front(evaluated.nondominated(), tuple(cuts), least.lower_bytes)


def _lower(cuts: Sequence[Cut], budget: float) -> float:
    """The highest of the lines at a budget (bytes), in s."""
    return max(start - slope * budget for start, slope in cuts)


class _EvaluatedPlans:
    """Distinct plans evaluated on all rows, in the order in which they were added."""

    def __init__(self, state: SearchState) -> None:
        self._state = state
        self._points: dict[bytes, Point] = {}

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(self._points.values())

    def add(self, plan: Ints) -> Point | None:
        """The point of a plan, evaluated if it is new, which adds the row of its peak; None if it is infeasible."""
        key = plan.tobytes()
        seconds = self._state.problem.value(plan)
        if key not in self._points and np.isfinite(seconds):
            peak, row = self._state.source.peak(plan)
            self._state.add_rows([row])
            self._points[key] = Point(seconds, peak, plan)
        return self._points.get(key)

    def nondominated(self) -> tuple[Point, ...]:
        """The Pareto-optimal points, fastest first, each with a lower peak than all before it."""
        kept: list[Point] = []
        for point in sorted(self.points, key=lambda p: (p.seconds, p.peak_bytes)):
            if not kept or point.peak_bytes < kept[-1].peak_bytes:
                kept.append(point)
        return tuple(kept)


def _presolved(state: SearchState, fold: bool) -> PresolvedProblem:
    """The problem presolved with the rows added so far; its bounds are valid for all plans."""
    return presolve(state.problem, state.rows, "bound" if fold else "none")


def _sweep(
    state: SearchState,
    presolved: PresolvedProblem,
    evaluated: _EvaluatedPlans,
    budgets: list[float],
    cuts: list[Cut],
    effort: FrontEffort,
) -> None:
    """Per budget, from the largest, run a dual ascent unless the gap is small, add its line, and evaluate its plans.

    Args:
        evaluated: extended by the best plans of each budget.
        budgets: bytes, in descending order.
        cuts: extended by the line of each ascent.
    """
    pool, messages, local_search = (
        Pool(presolved.constrained),
        Messages(presolved.constrained, presolved.counts),
        LocalSearch(presolved.constrained),
    )
    pool.add(plan for plan in (presolved.project(p.assignment) for p in evaluated.points) if plan is not None)
    multipliers = np.zeros(presolved.constrained.rows)
    for budget in budgets:
        objective = BudgetObjective(presolved.constrained, budget, pool)
        wanted, value = objective.multipliers(pool)
        if settled(
            value, objective.incumbent(pool), _lower(cuts, budget) - presolved.constant, effort.target, AT_BUDGET.enough
        ):
            multipliers = wanted
        else:
            dual = ascend(
                messages,
                pool,
                objective,
                start=multipliers,
                target=effort.target,
                deadline=state.deadline,
                effort=AT_BUDGET,
            )
            multipliers = dual.multipliers
            slope = float(multipliers.sum())
            cuts.append((presolved.constant + dual.lower + slope * budget, slope))
        fitting = pool.fitting(budget)[:1].tolist()
        near = np.argsort(pool.seconds + pool.usage @ multipliers, kind="stable")[:1].tolist()
        pool.add([local_search.descend(pool.plans[i], pool.usage[i], budget) for i in dict.fromkeys(fitting + near)])
        for i in pool.fitting(budget)[: effort.evaluated].tolist():
            point = evaluated.add(presolved.lift(pool.plans[i]))
            if point is not None and point.peak_bytes <= budget:
                break


def _fill(state: SearchState, evaluated: _EvaluatedPlans, budgets: list[float], effort: FrontEffort) -> None:
    """At each budget, combine the nearest points below and above it, with different strategies for equal layers."""
    rows = list(state.rows)
    constrained = attach(state.problem, rows)
    points = evaluated.nondominated()
    for budget in budgets:
        under = [p.assignment for p in points if p.peak_bytes <= budget]
        over = [p.assignment for p in points if p.peak_bytes > budget]
        if not under or not over or state.late:
            continue
        usage = np.array([row.value(state.problem, under[0]) for row in rows])
        plan = relink(constrained, under[0], over[-effort.nearest :], usage, budget, np.zeros(constrained.rows))
        if plan is not None:
            evaluated.add(plan)
