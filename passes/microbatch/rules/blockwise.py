"""Rules for split operands: functions of shapes and parameters, which the table refers to.

A rule gets the states of an operation's operands, at least one split and none partial. It returns the states of the
results, how the operation is bound on blocks, and which invariant operands are sliced first; or None if the operation
cannot run block by block.

    elementwise      all split operands in one state, invariant ones sliced where their extent is not 1   -> elementwise
    contraction      the contracted dimension split: a partial sum                                  -> dot, convolution
    reduction        over the split dimension: a part of the kind that the table names                      -> reduction
    reshape          (outer, m, inner) by prefix products                                                     -> reshape
    joining, taking  whole pieces (m, inner) of the split dimension                  -> concatenate, pad, static_slice
    gather, scatter  see `autopar.passes.microbatch.rules.gather`

Bound on blocks, an operation keeps its parameters except those with sizes of the split dimension (`RuleResult.params`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autopar.passes.microbatch.rules.types import (
    THREEFRY_KEYS,
    Operands,
    Rule,
    RuleResult,
    align_operand,
    only_first_split,
    slice_invariants,
)
from autopar.passes.microbatch.states import SUM, Invariant, Partial, ReductionKind, Shape, Split, common_state, divided

# Elementwise operations


def elementwise(operands: Operands) -> RuleResult | None:
    """All split operands are in one state, which the results have as well."""
    state = common_state(operands.states)
    if not isinstance(state, Split):
        return None
    rank = len(operands.result_shapes[0])
    aligned = [i for i, shape in enumerate(operands.shapes) if len(shape) == rank and shape[state.dim] != 1]
    return RuleResult((state,) * len(operands.result_shapes), slice_invariants(operands, state, aligned))


def bitcast(operands: Operands) -> RuleResult | None:
    """Elementwise, except that types of another width add or remove the last dimension."""
    (state,) = operands.states
    assert isinstance(state, Split)
    return RuleResult((state,)) if state.dim < len(operands.result_shapes[0]) else None


# Shapes


def broadcast(operands: Operands) -> RuleResult | None:
    """The split dimension moves to its position in the result."""
    state = only_first_split(operands)
    if state is None:
        return None
    dim = operands.params["broadcast_dimensions"][state.dim]
    return RuleResult(
        (Split(dim, state.outer),), params={"shape": divided(operands.params["shape"], dim, operands.count)}
    )


def reshape(operands: Operands) -> RuleResult | None:
    """The blocks must be whole blocks of one dimension of the result.

    The parameter `dimensions` reorders those of the operand first.
    """
    state, shape = only_first_split(operands), operands.shapes[0]
    if state is None:
        return None
    if (order := operands.params.get("dimensions")) is not None:
        state, shape = Split(order.index(state.dim), state.outer), tuple(shape[d] for d in order)
    after = split_after_reshape(shape, operands.result_shapes[0], state, operands.count)
    return after and RuleResult(
        (after,), params={"new_sizes": divided(operands.result_shapes[0], after.dim, operands.count)}
    )


def split_after_reshape(before: Shape, after: Shape, state: Split, count: int) -> Split | None:
    """The state of a split value after a reshape; None if its blocks are not blocks of one dimension.

    Elements before the block index, prod(shape[:dim]) outer, must end in one dimension of the result:
    prod(after[:d]) outer' with outer' m a divisor of after[d].
    """
    ahead = math.prod(before[: state.dim]) * state.outer
    if not ahead:  # an array without elements: prefix products do not identify a dimension
        return None
    prefix = 1
    for dim, extent in enumerate(after):
        if prefix and ahead % prefix == 0 and extent % (ahead // prefix * count) == 0 and extent >= count:
            return Split(dim, ahead // prefix)
        prefix *= extent
        if prefix > ahead:
            return None
    return None


def transpose(operands: Operands) -> RuleResult | None:
    """The split dimension moves to its position in the result."""
    state = only_first_split(operands)
    return state and RuleResult((Split(tuple(operands.params["permutation"]).index(state.dim), state.outer),))


def squeeze(operands: Operands) -> RuleResult | None:
    """Removed dimensions have extent 1, so that only the position of the split dimension changes."""
    state = only_first_split(operands)
    removed = [d % len(operands.shapes[0]) for d in operands.params["dimensions"]]
    return None if state is None or state.dim in removed else RuleResult((_drop_dims(state, removed),))


def _drop_dims(state: Split, dims: Sequence[int]) -> Split:
    """The state after other dimensions are removed."""
    return Split(state.dim - sum(d < state.dim for d in dims), state.outer)


def _piece(shape: Shape, state: Split) -> int:
    """Rows of one of the `outer` pieces of a split dimension; each microbatch has its part of every piece."""
    return shape[state.dim] // state.outer


def _pieces(rows: int, piece: int, dim: int) -> Split | None:
    """The state of so many rows that are whole pieces; None if they are not."""
    return Split(dim, rows // piece) if rows and piece and rows % piece == 0 else None


def concatenate(operands: Operands) -> RuleResult | None:
    """Along another dimension than the split one; or along that one, if all operands consist of equal pieces."""
    state, dim = common_state(operands.states), operands.params["dimension"]
    splits = [(shape, s) for shape, s in zip(operands.shapes, operands.states, strict=True) if isinstance(s, Split)]
    if splits and all(s.dim == dim for _, s in splits):
        pieces = {_piece(shape, s) for shape, s in splits}
        states = [_pieces(shape[dim], min(pieces), dim) for shape in operands.shapes]
        joined = _pieces(operands.result_shapes[0][dim], min(pieces), dim)
        if len(pieces) > 1 or None in states or joined is None:
            return None
        slices = zip(states, operands.states, strict=True)
        return RuleResult((joined,), {i: s for i, (s, now) in enumerate(slices) if s and isinstance(now, Invariant)})
    if not isinstance(state, Split) or state.dim == dim:
        return None
    return RuleResult((state,), slice_invariants(operands, state, range(len(operands.states))))


def split_array(operands: Operands) -> RuleResult | None:
    """Along another dimension than the split one; or along that one, if all results are whole pieces."""
    state, sizes = only_first_split(operands), operands.params["sizes"]
    if state is None or state.dim != operands.params["axis"]:
        return None if state is None else RuleResult((state,) * len(operands.result_shapes))
    states = [_pieces(size, _piece(operands.shapes[0], state), state.dim) for size in sizes]
    taken = tuple(s for s in states if s is not None)
    local = tuple(size // operands.count for size in sizes)
    return RuleResult(taken, params={"sizes": local}) if len(taken) == len(sizes) else None


def unstack(operands: Operands) -> RuleResult | None:
    """Along any other dimension than the split one."""
    state, axis = only_first_split(operands), operands.params["axis"]
    return (
        None
        if state is None or state.dim == axis
        else RuleResult((_drop_dims(state, (axis,)),) * len(operands.result_shapes))
    )


def stack(operands: Operands) -> RuleResult | None:
    """Along a new dimension."""
    state = common_state(operands.states)
    if not isinstance(state, Split):
        return None
    moved = Split(state.dim + (operands.params["axis"] <= state.dim), state.outer)
    return RuleResult((moved,), slice_invariants(operands, state, range(len(operands.states))))


def tile(operands: Operands) -> RuleResult | None:
    """Repeats along the split dimension repeat its pieces."""
    state = only_first_split(operands)
    reps = 0 if state is None else operands.params["reps"][state.dim]
    return RuleResult((Split(state.dim, state.outer * reps),)) if state is not None and reps else None


def pad(operands: Operands) -> RuleResult | None:
    """Along the split dimension whole pieces are padded."""
    state = only_first_split(operands)
    if state is None:
        return None
    config = [(int(low), int(high), int(inside)) for low, high, inside in operands.params["padding_config"]]
    (low, high, inside), piece = config[state.dim], _piece(operands.shapes[0], state)
    padded = state
    if (low, high, inside) != (0, 0, 0):
        after = _pieces(operands.result_shapes[0][state.dim], piece, state.dim)
        if after is None or inside or low % piece or high % piece:
            return None
        padded = after
    # rounding of negative padding does not matter: it is a multiple of the count
    config[state.dim] = low // operands.count, high // operands.count, inside
    return RuleResult((padded,), params={"padding_config": tuple(config)})


def static_slice(operands: Operands) -> RuleResult | None:
    """The split dimension is taken whole, or whole pieces of it."""
    state = only_first_split(operands)
    if state is None:
        return None
    starts, limits, strides = (operands.params[name] for name in ("start_indices", "limit_indices", "strides"))
    taken, piece, d = state, _piece(operands.shapes[0], state), state.dim
    if operands.result_shapes[0][d] != operands.shapes[0][d]:
        pieces = _pieces(operands.result_shapes[0][d], piece, d)
        if pieces is None or starts[d] % piece or (strides is not None and strides[d] != 1):
            return None
        taken = pieces
    local = {"start_indices": starts, "limit_indices": limits}
    return RuleResult((taken,), params={name: divided(at, d, operands.count) for name, at in local.items()})


def dynamic_slice(operands: Operands) -> RuleResult | None:
    """The split dimension is taken whole. Its slice then begins at 0, whatever its start: starts are clamped."""
    state = only_first_split(operands)
    if state is None or operands.result_shapes[0][state.dim] != operands.shapes[0][state.dim]:
        return None
    return RuleResult(
        (state,), params={"slice_sizes": divided(operands.params["slice_sizes"], state.dim, operands.count)}
    )


def dynamic_update_slice(operands: Operands) -> RuleResult | None:
    """The update covers the split dimension in full."""
    whole, update, *starts = operands.states
    if any(not isinstance(s, Invariant) for s in starts):
        return None
    state = common_state((whole, update))
    if not isinstance(state, Split) or operands.shapes[0][state.dim] != operands.shapes[1][state.dim]:
        return None
    return RuleResult((state,), slice_invariants(operands, state, (0, 1)))


def rev(operands: Operands) -> RuleResult | None:
    """Along any other dimension than the split one."""
    state = only_first_split(operands)
    return None if state is None or state.dim in operands.params["dimensions"] else RuleResult((state,))


# Reductions


def reduction(kind: ReductionKind | None) -> Rule:
    """The rule of a reduction. Over the split dimension it yields parts that `kind` combines; with None it cannot
    run so.
    """

    def rule(operands: Operands) -> RuleResult | None:
        state, axes = only_first_split(operands), operands.params["axes"]
        if state is None or len(operands.states) > 1:
            return None
        if state.dim in axes:
            return None if kind is None else RuleResult((Partial(kind),))
        return RuleResult((_drop_dims(state, axes),) * len(operands.result_shapes))

    return rule


def window(operands: Operands) -> RuleResult | None:
    """Windows of one element along the split dimension, neither padded nor strided."""
    state = common_state(operands.states)
    if not isinstance(state, Split):
        return None
    params, dim, rank = operands.params, state.dim, len(operands.result_shapes[0])
    plain = (1,) * rank
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    if any((params.get(name) or plain)[dim] != 1 for name in names) or tuple(params["padding"][dim]) != (0, 0):
        return None
    aligned = [i for i, shape in enumerate(operands.shapes) if len(shape) == rank]
    return RuleResult((state,) * len(operands.result_shapes), slice_invariants(operands, state, aligned))


def cumulative(operands: Operands) -> RuleResult | None:
    """Along any other dimension than the split one."""
    state = only_first_split(operands)
    return None if state is None or state.dim == operands.params["axis"] else RuleResult((state,))


def sort(operands: Operands) -> RuleResult | None:
    """Along any other dimension than the split one."""
    state = common_state(operands.states)
    if not isinstance(state, Split) or state.dim == operands.params["dimension"]:
        return None
    return RuleResult(
        (state,) * len(operands.result_shapes), slice_invariants(operands, state, range(len(operands.states)))
    )


def top_k(operands: Operands) -> RuleResult | None:
    """Along any other dimension than the split one."""
    state, axis = only_first_split(operands), operands.params.get("axis", -1) % len(operands.shapes[0])
    return None if state is None or state.dim == axis else RuleResult((state,) * len(operands.result_shapes))


def batched(inner: int) -> Rule:
    """Independent problems along all but the last `inner` dimensions, which all operands and results share."""

    def rule(operands: Operands) -> RuleResult | None:
        state = common_state(operands.states)
        if not isinstance(state, Split) or state.dim >= len(operands.shapes[0]) - inner:
            return None
        return RuleResult(
            (state,) * len(operands.result_shapes), slice_invariants(operands, state, range(len(operands.states)))
        )

    return rule


def linear_system(operands: Operands) -> RuleResult | None:
    """Independent systems, or independent right-hand sides of systems that every microbatch has alike.

    The last operand holds the right-hand sides: as columns, or as rows where the unknowns multiply the matrix from the
    left.
    """
    *systems, sides = operands.states
    rank = len(operands.shapes[-1])
    free = rank - 1 if operands.params.get("left_side", True) else rank - 2
    if isinstance(sides, Split) and sides.dim == free:
        return RuleResult((sides,)) if all(isinstance(s, Invariant) for s in systems) else None
    state = common_state(operands.states)
    if not isinstance(state, Split) or state.dim >= rank - 2:
        return None
    return RuleResult((state,), slice_invariants(operands, state, range(len(operands.states))))


def fft(operands: Operands) -> RuleResult | None:
    """Independent transforms along all but the transformed dimensions."""
    return batched(len(operands.params["fft_lengths"]))(operands)


# Products


def dot(operands: Operands) -> RuleResult | None:
    """Contracted dimensions split: a partial sum; batch dimensions or a free one of one operand: a split result."""
    contracted, batch = operands.params["dimension_numbers"]
    side = 0 if isinstance(operands.states[0], Split) else 1
    state, other = operands.states[side], operands.states[1 - side]
    if not isinstance(state, Split):
        return None
    for dims, summed in ((contracted, True), (batch, False)):
        if state.dim in dims[side]:
            position = tuple(dims[side]).index(state.dim)
            partner = Split(dims[1 - side][position], state.outer)
            result = SUM if summed else Split(position, state.outer)
            return align_operand(result, other, partner, 1 - side)
    if isinstance(other, Invariant):
        return RuleResult((Split(_free_position(operands, side, state.dim), state.outer),))
    return None


def _free_position(operands: Operands, side: int, dim: int) -> int:
    """Dimension of a dot's result that a free dimension of one operand becomes."""
    (contracted, batch) = operands.params["dimension_numbers"]

    def free(s: int) -> list[int]:
        return [d for d in range(len(operands.shapes[s])) if d not in contracted[s] and d not in batch[s]]

    return len(batch[0]) + (len(free(0)) if side else 0) + free(side).index(dim)


def convolution(operands: Operands) -> RuleResult | None:
    """The batch, groups, or the kernel's output features split: a split result; input features split in both: a partial
    sum.
    """
    numbers, states = operands.params["dimension_numbers"], operands.states
    left, right = states
    if (grouped := _groups(operands)) is not None:
        return grouped
    if isinstance(left, Split) and left.dim == numbers.lhs_spec[0] and isinstance(right, Invariant):
        batch = Split(numbers.out_spec[0], left.outer)
        return RuleResult((batch,)) if operands.params["batch_group_count"] == 1 else None
    counts = operands.params["feature_group_count"], operands.params["batch_group_count"]
    if isinstance(right, Split) and right.dim == numbers.rhs_spec[0] and isinstance(left, Invariant):
        return RuleResult((Split(numbers.out_spec[1], right.outer),)) if counts == (1, 1) else None
    if operands.params["feature_group_count"] != 1:
        return None
    for side, features, partner in ((0, numbers.lhs_spec[1], numbers.rhs_spec[1]), (1, *_kernel_features(numbers))):
        state = states[side]
        if isinstance(state, Split) and state.dim == features:
            return align_operand(SUM, states[1 - side], Split(partner, state.outer), 1 - side)
    return None


def _groups(operands: Operands) -> RuleResult | None:
    """Each microbatch has its groups: of features, or of the batch. An invariant operand is sliced by group."""
    numbers = operands.params["dimension_numbers"]
    state = next(s for s in operands.states if isinstance(s, Split))
    for name, dim in (("feature_group_count", numbers.lhs_spec[1]), ("batch_group_count", numbers.lhs_spec[0])):
        groups = operands.params[name]
        by_group = Split(dim, state.outer), Split(numbers.rhs_spec[0], state.outer)
        aligned = all(
            isinstance(s, Invariant) or s == wanted for s, wanted in zip(operands.states, by_group, strict=True)
        )
        if groups > 1 and aligned and groups % (state.outer * operands.count) == 0:
            slices = {i: s for i, s in enumerate(by_group) if isinstance(operands.states[i], Invariant)}
            return RuleResult(
                (Split(numbers.out_spec[1], state.outer),), slices, params={name: groups // operands.count}
            )
    return None


def _kernel_features(numbers: Any) -> tuple[int, int]:
    """Input-feature dimension of the kernel, then of the input."""
    return numbers.rhs_spec[1], numbers.lhs_spec[1]


# Random numbers: every key has its own stream, and the generated dimensions follow those of the keys.


def per_key(operands: Operands) -> RuleResult | None:
    """Split along a dimension of the keys."""
    state = only_first_split(operands)
    keys = min(len(operands.shapes[0]), len(operands.result_shapes[0]))
    return RuleResult((state,)) if state is not None and state.dim < keys else None


def fold_in(operands: Operands) -> RuleResult | None:
    """Integers folded into keys, elementwise."""
    return elementwise(operands) if THREEFRY_KEYS.contains(operands.dtype(0)) else None
