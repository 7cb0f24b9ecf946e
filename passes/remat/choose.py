"""Which layers are recomputed, where memory forces something.

    as written     alone if its fastest plan fits
    some layers    the first k of those that have something to drop, by "dots" or by "full", the smallest k whose
                   fastest plan fits: the first, for what they keep lives longest                  -> LayerSearch
    uniform        where even with all of them the fastest plan does not fit, the best that does

What a layer costs and frees is forecast from the plan as written (`autopar.passes.remat.estimates`), and corrected by
every plan that is made, so that k is mostly met at once. The policy with the shorter estimate is planned first, the
other only where its own may be shorter still.
The program as written in layouts that fit comes last, and is given up once it is plain that it takes longer than what
is found: to fit by layouts alone is the hardest of these problems, and seldom the best answer.

Of all that fit the one with the shortest step is taken, of equals the one found first. For the budget "min" it is the
smallest peak, of the program as written and of the one with everything recomputed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Generic, Literal, Protocol, TypeVar

from autopar.errors import MemoryBudgetError
from autopar.passes.remat.estimates import Estimate, Forecast
from autopar.passes.remat.rewrite import DOTS, FULL, NONE, POLICIES

AUTO = "auto"
#: What the option `remat` may be.
CHOICES: tuple[str, ...] = (AUTO, *POLICIES)

#: Policy -> share of a forecast of seconds by which it may be too high: on five models of published sizes up to 0.08
#: for "full", 0.20 for "dots" (0.40 on toys).
OVERESTIMATE: Mapping[str, float] = MappingProxyType({DOTS: 0.3, FULL: 0.1})
LAYER_OVERESTIMATE = 0.05  # share of the forecast bytes of one layer, next to a number of layers that was planned
MATTERS = 0.005  # share of a step below which what another policy promises is not worth its search
HALVED = 3  # every third guess halves what is left, where the peak does not fall evenly

T = TypeVar("T")


#: How far an attempt goes: the fastest plan of all, whether it fits or not; the best plan that fits, unless plainly
#: none does; the best plan that fits, or the proof that none does.
Effort = Literal["fastest", "fitting", "proven"]


@dataclass(frozen=True, eq=False)
class Outcome(Generic[T]):
    """What planning with some layers recomputed came to.

    Attributes:
        policies: what was recomputed.
        made: the plan; None where no plan fits.
        seconds: predicted step time; without a plan inf, or what no plan takes less than.
        peak_bytes: predicted peak per device; without a plan no plan's peak is below.
        fits: there is a plan, and it keeps within the budget.
        pressed: without the budget there would be a faster plan.
        error: the proof that no plan fits.
        hosted: positions of the arguments that wait in the host's memory (`autopar.passes.remat.choose_offload`).
    """

    policies: tuple[str, ...]
    made: T | None
    seconds: float
    peak_bytes: float
    fits: bool
    pressed: bool
    error: MemoryBudgetError | None = None
    hosted: tuple[int, ...] = ()


class Attempt(Protocol[T]):
    """Plans with a policy for each layer; what takes `cutoff` seconds or longer is of no interest."""

    def __call__(self, policies: Sequence[str], effort: Effort, cutoff: float = math.inf) -> Outcome[T]: ...


#: Policy -> what recomputing layers costs and frees, read off the outcome as written; without what is not forecast.
Forecasts = Callable[[Outcome[T]], Mapping[str, Forecast]]


def uniform(policy: str, open_to: Sequence[bool]) -> tuple[str, ...]:
    """One policy for all layers that it changes; empty if it changes none."""
    if policy == NONE or not any(open_to):
        return ()
    return tuple(policy if open_ else NONE for open_ in open_to)


def first(count: int, policy: str, open_to: Sequence[bool]) -> tuple[str, ...]:
    """The policy for the first layers that it changes."""
    chosen = [i for i, open_ in enumerate(open_to) if open_][:count]
    return tuple(policy if i in chosen else NONE for i in range(len(open_to))) if chosen else ()


def notes(policies: Sequence[str]) -> tuple[str, ...]:
    """What a plan says about recomputation: "recomputed in the backward pass, to save memory: 4 of 6 layers (full)"."""
    counts = {policy: sum(p == policy for p in policies) for policy in (FULL, DOTS)}
    parts = [f"{count} of {len(policies)} layers ({policy})" for policy, count in counts.items() if count]
    return (f"recomputed in the backward pass, to save memory: {', '.join(parts)}",) if parts else ()


def choose(attempt: Attempt[T], open_to: Callable[[], Sequence[bool]], budget: float | str) -> Outcome[T]:
    """The best outcome within a budget (bytes per device, or "min").

    `open_to` tells for each layer whether recomputing it helps. Without any plan that fits the outcome has an error, or
    is the one with the smallest peak where the program as written has a plan all the same.
    """
    found = search(attempt, open_to, budget)
    return settle(lambda o: attempt(o.policies, "proven"), found, budget)


def search(
    attempt: Attempt[T],
    open_to: Callable[[], Sequence[bool]],
    budget: float | str,
    cutoff: float = math.inf,
    forecasts: Forecasts[T] = lambda as_written: {},
) -> list[Outcome[T]]:
    """The outcomes among which `choose` chooses, the program as written first.

    What takes `cutoff` seconds or longer is of no interest; then there may be nothing that fits.
    """
    if isinstance(budget, str):
        smallest = [attempt(uniform(FULL, layers), "fitting")] if any(layers := open_to()) else []
        return [attempt((), "fitting"), *smallest]
    free = attempt((), "fastest")
    if free.fits:
        return [free]
    policies = (DOTS, FULL) if any(layers := open_to()) else ()
    forecast = forecasts(free) if policies else {}

    def of(policy: str) -> LayerSearch[T]:
        plan = partial(_first_layers, attempt, policy, layers)
        return LayerSearch(plan, sum(layers), budget, free, forecast.get(policy), OVERESTIMATE[policy])

    searches = sorted(map(of, policies), key=lambda one: (one.insufficient, one.estimate))
    closest = min(searches, key=lambda one: one.least_bytes, default=None)
    for one in searches:
        suffice = [other for other in searches if other.planned and not other.exhausted]
        one.calibrate(suffice)
        shortest = min([cutoff, *(other.estimate for other in suffice)])
        vain = one.insufficient and (shortest < math.inf or one is not closest)
        if one.least_estimate < (1 - MATTERS) * shortest and not vain:
            one.start()
    started = [one for one in searches if one.planned]
    best, found = cutoff, [one.best for one in started]
    for one in sorted(started, key=lambda one: one.estimate):
        if one.estimate < (1 - MATTERS) * best:
            found.append(one.run(best))
        best = min([best, *(o.seconds for o in found if o.fits)])
    as_written = attempt((), "fitting", cutoff=best) if free.seconds < best else free
    return [as_written, *found]


def surcharge(
    tried: Sequence[Outcome[T]], layers: Sequence[bool], budget: float, forecast: Mapping[str, Forecast]
) -> float:
    """Seconds that plans within a budget take more than the program as written, which has none.

    Of each policy they are those that layers took which were too few; or, if more, those that enough are forecast to
    take, less what the forecast may be too high. The policy with the least counts, of those that are forecast to
    suffice. 0 where nothing is forecast.

    Args:
        tried: the program as written, and others with some layers recomputed.
        layers: for each layer whether recomputing it helps.
        budget: bytes per device.
        forecast: of each policy, for that program.
    """
    free, *others = tried

    def least(policy: str) -> float:
        one = _forecast_only(free, layers, budget, forecast[policy], OVERESTIMATE[policy])
        short = [o.seconds for o in others if policy in o.policies and o.made is not None and o.peak_bytes > budget]
        return math.inf if one.insufficient else max(one.least_estimate, *short, 0.0) - free.seconds

    found = min(map(least, forecast), default=math.inf)
    return found if math.isfinite(found) else 0.0


def expected(free: Outcome[T], layers: Sequence[bool], budget: float, forecast: Mapping[str, Forecast]) -> float:
    """About the seconds of the best plan within a budget; inf where no policy is forecast to suffice.

    Args:
        free: the program as written.
        layers, budget, forecast: see `surcharge`.
    """
    if free.fits:
        return free.seconds
    searches = [_forecast_only(free, layers, budget, one) for one in forecast.values()]
    return min((one.estimate for one in searches if not one.insufficient), default=math.inf)


def _forecast_only(
    free: Outcome[T], layers: Sequence[bool], budget: float, forecast: Forecast, overestimate: float = 0.0
) -> LayerSearch[T]:
    """The search of a policy before anything is planned."""

    def unplanned(count: int, effort: Effort, cutoff: float) -> Outcome[T]:
        raise AssertionError("no number of layers is planned")

    return LayerSearch(unplanned, sum(layers), budget, free, forecast, overestimate)


def _first_layers(
    attempt: Attempt[T], policy: str, layers: Sequence[bool], count: int, effort: Effort, cutoff: float
) -> Outcome[T]:
    """An attempt with a policy for the first layers."""
    return attempt(first(count, policy, layers), effort, cutoff)


def settle(prove: Callable[[Outcome[T]], Outcome[T]], found: Sequence[Outcome[T]], budget: float | str) -> Outcome[T]:
    """The best of these outcomes, the first of them that of the program as written; see `choose`.

    Where that has a plan though nothing fits, the one that comes closest without more in the host's memory is the best.

    `prove` repeats an attempt until it has a plan that fits or the proof that none does.
    """
    if isinstance(budget, str):
        return min(found, key=lambda o: (o.peak_bytes, o.seconds))
    fitting = [o for o in found if o.fits]
    if fitting:
        return min(fitting, key=lambda o: o.seconds)
    if found[0].made is None:
        return _refusal(prove, found)
    closest = min((o for o in found if o.hosted == found[0].hosted), key=lambda o: o.peak_bytes)
    return closest if closest is found[0] else prove(closest)


class LayerSearch(Generic[T]):
    """The search for the fewest layers that one policy has to recompute, the first ones first.

    Seconds and peak with k layers recomputed are those of the nearest numbers that were planned. Between and beyond
    them they follow the forecast, scaled to meet the plans.

    Args:
        plan: the outcome with so many layers recomputed; what takes the cutoff or longer is of no interest.
        layers: how many may be recomputed.
        budget: bytes per device.
        free: the outcome with none.
        forecast: what each layer costs and frees; None: all the same, for which all of them are planned at once.
        overestimate: share of the forecast seconds by which they may be too high.

    Attributes:
        insufficient: all layers are forecast to be too few, whatever the layouts.
        least_bytes: forecast to stay at the peak with all of them, at least.
    """

    def __init__(
        self,
        plan: Callable[[int, Effort, float], Outcome[T]],
        layers: int,
        budget: float,
        free: Outcome[T],
        forecast: Forecast | None = None,
        overestimate: float = 0.0,
    ) -> None:
        self._plan, self._layers, self._budget, self._overestimate = plan, layers, budget, overestimate
        self._outcomes = {0: free}
        each = [Estimate(1.0, 1.0)] * layers if forecast is None else forecast.layers
        self._seconds = (0.0, *itertools.accumulate(max(e.seconds, 0.0) for e in each))
        self._bytes = (0.0, *itertools.accumulate(max(e.nbytes, 0.0) for e in each))
        self.least_bytes = 0.0 if forecast is None else forecast.least_bytes
        self.insufficient = self.least_bytes > budget
        self._forecast = forecast is not None
        self._prior = 1.0  # bytes freed for each that is forecast, until a plan tells
        if forecast is None:
            self._try(layers)

    @property
    def planned(self) -> bool:
        """Whether any number of layers was."""
        return len(self._outcomes) > 1

    @property
    def exhausted(self) -> bool:
        """Whether even the fastest plan with all layers recomputed does not fit."""
        return self._low == self._layers

    @property
    def best(self) -> Outcome[T]:
        """Of the outcomes so far the one with the fewest layers that fits, or that with the most."""
        return self._outcomes[max(self._outcomes) if self._high is None else self._high]

    @property
    def estimate(self) -> float:
        """About how many seconds the best outcome takes."""
        return self._at(self._count())

    @property
    def least_estimate(self) -> float:
        """The same, less what a forecast that no plan has corrected may be too high."""
        if self.planned:
            return self.estimate
        free = self._outcomes[0].seconds
        return free + (1 - self._overestimate) * (self.estimate - free)

    def calibrate(self, others: Sequence[LayerSearch[T]]) -> None:
        """Take forecasts of bytes to be as far off as those of other policies were: what remains at a peak is alike."""
        if others and not self.planned:
            self._prior = min(other._scale for other in others)

    def start(self) -> None:
        """Plan with as many layers as are forecast to suffice, unless some number was planned."""
        if not self.planned:
            self._try(self._layers if self.insufficient else self._count())

    def run(self, cutoff: float = math.inf) -> Outcome[T]:
        """The outcome with the fewest layers whose fastest plan fits, or the best that fits with all.

        One layer fewer that is not likely to fit is not tried if it hardly matters, nor if the forecast is clear.
        What takes `cutoff` seconds or longer is of no interest.
        """
        for turn in itertools.count():
            low, high = self._low, self._high
            if self.exhausted:
                return self._plan(low, "fitting", cutoff)
            if high is None:
                self._try(self._count())
                continue
            guess = (low + high) // 2 if turn % HALVED == HALVED - 1 else self._count()
            hardly = self._at(high) - self._at(high - 1) <= MATTERS * self.best.seconds
            if high - low <= 1 or (guess == high and (hardly or self._is_least(high))):
                break
            self._try(min(guess, high - 1))
        return self.best

    @property
    def _low(self) -> int:
        """The most layers that were planned and are too few."""
        return max(k for k, outcome in self._outcomes.items() if not outcome.fits)

    @property
    def _high(self) -> int | None:
        """The fewest layers that were planned and suffice."""
        return min((k for k, outcome in self._outcomes.items() if outcome.fits), default=None)

    def _try(self, count: int) -> None:
        self._outcomes[count] = self._plan(count, "fastest", math.inf)

    def _around(self) -> tuple[int, int]:
        """Two planned numbers of layers that the forecast is scaled by, the last two; equal if only 0 was planned."""
        low, high = self._low, self._high
        return (low, high) if high is not None else (max((k for k in self._outcomes if k < low), default=0), low)

    @property
    def _scale(self) -> float:
        """Bytes freed for each that is forecast."""
        a, b = self._around()
        freed = self._outcomes[a].peak_bytes - self._outcomes[b].peak_bytes
        forecast = self._bytes[b] - self._bytes[a]
        return max(freed, 0.0) / forecast if forecast > 0 else self._prior

    def _count(self) -> int:
        """The fewest layers that should suffice; all of them if none do."""
        low, scale = self._low, self._scale
        over = self._outcomes[low].peak_bytes - self._budget
        most = self._layers if self._high is None else self._high
        enough = (k for k in range(low + 1, most) if scale * (self._bytes[k] - self._bytes[low]) >= over)
        return next(enough, most)

    def _is_least(self, high: int) -> bool:
        """Whether one layer fewer than these, which suffice, is too few by the forecast of that layer alone."""
        freed = min(self._scale, 1.0) * (self._bytes[high] - self._bytes[high - 1])
        return self._forecast and self._outcomes[high].peak_bytes + (1 - LAYER_OVERESTIMATE) * freed > self._budget

    def _at(self, count: int) -> float:
        """About how many seconds the plan with so many layers takes."""
        a, b = self._around()
        dearer, forecast = self._outcomes[b].seconds - self._outcomes[a].seconds, self._seconds[b] - self._seconds[a]
        scale = max(dearer, 0.0) / forecast if forecast > 0 else 1.0
        return self._outcomes[a].seconds + scale * (self._seconds[count] - self._seconds[a])


def _refusal(prove: Callable[[Outcome[T]], Outcome[T]], found: Sequence[Outcome[T]]) -> Outcome[T]:
    """The outcome whose smallest plan is the smallest of all, its error with a bound on the plans of all."""
    closest: MemoryBudgetError | None = None
    bounds: list[int] = []
    best = found[0]
    for outcome in sorted(found, key=lambda o: o.peak_bytes):
        if closest is not None and outcome.peak_bytes >= closest.least_bytes:
            bounds.append(math.floor(outcome.peak_bytes))
            continue
        proven = outcome if outcome.error is not None else prove(outcome)
        assert proven.error is not None
        bounds.append(proven.error.bound_bytes)
        if closest is None or proven.error.least_bytes < closest.least_bytes:
            best, closest = proven, proven.error
    assert closest is not None
    error = MemoryBudgetError(str(closest), closest.budget, closest.least_bytes, min(bounds))
    return replace(best, error=error)
