"""Rows sorted by group and multiplied group by group: mixtures of experts without a capacity, on blocks.

    order = argsort(e)                         e[i]: the group (expert) of row i
    y = ragged_dot(x[order], w, bincount(e))   y[j] = x[order[j]] w[e[order[j]]]
    z = y[argsort(order)]                      z[i] = x[i] w[e[i]];   or zeros.at[order // k].add(y): sums of k rows

All rows are in one sort, but row i of z depends on row i of x and of e alone. A block therefore sorts its own rows,
counts its own groups and puts its own rows back:

    e                                          split
    sort(e, iota)                              permuted, positions: iota counts the rows of the block
    x[order], elementwise, products of rows    permuted
    bincount(e)                                a partial sum, read as the block's own part
    ragged_dot(permuted, w, part)              permuted; contracted over the rows, a partial sum
    zeros.at[order // k].add(permuted)         split: order // k, as a function of positions, points into the own block
    permuted[argsort(order)]                   split
    zeros.at[argsort(order)].add(split)        permuted

A ragged product requires that its sizes count, in the order of the keys, exactly the rows that the keys sort: what is
counted are the keys or a monotone function of them, as `bincount` clips them                            -> _monotone_in
What reads permuted rows must treat them alike, whatever their order: `_ROWWISE`. Positions are only computed with, and
index; as they depend on constants alone, where they point is evaluated                           -> Groups.positions
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar import jax_compat
from autopar.ir import keyed
from autopar.ir.graph import Atom, Graph, Op, Type
from autopar.ir.op_sets import ADDITIONS, ELEMENTWISE, MEGABLOX_PRODUCTS, RAGGED_PRODUCTS, RARE_ELEMENTWISE
from autopar.jax_compat import megablox
from autopar.passes.microbatch.constant_indices import MAX_ELEMENTS, fold
from autopar.passes.microbatch.equal_values import first_equal
from autopar.passes.microbatch.rules.types import Operands, Rule, RuleResult, align_operand
from autopar.passes.microbatch.states import SUM, ZERO, Grouped, Invariant, Permuted, Positions, Split, State
from autopar.rules.ragged import holds


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Rows of a body that are sorted by group.

    Attributes:
        graph: the program.
        producers: value -> the operation that computes it.
        sorts: index of a sort of positions -> the state of the positions that it returns.
        orders: that state -> the values in it that sorts return.
        counts: value -> the keys that it counts by group.
        evaluated: expressions of positions that have been evaluated, equal ones of all layers once.
    """

    graph: Graph
    producers: Mapping[int, Op]
    sorts: Mapping[int, Positions] = field(default_factory=dict)
    orders: Mapping[Positions, Sequence[int]] = field(default_factory=dict)
    counts: Mapping[int, int] = field(default_factory=dict)
    evaluated: dict[Hashable, NDArray[Any] | None] = field(default_factory=dict)

    def positions(self, atom: Atom, state: Positions) -> NDArray[Any] | None:
        """Where positions point: the value for rows that are in order already; None if that is not constant."""
        orders = self.orders.get(replace(state, dim=0), ())
        key = self._expression(atom, orders)
        if key not in self.evaluated:
            in_order = {v: _counted_up(self.graph.types[v]) for v in orders}
            self.evaluated[key] = fold(self.graph, self.producers, atom, in_order)
        values = self.evaluated[key]
        return None if values is None else values.reshape(-1)

    def _expression(self, atom: Atom, orders: Sequence[int]) -> Hashable:
        """Equal for values that the same operations compute from constants and orders of as many rows."""
        if not isinstance(atom, int):
            return str(atom.type), np.asarray(atom.value).tobytes()
        if atom in orders:
            return "order", self.graph.types[atom]
        op = self.producers.get(atom)
        return (op.signature, *(self._expression(a, orders) for a in op.inputs)) if op else atom

    def is_uniform(self, atom: Atom, dim: int) -> bool:
        """True for an array that is the same along a dimension, because a broadcast made it."""
        producer = self.producers.get(atom) if isinstance(atom, int) else None
        return producer is not None and producer.name == "broadcast_in_dim" and dim not in _copied(producer)


def _copied(op: Op) -> tuple[int, ...]:
    return tuple(op.params["broadcast_dimensions"])


def _counted_up(type_: Type) -> NDArray[Any]:
    """0, 1, ... in this type, in which they may wrap."""
    return np.arange(type_.size).astype(jnp.dtype(type_.dtype))


# Finding sorts and counts


def find_groups(graph: Graph, ops: Sequence[Op], outputs: Sequence[Atom]) -> Groups | None:
    """The sorted rows of a body of these operations, which returns `outputs`; None if it has no ragged product."""
    products = [op for op in ops if op.name in RAGGED_PRODUCTS]
    if not products:
        return None
    originals = first_equal(ops)  # rows that are sorted again backward are in the same order
    groups = Groups(graph, _producers(graph, ops))
    read = {*outputs, *(a for op in ops for a in op.inputs)}
    sorts: dict[int, Positions] = {}
    keys_of: dict[Atom, int] = {}
    for op in ops:
        if op.name == "sort" and _sorts_positions(groups, op):
            (keys, _), order = op.inputs, _order_of(groups, sorts, op.inputs[0])
            if order is None and isinstance(keys, int):
                sorts[op.index] = Positions(0, originals.get(keys, keys))
                keys_of[_counted(groups, keys, None)] = sorts[op.index].keys
            elif order is not None and op.outputs[0] not in read:
                sorts[op.index] = replace(order, inverse=True)
    counts: dict[int, int] = {}
    for op in products:
        chain, counted = _count(groups, op.inputs[2])
        rows = graph.types[keys_of[counted]].size if counted in keys_of else 0
        # the count of all rows may wrap where that of a block does not
        if all(holds(graph.types[v].dtype, rows) for v in chain):
            counts.update((v, keys_of[counted]) for v in chain if counted in keys_of)
    orders = keyed.grouped((sorts[op.index], op.outputs[1]) for op in ops if op.index in sorts)
    return replace(groups, sorts=sorts, orders=orders, counts=counts)


def _producers(graph: Graph, ops: Sequence[Op]) -> Mapping[int, Op]:
    """Value -> the operation that computes it; for constants of a scan, outside of the scan: JAX moves iotas there."""
    producers = {v: op for op in (*graph.walk(), *ops) for v in op.outputs}
    for op in graph.walk():
        if op.name == "scan":
            constants = zip(op.regions[0].inputs, op.inputs[: jax_compat.scan_counts(op.params)[0]], strict=False)
            producers.update((inner, producers[a]) for inner, a in constants if isinstance(a, int) and a in producers)
    return producers


def _sorts_positions(groups: Groups, op: Op) -> bool:
    """True for `argsort` of one dimension: a sort by one key that moves the positions 0, 1, ... with it."""
    type_ = groups.graph.type_of(op.inputs[0])
    if len(op.inputs) != 2 or op.params["num_keys"] != 1 or not op.params["is_stable"] or type_.rank != 1:
        return False
    values = fold(groups.graph, groups.producers, op.inputs[1]) if type_.size <= MAX_ELEMENTS else None
    return values is not None and np.array_equal(values, np.arange(type_.size))


def _order_of(groups: Groups, sorts: Mapping[int, Positions], keys: Atom) -> Positions | None:
    """The positions that these keys are, if they are a permutation that a sort returned."""
    producer = groups.producers.get(keys) if isinstance(keys, int) else None
    state = sorts.get(producer.index) if producer is not None and producer.outputs[1:] == (keys,) else None
    return None if state is None or state.inverse else state


def _count(groups: Groups, sizes: Atom) -> tuple[list[int], Atom | None]:
    """Group sizes, what they are converted from, and the indices that are counted; None if that is not known."""
    chain: list[int] = []
    while isinstance(sizes, int) and (op := groups.producers.get(sizes)) is not None:
        chain.append(sizes)
        if op.name in _COUNTS:
            return chain, _COUNTS[op.name](groups, op)
        if op.name not in ("convert_element_type", "copy"):
            break
        sizes = op.inputs[0]
    return chain, None


def _counts_by_scatter(groups: Groups, op: Op) -> Atom | None:
    """What zeros(groups).at[indices].add(1) counts."""
    zeros, indices, ones = op.inputs
    numbers, shape = op.params["dimension_numbers"], groups.graph.type_of(zeros).shape
    maps = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims, numbers.update_window_dims
    if len(shape) != 1 or maps != ((0,), (0,), ()) or not (_is_all(groups, zeros, 0) and _is_all(groups, ones, 1)):
        return None
    return _monotone_in(groups, indices, shape[0])


def _counts_by_sum(groups: Groups, op: Op) -> Atom | None:
    """What sum(indices[:, None] == arange(groups), 0) counts."""
    equal = groups.producers.get(_uncast(groups, op.inputs[0]))
    if op.params["axes"] != (0,) or equal is None or equal.name != "eq":
        return None
    shape = groups.graph.types[equal.outputs[0]].shape
    for indices, numbers in (equal.inputs, equal.inputs[::-1]):
        values = fold(groups.graph, groups.producers, numbers)
        column = len(shape) == 2 and groups.graph.type_of(indices).shape == (shape[0], 1)
        if column and values is not None and np.array_equal(values.reshape(-1), np.arange(shape[1])):
            return _monotone_in(groups, indices, shape[1])
    return None


_COUNTS = {"scatter-add": _counts_by_scatter, "reduce_sum": _counts_by_sum}


def _is_all(groups: Groups, atom: Atom, value: int) -> bool:
    values = fold(groups.graph, groups.producers, atom)
    return values is not None and bool(np.all(values == value))


def _uncast(groups: Groups, atom: Atom) -> int:
    """The value that a conversion takes; -1 for a literal."""
    op = groups.producers.get(atom) if isinstance(atom, int) else None
    if op is not None and op.name == "convert_element_type":
        return _uncast(groups, op.inputs[0])
    return atom if isinstance(atom, int) else -1


def _counted(groups: Groups, atom: Atom, extent: int | None) -> Atom:
    """The value with the same numbers in the same order, before reshapes and conversions.

    A conversion that may wrap counts only where the numbers are known to be less than `extent`, which its type holds.
    """
    while isinstance(atom, int) and (op := groups.producers.get(atom)) is not None and op.name in _SAME_NUMBERS:
        (before, after), source = map(groups.graph.type_of, (op.inputs[0], atom)), op.inputs[0]
        in_range = extent is not None and holds(after.dtype, extent - 1) and _selects(groups, source, extent)
        if before.size != after.size or not (_fits(before.dtype, after.dtype) or in_range):
            break
        atom = source
    return atom


_SAME_NUMBERS = ("convert_element_type", "broadcast_in_dim", "reshape", "copy")


def _fits(before: str, after: str) -> bool:
    """True if every integer of the first dtype is one of the second."""
    if before == after:
        return True
    dtypes = jnp.dtype(before), jnp.dtype(after)
    if not all(jnp.issubdtype(d, jnp.integer) for d in dtypes):
        return False
    old, new = map(jnp.iinfo, dtypes)
    return bool(new.min <= old.min and old.max <= new.max)


def _monotone_in(groups: Groups, indices: Atom, extent: int) -> Atom | None:
    """The numbers of which group indices are a monotone function; None if they may be another.

    `bincount` clips at 0, and indexing adds the number of groups to negative indices, of which there are none then.
    Otherwise the numbers have to be indices that a selection of the largest returns, among no more than `extent`.
    """
    value = _counted(groups, indices, extent)
    op = groups.producers.get(value) if isinstance(value, int) else None
    if op is not None and op.name == "select_n" and len(op.inputs) == 3:  # x + extent where x is negative
        negative = groups.producers.get(_uncast(groups, op.inputs[0]))
        if negative is None or negative.name != "lt" or negative.inputs[0] != op.inputs[1]:
            return None
        if not _is_all(groups, negative.inputs[1], 0):
            return None
        value = _counted(groups, op.inputs[1], extent)
        op = groups.producers.get(value) if isinstance(value, int) else None
    if op is not None and op.name == "max":
        for bound, numbers in (op.inputs, op.inputs[::-1]):
            if _is_all(groups, bound, 0):
                return _counted(groups, numbers, extent)
    return value if _selects(groups, value, extent) else None


def _selects(groups: Groups, atom: Atom, extent: int) -> bool:
    """True for indices that `top_k` or `argmax` returns, of no more than `extent` candidates."""
    value = _counted(groups, atom, None)
    op = groups.producers.get(value) if isinstance(value, int) else None
    if op is None or op.name not in ("top_k", "argmax"):
        return False
    axis = op.params["axis"] if op.name == "top_k" else op.params["axes"][0]
    return value == op.outputs[-1] and groups.graph.type_of(op.inputs[0]).shape[axis] <= extent


# Rules


def is_grouped(op: Op, states: Sequence[State], groups: Groups) -> bool:
    """True if the rules of sorted rows apply to an operation."""
    return op.index in groups.sorts or op.name in RAGGED_PRODUCTS or any(isinstance(s, Grouped) for s in states)


def grouped(operands: Operands, groups: Groups, table: Rule) -> RuleResult | None:
    """How an operation that sorts by group, or reads what is sorted, runs on blocks; None if it cannot.

    Args:
        operands: the operation, at least one operand of which is in a state of sorted rows, or which is a sort.
        groups: of its body.
        table: rules of operations on split operands.
    """
    name, states = operands.op.name, operands.states
    if name == "sort":
        return _sort(operands, groups)
    if name in RAGGED_PRODUCTS:
        return _ragged_product(operands, groups)
    if name in _BY_POSITION and isinstance(indices := states[1], Positions):
        return _BY_POSITION[name](operands, groups, indices)
    return _rowwise(operands, groups, table) if name in _ROWWISE else None


def _sort(operands: Operands, groups: Groups) -> RuleResult | None:
    """The block's keys, and the positions in the block, in the order of the keys."""
    state = groups.sorts.get(operands.op.index)
    if state is None:  # another sort, of sorted rows
        return None
    keys, moved = operands.states
    if not isinstance(moved, Invariant) or operands.shapes[0][0] % operands.count:
        return None
    if keys != (Positions(0, state.keys) if state.inverse else Split(0)):
        return None
    return RuleResult((Permuted(0, state.keys), state), iotas={1: operands.shapes[0][0] // operands.count})


def _ragged_product(operands: Operands, groups: Groups) -> RuleResult | None:
    """Rows times the matrix of their group, or sums over the rows of each group of products of two rows."""
    numbers = operands.params["ragged_dot_dimension_numbers"]
    (contracted, batch) = numbers.dot_dimension_numbers
    rows, other, sizes = operands.states[:3]
    rest = operands.states[3:]  # a kernel's first group
    if not all(isinstance(s, Invariant) for s in rest) or operands.params.get("group_offset") is not None:
        return None
    if batch != ((), ()):
        return None
    counted = operands.op.inputs[2]
    is_kernel = operands.op.name in MEGABLOX_PRODUCTS
    if is_kernel and isinstance(rows, Permuted) and not _has_tiles(operands, rows.dim):
        return None
    if not isinstance(rows, Permuted) or sizes != SUM or not isinstance(counted, int):
        return None
    if groups.counts.get(counted) != rows.keys:
        return None
    if tuple(numbers.lhs_ragged_dimensions) != (rows.dim,):
        return None
    if rows.dim not in contracted[0]:
        free = [d for d in range(len(operands.shapes[0])) if d not in contracted[0]]
        return RuleResult((Permuted(free.index(rows.dim), rows.keys),)) if isinstance(other, Invariant) else None
    partner = contracted[1][contracted[0].index(rows.dim)]
    return RuleResult((SUM,)) if other == Permuted(partner, rows.keys) else None


def _has_tiles(operands: Operands, dim: int) -> bool:
    """Whether the rows of a block are of a number that a kernel divides into tiles."""
    return operands.shapes[0][dim] // operands.count % megablox.row_tile(operands.params) == 0


def _gather(operands: Operands, groups: Groups, indices: Positions) -> RuleResult | None:
    """Rows of the block in the order of their keys, or sorted rows back in their own order."""
    numbers = operands.params["dimension_numbers"]
    dim = _target(operands, groups, indices, operands.shapes[0], numbers.start_index_map)
    if dim is None or numbers.collapsed_slice_dims != (dim,) or numbers.operand_batching_dims:
        return None
    (row,) = [d for d in range(len(operands.result_shapes[0])) if d not in numbers.offset_dims]
    if operands.states[0] != (Permuted(dim, indices.keys) if indices.inverse else Split(dim)):
        return None
    return RuleResult((Split(row) if indices.inverse else Permuted(row, indices.keys),))


def _scatter(operands: Operands, groups: Groups, indices: Positions) -> RuleResult | None:
    """Sorted rows added to rows of their block, or rows of the block added to zeros in the order of their keys."""
    numbers = operands.params["dimension_numbers"]
    dim = _target(operands, groups, indices, operands.shapes[0], numbers.scatter_dims_to_operand_dims)
    if dim is None or numbers.inserted_window_dims != (dim,) or numbers.operand_batching_dims:
        return None
    operand, _, updates = operands.states
    (row,) = [d for d in range(len(operands.shapes[2])) if d not in numbers.update_window_dims]
    if updates != (Split(row) if indices.inverse else Permuted(row, indices.keys)):
        return None
    if indices.inverse:
        return RuleResult((Permuted(dim, indices.keys),), {0: Split(dim)}) if operand == ZERO else None
    return align_operand(Split(dim), operand, Split(dim), 0)


_BY_POSITION = {"gather": _gather, "scatter-add": _scatter}


def _target(
    operands: Operands, groups: Groups, indices: Positions, shape: Sequence[int], index_map: Sequence[int]
) -> int | None:
    """The only dimension that positions index, if those of block k point into block k, at the same places for all k."""
    if len(index_map) != 1 or operands.shapes[1][-1] != 1 or len(operands.shapes[1]) != 2 or indices.dim != 0:
        return None
    (dim,) = index_map
    where = groups.positions(operands.op.inputs[1], indices)
    if where is None or shape[dim] % operands.count or where.size % operands.count:
        return None
    if indices.inverse:
        return dim if np.array_equal(where, np.arange(shape[dim])) else None
    blocks = where.reshape(operands.count, -1)
    inner = shape[dim] // operands.count
    own = blocks - np.arange(operands.count)[:, None] * inner
    return dim if own.min(initial=0) >= 0 and own.max(initial=0) < inner and (own == own[0]).all() else None


def _rowwise(operands: Operands, groups: Groups, table: Rule) -> RuleResult | None:
    """By the rule for split rows: what treats all rows alike takes them in any order."""
    states = [s for s in operands.states if isinstance(s, Grouped)]
    kind = replace(states[0], dim=0)
    # rows in two orders do not belong together, nor do sorted rows and consecutive ones
    if any(replace(s, dim=0) != kind for s in states) or any(isinstance(s, Split) for s in operands.states):
        return None
    if isinstance(kind, Positions) and operands.op.name not in _OF_POSITIONS:
        return None
    extent = next(
        shape[s.dim] for shape, s in zip(operands.shapes, operands.states, strict=True) if isinstance(s, Grouped)
    )
    split = tuple(Split(s.dim) if isinstance(s, Grouped) else s for s in operands.states)
    result = table(replace(operands, states=split))
    if result is None or result.local_indices or result.result_block is not None or result.body is not None:
        return None
    if not all(groups.is_uniform(operands.op.inputs[i], cut.dim) for i, cut in result.slices.items()):
        return None
    results: list[State] = []
    for shape, state in zip(operands.result_shapes, result.results, strict=True):
        if isinstance(state, Split):
            # the result has to have the same rows
            if state.outer != 1 or shape[state.dim] != extent:
                return None
            results.append(replace(kind, dim=state.dim))
        elif isinstance(kind, Positions):
            return None
        else:
            results.append(state)
    return replace(result, results=tuple(results))


_SHAPES = ("broadcast_in_dim", "reshape", "squeeze", "transpose")
_OF_POSITIONS = frozenset((*ELEMENTWISE, *ADDITIONS, "sub", *_SHAPES))
#: Operations that treat all rows alike. A gather takes rows of a table that is the same for all; a scatter adds to it.
_ROWWISE = frozenset((
    *ELEMENTWISE, *RARE_ELEMENTWISE, *ADDITIONS, *_SHAPES, "sub", "neg", "mul", "div", "max", "min", "and", "or",
    "convert_element_type", "select_n", "copy", "name", "slice", "split", "concatenate", "dot_general", "gather",
    "scatter-add", "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin",
    "optimization_barrier", "sharding_constraint",
))  # fmt: skip
