"""The cheapest plan that fits into memory.

    free     the optimum without rows; if it fits, the search ends                             passes/solver/optimize.py
    least    otherwise a plan that fits, if there is one                                     passes/memory/min_memory.py
    search   multipliers, pools, bounds, branch and bound, until the gap is below the target     passes/memory/search.py
    ilp      the problem without symmetry reduction, where it is small                              -> _by_ilp

A problem with some of the rows is a relaxation, so its bounds are valid for the problem with all rows. A plan is
accepted only if it fits by `RowSource.peak`, which evaluates all rows. Plans that do not fit add the rows they violate.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from autopar.cost_models.memory.row import RowSource
from autopar.errors import ArgumentError
from autopar.ir.problem import Problem
from autopar.passes.memory.min_memory import LeastMemory, least_memory
from autopar.passes.memory.presolve import SymmetryReduction, presolve
from autopar.passes.memory.search import search
from autopar.passes.memory.search_state import CLOSED, SearchState
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
        multipliers: s/byte by program point, where positive; they add up to `price`.
    """

    peak_bytes: float
    price: float
    points: tuple[str, ...]
    multipliers: dict[str, float]


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
    state = SearchState(problem, source, budget, gap, begin + time_limit, lower=free.lower_bound, patience=patience)
    state.start_plans.append(free.assignment)
    if state.submit(free.assignment):
        return _solution(free, state, free.status, free.solver_used, 0, begin)
    state.add_rows(source.rows())
    if np.isfinite(cutoff):
        return _under_cutoff(state, free, cutoff, begin, "tie" if fold else "none", full=presolve)
    if solver != "auto":
        return _forced(state, free, solver, begin, "tie" if fold else "none", full=presolve)
    return _auto(state, free, begin, "tie" if fold else "none", full=presolve)


def _auto(state: SearchState, free: Solution, begin: float, how: SymmetryReduction, *, full: bool) -> BudgetedSolution:
    least = _least(state, free)
    state.add_rows(least.rows)
    if least.peak_bytes > state.budget:
        raise Infeasible(least)
    state.submit(least.assignment)
    state.start_plans.append(least.assignment)
    few = free.variables_unfolded <= FEW * free.variables
    for _ in range(AGAIN):
        known = len(state.rows)
        search(state, how, few, full=full)
        if state.done or len(state.rows) == known:
            break
    status, used, rows = "", "dual ascent", 0
    if state.gap > state.target and not state.late and _small(free):
        status, used, rows = _by_ilp(state, solvers.quickest(), "none", full=full, longest=AFTER)
    if not status or state.gap <= CLOSED:
        status = _status(state)
    return _solution(free, state, status, used, rows, begin)


def _under_cutoff(
    state: SearchState, free: Solution, cutoff: float, begin: float, how: SymmetryReduction, *, full: bool
) -> BudgetedSolution:
    """The best plan that fits and takes less than `cutoff` (s); Pruned where none is found or there can be none.

    By multipliers alone at first: where all that fits takes longer, that is mostly enough to see it.
    """
    state.seconds = cutoff
    few = free.variables_unfolded <= FEW * free.variables
    if not state.done:
        search(state, how, few, full=full)
    if state.plan is None and not state.done:
        least = _least(state, free)
        state.add_rows(least.rows)
        state.submit(least.assignment)
        state.start_plans.append(least.assignment)
        search(state, how, few, full=full)
    if state.plan is None:
        raise Pruned(state.lower)
    return _solution(free, state, _status(state), "dual ascent", 0, begin)


def _least(state: SearchState, free: Solution) -> LeastMemory:
    """A plan that fits, or the one with the least peak.

    The way there is the same for every budget, up to where it ends: so the least peak that is named is a budget that
    plans. It may take longer than the deadline, for where it ended early a plan that fits would be refused.
    """
    seeds, deadline = [free.assignment], max(state.deadline, time.monotonic() + state.patience)
    return least_memory(state.problem, state.source, seeds=seeds, deadline=deadline, asked=state.budget)


def _small(free: Solution) -> bool:
    """Whether the unfolded problem is one for the ILP: few variables, and few layers, which it would permute."""
    return free.variables_unfolded <= min(SMALL, max(TINY, FEW * free.variables))


def _status(state: SearchState) -> str:
    if state.gap <= state.target:
        return STATUS[state.gap == 0.0]
    return "time-limit" if state.late else "open"


def _forced(
    state: SearchState, free: Solution, solver: str, begin: float, how: SymmetryReduction, *, full: bool
) -> BudgetedSolution:
    """The ILP and nothing else."""
    status, used, rows = _by_ilp(state, solver, how, full=full)
    if state.plan is None:
        least = _least(state, free)
        if not state.submit(least.assignment):
            raise Infeasible(least)
    return _solution(free, state, status, used, rows, begin)


def _by_ilp(
    state: SearchState, solver: str, how: SymmetryReduction, *, full: bool, longest: float = np.inf
) -> tuple[str, str, int]:
    """The ILP with the rows known, until its plan truly fits: status, solver, and rows of the ILP.

    What a solver takes for fitting may be over the budget by its tolerance; then it gets less. The bound is only taken
    where no plans are symmetric.
    """
    margin = 0.0
    while True:
        presolved = presolve(state.problem, state.rows, how, full=full)
        constrained = presolved.constrained
        memory = ilp.Memory(state.budget - margin, constrained.constants, constrained.nodes, constrained.edges)
        upper = state.seconds - presolved.constant
        answer = ilp.solve(
            constrained.problem,
            solver,
            time_limit=min(max(state.left, 0.1), longest),
            upper=upper,
            cutoff=True,
            memory=memory,
        )
        if not presolved.alike and not margin:
            none_better = answer.status == "infeasible"
            state.bound(state.seconds if none_better else min(state.seconds, answer.lower + presolved.constant))
        if answer.assignment is None:
            return ENDS.get(answer.status, "fallback"), solver, answer.rows
        known = len(state.rows)
        plan = presolved.lift(answer.assignment)
        if state.submit(plan):
            status = ENDS.get(answer.status, "fallback")
            symmetric = status == "optimal" and state.gap > CLOSED
            return "optimal-tied" if symmetric else status, solver, answer.rows
        if len(state.rows) == known:
            over = max(row.value(state.problem, plan) for row in state.rows) - state.budget
            if over <= 0 or margin > TOLERATED * state.budget:
                return "fallback", solver, answer.rows
            margin += 2 * over


def _solution(free: Solution, state: SearchState, status: str, used: str, rows: int, begin: float) -> BudgetedSolution:
    assert state.plan is not None
    lower = min(state.lower, state.seconds)
    return BudgetedSolution(
        assignment=state.plan,
        objective=state.seconds,
        lower_bound=lower,
        gap=state.gap,
        status=status,
        solver_used=used,
        warnings=free.warnings if not state.multipliers and state.gap > state.target else (),
        phases={**free.phases, "memory": max(0.0, time.monotonic() - begin - sum(free.phases.values()))},
        variables=free.variables,
        variables_unfolded=free.variables_unfolded,
        rows=rows,
        peak_bytes=state.peak,
        price=sum(state.multipliers.values()),
        points=tuple(row.name for row in state.rows),
        multipliers=state.multipliers,
    )
