"""How libtpu lowers planned collectives: known, measured conversions, one function each.

    what only products of default precision read travels as bfloat16                -> narrow_types
    equal reductions are merged                                                     -> merge_equal_reductions
    a sum over several axes that all cut one dimension of it is scattered           -> scatter_joint_sums
    small reductions are not scattered                                              -> replace_small_reduce_scatters
    a vector is not gathered but summed: each device's piece in a buffer of zeros   -> replace_small_gathers

Measurements: docs/decisions/verification.md. Deviations that cannot be predicted:
`autopar.verification.exceptions`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.cost_models.precision import rounded, rounds
from autopar.ir.collective import Collective
from autopar.ir.control_flow import entries
from autopar.ir.graph import Op
from autopar.ir.layout import PARTIAL, local_shape
from autopar.ir.op_sets import REORDERINGS, RESHAPES, SLICES
from autopar.verification.dataflow import Context, Transfer

#: TPU keeps arrays of 32-bit elements in tiles of 8 x 128 (XLA's documentation, "Tiled layout").
TILE_ROWS, TILE_COLUMNS = 8, 128

#: Operations through which XLA moves a conversion of their first operand's type.
REARRANGING = (*RESHAPES, *REORDERINGS, *SLICES, "copy", "gather")

Collectives = Sequence[Collective]


def narrow_types(planned: Collectives, context: Context) -> tuple[Collective, ...]:
    """Default precision rounds float32 operands of products to bfloat16, and libtpu rounds before it communicates.

    The same holds for values that are only read converted to a narrower type, through transposes and reshapes, and for
    the all-reduce of a dot's result, but not for its reduce-scatter.
    """
    return tuple(
        c
        if c.kind == "reduce-scatter"
        else replace(c, bytes=_narrowed_bytes(c, _transfer_of(c, planned[i + 1 :], context), context))
        for i, c in enumerate(planned)
    )


def _narrowed_bytes(c: Collective, transfer: Transfer | None, context: Context) -> int:
    if transfer is None:
        return c.bytes
    itemsize = context.graph.types[transfer.value].itemsize
    return c.bytes * _width(transfer, context) // itemsize


def _width(transfer: Transfer, context: Context) -> int:
    """Bytes per element that the readers of a transfer need."""
    needs = (_needed_width(op, transfer.value, context) for op in transfer.readers)
    return max(needs, default=context.graph.types[transfer.value].itemsize)


def _needed_width(op: Op | None, value: int, context: Context) -> int:
    """Bytes per element of a value that one reader needs."""
    type_ = context.graph.types[value]
    if op is None:
        return type_.itemsize
    if rounds(op, type_):
        return rounded(type_).itemsize
    if op.name == "convert_element_type":
        to = context.graph.types[op.outputs[0]]
        return min(type_.itemsize, to.itemsize) if "float" in to.dtype else type_.itemsize
    if op.name in REARRANGING and op.inputs[0] == value:
        return min(type_.itemsize, _width(context.all_readers(op.outputs[0]), context))
    inside = [e for e in entries(op) if e.operand == value]
    # the body of a loop writes its carries too; for a while loop all operands count as such
    if not inside or op.name == "while" or any(e.kind == "carry" for e in inside):
        return type_.itemsize
    return max(_width(context.all_readers(e.value), context) for e in inside)


def _transfer_of(c: Collective, later: Collectives, context: Context) -> Transfer | None:
    """What a collective transfers and for which readers; None if its tag does not tell.

    Args:
        c: a planned collective.
        later: the collectives that are planned after it.
        context: the program.
    """
    op = context.reduced_op(c)
    if op is not None:
        return context.all_readers(op.outputs[0]) if op.name == "dot_general" else None
    stage, value = context.plan.stages[0], context.values.get(c.op, -1)
    if value not in stage.values:
        return None
    wanted, stored, copy = context.read(value, c.op), stage.values[value], stage.copies.get(value)
    places = [(use.op, context.read(value, use.site)) for use in context.graph.uses[value]]
    # to the copy that readers share
    if copy is not None and sum(other.op == c.op for other in later) >= context.num_collectives(copy, wanted):
        return context.transfer(value, copy, (op for op, layout in places if layout != stored))
    return context.transfer(value, wanted, (op for op, layout in places if layout == wanted))


def merge_equal_reductions(planned: Collectives, context: Context) -> tuple[Collective, ...]:
    """libtpu reduces once what two operations compute equally, such as the gradients of two biases of one sum."""
    return tuple(c for c in planned if (op := context.reduced_op(c)) is None or op.index not in context.duplicates)


def scatter_joint_sums(planned: Collectives, context: Context) -> tuple[Collective, ...]:
    """libtpu makes one reduce-scatter of an all-reduce over several axes and the slices along them.

    So it is for accumulated gradients that are read in parts of one dimension. Pieces below a tile are left.
    """
    return tuple(replace(c, kind="reduce-scatter") if _ends_in_pieces(c, context) else c for c in planned)


def _ends_in_pieces(c: Collective, context: Context) -> bool:
    value = context.values.get(c.op, -1)
    layouts = context.plan.stages[0].values
    if c.kind != "all-reduce" or len(c.axes) < 2 or value not in layouts:
        return False
    axes = [context.plan.mesh_names.index(a) for a in c.axes]
    wanted, shape = context.read(value, c.op), context.graph.types[value].shape
    if any(layouts[value][a] != PARTIAL or wanted[a] < 0 for a in axes) or len({wanted[a] for a in axes}) > 1:
        return False
    return _tiles(local_shape(wanted, shape, context.plan.mesh_sizes)) > 1


def _tiles(local: Sequence[int]) -> int:
    """Tiles of a device's piece."""
    *leading, rows, columns = (1, 1, *local)
    return math.prod(leading) * math.ceil(rows / TILE_ROWS) * math.ceil(columns / TILE_COLUMNS)


def replace_small_reduce_scatters(planned: Collectives, context: Context) -> tuple[Collective, ...]:
    """libtpu uses all-reduce and slice where the pieces are not whole tiles of 8 x 128.

    That is known for pieces of a single tile, for less than 8 rows or columns of a matrix, and for less than 128 along
    the last of several dimensions of a dot if no other dimension is as long as a tile's row. For others it depends on
    the order of dimensions that libtpu chooses: `autopar.verification.exceptions`.
    """
    return tuple(replace(c, kind="all-reduce") if _below_a_tile(c, context) else c for c in planned)


def _below_a_tile(c: Collective, context: Context) -> bool:
    op = context.reduced_op(c)
    if c.kind != "reduce-scatter" or op is None:
        return False
    value = context.emitted_value(op)
    shape, layout = context.graph.types[value].shape, context.plan.stages[0].values.get(value)
    if layout is None:
        return False
    local = local_shape(layout, shape, context.plan.mesh_sizes)
    onto = layout[context.plan.mesh_names.index(c.axes[0])]
    if _tiles(local) == 1 or (len(shape) == 2 and local[onto] < TILE_ROWS):
        return True
    last = op.name == "dot_general" and onto == len(shape) - 1 > 1 and shape[onto] >= TILE_COLUMNS > local[onto]
    return last and max(shape[:-1]) < TILE_COLUMNS


def replace_small_gathers(planned: Collectives, context: Context) -> tuple[Collective, ...]:
    """libtpu gathers a vector in pieces of less than a tile's row by an all-reduce: each piece in a buffer of zeros."""
    return tuple(replace(c, kind="all-reduce") if _below_a_row(c, context) else c for c in planned)


def _below_a_row(c: Collective, context: Context) -> bool:
    value = context.values.get(c.op, -1)
    if c.kind != "all-gather" or value < 0 or context.graph.types[value].rank != 1:
        return False
    pieces = math.prod(context.sizes[a] for a in c.axes)
    return c.bytes // context.graph.types[value].itemsize // pieces < TILE_COLUMNS
