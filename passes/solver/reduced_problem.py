"""The reduced problem, which shrinks as bounds remove strategies from it.

    reduce          eliminate dead ends and contract nodes of low degree; `ReducedProblem.lift` maps plans back
                                                                                                       -> presolve
    incumbent       the best plan so far, and the lower bound on all plans                             -> Incumbent
    bound           lower bound and plans by dual ascent                                               -> _bound
    eliminate       plans and bounds by elimination, from the messages of the ascent                   -> _eliminated
    fix             remove strategies whose bound exceeds the cost of the incumbent, presolve again    -> fixed
    fix by bounds   bound, eliminate and fix in turn, while that shrinks the problem                   -> fix_by_bounds

For every plan that the reduced problem lacks, either the reduced problem has a plan that costs no more, or the
incumbent costs less. The minimum of the lower bound of the reduced problem and the cost of the incumbent is therefore a
lower bound on all plans.
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


@dataclass(frozen=True, slots=True)
class ReductionEffort:
    """How long the problem is reduced before an ILP is asked."""

    # sweeps of dead-end elimination at the start (settled on the zoo; `bench sensitivity`, 2026-11: no effect on small
    # programs)
    first_rounds: int = 8
    # sweeps of dead-end elimination after strategies were fixed by bounds (settled on the zoo)
    later_rounds: int = 2
    # fixing is repeated while it leaves at most this share of the strategies; below 1, or it never ends (settled on
    # the zoo)
    kept: float = 0.75
    # most states per node of the elimination after each ascent (settled on the zoo; `bench sensitivity`, 2026-11: no
    # effect on small programs)
    narrow: int = 256
    # most states per node of the elimination after the last ascent (settled on the zoo)
    wide: int = 8192


REDUCTION = ReductionEffort()


PHASES = ("fold", "presolve", "bound", "eliminate", "ilp")

Lift = Callable[[Ints], Ints]


@dataclass(frozen=True, slots=True, eq=False)
class ReducedProblem:
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
class Incumbent:
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


def presolve(
    folded: Folded, clock: Clock, rounds: int | None = None, *, raw: bool = False, effort: ReductionEffort = REDUCTION
) -> ReducedProblem:
    """The reduced problem of a folded problem.

    Args:
        folded: the folded problem.
        clock: charged for the phase "presolve".
        rounds: sweeps of dead-end elimination; those of `effort` when None.
        raw: remove only infeasible strategies, and contract nothing.
        effort: gives the sweeps.

    Raises:
        SolverError: no plan is feasible; the message names nodes.
    """
    whole = ReducedProblem(folded.problem, folded.counts, folded.pairings, 0.0, lambda plan: plan)
    with clock.phase("presolve"):
        if not raw:
            return _ordered(_reduced(whole, None, effort.first_rounds if rounds is None else rounds))
        reduced = eliminate(folded.problem, rounds=0)
        return replace(whole, problem=reduced.problem, lift=reduced.lift)


def _reduced(start: ReducedProblem, strategies: tuple[Ints, ...] | None, rounds: int) -> ReducedProblem:
    """Eliminate dead ends, contract nodes of low degree, and eliminate infeasible strategies again."""
    pruned = eliminate(start.problem, rounds, strategies)
    smaller = contract(pruned.problem, start.pairings, start.counts)
    left = eliminate(smaller.problem, rounds=0)

    def lift(plan: Ints) -> Ints:
        return start.lift(pruned.lift(smaller.lift(left.lift(plan))))

    return ReducedProblem(left.problem, smaller.counts, smaller.pairings, start.constant + smaller.constant, lift)


def _ordered(reduced: ReducedProblem) -> ReducedProblem:
    """The problem with its nodes in an order with a narrow frontier, in which ascents converge sooner as well."""
    problem, nodes, place = elimination.ordered(reduced.problem)
    return replace(reduced, problem=problem, counts=reduced.counts[nodes], lift=lambda plan: reduced.lift(plan[place]))


def fix_by_bounds(
    problem: Problem,
    reduced: ReducedProblem,
    incumbent: Incumbent,
    clock: Clock,
    gap: float = CLOSED,
    until: float = 0.0,
    cutoff: float = np.inf,
    *,
    once: bool = False,
    effort: ReductionEffort = REDUCTION,
) -> tuple[ReducedProblem, Ascent, Incumbent]:
    """Bound, eliminate and fix in turn, while that shrinks the problem and the gap is too large.

    Args:
        problem: the folded problem.
        reduced: its reduced problem.
        incumbent: the best plan of `problem` so far, and the bound.
        clock: ends the loop.
        gap: relative gap at which to stop.
        until: relative gap at which a dual ascent ends.
        cutoff: s; stop once it is proven that no plan costs less.
        once: bound and eliminate only once, and fix nothing.
        effort: how wide eliminations are, and when fixing ends.

    Returns:
        The reduced, the last ascent on it, and the incumbent.
    """
    size = 2 * reduced.problem.variables  # so that the first reduced counts as shrunk
    while True:
        ascent, incumbent = _bound(problem, reduced, incumbent, clock, until, cutoff)
        incumbent = _eliminated(problem, reduced, ascent, incumbent, clock, cutoff, effort.narrow)
        if once or incumbent.within(max(gap, CLOSED)) or not np.isfinite(incumbent.value) or incumbent.reaches(cutoff):
            return reduced, ascent, incumbent
        if reduced.problem.variables > effort.kept * size or clock.left <= 0:
            return reduced, ascent, _eliminated(problem, reduced, ascent, incumbent, clock, cutoff, effort.wide)
        size = reduced.problem.variables
        reduced = fixed(reduced, ascent, incumbent, clock, effort)


def _bound(
    problem: Problem, reduced: ReducedProblem, incumbent: Incumbent, clock: Clock, until: float, cutoff: float
) -> tuple[Ascent, Incumbent]:
    """A dual ascent on the reduced problem, and the incumbent with its plan, if better, and its lower bound."""
    with clock.phase("bound"):
        known_cost = incumbent.value - reduced.constant
        gap = Gap(until, reduced.constant)
        ascent = ascend(
            reduced.problem,
            counts=reduced.counts,
            upper=known_cost,
            deadline=clock.deadline,
            enough=gap,
            limit=cutoff - reduced.constant,
        )
    plan, value = incumbent.plan, incumbent.value
    if ascent.assignment is not None:
        lifted = reduced.lift(ascent.assignment)
        if (cost := problem.value(lifted)) < value:
            plan, value = lifted, cost
    lower = min(value, max(incumbent.lower, reduced.constant + ascent.lower))
    return ascent, replace(incumbent, plan=plan, value=value, lower=lower)


def _eliminated(
    problem: Problem,
    reduced: ReducedProblem,
    ascent: Ascent,
    incumbent: Incumbent,
    clock: Clock,
    cutoff: float,
    width: int,
) -> Incumbent:
    """The incumbent after elimination with at most `width` states per node.

    The bound of the elimination is used only if no class has several members: otherwise it holds for plans with equal
    strategies for equal layers only.
    """
    if incumbent.closed or not np.isfinite(incumbent.value) or incumbent.reaches(cutoff) or clock.left <= 0:
        return incumbent
    with clock.phase("eliminate"):
        # slightly below the cost of the best plan, so that equal plans are dropped
        limit = min(cutoff, incumbent.value - CLOSED / 2 * abs(incumbent.value)) - reduced.constant
        result = elimination.search(reduced.problem, ascent, limit, width, clock.deadline)
    if result.plan is not None:
        plan = reduced.lift(result.plan)
        if (cost := problem.value(plan)) < incumbent.value:
            incumbent = replace(incumbent, plan=plan, value=cost)
    if (reduced.counts > 1).any():
        return replace(incumbent, lower=min(incumbent.lower, incumbent.value))
    return replace(incumbent, lower=min(incumbent.value, max(incumbent.lower, reduced.constant + result.lower)))


def fixed(
    reduced: ReducedProblem,
    ascent: Ascent,
    incumbent: Incumbent,
    clock: Clock,
    effort: ReductionEffort = REDUCTION,
) -> ReducedProblem:
    """The reduced without the strategies whose bound exceeds the cost of the best plan, presolved again."""
    limit = incumbent.value - reduced.constant + SLACK * abs(incumbent.value)
    keep = tuple(np.flatnonzero(b <= limit) for b in ascent.strategy_bounds)
    if ascent.assignment is not None and ascent.value <= limit:
        lost = [k for k, s in zip(keep, ascent.assignment, strict=True) if s not in k]
        assert not lost, f"{len(lost)} strategy bounds exceed the value {ascent.value} of a plan with those strategies"
    with clock.phase("presolve"):
        moved = replace(reduced, problem=reparametrise(reduced.problem, ascent.messages))
        return _reduced(moved, keep, effort.later_rounds)
