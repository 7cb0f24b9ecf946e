"""What a compiler runs instead of an operation: its expansions and algebraic simplifications, as data.

    operation                       becomes                                           where in XLA

    random_bits (threefry)          a loop of two words, joined where they are read   jax/_src/prng.py
    select_and_scatter_add          positions of the maxima, and a scatter to them    select_and_scatter_expander.cc
    add(x, scatter-add(zeros, u))   scatter-add(x, u)                                 algebraic_simplifier.cc
    x * convert(true or false)      a selection                                       algebraic_simplifier.cc
    transpose(broadcast(x))         broadcast(x)                                      algebraic_simplifier.cc
    reduce(transpose(x))            reduce(x)                                         algebraic_simplifier.cc
    f(transpose(x))                 transpose(f(x)), where that dissolves             reshape_mover.cc
    transpose(f(transpose(x)))      f(x), where the one undoes the other              reshape_mover.cc
    x * 1, x / 1, x + 0, x - 0      x                                                 algebraic_simplifier.cc
    max(x, -inf), min(x, inf)       x                                                 algebraic_simplifier.cc
    slice of all, join with nothing  x                                                algebraic_simplifier.cc
    reduction of extents of 1       a reshape                                         algebraic_simplifier.cc
    reduction of a join             the parts, reduced and combined                   algebraic_simplifier.cc
    dot without contraction         a multiplication of two broadcasts                algebraic_simplifier.cc
    dot of vectors                  a multiplication and a reduction                  algebraic_simplifier.cc
    gather of windows               windows one after the other, and a transpose,     gather_simplifier.cc
                                    which is copied for a loop
    ragged_dot_general              a product of one masked copy per group            ragged_dot_rewriter.cc

Each was read off compiled programs; the paths are those of openxla/xla, except where they say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autopar import jax_compat
from autopar.cost_models.compiler.compiled_program import RENAMINGS, Frame, Program, Step, values
from autopar.cost_models.compiler.fusion import KERNEL, LIGHT, PRODUCT, REDUCTION
from autopar.cost_models.compiler.operands import add_normalized, broadcast, made_once, new_from, prepared
from autopar.ir.graph import Atom, Graph, Op, Type
from autopar.ir.op_sets import (
    ADDITIONS,
    ELEMENTWISE,
    LOGICAL_REDUCTIONS,
    NUMERIC_REDUCTIONS,
    REDUCTIONS,
    SCATTERS,
    XLA_RAGGED_PRODUCTS,
)
from autopar.rules.ragged import batches_rows, contracts_rows

Simplification = Callable[[Program, Frame, Op, tuple[int, ...]], None]
"""Adds the steps of an operation to a frame; the values are those that its steps wait for."""


def simplified(p: Program, op: Op) -> Simplification | None:
    """What adds the steps that a backend runs instead of an operation; None if it runs the operation."""
    return next((simplify for applies, simplify in _TABLE.get(op.name, ()) if applies(p, op)), None)


def alias_of(p: Program, op: Op) -> int | None:
    """The operand whose buffer the result is, if any.

    So is that of a transpose that moves through all that reads it, and of arithmetic with a neutral element.
    """
    neutral = _NEUTRAL.get(op.name)
    if neutral is not None:
        return _without(p, op, *neutral)
    if (part := _joins_nothing(p, op)) is not None:
        return part
    same = _is_renaming(p, op)
    return op.inputs[0] if same and isinstance(op.inputs[0], int) else None


def _is_renaming(p: Program, op: Op) -> bool:
    if op.name == "transpose":
        permutation = tuple(op.params["permutation"])
        dissolves = p.backend.has_library and _Moving(p, permutation).dissolves(op.outputs[0])
        return (
            op.inputs[0] in p.swapped or dissolves or (p.backend.has_library and _undoes(p, op.inputs[0], permutation))
        )
    return op.name in RENAMINGS or _takes_all(op) or (p.backend.has_library and _reduces_nothing(op))


def _reduces_nothing(op: Op) -> bool:
    """A reduction of dimensions of one element, which is a reshape."""
    if op.name not in (*NUMERIC_REDUCTIONS, *LOGICAL_REDUCTIONS):
        return False
    shape = op.equation.invars[0].aval.shape
    return all(shape[d] == 1 for d in op.params["axes"])


def _takes_all(op: Op) -> bool:
    """A slice of everything."""
    return op.name == "slice" and op.equation.invars[0].aval.shape == op.equation.outvars[0].aval.shape


def _joins_nothing(p: Program, op: Op) -> int | None:
    """The only operand of a join that is not empty."""
    parts = [atom for atom in op.inputs if p.graph.type_of(atom).size] if op.name == "concatenate" else []
    return parts[0] if len(parts) == 1 and isinstance(parts[0], int) else None


#: Operation -> its neutral element, and the positions of operands that may be that.
_NEUTRAL: Mapping[str, tuple[float, tuple[int, ...]]] = {
    "mul": (1.0, (0, 1)),
    "div": (1.0, (1,)),
    **dict.fromkeys(ADDITIONS, (0.0, (0, 1))),
    "sub": (0.0, (1,)),
    "max": (-math.inf, (0, 1)),
    "min": (math.inf, (0, 1)),
}


def _without(p: Program, op: Op, element: float, positions: tuple[int, ...]) -> int | None:
    """The operand that arithmetic leaves as it is."""
    for k in positions:
        other = op.inputs[1 - k]
        if not isinstance(other, int) or not _is_everywhere(p, op.inputs[k], element):
            continue
        if p.graph.types[other] == p.graph.types[op.outputs[0]]:
            return other
    return None


def _is_everywhere(p: Program, atom: Atom, element: float) -> bool:
    """Whether an atom is a constant that is the same everywhere."""
    if isinstance(atom, int):
        maker = p.graph.producers.get(atom)
        if maker is None or maker.name not in ("broadcast_in_dim", "convert_element_type"):
            return False
        return _is_everywhere(p, maker.inputs[0], element)
    return atom.type.rank == 0 and bool(atom.value == element)


@dataclass(frozen=True, eq=False)
class _Moving:
    """Transposes of one permutation, as they move from the operands of elementwise operations to their results.

    (openxla/xla, xla/hlo/transforms/simplifiers/reshape_mover.cc, xla/service/transpose_folding.cc.)
    """

    p: Program
    permutation: tuple[int, ...]
    decided: dict[int, bool] = field(default_factory=dict)
    scatters: bool = False  # scatters take up transposed updates, as those of gathers

    def dissolves(self, value: int) -> bool:
        """Whether it is read, and moves on until reductions, products of matrices and other transposes take it up."""
        waiting, seen = [value], {value}
        while waiting:
            uses = self.p.graph.uses.get(waiting.pop(), ())
            for reader in (use.op for use in uses):
                if reader is None:
                    return False
                if reader.name in ELEMENTWISE and all(map(self.is_transposed, reader.inputs)):
                    waiting.extend(v for v in reader.outputs if v not in seen)
                    seen.update(reader.outputs)
                elif not self._takes_up(reader):
                    return False
            if not uses:
                return False
        return True

    def _takes_up(self, reader: Op) -> bool:
        matrices = reader.name == "dot_general" and len(self.permutation) == 2
        scatters = self.scatters and reader.name in SCATTERS
        return scatters or matrices or reader.name == "transpose" or reader.name in REDUCTIONS

    def is_transposed(self, atom: Atom) -> bool:
        """Whether it is such a transpose, or can as well be made the other way round."""
        if not isinstance(atom, int):
            return True
        waiting, seen = [atom], {atom}
        while waiting and atom not in self.decided:
            maker = self.p.graph.producers.get(waiting.pop())
            if maker is not None and maker.name in ELEMENTWISE:
                made_of = [v for v in values(maker.inputs) if v not in seen and not self.decided.get(v, False)]
                waiting.extend(made_of)
                seen.update(made_of)
            elif maker is None or not self._starts(maker):
                self.decided[atom] = False
        if atom not in self.decided:
            self.decided.update(dict.fromkeys(seen, True))
        return self.decided[atom]

    def _starts(self, maker: Op) -> bool:
        if maker.name == "transpose":
            return tuple(maker.params["permutation"]) == self.permutation
        return maker.name == "broadcast_in_dim" and self.p.graph.type_of(maker.inputs[0]).rank <= 1


def _undoes(p: Program, atom: Atom, permutation: tuple[int, ...]) -> bool:
    """Whether a value is made elementwise of transposes that this permutation undoes."""
    inverse = tuple(permutation.index(d) for d in range(len(permutation)))
    moving, waiting, seen = _Moving(p, inverse), [atom], {atom}
    if not moving.is_transposed(atom):
        return False
    while waiting:
        v = waiting.pop()
        maker = p.graph.producers.get(v) if isinstance(v, int) else None
        if maker is not None and maker.name == "transpose":
            return True
        made_of = [x for x in maker.inputs if x not in seen] if maker is not None and maker.name in ELEMENTWISE else []
        seen.update(made_of)
        waiting.extend(made_of)
    return False


def hashes(graph: Graph, op: Op) -> bool:
    """Whether an operation draws random bits that are hashes of counters, which any device can make a part of."""
    return op.name == "random_bits" and jax_compat.hashes_keys(graph.type_of(op.inputs[0]).dtype)


# Random bits


def _hashes(p: Program, op: Op) -> bool:
    return p.backend.hashes_in_pairs and hashes(p.graph, op)


def _hashed(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    """A loop makes the two words of every hash; joining them is elementwise."""
    words = (p.new(op.outputs[0]), p.new(op.outputs[0]))
    frame.steps.append(Step(op, "threefry2x32", KERNEL, values(p.operands(op)), words, after))
    frame.steps.append(Step(op, "xor", LIGHT, words, op.outputs, after))


# Maxima over windows


def _expands(p: Program, op: Op) -> bool:
    return p.backend.expands_pools


def _scatter_to_maxima(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    """The gradient of a maximum over windows: positions of the maxima, by arrays of all positions, and a scatter."""
    source, operand = values(p.operands(op))
    shape, pooled = p.type_of(operand).shape, p.type_of(source).shape
    places: list[int] = []
    for dim in range(len(shape)):
        key = ("place", shape, dim)
        if key not in frame.shared:
            frame.shared[key] = p.new(operand, Type(shape, "int32", 4))
            frame.steps.append(Step(op, "iota", KERNEL, (), (frame.shared[key],)))
        places.append(frame.shared[key])
    zeros, greatest = p.new(operand), p.new(source)
    maxima, indices = (tuple(p.new(source, Type(pooled, "int32", 4)) for _ in shape) for _ in range(2))
    frame.steps.append(Step(op, "zeros", KERNEL, (), (zeros,)))
    frame.steps.append(Step(op, "reduce_window", KERNEL, (operand, *places), (greatest, *maxima), after))
    frame.steps.append(Step(op, "concatenate", KERNEL, maxima, indices))
    frame.steps.append(Step(op, "scatter-add", KERNEL, (zeros, *indices, source), op.outputs, after))


# Scatters into zeros that are added


def _accumulates(p: Program, op: Op) -> bool:
    return op.index in p.adds_of_scatters


def _scatter_into_operand(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    """Scatter into the other operand of the add."""
    scattered = p.adds_of_scatters[op.index]
    scatter, other = p.graph.producers[scattered], 1 - op.inputs.index(scattered)
    inputs = values((p.operands(op)[other], *p.operands(scatter)[1:]))
    frame.steps.append(Step(op, scatter.name, KERNEL, inputs, op.outputs, after))


# Transposed broadcasts


def _is_broadcast(p: Program, op: Op) -> bool:
    maker = p.graph.producers.get(op.inputs[0]) if isinstance(op.inputs[0], int) else None
    return p.backend.has_library and maker is not None and maker.name == "broadcast_in_dim"


def _broadcast_again(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    maker = p.graph.producers[values(op.inputs)[0]]
    frame.steps.append(Step(op, maker.name, LIGHT, values(p.operands(maker)), op.outputs, after))


# Products


def _contracts_nothing(p: Program, op: Op) -> bool:
    """A product whose contracted dimensions have one element, or that contracts none."""
    (contracted, _), _ = op.params["dimension_numbers"]
    shape = p.graph.type_of(op.inputs[0]).shape
    return p.backend.reduces_dots and all(shape[d] == 1 for d in contracted)


def _multiply(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    inputs = values([*broadcast(p, frame, op, p.operands(op))])
    frame.steps.append(Step(op, "mul", LIGHT, inputs, op.outputs, after))
    p.cheap.update(op.outputs)


def _is_of_vectors(p: Program, op: Op) -> bool:
    """A product of stacks of vectors, whose dimensions are in the same order."""
    contracted, batch = op.params["dimension_numbers"]
    ranks = [p.graph.type_of(atom).rank for atom in op.inputs]
    alike = contracted[0] == contracted[1] and batch[0] == batch[1]
    return p.backend.reduces_dots and alike and ranks == [len(contracted[0]) + len(batch[0])] * 2


def _multiply_and_reduce(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    operands = values(p.operands(op))
    products = new_from(p, operands[0])
    frame.steps.append(Step(op, "mul", LIGHT, operands, (products,)))
    add_normalized(p, frame, Step(op, "reduce_sum", REDUCTION, (products,), op.outputs, after))


def _is_masked(p: Program, op: Op) -> bool:
    return p.backend.masks_groups and not batches_rows(op.params)


def _mask_groups(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    """A product of ragged groups reads its first operand once per group, zero outside of the group.

    Where the ragged dimension is contracted, it reads the second operand so as well. Where it is not, groups are
    contracted along with the rest: they come behind the rows, in a transposed copy. Equal masks and equal masked
    operands, as of a product and its gradients, are made once.
    """
    operands, contracted = p.operands(op), contracts_rows(op.params)
    sizes = values(operands[2:])
    groups, behind = p.graph.type_of(op.inputs[2]).shape[-1], tuple(map(p.behind, sizes))
    read: list[Atom] = [a for k, a in enumerate(operands[:2]) if k and not contracted]
    for value in values(operands[: 1 + contracted]):
        kept, type_ = ("mask", behind), p.type_of(p.behind(value))
        bits = ("bits", behind, type_.shape)
        if bits not in frame.shared:
            frame.shared[bits] = new_from(p, value, Type(type_.shape, "bool", groups))
            frame.steps.append(Step(op, "bits", LIGHT, sizes, (frame.shared[bits],)))
        many = Type(type_.shape, type_.dtype, type_.itemsize * groups)
        for masked in made_once(p, frame, op, "mask", kept, (value, frame.shared[bits]), many):
            transposed = (masked,)
            if not contracted or _is_multiplied(p, p.behind(value)):  # there as soon as the masked copy is
                transposed = made_once(p, frame, op, "turn", "groups", (masked,), many)
            read.extend((masked,) if contracted else transposed)
    add_normalized(p, frame, Step(op, op.name, PRODUCT, values(read), op.outputs, after))


def _is_multiplied(p: Program, value: int) -> bool:
    """Whether the rows of a value are multiplied with the matrices of their groups."""
    readers = (use.op for use in p.graph.uses.get(value, ()))
    return any(op is not None and op.name in XLA_RAGGED_PRODUCTS and not contracts_rows(op.params) for op in readers)


# Gathers


def _leads_with_windows(p: Program, op: Op) -> bool:
    """Dimensions of the windows come before those of the indices in the result; dimensions of extent 1 do not count."""
    shape, windows = p.graph.types[op.outputs[0]].shape, op.params["dimension_numbers"].offset_dims
    of_window = [d in windows for d, n in enumerate(shape) if n > 1]
    return p.backend.transposes_gathers and of_window != sorted(of_window)


def _gather_and_transpose(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    """A loop reads a copy of the transpose in its own order; what else reads it reads the windows as gathered.

    Where reductions and scatters take the transpose up, there is none.
    """
    rank = p.graph.types[op.outputs[0]].rank
    if p.backend.has_library and _Moving(p, tuple(range(rank)), {op.outputs[0]: True}, True).dissolves(op.outputs[0]):
        kind = p.backend.fusion.kind(op)
        frame.steps.append(Step(op, op.name, kind, values(p.operands(op)), op.outputs, after))
        return
    gathered, looped = p.new(op.outputs[0]), [_is_loop(use.op) for use in p.graph.uses.get(op.outputs[0], ())]
    kind = p.backend.fusion.kind(op)
    frame.steps.append(Step(op, op.name, kind, values(p.operands(op)), (gathered,), after))
    if not any(looped):
        frame.steps.append(Step(op, "turn", LIGHT, (gathered,), op.outputs))
    elif all(looped):
        frame.steps.append(Step(op, "copy", KERNEL, (gathered,), op.outputs))
    else:
        transposed = p.new(op.outputs[0])
        frame.steps.append(Step(op, "turn", KERNEL, (gathered,), (transposed,)))
        frame.steps.append(Step(op, "copy", KERNEL, (transposed, gathered), op.outputs))


def _is_loop(reader: Op | None) -> bool:
    return reader is not None and reader.name in ("scan", "while")


# Reductions of joined arrays

#: Reduction -> the operation that combines the reductions of parts.
_COMBINES: Mapping[str, str] = {"reduce_sum": "add", "reduce_max": "max", "reduce_min": "min", "reduce_prod": "mul"}


def _splits(p: Program, op: Op) -> bool:
    """A reduction along the dimension in which its operand is joined."""
    maker = _join_of(p, op)
    return maker is not None and _joined_dim(maker) in op.params["axes"]


def _join_of(p: Program, op: Op) -> Op | None:
    """What joins the operand of a reduction."""
    read = p.operands(op)[0]
    maker = p.graph.producers.get(p.behind(read)) if isinstance(read, int) else None
    joins = maker is not None and maker.name in ("stack", "concatenate") and len(maker.inputs) > 1
    return maker if joins and p.backend.splits_reductions else None


def _joined_dim(join: Op) -> int:
    return join.params["axis"] if join.name == "stack" else join.params["dimension"]


def _reduce_parts(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    """Reduce each part by itself, unless nothing of it is left to reduce, and combine the results."""
    join = _join_of(p, op)
    assert join is not None
    parts: list[Atom] = []
    for part in p.operands(join):
        whole = join.name == "stack" and len(op.params["axes"]) == 1
        if isinstance(part, int) and not whole:
            reduced = p.new(op.outputs[0])
            add_normalized(p, frame, Step(op, op.name, REDUCTION, (part,), (reduced,), after))
            part = reduced
        parts.append(part)
    frame.steps.append(Step(op, _COMBINES[op.name], LIGHT, values(parts), op.outputs, after))
    p.cheap.update(op.outputs)


# Masks


def _masks(p: Program, op: Op) -> bool:
    """A multiplication by what was true or false."""
    return p.backend.selects_masked and any(_mask_of(p, op, k) is not None for k in range(len(op.inputs)))


def _mask_of(p: Program, op: Op, k: int) -> int | None:
    """What an operand of the result's shape is converted from, if a boolean in the same order of dimensions."""
    read = p.operands(op)[k]
    maker = p.graph.producers.get(p.behind(read)) if isinstance(read, int) else None
    if maker is None or maker.name != "convert_element_type" or not isinstance(maker.inputs[0], int):
        return None
    type_ = p.graph.types[maker.inputs[0]]
    return maker.inputs[0] if type_.dtype == "bool" and type_.shape == p.graph.types[op.outputs[0]].shape else None


def _select(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    """Select the other factor, or zero; a copy of what is converted is there all the same."""
    k, mask = next((k, mask) for k in range(len(op.inputs)) if (mask := _mask_of(p, op, k)) is not None)
    factors = prepared(p, frame, op, p.operands(op))
    copies = [v for v in values(factors[k : k + 1]) if v in p.tokens]
    read = values((p.root(mask), *copies, factors[1 - k]))
    frame.steps.append(Step(op, "select_n", LIGHT, read, op.outputs, after))
    p.cheap.update(op.outputs)


_Applies = Callable[[Program, Op], bool]

#: Operation -> when it is simplified, and to what; the first that applies.
_TABLE: Mapping[str, tuple[tuple[_Applies, Simplification], ...]] = {
    "random_bits": ((_hashes, _hashed),),
    "select_and_scatter_add": ((_expands, _scatter_to_maxima),),
    "add": ((_accumulates, _scatter_into_operand),),
    "add_any": ((_accumulates, _scatter_into_operand),),
    "mul": ((_masks, _select),),
    "transpose": ((_is_broadcast, _broadcast_again),),
    **dict.fromkeys(_COMBINES, ((_splits, _reduce_parts),)),
    "dot_general": ((_contracts_nothing, _multiply), (_is_of_vectors, _multiply_and_reduce)),
    "ragged_dot_general": ((_is_masked, _mask_groups),),
    "gather": ((_leads_with_windows, _gather_and_transpose),),
}
