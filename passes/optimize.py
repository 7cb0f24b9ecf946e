"""The exact optimizer: fold, presolve, bound, and only then search.

    fold        equal layers share one decision                          passes/fold.py
    presolve    dead ends go, nodes of degree <= 2 are contracted        passes/dead_end.py, passes/contract.py
    bound       lower and upper bound by dual ascent                     passes/dual_ascent.py
    fix         strategies whose bound exceeds the best plan go, then presolve and bound again
    ilp         what is left is an integer program                       passes/ilp.py

What a `Solution.status` proves, weakest last:

    certified       the root lower bound, which holds for the unfolded problem, meets the plan's value
    optimal         fixing and, unless the bounds then met, the ILP proved the optimum of the unfolded problem
    optimal-tied    the same among plans that treat equal layers equally; `gap` is against the root lower bound
    time-limit      the time was up; the best plan so far and its gap
    fallback        the ILP solver failed (`warnings` says how); the best plan of the dual ascent and its gap
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.errors import ArgumentError, SolverError
from autopar.passes import fold as folding
from autopar.passes import ilp
from autopar.passes.contract import contract
from autopar.passes.dead_end import eliminate
from autopar.passes.dual_ascent import Ascent, ascend
from autopar.passes.fold import Folded
from autopar.passes.problem import Ints, Problem, check

SOLVERS = ("auto", "cbc", "highs")
CLOSED = 1e-9  # relative gap that is reported as zero
SLACK = 1e-9  # relative excess over the best plan below which a strategy is kept
ROUNDS = 6  # of fixing, while each takes away a tenth of the strategies
UNFOLDED_CORE = 20_000  # strategies left up to which the unfolded problem is solved after a tied optimum

Lift = Callable[[Ints], Ints]


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """assignment: strategy per node of the given problem; objective, lower_bound: s; gap: relative, 0 when closed.

    phases: seconds in fold, presolve, bound, ilp. variables and rows are those of the problem handed to the last phase
    (rows is 0 without an ILP), variables_unfolded those of the given problem.
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


@dataclass(frozen=True, slots=True, eq=False)
class _Core:
    """A presolved problem; its plans lift to plans of the problem before, which cost `constant` (s) more."""

    problem: Problem
    constant: float
    lift: Lift


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """A plan of one (folded) problem: lower (s) holds for that problem, root (s) for the unfolded one too."""

    plan: Ints | None
    value: float
    lower: float
    root: float
    status: str
    solver: str = "dual ascent"
    rows: int = 0
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class _Clock:
    deadline: float
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("fold", "presolve", "bound", "ilp"), 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] += time.perf_counter() - begin

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()


def optimize(
    problem: Problem, *, solver: str = "auto", time_limit: float = 60.0, fold: bool = True, presolve: bool = True
) -> Solution:
    """The cheapest plan. `solver` "auto" asks CBC only when the bounds do not meet, "cbc" and "highs" always run the ILP.

    Raises SolverError, naming nodes, when no plan is feasible; ArgumentError for an unknown solver or a time limit <= 0.
    """
    if solver not in SOLVERS:
        raise ArgumentError(f"solver={solver!r} is not known. Available: {', '.join(map(repr, SOLVERS))}")
    if not time_limit > 0:
        raise ArgumentError(f"time_limit={time_limit!r} must be a number of seconds above zero")
    clock = _Clock(time.monotonic() + time_limit)
    with clock.phase("fold"):
        check(problem, thorough=False)
        folded = folding.fold(problem) if fold else folding.identity(problem)
    if not problem.nodes:
        return _solution(problem, folded, _Outcome(np.zeros(0, dtype=np.int64), 0.0, 0.0, 0.0, "certified"), clock)
    outcome = _solve(folded, solver, presolve, clock)
    if outcome.status == "optimal" and folded.tied and not _closed(outcome.value, outcome.root):
        outcome = replace(outcome, status="optimal-tied")
        if solver == "auto" and clock.left > 0:
            outcome = _untie(problem, folded, outcome, presolve, clock)
            folded = folding.identity(problem) if outcome.status == "optimal" else folded
    return _solution(problem, folded, outcome, clock)


def _closed(value: float, lower: float) -> bool:
    return value - lower <= CLOSED * abs(value)


def _solve(folded: Folded, solver: str, presolve: bool, clock: _Clock) -> _Outcome:
    """Root bound, and the exact phase where it is needed or asked for."""
    core = _presolve(folded, presolve, clock)
    with clock.phase("bound"):
        ascent = ascend(core.problem, deadline=clock.deadline)
    outcome = _rooted(folded.problem, core, ascent)
    if solver != "auto":
        return _by_ilp(folded.problem, core, solver, replace(outcome, value=np.inf), clock, fallback=outcome)
    if outcome.status == "certified":
        return outcome
    return _narrow(folded.problem, core, ascent, outcome, clock)


def _presolve(folded: Folded, presolve: bool, clock: _Clock) -> _Core:
    with clock.phase("presolve"):
        if not presolve:
            reduced = eliminate(folded.problem, rounds=0)
            return _Core(reduced.problem, 0.0, reduced.lift)
        return _reduced(folded.problem, None, folded)


def _reduced(problem: Problem, start: tuple[Ints, ...] | None, folded: Folded | None) -> _Core:
    """Dead ends out, low degrees contracted, infeasible strategies out again."""
    reduced = eliminate(problem, start=start)
    smaller = contract(reduced.problem, folded and folded.pairings, None if folded is None else folded.counts)
    core = eliminate(smaller.problem, rounds=0)
    return _Core(core.problem, smaller.constant, lambda plan: reduced.lift(smaller.lift(core.lift(plan))))


def _rooted(problem: Problem, core: _Core, ascent: Ascent) -> _Outcome:
    plan = None if ascent.assignment is None else core.lift(ascent.assignment)
    value = np.inf if plan is None else problem.value(plan)
    lower = min(core.constant + ascent.lower, value)
    status = "certified" if _closed(value, lower) else "open"
    return _Outcome(plan, value, lower, lower, status)


def _narrow(problem: Problem, core: _Core, ascent: Ascent, outcome: _Outcome, clock: _Clock) -> _Outcome:
    """Fix, presolve and bound while that shrinks the core; the rest is the ILP's."""
    for _ in range(ROUNDS):
        if not np.isfinite(outcome.value) or clock.left <= 0:
            break
        before = core
        with clock.phase("presolve"):
            core = _fixed(before, ascent, outcome.value)
        with clock.phase("bound"):
            ascent = ascend(core.problem, deadline=clock.deadline)
        outcome = _improved(problem, core, ascent, outcome)
        if _closed(outcome.value, outcome.lower):
            return replace(outcome, status="optimal")
        if core.problem.variables > 0.9 * before.problem.variables:
            break
    if clock.left <= 0:
        return replace(outcome, status="time-limit", warnings=(_late(),))
    return _by_ilp(problem, core, "cbc", outcome, clock, fallback=outcome)


def _fixed(core: _Core, ascent: Ascent, value: float) -> _Core:
    """The core without strategies whose bound exceeds the value of the best plan."""
    limit = value - core.constant + SLACK * abs(value)
    keep = tuple(np.flatnonzero(b <= limit) for b in ascent.strategy_bounds)
    if ascent.assignment is not None and ascent.value <= limit:
        lost = [n.name for n, b, s in zip(core.problem.nodes, ascent.strategy_bounds, ascent.assignment, strict=True) if b[s] > limit]
        assert not lost, f"a strategy bound exceeds the value of the plan that uses it, at {lost}"
    inner = _reduced(core.problem, keep, None)
    return _Core(inner.problem, core.constant + inner.constant, lambda plan: core.lift(inner.lift(plan)))


def _improved(problem: Problem, core: _Core, ascent: Ascent, outcome: _Outcome) -> _Outcome:
    """The outcome with a better plan from the narrowed core, if any, and the bound that now holds.

    A plan outside the core costs more than the best one, so the lower bound is the smaller of that and the core's.
    """
    plan, value = outcome.plan, outcome.value
    if ascent.assignment is not None:
        found = core.lift(ascent.assignment)
        if (cost := problem.value(found)) < value:
            plan, value = found, cost
    lower = min(value, max(outcome.lower, core.constant + ascent.lower))
    return replace(outcome, plan=plan, value=value, lower=lower)


def _by_ilp(
    problem: Problem, core: _Core, solver: str, outcome: _Outcome, clock: _Clock, *, fallback: _Outcome
) -> _Outcome:
    """The ILP over the core. outcome.value serves as cutoff; fallback is returned, with a warning, when it fails."""
    with clock.phase("ilp"):
        answer = ilp.solve(core.problem, solver, time_limit=clock.left, upper=outcome.value - core.constant)
    plan, value = fallback.plan, fallback.value
    if answer.assignment is not None:
        found = core.lift(answer.assignment)
        cost = problem.value(found)
        if cost <= value or (answer.status == "optimal" and cost <= value + SLACK * abs(value)):
            plan, value = found, cost
    lower = min(value, max(fallback.lower, core.constant + answer.lower))
    result = replace(outcome, plan=plan, value=value, lower=lower, solver=solver, rows=answer.rows)
    if plan is None:
        raise SolverError(_nothing(problem, answer))
    if answer.status == "optimal" and value - lower <= ilp.ACCURACY * abs(value):
        return replace(result, lower=value, status="optimal")
    status = "time-limit" if answer.status == "time-limit" else "fallback"
    return replace(result, status=status, warnings=(*result.warnings, _shortfall(solver, answer, result)))


def _nothing(problem: Problem, answer: ilp.Answer) -> str:
    names = ", ".join(repr(n.name) for n in problem.nodes[:5])
    more = f" and {len(problem.nodes) - 5} more" if len(problem.nodes) > 5 else ""
    if answer.status == "infeasible":
        return f"no plan exists: the strategies of {names}{more} cannot be combined"
    return f"no plan was found for {names}{more}: {answer.message}"


def _shortfall(solver: str, answer: ilp.Answer, outcome: _Outcome) -> str:
    gap = (outcome.value - outcome.lower) / max(abs(outcome.value), np.finfo(float).tiny)
    return f"{solver} ended with {answer.status} ({answer.message}); the plan is within {gap:.2%} of the optimum"


def _late() -> str:
    return "the time limit was reached before the exact phase; the plan is the best of the dual ascent"


def _untie(problem: Problem, folded: Folded, tied: _Outcome, presolve: bool, clock: _Clock) -> _Outcome:
    """Try to prove or better a tied optimum on the unfolded problem; the tied outcome where that is too large."""
    assert tied.plan is not None
    whole = folding.identity(problem)
    known = replace(tied, plan=folded.lift(tied.plan), lower=tied.root)
    core = _presolve(whole, presolve, clock)
    with clock.phase("bound"):
        ascent = ascend(core.problem, deadline=clock.deadline)
    outcome = _improved(whole.problem, core, ascent, known)
    if _closed(outcome.value, outcome.lower):
        return replace(outcome, root=outcome.lower, status="optimal")
    with clock.phase("presolve"):
        small = _fixed(core, ascent, outcome.value).problem.variables <= UNFOLDED_CORE
    if small and clock.left > 0:
        outcome = _narrow(whole.problem, core, ascent, outcome, clock)
        if outcome.status == "optimal":
            return replace(outcome, root=outcome.lower)
    return tied


def _solution(problem: Problem, folded: Folded, outcome: _Outcome, clock: _Clock) -> Solution:
    assert outcome.plan is not None
    assignment = folded.lift(outcome.plan)
    value = problem.value(assignment)
    lower = outcome.root if folded.tied else outcome.lower
    lower = min(lower, value)
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
