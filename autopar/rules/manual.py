"""What a `shard_map` of the user's says: the shardings of operands and results, and the program of each device.

A `shard_map` cuts its operands itself. Over the mesh axes that are manual, `in_specs` and `out_specs` are shardings
that operands and results must have: they are pins, and leave the planner no choice. The body is a program on shards

    local shape  =  shape, each dimension divided by the devices along the axes of its spec
    FLOPs, bytes, memory of the body: those of one device

and communicates by itself, over axes that it names                                                      -> collectives

    psum, pmax, pmin        all-reduce            bytes of the operand
    all_gather              all-gather            bytes of the operand times the devices
    psum_scatter            reduce-scatter        bytes of the operand
    all_to_all              all-to-all            bytes of the operand
    ppermute, pbroadcast    collective-permute    bytes of the operand

each as often as the loops around it in the body run. What only changes types (pvary, pcast) sends nothing. Groups of
devices within an axis (`axis_index_groups`) count as the whole axis.

The gradient of a `shard_map` is another one, whose operands include what the first keeps for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import jax.extend.core as jex
from jax.sharding import PartitionSpec

from autopar import jax_compat
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph, Op
from autopar.ir.jaxpr import build_graph

#: The primitive of `jax.shard_map`.
MANUAL = "shard_map"
#: Most bodies that are cached; the layers of a model have a few distinct ones, each forward and backward.
MOST_CACHED = 1024

#: Operation -> the collective that it is. Of an asynchronous one, the half that starts it.
KINDS: Mapping[str, str] = {
    **dict.fromkeys(("psum", "psum_invariant", "unreduced_psum", "pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("unreduced_pmax", "unreduced_pmin"), "all-reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), "all-gather"),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), "reduce-scatter"),
    **dict.fromkeys(("all_to_all", "ragged_all_to_all"), "all-to-all"),
    **dict.fromkeys(("ppermute", "pbroadcast"), "collective-permute"),
}
#: Collective -> its bytes per device from those of the operand and the number of devices (`autopar.ir.collective`).
_BYTES: Mapping[str, Callable[[int, int], int]] = {"all-gather": lambda nbytes, devices: nbytes * devices}
#: Operations on shards that compute nothing: positions of devices, and what only changes types.
NO_WORK = ("axis_index", "vary_unreduced_cast", "preduced")


@dataclass(frozen=True, eq=False)
class ManualCall:
    """One `shard_map`.

    Attributes:
        mesh: its mesh, axis -> size.
        axes: axes over which it is manual; along the others each device runs the same.
        operands, results: shardings over these axes.
        body: the program of a device.
        collectives: of the body, in program order, with their executions in one run of it; without a tag.
    """

    mesh: Mapping[str, int]
    axes: tuple[str, ...]
    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]
    body: Graph
    collectives: tuple[Collective, ...]

    @property
    def devices(self) -> int:
        """Devices that run the body."""
        return math.prod(self.mesh.values())


def call_of(op: Op) -> ManualCall:
    """What an operation says that is a `shard_map`."""
    return _call(op.equation)


@lru_cache(maxsize=MOST_CACHED)
def _call(equation: jex.JaxprEqn) -> ManualCall:
    mesh, axes, operands, results, jaxpr = jax_compat.shard_map_parts(equation)
    paths = (
        tuple(f"{side}{i}" for i in range(count)) for side, count in (("in", len(operands)), ("out", len(results)))
    )
    body = build_graph(jaxpr, *paths)
    return ManualCall(mesh, axes, operands, results, body, tuple(_sent(body, mesh)))


def _sent(body: Graph, mesh: Mapping[str, int]) -> Iterator[Collective]:
    for op in body.walk():
        runs = body.runs[op.index]
        if op.name == MANUAL:
            yield from (replace(c, count=c.count * runs) for c in call_of(op).collectives)
        kind = kind_of(op)
        if not kind:
            continue
        named = op.params.get("axes", op.params.get("axis_name"))
        chosen = named if isinstance(named, tuple | list) else (named,)
        axes = tuple(axis for axis in mesh if axis in chosen and mesh[axis] > 1)
        devices = math.prod(mesh[axis] for axis in axes)
        for atom, _ in zip(op.inputs, op.outputs, strict=False) if axes else ():
            nbytes = body.type_of(atom).nbytes
            nbytes = _BYTES[kind](nbytes, devices) if kind in _BYTES else nbytes
            yield Collective(kind, axes, nbytes, runs, source=op.source)


def kind_of(op: Op) -> str:
    """The collective that an operation of a body is; "" if it sends nothing."""
    return KINDS.get(op.name.removesuffix("_start"), "")


def calls(graph: Graph) -> Iterator[Op]:
    """Every `shard_map` of a program, but for those in the bodies of others."""
    return (op for op in graph.walk() if op.name == MANUAL)


def first_call(graph: Graph) -> Op | None:
    """The first `shard_map` of a program; None without one."""
    return next(calls(graph), None)


def line(op: Op) -> str:
    """The source line of a `shard_map`; of one that is the whole step, where its body begins."""
    return op.source or next((inner.source for inner in call_of(op).body.walk() if inner.source), "an unknown line")


def loops_are_unknown(op: Op) -> bool:
    """Whether an operation is a `shard_map` with loops, none of which runs a number of times that is known."""
    loops = [inner for inner in call_of(op).body.walk() if inner.name in ("scan", "while")] if op.name == MANUAL else []
    return bool(loops) and all(loop.trips is None for loop in loops)
