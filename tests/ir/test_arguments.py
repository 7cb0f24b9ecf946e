"""Modules as arguments and results: Flax NNX updated in place, Equinox with what is no array as structure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import autopar
from autopar.api import parallelize
from autopar.errors import AutoparWarning
from tests.programs.steps import array
from tests.programs.test_real_programs import assert_equal

MESH: Any = {"mesh": (8,)}
ADAM = optax.adam(1e-2)  # made once: its functions are part of the structure of what it is in
X, Y = array(16, 8), array(16, 16, seed=1)


class Net(nnx.Module):
    """Every kind of state: parameters, batch statistics, random streams, a counter, and a layer under two names."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(16, 8, rngs=rngs)
        self.twin = self.inner
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.twin(self.outer(self.dropout(nnx.relu(self.norm(self.inner(x))))))


class Deep(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def with_optimizer(make: Callable[[nnx.Rngs], Any]) -> Callable[[], tuple[Any, ...]]:
    def created() -> tuple[Any, ...]:
        model = make(nnx.Rngs(0))
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
        return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param), metrics

    return created


def train(model: Any, optimizer: Any, metrics: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return loss


def evaluate(model: Any, x: jax.Array) -> jax.Array:
    return model(x).sum()


def twice(step: Callable[..., Any], objects: Sequence[Any], *rest: Any) -> Any:
    """Results of two steps and what the objects' Variables hold afterwards."""
    results = [step(*objects, *rest) for _ in range(2)]
    return results, jax.tree.leaves(nnx.to_pure_dict(nnx.state(objects)))


# Flax NNX


@pytest.fixture(scope="module")
def step() -> Any:
    return parallelize(train, **MESH)


@pytest.mark.core
def test_a_step_trains_modules_in_place(step: Any) -> None:
    state = with_optimizer(Net)()
    assert_equal(twice(step, state, X, Y), twice(nnx.jit(train), with_optimizer(Net)(), X, Y))
    assert state[0].twin is state[0].inner
    assert state[0].calls[...] == 2
    plan = step.plan(*state, X, Y)
    kept = [path for i, path in enumerate(plan.input_paths) if i not in plan.donated]
    assert kept == ["model/dropout/rngs/key", "x", "y"]
    assert "model/inner/kernel" in plan.input_paths
    assert not any("twin" in path for path in plan.input_paths)


@pytest.mark.parametrize(
    "options",
    [{"num_microbatches": 2}, {"stages": 2, "num_microbatches": 2}],
    ids=["microbatches", "stages"],
)
def test_options_that_rewrite_the_step(options: Any) -> None:
    results = twice(parallelize(train, **MESH, **options), with_optimizer(Deep)(), X, X)
    assert_equal(results, twice(nnx.jit(train), with_optimizer(Deep)(), X, X))


def test_modules_are_created_sharded(step: Any) -> None:
    shapes = nnx.eval_shape(with_optimizer(Net))
    plan = step.plan(*shapes, X, Y)
    state = step.init(with_optimizer(Net))
    assert state[0].twin is state[0].inner
    assert state[0].outer.kernel[...].sharding.spec == plan.shardings()["model/outer/kernel"]
    assert step.plan(*state, X, Y) is plan
    rngs = nnx.Rngs(0)
    step.init(lambda rngs: nnx.Linear(8, 8, rngs=rngs), rngs)
    assert rngs.default.count[...] == 2


def test_what_a_step_only_reads_is_no_state_and_its_modes_are_structure() -> None:
    model, evaluated = Net(nnx.Rngs(0)), parallelize(evaluate, **MESH)
    model.eval()
    plan = evaluated.plan(model, X)
    assert [plan.input_paths[i] for i in plan.donated] == ["model/calls"]
    assert plan.output_paths == ("model/calls", "")
    assert autopar.verify(plan, evaluate, model, X, target="shardy").ok
    model.train()
    changed = ("model/calls", "model/dropout/rngs/count", "model/norm/mean", "model/norm/var", "")
    assert evaluated.plan(model, X).output_paths == changed


def test_what_is_donated_by_position_is_kept_where_it_does_not_change() -> None:
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    evaluated = parallelize(evaluate, donate_argnums=0, **MESH)
    assert_equal([evaluated(model, X) for _ in range(2)], [evaluate(model, X)] * 2)


def test_objects_may_refer_to_each_other_in_a_cycle() -> None:
    """In one function, behind a call without objects too."""
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0), use_bias=False)
    model.itself = model  # pyright: ignore[reportAttributeAccessIssue]

    @parallelize(**MESH)
    def halve(model: Any, x: jax.Array) -> jax.Array:
        if not isinstance(model, nnx.Module):
            return x @ model
        model.itself.kernel[...] /= 2
        return model(x)

    kernel = model.kernel[...]
    assert_equal(halve(kernel, X), X @ kernel)
    for times in (2, 4):
        assert_equal(halve(model, X), X @ kernel / times)


def test_objects_are_returned_as_they_are_and_may_change_their_structure() -> None:
    def grows(models: Any, x: jax.Array) -> Any:
        models["a"].hidden = nnx.Variable(x.sum())
        return models["a"], nnx.Linear(8, 8, rngs=nnx.Rngs(1)), nnx.state(models["a"])

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    same, new, state = parallelize(grows, **MESH)({"a": model}, X)
    assert same is model
    assert_equal(model.hidden[...], X.sum())
    assert_equal(new.kernel[...], nnx.Linear(8, 8, rngs=nnx.Rngs(1)).kernel[...])
    assert_equal(state["kernel"][...], model.kernel[...])


def test_a_module_may_be_made_from_arrays() -> None:
    state = parallelize(lambda key: Net(nnx.Rngs(key)), **MESH)(jax.random.key(0))
    assert state.twin is state.inner
    assert_equal(state.outer.kernel[...], Net(nnx.Rngs(0)).outer.kernel[...])


def test_random_streams_and_variables_by_keyword() -> None:
    def noisy(x: jax.Array, *, rngs: nnx.Rngs, total: nnx.Variable[jax.Array]) -> jax.Array:
        total[...] += x.sum()
        return x + rngs.noise.normal(x.shape)

    runs: list[Any] = []
    for fn in (nnx.jit(noisy), parallelize(noisy, **MESH)):
        rngs, total = nnx.Rngs(noise=3), nnx.Variable(jnp.zeros(()))
        runs.append(([fn(X, rngs=rngs, total=total) for _ in range(2)], rngs.noise.count[...], total[...]))
    assert_equal(runs[1], runs[0])


def test_a_state_that_is_split_by_hand_stays_a_pytree() -> None:
    graphdef, state = nnx.split(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))

    def functional(state: Any, x: jax.Array) -> Any:
        model = nnx.merge(graphdef, state)
        model.bias[...] += model(x).sum()
        return nnx.state(model)

    plan = autopar.plan(functional, state, X, **MESH)
    assert plan.input_paths == ("state/bias/value", "state/kernel/value", "x")
    assert plan.donated == (0, 1)


def test_jit_of_nnx_inside_is_planned_and_outside_is_warned_of() -> None:
    def halve(model: nnx.Linear, x: jax.Array) -> jax.Array:
        model.kernel[...] /= 2
        return model(x).sum()

    expected, model = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    inside = parallelize(nnx.jit(halve), **MESH)
    assert_equal(inside(model, X), halve(expected, X))
    assert_equal(model.kernel[...], expected.kernel[...])
    halved = parallelize(halve, **MESH)
    with pytest.warns(AutoparWarning, match=r"halve is parallelized, .* another function .*parallelize\(outer\)"):
        result = nnx.jit(lambda model, x: (halved(model, x), model.kernel[...] + 0))(model, X)
    assert_equal(result, (halve(expected, X), expected.kernel[...]))


# Equinox, and leaves that are no arrays


class Scaled(eqx.Module):
    """Arrays, and what decides how the function runs: a number, a flag, a text, a function."""

    layer: eqx.nn.Linear
    act: Callable[..., Any]
    times: int = 2
    scale: float = 0.5
    flag: bool = True
    name: str = "scaled"

    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.times):
            x = self.act(self.layer(x)) * self.scale
        return x if self.flag else -x


def scaled() -> Any:
    model = Scaled(eqx.nn.Linear(8, 8, key=jax.random.key(0)), jax.nn.gelu)
    return model, ADAM.init(eqx.filter(model, eqx.is_inexact_array))


def fit(model: Any, state: Any, x: jax.Array) -> Any:
    loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - x) ** 2))(model)
    updates, state = ADAM.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, loss


@pytest.mark.core
def test_equinox_modules_are_taken_and_returned() -> None:
    fitted = parallelize(fit, **MESH)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x, scaled())
    plan = fitted.plan(*shapes, X)
    assert autopar.verify(plan, fit, *shapes, X, target="shardy").ok
    state = fitted.init(scaled)
    expected = scaled()
    for _ in range(2):
        *state, loss = fitted(*state, X)
        *expected, expected_loss = eqx.filter_jit(fit)(*expected, X)
    assert (type(state[0]), state[0].act, state[0].times, state[0].flag) == (Scaled, jax.nn.gelu, 2, True)
    assert_equal(eqx.filter((state, loss), eqx.is_array), eqx.filter((expected, expected_loss), eqx.is_array))
    assert fitted.plan(*state, X) is plan
    assert plan.donated == tuple(range(len(plan.inputs) - 1))


def test_other_structure_is_another_program() -> None:
    model, _ = scaled()
    shown = parallelize(lambda model, x: jax.vmap(model)(x), **MESH)
    other = eqx.tree_at(lambda m: (m.times, m.flag), model, (1, False))
    assert shown.plan(model, X) is not shown.plan(other, X)
    assert shown.plan(other, X) is shown.plan(eqx.tree_at(lambda m: m.times, other, 1), X)


def test_state_of_equinox() -> None:
    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode="batch")

    def normalized(state: Any, x: jax.Array) -> Any:
        y, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return state, y

    results, expected = parallelize(normalized, **MESH)(state, X), eqx.filter_jit(normalized)(state, X)
    assert_equal(results, expected)


def test_texts_and_functions_are_structure_in_any_tree_and_numbers_are_not() -> None:
    def run(state: Any, x: jax.Array, mode: str, *, act: Callable[..., Any]) -> Any:
        return {**state, "count": state["count"] + 1}, act(x) if mode == "train" else x, mode

    step = parallelize(run, **MESH)
    state, y, mode = step({"name": "a", "count": 0, "dtype": jnp.float32}, X, "train", act=jnp.tanh)
    assert (state["name"], state["dtype"], mode, int(state["count"])) == ("a", jnp.float32, "train", 1)
    assert_equal(y, jnp.tanh(X))
    assert step.plan(state, X, "train", act=jnp.tanh).input_paths == ("state/count", "x")
    assert_equal(step(state, X, "other", act=jnp.tanh)[1], X)


# Changes that are kept and that are lost


def test_a_step_may_use_its_containers_as_scratch() -> None:
    def scratch(state: Any, batch: Any) -> Any:
        batch["x"] = batch["x"] / 2
        labels = batch.pop("y")
        state["w"] = state["w"] - (batch["x"].T @ labels)
        return state, batch["x"].sum()

    plan = autopar.plan(scratch, {"w": array(8, 16)}, {"x": X, "y": Y}, **MESH)
    assert plan.donated == (0,)


# Methods


class Trainer:
    """An ordinary object: structure. It is counted how often its step is traced."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.traces: list[int] = []

    @parallelize(mesh=(8,))
    def step(self, w: jax.Array, x: jax.Array) -> jax.Array:
        self.traces.append(1)
        return w - self.rate * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)


class Model(nnx.Module):
    def __init__(self) -> None:
        self.total = nnx.Variable(jnp.zeros(()))

    @parallelize(mesh=(8,))
    def add(self, x: jax.Array) -> None:
        self.total[...] += x.sum()


@pytest.mark.core
def test_a_method_is_planned_for_its_object() -> None:
    first, second = Trainer(0.1), Trainer(0.2)
    w = array(8, 8)
    for trainer in (first, second, first):
        assert_equal(trainer.step(w, X), w - trainer.rate * jax.grad(lambda w: jnp.sum((X @ w) ** 2))(w))
    assert (len(first.traces), len(second.traces)) == (1, 1)
    plan = first.step.plan(w, X)
    assert plan.input_paths == ("w", "x")
    assert autopar.verify(plan, first.step, w, X, target="shardy").ok
    assert autopar.plan(first.step, w, X, mesh=(8,)).graph_hash == plan.graph_hash
    assert first.step.__name__ == "step"


def test_a_method_of_a_module_changes_it() -> None:
    model = Model()
    model.add(X)
    assert_equal(model.total[...], X.sum())
    assert model.add.plan(X).input_paths == ("self/total", "x")


# Other transformations around it


@pytest.mark.parametrize("outer", [jax.jit, jax.grad, jax.vmap, jax.linearize], ids=lambda f: f.__name__)
def test_what_is_traced_into_another_function_is_warned_of(outer: Any) -> None:
    def squared(x: jax.Array) -> jax.Array:
        return jnp.sum(x**2)

    step = parallelize(squared, mesh=(8,))
    args = (squared, X) if outer is jax.linearize else ()
    with pytest.warns(AutoparWarning, match="squared is parallelized, and traced into another function") as caught:
        outer(step, *args[1:]) if args else outer(step)(X)
    assert [w.filename for w in caught] == [__file__]


def test_what_is_traced_for_shapes_or_by_another_parallelize_is_not() -> None:
    step = parallelize(evaluate, mesh=(8,))
    assert jax.eval_shape(lambda x: step(jnp.sin, x), X).shape == ()
    assert parallelize(lambda x: jax.jit(lambda x: step(jnp.sin, x))(x), mesh=(8,)).plan(X).input_paths == ("x",)
