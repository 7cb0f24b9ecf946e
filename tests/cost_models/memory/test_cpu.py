"""What XLA's CPU compiler makes of operations that it does otherwise; programs small enough to count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.cost_models.compiler import written_values
from autopar.cost_models.compiler.backends import CPU, GPU, Backend
from autopar.cost_models.compiler.compiled_program import Program
from autopar.cost_models.compiler.flatten import flatten
from autopar.cost_models.compiler.lifetimes import lifetimes
from autopar.cost_models.compiler.written_values import written
from autopar.ir.trace import trace


def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def kept(fn: Callable[..., Any], args: Sequence[Any], backend: Backend = CPU) -> Counter[str]:
    """How many arrays of each type are written, arguments and what is smaller than they are left out."""
    program = flatten(trace(fn, *args).graph, backend, {})
    types = [program.type_of(v) for v in written(program).values if v not in program.graph.names]
    return Counter(str(t) for t in types if t.size >= 64 * 64)


def product(x: Any, w: Any) -> Any:
    return x @ w


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_product_reads_copies_in_float32_and_writes_float32(dtype: str) -> None:
    args = array(dtype, 64, 64), array(dtype, 64, 64)
    short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    assert kept(product, args) == {"f32[64,64]": 3, f"{short}[64,64]": 1}
    assert kept(product, args, GPU) == {f"{short}[64,64]": 1}


def test_products_share_a_copy_in_float32() -> None:
    args = array("bfloat16", 64, 64), array("bfloat16", 64, 64)
    assert kept(lambda x, w: (x @ w, w @ x), args)["f32[64,64]"] == 2 + 2


@pytest.mark.parametrize(("dtype", "short", "count"), [("bfloat16", "bf16", 3), ("float16", "f16", 2)])
def test_what_is_rounded_to_bfloat16_is_not_repeated(dtype: str, short: str, count: int) -> None:
    """A sum with two readers is written besides the results, though adding again would be cheap."""

    def fn(x: Any, b: Any) -> Any:
        y = x + b
        return 2.0 * y, jnp.flip(3.0 * y)

    assert kept(fn, (array(dtype, 64, 64), array(dtype, 64)))[f"{short}[64,64]"] == count


@pytest.mark.parametrize(("dtype", "stacks"), [("bfloat16", 1), ("float16", 0)])
def test_a_loop_slices_a_copy_of_a_bfloat16_stack_in_float32(dtype: str, stacks: int) -> None:
    def fn(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda c, w: (c @ w, None), x, ws)[0]

    counts = kept(fn, (array(dtype, 64, 64), array(dtype, 4, 64, 64)))
    assert counts["f32[4,64,64]"] == stacks


def test_the_gradient_of_a_maximum_over_windows_finds_places_first() -> None:
    """An array of places per dimension, made once for both; the scatter goes into zeros, which it takes over."""

    def pooled(x: Any) -> Any:
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID")

    def fn(x: Any, y: Any) -> Any:
        return jax.grad(lambda x, y: (pooled(x) ** 2).sum() + (pooled(y) ** 3).sum(), (0, 1))(x, y)

    args = array("float32", 128, 128), array("float32", 128, 128)
    counts = kept(fn, args)
    assert counts["i32[128,128]"] == 2
    assert counts["f32[128,128]"] == 2 * 2
    assert counts["i32[64,64]"] == 2 * (2 + 2)
    assert not any(name.startswith("i32") for name in kept(fn, args, GPU))


def test_a_product_that_sums_nothing_is_made_again_for_a_matrix() -> None:
    """Gradients by example, read by a norm as they are and by a product as a matrix."""

    def fn(x: Any, g: Any) -> Any:
        each = jax.lax.dot_general(x[:, None], g[:, None], (((1,), (1,)), ((0,), (0,))))
        return jnp.tensordot(1 / jnp.sqrt((each**2).sum((1, 2))), each, 1)

    args = array("float32", 256, 16), array("float32", 256, 16)
    assert kept(fn, args)["f32[256,16,16]"] == 2
    assert kept(fn, args, replace(CPU, reduces_dots=False))["f32[256,16,16]"] == 1


@pytest.mark.parametrize(("contracted", "copies"), [(False, 4), (True, 4 + 4)])
def test_a_product_of_ragged_groups_reads_a_masked_copy_for_each(contracted: bool, copies: int) -> None:
    """The gradient of the weights masks both operands."""

    def forward(x: Any, w: Any, sizes: Any) -> Any:
        return jax.lax.ragged_dot(x, w, sizes)

    def gradient(x: Any, w: Any, sizes: Any) -> Any:
        return jax.vjp(lambda w: forward(x, w, sizes), w)[1](2 * x)[0]

    args = array("float32", 256, 64), array("float32", 4, 64, 64), array("int32", 4)
    program = flatten(trace(gradient if contracted else forward, *args).graph, CPU, {})
    assert sum(nbytes for name, nbytes in steps_of(program) if name == "mask") == copies * 256 * 64 * 4


def test_a_product_of_ragged_groups_and_its_gradients_share_masked_copies() -> None:
    """The cotangent is masked for both gradients, and transposed for that of the rows."""

    def fn(x: Any, w: Any, sizes: Any, cotangent: Any) -> Any:
        result, back = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, w)
        return result, back(cotangent)

    args = array("float32", 256, 64), array("float32", 4, 64, 32), array("int32", 4), array("float32", 256, 32)
    steps = Counter(name for name, _ in steps_of(flatten(trace(fn, *args).graph, CPU, {})))
    assert (steps["mask"], steps["turn"], steps["ragged_dot_general"]) == (2, 2, 3)


def steps_of(program: Program) -> list[tuple[str, int]]:
    """Name of every step, and bytes of its first result."""
    steps = (s for frame in program.top.walk() for s in frame.steps)
    return [(s.name, program.type_of(s.outputs[0]).nbytes) for s in steps]


def test_a_scatter_into_zeros_that_is_added_needs_no_zeros() -> None:
    """The gradient of a cross entropy."""

    def fn(x: Any, labels: Any) -> Any:
        loss = lambda x: (jax.nn.logsumexp(x, 1) - jnp.take_along_axis(x, labels[:, None], 1)[:, 0]).sum()  # noqa: E731
        return jnp.flip(jax.grad(loss)(x))

    args, zeros = (array("float32", 256, 64), array("int32", 256)), dict[bool, int]()
    for pours in (True, False):
        program = flatten(trace(fn, *args).graph, replace(CPU, accumulates_scatters=pours), {})
        steps = [s for frame in program.top.walk() for s in frame.steps if s.name == "broadcast_in_dim"]
        whole = [s.outputs[0] for s in steps if program.type_of(s.outputs[0]).shape == (256, 64)]
        zeros[pours] = len(written(program).values.intersection(whole))
    assert zeros == {True: 0, False: 1}


def test_a_sum_of_two_scatters_into_zeros_needs_zeros_once() -> None:
    def fn(x: Any, labels: Any) -> Any:
        pick = lambda x, i: jnp.take_along_axis(x, labels[i][:, None], 1).sum()  # noqa: E731
        return jnp.flip(jax.grad(lambda x: pick(x, 0) + 2.0 * pick(x, 1))(x))

    args = array("float32", 256, 64), array("int32", 2, 256)
    program = flatten(trace(fn, *args).graph, CPU, {})
    names = [s.name for frame in program.top.walk() for s in frame.steps]
    assert names.count("scatter-add") == 2


def test_a_kernel_goes_from_product_to_product_where_nothing_is_kept() -> None:
    """The softened targets of a teacher: one kernel from the examples to the reciprocal of the softmax's sum."""

    def targets(x: Any, w: Any) -> Any:
        return jax.nn.softmax(jax.nn.relu(jax.nn.relu(x @ w) @ w) @ w)

    args = array("float32", 4096, 64), array("float32", 64, 64)
    assert kept(targets, args)["f32[4096,64]"] <= 2
    assert kept(jax.grad(lambda x, w: (targets(x, w) ** 2).sum(), 1), args)["f32[4096,64]"] > 5


def test_products_of_columns_are_no_librarys() -> None:
    """A product with one column ends the kernel before it, and its operand is read from memory."""

    def value(x: Any, w: Any, v: Any) -> Any:
        return (jax.nn.relu(x @ w) @ v).sum(0)

    args = array("float32", 4096, 64), array("float32", 64, 64)
    assert kept(value, (*args, array("float32", 64, 1)))["f32[4096,64]"] == 2
    assert kept(value, (*args, array("float32", 64, 64)))["f32[4096,64]"] == 0


def test_the_branch_for_the_platform_is_there_alone() -> None:
    def fn(x: Any, w: Any) -> Any:
        y = x @ w
        return jax.lax.platform_dependent(y, cpu=lambda y: y @ w, default=lambda y: jnp.flip(y @ w @ w @ w))

    args = array("float32", 64, 64), array("float32", 64, 64)
    assert kept(fn, args) == {"f32[64,64]": 2}
    assert kept(fn, args, GPU)["f32[64,64]"] > 2

    def on_gpu(x: Any, w: Any) -> Any:
        y = x @ w
        return jax.lax.platform_dependent(y, cuda=lambda y: y @ w, default=lambda y: jnp.flip(y @ w @ w @ w))

    assert kept(on_gpu, args, GPU) == {"f32[64,64]": 2}


def test_a_sum_reads_what_it_sums_without_turning_it() -> None:
    args = array("float32", 64, 64), array("float32", 64, 64)
    assert kept(lambda x, w: (x @ w).T.sum(0), args)["f32[64,64]"] == 0
    assert kept(lambda x, w: (y := x @ w, y.T.sum(0)), args)["f32[64,64]"] == 1


def test_a_product_of_vectors_is_a_sum_in_a_librarys_kernel() -> None:
    """Its operands are fused into it; a product of matrices reads them from memory."""

    def fn(x: Any, w: Any) -> Any:
        return jnp.einsum("bi,bi->b", 2.0 * x, w + 1.0)

    args = array("float32", 4096, 64), array("float32", 4096, 64)
    assert kept(fn, args)["f32[4096,64]"] == 0
    assert kept(fn, args, replace(CPU, reduces_dots=False))["f32[4096,64]"] == 2


@pytest.mark.parametrize(("dims", "copies"), [("bij,bjk->bik", 0), ("bji,bjk->bik", 0), ("ibj,bjk->ibk", 1)])
def test_stacks_of_matrices_are_multiplied_from_either_side(dims: str, copies: int) -> None:
    program = flatten(trace(lambda x, y: jnp.einsum(dims, x, y), *[array("float32", 16, 16, 16)] * 2).graph, CPU, {})
    assert sum(s.name == "turn" for frame in program.top.walk() for s in frame.steps) == copies


def test_a_transposed_broadcast_is_a_broadcast() -> None:
    """A library's kernel takes it in."""

    def fn(x: Any, b: Any) -> Any:
        return (x * jnp.broadcast_to(b, (64, 4096)).T).sum(0)

    assert kept(fn, (array("float32", 4096, 64), array("float32", 4096)))["f32[4096,64]"] == 0


@pytest.mark.parametrize("axis", [0, 1])
def test_gathered_columns_are_gathered_as_rows_and_transposed_in_one_kernel(axis: int) -> None:
    """XLA:CPU has no temporary for either (JAX 0.10.2)."""
    args = array("float32", 128, 128), array("int32", 96)
    counts = kept(lambda x, i: jnp.take(x, i, axis, mode="clip"), args)
    assert sum(count for name, count in counts.items() if name.startswith("f32")) == 1


def test_a_gather_is_done_by_what_reads_it_alone() -> None:
    """It is not repeated for several readers, and written for a product."""

    def arrays(*readers: Callable[[Any], Any]) -> int:
        def fn(x: Any, i: Any) -> Any:
            y = jnp.take(x, i, 0, mode="clip")
            return [reader(y) for reader in readers]

        return kept(fn, (array("float32", 128, 64), array("int32", 64)))["f32[64,64]"]

    assert arrays(jnp.tanh) == 1
    assert arrays(jnp.tanh, lambda y: jnp.flip(y) + 1.0) == 2 + 1
    assert arrays(lambda y: y @ y) == 1 + 1


@pytest.mark.parametrize(("axis", "pieces"), [(0, 0), (1, 2)])
def test_rows_are_joined_by_copies_of_what_is_in_memory(axis: int, pieces: int) -> None:
    """What is joined along the last dimension is written before, and so is the result."""

    def fn(x: Any, y: Any) -> Any:
        return jnp.exp(jnp.concatenate([2.0 * x, 3.0 * y], axis))

    args = array("float32", 128, 128), array("float32", 128, 128)
    shape = [128, 128]
    shape[axis] = 256
    name = f"f32[{shape[0]},{shape[1]}]"
    assert kept(fn, args) == Counter({name: 1 + (axis == 1), "f32[128,128]": pieces} if axis else {name: 1})


def test_a_reduction_of_stacked_arrays_reads_them() -> None:
    def fn(x: Any, y: Any, w: Any) -> Any:
        return jnp.stack([x @ w, y @ w]).max(0)

    args = array("float32", 64, 64), array("float32", 64, 64), array("float32", 64, 64)
    assert kept(fn, args) == {"f32[64,64]": 3}
    assert kept(fn, args, replace(CPU, splits_reductions=False))["f32[2,64,64]"] == 1


def test_what_reduces_or_joins_or_cuts_nothing_is_the_array() -> None:
    def fn(x: Any, w: Any) -> Any:
        y = jnp.concatenate([(x @ w)[:0], x @ w])[:64].reshape(1, 64, 64).max(0)
        return jnp.sort(jnp.maximum(y, -jnp.inf), 0)

    program = flatten(trace(fn, array("float32", 64, 64), array("float32", 64, 64)).graph, CPU, {})
    assert [s.name for s in program.top.steps if s.outputs[0] in written(program).values] == ["dot_general", "sort"]


def test_a_transpose_that_undoes_another_is_none() -> None:
    def fn(x: Any, w: Any) -> Any:
        y = (x @ w).transpose(2, 0, 1)
        return jnp.sort((2.0 * y).transpose(1, 2, 0), 0)

    program = flatten(trace(fn, array("float32", 8, 16, 64), array("float32", 64, 64)).graph, CPU, {})
    assert not any(s.name == "transpose" for s in program.top.steps)


def test_a_division_by_what_is_broadcast_is_repeated() -> None:
    """It is a multiplication by the reciprocal."""

    def fn(x: Any, y: Any, s: Any) -> Any:
        z = x / s
        return jnp.flip(2.0 * z), jax.lax.abs(z)

    args = array("float32", 64, 64), array("float32", 64, 64)
    assert sources_of(lambda x, y: fn(x, y, y[:, :1]), args, "abs") == {"x", "y"}
    assert sources_of(fn, (*args, array("float32", 64, 64)), "abs") == {"div"}


def test_a_batch_of_one_is_reshaped_for_its_product() -> None:
    """What is made of several arrays is computed again for the product; batches of more are read as they are."""

    def fn(x: Any, y: Any) -> Any:
        z = x + y
        return jax.lax.dot_general(z, z, (((2,), (1,)), ((0,), (0,)))), jnp.flip(z)

    assert sources_of(fn, [array("float32", 2, 64, 64)] * 2, "rev") == {"add"}
    assert sources_of(fn, [array("float32", 1, 64, 64)] * 2, "rev") == {"x", "y"}


@pytest.mark.parametrize(("unroll", "loops", "products"), [(1, 1, 1), (True, 0, 4), (4, 0, 4)])
def test_no_loop_is_left_of_one_that_is_unrolled(unroll: int | bool, loops: int, products: int) -> None:
    def fn(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda c, w: (jnp.sort(c @ w, 0), jnp.sin(c)), x, ws, unroll=unroll)

    program = flatten(trace(fn, array("float32", 64, 64), array("float32", 4, 64, 64)).graph, CPU, {})
    names = [s.name for frame in program.top.walk() for s in frame.steps]
    assert (names.count("scan"), names.count("dot_general")) == (loops, products)


def test_chains_that_are_unrolled_run_side_by_side() -> None:
    """Each has an array, and one has another that it makes."""

    def fn(*xs: Any) -> Any:
        step = lambda _, x: jnp.sort(jnp.sort(x, 0), 1)  # noqa: E731
        return [jax.lax.fori_loop(0, 4, step, jnp.sort(x, 0), unroll=True).sum() for x in xs]

    assert most_alive(flatten(trace(fn, *[array("float32", 64, 64)] * 4).graph, CPU, {})) == 4 + 1


def test_every_iteration_of_an_unrolled_loop_reads_copies_of_its_own() -> None:
    """In another layout; what is read of outside of the loop is one copy for all."""

    def fn(x: Any, w: Any) -> Any:
        return jax.lax.fori_loop(0, 4, lambda _, x: jnp.sort(x @ w, 0), x, unroll=True)

    graph = trace(fn, array("float32", 64, 64), array("float32", 64, 64)).graph
    product = next(op for op in graph.walk() if op.name == "dot_general")
    program = flatten(graph, CPU, {f"{product.tag}.in0": "x", f"{product.tag}.in1": "w"})
    assert Counter(key for _, key in program.tokens.values()) == {"x": 4 + 1, "w": 1}
    assert len({v for s in program.top.steps for v in s.inputs if v in program.tokens}) == 4 + 1


def test_slices_of_what_an_unrolled_loop_stacks_are_what_it_made() -> None:
    """Its gradient reads the values of each iteration, in reverse."""

    def loss(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws, unroll=True)[0].sum()

    args = array("float32", 64, 64), array("float32", 4, 64, 64)
    program = flatten(trace(jax.grad(loss), *args).graph, CPU, {})
    assert not any(s.name == "stack" for s in program.top.steps)


@pytest.mark.parametrize(("also_read", "arrays"), [(False, 2), (True, 3)])
def test_gathered_columns_that_a_loop_reads_are_copied_behind_their_transposition(also_read: bool, arrays: int) -> None:
    """As many temporaries as XLA:CPU has (JAX 0.10.2); what else reads the columns reads them as gathered."""

    def fn(x: Any, rows: Any) -> Any:
        taken = x.at[:, rows].get(mode="clip")
        total = jax.lax.fori_loop(
            0, 32, lambda n, total: total + jax.lax.dynamic_index_in_dim(taken, n, 1, False), x[:, 0]
        )
        return total + taken[:, 7] if also_read else total

    args = array("float32", 512, 64, 3), array("int32", 32)
    assert kept(fn, args)["f32[512,32,3]"] == arrays


def test_a_window_that_is_added_to_zeros_and_then_to_an_array_needs_no_zeros() -> None:
    """Gradients of the parts of one projection."""

    def fn(x: Any, w: Any) -> Any:
        part = lambda x, i: jnp.take(x, jnp.array([i]), 1, mode="clip")[:, 0] @ w  # noqa: E731
        return jnp.flip(jax.grad(lambda x: (part(x, 0) * part(x, 1)).sum())(x))

    program = flatten(trace(fn, array("float32", 64, 2, 64), array("float32", 64, 64)).graph, CPU, {})
    assert len(program.adds_of_scatters) == 1


def test_a_kernel_repeats_no_code_more_often_than_compilers_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every level reads the one before at places of its own: without a limit, all is computed from the first."""

    def fn(x: Any, w: Any) -> Any:
        y = x @ w
        for _ in range(5):
            y = y + y[::-1]
        return jnp.flip(y)

    args = array("float32", 64, 64), array("float32", 64, 64)
    within = kept(fn, args)["f32[64,64]"]
    monkeypatch.setattr(written_values, "_MAX_DUPLICATION", 10**9)
    assert kept(fn, args)["f32[64,64]"] == 2 < within


def most_alive(program: Program) -> int:
    """The most arrays of 64 x 64 elements or more that are there at once, arguments left out."""
    lives = lifetimes(program, written(program))
    large = [v for v in lives.birth if v not in program.graph.names and program.type_of(v).size >= 64 * 64]
    return max(sum(lives.birth[v] <= m <= lives.death[v] for v in large) for m in range(lives.end))


def test_a_program_with_kernels_of_lapack_runs_depth_first() -> None:
    """Each product is sorted before the next is made; breadth first all of them are made first."""

    def fn(x: Any, ws: Any, a: Any) -> Any:
        return [jnp.sort(x @ w, 0)[0] for w in ws], jnp.linalg.cholesky(a)

    args = array("float32", 64, 64), [array("float32", 64, 64)] * 5, array("float32", 4, 4)
    graph = trace(fn, *args).graph
    assert most_alive(flatten(graph, CPU, {})) == 2
    assert most_alive(flatten(graph, replace(CPU, solves_in_depth=False), {})) >= 5


def test_of_equal_operations_one_is_done() -> None:
    def fn(x: Any, w: Any) -> Any:
        return jnp.sort(x @ w, 0), jnp.sort(x @ w, 1), jnp.cumsum(x * w, 0), jnp.cumsum(w * x, 1)

    args = array("float32", 64, 64), array("float32", 64, 64)
    assert kept(fn, args)["f32[64,64]"] == 2 + 4
    assert kept(fn, args, replace(CPU, merges_duplicates=False))["f32[64,64]"] == 4 + 4


@pytest.mark.parametrize(("keeps", "products"), [(True, 2), (False, 1)])
def test_what_stands_behind_a_barrier_that_is_kept_equals_nothing(keeps: bool, products: int) -> None:
    def fn(x: Any, w: Any) -> Any:
        return jnp.sort(x @ w, 0), jnp.sort(jax.lax.optimization_barrier(x) @ w, 1)

    program = flatten(trace(fn, *[array("float32", 64, 64)] * 2).graph, replace(CPU, keeps_barriers=keeps), {})
    assert sum(s.name == "dot_general" for s in program.top.steps) == products


@pytest.mark.parametrize("backend", [CPU, GPU])
def test_what_leaves_an_array_as_it_is_writes_nothing(backend: Backend) -> None:
    def fn(x: Any) -> Any:
        y = x @ x
        return jnp.sort(0.0 + y * jnp.ones_like(y), 0)

    program = flatten(trace(fn, array("float32", 64, 64)).graph, backend, {})
    assert len(written(program).values - {*program.graph.names}) == 2


def test_transposes_move_through_arithmetic_into_a_sum() -> None:
    """Nothing is transposed, and the sum's kernel takes in the product."""

    def fn(x: Any, w: Any, b: Any) -> Any:
        y = x @ w
        return (2.0 * y.T - b[:, None] * jnp.square(y).T).sum(0)

    args = array("float32", 2048, 64), array("float32", 64, 64), array("float32", 64)
    assert not kept(fn, args)
    assert kept(lambda *args: jnp.sort(2.0 * (args[0] @ args[1]).T, 0), args) == {"f32[2048,64]": 1, "f32[64,2048]": 2}


def test_a_broadcast_is_one_whether_it_is_written_or_implied() -> None:
    """A kernel of the library does not take it in, but reads it, since others do as well."""

    def fn(x: Any, w: Any, b: Any) -> Any:
        y = x @ w
        return (y * b[None]).sum(1), jnp.flip(x - jnp.broadcast_to(1.0 * b, x.shape))

    args = array("float32", 2048, 64), array("float32", 64, 64), array("float32", 64)
    assert kept(fn, args) == {"f32[2048,64]": 2}


def test_a_weights_gradient_turns_the_activations() -> None:
    """The product is made with its operands in the other order, since a transpose reads it."""

    def fn(x: Any, w: Any) -> Any:
        return jax.grad(lambda w: (jnp.tanh(x) @ w @ w).sum())(w)

    graph = trace(fn, array("float32", 64, 16, 32), array("float32", 32, 32)).graph
    activations = next(op.outputs[0] for op in graph.ops if op.name == "tanh")

    def turned(backend: Backend) -> int:
        steps = flatten(graph, backend, {}).top.steps
        return sum(s.name == "turn" and activations in s.inputs for s in steps)

    assert turned(CPU) == 1
    assert turned(replace(CPU, swaps_products=False)) == 0


def sources_of(fn: Callable[..., Any], args: Sequence[Any], name: str, backend: Backend = CPU) -> set[str]:
    """What the last operation of this name reads from memory: paths of arguments, or names of operations."""
    program = flatten(trace(fn, *args).graph, backend, {})
    step = next(s for s in reversed(program.top.steps) if s.name == name)
    w, names = written(program), program.graph.names
    return {names[v] if v in names else program.graph.producers[program.like.get(v, v)].name for v in w.reads(step)}


def test_what_is_cheap_is_repeated_beside_a_librarys_kernel() -> None:
    """It reads one array; what reads two is read from memory."""

    def fn(x: Any, y: Any) -> Any:
        return (x.sum(0), jnp.flip(x), jax.lax.abs(x)) if y is None else fn(x + y, None)

    args = array("float32", 4096, 64), array("float32", 4096, 64)
    assert sources_of(lambda x, y: fn(jnp.square(x), None), args, "abs") == {"x"}
    assert sources_of(fn, args, "abs") == {"add"}


@pytest.mark.parametrize(("name", "repeats"), [("sin", True), ("cos", True), ("tanh", False)])
def test_sines_are_repeated(name: str, repeats: bool) -> None:
    def fn(x: Any) -> Any:
        y = getattr(jax.lax, name)(x)
        return jnp.flip(2.0 * y), jax.lax.abs(y)

    assert sources_of(fn, (array("float32", 64, 64),), "abs") == ({"x"} if repeats else {name})


def test_a_sum_that_its_reader_depends_on_by_way_of_memory_is_written() -> None:
    """The second reader of the sum reads an exponential of it as well, which is there for others."""

    def fn(x: Any, y: Any) -> Any:
        z = x + y
        e = jnp.exp(z)
        return jnp.flip(e), jax.lax.mul(z, e)

    args = array("float32", 64, 64), array("float32", 64, 64)
    assert sources_of(fn, args, "mul") == {"add", "exp"}
    assert sources_of(lambda x, y: (jnp.flip(x + y), jax.lax.mul(x + y, y)), args, "mul") == {"x", "y"}


def test_a_loops_body_does_not_repeat_what_is_made_outside() -> None:
    """A stack in bfloat16 is converted before the loop, and only the copy is there in it."""

    def fn(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda c, w: (jnp.sort(c + w, 0), None), x, jnp.sort(ws, 1))[0]

    program = flatten(trace(fn, array("bfloat16", 64, 64), array("bfloat16", 4, 64, 64)).graph, CPU, {})
    lives = lifetimes(program, written(program))
    stack = next(s.outputs[0] for s in program.top.steps if s.name == "sort")
    widened = next(s.outputs[0] for s in program.top.steps if s.name == "widen")
    assert lives.death[stack] < lives.death[widened]


def test_what_is_padded_is_not_padded_twice() -> None:
    def fn(x: Any, w: Any) -> Any:
        y = jnp.pad(x @ w, 1)
        return jnp.flip(2.0 * y), jnp.flip(3.0 * y, 0)

    args = array("float32", 64, 64), array("float32", 64, 64)
    assert kept(fn, args) == {"f32[64,64]": 1, "f32[66,66]": 3}


def test_a_sum_that_is_written_is_no_second_array_as_a_matrix() -> None:
    """What is made of one array is computed again for the product."""

    def fn(x: Any, y: Any, w: Any) -> Any:
        z = x if y is None else x + y
        return jnp.sort(z, 0), jnp.einsum("bti,ij->btj", z, w)

    args = array("float32", 16, 16, 16), array("float32", 16, 16, 16), array("float32", 16, 16)
    assert kept(fn, args)["f32[16,16,16]"] == 3
    assert kept(lambda x, _, w: fn(-x, None, w), args)["f32[16,16,16]"] == 4


def test_a_multiplication_by_what_was_true_is_a_selection() -> None:
    """The boolean is read, and not its conversion."""

    def fn(x: Any, y: Any) -> Any:
        mask = (x > y).astype(jnp.float32)
        return jnp.sort(mask, 0), jnp.flip(mask * x)

    args = array("float32", 64, 64), array("float32", 64, 64)
    assert "convert_element_type" not in sources_of(fn, args, "select_n")


def test_a_copy_that_a_loop_reads_is_there_until_its_end() -> None:
    """It is made once, before the loop."""

    def fn(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.sort(jnp.sort(c @ w, 0), 1), None), jnp.sort(x, 0), None, 4)[0]

    graph = trace(fn, array("float32", 64, 64), array("float32", 64, 64)).graph
    loop = graph.ops[-1]
    product = next(op for op in loop.walk() if op.name == "dot_general")
    program = flatten(graph, CPU, {f"{product.tag}.in1": "copy"})
    (token,) = program.tokens
    lives = lifetimes(program, written(program))
    first, last = (m for m, step in enumerate(lives.moments) if step.name == "scan")
    assert lives.birth[token] < first
    assert lives.death[token] == last
