"""Are two results of a step equal? Integers and booleans exactly, floats to 1e-9 of a leaf's largest magnitude.

nan equals nan, and an infinity itself. A leaf that differs may be one that has no digits to agree in; the plain step
alone tells (`noise`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.verification.differences import absolute, is_inexact, magnitude

TOLERANCE = 1e-9
#: A difference counts as noise up to so many times what the plain step differs from itself by.
TIMES_NOISE = 100.0


def difference(ours: Any, theirs: Any) -> float:
    """Largest difference over the largest finite magnitude; infinite where types or integers differ."""
    distance = absolute(ours, theirs) if ours.dtype == theirs.dtype else np.inf
    if not is_inexact(theirs):
        return np.inf if distance else 0.0
    return distance / (magnitude(theirs) or 1.0)


def differences(ours: Sequence[Any], theirs: Sequence[Any]) -> list[float]:
    """That of every leaf."""
    return [difference(x, y) for x, y in zip(ours, theirs, strict=True)]


@dataclass(frozen=True, eq=False)
class Noise:
    """By how much each leaf of the plain step differs from itself."""

    leaves: tuple[float, ...]

    def explains(self, leaf: int, difference: float) -> bool:
        """Whether a difference is no more than noise."""
        return difference <= TIMES_NOISE * self.leaves[leaf]


def unequal(
    paths: Sequence[str], ours: Sequence[Any], theirs: Sequence[Any], noisy: Callable[[], Noise]
) -> Mapping[str, float]:
    """Paths of the leaves that differ -> by how much; `noisy` is asked only where some do."""
    leaf_differences = differences(ours, theirs)
    bad = [i for i, d in enumerate(leaf_differences) if not d <= TOLERANCE]
    if not bad:
        return {}
    step_noise = noisy()
    return {paths[i]: leaf_differences[i] for i in bad if not step_noise.explains(i, leaf_differences[i])}
