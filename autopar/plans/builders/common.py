"""What every plan says of its program, on one mesh and in stages alike.

    from the traced program    hash; paths, types and shapes of arguments and results
    from the stages            sizes of their problems; FLOPs utilization = FLOPs / (peak of all devices x step time)

What only one kind has, such as a schedule or seconds by source line, its builder adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.cost_models.flops import main_dtype, model_flops
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph, graph_hash
from autopar.ir.layout import Layout
from autopar.passes.solver.optimize import Solution
from autopar.plans.forms import Parallelism
from autopar.plans.plan import Plan
from autopar.plans.record import Stage


def build(
    written: Graph,
    executed: Graph,
    mesh: LogicalMesh,
    cluster: str,
    *,
    stages: tuple[Stage, ...],
    inputs: tuple[Layout, ...],
    outputs: tuple[Layout, ...],
    donated: tuple[int, ...],
    parts: Mapping[str, float],
    seconds: float,
    solutions: Sequence[Solution],
    parallelism: Parallelism,
) -> Plan:
    """A plan without bounds, collectives, phases and notes.

    Args:
        written: the program as traced; both utilizations include recomputation under the user's `jax.checkpoint`.
        executed: the program with all that is recomputed.
        mesh: the mesh of all devices.
        cluster: name of the cluster.
        stages: the stages with their layouts.
        inputs: layout of each argument leaf.
        outputs: layout of each result leaf.
        donated: positions of the argument leaves whose buffers the step may reuse.
        parts: part of the step -> seconds.
        seconds: predicted seconds per step.
        solutions: solution of each stage.
        parallelism: forms of parallelism, recognised from the layouts.
    """
    possible = mesh.device.peak(main_dtype(written)) * mesh.size * seconds
    flops = model_flops(executed)
    return Plan(
        graph_hash=graph_hash(written),
        mesh_names=mesh.names,
        mesh_sizes=mesh.sizes,
        cluster=cluster,
        stages=stages,
        inputs=inputs,
        outputs=outputs,
        input_paths=written.input_paths,
        output_paths=written.output_paths,
        input_types=tuple(str(written.types[v]) for v in written.inputs),
        input_shapes=tuple(written.types[v].shape for v in written.inputs),
        output_shapes=tuple(written.type_of(a).shape for a in written.outputs),
        donated=donated,
        collectives=(),
        step_time_s=seconds,
        parts=parts,
        objective_s=seconds,
        lower_bound_s=0.0,
        gap=1.0,
        solver_status="chosen",
        solver=solutions[0].solver_used,
        variables=sum(s.variables for s in solutions),
        variables_unfolded=sum(s.variables_unfolded for s in solutions),
        rows=sum(s.rows for s in solutions),
        phases={},
        mfu=model_flops(written) / possible if possible > 0 else 0.0,
        hfu=flops / possible if possible > 0 else 0.0,
        flops_per_device=flops / mesh.size,
        forms=parallelism.forms,
        read_in_parts=parallelism.read_in_parts,
    )
