"""The forward pass as a chain of layers: where its operations repeat, and where few bytes cross.

    period       p, if operations i and i + p are equal in every round, and so are their operands and the values that
                 cross between rounds; of all such p the one that covers the most FLOPs, among equals the shortest
                                                                                                    -> _repetition
    borders      every p operations, shifted to where the fewest bytes cross, even if one round fewer fits; ties go to
                 more rounds, then to the latest                                                    -> _best_borders
    the rest     before, between and after such rounds, in the same way. Where nothing repeats, H products make
                 floor(sqrt(H)) layers (Chen et al., 2016, "Training deep nets with sublinear memory cost",
                 section 4.1): of equal FLOPs within `LayerEffort.balance`, then with the fewest bytes at the border,
                 then with the latest border                                                        -> _balanced
    loops        a scan with products in its body is a chain of equal layers by itself: one `Layer` with `trips`

Two layers are of one kind if their operations are equal once values are renumbered in the order of their first use
                                                                                                    -> _kind
A backward operation belongs to the latest of these layers: one that produces or reads a forward value it reads (Alpa,
section 5.2, colocates it likewise), that alone reads a parameter it reads, or that alone reads the parameter whose
gradient it computes. It belongs to no layer later than the cotangents it reads, unless that layer produces a value it
reads                                                                                               -> _backward

Values computed from constants or from parameters alone do not count as crossing: every layer can compute them itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.cost_models.flops import work
from autopar.ir.graph import Atom, Graph, Op, Region
from autopar.ir.on_graph import cached_on_graph
from autopar.ir.op_sets import ADDITIONS, RELAYOUTS
from autopar.ir.problem import Floats, Ints
from autopar.ir.train_state import match_state


@dataclass(frozen=True, slots=True)
class LayerEffort:
    """Where a program that repeats nothing may be cut into layers."""

    # share of a layer's FLOPs by which a border may be off the balanced position (not measured)
    balance: float = 0.35


LAYERS = LayerEffort()

#: The operation that recomputed parts follow; see `autopar.passes.remat.rewrite`.
BARRIER = "optimization_barrier"
#: Operations that do not change the values of a gradient.


@dataclass(frozen=True, slots=True)
class Layer:
    """Consecutive forward operations.

    Attributes:
        start, stop: its range in `Layers.forward`.
        kind: equal numbers mean equal programs.
        trips: number of layers that it contains: the trip count of a loop over layers, otherwise 1.
    """

    start: int
    stop: int
    kind: int
    trips: int = 1


@dataclass(frozen=True, eq=False)
class Layers:
    """The layers of a program.

    Attributes:
        graph: the program.
        forward: positions in `graph.ops` of the forward operations, in program order.
        layers: they cover `forward`, in order.
        crossing: per border (after each layer but the last) the values that later layers read, ascending.
        backward: position in `graph.ops` of a backward operation -> its layer.
    """

    graph: Graph
    forward: tuple[int, ...]
    layers: tuple[Layer, ...]
    crossing: tuple[tuple[int, ...], ...]
    backward: Mapping[int, int]

    def ops(self, layer: int) -> tuple[Op, ...]:
        """The forward operations of a layer."""
        layer_ = self.layers[layer]
        return tuple(self.graph.ops[i] for i in self.forward[layer_.start : layer_.stop])

    def __str__(self) -> str:
        crossing = [f", passes on {', '.join(f'%{v}' for v in values) or 'nothing'}" for values in self.crossing]
        return "".join(
            f"layer {i}: kind {x.kind}, {x.stop - x.start} ops{f' x{x.trips}' if x.trips > 1 else ''}{suffix}\n"
            for i, (x, suffix) in enumerate(zip(self.layers, [*crossing, ""], strict=False))
        )


@cached_on_graph
def find(graph: Graph) -> Layers:
    """The layers of a program; none if it has no forward operation."""
    chain = _Chain.of(graph)
    return _layers(chain, [0, *_borders(chain)])


def with_border(layers: Layers, position: int) -> Layers:
    """The layers with one more border, in front of this position of `forward`."""
    borders = {0, position, *(layer.stop for layer in layers.layers)}
    return _layers(_Chain.of(layers.graph), sorted(borders))


def same_layers(layers: Layers, graph: Graph) -> Layers:
    """The same layers in a rematerialised program, which keeps the forward operations that the backward pass needs not.

    `graph`: the program of `layers` after `autopar.passes.remat.rewrite.rewrite`, in which values keep their numbers.
    """
    layer_of = {v: i for i in range(len(layers.layers)) for op in layers.ops(i) for v in op.outputs}
    chain = _Chain.of(graph)
    counts = [0] * len(layers.layers)
    layer = 0
    for position in chain.positions:
        layer = max([layer, *(layer_of[v] for v in graph.ops[position].outputs if v in layer_of)])
        counts[layer] += 1
    return _layers(chain, [0, *itertools.accumulate(counts)])


def crossing_bytes(layers: Layers, position: int) -> int:
    """Bytes of the values that cross a border in front of this position of `forward`."""
    return int(_Chain.of(layers.graph).bytes[position])


def _layers(chain: _Chain, borders: Sequence[int]) -> Layers:
    graph = chain.graph
    kind_of: dict[Hashable, int] = {}
    layers = tuple(
        Layer(a, b, kind_of.setdefault(_kind(chain, a, b), len(kind_of)), _trips(chain, a, b))
        for a, b in itertools.pairwise(borders)
    )
    crossing = tuple(_crossing(chain, layer.stop) for layer in layers[:-1])
    return Layers(graph, chain.positions, layers, crossing, _backward(graph, chain, layers))


@dataclass(frozen=True, eq=False)
class _Chain:
    """The forward operations as arrays.

    Attributes:
        codes: equal for operations that are equal regardless of their operands.
        flops_before: FLOPs before each operation, and the total.
        bytes: bytes that cross the border before each operation, and after the last.
        producer, last_reader: value that counts as crossing -> the operation that produces it, and its last reader.
    """

    graph: Graph
    positions: tuple[int, ...]
    ops: tuple[Op, ...]
    codes: Ints
    flops_before: Floats
    bytes: Ints
    producer: Mapping[int, int]
    last_reader: Mapping[int, int]

    @staticmethod
    @cached_on_graph
    def of(graph: Graph) -> _Chain:
        positions = tuple(i for i, op in enumerate(graph.ops) if op.phase == "forward")
        ops = tuple(graph.ops[i] for i in positions)
        ids: dict[Hashable, int] = {}
        codes = np.array([ids.setdefault(_op_code(op), len(ids)) for op in ops], np.int64)
        flops_before = np.concatenate([[0.0], np.cumsum([work(graph, op) for op in ops], dtype=np.float64)])
        roots = _roots(graph)
        producer = {v: i for i, op in enumerate(ops) for v in op.outputs if v not in roots}
        last_reader = {a: i for i, op in enumerate(ops) for a in op.inputs if isinstance(a, int) and a in producer}
        delta = np.zeros(len(ops) + 2, np.int64)
        for v, last in last_reader.items():
            delta[producer[v] + 1] += graph.types[v].nbytes
            delta[last + 1] -= graph.types[v].nbytes
        return _Chain(graph, positions, ops, codes, flops_before, np.cumsum(delta)[:-1], producer, last_reader)

    @cached_property
    def read(self) -> tuple[Ints, Ints, Ints]:
        """The values that count as crossing and are read, ascending, with their producers and last readers."""
        values = sorted(self.last_reader)
        producers, readers = [self.producer[v] for v in values], [self.last_reader[v] for v in values]
        return np.array(values, np.int64), np.array(producers, np.int64), np.array(readers, np.int64)

    def flops(self, start: int, stop: int) -> float:
        return float(self.flops_before[stop] - self.flops_before[start])


def _op_code(op: Op) -> Hashable:
    """An operation regardless of its operands; its regions by their operations."""
    return (op.name, op.trips, tuple(_body_code(r) for r in op.regions)) if op.regions else op.signature


def _body_code(region: Region) -> Hashable:
    return tuple(map(_op_code, region.ops))


@cached_on_graph
def _roots(graph: Graph) -> Mapping[int, frozenset[int]]:
    """Value that depends on constants and state alone -> the state it depends on."""
    roots = {graph.inputs[i]: frozenset([graph.inputs[i]]) for i in match_state(graph).values()}
    roots.update((v, frozenset[int]()) for v, _ in graph.constants)
    for op in graph.ops:
        if all(a in roots for a in _operands(op)):
            roots.update(dict.fromkeys(op.outputs, frozenset[int]().union(*(roots[a] for a in _operands(op)))))
    return roots


# Borders


def _borders(chain: _Chain) -> Iterator[int]:
    """Ends of the layers, ascending; loops with products are layers of their own."""
    start = 0
    for i, op in enumerate(chain.ops):
        if op.name == "scan" and chain.flops(i, i + 1):
            yield from _layer_ends(chain, start, i)
            yield i + 1
            start = i + 1
    yield from _layer_ends(chain, start, len(chain.ops))


def _layer_ends(chain: _Chain, start: int, stop: int) -> Iterator[int]:
    """Ends of the layers of a range without such loops."""
    if start == stop:
        return
    repetition = _repetition(chain, start, stop)
    if repetition is None:
        yield from _balanced(chain, start, stop)
        return
    first, period, rounds = repetition
    yield from _layer_ends(chain, start, first)
    yield from (first + (k + 1) * period for k in range(rounds))
    yield from _layer_ends(chain, first + rounds * period, stop)


def _repetition(chain: _Chain, start: int, stop: int) -> tuple[int, int, int] | None:
    """(first operation, period, rounds) of the repetition that covers the most FLOPs; None if no product repeats."""
    codes = chain.codes[start:stop]
    best: tuple[int, int, int] | None = None
    most_flops = 0.0
    for period in range(1, len(codes) // 2 + 1):
        for offset, length in _runs(codes[:-period] == codes[period:], period):
            first, rounds = start + offset, 1 + length // period
            flops = rounds * chain.flops(first, first + period)
            borders = _best_borders(chain, period, first, length + period) if flops > most_flops else None
            if borders is not None:
                best, most_flops = (borders[0], period, borders[1]), flops
    return best


def _runs(equal: np.ndarray, min_length: int) -> Iterator[tuple[int, int]]:
    """(start, length) of every run of True of at least this length."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]]).astype(np.int8)))
    for a, b in edges.reshape(-1, 2).tolist():
        if b - a >= min_length:
            yield a, b - a


def _best_borders(chain: _Chain, period: int, first: int, length: int) -> tuple[int, int] | None:
    """(first operation, rounds) of the best borders in a repetition; None if its rounds are not equal layers.

    Rounds that do not read results of the round before, or whose borders are crossed by more and more bytes, are
    parallel branches (queries, keys and values, for example) and not layers.
    """
    for _, rounds, start in sorted(_equal_borders(chain, period, first, length), reverse=True):
        starts = range(start, start + rounds * period, period)
        kinds = {_kind(chain, a, a + period) for a in starts if a + period < len(chain.ops)}
        is_repetition = len(kinds) == 1 and len({_normal_form(chain, a, a + period) for a in starts}) == 1
        if is_repetition and all(_reads_previous(chain, a, period) for a in starts[1:]):
            return start, rounds
    return None


def _equal_borders(chain: _Chain, period: int, first: int, length: int) -> Iterator[tuple[int, int, int]]:
    """(-bytes, rounds, first operation) of borders in a repetition that are all crossed by equally many bytes."""
    for rounds in range(max(2, length // period - 1), length // period + 1):
        for start in range(first, first + length - rounds * period + 1):
            borders = range(start or period, min(start + rounds * period + 1, len(chain.ops)), period)
            if len(crossing := {int(chain.bytes[i]) for i in borders}) == 1:  # nothing crosses the ends of the program
                yield -min(crossing), rounds, start


def _reads_previous(chain: _Chain, start: int, period: int) -> bool:
    """Whether a round reads a result of the round before it."""
    previous = {v for op in chain.ops[start - period : start] for v in op.outputs}
    return any(a in previous for op in chain.ops[start : start + period] for a in op.inputs if isinstance(a, int))


def _balanced(chain: _Chain, start: int, stop: int) -> Iterator[int]:
    """Ends of layers of about equal FLOPs in a range where nothing repeats."""
    products = sum(1 for i in range(start, stop) if chain.flops(i, i + 1))
    count = max(1, math.isqrt(products))
    size = chain.flops(start, stop) / count
    last = start
    for k in range(1, count):
        target = float(chain.flops_before[start]) + k * size
        off = {i: abs(float(chain.flops_before[i]) - target) for i in range(last + 1, stop)}
        candidates = [i for i, flops in off.items() if flops <= LAYERS.balance * size]
        if candidates:
            last = max(candidates, key=lambda i: (-int(chain.bytes[i]), i))
            yield last
    yield stop


# Facts about layers


def _trips(chain: _Chain, start: int, stop: int) -> int:
    op = chain.ops[start]
    is_loop = stop - start == 1 and op.name == "scan" and chain.flops(start, stop) > 0
    return (op.trips or 1) if is_loop else 1


def _kind(chain: _Chain, start: int, stop: int) -> Hashable:
    """The operations of a layer, and which of their results cross its end."""
    results = [v for op in chain.ops[start:stop] for v in op.outputs]
    crossing = {*_crossing(chain, stop)}
    return _normal_form(chain, start, stop), tuple(i for i, v in enumerate(results) if v in crossing)


def _normal_form(chain: _Chain, start: int, stop: int) -> Hashable:
    """Operations with values numbered in the order of their first use."""
    number_of: dict[int, int] = {}
    types = chain.graph.types

    def number(value: int) -> Hashable:
        is_new = value not in number_of
        return (number_of.setdefault(value, len(number_of)), types[value] if is_new else None)

    return tuple(
        (
            _op_code(op),
            tuple(number(a) if isinstance(a, int) else str(a) for a in op.inputs),
            tuple(number(v) for v in op.outputs),
        )
        for op in chain.ops[start:stop]
    )


def _crossing(chain: _Chain, border: int) -> tuple[int, ...]:
    """Values produced before a border and read after it, ascending."""
    values, producer, last_reader = chain.read
    return tuple(values[(producer < border) & (border <= last_reader)].tolist())


def _backward(graph: Graph, chain: _Chain, layers: Sequence[Layer]) -> Mapping[int, int]:
    """Position in `graph.ops` of a backward operation -> its layer."""
    layer_ops = [(k, chain.ops[layer.start : layer.stop]) for k, layer in enumerate(layers)]
    roots = _roots(graph)
    producer_layer = {v: k for k, ops in layer_ops for op in ops for v in op.outputs if v not in roots}
    used = [(k, v) for k, ops in layer_ops for op in ops for v in (*op.outputs, *_operands(op))]
    reader_layer = {v: k for k, v in used if v in producer_layer}  # the last one counts
    sole_reader = _sole_readers(layer_ops, roots)
    backward_values = {v for op in graph.ops if op.phase == "backward" for v in op.outputs}
    gradient_layer = gradients(graph, graph.ops, graph.outputs, backward_values, sole_reader)
    last_layer = max(len(layers) - 1, 0)
    cotangent_layer: dict[int, int] = {}
    result: dict[int, int] = {}
    for position, op in enumerate(graph.ops):
        if op.phase != "backward":
            continue
        operands = _operands(op)
        at_least = [reader_layer[a] for a in operands if a in reader_layer]
        at_least += [sole_reader[leaf] for a in operands for leaf in roots.get(a, ()) if leaf in sole_reader]
        at_least += [gradient_layer[v] for v in op.outputs if v in gradient_layer]
        at_most = [cotangent_layer[a] for a in operands if a in cotangent_layer]
        producer_layers = [producer_layer[a] for a in operands if a in producer_layer]
        result[position] = max([min([max(at_least, default=last_layer), *at_most]), *producer_layers])
        cotangent_layer.update(dict.fromkeys(op.outputs, result[position]))
    return result


def _sole_readers(
    layer_ops: Sequence[tuple[int, Sequence[Op]]], roots: Mapping[int, frozenset[int]]
) -> Mapping[int, int]:
    """State that only one layer reads -> that layer."""
    readers: dict[int, set[int]] = {}
    for k, ops in layer_ops:
        reading_ops = [op for op in ops if not op.outputs or not all(v in roots for v in op.outputs)]
        for leaf in {leaf for op in reading_ops for v in _operands(op) for leaf in roots.get(v, ())}:
            readers.setdefault(leaf, set()).add(k)
    return {leaf: min(readers_) for leaf, readers_ in readers.items() if len(readers_) == 1}


def gradients(
    graph: Graph, ops: Iterable[Op], results: Sequence[Atom], candidates: Set[int], owner: Mapping[int, int]
) -> Mapping[int, int]:
    """Gradients from which new values of parameters are computed by operations of equal size -> owner of the parameter.

    Args:
        graph: the step.
        ops: its operations, or others on its values.
        results: the step's results as computed by `ops`, in order.
        candidates: values that may be gradients; other values are computed from gradients.
        owner: parameter -> a layer or a stage; of parameters that share a gradient, the earliest counts.
    """
    producer = {v: op for op in ops for v in op.outputs}
    gradient_owner: dict[int, int] = {}
    for out, i in match_state(graph).items():
        leaf = graph.inputs[i]
        stack = [results[out]] if leaf in owner else []
        visited: set[int] = set()
        while stack:
            value = stack.pop()
            if not isinstance(value, int) or value in visited or value not in producer:
                continue
            visited.add(value)
            op = producer[value]
            if op.name == BARRIER:
                stack.append(op.inputs[op.outputs.index(value)])
                continue
            if value in candidates and op.name not in ADDITIONS:
                gradient_owner[value] = min(gradient_owner.get(value, owner[leaf]), owner[leaf])
            if value not in candidates or op.name in (*ADDITIONS, *RELAYOUTS):
                stack.extend(a for a in op.inputs if graph.type_of(a).size == graph.types[leaf].size)
    return gradient_owner


def _operands(op: Op) -> list[int]:
    return [a for a in op.inputs if isinstance(a, int)]
