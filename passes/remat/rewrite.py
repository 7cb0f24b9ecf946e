"""Rematerialisation: the backward pass of a layer recomputes residuals that the forward pass then does not keep.

    none    keeps all residuals of a layer
    dots    keeps results of products and recomputes other residuals from them (elementwise work only)
    full    keeps values that enter the layer and recomputes all others (Chen et al., 2016, "Training deep nets with
            sublinear memory cost")

A *residual* of a layer is a value of its forward operations that backward operations read. It is *dropped* unless it
leaves the layer (a later layer, the update or the caller reads it), the policy keeps it, or a side effect produced it.
Dropped residuals that can be computed from kept values independently of each other are recomputed in several parts if
a product of the backward pass runs in between on whose result the later part can wait: that result is in memory anyway.
Just before the first backward operation that reads one of them, the new program has

    an optimization barrier with all operands of the recomputation, and of backward operations up to the next barrier:
    values that enter the layer, parameters, cotangents. So the recomputation waits for the cotangent, and the compiler
    does not merge it with the forward pass, as in the lowering of `jax.checkpoint`                  -> _barrier
    clones of the forward operations that compute the dropped residuals, in order                    -> _clone

and the backward operations read the clones. A forward scan no longer stacks dropped residuals; it stacks the carries
that enter its iterations instead, and the body of the backward scan recomputes the residuals. That needs no barrier, as
compilers do not merge loops                                                                -> _recompute_in_loop

Operations inside the user's own `jax.checkpoint` stay as they are: values that they read are kept. Clones are equal
operations on equal keys, so that random numbers are bitwise equal; operations with side effects are never cloned.
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
from autopar.ir.graph import Atom, Copier, Graph, Op, Region, Type, numbered, renamed
from autopar.ir.op_sets import PRODUCTS
from autopar.passes.layers import find as layers_pass
from autopar.passes.layers.find import Layers

NONE, DOTS, FULL = "none", "dots", "full"
POLICIES: tuple[str, ...] = (NONE, DOTS, FULL)


def rewrite(graph: Graph, policies: Sequence[str]) -> Graph:
    """The same program with layers rematerialised in the backward pass.

    Args:
        graph: the program as traced.
        policies: one of `POLICIES` for each layer of `autopar.passes.layers.find.find`; empty: nothing changes.

    Raises:
        ArgumentError: an unknown policy, or another number of layers.
    """
    return graph if all(p == NONE for p in policies) else _rewritten(graph, tuple(policies))


@lru_cache(maxsize=4)  # called again for every mesh, and by the inter-operator search
def _rewritten(graph: Graph, policies: tuple[str, ...]) -> Graph:
    layers = _program(graph).layers
    if len(policies) != len(layers.layers) or any(p not in POLICIES for p in policies):
        raise ArgumentError(
            f"remat={policies!r:.60} must be {len(layers.layers)} of {', '.join(map(repr, POLICIES))}, "
            "one for each layer"
        )
    builder = _Builder(_program(graph))
    for i, policy in enumerate(policies):
        if policy != NONE:
            (_recompute_in_loop if _is_scan(layers, i) else _recompute_unrolled)(builder, i, policy)
    return builder.graph()


def recomputable(graph: Graph) -> tuple[bool, ...]:
    """For each layer whether rematerialising it frees memory; not the last, whose backward pass begins at once."""
    program = _program(graph)
    layers = program.layers
    last = len(layers.layers) - 1

    def frees(layer: int) -> bool:
        if layer == last and layers.layers[layer].trips == 1:
            return False
        if _is_scan(layers, layer):
            return _backward_loop(_Builder(program), layer, FULL) is not None
        return bool(program.residuals(layer, FULL).read)

    return tuple(map(frees, range(len(layers.layers))))


@dataclass(frozen=True)
class Rematerialised:
    """Changes by rematerialising one layer.

    Attributes:
        recomputed: indices of the operations that the backward pass runs again, with those inside regions.
        dropped: values of the layer that are no longer kept for the backward pass.
        saved: results of the layer's products from which the recomputation starts.
    """

    recomputed: frozenset[int]
    dropped: frozenset[int]
    saved: frozenset[int]


def rematerialised(graph: Graph, policy: str) -> tuple[Rematerialised | None, ...]:
    """For each layer the changes by this policy; None for a loop over layers."""
    program = _program(graph)
    layers = program.layers
    return tuple(None if _is_scan(layers, i) else _change(program, i, policy) for i in range(len(layers.layers)))


def _change(program: _Program, layer: int, policy: str) -> Rematerialised:
    residuals, ops = program.residuals(layer, policy), program.layers.ops(layer)
    recomputed_ops = _ops_for(ops, residuals.read, residuals.kept)
    operands = {v for op in recomputed_ops for v in _values(op.inputs)}
    products = {v for op in ops if op.name in PRODUCTS for v in op.outputs}
    indices = frozenset(inner.index for op in recomputed_ops for inner in op.walk())
    return Rematerialised(indices, residuals.dropped, residuals.kept & products & operands)


def _is_scan(layers: Layers, layer: int) -> bool:
    ops = layers.ops(layer)
    return len(ops) == 1 and ops[0].name == "scan"


# The program as written


class _Residuals(NamedTuple):
    """A layer's values under one policy.

    Attributes:
        kept: values that stay in memory.
        dropped: other values.
        read: dropped values that the backward pass of the layer reads, ascending.
    """

    kept: frozenset[int]
    dropped: frozenset[int]
    read: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Program:
    """A program with facts that all its rewritings need. Positions are those of its operations."""

    graph: Graph
    layers: Layers
    cache: dict[tuple[int, str], _Residuals] = field(default_factory=dict)  # by layer and policy

    @cached_property
    def readers(self) -> Mapping[int, Sequence[int]]:
        """Value -> positions of the operations that read it; len(ops) is the caller."""
        readers: dict[int, list[int]] = {}
        for position, op in enumerate(self.graph.ops):
            for v in _values(op.inputs):
                readers.setdefault(v, []).append(position)
        for v in _values(self.graph.outputs):
            readers.setdefault(v, []).append(len(self.graph.ops))
        return readers

    @cached_property
    def producer(self) -> Mapping[int, int]:
        """Value -> position of the operation that produces it, without arguments."""
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
        """Layer -> positions of its backward operations, in order, without the user's own rematerialisation."""
        by_layer: dict[int, list[int]] = {}
        for position, layer in self.layers.backward.items():
            if not _is_user_remat(self.graph.ops[position]):
                by_layer.setdefault(layer, []).append(position)
        return by_layer

    @cached_property
    def returned_gradients(self) -> frozenset[int]:
        """Gradients of parameters: values that the backward pass produces and only changes in layout from then on."""
        returned: set[int] = set()
        for position in reversed(range(len(self.graph.ops))):
            for v in self.graph.ops[position].outputs if self.phase(position) == "backward" else ():
                if all(self._is_returned(q, returned) for q in self.readers.get(v, ())):
                    returned.add(v)
        return frozenset(returned)

    def _is_returned(self, position: int, returned: Set[int]) -> bool:
        """Whether a reader is outside the backward pass, or changes the layout of a returned gradient."""
        if self.phase(position) != "backward":
            return True
        op = self.graph.ops[position]
        return op.name in layers_pass.RELAYOUTS and returned >= {*op.outputs}

    @cached_property
    def last_signature(self) -> int:
        """The largest signature of an operation."""
        return max(op.signature for op in self.graph.walk())

    def residuals(self, layer: int, policy: str) -> _Residuals:
        """Values of a layer that are kept and dropped under a policy."""
        if (layer, policy) not in self.cache:
            ops = self.layers.ops(layer)
            layer_values = frozenset(v for op in ops for v in op.outputs)
            kept = frozenset(v for op in ops for v in op.outputs if _is_kept(self, op, v, layer_values, policy))
            read = (v for v in sorted(layer_values - kept) if self._is_read_backward(v))
            self.cache[layer, policy] = _Residuals(kept, layer_values - kept, tuple(read))
        return self.cache[layer, policy]

    def _is_read_backward(self, value: int) -> bool:
        return any(self.phase(q) == "backward" for q in self.readers.get(value, ()))

    def phase(self, position: int) -> str:
        """Phase of the operation at a position."""
        return self.graph.ops[position].phase if position < len(self.graph.ops) else "result"


@lru_cache(maxsize=4)  # called again for every choice of policies
def _program(graph: Graph) -> _Program:
    return _Program(graph, layers_pass.find(graph))


# The new program


@dataclass(eq=False)
class _Builder:
    """Builds the new program in one call of `rewrite`. Positions are those of the original's operations.

    Attributes:
        inserted: position -> operations that are inserted in front of it.
        clone_of: dropped residual -> its clone.
        behind_barrier: position of a reader -> value -> the result of the barrier that it reads instead.
    """

    program: _Program
    types: list[Type] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    inserted: dict[int, list[Op]] = field(default_factory=dict)
    clone_of: dict[int, int] = field(default_factory=dict)
    behind_barrier: dict[int, dict[int, int]] = field(default_factory=dict)

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
        """The program so far: with replaced operands, without dead operations, renumbered."""
        ops: list[Op] = []
        for position, op in enumerate(self.ops):
            ops.extend(self.inserted.get(position, ()))
            ops.append(_with_operands(op, self._replacements(position)))
        live = _live_ops(ops, self.original.outputs)
        return replace(self.original, types=tuple(self.types), ops=numbered(live, count()))

    def _replacements(self, position: int) -> Mapping[int, int]:
        """Operand of the operation at a position in the original -> the value that it reads instead."""
        if self.program.phase(position) != "backward":
            return {}
        behind_barrier = self.behind_barrier.get(position, {})
        operands = _values(self.ops[position].inputs)
        return {
            v: self.clone_of.get(v, behind_barrier.get(v, v))
            for v in operands
            if v in self.clone_of or v in behind_barrier
        }


def _values(atoms: Iterable[Atom]) -> list[int]:
    return list(dict.fromkeys(a for a in atoms if isinstance(a, int)))


def _constants(ops: Sequence[Op], start: Iterable[int]) -> frozenset[int]:
    """Values that depend on constants alone."""
    constants = set(start)
    for op in ops:
        if not op.equation.effects and all(v in constants for v in _values(op.inputs)):
            constants.update(op.outputs)
    return frozenset(constants)


def _with_operands(op: Op, names: Mapping[int, int]) -> Op:
    """The operation on other values."""
    if not any(a in names for a in op.inputs if isinstance(a, int)):
        return op
    return replace(op, inputs=renamed(op.inputs, names))


def _live_ops(ops: Sequence[Op], outputs: Iterable[Atom]) -> tuple[Op, ...]:
    """Operations that results or side effects need."""
    needed = set(_values(outputs))
    live: list[Op] = []
    for op in reversed(ops):
        if op.equation.effects or any(v in needed for v in op.outputs):
            needed.update(_values(op.inputs))
            live.append(op)
    return tuple(reversed(live))


# Clones


def _ops_for(ops: Sequence[Op], values: Iterable[int], available: Set[int]) -> tuple[Op, ...]:
    """The operations that compute some values from available ones, in order."""
    missing = {v for v in values if v not in available}
    needed: list[Op] = []
    for op in reversed(ops):
        if not missing.isdisjoint(op.outputs):
            needed.append(op)
            missing.update(v for v in _values(op.inputs) if v not in available)
    return tuple(reversed(needed))


def _clone(builder: _Builder, ops: Sequence[Op], names: dict[int, int]) -> tuple[Op, ...]:
    """Copies of operations on renamed values, part of the backward pass; adds their results to `names`."""
    return tuple(map(Copier(lambda v: builder.value(builder.types[v]), names, _in_backward).op, ops))


def _in_backward(op: Op) -> Op:
    """The operation as a part of the backward pass that recomputes it."""
    return replace(op, phase="backward", name_stack=jax_compat.rematted(op.name_stack))


def _effect_dependent(ops: Sequence[Op]) -> frozenset[int]:
    """Values that depend on a side effect."""
    values: set[int] = set()
    for op in ops:
        if op.equation.effects or not values.isdisjoint(_values(op.inputs)):
            values.update(op.outputs)
    return frozenset(values)


# Unrolled layers


def _recompute_unrolled(builder: _Builder, layer: int, policy: str) -> None:
    """Recomputes a layer's dropped residuals in its backward pass, in parts after different products."""
    kept, dropped, residuals = builder.program.residuals(layer, policy)
    if not residuals:
        return
    backward = builder.program.backward.get(layer, ())
    components = _components(_ops_for(builder.layers.ops(layer), residuals, kept))
    parts: dict[int, list[Op]] = {min(backward): []}  # backward operation -> operations recomputed in front of it
    for first, part in sorted(_by_reader(builder, components, set(residuals)).items()):
        last = max(parts)
        joins_last = parts[last] and not _depends_on_late_product(builder, last, first)
        parts.setdefault(last if joins_last else first, []).extend(part)
    for first, end in zip(parts, [*list(parts)[1:], len(builder.ops)], strict=True):
        readers = [q for q in backward if first <= q < end]
        _recompute_before(builder, readers, first, sorted(parts[first], key=lambda op: op.index), dropped, residuals)


def _depends_on_late_product(builder: _Builder, last: int, first: int) -> bool:
    """Whether the operation at `first` depends on a product of the operations from `last` on."""
    late_values: set[int] = set()
    for op in builder.original.ops[last:first]:
        if op.name in PRODUCTS or not late_values.isdisjoint(_values(op.inputs)):
            late_values.update(op.outputs)
    return not late_values.isdisjoint(_values(builder.original.ops[first].inputs))


def _by_reader(builder: _Builder, parts: Sequence[Sequence[Op]], residuals: Set[int]) -> Mapping[int, list[Op]]:
    """Position of a backward operation -> parts that have a residual it reads first."""
    by_reader: dict[int, list[Op]] = {}
    for part in parts:
        produced = [v for op in part for v in op.outputs if v in residuals]
        readers = [q for v in produced for q in builder.program.readers[v] if builder.program.phase(q) == "backward"]
        by_reader.setdefault(min(readers), []).extend(part)
    return by_reader


def _recompute_before(
    builder: _Builder,
    readers: Sequence[int],
    first: int,
    recomputed: Sequence[Op],
    dropped: Set[int],
    residuals: Sequence[int],
) -> None:
    """Recomputes residuals in front of the first of some backward operations, behind a barrier."""
    own = {v for op in recomputed for v in op.outputs}
    operands = [v for op in recomputed for v in _values(op.inputs) if v not in own]
    operands += _external_operands(builder, readers, first)
    program = builder.program
    inputs = dict.fromkeys(v for v in operands if v in program.avals)
    barrier_operands = [v for v in inputs if v not in program.constant and v not in dropped]
    producers = [program.producer.get(v) for v in barrier_operands]
    if not recomputed and all(q is not None and program.phase(q) == "backward" for q in producers):
        return  # gradients alone
    barrier = _barrier(builder, barrier_operands, first)
    after_barrier = dict(zip(barrier_operands, barrier.outputs, strict=True))
    names = dict(after_barrier)
    clones = _clone(builder, recomputed, names)
    builder.clone_of.update((v, names[v]) for v in residuals if v in own)
    for q in readers:
        builder.behind_barrier.setdefault(q, {}).update(after_barrier)
    builder.inserted[first] = [barrier, *clones, *builder.inserted.get(first, ())]


def _components(ops: Sequence[Op]) -> Sequence[Sequence[Op]]:
    """Connected components of operations: different ones share no value that one of them computes."""
    components: UnionFind[int] = UnionFind(range(len(ops)))
    producer: dict[int, int] = {}
    for i, op in enumerate(ops):
        for v in _values(op.inputs):
            if v in producer:
                components.union(producer[v], i)
        producer.update(dict.fromkeys(op.outputs, i))
    parts: dict[int, list[Op]] = {}
    for i, op in enumerate(ops):
        parts.setdefault(components[i], []).append(op)
    return tuple(parts.values())


def _is_kept(program: _Program, op: Op, value: int, layer_values: Set[int], policy: str) -> bool:
    """Whether a value of a layer stays in memory.

    It does if it depends on no argument, if operations outside the layer's own passes read it, or by the policy.
    """
    if value in program.constant or op.equation.effects or (policy == DOTS and op.name in PRODUCTS):
        return True
    for q in program.readers.get(value, ()):
        phase = program.phase(q)
        within_layer = phase == "forward" and not layer_values.isdisjoint(program.graph.ops[q].outputs)
        if not within_layer and (phase != "backward" or _is_user_remat(program.graph.ops[q])):
            return True
    return False


def _is_user_remat(op: Op) -> bool:
    """Whether an operation is the user's own rematerialisation."""
    return op.name == jax_compat.REMAT


def _external_operands(builder: _Builder, readers: Sequence[int], first: int) -> list[int]:
    """Operands of a layer's backward operations that are computed before them and that no layer drops.

    Gradients count only if the layer's own gradients are computed from them. Those merely added (gradients of weights
    that layers share, for example) need not wait for the barrier, nor do gradients of parameters, which with
    microbatches are sums over all of them.
    """
    own_results = {v for q in readers for v in builder.original.ops[q].outputs}
    operands: list[int] = []
    for q in readers:
        reads = _values(builder.original.ops[q].inputs)
        starts_here = own_results.isdisjoint(reads)
        for v in reads:
            producer = builder.program.producer.get(v, -1)
            is_gradient = producer >= 0 and builder.program.phase(producer) == "backward"
            must_wait = starts_here and v not in builder.program.returned_gradients
            if producer < first and v not in builder.clone_of and (must_wait or not is_gradient):
                operands.append(v)
    return operands


def _barrier(builder: _Builder, operands: Sequence[int], position: int) -> Op:
    types = tuple(builder.types[v] for v in operands)
    reader = builder.ops[position]
    return Op(
        index=-1,
        name=layers_pass.BARRIER,
        signature=builder.signature(layers_pass.BARRIER, types),
        inputs=tuple(operands),
        outputs=tuple(builder.value(t) for t in types),
        equation=jax_compat.barrier_equation([builder.program.avals[v] for v in operands], reader.equation.source_info),
        name_stack=jax_compat.rematted(reader.name_stack),
        phase="backward",
        source=reader.source,
    )


# Loops


def _recompute_in_loop(builder: _Builder, layer: int, policy: str) -> None:
    """Recomputes the residuals of a loop over layers in the body of the backward loop."""
    loop = _backward_loop(builder, layer, policy)
    if loop is not None:
        position, (q, dropped) = _first_position(builder, layer), loop
        forward, backward = _Loop.of(builder.ops[position]), _Loop.of(builder.ops[q])
        builder.ops[position], builder.ops[q] = _loops_with_recompute(builder, forward, backward, dropped, policy)


def _backward_loop(builder: _Builder, layer: int, policy: str) -> tuple[int, Sequence[int]] | None:
    """Position of the backward loop, and the stacked results that its body can recompute; None if there are none."""
    forward = _Loop.of(builder.ops[_first_position(builder, layer)])
    for q in dict.fromkeys(q for v in forward.stacked for q in builder.program.readers.get(v, ())):
        op = builder.ops[q]
        if builder.program.phase(q) != "backward" or op.name != "scan" or op.trips != forward.op.trips:
            continue
        backward = _Loop.of(op)
        dropped = [j for j in range(len(forward.stacked)) if _is_droppable(builder, forward, j, backward, q, policy)]
        if dropped:
            return q, dropped
    return None


def _first_position(builder: _Builder, layer: int) -> int:
    """Position of a layer's first operation."""
    return builder.layers.forward[builder.layers.layers[layer].start]


@dataclass(frozen=True, eq=False)
class _Loop:
    """A scan with the numbers of its constants and carries; its other operands are stacked."""

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
    def body_results(self) -> tuple[Atom, ...]:
        """Results of the body that are stacked."""
        return self.body.outputs[self.carries :]


def _is_droppable(builder: _Builder, forward: _Loop, result: int, backward: _Loop, position: int, policy: str) -> bool:
    """Whether only the backward loop reads a stacked result, slice by slice, and its body can recompute it."""
    atom, stacked = forward.body_results[result], forward.stacked[result]
    producer = next((op for op in forward.body.ops if atom in op.outputs), None)
    if producer is None or atom in _effect_dependent(forward.body.ops):
        return False
    if policy == DOTS and producer.name in PRODUCTS:
        return False
    operand_positions = [k for k, a in enumerate(backward.op.inputs) if a == stacked]
    if list(builder.program.readers[stacked]) != [position] or min(operand_positions) < backward.first:
        return False
    slices = {backward.body.inputs[k] for k in operand_positions}
    return not any(_is_user_remat(op) and not slices.isdisjoint(_values(op.inputs)) for op in backward.body.ops)


def _loops_with_recompute(
    builder: _Builder, forward: _Loop, backward: _Loop, dropped: Sequence[int], policy: str
) -> tuple[Op, Op]:
    """Both loops, with these stacked results recomputed in the body of the backward loop."""
    kept = [j for j in range(len(forward.body_results)) if j not in dropped]
    stacked_in = {forward.body_results[j]: forward.stacked[j] for j in reversed(kept)}
    operands = _RecomputeOperands(builder, forward, backward, stacked_in)
    saved = {v for op in forward.body.ops if policy == DOTS and op.name in PRODUCTS for v in op.outputs}
    available = saved | {v for v in operands.stacked_in if isinstance(v, int)}
    recomputed = _ops_for(forward.body.ops, _values(forward.body_results[j] for j in dropped), available)
    own = {v for op in recomputed for v in op.outputs}
    external = dict.fromkeys(v for op in recomputed for v in _values(op.inputs) if v not in own)
    names = {v: operands.value_in_backward(v) for v in external}
    clones = _clone(builder, recomputed, names)
    clone_of = {forward.stacked[j]: names[v] for j in dropped if isinstance(v := forward.body_results[j], int)}
    shorter = _forward_loop(builder, forward, kept, operands)
    return shorter, _loop_with_clones(builder, backward, clone_of, clones, operands)


@dataclass(eq=False)
class _RecomputeOperands:
    """Operands that the body of the backward loop gets in addition, to recompute values of the forward loop.

    Attributes:
        stacked_in: value of the forward body -> the stacked result that keeps it.
        constants, slices: operands that the backward loop gets, each with its value in the body.
        arrays: constants that the backward body gets.
        newly_stacked: values of the forward body that are stacked now, each with the stacked result.
    """

    builder: _Builder
    forward: _Loop
    backward: _Loop
    stacked_in: dict[Atom, int]
    constants: list[tuple[Atom, int]] = field(default_factory=list)
    slices: list[tuple[Atom, int]] = field(default_factory=list)
    arrays: list[tuple[int, object]] = field(default_factory=list)
    newly_stacked: list[tuple[int, int]] = field(default_factory=list)

    def value_in_backward(self, value: int) -> int:
        """The value of the backward body that equals a value of the forward body."""
        forward, backward = self.forward, self.backward
        array = dict(forward.body.constants).get(value)
        if array is not None:
            self.arrays.append((self.builder.value(self.builder.types[value]), array))
            return self.arrays[-1][0]
        position = forward.body.inputs.index(value) if value in forward.body.inputs else None
        if position is not None and position < forward.constants:
            return self._body_value(forward.op.inputs[position], range(backward.constants), value, self.constants)
        is_sliced = position is not None and position >= forward.first
        operand = forward.op.inputs[position] if is_sliced and position is not None else self._stacked_result(value)
        return self._body_value(operand, range(backward.first, len(backward.op.inputs)), value, self.slices)

    def _stacked_result(self, value: int) -> int:
        """The stacked result that keeps a value of the forward body."""
        if value not in self.stacked_in:
            type_ = self.builder.types[value]
            stacked = self.builder.value(replace(type_, shape=(self.forward.op.params["length"], *type_.shape)))
            self.stacked_in[value] = stacked
            self.newly_stacked.append((value, stacked))
        return self.stacked_in[value]

    def _body_value(self, operand: Atom, positions: range, value: int, added: list[tuple[Atom, int]]) -> int:
        """The body's value for an operand: that of an equal operand at these positions, or a new one."""
        existing = [(self.backward.op.inputs[k], self.backward.body.inputs[k]) for k in positions]
        for other, inner in (*existing, *added):
            if other is operand or (isinstance(operand, int) and other == operand):
                return inner
        added.append((operand, self.builder.value(self.builder.types[value])))
        return added[-1][1]


def _forward_loop(builder: _Builder, forward: _Loop, kept: Sequence[int], operands: _RecomputeOperands) -> Op:
    """The forward loop: without the dropped stacked results, with the carries that its iterations start from."""
    outputs = (
        *forward.op.outputs[: forward.carries],
        *(forward.stacked[j] for j in kept),
        *(s for _, s in operands.newly_stacked),
    )
    body_outputs: tuple[Atom, ...] = (
        *forward.body.outputs[: forward.carries],
        *(forward.body_results[j] for j in kept),
        *(v for v, _ in operands.newly_stacked),
    )
    body = replace(forward.body, ops=_live_ops(forward.body.ops, body_outputs), outputs=body_outputs)
    return replace(forward.op, outputs=outputs, regions=(body,), signature=builder.signature(forward.op.index))


def _loop_with_clones(
    builder: _Builder, backward: _Loop, clone_of: Mapping[int, int], clones: Sequence[Op], operands: _RecomputeOperands
) -> Op:
    """The backward loop: clones first, then its operations, which read the clones in place of stacked results."""
    clone_at = {
        k: clone_of[a]
        for k, a in enumerate(backward.op.inputs)
        if k >= backward.first and isinstance(a, int) and a in clone_of
    }
    names = {backward.body.inputs[k]: clone for k, clone in clone_at.items()}
    slices = [k for k in range(backward.first, len(backward.op.inputs)) if k not in clone_at]

    def with_added(own: Sequence[Atom], added: int) -> tuple[Atom, ...]:
        constants, stacked = (tuple(pair[added] for pair in pairs) for pairs in (operands.constants, operands.slices))
        middle = own[backward.constants : backward.first]
        return (*own[: backward.constants], *constants, *middle, *(own[k] for k in slices), *stacked)

    ops = (*clones, *(_with_operands(op, names) for op in backward.body.ops))
    body = Region(
        backward.body.name,
        tuple(_values(with_added(backward.body.inputs, 1))),
        ops,
        renamed(backward.body.outputs, names),
        (*backward.body.constants, *operands.arrays),
    )
    equation = jax_compat.scan_equation(
        backward.op.equation, backward.constants + len(operands.constants), backward.carries
    )
    inputs = with_added(backward.op.inputs, 0)
    return replace(
        backward.op, inputs=inputs, regions=(body,), equation=equation, signature=builder.signature(backward.op.index)
    )
