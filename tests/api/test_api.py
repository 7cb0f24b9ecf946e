"""`parallelize`, `plan`, `gather` and what they return: kept plans, donation, meshes, placement, saving."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import autopar
from autopar.api import gather, parallelize
from autopar.bench.equal.case import dear
from autopar.errors import ArgumentError, AutoparWarning, MeshError, PinError
from autopar.hardware.cluster import Cluster
from autopar.ir.trace import trace
from autopar.plans.plan import Plan
from tests.programs.steps import array, loss, sgd, two_layers
from tests.programs.test_real_programs import assert_equal

P = PartitionSpec


class Counted:
    """A step that counts how often it is traced."""

    __name__ = "counted"

    def __init__(self) -> None:
        self.traces = 0

    def __call__(self, params: Any, x: jax.Array) -> Any:
        self.traces += 1
        value, grads = jax.value_and_grad(loss)(params, x)
        return sgd(params, grads), value


def plain(params: Any, x: jax.Array) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x)
    return sgd(params, grads), value


# One plan per argument structure


@pytest.fixture(scope="module")
def counted() -> tuple[Counted, Any]:
    fn = Counted()
    return fn, parallelize(fn, mesh=(2, 4))


@pytest.mark.core
def test_a_second_call_neither_traces_nor_plans_again(counted: Any) -> None:
    fn, step = counted
    params = two_layers()
    before = fn.traces
    plan = step.plan(params, array(16, 8))
    for _ in range(3):
        params, _ = step(params, array(16, 8))
    assert fn.traces - before == 1
    assert step.plan(params, np.ones((16, 8), np.float32)) is plan
    assert step.plan(*jax.eval_shape(lambda: (params, array(16, 8)))) is plan


def test_changed_shapes_dtypes_and_settings_plan_again(counted: Any) -> None:
    fn, step = counted
    step.plan(two_layers(), array(16, 8))
    before = fn.traces
    assert step.plan(two_layers(), array(24, 8)).input_shapes[-1] == (24, 8)
    assert step.plan(two_layers(), array(16, 8, dtype=jnp.bfloat16)).input_types[-1] == "bf16[16,8]"
    with jax.default_matmul_precision("highest"):
        step.plan(two_layers(), array(16, 8))
    assert fn.traces - before == 3


def test_a_call_with_another_shape_says_that_it_plans_again(counted: Any) -> None:
    _, step = counted
    params, _ = step(two_layers(), array(16, 8))
    with pytest.warns(AutoparWarning, match=r"counted is planned and compiled again: 'x' is f32\[40,8\] and was "):
        params, _ = step(params, array(40, 8))
    params, _ = step(params, array(16, 8))
    step.compiled(params, array(48, 8))
    params, _ = step(params, array(48, 8))  # compiled ahead
    with pytest.warns(AutoparWarning, match=r"'x' is bf16\[48,8\] and was f32\[48,8\]. Pass it in one dtype; "):
        step(params, array(48, 8, dtype=jnp.bfloat16))


@pytest.mark.parametrize("value", [object(), np.array(["text"]), np.ma.array([1.0])])
def test_a_later_call_names_what_is_no_array(value: Any, counted: Any) -> None:
    _, step = counted
    params, _ = step(two_layers(), array(16, 8))
    with pytest.raises(ArgumentError, match=rf"argument 'x' is {type(value).__name__}"):
        step(params, value)


def test_devices_that_are_left_idle_are_named() -> None:
    step = parallelize(plain, mesh=(3,))
    with pytest.warns(AutoparWarning, match=r"plain: the mesh \(x=3\) leaves 5 of the 8 devices here idle"):
        step.plan(two_layers(), array(24, 8))
    parallelize(plain, mesh=(4,)).plan(two_layers(), array(24, 8))  # half of the devices may be meant
    autopar.plan(plain, two_layers(), array(24, 8), mesh=(3,))  # for no devices here


def test_a_plan_for_another_cluster_is_told_apart() -> None:
    args = two_layers(), array(24, 8)
    plan = autopar.plan(plain, *args, mesh=(8,), cluster="dgx-h100")
    with pytest.warns(AutoparWarning, match="plain: the plan was made for .*'dgx-h100'.* 'tpu-v5e' plan again"):
        again = autopar.plan(plain, *args, plan=plan, cluster="tpu-v5e")
    assert again.step_time_s == plan.step_time_s
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoparWarning)
        autopar.plan(plain, *args, plan=plan, cluster="dgx-h100")
        parallelize(plain, plan=plan)(*args)


def test_a_step_count_may_begin_as_a_python_number() -> None:
    traces: list[int] = []

    def count(n: Any, x: jax.Array) -> Any:
        traces.append(1)
        return n + 1, x * n

    step = parallelize(count, mesh=(8,))
    n: Any = 0
    for expected in (1, 2, 3):
        n, _ = step(n, array(8, 8))
        assert (int(n), n.weak_type) == (expected, True)
    assert len(traces) == 1


def test_x64_is_a_setting_like_any_other() -> None:
    params = {name: np.asarray(p, np.float64) for name, p in two_layers().items()}
    x = np.asarray(array(16, 8), np.float64)
    step = parallelize(plain, mesh=(8,))
    single = step.plan(params, x)
    with jax.enable_x64(True):
        double = step.plan(params, x)
        assert_equal(step(params, x), jax.jit(plain)(params, x))
    assert (single.input_types[-1], double.input_types[-1]) == ("f32[16,8]", "f64[16,8]")


def test_static_arguments_are_part_of_the_key() -> None:
    step = parallelize(lambda x, power: x**power, static_argnums=1, mesh=(8,))
    assert [step(2.0 * jnp.ones(8), p)[0] for p in (1, 2, 3, 2)] == [2, 4, 8, 4]


def test_inlined_while_another_function_is_traced(counted: Any) -> None:
    _, step = counted
    params, x = two_layers(), array(16, 8)
    expected = jax.grad(lambda p: plain(p, x)[1])(params)
    with pytest.warns(AutoparWarning, match="counted is parallelized, and traced into another function"):
        assert_equal(jax.grad(lambda p: step(p, x)[1])(params), expected)
    outer = parallelize(lambda p, x: step(step(p, x)[0], x), mesh=(8,), donate_argnums=())
    assert_equal(outer(params, x), jax.jit(lambda p, x: plain(plain(p, x)[0], x))(params, x))


def test_the_wrapper_looks_like_the_function() -> None:
    step = parallelize(plain)
    assert (step.__name__, step.__wrapped__) == ("plain", plain)


# Donation


@pytest.mark.core
def test_state_is_donated_and_the_batch_is_not(counted: Any) -> None:
    _, step = counted
    x = array(16, 8)
    first, _ = step(two_layers(), x)
    second, _ = step(first, x)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    assert not x.is_deleted()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(second))


@pytest.mark.parametrize("place", ["one device", "replicated", "other cut"])
def test_donation_spares_what_had_to_be_moved(place: str) -> None:
    step = parallelize(plain, mesh={"x": 8}, pins={"params/*": P("x")})
    mesh = Mesh(np.array(jax.devices()), ("all",))
    places = {
        "one device": jax.devices()[1],
        "replicated": NamedSharding(mesh, P()),
        "other cut": NamedSharding(mesh, P(None, "all")),
    }
    params = jax.device_put(two_layers(), places[place])
    step(params, array(16, 8))
    assert_equal(params, two_layers())


@pytest.mark.parametrize("options", [{}, {"stages": 2, "num_microbatches": 2}], ids=["one mesh", "stages"])
def test_an_array_may_occur_twice_in_the_state(options: Any) -> None:
    def averaged(state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], x)
        params = sgd(state["params"], grads)
        return {"params": params, "mean": jax.tree.map(lambda m, p: (m + p) / 2, state["mean"], params)}, value

    step = parallelize(averaged, mesh=(8,), **options)
    placed, _ = step({"params": two_layers(), "mean": two_layers()}, array(16, 8))
    params = gather(placed["params"])
    expected = averaged({"params": params, "mean": params}, array(16, 8))
    assert_equal(step({"params": placed["params"], "mean": dict(placed["params"])}, array(16, 8)), expected)


def test_donation_can_be_chosen() -> None:
    for chosen, donated in (((), ()), (0, (0, 1)), ((0, 1), (0, 1, 2))):
        plan = autopar.plan(plain, two_layers(), array(16, 8), mesh=(8,), donate_argnums=chosen)
        assert plan.donated == donated


def test_an_argument_that_is_named_as_the_batch_is_not_donated() -> None:
    """An autoencoder returns its reconstruction, which looks like the next batch."""

    def step(w: Any, x: Any) -> Any:
        out = jnp.tanh(x @ w)
        return w - 0.1 * jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - x) ** 2))(w), out

    args = array(8, 8), array(16, 8)
    assert autopar.plan(step, *args, mesh=(8,)).donated == (0, 1)
    assert autopar.plan(step, *args, mesh=(8,), batch_argnums=1).donated == (0,)


def test_less_than_a_plan_donates_may_be_donated() -> None:
    plan = autopar.plan(plain, two_layers(), array(16, 8), mesh=(8,))
    assert plan.donated
    params = jax.tree.map(jnp.asarray, two_layers())
    step = parallelize(plain, plan=plan, donate_argnums=())
    assert_equal(step(params, array(16, 8)), step(params, array(16, 8)))
    assert step.plan(params, array(16, 8)).donated == ()
    with pytest.raises(ArgumentError, match="there is no traced argument 7"):
        parallelize(plain, plan=plan, donate_argnums=7)(params, array(16, 8))


# Meshes


MESHES = {
    "tuple": (2, 4),
    "names": {"x": 2, "y": 4},
    "auto": Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2),
    "explicit": jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2),
    "other order": Mesh(np.array(jax.devices())[::-1].reshape(2, 4), ("x", "y")),
    "half the devices": Mesh(np.array(jax.devices())[4:].reshape(2, 2), ("x", "y")),
    "search": None,
}


@pytest.mark.parametrize("mesh", list(MESHES.values()), ids=list(MESHES))
def test_a_mesh_in_every_form(mesh: Any) -> None:
    step = parallelize(plain, mesh=mesh, donate_argnums=())
    args = two_layers(), array(16, 8)
    results = step(*args)
    assert_equal(results, jax.jit(plain)(*args))
    if isinstance(mesh, Mesh):
        assert step.plan(*args).mesh_names == mesh.axis_names
        assert results[0]["up"].sharding.device_set == set(mesh.devices.flat)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("asked", [True, False], ids=["given", "searched"])
def test_inside_a_mesh_that_the_user_has_set(kind: AxisType, asked: bool) -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    step = parallelize(plain, mesh=mesh if asked else None, donate_argnums=())
    args = two_layers(), array(16, 8)
    expected = jax.jit(plain)(*args)
    with jax.set_mesh(mesh):
        assert_equal(step(*args), expected)


def test_progress_is_told_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    autopar.plan(plain, two_layers(), array(16, 8), mesh=(8,), progress=True)
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert all(line.startswith("autopar: plain: ") for line in lines)
    assert [line.split(": ", 2)[2].split(":")[0] for line in lines] == ["tracing", "planning mesh 8", "mesh 8"]
    assert "per step, gap 0.00%" in lines[-1]


def test_planning_needs_no_devices() -> None:
    shapes = jax.eval_shape(lambda: (two_layers(), array(512, 8)))
    by_mesh = autopar.plan(plain, *shapes, mesh=AbstractMesh((64, 8), ("data", "model")))
    assert (by_mesh.mesh_sizes, by_mesh.mesh_names) == ((64, 8), ("data", "model"))
    cluster = Cluster.custom(
        (4, 16), alpha=(1e-5, 1e-6), beta=(1e-10, 1e-11), peak_flops=1e14, memory_bandwidth=1e12, memory_bytes=8e10
    )
    assert autopar.plan(plain, *shapes, cluster=cluster, mesh=(4, 16)).mesh_sizes == (4, 16)
    for stages in (1, 2):
        step = parallelize(plain, cluster=cluster, mesh=(4, 16), stages=stages)
        assert step.plan(*shapes).mesh_sizes == (4, 16)
        with pytest.raises(MeshError, match="needs 64 devices to run on, but only 8 are here"):
            step.compiled(*shapes)


def test_the_mesh_of_a_constraint_is_planned_for_where_none_is_given() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def step(w: Any, x: Any) -> Any:
        return w, jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("data", "model")))

    args = array(8, 8), array(16, 8)
    run = parallelize(step, donate_argnums=())
    assert run.plan(*args).mesh == {"data": 2, "model": 4}
    assert_equal(run(*args), jax.jit(step)(*args))


CONSTRAINED_MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def constrained(spec: Any, mesh: Any = None) -> Any:
    """A step whose hidden layer is constrained to a bare PartitionSpec, or to one on a mesh."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            h = jax.lax.with_sharding_constraint(
                jnp.tanh(x @ w[0]), spec if mesh is None else NamedSharding(mesh, spec)
            )
            return jnp.sum((h @ w[1]) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return [p - 0.1 * g for p, g in zip(w, gradient, strict=True)], value

    return step


CONSTRAINED = ([array(8, 16), array(16, 8)], array(16, 8))


@pytest.mark.core
def test_a_constraint_with_a_bare_spec_is_a_pin_on_the_mesh_that_is_planned_for() -> None:
    bare, named = constrained(P("model", "data")), constrained(P("model", "data"), CONSTRAINED_MESH)
    mesh = {"data": 4, "model": 2}
    plans = [autopar.plan(step, *CONSTRAINED, mesh=mesh, cluster="dgx-h100") for step in (bare, named)]
    pinned = [op.outputs[0] for op in trace(bare, *CONSTRAINED, mesh_axes=mesh).graph.walk() if "constraint" in op.name]
    assert [plans[0].stages[0].values[value] for value in pinned] == [(1, 0), (1, 0)]  # forward and backward
    assert plans[0].step_time_s == plans[1].step_time_s
    assert autopar.verify(plans[0], bare, *CONSTRAINED).ok
    expected = jax.jit(
        constrained(P("model", "data"), jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2))
    )(*CONSTRAINED)
    for options in ({}, {"stages": 2, "num_microbatches": 2}):
        assert_equal(parallelize(bare, mesh=mesh, donate_argnums=(), **options)(*CONSTRAINED), expected)
    unnamed = parallelize(constrained(P("x", "y")), mesh=(4, 2), donate_argnums=())
    assert_equal(unnamed(*CONSTRAINED), expected)
    assert autopar.check(bare, *CONSTRAINED, mesh=mesh).ok


LINE = r"with_sharding_constraint at test_api\.py:\d+"


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("spec", "mesh", "message"),
    [
        (P("data"), None, rf"{LINE} has a PartitionSpec, and no mesh has its axes: give the mesh .* mesh=\{{'data': 4"),
        (P("rows"), {"data": 4}, rf"{LINE} names an axis that the mesh lacks: .*rows.*\('data',\)\. Name axes of"),
        (P(None, None, "data"), {"data": 4}, rf"{LINE} does not fit its value: .*"),
        (P("data", "data"), {"data": 4}, rf"{LINE} does not fit its value: .*duplicate entries for `data`"),
        ("data", {"data": 4}, rf"{LINE} does not fit its value: .*PartitionSpec.*got data"),
    ],
    ids=str,
)
def test_a_constraint_that_fits_no_mesh_is_named_with_its_line(spec: Any, mesh: Any, message: str, stages: int) -> None:
    with pytest.raises(PinError, match=message):
        autopar.plan(constrained(spec), *CONSTRAINED, mesh=mesh, cluster="cpu-host", stages=stages)


def test_a_constraint_over_explicit_axes_says_what_to_do() -> None:
    with (
        jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))),
        pytest.raises(PinError, match=rf"{LINE} names Explicit axes, .*jax\.sharding\.reshard, which is a pin, or"),
    ):
        autopar.plan(constrained(P("data")), *CONSTRAINED, mesh={"data": 8})


# Arrays that lie somewhere already


@pytest.mark.parametrize("spec", [P(), P("a"), P("b", "a"), P(None, ("a", "b"))], ids=str)
def test_arrays_sharded_over_another_mesh(counted: Any, spec: PartitionSpec) -> None:
    _, step = counted
    other = Mesh(np.array(jax.devices())[::-1].reshape(4, 2), ("a", "b"))
    args = two_layers(), array(16, 8)
    expected = jax.jit(plain)(*args)
    assert_equal(step(*jax.device_put(args, NamedSharding(other, spec))), expected)


def shares(tree: Any) -> dict[str, int]:
    """For each leaf, into how many pieces its largest piece would cut it."""
    return {name: leaf.size // max(s.data.size for s in leaf.addressable_shards) for name, leaf in tree.items()}


@pytest.mark.core
def test_init_never_holds_a_whole_array_on_one_device() -> None:
    pins = {"params/up": P("x", "y"), "params/down": P("y")}
    step = parallelize(plain, mesh={"x": 2, "y": 4}, pins=pins)
    spread = step.init(lambda seed: two_layers(), 0)
    step.plan(spread, array(16, 8))
    planned = step.init(lambda seed: two_layers(), 0)
    assert (shares(spread), shares(planned)) == ({"up": 8, "down": 8}, {"up": 8, "down": 4})
    for params in (spread, planned):
        assert_equal(params, two_layers())


def test_results_keep_the_shardings_of_the_plan(counted: Any) -> None:
    _, step = counted
    args = two_layers(), array(16, 8)
    plan = step.plan(*args)
    params, value = step(*args)
    assert params["up"].sharding.spec == plan.shardings()["params/up"]
    assert value.sharding.is_fully_replicated


def test_gather_gives_whole_host_values() -> None:
    mesh = Mesh(np.array(jax.devices()), ("d",))
    key = jax.random.key(1)
    tree = {"x": jax.device_put(array(16, 8), NamedSharding(mesh, P("d"))), "key": key, "none": None, "text": "a"}
    whole = gather(tree)
    np.testing.assert_array_equal(whole["x"], array(16, 8))
    assert isinstance(whole["x"], np.ndarray)
    assert (whole["key"] is key, whole["none"], whole["text"]) == (True, None, "a")


# Ahead of time, and from a saved plan


def test_lower_and_compile_ahead_of_time(counted: Any) -> None:
    _, step = counted
    args = two_layers(), array(16, 8)
    expected = jax.jit(plain)(*args)
    lowered = step.lower(*args)
    exe = lowered.compile()
    assert list(exe.programs) == ["step"]
    assert "stablehlo" in lowered.as_text()
    assert "HloModule" in exe.as_text()
    assert exe.memory_analysis().argument_size_in_bytes > 0
    assert exe.cost_analysis()["flops"] > 0
    assert_equal(exe(*args), expected)


@pytest.mark.core
def test_a_plan_goes_through_a_file(counted: Any, tmp_path: Path) -> None:
    _, step = counted
    args = two_layers(), array(16, 8)
    plan = step.plan(*args)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    for source in (plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        other = parallelize(plain, plan=source, donate_argnums=())
        assert other.plan(*args) == replace(plan, donated=())
    assert_equal(other(*args), jax.jit(plain)(*args))


def test_shardings_by_path_and_by_tree(counted: Any) -> None:
    _, step = counted
    args = two_layers(), array(16, 8)
    plan = step.plan(*args)
    by_path = plan.shardings()
    assert list(by_path) == ["params/down", "params/up", "x"]
    assert plan.shardings(args) == ({"down": by_path["params/down"], "up": by_path["params/up"]}, by_path["x"])
    assert plan.shardings(args[0]) == {"down": by_path["params/down"], "up": by_path["params/up"]}


@jax.tree_util.register_pytree_node_class
class Checked:
    """A pair of arrays whose constructor compares their shapes, as those of libraries do."""

    def __init__(self, x: Any, y: Any) -> None:
        if x.shape[0] != y.shape[0]:
            raise ValueError(f"{x.shape} and {y.shape}")
        self.x, self.y = x, y

    def tree_flatten(self) -> tuple[tuple[Any, Any], None]:
        return (self.x, self.y), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[Any, Any]) -> Checked:
        return cls(*children)


@pytest.mark.parametrize(
    "options", [{"mesh": (2,)}, {"mesh": (2,), "num_microbatches": 2}, {"mesh": (2,), "stages": 2, "schedule": "1f1b"}]
)
def test_structures_that_check_their_leaves(options: dict[str, Any]) -> None:
    def step(w: jax.Array, data: Checked) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(lambda w: ((jnp.tanh(data.x @ w) @ w.T - data.y) ** 2).mean())(w)
        return w - grad, loss

    w, data = jnp.ones((4, 4)) / 7, Checked(jnp.ones((8, 4)), jnp.ones((8, 4)))
    expected = step(w, data)
    parallel = autopar.parallelize(step, cluster=dear((2,)), donate_argnums=(), batch_argnums=1, **options)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), parallel(w, data), expected)
    plan = parallel.plan(w, data)
    assert plan.what_if(gap=0.0).after.step_time_s > 0
    assert autopar.check(step, w, data, cluster=dear((2,)), **options).ok


# Values of another type


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda plan: plan.explain(3), r"explain\(3\): give the name of a value"),
        (lambda plan: plan.diff(3), r"diff\(3\): give the other Plan"),
        (lambda _: Cluster.named(3), r"Cluster.named\(3\): give a name"),
        (lambda _: autopar.pins.fsdp(3), r"pins.fsdp\(3\): give the name of a mesh axis"),
        (lambda _: autopar.pins.zero1(()), r"pins.zero1\(\(\)\): give the name"),
        (lambda _: autopar.pins.megatron(["x", 3]), r"pins.megatron\(\['x', 3\]\): give the name"),
    ],
    ids=["explain", "diff", "named", "fsdp", "zero1", "megatron"],
)
def test_a_value_of_another_type_is_named(call: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(autopar.plan(plain, two_layers(), array(16, 8), mesh=(8,)))


@pytest.mark.parametrize("stages", [1, 2])
def test_a_compiled_step_names_what_it_is_not_compiled_for(stages: int) -> None:
    params, x = two_layers(), array(16, 8)
    step = parallelize(plain, mesh=(8,), cluster=dear((8,)), stages=stages, donate_argnums=()).compiled(params, x)
    for other, text in ((x[:8], r"f32\[8,8\]"), (x[:3], r"f32\[3,8\]"), (x.astype(jnp.int32), r"s?i?32\[16,8\]")):
        with pytest.raises(ArgumentError, match=rf"'x' is {text}, and the step is compiled for f32\[16,8\]; "):
            step(params, other)
    with pytest.raises(ArgumentError, match=r"compiled for (\d) arrays, got \d; "):
        step(params, x, x)
    assert_equal(step(params, x), jax.jit(plain)(params, x))


def test_a_deep_copy_is_the_function_itself() -> None:
    step = parallelize(plain, mesh=(8,))
    assert copy.deepcopy({"step": step}) == {"step": step}
