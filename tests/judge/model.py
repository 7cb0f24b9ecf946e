"""What the judge knows of a program: decisions, what they cost alone and in pairs, and the cheapest assignment.

    seconds(choice) = sum_d seconds_d[choice_d] + sum_(u,v) table_uv[choice_u, choice_v]

    a plan      layouts of values, sites and copies; read back as the options that show them          -> Judge.read
    optimum     all assignments where there are few, else elimination of one decision after another   -> Judge.optimum

Elimination (Bertele and Brioschi, 1972, "Nonserial dynamic programming") is exact whatever the order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.layout import Layout
from autopar.plans.record import Stage

WHOLE, PARTIAL, ANY = -1, -2, -3
ENUMERATED = 2_000_000  # assignments up to which every one is priced
LARGEST = 30_000_000  # entries of the largest table that elimination may make

Factors = tuple[int, ...]


@dataclass(frozen=True)
class Option:
    """Per mesh axis: the factor cut while running, the one its results are cut along, and how its sum ends."""

    cut: Factors
    left: Factors
    ends: tuple[str, ...]


@dataclass(frozen=True)
class Decision:
    """What is chosen at one place of the program, with the seconds of each option."""

    name: str
    options: tuple[Option, ...]
    seconds: np.ndarray


@dataclass(frozen=True)
class Read:
    """A value wanted at a site; `factors` of the reader per dimension, seen while it runs or after it."""

    site: str
    value: int
    decision: int
    factors: Factors
    running: bool
    weight: float


@dataclass(frozen=True)
class Place:
    """Where a value's layout comes from; a view shows dimensions of the value behind it, or ANY."""

    decision: int
    behind: int
    factors: Factors
    view: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Judge:
    """A surveyed program: seconds(choice) = sum_d decisions[d].seconds[choice] + sum tables[u, v][choice]."""

    decisions: tuple[Decision, ...]
    tables: Mapping[tuple[int, int], np.ndarray]
    places: Mapping[int, Place]
    reads: tuple[Read, ...]
    copies: Mapping[int, int]

    def seconds(self, choice: Sequence[int]) -> float:
        """Seconds per step of one option per decision."""
        alone = sum(float(d.seconds[c]) for d, c in zip(self.decisions, choice, strict=True))
        return alone + sum(float(t[choice[u], choice[v]]) for (u, v), t in self.tables.items())

    def read(self, stage: Stage) -> list[int]:
        """The options that show a plan's layouts, the cheapest where several do."""
        shown: list[list[tuple[Factors, bool, Layout]]] = [[] for _ in self.decisions]
        for value, place in self.places.items():
            if place.view is None:
                shown[place.decision].append((place.factors, False, stage.values[value]))
        for read in self.reads:
            place = self.places.get(read.value)
            kept = stage.values[read.value] if place is not None and place.view is None else None
            if (layout := stage.uses.get(read.site, kept)) is not None:
                shown[read.decision].append((read.factors, read.running, layout))
        for value, decision in self.copies.items():
            copy = stage.copies.get(value, stage.values[value])
            shown[decision].append((tuple(range(len(self.places[value].factors))), False, copy))
        return [_showing(d, facts) for d, facts in zip(self.decisions, shown, strict=True)]

    def price(self, stage: Stage) -> float:
        """Seconds per step of a plan."""
        return self.seconds(self.read(stage))

    @property
    def assignments(self) -> float:
        return math.prod(float(len(d.options)) for d in self.decisions)

    def optimum(self) -> tuple[float, list[int], str]:
        """(seconds, choice, "enumerated" or "eliminated")."""
        if self.assignments <= ENUMERATED:
            return (*enumerated(self), "enumerated")
        return (*eliminated(self), "eliminated")


def _showing(decision: Decision, facts: Sequence[tuple[Factors, bool, Layout]]) -> int:
    fits = [
        (decision.seconds[i], i)
        for i, o in enumerate(decision.options)
        if all(shown(o.cut if running else o.left, factors) == layout for factors, running, layout in facts)
    ]
    if not fits:
        raise AssertionError(f"no option of {decision.name!r} shows {facts}")
    return min(fits)[1]


def shown(axes: Factors, factors: Factors) -> Layout:
    """Layout of a value whose dimensions are these factors, when the mesh axes cut those."""
    where = {f: dim for dim, f in enumerate(factors) if f >= 0}
    return tuple(f if f == PARTIAL else where.get(f, WHOLE) for f in axes)


# The cheapest assignment


def enumerated(judge: Judge) -> tuple[float, list[int]]:
    counts = [len(d.options) for d in judge.decisions]
    total = np.zeros(counts)
    for i, d in enumerate(judge.decisions):
        total = total + d.seconds.reshape([-1 if j == i else 1 for j in range(len(counts))])
    for (u, v), table in judge.tables.items():
        first, second = min(u, v), max(u, v)
        oriented = table if u < v else table.T
        total = total + oriented.reshape([counts[j] if j in (first, second) else 1 for j in range(len(counts))])
    best = int(total.argmin())
    return float(total.flat[best]), [int(i) for i in np.unravel_index(best, counts)]


def eliminated(judge: Judge) -> tuple[float, list[int]]:
    """Variable elimination: minimise over one decision given its neighbours, the one with the smallest table first."""
    counts = [len(d.options) for d in judge.decisions]
    pots: list[tuple[tuple[int, ...], np.ndarray]] = [((i,), d.seconds) for i, d in enumerate(judge.decisions)] + list(
        judge.tables.items()
    )
    order: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    left, total = set(range(len(counts))), 0.0
    while left:
        scopes = {i: sorted({j for scope, _ in pots if i in scope for j in scope} - {i}) for i in sorted(left)}
        pick = min(scopes, key=lambda i: (math.prod(counts[j] for j in scopes[i]) * counts[i], i))
        scope = (pick, *scopes[pick])
        if math.prod(counts[j] for j in scope) > LARGEST:
            raise MemoryError(f"eliminating {judge.decisions[pick].name!r} needs a table over {len(scope)} decisions")
        joint = np.zeros([counts[j] for j in scope])
        for s, table in [p for p in pots if pick in p[0]]:
            axes = np.argsort([scope.index(j) for j in s])
            joint = joint + table.transpose(axes).reshape([counts[j] if j in s else 1 for j in scope])
        pots = [p for p in pots if pick not in p[0]]
        order.append((pick, scope[1:], joint.argmin(0)))
        if len(scope) > 1:
            pots.append((scope[1:], joint.min(0)))
        else:
            total += float(joint.min())
        left.remove(pick)
    choice = [0] * len(counts)
    for pick, scope, best in reversed(order):
        choice[pick] = int(best[tuple(choice[j] for j in scope)])
    return total, choice
