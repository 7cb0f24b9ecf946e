"""A scan over layers as a chain of shorter scans, so that stages can have some of its layers each.

    y, ys = scan(f, x, xs)    of length L     ->    x1, ys1 = scan(f, x, xs[:n]),  y, ys2 = scan(f, x1, xs[n:])  ...

A scan runs over *layers* if its body has products and most bytes of its stacked operands do not depend on the batch:
parameters, of which one at least is a matrix for each iteration. A scan over positions of a sequence, whose weights are
the same in every iteration, is not split, be its stacked operands the sequence or random keys alone. Scans that read
stacked results of a split scan, as its backward pass does, are split at the same iterations; one that runs in reverse
runs its pieces in reverse.

Stacked results of a split scan stay in pieces: each piece of the backward scan reads the same piece of the forward
scan, so that residuals stay in their stage. Other readers get the concatenated pieces             -> _Builder.whole

The gradient of a weight that all layers share is a carry of the backward scan that starts from zero and is only added
to. Each piece sums from zero, so that no piece waits for the sum of another, and what they sum is added at the end:

    g = scan(+, 0, xs)        ->       g2 = scan(+, 0, xs[n:]),  g1 = scan(+, 0, xs[:n]),  g = g2 + g1    -> _sums
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from autopar import jax_compat
from autopar.cost_models.flops import work
from autopar.ir import control_flow
from autopar.ir.graph import Atom, Copier, Graph, Op, Type, numbered

PieceBounds = tuple[tuple[int, int], ...]
"""(first iteration, last iteration + 1) of every piece."""


def split_scans(graph: Graph, pieces: int, batch: Sequence[int]) -> Graph:
    """The same program with every scan over layers split into `pieces` scans, or as many as it has layers.

    Args:
        graph: the program.
        pieces: scans that each becomes.
        batch: positions of the argument leaves that hold the batch.
    """
    scans = _over_layers(graph, batch) if pieces > 1 else ()
    return _Builder(graph, pieces, frozenset(scans)).graph() if scans else graph


def _over_layers(graph: Graph, batch: Sequence[int]) -> tuple[int, ...]:
    """Indices of the scans of the forward pass that run over layers."""
    varying = {graph.inputs[i] for i in batch}
    scans: list[int] = []
    for op in graph.ops:
        if any(a in varying for a in op.inputs if isinstance(a, int)):
            varying.update(op.outputs)
        if op.name == "scan" and op.phase == "forward" and _is_over_layers(graph, op, varying):
            scans.append(op.index)
    return tuple(scans)


def _is_over_layers(graph: Graph, op: Op, varying: set[int]) -> bool:
    stacked = [a for a in op.inputs[sum(jax_compat.scan_counts(op.params)) :] if isinstance(a, int)]
    parameters = [graph.types[v] for v in stacked if v not in varying]
    parameter_bytes = sum(t.nbytes for t in parameters) if any(t.rank > 2 for t in parameters) else 0
    batch_bytes = sum(graph.types[v].nbytes for v in stacked if v in varying)
    return parameter_bytes > batch_bytes and (op.trips or 0) > 1 and not op.equation.effects and work(graph, op) > 0


def piece_bounds(length: int, pieces: int) -> PieceBounds:
    """Bounds of pieces of about equal length, the longer ones last."""
    count = min(length, pieces)
    ends = [length * k // count for k in range(count + 1)]
    return tuple(itertools.pairwise(ends))


@dataclass(eq=False)
class _Builder:
    """Builds the new program.

    Attributes:
        original: the program before.
        pieces: number of pieces of each scan.
        split: indices of the scans over layers; scans that read their stacked results are split as well.
        types, ops: of the new program; avals: JAX's types of its values.
        pieces_of: stacked result of a split scan -> its pieces.
        slices: (value, bounds of the piece) -> that piece of a value that is not in pieces.
        concatenated: value in pieces -> the whole value, if an operation reads it.
        signatures: numbers of operations that the original does not have.
    """

    original: Graph
    pieces: int
    split: frozenset[int]
    types: list[Type] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    avals: dict[int, Any] = field(default_factory=dict)
    pieces_of: dict[int, tuple[int, ...]] = field(default_factory=dict)
    slices: dict[tuple[int, tuple[int, int]], int] = field(default_factory=dict)
    concatenated: dict[int, int] = field(default_factory=dict)
    signatures: dict[Any, int] = field(default_factory=dict)

    def graph(self) -> Graph:
        self.types = list(self.original.types)
        for op in self.original.ops:
            pairs = ((op.inputs, op.equation.invars), (op.outputs, op.equation.outvars))
            atoms_and_variables = [pair for atoms, variables in pairs for pair in zip(atoms, variables, strict=True)]
            self.avals.update((a, _shaped(v.aval)) for a, v in atoms_and_variables if isinstance(a, int))
        for op in self.original.ops:
            if op.index in self.split or self._reads_split_stack(op):
                self._split_scan_op(op)
            else:
                self.ops.append(replace(op, inputs=tuple(self.whole(a, op) for a in op.inputs)))
        last = self.original.ops[-1]
        outputs = tuple(self.whole(a, last) for a in self.original.outputs)
        return replace(
            self.original, types=tuple(self.types), ops=numbered(self.ops, itertools.count()), outputs=outputs
        )

    def _reads_split_stack(self, op: Op) -> bool:
        """Whether a scan is stacked over stacked results of a split scan."""
        if op.name != "scan" or op.equation.effects:
            return False
        stacked = op.inputs[sum(jax_compat.scan_counts(op.params)) :]
        lengths = [len(self.pieces_of[a]) for a in stacked if isinstance(a, int) and a in self.pieces_of]
        return bool(lengths) and all(n == len(piece_bounds(op.params["length"], self.pieces)) for n in lengths)

    # One scan

    def _split_scan_op(self, op: Op) -> None:
        num_constants, num_carries = jax_compat.scan_counts(op.params)
        constants = [self.whole(a, op) for a in op.inputs[:num_constants]]
        initial = [self.whole(a, op) for a in op.inputs[num_constants : num_constants + num_carries]]
        carry = initial
        stacked = op.inputs[num_constants + num_carries :]
        order = list(enumerate(piece_bounds(op.params["length"], self.pieces)))
        slices = {
            k: [self._operand_piece(a, k, span, op) for a in stacked] for k, span in order
        }  # all before the first piece
        sums: dict[int, list[int]] = (
            {k: [] for k, _ in control_flow.sums(self.original, op)} if op.phase != "forward" else {}
        )
        results_of: dict[int, tuple[int, ...]] = {}
        for k, span in reversed(order) if op.params["reverse"] else order:
            if results_of:
                carry = [initial[i] if i in sums else a for i, a in enumerate(carry)]
            last = len(results_of) == len(order) - 1
            kept = {i: op.outputs[i] for i in range(num_carries) if last and i not in sums}
            results = self._emit_piece(op, [*constants, *carry, *slices[k]], span, kept)
            carry, results_of[k] = list(results[:num_carries]), results[num_carries:]
            for i, parts in sums.items():
                parts.append(results[i])
        for i, parts in sums.items():
            self._emit_sum(parts, op.outputs[i], op)
        for position, value in enumerate(op.outputs[num_carries:]):
            self.pieces_of[value] = tuple(results_of[k][position] for k in range(len(order)))

    def _emit_piece(
        self, op: Op, operands: Sequence[Atom], span: tuple[int, int], kept: Mapping[int, int]
    ) -> tuple[int, ...]:
        """Emits the iterations of one piece; `kept`: position of a carry -> the value that it is after this piece."""
        length = span[1] - span[0]
        types = [self.types[v] for v in op.outputs]
        num_carries = jax_compat.scan_counts(op.params)[1]
        result_types = [*types[:num_carries], *(replace(t, shape=(length, *t.shape[1:])) for t in types[num_carries:])]
        outputs = [kept[i] if i in kept else self._value(t) for i, t in enumerate(result_types)]
        typed_operands = zip(operands, op.equation.invars, strict=True)
        avals = [self.avals[a] if isinstance(a, int) else _shaped(variable.aval) for a, variable in typed_operands]
        shorter_scan = op.equation.replace(params={**op.params, "length": length})
        equation = jax_compat.equation_of(lambda *xs: jax_compat.bind(shorter_scan, xs), avals, op.equation)
        self.avals.update(zip(outputs, (_shaped(v.aval) for v in equation.outvars), strict=True))
        copier = Copier(lambda v: self._value(self.types[v]), {})
        self.ops.append(
            replace(
                op,
                inputs=tuple(operands),
                outputs=tuple(outputs),
                equation=equation,
                signature=self._signature("scan", op.signature, length),
                regions=tuple(map(copier.region, op.regions)),
                trips=length,
            )
        )
        return tuple(outputs)

    def _emit_sum(self, parts: Sequence[int], result: int, op: Op) -> None:
        """Emits the additions of a scan's sums, one for each piece; the last addition defines `result`."""
        total = parts[0]
        for part in parts[1:]:
            defined = result if part == parts[-1] else self._value(self.types[result])
            total = self._emit("add", jax.lax.add, [total, part], defined, op)

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

    def _operand_piece(self, atom: Atom, number: int, span: tuple[int, int], reader: Op) -> Atom:
        """A piece of a stacked operand: that of a split scan, or a slice."""
        if isinstance(atom, int) and atom in self.pieces_of:
            return self.pieces_of[atom][number]
        key = (atom, span) if isinstance(atom, int) else None
        if key is None or key not in self.slices:
            shape = self._type(atom).shape
            type_ = replace(self._type(atom), shape=(span[1] - span[0], *shape[1:]))
            cut = functools.partial(jax.lax.slice_in_dim, start_index=span[0], limit_index=span[1])
            piece = self._emit("slice", cut, [atom], self._value(type_), reader)
            if key is None:
                return piece
            self.slices[key] = piece
        return self.slices[key]

    def whole(self, atom: Atom, reader: Op) -> Atom:
        """A value as a whole, its pieces concatenated."""
        if not isinstance(atom, int) or atom not in self.pieces_of:
            return atom
        if atom not in self.concatenated:
            pieces = list(self.pieces_of[atom])
            result = self._value(self.types[atom])
            self._emit("concatenate", lambda *xs: jax.lax.concatenate(xs, 0), pieces, result, reader)
            self.concatenated[atom] = result
        return self.concatenated[atom]

    def _emit(self, name: str, function: Callable[..., Any], operands: Sequence[Atom], result: int, like: Op) -> int:
        """Emits an operation that defines `result`, with the source line of another one."""
        avals = [self.avals[a] if isinstance(a, int) else a.value for a in operands]
        equation = jax_compat.equation_of(function, avals, like.equation)
        self.avals[result] = _shaped(equation.outvars[0].aval)
        signature = self._signature(name, str(equation.params), tuple(map(str, avals)))
        self.ops.append(
            Op(-1, name, signature, tuple(operands), (result,), equation, like.name_stack, like.phase, like.source)
        )
        return result


def _shaped(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
