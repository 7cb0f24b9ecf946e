"""Rules of our own, where Shardy has none or is stricter than the operation: each a line in factor notation.

The text is made from the operand and result ranks and the operation's parameters, so that one line serves every shape.
Every line is tested against the compiler: cut by the rule on 8 virtual devices, run, compare (tests/rules/test_own.py).
XLA gathers the operands of some operations whatever their sharding; these run on the pieces of each device     -> LOCAL
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.rules.notation import Dims

Shapes = Sequence[Dims]
Params = Mapping[str, Any]


def _parallel(operands: Shapes, results: Shapes, params: Params) -> str:
    """Operand i passes to result i untouched: `a0 b0, a1 -> a0 b0, a1`."""
    sides = [" ".join(f"o{i}d{d}" for d in range(len(s))) or "()" for i, s in enumerate(operands)]
    return ", ".join(sides) + " -> " + ", ".join(sides[: len(results)])


def _elementwise(operands: Shapes, results: Shapes, params: Params) -> str:
    """All dimensions correspond one to one: `a b, a b -> a b`."""
    names = [f"d{i}" for i in range(len(results[0]))]
    side = [" ".join(names if len(s) == len(names) else ["1"] * len(s)) or "()" for s in operands]
    return ", ".join(side) + " -> " + ", ".join(" ".join(names) or "()" for _ in results)


def _appended(operands: Shapes, results: Shapes, params: Params) -> str:
    """The operand's dimensions lead those of the result, the others are made: `k -> k a b`."""
    keys = [f"k{i}" for i in range(len(operands[0]))]
    made = [f"d{i}" for i in range(len(results[0]) - len(keys))]
    return f"{' '.join(keys) or '()'} -> {' '.join([*keys, *made]) or '()'}"


def _updated(operands: Shapes, results: Shapes, params: Params) -> str:
    """Dimensions that the update replaces in full correspond, the others are needed whole: `a 1, a 1, () -> a 1`."""
    whole, update = operands[:2]
    side = " ".join(f"d{i}" if n == m else "1" for i, (n, m) in enumerate(zip(whole, update, strict=True))) or "()"
    return f"{side}, {side}" + ", ()" * (len(operands) - 2) + f" -> {side}"


def _matrices(operands: Shapes, results: Shapes, params: Params) -> str:
    """Stacks of matrices, the last two dimensions of the first operand: `b 1 1 -> b 1 1, b 1`."""
    return _stacked(len(operands[0]) - 2, operands, results)


def _vectors(operands: Shapes, results: Shapes, params: Params) -> str:
    """Stacks of vectors: `b 1 -> b 1`."""
    return _stacked(len(operands[0]) - 1, operands, results)


def _transformed(operands: Shapes, results: Shapes, params: Params) -> str:
    """A Fourier transform of the last dimensions: `b 1 1 -> b 1 1`."""
    return _stacked(len(operands[0]) - len(params["fft_lengths"]), operands, results)


def _stacked(count: int, operands: Shapes, results: Shapes) -> str:
    """The first `count` dimensions of all correspond, the others are needed whole."""

    def side(shapes: Shapes) -> str:
        return ", ".join(" ".join(f"b{d}" if d < count else "1" for d in range(len(s))) or "()" for s in shapes)

    return f"{side(operands)} -> {side(results)}"


def _selected(operands: Shapes, results: Shapes, params: Params) -> str:
    """The largest along one dimension, for each position in the others: `b 1 -> b 1, b 1`."""
    rank = len(operands[0])
    along = params["axis"] % rank
    side = " ".join("1" if d == along else f"b{d}" for d in range(rank))
    return f"{side} -> {side}, {side}"


#: primitive -> text of its rule from the shapes of operands and results, and its parameters
OWN_RULES: Mapping[str, Callable[[Shapes, Shapes, Params], str]] = {
    "optimization_barrier": _parallel,
    "copy": _elementwise,
    "copy_p": _elementwise,
    "dynamic_update_slice": _updated,
    # Counters are hashed element by element, in a loop that Shardy does not look into.
    "random_bits": _appended,
    "random_split": _appended,
    "random_fold_in": _elementwise,
    "random_seed": _elementwise,
    "threefry2x32": _elementwise,
    # Series that are summed in a loop, for each element.
    "igamma": _elementwise,
    "igammac": _elementwise,
    "igamma_grad_a": _elementwise,
    "regularized_incomplete_beta": _elementwise,
    # Permutations of pivots are followed in a loop, for each matrix.
    "lu": _matrices,
    "lu_pivots_to_permutation": _vectors,
    # Shardy gives rows and columns of the square one factor.
    "symmetric_product": _matrices,
    "fft": _transformed,
    "top_k": _selected,
}

#: Operations that are emitted on the pieces of each device (`jax.shard_map`); none of their parameters is a shape.
LOCAL = ("fft", "top_k", "igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta")
