"""The Pareto front of step time and peak memory: the best plan at each of several budgets, with a bound on all plans.

Budgets range from the least peak to the peak of the optimum without a budget. Each is searched from the plans of the
budgets before it, without an ILP. The bound at one budget holds for all smaller ones, so that the certified lower
envelope is a staircase                                                                                -> Front.lower
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost_models.memory.row import RowSource
from autopar.ir.problem import Ints, Problem
from autopar.passes.memory.budget import BUDGET, Infeasible, optimize_within
from autopar.passes.memory.min_memory import least_memory
from autopar.passes.solver.optimize import optimize


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
        bounds: budget (bytes) -> lower bound (s) on all plans within it.
        least_bytes: lower bound on the peak of every plan (bytes per device).
    """

    points: tuple[Point, ...]
    bounds: Mapping[float, float]
    least_bytes: float

    def lower(self, budget: float) -> float:
        """Lower bound (s) on all plans with a peak of at most `budget` (bytes); inf if provably none fits."""
        if budget < self.least_bytes:
            return np.inf
        return max(seconds for larger, seconds in self.bounds.items() if larger >= budget)

    def best(self, budget: float) -> Point | None:
        """The fastest point within the budget (bytes); None if none fits."""
        return next((p for p in self.points if p.peak_bytes <= budget), None)


def front(
    problem: Problem, source: RowSource, points: int = 8, *, time_limit: float = 60.0, fold: bool = True
) -> Front:
    """The front at `points` budgets, evenly spaced from the least peak to the peak of the optimum without a budget.

    Args:
        problem: the unfolded problem.
        source: its memory rows.
        points: number of budgets.
        time_limit: s.
        fold: share decisions among equal layers.

    Raises:
        SolverError: no plan exists.
    """
    deadline = time.monotonic() + time_limit
    free = optimize(problem, time_limit=time_limit, fold=fold, rounds=0)
    least = least_memory(problem, source, seeds=[free.assignment], deadline=deadline, exact=False)
    planned = [
        Point(free.objective, source.peak(free.assignment)[0], free.assignment),
        Point(least.seconds, least.peak_bytes, least.assignment),
    ]
    bounds = {np.inf: free.lower_bound}
    # from the largest to the smallest; the peak of the free optimum itself is left out
    budgets = np.linspace(least.peak_bytes, planned[0].peak_bytes, points + 1)[:-1][::-1]
    for i, budget in enumerate(budgets.tolist()):
        share = max(deadline - time.monotonic(), 0.1) / (points - i)
        try:
            solution = optimize_within(
                problem,
                source,
                budget,
                free=free,
                time_limit=share,
                fold=fold,
                seeds=[p.assignment for p in planned],
                effort=replace(BUDGET, small=0),
            )
        except Infeasible:
            continue
        bounds[budget] = solution.lower_bound
        planned.append(Point(solution.objective, solution.peak_bytes, solution.assignment))
    return Front(_nondominated(planned), bounds, least.lower_bytes)


def _nondominated(points: list[Point]) -> tuple[Point, ...]:
    """The Pareto-optimal points, fastest first, each with a lower peak than all before it."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.seconds, p.peak_bytes)):
        if not kept or point.peak_bytes < kept[-1].peak_bytes:
            kept.append(point)
    return tuple(kept)
