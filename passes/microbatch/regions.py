"""Bodies of loops and branches on blocks, and inlining of rematerialised bodies.

A scan runs on blocks if its body does. Constants, and slices of stacked operands, enter in their states; carries enter
in the least states that an iteration reproduces,

    carry_0 = state of the initial value,    carry_{i+1} = join(carry_i, state after the body with carry_i)

until nothing changes; the lattice is finite, so that this ends after at most (number of carries + 1) rounds
                                                                                                            -> _fixpoint
A scan over the examples themselves, as `jax.lax.map` makes one, has fewer iterations on a block, if no iteration reads
what the one before it computes. What the iterations add up is then a sum over the batch        -> _scan_over_examples
A `while` runs on blocks likewise, if its condition is invariant, or a truth value for each example         -> _while
Branches of a `cond` on an invariant predicate do if all branches do and their results have a join          -> _cond

Rematerialised bodies run once, on values of their surroundings, so that their operations can be treated as operations
of the surroundings: some may leave the loop over microbatches while others stay. `flatten` inlines them and records
which body each operation comes from; codegen puts those that stay together into a body again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from autopar import jax_compat
from autopar.ir import control_flow
from autopar.ir.graph import Atom, Graph, Op, Region, is_zero
from autopar.passes.microbatch.grouped import Groups, find_groups, grouped, is_grouped
from autopar.passes.microbatch.rules import kernels, manual_blocks
from autopar.passes.microbatch.rules.table import apply_table, invariant_results
from autopar.passes.microbatch.rules.types import ConstantComponent, Operands, RuleResult, no_constants
from autopar.passes.microbatch.slice_pushdown import push_down, readers_of
from autopar.passes.microbatch.states import INVARIANT, SUM, ZERO, Grouped, Invariant, Partial, Split, State, join
from autopar.rules import manual


@dataclass(frozen=True, slots=True, eq=False)
class FlattenedOps:
    """Operations in program order, with rematerialised bodies inlined.

    Attributes:
        ops: the operations; the inputs of an inlined body are replaced by values of the surrounding body.
        outputs: results of the body.
        constants: arrays that it closes over.
        remat: index of an operation -> the rematerialised bodies that it comes from, outermost first.
    """

    ops: tuple[Op, ...]
    outputs: tuple[Atom, ...]
    constants: tuple[tuple[int, Any], ...]
    remat: Mapping[int, tuple[Op, ...]]


def flatten(ops: Sequence[Op], outputs: Sequence[Atom], constants: Sequence[tuple[int, Any]]) -> FlattenedOps:
    """The operations of a body, with rematerialised bodies inlined."""
    flat_ops: list[Op] = []
    closed = list(constants)
    remat: dict[int, tuple[Op, ...]] = {}
    names: dict[int, Atom] = {}

    def read(atom: Atom) -> Atom:
        return names.get(atom, atom) if isinstance(atom, int) else atom

    def visit(op: Op, around: tuple[Op, ...]) -> None:
        inputs = tuple(map(read, op.inputs))
        if op.name != jax_compat.REMAT:
            flat_ops.append(op if inputs == op.inputs else replace(op, inputs=inputs))
            if around:
                remat[op.index] = around
            return
        (region,) = op.regions
        names.update(zip(region.inputs, inputs, strict=True))
        closed.extend(region.constants)
        for inner in region.ops:
            visit(inner, (*around, op))
        names.update(zip(op.outputs, map(read, region.outputs), strict=True))

    for op in ops:
        visit(op, ())
    return FlattenedOps(tuple(flat_ops), tuple(map(read, outputs)), tuple(closed), remat)


@dataclass(frozen=True, slots=True, eq=False)
class BlockBody:
    """The body of a loop or a branch, on blocks.

    Attributes:
        region: the region that it comes from.
        flat: its operations.
        states: state of every value in it.
        rule_results: index of an operation -> how it runs on a block; None if it runs on whole values.
        input_states: states in which values enter.
        output_states: states in which the body returns its results.
    """

    region: Region
    flat: FlattenedOps
    states: Mapping[int, State]
    rule_results: Mapping[int, RuleResult | None]
    input_states: tuple[State, ...]
    output_states: tuple[State, ...]


@dataclass(frozen=True, slots=True)
class BlockedBody:
    """A body that cannot run on blocks: the first operation that cannot, the states of its operands, and why not.

    `region`, `input_states`: the body, and the states in which values enter it.
    """

    op: Op
    states: tuple[State, ...]
    region: Region
    input_states: tuple[State, ...]
    why: str = ""


KEEPS_SORTED_ROWS = (
    "the loop around it keeps rows that are sorted by group for its backward pass; recompute them there, with "
    "jax.checkpoint around the body of the loop"
)


def state_of(atom: Atom, states: Mapping[int, State]) -> State:
    """The state of a value in a body, or of a literal."""
    if isinstance(atom, int):
        return states[atom]
    return ZERO if is_zero(atom) else INVARIANT


def shapes(graph: Graph, atoms: Sequence[Atom]) -> tuple[tuple[int, ...], ...]:
    """Shapes of whole values."""
    return tuple(graph.type_of(a).shape for a in atoms)


def apply_rule(
    graph: Graph,
    op: Op,
    states: tuple[State, ...],
    count: int,
    constant_component: ConstantComponent = no_constants,
    groups: Groups | None = None,
) -> RuleResult | None:
    """How one operation runs on blocks, loops and branches included; None if it cannot.

    Args:
        graph: the program.
        op, states: the operation and the states of its operands.
        count: number of microbatches.
        constant_component: values of components of its index arrays, as far as they are constant.
        groups: rows around it that are sorted by group.
    """
    rule = _REGION_RULES.get(op.name)
    if rule is not None:
        return None if any(isinstance(s, Grouped) for s in states) else rule(graph, op, states, count)
    operands = Operands(op, shapes(graph, op.inputs), shapes(graph, op.outputs), states, count, constant_component)
    if groups is not None and is_grouped(op, states, groups):
        return grouped(operands, groups, apply_table)
    return apply_table(operands)


def analyse_region(graph: Graph, region: Region, input_states: Sequence[State], count: int) -> BlockBody | BlockedBody:
    """The body with its inputs in these states; if there is an operation that cannot run on blocks, the first such
    operation.
    """
    flat = flatten(region.ops, region.outputs, region.constants)
    states: dict[int, State] = dict(zip(region.inputs, input_states, strict=True))
    states.update((value, INVARIANT) for value, _ in flat.constants)
    rule_results: dict[int, RuleResult | None] = {}
    groups = find_groups(graph, flat.ops, flat.outputs)
    for op in flat.ops:
        operands = tuple(state_of(a, states) for a in op.inputs)
        if all(isinstance(s, Invariant) for s in operands):
            results = invariant_results(op, operands)
            rule_results[op.index] = None
        else:
            refused = jax_compat.has_side_effects(op.equation)
            result = None if refused else apply_rule(graph, op, operands, count, groups=groups)
            if result is None:
                return BlockedBody(op, operands, region, tuple(input_states))
            results, rule_results[op.index] = result.results, result
        states.update(zip(op.outputs, results, strict=True))
    outputs = tuple(state_of(a, states) for a in flat.outputs)
    for op in flat.ops if any(isinstance(s, Grouped) for s in outputs) else ():
        if any(v in flat.outputs and isinstance(states[v], Grouped) for v in op.outputs):
            operands = tuple(state_of(a, states) for a in op.inputs)
            return BlockedBody(op, operands, region, tuple(input_states), KEEPS_SORTED_ROWS)
    return BlockBody(region, flat, states, rule_results, tuple(input_states), outputs)


def _push_slices_down(graph: Graph, body: BlockBody, positions: Sequence[int], count: int) -> BlockBody:
    """The body, with values that are only read in blocks computed in blocks. Inputs at `positions` may come in
    blocks.
    """
    flat = body.flat
    whole = [op for op in flat.ops if body.rule_results[op.index] is None or op.name == "scan"]
    inputs = [body.region.inputs[i] for i in positions if isinstance(body.input_states[i], Invariant)]
    # A result that the body returns in blocks counts as one more reader, with index -1 - position.
    results = [
        (i, a, s) for i, (a, s) in enumerate(zip(flat.outputs, body.output_states, strict=True)) if isinstance(a, int)
    ]
    sliced_results = {i: s for i, a, s in results if isinstance(s, Split) and isinstance(body.states[a], Invariant)}
    readers = readers_of(flat.ops)
    for i, value, _ in results:
        if i in sliced_results:
            readers.setdefault(value, []).append((-1 - i, 0))
    rule_results = {**body.rule_results, **{-1 - i: RuleResult((), {0: s}) for i, s in sliced_results.items()}}
    read_whole = {a for i, a, _ in results if i not in sliced_results}
    changed, sliced_inputs = push_down(graph, whole, rule_results, readers, read_whole, count, inputs, narrow_scan)
    states: dict[int, State] = {**body.states, **sliced_inputs}
    for op in whole:
        if op.index in changed:
            states.update(zip(op.outputs, changed[op.index].results, strict=True))
    changed = {index: result for index, result in changed.items() if index >= 0}
    input_states = tuple(states[v] for v in body.region.inputs)
    return replace(body, states=states, rule_results={**body.rule_results, **changed}, input_states=input_states)


def _shift_dim(state: State, by: int) -> State | None:
    """The state of a stacked value from that of a slice (by = 1), or of a slice from that of the stack (by = -1).

    None if the value is split along the stacked dimension.
    """
    if not isinstance(state, Split):
        return state
    return Split(state.dim + by, state.outer) if state.dim + by >= 0 else None


def _fixpoint(
    graph: Graph, region: Region, fixed: Sequence[State], carries: Sequence[State], rest: Sequence[State], count: int
) -> BlockBody | BlockedBody | None:
    """A loop's body on blocks, its carries in the least states that an iteration reproduces.

    The operation that cannot run on blocks, if there is one; None if the carries have no such states.
    """
    for _ in range(len(carries) + 2):
        body = analyse_region(graph, region, [*fixed, *carries, *rest], count)
        if isinstance(body, BlockedBody):
            return body
        joined = [s for a, b in zip(carries, body.output_states, strict=False) if (s := join(a, b)) is not None]
        if len(joined) < len(carries):
            return None
        if joined == list(carries):
            return replace(body, output_states=(*carries, *body.output_states[len(carries) :]))
        carries = joined
    return None


def _scan_body(graph: Graph, op: Op, states: tuple[State, ...], count: int) -> BlockBody | BlockedBody | None:
    fixed, carried = jax_compat.scan_counts(op.params)
    stacked = states[fixed + carried :]
    slices = [s for s in (_shift_dim(s, -1) for s in stacked) if s is not None]
    if len(slices) < len(stacked):
        return None
    return _fixpoint(graph, op.regions[0], states[:fixed], states[fixed : fixed + carried], slices, count)


def _scan(graph: Graph, op: Op, states: tuple[State, ...], count: int) -> RuleResult | None:
    if _examples(op, states) is not None:
        return _scan_over_examples(graph, op, states, count)
    body = _scan_body(graph, op, states, count)
    return _scan_result(graph, op, states, body, count) if isinstance(body, BlockBody) else None


def _examples(op: Op, states: Sequence[State]) -> Split | None:
    """The blocks in which a scan goes through examples of the batch, one or more per iteration; None if it does not."""
    stacked = states[sum(jax_compat.scan_counts(op.params)) :]
    return next((s for s in stacked if isinstance(s, Split) and s.dim == 0), None)


def _scan_over_examples(graph: Graph, op: Op, states: Sequence[State], count: int) -> RuleResult | None:
    """Iterations that are independent, but for carries that they only add to, and carries that stay as they are."""
    fixed, carried = jax_compat.scan_counts(op.params)
    first_slice, examples = fixed + carried, _examples(op, states)
    (region,) = op.regions
    assert examples is not None
    whole = all(isinstance(s, Invariant) for s in states[:first_slice])
    if not whole or any(s != examples and not isinstance(s, Invariant) for s in states[first_slice:]):
        return None
    sums = {k for k, _ in control_flow.sums(graph, op)}
    # an iteration sees one example, which is whole there
    body = analyse_region(graph, region, [INVARIANT] * len(region.inputs), count)
    assert isinstance(body, BlockBody), "an operation on whole values runs on whole values"
    # carries that an iteration passes on as it received them
    same_as: dict[Atom, Atom] = {v: v for v in region.inputs}
    for inner in body.flat.ops:
        if control_flow.keeps_value(graph, inner) and inner.inputs[0] in same_as:
            same_as[inner.outputs[0]] = same_as[inner.inputs[0]]
    kept = {k for k in range(carried) if same_as.get(body.flat.outputs[k]) == region.inputs[fixed + k]}
    # any other carry makes an iteration depend on those before it
    if len(sums | kept) < carried:
        return None
    return RuleResult(
        (*(SUM if k in sums else INVARIANT for k in range(carried)), *[examples] * (len(op.outputs) - carried)),
        {i: examples for i, s in enumerate(states) if i >= first_slice and isinstance(s, Invariant)},
        {"length": op.params["length"] // count},
        body=body,
    )


def _scan_result(graph: Graph, op: Op, states: Sequence[State], body: BlockBody, count: int) -> RuleResult:
    fixed, carried = jax_compat.scan_counts(op.params)
    first_slice = fixed + carried
    body = _push_slices_down(graph, body, (*range(fixed), *range(first_slice, len(states))), count)
    results = (*body.output_states[:carried], *(_shift_dim(s, 1) for s in body.output_states[carried:]))
    slices = {
        i: Split(s.dim + (i >= first_slice), s.outer)
        for i, s in enumerate(body.input_states)
        if isinstance(s, Split) and isinstance(states[i], Invariant)
    }
    return RuleResult(tuple(s for s in results if s is not None), slices, body=body)


def narrow_scan(graph: Graph, op: Op, result: RuleResult, wanted: Mapping[int, Split], count: int) -> RuleResult | None:
    """A scan whose stacked results `wanted`, which are invariant and only read in blocks, are stacked in blocks."""
    fixed, carried = jax_compat.scan_counts(op.params)
    slices = {i: _shift_dim(s, -1) for i, s in wanted.items() if i >= carried}
    if not isinstance(result.body, BlockBody) or len(slices) < len(wanted) or None in slices.values():
        return None
    output_states = tuple(slices.get(i) or s for i, s in enumerate(result.body.output_states))
    states = [_operand_state(result, i, s, i >= fixed + carried) for i, s in enumerate(result.body.input_states)]
    return _scan_result(graph, op, states, replace(result.body, output_states=output_states), count)


def _operand_state(result: RuleResult, position: int, state: State, stacked: bool) -> State:
    """The state of a scan's operand whose state inside the body is `state`."""
    if position in result.slices:
        return INVARIANT
    return Split(state.dim + stacked, state.outer) if isinstance(state, Split) else state


def _while(graph: Graph, op: Op, states: tuple[State, ...], count: int) -> RuleResult | None:
    """A while loop whose number of iterations is the same for all examples, or one under `vmap`.

    Under `vmap` the condition has a truth value for each example. An example for which it is false keeps its carries,
    however many iterations the others take. So the examples of a block loop by themselves, with equal results.
    """
    first_carry = op.params["cond_nconsts"] + op.params["body_nconsts"]
    of_examples = graph.type_of(op.regions[0].outputs[0]).rank > 0
    bodies = _while_bodies(graph, op, states, states[first_carry:], count)
    if of_examples and bodies is not None:
        examples, carried = bodies[0].output_states[0], bodies[1].output_states
        carries = [examples if isinstance(s, Invariant) else s for s in carried]
        if not isinstance(examples, Split) or {*carries} != {examples}:
            return None
        if carries != [*carried]:  # the loop ends differently for each example, so that no carry stays invariant
            bodies = _while_bodies(graph, op, states, carries, count)
    if bodies is None:
        return None
    test, body = bodies
    runs, carried = test.output_states[0], body.output_states
    if {*carried} != {runs} if of_examples else not isinstance(runs, Invariant):
        return None
    slices = {
        i: s for i, s in enumerate(carried, first_carry) if isinstance(s, Split) and isinstance(states[i], Invariant)
    }
    return RuleResult(
        carried,
        slices,
        body=(_push_slices_down(graph, test, (), count), _push_slices_down(graph, body, (), count)),
    )


def _while_bodies(
    graph: Graph, op: Op, states: Sequence[State], carries: Sequence[State], count: int
) -> tuple[BlockBody, BlockBody] | None:
    """A while loop's condition and body on blocks, the carries as in `_fixpoint`; None if they cannot run on blocks."""
    condition, region = op.regions
    first, second = op.params["cond_nconsts"], op.params["body_nconsts"]
    body = _fixpoint(graph, region, states[first : first + second], carries, (), count)
    if not isinstance(body, BlockBody):
        return None
    test = analyse_region(graph, condition, [*states[:first], *body.output_states], count)
    return None if isinstance(test, BlockedBody) else (test, body)


def _cond(graph: Graph, op: Op, states: tuple[State, ...], count: int) -> RuleResult | None:
    if not isinstance(states[0], Invariant):
        return None
    bodies = _branches(graph, op, states, count)
    blocked = [b for b in bodies if isinstance(b, BlockBody)]
    if len(blocked) < len(bodies):
        return None
    results = [
        _join_all(states_of_result) for states_of_result in zip(*(b.output_states for b in blocked), strict=True)
    ]
    if any(r is None for r in results):
        return None
    joined = tuple(r for r in results if r is not None)
    return RuleResult(
        joined, body=tuple(_push_slices_down(graph, replace(b, output_states=joined), (), count) for b in blocked)
    )


def _branches(graph: Graph, op: Op, states: tuple[State, ...], count: int) -> list[BlockBody | BlockedBody]:
    return [analyse_region(graph, region, states[1:], count) for region in op.regions]


def _join_all(states: Sequence[State]) -> State | None:
    """The join of a result's states in all branches; None if there is none.

    An invariant beside parts of a sum counts once: it is the part of the first block, and the others are zero.
    """
    if all(isinstance(state, Invariant) or state == SUM for state in states) and SUM in states:
        return SUM
    joined: State | None = states[0]
    for state in states[1:]:
        joined = None if joined is None else join(joined, state)
    return joined


# shard_map


def _manual(graph: Graph, op: Op, states: tuple[State, ...], count: int) -> RuleResult | None:
    """A `shard_map`, if its body runs on blocks of the shards."""
    body = _manual_body(op, states, count)
    if not isinstance(body, BlockBody):
        return None
    call = manual.call_of(op)
    specs = zip(body.output_states, call.results, strict=True)
    return RuleResult(tuple(manual_blocks.of_whole(state, spec, call.mesh) for state, spec in specs), body=body)


def _manual_body(op: Op, states: Sequence[State], count: int) -> BlockBody | BlockedBody | None:
    """The body on blocks of the shards; None if the blocks are not blocks of shards, or what it sends is not known."""
    call = manual.call_of(op)
    local = [manual_blocks.of_shards(s, spec, call.mesh) for s, spec in zip(states, call.operands, strict=True)]
    entered = [s for s in local if s is not None]
    if len(entered) < len(local) or manual_blocks.unknown(call.body) is not None:
        return None
    return analyse_region(call.body, manual_blocks.region_of(call.body), entered, count)


_REGION_RULES: Mapping[str, Any] = {"scan": _scan, "while": _while, "cond": _cond, manual.MANUAL: _manual}


# Refusals


class Blocking(NamedTuple):
    """What prevents operations from running on blocks.

    Attributes:
        op: an operation that does not run on blocks, or that yields a total which others need.
        why: why it does not, where that is known.
        is_total: it yields a total.
    """

    op: Op
    why: str = ""
    is_total: bool = False


class Reason(NamedTuple):
    """Why FLOPs are outside of the loops: `op` reads whole what `source` gives block by block, or `why` if given.

    `source` is `op` if no total is read.
    """

    op: Op
    source: Op
    why: str
    flops: float

    def __str__(self) -> str:
        at = f" at {self.op.source}" if self.op.source else ""
        of = f" at {self.source.source}" if self.source.source else ""
        if self.why:
            return f"{self.source.name}{of} does not run on a part of the batch: {self.why}"
        if self.source is self.op:
            return f"{self.op.name}{at} combines examples of the whole batch"
        return f"{self.source.name}{of} is over the whole batch, and {self.op.name}{at} hands it back to every example"


def blocking_op(graph: Graph, op: Op, states: tuple[State, ...], count: int) -> Blocking:
    """The operation inside a scan or a branch that prevents it from running on blocks; `op` itself if none does."""
    bodies: Sequence[BlockBody | BlockedBody | None] = ()
    if op.name == "scan":
        bodies = [_scan_body(graph, op, states, count)]
    elif op.name == "cond" and isinstance(states[0], Invariant):
        bodies = _branches(graph, op, states, count)
    inner = next((body for body in bodies if isinstance(body, BlockedBody)), None)
    if inner is not None and inner.why:
        return Blocking(inner.op, inner.why)
    if inner is not None and any(isinstance(s, Partial) for s in inner.states):
        return Blocking(inner.op, _reads_total(graph, op, inner, count))
    if inner is not None:
        return blocking_op(graph, inner.op, inner.states, count)
    if op.name == "scan" and _examples(op, states) is not None:
        return Blocking(
            op, "its iterations go through the examples in order, and read what those before them leave in the carry"
        )
    if op.name == manual.MANUAL:
        return Blocking(op, _why_manual_is_blocked(op, states, count))
    explained = op.name == "pallas_call" and not all(isinstance(s, Invariant) for s in states)
    operands = Operands(op, shapes(graph, op.inputs), shapes(graph, op.outputs), states, count)
    return Blocking(op, kernels.refusal(operands) if explained else "")


def _why_manual_is_blocked(op: Op, states: tuple[State, ...], count: int) -> str:
    """Why a `shard_map` does not run on blocks, with the operation of its body."""
    call, body = manual.call_of(op), _manual_body(op, states, count)
    if isinstance(body, BlockedBody):
        at = f" at {body.op.source}" if body.op.source else ""
        total = any(isinstance(s, Partial) for s in body.states)
        return f"{body.op.name}{at} in its body {'reads a total over the batch' if total else 'combines examples'}"
    if (unknown := manual_blocks.unknown(call.body)) is not None:
        return f"{unknown.name} at {unknown.source} in its body is not known on a part of the batch"
    pairs = zip(states, call.operands, strict=True)
    operand, spec = next((i, p) for i, (s, p) in enumerate(pairs) if manual_blocks.of_shards(s, p, call.mesh) is None)
    return f"{spec} of operand {operand} gives devices pieces that do not divide into {count} microbatches"


def _reads_total(graph: Graph, op: Op, inner: BlockedBody, count: int) -> str:
    """Why an operation in the body of a scan or branch is blocked that reads a total over the batch; what helps."""
    at = f" at {op.source}" if op.source else ""
    why = f"it reads a total over the batch inside the {op.name}{at}"
    if op.name != "scan" or _meets_examples(graph, inner, count):
        return why
    return f"{why}; return that total from the scan, stacked, and compute with it behind the scan"


def _meets_examples(graph: Graph, inner: BlockedBody, count: int) -> bool:
    """Whether what a body computes from totals over the batch meets examples again."""
    flat = flatten(inner.region.ops, inner.region.outputs, inner.region.constants)
    states: dict[int, State] = dict(zip(inner.region.inputs, inner.input_states, strict=True))
    states.update((value, INVARIANT) for value, _ in flat.constants)
    totals: set[Atom] = set()
    for op in flat.ops:
        operands = tuple(state_of(a, states) for a in op.inputs)
        invariant = all(isinstance(s, Invariant) for s in operands)
        result = None if invariant or op.equation.effects else apply_rule(graph, op, operands, count)
        is_total = any(a in totals for a in op.inputs if isinstance(a, int)) or (not invariant and result is None)
        if is_total and any(isinstance(s, Split) for s in operands):
            return True
        if is_total:
            totals.update(op.outputs)
        states.update(zip(op.outputs, result.results if result else [INVARIANT] * len(op.outputs), strict=True))
    return False
