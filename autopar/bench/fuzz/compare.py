"""Are two results of a step equal? Integers and booleans exactly, floats to 1e-9 of a leaf's largest magnitude.

nan equals nan, and an infinity itself. A leaf that differs may be one that has no digits to agree in: a sign, a rank, a
rounding of what is only just on one side. Such a leaf is known by the plain step alone: it differs by as much, to a
factor, when its float arguments change by a few units in the last place, or when it runs operation by operation
                                                                                    -> Noise
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from autopar.verification.differences import absolute, is_inexact, magnitude

TOLERANCE = 1e-9
#: A difference counts as noise up to so many times what the plain step differs from itself by.
TIMES_NOISE = 100.0
PERTURBED = 4
#: Relative changes of float64 arguments: some tens of units in the last place.
EPSILON = 2.0**-47
WIDE = ("float64", "complex128")


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


def noise(plain: Callable[..., Any], jaxpr: Any, arguments: Sequence[Any]) -> Noise:
    """Noise of a step: of its jitted form on arguments that hardly differ, and of its operations one by one."""
    first = jax.tree.leaves(plain(*arguments))
    noise_of_leaf = [0.0] * len(first)
    for seed in range(PERTURBED):
        moved = perturbed(arguments, np.random.default_rng(seed))
        noise_of_leaf = list(map(max, noise_of_leaf, differences(jax.tree.leaves(plain(*moved)), first)))
    one_by_one = jaxpr_as_fun(jaxpr)(*map(jnp.asarray, jax.tree.leaves(arguments)))
    noise_of_leaf = list(map(max, noise_of_leaf, differences(one_by_one, first)))
    return Noise(tuple(noise_of_leaf))


def perturbed(arguments: Any, rng: np.random.Generator) -> Any:
    """Arguments whose float64 are changed in their last places."""

    def moved(x: Any) -> Any:
        if not isinstance(x, np.ndarray | np.floating) or np.asarray(x).dtype.name not in WIDE:
            return x
        return x * (1 + EPSILON * rng.uniform(-1, 1, np.shape(x)))

    return jax.tree.map(moved, arguments)


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
