"""Copies of state in the layout of its gradient, where XLA's TPU compiler makes the gradient transposed.

The gradient of a weight is a product and a transpose. Where nothing stands between them, the compiler folds the
transpose into the product. A reduce-scatter of partial sums between them prevents that: the gradient is left in the
turned order of dimensions, the whole update runs in that order, and parameter and moments, which arrive in the usual
one, are copied into it as the backward pass begins:

    bytes(copy of state, strategy)  =  piece of the gradient  where its sums are scattered,  0 otherwise   -> add_turned
    alive                              from the first step of the backward pass until the update           -> _updates
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.cost_models.sizes import Sizes
from autopar.cost_models.steps import HEAVY, PRODUCTS, Step
from autopar.passes.strategies import REDUCE_SCATTER


def add_turned(sizes: Sizes, successors: Mapping[int, int]) -> None:
    """Add the copies of state; `successors` tells of each new state which argument's it is."""
    moments = sizes.lives.moments
    first = next((t for t, step in enumerate(moments) if step.op.phase == "backward"), None)
    if first is None:
        return
    transposed = _transposed(sizes)
    for born, step in enumerate(moments):
        if step.kind == HEAVY and step.name in PRODUCTS and step.op.phase == "backward":
            made = step.outputs[0]
            if made in transposed:
                for argument, updated in _updates(sizes, made, born, successors):
                    _add(sizes, made, argument, first, updated)


def _transposed(sizes: Sizes) -> frozenset[int]:
    """Values of which a transpose is made."""
    program = sizes.program
    steps = (s for s in program.top.steps if s.name == "transpose")
    return frozenset(program.behind(v) for s in steps for v in s.inputs)


def _updates(sizes: Sizes, gradient: int, born: int, successors: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Arguments that are updated from a gradient through arrays of its size, and the moments at which they are."""
    program, size = sizes.program, sizes.program.type_of(gradient).nbytes
    reached = {gradient}
    for moment in range(born + 1, len(sizes.lives.moments)):
        step: Step = sizes.lives.moments[moment]
        if step.op.phase != "update" or reached.isdisjoint(map(program.behind, sizes.w.reads(step))):
            continue
        for made in (v for v in step.outputs if program.type_of(v).nbytes == size):
            reached.add(made)
            if made in successors:
                yield successors[made], moment


def _add(sizes: Sizes, gradient: int, argument: int, birth: int, death: int) -> None:
    home = sizes.model.clustering.homes.get(gradient)
    if home is None or home.view is not None:
        return
    cluster, step = sizes.model.clustering.clusters[home.cluster], sizes.makers[gradient]
    s, kind = cluster.strategies, sizes.kind(gradient)
    scattered = (s.after == REDUCE_SCATTER).any(1)
    if cluster.op == step.op.index and scattered.any():
        key = ("turned", s.index, home.dims, kind)
        at = sizes.at(key, lambda: scattered * sizes.held(s, home.dims, kind))
        sizes.add("copy", argument, birth, death, at, node=home.cluster)
