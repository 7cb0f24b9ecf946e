"""Rules of our own, where Shardy has none or is stricter than the operation: each a line in factor notation.

The text is made from the operand and result ranks, so that one line serves every shape. Every line is tested against
the compiler: cut by the rule on 8 virtual devices, run, compare (tests/rules/test_own.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autopar.rules.notation import Dims

Shapes = Sequence[Dims]


def _parallel(operands: Shapes, results: Shapes) -> str:
    """Operand i passes to result i untouched: `a0 b0, a1 -> a0 b0, a1`."""
    sides = [" ".join(f"o{i}d{d}" for d in range(len(s))) or "()" for i, s in enumerate(operands)]
    return ", ".join(sides) + " -> " + ", ".join(sides[: len(results)])


def _elementwise(operands: Shapes, results: Shapes) -> str:
    """All dimensions correspond one to one: `a b, a b -> a b`."""
    names = [f"d{i}" for i in range(len(results[0]))]
    side = [" ".join(names if len(s) == len(names) else ["1"] * len(s)) or "()" for s in operands]
    return ", ".join(side) + " -> " + ", ".join(" ".join(names) or "()" for _ in results)


def _appended(operands: Shapes, results: Shapes) -> str:
    """The operand's dimensions lead those of the result, the others are made: `k -> k a b`."""
    keys = [f"k{i}" for i in range(len(operands[0]))]
    made = [f"d{i}" for i in range(len(results[0]) - len(keys))]
    return f"{' '.join(keys) or '()'} -> {' '.join([*keys, *made]) or '()'}"


def _updated(operands: Shapes, results: Shapes) -> str:
    """Dimensions that the update replaces in full correspond, the others are needed whole: `a 1, a 1, () -> a 1`."""
    whole, update = operands[:2]
    side = " ".join(f"d{i}" if n == m else "1" for i, (n, m) in enumerate(zip(whole, update, strict=True))) or "()"
    return f"{side}, {side}" + ", ()" * (len(operands) - 2) + f" -> {side}"


#: primitive -> text of its rule from the shapes of operands and results
OWN_RULES: Mapping[str, Callable[[Shapes, Shapes], str]] = {
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
}
