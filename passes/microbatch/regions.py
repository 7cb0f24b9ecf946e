"""Bodies of loops and branches on blocks, and rematerialised bodies laid flat.

A scan runs on blocks if its body does: constants and slices of stacked operands enter in their states, carries in the
least states that an iteration reproduces,

    carry_0 = state of the initial value,    carry_{i+1} = join(carry_i, state after the body with carry_i)

until nothing changes, which the finite lattice ends after as many rounds as there are carries, and one   -> _fixpoint
A `while` likewise, if its test is invariant                                                              -> _while
Branches of a `cond` on an invariant predicate run on blocks if all do and agree on their results         -> _cond

Rematerialised bodies run once, with the values of their surroundings, so that their operations can be treated as part
of these: some may leave the loop over microbatches and some stay. `flatten` lays them flat and remembers where they
come from; whoever binds them puts those that stayed together into a body again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar import jax_compat
from autopar.ir.graph import Atom, Graph, Op, Region
from autopar.passes.microbatch.rule_types import Case, Column, Outcome, unknown
from autopar.passes.microbatch.slice_pushdown import readers_of, sink
from autopar.passes.microbatch.states import INVARIANT, ZERO, Invariant, Split, State, join
from autopar.passes.microbatch.table import invariant_results, outcome


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """Operations in program order without rematerialised bodies.

    Attributes:
        ops: operations whose operands are values of the surrounding body where they were inputs of a flattened one.
        outputs: results of the body.
        constants: arrays that it closes over.
        remat: index of an operation -> the rematerialisations it stood in, outermost first.
    """

    ops: tuple[Op, ...]
    outputs: tuple[Atom, ...]
    constants: tuple[tuple[int, Any], ...]
    remat: Mapping[int, tuple[Op, ...]]


def flatten(ops: Sequence[Op], outputs: Sequence[Atom], constants: Sequence[tuple[int, Any]]) -> Flat:
    """The operations of a body with those of rematerialised bodies in their place."""
    found: list[Op] = []
    closed = list(constants)
    remat: dict[int, tuple[Op, ...]] = {}
    names: dict[int, Atom] = {}

    def read(atom: Atom) -> Atom:
        return names.get(atom, atom) if isinstance(atom, int) else atom

    def visit(op: Op, around: tuple[Op, ...]) -> None:
        inputs = tuple(map(read, op.inputs))
        if op.name not in jax_compat.REMAT:
            found.append(op if inputs == op.inputs else replace(op, inputs=inputs))
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
    return Flat(tuple(found), tuple(map(read, outputs)), tuple(closed), remat)


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """A loop's body or a branch on blocks.

    Attributes:
        region: where it comes from.
        flat: its operations.
        states: state of every value in it.
        outcomes: index of an operation -> how it runs on a block; None if it runs on whole values.
        inputs, outputs: states in which values enter, and in which the body's results are handed on.
    """

    region: Region
    flat: Flat
    states: Mapping[int, State]
    outcomes: Mapping[int, Outcome | None]
    inputs: tuple[State, ...]
    outputs: tuple[State, ...]


def is_zero(atom: Atom) -> bool:
    """True for a literal zero."""
    return not isinstance(atom, int) and not np.any(np.asarray(atom.value))


def state_of(atom: Atom, states: Mapping[int, State]) -> State:
    """The state of a value in a body, or of a literal."""
    if isinstance(atom, int):
        return states[atom]
    return ZERO if is_zero(atom) else INVARIANT


def shapes(graph: Graph, atoms: Sequence[Atom]) -> tuple[tuple[int, ...], ...]:
    return tuple(graph.type_of(a).shape for a in atoms)


def decide(graph: Graph, op: Op, states: tuple[State, ...], count: int, column: Column = unknown) -> Outcome | None:
    """The outcome of one operation on blocks, loops and branches included."""
    rule = _REGION_RULES.get(op.name)
    if rule is not None:
        return rule(graph, op, states, count)
    return outcome(Case(op, shapes(graph, op.inputs), shapes(graph, op.outputs), states, count, column))


def _analyse(graph: Graph, region: Region, entering: Sequence[State], count: int) -> Body | Op:
    """The body with its inputs in these states; the first operation that cannot run on blocks if there is one."""
    flat = flatten(region.ops, region.outputs, region.constants)
    states: dict[int, State] = dict(zip(region.inputs, entering, strict=True))
    states.update((value, INVARIANT) for value, _ in flat.constants)
    outcomes: dict[int, Outcome | None] = {}
    for op in flat.ops:
        operands = tuple(state_of(a, states) for a in op.inputs)
        if all(isinstance(s, Invariant) for s in operands):
            results = invariant_results(op, operands)
            outcomes[op.index] = None
        else:
            found = None if op.equation.effects else decide(graph, op, operands, count)
            if found is None:
                return op
            results, outcomes[op.index] = found.results, found
        states.update(zip(op.outputs, results, strict=True))
    outputs = tuple(state_of(a, states) for a in flat.outputs)
    return Body(region, flat, states, outcomes, tuple(entering), outputs)


def _sunk(graph: Graph, body: Body, positions: Sequence[int], count: int) -> Body:
    """The body with what is only read in blocks made in blocks; inputs at these positions may come in blocks."""
    flat = body.flat
    whole = [op for op in flat.ops if body.outcomes[op.index] is None or op.name == "scan"]
    inputs = [body.region.inputs[i] for i in positions if isinstance(body.inputs[i], Invariant)]
    # A result that is handed on in blocks is one more reader: -1 - position.
    results = [(i, a, s) for i, (a, s) in enumerate(zip(flat.outputs, body.outputs, strict=True)) if isinstance(a, int)]
    cut_results = {i: s for i, a, s in results if isinstance(s, Split) and isinstance(body.states[a], Invariant)}
    readers = readers_of(flat.ops)
    for i, value, _ in results:
        if i in cut_results:
            readers.setdefault(value, []).append((-1 - i, 0))
    outcomes = {**body.outcomes, **{-1 - i: Outcome((), {0: s}) for i, s in cut_results.items()}}
    kept = {a for i, a, _ in results if i not in cut_results}
    changed, cut = sink(graph, whole, outcomes, readers, kept, count, inputs, narrowed)
    states: dict[int, State] = {**body.states, **cut}
    for op in whole:
        if op.index in changed:
            states.update(zip(op.outputs, changed[op.index].results, strict=True))
    changed = {index: found for index, found in changed.items() if index >= 0}
    entering = tuple(states[v] for v in body.region.inputs)
    return replace(body, states=states, outcomes={**body.outcomes, **changed}, inputs=entering)


def _stacked(state: State, by: int) -> State | None:
    """The state of a stacked value, or of one slice of it (by = -1); None if it is split along the stack."""
    if not isinstance(state, Split):
        return state
    return Split(state.dim + by, state.outer) if state.dim + by >= 0 else None


def _fixpoint(
    graph: Graph, region: Region, fixed: Sequence[State], carries: Sequence[State], rest: Sequence[State], count: int
) -> Body | Op | None:
    """A loop's body on blocks, its carries in the least states that an iteration reproduces.

    The operation that cannot run on blocks, if there is one; None if the carries have no such states.
    """
    for _ in range(len(carries) + 2):
        body = _analyse(graph, region, [*fixed, *carries, *rest], count)
        if isinstance(body, Op):
            return body
        joined = [s for a, b in zip(carries, body.outputs, strict=False) if (s := join(a, b)) is not None]
        if len(joined) < len(carries):
            return None
        if joined == list(carries):
            return replace(body, outputs=(*carries, *body.outputs[len(carries) :]))
        carries = joined
    return None


def _scan_body(graph: Graph, op: Op, states: tuple[State, ...], count: int) -> Body | Op | None:
    fixed, carried = jax_compat.scan_counts(op.params)
    stacked = states[fixed + carried :]
    slices = [s for s in (_stacked(s, -1) for s in stacked) if s is not None]
    if len(slices) < len(stacked):
        return None
    return _fixpoint(graph, op.regions[0], states[:fixed], states[fixed : fixed + carried], slices, count)


def _scan(graph: Graph, op: Op, states: tuple[State, ...], count: int) -> Outcome | None:
    body = _scan_body(graph, op, states, count)
    return _scan_outcome(graph, op, states, body, count) if isinstance(body, Body) else None


def _scan_outcome(graph: Graph, op: Op, states: Sequence[State], body: Body, count: int) -> Outcome:
    fixed, carried = jax_compat.scan_counts(op.params)
    first_slice = fixed + carried
    body = _sunk(graph, body, (*range(fixed), *range(first_slice, len(states))), count)
    results = (*body.outputs[:carried], *(_stacked(s, 1) for s in body.outputs[carried:]))
    cuts = {
        i: Split(s.dim + (i >= first_slice), s.outer)
        for i, s in enumerate(body.inputs)
        if isinstance(s, Split) and isinstance(states[i], Invariant)
    }
    return Outcome(tuple(s for s in results if s is not None), cuts, body=body)


def narrowed(graph: Graph, op: Op, found: Outcome, wanted: Mapping[int, Split], count: int) -> Outcome | None:
    """A scan that stacks blocks of these results, which are invariant and of which only blocks are read."""
    fixed, carried = jax_compat.scan_counts(op.params)
    slices = {i: _stacked(s, -1) for i, s in wanted.items() if i >= carried}
    if not isinstance(found.body, Body) or len(slices) < len(wanted) or None in slices.values():
        return None
    outputs = tuple(slices.get(i) or s for i, s in enumerate(found.body.outputs))
    first = [_before(found, i, s, i >= fixed + carried) for i, s in enumerate(found.body.inputs)]
    return _scan_outcome(graph, op, first, replace(found.body, outputs=outputs), count)


def _before(found: Outcome, position: int, state: State, stacked: bool) -> State:
    """The state of a scan's operand, of which the body sees this."""
    if position in found.cuts:
        return INVARIANT
    return Split(state.dim + stacked, state.outer) if isinstance(state, Split) else state


def _while(graph: Graph, op: Op, states: tuple[State, ...], count: int) -> Outcome | None:
    """A loop that runs equally often for all examples."""
    condition, region = op.regions
    of_condition, of_body = op.params["cond_nconsts"], op.params["body_nconsts"]
    fixed, carries = states[of_condition : of_condition + of_body], states[of_condition + of_body :]
    body = _fixpoint(graph, region, fixed, carries, (), count)
    if not isinstance(body, Body):
        return None
    test = _analyse(graph, condition, [*states[:of_condition], *body.outputs], count)
    if isinstance(test, Op) or not isinstance(test.outputs[0], Invariant) or graph.type_of(condition.outputs[0]).rank:
        return None
    entering = enumerate(body.outputs, of_condition + of_body)
    cuts = {i: s for i, s in entering if isinstance(s, Split) and isinstance(states[i], Invariant)}
    return Outcome(body.outputs, cuts, body=(_sunk(graph, test, (), count), _sunk(graph, body, (), count)))


def _cond(graph: Graph, op: Op, states: tuple[State, ...], count: int) -> Outcome | None:
    if not isinstance(states[0], Invariant):
        return None
    bodies = [_analyse(graph, region, states[1:], count) for region in op.regions]
    done = [b for b in bodies if isinstance(b, Body)]
    if len(done) < len(bodies):
        return None
    results = [_agreed(column) for column in zip(*(b.outputs for b in done), strict=True)]
    if any(r is None for r in results):
        return None
    agreed = tuple(r for r in results if r is not None)
    return Outcome(agreed, body=tuple(_sunk(graph, replace(b, outputs=agreed), (), count) for b in done))


def _agreed(states: Sequence[State]) -> State | None:
    """The state of a result that the branches give in these."""
    found: State | None = states[0]
    for state in states[1:]:
        found = None if found is None else join(found, state)
    return found


_REGION_RULES: Mapping[str, Any] = {"scan": _scan, "while": _while, "cond": _cond}


def blocking(graph: Graph, op: Op, states: tuple[State, ...], count: int) -> Op:
    """The operation inside a scan that keeps it from running on blocks; the scan itself if none does."""
    found = _scan_body(graph, op, states, count) if op.name == "scan" else None
    return found if isinstance(found, Op) else op
