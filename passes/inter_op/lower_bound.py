"""Lower bound on the step of every pipeline in a search space.

A stage that takes t_s seconds per microbatch is busy for m t_s in a step of m microbatches. The first microbatch comes
to it through the passes of the stages in front, and the last one goes back through them, so that

    T  >=  max_s ( sum_{i<s} path_i  +  m t_s )

whatever the schedule; path = 0 under schedules that split backward passes. With bounds of layers for t, path and bytes
(`autopar.passes.inter_op.layer_bounds`), the least of these over all divisions bounds every pipeline. With s stages
left, the first of which begins with layer k on device d,

    G(s, k, d) = min over layers j > k, placements d .. e, and policies that fit, of
                 max( m t(k, j),  path(k, j) + G(s - 1, j, e) )                                            -> least_step

A stage fits if its state, its accumulators and the residuals of the microbatches in flight do, in even shards, under
the schedule with the fewest in flight. Transfers, copies, temporary values and what less memory costs are left out.
One stage on all devices may rematerialise single layers and offload state                  -> PipelineBound._one_stage

Layers that are not bounded for a number of microbatches m have the bounds for a smaller m' that divides it: larger
microbatches take no longer per example, so that m t(m) >= m' t(m'), and residuals are at least m'/m as large. These
tell the numbers with which the step may be short, and for these the layers that take most of the time are bounded
                                                                                                  -> PipelineBound.least
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from autopar import parallel_map
from autopar.cost_models.flops import model_flops
from autopar.ir.problem import Floats
from autopar.passes.inter_op.dynamic_program import ROUNDING, Question, RunCosts
from autopar.passes.inter_op.layer_bounds import BoundedLayers, LayerBound, bound_on, bounded_layers
from autopar.passes.inter_op.layer_costs import sums_of_runs
from autopar.passes.inter_op.search import InterOpSearch, SearchSpace
from autopar.passes.remat import rewrite as remat
from autopar.passes.stages.graph import StageGraph
from autopar.rules import Rule, rules_of
from autopar.schedules import SCHEDULES, Size


@dataclass(frozen=True, slots=True)
class PipelineBoundEffort:
    """Which layers are bounded for which numbers of microbatches."""

    # relative amount by which bounding for one more number has to raise the bound (not measured)
    tolerance: float = 0.02
    # share of the FLOPs of all layers from which on a class of layers is bounded for more than the first number of
    # microbatches, and with rematerialisation (not measured)
    large: float = 0.1
    # gap to the plan at which the bound is not raised further (not measured)
    gap: float = 0.1
    # rematerialisation is bounded if so many times the bytes of all layers, in even shards and without temporaries, may
    # exceed the memory of the smallest submesh (not measured)
    margin: float = 4.0


PIPELINE_BOUND = PipelineBoundEffort()


def least_step(question: Question, paths: Sequence[Floats]) -> float:
    """Lower bound (s) on the step of every division; inf if none fits.

    Args:
        question: the problem, with lower bounds for costs.
        paths: of every submesh, s of the passes of one microbatch of layers i .. j - 1 at [i, j].
    """
    q = question
    upper = np.triu(np.ones((q.layers + 1, q.layers + 1), bool), 1)
    positions = q.positions()
    busy = {n: np.where(upper, q.microbatches * q.prices[n].times(q.microbatches), np.inf) for n, _, _ in positions}
    behind = np.full((q.layers + 1, q.devices + 1), np.inf)
    behind[q.layers, q.devices] = 0.0
    best = np.inf
    for stages in range(1, (q.stages or min(q.layers, q.devices)) + 1):
        least = np.full(behind.shape, np.inf)
        for n, starts, stops in positions:
            fits = q.prices[n].peaks(q.in_flight(stages)) <= q.memory[n]
            seconds = np.where(fits, busy[n], np.inf).min(0)
            through = np.where(upper, paths[n], np.inf)[:, :, None] + behind[None][:, :, stops]
            least[:, starts] = np.minimum(least[:, starts], np.maximum(seconds[:, :, None], through).min(1))
        behind = np.where(least < best, least, np.inf)
        if stages >= q.fewest and q.stages in (None, stages):
            best = min(best, float(behind[0, 0]))
        if not np.isfinite(behind).any():
            break
    return best * (1 - ROUNDING)


@dataclass(eq=False)
class PipelineBound:
    """The lower bound of a search.

    Attributes:
        search: the search.
        space: what it chooses from; its limit on the step time and its reserve of memory are ignored.
        planned: step time (s) of a plan, to which the bound is compared; inf: none.
        effort: which layers are bounded.
        bounded: (number of microbatches, submesh, class of layers) -> its bound, as far as it is computed.
    """

    search: InterOpSearch
    space: SearchSpace
    planned: float = math.inf
    effort: PipelineBoundEffort = PIPELINE_BOUND
    bounded: dict[tuple[int, int, int], LayerBound] = field(default_factory=dict[tuple[int, int, int], LayerBound])

    def least(self) -> float:
        """Lower bound (s) on the step with any number of microbatches; inf if none can fit."""
        counts, tolerance = sorted(self.space.counts), self.effort.tolerance
        enough = (1 - self.effort.gap) * self.planned
        bounds, done = dict.fromkeys(counts, 0.0), set[int]()
        while True:
            least = min((bounds[count] for count in done), default=math.inf)
            worth = [count for count in counts if count not in done and bounds[count] < least * (1 - tolerance)]
            if not worth or min(bounds.values()) >= enough:
                return min(bounds.values())
            lowest = min(bounds[count] for count in worth)
            # the smallest of about equal ones bounds the others too
            chosen = next(count for count in worth if bounds[count] <= lowest * (1 + tolerance))
            self._bound(chosen)
            done.add(chosen)
            bounds.update((count, self.step(count)) for count in counts if count % chosen == 0)

    def step(self, count: int) -> float:
        """Lower bound (s) with this number of microbatches, from what is bounded for it and for numbers dividing it."""
        of_layer = self._layers.classes.of_layer
        bounds = {n: [of_class[c] for c in of_layer] for n, of_class in self._bounds(count).items()}
        search, space = self.search, self.space
        question = Question(
            layers=len(of_layer),
            devices=search.cluster.num_devices,
            placements=search.where,
            prices=[self._costs(n, count, bounds[n]) for n in search.meshes],
            memory=search.capacity(space),
            microbatches=count,
            in_flight=lambda stages: min(SCHEDULES[s].stash(Size(stages, count), 0) for s in space.schedules),
            stages=space.stages,
            fewest=2,
        )
        splits = any(SCHEDULES[s].split for s in space.schedules)
        paths = [sums_of_runs([0.0 if splits else bound.path for bound in bounds[n]]) for n in search.meshes]
        on_all = next((n for n, size in self._sizes.items() if size == search.cluster.num_devices), None)
        # devices of several kinds are not one submesh, but one mesh may have them all: nothing is known of it
        one_stage = 0.0 if on_all is None else self._one_stage(count, bounds[on_all])
        return min(least_step(question, paths), one_stage)

    def _one_stage(self, count: int, layers: Sequence[LayerBound]) -> float:
        """Lower bound (s) on the step on all devices, where single layers are rematerialised and state is offloaded.

        Elementwise operations are repeated at no cost. What then exceeds the memory is recomputed, or waits in host
        memory, the bytes first that take the fewest seconds (`autopar.passes.remat.choose_offload`).
        """
        devices, bandwidth = self.search.cluster.num_devices, self.search.cluster.device.host_bandwidth
        kept, least = ([n / (devices * count) for n in self._residuals[p]] for p in (remat.DOTS, remat.FULL))
        state = sum(self.search.graph.types[v].nbytes for v in self._layers.classes.stages.updates.owners) / devices
        excess = state + sum(kept) - max(self.search.capacity(self.space))
        seconds = sum(bound.seconds for bound in layers)
        saved = [(b.recomputed - b.seconds, a - f) for b, a, f in zip(layers, kept, least, strict=True) if a > f]
        saved += [(2 * state / bandwidth, state)] if bandwidth else []
        for again, nbytes in sorted(saved, key=lambda item: item[0] / item[1]):
            if excess > 0:
                seconds += again * min(1.0, excess / nbytes)
                excess -= nbytes
        return math.inf if excess > 0 else seconds * (1 - ROUNDING)

    def _bounds(self, count: int) -> Mapping[int, Mapping[int, LayerBound]]:
        """Submesh -> class of layers -> the highest of its bounds for divisors of the number and of the submesh."""
        nothing = LayerBound(0.0, 0.0, 0.0)
        table = {n: dict.fromkeys(self._layers.classes.stage, nothing) for n in self._sizes}
        for (m, n, c), bound in self.bounded.items():
            for larger, size in self._sizes.items() if count % m == 0 else ():
                # devices of several kinds are not compared
                if larger == n or (size % self._sizes[n] == 0 and not self.search.cluster.groups):
                    share, best = self._sizes[n] / size, table[larger][c]
                    table[larger][c] = LayerBound(
                        max(best.seconds, share * bound.seconds),
                        max(best.recomputed, share * bound.recomputed),
                        max(best.path, share * m / count * bound.path),
                    )
        return table

    def _costs(self, n: int, count: int, layers: Sequence[LayerBound]) -> RunCosts:
        """Bounds of all runs of layers on a submesh; an option for each rematerialisation policy."""
        seconds: list[Floats] = []
        stash: list[Floats] = []
        for policy in self.space.policies:
            again = [frees and policy == remat.FULL for frees in self._recomputable]
            seconds.append(sums_of_runs([b.recomputed if a else b.seconds for b, a in zip(layers, again, strict=True)]))
            stash.append(sums_of_runs([nbytes / self._sizes[n] / count for nbytes in self._residuals[policy]]))
        nothing = np.zeros_like(np.stack(seconds))
        fixed = nothing + sums_of_runs([nbytes / self._sizes[n] for nbytes in self._fixed])
        return RunCosts(np.stack(seconds) / count, nothing, fixed, np.stack(stash))

    def _bound(self, count: int) -> None:
        """Bounds layers for this number of microbatches: of all classes if no divisor has bounds, else of large ones.

        Submeshes of one host come first, then larger ones, unless the step cannot be faster there than it is planned.
        """
        is_first = not any(count % m == 0 for m, _, _ in self.bounded)
        classes = self._layers.classes.stage.keys() if is_first else self._large
        graphs = self._graphs(count, classes)
        rules = self._rules(graphs)
        host, sizes, binds = self.search.cluster.devices_per_host, self._sizes, self._memory_binds
        groups = itertools.groupby(sorted(sizes, key=lambda n: sizes[n]), key=lambda n: max(sizes[n], host))
        for _, group in groups:
            tasks = [(n, c) for n in group if self._even(count, n) < self.planned for c in graphs]
            bound = [
                partial(bound_on, graphs[c], self.search.meshes[n], rules[c], remat=binds and c in self._large)
                for n, c in tasks
            ]
            results = zip(tasks, parallel_map.results(bound), strict=True)
            self.bounded.update(((count, n, c), result) for (n, c), result in results)

    def _even(self, count: int, n: int) -> float:
        """Lower bound (s) on the step if all layers have submeshes of this size, evenly divided among them."""
        of_class, of_layer = self._bounds(count)[n], self._layers.classes.of_layer
        return sum(of_class[c].seconds for c in of_layer) * self._sizes[n] / self.search.cluster.num_devices

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
        """Devices of every submesh."""
        return {n: mesh.size for n, mesh in self.search.meshes.items()}

    @cached_property
    def _memory_binds(self) -> bool:
        """Whether all layers on the smallest submesh, with the most microbatches in flight, may exceed its memory.

        If they do not, no stage is rematerialised.
        """
        n, size = min(self._sizes.items(), key=lambda item: item[1])
        stages, count = min(len(self._layers.classes.of_layer), self.search.cluster.num_devices), min(self.space.counts)
        in_flight = min(SCHEDULES[s].stash(Size(stages, count), 0) for s in self.space.schedules)
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
        none = residuals[remat.NONE]
        return {
            policy: [count * (a if can_be else b) for a, b, can_be in zip(kept, none, self._recomputable, strict=True)]
            for policy, kept in residuals.items()
        }

    @cached_property
    def _fixed(self) -> Sequence[float]:
        """Of every layer, bytes of state and accumulators over all devices."""
        least = self._layers.classes.least_bytes()
        return [least[c] for c in self._layers.classes.of_layer]

    @cached_property
    def _recomputable(self) -> Sequence[bool]:
        return remat.recomputable(self.search.graph)
