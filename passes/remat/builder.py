"""Builds a program with rematerialised layers: inserts clones of forward operations and redirects their readers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from autopar import jax_compat
from autopar.ir.graph import Atom, Copier, Graph, Op, Type, numbered, renamed
from autopar.passes.remat.residuals import LayeredProgram, values_of


@dataclass(eq=False)
class Builder:
    """Builds the new program in one call of `rewrite`. Positions are those of the original's operations.

    Attributes:
        inserted: position -> operations that are inserted in front of it.
        clone_of: dropped residual -> its clone.
        behind_barrier: position of a reader -> value -> the result of the barrier that it reads instead.
        barriers: signature of a barrier -> JAX's equation.
    """

    program: LayeredProgram
    types: list[Type] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    inserted: dict[int, list[Op]] = field(default_factory=dict)
    clone_of: dict[int, int] = field(default_factory=dict)
    behind_barrier: dict[int, dict[int, int]] = field(default_factory=dict)
    barriers: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.original, self.layers = self.program.graph, self.program.layers
        self.types = list(self.original.types)
        self.ops = list(self.original.ops)
        self._fresh = count(1 + self.program.last_signature)
        self._signatures: dict[object, int] = {}

    def value(self, type_: Type) -> int:
        self.types.append(type_)
        return len(self.types) - 1

    def signature(self, *key: object) -> int:
        """A number that no operation of the original has; equal keys share it."""
        if key not in self._signatures:
            self._signatures[key] = next(self._fresh)
        return self._signatures[key]

    def graph(self) -> Graph:
        """The program so far: with replaced operands, without dead operations, renumbered."""
        ops: list[Op] = []
        for position, op in enumerate(self.ops):
            ops.extend(self.inserted.get(position, ()))
            ops.append(with_operands(op, self._replacements(position)))
        live = live_ops(ops, self.original.outputs)
        return replace(self.original, types=tuple(self.types), ops=numbered(live, count()))

    def _replacements(self, position: int) -> Mapping[int, int]:
        """Operand of the operation at a position in the original -> the value that it reads instead."""
        if self.program.phase(position) != "backward":
            return {}
        behind_barrier = self.behind_barrier.get(position, {})
        operands = values_of(self.ops[position].inputs)
        return {
            v: self.clone_of.get(v, behind_barrier.get(v, v))
            for v in operands
            if v in self.clone_of or v in behind_barrier
        }


def with_operands(op: Op, names: Mapping[int, int]) -> Op:
    """The operation on other values."""
    if not any(a in names for a in op.inputs if isinstance(a, int)):
        return op
    return replace(op, inputs=renamed(op.inputs, names))


def live_ops(ops: Sequence[Op], outputs: Iterable[Atom]) -> tuple[Op, ...]:
    """Operations that results or side effects need."""
    needed = set(values_of(outputs))
    live: list[Op] = []
    for op in reversed(ops):
        if op.equation.effects or not needed.isdisjoint(op.outputs):
            needed.update([a for a in op.inputs if isinstance(a, int)])
            live.append(op)
    return tuple(reversed(live))


def ops_for(ops: Sequence[Op], values: Iterable[int], available: Set[int]) -> tuple[Op, ...]:
    """The operations that compute some values from available ones, in order."""
    missing = {v for v in values if v not in available}
    needed: list[Op] = []
    for op in reversed(ops):
        if not missing.isdisjoint(op.outputs):
            needed.append(op)
            missing.update(v for v in values_of(op.inputs) if v not in available)
    return tuple(reversed(needed))


def clone(builder: Builder, ops: Sequence[Op], names: dict[int, int]) -> tuple[Op, ...]:
    """Copies of operations on renamed values, part of the backward pass; adds their results to `names`."""
    return tuple(map(Copier(lambda v: builder.value(builder.types[v]), names, _in_backward).op, ops))


def _in_backward(op: Op) -> Op:
    """The operation as a part of the backward pass that recomputes it."""
    return replace(op, phase="backward", name_stack=jax_compat.rematted(op.name_stack))
