"""`stages=`: steps in stages through the public functions. bench/equal/test_equal_pipeline: they compute the step."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar import zoo
from autopar.api.parallel_function import ParallelFunction
from autopar.compile import plan_step
from autopar.errors import (
    ArgumentError,
    AutoparWarning,
    DonatedError,
    MeshError,
    MicrobatchError,
    PinError,
    PlanMismatchError,
    ScheduleError,
    StageError,
)
from autopar.hardware.cluster import Cluster
from autopar.options import settings
from autopar.plans.plan import Plan, from_json
from tests.programs.test_real_programs import assert_equal
from tests.support.effort import sample
from tests.support.source_lines import line


@pytest.fixture(scope="module", autouse=True)
def doubles() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model(doubles: None) -> zoo.Model:
    return zoo.build("mlp-toy", batch=16, dtype="float64")


@pytest.fixture(scope="module")
def inputs(model: zoo.Model) -> tuple[Any, Any]:
    return jax.jit(model.init)(jax.random.key(0)), model.make_batch(jax.random.key(1))


def planned(target: str = "mlp-toy", batch: int = 16, layers: int | None = None, **options: Any) -> Plan:
    model = zoo.build(target, batch=batch, layers=layers, dtype="float32")
    return autopar.plan(model.step, *model.abstract_args(), **{"mesh": (8,), "stages": 2, **options})


# What is planned


@pytest.mark.parametrize(
    ("mesh", "stages", "submeshes"),
    [
        ((8,), 2, [{"x": 4}, {"x": 4}]),
        ((8,), 3, [{"x": 3}, {"x": 3}, {"x": 2}]),
        ((2, 4), 2, [{"x": 1, "y": 4}, {"x": 1, "y": 4}]),
        ({"pipe": 4, "data": 2, "model": 4}, 2, [{"pipe": 2, "data": 2, "model": 4}] * 2),
    ],
)
def test_submeshes_are_slices_along_the_first_axis(mesh: Any, stages: int, submeshes: list[dict[str, int]]) -> None:
    plan = planned(mesh=mesh, stages=stages)
    assert [s.submesh for s in plan.stages] == submeshes
    assert [s.name for s in plan.stages] == [f"stage {i}" for i in range(stages)]
    assert [s.devices for s in plan.stages] == [int(np.prod(list(m.values()))) for m in submeshes]


def test_every_argument_but_the_batch_is_held_once() -> None:
    plan = planned()
    held = sorted(i for stage in plan.stages for i in stage.arguments)
    assert [*held, *plan.batch] == list(range(len(plan.input_paths)))
    assert {plan.input_paths[i] for i in plan.batch} == {"batch/x", "batch/y"}
    assert all("blocks/0" in plan.input_paths[i] or "count" in plan.input_paths[i] for i in plan.stages[0].arguments)


COUNTS = (
    (2, 64, "auto", 4),
    (2, 10, "auto", 5),
    (2, 2, "auto", 2),
    (2, 1, "auto", 1),
    (4, 12, "auto", 12),
    (4, 24, "interleaved-1f1b", 8),
    (3, 12, "interleaved-1f1b", 6),
)


@pytest.mark.parametrize(
    ("stages", "batch", "schedule", "count"),
    sample(COUNTS, [COUNTS[i] for i in (0, 1, 3, 6)]),
)
def test_microbatches_are_two_per_stage_or_what_divides_the_batch(
    stages: int, batch: int, schedule: str, count: int
) -> None:
    plan = planned(batch=batch, stages=stages, schedule=schedule)
    assert plan.num_microbatches == count
    assert plan.schedule == ("1f1b" if schedule == "auto" else schedule)


def test_pins_hold_in_the_stage_that_holds_the_argument() -> None:
    plan = planned(mesh={"x": 2, "y": 4}, pins={"state/params/*/w1": P(None, "y")})
    specs = {path: spec for path, spec in plan.shardings().items() if path.endswith("w1") and "params" in path}
    assert specs == dict.fromkeys(("state/params/blocks/0/w1", "state/params/blocks/1/w1"), P(None, "y"))


def test_interleaved_has_two_stages_on_each_submesh() -> None:
    plan = planned("gpt-toy", layers=4, schedule="interleaved-1f1b")
    assert [s.rank for s in plan.stages] == [0, 1, 0, 1]
    assert [s.layers for s in plan.stages] == [(0, 2), (2, 3), (3, 4), (4, 6)]


@pytest.mark.core
def test_equal_blocks_are_dealt_out_equally() -> None:
    plan = planned("gpt-toy", layers=8, stages=4)
    assert [s.layers for s in plan.stages] == [(0, 3), (3, 5), (5, 7), (7, 10)]
    seconds = [s.seconds["F"] for s in plan.stages]
    assert seconds[1] == pytest.approx(seconds[2])


def test_kinds_of_memory_add_up_to_the_peak_of_a_stage() -> None:
    plan = planned("gpt-toy", layers=4, schedule="1f1b", num_microbatches=4)
    for stage in plan.stages:
        assert sum(stage.memory.values()) == pytest.approx(stage.peak_memory_bytes, abs=len(stage.memory))
    assert any("resharding" in stage.memory for stage in plan.stages)  # copies of weights, gathered once for all passes


@pytest.mark.exhaustive
def test_more_microbatches_shrink_the_bubble() -> None:
    dear = Cluster.custom((8,), 1e-9, 1e-15, {"float32": 1e9}, 1e15, 2**34)
    times = [planned("gpt-toy", layers=6, cluster=dear, num_microbatches=m).step_time_s for m in (1, 2, 4)]
    assert times == sorted(times, reverse=True)


# As an artefact


@pytest.mark.core
def test_a_plan_goes_through_json_and_says_what_runs(tmp_path: Path) -> None:
    plan = planned("gpt-toy", schedule="zb-h1", num_microbatches=8)
    assert from_json(json.loads(plan.to_json())) == plan
    text = plan.summary()
    assert "2 stages, 8 microbatches, schedule zb-h1" in text
    assert "stage 1" in text
    assert "4-7 (x=4)" in text
    assert "in stage 0" in text


@pytest.mark.core
def test_a_loaded_plan_runs_the_same_stages(model: zoo.Model, inputs: tuple[Any, Any], tmp_path: Path) -> None:
    plan = autopar.plan(model.step, *inputs, stages=2, mesh=(4,), schedule="zb-h1", num_microbatches=2)
    plan.save(tmp_path / "plan.json")
    options = settings({"plan": tmp_path / "plan.json"})
    again = plan_step(model.step, inputs, {}, options, local=True)
    first = plan_step(model.step, inputs, {}, settings({"stages": 2, "mesh": (4,), "schedule": "zb-h1",
                                                      "num_microbatches": 2}), local=True)  # fmt: skip
    assert again.pipeline is not None
    assert first.pipeline is not None
    assert str(again.pipeline.stages) == str(first.pipeline.stages)
    assert again.pipeline.schedule.lists == first.pipeline.schedule.lists
    step = autopar.parallelize(model.step, plan=plan, donate_argnums=())
    assert_equal(step(*inputs), jax.jit(model.step)(*inputs))
    with pytest.raises(PlanMismatchError, match="was made for other arguments"):
        step.plan(*zoo.build("mlp-toy", batch=32, dtype="float64").abstract_args())


# As a step


@pytest.fixture(scope="module")
def step(model: zoo.Model) -> ParallelFunction:
    return autopar.parallelize(model.step, stages=2, num_microbatches=4)


def test_programs_have_names(step: ParallelFunction, inputs: tuple[Any, Any]) -> None:
    exe = step.lower(*inputs).compile()
    assert [name for name in exe.programs if name.startswith("stage 0")][:3] == [
        "stage 0 begin",
        "stage 0 F",
        "stage 0 B",
    ]
    assert {"stage 1 begin", "stage 1 F", "stage 1 B"} < {*exe.programs}
    assert "HloModule" in exe.as_text()
    assert exe.memory_analysis().keys() == exe.cost_analysis().keys() == exe.programs.keys()
    assert "stage 1 holds" in step.lower(*inputs).as_text()


@pytest.mark.core
def test_state_is_donated_and_stays_where_its_stage_is(
    step: ParallelFunction, model: zoo.Model, inputs: tuple[Any, Any]
) -> None:
    state, batch = inputs
    plan = step.plan(state, batch)
    first, _ = step(state, batch)
    second, _ = step(first, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, batch, second)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    with pytest.raises(DonatedError, match=r"'state/opt/0/count' of shape .* was donated"):
        step(first, batch)
    devices = [{d.id for d in leaf.sharding.device_set} for leaf in jax.tree.leaves(second)]
    halves = ({0, 1, 2, 3}, {4, 5, 6, 7})
    held = {i: number for number, stage in enumerate(plan.stages) for i in stage.arguments}
    assert devices == [halves[held[i]] for i in range(len(devices))]


def test_donation_can_be_turned_off(model: zoo.Model, inputs: tuple[Any, Any]) -> None:
    step = autopar.parallelize(model.step, stages=2, mesh=(2,), num_microbatches=2, donate_argnums=())
    first, _ = step(*inputs)
    step(first, inputs[1])
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(first))


def test_init_puts_every_array_where_its_stage_is(
    step: ParallelFunction, model: zoo.Model, inputs: tuple[Any, Any]
) -> None:
    step.plan(*inputs)
    state = step.init(model.init, jax.random.key(0))
    assert_equal(state, jax.jit(model.init)(jax.random.key(0)))
    after, _ = step(state, inputs[1])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))  # nothing had to be moved
    assert_equal(after, jax.jit(model.step)(*inputs)[0])


def test_a_mesh_of_devices_is_taken_as_it_is(model: zoo.Model, inputs: tuple[Any, Any]) -> None:
    devices = jax.devices()[::-1][:4]
    step = autopar.parallelize(model.step, stages=2, mesh=Mesh(np.array(devices), ("d",)), num_microbatches=2)
    state, _ = step(*inputs)
    used = {d for leaf in jax.tree.leaves(state) for d in leaf.sharding.device_set}
    assert used == {*devices}
    assert jax.tree.leaves(state)[0].sharding.device_set == {*devices[:2]}


def test_arguments_may_lie_anywhere(step: ParallelFunction, model: zoo.Model, inputs: Any) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    moved = jax.device_put(inputs, NamedSharding(mesh, P()))
    assert_equal(step(*moved), jax.jit(model.step)(*inputs))
    on_host = jax.tree.map(np.asarray, inputs)
    assert_equal(step(*on_host), jax.jit(model.step)(*inputs))


def test_a_function_without_a_backward_pass(model: zoo.Model, inputs: tuple[Any, Any]) -> None:
    state, batch = inputs

    def evaluate(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for block in params["blocks"]:
            x = jnp.tanh(x @ block["w1"]) @ block["w2"]
        return {"loss": jnp.mean((x - batch["y"]) ** 2), "each": x.sum(1)}

    step = autopar.parallelize(evaluate, stages=2, num_microbatches=4, batch_argnums=1, mesh=(4,))
    assert step.plan(state["params"], batch).schedule == "inference"
    assert_equal(step(state["params"], batch), jax.jit(evaluate)(state["params"], batch))


def test_a_search_without_a_batch_gives_one_stage() -> None:
    """A simulation is fitted to an observation: no dimension of that holds examples."""

    def fitted(field: jax.Array, observed: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(lambda x: jnp.sum((jnp.tanh(x @ x.T) - observed) ** 2))(field)
        return field - 0.1 * gradient, value

    field = jnp.arange(64.0).reshape(8, 8) / 64
    step = autopar.parallelize(fitted, stages="search", batch_argnums=(), donate_argnums=())
    plan = step.plan(field, field.T)
    assert (len(plan.stages), plan.num_microbatches) == (1, 1)
    assert_equal(step(field, field.T), jax.jit(fitted)(field, field.T))


def test_gradients_that_no_microbatch_has_a_part_in_run_without_a_backward_schedule() -> None:
    def fitted(parameters: jax.Array, points: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The marginal likelihood of a Gaussian process: all points are one example."""

        def loss(p: jax.Array) -> jax.Array:
            apart = (points[:, None] - points[None, :]) ** 2
            factor = jnp.linalg.cholesky(p[0] * jnp.exp(-apart * p[1]) + 0.1 * jnp.eye(16))
            return jnp.sum(jnp.log(jnp.diagonal(factor)))

        value, gradient = jax.value_and_grad(loss)(parameters)
        return parameters - 0.1 * gradient, value

    arguments = jnp.array([1.0, 2.0]), jnp.linspace(0.0, 1.0, 16)
    step = autopar.parallelize(fitted, mesh=(2,), stages=2, donate_argnums=())
    assert step.plan(*arguments).schedule == "inference"
    assert_equal(step(*arguments), jax.jit(fitted)(*arguments))


def test_a_failed_stage_is_named_and_leaves_the_state_usable() -> None:
    def positive(x: Any) -> Any:
        if (x < 0).any():
            raise ValueError("a negative number")
        return x

    def checked(state: Any, batch: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(jnp.tanh(batch["x"] @ p["a"]) @ p["b"]) @ p["b"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        kind = jax.ShapeDtypeStruct(batch["x"].shape, jnp.float32)
        seen = jnp.mean(jax.pure_callback(positive, kind, batch["x"], vmap_method="sequential"))
        return jax.tree.map(lambda p, g: p - g * seen, state, grads), value

    state = {"a": jnp.eye(4, dtype=jnp.float32), "b": jnp.eye(4, dtype=jnp.float32)}
    good = {"x": jnp.ones((8, 4), jnp.float32)}
    step = autopar.parallelize(checked, stages=2, mesh=(2,), num_microbatches=2)
    with jax.enable_x64(False):  # JAX checks what a callback returns in a thread without doubles
        state, _ = step(state, good)
        with pytest.raises(StageError, match=r"^stage \d failed in .*a negative number \[pure_callback at .*"):
            step(state, {"x": -good["x"]})
        expected = jax.jit(checked)(state, good)
        assert_equal(step(state, good), expected)


def test_what_is_made_of_constants_in_many_steps_is_followed_once(model: zoo.Model, inputs: tuple[Any, Any]) -> None:
    """Each of 64 values is made of the one before twice, as in the rounds of a hash: there are 2**64 options back."""

    def noisy(state: Any, batch: Any) -> Any:
        state, metrics = model.step(state, batch)
        noise = jnp.cos(jnp.arange(4.0))
        for _ in range(64):
            noise = 0.5 * noise + 0.1 * noise * noise
        return state, {**metrics, "noise": metrics["loss"] + noise.sum()}

    step = autopar.parallelize(noisy, stages=2, mesh=(4,), num_microbatches=2, donate_argnums=())
    assert_equal(step(*inputs), jax.jit(noisy)(*inputs))


# Examples that depend on each other


def normed(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> Any:
        x = batch["x"] @ p["a"]
        with jax.named_scope("norm"):
            x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)
        return jnp.mean((jnp.tanh(x) @ p["b"] @ p["b"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


NORMED = {"a": jnp.eye(8), "b": jnp.eye(8) + 0.1}, {"x": jnp.sin(jnp.arange(128.0).reshape(16, 8))}


def test_a_coupled_step_runs_in_one_microbatch_and_says_why() -> None:
    step = autopar.parallelize(normed, stages=2, mesh=(2,), donate_argnums=())
    plan = step.plan(*NORMED)
    assert plan.num_microbatches == 1
    (note,) = plan.notes
    assert note.startswith("one microbatch, so that no two stages work at a time: the step does not fall into 4")
    assert "test_pipelines.py:" in note
    assert "per_microbatch=('test_pipelines.py:" in note
    assert all(stage.seconds["F"] > 0 for stage in plan.stages)
    assert_equal(step(*NORMED), jax.jit(normed)(*NORMED))


def test_a_coupled_step_with_a_number_of_microbatches_is_refused() -> None:
    with pytest.raises(MicrobatchError, match=r"reduce_sum at test_pipelines\.py:\d+ is over the whole batch"):
        autopar.plan(normed, *NORMED, stages=2, mesh=(2,), num_microbatches=4)


@pytest.mark.parametrize("accepted", ["norm", ("nor?",), ["test_pipelines.py:*"], "*"], ids=str)
def test_what_may_be_computed_per_microbatch_is_named(accepted: Any) -> None:
    options = {"mesh": (2,), "num_microbatches": 4, "per_microbatch": accepted, "donate_argnums": ()}
    step = autopar.parallelize(normed, stages=2, **options)

    def parts(params: Any, batch: Any) -> Any:
        cut = [{"x": x} for x in jnp.split(batch["x"], 4)]
        new = [normed(params, part) for part in cut]
        return jax.tree.map(lambda *xs: sum(xs) / 4, *new)

    assert step.plan(*NORMED).notes == ()
    assert_equal(step(*NORMED), jax.jit(parts)(*NORMED))
    accumulated = autopar.parallelize(normed, **options)
    assert_equal(accumulated(*NORMED), jax.jit(parts)(*NORMED))
    assert accumulated.plan(*NORMED).per_microbatch == step.plan(*NORMED).per_microbatch


# Mistakes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"stages": 0}, ArgumentError, "stages=0 must be 'auto', 'search' or a number"),
        ({"stages": True}, ArgumentError, "stages=True must be"),
        ({"schedule": "1f2b"}, ScheduleError, "schedule='1f2b' must be 'auto' or 'none' or 'inference' or 'gpipe'"),
        ({"schedule": "chimera"}, ScheduleError, "schedule='chimera' must be"),
        ({"schedule": "none"}, ScheduleError, "schedule='none' is for one stage, and stages=2; use 'auto' or"),
        ({"schedule": "inference"}, ScheduleError, "'inference' has no backward passes and the step has; use 'gpipe'"),
        ({"stages": 1, "schedule": "gpipe"}, ArgumentError, "schedule='gpipe' orders the stages .* give stages=2"),
        (
            {"stages": "search", "schedule": "gpipe"},
            ArgumentError,
            "schedule='gpipe' orders the stages of a pipeline, and stages are not searched with mesh=; give stages=2",
        ),
        (
            {"stages": 4, "schedule": "interleaved-1f1b", "num_microbatches": 2},
            ScheduleError,
            "needs microbatches in groups of 4, one per rank, and got 2; use 4, or schedule 1f1b",
        ),
        (
            {"stages": 3, "schedule": "interleaved-1f1b", "num_microbatches": 4},
            ScheduleError,
            "in groups of 3, one per rank, and no multiple of 3 divides the batch of 16; use a batch or stages",
        ),
        (
            {"stages": 3, "schedule": "interleaved-1f1b"},
            ScheduleError,
            "in groups of 3, one per rank, and no multiple of 3 divides the batch of 16; use a batch or stages",
        ),
        ({"stages": "auto", "schedule": "gpipe"}, ArgumentError, "schedule='gpipe' orders the stages .* give stages=2"),
        ({"stages": 3, "mesh": (4, 2)}, MeshError, r"cut from the first axis .* use stages of 1, 2, 4, another mesh"),
        ({"stages": 9}, MeshError, r"stages=9 need as many devices at least, mesh \{'x': 8\} has 8"),
        ({"stages": 64, "mesh": (64,)}, ArgumentError, "stages=64 are more than the forward pass has operations, 23"),
        ({"num_microbatches": 3}, MicrobatchError, r"'batch/\w' of shape \(16, 32\) cannot be cut into 3"),
        (
            {"schedule": "interleaved-1f1b", "num_microbatches": 1},
            ScheduleError,
            "groups of 2.* use 2, or schedule 1f1b",
        ),
        ({"pins": {"nothing": P("x")}}, PinError, "'nothing'"),
        ({"per_microbatch": 3}, ArgumentError, "per_microbatch=3 must be globs"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        planned(**options)


PAIR = Cluster.custom((2,), 1e-6, 1e-9, 1e12, 1e11, 10**9)


@pytest.mark.parametrize(
    "options",
    [{"mesh": (8,)}, {"memory_budget": "min", "cluster": PAIR}, {"offload": "all"}],
    ids=["mesh=", "budget", "offload"],
)
def test_a_search_that_an_option_excludes_is_announced(options: dict[str, Any]) -> None:
    excluding = rf"{next(iter(options))}.*; the step is planned on one mesh"
    with pytest.warns(AutoparWarning, match=f"stages are not searched with {excluding}"):
        plan = planned(layers=1, **{"stages": "search", "mesh": None, "cluster": Cluster.preset("dgx-h100"), **options})
    assert len(plan.stages) == 1


def test_a_backward_schedule_for_a_forward_function_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"schedule '1f1b' has backward passes.*has none.*'inference'"):
        autopar.plan(
            lambda p, x: jnp.tanh(x @ p) @ p, jnp.eye(8), jnp.ones((16, 8)), stages=2, mesh=(2,), schedule="1f1b",
            batch_argnums=1,
        )  # fmt: skip


def gradient_step(loss: Any) -> Any:
    """A train step of the mean loss of the examples."""

    def step(w: Any, b: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda w: jax.vmap(loss, (None, 0))(w, b).mean())(w)
        return w - 0.1 * gradient, value

    return step


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_gradient_that_is_cheap_on_the_whole_batch_is_said_to_be(schedule: str) -> None:
    step = gradient_step(lambda w, x: jnp.sum(jnp.tanh(x * w[0])))
    with pytest.raises(ScheduleError, match=r"what its gradient needs of the batch is cheap.*one mesh"):
        autopar.plan(step, jnp.eye(4), jnp.ones((8, 6, 4)), stages=2, mesh=(2,), schedule=schedule, num_microbatches=4)


def test_a_schedule_that_puts_gradients_of_weights_off_needs_other_gradients() -> None:
    """All parameters are in the last stage, so that none sends a gradient."""

    def chain(w: Any, x: Any) -> Any:
        def product(a: Any, c: Any) -> Any:
            return jax.nn.logsumexp(a[..., :, :, None] + c[..., None, :, :], -2)

        return jnp.sum(jax.lax.associative_scan(product, w[None] + x[:, :, None])[-1])

    arguments = gradient_step(chain), jnp.eye(4), jnp.ones((8, 6, 4))
    options: dict[str, Any] = {"stages": 2, "mesh": (2,), "num_microbatches": 4}
    with pytest.raises(ScheduleError, match=r"'zb-h1' .*no stage of this step sends a gradient.*use 'gpipe', '1f1b'"):
        autopar.plan(*arguments, schedule="zb-h1", **options)
    assert autopar.plan(*arguments, schedule="1f1b", **options).schedule == "1f1b"


def test_two_backward_passes_are_named_and_run_on_one_mesh() -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(jnp.tanh(x @ w) ** 2)  # differentiated twice

        value, gradient = jax.value_and_grad(loss)(w + 0.05 * jax.grad(loss)(w))
        return w - 0.1 * gradient, value

    arguments = step, jnp.eye(4), jnp.ones((8, 4))
    where = line(sys.modules[__name__], "# differentiated " + "twice")
    with pytest.raises(MicrobatchError, match=f"dot_general at {where}, in the second"):
        autopar.plan(*arguments, stages=2, mesh=(2,), schedule="1f1b", num_microbatches=4)
    assert autopar.plan(*arguments, mesh=(2,), num_microbatches=4).num_microbatches == 4


def test_the_second_of_two_passes_reads_a_total_that_the_step_returns() -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.sum(jnp.tanh(x @ w) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w + jnp.full((8, 4), value))))(w - gradient), value + 1

    with pytest.raises(MicrobatchError, match="with two backward passes over its 4 microbatches"):
        autopar.plan(step, jnp.eye(4), jnp.ones((8, 4)), stages=2, mesh=(2,), num_microbatches=4)


def test_a_loss_after_the_update_is_no_second_backward_pass() -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(jnp.tanh(x @ w) ** 2)

        updated = w - 0.1 * jax.grad(loss)(w)
        return updated, loss(updated)

    with pytest.raises(MicrobatchError, match="with a backward pass and a second pass over its 4 microbatches"):
        autopar.plan(step, jnp.eye(4), jnp.ones((8, 4)), stages=2, mesh=(2,), num_microbatches=4)


# Checked against the compiler


EMITTED: list[tuple[str, dict[str, Any]]] = [
    ("mlp-toy", {"mesh": (2, 4), "schedule": "zb-h1"}),
    ("gpt-toy", {"mesh": (4, 2)}),
]


@pytest.mark.parametrize(("target", "options"), sample(EMITTED, EMITTED[:1]))
def test_programs_emit_what_the_stages_plan(target: str, options: dict[str, Any]) -> None:
    model = zoo.build(target, batch=32, dtype="float32")
    args = model.abstract_args()
    plan = autopar.plan(model.step, *args, stages=2, num_microbatches=2, **options)
    report = autopar.verify(plan, model.step, *args)
    assert report.ok, str(report)
    assert report.comparison.ratio == pytest.approx(1.0, abs=0.1)
    assert report.comparison.matched > 0
    assert report.flops > 0
    assert plan.wire_bytes() > 0


def test_a_changed_plan_of_a_stage_is_refused(model: zoo.Model, inputs: tuple[Any, Any]) -> None:
    plan = autopar.plan(model.step, *inputs, stages=2, mesh=(2,))
    first, second = plan.stages
    damaged = replace(plan, stages=(first, replace(second, graph_hash="0" * 32)))
    with pytest.raises(PlanMismatchError, match="stage 1 of the plan is another program"):
        autopar.parallelize(model.step, plan=damaged)(*inputs)


@pytest.mark.parametrize("target", sample(["gpt-toy", "gpt-toy-scan", "mlp-toy-scan"], ["mlp-toy-scan"]))
def test_layers_may_be_recomputed(target: str) -> None:
    model = zoo.build(target, batch=8, dtype="float64")
    args = model.init(jax.random.key(0)), model.make_batch(jax.random.key(1))
    step = autopar.parallelize(model.step, stages=2, mesh=(2,), num_microbatches=2, remat="full", donate_argnums=())
    assert "full" in step.plan(*args).remat
    plain = autopar.plan(model.step, *args, stages=2, mesh=(2,), num_microbatches=2)
    assert step.plan(*args).stages[0].memory["residuals"] < plain.stages[0].memory["residuals"] / 2
    assert_equal(step(*args), jax.jit(model.step)(*args))
