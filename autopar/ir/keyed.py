"""Values collected by key, the keys in the order in which they first occur."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Key -> its values, in order."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def totals(pairs: Iterable[tuple[K, float]]) -> dict[K, float]:
    """Key -> the sum of its amounts, added in order."""
    sums: dict[K, float] = {}
    for key, amount in pairs:
        sums[key] = sums.get(key, 0.0) + amount
    return sums
