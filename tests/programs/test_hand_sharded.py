"""Steps with a `shard_map` of the user's: equal to one device, and what they send is in the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.cost_models.collectives import collective_time
from autopar.hardware.cluster import Cluster
from autopar.ir.graph import UNKNOWN_TRIPS
from tests.programs.hand_sharded import CASES, LAYERS, WIDTH, Case, array, train_step
from tests.programs.test_real_programs import assert_equal

MESHES = {"8": ((8,), ("model",)), "2x4": ((2, 4), ("data", "model"))}


def mesh_of(sizes: Sequence[int], names: Sequence[str]) -> Mesh:
    return jax.make_mesh(tuple(sizes), tuple(names), axis_types=(AxisType.Auto,) * len(names))


@pytest.fixture(scope="module", params=[(m, c) for m in MESHES for c in CASES], ids="-".join)
def case(request: pytest.FixtureRequest) -> Case:
    mesh, name = request.param
    return CASES[name](mesh_of(*MESHES[mesh]))


def test_steps_sharded_by_hand_equal_those_of_one_device(case: Case) -> None:
    by_hand, whole, params, batch = case
    got = autopar.parallelize(train_step(by_hand), donate_argnums=())(params, batch)
    assert_equal(got, jax.jit(train_step(whole))(params, batch))


def test_what_a_body_sends_is_predicted_and_emitted(case: Case) -> None:
    by_hand, _, params, batch = case
    step = train_step(by_hand)
    plan = autopar.plan(step, params, batch)
    report = autopar.verify(plan, step, params, batch)
    assert report.ok, str(report)
    assert report.bytes == report.comparison.predicted_wire_bytes > 0
    assert not report.uncounted
    sources = {c.source.partition(":")[0] for c in plan.collectives}
    assert "hand_sharded.py" in sources


@pytest.mark.parametrize("name", ["megatron", "fsdp", "experts"])
def test_shardy_alone_counts_what_a_body_sends_on_a_mesh_without_devices(name: str) -> None:
    by_hand, _, params, batch = CASES[name](mesh_of(*MESHES["2x4"]))
    step = train_step(by_hand)
    plan = autopar.plan(step, params, batch)
    report = autopar.verify(plan, step, params, batch, target="shardy")
    assert report.ok, str(report)
    assert report.bytes == report.comparison.predicted_wire_bytes


def test_loops_in_a_body_multiply_what_it_sends_and_what_it_takes() -> None:
    """FSDP by hand: a gather per layer forward; backward one more to make it again or its transpose, a scatter."""
    by_hand, _, weights, batch = CASES["fsdp"](mesh_of(*MESHES["8"]))
    plan = autopar.plan(by_hand, weights, batch, cluster="dgx-h100")
    (gather,) = [c for c in plan.collectives if c.kind == "all-gather"]
    assert (gather.axes, gather.bytes, gather.count) == (("model",), 4 * WIDTH * WIDTH, LAYERS)
    mesh = Cluster.preset("dgx-h100").logical_mesh((8,), ("model",))
    spent = sum(row.seconds for row in plan.spent if row.kind == "communication" and row.source == gather.source)
    assert spent == pytest.approx(LAYERS * collective_time("all-gather", gather.bytes, (0,), mesh))
    assert sum(row.seconds for row in plan.spent) == pytest.approx(plan.step_time_s)


def test_work_and_memory_of_a_body_are_those_of_one_device() -> None:
    mesh = mesh_of(*MESHES["8"])
    w = jnp.zeros((512, 512))

    @jax.shard_map(mesh=mesh, in_specs=(P("model"), P()), out_specs=P("model"))
    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) @ w

    plan = autopar.plan(chain, jnp.zeros((1024, 512)), w)
    report = autopar.verify(plan, chain, jnp.zeros((1024, 512)), w)
    assert plan.flops_per_device == pytest.approx(report.flops, rel=0.01)
    needed = sum(report.memory[kind] for kind in ("arguments", "results", "temporaries")) - report.memory["aliased"]
    assert plan.stages[0].peak_memory_bytes == pytest.approx(needed, rel=0.1)


def test_specs_are_pins_and_the_rest_is_planned_around_them() -> None:
    mesh = mesh_of(*MESHES["2x4"])
    mapped = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("model", "data"), out_specs=P("model", "data"))
    plan = autopar.plan(mapped, jnp.zeros((8, 8)))
    assert plan.mesh == {"data": 2, "model": 4}
    assert plan.in_specs() == plan.out_specs() == (P("model", "data"),)


@pytest.mark.parametrize("mesh", [None, (2, 4), {"data": 2, "model": 4}, "its own"], ids=str)
def test_the_planned_mesh_is_that_of_the_shard_map(mesh: Any) -> None:
    own = mesh_of(*MESHES["2x4"])
    mapped = jax.shard_map(lambda x: lax.psum(x, "model"), mesh=own, in_specs=P("data", "model"), out_specs=P("data"))
    plan = autopar.plan(mapped, jnp.zeros((8, 8)), mesh=own if mesh == "its own" else mesh)
    assert plan.mesh == {"data": 2, "model": 4}


def test_another_order_of_devices_changes_nothing() -> None:
    """The step runs on the devices of the plan, whatever those of the mesh that it was written for."""
    backwards = Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("data", "model"))
    by_hand, whole, params, batch = CASES["megatron"](backwards)
    step = autopar.parallelize(train_step(by_hand), mesh=(2, 4), donate_argnums=())
    assert_equal(step(params, batch), jax.jit(train_step(whole))(params, batch))


def test_axes_that_are_not_manual_do_the_same_and_a_note_says_so() -> None:
    mesh = mesh_of(*MESHES["2x4"])

    @jax.shard_map(mesh=mesh, in_specs=(P(), P(None, "model")), out_specs=P(None, "model"), axis_names={"model"})
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    x, w = array(0, 16, WIDTH), array(1, WIDTH, WIDTH)
    step = autopar.parallelize(product)
    np.testing.assert_allclose(step(x, w), x @ w, rtol=1e-5)
    (note,) = step.plan(x, w).notes
    assert "is manual over model: devices along data all do the same" in note
    assert autopar.verify(step.plan(x, w), product, x, w).ok


def test_one_in_a_loop_and_under_remat_runs_as_often_as_they_do() -> None:
    mesh = mesh_of(*MESHES["8"])
    summed = jax.shard_map(lambda x: lax.psum(x, "model"), mesh=mesh, in_specs=P("model"), out_specs=P())

    def looped(x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x: jnp.tanh(x + jnp.sin(summed(x)).sum()))
        return lax.scan(lambda x, _: (layer(x), None), x, length=3)[0].sum()

    x = array(0, 64)
    step = jax.value_and_grad(looped)
    plan = autopar.plan(step, x)
    report = autopar.verify(plan, step, x)
    assert report.ok, str(report)
    assert 3 in {c.count for c in plan.collectives}
    whole = jax.value_and_grad(
        lambda x: lax.scan(lambda x, _: (jnp.tanh(x + jnp.sin(x.reshape(8, 8).sum(0)).sum()), None), x, length=3)[
            0
        ].sum()
    )
    assert_equal(autopar.parallelize(step, donate_argnums=())(x), jax.jit(whole)(x))


def test_plans_of_other_bodies_are_other_plans() -> None:
    """A plan has the collectives of a body, so that one for another body does not fit."""
    mesh, x = mesh_of(*MESHES["8"]), jnp.zeros(64)

    def mapped(body: Callable[[jax.Array], jax.Array]) -> Any:
        return jax.shard_map(body, mesh=mesh, in_specs=P("model"), out_specs=P("model"))

    plan = autopar.plan(mapped(lambda x: x * 2), x)
    with pytest.raises(autopar.PlanMismatchError):
        autopar.verify(plan, mapped(lambda x: lax.ppermute(x, "model", [(0, 1), (1, 0)])), x)


def test_bodies_are_lowered_for_other_kinds_of_devices() -> None:
    """Types in a body name the kind of device that it was traced for."""
    by_hand, _, params, batch = CASES["ring"](mesh_of(*MESHES["2x4"]))
    step = train_step(by_hand)
    plan = autopar.plan(step, params, batch)
    report = autopar.verify(plan, step, params, batch, target="shardy")
    turns = [c for c in report.collectives if c.kind == "collective-permute"]
    assert turns == [c for c in plan.collectives if c.kind == "collective-permute"] != []


def test_loops_of_unknown_length_in_a_body_are_priced_and_compared_alike() -> None:
    mesh = mesh_of(*MESHES["8"])

    @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P("model"))
    def turned(x: jax.Array) -> jax.Array:
        turn = [(i, (i + 1) % 8) for i in range(8)]
        going = lambda x: lax.psum(x.sum(), "model") < 100  # noqa: E731
        return lax.while_loop(going, lambda x: lax.ppermute(x, "model", turn) + 1, x)

    x = jnp.zeros((8, 8))
    plan = autopar.plan(turned, x)
    assert {c.count for c in plan.collectives} == {UNKNOWN_TRIPS}
    report = autopar.verify(plan, turned, x)
    assert report.ok, str(report)
    np.testing.assert_array_equal(autopar.parallelize(turned)(x), jax.jit(turned)(x))
