"""How much the suite tries: samples of its crossings, or with AUTOPAR_TESTS=all every case (`make exhaustive`).

A crossing, such as every model of the zoo under every schedule, has a sample in which each model and each schedule
occurs. A property of hypothesis is tried on a quarter of its examples; hypothesis draws other examples in every run. A
test that is marked exhaustive has a quicker one beside it with the same purpose.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

ALL = os.environ.get("AUTOPAR_TESTS") == "all"
SHARE = 4


def sample(cases: Iterable[T], kept: Sequence[T]) -> list[T]:
    """The kept cases, in the order of all of them; every case with AUTOPAR_TESTS=all."""
    every = list(cases)
    missing = [case for case in kept if case not in every]
    assert not missing, f"{missing} are no cases: {every}"
    return [case for case in every if ALL or case in kept]


def examples(number: int) -> int:
    """How many of so many examples of a property hypothesis tries."""
    return number if ALL else max(1, number // SHARE)
