"""The groups of a `shard_map` of the user's: its shardings are pins, its body has a price that no layout changes.

    operand    a group with one strategy, the layout of its spec, in which the operation reads it
    result     a group with one strategy, the layout of its spec, which decides the layout of the value
    body       a group with one strategy: seconds of one device, collectives included

Along mesh axes that are not manual, and that no spec may name, operands and results are whole.
"""

from __future__ import annotations

import numpy as np

from autopar.cost_models.compiler.manual import seconds
from autopar.cost_models.sharding.strategies import StrategySet
from autopar.ir.graph import Op
from autopar.ir.layout import REPLICATED, Layout
from autopar.passes.op_groups.bindings import Builder, use
from autopar.passes.op_groups.constraints import checked_layout
from autopar.rules import manual


def manual_call(b: Builder, op: Op, weight: float) -> None:
    """Add the groups of a `shard_map`.

    Raises:
        PinError: a spec is no layout: it cuts one dimension over axes in another order than that of the mesh.
    """
    call = manual.call_of(op)
    where = f"shard_map at {manual.line(op)}"
    b.new(f"{op.tag} {op.name}", _body(b, op, call), weight, op.index, op.outputs[0])
    readers: dict[tuple[int, Layout], int] = {}
    for k, (atom, spec) in enumerate(zip(op.inputs, call.operands, strict=True)):
        type_ = b.graph.type_of(atom)
        if not isinstance(atom, int) or not type_.shape:
            continue
        layout = _on_real(checked_layout(spec, type_, b.mesh, f"operand {k} of {where}"), type_.shape)
        site, key = f"{op.tag}.in{k}", (atom, layout)
        if key not in readers:
            readers[key] = b.new(f"{site} {op.name}", b.pinned(type_.shape, layout), weight, -1, atom)
        b.heavy_reads.add(atom)
        use(b, site, atom, readers[key], tuple(range(type_.rank)), False, weight, op.index)
    for k, (value, spec) in enumerate(zip(op.outputs, call.results, strict=True)):
        type_ = b.graph.types[value]
        if type_.shape:
            layout = _on_real(checked_layout(spec, type_, b.mesh, f"result {k} of {where}"), type_.shape)
            b.enter_as(f"{op.tag} {op.name} %{value}", value, weight, b.pinned(type_.shape, layout))


def _body(b: Builder, op: Op, call: manual.ManualCall) -> StrategySet:
    """The one strategy of a body: nothing is left to choose."""

    def make(index: int) -> StrategySet:
        whole = np.full((1, len(b.mesh.sizes)), REPLICATED, np.int16)
        return StrategySet(index, whole, whole, np.zeros_like(whole), np.array([seconds(call, b.mesh)]), ())

    return b.strategy_set((manual.MANUAL, op.equation), make)


def _on_real(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """A layout in which axes of one device that cut a dimension of one element cut nothing."""
    return tuple(REPLICATED if d >= 0 and shape[d] <= 1 else d for d in layout)
