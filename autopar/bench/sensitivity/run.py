"""`autopar bench sensitivity`: each number of the planner's algorithms, changed by itself.

The rows are plans of one program with one field of one record changed, beside the plan with the default. Summed up per
field:

    step       step time over that of the default: at worst, and at the median of the programs that read the field
    planning   processor time of planning over that of the default: at the median, and the farthest from 1
    gap        change of the relative gap to the bound on all plans, at worst

Planning ends within a relative gap of 0.005, so a step time may change by that much for no reason but another order of
equal choices. The row "default" compares plans of the default with each other, that is the noise of the machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.bench import rows as rows_kept
from autopar.bench import worker
from autopar.bench.sensitivity import records
from autopar.bench.sensitivity.programs import PROGRAMS
from autopar.ir.text import table as grid

#: A field changes nothing if it changes step times and planning times by no more, with every value in every program.
STEP_CHANGE, TIME_CHANGE = 1e-3, 0.03

Row = dict[str, Any]


def run(
    algorithms: Sequence[str] = tuple(records.RECORDS),
    fields: Sequence[str] = (),
    programs: Sequence[str] = tuple(PROGRAMS),
    resume: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """The rows of these fields and programs; those found in the resume file are not measured again.

    Raises:
        ArgumentError: an unknown algorithm, field or program.
        WorkerError: a worker failed.
    """
    rows_kept.check_words("algorithm", algorithms, tuple(records.RECORDS))
    rows_kept.check_words("field", fields, sorted({field for _, field in records.every()}))
    rows_kept.check_words("program", programs, tuple(PROGRAMS))
    chosen = list(records.every(tuple(algorithms), tuple(fields)))
    rows: list[Row] = rows_kept.read(resume)
    for program in programs:
        done = {(r["algorithm"], r["field"]) for r in rows if r["program"] == program}
        missing = [(a, f, records.values(a, f)) for a, f in chosen if (a, f) not in done]
        if not missing:
            continue
        for row in worker.lines("autopar.bench.sensitivity.work", {"program": program, "fields": missing}):
            rows.append(row)
            rows_kept.keep(resume, row)
            if row["read"]:
                tell(line(row))
    wanted = set(chosen)
    return [r for r in rows if r["program"] in programs and (r["algorithm"], r["field"]) in wanted]


def line(row: Row) -> str:
    """A row as it comes."""
    step, time = _step(row), _time(row)
    late = ", given up" if row.get("late") else ""
    what = f"{row['program']}: {row['algorithm']}.{row['field']} = {row['value']}"
    return f"{what}: step {step:.4f}, planning {time:.2f} of the default{late}"


def _step(row: Row) -> float:
    """Step time over that of the default; 1 where neither has a plan, nan where planning was given up."""
    step, default = row["step_s"], row["default_step_s"]
    return 1.0 if step == default else step / default


def _time(row: Row) -> float:
    return row["cpu_s"] / row["default_cpu_s"]


def summary(rows: Sequence[Row]) -> list[Row]:
    """One row per field and value, in the order of the records; fields that no program reads have no figures."""
    found: list[Row] = []
    for algorithm, field in dict.fromkeys((r["algorithm"], r["field"]) for r in rows):
        of_field = [r for r in rows if (r["algorithm"], r["field"]) == (algorithm, field)]
        own = getattr(records.RECORDS[algorithm], field)
        read = [r for r in of_field if r["read"]]
        by_value: dict[str, list[Row]] = {}
        for row in read:
            by_value.setdefault(str(row["value"]), []).append(row)
        if not read:
            found.append({"algorithm": algorithm, "field": field, "default": own, "value": None, "programs": 0})
        found.extend(_figures(algorithm, field, own, some) for some in by_value.values())
    return found


def _figures(algorithm: str, field: str, own: records.Value, rows: Sequence[Row]) -> Row:
    times = [_time(row) for row in rows]
    planned = [row for row in rows if not row.get("late")]
    steps = [_step(row) for row in planned] or [math.nan]
    gaps = [row["gap"] - row["default_gap"] for row in planned if math.isfinite(row["gap"] - row["default_gap"])]
    return {
        "algorithm": algorithm,
        "field": field,
        "default": own,
        "value": rows[0]["value"],
        "programs": len(rows),
        "step_worst": max(steps, key=lambda x: abs(x - 1)),
        "step_median": statistics.median(steps),
        "time_median": statistics.median(times),
        "time_worst": max(times, key=lambda x: abs(math.log(x))),
        "gap_worst": max(gaps, key=abs, default=0.0),
        "late": len(rows) - len(planned),
    }


def changes(row: Mapping[str, Any]) -> bool:
    """Whether a row of `summary` changes a plan or the time of planning."""
    if not row["programs"]:
        return False
    return bool(row["late"] or abs(row["step_worst"] - 1) > STEP_CHANGE or abs(row["time_median"] - 1) > TIME_CHANGE)


def table(rows: Sequence[Row]) -> str:
    """A line per field and value, and the fields that changed nothing."""
    found = summary(rows)
    lines = [_cells(row) for row in found if row["programs"]]
    head = ("default", "value", "programs", "step, worst", "median", "planning, median", "farthest", "gap, worst")
    active = {(r["algorithm"], r["field"]) for r in found if changes(r)}
    read = {(r["algorithm"], r["field"]) for r in found if r["programs"]}
    every = list(dict.fromkeys((r["algorithm"], r["field"]) for r in found))
    idle = [f"{a}.{f}" for a, f in every if (a, f) in read - active]
    unread = [f"{a}.{f}" for a, f in every if (a, f) not in read]
    return "\n".join(
        [
            grid("field", head, lines),
            f"changed nothing ({len(idle)}): {', '.join(idle) or 'none'}",
            f"not read by any program ({len(unread)}): {', '.join(unread) or 'none'}",
        ]
    )


def _cells(row: Row) -> tuple[str, ...]:
    late = f" ({row['late']} given up)" if row["late"] else ""
    return (
        f"{row['algorithm']}.{row['field']}",
        _short(row["default"]),
        _short(row["value"]),
        str(row["programs"]),
        f"{row['step_worst'] - 1:+.2%}",
        f"{row['step_median'] - 1:+.2%}",
        f"{row['time_median']:.2f}",
        f"{row['time_worst']:.2f}{late}",
        f"{row['gap_worst']:+.2%}",
    )


def _short(value: Any) -> str:
    return " ".join(f"{x:g}" for x in value) if isinstance(value, tuple | list) else f"{value:g}"
