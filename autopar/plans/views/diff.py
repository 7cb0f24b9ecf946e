"""Two plans of one step side by side: figures, layouts of arguments, collectives by source line.

    figures        step, its parts, memory, bytes sent, FLOP utilisation, form of parallelism    -> _figures
    layouts        arguments that are stored otherwise, equal layers as one row                  -> _layouts
    collectives    bytes sent by kind, axes and source line, the largest difference first        -> _collectives

The plans may be for different meshes, stages and versions of the step; arguments are compared by path.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.ir.text import WIDTH, Rows, seconds, size, spec_text, table
from autopar.ir.train_state import of_parameter
from autopar.plans.record import PlanRecord
from autopar.plans.views.groups import host, label, without_numbers
from autopar.plans.views.notebook import ShownAsText
from autopar.plans.views.parallelism import describe

LARGEST = 12  # rows of collectives
EQUAL = 1e-4  # relative difference of figures that is told as none


@dataclass(frozen=True)
class PlanDiff(ShownAsText):
    """What `Plan.diff` and `Plan.what_if` return; printed, tables of what differs.

    Attributes:
        before: a plan.
        after: the other plan.
    """

    before: PlanRecord
    after: PlanRecord

    @property
    def slower_s(self) -> float:
        """Predicted seconds per step that the other plan takes more; negative if it is faster."""
        return self.after.step_time_s - self.before.step_time_s

    @property
    def layouts(self) -> Mapping[str, tuple[str, str]]:
        """Path of an argument leaf whose layout or memory differs -> both, as text; "" where it is missing."""
        before, after = _stored(self.before), _stored(self.after)
        paths = dict.fromkeys((*before, *after))
        return {p: pair for p in paths if len({*(pair := (before.get(p, ""), after.get(p, "")))}) > 1}

    def data(self) -> dict[str, Any]:
        """The same as JSON knows it: figures of both plans, layouts that differ, and bytes sent that differ."""
        plans = (self.before, self.after)
        figures = {name: [number(plan) for plan in plans] for name, (number, _) in _NUMBERS.items()}
        texts = {name: [text(plan) for plan in plans] for name, text in _TEXTS.items()}
        sent = [
            {"kind": kind, "axes": axes, "source": at, "bytes_sent": pair}
            for (kind, axes, at), pair in _differing(self.before, self.after)
        ]
        layouts = {path: list(pair) for path, pair in self.layouts.items()}
        return {**texts, **figures, "layouts": layouts, "collectives": sent}

    def __str__(self) -> str:
        parts = [table("", ("", "before", "after", "difference"), _figures(self.before, self.after))]
        if rows := self._layout_rows():
            parts.append(table("stored otherwise", ("", "before", "after"), rows))
        if rows := _collectives(self.before, self.after):
            parts.append(table("sent per device and step", ("", "axes", "before", "after", "at"), rows))
        if not (self.layouts or len(parts) > 1):
            parts.append("\nthe layouts of all arguments, and the collectives, are the same")
        forms = (("before", describe(self.before)), ("after", describe(self.after)))
        lines = [textwrap.fill(f"{name}: {text}", WIDTH, subsequent_indent="  ") for name, text in forms]
        return "\n".join([*lines, *parts])

    def _layout_rows(self) -> Rows:
        """(paths, before, after): equal layers are one row; so are leaves of the optimizer that follow parameters."""
        layouts, groups, following = self.layouts, dict[tuple[str, ...], list[str]](), 0
        parameters = {path.partition("params/")[2]: pair for path, pair in layouts.items() if "params/" in path}
        for path, pair in layouts.items():
            belongs = of_parameter(path, parameters)
            if belongs is not None and parameters[belongs[1]] == pair:
                following += 1
            else:
                groups.setdefault((without_numbers(path), *pair), []).append(path)
        rows: Rows = [(label(paths), before or "-", after or "-") for (_, before, after), paths in groups.items()]
        return [*rows, (f"optimizer state x{following}", "of its parameter", "of its parameter")] if following else rows


def _stored(plan: PlanRecord) -> Mapping[str, str]:
    """Path of an argument leaf -> its PartitionSpec, and its memory if that is the host's."""
    specs = enumerate(zip(plan.input_paths, plan.in_specs(), strict=True))
    return {path: spec_text(spec) + host(plan, i) for i, (path, spec) in specs}


def _mesh(plan: PlanRecord) -> str:
    return ", ".join(f"{name}={n}" for name, n in plan.mesh.items())


def _stages(plan: PlanRecord) -> str:
    return f"{len(plan.stages)}, {plan.schedule}" if plan.pipelined else "1"


def _recomputed(plan: PlanRecord) -> str:
    return str(sum(policy != "none" for policy in plan.remat))


#: Figure -> its text; those that are equal are left out, but for the first of `_NUMBERS`.
_TEXTS: Mapping[str, Callable[[PlanRecord], str]] = {
    "cluster": lambda plan: plan.cluster,
    "mesh": _mesh,
    "stages": _stages,
    "microbatches": lambda plan: str(plan.num_microbatches),
    "layers recomputed": _recomputed,
    "arguments in host memory": lambda plan: str(len(plan.offloaded)),
    "proven": lambda plan: f"{plan.solver_status}, gap {plan.gap:.2g}",
}
_NUMBERS: Mapping[str, tuple[Callable[[PlanRecord], float], Callable[[float], str]]] = {
    "step": (lambda plan: plan.step_time_s, seconds),
    "memory per device": (lambda plan: plan.peak_memory_bytes, size),
    "sent per device": (lambda plan: plan.wire_bytes(), size),
    "model FLOPs utilisation": (lambda plan: plan.mfu, lambda share: f"{share:.1%}"),
}


def _figures(before: PlanRecord, after: PlanRecord) -> Rows:
    """(name, before, after, difference) of figures; of texts only those that differ."""
    rows: Rows = [(name, text(before), text(after), "") for name, text in _TEXTS.items() if text(before) != text(after)]
    for name, (number, text) in _NUMBERS.items():
        rows.append((name, text(number(before)), text(number(after)), _change(number(before), number(after))))
    of_one_kind = before.pipelined == after.pipelined
    for part in sorted({*before.parts, *after.parts}) if of_one_kind else ():
        a, b = before.parts.get(part, 0.0), after.parts.get(part, 0.0)
        if abs(a - b) > EQUAL * before.step_time_s:
            rows.append((f"  {part}", seconds(a), seconds(b), _change(a, b)))
    return rows


def _change(before: float, after: float) -> str:
    if abs(after - before) <= EQUAL * abs(before):
        return "none"
    return f"{after / before - 1:+.1%}" if before else "new"


def _differing(before: PlanRecord, after: PlanRecord) -> list[tuple[tuple[str, str, str], list[float]]]:
    """((kind, axes, line), bytes that a device sends before and after), the largest difference first."""
    sent: dict[tuple[str, str, str], list[float]] = {}
    for side, plan in enumerate((before, after)):
        for c, nbytes in plan.sent():
            sent.setdefault((c.kind, "+".join(c.axes), c.source), [0.0, 0.0])[side] += nbytes
    differing = {key: pair for key, pair in sent.items() if abs(pair[0] - pair[1]) > EQUAL * max(pair)}
    return sorted(differing.items(), key=lambda item: (-abs(item[1][0] - item[1][1]), item[0]))


def _collectives(before: PlanRecord, after: PlanRecord) -> Rows:
    """(kind, axes, bytes before, bytes after, line), the largest difference first."""
    ranked = _differing(before, after)
    rows: Rows = [(kind, axes, size(a), size(b), at) for (kind, axes, at), (a, b) in ranked[:LARGEST]]
    if rest := [pair for _, pair in ranked[LARGEST:]]:
        rows.append((f"{len(rest)} more", "", size(sum(a for a, _ in rest)), size(sum(b for _, b in rest)), ""))
    return rows
