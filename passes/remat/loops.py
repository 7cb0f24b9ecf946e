"""Rematerialisation of a loop over layers.

The forward scan no longer stacks dropped residuals; it stacks the carries that enter its iterations instead, and the
body of the backward scan recomputes the residuals. That needs no barrier, as compilers do not merge loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar import jax_compat
from autopar.ir.graph import Atom, Op, Region, renamed
from autopar.ir.op_sets import ALL_PRODUCTS
from autopar.passes.remat.builder import Builder, clone, live_ops, ops_for, with_operands
from autopar.passes.remat.residuals import is_user_remat, values_of


def recompute_in_loop(builder: Builder, layer: int, keeps_products: bool) -> None:
    """Recomputes the residuals of a loop over layers in the body of the backward loop."""
    loop = backward_loop(builder, layer, keeps_products)
    if loop is not None:
        position, (q, dropped) = _first_position(builder, layer), loop
        forward, backward = _Loop.of(builder.ops[position]), _Loop.of(builder.ops[q])
        builder.ops[position], builder.ops[q] = _loops_with_recompute(
            builder, forward, backward, dropped, keeps_products
        )


def backward_loop(builder: Builder, layer: int, keeps_products: bool) -> tuple[int, Sequence[int]] | None:
    """Position of the backward loop, and the stacked results that its body can recompute; None if there are none."""
    forward = _Loop.of(builder.ops[_first_position(builder, layer)])
    for q in dict.fromkeys(q for v in forward.stacked for q in builder.program.readers.get(v, ())):
        if builder.program.phase(q) != "backward":  # such as the caller, who is no operation
            continue
        op = builder.ops[q]
        if op.name != "scan" or op.trips != forward.op.trips:
            continue
        backward = _Loop.of(op)
        dropped = [
            j for j in range(len(forward.stacked)) if _is_droppable(builder, forward, j, backward, q, keeps_products)
        ]
        if dropped:
            return q, dropped
    return None


def _first_position(builder: Builder, layer: int) -> int:
    """Position of a layer's first operation."""
    return builder.layers.forward[builder.layers.layers[layer].start]


@dataclass(frozen=True, eq=False)
class _Loop:
    """A scan with the numbers of its constants and carries; its other operands are stacked."""

    op: Op
    constants: int
    carries: int

    @staticmethod
    def of(op: Op) -> _Loop:
        return _Loop(op, *jax_compat.scan_counts(op.params))

    @property
    def body(self) -> Region:
        return self.op.regions[0]

    @property
    def first(self) -> int:
        """Position of the first stacked operand."""
        return self.constants + self.carries

    @property
    def stacked(self) -> tuple[int, ...]:
        """The stacked results."""
        return self.op.outputs[self.carries :]

    @property
    def body_results(self) -> tuple[Atom, ...]:
        """Results of the body that are stacked."""
        return self.body.outputs[self.carries :]


def _is_droppable(
    builder: Builder, forward: _Loop, result: int, backward: _Loop, position: int, keeps_products: bool
) -> bool:
    """Whether only the backward loop reads a stacked result, slice by slice, and its body can recompute it."""
    atom, stacked = forward.body_results[result], forward.stacked[result]
    # What the body only passes through has no producer, and is stacked for nothing but its value.
    producer = next((op for op in forward.body.ops if atom in op.outputs), None)
    if producer is None or atom in _effect_dependent(forward.body.ops):
        return False
    if keeps_products and producer.name in ALL_PRODUCTS:
        return False
    operand_positions = [k for k, a in enumerate(backward.op.inputs) if a == stacked]
    if list(builder.program.readers[stacked]) != [position] or min(operand_positions) < backward.first:
        return False
    # `jax.checkpoint` inside the backward body recomputes from what it reads: that must stay as it is.
    slices = {backward.body.inputs[k] for k in operand_positions}
    return not any(is_user_remat(op) and not slices.isdisjoint(values_of(op.inputs)) for op in backward.body.ops)


def _effect_dependent(ops: Sequence[Op]) -> frozenset[int]:
    """Values that depend on a side effect."""
    values: set[int] = set()
    for op in ops:
        if op.equation.effects or not values.isdisjoint(values_of(op.inputs)):
            values.update(op.outputs)
    return frozenset(values)


def _loops_with_recompute(
    builder: Builder, forward: _Loop, backward: _Loop, dropped: Sequence[int], keeps_products: bool
) -> tuple[Op, Op]:
    """Both loops, with these stacked results recomputed in the body of the backward loop."""
    kept = [j for j in range(len(forward.body_results)) if j not in dropped]
    # reversed, so that of several results that keep one value the first is read
    stacked_in = {forward.body_results[j]: forward.stacked[j] for j in reversed(kept)}
    operands = _RecomputeOperands(builder, forward, backward, stacked_in)
    saved = {v for op in forward.body.ops if keeps_products and op.name in ALL_PRODUCTS for v in op.outputs}
    available = saved | {v for v in operands.stacked_in if isinstance(v, int)}
    recomputed = ops_for(forward.body.ops, values_of(forward.body_results[j] for j in dropped), available)
    own = {v for op in recomputed for v in op.outputs}
    external = dict.fromkeys(v for op in recomputed for v in values_of(op.inputs) if v not in own)
    names = {v: operands.value_in_backward(v) for v in external}
    clones = clone(builder, recomputed, names)
    clone_of = {forward.stacked[j]: names[v] for j in dropped if isinstance(v := forward.body_results[j], int)}
    shorter = _forward_loop(builder, forward, kept, operands)
    return shorter, _loop_with_clones(builder, backward, clone_of, clones, operands)


@dataclass(eq=False)
class _RecomputeOperands:
    """Operands that the body of the backward loop gets in addition, to recompute values of the forward loop.

    Attributes:
        stacked_in: value of the forward body -> the stacked result that keeps it.
        constants, slices: operands that the backward loop gets, each with its value in the body.
        arrays: constants that the backward body gets.
        newly_stacked: values of the forward body that are stacked now, each with the stacked result.
    """

    builder: Builder
    forward: _Loop
    backward: _Loop
    stacked_in: dict[Atom, int]
    constants: list[tuple[Atom, int]] = field(default_factory=list)
    slices: list[tuple[Atom, int]] = field(default_factory=list)
    arrays: list[tuple[int, object]] = field(default_factory=list)
    newly_stacked: list[tuple[int, int]] = field(default_factory=list)

    def value_in_backward(self, value: int) -> int:
        """The value of the backward body that equals a value of the forward body."""
        forward, backward = self.forward, self.backward
        array = dict(forward.body.constants).get(value)
        if array is not None:
            self.arrays.append((self.builder.value(self.builder.types[value]), array))
            return self.arrays[-1][0]
        position = forward.body.inputs.index(value) if value in forward.body.inputs else None
        if position is not None and position < forward.constants:
            return self._body_value(forward.op.inputs[position], range(backward.constants), value, self.constants)
        is_sliced = position is not None and position >= forward.first
        operand = forward.op.inputs[position] if is_sliced and position is not None else self._stacked_result(value)
        return self._body_value(operand, range(backward.first, len(backward.op.inputs)), value, self.slices)

    def _stacked_result(self, value: int) -> int:
        """The stacked result that keeps a value of the forward body."""
        if value not in self.stacked_in:
            type_ = self.builder.types[value]
            stacked = self.builder.value(replace(type_, shape=(self.forward.op.params["length"], *type_.shape)))
            self.stacked_in[value] = stacked
            self.newly_stacked.append((value, stacked))
        return self.stacked_in[value]

    def _body_value(self, operand: Atom, positions: range, value: int, added: list[tuple[Atom, int]]) -> int:
        """The body's value for an operand: that of an equal operand at these positions, or a new one."""
        existing = [(self.backward.op.inputs[k], self.backward.body.inputs[k]) for k in positions]
        for other, inner in (*existing, *added):
            if other is operand or (isinstance(operand, int) and other == operand):
                return inner
        added.append((operand, self.builder.value(self.builder.types[value])))
        return added[-1][1]


def _forward_loop(builder: Builder, forward: _Loop, kept: Sequence[int], operands: _RecomputeOperands) -> Op:
    """The forward loop: without the dropped stacked results, with the carries that its iterations start from."""
    outputs = (
        *forward.op.outputs[: forward.carries],
        *(forward.stacked[j] for j in kept),
        *(s for _, s in operands.newly_stacked),
    )
    body_outputs: tuple[Atom, ...] = (
        *forward.body.outputs[: forward.carries],
        *(forward.body_results[j] for j in kept),
        *(v for v, _ in operands.newly_stacked),
    )
    body = replace(forward.body, ops=live_ops(forward.body.ops, body_outputs), outputs=body_outputs)
    return replace(forward.op, outputs=outputs, regions=(body,), signature=builder.signature(forward.op.index))


def _loop_with_clones(
    builder: Builder, backward: _Loop, clone_of: Mapping[int, int], clones: Sequence[Op], operands: _RecomputeOperands
) -> Op:
    """The backward loop: clones first, then its operations, which read the clones in place of stacked results."""
    clone_at = {
        k: clone_of[a]
        for k, a in enumerate(backward.op.inputs)
        if k >= backward.first and isinstance(a, int) and a in clone_of
    }
    names = {backward.body.inputs[k]: clone for k, clone in clone_at.items()}
    slices = [k for k in range(backward.first, len(backward.op.inputs)) if k not in clone_at]

    def with_added(own: Sequence[Atom], added: int) -> tuple[Atom, ...]:
        constants, stacked = (tuple(pair[added] for pair in pairs) for pairs in (operands.constants, operands.slices))
        middle = own[backward.constants : backward.first]
        return (*own[: backward.constants], *constants, *middle, *(own[k] for k in slices), *stacked)

    ops = (*clones, *(with_operands(op, names) for op in backward.body.ops))
    body = Region(
        backward.body.name,
        tuple(values_of(with_added(backward.body.inputs, 1))),
        ops,
        renamed(backward.body.outputs, names),
        (*backward.body.constants, *operands.arrays),
    )
    equation = jax_compat.scan_equation(
        backward.op.equation, backward.constants + len(operands.constants), backward.carries
    )
    inputs = with_added(backward.op.inputs, 0)
    return replace(
        backward.op, inputs=inputs, regions=(body,), equation=equation, signature=builder.signature(backward.op.index)
    )
