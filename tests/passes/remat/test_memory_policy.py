"""Plans within a memory budget, through the public API."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar import Cluster, MemoryBudgetError, zoo
from autopar.errors import ArgumentError, AutoparWarning
from autopar.ir.problem import Problem
from autopar.passes.remat import memory_policy
from autopar.passes.solver.optimize import optimize
from autopar.plans.plan import Plan
from tests.support.effort import examples

MODEL = zoo.build("mlp-toy", layers=1, batch=64)
CLUSTER = Cluster.preset("dgx-h100")


def planned(budget: float | str | None, mesh: tuple[int, ...] = (8,), **options: Any) -> Plan:
    return autopar.plan(MODEL.step, *MODEL.abstract_args(), mesh=mesh, cluster=CLUSTER, memory_budget=budget, **options)


@pytest.fixture(scope="module")
def free() -> Plan:
    return planned(None)


@pytest.fixture(scope="module")
def least() -> Plan:
    return planned("min")


def peak(plan: Plan) -> int:
    return plan.stages[0].peak_memory_bytes


@pytest.mark.exhaustive
def test_less_memory_costs_time() -> None:
    free, least = planned(None, (2, 4)), planned("min", (2, 4))
    middle = planned((peak(free) + peak(least)) / 2, (2, 4))
    assert peak(least) < peak(middle) < peak(free)
    assert free.step_time_s < middle.step_time_s < least.step_time_s
    assert least.solver_status == "least-memory"


@settings(max_examples=examples(8))
@given(st.floats(0.0, 1.0))
def test_no_plan_exceeds_its_budget(free: Plan, least: Plan, share: float) -> None:
    budget = math.ceil(peak(least) + share * (peak(free) - peak(least)))
    plan = planned(budget)
    assert peak(plan) <= budget
    assert plan.step_time_s >= free.step_time_s * (1 - 1e-9)


def test_if_no_plan_fits_the_error_has_suggestions(least: Plan) -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        planned("1KB", num_microbatches=1)
    error, text = caught.value, str(caught.value)
    assert error.budget == 1e3
    assert error.bound_bytes <= error.least_bytes
    assert error.least_bytes >= peak(least)
    assert "no plan fits into 1 kB per device" in text
    assert len([line for line in text.splitlines() if line.startswith("  ")]) == 10
    assert f"memory_budget={error.least_bytes}" in text
    assert "times the devices" in text
    assert peak(planned(error.least_bytes)) <= error.least_bytes
    with pytest.raises(MemoryBudgetError):
        planned(error.bound_bytes - 1, num_microbatches=1)


def six_products(w: jax.Array, x: jax.Array) -> Any:
    return jax.value_and_grad(lambda w: ((reduce(lambda h, _: jnp.tanh(h @ w), range(6), x) - 1) ** 3).sum())(w)


def normalized(w: jax.Array, x: jax.Array) -> Any:
    """The same with a norm over the batch, which does not fall into microbatches."""

    def loss(w: jax.Array) -> jax.Array:
        return ((reduce(lambda h, _: jnp.tanh(h @ w) / jnp.sqrt((h**2).mean(0)), range(6), x) - 1) ** 3).sum()

    return jax.value_and_grad(loss)(w)


@pytest.mark.parametrize(
    ("step", "budget", "options", "advised", "silent"),
    [
        (six_products, 60_000, {"num_microbatches": 1, "remat": "none"}, ("num_microbatches=4,", "remat='auto'"), ()),
        (six_products, 30_000, {"num_microbatches": 2}, ("num_microbatches=32,",), ("remat='auto'",)),
        (six_products, 17_000, {"num_microbatches": 2}, ("times the devices",), ("num_microbatches",)),
        (six_products, 8_000, {}, ("times the devices",), ("num_microbatches", "remat='auto'")),
        (normalized, 50_000, {"remat": "full"}, ("jax.checkpoint",), ("num_microbatches", "remat='auto'")),
    ],
    ids=["one microbatch", "two", "batch itself", "tried", "batch norm"],
)
def test_an_error_advises_what_is_not_tried_and_can_be(
    step: Any, budget: int, options: dict[str, Any], advised: tuple[str, ...], silent: tuple[str, ...]
) -> None:
    args = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((4096, 8), jnp.float32)
    with pytest.raises(MemoryBudgetError) as caught:
        autopar.plan(step, *args, mesh=(8,), cluster="dgx-h100", memory_budget=budget, **options)
    advice = str(caught.value).splitlines()[-1]
    assert all(text in advice for text in advised), advice
    assert not any(text in advice for text in silent), advice
    if count := re.search(r"num_microbatches=(\d+),", advice):
        more = {**options, "num_microbatches": int(count[1])}
        fits = autopar.plan(step, *args, mesh=(8,), cluster="dgx-h100", memory_budget=budget, **more)
        assert peak(fits) <= budget


def test_microbatches_are_not_advised_for_the_memory_of_an_update() -> None:
    """The workspace of a decomposition in the optimizer does not depend on the batch."""

    def step(state: Any, x: jax.Array) -> Any:
        w, moments = state
        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        moments = moments + gradient @ gradient.T
        values, vectors = jnp.linalg.eigh(moments)
        return (w - (vectors / jnp.sqrt(1 + values)) @ vectors.T @ gradient, moments)

    square, batch = jax.ShapeDtypeStruct((32, 32), jnp.float32), jax.ShapeDtypeStruct((64, 32), jnp.float32)
    with pytest.raises(MemoryBudgetError, match=r"at op\d+ eigh") as caught:
        autopar.plan(step, (square, square), batch, mesh=(8,), cluster="dgx-h100", memory_budget=8_000)
    assert "num_microbatches" not in str(caught.value)


def test_a_device_that_is_too_small_is_warned_of_and_planned_for() -> None:
    small = Cluster.custom((8,), 1e-6, 1e-10, 1e12, 1e11, 20_000)
    with pytest.warns(AutoparWarning, match="more than the 18 kB that are there, and no layouts of it need less than"):
        plan = autopar.plan(MODEL.step, *MODEL.abstract_args(), mesh=(8,), cluster=small, num_microbatches=1)
    assert peak(plan) > 20_000
    assert any("memory_budget='min'" in note for note in plan.notes)


def test_a_plan_that_fits_is_the_free_optimum(free: Plan) -> None:
    again = planned(2 * peak(free))
    assert again.step_time_s == free.step_time_s
    assert again.gap == 0.0


def test_the_state_is_sharded_as_the_budget_falls() -> None:
    """Data parallelism keeps all of the state on every device; with the least memory each keeps its share (ZeRO-3)."""
    whole, cut = (planned(budget, (8,), offload="none").stages[0].memory for budget in (None, "min"))
    kept = [sum(m.get(kind, 0) for kind in ("parameters", "optimizer state")) for m in (whole, cut)]
    even = 3 * 4 * MODEL.parameters() / 8
    assert kept[1] < kept[0]
    assert kept[1] == pytest.approx(even, rel=0.15)


@pytest.mark.parametrize("text", ["12 parsecs", "0", "-1GB", "", True, [1]])
def test_a_budget_is_bytes_or_min(text: object) -> None:
    with pytest.raises(ArgumentError, match=r"memory_budget=.* must be bytes per device, a text such as '12GiB'"):
        planned(text)  # type: ignore[arg-type]


def test_units() -> None:
    from autopar.options import budget

    budgets = [budget(x) for x in (4096, "12GiB", "500MB", "1.5 kb", "min")]
    assert budgets == [4096.0, 12 * 2.0**30, 5e8, 1.5e3, "min"]


def test_a_solver_out_of_time_is_not_constrained_by_memory() -> None:
    solution = optimize(Problem((), ()))
    assert not memory_policy.is_constrained(replace(solution, warnings=("cbc ended with time-limit",)))
