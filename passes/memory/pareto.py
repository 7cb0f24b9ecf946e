"""Time against memory: the plans that are best at some budget, with a bound on all others.

Budgets range from the least peak to the peak of the memory-free optimum. A dual ascent at one budget bounds every other
budget as well, because the dual function is affine in the budget:

    seconds(x)  >=  D(lambda) - sum_r lambda_r B       for every plan x with peak <= B                    -> Front.lower

so the certified envelope is the highest of these lines. Messages, plans and multipliers carry over from one budget to
the next. A budget at which the known lines come near the known plans needs no ascent. The problem is presolved once for
the known rows, and for the plan with the least peak (`least`) as well. The points are plans evaluated on all rows.
Between neighbouring points, equal layers may take different strategies (`relink`), which fills the gaps that plans with
equal layers leave. There is at most one ascent per budget, no branch and bound, and no ILP but for the memory-free
optimum.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.cost_models.memory.row import RowSource
from autopar.ir.problem import Ints, Problem
from autopar.passes.memory.lagrangian import BudgetObjective, Messages, Pool, ascend, settled
from autopar.passes.memory.local_search import LocalSearch
from autopar.passes.memory.min_memory import least_memory
from autopar.passes.memory.path_relinking import relink
from autopar.passes.memory.presolve import PresolvedProblem, attach, presolve
from autopar.passes.memory.search_state import SearchState
from autopar.passes.solver.optimize import optimize

TURNS = 3  # with the rows learnt so far
JUDGED = 4  # plans per budget that are judged exactly, at most
TARGET = 3e-4  # relative gap at which a budget is left
ENOUGH = 0.05  # share of the gap that multipliers might still close, at which it is left as well
EFFORT: Mapping[str, Any] = {"passes": (4, 2), "patience": 10, "enough": ENOUGH, "adapt": True, "scan": False}
OTHERS = 3  # points over a budget that layers may follow

Cut = tuple[float, float]
"""Seconds at budget 0 and s/byte: a line below all plans."""


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A plan: seconds per step, exact peak in bytes per device, and strategy per node."""

    seconds: float
    peak_bytes: float
    assignment: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """Points in order of falling memory and rising time, none as good as another in both.

    `cuts` are lines (seconds at budget 0, s/byte) below all plans; `least_bytes` bounds every plan's peak from below.
    """

    points: tuple[Point, ...]
    cuts: tuple[Cut, ...]
    least_bytes: float

    def lower(self, budget: float) -> float:
        """No plan with a peak of at most `budget` (bytes) is faster than this (s); inf where no plan fits at all."""
        if budget < self.least_bytes:
            return np.inf
        return _lower(self.cuts, budget)

    def best(self, budget: float) -> Point | None:
        """The fastest point within the budget (bytes); None if none fits."""
        return next((p for p in self.points if p.peak_bytes <= budget), None)


def front(
    problem: Problem, source: RowSource, points: int = 8, *, time_limit: float = 60.0, fold: bool = True
) -> Front:
    """The front at `points` budgets, evenly spread from the least peak to that of the memory-free optimum.

    Raises SolverError when no plan exists.
    """
    deadline = time.monotonic() + time_limit
    free = optimize(problem, time_limit=time_limit, fold=fold, rounds=0)
    state = SearchState(problem, source, np.inf, TARGET, deadline)
    judged = _Judged(state)
    judged.add(free.assignment)
    state.add_rows(source.rows())
    presolved = _presolved(state, fold)
    seeds = [free.assignment]
    least = least_memory(
        problem, source, rows=state.rows, seeds=seeds, deadline=deadline, exact=False, presolved=presolved
    )
    judged.add(least.assignment)
    state.add_rows(least.rows)
    cuts = [(free.lower_bound, 0.0)]
    budgets = np.linspace(least.peak_bytes, judged.points[0].peak_bytes, points + 1)[:-1][::-1]
    for _ in range(TURNS):
        known = len(state.rows)
        presolved = presolved if presolved.constrained.rows == known else _presolved(state, fold)
        _sweep(state, presolved, judged, budgets.tolist(), cuts)
        if len(state.rows) == known or state.late:
            break
    _fill(state, judged, budgets.tolist())
    return Front(judged.nondominated(), tuple(cuts), least.lower_bytes)


def _lower(cuts: Sequence[Cut], budget: float) -> float:
    return max(start - slope * budget for start, slope in cuts)


class _Judged:
    """Distinct plans with their exact peaks."""

    def __init__(self, state: SearchState) -> None:
        self._hunt = state
        self._known: set[bytes] = set()
        self.points: list[Point] = []

    def add(self, plan: Ints) -> None:
        """Judge a plan, once; where it peaks becomes a row."""
        seconds = self._hunt.problem.value(plan)
        if plan.tobytes() in self._known or not np.isfinite(seconds):
            return
        self._known.add(plan.tobytes())
        peak, row = self._hunt.source.peak(plan)
        self._hunt.add_rows([row])
        self.points.append(Point(seconds, peak, plan))

    def nondominated(self) -> tuple[Point, ...]:
        """Fastest first, each with less memory than all before."""
        found: list[Point] = []
        for point in sorted(self.points, key=lambda p: (p.seconds, p.peak_bytes)):
            if not found or point.peak_bytes < found[-1].peak_bytes:
                found.append(point)
        return tuple(found)


def _presolved(state: SearchState, fold: bool) -> PresolvedProblem:
    return presolve(state.problem, state.rows, "bound" if fold else "none")


def _sweep(
    state: SearchState, presolved: PresolvedProblem, judged: _Judged, budgets: list[float], cuts: list[Cut]
) -> None:
    """One ascent per budget that is not closed, from the largest: its line, and its best plans judged."""
    pool, messages, local_search = (
        Pool(presolved.constrained),
        Messages(presolved.constrained, presolved.counts),
        LocalSearch(presolved.constrained),
    )
    pool.add(plan for plan in (presolved.project(p.assignment) for p in judged.points) if plan is not None)
    multipliers = np.zeros(presolved.constrained.rows)
    for budget in budgets:
        objective = BudgetObjective(presolved.constrained, budget, pool)
        wanted, value = objective.multipliers(pool)
        if settled(value, objective.known(pool), _lower(cuts, budget) - presolved.constant, TARGET, ENOUGH):
            multipliers = wanted
        else:
            dual = ascend(
                messages, pool, objective, start=multipliers, target=TARGET, deadline=state.deadline, **EFFORT
            )
            multipliers = dual.multipliers
            slope = float(multipliers.sum())
            cuts.append((presolved.constant + dual.lower + slope * budget, slope))
        fitting = pool.fitting(budget)[:1].tolist()
        near = np.argsort(pool.seconds + pool.usage @ multipliers, kind="stable")[:1].tolist()
        pool.add([local_search.descend(pool.plans[i], pool.usage[i], budget) for i in dict.fromkeys(fitting + near)])
        for i in pool.fitting(budget)[:JUDGED].tolist():
            judged.add(presolved.lift(pool.plans[i]))
            if judged.points[-1].peak_bytes <= budget:
                break


def _fill(state: SearchState, judged: _Judged, budgets: list[float]) -> None:
    """At each budget, layers part ways between the points on either side of it."""
    known = list(state.rows)
    constrained = attach(state.problem, known)
    points = judged.nondominated()
    for budget in budgets:
        under = [p.assignment for p in points if p.peak_bytes <= budget]
        over = [p.assignment for p in points if p.peak_bytes > budget]
        if not under or not over or state.late:
            continue
        usage = np.array([row.value(state.problem, under[0]) for row in known])
        plan = relink(constrained, under[0], over[-OTHERS:], usage, budget, np.zeros(constrained.rows))
        if plan is not None:
            judged.add(plan)
