"""The forms of parallelism that a plan is said to have: plans of experts, ZeRO, and every factor by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import zoo
from autopar.bench.equal.case import dear
from autopar.ir.collective import Collective
from autopar.ir.trace import trace
from autopar.plans.forms import FORMS, largest
from autopar.plans.plan import Plan, from_json
from autopar.plans.views.parallelism import NAMES, describe
from tests.passes.intra_op.test_optimality import data_parallel, megatron, sequence_parallel
from tests.programs.real_programs import array


def planned(fn: Callable[..., Any], args: Any, pins: Any, mesh: tuple[int, ...] = (2, 4), **options: Any) -> Plan:
    return autopar.plan(fn, *args, mesh=mesh, cluster=dear(mesh), pins=pins, progress=False, remat="none", **options)


def of_expert(name: str, expert: Callable[..., P]) -> str:
    model = zoo.build(name)
    args = model.abstract_args()
    graph = trace(model.step, *args).graph
    leaves = zip(graph.input_paths, graph.inputs, strict=True)
    pins = {f"arg:{i}": expert(model, path, graph.types[v].shape) for i, (path, v) in enumerate(leaves)}
    plan = planned(model.step, args, pins)
    assert from_json(json.loads(plan.to_json())).summary() == plan.summary()
    return describe(plan)


TENSOR = "4 ways: attention by heads, columns of weights, rows of weights"


@pytest.mark.parametrize(
    ("name", "expert", "text"),
    [
        ("gpt-toy", data_parallel, "data parallel over x and y (8 ways)"),
        ("vit-toy", data_parallel, "data parallel over x and y (8 ways)"),
        ("gpt-toy", megatron, f"tensor parallel (93%) and data parallel (7%) over y ({TENSOR})"),
        ("t5-toy", megatron, f"over y ({TENSOR})"),
        ("mlp-toy", megatron, "tensor parallel over y (4 ways: columns of weights, rows of weights)"),
        ("moe-toy", data_parallel, "data parallel (70%) and expert parallel (30%) over y (4 ways)"),
        ("gpt-toy", sequence_parallel, "columns of weights, sequence parallel between products)"),
    ],
)
def test_plans_of_experts_are_recognised(name: str, expert: Callable[..., P], text: str) -> None:
    described = of_expert(name, expert)
    assert text in described
    assert described.startswith("data parallel over x")


X, W = array(8, 16, 32), array(32, 64)


def attention(w: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    """Scores of every head, [batch, head, query, key]."""
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


Q = array(8, 16, 4, 32)
#: title -> (function of the batch and weights, arguments, pins of arguments and the result, form along x)
FACTORS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, P], str]] = {
    "batch": (lambda w, x: x @ w, (W, X), {"arg:1": P("x"), "arg:0": P(), "out:1": P("x")}, "data"),
    "sequence": (
        lambda w, x: x @ w,
        (W, X),
        {"arg:1": P(None, "x"), "arg:0": P(), "out:1": P(None, "x")},
        "sequence",
    ),
    "columns": (
        lambda w, x: x @ w,
        (W, X),
        {"arg:1": P(), "arg:0": P(None, "x"), "out:1": P(None, None, "x")},
        "columns",
    ),
    "rows": (lambda w, x: x @ w, (W, X), {"arg:1": P(None, None, "x"), "arg:0": P("x"), "out:1": P()}, "rows"),
    "scattered rows": (
        lambda w, x: x @ w,
        (W, X),
        {"arg:1": P(None, None, "x"), "arg:0": P("x"), "out:1": P(None, "x")},
        "scattered rows",
    ),
    "experts": (
        lambda w, x: jnp.einsum("bed,edf->bef", x, w),
        (array(4, 32, 64), array(8, 4, 32)),
        {"arg:0": P("x"), "arg:1": P(None, "x"), "out:1": P(None, "x")},
        "expert",
    ),
    "heads": (
        attention,
        (W, Q, Q),
        {"arg:1": P(None, None, "x"), "arg:2": P(None, None, "x"), "out:1": P(None, "x")},
        "heads",
    ),
    "context": (attention, (W, Q, Q), {"arg:1": P(None, "x"), "arg:2": P(), "out:1": P(None, None, "x")}, "context"),
    "nothing": (lambda w, x: x @ w, (array(1, 1), array(1, 1)), {}, ""),
}


@pytest.mark.parametrize("title", FACTORS)
def test_a_factor_is_a_form(title: str) -> None:
    fn, args, pins, form = FACTORS[title]

    def step(*leaves: Any) -> Any:
        return leaves[0], fn(*leaves)  # the first argument is state, and so no part of the batch

    assert largest(planned(step, args, pins, (4,)).forms["x"]) == form


def test_a_form_of_a_part_of_the_products_has_its_share() -> None:
    """The second product has 54 of 118 FLOPs and no dimension that four devices could share."""

    def step(w: jax.Array, v: jax.Array, x: jax.Array, z: jax.Array) -> Any:
        return w, v, x @ w, z @ v

    args = array(1, 2), array(3, 3), array(16, 1), array(1, 3, 3)
    plan = planned(step, args, {"arg:2": P("x"), "out:2": P("x"), "arg:3": P(), "out:3": P()}, (4,))
    assert describe(plan) == "data parallel (54%) over x (4 ways)"


def test_products_in_a_loop_count_as_often_as_they_run() -> None:
    """64 FLOPs over the batch, and four times 54 without a dimension that four devices could share."""

    def step(w: jax.Array, v: jax.Array, x: jax.Array, z: jax.Array) -> Any:
        return w, v, x @ w, jax.lax.scan(lambda y, _: (y @ v, None), z, None, length=4)[0]

    args = array(1, 2), array(3, 3), array(16, 1), array(1, 3, 3)
    plan = planned(step, args, {"arg:2": P("x"), "out:2": P("x"), "arg:3": P(), "out:3": P()}, (4,))
    assert plan.forms == {"x": {"data": pytest.approx(64 / (64 + 4 * 54), abs=1e-4)}}


def test_every_form_has_a_name() -> None:
    assert tuple(NAMES) == FORMS


@pytest.mark.parametrize(
    ("name", "microbatches", "forms"), [("gpt-toy-scan", 1, "data parallel"), ("gpt-toy", 2, "data parallel (71%) and")]
)
def test_the_batch_is_followed_through_scans_and_microbatches(name: str, microbatches: int, forms: str) -> None:
    model = zoo.build(name)
    args = model.abstract_args()
    plan = planned(model.step, args, {"batch/*": P("x"), "state/*": P()}, (4,), num_microbatches=microbatches)
    text = describe(plan)
    assert text.startswith(forms if microbatches == 1 else f"{microbatches} microbatches; {forms}")


def test_sharded_state_has_the_stage_of_zero() -> None:
    model = zoo.build("gpt-toy")
    args = model.abstract_args()
    plan = planned(model.step, args, {"batch/*": P("x"), "state/*": P()}, (8,))

    def with_state(params: int, moments: int, reduction: str) -> str:
        """The plan with dimension 0 of matrices sharded (0) or whole (-1), and one reduction of gradients."""
        layout = {"params": (params,), "opt": (moments,)}
        inputs = tuple(layout.get(path.split("/")[1], (0,)) for path in plan.input_paths)
        return describe(replace(plan, inputs=inputs, collectives=(Collective(reduction, ("x",), 1024),)))

    assert "ZeRO" not in with_state(-1, -1, "all-reduce")
    assert "; optimizer state sharded over x (ZeRO-1)" in with_state(-1, 0, "all-reduce")
    assert "; optimizer state sharded over x (ZeRO-2)" in with_state(-1, 0, "reduce-scatter")
    assert "; weights sharded over x (FSDP, ZeRO-3)" in with_state(0, 0, "reduce-scatter")


def test_layers_that_are_recomputed_are_told_as_ranges() -> None:
    model = zoo.build("gpt-toy")
    args = model.abstract_args()
    plan = autopar.plan(model.step, *args, mesh=(8,), remat="full", progress=False)
    assert plan.remat
    assert "recomputed (full)" in describe(plan)
