"""A step with two loops over its microbatches as two steps of one loop each, to be run one after the other.

The first gives the totals that the second reads, such as the fractions of tokens per expert in a balance loss; they are
arguments of the second, beside those of the step. What only spreads such a total over the batch stands before the
second loop, so that the total is handed over and not what it was spread to. What the second repeats of the first is in
its own loop already (`autopar.passes.microbatch.analysis`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.graph import Atom
from autopar.passes.microbatch.analysis import Microbatches
from autopar.passes.microbatch.programs import Placed
from autopar.passes.stages.assign import whole
from autopar.passes.stages.updates import SPREAD


def apart(split: Microbatches) -> tuple[Microbatches, Microbatches]:
    """The first loop with the values of it that are read later as its results; the second with them as arguments."""
    first, second = split.sweeps
    kept, spread = _spread(first.after)
    prologue = tuple(sorted((*split.prologue, *spread), key=lambda p: p.op.index))
    made = {v for p in kept for v in p.op.outputs} | {t.value for t in first.totals}
    own = {v for p in second.after for v in p.op.outputs} | {t.value for t in second.totals}
    read = {v for p in second.loop for v in whole(p)}
    read.update(a for p in (*prologue, *second.after) for a in p.op.inputs if isinstance(a, int) and a not in own)
    read.update(a for a in split.flat.outputs if isinstance(a, int) and a not in own)
    handed = tuple(sorted(made & read))
    names = tuple(f"%{v}" for v in handed)
    graph = split.graph
    before = replace(
        split,
        graph=replace(graph, outputs=handed, output_paths=names),
        flat=replace(split.flat, outputs=handed),
        sweeps=(replace(first, after=kept),),
    )
    after = replace(
        split,
        graph=replace(graph, inputs=(*graph.inputs, *handed), input_paths=(*graph.input_paths, *names)),
        prologue=prologue,
        sweeps=(second,),
    )
    return before, after


def _spread(after: Sequence[Placed]) -> tuple[tuple[Placed, ...], tuple[Placed, ...]]:
    """Operations after the first loop that others after it read, and those that only spread what these make."""
    read: set[Atom] = set()
    kept: list[Placed] = []
    spread: list[Placed] = []
    for placed in reversed(after):
        last = placed.op.name in SPREAD and not any(v in read for v in placed.op.outputs)
        (spread if last else kept).append(placed)
        read.update(() if last else placed.op.inputs)
    return tuple(kept[::-1]), tuple(spread[::-1])
