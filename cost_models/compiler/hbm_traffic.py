"""HBM traffic: bytes that each device reads and writes in its memory under a plan; per kernel, operands and results.

Compilers fuse elementwise operations with their neighbours. A value is in memory if                         -> _stored

    it is an argument, a result, a constant, or enters or leaves a loop's body
    a collective moves or reduces it
    it is not light, or has readers that do not compute it         -> autopar.cost_models.compiler.fusion.BYTES_ACCESSED
    and it is not a product that one fused loop alone reads                                         -> _within_one_loop

All other values exist only inside fused loops, including the operand of a single product. Of the values in memory

    those that share an operation they are computed from, and none is computed from another, are results of one loop
                                                                                                             -> _loops
    reductions run in the loop that computes their operand, if their other operands are complete before
                                                                                                  -> _merge_reductions

and a loop reads each value that it is computed from once, and none that it computes. Arrays are padded to whole tiles
                                                                                                             -> _tiled

A collective reads its operand and writes its result. An all-to-all that splits or joins columns moves more: its pieces
are arranged in tiles of their own                                                                           -> _Moves

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
from typing import Protocol

from networkx.utils import UnionFind

from autopar.cost_models.compiler.fusion import BYTES_ACCESSED, KERNEL, LIGHT, PRODUCT, REDUCTION, Fusion
from autopar.cost_models.precision import rounded, rounds
from autopar.hardware.description import Device
from autopar.ir.collective import Collective
from autopar.ir.graph import Body, Graph, Op
from autopar.ir.keyed import grouped
from autopar.ir.layout import Layout, local_shape


class LayoutsOnMesh(Protocol):
    """The layouts of a program, and the sizes of the axes of its mesh, such as a stage of a plan."""

    @property
    def submesh(self) -> Mapping[str, int]: ...
    @property
    def values(self) -> Mapping[int, Layout]: ...
    @property
    def uses(self) -> Mapping[str, Layout]: ...


def bytes_accessed(graph: Graph, stage: LayoutsOnMesh, collectives: Sequence[Collective], device: Device) -> float:
    """Bytes that each device reads and writes in its memory per step.

    Args:
        graph: the program.
        stage: its layouts.
        collectives: of the plan.
        device: cost model of the devices.
    """
    counter = _Counter(graph, stage, frozenset(c.op for c in collectives), device)
    moves = _Moves(graph, stage, device)
    moved = sum(c.count * moves.bytes(c) for c in collectives)
    return moved + sum(body.runs * counter.body(body) for body in graph.bodies)


def values_in_memory(
    graph: Graph, stage: LayoutsOnMesh, collectives: Sequence[Collective], device: Device
) -> frozenset[int]:
    """The values that operations without bodies compute and that `bytes_accessed` takes to be in memory."""
    counter = _Counter(graph, stage, frozenset(c.op for c in collectives), device)
    return frozenset(v for body in graph.bodies for v in counter.in_memory(body, _producers(body)))


def _producers(body: Body) -> Mapping[int, Op]:
    """Value -> the operation without regions that computes it."""
    return {v: op for op in body.ops if not op.regions for v in op.outputs}


@dataclass(frozen=True, eq=False)
class _Moves:
    """Bytes that collectives read and write: an operand and a result; for gather and scatter one of them is a shard.

    Operands that a product rounds are rounded before they are moved. On devices with tiles, an all-to-all that splits
    the last dimension d by n writes n pieces of d / n columns, padded to tiles, and once more with the pieces as the
    leading dimension; one that joins it does the reverse. If this pads, the pieces are made dense on both sides of the
    wire. These are observations of compiled programs.
    """

    graph: Graph
    stage: LayoutsOnMesh
    device: Device

    @cached_property
    def read(self) -> Mapping[str, tuple[int, Op | None]]:
        """Site -> the value that is read there, and the operation that reads it; None for results."""
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
        """Bytes of the larger buffer of a collective, as it is moved."""
        value, op = self.read.get(c.op, (-1, None))
        if op is None or not self.device.rounds_operands or not rounds(op, self.graph.types[value]):
            return c.bytes
        type_ = self.graph.types[value]
        return c.bytes * rounded(type_).itemsize / type_.itemsize

    def _retiled(self, c: Collective, nbytes: float) -> float:
        """Bytes that an all-to-all of columns moves besides its operand and its result."""
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
        # the operand's shard, sharded further by the axes of the all-to-all: one of the pieces that are sent
        further = tuple(d if i in axes else -1 for i, d in enumerate(target))
        piece = _piece_shape(further, _piece_shape(before, shape, self.stage.submesh), self.stage.submesh)
        pieces = (*piece, math.prod(self.stage.submesh[a] for a in c.axes))
        padded = nbytes * max(1.0, _tiled(pieces, self.device.tile) / math.prod(pieces))
        dense = 4 * (nbytes + padded) if padded > nbytes else nbytes + padded if cuts else 0.0
        return 2 * padded + dense


@dataclass(frozen=True, slots=True)
class _FusedInputs:
    """What one value in memory is computed from.

    Attributes:
        ops: the first array operations that are fused with it. Values that share any operation share all operations
            that the shared one is computed from, and so one of these.
        sources: values in memory -> bytes read.
    """

    ops: frozenset[int]
    sources: Mapping[int, int]

    def of(self, op: int) -> _FusedInputs:
        """The same with the operation that computes the value, even if its result is a scalar."""
        return self if op in self.ops else _FusedInputs(self.ops | {op}, self.sources)


@dataclass(eq=False)
class _Counter:
    """Counts the bytes of region bodies.

    Attributes:
        graph: the program.
        stage: its layouts.
        moving: tags of all collectives.
        device: cost model of the devices.
        fusion: what is fused.
        piece_bytes: (layout, shape, itemsize) -> bytes of a shard.
        stored_bytes: value -> bytes of a shard in its planned layout.
        read_by: operation (by index) -> the values that it reads, with bytes.
    """

    graph: Graph
    stage: LayoutsOnMesh
    moving: AbstractSet[str]
    device: Device
    fusion: Fusion = BYTES_ACCESSED
    piece_bytes: dict[tuple[Layout | None, tuple[int, ...], int], int] = field(default_factory=dict)
    stored_bytes: dict[int, int] = field(default_factory=dict)
    read_by: dict[int, Sequence[tuple[int, int]]] = field(default_factory=dict)

    def local(self, value: int, site: str = "") -> int:
        """Bytes of a value on one device, in its planned layout or as it is read at a site."""
        layout = (self.stage.uses.get(site) if site else None) or self.stage.values.get(value)
        type_ = self.graph.types[value]
        key = (layout, type_.shape, type_.itemsize)
        nbytes = self.piece_bytes.get(key)
        if nbytes is None:
            shape = _piece_shape(layout, type_.shape, self.stage.submesh)
            nbytes = self.piece_bytes[key] = _tiled(shape, self.device.tile) * type_.itemsize
        return nbytes

    def local_stored(self, value: int) -> int:
        """Bytes of a value on one device in its planned layout."""
        nbytes = self.stored_bytes.get(value)
        if nbytes is None:
            nbytes = self.stored_bytes[value] = self.local(value)
        return nbytes

    def read(self, op: Op, k: int, value: int) -> int:
        """Bytes that an operation reads of operand `k`."""
        site = f"{op.tag}.in{k}" if op.index in self.resharding_ops else ""
        nbytes = self.local(value, site) if site in self.stage.uses else self.local_stored(value)
        if not self.device.rounds_operands:
            return nbytes
        moved = site in self.stage.uses and rounds(op, self.graph.types[value])
        return self._narrow(value, nbytes, rounding=moved or value in self.rounded)

    def reads(self, op: Op) -> Sequence[tuple[int, int]]:
        """The values that an operation reads, operand by operand, and bytes of each."""
        reads = self.read_by.get(op.index)
        if reads is None:
            if self.device.rounds_operands or op.index in self.resharding_ops:
                reads = [(atom, self.read(op, k, atom)) for k, atom in enumerate(op.inputs) if isinstance(atom, int)]
            else:
                reads = [(atom, self.local_stored(atom)) for atom in op.inputs if isinstance(atom, int)]
            self.read_by[op.index] = reads
        return reads

    def written(self, value: int) -> int:
        """Bytes that are written of a value."""
        nbytes = self.local_stored(value)
        return self._narrow(value, nbytes, rounding=value in self.rounded) if self.device.rounds_operands else nbytes

    def _narrow(self, value: int, nbytes: int, *, rounding: bool) -> int:
        type_ = self.graph.types[value]
        return nbytes * rounded(type_).itemsize // type_.itemsize if rounding else nbytes

    @cached_property
    def resharding_ops(self) -> AbstractSet[int]:
        """Operations (by index) that read an operand in another layout than its planned one."""
        return _operations(self.stage.uses)

    @cached_property
    def gathering_ops(self) -> AbstractSet[int]:
        """Operations (by index) with an operand that a collective moves."""
        return _operations(site for site in self.moving if "." in site)

    @cached_property
    def summing(self) -> AbstractSet[int]:
        """Operations (by index) whose results a collective reduces."""
        return _operations(site for site in self.moving if "." not in site)

    @cached_property
    def rounded(self) -> AbstractSet[int]:
        """Values that only products read, all of which round them; no arguments or results."""
        narrow_by_value: dict[int, bool] = {}
        for op in self.graph.walk():
            for atom in op.inputs:
                if isinstance(atom, int):
                    narrow_by_value[atom] = narrow_by_value.get(atom, True) and rounds(op, self.graph.types[atom])
        fixed = {a for a in (*self.graph.inputs, *self.graph.outputs) if isinstance(a, int)}
        return {value for value, narrow in narrow_by_value.items() if narrow} - fixed

    def body(self, body: Body) -> float:
        """Bytes of one run of a body, without those of its regions."""
        producers = _producers(body)
        fused_inputs = self.in_memory(body, producers)
        depths = _depths(fused_inputs)
        loops = _loops(fused_inputs, self._of_kind(PRODUCT, fused_inputs, producers), depths)
        complete = {v for v in fused_inputs if producers[v].index not in self.summing}
        reductions = complete.intersection(self._of_kind(REDUCTION, fused_inputs, producers))
        # elementwise results that no collective moves or reduces
        light = {v: self.graph.types[v].shape for v in complete if self._kind(producers[v]) == LIGHT}
        merged = _merge_reductions(fused_inputs, loops, depths, frozenset(reductions), complete)
        merged = _merge_elementwise(fused_inputs, merged, depths, light)
        return self._bytes(fused_inputs, merged)

    def in_memory(self, body: Body, producers: Mapping[int, Op]) -> Mapping[int, _FusedInputs]:
        """The fused inputs of every value that a body computes and that is in memory."""
        fused_inputs, stored = self._fused_inputs(body.ops, producers, self._stored(body))
        if not self.fusion.products_absorb:
            return fused_inputs
        products = self._of_kind(PRODUCT, fused_inputs, producers)
        light = self._of_kind(LIGHT, fused_inputs, producers)
        within = _within_one_loop(products, light, fused_inputs, _loops(fused_inputs, products, _depths(fused_inputs)))
        fixed = {*body.inputs, *body.outputs}
        fused = {v for v in within if v not in fixed and producers[v].index not in self.summing}
        return self._fused_inputs(body.ops, producers, stored - fused)[0] if fused else fused_inputs

    def _of_kind(self, kind: str, values: Iterable[int], producers: Mapping[int, Op]) -> frozenset[int]:
        return frozenset(v for v in values if self.fusion.kind(producers[v]) == kind)

    def _stored(self, body: Body) -> frozenset[int]:
        """The values that are in memory if the results of all products are."""
        stored = {*body.inputs, *(a for a in body.outputs if isinstance(a, int))}
        readers: dict[int, Counter[str]] = {}
        for op in body.ops:
            kind = self._kind(op)
            for k, a in enumerate(op.inputs):
                if isinstance(a, int):
                    moved = op.index in self.gathering_ops and f"{op.tag}.in{k}" in self.moving
                    readers.setdefault(a, Counter())[KERNEL if moved else kind] += 1
            if kind != LIGHT or op.index in self.summing:
                stored.update(op.outputs)
        stored.update(v for v, kinds in readers.items() if self.fusion.is_written(kinds))
        computed = {v for op in body.ops for v in op.outputs}
        return frozenset(stored - computed.difference(self.stage.values))  # free values and views are never stored

    def _kind(self, op: Op) -> str:
        return KERNEL if self._retiles(op) else self.fusion.kind(op)

    def _retiles(self, op: Op) -> bool:
        """Whether a reshape copies, because it splits or merges the dimension along the columns of tiles."""
        if op.name != "reshape" or self.device.tile == (1, 1):
            return False
        before, after = ([n for n in self.graph.type_of(a).shape if n > 1][-1:] for a in (op.inputs[0], op.outputs[0]))
        return before != after

    def _fused_inputs(
        self, ops: Sequence[Op], producers: Mapping[int, Op], stored: AbstractSet[int]
    ) -> tuple[dict[int, _FusedInputs], frozenset[int]]:
        """The fused inputs of every value in memory that is computed here, and the set of values in memory.

        In memory are the values in `stored`, and results of operations with more sources than a loop reads.
        """
        by_op: dict[int, _FusedInputs] = {}  # by the operation's index
        in_memory = set(stored)
        for op in ops:
            if op.index not in by_op and any(producers.get(v) is op for v in op.outputs):
                inputs_of_value = by_op[op.index] = self._inputs_of(op, by_op, producers, in_memory)
                if len(inputs_of_value.sources) > self.fusion.most_inputs:
                    in_memory.update(v for v in op.outputs if v in self.stage.values)
        return {v: by_op[op.index].of(op.index) for v, op in producers.items() if v in in_memory}, frozenset(in_memory)

    def _inputs_of(
        self, op: Op, by_op: Mapping[int, _FusedInputs], producers: Mapping[int, Op], stored: AbstractSet[int]
    ) -> _FusedInputs:
        """The fused inputs of an operation. Scalars are computed at each use, so that loops do not share them."""
        memory, fused = self._links(op, producers, stored)
        makers = [by_op[maker.index] for maker in fused]
        first = frozenset[int]().union(*(maker.ops for maker in makers))
        if not first and self._is_array(op):
            first = frozenset([op.index])
        sources: dict[int, int] = {}
        for atom, size in itertools.chain(memory, *(maker.sources.items() for maker in makers)):
            if size > sources.get(atom, -1):
                sources[atom] = size
        return _FusedInputs(first, sources)

    def _is_array(self, op: Op) -> bool:
        return any(self.graph.types[v].rank for v in op.outputs)

    def _links(
        self, op: Op, producers: Mapping[int, Op], stored: AbstractSet[int]
    ) -> tuple[Sequence[tuple[int, int]], Sequence[Op]]:
        """Values that an operation reads from memory, with bytes, and the fused operations that compute the rest."""
        memory: list[tuple[int, int]] = []
        fused: list[Op] = []
        for atom, size in self.reads(op):
            maker = None if atom in stored else producers.get(atom)
            if maker is None:
                memory.append((atom, size))
            else:
                fused.append(maker)
        return memory, fused

    def _bytes(self, fused_inputs: Mapping[int, _FusedInputs], loops: Mapping[int, int]) -> float:
        read: dict[int, dict[int, int]] = {}  # loop -> value -> bytes
        for value, inputs_of_value in fused_inputs.items():
            mine = read.setdefault(loops[value], {})
            for source, size in inputs_of_value.sources.items():
                if size > mine.get(source, 0) and loops.get(source) != loops[value]:
                    mine[source] = size
        return sum(sum(mine.values()) for mine in read.values()) + sum(map(self.written, fused_inputs))


def _operations(sites: Iterable[str]) -> AbstractSet[int]:
    """The operations (by index) that sites such as "op12.in0" belong to."""
    tags = (site.partition(".")[0] for site in sites)
    return {int(tag.removeprefix("op")) for tag in tags if tag.startswith("op")}


def _depths(fused_inputs: Mapping[int, _FusedInputs]) -> Mapping[int, int]:
    """Value -> length of the longest chain of values in memory up to it; 0 for arguments."""
    depths: dict[int, int] = {}
    for value, inputs_of_value in fused_inputs.items():  # in program order: sources come first
        depths[value] = 1 + max([depths.get(source, 0) for source in inputs_of_value.sources], default=0)
    return depths


def _loops(
    fused_inputs: Mapping[int, _FusedInputs], products: AbstractSet[int], depths: Mapping[int, int]
) -> Mapping[int, int]:
    """Value -> the number of the loop that computes it.

    Equal for values of one depth that share an operation; each product has a loop of its own.
    """
    owners: dict[int, dict[int, int]] = {}  # depth -> operation -> a value that is computed with it
    joined: UnionFind[int] = UnionFind(fused_inputs)
    for value, inputs_of_value in fused_inputs.items():
        owner = owners.setdefault(depths[value], {})
        values = {owner.setdefault(op, value) for op in (() if value in products else inputs_of_value.ops)}
        joined.union(value, *sorted(values))
    return {value: joined[value] for value in fused_inputs}


def _merge_reductions(
    fused_inputs: Mapping[int, _FusedInputs],
    loops: Mapping[int, int],
    depths: Mapping[int, int],
    reductions: frozenset[int],
    complete: AbstractSet[int],
) -> Mapping[int, int]:
    """The loops, with loops of reductions alone merged into the loop that computes their operand.

    Args:
        fused_inputs, loops, depths: by value.
        reductions: values that reductions compute.
        complete: values that no collective reduces.
    """
    merged = dict(loops)
    for values in _values(loops).values():
        if not reductions.issuperset(values):
            continue
        last = _read_last(values, fused_inputs, depths)
        makers = dict.fromkeys(merged[s] for s in last)
        if len(makers) == 1 and complete >= last:
            merged.update(dict.fromkeys(values, next(iter(makers))))
    return merged


def _merge_elementwise(
    fused_inputs: Mapping[int, _FusedInputs],
    loops: Mapping[int, int],
    depths: Mapping[int, int],
    light: Mapping[int, tuple[int, ...]],
) -> Mapping[int, int]:
    """The loops, with loops of `light` values merged with all loops that compute their last operands, in one shape.

    Optimizer moments and the parameter that is computed from them are results of one loop, for example.
    """
    groups = _values(loops)
    joined: UnionFind[int] = UnionFind(groups)
    for loop, values in groups.items():
        shapes = {light.get(v) for v in values}
        makers = {loops[s] for s in _read_last(values, fused_inputs, depths)}
        maker_shapes = {light.get(v) for maker in makers for v in groups[maker]}
        if None not in shapes and len(shapes) == 1 and shapes == maker_shapes:
            joined.union(loop, *sorted(makers))
    return {value: joined[loop] for value, loop in loops.items()}


def _values(loops: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
    """Loop -> the values that it computes."""
    return grouped((loop, value) for value, loop in loops.items())


def _read_last(
    values: Sequence[int], fused_inputs: Mapping[int, _FusedInputs], depths: Mapping[int, int]
) -> AbstractSet[int]:
    """The values of the depth just below these values (of one depth) from which they are computed."""
    before = depths[values[0]] - 1
    return {s for v in values for s in fused_inputs[v].sources if depths.get(s, 0) == before > 0}


def _piece_shape(layout: Layout | None, shape: tuple[int, ...], submesh: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a device's shard; the whole shape if there is no layout."""
    return local_shape(tuple(max(d, -1) for d in layout), shape, tuple(submesh.values())) if layout else shape


def _longer(extent: int, to: int) -> float:
    """The factor by which tiles lengthen a dimension."""
    return math.ceil(extent / to) * to / extent if extent else 0.0


def _tiled(shape: Sequence[int], tile: tuple[int, int]) -> int:
    """Elements that an array takes in tiles, with its dimensions in the order that pads least."""
    rows, columns = tile
    longer = [(_longer(n, rows), _longer(n, columns)) for n in shape]
    pairs = [a[0] * b[1] for i, a in enumerate(longer) for j, b in enumerate(longer) if i != j]
    return round(math.prod(shape) * min(pairs, default=longer[0][1] if longer else 1.0))


def _within_one_loop(
    products: frozenset[int], light: frozenset[int], fused_inputs: Mapping[int, _FusedInputs], loops: Mapping[int, int]
) -> list[int]:
    """Results of products that only one loop reads, and no product, reduction or kernel."""
    readers: dict[int, set[int]] = {}
    for value, inputs_of_value in fused_inputs.items():
        for source in products.intersection(inputs_of_value.sources):
            readers.setdefault(source, set()).add(value)
    return [product for product, values in readers.items() if len({loops[v] for v in values}) == 1 and values <= light]
