"""The inter-op dynamic program: brute force over all divisions is the judge."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.passes.inter_op.dynamic_program import Division, Part, Placement, Question, RunCosts, placements, search


def divisions(q: Question) -> Iterator[tuple[Part, ...]]:
    """Every option to cut the layers, place the stages and choose options, by recursion."""

    def rest(layer: int, device: int) -> Iterator[tuple[Part, ...]]:
        if layer == q.layers and device == q.devices:
            yield ()
        for placement in q.placements:
            if placement.start == device:
                for last in range(layer + 1, q.layers + 1):
                    for option in range(len(q.prices[placement.submesh].seconds)):
                        for later in rest(last, placement.stop):
                            yield (Part(layer, last, placement, option), *later)

    yield from rest(0, 0)


def priced(q: Question, parts: tuple[Part, ...]) -> float:
    """The seconds of a division by the formula; infinite if it does not fit."""
    total, slowest = 0.0, 0.0
    for s, part in enumerate(parts):
        o, at = q.prices[part.placement.submesh], (part.option, part.first, part.last)
        most = max(
            o.fixed[at] + q.in_flight(len(parts) - s) * o.stash[at],
            o.fixed[at] if o.without_microbatches is None else o.without_microbatches[at],
        )
        if most > q.memory[part.placement.submesh]:
            return math.inf
        seconds = o.seconds[at] + o.once[at] / q.microbatches
        total += seconds
        slowest = max(slowest, seconds)
        if s and q.transfer is not None:
            total += q.transfer[parts[s - 1].placement.submesh, part.first, part.placement.start]
    return total + (q.microbatches - 1) * slowest


def by_force(q: Question) -> float:
    allowed = (d for d in divisions(q) if (len(d) == q.stages if q.stages else len(d) >= q.fewest))
    return min((priced(q, d) for d in allowed), default=math.inf)


@st.composite
def questions(draw: st.DrawFn) -> Question:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    groups = draw(st.sampled_from([[(1, 3)], [(2, 2)], [(3, 1)], [(1, 4)], [(1, 2), (2, 1)], [(2, 1), (1, 2)]]))
    layers = draw(st.integers(1, 4))
    where = tuple(placements(groups))
    shape = (draw(st.integers(1, 2)), layers + 1, layers + 1)
    options = tuple(
        RunCosts(
            rng.integers(1, 20, shape).astype(float),
            rng.integers(0, 9, shape).astype(float),
            rng.integers(0, 6, shape).astype(float),
            rng.integers(0, 4, shape).astype(float),
            draw(st.sampled_from([None, rng.integers(0, 12, shape).astype(float)])),
        )
        for _ in range(1 + max(p.submesh for p in where))
    )
    devices = sum(h * n for h, n in groups)
    return Question(
        layers,
        devices,
        where,
        options,
        tuple(rng.integers(4, 16, len(options)).astype(float)),
        draw(st.integers(1, 6)),
        draw(st.sampled_from([lambda s: s, lambda s: 2 * s - 1, lambda s: 3])),
        draw(st.sampled_from([None, rng.integers(0, 5, (len(options), layers + 1, devices + 1)).astype(float)])),
        draw(st.sampled_from([None, None, 1, 2])),
        draw(st.sampled_from([1, 1, 2, 3])),
    )


@settings(max_examples=300)
@given(questions())
def test_the_search_equals_brute_force(q: Question) -> None:
    fastest_divisions = search(q)
    best = by_force(q)
    if not fastest_divisions:
        assert best == math.inf
        return
    assert fastest_divisions[0].seconds == pytest.approx(best, rel=1e-12)
    for division in fastest_divisions:
        assert priced(q, division.parts) == pytest.approx(division.seconds, rel=1e-12)
        assert_whole(q, division)


def assert_whole(q: Question, division: Division) -> None:
    """Every layer and every device is in one stage, in order."""
    parts = division.parts
    assert [p.first for p in parts] == [0, *(p.last for p in parts[:-1])]
    assert parts[-1].last == q.layers
    starts, stops = [p.placement.start for p in parts], [p.placement.stop for p in parts]
    assert starts == [0, *stops[:-1]]
    assert stops[-1] == q.devices


def test_a_changed_price_is_noticed_by_brute_force() -> None:
    """The judge is no copy of the search: with one stage made dearer for it alone, they part."""
    where = tuple(placements([(1, 2)]))
    seconds = np.ones((1, 3, 3))
    zero = np.zeros((1, 3, 3))
    q = Question(2, 2, where, (RunCosts(seconds, zero, zero, zero),) * 2, (1.0, 1.0), 4, lambda s: s)
    dear = Question(2, 2, where, (RunCosts(seconds * 3, zero, zero, zero),) * 2, (1.0, 1.0), 4, lambda s: s)
    assert search(q)[0].seconds == by_force(q) == 4.0  # one stage on both devices: 1 + 3 x 1
    assert search(dear)[0].seconds != by_force(q)


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        ([(1, 3)], ["0:1", "1:2", "2:3", "0:2", "1:3", "0:3"]),
        ([(3, 1)], ["0:1", "1:2", "2:3", "0:2", "1:3", "0:3"]),
        ([(2, 2)], ["0:1", "1:2", "2:3", "3:4", "0:2", "2:4", "0:4"]),
        ([(1, 2), (2, 1)], ["0:1", "1:2", "0:2", "2:3", "3:4", "2:4"]),
    ],
)
def test_submeshes_are_of_one_host_or_whole_hosts_of_one_group(
    groups: list[tuple[int, int]], wanted: list[str]
) -> None:
    placed = list(placements(groups))
    assert [f"{p.start}:{p.stop}" for p in placed] == wanted
    assert len({(p.submesh, p.stop - p.start) for p in placed}) == len({p.submesh for p in placed})


def test_equal_numbers_of_devices_of_unlike_groups_are_unlike_submeshes() -> None:
    first, second = (p for p in placements([(1, 1), (1, 1)]))
    assert first.submesh != second.submesh


def uniform(layers: int, devices: int, m: int, memory: float = np.inf, stash: float = 0.0) -> Question:
    """Layers of 1 s on one device that scale as they are cut over more, on one host."""
    where = tuple(placements([(1, devices)]))
    runs = np.maximum(np.arange(layers + 1)[None] - np.arange(layers + 1)[:, None], 0).astype(float)[None]
    prices = tuple(RunCosts(runs / n, 0 * runs, runs / n, stash * runs / n) for n in range(1, devices + 1))
    return Question(layers, devices, where, prices, (memory,) * devices, m, lambda s: s)


def test_without_memory_limits_ideal_scaling_wants_one_stage() -> None:
    assert len(search(uniform(4, 4, 8))[0].parts) == 1


def test_a_division_fits_under_the_microbatches_in_flight() -> None:
    """Two stages of three layers on a device each: the first holds two microbatches, 3 + 2 x 3 bytes."""
    q = replace(uniform(6, 2, 8, memory=9.0, stash=1.0), stages=2)
    assert [(p.first, p.last) for p in search(q)[0].parts] == [(0, 3), (3, 6)]
    tight = replace(q, memory=(8.9, 8.9))
    assert [(p.first, p.last) for p in search(tight)[0].parts] == [(0, 2), (2, 6)]
    assert search(replace(q, memory=(5.9, 5.9))) == ()


@settings(max_examples=100)
@given(questions(), st.floats(0.5, 1.5))
def test_only_what_is_better_than_what_is_known_is_found(q: Question, share: float) -> None:
    best = by_force(q)
    below = best * share if math.isfinite(best) else 1.0
    fastest_divisions = search(q, below=below)
    assert bool(fastest_divisions) == (best < below)
    if fastest_divisions:
        assert fastest_divisions[0].seconds == pytest.approx(best, rel=1e-12)
        assert all(d.seconds < below for d in fastest_divisions)


def test_a_tolerance_loses_no_more_than_it_says() -> None:
    rng = np.random.default_rng(7)
    shape = (1, 9, 9)
    where = tuple(placements([(1, 4)]))
    prices = tuple(RunCosts(rng.uniform(1, 9, shape), *[np.zeros(shape)] * 3) for _ in range(4))
    q = Question(8, 4, where, prices, (1.0,) * 4, 16, lambda s: s)
    exact, near = search(q)[0].seconds, search(q, tolerance=0.05)[0].seconds
    assert exact <= near <= exact / 0.95


def test_division_into_more_stages_than_layers_is_none() -> None:
    q = uniform(1, 2, 2)
    assert search(replace(q, stages=2)) == ()
    assert list(itertools.islice(divisions(q), 2)) == [(Part(0, 1, Placement(0, 2, 1), 0),)]
