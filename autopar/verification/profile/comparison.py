"""A measured step beside the predicted one.

    on one mesh      by kind of work, and by source line
    in a pipeline    by stage and pass; what is idle on every rank

With `U(.)` the length of the union of intervals, the time of a device on one mesh is split as predictions are:

    computation = U(operations that do not communicate)
    communication = U(all) - computation                        what computation does not hide
    idle = step - U(all)
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from autopar.ir.keyed import grouped, totals
from autopar.ir.text import Rows, seconds, table, write_file
from autopar.plans.plan import Plan
from autopar.plans.views.notebook import ShownAsText
from autopar.verification.profile.operation import Interval, Operation
from autopar.verification.profile.timeline import both_timelines

LINES = 16  # rows of source lines
PASS = re.compile(r"stage (\d+) ([FBW])$")
_STAGE = re.compile(r"stage (\d+) ")


@dataclass(frozen=True, slots=True)
class Compared:
    """Seconds per step, as predicted and as measured.

    Attributes:
        what: kind of work, source line, or stage and pass.
        predicted_s: predicted (s).
        measured_s: measured, the mean over devices of the median step (s).
    """

    what: str
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, eq=False)
class Profile(ShownAsText):
    """What `ParallelFunction.profile` returns; printed, tables of predicted and measured times.

    Attributes:
        plan: the plan.
        platform: of the devices, such as "cpu".
        devices: how many.
        step_times_s: the time of every step, from its call until its results are there (s).
        operations: every operation that ran, in the order of their starts within each step.
        collectives: name of a program -> collectives that a device runs in it per step, by the text of the program.
    """

    plan: Plan
    platform: str
    devices: int
    step_times_s: tuple[float, ...]
    operations: tuple[Operation, ...]
    collectives: Mapping[str, int]

    @property
    def step_time_s(self) -> float:
        """The median time of a step (s)."""
        return statistics.median_low(self.step_times_s)

    @property
    def median_step(self) -> tuple[Operation, ...]:
        """The operations of the step whose time is the median."""
        return self._of_step[self.step_times_s.index(self.step_time_s)]

    @cached_property
    def _of_step(self) -> Mapping[int, tuple[Operation, ...]]:
        steps: dict[int, list[Operation]] = {i: [] for i in range(len(self.step_times_s))}
        for operation in self.operations:
            steps[operation.step].append(operation)
        return {i: tuple(of) for i, of in steps.items()}

    @cached_property
    def by_device(self) -> Mapping[int, tuple[Operation, ...]]:
        """Device -> its operations in the median step."""
        devices = grouped((operation.device, operation) for operation in self.median_step)
        return {device: tuple(devices[device]) for device in sorted(devices)}

    def kinds(self) -> tuple[Compared, ...]:
        """Kinds of work on one mesh; in a pipeline every pass of every stage, and what is idle on every rank."""
        return tuple(self._passes() if self.plan.pipelined else self._kinds())

    def _kinds(self) -> Iterator[Compared]:
        predicted: dict[str, float] = {"computation": 0.0, "communication": 0.0}
        for row in self.plan.spent:
            kind = "communication" if row.kind == "communication" else "computation"
            predicted[kind] += row.seconds
        devices = self.by_device.values()
        computing = [union(o.interval for o in operations if not o.kind) for operations in devices]
        busy = [union(o.interval for o in operations) for operations in devices]
        yield Compared("computation", predicted["computation"], _mean(computing))
        yield Compared("communication", predicted["communication"], _mean(busy) - _mean(computing))
        yield Compared("idle", 0.0, self.step_time_s - _mean(busy))

    def _passes(self) -> Iterator[Compared]:
        count = self.plan.num_microbatches
        words = {"F": "forward", "B": "backward", "W": "weight gradients", "once": "once per step"}
        ranks = zip(self.plan.ranks, self.plan.rank_devices, strict=True)
        for rank, (stages, devices) in enumerate(ranks):
            numbers = [self.plan.stages.index(stage) for stage in stages]
            predicted = 0.0
            for number, stage in zip(numbers, stages, strict=True):
                for kind, t in stage.busy(count).items():
                    predicted += t
                    yield Compared(f"{words[kind]}, {stage.name}", t, self._busy(devices, number, kind))
            if before := self.plan.parts.get("first loop", 0.0):
                predicted += before
                yield Compared(f"first loop, rank {rank}", before, self._busy(devices, -1, ""))
            yield Compared(f"idle, rank {rank}", self.plan.step_time_s - predicted, self._idle(devices))

    def _busy(self, devices: Iterable[int], stage: int, kind: str) -> float:
        return _mean(
            union(o.interval for o in self.by_device.get(device, ()) if _part(o.program) == (stage, kind))
            for device in devices
        )

    def _idle(self, devices: Iterable[int]) -> float:
        return self.step_time_s - _mean(union(o.interval for o in self.by_device.get(d, ())) for d in devices)

    def lines(self) -> tuple[Compared, ...]:
        """Source lines, the slowest first; a pipeline has no predicted seconds of them."""
        predicted = totals((row.source, row.seconds) for row in self.plan.spent if not self.plan.pipelined)
        measured = totals((operation.source, operation.seconds / self.devices) for operation in self.median_step)
        measured = {**dict.fromkeys(predicted, 0.0), **measured}
        rows = [Compared(line, predicted.get(line, 0.0), t) for line, t in measured.items()]
        return tuple(sorted(rows, key=lambda row: (-row.measured_s, row.what)))

    def collective_runs(self) -> int:
        """Collectives that the devices began in the median step, counted on every device."""
        return sum(operation.begins for operation in self.median_step)

    def expected_collective_runs(self) -> int:
        """Collectives that the devices run in a step, counted on every device, by the compiled programs."""
        return sum(count * self._devices_of(program) for program, count in self.collectives.items())

    def _devices_of(self, program: str) -> int:
        stage = _STAGE.search(program) if self.plan.pipelined else None
        return self.devices if stage is None else self.plan.stages[int(stage[1])].devices

    def data(self) -> Mapping[str, Any]:
        """What `str` prints, for JSON."""
        return {
            "platform": self.platform,
            "devices": self.devices,
            "step_times_s": list(self.step_times_s),
            "step_time_s": self.step_time_s,
            "predicted_step_time_s": self.plan.step_time_s,
            "collectives": self.collective_runs(),
            "expected_collectives": self.expected_collective_runs(),
            "kinds": [asdict(compared) for compared in self.kinds()],
            "lines": [asdict(compared) for compared in self.lines()],
        }

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted timeline and that of the median step in one file, for https://ui.perfetto.dev.

        In a pipeline, measured instructions are on a row beside the predicted ones. Every device has rows for its
        operations and its collectives.

        Args:
            path: the file, such as "profile.trace.json".

        Raises:
            ArgumentError: the file cannot be written.
        """
        write_file(path, json.dumps(self.trace_events()), "the trace cannot be written to")

    def trace_events(self) -> dict[str, Any]:
        """The content of the file of `trace`, a JSON object."""
        return both_timelines(self.plan, self.median_step, self.step_time_s, self.platform)

    def __str__(self) -> str:
        times, predicted = self.step_times_s, self.plan.step_time_s
        ratio = f"{self.step_time_s / predicted:.2f} times the {seconds(predicted)} predicted" if predicted else ""
        parts = [
            f"{seconds(self.step_time_s)} per step on {self.devices} {self.platform} devices, {ratio}; "
            f"median of {len(times)}, {seconds(min(times))} to {seconds(max(times))}"
        ]
        expected, ran = self.expected_collective_runs(), self.collective_runs()
        if ran != expected:
            parts.append(f"the profiler recorded {ran} of {expected} collectives: times below are too short")
        step = Compared("step", predicted, self.step_time_s)
        parts.append(_table("stage and pass" if self.plan.pipelined else "work", [step, *self.kinds()]))
        parts.append(_table("source line", self.lines()[:LINES], predicted=not self.plan.pipelined))
        return "\n".join(parts)


def _table(title: str, compared: Sequence[Compared], predicted: bool = True) -> str:
    def shown(t: float) -> str:
        return seconds(t) if t > 0 else "-"

    if not predicted:
        return table(title, ("", "measured"), [(c.what or "-", shown(c.measured_s)) for c in compared])
    rows: Rows = [
        (
            c.what or "-",
            shown(c.predicted_s),
            shown(c.measured_s),
            f"{c.measured_s / c.predicted_s:.2f}" if c.predicted_s > 0 and c.measured_s > 0 else "-",
        )
        for c in compared
    ]
    return table(title, ("", "predicted", "measured", "ratio"), rows)


def union(intervals: Iterable[Interval]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _mean(values: Iterable[float]) -> float:
    of = list(values)
    return statistics.fmean(of) if of else 0.0


def _part(program: str) -> tuple[int, str]:
    """Stage and pass of a program; "once" for all that runs once per step; (-1, "") in a loop that runs first."""
    if one_pass := PASS.match(program):
        return int(one_pass[1]), one_pass[2]
    stage = _STAGE.match(program)
    return (int(stage[1]), "once") if stage else (-1, "")
