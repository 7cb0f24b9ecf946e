"""bench equal --pipeline: a pairwise cover of the product, each case as a worker runs it, and one in a worker."""

from __future__ import annotations

import itertools
import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import pytest

from autopar import zoo
from autopar.bench import worker
from autopar.bench.equal import case as equal_case
from autopar.bench.equal import pipeline as equal_pipeline
from autopar.bench.equal import pipeline_case
from autopar.bench.equal.pipeline_case import Row
from autopar.errors import ArgumentError
from tests.support.effort import sample

#: One model of every kind; all of them are the benchmark's.
MODELS = ("equinox-toy", "gpt-toy-tied", "gpt-toy-scan", "moe-toy", "gpt-toy", "flax-linen-toy", "unet-toy", "vit-toy")
PAIRS = tuple(itertools.product(equal_pipeline.SCHEDULES, equal_pipeline.STAGES))
PAIRWISE = tuple(
    (model, *PAIRS[(3 * i) % len(PAIRS)], equal_pipeline.INNER[i // 2 % 2], "float64" if i % 3 == 1 else "float32")
    for i, model in zip(range(len(PAIRS)), itertools.cycle(MODELS), strict=False)
)
CASES = sample(PAIRWISE, [*PAIRWISE[:4], PAIRWISE[5]])


def test_the_cover_has_every_kind_of_model_schedule_number_of_stages_and_dtype() -> None:
    _, schedules, stages, inner, dtypes = ({*column} for column in zip(*CASES, strict=True))
    assert {model for model, *_ in PAIRWISE} == {*MODELS} <= {*zoo.TOYS}
    assert (schedules, stages) == ({*equal_pipeline.SCHEDULES}, {*equal_pipeline.STAGES})
    assert (inner, dtypes) == ({*equal_pipeline.INNER}, {"float32", "float64"})
    assert {case[1:3] for case in PAIRWISE} == {*PAIRS}


@pytest.mark.parametrize(("model", "schedule", "stages", "inner", "dtype"), CASES, ids=lambda x: str(x))
def test_steps_in_stages_equal_single_device_steps(
    model: str, schedule: str, stages: int, inner: str, dtype: str
) -> None:
    with jax.enable_x64(dtype == "float64"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        baseline = equal_case.single(model, dtype, pipeline_case.BATCH)
        row = pipeline_case.case(baseline, schedule, stages, inner, dtype)
    assert row.ok, row.failures


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_gives_a_row() -> None:
    (row,) = equal_pipeline.run(equal_pipeline.Product(("mlp-toy",), ("gpipe",), (2,), ("data",), ("float64",)))
    assert row["ok"], equal_pipeline.line(row)


# Rows


def row(schedule: str = "1f1b", stages: int = 2, **more: Any) -> dict[str, Any]:
    return asdict(Row("mlp-toy", schedule, stages, "data", "float32", **{"ok": True, "share": 1.0, **more}))


def test_rows_are_resumed_and_a_dead_worker_leaves_failed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row()) + "\n")

    def lines(module: str, spec: Any, env: Any) -> Any:
        assert [case["schedule"] for case in spec["cases"]] == ["gpipe", "zb-h1"]
        yield row("gpipe")
        raise worker.WorkerError("out of luck")

    monkeypatch.setattr(worker, "lines", lines)
    product = equal_pipeline.Product(("mlp-toy",), ("gpipe", "1f1b", "zb-h1"), (2,), ("data",), ("float32",))
    rows = equal_pipeline.run(product, path)
    assert [(r["schedule"], r["ok"]) for r in rows] == [("gpipe", True), ("1f1b", True), ("zb-h1", False)]
    assert len(path.read_text().splitlines()) == 3
    assert "out of luck" in equal_pipeline.table(rows)


def test_figures_leave_refusals_out_of_the_share() -> None:
    rows = [row(share=0.995), row("gpipe", share=0.2, refusal="one microbatch"), row("zb-h1", ok=False)]
    figures = equal_pipeline.figures(rows)
    assert (figures["ok"], figures["rows"], figures["share_min"], figures["refused"]) == (2, 3, 0.995, ["mlp-toy"])


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"schedule 'inference' is not known\. Available: gpipe, 1f1b"):
        equal_pipeline.Product(schedules=("inference",))
