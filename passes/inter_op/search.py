"""Inter-operator search: stages, submeshes, microbatches, schedule and rematerialisation together.

    for a number of microbatches m
        cost of one layer of every kind on every submesh                passes/inter_op/layer_costs.py
        the fastest divisions into stages, within the memory of eager 1F1B (whose transfers are hidden)
            and within that of 1F1B                                     passes/inter_op/dynamic_program.py
        each division simulated under the schedules that fit            passes/inter_op/simulate.py

The fastest simulated division is the answer; ties go to fewer stages, then to fewer microbatches. Costs of layers take
nearly all of the time, so a cost is computed only where it may lead to a faster pipeline:

    microbatches   Two numbers at a time, side by side. Fewer microbatches mean a longer pipeline bubble and less of
                   everything else. The search starts near the least number at which the step as written fits and a
                   pipeline over all hosts is filled. It goes on with the numbers whose estimates beat the incumbent;
                   estimates extrapolate the costs for other numbers (passes/inter_op/extrapolate.py)
                                                                                               -> InterOpSearch._next
    options        The fastest option of a layer is costed first. For later numbers of microbatches it is costed only if
                   a near-best division uses its estimate. An option with less memory is costed if a near-best division
                   would use it with the memory of even pieces and no extra time  -> InterOpSearch._best_divisions_for
    submeshes      Those of one host first (of one device, where a step to beat is known), then those of several hosts,
                   then those whose size does not divide the cluster; each group only if it may improve the division.
                   A layer hardly ever takes fewer device-seconds, or fewer bytes over all devices, on more devices
                                                                                           -> InterOpSearch.divisions
    nothing        is costed if state and gradient accumulators exceed the memory of the cluster -> InterOpSearch.fits

Divisions leave a share `InterOpEffort.reserve` of the memory free, unless nothing fits so. The plan of a whole stage
takes a little more or less memory than the sum of its layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from autopar import parallel_map
from autopar.cost_models.memory.lower_bound import written_bytes
from autopar.errors import MicrobatchError
from autopar.hardware.cluster import Cluster, LogicalMesh
from autopar.ir.graph import Graph
from autopar.ir.problem import Floats
from autopar.passes.inter_op.dynamic_program import Division, Placement, Question, RunCosts, search
from autopar.passes.inter_op.effort import INTER_OP, InterOpEffort
from autopar.passes.inter_op.extrapolate import options_anywhere, options_at
from autopar.passes.inter_op.layer_costs import (
    Border,
    LayerClasses,
    LayerCosts,
    OptionsByKind,
    SubmeshCosts,
    border_bytes,
    layer_classes,
    run_costs,
    run_options,
)
from autopar.passes.inter_op.simulate import FoundPipeline, Simulator, rank, transfer_seconds
from autopar.passes.inter_op.stage_options import StageOption, too_large
from autopar.passes.inter_op.submeshes import submeshes
from autopar.passes.layers import find as layers_pass
from autopar.passes.layers.find import Layers
from autopar.passes.microbatch.microbatches import Microbatches
from autopar.passes.microbatch.split import split
from autopar.passes.remat import rewrite as remat
from autopar.passes.remat.memory_policy import MARGIN
from autopar.passes.remat.options import Options
from autopar.schedules import SCHEDULES, Size

#: Schedules that are simulated by default, in ascending order of the microbatches in flight.
OPEN = ("1f1b", "eager-1f1b", "gpipe")
#: Schedules for whose memory divisions are searched, in descending order of the microbatches in flight.
MADE_FOR = ("eager-1f1b", "1f1b")


@dataclass(frozen=True)
class SearchSpace:
    """What the search chooses from.

    Attributes:
        batch: positions of the argument leaves that hold the batch.
        counts: numbers of microbatches, ascending.
        stages: how many; None: any number from `fewest` on.
        schedules: names, in ascending order of the microbatches in flight.
        policies: rematerialisation policies, each for all layers of a stage.
        memory: bytes per device; None: the device's own.
        per_microbatch: globs of totals that may be those of a microbatch; see `autopar.passes.microbatch.split.split`.
        fewest: the least number of stages.
        limit: step time (s) to beat.
        reserve: share of the memory that divisions leave free.
    """

    batch: tuple[int, ...]
    counts: tuple[int, ...]
    stages: int | None = None
    schedules: tuple[str, ...] = OPEN
    policies: tuple[str, ...] = (remat.NONE, remat.FULL)
    memory: float | None = None
    per_microbatch: tuple[str, ...] = ()
    fewest: int = 1
    limit: float = math.inf
    reserve: float = field(default_factory=lambda: INTER_OP.reserve)


def microbatch_counts(extent: int, effort: InterOpEffort = INTER_OP) -> tuple[int, ...]:
    """Numbers of microbatches to try for a batch: the smallest divisor in every interval [2^k, 2^(k+1))."""
    divisors = [m for m in range(1, extent + 1) if extent % m == 0 and extent // m <= effort.examples]
    first = {m.bit_length(): m for m in reversed(divisors)}
    return tuple(sorted(first.values()))


def splittable_counts(
    graph: Graph,
    counts: Sequence[int],
    batch: Sequence[int],
    per_microbatch: Sequence[str] = (),
    splits: dict[int, Microbatches] | None = None,
) -> tuple[int, ...]:
    """The numbers of microbatches into which a step can be split, ascending.

    A step that can be split into some number can be split into all smaller numbers. Microbatches may be too small, for
    example for experts that choose among the tokens of several examples. The step split into the largest number is put
    into `splits`.

    Raises:
        MicrobatchError: the step cannot be split into any of them; the reason is that of the smallest number.
    """

    def parts(number: int, *, reasons: bool) -> Microbatches:
        return split(graph, number, batch, per_microbatch=tuple(per_microbatch), reasons=reasons)

    least, *larger = sorted(counts)
    for number in reversed(larger):
        try:
            microbatches = parts(number, reasons=False)
        except MicrobatchError:
            if number == larger[-1]:
                parts(least, reasons=True)  # if the smallest number fails as well, all others do
        else:
            break
    else:
        number, microbatches = least, parts(least, reasons=True)
    if splits is not None:
        splits[number] = microbatches
    return tuple(sorted(c for c in counts if c <= number))


@dataclass(frozen=True, eq=False)
class CountResult:
    """The result for one number of microbatches.

    Attributes:
        best: the fastest pipeline; None if none fits.
        options: submesh -> options of the layers, as far as they are costed.
    """

    best: FoundPipeline | None
    options: Mapping[int, OptionsByKind]


@dataclass(eq=False)
class InterOpSearch:
    """The search of one step on one cluster. Costs of layers are kept from one call to the next."""

    graph: Graph
    avals: tuple[Any, ...]
    cluster: Cluster
    batch: tuple[int, ...]
    options: Options
    per_microbatch: tuple[str, ...] = ()
    parts: Mapping[int, Microbatches] = field(default_factory=dict)
    effort: InterOpEffort = INTER_OP
    layers: Layers = field(init=False)
    kinds: LayerClasses = field(init=False)
    borders: tuple[Border, ...] = field(init=False)
    meshes: Mapping[int, LogicalMesh] = field(init=False)
    where: tuple[Placement, ...] = field(init=False)
    least: Mapping[int, float] = field(init=False)
    submesh_costs: dict[int, dict[int, SubmeshCosts]] = field(default_factory=dict)
    layer_costs: dict[int, LayerCosts] = field(default_factory=dict)
    transfers: dict[int, Floats] = field(default_factory=dict)
    runs: dict[int, tuple[Hashable, RunCosts]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layers = layers_pass.find(self.graph)
        self.kinds = self._kinds(max(self.parts, default=1))
        self.borders = border_bytes(self.kinds.stages.split, self.layers)
        self.least = self.kinds.least_bytes()
        self.where, self.meshes = submeshes(self.cluster, self.effort)

    def split_into(self, count: int) -> Microbatches:
        """The step split into a number of microbatches."""
        return self.parts.get(count) or split(self.graph, count, self.batch, per_microbatch=self.per_microbatch)

    def _kinds(self, count: int) -> LayerClasses:
        return layer_classes(self.split_into(count), self.layers, self.avals)

    def best(self, space: SearchSpace) -> FoundPipeline | None:
        """The fastest pipeline; None if none fits."""
        if not self.fits(space):
            return None
        falling = sorted(space.counts, reverse=True)
        start = self._start(falling, space)
        results: dict[int, CountResult] = {}
        best, limit = None, space.limit
        group = falling[start : start + parallel_map.ABREAST]
        while group:
            count_results = parallel_map.with_barrier([partial(self.at, count, space, limit) for count in group])
            results.update(zip(group, count_results, strict=True))
            best = min(
                (count_result.best for count_result in results.values() if count_result.best is not None),
                key=rank,
                default=None,
            )
            limit = space.limit if best is None else min(space.limit, (1 + self.effort.formula_error) * best.formula)
            priced = {count: count_result.options for count, count_result in results.items()}
            group = self._next(falling, space, priced, best)
        return best

    def _next(
        self,
        falling: Sequence[int],
        space: SearchSpace,
        priced: Mapping[int, Mapping[int, OptionsByKind]],
        best: FoundPipeline | None,
    ) -> Sequence[int]:
        """At most two further numbers of microbatches whose step, as estimated, may beat the incumbent, best first.

        Numbers are visited from that of the incumbent in both directions, until an estimate may not beat it. Without
        an incumbent, submeshes without costs count with their lower bounds.
        """
        from_ = falling.index(best.microbatches) if best else min(falling.index(count) for count in priced)
        schedule = best.schedule if best and best.schedule in MADE_FOR else _made_for(space)[-1]

        def estimated(count: int, limit: float = math.inf) -> float:
            if best:
                by_submesh = {n: w for n, w in options_at(count, priced).items() if w.keys() == self.kinds.stage.keys()}
            else:
                by_submesh = self.lower_bounds_of(options_anywhere(count, priced))
            prices = self._run_costs(space, by_submesh)
            return _seconds(search(self._asked(count, space, prices, schedule), self.effort.near, limit))

        limit = (1 + self.effort.estimate_error) * estimated(best.microbatches) if best else space.limit
        estimates: dict[int, float] = {}
        for counts in (falling[from_ + 1 :], falling[:from_][::-1]):
            by_seconds = ((estimated(count, limit), count) for count in counts if count not in priced)
            estimates.update(
                (count, s) for s, count in itertools.takewhile(lambda pair: pair[0] < math.inf, by_seconds)
            )
        return sorted(estimates, key=lambda count: (estimates[count], count))[: parallel_map.ABREAST]

    def _start(self, falling: Sequence[int], space: SearchSpace) -> int:
        """Position, in descending numbers, of the number before the least one with which the step as written fits.

        The step is cut into even pieces over all devices. Assumed are a stage per host, the mean number of microbatches
        in flight under 1F1B, (hosts + 1) / 2, and a bubble of at most an eighth of the computation.
        """
        hosts, capacity = self.cluster.hosts, self._capacity_bytes(space) - self._state_bytes
        activations = written_bytes(self.graph) - sum(self.graph.types[v].nbytes for v in self.graph.inputs)
        flying, full = activations * (hosts + 1) / 2, self.effort.bubble * (hosts - 1)
        fit = [i for i, count in enumerate(falling) if flying <= count * capacity and count >= full]
        return max(fit[-1] - 1, 0) if fit else 0

    def fits(self, space: SearchSpace) -> bool:
        """Whether state and gradient accumulators, in even pieces, fit into the memory of the cluster."""
        return self._state_bytes <= self._capacity_bytes(space)

    @cached_property
    def _state_bytes(self) -> float:
        """Bytes of state and gradient accumulators, over all devices."""
        return sum(self.least[kind] for kind in self.kinds.of_layer)

    def _capacity_bytes(self, space: SearchSpace) -> float:
        """Usable bytes of the cluster, as if every device had those of the largest."""
        return self.cluster.num_devices * max(self.usable(space))

    def priced(self, count: int, submeshes: Iterable[int]) -> dict[int, SubmeshCosts]:
        """Options of the layers of every kind on these submeshes with this number of microbatches.

        Options with less memory than the fastest are costed on demand.
        """
        submesh_costs = self.submesh_costs.setdefault(count, {})
        if count not in self.layer_costs:
            same = self.kinds if self.kinds.microbatches == count else self.kinds.at(count)
            self.layer_costs[count] = LayerCosts(same or self._kinds(count), self.options)
        for n in submeshes:
            if n not in submesh_costs:
                submesh_costs[n] = self.layer_costs[count].on(self.meshes[n])
        return submesh_costs

    def whole(self, count: int, submeshes: Iterable[int]) -> Mapping[int, SubmeshCosts]:
        """As `priced`, with all options costed."""
        wanted = tuple(submeshes)
        submesh_costs = self.priced(count, wanted)
        submesh_costs.update({n: submesh_costs[n].whole() for n in wanted})
        return submesh_costs

    def at(
        self, count: int, space: SearchSpace, limit: float = math.inf
    ) -> Generator[float, Sequence[float], CountResult]:
        """The fastest pipeline with this number of microbatches below a step time of `limit` seconds.

        A task of `parallel_map.with_barrier`, beside those of other numbers. It yields where `divisions` does.
        """
        question, divisions = yield from self.divisions(count, space, limit)
        best: FoundPipeline | None = None
        for division in divisions:
            best = self.simulated(division, question, space, math.inf if best is None else best.seconds) or best
        return CountResult(best, self._priced(count, space))

    def _priced(self, count: int, space: SearchSpace) -> Mapping[int, OptionsByKind]:
        """Submesh -> options of the kinds of layers that are costed or too large there."""
        usable, costs = self.usable(space), self.submesh_costs[count]

        def options_on(n: int, kind: int) -> tuple[StageOption, ...]:
            least = self.least[kind] / self.meshes[n].size
            return costs[n].costed(kind) if least <= usable[n] else (too_large(least),)

        return {n: {kind: options for kind in self.kinds.stage if (options := options_on(n, kind))} for n in costs}

    def simulated(
        self, division: Division, question: Question, space: SearchSpace, limit: float = math.inf
    ) -> FoundPipeline | None:
        """A division under the fastest schedule that fits; None if that takes `limit` seconds or more."""
        kinds, capacity = self.kinds.of_layer, self.capacity(space)
        simulator = Simulator(self.cluster, self.meshes, kinds, self.borders, capacity, space.schedules, space.policies)
        return simulator.best(division, question, self.submesh_costs[question.microbatches], limit)

    def _plain(self, divisions: Sequence[Division], space: SearchSpace) -> Sequence[Division]:
        """Drops divisions in which a rematerialised stage follows one that is not.

        The costs of layers underestimate the gradient that such a stage sends back. If nothing else is left, all stay.
        """

        def is_plain(division: Division) -> bool:
            policies = [run_options(space.policies)[part.option][0] for part in division.parts]
            return not any(a == remat.NONE != b for a, b in itertools.pairwise(policies))

        return [d for d in divisions if is_plain(d)] or divisions

    def divisions(
        self, count: int, space: SearchSpace, limit: float = math.inf
    ) -> Generator[float, Sequence[float], tuple[Question, tuple[Division, ...]]]:
        """The fastest divisions with this number of microbatches below `limit` seconds, and the question they answer.

        Yields the step time on the first submeshes, and receives the best of all numbers of microbatches. Further
        submeshes are costed only if they may beat it. If nothing fits and there is no incumbent, the search is repeated
        without the reserve of memory.
        """
        first, *further = self.mesh_groups(by_itself=math.isfinite(space.limit))
        question, divisions = self._best_divisions(count, space, first, limit)
        limit = min(limit, *(yield _seconds(divisions)))
        for n, group in enumerate(further):
            costed = (*first, *itertools.chain(*further[:n]))
            if not self._may_improve(count, space, costed, group, limit * (1 - self.effort.gain_of_submeshes)):
                break
            question, better = self._best_divisions(count, space, (*costed, *group), limit * (1 - self.effort.near))
            divisions = (*better, *divisions)
            limit = min(limit, _seconds(divisions))
        if space.reserve and math.isinf(limit):
            return parallel_map.in_this_process([partial(self.divisions, count, replace(space, reserve=0.0))])[0]
        return question, divisions

    def _may_improve(
        self, count: int, space: SearchSpace, costed: Sequence[int], added: Sequence[int], limit: float
    ) -> bool:
        """Whether adding submeshes that are not costed yet could beat `limit` seconds, by their lower bounds.

        Kinds of layers are costed on these submeshes one after the other, the most frequent first, until the bound
        exceeds the limit.
        """
        prices, holds_least = {n: self._options_on(count, space, n) for n in costed}, _made_for(space)[-1]
        kinds = sorted(self.kinds.stage, key=lambda kind: (-self.kinds.of_layer.count(kind), kind))
        for done in (0, *(2**i for i in range((len(kinds) - 1).bit_length()))):
            added_options = {n: self._options_on(count, space, n, kinds[:done]) for n in added}
            run_costs = self._run_costs(space, self.lower_bounds_of({**prices, **added_options}))
            if not search(self._asked(count, space, run_costs, holds_least), self.effort.near, limit):
                return False
        return True

    def _best_divisions(
        self, count: int, space: SearchSpace, submeshes: Sequence[int], limit: float = math.inf
    ) -> tuple[Question, tuple[Division, ...]]:
        """The fastest divisions over these submeshes below `limit` seconds, and the question they answer.

        Searched for the memory of one schedule after the other. A schedule with more microbatches in flight waits less
        for transfers, so a schedule with fewer in flight is of use only with a faster division.
        """
        settled: list[tuple[Question, Sequence[Division]]] = []
        for schedule in _made_for(space):
            question, divisions = self._best_divisions_for(schedule, count, space, submeshes, limit)
            best = self._plain(divisions, space)[: self.effort.simulated]
            settled.append((question, best))
            limit = min(limit, _seconds(best) * (1 - self.effort.gain_of_submeshes))
        return settled[-1][0], tuple(division for _, best in settled for division in best)

    def _best_divisions_for(
        self, schedule: str, count: int, space: SearchSpace, submeshes: Sequence[int], limit: float
    ) -> tuple[Question, tuple[Division, ...]]:
        """The fastest divisions for the memory of one schedule that use costed options only.

        While near-best divisions use options without costs, the next option of the layers of such stages is costed.
        """
        while True:
            priced = {n: self._options_on(count, space, n) for n in submeshes}
            question = self._asked(count, space, self._run_costs(space, priced), schedule)
            divisions = search(question, self.effort.near, limit)
            without_costs = [self._without_costs(count, space, division) for division in divisions]
            near_best = [
                h
                for h, d in zip(without_costs, divisions, strict=True)
                if d.seconds <= divisions[0].seconds * (1 + self.effort.gain_of_submeshes)
            ]
            missing = set[tuple[int, int]]().union(*near_best)
            if not missing:
                return question, tuple(d for h, d in zip(without_costs, divisions, strict=True) if not h)
            costs = self.submesh_costs[count]
            for n, pairs in itertools.groupby(sorted(missing), key=lambda pair: pair[0]):
                costs[n] = costs[n].deeper(kind for _, kind in pairs)

    def _without_costs(self, count: int, space: SearchSpace, division: Division) -> set[tuple[int, int]]:
        """(submesh, kind of layer) pairs for which a division uses options without costs."""
        options, costs = run_options(space.policies), self.submesh_costs[count]
        return {
            (part.placement.submesh, kind)
            for part in division.parts
            for kind in self.kinds.of_layer[part.first : part.last]
            if costs[part.placement.submesh].is_lower_bound(kind, options[part.option][1])
        }

    def mesh_groups(self, *, by_itself: bool = False) -> tuple[tuple[int, ...], ...]:
        """Groups of submeshes, in the order in which layers are costed on them.

        `by_itself`: the submesh of one device is a group of its own and comes first. Its costs bound those of all
        others.
        """
        if len(self.cluster.groups) > 1:
            return (tuple(self.meshes),)
        host, total = self.cluster.devices_per_host, self.cluster.num_devices
        sizes = {n: mesh.size for n, mesh in self.meshes.items()}
        even = [n for n, size in sizes.items() if total % size == 0]
        divisors = tuple(n for n in even if sizes[n] <= host)
        odd = tuple(n for n in sizes if n not in even)  # one group: a stage on 3 devices needs another on 5
        single = tuple(n for n in divisors if sizes[n] == 1)
        several = tuple(n for n in divisors if sizes[n] > 1)
        within = (single, several) if by_itself and several else (divisors,)
        return (*within, *((n,) for n in even if n not in divisors), *((odd,) if odd else ()))

    def lower_bounds_of(self, by_submesh: Mapping[int, OptionsByKind]) -> Mapping[int, OptionsByKind]:
        """Known options, with lower bounds of time and memory for all other submeshes.

        On more devices a layer takes no fewer device-seconds and no fewer bytes over all devices. The bound on a
        submesh scales the costs on the largest known submesh whose size divides it, or, where the submesh does not
        divide the cluster, that divides the cluster: dimensions that 3 devices do not divide may be faster on 4.
        """
        return {
            n: {k: by_submesh.get(n, {}).get(k) or self._lower_bounds_of(by_submesh, n, k) for k in self.kinds.stage}
            for n in self.meshes
        }

    def _lower_bounds_of(self, by_submesh: Mapping[int, OptionsByKind], n: int, kind: int) -> tuple[StageOption, ...]:
        sizes = {k: mesh.size for k, mesh in self.meshes.items()}
        whole = self.cluster.num_devices if self.cluster.num_devices % sizes[n] else sizes[n]
        smaller = [k for k in by_submesh if kind in by_submesh[k] and sizes[k] <= sizes[n] and whole % sizes[k] == 0]
        largest = max(smaller, key=lambda k: sizes[k])
        return tuple(option.scaled(sizes[largest] / sizes[n]) for option in by_submesh[largest][kind])

    def question(self, count: int, space: SearchSpace, schedule: str) -> Question:
        """The input of the dynamic program for a number of microbatches and a schedule: all submeshes and options."""
        self.whole(count, self.meshes)
        priced = {n: self._options_on(count, space, n) for n in self.meshes}
        return self._asked(count, space, self._run_costs(space, priced), schedule)

    def _run_costs(self, space: SearchSpace, by_submesh: Mapping[int, OptionsByKind]) -> Mapping[int, RunCosts]:
        """Costs of all runs of layers."""
        return {n: self._run_costs_on(n, by_kind, space.policies) for n, by_kind in by_submesh.items()}

    def _run_costs_on(self, n: int, by_kind: OptionsByKind, policies: Sequence[str]) -> RunCosts:
        """Costs of all runs on a submesh, kept until other options are costed there."""
        options = policies, tuple(by_kind.items())
        if n not in self.runs or self.runs[n][0] != options:
            self.runs[n] = options, run_costs(by_kind, self.kinds.of_layer, policies)
        return self.runs[n][1]

    def _options_on(self, count: int, space: SearchSpace, n: int, kinds: Iterable[int] | None = None) -> OptionsByKind:
        """Options of these kinds of layers, or of all, on a submesh.

        A kind whose state and gradient accumulators do not fit on the submesh is not costed.
        """
        size, capacity, priced = self.meshes[n].size, self.usable(space)[n], self.priced(count, (n,))[n]
        least = {kind: self.least[kind] / size for kind in (self.kinds.stage if kinds is None else kinds)}
        return {k: priced.options(k) if nbytes <= capacity else (too_large(nbytes),) for k, nbytes in least.items()}

    def _asked(self, count: int, space: SearchSpace, prices: Mapping[int, RunCosts], schedule: str) -> Question:
        """The input of the dynamic program over the submeshes that have costs."""
        unused = next(iter(prices.values()))
        stash = SCHEDULES[schedule].stash
        return Question(
            layers=len(self.kinds.of_layer),
            devices=self.cluster.num_devices,
            placements=tuple(p for p in self.where if p.submesh in prices),
            prices=tuple(prices.get(n, unused) for n in self.meshes),
            memory=self.usable(space),
            microbatches=count,
            in_flight=lambda stages: stash(Size(stages, count), 0),
            transfer=self._transfer(count),
            stages=space.stages,
            fewest=space.fewest,
        )

    def capacity(self, space: SearchSpace) -> tuple[float, ...]:
        """Bytes available on a device of each submesh."""
        return tuple(space.memory or m.device.memory_bytes * (1 - MARGIN) for m in self.meshes.values())

    def usable(self, space: SearchSpace) -> tuple[float, ...]:
        """`capacity` without the reserve."""
        return tuple((1 - space.reserve) * nbytes for nbytes in self.capacity(space))

    def _transfer(self, count: int) -> Floats:
        """Seconds per microbatch, both options, over the border in front of a layer where a stage begins on a device.

        Every device of the stage in front sends, as if the next one had as many at least.
        """
        if count not in self.transfers:
            seconds = np.zeros((len(self.meshes), len(self.borders) + 2, self.cluster.num_devices + 1))
            both_ways = np.array(self.borders).reshape(-1, 2) / count
            for n, mesh in self.meshes.items():
                for d in range(1, self.cluster.num_devices):
                    seconds[n, 1:-1, d] = transfer_seconds(self.cluster, both_ways, d, mesh.size).sum(1)
            self.transfers[count] = seconds
        return self.transfers[count]


def _made_for(space: SearchSpace) -> tuple[str, ...]:
    """The schedules for whose memory divisions are searched."""
    return tuple(name for name in MADE_FOR if name in space.schedules) or space.schedules


def _seconds(divisions: Sequence[Division]) -> float:
    """Step time (s) of the fastest of these divisions; inf without any."""
    return min((division.seconds for division in divisions), default=math.inf)
