"""What is left of a problem while bounds close in on its optimum.

    core        the problem without what presolving took out; `lift` brings its plans back               -> presolve
    outcome     the best plan so far, and the bound below all plans
    narrow      bound, look for plans from the bound's messages, take out strategies whose bound exceeds the best
                plan, presolve, and so on                                                                -> narrow

A plan outside the core costs more than the best one, so that the core's lower bound holds for all plans, up to that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.ir.problem import Ints, Problem
from autopar.passes.solver import elimination
from autopar.passes.solver.contraction import contract
from autopar.passes.solver.dead_end import eliminate
from autopar.passes.solver.dual_ascent import Ascent, Gap, ascend, reparametrise
from autopar.passes.solver.symmetry import Folded

CLOSED = 1e-9  # relative gap that is reported as zero
SLACK = 1e-9  # relative excess over the best plan below which a strategy is kept
FIRST_ROUNDS, LATER_ROUNDS = 8, 2  # sweeps of dead-end elimination at the start and after fixing
KEPT = 0.75  # share of its strategies that a core may keep when fixing is to be tried again
NARROW, WIDE = 256, 8192  # beam widths of an elimination: after each ascent, and after the last

PHASES = ("fold", "presolve", "bound", "eliminate", "ilp")

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

    def reaches(self, cutoff: float) -> bool:
        """Whether all plans are proven to cost about `cutoff` (s) or more."""
        return bool(np.isfinite(cutoff)) and self.lower >= cutoff - CLOSED * abs(cutoff)

    @property
    def closed(self) -> bool:
        return self.within(CLOSED)


@dataclass(slots=True)
class Clock:
    """Seconds by phase, and those left until `deadline` (`time.monotonic()`)."""

    deadline: float
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

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
            return _ordered(_reduced(whole, None, rounds))
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


def _ordered(core: Core) -> Core:
    """The same with its nodes in an order with a narrow frontier, in which ascents converge sooner as well."""
    problem, nodes, place = elimination.ordered(core.problem)
    return replace(core, problem=problem, counts=core.counts[nodes], lift=lambda plan: core.lift(plan[place]))


def narrow(
    problem: Problem,
    core: Core,
    outcome: Outcome,
    clock: Clock,
    gap: float = CLOSED,
    until: float = 0.0,
    cutoff: float = np.inf,
    *,
    once: bool = False,
) -> tuple[Core, Ascent, Outcome]:
    """Bound, eliminate, fix and presolve again while that shrinks the core, until the bounds meet or are near enough.

    A plan outside the core costs more than the best one, so the core's lower bound holds for all plans, up to that.
    `until`: the relative gap at which an ascent ends; `cutoff` (s): plans that cost as much are of no interest; `once`:
    bound and eliminate, and leave it at that.
    """
    size = 2 * core.problem.variables
    while True:
        ascent, outcome = _bound(problem, core, outcome, clock, until, cutoff)
        outcome = _eliminated(problem, core, ascent, outcome, clock, cutoff, NARROW)
        if once or outcome.within(max(gap, CLOSED)) or not np.isfinite(outcome.value) or outcome.reaches(cutoff):
            return core, ascent, outcome
        if core.problem.variables > KEPT * size or clock.left <= 0:
            return core, ascent, _eliminated(problem, core, ascent, outcome, clock, cutoff, WIDE)
        size = core.problem.variables
        core = fixed(core, ascent, outcome, clock)


def _bound(
    problem: Problem, core: Core, outcome: Outcome, clock: Clock, until: float, cutoff: float
) -> tuple[Ascent, Outcome]:
    """Dual ascent on the core: a better plan, if found, and a better lower bound."""
    with clock.phase("bound"):
        known = outcome.value - core.constant
        gap = Gap(until, core.constant)
        ascent = ascend(
            core.problem,
            counts=core.counts,
            upper=known,
            deadline=clock.deadline,
            enough=gap,
            limit=cutoff - core.constant,
        )
    plan, value = outcome.plan, outcome.value
    if ascent.assignment is not None:
        found = core.lift(ascent.assignment)
        if (cost := problem.value(found)) < value:
            plan, value = found, cost
    lower = min(value, max(outcome.lower, core.constant + ascent.lower))
    return ascent, replace(outcome, plan=plan, value=value, lower=lower)


def _eliminated(
    problem: Problem, core: Core, ascent: Ascent, outcome: Outcome, clock: Clock, cutoff: float, width: int
) -> Outcome:
    """A better plan by elimination with so many states, and a better bound where no plans are tied."""
    if outcome.closed or not np.isfinite(outcome.value) or outcome.reaches(cutoff) or clock.left <= 0:
        return outcome
    with clock.phase("eliminate"):
        limit = min(cutoff, outcome.value - CLOSED / 2 * abs(outcome.value)) - core.constant
        found = elimination.search(core.problem, ascent, limit, width, clock.deadline)
    if found.plan is not None:
        plan = core.lift(found.plan)
        if (cost := problem.value(plan)) < outcome.value:
            outcome = replace(outcome, plan=plan, value=cost)
    if (core.counts > 1).any():
        return replace(outcome, lower=min(outcome.lower, outcome.value))
    return replace(outcome, lower=min(outcome.value, max(outcome.lower, core.constant + found.lower)))


def fixed(core: Core, ascent: Ascent, outcome: Outcome, clock: Clock) -> Core:
    """The core without strategies whose bound exceeds the value of the best plan."""
    limit = outcome.value - core.constant + SLACK * abs(outcome.value)
    keep = tuple(np.flatnonzero(b <= limit) for b in ascent.strategy_bounds)
    if ascent.assignment is not None and ascent.value <= limit:
        lost = [k for k, s in zip(keep, ascent.assignment, strict=True) if s not in k]
        assert not lost, f"{len(lost)} strategy bounds exceed the value {ascent.value} of a plan with those strategies"
    with clock.phase("presolve"):
        return _reduced(replace(core, problem=reparametrise(core.problem, ascent.messages)), keep, LATER_ROUNDS)
