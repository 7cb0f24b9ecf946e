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
from autopar.bench.references import published
from autopar.hardware.cluster import Cluster
from autopar.ir.collective import Collective
from autopar.ir.trace import trace
from autopar.plans.forms import FORMS, largest
from autopar.plans.plan import Plan, from_json
from autopar.plans.views.groups import sections
from autopar.plans.views.parallelism import NAMES, describe
from autopar.zoo.layers import nn
from tests.passes.intra_op.test_optimality import data_parallel, megatron, sequence_parallel
from tests.programs.steps import array
from tests.support.source_lines import EXPERT_PRODUCTS, line


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


def test_state_that_is_not_donated_is_state() -> None:
    """Sharded weights are told of, and the words of the batch stay those of the batch."""
    model = zoo.build("mlp-toy", batch=64)
    args = model.abstract_args()
    pins = autopar.pins.fsdp("x")
    donating, keeping = (planned(model.step, args, pins, (8,), donate_argnums=donated) for donated in ("auto", ()))
    assert "weights sharded over x (FSDP, ZeRO-3)" in describe(donating)
    assert describe(keeping) == describe(donating)
    assert sections(keeping) == sections(donating)
    assert keeping.donated == () != donating.donated


def test_a_batch_that_results_look_like_is_no_state() -> None:
    def step(w: Any, batch: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((batch @ w - batch) ** 2))(w), batch @ w

    plan = planned(step, (array(8, 8), array(16, 8)), None, (2,), batch_argnums=1, donate_argnums=())
    assert sections(plan) == {"parameters and other state": (0,), "other arguments": (1,)}


TENSOR = "4 ways: attention by heads, batch sharded between products, columns of weights, rows of weights"


@pytest.mark.parametrize(
    ("name", "expert", "text"),
    [
        ("gpt-toy", data_parallel, "data parallel over x and y (8 ways)"),
        ("vit-toy", data_parallel, "data parallel over x and y (8 ways)"),
        ("gpt-toy", megatron, f"tensor parallel (93%) and data parallel (7%) over y ({TENSOR})"),
        ("t5-toy", megatron, f"over y ({TENSOR})"),
        ("mlp-toy", megatron, "tensor parallel over y (4 ways: columns of weights, rows of weights)"),
        ("moe-toy", data_parallel, "data parallel (70%) and expert parallel (30%) over y (4 ways)"),
        ("gpt-toy", sequence_parallel, "columns of weights, rows of weights, sequence parallel between products)"),
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
    ("name", "microbatches", "forms"),
    [("gpt-toy-scan", 1, "data parallel"), ("gpt-toy", 2, "data parallel over x (4 ways)")],
)
def test_the_batch_is_followed_through_scans_and_microbatches(name: str, microbatches: int, forms: str) -> None:
    model = zoo.build(name, batch=64)
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


V100 = Cluster.preset("p3.16xlarge", hosts=2)
EXPERTS = {"params/*expert*": P("y"), **{f"products at {of}": P("y") for of in EXPERT_PRODUCTS}}
CHANNELS = {
    f"stage 0: products at {line(nn, 'lax.conv_general_dilated(x, kernel, (stride, stride)')}": P("y"),
    **{f"stage 1: params/stages/1/*/conv{n}": P(None, None, None, "y") for n in (1, 3)},
    "stage 1: params/stages/1/*/conv2": P(None, None, "y"),
    **dict.fromkeys(("params/stages/0/*", "params/stem"), P()),
}
#: Plan of Alpa (Zheng et al., 2022; artefact, benchmark/alpa/suite_*.py) -> (model, its sizes, options, words). Widths,
#: stages and submeshes are those published; layers and microbatches are fewer. GPT-15B has 4 stages as the 2 of 6.7B,
#: MoE-70B 8 stages as the 2 of 10B. Layouts inside stages are pinned to what the artefact says of them.
PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    # 2 stages of (2, 1): the batch over the first axis
    "GPT-1.3B": (
        "gpt-1.3b",
        {"layers": 2, "batch": 16},
        {"mesh": (2, 2), "stages": 2, "cluster": V100.part(0, 4), "pins": autopar.pins.data_parallel("y")},
        "2 stages, 2 microbatches, schedule 1f1b; data parallel over y (2 ways); layers 0 to 2 recomputed (full)",
    ),
    # 2 stages of (2, 4): the batch over the first axis, operators over the second
    "GPT-6.7B": (
        "gpt-6.7b",
        {"layers": 2, "batch": 32},
        {
            "mesh": (2, 2, 4),
            "stages": 2,
            "cluster": V100,
            "pins": autopar.pins.data_parallel("y") | autopar.pins.megatron("z"),
        },
        "2 stages, 2 microbatches, schedule 1f1b; data parallel over y (2 ways); tensor parallel over z (4 ways: "
        "attention by heads, columns of weights, rows of weights); layers 0 to 2 recomputed (full)",
    ),
    # 16 stages of (1, 4): operators over the second axis
    "GPT-39B": (
        "gpt-39b",
        {"layers": 16, "batch": 2},
        {
            "mesh": (16, 4),
            "stages": 16,
            "cluster": Cluster.preset("p3.16xlarge", hosts=8),
            "pins": autopar.pins.megatron("y"),
        },
        "16 stages, 2 microbatches, schedule 1f1b; tensor parallel over y (4 ways: attention by heads, columns of "
        "weights, rows of weights); layers 0 to 16 recomputed (full)",
    ),
    # one stage of (2, 1): batch and experts over the first axis
    "MoE-690M": (
        "moe-690m-adafactor",
        {"layers": 2, "batch": 64},
        {
            "mesh": {"y": 2},
            "cluster": V100.part(0, 2),
            "pins": autopar.pins.data_parallel("y") | EXPERTS,
        },
        "2 microbatches; data parallel (72%) and expert parallel (28%) over y (2 ways); layers 0 to 1 recomputed "
        "(full)",
    ),
    # 2 stages of (8, 1): batch and experts over the first axis
    "MoE-10B": (
        "moe-10b-adafactor",
        {"layers": 4, "batch": 128},
        {"mesh": (2, 8), "stages": 2, "cluster": V100, "pins": autopar.pins.data_parallel("y") | EXPERTS},
        "2 stages, 2 microbatches, schedule 1f1b; data parallel (57%) and expert parallel (43%) over y (8 ways); "
        "layers 0 to 4 recomputed (full)",
    ),
    # 2 stages: the first of (4, 1), the batch over all devices; the second of (1, 4), the batch over none: channels
    "Wide-ResNet-2B, as a toy": (
        "wresnet-toy",
        {},
        {"mesh": (2, 4), "stages": 2, "cluster": dear((2, 4)), "per_microbatch": "*", "pins": CHANNELS},
        "2 stages, 2 microbatches, schedule 1f1b; tensor parallel (71%) and data parallel (29%) over y (4 ways: "
        "columns of weights, rows of weights); layers 0 to 1 recomputed (full)",
    ),
}


@pytest.mark.parametrize("title", PUBLISHED)
def test_published_plans_are_called_what_the_paper_calls_them(title: str) -> None:
    name, sizes, options, words = PUBLISHED[title]
    model = zoo.build(name, **sizes)
    schedule = {"schedule": "1f1b"} if "stages" in options else {}
    plan = autopar.plan(
        *(model.step, *model.abstract_args()), num_microbatches=2, remat="full", progress=False, **schedule, **options
    )
    assert describe(plan) == words


def test_the_published_step_of_gpt_has_its_three_ways() -> None:
    """GPT-2.6B on 8 V100 with dp 2, op 2, pp 2 (Alpa, benchmark/alpa/README.md), of 2 layers in place of 32.

    Blocks are pinned, the head is not: its product, 28% of the FLOPs of so few layers, is cut along the sequence.
    """
    words = describe(published.step(replace(published.PUBLISHED, layers=2)))
    assert words.startswith(
        "2 stages, 4 microbatches, schedule 1f1b; data parallel over data (2 ways); tensor parallel "
    )
    assert (
        "over model (2 ways: attention by heads, batch sharded between products, columns of weights, rows of" in words
    )


def test_state_that_is_sharded_along_an_axis_of_replicated_computation_is_told() -> None:
    model = zoo.build("mlp-toy", batch=4096)  # a small step, for which sending the batch's gradients does not pay
    plan = autopar.plan(model.step, *model.abstract_args(), mesh=(8,))
    assert not plan.forms["x"]
    assert plan.summary().splitlines()[1] == (
        "computation replicated over x (8 ways); weights sharded over x (FSDP, ZeRO-3)"
    )


def test_one_microbatch_is_singular() -> None:
    model = zoo.build("mlp-toy", batch=16)
    plan = planned(model.step, model.abstract_args(), None, (2,), stages=2, num_microbatches=1)
    assert describe(plan).startswith("2 stages, 1 microbatch, schedule")
