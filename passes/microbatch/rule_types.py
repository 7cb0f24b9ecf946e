"""One operation on blocks: what a rule of `autopar.passes.microbatch.rules` is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from autopar.graph import Op
from autopar.passes.microbatch.states import Invariant, Shape, Split, State

#: (operand, component of its last dimension) -> the component's values, where they are known when planning.
Column = Callable[[int, int], "NDArray[Any] | None"]


def unknown(operand: int, component: int) -> NDArray[Any] | None:
    """No component is known."""
    return None


@dataclass(frozen=True, slots=True)
class Case:
    """One operation and how its operands lie. Shapes are those of the whole values."""

    op: Op
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    states: tuple[State, ...]
    count: int
    column: Column = unknown

    @property
    def params(self) -> Mapping[str, Any]:
        return self.op.params


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


Rule = Callable[[Case], Outcome | None]


def alone(case: Case) -> State | None:
    """The state of the first operand, if the others are invariant."""
    rest = case.states[1:]
    return case.states[0] if all(isinstance(s, Invariant) for s in rest) else None


def cuts_of(case: Case, state: Split, operands: Sequence[int]) -> dict[int, Split]:
    """Cuts of the invariant operands among these, which have the same dimensions."""
    return {i: state for i in operands if isinstance(case.states[i], Invariant)}


def together(result: State, other: State, wanted: Split, operand: int) -> Outcome | None:
    """The outcome if the other operand is split as wanted, or can be cut so."""
    if isinstance(other, Invariant):
        return Outcome((result,), {operand: wanted})
    return Outcome((result,)) if other == wanted else None
