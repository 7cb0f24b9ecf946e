"""What the figures of links, devices and clusters must be: a table with a row per field, and `check` of a record."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from autopar.errors import ClusterError

#: What a field must be, in words and as a predicate.
Row = tuple[str, Callable[[Any], bool]]


def check(what: str, record: Any, rows: Mapping[str, Row]) -> None:
    """ClusterError naming the first field of a record that is not what its row says."""
    for name, (wanted, holds) in rows.items():
        value = getattr(record, name)
        if not holds(value):
            raise ClusterError(f"{what}: {name}={value!r:.60} must be {wanted}.")


def is_figure(value: Any) -> bool:
    """A number of 0 or more, and no infinity."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return number and bool(0 <= value <= sys.float_info.max)


def is_rate(value: Any) -> bool:
    """A number above 0, and no infinity."""
    return is_figure(value) and value > 0


def is_share(value: Any) -> bool:
    """A number from 0 to 1."""
    return is_figure(value) and value <= 1


def is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """An integer of 1 or more."""
    return is_integer(value) and value >= 1


def is_name(value: Any) -> bool:
    return isinstance(value, str)


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def each(holds: Callable[[Any], bool], count: int | None = None) -> Callable[[Any], bool]:
    """Whether a value is a tuple, of `count` where that is given, whose entries all are so."""
    return lambda value: isinstance(value, tuple) and count in (None, len(value)) and all(map(holds, value))


def is_rates(value: Any) -> bool:
    """A mapping from names to rates that is not empty."""
    return isinstance(value, Mapping) and bool(value) and all(map(is_name, value)) and all(map(is_rate, value.values()))


NAME: Row = ("text", is_name)
FLAG: Row = ("True or False", is_flag)
FIGURE: Row = ("a number of 0 or more", is_figure)
RATE: Row = ("a number above 0", is_rate)
SHARE: Row = ("a number from 0 to 1", is_share)
