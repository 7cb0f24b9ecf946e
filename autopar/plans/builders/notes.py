"""What a plan notes of a program, on one mesh or of a stage: operations that run replicated, or more than once."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost_models.compiler.backends import backend_of
from autopar.cost_models.sharding.groups import Grouping
from autopar.hardware.description import Device
from autopar.ir.graph import Graph
from autopar.ir.op_sets import RAGGED_PRODUCTS
from autopar.plans.imbalance import Imbalance
from autopar.rules import manual
from autopar.rules.inherent import reason
from autopar.rules.ragged import batches_rows


def replicated_operations(graph: Graph, grouping: Grouping) -> list[str]:
    """A note per kind of operation that runs replicated, with the reason."""
    return [*_without_a_cut(graph, grouping), *dict.fromkeys(_partly_manual(graph))]


def masked_products(graph: Graph, device: Device) -> list[str]:
    """A note on products over groups of rows that a backend computes as one product of all rows for each group."""
    products = [op for op in graph.walk() if op.name in RAGGED_PRODUCTS and not batches_rows(op.params)]
    if not products or not backend_of(device).masks_groups:
        return []
    groups, line = max(graph.type_of(op.inputs[2]).shape[-1] for op in products), products[0].source
    return [
        f"products over groups of rows ({len(products)}{f', first at {line}' if line else ''}): XLA on {device.name} "
        f"multiplies all rows with the matrix of every group, up to {groups} times the FLOPs of the groups"
    ]


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
