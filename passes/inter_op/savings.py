"""How stages that exceed their memory save it: few layers are rematerialised, or little state is offloaded.

    as given              the plan, if every stage fits
    layers alone          the fewest that bisection finds (`autopar.passes.inter_op.recompute`)
    state alone           the largest arguments with as many bytes as are missing; if those do not suffice, the fewest
                          that bisection finds
    all state, and layers if state alone does not suffice, and layers alone take longer than all state

Copies over the host's link are slow, and each attempt plans all stages. The last two are tried only if no layers
suffice, or if a forecast is shorter than the step L with layers alone by a share `OffloadSearchEffort.min_gain`. G is
the step as given, and s the share of the missing bytes that state has:

    state alone           G + copies of these bytes                                         -> SavingsSearch._forecasts
    all state, and layers G + copies of these bytes + (1 - s) * (L - G)

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
from autopar.passes.remat.choose_offload import OFFLOAD

T = TypeVar("T")
V = TypeVar("V")

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
        return [sum(peaks) for peaks in _by_rank(self.ranks, self.peaks)]

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
        copying: (stage, bytes per device) -> s to copy them to the device and back.
        attempts: plans so far.
    """

    nbytes: float
    layers: Counts
    state: Sequence[Sequence[float]]
    planner: Planner[T]
    copying: Callable[[int, float], float]
    attempts: dict[Savings, Attempt[T]] = field(default_factory=dict[Savings, Attempt[T]])

    def best(self) -> T | None:
        """The fastest plan that fits; None if none is found."""
        none = (0,) * len(self.layers)
        layers = self._fewest_layers(none)
        if layers != none and any(self._all_state):
            alone = math.inf if layers is None else self._attempt(Savings(layers, none)).seconds
            least, forecast = self._forecasts(alone)
            longest = alone * (1 - OFFLOAD.min_gain)
            suffices = least < longest and (
                self._fewest_state(self._sufficient()) or self._fewest_state(self._all_state)
            )
            if not suffices and (layers is None or forecast < longest):
                self._add_layers(alone)
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
        return tuple(
            next((n for n, nbytes in enumerate(itertools.accumulate(steps), 1) if nbytes >= missing), len(steps))
            for steps, missing in zip(self.state, (self._missing[rank] for rank in self._given.ranks), strict=True)
        )

    @property
    def _given(self) -> Attempt[T]:
        return self._attempt(Savings((0,) * len(self.layers), (0,) * len(self.layers)))

    @property
    def _missing(self) -> Sequence[float]:
        """Bytes per device by which every rank exceeds the limit, as given."""
        return [max(0.0, nbytes - self.nbytes) for nbytes in self._given.by_rank]

    def _forecasts(self, alone: float) -> tuple[float, float]:
        """Forecasts of the step (s) with state offloaded, and with layers for the bytes that it does not have.

        `alone`: seconds of the step with layers alone.
        """
        given, share, copies = self._given, 1.0, 0.0
        for missing, stages in zip(self._missing, _by_rank(self._given.ranks, range(len(self.layers))), strict=True):
            available = sum(sum(self.state[s]) for s in stages)
            moved = min(missing, available)
            share = min(share, moved / missing) if missing else share
            seconds = (self.copying(s, sum(self.state[s]) * moved / available) for s in stages if available)
            copies = max(copies, sum(seconds))
        least = given.seconds + copies
        return least, least + (1 - share) * (alone - given.seconds) if share < 1 else least

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


def _by_rank(ranks: Sequence[int], of_stages: Sequence[V]) -> Sequence[Sequence[V]]:
    """Of every rank, the entries of its stages."""
    entries: dict[int, list[V]] = defaultdict(list)
    for rank, entry in zip(ranks, of_stages, strict=True):
        entries[rank].append(entry)
    return [entries[rank] for rank in sorted(entries)]


def _equal(counts: Counts, most: Counts) -> Sequence[bool]:
    return [n == top for n, top in zip(counts, most, strict=True)]
