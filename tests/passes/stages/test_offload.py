"""`offload=` with stages: the update program of a stage takes its state from host memory and returns it there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar import jax_compat
from autopar.errors import ArgumentError, MemoryBudgetError, PlanMismatchError
from autopar.hardware.cluster import Cluster
from autopar.plans.plan import Plan, from_json
from tests.support.effort import examples

CLUSTER = Cluster.preset("dgx-h100")
OPTIONS: dict[str, Any] = {"mesh": (8,), "cluster": CLUSTER, "stages": 2, "num_microbatches": 2}
LAYERS, WIDTH = 2, 16
IN_HOST_MEMORY = [f"state/{name}/{layer}" for name in ("average", "momentum") for layer in range(LAYERS)]


@pytest.fixture(scope="module", autouse=True)
def doubles() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def init(key: jax.Array) -> Any:
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / 4 for k in jax.random.split(key, LAYERS)]
    copies = {
        name: [w.copy() for w in params] for name in ("params", "momentum", "average", "read forward", "returned twice")
    }
    return {**copies, "count": jnp.zeros((), jnp.int32)}


def step(state: Any, batch: Any) -> Any:
    """Gradients clipped by the norm of all layers, momentum, and three averages of the parameters."""

    def loss(params: Any) -> Any:
        x, shadow = batch["x"], batch["x"]
        for w, average in zip(params, state["read forward"], strict=True):
            x, shadow = jnp.tanh(x @ w), jnp.tanh(shadow @ average)
        return jnp.mean((x - batch["y"]) ** 2), jnp.mean((shadow - batch["y"]) ** 2)

    (value, of_average), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads))
    momentum = [0.9 * m + g / jnp.maximum(norm, 1.0) for m, g in zip(state["momentum"], grads, strict=True)]
    params = [w - 0.1 * m for w, m in zip(state["params"], momentum, strict=True)]

    def averaged(name: str) -> Any:
        return [0.9 * a + 0.1 * w for a, w in zip(state[name], params, strict=True)]

    twice = averaged("returned twice")
    new: dict[str, Any] = {"params": params, "momentum": momentum, "count": state["count"] + 1}
    new |= {"average": averaged("average"), "read forward": averaged("read forward"), "returned twice": twice}
    return new, (value, of_average, norm, twice)


def arguments() -> Any:
    keys = jax.random.split(jax.random.key(1))
    return init(jax.random.key(0)), {n: jax.random.normal(k, (8, WIDTH)) for n, k in zip("xy", keys, strict=True)}


def planned(**options: Any) -> Plan:
    return autopar.plan(step, *jax.eval_shape(arguments), **{**OPTIONS, **options})


def kinds(tree: Any) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def needs_host_memory() -> None:
    if jax_compat.HOST_MEMORY not in (here := jax_compat.memory_kinds(jax.devices()[0])):
        pytest.skip(f"{jax.devices()[0].platform} devices of JAX {jax.__version__} have no pinned_host, only {here}")


def assert_equal(ours: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(autopar.gather(ours)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


def test_all_is_what_the_update_alone_reads_and_no_result_is_besides() -> None:
    plan, on_device = planned(offload="all"), planned()
    assert sorted(plan.input_paths[i] for i in plan.offloaded) == IN_HOST_MEMORY
    assert on_device.offloaded == ()
    assert [s.host_memory_bytes for s in on_device.stages] == [0, 0]
    moved = 2 * 8 * WIDTH * WIDTH / 4  # of each stage's layer, on each of its four devices
    assert [s.host_memory_bytes for s in plan.stages] == [moved, moved]
    for with_host, without in zip(plan.stages, on_device.stages, strict=True):
        assert without.memory["state"] - with_host.memory["state"] >= moved


def test_copies_are_in_the_seconds_of_the_update() -> None:
    plan, on_device = planned(offload="all"), planned()
    copied = [2 * s.host_memory_bytes / CLUSTER.device.host_bandwidth for s in plan.stages]
    for with_host, without, seconds in zip(plan.stages, on_device.stages, copied, strict=True):
        assert with_host.seconds["once"] == pytest.approx(without.seconds["once"] + seconds)
        assert with_host.seconds["F"] == without.seconds["F"]
    assert plan.parts["host"] == pytest.approx(max(copied))
    assert sum(plan.parts.values()) == pytest.approx(plan.step_time_s)
    assert "host" not in on_device.parts


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_steps_equal_one_device_and_state_stays_in_host_memory(schedule: Any, tmp_path: Path) -> None:
    needs_host_memory()
    state, batch = arguments()
    parallel = autopar.parallelize(step, **OPTIONS, offload="all", schedule=schedule)
    sharded, copied, expected = parallel.init(init, jax.random.key(0)), jax.tree.map(jnp.copy, state), state
    plan = parallel.plan(state, batch)
    for _ in range(2):
        expected, metrics = jax.jit(step)(expected, batch)
        sharded, seen = parallel(sharded, batch)
        copied, again = parallel(copied, batch)
        assert_equal((sharded, seen), (expected, metrics))
        assert_equal((copied, again), (expected, metrics))
        assert kinds((sharded["momentum"], sharded["average"], copied["momentum"])) == {"pinned_host"}
        assert kinds((sharded["params"], sharded["read forward"], sharded["returned twice"], seen)) == {"device"}
    assert "in host memory" in plan.summary()
    assert any(note.startswith("kept in host memory between steps") for note in plan.notes)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    loaded = autopar.parallelize(step, plan=tmp_path / "plan.json", cluster=CLUSTER)
    again, _ = loaded(state, batch)
    assert_equal(again, jax.jit(step)(state, batch)[0])
    assert kinds(again["momentum"]) == {"pinned_host"}


def test_the_compiled_programs_communicate_as_planned() -> None:
    needs_host_memory()
    for target in ("shardy", "cpu"):
        assert autopar.verify(planned(offload="all"), step, *arguments(), target=target).ok


@pytest.mark.parametrize("path", ["state/params/0", "state/read forward/0", "state/returned twice/0", "batch/x"])
def test_a_plan_with_other_arguments_in_host_memory_is_refused(path: str) -> None:
    plan = planned()
    data = {**json.loads(plan.to_json()), "offloaded": [plan.input_paths.index(path)]}
    with pytest.raises(PlanMismatchError, match=f"'offloaded' is '{path}', expected state that may wait in the host's"):
        autopar.parallelize(step, plan=from_json(data), cluster=CLUSTER).plan(*arguments())


def test_devices_without_such_memory_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(offload="all")
    monkeypatch.setattr(jax_compat, "memory_kinds", lambda device: ("device",))
    with pytest.raises(ArgumentError, match=r"'pinned_host'; those here have 'device'. Use offload='auto' or 'none'"):
        autopar.parallelize(step, **OPTIONS, offload="all").plan(*arguments())
    with pytest.raises(PlanMismatchError, match=r"the devices here have 'device'. Plan again"):
        autopar.parallelize(step, plan=plan, cluster=CLUSTER).plan(*arguments())


def test_a_cluster_that_knows_of_no_link_is_left_alone() -> None:
    bare = Cluster.custom((8,), 1e-6, 1e-11, {"float64": 1e12}, 1e12, 2**34)
    assert planned(cluster=bare, memory_budget="min").offloaded == ()
    with pytest.raises(ArgumentError, match="offload='all': nothing is known of a link between custom device"):
        planned(cluster=bare, offload="all")


# Chosen where memory is short


@cache
def least(offload: str, remat: str = "auto") -> Plan:
    return planned(memory_budget="min", offload=offload, remat=remat)


def test_nothing_is_offloaded_where_everything_fits() -> None:
    free = planned(offload="none")
    assert planned(memory_budget=free.peak_memory_bytes).stages == free.stages


def test_the_least_peak_is_that_of_state_and_layers() -> None:
    assert {*planned(offload="all").offloaded} <= {*least("auto").offloaded}
    assert least("auto").peak_memory_bytes < least("none").peak_memory_bytes <= least("none", "none").peak_memory_bytes
    assert least("none").offloaded == ()
    assert "full" not in least("none", "none").remat


@cache
def too_little() -> tuple[int, Plan]:
    """A budget that no plan without offload fits into, and the plan within it."""
    budget = least("none").peak_memory_bytes - 1
    return budget, planned(memory_budget=budget)


def test_a_step_that_only_fits_with_offload_is_planned_with_it() -> None:
    budget, plan = too_little()
    with pytest.raises(MemoryBudgetError):
        planned(memory_budget=budget, offload="none")
    assert plan.offloaded
    assert plan.peak_memory_bytes <= budget
    assert all(plan.input_paths[i] in IN_HOST_MEMORY for i in plan.offloaded)


def test_more_than_host_memory_is_not_chosen() -> None:
    small = replace(CLUSTER, device=replace(CLUSTER.device, host_memory_bytes=1))
    assert planned(cluster=small, memory_budget="min").offloaded == ()


@settings(max_examples=examples(4), derandomize=True)
@given(share=st.floats(0, 1))
def test_no_budget_is_exceeded_and_offload_never_makes_a_plan_slower(share: float) -> None:
    smallest = least("auto").peak_memory_bytes
    budget = int(smallest + share * (planned().peak_memory_bytes - smallest))
    plan = planned(memory_budget=budget)
    assert plan.peak_memory_bytes <= budget
    with suppress(MemoryBudgetError):
        without = planned(memory_budget=budget, offload="none")
        assert plan.step_time_s <= without.step_time_s


def test_a_plan_chosen_within_a_budget_equals_one_device() -> None:
    needs_host_memory()
    _, plan = too_little()
    results = autopar.parallelize(step, plan=plan, cluster=CLUSTER)(*arguments())
    assert_equal(results, jax.jit(step)(*arguments()))
    assert "pinned_host" in kinds(results[0])
