"""Pictures of plans: which boxes they have, of how many shards, and that they are written."""

from __future__ import annotations

from pathlib import Path

import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import ArgumentError
from autopar.plans.plan import Plan
from autopar.plans.views.picture import Tensor, tensors, times
from autopar.zoo import build

PINS = {"*/w1": P(None, "y"), "*/b1": P(("x", "y")), "batch/x": P("x")}


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = build("mlp-toy")
    return autopar.plan(model.step, *model.abstract_args(), mesh=(2, 4), pins=PINS, progress=False)


@pytest.fixture(scope="module")
def stages() -> Plan:
    model = build("mlp-toy")
    args = model.abstract_args()
    return autopar.plan(model.step, *args, mesh=(2, 2), stages=2, num_microbatches=2, schedule="1f1b", progress=False)


def box(plan: Plan, end: str) -> Tensor:
    (tensor,) = (tensor for tensor in tensors(plan) if tensor.name.partition(" ")[0].endswith(end))
    return tensor


def test_cells_of_a_box_are_the_shards_of_its_tensor(plan: Plan) -> None:
    matrix, bias, batch = (box(plan, end) for end in ("w1", "b1", "batch/x"))
    assert (matrix.cells, matrix.shards, matrix.copies) == ((1, 4), 4, 2)
    assert (bias.cells, bias.shards, bias.copies) == ((1, 8), 8, 1)
    assert (batch.cells, batch.shards, batch.copies) == ((2, 1), 2, 4)


def test_equal_layers_are_one_box_and_the_largest_comes_first(plan: Plan) -> None:
    drawn_tensors = tensors(plan)
    assert box(plan, "w1").name == "state/params/blocks/*/w1 x2"
    assert box(plan, "w1").elements == 2 * 32 * 64
    assert [t.elements for t in drawn_tensors] == sorted((t.elements for t in drawn_tensors), reverse=True)
    assert not [t.name for t in drawn_tensors if "/opt/" in t.name]


def test_times_are_those_of_the_plan(plan: Plan, stages: Plan) -> None:
    assert sum(times(plan)["all"].values()) == pytest.approx(plan.step_time_s)
    assert list(times(stages)) == ["stage 0", "stage 1"]
    assert times(stages)["stage 1"]["B"] == pytest.approx(2 * stages.stages[1].seconds["B"])


@pytest.mark.parametrize("of", ["plan", "stages"])
def test_the_picture_is_written(of: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    drawn: Plan = request.getfixturevalue(of)
    drawn.picture(tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    assert "</svg>" in text
    assert "blocks/" in text
    with pytest.raises(ArgumentError, match="cannot be written"):
        drawn.picture(tmp_path / "plan.abacus")
