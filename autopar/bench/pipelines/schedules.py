"""`autopar bench schedules`: every pipeline schedule at one size, simulated, and the time that the simulation takes.

All ranks have the same work per microbatch: a forward pass of `TICKS` ticks, gradients of inputs and of weights of as
many, shared between a rank's stages; no transfers. Schedules without a flush run `BATCHES` batches in a row. Printed:

    bubble                           time lost over the time of ranks that never wait
    in flight                        microbatches in flight on the ranks with least and most; slices and chunks as parts
    versions                         of the weights, on the stage that needs most
    make, check, order, simulate     seconds of lists, proof, order of issue, one simulation; the least of the repeats

A schedule that does not fit the size has a complaint in place of figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from autopar.cost_models.pipeline import simulate, uniform
from autopar.errors import ArgumentError, ScheduleError
from autopar.ir.text import seconds
from autopar.ir.text import table as grid
from autopar.schedules import SCHEDULES, Size, bounds, check, issue_order, make, weight_versions

TICKS = 12  # divides evenly between 1, 2, 3, 4, 6 or 12 stages
BATCHES = 4

Row = dict[str, Any]


def run(
    size: Size, chunks: int, slices: int, repeats: int, tell: Callable[[str], None] = lambda text: None
) -> list[Row]:
    """A row per schedule at `size`, with the chunks, slices and batches it can use; ArgumentError if repeats < 1."""
    if repeats < 1:
        raise ArgumentError(f"repeats must be at least 1, not {repeats}")
    several = {"chunks": chunks, "slices": slices, "batches": BATCHES}
    rows: list[Row] = []
    for name, schedule in SCHEDULES.items():
        tell(name)
        fitting = replace(size, **{word: several[word] for word in schedule.several})
        try:
            rows.append(_row(name, fitting, repeats))
        except ScheduleError as error:
            rows.append({"schedule": name, "complaint": str(error)})
    return rows


def _row(name: str, size: Size, repeats: int) -> Row:
    schedule, most = make(name, size), bounds(name, size)
    ticks = TICKS / size.chunks / size.slices
    prices = uniform(schedule.pipeline.stages, ticks, ticks, ticks)
    simulated = simulate(schedule, prices)
    in_flight = [count / size.chunks / size.slices for count in simulated.stash]
    return {
        "schedule": name,
        **asdict(size),
        "synchronous": SCHEDULES[name].synchronous,
        "executable": SCHEDULES[name].executable,
        "bubble_over_ideal": simulated.bubble_over_ideal,
        "held_most": max(in_flight),
        "held_least": min(in_flight),
        "weight_versions": max(weight_versions(schedule)),
        "instructions": sum(map(len, schedule.lists)),
        "make_s": _least(lambda: make(name, size), repeats),
        "check_s": _least(lambda: check(schedule, most), repeats),
        "order_s": _least(lambda: issue_order(schedule.pipeline, schedule.lists), repeats),
        "simulate_s": _least(lambda: simulate(schedule, prices), repeats),
    }


def _least(work: Callable[[], object], repeats: int) -> float:
    """The least time of `repeats` calls, s."""
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def table(rows: Sequence[Row]) -> str:
    """A line per schedule, then the complaints."""
    heads = ("schedule", "bubble", "in_flight", "versions", "instructions", "make", "check", "order", "simulate")
    lines = [
        (
            row["schedule"],
            f"{row['bubble_over_ideal']:.1%}",
            f"{row['held_least']:g}-{row['held_most']:g}",
            str(row["weight_versions"]),
            str(row["instructions"]),
            *(seconds(row[f"{word}_s"]) for word in ("make", "check", "order", "simulate")),
        )
        for row in rows
        if "complaint" not in row
    ]
    return "\n".join([grid("", heads, lines), *(row["complaint"] for row in rows if "complaint" in row)])
