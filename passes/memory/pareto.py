"""Time against memory: the plans that are best at some budget, with a bound on all others.

Each budget between the least peak and that of the memory-free optimum asks the dual for prices; its answer bounds every
other budget as well, as the dual is affine in it:

    seconds(x)  >=  D(lambda) - sum_r lambda_r B       for every plan x with peak <= B                    -> Front.lower

so the certified envelope is the highest of these lines. Messages, plans and prices go from one budget to the next, and
a budget where the lines known come near what the plans known allow asks for none. The problem is presolved once for the
rows known, for the plan with the least peak (`least`) as well. The points are plans judged exactly; between neighbours
layers part ways (`relink`), which fills the gaps that plans with equal layers alike leave: one ascent per budget at
most, no branch and bound and no ILP but for the memory-free optimum.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.cost_models.memory.row import RowSource
from autopar.ir.problem import Ints, Problem
from autopar.passes.memory.lagrangian import Messages, Pool, Within, ascend, settled
from autopar.passes.memory.local_search import Swapper
from autopar.passes.memory.min_memory import least_memory
from autopar.passes.memory.path_relinking import relink
from autopar.passes.memory.presolve import Core, attach, presolve
from autopar.passes.memory.search_state import Hunt
from autopar.passes.solver.optimize import optimize

TURNS = 3  # with the rows learnt so far
JUDGED = 4  # plans per budget that are judged exactly, at most
TARGET = 3e-4  # relative gap at which a budget is left
ENOUGH = 0.05  # share of the gap that prices might still close, at which it is left as well
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
    hunt = Hunt(problem, source, np.inf, TARGET, deadline)
    judged = _Judged(hunt)
    judged.add(free.assignment)
    hunt.learn(source.rows())
    core = _presolved(hunt, fold)
    seeds = [free.assignment]
    least = least_memory(problem, source, rows=hunt.rows, seeds=seeds, deadline=deadline, exact=False, core=core)
    judged.add(least.assignment)
    hunt.learn(least.rows)
    cuts = [(free.lower_bound, 0.0)]
    budgets = np.linspace(least.peak_bytes, judged.points[0].peak_bytes, points + 1)[:-1][::-1]
    for _ in range(TURNS):
        known = len(hunt.rows)
        core = core if core.loaded.rows == known else _presolved(hunt, fold)
        _sweep(hunt, core, judged, budgets.tolist(), cuts)
        if len(hunt.rows) == known or hunt.late:
            break
    _fill(hunt, judged, budgets.tolist())
    return Front(judged.nondominated(), tuple(cuts), least.lower_bytes)


def _lower(cuts: Sequence[Cut], budget: float) -> float:
    return max(start - slope * budget for start, slope in cuts)


class _Judged:
    """Distinct plans with their exact peaks."""

    def __init__(self, hunt: Hunt) -> None:
        self._hunt = hunt
        self._known: set[bytes] = set()
        self.points: list[Point] = []

    def add(self, plan: Ints) -> None:
        """Judge a plan, once; where it peaks becomes a row."""
        seconds = self._hunt.problem.value(plan)
        if plan.tobytes() in self._known or not np.isfinite(seconds):
            return
        self._known.add(plan.tobytes())
        peak, row = self._hunt.source.peak(plan)
        self._hunt.learn([row])
        self.points.append(Point(seconds, peak, plan))

    def nondominated(self) -> tuple[Point, ...]:
        """Fastest first, each with less memory than all before."""
        found: list[Point] = []
        for point in sorted(self.points, key=lambda p: (p.seconds, p.peak_bytes)):
            if not found or point.peak_bytes < found[-1].peak_bytes:
                found.append(point)
        return tuple(found)


def _presolved(hunt: Hunt, fold: bool) -> Core:
    return presolve(hunt.problem, hunt.rows, "bound" if fold else "none")


def _sweep(hunt: Hunt, core: Core, judged: _Judged, budgets: list[float], cuts: list[Cut]) -> None:
    """One ascent per budget that is not closed, from the largest: its line, and its best plans judged."""
    pool, messages, swapper = Pool(core.loaded), Messages(core.loaded, core.counts), Swapper(core.loaded)
    pool.add(plan for plan in (core.project(p.assignment) for p in judged.points) if plan is not None)
    prices = np.zeros(core.loaded.rows)
    for budget in budgets:
        aim = Within(core.loaded, budget, pool)
        wanted, value = aim.prices(pool)
        if settled(value, aim.known(pool), _lower(cuts, budget) - core.constant, TARGET, ENOUGH):
            prices = wanted
        else:
            dual = ascend(messages, pool, aim, start=prices, target=TARGET, deadline=hunt.deadline, **EFFORT)
            prices = dual.prices
            slope = float(prices.sum())
            cuts.append((core.constant + dual.lower + slope * budget, slope))
        fitting = pool.fitting(budget)[:1].tolist()
        near = np.argsort(pool.seconds + pool.held @ prices, kind="stable")[:1].tolist()
        pool.add([swapper.descend(pool.plans[i], pool.held[i], budget) for i in dict.fromkeys(fitting + near)])
        for i in pool.fitting(budget)[:JUDGED].tolist():
            judged.add(core.lift(pool.plans[i]))
            if judged.points[-1].peak_bytes <= budget:
                break


def _fill(hunt: Hunt, judged: _Judged, budgets: list[float]) -> None:
    """At each budget, layers part ways between the points on either side of it."""
    known = list(hunt.rows)
    loaded = attach(hunt.problem, known)
    points = judged.nondominated()
    for budget in budgets:
        under = [p.assignment for p in points if p.peak_bytes <= budget]
        over = [p.assignment for p in points if p.peak_bytes > budget]
        if not under or not over or hunt.late:
            continue
        held = np.array([row.value(hunt.problem, under[0]) for row in known])
        plan = relink(loaded, under[0], over[-OTHERS:], held, budget, np.zeros(loaded.rows))
        if plan is not None:
            judged.add(plan)
