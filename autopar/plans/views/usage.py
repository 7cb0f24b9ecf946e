"""Where the time and the memory of a step go.

time       by source line and kind; in a pipeline by stage and pass, and by line on the devices that have most to do
memory     by kind at the peak, and over the step where the plan has its step
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.cost_models.memory.report import Moment
from autopar.ir.keyed import grouped, totals
from autopar.ir.text import Rows, seconds, size, table
from autopar.passes.intra_op.time_spent import Spent
from autopar.plans.record import PlanRecord
from autopar.plans.views.notebook import ShownAsText

LINES = 16  # rows of source lines
MOMENTS = 16  # rows of memory over time


@dataclass(frozen=True)
class TimeUse(ShownAsText):
    """What `Plan.time` returns; printed, tables.

    Attributes:
        step_time_s: predicted step time (s).
        spent: seconds by source line, phase and kind, which add up to the step; in a pipeline those of the devices that
            have most to do, "idle" among the kinds.
        stages: name of a stage -> pass -> seconds per step, "idle" among them, which add up to the step; empty on one
            mesh.
    """

    step_time_s: float
    spent: tuple[Spent, ...]
    stages: Mapping[str, Mapping[str, float]]

    @property
    def kinds(self) -> Mapping[str, float]:
        """Kind of work -> seconds per step."""
        return totals((row.kind, row.seconds) for row in self.spent)

    @property
    def lines(self) -> Mapping[str, Mapping[str, float]]:
        """Source line -> kind of work -> seconds per step, the slowest line first."""
        rows = grouped((row.source, (row.kind, row.seconds)) for row in self.spent)
        lines = {source: totals(kinds) for source, kinds in rows.items()}
        return dict(sorted(lines.items(), key=lambda item: -sum(item[1].values())))

    @property
    def busiest(self) -> tuple[str, ...]:
        """The stages of the devices that have most to do, whose source lines are known; empty on one mesh."""
        idle = {stage: passes.get("idle", 0.0) for stage, passes in self.stages.items()}
        return tuple(stage for stage, t in idle.items() if t == min(idle.values()))

    def __str__(self) -> str:
        if self.stages:
            names = list(dict.fromkeys(name for passes in self.stages.values() for name in passes))
            rows: Rows = [
                (stage, *(self._share(passes.get(name, 0.0)) for name in names))
                for stage, passes in self.stages.items()
            ]
            lines = f"\n{' and '.join(self.busiest)}, with most to do:{self._lines()}" if self.spent else ""
            return table("stage", ("", *names), rows) + lines
        return self._lines()

    def _lines(self) -> str:
        kinds = list(self.kinds)
        rows = [(line or "-", self._share(sum(of.values())), *(self._share(of.get(k, 0.0)) for k in kinds))
                for line, of in [*self.lines.items()][:LINES]]  # fmt: skip
        total = ("all", self._share(self.step_time_s), *(self._share(self.kinds[k]) for k in kinds))
        return table("source line", ("", "step", *kinds), [*rows, total])

    def _share(self, t: float) -> str:
        share = t / self.step_time_s if self.step_time_s else 0.0
        # less would be shown as 0.0%
        return f"{seconds(t)} {share:.1%}" if abs(share) >= 5e-4 else "-"


@dataclass(frozen=True)
class MemoryUse(ShownAsText):
    """What `Plan.memory` returns; printed, tables.

    Attributes:
        stages: name of a stage, "all" on one mesh -> kind of tensor -> bytes per device at its peak.
        peaks: name of a stage -> its peak, bytes per device.
        over_time: what a device holds in the course of the step; empty for a pipeline.
    """

    stages: Mapping[str, Mapping[str, int]]
    peaks: Mapping[str, int]
    over_time: tuple[Moment, ...]

    def __str__(self) -> str:
        kinds = list(dict.fromkeys(kind for of in self.stages.values() for kind in of))
        rows: Rows = [
            (stage, size(self.peaks[stage]), *(size(of.get(kind, 0)) for kind in kinds))
            for stage, of in self.stages.items()
        ]
        parts = [table("stage", ("", "peak", *kinds), rows)]
        if self.over_time:
            fullest = sorted(self.over_time, key=lambda m: -m.nbytes)[:MOMENTS]
            shown = [m for m in self.over_time if m in fullest]
            parts.append(table("moment", ("", "phase", "bytes", "most of it", "at"), [_moment(m) for m in shown]))
        return "\n".join(parts)


def _moment(m: Moment) -> tuple[str, ...]:
    largest = sorted(m.kinds.items(), key=lambda item: -item[1])[:2]
    most = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in largest)
    return m.at, m.phase, size(m.nbytes), most, m.source


def time_use(plan: PlanRecord) -> TimeUse:
    """Where the time of a plan goes."""
    stages: dict[str, dict[str, float]] = {}
    for stage in plan.stages if plan.pipelined else ():
        stages[stage.name] = {**stage.busy(plan.num_microbatches), "idle": 0.0}
    for stages_of_rank in plan.ranks if plan.pipelined else ():  # stages of one rank take turns
        names = [stage.name for stage in stages_of_rank]
        idle = plan.step_time_s - sum(sum(stages[name].values()) for name in names)
        for name in names:
            stages[name]["idle"] = idle
    return TimeUse(plan.step_time_s, plan.spent, stages)


def slowest(plan: PlanRecord) -> Iterator[str]:
    """The source line that takes most of the step, in words, if lines are known."""
    for line, kinds in time_use(plan).lines.items():
        if line and plan.step_time_s:
            kind = max(kinds, key=kinds.__getitem__)
            yield f"slowest line: {line}, {sum(kinds.values()) / plan.step_time_s:.0%} of the step, mostly {kind}"
            return


def memory_use(plan: PlanRecord) -> MemoryUse:
    """What the memory of a plan holds."""
    return MemoryUse(
        {stage.name: stage.memory for stage in plan.stages},
        {stage.name: stage.peak_memory_bytes for stage in plan.stages},
        plan.stages[0].over_time,
    )
