"""The search for a pipeline: stages, submeshes, microbatches, schedule and recomputation together.

    for a number of microbatches m
        prices of a layer of every kind on every submesh, with       passes/inter_op/layer_costs.py
            and without recomputation, where both are open
        the best divisions into stages, for the memory of eager 1F1B, autopar/passes/inter_op/dynamic_program.py
            under which they hide transfers, and for that of 1F1B
        each played under the schedules that its memory allows        passes/inter_op/simulate.py

The best of all that was played is the choice; ties go to fewer stages, then to fewer microbatches. Prices take nearly
all of the time, so that they are found only where they may lead to something better:

    microbatches   two numbers at a time in two processes: the fewer, the longer the bubble and the less the rest.
                   First about the least at which the step fits as written and fills a pipeline over all hosts; then
                   those that promise more than the best has, going by what layers take in the numbers that are priced
                   (`passes/inter_op/extrapolate.py`), while there are any                                 -> Hunt._next
    ways           the cheapest to run a layer, for numbers after the first two where the best divisions would use it if
                   it were as those say; the next that holds less where they would if it held nothing but even pieces,
                   and took no longer                                                      -> Hunt._settled_under
    submeshes      one host's first (one device's, where a step to beat is known), then those of more hosts, then those
                   that do not divide all devices, while
                   one may make a better division than both numbers have so far: a layer hardly ever takes less of all
                   devices' time and memory on more of them                                           -> Hunt.divisions
    nothing        where state and sums of gradients need more than all devices have                  -> Hunt.fits

A share of the memory stays free, unless nothing fits so: a stage that is planned whole holds a little more or less than
its layers do one by one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from autopar import parallel_map
from autopar.cost_models.memory.lower_bound import written_bytes
from autopar.errors import ClusterError, MicrobatchError
from autopar.hardware.cluster import Cluster, LogicalMesh
from autopar.ir.graph import Graph
from autopar.ir.problem import Floats
from autopar.passes.inter_op.dynamic_program import Division, Placement, Question, placements, search
from autopar.passes.inter_op.dynamic_program import Options as Table
from autopar.passes.inter_op.extrapolate import ways_at, ways_wherever
from autopar.passes.inter_op.layer_costs import (
    Border,
    Kinds,
    Priced,
    Pricing,
    Ways,
    border_bytes,
    cut_out,
    shape_of,
    table,
    ways,
)
from autopar.passes.inter_op.simulate import Found, Plays, rank, transfer_seconds
from autopar.passes.inter_op.stage_options import Trade, too_large
from autopar.passes.intra_op.plan import Options
from autopar.passes.layers import find as layers_pass
from autopar.passes.layers.find import Layers
from autopar.passes.microbatch.analysis import Microbatches, split
from autopar.passes.remat import rewrite as remat
from autopar.passes.remat.memory_policy import MARGIN
from autopar.schedules import SCHEDULES, Size

#: Share of a step's time by which a better division may be missed.
TOLERANCE = 1e-3
#: Divisions that are played for every number of microbatches, and the memory of every schedule.
PLAYED = 8
#: Schedules that are played where none is asked for, the more is in flight the later.
OPEN = ("1f1b", "eager-1f1b", "gpipe")
#: Those of them for whose memory divisions are made, the more is in flight the sooner.
MADE_FOR = ("eager-1f1b", "1f1b")
#: Share of the time with another number of microbatches by which one has to promise to be better to be priced.
LITTLE = 0.02
#: Share by which the dynamic program may take a division to be slower than another that is no better when played.
SLACK = 0.05
#: Share of the best time by which submeshes of more hosts have to promise to be better for layers to be priced on them.
WORTH = 0.01
#: Share of the memory that the search leaves free.
RESERVE = 0.03
#: Microbatches per stage but the first at which a pipeline waits for an eighth of the time that it works.
FULL = 8
#: Examples of the batch that a microbatch has at most, in a search.
LARGEST = 128
#: With more devices than this, submeshes have a number of them that divides all.
ANY_SIZE = 8


@dataclass(frozen=True)
class Open:
    """What the search may choose from.

    Attributes:
        batch: positions of the argument leaves that hold the batch.
        numbers: numbers of microbatches, ascending.
        stages: how many; None: any number from `fewest` on.
        schedules: names.
        policies: of recomputation, each for all layers.
        memory: bytes per device; None: the device's own.
        per_microbatch: globs of what may be computed per microbatch; see `autopar.passes.microbatch.analysis`.
        fewest: stages.
        limit: seconds of a step that is known; only shorter ones are looked for.
        reserve: share of the memory that divisions leave free.
    """

    batch: tuple[int, ...]
    numbers: tuple[int, ...]
    stages: int | None = None
    schedules: tuple[str, ...] = OPEN
    policies: tuple[str, ...] = (remat.NONE, remat.FULL)
    memory: float | None = None
    per_microbatch: tuple[str, ...] = ()
    fewest: int = 1
    limit: float = math.inf
    reserve: float = RESERVE


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

    def parts(number: int, *, reasons: bool) -> Microbatches:
        return split(graph, number, batch, per_microbatch=tuple(per_microbatch), reasons=reasons)

    least, *larger = sorted(counts)
    for number in reversed(larger):
        try:
            found = parts(number, reasons=False)
        except MicrobatchError:
            if number == larger[-1]:
                parts(least, reasons=True)  # where it does not fall into the fewest either, all others are in vain
        else:
            break
    else:
        number, found = least, parts(least, reasons=True)
    if known is not None:
        known[number] = found
    return tuple(sorted(c for c in counts if c <= number))


@dataclass(frozen=True, eq=False)
class Tried:
    """What came of a number of microbatches.

    Attributes:
        best: the best pipeline, if one fits.
        ways: submesh -> ways to run layers, as far as they were priced.
    """

    best: Found | None
    ways: Mapping[int, Ways]


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
    borders: tuple[Border, ...] = field(init=False)
    meshes: Mapping[int, LogicalMesh] = field(init=False)
    where: tuple[Placement, ...] = field(init=False)
    least: Mapping[int, float] = field(init=False)
    known: dict[int, dict[int, Priced]] = field(default_factory=dict)
    guesses: dict[int, Mapping[int, Ways]] = field(default_factory=dict)
    pricings: dict[int, Pricing] = field(default_factory=dict)
    transfers: dict[int, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layers = layers_pass.find(self.graph)
        self.kinds = self._kinds(max(self.parts, default=1))
        self.borders = border_bytes(self.kinds.stages.split, self.layers)
        self.least = self.kinds.least_bytes()
        groups = self.cluster.groups or (self.cluster,)
        total = self.cluster.num_devices

        def may_be(n: int) -> bool:
            return (total <= ANY_SIZE or total % n == 0) and _is_part(self.cluster, n)

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
        falling = sorted(choice.numbers, reverse=True)
        start = self._start(falling, choice)
        tried: dict[int, Tried] = {}
        best, limit = None, choice.limit
        turn = falling[start : start + parallel_map.WORKERS]
        while turn:
            some = parallel_map.in_step([partial(self.at, count, choice, limit) for count in turn])
            tried.update(zip(turn, some, strict=True))
            best = min((one.best for one in tried.values() if one.best is not None), key=rank, default=None)
            limit = choice.limit if best is None else min(choice.limit, (1 + SLACK) * best.formula)
            priced = {count: one.ways for count, one in tried.items()}
            turn = self._next(falling, choice, priced, best)
            self.guesses.update((count, ways_at(count, priced)) for count in turn)
        return best

    def _next(
        self, falling: Sequence[int], choice: Open, priced: Mapping[int, Mapping[int, Ways]], best: Found | None
    ) -> Sequence[int]:
        """The numbers that promise more than the best does, two at most: those that promise most.

        Looked for from the best on in both directions, as far as they do. Where none is known, what submeshes without
        prices take is the least that it may be.
        """
        from_ = falling.index(best.microbatches) if best else min(falling.index(count) for count in priced)
        schedule = best.schedule if best and best.schedule in MADE_FOR else _made_for(choice)[-1]

        def promised(count: int, limit: float = math.inf) -> float:
            if best:
                known = {n: w for n, w in ways_at(count, priced).items() if w.keys() == self.kinds.stage.keys()}
            else:
                known = self.at_best(ways_wherever(count, priced))
            prices = self._tables(choice, known)
            return _seconds(search(self._asked(count, choice, prices, schedule), TOLERANCE, limit))

        limit = (1 - LITTLE) * promised(best.microbatches) if best else choice.limit
        promises: dict[int, float] = {}
        for some in (falling[from_ + 1 :], falling[:from_][::-1]):
            found = ((promised(count, limit), count) for count in some if count not in priced)
            promises.update((count, s) for s, count in itertools.takewhile(lambda one: one[0] < math.inf, found))
        return sorted(promises, key=lambda count: (promises[count], count))[: parallel_map.WORKERS]

    def _start(self, falling: Sequence[int], choice: Open) -> int:
        """Position of the number in front of the least with which the step fits as written, in even pieces.

        With a stage per host, as many microbatches at a time as 1F1B has in flight at a stage of them on average; so
        many in all, at least, that such a pipeline waits for an eighth of the time that it works.
        """
        hosts, room = self.cluster.hosts, self._most(choice) - self._held
        activations = written_bytes(self.graph) - sum(self.graph.types[v].nbytes for v in self.graph.inputs)
        flying, full = activations * (hosts + 1) / 2, FULL * (hosts - 1)
        fit = [i for i, count in enumerate(falling) if flying <= count * room and count >= full]
        return max(fit[-1] - 1, 0) if fit else 0

    def fits(self, choice: Open) -> bool:
        """Whether what layers hold whatever is in flight fits into the memory of all devices, cut into even pieces."""
        return self._held <= self._most(choice)

    @cached_property
    def _held(self) -> float:
        """Bytes of state and of sums of gradients, over all devices."""
        return sum(self.least[kind] for kind in self.kinds.of_layer)

    def _most(self, choice: Open) -> float:
        """Bytes that divisions may fill on all devices, if all had as many as those that have most."""
        return self.cluster.num_devices * max(self.usable(choice))

    def priced(self, count: int, submeshes: Iterable[int]) -> dict[int, Priced]:
        """The ways to run layers of every kind on these submeshes with this number of microbatches.

        Ways that hold less than the cheapest are not priced before they are asked for, nor is what can be guessed.
        """
        known = self.known.setdefault(count, {})
        if count not in self.pricings:
            same = self.kinds if self.kinds.microbatches == count else self.kinds.at(count)
            self.pricings[count] = Pricing(same or self._kinds(count), self.options)
        for n in submeshes:
            if n not in known:
                known[n] = self.pricings[count].on(self.meshes[n], self.guesses.get(count, {}).get(n))
        return known

    def whole(self, count: int, submeshes: Iterable[int]) -> Mapping[int, Priced]:
        """The same with all ways priced."""
        some = tuple(submeshes)
        known = self.priced(count, some)
        known.update({n: known[n].whole() for n in some})
        return known

    def at(self, count: int, choice: Open, limit: float = math.inf) -> Generator[float, Sequence[float], Tried]:
        """The best pipeline with this number of microbatches, if one promises less than a limit in seconds.

        A task of `parallel_map.in_step`, side by side with those of other numbers; stops as `divisions` does.
        """
        question, divisions = yield from self.divisions(count, choice, limit)
        best: Found | None = None
        for division in divisions:
            best = self.played(division, question, choice, math.inf if best is None else best.seconds) or best
        return Tried(best, self._priced(count, choice))

    def _priced(self, count: int, choice: Open) -> Mapping[int, Ways]:
        """The ways to run layers with this number on every submesh, of kinds that are priced, guessed or too large."""
        usable, found = self.usable(choice), self.known[count]

        def ways_on(n: int, kind: int) -> tuple[Trade, ...]:
            least = self.least[kind] / self.meshes[n].size
            return found[n].found(kind) if least <= usable[n] else (too_large(least),)

        return {n: {kind: some for kind in self.kinds.stage if (some := ways_on(n, kind))} for n in found}

    def played(self, division: Division, question: Question, choice: Open, limit: float = math.inf) -> Found | None:
        """A division under the best schedule that its memory allows, if that takes less than a limit in seconds."""
        kinds, room = self.kinds.of_layer, self.room(choice)
        plays = Plays(self.cluster, self.meshes, kinds, self.borders, room, choice.schedules, choice.policies)
        return plays.best(division, question, self.known[question.microbatches], limit)

    def _plain(self, divisions: Sequence[Division], choice: Open) -> Sequence[Division]:
        """Those without a stage that is recomputed behind one that is not, which hands back more than is priced."""

        def is_plain(division: Division) -> bool:
            policies = [ways(choice.policies)[part.option][0] for part in division.parts]
            return not any(a == remat.NONE != b for a, b in itertools.pairwise(policies))

        return [d for d in divisions if is_plain(d)] or divisions

    def divisions(
        self, count: int, choice: Open, limit: float = math.inf
    ) -> Generator[float, Sequence[float], tuple[Question, tuple[Division, ...]]]:
        """The best divisions with this number of microbatches below a limit in seconds, and what they answer.

        Stops with the seconds on the first submeshes, and goes on to others that may lead to less than any number has.
        Where nothing fits, and nothing is known that does, no memory is left free.
        """
        first, *others = self.turns(by_itself=math.isfinite(choice.limit))
        question, found = self._settled(count, choice, first, limit)
        limit = min(limit, *(yield _seconds(found)))
        for n, some in enumerate(others):
            known = (*first, *itertools.chain(*others[:n]))
            if not self._promise(count, choice, known, some, limit * (1 - WORTH)):
                break
            question, better = self._settled(count, choice, (*known, *some), limit * (1 - TOLERANCE))
            found = (*better, *found)
            limit = min(limit, _seconds(found))
        if choice.reserve and math.isinf(limit):
            return parallel_map.here([partial(self.divisions, count, replace(choice, reserve=0.0))])[0]
        return question, found

    def _promise(self, count: int, choice: Open, known: Sequence[int], others: Sequence[int], limit: float) -> bool:
        """Whether submeshes without prices may lead to less than a limit in seconds.

        Kinds of layers are priced on these others, those of the most layers first, ever more of them while they may.
        """
        prices, holds_least = {n: self._ways(count, choice, n) for n in known}, _made_for(choice)[-1]
        kinds = sorted(self.kinds.stage, key=lambda kind: (-self.kinds.of_layer.count(kind), kind))
        for done in (0, *(2**i for i in range((len(kinds) - 1).bit_length()))):
            some = {n: self._ways(count, choice, n, kinds[:done]) for n in others}
            hoped = self.at_best({**prices, **some})
            if not search(self._asked(count, choice, self._tables(choice, hoped), holds_least), TOLERANCE, limit):
                return False
        return True

    def _settled(
        self, count: int, choice: Open, submeshes: Sequence[int], limit: float = math.inf
    ) -> tuple[Question, tuple[Division, ...]]:
        """The best divisions over these submeshes, below a limit in seconds, and what they answer.

        Made for the memory of one schedule after the other: those that have more in flight wait less for transfers,
        so that with less in flight only divisions that hope for less time are of use.
        """
        settled: list[tuple[Question, Sequence[Division]]] = []
        for schedule in _made_for(choice):
            question, divisions = self._settled_under(schedule, count, choice, submeshes, limit)
            best = self._plain(divisions, choice)[:PLAYED]
            settled.append((question, best))
            limit = min(limit, _seconds(best) * (1 - WORTH))
        return settled[-1][0], tuple(division for _, best in settled for division in best)

    def _settled_under(
        self, schedule: str, count: int, choice: Open, submeshes: Sequence[int], limit: float
    ) -> tuple[Question, tuple[Division, ...]]:
        """The best divisions for the memory of a schedule, of ways to run layers that are priced.

        While the best ones hope for ways that are not priced, the next ones of the layers of such stages are.
        """
        while True:
            priced = {n: self._ways(count, choice, n) for n in submeshes}
            question = self._asked(count, choice, self._tables(choice, priced), schedule)
            found = search(question, TOLERANCE, limit)
            hopes = [self._hopes(count, choice, division) for division in found]
            promising = [h for h, d in zip(hopes, found, strict=True) if d.seconds <= found[0].seconds * (1 + WORTH)]
            missing = set[tuple[int, int]]().union(*promising)
            if not missing:
                return question, tuple(d for h, d in zip(hopes, found, strict=True) if not h)
            known = self.known[count]
            for n, some in itertools.groupby(sorted(missing), key=lambda pair: pair[0]):
                known[n] = known[n].deeper(kind for _, kind in some)

    def _hopes(self, count: int, choice: Open, division: Division) -> set[tuple[int, int]]:
        """(submesh, kind of layers) that a division runs in ways that are not priced."""
        options, known = ways(choice.policies), self.known[count]
        return {
            (part.placement.submesh, kind)
            for part in division.parts
            for kind in self.kinds.of_layer[part.first : part.last]
            if known[part.placement.submesh].is_hoped(kind, options[part.option][1])
        }

    def turns(self, *, by_itself: bool = False) -> tuple[tuple[int, ...], ...]:
        """Submeshes in the order in which layers are priced on them, those of a turn together.

        `by_itself`: one device comes first, which bounds all others.
        """
        if len(self.cluster.groups) > 1:
            return (tuple(self.meshes),)
        host, total = self.cluster.devices_per_host, self.cluster.num_devices
        sizes = {n: mesh.size for n, mesh in self.meshes.items()}
        even = [n for n, size in sizes.items() if total % size == 0]
        one = tuple(n for n in even if sizes[n] <= host)
        odd = tuple(n for n in sizes if n not in even)  # together: 3 devices are of use where 5 are
        single = tuple(n for n in one if sizes[n] == 1)
        several = tuple(n for n in one if sizes[n] > 1)
        within = (single, several) if by_itself and several else (one,)
        return (*within, *((n,) for n in even if n not in one), *((odd,) if odd else ()))

    def at_best(self, known: Mapping[int, Ways]) -> Mapping[int, Ways]:
        """The same with the least that layers take and hold on all other submeshes.

        They take as much of all devices as on the largest known one that divides a submesh, or all devices where the
        submesh does not: dimensions that three devices do not divide may well take less of four.
        """
        return {
            n: {k: known.get(n, {}).get(k) or self._at_best(known, n, k) for k in self.kinds.stage} for n in self.meshes
        }

    def _at_best(self, known: Mapping[int, Ways], n: int, kind: int) -> tuple[Trade, ...]:
        sizes = {k: mesh.size for k, mesh in self.meshes.items()}
        whole = self.cluster.num_devices if self.cluster.num_devices % sizes[n] else sizes[n]
        smaller = [k for k in known if kind in known[k] and sizes[k] <= sizes[n] and whole % sizes[k] == 0]
        largest = max(smaller, key=lambda k: sizes[k])
        return tuple(one.scaled(sizes[largest] / sizes[n]) for one in known[largest][kind])

    def question(self, count: int, choice: Open, schedule: str) -> Question:
        """What the dynamic program is asked about a number of microbatches under a schedule: all submeshes and ways."""
        self.whole(count, self.meshes)
        priced = {n: self._ways(count, choice, n) for n in self.meshes}
        return self._asked(count, choice, self._tables(choice, priced), schedule)

    def _tables(self, choice: Open, known: Mapping[int, Ways]) -> Mapping[int, Table]:
        """Prices of all runs of layers."""
        return {n: table(found, self.kinds.of_layer, choice.policies) for n, found in known.items()}

    def _ways(self, count: int, choice: Open, n: int, kinds: Iterable[int] | None = None) -> Ways:
        """The ways to run layers of these kinds, or all, on a submesh, as far as they are asked for.

        Those of kinds that a submesh cannot hold however they are run are not priced.
        """
        size, room, priced = self.meshes[n].size, self.usable(choice)[n], self.priced(count, (n,))[n]
        least = {kind: self.least[kind] / size for kind in (self.kinds.stage if kinds is None else kinds)}
        return {k: priced.ways(k) if nbytes <= room else (too_large(nbytes),) for k, nbytes in least.items()}

    def _asked(self, count: int, choice: Open, prices: Mapping[int, Table], schedule: str) -> Question:
        """The same about the submeshes that have prices."""
        unused = next(iter(prices.values()))
        stash = SCHEDULES[schedule].stash
        return Question(
            layers=len(self.kinds.of_layer),
            devices=self.cluster.num_devices,
            placements=tuple(p for p in self.where if p.submesh in prices),
            prices=tuple(prices.get(n, unused) for n in self.meshes),
            memory=self.usable(choice),
            microbatches=count,
            in_flight=lambda stages: stash(Size(stages, count), 0),
            transfer=self._transfer(count),
            stages=choice.stages,
            fewest=choice.fewest,
        )

    def room(self, choice: Open) -> tuple[float, ...]:
        """Bytes that a device of each submesh may hold."""
        return tuple(choice.memory or m.device.memory_bytes * (1 - MARGIN) for m in self.meshes.values())

    def usable(self, choice: Open) -> tuple[float, ...]:
        """What of it divisions may fill."""
        return tuple((1 - choice.reserve) * nbytes for nbytes in self.room(choice))

    def _transfer(self, count: int) -> Floats:
        """Seconds per microbatch, both ways, over the border in front of a layer where a stage begins on a device.

        Every device of the stage in front sends, as if the next one had as many at least.
        """
        if count not in self.transfers:
            found = np.zeros((len(self.meshes), len(self.borders) + 2, self.cluster.num_devices + 1))
            both_ways = np.array(self.borders).reshape(-1, 2) / count
            for n, mesh in self.meshes.items():
                for d in range(1, self.cluster.num_devices):
                    found[n, 1:-1, d] = transfer_seconds(self.cluster, both_ways, d, mesh.size).sum(1)
            self.transfers[count] = found
        return self.transfers[count]


def _is_part(cluster: Cluster, devices: int) -> bool:
    """Whether the first so many devices are some with links of their own: five of two rows of four are not."""
    try:
        cluster.part(0, devices)
    except ClusterError:
        return False
    return True


def _made_for(choice: Open) -> tuple[str, ...]:
    """The schedules for whose memory divisions are made."""
    return tuple(name for name in MADE_FOR if name in choice.schedules) or choice.schedules


def _seconds(found: Sequence[Division]) -> float:
    """Of the best of several divisions; infinite if there is none."""
    return min((division.seconds for division in found), default=math.inf)
