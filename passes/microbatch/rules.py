"""What operations make of split operands: functions of shapes and parameters, which the table names.

A rule gets the states of an operation's operands, at least one of them split and none a part of a whole, and answers
with the states of its results, how it is to be bound on blocks, and which invariant operands have to be cut first; or
with None, where the operation cannot run block by block.

    elementwise      all split operands alike, invariant ones cut where their extent is not 1       -> elementwise
    contraction      the contracted dimension split: a partial sum                                -> dot, convolution
    reduction        over the split dimension: a part of the kind that the table names              -> reduction
    reshape          (outer, m, inner) by prefix products                                           -> reshape
    gather, scatter  see `autopar.passes.microbatch.gather`

Bound on blocks, an operation keeps its parameters but for those that hold sizes of the split dimension
(`Outcome.params`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autopar.passes.microbatch.rule_types import COUNTED, Case, Outcome, Rule, alone, cuts_of, together
from autopar.passes.microbatch.states import SUM, Invariant, Kind, Partial, Shape, Split, divided, only

# Elementwise operations


def elementwise(case: Case) -> Outcome | None:
    state = only(case.states)
    if not isinstance(state, Split):
        return None
    rank = len(case.results[0])
    aligned = [i for i, shape in enumerate(case.operands) if len(shape) == rank and shape[state.dim] != 1]
    return Outcome((state,) * len(case.results), cuts_of(case, state, aligned))


def bitcast(case: Case) -> Outcome | None:
    """Elementwise, but that types of other widths take in the last dimension or add one."""
    (state,) = case.states
    assert isinstance(state, Split)
    return Outcome((state,)) if state.dim < len(case.results[0]) else None


# Shapes


def broadcast(case: Case) -> Outcome | None:
    state = alone(case)
    if state is None:
        return None
    dim = case.params["broadcast_dimensions"][state.dim]
    return Outcome((Split(dim, state.outer),), params={"shape": divided(case.params["shape"], dim, case.count)})


def reshape(case: Case) -> Outcome | None:
    state = alone(case)
    if state is None or case.params.get("dimensions") is not None:
        return None
    found = reshaped(case.operands[0], case.results[0], state, case.count)
    return found and Outcome((found,), params={"new_sizes": divided(case.results[0], found.dim, case.count)})


def reshaped(before: Shape, after: Shape, state: Split, count: int) -> Split | None:
    """Where the blocks of a split value are after a reshape.

    Elements before the block index, prod(shape[:dim]) outer, must end in one dimension of the result:
    prod(after[:d]) outer' with outer' m a divisor of after[d].
    """
    ahead = math.prod(before[: state.dim]) * state.outer
    if not ahead:  # no elements: nothing tells where they would be
        return None
    prefix = 1
    for dim, extent in enumerate(after):
        if prefix and ahead % prefix == 0 and extent % (ahead // prefix * count) == 0 and extent >= count:
            return Split(dim, ahead // prefix)
        prefix *= extent
        if prefix > ahead:
            return None
    return None


def transpose(case: Case) -> Outcome | None:
    state = alone(case)
    return state and Outcome((Split(tuple(case.params["permutation"]).index(state.dim), state.outer),))


def squeeze(case: Case) -> Outcome | None:
    state = alone(case)
    gone = [d % len(case.operands[0]) for d in case.params["dimensions"]]
    return None if state is None or state.dim in gone else Outcome((_without(state, gone),))


def _without(state: Split, dims: Sequence[int]) -> Split:
    """The state once these other dimensions are gone."""
    return Split(state.dim - sum(d < state.dim for d in dims), state.outer)


def concatenate(case: Case) -> Outcome | None:
    state = only(case.states)
    if not isinstance(state, Split) or state.dim == case.params["dimension"]:
        return None
    return Outcome((state,), cuts_of(case, state, range(len(case.states))))


def split_apart(case: Case) -> Outcome | None:
    state = alone(case)
    return None if state is None or state.dim == case.params["axis"] else Outcome((state,) * len(case.results))


def unstack(case: Case) -> Outcome | None:
    state, axis = alone(case), case.params["axis"]
    return None if state is None or state.dim == axis else Outcome((_without(state, (axis,)),) * len(case.results))


def stack(case: Case) -> Outcome | None:
    state = only(case.states)
    if not isinstance(state, Split):
        return None
    moved = Split(state.dim + (case.params["axis"] <= state.dim), state.outer)
    return Outcome((moved,), cuts_of(case, state, range(len(case.states))))


def tile(case: Case) -> Outcome | None:
    state = alone(case)
    return None if state is None or case.params["reps"][state.dim] != 1 else Outcome((state,))


def pad(case: Case) -> Outcome | None:
    state = alone(case)
    unpadded = state is not None and tuple(case.params["padding_config"][state.dim]) == (0, 0, 0)
    return Outcome((state,)) if state is not None and unpadded else None


def slices(case: Case) -> Outcome | None:
    state = alone(case)
    if state is None or case.results[0][state.dim] != case.operands[0][state.dim]:
        return None
    return Outcome((state,), params={"limit_indices": divided(case.params["limit_indices"], state.dim, case.count)})


def dynamic_slice(case: Case) -> Outcome | None:
    """A slice as long as the dimension starts at its begin, whatever its start: starts are clamped."""
    state = alone(case)
    if state is None or case.results[0][state.dim] != case.operands[0][state.dim]:
        return None
    return Outcome((state,), params={"slice_sizes": divided(case.params["slice_sizes"], state.dim, case.count)})


def dynamic_update_slice(case: Case) -> Outcome | None:
    whole, update, *starts = case.states
    if any(not isinstance(s, Invariant) for s in starts):
        return None
    state = only((whole, update))
    if not isinstance(state, Split) or case.operands[0][state.dim] != case.operands[1][state.dim]:
        return None
    return Outcome((state,), cuts_of(case, state, (0, 1)))


def rev(case: Case) -> Outcome | None:
    state = alone(case)
    return None if state is None or state.dim in case.params["dimensions"] else Outcome((state,))


# Reductions


def reduction(kind: Kind | None) -> Rule:
    """A reduction whose parts, if it goes over the split dimension, are combined by `kind`."""

    def rule(case: Case) -> Outcome | None:
        state, axes = alone(case), case.params["axes"]
        if state is None or len(case.states) > 1:
            return None
        if state.dim in axes:
            return None if kind is None else Outcome((Partial(kind),))
        return Outcome((_without(state, axes),) * len(case.results))

    return rule


def window(case: Case) -> Outcome | None:
    """Windows of one element along the split dimension, neither padded nor strided."""
    state = only(case.states)
    if not isinstance(state, Split):
        return None
    params, dim, rank = case.params, state.dim, len(case.results[0])
    plain = (1,) * rank
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    if any((params.get(name) or plain)[dim] != 1 for name in names) or tuple(params["padding"][dim]) != (0, 0):
        return None
    aligned = [i for i, shape in enumerate(case.operands) if len(shape) == rank]
    return Outcome((state,) * len(case.results), cuts_of(case, state, aligned))


def cumulative(case: Case) -> Outcome | None:
    state = alone(case)
    return None if state is None or state.dim == case.params["axis"] else Outcome((state,))


def sort(case: Case) -> Outcome | None:
    state = only(case.states)
    if not isinstance(state, Split) or state.dim == case.params["dimension"]:
        return None
    return Outcome((state,) * len(case.results), cuts_of(case, state, range(len(case.states))))


def top_k(case: Case) -> Outcome | None:
    state, axis = alone(case), case.params.get("axis", -1) % len(case.operands[0])
    return None if state is None or state.dim == axis else Outcome((state,) * len(case.results))


def leading(inner: int) -> Rule:
    """Independent problems along all but the last `inner` dimensions, which every operand and result has."""

    def rule(case: Case) -> Outcome | None:
        state = only(case.states)
        if not isinstance(state, Split) or state.dim >= len(case.operands[0]) - inner:
            return None
        return Outcome((state,) * len(case.results), cuts_of(case, state, range(len(case.states))))

    return rule


def fft(case: Case) -> Outcome | None:
    return leading(len(case.params["fft_lengths"]))(case)


# Products


def dot(case: Case) -> Outcome | None:
    contracted, batch = case.params["dimension_numbers"]
    states = case.states
    for side in (0, 1):
        state, other = states[side], states[1 - side]
        if not isinstance(state, Split):
            continue
        for dims, summed in ((contracted, True), (batch, False)):
            if state.dim in dims[side]:
                position = tuple(dims[side]).index(state.dim)
                partner = Split(dims[1 - side][position], state.outer)
                result = SUM if summed else Split(position, state.outer)
                return together(result, other, partner, 1 - side)
        if isinstance(other, Invariant):
            return Outcome((Split(_free_position(case, side, state.dim), state.outer),))
        return None
    return None


def _free_position(case: Case, side: int, dim: int) -> int:
    """Dimension of a dot's result that a free dimension of one operand becomes."""
    (contracted, batch) = case.params["dimension_numbers"]

    def free(s: int) -> list[int]:
        return [d for d in range(len(case.operands[s])) if d not in contracted[s] and d not in batch[s]]

    return len(batch[0]) + (len(free(0)) if side else 0) + free(side).index(dim)


def convolution(case: Case) -> Outcome | None:
    numbers, states = case.params["dimension_numbers"], case.states
    left, right = states
    if isinstance(left, Split) and left.dim == numbers.lhs_spec[0] and isinstance(right, Invariant):
        batch = Split(numbers.out_spec[0], left.outer)
        return Outcome((batch,)) if case.params["batch_group_count"] == 1 else None
    if case.params["feature_group_count"] != 1:
        return None
    for side, features, partner in ((0, numbers.lhs_spec[1], numbers.rhs_spec[1]), (1, *_swapped(numbers))):
        state = states[side]
        if isinstance(state, Split) and state.dim == features:
            return together(SUM, states[1 - side], Split(partner, state.outer), 1 - side)
    return None


def _swapped(numbers: Any) -> tuple[int, int]:
    return numbers.rhs_spec[1], numbers.lhs_spec[1]


# Random numbers: every key has its own stream, and the dimensions drawn come after those of the keys.


def keyed(case: Case) -> Outcome | None:
    state = alone(case)
    keys = min(len(case.operands[0]), len(case.results[0]))
    return Outcome((state,)) if state is not None and state.dim < keys else None


def fold_in(case: Case) -> Outcome | None:
    """Numbers folded into keys, one by one."""
    return elementwise(case) if COUNTED.holds(case.dtype(0)) else None
