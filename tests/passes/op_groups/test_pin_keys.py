"""What the keys of pins name, and the layouts of the plans that keep them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import jax_compat
from autopar.bench.equal.case import dear
from autopar.errors import PinError
from autopar.ir.trace import trace
from autopar.ir.train_state import owned_parameter
from autopar.passes.op_groups.pin_keys import Pinnable, matches, values_at
from tests.programs.steps import array

pytestmark = pytest.mark.core

ADAM = optax.adam(1e-3)
MESH = {"data": 2, "model": 4}
AXES = jax_compat.auto_abstract_mesh((4,), ("x",))


def predict(params: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    heads = (hidden @ params["w2"]).reshape(-1, 4, 8).transpose(1, 0, 2)
    return heads.sum(0)


def train_step(state: Any, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        return jnp.mean((predict(params, batch["x"]) - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt = ADAM.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value


PARAMS = {"w1": array(32, 64), "b1": array(64), "w2": array(64, 32)}
STATE = {"params": PARAMS, "opt": jax.eval_shape(ADAM.init, PARAMS)}
BATCH = {"x": array(16, 32), "y": array(16, 8)}
GRAPH = trace(train_step, STATE, BATCH).graph
FIRST = predict.__code__.co_firstlineno
HIDDEN, HEADS = (f"test_pin_keys.py:{FIRST + n}" for n in (1, 2))


def planned(pins: Mapping[str, Any], **options: Any) -> autopar.Plan:
    chosen: dict[str, Any] = {"mesh": MESH, "cluster": dear((2, 4)), **options}
    return autopar.plan(train_step, STATE, BATCH, pins=pins, **chosen)


def paths(key: str) -> list[str]:
    return [GRAPH.input_paths[of.number] for of in matches(key, GRAPH) if of.kind == "arg"]


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("params", ["state/params/b1", "state/params/w1", "state/params/w2"]),
        ("opt", [f"state/opt/0/{m}/{w}" for m in ("mu", "nu") for w in ("b1", "w1", "w2")]),  # the count is a scalar
        ("batch", ["batch/x", "batch/y"]),
        ("params/w?", ["state/params/w1", "state/params/w2"]),
        ("state/params/w1", ["state/params/w1"]),
        ("arg:9", ["state/params/w2"]),
        ("weights", []),
    ],
)
def test_leaves_that_a_key_names(key, named):
    assert paths(key) == named


def test_a_path_comes_before_a_role():
    graph = trace(lambda params, batch: (params + 1.0, batch["opt"]), array(8), {"opt": array(8)}).graph
    assert matches("params", graph) == (Pinnable("arg", 0),)
    assert matches("opt", graph) == (Pinnable("arg", 1),)


def test_the_batch_is_what_the_user_says():
    assert [of.number for of in matches("batch", GRAPH, (11,))] == [11]


def test_moments_belong_to_their_parameters():
    owned = {GRAPH.input_paths[i]: GRAPH.input_paths[j] for i, j in owned_parameter(GRAPH).items()}
    assert owned["state/opt/0/mu/w1"] == owned["state/opt/0/nu/w1"] == "state/params/w1"
    assert len(owned) == 6


def test_values_of_a_line_are_those_of_the_types_that_leave_it():
    assert {GRAPH.types[v].shape for v in values_at(GRAPH, HIDDEN)} == {(16, 64)}
    assert {GRAPH.types[v].shape for v in values_at(GRAPH, HEADS)} == {(4, 16, 8)}
    assert {GRAPH.producers[v].phase for v in values_at(GRAPH, HIDDEN)} == {"forward"}


def layouts_at(plan: autopar.Plan, line: str) -> set[tuple[int, ...]]:
    """Layouts of the values of a line that a plan decides, in all of its stages."""
    graph = plan.origin.graph if plan.origin is not None else None
    assert graph is not None
    return {plan.stages[0].values[v] for v in values_at(graph, line) if v in plan.stages[0].values}


def test_roles_are_planned():
    plan = planned({"params": P(), "opt": P("data"), "batch": P("data")})
    shardings = plan.shardings()
    assert {shardings[path] for path in paths("params")} == {P()}
    assert {shardings[path] for path in paths("opt")} == {P("data")}
    assert {shardings[path] for path in paths("batch")} == {P("data")}
    assert "fixed by the pin 'opt'" in str(plan.explain("opt/0/mu/w1"))


@pytest.mark.parametrize("spec", [P("data", "model"), P(None, "model"), P("model"), P()])
def test_activations_have_the_layout_of_their_pin(spec):
    wanted: dict[P, tuple[int, ...]] = {
        P("data", "model"): (0, 1),
        P(None, "model"): (-1, 1),
        P("model"): (-1, 0),
        P(): (-1, -1),
    }
    for key in (f"activations at {HIDDEN}", HIDDEN):
        plan = planned({key: spec})
        assert layouts_at(plan, HIDDEN) == {wanted[spec]}
    assert f"fixed by the pin '{HIDDEN}'" in str(plan.explain(HIDDEN))


def test_two_lines_of_one_residual_stream_may_differ():
    def step(w: jax.Array, x: jax.Array) -> Any:
        y = x + jnp.tanh(x @ w)
        z = y * 2.0
        return w, z.sum()

    first = step.__code__.co_firstlineno
    keys = [f"test_pin_keys.py:{first + n}" for n in (1, 2)]
    plan = autopar.plan(step, array(32, 32), array(16, 32), mesh=(4,), pins={keys[0]: P("x"), keys[1]: P(None, "x")})
    assert [layouts_at(plan, key) for key in keys] == [{(0,)}, {(1,)}]


def test_activations_in_microbatches_and_stages():
    assert layouts_at(planned({HIDDEN: P("data", "model")}, num_microbatches=2), HIDDEN) == {(0, 1)}
    plan = planned({HIDDEN: P(None, "model")}, stages=2, num_microbatches=2, mesh={"data": 4, "model": 2})
    assert plan.origin is not None
    assert plan.pipelined


def test_pins_of_one_stage():
    pins = {"stage 0: params": P(), "stage 1: params": P("model")}
    plan = planned(pins, stages=2, num_microbatches=2, mesh={"data": 4, "model": 2})
    shardings, stored = plan.shardings(), [{plan.input_paths[i] for i in stage.arguments} for stage in plan.stages]
    for path in paths("params"):
        assert shardings[path] == (P() if path in stored[0] else P("model"))
    assert all(any(path in s for path in paths("params")) for s in stored)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (
            {"params": P(None, "model")},
            r"pin 'params' on 'state/params/b1': .* has 2 dimensions, the value is f32\[64\]",
        ),
        ({"batch": P(None, "model"), "params": P("data", "mode")}, "axis 'mode' not found. Mesh axes: data, model"),
        ({"parms": P()}, "pin 'parms' matches no argument; the nearest: params"),
        ({f"activations at {HEADS}99": P()}, f"no line .* the nearest: .*{HEADS}"),
        ({HIDDEN: P("data", None, "model")}, rf"pin '{HIDDEN}' on dot_general at {HIDDEN}: .* has 3 dimensions"),
        ({HEADS: P(None, None, ("data", "model", "pod"))}, "axis 'pod' not found"),
        ({"stage 1: params": P()}, "pin 'stage 1: params': the plan has one stage, 0; stages= says how many"),
    ],
)
def test_a_wrong_pin_says_what_is_near(pins, message):
    with pytest.raises(PinError, match=message) as caught:
        planned(pins)
    assert "\n" not in str(caught.value)


def test_a_later_pin_overrides_one_that_does_not_fit():
    shardings = planned({"params": P(None, "model"), "params/b1": P("model")}).shardings()
    assert (shardings["state/params/w1"], shardings["state/params/b1"]) == (P(None, "model"), P("model"))


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"stage 1: params/w1": P()}, "stage 1 does not read 'state/params/w1', which is stored by stage 0"),
        ({"stage 2: params/w1": P()}, "the plan has 2 stages, 0 to 1"),
        (
            {"out:9": P("model")},
            "pin 'out:9': a pipeline returns '0/params/w2' as it stores 'state/params/w2'; pin that",
        ),
    ],
)
def test_a_stage_without_the_argument(pins, message):
    with pytest.raises(PinError, match=message):
        planned(pins, stages=2, num_microbatches=2, mesh={"data": 4, "model": 2})


def test_a_layout_that_no_rule_gives():
    def step(w: jax.Array, x: jax.Array) -> Any:
        sums = jnp.cumsum(x @ w, axis=1)
        return w, sums.sum()

    line = f"test_pin_keys.py:{step.__code__.co_firstlineno + 1}"
    with pytest.raises(PinError) as caught:
        autopar.plan(step, array(32, 32), array(16, 32), mesh=(4,), pins={line: P(None, "x")})
    message = str(caught.value)
    assert f"pin '{line}' on cumsum at {line}: f32[16,32] cannot be computed as P(None, 'x') by the rule" in message
    assert message.endswith(("nearest: P('x',) or P()", "nearest: P() or P('x',)"))


def test_a_pin_and_a_constraint_that_contradict_each_other():
    def step(w: jax.Array, x: jax.Array) -> Any:
        y = jax.lax.with_sharding_constraint(x @ w, jax.NamedSharding(AXES, P("x")))
        return w, (y * y).sum()

    line = f"test_pin_keys.py:{step.__code__.co_firstlineno + 1}"
    with pytest.raises(PinError) as caught:
        autopar.plan(step, array(32, 32), array(16, 32), mesh=(4,), pins={line: P(None, "x")})
    expected = (
        f"pin '{line}' of P(None, 'x') contradicts with_sharding_constraint at {line} of P('x',); drop one of them"
    )
    assert str(caught.value) == expected
