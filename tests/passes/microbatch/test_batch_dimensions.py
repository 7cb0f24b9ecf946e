"""Dimensions that come from the batch, through reshapes and sharding constraints."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autopar import jax_compat
from autopar.ir.trace import trace
from autopar.passes.microbatch.batch_dimensions import batch_dimensions, reshaped
from autopar.rules import rules_of

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("source", "target", "dims"),
    [
        ((8, 16, 32), (128, 32), {0}),  # tokens of all sequences in a row
        ((64, 1024), (2, 32, 1024), {0, 1}),  # microbatches
        ((64, 1024), (32, 2048), {0}),  # groups of two sequences
        ((64, 1024), (128, 512), {0}),  # groups of half a sequence
        ((8, 16), (8, 4, 4), {0}),
    ],
)
def test_a_reshaped_batch_is_in_the_dimensions_with_its_major_part(
    source: tuple[int, ...], target: tuple[int, ...], dims: set[int]
) -> None:
    assert reshaped(source, target, frozenset({0})) == dims


def test_sequences_that_were_groups_are_no_batch() -> None:
    groups = reshaped((64, 1024), (32, 2048), frozenset({0}))
    assert reshaped((32, 2048), (64, 1024), groups) == {0}


def test_a_sharding_constraint_keeps_the_dimensions() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return w, jax.lax.with_sharding_constraint(x, P()) @ w

    mesh = jax_compat.auto_abstract_mesh((2,), ("x",))
    with jax.sharding.use_abstract_mesh(mesh):
        graph = trace(step, jnp.zeros((16, 4)), jnp.zeros((8, 16))).graph
    dims = batch_dimensions(graph, rules_of(graph), [1])
    assert [dims[v] for v in graph.outputs[1:] if isinstance(v, int)] == [frozenset({0})]
