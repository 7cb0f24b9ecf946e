"""The exact optimizer: reduce the problem and bound its optimum, and solve an ILP only if a gap is left.

    fold        equal layers share one decision                                     -> symmetry.fold
    presolve    dead-end elimination; nodes of degree <= 2 are contracted           -> reduced_problem.presolve
    bound       lower bound and plans by dual ascent                                -> dual_ascent.ascend
    eliminate   plans and proofs by dynamic programming with bounds                 -> elimination.search
    fix         strategies whose bound exceeds the best plan are removed; then
                presolve, bound and eliminate again                                 -> reduced_problem.narrow
    ilp         the rest is an integer linear program                               -> ilp.solve

The meaning of `Solution.status`, from the strongest proof to the weakest:

    certified       the lower bound of dual ascent or elimination, valid for the unfolded problem, is the plan's cost
    optimal         the ILP proved the optimum of the unfolded problem
    optimal-tied    the optimum among plans with equal strategies for equal layers; `gap` is relative to all plans
    near-optimal    the gap is at most the gap asked for; or it is at most `NEAR`, and the problem has more than `LARGE`
                    strategies, too many for an ILP to close the gap in reasonable time
    open            a gap is left, and the problem has more strategies than `largest` allows for an ILP
    cutoff          no plan costs less than the cutoff
    time-limit      the best plan within the time limit, with its gap
    fallback        the ILP solver failed, and `warnings` says how; the best plan without it, with its gap
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from autopar.errors import ArgumentError, SolverError
from autopar.ir.problem import Ints, Problem, check
from autopar.passes.solver import backends as solvers
from autopar.passes.solver import ilp
from autopar.passes.solver import symmetry as folding
from autopar.passes.solver.dual_ascent import Ascent
from autopar.passes.solver.reduced_problem import CLOSED, FIRST_ROUNDS, SLACK, Clock, Core, Outcome, fixed, narrow
from autopar.passes.solver.reduced_problem import presolve as presolved
from autopar.passes.solver.symmetry import Folded

SOLVERS = ("auto", "cbc", "highs")
FEW = 2  # a program has few equal layers if its strategies are at most so many times those of its quotient
NEAR = 1e-3  # relative gap at which a problem with more than LARGE strategies is not given to the ILP
LARGE = 4_000  # strategies; settled on the zoo
UNFOLDED_CORE = 4_000  # most strategies left, unfolded, to solve the unfolded problem after a tied optimum; likewise
LATE = "the time limit was reached before the exact phase; the plan is the best of the dual ascent"


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """The result of the optimizer.

    Attributes:
        assignment: strategy per node of the given problem, shape (nodes,).
        objective: cost of the plan (s per step).
        lower_bound: lower bound on the cost of every plan (s per step).
        gap: (objective - lower_bound) / objective, 0 if closed.
        status: see the module docstring.
        solver_used: "dual ascent", or the ILP solver.
        warnings: what kept the optimizer from a proof.
        phases: phase of `reduced_problem.PHASES` -> seconds.
        variables: number of strategies after folding.
        variables_unfolded: number of strategies before folding.
        rows: number of rows of the ILP, 0 if none was solved.
    """

    assignment: Ints
    objective: float
    lower_bound: float
    gap: float
    status: str
    solver_used: str
    warnings: tuple[str, ...]
    phases: dict[str, float]
    variables: int
    variables_unfolded: int
    rows: int


class Pruned(Exception):
    """No plan costs less than the cutoff, or none was found.

    Attributes:
        lower_bound: lower bound on the cost of every plan (s).
        phases: phase -> seconds.
    """

    def __init__(self, lower_bound: float, phases: Mapping[str, float] = MappingProxyType({})) -> None:
        super().__init__(f"no plan is known that costs less than the cutoff; the bound is {lower_bound} s")
        self.lower_bound = lower_bound
        self.phases = phases


@dataclass(frozen=True, slots=True, eq=False)
class Bounded:
    """The state of a problem before the ILP.

    Attributes:
        problem: the unfolded problem.
        folded: its quotient.
        presolved: the quotient after the first presolve, before strategies were fixed by bounds.
        core: the reduced problem.
        ascent: the last dual ascent on `core`.
        outcome: the best plan of the quotient, and the bound.
        phases: phase -> seconds.
        solution: the solution without an ILP, "open" if an ILP may improve plan or bound; None without a plan.
    """

    problem: Problem
    folded: Folded
    presolved: Core
    core: Core
    ascent: Ascent
    outcome: Outcome
    phases: Mapping[str, float]
    solution: Solution | None


def optimize(
    problem: Problem,
    *,
    solver: str = "auto",
    time_limit: float = 60.0,
    fold: bool = True,
    presolve: bool = True,
    gap: float = 0.0,
    largest: float = np.inf,
    rounds: int = FIRST_ROUNDS,
    until: float = 0.0,
    cutoff: float = np.inf,
) -> Solution:
    """The cheapest plan.

    Args:
        problem: the unfolded problem.
        solver: "auto" solves an ILP only if bounds and elimination leave a gap; "cbc" and "highs" always solve one.
        time_limit: s.
        fold: share decisions among equal layers.
        presolve: eliminate dominated strategies and contract nodes; otherwise only infeasible strategies are removed.
        gap: relative gap at which "auto" ends with status "near-optimal".
        largest: most strategies left for which "auto" solves an ILP; above it the status is "open".
        rounds: sweeps of dead-end elimination at the start; 0 saves them where bounds soon suffice without.
        until: relative gap at which a dual ascent ends.
        cutoff: s; the search ends with status "cutoff" once it is proven that no plan costs less.

    Raises:
        SolverError: no plan is feasible; the message names nodes.
        ArgumentError: the solver is unknown, or the time limit is not above zero.
    """
    begin = time.monotonic()
    bounded = bound(
        problem,
        solver=solver,
        time_limit=time_limit,
        fold=fold,
        presolve=presolve,
        gap=gap,
        rounds=rounds,
        until=until,
        cutoff=cutoff,
    )
    solution = bounded.solution
    left = solver == "auto" and bounded.core.problem.variables > largest
    if solution is not None and (solution.status == "cutoff" or left):
        return solution
    return finish(bounded, solver=solver, time_limit=time_limit - (time.monotonic() - begin), gap=gap)


def bound(
    problem: Problem,
    *,
    solver: str = "auto",
    time_limit: float = 60.0,
    fold: bool = True,
    presolve: bool = True,
    gap: float = 0.0,
    rounds: int = FIRST_ROUNDS,
    until: float = 0.0,
    cutoff: float = np.inf,
    once: bool = False,
) -> Bounded:
    """All phases of `optimize` before the ILP.

    Arguments and errors are those of `optimize`. With `once`, there is one dual ascent and one elimination, and
    strategies are not fixed by bounds.
    """
    if solver not in SOLVERS:
        raise ArgumentError(f"solver={solver!r} is not known. Available: {', '.join(map(repr, SOLVERS))}")
    if not time_limit > 0:
        raise ArgumentError(f"time_limit={time_limit!r} must be a number of seconds above zero")
    clock = Clock(time.monotonic() + time_limit)
    with clock.phase("fold"):
        check(problem, thorough=False)
        folded = folding.fold(problem) if fold else folding.identity(problem)
    core = presolved(folded, clock, rounds, raw=not presolve)
    nothing = Outcome(None, np.inf, -np.inf)
    small, ascent, outcome = narrow(folded.problem, core, nothing, clock, gap, until, cutoff, once=once)
    status = "cutoff" if outcome.reaches(cutoff) else _proven(outcome, gap) or "open"
    outcome = replace(outcome, status=status)
    solution = None if outcome.plan is None else _solution(problem, folded, _lifted(folded, outcome), clock)
    return Bounded(problem, folded, core, small, ascent, outcome, clock.phases, solution)


def finish(
    known: Bounded,
    *,
    solver: str = "auto",
    time_limit: float = 60.0,
    gap: float = 0.0,
) -> Solution:
    """The solution of a bounded problem, by ILP if it is "open" or a solver is named. Arguments as in `optimize`."""
    if solver == "auto" and known.solution is not None and known.solution.status != "open":
        return known.solution
    problem, folded, outcome = known.problem, known.folded, known.outcome
    clock = Clock(time.monotonic() + time_limit, dict(known.phases))
    if solver != "auto":  # before fixing and without a cutoff, which makes the ILP a check of the bounds
        outcome = _by_ilp(folded, known.presolved, solver, outcome, clock, cutoff=False)
    elif not folded.tied:
        outcome = _search(folded, known.core, outcome, clock, gap)
    else:
        outcome = _untie(problem, folded, known.core, known.ascent, outcome, clock, gap)
        return _solution(problem, folded, outcome, clock)
    return _solution(problem, folded, _lifted(folded, outcome), clock)


def _proven(outcome: Outcome, gap: float) -> str:
    """The status that the bounds prove, empty if the gap is above `gap`."""
    return "certified" if outcome.closed else "near-optimal" if outcome.within(gap) else ""


def _untie(
    problem: Problem, folded: Folded, core: Core, ascent: Ascent, outcome: Outcome, clock: Clock, gap: float
) -> Outcome:
    """Solve the folded problem to its optimum, then the unfolded problem, if bounds leave a gap in the folded problem.

    The optimum of the folded problem, in which equal layers are tied to equal strategies, need not be that of the
    unfolded problem, but is a good start for it. A program with few equal layers is solved unfolded at once. One with
    many is solved unfolded only if few strategies are left.
    """
    if problem.variables <= FEW * folded.problem.variables:
        return _unfolded(problem, _lifted(folded, outcome), clock, gap)
    tied = _tied(folded, core, ascent, outcome, clock, gap)
    core, _, found = narrow(folded.problem, core, tied, clock, gap)
    known = _lifted(folded, found)
    if status := _proven(found, gap):
        return replace(known, status=status, warnings=())
    left = sum(int(n) * len(node.cost) for n, node in zip(core.counts, core.problem.nodes, strict=True))
    if left > UNFOLDED_CORE or clock.left <= 0:
        return known
    final = _unfolded(problem, replace(known, warnings=()), clock, gap)
    return final if final.closed else replace(known, plan=final.plan, value=final.value, lower=final.lower)


def _unfolded(problem: Problem, known: Outcome, clock: Clock, gap: float) -> Outcome:
    """Solve the unfolded problem, from a known plan."""
    whole = folding.identity(problem)
    small, _, found = narrow(whole.problem, presolved(whole, clock), known, clock, gap)
    if status := _proven(found, gap):
        return replace(found, status=status)
    return _search(whole, small, found, clock, gap)


def _tied(folded: Folded, core: Core, ascent: Ascent, outcome: Outcome, clock: Clock, gap: float) -> Outcome:
    """The optimum of the folded problem. The lower bound stays that of the unfolded problem."""
    # with class sizes of one, bounds need hold only for plans with equal strategies for equal layers
    start = fixed(replace(core, counts=np.ones_like(core.counts)), ascent, outcome, clock)
    small, _, inner = narrow(folded.problem, start, outcome, clock)
    inner = replace(inner, status="optimal-tied") if inner.closed else _search(folded, small, inner, clock, gap)
    return replace(inner, lower=outcome.lower)


def _lifted(folded: Folded, outcome: Outcome) -> Outcome:
    """The outcome with its plan lifted to the unfolded problem."""
    return replace(outcome, plan=None if outcome.plan is None else folded.lift(outcome.plan))


def _search(folded: Folded, core: Core, outcome: Outcome, clock: Clock, gap: float = 0.0) -> Outcome:
    """Solve the reduced problem by ILP to a relative gap, unless it is large and its gap is small already."""
    if clock.left <= 0:
        return replace(outcome, status="time-limit", warnings=(*outcome.warnings, LATE))
    if core.problem.variables > LARGE and outcome.value - outcome.lower <= NEAR * abs(outcome.value):
        return replace(outcome, status="near-optimal")
    solver = solvers.quickest()
    return _by_ilp(folded, core, solver, outcome, clock, cutoff=True, gap=gap * max(outcome.lower, 0.0))


def _by_ilp(
    folded: Folded, core: Core, solver: str, outcome: Outcome, clock: Clock, *, cutoff: bool, gap: float = 0.0
) -> Outcome:
    """Solve the reduced problem by ILP.

    Args:
        cutoff: tell the solver the cost of the best plan so far.
        gap: absolute gap (s) at which the solver may stop.

    Returns:
        The better of `outcome` and the solver's plan; with a warning if the solver fails.

    Raises:
        SolverError: no plan is known.
    """
    with clock.phase("ilp"):
        upper = outcome.value - core.constant
        answer = ilp.solve(core.problem, solver, time_limit=clock.left, upper=upper, cutoff=cutoff, gap=gap)
    plan, value = outcome.plan, outcome.value
    if answer.assignment is not None:
        lifted = core.lift(answer.assignment)
        cost = folded.problem.value(lifted)
        # at equal cost up to rounding the plan of the ILP is taken, to which its proof belongs
        if plan is None or cost <= value + SLACK * abs(value):
            plan, value = lifted, cost
    if plan is None:
        raise SolverError(_nothing(folded.problem, answer))
    proven = core.constant + answer.lower
    result = replace(outcome, plan=plan, value=value, solver=solver, rows=answer.rows)
    if answer.status == "optimal" and abs(value - proven) <= ilp.ACCURACY * abs(value):
        result = result if folded.tied else replace(result, lower=value)
        return replace(result, status="optimal" if result.closed else "optimal-tied")
    lower = result.lower if folded.tied else min(value, max(result.lower, proven))
    if answer.status == "near-optimal":
        return replace(result, lower=lower, status="near-optimal")
    status = "time-limit" if answer.status == "time-limit" else "fallback"
    result = replace(result, lower=lower, status=status)
    return replace(result, warnings=(*result.warnings, _shortfall(solver, answer, result)))


def _nothing(problem: Problem, answer: ilp.Answer) -> str:
    """The message of the error that no plan was found."""
    names = ", ".join(repr(n.name) for n in problem.nodes[:5])
    more = f" and {len(problem.nodes) - 5} more" if len(problem.nodes) > 5 else ""
    if answer.status == "infeasible":
        return f"no plan exists: the strategies of {names}{more} cannot be combined"
    return f"no plan was found for {names}{more}: {answer.message}"


def _shortfall(solver: str, answer: ilp.Answer, outcome: Outcome) -> str:
    """The warning that the ILP solver ended without a proof."""
    gap = (outcome.value - outcome.lower) / max(abs(outcome.value), np.finfo(float).tiny)
    return f"{solver} ended with {answer.status} ({answer.message}); the plan is within {gap:.2%} of the optimum"


def _solution(problem: Problem, folded: Folded, outcome: Outcome, clock: Clock) -> Solution:
    """The solution of an outcome whose plan is one of the unfolded problem."""
    assignment = outcome.plan
    assert assignment is not None
    value = problem.value(assignment)
    lower = min(outcome.lower, value)
    gap = (value - lower) / max(abs(value), np.finfo(float).tiny)
    return Solution(
        assignment=assignment,
        objective=value,
        lower_bound=lower,
        gap=0.0 if gap < CLOSED else gap,
        status=outcome.status,
        solver_used=outcome.solver,
        warnings=outcome.warnings,
        phases=clock.phases,
        variables=folded.problem.variables,
        variables_unfolded=problem.variables,
        rows=outcome.rows,
    )
