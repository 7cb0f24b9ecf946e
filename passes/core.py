"""What is left of a problem while bounds close in on its optimum.

    core        the problem without what presolving took out; `lift` brings its plans back               -> presolve
    outcome     the best plan so far, and the bound below all plans
    narrow      bound, take out strategies whose bound exceeds the best plan, presolve, and so on        -> narrow
    aim         where a gap is enough: the same with a limit just above the bound instead of the best plan  -> aim

A plan outside the core costs more than the best one, so that the core's lower bound holds for all plans, up to that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.errors import SolverError
from autopar.passes.contract import contract
from autopar.passes.dead_end import eliminate
from autopar.passes.dual_ascent import Ascent, Gap, ascend, reparametrise
from autopar.passes.fold import Folded
from autopar.passes.problem import Ints, Problem

CLOSED = 1e-9  # relative gap that is reported as zero
SLACK = 1e-9  # relative excess over the best plan below which a strategy is kept
FIRST_ROUNDS, LATER_ROUNDS = 8, 2  # sweeps of dead-end elimination at the start and after fixing
KEPT = 0.75  # share of its strategies that a core may keep when fixing is to be tried again
AIM, AIMS = 0.05, 8  # how far above the bound plans are looked for, relative to it, and how often

Lift = Callable[[Ints], Ints]


@dataclass(frozen=True, slots=True, eq=False)
class Core:
    """A presolved problem; `lift` turns its plans into plans of the (folded) one, which cost `constant` (s) more."""

    problem: Problem
    counts: Ints
    pairings: tuple[Ints | None, ...]
    constant: float
    lift: Lift


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
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
class Clock:
    """Seconds by phase, and those left until `deadline` (`time.monotonic()`)."""

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


def presolve(folded: Folded, clock: Clock, rounds: int = FIRST_ROUNDS, *, raw: bool = False) -> Core:
    """The core of a folded problem, after so many sweeps of dead-end elimination; `raw`: only what is infeasible goes.

    Raises SolverError, naming nodes, where no plan is feasible.
    """
    whole = Core(folded.problem, folded.counts, folded.pairings, 0.0, lambda plan: plan)
    with clock.phase("presolve"):
        if not raw:
            return _reduced(whole, None, rounds)
        reduced = eliminate(folded.problem, rounds=0)
        return replace(whole, problem=reduced.problem, lift=reduced.lift)


def _reduced(core: Core, start: tuple[Ints, ...] | None, rounds: int) -> Core:
    """Dead ends out, low degrees contracted, infeasible strategies out again."""
    reduced = eliminate(core.problem, rounds, start)
    smaller = contract(reduced.problem, core.pairings, core.counts)
    left = eliminate(smaller.problem, rounds=0)

    def lift(plan: Ints) -> Ints:
        return core.lift(reduced.lift(smaller.lift(left.lift(plan))))

    return Core(left.problem, smaller.counts, smaller.pairings, core.constant + smaller.constant, lift)


def narrow(
    problem: Problem, core: Core, outcome: Outcome, clock: Clock, enough: float = CLOSED, until: float = 0.0
) -> tuple[Core, Ascent, Outcome]:
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
        core = fixed(core, ascent, outcome, clock)


def _bound(problem: Problem, core: Core, outcome: Outcome, clock: Clock, until: float = 0.0) -> tuple[Ascent, Outcome]:
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


def fixed(core: Core, ascent: Ascent, outcome: Outcome, clock: Clock) -> Core:
    """The core without strategies whose bound exceeds the value of the best plan."""
    limit = outcome.value - core.constant + SLACK * abs(outcome.value)
    keep = tuple(np.flatnonzero(b <= limit) for b in ascent.strategy_bounds)
    if ascent.assignment is not None and ascent.value <= limit:
        lost = [k for k, s in zip(keep, ascent.assignment, strict=True) if s not in k]
        assert not lost, f"{len(lost)} strategy bounds exceed the value {ascent.value} of a plan with those strategies"
    with clock.phase("presolve"):
        return _reduced(replace(core, problem=reparametrise(core.problem, ascent.messages)), keep, LATER_ROUNDS)


def aim(
    problem: Problem, core: Core, ascent: Ascent, outcome: Outcome, clock: Clock, enough: float
) -> tuple[Core, Outcome]:
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
        core, _, outcome = narrow(problem, core, outcome, clock, enough)
    return core, outcome


def _below(problem: Problem, core: Core, ascent: Ascent, outcome: Outcome, limit: float, clock: Clock) -> Outcome:
    """The outcome after a look at plans of the core that cost at most `limit` (s).

    All others cost more than that, so that the bound on these holds for all up to the limit.
    """
    found, small, size = replace(outcome, lower=-np.inf), core, np.inf
    while small.problem.variables < KEPT * size:
        size = small.problem.variables
        goal = min(limit, found.value)
        try:
            small = fixed(small, ascent, replace(found, value=goal), clock)
        except SolverError:  # there are none
            return replace(found, lower=max(outcome.lower, goal))
        ascent, found = _bound(problem, small, found, clock)
        if found.lower >= min(limit, found.value) or clock.left <= 0:
            break
    return replace(found, lower=max(outcome.lower, min(limit, found.lower)))
