"""Copies of state in the layout of its gradient, where XLA's TPU compiler makes the gradient transposed.

The gradient of a weight is a product and a transpose. Where nothing stands between them, the compiler folds the
transpose into the product. A reduce-scatter of partial sums between them prevents that: the gradient is left in the
turned order of dimensions, the whole update runs in that order, and parameter and moments, which arrive in the usual
one, are copied into it as the backward pass begins:

    bytes(copy of state, strategy)  =  piece of the gradient  where its sums are scattered,  0 otherwise   -> add_turned
    alive                              from the first step of the backward pass until the update           -> _updates
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.cost_models.sizes import Sizes
from autopar.cost_models.steps import HEAVY, PRODUCTS
from autopar.passes.strategies import REDUCE_SCATTER


def add_turned(sizes: Sizes, successors: Mapping[int, int]) -> None:
    """Add the copies of state; `successors` tells of each new state which argument's it is."""
    moments = sizes.lives.moments
    first = next((t for t, step in enumerate(moments) if step.op.phase == "backward"), None)
    if first is None:
        return
    transposed = _transposed(sizes)
    gradients = [
        (born, step.outputs[0])
        for born, step in enumerate(moments)
        if step.kind == HEAVY and step.name in PRODUCTS and step.op.phase == "backward"
        if step.outputs[0] in transposed
    ]
    updates = _updates(sizes, [made for _, made in gradients], successors)
    for born, made in gradients:
        for argument, updated in updates[made]:
            if updated > born:
                _add(sizes, made, argument, first, updated)


def _transposed(sizes: Sizes) -> frozenset[int]:
    """Values of which a transpose is made."""
    program = sizes.program
    steps = (s for s in program.top.steps if s.name == "transpose")
    return frozenset(program.behind(v) for s in steps for v in s.inputs)


def _updates(
    sizes: Sizes, gradients: Sequence[int], successors: Mapping[int, int]
) -> Mapping[int, Sequence[tuple[int, int]]]:
    """Gradient -> arguments updated from it through arrays of its size, and the moments at which they are."""
    program = sizes.program
    found: dict[int, list[tuple[int, int]]] = {gradient: [] for gradient in gradients}
    sources = {gradient: {gradient: None} for gradient in found}  # value -> gradients that it is made from, in order
    for moment, step in enumerate(sizes.lives.moments):
        if step.op.phase == "update":
            read = map(program.behind, sizes.w.reads(step))
            for gradient in dict.fromkeys(g for v in read for g in sources.get(v, ())):
                size = program.type_of(gradient).nbytes
                for made in (v for v in step.outputs if program.type_of(v).nbytes == size):
                    sources.setdefault(made, {})[gradient] = None
                    if made in successors:
                        found[gradient].append((successors[made], moment))
    return found


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
