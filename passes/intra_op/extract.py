"""Extracts a plan from a solution: the layout of every value and use, and the collectives between them.

The seven parts are

    layout of a value    its dimensions under the strategy of its group                               -> layouts
    layout at a use      its dimensions under the strategy of the reader's group                      -> layouts
    rings                operations whose devices pass pieces of operands round                       -> layouts
    reshards             steps from the layout of a value to that of its copy, and from there to each use  -> _reshards
    partial sums         reduce-scatters, then one joint all-reduce, per operation                    -> _sums
    the user's own       what the body of a `shard_map` sends                                         -> _manual
    inside kernels       what devices that run one together send                                      -> _sent
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from autopar.cost_models.collectives import collective_time
from autopar.cost_models.sharding.groups import Binding, Charge, Model, OpGroup, Use
from autopar.cost_models.sharding.strategies import (
    ALL_REDUCE,
    NOTHING,
    REDUCE_SCATTER,
    RING,
    padding,
    sent_bytes,
    share,
    shares,
)
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.collective import Collective
from autopar.ir.control_flow import entries
from autopar.ir.graph import Graph, Op, Type
from autopar.ir.layout import REPLICATED, Layout, ProgramLayouts, device_share, divides, steps
from autopar.ir.problem import Ints
from autopar.passes.intra_op.build import layout_at
from autopar.passes.op_groups.reduction_lowering import emitted
from autopar.rules import SHARD_MAPPED, manual


def layouts(model: Model, assignment: Ints) -> ProgramLayouts:
    """The layouts under an assignment: strategy per node, shape (nodes,)."""
    groups, bindings = model.grouping.groups, model.grouping.bindings
    cached: dict[tuple[int, int, tuple[int, ...], bool], Layout] = {}
    choices: list[int] = assignment.tolist()

    def of(group: int, dims: tuple[int, ...], assigned: bool) -> Layout:
        strategies, choice = groups[group].strategies, choices[group]
        key = (strategies.index, choice, dims, assigned)
        layout = cached.get(key)
        if layout is None:
            layout = cached[key] = layout_at(strategies, choice, dims, assigned)
        return layout

    values = {v: of(h.group, h.dims, False) for v, h in bindings.items() if h.view is None}
    copies = {
        v: layout_at(model.copy_sets[v], int(assignment[node]), tuple(range(len(bindings[v].dims))), False)
        for v, node in model.copies.items()
    }
    uses: dict[str, Layout] = {}
    for use in model.grouping.uses:
        wanted = of(use.consumer, use.dims, use.assigned)
        binding = bindings.get(use.value)
        if binding is None or binding.view is not None:
            if any(d != REPLICATED for d in wanted):  # a free value or a view has no layout of its own to compare with
                uses[use.site] = wanted
        elif wanted != values[use.value]:
            uses[use.site] = wanted
    rings = tuple(f"op{c.op}" for c, choice in zip(groups, choices, strict=False) if c.op >= 0 and _is_ring(c, choice))
    return ProgramLayouts(values, uses, {v: c for v, c in copies.items() if c != values[v]}, rings)


def through(binding: Binding, wanted: Layout) -> Layout:
    """The layout of a value whose view has the layout `wanted`. Axes that cut new dimensions cut nothing."""
    if binding.view is None:
        return wanted
    view = binding.view
    return tuple(view[d] if d >= 0 and view[d] >= 0 else (d if d < 0 else -1) for d in wanted)


def one_program(op: int) -> str:
    """The program of every operation, where all are compiled together."""
    return ""


def collectives(
    graph: Graph,
    model: Model,
    assignment: Ints,
    program: ProgramLayouts,
    mesh: LogicalMesh,
    program_of: Callable[[int], str] = one_program,
) -> tuple[Collective, ...]:
    """All collectives of a plan, in program order of the operations that need them.

    Args:
        graph: the operations.
        model: its groups, uses and costs.
        assignment: the chosen strategy of each group.
        program: the layouts that follow from it.
        mesh: the logical mesh.
        program_of: operation -> the program that it is compiled in. Programs share no reshards.
    """
    reshards, sums = _reshards(graph, model, program, mesh, program_of), _sums(graph, model, assignment, mesh)
    parts = [*reshards, *sums, *_manual(graph), *_sent(graph, model, assignment, mesh)]
    return tuple(c for _, c in sorted(parts, key=lambda p: p[0]))


def visible_seconds(
    graph: Graph, model: Model, planned: Sequence[Collective], mesh: LogicalMesh
) -> Iterator[tuple[Collective, float]]:
    """(collective, seconds per step that the cost of the plan has for it): less what computation hides."""
    overlap, behind = model.grouping.overlap, mesh.with_overlap()
    reads = {use.site: use for use in model.grouping.uses}
    for c in planned:
        use = reads.get(c.op)
        op = None if use is not None else graph.by_index[int(c.op.removeprefix("op"))]
        overlaps = overlap.moves(use.value, use.op) if use is not None else op is not None and overlap.sums(op)
        yield c, collective_seconds(c, behind if overlaps else mesh)


def hidden_seconds(graph: Graph, model: Model, planned: Sequence[Collective], mesh: LogicalMesh) -> float:
    """Seconds per step of these collectives that the cost of the plan excludes, as computation hides them."""
    return sum(collective_seconds(c, mesh) - visible for c, visible in visible_seconds(graph, model, planned, mesh))


def collective_seconds(c: Collective, mesh: LogicalMesh) -> float:
    """Seconds per step of all executions of a planned collective, without overlap."""
    return c.count * collective_time(c.kind, c.bytes, tuple(mesh.axis(name) for name in c.axes), mesh)


_Placed = tuple[tuple[int, int], Collective]  # key of the program order, collective


def operation_seconds(model: Model, assignment: Ints) -> Iterator[tuple[int, float]]:
    """(operation, seconds per step) of all operations with strategies, including the reduction of partial sums."""
    for c, choice in zip(model.grouping.groups, assignment.tolist(), strict=False):  # copies come after groups
        if c.op >= 0:
            yield c.op, c.weight * float(c.strategies.cost[choice])


def traffic_seconds(model: Model, assignment: Ints, mesh: LogicalMesh) -> Iterator[tuple[Charge, float]]:
    """(charge, seconds per step) of the HBM traffic of light operations."""
    bandwidth = mesh.device.memory_bandwidth
    for charge in model.grouping.charges:
        strategies = model.grouping.groups[charge.group].strategies
        factors = strategies.result[assignment[charge.group]].tolist()
        layout = tuple(f if f in charge.dims else REPLICATED for f in factors)
        yield charge, charge.nbytes * device_share(layout, strategies.sizes, mesh.sizes) / bandwidth


def reshards(graph: Graph, model: Model, program: ProgramLayouts, mesh: LogicalMesh) -> Iterator[Collective]:
    """The collectives of all reshards, in the order of the uses."""
    return (c for _, c in _reshards(graph, model, program, mesh, one_program))


def _reshards(
    graph: Graph, model: Model, program: ProgramLayouts, mesh: LogicalMesh, program_of: Callable[[int], str]
) -> Iterator[_Placed]:
    """The collectives of all reshards. A program reshards a value to each layout once, however many uses have it."""
    copied: set[int] = set()
    resharded: set[tuple[str, int, Layout]] = set()
    bindings = model.grouping.bindings
    for use in model.grouping.uses:
        binding = bindings.get(use.value)
        if binding is None:
            continue
        value, at_binding = binding.value, program.values[binding.value]
        default = at_binding if binding.view is None else (-1,) * len(mesh.sizes)
        wanted = through(binding, program.uses.get(use.site, default))
        start = program.copies.get(value, at_binding)
        if value in program.copies and value not in copied:
            copied.add(value)
            weight = min(use.weight, model.grouping.executions(binding))
            yield from _emit(graph, replace(use, weight=weight), value, at_binding, start, mesh)
        key = (program_of(use.op) if use.op >= 0 else "", value, wanted)
        if wanted != start and wanted != at_binding and key not in resharded:
            resharded.add(key)
            yield from _emit(graph, use, value, start, wanted, mesh)


def _emit(graph: Graph, use: Use, value: int, source: Layout, target: Layout, mesh: LogicalMesh) -> Iterator[_Placed]:
    """The collectives of one reshard. Slices need no communication."""
    nbytes = _padded(graph.types[value], source, target, mesh)
    line = _line(graph, use.site, graph.by_index[use.op]) if use.op >= 0 else ""
    for i, step in enumerate(steps(source, target, mesh.sizes) or ()):
        if step.kind != "slice":
            names = tuple(mesh.names[a] for a in step.axes)
            size = max(1, round(step.fraction * nbytes))
            order = (use.op if use.op >= 0 else 1 << 60, i)  # uses by the caller come last
            yield order, Collective(step.kind, names, size, max(1, round(use.weight)), use.site, line)


def _line(graph: Graph, site: str, op: Op) -> str:
    """The source line of an operation; of one without, as the loop over microbatches, where its body first reads."""
    _, _, position = site.rpartition(f"{op.tag}.in")
    if op.source or not position.isdecimal():
        return op.source
    read = (e.value for e in entries(op) if e.position == int(position))
    inside = (u for value in read for u in graph.uses.get(value, ()) if u.op is not None)
    return next((line for u in inside if u.op is not None and (line := _line(graph, u.site, u.op))), "")


def _padded(type_: Type, source: Layout, target: Layout, mesh: LogicalMesh) -> float:
    """Bytes of a value whose dimensions are padded to even pieces in both layouts."""
    if divides(source, type_.shape, mesh.sizes) and divides(target, type_.shape, mesh.sizes):
        return float(type_.nbytes)
    return type_.nbytes * float(padding(np.array([source]), np.array([target]), type_.shape, mesh.sizes)[0, 0])


def _sums(graph: Graph, model: Model, assignment: Ints, mesh: LogicalMesh) -> Iterator[_Placed]:
    """The collectives that reduce partial sums, of all operations."""
    sums: dict[tuple[int, int, int], tuple[tuple[str, tuple[int, ...], int], ...]] = {}
    for index, c in enumerate(model.grouping.groups):
        choice = int(assignment[index])
        if c.op < 0 or not (c.strategies.after[choice] > NOTHING).any():
            continue
        op = graph.by_index[c.op]
        key = (op.signature, c.strategies.index, choice)
        if key not in sums:
            sums[key] = tuple(sums_of(graph, op, c, choice, model, mesh))
        for i, (kind, axes, nbytes) in enumerate(sums[key]):
            names = tuple(mesh.names[a] for a in axes)
            # 100: after the reshards of the operands
            yield (op.index, 100 + i), Collective(kind, names, nbytes, max(1, round(c.weight)), op.tag, op.source)


def _manual(graph: Graph) -> Iterator[_Placed]:
    """The collectives in the bodies of the user's own `shard_map`s."""
    for op in manual.calls(graph):
        runs, line = graph.runs[op.index], op.source
        for i, c in enumerate(manual.call_of(op).collectives):
            yield (op.index, 100 + i), replace(c, count=c.count * runs, op=op.tag, source=c.source or line)


def _sent(graph: Graph, model: Model, assignment: Ints, mesh: LogicalMesh) -> Iterator[_Placed]:
    """The collectives of the devices that run a kernel together, of all operations."""
    rules = model.grouping.rules
    for c, choice in zip(model.grouping.groups, assignment.tolist(), strict=False):  # copies come after groups
        op = graph.by_index[c.op] if c.op >= 0 else None
        if op is None or not rules[op.signature].sent:
            continue
        rule = rules[op.signature]
        types = [*map(graph.type_of, op.inputs), *(graph.types[v] for v in op.outputs)]
        cut = c.strategies.assigned[choice : choice + 1]
        each, passed = shares(cut, c.strategies.sizes, mesh.sizes), _is_ring(c, choice)
        for i, collective in enumerate(rule.sent):
            along = [axis for axis, f in enumerate(cut[0].tolist()) if f in collective.factors]
            devices = math.prod(mesh.sizes[axis] for axis in along)
            if devices >= collective.least and collective.ring in (None, passed):
                names = tuple(mesh.names[axis] for axis in along)
                nbytes = max(1, round(float(sent_bytes(collective, rule, types, each)[0])))
                count = max(1, round(c.weight)) * collective.times(devices)
                yield (op.index, 200 + i), Collective(collective.kind, names, nbytes, count, op.tag, op.source)


def _is_ring(c: OpGroup, choice: int) -> bool:
    """Whether devices pass pieces of the operands of a group's operation round."""
    return bool((c.strategies.after[choice] == RING).any())


def sums_of(
    graph: Graph, op: Op, c: OpGroup, choice: int, model: Model, mesh: LogicalMesh
) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """(kind, axes, bytes per device) of the collectives that reduce the partial results of one operation, by result."""
    row = slice(choice, choice + 1)
    chosen = c.strategies.after[row], c.strategies.assigned[row], c.strategies.result[row]
    after = emitted(*chosen, mesh.sizes, dot=op.name == "dot_general")[0]
    each = shares(c.strategies.assigned[row], c.strategies.sizes, mesh.sizes)
    for value, dims in zip(op.outputs, model.grouping.rules[op.signature].results, strict=True):
        if op.name in SHARD_MAPPED and not graph.uses_of(value):
            continue
        nbytes = graph.types[value].nbytes * float(share(each, dims)[0])
        for axis, size in enumerate(mesh.sizes):
            if after[axis] == REDUCE_SCATTER:
                yield "reduce-scatter", (axis,), max(1, round(nbytes))
                nbytes /= size
        axes = tuple(a for a in range(len(mesh.sizes)) if after[a] == ALL_REDUCE)
        if axes:
            yield "all-reduce", axes, max(1, round(nbytes))
