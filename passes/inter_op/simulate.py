"""Step time of divisions into stages, each simulated under the schedules that fit into memory.

    seconds of a pass     sums over the layers of the stage                 passes/inter_op/layer_costs.py
    transfers             of values across a border, over its link          -> transfer_seconds
    seconds of a step     simulation of the schedule's instruction lists    autopar/cost_models/pipeline.py

A schedule of many microbatches is simulated for two smaller numbers, since it repeats itself from there on
                                                                            -> simulated_seconds
A schedule whose lower bound is no faster than the best is not simulated    -> least_seconds
A schedule with more microbatches in flight has to be faster by `SimulationEffort.saved`, because it takes more memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from autopar.cost_models.pipeline import Prices, simulate
from autopar.hardware.cluster import Cluster, LogicalMesh
from autopar.ir.problem import Floats
from autopar.passes.inter_op.dynamic_program import Division, Part, Question
from autopar.passes.inter_op.layer_costs import Border, SubmeshCosts, run_options
from autopar.passes.inter_op.stage_options import StageOption
from autopar.passes.stages.plan import MemoryLimit
from autopar.schedules import REPEATING, SCHEDULES, Size, make


@dataclass(frozen=True, slots=True)
class SimulationEffort:
    """Which schedules are preferred among the simulated."""

    # relative step time that a schedule with more microbatches in flight has to save (not measured)
    saved: float = 0.01


SIMULATION = SimulationEffort()


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """A stage: layers first .. last - 1 on the devices from `start` on, a submesh of shape `shape`."""

    first: int
    last: int
    start: int
    shape: tuple[int, ...]

    @property
    def devices(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class FoundPipeline:
    """A pipeline that the search found.

    Attributes:
        stages: in order.
        microbatches: per step.
        schedule: its name.
        remat: rematerialisation policy of every layer.
        seconds: simulated step time.
        formula: step time (s) by the model of the dynamic program.
        prices: times of stages and transfers that were simulated.
        peaks: bytes per device of every stage.
        limits: memory limit of every stage.
    """

    stages: tuple[StagePlacement, ...]
    microbatches: int
    schedule: str
    remat: tuple[str, ...]
    seconds: float
    formula: float
    prices: Prices
    peaks: tuple[float, ...]
    limits: tuple[MemoryLimit, ...]


@dataclass(frozen=True, eq=False)
class Simulator:
    """Simulates divisions of one step on one cluster.

    Attributes:
        cluster: the devices.
        meshes: every submesh.
        of_layer: the kind of every layer.
        borders: bytes that cross in front of every layer but the first.
        capacity: bytes per device of each submesh that a stage may use.
        schedules: names, in ascending order of the microbatches in flight.
        policies: rematerialisation policies.
    """

    cluster: Cluster
    meshes: Mapping[int, LogicalMesh]
    of_layer: tuple[int, ...]
    borders: tuple[Border, ...]
    capacity: tuple[float, ...]
    schedules: tuple[str, ...]
    policies: tuple[str, ...]

    def best(
        self, division: Division, question: Question, priced: Mapping[int, SubmeshCosts], limit: float = math.inf
    ) -> FoundPipeline | None:
        """A division under the fastest schedule that fits; None if that takes `limit` seconds or more.

        Args:
            division: the division.
            question: the problem that it solves.
            priced: costs of layers on every submesh.
            limit: s.
        """
        run = [self._run(part, priced) for part in division.parts]
        prices = self._prices(division, [options for _, options in run], question.microbatches)
        size = Size(len(division.parts), question.microbatches)
        flights = {name: _in_flight(name, size) for name in self.schedules}
        peaks = {name: _peaks(division, question, flights[name]) for name in self.schedules}
        simulated: dict[str, float] = {}
        for name in reversed(self.schedules):
            useful = min(limit, min(simulated.values(), default=math.inf) / (1 - SIMULATION.saved))
            capacity = (question.memory[p.placement.submesh] for p in division.parts)
            fits = all(most <= nbytes for most, nbytes in zip(peaks[name], capacity, strict=True))
            # the bound spares simulations of schedules that are of no use
            if fits and least_seconds(prices, size.microbatches, flights[name]) < useful:
                simulated[name] = simulated_seconds(name, size, prices)
        good = min(limit, min(simulated.values(), default=math.inf) / (1 - SIMULATION.saved))
        name = next((name for name in self.schedules if simulated.get(name, math.inf) < good), None)
        if name is None:
            return None
        return FoundPipeline(
            stages=tuple(
                StagePlacement(p.first, p.last, p.placement.start, self.meshes[p.placement.submesh].sizes)
                for p in division.parts
            ),
            microbatches=size.microbatches,
            schedule=name,
            remat=tuple(policy for policy, options in run for _ in options),
            seconds=simulated[name],
            formula=division.seconds,
            prices=prices,
            peaks=peaks[name],
            limits=tuple(
                MemoryLimit(int(self.capacity[p.placement.submesh]), n)
                for p, n in zip(division.parts, flights[name], strict=True)
            ),
        )

    def _run(self, part: Part, priced: Mapping[int, SubmeshCosts]) -> tuple[str, list[StageOption]]:
        """The rematerialisation policy of a stage, and the option of each of its layers."""
        policy, number = run_options(self.policies)[part.option]
        costs = priced[part.placement.submesh]
        return policy, [costs.option(kind, number, policy) for kind in self.of_layer[part.first : part.last]]

    def _prices(self, division: Division, stages: Sequence[Sequence[StageOption]], count: int) -> Prices:
        times = [[option.times for option in options] for options in stages]
        return Prices(
            forward=tuple(sum(t.forward for t in stage) for stage in times),
            backward=tuple(sum(t.backward + t.weight for t in stage) for stage in times),
            update=tuple(sum(t.update + t.reduce for t in stage) for stage in times),
            transfer=self._links(division, count),
        )

    def _links(self, division: Division, count: int) -> Mapping[tuple[int, int], float]:
        seconds: dict[tuple[int, int], float] = {}
        for s, part in enumerate(division.parts[1:]):
            before = division.parts[s].placement
            senders = min(before.stop - before.start, part.placement.stop - part.placement.start)
            border, device = self.borders[part.first - 1], part.placement.start
            seconds[s, s + 1] = transfer_seconds(self.cluster, border.forward / count, device, senders)
            seconds[s + 1, s] = transfer_seconds(self.cluster, border.backward / count, device, senders)
        return seconds


def simulated_seconds(name: str, size: Size, prices: Prices) -> float:
    """Step time (s) of a schedule: simulated if it is short, else extrapolated from its repetition.

    For eager 1F1B up to 2% too low: it repeats only after a slow stage has used up the forward passes that ran early.
    """
    few, more = (Size(size.ranks, per_rank * size.ranks) for per_rank in (REPEATING // 2, REPEATING))
    if size.microbatches <= more.microbatches:
        return simulate(make(name, size), prices).seconds
    short, longer = (simulate(make(name, few_or_more), prices).seconds for few_or_more in (few, more))
    return longer + (size.microbatches - more.microbatches) * (longer - short) / (more.microbatches - few.microbatches)


def least_seconds(prices: Prices, microbatches: int, in_flight: Sequence[int]) -> float:
    """Lower bound (s) of schedules with at most these numbers of microbatches in flight, between F and B, per stage.

    A stage runs all its own passes. After its F on a stage a microbatch goes to the last stage and back, and one more
    can begin for each that has come back.
    """
    passes = [f + b for f, b in zip(prices.forward, prices.backward, strict=True)]
    links = [prices.transfer.get((s, s + 1), 0.0) + prices.transfer.get((s + 1, s), 0.0) for s in range(len(passes))]
    bounds: list[float] = []
    for s, count in enumerate(in_flight):
        there, trip = sum(passes[:s]) + sum(links[:s]), sum(passes[s:]) + sum(links[s:])
        bounds.append(there + max(microbatches * passes[s], math.ceil(microbatches / count) * trip))
    return max(bounds) + (prices.update[0] if prices.update else 0.0)


def _in_flight(name: str, size: Size) -> tuple[int, ...]:
    """Microbatches in flight at every stage under a schedule."""
    return tuple(SCHEDULES[name].stash(size, s) for s in range(size.ranks))


def _peaks(division: Division, question: Question, in_flight: Sequence[int]) -> tuple[float, ...]:
    """Peak bytes per device of every stage, given its microbatches in flight."""
    return tuple(
        float(question.prices[p.placement.submesh].peaks(n)[p.option, p.first, p.last])
        for p, n in zip(division.parts, in_flight, strict=True)
    )


@overload
def transfer_seconds(cluster: Cluster, nbytes: float, device: int, senders: int) -> float: ...
@overload
def transfer_seconds(cluster: Cluster, nbytes: Floats, device: int, senders: int) -> Floats: ...
def transfer_seconds(cluster: Cluster, nbytes: float | Floats, device: int, senders: int) -> float | Floats:
    """Seconds to move bytes to the stage that begins on a device; each sender sends an equal part over one link."""
    link = cluster.intra if device % cluster.devices_per_host else cluster.inter
    return link.alpha + max(link.beta, link.pair) * nbytes / senders


def rank(pipeline: FoundPipeline) -> tuple[float, int, int, str]:
    """Key by which the best of several pipelines is the least."""
    return pipeline.seconds, len(pipeline.stages), pipeline.microbatches, pipeline.schedule
