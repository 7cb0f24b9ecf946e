"""The forward pass as a chain of layers: where its work repeats, where little crosses from one part to the next.

    period       operations i and i + p are the same, round after round, and so are their operands and what crosses
                 from round to round; of all such p the one that covers the most FLOPs, of those the shortest
                                                                                                    -> _repetition
    borders      every p operations, shifted to where the fewest bytes cross, be it at the cost of a round; ties to
                 more rounds, then to the latest                                                    -> _shift
    the rest     before, between and behind such rounds, in the same way; where nothing repeats, a piece of H products
                 makes floor(sqrt(H)) layers (Chen et al., 2016, "Training deep nets with sublinear memory cost",
                 section 4.1): equal FLOPs, give or take `WINDOW`, then the fewest bytes, then the latest -> _balanced
    loops        a scan with products in its body is a chain of equal layers by itself: one `Layer` with `trips`

Two layers are of one kind if their operations are the same once values are renamed in order of appearance     -> _kind
A backward operation belongs to the latest layer that makes or reads a forward value it reads (Alpa, section 5.2,
colocate it likewise), that alone reads a parameter it reads, or whose parameter it is the gradient of; but to none
later than the cotangents it reads, unless that makes a value it reads                          -> _backward

Values made of constants, or of parameters alone, are not counted as crossing: they can be had anywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.cost_models.flops import work
from autopar.ir.graph import Atom, Graph, Op, Region
from autopar.ir.problem import Floats, Ints
from autopar.ir.train_state import match_state

#: Share of a layer's FLOPs by which a border may miss the balanced place, where nothing repeats.
WINDOW = 0.35
#: The operation behind which recomputed parts wait; see `autopar.passes.remat.rewrite`.
BARRIER = "optimization_barrier"
#: Operations that leave a gradient what it is.
RELAYOUTS = ("transpose", "reshape", "squeeze", "expand_dims", "convert_element_type")


@dataclass(frozen=True, slots=True)
class Layer:
    """A run of forward operations.

    Attributes:
        start, stop: its range in `Layers.forward`.
        kind: equal numbers are equal programs.
        trips: layers that it stands for: the trip count of a loop over layers, otherwise 1.
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
        crossing: per border (behind each layer but the last) the values that later layers read, ascending.
        backward: position in `graph.ops` of a backward operation -> its layer.
    """

    graph: Graph
    forward: tuple[int, ...]
    layers: tuple[Layer, ...]
    crossing: tuple[tuple[int, ...], ...]
    backward: Mapping[int, int]

    def ops(self, layer: int) -> tuple[Op, ...]:
        """The forward operations of a layer."""
        found = self.layers[layer]
        return tuple(self.graph.ops[i] for i in self.forward[found.start : found.stop])

    def __str__(self) -> str:
        passed = [f", passes on {', '.join(f'%{v}' for v in values) or 'nothing'}" for values in self.crossing]
        return "".join(
            f"layer {i}: kind {x.kind}, {x.stop - x.start} ops{f' x{x.trips}' if x.trips > 1 else ''}{rest}\n"
            for i, (x, rest) in enumerate(zip(self.layers, [*passed, ""], strict=False))
        )


@lru_cache(maxsize=4)  # asked again for every choice of what to recompute
def find(graph: Graph) -> Layers:
    """The layers of a program; none if it has no forward operation."""
    chain = _Chain.of(graph)
    return _layers(chain, [0, *_borders(chain)])


def divided(found: Layers, position: int) -> Layers:
    """The layers with one more border, in front of this position of `forward`."""
    borders = {0, position, *(layer.stop for layer in found.layers)}
    return _layers(_Chain.of(found.graph), sorted(borders))


def crossing_bytes(found: Layers, position: int) -> int:
    """Bytes of the values that a border in front of this position of `forward` would be crossed by."""
    return int(_Chain.of(found.graph).bytes[position])


def _layers(chain: _Chain, borders: Sequence[int]) -> Layers:
    graph = chain.graph
    kinds: dict[Hashable, int] = {}
    layers = tuple(
        Layer(a, b, kinds.setdefault(_kind(chain, a, b), len(kinds)), _trips(chain, a, b))
        for a, b in itertools.pairwise(borders)
    )
    crossing = tuple(_crossing(chain, layer.stop) for layer in layers[:-1])
    return Layers(graph, chain.positions, layers, crossing, _backward(graph, chain, layers))


@dataclass(frozen=True, eq=False)
class _Chain:
    """The forward operations as arrays.

    Attributes:
        codes: equal where operations are the same by themselves.
        done: FLOPs before each operation, and in all.
        bytes: what crosses the border before each operation, and behind the last.
        made, read: value that counts as crossing -> where it is made, and last read.
    """

    graph: Graph
    positions: tuple[int, ...]
    ops: tuple[Op, ...]
    codes: Ints
    done: Floats
    bytes: Ints
    made: Mapping[int, int]
    read: Mapping[int, int]

    @staticmethod
    @lru_cache(maxsize=4)
    def of(graph: Graph) -> _Chain:
        positions = tuple(i for i, op in enumerate(graph.ops) if op.phase == "forward")
        ops = tuple(graph.ops[i] for i in positions)
        ids: dict[Hashable, int] = {}
        codes = np.array([ids.setdefault(_code(op), len(ids)) for op in ops], np.int64)
        done = np.concatenate([[0.0], np.cumsum([work(graph, op) for op in ops], dtype=np.float64)])
        anywhere = _roots(graph)
        made = {v: i for i, op in enumerate(ops) for v in op.outputs if v not in anywhere}
        read = {a: i for i, op in enumerate(ops) for a in op.inputs if isinstance(a, int) and a in made}
        change = np.zeros(len(ops) + 2, np.int64)
        for v, last in read.items():
            change[made[v] + 1] += graph.types[v].nbytes
            change[last + 1] -= graph.types[v].nbytes
        return _Chain(graph, positions, ops, codes, done, np.cumsum(change)[:-1], made, read)

    def flops(self, start: int, stop: int) -> float:
        return float(self.done[stop] - self.done[start])


def _code(op: Op) -> Hashable:
    """What an operation is, whatever it is applied to; bodies by their own operations."""
    return (op.name, op.trips, tuple(_body_code(r) for r in op.regions)) if op.regions else op.signature


def _body_code(region: Region) -> Hashable:
    return tuple(map(_code, region.ops))


@lru_cache(maxsize=4)
def _roots(graph: Graph) -> Mapping[int, frozenset[int]]:
    """Values that depend on constants and on the state alone -> what of it; on constants alone if nothing is state."""
    found = {graph.inputs[i]: frozenset([graph.inputs[i]]) for i in match_state(graph).values()}
    found.update((v, frozenset[int]()) for v, _ in graph.constants)
    for op in graph.ops:
        if all(a in found for a in _values(op)):
            found.update(dict.fromkeys(op.outputs, frozenset[int]().union(*(found[a] for a in _values(op)))))
    return found


# Borders


def _borders(chain: _Chain) -> Iterator[int]:
    """Ends of the layers, ascending; loops with products stand alone."""
    start = 0
    for i, op in enumerate(chain.ops):
        if op.name == "scan" and chain.flops(i, i + 1):
            yield from _pieces(chain, start, i)
            yield i + 1
            start = i + 1
    yield from _pieces(chain, start, len(chain.ops))


def _pieces(chain: _Chain, start: int, stop: int) -> Iterator[int]:
    """Ends of the layers of a stretch without such loops."""
    if start == stop:
        return
    found = _repetition(chain, start, stop)
    if found is None:
        yield from _balanced(chain, start, stop)
        return
    first, period, rounds = found
    yield from _pieces(chain, start, first)
    yield from (first + (k + 1) * period for k in range(rounds))
    yield from _pieces(chain, first + rounds * period, stop)


def _repetition(chain: _Chain, start: int, stop: int) -> tuple[int, int, int] | None:
    """(first operation, period, rounds) of what repeats and covers the most FLOPs; None if no product repeats."""
    codes = chain.codes[start:stop]
    best: tuple[int, int, int] | None = None
    most = 0.0
    for period in range(1, len(codes) // 2 + 1):
        for offset, length in _runs(codes[:-period] == codes[period:], period):
            first, rounds = start + offset, 1 + length // period
            covered = rounds * chain.flops(first, first + period)
            shifted = _shift(chain, period, first, length + period) if covered > most else None
            if shifted is not None:
                best, most = (shifted[0], period, shifted[1]), covered
    return best


def _runs(same: np.ndarray, least: int) -> Iterator[tuple[int, int]]:
    """(start, length) of every run of True of at least this length."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    for a, b in edges.reshape(-1, 2).tolist():
        if b - a >= least:
            yield a, b - a


def _shift(chain: _Chain, period: int, first: int, length: int) -> tuple[int, int] | None:
    """(first operation, rounds) of the best borders in a run that repeats; None if rounds are not alike.

    Rounds that do not read what the one before makes, or whose borders are crossed by ever more, stand side by side
    (queries, keys and values, say): they are no layers.
    """
    found: list[tuple[int, int, int]] = []
    for rounds in range(max(2, length // period - 1), length // period + 1):
        for at in range(first, first + length - rounds * period + 1):
            borders = range(at or period, min(at + rounds * period + 1, len(chain.ops)), period)
            if len(crossing := {int(chain.bytes[i]) for i in borders}) == 1:  # at either end of all nothing crosses
                found.append((-min(crossing), rounds, at))
    for _, rounds, at in sorted(found, reverse=True):
        starts = range(at, at + rounds * period, period)
        inner = {_kind(chain, a, a + period) for a in starts if a + period < len(chain.ops)}
        alike = len(inner) == 1 and len({_steps(chain, a, a + period) for a in starts}) == 1
        if alike and all(_linked(chain, a, period) for a in starts[1:]):
            return at, rounds
    return None


def _linked(chain: _Chain, start: int, period: int) -> bool:
    """A round reads something that the round before it makes."""
    made = {v for op in chain.ops[start - period : start] for v in op.outputs}
    return any(a in made for op in chain.ops[start : start + period] for a in op.inputs if isinstance(a, int))


def _balanced(chain: _Chain, start: int, stop: int) -> Iterator[int]:
    """Ends of about equal layers of a stretch in which nothing repeats."""
    products = sum(1 for i in range(start, stop) if chain.flops(i, i + 1))
    parts = max(1, math.isqrt(products))
    size = chain.flops(start, stop) / parts
    last = start
    for k in range(1, parts):
        target = float(chain.done[start]) + k * size
        near = [i for i in range(last + 1, stop) if abs(float(chain.done[i]) - target) <= WINDOW * size]
        if near:
            last = max(near, key=lambda i: (-int(chain.bytes[i]), i))
            yield last
    yield stop


# Facts about layers


def _trips(chain: _Chain, start: int, stop: int) -> int:
    op = chain.ops[start]
    alone = stop - start == 1 and op.name == "scan" and chain.flops(start, stop) > 0
    return (op.trips or 1) if alone else 1


def _kind(chain: _Chain, start: int, stop: int) -> Hashable:
    """The operations of a layer, and which of the values they make leave it."""
    made = [v for op in chain.ops[start:stop] for v in op.outputs]
    leaving = {*_crossing(chain, stop)}
    return _steps(chain, start, stop), tuple(i for i, v in enumerate(made) if v in leaving)


def _steps(chain: _Chain, start: int, stop: int) -> Hashable:
    """Operations with values numbered in order of appearance."""
    names: dict[int, int] = {}
    types = chain.graph.types

    def name(value: int) -> Hashable:
        new = value not in names
        return (names.setdefault(value, len(names)), types[value] if new else None)

    return tuple(
        (
            _code(op),
            tuple(name(a) if isinstance(a, int) else str(a) for a in op.inputs),
            tuple(name(v) for v in op.outputs),
        )
        for op in chain.ops[start:stop]
    )


def _crossing(chain: _Chain, border: int) -> tuple[int, ...]:
    """Values made before a border and read behind it."""
    return tuple(sorted(v for v, last in chain.read.items() if chain.made[v] < border <= last))


def _backward(graph: Graph, chain: _Chain, layers: Sequence[Layer]) -> Mapping[int, int]:
    """The layer of every backward operation, by position in `graph.ops`."""
    made_in = [(k, chain.ops[layer.start : layer.stop]) for k, layer in enumerate(layers)]
    roots = _roots(graph)
    layer_of = {v: k for k, ops in made_in for op in ops for v in op.outputs if v not in roots}
    read_in = {v: k for k, ops in made_in for op in ops for v in (*op.outputs, *_values(op)) if v in layer_of}
    owner = _owners(made_in, roots)
    inside = {v for op in graph.ops if op.phase == "backward" for v in op.outputs}
    gradient = gradients(graph, graph.ops, graph.outputs, inside, owner)
    last = max(len(layers) - 1, 0)
    cotangent: dict[int, int] = {}
    found: dict[int, int] = {}
    for position, op in enumerate(graph.ops):
        if op.phase != "backward":
            continue
        read = _values(op)
        below = [read_in[a] for a in read if a in read_in]
        below += [owner[leaf] for a in read for leaf in roots.get(a, ()) if leaf in owner]
        below += [gradient[v] for v in op.outputs if v in gradient]
        above = [cotangent[a] for a in read if a in cotangent]
        made = [layer_of[a] for a in read if a in layer_of]
        found[position] = max([min([max(below, default=last), *above]), *made])
        cotangent.update(dict.fromkeys(op.outputs, found[position]))
    return found


def _owners(made_in: Sequence[tuple[int, Sequence[Op]]], roots: Mapping[int, frozenset[int]]) -> Mapping[int, int]:
    """What of the state one layer alone reads -> that layer."""
    readers: dict[int, set[int]] = {}
    for k, ops in made_in:
        reading = [op for op in ops if not op.outputs or not all(v in roots for v in op.outputs)]
        for leaf in {leaf for op in reading for v in _values(op) for leaf in roots.get(v, ())}:
            readers.setdefault(leaf, set()).add(k)
    return {leaf: min(found) for leaf, found in readers.items() if len(found) == 1}


def gradients(
    graph: Graph, ops: Iterable[Op], results: Sequence[Atom], inside: Set[int], owner: Mapping[int, int]
) -> Mapping[int, int]:
    """Gradients from which the new value of a parameter is made, by operations of its size -> who owns it.

    Args:
        graph: the step.
        ops: its operations, or others on its values.
        results: what they make of the step's results, in order.
        inside: values that may be gradients; others are made from them.
        owner: parameter -> a layer or a stage; of parameters that share a gradient it is that of the earliest.
    """
    maker = {v: op for op in ops for v in op.outputs}
    found: dict[int, int] = {}
    for out, i in match_state(graph).items():
        leaf = graph.inputs[i]
        waiting = [results[out]] if leaf in owner else []
        seen: set[int] = set()
        while waiting:
            value = waiting.pop()
            if not isinstance(value, int) or value in seen or value not in maker:
                continue
            seen.add(value)
            op = maker[value]
            if op.name == BARRIER:
                waiting.append(op.inputs[op.outputs.index(value)])
                continue
            if value in inside and op.name not in ("add", "add_any"):
                found[value] = min(found.get(value, owner[leaf]), owner[leaf])
            if value not in inside or op.name in ("add", "add_any", *RELAYOUTS):
                waiting.extend(a for a in op.inputs if graph.type_of(a).size == graph.types[leaf].size)
    return found


def _values(op: Op) -> list[int]:
    return [a for a in op.inputs if isinstance(a, int)]
