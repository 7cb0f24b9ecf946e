"""How stages that exceed their memory save it: few layers are rematerialised, or little state is offloaded.

    as given              the plan, if every stage fits
    layers alone          the fewest that bisection finds (`autopar.passes.inter_op.recompute`)
    state alone           the largest arguments with as many bytes as are missing; if those do not suffice, the fewest
                          that bisection finds
    all state, and layers if state alone does not suffice, and layers alone take longer than all state

Of all plans that fit, the one with the shortest step is chosen, among equals the first one found -> SavingsSearch.best.
The least peak over all devices is that of no or all layers, with no or all state                 -> smallest
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

from autopar.passes.inter_op.recompute import RECOMPUTE, Counts, RecomputeEffort, fewest_layers, fitting

T = TypeVar("T")

#: Without bisection.
ONCE = RecomputeEffort(rounds=0)


class Savings(NamedTuple):
    """What every stage does to save memory.

    Attributes:
        layers: of every stage, the number of its layers that are rematerialised.
        state: of every stage, the number of steps (`OffloadCandidates.steps`) in which its state is offloaded.
    """

    layers: Counts
    state: Counts


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """A plan of all stages.

    Attributes:
        plan: the plan.
        seconds: of its step.
        peaks: of every stage, bytes per device.
        ranks: of every stage, its rank; stages of one rank share the memory of its devices.
    """

    plan: T
    seconds: float
    peaks: Sequence[float]
    ranks: Sequence[int]

    @cached_property
    def by_rank(self) -> Sequence[float]:
        """Bytes per device of every rank."""
        nbytes: dict[int, float] = defaultdict(float)
        for rank, peak in zip(self.ranks, self.peaks, strict=True):
            nbytes[rank] += peak
        return [nbytes[rank] for rank in sorted(nbytes)]

    @property
    def peak(self) -> float:
        """Bytes per device of the rank with most."""
        return max(self.by_rank)


Planner = Callable[[Savings], Attempt[T]]
"""Plans all stages with these savings, within the memory that the search is for."""


@dataclass(eq=False)
class SavingsSearch(Generic[T]):
    """The search for the fastest plan within a memory limit.

    Attributes:
        nbytes: the limit, bytes per device.
        layers: of every stage, the number of its layers that can be rematerialised.
        state: of every stage, bytes per device that its first, second, ... step of state has.
        planner: plans all stages.
        attempts: plans so far.
    """

    nbytes: float
    layers: Counts
    state: Sequence[Sequence[float]]
    planner: Planner[T]
    attempts: dict[Savings, Attempt[T]] = field(default_factory=dict[Savings, Attempt[T]])

    def best(self) -> T | None:
        """The fastest plan that fits; None if none is found."""
        none = (0,) * len(self.layers)
        layers = self._fewest_layers(none)
        if layers != none and any(self._all_state):
            state = self._fewest_state(self._sufficient()) or self._fewest_state(self._all_state)
            if state is None:
                self._add_layers(math.inf if layers is None else self._attempt(Savings(layers, none)).seconds)
        within = [attempt for attempt in self.attempts.values() if attempt.peak <= self.nbytes]
        return min(within, key=lambda attempt: attempt.seconds).plan if within else None

    @cached_property
    def _all_state(self) -> Counts:
        return tuple(map(len, self.state))

    def _fewest_layers(self, state: Counts) -> Counts | None:
        """The fewest layers with which all stages fit if so much state is offloaded."""
        return fewest_layers(
            len(self.layers), lambda: self.layers, lambda n: self._fits(Savings(n, state), _equal(n, self.layers))
        )

    def _fewest_state(self, most: Counts) -> Counts | None:
        """The fewest steps of state, of at most these, with which all stages fit without rematerialisation."""
        none, effort = (0,) * len(most), RECOMPUTE if most == self._all_state else ONCE
        return fewest_layers(len(most), lambda: most, lambda n: self._fits(Savings(none, n), _equal(n, most)), effort)

    def _sufficient(self) -> Counts:
        """Of every stage the first steps of state that have the bytes that are missing as given, if any suffice."""
        missing = self._missing()
        return tuple(
            next((n for n, nbytes in enumerate(itertools.accumulate(steps), 1) if nbytes >= least), len(steps))
            for steps, least in zip(self.state, missing, strict=True)
        )

    def _missing(self) -> Sequence[float]:
        """Of every stage, bytes per device by which its rank exceeds the limit, as given."""
        given = self._attempt(Savings((0,) * len(self.layers), (0,) * len(self.layers)))
        return [max(0.0, given.by_rank[rank] - self.nbytes) for rank in given.ranks]

    def _add_layers(self, seconds: float) -> None:
        """Plans with all state of the stages that do not fit offloaded, unless they take `seconds` or longer."""
        none = (0,) * len(self.layers)
        fits = self._fits(Savings(none, none), _equal(none, self.layers))
        state = tuple(0 if fit else n for fit, n in zip(fits, self._all_state, strict=True))
        if self._attempt(Savings(none, state)).seconds < seconds:
            self._fewest_layers(state)

    def _fits(self, savings: Savings, raised: Sequence[bool]) -> Sequence[bool]:
        """Whether every stage fits; `raised`: whether it cannot save more in this way."""
        attempt = self._attempt(savings)
        exceeded = [nbytes > self.nbytes for nbytes in attempt.by_rank]
        share = [self.nbytes // attempt.ranks.count(rank) for rank in attempt.ranks]
        over = [peak > nbytes for peak, nbytes in zip(attempt.peaks, share, strict=True)]
        return fitting(attempt.ranks, exceeded, over, raised)

    def _attempt(self, savings: Savings) -> Attempt[T]:
        if savings not in self.attempts:
            self.attempts[savings] = self.planner(savings)
        return self.attempts[savings]


def smallest(layers: Counts, state: Sequence[Sequence[float]], planner: Planner[T]) -> Attempt[T]:
    """The plan with the least peak; arguments as of `SavingsSearch`, whose planner finds least peaks here."""
    none = (0,) * len(layers)
    choices = itertools.product(dict.fromkeys((none, layers)), dict.fromkeys((none, tuple(map(len, state)))))
    return min((planner(Savings(*choice)) for choice in choices), key=lambda attempt: attempt.peak)


def _equal(counts: Counts, most: Counts) -> Sequence[bool]:
    return [n == top for n, top in zip(counts, most, strict=True)]
