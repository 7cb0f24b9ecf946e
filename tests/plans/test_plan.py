"""Plans as artefacts: text that is the same for the same plan, read back equal, and bound to one program."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import ArgumentError, PlanMismatchError
from autopar.hardware.cluster import Cluster
from autopar.ir.graph import graph_hash
from autopar.ir.trace import trace
from autopar.plans.plan import Plan, check_matches, from_json
from tests.programs.steps import array, loss, sgd, two_layers

ARGS = two_layers(), array(16, 8)


def step(params: Any, x: jax.Array) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x)
    return sgd(params, grads), value


CLUSTER = Cluster.preset("dgx-h100").without_overlap()


@pytest.fixture(scope="module")
def plan() -> Plan:
    pins = {"params/up": P(None, "model"), "params/down": P("model"), "x": P("data")}
    return autopar.plan(step, *ARGS, mesh={"data": 2, "model": 4}, pins=pins, cluster=CLUSTER)


@pytest.mark.core
def test_text_and_back(plan: Plan) -> None:
    text = plan.to_json()
    assert from_json(json.loads(text)) == plan
    assert from_json(json.loads(text)).to_json() == text
    assert {*json.loads(text), "origin"} == Plan.__dataclass_fields__.keys()


@pytest.mark.parametrize("options", [{"mesh": {"model": 4, "data": 2}}, {"mesh": {"p": 2, "a": 4}, "stages": 2}])
def test_a_loaded_plan_prints_as_the_saved_one(options: Any) -> None:
    saved = autopar.plan(step, *ARGS, cluster=CLUSTER, **options)
    loaded = from_json(json.loads(saved.to_json()))
    for view in (Plan.summary, Plan.time, Plan.memory):
        assert str(view(loaded)) == str(view(saved))


def test_a_plan_is_pickled_without_its_step_and_copied_with_it(plan: Plan) -> None:
    sent = pickle.loads(pickle.dumps(plan))
    assert sent == plan
    assert sent.origin is None
    assert copy.deepcopy({"plan": plan})["plan"].origin is plan.origin is not None


def test_planning_twice_gives_the_same_text(plan: Plan) -> None:
    pins = {"params/up": P(None, "model"), "params/down": P("model"), "x": P("data")}
    again = autopar.plan(step, *ARGS, mesh={"data": 2, "model": 4}, pins=pins, cluster=CLUSTER)
    assert replace(again, phases={}).to_json() == replace(plan, phases={}).to_json()


def test_leaves_of_the_same_path_have_shardings_by_tree_alone() -> None:
    args = ({"a/b": array(16, 8), "a": {"b": array(8, 16)}},)
    pinned = autopar.plan(lambda s: jax.tree.map(jnp.sin, s), *args, mesh={"x": 8}, cluster=CLUSTER)
    with pytest.raises(ArgumentError, match=r"2 leaves of the arguments have the path '.*a/b'. Pass the tuple of all"):
        pinned.shardings()
    assert len(jax.tree.leaves(pinned.shardings(args), is_leaf=lambda x: isinstance(x, P))) == 2
    assert str(pinned.diff(pinned))


def test_specs_follow_the_pins(plan: Plan) -> None:
    assert plan.shardings() == {"params/down": P("model"), "params/up": P(None, "model"), "x": P("data")}
    assert plan.in_specs() == (P("model"), P(None, "model"), P("data"))
    assert plan.out_specs() == (P("model"), P(None, "model"), P())
    assert plan.input_types == ("f32[32,8]", "f32[8,32]", "f32[16,8]")
    text = str(plan.explain("params/*"))
    assert "params/down: f32[32,8] as P('model')" in text
    assert "params/up: f32[8,32] as P(None, 'model')" in text


def test_shardings_in_the_shape_of_a_tree(plan: Plan) -> None:
    assert plan.shardings(ARGS) == ({"down": P("model"), "up": P(None, "model")}, P("data"))
    assert plan.shardings({"b": array(32, 8), "a": array(8, 32)}["b"]) == P("model")
    with pytest.raises(ArgumentError, match=r"no argument of the planned function has the 2 leaves given"):
        plan.shardings([array(3), array(4)])


def test_shardings_of_equal_shapes_that_differ_are_ambiguous() -> None:
    def track(online, target, x):
        return online - x.mean() * online, 0.9 * target + 0.1 * online

    w, pins = array(32, 32), {"online": P("model"), "target": P()}
    plan = autopar.plan(track, w, w, array(16, 32), mesh={"model": 4}, pins=pins)
    assert plan.shardings((w, w, array(16, 32)))[:2] == (P("model"), P())
    with pytest.raises(ArgumentError, match=r"1 leaves given are those from 'online' on and those from 'target' on"):
        plan.shardings(w)


def test_collectives_have_kinds_bytes_and_lines(plan: Plan) -> None:
    sums = [(c.kind, c.axes, c.bytes) for c in plan.collectives if c.kind == "all-reduce" and c.bytes > 64]
    half, rows = 32 * 8 * 4 // 4, 16 * 8 * 4 // 2
    assert sorted(sums) == sorted(
        [("all-reduce", ("model",), rows), ("all-reduce", ("data",), half), ("all-reduce", ("data",), half)]
    )
    assert all(c.source.startswith("steps.py:") for c in plan.collectives if c.bytes > 64)
    ring = sum(2 * (n - 1) / n * size for n, size in ((4, rows), (2, half), (2, half)))
    assert plan.wire_bytes() == pytest.approx(ring, abs=64)


def test_memory_counts_arguments_once(plan: Plan) -> None:
    (stage,) = plan.stages
    assert stage.memory["parameters"] == 2 * 32 * 8 * 4 // 4
    assert stage.memory["arguments"] == 16 * 8 * 4 // 2
    assert stage.peak_memory_bytes == sum(stage.memory.values())
    assert (stage.devices, stage.submesh, stage.name) == (8, {"data": 2, "model": 4}, "all")


# The program it belongs to


def hash_of(fn: Any, *args: Any) -> str:
    return graph_hash(trace(fn, *args).graph)


def test_the_hash_knows_programs_apart() -> None:
    x = array(4, 4)
    programs = [
        lambda x: jnp.sum(x, 0),
        lambda x: jnp.sum(x, 1),
        lambda x: jnp.max(x, 0),
        lambda y: jnp.sum(y, 0),
        lambda x: {"total": jnp.sum(x, 0)},
        lambda x: jnp.sum(x * 2.0, 0),
        lambda x: jnp.sum(x * 3.0, 0),
    ]
    hashes = [hash_of(fn, x) for fn in programs]
    assert len(set(hashes)) == len(programs)
    assert hashes == [hash_of(fn, x) for fn in programs]
    assert hash_of(programs[0], array(4, 4, dtype=jnp.bfloat16)) != hashes[0]


def test_the_hash_ignores_addresses() -> None:
    def fresh() -> Any:
        return lambda x: jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.nn.relu(x))

    assert hash_of(fresh(), array(4)) == hash_of(fresh(), array(4))


@pytest.mark.core
def test_a_plan_of_another_program_is_refused(plan: Plan) -> None:
    check_matches(plan, trace(step, *ARGS).graph, "step")
    with pytest.raises(PlanMismatchError, match=r"'params/down' was f32\[32,8\] and is now f32\[16,8\]"):
        check_matches(plan, trace(step, {"up": array(8, 16), "down": array(16, 8)}, array(16, 8)).graph, "step")
    with pytest.raises(PlanMismatchError, match=r"another program than other traces to"):
        check_matches(plan, trace(lambda params, x: (params, x.sum()), *ARGS).graph, "other")


def test_another_format_is_refused(plan: Plan) -> None:
    data = {**json.loads(plan.to_json()), "format": 99}
    with pytest.raises(PlanMismatchError, match=r"old\.json is no plan of format 6 \(found 99\)"):
        from_json(data, "old.json")


def test_positions_that_are_given_twice_count_once() -> None:
    twice = autopar.plan(step, *ARGS, mesh=(8,), cluster=CLUSTER, donate_argnums=(0, 0))
    assert twice.donated == (0, 1)
    assert from_json(json.loads(twice.to_json())) == twice
