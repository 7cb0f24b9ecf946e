"""Start indices clamped and widened in the program, because XLA does not always do it.

Operations that read or write a window clamp its start so that the window is inside the operand (XLA's operation
semantics, DynamicSlice and Gather):

    start[k]  ->  min(max(start[k], 0), extent[k] - window[k])

XLA's simplifier and partitioner lose that clamp where one window is sliced from another, and where the window is
sharded (openxla/xla #49118, #49121, #49122). Indices of 8 or 16 bits abort the process ("Unsupported indices type",
0.10 and 0.12). A clamp that is part of the program is kept.

A scatter that drops what is out of range cannot be clamped. One of a single window is to XLA a slice, its update, and
a slice that is written back. The first is merged with a slice that the operand equals (jaxlib 0.10.2, not 0.12.0), so
that an update that should be dropped writes another row. A barrier between operand and scatter keeps the two separate.
                                                                                               -> barrier_before_scatter
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from autopar.ir.graph import Atom, Op
from autopar.ir.op_sets import SCATTERS

#: Size in bytes of the narrowest index type that the partitioner supports.
MIN_INDEX_BYTES = 4


def clamp_start_indices(op: Op, operands: Sequence[Any]) -> list[Any]:
    """Operands of an operation, with the start indices among them clamped and widened; all others unchanged."""
    transform = _STARTS.get(op.name)
    return list(operands) if transform is None else transform(op, operands)


def barrier_before_scatter(op: Op, operands: list[Any], made_by: Callable[[Atom], Op | None]) -> list[Any]:
    """Operands of an operation, the first one behind a barrier if the operation is a scatter into a computed value.

    The value need not be a window itself: XLA may find that it equals one. Arguments and filled arrays do not.

    Args:
        op: the operation.
        operands: their arrays.
        made_by: value -> the operation that computes it; None for arguments and constants.
    """
    maker = made_by(op.inputs[0]) if op.name in _SCATTERS else None
    while maker is not None and maker.name == "broadcast_in_dim":
        maker = made_by(maker.inputs[0])
    if maker is None:
        return operands
    return [jax.lax.optimization_barrier(operands[0]), *operands[1:]]


def _sliced(op: Op, operands: Sequence[Any]) -> list[Any]:
    whole, *starts = operands
    return [whole, *_clamped(starts, _extents(op, 0), op.params["slice_sizes"])]


def _updated(op: Op, operands: Sequence[Any]) -> list[Any]:
    whole, update, *starts = operands
    return [whole, update, *_clamped(starts, _extents(op, 0), _extents(op, 1))]


def _gathered(op: Op, operands: Sequence[Any]) -> list[Any]:
    """Clamps in CLIP mode only: the other modes fill out-of-range elements, or promise that there are none."""
    whole, starts = _widened(op, operands)
    if op.params["mode"] == GatherScatterMode.CLIP:
        extents, windows = _extents(op, 0), op.params["slice_sizes"]
        last = [extents[d] - windows[d] for d in op.params["dimension_numbers"].start_index_map]
        starts = _clip(starts, last[0] if len({*last}) == 1 else last)
    return [whole, starts]


def _widened(op: Op, operands: Sequence[Any]) -> list[Any]:
    whole, starts, *rest = operands
    return [whole, starts.astype("int32") if starts.dtype.itemsize < MIN_INDEX_BYTES else starts, *rest]


def _extents(op: Op, operand: int) -> tuple[int, ...]:
    """The shape of an operand in the traced program; the emitted array of a partial sum has more dimensions."""
    return op.equation.invars[operand].aval.shape


def _clamped(starts: Sequence[Any], extents: Sequence[int], windows: Sequence[int]) -> list[Any]:
    return [_clip(start, n - w) for start, n, w in zip(starts, extents, windows, strict=True)]


def _clip(starts: Any, last: int | Sequence[int]) -> Any:
    """Starts clamped to 0 .. `last`, or to the largest value of their type if that is smaller."""
    most = np.minimum(last, np.iinfo(starts.dtype).max).astype(starts.dtype)
    return jnp.clip(starts, np.zeros_like(most), most)


_SCATTERS = (*SCATTERS, "scatter-sub")
_STARTS: Mapping[str, Callable[[Op, Sequence[Any]], list[Any]]] = {
    "dynamic_slice": _sliced,
    "dynamic_update_slice": _updated,
    "gather": _gathered,
    **dict.fromkeys(_SCATTERS, _widened),
}
