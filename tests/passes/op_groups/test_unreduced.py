"""Sums that loops add up: what they cost. Which they are is in `tests/passes/cases/unreduced.txt`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.hardware.cluster import Cluster
from autopar.ir.trace import trace
from autopar.passes.op_groups.merge import group
from autopar.rules import rules_of
from tests.programs.steps import array

pytestmark = pytest.mark.core


def test_a_sum_is_read_and_written_in_every_iteration() -> None:
    def products(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda total, ab: (total + ab[0].T @ ab[1], None), jnp.zeros((16, 8)), (x, y))[0]

    graph = trace(products, array(3, 32, 16), array(3, 32, 8)).graph
    grouping = group(graph, rules_of(graph), Cluster.local().logical_mesh((8,)))
    (add,) = (op for op in graph.walk() if op.name == "add")
    assert sum(charge.nbytes for charge in grouping.charges if charge.op == add.index) == 2 * 3 * (16 * 8 * 4)
