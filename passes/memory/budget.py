"""The cheapest plan within a memory budget.

    minimise  seconds(x)     subject to  bytes_r(x) <= budget  at every program point r         -> optimize_within

    free     the optimum without memory rows; if it fits, the search ends             -> solver.optimize.optimize
    search   dual ascent, local search and path relinking                             -> search.search
    least    where that finds no plan that fits, the plan with the least peak, from which the search begins again
                                                                                      -> _least, min_memory.least_memory
    ilp      the ILP without symmetry reduction, if the problem is small and the gap above the target
                                                                                      -> _small, _closed_by_ilp

A problem with some of the rows is a relaxation, so its bounds are valid for the problem with all rows. A plan is
accepted only if it fits by `RowSource.peak`, which evaluates all rows. A plan that does not fit adds the rows that it
violates.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost_models.memory.row import RowSource, smallest
from autopar.errors import ArgumentError
from autopar.ir.problem import Ints, Problem
from autopar.passes.memory.min_memory import LeastMemory, least_memory
from autopar.passes.memory.presolve import SymmetryReduction, presolve
from autopar.passes.memory.search import search
from autopar.passes.memory.search_state import NONE_ACCEPTED, Acceptance, SearchState
from autopar.passes.solver import backends as solvers
from autopar.passes.solver import ilp
from autopar.passes.solver.optimize import Pruned, Solution, optimize
from autopar.passes.solver.reduced_problem import CLOSED


@dataclass(frozen=True, slots=True)
class BudgetEffort:
    """How far a plan within a memory budget is sought."""

    # most strategies, without symmetry reduction, of a problem that the ILP solves (settled on the zoo)
    small: int = 4_000
    # strategies up to which the ILP solves a problem even with many equal layers (settled on the zoo)
    tiny: int = 200
    # a program has few equal layers if its strategies are at most so many times those of its quotient (not recorded;
    # `bench sensitivity`, 2026-11: no effect on small programs)
    few: int = 2
    # most relaxations of a round where the search may end without a plan (20 take four times as long on GPT-2.6B in
    # four stages, whose plans they improve by less than recomputation costs)
    relaxations: int = 3
    # most time (s) for the ILP after all other steps (not measured)
    after: float = 15.0
    # time (s) for the search from the plan with the least peak, also after the deadline (that plan is slow, 2.2 times
    # the best on an 8B transformer on 32 devices of TPU v5e, where the search takes 1 to 4 s; 2026-11)
    from_least: float = 5.0


BUDGET = BudgetEffort()

#: Most that the solver's tolerance may take from the budget, as a share of it: far below the error of a peak.
TOLERATED = 1e-6

#: Default relative gap at which the search ends.
TARGET = 1e-3

#: Default time (s) in which the search for a plan that fits may ignore the deadline: a budget that some plan fits must
#: not be rejected because time was short.
FITTING = 60.0

# Status of the ILP -> status of the solution. The ILP looks for a plan below the incumbent: where it is infeasible, the
# incumbent is optimal.
ENDS = {"optimal": "optimal", "infeasible": "optimal", "time-limit": "time-limit"}
STATUS = {True: "certified", False: "near-optimal"}  # whether the gap is zero -> status


@dataclass(frozen=True, slots=True, eq=False)
class BudgetedSolution(Solution):
    """A `Solution` whose peak is within the budget.

    Attributes:
        peak_bytes: exact peak (bytes per device).
        price: shadow price of the budget (s/byte): the time per step that one more byte saves, to first order; zero
            if the budget does not bind.
        points: names of the program points whose rows were added.
        multipliers: name of a program point -> Lagrange multiplier (s/byte), positive ones only; their sum is `price`.
    """

    peak_bytes: float
    price: float
    points: tuple[str, ...]
    multipliers: dict[str, float]


class Infeasible(Exception):
    """No plan fits, or none was found.

    Attributes:
        least: the plan with the least peak that was found, and a lower bound on the peak of every plan.
    """

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
    least: bool = True,
    refutes: bool = False,
    patience: float = FITTING,
    ceiling: float = np.inf,
    seeds: Sequence[Ints] = (),
    accepted: Acceptance = NONE_ACCEPTED,
    effort: BudgetEffort = BUDGET,
) -> BudgetedSolution:
    """The cheapest plan whose peak is at most `budget`, to a relative gap of `gap`.

    The gap is certified against the problem without symmetry reduction and with all rows.

    Args:
        problem, source: the problem without symmetry reduction, and its memory rows.
        budget: limit on the peak (bytes per device).
        solver: "auto", or "cbc" or "highs" to solve by ILP alone, with rows added as solutions violate them.
        time_limit: s.
        gap: relative gap at which the search ends.
        fold: share decisions among equal layers.
        presolve: eliminate dominated strategies; otherwise only infeasible ones are removed.
        free: the solution without a budget, if it is known already.
        cutoff: s; plans that take as long are rejected, and the search ends once none below it can exist.
        least: whether the search below `cutoff` goes on after a short one, if need be with the least peak.
        refutes: a proof that no plan fits ends the search; otherwise the least peak is sought for `Infeasible`.
        patience: s; while no plan that fits is known, the search may take so long, whatever the time limit.
        ceiling: s; with solver "auto", plans are sought first among those that take less.
        seeds: plans that may fit.
        accepted: plans that end the search although their gap is above `gap`.
        effort: how far a plan within the budget is sought.

    Raises:
        Infeasible: no plan fits, or none was found.
        Pruned: no plan below `cutoff` fits, or none was found.
        SolverError: no plan exists, whatever its memory.
        ArgumentError: the solver is unknown, the time limit is not above zero, or the budget is nan.
    """
    if np.isnan(budget):
        raise ArgumentError(f"budget={budget!r} must be a number of bytes")
    # The solution without a budget comes first: it may fit, and its cost bounds that of every plan from below.
    begin = time.monotonic()
    if free is None:
        free = optimize(problem, solver=solver, time_limit=time_limit, fold=fold, presolve=presolve)
    lower, ends = free.lower_bound, (begin + time_limit, begin + patience)
    state = SearchState(problem, source, budget, gap, *ends, lower=lower, accepted=accepted, fold=fold, full=presolve)
    state.start_plans.append(free.assignment)
    if state.submit(free.assignment):
        return _solution(free, state, free.status, free.solver_used, 0, begin)
    state.start_plans.extend(seed for seed in seeds if state.submit(seed))
    if state.is_accepted:
        return _found(state, free, begin)
    state.add_rows(source.rows())
    if solver != "auto" and not np.isfinite(cutoff):
        return _forced(state, free, solver, begin)
    _search_twice(state, free, cutoff, ceiling, least, refutes, effort)
    # The ILP knows no cutoff: a search that others may still beat is not worth its time.
    exact = not np.isfinite(cutoff) and _small(free, effort)
    return _closed_by_ilp(state, free, begin, effort) if exact else _found(state, free, begin)


def _search_twice(
    state: SearchState,
    free: Solution,
    cutoff: float,
    ceiling: float,
    least: bool,
    refutes: bool,
    effort: BudgetEffort,
) -> None:
    """Search for a plan below `cutoff` (s), and again from the plan with the least peak if the first search has none.

    Raises Infeasible and Pruned as `optimize_within`, whose arguments these are.
    """
    if not least:
        state.effort = replace(state.effort, relaxations=effort.relaxations)
    if state.seconds >= cutoff:
        state.forget_plan()
    if state.plan is None:
        _search_below(state, min(cutoff, ceiling))
    else:
        search(state)
    if np.isfinite(cutoff) and state.plan is None and (not least or state.late or _is_hopeless(state)):
        raise Pruned(state.lower)
    # A bound at the cutoff proves that no plan below it fits, and the least peak need not be known.
    if state.plan is None and state.lower < cutoff:
        smallest_plan = _least(state, free, refutes)
        state.add_rows(smallest_plan.rows)
        if smallest_plan.peak_bytes > state.budget and not np.isfinite(cutoff):
            raise Infeasible(smallest_plan)
        state.submit(smallest_plan.assignment)
        state.start_plans.append(smallest_plan.assignment)
        if not np.isfinite(cutoff):
            state.deadline = max(state.deadline, min(state.first_deadline, time.monotonic() + effort.from_least))
        search(state)
    if state.seconds >= cutoff:
        raise Pruned(state.lower)


def _search_below(state: SearchState, limit: float) -> None:
    """Search without a plan that fits, for plans below `limit` (s), which may be inf.

    The search for the least peak is saved if it finds one, and mostly if every plan that fits takes longer, which the
    dual bound proves.
    """
    if not _is_hopeless(state):
        state.seconds = limit  # an incumbent without a plan
        search(state)
        if state.plan is None:
            state.forget_plan()


def _found(state: SearchState, free: Solution, begin: float) -> BudgetedSolution:
    return _solution(free, state, _status(state), "dual ascent", 0, begin)


def _closed_by_ilp(state: SearchState, free: Solution, begin: float, effort: BudgetEffort) -> BudgetedSolution:
    """The solution of the search, or that of the ILP where the gap is still above the target."""
    if state.done:
        return _found(state, free, begin)
    status, used, rows = _by_ilp(state, solvers.quickest(), "none", longest=effort.after)
    return _solution(free, state, _status(state) if state.gap <= CLOSED else status, used, rows, begin)


def _least(state: SearchState, free: Solution, refutes: bool = False) -> LeastMemory:
    """A plan that fits if one is found, else the plan with the least peak that is found.

    Budgets differ in where this search ends but not in its steps, so a peak that `Infeasible` reports is a budget
    that can be planned.
    """
    seeds = [free.assignment]
    until, budget = state.until, state.budget
    return least_memory(state.problem, state.source, seeds=seeds, deadline=until, asked=budget, refutes=refutes)


def _is_hopeless(state: SearchState) -> bool:
    """Whether a row exceeds the budget in every plan."""
    return any(smallest(row) > state.budget for row in state.rows)


def _small(free: Solution, effort: BudgetEffort) -> bool:
    """Whether the ILP solves the problem without symmetry reduction: few strategies, and few layers to permute."""
    return free.variables_unfolded <= min(effort.small, max(effort.tiny, effort.few * free.variables))


def _status(state: SearchState) -> str:
    """The status that the gap and the deadline imply."""
    if state.gap <= state.target:
        return STATUS[state.gap == 0.0]
    if state.is_accepted:
        return "accepted"
    return "time-limit" if state.late else "open"


def _forced(state: SearchState, free: Solution, solver: str, begin: float) -> BudgetedSolution:
    """The solution of the ILP alone. Raises Infeasible."""
    status, used, rows = _by_ilp(state, solver, "tie" if state.fold else "none")
    if state.plan is None:
        least = _least(state, free)
        if not state.submit(least.assignment):
            raise Infeasible(least)
    return _solution(free, state, status, used, rows, begin)


def _by_ilp(
    state: SearchState, solver: str, how: SymmetryReduction, *, longest: float = np.inf
) -> tuple[str, str, int]:
    """Solve the ILP with the rows added so far, again until its plan fits on all rows.

    A plan within the solver's tolerance may exceed the budget. The budget of the ILP is then lowered by a margin. The
    bound is recorded only without a margin and without symmetry reduction: otherwise it does not hold for all plans.

    Args:
        solver: "cbc" or "highs".
        how: the symmetry reduction, "tie" or "none".
        longest: most time (s) of one solve.

    Returns:
        Status, name of the solver, and number of rows of the last ILP.
    """
    margin = 0.0
    while True:
        presolved = presolve(state.problem, state.rows, how, full=state.full)
        constrained = presolved.constrained
        memory = ilp.Memory(state.budget - margin, constrained.constants, constrained.nodes, constrained.edges)
        upper = state.seconds - presolved.constant
        answer = ilp.solve(
            constrained.problem,
            solver,
            # a solver that is given no time at all may end without a bound
            time_limit=min(max(state.left, 0.1), longest),
            upper=upper,
            cutoff=True,
            memory=memory,
        )
        if not presolved.symmetric and not margin:
            # `cutoff` makes the ILP infeasible where no plan is better than the incumbent
            none_better = answer.status == "infeasible"
            state.bound(state.seconds if none_better else min(state.seconds, answer.lower + presolved.constant))
        if answer.assignment is None:
            proven = answer.status != "infeasible" or state.plan is not None
            return ENDS.get(answer.status, "fallback") if proven else "fallback", solver, answer.rows
        rows_before = len(state.rows)
        plan = presolved.lift(answer.assignment)
        if state.submit(plan):
            status = ENDS.get(answer.status, "fallback")
            is_tied = status == "optimal" and state.gap > CLOSED
            return "optimal-tied" if is_tied else status, solver, answer.rows
        if len(state.rows) == rows_before:  # the plan exceeds a row of the ILP, by the solver's tolerance
            over = max(row.value(state.problem, plan) for row in state.rows) - state.budget
            if over <= 0 or margin > TOLERATED * state.budget:
                return "fallback", solver, answer.rows
            margin += 2 * over  # twice the excess, so that the next plan does not exceed the budget by rounding again


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
