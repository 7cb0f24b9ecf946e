"""Validation of the figures of links, devices and clusters: a table with a rule per field, and `check` of a record."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from autopar.errors import ClusterError

#: The rule for the value of a field, in words and as a predicate.
FieldRule = tuple[str, Callable[[Any], bool]]


def check(what: str, record: Any, rules: Mapping[str, FieldRule]) -> None:
    """ClusterError naming the first field of a record whose value breaks its rule."""
    for name, (requirement, is_valid) in rules.items():
        value = getattr(record, name)
        if not is_valid(value):
            raise ClusterError(f"{what}: {name}={value!r:.60} must be {requirement}.")


def is_figure(value: Any) -> bool:
    """A finite number of 0 or more."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return number and bool(0 <= value <= sys.float_info.max)


def is_rate(value: Any) -> bool:
    """A finite number above 0."""
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


def each(is_valid: Callable[[Any], bool], count: int | None = None) -> Callable[[Any], bool]:
    """A predicate: a tuple, of length `count` if that is given, whose entries are all valid."""
    return lambda value: isinstance(value, tuple) and count in (None, len(value)) and all(map(is_valid, value))


def is_rates(value: Any) -> bool:
    """A mapping from names to rates that is not empty."""
    return isinstance(value, Mapping) and bool(value) and all(map(is_name, value)) and all(map(is_rate, value.values()))


NAME: FieldRule = ("text", is_name)
FLAG: FieldRule = ("True or False", is_flag)
FIGURE: FieldRule = ("a number of 0 or more", is_figure)
RATE: FieldRule = ("a number above 0", is_rate)
SHARE: FieldRule = ("a number from 0 to 1", is_share)
