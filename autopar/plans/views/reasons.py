"""Consequences of the layout of a value, in a few words, from the plan and the graph alone.

    dim 0 over x: 1/8 a device     from the layout and the mesh                            `layout_text`
    all-gather over x (f.py:3)     collectives at the sites that read an argument          `reads`
    gradient ... (f.py:3)          collectives met on the way back from the argument's     `sums`
                                   new value through operations of its own size

A plan does not say what the optimizer compared, so a reason states consequences, never motives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.ir.collective import Collective
from autopar.ir.control_flow import entries
from autopar.ir.graph import Graph, Op, Use
from autopar.ir.layout import Layout, cuts
from autopar.ir.op_sets import LINEAR_UNARY
from autopar.plans.record import PlanRecord

MAX_WALK = 64  # operations followed from one value


def layout_text(layout: Layout, shape: Sequence[int], plan: PlanRecord) -> str:
    """The effect of a layout: which dimensions it shards and how much that saves, or why it cannot shard."""
    parts = cuts(layout, plan.mesh_sizes)
    cuts_by_dim = [(d, n) for d, n in sorted(parts.items()) if n > 1]
    if cuts_by_dim:
        where = [f"dim {d} over {_axes(layout, d, plan)}{_padding(shape[d], n)}" for d, n in cuts_by_dim]
        return f"{', '.join(where)}: 1/{math.prod(n for _, n in cuts_by_dim)} a device"
    real = {n: s for n, s in plan.mesh.items() if s > 1}
    if shape and real and not any(extent % s == 0 for extent in shape for s in real.values()):
        return f"whole: no dimension divides by {', '.join(f'{n}={s}' for n, s in real.items())}"
    return "whole on every device"


def _padding(extent: int, parts: int) -> str:
    return f" (padded by {-extent % parts})" if extent % parts else ""


def _axes(layout: Layout, dim: int, plan: PlanRecord) -> str:
    return "+".join(n for n, d in zip(plan.mesh_names, layout, strict=True) if d == dim)


@dataclass(frozen=True, eq=False)
class Reasons:
    """Reasons for the values of one graph under one plan."""

    plan: PlanRecord
    graph: Graph
    _new_values: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        last = {p.partition("/")[2]: a for p, a in zip(self.graph.output_paths, self.graph.outputs, strict=True)}
        object.__setattr__(self, "_new_values", {p: a for p, a in last.items() if isinstance(a, int)})

    @cached_property
    def _at(self) -> Mapping[str, tuple[Collective, ...]]:
        """Tag of an operation or a site -> the collectives it needs."""
        collectives: dict[str, tuple[Collective, ...]] = {}
        for c in self.plan.collectives:
            collectives[c.op] = (*collectives.get(c.op, ()), c)
        return collectives

    def argument(self, i: int) -> str:
        """Reasons for the layout of argument leaf `i`."""
        value = self.graph.inputs[i]
        text = [layout_text(self.plan.inputs[i], self.plan.input_shapes[i], self.plan)]
        text += _described("", self.reads(value))
        new = self._new_values.get(self.plan.input_paths[i].partition("/")[2])
        if new is not None:
            text += _described("gradient ", self.sums(new))
        return "; ".join(text)

    def results(self, ops: Sequence[Op], layout: Layout, shape: Sequence[int]) -> str:
        """Reasons for the layout of results of these operations, which share shape and layout."""
        collectives = [c for op in ops for c in self._at.get(op.tag, ())]
        return "; ".join([layout_text(layout, shape, self.plan), *_described("made by ", collectives)])

    def reads(self, value: int) -> tuple[Collective, ...]:
        """Collectives at the sites that read a value, also behind operations that pass it on."""
        collectives: list[Collective] = []
        todo = [value]
        for v in todo:
            for use in self.graph.uses_of(v):
                collectives += self._at.get(use.site, ()) if use.op is not None else ()
                if len(todo) < MAX_WALK:
                    todo += _passed_on(use)
        return tuple(collectives)

    def sums(self, new: int) -> tuple[Collective, ...]:
        """Collectives that reduce the gradient from which a new value of the state is computed."""
        size = self.graph.types[new].size
        seen, todo = {new}, [new]
        for v in todo:
            op = self.graph.producers.get(v)
            if op is None:
                continue
            if reductions := self._gradient_sums(op):
                return reductions
            for atom in op.inputs:
                if isinstance(atom, int) and atom not in seen and self.graph.types[atom].size == size > 1:
                    seen.add(atom)
                    todo.append(atom)
            if len(todo) > MAX_WALK:
                break
        return ()

    def _gradient_sums(self, op: Op) -> tuple[Collective, ...]:
        """Sums of a backward operation, at it or where its result is first read."""
        if op.phase != "backward":
            return ()
        sites = [op.tag, *(use.site for v in op.outputs for use in self.graph.uses_of(v) if use.op is not None)]
        collectives = [c for site in sites for c in self._at.get(site, ())]
        return tuple(c for c in collectives if c.kind in ("all-reduce", "reduce-scatter"))


def _passed_on(use: Use) -> Iterator[int]:
    """Values that are what is read, but for its shape, type and sign."""
    if use.op is not None:
        yield from use.op.outputs if use.op.name in LINEAR_UNARY else ()
        yield from (e.value for e in entries(use.op) if e.position == use.position)


def _described(word: str, collectives: Sequence[Collective]) -> list[str]:
    """The distinct collectives, the first with its line."""
    texts = dict.fromkeys((c.kind, "+".join(c.axes)) for c in collectives)
    if not texts:
        return []
    lines = list(dict.fromkeys(c.source for c in collectives if c.source))
    where = f" ({lines[0]}{f' and {len(lines) - 1} more' if len(lines) > 1 else ''})" if lines else ""
    return [f"{word}{', '.join(f'{kind} over {axes}' for kind, axes in texts)}{where}"]
