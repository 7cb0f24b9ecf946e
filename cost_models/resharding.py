"""Seconds to bring a value from one layout to another, for whole tables of layouts at once.

The recipe (`autopar.ir.layout.steps`) depends only on the pattern of the two layouts: which axes share a dimension,
which are replicated, which hold partial sums. Pairs are therefore renamed by first appearance,

    (s, t) = ((2, 0), (0, -1))  ->  (0, 1, 1, -1)                                             -> _patterns

each pattern is priced once as a sum of collectives, each the minimum of a few lines in the bytes,

    time(pattern, b) = sum_steps min_k (alpha_k + beta_k fraction_step b)                     -> _recipe

and a table for any value is one gather from that (`Resharding.table`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.collectives import linear_coefficients
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.layout import PARTIAL, Layout, Step, steps

Layouts = NDArray[np.int8]
"""Shape (number of layouts, mesh axes)."""

_Lines = tuple[tuple[float, float], ...]
"""Lines (s, s/byte of the whole value) whose minimum is the time of one step."""

_Recipe = tuple[_Lines, ...]

NO_WAY: _Recipe = (((float("inf"), 0.0),),)

#: Seconds charged for cutting a local piece out of a replicated value: next to nothing, but not less than not doing it.
SLICE_SECONDS = 1e-8


def step_lines(step: Step, mesh: LogicalMesh) -> _Lines:
    """(s, s/byte of the whole value) lines whose minimum is the time of one step."""
    if step.kind == "slice":
        return ((SLICE_SECONDS, 0.0),)
    return tuple((a, b * step.fraction) for a, b in linear_coefficients(step.kind, step.axes, mesh))


def reshard_time(source: Layout, target: Layout, nbytes: float, mesh: LogicalMesh) -> float:
    """Seconds to bring a value of `nbytes` (whole) from `source` to `target`; inf if there is no way."""
    recipe = steps(source, target, mesh.sizes)
    if recipe is None:
        return float("inf")
    return sum(min(a + b * nbytes for a, b in step_lines(step, mesh)) for step in recipe)


@dataclass(frozen=True, slots=True)
class _Priced:
    """Lines of the distinct patterns of one pair of layout lists, and which pair has which pattern."""

    alpha: NDArray[np.float64]
    beta: NDArray[np.float64]
    pattern: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Resharding:
    """Reshard tables of one mesh; remembers what it priced."""

    mesh: LogicalMesh
    _priced: dict[tuple[bytes, bytes], _Priced] = field(default_factory=dict, repr=False)
    _known: dict[tuple[int, ...], _Recipe] = field(default_factory=dict, repr=False)
    _lines: dict[Step, _Lines] = field(default_factory=dict, repr=False)

    def table(self, sources: Layouts, targets: Layouts, nbytes: float) -> NDArray[np.float64]:
        """Seconds from each source (rows) to each target (columns) for a value of `nbytes` (whole)."""
        key = (sources.tobytes(), targets.tobytes())
        priced = self._priced.get(key)
        if priced is None:
            priced = self._priced[key] = self._price(sources, targets)
        times = (priced.alpha + priced.beta * nbytes).min(-1).sum(-1)
        return times[priced.pattern]

    def _price(self, sources: Layouts, targets: Layouts) -> _Priced:
        names, pattern = _distinct(_patterns(sources, targets))
        lines = [self._recipe(tuple(row)) for row in names.tolist()]
        steps_, choices = max(map(len, lines)), max((len(s) for line in lines for s in line), default=1)
        alpha = np.zeros((len(lines), max(steps_, 1), choices))
        beta = np.zeros_like(alpha)
        for i, recipe in enumerate(lines):
            for j, step in enumerate(recipe):
                padded = step + (step[-1],) * (choices - len(step))
                alpha[i, j], beta[i, j] = zip(*padded, strict=True)
        return _Priced(alpha, beta, pattern.reshape(len(sources), len(targets)))

    def _recipe(self, pattern: tuple[int, ...]) -> _Recipe:
        """The lines of each step from one layout to another, which one pattern names after the other."""
        lines = self._known.get(pattern)
        if lines is None:
            axes = len(self.mesh.sizes)
            recipe = steps(pattern[:axes], pattern[axes:], self.mesh.sizes)
            lines = self._known[pattern] = NO_WAY if recipe is None else tuple(map(self._of_step, recipe))
        return lines

    def _of_step(self, step: Step) -> _Lines:
        if step not in self._lines:
            self._lines[step] = step_lines(step, self.mesh)
        return self._lines[step]


@lru_cache(maxsize=4)  # several problems are built for a mesh, each with nearly the same layouts
def resharding_on(mesh: LogicalMesh) -> Resharding:
    """The reshard tables of a mesh, which remember what they priced for earlier problems."""
    return Resharding(mesh)


def _distinct(rows: NDArray[np.int8]) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """The distinct rows, and which of them each row is; read as numbers as long as 64 bits hold them."""
    digits = rows.shape[1]
    base = digits + 2  # PARTIAL, REPLICATED, and at most as many dimensions as digits
    if base**digits >= 2**63:
        names, pattern = np.unique(rows, axis=0, return_inverse=True)
        return names, pattern.ravel()
    numbers = (rows.astype(np.int64) - PARTIAL) @ base ** np.arange(digits, dtype=np.int64)[::-1]
    _, first, pattern = np.unique(numbers, return_index=True, return_inverse=True)
    return rows[first], pattern.ravel()


def _patterns(sources: Layouts, targets: Layouts) -> NDArray[np.int8]:
    """Every pair of layouts with its dimensions renamed by first appearance; shape (n * m, 2 * axes)."""
    n, m = len(sources), len(targets)
    rows = np.concatenate([np.repeat(sources, m, 0), np.tile(targets, (n, 1))], 1)
    names = rows.copy()
    fresh = np.zeros(len(rows), np.int8)
    for i in range(rows.shape[1]):
        column = rows[:, i]
        unnamed = column >= 0
        for j in range(i):
            same = unnamed & (rows[:, j] == column)
            names[same, i] = names[same, j]
            unnamed &= ~same
        names[unnamed, i] = fresh[unnamed]
        fresh[unnamed] += 1
    return names
