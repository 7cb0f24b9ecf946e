"""Unreduced values: the operations whose partial sums may be left to their consumers.

A product that is cut along its contracted dimension has a partial sum on every device. If two such products are added
on each device before communication, one all-reduce is needed instead of two:

    all_reduce(A) + all_reduce(B)  =  all_reduce(A + B)                                                       -> _find

Partial sums may therefore be operands of a sum (add, add_any, sub) if both operands can be partial. An operand can be
partial if nothing else reads it and it is a dot, another such sum, or linear in such a value: a transpose, a negation,
a widening conversion, a scaling by a scalar -> _partial, linear_operand. Megatron's backward pass thus needs only one
all-reduce for the inputs of q, k and v.

If passes of the program repeat (`Graph.repeats`), the values that they leave to operations that run once are summed
over all executions, and may be partial until then: gradients are reduced over devices once per step. This applies to
products, to sums over dimensions, and to scatters that add to zeros. It applies through rematerialised bodies and
stacked results of scans as well -> _left.

A carry of a scan that starts from zero and is only added to may be partial in all iterations; the operations that read
the result of the loop reduce it -> _accumulators. A loop over microbatches thus reduces gradients once per step, and
the backward pass of a recurrent network those of its weights once per sequence.

All other operations reduce partial sums at once, and all other carries are whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.ir import control_flow
from autopar.ir.graph import Atom, Graph, Op, Repeats
from autopar.ir.on_graph import cached_on_graph
from autopar.ir.op_sets import ADDITIONS, PRODUCTS, RELAYOUTS
from autopar.jax_compat import REMAT, scan_counts

#: Elementwise sums of two operands.
SUMS = (*ADDITIONS, "sub")
#: Products whose partial sums a sum may take.
DOTS = ("dot_general",)
#: Operations whose results can be split into the parts of each device.
SPLIT = (*PRODUCTS, "reduce_sum", "scatter-add")
#: Operations that are linear in one operand if all others are scalars.
LINEAR = (*RELAYOUTS, "neg", "copy", "mul", "div")


@dataclass(frozen=True)
class Deferral:
    """The operations that may have partial sums as results or operands, by index.

    Attributes:
        products: operations whose results may be partial.
        sums: elementwise sums whose operands may be partial -> whether the result may be partial as well.
        accumulators: elementwise sums that add to a carry of a scan which may be partial -> the carry's value in the
            body.
    """

    products: frozenset[int]
    sums: Mapping[int, bool]
    accumulators: Mapping[int, int]

    @cached_property
    def carries(self) -> frozenset[int]:
        """The carries of scans that may be partial, by their values in the body."""
        return frozenset(self.accumulators.values())


@dataclass
class _Marks:
    """The fields of a `Deferral`, while it is made."""

    products: set[int] = field(default_factory=set)
    sums: dict[int, bool] = field(default_factory=dict)
    accumulators: dict[int, int] = field(default_factory=dict)


@dataclass
class _Body:
    """The values of one body.

    Attributes:
        graph: the program.
        producer: value -> the operation of the body that computes it.
        reads: value -> number of reads in the body, as an operand or an output.
        partial: cache of `_partial`.
    """

    graph: Graph
    producer: dict[int, Op] = field(default_factory=dict)
    reads: dict[Atom, int] = field(default_factory=dict)
    partial: dict[int, bool] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph, ops: Sequence[Op], outputs: Sequence[Atom]) -> _Body:
        """The body of these operations and outputs."""
        body = _Body(graph)
        body.producer.update((value, op) for op in ops for value in op.outputs)
        body.reads.update(Counter(atom for atoms in (*(op.inputs for op in ops), outputs) for atom in atoms))
        return body


@cached_on_graph
def find(graph: Graph) -> Deferral:
    """The operations of a program that may have partial sums as results or operands."""
    marks = _Marks()
    for body in reversed(graph.bodies):  # inner ones first
        _find(_Body.of(graph, body.ops, body.outputs), body.ops, marks)
        for op in body.ops:
            if op.name == "scan":
                _accumulators(graph, op, marks)
    if graph.repeats is not None:
        _left(graph, graph.repeats, marks)
    return Deferral(frozenset(marks.products), marks.sums, marks.accumulators)


def sums_of_passes(graph: Graph) -> Iterator[tuple[int, Op]]:
    """Values that repeated passes leave to operations that run once, which read their sums, with what computes them."""
    if graph.repeats is None:
        return
    once = {atom for out, atom in enumerate(graph.outputs) if out not in graph.repeats.results}
    once.update(a for op in graph.ops if op.index not in graph.repeats.ops for a in op.inputs)
    for op in graph.ops:
        if op.index in graph.repeats.ops:
            yield from ((v, op) for v in op.outputs if v in once)


def _accumulators(graph: Graph, op: Op, marks: _Marks) -> None:
    """Mark the sums of a scan's body that add to a carry which starts from zero.

    Nothing else reads the carry, so that it is only known when the loop has ended.
    """
    region = op.regions[0]
    constants, _ = scan_counts(op.params)
    body = _Body.of(graph, region.ops, region.outputs)
    for position, additions in control_flow.sums(graph, op):
        carry, zeros, add = region.inputs[constants + position], op.inputs[constants + position], additions[0]
        parts = [a for a in add.inputs if a != carry]
        alone = len(additions) == 1 and len(parts) == 1 and body.reads.get(parts[0]) == 1
        if alone and graph.types[carry].rank and isinstance(zeros, int) and _leave(body, parts[0], marks):
            marks.accumulators[add.index] = carry


def _left(graph: Graph, repeats: Repeats, marks: _Marks) -> None:
    """Mark the producers of values that repeated passes leave to operations that run once.

    A value that a repeated operation reads must be whole. So must a value that an operation other than a sharding
    constraint reads, or that is returned more than once per step.
    """
    body = _Body.of(graph, graph.ops, graph.outputs)
    kept = {atom for out, atom in enumerate(graph.outputs) if out in repeats.results}
    for op in graph.ops:
        kept.update(a for a in op.inputs if op.index in repeats.ops or op.name != "sharding_constraint")
    repeated = (v for op in graph.ops if op.index in repeats.ops for v in op.outputs)
    for value in repeated:
        if value not in kept:
            _leave(body, value, marks)


def _leave(body: _Body, value: Atom, marks: _Marks) -> bool:
    """Mark the producers of a value that may be partial where it leaves its body. Returns whether there are any."""
    op = body.producer.get(value) if isinstance(value, int) else None
    if op is None:
        return False
    operand = linear_operand(body.graph, op)
    if op.index in marks.sums:
        marks.sums[op.index] = True
        return True
    if _splits(body, op):
        marks.products.add(op.index)
        return True
    if operand is not None and body.reads[op.inputs[operand]] == 1:
        return _leave(body, op.inputs[operand], marks)
    if op.name != REMAT and op.name != "scan":
        return False
    region, position = op.regions[0], op.outputs.index(value)
    if op.name == "scan" and position < control_flow.num_carries(op):
        return region.inputs[scan_counts(op.params)[0] + position] in marks.accumulators.values()
    inner, atom = _Body.of(body.graph, region.ops, region.outputs), region.outputs[position]
    return inner.reads.get(atom) == 1 and _leave(inner, atom, marks)


def _splits(body: _Body, op: Op) -> bool:
    """Whether an operation can return the part of each device; a scatter can if it adds to zeros."""
    return op.name in SPLIT and (op.name != "scatter-add" or body.graph.is_zero(op.inputs[0]))


def _find(body: _Body, ops: Sequence[Op], marks: _Marks) -> None:
    """Add the sums of partial values in a body to `sums`, and their producers to `products`."""
    for op in ops:
        if _is_sum(body, op):
            marks.sums.setdefault(op.index, False)
            for atom in op.inputs:
                _mark(body, atom, marks)


def _mark(body: _Body, atom: Atom, marks: _Marks) -> None:
    """Mark the operation from which the partial operand of a sum comes."""
    assert isinstance(atom, int)
    op = body.producer[atom]
    if op.name in DOTS:
        marks.products.add(op.index)
    elif op.name in SUMS:
        marks.sums[op.index] = True
    else:
        _mark(body, op.inputs[linear_operand(body.graph, op) or 0], marks)


def _is_sum(body: _Body, op: Op) -> bool:
    """Whether an operation is a sum of two distinct values of one shape that may both be partial."""
    if op.name not in SUMS or len(op.inputs) != 2 or op.inputs[0] is op.inputs[1]:
        return False
    shapes = {body.graph.type_of(a).shape for a in op.inputs}
    return len(shapes) == 1 and op.inputs[0] != op.inputs[1] and all(_partial(body, a) for a in op.inputs)


def _partial(body: _Body, atom: Atom) -> bool:
    """Whether a value may be a partial sum: it is read once, and its producer allows it."""
    if not isinstance(atom, int) or body.reads.get(atom, 0) != 1 or atom not in body.producer:
        return False
    if atom not in body.partial:
        op = body.producer[atom]
        operand = linear_operand(body.graph, op)
        body.partial[atom] = (
            op.name in DOTS or _is_sum(body, op) or (operand is not None and _partial(body, op.inputs[operand]))
        )
    return body.partial[atom]


def linear_operand(graph: Graph, op: Op) -> int | None:
    """The position of the operand in which an operation is linear, all others being scalars; None if there is none."""
    if op.name not in LINEAR or len(op.outputs) != 1:
        return None
    big = [k for k, a in enumerate(op.inputs) if graph.type_of(a).rank]
    if len(big) != 1 or (op.name == "div" and big != [0]):
        return None
    before, after = graph.type_of(op.inputs[big[0]]), graph.types[op.outputs[0]]
    if after.size != before.size or after.itemsize < before.itemsize or "float" not in after.dtype:
        return None
    return big[0]
