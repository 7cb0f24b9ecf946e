"""Explicit meshes with stages: types of arguments are pins in the stage that stores them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import PinError

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("stage", "model"), axis_types=(AxisType.Explicit,) * 2)
OPTIONS: dict[str, Any] = {"stages": 2, "num_microbatches": 2, "donate_argnums": ()}
WIDTH = 16


@pytest.fixture(scope="module", autouse=True)
def doubles() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def init(key: jax.Array) -> Any:
    keys = jax.random.split(key)
    return [{"w": jax.random.normal(k, (WIDTH, WIDTH)) / 4, "b": jnp.zeros(WIDTH)} for k in keys]


def step(state: Any, x: Any, y: Any) -> Any:
    def loss(state: Any) -> Any:
        hidden = x
        for layer in state:
            hidden = jnp.tanh(hidden @ layer["w"] + layer["b"])
        return jnp.mean((hidden - y) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda a, g: a - 0.1 * g, state, grads), value


def arguments() -> Any:
    keys = jax.random.split(jax.random.key(1))
    return init(jax.random.key(0)), *(jax.random.normal(k, (8, WIDTH)) for k in keys)


def put(x: Any, *spec: Any) -> Any:
    return jax.device_put(x, NamedSharding(MESH, P(*spec)))


def typed() -> Any:
    """The second layer's columns over "model"; the batch over "stage", which no stage stores."""
    (first, second), x, y = arguments()
    second = {"w": put(second["w"], None, "model"), "b": put(second["b"], "model")}
    return [jax.tree.map(put, first), second], put(x, "stage"), put(y, "stage", "model")


def assert_equal(ours: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(autopar.gather(ours)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


def test_types_are_pins_on_the_submesh_of_the_stage() -> None:
    plan = autopar.plan(step, *typed(), **OPTIONS)
    assert plan.mesh == {"stage": 4, "model": 2}
    assert [stage.submesh for stage in plan.stages] == [{"stage": 2, "model": 2}] * 2
    specs = plan.shardings()
    assert (specs["state/1/w"], specs["state/1/b"]) == (P(None, "model"), P("model"))


@pytest.mark.parametrize("within", [True, False], ids=["set", "not set"])
@pytest.mark.parametrize("batch", [typed, arguments], ids=["typed", "untyped"])
def test_steps_are_those_of_one_device_and_results_are_not_planned_again(within: bool, batch: Any) -> None:
    traces: list[int] = []

    def counted(state: Any, x: Any, y: Any) -> Any:
        traces.append(1)
        return step(state, x, y)

    parallel = autopar.parallelize(counted, **OPTIONS)
    state, *first_batch = typed()
    expected, *plain_batch = arguments()
    with jax.set_mesh(MESH) if within else nullcontext():
        state, value = parallel(state, *first_batch)
        for _ in range(2):
            expected, wanted = jax.jit(step)(expected, *plain_batch)
            assert_equal((state, value), (expected, wanted))
            assert state[1]["w"].sharding.spec == P(None, "model")
            state, value = parallel(state, *batch()[1:])
        created = parallel.init(init, jax.random.key(0))
    assert len(traces) == 1
    assert created[1]["w"].sharding == state[1]["w"].sharding


def test_a_type_over_the_axis_of_the_stages_is_refused() -> None:
    (first, second), *batch = typed()
    first = {**first, "w": put(arguments()[0][0]["w"], "stage")}
    message = (
        r"'state/0/w', on the Explicit mesh \{'stage': 4, 'model': 2\}: its type P\('stage', None\) is sharded over "
        r"the axis 'stage', .* Move it with jax.device_put to a sharding over other axes; pins=\{'state/0/w': P\("
    )
    with pytest.raises(PinError, match=message):
        autopar.plan(step, [first, second], arguments()[1], batch[1], **OPTIONS)


def test_a_pin_that_contradicts_a_type_is_refused() -> None:
    with pytest.raises(PinError, match=r"its type says P\(None, 'model'\), but pin 'state/1/w' of P\('model',\) says"):
        autopar.plan(step, *typed(), pins={"state/1/w": P("model")}, **OPTIONS)


def test_a_mesh_of_other_sizes_is_refused() -> None:
    with pytest.raises(PinError, match="cuts over axis 'model', whose size is another in the mesh"):
        autopar.plan(step, *typed(), mesh={"stage": 2, "model": 4}, **OPTIONS)
