"""State of a search under a memory budget: the rows added so far, the incumbent, and the lower bound.

Every submitted plan is evaluated exactly by `RowSource.peak`. A plan that does not fit adds the rows that it violates,
which the next round of the search then knows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.cost_models.memory.row import Row, RowSource
from autopar.ir.problem import Ints, Problem

CLOSED = 1e-9  # relative gap that counts as none


@dataclass(slots=True, eq=False)
class SearchState:
    """The state of one search. Costs are in seconds per step, memory is in bytes per device.

    Attributes:
        problem: before symmetry reduction.
        source: the memory rows of `problem`.
        budget: bytes.
        target: relative gap at which the search may end.
        deadline: of `time.monotonic()`.
        patience: seconds that the search for a first plan that fits may take beyond the deadline.
        rows: the memory rows added so far, one per program point.
        plan, seconds, peak: the incumbent, that is the best plan that fits.
        lower: lower bound (s) on every plan that fits.
        multipliers: name of a row -> s/byte, where the bound was reached.
        start_plans: plans to start from.
    """

    problem: Problem
    source: RowSource
    budget: float
    target: float
    deadline: float
    rows: list[Row] = field(default_factory=list)
    plan: Ints | None = None
    seconds: float = np.inf
    peak: float = np.inf
    lower: float = -np.inf
    multipliers: dict[str, float] = field(default_factory=dict)
    start_plans: list[Ints] = field(default_factory=list)
    patience: float = 0.0

    def add_rows(self, rows: Iterable[Row]) -> bool:
        """Add rows; whether any is new."""
        names = {row.name for row in self.rows}
        before = len(self.rows)
        for row in rows:
            if row.name not in names:
                names.add(row.name)
                self.rows.append(row)
        return len(self.rows) > before

    def submit(self, assignment: Ints) -> bool:
        """Evaluate a plan on all rows; whether it fits.

        A plan that fits and is cheaper becomes the incumbent. A plan that does not fit adds the rows that it violates.
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

    def bound(self, lower: float, rows: Sequence[Row] = (), multipliers: Sequence[float] = ()) -> None:
        """Record a valid lower bound (s), and the multipliers on these rows at which it was reached."""
        if lower > self.lower:
            self.lower = lower
            if rows:
                self.multipliers = {row.name: float(p) for row, p in zip(rows, multipliers, strict=True) if p > 0}

    @property
    def gap(self) -> float:
        """Relative gap between the incumbent and the bound; inf without an incumbent."""
        if not np.isfinite(self.seconds):
            return np.inf
        gap = (self.seconds - self.lower) / max(abs(self.seconds), np.finfo(float).tiny)
        return 0.0 if gap < CLOSED else gap

    @property
    def done(self) -> bool:
        return self.gap <= self.target or self.late

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - time.monotonic())
