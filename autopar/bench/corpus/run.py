"""`autopar bench corpus`: train steps as other people write them, checked one by one.

Each program (`program`) has two workers, one for its small size and one for its large size; `case` says
what they check. A finding is appended to the resume file as soon as it is known; those found there are not looked for
again. Where a worker dies or is silent for too long, the check that it was at fails, and another worker goes on with
the next one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.bench import rows as rows_kept
from autopar.bench import worker
from autopar.bench.corpus import program as corpus_program
from autopar.bench.corpus.program import Program
from autopar.bench.equal.run import quick_flags
from autopar.ir.keyed import grouped

DEVICES = 8
PATIENCE = 300.0  # seconds without a finding after which a worker is ended
OK, REFUSED, FAILED, ABSENT = "ok", "refused", "failed", "absent"
#: Checks in the order in which they are made; see `case`.
SMALL = ("mesh 8", "cpu 8", "shardy 8", "mesh 2x4", "cpu 2x4", "shardy 2x4", "microbatches", "stages")
LARGE = ("memory", "cpu large", "flops", "times")

Row = Mapping[str, Any]


def run(
    names: Sequence[str] = (),
    table: str = corpus_program.TABLE,
    checks: Sequence[str] = (*SMALL, *LARGE),
    resume: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Findings of all programs, or of some; `tell` hears of each as it is known."""
    rows_kept.check_words("check", checks, (*SMALL, *LARGE))
    programs = corpus_program.chosen(corpus_program.corpus(table), names)
    rows_by_check: dict[tuple[str, str], Row] = {(row["program"], row["check"]): row for row in rows_kept.read(resume)}
    for program in programs:
        todo = [check for check in checks if (program.name, check) not in rows_by_check]
        for row in _findings(program, table, todo):
            rows_by_check[row["program"], row["check"]] = row
            tell(line(row))
            rows_kept.keep(resume, row)
    return [rows_by_check[program.name, check] for program in programs for check in checks]


def _findings(program: Program, table: str, checks: Sequence[str]) -> Iterator[Row]:
    """Every check of a program that is still to be made."""
    if missing := program.missing():
        for check in checks:
            yield _row(program, check, ABSENT, f"not installed: {', '.join(missing)}")
        return
    for large in (False, True):
        left = [check for check in (LARGE if large else SMALL) if check in checks]
        while left:
            for row in _worked(program, table, large, left):
                left.remove(row["check"])
                yield {**row, "versions": program.versions()}


def _worked(program: Program, table: str, large: bool, checks: Sequence[str]) -> Iterator[Row]:
    """Findings of one worker; where it dies, the check that it was at fails."""
    spec = {"program": program.name, "table": table, "large": large, "checks": list(checks)}
    # what is compiled for the figures of the large size is compiled as it runs, and anew
    env = {"AUTOPAR_TEST_JAX_CACHE": ""} if large else {"XLA_FLAGS": quick_flags()}
    left = list(checks)
    try:
        for row in worker.lines("autopar.bench.corpus.case", spec, env, PATIENCE):
            left.remove(row["check"])
            yield row
    except worker.WorkerError as error:
        if left:  # with all findings there, it died while it ended
            yield _row(program, left[0], FAILED, str(error))


def _row(program: Program, check: str, state: str, text: str) -> Row:
    row = {"program": program.name, "check": check, "state": state, "value": math.inf, "text": text, "seconds": 0.0}
    return {**row, "figures": {}, "versions": program.versions()}


def line(row: Row) -> str:
    """One finding for people."""
    head = f"{row['state']:<7} {row['program']:<24} {row['check']:<13} {_number(row):<10} {row['seconds']:5.1f} s"
    return f"{head}  {row['text']}".rstrip()


def _number(row: Row) -> str:
    if row["state"] == ABSENT or not math.isfinite(row["value"]):
        return ""
    plain = row["check"].startswith(("mesh", "microbatches", "stages"))
    return f"{row['value']:.1e}" if plain else f"{100 * row['value']:+.1f}%"


#: Worst first.
_ORDER = (FAILED, REFUSED, ABSENT, OK)


def table(rows: Sequence[Row]) -> str:
    """Findings that are not as they should be, a line for each program, worst first, then the figures."""
    by_program = grouped((row["program"], row) for row in rows)
    names = sorted(by_program, key=lambda name: (-_count(by_program[name], FAILED), -_count(by_program[name], REFUSED)))
    wrong = sorted((row for row in rows if row["state"] in (FAILED, REFUSED)), key=lambda r: _ORDER.index(r["state"]))
    summaries = [_summary(name, by_program[name]) for name in names]
    return "\n".join([*map(line, wrong), "", *summaries, "", *packages(rows), "", *_totals(rows)])


def _totals(rows: Sequence[Row]) -> Iterator[str]:
    totals = figures(rows)
    yield (
        f"{totals['programs']} programs, {totals['whole']} without a failure; of {len(rows)} checks "
        f"{totals['failed']} failed, {totals['refused']} were refused, {totals['absent']} lacked their packages"
    )
    yield (
        f"memory: median {100 * totals['memory_median']:.1f}%, worst {100 * totals['memory_worst']:.1f}%, lowest "
        f"{100 * totals['memory_lowest']:+.1f}%"
    )


def packages(rows: Sequence[Row]) -> list[str]:
    """A line for each package: its version, its programs, and what of them is refused or fails."""
    by_package = grouped((f"{name} {version}", row) for row in rows for name, version in row["versions"].items())
    return [f"{package:<28} {_of_package(rows_of_package)}" for package, rows_of_package in sorted(by_package.items())]


def _of_package(rows: Sequence[Row]) -> str:
    count = len(dict.fromkeys(row["program"] for row in rows))
    parts = [f"{count} program{'s' if count > 1 else ''}"]
    for state in (REFUSED, FAILED):
        by_check = grouped((row["check"], row) for row in rows if row["state"] == state)
        parts += [
            f"{state}: {check} of {', '.join(r['program'] for r in rows_of_check)}"
            for check, rows_of_check in by_check.items()
        ]
    return "; ".join(parts)


def _count(rows: Sequence[Row], state: str) -> int:
    return sum(row["state"] == state for row in rows)


def _summary(name: str, rows: Sequence[Row]) -> str:
    """A program in one line: its checks by state, and the figures of its large size."""
    by_check = {row["check"]: row for row in rows}
    differences = [r["value"] for c, r in by_check.items() if c.startswith("mesh") and math.isfinite(r["value"])]
    states = "  ".join(f"{check} {row['state']}" for check, row in by_check.items() if row["state"] != OK)
    parts = [f"{name:<24}", f"worst leaf {max(differences):.1e}" if differences else ""]
    if (memory := by_check.get("memory")) and memory["figures"]:
        parts.append(f"memory {memory['figures']['compiled'] / 2**20:.0f} MiB {100 * memory['value']:+.1f}%")
    if (taken := by_check.get("times")) and taken["figures"]:
        parts.append(f"planned in {taken['figures']['plan_s']:.1f} s, jit {taken['figures']['compile_s']:.1f} s")
    return "  ".join([*filter(None, parts), states or "all ok"])


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts, and the errors of the predicted memory: what `--json` prints last."""
    errors = [row["value"] for row in rows if row["check"] == "memory" and row["figures"]]
    failed = {row["program"] for row in rows if row["state"] == FAILED}
    programs = dict.fromkeys(row["program"] for row in rows)
    return {
        "programs": len(programs),
        "whole": sum(name not in failed for name in programs),
        "failed": _count(rows, FAILED),
        "refused": _count(rows, REFUSED),
        "absent": _count(rows, ABSENT),
        "memory_median": statistics.median(map(abs, errors)) if errors else 0.0,
        "memory_worst": max(map(abs, errors), default=0.0),
        "memory_lowest": min(errors, default=0.0),
    }
