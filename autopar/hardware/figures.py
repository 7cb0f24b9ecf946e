"""Validation of the figures of links, devices and clusters: a table with a rule per field, and `check` of a record."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from autopar.errors import ClusterError

#: The rule for the value of a field, in words and as a predicate.
FieldRule = tuple[str, Callable[[Any], bool]]


def check(what: str, record: Any, rules: Mapping[str, FieldRule]) -> None:
    """ClusterError naming the first field of a record whose value breaks its rule."""
    check_values(what, {name: getattr(record, name) for name in rules}, rules)


def check_values(what: str, values: Mapping[str, Any], rules: Mapping[str, FieldRule]) -> None:
    """ClusterError naming the first of the values that breaks its rule."""
    for name, value in values.items():
        requirement, is_valid = rules[name]
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
    return (
        isinstance(value, Mapping) and bool(value) and all(map(is_name, value)) and all(map(is_speed, value.values()))
    )


def is_memory(value: Any) -> bool:
    """Bytes of memory; a number below `LEAST_MEMORY` is in another unit."""
    return is_figure(value) and value >= LEAST_MEMORY


def is_speed(value: Any) -> bool:
    """Bytes or FLOPs per second; a number below `LEAST_SPEED` is in another unit."""
    return is_figure(value) and value >= LEAST_SPEED


def is_at_most(limit: float) -> Callable[[Any], bool]:
    """A predicate: a number from 0 to `limit`."""
    return lambda value: is_figure(value) and value <= limit


#: Figures beyond these are in another unit: no device has less memory than 1 kB, and GB, GB/s and TFLOP/s of any are
#: less than these numbers.
LEAST_MEMORY = 1000  # bytes
LEAST_SPEED = 1e5  # bytes/s or FLOP/s
MOST_BETA = 1.0  # s/byte
MOST_ALPHA = 1.0  # s

NAME: FieldRule = ("text", is_name)
FLAG: FieldRule = ("True or False", is_flag)
FIGURE: FieldRule = ("a number of 0 or more", is_figure)
RATE: FieldRule = ("a number above 0", is_rate)
SHARE: FieldRule = ("a number from 0 to 1", is_share)
COUNT: FieldRule = ("an integer of 1 or more", is_count)
MEMORY: FieldRule = (f"a number of bytes, {LEAST_MEMORY} or more, such as 16e9 for 16 GB", is_memory)
BANDWIDTH: FieldRule = (f"a number of bytes/s, {LEAST_SPEED:g} or more, such as 800e9 for 800 GB/s", is_speed)
OPTIONAL_BANDWIDTH: FieldRule = (
    f"0 or a number of bytes/s, {LEAST_SPEED:g} or more, such as 15e9 for 15 GB/s",
    lambda value: is_speed(value) or (is_figure(value) and value == 0),
)
BETA: FieldRule = (f"a number of s/byte from 0 to {MOST_BETA:g}, such as 1 / 50e9 for 50 GB/s", is_at_most(MOST_BETA))
ALPHA: FieldRule = (f"a number of seconds from 0 to {MOST_ALPHA:g}, such as 5e-6 for 5 us", is_at_most(MOST_ALPHA))

#: Key of a link in a file -> the rule for its value.
LINK: Mapping[str, FieldRule] = MappingProxyType(
    {
        "alpha": ALPHA,
        **dict.fromkeys(("beta", "pair"), BETA),
        **dict.fromkeys(("bandwidth", "pair_bandwidth"), BANDWIDTH),
    }
)
