"""Disjoint sets: a partition of numbers whose parts are united step by step."""

from __future__ import annotations

from collections.abc import Iterable


class DisjointSets:
    """Numbers, each in a set of its own until sets are united; a set is known by one of its members."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._parent = {number: number for number in numbers}

    def __getitem__(self, number: int) -> int:
        """The member by which the set of a number is known."""
        root = number
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[number] != root:
            self._parent[number], number = root, self._parent[number]
        return root

    def union(self, first: int, *numbers: int) -> None:
        """Unite the set of the first number with those of the further numbers."""
        root = self[first]
        for number in numbers:
            self._parent[self[number]] = root
