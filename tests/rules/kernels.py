"""Pallas kernels of a few lines, and the check that a kernel cut along its free grid axes gives the whole result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autopar.ir.graph import Op
from autopar.ir.trace import trace
from autopar.rules import pallas

Kernel = tuple[Callable[..., Any], tuple[Any, ...]]


def array(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return (jnp.arange(np.prod(shape)) % 7 - 3).reshape(shape).astype(dtype)


def calls(fn: Callable[..., Any], *args: Any) -> list[Op]:
    return [op for op in trace(fn, *args).graph.walk() if op.name == "pallas_call"]


def call_of(kernel: Kernel) -> Op:
    """The only kernel that a function calls."""
    function, args = kernel
    (call,) = calls(function, *args)
    return call


def axes(kernel: Kernel) -> tuple[pallas.GridAxis, ...]:
    return pallas.grid_axes(call_of(kernel).params)


def cut_calls(kernel: Kernel) -> Iterator[tuple[int, int, list[Any], list[Any]]]:
    """Every free grid axis cut into every number of parts: axis, parts, the joined results and the whole ones."""
    call = call_of(kernel)
    equation, operands = call.equation, list(kernel[1])
    whole = equation.primitive.bind(*operands, **equation.params)
    for number, axis in enumerate(pallas.grid_axes(call.params)):
        for parts in (n for n in range(2, axis.size + 1) if axis.size % n == 0 and not axis.obstacle):
            dims, of_results = axis.dims[: len(operands)], axis.dims[len(operands) :]
            shapes = [tuple(n // parts if d == dim else n for d, n in enumerate(r.shape))
                      for r, dim in zip(whole, of_results, strict=True)]  # fmt: skip
            pieces = [
                pallas.bind_part(
                    equation,
                    shapes,
                    [x if d is None else jnp.split(x, parts, d)[k] for x, d in zip(operands, dims, strict=True)],
                )
                for k in range(parts)
            ]
            joined = [jnp.concatenate(of, dim) for of, dim in zip(zip(*pieces, strict=True), of_results, strict=True)]
            yield number, parts, joined, whole


def assert_cut_is_whole(kernel: Kernel) -> int:
    """The number of ways in which the kernel was cut."""
    count = 0
    for number, parts, joined, whole in cut_calls(kernel):
        for ours, theirs in zip(joined, whole, strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=f"grid axis {number} in {parts}")
        count += 1
    return count


def call(body: Any, grid: tuple[int, ...], in_specs: Any, out_specs: Any, out: Any, **options: Any) -> Any:
    blocks = {"grid": grid, "in_specs": in_specs, "out_specs": out_specs, "out_shape": out}
    return pl.pallas_call(body, interpret=True, **blocks, **options)


ROWS = pl.BlockSpec((8, 8), lambda i: (i, 0))


LIKE = jax.ShapeDtypeStruct((32, 8), jnp.float32)


def of_rows(
    body: Any, spec: Any = ROWS, out_spec: Any = ROWS, grid: Any = (4,), out: Any = LIKE, **options: Any
) -> Kernel:
    """A kernel of one operand [32,8] and one result."""
    return (lambda x: call(body, grid, [spec], out_spec, out, **options)(x)), (array(32, 8),)


def twice() -> Kernel:
    def body(x: Any, out: Any) -> None:
        out[...] = 2 * x[...] + pl.num_programs(0)

    return of_rows(body)


def matmul(x: jax.Array, w: jax.Array) -> Any:
    """Blocks of 8 x 16 and 16 x 8, accumulated in scratch memory over the last axis of the grid."""

    def body(x: Any, w: Any, out: Any, total: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        total[...] += x[...] @ w[...]

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _() -> None:
            out[...] = total[...]

    rows, inner, columns = x.shape[0], x.shape[1], w.shape[1]
    return call(
        body,
        (rows // 8, columns // 8, inner // 16),
        [pl.BlockSpec((8, 16), lambda i, j, k: (i, k)), pl.BlockSpec((16, 8), lambda i, j, k: (k, j))],
        pl.BlockSpec((8, 8), lambda i, j, k: (i, j)),
        jax.ShapeDtypeStruct((rows, columns), x.dtype),
        scratch_shapes=[pltpu.VMEM((8, 8), jnp.float32)],
    )(x, w)


def stacked_matmul() -> Kernel:
    return jax.vmap(matmul, (0, None)), (array(4, 32, 32), array(32, 16))


def squeezed_heads() -> Kernel:
    def body(x: Any, scale: Any, out: Any, rest: Any) -> None:
        out[...] = x[...] * scale[...]
        rest[...] = x[...].sum(1)

    def run(x: jax.Array, scale: jax.Array) -> Any:
        return call(
            body,
            (4, 2),
            [pl.BlockSpec((None, 8, 8), lambda h, i: (h, i, 0)), pl.BlockSpec((1, 8), lambda h, i: (0, 0))],
            [pl.BlockSpec((None, 8, 8), lambda h, i: (h, i, 0)), pl.BlockSpec((None, 8), lambda h, i: (h, i))],
            [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:2], x.dtype)],
        )(x, scale)

    return run, (array(4, 16, 8), array(1, 8))


def prefetched(table: jax.Array, body: Any, index_map: Any) -> Kernel:
    """A kernel of rows with a prefetched table, which the index map of its operand may read."""

    def run(table: jax.Array, x: jax.Array) -> Any:
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(4,),
            in_specs=[pl.BlockSpec((8, 8), index_map)],
            out_specs=pl.BlockSpec((8, 8), lambda i, table: (i, 0)),
        )
        return pl.pallas_call(body, grid_spec=spec, out_shape=LIKE, interpret=True)(table, x)

    return run, (table, array(32, 8))


ORDER = jnp.array([2, 0, 3, 1], jnp.int32)


PLANE = jnp.arange(16, dtype=jnp.int8).reshape(4, 4)


def copies(table: Any, x: Any, out: Any) -> None:
    out[...] = x[...]


def prefetched_scale() -> Kernel:
    def body(scale: Any, x: Any, out: Any) -> None:
        out[...] = x[...] * scale[1]

    return prefetched(ORDER, body, lambda i, s: (i, 0))


def prefetched_rows() -> Kernel:
    """The operand is read by rows that the table names: it is whole, and the table is cut."""
    return prefetched(ORDER, copies, lambda i, rows: (rows[i], 0))


def prefetched_branches() -> Kernel:
    def body(table: Any, x: Any, out: Any) -> None:
        number = table[pl.program_id(0), 1].astype(jnp.int32)
        out[...] = jnp.where(number > 6, x[...] * number, -x[...])

    return prefetched(PLANE, body, lambda i, table: (i, 0))


def in_place() -> Kernel:
    def body(x: Any, out: Any) -> None:
        out[...] = x[...] + 1

    return of_rows(body, input_output_aliases={0: 0})


def with_estimate() -> Kernel:
    def body(x: Any, out: Any) -> None:
        out[...] = -x[...]

    return of_rows(body, cost_estimate=pl.CostEstimate(flops=1024, transcendentals=0, bytes_accessed=2048))


def reset_by_a_call() -> Kernel:
    """Scratch memory is overwritten by a jitted function, in both branches of an unknown condition."""

    def body(x: Any, out: Any, kept: Any) -> None:
        @jax.jit
        def zeros(n: jax.Array) -> jax.Array:
            return jnp.zeros((8, 8)) + n

        @pl.when(x[0, 0] > 0)
        def _() -> None:
            kept[...] = zeros(1.0)

        @pl.when(x[0, 0] <= 0)
        def _() -> None:
            kept[...] = zeros(2.0)

        kept[...] = zeros(3.0)
        out[...] = x[...] + kept[...]

    return of_rows(body, scratch_shapes=[pltpu.VMEM((8, 8), jnp.float32)])


def row_by_row(
    index: Callable[[Any], Any], bounds: tuple[int, int] = (0, 8), read: Callable[[Any], Any] | None = None
) -> Callable[..., None]:
    """A body that writes rows of scratch memory in a loop, and may read some there, before it copies all of them."""

    def body(x: Any, out: Any, kept: Any) -> None:
        def step(i: Any, total: Any) -> Any:
            total = total if read is None else total + kept[read(i)].sum()
            kept[index(i)] = 2 * x[index(i)] + total
            return total

        total = jax.lax.fori_loop(*bounds, step, jnp.float32(0))
        out[...] = kept[...] + total

    return body


def written_in_nested_loops(x: Any, out: Any, kept: Any) -> None:
    """Elements of each row in an inner loop, which overwrites a row of its own that is copied."""

    def row(i: Any, _: Any) -> None:
        jax.lax.fori_loop(0, 8, lambda j, _: kept.__setitem__((j, slice(None)), x[i] * j), None)
        out[i] = kept[...].sum(0)

    jax.lax.fori_loop(0, 8, row, None)


def overwritten_in_each_iteration(x: Any, out: Any, kept: Any) -> None:
    def add(i: Any, total: Any) -> Any:
        kept[...] = x[...] * i
        return total + kept[...]

    out[...] = jax.lax.fori_loop(0, 3, add, jnp.zeros((8, 8))) + kept[...]


def reads_the_first(table: Any, x: Any, out: Any) -> None:
    out[...] = x[...] + table[0]


def reads_the_diagonal(table: Any, x: Any, out: Any) -> None:
    place = pl.program_id(0)
    out[...] = x[...] + table[place, place].astype(jnp.int32)


CUT: dict[str, tuple[Callable[[], Kernel], tuple[int, ...]]] = {
    "elementwise": (twice, (0,)),
    "matmul": (lambda: (matmul, (array(32, 32), array(32, 16))), (0, 1)),
    "stacked matmul": (stacked_matmul, (0, 1, 2)),
    "squeezed heads": (squeezed_heads, (0, 1)),
    "prefetched scale": (prefetched_scale, (0,)),
    "rows that are prefetched": (prefetched_rows, (0,)),
    "branches that are prefetched": (prefetched_branches, (0,)),
    "in place": (in_place, (0,)),
    "cost estimate": (with_estimate, (0,)),
    "reset by a call": (reset_by_a_call, (0,)),
    **{
        name: (partial(of_rows, body, scratch_shapes=[pltpu.VMEM((8, 8), jnp.float32)]), (0,))
        for name, body in {
            "rows written in a loop": row_by_row(lambda i: i),
            "rows written backwards": row_by_row(lambda i: 7 - i),
            "rows written in pairs": row_by_row(lambda i: pl.ds(2 * i, 2), (0, 4)),
            "rows written from another number": row_by_row(lambda i: i - 3, (3, 11)),
            "rows written twice": row_by_row(lambda i: jax.lax.rem(i, 8), (0, 16)),
            "rows written in an inner loop": written_in_nested_loops,
            "overwritten in each iteration": overwritten_in_each_iteration,
        }.items()
    },
}


def identity(x: Any, out: Any) -> None:
    out[...] = x[...]


def adds_its_place(x: Any, out: Any) -> None:
    out[...] = x[...] + pl.program_id(0)


def changes_its_first(x: Any, out: Any) -> None:
    out[...] = x[...]

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        out[...] = -x[...]


def adds_places_in_a_loop(x: Any, out: Any) -> None:
    out[...] = jax.lax.fori_loop(0, 3, lambda _, c: c + pl.program_id(0), x[...])


def accumulates(x: Any, out: Any) -> None:
    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        out[...] = jnp.zeros_like(out)

    out[...] += x[...]


def running_sum(x: Any, out: Any, total: Any) -> None:
    total[...] += x[...]
    out[...] = total[...]


def running_sum_reset_first(x: Any, out: Any, total: Any) -> None:
    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    running_sum(x, out, total)


def half_reset(x: Any, out: Any, total: Any) -> None:
    total[:4] = jnp.zeros((4, 8))
    running_sum(x, out, total)


def reset_sometimes(x: Any, out: Any, total: Any) -> None:
    @pl.when(x[0, 0] > 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    running_sum(x, out, total)


def reset_unless_a_narrow_number_wraps(x: Any, out: Any, total: Any) -> None:
    """256 is 0 in eight bits: the buffer is not overwritten."""

    @pl.when(jnp.uint8(0) != (pl.program_id(1) + 256).astype(jnp.uint8))
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    running_sum(x, out, total)


def reset_too_late(x: Any, out: Any, total: Any) -> None:
    out[...] = x[...] + total[...]
    total[...] = x[...]


def reads_what_it_overwrites(x: Any, out: Any, total: Any) -> None:
    out[...] = jax.ref.swap(total, ..., x[...])


def swaps_in_a_call(x: Any, out: Any, total: Any) -> None:
    out[...] = jax.jit(lambda new: jax.ref.swap(total, ..., new))(x[...])


def swaps_in_a_loop(x: Any, out: Any, total: Any) -> None:
    out[...] = jax.lax.fori_loop(0, 1, lambda _, new: jax.ref.swap(total, ..., new), x[...])


def writes_some_rows(x: Any, out: Any, kept: Any) -> None:
    """Which ones depends on the data."""

    def step(i: Any, _: Any) -> None:
        pl.when(x[i, 0] > 0)(lambda: kept.__setitem__(i, x[i]))

    jax.lax.fori_loop(0, 8, step, None)
    out[...] = kept[...]


def writes_a_column_of_a_row(x: Any, out: Any, kept: Any) -> None:
    def step(i: Any, _: Any) -> None:
        kept[i, i] = x[i, i]

    jax.lax.fori_loop(0, 8, step, None)
    out[...] = kept[...]


def writes_rows_in_no_iteration(x: Any, out: Any, kept: Any) -> None:
    def step(c: Any, _: Any) -> Any:
        kept[...] = x[...]
        return c, None

    jax.lax.scan(step, 0, None, length=0)
    out[...] = kept[...]


def sums_in_a_loop(x: Any, out: Any, total: Any) -> None:
    def add(i: Any, _: Any) -> None:
        total[...] += x[...] * i

    jax.lax.fori_loop(0, 2, add, None)
    out[...] = total[...]


SCRATCH = {"scratch_shapes": [pltpu.VMEM((8, 8), jnp.float32)]}


def block(index_map: Callable[..., Any], shape: Any = (8, 8)) -> pl.BlockSpec:
    return pl.BlockSpec(shape, index_map)


def aliased_elsewhere() -> Kernel:
    def run(x: jax.Array) -> Any:
        whole, rows = pl.BlockSpec((32, 8), lambda i: (0, 0)), pl.BlockSpec((8, 8), lambda i: (i, 0))

        def body(x: Any, out: Any) -> None:
            out[...] = x[:8]

        return call(body, (4,), [whole], rows, LIKE, input_output_aliases={0: 0})(x)

    return run, (array(32, 8),)


def counts_in_an_operand() -> Kernel:
    """Each run adds one to a block that all of them read."""

    def body(x: Any, count: Any, out: Any) -> None:
        count[...] += 1
        out[...] = x[...] + count[...]

    def run(x: jax.Array, count: jax.Array) -> Any:
        return call(body, (4,), [ROWS, block(lambda i: (0, 0))], ROWS, LIKE)(x, count)

    return run, (array(32, 8), array(8, 8))


def draws(x: Any, out: Any) -> None:
    out[...] = x[...] + pltpu.prng_random_bits((8, 8)).astype(jnp.float32)


def dynamic_grid() -> Kernel:
    def run(n: jax.Array, x: jax.Array) -> Any:
        return pl.pallas_call(identity, grid=(n,), in_specs=[ROWS], out_specs=ROWS, out_shape=LIKE, interpret=True)(x)

    return run, (jnp.int32(4), array(32, 8))


def reads_the_whole(table: Any, x: Any, out: Any) -> None:
    out[...] = x[...] + table[...].sum()


def adds_its_place_to_an_element(table: Any, x: Any, out: Any) -> None:
    place = pl.program_id(0)
    out[...] = x[...] + table[place] + place


REFUSED: dict[str, tuple[Callable[[], Kernel], str]] = {
    "program_id": (lambda: of_rows(adds_its_place), "the kernel uses program_id(0)"),
    "program_id in a condition": (lambda: of_rows(changes_its_first), "the kernel uses program_id(0)"),
    "program_id in a loop": (lambda: of_rows(adds_places_in_a_loop), "the kernel uses program_id(0)"),
    "accumulation": (
        lambda: of_rows(accumulates, out_spec=block(lambda i: (0, 0)), out=jax.ShapeDtypeStruct((8, 8), jnp.float32)),
        "result 0 has no dimension of it: it accumulates over this axis",
    ),
    "running sum": (lambda: of_rows(running_sum, **SCRATCH), "reads scratch memory"),
    "running sum that begins at zero": (lambda: of_rows(running_sum_reset_first, **SCRATCH), "scratch memory"),
    "half of the scratch memory": (lambda: of_rows(half_reset, **SCRATCH), "reads scratch memory"),
    "scratch memory reset by the data": (lambda: of_rows(reset_sometimes, **SCRATCH), "reads scratch memory"),
    "scratch memory of the run before": (lambda: of_rows(reset_too_late, **SCRATCH), "reads scratch memory"),
    "scratch memory swapped": (lambda: of_rows(reads_what_it_overwrites, **SCRATCH), "reads scratch memory"),
    "scratch memory in a loop": (lambda: of_rows(sums_in_a_loop, **SCRATCH), "reads scratch memory"),
    **{
        name: (partial(of_rows, body, **SCRATCH), "reads scratch memory")
        for name, body in {
            "scratch memory swapped in a call": swaps_in_a_call,
            "scratch memory swapped in a loop": swaps_in_a_loop,
            "all rows but the last": row_by_row(lambda i: i, (0, 7)),
            "all rows but the first": row_by_row(lambda i: i + 1, (0, 7)),
            "every second row": row_by_row(lambda i: 2 * i, (0, 4)),
            "rows read before they are written": row_by_row(lambda i: i, read=lambda i: 7 - i),
            "rows by the data": writes_some_rows,
            "the diagonal": writes_a_column_of_a_row,
            "no iteration": writes_rows_in_no_iteration,
        }.items()
    },
    "reversed": (lambda: of_rows(identity, block(lambda i: (3 - i, 0))), "block indices of operand 0 are computed"),
    "reversed result": (lambda: of_rows(identity, out_spec=block(lambda i: (3 - i, 0))), "block indices of result 0"),
    "rotated": (lambda: of_rows(identity, block(lambda i: ((i + 1) % 4, 0))), "block indices of operand 0"),
    "every second": (lambda: of_rows(identity, block(lambda i: (i // 2, 0))), "block indices of operand 0"),
    "chosen": (lambda: of_rows(identity, block(lambda i: (jnp.where(i > 1, i, 0), 0))), "block indices of operand 0"),
    "chosen by a comparison": (
        lambda: of_rows(identity, block(lambda i: (jnp.where(i == 1, 0, 1), 0))),
        "block indices of operand 0",
    ),
    "chosen by a condition": (
        lambda: of_rows(identity, block(lambda i: (jax.lax.cond(i == 1, lambda: 0, lambda: 1), 0))),
        "block indices of operand 0",
    ),
    "a diagonal": (
        lambda: (lambda x: call(identity, (4,), [block(lambda i: (i, i))], ROWS, LIKE)(x), (array(32, 32),)),
        "several dimensions of operand 0 follow it",
    ),
    "a part of the rows": (
        lambda: of_rows(identity, grid=(3,), out=jax.ShapeDtypeStruct((24, 8), jnp.float32)),
        "its blocks do not cover dimension 0 of operand 0 exactly",
    ),
    "rows prefetched in another order": (
        lambda: prefetched(ORDER, copies, lambda i, rows: (rows[3 - i], 0)),
        "block indices of operand 1 are computed from it",
    ),
    "rows prefetched twice": (
        lambda: prefetched(ORDER, copies, lambda i, rows: (rows[rows[i]], 0)),
        "block indices of operand 1 are computed from it",
    ),
    "rows of a longer table": (
        lambda: prefetched(jnp.array([2, 0, 3, 1, 7], jnp.int32), copies, lambda i, rows: (rows[i], 0)),
        "block indices of operand 1 are computed from it",
    ),
    "rows of a table whose first is read by all": (
        lambda: prefetched(ORDER, reads_the_first, lambda i, rows: (rows[i], 0)),
        "block indices of operand 1 are computed from it",
    ),
    "a diagonal of a table": (
        lambda: prefetched(PLANE, reads_the_diagonal, lambda i, rows: (i, 0)),
        "the kernel uses program_id(0)",
    ),
    "a table that is read whole": (
        lambda: prefetched(ORDER, reads_the_whole, lambda i, rows: (rows[i], 0)),
        "block indices of operand 1 are computed from it",
    ),
    "a place and an element of a table": (
        lambda: prefetched(ORDER, adds_its_place_to_an_element, lambda i, rows: (i, 0)),
        "the kernel uses program_id(0)",
    ),
    "elements and not blocks": (
        lambda: of_rows(identity, pl.BlockSpec((pl.Element(8), pl.Element(8)), lambda i: (i * 8, 0))),
        "block indices of operand 0 are computed from it",
    ),
    "a written operand": (
        counts_in_an_operand,
        "the kernel writes operand 1, of which all runs have the same",
    ),
    "random numbers": (lambda: of_rows(draws), "the kernel has state that all runs share (prng_random_bits)"),
    "aliased to what is whole": (aliased_elsewhere, "operand 0 is aliased to result 0"),
}


CARELESS = "program_id; running sum that begins at zero; reversed; scratch memory of the run before; a written operand"
