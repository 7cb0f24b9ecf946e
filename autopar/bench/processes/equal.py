"""`autopar bench processes`: are steps in several processes the single-device steps? Models, plans, and processes.

Every case runs three steps over eight virtual CPU devices, divided among the processes, and compares the gathered state
and the losses with three steps on one device, by the criteria of `autopar.bench.equal`. The plans:

    data, tensor     one mesh, (8,) and (2, 4): each of its collectives spans the processes
    stages           two or four stages under a schedule, with data or tensor parallelism inside. With 2 processes and 4
                     stages a process owns two stages, with 4 processes and 2 stages a stage spans two processes

One launch (`autopar.cli.launch`) of a number of processes runs all cases of a model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from autopar.bench import rows as rows_kept
from autopar.bench import worker
from autopar.bench.equal import case as equal_case
from autopar.bench.equal import pipeline_case
from autopar.bench.equal.run import quick_flags

DEVICES = 8
MODELS = ("gpt-toy", "gpt-toy-scan", "moe-toy", "unet-toy")
PROCESSES = (2, 4)
ONE_MESH = {"data": (DEVICES,), "tensor": (2, 4)}
#: (schedule, number of stages, what the devices of a stage divide)
PIPELINES = (
    ("1f1b", 2, "data"),
    ("zb-h1", 2, "tensor"),
    ("interleaved-1f1b", 2, "data"),
    ("1f1b", 4, "tensor"),
    ("zb-h1", 4, "data"),
)

Row = Mapping[str, Any]
Key = tuple[str, int, str]


@dataclass(frozen=True)
class Product:
    """What to run: every model with every plan in so many processes."""

    models: tuple[str, ...] = MODELS
    processes: tuple[int, ...] = PROCESSES
    plans: tuple[str, ...] = (*ONE_MESH, *(f"{schedule} {stages} {inner}" for schedule, stages, inner in PIPELINES))

    def cases(self) -> list[Key]:
        """Every case, models outermost."""
        return [(model, n, plan) for model in self.models for n in self.processes for plan in self.plans]


def run(product: Product, resume: Path | None = None, tell: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Rows of all cases in the order of `Product.cases`; `tell` hears of each as it is done."""
    rows: dict[Key, Row] = {_key(row): row for row in rows_kept.read(resume)}
    for model in product.models:
        for processes in product.processes:
            todo = [plan for m, n, plan in product.cases() if (m, n) == (model, processes) and (m, n, plan) not in rows]
            for row in _launched(model, processes, todo) if todo else ():
                rows[_key(row)] = row
                tell(line(row))
                rows_kept.keep(resume, row)
    return [rows[key] for key in product.cases()]


def _key(row: Row) -> Key:
    return row["model"], row["processes"], row["plan"]


def _launched(model: str, processes: int, plans: Sequence[str]) -> Iterator[Row]:
    """Rows of one launch; a failed row for each plan that is missing when it ends."""
    quick = {"XLA_FLAGS": quick_flags(), "AUTOPAR_CACHE_DIR": ""}
    left, why = list(plans), "the launch ended without it"
    try:
        spec = {"model": model, "plans": list(plans)}
        for row in worker.launched(processes, DEVICES // processes, __file__, spec, quick):
            left.remove(row["plan"])
            yield row
    except worker.WorkerError as error:
        why = str(error)
    for plan in left:
        yield {"model": model, "processes": processes, "plan": plan, "ok": False, "failures": [why[-300:]]}


def line(row: Row) -> str:
    """One row for people."""
    where = f"{row['model']}, {row['processes']} processes, {row['plan']}"
    if row["ok"]:
        return f"ok {where}: loss within {row['loss']:.1e}, state within {row['leaf']:.1e}"
    return f"FAIL {where}: {'; '.join(row['failures'])}"


def table(rows: Sequence[Row]) -> str:
    """Failures, and the largest differences per number of processes."""
    texts = [line(row) for row in rows if not row["ok"]]
    for n in dict.fromkeys(row["processes"] for row in rows):
        good = [row for row in rows if row["processes"] == n and row["ok"]]
        every = sum(row["processes"] == n for row in rows)
        worst = max((row["leaf"] for row in good), default=0.0)
        texts.append(f"{n} processes: {len(good)} of {every} equal the single device, state within {worst:.1e}")
    return "\n".join(texts)


# In a process of a launch


def case(baseline: equal_case.Single, plan: str) -> Row:
    """One plan of one model, in all processes."""
    options: Mapping[str, Any]
    if plan in ONE_MESH:
        options = {"mesh": ONE_MESH[plan], "cluster": equal_case.dear(ONE_MESH[plan])}
    else:
        schedule, stages, inner = plan.split()
        options = pipeline_case.options(baseline.inputs.model, schedule, int(stages), inner)
    ours = equal_case.parallel(baseline.inputs, replans=False, **options)
    numbers, wrong = equal_case.compared(baseline, ours.run, "float64", DEVICES)
    failures = (*wrong, *ours.habits)
    return {**asdict(numbers), "ok": not failures, "failures": failures}


def work(spec: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of the plans of a model, in process 0."""
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")
    baseline = equal_case.single(spec["model"], "float64", pipeline_case.BATCH)
    for plan in spec["plans"]:
        try:
            row = case(baseline, plan)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            row = {"ok": False, "failures": (text[:300],)}
        if jax.process_index() == 0:
            yield {"model": spec["model"], "processes": jax.process_count(), "plan": plan, **row}


if __name__ == "__main__":
    worker.serve(work)
