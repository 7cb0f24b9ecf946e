"""The exact optimizer: reduce the problem and bound its optimum, and solve an ILP only if a gap is left.

    fold        equal layers share one decision                                     -> symmetry.fold
    presolve    dead-end elimination; nodes of degree <= 2 are contracted           -> reduced_problem.presolve
    bound       lower bound and plans by dual ascent                                -> dual_ascent.ascend
    eliminate   plans and proofs by dynamic programming with bounds                 -> elimination.search
    fix         strategies whose bound exceeds the best plan are removed; then
                presolve, bound and eliminate again                                 -> reduced_problem.fix_by_bounds
    ilp         the rest is an integer linear program                               -> ilp.solve

The meaning of `Solution.status`, from the strongest proof to the weakest:

    certified       the lower bound of dual ascent or elimination, valid for the unfolded problem, is the plan's cost
    optimal         the ILP proved the optimum of the unfolded problem
    optimal-tied    the optimum among plans with equal strategies for equal layers; `gap` is relative to all plans
    near-optimal    the gap is at most the gap asked for; or it is at most `OptimizerEffort.near`, and the problem has
                    too many strategies for an ILP to close the gap in reasonable time
    open            a gap is left, and the problem has more strategies than `largest` allows for an ILP
    accepted        no better plan is needed, see `autopar.passes.memory.search_state.Acceptance`; with its gap
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
from autopar.passes.solver.reduced_problem import (
    CLOSED,
    SLACK,
    Clock,
    Incumbent,
    ReducedProblem,
    fix_by_bounds,
    fixed,
)
from autopar.passes.solver.reduced_problem import presolve as presolved
from autopar.passes.solver.symmetry import Folded

SOLVERS = ("auto", "cbc", "highs")


@dataclass(frozen=True, slots=True)
class OptimizerEffort:
    """Which problems are solved without symmetry reduction, and which are given to the ILP."""

    # a program has few equal layers if its strategies are at most so many times those of its quotient (not
    # measured)
    few: float = 2
    # relative gap at which a problem with more than `large` strategies is not given to the ILP (not measured)
    near: float = 1e-3
    # strategies of a reduced problem above which `near` is enough (settled on the zoo)
    large: int = 4_000
    # most strategies left, unfolded, to solve the unfolded problem after a tied optimum (settled on the zoo)
    unfolded: int = 4_000


OPTIMIZER = OptimizerEffort()

#: What a warning of a time limit begins with.
TIME_LIMIT_REACHED = "the time limit was reached"
LATE = f"{TIME_LIMIT_REACHED} before the exact phase; the plan is the best of the dual ascent"


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
        reduced: the reduced problem.
        ascent: the last dual ascent on `reduced`.
        incumbent: the best plan of the quotient, and the bound.
        phases: phase -> seconds.
        solution: the solution without an ILP, "open" if an ILP may improve plan or bound; None without a plan.
    """

    problem: Problem
    folded: Folded
    presolved: ReducedProblem
    reduced: ReducedProblem
    ascent: Ascent
    incumbent: Incumbent
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
    rounds: int | None = None,
    until: float = 0.0,
    cutoff: float = np.inf,
    effort: OptimizerEffort = OPTIMIZER,
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
        rounds: sweeps of dead-end elimination at the start, if other than `ReductionEffort.first_rounds`; 0 saves them
            where bounds soon suffice without.
        until: relative gap at which a dual ascent ends.
        cutoff: s; the search ends with status "cutoff" once it is proven that no plan costs less.
        effort: which problems are solved without symmetry reduction, and which by ILP.

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
    left = solver == "auto" and bounded.reduced.problem.variables > largest
    if solution is not None and (solution.status == "cutoff" or left):
        return solution
    return finish(bounded, solver=solver, time_limit=time_limit - (time.monotonic() - begin), gap=gap, effort=effort)


def bound(
    problem: Problem,
    *,
    solver: str = "auto",
    time_limit: float = 60.0,
    fold: bool = True,
    presolve: bool = True,
    gap: float = 0.0,
    rounds: int | None = None,
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
    reduced = presolved(folded, clock, rounds, raw=not presolve)
    nothing = Incumbent(None, np.inf, -np.inf)
    small, ascent, incumbent = fix_by_bounds(folded.problem, reduced, nothing, clock, gap, until, cutoff, once=once)
    status = "cutoff" if incumbent.reaches(cutoff) else _proven(incumbent, gap) or "open"
    incumbent = replace(incumbent, status=status)
    solution = None if incumbent.plan is None else _solution(problem, folded, _lifted(folded, incumbent), clock)
    return Bounded(problem, folded, reduced, small, ascent, incumbent, clock.phases, solution)


def finish(
    bounded: Bounded,
    *,
    solver: str = "auto",
    time_limit: float = 60.0,
    gap: float = 0.0,
    effort: OptimizerEffort = OPTIMIZER,
) -> Solution:
    """The solution of a bounded problem, by ILP if it is "open" or a solver is named. Arguments as in `optimize`."""
    if solver == "auto" and bounded.solution is not None and bounded.solution.status != "open":
        return bounded.solution
    problem, folded, incumbent = bounded.problem, bounded.folded, bounded.incumbent
    clock = Clock(time.monotonic() + time_limit, dict(bounded.phases))
    if solver != "auto":  # before fixing and without a cutoff, which makes the ILP a check of the bounds
        incumbent = _by_ilp(folded, bounded.presolved, solver, incumbent, clock, cutoff=False)
    elif not folded.tied:
        incumbent = _search(folded, bounded.reduced, incumbent, clock, effort, gap)
    else:
        incumbent = _break_symmetry(problem, folded, bounded.reduced, bounded.ascent, incumbent, clock, effort, gap)
        return _solution(problem, folded, incumbent, clock)
    return _solution(problem, folded, _lifted(folded, incumbent), clock)


def _proven(incumbent: Incumbent, gap: float) -> str:
    """The status that the bounds prove, empty if the gap is above `gap`."""
    return "certified" if incumbent.closed else "near-optimal" if incumbent.within(gap) else ""


def _break_symmetry(
    problem: Problem,
    folded: Folded,
    reduced: ReducedProblem,
    ascent: Ascent,
    incumbent: Incumbent,
    clock: Clock,
    effort: OptimizerEffort,
    gap: float,
) -> Incumbent:
    """Solve the folded problem to its optimum, then the unfolded problem, if bounds leave a gap in the folded problem.

    The optimum of the folded problem, in which equal layers are tied to equal strategies, need not be that of the
    unfolded problem, but is a good start for it. A program with few equal layers is solved unfolded at once. One with
    many is solved unfolded only if few strategies are left.
    """
    if problem.variables <= effort.few * folded.problem.variables:
        return _unfolded(problem, _lifted(folded, incumbent), clock, effort, gap)
    tied = _symmetric_optimum(folded, reduced, ascent, incumbent, clock, effort, gap)
    reduced, _, fixed = fix_by_bounds(folded.problem, reduced, tied, clock, gap)
    unfolded = _lifted(folded, fixed)
    if status := _proven(fixed, gap):
        return replace(unfolded, status=status, warnings=())
    left = sum(int(n) * len(node.cost) for n, node in zip(reduced.counts, reduced.problem.nodes, strict=True))
    if left > effort.unfolded or clock.left <= 0:
        return unfolded
    final = _unfolded(problem, replace(unfolded, warnings=()), clock, effort, gap)
    return final if final.closed else replace(unfolded, plan=final.plan, value=final.value, lower=final.lower)


def _unfolded(problem: Problem, incumbent: Incumbent, clock: Clock, effort: OptimizerEffort, gap: float) -> Incumbent:
    """Solve the unfolded problem, from a known plan."""
    whole = folding.identity(problem)
    small, _, fixed = fix_by_bounds(whole.problem, presolved(whole, clock), incumbent, clock, gap)
    if status := _proven(fixed, gap):
        return replace(fixed, status=status)
    return _search(whole, small, fixed, clock, effort, gap)


def _symmetric_optimum(
    folded: Folded,
    reduced: ReducedProblem,
    ascent: Ascent,
    incumbent: Incumbent,
    clock: Clock,
    effort: OptimizerEffort,
    gap: float,
) -> Incumbent:
    """The optimum of the folded problem. The lower bound stays that of the unfolded problem."""
    # with class sizes of one, bounds need hold only for plans with equal strategies for equal layers
    start = fixed(replace(reduced, counts=np.ones_like(reduced.counts)), ascent, incumbent, clock)
    small, _, inner = fix_by_bounds(folded.problem, start, incumbent, clock)
    inner = replace(inner, status="optimal-tied") if inner.closed else _search(folded, small, inner, clock, effort, gap)
    return replace(inner, lower=incumbent.lower)


def _lifted(folded: Folded, incumbent: Incumbent) -> Incumbent:
    """The incumbent with its plan lifted to the unfolded problem."""
    return replace(incumbent, plan=None if incumbent.plan is None else folded.lift(incumbent.plan))


def _search(
    folded: Folded,
    reduced: ReducedProblem,
    incumbent: Incumbent,
    clock: Clock,
    effort: OptimizerEffort,
    gap: float,
) -> Incumbent:
    """Solve the reduced problem by ILP to a relative gap, unless it is large and its gap is small already."""
    if clock.left <= 0:
        return replace(incumbent, status="time-limit", warnings=(*incumbent.warnings, LATE))
    near = incumbent.value - incumbent.lower <= effort.near * abs(incumbent.value)
    if near and reduced.problem.variables > effort.large:
        return replace(incumbent, status="near-optimal")
    solver = solvers.quickest()
    return _by_ilp(folded, reduced, solver, incumbent, clock, cutoff=True, gap=gap * max(incumbent.lower, 0.0))


def _by_ilp(
    folded: Folded,
    reduced: ReducedProblem,
    solver: str,
    incumbent: Incumbent,
    clock: Clock,
    *,
    cutoff: bool,
    gap: float = 0.0,
) -> Incumbent:
    """Solve the reduced problem by ILP.

    Args:
        cutoff: tell the solver the cost of the best plan so far.
        gap: absolute gap (s) at which the solver may stop.

    Returns:
        The better of `incumbent` and the solver's plan; with a warning if the solver fails.

    Raises:
        SolverError: no plan is known.
    """
    with clock.phase("ilp"):
        upper = incumbent.value - reduced.constant
        answer = ilp.solve(reduced.problem, solver, time_limit=clock.left, upper=upper, cutoff=cutoff, gap=gap)
    plan, value = incumbent.plan, incumbent.value
    if answer.assignment is not None:
        lifted = reduced.lift(answer.assignment)
        cost = folded.problem.value(lifted)
        # at equal cost up to rounding the plan of the ILP is taken, to which its proof belongs
        if plan is None or cost <= value + SLACK * abs(value):
            plan, value = lifted, cost
    if plan is None:
        raise SolverError(f"no plan {_nothing(folded.problem, answer)}")
    proven = reduced.constant + answer.lower
    result = replace(incumbent, plan=plan, value=value, solver=solver, rows=answer.rows)
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
    """What the error says of a plan that was not found."""
    names = ", ".join(repr(n.name) for n in problem.nodes[:5])
    more = f" and {len(problem.nodes) - 5} more" if len(problem.nodes) > 5 else ""
    if answer.status == "infeasible":
        return f"exists: the strategies of {names}{more} cannot be combined"
    return f"was found for {names}{more}: {answer.message}"


def _shortfall(solver: str, answer: ilp.Answer, incumbent: Incumbent) -> str:
    """The warning that the ILP solver ended without a proof."""
    gap = (incumbent.value - incumbent.lower) / max(abs(incumbent.value), np.finfo(float).tiny)
    how = (
        f"{TIME_LIMIT_REACHED} in {solver}" if answer.status == "time-limit" else f"{solver} ended with {answer.status}"
    )
    return f"{how} ({answer.message}); the plan is within {gap:.2%} of the optimum"


def _solution(problem: Problem, folded: Folded, incumbent: Incumbent, clock: Clock) -> Solution:
    """The solution of an incumbent whose plan is one of the unfolded problem."""
    assignment = incumbent.plan
    assert assignment is not None
    value = problem.value(assignment)
    lower = min(incumbent.lower, value)
    gap = (value - lower) / max(abs(value), np.finfo(float).tiny)
    return Solution(
        assignment=assignment,
        objective=value,
        lower_bound=lower,
        gap=0.0 if gap < CLOSED else gap,
        status=incumbent.status,
        solver_used=incumbent.solver,
        warnings=incumbent.warnings,
        phases=clock.phases,
        variables=folded.problem.variables,
        variables_unfolded=problem.variables,
        rows=incumbent.rows,
    )
