"""What a search under a budget knows so far: the rows met, the best plan that fits, and the bound on all that do.

Every plan offered is judged by `RowSource.peak`, exactly. One that does not fit tells the row on which it fails, which
the next round then knows.
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
class Hunt:
    """The state of one search; seconds and bytes per device.

    Attributes:
        problem, source: unfolded.
        budget: bytes.
        target: relative gap at which the search may end.
        deadline: of `time.monotonic()`.
        patience: seconds that the search for a plan that fits may take, whatever the deadline.
        rows: the program points known, each once.
        plan, seconds, peak: the best plan that fits.
        lower: bound (s) on every plan that fits.
        prices: s/byte, by name of row, where the bound was reached.
        seen: plans to start from.
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
    prices: dict[str, float] = field(default_factory=dict)
    seen: list[Ints] = field(default_factory=list)
    patience: float = 0.0

    def learn(self, rows: Iterable[Row]) -> bool:
        """Add rows; whether any is new."""
        names = {row.name for row in self.rows}
        before = len(self.rows)
        for row in rows:
            if row.name not in names:
                names.add(row.name)
                self.rows.append(row)
        return len(self.rows) > before

    def offer(self, assignment: Ints) -> bool:
        """Judge an unfolded plan, and say whether it fits.

        One that fits and is cheaper becomes the best; of one that does not fit, rows are learnt.
        """
        seconds = self.problem.value(assignment)
        if not np.isfinite(seconds):
            return False
        peak, row = self.source.peak(assignment)
        if peak > self.budget:
            self.learn([row, *self.source.over(assignment, self.budget)])
            return False
        if seconds < self.seconds or (seconds == self.seconds and peak < self.peak):
            self.plan, self.seconds, self.peak = assignment, seconds, peak
        return True

    def bound(self, lower: float, rows: Sequence[Row] = (), prices: Sequence[float] = ()) -> None:
        """A valid bound (s), reached with these prices on these rows, if with any."""
        if lower > self.lower:
            self.lower = lower
            if rows:
                self.prices = {row.name: float(p) for row, p in zip(rows, prices, strict=True) if p > 0}

    @property
    def gap(self) -> float:
        """Relative to the best plan; inf without one."""
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
