"""The axes of a kernel's grid along which its runs are independent of each other.

Along a grid axis g of extent n a device may do some of the runs on its part of the operands, if

    1. in every index map, each block index is g itself or does not depend on g; it is g for at most one dimension of an
       operand or result, whose n blocks cover it exactly
    2. every result has such a dimension, but for those that nothing reads
    3. the body does not depend on `program_id(g)`
    4. the body writes no operand without such a dimension, and uses no other state, such as that of random numbers
    5. where all axes behind g are at their start, the body overwrites each scratch buffer, and each result that nothing
       reads and that has no such dimension, before it reads it, so that no run reads what a run for another g has left

Then g is a factor of n shards: the dimensions of condition 1 are cut along it, and the local call has the grid extent
n / shards and the same blocks. `num_programs(g)` needs no condition: of a static grid it is a constant in the body.

For conditions 1 and 3, an element of a prefetched operand does not depend on g if g is its index along a dimension of n
elements, here and wherever the operand is read: that dimension is cut along g as well (`Places.tables`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from autopar import jax_compat
from autopar.rules.pallas.places import BlockDim, Params, Places, body_axes, inner_jaxprs
from autopar.rules.pallas.scratch import Initialisation


@dataclass(frozen=True, slots=True)
class GridAxis:
    """One axis of a kernel's grid.

    Attributes:
        size: its extent.
        dims: per operand and result, the dimension whose blocks it counts; None: there is none.
        obstacle: why its runs are not independent; "" if they are.
        queries: how it is cut, if its runs are blocks of queries of splash attention; None: derived from the kernel.
    """

    size: int
    dims: tuple[int | None, ...]
    obstacle: str
    queries: Queries | None = None


@dataclass(frozen=True, slots=True)
class Queries:
    """How an axis of blocks of queries is cut -> `autopar.rules.pallas.splash`.

    Attributes:
        sums: the results are sums over queries.
        pairs: a device computes two blocks of positions, which have the same work on every device.
    """

    sums: bool
    pairs: bool


def derived_axes(params: Params, places: Places, unread: Sequence[int] = ()) -> tuple[GridAxis, ...]:
    """The axes of a kernel's grid; operands that index maps read (scalar prefetch) are the first in `dims`.

    Args:
        params: of the `pallas_call`.
        places: those that it uses.
        unread: results that nothing reads, such as the scratch memory of splash attention in JAX 0.10.
    """
    return tuple(_axis(params, axis, places, unread) for axis in range(len(params["grid_mapping"].grid)))


def dims_of(params: Params, axis: int, places: Places) -> tuple[int | None, ...]:
    """`GridAxis.dims`."""
    prefetched = range(params["grid_mapping"].num_index_operands)
    along = {operand: d for (operand, d), a in places.tables.items() if a == axis}
    counted = [dims_that_follow(block, axis) for block in places.blocks]
    return (*map(along.get, prefetched), *(of[0] if len(of) == 1 else None for of in counted))


def dims_that_follow(block: Sequence[BlockDim], axis: int) -> list[int]:
    """The dimensions of an operand or result whose block index depends on the place on an axis."""
    return [d for d, dim in enumerate(block) if axis in dim.index.depends_on]


def _axis(params: Params, axis: int, places: Places, unread: Sequence[int]) -> GridAxis:
    mapping, dims = params["grid_mapping"], dims_of(params, axis, places)
    counted = [dims_that_follow(block, axis) for block in places.blocks]
    shared = {mapping.num_inputs + r for r in unread if not counted[mapping.num_inputs + r]}
    of_blocks = (
        _obstacle_of_blocks(mapping, number, {d: block[d] for d in of}, axis)
        for number, (block, of) in enumerate(zip(places.blocks, counted, strict=True))
        if number not in shared
    )
    results = range(mapping.num_inputs, len(counted))
    sums = [number - mapping.num_inputs for number in results if not counted[number] and number not in shared]
    obstacle = (  # first what no other way of writing the kernel would change
        (f"result {sums[0]} has no dimension of it: it accumulates over this axis" if sums else "")
        or _obstacle_of_body(params, axis, dims, places, {mapping.num_index_operands + number for number in shared})
        or next(filter(None, of_blocks), "")
        or obstacle_of_call(params, dims)
    )
    return GridAxis(mapping.grid[axis], dims, obstacle)


def _obstacle_of_blocks(mapping: Any, number: int, counted: Mapping[int, BlockDim], axis: int) -> str:
    """Why the blocks of an operand or result do not follow a grid axis; `counted`: dimensions that depend on it."""
    is_result = number >= mapping.num_inputs
    name = f"result {number - mapping.num_inputs}" if is_result else f"operand {mapping.num_index_operands + number}"
    if any(dim.index.axis != axis for dim in counted.values()):
        return f"block indices of {name} are computed from it"
    if len(counted) > 1:
        return f"several dimensions of {name} follow it"
    for d, dim in counted.items():
        if not covers(dim, mapping.grid[axis]):
            return f"its blocks do not cover dimension {d} of {name} exactly"
    return ""


def covers(dim: BlockDim, count: int) -> bool:
    """Whether so many blocks cover a dimension exactly."""
    return bool(dim.extent) and dim.size * count == dim.extent


def obstacle_of_call(params: Params, dims: Sequence[int | None]) -> str:
    """Why no axis with these `GridAxis.dims` is cut, whatever the body does; "" if nothing is against it."""
    mapping = params["grid_mapping"]
    if params.get("mesh") is not None or mapping.grid_names is not None:
        return "the kernel runs on a mesh of cores"
    operands = mapping.num_index_operands + mapping.num_inputs
    for source, result in params["input_output_aliases"]:
        if dims[source] != dims[operands + result]:
            return f"operand {source} is aliased to result {result}, which follows other axes"
    return ""


def _obstacle_of_body(
    params: Params, axis: int, dims: Sequence[int | None], places: Places, unread: AbstractSet[int]
) -> str:
    """Why what the body does depends on the runs for other points of an axis; "" if it does not.

    `unread`: results, counted behind the operands, that all runs share and nothing reads.
    """
    mapping, body, axes = params["grid_mapping"], params["jaxpr"], body_axes(params)
    state = state_of(params)
    if state:
        return f"the kernel has state that all runs share ({', '.join(state)})"
    written, _ = jax_compat.kernel_effects(body)
    shared = [i for i in sorted(written) if i < mapping.num_index_operands + mapping.num_inputs and dims[i] is None]
    if shared:
        return f"the kernel writes operand {shared[0]}, of which all runs have the same block"
    first_scratch = len(body.invars) - len(mapping.scratch_avals)
    scratch = {v: i for i, v in enumerate(body.invars) if i in unread or i >= first_scratch}
    at_start = frozenset(axes.index(a) for a in axes if a > axis)
    if scratch and not Initialisation(at_start).run(body, scratch, {}, set()):
        return "the kernel reads scratch memory that a run before has written"
    if axis in places.used or axis in places.compared:
        return f"the kernel uses program_id({axes.index(axis)})"
    return ""


#: Primitives with state besides references that their effects do not tell of.
_STATEFUL = frozenset({"prng_random_bits", "get_global", "get_barrier_semaphore"})


def state_of(params: Params) -> list[str]:
    """The state besides references that a kernel uses, in names."""
    _, effects = jax_compat.kernel_effects(params["jaxpr"])
    return sorted({*effects, *_primitives(params["jaxpr"]) & _STATEFUL})


def _primitives(jaxpr: Any) -> frozenset[str]:
    """Names of the primitives of a jaxpr, and of those inside it."""
    inner = (_primitives(inner) for equation in jaxpr.eqns for inner in inner_jaxprs(equation))
    return frozenset(equation.primitive.name for equation in jaxpr.eqns).union(*inner)
