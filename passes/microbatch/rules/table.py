"""The table of the microbatch analysis: which primitives run block by block, and which operands may be partial.

    primitive    split operands         partial results           operands that may be partial           for
    mul          elementwise            -                         one of two, the other invariant        sums of numbers
    reduce_max   any other dimension    maxima, if ordered        its operand                            maxima
    reshape      prefix products        -                         its operand                            everything
    pallas_call  derived from it        -                         none

A partial operand may enter an operation f if f(combine_k x_k) = combine_k f(x_k). That depends on the operation, on how
parts are combined, and on the dtype: converting parts of a sum of int8 to float is not allowed, since the sum may wrap
first. All three are data here and are checked by one function                                     -> apply_table

For floats the equation is valid up to rounding. Where the whole value is not finite, the result is not finite either,
but it may be another such value: inf (x_1 + x_2) is inf where inf x_1 + inf x_2 may be nan. A primitive without a row
never runs on blocks, so that every program stays correct.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from autopar.ir.graph import Op
from autopar.ir.op_sets import ADDITIONS, ATTENTION, ELEMENTWISE, LINEAR_UNARY, RARE_ELEMENTWISE, WINDOW_REDUCTIONS
from autopar.passes.microbatch.rules import blockwise, collectives, kernels
from autopar.passes.microbatch.rules.gather import fill_combines_to_itself, gather, scatter
from autopar.passes.microbatch.rules.types import (
    ANY,
    BITS,
    INEXACT,
    NUMBER,
    ORDERED,
    THREEFRY_KEYS,
    Dtypes,
    Operands,
    OpRules,
    PartialOperands,
    RuleResult,
    homomorphic,
)
from autopar.passes.microbatch.states import (
    INVARIANT,
    REDUCTION_KINDS,
    ZERO,
    Partial,
    ReductionKind,
    Split,
    State,
    combines_to_itself,
    is_divisible,
)


def apply_table(operands: Operands) -> RuleResult | None:
    """How the operation runs on blocks by the rules of its primitive; None if it cannot in these states."""
    entry = RULES.get(operands.op.name) or COLLECTIVES.get(operands.op.name)
    if entry is None:
        return None
    if entry.identity:
        return RuleResult(operands.states[: len(operands.result_shapes)])
    if any(isinstance(s, Partial) for s in operands.states):
        return next(
            (r for pattern in entry.partial_operands if (r := apply_partial(entry, pattern, operands)) is not None),
            None,
        )
    return _apply_split(entry, operands)


def _apply_split(entry: OpRules, operands: Operands) -> RuleResult | None:
    """Apply the split rule; None if the result is partial in a way that `entry` does not list, or a dimension does
    not divide.
    """
    if entry.split is None or not all(entry.dtypes.contains(operands.dtype(i)) for i in range(len(operands.shapes))):
        return None
    result = entry.split(operands)
    if result is None or not all(map(partial(_allows_result, entry, operands), result.results, operands.result_dtypes)):
        return None
    values = zip((*operands.shapes, *operands.result_shapes), (*operands.states, *result.results), strict=True)
    sliced = ((operands.shapes[i], split) for i, split in result.slices.items())
    splits = [(shape, state) for shape, state in (*values, *sliced) if isinstance(state, Split)]
    return result if all(is_divisible(shape, state, operands.count) for shape, state in splits) else None


def _allows_result(entry: OpRules, operands: Operands, state: State, dtype: object) -> bool:
    """True if a result is not partial, or partial as `entry` lists. An integer computed from floats is rounded: not
    partial.
    """
    if not isinstance(state, Partial):
        return True
    rounded = not INEXACT.contains(dtype) and any(
        INEXACT.contains(operands.dtype(i)) for i in range(len(operands.shapes))
    )
    return state.kind in entry.partial_results and entry.partial_results[state.kind].contains(dtype) and not rounded


def apply_partial(entry: OpRules, pattern: PartialOperands, operands: Operands) -> RuleResult | None:
    """Apply one pattern of partial operands."""
    letters = pattern.letters(len(operands.states))
    kind = next(s.kind for s in operands.states if isinstance(s, Partial))
    if letters is None or kind not in pattern.kinds:
        return None
    if not all(_ALLOWED_STATE[letter](state, kind) for letter, state in zip(letters, operands.states, strict=True)):
        return None
    parts = [operands.dtype(i) for i, letter in enumerate(letters) if letter == "p"]
    allowed = all(pattern.dtypes.contains(dtype) for dtype in (*parts, *operands.result_dtypes))
    if not allowed or not all(homomorphic(kind, a, b) for a in parts for b in operands.result_dtypes):
        return None
    if not pattern.condition(operands, kind):
        return None
    results = (Partial(kind),) * len(operands.result_shapes)
    return _add_blocks(entry, operands, results) if "b" in letters else RuleResult(results)


def _add_blocks(entry: OpRules, operands: Operands, results: tuple[State, ...]) -> RuleResult | None:
    """Split operands added to a partial one: allowed if, added to zero, they give a partial result of the same kind."""
    states = tuple(ZERO if isinstance(s, Partial) else s for s in operands.states)
    result = _apply_split(entry, replace(operands, states=states))
    return result if result is not None and result.results == results else None


#: Letter of `PartialOperands.pattern` -> (state, kind) -> whether the letter admits an operand in this state.
_ALLOWED_STATE = {
    "p": lambda state, kind: state == Partial(kind) or combines_to_itself(state, kind),
    "i": lambda state, kind: not isinstance(state, Split | Partial),
    "b": lambda state, kind: not isinstance(state, Partial),
}


def invariant_results(op: Op, states: Sequence[State]) -> tuple[State, ...]:
    """States of the results if all operands are invariant."""
    zero = op.name in LINEAR_UNARY and bool(states) and states[0] == ZERO
    return (ZERO if zero else INVARIANT,) * len(op.outputs)


# Parts of rows


def _moves_elements(pattern: str) -> tuple[PartialOperands, ...]:
    """The operation moves elements, which commutes with combining parts of any kind and dtype."""
    return (PartialOperands(pattern, REDUCTION_KINDS, ANY),)


def _linear_in(patterns: str, dtypes: Dtypes = NUMBER) -> tuple[PartialOperands, ...]:
    """Linear in the operands that are partial; several patterns are separated by spaces."""
    return tuple(PartialOperands(pattern, ("sum",), dtypes) for pattern in patterns.split())


def _keeps_kind(kind: ReductionKind, dtypes: Dtypes, pattern: str = "p") -> tuple[PartialOperands, ...]:
    """Commutes with combining parts of this kind."""
    return (PartialOperands(pattern, (kind,), dtypes),)


def _reduction(kind: ReductionKind, dtypes: Dtypes) -> OpRules:
    """A reduction that yields parts of a kind, and takes such parts."""
    return OpRules(blockwise.reduction(kind), {kind: dtypes}, _keeps_kind(kind, dtypes))


def _names_in(text: str) -> list[str]:
    """Names of primitives in a text."""
    return re.findall(r"[\w-]+", text)


_BATCHED_LINALG = _names_in("cholesky lu qr eigh svd householder_product")

RULES: Mapping[str, OpRules] = {
    # elementwise: rules of operations that commute with combining parts follow, and override these
    **dict.fromkeys((*ELEMENTWISE, *RARE_ELEMENTWISE), OpRules(blockwise.elementwise)),
    **dict.fromkeys((*ADDITIONS, "sub"), OpRules(blockwise.elementwise, partial_operands=_linear_in("pp"))),
    "neg": OpRules(blockwise.elementwise, partial_operands=_linear_in("p")),
    "mul": OpRules(blockwise.elementwise, partial_operands=_linear_in("pi ip")),
    "div": OpRules(blockwise.elementwise, partial_operands=_linear_in("pi", INEXACT)),
    "convert_element_type": OpRules(blockwise.elementwise, partial_operands=_linear_in("p")),
    **dict.fromkeys(
        ("real", "imag", "conj"), OpRules(blockwise.elementwise, partial_operands=_linear_in("p", INEXACT))
    ),
    "complex": OpRules(blockwise.elementwise, partial_operands=_linear_in("pp", INEXACT)),
    "max": OpRules(blockwise.elementwise, partial_operands=_keeps_kind("max", ORDERED, "pp")),
    "min": OpRules(blockwise.elementwise, partial_operands=_keeps_kind("min", ORDERED, "pp")),
    "and": OpRules(blockwise.elementwise, partial_operands=_keeps_kind("and", BITS, "pp")),
    "or": OpRules(blockwise.elementwise, partial_operands=_keeps_kind("or", BITS, "pp")),
    "select_n": OpRules(blockwise.elementwise, partial_operands=_moves_elements("ip*")),
    **dict.fromkeys(
        _names_in("copy name xla_metadata_value"), OpRules(blockwise.elementwise, partial_operands=_moves_elements("p"))
    ),
    "bitcast_convert_type": OpRules(blockwise.bitcast),
    **dict.fromkeys(("optimization_barrier", "sharding_constraint"), OpRules(identity=True)),
    # shapes
    "broadcast_in_dim": OpRules(blockwise.broadcast, partial_operands=_moves_elements("pi*")),
    "reshape": OpRules(blockwise.reshape, partial_operands=_moves_elements("pi*")),
    "transpose": OpRules(blockwise.transpose, partial_operands=_moves_elements("p")),
    "squeeze": OpRules(blockwise.squeeze, partial_operands=_moves_elements("p")),
    "concatenate": OpRules(blockwise.concatenate, partial_operands=_moves_elements("p*")),
    "split": OpRules(blockwise.split_array, partial_operands=_moves_elements("p")),
    "unstack": OpRules(blockwise.unstack, partial_operands=_moves_elements("p")),
    "stack": OpRules(blockwise.stack, partial_operands=_moves_elements("p*")),
    "tile": OpRules(blockwise.tile, partial_operands=_moves_elements("p")),
    "pad": OpRules(blockwise.pad, partial_operands=_moves_elements("pp")),
    "slice": OpRules(blockwise.static_slice, partial_operands=_moves_elements("p")),
    "dynamic_slice": OpRules(blockwise.dynamic_slice, partial_operands=_moves_elements("pi*")),
    "dynamic_update_slice": OpRules(blockwise.dynamic_update_slice, partial_operands=_moves_elements("ppi*")),
    "rev": OpRules(blockwise.rev, partial_operands=_moves_elements("p")),
    # reductions
    "reduce_sum": _reduction("sum", NUMBER),
    "reduce_max": _reduction("max", ORDERED),
    "reduce_min": _reduction("min", ORDERED),
    "reduce_or": _reduction("or", BITS),
    "reduce_and": _reduction("and", BITS),
    **dict.fromkeys(_names_in("reduce_prod reduce_xor argmax argmin"), OpRules(blockwise.reduction(None))),
    **dict.fromkeys(WINDOW_REDUCTIONS, OpRules(blockwise.window)),
    "cumsum": OpRules(blockwise.cumulative, partial_operands=_linear_in("p")),
    "cummax": OpRules(blockwise.cumulative, partial_operands=_keeps_kind("max", ORDERED)),
    "cummin": OpRules(blockwise.cumulative, partial_operands=_keeps_kind("min", ORDERED)),
    **dict.fromkeys(("cumprod", "cumlogsumexp"), OpRules(blockwise.cumulative)),
    "sort": OpRules(blockwise.sort),
    "top_k": OpRules(blockwise.top_k),
    "fft": OpRules(blockwise.fft),
    **dict.fromkeys(_BATCHED_LINALG, OpRules(blockwise.batched(2))),
    **dict.fromkeys(("triangular_solve", "tridiagonal_solve"), OpRules(blockwise.linear_system)),
    # products
    "dot_general": OpRules(blockwise.dot, {"sum": NUMBER}, _linear_in("pi ip")),
    "conv_general_dilated": OpRules(blockwise.convolution, {"sum": NUMBER}, _linear_in("pi ip")),
    # kernels
    "custom_partitioning": OpRules(kernels.partitioned_call, {"sum": NUMBER}),
    **dict.fromkeys(ATTENTION, OpRules(kernels.attention, {"sum": NUMBER, "max": ORDERED})),
    # gathers and scatters
    "gather": OpRules(gather, partial_operands=(PartialOperands("pi", REDUCTION_KINDS, ANY, fill_combines_to_itself),)),
    "scatter-add": OpRules(scatter, {"sum": NUMBER}, _linear_in("pip pbb")),
    **dict.fromkeys(("scatter", "scatter-mul", "scatter-min", "scatter-max"), OpRules(scatter)),
    # random numbers
    **dict.fromkeys(("random_bits", "random_split"), OpRules(blockwise.per_key, dtypes=THREEFRY_KEYS)),
    **dict.fromkeys(("random_seed", "random_wrap", "random_unwrap"), OpRules(blockwise.per_key)),
    "random_fold_in": OpRules(blockwise.fold_in),
    # kernels: along the axes of their grid whose runs are independent, as derived from it
    "pallas_call": OpRules(kernels.kernel),
}

#: Collectives in the body of a `shard_map`, on blocks of the shards.
COLLECTIVES: Mapping[str, OpRules] = {
    **dict.fromkeys(
        _names_in("psum psum_invariant ppermute"),
        OpRules(collectives.same_positions, partial_operands=_linear_in("p*")),
    ),
    "pmax": OpRules(collectives.same_positions, partial_operands=_keeps_kind("max", ORDERED, "p*")),
    "pmin": OpRules(collectives.same_positions, partial_operands=_keeps_kind("min", ORDERED, "p*")),
    "all_gather": OpRules(collectives.all_gather, partial_operands=_moves_elements("p")),
    "reduce_scatter": OpRules(collectives.reduce_scatter, partial_operands=_linear_in("p")),
    "all_to_all": OpRules(collectives.all_to_all, partial_operands=_moves_elements("p")),
}
