"""Tensor parallelism of pairs of products over an axis (Shoeybi et al., 2019, Megatron-LM, section 3).

The forward pass is walked in program order, with the dimension of each activation that the axis cuts, if any:

    activation whole, product with a parameter    a column product: the first free dimension of the parameter that
                                                  divides is cut, and so is the result; of [D,heads,K] the heads
                                                                                                       -> _column
    activation cut along a contracted dimension   a row product: the same dimension of the parameter is cut; the result
                                                  is a sum over the axis, and whole
    other operations on a cut activation          the cut stays, and parameters are cut along with it: biases

Factors of sharding rules say which dimensions belong together; names of parameters play no role. Attention is cut by
heads, as its products of activations keep them. What a cut cannot follow, such as a reshape in which the axis does not
divide the outer dimension, is whole. A parameter has one cut, from the first operation that gives it one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.errors import PinError
from autopar.ir.control_flow import entries, num_carries
from autopar.ir.graph import Atom, Op
from autopar.ir.op_sets import ALL_PRODUCTS
from autopar.ir.train_state import owned_parameter, parameter_copies
from autopar.passes.strategies.cuts import Cut, Cuts, Step
from autopar.rules import Rule


def megatron(step: Step, name: str, size: int, before: Cuts) -> Cut:
    """Parameters in columns and rows, moments of the optimizer and masters as their parameters; other state whole."""
    walk = _Walk(step, size, dict.fromkeys(step.parameters))
    for i in step.parameters:
        walk.weights[step.graph.inputs[i]] = _Weight(i, tuple(range(len(step.shape(i)))))
    walk.visit(step.graph.ops)
    dims = {i: dim for i, dim in walk.dims.items() if dim is not None}
    if not dims:
        raise PinError(
            f"{name}: no product of an activation and a parameter has a dimension that {size} devices divide"
        )
    belongs = {**owned_parameter(step.graph), **parameter_copies(step.graph)}
    owned = {i: dims[j] for i, j in belongs.items() if j in dims}
    values = {v: walk.cut[v] for v in step.products if v in walk.cut}
    return Cut({**dict.fromkeys(step.state), **dims, **owned}, values, frozenset(walk.sums))


@dataclass(frozen=True)
class _Weight:
    """A parameter, or a cast, transpose or broadcast of one.

    Attributes:
        leaf: position of the parameter.
        dims: dimension of the parameter for each dimension; -1: none.
    """

    leaf: int
    dims: tuple[int, ...]


@dataclass(eq=False)
class _Walk:
    """The forward pass, walked in program order.

    Attributes:
        step, size: the step, and the size of the axis.
        dims: parameter -> the dimension that is cut; None as long as there is none.
        weights: value -> the parameter that it is.
        cut: activation -> the dimension that is cut.
        sums: results of row products.
    """

    step: Step
    size: int
    dims: dict[int, int | None]
    weights: dict[int, _Weight] = field(default_factory=dict[int, _Weight])
    cut: dict[int, int] = field(default_factory=dict[int, int])
    sums: set[int] = field(default_factory=set[int])

    def visit(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if op.phase != "forward":
                continue
            if op.regions:
                self._body(op)
            elif not self._is_weight(op):
                self._operation(op)

    def _operation(self, op: Op) -> None:
        """Cuts of the results, and of the parameters that an operation on activations reads."""
        rule = self.step.rules[op.signature]
        if op.name == "reshape":
            self._reshape(op)
            return
        factor = next(self._cut_factors(op, rule), None)
        factor = self._column(op, rule) if factor is None and op.name in ALL_PRODUCTS else factor
        if factor is None:
            return
        for weight, dims in self._operand_weights(op, rule):
            if factor in dims:
                self._choose(weight, dims.index(factor))
        for v, dims in zip(op.outputs, rule.results, strict=True):
            if factor in dims:
                self.cut[v] = dims.index(factor)
            elif op.name in ALL_PRODUCTS:
                self.sums.add(v)

    def _cut_factors(self, op: Op, rule: Rule) -> Iterator[int]:
        """The factors of an operation along which its operands are cut."""
        for atom, dims in zip(op.inputs, rule.operands, strict=True):
            dim = self.cut.get(_value(atom))
            if dim is not None and dims[dim] not in rule.need_replication:
                yield dims[dim]

    def _column(self, op: Op, rule: Rule) -> int | None:
        """The factor of a product with a parameter, and no cut operand, along which the parameter is cut."""
        weights = list(self._operand_weights(op, rule))
        if len(weights) != 1:
            return None
        weight, dims = weights[0]
        chosen = self.dims[weight.leaf]
        if chosen is not None:
            return dims[weight.dims.index(chosen)] if chosen in weight.dims else None
        free = [f for f in dims if f in rule.results[0] and sum(f in operand for operand in rule.operands) == 1]
        return next((f for f in free if self._divides(weight, dims.index(f))), None)

    def _operand_weights(self, op: Op, rule: Rule) -> Iterator[tuple[_Weight, tuple[int, ...]]]:
        """The parameters that an operation reads, and the factors of their dimensions."""
        for atom, dims in zip(op.inputs, rule.operands, strict=True):
            if (weight := self.weights.get(_value(atom))) is not None:
                yield weight, tuple(dims)

    def _divides(self, weight: _Weight, dim: int) -> bool:
        own = weight.dims[dim]
        return own >= 0 and self.step.shape(weight.leaf)[own] % self.size == 0

    def _choose(self, weight: _Weight, dim: int) -> None:
        if self.dims[weight.leaf] is None and self._divides(weight, dim):
            self.dims[weight.leaf] = weight.dims[dim]

    def _is_weight(self, op: Op) -> bool:
        """Whether an operation is a cast, transpose or broadcast of a parameter, whose result then is the parameter."""
        values = [atom for atom in op.inputs if isinstance(atom, int) and self.step.graph.types[atom].rank]
        if len(values) != 1 or values[0] not in self.weights or len(op.outputs) != 1 or op.name == "reshape":
            return False
        rule, weight = self.step.rules[op.signature], self.weights[values[0]]
        of_factor = dict(zip(rule.operands[op.inputs.index(values[0])], weight.dims, strict=True))
        self.weights[op.outputs[0]] = _Weight(weight.leaf, tuple(of_factor.get(f, -1) for f in rule.results[0]))
        return True

    def _reshape(self, op: Op) -> None:
        """The cut of a reshaped array: the outermost of the dimensions that the cut dimension becomes."""
        source, types = _value(op.inputs[0]), self.step.graph.types
        if source in self.weights:
            self._reshape_weight(op, self.weights[source])
        elif (dim := self.cut.get(source)) is not None:
            target = types[op.outputs[0]].shape
            # Row-major order: the dimension that begins where the cut one begins has as many elements from there on.
            end = math.prod(types[source].shape[dim:])
            ends = (d for d, n in enumerate(target) if n > 1 and math.prod(target[d:]) == end)
            first = next(ends, None)
            if first is not None and target[first] % self.size == 0:
                self.cut[op.outputs[0]] = first

    def _reshape_weight(self, op: Op, weight: _Weight) -> None:
        """A reshaped parameter, with the dimensions that the reshape keeps."""
        types = self.step.graph.types
        source, target = types[_value(op.inputs[0])].shape, types[op.outputs[0]].shape
        # a dimension is kept if it has its extent and its place in row-major order
        kept = {(n, math.prod(source[d:])): weight.dims[d] for d, n in enumerate(source) if n > 1}
        dims = tuple(kept.get((n, math.prod(target[d:])), -1) for d, n in enumerate(target))
        self.weights[op.outputs[0]] = _Weight(weight.leaf, dims)

    def _body(self, op: Op) -> None:
        """Through the regions of an operation; those of loops twice, as a carry may be cut after a run."""
        for _ in range(2 if num_carries(op) else 1):
            for entry in entries(op):
                self._enter(_value(entry.operand), entry.value, 1 if entry.kind == "slice" else 0)
            for region in op.regions:
                self.visit(region.ops)
            for v, atom in zip(op.outputs, op.regions[-1].outputs, strict=False):
                if (dim := self.cut.get(_value(atom))) is not None:
                    self.cut[v] = dim + self.step.graph.types[v].rank - self.step.graph.type_of(atom).rank

    def _enter(self, operand: int, value: int, stacked: int) -> None:
        """An operand of an operation as the input of its region, less `stacked` leading dimensions."""
        if (weight := self.weights.get(operand)) is not None:
            self.weights[value] = _Weight(weight.leaf, weight.dims[stacked:])
        elif (dim := self.cut.get(operand)) is not None and dim >= stacked:
            self.cut[value] = dim - stacked


def _value(atom: Atom) -> int:
    return atom if isinstance(atom, int) else -1
