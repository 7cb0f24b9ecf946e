"""The plan of a solution: layouts, collectives, predicted costs, and notes.

solution -> layouts, collectives      passes/intra_op/extract.py
layouts of results                    -> _output_layout
seconds by source line                passes/intra_op/time_spent.py
seconds by part                       -> _parts
memory                                cost_models/memory/report.py
what is replicated or uneven, and why plans/builders/notes.py
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.cost_models import offload
from autopar.cost_models.compiler import hbm_traffic
from autopar.cost_models.compiler.backends import backend_of
from autopar.cost_models.memory.report import over_time
from autopar.cost_models.sharding.groups import Model
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph
from autopar.ir.layout import Layout, ProgramLayouts, cuts, divides, replicated
from autopar.ir.trace import Traced
from autopar.ir.train_state import match_state
from autopar.passes.intra_op import extract
from autopar.passes.intra_op.time_spent import time_spent
from autopar.passes.mesh_search.planner import MeshSolution, Parts, Planner
from autopar.passes.op_groups.constraints import Pinned
from autopar.passes.remat.choose import Unfit
from autopar.passes.remat.options import Options
from autopar.passes.solver.optimize import Solution
from autopar.plans import imbalance
from autopar.plans.builders.common import build
from autopar.plans.builders.notes import (
    attention_over_positions,
    masked_products,
    replicated_operations,
    uneven_loads,
)
from autopar.plans.forms import mesh_parallelism
from autopar.plans.plan import Plan
from autopar.plans.record import Stage
from autopar.rules import Rule

#: Moments of memory over time that a plan contains.
MOMENTS = 64


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan, and its origin.

    Attributes:
        plan: the plan.
        graph: the graph as executed, with rematerialisation.
        rules: signature of an operation of `graph` -> sharding rule.
        model: the problem.
        solution: the solution of the problem.
    """

    plan: Plan
    graph: Graph
    rules: Mapping[int, Rule]
    model: Model
    solution: Solution


def make_plan(
    traced: Traced,
    mesh: LogicalMesh,
    cluster_name: str,
    options: Options,
    parts: Parts | None = None,
    cutoff: float = math.inf,
) -> Planned:
    """Plan one traced function on one mesh.

    Args:
        traced: the program.
        mesh: the mesh to plan for.
        cluster_name: recorded in the plan.
        options: the options of the user.
        parts: the step, if the program runs it in microbatches.
        cutoff: s; see `autopar.passes.mesh_search.planner.Planner.plan`, also for errors.
    """
    try:
        mesh_solution = Planner(traced, mesh, options, parts or Parts(traced)).plan(cluster_name, cutoff)
    except Unfit as unfit:
        raise unfit.prove() from None
    draft = mesh_solution.draft
    return Planned(export(mesh_solution), draft.graph, draft.rules, draft.model, mesh_solution.solution)


def export(mesh_solution: MeshSolution) -> Plan:
    """The plan of a solution."""
    begin = time.perf_counter()
    draft, solution, mesh = mesh_solution.draft, mesh_solution.solution, mesh_solution.mesh
    graph, model, pinned = draft.graph, draft.model, draft.pinned
    layouts = extract.layouts(model, solution.assignment)
    state = match_state(graph)
    inputs = tuple(layouts.values.get(v, replicated(len(mesh.sizes))) for v in graph.inputs)
    outputs = tuple(_output_layout(graph, i, layouts, state, inputs, pinned, mesh) for i in range(len(graph.outputs)))
    planned = extract.collectives(graph, model, solution.assignment, layouts, mesh)
    host_bytes = draft.host_bytes(mesh, solution)
    copied = offload.seconds(host_bytes, mesh) if draft.hosted else 0.0
    parts = {**_parts(model, solution, copied), "hidden": extract.hidden_seconds(graph, model, planned, mesh)}
    stage = Stage(
        "all",
        dict(zip(mesh.names, mesh.sizes, strict=True)),
        mesh.size,
        layouts.values,
        layouts.uses,
        layouts.copies,
        peak_memory_bytes=mesh_solution.memory.peak_bytes,
        memory=mesh_solution.memory.kinds,
        host_memory_bytes=round(host_bytes),
        over_time=over_time(draft.liveness, solution.assignment, MOMENTS),
        rings=layouts.rings,
    )
    account = imbalance.measure(graph, model.grouping.rules, stage, backend_of(mesh.device))
    plan = build(
        mesh_solution.written,
        graph,
        mesh,
        mesh_solution.cluster_name,
        stages=(stage,),
        inputs=inputs,
        outputs=outputs,
        donated=mesh_solution.donated,
        parts=parts,
        seconds=solution.objective,
        solutions=[solution],
        parallelism=mesh_parallelism(graph, stage, model.grouping.rules),
    )
    plan = replace(
        plan,
        collectives=planned,
        lower_bound_s=solution.lower_bound,
        gap=float(solution.gap),
        solver_status=solution.status,
        flops_per_device=account.ratio * account.total / mesh.size,
        bytes_per_device=hbm_traffic.bytes_accessed(graph, stage, planned, device=mesh.device),
        remat=draft.policies,
        offloaded=tuple(sorted(draft.hosted)),
        spent=time_spent(graph, model, solution.assignment, planned, mesh, copied),
        notes=(
            *mesh_solution.notes,
            *(f"side effect kept as it is: {effect}" for effect in graph.effects),
            *replicated_operations(graph, model.grouping),
            *masked_products(graph, mesh.device),
            *attention_over_positions(graph, model, solution.assignment, mesh),
            *_undivided(graph, inputs, mesh),
            *uneven_loads(account),
            *solution.warnings,
        ),
    )
    return replace(plan, phases={**mesh_solution.phases, "export": time.perf_counter() - begin})


def _output_layout(
    graph: Graph,
    position: int,
    program: ProgramLayouts,
    state: Mapping[int, int],
    inputs: tuple[Layout, ...],
    pinned: Pinned,
    mesh: LogicalMesh,
) -> Layout:
    """The layout in which a result is returned.

    A pinned result has its pin, and the next state has the layout of the state. Any other result keeps its layout if
    that divides it, has no partial sums, and the result is not empty (see `strategies.layouts_of`); otherwise it is
    replicated.
    """
    if position in pinned.results:
        return pinned.results[position]
    if position in state:
        return inputs[state[position]]
    atom = graph.outputs[position]
    of_value = program.values.get(atom) if isinstance(atom, int) else None
    layout = program.uses.get(f"out{position}", of_value)
    shape = graph.type_of(atom).shape
    if layout is None or 0 in shape or not divides(layout, shape, mesh.sizes) or -2 in layout:
        return replicated(len(mesh.sizes))
    return layout


def _parts(model: Model, solution: Solution, copied: float) -> Mapping[str, float]:
    """Seconds per step by part: operations with their reductions, reshards, and copies between device and host if any.

    `copied` are the seconds of these copies, which the node costs include.
    """
    choice = solution.assignment
    inside = sum(float(n.cost[c]) for n, c in zip(model.problem.nodes, choice, strict=True))
    seconds = {"operations": inside - copied, "reshards": max(0.0, solution.objective - inside)}
    return {**seconds, "host": copied} if copied else seconds


def _undivided(graph: Graph, inputs: tuple[Layout, ...], mesh: LogicalMesh) -> list[str]:
    """A note on the arguments that are replicated because no mesh axis divides any of their dimensions."""
    stuck = [
        path
        for path, v, layout in zip(graph.input_paths, graph.inputs, inputs, strict=True)
        if not cuts(layout, mesh.sizes)
        and graph.types[v].size > 1
        and not any(n % size == 0 for n in graph.types[v].shape for size in mesh.sizes if size > 1)
    ]
    if not stuck:
        return []
    sizes = ", ".join(f"{n}={s}" for n, s in zip(mesh.names, mesh.sizes, strict=True))
    shown = ", ".join(stuck[:4]) + (f" and {len(stuck) - 4} more" if len(stuck) > 4 else "")
    return [f"replicated because no dimension divides by the mesh ({sizes}): {shown}"]
