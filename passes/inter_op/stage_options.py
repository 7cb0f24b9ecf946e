"""Options of one stage on one submesh: time against memory, by a Lagrangian penalty.

The bytes that a stage keeps, and those live where its fastest plan peaks, get a penalty,

    seconds(x) + rate bytes(x),      rate = share x (seconds / bytes of the fastest plan)

for `OptionEffort.shares`. Each option is one more solution of the same problem, without memory rows; dominated options
are dropped. A solution is quick enough for hundreds of calls by `autopar.passes.inter_op.search`. The plan of a chosen
stage is made at rising rates, until it fits (`autopar.passes.stages.plan`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.hardware.cluster import LogicalMesh
from autopar.passes.remat.options import Options
from autopar.passes.stages.cost import StageTimes, stage_times
from autopar.passes.stages.graph import StageGraph
from autopar.passes.stages.memory import StageMemory
from autopar.passes.stages.plan import PenalisedPlans, StageProblem
from autopar.rules import Rule


@dataclass(frozen=True, slots=True)
class OptionEffort:
    """Which options of a stage are sought, and how near their optimum."""

    # penalty rates: a plan may take this share more seconds for a plan with the same share fewer bytes (not recorded;
    # `bench sensitivity`, 2026-11: no effect on small programs)
    shares: tuple[float, ...] = (0.3, 6.0)
    # weight of the persistent bytes of a layer against those of one microbatch: a stage has several layers (not
    # recorded; `bench sensitivity`, 2026-11: no effect on small programs)
    layers: float = 4.0
    # relative gap at which the solution of an option is accepted (not recorded; `bench sensitivity`, 2026-11: no
    # effect on small programs)
    gap: float = 0.03
    # relative gap at which the dual ascent of a penalised problem ends (not recorded; `bench sensitivity`, 2026-11:
    # no effect on small programs)
    until: float = 0.01
    # remaining strategies above which the ILP is not run; it takes half a minute there (not recorded; `bench
    # sensitivity`, 2026-11: no effect on small programs)
    largest: int = 2_000


STAGE_OPTIONS = OptionEffort()


@dataclass(frozen=True, slots=True)
class StageOption:
    """One option of a stage.

    Attributes:
        times: seconds of its passes.
        memory: bytes per device.
        entering: bytes per device that the forward pass of a microbatch receives from other stages.
        share: the penalty rate it was found at; 0: the fastest.
    """

    times: StageTimes
    memory: StageMemory
    entering: float
    share: float = 0.0

    def scaled(self, share: float) -> StageOption:
        """This option with its seconds and bytes times `share`."""
        return StageOption(self.times.scaled(share), self.memory.scaled(share), share * self.entering, self.share)

    def recomputed(self) -> StageOption:
        """This option where the backward pass begins with what it needs of the forward pass, from received values."""
        again = replace(self.times, backward=self.times.backward + self.times.recomputation)
        saved = max(0.0, self.memory.stash - self.entering)
        less = replace(self.memory, stash=self.memory.stash - saved, temporaries=self.memory.temporaries + saved)
        return replace(self, times=again, memory=less)


class _CostedOption(NamedTuple):
    """An option of a stage, its seconds, and its bytes that have a penalty."""

    seconds: float
    nbytes: float
    option: StageOption


@dataclass(frozen=True, eq=False)
class StageOptions:
    """Options of a stage on a submesh, each computed on demand.

    Attributes:
        graph: the stage.
        mesh: where it runs.
        rules: of the graph's operations.
        options: of the intra-operator solver.
        entering: values of the graph that the forward pass receives from other stages.
        effort: penalty rates besides 0, and gaps of the solutions.
    """

    graph: StageGraph
    mesh: LogicalMesh
    rules: Mapping[int, Rule]
    options: Options
    entering: Sequence[int]
    effort: OptionEffort = STAGE_OPTIONS
    costed: dict[float, _CostedOption] = field(default_factory=dict[float, "_CostedOption"])  # by rate
    nondominated: dict[int, tuple[StageOption, ...]] = field(default_factory=dict)  # by the number of rates besides 0

    @cached_property
    def penalised(self) -> PenalisedPlans:
        """The plans at rising penalty rates."""
        how = {"gap": self.effort.gap, "largest": self.effort.largest, "fold": False, "rounds": 0}
        stage = StageProblem(self.graph, self.mesh, self.rules, self.options)
        return PenalisedPlans(stage, self.effort.layers, how, {"until": self.effort.until})

    @cached_property
    def cheapest(self) -> StageOption:
        """The option without a penalty."""
        return self._at(0.0).option

    @cached_property
    def open(self) -> Sequence[float]:
        """Penalty rates that can change the plan; on one device there is only one option."""
        return self.effort.shares if self.mesh.size > 1 and self.penalised.peak > 0 else ()

    @property
    def all(self) -> tuple[StageOption, ...]:
        """All options."""
        return self.up_to(len(self.effort.shares))

    def up_to(self, penalties: int) -> tuple[StageOption, ...]:
        """Options of the first `penalties` rates besides 0, the fastest first, each with fewer bytes than those before.

        Where there are more rates, the last entry is a lower bound of their options: the memory of even pieces, in the
        time of the slowest computed option.
        """
        rates = self.open[:penalties]
        if len(rates) not in self.nondominated:
            costed = sorted((self._at(share) for share in (0.0, *rates)), key=_order)
            options = tuple(_nondominated(costed))
            bound = () if len(rates) == len(self.open) else (replace(self._least, times=costed[-1].option.times),)
            self.nondominated[len(rates)] = (*options, *bound)
        return self.nondominated[len(rates)]

    @cached_property
    def _least(self) -> StageOption:
        liveness = self.penalised.stage.liveness
        return StageOption(self.cheapest.times, liveness.least(), liveness.least_bytes(self.entering))

    def _at(self, share: float) -> _CostedOption:
        if share not in self.costed:
            stage, solution = self.penalised.stage, self.penalised.at(share)
            entering = stage.liveness.nbytes(self.entering, solution.assignment)
            nbytes = self.penalised.row.value(stage.model.problem, solution.assignment)
            memory = stage.liveness.memory(solution.assignment)
            option = StageOption(stage_times(stage.plan(solution)), memory, entering, share)
            self.costed[share] = _CostedOption(solution.objective, nbytes, option)
        return self.costed[share]


def too_large(nbytes: float) -> StageOption:
    """A placeholder for options that are not computed, because all of them need more than `nbytes`."""
    return StageOption(StageTimes(0.0, 0.0, 0.0, 0.0, 0.0, {}), StageMemory(nbytes, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0)


def _order(costed: _CostedOption) -> tuple[float, float, float]:
    return costed.seconds, costed.nbytes, costed.option.share


def _nondominated(ordered: Sequence[_CostedOption]) -> Iterator[StageOption]:
    least = np.inf
    for costed in ordered:
        if costed.nbytes < least:
            least = costed.nbytes
            yield costed.option
