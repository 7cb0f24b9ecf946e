"""`autopar bench equal --pipeline`: is the step in stages the single-device step? Every zoo toy under every schedule.

One worker per model and dtype goes through the schedules (`pipeline_case`). A row is appended to the resume file
as soon as it is known; rows found there are not run again. XLA optimises as little as in `equal`.

A model whose examples depend on each other runs in one microbatch: its row says why, and counts as a refusal. That is
right for `pipeline_case.COUPLED` alone, and these must be refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar import zoo
from autopar.bench import rows as rows_kept
from autopar.bench import worker
from autopar.bench.equal.run import DTYPES, quick_flags

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "zb-h1")
STAGES = (2, 4)
#: What the devices of a stage divide among them: the batch, or parameters by the model's table for tensor parallelism.
INNER = ("data", "tensor")

Row = Mapping[str, Any]
Key = tuple[str, str, int, str, str]


@dataclass(frozen=True)
class Product:
    """What to run: every model under every schedule, in so many stages, in every dtype."""

    models: tuple[str, ...] = zoo.TOYS
    schedules: tuple[str, ...] = SCHEDULES
    stages: tuple[int, ...] = STAGES
    inner: tuple[str, ...] = INNER
    dtypes: tuple[str, ...] = DTYPES

    def __post_init__(self) -> None:
        rows_kept.check_words("dtype", self.dtypes, DTYPES)
        rows_kept.check_words("schedule", self.schedules, SCHEDULES)
        rows_kept.check_words("inner", self.inner, INNER)

    def keys(self) -> list[Key]:
        """Every case, models outermost."""
        return [
            (m, schedule, p, inner, d)
            for m in self.models
            for d in self.dtypes
            for p in self.stages
            for schedule in self.schedules
            for inner in self.inner
        ]


def run(product: Product, resume: Path | None = None, tell: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Rows of all cases in the order of `Product.keys`; `tell` hears of each as it is done."""
    rows = _done(resume)
    wanted = product.keys()
    for model in product.models:
        for dtype in product.dtypes:
            todo = [k for k in wanted if (k[0], k[4]) == (model, dtype) and k not in rows]
            for row in _rows(model, dtype, todo):
                rows[_key(row)] = row
                tell(line(row))
                rows_kept.keep(resume, row)
    return [rows[k] for k in wanted]


def _key(row: Row) -> Key:
    return row["model"], row["schedule"], row["stages"], row["inner"], row["dtype"]


def _done(resume: Path | None) -> dict[Key, Row]:
    return {_key(row): row for row in rows_kept.read(resume) if "share" in row}


def _rows(model: str, dtype: str, keys: Sequence[Key]) -> Iterator[Row]:
    """Rows of one worker; where it dies, a failed row for each case that is missing."""
    if not keys:
        return
    cases = [{"schedule": k[1], "stages": k[2], "inner": k[3]} for k in keys]
    spec = {"model": model, "dtype": dtype, "cases": cases}
    left = list(keys)
    try:
        for row in worker.lines("autopar.bench.equal.pipeline_case", spec, {"XLA_FLAGS": quick_flags()}):
            left.remove(_key(row))
            yield row
    except worker.WorkerError as error:
        from autopar.bench.equal.pipeline_case import Row as Case

        for _, schedule, stages, inner, _ in left:
            yield asdict(Case(model, schedule, stages, inner, dtype, ok=False, failures=(str(error),)))


def line(row: Row) -> str:
    """One row for people."""
    numbers = (
        f"m={row['microbatches']} share {row['share']:.1%} loss {row['loss']:.1e} leaf {row['leaf']:.1e} "
        f"{rows_kept.beside_the_expert(row)}"
    )
    case = f"{row['model']:<20} {row['schedule']:<16} p={row['stages']} {row['inner']:<6} {row['dtype']}"
    head = f"{'ok  ' if row['ok'] else 'FAIL'} {case} {numbers}"
    refused = [f"       refused: {row['refusal']}"] if row["refusal"] else []
    return "\n".join([head, *refused, *(f"       {text}" for text in row["failures"])])


def table(rows: Sequence[Row]) -> str:
    """A line for each case, then the figures."""
    counts = figures(rows)
    return "\n".join(
        [
            *map(line, rows),
            f"{counts['ok'] - counts['not_run']} of {counts['rows']} cases equal the single-device run, "
            f"{counts['not_run']} refused; "
            f"least share of FLOPs in the loop {counts['share_min']:.2%}, largest difference of a leaf in float64 "
            f"{counts['leaf_float64']:.1e}, of a loss in float32 {counts['loss_float32']:.1e}; "
            f"several microbatches or the schedule refused: {', '.join(counts['refused']) or 'none'}",
        ]
    )


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """The largest differences of all rows, and the counts: what `--json` prints last."""
    split = [r for r in rows if not r["refusal"]]
    return {
        **rows_kept.differences(rows),
        "share_min": min((r["share"] for r in split), default=1.0),
        "not_run": sum(bool(r["refusal"]) and not r["microbatches"] for r in rows),
        "refused": list(dict.fromkeys(r["model"] for r in rows if r["refusal"])),
    }
