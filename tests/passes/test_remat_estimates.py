"""What recomputing is forecast to cost and free, beside plans of the recomputed programs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar import Cluster, zoo
from autopar.cost_models.backends import backend_of
from autopar.cost_models.memory import Liveness
from autopar.passes import remat
from autopar.passes.optimize import optimize
from autopar.passes.remat_estimates import AsWritten, Forecast
from autopar.planning import Options, make_model
from autopar.trace import Traced, trace

MESH = Cluster.local().logical_mesh((2, 4))


def planned(traced: Traced, *, keeps_barriers: bool = False) -> tuple[float, float, AsWritten]:
    """s per step and peak bytes of the fastest plan, and what forecasts are read off."""
    model = make_model(traced, MESH, Options())
    solution = optimize(model.problem)
    backend = replace(backend_of(MESH.device), keeps_barriers=keeps_barriers)
    liveness = Liveness(traced.graph, model, MESH, backend)
    plan = AsWritten.of(traced.graph, model, MESH, liveness, solution.assignment)
    return solution.objective, liveness.peak(solution.assignment)[0], plan


def recomputed(traced: Traced, policy: str) -> Traced:
    chosen = [policy if open_ else remat.NONE for open_ in remat.recomputable(traced.graph)]
    return replace(traced, graph=remat.rewrite(traced.graph, chosen))


def forecast(plan: AsWritten, policy: str) -> Forecast:
    found = plan.forecast(policy, remat.recomputable(plan.graph))
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["gpt-toy", "llama3-toy", "vit-toy"])
def test_forecasts_are_near_the_plans_of_the_recomputed_programs(name: str) -> None:
    model = zoo.build(name, layers=6, batch=64)
    traced = trace(model.step, *model.abstract_args())
    seconds, peak, plan = planned(traced)
    for policy in (remat.DOTS, remat.FULL):
        found = forecast(plan, policy)
        again, lower, _ = planned(recomputed(traced, policy), keeps_barriers=True)
        assert 1.0 <= sum(e.nbytes for e in found.steps) / (peak - lower) <= 1.35  # what is recomputed is there at once
        assert 0.9 <= sum(e.seconds for e in found.steps) / (again - seconds) <= 1.6
        assert found.least_bytes <= lower


def chain(ws: Any, x: Any) -> Any:
    """Five layers of one product each, and the gradient of all."""

    def loss(ws: Any) -> Any:
        y = x
        for w in ws:
            y = jnp.sin(y @ w)
        return (y @ ws[0]).sum()

    return jax.grad(loss)(ws)


def test_recomputing_a_product_costs_what_it_costs() -> None:
    array = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    traced = trace(chain, [array] * 5, array)
    _, _, plan = planned(traced)
    products = {op.index: plan.own[op.index] for op in traced.graph.ops if op.name == "dot_general"}
    for change, step in zip(remat.changes(traced.graph, remat.FULL), forecast(plan, remat.FULL).steps, strict=False):
        assert change is not None
        mine = [op for op in sorted(change.again) if op in products]
        assert mine
        assert step.seconds >= sum(products[op] for op in mine)


def test_by_dots_products_stay_and_take_room() -> None:
    array = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    traced = trace(chain, [array] * 5, array)
    _, _, plan = planned(traced)
    by = {policy: forecast(plan, policy) for policy in (remat.DOTS, remat.FULL)}
    assert by[remat.DOTS].least_bytes > by[remat.FULL].least_bytes
    for dots, full in zip(by[remat.DOTS].steps, by[remat.FULL].steps, strict=True):
        assert dots.seconds < full.seconds
        assert dots.nbytes < full.nbytes
    assert math.isfinite(by[remat.FULL].least_bytes)


def test_loops_over_layers_are_not_forecast() -> None:
    model = zoo.build("gpt-toy-scan", batch=64)
    _, _, plan = planned(trace(model.step, *model.abstract_args()))
    assert plan.forecast(remat.FULL, remat.recomputable(plan.graph)) is None
