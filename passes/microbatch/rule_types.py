"""What a rule of the table says about one operation on blocks: entries, what they are asked, and what they answer.

An entry of `autopar.passes.microbatch.table` is data but for one function. It says

    split     how split operands go through: a function of shapes and parameters alone               -> Rule
    makes     kinds of partial results that this makes where it reduces the split dimension, each with the dtypes
              for which parts can be combined so
    passes    which operands may be parts, of which kinds and dtypes; the result is a part of the same kind -> Passes

What an entry does not name is refused. Kinds and dtypes are checked in one place (`table.outcome`), so that no rule can
forget them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from numpy.typing import NDArray

from autopar.ir.graph import Op
from autopar.passes.microbatch.states import Invariant, Kind, Shape, Split, State

#: (operand, component of its last dimension) -> the component's values, where they are known when planning.
Column = Callable[[int, int], "NDArray[Any] | None"]


def unknown(operand: int, component: int) -> NDArray[Any] | None:
    """No component is known."""
    return None


@dataclass(frozen=True, slots=True)
class Case:
    """One operation and the states of its operands. Shapes are those of the whole values."""

    op: Op
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    states: tuple[State, ...]
    count: int
    column: Column = unknown

    @property
    def params(self) -> Mapping[str, Any]:
        return self.op.params

    def dtype(self, operand: int) -> Any:
        return self.op.equation.invars[operand].aval.dtype

    @property
    def result_dtypes(self) -> tuple[Any, ...]:
        return tuple(v.aval.dtype for v in self.op.equation.outvars)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an operation runs on one block.

    Attributes:
        results: state of each result.
        cuts: operand -> the cut that a value known whole gets before use.
        params: parameters that differ on a block.
        columns: operand -> (component of the last dimension, its values on any block).
        body: the body of a loop on blocks, of type `autopar.passes.microbatch.regions.Body`.
        block: the operation reads nothing split; this block of what it makes is wanted.
    """

    results: tuple[State, ...]
    cuts: Mapping[int, Split] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[int, tuple[int, NDArray[Any]]] = field(default_factory=dict)
    body: Any = None
    block: Split | None = None


#: Split operands through an operation; None where it cannot run block by block.
Rule = Callable[[Case], Outcome | None]


# Dtypes


@dataclass(frozen=True, slots=True)
class Dtypes:
    """A named class of element types, and why a rule holds for these and no others."""

    name: str
    holds: Callable[[Any], bool]
    reason: str


def _is(*kinds: Any) -> Callable[[Any], bool]:
    return lambda dtype: any(jnp.issubdtype(dtype, kind) for kind in kinds)


ANY = Dtypes("any", lambda dtype: True, "elements are moved, or each is computed by itself")
NUMBER = Dtypes(
    "number", _is(jnp.number), "sums of integers wrap modulo 2^n, and 2^n numbers are a ring as the reals are"
)
INEXACT = Dtypes("inexact", _is(jnp.inexact), "integers round after every operation, and a sum of such is none")
ORDERED = Dtypes("ordered", _is(jnp.integer, jnp.floating, jnp.bool_), "complex numbers have no least one")
BITS = Dtypes("bits", _is(jnp.integer, jnp.bool_), "bitwise operations")
COUNTED = Dtypes(
    "counted", lambda dtype: str(dtype) == "key<fry>", "other generators draw a batch of keys from its first key"
)


def homomorphic(kind: Kind, before: Any, after: Any) -> bool:
    """True if converting parts of one dtype to another and combining them is converting what they combine to.

    Sums of integers are known modulo 2^n: a narrower integer keeps that, a wider one or a float does not. Between
    floats it holds to rounding. Other kinds keep their dtype.
    """
    if before == after or kind != "sum":
        return bool(before == after)
    if all(jnp.issubdtype(dtype, jnp.integer) for dtype in (before, after)):
        return jnp.iinfo(after).bits <= jnp.iinfo(before).bits
    return all(jnp.issubdtype(dtype, jnp.inexact) for dtype in (before, after))


# Entries


@dataclass(frozen=True, slots=True)
class Passes:
    """Operands that may be parts of a whole.

    Attributes:
        operands: one letter for each, with "*" the last repeats. "p" is a part, or an invariant that combines to itself
            (`states.neutral`); "i" is invariant; "b" is of blocks: the split rule, given zero in place of the part,
            makes a part of the same kind.
        kinds, dtypes: of parts for which the result is a part of the same kind.
        holds: what parameters and shapes have to be besides.
    """

    operands: str
    kinds: tuple[Kind, ...]
    dtypes: Dtypes
    holds: Callable[[Case, Kind], bool] = lambda case, kind: True

    def letters(self, count: int) -> str | None:
        """A letter for each of so many operands, None if there are others."""
        plain, star = self.operands.rstrip("*"), self.operands.endswith("*")
        if len(plain) == count or (star and len(plain) - 1 <= count):
            return (plain + plain[-1] * count)[:count]
        return None


@dataclass(frozen=True, slots=True)
class Entry:
    """One primitive of the table.

    Attributes:
        split: split operands through it; None if it never runs on blocks.
        makes: kind of partial results that reducing the split dimension makes -> their dtypes.
        passes: operands that may be parts.
        dtypes: of operands for which `split` holds.
        each: operand i goes to result i and to no other, in whatever state.
    """

    split: Rule | None = None
    makes: Mapping[Kind, Dtypes] = field(default_factory=dict)
    passes: tuple[Passes, ...] = ()
    dtypes: Dtypes = ANY
    each: bool = False


# What rules have in common


def alone(case: Case) -> Split | None:
    """The state of the first operand, if it is split and the others are invariant."""
    state, *rest = case.states
    return state if isinstance(state, Split) and all(isinstance(s, Invariant) for s in rest) else None


def cuts_of(case: Case, state: Split, operands: Sequence[int]) -> dict[int, Split]:
    """Cuts of the invariant operands among these, which have the same dimensions."""
    return {i: state for i in operands if isinstance(case.states[i], Invariant)}


def together(result: State, other: State, wanted: Split, operand: int) -> Outcome | None:
    """The outcome if the other operand is split as wanted, or can be cut so."""
    if isinstance(other, Invariant):
        return Outcome((result,), {operand: wanted})
    return Outcome((result,)) if other == wanted else None
