"""The plan as tables for a terminal: layouts and their reasons, what a step takes, what is sent, what was proven.

    stages          of a pipeline: layers, devices, seconds per pass, memory               `stage_rows`
    arguments       one row per group of equal layers: "state/params/blocks/*/wq x4"       `argument_rows`
    activations     the largest values that operations make, by operation and source line  `activation_rows`
    collectives     by kind, axes and source line                                          `collective_rows`

The text is plain (no colour, 110 columns) and equal for equal plans.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Mapping, Sequence

from autopar.ir.collective import Collective
from autopar.ir.graph import Graph, Op
from autopar.ir.keyed import grouped
from autopar.ir.layout import local_shape, spec
from autopar.ir.text import WIDTH, Rows, excess, seconds, size, size_within, spec_text, table
from autopar.plans.record import PlanRecord, Stage
from autopar.plans.views.groups import argument_groups, host, label, owner, sections
from autopar.plans.views.parallelism import describe
from autopar.plans.views.reasons import Reasons, layout_text
from autopar.plans.views.usage import slowest

ACTIVATIONS = 10  # rows of the table of activations
COLLECTIVES = 16  # rows of the table of collectives

STATUS: Mapping[str, str] = {
    "certified": "optimum proven by bounds, without an ILP",
    "optimal": "optimum proven by the ILP solver",
    "optimal-tied": "optimum among plans that treat equal layers equally",
    "near-optimal": "within the gap of the optimum, proven by bounds",
    "least-memory": "least memory; the gap is of the peak",
    "open": "best plan found; the bounds prove no more than the gap",
    "time-limit": "best plan found within the time limit",
    "fallback": "best plan found without the ILP solver, which failed",
    "chosen": "the stages that were asked for, or the best found; the bounds prove no more than the gap",
}


def summary(plan: PlanRecord, graph: Graph | None = None) -> str:
    """The plan as text; with the graph as it is executed also activations, and reasons that name source lines."""
    reasons = None if graph is None or plan.pipelined else Reasons(plan, graph)
    parts = _head(plan)
    if plan.pipelined:
        parts.append(table("stages", ("", "layers", "devices", "per microbatch", "memory"), stage_rows(plan)))
    for title, members in sections(plan).items():
        parts.append(table(title, ("", "shape", "PartitionSpec", "why"), argument_rows(plan, members, reasons)))
    if reasons is not None:
        rows = activation_rows(plan, reasons)
        parts.append(table("largest activations", ("", "shape", "PartitionSpec", "why"), rows))
    if plan.collectives:
        parts.append(table("collectives", ("", "axes", "times", "bytes sent", "at"), collective_rows(plan)))
    return "\n".join([*parts, "", *_foot(plan)])


def _head(plan: PlanRecord) -> list[str]:
    """What the plan is for, its forms of parallelism, and the figures that matter most."""
    mesh = ", ".join(f"{n}={s}" for n, s in plan.mesh.items())
    peak, limit = plan.peak_memory_bytes, plan.memory_limit_bytes
    memory = f"{size_within(peak, limit)} of memory per device{excess(peak, limit)}"
    lines = (
        f"Plan for {math.prod(plan.mesh_sizes)} devices, mesh ({mesh}), on {plan.cluster}",
        describe(plan),
        f"{seconds(plan.step_time_s)} per step, {plan.mfu:.1%} of the peak FLOP/s, {memory}",
        *slowest(plan),
    )
    wrap = functools.partial(textwrap.wrap, width=WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return [part for line in lines for part in wrap(line)]


# Stages


def stage_rows(plan: PlanRecord) -> Rows:
    """(name, layers, devices, seconds of each pass, bytes per device) of every stage.

    Stages of one rank share its memory: where that is too little, each says by how much.
    """
    ends = [sum(s.devices for s in _ranks(plan)[: rank + 1]) for rank in range(len(_ranks(plan)))]
    needed = {stage.rank: sum(s.peak_memory_bytes for s in stages) for stages in plan.ranks for stage in stages}
    rows: Rows = []
    for stage in plan.stages:
        mesh = ", ".join(f"{name}={n}" for name, n in stage.submesh.items())
        last = ends[stage.rank] - 1
        passes = ", ".join(f"{kind} {seconds(t)}" for kind, t in stage.seconds.items())
        layers = _span(stage.layers[0], stage.layers[1] - 1)
        devices = f"{_span(last - stage.devices + 1, last)} ({mesh})"
        memory = size(stage.peak_memory_bytes) + excess(needed[stage.rank], plan.memory_limit_bytes)
        rows.append((stage.name, layers, devices, passes, memory))
    return rows


def _ranks(plan: PlanRecord) -> list[Stage]:
    """The first stage of every rank, in order."""
    return [stages[0] for stages in plan.ranks]


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


# Arguments


def argument_rows(plan: PlanRecord, members: Sequence[int], reasons: Reasons | None) -> Rows:
    """(path, shape, spec, why) of every group of leaves that differ in layer numbers only, of all stages together."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for key, group in argument_groups(plan, members).items():
        stage = owner(plan, group[0])
        submesh = "" if stage is None else str(stage.submesh)
        common = key if len(key) == 2 or stage is None else (*(part for part in key if part != stage.name), submesh)
        rows.setdefault(common, []).extend(group)
    return [_argument(plan, key, group, reasons) for key, group in rows.items()]


def _argument(plan: PlanRecord, key: tuple[str, ...], group: Sequence[int], reasons: Reasons | None) -> tuple[str, ...]:
    first = group[0]
    if len(key) == 2:
        why = f"lies as the parameter does{host(plan, first)}"
        return f"{key[0]}/... x{len(group)}", "of its parameter", "of its parameter", why
    why = _why(plan, group, reasons) + host(plan, first)
    return label([plan.input_paths[i] for i in group]), plan.input_types[first], spec_text(plan.in_specs()[first]), why


def _why(plan: PlanRecord, group: Sequence[int], reasons: Reasons | None) -> str:
    first = group[0]
    if plan.pipelined:
        owners = {stage.name for i in group if (stage := owner(plan, i)) is not None}
        return _among(plan, owners) if owners else "cut into microbatches in the stages that read it"
    return (
        layout_text(plan.inputs[first], plan.input_shapes[first], plan) if reasons is None else reasons.argument(first)
    )


def _among(plan: PlanRecord, names: set[str]) -> str:
    """Where leaves are stored: "stage 0", "stages 0, 2", "stages 0-3" for a run of them."""
    numbers = [n for n, stage in enumerate(plan.stages) if stage.name in names]
    if len(numbers) == 1:
        return f"in stage {numbers[0]}"
    is_run = numbers == [*range(numbers[0], numbers[-1] + 1)]
    return f"in stages {_span(numbers[0], numbers[-1]) if is_run else ', '.join(map(str, numbers))}"


# Activations


def activation_rows(plan: PlanRecord, reasons: Reasons) -> Rows:
    """(operations and lines, shape, spec, why) of the layouts with the most bytes in all, update left out."""
    graph, values = reasons.graph, plan.stages[0].values
    ops = [op for op in graph.walk() if op.phase != "update" and not op.regions]
    results = [(op, v) for op in ops for v in op.outputs if v in values and graph.types[v].size > 1]
    groups = grouped(((str(graph.types[v]), str(values[v])), (op, v)) for op, v in results)
    ranked = sorted(groups.values(), key=lambda g: (-len(g) * graph.types[g[0][1]].nbytes, g[0][0].index))
    return [_activation(plan, reasons, group) for group in ranked[:ACTIVATIONS]]


def _activation(plan: PlanRecord, reasons: Reasons, group: Sequence[tuple[Op, int]]) -> tuple[str, ...]:
    value = group[0][1]
    kind, layout = reasons.graph.types[value], plan.stages[0].values[value]
    names = list(dict.fromkeys(f"{op.name} {op.source}".strip() for op, _ in group))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    local = math.prod(local_shape(layout, kind.shape, plan.mesh_sizes)) * kind.itemsize
    why = f"{reasons.results([op for op, _ in group], layout, kind.shape)}; each {size(local)} a device"
    return f"{names[0]}{more} x{len(group)}", str(kind), spec_text(spec(layout, kind.rank, plan.mesh_names)), why


# Collectives and figures


def collective_rows(plan: PlanRecord) -> Rows:
    """(kind, axes, times, bytes on the wire, line), most bytes first."""
    groups: dict[tuple[str, str, str], tuple[int, float]] = {}
    for c, sent_now in plan.sent():
        key = (c.kind, "+".join(c.axes), cause(plan, c))
        times, sent = groups.get(key, (0, 0.0))
        groups[key] = (times + c.count, sent + sent_now)
    ranked = sorted(groups.items(), key=lambda item: (-item[1][1], item[0]))
    rows: Rows = [(k, axes, f"{n:,}", size(sent), at) for (k, axes, at), (n, sent) in ranked[:COLLECTIVES]]
    rest = ranked[COLLECTIVES:]
    if rest:
        times, sent = sum(n for _, (n, _) in rest), sum(s for _, (_, s) in rest)
        rows.append((f"{len(rest)} more groups", "", f"{times:,}", size(sent), ""))
    return rows


def cause(plan: PlanRecord, c: Collective) -> str:
    """The source line of a collective; without one the result that it is for: its tag is "out" and a position."""
    if c.source:
        return c.source
    position = c.op.removeprefix("out")
    if plan.pipelined:
        return "gradients, and what stages send"
    return f"result {plan.output_paths[int(position)]}" if position != c.op and position.isdigit() else c.op


def _foot(plan: PlanRecord) -> list[str]:
    parts = ", ".join(f"{name} {seconds(t)}" for name, t in plan.parts.items() if name != "hidden")
    if hidden := plan.parts.get("hidden", 0.0):
        parts += f"; {seconds(hidden)} of communication saved by combining, or hidden behind it"
    proof = f"solver: {plan.solver_status}, gap {plan.gap:.2g} ({STATUS.get(plan.solver_status, plan.solver)})"
    lines = [
        f"predicted step: {seconds(plan.step_time_s)} ({parts}), model FLOPs utilisation {plan.mfu:.1%}",
        *(f"memory per device, {s.name}: {_memory(s)}" for s in plan.stages),
        f"sent per device: {size(plan.wire_bytes())} in {sum(c.count for c in plan.collectives):,} collectives",
        f"{proof}; {plan.variables_unfolded:,} variables, {plan.variables:,} after folding",
        *(f"note: {note}" for note in plan.notes),
    ]
    return [part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]


def _memory(stage: Stage) -> str:
    largest = sorted(stage.memory.items(), key=lambda item: (-item[1], item[0]))
    kinds = ", ".join(f"{kind} {size(n)}" for kind, n in largest if n)
    host = f"; {size(stage.host_memory_bytes)} in host memory" if stage.host_memory_bytes else ""
    return f"{size(stage.peak_memory_bytes)} at its peak ({kinds}){host}"
