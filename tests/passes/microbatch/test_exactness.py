"""Steps whose microbatches need care with bits, wrap-around, bounds and rounding equal the undivided step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import MicrobatchError
from autopar.ir.trace import trace
from autopar.passes.layers import find as layers_pass
from autopar.passes.microbatch.loop import StepPrograms
from autopar.passes.microbatch.microbatches import Microbatches
from autopar.passes.microbatch.split import split
from autopar.passes.remat import rewrite as remat
from tests.passes.microbatch import batch_programs as programs
from tests.support.effort import sample

BITS = np.random.default_rng(0).integers(0, 1 << 20, (4, 3)).astype(np.int32)


@pytest.fixture(scope="module", autouse=True)
def doubles() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def in_microbatches(
    step: Any, *args: Any, count: int = 2, min_loop_share: float = 0.0, exact: Any = None
) -> tuple[Microbatches, Any, Any]:
    """The analysis of a step whose last argument is the batch, its results in microbatches, and those of the step.

    Both are computed in one program: operations one by one take a compilation each. `exact`: a function to compare with
    in place of the step.
    """
    traced = trace(step, *args)
    first = len(jax.tree.leaves(args[:-1]))
    divided = split(traced.graph, count, range(first, len(traced.in_avals)), min_loop_share=min_loop_share)
    programs = StepPrograms(divided)
    got, expected = jax.jit(lambda *args: (programs.step(jax.tree.leaves(args)), (exact or step)(*args)))(*args)
    return divided, jax.tree.unflatten(traced.out_tree, got), expected


def in_loop(divided: Microbatches) -> set[str]:
    """Names of the operations that run in loops over microbatches, in bodies of loops and branches as well."""
    return {op.name for accumulation in divided.loops for placed in accumulation.body for op in placed.op.walk()}


def scanned(body: Any) -> Any:
    """A step that stacks the results of `body` over three iterations."""
    return lambda x: jax.lax.scan(lambda c, i: (c, body(x, i)), 0, jnp.arange(3))[1]


# Bits


@pytest.mark.parametrize("name", ["reduce_or", "reduce_and"])
@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
@pytest.mark.parametrize("looped", [False, True])
def test_bits_of_the_batch_are_combined_as_bits(name: str, dtype: str, looped: bool) -> None:
    def combined(x: Any, i: Any) -> Any:
        return getattr(jax.lax, name)(jnp.where(i == 1, ~x, x), (0,))

    step = scanned(combined) if looped else lambda x: combined(x, 0)
    x = BITS.astype(dtype)
    divided, got, expected = in_microbatches(step, x)
    assert name in in_loop(divided)
    np.testing.assert_array_equal(got, expected)


def test_bits_are_cut_along_dimensions_that_keep_their_extent() -> None:
    """A conversion to a wider type takes in the last dimension: where that is cut, it waits for the whole."""

    def step(x: Any) -> Any:
        return jax.lax.bitcast_convert_type(x.T, jnp.uint32), jax.lax.bitcast_convert_type(x, jnp.uint32)

    x = np.arange(16, dtype=np.uint8).reshape(4, 4)
    divided, got, expected = in_microbatches(step, x)
    assert "bitcast_convert_type" in in_loop(divided)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_conversion_to_a_narrower_type_adds_a_dimension() -> None:
    x = BITS
    _, got, expected = in_microbatches(lambda x: jax.lax.bitcast_convert_type(x, jnp.uint8), x)
    np.testing.assert_array_equal(got, expected)


# Indices


@pytest.mark.parametrize("dtype", ["uint8", "int8", "bool"])
def test_indices_wrap_as_their_type_does(dtype: str) -> None:
    """Row 256 of an index in eight bits is row 0, which another microbatch holds."""

    def step(batch: Any) -> Any:
        x, labels = batch
        return x[jnp.arange(x.shape[0]).astype(dtype).astype(jnp.int32), labels]

    batch = np.arange(1024.0).reshape(512, 2), np.arange(512) % 2
    _, got, expected = in_microbatches(step, batch)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("region", ["scan", "while", "cond"])
@pytest.mark.parametrize("dtype", ["int32", "uint8", "float32"])
@pytest.mark.parametrize("fill", [None, 1, 0])
def test_fill_values_of_a_gather_from_a_sum_count_once(region: str, dtype: str, fill: int | None) -> None:
    def taken(x: Any, i: Any) -> Any:
        return jnp.take(x.sum(0, dtype=x.dtype), i + jnp.arange(4), mode="fill", fill_value=fill)

    def step(x: Any) -> Any:
        if region == "scan":
            return scanned(taken)(x)
        if region == "cond":
            return jax.lax.cond(x.shape[0] > jnp.arange(3)[1], lambda: taken(x, 0), lambda: taken(x, 1))
        none = jnp.zeros(4, dtype)
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, taken(x, c[0])), (0, none))[1]

    x = (BITS % 50).astype(dtype)
    _, got, expected = in_microbatches(step, x)
    np.testing.assert_array_equal(got, expected)


# Loops


def until(limit: Any, begin: Any, iteration: Any) -> Any:
    """A loop on a value and a counter, which runs while the value is below a limit."""
    return jax.lax.while_loop(lambda c: jnp.max(c[0]) < limit, lambda c: (iteration(c[0]), c[1] + 1), (begin, 0))


#: Steps with a loop for each example x, whose numbers of iterations differ.
LOOPS_OF_EXAMPLES: dict[str, Any] = {
    "begins with the example": lambda xs: jax.vmap(lambda x: until(100, x, lambda c: 2 * c + x))(xs),
    "begins with a constant": lambda xs: jax.vmap(lambda x: until(x[0], jnp.zeros(3), lambda c: c + 1))(xs),
    "examples behind": lambda xs: jax.vmap(lambda x: until(100, x, lambda c: 3 * c), in_axes=1, out_axes=(1, 0))(xs.T),
    "loops of loops": lambda xs: jax.vmap(jax.vmap(lambda x: until(100, x, lambda c: 2 * c + x)))(xs),
    "in a scan": scanned(lambda xs, i: jax.vmap(lambda x: until(50 + i, x, lambda c: 2 * c))(xs)[1].sum()),
    "so many times": lambda xs: jax.vmap(lambda x: jax.lax.fori_loop(0, x[0].astype(int), lambda i, c: c * i - x, x))(
        xs
    ),
}


@pytest.mark.parametrize("title", LOOPS_OF_EXAMPLES)
@pytest.mark.parametrize("count", [2, 4])
def test_a_loop_for_each_example_runs_in_microbatches(title: str, count: int) -> None:
    """The examples of a microbatch loop until they have ended, not until all examples have."""
    step, x = LOOPS_OF_EXAMPLES[title], np.arange(1.0, 25.0).reshape(8, 3)
    divided, got, expected = in_microbatches(step, x, count=count)
    assert "while" in in_loop(divided)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_loop_until_all_examples_have_ended_needs_the_whole_batch() -> None:
    def step(x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c.max() < 100, lambda c: 2 * c, x)

    x = np.arange(1.0, 9.0)
    divided, got, expected = in_microbatches(step, x)
    assert "while" not in in_loop(divided)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("chosen", [0, 1, 2])
def test_one_branch_adds_up_and_another_returns_what_is_known(dtype: str, chosen: int) -> None:
    """As an estimate of the curvature that is renewed every so many steps. What is known counts once."""

    def step(estimate: Any, step_number: Any, x: Any) -> Any:
        branches = (lambda: x.sum(0, dtype=x.dtype), lambda: 2 * estimate, lambda: jnp.zeros_like(estimate))
        return jax.lax.switch(step_number, branches)

    estimate, x = (numbers.astype(jnp.dtype(dtype)) for numbers in (np.array([3, 50, 7]), BITS % 60))
    divided, got, expected = in_microbatches(step, estimate, np.int32(chosen), x)
    assert "cond" in in_loop(divided)
    assert got.dtype == estimate.dtype
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


# Sums


@pytest.mark.parametrize("to", ["float32", "int32", "uint8", "uint16"])
def test_a_sum_that_wraps_is_converted_whole(to: str) -> None:
    step = scanned(lambda x, i: x.sum(0, dtype=jnp.int8).astype(to))
    x = np.full((4, 3), 100, np.int8)
    divided, got, expected = in_microbatches(step, x)
    assert ("scan" in in_loop(divided)) == (to == "uint8")
    np.testing.assert_array_equal(got, expected)


@pytest.mark.core
@pytest.mark.parametrize("to", ["float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "bfloat16"])
@pytest.mark.parametrize("loop", [False, True])
def test_a_sum_is_converted_whole_to_a_type_in_which_it_is_zero(to: str, loop: bool) -> None:
    """As the gradient of a weight that is used in float8: parts in single precision have a total that is none."""

    def convert(x: Any, i: Any) -> Any:
        return ((1 + i) * x.sum(0)).astype(to).astype(x.dtype) + x.sum(0)

    step = scanned(convert) if loop else lambda x: convert(x, 0)
    divided, got, expected = in_microbatches(step, np.full((4, 3), 2.0**-25, np.float32))
    assert ("scan" in in_loop(divided)) == (loop and to == "bfloat16")
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("form", ["sum", "dot", "carry", "scatter"])
def test_sums_in_a_loop_are_rounded_once(name: str, form: str) -> None:
    """Parts are kept in single precision; only the total over all microbatches is rounded to the step's type."""

    def body(x: Any, i: Any, dtype: Any) -> Any:
        scaled = (x * (1 + i)).astype(name).astype(dtype)
        if form == "dot":
            return jax.lax.dot(jnp.ones((1, len(x)), dtype), scaled, preferred_element_type=jnp.dtype(dtype))
        if form == "scatter":
            return jnp.zeros(x.shape[1], dtype).at[jnp.zeros(len(x), int)].add(scaled[:, 0])
        return scaled.sum(0)

    def step(x: Any, dtype: Any = name) -> Any:
        if form != "carry":
            return scanned(lambda x, i: body(x, i, dtype))(x)
        return jax.lax.scan(lambda c, i: (c + body(x, i, dtype), None), jnp.zeros(x.shape[1], dtype), jnp.arange(2))[0]

    x = np.random.default_rng(1).random((16, 3)).astype(np.float32)
    divided, got, expected = in_microbatches(step, x, count=8, exact=lambda x: step(x, "float64").astype(name))
    assert "scan" in in_loop(divided)
    assert got.dtype == jnp.dtype(name)
    np.testing.assert_array_equal(*(np.asarray(a).astype(np.float32) for a in (got, expected)))


# Examples side by side


def solved(matrix: Any, x: Any) -> Any:
    """One system for all examples, by a Cholesky decomposition of the matrix: a Gaussian likelihood has it."""
    return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(matrix @ matrix.T + jnp.eye(4)), x)


def bands_solved(matrix: Any, x: Any) -> Any:
    """One tridiagonal system for all examples: an implicit step of diffusion."""
    middle, zero = 2 + matrix[0] ** 2, jnp.zeros(1)
    sides = x.reshape(4, -1)
    upper = jnp.concatenate([matrix[1, 1:], zero])
    return jax.lax.linalg.tridiagonal_solve(jnp.concatenate([zero, matrix[2, 1:]]), middle, upper, sides).ravel()


SIDE_BY_SIDE = {
    "cholesky": (jax.vmap(solved, (None, 0)), "triangular_solve"),
    "lu": (jax.vmap(lambda m, x: jnp.linalg.solve(m + 3 * jnp.eye(4), x), (None, 0)), "triangular_solve"),
    "positions": (jax.vmap(jax.vmap(solved, (None, 0)), (None, 0)), "triangular_solve"),
    "bands": (jax.vmap(bands_solved, (None, 0)), "tridiagonal_solve"),
}


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_examples_are_right_hand_sides_of_one_system(name: str) -> None:
    apply, primitive = SIDE_BY_SIDE[name]

    def step(matrix: Any, b: Any) -> Any:
        return jax.value_and_grad(lambda m: jnp.mean(apply(m, jnp.tanh(b @ m)) ** 2))(matrix)

    shape = (6, 3, 4) if name == "positions" else (6, 4)
    matrix, batch = np.random.default_rng(0).standard_normal((4, 4)), np.random.default_rng(1).standard_normal(shape)
    divided, got, expected = in_microbatches(step, matrix, batch)
    assert primitive in in_loop(divided)
    assert divided.loop_share > 0.9
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, 1e-9, 1e-12)


@pytest.mark.parametrize("grouped", [True, False])
def test_each_example_has_a_kernel_for_one_picture(grouped: bool) -> None:
    """As a generator modulates its kernels: the first picture is a parameter, the same for all examples."""

    def step(picture: Any, b: Any) -> Any:
        def loss(picture: Any) -> Any:
            count, features = b.shape[0], picture.shape[0]
            pictures = jnp.broadcast_to(picture, (count, *picture.shape)) if grouped else picture
            kernels = b.reshape(count * features, features, 3)  # of (output features, input features, width)
            rows = pictures.reshape(1, -1, picture.shape[1])
            groups = count if grouped else 1
            return jnp.mean(jax.lax.conv_general_dilated(rows, kernels, (1,), "SAME", feature_group_count=groups) ** 2)

        return jax.value_and_grad(loss)(picture)

    picture, batch = (
        np.random.default_rng(0).standard_normal((2, 5)),
        np.random.default_rng(1).standard_normal((4, 2, 2, 3)),
    )
    divided, got, expected = in_microbatches(step, picture, batch)
    assert "conv_general_dilated" in in_loop(divided)
    assert divided.loop_share > 0.9
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, 1e-9, 1e-12)


# Two loops


def test_the_second_loop_reads_a_total_of_the_first_itself() -> None:
    def step(p: Any, x: Any) -> Any:
        z = x @ p
        return (z @ (z.T @ z)).sum()

    p, x = np.ones((3, 2)) / 7, np.random.default_rng(0).normal(size=(4, 3))
    divided, got, expected = in_microbatches(step, p, x, min_loop_share=0.99)
    assert len(divided.loops) == 2
    np.testing.assert_allclose(got, expected, 1e-12)


def test_a_total_of_the_first_loop_is_not_computed_again() -> None:
    """It is a result of the step besides; so is a total that only the second loop computes."""

    def step(p: Any, x: Any) -> Any:
        z = x @ p
        gram = z.T @ z
        return gram, (z @ gram).sum(), jnp.exp(z).sum()

    p, x = np.ones((3, 2)) / 7, np.random.default_rng(0).normal(size=(4, 3))
    divided, got, expected = in_microbatches(step, p, x, min_loop_share=0.99)
    first, second = ({total.value for total in loop.totals} for loop in divided.loops)
    assert first == {divided.flat.outputs[0]}
    assert second == {*divided.flat.outputs[1:]}
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, 1e-12)


def test_a_hessian_vector_product_along_the_steps_own_gradient() -> None:
    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ p) ** 2)

    def step(p: Any, x: Any) -> Any:
        grad = jax.grad(loss)(p, x)
        return jax.jvp(lambda p: jax.grad(loss)(p, x), (p,), (grad,))[1]

    p, x = np.ones((3, 2)) / 7, np.random.default_rng(0).normal(size=(4, 3))
    divided, got, expected = in_microbatches(step, p, x, min_loop_share=0.99)
    assert len(divided.loops) == 2
    np.testing.assert_allclose(got, expected, 1e-12)


@pytest.mark.parametrize(("name", "loops"), [("balanced experts in every layer", 2), ("masked mean", 1)])
@pytest.mark.parametrize("policy", sample(["dots", "full"], ["full"]))
def test_recomputed_totals_are_those_of_the_forward_pass(name: str, loops: int, policy: str) -> None:
    """A total that the backward pass computes again is known when the original is, and takes no loop of its own."""
    step = programs.EXACT[name]
    args = programs.arguments(name, step)
    graph = trace(step, *args).graph
    again = remat.rewrite(graph, [policy] * len(layers_pass.find(graph).layers))
    divided = split(again, 2)
    assert len(divided.loops) == loops
    run = StepPrograms(divided)
    got, expected = jax.jit(lambda *args: (run.step(jax.tree.leaves(args)), step(*args)))(*args)
    for a, b in zip(got, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, 1e-9, 1e-12)


# Refused


def test_a_refusal_names_the_batch() -> None:
    """A table as long as the batch is taken for a part of it, unless it is said what holds the batch."""

    def step(w: Any, table: Any, b: Any) -> Any:
        return w - jax.grad(lambda w: jnp.mean((table[b["x"]] @ w) ** 2))(w)

    args = jnp.ones((4, 4)), jnp.ones((8, 4)), {"x": jnp.arange(8) % 3}
    graph = trace(step, *args).graph
    with pytest.raises(MicrobatchError, match=r"first dimension of 'table', 'b/x'.*batch_argnums"):
        split(graph, 2)
    assert split(graph, 2, (2,)).loop_share == 1.0
