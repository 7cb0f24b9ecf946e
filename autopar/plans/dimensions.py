"""What values of the forward pass, and their dimensions, mean: weights, sequence, experts.

    batch         dimensions from the leading one of the batch          -> autopar.passes.microbatch.batch_dimensions
    sequence      from the other dimensions of the batch, but for the last of three or more: the features
                                                                        -> sequence_dimensions
    experts       from the dimension that a product of activations and weights of several experts shares, followed to
                  the products that dispatch tokens to experts and combine their results
                                                                        -> expert_dimensions
    weights       parameters, and what casts, transposes, reshapes and slices make of one  -> weight_leaves

Factors of sharding rules carry dimensions from value to value.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.control_flow import entries
from autopar.ir.graph import Atom, Graph, Op
from autopar.ir.op_sets import PRODUCTS
from autopar.passes.microbatch.batch_dimensions import CONSTRAINT, propagated, reshaped
from autopar.rules import Rule
from autopar.rules.convolutions import CONVOLUTION

Dimensions = Mapping[int, frozenset[int]]
"""Value -> some of its dimensions."""


def sequence_dimensions(graph: Graph, rules: Mapping[int, Rule], batch: Dimensions) -> Dimensions:
    """The dimensions of activations that come from a sequence, or from rows and columns of an image.

    `batch`: leaves that hold the batch, and values received from other stages -> their dimensions from the batch.
    """
    dims: dict[int, frozenset[int]] = {}
    for value, leading in batch.items():
        rank = graph.types[value].rank
        features = {rank - 1} if rank > 2 else set[int]()
        dims[value] = frozenset(range(rank)) - leading - features
    return propagated(graph, rules, dims)


def expert_dimensions(graph: Graph, rules: Mapping[int, Rule], batch: Dimensions) -> Dimensions:
    """The dimensions of activations along which weights of experts differ.

    `batch`: every value that depends on the batch -> its dimensions from the batch.
    """
    marked: dict[int, frozenset[int]] = {}
    for op in graph.walk():
        if op.name in PRODUCTS and op.phase == "forward":
            rule = rules[op.signature]
            for atom, dims in zip(op.inputs, rule.operands, strict=True):
                if (value := _value(atom)) in batch and (shared := _shared_with_weight(op, rule, batch)):
                    of_experts = frozenset(d for d, factor in enumerate(dims) if factor in shared)
                    marked[value] = marked.get(value, frozenset()) | (of_experts - batch[value])
    if not any(marked.values()):
        return {}
    for op in reversed(list(graph.walk())):
        if op.phase == "forward" and not op.regions:
            _mark_operands(graph, op, rules[op.signature], marked)
    return propagated(graph, rules, marked)


def _shared_with_weight(op: Op, rule: Rule, batch: Dimensions) -> frozenset[int]:
    """Factors of a product that an activation, a weight and the result have."""
    if op.name == CONVOLUTION or all(_value(atom) in batch for atom in op.inputs):
        return frozenset()  # groups of a convolution are channels
    first, *rest = (frozenset(dims) for dims in (*rule.operands, *rule.results))
    return first.intersection(*rest)


def _mark_operands(graph: Graph, op: Op, rule: Rule, marked: dict[int, frozenset[int]]) -> None:
    """Marks the dimensions of operands from which marked dimensions of the results come."""
    for v, result in zip(op.outputs, rule.results, strict=True):
        dims = marked.get(v)
        if not dims:
            continue
        for atom, operand in zip(op.inputs, rule.operands, strict=True):
            if not isinstance(atom, int):
                continue
            if op.name == "reshape":
                sources = reshaped(graph.types[v].shape, graph.types[atom].shape, dims)
            elif op.name == CONSTRAINT:
                sources = dims
            else:
                factors = {result[d] for d in dims}
                sources = frozenset(d for d, factor in enumerate(operand) if factor in factors)
            marked[atom] = marked.get(atom, frozenset()) | sources


def weight_leaves(graph: Graph, batch: Dimensions) -> Mapping[int, int]:
    """Value of the forward pass that is an argument, cast, transposed, reshaped or sliced -> this argument."""
    leaves = {value: value for value in graph.inputs if value not in batch}
    for op in graph.walk():
        for entry in entries(op) if op.regions else ():
            if (leaf := leaves.get(_value(entry.operand))) is not None and entry.kind != "carry":
                leaves[entry.value] = leaf
        if op.phase == "forward" and not op.regions and op.name not in PRODUCTS:
            values = [atom for atom in op.inputs if isinstance(atom, int) and graph.types[atom].rank]
            if len(values) == 1 and values[0] in leaves:
                leaves.update(dict.fromkeys(op.outputs, leaves[values[0]]))
    return leaves


def _value(atom: Atom) -> int:
    return atom if isinstance(atom, int) else -1
