"""Arguments that others hand over in a layout of theirs: what reads them converts once rather than follow."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.bench.equal.case import dear
from autopar.ir.trace import trace
from autopar.passes.intra_op import build as intra_op
from autopar.passes.op_groups import merge as op_groups
from autopar.passes.solver.optimize import optimize
from autopar.rules import rules_of

BATCH, WIDTH, DEPTH = 8, 4, 4
ROWS, COLUMNS, WHOLE = (0,), (1,), (-1,)  # the dimension that the axis of the mesh cuts


def stream(x, weights):
    """Blocks around a residual stream; the products want examples apart, for the weights are larger than those."""
    for w1, w2 in weights:
        x = x + jnp.tanh(x @ w1) @ w2
    return x


def planned(pins, handed):
    """(seconds, layout of x, layouts of the stream behind each block)"""
    x = np.zeros((BATCH, WIDTH), "float32")
    w = np.zeros((WIDTH, WIDTH), "float32")
    graph = trace(stream, x, [(w, w)] * DEPTH).graph
    mesh = dear((2,)).logical_mesh((2,))
    whole = dict.fromkeys(range(1, len(graph.inputs)), WHOLE)  # weights lie whole
    found = op_groups.group(graph, rules_of(graph), mesh, {**whole, **pins}, None, handed)
    solution = optimize(intra_op.build(graph, found, mesh).problem)

    def layout(value):
        binding = found.bindings[value]
        held = found.groups[binding.group].strategies.result[solution.assignment[binding.group]]
        return tuple(binding.dims.index(factor) if factor in binding.dims else -1 for factor in held.tolist())

    sums = [op.outputs[0] for op in graph.ops if op.name == "add"]
    return solution.objective, layout(graph.inputs[0]), [layout(v) for v in sums]


def test_a_stream_is_not_bound_to_the_layout_of_what_was_handed_over():
    free, _, rows = planned({}, ())
    assert set(rows) == {ROWS}
    bound, at_bound, columns = planned({0: COLUMNS}, ())
    assert (at_bound, set(columns)) == (COLUMNS, {COLUMNS})
    handed, at_handed, apart = planned({0: COLUMNS}, (0,))
    assert at_handed == COLUMNS
    assert set(apart) == {ROWS}
    assert free < handed < bound


def test_what_may_lie_anywhere_is_followed():
    assert planned({}, (0,)) == planned({}, ())


@pytest.mark.parametrize("layout", [ROWS, WHOLE])
def test_a_layout_that_suits_is_kept(layout):
    handed, at, _ = planned({0: layout}, (0,))
    assert at == layout
    assert handed <= planned({0: layout}, ())[0]
