"""Rules derived from Pallas kernels: cut kernels give the whole result; what depends on order or place is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention

import autopar
from autopar.bench.equal.case import dear
from autopar.ir.graph import Op
from autopar.ir.trace import trace
from autopar.rules import pallas, rules_of
from autopar.rules.pallas import axes as axes_module
from autopar.rules.pallas import places

pytestmark = pytest.mark.core

Kernel = tuple[Callable[..., Any], tuple[Any, ...]]


def array(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return (jnp.arange(np.prod(shape)) % 7 - 3).reshape(shape).astype(dtype)


def calls(fn: Callable[..., Any], *args: Any) -> list[Op]:
    return [op for op in trace(fn, *args).graph.walk() if op.name == "pallas_call"]


def axes(kernel: Kernel) -> tuple[pallas.GridAxis, ...]:
    (call,) = calls(kernel[0], *kernel[1])
    return pallas.grid_axes(call.params)


def cut_calls(kernel: Kernel) -> Iterator[tuple[int, int, list[Any], list[Any]]]:
    """Every free grid axis cut into every number of parts: axis, parts, the joined results and the whole ones."""
    (call,) = calls(kernel[0], *kernel[1])
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


# Kernels that can be cut


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
}


@pytest.mark.parametrize("name", CUT)
def test_kernels_that_are_cut(name: str) -> None:
    make, free = CUT[name]
    assert tuple(i for i, axis in enumerate(axes(make())) if not axis.obstacle) == free
    assert assert_cut_is_whole(make()) >= len(free)


def test_the_rule_of_a_matmul() -> None:
    x, w = array(32, 32), array(32, 16)
    graph = trace(matmul, x, w).graph
    (op,) = (op for op in graph.walk() if op.name == "pallas_call")
    rule = rules_of(graph)[op.signature]
    assert str(rule) == "a c, d b -> a b | keep c d"
    assert rule.sizes == (4, 2, 32, 32)  # blocks of rows and columns


def test_the_estimate_is_that_of_the_part() -> None:
    (op,) = calls(with_estimate()[0], array(32, 8))
    jaxpr = jax.make_jaxpr(lambda x: pallas.bind_part(op.equation, [(8, 8)], [x]))(array(8, 8))
    (equation,) = jaxpr.eqns
    assert (equation.params["cost_estimate"].flops, equation.params["cost_estimate"].bytes_accessed) == (256, 512)
    assert equation.params["grid_mapping"].grid == (1,)


# Kernels that cannot be cut


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


def reads_the_first(table: Any, x: Any, out: Any) -> None:
    out[...] = x[...] + table[0]


def reads_the_diagonal(table: Any, x: Any, out: Any) -> None:
    place = pl.program_id(0)
    out[...] = x[...] + table[place, place].astype(jnp.int32)


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
    "running sum that begins at zero": (lambda: of_rows(running_sum_reset_first, **SCRATCH), "program_id(0)"),
    "half of the scratch memory": (lambda: of_rows(half_reset, **SCRATCH), "reads scratch memory"),
    "scratch memory reset by the data": (lambda: of_rows(reset_sometimes, **SCRATCH), "reads scratch memory"),
    "scratch memory of the run before": (lambda: of_rows(reset_too_late, **SCRATCH), "reads scratch memory"),
    "scratch memory swapped": (lambda: of_rows(reads_what_it_overwrites, **SCRATCH), "reads scratch memory"),
    "scratch memory in a loop": (lambda: of_rows(sums_in_a_loop, **SCRATCH), "reads scratch memory"),
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


def test_numbers_wrap_as_in_the_kernel() -> None:
    spec = pl.BlockSpec((8, 8), lambda i, k: (i, 0))
    kernel = of_rows(reset_unless_a_narrow_number_wraps, spec, spec, (4, 2), **SCRATCH)
    assert "reads scratch memory" in axes(kernel)[0].obstacle


@pytest.mark.parametrize("name", REFUSED)
def test_kernels_that_are_refused(name: str) -> None:
    make, why = REFUSED[name]
    (axis,) = axes(make())
    assert why in axis.obstacle
    (op,) = calls(*_flat(make()))
    assert not rules_of(trace(*_flat(make())).graph)[op.signature].free


def _flat(kernel: Kernel) -> tuple[Any, ...]:
    return kernel[0], *kernel[1]


def test_grids_known_at_run_time_are_refused() -> None:
    kernel = dynamic_grid()
    (op,) = calls(*_flat(kernel))
    assert pallas.grid_axes(op.params) == ()
    assert pallas.obstacles(op.params) == "its grid is known at run time only"
    assert not rules_of(trace(*_flat(kernel)).graph)[op.signature].free


def test_grids_known_at_run_time_run_whole() -> None:
    run, arguments = dynamic_grid()
    step = autopar.parallelize(run, mesh=(4,), cluster=dear((4,)), donate_argnums=())
    np.testing.assert_array_equal(step(*arguments), jax.jit(run)(*arguments))


def test_a_prefetched_table_of_a_grid_known_at_run_time_is_read_whole() -> None:
    def body(table: Any, x: Any, out: Any) -> None:
        out[...] = x[...] + table[pl.program_id(0)]

    def run(n: jax.Array, table: jax.Array, x: jax.Array) -> Any:
        rows = pl.BlockSpec((8, 8), lambda i, _: (i, 0))
        spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(n,), in_specs=[rows], out_specs=rows)
        return pl.pallas_call(body, grid_spec=spec, out_shape=LIKE, interpret=True)(table, x)

    arguments = jnp.int32(4), jnp.arange(4, dtype=jnp.int32), array(32, 8)
    step = autopar.parallelize(run, mesh=(4,), cluster=dear((4,)), donate_argnums=())
    np.testing.assert_array_equal(step(*arguments), jax.jit(run)(*arguments))


CARELESS = "program_id; running sum that begins at zero; reversed; scratch memory of the run before; a written operand"


@pytest.mark.parametrize("name", CARELESS.split("; "))
def test_a_derivation_that_looks_less_closely_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = REFUSED[name][0]()
    monkeypatch.setattr(axes_module, "_obstacle_of_body", lambda *_: "")
    plain = places._Walk.run
    monkeypatch.setattr(places._Walk, "run", lambda *given: [_guessed(origin) for origin in plain(*given)])
    with pytest.raises(AssertionError):
        assert_cut_is_whole(kernel)


def _guessed(origin: places.Origin) -> places.Origin:
    """What depends on one axis is taken for that axis."""
    return places.place(min(origin.depends_on)) if origin.depends_on else origin


# Random kernels


@st.composite
def random_kernels(draw: Any) -> Kernel:
    """Two operands and a result over a grid of up to three axes; index maps in order, reversed and constant.

    Dimensions of the result are in any order, and blocks are of one or two.
    """
    grid = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 4]), min_size=1, max_size=3)))
    maps = st.sampled_from([*["axis"] * 8, "reversed", "zero"])
    sizes = st.sampled_from([2, 2, 1])
    of_operands = [[(draw(maps), draw(st.integers(0, len(grid) - 1)), draw(sizes)) for _ in range(2)] for _ in range(2)]
    of_result = [(draw(maps), axis, draw(sizes)) for axis in draw(st.permutations(range(len(grid))))]
    scratch = draw(st.sampled_from(["none", "none", "reset", "reset at the start of the last axis", "carried"]))
    place = draw(st.sampled_from([*[None] * 6, *range(len(grid))]))

    def spec(dims: Any) -> tuple[pl.BlockSpec, tuple[int, ...]]:
        def index(*ids: Any) -> tuple[Any, ...]:
            return tuple({"axis": ids[a], "reversed": grid[a] - 1 - ids[a], "zero": 0}[kind] for kind, a, _ in dims)

        return pl.BlockSpec(tuple(n for *_, n in dims), index), tuple(n * grid[a] for _, a, n in dims)

    def body(x: Any, y: Any, out: Any, *kept: Any) -> None:
        value = x[...].sum() * 3 + y[...].sum()
        if place is not None:
            value = value + pl.program_id(place)
        if scratch == "reset":
            kept[0][...] = jnp.zeros((2, 2), jnp.int32)
        if scratch == "reset at the start of the last axis":
            pl.when(pl.program_id(len(grid) - 1) == 0)(lambda: kept[0].__setitem__(..., jnp.zeros((2, 2), jnp.int32)))
        if kept:
            kept[0][...] += value
            value = kept[0][0, 1]
        out[...] = jnp.broadcast_to(value, out.shape) + jnp.arange(out.shape[-1], dtype=jnp.int32)

    specs = [spec(dims) for dims in of_operands]
    out_spec, out_shape = spec(of_result)
    options = {} if scratch == "none" else {"scratch_shapes": [pltpu.VMEM((2, 2), jnp.int32)]}
    out = jax.ShapeDtypeStruct(out_shape, jnp.int32)

    def run(x: jax.Array, y: jax.Array) -> Any:
        return call(body, grid, [s for s, _ in specs], out_spec, out, **options)(x, y)

    return run, tuple(array(*shape, dtype=jnp.int32) for _, shape in specs)


#: The first example that `find` meets, and no smaller one.
FIRST = settings(deadline=None, max_examples=2000, phases=[Phase.generate])


@settings(max_examples=15, deadline=None)
@given(random_kernels())
def test_random_kernels_are_whole_when_cut(kernel: Kernel) -> None:
    assert_cut_is_whole(kernel)


def test_some_random_kernels_are_cut_with_scratch_memory_and_places() -> None:
    def is_wanted(kernel: Kernel) -> bool:
        (op,) = calls(*_flat(kernel))
        free = any(axis.size > 1 and not axis.obstacle for axis in pallas.grid_axes(op.params))
        return free and len(op.params["jaxpr"].invars) > 3 and "program_id" in str(op.params["jaxpr"])

    assert assert_cut_is_whole(find(random_kernels(), is_wanted, settings=FIRST)) > 0


@st.composite
def tabled_kernels(draw: Any) -> Kernel:
    """A kernel over a grid (n, n) with a prefetched table [n,n], which index maps and the body read in some places."""
    n = draw(st.sampled_from([2, 3, 4]))
    kinds = st.sampled_from([*["axis"] * 6, "reversed", "zero"])
    reads = st.tuples(st.tuples(kinds, st.integers(0, 1)), st.tuples(kinds, st.integers(0, 1)))
    in_map, in_body = draw(st.none() | reads), draw(st.lists(reads, max_size=2))
    table = jnp.array(draw(st.lists(st.integers(0, n - 1), min_size=n * n, max_size=n * n)), jnp.int32).reshape(n, n)

    def element(table: Any, read: Any, places: Sequence[Any]) -> Any:
        return table[tuple({"axis": places[a], "reversed": n - 1 - places[a], "zero": 0}[kind] for kind, a in read)]

    def body(table: Any, x: Any, out: Any) -> None:
        out[...] = x[...]
        for read in in_body:
            out[...] += element(table, read, [pl.program_id(0), pl.program_id(1)])

    def index(i: Any, j: Any, table: Any) -> tuple[Any, Any]:
        return (i if in_map is None else element(table, in_map, (i, j))), j

    def run(table: jax.Array, x: jax.Array) -> Any:
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(n, n),
            in_specs=[pl.BlockSpec((2, 2), index)],
            out_specs=pl.BlockSpec((2, 2), lambda i, j, table: (i, j)),
        )
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(body, grid_spec=spec, out_shape=like, interpret=True)(table, x)

    return run, (table, array(2 * n, 2 * n, dtype=jnp.int32))


@settings(max_examples=15, deadline=None)
@given(tabled_kernels())
def test_random_kernels_with_tables_are_whole_when_cut(kernel: Kernel) -> None:
    assert_cut_is_whole(kernel)


def test_some_random_tables_are_cut() -> None:
    def is_wanted(kernel: Kernel) -> bool:
        return any(not axis.obstacle and axis.dims[0] is not None for axis in axes(kernel))

    assert assert_cut_is_whole(find(tabled_kernels(), is_wanted, settings=FIRST)) > 0


def test_a_table_whose_other_reads_are_not_looked_at_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_read(walk: places._Walk, operands: Sequence[Any], grid: Sequence[int]) -> dict[tuple[int, int], int]:
        return {(operand, d): i.axis for operand, of in walk.reads.items() for d, i in enumerate(of[0]) if i.axis >= 0}

    monkeypatch.setattr(places._Walk, "tables", first_read)
    with pytest.raises(AssertionError):
        assert_cut_is_whole(prefetched(ORDER, reads_the_first, lambda i, rows: (rows[i], 0)))
    with pytest.raises(AssertionError):
        assert_cut_is_whole(prefetched(PLANE, reads_the_diagonal, lambda i, rows: (i, 0)))


# Kernels of JAX


HEADS, SEQ, WIDTH = 4, 256, 128


def attention(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of a sum over attention, which runs the kernels of both passes."""
    return jax.grad(lambda q, k, v: kernel(q, k, v).sum(), (0, 1, 2))


def doubled_and_kept(x: Any, out: Any, kept: Any) -> None:
    kept[...] = 2 * x[...]
    out[...] = kept[...] + 1


def summed_and_kept(x: Any, out: Any, kept: Any) -> None:
    kept[...] += x[...]
    out[...] = kept[...]


def keeping(body: Any) -> Callable[..., Any]:
    """A kernel of rows whose second result has one block, which all runs share."""
    rows, shared = pl.BlockSpec((8, 8), lambda i: (i, 0)), pl.BlockSpec((8, 8), lambda i: (0, 0))
    like = jax.ShapeDtypeStruct((32, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return pl.pallas_call(body, like, grid=(4,), in_specs=[rows], out_specs=[rows, shared], interpret=True)


kept = keeping(doubled_and_kept)
UNREAD = {
    "overwritten first": (lambda x: kept(jnp.sin(x))[0] * 2, True),
    "read": (lambda x: kept(jnp.sin(x)), False),
    "read elsewhere": (
        lambda x: (kept(jnp.sin(x))[0], kept(jnp.cos(x))[1]),
        False,
    ),
    "not overwritten first": (lambda x: keeping(summed_and_kept)(jnp.sin(x))[0], False),
}


@pytest.mark.parametrize("name", UNREAD)
def test_results_that_nothing_reads_are_scratch_memory(name: str) -> None:
    fn, is_cut = UNREAD[name]
    x = array(32, 8)
    graph = trace(fn, x).graph
    rules = [rules_of(graph)[op.signature] for op in graph.walk() if op.name == "pallas_call"]
    assert all(bool(rule.free) == is_cut for rule in rules)
    parallel = autopar.parallelize(fn, mesh=(4,), cluster=dear((4,)))
    for ours, theirs in zip(jax.tree.leaves(parallel(x)), jax.tree.leaves(jax.jit(fn)(x)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_flash_attention_is_cut_by_batch_and_heads() -> None:
    q = jax.ShapeDtypeStruct((8, HEADS, SEQ, WIDTH), jnp.float32)
    kernels = calls(attention(partial(flash_attention.flash_attention, causal=True)), q, q, q)
    assert len(kernels) == 3
    for op in kernels:
        assert [axis.size for axis in pallas.grid_axes(op.params) if not axis.obstacle] == [8, HEADS]


# In plans


@pytest.mark.parametrize("mesh", [(8,), (2, 4), (2, 2, 2)])
def test_planned_kernels_equal_the_whole(mesh: tuple[int, ...]) -> None:
    @jax.custom_vjp
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return matmul(x, w)

    product.defvjp(lambda x, w: (matmul(x, w), (x, w)), lambda kept, g: (matmul(g, kept[1].T), matmul(kept[0].T, g)))

    def step(w: jax.Array, x: jax.Array) -> Any:
        loss, grad = jax.value_and_grad(lambda w: (jnp.tanh(product(x, w)) ** 2).mean())(w)
        return w - grad, loss

    w, x = array(32, 64) / 10, array(64, 32) / 10
    parallel = autopar.parallelize(step, mesh=mesh, cluster=dear(mesh), donate_argnums=())
    plan = parallel.plan(w, x)
    assert not any("pallas_call runs replicated" in note for note in plan.notes)
    assert autopar.verify(plan, step, w, x, target="cpu").ok
    for ours, theirs in zip(parallel(w, x), jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_kernel_that_is_not_cut_runs_on_every_device() -> None:
    def step(x: jax.Array) -> Any:
        return of_rows(running_sum, **SCRATCH)[0](jnp.sin(x)) * 2

    x = array(32, 8)
    parallel = autopar.parallelize(step, mesh=(4,), cluster=dear((4,)))
    (note,) = [note for note in parallel.plan(x).notes if "pallas_call" in note and "replicated" in note]
    assert "grid axis 0: the kernel reads scratch memory that a run before has written" in note
    np.testing.assert_allclose(parallel(x), jax.jit(step)(x), rtol=1e-6)
