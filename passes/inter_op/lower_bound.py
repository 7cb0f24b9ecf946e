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
tell the numbers with which the step may be short. For these, layers that take most of the time are bounded on the
submeshes of a division that reaches the bound, until it has no others: then no further bound would raise it
                                                                                                  -> PipelineBound.least
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from autopar import parallel_map
from autopar.cost_models.flops import model_flops
from autopar.ir.problem import Floats
from autopar.passes.inter_op.dynamic_program import ROUNDING, Question, RunCosts, by_length
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


PIPELINE_BOUND = PipelineBoundEffort()


@dataclass(frozen=True)
class LeastStep:
    """A lower bound on the step of every division.

    Attributes:
        seconds: the bound; inf if no division fits.
        stages: (submesh, first layer, layer behind the last) of every stage of a division that reaches it, in order.
    """

    seconds: float
    stages: tuple[tuple[int, int, int], ...]


def least_step(question: Question, paths: Sequence[Floats]) -> LeastStep:
    """Lower bound on the step of every division.

    Args:
        question: the problem, with lower bounds for costs.
        paths: of every submesh, s of the passes of one microbatch of layers i .. j - 1 at [i, j].
    """
    q, tables = question, _Tables(question, paths)
    behind = np.full((q.layers + 1, q.devices + 1), np.inf)
    behind[q.layers, q.devices] = 0.0
    levels, best, of_best = [behind], np.inf, 0
    for stages in range(1, (q.stages or min(q.layers, q.devices)) + 1):
        least = tables.longer(levels[-1], stages)
        levels.append(np.where(least < best, least, np.inf))
        if stages >= q.fewest and q.stages in (None, stages) and levels[-1][0, 0] < best:
            best, of_best = float(levels[-1][0, 0]), stages
        if not np.isfinite(levels[-1]).any():
            break
    return LeastStep(best * (1 - ROUNDING), tables.read(levels[: of_best + 1]))


class _Tables:
    """The dynamic program of `least_step`; arrays by `autopar.passes.inter_op.dynamic_program.by_length`."""

    def __init__(self, question: Question, paths: Sequence[Floats]) -> None:
        q = self.question = question
        self.positions = q.positions()
        self.prices = {n: q.prices[n].by_length(q.prices[n].longest(q.memory[n])) for n, _, _ in self.positions}
        self.busy = {n: q.microbatches * p.times(q.microbatches) for n, p in self.prices.items()}
        self.paths = {n: by_length(paths[n], len(p.seconds[0]) - 1) for n, p in self.prices.items()}

    def _seconds(self, n: int, stages: int) -> Floats:
        """Seconds that the first of so many stages is busy in a step."""
        fits = self.prices[n].peaks(self.question.in_flight(stages)) <= self.question.memory[n]
        return np.where(fits, self.busy[n], np.inf).min(0)

    def longer(self, behind: Floats, stages: int) -> Floats:
        """Bounds with one more stage in front of the state (layer, device), which makes so many."""
        longer = np.full(behind.shape, np.inf)
        for n, starts, stops in self.positions:
            reached = np.isfinite(behind[:, stops])
            at, rows = np.flatnonzero(reached.any(0)), np.flatnonzero(reached.any(1))
            if len(at):
                seconds, last = self._seconds(n, stages), behind[:, stops[at]]
                steps = np.full(last.shape, np.inf)
                for length in range(1, min(len(seconds), int(rows[-1]) + 1)):
                    first, end = max(rows[0], length), rows[-1] + 1
                    here = slice(first - length, end - length)
                    through = self.paths[n][length, here, None] + last[first:end]
                    np.minimum(steps[here], np.maximum(seconds[length, here, None], through), out=steps[here])
                longer[:, starts[at]] = np.minimum(longer[:, starts[at]], steps)
        return longer

    def read(self, levels: Sequence[Floats]) -> tuple[tuple[int, int, int], ...]:
        """The stages of the least bound; ties go to the first placement, then to the fewest layers."""
        stages_read: list[tuple[int, int, int]] = []
        layer = device = 0
        for stages in range(len(levels) - 1, 0, -1):
            n, length, device = self._stage(
                layer, device, levels[stages - 1], float(levels[stages][layer, device]), stages
            )
            stages_read.append((n, layer, layer + length))
            layer += length
        return tuple(stages_read)

    def _stage(self, layer: int, device: int, behind: Floats, goal: float, stages: int) -> tuple[int, int, int]:
        """(submesh, layers, device behind the last) of the first of so many stages."""
        for n, starts, stops in self.positions:
            for stop in stops[starts == device].tolist():
                rest = behind[layer:, stop]
                through = self.paths[n][: len(rest), layer] + rest[: len(self.paths[n])]
                steps = np.maximum(self._seconds(n, stages)[: len(rest), layer], through)
                if len(lengths := np.flatnonzero(steps == goal)):
                    return n, int(lengths[0]), stop
        raise AssertionError(f"no stage from layer {layer} and device {device} on takes the {goal} s it was found by")


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
        counts = sorted(self.space.counts)
        enough = (1 - self.effort.gap) * self.planned
        bounds, done = dict.fromkeys(counts, 0.0), set[int]()
        while True:
            least = min((bounds[count] for count in done), default=math.inf)
            worth = [count for count in counts if count not in done and bounds[count] < least]
            if not worth or min(bounds.values()) >= enough:
                return min(bounds.values())
            lowest = min(bounds[count] for count in worth)
            # the smallest of about equal ones bounds the others too
            chosen = next(count for count in worth if bounds[count] <= lowest * (1 + self.effort.tolerance))
            self._bound(chosen, least)
            done.add(chosen)
            bounds.update((count, self.step(count).seconds) for count in counts if count % chosen == 0)

    def step(self, count: int) -> LeastStep:
        """Lower bound with this number of microbatches, from what is bounded for it and for numbers dividing it."""
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
        if on_all is None:
            return LeastStep(0.0, ())  # devices of several kinds may be one mesh, of which nothing is known
        one_stage = LeastStep(self._one_stage(count, bounds[on_all]), ((on_all, 0, len(of_layer)),))
        return min(least_step(question, paths), one_stage, key=lambda step: step.seconds)

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

    def _bound(self, count: int, least: float) -> None:
        """Bounds layers for this number of microbatches.

        Layers of all classes if no divisor of the number has bounds: on submeshes of one host first, then on larger
        ones, unless the step cannot be faster there than it is planned. Otherwise layers of large classes, on the
        submeshes of the division that reaches the bound, until it has no others: other bounds would not raise it.

        Args:
            count: the number.
            least: s; a bound as high need not be raised.
        """
        classes = self._layers.classes.stage.keys()
        if any(count % m == 0 for m, _, _ in self.bounded):
            bound = self._bounding(count, self._large)
            while missing := self._missing(count, least):
                bound(missing)
            return
        bound, host, sizes = self._bounding(count, classes), self.search.cluster.devices_per_host, self._sizes
        groups = itertools.groupby(sorted(sizes, key=lambda n: sizes[n]), key=lambda n: max(sizes[n], host))
        for _, group in groups:
            bound([(n, c) for n in group if self._even(count, n) < self.planned for c in classes])

    def _bounding(self, count: int, classes: Collection[int]) -> Callable[[Sequence[tuple[int, int]]], None]:
        """A function that bounds layers of these classes on (submesh, class) pairs for a number of microbatches."""
        graphs = self._graphs(count, classes)
        rules = self._rules(graphs)

        def bound(tasks: Sequence[tuple[int, int]]) -> None:
            functions = [
                partial(
                    bound_on,
                    graphs[c],
                    self.search.meshes[n],
                    rules[c],
                    remat=self._memory_binds and c in self._large,
                )
                for n, c in tasks
            ]
            results = zip(tasks, parallel_map.results(functions), strict=True)
            self.bounded.update(((count, n, c), result) for (n, c), result in results)

        return bound

    def _missing(self, count: int, least: float) -> Sequence[tuple[int, int]]:
        """(submesh, class) of the large layers that the bound on the step is made of, and that are not bounded."""
        step, of_layer = self.step(count), self._layers.classes.of_layer
        if step.seconds >= least:
            return ()
        used = {(n, c) for n, first, last in step.stages for c in of_layer[first:last]}
        return sorted((n, c) for n, c in used if c in self._large and (count, n, c) not in self.bounded)

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
