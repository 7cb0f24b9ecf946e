"""The program that a plan becomes: any plan gives the same numbers, and all that it says is in what is emitted."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autopar import jax_compat
from autopar.api import parallelize
from autopar.bench.equal.case import dear
from autopar.codegen import emit as codegen
from autopar.hardware.meshes import targets
from autopar.ir.trace import trace
from autopar.passes.remat.options import Options
from autopar.plans.builders.one_mesh import Planned, make_plan
from tests.programs.real_programs import PROGRAMS
from tests.programs.steps import array, loss, sgd, two_layers
from tests.programs.test_real_programs import assert_equal
from tests.support.effort import sample
from tests.support.random_plans import assert_random_plan_equals_jit

# Any plan is a correct program


FUZZED = (
    "adam",
    "branches",
    "convolutions",
    "half precision",
    "key arrays",
    "mixed leaves",
    "one hot and einsum",
    "remat",
    "scan in reverse",
    "scan of mixed carries",
    "shape changes",
    "sorting",
    "taking and scattering",
    "vmaps",
    "while of unknown length",
)


@pytest.mark.parametrize(("seed", "title"), sample(enumerate(FUZZED), [*enumerate(FUZZED)][::2]))
def test_any_plan_gives_the_same_numbers(title: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, args = dict(PROGRAMS)[title]()
    assert_random_plan_equals_jit(monkeypatch, fn, args, seed, mesh=((2, 4), (2, 2, 2))[seed % 2])


# What it is compiled with


@pytest.mark.core
@pytest.mark.parametrize(
    ("fn", "platform", "count"),
    [
        (jnp.linalg.cholesky, "cpu", 1),
        (lambda x: jax.lax.map(jnp.linalg.inv, x), "cpu", 1),
        (jnp.linalg.cholesky, "gpu", 0),
        (jnp.matmul, "cpu", 0),
    ],
)
def test_kernels_of_lapack_on_cpu_run_in_another_order(fn: Any, platform: str, count: int) -> None:
    x = jax.ShapeDtypeStruct((16, 4, 4), jnp.float32)
    graph = trace(fn, *[x] * (2 if fn is jnp.matmul else 1)).graph
    options = codegen.kernel_options(graph, platform)
    assert len(options) == count
    jax.jit(jnp.sin).lower(1.0).compile(compiler_options=dict(options) or None)  # this release knows them


def test_what_only_steers_differentiation_is_no_value_of_its_own() -> None:
    def twice(x: jax.Array) -> Any:
        return jnp.cumsum(x, 0), jnp.flip(jnp.cumsum(jax.lax.stop_gradient(x), 0), 1)

    x = array(16, 8)
    run = parallelize(twice, mesh=(8,), pins={"x": P("x")}, donate_argnums=())
    assert [op.name for op in trace(twice, x).graph.ops] == ["cumsum", "cumsum", "rev"]
    assert len([c for c in run.plan(x).collectives if c.kind == "all-to-all"]) <= 1
    assert_equal(run(x), jax.jit(twice)(x))


# What is emitted


def step(params: Any, x: jax.Array) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x)
    return sgd(params, grads), value


@pytest.fixture(scope="module")
def planned() -> tuple[Planned, codegen.Program, Any]:
    """A pinned plan, its program, and what JAX traces it to."""
    traced = trace(step, two_layers(), array(16, 8))
    (target,) = targets({"data": 2, "model": 4}, None, local=False)
    pins = {"params/up": P(None, "model"), "params/down": P("model"), "x": P("data")}
    planned_step = make_plan(traced, target.logical, "test", Options(pins=pins))
    mesh = jax_compat.auto_abstract_mesh((2, 4), ("data", "model"))
    built = codegen.program(planned_step.graph, planned_step.plan, planned_step.rules, mesh)
    return planned_step, built, built.jit().trace(*traced.in_avals).jaxpr


def test_arguments_and_results_have_the_shardings_of_the_plan(planned: Any) -> None:
    planned_step, built, _ = planned
    assert [s.spec for s in built.in_shardings] == [P("model"), P(None, "model"), P("data")]
    assert [s.spec for s in built.in_shardings] == list(planned_step.plan.in_specs())
    assert [s.spec for s in built.out_shardings] == list(planned_step.plan.out_specs())
    assert [planned_step.plan.input_paths[i] for i in built.donated] == ["params/down", "params/up"]


def test_every_homed_value_is_constrained_to_its_home(planned: Any) -> None:
    planned_step, _, jaxpr = planned
    constraints = [e for e in jaxpr.eqns if e.primitive.name == "sharding_constraint"]
    specs = {e.params["sharding"].spec for e in constraints}
    assert {P("data", "model"), P("data"), P(None, "model")} <= specs
    values = [v for v in planned_step.plan.stages[0].values if planned_step.graph.types[v].rank]
    homed = [v for v in values if v not in planned_step.graph.inputs]
    assert len(constraints) >= len(homed)
    assert all(isinstance(e.params["sharding"], NamedSharding) for e in constraints)


def test_every_operation_carries_its_tag_and_the_users_line(planned: Any) -> None:
    planned_step, _, jaxpr = planned
    tags = {tag for e in jaxpr.eqns for tag in re.findall(r"\bop\d+\b", str(e.source_info.name_stack))}
    dots = [op for op in planned_step.graph.ops if op.name == "dot_general"]
    assert len(dots) == 5
    assert {op.tag for op in dots} <= tags
    lines = {jax_compat.user_frame(e.source_info)[0].rpartition("/")[2] for e in jaxpr.eqns}
    assert "steps.py" in lines


def test_no_operation_is_lost_or_doubled(planned: Any) -> None:
    planned_step, _, jaxpr = planned

    def count(name: str, ops: Any) -> int:
        return sum(name == (op.primitive.name if hasattr(op, "primitive") else op.name) for op in ops)

    for name in ("dot_general", "tanh", "integer_pow", "sub"):
        assert count(name, jaxpr.eqns) == count(name, planned_step.graph.ops), name


def sources_of_constraints(jaxpr: Any) -> list[str]:
    """What makes the operand of each constraint, by the name of the primitive."""
    makers = {id(out): e.primitive.name for e in jaxpr.eqns for out in e.outvars}
    return [makers.get(id(e.invars[0]), "") for e in jaxpr.eqns if e.primitive.name == "sharding_constraint"]


def test_the_gradient_of_a_weight_is_made_as_its_transpose(planned: Any) -> None:
    planned_step, _, jaxpr = planned
    assert sum(op.name == "transpose" for op in planned_step.graph.ops) == 2
    assert not any(e.primitive.name == "transpose" for e in jaxpr.eqns)
    dots = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert sources_of_constraints(jaxpr).count("dot_general") == len(dots) == 5


@pytest.mark.parametrize("besides", [False, True])
def test_a_product_that_is_read_besides_is_made_as_it_is(besides: bool) -> None:
    def product(x: jax.Array, w: jax.Array) -> Any:
        y = jnp.einsum("abk,akc->abc", x, w)
        return (y.transpose(0, 2, 1), y) if besides else (y.transpose(0, 2, 1),)

    args = array(8, 16, 4), array(8, 4, 2)
    traced = trace(product, *args)
    (target,) = targets({"x": 8}, None, local=False)
    planned_step = make_plan(traced, target.logical, "test", Options(pins={"arg:0": P(None, "x")}))
    built = codegen.program(
        planned_step.graph, planned_step.plan, planned_step.rules, jax_compat.auto_abstract_mesh((8,), ("x",))
    )
    names = [e.primitive.name for e in built.jit().trace(*traced.in_avals).jaxpr.eqns]
    assert names.count("dot_general") == 1
    assert names.count("transpose") == besides
    assert_equal(parallelize(product, mesh=(8,), pins={"arg:0": P(None, "x")})(*args), jax.jit(product)(*args))


def test_a_copy_in_one_layout_serves_all_its_readers() -> None:
    def reads_twice(x: jax.Array) -> Any:
        return jnp.sort(x, axis=0) + 1, jnp.cumsum(x, axis=0), jnp.sort(x * 1.0, axis=0)

    run = parallelize(reads_twice, mesh=(8,), pins={"x": P("x"), "out:0": P(None, "x"), "out:1": P(None, "x")})
    x = array(16, 8)
    moves = [c for c in run.plan(x).collectives if c.kind == "all-to-all"]
    assert sum(c.count for c in moves) <= 2
    assert_equal(run(x), jax.jit(reads_twice)(x))


def test_a_user_constraint_is_the_plans_own() -> None:
    mesh = jax_compat.auto_mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))

    def constrained(x: jax.Array, w: jax.Array) -> Any:
        y = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("b")))
        z = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("a", P.UNCONSTRAINED)))
        return y, z

    run = parallelize(constrained, mesh=mesh)
    y, z = run(array(16, 8), array(8, 8))
    assert y.sharding.spec == P("b")
    assert z.sharding.spec[0] == "a"
    assert_equal((y, z), jax.jit(lambda x, w: (x @ w, x @ w))(array(16, 8), array(8, 8)))


def test_a_flipped_layout_changes_the_program_and_not_the_numbers(planned: Any) -> None:
    planned_step, _, _ = planned
    mesh = jax_compat.auto_mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    stage = planned_step.plan.stages[0]
    product = next(op.outputs[0] for op in planned_step.graph.ops if op.name == "dot_general")
    flipped = replace(stage, values={**stage.values, product: (1, 0)})
    results = []
    for plan in (planned_step.plan, replace(planned_step.plan, stages=(flipped,))):
        built = codegen.program(planned_step.graph, plan, planned_step.rules, mesh)
        args = [
            jax.device_put(x, s)
            for x, s in zip(jax.tree.leaves((two_layers(), array(16, 8))), built.in_shardings, strict=True)
        ]
        results.append(jax.jit(built.function)(*args))
    assert_equal(results[1], results[0])


def test_what_runs_on_pieces_reads_pieces_of_a_broadcast() -> None:
    """A broadcast has no layout of its own: it is made as it is read."""

    def fn(x: Any) -> Any:
        values, places = jax.lax.top_k(jnp.broadcast_to(x, (3, 16, 8)), 2)
        return jnp.tanh(values), places

    x = jnp.arange(128.0).reshape(16, 8)
    step = parallelize(fn, mesh=(8,), cluster=dear((8,)), pins={"x": P("x")}, donate_argnums=())
    assert_equal(step(x), fn(x))


def test_what_is_made_of_constants_is_padded_before_it_is_cut() -> None:
    """XLA gives [1, 1] for [1, 0] and for [0, 1], each padded from one element to two that two devices hold."""

    def fn(x: Any) -> Any:
        ones = jnp.ones(2)[:1]
        row = jax.lax.pad(ones, 0.0, [(0, 1, 1)]) + 2 * jax.lax.pad(ones, 0.0, [(1, 0, 1)])
        return jnp.broadcast_to(row, (8, 2)) * x

    x, columns = jnp.ones((8, 2)), P(None, "x")
    step = parallelize(fn, mesh=(2, 4), cluster=dear((2, 4)), pins={"x": columns, "out:0": columns}, donate_argnums=())
    assert_equal(step(x), fn(x))


@pytest.mark.parametrize("combine", [jax.lax.max, lambda a, b: -jax.lax.min(-a, -b)], ids=["max", "another function"])
def test_a_reduction_of_pieces_begins_with_its_value(combine: Any) -> None:
    """XLA leaves out the value where the operand is joined from pieces of one element, here by an all-to-all."""

    def fn(x: Any, w: Any) -> Any:
        return jax.lax.reduce(jnp.tanh(x @ w), jnp.float32(-0.5), combine, (0,))

    x, w = -jnp.ones((8, 8, 5)), jnp.ones((5, 1))
    step = parallelize(fn, mesh=(8,), cluster=dear((8,)), pins={"x": P("x")}, donate_argnums=())
    assert [c.kind for c in step.plan(x, w).collectives] == ["all-to-all"]
    np.testing.assert_array_equal(np.asarray(step(x, w)), -0.5)


def test_partial_sums_of_arrays_without_elements() -> None:
    """Partial along both axes, so that their leading dimensions are merged; no other extent can be inferred."""

    def loss(w: Any, x: Any) -> Any:
        return jnp.tanh(jnp.einsum("bcd,czd->bz", x, w)[:, ::2]).mean(0).sum()

    def step(w: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: loss(w, x))
        return gradient(w) + jax.jvp(gradient, (w,), (jnp.ones_like(w),))[1]

    w, x = np.zeros((1, 4, 0), np.float32), np.ones((16, 1, 0), np.float32)
    run = parallelize(step, mesh=(2, 4), cluster=dear((2, 4)), donate_argnums=())
    assert run(w, x).shape == w.shape
