"""The table of the microbatch analysis: what runs block by block, and which parts of a whole may go through what.

    operation    split operands         parts that it makes       operands that may be parts             for
    mul          elementwise            -                         one of two, the other invariant        sums of numbers
    reduce_max   any other dimension    maxima, if ordered        its operand                            maxima
    reshape      prefix products        -                         its operand                            everything

A part goes through an operation f if f(combine_k x_k) = combine_k f(x_k). That is a property of the operation, of how
parts are combined, and of the dtype: conversions of sums of int8 to float are none, since the sum may wrap first. All
three are data here and are checked by one function                                                     -> outcome

For floats it holds to rounding, and where the whole is no finite number, what comes out is no finite number either:
inf (x_1 + x_2) is inf where inf x_1 + inf x_2 may be nan. What has no entry never runs on blocks, so that any program
stays correct.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from autopar.ir.graph import Op
from autopar.passes.microbatch import rules
from autopar.passes.microbatch.gather import fill_is_lost_in_sums, gather, scatter
from autopar.passes.microbatch.rule_types import (
    ANY,
    BITS,
    COUNTED,
    INEXACT,
    NUMBER,
    ORDERED,
    Case,
    Dtypes,
    Entry,
    Outcome,
    Passes,
    homomorphic,
)
from autopar.passes.microbatch.states import (
    INVARIANT,
    KINDS,
    ZERO,
    Kind,
    Partial,
    Split,
    State,
    fits,
    neutral,
)


def outcome(case: Case) -> Outcome | None:
    """The outcome of the operation's entry; None if it has none, or cannot run on blocks in these states."""
    entry = RULES.get(case.op.name)
    if entry is None:
        return None
    if entry.each:
        return Outcome(case.states[: len(case.results)])
    if any(isinstance(s, Partial) for s in case.states):
        return next((found for one in entry.passes if (found := _passed(entry, one, case)) is not None), None)
    return _split(entry, case)


def _split(entry: Entry, case: Case) -> Outcome | None:
    """On blocks, by the entry's rule, where what it makes is in the entry too."""
    if entry.split is None or not all(entry.dtypes.holds(case.dtype(i)) for i in range(len(case.operands))):
        return None
    found = entry.split(case)
    if found is None or not all(map(partial(_makes, entry, case), found.results, case.result_dtypes)):
        return None
    whole = zip((*case.operands, *case.results), (*case.states, *found.results), strict=True)
    cut = ((case.operands[i], split) for i, split in found.cuts.items())
    splits = [(shape, state) for shape, state in (*whole, *cut) if isinstance(state, Split)]
    return found if all(fits(shape, state, case.count) for shape, state in splits) else None


def _makes(entry: Entry, case: Case, state: State, dtype: object) -> bool:
    """True if a result is no part of a whole, or one that the entry names. Integers of floats are rounded: none."""
    if not isinstance(state, Partial):
        return True
    rounded = not INEXACT.holds(dtype) and any(INEXACT.holds(case.dtype(i)) for i in range(len(case.operands)))
    return state.kind in entry.makes and entry.makes[state.kind].holds(dtype) and not rounded


def _passed(entry: Entry, one: Passes, case: Case) -> Outcome | None:
    """Parts of a whole through an operation, as one of the entry's lines says."""
    letters = one.letters(len(case.states))
    kind = next(s.kind for s in case.states if isinstance(s, Partial))
    if letters is None or kind not in one.kinds:
        return None
    if not all(_FITS[letter](state, kind) for letter, state in zip(letters, case.states, strict=True)):
        return None
    parts = [case.dtype(i) for i, letter in enumerate(letters) if letter == "p"]
    known = all(one.dtypes.holds(dtype) for dtype in (*parts, *case.result_dtypes))
    if not known or not all(homomorphic(kind, a, b) for a in parts for b in case.result_dtypes):
        return None
    if not one.holds(case, kind):
        return None
    results = (Partial(kind),) * len(case.results)
    return _onto(entry, case, results) if "b" in letters else Outcome(results)


def _onto(entry: Entry, case: Case, results: tuple[State, ...]) -> Outcome | None:
    """Blocks added to a part: allowed where, added to zero, they would be one."""
    states = tuple(ZERO if isinstance(s, Partial) else s for s in case.states)
    found = _split(entry, replace(case, states=states))
    return found if found is not None and found.results == results else None


#: Letter of `Passes.operands` -> (state, kind) -> whether an operand in this state may be there.
_FITS = {
    "p": lambda state, kind: state == Partial(kind) or neutral(state, kind),
    "i": lambda state, kind: not isinstance(state, Split | Partial),
    "b": lambda state, kind: not isinstance(state, Partial),
}


def invariant_results(op: Op, states: Sequence[State]) -> tuple[State, ...]:
    """States of the results where all operands are invariant."""
    zero = op.name in _KEEP_ZERO and bool(states) and states[0] == ZERO
    return (ZERO if zero else INVARIANT,) * len(op.outputs)


#: What makes zeros of zeros.
_KEEP_ZERO = ("broadcast_in_dim", "reshape", "convert_element_type", "transpose", "slice", "squeeze", "copy", "neg")


# Lines of entries


def _moves(operands: str) -> tuple[Passes, ...]:
    """Elements are moved, as parts are before they are combined."""
    return (Passes(operands, KINDS, ANY),)


def _sums(operands: str, dtypes: Dtypes = NUMBER) -> tuple[Passes, ...]:
    """Linear in the operands that are parts, one pattern of which is asked for."""
    return tuple(Passes(one, ("sum",), dtypes) for one in operands.split())


def _kept(kind: Kind, dtypes: Dtypes, operands: str = "p") -> tuple[Passes, ...]:
    return (Passes(operands, (kind,), dtypes),)


def _reduced(kind: Kind, dtypes: Dtypes) -> Entry:
    """A reduction that makes parts of a kind, and passes on such."""
    return Entry(rules.reduction(kind), {kind: dtypes}, _kept(kind, dtypes))


def _words(text: str) -> list[str]:
    return re.findall(r"[\w-]+", text)


_ELEMENTWISE = _words("""
    abs acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz cos cosh
    digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac integer_pow is_finite
    le le_to lgamma log log1p log2 logistic lt lt_to mulhi ne nextafter not
    one_minus_square polygamma polynomial population_count
    pow reduce_precision regularized_incomplete_beta rem round rsqrt
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    tan tanh threefry2x32 xor zeta
""")

_PROBLEMS = _words("cholesky triangular_solve lu qr eigh svd householder_product")
_WINDOWS = _words("reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add select_and_gather_add")

RULES: Mapping[str, Entry] = {
    # elementwise
    **dict.fromkeys(_ELEMENTWISE, Entry(rules.elementwise)),
    **dict.fromkeys(("add", "add_any", "sub"), Entry(rules.elementwise, passes=_sums("pp"))),
    "neg": Entry(rules.elementwise, passes=_sums("p")),
    "mul": Entry(rules.elementwise, passes=_sums("pi ip")),
    "div": Entry(rules.elementwise, passes=_sums("pi", INEXACT)),
    "convert_element_type": Entry(rules.elementwise, passes=_sums("p")),
    **dict.fromkeys(("real", "imag", "conj"), Entry(rules.elementwise, passes=_sums("p", INEXACT))),
    "complex": Entry(rules.elementwise, passes=_sums("pp", INEXACT)),
    "max": Entry(rules.elementwise, passes=_kept("max", ORDERED, "pp")),
    "min": Entry(rules.elementwise, passes=_kept("min", ORDERED, "pp")),
    "and": Entry(rules.elementwise, passes=_kept("and", BITS, "pp")),
    "or": Entry(rules.elementwise, passes=_kept("or", BITS, "pp")),
    "select_n": Entry(rules.elementwise, passes=_moves("ip*")),
    **dict.fromkeys(_words("copy name"), Entry(rules.elementwise, passes=_moves("p"))),
    "bitcast_convert_type": Entry(rules.bitcast),
    **dict.fromkeys(("optimization_barrier", "sharding_constraint"), Entry(each=True)),
    # shapes
    "broadcast_in_dim": Entry(rules.broadcast, passes=_moves("pi*")),
    "reshape": Entry(rules.reshape, passes=_moves("pi*")),
    "transpose": Entry(rules.transpose, passes=_moves("p")),
    "squeeze": Entry(rules.squeeze, passes=_moves("p")),
    "concatenate": Entry(rules.concatenate, passes=_moves("p*")),
    "split": Entry(rules.split_apart, passes=_moves("p")),
    "unstack": Entry(rules.unstack, passes=_moves("p")),
    "stack": Entry(rules.stack, passes=_moves("p*")),
    "tile": Entry(rules.tile, passes=_moves("p")),
    "pad": Entry(rules.pad, passes=_moves("pp")),
    "slice": Entry(rules.slices, passes=_moves("p")),
    "dynamic_slice": Entry(rules.dynamic_slice, passes=_moves("pi*")),
    "dynamic_update_slice": Entry(rules.dynamic_update_slice, passes=_moves("ppi*")),
    "rev": Entry(rules.rev, passes=_moves("p")),
    # reductions
    "reduce_sum": _reduced("sum", NUMBER),
    "reduce_max": _reduced("max", ORDERED),
    "reduce_min": _reduced("min", ORDERED),
    "reduce_or": _reduced("or", BITS),
    "reduce_and": _reduced("and", BITS),
    **dict.fromkeys(_words("reduce_prod reduce_xor argmax argmin"), Entry(rules.reduction(None))),
    **dict.fromkeys(_WINDOWS, Entry(rules.window)),
    "cumsum": Entry(rules.cumulative, passes=_sums("p")),
    "cummax": Entry(rules.cumulative, passes=_kept("max", ORDERED)),
    "cummin": Entry(rules.cumulative, passes=_kept("min", ORDERED)),
    **dict.fromkeys(("cumprod", "cumlogsumexp"), Entry(rules.cumulative)),
    "sort": Entry(rules.sort),
    "top_k": Entry(rules.top_k),
    "fft": Entry(rules.fft),
    **dict.fromkeys(_PROBLEMS, Entry(rules.leading(2))),
    # products
    "dot_general": Entry(rules.dot, {"sum": NUMBER}, _sums("pi ip")),
    "conv_general_dilated": Entry(rules.convolution, {"sum": NUMBER}, _sums("pi ip")),
    # gathers and scatters
    "gather": Entry(gather, passes=(Passes("pi", KINDS, ANY, fill_is_lost_in_sums),)),
    "scatter-add": Entry(scatter, {"sum": NUMBER}, _sums("pip pbb")),
    **dict.fromkeys(("scatter", "scatter-mul", "scatter-min", "scatter-max"), Entry(scatter)),
    # random numbers
    **dict.fromkeys(("random_bits", "random_split"), Entry(rules.keyed, dtypes=COUNTED)),
    **dict.fromkeys(("random_seed", "random_wrap", "random_unwrap"), Entry(rules.keyed)),
    "random_fold_in": Entry(rules.fold_in),
}
