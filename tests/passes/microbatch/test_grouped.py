"""Mixtures of experts whose tokens are sorted: each microbatch sorts its own, or the step is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from autopar import jax_compat
from autopar.api import parallelize
from autopar.errors import MicrobatchError
from autopar.ir.trace import trace
from autopar.passes.microbatch.loop import split_step
from autopar.passes.microbatch.split import split
from tests.bench.fuzz_faults import FAULTS, put_back

TOKENS, WIDTH, HIDDEN, EXPERTS, EACH = 32, 4, 6, 3, 2
QUICK = dict(jax_compat.quick_compilation())

Mixture = Callable[[Any, jax.Array], jax.Array]


def weights(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {
        "router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH),
        "bias": (EXPERTS, HIDDEN),
    }  # fmt: skip
    return {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}


def batch() -> Any:
    return jnp.sin(jnp.arange(TOKENS * WIDTH)).reshape(TOKENS // 4, 4, WIDTH)


def routed(p: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights of the chosen experts of each token, and the experts of all rows."""
    gates, chosen = lax.top_k(jax.nn.softmax(x @ p["router"]), EACH)
    return gates, chosen.reshape(-1)


def scattered(p: Any, x: jax.Array) -> jax.Array:
    """The rows of an expert come from a gather, and are added to their tokens."""
    gates, experts = routed(p, x)
    order = jnp.argsort(experts)
    sizes = jnp.bincount(experts, length=EXPERTS).astype(jnp.int32)
    rows = jax.nn.gelu(lax.ragged_dot(x[order // EACH], p["up"], sizes))
    rows = lax.ragged_dot(rows, p["down"], sizes) * gates.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // EACH].add(rows)


def unsorted(p: Any, x: jax.Array) -> jax.Array:
    """The inverse permutation brings rows back. Experts have biases."""
    gates, experts = routed(p, x)
    order = jnp.argsort(experts)
    sizes = jnp.zeros(EXPERTS, jnp.int32).at[experts].add(1)
    rows = jnp.take(x, order // EACH, axis=0)
    rows = jax.nn.silu(lax.ragged_dot(rows, p["up"], sizes) + p["bias"][experts[order]])
    rows = jnp.take(lax.ragged_dot(rows, p["down"], sizes), jnp.argsort(order), axis=0)
    return jnp.einsum("tkd,tk->td", rows.reshape(-1, EACH, WIDTH), gates)


def repeated(p: Any, x: jax.Array) -> jax.Array:
    """Tokens are repeated before they are sorted; one-hot rows count; the first product is cut in two."""
    gates, experts = routed(p, x)
    order = jnp.argsort(experts)
    sizes = jax.nn.one_hot(experts, EXPERTS, dtype=jnp.int32).sum(0)
    first, second = jnp.split(lax.ragged_dot(jnp.repeat(x, EACH, axis=0)[order], p["up"], sizes), 2, axis=1)
    rows = lax.ragged_dot(jax.nn.silu(first) * second, p["down"][:, : HIDDEN // 2], sizes)
    return jnp.einsum("tkd,tk->td", rows[jnp.argsort(order)].reshape(-1, EACH, WIDTH), gates)


def in_one_step(mixture: Mixture, form: str) -> Callable[..., Any]:
    """Two layers, their weights updated by gradients."""

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return x + mixture(p, x.reshape(-1, WIDTH)).reshape(x.shape), None

    around = jax.checkpoint(layer) if "recomputed" in form else layer

    def step(params: Any, b: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            x = b
            if "scan" in form:
                x, _ = lax.scan(around, x, jax.tree.map(lambda *w: jnp.stack(w), *params))
            else:
                for p in params:
                    x, _ = around(x, p)
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - g, params, grads), value

    return step


def assert_equal(got: Any, expected: Any, tolerance: float = 1e-12) -> None:
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


FORMS = [
    (scattered, "layers"), (scattered, "recomputed scan"), (unsorted, "recomputed layers"),
    (unsorted, "recomputed scan"), (repeated, "layers"),
]  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize(("mixture", "form"), FORMS)
def test_microbatches_that_sort_their_own_rows_compute_the_step(mixture: Mixture, form: str) -> None:
    with jax.enable_x64(True):
        args = [weights(0), weights(1)], batch()
        step = in_one_step(mixture, form)
        traced = trace(step, *args)
        assert split(traced.graph, 4, (len(traced.graph.inputs) - 1,)).loop_share == 1
        steps = [step, *(split_step(traced, n, (1,)) for n in (2, 4))]
        plain, *split_results = jax.jit(lambda *a: [s(*a) for s in steps], compiler_options=QUICK)(*args)
        for got in split_results:
            assert_equal(got, plain)


def test_a_mixture_of_experts_in_two_stages() -> None:
    with jax.enable_x64(True):
        args = [weights(0), weights(1)], batch()
        step = in_one_step(scattered, "layers")
        options: dict[str, Any] = {"stages": 2, "num_microbatches": 4, "batch_argnums": (1,), "donate_argnums": ()}
        assert_equal(parallelize(step, mesh=(4,), **options)(*args), jax.jit(step, compiler_options=QUICK)(*args))


@given(st.data())
def test_any_assignment_of_rows_to_experts(data: st.DataObject) -> None:
    """Experts without rows, all rows in one, and numbers of no expert, which `bincount` clips or drops."""
    experts = data.draw(st.lists(st.integers(-1, EXPERTS), min_size=8, max_size=8))
    args = weights(0)["up"], jnp.sin(jnp.arange(8.0 * WIDTH)).reshape(8, WIDTH), jnp.asarray(experts, jnp.int32)
    assert_equal(SPLIT_PRODUCT(*args), PRODUCT(*args), 1e-5)


def product(w: jax.Array, x: jax.Array, experts: jax.Array) -> jax.Array:
    order = jnp.argsort(experts)
    rows = lax.ragged_dot(x[order], w, jnp.bincount(experts, length=EXPERTS))
    return rows[jnp.argsort(order)]


def split_product(w: jax.Array, x: jax.Array, experts: jax.Array) -> jax.Array:
    return split_step(trace(product, w, x, experts), 2, (1, 2))(w, x, experts)


PRODUCT, SPLIT_PRODUCT = jax.jit(product), jax.jit(split_product)


def test_another_sort_of_sorted_rows_is_refused() -> None:
    def sorted_again(w: jax.Array, x: jax.Array, experts: jax.Array) -> jax.Array:
        rows = lax.ragged_dot(x[jnp.argsort(experts)], w, jnp.bincount(experts, length=EXPERTS))
        return lax.sort((rows, 2 * rows, 3 * rows), dimension=1, num_keys=1)[2]

    args = weights(0)["up"], jnp.sin(jnp.arange(8.0 * WIDTH)).reshape(8, WIDTH), jnp.arange(8) % EXPERTS
    with pytest.raises(MicrobatchError, match="of its FLOPs need more than one of them: sort"):
        split_step(trace(sorted_again, *args), 2, (1, 2))


def counted_in(dtype: str, experts: int = EXPERTS, indices: str = "int32", stride: int = 1) -> Callable[..., Any]:
    """256 rows, counted and indexed in these types; positions go through a product that may wrap."""

    def function(w: jax.Array, x: jax.Array) -> jax.Array:
        chosen = jnp.argmax(x @ w, 1)
        order = jnp.argsort(chosen)
        sizes = jnp.sum(chosen.astype(indices)[:, None] == jnp.arange(experts), 0, dtype=dtype)
        rows = x[order * stride // stride]
        matrices = jnp.stack([w * i for i in range(experts)])
        return lax.ragged_dot(rows, matrices, sizes)[jnp.argsort(order)]

    return function


@pytest.mark.parametrize(
    ("function", "experts", "in_blocks"),
    [
        (counted_in("int16"), EXPERTS, True),
        (counted_in("int8"), EXPERTS, False),
        (counted_in("uint8"), EXPERTS, False),
        (counted_in("int32", 100, "int8"), 100, True),
        (counted_in("int32", 200, "int8"), 200, False),
        (counted_in("int32", stride=1 << 22), EXPERTS, True),
        (counted_in("int32", stride=1 << 25), EXPERTS, False),
    ],
)
def test_numbers_that_may_wrap(function: Callable[..., Any], experts: int, in_blocks: bool) -> None:
    """Blocks sort their own rows unless the whole may wrap where a block does not: half of the FLOPs are then outside.

    A step that does not fall into microbatches is refused.
    """
    args = jnp.eye(experts), jnp.sin(jnp.arange(256.0 * experts) ** 2).reshape(256, experts)
    traced = trace(function, *args)
    looped = [placed.op.name for placed in split(traced.graph, 2, (1,), min_loop_share=0.0).body]
    assert ("sort" in looped, "ragged_dot_general" in looped) == (in_blocks, in_blocks)
    if in_blocks:
        assert_equal(jax.jit(split_step(traced, 2, (1,)))(*args), jax.jit(function)(*args), 1e-5)
    else:
        with pytest.raises(MicrobatchError, match="50% of its FLOPs need more than one of them: sort"):
            split_step(traced, 2, (1,))


# Steps in which rows depend on rows of other microbatches


def printed(x: jax.Array) -> jax.Array:
    jax.debug.print("{}", x[0])
    return x


OTHERWISE = {
    "other rows are counted": lambda e, o, s, x, r: (jnp.bincount((e + 1) % EXPERTS, length=EXPERTS), x, r),
    "counts are clipped from above": lambda e, o, s, x, r: (jnp.bincount(jnp.minimum(e, 1), length=EXPERTS), x, r),
    "negative numbers count from the end": lambda e, o, s, x, r: (jnp.zeros(EXPERTS, int).at[e - 1].add(1), x, r),
    "equal groups": lambda e, o, s, x, r: (jnp.full(EXPERTS, e.size // EXPERTS), x, r),
    "rows of other tokens": lambda e, o, s, x, r: (s, x[(o // EACH + 1) % x.shape[0]], r),
    "other places of tokens": lambda e, o, s, x, r: (s, x[o // EACH // 2], r),
    "a sum of all rows before": lambda e, o, s, x, r: (s, jnp.cumsum(x, 0), r),
    "rows by their place": lambda e, o, s, x, r: (s, x * jnp.arange(x.shape[0])[:, None], r),
    "rows by the place that they had": lambda e, o, s, x, r: (s, x + o[:, None], r),
    "a capacity": lambda e, o, s, x, r: (s, jnp.where(jnp.arange(x.shape[0])[:, None] < 40, x, 0), r),
    "rows in reverse": lambda e, o, s, x, r: (s, x[::-1], r),
    "the first row is printed": lambda e, o, s, x, r: (s, printed(x), r),
    "added to other tokens": lambda e, o, s, x, r: (s, x, (r + 1) % TOKENS),
}


def changed(how: str) -> Mixture:
    """A mixture with a change in one place: in sizes, in sorted rows, or in where rows are added."""

    def mixture(p: Any, x: jax.Array) -> jax.Array:
        gates, experts = routed(p, x)
        order = jnp.argsort(experts)
        sizes = jnp.bincount(experts, length=EXPERTS)
        rows = x[order // EACH] if "tokens" not in how else x
        sizes, rows, back = OTHERWISE[how](experts, order, sizes, rows, order // EACH)
        rows = rows if rows.shape[0] == order.size else rows[order // EACH]
        rows = lax.ragged_dot(rows, p["up"], sizes) * gates.reshape(-1)[order][:, None]
        return jnp.zeros((x.shape[0], HIDDEN)).at[back].add(rows) @ p["down"][0]

    return mixture


@pytest.mark.parametrize("how", OTHERWISE)
def test_rows_that_depend_on_other_microbatches_are_refused(how: str) -> None:
    args = [weights(0)], batch()
    with pytest.raises(MicrobatchError, match=r"sort at test_grouped.py:\d+ "):
        split_step(trace(in_one_step(changed(how), "layers"), *args), 2, (1,))


def test_a_scan_that_keeps_sorted_rows_is_refused_with_what_helps() -> None:
    args = [weights(0), weights(1)], batch()
    with pytest.raises(
        MicrobatchError, match=r"at test_grouped.py:\d+ does not run .*: the loop .* jax.checkpoint around"
    ):
        split_step(trace(in_one_step(scattered, "scan"), *args), 2, (1,))


@pytest.mark.parametrize(
    ("title", "how"),
    [
        ("numbers that do not sort the rows are counted as their groups", "other rows are counted"),
        ("sorted rows are read from another block", "rows of other tokens"),
        ("sorted rows meet what belongs to their place", "rows by their place"),
        ("sorted rows meet their positions", "rows by the place that they had"),
    ],
)
def test_without_a_check_results_differ(title: str, how: str) -> None:
    """Each check is needed: without it, the step is split, and wrong."""
    args = [weights(0)], batch()
    step = in_one_step(changed(how), "layers")
    (fault,) = [fault for fault in FAULTS if fault.title == title]
    with put_back(fault):
        got = jax.jit(split_step(trace(step, *args), 2, (1,)))(*args)
    difference = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (got, jax.jit(step)(*args))), strict=True)]
    assert max(difference) > 1e-3
