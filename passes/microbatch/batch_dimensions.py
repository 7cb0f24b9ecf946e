"""Dimensions of values that come from the leading dimension of the batch, in the forward pass.

Factors of sharding rules carry them from operands to results, and strides through reshapes  -> batch_dimensions
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from autopar.ir.control_flow import entries, num_carries
from autopar.ir.graph import Atom, Graph, Op
from autopar.passes.microbatch.batch import infer_batch
from autopar.rules import Rule

CONSTRAINT = "sharding_constraint"  # its rule has no factors: layouts before and after are independent


def batch_dimensions(
    graph: Graph, rules: Mapping[int, Rule], batch: Sequence[int] | None = None
) -> Mapping[int, frozenset[int]]:
    """Value that depends on the batch -> its dimensions that come from the leading dimension of the batch.

    Args:
        graph: the program.
        rules: signature of an operation -> its sharding rule.
        batch: positions of the argument leaves that hold the batch; None: inferred.
    """
    leaves = infer_batch(graph) if batch is None else batch
    return propagated(graph, rules, dict.fromkeys((graph.inputs[i] for i in leaves), frozenset({0})))


def propagated(
    graph: Graph, rules: Mapping[int, Rule], dims: Mapping[int, frozenset[int]]
) -> Mapping[int, frozenset[int]]:
    """Value that depends on the batch -> its dimensions that come from those of some values, `dims`."""
    batch_dims = dict(dims)
    _propagate(graph, graph.ops, rules, batch_dims)
    return batch_dims


def _value(atom: Atom) -> int:
    return atom if isinstance(atom, int) else -1


def _propagate(
    graph: Graph, ops: Sequence[Op], rules: Mapping[int, Rule], batch_dims: dict[int, frozenset[int]]
) -> None:
    for op in ops:
        if op.regions:
            _propagate_body(graph, op, rules, batch_dims)
        elif op.phase == "forward" and any(_value(atom) in batch_dims for atom in op.inputs):
            for v, dims in zip(op.outputs, _results(graph, op, rules[op.signature], batch_dims), strict=True):
                batch_dims[v] = dims


def _results(graph: Graph, op: Op, rule: Rule, batch_dims: Mapping[int, frozenset[int]]) -> Iterator[frozenset[int]]:
    """The dimensions of each result that come from the batch."""
    if op.name == "reshape":
        (value,) = (_value(atom) for atom in op.inputs[:1])
        yield reshaped(graph.types[value].shape, graph.types[op.outputs[0]].shape, batch_dims[value])
        return
    if op.name == CONSTRAINT:
        yield batch_dims[_value(op.inputs[0])]
        return
    factors = {
        dims[d] for atom, dims in zip(op.inputs, rule.operands, strict=True) for d in batch_dims.get(_value(atom), ())
    }
    yield from (frozenset(d for d, factor in enumerate(dims) if factor in factors) for dims in rule.results)


def reshaped(source: Sequence[int], target: Sequence[int], dims: frozenset[int]) -> frozenset[int]:
    """Dimensions of the reshaped array that come from the given dimensions, by their strides.

    A dimension that is merged of a given one and a more minor one counts if it has all of the given one, or its major
    part: of the groups of 2048 tokens that sequences of 1024 are reshaped to, [64,1024] -> [32,2048], dimension 0 alone
    comes from dimension 0.
    """

    def spans(shape: Sequence[int]) -> list[tuple[int, int]]:
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        return [(stride, stride * extent) for stride, extent in zip(strides, shape, strict=True)]

    targets = spans(target)
    from_dims: set[int] = set()
    for a, b in (span for d, span in enumerate(spans(source)) if d in dims):
        overlapping = [d for d, (low, high) in enumerate(targets) if low < b and a < high]
        from_dims.update(d for d in overlapping if d == overlapping[0] or targets[d][0] >= a)
    return frozenset(from_dims)


def _propagate_body(graph: Graph, op: Op, rules: Mapping[int, Rule], batch_dims: dict[int, frozenset[int]]) -> None:
    """Through the regions of an operation; those of loops twice, as carries may depend on the batch after a run."""
    carries = num_carries(op)
    for _ in range(2 if carries else 1):
        for entry in entries(op):
            if (dims := batch_dims.get(_value(entry.operand))) is not None:
                batch_dims[entry.value] = frozenset(d - 1 for d in dims if d) if entry.kind == "slice" else dims
        for region in op.regions:
            _propagate(graph, region.ops, rules, batch_dims)
        body = op.regions[-1]
        carried = [entry.value for entry in entries(op) if entry.region is body and entry.kind == "carry"]
        for k, (v, atom) in enumerate(zip(op.outputs, body.outputs, strict=False)):
            if (dims := batch_dims.get(_value(atom))) is not None:
                stacked = graph.types[v].rank - graph.type_of(atom).rank
                batch_dims[v] = frozenset(d + stacked for d in dims)
                batch_dims.update({carried[k]: dims} if k < carries else {})
