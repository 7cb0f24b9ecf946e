"""`autopar.pins`: strategies in plans, by themselves, together and with other pins; what they compute."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import zoo
from autopar.bench.equal.case import dear
from autopar.errors import ArgumentError, PinError
from autopar.pins import Pins, data_parallel, fsdp, megatron, zero1
from autopar.plans import cache
from autopar.plans.views.parallelism import describe
from tests.programs.steps import array

ADAM = optax.adam(1e-3)


def train_step(state: Any, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        hidden = jax.nn.relu(batch["x"] @ params["w1"] + params["b1"])
        return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt = ADAM.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value


PARAMS = {"w1": array(32, 64), "b1": array(64), "w2": array(64, 32)}
ARGS = (
    {"params": PARAMS, "opt": jax.eval_shape(ADAM.init, PARAMS)},
    {"x": array(16, 32), "y": array(16, 32)},
)
TENSOR = "columns of weights, rows of weights"


def planned(pins: Any, model: str = "", **options: Any) -> autopar.Plan:
    step, args = (train_step, ARGS) if not model else ((built := zoo.build(model)).step, built.abstract_args())
    return autopar.plan(step, *args, pins=pins, **{"mesh": {"x": 8}, **options})


@pytest.mark.parametrize("prices", [None, dear], ids=["dgx-h100", "dear"])
@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (fsdp, "data parallel over x (8 ways); weights sharded over x (FSDP, ZeRO-3)"),
        # gradients are not pinned: where they are reduce-scattered, and not reduced whole, the plan is ZeRO-2
        (zero1, "data parallel over x (8 ways); optimizer state sharded over x (ZeRO-?)"),
        (data_parallel, "data parallel over x (8 ways)"),
        (megatron, f"tensor parallel over x (8 ways: *{TENSOR})"),
    ],
)
def test_a_strategy_is_what_runs(strategy: Callable[[str], Pins], text: str, prices: Any) -> None:
    described = describe(planned(strategy("x"), cluster=prices and prices((8,))))
    assert fnmatch.fnmatchcase(described, text)


def test_zero1_is_told_by_its_stage_where_gradients_are_reduced_whole() -> None:
    assert describe(planned(zero1("x"), cluster=dear((8,)))).endswith("optimizer state sharded over x (ZeRO-1)")


@pytest.mark.parametrize(
    ("pins", "text"),
    [
        (fsdp("d") | megatron("m"), "weights sharded over d (FSDP, ZeRO-3)"),
        (data_parallel("d") | megatron("m"), f"over m (4 ways: attention by heads, {TENSOR})"),
    ],
)
def test_gpt_under_two_strategies(pins: Pins, text: str) -> None:
    described = describe(planned(pins, "gpt-toy", mesh={"d": 2, "m": 4}))
    assert described.startswith("data parallel over d (2 ways); tensor parallel over m (4 ways: attention by heads")
    assert text in described


def test_gpt_in_a_scan_under_fsdp() -> None:
    assert "(FSDP, ZeRO-3)" in describe(planned(fsdp("x"), "gpt-toy-scan"))


def test_the_state_is_as_the_expansion_says() -> None:
    pins = fsdp("d") | megatron("m") | {"params/b1": P()}
    expanded = pins.expand(train_step, *ARGS, mesh={"d": 2, "m": 4})
    shardings = planned(pins, mesh={"d": 2, "m": 4}).shardings()
    leaves = {key: spec for key, spec in expanded.items() if key in shardings}
    assert len(leaves) == 11
    assert {path: shardings[path] for path in leaves} == {**leaves, "state/params/b1": P()}
    assert planned(expanded, mesh={"d": 2, "m": 4}).shardings() == shardings


def test_an_expansion_prints_in_full() -> None:
    text = str(fsdp("x").expand(train_step, *ARGS, mesh={"x": 8}))
    assert [line.split(maxsplit=1) for line in text.splitlines() if "w1" in line] == [
        ["state/opt/0/mu/w1", "P(None, 'x')"],
        ["state/opt/0/nu/w1", "P(None, 'x')"],
        ["state/params/w1", "P(None, 'x')"],
    ]
    assert "products at test_pins.py" in text


def test_an_expansion_has_the_mesh_of_a_parallelized_step() -> None:
    parallel = autopar.parallelize(train_step, mesh={"x": 8})
    assert fsdp("x").expand(parallel, *ARGS) == fsdp("x").expand(train_step, *ARGS, mesh={"x": 8})


def test_pins_combine() -> None:
    more = {"params/w1": P()}
    assert list(fsdp("x") | more) == ["fsdp", "params/w1"]
    assert list(more | fsdp("x")) == ["params/w1", "fsdp"]
    assert isinstance(more | fsdp("x"), Pins)
    assert planned(more | fsdp("x")).shardings()["state/params/w1"] == P()
    assert fsdp(("x", "y")) == {"fsdp": P(("x", "y"))}


def test_what_if_another_strategy_or_mesh() -> None:
    plan = planned(data_parallel("x"))
    assert plan.shardings()["state/params/w1"] == P()
    other = plan.what_if(pins=fsdp("x")).after
    assert other.shardings()["state/params/w1"] == P(None, "x")  # the two agree but for the state: fsdp comes first
    assert planned(fsdp("x")).what_if(mesh={"x": 4}).after.mesh == {"x": 4}


def test_strategies_in_stages_and_microbatches() -> None:
    plan = planned(fsdp("x"), num_microbatches=2)
    assert "(FSDP, ZeRO-3)" in describe(plan)
    staged = planned(fsdp("x"), stages=2, num_microbatches=2, mesh={"x": 4})
    assert staged.pipelined
    assert staged.shardings()["state/params/w1"] == P(None, "x")


def test_kept_plans_are_told_by_their_strategy(tmp_path: Path) -> None:
    with cache.use_folder(tmp_path):
        plans = [planned(strategy("x")).shardings() for strategy in (fsdp, zero1, fsdp)]
    assert plans[0] == plans[2] != plans[1]
    assert len(list(tmp_path.rglob("*.json"))) == 2


@pytest.mark.parametrize("pins", [fsdp("x"), data_parallel("x") | {"test_pins.py:*": P("x")}], ids=["fsdp", "lines"])
def test_numbers_are_those_of_one_device(pins: Pins) -> None:
    keys = iter(jax.random.split(jax.random.key(0), 8))
    params, batch = (jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape), tree) for tree in (PARAMS, ARGS[1]))
    state = {"params": params, "opt": ADAM.init(params)}
    checked = autopar.check(train_step, state, batch, mesh={"x": 8}, pins=pins)
    checked.raise_if_different()


def test_a_strategy_explains_what_it_fixes() -> None:
    explained = str(planned(fsdp("x")).explain("params/w1"))
    assert "fixed by the pin 'state/params/w1'" in explained


@pytest.mark.parametrize(
    ("pins", "options", "error", "message"),
    [
        (fsdp("data"), {}, PinError, "pin 'fsdp': axis 'data' not found. Mesh axes: x"),
        (fsdp("data"), {"mesh": None}, PinError, "pin 'fsdp' needs the size of mesh axis 'data', .* mesh={'data': 8}"),
        (fsdp("x"), {"mesh": {"x": 5}}, PinError, r"fsdp\('x'\): batch argument 'batch/x' .* the nearest: 15 or 20"),
        ({"fsdpp": P("x")}, {}, PinError, "pin 'fsdpp' matches no argument; the nearest: fsdp"),
        ([fsdp("x")], {}, (ArgumentError, PinError), "must be a dict"),
    ],
)
def test_a_wrong_strategy_says_what_is_near(pins: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        planned(pins, **options)
