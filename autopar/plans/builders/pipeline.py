"""The plan of a step in stages: layouts inside every stage, and predicted step time and memory.

    layouts       every stage planned on its submesh (`autopar.passes.stages.plan_all`), or a saved plan's   -> kept
    step time     simulation of the schedule's instruction lists with the times of these plans, and with transfers at
                  the rate of the link between submeshes (`autopar.cost_models.pipeline`)
    memory        of every stage with as many microbatches as its rank has in flight                        -> _memory

Stages on one rank share the memory of its devices.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.cost_models.compiler.backends import backend_of
from autopar.cost_models.flops import main_dtype, work
from autopar.cost_models.pipeline import Prices, simulate
from autopar.errors import PlanMismatchError
from autopar.hardware.cluster import Cluster
from autopar.hardware.meshes import Target
from autopar.ir.graph import Graph, graph_hash
from autopar.ir.keyed import totals
from autopar.ir.layout import Layout, ProgramLayouts, even, replicated
from autopar.ir.text import size
from autopar.ir.trace import Traced
from autopar.ir.train_state import match_state
from autopar.passes.inter_op.pipelines import Pipelined, StageChoice, avals
from autopar.passes.inter_op.simulate import transfer_seconds
from autopar.passes.intra_op.time_spent import Spent
from autopar.passes.microbatch.loop import StepPrograms
from autopar.passes.remat import choose_offload
from autopar.passes.remat.offload import offloadable
from autopar.passes.stages.graph import stage_graph
from autopar.passes.stages.memory import whole_bytes
from autopar.passes.stages.offload import offloadable_in_stages
from autopar.passes.stages.plan import StagePlan
from autopar.passes.stages.plan_all import CodegenStage, PlannedStage, StagePlans, pipeline_times
from autopar.passes.stages.summary import SavedStage
from autopar.plans import imbalance
from autopar.plans.builders.common import build
from autopar.plans.builders.notes import (
    attention_over_positions,
    masked_products,
    replicated_operations,
    uneven_loads,
)
from autopar.plans.forms import pipeline_parallelism
from autopar.plans.plan import Plan
from autopar.plans.record import Stage
from autopar.plans.validation.consistency import check_all, mismatches, unlike
from autopar.plans.validation.layouts import check_layouts, check_offloaded
from autopar.rules import rules_of
from autopar.schedules.complete import forward_only


def choice_of(plan: Plan) -> StageChoice:
    """The decisions of a plan."""
    inner = plan.mesh_sizes[1:]
    ranks = sorted({(stage.rank, tuple(stage.submesh.values())) for stage in plan.stages})
    extents = tuple(math.prod(shape) // math.prod(inner) for _, shape in ranks)
    shapes = tuple(shape for _, shape in ranks)
    sliced = shapes == tuple((extent, *inner) for extent in extents)
    return StageChoice(
        tuple(stage.layers[0] for stage in plan.stages[1:]),
        extents,
        plan.schedule,
        plan.num_microbatches,
        plan.batch,
        plan.per_microbatch,
        plan.remat,
        shapes=() if sliced else shapes,
        pieces=plan.pieces,
        offloaded=plan.offloaded,
    )


def kept(plan: Plan, traced: Traced, pipelined: Pipelined, registered: Mapping[str, str]) -> StagePlans[CodegenStage]:
    """The stages of a saved plan, with its layouts.

    Raises:
        PlanMismatchError: programs of stages differ from those that were planned.
    """
    types, programs = avals(traced, pipelined.stages), StepPrograms(pipelined.stages.split)
    plans: list[SavedStage] = []
    for number, stage in enumerate(plan.stages):
        graph, mesh = stage_graph(pipelined.stages, number, types, programs), pipelined.mesh(number)
        if graph_hash(graph.graph) != stage.graph_hash:
            raise PlanMismatchError(
                f"{stage.name} of the plan is another program than this autopar makes of it (planned with "
                f"{plan.version}). Plan again."
            )
        with mismatches():
            check_layouts(plan, number, graph.graph, mesh.sizes, registered)
        layouts = ProgramLayouts(stage.values, stage.uses, stage.copies, stage.rings)
        plans.append(SavedStage(graph, mesh, rules_of(graph.graph, registered), layouts))
    with mismatches():
        _check(plan, traced.graph, pipelined, plans)
    offloaded = frozenset(pipelined.layers.graph.inputs[i] for i in plan.offloaded)
    return StagePlans(pipelined.stages, tuple(plans), len(plans), offloaded)


def _check(plan: Plan, graph: Graph, pipelined: Pipelined, plans: Sequence[SavedStage]) -> None:
    """FieldError for the first field of a plan that differs from its stages."""
    for number, stage in enumerate(plan.stages):
        at = f"stages[{number}]"
        check_all(
            unlike(f"{at}.rank", stage.rank, pipelined.schedule.pipeline.placement[number]),
            unlike(f"{at}.layers", stage.layers, pipelined.first[number : number + 2]),
            unlike(f"{at}.arguments", stage.arguments, _arguments(pipelined, number)),
        )
    inputs = _inputs(graph, pipelined, [kept.arguments(kept.graph) for kept in plans], len(plan.mesh_sizes))
    check_all(unlike("inputs", plan.inputs, inputs), unlike("outputs", plan.outputs, _outputs(graph, inputs)))
    check_offloaded(plan, offloadable_in_stages(pipelined.stages, offloadable(graph, plan.donated)))


def bounded_by(plan: Plan, seconds: float) -> Plan:
    """The plan with a lower bound (s) on the step of all plans; without one if the bound contradicts the plan."""
    if seconds > plan.objective_s:
        return plan
    return replace(plan, lower_bound_s=seconds, gap=1 - seconds / plan.objective_s)


def make_plan(
    graph: Graph,
    pipelined: Pipelined,
    plans: StagePlans[PlannedStage],
    target: Target,
    donated: tuple[int, ...],
    trace_s: float,
) -> Plan:
    """The plan of a pipeline.

    Args:
        graph: the step.
        pipelined: the step in stages.
        plans: their layouts.
        target: the mesh of all devices.
        donated: positions of the argument leaves whose buffers the step may reuse.
        trace_s: seconds of tracing.
    """
    costs = _priced(plans, pipelined, target.cluster)
    parts = {**_pipeline_seconds(plans, pipelined, costs), **_before(pipelined)}
    mesh, choice, solved = target.logical, pipelined.choice, [plan.solution for plan in plans.plans]
    stages = tuple(_stage(pipelined, plans, s, costs) for s in range(len(plans.plans)))
    inputs = _inputs(graph, pipelined, [plan.summary.arguments for plan in plans.plans], len(mesh.sizes))
    plan = build(
        graph,
        pipelined.layers.graph,
        mesh,
        target.cluster.name,
        stages=stages,
        inputs=inputs,
        outputs=_outputs(graph, inputs),
        donated=donated,
        parts=parts,
        seconds=math.fsum(parts.values()),
        solutions=solved,
        parallelism=pipeline_parallelism(plans, stages, graph.inputs, graph.input_paths),
    )
    return replace(
        plan,
        collectives=tuple(c for stage in stages for c in stage.collectives),
        phases={"trace": trace_s},
        schedule=choice.schedule,
        num_microbatches=choice.microbatches,
        batch=choice.batch,
        per_microbatch=choice.per_microbatch,
        remat=choice.remat,
        pieces=choice.pieces,
        offloaded=tuple(sorted(choice.offloaded)),
        spent=_spent(plan, plans),
        transfers={f"{a}>{b}": float(seconds) for (a, b), seconds in costs.transfer.items()},
        transfer_bytes={f"{a}>{b}": float(nbytes) for (a, b), nbytes in costs.border.items()},
        notes=(
            *(f"side effect kept as it is: {effect}" for effect in graph.effects),
            *choice.notes,
            *choose_offload.notes(graph, mesh, choice.offloaded, _host_bytes(stages)),
            *dict.fromkeys(warning for s in solved for warning in s.warnings),
            *_missing(pipelined, stages),
            *_of_stages(plans, stages),
        ),
    )


def _stage(pipelined: Pipelined, plans: StagePlans[PlannedStage], number: int, costs: Prices) -> Stage:
    plan, first = plans.plans[number], pipelined.first
    passes = costs.passes(pipelined.schedule.pipeline.split)
    peak, kinds = _memory(pipelined, plan, number)
    mesh, layouts = pipelined.mesh(number), plan.layouts
    return Stage(
        f"stage {number}",
        dict(zip(mesh.names, mesh.sizes, strict=True)),
        mesh.size,
        layouts.values,
        layouts.uses,
        layouts.copies,
        peak_memory_bytes=peak,
        memory=kinds,
        rank=pipelined.schedule.pipeline.placement[number],
        layers=(first[number], first[number + 1]),
        arguments=_arguments(pipelined, number),
        seconds={
            **{kind: float(passes[kind][number]) for kind in pipelined.schedule.pipeline.kinds},
            "once": float(costs.reduce[number] + costs.update[number]),
        },
        collectives=plan.summary.collectives,
        graph_hash=plan.summary.graph_hash,
        host_memory_bytes=round(plan.summary.host_bytes),
        rings=layouts.rings,
    )


def _arguments(pipelined: Pipelined, number: int) -> tuple[int, ...]:
    """Positions of the argument leaves that a stage stores between steps."""
    owners = pipelined.stages.updates.owners
    return tuple(i for i, v in enumerate(pipelined.layers.graph.inputs) if owners.get(v) == number)


def _inputs(
    graph: Graph, pipelined: Pipelined, layouts: Sequence[Mapping[int, Layout | None]], axes: int
) -> tuple[Layout, ...]:
    """Layouts of the argument leaves on the submesh of the stage that stores them; `layouts`: in every stage."""
    owners = pipelined.stages.updates.owners

    def of(value: int) -> Layout:
        layout = layouts[owners[value]].get(value) if value in owners else None
        sizes = pipelined.mesh(owners[value]).sizes if value in owners else ()
        return replicated(axes) if layout is None else even(layout, graph.types[value].shape, sizes)

    return tuple(of(value) for value in graph.inputs)


def _outputs(graph: Graph, inputs: Sequence[Layout]) -> tuple[Layout, ...]:
    """Layouts of the results: state in its layout between steps, other results replicated."""
    state, whole = match_state(graph), replicated(len(inputs[0]))
    return tuple(inputs[state[i]] if i in state else whole for i in range(len(graph.outputs)))


# Prices


def _priced(plans: StagePlans[PlannedStage], pipelined: Pipelined, cluster: Cluster) -> Prices:
    """Times of the stages, and of the transfers between them."""
    costs = pipeline_times(plans)
    sizes = [math.prod(mesh.sizes) for mesh in pipelined.meshes]
    ends = [*itertools.accumulate(sizes)]
    on = pipelined.schedule.pipeline.placement

    def seconds(pair: tuple[int, int], nbytes: float) -> float:
        """Between neighbouring ranks the link at their border counts, between other ranks the slowest link."""
        ranks = sorted(on[s] for s in pair)
        device = ends[ranks[1] - 1] if ranks[1] - ranks[0] == 1 else 0
        return transfer_seconds(cluster, nbytes, device, min(sizes[r] for r in ranks))

    return replace(costs, transfer={pair: seconds(pair, nbytes) for pair, nbytes in costs.border.items()})


def _pipeline_seconds(plans: StagePlans[PlannedStage], pipelined: Pipelined, costs: Prices) -> Mapping[str, float]:
    """Seconds of the schedule, and those that copies of offloaded state add to it."""
    seconds = simulate(pipelined.schedule, costs).seconds
    if not plans.offloaded:
        return {"pipeline": seconds}
    update = tuple(plan.summary.times.update for plan in plans.plans)
    without = simulate(pipelined.schedule, replace(costs, update=update)).seconds
    return {"pipeline": without, "host": seconds - without}


def _of_stages(plans: StagePlans[PlannedStage], stages: Sequence[Stage]) -> Iterator[str]:
    """Notes of the programs of stages; stages that are isomorphic to an earlier one have its notes."""
    notes: list[list[str]] = []
    for solved, stage in zip(plans.plans, stages, strict=True):
        notes.append(_of_program(solved, stage) if isinstance(solved, StagePlan) else notes[solved.leader])
    for note in dict.fromkeys(itertools.chain(*notes)):
        names = [stage.name for stage, of in zip(stages, notes, strict=True) if note in of]
        several = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
        yield f"{'every stage' if len(names) == len(stages) else several}: {note}"


def _of_program(solved: StagePlan, stage: Stage) -> list[str]:
    """Notes of the program of one stage."""
    graph, mesh = solved.graph.graph, solved.mesh
    return [
        *replicated_operations(graph, solved.model.grouping),
        *masked_products(graph, mesh.device),
        *attention_over_positions(graph, solved.model, solved.solution.assignment, mesh),
        *uneven_loads(imbalance.measure(graph, solved.rules, stage, backend_of(mesh.device))),
    ]


def _spent(plan: Plan, plans: StagePlans[PlannedStage]) -> tuple[Spent, ...]:
    """Seconds per step by source line of the devices that have most to do, and those in which they are idle."""
    count = plan.num_microbatches
    busiest = max(plan.ranks, key=lambda rank: math.fsum(t for s in rank for t in s.busy(count).values()))
    on_busiest = [p for p, stage in zip(plans.plans, plan.stages, strict=True) if stage.rank == busiest[0].rank]
    rows = (row for solved in on_busiest for row in solved.summary.spent)
    seconds = totals(((row.source, row.phase, row.kind), row.seconds) for row in rows)
    if before := plan.parts.get("first loop", 0.0):
        seconds["", "forward", "first loop"] = before
    idle = Spent("", "", "idle", plan.step_time_s - math.fsum(seconds.values()))
    return (*sorted((Spent(*key, t) for key, t in seconds.items()), key=lambda row: -row.seconds), idle)


def _before(pipelined: Pipelined) -> Mapping[str, float]:
    """Seconds of a loop over the microbatches that runs first: its FLOPs at the peak rate."""
    ahead = pipelined.stages.first_loop
    if ahead is None:
        return {}
    seconds = tuple(_peak_seconds(pipelined, s, ahead.stages[s].passes["F"].ops) for s in range(len(ahead.stages)))
    return {"first loop": simulate(forward_only(pipelined.schedule.pipeline, ahead.borders), Prices(seconds)).seconds}


def _peak_seconds(pipelined: Pipelined, number: int, ops: Sequence[Any]) -> float:
    mesh, split = pipelined.mesh(number), pipelined.stages.split
    amount = math.fsum(work(split.graph, placed.op) for placed in ops) / split.count
    return amount / (mesh.device.peak(main_dtype(split.graph)) * mesh.device.efficiency * mesh.size)


# Memory


def _missing(pipelined: Pipelined, stages: Sequence[Stage]) -> Iterator[str]:
    """A note for each rank whose stages together need more than their limits."""
    placement, limits = pipelined.schedule.pipeline.placement, pipelined.choice.limits
    for rank in dict.fromkeys(placement) if limits else ():
        numbers = [s for s, other in enumerate(placement) if other == rank]
        nbytes = sum(limits[s].nbytes for s in numbers)
        needed = sum(stages[s].peak_memory_bytes for s in numbers)
        if needed > nbytes > 0:
            names = "stage " + " and ".join(map(str, numbers))
            yield f"{names} needs {size(needed - nbytes)} more than the {size(nbytes)} that a device has for it"


def _host_bytes(stages: Sequence[Stage]) -> int:
    """Bytes per device of state in host memory, of the rank with most."""
    nbytes = Counter[int]()
    for stage in stages:
        nbytes[stage.rank] += stage.host_memory_bytes
    return max(nbytes.values())


def _memory(pipelined: Pipelined, plan: PlannedStage, number: int) -> tuple[int, Mapping[str, int]]:
    """Peak bytes per device of a stage, and by kind."""
    under_way, memory = pipelined.in_flight(number), plan.summary.memory
    passes = {
        "arguments": memory.batch,
        "resharding": memory.copies,
        "residuals": under_way * memory.stash,
        "temporaries": memory.temporaries,
    }
    most = passes if sum(passes.values()) >= memory.update else {"update": memory.update}
    kinds = {"state": memory.state, "gradients": memory.sums, **most}
    return whole_bytes(memory.peak(under_way)), {kind: math.ceil(nbytes) for kind, nbytes in kinds.items() if nbytes}
