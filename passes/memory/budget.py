"""The cheapest plan that fits into memory.

    free     the optimum without rows; if it fits, that is all                                 passes/solver/optimize.py
    least    where it does not, a plan that does; none may exist                             passes/memory/min_memory.py
    search   prices, pools, bounds, branch and bound, until the target is met or they stall      passes/memory/search.py
    ilp      the unfolded problem, where it is small                                                -> _by_ilp

The problem with some rows is a relaxation, so its bounds are valid for all; a plan counts once `RowSource.peak` says it
fits. Rows are learnt from plans that fail.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from autopar.cost_models.memory.row import RowSource
from autopar.errors import ArgumentError
from autopar.ir.problem import Problem
from autopar.passes.memory.min_memory import LeastMemory, least_memory
from autopar.passes.memory.presolve import Folding, presolve
from autopar.passes.memory.search import search
from autopar.passes.memory.search_state import CLOSED, Hunt
from autopar.passes.solver import backends as solvers
from autopar.passes.solver import ilp
from autopar.passes.solver.optimize import Pruned, Solution, optimize

TARGET = 1e-3
AGAIN = 4  # times that rows learnt by untied plans start everything anew
SMALL, TINY, FEW = 4_000, 200, 2  # strategies that the ILP gets: at most; of many layers; times those of the folded
FITTING = 60.0  # s that the search for a plan that fits may take, whatever the deadline
AFTER = 15.0  # s that the ILP gets for a problem after everything else
TOLERATED = 1e-6  # share of the budget that a solver's tolerance may cost
ENDS = {"optimal": "optimal", "infeasible": "optimal", "time-limit": "time-limit"}
STATUS = {True: "certified", False: "near-optimal"}


@dataclass(frozen=True, slots=True, eq=False)
class BudgetedSolution(Solution):
    """A `Solution` that fits.

    Attributes:
        peak_bytes: exact, per device.
        price: what one more byte of budget is worth, in seconds (s/byte); zero if the budget does not bind.
        points: names of the program points that were needed.
        prices: s/byte by program point, where positive; they add up to `price`.
    """

    peak_bytes: float
    price: float
    points: tuple[str, ...]
    prices: dict[str, float]


class Infeasible(Exception):
    """No plan fits. `least` is the plan with the least peak that was found, with a bound on all plans' peaks."""

    def __init__(self, least: LeastMemory) -> None:
        super().__init__(f"no plan was found within the budget; the least peak found is {least.peak_bytes} bytes")
        self.least = least


def optimize_within(
    problem: Problem,
    source: RowSource,
    budget: float,
    *,
    solver: str = "auto",
    time_limit: float = 60.0,
    gap: float = TARGET,
    fold: bool = True,
    presolve: bool = True,
    free: Solution | None = None,
    cutoff: float = np.inf,
    patience: float = FITTING,
) -> BudgetedSolution:
    """The cheapest plan whose peak is at most `budget` (bytes per device), to a relative gap of `gap`.

    `free` is the solution without a budget, where it is known. Where `cutoff` (s) is given, plans that take as long are
    of no interest, and the search ends once there can be no others. The search for a plan that fits may take
    `patience` (s), whatever the time limit. The gap is certified against the unfolded problem with all rows. "cbc" and
    "highs" force the ILP, with rows added as they are needed.

    Raises:
        Infeasible: no plan fits, or none was found.
        Pruned: none below `cutoff` fits, or was found.
        SolverError: no plan exists whatever its memory.
        ArgumentError: an unknown solver, or a time limit that is not above zero, or a budget that is no number.
    """
    if np.isnan(budget):
        raise ArgumentError(f"budget={budget!r} must be a number of bytes")
    begin = time.monotonic()
    if free is None:
        free = optimize(problem, solver=solver, time_limit=time_limit, fold=fold, presolve=presolve)
    hunt = Hunt(problem, source, budget, gap, begin + time_limit, lower=free.lower_bound, patience=patience)
    hunt.seen.append(free.assignment)
    if hunt.offer(free.assignment):
        return _solution(free, hunt, free.status, free.solver_used, 0, begin)
    hunt.learn(source.rows())
    if np.isfinite(cutoff):
        return _under_cutoff(hunt, free, cutoff, begin, "tie" if fold else "none", full=presolve)
    if solver != "auto":
        return _forced(hunt, free, solver, begin, "tie" if fold else "none", full=presolve)
    return _auto(hunt, free, begin, "tie" if fold else "none", full=presolve)


def _auto(hunt: Hunt, free: Solution, begin: float, how: Folding, *, full: bool) -> BudgetedSolution:
    least = _least(hunt, free)
    hunt.learn(least.rows)
    if least.peak_bytes > hunt.budget:
        raise Infeasible(least)
    hunt.offer(least.assignment)
    hunt.seen.append(least.assignment)
    few = free.variables_unfolded <= FEW * free.variables
    for _ in range(AGAIN):
        known = len(hunt.rows)
        search(hunt, how, few, full=full)
        if hunt.done or len(hunt.rows) == known:
            break
    status, used, rows = "", "dual ascent", 0
    if hunt.gap > hunt.target and not hunt.late and _small(free):
        status, used, rows = _by_ilp(hunt, solvers.quickest(), "none", full=full, longest=AFTER)
    if not status or hunt.gap <= CLOSED:
        status = _status(hunt)
    return _solution(free, hunt, status, used, rows, begin)


def _under_cutoff(
    hunt: Hunt, free: Solution, cutoff: float, begin: float, how: Folding, *, full: bool
) -> BudgetedSolution:
    """The best plan that fits and takes less than `cutoff` (s); Pruned where none is found or there can be none.

    By prices alone at first: where all that fits takes longer, that is mostly enough to see it.
    """
    hunt.seconds = cutoff
    few = free.variables_unfolded <= FEW * free.variables
    if not hunt.done:
        search(hunt, how, few, full=full)
    if hunt.plan is None and not hunt.done:
        least = _least(hunt, free)
        hunt.learn(least.rows)
        hunt.offer(least.assignment)
        hunt.seen.append(least.assignment)
        search(hunt, how, few, full=full)
    if hunt.plan is None:
        raise Pruned(hunt.lower)
    return _solution(free, hunt, _status(hunt), "dual ascent", 0, begin)


def _least(hunt: Hunt, free: Solution) -> LeastMemory:
    """A plan that fits, or the one with the least peak.

    The way there is the same for every budget, up to where it ends: so the least peak that is named is a budget that
    plans. It may take longer than the deadline, for where it ended early a plan that fits would be refused.
    """
    seeds, deadline = [free.assignment], max(hunt.deadline, time.monotonic() + hunt.patience)
    return least_memory(hunt.problem, hunt.source, seeds=seeds, deadline=deadline, asked=hunt.budget)


def _small(free: Solution) -> bool:
    """Whether the unfolded problem is one for the ILP: few variables, and few layers, which it would permute."""
    return free.variables_unfolded <= min(SMALL, max(TINY, FEW * free.variables))


def _status(hunt: Hunt) -> str:
    if hunt.gap <= hunt.target:
        return STATUS[hunt.gap == 0.0]
    return "time-limit" if hunt.late else "open"


def _forced(hunt: Hunt, free: Solution, solver: str, begin: float, how: Folding, *, full: bool) -> BudgetedSolution:
    """The ILP and nothing else."""
    status, used, rows = _by_ilp(hunt, solver, how, full=full)
    if hunt.plan is None:
        least = _least(hunt, free)
        if not hunt.offer(least.assignment):
            raise Infeasible(least)
    return _solution(free, hunt, status, used, rows, begin)


def _by_ilp(hunt: Hunt, solver: str, how: Folding, *, full: bool, longest: float = np.inf) -> tuple[str, str, int]:
    """The ILP with the rows known, until its plan truly fits: status, solver, and rows of the ILP.

    What a solver takes for fitting may be over the budget by its tolerance; then it gets less. The bound is only taken
    where no plans are tied.
    """
    margin = 0.0
    while True:
        core = presolve(hunt.problem, hunt.rows, how, full=full)
        loaded = core.loaded
        memory = ilp.Memory(hunt.budget - margin, loaded.constants, loaded.nodes, loaded.edges)
        upper = hunt.seconds - core.constant
        answer = ilp.solve(
            loaded.problem,
            solver,
            time_limit=min(max(hunt.left, 0.1), longest),
            upper=upper,
            cutoff=True,
            memory=memory,
        )
        if not core.alike and not margin:
            none_better = answer.status == "infeasible"
            hunt.bound(hunt.seconds if none_better else min(hunt.seconds, answer.lower + core.constant))
        if answer.assignment is None:
            return ENDS.get(answer.status, "fallback"), solver, answer.rows
        known = len(hunt.rows)
        plan = core.lift(answer.assignment)
        if hunt.offer(plan):
            status = ENDS.get(answer.status, "fallback")
            tied = status == "optimal" and hunt.gap > CLOSED
            return "optimal-tied" if tied else status, solver, answer.rows
        if len(hunt.rows) == known:
            over = max(row.value(hunt.problem, plan) for row in hunt.rows) - hunt.budget
            if over <= 0 or margin > TOLERATED * hunt.budget:
                return "fallback", solver, answer.rows
            margin += 2 * over


def _solution(free: Solution, hunt: Hunt, status: str, used: str, rows: int, begin: float) -> BudgetedSolution:
    assert hunt.plan is not None
    lower = min(hunt.lower, hunt.seconds)
    return BudgetedSolution(
        assignment=hunt.plan,
        objective=hunt.seconds,
        lower_bound=lower,
        gap=hunt.gap,
        status=status,
        solver_used=used,
        warnings=free.warnings if not hunt.prices and hunt.gap > hunt.target else (),
        phases={**free.phases, "memory": max(0.0, time.monotonic() - begin - sum(free.phases.values()))},
        variables=free.variables,
        variables_unfolded=free.variables_unfolded,
        rows=rows,
        peak_bytes=hunt.peak,
        price=sum(hunt.prices.values()),
        points=tuple(row.name for row in hunt.rows),
        prices=hunt.prices,
    )
