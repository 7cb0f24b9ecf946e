"""By how much a step differs from itself: what no parallel step can be asked to match.

A result may have no digits to agree in: a sign, a rank, a rounding of what is only just on one side, a sum of terms
that cancel. The plain step alone shows such a leaf. It differs by as much, to a factor, when its float arguments change
by a few units in the last place, when it runs operation by operation, or when each operation's result changes by one
unit besides (Monte Carlo arithmetic, Parker 1997). Bodies of loops, branches and calls run operation by operation too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
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
#: A unit in the last place of floats, relative; whole numbers below 2 / unit are exact.
UNITS = MappingProxyType(
    dict.fromkeys(WIDE, 2.0**-52)
    | {"float32": 2.0**-23, "complex64": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
)

#: Sums, whose last digit depends on the order of their terms.
SUMS = ("reduce_sum", "dot_general", "cumsum", "scatter-add", "add", "add_any", "sub")

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
        exact = equation.primitive.name not in SUMS or all(map(_is_whole, operands))
        return [self.changed(x, exact) for x in results]


def one_by_one(closed: Any, operands: Sequence[Any], changed: Changed = lambda x, exact: x) -> list[Any]:
    """Results of a jaxpr, open or closed, whose operations run one by one, `changed` applied to the result of each.

    It also gets whether a result that is whole is so exactly: thirds may add up to a whole number, or nearly so in
    another order.
    """
    return _Changed(changed=changed).evaluate(closed, operands)


def _is_whole(x: Any) -> bool:
    """True unless an array holds a fraction."""
    array = np.asarray(x) if str(getattr(x, "dtype", "")) in UNITS else np.zeros(())
    return bool((array == np.round(array)).all())


def _rounded(x: Any, exact: bool, rng: np.random.Generator) -> Any:
    """A float, changed by up to a unit in the last place; whole numbers that are exact stay.

    So do narrower ones than float64 if they are exact: but for the order of sums, operations round them alike.
    """
    name = str(x.dtype)
    if name not in UNITS or (exact and name not in WIDE):
        return x
    values, unit = np.asarray(x), UNITS[name]
    whole = exact & (values == np.round(values)) & (np.abs(values) < 2 / unit)
    return jnp.asarray(np.where(whole, values, _moved(values, unit, rng)), x.dtype)


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
