"""Which arguments of a step in stages may be offloaded to host memory between two steps.

Of the arguments that the update alone reads (`autopar.passes.remat.offload`), those

    that no pass reads            the update program of the stage that stores it copies it to the device, once per step
    with a value of their own     the next value is one result of the step, which that program copies back
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from autopar.ir.train_state import match_state
from autopar.passes.stages.divide import Stages


def offloadable_in_stages(stages: Stages, positions: Sequence[int]) -> tuple[int, ...]:
    """Those of these positions of arguments that may be offloaded, in their order.

    Args:
        stages: the step in stages.
        positions: of the arguments that may be offloaded on one mesh.
    """
    inputs, owners, read = stages.split.graph.inputs, stages.updates.owners, {*_read_by_passes(stages)}
    results = Counter(stages.split.flat.outputs)
    successor = {i: stages.split.flat.outputs[out] for out, i in match_state(stages.split.graph).items()}
    return tuple(i for i in positions if inputs[i] in owners and inputs[i] not in read and results[successor[i]] == 1)


def next_values(stages: Stages, offloaded: frozenset[int]) -> frozenset[int]:
    """The values that are the next values of these arguments."""
    graph, outputs = stages.split.graph, stages.split.flat.outputs
    carried = ((outputs[out], graph.inputs[i]) for out, i in match_state(graph).items())
    return frozenset(value for value, argument in carried if isinstance(value, int) and argument in offloaded)


def _read_by_passes(stages: Stages) -> Iterator[int]:
    """The arguments that prologues and passes read."""
    for stage in stages.stages:
        yield from stage.arguments
        yield from (v for pass_ in stage.passes.values() for v in pass_.blocks)
    if stages.first_loop is not None:
        yield from _read_by_passes(stages.first_loop)
