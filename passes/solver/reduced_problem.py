"""The reduced problem, which shrinks as bounds remove strategies from it.

    core        the reduced problem; `Core.lift` maps its plans to plans of the original problem         -> presolve
    outcome     the best plan so far, and the lower bound on all plans                                   -> Outcome
    bound       lower bound and plans by dual ascent                                                     -> _bound
    eliminate   plans and bounds by elimination, from the messages of the ascent                         -> _eliminated
    fix         remove the strategies whose bound exceeds the cost of the best plan, and presolve again  -> fixed
    narrow      bound, eliminate and fix in turn, while that shrinks the core                            -> narrow

For every plan that the core lacks, either the core has a plan that costs no more, or the best plan costs less. The
minimum of the core's lower bound and the cost of the best plan is therefore a lower bound on all plans.
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
SLACK = 1e-9  # share of the best plan's cost by which a bound has to exceed it before its strategy is removed
FIRST_ROUNDS = 8  # sweeps of dead-end elimination at the start; settled on the zoo
LATER_ROUNDS = 2  # sweeps of dead-end elimination after strategies were fixed by bounds; settled on the zoo
KEPT = 0.75  # fixing is repeated while it leaves at most this share of the strategies; settled on the zoo
NARROW = 256  # most states per node of the elimination after each ascent; settled on the zoo
WIDE = 8192  # most states per node of the elimination after the last ascent; settled on the zoo

PHASES = ("fold", "presolve", "bound", "eliminate", "ilp")

Lift = Callable[[Ints], Ints]


@dataclass(frozen=True, slots=True, eq=False)
class Core:
    """The reduced problem.

    Attributes:
        problem: its nodes and edges.
        counts: class sizes of its nodes, as in `Folded`.
        pairings: joined members of its edges, as in `Folded`.
        constant: cost (s) of the nodes that are no longer in the problem.
        lift: plan of the reduced problem -> plan of the folded problem.
    """

    problem: Problem
    counts: Ints
    pairings: tuple[Ints | None, ...]
    constant: float
    lift: Lift


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The best plan so far, of the folded or the unfolded problem.

    Attributes:
        plan: strategy per node, shape (nodes,), or None.
        value: cost of the plan (s), inf without one.
        lower: lower bound (s) on all plans of the unfolded problem.
        status: as in `optimize.Solution`.
        solver: "dual ascent", or the ILP solver.
        rows: number of rows of the ILP.
        warnings: what kept the optimizer from a proof.
    """

    plan: Ints | None
    value: float
    lower: float
    status: str = "open"
    solver: str = "dual ascent"
    rows: int = 0
    warnings: tuple[str, ...] = ()

    def within(self, gap: float) -> bool:
        """Whether the plan is proven to be within this relative gap of the optimum."""
        return bool(np.isfinite(self.value)) and self.value - self.lower <= gap * abs(self.value)

    def reaches(self, cutoff: float) -> bool:
        """Whether it is proven that all plans cost at least `cutoff` (s), up to rounding."""
        return bool(np.isfinite(cutoff)) and self.lower >= cutoff - CLOSED * abs(cutoff)

    @property
    def closed(self) -> bool:
        """Whether the plan is proven to be optimal, up to rounding."""
        return self.within(CLOSED)


@dataclass(slots=True)
class Clock:
    """Measures seconds by phase, and the time left until `deadline`, on the clock of `time.monotonic()`."""

    deadline: float
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent in the context to a phase."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] += time.perf_counter() - begin

    @property
    def left(self) -> float:
        """Seconds until the deadline, negative after it."""
        return self.deadline - time.monotonic()


def presolve(folded: Folded, clock: Clock, rounds: int = FIRST_ROUNDS, *, raw: bool = False) -> Core:
    """The reduced problem of a folded problem.

    Args:
        folded: the folded problem.
        clock: charged for the phase "presolve".
        rounds: sweeps of dead-end elimination.
        raw: remove only infeasible strategies, and contract nothing.

    Raises:
        SolverError: no plan is feasible; the message names nodes.
    """
    whole = Core(folded.problem, folded.counts, folded.pairings, 0.0, lambda plan: plan)
    with clock.phase("presolve"):
        if not raw:
            return _ordered(_reduced(whole, None, rounds))
        reduced = eliminate(folded.problem, rounds=0)
        return replace(whole, problem=reduced.problem, lift=reduced.lift)


def _reduced(core: Core, start: tuple[Ints, ...] | None, rounds: int) -> Core:
    """Eliminate dead ends, contract nodes of low degree, and eliminate infeasible strategies again."""
    reduced = eliminate(core.problem, rounds, start)
    smaller = contract(reduced.problem, core.pairings, core.counts)
    left = eliminate(smaller.problem, rounds=0)

    def lift(plan: Ints) -> Ints:
        return core.lift(reduced.lift(smaller.lift(left.lift(plan))))

    return Core(left.problem, smaller.counts, smaller.pairings, core.constant + smaller.constant, lift)


def _ordered(core: Core) -> Core:
    """The core with its nodes in an order with a narrow frontier, in which ascents converge sooner as well."""
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
    """Bound, eliminate and fix in turn, while that shrinks the core and the gap is too large.

    Args:
        problem: the folded problem.
        core: its reduced problem.
        outcome: the best plan of `problem` so far, and the bound.
        clock: ends the loop.
        gap: relative gap at which to stop.
        until: relative gap at which a dual ascent ends.
        cutoff: s; stop once it is proven that no plan costs less.
        once: bound and eliminate only once, and fix nothing.

    Returns:
        The core, the last ascent on it, and the outcome.
    """
    size = 2 * core.problem.variables  # so that the first core counts as shrunk
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
    """A dual ascent on the core, and the outcome with its plan, if better, and its lower bound."""
    with clock.phase("bound"):
        known_cost = outcome.value - core.constant
        gap = Gap(until, core.constant)
        ascent = ascend(
            core.problem,
            counts=core.counts,
            upper=known_cost,
            deadline=clock.deadline,
            enough=gap,
            limit=cutoff - core.constant,
        )
    plan, value = outcome.plan, outcome.value
    if ascent.assignment is not None:
        lifted = core.lift(ascent.assignment)
        if (cost := problem.value(lifted)) < value:
            plan, value = lifted, cost
    lower = min(value, max(outcome.lower, core.constant + ascent.lower))
    return ascent, replace(outcome, plan=plan, value=value, lower=lower)


def _eliminated(
    problem: Problem, core: Core, ascent: Ascent, outcome: Outcome, clock: Clock, cutoff: float, width: int
) -> Outcome:
    """The outcome after elimination with at most `width` states per node.

    The bound of the elimination is used only if no class has several members: otherwise it holds for plans with equal
    strategies for equal layers only.
    """
    if outcome.closed or not np.isfinite(outcome.value) or outcome.reaches(cutoff) or clock.left <= 0:
        return outcome
    with clock.phase("eliminate"):
        # slightly below the cost of the best plan, so that equal plans are dropped
        limit = min(cutoff, outcome.value - CLOSED / 2 * abs(outcome.value)) - core.constant
        result = elimination.search(core.problem, ascent, limit, width, clock.deadline)
    if result.plan is not None:
        plan = core.lift(result.plan)
        if (cost := problem.value(plan)) < outcome.value:
            outcome = replace(outcome, plan=plan, value=cost)
    if (core.counts > 1).any():
        return replace(outcome, lower=min(outcome.lower, outcome.value))
    return replace(outcome, lower=min(outcome.value, max(outcome.lower, core.constant + result.lower)))


def fixed(core: Core, ascent: Ascent, outcome: Outcome, clock: Clock) -> Core:
    """The core without the strategies whose bound exceeds the cost of the best plan, presolved again."""
    limit = outcome.value - core.constant + SLACK * abs(outcome.value)
    keep = tuple(np.flatnonzero(b <= limit) for b in ascent.strategy_bounds)
    if ascent.assignment is not None and ascent.value <= limit:
        lost = [k for k, s in zip(keep, ascent.assignment, strict=True) if s not in k]
        assert not lost, f"{len(lost)} strategy bounds exceed the value {ascent.value} of a plan with those strategies"
    with clock.phase("presolve"):
        return _reduced(replace(core, problem=reparametrise(core.problem, ascent.messages)), keep, LATER_ROUNDS)
