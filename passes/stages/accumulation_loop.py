"""A step with two loops over its microbatches as two steps of one loop each, which run one after the other.

The first loop computes totals that the second reads, such as the fractions of tokens per expert in a balance loss.
They become arguments of the second step, beside those of the step. An operation that only broadcasts such a total over
the batch moves into the prologue of the second loop, so that the total is transferred and not its broadcast. Operations
of the first loop that the second repeats are in the second loop already (`autopar.passes.microbatch.analysis`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.graph import Atom
from autopar.passes.microbatch.microbatches import Microbatches
from autopar.passes.microbatch.programs import PlacedOp
from autopar.passes.stages.assign import whole_operands
from autopar.passes.stages.updates import SHAPE_OPS


def separate_loops(split: Microbatches) -> tuple[Microbatches, Microbatches]:
    """Two steps: results of the first loop are the values that are read later, further arguments of the second."""
    first, second = split.loops
    ops_between, expansions = _spread(first.after)
    prologue = tuple(sorted((*split.prologue, *expansions), key=lambda p: p.op.index))
    first_results = {v for p in ops_between for v in p.op.outputs} | {t.value for t in first.totals}
    # what the second loop, what comes before and after it, and the results of the step read of the first
    needed = {v for p in second.body for v in whole_operands(p)}
    needed.update(a for p in (*prologue, *second.after) for a in p.op.inputs if isinstance(a, int))
    needed.update(a for a in split.flat.outputs if isinstance(a, int))
    transferred = tuple(sorted(first_results & needed))
    names = tuple(f"%{v}" for v in transferred)
    graph = split.graph
    before = replace(
        split,
        graph=replace(graph, outputs=transferred, output_paths=names),
        flat=replace(split.flat, outputs=transferred),
        loops=(replace(first, after=ops_between),),
    )
    after = replace(
        split,
        graph=replace(graph, inputs=(*graph.inputs, *transferred), input_paths=(*graph.input_paths, *names)),
        prologue=prologue,
        loops=(second,),
    )
    return before, after


def _spread(after: Sequence[PlacedOp]) -> tuple[tuple[PlacedOp, ...], tuple[PlacedOp, ...]]:
    """Operations between the loops: those whose results others among them read, and those that only change shapes."""
    operands: set[Atom] = set()
    computed: list[PlacedOp] = []
    expansions: list[PlacedOp] = []
    for placed in reversed(after):
        is_expansion = placed.op.name in SHAPE_OPS and not any(v in operands for v in placed.op.outputs)
        (expansions if is_expansion else computed).append(placed)
        operands.update(() if is_expansion else placed.op.inputs)
    return tuple(computed[::-1]), tuple(expansions[::-1])
