"""Groups of operations whose results are pinned: only the strategies that give a result its layout remain."""

from __future__ import annotations

import numpy as np

from autopar.cost_models.sharding.groups import Binding, projection
from autopar.errors import PinError
from autopar.ir.graph import Op
from autopar.ir.layout import PARTIAL, Layout, divides, spec
from autopar.passes.op_groups.bindings import Builder

#: Layouts that an error suggests.
NEAREST = 3


def has_layout(b: Builder, binding: Binding) -> bool:
    """Whether every strategy of a group gives a value the layout to which it is pinned; True if it is not pinned."""
    pin = b.pinned_values.get(binding.value)
    if pin is None:
        return True
    _, layouts = projection(b.drafts[binding.group].strategies, binding.dims, assigned=False)
    return len(layouts) == 1 and tuple(map(int, layouts[0])) == pin.layout


def restrict(b: Builder, op: Op) -> None:
    """Remove the strategies that do not give the results of an operation the layouts to which they are pinned.

    Raises:
        PinError: no strategy does; the message has the nearest layouts.
    """
    for value in op.outputs:
        binding = b.bindings.get(value)
        if value in b.pinned_values and binding is not None and binding.view is None and not has_layout(b, binding):
            _restrict(b, op, binding)


def _restrict(b: Builder, op: Op, binding: Binding) -> None:
    draft, wanted = b.drafts[binding.group], b.pinned_values[binding.value].layout
    classes, layouts = projection(draft.strategies, binding.dims, assigned=False)
    rows = (layouts == np.array(wanted)).all(1)[classes]
    if not rows.any():
        raise _impossible(b, op, binding.value, [tuple(map(int, layout)) for layout in layouts])
    draft.strategies = b.some(draft.strategies, rows, ("only", draft.strategies.index, binding.dims, wanted))


def _impossible(b: Builder, op: Op, value: int, layouts: list[Layout]) -> PinError:
    """The error for a layout that no strategy of an operation has."""
    pin, type_, names = b.pinned_values[value], b.graph.types[value], b.mesh.names
    wanted = spec(pin.layout, type_.rank, names)
    if op.name == "sharding_constraint":
        said = spec(layouts[0], type_.rank, names)
        return PinError(
            f"pin '{pin.key}' of {wanted} contradicts with_sharding_constraint at {op.source} of {said}; "
            "drop one of them"
        )
    possible = [x for x in layouts if PARTIAL not in x and divides(x, type_.shape, b.mesh.sizes)]
    possible.sort(key=lambda layout: sum(a != c for a, c in zip(layout, pin.layout, strict=True)))
    near = " or ".join(str(spec(layout, type_.rank, names)) for layout in possible[:NEAREST])
    return PinError(
        f"pin '{pin.key}' on {op.name} at {op.source}: {type_} cannot be computed as {wanted} by the rule "
        f"{b.rules[op.signature]}; nearest: {near}"
    )


def check_bound(b: Builder) -> None:
    """PinError for a pin all of whose values are computed wherever they are read, and so have no layout."""
    bound = {pin.key for v, pin in b.pinned_values.items() if (x := b.bindings.get(v)) is not None and x.view is None}
    for value, pin in b.pinned_values.items():
        if pin.key not in bound:
            op = b.graph.producers[value]
            raise PinError(
                f"pin '{pin.key}': {op.name} at {op.source} is computed from constants or by a broadcast, in the "
                "layout that each reader needs; pin the line that reads it"
            )
