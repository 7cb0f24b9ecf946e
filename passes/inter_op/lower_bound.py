"""Lower bound on the step of every pipeline in a search space.

A stage that takes t_s seconds per microbatch is busy for m t_s in a step of m microbatches. The first microbatch comes
to it through the passes of the stages in front, and the last one goes back through them, so that

    T  >=  max_s ( sum_{i<s} t_i  +  m t_s ),     T  >=  max_s ( m t_s  +  what s runs once per step )

whatever the schedule; without the sum under schedules that split backward passes. With bounds of layers for t and bytes
(`autopar.passes.inter_op.layer_bounds`), the least of these over all divisions bounds every pipeline  -> least_step.py

A stage fits if its state, its accumulators and the residuals of the microbatches in flight do, in even shards, under
the schedule with the fewest in flight. Transfers and temporary values are left out. What less memory costs is bounded
at a few rates w per byte: with the price of its bytes in t_w, a stage with residuals of r bytes takes at least
t_w + w (r - memory) seconds                                                                  -> layer_bounds.priced_on

One stage on all devices may rematerialise single layers and offload state, on any mesh that is a candidate where
stages are not searched                                                                     -> PipelineBound._one_stage

Layers that are not bounded for a number of microbatches m have the bounds for a smaller m' that divides it: larger
microbatches take no longer per example, so that m t(m) >= m' t(m'), and residuals are at least m'/m as large. These
tell the numbers with which the step may be short. For these, layers that take most of the time are bounded on the
submeshes of a division that reaches the bound, until it has no others, and then priced there: in the end no further
bound would raise it                                                                              -> PipelineBound.least
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np

from autopar import parallel_map
from autopar.cost_models.flops import model_flops
from autopar.hardware.cluster import LogicalMesh
from autopar.hardware.meshes import layouts_key, targets
from autopar.ir.problem import Floats
from autopar.passes.inter_op.dynamic_program import ROUNDING, Question, RunCosts
from autopar.passes.inter_op.layer_bounds import (
    FUSED,
    NOTHING,
    BoundedLayers,
    ByteRates,
    LayerBound,
    bound_on,
    bounded_layers,
    priced_on,
)
from autopar.passes.inter_op.layer_costs import sums_of_runs
from autopar.passes.inter_op.least_step import BoundedStage, LeastStep, Priced, least_step
from autopar.passes.inter_op.search import InterOpSearch, SearchSpace
from autopar.passes.remat import rewrite as remat
from autopar.passes.stages.graph import StageGraph
from autopar.rules import Rule, rules_of
from autopar.schedules import SCHEDULES, Size


@dataclass(frozen=True, slots=True)
class PipelineBoundEffort:
    """Which layers are bounded for which numbers of microbatches."""

    # relative difference up to which bounds for numbers of microbatches count as equal, so that the smallest number is
    # bounded first (not measured)
    tolerance: float = 0.02
    # share of the FLOPs of all layers from which on a class of layers is bounded for more than the first number of
    # microbatches, and with rematerialisation (not measured)
    large: float = 0.1
    # gap to the plan at which the bound is not raised further (not measured)
    gap: float = 0.1
    # rematerialisation is bounded if so many times the bytes of all layers, in even shards and without temporaries, may
    # exceed the memory of the smallest submesh (not measured)
    margin: float = 4.0
    # prices of bytes, as shares of the time of a step for all the memory of a device (chosen on GPT-15B and 39B; a
    # third rate raises their bounds by 0.1% at most, for 14% more planning; 2026-11)
    rates: tuple[float, ...] = (0.1, 0.3)


PIPELINE_BOUND = PipelineBoundEffort()


#: Price of all the memory of a device, as a multiple of the seconds of a step, above which no price is tried.
STEEPEST = 1e4
#: One stage on all devices, beside the policies for rematerialisation of other stages.
ONE_STAGE = "one stage"
_Task: TypeAlias = tuple[int, int, str]
"""A submesh, a class of layers, and their policy: no or full rematerialisation, or that of one stage."""


@dataclass(frozen=True, eq=False)
class OneStage:
    """What the layers of a step take at least in one stage.

    Attributes:
        seconds: s per step, shape (policies, layers).
        residuals: bytes per device, in even shards, shape (policies, layers).
        state, sums: bytes per device of state, and of accumulators.
    """

    seconds: Floats
    residuals: Floats
    state: float
    sums: float

    def within(self, memory: float, host_bandwidth: float) -> float:
        """Lower bound (s) on the step, where single layers are rematerialised and state is offloaded.

        With bytes K of a layer's residuals by each policy, bytes S of state and A of accumulators, memory M and
        bandwidth B of the host's link

            seconds  >=  sum over layers of  min over policies (seconds + w K)  +  min(w, 2 / B) S  +  w (A - M)

        for every price of a byte w >= 0, as in `layer_bounds`. It is piecewise linear in w, so that its highest value
        is at a price at which two policies cost the same, or offloading and memory.

        Args:
            memory: bytes per device.
            host_bandwidth: bytes/s of the link to the host's memory; 0: no state is offloaded.

        Returns:
            inf, if nothing fits.
        """
        offload = 2 / host_bandwidth if host_bandwidth else math.inf
        kept_state = 0.0 if host_bandwidth else self.state
        if self.residuals.min(0).sum() + self.sums + kept_state > memory:
            return math.inf
        prices = [np.array([0.0, offload] if host_bandwidth else [0.0])]
        for p, q in itertools.permutations(range(len(self.seconds)), 2):
            saved, again = self.residuals[p] - self.residuals[q], self.seconds[q] - self.seconds[p]
            prices.append(again[saved > 0] / saved[saved > 0])
        w = np.unique(np.concatenate(prices))
        # at higher prices the difference of large numbers would be rounded by more than the bound is lowered for
        w = w[(w >= 0) & (w * memory <= STEEPEST * self.seconds.max(0).sum())]
        least = (self.seconds[..., None] + w * self.residuals[..., None]).min(0).sum(0)
        return float((least + np.minimum(w, offload) * self.state + w * (self.sums - memory)).max())


@dataclass(eq=False)
class PipelineBound:
    """The lower bound of a search.

    Attributes:
        search: the search.
        space: what it chooses from; its limit on the step time and its reserve of memory are ignored.
        planned: step time (s) of a plan, to which the bound is compared; inf: none.
        effort: which layers are bounded.
        bounded: (number of microbatches, submesh, class of layers) -> its bound, as far as it is computed.
        priced: (number of microbatches, submesh, class of layers, policy) -> its bound with the price of its bytes at
            all `rates` (`layer_bounds.priced_on`).
    """

    search: InterOpSearch
    space: SearchSpace
    planned: float = math.inf
    effort: PipelineBoundEffort = PIPELINE_BOUND
    bounded: dict[tuple[int, int, int], LayerBound] = field(default_factory=dict[tuple[int, int, int], LayerBound])
    priced: dict[tuple[int, int, int, str], Floats] = field(default_factory=dict[tuple[int, int, int, str], Floats])

    def least(self) -> float:
        """Lower bound (s) on the step with any number of microbatches; inf if none can fit."""
        counts = sorted(self.space.counts)
        bounds, done = dict.fromkeys(counts, 0.0), set[int]()
        while True:
            least = min((bounds[count] for count in done), default=math.inf)
            worth = [count for count in counts if count not in done and bounds[count] < least]
            if not worth or min(bounds.values()) >= self._enough:
                return min(bounds.values())
            lowest = min(bounds[count] for count in worth)
            # the smallest of about equal ones bounds the others too
            chosen = next(count for count in worth if bounds[count] <= lowest * (1 + self.effort.tolerance))
            self._bound(chosen, least)
            done.add(chosen)
            bounds.update((count, self.step(count).seconds) for count in counts if count % chosen == 0)

    @property
    def _enough(self) -> float:
        """A bound (s) as high is not raised further."""
        return (1 - self.effort.gap) * self.planned

    def step(self, count: int) -> LeastStep:
        """Lower bound with this number of microbatches, from what is bounded for it and for numbers dividing it."""
        bounds = self.layer_bounds(count)
        if not self._on_all:
            return LeastStep(0.0, ())  # devices of several kinds may be one mesh, of which nothing is known
        splits = any(SCHEDULES[s].split for s in self.space.schedules)
        of_layer = self._layers.classes.of_layer
        layers = {n: [bounds[n][c] for c in of_layer] for n in self.search.meshes}
        one_stage = (
            LeastStep(self._one_stage(count, bounds[n], n), (BoundedStage(n, 0, len(of_layer), 0),))
            for n in self._on_all
        )
        divided = least_step(self._question(count, layers), self._prices(count, bounds), splits=splits)
        return min(divided, *one_stage, key=lambda step: step.seconds)

    def _question(self, count: int, layers: Mapping[int, Sequence[LayerBound]]) -> Question:
        """The division of the layers into stages; `layers`: submesh -> their bounds."""
        search, space = self.search, self.space
        return Question(
            layers=len(self._layers.classes.of_layer),
            devices=search.cluster.num_devices,
            placements=search.where,
            prices=[self._costs(n, count, layers[n]) for n in search.meshes],
            memory=search.capacity(space),
            microbatches=count,
            in_flight=lambda stages: self._in_flight(count, stages),
            stages=space.stages,
            fewest=2,
        )

    def _in_flight(self, count: int, stages: int) -> int:
        """Fewest microbatches in flight in the first of so many stages."""
        return min(SCHEDULES[s].stash(Size(stages, count), 0) for s in self.space.schedules)

    @cached_property
    def _meshes(self) -> Mapping[int, LogicalMesh]:
        """The meshes of the search, and behind them those of all devices in other shapes, which only one stage has."""
        of_search, cluster = self.search.meshes, self.search.cluster
        in_search = {layouts_key(mesh) for mesh in of_search.values() if mesh.size == cluster.num_devices}
        candidates = [target.logical for target in targets(None, cluster, local=False)] if in_search else []
        shapes = (mesh for mesh in candidates if layouts_key(mesh) not in in_search)
        return {**of_search, **dict(enumerate(shapes, max(of_search) + 1))}

    @cached_property
    def _on_all(self) -> Sequence[int]:
        """The meshes of all devices."""
        return [n for n, size in self._sizes.items() if size == self.search.cluster.num_devices]

    def _one_stage(self, count: int, bounds: Mapping[int, LayerBound], n: int) -> float:
        """Lower bound (s) on the step on all devices (`OneStage.within`), with prices of bytes in their layouts, too.

        Args:
            count: the number of microbatches.
            bounds: class of layers -> its bound on all devices.
            n: a mesh of all devices.
        """
        stage, memory = self.one_stage(count, bounds, n), max(self.search.capacity(self.space))
        seconds = stage.within(memory, self.search.cluster.device.host_bandwidth)
        return max(seconds, self._one_stage_priced(count, bounds, n, stage)) * (1 - ROUNDING)

    def one_stage(self, count: int, bounds: Mapping[int, LayerBound], n: int) -> OneStage:
        """What all layers take in one stage; arguments as of `_one_stage`."""
        layers, size = [bounds[c] for c in self._layers.classes.of_layer], self._sizes[n]
        seconds = np.array([self._of_policy([layer.seconds for layer in layers], p) for p in remat.POLICIES])
        residuals = np.array([self._stashed(policy, FUSED) for policy in (FUSED, remat.DOTS, remat.FULL)])
        state = math.fsum(self._state[c] for c in self._layers.classes.of_layer) / size
        sums = math.fsum(self._fixed) / size - state if count > 1 else 0.0
        return OneStage(seconds, residuals / (size * count), state, sums)

    def _of_policy(self, layers: Sequence[Mapping[str, float]], policy: str) -> Sequence[float]:
        """Bounds (s) on all layers, given by policy, under one of them, for those that can be rematerialised."""
        chosen = (policy if can_be else remat.NONE for can_be in self._recomputable)
        return [layer[p] for layer, p in zip(layers, chosen, strict=True)]

    def _one_stage_priced(self, count: int, bounds: Mapping[int, LayerBound], n: int, stage: OneStage) -> float:
        """The same with bytes in their layouts, at the best rate; every layer is rematerialised if that is cheaper."""
        memory, price = max(self.search.capacity(self.space)), self._even_price(n, ONE_STAGE)
        none, dots, full = stage.residuals[..., None] * self.rates
        seconds, repeated, again = stage.seconds[..., None]
        as_written = self._prices_of(count, bounds, n, ONE_STAGE)
        even = np.array([price[c] for c in self._layers.classes.of_layer])
        policies = as_written + none, as_written + repeated - seconds + dots, again + even + full
        return float((np.minimum.reduce(policies).sum(0) - self.rates * memory).max())

    def _prices(self, count: int, bounds: Mapping[int, Mapping[int, LayerBound]]) -> Mapping[int, Sequence[Priced]]:
        """Submesh -> at every rate, the bounds of `_costs` with the price of all bytes but residuals."""
        return {n: self._priced_runs(count, bounds[n], n) for n in self.search.meshes if self._has_prices(count, n)}

    def _has_prices(self, count: int, n: int) -> bool:
        """Whether any layer is priced that bounds those on a submesh for a number of microbatches."""
        return any(
            policy != ONE_STAGE and count % m == 0 and self._share(smaller, n) is not None
            for m, smaller, _, policy in self.priced
        )

    def _priced_runs(self, count: int, bounds: Mapping[int, LayerBound], n: int) -> Sequence[Priced]:
        """At every rate, bounds of all runs of layers on a submesh for each rematerialisation policy."""
        kept, recomputed = (self._prices_of(count, bounds, n, policy) for policy in (remat.NONE, remat.FULL))
        layers = [
            np.where(np.array(self._repeats(policy))[:, None], recomputed, kept) for policy in self.space.policies
        ]
        return [
            Priced(float(rate), np.stack([sums_of_runs(of_policy[:, k].tolist()) for of_policy in layers]))
            for k, rate in enumerate(self.rates)
        ]

    def _prices_of(self, count: int, bounds: Mapping[int, LayerBound], n: int, policy: str) -> Floats:
        """Bounds of all layers with the price of their bytes, shape (layers, rates).

        The highest of those for divisors of the number and of the submesh. What is not bounded is priced in even
        shards.
        """
        highest: dict[int, Floats] = {}
        for (m, smaller, c, of_policy), priced in self.priced.items():
            share = self._share(smaller, n)
            if of_policy == policy and count % m == 0 and share is not None:
                highest[c] = np.maximum(highest.get(c, 0.0), share * priced)
        price = self._even_price(n, policy)
        of_class: dict[int, Floats] = {}
        for c, bound in bounds.items():
            seconds = bound.seconds[remat.FULL if policy == remat.FULL else remat.NONE]
            # a byte more costs the rate more, at least for even shards
            of_class[c] = price[c] + np.maximum.accumulate(np.maximum(highest.get(c, price[c]) - price[c], seconds))
        return np.array([of_class[c] for c in self._layers.classes.of_layer])

    def _even_price(self, n: int, policy: str) -> Mapping[int, Floats]:
        """Class of layers -> at every rate the price of what a layer stores in even shards."""
        rates, total = self._byte_rates(policy), self._least_bytes
        return {
            c: np.array([(r.state * state + r.sums * (total[c] - state)) / self._sizes[n] for r in rates])
            for c, state in self._state.items()
        }

    def _byte_rates(self, policy: str) -> Sequence[ByteRates]:
        """What bytes cost at every rate.

        On one mesh those of state cost no more than offloading, and those of copies nothing; nor, with one microbatch,
        do those of sums.
        """
        if policy != ONE_STAGE:
            return [ByteRates(r, r, r) for r in self.rates.tolist()]
        bandwidth = self.search.cluster.device.host_bandwidth
        most = 2 / bandwidth if bandwidth else math.inf
        return [ByteRates(min(r, most), r if min(self.space.counts) > 1 else 0.0, 0.0) for r in self.rates.tolist()]

    @cached_property
    def rates(self) -> Floats:
        """Prices of a byte (s per step), from the bounds for the first number of microbatches."""
        count = min(self.bounded)[0]
        seconds = min(self._even(count, n) for n in self.search.meshes)
        return np.array(self.effort.rates) * seconds / max(self.search.capacity(self.space))

    def _share(self, smaller: int, larger: int) -> float | None:
        """Seconds on a submesh, as a share of those on a smaller one at least; None if they are not compared."""
        size, by = self._sizes[larger], self._sizes[smaller]
        if larger == smaller:
            return 1.0
        # neither devices of several kinds are compared, nor shapes of one mesh
        return by / size if size > by and size % by == 0 and not self.search.cluster.groups else None

    def layer_bounds(self, count: int) -> Mapping[int, Mapping[int, LayerBound]]:
        """Submesh -> class of layers -> the highest of its bounds for divisors of the number and of the submesh."""
        table = {n: dict.fromkeys(self._layers.classes.stage, NOTHING) for n in self._sizes}
        for (m, n, c), bound in self.bounded.items():
            for larger in self._sizes if count % m == 0 else ():
                if (share := self._share(n, larger)) is not None:
                    table[larger][c] = table[larger][c].highest(bound, share)
        return table

    def _costs(self, n: int, count: int, layers: Sequence[LayerBound]) -> RunCosts:
        """Bounds of all runs of layers on a submesh; an option for each rematerialisation policy."""
        runs: list[tuple[Floats, Floats, Floats]] = []
        for policy in self.space.policies:
            passes = sums_of_runs(self._of_policy([layer.passes for layer in layers], policy))
            seconds = sums_of_runs(self._of_policy([layer.seconds for layer in layers], policy))
            stash = sums_of_runs((self._stashed(policy) / self._sizes[n] / count).tolist())
            runs.append((passes / count, seconds - passes, stash))
        passes, once, stash = (np.stack(tables) for tables in zip(*runs, strict=True))
        fixed = np.zeros_like(passes) + sums_of_runs([nbytes / self._sizes[n] for nbytes in self._fixed])
        return RunCosts(passes, once, fixed, stash)

    def _repeats(self, policy: str) -> Sequence[bool]:
        """Of every layer whether it runs its forward pass twice."""
        return [frees and policy == remat.FULL for frees in self._recomputable]

    def _bound(self, count: int, least: float) -> None:
        """Bounds layers for this number of microbatches.

        Layers of all classes if no divisor of the number has bounds: on submeshes of one host first, then on larger
        ones, unless the step cannot be faster there than it is planned. Otherwise layers of large classes, on the
        submeshes of the division that reaches the bound, until it has no others: other bounds would not raise it.

        Args:
            count: the number.
            least: s; a bound as high need not be raised.
        """
        is_first = not any(count % m == 0 for m, _, _ in self.bounded)
        graphs = self._graphs(count, self._layers.classes.stage if is_first else self._large)
        rules = self._rules(graphs)
        if is_first:
            host, sizes = self.search.cluster.devices_per_host, self._sizes
            submeshes = sorted(self.search.meshes, key=lambda n: sizes[n])
            groups = itertools.groupby(submeshes, key=lambda n: max(sizes[n], host))
            for _, group in groups:
                tasks = [(n, c) for n in group if self._even(count, n) < self.planned for c in graphs]
                self._bound_layers(count, graphs, rules, tasks)
        while (step := self.step(count)).seconds < least:
            if missing := self._missing(count, step):
                self._bound_layers(count, graphs, rules, missing)
            elif self._memory_binds and step.seconds < self._enough and (unpriced := self._unpriced(count, step)):
                self._price_layers(count, graphs, rules, unpriced)
            else:
                return

    def _bound_layers(
        self,
        count: int,
        graphs: Mapping[int, StageGraph],
        rules: Mapping[int, Mapping[int, Rule]],
        tasks: Sequence[tuple[int, int]],
    ) -> None:
        """Bounds layers on (submesh, class) pairs for a number of microbatches; `graphs` and `rules`: by class."""
        meshes, binds = self._meshes, self._memory_binds
        host = self.search.cluster.devices_per_host
        # over the links between hosts, what runs once per step depends most on the layouts of the passes
        slow = {n for n, size in self._sizes.items() if size > host or n in self._on_all}
        functions = [
            partial(bound_on, graphs[c], meshes[n], rules[c], remat=binds and c in self._large, once=n in slow)
            for n, c in tasks
        ]
        results = zip(tasks, parallel_map.results(functions), strict=True)
        self.bounded.update(((count, n, c), result) for (n, c), result in results)

    def _price_layers(
        self,
        count: int,
        graphs: Mapping[int, StageGraph],
        rules: Mapping[int, Mapping[int, Rule]],
        tasks: Sequence[_Task],
    ) -> None:
        """Prices the bytes of layers at all rates; arguments as of `_bound_layers`."""
        meshes, owned = self._meshes, self._layers.classes.owned
        functions = [
            partial(
                priced_on, graphs[c], meshes[n], rules[c], owned(c), self._byte_rates(p), recomputed=p == remat.FULL
            )
            for n, c, p in tasks
        ]
        results = zip(tasks, parallel_map.results(functions), strict=True)
        self.priced.update(((count, *task), np.array(seconds)) for task, seconds in results)

    def _missing(self, count: int, step: LeastStep) -> Sequence[tuple[int, int]]:
        """(submesh, class) of the large layers that a bound on the step is made of, and that are not bounded."""
        of_layer = self._layers.classes.of_layer
        used = {(stage.submesh, c) for stage in step.stages for c in of_layer[stage.first : stage.last]}
        return sorted((n, c) for n, c in used if c in self._large and (count, n, c) not in self.bounded)

    def _unpriced(self, count: int, step: LeastStep) -> Sequence[_Task]:
        """The large layers that a bound on the step is made of, and that are not priced."""
        used = {task for stage in step.stages for task in self._tasks(stage, is_whole=len(step.stages) == 1)}
        return sorted(task for task in used if task[1] in self._large and (count, *task) not in self.priced)

    def _tasks(self, stage: BoundedStage, *, is_whole: bool) -> Iterable[_Task]:
        """The layers of a stage with their policies; `is_whole`: it is the only one."""
        layers, kept = slice(stage.first, stage.last), ONE_STAGE if is_whole else remat.NONE
        repeats = [False] * stage.last if is_whole else self._repeats(self.space.policies[stage.option])
        for c, recomputed in zip(self._layers.classes.of_layer[layers], repeats[layers], strict=True):
            yield stage.submesh, c, remat.FULL if recomputed else kept

    def _even(self, count: int, n: int) -> float:
        """Lower bound (s) on the step if all layers have submeshes of this size, evenly divided among them."""
        of_class, of_layer = self.layer_bounds(count)[n], self._layers.classes.of_layer
        return sum(of_class[c].seconds[remat.NONE] for c in of_layer) * self._sizes[n] / self.search.cluster.num_devices

    def _graphs(self, count: int, classes: Collection[int]) -> Mapping[int, StageGraph]:
        """Class -> the layer as a graph, on the shapes of a microbatch."""
        if count == min(self.space.counts):
            return {c: self._first_graphs[c] for c in classes}
        return self._for_count(count).classes.graphs(classes)

    def _rules(self, graphs: Mapping[int, StageGraph]) -> Mapping[int, Mapping[int, Rule]]:
        """Class -> the rules of the operations of its layer."""
        return {c: rules_of(graph.graph, self.search.options.rules) for c, graph in graphs.items()}

    @cached_property
    def _sizes(self) -> Mapping[int, int]:
        """Devices of every mesh."""
        return {n: mesh.size for n, mesh in self._meshes.items()}

    @cached_property
    def _memory_binds(self) -> bool:
        """Whether all layers on the smallest submesh, with the most microbatches in flight, may exceed its memory.

        If they do not, no stage is rematerialised.
        """
        n, size = min(self._sizes.items(), key=lambda item: item[1])
        stages, count = min(len(self._layers.classes.of_layer), self.search.cluster.num_devices), min(self.space.counts)
        in_flight = self._in_flight(count, stages)
        nbytes = sum(self._fixed) + in_flight / count * sum(self._residuals[remat.NONE])
        return self.effort.margin * nbytes / size > self.search.capacity(self.space)[n]

    @cached_property
    def _large(self) -> frozenset[int]:
        """The classes of layers that have a large share of the FLOPs."""
        of_layer = self._layers.classes.of_layer
        flops = {c: of_layer.count(c) * model_flops(layer.graph) for c, layer in self._first_graphs.items()}
        return frozenset(c for c, n in flops.items() if n >= self.effort.large * sum(flops.values()))

    @cached_property
    def _first_graphs(self) -> Mapping[int, StageGraph]:
        """Class -> the layer as a graph, for the smallest number of microbatches."""
        return self._for_count(min(self.space.counts)).classes.graphs()

    @cached_property
    def _layers(self) -> BoundedLayers:
        return self._divided(max(self.search.parts, default=1))

    def _divided(self, count: int) -> BoundedLayers:
        return bounded_layers(self.search.split_into(count), self.search.layers, self.search.avals)

    def _for_count(self, count: int) -> BoundedLayers:
        """The layers on the shapes of a microbatch."""
        return self._layers.at(count) or self._divided(count)

    @cached_property
    def _residuals(self) -> Mapping[str, Sequence[float]]:
        """Rematerialisation policy -> of every layer, bytes of residuals of the whole batch."""
        count, graphs = min(self.space.counts), self._first_graphs
        mesh = next(iter(self.search.meshes.values()))
        residuals = self._for_count(count).residual_bytes(graphs, self._rules(graphs), mesh)
        return {policy: [count * nbytes for nbytes in of_layers] for policy, of_layers in residuals.items()}

    def _stashed(self, policy: str, none: str = remat.NONE) -> Floats:
        """Bytes of residuals of every layer, whole batch; `none`: of those that cannot be rematerialised."""
        return np.where(self._recomputable, self._residuals[policy], self._residuals[none])

    @cached_property
    def _fixed(self) -> Sequence[float]:
        """Of every layer, bytes of state and accumulators over all devices."""
        least = self._least_bytes
        return [least[c] for c in self._layers.classes.of_layer]

    @cached_property
    def _least_bytes(self) -> Mapping[int, float]:
        """Class of layers -> bytes of state and accumulators over all devices."""
        return self._layers.classes.least_bytes()

    @cached_property
    def _state(self) -> Mapping[int, float]:
        """Class of layers -> bytes of state over all devices."""
        types, owned = self.search.graph.types, self._layers.classes.owned
        return {c: float(sum(types[v].nbytes for v in owned(c)[0])) for c in self._layers.classes.stage}

    @cached_property
    def _recomputable(self) -> Sequence[bool]:
        return remat.recomputable(self.search.graph)
