"""Where it pays to leave partial sums partial.

A product cut along its contracted dimension leaves a partial sum on every device. Summing two such products locally
before communicating turns two all-reduces into one:

    all_reduce(A) + all_reduce(B)  =  all_reduce(A + B)

So partial sums may stay where a *sum* (add, add_any, sub) joins values that are all partial: products, sums of such,
and what is linear in one of them (transpose, negation, widening conversion, scaling by a scalar), each read by nothing
else. This is what makes Megatron's backward pass need one all-reduce for the inputs of q, k and v together.

Where passes repeat (`Graph.repeats`), what they leave to operations that run once is added up over all executions, and
so may stay partial until then: gradients are summed over devices once per step. That holds for products, for sums over
dimensions, for scatters that add to zeros, and through rematerialised bodies and the stacked results of scans -> _left
Not for convolutions: split by parts they are grouped convolutions, of which XLA gathers both operands.

Everything else resolves partial sums at once; what scans carry is whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from autopar.ir.graph import Atom, Constant, Graph, Op, Repeats
from autopar.jax_compat import REMAT, scan_counts

SUMS = ("add", "add_any", "sub")
DOTS = ("dot_general",)
#: Operations whose results can be split into the parts of each device.
SPLIT = (*DOTS, "reduce_sum", "scatter-add")
LINEAR = ("neg", "transpose", "reshape", "squeeze", "copy", "mul", "div", "convert_element_type")


@dataclass(frozen=True)
class Deferral:
    """Operations that may handle partial sums, by index.

    Attributes:
        products: may leave their partial sums.
        sums: may take partial operands; True if their result may stay partial as well.
    """

    products: frozenset[int]
    sums: Mapping[int, bool]


@dataclass
class _Body:
    """Producers and numbers of reads of the values of one body."""

    graph: Graph
    producer: dict[int, Op] = field(default_factory=dict)
    reads: dict[Atom, int] = field(default_factory=dict)
    known: dict[int, bool] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph, ops: Sequence[Op], outputs: Sequence[Atom]) -> _Body:
        body = _Body(graph)
        body.producer.update((value, op) for op in ops for value in op.outputs)
        body.reads.update(Counter(atom for atoms in (*(op.inputs for op in ops), outputs) for atom in atoms))
        return body


@lru_cache(maxsize=4)  # the same for every mesh
def find(graph: Graph) -> Deferral:
    """The sums and products of a program between which partial sums may travel."""
    products: set[int] = set()
    sums: dict[int, bool] = {}
    _find(graph, graph.ops, graph.outputs, products, sums)
    if graph.repeats is not None:
        _left(graph, graph.repeats, products, sums)
    return Deferral(frozenset(products), sums)


def _left(graph: Graph, repeats: Repeats, products: set[int], sums: dict[int, bool]) -> None:
    """Mark what makes values that passes leave to be read once, through constraints, or handed out once."""
    body = _Body.of(graph, graph.ops, graph.outputs)
    kept = {atom for out, atom in enumerate(graph.outputs) if out in repeats.results}
    for op in graph.ops:
        kept.update(a for a in op.inputs if op.index in repeats.ops or op.name != "sharding_constraint")
    made = (v for op in graph.ops if op.index in repeats.ops for v in op.outputs)
    for value in made:
        if value not in kept:
            _leave(body, value, products, sums)


def _leave(body: _Body, value: Atom, products: set[int], sums: dict[int, bool]) -> None:
    """Mark what makes a value that may leave its body as a partial sum."""
    op = body.producer.get(value) if isinstance(value, int) else None
    if op is None:
        return
    operand = linear_operand(body.graph, op)
    if op.index in sums:
        sums[op.index] = True
    elif _splits(body, op):
        products.add(op.index)
    elif operand is not None and body.reads[op.inputs[operand]] == 1:
        _leave(body, op.inputs[operand], products, sums)
    elif op.name in REMAT or (op.name == "scan" and op.outputs.index(value) >= scan_counts(op.params)[1]):
        region = op.regions[0]
        inner, atom = _Body.of(body.graph, region.ops, region.outputs), region.outputs[op.outputs.index(value)]
        if inner.reads.get(atom) == 1:
            _leave(inner, atom, products, sums)


def _splits(body: _Body, op: Op) -> bool:
    """True if an operation can give the parts of every device; a scatter if it adds to zeros."""
    if op.name != "scatter-add":
        return op.name in SPLIT
    zeros = body.producer.get(op.inputs[0]) if isinstance(op.inputs[0], int) else None
    filled = zeros.inputs[0] if zeros is not None and zeros.name == "broadcast_in_dim" else None
    return isinstance(filled, Constant) and not np.any(filled.value)


def _find(graph: Graph, ops: Sequence[Op], outputs: Sequence[Atom], products: set[int], sums: dict[int, bool]) -> None:
    body = _Body.of(graph, ops, outputs)
    for op in ops:
        for region in op.regions:
            _find(graph, region.ops, region.outputs, products, sums)
    for op in ops:
        if _is_sum(body, op):
            sums.setdefault(op.index, False)
            for atom in op.inputs:
                _mark(body, atom, products, sums)


def _mark(body: _Body, atom: Atom, products: set[int], sums: dict[int, bool]) -> None:
    """Follow an operand of a sum back to where its partial sums come from."""
    assert isinstance(atom, int)
    op = body.producer[atom]
    if op.name in DOTS:
        products.add(op.index)
    elif op.name in SUMS:
        sums[op.index] = True
    else:
        _mark(body, op.inputs[linear_operand(body.graph, op) or 0], products, sums)


def _is_sum(body: _Body, op: Op) -> bool:
    if op.name not in SUMS or len(op.inputs) != 2 or op.inputs[0] is op.inputs[1]:
        return False
    shapes = {body.graph.type_of(a).shape for a in op.inputs}
    return len(shapes) == 1 and op.inputs[0] != op.inputs[1] and all(_partial(body, a) for a in op.inputs)


def _partial(body: _Body, atom: Atom) -> bool:
    """True if the value may be a partial sum: read once, and made by something that allows it."""
    if not isinstance(atom, int) or body.reads.get(atom, 0) != 1 or atom not in body.producer:
        return False
    if atom not in body.known:
        op = body.producer[atom]
        operand = linear_operand(body.graph, op)
        body.known[atom] = (
            op.name in DOTS or _is_sum(body, op) or (operand is not None and _partial(body, op.inputs[operand]))
        )
    return body.known[atom]


def linear_operand(graph: Graph, op: Op) -> int | None:
    """The operand in which an operation is linear, all others being scalars; None if there is no such."""
    if op.name not in LINEAR or len(op.outputs) != 1:
        return None
    big = [k for k, a in enumerate(op.inputs) if graph.type_of(a).rank]
    if len(big) != 1 or (op.name == "div" and big != [0]):
        return None
    before, after = graph.type_of(op.inputs[big[0]]), graph.types[op.outputs[0]]
    if after.size != before.size or after.itemsize < before.itemsize or "float" not in after.dtype:
        return None
    return big[0]
