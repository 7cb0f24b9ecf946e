"""Merging: groups the operations of a program, so that one strategy variable decides the layouts of many operations.

A value is

    bound     a group decides its layout: arguments, results of heavy operations, and results of the light operations
              that follow these                                                                    -> _follow, _anchor
    a view    a bound value broadcast to more dimensions; the new dimensions may be cut in any way at no cost
                                                                                               -> _view_of_broadcast
    free      computed from constants, iotas, scalars and random keys alone; every use gets it in the layout that it
              requires                                                                             -> Builder.is_free

An operation can follow an operand if the operand has all factors of the result and none of them is reduced or kept. The
operation then runs in any layout of the operand -> _candidates. Of several such operands it follows that of the oldest
group -> _leader. A residual stream thus becomes one group, to which the groups of equal layers are symmetric. All other
operations have strategies of their own -> _anchor.

The sharding of two kinds of arguments is not propagated: of those that a mesh axis can only cut unevenly, and of those
received from elsewhere in a given layout. A residual stream would otherwise be bound to such an argument from end to
end, where one reshard may be cheaper -> _own_strategies.

Regions are planned in place: the body of a loop counts as often as it runs. A value that enters a loop gets a group of
its own, so that it can be resharded once before the loop. A carry leaves an iteration in the layout in which it
entered, and may be a partial sum in all of them -> regions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.compiler.backends import backend_of
from autopar.cost_models.compiler.fusion import KERNEL, LIGHT, SECONDS
from autopar.cost_models.flops import computing_dtype, executed_flops
from autopar.cost_models.kernels import KERNELS
from autopar.cost_models.reductions import combines
from autopar.cost_models.sharding.groups import FREE, WHOLE, Binding, Charge, Grouping, OpGroup, projection
from autopar.cost_models.sharding.strategies import StrategySet
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Atom, Graph, Op, Repeats
from autopar.ir.layout import Layout, divides
from autopar.ir.op_sets import ALL_PRODUCTS, KERNEL_CALLS, MEGABLOX_PRODUCTS, RETURNING_CALLBACKS, XLA_RAGGED_PRODUCTS
from autopar.ir.train_state import match_state
from autopar.passes.op_groups import overlap, unreduced
from autopar.passes.op_groups.bindings import Builder, Followed, Kind, alias, use
from autopar.passes.op_groups.constraints import PinnedValue, constraint
from autopar.passes.op_groups.manual import manual_call
from autopar.passes.op_groups.pinned import check_bound, has_layout, restrict
from autopar.passes.op_groups.regions import REGIONS
from autopar.passes.op_groups.strategies import MOST_PADDING, Work, strategies_of, sum_strategies
from autopar.rules import SHARD_MAPPED, Rule, ragged, runs_per_device
from autopar.rules.convolutions import CONVOLUTION
from autopar.rules.manual import MANUAL

#: Operations that always have strategies of their own.
ANCHORS = (*ALL_PRODUCTS, "sharding_constraint")
#: Operations that are not computed once per layout in which their result is read, even if their operands are free.
NEVER_FREE = (
    *(*ANCHORS, *KERNELS, *KERNEL_CALLS, *RETURNING_CALLBACKS, MANUAL),
    *("gather", "scatter", "scatter-add", "sort", "rng_bit_generator"),
)
#: Operations on (operand, indices, updates) for which XLA supports uneven pieces along the windows only.
WINDOWED = ("scatter-add", "scatter")
#: Operations whose reduction is a sum, so that partial results may be reduce-scattered.
SUMS = (*ALL_PRODUCTS, "reduce_sum", "scatter-add", "cumsum")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a part of a program shares with the parts around it, which no lower bound on the part alone may charge.

    Attributes:
        entering: values received from other parts: in any layout, written and read at no cost.
        leaving: positions of results that other parts read: written at no cost.
        repeated: indices of operations that other parts may compute for it: they cost nothing, and nor does what they
            read in another layout.
    """

    entering: frozenset[int]
    leaving: frozenset[int]
    repeated: frozenset[int]


def group(
    graph: Graph,
    rules: Mapping[int, Rule],
    mesh: LogicalMesh,
    pinned_arguments: Mapping[int, Layout] | None = None,
    pinned_results: Mapping[int, Layout] | None = None,
    received: Collection[int] = (),
    surroundings: Surroundings | None = None,
    even: Collection[int] = (),
    pinned_values: Mapping[int, PinnedValue] | None = None,
) -> Grouping:
    """Groups, bindings and uses of a program.

    Args:
        graph: the program.
        rules: signature of a leaf operation -> sharding rule.
        mesh: the mesh to plan for.
        pinned_arguments: position -> the only layout of the argument.
        pinned_results: position -> the only layout of the result.
        received: positions of the pinned arguments that are received from elsewhere; their sharding is not propagated.
        surroundings: of a part of a program that is only bounded from below.
        even: values that must be divided evenly, since arrays between programs are.
        pinned_values: value inside the program -> its only layout.

    Raises:
        PinError: a `with_sharding_constraint` is not valid for its value or the mesh; or no strategy of an operation
            has the layout to which its result is pinned.
    """
    b = Builder(graph, rules, mesh, unreduced.find(graph), overlap.find(graph), pinned_values=pinned_values or {})
    often = graph.repeats or Repeats({}, {}, {})
    stacks = {graph.inputs[position] for position in often.parts.values()}
    for position, (value, path) in enumerate(zip(graph.inputs, graph.input_paths, strict=True)):
        shape = graph.types[value].shape
        if shape:
            pin = (pinned_arguments or {}).get(position)
            b.repeats = weight = float(often.inputs.get(value, 1))
            if surroundings is not None and value in surroundings.entering:
                b.enter(path, value, weight)
                continue
            layouts = b.layouts(shape, 1.0) if pin is None else b.pinned(shape, pin)
            entered = b.enter_as(path, value, weight, _uncut_along_0(b, shape, layouts) if value in stacks else layouts)
            if pin is None and _undivided(b, shape):
                b.not_propagated[entered] = MOST_PADDING
            elif pin is not None and position in received:
                b.not_propagated[entered] = 1.0
    b.repeats = 1.0
    for value, _ in graph.constants:
        if graph.types[value].shape:
            b.enter(f"constant%{value}", value, 1.0)
    for op in graph.ops:
        b.repeats = float(often.ops.get(op.index, 1))
        _visit(b, (op,), b.repeats)
    check_bound(b)
    _leave(b, pinned_results or {}, often, surroundings.leaving if surroundings else ())
    for value in sorted(even):
        if value in b.bindings:
            _divide_evenly(b, b.bindings[value])
    _charge_followers(b, surroundings)
    groups = tuple(OpGroup(d.name, d.strategies, d.weight, d.op, d.value, tuple(d.light.items())) for d in b.drafts)
    repeated = {v: float(n) for i, n in often.ops.items() for op in graph.by_index[i].walk() for v in _made_anew(op)}
    grouping = Grouping(groups, b.bindings, tuple(b.uses), rules, b.overlap, tuple(b.charges), repeated)
    return grouping.without(surroundings.repeated) if surroundings else grouping


def _made_anew(op: Op) -> Iterator[int]:
    """Values that each execution of an operation has anew, with copies of its own: results, and what regions read."""
    yield from (v for region in op.regions for v in region.inputs) if op.regions else op.outputs


def _undivided(b: Builder, shape: tuple[int, ...]) -> bool:
    """Whether some mesh axis can cut this shape only unevenly, which an argument does not allow."""
    even, uneven = ((b.layouts(shape, most).result >= 0).any(0) for most in (1.0, MOST_PADDING))
    return bool((uneven & ~even).any())


def _visit(b: Builder, ops: Sequence[Op], weight: float) -> None:
    """Group these operations in order; `weight` is their number of executions per step."""
    for op in ops:
        if op.regions:
            REGIONS[op.name](b, op, weight, _visit)
        else:
            _leaf(b, op, weight)


# Leaves


def _kind(b: Builder, op: Op) -> Kind:
    """The properties of the signature of an operation, cached."""
    kind = b.kinds.get(op.signature)
    if kind is None:
        rule = b.rules[op.signature]
        results = [b.graph.types[v] for v in op.outputs]
        main = max(range(len(results)), key=lambda i: (results[i].size, -i)) if results else 0
        kind = b.kinds[op.signature] = Kind(
            rule,
            main,
            _candidates(rule, main) if results and op.name not in (*ANCHORS, *SHARD_MAPPED) else (),
            op.name not in NEVER_FREE and not rule.reduced and not op.equation.effects,
            op.name == "broadcast_in_dim",
        )
    return kind


def _big(rule: Rule, dims: Sequence[int]) -> list[int]:
    """The factors of more than one element, ascending."""
    return sorted(f for f in dims if rule.sizes[f] > 1)


def _candidates(rule: Rule, main: int) -> tuple[int, ...]:
    """Positions of the operands whose factors of more than one element are exactly those of the main result."""
    wanted = _big(rule, rule.results[main])
    stuck = {*rule.reduced, *rule.need_replication}
    if len(set(wanted)) != len(wanted) or stuck & set(wanted):
        return ()
    if any(not set(_big(rule, dims)) <= set(wanted) for dims in rule.results):
        return ()
    return tuple(k for k, dims in enumerate(rule.operands) if dims and _big(rule, dims) == wanted)


def _leaf(b: Builder, op: Op, weight: float) -> None:
    """Group an operation without regions: by the first of the cases in the module docstring that applies."""
    kind = _kind(b, op)
    b.pace[op.index] = b.repeats
    for atom in op.inputs:
        if isinstance(atom, int):
            b.reads[atom] = b.reads.get(atom, 0) + 1
    if not op.outputs:
        return
    if kind.may_be_free and all(b.is_free(a) for a in op.inputs):
        return
    if op.name in _BORDERS:
        _BORDERS[op.name](b, op, weight)
        restrict(b, op)
        return
    if kind.broadcast and _view_of_broadcast(b, op, kind):
        return
    leader = None if op.index in b.deferral.sums else _leader(b, op, kind)
    if leader is not None and _may_deviate(b, op, kind, leader):
        _own_strategies(b, op, kind, leader, weight)
    elif leader is not None:
        _follow(b, op, kind, leader, weight)
    elif not _view_of_unary(b, op, kind):
        _anchor(b, op, kind, weight)
    restrict(b, op)


def _pass_through(b: Builder, op: Op, weight: float) -> None:
    """Bind result i to the binding of operand i."""
    for i, (atom, result) in enumerate(zip(op.inputs, op.outputs, strict=True)):
        alias(b, atom, result, f"{op.tag} %{result}", f"{op.tag}.in{i}", weight, op.index)


def _constrained(b: Builder, op: Op, weight: float) -> None:
    """Add a group with the layouts that the user's `with_sharding_constraint` allows."""
    (result,) = op.outputs
    type_ = b.graph.types[result]
    if not type_.shape:
        return
    layout, open_dims = constraint(op, type_, b.mesh)
    group = b.enter_as(f"{op.tag} {op.name}", result, weight, b.pinned(type_.shape, layout, open_dims))
    if isinstance(op.inputs[0], int):
        use(b, f"{op.tag}.in0", op.inputs[0], group, tuple(range(type_.rank)), False, weight, op.index)


#: Operations whose results have the layouts of the operands, or those that the user prescribes.
_BORDERS = {"optimization_barrier": _pass_through, "sharding_constraint": _constrained, MANUAL: manual_call}


def _leader(b: Builder, op: Op, kind: Kind) -> int | None:
    """Position of the operand to follow, None if there is none.

    It is the candidate of the oldest group. An argument whose sharding is not propagated comes last.
    """
    best: tuple[bool, int, int] | None = None
    for k in kind.candidates:
        atom = op.inputs[k]
        binding = b.bindings.get(atom) if isinstance(atom, int) else None
        if binding is not None and binding.view is None and _may_lead(b, op, binding):
            rank = (binding.group in b.not_propagated, binding.group, k)
            best = rank if best is None else min(best, rank)
    return None if best is None else best[2]


def _may_lead(b: Builder, op: Op, binding: Binding) -> bool:
    """Whether an operation may follow a group; one that may be a partial sum is followed by what adds to it."""
    return binding.group not in b.accumulators or b.deferral.accumulators.get(op.index) == binding.value


def _follow(b: Builder, op: Op, kind: Kind, leader: int, weight: float) -> None:
    """Bind the results of an operation to the group of the operand `leader`."""
    binding = b.bindings[_value(op.inputs[leader])]
    operands, results = _followed(b, op.signature, kind.rule, leader, binding.dims)
    for value, dims in zip(op.outputs, results, strict=True):
        b.bindings[value] = Binding(binding.group, value, dims)
    b.followers.append(op)
    for k, value in _reads(op, kind.rule):
        if k != leader:
            use(b, f"{op.tag}.in{k}", value, binding.group, operands[k], False, weight, op.index)


def _reads(op: Op, rule: Rule) -> Iterator[tuple[int, int]]:
    """(position, value) of each operand that is a value and that the operation reads."""
    return ((k, atom) for k, atom in enumerate(op.inputs) if isinstance(atom, int) and k not in rule.unread)


def _followed(b: Builder, signature: int, rule: Rule, leader: int, binding: tuple[int, ...]) -> Followed:
    """The factors of the group for each dimension of operands and results, if the operation follows operand `leader`.

    `binding` has the group's factor for each dimension of that operand.
    """
    key = signature, leader, binding
    dims = b.followed.get(key)
    if dims is None:
        factor_of = {f: c for f, c in zip(rule.operands[leader], binding, strict=True) if rule.sizes[f] > 1}
        operands, results = (
            [tuple([factor_of.get(f, WHOLE) for f in dims]) for dims in side] for side in (rule.operands, rule.results)
        )
        dims = b.followed[key] = operands, results
    return dims


def _may_deviate(b: Builder, op: Op, kind: Kind, leader: int) -> bool:
    """Whether an operation must not inherit the sharding of its leading operand.

    That of some arguments is not propagated, and a pinned result has one layout, which the operand need not have.
    """
    leading = b.bindings[_value(op.inputs[leader])]
    if leading.group in b.not_propagated or not any(v in b.pinned_values for v in op.outputs):
        return leading.group in b.not_propagated
    _, results = _followed(b, op.signature, kind.rule, leader, leading.dims)
    bound = (Binding(leading.group, v, dims) for v, dims in zip(op.outputs, results, strict=True))
    return any(not has_layout(b, binding) for binding in bound)


def _own_strategies(b: Builder, op: Op, kind: Kind, leader: int, weight: float) -> None:
    """Give an operation that must not inherit the sharding of its leading operand a strategy variable of its own.

    Its strategies are the layouts of the main result, uneven ones included if the argument does not divide.
    """
    rule, main = kind.rule, op.outputs[kind.main]
    most = b.not_propagated.get(b.bindings[_value(op.inputs[leader])].group, 1.0)
    group = b.enter_as(f"{op.tag} {op.name}", main, weight, b.layouts(b.graph.types[main].shape, most))
    position = {f: d for d, f in enumerate(rule.results[kind.main]) if rule.sizes[f] > 1}
    for value, dims in zip(op.outputs, rule.results, strict=True):
        b.bindings[value] = Binding(group, value, tuple(position.get(f, WHOLE) for f in dims))
    b.followers.append(op)
    for k, value in _reads(op, kind.rule):
        dims = tuple(position.get(f, WHOLE) for f in rule.operands[k])
        use(b, f"{op.tag}.in{k}", value, group, dims, False, weight, op.index)


def _anchor(b: Builder, op: Op, kind: Kind, weight: float) -> None:
    """Add a group with strategies of its own for an operation."""
    rule = kind.rule
    role = (op.signature, op.index in b.deferral.products, b.deferral.sums.get(op.index), b.overlap.sums(op))
    strategies = b.strategy_set(role, lambda index: _op_strategies(b, op, rule, index))
    group = b.new(f"{op.tag} {op.name}", strategies, weight, op.index, op.outputs[kind.main])
    for value, dims in zip(op.outputs, rule.results, strict=True):
        if b.graph.types[value].shape:
            b.bindings[value] = Binding(group, value, tuple(dims))
    light = op.index in b.deferral.sums  # an elementwise sum; its strategies do not include its HBM traffic
    if light:
        b.followers.append(op)
    for k, value in _reads(op, kind.rule):
        if not light:
            b.heavy_reads.add(value)
        use(b, f"{op.tag}.in{k}", value, group, tuple(rule.operands[k]), True, weight, op.index)


def _op_strategies(b: Builder, op: Op, rule: Rule, index: int) -> StrategySet:
    """The strategies of an operation that has its own, as number `index` of the strategy sets."""
    operands = tuple(b.graph.type_of(a) for a in op.inputs)
    results = tuple(b.graph.types[v] for v in op.outputs)
    dtype = computing_dtype(op, operands) if operands else results[0].dtype
    defers = op.index in b.deferral.products
    per_device = runs_per_device(op) or (defers and op.name == CONVOLUTION)
    even = rule.free if per_device else _even(rule) if op.name in WINDOWED else ()
    linear_sum, product = op.name in SUMS, op.name in ALL_PRODUCTS
    behind, dot = b.overlap.sums(op), op.name == "dot_general"
    backend = backend_of(b.mesh.device)
    total = executed_flops(op, operands, results, masks_groups=backend.masks_groups)
    combined = all(combines(backend.name, op.name, r.dtype) for r in results)
    alone = op.name in MEGABLOX_PRODUCTS or (op.name in XLA_RAGGED_PRODUCTS and not backend.masks_groups)
    in_groups = ragged.in_groups(op.params, rule) if alone else ()
    unread = tuple(i for i, v in enumerate(op.outputs) if not b.graph.uses_of(v)) if op.name in SHARD_MAPPED else ()
    work = Work(
        *(total, operands, results, dtype, combined, linear_sum, defers, even, product, behind, dot, unread, in_groups)
    )
    if op.index in b.deferral.sums:
        return sum_strategies(work, b.mesh, index, stays=b.deferral.sums[op.index])
    return strategies_of(rule, work, b.mesh, index)


def _even(rule: Rule) -> tuple[int, ...]:
    """The factors of a scatter that must be cut evenly: all but those of its windows.

    XLA gathers the indices of a scatter that is cut unevenly along another factor.
    """
    _, indices, updates = rule.operands
    return tuple(f for f in rule.free if f in indices or f not in updates)


# Views


def _view_of_broadcast(b: Builder, op: Op, kind: Kind) -> bool:
    """Bind a broadcast as a view of its operand. Returns False if the operand is free or it is a mere reshape."""
    atom = op.inputs[0]
    binding = b.bindings.get(atom) if isinstance(atom, int) else None
    if binding is None or 0 in kind.candidates:
        return False
    behind = {f: i for i, f in enumerate(kind.rule.operands[0]) if kind.rule.sizes[f] > 1}
    view = tuple(behind.get(f, FREE) for f in kind.rule.results[0])
    if binding.view is not None:
        view = tuple(binding.view[i] if i >= 0 else FREE for i in view)
    b.bindings[op.outputs[0]] = Binding(binding.group, binding.value, binding.dims, view)
    return True


def _view_of_unary(b: Builder, op: Op, kind: Kind) -> bool:
    """Bind an elementwise operation as a view if its only bound operand is one. Returns whether it is bound."""
    bound = [k for k, a in enumerate(op.inputs) if isinstance(a, int) and not b.is_free(a)]
    if len(bound) != 1 or bound[0] not in kind.candidates or len(op.outputs) != 1:
        return False
    binding = b.bindings[_value(op.inputs[bound[0]])]
    if binding.view is None:
        return False
    behind = {f: binding.view[i] for i, f in enumerate(kind.rule.operands[bound[0]]) if kind.rule.sizes[f] > 1}
    view = tuple(behind.get(f, FREE) for f in kind.rule.results[0])
    b.bindings[op.outputs[0]] = Binding(binding.group, binding.value, binding.dims, view)
    return True


# Results and followers


def _leave(b: Builder, pinned: Mapping[int, Layout], often: Repeats, leaving: Collection[int] = ()) -> None:
    """Add the uses by the caller.

    The next state has the layout of the state, a part that of the argument with all parts, and a pinned result its pin.
    All other results have even layouts.

    Args:
        pinned: position of a result -> layout.
        often: what runs more than once.
        leaving: as of `Surroundings`.
    """
    for out, layout in pinned.items():
        atom = b.graph.outputs[out]
        if isinstance(atom, int) and b.graph.types[atom].rank:
            shape = b.graph.types[atom].shape
            b.repeats = weight = float(often.results.get(out, 1))
            border = b.new(f"out{out}", b.pinned(shape, layout), weight, -1, atom)
            use(b, f"out{out}", atom, border, tuple(range(len(shape))), False, weight, -1)
    arguments = {**match_state(b.graph), **often.parts}
    for out, position in arguments.items():
        if out in pinned:
            continue
        atom, argument = b.graph.outputs[out], b.graph.inputs[position]
        rank = b.graph.types[argument].rank
        if isinstance(atom, int) and rank:
            dims, weight = tuple(range(1 if out in often.parts else 0, rank)), float(often.results.get(out, 1))
            use(b, f"out{out}", atom, b.bindings[argument].group, dims, False, weight, -1)
    for out, atom in enumerate(b.graph.outputs):
        if isinstance(atom, int) and out not in leaving:
            b.heavy_reads.add(atom)
            if out not in pinned and out not in arguments and _may_be_uneven(b, atom):
                shape = b.graph.types[atom].shape
                b.repeats = weight = float(often.results.get(out, 1))
                border = b.new(f"out{out}", b.layouts(shape, 1.0), weight, -1, atom)
                use(b, f"out{out}", atom, border, tuple(range(len(shape))), False, weight, -1)


def _uncut_along_0(b: Builder, shape: tuple[int, ...], layouts: StrategySet) -> StrategySet:
    """Those layouts of an argument with the parts of all microbatches that do not cut between parts."""
    return b.some(layouts, (layouts.result != 0).all(1), ("parts", shape, layouts.index))


def _may_be_uneven(b: Builder, value: int) -> bool:
    """Whether a result is a view, or its group has layouts that JAX does not return: uneven ones and partial sums."""
    binding = b.bindings.get(value)
    if binding is None or binding.view is not None or binding.group in b.accumulators:
        return binding is not None
    return not _evenly(b, binding).all()


def _evenly(b: Builder, binding: Binding) -> NDArray[np.bool_]:
    """Of every strategy of a group, whether it divides a value evenly."""
    shape = b.graph.types[binding.value].shape
    classes, layouts = projection(b.drafts[binding.group].strategies, binding.dims, False)
    return np.array([divides(tuple(row), shape, b.mesh.sizes) for row in layouts.tolist()])[classes]


def _divide_evenly(b: Builder, binding: Binding) -> None:
    """Leave a group only those strategies that divide a value evenly, if there are any."""
    draft, rows = b.drafts[binding.group], _evenly(b, binding)
    if rows.any() and not rows.all():
        key = ("even", draft.strategies.index, binding.dims, b.graph.types[binding.value].shape)
        draft.strategies = b.some(draft.strategies, rows, key)


def _charge_followers(b: Builder, surroundings: Surroundings | None = None) -> None:
    """Charge the HBM traffic of light operations to the groups they follow.

    A result is charged if it is written to memory (`autopar.cost_models.compiler.fusion.SECONDS`), and an argument for
    every light operation that reads it. A sum that a loop adds up is read and written in every iteration, and so is the
    sum of what repeated passes leave to operations that run once. The batch, that is every argument that is no state,
    is new in each step and is charged once more for being written.
    """
    entering = surroundings.entering if surroundings else ()
    kept = set(match_state(b.graph).values())
    for position, value in enumerate(b.graph.inputs):
        if kept and position not in kept and value in b.bindings and surroundings is None:
            _charge(b, b.bindings[value], value, -1)
    for op in b.followers:
        carry = b.deferral.accumulators.get(op.index)
        if carry in b.bindings:
            for value in (carry, *op.outputs):
                _charge(b, b.bindings[value], value, op.index)
            continue
        for value in op.outputs:
            if SECONDS.is_written({LIGHT: b.reads.get(value, 0), KERNEL: value in b.heavy_reads}):
                _charge(b, b.bindings[value], value, op.index)
        for k, atom in enumerate(op.inputs):
            if isinstance(atom, int) and atom in b.graph.names and atom in b.bindings and atom not in entering:
                _charge(b, _reading(b, op, k, atom), atom, op.index)

    for value, op in unreduced.sums_of_passes(b.graph):
        if value in b.bindings:
            _charge(b, b.bindings[value], value, op.index)  # read
            _charge(b, b.bindings[value], value, op.index)  # written


def _reading(b: Builder, op: Op, operand: int, value: int) -> Binding:
    """The binding to which the read of an argument by a light operation is charged.

    An argument whose sharding is not propagated is read in the layout of its reader.
    """
    binding, reader = b.bindings[value], b.bindings.get(op.outputs[0])
    if binding.group not in b.not_propagated or reader is None:
        return binding
    rule = b.rules[op.signature]
    factor_of = dict(zip(rule.results[0], reader.dims, strict=True))
    return Binding(reader.group, value, tuple(factor_of.get(f, WHOLE) for f in rule.operands[operand]))


def _charge(b: Builder, binding: Binding, value: int, op: int) -> None:
    """Charge a group with the bytes of a value that operation `op` moves (-1: the batch, written from outside)."""
    draft = b.drafts[binding.group]
    key = tuple(sorted(d for d in binding.dims if d >= 0))
    # per execution of the group, which may run at another rate than the operation
    nbytes = b.graph.types[value].nbytes * (b.pace.get(op, draft.repeats) / draft.repeats)
    draft.light[key] = draft.light.get(key, 0.0) + nbytes
    b.charges.append(Charge(binding.group, key, nbytes * draft.weight, op))


def _value(atom: Atom) -> int:
    assert isinstance(atom, int)
    return atom
