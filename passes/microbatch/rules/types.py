"""Input and result of a rule of the microbatch analysis, and the rules of one primitive.

The rules of a primitive in `autopar.passes.microbatch.rules.table` are data, but for one function:

    split               how split operands propagate: a function of shapes and parameters alone           -> Rule
    partial_results     kinds of partial results that the operation yields where it reduces the split dimension, each
                        with the dtypes for which such parts can be combined
    partial_operands    which operands may be partial, of which kinds and dtypes; the result is then partial with the
                        same kind                                                               -> PartialOperands

Anything else is refused. Kinds and dtypes are checked in one place (`table.apply_table`), so that no rule can omit it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from numpy.typing import NDArray

from autopar.ir.graph import Op
from autopar.passes.microbatch.states import Invariant, ReductionKind, Shape, Split, State

#: (operand, component of its last dimension) -> values of the component; None unless they are constant.
ConstantComponent = Callable[[int, int], "NDArray[Any] | None"]


def no_constants(operand: int, component: int) -> NDArray[Any] | None:
    """Says of every component that it is not constant."""
    return None


@dataclass(frozen=True, slots=True)
class Operands:
    """Input of a rule: one operation and the states of its operands.

    Attributes:
        op: the operation.
        shapes, result_shapes: shapes of the whole operands and results.
        states: states of the operands.
        count: number of microbatches.
        constant_component: values of components of index arrays, as far as they are constant.
    """

    op: Op
    shapes: tuple[Shape, ...]
    result_shapes: tuple[Shape, ...]
    states: tuple[State, ...]
    count: int
    constant_component: ConstantComponent = no_constants

    @property
    def params(self) -> Mapping[str, Any]:
        """Parameters of the primitive, for whole values."""
        return self.op.params

    def dtype(self, operand: int) -> Any:
        """Dtype of an operand."""
        return self.op.equation.invars[operand].aval.dtype

    @property
    def result_dtypes(self) -> tuple[Any, ...]:
        """Dtypes of the results."""
        return tuple(v.aval.dtype for v in self.op.equation.outvars)


@dataclass(frozen=True, slots=True)
class RuleResult:
    """Result of a rule: how an operation runs on one block.

    Attributes:
        results: state of each result.
        slices: position of an invariant operand -> how it is sliced before use.
        params: parameters that differ on a block.
        local_indices: position of an operand -> (component of its last dimension, values of the component on any
            block).
        iotas: position of an operand -> number of rows of a block, which the operand counts from 0.
        body: the body of a loop on blocks, a `autopar.passes.microbatch.regions.BlockBody`; for `while` the pair of
            condition and body, for `cond` one per branch.
        result_block: set for an operation without split operands: the block of its result that is computed.
    """

    results: tuple[State, ...]
    slices: Mapping[int, Split] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    local_indices: Mapping[int, tuple[int, NDArray[Any]]] = field(default_factory=dict)
    iotas: Mapping[int, int] = field(default_factory=dict)
    body: Any = None
    result_block: Split | None = None


#: Propagates split operands through an operation; None if it cannot run block by block.
Rule = Callable[[Operands], RuleResult | None]


# Dtypes


@dataclass(frozen=True, slots=True)
class Dtypes:
    """A named class of element types, and why a rule is valid for this class only."""

    name: str
    contains: Callable[[Any], bool]
    reason: str


def _is(*kinds: Any) -> Callable[[Any], bool]:
    return lambda dtype: any(jnp.issubdtype(dtype, kind) for kind in kinds)


ANY = Dtypes("any", lambda dtype: True, "elements are moved, or each is computed independently")
NUMBER = Dtypes(
    "number", _is(jnp.number), "sums of integers wrap modulo 2^n, and 2^n numbers are a ring as the reals are"
)
INEXACT = Dtypes("inexact", _is(jnp.inexact), "integers round after every operation, and a sum of such is none")
ORDERED = Dtypes("ordered", _is(jnp.integer, jnp.floating, jnp.bool_), "complex numbers have no least one")
BITS = Dtypes("bits", _is(jnp.integer, jnp.bool_), "bitwise operations")
THREEFRY_KEYS = Dtypes(
    "threefry keys", lambda dtype: str(dtype) == "key<fry>", "other generators draw a batch of keys from its first key"
)


_LINEAR_BITS = 16  #: of the narrowest float to which conversion counts as linear


def homomorphic(kind: ReductionKind, before: Any, after: Any) -> bool:
    """True if converting the parts and combining them equals converting the combined value.

    Sums of integers are exact modulo 2^n: conversion to a narrower integer preserves that, conversion to a wider one or
    to a float does not. Between floats it is preserved up to rounding, but for floats of less than 16 bits: gradients
    of ordinary size are zero or out of range there. Other kinds must keep their dtype.
    """
    if before == after or kind != "sum":
        return bool(before == after)
    if all(jnp.issubdtype(dtype, jnp.integer) for dtype in (before, after)):
        return jnp.iinfo(after).bits <= jnp.iinfo(before).bits
    if not all(jnp.issubdtype(dtype, jnp.inexact) for dtype in (before, after)):
        return False
    return jnp.issubdtype(after, jnp.complexfloating) or jnp.finfo(after).bits >= _LINEAR_BITS


# Rules of one primitive


@dataclass(frozen=True, slots=True)
class PartialOperands:
    """A pattern of operands that may be partial.

    Attributes:
        pattern: one letter per operand; before "*", the last letter repeats any number of times. "p" is partial, or an
            invariant that combines to itself (`states.combines_to_itself`). "i" is invariant. "b" is invariant or
            split: the split rule, given zero in place of the partial operand, must yield a partial result of the same
            kind.
        kinds, dtypes: of partial operands for which the result is partial with the same kind.
        condition: a further condition on parameters and shapes.
    """

    pattern: str
    kinds: tuple[ReductionKind, ...]
    dtypes: Dtypes
    condition: Callable[[Operands, ReductionKind], bool] = lambda operands, kind: True

    def letters(self, count: int) -> str | None:
        """One letter for each of `count` operands; None if the pattern is for another number."""
        plain, star = self.pattern.rstrip("*"), self.pattern.endswith("*")
        if len(plain) == count or (star and len(plain) - 1 <= count):
            return (plain + plain[-1] * count)[:count]
        return None


@dataclass(frozen=True, slots=True)
class OpRules:
    """Rules of one primitive.

    Attributes:
        split: propagates split operands; None if the primitive never runs on blocks.
        partial_results: kind of partial results that reducing the split dimension yields -> their dtypes.
        partial_operands: patterns of operands that may be partial.
        dtypes: of operands for which `split` is valid.
        identity: result i is operand i, in any state.
    """

    split: Rule | None = None
    partial_results: Mapping[ReductionKind, Dtypes] = field(default_factory=dict)
    partial_operands: tuple[PartialOperands, ...] = ()
    dtypes: Dtypes = ANY
    identity: bool = False


# Helpers of rules


def only_first_split(operands: Operands) -> Split | None:
    """The state of the first operand if it is split and all others are invariant; else None."""
    state, *rest = operands.states
    return state if isinstance(state, Split) and all(isinstance(s, Invariant) for s in rest) else None


def slice_invariants(operands: Operands, state: Split, positions: Sequence[int]) -> dict[int, Split]:
    """The slice `state` for each of these operands that is invariant; they have the same dimensions."""
    return {i: state for i in positions if isinstance(operands.states[i], Invariant)}


def align_operand(result: State, other: State, wanted: Split, operand: int) -> RuleResult | None:
    """The rule result if an operand in state `other` is split as `wanted`, or is invariant and can be sliced so;
    else None.
    """
    if isinstance(other, Invariant):
        return RuleResult((result,), {operand: wanted})
    return RuleResult((result,)) if other == wanted else None
