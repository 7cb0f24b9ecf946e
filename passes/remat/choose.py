"""Which layers are rematerialised if the program as written does not fit into memory.

    as written     the only candidate if its fastest plan fits
    some layers    the first k recomputable layers, by "dots" or by "full", for the smallest k whose fastest plan fits;
                   the first layers, because their residuals live longest                          -> LayerSearch
    layouts        if even with all of them the fastest plan does not fit, the best plan that does, with the number of
                   layers whose fastest plan has the least peak, or else with all

Costs and freed bytes of a layer are forecast from the plan as written (`autopar.passes.remat.estimates`). Every further
plan corrects the forecasts, so that the first guess of k is mostly right. The policy with the shorter estimated step is
planned first, the other one only if its estimate is shorter than that result.
Plans of the program as written whose layouts fit come last, and the search for them ends as soon as a bound shows that
they take longer than the best result: to fit by layouts alone is the hardest of these problems, and seldom the best
answer.

Of all plans that fit, the one with the shortest step is chosen, among equals the first one found. For the budget "min"
it is the one with the smallest peak, of the program as written and of the one with everything rematerialised.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Generic, Literal, Protocol, TypeVar

from autopar.errors import AutoparError, MemoryBudgetError
from autopar.passes.remat.estimates import Estimate, Forecast
from autopar.passes.remat.rewrite import DOTS, FULL, NONE, POLICIES

AUTO = "auto"
#: Values of the option `remat`.
CHOICES: tuple[str, ...] = (AUTO, *POLICIES)

#: Policy -> share of forecast seconds by which a forecast may be too high: on five models of published sizes up to 0.08
#: for "full", 0.20 for "dots" (0.40 on toys).
OVERESTIMATE: Mapping[str, float] = MappingProxyType({DOTS: 0.3, FULL: 0.1})


@dataclass(frozen=True, slots=True)
class RematSearchEffort:
    """How far the numbers of layers to rematerialise are searched."""

    # share of the forecast bytes of one layer by which they may be too high, next to a number of layers that was
    # planned (not measured)
    layer_overestimate: float = 0.05
    # relative gain of step time that the estimate of another plan must promise for it to be searched (not recorded;
    # `bench sensitivity`, 2026-11: no effect on small programs)
    min_gain: float = 0.005
    # every so many guesses, one bisects the remaining numbers of layers, in case the peak does not fall as forecast
    # (not recorded; `bench sensitivity`, 2026-11: no effect on small programs)
    bisect_every: int = 3


REMAT = RematSearchEffort()


T = TypeVar("T")


#: How far an attempt goes: the fastest plan, whether it fits or not; the best plan that fits, unless bounds soon show
#: that there is none; the best plan that fits, or the proof that there is none.
Effort = Literal["fastest", "fitting", "proven"]


@dataclass(frozen=True, eq=False)
class RematResult(Generic[T]):
    """The result of planning with some layers rematerialised.

    Attributes:
        policies: the policy of each layer.
        plan: None if no plan fits.
        seconds: predicted step time; without a plan inf, or a lower bound on all plans.
        peak_bytes: predicted peak per device; without a plan a lower bound on the peaks of all plans.
        fits: whether there is a plan within the budget.
        constrained: whether a plan without the budget would be faster.
        error: the proof that no plan fits.
        offloaded: positions of the arguments in host memory between steps (`autopar.passes.remat.choose_offload`).
        prove: gives the proof, which takes a search, if no plan of any policies fits; None of a single attempt.
    """

    policies: tuple[str, ...]
    plan: T | None
    seconds: float
    peak_bytes: float
    fits: bool
    constrained: bool
    error: MemoryBudgetError | None = None
    offloaded: tuple[int, ...] = ()
    prove: Callable[[], MemoryBudgetError] | None = None


class Unfit(AutoparError):
    """No plan fits into the budget of the user.

    Attributes:
        prove: gives the error for the user, with the smallest plan and a bound on all plans, which takes a search.
    """

    def __init__(self, prove: Callable[[], MemoryBudgetError]) -> None:
        super().__init__("no plan fits into the memory budget")
        self.prove = prove


class Attempt(Protocol[T]):
    """Plans with a policy for each layer; plans of `cutoff` seconds or more may be missed."""

    def __call__(self, policies: Sequence[str], effort: Effort, cutoff: float = math.inf) -> RematResult[T]: ...


#: Result of the program as written -> policy -> costs and freed bytes of layers, for the policies with a forecast.
Forecasts = Callable[[RematResult[T]], Mapping[str, Forecast]]


def uniform(policy: str, recomputable: Sequence[bool]) -> tuple[str, ...]:
    """The policy for all recomputable layers, "none" for others; empty if no layer changes."""
    if policy == NONE or not any(recomputable):
        return ()
    return tuple(policy if is_recomputable else NONE for is_recomputable in recomputable)


def first_layers(count: int, policy: str, recomputable: Sequence[bool]) -> tuple[str, ...]:
    """The policy for the first `count` recomputable layers."""
    chosen = [i for i, is_recomputable in enumerate(recomputable) if is_recomputable][:count]
    return tuple(policy if i in chosen else NONE for i in range(len(recomputable))) if chosen else ()


def notes(policies: Sequence[str]) -> tuple[str, ...]:
    """The note of a plan: "recomputed in the backward pass, to save memory: 4 of 6 layers (full)"."""
    counts = {policy: sum(p == policy for p in policies) for policy in (FULL, DOTS)}
    parts = [f"{count} of {len(policies)} layers ({policy})" for policy, count in counts.items() if count]
    return (f"recomputed in the backward pass, to save memory: {', '.join(parts)}",) if parts else ()


def choose(attempt: Attempt[T], recomputable: Callable[[], Sequence[bool]], budget: float | str) -> RematResult[T]:
    """The best result within a budget (bytes per device, or "min").

    `recomputable` returns for each layer whether rematerialising it frees memory. If no plan fits, the result can
    prove it; if the program as written has a plan anyway, it is the one with the smallest peak.
    """
    results = search(attempt, recomputable, budget)
    return best_result(lambda o: attempt(o.policies, "proven"), results, budget)


def search(
    attempt: Attempt[T],
    recomputable: Callable[[], Sequence[bool]],
    budget: float | str,
    cutoff: float = math.inf,
    forecasts: Forecasts[T] = lambda as_written: {},
) -> list[RematResult[T]]:
    """The results from which `choose` chooses, the program as written first.

    Plans of `cutoff` seconds or more may be missed; then it may be that no result fits.
    """
    if isinstance(budget, str):
        smallest = [attempt(uniform(FULL, layers), "fitting")] if any(layers := recomputable()) else []
        return [attempt((), "fitting"), *smallest]
    as_written_fastest = attempt((), "fastest")
    if as_written_fastest.fits:
        return [as_written_fastest]
    policies = (DOTS, FULL) if any(layers := recomputable()) else ()
    forecast = forecasts(as_written_fastest) if policies else {}

    def search_of(policy: str) -> LayerSearch[T]:
        plan = partial(_attempt_first_layers, attempt, policy, layers)
        return LayerSearch(plan, sum(layers), budget, as_written_fastest, forecast.get(policy), OVERESTIMATE[policy])

    searches = sorted(
        map(search_of, policies), key=lambda layer_search: (layer_search.insufficient, layer_search.estimate)
    )
    closest = min(searches, key=lambda layer_search: layer_search.least_bytes, default=None)
    for layer_search in searches:
        sufficient = [other for other in searches if other.planned and not other.exhausted]
        layer_search.calibrate(sufficient)
        shortest = min([cutoff, *(other.estimate for other in sufficient)])
        is_futile = layer_search.insufficient and (shortest < math.inf or layer_search is not closest)
        if layer_search.least_estimate < (1 - REMAT.min_gain) * shortest and not is_futile:
            layer_search.start()
    best, results = cutoff, [layer_search.best for layer_search in searches if layer_search.planned]
    # one that was put off for the estimate of another is due where the other has not become what it promised
    for layer_search in sorted(searches, key=lambda layer_search: (not layer_search.planned, layer_search.estimate)):
        is_futile = not layer_search.planned and layer_search.insufficient
        if layer_search.least_estimate < (1 - REMAT.min_gain) * best and not is_futile:
            layer_search.start()
            results.append(layer_search.run(best))
        best = min([best, *(result.seconds for result in results if result.fits)])
    as_written = attempt((), "fitting", cutoff=best) if as_written_fastest.seconds < best else as_written_fastest
    return [as_written, *results]


def overhead(
    results: Sequence[RematResult[T]], layers: Sequence[bool], budget: float, forecast: Mapping[str, Forecast]
) -> float:
    """Seconds by which plans within a budget exceed the program as written, which has no plan that fits.

    For each policy: the overhead of planned layers that were too few, or, if more, the forecast overhead of sufficient
    layers less the possible overestimate. The smallest of the policies that are forecast to suffice counts. 0 without a
    forecast.

    Args:
        results: of the program as written, and of others with some layers rematerialised.
        layers: for each layer whether rematerialising it frees memory.
        budget: bytes per device.
        forecast: of each policy, for that program.
    """
    as_written, *rematerialised = results

    def least_overhead(policy: str) -> float:
        layer_search = _unplanned_search(as_written, layers, budget, forecast[policy], OVERESTIMATE[policy])
        too_few = [
            o.seconds for o in rematerialised if policy in o.policies and o.plan is not None and o.peak_bytes > budget
        ]
        return (
            math.inf
            if layer_search.insufficient
            else max(layer_search.least_estimate, *too_few, 0.0) - as_written.seconds
        )

    result = min(map(least_overhead, forecast), default=math.inf)
    return result if math.isfinite(result) else 0.0


def expected_seconds(
    as_written: RematResult[T], layers: Sequence[bool], budget: float, forecast: Mapping[str, Forecast]
) -> float:
    """Estimated seconds of the best plan within a budget; inf if no policy is forecast to suffice.

    Args:
        as_written: the result of the program as written.
        layers, budget, forecast: see `overhead`.
    """
    if as_written.fits:
        return as_written.seconds
    searches = [_unplanned_search(as_written, layers, budget, policy_forecast) for policy_forecast in forecast.values()]
    return min((layer_search.estimate for layer_search in searches if not layer_search.insufficient), default=math.inf)


def _unplanned_search(
    as_written: RematResult[T], layers: Sequence[bool], budget: float, forecast: Forecast, overestimate: float = 0.0
) -> LayerSearch[T]:
    """The search of a policy before any plan."""

    def unplanned(count: int, effort: Effort, cutoff: float) -> RematResult[T]:
        raise AssertionError(f"{count} layers are to be planned, in an estimate before any plan")

    return LayerSearch(unplanned, sum(layers), budget, as_written, forecast, overestimate)


def _attempt_first_layers(
    attempt: Attempt[T], policy: str, layers: Sequence[bool], count: int, effort: Effort, cutoff: float
) -> RematResult[T]:
    """An attempt with a policy for the first layers."""
    return attempt(first_layers(count, policy, layers), effort, cutoff)


def best_result(
    prove: Callable[[RematResult[T]], RematResult[T]], results: Sequence[RematResult[T]], budget: float | str
) -> RematResult[T]:
    """The best of these results, the first of them that of the program as written; see `choose`.

    If no result fits but the program as written has a plan, the best is the smallest peak with no more in host memory.

    `prove` repeats an attempt until it has a plan that fits or the proof that there is none.
    """
    if isinstance(budget, str):
        return min(results, key=lambda result: (result.peak_bytes, result.seconds))
    fitting = [result for result in results if result.fits]
    if fitting:
        return min(fitting, key=lambda result: result.seconds)
    if results[0].plan is None:
        return replace(results[0], prove=lambda: _infeasible(prove, results))
    equal_offload = [result for result in results if result.offloaded == results[0].offloaded]
    closest = min(equal_offload, key=lambda result: result.peak_bytes)
    return closest if closest is results[0] else prove(closest)


class LayerSearch(Generic[T]):
    """The search for the fewest layers that one policy has to rematerialise, in program order.

    Seconds and peak with k layers are interpolated and extrapolated between the nearest numbers of layers that were
    planned, in proportion to the forecast.

    Args:
        plan: (number of layers, effort, cutoff) -> the result with that many layers rematerialised.
        layers: number of recomputable layers.
        budget: bytes per device.
        as_written: the result with no layer rematerialised.
        forecast: costs and freed bytes of each layer; None: equal for all layers, and all of them are planned at once.
        overestimate: share of forecast seconds by which they may be too high.

    Attributes:
        insufficient: whether all layers are forecast to be too few, in any layouts.
        least_bytes: forecast of a lower bound on the peak with all layers.
    """

    def __init__(
        self,
        plan: Callable[[int, Effort, float], RematResult[T]],
        layers: int,
        budget: float,
        as_written: RematResult[T],
        forecast: Forecast | None = None,
        overestimate: float = 0.0,
    ) -> None:
        self._plan, self._layers, self._budget, self._overestimate = plan, layers, budget, overestimate
        self._results = {0: as_written}
        each = [Estimate(1.0, 1.0)] * layers if forecast is None else forecast.layers
        self._seconds = (0.0, *itertools.accumulate(max(e.seconds, 0.0) for e in each))
        self._bytes = (0.0, *itertools.accumulate(max(e.nbytes, 0.0) for e in each))
        self.least_bytes = 0.0 if forecast is None else forecast.least_bytes
        self.insufficient = self.least_bytes > budget
        self._forecast = forecast is not None
        self._prior_scale = 1.0  # freed bytes per forecast byte, before any plan
        if forecast is None:
            self._plan_layers(layers)

    @property
    def planned(self) -> bool:
        """Whether any number of layers was planned."""
        return len(self._results) > 1

    @property
    def exhausted(self) -> bool:
        """Whether even the fastest plan with all layers rematerialised does not fit."""
        return self._most_too_few == self._layers

    @property
    def best(self) -> RematResult[T]:
        """The result with the fewest layers that fits; if none does, that with the most layers."""
        return self._results[max(self._results) if self._fewest_sufficient is None else self._fewest_sufficient]

    @property
    def estimate(self) -> float:
        """Estimated seconds of the best result."""
        return self._seconds_with(self._forecast_count())

    @property
    def least_estimate(self) -> float:
        """The estimate, less the possible overestimate if no plan has corrected the forecast."""
        if self.planned:
            return self.estimate
        as_written = self._results[0].seconds
        return as_written + (1 - self._overestimate) * (self.estimate - as_written)

    def calibrate(self, searches: Sequence[LayerSearch[T]]) -> None:
        """Scales forecast bytes as those of other policies: errors of the bytes that stay at a peak are similar."""
        if searches and not self.planned:
            self._prior_scale = min(other._scale for other in searches)

    def start(self) -> None:
        """Plans with as many layers as are forecast to suffice, unless some number was planned."""
        if not self.planned:
            self._plan_layers(self._layers if self.insufficient else self._forecast_count())

    def run(self, cutoff: float = math.inf) -> RematResult[T]:
        """The result with the fewest layers whose fastest plan fits, or else the best that fits by its layouts.

        More layers may have a higher peak, so layouts are sought for the planned number with the least peak first.
        One layer fewer that probably does not fit is not tried if it gains little, nor if the forecast is clear. Plans
        of `cutoff` seconds or more may be missed.
        """
        for iteration in itertools.count():
            low, high = self._most_too_few, self._fewest_sufficient
            if self.exhausted:
                result = self._plan(self._closest, "fitting", cutoff)
                return result if result.fits or self._closest == low else self._plan(low, "fitting", cutoff)
            if high is None and self._results[low].seconds >= cutoff:  # and more layers take longer
                return self._results[low]
            if high is None:
                self._plan_layers(self._forecast_count())
                continue
            guess = (
                (low + high) // 2
                if iteration % REMAT.bisect_every == REMAT.bisect_every - 1
                else self._forecast_count()
            )
            gains_little = self._seconds_with(high) - self._seconds_with(high - 1) <= REMAT.min_gain * self.best.seconds
            if high - low <= 1 or (guess == high and (gains_little or self._is_least(high))):
                break
            self._plan_layers(min(guess, high - 1))
        return self.best

    @property
    def _most_too_few(self) -> int:
        """The most layers that were planned and are too few."""
        return max(k for k, result in self._results.items() if not result.fits)

    @property
    def _closest(self) -> int:
        """The planned number of layers whose fastest plan has the least peak, among equals the most."""
        return min(self._results, key=lambda k: (self._results[k].peak_bytes, -k))

    @property
    def _fewest_sufficient(self) -> int | None:
        """The fewest layers that were planned and suffice."""
        return min((k for k, result in self._results.items() if result.fits), default=None)

    def _plan_layers(self, count: int) -> None:
        self._results[count] = self._plan(count, "fastest", math.inf)

    def _bracket(self) -> tuple[int, int]:
        """The last two planned numbers of layers, by which the forecast is scaled; equal if only 0 was planned."""
        low, high = self._most_too_few, self._fewest_sufficient
        return (low, high) if high is not None else (max((k for k in self._results if k < low), default=0), low)

    @property
    def _scale(self) -> float:
        """Freed bytes per forecast byte."""
        a, b = self._bracket()
        freed = self._results[a].peak_bytes - self._results[b].peak_bytes
        forecast = self._bytes[b] - self._bytes[a]
        return max(freed, 0.0) / forecast if forecast > 0 else self._prior_scale

    def _forecast_count(self) -> int:
        """The fewest layers that are forecast to suffice; all of them if none do."""
        low, scale = self._most_too_few, self._scale
        excess = self._results[low].peak_bytes - self._budget
        at_most = self._layers if self._fewest_sufficient is None else self._fewest_sufficient
        sufficient = (k for k in range(low + 1, at_most) if scale * (self._bytes[k] - self._bytes[low]) >= excess)
        return next(sufficient, at_most)

    def _is_least(self, high: int) -> bool:
        """Whether one layer fewer than `high`, which suffice, is too few by the forecast of that layer alone."""
        freed = min(self._scale, 1.0) * (self._bytes[high] - self._bytes[high - 1])
        return self._forecast and self._results[high].peak_bytes + (1 - REMAT.layer_overestimate) * freed > self._budget

    def _seconds_with(self, count: int) -> float:
        """Estimated seconds of the plan with `count` layers."""
        a, b = self._bracket()
        extra, forecast = self._results[b].seconds - self._results[a].seconds, self._seconds[b] - self._seconds[a]
        scale = max(extra, 0.0) / forecast if forecast > 0 else 1.0
        return self._results[a].seconds + scale * (self._seconds[count] - self._seconds[a])


def _infeasible(
    prove: Callable[[RematResult[T]], RematResult[T]], results: Sequence[RematResult[T]]
) -> MemoryBudgetError:
    """The error with the smallest plan of all, and a lower bound on the peak of all plans."""
    closest: MemoryBudgetError | None = None
    bounds: list[int] = []
    for result in sorted(results, key=lambda o: o.peak_bytes):
        if closest is not None and result.peak_bytes >= closest.least_bytes:
            bounds.append(math.floor(result.peak_bytes))
            continue
        proven = result if result.error is not None else prove(result)
        assert proven.error is not None
        bounds.append(proven.error.bound_bytes)
        if closest is None or proven.error.least_bytes < closest.least_bytes:
            closest = proven.error
    assert closest is not None
    return MemoryBudgetError(str(closest), closest.budget, closest.least_bytes, min(bounds))
