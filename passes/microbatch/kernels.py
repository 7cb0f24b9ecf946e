"""Pallas kernels on blocks of the batch: the entry of the table that is derived from the kernel itself.

A grid axis whose runs are independent (`autopar.rules.pallas`) may run in parts. It has n points, and in every operand
and result that it counts there is a dimension of n blocks of b elements, with a b of their own. Viewed as
(outer, m, inner), as a split dimension is, such a dimension falls into microbatches of whole blocks if

    n is a multiple of outer m,    so that    inner = (n / (outer m)) b

and microbatch k then has the same points of the axis in all operands and results, in the same order.

    operands      those that the axis counts are split along the dimension that it counts; invariant ones are sliced.
                  All others are invariant
    results       split along the dimension that the axis counts; each has one
    parameters    the axis has n / m points; blocks, index maps and the body stay

No operand may be partial, since nothing is known of what the body computes. Everything else is refused with a reason
that names the grid axis                                                                                     -> refusal
"""

from __future__ import annotations

from autopar.passes.microbatch.rule_types import Operands, RuleResult
from autopar.passes.microbatch.states import INVARIANT, Invariant, Partial, Split, State, local_shape
from autopar.rules import pallas


def kernel(operands: Operands) -> RuleResult | None:
    """A kernel whose split operands are cut along one grid axis of independent runs."""
    axis = _grid_axis(operands)
    if isinstance(axis, str):
        return None
    states, count = operands.states, operands.count
    outer = next(state.outer for state in states if isinstance(state, Split))
    splits = [None if dim is None else Split(dim, outer) for dim in axis.dims]
    of_operands, of_results = splits[: len(states)], splits[len(states) :]
    if any(s != want for s, want in zip(states, of_operands, strict=True) if isinstance(s, Split)):
        return None
    results: list[State] = [split for split in of_results if split is not None]
    slices = {
        i: want
        for i, (state, want) in enumerate(zip(states, of_operands, strict=True))
        if want is not None and isinstance(state, Invariant)
    }
    parts = [local_shape(n, want or INVARIANT, count) for n, want in zip(operands.shapes, of_operands, strict=True)]
    shapes = [local_shape(n, state, count) for n, state in zip(operands.result_shapes, results, strict=True)]
    return RuleResult(tuple(results), slices, pallas.part_params(operands.params, parts, shapes))


def refusal(operands: Operands) -> str:
    """Why a kernel does not run on blocks in these states; "" if it does."""
    axis = _grid_axis(operands)
    if isinstance(axis, str):
        return axis
    return "" if kernel(operands) else "its operands are cut along different grid axes, or in different orders"


def _grid_axis(operands: Operands) -> pallas.GridAxis | str:
    """The grid axis along which the first split operand is cut, if its runs are independent; else why there is none."""
    states, count = operands.states, operands.count
    for i, state in enumerate(states):
        if isinstance(state, Partial):
            return f"operand {i} is a total over the batch"
    first, state = next((i, state) for i, state in enumerate(states) if isinstance(state, Split))
    axes = pallas.grid_axes(operands.params)
    number = next((g for g, axis in enumerate(axes) if axis.dims[first] == state.dim), None)
    if number is None:
        uncounted = f"no grid axis counts blocks of dimension {state.dim} of operand {first}"
        return f"{uncounted}; {pallas.obstacles(operands.params)}" if any(axis.obstacle for axis in axes) else uncounted
    axis = axes[number]
    if axis.obstacle:
        return f"grid axis {number}: {axis.obstacle}"
    if axis.size % (state.outer * count):
        strided = f" in each of {state.outer} parts" if state.outer > 1 else ""
        return f"grid axis {number}: its {axis.size} blocks do not divide into {count} microbatches{strided}"
    return axis
