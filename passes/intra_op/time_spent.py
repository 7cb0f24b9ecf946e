"""Where the predicted time of a program on one mesh goes, by source line: of a step, or of one stage in all its passes.

    compute           operations at the roofline, without the reduction of their partial sums
    memory traffic    what light operations read and write
    communication     reshards and reductions, less what computation hides
    host              copies of offloaded state
    other             local slices, and all lines that take less than `LEAST` of the step

The rows add up to the objective of the program's problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_models.sharding.groups import Model
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph
from autopar.ir.problem import Ints
from autopar.passes.intra_op import extract

LEAST = 1e-4  # share of the step of a row that is told by itself


@dataclass(frozen=True, slots=True)
class Spent:
    """Time of a step that one source line takes.

    Attributes:
        source: the line, "file.py:line"; "" if none is known.
        phase: "forward", "backward" or "update"; "" if none is known.
        kind: "compute", "memory traffic", "communication", "host" or "other"; in a pipeline "idle", and "first loop"
            for one that runs first.
        seconds: s per step.
    """

    source: str
    phase: str
    kind: str
    seconds: float


def time_spent(
    graph: Graph, model: Model, assignment: Ints, planned: Sequence[Collective], mesh: LogicalMesh, host: float
) -> tuple[Spent, ...]:
    """Seconds per step by source line, phase and kind, the most first.

    Args:
        graph: the program.
        model: its problem.
        assignment: the solution.
        planned: its collectives.
        mesh: the mesh.
        host: seconds of copies of offloaded state.
    """
    step, seconds = model.problem.value(assignment), dict[tuple[str, str, str], float]()

    def add(op: int, kind: str, amount: float, source: str = "") -> None:
        at = graph.by_index.get(op)
        key = source or ("" if at is None else at.source), "" if at is None else at.phase, kind
        seconds[key] = seconds.get(key, 0.0) + amount

    for op, amount in extract.operation_seconds(model, assignment):
        add(op, "compute", amount)
    for charge, amount in extract.traffic_seconds(model, assignment, mesh):
        add(charge.op, "memory traffic", amount)
    reads = {use.site: use.op for use in model.grouping.uses}
    for c, amount in extract.visible_seconds(graph, model, planned, mesh):
        reduces = c.op not in reads
        op = int(c.op.removeprefix("op")) if reduces else reads[c.op]
        add(op, "communication", amount, c.source)
        if reduces:  # the seconds of the operation have it too
            add(op, "compute", -amount)
    add(-1, "host", host)
    rows = [Spent(*key, amount) for key, amount in seconds.items() if amount > LEAST * step]
    rest = Spent("", "", "other", max(0.0, step - math.fsum(row.seconds for row in rows)))
    return (*sorted(rows, key=lambda row: (-row.seconds, row.source, row.phase, row.kind)), rest)
