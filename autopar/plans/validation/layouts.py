"""Whether the layouts of a plan fit a program: every one names a value that is there, in a way that it can be cut.

    values      have a layout of their own unless they are scalars or computed at each use (`autopar.codegen.emitter`);
                cut dimensions are padded no further than planning allows                          -> _values, _padding
    uses        sites that read such a value                                                       -> _uses
    copies      of values, whole                                                                   -> _copies
    sums        a value is partial along an axis only where an operation leaves it so, and what reads it is linear in
                it or wants it summed                                                              -> _sums

Layouts that fit never change what is computed, whatever they are, except for those of partial sums: there an array has
a leading dimension per axis. So these are checked operation by operation, against `autopar.passes.op_groups.unreduced`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar import jax_compat
from autopar.ir.control_flow import entries, num_carries
from autopar.ir.graph import Atom, Graph, Op
from autopar.ir.layout import PARTIAL, Layout, cuts, partial_axes, replicated
from autopar.passes.op_groups import unreduced
from autopar.passes.op_groups.strategies import MOST_PADDING
from autopar.passes.remat.offload import offloadable
from autopar.plans.plan import Plan
from autopar.plans.record import Stage
from autopar.plans.validation.consistency import Complaints, check_all, misfit, unlike
from autopar.plans.validation.schema import FieldError, shown
from autopar.rules import Rule, rules_of


def check_layouts(
    plan: Plan, number: int, graph: Graph, sizes: Sequence[int], registered: Mapping[str, str] | None
) -> None:
    """FieldError for the first layout of a stage that its program cannot have.

    Args:
        plan: the plan.
        number: of the stage.
        graph: its program, as it is executed.
        sizes: of the axes of its mesh.
        registered: rules that were registered, by operation.
    """
    program = _Program(graph, plan.stages[number], tuple(sizes), registered)
    try:
        for check in (_values, _padding, _uses, _copies, _rings, _sums):
            check_all(check(program))
    except FieldError as error:
        raise error.within(f"stages[{number}].") from None


def check_arguments(plan: Plan, graph: Graph) -> None:
    """FieldError for the first argument that a plan without stages has in another layout than its program does."""
    values, whole = plan.stages[0].values, replicated(len(plan.mesh_sizes))
    check_all(unlike("inputs", plan.inputs, tuple(values.get(v, whole) for v in graph.inputs)))
    check_offloaded(plan, offloadable(graph, plan.donated) if plan.offloaded else ())


def check_offloaded(plan: Plan, may: Collection[int]) -> None:
    """FieldError for the first argument in host memory whose position is not among these."""
    for i in plan.offloaded:
        if i not in may:
            raise FieldError("state that may wait in the host's memory", f"{plan.input_paths[i]!r}", "offloaded")


@dataclass(frozen=True, eq=False)
class _Program:
    """A program with the layouts that a plan gives it."""

    graph: Graph
    stage: Stage
    sizes: tuple[int, ...]
    registered: Mapping[str, str] | None

    @cached_property
    def sites(self) -> Mapping[str, Atom]:
        """Where values are read: "op12.in0", "op12.body.out1", "out3" -> what is read there."""
        sites: dict[str, Atom] = {}
        for body in self.graph.bodies:
            sites.update((f"{body.prefix}out{i}", atom) for i, atom in enumerate(body.outputs))
            sites.update((f"{op.tag}.in{k}", atom) for op in body.ops for k, atom in enumerate(op.inputs))
        return sites

    @cached_property
    def makers(self) -> Mapping[int, Op | None]:
        """Value -> the operation without a body that makes it; None: it enters, or one with a body makes it."""
        makers: dict[int, Op | None] = {v: None if op.regions else op for v, op in self.graph.producers.items()}
        for body in self.graph.bodies:
            makers.update(dict.fromkeys((*body.inputs, *(v for v, _ in body.constants))))
        return makers

    @cached_property
    def carries_from(self) -> Mapping[str, int]:
        """Where a loop begins a sum that may be partial, "op12.in3" -> the value of its carry in the body."""
        entered = ((op.tag, entry) for op in self.graph.walk() for entry in entries(op))
        return {f"{tag}.in{e.position}": e.value for tag, e in entered if e.value in self.deferral.carries}

    @cached_property
    def rules(self) -> Mapping[int, Rule]:
        """Of the operations that may leave partial sums."""
        products = tuple(op for op in self.graph.walk() if op.index in self.deferral.products)
        return rules_of(replace(self.graph, ops=products), self.registered)

    @cached_property
    def deferral(self) -> unreduced.Deferral:
        return unreduced.find(self.graph)

    def at(self, atom: Atom, site: str) -> Layout:
        """The layout of an operand at a site; whole where the plan gives none."""
        layout = self.stage.values.get(atom) if isinstance(atom, int) else None
        return self.stage.uses.get(site, replicated(len(self.sizes)) if layout is None else layout)

    def misfit(self, layout: Layout, value: int) -> str:
        return misfit(layout, self.graph.types[value].shape, self.sizes, MOST_PADDING)


def _complaint(field: str, key: int | str, layout: Layout | None, expected: str) -> FieldError:
    return FieldError(expected, "missing" if layout is None else shown(layout), f"{field}[{key!r}]")


# Values, uses, copies


def _values(p: _Program) -> Complaints:
    for value, layout in p.stage.values.items():
        if value not in p.makers:
            yield _complaint("values", value, layout, "no such field: the program has no such value")
        elif expected := p.misfit(layout, value):
            yield _complaint("values", value, layout, expected)


def _padding(p: _Program) -> Complaints:
    """Values without a layout of their own are made where they are read."""
    values, types = p.stage.values, p.graph.types
    for value, op in p.makers.items():
        if value not in values and types[value].rank and (op is None or not _may_be_free(p, op)):
            expected = f"a layout of {types[value]}"
            yield _complaint(
                "values", value, None, expected + ("" if op is None else f", made by {op.name} {op.source}")
            )


def _may_be_free(p: _Program, op: Op) -> bool:
    """Whether an operation may be carried out where its result is read, as planning leaves it to some.

    It broadcasts, or all that it reads, or all but what is broadcast and scalars, is made so too.
    """
    has_layout = any(isinstance(a, int) and p.graph.types[a].rank and a in p.stage.values for a in op.inputs)
    return not op.equation.effects and (op.name == "broadcast_in_dim" or not has_layout)


def _uses(p: _Program) -> Complaints:
    for site, layout in p.stage.uses.items():
        atom = p.sites.get(site)
        if not isinstance(atom, int) or not p.graph.types[atom].rank:
            yield _complaint("uses", site, layout, "no such field: no value with dimensions is read there")
            continue
        expected = p.misfit(layout, atom)
        begins = p.carries_from.get(site)
        if not expected and not {*partial_axes(layout)} <= {*partial_axes(p.stage.values.get(begins or atom, ()))}:
            expected = "sums along axes only along which the value is partial"
        if expected:
            yield _complaint("uses", site, layout, expected)


def _copies(p: _Program) -> Complaints:
    for value, layout in p.stage.copies.items():
        expected = "no such field: the value has no layout" if value not in p.stage.values else p.misfit(layout, value)
        if expected or partial_axes(layout):
            yield _complaint("copies", value, layout, expected or "a layout without sums")


def _rings(p: _Program) -> Complaints:
    """Pieces are passed round where the rule of an operation says so and its first operand is cut into them."""
    if not p.stage.rings:
        return
    ops = {op.tag: op for op in p.graph.walk()}
    named = [ops[tag] for tag in p.stage.rings if tag in ops]
    rules = rules_of(replace(p.graph, ops=tuple(named)), p.registered)
    for tag in p.stage.rings:
        op, fits = ops.get(tag), False
        if op is not None and op.inputs and rules[op.signature].rings:
            rule, layout = rules[op.signature], p.at(op.inputs[0], f"{tag}.in0")
            fits = any(d >= 0 and rule.operands[0][d] in rule.rings for d in layout)
        if not fits:
            yield FieldError("tags of attention that is cut along its positions", shown(tag), "rings")


# Partial sums

#: What is expected of a sum over the iterations of a loop.
_SUMMED = "sums along the axes along which the loop adds up parts"


def _sums(p: _Program) -> Complaints:
    """Values are partial only as their operations can leave them, and reads only where they are linear."""
    if not any(PARTIAL in layout for layout in p.stage.values.values()):
        return
    for value, op in p.makers.items():
        entered = value in _returned(p) or value in p.deferral.carries
        if op is None and partial_axes(p.stage.values.get(value, ())) and not entered:
            yield _complaint("values", value, p.stage.values[value], "a layout without sums")
    for op in p.graph.walk():
        yield from _region_sums(p, op) if op.regions else _leaf_sums(p, op)


def _returned(p: _Program) -> frozenset[int]:
    """What bodies hand out, checked in `_region_sums`."""
    return frozenset(v for op in p.graph.walk() if op.regions for v in op.outputs)


def _leaf_sums(p: _Program, op: Op) -> Complaints:
    """Of an operation whose results have a layout; others read what their readers ask for, summed (`_may_be_free`)."""
    if p.graph.lacks_layouts(op, p.stage.values):
        return
    leads = [partial_axes(p.at(atom, f"{op.tag}.in{k}")) for k, atom in enumerate(op.inputs)]
    lead = max(leads, key=len, default=[])
    for k in _unfit_reads(p, op, leads):
        site = f"{op.tag}.in{k}"
        yield _complaint("uses", site, p.at(op.inputs[k], site), f"what {op.name} {op.source} can read: no such sums")
    for value in op.outputs:
        layout = p.stage.values.get(value, ())
        if not {*partial_axes(layout)} <= {*(lead or _left(p, op))}:
            yield _complaint("values", value, layout, f"sums as {op.name} {op.source} leaves them")


def _unfit_reads(p: _Program, op: Op, leads: Sequence[Sequence[int]]) -> Iterator[int]:
    """Operands that are partial where the operation is not linear in them."""
    linear = unreduced.linear_operand(p.graph, op)
    joins = op.index in p.deferral.sums or op.index in p.deferral.accumulators
    yield from (k for k, lead in enumerate(leads) if (lead != leads[0] if joins else lead and k != linear))


def _left(p: _Program, op: Op) -> tuple[int, ...]:
    """Mesh axes that cut what an operation adds up, in all its operands alike and evenly."""
    if op.index not in p.deferral.products:
        return ()
    rule = p.rules[op.signature]
    cut_factors: list[Mapping[int, int]] = []
    for k, (atom, dims) in enumerate(zip(op.inputs, rule.operands, strict=True)):
        layout, shape = p.at(atom, f"{op.tag}.in{k}"), p.graph.type_of(atom).shape
        on = {axis: dims[d] for axis, d in enumerate(layout) if d >= 0 and dims[d] in rule.reduced}
        if any(dims[d] in rule.reduced and shape[d] % parts for d, parts in cuts(layout, p.sizes).items()):
            return ()
        if any(factor in rule.reduced for factor in dims):
            cut_factors.append(on)
    return tuple(cut_factors[0]) if cut_factors and all(on == cut_factors[0] for on in cut_factors) else ()


def _region_sums(p: _Program, op: Op) -> Complaints:
    """Bodies read no sums, and hand out what they leave if they are recomputed, and where scans stack or add up."""
    carries = num_carries(op) if op.name in ("scan", jax_compat.REMAT) else len(op.outputs)
    summed: dict[int, Layout] = {}
    for k, atom in enumerate(op.inputs):
        site = f"{op.tag}.in{k}"
        carry = p.carries_from.get(site)
        if carry is not None:
            summed[k - jax_compat.scan_counts(op.params)[0]] = p.at(carry, "")
        if partial_axes(p.at(atom, site)) != partial_axes(p.at(carry, "") if carry is not None else ()):
            yield _complaint("uses", site, p.at(atom, site), _SUMMED if carry is not None else "a layout without sums")
    for region in op.regions:
        for j, atom in enumerate(region.outputs[:carries]):
            site = f"{op.tag}.{region.name}.out{j}"
            if partial_axes(p.at(atom, site)) != partial_axes(summed.get(j, ())):
                yield _complaint("uses", site, p.at(atom, site), _SUMMED if j in summed else "a layout without sums")
    for j, value in enumerate(op.outputs):
        layout = p.stage.values.get(value, ())
        left = p.at(op.regions[0].outputs[j], f"{op.tag}.{op.regions[0].name}.out{j}") if j >= carries else ()
        if partial_axes(layout) != partial_axes(summed.get(j, left)):
            yield _complaint("values", value, layout, f"sums as the body of {op.name} {op.source} leaves them")
