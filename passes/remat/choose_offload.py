"""Which state is offloaded to host memory if memory is short, together with rematerialisation.

    none          first, and the only choice if the memory limit makes the plan no slower; else with rematerialisation
                  (`autopar.passes.remat.choose`)
    all           all candidates, with no layer rematerialised or with the best policies found so far
                                                                                              -> _all_offloaded
                  if nothing fits so far, with as many layers rematerialised as necessary     -> _all_offloaded
    some          only the largest leaves, in up to `OffloadSearchEffort.steps` steps of about equal bytes: as few as
                  fit, unless the copies saved are too short to matter                        -> _fewer_offloaded

Copies over the host's link are slow, and their cost is known before planning. Each byte above the budget is copied
twice a step, so that from the fastest plan of the same program without offload

    seconds  >=  seconds(fastest) + 2 * (peak(fastest) - budget) / host_bandwidth

and where that is no less than the best result, no plan is tried. Of all plans that fit, the one with the shortest step
is chosen, among equals the first one found; for the budget "min" the one with the smallest peak, with and without
offload.
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
from autopar.hardware.description import Device
from autopar.ir.graph import Graph
from autopar.ir.text import size
from autopar.passes.remat import choose as recomputation
from autopar.passes.remat import offload as offload_pass
from autopar.passes.remat.choose import Effort, Forecasts, RematResult
from autopar.passes.remat.estimates import Forecast

AUTO, NONE, ALL = "auto", "none", "all"
#: Values of the option `offload`.
CHOICES: tuple[str, ...] = (AUTO, NONE, ALL)

#: Paths in a note.
SHOWN_PATHS = 3


@dataclass(frozen=True, slots=True)
class OffloadSearchEffort:
    """How far the number of arguments to offload is searched."""

    # most plans that are tried with fewer candidates offloaded (not measured)
    tries: int = 4
    # share of a step that saved copies must take for another search (not measured)
    min_gain: float = 0.03
    # parts of the candidates, of about equal bytes, that are offloaded one after another (not measured)
    steps: int = 32


OFFLOAD = OffloadSearchEffort()


T = TypeVar("T")

#: (policy of each layer, positions of offloaded arguments, effort, cutoff) -> result; plans of `cutoff` seconds or more
#: may be missed.
Attempt = Callable[[Sequence[str], Sequence[int], Effort, float], RematResult[T]]


@dataclass(frozen=True)
class OffloadCandidates:
    """State that may be offloaded to host memory between steps.

    Attributes:
        positions: of the arguments, the largest first.
        nbytes: bytes per device of each, evenly sharded.
        seconds: bytes per device -> s per step to copy them to the device and back.
    """

    positions: tuple[int, ...]
    nbytes: tuple[float, ...]
    seconds: Callable[[float], float]

    @property
    def total(self) -> float:
        """Bytes per device of all of them, evenly sharded."""
        return sum(self.nbytes)

    @staticmethod
    def of(graph: Graph, mesh: LogicalMesh, positions: tuple[int, ...], share: float = 1.0) -> OffloadCandidates:
        """The first of these arguments that a share of the host's memory has room for."""
        nbytes = [graph.types[graph.inputs[i]].nbytes / mesh.size for i in positions]
        room = share * mesh.device.host_memory_bytes
        count = sum(total <= room for total in itertools.accumulate(nbytes))
        return OffloadCandidates(positions[:count], tuple(nbytes[:count]), lambda n: offload.seconds(n, mesh))

    def steps(self) -> tuple[tuple[int, ...], ...]:
        """The offloaded positions after each step, from none to all."""
        step_bytes = self.total / OFFLOAD.steps
        steps: list[tuple[int, ...]] = [()]
        cumulative = 0.0
        for count, nbytes in enumerate(self.nbytes, 1):
            cumulative += nbytes
            if cumulative >= len(steps) * step_bytes or count == len(self.nbytes):
                steps.append(self.positions[:count])
        return tuple(steps)

    def step_bytes(self) -> tuple[float, ...]:
        """Bytes per device, evenly sharded, that each step offloads."""
        return tuple(self.between(n, n + 1) for n in range(len(self.steps()) - 1))

    def between(self, fewer: int, more: int) -> float:
        """Bytes per device, evenly sharded, that `more` steps offload beyond `fewer`."""
        first, last = (len(self.steps()[count]) for count in (fewer, more))
        return sum(self.nbytes[first:last])


def candidates(
    graph: Graph, mesh: LogicalMesh, donated: Collection[int], option: str
) -> tuple[tuple[int, ...], OffloadCandidates]:
    """Positions of the arguments that are offloaded in any case, and those that may be.

    Raises:
        ArgumentError: the option is "all", and the cluster has no bandwidth of a link to host memory.
    """
    positions = allowed(graph, mesh.device, donated, option)
    return positions if option == ALL else (), OffloadCandidates.of(graph, mesh, positions if option == AUTO else ())


def allowed(graph: Graph, device: Device, donated: Collection[int], option: str) -> tuple[int, ...]:
    """Positions of the arguments that the option allows in host memory, the largest first.

    Raises:
        ArgumentError: the option is "all", and the cluster has no bandwidth of a link to host memory.
    """
    if option == ALL and not device.host_bandwidth:
        raise ArgumentError(
            f"offload='all': nothing is known of a link between {device.name} and its host's memory; give the "
            "cluster's device a host_bandwidth (bytes/s), or use offload='none'"
        )
    return offload_pass.offloadable(graph, donated) if option != NONE and device.host_bandwidth else ()


def notes(graph: Graph, mesh: LogicalMesh, offloaded: Sequence[int], nbytes: float) -> tuple[str, ...]:
    """Notes of a plan on offloaded state, `nbytes` per device, with a warning if host memory is too small for it."""
    if not offloaded:
        return ()
    paths = [graph.input_paths[i] for i in offloaded]
    more = f" and {len(paths) - SHOWN_PATHS} more" if len(paths) > SHOWN_PATHS else ""
    shown = ", ".join(paths[:SHOWN_PATHS]) + more
    text = f"kept in host memory between steps, to save device memory: {size(nbytes)} per device ({shown})"
    host_memory = mesh.device.host_memory_bytes
    shortage = f"; that is more than the {size(host_memory)} of host memory there" if nbytes > host_memory > 0 else ""
    unknown = "" if host_memory else "; the cluster knows of no host memory apart from the device's own"
    return (text + shortage + unknown,)


def choose(
    attempt: Attempt[T],
    recomputable: Callable[[], Sequence[bool]],
    state: OffloadCandidates,
    budget: float | str,
    cutoff: float = math.inf,
    forecasts: Forecasts[T] = lambda as_written: {},
) -> RematResult[T]:
    """The best result within a budget (bytes per device, or "min"); arguments as of `recomputation.search`.

    With a finite `cutoff` the result may be one that does not fit.
    """
    attempts = _CachedAttempts(attempt)
    results = recomputation.search(attempts.with_offloaded(()), recomputable, budget, cutoff, forecasts)
    if state.positions and isinstance(budget, str):
        results += recomputation.search(attempts.with_offloaded(state.positions), recomputable, budget)
    elif state.positions and not isinstance(budget, str) and results[0].constrained:
        results += _all_offloaded(attempts, results, recomputable, state, budget, cutoff, forecasts)
        results += _fewer_offloaded(attempts, results, state, budget)
    if math.isfinite(cutoff) and not any(result.fits for result in results):
        return results[0]
    return recomputation.best_result(
        lambda result: attempts(result.policies, result.offloaded, "proven"), results, budget
    )


@dataclass(eq=False)
class _CachedAttempts(Generic[T]):
    """Attempts, each made once."""

    attempt: Attempt[T]
    cache: dict[tuple[tuple[str, ...], tuple[int, ...], Effort], RematResult[T]] = field(default_factory=dict)

    def __call__(
        self, policies: Sequence[str], offloaded: Sequence[int], effort: Effort, cutoff: float = math.inf
    ) -> RematResult[T]:
        key = tuple(policies), tuple(offloaded)
        fastest = self.cache.get((*key, "fastest"))
        if fastest is not None and fastest.fits:
            return fastest
        if (*key, effort) not in self.cache:
            self.cache[*key, effort] = self.attempt(*key, effort, cutoff)
        return self.cache[*key, effort]

    def with_offloaded(self, offloaded: Sequence[int]) -> recomputation.Attempt[T]:
        """Attempts with these arguments offloaded, for any policies."""
        return lambda policies, effort, cutoff=math.inf: self(policies, offloaded, effort, cutoff)


def _best(results: Sequence[RematResult[T]]) -> RematResult[T]:
    return min((result for result in results if result.fits), key=lambda result: result.seconds)


def _all_offloaded(
    attempts: _CachedAttempts[T],
    results: Sequence[RematResult[T]],
    recomputable: Callable[[], Sequence[bool]],
    state: OffloadCandidates,
    budget: float,
    cutoff: float,
    forecasts: Forecasts[T],
) -> list[RematResult[T]]:
    """Results with all candidates offloaded that may be better than the best result without."""
    if not any(result.fits for result in results):
        if math.isfinite(cutoff) and any(_too_slow(result, state, budget, cutoff) for result in results):
            return []

        def eased_forecasts(as_written: RematResult[T]) -> Mapping[str, Forecast]:
            """If the program as written has no plan even with offload, the forecasts are those of its plan without."""
            on_device = forecasts(results[0]) if as_written.plan is None else {}
            offloaded_forecasts = {
                p: replace(forecast, least_bytes=forecast.least_bytes - state.total)
                for p, forecast in on_device.items()
            }
            return offloaded_forecasts or forecasts(as_written)

        return recomputation.search(
            attempts.with_offloaded(state.positions), recomputable, budget, cutoff, eased_forecasts
        )
    best = _best(results)
    added: list[RematResult[T]] = []
    for policies in dict.fromkeys(((), best.policies)):
        fastest = attempts(policies, (), "fastest")
        if fastest.seconds + state.seconds(max(0.0, fastest.peak_bytes - budget)) < best.seconds * (
            1 - OFFLOAD.min_gain
        ):
            added.append(attempts(policies, state.positions, "fitting"))
    return added


def _too_slow(result: RematResult[T], state: OffloadCandidates, budget: float, cutoff: float) -> bool:
    """Whether even with all candidates offloaded the layers of a result are too few, and more layers take too long."""
    is_too_large = bool(result.policies) and result.plan is not None and result.peak_bytes - state.total > budget
    return is_too_large and result.seconds + state.seconds(state.total) >= cutoff * (1 - OFFLOAD.min_gain)


def _fewer_offloaded(
    attempts: _CachedAttempts[T], results: Sequence[RematResult[T]], state: OffloadCandidates, budget: float
) -> list[RematResult[T]]:
    """Results with fewer candidates offloaded, from the one with all of them that has the least lower bound."""
    all_seconds = state.seconds(state.total)

    def lower_bound(result: RematResult[T]) -> float:
        """Seconds without the copies of bytes that the budget has room for; none if layouts make room for all."""
        fits_at_once = attempts(result.policies, result.offloaded, "fastest").fits
        return result.seconds - min(
            all_seconds, state.seconds(budget - result.peak_bytes) if fits_at_once else math.inf
        )

    with_all = [o for o in attempts.cache.values() if o.fits and o.offloaded == state.positions]
    if not with_all:
        return []
    result = min(with_all, key=lower_bound)
    if lower_bound(result) >= _best([*results, result]).seconds * (1 - OFFLOAD.min_gain):
        return [result]
    return [result, *_bisected(attempts, result, state, budget)]


def _bisected(
    attempts: _CachedAttempts[T], result: RematResult[T], state: OffloadCandidates, budget: float
) -> Iterator[RematResult[T]]:
    """Results with fewer and fewer candidates offloaded: first as few as would fit if the peak fell evenly."""
    steps = state.steps()
    effort: Effort = "fastest" if attempts(result.policies, result.offloaded, "fastest").fits else "fitting"
    low, high, spare = 0, len(steps) - 1, budget - result.peak_bytes
    for iteration in range(OFFLOAD.tries):
        fitting = [k for k in range(low + 1, high) if state.between(k, len(steps) - 1) <= spare / 2**iteration]
        count = (low + high) // 2 if effort == "fitting" else min(fitting, default=high)
        if not low < count < high:
            return
        yield (with_fewer := attempts(result.policies, steps[count], effort))
        low, high = (low, count) if with_fewer.fits else (count, high)
        if with_fewer.fits and effort == "fastest":
            return
