"""bench equal: what counts as equal, what is resumed, what a dead worker leaves."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import zoo
from autopar.bench import worker
from autopar.bench.equal import case as equal_case
from autopar.bench.equal import flops as equal_flops
from autopar.bench.equal import run as equal
from autopar.errors import ArgumentError
from autopar.hardware.cluster import Cluster
from autopar.plans import imbalance


def row(model="mlp-toy", mesh=(8,), dtype="float32", ok=True, **more):
    return {**asdict(equal_case.Row(model, mesh, dtype, ok, **more)), "cluster": "dear"}


# Numbers


def test_differences_are_relative_to_the_largest_of_a_leaf():
    leaf_differences = equal_case.differences({"w": np.array([1.0, 4.0]), "n": 3}, {"w": np.array([1.5, 5.0]), "n": 3})
    assert leaf_differences == {"n": 0.0, "w": pytest.approx(0.2)}


@pytest.mark.parametrize("ours", [np.array([np.nan, 1.0]), np.array([np.inf, 1.0])])
def test_what_is_not_finite_never_agrees(ours):
    assert equal_case.differences({"w": ours}, {"w": np.ones(2)}) == {"w": math.inf}


def test_integers_must_be_equal():
    assert equal_case.differences({"n": jnp.int32(3)}, {"n": jnp.int32(4)}) == {"n": math.inf}


def test_a_leaf_of_zeros_differs_by_what_it_is_not_zero():
    assert equal_case.differences({"w": np.array([0.0, 0.5])}, {"w": np.zeros(2)}) == {"w": 0.5}


def test_rounding_leaves_are_judged_among_their_kind():
    state = {
        "params": {"w": np.ones(2), "bk": np.full(2, 1e-7), "zero": np.zeros(2)},
        "mu": {"w": np.full(2, 1e-3), "bk": np.full(2, 1e-12)},
        "nu": {"w": np.full(2, 1e-6), "bk": np.full(2, 1e-11)},
    }
    assert equal_case.rounding_leaves(state) == {"params/bk", "mu/bk"}


def test_parameters_are_compared_by_their_norm():
    ours, theirs = {"params": {"a": np.array([3.0, 0.0])}}, {"params": {"a": np.array([3.0, 4.0])}}
    assert equal_case.of_params({**ours, "opt": 1}, {**theirs, "opt": 2}) == pytest.approx(0.8)


def test_float64_asks_nine_digits_but_of_rounding_only_what_the_expert_reaches():
    leaf_differences, expert = {"w": 2e-9, "bk": 5e-3, "bq": 5e-2}, {"w": 1e-3, "bk": 1e-3, "bq": 1e-3}
    failures = equal_case._numbers_64(leaf_differences, expert, frozenset({"bk", "bq"}))
    assert [text.split()[0] for text in failures] == ["w", "bq"]


@pytest.mark.parametrize(
    ("loss", "params", "by_hand", "failures"),
    [(1e-6, 9e-6, 1e-6, 0), (2e-5, 0.0, 0.0, 1), (0.0, 1.1e-5, 1e-6, 1), (0.0, 9e-7, 0.0, 0)],
)
def test_float32_is_judged_by_loss_and_expert(loss, params, by_hand, failures):
    row = equal_case.Row("m", (8,), "float32", True, loss=loss, params=params, by_hand=by_hand)
    assert len(equal_case._numbers_32(row)) == failures


def test_a_wrong_step_fails_the_comparison():
    baseline = equal_case.single("mlp-toy", "float32")
    wrong = equal_case.steps(
        lambda s, b: baseline.inputs.model.step(s, {**b, "x": b["x"] * 1.001}), baseline.inputs, baseline.inputs.state
    )
    assert equal_case.loss_difference(wrong, baseline.run) > equal_case.TOLERANCE_LOSS
    assert equal_case.of_params(wrong.state, baseline.run.state) > equal_case.FLOOR_32


def test_the_expert_goes_over_the_most_devices_that_divide_the_batch():
    baseline = equal_case.single("mlp-toy", "float32")
    assert [equal_case.by_hand(baseline, n).devices for n in (8, 6, 3)] == [8, 4, 2]


@pytest.mark.parametrize(
    ("dtype", "params", "bias", "needed"),
    [
        ("float64", 1.0, equal_case.TOLERANCE_64, False),
        ("float64", 0.0, 1e-3, True),
        ("float32", equal_case.FLOOR_32, 1.0, False),
        ("float32", 2e-6, 0.0, True),
    ],
)
def test_the_expert_is_asked_only_where_rounding_may_excuse_a_difference(dtype, params, bias, needed):
    assert equal_case.needs_expert(dtype, params, {"bias": bias}, frozenset({"bias"})) is needed


# Rows


def test_rows_are_resumed_and_appended(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row(mesh=(8,))) + "\n")
    asked = []

    def lines(module, spec, env):
        asked.append((spec["model"], spec["dtype"], list(spec["meshes"])))
        yield from ({**row(spec["model"], mesh, spec["dtype"])} for mesh in spec["meshes"])

    monkeypatch.setattr(worker, "lines", lines)
    product = equal.Product(("mlp-toy",), ((8,), (3,)), ("float32", "float64"))
    rows = equal.run(product, path)
    assert asked == [("mlp-toy", "float32", [(3,)]), ("mlp-toy", "float64", [(8,), (3,)])]
    assert [(r["dtype"], tuple(r["mesh"])) for r in rows] == [
        ("float32", (8,)), ("float32", (3,)), ("float64", (8,)), ("float64", (3,))
    ]  # fmt: skip
    assert len(path.read_text().splitlines()) == 4
    assert equal.run(product, path) == json.loads(json.dumps(rows))
    assert len(asked) == 2


def test_a_dead_worker_fails_the_meshes_it_has_not_reached(monkeypatch):
    def lines(module, spec, env):
        yield row(mesh=(8,))
        raise worker.WorkerError("out of memory")

    monkeypatch.setattr(worker, "lines", lines)
    rows = equal.run(equal.Product(("mlp-toy",), ((8,), (3,)), ("float32",)))
    assert [r["ok"] for r in rows] == [True, False]
    assert rows[1]["failures"] == ("out of memory",)


def test_the_table_gives_the_reasons():
    rows = [
        row(),
        row(mesh=(3,), flops_ratio=3.0, reasons=("no dimension divides", "and more")),
        row(ok=False, failures=("x",)),
    ]
    text = equal.table(rows)
    assert "  mlp-toy (3,) float32: 3.00\n    no dimension divides\n    and more\n" in text
    assert text.endswith("2 of 3 cases equal the single-device run")
    assert equal.figures(rows)["flops_flagged"] == 1


def test_rows_without_reasons_are_run_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    old = row()
    del old["reasons"]
    path.write_text(json.dumps(old) + "\n")
    assert equal._done(path) == {}


# FLOPs


def account(ratio, *excesses):
    excess_list = tuple(imbalance.Excess(kind, kind, more, 1.0, ("dot_general",), (), "") for kind, more in excesses)
    return imbalance.Imbalance(ratio, excess_list)


@pytest.mark.parametrize(
    ("measured", "ratio", "unfused", "failing"),
    [
        (account(1.5, ("padded", 0.5)), 1.5, 1.5, False),
        (account(6.0, ("indivisible", 5.0)), 6.0, 6.0, False),
        (account(1.0), 1.3, 1.0, False),  # fusion
        (account(1.0), 1.3, 1.3, True),  # the compiler does what the plan does not know of
        (account(1.3, ("chosen", 0.3)), 1.3, 1.3, True),
        (account(1.4, ("chosen", 0.2), ("padded", 0.2)), 1.4, 1.4, False),
    ],
)
def test_flops_above_the_flag_fail_where_an_even_cut_exists(measured, ratio, unfused, failing):
    reasons = equal_flops.reasons(measured, ratio, unfused)
    assert bool(reasons.failures) == failing
    assert sum(float(line.rsplit("+", 1)[1][:4]) for line in reasons.lines) == pytest.approx(ratio - 1)


def test_a_step_that_every_device_repeats_fails():
    model = zoo.build("mlp-toy")
    state, batch = model.abstract_args()
    slow = Cluster.custom((8,), 1.0, 1.0, 1e13, 1e13, 2**34)
    plan = autopar.plan(model.step, state, batch, mesh=(8,), cluster=slow)
    reasons = equal_flops.explain(model.step, (state, batch), plan, 8.0)
    assert reasons.failures
    assert reasons.lines[0].startswith("whole along x=8, which is cheaper than moving data: +7.00 (dot_general, ")


def test_unknown_choices_are_refused():
    with pytest.raises(ArgumentError, match="dtype 'int8'"):
        equal.Product(dtypes=("int8",))
