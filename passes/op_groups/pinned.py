"""Groups of operations whose results are pinned: only the strategies that give a result its layout remain."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.sharding.groups import Binding, projection
from autopar.cost_models.sharding.strategies import StrategySet
from autopar.errors import PinError
from autopar.ir.graph import Op
from autopar.ir.layout import PARTIAL, REPLICATED, Layout, divides, spec
from autopar.passes.op_groups.bindings import Builder
from autopar.passes.op_groups.constraints import PinnedValue

#: Layouts that an error suggests.
NEAREST = 3


def has_layout(b: Builder, binding: Binding) -> bool:
    """Whether every strategy of a group gives a value the layout to which it is pinned; True if it is not pinned."""
    pin = b.pinned_values.get(binding.value)
    return pin is None or bool(_allowed(b.drafts[binding.group].strategies, binding, pin).all())


def _allowed(strategies: StrategySet, binding: Binding, pin: PinnedValue) -> NDArray[np.bool_]:
    """Which strategies give a value the layout to which it is pinned. Shape (n,)."""
    classes, layouts = projection(strategies, binding.dims, assigned=False)
    allowed = _agree(layouts, pin)[classes]
    if pin.computed:
        classes, layouts = projection(strategies, binding.dims, assigned=True)
        allowed &= _agree(layouts, pin)[classes]
    return allowed


def _agree(layouts: NDArray[np.int8], pin: PinnedValue) -> NDArray[np.bool_]:
    """Which layouts, shape (n, axes), are that of a pin, but for axes that cut its open dimensions. Shape (n,)."""
    wanted = np.array(pin.layout, layouts.dtype)
    return ((layouts == wanted) | ((wanted == REPLICATED) & np.isin(layouts, pin.open_dims))).all(1)


def restrict(b: Builder, op: Op) -> None:
    """Remove the strategies that do not give the results of an operation the layouts to which they are pinned.

    Raises:
        PinError: no strategy does; the message has the nearest layouts.
    """
    for value in op.outputs:
        binding = b.bindings.get(value)
        if value in b.pinned_values and binding is not None and binding.view is None:
            _restrict(b, op, binding)


def _restrict(b: Builder, op: Op, binding: Binding) -> None:
    draft, pin = b.drafts[binding.group], b.pinned_values[binding.value]
    allowed = _allowed(draft.strategies, binding, pin)
    if not allowed.any():
        layouts = projection(draft.strategies, binding.dims, assigned=False)[1]
        raise _impossible(b, op, binding.value, [tuple(map(int, layout)) for layout in layouts])
    if not allowed.all():
        key = ("only", draft.strategies.index, binding.dims, pin.layout, pin.open_dims, pin.computed)
        draft.strategies = b.some(draft.strategies, allowed, key)


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
