"""Stages of a pipeline on every target: what their programs emit is what the plan says of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import zoo
from autopar.bench.equal.case import dear
from autopar.errors import MeshError
from autopar.hardware.cluster import Cluster
from tests.programs.steps import array, sgd
from tests.support.effort import sample
from tests.verification.test_verify import NEEDS, skip_without_compiler

TABLE, WEIGHT = jax.ShapeDtypeStruct((40, 8), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)
PARAMS, BATCH = (TABLE, (WEIGHT,) * 4), jax.ShapeDtypeStruct((16, 64, 8, 16), jnp.float32)
Params = tuple[jax.Array, tuple[jax.Array, ...]]


def step(params: Params, x: jax.Array) -> Params:
    """Layers of attention whose position bias is looked up once, and transposed in each microbatch, as T5's is."""

    def loss(params: Params) -> jax.Array:
        table, weights = params
        bias = table[jnp.arange(64)[:, None] * 7 % 32 + jnp.arange(64)[None] % 2].transpose(2, 0, 1)[None]
        y = x
        for w in weights:
            scores = jnp.einsum("bqhd,bkhd->bhqk", y, y) + bias
            y = jnp.tanh(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), y) @ w)
        return jnp.mean(y**2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


@cache
def in_stages(mesh: tuple[int, ...], schedule: Literal["1f1b", "zb-h1"] = "1f1b") -> autopar.Plan:
    return autopar.plan(
        step, PARAMS, BATCH, mesh=mesh, cluster=dear(mesh), stages=2, num_microbatches=4, schedule=schedule
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_shardy_and_xla_emit_the_same_collectives_of_stages_in_their_own_numbers(
    schedule: Literal["1f1b", "zb-h1"],
) -> None:
    """Per microbatch what passes need, per step what updates need; on CPU a reduce-scatter is an all-reduce."""
    plan = in_stages((2, 4), schedule)
    shardy, cpu = (autopar.verify(plan, step, PARAMS, BATCH, target=target) for target in ("shardy", "cpu"))
    for report in (shardy, cpu):
        assert report.ok, str(report)
        assert report.mismatches == ()
        assert report.bytes == pytest.approx(report.comparison.predicted_wire_bytes)
    assert shardy.bytes > 1e4
    assert {c.count for c in shardy.collectives} == {1, 4}
    assert cpu.memory["arguments"] > 0
    assert cpu.flops > 0


@pytest.mark.parametrize("target", sample(["shardy", "cpu"], ["shardy"]))
def test_a_gather_of_one_value_in_the_forward_and_in_the_backward_pass_counts_twice(target: str) -> None:
    """They are programs of their own, which share no reshards."""
    model, cluster = zoo.build("bert-toy"), Cluster.preset("dgx-h100")
    plan = autopar.plan(model.step, *model.abstract_args(), mesh=(2, 4), cluster=cluster, stages=2, offload="all")
    gathers = Counter(c.source for c in plan.stages[0].collectives if c.kind == "all-gather")
    report = autopar.verify(plan, model.step, *model.abstract_args(), target=target)
    assert report.ok, str(report)
    assert report.mismatches == ()
    assert gathers["nn.py:25"] >= 2, gathers


def test_stages_on_more_devices_than_are_here_are_verified_without_devices() -> None:
    plan = in_stages((4, 16))
    report = autopar.verify(plan, step, PARAMS, BATCH, target="shardy")
    assert report.ok, str(report)
    assert report.bytes > 0
    with pytest.raises(MeshError, match=r"needs 64 devices for mesh \(4, 16\) with target 'cpu', 8 are here"):
        autopar.verify(plan, step, PARAMS, BATCH)


@pytest.mark.parametrize("target", NEEDS)
def test_stages_are_compiled_for_devices_that_are_not_here(target: str) -> None:
    skip_without_compiler(target)
    model, cluster = zoo.build("gpt-toy"), Cluster.preset("tpu-v5e", topology="2x4")
    plan = autopar.plan(model.step, *model.abstract_args(), mesh=(2, 4), cluster=cluster, stages=2, num_microbatches=4)
    report = autopar.verify(plan, model.step, *model.abstract_args(), target=target)
    assert report.ok, str(report)
    assert report.bytes > 1e4
    assert report.memory["arguments"] > 0


def test_a_collective_that_the_plan_of_a_stage_lacks_is_told_with_its_line() -> None:
    plan = in_stages((2, 4))
    first, second = plan.stages
    missing = max((c for c in second.collectives if c.source), key=lambda c: c.bytes)
    changed = replace(second, collectives=tuple(c for c in second.collectives if c is not missing))
    report = autopar.verify(replace(plan, stages=(first, changed)), step, PARAMS, BATCH, target="shardy")
    assert not report.ok
    (line,) = report.mismatches
    assert line.startswith(f"emitted but not predicted: {missing.count} x {missing.kind} over {'+'.join(missing.axes)}")
    assert "at test_verify_stages.py:" in line


def test_what_a_pass_makes_of_a_value_that_microbatches_share_is_moved_in_every_microbatch() -> None:
    """The bias is made once per step, and its group runs once; its transpose is a value of each pass."""
    plan = in_stages((2, 4))
    moved = [c for stage in plan.stages for c in stage.collectives if c.kind == "all-to-all" and "in1" in c.op]
    assert moved
    assert {c.count for c in moved} == {4}


@pytest.mark.parametrize("target", sample(["shardy", "cpu"], ["cpu"]))
def test_what_a_recomputed_block_gathers_is_gathered_in_every_microbatch(target: str) -> None:
    """Weights enter the block in their own layout, and their copies are made inside of it, pass by pass."""

    @jax.checkpoint
    def block(weights: Any, x: Any) -> Any:
        return x + (jax.nn.silu(x @ weights["gate"]) * (x @ weights["up"])) @ weights["down"]

    def step(params: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            out = x
            for weights in params:
                out = block(weights, out)
            return jnp.mean((out - y) ** 2)

        return sgd(params, jax.grad(loss)(params))

    weights = {"gate": array(64, 256), "up": array(64, 256), "down": array(256, 64)}
    args = ([weights] * 4, array(256, 64), array(256, 64))
    plan = autopar.plan(step, *args, mesh=(2, 4), cluster=dear((2, 4)), stages=2, num_microbatches=4)
    assert any(c.count == 4 for stage in plan.stages for c in stage.collectives)
    report = autopar.verify(plan, step, *args, target=target)
    assert report.ok, str(report)
    assert report.mismatches == ()
    assert report.bytes == pytest.approx(report.comparison.predicted_wire_bytes)


@pytest.mark.parametrize("target", ["shardy", "cpu"])
@pytest.mark.parametrize("mesh", sample([(2, 4), (8,)], [(8,)]))
def test_results_of_each_example_are_joined_as_the_plan_says(mesh: tuple[int, ...], target: str) -> None:
    """The microbatches' parts are cut by examples, and so is the whole, in other pieces."""

    def step(params: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            out = jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) @ params["c"]
            return jnp.mean((out - y) ** 2), out

        (value, out), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return sgd(params, grads), value, out, out.sum(1)

    args = ({key: array(16, 16) for key in "abc"}, array(64, 16), array(64, 16))
    plan = autopar.plan(step, *args, mesh=mesh, cluster=dear(mesh), stages=2, num_microbatches=2)
    report = autopar.verify(plan, step, *args, target=target)
    assert report.ok, str(report)
    assert report.mismatches == ()
    assert report.bytes == pytest.approx(report.comparison.predicted_wire_bytes)
    assert any(c.kind == "all-to-all" and c.count == 1 for c in plan.stages[1].collectives), "the parts are joined"


@pytest.mark.parametrize("width", [6, 22])
def test_arrays_between_programs_are_planned_in_even_pieces(width: int) -> None:
    """Four devices divide no hidden dimension here: an uneven array between two passes would be gathered."""

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            hidden = jnp.tanh(jnp.tanh(batch["x"] @ params["a"]) @ params["b"])
            return jnp.mean((jnp.sin(hidden @ params["c"]) - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return sgd(params, grads), value

    args = (
        {"a": array(16, width), "b": array(width, width), "c": array(width, 4)},
        {"x": array(8, 16), "y": array(8, 4)},
    )
    plan = autopar.plan(step, *args, mesh=(2, 4), cluster=dear((2, 4)), stages=2)
    report = autopar.verify(plan, step, *args, target="cpu")
    assert plan.collectives
    assert report.ok, report
    assert report.comparison.ratio == pytest.approx(1)
