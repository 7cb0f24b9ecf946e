"""Gradient accumulation: a step that takes its batch in microbatches, traced once more and planned like any other.

    trace -> split into `count` microbatches (`autopar.passes.microbatch.analysis`) -> one scan over them -> trace

State, arguments and results stay those of the step. Examples are dealt so that each microbatch has its part of every
piece that the batch is cut into over the devices, and none has to move; unless something is computed per microbatch:
then microbatches are runs of examples, so that results do not depend on the number of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax

from autopar import jax_compat
from autopar.ir.jaxpr import build_graph
from autopar.ir.trace import Traced
from autopar.passes.microbatch.analysis import split
from autopar.passes.microbatch.loop import StepPrograms


def accumulated(
    traced: Traced, count: int, batch: Sequence[int], devices: int, per_microbatch: Sequence[str] = ()
) -> Traced:
    """The step on `count` microbatches; itself if that is one.

    Args:
        traced: the step.
        count: number of microbatches.
        batch: positions of the argument leaves that hold the batch.
        devices: over how many devices the batch may be cut.
        per_microbatch: globs of what may be computed per microbatch; see `autopar.passes.microbatch.analysis.split`.

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
    return replace(traced, graph=build_graph(jax_compat.eliminate_dead_code(jaxpr), paths, results))
