"""What layers take in another number of microbatches: exact where it is affine in their size, else near and bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.passes.inter_op.extrapolate import options_anywhere, options_at
from autopar.passes.inter_op.layer_costs import OptionsByKind
from autopar.passes.inter_op.search import InterOpSearch
from autopar.passes.inter_op.stage_options import StageOption
from autopar.passes.microbatch.batch import batch_leaves
from autopar.passes.remat.options import Options
from autopar.passes.stages.cost import StageTimes
from autopar.passes.stages.memory import StageMemory
from tests.passes.inter_op.test_search import cluster
from tests.support.traces import traced

POSITIVE = st.floats(1e-3, 1e3)
COUNTS = st.integers(1, 512)


def affine(count: int, fixed: float, rest: float, share: float = 0.0) -> StageOption:
    """A option to run a layer whose passes take and hold `fixed` and, over all microbatches, `rest`."""
    seconds = fixed + rest / count
    times = StageTimes(seconds, 2 * seconds, 3 * seconds, 5.0, 6.0, {})
    return StageOption(times, StageMemory(7.0, 8.0, 9.0, 10.0, 4 * seconds, 5 * seconds, 11.0), 6 * seconds, share)


def per_pass(option: StageOption) -> tuple[float, ...]:
    times, memory = option.times, option.memory
    return (times.forward, times.backward, times.weight, memory.stash, memory.temporaries, option.entering)


@given(st.sets(COUNTS, min_size=3, max_size=4), POSITIVE, POSITIVE)
def test_what_is_affine_in_the_size_is_exact(counts: set[int], fixed: float, rest: float) -> None:
    count, *further = sorted(counts, key=lambda n: (n % 7, n))
    priced = {m: {0: {3: (affine(m, fixed, rest), affine(m, 2 * fixed, rest, 0.3))}} for m in further}
    exact = (affine(count, fixed, rest), affine(count, 2 * fixed, rest, 0.3))
    for estimate, actual in zip(options_at(count, priced)[0][3], exact, strict=True):
        assert per_pass(estimate) == pytest.approx(per_pass(actual), rel=1e-6)
        assert estimate.times.update == 5.0
        assert estimate.memory.state == 7.0


@given(COUNTS, COUNTS, POSITIVE, POSITIVE)
def test_one_number_gives_a_bound(count: int, costed: int, fixed: float, rest: float) -> None:
    estimates = options_at(count, {costed: {0: {0: (affine(costed, fixed, rest),)}}})[0][0][0]
    assert all(
        a <= b * (1 + 1e-9) for a, b in zip(per_pass(estimates), per_pass(affine(count, fixed, rest)), strict=True)
    )


def test_a_way_that_one_number_lacks_changes_as_the_cheapest_does() -> None:
    priced = {8: {0: {0: (affine(8, 1, 8), affine(8, 4, 32, 0.3))}}, 16: {0: {0: (affine(16, 1, 8),)}}}
    estimates = options_at(4, priced)[0][0]
    assert per_pass(estimates[1]) == pytest.approx(tuple(4 * v for v in per_pass(affine(4, 1, 8))))


def test_wherever_some_numbers_are_priced_they_tell() -> None:
    """Each kind and submesh goes by the nearest numbers that it is priced with, a single one by a bound."""
    first, other = {0: (affine(8, 1, 8),)}, {0: (affine(32, 1, 8),)}
    estimates = options_anywhere(16, {8: {0: first, 1: first}, 32: {0: other}, 64: {0: {1: other[0]}}})
    assert {n: [*options] for n, options in estimates.items()} == {0: [0, 1], 1: [0]}
    assert per_pass(estimates[0][0][0]) == pytest.approx(per_pass(affine(16, 1, 8)))
    assert estimates[1] == options_at(16, {8: {1: first}})[1]


def test_submeshes_that_one_number_lacks_are_left() -> None:
    options = {0: (affine(8, 1, 1),)}
    assert options_at(2, {8: {0: options, 1: options}, 4: {0: options}}).keys() == {0}
    assert options_at(2, {8: {0: options, 1: options}}).keys() == {0, 1}


def cheapest(searcher: InterOpSearch, count: int) -> dict[int, OptionsByKind]:
    priced = searcher.priced(count, searcher.meshes)
    return {n: {kind: (options.cheapest,) for kind, options in costs.by_kind.items()} for n, costs in priced.items()}


def test_layers_take_about_what_two_other_numbers_say() -> None:
    """The toy's layers on all submeshes: each number of four from the nearest two others."""
    step = traced("gpt-toy", layers=4, batch=32)
    searcher = InterOpSearch(step.graph, step.in_avals, cluster(), batch_leaves(step.graph, 1), Options())
    counts = (2, 4, 8, 16)
    priced = {m: cheapest(searcher, m) for m in counts}
    for count in counts:
        estimates = options_at(count, {m: options for m, options in priced.items() if m != count})
        for n, options in estimates.items():
            near, exact = (
                sum(sum(per_pass(by_kind[kind][0])[:3]) for kind in searcher.kinds.of_layer)
                for by_kind in (options, priced[count][n])
            )
            assert near == pytest.approx(exact, rel=0.05)
