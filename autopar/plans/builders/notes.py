"""What a plan notes of a program, on one mesh or of a stage.

operations that run replicated, kernels that are cut along some axes         -> replicated_operations
products that a backend computes more than once                              -> masked_products
attention cut along its positions: keys gathered, and passed round           -> attention_over_positions
uneven shares of the FLOPs                                                   -> uneven_loads
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost_models.compiler.backends import backend_of
from autopar.cost_models.sharding.groups import Grouping, Model, OpGroup
from autopar.cost_models.sharding.strategies import RING, share, shares
from autopar.hardware.cluster import LogicalMesh
from autopar.hardware.description import Device
from autopar.ir.graph import Graph, Op
from autopar.ir.keyed import grouped
from autopar.ir.op_sets import XLA_RAGGED_PRODUCTS
from autopar.ir.problem import Ints
from autopar.ir.text import seconds, size
from autopar.plans.imbalance import Imbalance
from autopar.rules import cudnn, manual, pallas
from autopar.rules.inherent import reason
from autopar.rules.ragged import batches_rows


def replicated_operations(graph: Graph, grouping: Grouping) -> list[str]:
    """A note per kind of operation that runs replicated, and per kernel that some of its grid's axes keep whole."""
    return [*_without_a_cut(graph, grouping), *_partly_cut(graph, grouping), *dict.fromkeys(_partly_manual(graph))]


def masked_products(graph: Graph, device: Device) -> list[str]:
    """A note on products over groups of rows that a backend computes as one product of all rows for each group."""
    products = [op for op in graph.walk() if op.name in XLA_RAGGED_PRODUCTS and not batches_rows(op.params)]
    if not products or not backend_of(device).masks_groups:
        return []
    groups, line = max(graph.type_of(op.inputs[2]).shape[-1] for op in products), products[0].source
    return [
        f"products over groups of rows ({len(products)}{f', first at {line}' if line else ''}): XLA on {device.name} "
        f"multiplies all rows with the matrix of every group, up to {groups} times the FLOPs of the groups"
    ]


def attention_over_positions(graph: Graph, model: Model, assignment: Ints, mesh: LogicalMesh) -> list[str]:
    """A note per line and pass of attention that is cut along its positions: what either way to the keys takes."""
    by_line: dict[tuple[str, bool, str], list[_Ways]] = {}
    for c, choice in zip(model.grouping.groups, assignment.tolist(), strict=False):  # copies come after groups
        op = graph.by_index[c.op] if c.op >= 0 else None
        ways = None if op is None else _ways(graph, model, op, c, choice, mesh)
        if op is not None and ways is not None:
            by_line.setdefault((op.source, "bwd" in op.name, ways.axes), []).append(ways)
    return [
        f"attention{f' at {line}' if line else ''}, {'backward' if backward else 'forward'}"
        f"{f', {len(each)} times' if len(each) > 1 else ''}: {_compared(each)}"
        for (line, backward, _), each in by_line.items()
    ]


@dataclass(frozen=True, slots=True)
class _Ways:
    """Keys and values of attention, gathered and passed round.

    Attributes:
        axes: mesh axes that cut the positions.
        is_ring: they are passed round.
        seconds, nbytes: per step, and at the peak of one execution, if gathered and if passed round.
    """

    axes: str
    is_ring: bool
    seconds: tuple[float, float]
    nbytes: tuple[float, float]


def _ways(graph: Graph, model: Model, op: Op, c: OpGroup, choice: int, mesh: LogicalMesh) -> _Ways | None:
    """Both ways of an operation whose positions are cut; None if there are none."""
    rule, s = model.grouping.rules[op.signature], c.strategies
    along = np.isin(s.assigned[choice], rule.rings) if rule.rings else np.zeros(0)
    if not along.any():
        return None
    alike = (s.assigned == s.assigned[choice]).all(1) & (s.result == s.result[choice]).all(1)
    rings = (s.after == RING).any(1)
    pair = [int(row) for ring in (False, True) for row in np.flatnonzero(alike & (rings == ring))[:1]]
    if len(pair) < 2:
        return None
    each = shares(s.assigned[pair[:1]], rule.sizes, mesh.sizes)
    nbytes = [
        sum(n * graph.type_of(op.inputs[i]).nbytes * float(share(each, dims)[0]) for i, dims, n in way)
        for way in (cudnn.workspace(op.name, op.params, rule, ring=ring) for ring in (False, True))
    ]
    gathered, passed = (float(s.cost[row]) * c.weight for row in pair)
    axes = " and ".join(name for name, cut in zip(mesh.names, along, strict=True) if cut)
    return _Ways(axes, bool(rings[choice]), (gathered, passed), (nbytes[0], nbytes[1]))


def _compared(each: Sequence[_Ways]) -> str:
    gathered, passed = (
        f"{seconds(sum(way.seconds[k] for way in each))} and {size(max(way.nbytes[k] for way in each))}" for k in (0, 1)
    )
    rings, axes = sum(way.is_ring for way in each), each[0].axes
    share_of = f" ({rings} of {len(each)})" if rings < len(each) else ""
    if rings:
        return f"keys and values are passed round in a ring along {axes}{share_of}, {passed}; gathered, {gathered}"
    return f"keys and values are gathered along {axes}, {gathered}; passed round in a ring, {passed}"


def uneven_loads(account: Imbalance) -> list[str]:
    """A note per reason for more than an even share of the FLOPs that could have been avoided."""
    return [f"more than an even share per device: {line}" for line in account.without("uncuttable", "chosen").lines()]


def _without_a_cut(graph: Graph, grouping: Grouping) -> list[str]:
    """A note per kind of operation whose rule allows no dimension to be cut, with the reason."""
    whole: dict[tuple[str, str], tuple[int, str]] = {}
    for c in grouping.groups:
        if c.op >= 0 and graph.types[c.value].size > 1 and not grouping.rules[graph.by_index[c.op].signature].free:
            op = graph.by_index[c.op]
            if op.name == manual.MANUAL:
                continue
            key = op.name, reason(op)
            count, line = whole.get(key, (0, op.source))
            whole[key] = (count + 1, line)
    return [
        f"{name} runs replicated ({n} times{f', first at {line}' if line else ''}): {why}"
        for (name, why), (n, line) in whole.items()
    ]


def _partly_cut(graph: Graph, grouping: Grouping) -> list[str]:
    """A note per kernel that is cut along some axes of its grid, on those along which it is not, with the reason."""
    calls = (graph.by_index[c.op] for c in grouping.groups if c.op >= 0)
    cut = [(op, rule) for op in calls if op.name == "pallas_call" and (rule := grouping.rules[op.signature]).free]
    kernels = grouped(
        ((op.params["name"], pallas.uncut_axes(op.params, rule)), op.source)
        for op, rule in cut
        if rule.origin == "autopar"
    )
    return [
        f"pallas_call {name} is not cut ({len(lines)} times{f', first at {lines[0]}' if lines[0] else ''}) along {why}"
        for (name, why), lines in kernels.items()
        if why
    ]


def _partly_manual(graph: Graph) -> Iterator[str]:
    """A note for every `shard_map` that is manual over some of the axes only."""
    for op in manual.calls(graph):
        call = manual.call_of(op)
        automatic = [axis for axis, size in call.mesh.items() if axis not in call.axes and size > 1]
        if automatic:
            yield (
                f"shard_map at {manual.line(op)} is manual over {', '.join(call.axes)}: devices along "
                f"{', '.join(automatic)} all do the same; name these axes in its specs, and in axis_names if given"
            )
