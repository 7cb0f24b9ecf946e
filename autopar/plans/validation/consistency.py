"""Whether a plan contradicts itself: what its types do not say, checked wherever a plan is read.

`CHECKS` are data, each a generator of complaints that name a field and what was expected there. That a plan fits a
function is another question (`autopar.plans.plan.check_matches`, `autopar.plans.validation.layouts`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from autopar.errors import ArgumentError, GraphError, MicrobatchError, PlanMismatchError, ScheduleError
from autopar.ir.collective import WIRE_FRACTION
from autopar.ir.layout import Layout, cuts
from autopar.passes.remat.rewrite import POLICIES
from autopar.plans.forms import FORMS
from autopar.plans.validation.schema import FieldError, shown
from autopar.schedules import SCHEDULES

if TYPE_CHECKING:
    from autopar.plans.record import PlanRecord, Stage

Complaints = Iterator[FieldError]


def check_consistent(plan: PlanRecord) -> None:
    """FieldError for the first field that contradicts the others."""
    for check in CHECKS:
        check_all(check(plan))


@contextlib.contextmanager
def mismatches() -> Iterator[None]:
    """Complaints about a plan that is to be carried out end in a PlanMismatchError."""
    try:
        yield
    except FieldError as error:
        raise PlanMismatchError(f"the plan does not fit the function: {error}. Plan again.") from None


@contextlib.contextmanager
def as_plan_mismatch(what: str) -> Iterator[None]:
    """Turns errors from applying a plan's choices to this step into PlanMismatchError; `what`: how the plan differs."""
    try:
        yield
    except (ArgumentError, MicrobatchError, ScheduleError, GraphError) as error:
        raise PlanMismatchError(f"the plan {what} than this autopar finds: {error}. Plan again.") from None


def check_all(*complaints: Complaints) -> None:
    """FieldError for the first complaint."""
    for complaint in itertools.chain(*complaints):
        raise complaint


def misfit(layout: Layout, shape: Sequence[int], sizes: Sequence[int], most_padding: float = 1.0) -> str:
    """What is expected of a layout of this shape on a mesh of these sizes; "" where it fits.

    `most_padding`: how many times as long as it is a cut dimension may become until it divides.
    """
    if len(layout) != len(sizes):
        return f"a layout of {len(sizes)} mesh axes"
    if max(layout) >= len(shape):
        return f"a layout of an array of rank {len(shape)}"
    for dim, parts in cuts(layout, sizes).items():
        if -(-shape[dim] // parts) * parts > most_padding * shape[dim]:
            return f"a layout that divides the shape {tuple(shape)} on a mesh of {tuple(sizes)}"
    return ""


def unlike(field: str, actual: Any, expected: Any) -> Complaints:
    """A complaint unless a field is what it has to be, naming the first entry that differs where both are as long."""
    if actual == expected:
        return
    if isinstance(actual, tuple) and isinstance(expected, tuple) and len(actual) == len(expected):
        i = next(i for i, (entry, other) in enumerate(zip(actual, expected, strict=True)) if entry != other)
        field, actual, expected = f"{field}[{i}]", actual[i], expected[i]
    yield FieldError(shown(expected), shown(actual), field)


def _mesh(plan: PlanRecord) -> Complaints:
    names, sizes = plan.mesh_names, plan.mesh_sizes
    if not names or "" in names or len(set(names)) < len(names):
        yield FieldError("names of mesh axes, each once", shown(names), "mesh_names")
    if len(sizes) != len(names) or 0 in sizes:
        yield FieldError(f"sizes of {len(names)} mesh axes, each at least 1", shown(sizes), "mesh_sizes")


def _leaves(plan: PlanRecord) -> Complaints:
    for paths, lists in (
        ("input_paths", ("inputs", "input_types", "input_shapes")),
        ("output_paths", ("outputs", "output_shapes")),
    ):
        count = len(getattr(plan, paths))
        for name in lists:
            if len(getattr(plan, name)) != count:
                there = len(getattr(plan, name))
                yield FieldError(f"{count}, one for each of {paths}", f"a list of {there}", name)


def _transfers(plan: PlanRecord) -> Complaints:
    pairs = {f"{a}>{b}" for a, b in itertools.permutations(range(len(plan.stages)), 2)}
    for pair in plan.transfers:
        if pair not in pairs:
            yield FieldError("two stages, such as '0>1'", shown(pair), "transfers")


def _forms(plan: PlanRecord) -> Complaints:
    for axis, shares in plan.forms.items():
        if axis not in plan.mesh:
            yield FieldError(f"mesh axes, {', '.join(plan.mesh)}", shown(axis), "forms")
        for form in shares:
            if form not in FORMS:
                yield FieldError(f"one of {', '.join(FORMS)}", shown(form), f"forms[{axis!r}]")
    for axis in plan.read_in_parts:
        if axis not in plan.forms:
            yield FieldError(f"axes of forms, {', '.join(plan.forms)}", shown(axis), "read_in_parts")


def _positions(plan: PlanRecord) -> Complaints:
    count = len(plan.input_paths)
    fields = {name: getattr(plan, name) for name in ("donated", "state", "offloaded", "batch")}
    fields |= {f"read_in_parts[{axis!r}]": positions for axis, positions in plan.read_in_parts.items()}
    fields |= {f"stages[{i}].arguments": stage.arguments for i, stage in enumerate(plan.stages)}
    for name, positions in fields.items():
        if len(set(positions)) < len(positions) or any(i >= count for i in positions):
            yield FieldError(f"positions of the {count} argument leaves, each once", shown(positions), name)


def _choices(plan: PlanRecord) -> Complaints:
    if plan.num_microbatches < 1:
        yield FieldError("at least 1", str(plan.num_microbatches), "num_microbatches")
    if plan.num_microbatches > 1 and not plan.batch:
        yield FieldError(f"the argument leaves that {plan.num_microbatches} microbatches cut", "empty", "batch")
    for i, policy in enumerate(plan.remat):
        if policy not in POLICIES:
            yield FieldError(f"one of {', '.join(POLICIES)}", shown(policy), f"remat[{i}]")
    for i, glob in enumerate(plan.per_microbatch):
        if not glob:
            yield FieldError("a glob", "empty", f"per_microbatch[{i}]")


def _schedule(plan: PlanRecord) -> Complaints:
    schedules = ("none", *(name for name, row in SCHEDULES.items() if row.executable))
    if plan.schedule not in schedules:
        yield FieldError(f"one of {', '.join(schedules)}", shown(plan.schedule), "schedule")
    if (len(plan.stages) > 1) != plan.pipelined or not plan.stages:
        wanted = "several stages" if plan.pipelined else "one stage"
        yield FieldError(f"{wanted}, as schedule {plan.schedule!r} has", f"a list of {len(plan.stages)}", "stages")


def _submeshes(plan: PlanRecord) -> Complaints:
    for i, stage in enumerate(plan.stages):
        yield from unlike(f"the axes of stages[{i}].submesh", sorted(stage.submesh), sorted(plan.mesh_names))
        yield from unlike(f"stages[{i}].devices", stage.devices, math.prod(stage.submesh.values()))
        first = next(s for s in plan.stages if s.rank == stage.rank)
        yield from unlike(f"stages[{i}].submesh", stage.submesh, first.submesh)
    ranks = {stage.rank: stage.devices for stage in plan.stages}
    if sorted(ranks) != list(range(len(ranks))):
        yield FieldError("numbered from 0 on without gaps", shown(sorted(ranks)), "the ranks of stages")
    total, inner = math.prod(plan.mesh_sizes), math.prod(plan.mesh_sizes[1:])
    if sum(ranks.values()) != total or any(n == 0 or n % inner for n in ranks.values()):
        yield FieldError(f"parts of the {total} devices of the mesh", shown(list(ranks.values())), "stages[*].devices")
    if not plan.pipelined:
        yield from unlike("stages[0].submesh", plan.stages[0].submesh, plan.mesh)


def _layers(plan: PlanRecord) -> Complaints:
    if not plan.pipelined:
        return
    yield from unlike("stages[0].layers[0]", plan.stages[0].layers[0], 0)
    for i, (stage, after) in enumerate(itertools.pairwise(plan.stages)):
        yield from unlike(f"stages[{i + 1}].layers[0]", after.layers[0], stage.layers[1])
    for i, stage in enumerate(plan.stages):
        if stage.layers[0] >= stage.layers[1]:
            yield FieldError("its first layer and that behind its last", shown(stage.layers), f"stages[{i}].layers")


def _holders(plan: PlanRecord) -> Complaints:
    seen: dict[int, int] = {}
    for i, stage in enumerate(plan.stages):
        for position in stage.arguments:
            if seen.setdefault(position, i) != i:
                other = f"without {position}, which stages[{seen[position]}] holds"
                yield FieldError(other, shown(stage.arguments), f"stages[{i}].arguments")


def _layouts(plan: PlanRecord) -> Complaints:
    axes = len(plan.mesh_names)
    for i, stage in enumerate(plan.stages):
        for name in ("values", "uses", "copies"):
            layouts: Mapping[int | str, Layout] = getattr(stage, name)
            if {axes}.issuperset(map(len, layouts.values())):
                continue
            for key, layout in layouts.items():
                if len(layout) != axes:
                    yield FieldError(f"a layout of {axes} mesh axes", shown(layout), f"stages[{i}].{name}[{key!r}]")


def _leaf_layouts(plan: PlanRecord) -> Complaints:
    """Arguments and results are cut evenly, over the submesh of the stage that holds them; none is partial."""
    holder: dict[int, tuple[int, ...]] = {}
    for stage in reversed(plan.stages):
        holder.update(dict.fromkeys(stage.arguments, _sizes(plan, stage)))
    elsewhere = _sizes(plan, plan.stages[0])
    for i, (layout, shape) in enumerate(zip(plan.inputs, plan.input_shapes, strict=True)):
        yield from _even(f"inputs[{i}]", layout, shape, holder.get(i, elsewhere))
    for i, (layout, shape) in enumerate(zip(plan.outputs, plan.output_shapes, strict=True)):
        if not plan.pipelined:  # else they are those of the state
            yield from _even(f"outputs[{i}]", layout, shape, plan.mesh_sizes)


def _sizes(plan: PlanRecord, stage: Stage) -> tuple[int, ...]:
    return tuple(stage.submesh[name] for name in plan.mesh_names)


def _even(field: str, layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Complaints:
    if expected := _uneven(layout, shape, sizes):
        yield FieldError(expected, shown(layout), field)


@lru_cache(maxsize=4096)  # equal layers have equal leaves
def _uneven(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    return misfit(layout, shape, sizes) or ("a layout without sums" if min(layout) < -1 else "")


def _collectives(plan: PlanRecord) -> Complaints:
    lists = {"collectives": plan.collectives}
    lists |= {f"stages[{i}].collectives": stage.collectives for i, stage in enumerate(plan.stages)}
    for name, collectives in lists.items():
        for i, c in enumerate(collectives):
            if c.kind not in WIRE_FRACTION:
                yield FieldError(f"one of {', '.join(WIRE_FRACTION)}", shown(c.kind), f"{name}[{i}].kind")
            if not c.axes or c.axes != tuple(axis for axis in plan.mesh_names if axis in c.axes):
                yield FieldError(f"some of {', '.join(plan.mesh_names)}", shown(c.axes), f"{name}[{i}].axes")
            if c.count < 1:
                yield FieldError("at least 1", str(c.count), f"{name}[{i}].count")
    of_stages = tuple(c for stage in plan.stages for c in stage.collectives)
    yield from unlike("stages[*].collectives", of_stages, plan.collectives if plan.pipelined else ())


#: In this order: each relies on those before it.
CHECKS: tuple[Callable[[PlanRecord], Complaints], ...] = (
    _mesh,
    _leaves,
    _forms,
    _positions,
    _choices,
    _schedule,
    _submeshes,
    _layers,
    _holders,
    _layouts,
    _leaf_layouts,
    _collectives,
    _transfers,
)
