"""Stages, submeshes, microbatches and schedule are searched where nothing says what they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import zoo
from autopar.cost_models.memory.lower_bound import written_bytes
from autopar.errors import (
    MemoryBudgetError,
    ScheduleError,
)
from autopar.hardware.cluster import Cluster
from autopar.ir.trace import trace
from tests.programs.test_real_programs import assert_equal


@pytest.fixture(scope="module", autouse=True)
def doubles() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def apart() -> Cluster:
    """Two hosts of four slow devices with a slow link between them."""
    slow = Cluster.custom((2, 4), (1e-6, 1e-6), (1e-7, 1e-12), {"float32": 1e9, "float64": 1e9}, 1e10, 10**9)
    return replace(slow, hosts=2, devices_per_host=4)


def test_a_searched_pipeline_computes_the_step_and_comes_back_from_disk(apart: Cluster, tmp_path: Path) -> None:
    small = zoo.build("mlp-toy", layers=4, batch=16, dtype="float64")
    batch = small.make_batch(jax.random.key(1))
    step = autopar.parallelize(small.step, cluster=apart, num_microbatches=8)
    plan = step.plan(*small.abstract_args())
    assert len(plan.stages) >= 2
    assert plan.num_microbatches == 8
    assert sum(stage.devices for stage in plan.stages) == 8
    assert len({tuple(stage.submesh) for stage in plan.stages}) == 1
    plan.save(tmp_path / "plan.json")
    again = autopar.parallelize(small.step, cluster=apart, plan=tmp_path / "plan.json")
    assert again.plan(*small.abstract_args()).stages == plan.stages
    init = jax.jit(small.init)
    trained, other, alone = (init(jax.random.key(0)) for _ in range(3))
    for _ in range(2):
        trained, _ = step(trained, batch)
        other, _ = again(other, batch)
        alone, _ = jax.jit(small.step)(alone, batch)
    assert_equal(trained, alone)
    assert_equal(other, alone)


def adversaries(state: Any, batch: Any) -> Any:
    """Two models, the second of which is trained against the first as the first has just been trained."""

    def run(w: Any, x: Any) -> jax.Array:
        for up, down in w:
            x = x + jnp.tanh(x @ up) @ down
        return x

    def against(other: Any, w: Any) -> jax.Array:
        return jnp.mean(run(other, run(w, batch["z"])) ** 2)

    def apart_from(w: Any) -> jax.Array:
        return jnp.mean((run(w, batch["x"]) - 1) ** 2) + against(w, state["g"])

    def trained(w: Any, grads: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g / (1 + jnp.abs(g)), w, grads)

    first, grads = jax.value_and_grad(apart_from)(state["d"])
    d = trained(state["d"], grads)
    second, grads = jax.value_and_grad(lambda w: against(d, w))(state["g"])
    return {"d": d, "g": trained(state["g"], grads)}, (first, second)


@pytest.fixture(scope="module")
def two_models(doubles: None) -> tuple[Any, Any]:
    weights = [[jax.random.normal(jax.random.key(i), shape) / 4 for shape in ((8, 16), (16, 8))] for i in range(4)]
    return {"d": weights[:2], "g": weights[2:]}, {"x": jnp.ones((8, 8)), "z": jnp.full((8, 8), 0.5)}


def test_two_backward_passes_run_in_stages_in_one_microbatch(two_models: tuple[Any, Any]) -> None:
    """The update of the first model reads sums of gradients of several stages inside the loop."""
    step = autopar.parallelize(adversaries, mesh=(4,), stages=2, donate_argnums=())
    assert step.plan(*two_models).num_microbatches == 1
    assert_equal(step(*two_models), jax.jit(adversaries)(*two_models))


@pytest.mark.parametrize("options", [{}, {"num_microbatches": 2}, {"num_microbatches": 2, "schedule": "1f1b"}])
def test_two_backward_passes_are_searched_on_one_mesh(
    two_models: tuple[Any, Any], apart: Cluster, options: dict[str, Any]
) -> None:
    plan = autopar.plan(adversaries, *two_models, cluster=apart, **options)
    assert (len(plan.stages), plan.num_microbatches) == (1, options.get("num_microbatches", 1))


def test_one_host_is_searched_only_when_asked(apart: Cluster) -> None:
    small = zoo.build("mlp-toy", batch=8, dtype="float32")
    single_host = replace(apart, hosts=1, axis_levels=apart.levels[1:])
    assert len(autopar.plan(small.step, *small.abstract_args(), cluster=single_host).stages) == 1
    searched = autopar.plan(small.step, *small.abstract_args(), cluster=single_host, stages="search")
    assert sum(stage.devices for stage in searched.stages) == 4


def test_one_host_is_searched_where_a_step_is_far_too_large(apart: Cluster) -> None:
    """A 32nd of what the step needs as written is enough in microbatches; a budget by order is for one mesh alone."""
    large = zoo.build("gpt-toy", layers=1, batch=256, seq=32)
    args = large.abstract_args()
    single_host = replace(apart, hosts=1, axis_levels=apart.levels[1:])
    nbytes = written_bytes(trace(large.step, *args).graph) / 4 / 32
    little = replace(single_host, device=replace(single_host.device, memory_bytes=int(nbytes / 0.9)))
    assert autopar.plan(large.step, *args, cluster=single_host).num_microbatches == 1
    plan = autopar.plan(large.step, *args, cluster=little)
    assert plan.num_microbatches > 1
    assert max(stage.peak_memory_bytes for stage in plan.stages) <= nbytes
    with pytest.raises(MemoryBudgetError):
        autopar.plan(large.step, *args, cluster=little, memory_budget=nbytes / 4)


def test_couplings_of_the_batch_leave_one_microbatch() -> None:
    norm = zoo.build("wresnet-toy", dtype="float32")
    two = Cluster.custom((2, 1), (1e-6, 1e-6), (1e-7, 1e-12), {"float32": 1e9}, 1e10, 10**9)
    cluster = replace(two, hosts=2, devices_per_host=1)
    plan = autopar.plan(norm.step, *norm.abstract_args(), cluster=cluster, time_limit=60.0)
    assert plan.num_microbatches == 1
    assert len(plan.stages) == 1 or any("one microbatch" in note for note in plan.notes)


def test_a_searched_plan_is_kept(apart: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    small = zoo.build("mlp-toy", batch=8, dtype="float32")
    options: dict[str, Any] = {"cluster": apart, "num_microbatches": 4}
    first = autopar.plan(small.step, *small.abstract_args(), **options)
    again = autopar.plan(small.step, *small.abstract_args(), **options)
    assert "cache" in again.phases
    assert replace(again, phases={}).to_json() == replace(first, phases={}).to_json()
    other = autopar.plan(small.step, *small.abstract_args(), **{**options, "num_microbatches": 2})
    assert "cache" not in other.phases


def test_a_schedule_of_several_stages_per_submesh_is_not_searched(apart: Cluster) -> None:
    small = zoo.build("mlp-toy", batch=8, dtype="float32")
    with pytest.raises(ScheduleError, match=r"schedule='interleaved-1f1b' is not searched .* give stages=2"):
        autopar.plan(small.step, *small.abstract_args(), cluster=apart, schedule="interleaved-1f1b")
