"""The search for a pipeline: stages, submeshes, microbatches, schedule and recomputation together.

    for a number of microbatches m
        prices of a layer of every kind on every submesh, with       autopar/layer_prices.py
            and without recomputation, where both are open
        the best divisions into stages                                autopar/passes/inter_op.py
        each played under every schedule that its memory allows       autopar/cost_models/pipeline.py

The best of all that was played is the choice; ties go to fewer stages, then to fewer microbatches.

Numbers of microbatches are tried from the largest on, two at a time in two processes (`autopar.side_by_side`), until
two bring little or the smaller of them is worse: few have the longer bubble. What does not fit in the smallest
microbatches does not fit in larger ones.
Submeshes of whole hosts are priced from the smallest on, until one makes no better division, where that is close to all
stages working all the time: more hosts save filling, draining and transfers, and pay for collectives -> Hunt.divisions
A schedule of many microbatches is played for two numbers of them; from there on it repeats itself   -> played_seconds
Where state and sums of gradients need more than all devices have, nothing fits and nothing is tried -> Hunt.fits
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from autopar import side_by_side
from autopar.cluster import Cluster, LogicalMesh
from autopar.cost_models.pipeline import Prices, simulate
from autopar.errors import MicrobatchError
from autopar.fitting import MARGIN
from autopar.graph import Graph
from autopar.layer_prices import Kinds, Priced, Pricing, border_bytes, cut_out, shape_of, table, ways
from autopar.passes import layers as layers_pass
from autopar.passes import remat
from autopar.passes.inter_op import Division, Part, Placement, Question, placements, search
from autopar.passes.layers import Layers
from autopar.passes.microbatch import Microbatches, split
from autopar.planning import Options
from autopar.schedules import REPEATING, SCHEDULES, Size, make
from autopar.stage_planning import Limit
from autopar.stage_trades import Trade

#: Share of a step's time by which a better division may be missed.
TOLERANCE = 1e-3
#: Divisions that are played for every number of microbatches.
PLAYED = 8
#: Schedules that are played where none is asked for.
OPEN = ("1f1b", "gpipe")
#: Share of the best time by which two numbers of microbatches have to be better than those before for the search for
#: one to go on.
LITTLE = 0.02
#: Share of a step's time that filling, draining and transfers may take for submeshes of more hosts to be left.
FILLING = 0.05
#: Share of the memory that the search leaves free: a stage planned whole holds a little more or less than its layers.
RESERVE = 0.03
#: Examples of the batch that a microbatch has at most, in a search.
LARGEST = 128
#: With more devices than this, submeshes have a number of them that divides all.
ANY_SIZE = 8


@dataclass(frozen=True, slots=True)
class StageOn:
    """A stage that was found: layers first .. last - 1 on devices start .. start + count - 1, cut as `shape`."""

    first: int
    last: int
    start: int
    shape: tuple[int, ...]

    @property
    def devices(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Found:
    """A pipeline.

    Attributes:
        stages: in order.
        microbatches: of a step.
        schedule: its name.
        remat: what every layer recomputes.
        seconds: predicted, by playing the schedule.
        prices: what was played.
        peaks: bytes per device of every stage.
        limits: what every stage may hold, and at which rate its memory was charged.
    """

    stages: tuple[StageOn, ...]
    microbatches: int
    schedule: str
    remat: tuple[str, ...]
    seconds: float
    prices: Prices
    peaks: tuple[float, ...]
    limits: tuple[Limit, ...]


@dataclass(frozen=True)
class Open:
    """What the search may choose from.

    Attributes:
        batch: positions of the argument leaves that hold the batch.
        numbers: numbers of microbatches, ascending.
        stages: how many; None: any number.
        schedules: names.
        policies: of recomputation, each for all layers.
        memory: bytes per device; None: the device's own.
        per_microbatch: globs of what may be computed per microbatch; see `autopar.passes.microbatch`.
    """

    batch: tuple[int, ...]
    numbers: tuple[int, ...]
    stages: int | None = None
    schedules: tuple[str, ...] = OPEN
    policies: tuple[str, ...] = (remat.NONE, remat.FULL)
    memory: float | None = None
    per_microbatch: tuple[str, ...] = ()


def find(
    graph: Graph,
    avals: Sequence[Any],
    cluster: Cluster,
    choice: Open,
    options: Options,
    known: Mapping[int, Microbatches] | None = None,
) -> Found | None:
    """The best pipeline of a step on a cluster; None if none fits into its memory.

    Args:
        graph: the step.
        avals: shape and dtype of every argument.
        cluster: the devices.
        choice: what is open.
        options: how to solve.
        known: the step in numbers of microbatches, as `that_split` has found it.
    """
    return Hunt(graph, tuple(avals), cluster, choice.batch, options, choice.per_microbatch, known or {}).best(choice)


def numbers(extent: int) -> tuple[int, ...]:
    """Numbers of microbatches worth trying for a batch: of its divisors the smallest in every octave."""
    divisors = [m for m in range(1, extent + 1) if extent % m == 0 and extent // m <= LARGEST]
    first = {m.bit_length(): m for m in reversed(divisors)}
    return tuple(sorted(first.values()))


def that_split(
    graph: Graph,
    counts: Sequence[int],
    batch: Sequence[int],
    per_microbatch: Sequence[str] = (),
    known: dict[int, Microbatches] | None = None,
) -> tuple[int, ...]:
    """The numbers of microbatches that a step falls into, ascending: all up to the largest that it does.

    Small microbatches may be too small, such as for experts that choose among the tokens of several examples. The step
    in the largest number is put into `known`.

    Raises:
        MicrobatchError: it falls into none of them; what is wrong with the smallest number.
    """
    for number in sorted(counts, reverse=True):
        try:
            parts = split(graph, number, batch, per_microbatch=tuple(per_microbatch))
        except MicrobatchError:
            if number == min(counts):
                raise
        else:
            if known is not None:
                known[number] = parts
            return tuple(sorted(c for c in counts if c <= number))
    return ()


@dataclass(eq=False)
class Hunt:
    """Searches one step on one cluster; prices that one search has asked for serve the next."""

    graph: Graph
    avals: tuple[Any, ...]
    cluster: Cluster
    batch: tuple[int, ...]
    options: Options
    per_microbatch: tuple[str, ...] = ()
    parts: Mapping[int, Microbatches] = field(default_factory=dict)
    layers: Layers = field(init=False)
    kinds: Kinds = field(init=False)
    borders: tuple[float, ...] = field(init=False)
    meshes: Mapping[int, LogicalMesh] = field(init=False)
    where: tuple[Placement, ...] = field(init=False)
    known: dict[int, dict[int, Priced]] = field(default_factory=dict)
    pricings: dict[int, Pricing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layers = layers_pass.find(self.graph)
        self.kinds = self._kinds(max(self.parts, default=1))
        self.borders = border_bytes(self.layers)
        groups = self.cluster.groups or (self.cluster,)
        total = self.cluster.num_devices

        def may_be(n: int) -> bool:
            return total <= ANY_SIZE or total % n == 0

        self.where = tuple(
            placements([(g.num_devices // g.devices_per_host, g.devices_per_host) for g in groups], may_be)
        )
        meshes: dict[int, LogicalMesh] = {}
        for p in self.where:
            if p.submesh not in meshes:
                n = p.stop - p.start
                part = self.cluster.part(p.start, n)
                meshes[p.submesh] = part.logical_mesh(shape_of(n, part.devices_per_host))
        self.meshes = meshes

    def _kinds(self, count: int) -> Kinds:
        parts = self.parts.get(count) or split(self.graph, count, self.batch, per_microbatch=self.per_microbatch)
        return cut_out(parts, self.layers, self.avals)

    def best(self, choice: Open) -> Found | None:
        """The best pipeline; None if none fits."""
        if not self.fits(choice):
            return None
        best: Found | None = None
        falling = sorted(choice.numbers, reverse=True)
        for first in range(0, len(falling), side_by_side.WORKERS):
            some = falling[first : first + side_by_side.WORKERS]
            found = side_by_side.results([partial(self.at, count, choice) for count in some])
            better = min((f for f in (best, *found) if f is not None), key=_rank, default=None)
            last = math.inf if found[-1] is None else found[-1].seconds
            gained = best is None or better is None or better.seconds <= (1 - LITTLE) * best.seconds
            if better is None or not gained or last > better.seconds:
                return better
            best = better
        return best

    def fits(self, choice: Open) -> bool:
        """Whether what layers hold whatever is in flight fits into the memory of all devices, cut into even pieces."""
        of_kind = self.kinds.least_bytes()
        least = sum(of_kind[kind] for kind in self.kinds.of_layer)
        return least <= self.cluster.num_devices * max(self.room(choice)) * (1 - RESERVE)

    def priced(self, count: int, submeshes: int | None = None) -> Mapping[int, Priced]:
        """The ways to run layers of every kind on the first submeshes, or all, with this number of microbatches."""
        known = self.known.setdefault(count, {})
        for n in range(len(known), len(self.meshes) if submeshes is None else submeshes):
            if count not in self.pricings:
                same = self.kinds if self.kinds.microbatches == count else self.kinds.at(count)
                self.pricings[count] = Pricing(same or self._kinds(count), self.options)
            known[n] = self.pricings[count].on(self.meshes[n])
        return known

    def at(self, count: int, choice: Open) -> Found | None:
        """The best pipeline with this number of microbatches."""
        question, divisions = self.divisions(count, choice)
        plain = [d for d in divisions if self._recomputed_first(d, choice)] or divisions
        played = [found for division in plain[:PLAYED] for found in self.played(division, question, choice)]
        return min(played, key=_rank, default=None)

    def _recomputed_first(self, division: Division, choice: Open) -> bool:
        """Whether no stage without recomputation is in front of one with it, which hands back more than is priced."""
        policies = [ways(choice.policies)[part.option][0] for part in division.parts]
        return not any(a == remat.NONE != b for a, b in itertools.pairwise(policies))

    def divisions(self, count: int, choice: Open) -> tuple[Question, tuple[Division, ...]]:
        """The best divisions with this number of microbatches, and what they answer."""
        per_host, several = self.cluster.devices_per_host, len(self.cluster.groups) > 1
        first = sum(several or mesh.size <= per_host for mesh in self.meshes.values())
        question, found = self.question(count, choice, first), ()
        for submeshes in range(first, len(self.meshes) + 1):
            question = self.question(count, choice, submeshes)
            better = search(question, TOLERANCE, found[0].seconds * (1 - TOLERANCE) if found else math.inf)
            if found and not better and found[0].seconds - count * found[0].slowest <= FILLING * found[0].seconds:
                break
            found = tuple(sorted((*better, *found), key=lambda d: (d.seconds, len(d.parts), d.slowest)))
        return question, found

    def question(self, count: int, choice: Open, submeshes: int | None = None) -> Question:
        """What the dynamic program is asked for this number of microbatches, about the first submeshes or all."""
        number = len(self.meshes) if submeshes is None else submeshes
        priced = self.priced(count, number)
        return Question(
            layers=len(self.kinds.of_layer),
            devices=self.cluster.num_devices,
            placements=tuple(p for p in self.where if p.submesh < number),
            prices=tuple(table(priced[n], self.kinds.of_layer, choice.policies) for n in range(number)),
            memory=tuple((1 - RESERVE) * nbytes for nbytes in self.room(choice)),
            microbatches=count,
            in_flight=lambda stages: min(stages, count),
            transfer=self._transfer(count),
            stages=choice.stages,
        )

    def room(self, choice: Open) -> tuple[float, ...]:
        """Bytes that a device of each submesh may hold."""
        return tuple(choice.memory or m.device.memory_bytes * (1 - MARGIN) for m in self.meshes.values())

    def _transfer(self, count: int) -> np.ndarray:
        """Seconds per microbatch, both ways, over the border in front of a layer where a stage begins on a device."""
        found = np.zeros((len(self.borders) + 2, self.cluster.num_devices + 1))
        for d in range(1, self.cluster.num_devices):
            for k, nbytes in enumerate(self.borders):
                found[k + 1, d] = 2 * transfer_seconds(self.cluster, nbytes / count, d, 1)
        return found

    def played(self, division: Division, question: Question, choice: Open) -> Iterator[Found]:
        """A division under every schedule that its memory allows."""
        count = question.microbatches
        run = [self._run(part, choice, count) for part in division.parts]
        prices = self._prices(division, [trades for _, trades in run], count)
        policies = tuple(policy for policy, trades in run for _ in trades)
        stages = tuple(
            StageOn(p.first, p.last, p.placement.start, self.meshes[p.placement.submesh].sizes) for p in division.parts
        )
        for name in choice.schedules:
            size = Size(len(stages), count)
            flights = [SCHEDULES[name].stash(size, s) for s in range(len(stages))]
            peaks = tuple(
                float(question.prices[p.placement.submesh].peaks(n)[p.option, p.first, p.last])
                for p, n in zip(division.parts, flights, strict=True)
            )
            if all(b <= question.memory[p.placement.submesh] for b, p in zip(peaks, division.parts, strict=True)):
                seconds = played_seconds(name, size, prices)
                room = self.room(choice)
                limits = tuple(
                    Limit(room[p.placement.submesh], n, max(trade.share for trade in trades))
                    for p, n, (_, trades) in zip(division.parts, flights, run, strict=True)
                )
                yield Found(stages, count, name, policies, seconds, prices, peaks, limits)

    def _run(self, part: Part, choice: Open, count: int) -> tuple[str, list[Trade]]:
        """What the layers of a stage recompute, and how each of them is run."""
        policy, number = ways(choice.policies)[part.option]
        one = self.known[count][part.placement.submesh]
        return policy, [one.way(kind, number, policy) for kind in self.kinds.of_layer[part.first : part.last]]

    def _prices(self, division: Division, stages: Sequence[Sequence[Trade]], count: int) -> Prices:
        found = [[trade.prices for trade in trades] for trades in stages]
        return Prices(
            forward=tuple(sum(t.forward for t in stage) for stage in found),
            backward=tuple(sum(t.backward + t.weight for t in stage) for stage in found),
            update=tuple(sum(t.update + t.reduce for t in stage) for stage in found),
            transfer=self._links(division, count),
        )

    def _links(self, division: Division, count: int) -> Mapping[tuple[int, int], float]:
        found: dict[tuple[int, int], float] = {}
        for s, part in enumerate(division.parts[1:]):
            before = division.parts[s].placement
            senders = min(before.stop - before.start, part.placement.stop - part.placement.start)
            nbytes = self.borders[part.first - 1] / count
            seconds = transfer_seconds(self.cluster, nbytes, part.placement.start, senders)
            found[s, s + 1] = found[s + 1, s] = seconds
        return found


def played_seconds(name: str, size: Size, prices: Prices) -> float:
    """Seconds of a schedule: played where it is short, else by what further microbatches add once it repeats itself."""
    few, more = (Size(size.ranks, per_rank * size.ranks) for per_rank in (REPEATING // 2, REPEATING))
    if size.microbatches <= more.microbatches:
        return simulate(make(name, size), prices).seconds
    short, longer = (simulate(make(name, one), prices).seconds for one in (few, more))
    return longer + (size.microbatches - more.microbatches) * (longer - short) / (more.microbatches - few.microbatches)


def transfer_seconds(cluster: Cluster, nbytes: float, device: int, senders: int) -> float:
    """Seconds to move bytes to the stage that begins on a device; each of the senders sends its part over one link."""
    link = cluster.intra if device % cluster.devices_per_host else cluster.inter
    return link.alpha + max(link.beta, link.pair) * nbytes / senders


def _rank(found: Found) -> tuple[float, int, int, str]:
    return found.seconds, len(found.stages), found.microbatches, found.schedule
