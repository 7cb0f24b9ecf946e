"""Products over groups of rows: their rule as text, the groups of a block of rows, and any plan against one device."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.lax import RaggedDotDimensionNumbers
from jax.sharding import PartitionSpec as P

import autopar
from autopar.api import parallelize
from autopar.bench.equal.case import dear
from autopar.cost_models.flops import executed_flops, model_flops
from autopar.hardware.cluster import Cluster
from autopar.ir.trace import trace
from autopar.rules import ragged, rules_of
from tests.programs.steps import array
from tests.programs.test_real_programs import assert_equal

ROWS, WIDTH, OUT, GROUPS = 32, 16, 8, 4
SIZES = jnp.array([5, 0, 17, 8], jnp.int32)  # two rows are in no group


def product(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(rows, matrices, sizes)


def gradients(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> Any:
    return jax.grad(lambda r, m: jnp.sum(jnp.sin(product(r, m, sizes))), (0, 1))(rows, matrices)


def general(contracted: Any, batch: Any, rows: int, groups: tuple[int, ...]) -> Callable[..., jax.Array]:
    numbers = RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracted, batch), lhs_ragged_dimensions=[rows], rhs_group_dimensions=list(groups)
    )
    return partial(jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers)


MATRICES = array(GROUPS, WIDTH, OUT)

#: title -> function, arguments, the rules of its products
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[str, ...]]] = {
    "product": (product, (array(ROWS, WIDTH), MATRICES, SIZES), ("a b, c b d, c -> a d | reduce b | keep c",)),
    "gradients": (
        gradients,
        (array(ROWS, WIDTH), MATRICES, SIZES),
        (
            "a b, c b d, c -> a d | reduce b | keep c",
            "a b, a c, d -> d b c | reduce a | keep d",
            "a b, c d b, c -> a d | reduce b | keep c",
        ),
    ),
    "in a batch": (
        jax.vmap(product),
        (array(2, ROWS, WIDTH), array(2, GROUPS, WIDTH, OUT), jnp.stack([SIZES, SIZES[::-1]])),
        ("a b c, a d c e, a d -> a b e | reduce c | keep d",),
    ),
    "groups that a batch shares": (
        general(([2], [2]), ([0], [0]), 1, (1,)),
        (array(2, ROWS, WIDTH), array(2, GROUPS, WIDTH, OUT), SIZES),
        ("a b c, a d c e, d -> a b e | reduce c | keep d",),
    ),
    "sizes by the rows in front": (
        general(([2], [1]), ([], []), 1, (0,)),
        (array(8, 4, WIDTH), MATRICES, jnp.tile(jnp.array([[1, 0, 2, 1], [0, 3, 0, 0]], jnp.int32), (4, 1))),
        ("a b c, d c e, a d -> a b e | reduce c | keep d",),
    ),
    "rows of a batch": (
        general(([2], [1]), ([0], [0]), 0, ()),
        (array(ROWS, 4, WIDTH), array(ROWS, WIDTH, OUT), SIZES),
        ("a b c, a c d, e -> a b d | reduce c | keep e",),
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("title", CASES)
def test_every_dimension_but_the_groups_may_be_sharded(title: str) -> None:
    fn, args, expected = CASES[title]
    graph = trace(fn, *args).graph
    rules = rules_of(graph)
    assert tuple(str(rules[op.signature]) for op in graph.walk() if op.name == "ragged_dot_general") == expected


@pytest.mark.parametrize(("dtype", "rows"), [("uint8", 256), ("int4", 8)])
def test_rows_that_the_sizes_cannot_count_are_not_sharded(dtype: str, rows: int) -> None:
    graph = trace(product, array(rows, WIDTH), MATRICES, SIZES.astype(dtype)).graph
    (op,) = graph.ops
    assert str(rules_of(graph)[op.signature]) == "a b, c b d, c -> a d | reduce b | keep a c"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.sampled_from(["int32", "uint8", "int8"]))
def test_the_groups_of_a_block(sizes: list[int], dtype: str) -> None:
    group_of_row = np.repeat(np.arange(len(sizes)), sizes)[:48]
    for block in range(4):
        rows = group_of_row[12 * block : 12 * (block + 1)]
        got = ragged.block_sizes(jnp.array(sizes, dtype), jnp.int32(block), 12)
        np.testing.assert_array_equal(got, np.bincount(rows, minlength=len(sizes)))


def by_a_rule(text: str) -> None:
    """The product by this rule, with the matrices of different groups on different devices."""
    fn, args, _ = CASES["product"]
    autopar.register_rule("ragged_dot_general", text)
    run = parallelize(fn, mesh=(4,), cluster=dear((4,)), pins={"matrices": P("x")}, donate_argnums=())
    assert run.plan(*args).inputs[1] == (0,)
    assert_equal(run(*args), jax.jit(fn)(*args))


def test_a_rule_of_the_user_s_is_left_to_the_compiler() -> None:
    """A device that has some of the matrices does not know their rows, and may not run the product by itself."""
    contextvars.copy_context().run(by_a_rule, "m k, g k n, g -> m n | keep m k n")


# What it costs


@pytest.mark.parametrize(("title", "flops", "masked"), [("product", 1, GROUPS), ("rows of a batch", 4, 4)])
def test_flops_are_those_of_every_row_once(title: str, flops: int, masked: int) -> None:
    """In multiples of one product of all rows."""
    fn, args, _ = CASES[title]
    graph = trace(fn, *args).graph
    (op,) = graph.ops
    operands, results = [graph.type_of(a) for a in op.inputs], [graph.types[v] for v in op.outputs]
    once = 2 * ROWS * WIDTH * OUT
    assert model_flops(graph) == flops * once
    assert executed_flops(op, operands, results, masks_groups=True) == masked * once


def test_plans_take_experts_for_what_they_are() -> None:
    """A mixture with more groups takes no longer on TPU, and longer where the compiler masks groups, as a note says."""
    few, many = (step_of(groups, cluster) for groups, cluster in ((2, "tpu-v5e"), (8, "tpu-v5e")))
    assert many.step_time_s < 1.2 * few.step_time_s
    few, many = (step_of(groups, cluster) for groups, cluster in ((2, "dgx-h100"), (8, "dgx-h100")))
    assert many.step_time_s > 2 * few.step_time_s
    assert [note for note in many.notes if "up to 8 times the FLOPs of the groups" in note]


def step_of(groups: int, cluster: str) -> autopar.Plan:
    shapes = (8192, 4096), (groups, 4096, 4096)
    rows, matrices = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    return autopar.plan(gradients, rows, matrices, sizes, mesh=(8,), cluster=Cluster.preset(cluster))
