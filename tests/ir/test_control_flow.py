"""How operands enter the bodies of loops and branches, and what walks over nested bodies find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.ir.control_flow import entries, num_carries
from autopar.ir.graph import UNKNOWN_TRIPS, Copier, Graph, Op
from autopar.ir.trace import trace

X = jnp.ones((3, 4))


def scanned(x: jax.Array, w: jax.Array) -> Any:
    return lax.scan(lambda c, row: (c + row * w, row * c), w, x)


def looped(x: jax.Array, w: jax.Array) -> Any:
    return lax.while_loop(lambda c: c.sum() < w.sum(), lambda c: c + 2 * x, x)


def branched(x: jax.Array, w: jax.Array) -> Any:
    return lax.cond(x.sum() > 0, lambda a, b: a * b, lambda a, b: a - b, x, w)


def recomputed(x: jax.Array, w: jax.Array) -> Any:
    return jax.checkpoint(lambda a, b: jnp.sin(a) * b)(x, w)


def nested(x: jax.Array, w: jax.Array) -> Any:
    """A scan of 3 iterations around one of 5."""
    return lax.scan(lambda c, row: (lax.fori_loop(0, 5, lambda i, a: jnp.sin(a) * row, c), None), w, x)[0]


def graph_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Graph:
    return trace(function, *(jnp.ones(shape) for shape in shapes)).graph


def with_regions(graph: Graph) -> Op:
    (op,) = (op for op in graph.ops if op.regions)
    return op


@pytest.mark.parametrize(
    ("function", "w", "kinds", "carries"),
    [
        (scanned, (4,), [("body", "constant", 0), ("body", "carry", 1), ("body", "slice", 2)], 1),
        (
            looped,
            (3, 4),
            [("cond", "constant", 0), ("cond", "carry", 2), ("body", "constant", 1), ("body", "carry", 2)],
            1,
        ),
        (branched, (3, 4), [(f"branch{i}", "constant", k) for i in range(2) for k in (1, 2)], 0),
        (recomputed, (3, 4), [("body", "constant", 0), ("body", "constant", 1)], 0),
    ],
)
def test_every_input_of_a_body_comes_from_an_operand(
    function: Callable[..., Any], w: tuple[int, ...], kinds: list[tuple[str, str, int]], carries: int
) -> None:
    graph = graph_of(function, (3, 4), w)
    op = with_regions(graph)
    entry_list = list(entries(op))
    assert [(e.region.name, e.kind, e.position) for e in entry_list] == kinds
    assert [e.value for e in entry_list] == [v for region in op.regions for v in region.inputs]
    assert all(e.operand == op.inputs[e.position] for e in entry_list)
    for e in entry_list:
        outside = graph.type_of(e.operand).shape
        assert graph.types[e.value].shape == (outside[1:] if e.kind == "slice" else outside)
    assert num_carries(op) == carries


def test_a_body_runs_as_often_as_all_loops_around_it() -> None:
    graph = graph_of(nested, (3, 4), (4,))
    assert [body.runs for body in graph.bodies] == [1, 3, 15]
    sine = next(op for op in graph.walk() if op.name == "sin")
    assert graph.runs[sine.index] == 15
    assert {op.index for op in graph.walk()} == graph.runs.keys()
    unknown = graph_of(looped, (3, 4), (3, 4))
    assert [body.runs for body in unknown.bodies] == [1, UNKNOWN_TRIPS, UNKNOWN_TRIPS]


def test_uses_name_every_place_where_a_value_is_read() -> None:
    graph = graph_of(scanned, (3, 4), (4,))
    (scan,) = graph.ops
    (body,) = scan.regions
    assert [use.site for use in graph.uses[graph.inputs[1]]] == [f"{scan.tag}.in0", f"{scan.tag}.in1"]
    assert [use.site for use in graph.uses[scan.outputs[0]]] == ["out0"]
    assert [(use.op, use.site) for use in graph.uses[body.outputs[1]]] == [(None, f"{scan.tag}.body.out1")]  # type: ignore[index]
    read = {a for b in graph.bodies for atoms in (b.outputs, *(op.inputs for op in b.ops)) for a in atoms}
    assert graph.uses.keys() == {a for a in read if isinstance(a, int)}


def test_every_result_has_its_producer() -> None:
    graph = graph_of(nested, (3, 4), (4,))
    assert graph.producers.keys() == {v for op in graph.walk() for v in op.outputs}
    assert all(v in op.outputs for v, op in graph.producers.items())


def test_a_copy_defines_values_of_its_own() -> None:
    graph = graph_of(nested, (3, 4), (4,))
    (scan,) = (op for op in graph.ops if op.regions)
    types = list(graph.types)

    def fresh(value: int) -> int:
        types.append(types[value])
        return len(types) - 1

    weights = fresh(graph.inputs[1])
    copy = Copier(fresh, {graph.inputs[1]: weights}).op(scan)
    assert copy.inputs == tuple(weights if a == graph.inputs[1] else a for a in scan.inputs)
    old, new = (
        {v for inner in op.walk() for v in (*inner.outputs, *(i for r in inner.regions for i in r.inputs))}
        for op in (scan, copy)
    )
    assert not old & new
    assert len(old) == len(new)
    assert [inner.name for inner in copy.walk()] == [inner.name for inner in scan.walk()]
    read = {a for inner in copy.walk() for a in inner.inputs if isinstance(a, int)}
    assert read <= new | {a for a in copy.inputs if isinstance(a, int)}
