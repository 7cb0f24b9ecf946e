"""`autopar.check`: what is equal and what differs, and that arguments are left as they are."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import autopar
from autopar.api import parallelize
from autopar.bench.equal.case import dear
from autopar.errors import ArgumentError, DifferenceError, DonatedError
from autopar.hardware.cluster import Cluster
from autopar.verification import differences
from tests.programs.steps import array, loss, sgd, two_layers

CUT: Any = {"mesh": (8,), "cluster": dear((8,))}  # at prices at which the smallest step is cut


def train(state: Any, x: jax.Array) -> Any:
    value, grads = jax.value_and_grad(loss)(state["params"], x)
    key, _ = jax.random.split(state["key"])
    return {"params": sgd(state["params"], grads), "count": state["count"] + 1, "key": key}, value


def state() -> Any:
    return {"params": two_layers(), "count": jnp.zeros((), jnp.int32), "key": jax.random.key(0)}


@pytest.mark.core
def test_an_equal_step_leaves_its_arguments_alone() -> None:
    step = parallelize(train, **CUT)
    created, x = step(state(), array(64, 8))[0], array(64, 8)
    report = autopar.check(step, created, x)
    assert report.ok, str(report)
    assert any(c.kind == "all-reduce" for c in report.plan.collectives)
    assert {leaf.path for leaf in report.leaves} == {"0/params/up", "0/params/down", "0/count", "0/key", "1"}
    assert [leaf.excess for leaf in report.leaves] == sorted((leaf.excess for leaf in report.leaves), reverse=True)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((created, x)))
    report.raise_if_different()
    assert str(report).startswith("train on the mesh (x=8) beside one device: 5 leaves are equal\n")


def test_modules_are_left_alone_and_noise_is_not_a_difference() -> None:
    """The bias before a batch norm has a gradient of zero, but for rounding, of which Adam makes a whole step."""

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layer, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.norm(self.layer(x))

    def fit(model: Net, optimizer: Any, x: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - jnp.sin(x.sum(1, keepdims=True))) ** 2))(model)
        optimizer.update(model, grads)
        return value

    model = Net(nnx.Rngs(0))
    before = model.layer.bias[...]
    report = autopar.check(fit, model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), array(64, 8), **CUT)
    assert report.ok, str(report)
    bias = next(leaf for leaf in report.leaves if leaf.path == "model/layer/bias")
    assert bias.allowed > 100 * differences.TOLERANCES["float32"] * 1e-2  # of steps of this length
    assert model.layer.bias[...] is before


class Drifts:
    """A function that is another one whenever it is traced."""

    __name__ = "drifts"

    def __init__(self) -> None:
        self.traces = 0

    def __call__(self, x: jax.Array, n: jax.Array) -> Any:
        self.traces += 1
        return {"same": x * 2, "float": x + 1e-3 * self.traces, "count": n + self.traces}


def test_what_differs_comes_first_and_raises_only_when_asked() -> None:
    report = autopar.check(Drifts(), array(8, 8), jnp.arange(8), mesh=(8,))
    assert not report.ok
    assert [leaf.path for leaf in report.leaves] == ["count", "float", "same"]
    assert [leaf.ok for leaf in report.leaves] == [False, False, True]
    assert [leaf.absolute for leaf in report.leaves] == pytest.approx([1, 1e-3, 0], rel=1e-3)
    with pytest.raises(
        DifferenceError, match=r"beside one device: 2 of 3 leaves DIFFER\n(.*\n)+count .* DIFFERS\n"
    ) as e:
        report.raise_if_different()
    assert re.search(r"^same +float32\[8,8\] +0 +0 +\S+$", str(e.value), re.MULTILINE)


def test_options_are_those_of_the_step_unless_some_are_given() -> None:
    step = parallelize(train, mesh=(8,), num_microbatches=2)
    assert autopar.check(step, state(), array(16, 8)).plan.num_microbatches == 2
    assert autopar.check(step, state(), array(16, 8), mesh=(2, 4)).plan.mesh_sizes == (2, 4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_inside_a_mesh_that_the_user_has_set(kind: AxisType) -> None:
    with jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(kind,))):
        report = autopar.check(train, state(), array(16, 8))
    assert report.ok, str(report)


def small(memory: int) -> Cluster:
    return Cluster.custom((8,), 1e-6, 1e-10, {"float32": 1e12}, 1e11, memory)


def test_a_step_that_names_its_devices_has_no_run_on_one() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def on_mesh(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, PartitionSpec("x")))

    args = jnp.ones((8, 8)), jnp.ones((16, 8))
    with pytest.raises(
        ArgumentError, match=r"on_mesh is fixed .* by a sharding_constraint at test_checking\.py:\d+: as"
    ):
        autopar.check(on_mesh, *args, mesh=mesh)
    with jax.set_mesh(mesh):  # as the message says
        by_name = autopar.check(
            lambda w, x: jax.lax.with_sharding_constraint(x @ w, PartitionSpec("x")), *args, mesh=mesh
        )
    assert by_name.ok


def test_a_step_too_large_for_one_device_is_compared_on_a_smaller_batch() -> None:
    options: Any = {"mesh": (8,), "cluster": small(60_000), "num_microbatches": 4}
    report = autopar.check(train, state(), array(1024, 8), **options)
    assert report.ok, str(report)
    assert re.search(r"\nwith a batch of (128|64|32) of 1024 examples, which one device has room for\n", str(report))
    with pytest.raises(
        ArgumentError, match=r"train needs .* kB on one device, .* and a device has 1 kB: .* smaller mod"
    ):
        autopar.check(train, state(), array(1024, 8), mesh=(8,), cluster=small(1000))


NAN = float("nan")


@pytest.mark.parametrize(
    ("ours", "theirs", "absolute", "magnitude"),
    [
        ([1.0, NAN, math.inf], [1.0, NAN, math.inf], 0.0, 1.0),
        ([1.0, NAN], [1.0, 2.0], math.inf, 2.0),
        ([math.inf], [-math.inf], math.inf, 0.0),
        ([-0.0], [0.0], 0.0, 0.0),
        ([1 + 1j], [1 - 1j], 2.0, math.sqrt(2)),
        ([True, False], [True, True], 1.0, 0.0),
        ([2**62], [2**62 + 1], 1.0, 0.0),
        ([], [], 0.0, 0.0),
        ([0.0, 0.0], [0.0], math.inf, 0.0),
    ],
)
def test_differences(ours: Any, theirs: Any, absolute: float, magnitude: float) -> None:
    x, y = np.asarray(ours), np.asarray(theirs)
    assert (differences.absolute(x, y), differences.magnitude(y)) == (absolute, pytest.approx(magnitude))


def test_tolerances_go_by_the_least_precise_type() -> None:
    tolerances = [differences.tolerance(t) for t in ((), ("int32", "key<fry>"), ("float32", "float64"), ("bfloat16",))]
    assert tolerances == [0.0, 0.0, 1e-5, 3e-2]
    assert differences.tolerance(("float8_e4m3fn", "float32")) > 3e-2


def test_arguments_without_values_are_refused() -> None:
    def doubled(p: Any, x: Any) -> Any:
        return 2 * p, x

    p, x = jnp.ones((8, 8)), jnp.ones(8)
    with pytest.raises(ArgumentError, match=r"'p' is ShapeDtypeStruct\(.*; a call needs arrays"):
        autopar.check(doubled, *jax.eval_shape(lambda: (p, x)), mesh=(8,))
    p.delete()
    with pytest.raises(DonatedError, match=r"'p' of shape \(8, 8\) was donated to an earlier step"):
        autopar.check(doubled, p, x, mesh=(8,))
