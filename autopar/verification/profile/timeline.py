"""The predicted and the measured timeline in one file, in the Trace Event Format.

A pipeline's process of each rank gains a row with the instructions as they ran: from the first operation of an
instruction on any device of the rank to the last. A further process per device has its operations and its collectives;
what overlaps there is on several rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from autopar.plans.plan import Plan
from autopar.plans.views.timeline import Event, event, named, named_row, trace_events
from autopar.verification.profile.operation import Interval, Operation

_Key = TypeVar("_Key")


def both_timelines(plan: Plan, operations: Sequence[Operation], step_time_s: float, platform: str) -> dict[str, Any]:
    """The content of the file, a JSON object.

    Args:
        plan: the plan.
        operations: those of one step.
        step_time_s: the measured time of this step (s).
        platform: of the devices.
    """
    predicted = trace_events(plan)
    events: list[Event] = list(predicted["traceEvents"])
    if plan.pipelined:
        events.extend(_instruction_rows(plan, operations, events))
    first = 1 + max(e["pid"] for e in events)
    for device in sorted({operation.device for operation in operations}):
        mine = [operation for operation in operations if operation.device == device]
        events.extend(_device_rows(first + device, f"device {device}, measured", mine, step_time_s))
    other = {**predicted["otherData"], "measured_step_time_s": step_time_s, "platform": platform}
    return {**predicted, "traceEvents": events, "otherData": other}


def _instruction_rows(plan: Plan, operations: Sequence[Operation], predicted: Sequence[Event]) -> Iterator[Event]:
    """The instructions of each rank as they ran, on a row of its process behind the predicted ones."""
    for rank, devices in enumerate(plan.rank_devices):
        spans: dict[str, Interval] = {}
        for operation in operations:
            if operation.device in devices:
                start, end = spans.get(operation.instruction, operation.interval)
                begin, stop = operation.interval
                spans[operation.instruction] = min(start, begin), max(end, stop)
        row = 1 + max(e["tid"] for e in predicted if e["pid"] == rank)
        for n, lane in enumerate(_lanes(spans)):
            yield named_row(rank, row + n, f"measured passes{f' {n + 1}' if n else ''}")
            for name, (start, end) in lane:
                yield event(name, rank, row + n, start, end - start, measured=True)


def _device_rows(process: int, name: str, operations: Sequence[Operation], step_time_s: float) -> Iterator[Event]:
    """The operations of one device, and its collectives."""
    rows, events = ["step"], [event("step", process, 0, 0.0, step_time_s, measured=True)]
    for title, wanted in (("operations", False), ("collectives", True)):
        spans = {i: o.interval for i, o in enumerate(operations) if bool(o.kind) == wanted}
        for n, lane in enumerate(_lanes(spans)):
            for i, (start, end) in lane:
                o = operations[i]
                args = {"program": o.program, "instruction": o.instruction, "source": o.source, "kind": o.kind}
                shown = {key: text for key, text in args.items() if text}
                events.append(event(o.name, process, len(rows), start, end - start, measured=True, **shown))
            rows.append(f"{title}{f' {n + 1}' if n else ''}")
    yield from named(process, name, rows)
    yield from events


def _lanes(spans: Mapping[_Key, Interval]) -> Iterable[Sequence[tuple[_Key, Interval]]]:
    """The spans on as few rows as possible, so that none overlap on a row; each to the first row that is free."""
    lanes: list[list[tuple[_Key, Interval]]] = []
    for key, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        if end <= start:
            continue
        lane = next((lane for lane in lanes if lane[-1][1][1] <= start), None)
        if lane is None:
            lanes.append(lane := [])
        lane.append((key, (start, end)))
    return lanes
