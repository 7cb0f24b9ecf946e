"""Results of passes as text, for the cases in tests/passes/cases: from a graph and options to what a pass finds.

Values are %3 as in the graph, operations op3 by their position in program order, mesh axes x, y and z. A layout is what
divides each dimension of a value: [x, -] is rows along x; "+x" after it: partial sums along x.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from autopar.bench.equal.case import dear
from autopar.cost_models.sharding.groups import Binding, Grouping
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph, Op, verify
from autopar.ir.layout import PARTIAL, Layout
from autopar.passes.intra_op import build as intra_op
from autopar.passes.intra_op import extract
from autopar.passes.layers.find import find
from autopar.passes.microbatch.programs import PlacedOp
from autopar.passes.microbatch.split import split
from autopar.passes.op_groups import merge, overlap, unreduced
from autopar.passes.op_groups.reduction_lowering import ALL_REDUCE, DEFERRED, NOTHING, REDUCE_SCATTER
from autopar.passes.remat import rewrite
from autopar.passes.solver.optimize import optimize
from autopar.passes.solver.symmetry import fold
from autopar.passes.stages.divide import divide
from autopar.rules import rules_of

CASES = Path(__file__).parent.parent / "cases"
AXES = "xyz"


def _mesh(sizes: Sequence[int]) -> LogicalMesh:
    """A mesh whose collectives are dear beside the work of small graphs."""
    return dear(tuple(sizes)).logical_mesh(tuple(sizes))


def _grouping(graph: Graph, mesh: Sequence[int], pins: Mapping[int, Layout], received: Collection[int]) -> Grouping:
    return merge.group(graph, rules_of(graph), _mesh(mesh), pins, None, received)


def _values(values: Iterable[int]) -> str:
    return " ".join(f"%{v}" for v in sorted(values)) or "none"


def _op(op: Op) -> str:
    return f"op{op.index} {op.name}"


def _layout(layout: Layout, rank: int) -> str:
    dims = ["".join(AXES[a] for a, d in enumerate(layout) if d == dim) or "-" for dim in range(rank)]
    partial = "".join(AXES[a] for a, d in enumerate(layout) if d == PARTIAL)
    return f"[{', '.join(dims)}]{f' +{partial}' if partial else ''}"


def op_groups(
    graph: Graph,
    *,
    mesh: Sequence[int] = (2,),
    pins: Mapping[int, Layout] = MappingProxyType({}),
    received: Sequence[int] = (),
) -> str:
    """Each group with the values whose layout it decides."""
    grouping = _grouping(graph, mesh, pins, received)
    lines = []
    for i, group in enumerate(grouping.groups):
        bound = [v for v, b in grouping.bindings.items() if b.group == i and b.view is None]
        views = [v for v, b in grouping.bindings.items() if b.group == i and b.view is not None]
        lines.append(f"{group.name}: {_values(bound)}{f', views {_values(views)}' if views else ''}")
    free = {v for op in graph.walk() for v in op.outputs} - grouping.bindings.keys()
    return "\n".join([*lines, *([f"free: {_values(free)}"] if free else [])])


def bindings(graph: Graph, *, mesh: Sequence[int] = (2,)) -> str:
    """The group and the factors of each value, and the reads at which a value may be resharded."""
    grouping = _grouping(graph, mesh, {}, ())
    values = [f"%{v}: {_binding(grouping, b)}" for v, b in sorted(grouping.bindings.items())]
    reads = [f"{u.site} reads %{u.value}: {grouping.groups[u.consumer].name}{_dims(u.dims)}" for u in grouping.uses]
    return "\n".join([*values, *reads])


def _dims(dims: Sequence[int]) -> str:
    return f"[{', '.join('-' if d == -1 else '*' if d == -3 else str(d) for d in dims)}]"


def _binding(grouping: Grouping, b: Binding) -> str:
    text = f"{grouping.groups[b.group].name}{_dims(b.dims)}"
    return text if b.view is None else f"a view {_dims(b.view)} of %{b.value}: {text}"


_ENDS = {NOTHING: "", ALL_REDUCE: " all-reduced", REDUCE_SCATTER: " scattered", DEFERRED: " left partial"}


def strategies(graph: Graph, *, mesh: Sequence[int] = (2,)) -> str:
    """For each operation with strategies of its own: its factors, and what each axis of the mesh does."""
    grouping = _grouping(graph, mesh, {}, ())
    return "\n".join(
        line for g in grouping.groups if g.op >= 0 for line in _strategies(grouping, graph.by_index[g.op], g)
    )


def _strategies(grouping: Grouping, op: Op, group: Any) -> Iterator[str]:
    rule = grouping.rules.get(op.signature)
    letters = "ijklmnop"
    if rule is not None:
        sides = (",".join("".join(letters[f] for f in dims) for dims in side) for side in (rule.operands, rule.results))
        yield f"{_op(op)}: {' -> '.join(sides)}"
    s = group.strategies
    for assigned, result, after in zip(s.assigned.tolist(), s.result.tolist(), s.after.tolist(), strict=True):
        axes = []
        for axis, (a, r, end) in enumerate(zip(assigned, result, after, strict=True)):
            onto = f" onto {letters[r]}" if end == REDUCE_SCATTER else ""
            reads = "takes partial sums," if a == PARTIAL else "idle" if a < 0 else f"divides {letters[a]}"
            axes.append(f"{AXES[axis]} {reads}{_ENDS[end]}{onto}")
        yield f"  {', '.join(axes)}"


def unreduced_sums(graph: Graph) -> str:
    """Operations whose results may stay partial sums, and sums that may take such operands."""
    deferral = unreduced.find(graph)
    names = {op.index: _op(op) for op in graph.walk()}
    lines = [f"{names[i]}: the result may stay partial" for i in sorted(deferral.products)]
    for i, stays in sorted(deferral.sums.items()):
        lines.append(f"{names[i]}: operands may be partial{', and so may the result' if stays else ''}")
    lines += [
        f"{names[i]}: adds to %{carry}, which may be partial" for i, carry in sorted(deferral.accumulators.items())
    ]
    return "\n".join(lines) or "none"


def overlapped(graph: Graph) -> str:
    """Values whose all-gathers can be prefetched, and operations whose reductions can be deferred."""
    overlaps = overlap.find(graph)
    late = [_op(op) for op in graph.walk() if op.index in overlaps.late]
    return f"prefetched: {_values(overlaps.early)}\ndeferred: {', '.join(late) or 'none'}"


def folding(graph: Graph, *, mesh: Sequence[int] = (2,)) -> str:
    """The symmetry classes of the strategy variables."""
    model = intra_op.build(graph, _grouping(graph, mesh, {}, ()), _mesh(mesh))
    folded = fold(model.problem)
    names = [n.name for n in model.problem.nodes]
    classes: dict[int, list[str]] = {}
    for name, c in zip(names, folded.classes.tolist(), strict=True):
        classes.setdefault(c, []).append(name)
    return "\n".join(" = ".join(members) for members in classes.values())


def extraction(
    graph: Graph,
    *,
    mesh: Sequence[int] = (2,),
    pins: Mapping[int, Layout] = MappingProxyType({}),
    received: Sequence[int] = (),
) -> str:
    """The layouts of the best solution, and its collectives."""
    logical = _mesh(mesh)
    model = intra_op.build(graph, _grouping(graph, mesh, pins, received), logical)
    solution = optimize(model.problem)
    assignment = solution.assignment
    layouts = extract.layouts(model, assignment)
    rank = {v: graph.types[v].rank for v in range(len(graph.types))}
    lines = [f"%{v}: {_layout(layout, rank[v])}" for v, layout in sorted(layouts.values.items())]
    reads = {u.site: u.value for u in model.grouping.uses}
    lines += [f"%{v} copied as {_layout(layout, rank[v])}" for v, layout in layouts.copies.items()]
    lines += [f"{site} reads %{reads[site]} as {_layout(at, rank[reads[site]])}" for site, at in layouts.uses.items()]
    for c in extract.collectives(graph, model, assignment, layouts, logical):
        lines.append(
            f"{c.kind} along {''.join(c.axes)} of {c.bytes} B at {c.op}{f' x{c.count}' if c.count > 1 else ''}"
        )
    return "\n".join(lines)


def remat(graph: Graph, *, policy: str = "none", policies: Sequence[str] = ()) -> str:
    """The lines that change if every layer is rematerialised that can be, or by a policy for each layer."""
    everywhere = [policy if can else "none" for can in rewrite.recomputable(graph)]
    rewritten = rewrite.rewrite(graph, policies or everywhere)
    before, after = (str(g).splitlines() for g in (graph, verify(rewritten)))
    changed = difflib.unified_diff(before, after, lineterm="", n=0)
    return "\n".join(line for line in changed if not line.startswith(("---", "+++", "@@"))) or "nothing changes"


def stages(
    graph: Graph, *, cuts: Sequence[int], borders: Sequence[int] | None = None, count: int = 2, weights: bool = False
) -> str:
    """What each stage computes and sends, divided at these positions among the forward operations."""
    layers = find(graph)
    ends = itertools.pairwise((0, *cuts, len(layers.forward)))
    cut = tuple(replace(layers.layers[0], start=a, stop=b, kind=i) for i, (a, b) in enumerate(ends))
    chosen = range(1, len(cut)) if borders is None else borders
    return str(divide(split(graph, count), replace(layers, layers=cut), chosen, weights=weights))


def microbatches(
    graph: Graph, *, count: int = 2, batch: Sequence[int] | Literal["auto"] = "auto", per_microbatch: Sequence[str] = ()
) -> str:
    """The state of each value, and what runs before, in and after the loops."""
    divided = split(graph, count, batch, per_microbatch=per_microbatch)
    lines = [f"%{v}: {state}" for v, state in sorted(divided.states.items()) if str(state) != "invariant"]
    lines += list(_program("before", divided.prologue))
    for loop in divided.loops:
        lines += [*_program(f"{count} times", loop.body)]
        lines += [f"  combined: {', '.join(f'%{t.value} {t.combine}' for t in loop.totals) or 'nothing'}"]
        lines += list(_program("after", loop.after))
    return "\n".join(lines)


def _program(title: str, ops: Sequence[PlacedOp]) -> Iterator[str]:
    if ops:
        yield f"{title}: {', '.join(_op(p.op) for p in ops)}"


#: File of cases -> the function under test.
PRINTERS: Mapping[str, Callable[..., str]] = MappingProxyType(
    {
        "op_groups": op_groups,
        "bindings": bindings,
        "strategies": strategies,
        "unreduced": unreduced_sums,
        "overlap": overlapped,
        "folding": folding,
        "extraction": extraction,
        "remat": remat,
        "stages": stages,
        "microbatches": microbatches,
    }
)
