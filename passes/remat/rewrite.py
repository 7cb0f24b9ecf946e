"""Rematerialisation: the backward pass of a layer recomputes residuals that the forward pass then does not keep.

    none    keeps all residuals of a layer
    dots    keeps results of products and recomputes other residuals from them (elementwise work only)
    full    keeps values that enter the layer and recomputes all others (Chen et al., 2016, "Training deep nets with
            sublinear memory cost")

The policy and the readers of a residual decide whether it is dropped (`autopar.passes.remat.residuals`). Dropped
residuals that can be computed from kept values independently of each other are recomputed in several parts if a product
of the backward pass runs in between on whose result the later part can wait: that result is in memory anyway. Just
before the first backward operation that reads one of them, the new program has

    an optimization barrier with all operands of the recomputation, and of backward operations up to the next barrier:
    values that enter the layer, parameters, cotangents. So the recomputation waits for the cotangent, and the compiler
    does not merge it with the forward pass, as in the lowering of `jax.checkpoint`                  -> _barrier
    clones of the forward operations that compute the dropped residuals, in order                    -> clone

and the backward operations read the clones. For a loop over layers see `autopar.passes.remat.loops`.

Operations inside the user's own `jax.checkpoint` stay as they are: values that they read are kept. Clones are equal
operations on equal keys, so that random numbers are bitwise equal; operations with side effects are never cloned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from networkx.utils import UnionFind

from autopar import jax_compat
from autopar.errors import ArgumentError
from autopar.ir.graph import Graph, Op
from autopar.ir.keyed import grouped
from autopar.ir.on_graph import cached_on_graph
from autopar.ir.op_sets import ALL_PRODUCTS
from autopar.passes.layers import find as layers_pass
from autopar.passes.layers.find import Layers
from autopar.passes.remat.builder import Builder, clone, ops_for
from autopar.passes.remat.loops import backward_loop, recompute_in_loop
from autopar.passes.remat.residuals import LayeredProgram, layered, values_of

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


@cached_on_graph
def _rewritten(graph: Graph, policies: tuple[str, ...]) -> Graph:
    layers = layered(graph).layers
    if len(policies) != len(layers.layers) or any(p not in POLICIES for p in policies):
        raise ArgumentError(
            f"remat={policies!r:.60} must be {len(layers.layers)} of {', '.join(map(repr, POLICIES))}, "
            "one for each layer"
        )
    builder = Builder(layered(graph))
    for i, policy in enumerate(policies):
        if policy != NONE:
            (recompute_in_loop if _is_scan(layers, i) else _recompute_unrolled)(builder, i, policy == DOTS)
    return builder.graph()


def recomputable(graph: Graph) -> tuple[bool, ...]:
    """For each layer whether rematerialising it frees memory; not the last, whose backward pass begins at once."""
    program = layered(graph)
    layers = program.layers
    last = len(layers.layers) - 1

    def frees(layer: int) -> bool:
        if layer == last and layers.layers[layer].trips == 1:
            return False
        if _is_scan(layers, layer):
            return backward_loop(Builder(program), layer, False) is not None
        return bool(program.residuals(layer, False).read)

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
    program = layered(graph)
    layers = program.layers
    return tuple(
        None if _is_scan(layers, i) else _change(program, i, policy == DOTS) for i in range(len(layers.layers))
    )


def _change(program: LayeredProgram, layer: int, keeps_products: bool) -> Rematerialised:
    residuals, ops = program.residuals(layer, keeps_products), program.layers.ops(layer)
    recomputed_ops = ops_for(ops, residuals.read, residuals.kept)
    operands = {v for op in recomputed_ops for v in values_of(op.inputs)}
    products = {v for op in ops if op.name in ALL_PRODUCTS for v in op.outputs}
    indices = frozenset(inner.index for op in recomputed_ops for inner in op.walk())
    return Rematerialised(indices, residuals.dropped, residuals.kept & products & operands)


def _is_scan(layers: Layers, layer: int) -> bool:
    ops = layers.ops(layer)
    return len(ops) == 1 and ops[0].name == "scan"


# Unrolled layers


def _recompute_unrolled(builder: Builder, layer: int, keeps_products: bool) -> None:
    """Recomputes a layer's dropped residuals in its backward pass, in parts after different products."""
    kept, dropped, residuals = builder.program.residuals(layer, keeps_products)
    if not residuals:
        return
    backward = builder.program.backward.get(layer, ())
    components = _components(ops_for(builder.layers.ops(layer), residuals, kept))
    parts: dict[int, list[Op]] = {min(backward): []}  # backward operation -> operations recomputed in front of it
    for first, part in sorted(_by_reader(builder, components, set(residuals)).items()):
        last = max(parts)
        joins_last = parts[last] and not _depends_on_late_product(builder, last, first)
        parts.setdefault(last if joins_last else first, []).extend(part)
    for first, end in zip(parts, [*list(parts)[1:], len(builder.ops)], strict=True):
        readers = [q for q in backward if first <= q < end]
        _recompute_before(builder, readers, first, sorted(parts[first], key=lambda op: op.index), dropped, residuals)


def _depends_on_late_product(builder: Builder, last: int, first: int) -> bool:
    """Whether the operation at `first` depends on a product of the operations from `last` on."""
    late_values: set[int] = set()
    for op in builder.original.ops[last:first]:
        if op.name in ALL_PRODUCTS or not late_values.isdisjoint(values_of(op.inputs)):
            late_values.update(op.outputs)
    return not late_values.isdisjoint(values_of(builder.original.ops[first].inputs))


def _by_reader(builder: Builder, parts: Sequence[Sequence[Op]], residuals: Set[int]) -> Mapping[int, list[Op]]:
    """Position of a backward operation -> parts that have a residual it reads first."""
    by_reader: dict[int, list[Op]] = {}
    for part in parts:
        produced = [v for op in part for v in op.outputs if v in residuals]
        readers = [q for v in produced for q in builder.program.readers[v] if builder.program.phase(q) == "backward"]
        by_reader.setdefault(min(readers), []).extend(part)
    return by_reader


def _recompute_before(
    builder: Builder,
    readers: Sequence[int],
    first: int,
    recomputed: Sequence[Op],
    dropped: Set[int],
    residuals: Sequence[int],
) -> None:
    """Recomputes residuals in front of the first of some backward operations, behind a barrier."""
    own = {v for op in recomputed for v in op.outputs}
    operands = [v for op in recomputed for v in values_of(op.inputs) if v not in own]
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
    clones = clone(builder, recomputed, names)
    builder.clone_of.update((v, names[v]) for v in residuals if v in own)
    for q in readers:
        builder.behind_barrier.setdefault(q, {}).update(after_barrier)
    builder.inserted[first] = [barrier, *clones, *builder.inserted.get(first, ())]


def _components(ops: Sequence[Op]) -> Sequence[Sequence[Op]]:
    """Connected components of operations: different ones share no value that one of them computes."""
    components: UnionFind[int] = UnionFind(range(len(ops)))
    producer: dict[int, int] = {}
    for i, op in enumerate(ops):
        for v in values_of(op.inputs):
            if v in producer:
                components.union(producer[v], i)
        producer.update(dict.fromkeys(op.outputs, i))
    return tuple(grouped((components[i], op) for i, op in enumerate(ops)).values())


def _external_operands(builder: Builder, readers: Sequence[int], first: int) -> list[int]:
    """Operands of a layer's backward operations that are computed before them and that no layer drops.

    Gradients count only if the layer's own gradients are computed from them. Those merely added (gradients of weights
    that layers share, for example) need not wait for the barrier, nor do gradients of parameters, which with
    microbatches are sums over all of them.
    """
    own_results = {v for q in readers for v in builder.original.ops[q].outputs}
    operands: list[int] = []
    for q in readers:
        reads = values_of(builder.original.ops[q].inputs)
        starts_here = own_results.isdisjoint(reads)
        operands += [v for v in reads if _is_external(builder, v, first, starts_here)]
    return operands


def _is_external(builder: Builder, value: int, first: int, starts_here: bool) -> bool:
    """Whether an operand is computed before `first`, not dropped, and no gradient that need not wait."""
    producer = builder.program.producer.get(value, -1)
    if producer >= first or value in builder.clone_of:
        return False
    is_gradient = producer >= 0 and builder.program.phase(producer) == "backward"
    return not is_gradient or (starts_here and value not in builder.program.returned_gradients)


def _barrier(builder: Builder, operands: Sequence[int], position: int) -> Op:
    types = tuple(builder.types[v] for v in operands)
    reader = builder.ops[position]
    signature = builder.signature(layers_pass.BARRIER, types)
    if signature not in builder.barriers:  # tracing one takes as long as placing some fifty operations
        builder.barriers[signature] = jax_compat.barrier_equation([builder.program.avals[v] for v in operands])
    return Op(
        index=-1,
        name=layers_pass.BARRIER,
        signature=signature,
        inputs=tuple(operands),
        outputs=tuple(builder.value(t) for t in types),
        equation=builder.barriers[signature].replace(source_info=reader.equation.source_info),
        name_stack=jax_compat.rematted(reader.name_stack),
        phase="backward",
        source=reader.source,
    )
