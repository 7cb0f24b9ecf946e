"""Blocks of values have the shapes of a smaller batch and joined are the whole; random steps in blocks are exact."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import jax_compat
from autopar.ir.graph import Graph
from autopar.ir.trace import trace
from autopar.passes.microbatch.accumulators import join_blocks
from autopar.passes.microbatch.loop import StepPrograms, slice_block
from autopar.passes.microbatch.microbatches import Microbatches
from autopar.passes.microbatch.split import split
from autopar.passes.microbatch.states import Split, local_shape
from tests.passes.microbatch import batch_programs as programs

COUNT = 4

jit = partial(jax.jit, compiler_options=dict(jax_compat.quick_compilation()))


@pytest.fixture(scope="module", autouse=True)
def doubles() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


# The oracle: a trace of the step on a batch of the microbatch's size


#: Not compared: an iota that is wanted whole as well, a stride other than the trace's own, two loops, residuals of a
#: branch that are zeros and stay whole, and optimizers, which are after the loop.
NOT_COMPARED = (
    "accumulated",
    "mask by position",
    *programs.TWO_LOOPS,
    "branches",
    "generation",
    "adafactor",
    "lamb",
    "lion",
    "muon",
)
ORACLE = [n for n in programs.EXACT if n not in NOT_COMPARED]


@pytest.mark.parametrize("name", ORACLE)
def test_shapes_are_those_of_a_trace_at_the_microbatchs_size(name: str) -> None:
    step = programs.EXACT[name]
    graph = programs.traced(name).graph
    small = trace(step, *programs.arguments(name, step, programs.BATCH // COUNT)).graph
    assert shapes_agree(graph, small, split(graph, COUNT, batch_leaves_named(graph))) > 30


def batch_leaves_named(graph: Graph) -> list[int]:
    return [i for i, path in enumerate(graph.input_paths) if path.startswith("b/")]


def shapes_agree(graph: Graph, small: Graph, divided: Microbatches) -> int:
    """How many values of the loop have the shapes of the small trace; all of them do."""
    twins = {op.index: twin for op, twin in zip(graph.walk(), small.walk(), strict=True)}
    compared = 0
    for placed in divided.body:
        for value, twin in zip(placed.op.outputs, twins[placed.op.index].outputs, strict=True):
            state = divided.states[value]
            assert local_shape(graph.types[value].shape, state, COUNT) == small.types[twin].shape, (
                placed.op.name,
                state,
            )
            compared += 1
    return compared


# Properties


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.data(),
)
@settings(max_examples=10, derandomize=True)
def test_joined_blocks_are_the_whole(shape: list[int], count: int, inner: int, outer: int, data: Any) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] = outer * count * inner
    whole, state = np.arange(np.prod(shape)).reshape(shape), Split(dim, outer)
    blocks = jnp.stack([slice_block(jnp.asarray(whole), state, count, k) for k in range(count)])
    assert blocks.shape[1:] == local_shape(tuple(shape), state, count)
    np.testing.assert_array_equal(join_blocks(blocks, state), whole)


@given(st.integers(0, 10_000), st.sampled_from([(4, 2), (6, 3), (8, 4)]))
@settings(max_examples=8, derandomize=True)
def test_random_programs_are_exact_or_refused(seed: int, sizes: tuple[int, int]) -> None:
    """Whatever a small program does to its batch, in blocks it gives the same; without a bound nothing is refused."""
    step, args = random_step(np.random.default_rng(seed), sizes[0])
    traced = trace(step, *args)
    divided = StepPrograms(split(traced.graph, sizes[1], [len(args[0])], min_loop_share=0.0))
    got, expected = jit(lambda *args: (divided.step(jax.tree.leaves(args)), jax.tree.leaves(step(*args))))(*args)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, 1e-9, 1e-9)


def random_step(rng: np.random.Generator, size: int) -> tuple[Any, tuple[Any, ...]]:
    """A few operations on (batch, 4, 4) arrays, some of which couple examples, differentiated or not."""
    moves = [
        lambda w, x: jnp.tanh(x @ w),
        lambda w, x: x + x.mean(-1, keepdims=True),
        lambda w, x: x - x.mean(0),
        lambda w, x: x * jax.nn.softmax(x, 1),
        lambda w, x: x.transpose(0, 2, 1) + w,
        lambda w, x: jnp.einsum("bij,bjk->bik", x, x) / 4,
        lambda w, x: x.transpose(1, 0, 2).reshape(-1, 4).reshape(4, -1, 4).swapaxes(0, 1),
        lambda w, x: x[::-1],
        lambda w, x: jnp.sort(x, 1),
        lambda w, x: jnp.cumsum(x, rng_axis) / 4,
        lambda w, x: jnp.where(jnp.arange(x.shape[0])[:, None, None] % 2 == 0, x, -x),
        lambda w, x: jnp.concatenate([x[:, :2], x[:, 2:] * w[0]], 1),
        lambda w, x: x / (1 + jnp.sum(x**2)),
        lambda w, x: x[jnp.arange(x.shape[0]), :, jnp.argmax(x[:, 0], -1)][..., None] * w[0],
        lambda w, x: jax.lax.scan(lambda c, v: (jnp.tanh(c + v @ w), c), jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[
            1
        ].swapaxes(0, 1),
    ]
    rng_axis = int(rng.integers(0, 2))
    chosen = [moves[i] for i in rng.integers(0, len(moves), rng.integers(2, 5))]
    differentiated = bool(rng.integers(0, 2))

    def run(w: Any, x: jax.Array) -> jax.Array:
        for i, move in enumerate(chosen):
            x = move(w[i], x)
        return x

    def step(w: Any, x: jax.Array) -> Any:
        if not differentiated:
            out = run(w, x)
            return out, out.max(), out.sum(0), out.any()
        value, grads = jax.value_and_grad(lambda w: jnp.mean(run(w, x) ** 2))(w)
        return [a - b for a, b in zip(w, grads, strict=True)], value

    weights = [jnp.asarray(rng.normal(size=(4, 4)) / 2) for _ in chosen]
    return step, (weights, jnp.asarray(rng.normal(size=(size, 4, 4))))
