"""Published steps with fused attention: models and plans are entered as published, and pairs are compared in order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from autopar.bench.references import fused
from autopar.errors import ArgumentError
from autopar.plans.plan import Plan


def row_of(name: str) -> fused.Published:
    return next(row for row in fused.ROWS if row.name == name)


@pytest.mark.parametrize("row", fused.ROWS, ids=lambda row: row.name)
def test_models_have_the_parameters_of_their_names(row: fused.Published) -> None:
    name = row.name.split()[0].partition("-")[2]
    billions = 71.85 if name == "405b-21l" else float(name.removesuffix("b"))  # 21 of 126 layers
    assert fused.model_of(row).parameters() / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("row", fused.ROWS, ids=lambda row: row.name)
def test_the_batch_divides_over_microbatches_and_devices(row: fused.Published) -> None:
    replicas = [n for axis, n in row.axes.items() if axis in ("data", "fsdp")]
    for parts in (row.microbatches, *replicas):
        assert row.config.batch % parts == 0


@pytest.mark.parametrize("row", fused.ROWS, ids=lambda row: row.name)
def test_a_microbatch_of_a_pipeline_divides_over_its_replicas(row: fused.Published) -> None:
    if row.stages > 1:
        assert row.axes["pipe"] == row.stages
        assert row.config.batch == row.microbatches * row.axes["data"]
        assert row.microbatches % row.stages == 0  # as interleaved-1f1b wants


def small(name: str, **sizes: Any) -> Plan:
    """The plan of a row at the size of a toy."""
    row = row_of(name)
    axes = dict(zip(row.axes, (2, 4), strict=True))
    microbatches = min(row.microbatches, 2)
    return fused.planned(replace(row, config=replace(row.config, **sizes), axes=axes, microbatches=microbatches))


def specs_of(plan: Plan) -> dict[str, P]:
    leaves = jax.tree.leaves(plan.in_specs(), is_leaf=lambda leaf: isinstance(leaf, P))
    return dict(zip(plan.input_paths, leaves, strict=True))


def test_the_plan_of_nemo_has_whole_parameters_and_cuts_examples_positions_and_state() -> None:
    plan = small("llama3.1-8b 1x8", layers=2, width=256, heads=8, kv_heads=8, hidden=512, vocab=256, seq=64, batch=8)
    specs = specs_of(plan)
    assert specs["batch/tokens"] == P("data", "context")
    params = {path: spec for path, spec in specs.items() if path.startswith("state/params/")}
    assert params
    assert all(not any(spec) for spec in params.values())
    state = [spec for path, spec in specs.items() if any(part in path for part in ("/mu/", "/nu/", "/master/"))]
    assert state
    assert all(any(spec) for spec in state)


def test_the_plan_of_maxtext_cuts_parameters_over_both_axes() -> None:
    sizes = {"layers": 2, "width": 256, "heads": 8, "kv_heads": 8, "hidden": 512, "vocab": 256, "seq": 128, "batch": 8}
    plan = small("maxtext-32b 1x64", **sizes, head_dim=32)
    specs = specs_of(plan)
    assert specs["batch/tokens"] == P("fsdp")
    assert specs["state/params/blocks/w1"] == P(None, "fsdp", "tensor")
    assert specs["state/params/blocks/w2"] == P(None, "tensor", "fsdp")
    assert specs["state/params/blocks/wq"] == P(None, "fsdp", "tensor")


def test_the_plan_of_maxtext_scatters_what_blocks_add_and_gathers_no_hidden_layer() -> None:
    """Megatron's collectives along the width: in each layer 4 sums are scattered and 6 activations gathered."""
    row = row_of("maxtext-128b 1x128")
    config = replace(row.config, layers=8)
    activation = config.batch // row.axes["fsdp"] * config.seq * config.width * 2  # bytes, whole along the width
    plan = fused.planned(replace(row, config=config))
    large = [c for c in plan.collectives if c.axes == ("tensor",) and c.count == config.layers and c.bytes > 2**20]
    assert {c.bytes for c in large} == {activation}
    assert sum(c.kind == "reduce-scatter" for c in large) == 4
    assert sum(c.kind == "all-gather" for c in large) == 6


def measured(name: str, cluster: str, measured_s: float, predicted_s: float) -> fused.Row:
    return {
        "name": name,
        "cluster": cluster,
        "attention": "cudnn",
        "measured_s": measured_s,
        "predicted_s": predicted_s,
        "ratio": predicted_s / measured_s,
        "once_ratio": None,
        "mfu": 0.5,
        "kinds": {},
        "peak_bytes": 1,
        "differs": ("dropout",),
        "missing": ("overlap",),
    }


ORDERED = (
    *(measured("a", "first", 1.0, 1.0), measured("b", "first", 1.001, 0.9)),  # of these two none is faster
    *(measured("c", "first", 2.0, 3.0), measured("d", "first", 3.0, 2.0), measured("e", "second", 9.0, 0.1)),
)


def test_pairs_without_an_order_are_left_out() -> None:
    rows = fused.by_cluster(ORDERED)
    assert len(fused.ordered_pairs(rows["first"])) == 5
    assert [(a["name"], b["name"]) for a, b in fused.wrong_pairs(rows["first"])] == [("c", "d")]
    assert fused.ordered_pairs(rows["second"]) == []


def test_the_table_says_which_pairs_are_in_the_other_order_and_why_predictions_differ() -> None:
    lines = fused.table(ORDERED).splitlines()
    at = lines.index("first: 4 of 5 pairs in order; Spearman's correlation 0.60")
    assert lines[at + 1 : at + 4] == [
        "  in the other order: c (2 s, predicted 3 s) and d (3 s, predicted 2 s)",
        "  entered otherwise: dropout",
        "  not in the price: overlap",
    ]
    assert fused.figures(ORDERED)["first"]["spearman"] == pytest.approx(0.6)


def test_a_step_that_was_not_published_is_refused_with_those_that_were() -> None:
    with pytest.raises(ArgumentError, match=r"no published step is 'llama2'; there are llama3.1-8b 1x8, "):
        fused.run(["llama2"])
