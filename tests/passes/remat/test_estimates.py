"""What recomputing is forecast to cost and free, beside plans of the recomputed programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar import Cluster, zoo
from autopar.codegen.rewrites import accumulate_gradients
from autopar.cost_models.compiler.backends import backend_of
from autopar.cost_models.memory.liveness import Liveness
from autopar.ir.graph import Graph
from autopar.ir.trace import Traced, trace
from autopar.passes.intra_op import extract
from autopar.passes.mesh_search.planner import make_model
from autopar.passes.microbatch.batch import batch_leaves
from autopar.passes.remat import rewrite as remat
from autopar.passes.remat.estimates import Forecast, forecasts, one_microbatch
from autopar.passes.remat.options import Options
from autopar.passes.solver.optimize import optimize
from tests.support.effort import sample

MESH = Cluster.local().logical_mesh((2, 4))


@dataclass(frozen=True)
class Fastest:
    """The fastest plan of a program: s per step, bytes at the peak, s of each product, and forecasts by policy."""

    seconds: float
    peak: float
    products: Mapping[int, float]
    forecasts: Mapping[str, Forecast]


def planned(traced: Traced, *, keeps_barriers: bool = False, layered: Graph | None = None) -> Fastest:
    model = make_model(traced, MESH, Options())
    solution = optimize(model.problem)
    backend = replace(backend_of(MESH.device), keeps_barriers=keeps_barriers)
    liveness = Liveness(traced.graph, model, MESH, backend)
    open_to = remat.recomputable(layered or traced.graph)
    by_policy = forecasts(traced.graph, model, MESH, liveness, solution.assignment, open_to, layered)
    seconds = dict(extract.operation_seconds(model, solution.assignment))
    products = {op.index: seconds[op.index] for op in traced.graph.ops if op.name == "dot_general"}
    return Fastest(solution.objective, liveness.peak(solution.assignment)[0], products, by_policy)


def recomputed(traced: Traced, policy: str) -> Traced:
    chosen = [policy if open_ else remat.NONE for open_ in remat.recomputable(traced.graph)]
    return replace(traced, graph=remat.rewrite(traced.graph, chosen))


@pytest.mark.parametrize("name", sample(["gpt-toy", "llama3-toy", "vit-toy"], ["llama3-toy"]))
def test_forecasts_are_near_the_plans_of_the_recomputed_programs(name: str) -> None:
    model = zoo.build(name, layers=6, batch=64)
    traced = trace(model.step, *model.abstract_args())
    plan = planned(traced)
    for policy in (remat.DOTS, remat.FULL):
        forecast, again = plan.forecasts[policy], planned(recomputed(traced, policy), keeps_barriers=True)
        freed, dearer = plan.peak - again.peak, again.seconds - plan.seconds
        assert 1.0 <= sum(e.nbytes for e in forecast.layers) / freed <= 1.35  # what is recomputed is there at once
        assert 0.9 <= sum(e.seconds for e in forecast.layers) / dearer <= 1.6
        assert forecast.least_bytes <= again.peak


@pytest.mark.parametrize("name", sample(["gpt-toy", "vit-toy"], ["vit-toy"]))
def test_forecasts_are_right_with_microbatches(name: str) -> None:
    """The layers of the step are found in what a microbatch runs, and each costs what it costs in all of them."""
    model = zoo.build(name, layers=3, batch=64)
    traced = trace(model.step, *model.abstract_args())
    batch = batch_leaves(traced.graph, 4)

    def split(step: Traced) -> Traced:
        return accumulate_gradients(step, 4, batch, MESH.size)

    written = split(traced)
    layered = one_microbatch(written.graph)
    assert layered is not None
    assert remat.recomputable(layered) == remat.recomputable(traced.graph)
    plan = planned(written, layered=layered)
    for policy in (remat.DOTS, remat.FULL):
        forecast, again = plan.forecasts[policy], planned(split(recomputed(traced, policy)), keeps_barriers=True)
        freed, dearer = plan.peak - again.peak, again.seconds - plan.seconds
        assert 0.9 <= sum(e.nbytes for e in forecast.layers) / freed <= 1.6
        assert 0.8 <= sum(e.seconds for e in forecast.layers) / dearer <= 1.6
        assert forecast.least_bytes <= again.peak


def test_a_program_without_microbatches_has_none() -> None:
    for name in ("gpt-toy", "mlp-toy"):
        model = zoo.build(name)
        assert one_microbatch(trace(model.step, *model.abstract_args()).graph) is None


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
    plan = planned(traced)
    layers = remat.rematerialised(traced.graph, remat.FULL)
    for change, layer in zip(layers, plan.forecasts[remat.FULL].layers, strict=False):
        assert change is not None
        mine = [op for op in sorted(change.recomputed) if op in plan.products]
        assert mine
        assert layer.seconds >= sum(plan.products[op] for op in mine)


def test_with_dots_results_of_products_stay_in_memory() -> None:
    array = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    traced = trace(chain, [array] * 5, array)
    by = planned(traced).forecasts
    assert by[remat.DOTS].least_bytes > by[remat.FULL].least_bytes
    for dots, full in zip(by[remat.DOTS].layers, by[remat.FULL].layers, strict=True):
        assert dots.seconds < full.seconds
        assert dots.nbytes < full.nbytes
    assert math.isfinite(by[remat.FULL].least_bytes)


def test_loops_over_layers_are_not_forecast() -> None:
    model = zoo.build("gpt-toy-scan", batch=64)
    assert planned(trace(model.step, *model.abstract_args())).forecasts == {}
