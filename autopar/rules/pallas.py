"""Sharding rules of Pallas kernels, derived from the kernel, and the call on a part of its operands.

A kernel runs its body once for each point of a grid, the last axis fastest. Index maps say which block of an operand or
result a point reads or writes. Along a grid axis g of extent n the runs are independent, so that a device may do some
of them on its part of the operands, if

    1. in every index map, each block index is g itself or does not depend on g; it is g for at most one dimension of an
       operand or result, whose n blocks cover it exactly
    2. every result has such a dimension, but for those that nothing reads
    3. the body does not use `program_id(g)`
    4. the body writes no operand without such a dimension, and uses no other state, such as that of random numbers
    5. where all axes behind g are at their start, the body overwrites each scratch buffer, and each result that nothing
       reads and that has no such dimension, before it reads it, so that no run reads what a run for another g has left

Then g is a factor of n shards: the dimensions of condition 1 are cut along it, and the local call has the grid extent
n / shards and the same blocks. `num_programs(g)` needs no condition: of a static grid it is a constant in the body.

The parameters are those of JAX's `pallas_call` primitive (jax 0.10.2 and 0.12.0), read by attribute.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import jax.extend.core as jex
import numpy as np

from autopar import jax_compat
from autopar.rules.notation import Dims, Rule

Shape = tuple[int, ...]
Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GridAxis:
    """One axis of a kernel's grid.

    Attributes:
        size: its extent.
        dims: per operand and result, the dimension whose blocks it counts; None: there is none.
        obstacle: why its runs are not independent; "" if they are.
    """

    size: int
    dims: tuple[int | None, ...]
    obstacle: str


def grid_axes(params: Params, unread: Sequence[int] = ()) -> tuple[GridAxis, ...]:
    """The axes of a kernel's grid; operands that index maps read (scalar prefetch) are the first in `dims`.

    Args:
        params: of the `pallas_call`.
        unread: results that nothing reads, such as the scratch memory of splash attention in JAX 0.10.
    """
    mapping = params["grid_mapping"]
    if mapping.num_dynamic_grid_bounds:
        return ()
    blocks = [_block_dims(block, len(mapping.grid)) for block in mapping.block_mappings]
    return tuple(_axis(params, axis, blocks, unread) for axis in range(len(mapping.grid)))


def _axis(params: Params, axis: int, blocks: Sequence[Sequence[BlockDim]], unread: Sequence[int]) -> GridAxis:
    mapping, size = params["grid_mapping"], params["grid_mapping"].grid[axis]
    counted = [[d for d, dim in enumerate(block) if axis in dim.depends_on] for block in blocks]
    dims = (*[None] * mapping.num_index_operands, *(of[0] if len(of) == 1 else None for of in counted))
    shared = {mapping.num_inputs + r for r in unread if not counted[mapping.num_inputs + r]}
    of_blocks = (
        _obstacle_of_blocks(mapping, number, {d: block[d] for d in of}, axis)
        for number, (block, of) in enumerate(zip(blocks, counted, strict=True))
        if number not in shared
    )
    obstacle = (
        next(filter(None, of_blocks), "")
        or _obstacle_of_call(params, dims)
        or _obstacle_of_body(params, axis, dims, {mapping.num_index_operands + number for number in shared})
    )
    return GridAxis(size, dims, obstacle)


def _obstacle_of_blocks(mapping: Any, number: int, counted: Mapping[int, BlockDim], axis: int) -> str:
    """Why the blocks of an operand or result do not follow a grid axis; `counted`: dimensions that depend on it."""
    is_result = number >= mapping.num_inputs
    name = f"result {number - mapping.num_inputs}" if is_result else f"operand {mapping.num_index_operands + number}"
    if any(dim.is_axis != axis for dim in counted.values()):
        return f"block indices of {name} are computed from it"
    if len(counted) > 1:
        return f"several dimensions of {name} follow it"
    for d, dim in counted.items():
        if not dim.extent or dim.size * mapping.grid[axis] != dim.extent:
            return f"its blocks do not cover dimension {d} of {name} exactly"
    if is_result and not counted:
        return f"{name} has no dimension of it: it accumulates over this axis"
    return ""


def _obstacle_of_call(params: Params, dims: Sequence[int | None]) -> str:
    mapping = params["grid_mapping"]
    if params.get("mesh") is not None or mapping.grid_names is not None:
        return "the kernel runs on a mesh of cores"
    operands = mapping.num_index_operands + mapping.num_inputs
    for source, result in params["input_output_aliases"]:
        if dims[source] != dims[operands + result]:
            return f"operand {source} is aliased to result {result}, which follows other axes"
    return ""


# Index maps


@dataclass(frozen=True, slots=True)
class BlockDim:
    """A dimension of an operand or result.

    Attributes:
        extent: number of elements.
        size: of a block.
        is_axis: the grid axis that is the block index; -1: the index is something else.
        depends_on: the grid axes that the index depends on.
    """

    extent: int
    size: int
    is_axis: int
    depends_on: frozenset[int]


def _block_dims(block: Any, axes: int) -> list[BlockDim]:
    jaxpr = block.index_map_jaxpr.jaxpr
    start = [(axis, frozenset([axis])) for axis in range(axes)]
    rest = [(-1, frozenset[int]())] * (len(jaxpr.invars) - axes)
    origins = _origins(jaxpr, [*start, *rest])
    sizes = [_block_size(size) for size in block.block_shape]
    return [
        BlockDim(extent, size, axis if size else -1, depends)
        for extent, size, (axis, depends) in zip(block.array_aval.shape, sizes, origins, strict=True)
    ]


def _block_size(size: Any) -> int:
    """Elements of a block along a dimension; 0 where the index counts elements and not blocks."""
    kind = type(size).__name__
    if size is None or kind == "Squeezed":
        return 1
    return int(getattr(size, "block_size", size)) if isinstance(size, int) or kind == "Blocked" else 0


Origin = tuple[int, frozenset[int]]
"""The grid axis that a scalar is, or -1; the grid axes that it depends on."""


def _origins(jaxpr: Any, arguments: Sequence[Origin]) -> list[Origin]:
    """Origins of the results of a jaxpr."""
    origins: dict[Any, Origin] = dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Origin:
        return (-1, frozenset()) if isinstance(atom, jex.Literal) else origins.get(atom, (-1, frozenset()))

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        depends = frozenset[int]().union(*(origin[1] for origin in operands))
        inner = _called(equation)
        if inner is not None:
            results = _origins(inner, operands)
        elif equation.primitive.name in ("convert_element_type", "copy") and _is_integer(equation.outvars[0].aval):
            results = operands
        else:
            results = [(-1, depends)] * len(equation.outvars)
        origins.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _is_integer(aval: Any) -> bool:
    return np.issubdtype(aval.dtype, np.integer) and aval.dtype.itemsize >= 4


def _called(equation: Any) -> Any:
    """The jaxpr that an equation calls once with its operands; None if it calls none."""
    inner = equation.params.get("jaxpr")
    if equation.primitive.name not in ("jit", "pjit", "closed_call", "core_call") or inner is None:
        return None
    return getattr(inner, "jaxpr", inner)


# The body


def _obstacle_of_body(params: Params, axis: int, dims: Sequence[int | None], unread: AbstractSet[int]) -> str:
    """Why what the body does depends on the runs for other points of an axis; "" if it does not.

    `unread`: results, counted behind the operands, that all runs share and nothing reads.
    """
    mapping, body = params["grid_mapping"], params["jaxpr"]
    axes = [a for a in range(len(mapping.grid)) if a not in mapping.vmapped_dims]  # those that the body can ask for
    if axis in axes and _uses_program_id(body, axes.index(axis)):
        return f"the kernel uses program_id({axes.index(axis)})"
    written, effects = jax_compat.kernel_effects(body)
    state = sorted({*effects, *_primitives(body) & _STATEFUL})
    if state:
        return f"the kernel has state that all runs share ({', '.join(state)})"
    shared = [i for i in sorted(written) if i < mapping.num_index_operands + mapping.num_inputs and dims[i] is None]
    if shared:
        return f"the kernel writes operand {shared[0]}, of which all runs have the same block"
    first_scratch = len(body.invars) - len(mapping.scratch_avals)
    scratch = {v: i for i, v in enumerate(body.invars) if i in unread or i >= first_scratch}
    at_start = frozenset(axes.index(a) for a in axes if a > axis)
    if scratch and not _Initialisation(at_start).run(body, scratch, {}, set()):
        return "the kernel reads scratch memory that a run before has written"
    return ""


def _uses_program_id(jaxpr: Any, axis: int) -> bool:
    """Whether a jaxpr, or one inside it, uses a `program_id`."""
    used = {id(atom) for equation in jaxpr.eqns for atom in equation.invars} | {id(atom) for atom in jaxpr.outvars}
    for equation in jaxpr.eqns:
        asks = equation.primitive.name == "program_id" and equation.params["axis"] == axis
        if asks and id(equation.outvars[0]) in used:
            return True
        if any(_uses_program_id(inner, axis) for inner in _inner(equation)):
            return True
    return False


#: Primitives with state besides references that their effects do not tell of.
_STATEFUL = frozenset({"prng_random_bits", "get_global", "get_barrier_semaphore"})


def _primitives(jaxpr: Any) -> frozenset[str]:
    """Names of the primitives of a jaxpr, and of those inside it."""
    inner = (_primitives(inner) for equation in jaxpr.eqns for inner in _inner(equation))
    return frozenset(equation.primitive.name for equation in jaxpr.eqns).union(*inner)


def _inner(equation: Any) -> list[Any]:
    """All jaxprs among the parameters of an equation."""
    values = [v for value in equation.params.values() for v in (value if isinstance(value, tuple | list) else (value,))]
    jaxprs = [getattr(value, "jaxpr", value) for value in values]
    return [jaxpr for jaxpr in jaxprs if hasattr(jaxpr, "eqns") and hasattr(jaxpr, "invars")]


_SCALAR: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
        "ge": operator.ge, "add": operator.add, "sub": operator.sub, "mul": operator.mul,
        "and": operator.and_, "or": operator.or_, "max": max, "min": min,
        "convert_element_type": lambda x: x,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Initialisation:
    """Whether the body overwrites its scratch buffers before it reads them, where some axes are at their start.

    Attributes:
        at_start: the axes of `program_id` that are 0.
    """

    at_start: frozenset[int]

    def run(self, jaxpr: Any, scratch: Mapping[Any, int], scalars: dict[Any, Any], written: set[int]) -> bool:
        """Follow a jaxpr; False if it may read a buffer that is not written.

        Args:
            jaxpr: what runs.
            scratch: its variables that are scratch buffers.
            scalars: its scalars whose values are fixed; added to.
            written: buffers that are overwritten so far; added to.
        """
        used = {id(atom) for equation in jaxpr.eqns for atom in equation.invars}
        return all(self._equation(equation, scratch, scalars, written, used) for equation in jaxpr.eqns)

    def _equation(
        self, equation: Any, scratch: Mapping[Any, int], scalars: dict[Any, Any], written: set[int], used: set[int]
    ) -> bool:
        name, operands = equation.primitive.name, equation.invars
        buffers = [scratch.get(atom) if not isinstance(atom, jex.Literal) else None for atom in operands]
        values = [self._value(atom, scalars) for atom in operands]
        if name == "program_id" and equation.params["axis"] in self.at_start:
            scalars[equation.outvars[0]] = 0
        elif name == "cond":
            return self._branches(equation, buffers, values, written)
        elif (inner := _called(equation)) is not None:
            return self._call(inner, buffers, values, written)
        elif name == "swap" and buffers[0] is not None and id(equation.outvars[0]) not in used:
            # as many elements as the buffer has, none of them twice
            if operands[1].aval.size == operands[0].aval.size and not any(a.aval.shape for a in operands[2:]):
                written.add(buffers[0])
        elif any(buffer is not None and buffer not in written for buffer in buffers):
            return False
        elif name in _SCALAR and all(value is not None for value in values):
            dtype = equation.outvars[0].aval.dtype  # in which the value may wrap
            scalars[equation.outvars[0]] = np.asarray(_SCALAR[name](*values)).astype(dtype)[()]
        return True

    @staticmethod
    def _value(atom: Any, scalars: Mapping[Any, Any]) -> Any:
        if not isinstance(atom, jex.Literal):
            return scalars.get(atom)
        return atom.val if np.ndim(atom.val) == 0 else None

    def _call(self, jaxpr: Any, buffers: Sequence[int | None], values: Sequence[Any], written: set[int]) -> bool:
        scratch = {v: buffer for v, buffer in zip(jaxpr.invars, buffers, strict=True) if buffer is not None}
        scalars = {v: value for v, value in zip(jaxpr.invars, values, strict=True) if value is not None}
        return self.run(jaxpr, scratch, scalars, written)

    def _branches(self, equation: Any, buffers: Sequence[int | None], values: Sequence[Any], written: set[int]) -> bool:
        branches = [getattr(branch, "jaxpr", branch) for branch in equation.params["branches"]]
        if values[0] is not None:
            taken = branches[min(max(int(values[0]), 0), len(branches) - 1)]
            return self._call(taken, buffers[1:], values[1:], written)
        after = [set(written) for _ in branches]
        good = all(self._call(b, buffers[1:], values[1:], w) for b, w in zip(branches, after, strict=True))
        written.update(set.intersection(*after))
        return good


# Rules and calls


def rule(params: Params, operands: Sequence[Shape], results: Sequence[Shape], unread: Sequence[int] = ()) -> Rule:
    """The rule of a kernel: a factor for each grid axis without obstacles; all else needs replication."""
    sizes: list[int] = []
    shapes = [*operands, *results]
    dims: list[list[int]] = [[-1] * len(shape) for shape in shapes]
    for axis in grid_axes(params, unread):
        if not axis.obstacle and axis.size > 1:
            for number, dim in enumerate(axis.dims):
                if dim is not None:
                    dims[number][dim] = len(sizes)
            sizes.append(axis.size)
    free = len(sizes)
    for of, shape in zip(dims, shapes, strict=True):
        for d, extent in enumerate(shape):
            if of[d] < 0:
                of[d] = len(sizes)
                sizes.append(extent)
    sides: list[Dims] = [tuple(of) for of in dims]
    count = len(operands)
    return Rule(tuple(sides[:count]), tuple(sides[count:]), tuple(sizes), (), tuple(range(free, len(sizes))), "autopar")


def obstacles(params: Params) -> str:
    """Why no axis of a kernel's grid is cut, in words."""
    if params["grid_mapping"].num_dynamic_grid_bounds:
        return "its grid is known at run time only"
    axes = [(i, axis) for i, axis in enumerate(grid_axes(params)) if axis.size > 1]
    reasons = "; ".join(f"grid axis {i}: {axis.obstacle}" for i, axis in axes if axis.obstacle)
    return reasons or "its grid has a single point"


def bind_part(equation: Any, results: Sequence[Shape], parts: Sequence[Any]) -> list[Any]:
    """Call a kernel on parts of its operands, cut along its factors.

    Args:
        equation: the call on whole operands.
        results: the shapes of the parts of its results.
        parts: of the operands.
    """
    params = {**equation.params, **part_params(equation.params, [tuple(part.shape) for part in parts], results)}
    return list(equation.primitive.bind(*parts, **params))


def part_params(params: Params, operands: Sequence[Shape], results: Sequence[Shape]) -> dict[str, Any]:
    """The parameters of a kernel that differ in a call on parts of its operands, cut along its factors.

    Args:
        params: those of the call on whole operands.
        operands, results: the shapes of the parts.
    """
    mapping, avals = params["grid_mapping"], params["out_avals"]
    grid, shapes = list(mapping.grid), [*operands[mapping.num_index_operands :], *results]
    for i, axis in enumerate(grid_axes(params)):
        # all operands and results are cut alike, along dimensions that no other axis has a part in
        for block, shape, dim in zip(
            mapping.block_mappings, shapes, axis.dims[mapping.num_index_operands :], strict=True
        ):
            if dim is not None and shape[dim] != block.array_aval.shape[dim]:
                grid[i] = axis.size * shape[dim] // block.array_aval.shape[dim]
    blocks = tuple(
        block.replace(array_aval=block.array_aval.update(shape=shape))
        for block, shape in zip(mapping.block_mappings, shapes, strict=True)
    )
    changed: dict[str, Any] = {
        "grid_mapping": mapping.replace(grid=tuple(grid), block_mappings=blocks),
        "out_avals": tuple(aval.update(shape=shape) for aval, shape in zip(avals, results, strict=True)),
    }
    if params.get("cost_estimate") is not None:
        share = math.prod(grid) / math.prod(mapping.grid)
        changed["cost_estimate"] = _scaled(params["cost_estimate"], share)
    return changed


def _scaled(estimate: Any, share: float) -> Any:
    """A cost estimate of a share of the work."""
    counts = {f.name: getattr(estimate, f.name) for f in fields(estimate)}
    return replace(estimate, **{name: int(n * share) for name, n in counts.items() if isinstance(n, int | float)})
