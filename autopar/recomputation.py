"""Which layers are recomputed, where memory forces something.

    as written     alone if its fastest plan fits
    some layers    the first k of those that have something to drop, by "dots" or by "full", the smallest k whose
                   fastest plan fits: the first, for what they keep lives longest                         -> Line
    uniform        where even with all of them the fastest plan does not fit, the best that does

What a layer costs and frees is estimated on the plan as written (`autopar.passes.remat_estimates`), and corrected by
every plan that is made. So k is mostly met at once. Of the two policies the one that promises the shorter step is
tried first, the other only where it may promise more.
The program as written in layouts that fit comes last, and is given up once it is plain that it takes longer than what
is found: to fit by layouts alone is the hardest of these problems, and seldom the best answer.

Of all that fit the one with the shortest step is taken, of equals the one found first. For the budget "min" it is the
smallest peak, of the program as written and of the one with everything recomputed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Generic, Literal, Protocol, TypeVar

from autopar.errors import MemoryBudgetError
from autopar.passes.remat import DOTS, FULL, NONE, POLICIES
from autopar.passes.remat_estimates import Estimate, Forecast

AUTO = "auto"
#: What the option `remat` may be.
CHOICES: tuple[str, ...] = (AUTO, *POLICIES)

#: Share of the seconds that recomputing is estimated to cost by which the estimate may be too high: of five models of
#: published sizes up to 0.08 for all of a layer, 0.20 for all but products (0.40 on toys).
TOO_HIGH: Mapping[str, float] = MappingProxyType({DOTS: 0.3, FULL: 0.1})
DOUBT = 0.05  # share of the bytes that one step frees by which the estimate may be too high
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
        seconds: predicted step time.
        peak_bytes: predicted peak per device; without a plan no plan's peak is below.
        fits: there is a plan, and it keeps within the budget.
        pressed: without the budget there would be a faster plan.
        error: the proof that no plan fits.
        hosted: positions of the arguments that wait in the host's memory (`autopar.offloading`).
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


#: What recomputing layers by a policy costs and frees, read off the outcome as written; None if nothing is known.
Expected = Callable[[Outcome[T], str], Forecast | None]


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
    expected: Expected[T] | None = None,
) -> list[Outcome[T]]:
    """The outcomes among which `choose` chooses, the program as written first.

    What takes `cutoff` seconds or longer is of no interest; then there may be nothing that fits.
    """
    if isinstance(budget, str):
        smallest = [attempt(uniform(FULL, layers), "fitting")] if any(layers := open_to()) else []
        return [attempt((), "fitting"), *smallest]
    nowhere = attempt((), "fastest")
    if nowhere.fits:
        return [nowhere]
    policies = (DOTS, FULL) if any(layers := open_to()) else ()

    def along(policy: str) -> Line[T]:
        forecast = expected(nowhere, policy) if expected is not None else None
        steps = partial(_first_steps, attempt, policy, layers)
        return Line(steps, sum(layers), budget, nowhere, forecast, TOO_HIGH[policy])

    lines = sorted(map(along, policies), key=lambda line: (line.hopeless, line.promise))
    for line in lines:
        line.follow(lines)
        suffice = [other for other in lines if other.tried and not other.exhausted]
        least = min([cutoff, *(other.promise for other in suffice)])
        if line.at_best < (1 - MATTERS) * least and not (line.hopeless and suffice):
            line.probe()
    best, found = cutoff, [line.best for line in lines if line.tried]
    for line in sorted(lines, key=lambda line: line.promise):
        if line.tried and line.promise < (1 - MATTERS) * best:
            found.append(line.run(best))
        best = min([best, *(o.seconds for o in found if o.fits)])
    as_written = attempt((), "fitting", cutoff=best) if nowhere.seconds < best else nowhere
    return [as_written, *found]


def _first_steps(
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


class Line(Generic[T]):
    """The search for the best outcome along a line: the first of `steps` steps taken.

    Seconds and peak after k steps are those of the nearest outcomes tried, and between and beyond them in proportion to
    what is expected of the steps.

    Attributes:
        hopeless: all steps are expected to be too few, whatever the layouts.

    Args:
        attempt: makes the outcome of so many steps; what takes the cutoff or longer is of no interest.
        steps: how many there are.
        budget: bytes per device.
        nowhere: the outcome without any step.
        forecast: what each step costs and frees; None: all the same, which the outcome of all steps then tells.
        too_high: share of the seconds of all steps by which they may be forecast too high.
    """

    def __init__(
        self,
        attempt: Callable[[int, Effort, float], Outcome[T]],
        steps: int,
        budget: float,
        nowhere: Outcome[T],
        forecast: Forecast | None = None,
        too_high: float = 0.0,
    ) -> None:
        self._attempt, self._steps, self._budget, self._too_high = attempt, steps, budget, too_high
        self._points = {0: nowhere}
        each = [Estimate(1.0, 1.0)] * steps if forecast is None else forecast.steps
        self._seconds = (0.0, *itertools.accumulate(max(e.seconds, 0.0) for e in each))
        self._bytes = (0.0, *itertools.accumulate(max(e.nbytes, 0.0) for e in each))
        self.hopeless = forecast is not None and forecast.least_bytes > budget
        self._estimated = forecast is not None
        self._freed = 1.0  # bytes for each that is expected, until an outcome tells
        if forecast is None:
            self._try(steps)

    @property
    def tried(self) -> bool:
        """Whether any step was."""
        return len(self._points) > 1

    @property
    def exhausted(self) -> bool:
        """Whether even the fastest plan with all steps taken does not fit."""
        return self._low == self._steps

    @property
    def best(self) -> Outcome[T]:
        """Of the outcomes tried the one with the fewest steps that fits, or that with the most."""
        return self._points[max(self._points) if self._high is None else self._high]

    @property
    def promise(self) -> float:
        """About how many seconds the best outcome takes."""
        return self._at(self._count())

    @property
    def at_best(self) -> float:
        """About how many seconds it takes at least, as far as estimates can be trusted."""
        as_written = self._points[0].seconds
        return self.promise if self.tried else as_written + (1 - self._too_high) * (self.promise - as_written)

    def follow(self, others: Iterable[Line[T]]) -> None:
        """Expect estimates of bytes to be as far off as they were on other lines: what stays at a peak is the same."""
        ratios = [other._ratio for other in others if other is not self and other.tried and not other.exhausted]
        if ratios and not self.tried:
            self._freed = min(ratios)

    def probe(self) -> None:
        """Try as many steps as are expected to do."""
        if not self.tried:
            self._try(self._count())

    def run(self, cutoff: float = math.inf) -> Outcome[T]:
        """The outcome with the fewest steps taken whose fastest plan fits, or the best that fits with all.

        Where one step fewer is not likely to fit, it is not tried if it hardly matters, nor if that is plain.

        What takes `cutoff` seconds or longer is of no interest.
        """
        for turn in itertools.count():
            low, high = self._low, self._high
            if self.exhausted:
                return self._attempt(low, "fitting", cutoff)
            if high is None:
                self._try(self._count())
                continue
            guess = (low + high) // 2 if turn % HALVED == HALVED - 1 else self._count()
            hardly = self._at(high) - self._at(high - 1) <= MATTERS * self.best.seconds
            if high - low <= 1 or (guess == high and (hardly or self._is_plain(high))):
                break
            self._try(min(guess, high - 1))
        return self.best

    @property
    def _low(self) -> int:
        """The most steps that were tried and are too few."""
        return max(k for k, outcome in self._points.items() if not outcome.fits)

    @property
    def _high(self) -> int | None:
        """The fewest steps that were tried and suffice."""
        return min((k for k, outcome in self._points.items() if outcome.fits), default=None)

    def _try(self, count: int) -> None:
        self._points[count] = self._attempt(count, "fastest", math.inf)

    def _around(self) -> tuple[int, int]:
        """Two outcomes that tell how the estimates are to be corrected; the same twice if there is one alone."""
        low, high = self._low, self._high
        return (low, high) if high is not None else (0, low)

    @property
    def _ratio(self) -> float:
        """Bytes freed for each that is expected."""
        a, b = self._around()
        fell = self._points[a].peak_bytes - self._points[b].peak_bytes
        expected = self._bytes[b] - self._bytes[a]
        return fell / expected if a != b and expected > 0 and fell > 0 else self._freed

    def _count(self) -> int:
        """The fewest steps that should suffice; all of them if none do."""
        start, ratio = self._low, self._ratio
        over = self._points[start].peak_bytes - self._budget
        last = self._steps if self._high is None else self._high
        enough = (k for k in range(start + 1, last) if ratio * (self._bytes[k] - self._bytes[start]) >= over)
        return next(enough, last)

    def _is_plain(self, high: int) -> bool:
        """Whether one step fewer than these, which suffice, is plainly too few: estimates of one step are good."""
        freed = min(self._ratio, 1.0) * (self._bytes[high] - self._bytes[high - 1])
        return self._estimated and self._points[high].peak_bytes + (1 - DOUBT) * freed > self._budget

    def _at(self, count: int) -> float:
        """About how many seconds so many steps take."""
        a, b = self._around()
        dearer, expected = self._points[b].seconds - self._points[a].seconds, self._seconds[b] - self._seconds[a]
        ratio = max(dearer, 0.0) / expected if a != b and expected > 0 else 1.0
        return self._points[a].seconds + ratio * (self._seconds[count] - self._seconds[a])


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
