"""Which layers are recomputed, where memory forces something.

    as written     alone if its fastest plan fits
    uniform        every layer that has something to drop, by "dots" and by "full"; where even the fastest plan does
                   not fit, the best that does
    some layers    otherwise the first k of them, the smallest k whose fastest plan fits: the first, for what they keep
                   lives longest; the peak falls about evenly with k, so that k is found by interpolation -> Search

The policy that by interpolation promises the shorter step is searched first, the other only where it promises more.
The program as written in layouts that fit comes last, and is given up once it is plain that it takes longer than what
is found: to fit by layouts alone is the hardest of these problems, and seldom the best answer.

Of all that fit the one with the shortest step is taken, of equals the one found first. For the budget "min" it is the
smallest peak, of the program as written and of the one with everything recomputed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Literal, Protocol, TypeVar

from autopar.errors import MemoryBudgetError
from autopar.passes.remat import DOTS, FULL, NONE, POLICIES

AUTO = "auto"
#: What the option `remat` may be.
CHOICES: tuple[str, ...] = (AUTO, *POLICIES)

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
    is the program as written where that has a plan all the same.
    """
    found = search(attempt, open_to, budget)
    return settle(lambda o: attempt(o.policies, "proven"), found, budget)


def search(
    attempt: Attempt[T], open_to: Callable[[], Sequence[bool]], budget: float | str, cutoff: float = math.inf
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
    found: list[Outcome[T]] = []
    policies = (DOTS, FULL) if any(layers := open_to()) else ()

    def along(policy: str) -> Search[T]:
        steps = partial(_first_steps, attempt, policy, layers)
        return Search(steps, sum(layers), budget, nowhere)

    best = cutoff
    for line in sorted(map(along, policies), key=lambda s: s.estimate):
        outcome = line.run(best) if line.estimate < (1 - MATTERS) * best else line.everywhere
        found.append(outcome)
        best = min(best, outcome.seconds) if outcome.fits else best
    as_written = attempt((), "fitting", cutoff=best) if nowhere.seconds < best else nowhere
    return [as_written, *found]


def _first_steps(
    attempt: Attempt[T], policy: str, layers: Sequence[bool], count: int, effort: Effort, cutoff: float
) -> Outcome[T]:
    """An attempt with a policy for the first layers."""
    return attempt(first(count, policy, layers), effort, cutoff)


def settle(prove: Callable[[Outcome[T]], Outcome[T]], found: Sequence[Outcome[T]], budget: float | str) -> Outcome[T]:
    """The best of these outcomes, the first of them that of the program as written; see `choose`.

    `prove` repeats an attempt until it has a plan that fits or the proof that none does.
    """
    if isinstance(budget, str):
        return min(found, key=lambda o: (o.peak_bytes, o.seconds))
    fitting = [o for o in found if o.fits]
    if fitting:
        return min(fitting, key=lambda o: o.seconds)
    return found[0] if found[0].made is not None else _refusal(prove, found)


class Search(Generic[T]):
    """The search for the best outcome along a line: the first of `steps` steps taken, each at about the same price.

    Attributes:
        everywhere: the fastest plan with all steps taken.
        estimate: about how many seconds the best outcome takes: each step costs and frees about as much as the next.
    """

    def __init__(
        self, attempt: Callable[[int, Effort, float], Outcome[T]], steps: int, budget: float, nowhere: Outcome[T]
    ) -> None:
        self._attempt, self._steps, self._budget, self._nowhere = attempt, steps, budget, nowhere
        self.everywhere = attempt(steps, "fastest", math.inf)
        share = self._count(0, nowhere.peak_bytes, steps, self.everywhere.peak_bytes) / steps
        dearer = self.everywhere.seconds - nowhere.seconds
        self._each = dearer / steps
        self.estimate = nowhere.seconds + dearer * (share if self.everywhere.fits else 1.0)

    def run(self, cutoff: float = math.inf) -> Outcome[T]:
        """The outcome with the fewest steps taken whose fastest plan fits, or the best that fits with all.

        Where one step fewer hardly matters and is not likely to fit, it is not tried.

        What takes `cutoff` seconds or longer is of no interest.
        """
        best = self.everywhere
        if not best.fits:
            return self._attempt(self._steps, "fitting", cutoff)
        low, above = 0, self._nowhere.peak_bytes
        high, below = self._steps, best.peak_bytes
        for turn in itertools.count():
            if high - low <= 1:
                break
            halved = turn % HALVED == HALVED - 1
            guess = (low + high) // 2 if halved else self._count(low, above, high, below)
            if guess >= high and self._each <= MATTERS * best.seconds:
                break
            count = min(max(guess, low + 1), high - 1)
            tried = self._attempt(count, "fastest", math.inf)
            if tried.fits:
                high, below, best = count, tried.peak_bytes, tried
            else:
                low, above = count, tried.peak_bytes
        return best

    def _count(self, low: int, above: float, high: int, below: float) -> int:
        """Steps to take, if the peak falls evenly from `above` with `low` of them to `cutoff` with `high`."""
        if above <= below:
            return high
        return min(high, low + math.ceil((high - low) * (above - self._budget) / (above - below)))


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
