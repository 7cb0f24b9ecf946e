"""Are two results of a step equal? Integers and booleans exactly, floats to 1e-9 of a leaf's largest magnitude.

nan equals nan, and an infinity itself. A leaf that differs may be one that has no digits to agree in: a sign, a rank, a
rounding of what is only just on one side, a sum of terms that cancel. Such a leaf is known by the plain step alone: it
differs by as much, to a factor, when its float arguments change by a few units in the last place, when it runs
operation by operation, or when each operation's result changes by one besides (Monte Carlo arithmetic, Parker 1997)
                                                                                    -> Noise
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from autopar import jax_compat
from autopar.verification.differences import absolute, is_inexact, magnitude

TOLERANCE = 1e-9
#: A difference counts as noise up to so many times what the plain step differs from itself by.
TIMES_NOISE = 100.0
PERTURBED = 4
#: Relative changes of float64 arguments: some tens of units in the last place.
EPSILON = 2.0**-47
#: A unit in the last place of a float64, relative.
ULP = 2.0**-52
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
    """Noise of a step: of its jitted form on arguments that hardly differ, and of its operations one by one, exact and
    with results that hardly differ."""
    first = jax.tree.leaves(plain(*arguments))
    runs = [plain(*perturbed(arguments, np.random.default_rng(seed))) for seed in range(PERTURBED)]
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(arguments)]
    runs += [_one_by_one(jaxpr, leaves, lambda x: x)]
    for seed in range(PERTURBED):
        rng = np.random.default_rng(seed)
        runs += [_one_by_one(jaxpr, leaves, lambda x, rng=rng: _rounded(x, rng))]
    return Noise(tuple(map(max, zip(*(differences(jax.tree.leaves(results), first) for results in runs), strict=True))))


def _one_by_one(closed: Any, arguments: Sequence[Any], rounded: Callable[[Any], Any]) -> list[Any]:
    """Results of a jaxpr whose operations run one by one, `rounded` applied to the result of each."""
    jaxpr = closed.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arguments), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        results = jax_compat.bind(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, map(rounded, results), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _rounded(x: Any, rng: np.random.Generator) -> Any:
    """A wide float, changed by up to a unit in the last place; whole numbers stay, since they are exact as a rule."""
    if str(x.dtype) not in WIDE:
        return x
    exact = np.asarray(x)
    return jnp.asarray(np.where(exact == np.round(exact), exact, _changed(exact, ULP, rng)))


def _changed(x: Any, most: float, rng: np.random.Generator) -> Any:
    """Numbers changed at random, by at most this share of each."""
    return x * (1 + most * rng.uniform(-1, 1, np.shape(x)))


def perturbed(arguments: Any, rng: np.random.Generator) -> Any:
    """Arguments whose float64 are changed in their last places."""

    def moved(x: Any) -> Any:
        if not isinstance(x, np.ndarray | np.floating) or np.asarray(x).dtype.name not in WIDE:
            return x
        return _changed(x, EPSILON, rng)

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
