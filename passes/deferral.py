"""Where it pays to leave partial sums partial.

A product cut along its contracted dimension leaves a partial sum on every device. Summing two such products locally
before communicating turns two all-reduces into one:

    all_reduce(A) + all_reduce(B)  =  all_reduce(A + B)

So partial sums may stay where a *sum* (add, add_any, sub) joins values that are all partial: products, sums of such,
and what is linear in one of them (transpose, negation, widening conversion, scaling by a scalar), each read by nothing
else. This is what makes Megatron's backward pass need one all-reduce for the inputs of q, k and v together.

Everything else resolves partial sums at once; scans do not carry them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.graph import Atom, Graph, Op

SUMS = ("add", "add_any", "sub")
PRODUCTS = ("dot_general",)
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
    reads: dict[int, int] = field(default_factory=dict)
    known: dict[int, bool] = field(default_factory=dict)


def find(graph: Graph) -> Deferral:
    """The sums and products of a program between which partial sums may travel."""
    products: set[int] = set()
    sums: dict[int, bool] = {}
    _find(graph, graph.ops, graph.outputs, products, sums)
    return Deferral(frozenset(products), sums)


def _find(graph: Graph, ops: Sequence[Op], outputs: Sequence[Atom], products: set[int], sums: dict[int, bool]) -> None:
    body = _Body(graph)
    for op in ops:
        for value in op.outputs:
            body.producer[value] = op
        for atom in op.inputs:
            _count(body, atom)
        for region in op.regions:
            _find(graph, region.ops, region.outputs, products, sums)
    for atom in outputs:
        _count(body, atom)
    for op in ops:
        if _is_sum(body, op):
            sums.setdefault(op.index, False)
            for atom in op.inputs:
                _mark(body, atom, products, sums)


def _count(body: _Body, atom: Atom) -> None:
    if isinstance(atom, int):
        body.reads[atom] = body.reads.get(atom, 0) + 1


def _mark(body: _Body, atom: Atom, products: set[int], sums: dict[int, bool]) -> None:
    """Follow an operand of a sum back to where its partial sums come from."""
    assert isinstance(atom, int)
    op = body.producer[atom]
    if op.name in PRODUCTS:
        products.add(op.index)
    elif op.name in SUMS:
        sums[op.index] = True
    else:
        _mark(body, op.inputs[_linear_operand(body, op) or 0], products, sums)


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
        operand = _linear_operand(body, op)
        body.known[atom] = (
            op.name in PRODUCTS or _is_sum(body, op) or (operand is not None and _partial(body, op.inputs[operand]))
        )
    return body.known[atom]


def _linear_operand(body: _Body, op: Op) -> int | None:
    """The operand in which an operation is linear, all others being scalars; None if there is no such."""
    if op.name not in LINEAR or len(op.outputs) != 1:
        return None
    big = [k for k, a in enumerate(op.inputs) if body.graph.type_of(a).rank]
    if len(big) != 1 or (op.name == "div" and big != [0]):
        return None
    before, after = body.graph.type_of(op.inputs[big[0]]), body.graph.types[op.outputs[0]]
    if after.size != before.size or after.itemsize < before.itemsize or "float" not in after.dtype:
        return None
    return big[0]
