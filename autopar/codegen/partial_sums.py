"""Operations that leave partial sums: results get a leading dimension per mesh axis along which they stay unreduced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autopar import jax_compat
from autopar.codegen.context import Context
from autopar.ir.graph import Op


def split_product(context: Context, op: Op, operands: Sequence[Any], kept: Sequence[int]) -> Any:
    """A product left unreduced along the axes `kept`: the contracted dimension is split,

        sum_k a[.., k] b[k, ..]  ->  [sum_{k in part p} a[.., k] b[k, ..]  for p in parts]

    and the parts form a batch dimension that is sharded along the axis.
    """
    (lhs_c, rhs_c), (lhs_b, rhs_b) = op.params["dimension_numbers"]
    with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
        lhs, lhs_dims = _split(context, op, 0, operands[0], lhs_c, lhs_b, kept)
        rhs, rhs_dims = _split(context, op, 1, operands[1], rhs_c, rhs_b, kept)
        numbers = ((lhs_dims[0], rhs_dims[0]), (lhs_dims[1], rhs_dims[1]))
        return op.equation.primitive.bind(lhs, rhs, **{**op.params, "dimension_numbers": numbers})


def split_sum(context: Context, op: Op, operands: Sequence[Any], kept: Sequence[int]) -> Any:
    """A reduce_sum left unreduced along the axes `kept`, in the same way."""
    with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
        array, (rest, lead) = _split(context, op, 0, operands[0], op.params["axes"], (), kept)
        trailing = [d for d in range(array.ndim) if d not in lead]
        array = jax.lax.transpose(array, (*lead, *trailing))
        return jax_compat.reduce_sum(array, [len(lead) + trailing.index(d) for d in rest])


def split_scatter(context: Context, op: Op, operands: Sequence[Any], kept: Sequence[int]) -> Any:
    """A scatter that adds to zeros, left unreduced along the axes `kept`: each part is scattered by itself."""

    def scatter(indices: Any, updates: Any) -> Any:
        return jax_compat.bind(op.equation, [operands[0], indices, updates])[0]

    with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
        (indices, _), (updates, count) = (_parts_first(context, op, k, operands[k], kept) for k in (1, 2))
        for _ in range(count):
            scatter = jax.vmap(scatter)
        return jax_compat.reduce_sum(scatter(indices, updates), range(len(kept), count))


def _parts_first(context: Context, op: Op, k: int, array: Any, kept: Sequence[int]) -> tuple[Any, int]:
    """An operand with a leading dimension per mesh axis on a reduced factor, `kept` first, and the number of these."""
    rule = context.rules[op.signature]
    summed = [d for d, factor in enumerate(rule.operands[k]) if factor in rule.reduced]
    array, dim_of, new_dims = _split_axes(context, op, k, array, summed)
    axes = [a for a, p in enumerate(dim_of) if any(p in new_dims[d][:-1] for d in summed)]
    lead = [dim_of[a] for a in sorted(axes, key=lambda a: (a not in kept, a))]
    return jax.lax.transpose(array, (*lead, *(d for d in range(array.ndim) if d not in lead))), len(lead)


def _split(
    context: Context, op: Op, k: int, array: Any, contracted: Sequence[int], batch: Sequence[int], kept: Sequence[int]
) -> tuple[Any, tuple[tuple[int, ...], tuple[int, ...]]]:
    """An operand with its contracted dimensions split by the mesh axes on them, and its new (contracted, batch)."""
    array, dim_of, new_dims = _split_axes(context, op, k, array, contracted)
    lead = [dim_of[a] for a in kept]
    rest = tuple(p for dim in contracted for p in new_dims[dim] if p not in lead)
    return array, (rest, (*lead, *(new_dims[dim][0] for dim in batch)))


def _split_axes(
    context: Context, op: Op, k: int, array: Any, dims: Sequence[int]
) -> tuple[Any, tuple[int, ...], Mapping[int, Sequence[int]]]:
    """An operand reshaped so that each mesh axis on one of `dims` has a dimension of its own.

    Returns:
        array: the reshaped operand.
        dim_of: per mesh axis the new dimension that it shards; -1: none.
        new_dims: old dimension -> its new dimensions, those of mesh axes first.
    """
    layout = context.read_layout(op.inputs[k], f"{op.tag}.in{k}")
    sizes = [context.mesh.shape[name] for name in context.names]
    shape: list[int] = []
    new_dims: dict[int, list[int]] = {}
    dim_of = [-1] * len(sizes)
    for dim, extent in enumerate(array.shape):
        axes = [a for a, d in enumerate(layout) if d == dim]
        split = [a for a in axes if dim in dims]
        for a in split:
            dim_of[a] = len(shape)
            new_dims.setdefault(dim, []).append(len(shape))
            shape.append(sizes[a])
            extent //= sizes[a]
        for a in axes:
            if a not in split:
                dim_of[a] = len(shape)
        new_dims.setdefault(dim, []).append(len(shape))
        shape.append(extent)
    return context.constrain(array.reshape(shape), tuple(dim_of)), tuple(dim_of), new_dims


#: Operation -> emits it unreduced along mesh axes (`kept`). `autopar.codegen.shard_mapped` has convolutions; all other
#: operations have no partial results.
SPLITS: Mapping[str, Callable[[Context, Op, Sequence[Any], Sequence[int]], Any]] = {
    "dot_general": split_product,
    "reduce_sum": split_sum,
    "scatter-add": split_scatter,
}
