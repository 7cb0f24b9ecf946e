"""The charts of a report, as figures of plotly (https://plotly.com/javascript/reference), JSON objects.

    timeline     a bar for each pass of the simulated schedule, or each source line           -> views/timeline.py
    transfers    a bar for each send and receive
    memory       bytes per device over the step, by kind of tensor or by rank, and the limit  -> memory_over_time
    lines        seconds by source line and kind of work                                      -> Plan.time

Colours are positions in a palette; the page has a palette for light and one for dark screens, and sets text colours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.ir.keyed import grouped
from autopar.ir.text import seconds, size
from autopar.plans.record import PlanRecord, Stage
from autopar.plans.views.timeline import Event, simulated
from autopar.plans.views.usage import time_use

Figure = dict[str, Any]

LINES = 20  # source lines in the chart
ROW_PIXELS, DENSE_PIXELS, DENSE_ROWS, EDGE_PIXELS = 22, 15, 24, 110  # of a row; of one of many; axes and legend
MILLI, MICRO = 1e3, 1e-6

#: Kind of work or of tensor -> position in the palette; others follow in the order in which they appear.
COLOURS: Mapping[str, int] = {
    "forward": 0, "backward": 1, "weight gradients": 2, "send": 3, "recv": 4, "reduce": 5, "once per step": 6,
    "first loop": 4, "update": 2, "rest": 7, "compute": 0, "memory traffic": 1, "communication": 3, "host": 5,
    "other": 6, "idle": 7,
    "parameters": 0, "state": 0, "optimizer state": 1, "arguments": 4, "gradients": 2, "residuals": 3,
    "temporaries": 5, "results": 6, "resharding": 7,
}  # fmt: skip
PALETTE_SIZE = 8


def _colour(name: str) -> int:
    return COLOURS.get(name, sum(map(ord, name)) % PALETTE_SIZE)


# Timeline


def timeline(plan: PlanRecord, events: Sequence[Event]) -> Figure:
    """The predicted step: a row per rank, or per kind of work on one mesh; bars in milliseconds.

    `events`: those of `autopar.plans.views.timeline.trace_events`.
    """
    return _bars(plan, events, [name for name in _rows(events).values() if not _is_link(name)])


def transfers(plan: PlanRecord, events: Sequence[Event]) -> Figure | None:
    """What ranks send each other: a row per rank and link; None on one mesh. `events`: as for `timeline`."""
    links = [name for name in _rows(events).values() if _is_link(name)]
    return _bars(plan, events, links) if links else None


def _is_link(row: str) -> bool:
    return " rank " in row


def _bars(plan: PlanRecord, events: Sequence[Event], shown: Sequence[str]) -> Figure:
    """The events of some rows, a trace for each kind."""
    rows = _rows(events)
    drawn = [e for e in events if e["ph"] == "X" and rows.get((e["pid"], e["tid"])) in shown]
    bars = grouped((_category(e, plan), e) for e in drawn)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [rows[e["pid"], e["tid"]] for e in spans],
            "x": [e["dur"] * MICRO * MILLI for e in spans],
            "base": [e["ts"] * MICRO * MILLI for e in spans],
            "customdata": [[e["name"], *_hover(e)] for e in spans],
            "hovertemplate": "%{customdata[0]}<br>%{customdata[1]}<extra>%{y}</extra>",
            "marker": {"color": _colour(name), "line": {"width": 0}},
        }
        for name, spans in bars.items()
    ]
    figure = _figure(traces, len(shown), shown, "milliseconds from the start of the step")
    figure["layout"]["xaxis"]["range"] = [0, plan.step_time_s * MILLI]
    return figure


def _rows(events: Sequence[Event]) -> Mapping[tuple[int, int], str]:
    """(process, row) of the timeline -> its name, without the row that spans the step."""
    named = [e for e in events if e["ph"] == "M"]
    processes = {e["pid"]: e["args"]["name"].partition(":")[0] for e in named if e["name"] == "process_name"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in named if e["name"] == "thread_name"}
    return {
        key: f"{processes[key[0]]}: {name}" if len(processes) > 1 else name
        for key, name in rows.items()
        if name != "step"
    }


def _category(event: Mapping[str, Any], plan: PlanRecord) -> str:
    """What a bar is coloured by: the kind of pass or transfer; on one mesh the phase."""
    if not plan.pipelined:
        return event["args"].get("phase") or (event["name"] if event["tid"] == 1 else "rest")
    name = event["name"].partition(",")[0]
    return name.split()[0] if name.startswith(("send", "recv")) else name


def _hover(event: Mapping[str, Any]) -> Iterator[str]:
    begin, taken = event["ts"] * MICRO, event["dur"] * MICRO
    moved = event["args"].get("bytes")
    yield f"{seconds(taken)}, from {seconds(begin)} to {seconds(begin + taken)}" + (f", {size(moved)}" if moved else "")


def _figure(traces: Sequence[Figure], rows: int, order: Sequence[str], axis: str) -> Figure:
    """Horizontal bars, the first row on top."""
    return {
        "data": list(traces),
        "layout": {
            "barmode": "overlay",
            "bargap": 0.15,
            "height": rows * (ROW_PIXELS if rows <= DENSE_ROWS else DENSE_PIXELS) + EDGE_PIXELS,
            "xaxis": {"title": {"text": axis}, "zeroline": False},
            "yaxis": {"categoryorder": "array", "categoryarray": list(order), "autorange": "reversed",
                      "fixedrange": True, "automargin": True, "ticks": "", "dtick": 1,
                      "tickfont": {"size": 12 if rows <= DENSE_ROWS else 10}},
        },
    }  # fmt: skip


# Source lines


def lines(plan: PlanRecord) -> Figure | None:
    """Seconds of the slowest source lines, by kind of work; None if no lines are known."""
    by_line = {line or "no line": kinds for line, kinds in time_use(plan).lines.items()}
    shown = dict(list(by_line.items())[:LINES])
    if not shown:
        return None
    kinds = dict.fromkeys(kind for of in shown.values() for kind in of)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "y": list(shown),
            "x": [of.get(kind, 0.0) * MILLI for of in shown.values()],
            "customdata": [[seconds(of.get(kind, 0.0)), plan.code.get(line, "")] for line, of in shown.items()],
            "hovertemplate": f"%{{y}}: {kind} %{{customdata[0]}}<br>%{{customdata[1]}}<extra></extra>",
            "marker": {"color": _colour(kind), "line": {"width": 0}},
        }
        for kind in kinds
    ]
    figure = _figure(traces, len(shown), list(shown), "milliseconds per step")
    figure["layout"]["barmode"] = "stack"
    return figure


# Memory


def memory_peaks(plan: PlanRecord) -> Figure:
    """Bytes per device of each stage at its peak, by kind of tensor, and the limit."""
    unit, name = _unit(plan)
    kinds = dict.fromkeys(kind for stage in plan.stages for kind, nbytes in stage.memory.items() if nbytes)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "y": [stage.name for stage in plan.stages],
            "x": [stage.memory.get(kind, 0) / unit for stage in plan.stages],
            "customdata": [size(stage.memory.get(kind, 0)) for stage in plan.stages],
            "hovertemplate": f"%{{y}}: {kind} %{{customdata}}<extra></extra>",
            "marker": {"color": _colour(kind), "line": {"width": 0}},
        }
        for kind in kinds
    ]
    names = [stage.name for stage in plan.stages]
    figure = _figure(traces, len(names), names, f"{name} per device")
    figure["layout"]["barmode"] = "stack"
    return _with_limit(figure, plan, "x")


def memory_over_time(plan: PlanRecord) -> Figure:
    """Bytes per device in the course of the step: on one mesh by kind, at moments of it; in a pipeline of each rank."""
    unit, name = _unit(plan)
    traces = list(_ranks(plan, unit) if plan.pipelined else _kinds(plan.stages[0], unit))
    axis = "milliseconds from the start of the step" if plan.pipelined else "moments of the step, in program order"
    layout = {
        "height": 380,
        "xaxis": {"title": {"text": axis}, "zeroline": False},
        "yaxis": {"title": {"text": f"{name} per device"}, "rangemode": "tozero", "automargin": True},
        "hovermode": "closest",
    }
    return _with_limit({"data": traces, "layout": layout}, plan, "y")


def _kinds(stage: Stage, unit: float) -> Iterator[Figure]:
    """A stacked area for each kind of tensor."""
    moments = stage.over_time
    for kind in dict.fromkeys(kind for moment in moments for kind, nbytes in moment.kinds.items() if nbytes):
        yield {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "kinds",
            "name": kind,
            "x": list(range(len(moments))),
            "y": [moment.kinds.get(kind, 0) / unit for moment in moments],
            "customdata": [
                [size(m.kinds.get(kind, 0)), f"{m.phase}, {m.at} {m.source}".strip(), size(m.nbytes)] for m in moments
            ],
            "hovertemplate": f"{kind} %{{customdata[0]}} of %{{customdata[2]}}<br>%{{customdata[1]}}<extra></extra>",
            "line": {"color": _colour(kind), "width": 1},
            "fillcolor": _colour(kind),
        }


def _ranks(plan: PlanRecord, unit: float) -> Iterator[Figure]:
    """A line for each rank, whose points name the bytes of each kind."""
    for rank, levels in memory_levels(plan).items():
        yield {
            "type": "scatter",
            "mode": "lines",
            "line": {"shape": "hv", "width": 2, "color": rank % PALETTE_SIZE},
            "name": f"rank {rank}",
            "x": [level.seconds * MILLI for level in levels],
            "y": [level.nbytes / unit for level in levels],
            "customdata": [[size(level.nbytes), seconds(level.seconds), _of_kinds(level)] for level in levels],
            "hovertemplate": "%{customdata[0]} at %{customdata[1]}<br>%{customdata[2]}<extra>%{fullData.name}</extra>",
        }


@dataclass(frozen=True, slots=True)
class Level:
    """What a device of a rank has in memory from a moment on.

    Attributes:
        seconds: from the start of the step.
        kinds: kind of tensor -> bytes.
    """

    seconds: float
    kinds: Mapping[str, float]

    @property
    def nbytes(self) -> float:
        return sum(self.kinds.values())


def _of_kinds(level: Level) -> str:
    largest = sorted((kind for kind, nbytes in level.kinds.items() if nbytes), key=lambda kind: -level.kinds[kind])
    return ", ".join(f"{kind} {size(level.kinds[kind])}" for kind in largest)


def memory_levels(plan: PlanRecord) -> Mapping[int, list[Level]]:
    """Rank -> its levels, as the schedule runs.

    A microbatch keeps its residuals from the start of its forward pass to the end of the last pass that reads them, in
    equal shares of the peak of its stage. All other kinds count throughout.
    """
    schedule, simulation = simulated(plan)
    last = "W" if schedule.pipeline.split else "B"
    before = plan.parts.get("first loop", 0.0)
    levels: dict[int, list[Level]] = {}
    for rank, instructions in enumerate(schedule.lists):
        changes: list[tuple[float, int, int]] = []  # (seconds, change of the live microbatches, stage)
        for i, start, end in zip(instructions, simulation.starts[rank], simulation.ends[rank], strict=True):
            if i.op == "run" and i.kind == "F":
                changes.append((before + start, 1, i.stage))
            if i.op == "run" and i.kind == last:
                changes.append((before + end, -1, i.stage))
        levels[rank] = _levels(plan.ranks[rank], [plan.stages.index(s) for s in plan.ranks[rank]], sorted(changes))
        levels[rank].append(replace(levels[rank][-1], seconds=plan.step_time_s))
    return levels


def _levels(stages: Sequence[Stage], numbers: Sequence[int], changes: Sequence[tuple[float, int, int]]) -> list[Level]:
    """The levels after each change."""
    counts = [dict.fromkeys(numbers, 0)]  # the live microbatches of each stage
    for _, change, number in changes:
        counts.append({**counts[-1], number: counts[-1][number] + change})
    most = {n: max(1, *(live[n] for live in counts)) for n in numbers}

    def level(seconds: float, live: Mapping[int, int]) -> Level:
        kinds = Counter[str]()
        for n, stage in zip(numbers, stages, strict=True):
            share = {"residuals": live[n] / most[n]}
            kinds.update({kind: nbytes * share.get(kind, 1) for kind, nbytes in stage.memory.items()})
        return Level(seconds, kinds)

    return [level(t, live) for t, live in zip((0.0, *(t for t, _, _ in changes)), counts, strict=True)]


def _unit(plan: PlanRecord) -> tuple[float, str]:
    """The largest unit of which the peak is one or more: bytes and name."""
    return next((u for u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if plan.peak_memory_bytes >= u[0]), (1.0, "bytes"))


def _with_limit(figure: Figure, plan: PlanRecord, axis: str) -> Figure:
    """A line at the bytes that planning allowed, if the plan comes near it."""
    limit = plan.memory_limit_bytes / _unit(plan)[0]
    if limit and plan.peak_memory_bytes > plan.memory_limit_bytes / 4:
        line = {"x0": limit, "x1": limit, "y0": 0, "y1": 1, "xref": "x", "yref": "paper"}
        if axis == "y":
            line = {"y0": limit, "y1": limit, "x0": 0, "x1": 1, "yref": "y", "xref": "paper"}
        figure["layout"]["shapes"] = [{"type": "line", "line": {"dash": "dash", "width": 2}, **line}]
    return figure
