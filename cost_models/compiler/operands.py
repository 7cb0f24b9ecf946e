"""What a compiler does with operands before an operation reads them, as steps of their own.

    products, convolutions      operands transposed into one order of dimensions, once for all readers -> _transposed
    elementwise operations      smaller operands broadcast to the result's shape                       -> broadcast
    products, sums of bf16/f16  operands converted to float32, the result rounded again                -> add_normalized

`new_from` keeps track of which copy of a value such a step reads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from autopar.cost_models.compiler.compiled_program import RESHAPE, ROUND, Frame, Program, Step, free_dims, values
from autopar.cost_models.compiler.fusion import LIGHT
from autopar.ir.graph import Atom, Op, Type
from autopar.ir.op_sets import ELEMENTWISE


def prepared(p: Program, frame: Frame, op: Op, operands: tuple[Atom, ...]) -> Sequence[Atom]:
    """What an operation reads instead of its operands."""
    if op.name in _ORDERS and p.backend.turns_operands:
        order = _ORDERS[op.name]
        swapped = op.outputs[0] in p.swapped
        orders = (order(op, k, 1 - k if swapped else k) for k in range(len(operands)))
        ordered = zip(operands, orders, strict=True)
        return [v for a, order in ordered if isinstance(a, int) for v in _transposed(p, frame, op, a, order)]
    if op.name in ELEMENTWISE and p.graph.types[op.outputs[0]].rank > 1:
        return [*broadcast(p, frame, op, operands)]
    return operands


def _transposed(p: Program, frame: Frame, op: Op, value: int, order: Sequence[int]) -> tuple[int, ...]:
    """An operand transposed into this order of dimensions; no copy where that is their order.

    It is then reshaped to a matrix, which is an alias, but of a cheap value a second one may be computed
    (`autopar.cost_models.compiler.written_values`).
    """
    in_order = list(order) == sorted(order)
    if not order or (in_order and (op.name != "dot_general" or p.behind(value) not in p.cheap)):
        return (value,)
    return made_once(p, frame, op, RESHAPE if in_order else "turn", tuple(order), (value,), again=not in_order)


def made_once(
    p: Program,
    frame: Frame,
    op: Op,
    name: str,
    what: Hashable,
    inputs: tuple[int, ...],
    type_: Type | None = None,
    *,
    again: bool = True,
) -> tuple[int, ...]:
    """What is made of a value for all of its readers.

    Readers of other copies of the value share it where those are in the layout of the first, and have one of their own
    where they are not: see `Program.transposed_again`.

    Args:
        p, frame: to which the step is added.
        op: the operation that reads it.
        name: of the step.
        what: what is done to the value.
        inputs: the value, and what the step reads besides.
        type_: of the result; None: that of the value.
        again: whether readers of other copies may have one of their own.
    """
    value, key = inputs[0], (p.behind(inputs[0]), what)
    if key not in frame.shared:
        frame.shared[key] = new_from(p, value, type_)
        frame.steps.append(Step(op, name, LIGHT, inputs, (frame.shared[key],)))
    first = frame.shared[key]
    earlier, own = p.pieces.get(first), p.tokens[value][1] if value in p.tokens else None
    if not again or own in (None, earlier):
        return (first,)
    if (key, own) not in frame.shared:
        second = frame.shared[key, own] = new_from(p, value, type_)
        p.transposed_again[second] = earlier
        frame.steps.append(Step(op, name, LIGHT, inputs, (second,)))
    return first, frame.shared[key, own]


def broadcast(p: Program, frame: Frame, op: Op, operands: tuple[Atom, ...]) -> Iterator[Atom]:
    """Operands of an elementwise operation as arrays of its shape, one for each smaller operand and shape."""
    shape = p.graph.types[op.outputs[0]].shape
    for original, atom in zip(op.inputs, operands, strict=True):
        type_ = p.graph.type_of(original)
        scalar = not isinstance(atom, int) and not type_.shape
        if type_.shape == shape or not (p.backend.spreads_scalars if scalar else type_.rank):
            yield atom
            continue
        key = broadcast_key(p, original, range(type_.rank), spread := Type(shape, type_.dtype, type_.itemsize))
        if key not in frame.shared:
            frame.shared[key] = p.new(op.outputs[0], spread)
            frame.steps.append(Step(op, "spread", LIGHT, values([atom]), (frame.shared[key],)))
        yield frame.shared[key]


def broadcast_key(p: Program, atom: Atom, dims: Sequence[int], result: Type, behind: Hashable = ((), ())) -> Hashable:
    """What is equal for equal broadcasts, whether they are operations or operands of elementwise ones.

    Args:
        atom: what is broadcast.
        dims: the dimensions of the result that its dimensions become.
        result: the type of the result.
        behind: what has to be there before.
    """
    makers = p.graph.producers
    while (maker := makers.get(atom) if isinstance(atom, int) else None) is not None and _adds_dims(p, maker):
        atom, dims = maker.inputs[0], [dims[d] for d in maker.params["broadcast_dimensions"]]
    source, shape = p.root(atom), p.graph.type_of(atom).shape
    kept = tuple(d for d, n in zip(dims, shape, strict=True) if n > 1)
    return "broadcast", p.behind(source) if isinstance(source, int) else str(source), kept, result, behind


def multiplies(p: Program, op: Op) -> bool:
    """Whether a division is a multiplication by the reciprocal of what is broadcast."""
    if op.name != "div" or not p.backend.has_library or p.graph.types[op.outputs[0]].dtype != "float32":
        return False
    divisor = p.root(op.inputs[1])
    maker = p.graph.producers.get(p.behind(divisor)) if isinstance(divisor, int) else None
    whole = p.graph.type_of(op.inputs[1]).size == p.graph.types[op.outputs[0]].size
    return not whole or (maker is not None and maker.name == "broadcast_in_dim" and not _adds_dims(p, maker))


def _adds_dims(p: Program, op: Op) -> bool:
    """A broadcast that adds nothing but dimensions of one element."""
    return op.name == "broadcast_in_dim" and p.graph.type_of(op.inputs[0]).size == p.graph.types[op.outputs[0]].size


def _dot_order(op: Op, k: int, position: int) -> list[int]:
    """Batch, rows, contracted; batch, contracted, columns. Empty for (batches of) matrices, contracted on either side.

    A batch of one is none, so that its operands are reshaped.

    `position`: that of operand k as the product is made.

    (openxla/xla, xla/service/dot_decomposer.cc.)
    """
    contracted, batch = op.params["dimension_numbers"]
    free, rank = free_dims(op, k), len(op.equation.invars[k].aval.shape)
    if rank <= 2 or (tuple(batch[k]) in ((), (0,)) and max(len(free), len(contracted[k])) <= 1):
        return [*range(rank)] if is_single(op) else []
    return [*batch[k], *free, *contracted[k]] if position == 0 else [*batch[k], *contracted[k], *free]


def is_single(op: Op) -> bool:
    """Whether a product is a batch of one.

    (openxla/xla, xla/hlo/transforms/simplifiers/algebraic_simplifier.cc: `RemoveDegenerateDimensionFromDot`.)
    """
    _, (batch, _) = op.params["dimension_numbers"]
    return bool(batch) and all(op.equation.invars[0].aval.shape[d] == 1 for d in batch)


def _conv_order(op: Op, k: int, _position: int) -> list[int]:
    """Batch, space, features; space, input features, output features."""
    spec = op.params["dimension_numbers"][k]
    return [spec[0], *spec[2:], spec[1]] if k == 0 else [*spec[2:], spec[1], spec[0]]


_ORDERS: Mapping[str, Callable[[Op, int, int], list[int]]] = {
    "dot_general": _dot_order,
    "conv_general_dilated": _conv_order,
}


def add_normalized(p: Program, frame: Frame, step: Step) -> None:
    """Add a product or a reduction; one of half floats in float32, of converted operands, and rounded.

    (openxla/xla, xla/service/float_normalization.cc.)
    """
    inputs = tuple(in_float32(p, frame, step.op, v) if p.is_half(v) else v for v in step.inputs)
    rounded = tuple(v for v in step.outputs if p.is_half(v))
    wide = {v: p.new(v, _wide(p.type_of(v))) for v in rounded}
    outputs = tuple(wide.get(v, v) for v in step.outputs)
    frame.steps.append(Step(step.op, step.name, step.kind, inputs, outputs, step.after))
    frame.steps.extend(Step(step.op, ROUND, LIGHT, (wide[v],), (v,)) for v in rounded)


def in_float32(p: Program, frame: Frame, op: Op, value: int) -> int:
    """The value converted to float32, once for all readers."""
    key = ("widened", p.behind(value))
    if key not in frame.shared:
        frame.shared[key] = new_from(p, value, _wide(p.type_of(value)))
        frame.steps.append(Step(op, "widen", LIGHT, (value,), (frame.shared[key],)))
    return frame.shared[key]


def _wide(half: Type) -> Type:
    return Type(half.shape, "float32", 4)


def new_from(p: Program, value: int, kind: Type | None = None) -> int:
    """A new value of this type (default: the same) with the sharding of a value or of a copy of it."""
    copy = p.new(p.behind(value), kind)
    piece = p.tokens[value][1] if value in p.tokens else p.pieces.get(value)
    if piece is not None:
        p.pieces[copy] = piece
    if value in p.transposed_again:
        p.transposed_again[copy] = p.transposed_again[value]
    return copy
