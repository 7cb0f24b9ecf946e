"""What one operation makes of split and partial operands: a table from primitives to rules.

A rule gets the states of an operation's operands, at least one of them not invariant, and answers with the states of
its results, how it is to be bound on blocks, and which invariant operands have to be cut first; or with None, where
the operation cannot run block by block.

    elementwise      all split operands alike, invariant ones cut where their extent is not 1       -> _elementwise
    contraction      the contracted dimension split: a partial sum                                -> _dot, _convolution
    reduction        over the split dimension: partial sum, maximum, minimum, and, or             -> _reduction
    linear           f(sum_k x_k) = sum_k f(x_k): partial in, partial out                           -> _linear
    reshape          (outer, m, inner) by prefix products                                           -> _reshape
    gather, scatter  see `autopar.passes.microbatch.gather`

Bound on blocks, an operation keeps its parameters but for those that hold sizes of the split dimension
(`Outcome.params`). An operation without an entry never runs on blocks, so that any program stays correct.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopar.graph import Op
from autopar.passes.microbatch.gather import gather, scatter
from autopar.passes.microbatch.rule_types import Case, Outcome, Rule, alone, cuts_of, together
from autopar.passes.microbatch.states import (
    INVARIANT,
    SUM,
    ZERO,
    Invariant,
    Kind,
    Partial,
    Shape,
    Split,
    State,
    divided,
    fits,
    only,
)


def outcome(case: Case) -> Outcome | None:
    """The outcome of the operation's rule; None if it has none, or cannot run on blocks that lie so."""
    rule = RULES.get(case.op.name)
    found = None if rule is None else rule(case)
    if found is None:
        return None
    whole = zip((*case.operands, *case.results), (*case.states, *found.results), strict=True)
    cut = ((case.operands[i], split) for i, split in found.cuts.items())
    splits = [(shape, state) for shape, state in (*whole, *cut) if isinstance(state, Split)]
    return found if all(fits(shape, state, case.count) for shape, state in splits) else None


def invariant_results(op: Op, states: Sequence[State]) -> tuple[State, ...]:
    """States of the results where all operands are invariant."""
    zero = op.name in _KEEP_ZERO and bool(states) and states[0] == ZERO
    return (ZERO if zero else INVARIANT,) * len(op.outputs)


#: What makes zeros of zeros.
_KEEP_ZERO = ("broadcast_in_dim", "reshape", "convert_element_type", "transpose", "slice", "squeeze", "copy", "neg")


# Elementwise and linear operations


def _elementwise(case: Case) -> Outcome | None:
    state = only(case.states)
    if not isinstance(state, Split):
        return _linear(case)
    rank = len(case.results[0])
    aligned = [i for i, shape in enumerate(case.operands) if len(shape) == rank and shape[state.dim] != 1]
    return Outcome((state,) * len(case.results), cuts_of(case, state, aligned))


def _linear(case: Case) -> Outcome | None:
    """Partial operands of an elementwise operation that is linear in them."""
    name, states = case.op.name, case.states
    if any(isinstance(s, Split) for s in states):
        return None
    if name in _ADDITIVE and all(s in (SUM, ZERO) for s in states):
        return Outcome((SUM,))
    if name in ("neg", "copy", "convert_element_type", "real", "imag", "name", "reduce_precision"):
        kept = name in ("copy", "name") or states[0] == SUM
        return Outcome((states[0],)) if kept and _floating(case) else None
    partial = [i for i, s in enumerate(states) if isinstance(s, Partial)]
    if any(states[i] != SUM for i in partial):
        return None
    if (name == "mul" and len(partial) == 1) or (name == "div" and partial == [0]):
        return Outcome((SUM,)) if _floating(case) or name == "mul" else None
    if name == "select_n" and 0 not in partial and all(s in (SUM, ZERO) for s in states[1:]):
        return Outcome((SUM,))
    return None


_ADDITIVE = ("add", "add_any", "sub")


def _floating(case: Case) -> bool:
    return all(np.issubdtype(np.dtype(v.aval.dtype), np.inexact) or _is_bfloat(v) for v in case.op.equation.outvars)


def _is_bfloat(variable: Any) -> bool:
    return str(variable.aval.dtype).startswith(("bfloat", "float8"))


def _passed(case: Case) -> Outcome | None:
    """Operand i passes to result i."""
    return Outcome(case.states[: len(case.results)])


# Shapes


def _broadcast(case: Case) -> Outcome | None:
    state = alone(case)
    if not isinstance(state, Split):
        return None if state is None else Outcome((state,))
    dim = case.params["broadcast_dimensions"][state.dim]
    return Outcome((Split(dim, state.outer),), params={"shape": divided(case.params["shape"], dim, case.count)})


def _reshape(case: Case) -> Outcome | None:
    state = alone(case)
    if not isinstance(state, Split):
        return None if state is None else Outcome((state,))
    if case.params.get("dimensions") is not None:
        return None
    found = reshaped(case.operands[0], case.results[0], state, case.count)
    return found and Outcome((found,), params={"new_sizes": divided(case.results[0], found.dim, case.count)})


def reshaped(before: Shape, after: Shape, state: Split, count: int) -> Split | None:
    """Where the blocks of a split value lie after a reshape.

    Elements before the block index, prod(shape[:dim]) outer, must end in one dimension of the result:
    prod(after[:d]) outer' with outer' m a divisor of after[d].
    """
    ahead = math.prod(before[: state.dim]) * state.outer
    prefix = 1
    for dim, extent in enumerate(after):
        if prefix and ahead % prefix == 0 and extent % (ahead // prefix * count) == 0 and extent >= count:
            return Split(dim, ahead // prefix)
        prefix *= extent
        if prefix > ahead:
            return None
    return None


def _transpose(case: Case) -> Outcome | None:
    (state,) = case.states
    if not isinstance(state, Split):
        return Outcome((state,))
    return Outcome((Split(tuple(case.params["permutation"]).index(state.dim), state.outer),))


def _squeeze(case: Case) -> Outcome | None:
    (state,) = case.states
    if not isinstance(state, Split):
        return Outcome((state,))
    gone = [d % len(case.operands[0]) for d in case.params["dimensions"]]
    return None if state.dim in gone else Outcome((_without(state, gone),))


def _without(state: Split, dims: Sequence[int]) -> Split:
    """The state once these other dimensions are gone."""
    return Split(state.dim - sum(d < state.dim for d in dims), state.outer)


def _expand_dims(case: Case) -> Outcome | None:
    (state,) = case.states
    if not isinstance(state, Split):
        return Outcome((state,))
    dim = state.dim
    for new in sorted(case.params["dimensions"]):
        dim += new <= dim
    return Outcome((Split(dim, state.outer),))


def _concatenate(case: Case) -> Outcome | None:
    state = only(case.states)
    if isinstance(state, Partial):
        return Outcome((SUM,)) if all(s in (SUM, ZERO) for s in case.states) else None
    if state is None or isinstance(state, Invariant) or state.dim == case.params["dimension"]:
        return None
    return Outcome((state,), cuts_of(case, state, range(len(case.states))))


def _split_apart(case: Case) -> Outcome | None:
    (state,) = case.states
    if isinstance(state, Split) and state.dim == case.params["axis"]:
        return None
    return Outcome((state,) * len(case.results))


def _unstack(case: Case) -> Outcome | None:
    (state,) = case.states
    if isinstance(state, Split):
        if state.dim == case.params["axis"]:
            return None
        state = _without(state, (case.params["axis"],))
    return Outcome((state,) * len(case.results))


def _stack(case: Case) -> Outcome | None:
    state = only(case.states)
    if isinstance(state, Partial):
        return Outcome((SUM,)) if all(s in (SUM, ZERO) for s in case.states) else None
    if state is None or isinstance(state, Invariant):
        return None
    moved = Split(state.dim + (case.params["axis"] <= state.dim), state.outer)
    return Outcome((moved,), cuts_of(case, state, range(len(case.states))))


def _tile(case: Case) -> Outcome | None:
    (state,) = case.states
    return None if isinstance(state, Split) and case.params["reps"][state.dim] != 1 else Outcome((state,))


def _pad(case: Case) -> Outcome | None:
    state, value = case.states
    if isinstance(state, Split) and isinstance(value, Invariant):
        return Outcome((state,)) if tuple(case.params["padding_config"][state.dim]) == (0, 0, 0) else None
    return Outcome((SUM,)) if state == SUM and value == ZERO else None


def _slice(case: Case) -> Outcome | None:
    (state,) = case.states
    if not isinstance(state, Split):
        return Outcome((state,))
    if case.results[0][state.dim] != case.operands[0][state.dim]:
        return None
    return Outcome((state,), params={"limit_indices": divided(case.params["limit_indices"], state.dim, case.count)})


def _dynamic_slice(case: Case) -> Outcome | None:
    state = alone(case)
    if not isinstance(state, Split):
        return None if state is None else Outcome((state,))
    if case.results[0][state.dim] != case.operands[0][state.dim]:
        return None
    return Outcome((state,), params={"slice_sizes": divided(case.params["slice_sizes"], state.dim, case.count)})


def _dynamic_update_slice(case: Case) -> Outcome | None:
    whole, update, *starts = case.states
    if any(not isinstance(s, Invariant) for s in starts):
        return None
    if {whole, update} <= {SUM, ZERO}:
        return Outcome((SUM,))
    state = only((whole, update))
    if not isinstance(state, Split) or case.operands[0][state.dim] != case.operands[1][state.dim]:
        return None
    return Outcome((state,), cuts_of(case, state, (0, 1)))


def _rev(case: Case) -> Outcome | None:
    (state,) = case.states
    return None if isinstance(state, Split) and state.dim in case.params["dimensions"] else Outcome((state,))


# Reductions


def _reduction(kind: Kind | None) -> Rule:
    """A reduction whose parts, if it goes over the split dimension, are combined by `kind`."""

    def rule(case: Case) -> Outcome | None:
        state = alone(case)
        axes = case.params["axes"]
        if isinstance(state, Partial):
            return Outcome((state,)) if state.kind == kind else None
        if not isinstance(state, Split) or len(case.states) > 1:
            return None
        if state.dim in axes:
            return None if kind is None else Outcome((Partial(kind),))
        return Outcome((_without(state, axes),) * len(case.results))

    return rule


def _window(case: Case) -> Outcome | None:
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


def _cumulative(case: Case) -> Outcome | None:
    (state,) = case.states
    if isinstance(state, Split):
        return None if state.dim == case.params["axis"] else Outcome((state,))
    return Outcome((SUM,)) if case.op.name == "cumsum" and state == SUM else None


def _sort(case: Case) -> Outcome | None:
    state = only(case.states)
    if not isinstance(state, Split) or state.dim == case.params["dimension"]:
        return None
    return Outcome((state,) * len(case.results), cuts_of(case, state, range(len(case.states))))


def _top_k(case: Case) -> Outcome | None:
    state = alone(case)
    axis = case.params.get("axis", -1) % len(case.operands[0])
    return Outcome((state,) * len(case.results)) if isinstance(state, Split) and state.dim != axis else None


def _leading(inner: int) -> Rule:
    """Independent problems along all but the last `inner` dimensions, which every operand and result has."""

    def rule(case: Case) -> Outcome | None:
        state = only(case.states)
        if not isinstance(state, Split) or state.dim >= len(case.operands[0]) - inner:
            return None
        return Outcome((state,) * len(case.results), cuts_of(case, state, range(len(case.states))))

    return rule


def _fft(case: Case) -> Outcome | None:
    return _leading(len(case.params["fft_lengths"]))(case)


# Products


def _dot(case: Case) -> Outcome | None:
    contracted, batch = case.params["dimension_numbers"]
    states = case.states
    if any(isinstance(s, Partial) for s in states):
        return Outcome((SUM,)) if only(states) == SUM and INVARIANT in states else None
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


def _convolution(case: Case) -> Outcome | None:
    numbers, states = case.params["dimension_numbers"], case.states
    if any(isinstance(s, Partial) for s in states):
        return Outcome((SUM,)) if only(states) == SUM and INVARIANT in states else None
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


# Random numbers: every key has its own stream, the dimensions that are drawn stand behind those of the keys.


def _keyed(case: Case) -> Outcome | None:
    (state,) = case.states
    keys = min(len(case.operands[0]), len(case.results[0]))
    return Outcome((state,)) if isinstance(state, Split) and state.dim < keys else None


_ELEMENTWISE = re.findall(
    r"\w+",
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh
    digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt imag igamma igammac integer_pow is_finite
    le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi name ne neg nextafter not
    one_minus_square or polygamma polynomial population_count
    pow random_fold_in real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stage stop_gradient sub
    tan tanh threefry2x32 xor zeta
    """,
)

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(("optimization_barrier", "sharding_constraint"), _passed),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "expand_dims": _expand_dims,
    "concatenate": _concatenate,
    "split": _split_apart,
    "unstack": _unstack,
    "stack": _stack,
    "tile": _tile,
    "pad": _pad,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "rev": _rev,
    "reduce_sum": _reduction("sum"),
    "reduce_max": _reduction("max"),
    "reduce_min": _reduction("min"),
    "reduce_or": _reduction("or"),
    "reduce_and": _reduction("and"),
    **dict.fromkeys(("reduce_prod", "reduce_xor", "argmax", "argmin"), _reduction(None)),
    **dict.fromkeys(
        (
            *("reduce_window_sum", "reduce_window_max", "reduce_window_min"),
            *("select_and_scatter_add", "select_and_gather_add"),
        ),
        _window,
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _cumulative),
    "sort": _sort,
    "top_k": _top_k,
    "fft": _fft,
    **dict.fromkeys(("cholesky", "triangular_solve", "lu", "qr", "eigh", "svd", "householder_product"), _leading(2)),
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "gather": gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"), scatter),
    **dict.fromkeys(("random_bits", "random_split", "random_wrap", "random_unwrap", "random_seed"), _keyed),
}
