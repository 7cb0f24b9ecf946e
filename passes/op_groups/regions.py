"""Regions: how the bodies of loops, branches and rematerialised parts are grouped in place.

A body counts as often as it runs. A value that enters a loop gets a group of its own, so that it is resharded once
before the loop and not in every iteration. A carry leaves an iteration in the layout in which it entered, which may be
that of a partial sum (`autopar.passes.op_groups.unreduced`). A stacked
operand or result is never cut along the dimension over which the loop iterates. In a body that runs once, inputs have
the bindings of the outer values.

    region   inputs of the body                              results of the operation
    scan     constants, carries, slices of stacked operands  carries, stacked results               -> _scan
    while    constants of condition and body, carries        carries                                -> _while
    cond     operands of every branch                        one binding for all branches           -> _cond
    remat    operands                                        bindings of the body's results         -> _remat
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autopar import jax_compat
from autopar.cost_models.sharding.groups import WHOLE, Binding
from autopar.ir.graph import UNKNOWN_TRIPS, Op, Region
from autopar.passes.op_groups.bindings import Builder, alias, use

#: Groups a list of operations of a weight (executions per step).
Visit = Callable[[Builder, Sequence[Op], float], None]


def _enter_all(b: Builder, op: Op, region: Region, first: int, offset: int, outer: float, inner: float) -> list[int]:
    """Add groups for the inputs of a region.

    Args:
        first: position of the first input.
        offset: input i reads operand i + offset.
        outer: executions per step of the operation.
        inner: executions per step of the region.

    Returns:
        The group of each input from `first` on, -1 for scalars.
    """
    groups: list[int] = []
    for i in range(first, len(region.inputs)):
        value, atom = region.inputs[i], op.inputs[i + offset]
        shift = b.graph.type_of(atom).rank - b.graph.types[value].rank  # of a stacked operand: 1
        name = f"{op.tag}.{region.name} %{value}"
        if not b.graph.types[value].shape:
            groups.append(-1)
            if shift and isinstance(atom, int):  # read whole, and no partial sum
                whole = b.new(name, b.layouts(()), inner, -1, value)
                use(b, f"{op.tag}.in{i + offset}", atom, whole, (WHOLE,) * shift, False, outer, op.index)
            continue
        if value in b.deferral.carries:
            group = b.enter_as(name, value, inner, b.layouts_or_partial(b.graph.types[value].shape))
            b.accumulators.add(group)
        else:
            group = b.enter(name, value, inner)
        groups.append(group)
        if isinstance(atom, int):
            # a stacked operand has one more dimension than its slice, which is never cut
            dims = (WHOLE,) * shift + tuple(range(b.graph.types[value].rank))
            use(b, f"{op.tag}.in{i + offset}", atom, group, dims, False, outer, op.index)
    return groups


def _enter_constants(b: Builder, region: Region, weight: float) -> None:
    """Add groups for the constants of a region."""
    for value, _ in region.constants:
        if b.graph.types[value].shape:
            b.enter(f"constant%{value}", value, weight)


def _return_carry(b: Builder, op: Op, region: Region, position: int, group: int, weight: float) -> None:
    """Add the use of a region's output in the layout of `group`; none for scalars (-1)."""
    atom = region.outputs[position]
    if group >= 0 and isinstance(atom, int):
        dims = tuple(range(b.graph.types[atom].rank))
        use(b, f"{op.tag}.{region.name}.out{position}", atom, group, dims, False, weight, op.index)


def _leave_region(b: Builder, op: Op, region: Region, position: int, result: int, weight: float, stacked: bool) -> None:
    """Bind a result as the region's output is bound, after a leading dimension that is never cut if it is stacked."""
    if not b.graph.types[result].rank - stacked:
        if stacked:
            b.enter(f"{op.tag} %{result}", result, weight)
        return
    atom = region.outputs[position]
    binding = b.bindings.get(atom) if isinstance(atom, int) else None
    lead = (WHOLE,) if stacked else ()
    if binding is not None and binding.view is None:
        group, dims = binding.group, binding.dims
    else:
        site, type_ = f"{op.tag}.{region.name}.out{position}", b.graph.type_of(atom)
        group, dims = b.new(site, b.layouts(type_.shape), weight, -1, result), tuple(range(type_.rank))
        if isinstance(atom, int):
            use(b, site, atom, group, dims, False, weight, op.index)
    b.bindings[result] = Binding(group, result, (*lead, *dims))


def _scan(b: Builder, op: Op, weight: float, visit: Visit) -> None:
    """Group a scan: inputs are constants, carries and slices, results are carries and stacks."""
    region = op.regions[0]
    constants, carries = jax_compat.scan_counts(op.params)
    inner = weight * (op.trips or UNKNOWN_TRIPS)
    entered = _enter_all(b, op, region, 0, 0, weight, inner)
    _enter_constants(b, region, inner)
    visit(b, region.ops, inner)
    for j in range(carries):
        group = entered[constants + j]
        _return_carry(b, op, region, j, group, inner)
        if group >= 0:
            b.bind(op.outputs[j], group)
    for j in range(carries, len(op.outputs)):
        _leave_region(b, op, region, j, op.outputs[j], inner, stacked=True)


def _while(b: Builder, op: Op, weight: float, visit: Visit) -> None:
    """Group a while loop: condition and body share the groups of the carries."""
    condition, body = op.regions
    n_cond, n_body = op.params["cond_nconsts"], op.params["body_nconsts"]
    inner = weight * (op.trips or UNKNOWN_TRIPS)
    entered = _enter_all(b, op, body, 0, n_cond, weight, inner)
    carry = [(j, group) for j, group in enumerate(entered[n_body:]) if group >= 0]
    _enter_all(b, op, Region(condition.name, condition.inputs[:n_cond], (), ()), 0, 0, weight, inner)
    for j, group in carry:
        b.bind(condition.inputs[n_cond + j], group)
    for region in (condition, body):
        _enter_constants(b, region, inner)
        visit(b, region.ops, inner)
    for j, group in carry:
        _return_carry(b, op, body, j, group, inner)
        b.bind(op.outputs[j], group)


def _alias_inputs(b: Builder, op: Op, region: Region, offset: int, weight: float) -> None:
    """Bind the inputs of a body that runs once as the outer values are bound; free ones get groups."""
    for i, value in enumerate(region.inputs):
        name, site = f"{op.tag}.{region.name} %{value}", f"{op.tag}.in{i + offset}"
        alias(b, op.inputs[i + offset], value, name, site, weight, op.index)


def _cond(b: Builder, op: Op, weight: float, visit: Visit) -> None:
    """Group the branches; each result has a group, in whose layout every branch returns it."""
    for region in op.regions:
        _alias_inputs(b, op, region, 1, weight)
        _enter_constants(b, region, weight)
        visit(b, region.ops, weight)
    for j, result in enumerate(op.outputs):
        if not b.graph.types[result].shape:
            continue
        group = b.enter(f"{op.tag}.out{j}", result, weight)
        for region in op.regions:
            _return_carry(b, op, region, j, group, weight)


def _remat(b: Builder, op: Op, weight: float, visit: Visit) -> None:
    """Group a rematerialised body as if it were part of the surrounding program."""
    region = op.regions[0]
    _alias_inputs(b, op, region, 0, weight)
    _enter_constants(b, region, weight)
    visit(b, region.ops, weight)
    for j, result in enumerate(op.outputs):
        _leave_region(b, op, region, j, result, weight, stacked=False)


REGIONS: Mapping[str, Callable[[Builder, Op, float, Visit], None]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    jax_compat.REMAT: _remat,
}
