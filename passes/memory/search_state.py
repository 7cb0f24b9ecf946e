"""State of a search under a memory budget: the rows added so far, the incumbent, and the lower bound.

`RowSource.peak` evaluates every submitted plan on all rows. A plan that exceeds the budget adds the rows that it
violates, and the next round of the search has these rows as constraints.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.cost_models.memory.row import Row, RowSource
from autopar.ir.problem import Ints, Problem
from autopar.passes.solver.reduced_problem import CLOSED


@dataclass(frozen=True, slots=True)
class SearchEffort:
    """Limits of the search under a memory budget."""

    # most rounds, each of which but the last adds rows (not recorded; `bench sensitivity`, 2026-11: no effect on small
    # programs)
    rounds: int = 4
    # most relaxations of a round, each of which but the last adds rows (settled on the zoo)
    relaxations: int = 20
    # most plans of a pool from which local search starts, besides the cheapest that fits (settled on the zoo; `bench
    # sensitivity`, 2026-11: doubled: 13% more time)
    descents: int = 6
    # most plans of one pool that are evaluated on all rows before the presolve runs again (settled on the zoo; `bench
    # sensitivity`, 2026-11: no effect on small programs)
    submitted: int = 4


SEARCH = SearchEffort()


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Which plans end a search although their gap is above the target.

    Attributes:
        seconds: a plan that takes at most so long is accepted,
        excess: if it takes at most so many seconds more than the lower bound.
    """

    seconds: float = -np.inf
    excess: float = 0.0


#: No plan ends a search before the gap is at most the target.
NONE_ACCEPTED = Acceptance()


@dataclass(slots=True, eq=False)
class SearchState:
    """The state of one search. Costs are in seconds per step, memory is in bytes per device.

    Attributes:
        problem: the problem before symmetry reduction.
        source: the memory rows of `problem`.
        budget: limit on the peak (bytes).
        target: relative gap at which the search ends.
        deadline: time at which the search ends, on the clock of `time.monotonic()`.
        first_deadline: time at which it ends while no plan that fits is known, if that is later.
        rows: the memory rows added so far, one per program point.
        plan: the incumbent, that is the best plan found that fits: strategy per node, shape (nodes,); or None.
        seconds: cost of the incumbent, inf without one. A search for plans below a cutoff starts at the cutoff.
        peak: exact peak of the incumbent (bytes), inf without one.
        lower: lower bound (s) on the cost of every plan that fits.
        multipliers: name of a row -> multiplier (s/byte), positive ones only, at which `lower` was reached.
        start_plans: plans from which the pools of plans start.
        accepted: plans that end the search.
        fold: share decisions among equal layers.
        full: eliminate dominated strategies as well, not only infeasible ones.
        effort: limits of one round of `search.search`.
    """

    problem: Problem
    source: RowSource
    budget: float
    target: float
    deadline: float
    first_deadline: float = -np.inf
    rows: list[Row] = field(default_factory=list)
    plan: Ints | None = None
    seconds: float = np.inf
    peak: float = np.inf
    lower: float = -np.inf
    multipliers: dict[str, float] = field(default_factory=dict)
    start_plans: list[Ints] = field(default_factory=list)
    accepted: Acceptance = NONE_ACCEPTED
    fold: bool = True
    full: bool = True
    effort: SearchEffort = SEARCH

    def add_rows(self, rows: Iterable[Row]) -> bool:
        """Add the rows whose names are new. Returns whether there was one."""
        names = {row.name for row in self.rows}
        before = len(self.rows)
        for row in rows:
            if row.name not in names:
                names.add(row.name)
                self.rows.append(row)
        return len(self.rows) > before

    def submit(self, assignment: Ints) -> bool:
        """Evaluate a plan on all rows. Returns whether it is feasible and fits.

        A plan that fits and is cheaper than the incumbent replaces it. At equal cost, the smaller peak wins. A plan
        that does not fit adds the rows that it violates.
        """
        seconds = self.problem.value(assignment)
        if not np.isfinite(seconds):
            return False
        peak, row = self.source.peak(assignment)
        if peak > self.budget:
            self.add_rows([row, *self.source.over(assignment, self.budget)])
            return False
        if seconds < self.seconds or (seconds == self.seconds and peak < self.peak):
            self.plan, self.seconds, self.peak = assignment, seconds, peak
        return True

    def forget_plan(self) -> None:
        """Go on without an incumbent."""
        self.plan, self.seconds, self.peak = None, np.inf, np.inf

    def bound(self, lower: float, rows: Sequence[Row] = (), multipliers: Sequence[float] = ()) -> None:
        """Record a valid lower bound (s) if it is higher, with the multipliers (s/byte) of `rows` that reach it."""
        if lower > self.lower:
            self.lower = lower
            if rows:
                self.multipliers = {row.name: float(p) for row, p in zip(rows, multipliers, strict=True) if p > 0}

    @property
    def gap(self) -> float:
        """(seconds - lower) / seconds; 0 if that is below `CLOSED`, inf without an incumbent."""
        if not np.isfinite(self.seconds):
            return np.inf
        gap = (self.seconds - self.lower) / max(abs(self.seconds), np.finfo(float).tiny)
        return 0.0 if gap < CLOSED else gap

    @property
    def is_accepted(self) -> bool:
        """Whether the incumbent ends the search although its gap is above the target."""
        is_fast = self.seconds <= self.accepted.seconds and self.seconds - self.lower <= self.accepted.excess
        return self.plan is not None and is_fast

    @property
    def done(self) -> bool:
        """Whether the gap is at most `target`, the incumbent is accepted, or the deadline has passed."""
        return self.gap <= self.target or self.is_accepted or self.late

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.until

    @property
    def until(self) -> float:
        """The deadline that holds now."""
        return self.deadline if np.isfinite(self.seconds) else max(self.deadline, self.first_deadline)

    @property
    def left(self) -> float:
        """Seconds until the deadline, 0 after it."""
        return max(0.0, self.until - time.monotonic())
