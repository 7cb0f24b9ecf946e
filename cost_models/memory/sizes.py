"""Sizes of buffers under every choice of layouts.

    bytes(buffer, strategy)  =  itemsize * prod_d ceil(extent_d / parts_d(strategy)) * padding to tiles   -> piece_bytes
                             =  0 where it stays in on-chip memory                                        -> Sizes._near

All buffers of one kind (layout classes, shape) share one run of numbers; a buffer points to where its run starts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.cost_models.compiler.backends import Backend
from autopar.cost_models.compiler.compiled_program import Frame, Program, Step
from autopar.cost_models.compiler.fusion import LIGHT
from autopar.cost_models.compiler.lifetimes import Lifetimes
from autopar.cost_models.compiler.written_values import Written
from autopar.cost_models.sharding.groups import Model
from autopar.cost_models.sharding.strategies import StrategySet, shares
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph
from autopar.ir.problem import Floats

NEAR = 1  # most moments between what makes a buffer in on-chip memory and what reads it last, outside of loops
WHOLE = 4  # times `Backend.near_bytes` is all of the on-chip memory
_TEMPORARY = ("value", "unsummed", "copy", "workspace")

#: A reader's end of an edge: consumer group, its factors for the dimensions, assigned; before it the bound value.
End = tuple[int, int, tuple[int, ...], bool]


class Buffer(NamedTuple):
    """Something that is in memory for a while.

    Attributes:
        what: "argument", "visit" (an argument that waits in the host's memory), "value", "unsummed", "copy"
            or "workspace" (of the body of a `shard_map`).
        value: the value of the graph that it holds.
        birth, death: first and last moment.
        node, edge: the decision or the edge that its size depends on, -1 if it is not that; both -1: nothing.
        at: where its run of sizes starts in `Buffers.sizes`.
    """

    what: str
    value: int
    birth: int
    death: int
    node: int
    edge: int
    at: int


class Kind(NamedTuple):
    """What the bytes of a value depend on.

    Attributes:
        shape, itemsize: whole, and bytes per element.
        first: the first dimension that may be tiled.
        rows: the last dimension is the one along rows of tiles; otherwise any may be.
    """

    shape: tuple[int, ...]
    itemsize: float
    first: int
    rows: bool = False


def _padding(local: Sequence[Floats], tile: tuple[int, int], count: int, rows: bool) -> Floats:
    """How much longer tiles make arrays of these extents, if the two dimensions that are tiled are chosen well."""

    def longer(extent: Floats, to: int) -> Floats:
        step = np.minimum(to, 2 ** np.ceil(np.log2(np.maximum(extent, 1)))) if to == tile[0] else to
        return np.ceil(extent / step) * step / np.maximum(extent, 1)  # an empty array has no tiles

    lanes = range(len(local) - 1 if rows else 0, len(local))
    pairs = [(i, j) for i in range(len(local)) for j in lanes if i != j]
    if tile == (1, 1) or not pairs:
        return np.ones(count)
    in_rows, in_lanes = ([longer(extent, to) for extent in local] for to in tile)
    return np.min([in_rows[i] * in_lanes[j] for i, j in pairs], axis=0)


def _bodies_first(frame: Frame) -> Iterator[Step]:
    """The steps of a frame, those of a loop's bodies before the loop."""
    for step in frame.steps:
        for inner in step.frames:
            yield from _bodies_first(inner)
        yield step


@dataclass(eq=False)
class Sizes:
    """Collects the buffers of one program and their sizes.

    Attributes:
        graph, model, mesh, backend: what the buffers are of.
        program, w, lives: its steps, what they write, and when it lives.
        makers: value -> the step that writes it.
        buffers, runs: the buffers so far, and their sizes.
    """

    graph: Graph
    model: Model
    mesh: LogicalMesh
    backend: Backend
    program: Program
    w: Written
    lives: Lifetimes
    makers: Mapping[int, Step]
    buffers: list[Buffer] = field(default_factory=list)
    runs: list[Floats] = field(default_factory=list)
    starts: dict[Hashable, int] = field(default_factory=dict)
    filled: int = 0
    kinds: dict[int, Kind] = field(default_factory=dict)  # by value
    shares: dict[tuple[int, bool], Floats] = field(default_factory=dict)  # by strategy set, as it runs or as it holds
    temporary_runs: dict[int, Floats] = field(default_factory=dict)  # start of a run of what comes and goes -> the run
    near: dict[tuple[int, float], int] = field(default_factory=dict)  # its start, bytes that stay near -> start without

    def all(self) -> Floats:
        """All runs one after the other."""
        return np.concatenate([np.zeros(0), *self.runs])

    def at(self, key: Hashable, make: Callable[[], Floats], fixed: bool = False) -> int:
        """Where the sizes of one kind start; made if they are not there yet.

        Args:
            key: of the kind.
            make: its bytes.
            fixed: it is in a part of the heap without temporaries, which would leave holes.
        """
        key = (key, fixed)
        if key not in self.starts:
            run = np.asarray(make(), np.float64).ravel() * (1.0 if fixed else self.backend.fragmentation)
            self.starts[key] = self._append(run)
            if not fixed:
                self.temporary_runs[self.starts[key]] = run
        return self.starts[key]

    def is_fixed(self, what: str, value: int) -> bool:
        """Whether such a buffer of a value is in the part of the heap without temporaries."""
        if what == "value" and self.backend.stacks_first:
            return self.program.root(value) in self.program.stacked
        return what == "argument"

    def _append(self, run: Floats) -> int:
        self.runs.append(run)
        self.filled += len(run)
        return self.filled - len(run)

    def piece_bytes(self, strategies: StrategySet, dims: tuple[int, ...], kind: Kind, assigned: bool = False) -> Floats:
        """Bytes of one device's piece of a value under each strategy, padding included."""
        factors = strategies.assigned if assigned else strategies.result
        each = self.shares.get((strategies.index, assigned))
        if each is None:
            each = self.shares[strategies.index, assigned] = shares(factors, strategies.sizes, self.mesh.sizes)
        whole = np.ones(len(factors))
        local = [n * (each[:, d] if d >= 0 else whole) for d, n in zip(dims, kind.shape, strict=True)]
        return self.laid_out(local, kind, len(factors))

    def pieces(self, layouts: np.ndarray, kind: Kind) -> Floats:
        """Bytes of one device's piece of a value in each of these layouts, shape (layouts, mesh axes)."""
        each = shares(layouts, kind.shape, self.mesh.sizes)
        return self.laid_out([n * each[:, d] for d, n in enumerate(kind.shape)], kind, len(layouts))

    def laid_out(self, local: Sequence[Floats], kind: Kind, count: int) -> Floats:
        """Bytes of arrays with these extents (one vector of `count` per dimension), in tiles if the backend has any."""
        size = np.prod(local, axis=0) if local else np.ones(count)
        padding = _padding(local[kind.first :], self.backend.tile, count, kind.rows)
        return kind.itemsize * np.broadcast_to(size, (count,)) * padding

    def kind(self, v: int) -> Kind:
        """What the bytes of a value depend on."""
        kind = self.kinds.get(v)
        if kind is None:
            kind = self.kinds[v] = self._kind(v)
        return kind

    def _kind(self, v: int) -> Kind:
        type_ = self.program.type_of(v)
        narrow = v in self.w.narrow and type_.dtype == "float32"
        first = self._firsts.get(v, 0)
        first = first if type_.rank - first > 1 else 0
        rows = narrow and v in self.makers and self.makers[v].name == "gather"  # products read it as it was gathered
        return Kind(type_.shape, type_.itemsize / 2 if narrow else float(type_.itemsize), first, rows)

    @cached_property
    def _firsts(self) -> Mapping[int, int]:
        """Value -> its first dimension that may be tiled, if that is not 0: the one behind the batch of a product.

        What is elementwise keeps the layout of what it reads, and a loop that of what it stores.
        """
        firsts: dict[int, int] = {}
        for step in _bodies_first(self.program.top) if self.backend.tile != (1, 1) else ():
            for v in step.outputs:
                if step.name == "dot_general":
                    first = len(step.op.params["dimension_numbers"][1][0])
                elif v in self.program.stacked:
                    stored = firsts.get(self.program.stacked[v], 0)
                    first = stored + (stored > 0)
                else:
                    read = map(self.program.behind, step.inputs if step.kind == LIGHT else ())
                    first = max((firsts.get(x, 0) for x in read if self._alike(x, v)), default=0)
                if first:
                    firsts[v] = first
        return firsts

    def _alike(self, v: int, other: int) -> bool:
        return self.program.type_of(v).shape == self.program.type_of(other).shape

    def add(self, what: str, value: int, birth: int, death: int, at: int, *, node: int = -1, edge: int = -1) -> None:
        if birth <= death:
            at = self._near(at, birth, death) if self.backend.near_bytes and what in _TEMPORARY else at
            self.buffers.append(Buffer(what, self.program.like.get(value, value), birth, death, node, edge, at))

    def _near(self, at: int, birth: int, death: int) -> int:
        """Sizes without those that stay in on-chip memory: of what is read at once, and of what a loop's body makes.

        Where every moment makes one array, as many bytes as on-chip memory has are there on average, if an array may
        take its share for as many moments as it lasts.
        """
        bodies = self.bodies
        inside = bodies[birth] >= 0 and bodies[birth] == bodies[death]
        if at not in self.temporary_runs or not (inside or death - birth <= NEAR):
            return at
        most = self.backend.near_bytes * min(1.0, WHOLE / (death - birth + 1))
        if (at, most) not in self.near:
            run = self.temporary_runs[at]
            self.near[at, most] = self._append(np.where(run <= most * self.backend.fragmentation, 0.0, run))
        return self.near[at, most]

    @cached_property
    def bodies(self) -> Sequence[int]:
        """For each moment, and the end, when the innermost loop around it began; -1 outside of loops."""
        loops: list[int] = []
        around: list[tuple[Step, int]] = []
        for moment, step in enumerate(self.lives.moments):
            ends = bool(around) and around[-1][0] is step
            if ends:
                around.pop()
            loops.append(around[-1][1] if around else -1)
            if step.frames and not ends:
                around.append((step, moment))
        return [*loops, -1]
