"""Gradient accumulation: rewrites a step to loop over microbatches. The result is traced and planned like any step.

    trace -> split into `count` microbatches (`autopar.passes.microbatch.analysis`) -> one scan over them -> trace

State, arguments and results stay those of the step. A microbatch takes an equal part of every device's shard of the
batch, so no example moves between devices. Where something is computed per microbatch, a microbatch is a contiguous run
of examples instead, so that results do not depend on the number of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax

from autopar.ir.jaxpr import build_graph
from autopar.ir.simplify import simplified
from autopar.ir.trace import Traced
from autopar.passes.microbatch.analysis import split
from autopar.passes.microbatch.loop import StepPrograms


def accumulate_gradients(
    traced: Traced, count: int, batch: Sequence[int], devices: int, per_microbatch: Sequence[str] = ()
) -> Traced:
    """The step as a loop over `count` microbatches; the step itself if `count` is 1.

    Args:
        traced: the step.
        count: number of microbatches.
        batch: positions of the argument leaves that hold the batch.
        devices: number of devices over which the batch may be sharded.
        per_microbatch: globs of the values that may be computed per microbatch; see
            `autopar.passes.microbatch.analysis.split`.

    Raises:
        MicrobatchError: the batch does not divide, or examples depend on each other.
    """
    if count == 1:
        return traced
    programs = StepPrograms(
        split(traced.graph, count, batch, shards=1 if per_microbatch else devices, per_microbatch=per_microbatch)
    )
    jaxpr = jax.make_jaxpr(lambda *leaves: programs.step(leaves))(*traced.in_avals)
    paths, results = traced.graph.input_paths, traced.graph.output_paths
    return replace(traced, graph=build_graph(simplified(jaxpr), paths, results))
