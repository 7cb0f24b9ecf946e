"""The FLOPs of the products in a Pallas kernel, by the branches that it takes.

A kernel runs its body once for each point of a grid. A branch in it (`pl.when`) depends on the point in two ways that
are known when the step is traced: by `program_id`, and by scalars read from prefetched operands that are constants, as
the table of splash attention is that says which blocks of scores the mask leaves out. With such an index evaluated for
all points at once,

    FLOPs = sum over products in the body of 2 m n k |{points that take every branch around the product}|

A branch by anything else counts at every point, the dearest of several. A loop whose number of iterations is not a
constant counts once.

A scalar of the body is an array over the grid here, of extent 1 along each axis on which it does not depend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax.extend.core as jex
import numpy as np
from numpy.typing import NDArray

from autopar import jax_compat

DotDimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""((lhs contracted, rhs contracted), (lhs batch, rhs batch)), as in `jax.lax.dot_general`."""

#: Points for which branches are evaluated at most; a larger grid counts every branch. 32 MiB of indices.
MOST_POINTS = 2**22


def _quotient(x: Any, y: Any) -> Any:
    """Integers are divided towards zero."""
    whole = np.issubdtype(np.result_type(x, y), np.integer)
    return np.trunc(np.divide(x, y)) if whole else np.divide(x, y)


#: Primitive -> what it does with scalars, or arrays of them.
SCALAR: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
        "ge": np.greater_equal, "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative,
        "sign": np.sign,
        "div": _quotient, "rem": np.fmod, "max": np.maximum, "min": np.minimum,
        "and": np.bitwise_and, "or": np.bitwise_or, "not": np.bitwise_not, "convert_element_type": np.asarray,
        "select_n": lambda which, *cases: np.choose(np.asarray(which, np.int32), cases),
    }
)  # fmt: skip


def products(jaxpr: Any) -> float:
    """FLOPs of the products of a jaxpr that runs once; of several branches those of the dearest."""
    return _count(jaxpr, (), (), np.ones((), np.bool_))[0]


def kernel_products(params: Mapping[str, Any], operands: Sequence[Any] = ()) -> float:
    """FLOPs of the products of a kernel.

    Args:
        params: of the `pallas_call`.
        operands: the first ones, as arrays; None for one that is not known.
    """
    mapping = params["grid_mapping"]
    extents = [n if isinstance(n, int) else 1 for n in mapping.grid]
    grid = tuple(n for axis, n in enumerate(extents) if axis not in mapping.vmapped_dims)  # those the body can ask for
    prefetched = [None if a is None else np.asarray(a) for a in operands[: mapping.num_index_operands]]
    return math.prod(extents) * _count(params["jaxpr"], prefetched, grid, np.ones((1,) * len(grid), np.bool_))[0]


def with_estimate(equation: jex.JaxprEqn, operands: Sequence[Any]) -> jex.JaxprEqn:
    """The call of a kernel with the products of the branches taken as `cost_estimate`, if some are not always taken.

    XLA's scheduler reads it too, and takes a kernel without one for one without work. An estimate of the kernel's own
    that has fewer FLOPs stays; more are those of blocks that a mask leaves out. `operands` are those of
    `kernel_products`.
    """
    params = equation.params
    if params["grid_mapping"].num_dynamic_grid_bounds:
        return equation
    done, own = kernel_products(params, operands), params["cost_estimate"]
    if done == math.prod(params["grid_mapping"].grid) * products(params["jaxpr"]):
        return equation
    if own is not None:
        estimate = replace(own, flops=min(own.flops, round(done)))
        return equation.replace(params={**params, "cost_estimate": estimate})
    from jax.experimental import pallas  # takes 0.1 s to import, for which programs without kernels need not wait

    avals: list[Any] = [v.aval for v in (*equation.invars, *equation.outvars)]
    nbytes = sum(aval.size * aval.dtype.itemsize for aval in avals)
    estimate = pallas.CostEstimate(flops=round(done), bytes_accessed=nbytes, transcendentals=0)
    return equation.replace(params={**params, "cost_estimate": estimate})


def _count(
    jaxpr: Any, operands: Sequence[Any], grid: tuple[int, ...], runs: NDArray[np.bool_]
) -> tuple[float, list[Any]]:
    """FLOPs of the products of a jaxpr for one point of the grid, on average, and its results.

    Args:
        jaxpr: what runs.
        operands: the first ones: a scalar over the grid, a prefetched operand, or None for what is not known.
        grid: extents of the axes that the body can ask for.
        runs: at which points the jaxpr runs.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    values = {v: a for v, a in zip(jaxpr.invars, operands, strict=False) if a is not None}
    total = 0.0
    for equation in jaxpr.eqns:
        done, results = _count_equation(equation, values, grid, runs)
        total += done
        values.update({v: r for v, r in zip(equation.outvars, results, strict=False) if r is not None})
    return total, [_value(atom, values) for atom in jaxpr.outvars]


def _count_equation(
    equation: Any, values: Mapping[Any, Any], grid: tuple[int, ...], runs: NDArray[np.bool_]
) -> tuple[float, list[Any]]:
    name, params = equation.primitive.name, equation.params
    operands = [_value(atom, values) for atom in equation.invars]
    if name == "dot_general":
        lhs, rhs = (atom.aval.shape for atom in equation.invars[:2])
        return float(np.mean(runs)) * dot_flops(params["dimension_numbers"], lhs, rhs), []
    if name == "cond":
        return _count_branches(params["branches"], operands, grid, runs), []
    bodies = [params[key] for key in ("jaxpr", "call_jaxpr", "body_jaxpr") if hasattr(params.get(key), "eqns")]
    if bodies and name == "while":
        return _count(bodies[0], (), grid, runs)[0], []
    if bodies and name == "scan":
        return params["length"] * _count(bodies[0], operands[: jax_compat.scan_counts(params)[0]], grid, runs)[0], []
    if bodies:
        return _count(bodies[0], operands, grid, runs)
    return 0.0, [_scalar(equation, operands, values, grid)]


def _count_branches(
    branches: Sequence[Any], operands: Sequence[Any], grid: tuple[int, ...], runs: NDArray[np.bool_]
) -> float:
    index, *inner = operands
    if index is None:
        return max(_count(branch, inner, grid, runs)[0] for branch in branches)
    taken = np.clip(index, 0, len(branches) - 1)
    return sum(_count(branch, inner, grid, runs & (taken == i))[0] for i, branch in enumerate(branches))


def dot_flops(dimension_numbers: DotDimensionNumbers, lhs_shape: Sequence[int], rhs_shape: Sequence[int]) -> int:
    """Flops of a `dot_general` with these shapes."""
    (_, rhs_contracted), (_, rhs_batch) = dimension_numbers
    shared = {*rhs_contracted, *rhs_batch}
    return 2 * math.prod(lhs_shape) * math.prod(n for i, n in enumerate(rhs_shape) if i not in shared)


# Scalars over the grid


def _value(atom: Any, values: Mapping[Any, Any]) -> Any:
    """An atom's value, if it is known; an index may be a number by itself."""
    if isinstance(atom, jex.Literal):
        return np.asarray(atom.val) if np.ndim(atom.val) == 0 else None
    return np.asarray(atom) if isinstance(atom, int | np.integer) else values.get(atom)


def _scalar(equation: Any, operands: Sequence[Any], values: Mapping[Any, Any], grid: tuple[int, ...]) -> Any:
    """The result of an equation as a scalar over the grid; None if it is not known."""
    name, shape = equation.primitive.name, equation.outvars[0].aval.shape if equation.outvars else None
    if shape != ():
        return None
    axis = equation.params.get("axis", 0)
    if name in ("program_id", "num_programs") and axis < len(grid):
        extents = [1] * len(grid)
        extents[axis] = grid[axis]
        return np.arange(grid[axis]).reshape(extents) if name == "program_id" else np.asarray(grid[axis])
    if name == "get":
        return _read(equation, operands[0], values)
    if name not in SCALAR or any(a is None for a in operands):
        return None
    if math.prod(np.broadcast_shapes(*(a.shape for a in operands))) > MOST_POINTS:
        return None
    return np.asarray(SCALAR[name](*operands)).astype(equation.outvars[0].aval.dtype)


def _read(equation: Any, operand: Any, values: Mapping[Any, Any]) -> Any:
    """A scalar that is read from a prefetched operand."""
    places = jax_compat.element_read(equation)
    if operand is None or places is None:
        return None
    indices = [_value(index, values) for index in places]
    if any(index is None for index in indices):
        return None
    last = [np.clip(index, 0, n - 1) for index, n in zip(indices, operand.shape, strict=True)]
    return operand[tuple(last)]
