"""How a kernel uses its place in the grid: in index maps, and by `program_id` in its body.

A place that is nothing but an index into a prefetched operand, as in `table[h, i, j]`, does no harm: where the operand
is cut along with the axis, a run finds the same element at its local place. Such an element counts as independent of
the place on that axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.extend.core as jex
import numpy as np

from autopar import jax_compat

Params = Mapping[str, Any]


class Origin(NamedTuple):
    """Where a scalar comes from.

    Attributes:
        axis: the grid axis whose place it is; -1: it is something else.
        depends_on: the grid axes that it depends on.
    """

    axis: int = -1
    depends_on: frozenset[int] = frozenset()


def place(axis: int) -> Origin:
    """The place on a grid axis."""
    return Origin(axis, frozenset([axis]))


@dataclass(frozen=True, slots=True)
class BlockDim:
    """A dimension of an operand or result.

    Attributes:
        extent: number of elements.
        size: of a block; 0: the index counts elements.
        index: where the block index comes from.
    """

    extent: int
    size: int
    index: Origin


@dataclass(frozen=True, slots=True)
class Places:
    """What depends on places.

    Attributes:
        blocks: per operand and result that is not prefetched, its dimensions.
        tables: (prefetched operand, dimension) -> the axis whose place is its index wherever the operand is read. The
            dimension has as many elements as the axis has points, and no other dimension's index depends on the axis.
        used: axes on whose place the body depends in any other way than by `tables` and `compared`.
        compared: axis -> the numbers that the body compares its place with for equality.
    """

    blocks: tuple[tuple[BlockDim, ...], ...]
    tables: Mapping[tuple[int, int], int]
    used: frozenset[int]
    compared: Mapping[int, frozenset[int]]


def places_of(params: Params, queues: Mapping[int, int] | None = None) -> Places:
    """The places that a kernel uses.

    Args:
        params: of the `pallas_call`.
        queues: prefetched operand -> the axis whose places its elements are (`autopar.rules.pallas.splash`).
    """
    mapping = params["grid_mapping"]
    first = _Walk(queues or {}, {})
    _walk(first, params)
    tables = first.tables(params["jaxpr"].invars[: mapping.num_index_operands], mapping.grid)
    second = _Walk(queues or {}, tables)
    blocks = _walk(second, params)
    compared = {axis: frozenset(numbers) for axis, numbers in second.compared.items()}
    return Places(tuple(blocks), tables, frozenset(second.used), compared)


def body_axes(params: Params) -> list[int]:
    """The grid axes that the body can ask for, in the order of its numbers for them."""
    mapping = params["grid_mapping"]
    return [axis for axis in range(len(mapping.grid)) if axis not in mapping.vmapped_dims]


def _walk(walk: _Walk, params: Params) -> list[tuple[BlockDim, ...]]:
    mapping = params["grid_mapping"]
    blocks: list[tuple[BlockDim, ...]] = []
    for block in mapping.block_mappings:
        jaxpr = block.index_map_jaxpr.jaxpr
        grid = [place(axis) for axis in range(len(mapping.grid))]
        tables = dict(zip(jaxpr.invars[len(grid) :], range(mapping.num_index_operands), strict=False))
        indices = walk.run(jaxpr, [*grid, *[Origin()] * (len(jaxpr.invars) - len(grid))], tables)
        sizes = [_block_size(size) for size in block.block_shape]
        dims = zip(block.array_aval.shape, sizes, indices, strict=True)
        blocks.append(tuple(BlockDim(n, size, i if size else Origin(-1, i.depends_on)) for n, size, i in dims))
    walk.used.clear()  # index maps may use any place: their results say so
    walk.in_body, walk.axes = True, body_axes(params)
    body = params["jaxpr"]
    tables = dict(zip(body.invars, range(mapping.num_index_operands), strict=False))
    walk.run(body, [Origin()] * len(body.invars), tables)
    return blocks


def _block_size(size: Any) -> int:
    """Elements of a block along a dimension; 0 where the index counts elements and not blocks."""
    kind = type(size).__name__
    if size is None or kind == "Squeezed":
        return 1
    return int(getattr(size, "block_size", size)) if isinstance(size, int) or kind == "Blocked" else 0


@dataclass(eq=False, slots=True)
class _Walk:
    """Follows places through jaxprs. State of one analysis.

    Attributes:
        queues, along: `queues` of `places_of`, and `Places.tables` as far as they are derived.
        in_body: the body is followed, and not an index map.
        axes: the grid axes that the jaxpr can ask for.
        reads: prefetched operand -> the indices of every read of it.
        opaque: prefetched operands that are read or written in another way.
        used, compared: as in `Places`.
    """

    queues: Mapping[int, int]
    along: Mapping[tuple[int, int], int]
    in_body: bool = False
    axes: Sequence[int] = ()
    reads: dict[int, list[tuple[Origin, ...]]] = field(default_factory=dict[int, list[tuple[Origin, ...]]])
    opaque: set[int] = field(default_factory=set[int])
    used: set[int] = field(default_factory=set[int])
    compared: dict[int, set[int]] = field(default_factory=dict[int, set[int]])

    def tables(self, operands: Sequence[Any], grid: Sequence[int]) -> dict[tuple[int, int], int]:
        """`Places.tables` of the reads so far; `operands`: the references of prefetched operands."""
        tables: dict[tuple[int, int], int] = {}
        for operand, reads in self.reads.items():
            if operand not in self.opaque:
                for d, extent in enumerate(operands[operand].aval.shape):
                    axis = reads[0][d].axis
                    alone = all(
                        index.axis == axis if e == d else axis not in index.depends_on
                        for read in reads
                        for e, index in enumerate(read)
                    )
                    if axis >= 0 and alone and extent == grid[axis]:
                        tables[operand, d] = axis
        return tables

    def run(self, jaxpr: Any, arguments: Sequence[Origin], tables: Mapping[Any, int]) -> list[Origin]:
        """Origins of the results of a jaxpr; `tables`: its variables that are prefetched operands."""
        origins: dict[Any, Origin] = dict(zip(jaxpr.invars, arguments, strict=True))
        for equation in jaxpr.eqns:
            results = self._equation(equation, origins, tables)
            origins.update(zip(equation.outvars, results, strict=True))
        return [_read(atom, origins) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, origins: Mapping[Any, Origin], tables: Mapping[Any, int]) -> Sequence[Origin]:
        name, count = equation.primitive.name, len(equation.outvars)
        operands = [_read(atom, origins) for atom in equation.invars]
        numbers = [None if isinstance(atom, jex.Literal) else tables.get(atom) for atom in equation.invars]
        if name == "program_id":
            return [place(self.axes[equation.params["axis"]])]
        if name == "get" and numbers[0] is not None:
            return [self._element(equation, numbers[0], origins)]
        if (inner := called(equation)) is not None:
            inside = {v: n for v, n in zip(inner.invars, numbers, strict=True) if n is not None}
            return self.run(inner, operands, inside)
        if name in ("convert_element_type", "copy") and _is_integer(equation.outvars[0].aval):
            return operands
        if name == "eq" and self.in_body and self._compares(equation, operands):
            return [Origin()]
        if name == "cond":
            results = operands[:1]
            for branch in equation.params["branches"]:
                jaxpr = getattr(branch, "jaxpr", branch)
                inside = {v: n for v, n in zip(jaxpr.invars, numbers[1:], strict=True) if n is not None}
                results = [*results, *self.run(jaxpr, operands[1:], inside)]
            return self._used(results, count)
        self.opaque.update(n for n in numbers if n is not None)
        asked = frozenset[int]().union(*map(self._asked, inner_jaxprs(equation)))
        return self._used([*operands, Origin(-1, asked)], count)

    def _used(self, origins: Sequence[Origin], count: int) -> list[Origin]:
        """Origins of so many results that depend on all of these."""
        depends_on = frozenset[int]().union(*(origin.depends_on for origin in origins))
        self.used |= depends_on
        return [Origin(-1, depends_on)] * count

    def _element(self, equation: Any, table: int, origins: Mapping[Any, Origin]) -> Origin:
        """An element that is read from a prefetched operand."""
        indices = jax_compat.element_read(equation)
        if indices is None:
            self.opaque.add(table)
            read = [_read(atom, origins) for atom in equation.invars[1:]]
        else:
            read = [_read(index, origins) for index in indices]
            self.reads.setdefault(table, []).append(tuple(read))
        if table in self.queues:
            return place(self.queues[table])
        places = (
            index.depends_on - {self.along.get((table, d))} if indices is not None else index.depends_on
            for d, index in enumerate(read)
        )
        return Origin(-1, frozenset[int]().union(*places))

    def _compares(self, equation: Any, operands: Sequence[Origin]) -> bool:
        """Record a comparison of a place with a number."""
        (axis,) = [origin.axis for origin in operands if origin.axis >= 0] or [-1]
        numbers = [int(a.val) for a in equation.invars if isinstance(a, jex.Literal) and np.ndim(a.val) == 0]
        if axis < 0 or len(numbers) != 1:
            return False
        self.compared.setdefault(axis, set()).update(numbers)
        return True

    def _asked(self, jaxpr: Any) -> frozenset[int]:
        """The axes that a jaxpr, or one inside it, asks for."""
        asked = [self.axes[e.params["axis"]] for e in jaxpr.eqns if e.primitive.name == "program_id"]
        return frozenset(asked).union(*(self._asked(j) for e in jaxpr.eqns for j in inner_jaxprs(e)))


def _read(atom: Any, origins: Mapping[Any, Origin]) -> Origin:
    return Origin() if isinstance(atom, jex.Literal | int | np.integer) else origins.get(atom, Origin())


def _is_integer(aval: Any) -> bool:
    return np.issubdtype(aval.dtype, np.integer) and aval.dtype.itemsize >= 4


def called(equation: Any) -> Any:
    """The jaxpr that an equation calls once with its operands; None if it calls none."""
    inner = equation.params.get("jaxpr")
    if equation.primitive.name not in ("jit", "pjit", "closed_call", "core_call") or inner is None:
        return None
    return getattr(inner, "jaxpr", inner)


def inner_jaxprs(equation: Any) -> list[Any]:
    """All jaxprs among the parameters of an equation."""
    values = [v for value in equation.params.values() for v in (value if isinstance(value, tuple | list) else (value,))]
    jaxprs = [getattr(value, "jaxpr", value) for value in values]
    return [jaxpr for jaxpr in jaxprs if hasattr(jaxpr, "eqns") and hasattr(jaxpr, "invars")]
