"""Parts and rounds of an exchange bring every device its box, and every byte crosses between processes once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopar.runtime.exchange import Box, Part, crossing, least, parts, rounds

SHAPE = (4, 6)


def boxes(rows: int, columns: int) -> list[Box]:
    """The boxes of an array of `SHAPE` that is cut so often along each dimension."""
    row, column = SHAPE[0] // rows, SHAPE[1] // columns
    return [
        ((i * row, (i + 1) * row), (j * column, (j + 1) * column))
        for i, j in itertools.product(range(rows), range(columns))
    ]


def sharding(first: int, cuts: tuple[int, int], replicas: int) -> Mapping[int, Box]:
    """Devices from `first` on, each box on so many successive ones."""
    every = [box for box in boxes(*cuts) for _ in range(replicas)]
    return dict(enumerate(every, first))


CUTS = st.tuples(st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 3)))
SHARDINGS = st.builds(sharding, st.integers(0, 6), CUTS, st.integers(1, 3))


def simulated(
    source: Mapping[int, Box], target: Mapping[int, Box], owners: Mapping[int, int]
) -> Mapping[int, np.ndarray]:
    """What every device of the target has after all rounds; NaN where it has received nothing."""
    array = np.arange(float(math.prod(SHAPE))).reshape(SHAPE)
    received = {d: np.full(SHAPE, np.nan) for d in target}
    for together in rounds(parts(source, target, owners)):
        sent = [(part, (received if part.forwarded else held(array, source))[part.sender]) for part in together]
        for part, values in sent:
            where = tuple(slice(*ends) for ends in part.box)
            received[part.receiver][where] = values[where].copy()
    return received


def held(array: np.ndarray, source: Mapping[int, Box]) -> Mapping[int, np.ndarray]:
    """What every device of the source has; NaN elsewhere."""
    values = {}
    for device, box in source.items():
        where = tuple(slice(*ends) for ends in box)
        values[device] = np.full(SHAPE, np.nan)
        values[device][where] = array[where]
    return values


@given(SHARDINGS, SHARDINGS, st.integers(1, 4))
def test_every_device_receives_its_box(source: Mapping[int, Box], target: Mapping[int, Box], per_process: int) -> None:
    owners = {d: d // per_process for d in (*source, *target)}
    received = simulated(source, target, owners)
    array = np.arange(float(math.prod(SHAPE))).reshape(SHAPE)
    for device, box in target.items():
        where = tuple(slice(*ends) for ends in box)
        np.testing.assert_array_equal(received[device][where], array[where])


@given(SHARDINGS, SHARDINGS)
def test_a_device_sends_and_receives_one_box_of_one_shape_in_a_round(
    source: Mapping[int, Box], target: Mapping[int, Box]
) -> None:
    moves = parts(source, target, dict.fromkeys((*source, *target), 0))
    in_rounds = rounds(moves)
    assert sorted(map(repr, itertools.chain(*in_rounds))) == sorted(map(repr, moves))
    for together in in_rounds:
        assert len({(part.shape, part.forwarded) for part in together}) == 1
        assert len({part.sender for part in together}) == len(together) == len({part.receiver for part in together})


@given(SHARDINGS, SHARDINGS, st.integers(1, 4))
def test_no_more_elements_cross_between_processes_than_have_to(
    source: Mapping[int, Box], target: Mapping[int, Box], per_process: int
) -> None:
    """Counted element by element: what the distinct target boxes of a process contain, and its source boxes do not."""
    owners = {d: d // per_process for d in (*source, *target)}
    bound = 0
    for process in {*owners.values()}:
        have = np.zeros(SHAPE, bool)
        for box in (box for d, box in source.items() if owners[d] == process):
            have[tuple(slice(*ends) for ends in box)] = True
        for box in {box for d, box in target.items() if owners[d] == process}:
            bound += int((~have)[tuple(slice(*ends) for ends in box)].sum())
    assert crossing(parts(source, target, owners), owners) == bound == least(source, target, owners)


def test_a_receiver_takes_what_it_holds_then_what_its_process_holds() -> None:
    whole: Box = ((0, 4),)
    assert parts({0: whole, 1: whole}, {1: whole}, {0: 0, 1: 1}) == (Part(1, 1, whole),)
    assert parts({0: whole, 1: whole}, {2: whole}, {0: 0, 1: 1, 2: 1}) == (Part(1, 2, whole),)


def test_copies_double_in_every_round() -> None:
    whole: Box = ((0, 4),)
    in_rounds = rounds(parts({0: whole}, dict.fromkeys(range(1, 9), whole), dict.fromkeys(range(9), 0)))
    assert [len(together) for together in in_rounds] == [1, 1, 2, 4]
    assert len(in_rounds) == 1 + math.ceil(math.log2(8))


def test_an_array_without_elements_needs_no_part() -> None:
    empty: Box = ((0, 0),)
    assert parts({0: empty}, {1: empty, 2: empty}, {0: 0, 1: 1, 2: 1}) == ()


def test_a_scalar_is_one_part() -> None:
    assert parts({0: ()}, {1: ()}, {0: 0, 1: 1}) == (Part(0, 1, ()),)
