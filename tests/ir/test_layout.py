"""Layouts: specs, the ways between them as text, and the same ways read out of compiled programs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autopar import jax_compat
from autopar.ir.collective import Collective, wire_bytes
from autopar.ir.layout import PARTIAL, REPLICATED, Layout, cuts, divides, from_spec, local_shape, route, spec, steps
from autopar.plans.comparison import group_size
from autopar.verification import hlo, shardy

NAMES = ("x", "y", "z")

# --- specs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "partition"),
    [
        ((REPLICATED, REPLICATED), PartitionSpec()),
        ((0, REPLICATED), PartitionSpec("x")),
        ((1, 1), PartitionSpec(None, ("x", "y"))),
        ((2, 0), PartitionSpec("y", None, "x")),
    ],
)
def test_spec_and_back(layout: Layout, partition: PartitionSpec) -> None:
    assert spec(layout, 3, NAMES[:2]) == partition
    assert from_spec(partition, NAMES[:2]) == layout


def test_from_spec_names_an_axis_that_the_mesh_lacks() -> None:
    with pytest.raises(KeyError, match="model"):
        from_spec(PartitionSpec("model"), NAMES)


def test_cuts_and_local_shapes() -> None:
    assert cuts((0, 0), (2, 4)) == {0: 8}
    assert divides((0, 1), (6, 8), (2, 4))
    assert not divides((0, 0), (12, 8), (2, 4))
    assert local_shape((0, 1), (5, 8), (2, 4)) == (3, 2)


# --- ways as text -----------------------------------------------------------------------------------------------------

SIGNS = {"-": REPLICATED, "+": PARTIAL}


def parse(text: str) -> Layout:
    """ "0-": the first axis cuts dimension 0, the second none; "+" is a partial sum."""
    return tuple(SIGNS[c] if c in SIGNS else int(c) for c in text)


def route_text(source: Layout, target: Layout, sizes: tuple[int, ...]) -> str:
    """Every layout on the way, then the steps: over x with a quarter of the value per device is "x 1/4"."""
    signs = {value: sign for sign, value in SIGNS.items()}
    stops = ["".join(signs.get(d, str(d)) for d in stop) for stop in (source, *route(source, target, sizes), target)]
    words = [
        f"{step.kind} {''.join(NAMES[a] for a in step.axes)} {Fraction(step.fraction).limit_denominator(999)}"
        for step in steps(source, target, sizes) or ()
    ]
    return f"{' '.join(stops)}: {', '.join(words) or 'nothing'}"


@pytest.mark.parametrize(
    "line",
    [
        "-- --: nothing",
        "-- 0-: slice x 1/2",
        "-- 01: slice x 1/2, slice y 1/8",
        "-0 00: collective-permute xy 1/8",
        "0- 00: slice y 1/8",
        "0- --: all-gather x 1",
        "00 --: all-gather xy 1",
        "01 -1 --: all-gather x 1/4, all-gather y 1",
        "00 0-: all-gather y 1/2",
        "00 -0: collective-permute xy 1/8, all-gather x 1/4",
        "0- 1-: all-to-all x 1/2",
        "-1 -0: all-to-all y 1/4",
        "00 11: all-to-all xy 1/8",
        "00 01: all-to-all y 1/8",
        "01 00: all-to-all y 1/8",
        "0- 01 11: slice y 1/8, all-to-all x 1/8, collective-permute xy 1/8",
        "0- 01 -1: slice y 1/8, all-gather x 1/4",
        "-1 01 0-: slice x 1/8, all-gather y 1/2",
        "0- -0: collective-permute xy 1/4",
        "-0 -- 0-: all-gather y 1, slice x 1/2",
        "00 01 -1: all-to-all y 1/8, all-gather x 1/4",
        "00 0- 1-: all-gather y 1/2, all-to-all x 1/2",
        "01 -1 -0 10: all-gather x 1/4, all-to-all y 1/4, slice x 1/8",
        "01 -1 -0: all-gather x 1/4, all-to-all y 1/4",
        "00 -0 10: collective-permute xy 1/8, all-gather x 1/4, slice x 1/8",
        "+- --: all-reduce x 1",
        "+- -- 0-: reduce-scatter x 1",
        "++ --: all-reduce xy 1",
        "++ -- 01: all-reduce xy 1, slice x 1/2, slice y 1/8",
        "++ -- 0-: all-reduce xy 1, slice x 1/2",
        "+0 -0 00: all-reduce x 1/4, collective-permute xy 1/8",
        "+1 -1 01: reduce-scatter x 1/4",
        "+0 -0 -1: all-reduce x 1/4, all-to-all y 1/4",
        "+- +0: slice y 1/4",
    ],
)
def test_routes_on_two_by_four(line: str) -> None:
    first, *_, last = line.partition(":")[0].split()
    assert route_text(parse(first), parse(last), (2, 4)) == line


@pytest.mark.parametrize(
    "line",
    [
        "0-- -0-: collective-permute xy 1/2",
        "01- 10-: collective-permute xy 1/4",
        "-0- -00: slice z 1/4",
        "00- 0-0: collective-permute yz 1/4",
        "012 120: collective-permute xyz 1/8",
        "--0 0--: collective-permute xyz 1/2",
        "000 -0-: collective-permute xy 1/8, all-gather xz 1/2",
    ],
)
def test_routes_on_two_by_two_by_two(line: str) -> None:
    first, *_, last = line.partition(":")[0].split()
    assert route_text(parse(first), parse(last), (2, 2, 2)) == line


def test_a_sum_is_not_scattered_to_be_gathered_again() -> None:
    expected = "00+ 00- 010: all-reduce z 1/4, collective-permute yz 1/8"
    assert route_text(parse("00+"), parse("010"), (2, 2, 2)) == expected


def test_a_sum_is_not_scattered_further_than_shapes_surely_allow() -> None:
    # a dimension of 4 divides at both ends, though not in 8
    assert not any(step.kind == "reduce-scatter" for step in steps(parse("0+"), parse("10"), (2, 4)) or ())


def test_no_route_into_a_partial_sum() -> None:
    assert steps(parse("0-"), parse("+-"), (2, 4)) is None
    assert route(parse("0-"), parse("+-"), (2, 4)) == ()


def test_axes_of_one_device_move_nothing() -> None:
    assert route_text(parse("00"), parse("--"), (1, 8)) == "00 --: all-gather y 1"
    assert route_text(parse("0-"), parse("1-"), (1, 8)) == "0- 1-: nothing"


# --- properties -------------------------------------------------------------------------------------------------------

MESHES = ((8,), (2, 4), (4, 2), (6, 4), (2, 2, 2), (4, 2, 2), (2, 3, 4))


@st.composite
def problems(draw: st.DrawFn, least: int = PARTIAL) -> tuple[Layout, Layout, tuple[int, ...]]:
    sizes = draw(st.sampled_from(MESHES))
    source = draw(st.tuples(*(st.integers(least, 2) for _ in sizes)))
    target = draw(st.tuples(*(st.integers(REPLICATED, 2) for _ in sizes)))
    return source, target, sizes


def wire(source: Layout, target: Layout, sizes: tuple[int, ...]) -> float:
    """Wire bytes per device for a value of one byte."""
    path = [step for step in steps(source, target, sizes) or () if step.kind != "slice"]
    return sum(wire_bytes(s.kind, s.fraction, int(np.prod([sizes[a] for a in s.axes]))) for s in path)


@given(problems())
def test_a_route_is_simple_divides_and_has_positive_steps(problem: tuple[Layout, Layout, tuple[int, ...]]) -> None:
    source, target, sizes = problem
    stops = (source, *route(source, target, sizes), target)
    assert len(set(stops)) == len(stops) or source == target
    for dim in range(3):
        parts = [cuts(stop, sizes).get(dim, 1) for stop in stops]
        assert all(np.lcm(parts[0], parts[-1]) % n == 0 for n in parts)
    for step in steps(source, target, sizes) or ():
        assert 0 < step.fraction <= 1
        assert list(step.axes) == sorted(set(step.axes)) != []
    assert steps(target, target, sizes) == ()


@given(problems(), st.permutations(range(3)))
def test_a_route_does_not_depend_on_names_of_dimensions(
    problem: tuple[Layout, Layout, tuple[int, ...]], names: Sequence[int]
) -> None:
    source, target, sizes = problem
    renamed = [tuple(names[d] if d >= 0 else d for d in layout) for layout in (source, target)]
    assert steps(renamed[0], renamed[1], sizes) == steps(source, target, sizes)


@given(problems(REPLICATED))
def test_no_route_is_longer_than_gathering_everything(problem: tuple[Layout, Layout, tuple[int, ...]]) -> None:
    source, target, sizes = problem
    assert wire(source, target, sizes) <= wire(source, (REPLICATED,) * len(sizes), sizes) + 1e-9


# --- what compilers do ------------------------------------------------------------------------------------------------

Problem = tuple[Layout, Layout]


def all_problems(rank: int, sizes: tuple[int, ...], count: int) -> list[Problem]:
    layouts = list(itertools.product(range(-1, rank), repeat=len(sizes)))
    return random.Random(rank).sample(list(itertools.product(layouts, layouts)), count)


def program(cases: Sequence[Problem], shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> Any:
    """One traced program with a value for each case, constrained along its route under the tag "op<case>"."""
    sizes = tuple(mesh.axis_sizes)

    def placed(layout: Layout) -> NamedSharding:
        return NamedSharding(mesh, spec(layout, len(shape), NAMES[: len(sizes)]))

    def function(*values: jax.Array) -> tuple[jax.Array, ...]:
        out: list[jax.Array] = []
        for i, ((source, target), value) in enumerate(zip(cases, values, strict=True)):
            with jax.named_scope(f"op{i}"):
                value = value * 2
                for layout in (source, *route(source, target, sizes), target):
                    value = jax.lax.with_sharding_constraint(value, placed(layout))
                out.append(value + 1)
        return tuple(out)

    shardings = [tuple(map(placed, layouts)) for layouts in zip(*cases, strict=True)]
    arguments = [jax.ShapeDtypeStruct(shape, np.float32)] * len(cases)
    return jax.jit(function, in_shardings=shardings[0], out_shardings=shardings[1]).trace(*arguments)


def predicted(case: Problem, shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[str, tuple[str, ...], int]]:
    nbytes = 4 * int(np.prod(shape))
    path = [step for step in steps(*case, sizes) or () if step.kind != "slice"]
    return sorted((s.kind, tuple(NAMES[a] for a in s.axes), round(s.fraction * nbytes)) for s in path)


@pytest.mark.parametrize(
    ("sizes", "shape", "count"),
    [((2, 4), (16, 32), 20), ((4, 2), (16, 32, 64), 12), ((2, 2, 2), (16, 32), 12)],
)
def test_xla_emits_exactly_these_steps(sizes: tuple[int, ...], shape: tuple[int, ...], count: int) -> None:
    mesh = jax_compat.auto_mesh(np.array(jax.devices()[:8]).reshape(sizes), NAMES[: len(sizes)])
    cases = all_problems(len(shape), sizes, count)
    compiled = program(cases, shape, mesh).lower().compile()
    compiled_pieces = hlo.collectives(compiled.as_text(), NAMES[: len(sizes)], sizes)
    for i, case in enumerate(cases):
        emitted = sorted((c.kind, c.axes, c.bytes) for c in compiled_pieces if c.op == f"op{i}")
        assert emitted == predicted(case, shape, sizes), f"{case} on {sizes}"


def test_shardy_plans_as_many_bytes_on_the_wire() -> None:
    sizes, shape = (2, 4), (16, 32)
    cases = all_problems(2, sizes, 40)
    traced = program(cases, shape, jax_compat.auto_abstract_mesh(sizes, NAMES[:2]))
    compiled_pieces = shardy.collectives(shardy.partition(traced.lower(lowering_platforms=("cpu",))))
    named: dict[str, int] = dict(zip(NAMES, sizes, strict=False))

    def sent(pieces: Iterable[Collective]) -> float:
        return sum(wire_bytes(c.kind, c.bytes, group_size(c.axes, named)) for c in pieces)

    for i, case in enumerate(cases):
        mine = [Collective(*piece) for piece in predicted(case, shape, sizes)]
        assert sent(mine) == sent(c for c in compiled_pieces if c.op == f"op{i}"), f"{case} on {sizes}"


@pytest.mark.parametrize("target", [(1, 0), (-1, 0), (0, 0)])
def test_an_axis_of_one_device_changes_dimensions_for_nothing(target: Layout) -> None:
    """Though a more minor axis cuts the dimension that it leaves."""
    assert steps((0, 0), target, (1, 4)) == ()
    assert route((0, 0), target, (1, 4)) == ()
    assert steps((0, 0), (1, 0), (2, 4)) != ()
