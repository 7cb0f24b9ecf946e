"""The rows of a plan's tensors: the same for a report and for pandas."""

from __future__ import annotations

import sys

import jax
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import zoo
from autopar.bench.equal.case import dear
from autopar.errors import ArgumentError
from autopar.plans.plan import Plan
from autopar.plans.views.report import tables
from autopar.plans.views.tensors import tensors


def planned(**options: object) -> Plan:
    model = zoo.build("mlp-toy")
    return autopar.plan(
        *(model.step, *model.abstract_args()),
        mesh=(2, 4),
        cluster=dear((2, 4)),
        remat="none",
        progress=False,
        **options,  # pyright: ignore[reportArgumentType]
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(pins={"params": P(None, "y"), "params/*/b*": P(), "opt": P(), "batch": P("x")})


def test_a_leaf_has_its_layout_and_bytes(plan: Plan) -> None:
    rows = {row.name: row for row in tensors(plan)}
    weight = rows["state/params/blocks/0/w1"]
    assert (weight.role, weight.dtype, weight.shape) == ("parameters and other state", "float32", (32, 64))
    assert (weight.spec, weight.nbytes, weight.bytes_per_device) == ("P(None, 'y')", 8192, 2048)
    assert (rows["batch/x"].role, rows["batch/x"].bytes_per_device) == ("other arguments", 8 * 32 * 4 // 2)
    assert len([row for row in rows.values() if row.role == "optimizer state"]) == 17  # two moments of 8, a counter


def test_the_dataframe_has_a_row_for_each_leaf(plan: Plan) -> None:
    pytest.importorskip("pandas", reason="the extra `report` is not installed")
    frame = plan.to_dataframe()
    assert list(frame["name"]) == [row.name for row in tensors(plan)]
    assert len(frame) == len(plan.input_paths) + len(plan.output_paths)
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(zoo.build("mlp-toy").abstract_args())]
    assert sum(n for n in frame["nbytes"] if n == n) == sum(sizes)  # results have none
    assert set(frame.query("role == 'result'")["dtype"]) == {""}


def test_a_report_has_the_same_rows(plan: Plan) -> None:
    cells = tables.tensors(plan).rows
    rows = list(tensors(plan))
    assert [row[0].text for row in cells] == [row.name for row in rows]
    assert [row[5].number or 0 for row in cells] == [row.bytes_per_device or 0 for row in rows]


def test_leaves_of_a_pipeline_have_the_stage_that_stores_them() -> None:
    staged = planned(stages=2, num_microbatches=2)
    stages = {row.name: row.stage for row in tensors(staged) if row.role != "result"}
    for number, stage in enumerate(staged.stages):
        assert {stages[staged.input_paths[i]] for i in stage.arguments} == {f"stage {number}"}
    assert stages["batch/x"] == ""


def test_without_pandas_it_says_what_to_install(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ArgumentError, match=r'needs pandas: pip install "autopar\[report\]"'):
        plan.to_dataframe()
