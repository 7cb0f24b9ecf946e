"""autopar's own rules, where Shardy has none or is stricter than the operation: each a line in factor notation.

The text is made from the ranks of operands and results and the operation's parameters, so that one line serves every
shape. Every line is tested against the compiler: sharded by the rule over 8 virtual devices, run, compared
(tests/rules/test_own.py).
XLA gathers the operands of some operations whatever their sharding; these run on each device's shards -> SHARD_MAPPED
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.ir.op_sets import ATTENTION, RAGGED_PRODUCTS
from autopar.rules.notation import Dims

Shapes = Sequence[Dims]
Params = Mapping[str, Any]


def _identity(operands: Shapes, results: Shapes, params: Params) -> str:
    """Result i is operand i: `a0 b0, a1 -> a0 b0, a1`."""
    sides = [" ".join(f"o{i}d{d}" for d in range(len(s))) or "()" for i, s in enumerate(operands)]
    return ", ".join(sides) + " -> " + ", ".join(sides[: len(results)])


def _elementwise(operands: Shapes, results: Shapes, params: Params) -> str:
    """All dimensions correspond one to one: `a b, a b -> a b`."""
    names = [f"d{i}" for i in range(len(results[0]))]
    side = [" ".join(names if len(s) == len(names) else ["1"] * len(s)) or "()" for s in operands]
    return ", ".join(side) + " -> " + ", ".join(" ".join(names) or "()" for _ in results)


def _append_dims(operands: Shapes, results: Shapes, params: Params) -> str:
    """The result has the operand's dimensions, then new ones: `k -> k a b`."""
    keys = [f"k{i}" for i in range(len(operands[0]))]
    appended = [f"d{i}" for i in range(len(results[0]) - len(keys))]
    return f"{' '.join(keys) or '()'} -> {' '.join([*keys, *appended]) or '()'}"


def _update_slice(operands: Shapes, results: Shapes, params: Params) -> str:
    """Dimensions that the update replaces in full correspond, the others need replication: `a 1, a 1, () -> a 1`."""
    target, update = operands[:2]
    side = " ".join(f"d{i}" if n == m else "1" for i, (n, m) in enumerate(zip(target, update, strict=True))) or "()"
    return f"{side}, {side}" + ", ()" * (len(operands) - 2) + f" -> {side}"


def _batched_matrices(operands: Shapes, results: Shapes, params: Params) -> str:
    """Stacks of matrices, the last two dimensions of the first operand: `b 1 1 -> b 1 1, b 1`."""
    return _batched(len(operands[0]) - 2, operands, results)


def _batched_vectors(operands: Shapes, results: Shapes, params: Params) -> str:
    """Stacks of vectors: `b 1 -> b 1`."""
    return _batched(len(operands[0]) - 1, operands, results)


def _fourier(operands: Shapes, results: Shapes, params: Params) -> str:
    """A Fourier transform of the last dimensions: `b 1 1 -> b 1 1`."""
    return _batched(len(operands[0]) - len(params["fft_lengths"]), operands, results)


def _batched(count: int, operands: Shapes, results: Shapes) -> str:
    """The first `count` dimensions of all operands and results correspond, the others need replication."""

    def side(shapes: Shapes) -> str:
        return ", ".join(" ".join(f"b{d}" if d < count else "1" for d in range(len(s))) or "()" for s in shapes)

    return f"{side(operands)} -> {side(results)}"


def _top_k(operands: Shapes, results: Shapes, params: Params) -> str:
    """The largest elements along one dimension, for each position in the others: `b 1 -> b 1, b 1`."""
    rank = len(operands[0])
    along = params["axis"] % rank
    side = " ".join("1" if d == along else f"b{d}" for d in range(rank))
    return f"{side} -> {side}, {side}"


#: primitive -> function of the shapes of operands and results, and of its parameters, that gives the text of its rule
OWN_RULES: Mapping[str, Callable[[Shapes, Shapes, Params], str]] = {
    "optimization_barrier": _identity,
    "copy": _elementwise,
    "dynamic_update_slice": _update_slice,
    # Counters are hashed element by element, in a loop that Shardy does not analyse.
    "random_bits": _append_dims,
    "random_split": _append_dims,
    "random_fold_in": _elementwise,
    "random_seed": _elementwise,
    "threefry2x32": _elementwise,
    # Series, summed in a loop for each element.
    "igamma": _elementwise,
    "igammac": _elementwise,
    "igamma_grad_a": _elementwise,
    "regularized_incomplete_beta": _elementwise,
    # Permutations of pivots are composed in a loop, for each matrix.
    "lu": _batched_matrices,
    "lu_pivots_to_permutation": _batched_vectors,
    # Shardy gives rows and columns of the square one factor.
    "symmetric_product": _batched_matrices,
    "fft": _fourier,
    "top_k": _top_k,
}

#: Operations that are emitted under `jax.shard_map`, on each device's shards. Of their parameters only those of kernels
#: are shapes (`autopar.rules.pallas`).
SHARD_MAPPED = (
    *("pallas_call", "custom_partitioning", *ATTENTION, *RAGGED_PRODUCTS),
    *("fft", "top_k", "igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta"),
)
