"""Why values have their layouts, what that sends, and what other layouts would cost.

    "params/*/wq", "arg:3"      argument leaves by path, as pins name them; equal layers are one entry
    "out:0"                     results
    "model.py:30"               what a source line computes, and the collectives that it causes
    "dot_general"               an operation

What other layouts cost needs the step (`autopar.plans.origin`). All values of an entry change their layout together,
and everything else is planned anew around them, in the same program and on the same mesh; in a pipeline inside their
stage, whose seconds are then told. A plan under such a pin takes as long, unless another mesh, or the recomputation of
other layers, would then be better.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from autopar.errors import ArgumentError
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph, Op
from autopar.ir.keyed import grouped
from autopar.ir.layout import Layout, replicated, spec
from autopar.ir.text import Rows, seconds, size, spec_text, table
from autopar.passes.op_groups.pin_keys import names as is_named
from autopar.plans.origin import Alternative, Origin, Prices
from autopar.plans.record import PlanRecord
from autopar.plans.views.groups import argument_groups, host, label, owner
from autopar.plans.views.notebook import ShownAsText
from autopar.plans.views.reasons import Reasons, layout_text

NEAREST = 3  # names that an error suggests
SHOWN = 12  # other layouts of an entry that are printed
EQUAL = 1e-4  # relative difference of step times that is told as none


@dataclass(frozen=True)
class Entry:
    """Values of one type and layout that are explained together.

    Attributes:
        name: what they are, such as "params/blocks/*/wq x32" or "dot_general model.py:30 x4".
        type: dtype and shape of each, such as "f32[8,16]".
        shape: the shape of each.
        reasons: the effect of the layout, where the values are stored, and what fixes the layout.
        collectives: communication at the places that read them, or that makes them.
        bytes_sent: bytes that each device sends per step for these collectives.
        prices: what their layouts cost; None without the step.
        chosen: their layout.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    reasons: tuple[str, ...]
    collectives: tuple[Collective, ...]
    bytes_sent: float
    prices: Prices | None
    chosen: Layout

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The layouts that they can have, the cheapest first; empty if none are priced."""
        return () if self.prices is None else self.prices.alternatives


@dataclass(frozen=True)
class Explanation(ShownAsText):
    """What `Plan.explain` returns; printed, text.

    Attributes:
        target: the name that was asked for.
        step_time_s: predicted step time of the plan (s).
        entries: the values that the name matches.
        mesh_names: names of the mesh axes.
        note: why other layouts are not priced; "" if they are.
    """

    target: str
    step_time_s: float
    entries: tuple[Entry, ...]
    mesh_names: tuple[str, ...]
    note: str = ""

    def data(self) -> dict[str, Any]:
        """The same as JSON knows it."""
        return {
            "target": self.target,
            "step_time_s": self.step_time_s,
            "note": self.note,
            "entries": [self._data(entry) for entry in self.entries],
        }

    def _data(self, entry: Entry) -> dict[str, Any]:
        return {
            "name": entry.name,
            "type": entry.type,
            "spec": self._spec(entry, entry.chosen),
            "reasons": list(entry.reasons),
            "bytes_sent": entry.bytes_sent,
            "subject": None if entry.prices is None else entry.prices.subject,
            "seconds": None if entry.prices is None else entry.prices.seconds,
            "collectives": [asdict(c) for c in entry.collectives],
            "layouts": [
                {
                    "spec": self._spec(entry, a.layout),
                    "chosen": a.layout == entry.chosen,
                    "local_bytes": a.local_bytes,
                    "at_least_s": a.at_least_s,
                    "exact_s": a.exact_s,
                    "proven": a.proven,
                }
                for a in entry.alternatives
            ],
        }

    def __str__(self) -> str:
        lines = [line for entry in self.entries for line in self._lines(entry)]
        return "\n".join([*lines, *([self.note] if self.note else [])])

    def _lines(self, entry: Entry) -> Iterator[str]:
        yield f"{entry.name}: {entry.type} as {self._spec(entry, entry.chosen)}"
        yield from (f"  {reason}" for reason in entry.reasons)
        if entry.collectives:
            times = sum(c.count for c in entry.collectives)
            yield f"  {size(entry.bytes_sent)} sent per device and step in {times:,} collectives"
        if entry.prices is not None and len(entry.alternatives) > 1:
            yield table("layout", ("", "a device", entry.prices.subject, "difference"), self._rows(entry))
        yield ""

    def _rows(self, entry: Entry) -> Rows:
        rows: Rows = []
        planned_s = entry.prices.seconds if entry.prices is not None else 0.0
        for a in entry.alternatives[:SHOWN]:
            chosen = a.layout == entry.chosen
            text = f"{self._spec(entry, a.layout)}{' (planned)' if chosen else ''}"
            rows.append((text, size(a.local_bytes), *_time(a, planned_s, chosen)))
        more = len(entry.alternatives) - SHOWN
        return [*rows, (f"{more} more", "", "", "")] if more > 0 else rows

    def _spec(self, entry: Entry, layout: Layout) -> str:
        return spec_text(spec(layout, len(entry.shape), self.mesh_names))


def _time(a: Alternative, planned_s: float, chosen: bool) -> tuple[str, str]:
    """The time with a layout and its difference to that as planned, in words."""
    if chosen:
        return seconds(planned_s), ""
    if math.isinf(a.seconds):
        return "no plan", ""
    bound = "" if a.proven else "at least " if a.exact_s is None else "about "
    difference = a.seconds - planned_s
    if abs(difference) <= EQUAL * planned_s:
        return f"{bound}{seconds(a.seconds)}", "none"
    sign = "+" if difference > 0 else "-"
    return f"{bound}{seconds(a.seconds)}", f"{sign}{seconds(abs(difference))}, {difference / planned_s:+.2%}"


def explain(plan: PlanRecord, target: str, origin: Origin | None, *, exact: bool) -> Explanation:
    """The explanation of what a name matches.

    Args:
        plan: the plan.
        target: a name; see the module docstring.
        origin: the step; without it nothing is priced, and source lines match collectives alone.
        exact: price other layouts exactly, by solving again, and not by a bound.

    Raises:
        ArgumentError: nothing matches; the message has the nearest names.
    """
    source = _Source(plan, origin, origin.graph if origin is not None else None, exact)
    entries = tuple(source.arguments(target)) or tuple(source.results(target)) or tuple(source.operations(target))
    if not entries:
        nearest = _nearest(source, target)
        raise ArgumentError(f"'{target}' is no argument, result, source line or operation of the plan{nearest}")
    return Explanation(target, plan.step_time_s, entries, plan.mesh_names, source.note)


def _nearest(source: _Source, target: str) -> str:
    near = difflib.get_close_matches(target, sorted(source.names), NEAREST, cutoff=0.3)
    return f". The nearest: {', '.join(map(repr, near))}" if near else ""


@dataclass(frozen=True)
class _Source:
    """A plan and, if they are known, its step and the graph of that."""

    plan: PlanRecord
    origin: Origin | None
    graph: Graph | None
    exact: bool

    @cached_property
    def sent(self) -> Sequence[tuple[Collective, float]]:
        """Every collective with the bytes that a device sends for it per step."""
        return self.plan.sent()

    @property
    def note(self) -> str:
        """Why other layouts are not priced."""
        if self.origin is None:
            return "other layouts are not priced without the step: autopar.plan(fn, *args, plan=path) has it"
        return ""

    @property
    def names(self) -> set[str]:
        """Everything that a target may name, but for globs."""
        ops = () if self.graph is None else self.graph.walk()
        named = {name for op in ops for name in (op.name, op.source) if name}
        lines = {c.source for c, _ in self.plan.sent() if c.source}
        return {*self.plan.input_paths, *(p.partition("/")[2] for p in self.plan.input_paths), *lines, *named} - {""}

    def arguments(self, target: str) -> Iterator[Entry]:
        """Entries of the argument leaves whose path, or path below the argument's name, matches a glob."""
        plan, names = self.plan, (f"arg:{i}" for i in range(len(self.plan.input_paths)))
        members = [
            i
            for i, (path, number) in enumerate(zip(plan.input_paths, names, strict=True))
            if number == target or is_named(target, path)
        ]
        # leaves of the optimizer are one group there, whatever their types
        leaves = ((key, i) for key, group in argument_groups(plan, members).items() for i in group)
        same = grouped(((key, plan.input_types[i], plan.inputs[i]), i) for key, i in leaves)
        yield from map(self._argument, same.values())

    def _argument(self, group: Sequence[int]) -> Entry:
        plan, first = self.plan, group[0]
        stage = owner(plan, first)
        layout, shape = plan.inputs[first], plan.input_shapes[first]
        submesh = plan if stage is None else replace(plan, mesh_sizes=tuple(stage.submesh.values()))
        reasons = [layout_text(layout, shape, submesh) + host(plan, first)]
        collectives: tuple[Collective, ...] = ()
        if self.graph is not None:
            whole = Reasons(plan, self.graph)
            reasons, collectives = [whole.argument(first) + host(plan, first)], _at(whole, self.graph, group)
        if plan.pipelined:
            reasons.append(f"stored by {stage.name}" if stage else "cut into microbatches in the stages that read it")
        if pin := self.origin.pinned(first) if self.origin is not None else "":
            reasons.append(f"fixed by {pin}")
        name = label([plan.input_paths[i] for i in group])
        prices = None if self.origin is None else self.origin.price_arguments(group, exact=self.exact)
        return self._entry(name, plan.input_types[first], shape, layout, prices, reasons, collectives)

    def results(self, target: str) -> Iterator[Entry]:
        """The entry of the result that a position, "out:0", or a path names."""
        plan = self.plan
        for i, path in enumerate(plan.output_paths):
            if target in (f"out:{i}", path):
                layout, shape = plan.outputs[i], plan.output_shapes[i]
                of_type = "" if self.graph is None else str(self.graph.type_of(self.graph.outputs[i]))
                name = f"result {path}" if path else f"result {i}"
                reasons = [layout_text(layout, shape, plan)]
                collectives = [c for c, _ in plan.sent() if c.op == f"out{i}"]
                yield self._entry(name, of_type or str(list(shape)), shape, layout, None, reasons, collectives)

    def operations(self, target: str) -> Iterator[Entry]:
        """Entries of the values that a source line, or an operation, computes; without a graph its collectives."""
        if self.graph is None:
            here = [c for c, _ in self.plan.sent() if c.source and fnmatch.fnmatchcase(c.source, target)]
            for line in dict.fromkeys(c.source for c in here):
                mine = [c for c in here if c.source == line]
                kinds = ", ".join(sorted({c.kind for c in mine}))
                yield self._entry(line, kinds, (), replicated(len(self.plan.mesh_names)), None, (), mine)
            return
        reasons = Reasons(self.plan, self.graph)
        layouts = self.plan.stages[0].values
        groups: dict[tuple[str, str, str, Layout], list[tuple[Op, int]]] = {}
        for op in self.graph.walk():
            if not op.regions and any(fnmatch.fnmatchcase(name, target) for name in (op.name, op.source) if name):
                for v in op.outputs:
                    if v in layouts:
                        key = (op.name, op.source, str(self.graph.types[v]), layouts[v])
                        groups.setdefault(key, []).append((op, v))
        for (name, line, of_type, layout), members in groups.items():
            ops = [op for op, _ in members]
            sites = {op.tag for op in ops} | {f"{op.tag}.in{k}" for op in ops for k in range(len(op.inputs))}
            collectives = tuple(c for c, _ in self.sent if c.op in sites)
            shape = self.graph.types[members[0][1]].shape
            why = [reasons.results(ops, layout, shape)]
            if pin := self.origin.pinned_value(members[0][1]) if self.origin is not None else "":
                why.append(f"fixed by {pin}")
            count = f" x{len(members)}" if len(members) > 1 else ""
            values = [v for _, v in members]
            prices = None if self.origin is None else self.origin.price_values(values, exact=self.exact)
            yield self._entry(f"{name} {line}{count}", of_type, shape, layout, prices, why, collectives)

    def _entry(
        self,
        name: str,
        of_type: str,
        shape: tuple[int, ...],
        layout: Layout,
        prices: Prices | None,
        reasons: Sequence[str],
        collectives: Sequence[Collective],
    ) -> Entry:
        wanted = {*collectives}
        sent = math.fsum(nbytes for c, nbytes in self.sent if c in wanted)
        return Entry(name, of_type, shape, tuple(reasons), tuple(collectives), sent, prices, layout)


def _at(reasons: Reasons, graph: Graph, group: Sequence[int]) -> tuple[Collective, ...]:
    """Collectives at the places that read the leaves of a group, each once."""
    return tuple(dict.fromkeys(c for i in group for c in reasons.reads(graph.inputs[i])))
