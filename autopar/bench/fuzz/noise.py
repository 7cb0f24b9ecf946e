"""By how much a step differs from itself: what no parallel step can be asked to match.

A result may have no digits to agree in: a sign, a rank, a rounding of what is only just on one side, a sum of terms
that cancel. The plain step alone shows such a leaf. It differs by as much, to a factor, when its float arguments change
by a few units in the last place, when it runs operation by operation, or when each operation's result changes by one
unit besides (Monte Carlo arithmetic, Parker 1997). Bodies of loops, branches and calls run operation by operation too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from autopar import jax_compat
from autopar.bench.fuzz.compare import Noise, differences

PERTURBED = 4
#: Relative changes of float64 arguments: some tens of units in the last place.
EPSILON = 2.0**-47
#: A unit in the last place of a float64, relative.
ULP = 2.0**-52
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


def one_by_one(closed: Any, operands: Sequence[Any], changed: Changed) -> list[Any]:
    """Results of a jaxpr, open or closed, whose operations run one by one, `changed` applied to the result of each."""
    jaxpr = getattr(closed, "jaxpr", closed)
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*getattr(closed, "consts", ()), *operands), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        run = _BODIES.get(equation.primitive.name, _operation)
        results = run(equation, [read(atom) for atom in equation.invars], changed)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _operation(equation: Any, operands: list[Any], changed: Changed) -> list[Any]:
    return [changed(x) for x in jax_compat.bind(equation, operands)]


def _call(parameter: str) -> Callable[[Any, list[Any], Changed], list[Any]]:
    return lambda equation, operands, changed: one_by_one(equation.params[parameter], operands, changed)


def _cond(equation: Any, operands: list[Any], changed: Changed) -> list[Any]:
    branches = equation.params["branches"]
    taken = min(max(int(operands[0]), 0), len(branches) - 1)
    return one_by_one(branches[taken], operands[1:], changed)


def _while(equation: Any, operands: list[Any], changed: Changed) -> list[Any]:
    params = equation.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carried = operands[second:]
    while np.any(goes_on := one_by_one(params["cond_jaxpr"], [*operands[:first], *carried], changed)[0]):
        after = one_by_one(params["body_jaxpr"], [*operands[first:second], *carried], changed)
        carried = [_where(goes_on, x, y) for x, y in zip(after, carried, strict=True)]
    return carried


def _where(goes_on: Any, after: Any, before: Any) -> Any:
    """A carried value after an iteration. Under `vmap` an example whose predicate is false keeps its value."""
    if not goes_on.ndim:
        return after
    return jnp.where(jnp.expand_dims(goes_on, [*range(goes_on.ndim, after.ndim)]), after, before)


def _scan(equation: Any, operands: list[Any], changed: Changed) -> list[Any]:
    params = equation.params
    first, second = params["num_consts"], params["num_consts"] + params["num_carry"]
    carried, steps = operands[first:second], [{} for _ in equation.outvars[params["num_carry"] :]]
    indices = range(params["length"])
    for i in reversed(indices) if params["reverse"] else indices:
        slices = [x[i] for x in operands[second:]]
        results = one_by_one(params["jaxpr"], [*operands[:first], *carried, *slices], changed)
        carried = results[: params["num_carry"]]
        for step, result in zip(steps, results[params["num_carry"] :], strict=True):
            step[i] = result
    stacked = [
        jnp.stack([step[i] for i in indices]) if step else jnp.zeros(out.aval.shape, out.aval.dtype)
        for step, out in zip(steps, equation.outvars[params["num_carry"] :], strict=True)
    ]
    return [*carried, *stacked]


#: Primitives with bodies; a primitive that is not here runs whole.
_BODIES: Mapping[str, Callable[[Any, list[Any], Changed], list[Any]]] = {
    "jit": _call("jaxpr"),
    "pjit": _call("jaxpr"),
    "closed_call": _call("call_jaxpr"),
    "custom_jvp_call": _call("call_jaxpr"),
    "custom_vjp_call": _call("call_jaxpr"),
    "remat2": _call("jaxpr"),
    "checkpoint": _call("jaxpr"),
    "cond": _cond,
    "while": _while,
    "scan": _scan,
}


def _rounded(x: Any, rng: np.random.Generator) -> Any:
    """A wide float, changed by up to a unit in the last place; whole numbers stay, since they are exact as a rule."""
    if str(x.dtype) not in WIDE:
        return x
    exact = np.asarray(x)
    return jnp.asarray(np.where(exact == np.round(exact), exact, _moved(exact, ULP, rng)))


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
