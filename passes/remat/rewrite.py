"""Rematerialisation: the backward pass of a layer recomputes what the forward pass then need not keep.

    none    all residuals of a layer are kept
    dots    results of products are kept, the rest is recomputed from them (elementwise work only)
    full    what enters the layer is kept, everything inside is recomputed (Chen et al., 2016, "Training deep nets with
            sublinear memory cost")

A *residual* of a layer is a value of its forward operations that backward operations read. It is *dropped* unless it
leaves the layer (a later layer, the update or the caller reads it), the policy keeps it, or a side effect made it.
Dropped residuals that are made from kept values apart from each other are recomputed apart, if a product of the
backward pass runs in between that the later ones can wait for: its result is in memory anyhow. Just before the first
backward operation that reads one of them stand

    an optimization barrier over all that the recomputation and the backward operations up to the next one read: what
    entered the layer, parameters, cotangents. It waits for the gradient, and keeps the compiler from merging the
    recomputation with the forward pass, as the lowering of `jax.checkpoint` does                    -> _barrier
    clones of the forward operations that the dropped residuals are made by, in order                -> _cloned

and the backward operations read these. A forward scan stops stacking dropped residuals and stacks the carries that
enter its iterations instead; the body of the backward scan recomputes them (no barrier: loops are not merged)  -> _scan

What stands inside the user's own `jax.checkpoint` is left alone: values that it reads are kept. Clones are the same
operations on the same keys, so random numbers come out bit for bit; operations with side effects are never cloned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import count
from typing import NamedTuple

from networkx.utils import UnionFind

from autopar import jax_compat
from autopar.errors import ArgumentError
from autopar.ir.graph import Atom, Graph, Op, Region, Type, numbered
from autopar.ir.op_sets import PRODUCTS
from autopar.passes.layers import find as layers_pass
from autopar.passes.layers.find import Layers

NONE, DOTS, FULL = "none", "dots", "full"
POLICIES: tuple[str, ...] = (NONE, DOTS, FULL)


def rewrite(graph: Graph, policies: Sequence[str]) -> Graph:
    """The same program with layers recomputed in the backward pass.

    Args:
        graph: the program as traced.
        policies: one of `POLICIES` for each layer that `autopar.passes.layers.find.find` sees; none at all changes
            nothing.

    Raises:
        ArgumentError: an unknown policy, or another number of layers.
    """
    return graph if all(p == NONE for p in policies) else _rewritten(graph, tuple(policies))


@lru_cache(maxsize=4)  # asked again for every mesh, and by the search for stages
def _rewritten(graph: Graph, policies: tuple[str, ...]) -> Graph:
    found = _program(graph).layers
    if len(policies) != len(found.layers) or any(p not in POLICIES for p in policies):
        raise ArgumentError(
            f"remat={policies!r:.60} must be {len(found.layers)} of {', '.join(map(repr, POLICIES))}, "
            "one for each layer"
        )
    draft = _Draft(_program(graph))
    for i, policy in enumerate(policies):
        if policy != NONE:
            (_scan if _is_scan(found, i) else _unrolled)(draft, i, policy)
    return draft.graph()


def recomputable(graph: Graph) -> tuple[bool, ...]:
    """For each layer whether recomputing it frees anything. Not the last: its backward pass begins at once."""
    program = _program(graph)
    found = program.layers
    last = len(found.layers) - 1

    def frees(layer: int) -> bool:
        if layer == last and found.layers[layer].trips == 1:
            return False
        if _is_scan(found, layer):
            return _loop_back(_Draft(program), layer, FULL) is not None
        return bool(program.residuals(layer, FULL).read)

    return tuple(map(frees, range(len(found.layers))))


@dataclass(frozen=True)
class Rematerialised:
    """What rematerialising one layer changes.

    Attributes:
        recomputed: indices of the operations that the backward pass runs again, those inside regions included.
        dropped: values of the layer that no longer wait for the backward pass.
        saved: results of the layer's products that the recomputation starts from.
    """

    recomputed: frozenset[int]
    dropped: frozenset[int]
    saved: frozenset[int]


def rematerialised(graph: Graph, policy: str) -> tuple[Rematerialised | None, ...]:
    """For each layer what this policy changes in it; None for a loop over layers."""
    program = _program(graph)
    found = program.layers
    return tuple(None if _is_scan(found, i) else _changed(program, i, policy) for i in range(len(found.layers)))


def _changed(program: _Program, layer: int, policy: str) -> Rematerialised:
    values, ops = program.residuals(layer, policy), program.layers.ops(layer)
    again = _needed(ops, values.read, values.kept)
    starts = {v for op in again for v in _values(op.inputs)}
    products = {v for op in ops if op.name in PRODUCTS for v in op.outputs}
    recomputed = frozenset(inner.index for op in again for inner in op.walk())
    return Rematerialised(recomputed, values.dropped, values.kept & products & starts)


def _is_scan(found: Layers, layer: int) -> bool:
    ops = found.ops(layer)
    return len(ops) == 1 and ops[0].name == "scan"


# The program as written


class _Residuals(NamedTuple):
    """A layer's values under one policy.

    Attributes:
        kept: those that stay in memory.
        dropped: the others.
        read: those of the others that the backward pass of the layer reads, ascending.
    """

    kept: frozenset[int]
    dropped: frozenset[int]
    read: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Program:
    """A program with what every rewriting of it asks for. Positions are those of its operations."""

    graph: Graph
    layers: Layers
    known: dict[tuple[int, str], _Residuals] = field(default_factory=dict)  # by layer and policy

    @cached_property
    def readers(self) -> Mapping[int, Sequence[int]]:
        """Value -> positions of the operations that read it; len(ops) is the caller."""
        found: dict[int, list[int]] = {}
        for position, op in enumerate(self.graph.ops):
            for v in _values(op.inputs):
                found.setdefault(v, []).append(position)
        for v in _values(self.graph.outputs):
            found.setdefault(v, []).append(len(self.graph.ops))
        return found

    @cached_property
    def made(self) -> Mapping[int, int]:
        """Value -> position of the operation that makes it; arguments are not listed."""
        return {v: position for position, op in enumerate(self.graph.ops) for v in op.outputs}

    @cached_property
    def constant(self) -> frozenset[int]:
        """Values that depend on no argument."""
        return _constants(self.graph.ops, [v for v, _ in self.graph.constants])

    @cached_property
    def avals(self) -> Mapping[int, object]:
        """JAX's types of all values that top-level operations read."""
        return {
            a: variable.aval
            for op in self.graph.ops
            for a, variable in zip(op.inputs, op.equation.invars, strict=True)
            if isinstance(a, int)
        }

    @cached_property
    def backward(self) -> Mapping[int, Sequence[int]]:
        """Layer -> positions of its backward operations, in order; the user's own rematerialisation is not listed."""
        found: dict[int, list[int]] = {}
        for position, layer in self.layers.backward.items():
            if not _is_users(self.graph.ops[position]):
                found.setdefault(layer, []).append(position)
        return found

    @cached_property
    def handed_out(self) -> frozenset[int]:
        """Values that the backward pass makes and does nothing more with but lay them out: gradients of parameters."""
        found: set[int] = set()
        for position in range(len(self.graph.ops) - 1, -1, -1):
            if self.phase(position) == "backward":
                outputs = self.graph.ops[position].outputs
                found.update(v for v in outputs if all(self._hands_out(q, found) for q in self.readers.get(v, ())))
        return frozenset(found)

    def _hands_out(self, position: int, found: Set[int]) -> bool:
        """Whether a reader is no part of the backward pass, or one that lays out what is handed out."""
        if self.phase(position) != "backward":
            return True
        op = self.graph.ops[position]
        return op.name in layers_pass.RELAYOUTS and found >= {*op.outputs}

    @cached_property
    def last_signature(self) -> int:
        """The largest that an operation has."""
        return max(op.signature for op in self.graph.walk())

    def residuals(self, layer: int, policy: str) -> _Residuals:
        """What a layer keeps under a policy."""
        if (layer, policy) not in self.known:
            ops = self.layers.ops(layer)
            own = frozenset(v for op in ops for v in op.outputs)
            kept = frozenset(v for op in ops for v in op.outputs if _is_kept(self, op, v, own, policy))
            read = (v for v in sorted(own - kept) if self._is_read_backward(v))
            self.known[layer, policy] = _Residuals(kept, own - kept, tuple(read))
        return self.known[layer, policy]

    def _is_read_backward(self, value: int) -> bool:
        return any(self.phase(q) == "backward" for q in self.readers.get(value, ()))

    def phase(self, position: int) -> str:
        """Of the operation at a position."""
        return self.graph.ops[position].phase if position < len(self.graph.ops) else "result"


@lru_cache(maxsize=4)  # asked again for every choice of what to recompute
def _program(graph: Graph) -> _Program:
    return _Program(graph, layers_pass.find(graph))


# The growing program


@dataclass(eq=False)
class _Draft:
    """A program under change; local to one `rewrite`. Positions are those of the original's operations."""

    program: _Program
    types: list[Type] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    before: dict[int, list[Op]] = field(default_factory=dict)  # position -> what is inserted there
    dropped: dict[int, int] = field(default_factory=dict)  # residual -> its clone
    barred: dict[int, dict[int, int]] = field(default_factory=dict)  # position -> value -> what stands behind a barrier

    def __post_init__(self) -> None:
        self.original, self.layers = self.program.graph, self.program.layers
        self.types = list(self.original.types)
        self.ops = list(self.original.ops)
        self._fresh = count(1 + self.program.last_signature)
        self._signatures: dict[object, int] = {}

    def value(self, type_: Type) -> int:
        self.types.append(type_)
        return len(self.types) - 1

    def signature(self, *key: object) -> int:
        """A number that no operation of the original has; equal keys share it."""
        if key not in self._signatures:
            self._signatures[key] = next(self._fresh)
        return self._signatures[key]

    def graph(self) -> Graph:
        """The program so far: reads replaced, dead operations left out, numbered anew."""
        ops: list[Op] = []
        for position, op in enumerate(self.ops):
            ops.extend(self.before.get(position, ()))
            ops.append(_reading(op, self._reads(position)))
        alive = _alive(ops, self.original.outputs)
        return replace(self.original, types=tuple(self.types), ops=numbered(alive, count()))

    def _reads(self, position: int) -> Mapping[int, int]:
        """What the operation at a position reads in place of what it read in the original."""
        if self.program.phase(position) != "backward":
            return {}
        barred = self.barred.get(position, {})
        read = _values(self.ops[position].inputs)
        return {v: self.dropped.get(v, barred.get(v, v)) for v in read if v in self.dropped or v in barred}


def _values(atoms: Iterable[Atom]) -> list[int]:
    return list(dict.fromkeys(a for a in atoms if isinstance(a, int)))


def _constants(ops: Sequence[Op], start: Iterable[int]) -> frozenset[int]:
    """Values that depend on constants alone."""
    found = set(start)
    for op in ops:
        if not op.equation.effects and all(v in found for v in _values(op.inputs)):
            found.update(op.outputs)
    return frozenset(found)


def _reading(op: Op, names: Mapping[int, int]) -> Op:
    """An operation that reads other values."""
    if not any(a in names for a in op.inputs if isinstance(a, int)):
        return op
    return replace(op, inputs=_renamed(op.inputs, names))


def _renamed(atoms: Sequence[Atom], names: Mapping[int, int]) -> tuple[Atom, ...]:
    return tuple(names.get(a, a) if isinstance(a, int) else a for a in atoms)


def _alive(ops: Sequence[Op], outputs: Iterable[Atom]) -> tuple[Op, ...]:
    """Operations that results or side effects need."""
    needed = set(_values(outputs))
    kept: list[Op] = []
    for op in reversed(ops):
        if op.equation.effects or any(v in needed for v in op.outputs):
            needed.update(_values(op.inputs))
            kept.append(op)
    return tuple(reversed(kept))


# Clones


def _needed(ops: Sequence[Op], wanted: Iterable[int], available: Set[int]) -> tuple[Op, ...]:
    """The operations that make some values from what is available, in order."""
    missing = {v for v in wanted if v not in available}
    found: list[Op] = []
    for op in reversed(ops):
        if not missing.isdisjoint(op.outputs):
            found.append(op)
            missing.update(v for v in _values(op.inputs) if v not in available)
    return tuple(reversed(found))


def _cloned(draft: _Draft, ops: Sequence[Op], names: dict[int, int]) -> tuple[Op, ...]:
    """Copies of operations on renamed values, part of the backward pass; `names` learns what they define."""
    found: list[Op] = []
    for op in ops:
        inputs = _renamed(op.inputs, names)
        regions = tuple(_cloned_region(draft, r, names) for r in op.regions)
        names.update((v, draft.value(draft.types[v])) for v in op.outputs)
        outputs = tuple(names[v] for v in op.outputs)
        stack = jax_compat.rematted(op.name_stack)
        found.append(replace(op, inputs=inputs, outputs=outputs, regions=regions, phase="backward", name_stack=stack))
    return tuple(found)


def _cloned_region(draft: _Draft, region: Region, outer: Mapping[int, int]) -> Region:
    names = dict(outer)
    names.update((v, draft.value(draft.types[v])) for v in (*region.inputs, *(c for c, _ in region.constants)))
    inputs = tuple(names[v] for v in region.inputs)
    constants = tuple((names[v], array) for v, array in region.constants)
    ops = _cloned(draft, region.ops, names)
    return Region(region.name, inputs, ops, _renamed(region.outputs, names), constants)


def _irreproducible(ops: Sequence[Op]) -> frozenset[int]:
    """Values that a side effect has a part in."""
    found: set[int] = set()
    for op in ops:
        if op.equation.effects or not found.isdisjoint(_values(op.inputs)):
            found.update(op.outputs)
    return frozenset(found)


# Unrolled layers


def _unrolled(draft: _Draft, layer: int, policy: str) -> None:
    """Recompute a layer's dropped residuals in its backward pass, a part behind each product."""
    kept, dropped, residuals = draft.program.residuals(layer, policy)
    if not residuals:
        return
    backward = draft.program.backward.get(layer, ())
    apart = _by_reader(draft, _connected(_needed(draft.layers.ops(layer), residuals, kept)), set(residuals))
    parts: dict[int, list[Op]] = {min(backward): []}  # backward operation -> what is recomputed in front of it
    for first, part in sorted(apart.items()):
        last = max(parts)
        parts.setdefault(last if parts[last] and not _waits(draft, last, first) else first, []).extend(part)
    for first, end in zip(parts, [*list(parts)[1:], len(draft.ops)], strict=True):
        group = [q for q in backward if first <= q < end]
        _again(draft, group, first, sorted(parts[first], key=lambda op: op.index), dropped, residuals)


def _waits(draft: _Draft, last: int, first: int) -> bool:
    """Whether an operation reads what is made from a product that runs at another operation or after it."""
    late: set[int] = set()
    for op in draft.original.ops[last:first]:
        if op.name in PRODUCTS or not late.isdisjoint(_values(op.inputs)):
            late.update(op.outputs)
    return not late.isdisjoint(_values(draft.original.ops[first].inputs))


def _by_reader(draft: _Draft, parts: Sequence[Sequence[Op]], residuals: Set[int]) -> Mapping[int, list[Op]]:
    """Parts by the first backward operation that reads a residual of theirs."""
    found: dict[int, list[Op]] = {}
    for part in parts:
        made = [v for op in part for v in op.outputs if v in residuals]
        readers = [q for v in made for q in draft.program.readers[v] if draft.program.phase(q) == "backward"]
        found.setdefault(min(readers), []).extend(part)
    return found


def _again(
    draft: _Draft, group: Sequence[int], first: int, again: Sequence[Op], gone: Set[int], residuals: Sequence[int]
) -> None:
    """Recompute residuals in front of the first of a group of backward operations, behind a barrier."""
    mine = {v for op in again for v in op.outputs}
    outside = [v for op in again for v in _values(op.inputs) if v not in mine]
    outside += _read_from_outside(draft, group, first)
    program = draft.program
    held = [v for v in dict.fromkeys(outside) if v not in program.constant and v not in gone and v in program.avals]
    if not again and all(v in program.made and program.phase(program.made[v]) == "backward" for v in held):
        return  # gradients alone
    barrier = _barrier(draft, held, first)
    behind = dict(zip(held, barrier.outputs, strict=True))
    names = dict(behind)
    clones = _cloned(draft, again, names)
    draft.dropped.update((v, names[v]) for v in residuals if v in mine)
    for q in group:
        draft.barred.setdefault(q, {}).update(behind)
    draft.before[first] = [barrier, *clones, *draft.before.get(first, ())]


def _connected(ops: Sequence[Op]) -> Sequence[Sequence[Op]]:
    """Operations that share no value made by one of them are in different parts."""
    joined: UnionFind[int] = UnionFind(range(len(ops)))
    maker: dict[int, int] = {}
    for i, op in enumerate(ops):
        for v in _values(op.inputs):
            if v in maker:
                joined.union(maker[v], i)
        maker.update(dict.fromkeys(op.outputs, i))
    parts: dict[int, list[Op]] = {}
    for i, op in enumerate(ops):
        parts.setdefault(joined[i], []).append(op)
    return tuple(parts.values())


def _is_kept(program: _Program, op: Op, value: int, own: Set[int], policy: str) -> bool:
    """A value of a layer stays in memory.

    That is where it depends on no argument, where others than the layer's own passes read it, or by the policy.
    """
    if value in program.constant or op.equation.effects or (policy == DOTS and op.name in PRODUCTS):
        return True
    for q in program.readers.get(value, ()):
        phase = program.phase(q)
        inside = phase == "forward" and not own.isdisjoint(program.graph.ops[q].outputs)
        if not inside and (phase != "backward" or _is_users(program.graph.ops[q])):
            return True
    return False


def _is_users(op: Op) -> bool:
    """The user's own rematerialisation."""
    return op.name in jax_compat.REMAT


def _read_from_outside(draft: _Draft, group: Sequence[int], first: int) -> list[int]:
    """What a layer's backward operations read that is there before them and that no layer drops.

    Of gradients only those that the layer's own are made from: what is merely added to them (of weights that layers
    share, say) need not wait. Nor need those of parameters, which in microbatches are sums over all of these.
    """
    own = {v for q in group for v in draft.original.ops[q].outputs}
    found: list[int] = []
    for q in group:
        read = _values(draft.original.ops[q].inputs)
        enters = own.isdisjoint(read)
        for v in read:
            made = draft.program.made.get(v, -1)
            gradient = made >= 0 and draft.program.phase(made) == "backward"
            waits = enters and v not in draft.program.handed_out
            if made < first and v not in draft.dropped and (waits or not gradient):
                found.append(v)
    return found


def _barrier(draft: _Draft, held: Sequence[int], position: int) -> Op:
    types = tuple(draft.types[v] for v in held)
    reader = draft.ops[position]
    return Op(
        index=-1,
        name=layers_pass.BARRIER,
        signature=draft.signature(layers_pass.BARRIER, types),
        inputs=tuple(held),
        outputs=tuple(draft.value(t) for t in types),
        equation=jax_compat.barrier_equation([draft.program.avals[v] for v in held], reader.equation.source_info),
        name_stack=jax_compat.rematted(reader.name_stack),
        phase="backward",
        source=reader.source,
    )


# Loops


def _scan(draft: _Draft, layer: int, policy: str) -> None:
    """Recompute the residuals of a loop over layers in the body of the loop that goes back."""
    found = _loop_back(draft, layer, policy)
    if found is not None:
        position, (q, gone) = _position(draft, layer), found
        there, back = _Loop.of(draft.ops[position]), _Loop.of(draft.ops[q])
        draft.ops[position], draft.ops[q] = _recomputing(draft, there, back, gone, policy)


def _loop_back(draft: _Draft, layer: int, policy: str) -> tuple[int, Sequence[int]] | None:
    """Position of the loop that goes back, and which stacked results its body can recompute; None if none."""
    there = _Loop.of(draft.ops[_position(draft, layer)])
    for q in dict.fromkeys(q for v in there.stacked for q in draft.program.readers.get(v, ())):
        if draft.program.phase(q) != "backward" or draft.ops[q].name != "scan" or draft.ops[q].trips != there.op.trips:
            continue
        back = _Loop.of(draft.ops[q])
        gone = [j for j in range(len(there.stacked)) if _is_droppable(draft, there, j, back, q, policy)]
        if gone:
            return q, gone
    return None


def _position(draft: _Draft, layer: int) -> int:
    """Of a layer's first operation."""
    return draft.layers.forward[draft.layers.layers[layer].start]


@dataclass(frozen=True, eq=False)
class _Loop:
    """A scan by the parts of its operands: constants, carries, stacked operands."""

    op: Op
    constants: int
    carries: int

    @staticmethod
    def of(op: Op) -> _Loop:
        return _Loop(op, *jax_compat.scan_counts(op.params))

    @property
    def body(self) -> Region:
        return self.op.regions[0]

    @property
    def first(self) -> int:
        """Position of the first stacked operand."""
        return self.constants + self.carries

    @property
    def stacked(self) -> tuple[int, ...]:
        """The stacked results."""
        return self.op.outputs[self.carries :]

    @property
    def leaving(self) -> tuple[Atom, ...]:
        """What the body adds to the stacked results."""
        return self.body.outputs[self.carries :]


def _is_droppable(draft: _Draft, there: _Loop, result: int, back: _Loop, position: int, policy: str) -> bool:
    """A stacked result that only the loop back reads, slice by slice, and that its body can recompute."""
    atom, stack = there.leaving[result], there.stacked[result]
    maker = next((op for op in there.body.ops if atom in op.outputs), None)
    if maker is None or atom in _irreproducible(there.body.ops) or (policy == DOTS and maker.name in PRODUCTS):
        return False
    places = [k for k, a in enumerate(back.op.inputs) if a == stack]
    if list(draft.program.readers[stack]) != [position] or min(places) < back.first:
        return False
    inner = {back.body.inputs[k] for k in places}
    return not any(_is_users(op) and not inner.isdisjoint(_values(op.inputs)) for op in back.body.ops)


def _recomputing(draft: _Draft, there: _Loop, back: _Loop, gone: Sequence[int], policy: str) -> tuple[Op, Op]:
    """Both loops, with these stacked results recomputed in the body of the loop back."""
    kept = [j for j in range(len(there.leaving)) if j not in gone]
    enters = _Entering(draft, there, back, {there.leaving[j]: there.stacked[j] for j in reversed(kept)})
    saved = {v for op in there.body.ops if policy == DOTS and op.name in PRODUCTS for v in op.outputs}
    available = saved | {v for v in enters.stack_of if isinstance(v, int)}
    again = _needed(there.body.ops, _values(there.leaving[j] for j in gone), available)
    mine = {v for op in again for v in op.outputs}
    outside = dict.fromkeys(v for op in again for v in _values(op.inputs) if v not in mine)
    names = {v: enters.name(v) for v in outside}
    clones = _cloned(draft, again, names)
    again_of = {there.stacked[j]: names[v] for j in gone if isinstance(v := there.leaving[j], int)}
    return _shorter(draft, there, kept, enters), _longer(draft, back, again_of, clones, enters)


@dataclass(eq=False)
class _Entering:
    """What the body of the loop back gets beside what it has, to recompute values of the loop there.

    Attributes:
        stack_of: value of the body there -> the stacked result that keeps it.
        constants, slices: operands that the loop back gets, with the value of its body that each becomes.
        arrays: constants that its body gets.
        carried: values of the body there that are stacked now, with the result.
    """

    draft: _Draft
    there: _Loop
    back: _Loop
    stack_of: dict[Atom, int]
    constants: list[tuple[Atom, int]] = field(default_factory=list)
    slices: list[tuple[Atom, int]] = field(default_factory=list)
    arrays: list[tuple[int, object]] = field(default_factory=list)
    carried: list[tuple[int, int]] = field(default_factory=list)

    def name(self, value: int) -> int:
        """The value of the body back that equals a value of the body there."""
        there, back = self.there, self.back
        array = dict(there.body.constants).get(value)
        if array is not None:
            self.arrays.append((self.draft.value(self.draft.types[value]), array))
            return self.arrays[-1][0]
        place = there.body.inputs.index(value) if value in there.body.inputs else None
        if place is not None and place < there.constants:
            return self._entered(there.op.inputs[place], range(back.constants), value, self.constants)
        sliced = place is not None and place >= there.first
        operand = there.op.inputs[place] if sliced and place is not None else self._stack(value)
        return self._entered(operand, range(back.first, len(back.op.inputs)), value, self.slices)

    def _stack(self, value: int) -> int:
        """The stacked result that keeps a value of the body there."""
        if value not in self.stack_of:
            type_ = self.draft.types[value]
            stack = self.draft.value(replace(type_, shape=(self.there.op.params["length"], *type_.shape)))
            self.stack_of[value] = stack
            self.carried.append((value, stack))
        return self.stack_of[value]

    def _entered(self, operand: Atom, places: range, value: int, added: list[tuple[Atom, int]]) -> int:
        """The body's value for an operand: that of one of these places, or a new one."""
        known = [(self.back.op.inputs[k], self.back.body.inputs[k]) for k in places]
        for other, inner in (*known, *added):
            if other is operand or (isinstance(operand, int) and other == operand):
                return inner
        added.append((operand, self.draft.value(self.draft.types[value])))
        return added[-1][1]


def _shorter(draft: _Draft, there: _Loop, kept: Sequence[int], enters: _Entering) -> Op:
    """The loop there: without the stacked results that are gone, with carries that its iterations start from."""
    outputs = (*there.op.outputs[: there.carries], *(there.stacked[j] for j in kept), *(s for _, s in enters.carried))
    leaving: tuple[Atom, ...] = (
        *there.body.outputs[: there.carries],
        *(there.leaving[j] for j in kept),
        *(v for v, _ in enters.carried),
    )
    body = replace(there.body, ops=_alive(there.body.ops, leaving), outputs=leaving)
    return replace(there.op, outputs=outputs, regions=(body,), signature=draft.signature(there.op.index))


def _longer(draft: _Draft, back: _Loop, again: Mapping[int, int], clones: Sequence[Op], enters: _Entering) -> Op:
    """The loop back: clones first, then what it did, reading them instead of slices of stacked results."""
    gone = {k: again[a] for k, a in enumerate(back.op.inputs) if k >= back.first and isinstance(a, int) and a in again}
    names = {back.body.inputs[k]: clone for k, clone in gone.items()}
    slices = [k for k in range(back.first, len(back.op.inputs)) if k not in gone]

    def joined(own: Sequence[Atom], added: int) -> tuple[Atom, ...]:
        constants, stacked = (tuple(pair[added] for pair in pairs) for pairs in (enters.constants, enters.slices))
        middle = own[back.constants : back.first]
        return (*own[: back.constants], *constants, *middle, *(own[k] for k in slices), *stacked)

    ops = (*clones, *(_reading(op, names) for op in back.body.ops))
    body = Region(
        back.body.name,
        tuple(_values(joined(back.body.inputs, 1))),
        ops,
        _renamed(back.body.outputs, names),
        (*back.body.constants, *enters.arrays),
    )
    equation = jax_compat.scan_equation(back.op.equation, back.constants + len(enters.constants), back.carries)
    inputs = joined(back.op.inputs, 0)
    return replace(back.op, inputs=inputs, regions=(body,), equation=equation, signature=draft.signature(back.op.index))
