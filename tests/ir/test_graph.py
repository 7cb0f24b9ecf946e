"""The graph's verifier: each invariant broken once, in a graph that is otherwise sound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.errors import GraphError
from autopar.ir.graph import CHECKS, Graph, Region, Type, verify
from autopar.ir.trace import trace


def program(x: jax.Array) -> jax.Array:
    y = jnp.sin(x)
    return lax.scan(lambda c, _: (jnp.cos(c) * 2, None), y, None, length=3)[0]


@pytest.fixture(scope="module")
def graph() -> Graph:
    """%1 = sin(%0); %5 = scan(%1) { body(%2): %3 = cos(%2); %4 = mul(%3, 2.0) }"""
    return trace(program, jnp.ones(4)).graph


def with_op(graph: Graph, position: int, **changes: object) -> Graph:
    ops = list(graph.ops)
    ops[position] = replace(ops[position], **changes)
    return replace(graph, ops=tuple(ops))


def with_body(graph: Graph, change: Callable[[Region], Region]) -> Graph:
    return with_op(graph, 1, regions=(change(graph.ops[1].regions[0]),))


BREACHES: tuple[tuple[str, Callable[[Graph], Graph], str], ...] = (
    (
        "a value defined twice",
        lambda g: with_op(g, 1, outputs=g.ops[0].outputs),
        "'every value is defined once': %1 is defined by op0 sin and again by op1 scan",
    ),
    (
        "a body's argument defined twice",
        lambda g: with_body(g, lambda r: replace(r, inputs=(0,))),
        "'every value is defined once': %0 is defined by the arguments and again by op1 body",
    ),
    (
        "an operation that reads what comes later",
        lambda g: with_op(g, 0, inputs=g.ops[1].outputs),
        "'every value is defined before it is used': op0 sin reads %5 before it is defined",
    ),
    (
        "an operation that reads into a body",
        lambda g: replace(g, outputs=(g.ops[1].regions[0].outputs[0],)),
        "'every value is defined before it is used': the graph returns %4, which is not defined",
    ),
    (
        "a body that returns nothing it has",
        lambda g: with_body(g, lambda r: replace(r, outputs=(5,))),
        "'every value is defined before it is used': op1 body returns %5, which is not defined",
    ),
    ("a value without a type", lambda g: replace(g, types=g.types[:5]), "'every value has a type': %5 has no type"),
    (
        "operations out of order",
        lambda g: with_op(g, 1, index=0),
        "'operations are numbered in program order': op0 scan stands after op0",
    ),
    (
        "an argument without a path",
        lambda g: replace(g, input_paths=()),
        "'arguments and results have paths': 1 arguments but 0 paths",
    ),
    (
        "a result without a path",
        lambda g: replace(g, output_paths=("a", "b")),
        "'arguments and results have paths': 1 results but 2 paths",
    ),
)


@pytest.mark.parametrize(("breach", "message"), [b[1:] for b in BREACHES], ids=[b[0] for b in BREACHES])
def test_breach(graph: Graph, breach: Callable[[Graph], Graph], message: str) -> None:
    with pytest.raises(GraphError) as caught:
        verify(breach(graph))
    assert str(caught.value) == f"the graph breaks {message}"


def test_every_invariant_is_broken_by_some_test() -> None:
    assert {message.split("'")[1] for _, _, message in BREACHES} == {title for title, _ in CHECKS}


def test_a_sound_graph_is_returned(graph: Graph) -> None:
    assert verify(graph) is graph


def test_walk_visits_bodies_in_program_order(graph: Graph) -> None:
    assert [(op.index, op.name) for op in graph.walk()] == [(0, "sin"), (1, "scan"), (2, "cos"), (3, "mul")]
    assert graph.by_index[2].name == "cos"
    assert graph.names == {0: "x"}


@pytest.mark.parametrize(
    ("type_", "text", "nbytes"),
    [
        (Type((2, 3), "float32", 4), "f32[2,3]", 24),
        (Type((), "bfloat16", 2), "bf16[]", 2),
        (Type((5, 0), "int8", 1), "i8[5,0]", 0),
        (Type((4,), "uint32", 4), "u32[4]", 16),
        (Type((4,), "bool", 1), "bool[4]", 4),
        (Type((3,), "key<fry>", 8), "key<fry>[3]", 24),
    ],
    ids=lambda p: str(p),
)
def test_types_print_short_and_know_their_bytes(type_: Type, text: str, nbytes: int) -> None:
    assert (str(type_), type_.nbytes, type_.rank) == (text, nbytes, len(type_.shape))
