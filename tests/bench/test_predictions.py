"""`autopar bench predictions`: its table, its figures, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from autopar import zoo
from autopar.bench import predictions
from autopar.cluster import Cluster
from autopar.errors import ArgumentError
from autopar.planning import Options, make_plan
from autopar.trace import trace


def row(predicted: int, compiled: int, plan: str = "free") -> dict[str, Any]:
    return {
        "model": "mlp-toy", "sizes": {"layers": 4}, "mesh": [2, 4], "plan": plan, "target": "cpu",
        "predicted": predicted << 20, "compiled": compiled << 20, "error": predicted / compiled - 1,
        "predicted_arguments": 8 << 20, "compiled_arguments": 8 << 20,
    }  # fmt: skip


ROWS = [row(110, 100), row(95, 100, "tight"), row(100, 80)]

TABLE = """\
model              sizes                                  mesh plan         MiB compiled   error   arguments
mlp-toy            layers=4                               2x4  free         110      100  +10.0%   8/8
mlp-toy            layers=4                               2x4  tight         95      100   -5.0%   8/8
mlp-toy            layers=4                               2x4  free         100       80  +25.0%   8/8
median error 10.0%, worst 25.0%, lowest -5.0%"""


def test_the_table_ends_with_the_errors_of_all() -> None:
    assert predictions.table(ROWS) == TABLE


def test_unknown_targets_and_models_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"target='gpu' is not known. Available: cpu, tpu"):
        predictions.run("gpu")
    with pytest.raises(ArgumentError, match=r"'gpt-39b' has no sizes for cpu. Available: mlp-toy"):
        predictions.run("cpu", ["gpt-39b"])


def test_every_target_names_models_of_the_zoo_with_sizes_they_take() -> None:
    for cases in predictions.CASES.values():
        for model, (mesh, sizes) in cases.items():
            assert zoo.build(model, **sizes).name.startswith(model)
            assert len(mesh) in (1, 2)


def test_the_tight_budget_lies_between_the_least_and_the_free_peak() -> None:
    model = zoo.build("mlp-1b", layers=1, batch=64)
    traced = trace(model.step, *model.abstract_args())
    mesh = Cluster.preset("dgx-h100").logical_mesh((8,))
    free, least = (make_plan(traced, mesh, "dgx-h100", Options(memory_budget=b)) for b in (None, "min"))
    small, large = (p.plan.stages[0].peak_memory_bytes for p in (least, free))
    budget = predictions._tight_budget(free, traced, mesh)
    assert small < budget < large
    tight = make_plan(traced, mesh, "dgx-h100", Options(memory_budget=budget)).plan
    assert tight.stages[0].peak_memory_bytes <= budget
