"""Names that users give: of clusters, of schedules; what is near a wrong one."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import ArgumentError, ClusterError, MemoryBudgetError, PinError

ARGS = {"up": jax.ShapeDtypeStruct((64, 64), jnp.float32)}, jax.ShapeDtypeStruct((32, 64), jnp.float32)


def step(w, x):
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(lambda w: jnp.sum((x @ w["up"]) ** 2))(w))


@pytest.mark.parametrize(
    ("name", "mesh", "devices"),
    [
        ("dgx-h100", (4, 8), 32),
        ("dgx-h100", {"data": 2, "model": 4}, 8),
        ("dgx-h100:2", None, 16),
        ("dgx-h100", None, 8),
    ],
)
def test_a_cluster_by_its_name(name, mesh, devices):
    plan = autopar.plan(step, *ARGS, cluster=name, mesh=mesh, stages=1)
    assert (plan.cluster, plan.stages[0].devices) == ("dgx-h100", devices)


def test_a_cluster_by_its_file(tmp_path):
    path = tmp_path / "here.toml"
    autopar.Cluster.preset("tpu-v5e").save(str(path))
    assert autopar.plan(step, *ARGS, cluster=str(path), stages=1).cluster == "tpu-v5e"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cluster": "dgx-h10"}, ClusterError, "Known presets: .*dgx-h100"),
        ({"cluster": "dgx-h100:none"}, ClusterError, "such as 'dgx-h100:4'"),
        ({"cluster": "dgx-h100:0"}, ClusterError, "such as 'dgx-h100:4'"),
        ({"cluster": 8}, ArgumentError, "or the name of one, such as 'dgx-h100'"),
        ({"memory_budget": 12, "mesh": (2,)}, MemoryBudgetError, "fit: a unit, if bytes were not meant: '12GiB'"),
        ({"memory_budget": "12", "mesh": (2,)}, MemoryBudgetError, "fit: a unit, if bytes were not meant: '12GiB'"),
        ({"memory_budget": 12, "stages": 2}, MemoryBudgetError, "fit: a unit, if bytes were not meant: '12GiB'"),
        ({"pins": {"w/upp": P("x")}, "mesh": (2,)}, PinError, "matches no argument; the nearest: w/up"),
    ],
)
def test_a_wrong_one_says_what_would_be_right(options, error, message):
    with pytest.raises(error, match=message):
        autopar.plan(step, *ARGS, **options)


def test_a_schedule_in_any_case():
    plan = autopar.plan(step, *ARGS, mesh=(2,), stages=2, num_microbatches=2, schedule="GPipe")
    assert plan.schedule == "gpipe"


@pytest.mark.parametrize("options", [{"mesh": (2,)}, {"stages": 2, "mesh": (2,)}])
def test_a_budget_as_a_share_of_the_memory_of_a_device(options):
    cluster = autopar.Cluster.preset("dgx-h100").part(0, 2)
    half = cluster.device.memory_bytes / 2
    plan = autopar.plan(step, *ARGS, cluster=cluster, memory_budget="50 %", **options)
    assert plan.memory_limit_bytes == half
    given = autopar.plan(step, *ARGS, cluster=cluster, memory_budget=half, **options)
    assert replace(plan, phases={}) == replace(given, phases={})
    assert plan.what_if(memory_budget="25%").after.memory_limit_bytes == half / 2
    if "stages" not in options:
        assert plan.explain("w/up").entries[0].alternatives
    tiny = f"{100 * plan.peak_memory_bytes / 8 / cluster.device.memory_bytes:.12f}%"
    with pytest.raises(MemoryBudgetError):
        autopar.plan(step, *ARGS, cluster=cluster, memory_budget=tiny, **options)


@pytest.mark.parametrize("options", [{"mesh": (2,)}, {"stages": 2, "mesh": (2,)}, {"stages": "search"}])
@pytest.mark.parametrize("budget", [math.inf, "99999999TiB"])
def test_a_budget_above_all_memory_bounds_nothing(options, budget, tmp_path):
    cluster = autopar.Cluster.preset("dgx-h100").part(0, 2)
    plan = autopar.plan(step, *ARGS, cluster=cluster, memory_budget=budget, **options)
    free = autopar.plan(step, *ARGS, cluster=cluster, **options)
    assert (plan.stages, plan.inputs) == (free.stages, free.inputs)
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("budget", ["0%", "101%", "%", "80 percent"])
def test_a_share_is_of_what_there_is(budget):
    with pytest.raises(ArgumentError, match="'80%' of a device's memory"):
        autopar.plan(step, *ARGS, mesh=(2,), memory_budget=budget)
