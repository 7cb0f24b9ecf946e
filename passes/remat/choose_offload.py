"""Which state waits in the host's memory, where memory forces something, together with what is recomputed.

    on the device     first, and alone if memory makes the plan no costlier; else with recomputation
                      (`autopar.passes.remat.choose`)
    in host memory    all that may wait, with nothing recomputed or what was found best before        -> _moved
                      where nothing fits so far, with as many layers recomputed as it takes           -> _moved
    some of it        then only the largest leaves, in up to `STEPS` steps of about equal bytes: as few as fit, unless
                      the copies that would save are too short to matter                              -> _fewest

Copies over the host's link are dear, and what they cost is known before planning. Bytes that a plan has too many have
to be copied twice a step, so that from the fastest plan of the same program with everything on the device

    seconds  >=  seconds(fastest) + 2 * (peak(fastest) - budget) / host_bandwidth

and where that is no less than the best found, nothing is tried. Of all that fit the one with the shortest step is
taken, of equals the one found first; for the budget "min" it is the smallest peak, with and without the host's memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from autopar.cost_models import offload
from autopar.errors import ArgumentError
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph
from autopar.ir.text import size
from autopar.passes.remat import choose as recomputation
from autopar.passes.remat import offload as offload_pass
from autopar.passes.remat.choose import Effort, Forecasts, Outcome
from autopar.passes.remat.estimates import Forecast

AUTO, NONE, ALL = "auto", "none", "all"
#: What the option `offload` may be.
CHOICES: tuple[str, ...] = (AUTO, NONE, ALL)

SHOWN = 3  # paths in a note
TRIES = 4  # plans with less of the state in the host's memory
MATTERS = 0.03  # share of a step below which what copies cost is not worth another search
STEPS = 32  # parts of the state that are moved one by one

T = TypeVar("T")

#: Plans with a policy for each layer and with the arguments at some positions in the host's memory; what takes so many
#: seconds or longer is of no interest.
Attempt = Callable[[Sequence[str], Sequence[int], Effort, float], Outcome[T]]


@dataclass(frozen=True)
class Leaves:
    """What may wait in the host's memory.

    Attributes:
        positions: of the arguments, the largest first.
        nbytes: even share that one device has of each.
        seconds: bytes of one device -> s per step for copying them to it and back.
    """

    positions: tuple[int, ...]
    nbytes: tuple[float, ...]
    seconds: Callable[[float], float]

    @property
    def total(self) -> float:
        """Bytes of one device's even share of all of them."""
        return sum(self.nbytes)

    def steps(self) -> tuple[tuple[int, ...], ...]:
        """The positions that wait after each step, from none to all of them."""
        share = self.total / STEPS
        chosen: list[tuple[int, ...]] = [()]
        filled = 0.0
        for count, nbytes in enumerate(self.nbytes, 1):
            filled += nbytes
            if filled >= len(chosen) * share or count == len(self.nbytes):
                chosen.append(self.positions[:count])
        return tuple(chosen)

    def between(self, low: int, high: int) -> float:
        """Bytes of an even share that some steps move which fewer do not."""
        first, last = (len(self.steps()[count]) for count in (low, high))
        return sum(self.nbytes[first:last])


def waiting(graph: Graph, mesh: LogicalMesh, donated: Collection[int], option: str) -> tuple[tuple[int, ...], Leaves]:
    """Positions of the arguments that wait in the host's memory in any case, and those that may.

    Raises:
        ArgumentError: all are to, and nothing is known of the link to the host's memory.
    """
    device = mesh.device
    if option == ALL and not device.host_bandwidth:
        raise ArgumentError(
            f"offload='all': nothing is known of a link between {device.name} and its host's memory; give the "
            "cluster's device a host_bandwidth (bytes/s), or use offload='none'"
        )
    positions = offload_pass.waiting(graph, donated) if option != NONE and device.host_bandwidth else ()
    nbytes = [graph.types[graph.inputs[i]].nbytes / mesh.size for i in positions]
    room = sum(total <= device.host_memory_bytes for total in itertools.accumulate(nbytes)) if option == AUTO else 0
    free = Leaves(positions[:room], tuple(nbytes[:room]), lambda n: offload.seconds(n, mesh))
    return positions if option == ALL else (), free


def notes(graph: Graph, mesh: LogicalMesh, hosted: Sequence[int], nbytes: float) -> tuple[str, ...]:
    """What a plan says about state in the host's memory, `nbytes` per device; and where that is more than there is."""
    if not hosted:
        return ()
    paths = [graph.input_paths[i] for i in hosted]
    shown = ", ".join(paths[:SHOWN]) + (f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else "")
    kept = f"kept in host memory between steps, to save device memory: {size(nbytes)} per device ({shown})"
    there = mesh.device.host_memory_bytes
    short = f"; that is more than the {size(there)} of host memory there" if nbytes > there > 0 else ""
    own = "" if there else "; the cluster knows of no host memory apart from the device's own"
    return (kept + short + own,)


def choose(
    attempt: Attempt[T],
    open_to: Callable[[], Sequence[bool]],
    leaves: Leaves,
    budget: float | str,
    cutoff: float = math.inf,
    forecasts: Forecasts[T] = lambda as_written: {},
) -> Outcome[T]:
    """The best outcome within a budget (bytes per device, or "min"); for the rest see `recomputation.search`.

    Where what takes `cutoff` seconds or longer is of no interest, it may be one that does not fit.
    """
    known = _Known(attempt)
    found = recomputation.search(known.hosting(()), open_to, budget, cutoff, forecasts)
    if leaves.positions and isinstance(budget, str):
        found += recomputation.search(known.hosting(leaves.positions), open_to, budget)
    elif leaves.positions and not isinstance(budget, str) and found[0].pressed:
        found += _moved(known, found, open_to, leaves, budget, cutoff, forecasts)
        found += _fewest(known, found, leaves, budget)
    if math.isfinite(cutoff) and not any(o.fits for o in found):
        return found[0]
    return recomputation.settle(lambda o: known(o.policies, o.hosted, "proven"), found, budget)


@dataclass(eq=False)
class _Known(Generic[T]):
    """Attempts, each made once."""

    attempt: Attempt[T]
    made: dict[tuple[tuple[str, ...], tuple[int, ...], Effort], Outcome[T]] = field(default_factory=dict)

    def __call__(
        self, policies: Sequence[str], hosted: Sequence[int], effort: Effort, cutoff: float = math.inf
    ) -> Outcome[T]:
        what = tuple(policies), tuple(hosted)
        fastest = self.made.get((*what, "fastest"))
        if fastest is not None and fastest.fits:
            return fastest
        if (*what, effort) not in self.made:
            self.made[*what, effort] = self.attempt(*what, effort, cutoff)
        return self.made[*what, effort]

    def hosting(self, hosted: Sequence[int]) -> recomputation.Attempt[T]:
        """The same with this state in the host's memory, whatever is recomputed."""
        return lambda policies, effort, cutoff=math.inf: self(policies, hosted, effort, cutoff)


def _best(found: Sequence[Outcome[T]]) -> Outcome[T]:
    return min((o for o in found if o.fits), key=lambda o: o.seconds)


def _moved(
    known: _Known[T],
    found: Sequence[Outcome[T]],
    open_to: Callable[[], Sequence[bool]],
    leaves: Leaves,
    budget: float,
    cutoff: float,
    forecasts: Forecasts[T],
) -> list[Outcome[T]]:
    """Outcomes with all that may wait in the host's memory that may be better than the best that does without."""
    if not any(o.fits for o in found):
        if math.isfinite(cutoff) and any(_too_slow(o, leaves, budget, cutoff) for o in found):
            return []

        def eased(as_written: Outcome[T]) -> Mapping[str, Forecast]:
            """Where the program as written has no plan even so, from the one that it has without."""
            at_home = forecasts(found[0]) if as_written.made is None else {}
            less = {p: replace(one, least_bytes=one.least_bytes - leaves.total) for p, one in at_home.items()}
            return less or forecasts(as_written)

        return recomputation.search(known.hosting(leaves.positions), open_to, budget, cutoff, eased)
    best = _best(found)
    added: list[Outcome[T]] = []
    for policies in dict.fromkeys(((), best.policies)):
        start = known(policies, (), "fastest")
        if start.seconds + leaves.seconds(max(0.0, start.peak_bytes - budget)) < best.seconds * (1 - MATTERS):
            added.append(known(policies, leaves.positions, "fitting"))
    return added


def _too_slow(tried: Outcome[T], leaves: Leaves, budget: float, cutoff: float) -> bool:
    """Whether too few layers are recomputed even with all of the state in the host's memory, and more take too long."""
    short = bool(tried.policies) and tried.made is not None and tried.peak_bytes - leaves.total > budget
    return short and tried.seconds + leaves.seconds(leaves.total) >= cutoff * (1 - MATTERS)


def _fewest(known: _Known[T], found: Sequence[Outcome[T]], leaves: Leaves, budget: float) -> list[Outcome[T]]:
    """Outcomes with less in the host's memory than the one that promises most with all of it there."""
    all_of_it = leaves.seconds(leaves.total)

    def promise(whole: Outcome[T]) -> float:
        """Seconds without the copies of what there is room for; where layouts make room, without any copies."""
        eased = known(whole.policies, whole.hosted, "fastest").fits
        return whole.seconds - min(all_of_it, leaves.seconds(budget - whole.peak_bytes) if eased else math.inf)

    wholes = [o for o in known.made.values() if o.fits and o.hosted == leaves.positions]
    if not wholes:
        return []
    whole = min(wholes, key=promise)
    if promise(whole) >= _best([*found, whole]).seconds * (1 - MATTERS):
        return [whole]
    return [whole, *_less(known, whole, leaves, budget)]


def _less(known: _Known[T], whole: Outcome[T], leaves: Leaves, budget: float) -> Iterator[Outcome[T]]:
    """Outcomes with less and less in the host's memory: first as much as would fit if the peak fell evenly."""
    steps = leaves.steps()
    effort: Effort = "fastest" if known(whole.policies, whole.hosted, "fastest").fits else "fitting"
    low, high, room = 0, len(steps) - 1, budget - whole.peak_bytes
    for turn in range(TRIES):
        even = [k for k in range(low + 1, high) if leaves.between(k, len(steps) - 1) <= room / 2**turn]
        count = (low + high) // 2 if effort == "fitting" else min(even, default=high)
        if not low < count < high:
            return
        yield (tried := known(whole.policies, steps[count], effort))
        low, high = (low, count) if tried.fits else (count, high)
        if tried.fits and effort == "fastest":
            return
