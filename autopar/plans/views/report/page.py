"""The page of a report: the sections of a plan put into `page.html.jinja`, with the style, the script and plotly.

Figures and tables come from `charts`, `pictures` and `tables`. The script draws the charts, sorts and filters tables,
and follows the colour scheme of the reader's screen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.errors import ArgumentError
from autopar.ir.text import seconds, size
from autopar.plans.record import PlanRecord
from autopar.plans.views.parallelism import describe
from autopar.plans.views.report import charts, pictures, tables
from autopar.plans.views.timeline import trace_events
from autopar.plans.views.usage import slowest, time_use

FOLDER = Path(__file__).parent


def html(plan: PlanRecord, beside: Mapping[str, PlanRecord | str]) -> str:
    """The page of a plan.

    Args:
        plan: the plan.
        beside: name -> another plan of the same step, or why there is none; for the comparison.

    Raises:
        ArgumentError: plotly or jinja2 (`pip install "autopar[report]"`) is missing.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ArgumentError(f'a report needs {error.name}: pip install "autopar[report]"') from error
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figures = _figures(plan)
    return environment.get_template("page.html.jinja").render(
        title=_title(plan),
        words=[words[:1].upper() + words[1:] for words in (*describe(plan).split("; "), *slowest(plan)) if words],
        cards=_cards(plan),
        devices=pictures.devices(plan),
        layouts=list(pictures.layouts(plan)),
        stages=tables.stages(plan),
        tensors=tables.tensors(plan),
        collectives=tables.collectives(plan),
        comparison=tables.comparison({"this plan": plan, **beside}),
        solver=tables.solver(plan),
        notes=plan.notes,
        figures={name: heading for name, (heading, _) in figures.items()},
        data=_json({name: figure for name, (_, figure) in figures.items()}),
        style=(FOLDER / "page.css").read_text(encoding="utf-8"),
        script=(FOLDER / "page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
    )


def _title(plan: PlanRecord) -> str:
    mesh = ", ".join(f"{name}={n}" for name, n in plan.mesh.items())
    return f"Plan for {math.prod(plan.mesh_sizes)} devices of {plan.cluster}, mesh ({mesh})"


def _cards(plan: PlanRecord) -> list[tuple[str, str, str]]:
    """(name, figure, remark) of what matters most."""
    limit = f"of {size(plan.memory_limit_bytes)} that it may use" if plan.memory_limit_bytes else ""
    stages = str(len(plan.stages)) if plan.pipelined else "none"
    schedule = f"on {len(plan.ranks)} submeshes, schedule {plan.schedule}" if plan.pipelined else "one mesh"
    batch = "the batch as a whole" if plan.num_microbatches == 1 else f"{plan.num_microbatches} microbatches"
    parts = ", ".join(f"{name} {seconds(t)}" for name, t in plan.parts.items() if name != "hidden" and t)
    return [
        ("step", seconds(plan.step_time_s), parts),
        ("MFU", f"{plan.mfu:.1%}", "of the peak FLOP/s"),
        ("memory per device", size(plan.peak_memory_bytes), limit),
        ("sent per device", size(plan.wire_bytes()), f"{sum(c.count for c in plan.collectives):,} collectives"),
        ("stages", stages, f"{schedule}, {batch}"),
    ]


def _figures(plan: PlanRecord) -> dict[str, tuple[str, charts.Figure]]:
    """Name -> heading and chart, in the order of the page."""
    events = trace_events(plan)["traceEvents"]
    figures = {"timeline": ("Timeline of the predicted step", charts.timeline(plan, events))}
    if (transfers := charts.transfers(plan, events)) is not None:
        figures["transfers"] = ("Transfers between ranks", transfers)
    if (lines := charts.lines(plan)) is not None:
        of = f" of {' and '.join(time_use(plan).busiest)}" if plan.pipelined else ""
        figures["lines"] = (f"Time by source line{of}", lines)
    if plan.pipelined or plan.stages[0].over_time:
        figures["memory"] = ("Memory over the step", charts.memory_over_time(plan))
    figures["peaks"] = ("Memory at the peak", charts.memory_peaks(plan))
    return figures


def _json(data: Any) -> str:
    """JSON that may be inside a script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
