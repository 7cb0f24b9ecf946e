"""Random Pallas kernels: those that the derivation cuts give the whole result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autopar.rules import pallas
from autopar.rules.pallas import places
from tests.rules.kernels import (
    ORDER,
    PLANE,
    Kernel,
    array,
    assert_cut_is_whole,
    axes,
    call,
    call_of,
    prefetched,
    reads_the_diagonal,
    reads_the_first,
)
from tests.support.effort import examples

pytestmark = pytest.mark.core


@st.composite
def random_kernels(draw: Any) -> Kernel:
    """Two operands and a result over a grid of up to three axes; index maps in order, reversed and constant.

    Scratch memory may be overwritten, at once or in a loop over its rows or some of them. Dimensions of the result are
    in any order, and blocks are of one or two.
    """
    grid = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 4]), min_size=1, max_size=3)))
    maps = st.sampled_from([*["axis"] * 8, "reversed", "zero"])
    sizes = st.sampled_from([2, 2, 1])
    of_operands = [[(draw(maps), draw(st.integers(0, len(grid) - 1)), draw(sizes)) for _ in range(2)] for _ in range(2)]
    of_result = [(draw(maps), axis, draw(sizes)) for axis in draw(st.permutations(range(len(grid))))]
    scratch = draw(st.sampled_from(["none", "none", "reset", "reset at the start of the last axis", "loop", "carried"]))
    rows = draw(st.sampled_from([(0, 1, 2), (0, 1, 2), (1, -1, 2), (0, 1, 1), (1, 0, 2)]))
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
        if scratch == "loop":
            first, step, count = rows
            jax.lax.fori_loop(
                0, count, lambda i, _: kept[0].__setitem__(first + step * i, jnp.zeros(2, jnp.int32)), None
            )
        if kept:
            kept[0][...] += value
            value = kept[0][0, 1] + 5 * kept[0][1, 0]
        out[...] = jnp.broadcast_to(value, out.shape) + jnp.arange(out.shape[-1], dtype=jnp.int32)

    specs = [spec(dims) for dims in of_operands]
    out_spec, out_shape = spec(of_result)
    options = {} if scratch == "none" else {"scratch_shapes": [pltpu.VMEM((2, 2), jnp.int32)]}
    out = jax.ShapeDtypeStruct(out_shape, jnp.int32)

    def run(x: jax.Array, y: jax.Array) -> Any:
        return call(body, grid, [s for s, _ in specs], out_spec, out, **options)(x, y)

    return run, tuple(array(*shape, dtype=jnp.int32) for _, shape in specs)


#: The first example that `find` meets, and no smaller one.
FIRST = settings(max_examples=2000, phases=[Phase.generate])


@settings(max_examples=examples(32))
@given(random_kernels())
def test_random_kernels_are_whole_when_cut(kernel: Kernel) -> None:
    assert_cut_is_whole(kernel)


@pytest.mark.parametrize("primitive", ["program_id", "scan"])
def test_some_random_kernels_are_cut_with_scratch_memory_and_places_or_loops(primitive: str) -> None:
    def is_wanted(kernel: Kernel) -> bool:
        op = call_of(kernel)
        free = any(axis.size > 1 and not axis.obstacle for axis in pallas.grid_axes(op.params))
        return free and len(op.params["jaxpr"].invars) > 3 and primitive in str(op.params["jaxpr"])

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


@settings(max_examples=examples(32))
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
