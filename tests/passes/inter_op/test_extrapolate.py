"""What layers take in another number of microbatches: exact where it is affine in their size, else near and bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.passes.inter_op.extrapolate import options_anywhere, options_at
from autopar.passes.inter_op.layer_costs import OptionsByKind
from autopar.passes.inter_op.search import InterOpSearch
from autopar.passes.inter_op.stage_options import StageOption
from autopar.passes.microbatch.analysis import batch_leaves
from autopar.passes.remat.options import Options
from autopar.passes.stages.cost import StageMemory, StageTimes
from tests.passes.inter_op.test_search import cluster, traced

POSITIVE = st.floats(1e-3, 1e3)
COUNTS = st.integers(1, 512)


def affine(count: int, fixed: float, rest: float, share: float = 0.0) -> StageOption:
    """A option to run a layer whose passes take and hold `fixed` and, over all microbatches, `rest`."""
    one = fixed + rest / count
    times = StageTimes(one, 2 * one, 3 * one, 5.0, 6.0, {})
    return StageOption(times, StageMemory(7.0, 8.0, 9.0, 10.0, 4 * one, 5 * one, 11.0), 6 * one, share)


def per_pass(option: StageOption) -> tuple[float, ...]:
    times, memory = option.times, option.memory
    return (times.forward, times.backward, times.weight, memory.stash, memory.temporaries, option.entering)


@given(st.sets(COUNTS, min_size=3, max_size=4), POSITIVE, POSITIVE)
def test_what_is_affine_in_the_size_is_exact(counts: set[int], fixed: float, rest: float) -> None:
    count, *others = sorted(counts, key=lambda n: (n % 7, n))
    priced = {m: {0: {3: (affine(m, fixed, rest), affine(m, 2 * fixed, rest, 0.3))}} for m in others}
    exact = (affine(count, fixed, rest), affine(count, 2 * fixed, rest, 0.3))
    for found, one in zip(options_at(count, priced)[0][3], exact, strict=True):
        assert per_pass(found) == pytest.approx(per_pass(one), rel=1e-6)
        assert found.times.update == 5.0
        assert found.memory.state == 7.0


@given(COUNTS, COUNTS, POSITIVE, POSITIVE)
def test_one_number_gives_a_bound(count: int, known: int, fixed: float, rest: float) -> None:
    found = options_at(count, {known: {0: {0: (affine(known, fixed, rest),)}}})[0][0][0]
    assert all(a <= b * (1 + 1e-9) for a, b in zip(per_pass(found), per_pass(affine(count, fixed, rest)), strict=True))


def test_a_way_that_one_number_lacks_changes_as_the_cheapest_does() -> None:
    priced = {8: {0: {0: (affine(8, 1, 8), affine(8, 4, 32, 0.3))}}, 16: {0: {0: (affine(16, 1, 8),)}}}
    found = options_at(4, priced)[0][0]
    assert per_pass(found[1]) == pytest.approx(tuple(4 * v for v in per_pass(affine(4, 1, 8))))


def test_wherever_some_numbers_are_priced_they_tell() -> None:
    """Each kind and submesh goes by the nearest numbers that it is priced with, a single one by a bound."""
    one, other = {0: (affine(8, 1, 8),)}, {0: (affine(32, 1, 8),)}
    found = options_anywhere(16, {8: {0: one, 1: one}, 32: {0: other}, 64: {0: {1: other[0]}}})
    assert {n: [*options] for n, options in found.items()} == {0: [0, 1], 1: [0]}
    assert per_pass(found[0][0][0]) == pytest.approx(per_pass(affine(16, 1, 8)))
    assert found[1] == options_at(16, {8: {1: one}})[1]


def test_submeshes_that_one_number_lacks_are_left() -> None:
    one = {0: (affine(8, 1, 1),)}
    assert options_at(2, {8: {0: one, 1: one}, 4: {0: one}}).keys() == {0}
    assert options_at(2, {8: {0: one, 1: one}}).keys() == {0, 1}


def cheapest(searcher: InterOpSearch, count: int) -> dict[int, OptionsByKind]:
    priced = searcher.priced(count, searcher.meshes)
    return {n: {kind: (options.cheapest,) for kind, options in one.by_kind.items()} for n, one in priced.items()}


def test_layers_take_about_what_two_other_numbers_say() -> None:
    """The toy's layers on all submeshes: each number of four from the nearest two others."""
    step = traced("gpt-toy", layers=4, batch=32)
    searcher = InterOpSearch(step.graph, step.in_avals, cluster(), batch_leaves(step.graph, 1), Options())
    counts = (2, 4, 8, 16)
    priced = {m: cheapest(searcher, m) for m in counts}
    for count in counts:
        found = options_at(count, {m: options for m, options in priced.items() if m != count})
        for n, options in found.items():
            near, exact = (
                sum(sum(per_pass(one[kind][0])[:3]) for kind in searcher.kinds.of_layer)
                for one in (options, priced[count][n])
            )
            assert near == pytest.approx(exact, rel=0.05)
