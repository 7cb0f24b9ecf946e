"""The exact optimizer: fold, presolve, bound, and only then search.

    fold        equal layers share one decision                          passes/fold.py
    presolve    dead ends go, nodes of degree <= 2 are contracted        passes/dead_end.py, passes/contract.py
    bound       lower and upper bound by dual ascent                     passes/dual_ascent.py
    fix         strategies whose bound exceeds the best plan go, then presolve and bound again
    aim         where a gap is enough: the same with a limit just above the bound instead of the best plan     -> _aimed
    ilp         what is left is an integer program                       passes/ilp.py

What a `Solution.status` proves, weakest last:

    certified       the lower bound of the dual ascent, which holds for the unfolded problem, meets the plan's value
    optimal         the ILP proved the optimum of the unfolded problem
    optimal-tied    no plan that treats equal layers equally is better; `gap` is against all plans
    near-optimal    the bounds leave at most `NEAR`, and too much is left for an ILP to gain that in reasonable time; or
                    at most the gap that was asked for
    open            more is left than the ILP was to be asked for
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
from autopar.passes.dual_ascent import Ascent, Gap, ascend, reparametrise
from autopar.passes.fold import Folded
from autopar.passes.problem import Ints, Problem, check

SOLVERS = ("auto", "cbc", "highs")
CLOSED = 1e-9  # relative gap that is reported as zero
SLACK = 1e-9  # relative excess over the best plan below which a strategy is kept
FIRST_ROUNDS, LATER_ROUNDS = 8, 2  # sweeps of dead-end elimination at the start and after fixing
FEW = 2  # how many times the folded strategies still count as few layers
KEPT = 0.75  # share of its strategies that a core may keep when fixing is to be tried again
NEAR, LARGE = 1e-3, 4_000  # relative gap, and strategies left, from which "auto" leaves it at the bounds
UNFOLDED_CORE = 4_000  # strategies left, unfolded, up to which the unfolded problem is tried after a tied optimum
AIM, AIMS = 0.05, 8  # how far above the bound plans are looked for, relative to it, and how often
LATE = "the time limit was reached before the exact phase; the plan is the best of the dual ascent"

Lift = Callable[[Ints], Ints]


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


@dataclass(frozen=True, slots=True, eq=False)
class _Core:
    """A presolved problem; `lift` turns its plans into plans of the (folded) one, which cost `constant` (s) more."""

    problem: Problem
    counts: Ints
    pairings: tuple[Ints | None, ...]
    constant: float
    lift: Lift


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """The best plan of one (folded) problem, with a lower bound (s)."""

    plan: Ints | None
    value: float
    lower: float
    status: str = "open"
    solver: str = "dual ascent"
    rows: int = 0
    warnings: tuple[str, ...] = ()

    def within(self, gap: float) -> bool:
        """Whether the plan is proven to be within a relative gap of the optimum."""
        return bool(np.isfinite(self.value)) and self.value - self.lower <= gap * abs(self.value)

    @property
    def closed(self) -> bool:
        return self.within(CLOSED)


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
    problem: Problem,
    *,
    solver: str = "auto",
    time_limit: float = 60.0,
    fold: bool = True,
    presolve: bool = True,
    enough: float = 0.0,
    largest: float = np.inf,
    rounds: int = FIRST_ROUNDS,
    until: float = 0.0,
) -> Solution:
    """The cheapest plan. Only when the bounds do not meet does "auto" ask CBC; "cbc" and "highs" always run the ILP.

    `enough`: a relative gap at which "auto" is content, "near-optimal"; `largest`: strategies left above which it
    neither aims at plans nor asks CBC, and leaves the plan "open"; `rounds`: sweeps of dead-end elimination at the
    start, 0 where bounds are soon near enough without; `until`: the relative gap at which an ascent ends.

    Raises SolverError, naming nodes, when no plan is feasible; ArgumentError for an unknown solver or a time limit that
    is not above zero.
    """
    if solver not in SOLVERS:
        raise ArgumentError(f"solver={solver!r} is not known. Available: {', '.join(map(repr, SOLVERS))}")
    if not time_limit > 0:
        raise ArgumentError(f"time_limit={time_limit!r} must be a number of seconds above zero")
    clock = _Clock(time.monotonic() + time_limit)
    with clock.phase("fold"):
        check(problem, thorough=False)
        folded = folding.fold(problem) if fold else folding.identity(problem)
    core = _presolve(folded, presolve, clock, rounds)
    nothing = _Outcome(None, np.inf, -np.inf)
    small, ascent, outcome = _narrow(folded.problem, core, nothing, clock, enough, until)
    if solver == "auto" and enough and not folded.tied and small.problem.variables <= largest:
        small, outcome = _aimed(folded.problem, small, ascent, outcome, clock, enough)
    if solver != "auto":  # on the core before fixing, with no cutoff: a check of the bounds
        outcome = _by_ilp(folded, core, solver, outcome, clock, cutoff=False)
    elif outcome.closed:
        outcome = replace(outcome, status="certified")
    elif outcome.within(enough):
        outcome = replace(outcome, status="near-optimal")
    elif not folded.tied:
        left = small.problem.variables > largest
        outcome = replace(outcome, status="open") if left else _search(folded, small, outcome, clock, enough)
    else:
        return _solution(problem, folded, _untie(problem, folded, small, ascent, outcome, clock), clock)
    return _solution(problem, folded, _lifted(folded, outcome), clock)


def _untie(problem: Problem, folded: Folded, core: _Core, ascent: Ascent, outcome: _Outcome, clock: _Clock) -> _Outcome:
    """Where the bounds of the folded problem leave a gap: the tied optimum, then the unfolded problem.

    A tied optimum is no optimum of the unfolded problem, but a good start for it. Few layers are solved unfolded at
    once, many only if few strategies are left.
    """
    if problem.variables <= FEW * folded.problem.variables:
        return _unfolded(problem, _lifted(folded, outcome), clock)
    tied = _tied(folded, core, ascent, outcome, clock)
    core, _, found = _narrow(folded.problem, core, tied, clock)
    known = _lifted(folded, found)
    if found.closed:
        return replace(known, status="certified", warnings=())
    left = sum(int(n) * len(node.cost) for n, node in zip(core.counts, core.problem.nodes, strict=True))
    if left > UNFOLDED_CORE or clock.left <= 0:
        return known
    final = _unfolded(problem, replace(known, warnings=()), clock)
    return final if final.closed else replace(known, plan=final.plan, value=final.value, lower=final.lower)


def _unfolded(problem: Problem, known: _Outcome, clock: _Clock) -> _Outcome:
    """The whole problem, every node on its own, from a known plan."""
    whole = folding.identity(problem)
    small, _, found = _narrow(whole.problem, _presolve(whole, True, clock), known, clock)
    return replace(found, status="certified") if found.closed else _search(whole, small, found, clock)


def _tied(folded: Folded, core: _Core, ascent: Ascent, outcome: _Outcome, clock: _Clock) -> _Outcome:
    """The optimum of the folded problem; the lower bound stays that of the unfolded one."""
    start = _fixed(replace(core, counts=np.ones_like(core.counts)), ascent, outcome, clock)
    small, _, inner = _narrow(folded.problem, start, outcome, clock)
    inner = replace(inner, status="optimal-tied") if inner.closed else _search(folded, small, inner, clock)
    return replace(inner, lower=outcome.lower)


def _lifted(folded: Folded, outcome: _Outcome) -> _Outcome:
    return replace(outcome, plan=None if outcome.plan is None else folded.lift(outcome.plan))


def _presolve(folded: Folded, presolve: bool, clock: _Clock, rounds: int = FIRST_ROUNDS) -> _Core:
    whole = _Core(folded.problem, folded.counts, folded.pairings, 0.0, lambda plan: plan)
    with clock.phase("presolve"):
        if presolve:
            return _reduced(whole, None, rounds)
        reduced = eliminate(folded.problem, rounds=0)
        return replace(whole, problem=reduced.problem, lift=reduced.lift)


def _reduced(core: _Core, start: tuple[Ints, ...] | None, rounds: int) -> _Core:
    """Dead ends out, low degrees contracted, infeasible strategies out again."""
    reduced = eliminate(core.problem, rounds, start)
    smaller = contract(reduced.problem, core.pairings, core.counts)
    left = eliminate(smaller.problem, rounds=0)

    def lift(plan: Ints) -> Ints:
        return core.lift(reduced.lift(smaller.lift(left.lift(plan))))

    return _Core(left.problem, smaller.counts, smaller.pairings, core.constant + smaller.constant, lift)


def _narrow(
    problem: Problem, core: _Core, outcome: _Outcome, clock: _Clock, enough: float = CLOSED, until: float = 0.0
) -> tuple[_Core, Ascent, _Outcome]:
    """Bound, fix and presolve again while that shrinks the core, until the bounds meet, or are near enough.

    A plan outside the core costs more than the best one, so the core's lower bound holds for all plans, up to that.
    `until`: the relative gap at which an ascent ends.
    """
    size = 2 * core.problem.variables
    while True:
        ascent, outcome = _bound(problem, core, outcome, clock, until)
        done = outcome.within(max(enough, CLOSED)) or not np.isfinite(outcome.value) or clock.left <= 0
        if done or core.problem.variables > KEPT * size:
            return core, ascent, outcome
        size = core.problem.variables
        core = _fixed(core, ascent, outcome, clock)


def _bound(
    problem: Problem, core: _Core, outcome: _Outcome, clock: _Clock, until: float = 0.0
) -> tuple[Ascent, _Outcome]:
    """Dual ascent on the core: a better plan, if found, and a better lower bound."""
    with clock.phase("bound"):
        known = outcome.value - core.constant
        gap = Gap(until, core.constant)
        ascent = ascend(core.problem, counts=core.counts, upper=known, deadline=clock.deadline, enough=gap)
    plan, value = outcome.plan, outcome.value
    if ascent.assignment is not None:
        found = core.lift(ascent.assignment)
        if (cost := problem.value(found)) < value:
            plan, value = found, cost
    lower = min(value, max(outcome.lower, core.constant + ascent.lower))
    return ascent, replace(outcome, plan=plan, value=value, lower=lower)


def _fixed(core: _Core, ascent: Ascent, outcome: _Outcome, clock: _Clock) -> _Core:
    """The core without strategies whose bound exceeds the value of the best plan."""
    limit = outcome.value - core.constant + SLACK * abs(outcome.value)
    keep = tuple(np.flatnonzero(b <= limit) for b in ascent.strategy_bounds)
    if ascent.assignment is not None and ascent.value <= limit:
        lost = [k for k, s in zip(keep, ascent.assignment, strict=True) if s not in k]
        assert not lost, f"{len(lost)} strategy bounds exceed the value {ascent.value} of a plan with those strategies"
    with clock.phase("presolve"):
        return _reduced(replace(core, problem=reparametrise(core.problem, ascent.messages)), keep, LATER_ROUNDS)


def _aimed(
    problem: Problem, core: _Core, ascent: Ascent, outcome: _Outcome, clock: _Clock, enough: float
) -> tuple[_Core, _Outcome]:
    """Better plans and a better bound from guesses at the optimum, each a little above the bound.

    Strategies whose bound exceeds a guess are few to keep, and what is left is bounded well. Either the guess was too
    low, which is a new bound, or the best plan is in there. The core is narrower where that found a better plan.
    """
    known = outcome.value
    for _ in range(AIMS):
        limit = outcome.lower + AIM * abs(outcome.lower)
        if outcome.within(enough) or not np.isfinite(outcome.value) or limit >= outcome.value or clock.left <= 0:
            break
        before = outcome.lower
        outcome = _below(problem, core, ascent, outcome, limit, clock)
        if outcome.lower - before < enough / 2 * abs(before):
            break
    if outcome.value < known and not outcome.within(enough):
        core, _, outcome = _narrow(problem, core, outcome, clock, enough)
    return core, outcome


def _below(problem: Problem, core: _Core, ascent: Ascent, outcome: _Outcome, limit: float, clock: _Clock) -> _Outcome:
    """The outcome after a look at plans of the core that cost at most `limit` (s).

    All others cost more than that, so that the bound on these holds for all up to the limit.
    """
    found, small, size = replace(outcome, lower=-np.inf), core, np.inf
    while small.problem.variables < KEPT * size:
        size = small.problem.variables
        goal = min(limit, found.value)
        try:
            small = _fixed(small, ascent, replace(found, value=goal), clock)
        except SolverError:  # there are none
            return replace(found, lower=max(outcome.lower, goal))
        ascent, found = _bound(problem, small, found, clock)
        if found.lower >= min(limit, found.value) or clock.left <= 0:
            break
    return replace(found, lower=max(outcome.lower, min(limit, found.lower)))


def _search(folded: Folded, core: _Core, outcome: _Outcome, clock: _Clock, enough: float = 0.0) -> _Outcome:
    """CBC on the narrowed core, unless little can be gained there, to a relative gap that is enough."""
    if clock.left <= 0:
        return replace(outcome, status="time-limit", warnings=(*outcome.warnings, LATE))
    if core.problem.variables > LARGE and outcome.value - outcome.lower <= NEAR * abs(outcome.value):
        return replace(outcome, status="near-optimal")
    return _by_ilp(folded, core, "cbc", outcome, clock, cutoff=True, gap=enough * max(outcome.lower, 0.0))


def _by_ilp(
    folded: Folded, core: _Core, solver: str, outcome: _Outcome, clock: _Clock, *, cutoff: bool, gap: float = 0.0
) -> _Outcome:
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


def _shortfall(solver: str, answer: ilp.Answer, outcome: _Outcome) -> str:
    gap = (outcome.value - outcome.lower) / max(abs(outcome.value), np.finfo(float).tiny)
    return f"{solver} ended with {answer.status} ({answer.message}); the plan is within {gap:.2%} of the optimum"


def _solution(problem: Problem, folded: Folded, outcome: _Outcome, clock: _Clock) -> Solution:
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
