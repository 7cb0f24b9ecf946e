"""What a plan notes of a program, on one mesh or of a stage: operations that run replicated, and uneven loads."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost_models.sharding.groups import Grouping
from autopar.ir.graph import Graph
from autopar.plans.imbalance import Imbalance
from autopar.rules import manual
from autopar.rules.inherent import reason


def replicated_operations(graph: Graph, grouping: Grouping) -> list[str]:
    """A note per kind of operation that runs replicated, with the reason."""
    return [*_without_a_cut(graph, grouping), *dict.fromkeys(_partly_manual(graph))]


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
