"""What divisions into stages are worth: each played under every schedule that its memory allows.

    seconds of a pass     sums over the stage's layers                      autopar/layer_prices.py
    transfers             of what crosses a border, over the link there     -> transfer_seconds
    seconds of a step     the schedule's instruction lists, played          autopar/cost_models/pipeline.py

A schedule of many microbatches is played for two numbers of them; from there on it repeats itself   -> played_seconds
One that has more in flight is left unless it is faster by `WORTH`: it holds more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cluster import Cluster, LogicalMesh
from autopar.cost_models.pipeline import Prices, simulate
from autopar.layer_prices import Priced, ways
from autopar.passes.inter_op import Division, Part, Question
from autopar.schedules import REPEATING, SCHEDULES, Size, make
from autopar.stage_planning import Limit
from autopar.stage_trades import Trade

#: Share of a step's time that a schedule has to save for its memory.
WORTH = 0.01


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


@dataclass(frozen=True, eq=False)
class Plays:
    """Plays divisions of one step on one cluster.

    Attributes:
        cluster: the devices.
        meshes: every submesh.
        of_layer: the kind of every layer.
        borders: bytes that the whole batch hands over in front of every layer but the first.
        room: bytes that a device of each submesh may hold.
        schedules: those that are open, the more they have in flight the later.
        policies: of recomputation, those that are open.
    """

    cluster: Cluster
    meshes: Mapping[int, LogicalMesh]
    of_layer: tuple[int, ...]
    borders: tuple[float, ...]
    room: tuple[float, ...]
    schedules: tuple[str, ...]
    policies: tuple[str, ...]

    def of(self, division: Division, question: Question, priced: Mapping[int, Priced]) -> Iterator[Found]:
        """A division under schedules that its memory allows, at these prices of layers on every submesh."""
        count = question.microbatches
        run = [self._run(part, priced) for part in division.parts]
        prices = self._prices(division, [trades for _, trades in run], count)
        policies = tuple(policy for policy, trades in run for _ in trades)
        stages = tuple(
            StageOn(p.first, p.last, p.placement.start, self.meshes[p.placement.submesh].sizes) for p in division.parts
        )
        best = math.inf
        for name in self.schedules:
            size = Size(len(stages), count)
            flights = [SCHEDULES[name].stash(size, s) for s in range(len(stages))]
            peaks = tuple(
                float(question.prices[p.placement.submesh].peaks(n)[p.option, p.first, p.last])
                for p, n in zip(division.parts, flights, strict=True)
            )
            if all(b <= question.memory[p.placement.submesh] for b, p in zip(peaks, division.parts, strict=True)):
                seconds = played_seconds(name, size, prices)
                if seconds > (1 - WORTH) * best:
                    continue
                best = seconds
                limits = tuple(
                    Limit(self.room[p.placement.submesh], n, max(trade.share for trade in trades))
                    for p, n, (_, trades) in zip(division.parts, flights, run, strict=True)
                )
                yield Found(stages, count, name, policies, seconds, prices, peaks, limits)

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
            nbytes = self.borders[part.first - 1] / count
            seconds = transfer_seconds(self.cluster, nbytes, part.placement.start, senders)
            found[s, s + 1] = found[s + 1, s] = seconds
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


def transfer_seconds(cluster: Cluster, nbytes: float, device: int, senders: int) -> float:
    """Seconds to move bytes to the stage that begins on a device; each of the senders sends its part over one link."""
    link = cluster.intra if device % cluster.devices_per_host else cluster.inter
    return link.alpha + max(link.beta, link.pair) * nbytes / senders


def rank(found: Found) -> tuple[float, int, int, str]:
    """What the best of several is least in."""
    return found.seconds, len(found.stages), found.microbatches, found.schedule
