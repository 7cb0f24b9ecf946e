"""By how much a step differs from itself: what no parallel step can be asked to match.

A result may have no digits to agree in: a sign, a rank, a rounding of what is only just on one side, a sum of terms
that cancel. The plain step alone shows such a leaf. It differs by as much, to a factor, when its float arguments change
by a few units in the last place, when it runs operation by operation, or when each operation's result changes by one
unit besides (Monte Carlo arithmetic, Parker 1997). Bodies of loops, branches and calls run operation by operation too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.bench.fuzz.compare import Noise, differences
from autopar.ir.jaxpr.one_by_one import OneByOne

PERTURBED = 8
#: Relative changes of float64 arguments: some tens of units in the last place.
EPSILON = 2.0**-47
WIDE = ("float64", "complex128")

#: Sums, whose last digit depends on the order of their terms.
SUMS = ("reduce_sum", "dot_general", "cumsum", "scatter-add", "add", "add_any", "sub")
ELEMENTWISE_SUMS = ("add", "add_any", "sub")

Changed = Callable[[Any, bool], Any]


def noise(plain: Callable[..., Any], jaxpr: Any, arguments: Sequence[Any]) -> Noise:
    """Noise of a step: of its jitted form on arguments that hardly differ, and of its operations one by one, exact and
    with results that hardly differ."""
    first = jax.tree.leaves(plain(*arguments))
    runs = [plain(*perturbed(arguments, np.random.default_rng(seed))) for seed in range(PERTURBED)]
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(arguments)]
    runs += [one_by_one(jaxpr, leaves)]
    for seed in range(PERTURBED):
        rng = np.random.default_rng(seed)
        runs += [one_by_one(jaxpr, leaves, partial(_rounded, rng=rng))]
    return Noise(tuple(map(max, zip(*(differences(jax.tree.leaves(results), first) for results in runs), strict=True))))


@dataclass(eq=False)
class _Changed(OneByOne):
    """An evaluation in which each result is changed."""

    changed: Changed = lambda x, exact: x

    def ran(self, equation: Any, operands: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        return [self.changed(x, name not in SUMS or _adds_exactly(name, operands, x.dtype)) for x in results]


def one_by_one(closed: Any, operands: Sequence[Any], changed: Changed = lambda x, exact: x) -> list[Any]:
    """Results of a jaxpr, open or closed, whose operations run one by one, `changed` applied to the result of each.

    It also gets whether a result that is whole is so exactly: thirds may add up to a whole number, or nearly so in
    another order.
    """
    return _Changed(changed=changed).evaluate(closed, operands)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", np.bool_), np.inexact)


def _widened(x: Any) -> Any:
    """A float as a NumPy array of 64 bits per number."""
    return np.asarray(x).astype(np.complex128 if jnp.issubdtype(x.dtype, np.complexfloating) else np.float64)


def _exact_below(dtype: Any) -> float:
    """Whole numbers below this are exact: two over a unit in the last place."""
    return 2 / float(jnp.finfo(dtype).eps)


def _adds_exactly(name: str, operands: Sequence[Any], dtype: Any) -> bool:
    """Whether a sum of floats is exact in any order: its terms are whole, and no partial sum can be rounded."""
    floats = [_widened(x) for x in operands if _is_float(x)]
    if not floats or not all((x == np.round(x)).all() for x in floats):
        return not floats
    if name in ELEMENTWISE_SUMS:
        return sum(np.abs(x).max(initial=0) for x in floats) < _exact_below(dtype)
    totals = [np.abs(x).sum() for x in floats]
    return (math.prod(totals) if name == "dot_general" else sum(totals)) < _exact_below(dtype)


def _rounded(x: Any, exact: bool, rng: np.random.Generator) -> Any:
    """A float, changed by up to a unit in the last place; whole numbers that are exact stay.

    So do narrower ones than float64 if they are exact: but for the order of sums, operations round them alike.
    """
    if not _is_float(x) or (exact and str(x.dtype) not in WIDE):
        return x
    values = _widened(x)
    whole = exact & (values == np.round(values)) & (np.abs(values) < _exact_below(x.dtype))
    moved = _moved(values, float(jnp.finfo(x.dtype).eps), rng)
    return jnp.asarray(np.where(whole, values, moved).astype(x.dtype))


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
