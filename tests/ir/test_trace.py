"""From functions to graphs: text out, without source lines, and without parameters, whose names are those of JAX."""

from __future__ import annotations

import inspect
import re
from textwrap import dedent
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.experimental import pallas
from jax.experimental.ode import odeint

from autopar.ir.trace import trace
from tests.programs.steps import array

W, X = array(8, 4), array(2, 8)
HALVES = jnp.full((8, 4), 0.5)


def text(fn: Any, *args: Any, **options: Any) -> str:
    without_params = re.sub(r"(= [\w-]+)\[.*\]\(", r"\1(", str(trace(fn, *args, **options).graph))
    return re.sub(r"(  # \w+).*", r"\1", without_params)


def scanned(x: jax.Array) -> Any:
    return lax.scan(lambda c, v: (c + v, c * 2.0), jnp.zeros(4), x)


def looped(x: jax.Array) -> Any:
    return lax.while_loop(lambda c: c[1] < 5, lambda c: (c[0] * 2, c[1] + 1), (x, 0))


def branched(x: jax.Array, i: int) -> Any:
    return lax.cond(i > 0, lambda: x + 1, lambda: x * 2)


def rematerialised(x: jax.Array) -> Any:
    return jax.grad(lambda x: jax.checkpoint(lambda v: jnp.sin(jnp.sin(v)))(x).sum())(x)


def nested(x: jax.Array) -> Any:
    twice = jax.jit(lambda v: jax.jit(jnp.sin)(v) + v)
    return twice(twice(x))


@jax.custom_vjp
def doubled_gradient(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


doubled_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda _, g: (g * 2,))


def custom_vjp(x: jax.Array) -> Any:
    return doubled_gradient(x), jax.grad(lambda x: doubled_gradient(x).sum())(x)


def custom_jvp(x: jax.Array) -> Any:
    return jax.nn.relu(x), jax.grad(lambda x: jax.nn.relu(x).sum())(x)


def constants(x: jax.Array) -> Any:
    return lax.dot(x, HALVES), 3, x


def dead_code(x: jax.Array, unused: jax.Array) -> Any:
    jnp.sin(x)
    return lax.scan(lambda c, _: ((c[0] + 1, c[1] * 2), None), (x, unused), None, length=2)[0][0]


def dead_carry(x: jax.Array, y: jax.Array) -> Any:
    """The sum depends on the first carry; the third depends on the fourth, and nothing behind the loop on either."""

    def body(carry: Any) -> Any:
        i, total, square, power = carry
        return i + 1, total + x, square + power * y, power * power

    return lax.while_loop(lambda carry: carry[0] < 5, body, (0, x, y, y))[1]


def dead_carry_in_a_body(x: jax.Array, y: jax.Array) -> Any:
    return lax.scan(lambda c, _: (c + dead_carry(x, y), None), x, None, length=2)[0]


def placed(x: jax.Array, y: jax.Array) -> Any:
    """As in `jax.scipy.sparse.linalg.cg`."""
    x, y = jax.device_put((x, y))
    return jax.device_put(x, jax.devices()[0]) * 2, y


def constant_condition(x: jax.Array) -> Any:
    return lax.cond(False, lambda v: v * jnp.argmax(v), lambda v: v + 1, x)


GRAPHS = {
    scanned: (
        (array(3, 4),),
        """
        graph(%0: f32[3,4] "x") {
          %1: f32[4] = broadcast_in_dim(0.0:f32[])  # forward
          %6: f32[4], %7: f32[3,4] = scan(%1, %0) x3  # forward
            body(%2: f32[4], %3: f32[4]) {
              %4: f32[4] = add(%2, %3)  # forward
              %5: f32[4] = mul(%2, 2.0:f32[])  # forward
              return %4, %5
            }
          return %6 "0", %7 "1"
        }
        """,
    ),
    looped: (
        (array(4),),
        """
        graph(%0: f32[4] "x") {
          %8: f32[4], %9: i32[] = while(%0, 0:i32[]) x?  # forward
            cond(%1: f32[4], %2: i32[]) {
              %3: bool[] = lt(%2, 5:i32[])  # forward
              return %3
            }
            body(%4: f32[4], %5: i32[]) {
              %6: f32[4] = mul(%4, 2.0:f32[])  # forward
              %7: i32[] = add(%5, 1:i32[])  # forward
              return %6, %7
            }
          return %8 "0", %9 "1"
        }
        """,
    ),
    branched: (
        (array(4), 1),
        """
        graph(%0: f32[4] "x", %1: i32[] "i") {
          %2: bool[] = gt(%1, 0:i32[])  # forward
          %3: i32[] = convert_element_type(%2)  # forward
          %8: f32[4] = cond(%3, %0)  # forward
            branch0(%4: f32[4]) {
              %5: f32[4] = mul(%4, 2.0:f32[])  # forward
              return %5
            }
            branch1(%6: f32[4]) {
              %7: f32[4] = add(%6, 1.0:f32[])  # forward
              return %7
            }
          return %8 ""
        }
        """,
    ),
    rematerialised: (
        (array(4),),
        """
        graph(%0: f32[4] "x") {
          %1: f32[4] = broadcast_in_dim(1.0:f32[])  # backward
          %9: f32[4] = remat2(%0, %1)  # backward
            body(%2: f32[4], %3: f32[4]) {
              %4: f32[4] = sin(%2)  # backward
              %5: f32[4] = cos(%2)  # backward
              %6: f32[4] = cos(%4)  # backward
              %7: f32[4] = mul(%3, %6)  # backward
              %8: f32[4] = mul(%7, %5)  # backward
              return %8
            }
          return %9 ""
        }
        """,
    ),
    nested: (
        (array(4),),
        """
        graph(%0: f32[4] "x") {
          %1: f32[4] = sin(%0)  # forward
          %2: f32[4] = add(%1, %0)  # forward
          %3: f32[4] = sin(%2)  # forward
          %4: f32[4] = add(%3, %2)  # forward
          return %4 ""
        }
        """,
    ),
    custom_vjp: (
        (array(4),),
        """
        graph(%0: f32[4] "x") {
          %1: f32[4] = sin(%0)  # forward
          %2: f32[4] = broadcast_in_dim(1.0:f32[])  # backward
          %3: f32[4] = mul(%2, 2.0:f32[])  # backward
          return %1 "0", %3 "1"
        }
        """,
    ),
    custom_jvp: (
        (array(4),),
        """
        graph(%0: f32[4] "x") {
          %1: f32[4] = max(%0, 0.0:f32[])  # forward
          %2: bool[4] = gt(%0, 0.0:f32[])  # forward
          %3: f32[4] = broadcast_in_dim(1.0:f32[])  # backward
          %4: f32[4] = broadcast_in_dim(0.0:f32[])  # backward
          %5: f32[4] = select_n(%2, %4, %3)  # backward
          return %1 "0", %5 "1"
        }
        """,
    ),
    constants: (
        (X,),
        """
        graph(%0: f32[2,8] "x") {
          %1: f32[8,4] = constant full(0.5)
          %2: f32[2,4] = dot_general(%0, %1)  # forward
          return %2 "0", 3:i32[] "1", %0 "2"
        }
        """,
    ),
    dead_code: (
        (array(4), array(5)),
        """
        graph(%0: f32[4] "x", %1: f32[5] "unused") {
          %4: f32[4] = scan(%0) x2  # forward
            body(%2: f32[4]) {
              %3: f32[4] = add(%2, 1.0:f32[])  # forward
              return %3
            }
          return %4 ""
        }
        """,
    ),
    dead_carry: (
        (array(4), array(5)),
        """
        graph(%0: f32[4] "x", %1: f32[5] "y") {
          %10: i32[], %11: f32[4] = while(%0, 0:i32[], %0) x?  # forward
            cond(%2: i32[], %3: f32[4]) {
              %4: bool[] = lt(%2, 5:i32[])  # forward
              return %4
            }
            body(%5: f32[4], %6: i32[], %7: f32[4]) {
              %8: i32[] = add(%6, 1:i32[])  # forward
              %9: f32[4] = add(%7, %5)  # forward
              return %8, %9
            }
          return %11 ""
        }
        """,
    ),
    dead_carry_in_a_body: (
        (array(4), array(5)),
        """
        graph(%0: f32[4] "x", %1: f32[5] "y") {
          %15: f32[4] = scan(%0, %0) x2  # forward
            body(%2: f32[4], %3: f32[4]) {
              %12: i32[], %13: f32[4] = while(%2, 0:i32[], %2) x?  # forward
                cond(%4: i32[], %5: f32[4]) {
                  %6: bool[] = lt(%4, 5:i32[])  # forward
                  return %6
                }
                body(%7: f32[4], %8: i32[], %9: f32[4]) {
                  %10: i32[] = add(%8, 1:i32[])  # forward
                  %11: f32[4] = add(%9, %7)  # forward
                  return %10, %11
                }
              %14: f32[4] = add(%3, %13)  # forward
              return %14
            }
          return %15 ""
        }
        """,
    ),
    placed: (
        (array(4), array(5)),
        """
        graph(%0: f32[4] "x", %1: f32[5] "y") {
          %2: f32[4] = mul(%0, 2.0:f32[])  # forward
          return %2 "0", %1 "1"
        }
        """,
    ),
    constant_condition: (
        (array(4),),
        """
        graph(%0: f32[4] "x") {
          %1: f32[4] = add(%0, 1.0:f32[])  # forward
          return %1 ""
        }
        """,
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("fn", list(GRAPHS), ids=lambda fn: fn.__name__)
def test_graph(fn: Any) -> None:
    args, expected = GRAPHS[fn]
    assert text(fn, *args) == dedent(expected).lstrip()


def test_kernels_stay_as_they_are() -> None:
    def kernel(x: Any, out: Any) -> None:
        out[...] = lax.cond(False, lambda v: v, lambda v: v + 1, x[...])

    def step(x: jax.Array) -> Any:
        return pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    (op,) = trace(step, array(8)).graph.ops
    assert "cond" in {e.primitive.name for e in op.params["jaxpr"].eqns}


@pytest.mark.core
def test_constants_of_a_call_in_a_loop_belong_to_the_loop() -> None:
    """The adjoint of `odeint` calls a function with constants in the body of a scan."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        return jax.grad(lambda w: odeint(lambda y, t: jnp.tanh(w * y), x, jnp.linspace(0.0, 1.0, 3))[-1].sum())(w)

    graph = trace(step, array(4), array(4)).graph

    def check(defined: set[int], ops: Any) -> None:
        for op in ops:
            assert {a for a in op.inputs if isinstance(a, int)} <= defined, op
            for region in op.regions:
                check({*region.inputs, *(value for value, _ in region.constants)}, region.ops)
            defined |= {*op.outputs}

    check({*graph.inputs, *(value for value, _ in graph.constants)}, graph.ops)
    assert any(region.constants for op in graph.walk() for region in op.regions)


@pytest.mark.core
def test_a_loop_that_prints_keeps_its_carries() -> None:
    def printing(x: jax.Array) -> Any:
        def body(carry: Any) -> Any:
            jax.debug.print("{}", carry[2])
            return carry[0] + 1, carry[1] * 2, carry[2] + 1

        return lax.while_loop(lambda carry: carry[0] < 5, body, (0, x, x))[1]

    (loop,) = (op for op in trace(printing, array(4)).graph.ops if op.name == "while")
    assert len(loop.outputs) == 3


@pytest.mark.core
def test_phases_of_a_train_step() -> None:
    def step(p: jax.Array, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(lambda p: jnp.sum((x @ p) ** 2))(p)
        return p - 0.1 * grads, value

    assert [(op.name, op.phase) for op in trace(step, W, X).graph.ops] == [
        ("dot_general", "forward"),
        ("integer_pow", "forward"),
        ("mul", "forward"),
        ("reduce_sum", "forward"),
        ("broadcast_in_dim", "backward"),
        ("mul", "backward"),
        ("dot_general", "backward"),
        ("transpose", "backward"),
        ("mul", "update"),
        ("sub", "update"),
    ]


def test_an_optimizer_is_all_update() -> None:
    optimizer = optax.adamw(1e-3)

    def step(p: jax.Array, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p)))(p)
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state

    phases = [op.phase for op in trace(step, W, optimizer.init(W), X).graph.ops]
    order = [phase for i, phase in enumerate(phases) if i == 0 or phase != phases[i - 1]]
    assert (order[0], order[-1]) == ("forward", "update")
    assert phases.count("update") > 20
    assert "update" not in phases[: len(phases) - phases.count("update")]


def test_a_function_without_gradients_is_all_forward() -> None:
    assert {op.phase for op in trace(scanned, array(3, 4)).graph.walk()} == {"forward"}


def test_operations_have_the_users_line() -> None:
    def fn(x: jax.Array) -> Any:
        y = jnp.sin(x)
        z = jax.nn.relu(y)  # the max stands in JAX's own code
        return lax.map(lambda v: jax.nn.sigmoid(v), z)

    first = inspect.getsourcelines(fn)[1]
    lines = {op.name: op.source for op in trace(fn, array(4)).graph.walk()}
    assert lines["sin"] == f"test_trace.py:{first + 1}"
    assert lines["max"] == f"test_trace.py:{first + 2}"
    assert {lines[name] for name in ("scan", "logistic")} == {f"test_trace.py:{first + 3}"}


class Point(NamedTuple):
    x: Any
    y: Any


def test_paths_of_arguments_and_results() -> None:
    def fn(state: Any, *rest: Any, scale: Any, **more: Any) -> Any:
        return {"a": [state["p"].x, rest[0]], "b": scale * more["bias"]}

    graph = trace(fn, {"p": Point(1.0, None), "q": (2, 3)}, 4.0, scale=5.0, bias=6.0).graph
    assert graph.input_paths == ("state/p/x", "state/q/0", "state/q/1", "1", "bias", "scale")
    assert graph.output_paths == ("a/0", "a/1", "b")


def test_static_arguments_are_no_inputs() -> None:
    graph = trace(lambda a, n, b: a * n + b, 1.0, 7, 2.0, static_argnums=(1,)).graph
    assert graph.input_paths == ("a", "b")
    assert str(graph.ops[0].inputs[1]) == "7.0"


@pytest.mark.parametrize(
    ("leaf", "type_"),
    [
        (True, "bool[]"),
        (1, "i32[]"),
        (1.5, "f32[]"),
        (1j, "c64[]"),
        (jnp.zeros((2, 0), jnp.bfloat16), "bf16[2,0]"),
        (jnp.zeros(3, jnp.float8_e4m3fn), "f8_e4m3fn[3]"),
        (jax.ShapeDtypeStruct((4,), jnp.uint8), "u8[4]"),
        (jax.eval_shape(lambda: jax.random.key(0)), "key<fry>[]"),
    ],
    ids=str,
)
def test_types(leaf: Any, type_: str) -> None:
    graph = trace(lambda x: x, leaf).graph
    assert str(graph.types[graph.inputs[0]]) == type_


@pytest.mark.core
def test_weak_types_are_kept() -> None:
    traced = trace(lambda n, x: (n + 1, x * n), 0, X)
    assert [a.weak_type for a in traced.in_avals] == [True, False]
    assert [a.weak_type for a in traced.out_avals] == [True, False]


def test_equal_operations_have_equal_signatures() -> None:
    def fn(x: jax.Array) -> Any:
        return jnp.sin(jnp.sin(x) * 2) * 2 + jnp.sin(x[:1])

    ops = trace(fn, array(4)).graph.ops
    of = lambda name: [op.signature for op in ops if op.name == name]  # noqa: E731
    assert of("sin")[0] == of("sin")[1] != of("sin")[2]
    assert len(set(of("mul"))) == 1


@pytest.mark.core
def test_a_collective_over_an_axis_of_vmap_is_a_reduction() -> None:
    def centred(x: Any) -> Any:
        return x - lax.pmean(x, "batch") + lax.pmax(x, "batch") * lax.pmin(x, "batch") + lax.psum(x, "batch")

    traced = trace(jax.vmap(centred, axis_name="batch"), jnp.ones((8, 4)))
    names = [op.name for op in traced.graph.ops]
    assert [name for name in names if name.startswith("reduce")] == [
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "reduce_sum",
    ]
    assert not {*names} & {"psum", "pmax", "pmin"}
    assert [op.params["axes"] for op in traced.graph.ops if op.name.startswith("reduce")] == [(0,)] * 4
