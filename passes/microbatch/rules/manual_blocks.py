"""Blocks of whole values, and blocks of the shards on which the body of a `shard_map` runs.

A dimension that a spec cuts over axes of N devices together is N shards in a row. A block of it, seen as (outer, m,
inner), consists of a block of every shard if N divides `outer`:

    whole    (N o, m, inner)    device d has rows d o to (d + 1) o of the first dimension
    shard    (o, m, inner)

and the body on these blocks, on all devices at a time, gives the blocks of its results: what is the same in every block
stays so, and parts of a sum are parts on every device, since both are said of each element alone. So a `shard_map` of
block k is the same `shard_map` with the body on blocks, whatever the body sends
-> autopar/passes/microbatch/rules/collectives.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from jax.sharding import PartitionSpec

from autopar.ir.graph import Graph, Op, Region
from autopar.passes.microbatch.rules.table import COLLECTIVES
from autopar.passes.microbatch.states import Split, State
from autopar.rules.manual import KINDS, MANUAL, NO_WORK


def pieces(spec: PartitionSpec, dim: int, mesh: Mapping[str, int]) -> int:
    """The number of shards of a dimension."""
    entry = spec[dim] if dim < len(spec) else None
    axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return math.prod(mesh[axis] for axis in axes)


def of_shards(state: State, spec: PartitionSpec, mesh: Mapping[str, int]) -> State | None:
    """The state of a shard of a value in this state; None if blocks of the value are no blocks of its shards."""
    if not isinstance(state, Split):
        return state
    count = pieces(spec, state.dim, mesh)
    return None if state.outer % count else Split(state.dim, state.outer // count)


def of_whole(state: State, spec: PartitionSpec, mesh: Mapping[str, int]) -> State:
    """The state of a value whose shards are in this state."""
    return Split(state.dim, state.outer * pieces(spec, state.dim, mesh)) if isinstance(state, Split) else state


def region_of(body: Graph) -> Region:
    """The body of a `shard_map` as that of any operation."""
    return Region(MANUAL, body.inputs, body.ops, body.outputs, body.constants)


def unknown(body: Graph) -> Op | None:
    """The first operation of a body that is not known on blocks, whatever it reads: a collective, or another body."""
    return next((op for op in body.walk() if _is_unknown(op.name)), None)


def _is_unknown(name: str) -> bool:
    if name == "axis_index" or name in COLLECTIVES:
        return False
    return name == MANUAL or name in NO_WORK or name in KINDS or name.endswith(("_start", "_done"))
