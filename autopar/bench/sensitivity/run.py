"""`autopar bench sensitivity`: each number of the planner's algorithms, changed by itself.

The rows are plans of one program with one field of one record changed, beside the plan with the default. Summed up per
field:

    step       step time over that of the default, less 1: at worst, and at the median of the programs that read the
               field
    planning   processor time of planning over the median of that with the defaults, at the median of the programs
    gap        change of the relative gap to the bound on all plans, at worst

Planning ends within a relative gap of 0.005, so a step time may change by that much for no reason but another order of
equal choices. The default is planned again for each record: its own times show the noise of the machine -> noise.
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
from autopar.ir.keyed import grouped
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
    """A row as it comes, beside the last plan with the defaults."""
    late = ", given up" if row.get("late") else ""
    time = row["cpu_s"] / row["default_cpu_s"]
    what = f"{row['program']}: {row['algorithm']}.{row['field']} = {row['value']}"
    return f"{what}: step {_step(row):.4f}, planning {time:.2f} of the default{late}"


def _step(row: Row) -> float:
    """Step time over that of the default; 1 where neither has a plan, nan where planning was given up."""
    step, default = row["step_s"], row["default_step_s"]
    return 1.0 if step == default else step / default


def default_seconds(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Program -> processor times (s) of planning with the defaults, one for each record that it reads."""
    times_by_program: dict[str, dict[float, None]] = {}
    for row in rows:
        if row["read"]:
            times_by_program.setdefault(row["program"], {})[row["default_cpu_s"]] = None
    return {program: list(times) for program, times in times_by_program.items()}


def noise(rows: Sequence[Row]) -> float:
    """Relative distance of planning times of the default from their median in each program: the 90th percentile."""
    off = sorted(abs(x / statistics.median(times) - 1) for times in default_seconds(rows).values() for x in times)
    return off[int(0.9 * (len(off) - 1))] if off else 0.0


def summary(rows: Sequence[Row]) -> list[Row]:
    """One row per field and value, in the order of the rows; fields that no program reads have no figures."""
    default = {program: statistics.median(times) for program, times in default_seconds(rows).items()}
    groups = grouped(((row["algorithm"], row["field"], str(row.get("value"))), row) for row in rows)
    read = {(row["algorithm"], row["field"]) for row in rows if row["read"]}
    summaries: list[Row] = []
    for (algorithm, field, _), group in groups.items():
        own = {"algorithm": algorithm, "field": field, "default": getattr(records.RECORDS[algorithm], field)}
        if group[0]["read"]:
            summaries.append({**own, **_figures(group, default)})
        elif (algorithm, field) not in read:
            summaries.append({**own, "value": None, "programs": 0})
    return summaries


def _figures(rows: Sequence[Row], default: Mapping[str, float]) -> Row:
    planned = [row for row in rows if not row.get("late")]
    steps = [_step(row) - 1 for row in planned] or [math.nan]
    gaps = [row["gap"] - row["default_gap"] for row in planned if math.isfinite(row["gap"] - row["default_gap"])]
    times = [row["cpu_s"] / default[row["program"]] for row in rows]
    return {
        "value": rows[0]["value"],
        "programs": len(rows),
        "step_worst": max(steps, key=abs),
        "step_median": statistics.median(steps),
        "time_median": statistics.median(times),
        "time_least": min(times),
        "time_most": max(times),
        "gap_worst": max(gaps, key=abs, default=0.0),
        "late": len(rows) - len(planned),
    }


def changes(row: Mapping[str, Any]) -> bool:
    """Whether a row of `summary` changes a plan or the time of planning."""
    if not row["programs"]:
        return False
    step, time = abs(row["step_worst"]), abs(row["time_median"] - 1)
    return bool(row["late"]) or step > STEP_CHANGE or time > TIME_CHANGE


def table(rows: Sequence[Row]) -> str:
    """A table per record with a line per field and value, and the fields that changed nothing."""
    summaries = summary(rows)
    head = ("", "default", "value", "programs", "step, worst", "median", "planning", "from", "to", "gap", "given up")
    cells = grouped((row["algorithm"], _cells(row)) for row in summaries if row["programs"])
    tables = [f"\n{algorithm}{grid('field', head, lines)}" for algorithm, lines in cells.items()]
    every = dict.fromkeys(f"{row['algorithm']}.{row['field']}" for row in summaries)
    active = {f"{row['algorithm']}.{row['field']}" for row in summaries if changes(row)}
    unread = [f"{row['algorithm']}.{row['field']}" for row in summaries if not row["programs"]]
    idle = [name for name in every if name not in active and name not in unread]
    last = [
        f"with the defaults, 90% of planning times are within {noise(rows):.1%} of the median of their program",
        f"changed nothing ({len(idle)}): {', '.join(idle) or 'none'}",
        f"not read by any program ({len(unread)}): {', '.join(unread) or 'none'}",
    ]
    return "\n".join([*tables, "", *last])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row["field"],
        _short(row["default"]),
        _short(row["value"]),
        str(row["programs"]),
        f"{row['step_worst']:+.2%}",
        f"{row['step_median']:+.2%}",
        f"{row['time_median']:.2f}",
        f"{row['time_least']:.2f}",
        f"{row['time_most']:.2f}",
        f"{row['gap_worst']:+.2%}",
        str(row["late"] or ""),
    )


def _short(value: Any) -> str:
    if isinstance(value, tuple | list):
        return " ".join(f"{x:g}" for x in value)
    return f"{value:g}" if isinstance(value, float) else f"{value:,}"
