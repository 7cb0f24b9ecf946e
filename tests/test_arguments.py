"""Modules as arguments and results: Flax NNX updated in place, Equinox with what is no array as structure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import autopar
from autopar.api import parallelize
from tests.real_programs import array
from tests.test_real_programs import assert_equal

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
    made = with_optimizer(Net)()
    assert_equal(twice(step, made, X, Y), twice(nnx.jit(train), with_optimizer(Net)(), X, Y))
    assert made[0].twin is made[0].inner
    assert made[0].calls[...] == 2
    plan = step.plan(*made, X, Y)
    kept = [path for i, path in enumerate(plan.input_paths) if i not in plan.donated]
    assert kept == ["model/dropout/rngs/key", "x", "y"]
    assert "model/inner/kernel" in plan.input_paths
    assert not any("twin" in path for path in plan.input_paths)


@pytest.mark.parametrize(
    "options",
    [{"num_microbatches": 2}, {"stages": 2, "num_microbatches": 2}],
    ids=["microbatches", "stages"],
)
def test_in_parts(options: Any) -> None:
    found = twice(parallelize(train, **MESH, **options), with_optimizer(Deep)(), X, X)
    assert_equal(found, twice(nnx.jit(train), with_optimizer(Deep)(), X, X))


def test_modules_are_created_in_their_place(step: Any) -> None:
    shapes = nnx.eval_shape(with_optimizer(Net))
    plan = step.plan(*shapes, X, Y)
    made = step.init(with_optimizer(Net))
    assert made[0].twin is made[0].inner
    assert made[0].outer.kernel[...].sharding.spec == plan.shardings()["model/outer/kernel"]
    assert step.plan(*made, X, Y) is plan
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
    made = parallelize(lambda key: Net(nnx.Rngs(key)), **MESH)(jax.random.key(0))
    assert made.twin is made.inner
    assert_equal(made.outer.kernel[...], Net(nnx.Rngs(0)).outer.kernel[...])


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
