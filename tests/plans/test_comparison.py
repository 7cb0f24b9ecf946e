"""Two lists of collectives in, what matches and what is left over out."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.collective import WIRE_FRACTION, Collective, wire_bytes
from autopar.plans.comparison import compare, group, group_size

SIZES = {"x": 2, "y": 4, "z": 3}
PIECES = st.builds(
    Collective,
    st.sampled_from(sorted(WIRE_FRACTION)),
    st.sampled_from([("x",), ("y",), ("x", "y"), ("y:(2)2",)]),
    st.integers(64, 128),
    st.integers(1, 3),
    st.sampled_from(["", "op1", "op2"]),
)


def gathers(*steps: tuple[str, int], kind: str = "all-gather") -> list[Collective]:
    return [Collective(kind, tuple(axes), nbytes) for axes, nbytes in steps]


def test_group_merges_equal_pieces_and_keeps_what_they_share() -> None:
    pieces = [
        Collective("all-reduce", ("y",), 64, 2, "op1", "a.py:1"),
        Collective("all-gather", ("x",), 64, 1, "op3", "a.py:3"),
        Collective("all-reduce", ("y",), 64, 3, "op2", "a.py:1"),
    ]
    assert group(pieces) == (
        Collective("all-gather", ("x",), 64, 1, "op3", "a.py:3"),
        Collective("all-reduce", ("y",), 64, 5, "", "a.py:1"),
    )


@pytest.mark.parametrize(
    ("axes", "size"), [((), 1), (("x",), 2), (("x", "y"), 8), (("y:(2)2",), 2), (("x", "y:(1)2"), 4)]
)
def test_group_size(axes: tuple[str, ...], size: int) -> None:
    assert group_size(axes, SIZES) == size


def test_executions_are_matched_one_by_one() -> None:
    predicted = [Collective("all-reduce", ("y",), 1024, 5), Collective("all-gather", ("x",), 512, 2)]
    emitted = [Collective("all-reduce", ("y",), 1024, 3), Collective("all-gather", ("x",), 512, 4, "op1")]
    result = compare(predicted, emitted, SIZES)
    assert result.matched == 5
    assert result.predicted_only == (Collective("all-reduce", ("y",), 1024, 2),)
    assert result.emitted_only == (Collective("all-gather", ("x",), 512, 2, "op1"),)
    assert result.predicted_wire_bytes == 5 * 1.5 * 1024 + 2 * 0.5 * 512
    assert result.ratio == (3 * 1536 + 4 * 256) / (5 * 1536 + 2 * 256)


def test_what_is_left_over_names_the_operation_that_differs() -> None:
    pieces = [Collective("all-reduce", ("y",), 1024, op=op) for op in ("op1", "op2", "op3")]
    assert compare(pieces, [pieces[2], pieces[0]], SIZES).predicted_only == (pieces[1],)


def test_a_reduce_scatter_may_count_as_an_all_reduce_of_the_same_operand() -> None:
    predicted = [Collective("reduce-scatter", ("y",), 1024)]
    emitted = [Collective("all-reduce", ("y",), 1024)]
    assert compare(predicted, emitted, SIZES).matched == 0
    result = compare(predicted, emitted, SIZES, reduce_scatter_as_all_reduce=True)
    assert (result.matched, result.ratio) == (1, 1.0)


def test_scalars_are_left_out() -> None:
    pieces = [Collective("all-reduce", ("x",), 4), Collective("all-reduce", ("x",), 64)]
    assert compare(pieces, pieces, SIZES).matched == 1
    assert compare(pieces, pieces, SIZES, ignore_scalars_below=0).matched == 2


def test_a_scalar_that_lacks_the_padding_of_its_counterpart_stays() -> None:
    padded, small = Collective("all-gather", ("y",), 64, op="op1"), Collective("all-gather", ("y",), 56, op="op1")
    result = compare([padded], [small], SIZES)
    assert (result.predicted_only, result.emitted_only) == ((padded,), (small,))
    combined = replace(padded, bytes=512)
    assert compare([small], [combined], SIZES).predicted_only == ()


@pytest.mark.parametrize(
    ("predicted", "emitted", "joined"),
    [
        ([("xy", 800)], [("y", 400), ("x", 800)], 1),
        ([("xy", 800)], [("x", 200), ("y", 800)], 1),
        ([("y", 400), ("x", 800)], [("x", 200), ("y", 800)], 1),
        ([("xyz", 2400)], [("z", 300), ("x", 600), ("y", 2400)], 1),
        ([("xyz", 2400)], [("xy", 800), ("z", 2400)], 1),
        ([("xy", 800), ("xy", 800)], [("y", 400), ("x", 800)], 1),
        ([("xy", 800)], [("y", 800), ("x", 800)], 0),
        ([("xy", 800)], [("x", 800)], 0),
    ],
)
@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_steps_over_several_axes_are_joined(
    kind: str, predicted: list[tuple[str, int]], emitted: list[tuple[str, int]], joined: int
) -> None:
    result = compare(gathers(*predicted, kind=kind), gathers(*emitted, kind=kind), SIZES)
    assert (result.matched, result.joined) == (0, joined)
    if joined == len(predicted) or predicted[0][0] == "y":
        assert (result.predicted_only, result.emitted_only) == ((), ())
        assert result.ratio == pytest.approx(1.0)


def test_all_reduces_over_several_axes_are_not_joined() -> None:
    result = compare(gathers(("xy", 800), kind="all-reduce"), gathers(("y", 800), ("x", 800), kind="all-reduce"), SIZES)
    assert (result.matched, result.joined, len(result.emitted_only)) == (0, 0, 2)


@pytest.mark.parametrize("order", list(permutations("xyz")))
def test_a_chain_of_gathers_sends_what_the_joint_gather_sends(order: tuple[str, ...]) -> None:
    nbytes, total = 2400, 0.0
    for axis in order:
        total += wire_bytes("all-gather", nbytes, SIZES[axis])
        nbytes //= SIZES[axis]
    assert total == pytest.approx(wire_bytes("all-gather", 2400, 24))


@pytest.mark.parametrize(
    ("predicted", "emitted", "ratio"), [([], [], 1.0), ([], [("x", 64)], math.inf), ([("x", 64)], [], 0.0)]
)
def test_the_ratio_at_its_ends(predicted: list[tuple[str, int]], emitted: list[tuple[str, int]], ratio: float) -> None:
    assert compare(gathers(*predicted), gathers(*emitted), SIZES).ratio == ratio


@given(st.lists(PIECES, max_size=8), st.lists(PIECES, max_size=8))
@settings(max_examples=100)
def test_nothing_is_lost_and_equal_sides_match(left: list[Collective], right: list[Collective]) -> None:
    assert compare(left, reversed(left), SIZES).predicted_only == ()
    result = compare(left, right, SIZES)
    ours, theirs = (sum(c.count for c in side) for side in (left, right))
    assert ours - sum(c.count for c in result.predicted_only) >= result.matched + result.joined
    assert theirs - sum(c.count for c in result.emitted_only) >= result.matched + result.joined
    assert compare(group(left), group(right), SIZES).matched == result.matched
    swapped = compare(right, left, SIZES)
    assert (swapped.matched, swapped.joined, swapped.predicted_only) == (
        result.matched,
        result.joined,
        result.emitted_only,
    )
