"""A scan over layers as a chain of shorter scans, so that its layers can be dealt out to stages.

    y, ys = scan(f, x, xs)    of length L     ->    x1, ys1 = scan(f, x, xs[:n]),  y, ys2 = scan(f, x1, xs[n:])  ...

A scan runs over *layers* if its body has products and most of the bytes that it is stacked over do not depend on the
batch: parameters. A scan over positions of a sequence, whose weights are the same in every iteration, is left whole.
Scans that read what such a scan stacks, as its backward pass does, are cut at the same places; one that runs in reverse
goes through its pieces in reverse.

What a scan stacks is kept in pieces: the piece of a backward scan reads the piece of the forward scan and never the
whole, so that residuals stay in their stage. Whoever else reads it gets the pieces put together again  -> _Draft.whole
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from autopar import jax_compat
from autopar.cost_models.flops import work
from autopar.ir.graph import Atom, Graph, Op, Region, Type, numbered

Bounds = tuple[tuple[int, int], ...]
"""(first, behind the last) iteration of every piece."""


def cut(graph: Graph, pieces: int, batch: Sequence[int]) -> Graph:
    """The same program with every scan over layers in so many scans, or as many as it has layers.

    Args:
        graph: the program.
        pieces: scans that each becomes.
        batch: positions of the argument leaves that hold the batch.
    """
    chosen = _over_layers(graph, batch) if pieces > 1 else ()
    return _Draft(graph, pieces, frozenset(chosen)).graph() if chosen else graph


def _over_layers(graph: Graph, batch: Sequence[int]) -> tuple[int, ...]:
    """Indices of the scans of the forward pass that run over layers."""
    varying = {graph.inputs[i] for i in batch}
    found: list[int] = []
    for op in graph.ops:
        if any(a in varying for a in op.inputs if isinstance(a, int)):
            varying.update(op.outputs)
        if op.name == "scan" and op.phase == "forward" and _is_over_layers(graph, op, varying):
            found.append(op.index)
    return tuple(found)


def _is_over_layers(graph: Graph, op: Op, varying: set[int]) -> bool:
    stacked = [a for a in op.inputs[sum(jax_compat.scan_counts(op.params)) :] if isinstance(a, int)]
    fixed = sum(graph.types[v].nbytes for v in stacked if v not in varying)
    rest = sum(graph.types[v].nbytes for v in stacked if v in varying)
    return fixed > rest and (op.trips or 0) > 1 and not op.equation.effects and work(graph, op) > 0


def bounds(length: int, pieces: int) -> Bounds:
    """Pieces of about equal length, the longer ones last."""
    count = min(length, pieces)
    ends = [length * k // count for k in range(count + 1)]
    return tuple(itertools.pairwise(ends))


@dataclass(eq=False)
class _Draft:
    """The program under change.

    Attributes:
        original: the program as it was.
        pieces: how many a scan is to have.
        chosen: indices of the scans to cut; those that read what they stack are found on the way.
        types, ops: of the new program; avals: JAX's types of its values.
        kept: value that a scan stacked -> its pieces.
        slices: (value, bounds of the piece) -> that piece of a value that is whole.
        joined: value kept in pieces -> the whole, where someone asked for it.
        signatures: numbers of operations that the original does not have.
    """

    original: Graph
    pieces: int
    chosen: frozenset[int]
    types: list[Type] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    avals: dict[int, Any] = field(default_factory=dict)
    kept: dict[int, tuple[int, ...]] = field(default_factory=dict)
    slices: dict[tuple[int, tuple[int, int]], int] = field(default_factory=dict)
    joined: dict[int, int] = field(default_factory=dict)
    signatures: dict[Any, int] = field(default_factory=dict)

    def graph(self) -> Graph:
        self.types = list(self.original.types)
        for op in self.original.ops:
            pairs = ((op.inputs, op.equation.invars), (op.outputs, op.equation.outvars))
            both = [pair for atoms, variables in pairs for pair in zip(atoms, variables, strict=True)]
            self.avals.update((a, _shaped(v.aval)) for a, v in both if isinstance(a, int))
        for op in self.original.ops:
            if op.index in self.chosen or self._follows(op):
                self._cut(op)
            else:
                self.ops.append(replace(op, inputs=tuple(self.whole(a, op) for a in op.inputs)))
        last = self.original.ops[-1]
        outputs = tuple(self.whole(a, last) for a in self.original.outputs)
        return replace(
            self.original, types=tuple(self.types), ops=numbered(self.ops, itertools.count()), outputs=outputs
        )

    def _follows(self, op: Op) -> bool:
        """A scan that is stacked over what a scan in pieces has stacked."""
        if op.name != "scan" or op.equation.effects:
            return False
        stacked = op.inputs[sum(jax_compat.scan_counts(op.params)) :]
        lengths = [len(self.kept[a]) for a in stacked if isinstance(a, int) and a in self.kept]
        return bool(lengths) and all(n == len(bounds(op.params["length"], self.pieces)) for n in lengths)

    # One scan

    def _cut(self, op: Op) -> None:
        constants, carries = jax_compat.scan_counts(op.params)
        fixed = [self.whole(a, op) for a in op.inputs[:constants]]
        carry = [self.whole(a, op) for a in op.inputs[constants : constants + carries]]
        stacked = op.inputs[constants + carries :]
        order = list(enumerate(bounds(op.params["length"], self.pieces)))
        slices = {k: [self._piece(a, k, span, op) for a in stacked] for k, span in order}  # all before the first piece
        made: dict[int, tuple[int, ...]] = {}
        for k, span in reversed(order) if op.params["reverse"] else order:
            last = len(made) == len(order) - 1
            results = self._shorter(op, [*fixed, *carry, *slices[k]], span, carries, last)
            carry, made[k] = list(results[:carries]), results[carries:]
        for position, value in enumerate(op.outputs[carries:]):
            self.kept[value] = tuple(made[k][position] for k in range(len(order)))

    def _shorter(self, op: Op, operands: Sequence[Atom], span: tuple[int, int], carries: int, last: bool) -> Any:
        """Emit the iterations of one piece; the last piece gives the carries of the whole."""
        length = span[1] - span[0]
        types = [self.types[v] for v in op.outputs]
        fresh = [*types[:carries], *(replace(t, shape=(length, *t.shape[1:])) for t in types[carries:])]
        outputs = [*op.outputs[:carries]] if last else [self._value(t) for t in fresh[:carries]]
        outputs += [self._value(t) for t in fresh[carries:]]
        read = zip(operands, op.equation.invars, strict=True)
        avals = [self.avals[a] if isinstance(a, int) else _shaped(variable.aval) for a, variable in read]
        like = op.equation.replace(params={**op.params, "length": length})
        equation = jax_compat.equation_of(lambda *xs: jax_compat.bind(like, xs), avals, op.equation)
        self.avals.update(zip(outputs, (_shaped(v.aval) for v in equation.outvars), strict=True))
        self.ops.append(
            replace(
                op,
                inputs=tuple(operands),
                outputs=tuple(outputs),
                equation=equation,
                signature=self._signature("scan", op.signature, length),
                regions=tuple(map(self._copied, op.regions)),
                trips=length,
            )
        )
        return tuple(outputs)

    def _copied(self, region: Region) -> Region:
        """A body with values of its own."""
        names: dict[int, int] = {}

        def renewed(values: Sequence[int]) -> tuple[int, ...]:
            names.update((v, self._value(self.types[v])) for v in values)
            return tuple(names[v] for v in values)

        def renamed(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
            return tuple(names.get(a, a) if isinstance(a, int) else a for a in atoms)

        def copied(inner: Region) -> Region:
            inputs = renewed(inner.inputs)
            constants = tuple((renewed([v])[0], array) for v, array in inner.constants)
            ops: list[Op] = []
            for op in inner.ops:
                atoms, regions = renamed(op.inputs), tuple(map(copied, op.regions))
                ops.append(replace(op, inputs=atoms, outputs=renewed(op.outputs), regions=regions))
            return Region(inner.name, inputs, tuple(ops), renamed(inner.outputs), constants)

        return copied(region)

    # Values

    def _type(self, atom: Atom) -> Type:
        return self.types[atom] if isinstance(atom, int) else atom.type

    def _value(self, type_: Type) -> int:
        self.types.append(type_)
        return len(self.types) - 1

    def _signature(self, *key: Any) -> int:
        """A number that no operation of the original has; equal keys share it."""
        if not self.signatures:
            self.signatures[()] = 1 + max(op.signature for op in self.original.walk())
        return self.signatures.setdefault(key, self.signatures[()] + len(self.signatures))

    def _piece(self, atom: Atom, number: int, span: tuple[int, int], at: Op) -> Atom:
        """A piece of a stacked operand: as it was made, or a slice of the whole."""
        if isinstance(atom, int) and atom in self.kept:
            return self.kept[atom][number]
        key = (atom, span) if isinstance(atom, int) else None
        if key is None or key not in self.slices:
            shape = self._type(atom).shape
            type_ = replace(self._type(atom), shape=(span[1] - span[0], *shape[1:]))
            made = self._emit("slice", lambda x: jax.lax.slice_in_dim(x, *span, axis=0), [atom], type_, at)
            if key is None:
                return made
            self.slices[key] = made
        return self.slices[key]

    def whole(self, atom: Atom, at: Op) -> Atom:
        """A value that is read as a whole."""
        if not isinstance(atom, int) or atom not in self.kept:
            return atom
        if atom not in self.joined:
            parts = list(self.kept[atom])
            put = self._emit("concatenate", lambda *xs: jax.lax.concatenate(xs, 0), parts, self.types[atom], at)
            self.joined[atom] = put
        return self.joined[atom]

    def _emit(self, name: str, function: Callable[..., Any], read: Sequence[Atom], type_: Type, at: Op) -> int:
        """One more operation, at the line of another one."""
        avals = [self.avals[a] if isinstance(a, int) else a.value for a in read]
        equation = jax_compat.equation_of(function, avals, at.equation)
        result = self._value(type_)
        self.avals[result] = _shaped(equation.outvars[0].aval)
        signature = self._signature(name, str(equation.params), tuple(map(str, avals)))
        self.ops.append(Op(-1, name, signature, tuple(read), (result,), equation, at.name_stack, at.phase, at.source))
        return result


def _shaped(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
