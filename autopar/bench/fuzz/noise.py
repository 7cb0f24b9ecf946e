"""By how much a step differs from itself: what no parallel step can be asked to match.

A result may have no digits to agree in: a sign, a rank, a rounding of what is only just on one side, a sum of terms
that cancel. The plain step alone shows such a leaf. It differs by as much, to a factor, when its float arguments change
by a few units in the last place, when it runs operation by operation, or when each operation's result changes by one
unit besides (Monte Carlo arithmetic, Parker 1997). Bodies of loops, branches and calls run operation by operation too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.bench.fuzz.compare import Noise, differences
from autopar.ir.jaxpr.one_by_one import OneByOne

PERTURBED = 4
#: Relative changes of float64 arguments: some tens of units in the last place.
EPSILON = 2.0**-47
#: A unit in the last place of a float64, relative.
ULP = 2.0**-52
#: Whole numbers up to here are exact in a float64.
EXACT = 2.0**53
WIDE = ("float64", "complex128")

Changed = Callable[[Any], Any]


def noise(plain: Callable[..., Any], jaxpr: Any, arguments: Sequence[Any]) -> Noise:
    """Noise of a step: of its jitted form on arguments that hardly differ, and of its operations one by one, exact and
    with results that hardly differ."""
    first = jax.tree.leaves(plain(*arguments))
    runs = [plain(*perturbed(arguments, np.random.default_rng(seed))) for seed in range(PERTURBED)]
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(arguments)]
    runs += [one_by_one(jaxpr, leaves, lambda x: x)]
    for seed in range(PERTURBED):
        rng = np.random.default_rng(seed)
        runs += [one_by_one(jaxpr, leaves, lambda x, rng=rng: _rounded(x, rng))]
    return Noise(tuple(map(max, zip(*(differences(jax.tree.leaves(results), first) for results in runs), strict=True))))


@dataclass(eq=False)
class _Changed(OneByOne):
    """An evaluation in which each result is changed."""

    changed: Changed = lambda x: x

    def ran(self, equation: Any, operands: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        return [self.changed(x) for x in results]


def one_by_one(closed: Any, operands: Sequence[Any], changed: Changed) -> list[Any]:
    """Results of a jaxpr, open or closed, whose operations run one by one, `changed` applied to the result of each."""
    return _Changed(changed=changed).evaluate(closed, operands)


def _rounded(x: Any, rng: np.random.Generator) -> Any:
    """A wide float, changed by up to a unit in the last place; whole numbers that a float64 has exactly stay."""
    if str(x.dtype) not in WIDE:
        return x
    exact = np.asarray(x)
    whole = (exact == np.round(exact)) & (np.abs(exact) < EXACT)
    return jnp.asarray(np.where(whole, exact, _moved(exact, ULP, rng)))


def _moved(x: Any, most: float, rng: np.random.Generator) -> Any:
    """Numbers changed at random, by at most this share of each."""
    return x * (1 + most * rng.uniform(-1, 1, np.shape(x)))


def perturbed(arguments: Any, rng: np.random.Generator) -> Any:
    """Arguments whose float64 are changed in their last places."""

    def moved(x: Any) -> Any:
        if not isinstance(x, np.ndarray | np.floating) or np.asarray(x).dtype.name not in WIDE:
            return x
        return _moved(x, EPSILON, rng)

    return jax.tree.map(moved, arguments)
