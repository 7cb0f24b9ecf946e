"""`autopar bench predictions`: its table, its figures, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.bench.predictions import run as predictions
from autopar.cost_models.compiler.backends import backend_of
from autopar.errors import ArgumentError


def row(predicted: int, compiled: int, plan: str = "free") -> dict[str, Any]:
    return {
        "model": "mlp-toy", "sizes": {"layers": 4}, "mesh": [2, 4], "plan": plan, "target": "cpu",
        "predicted": predicted << 20, "compiled": compiled << 20, "error": predicted / compiled - 1,
        "predicted_arguments": 8 << 20, "compiled_arguments": 8 << 20,
    }  # fmt: skip


ROWS = [row(110, 100), row(95, 100, "tight"), row(80, 100, "layouts"), row(100, 80)]

TABLE = """\
model              sizes                                  mesh plan         MiB compiled   error   arguments
mlp-toy            layers=4                               2x4  free         110      100  +10.0%   8/8
mlp-toy            layers=4                               2x4  tight         95      100   -5.0%   8/8
mlp-toy            layers=4                               2x4  layouts       80      100  -20.0%   8/8
mlp-toy            layers=4                               2x4  free         100       80  +25.0%   8/8
median error 10.0%, worst 25.0%, lowest -5.0% (3 plans by default)
median error 15.0%, worst 25.0%, lowest -20.0% (all 4)"""


def test_the_table_ends_with_the_errors_of_all() -> None:
    assert predictions.table(ROWS) == TABLE


def test_unknown_targets_and_models_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"target='gpu' is not known. Available: cpu, tpu"):
        predictions.run("gpu")
    with pytest.raises(ArgumentError, match=r"'gpt-39b' has no sizes for cpu. Available: mlp-toy"):
        predictions.run("cpu", ["gpt-39b"])


def test_every_target_names_models_with_sizes_they_take() -> None:
    for cases in predictions.CASES.values():
        for model, (mesh, sizes) in cases.items():
            assert predictions.build(model, sizes).name.startswith(model.partition(":")[0])
            assert len(mesh) in (1, 2)


def test_the_tight_budget_lies_between_the_least_and_the_free_peak() -> None:
    subject = predictions.subject("mlp-1b", {"layers": 1, "batch": 64}, (8,), "cpu")
    plans = dict(subject.plans())
    small, large = (p.plan.stages[0].peak_memory_bytes for p in (subject.plan("min"), plans["free"]))
    budget = predictions.between(small, large)
    assert small < budget < large
    assert plans["tight"].plan.stages[0].peak_memory_bytes <= budget


def test_the_least_peak_fits_where_there_is_nothing_to_save() -> None:
    assert predictions.between(100.0, 90.0) > 100.0
    assert 100.0 < predictions.between(100.0, 200.0) < 200.0


@pytest.mark.parametrize("platform", predictions.CLUSTERS)
def test_plans_are_made_for_the_compiler_of_the_target(platform: str) -> None:
    subject = predictions.subject("mlp-toy", {}, (8,), platform)
    assert backend_of(subject.mesh.device).name == platform


def test_recomputation_is_a_row_where_it_saves_memory() -> None:
    subject = predictions.subject("equinox-toy", {"layers": 2, "batch": 8192}, (8,), "cpu")
    plans = dict(subject.plans())
    assert [kind for kind in predictions.PLANS if kind in plans] == list(plans)
    recomputed = {kind: any(policy != "none" for policy in p.plan.remat) for kind, p in plans.items()}
    assert recomputed["recomputed"]
    assert not recomputed["free"]
    assert not recomputed.get(predictions.BY_ORDER, False)
    assert recomputed["tight"] == (predictions.BY_ORDER in plans)
    peak = {kind: p.plan.stages[0].peak_memory_bytes for kind, p in plans.items()}
    assert peak["recomputed"] < peak["tight"] < peak["free"]
