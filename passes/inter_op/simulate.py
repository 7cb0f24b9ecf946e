"""What divisions into stages are worth: each played under the schedules that its memory allows.

    seconds of a pass     sums over the stage's layers                      passes/inter_op/layer_costs.py
    transfers             of what crosses a border, over the link there     -> transfer_seconds
    seconds of a step     the schedule's instruction lists, played          autopar/cost_models/pipeline.py

A schedule of many microbatches is played for two numbers of them; from there on it repeats itself   -> played_seconds
One that cannot be the best, for all that it may have in flight, is not played                       -> least_seconds
One that has more in flight is left unless it is faster by `SAVED`: it holds more.
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
from autopar.passes.inter_op.layer_costs import Border, Priced, ways
from autopar.passes.inter_op.stage_options import Trade
from autopar.passes.stages.plan import Limit
from autopar.schedules import REPEATING, SCHEDULES, Size, make

#: Share of a step's time that a schedule has to save for its memory.
SAVED = 0.01


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
        formula: s that the dynamic program took the division to need.
        prices: what was played.
        peaks: bytes per device of every stage.
        limits: what every stage may hold, and at which rate its memory was charged.
    """

    stages: tuple[StageOn, ...]
    microbatches: int
    schedule: str
    remat: tuple[str, ...]
    seconds: float
    formula: float
    prices: Prices
    peaks: tuple[float, ...]
    limits: tuple[Limit, ...]


@dataclass(frozen=True, eq=False)
class Plays:
    """Plays divisions of one step on one cluster.

    Attributes:
        cluster: the devices.
        meshes: every submesh.
        of_layer: the kind of every layer.
        borders: what is handed over in front of every layer but the first.
        room: bytes that a device of each submesh may hold.
        schedules: those that are open, the more they have in flight the later.
        policies: of recomputation, those that are open.
    """

    cluster: Cluster
    meshes: Mapping[int, LogicalMesh]
    of_layer: tuple[int, ...]
    borders: tuple[Border, ...]
    room: tuple[float, ...]
    schedules: tuple[str, ...]
    policies: tuple[str, ...]

    def best(
        self, division: Division, question: Question, priced: Mapping[int, Priced], limit: float = math.inf
    ) -> Found | None:
        """A division under the best schedule that its memory allows; None if none takes less than a limit in seconds.

        Args:
            division: what to play.
            question: what it answers.
            priced: prices of layers on every submesh.
            limit: s.
        """
        run = [self._run(part, priced) for part in division.parts]
        prices = self._prices(division, [trades for _, trades in run], question.microbatches)
        size = Size(len(division.parts), question.microbatches)
        flights = {name: _in_flight(name, size) for name in self.schedules}
        peaks = {name: _peaks(division, question, flights[name]) for name in self.schedules}
        played: dict[str, float] = {}
        for name in reversed(self.schedules):
            useful = min(limit, min(played.values(), default=math.inf) / (1 - SAVED))
            room = (question.memory[p.placement.submesh] for p in division.parts)
            fits = all(most <= nbytes for most, nbytes in zip(peaks[name], room, strict=True))
            if fits and least_seconds(prices, size.microbatches, flights[name]) < useful:
                played[name] = played_seconds(name, size, prices)
        good = min(limit, min(played.values(), default=math.inf) / (1 - SAVED))
        name = next((name for name in self.schedules if played.get(name, math.inf) < good), None)
        if name is None:
            return None
        return Found(
            stages=tuple(
                StageOn(p.first, p.last, p.placement.start, self.meshes[p.placement.submesh].sizes)
                for p in division.parts
            ),
            microbatches=size.microbatches,
            schedule=name,
            remat=tuple(policy for policy, trades in run for _ in trades),
            seconds=played[name],
            formula=division.seconds,
            prices=prices,
            peaks=peaks[name],
            limits=tuple(
                Limit(self.room[p.placement.submesh], n, max(trade.share for trade in trades))
                for p, n, (_, trades) in zip(division.parts, flights[name], run, strict=True)
            ),
        )

    def _run(self, part: Part, priced: Mapping[int, Priced]) -> tuple[str, list[Trade]]:
        """What the layers of a stage recompute, and how each of them is run."""
        policy, number = ways(self.policies)[part.option]
        one = priced[part.placement.submesh]
        return policy, [one.way(kind, number, policy) for kind in self.of_layer[part.first : part.last]]

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
            border, device = self.borders[part.first - 1], part.placement.start
            found[s, s + 1] = transfer_seconds(self.cluster, border.forward / count, device, senders)
            found[s + 1, s] = transfer_seconds(self.cluster, border.backward / count, device, senders)
        return found


def played_seconds(name: str, size: Size, prices: Prices) -> float:
    """Seconds of a schedule: played where it is short, else by what further microbatches add once it repeats itself.

    Up to 2% less than eager 1F1B takes, which repeats itself once a slow stage has used up what was in flight early.
    """
    few, more = (Size(size.ranks, per_rank * size.ranks) for per_rank in (REPEATING // 2, REPEATING))
    if size.microbatches <= more.microbatches:
        return simulate(make(name, size), prices).seconds
    short, longer = (simulate(make(name, one), prices).seconds for one in (few, more))
    return longer + (size.microbatches - more.microbatches) * (longer - short) / (more.microbatches - few.microbatches)


def least_seconds(prices: Prices, microbatches: int, in_flight: Sequence[int]) -> float:
    """A bound on the seconds of schedules that hold no more microbatches than these between F and B at each stage.

    A stage runs all passes of its own. From its F there to its B a microbatch goes to the last stage and back, and one
    more can begin for each that has come back.
    """
    passes = [f + b for f, b in zip(prices.forward, prices.backward, strict=True)]
    links = [prices.transfer.get((s, s + 1), 0.0) + prices.transfer.get((s + 1, s), 0.0) for s in range(len(passes))]
    bounds: list[float] = []
    for s, held in enumerate(in_flight):
        there, trip = sum(passes[:s]) + sum(links[:s]), sum(passes[s:]) + sum(links[s:])
        bounds.append(there + max(microbatches * passes[s], math.ceil(microbatches / held) * trip))
    return max(bounds) + (prices.update[0] if prices.update else 0.0)


def _in_flight(name: str, size: Size) -> tuple[int, ...]:
    """Microbatches that every stage holds under a schedule."""
    return tuple(SCHEDULES[name].stash(size, s) for s in range(size.ranks))


def _peaks(division: Division, question: Question, in_flight: Sequence[int]) -> tuple[float, ...]:
    """Bytes per device of every stage with so many microbatches in flight."""
    return tuple(
        float(question.prices[p.placement.submesh].peaks(n)[p.option, p.first, p.last])
        for p, n in zip(division.parts, in_flight, strict=True)
    )


@overload
def transfer_seconds(cluster: Cluster, nbytes: float, device: int, senders: int) -> float: ...
@overload
def transfer_seconds(cluster: Cluster, nbytes: Floats, device: int, senders: int) -> Floats: ...
def transfer_seconds(cluster: Cluster, nbytes: float | Floats, device: int, senders: int) -> float | Floats:
    """Seconds to move bytes to the stage that begins on a device; each of the senders sends its part over one link."""
    link = cluster.intra if device % cluster.devices_per_host else cluster.inter
    return link.alpha + max(link.beta, link.pair) * nbytes / senders


def rank(found: Found) -> tuple[float, int, int, str]:
    """What the best of several is least in."""
    return found.seconds, len(found.stages), found.microbatches, found.schedule
