"""The predicted step as a timeline for Perfetto (https://ui.perfetto.dev): the Trace Event Format, as JSON.

    a pipeline    a process per rank: its passes, reductions and updates on one row, what it sends to and receives from
                  each other rank on rows of their own, as `autopar.cost_models.pipeline.simulate` runs the schedule
    one mesh      one process, as all devices do the same: a row per kind of work; source lines one after the other in
                  each phase, since a plan has their seconds and not their order

The first event of each process spans the step. Times are microseconds from the start of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autopar.cost_models.pipeline import Prices, Simulation, simulate
from autopar.plans.record import PlanRecord
from autopar.schedules import SCHEDULES, Schedule, Size, make
from autopar.schedules.instructions import Instruction

Event = dict[str, Any]

STEP, WORK = 0, 1  # the first rows
PHASES = ("forward", "backward", "update", "")
MICRO = 1e6


def trace_events(plan: PlanRecord) -> dict[str, Any]:
    """The timeline as a JSON object: `traceEvents`, and what the plan is for in `otherData`."""
    events = list(_pipeline(plan) if plan.pipelined else _one_mesh(plan))
    other = {"cluster": plan.cluster, "mesh": dict(plan.mesh), "step_time_s": plan.step_time_s, "version": plan.version}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def event(name: str, process: int, row: int, start: float, seconds: float, **args: Any) -> Event:
    """A complete event; `start` and `seconds` in s."""
    return {
        "name": name, "ph": "X", "pid": process, "tid": row, "ts": start * MICRO, "dur": seconds * MICRO, "args": args
    }  # fmt: skip


def named(process: int, name: str, rows: Sequence[str]) -> Iterator[Event]:
    """Names of a process and its rows."""
    yield {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}
    for row, text in enumerate(rows):
        yield named_row(process, row, text)


def named_row(process: int, row: int, name: str) -> Event:
    """The name of a row."""
    return {"name": "thread_name", "ph": "M", "pid": process, "tid": row, "args": {"name": name}}


# Pipelines


def simulated(plan: PlanRecord) -> tuple[Schedule, Simulation]:
    """The schedule of a pipeline, and what the simulator says of it at the plan's prices."""
    transfer: dict[tuple[int, int], float] = {}
    for pair, seconds in plan.transfers.items():
        source, _, target = pair.partition(">")
        transfer[int(source), int(target)] = seconds
    ranks = len(plan.ranks)
    size = Size(ranks, plan.num_microbatches, len(plan.stages) // ranks)
    schedule = make(plan.schedule, size, sorted({(min(pair), max(pair)) for pair in transfer}))

    def of(kind: str) -> tuple[float, ...]:
        return tuple(stage.seconds.get(kind, 0.0) for stage in plan.stages)

    weight = of("W") if SCHEDULES[plan.schedule].split else ()
    prices = Prices(of("F"), of("B"), weight, transfer, update=of("once"))
    return schedule, simulate(schedule, prices)


def _pipeline(plan: PlanRecord) -> Iterator[Event]:
    schedule, simulation = simulated(plan)
    place, before = schedule.pipeline.placement, plan.parts.get("first loop", 0.0)
    for rank, (instructions, devices) in enumerate(zip(schedule.lists, plan.rank_devices, strict=True)):
        rows = {"step": STEP, "passes": WORK}
        events = [event("step", rank, STEP, 0.0, plan.step_time_s)]
        if before:
            events.append(event("first loop", rank, WORK, 0.0, before))
        for i, start, end in zip(instructions, simulation.starts[rank], simulation.ends[rank], strict=True):
            if end > start:
                row = rows.setdefault(_row(i, place), len(rows))
                args = {"instruction": str(i), **_transferred(plan, i)}
                events.append(event(instruction_words(i), rank, row, before + start, end - start, **args))
        yield from named(rank, f"rank {rank}: devices {devices[0]} to {devices[-1]}", list(rows))
        yield from events


def _row(i: Instruction, place: Sequence[int]) -> str:
    """The row of an instruction; transfers over one link do not overlap."""
    if i.op == "send":
        return f"to rank {place[i.to]}"
    return f"from rank {place[i.stage]}" if i.op == "recv" else "passes"


def _transferred(plan: PlanRecord, i: Instruction) -> Mapping[str, float]:
    """The bytes of a transfer."""
    nbytes = plan.transfer_bytes.get(f"{i.stage}>{i.to}", 0.0) if i.op in ("send", "recv") else 0.0
    return {"bytes": nbytes} if nbytes else {}


def instruction_words(i: Instruction) -> str:
    """An instruction in words."""
    names = {"F": "forward", "B": "backward", "W": "weight gradients"}
    if i.op == "run":
        return f"{names[i.kind]}, stage {i.stage}, microbatch {i.microbatch}"
    if i.op in ("send", "recv"):
        return f"{i.op} {names[i.kind]} {i.microbatch}, stage {i.stage} to {i.to}"
    return f"once per step, stage {i.stage}" if i.op == "update" else f"{i.op}, stage {i.stage}"


# One mesh


def _one_mesh(plan: PlanRecord) -> Iterator[Event]:
    kinds = list(dict.fromkeys(row.kind for row in plan.spent))
    yield from named(0, f"each of {plan.stages[0].devices} devices", ("step", "phases", *kinds))
    yield event("step", 0, STEP, 0.0, plan.step_time_s)
    now = 0.0
    for phase in PHASES:
        begin = now
        for row in plan.spent:
            if row.phase == phase and row.seconds > 0:
                yield event(row.source or row.kind, 0, 2 + kinds.index(row.kind), now, row.seconds, phase=phase)
                now += row.seconds
        if now > begin:
            yield event(phase or "rest", 0, WORK, begin, now - begin)
