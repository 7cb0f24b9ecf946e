"""Functions under a mesh with Explicit axes: shardings in types are pins, and the numbers are those of one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, reshard

import autopar
from autopar.api import parallelize
from autopar.errors import PinError, TraceError
from autopar.ir.trace import trace
from tests.programs.steps import array
from tests.programs.test_real_programs import assert_equal

P = PartitionSpec
EXPLICIT = (AxisType.Explicit,) * 2
MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=EXPLICIT)
OTHER = jax.make_mesh((4, 2), ("data", "model"), axis_types=EXPLICIT)
SPECS = {"up": P(), "down": P(None, "model"), "bias": P("model")}


def params() -> dict[str, jax.Array]:
    return {"up": array(8, 16), "down": array(16, 8), "bias": array(8)}


def loss(p: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] + p["bias"]) ** 2)  # no product contracts a cut dimension


def explicit_loss(p: Any, x: Any) -> Any:
    """The same with everything that Explicit mode has a user say."""
    h = reshard(jnp.tanh(x @ p["up"]), P("data", "model"))
    h = jnp.dot(h, reshard(p["down"], P("model")), out_sharding=P("data", None)) + reshard(p["bias"], P(None))
    return jnp.mean(jax.checkpoint(lambda h: reshard(h, P(("data", "model"), None)) ** 2)(h))


def step_of(loss: Any) -> Any:
    def step(p: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value

    return step


plain_step, explicit_step = step_of(loss), step_of(explicit_loss)


def on_explicit_mesh(mesh: Any = MESH) -> tuple[dict[str, jax.Array], jax.Array]:
    where = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    return jax.device_put(params(), where), jax.device_put(array(16, 8), NamedSharding(mesh, P("data")))


def as_structs(args: Any, mesh: Any = None) -> Any:
    def struct(x: Any) -> jax.ShapeDtypeStruct:
        sharding = x.sharding if mesh is None else NamedSharding(mesh, x.sharding.spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(struct, args)


def requested_specs(plan: autopar.Plan) -> dict[str, PartitionSpec]:
    return {path: P(*spec) for path, spec in plan.shardings().items()}


PINNED = {"p/bias": P("model"), "p/down": P(None, "model"), "x": P("data")}


# Arguments


@pytest.mark.core
def test_sharded_arguments_are_pins_and_their_mesh_is_the_mesh() -> None:
    plan = autopar.plan(plain_step, *on_explicit_mesh())
    assert (plan.mesh_names, plan.mesh_sizes) == (("data", "model"), (2, 4))
    assert {path: spec for path, spec in requested_specs(plan).items() if path in PINNED} == PINNED


def test_structs_on_a_mesh_without_devices_pin_as_arrays_do() -> None:
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=EXPLICIT)
    of_arrays = autopar.plan(plain_step, *on_explicit_mesh())
    for structs in (as_structs(on_explicit_mesh()), as_structs(on_explicit_mesh(), mesh)):
        assert requested_specs(autopar.plan(plain_step, *structs)) == requested_specs(of_arrays)


def test_replicated_types_are_no_pins() -> None:
    everywhere = jax.device_put((params(), array(16, 8)), NamedSharding(MESH, P()))
    assert trace(plain_step, *everywhere).pins == {}
    assert list(trace(plain_step, *on_explicit_mesh()).pins.values()) == [P("model"), P(None, "model"), P("data", None)]


@pytest.mark.parametrize("within", [True, False], ids=["set", "not set"])
def test_steps_are_those_of_one_device_and_results_keep_their_types(within: bool) -> None:
    step = parallelize(plain_step, donate_argnums=())
    args, expected = on_explicit_mesh(), (params(), array(16, 8))
    for _ in range(3):
        if within:
            with jax.set_mesh(MESH):
                state, value = step(*args)
        else:
            state, value = step(*args)
        wanted, loss_wanted = jax.jit(plain_step)(*expected)
        assert_equal(autopar.gather((state, value)), autopar.gather((wanted, loss_wanted)))
        assert {n: P(*jax.typeof(x).sharding.spec) for n, x in state.items() if n != "up"} == {
            "bias": P("model"),
            "down": P(None, "model"),
        }
        args, expected = (state, args[1]), (wanted, expected[1])


def test_its_own_results_do_not_plan_again() -> None:
    traces: list[int] = []

    def counted(p: Any, x: Any) -> Any:
        traces.append(1)
        return plain_step(p, x)

    step = parallelize(counted, donate_argnums=(), mesh=MESH)
    x = array(16, 8)
    with jax.set_mesh(MESH):
        state, _ = step(params(), x)  # free: nothing is cut yet
        for _ in range(2):
            state, _ = step(state, x)
    assert len(traces) == 1


# Inside the function


@pytest.mark.core
@pytest.mark.parametrize("mesh", [None, MESH, {"data": 2, "model": 4}], ids=["own", "mesh", "names"])
def test_reshards_inside_are_kept_and_the_numbers_are_right(mesh: Any) -> None:
    expected = autopar.gather(jax.jit(plain_step)(params(), array(16, 8)))
    step = parallelize(explicit_step, mesh=mesh, donate_argnums=())
    with jax.set_mesh(MESH):
        for run, args in (
            (step, on_explicit_mesh()),
            (step, (params(), array(16, 8))),
            (jax.jit(explicit_step), on_explicit_mesh()),
        ):
            assert_equal(autopar.gather(run(*args)), expected)


def constraints(fn: Any, *args: Any) -> list[tuple[str, PartitionSpec]]:
    graph = trace(fn, *args).graph
    return [(op.phase, op.params["sharding"].spec) for op in graph.walk() if op.name == "sharding_constraint"]


def test_requested_shardings_become_constraints() -> None:
    with jax.set_mesh(MESH):
        wished = constraints(lambda p, x: jax.grad(explicit_loss)(p, x), *on_explicit_mesh())
        free = constraints(lambda p, x: jax.grad(explicit_loss)(p, x), params(), array(16, 8))
        gather = constraints(lambda x: reshard(x * 2, P(None, None)), on_explicit_mesh()[1])
        shaped = constraints(lambda x: x.reshape(4, 4, 8, out_sharding=P("data", None, None)), on_explicit_mesh()[1])
    wishes = [P("data", "model"), P("model", None), P("data", None), P(None)]
    assert [spec for phase, spec in wished if phase == "forward"] == wishes
    # The reshard recomputed, then each transposed: back to the types of the product, bias, down and tanh.
    back = [P(("data", "model"), None), P("data", None), P("model"), P(None, "model"), P("data", None)]
    assert [spec for phase, spec in wished if phase == "backward"] == back
    # Of free arguments nothing is known: back to a type that cuts nothing is no wish.
    assert [spec for _, spec in free] == [*wishes, *back[:2]]
    assert gather == [("forward", P(None, None))]
    assert shaped == [("forward", P("data", None, None))]


def test_loops_branches_and_closed_over_arrays() -> None:
    weight = jax.device_put(array(8, 8), NamedSharding(MESH, P(None, "model")))
    seen = jnp.arange(4.0)

    def program(x: Any) -> Any:
        def body(c: Any, s: Any) -> Any:
            c = reshard(jnp.tanh(jnp.dot(c, weight)), P("data", None))
            return c * s, jnp.sum(c)

        c, sums = jax.lax.scan(body, x, seen)
        c = jax.lax.cond(sums[0] > 0, lambda c: c * 2, lambda c: c - 1, c)
        noise = jax.random.normal(jax.random.key(0), c.shape, out_sharding=jax.typeof(c).sharding)
        n, c = jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jax.nn.softmax(s[1])), (0, c + noise))
        return c, sums, n

    with jax.set_mesh(MESH):
        x = on_explicit_mesh()[1]
        expected = jax.jit(program)(x)
        step = parallelize(program)
        assert_equal(autopar.gather(step(x)), autopar.gather(expected))
        assert requested_specs(step.plan(x))["x"] == P("data")


def test_the_compiled_program_moves_what_the_plan_says() -> None:
    with jax.set_mesh(MESH):
        args = as_structs(on_explicit_mesh())
        report = autopar.verify(autopar.plan(explicit_step, *args), explicit_step, *args)
    assert report.ok, str(report)
    assert report.collectives


# Contradictions


def test_an_order_of_axes_that_no_layout_has() -> None:
    x = jax.device_put(array(16, 8), NamedSharding(MESH, P(("model", "data"))))
    with pytest.raises(PinError, match=r"'x', which lies on .* over 'model' before 'data'.*use \('data', 'model'\)"):
        autopar.plan(lambda x: x * 2, x)
    with pytest.raises(PinError, match=r"pin 'x' .* over 'model' before 'data'"):
        autopar.plan(lambda x: x * 2, array(16, 8), mesh=MESH, pins={"x": P(("model", "data"))})


def test_a_pin_must_agree_with_the_type() -> None:
    assert requested_specs(autopar.plan(plain_step, *on_explicit_mesh(), pins={"p/down": P(None, "model")}))[
        "p/down"
    ] == P(None, "model")
    with pytest.raises(PinError, match=r"'p/down'.*P\(None, 'model'\).*pin 'p/d\*' of .*'data'.*Drop the pin"):
        autopar.plan(plain_step, *on_explicit_mesh(), pins={"p/d*": P("data")})


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ((2, 4), r"Explicit mesh \{'data': 2, 'model': 4\}: axis 'model' not found. Mesh axes: x, y"),
        ({"data": 4, "model": 2}, r"cuts over axis 'model', whose size is another in the mesh"),
    ],
    ids=["names", "sizes"],
)
def test_the_mesh_must_be_that_of_the_types(mesh: Any, message: str) -> None:
    with pytest.raises(PinError, match=message):
        autopar.plan(plain_step, *on_explicit_mesh(), mesh=mesh)


def test_arguments_are_on_one_mesh() -> None:
    p, x = on_explicit_mesh()[0], on_explicit_mesh(OTHER)[1]
    with pytest.raises(PinError, match=r"'p/bias' lies on the Explicit mesh .*'data': 2.* and 'x' on .*'data': 4"):
        autopar.plan(plain_step, p, x)
    with jax.set_mesh(MESH), pytest.raises(PinError, match=r"'p/bias' lies on .*but the mesh in force is"):
        autopar.plan(plain_step, *on_explicit_mesh(OTHER))


def test_types_that_do_not_fit_are_an_error_of_the_trace() -> None:
    a = jax.device_put(array(8, 8), NamedSharding(MESH, P(None, "model")))
    b = jax.device_put(array(8, 8), NamedSharding(MESH, P("model")))
    with pytest.raises(TraceError, match=r"product does not fit the shardings .* test_explicit.py:"):
        autopar.plan(product, a, b)


def product(a: Any, b: Any) -> Any:
    return a @ b


def test_arrays_on_auto_axes_are_free() -> None:
    auto = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    traced = trace(plain_step, *on_explicit_mesh(auto))
    assert (traced.pins, traced.mesh) == ({}, None)
