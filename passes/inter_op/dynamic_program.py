"""Inter-operator dynamic programming: consecutive layers become stages on submeshes.

Devices are assigned in order: each stage takes the next ones, some of one host or whole hosts (`placements`). With t_s
the seconds of a microbatch on stage s, including its seconds per step divided by the m microbatches, and x_s the
seconds of transfers to the stage, in both directions, a pipeline takes

    T  =  sum_s (t_s + x_s)  +  (m - 1) max_s t_s                                   (Alpa, section 5.1, equation 2)

which is exact for gpipe and 1f1b on equal stages with transfers of no time, and a good estimate if enough microbatches
are in flight to hide the transfers; 1f1b waits for them in every microbatch. For a bound t_max on the slowest stage the
rest is a sum, and the best suffixes of s stages that begin with layer k on device d obey           -> _Tables.best

    F(s, k, d) = min over layers j > k and placements d .. e of  t(k, j, d .. e) + x(j, e) + F(s - 1, j, e)
    t(k, j, d .. e) = min over the options of layers k .. j there that are no slower than t_max and fit:
                      max(fixed + in_flight(s) stash, without_microbatches) <= memory

A stage followed by s - 1 stages has in_flight(s) microbatches in flight under the schedule. Not every value of t has to
be tried as a bound: S(t_max) = F at the best number of stages only grows as t_max falls, so

    S(high) + (m - 1) (smallest t > low)     is a lower bound on T for all t_max in (low, high]         -> search

and intervals that cannot beat the best division by more than `tolerance` are skipped. For one bound, so are states
(k, d) that layers 1 .. k - 1 on d devices cannot reach, by bounds on their device-seconds and seconds -> _Tables.fronts
`search` returns the best division for every bound that it tried: T is a model of the schedule, and the simulator
(`autopar.cost_models.pipeline`) chooses among them.

Sources: Zheng et al. (2022), "Alpa", section 5; Fan et al. (2021), "DAPPLE", section 5, for the sum and the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.ir.keyed import grouped
from autopar.ir.problem import Floats, Ints

#: Relative amount by which lower bounds on sums are rounded down.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices start .. stop - 1; `submesh` is the number of the submesh, which determines the costs of layers."""

    start: int
    stop: int
    submesh: int


@dataclass(frozen=True, eq=False)
class RunCosts:
    """Costs of layers i .. j - 1 on one submesh; arrays of shape (options, layers + 1, layers + 1) at [:, i, j].

    Entries outside 0 <= i < j <= layers are ignored; infinite seconds mean that an option is impossible.

    Attributes:
        seconds: per microbatch, both passes.
        once: seconds per step (sums of gradients, updates).
        fixed: bytes per device regardless of the microbatches in flight.
        stash: bytes per device for each microbatch in flight.
        without_microbatches: bytes per device with no microbatch in flight; None: no more than `fixed`.
    """

    seconds: Floats
    once: Floats
    fixed: Floats
    stash: Floats
    without_microbatches: Floats | None = None

    def times(self, microbatches: int) -> Floats:
        """Seconds per microbatch, including seconds per step divided by the microbatches."""
        return self.seconds + self.once / microbatches

    def peaks(self, in_flight: int) -> Floats:
        """Peak bytes per device with `in_flight` microbatches."""
        most = self.fixed + in_flight * self.stash
        return most if self.without_microbatches is None else np.maximum(most, self.without_microbatches)

    def longest(self, memory: float) -> int:
        """The most layers that fit with one microbatch in flight; with more in flight, no more do."""
        starts, ends = np.nonzero(((self.peaks(1) <= memory) & np.isfinite(self.seconds)).any(0))
        return int((ends - starts).max(initial=0))

    def by_length(self, longest: int) -> RunCosts:
        """The costs by `by_length`."""
        seconds, once, fixed, stash = (by_length(a, longest) for a in (self.seconds, self.once, self.fixed, self.stash))
        without = self.without_microbatches
        return RunCosts(seconds, once, fixed, stash, None if without is None else by_length(without, longest))


@dataclass(frozen=True, eq=False)
class Question:
    """The problem: layers to be divided into stages.

    Attributes:
        layers, devices: how many.
        placements: where stages may be.
        prices: options on every submesh.
        memory: bytes per device of every submesh.
        microbatches: per step.
        in_flight: number of stages from one to the last, both included -> its microbatches in flight.
        transfer: seconds per microbatch and step, in both directions, from a stage on a submesh over the border in
            front of layer k if device d begins the next stage; shape (submeshes, layers + 1, devices + 1). None: 0.
        stages: required number of stages; None: any number from `fewest` on.
    """

    layers: int
    devices: int
    placements: Sequence[Placement]
    prices: Sequence[RunCosts]
    memory: Sequence[float]
    microbatches: int
    in_flight: Callable[[int], int]
    transfer: Floats | None = None
    stages: int | None = None
    fewest: int = 1

    def positions(self) -> Sequence[tuple[int, Ints, Ints]]:
        """(submesh, first devices, ends) of all placements, by submesh."""
        by_submesh = grouped((placement.submesh, placement) for placement in self.placements)
        return [
            (n, np.array([p.start for p in placements]), np.array([p.stop for p in placements]))
            for n, placements in sorted(by_submesh.items())
        ]


@dataclass(frozen=True, slots=True)
class Part:
    """One stage: layers first .. last - 1 on a placement, with one of the submesh's options."""

    first: int
    last: int
    placement: Placement
    option: int


@dataclass(frozen=True, slots=True)
class Division:
    """All stages in order, the modelled seconds of a step, and the seconds of the slowest stage per microbatch."""

    parts: tuple[Part, ...]
    seconds: float
    slowest: float


def placements(groups: Sequence[tuple[int, int]], sizes: Callable[[int], bool] = lambda n: True) -> Iterator[Placement]:
    """All submeshes: any number of devices of one host, or whole hosts of one group.

    Args:
        groups: (hosts, devices per host) of every group of equal hosts, in order.
        sizes: whether a number of devices may form a submesh.

    Yields:
        Placements; equal numbers of devices of one group have one submesh, numbered in order of (group, devices).
    """
    base = first = 0
    for hosts, per_host in groups:
        counts = [n for n in (*range(1, per_host + 1), *(h * per_host for h in range(2, hosts + 1))) if sizes(n)]
        for number, n in enumerate(counts):
            starts = (
                (h * per_host + k for h in range(hosts) for k in range(per_host - n + 1))
                if n <= per_host
                else range(0, hosts * per_host - n + 1, per_host)
            )
            yield from (Placement(first + at, first + at + n, base + number) for at in starts)
        base += len(counts)
        first += hosts * per_host


def search(question: Question, tolerance: float = 0.0, below: float = np.inf) -> tuple[Division, ...]:
    """The best divisions for decreasing bounds on the slowest stage, the best of all first.

    Args:
        question: the problem.
        tolerance: relative improvement of the total that may be missed.
        below: total (s) of a known division; only better ones are searched.

    Returns:
        Empty if no division fits, or none is better than `below`.
    """
    tables = _Tables(question)
    bounds = tables.bounds()
    if not len(bounds):
        return ()
    spread = question.microbatches - 1
    whole = tables.best(float(bounds[-1]), below - spread * float(bounds[0]))
    divisions = [] if whole is None else [whole]
    best = min(below, whole.seconds) if whole is not None else np.inf
    # (low, high, least sum for all bounds above `high`): open intervals of positions in `bounds`
    todo = [] if whole is None else [(0, _below(bounds, whole), _sum(whole, spread))]
    while todo:
        low, high, least = todo.pop()
        if spread:
            high = min(high, int(np.searchsorted(bounds, (best * (1 - tolerance) - least) / spread)) - 1)
        if low > high or not spread:
            continue
        middle = (low + high) // 2
        todo.append((middle + 1, high, least))
        inner = tables.best(float(bounds[middle]), best - spread * float(bounds[low]))
        if inner is not None:
            divisions.append(inner)
            best = min(best, inner.seconds)
            todo.append((low, _below(bounds, inner), _sum(inner, spread)))
    better = [d for d in divisions if d.seconds < below]
    return tuple(sorted(better, key=lambda d: (d.seconds, len(d.parts), d.slowest)))


def _below(bounds: Floats, division: Division) -> int:
    """The last bound that excludes a division, which is best for all bounds from there to the one that was tried."""
    return int(np.searchsorted(bounds, division.slowest)) - 1


def _sum(division: Division, spread: int) -> float:
    return division.seconds - spread * division.slowest


def by_length(table: Floats, longest: int) -> Floats:
    """Entries of layers i .. i + n - 1 at [..., n, i], from those at [..., i, j], for n up to `longest`.

    They are infinite for n = 0, and where there are no such layers.
    """
    layers = np.arange(table.shape[-1])
    lengths = layers[: longest + 1, None]
    ends = lengths + layers
    return np.where((lengths > 0) & (ends < len(layers)), table[..., layers, np.minimum(ends, layers[-1])], np.inf)


class _Tables:
    """The dynamic program, for one bound after another."""

    def __init__(self, question: Question) -> None:
        q = self.question = question
        upper = np.triu(np.ones((q.layers + 1, q.layers + 1), bool), 1)
        self.times = [np.where(upper, o.times(q.microbatches), np.inf) for o in q.prices]
        # with one microbatch in flight
        self.fitting = [
            np.where(o.peaks(1) <= m, t, np.inf) for o, m, t in zip(q.prices, q.memory, self.times, strict=True)
        ]
        shape = len(q.prices), q.layers + 1, q.devices + 1
        self.transfer = np.zeros(shape) if q.transfer is None else q.transfer.copy()
        self.transfer[:, q.layers] = 0.0
        self.submeshes = q.positions()
        self.most = q.stages or min(q.layers, q.devices)
        self.prices: dict[int, RunCosts] = {}
        self.options: dict[tuple[int, int], Floats] = {}
        self.runs: dict[tuple[int, int], Floats] = {}

    def bounds(self) -> Floats:
        """All seconds that a stage may take, ascending."""
        used = [self.fitting[n] for n, _, _ in self.submeshes]
        return np.unique(np.concatenate([t[np.isfinite(t)] for t in used])) if used else np.zeros(0)

    def _options(self, submesh: int, in_flight: int) -> Floats:
        """Seconds of all options by `RunCosts.by_length`, infinite for those that do not fit, cached for all bounds."""
        key, q = (submesh, in_flight), self.question
        if submesh not in self.prices:
            prices = q.prices[submesh]
            self.prices[submesh] = prices.by_length(prices.longest(q.memory[submesh]))
        if key not in self.options:
            prices = self.prices[submesh]
            fits = prices.peaks(in_flight) <= q.memory[submesh]
            self.options[key] = np.where(fits, prices.times(q.microbatches), np.inf)
        return self.options[key]

    def _runs(self, submesh: int, in_flight: int) -> Floats:
        """Seconds of the fastest option that fits, cached for all bounds."""
        key = submesh, in_flight
        if key not in self.runs:
            self.runs[key] = self._options(*key).min(0)
        return self.runs[key]

    def best(self, bound: float, cutoff: float = np.inf) -> Division | None:
        """The division with the least sum, at most `cutoff`, whose stages take at most `bound` seconds."""
        q = self.question
        sums = np.full((q.layers + 1, q.devices + 1), np.inf)
        sums[q.layers, q.devices] = 0.0
        times: dict[tuple[int, int], Floats] = {}

        def least(submesh: int, stages: int) -> Floats:
            key = submesh, q.in_flight(stages)
            if key not in times:
                runs = self._runs(*key)
                fast = runs <= bound
                times[key] = np.where(fast, runs, np.inf)[: 1 + int(np.flatnonzero(fast.any(1)).max(initial=0))]
            return times[key]

        levels = [sums]
        for stages in range(1, self.most + 1):
            longer = self._longer(levels[-1], lambda n, stages=stages: least(n, stages))
            if not q.stages and stages >= q.fewest:
                cutoff = min(cutoff, float(longer[0, 0]))
            levels.append(np.where(self._allowed(longer, bound, cutoff), longer, np.inf))
            if not np.isfinite(levels[-1]).any():
                break
        counts = (q.stages,) if q.stages else range(q.fewest, len(levels))
        ends = {n: float(levels[n][0, 0]) for n in counts if n < len(levels)}
        stages = min(ends, key=lambda n: (ends[n], n), default=0)
        if not stages or not np.isfinite(ends[stages]):
            return None
        return self._read(levels[: stages + 1], bound)

    def _allowed(self, sums: Floats, bound: float, cutoff: float) -> NDArray[np.bool_]:
        """States (layer, device) with sums that earlier layers and devices can complete to at most `cutoff`."""
        seconds, work = self.fronts
        devices = np.arange(sums.shape[1])
        return (sums + seconds[:, None] <= cutoff) & (work[:, None] <= devices * bound)

    @cached_property
    def fronts(self) -> tuple[Floats, Floats]:
        """Per layer, lower bounds on the seconds and on the device-seconds of all layers in front of it, rounded down.

        Each is the minimum over all divisions into stages on any submeshes, for any number of devices.
        """
        times = [self.fitting[n].min(0) for n, _, _ in self.submeshes]
        sizes = [stops[0] - starts[0] for _, starts, stops in self.submeshes]
        both = [np.minimum.reduce(times), np.minimum.reduce([n * t for n, t in zip(sizes, times, strict=True)])]
        bounds = np.zeros((2, self.question.layers + 1))
        for least, of_stages in zip(bounds, both, strict=True):
            for j in range(1, len(least)):
                least[j] = (least[:j] + of_stages[:j, j]).min()
        seconds, work = bounds * (1 - ROUNDING)
        return seconds, work

    def _longer(self, behind: Floats, least: Callable[[int], Floats]) -> Floats:
        """Sums with one more stage in front of the state (layer, device).

        `least`: submesh -> seconds of layers by `RunCosts.by_length`, up to their largest allowed number.
        """
        longer = np.full(behind.shape, np.inf)
        for submesh, starts, stops in self.submeshes:
            reached = np.isfinite(behind[:, stops])
            at, rows = np.flatnonzero(reached.any(0)), np.flatnonzero(reached.any(1))
            if len(at):
                last, runs = behind[:, stops[at]] + self.transfer[submesh][:, stops[at]], least(submesh)
                sums = np.full(last.shape, np.inf)
                for length in range(1, min(len(runs), int(rows[-1]) + 1)):
                    first, end = max(rows[0], length), rows[-1] + 1
                    here = slice(first - length, end - length)
                    np.minimum(sums[here], runs[length, here, None] + last[first:end], out=sums[here])
                longer[:, starts[at]] = np.minimum(longer[:, starts[at]], sums)
        return longer

    def _read(self, levels: Sequence[Floats], bound: float) -> Division:
        """The stages of the least sum; ties go to the first placement, then to the fewest layers."""
        q = self.question
        parts: list[Part] = []
        layer = device = 0
        for stages in range(len(levels) - 1, 0, -1):
            behind, goal = levels[stages - 1], levels[stages][layer, device]
            parts.append(self._part(layer, device, behind, float(goal), q.in_flight(stages), bound))
            layer, device = parts[-1].last, parts[-1].placement.stop
        times = [float(self.times[p.placement.submesh][p.option, p.first, p.last]) for p in parts]
        slowest = max(times)
        total = float(levels[-1][0, 0]) + (q.microbatches - 1) * slowest
        return Division(tuple(parts), total, slowest)

    def _part(self, layer: int, device: int, behind: Floats, goal: float, in_flight: int, bound: float) -> Part:
        for placement in self.question.placements:
            if placement.start == device:
                times = self._options(placement.submesh, in_flight)[:, : self.question.layers + 1 - layer, layer]
                least = np.where(times.min(0) <= bound, times.min(0), np.inf)
                rest = behind[:, placement.stop] + self.transfer[placement.submesh][:, placement.stop]
                lengths: Ints = np.flatnonzero(least + rest[layer : layer + len(least)] == goal)
                if len(lengths) and np.isfinite(goal):
                    fewest = int(lengths[0])
                    return Part(layer, layer + fewest, placement, int(times[:, fewest].argmin()))
        raise AssertionError(f"no stage from layer {layer} and device {device} on has the sum {goal} s it was found by")
