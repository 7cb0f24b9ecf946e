"""Bytes that each device reads and writes in its memory under a plan: every kernel's operands and results, once.

Compilers fuse what computes element by element into its neighbours. A value is in memory if                -> _stored

    it is an argument, a result, a constant, or enters or leaves a loop's body
    a collective moves it or sums it
    a reduction makes it, or a kernel that nothing is fused into makes or reads it                      -> KERNELS
    a product makes it, and not all that reads it is one fused loop, or several products read it

and everything else exists inside fused loops alone, the operand of a single product included. Of values in memory

    those that are computed from something in common, none from another, come out of one loop           -> _loops
    reductions run in the loop that makes what they read, if all else they read is there before         -> _merged

and a loop reads what it is computed from once, and nothing that it makes. Arrays are padded to whole tiles -> _tiled

A collective reads its operand and writes its result, an exchange that cuts or joins columns more: its pieces are put
together in tiles of their own                                                                          -> _Moves

XLA's cost analysis calls the sum "bytes accessed".
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property

from networkx.utils import UnionFind

from autopar.cost_models.compiler.precision import rounded, rounds
from autopar.hardware.cluster import Device
from autopar.ir.collective import Collective
from autopar.ir.graph import UNKNOWN_TRIPS, Atom, Graph, Op
from autopar.ir.layout import Layout, local_shape
from autopar.ir.op_sets import PRODUCTS, RAGGED_PRODUCTS
from autopar.plans.plan import Stage

#: Operations that no loop is fused through: each reads its operands from memory and writes its results.
KERNELS = (
    *(*RAGGED_PRODUCTS, "sort", "cumsum", "custom_call", "gather", "scatter", "scatter-add"),
    *("rng_bit_generator", "reduce_window_sum", "reduce_window_max", "select_and_scatter_add", "select_and_gather_add"),
)
#: Operations that read much and write little: a fused loop ends there, and what comes after starts anew.
REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin", "reduce_and", "reduce_or")
#: Arrays that one fused loop reads at most: compilers end a fusion somewhere, so that chains of residuals are written.
#: Settled on three toys of 2 to 48 layers compiled for TPU v5e, where 8 to 24 keep within a third of XLA's figure.
MOST_READ = 16
_WRITING = frozenset((*REDUCTIONS, *PRODUCTS))


def bytes_accessed(graph: Graph, stage: Stage, collectives: Sequence[Collective], device: Device) -> float:
    """Bytes that each device, which is like `device`, reads and writes in its memory per step."""
    counter = _Counter(graph, stage, frozenset(c.op for c in collectives), device)
    moves = _Moves(graph, stage, device)
    moved = sum(c.count * moves.bytes(c) for c in collectives)
    return moved + counter.body(graph.ops, (*graph.inputs, *(v for v, _ in graph.constants)), graph.outputs, 1.0)


@dataclass(frozen=True, eq=False)
class _Moves:
    """Bytes that collectives read and write: an operand and a result, of which one is a piece to gather and scatter.

    What a product rounds is rounded before it is moved. On devices with tiles, exchanges that cut the last dimension d
    into n write the n pieces of d / n columns, padded to tiles, and once more with the pieces in front; those that join
    it put them back. Where that pads, they are made dense on both sides of the wire. So seen in compiled programs.
    """

    graph: Graph
    stage: Stage
    device: Device

    @cached_property
    def read(self) -> Mapping[str, tuple[int, Op | None]]:
        """Site -> the value that is read there, and the operation that reads it, if one does."""
        ops = {f"{op.tag}.in{k}": (atom, op) for op in self.graph.walk() for k, atom in enumerate(op.inputs)}
        outs = {f"out{k}": (atom, None) for k, atom in enumerate(self.graph.outputs)}
        return {site: (atom, op) for site, (atom, op) in {**ops, **outs}.items() if isinstance(atom, int)}

    def bytes(self, c: Collective) -> float:
        """Bytes of one run of a collective."""
        nbytes = self._sent(c)
        if c.kind in ("all-gather", "reduce-scatter"):
            return nbytes * (1 + 1 / math.prod(self.stage.submesh[a] for a in c.axes))
        return 2 * nbytes + (self._retiled(c, nbytes) if c.kind == "all-to-all" else 0.0)

    def _sent(self, c: Collective) -> float:
        """Bytes of its larger buffer, as it is moved."""
        value, op = self.read.get(c.op, (-1, None))
        if op is None or not self.device.rounds_operands or not rounds(op, self.graph.types[value]):
            return c.bytes
        type_ = self.graph.types[value]
        return c.bytes * rounded(type_).itemsize / type_.itemsize

    def _retiled(self, c: Collective, nbytes: float) -> float:
        """Bytes that an exchange of columns moves besides its operand and its result."""
        value, _ = self.read.get(c.op, (-1, None))
        before, target = self.stage.values.get(value), self.stage.uses.get(c.op)
        if self.device.tile == (1, 1) or before is None or target is None:
            return 0.0
        shape = self.graph.types[value].shape
        last = max((d for d, n in enumerate(shape) if n > 1), default=-1)
        axes = [i for i, name in enumerate(self.stage.submesh) if name in c.axes]
        cuts, joins = any(target[i] == last for i in axes), any(before[i] == last for i in axes)
        if cuts == joins:
            return 0.0
        # as it lies, cut further by the axes of the exchange: one of the pieces that are sent
        further = tuple(d if i in axes else -1 for i, d in enumerate(target))
        piece = _held(further, _held(before, shape, self.stage.submesh), self.stage.submesh)
        pieces = (*piece, math.prod(self.stage.submesh[a] for a in c.axes))
        padded = nbytes * max(1.0, _tiled(pieces, self.device.tile) / math.prod(pieces))
        dense = 4 * (nbytes + padded) if padded > nbytes else nbytes + padded if cuts else 0.0
        return 2 * padded + dense


@dataclass(frozen=True, slots=True)
class _Cone:
    """What one value in memory is computed from.

    Attributes:
        ops: the first operations on arrays that are fused with it. Values that have any operation in common have all in
            common that it is computed from, and so one of these.
        sources: values in memory -> bytes read.
    """

    ops: frozenset[int]
    sources: Mapping[int, int]

    def of(self, op: int) -> _Cone:
        """The same with the operation that makes the value, even if that is one number."""
        return self if op in self.ops else _Cone(self.ops | {op}, self.sources)


@dataclass(eq=False)
class _Counter:
    """Counts the bytes of bodies; `moving`: tags of all collectives."""

    graph: Graph
    stage: Stage
    moving: AbstractSet[str]
    device: Device
    known: dict[tuple[Layout | None, tuple[int, ...], int], int] = field(default_factory=dict)  # bytes of a piece
    at_home: dict[int, int] = field(default_factory=dict)  # by value, as it lies
    read_by: dict[int, Sequence[tuple[int, int]]] = field(default_factory=dict)  # by operation

    def local(self, value: int, site: str = "") -> int:
        """Bytes that a device holds of a value, as it lies or as it is read at a site."""
        layout = (self.stage.uses.get(site) if site else None) or self.stage.values.get(value)
        type_ = self.graph.types[value]
        key = (layout, type_.shape, type_.itemsize)
        found = self.known.get(key)
        if found is None:
            shape = _held(layout, type_.shape, self.stage.submesh)
            found = self.known[key] = _tiled(shape, self.device.tile) * type_.itemsize
        return found

    def lying(self, value: int) -> int:
        """Bytes that a device holds of a value as it lies."""
        found = self.at_home.get(value)
        if found is None:
            found = self.at_home[value] = self.local(value)
        return found

    def read(self, op: Op, k: int, value: int) -> int:
        """Bytes that an operation reads of operand `k`."""
        site = f"{op.tag}.in{k}" if op.index in self.rereading else ""
        nbytes = self.local(value, site) if site in self.stage.uses else self.lying(value)
        if not self.device.rounds_operands:
            return nbytes
        moved = site in self.stage.uses and rounds(op, self.graph.types[value])
        return self._narrow(value, nbytes, rounding=moved or value in self.rounded)

    def reads(self, op: Op) -> Sequence[tuple[int, int]]:
        """The values that an operation reads, operand by operand, and bytes of each."""
        found = self.read_by.get(op.index)
        if found is None:
            if self.device.rounds_operands or op.index in self.rereading:
                found = [(atom, self.read(op, k, atom)) for k, atom in enumerate(op.inputs) if isinstance(atom, int)]
            else:
                found = [(atom, self.lying(atom)) for atom in op.inputs if isinstance(atom, int)]
            self.read_by[op.index] = found
        return found

    def written(self, value: int) -> int:
        """Bytes that are written of a value."""
        nbytes = self.lying(value)
        return self._narrow(value, nbytes, rounding=value in self.rounded) if self.device.rounds_operands else nbytes

    def _narrow(self, value: int, nbytes: int, *, rounding: bool) -> int:
        type_ = self.graph.types[value]
        return nbytes * rounded(type_).itemsize // type_.itemsize if rounding else nbytes

    @cached_property
    def rereading(self) -> AbstractSet[int]:
        """Operations (by index) that read some operand in another layout than it lies in."""
        return _operations(self.stage.uses)

    @cached_property
    def fetching(self) -> AbstractSet[int]:
        """Operations (by index) an operand of which is moved."""
        return _operations(site for site in self.moving if "." in site)

    @cached_property
    def summing(self) -> AbstractSet[int]:
        """Operations (by index) whose results are moved."""
        return _operations(site for site in self.moving if "." not in site)

    @cached_property
    def products(self) -> Mapping[int, int]:
        """Value -> how many products read it."""
        return Counter(a for op in self.graph.walk() if op.name in PRODUCTS for a in op.inputs if isinstance(a, int))

    @cached_property
    def rounded(self) -> AbstractSet[int]:
        """Values that nothing reads but products that round them, and that no argument is."""
        found: dict[int, bool] = {}
        for op in self.graph.walk():
            for atom in op.inputs:
                if isinstance(atom, int):
                    found[atom] = found.get(atom, True) and rounds(op, self.graph.types[atom])
        fixed = {a for a in (*self.graph.inputs, *self.graph.outputs) if isinstance(a, int)}
        return {value for value, narrow in found.items() if narrow} - fixed

    def body(self, ops: Sequence[Op], inputs: Sequence[int], outputs: Sequence[Atom], weight: float) -> float:
        """Bytes of all runs of one body."""
        total = 0.0
        for op in ops:
            runs = weight * (op.trips or UNKNOWN_TRIPS)
            total += sum(self.body(r.ops, r.inputs, r.outputs, runs) for r in op.regions)
        made = {v: op for op in ops if not op.regions for v in op.outputs}
        cones, stored = self._cones(ops, made, self._stored(ops, inputs, outputs))
        products = frozenset(v for v in cones if made[v].name in PRODUCTS)
        within = _within_one_loop(products, cones, _loops(cones, products, _depths(cones)), made)
        fixed = {*inputs, *outputs}
        fused = {v for v in within if v not in fixed and made[v].index not in self.summing}
        cones = self._cones(ops, made, stored - fused)[0] if fused else cones
        depths = _depths(cones)
        loops = _loops(cones, products, depths)
        reductions = frozenset(v for v in cones if made[v].name in REDUCTIONS and made[v].index not in self.summing)
        there = {v for v in cones if made[v].index not in self.summing}
        merged = _joined(cones, _merged(cones, loops, depths, reductions, there), depths, self._light(cones, made))
        return total + weight * self._bytes(cones, merged)

    def _light(self, cones: Mapping[int, _Cone], made: Mapping[int, Op]) -> Mapping[int, tuple[int, ...]]:
        """Values in memory that are computed element by element, and nothing moves or sums -> their shapes."""
        heavy = (*_WRITING, *KERNELS)
        return {
            v: self.graph.types[v].shape
            for v in cones
            if made[v].name not in heavy and made[v].index not in self.summing and not self._retiles(made[v])
        }

    def _stored(self, ops: Sequence[Op], inputs: Sequence[int], outputs: Sequence[Atom]) -> frozenset[int]:
        """The values that are in memory if every product's result is."""
        found = {*inputs, *(a for a in outputs if isinstance(a, int))}
        for op in ops:
            whole = op.name in KERNELS or bool(op.regions) or self._retiles(op)
            if whole or op.index in self.fetching:
                read = (a for k, a in enumerate(op.inputs) if whole or f"{op.tag}.in{k}" in self.moving)
                found.update(a for a in read if isinstance(a, int))
            if whole or op.name in _WRITING or op.index in self.summing:
                found.update(op.outputs)
        found.update(v for op in ops for v in op.outputs if self.products.get(v, 0) > 1)
        free = [v for op in ops for v in op.outputs if v not in self.stage.values]  # constants and views: never stored
        return frozenset(found.difference(free))

    def _retiles(self, op: Op) -> bool:
        """Whether a reshape copies, since it splits or merges the dimension that lies along the columns of tiles."""
        if op.name != "reshape" or self.device.tile == (1, 1):
            return False
        before, after = ([n for n in self.graph.type_of(a).shape if n > 1][-1:] for a in (op.inputs[0], op.outputs[0]))
        return before != after

    def _cones(
        self, ops: Sequence[Op], made: Mapping[int, Op], stored: AbstractSet[int]
    ) -> tuple[dict[int, _Cone], frozenset[int]]:
        """What every value in memory that is made here is computed with, and which these are; see `_Cone`.

        Those of `stored`, and results of operations that would be computed from more than `MOST_READ` others.
        """
        known: dict[int, _Cone] = {}  # operation -> its cone, where it is more than one number with itself
        found = set(stored)
        for op in ops:
            if op.index not in known and any(made.get(v) is op for v in op.outputs):
                cone = known[op.index] = self._cone(op, known, made, found)
                if len(cone.sources) > MOST_READ:
                    found.update(v for v in op.outputs if v in self.stage.values)
        return {v: known[op.index].of(op.index) for v, op in made.items() if v in found}, frozenset(found)

    def _cone(self, op: Op, known: Mapping[int, _Cone], made: Mapping[int, Op], stored: AbstractSet[int]) -> _Cone:
        """What is one number is made wherever it is read, so that no loops are shared by it."""
        memory, fused = self._links(op, made, stored)
        makers = [known[maker.index] for maker in fused]
        first = frozenset[int]().union(*(maker.ops for maker in makers))
        if not first and self._is_array(op):
            first = frozenset([op.index])
        sources: dict[int, int] = {}
        for atom, size in itertools.chain(memory, *(maker.sources.items() for maker in makers)):
            if size > sources.get(atom, -1):
                sources[atom] = size
        return _Cone(first, sources)

    def _is_array(self, op: Op) -> bool:
        return any(self.graph.types[v].rank for v in op.outputs)

    def _links(
        self, op: Op, made: Mapping[int, Op], stored: AbstractSet[int]
    ) -> tuple[Sequence[tuple[int, int]], Sequence[Op]]:
        """What an operation reads from memory, with bytes, and the operations fused with it that make the rest."""
        memory: list[tuple[int, int]] = []
        fused: list[Op] = []
        for atom, size in self.reads(op):
            maker = None if atom in stored else made.get(atom)
            if maker is None:
                memory.append((atom, size))
            else:
                fused.append(maker)
        return memory, fused

    def _bytes(self, cones: Mapping[int, _Cone], loops: Mapping[int, int]) -> float:
        read: dict[int, dict[int, int]] = {}  # loop -> value -> bytes
        for value, cone in cones.items():
            mine = read.setdefault(loops[value], {})
            for source, size in cone.sources.items():
                if size > mine.get(source, 0) and loops.get(source) != loops[value]:
                    mine[source] = size
        return sum(sum(mine.values()) for mine in read.values()) + sum(map(self.written, cones))


def _operations(sites: Iterable[str]) -> AbstractSet[int]:
    """The operations (by index) that sites such as "op12.in0" belong to."""
    tags = (site.partition(".")[0] for site in sites)
    return {int(tag.removeprefix("op")) for tag in tags if tag.startswith("op")}


def _depths(cones: Mapping[int, _Cone]) -> Mapping[int, int]:
    """Value -> how many values in memory are computed one after the other up to it; arguments have 0."""
    depths: dict[int, int] = {}
    for value, cone in cones.items():  # in program order: sources come first
        depths[value] = 1 + max([depths.get(source, 0) for source in cone.sources], default=0)
    return depths


def _loops(cones: Mapping[int, _Cone], products: AbstractSet[int], depths: Mapping[int, int]) -> Mapping[int, int]:
    """Value -> the number of the loop that it comes out of.

    Equal for values of one depth that have an operation in common; each of the products has a loop of its own.
    """
    owners: dict[int, dict[int, int]] = {}  # depth -> operation -> a value that is computed with it
    joined: UnionFind[int] = UnionFind(cones)
    for value, cone in cones.items():
        owner = owners.setdefault(depths[value], {})
        others = {owner.setdefault(op, value) for op in (() if value in products else cone.ops)}
        joined.union(value, *sorted(others))
    return {value: joined[value] for value in cones}


def _merged(
    cones: Mapping[int, _Cone],
    loops: Mapping[int, int],
    depths: Mapping[int, int],
    reductions: frozenset[int],
    there: AbstractSet[int],
) -> Mapping[int, int]:
    """The loops once those of reductions alone run in the loop that makes what they read; `there`: made in place."""
    merged = dict(loops)
    for values in _values(loops).values():
        if not reductions.issuperset(values):
            continue
        last = _read_last(values, cones, depths)
        makers = dict.fromkeys(merged[s] for s in last)
        if len(makers) == 1 and there >= last:
            merged.update(dict.fromkeys(values, next(iter(makers))))
    return merged


def _joined(
    cones: Mapping[int, _Cone],
    loops: Mapping[int, int],
    depths: Mapping[int, int],
    light: Mapping[int, tuple[int, ...]],
) -> Mapping[int, int]:
    """The loops once those of `light` values are one with all that make what they read last, in one shape.

    So moments and the parameter that is computed from them come out of one loop.
    """
    groups = _values(loops)
    joined: UnionFind[int] = UnionFind(groups)
    for loop, values in groups.items():
        shapes = {light.get(v) for v in values}
        makers = {loops[s] for s in _read_last(values, cones, depths)}
        made = {light.get(v) for maker in makers for v in groups[maker]}
        if None not in shapes and len(shapes) == 1 and shapes == made:
            joined.union(loop, *sorted(makers))
    return {value: joined[loop] for value, loop in loops.items()}


def _values(loops: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
    """Loop -> what comes out of it."""
    found: dict[int, list[int]] = {}
    for value, loop in loops.items():
        found.setdefault(loop, []).append(value)
    return found


def _read_last(values: Sequence[int], cones: Mapping[int, _Cone], depths: Mapping[int, int]) -> AbstractSet[int]:
    """What is made right before these values of one depth, and read for them."""
    before = depths[values[0]] - 1
    return {s for v in values for s in cones[v].sources if depths.get(s, 0) == before > 0}


def _held(layout: Layout | None, shape: tuple[int, ...], submesh: Mapping[str, int]) -> tuple[int, ...]:
    """The extents of a device's piece; None: of all."""
    return local_shape(tuple(max(d, -1) for d in layout), shape, tuple(submesh.values())) if layout else shape


def _longer(extent: int, to: int) -> float:
    """How many times longer a dimension is in tiles."""
    return math.ceil(extent / to) * to / extent if extent else 0.0


def _tiled(shape: Sequence[int], tile: tuple[int, int]) -> int:
    """Elements that an array takes in tiles, its dimensions in the order that pads it least."""
    rows, columns = tile
    longer = [(_longer(n, rows), _longer(n, columns)) for n in shape]
    pairs = [a[0] * b[1] for i, a in enumerate(longer) for j, b in enumerate(longer) if i != j]
    return round(math.prod(shape) * min(pairs, default=longer[0][1] if longer else 1.0))


def _within_one_loop(
    products: frozenset[int], cones: Mapping[int, _Cone], loops: Mapping[int, int], made: Mapping[int, Op]
) -> list[int]:
    """Results of products that one loop alone reads, no product or reduction."""
    readers: dict[int, set[int]] = {}
    for value, cone in cones.items():
        for source in products.intersection(cone.sources):
            readers.setdefault(source, set()).add(value)
    return [
        product
        for product, values in readers.items()
        if len({loops[v] for v in values}) == 1
        and not any(made[v].name in (*PRODUCTS, *REDUCTIONS, *KERNELS) for v in values)
    ]
