"""The exact optimizer: fold, presolve, bound, and only then search.

    fold        equal layers share one decision                          passes/solver/symmetry.py
    presolve    dead ends go, nodes of degree <= 2 are contracted    dead_end.py, contraction.py
    bound       lower and upper bound by dual ascent                     passes/solver/dual_ascent.py
    eliminate   plans, and proofs, by elimination with bounds            passes/solver/elimination.py
    fix         strategies whose bound exceeds the best plan go, then
                presolve, bound and eliminate again                      passes/solver/reduced_problem.py
    ilp         what is left is an integer program                       passes/solver/ilp.py

What a `Solution.status` proves, weakest last:

    certified       the lower bound of the dual ascent, which holds for the unfolded problem, meets the plan's value
    optimal         the ILP proved the optimum of the unfolded problem
    optimal-tied    no plan that treats equal layers equally is better; `gap` is against all plans
    near-optimal    the bounds leave at most `NEAR`, and too much is left for an ILP to gain that in reasonable time; or
                    at most the gap that was asked for
    open            more is left than the ILP was to be asked for
    cutoff          every plan costs as much as one that is known elsewhere, or more
    time-limit      the time was up; the best plan so far and its gap
    fallback        the ILP solver failed (`warnings` says how); the best plan of the dual ascent and its gap
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
FEW = 2  # how many times the folded strategies still count as few layers
NEAR, LARGE = 1e-3, 4_000  # relative gap, and strategies left, from which "auto" leaves it at the bounds
UNFOLDED_CORE = 4_000  # strategies left, unfolded, up to which the unfolded problem is tried after a tied optimum
LATE = "the time limit was reached before the exact phase; the plan is the best of the dual ascent"


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """assignment: strategy per node of the given problem; objective, lower_bound: s; gap: relative, 0 when closed.

    phases: seconds in fold, presolve, bound, ilp. variables: strategies after folding, variables_unfolded: before; rows
    of the ILP, 0 where none was needed.
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
        lower_bound: of all plans, s.
        phases: seconds spent, by phase.
    """

    def __init__(self, lower_bound: float, phases: Mapping[str, float] = MappingProxyType({})) -> None:
        super().__init__(f"no plan is known that costs less than the cutoff; the bound is {lower_bound} s")
        self.lower_bound = lower_bound
        self.phases = phases


@dataclass(frozen=True, slots=True, eq=False)
class Bounded:
    """What is known of a problem before the ILP: a plan, a bound, and what is left of it.

    `solution`: as it is, "open" where an ILP could gain something; None where no plan is known.
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
    """The cheapest plan. Only where bounds and elimination leave a gap does "auto" run the ILP; the others always do.

    `gap`: a relative gap at which "auto" is content, "near-optimal"; `largest`: strategies left above which it does not
    run the ILP, and leaves the plan "open"; `rounds`: sweeps of dead-end elimination at the start, 0 where bounds are
    soon near enough without; `until`: the relative gap at which an ascent ends; `cutoff` (s): plans that cost as much
    are of no interest, and the search ends, "cutoff", once it is proven that there are no others.

    Raises SolverError, naming nodes, when no plan is feasible; ArgumentError for an unknown solver or a time limit that
    is not above zero.
    """
    begin = time.monotonic()
    found = bound(
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
    known = found.solution
    left = solver == "auto" and found.core.problem.variables > largest
    if known is not None and (known.status == "cutoff" or left):
        return known
    return finish(found, solver=solver, time_limit=time_limit - (time.monotonic() - begin), gap=gap)


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
    """All of `optimize` but the ILP; arguments and errors are the same. `once`: one ascent and one elimination."""
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
    """What the ILP makes of a problem that is bounded; as it is where "auto" has nothing to gain. See `optimize`."""
    if solver == "auto" and known.solution is not None and known.solution.status != "open":
        return known.solution
    problem, folded, outcome = known.problem, known.folded, known.outcome
    clock = Clock(time.monotonic() + time_limit, dict(known.phases))
    if solver != "auto":  # on the core before fixing, with no cutoff: a check of the bounds
        outcome = _by_ilp(folded, known.presolved, solver, outcome, clock, cutoff=False)
    elif not folded.tied:
        outcome = _search(folded, known.core, outcome, clock, gap)
    else:
        outcome = _untie(problem, folded, known.core, known.ascent, outcome, clock, gap)
        return _solution(problem, folded, outcome, clock)
    return _solution(problem, folded, _lifted(folded, outcome), clock)


def _proven(outcome: Outcome, gap: float) -> str:
    """What the bounds say of the plan, if they are near enough."""
    return "certified" if outcome.closed else "near-optimal" if outcome.within(gap) else ""


def _untie(
    problem: Problem, folded: Folded, core: Core, ascent: Ascent, outcome: Outcome, clock: Clock, gap: float
) -> Outcome:
    """Where the bounds of the folded problem leave a gap: the tied optimum, then the unfolded problem.

    A tied optimum is no optimum of the unfolded problem, but a good start for it. Few layers are solved unfolded at
    once, many only if few strategies are left.
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
    """The whole problem, every node on its own, from a known plan."""
    whole = folding.identity(problem)
    small, _, found = narrow(whole.problem, presolved(whole, clock), known, clock, gap)
    if status := _proven(found, gap):
        return replace(found, status=status)
    return _search(whole, small, found, clock, gap)


def _tied(folded: Folded, core: Core, ascent: Ascent, outcome: Outcome, clock: Clock, gap: float) -> Outcome:
    """The optimum of the folded problem; the lower bound stays that of the unfolded one."""
    start = fixed(replace(core, counts=np.ones_like(core.counts)), ascent, outcome, clock)
    small, _, inner = narrow(folded.problem, start, outcome, clock)
    inner = replace(inner, status="optimal-tied") if inner.closed else _search(folded, small, inner, clock, gap)
    return replace(inner, lower=outcome.lower)


def _lifted(folded: Folded, outcome: Outcome) -> Outcome:
    return replace(outcome, plan=None if outcome.plan is None else folded.lift(outcome.plan))


def _search(folded: Folded, core: Core, outcome: Outcome, clock: Clock, gap: float = 0.0) -> Outcome:
    """The ILP on the narrowed core, unless little can be gained there, to a relative gap that is enough."""
    if clock.left <= 0:
        return replace(outcome, status="time-limit", warnings=(*outcome.warnings, LATE))
    if core.problem.variables > LARGE and outcome.value - outcome.lower <= NEAR * abs(outcome.value):
        return replace(outcome, status="near-optimal")
    solver = solvers.quickest()
    return _by_ilp(folded, core, solver, outcome, clock, cutoff=True, gap=gap * max(outcome.lower, 0.0))


def _by_ilp(
    folded: Folded, core: Core, solver: str, outcome: Outcome, clock: Clock, *, cutoff: bool, gap: float = 0.0
) -> Outcome:
    """The ILP over the core, to a gap in seconds; the outcome so far, with a warning, when the solver fails."""
    with clock.phase("ilp"):
        upper = outcome.value - core.constant
        answer = ilp.solve(core.problem, solver, time_limit=clock.left, upper=upper, cutoff=cutoff, gap=gap)
    plan, value = outcome.plan, outcome.value
    if answer.assignment is not None:
        found = core.lift(answer.assignment)
        cost = folded.problem.value(found)
        if plan is None or cost <= value + SLACK * abs(value):
            plan, value = found, cost
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
    names = ", ".join(repr(n.name) for n in problem.nodes[:5])
    more = f" and {len(problem.nodes) - 5} more" if len(problem.nodes) > 5 else ""
    if answer.status == "infeasible":
        return f"no plan exists: the strategies of {names}{more} cannot be combined"
    return f"no plan was found for {names}{more}: {answer.message}"


def _shortfall(solver: str, answer: ilp.Answer, outcome: Outcome) -> str:
    gap = (outcome.value - outcome.lower) / max(abs(outcome.value), np.finfo(float).tiny)
    return f"{solver} ended with {answer.status} ({answer.message}); the plan is within {gap:.2%} of the optimum"


def _solution(problem: Problem, folded: Folded, outcome: Outcome, clock: Clock) -> Solution:
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
