"""Memory of every plan of a stage: the rows of its optimization problem.

A device of a stage with n microbatches in flight, between their first and their last pass, holds

    at a moment of a pass       state + sums + batch + (n - 1) stash + what is live of one microbatch
    between two passes          state + sums + batch + n stash + copies
    at a moment of an update    state + sums + what is live, offloaded state included

State, sums, batch and stash are sums over values in their layouts. Copies of one value in several layouts count as the
largest of them; with any one of them for every value, the sum is a lower bound. Every moment is therefore a row that is
linear in the decisions, as of a step on one mesh (`autopar.cost_models.memory.liveness`), and the peak is the largest
row.

    decisions  ->  bytes by kind      StageLiveness.memory
               ->  peak, rows         StageRows, for one number of microbatches in flight
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models import offload
from autopar.cost_models.memory.liveness import Liveness, highest_peaks
from autopar.cost_models.memory.row import Row, weighted_sum
from autopar.cost_models.sharding.groups import Binding, Model
from autopar.cost_models.sharding.strategies import share, shares
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Type
from autopar.ir.keyed import grouped
from autopar.ir.problem import Floats, Ints
from autopar.passes.stages.divide import PASS_KINDS
from autopar.passes.stages.graph import BEGIN, StageGraph

Point: TypeAlias = int | tuple[int, ...]
"""A moment of the liveness; or a moment between passes, by the copies that count then, as indices of buffers."""


@dataclass(frozen=True)
class StageMemory:
    """Predicted bytes per device of one planned stage.

    Attributes:
        state: arguments that it stores or reads whole: parameters, optimizer state.
        sums: accumulators, from the first pass to the update.
        batch: the blocks of all microbatches.
        copies: results of the prologue, and copies of these and of arguments in other layouts, while passes run.
        stash: per microbatch, residuals of forward passes for backward passes, values received included.
        temporaries: the peak of all else that is live in a pass.
        update: the peak of all else besides state and sums that is live in an update, new state included.
    """

    state: float
    sums: float
    batch: float
    copies: float
    stash: float
    temporaries: float
    update: float

    def scaled(self, share: float) -> StageMemory:
        """All bytes times `share`."""
        return StageMemory(*(share * nbytes for nbytes in astuple(self)))

    def peak(self, in_flight: int) -> float:
        """Peak bytes with `in_flight` microbatches between F and the last pass."""
        passes = self.batch + self.copies + in_flight * self.stash + self.temporaries
        return self.state + self.sums + max(passes, self.update)


@dataclass(frozen=True, slots=True)
class _Stored:
    """Values of the graph whose bytes do not depend on the moment; a value counts once per occurrence.

    Attributes:
        values: the values.
        times: how often each is there.
        wide: those whose numbers have at least four bytes, as those of sums.
    """

    values: Sequence[int]
    times: int = 1
    wide: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class StageLiveness:
    """The memory of every plan of one stage.

    Attributes:
        graph: the stage.
        model: its optimization problem.
        mesh: its submesh.
        liveness: of its graph, with one microbatch.
        offloaded: positions of the arguments of its graph that are in host memory between steps. They are on the device
            for the update alone.
    """

    graph: StageGraph
    model: Model
    mesh: LogicalMesh
    liveness: Liveness
    offloaded: tuple[int, ...] = ()
    rows_by_point: dict[tuple[Point, int], Row] = field(default_factory=dict[tuple[Point, int], Row])

    def memory(self, assignment: Ints) -> StageMemory:
        """Bytes per device of a plan, by kind.

        The stash counts every value once, in its layout. Of a forward value that is recomputed at every reader, it has
        the operands instead.
        """
        state, sums, batch, stash = self.constants(assignment)
        sizes = self.liveness.sizes(assignment)
        transient = self.transient(sizes)
        copies, _ = self.shared_copies(sizes)
        temporaries = max(0.0, float(transient[self.in_pass].max(initial=0.0)) - copies - stash)
        update = float(transient[~self.in_pass].max(initial=0.0))
        return StageMemory(state, sums, batch, copies, stash, temporaries, update)

    def stored_row(self, arguments: Collection[int], totals: Collection[int]) -> tuple[Row, Row]:
        """The state and the sums of `memory`, of these arguments and totals of the step alone."""
        graph, wide = self.graph, self._stored[1].wide
        sums = (graph.accumulated(v) for v in graph.accumulators if v in totals)
        values = tuple(a for a in sums if isinstance(a, int) and a in wide)
        state = _Stored(tuple(graph.arguments[v] for v in sorted(arguments) if v in graph.arguments))
        return self._stored_row("state", state), self._stored_row("sums", _Stored(values, wide=wide))

    def copies_row(self, values: Collection[int]) -> Row:
        """A lower bound on the copies of `memory`: of each of these values of the graph, the copy that may be largest.

        With any one copy of every value the sum is a lower bound.
        """
        copies = grouped((v, i) for i in self._copies if (v := self.liveness.buffers[i].value) in values)
        return self.liveness.row_of("copies", [max(of_value, key=self.liveness.most) for of_value in copies.values()])

    def least(self) -> StageMemory:
        """A lower bound on the memory of every plan: even shards, without copies and temporaries."""
        state, sums, batch, stash = (self._even_bytes(stored) for stored in self._stored)
        return StageMemory(state, sums, batch, 0.0, stash, 0.0, 0.0)

    def nbytes(self, values: Sequence[int], assignment: Ints) -> float:
        """Bytes per device of values of the graph in their layouts."""
        return self._stored_row("values", _Stored(values)).value(self.model.problem, assignment)

    def least_bytes(self, values: Sequence[int]) -> float:
        """The same in even shards."""
        return self._even_bytes(_Stored(values))

    def host_bytes(self, assignment: Ints) -> float:
        """Bytes per device of the state in host memory."""
        return offload.host_bytes(self.model, self.graph.graph, self.mesh, self.offloaded, assignment)

    def constants(self, assignment: Ints) -> tuple[float, ...]:
        """Bytes of state, sums, the batch and the stash."""
        return tuple(row.value(self.model.problem, assignment) for row in self._constant_rows)

    def rows(self, in_flight: int) -> StageRows:
        """The rows with `in_flight` microbatches between F and the last pass."""
        return StageRows(self, in_flight)

    def row(self, point: Point, in_flight: int) -> Row:
        """What a device holds at one point."""
        if (point, in_flight) not in self.rows_by_point:
            self.rows_by_point[point, in_flight] = self._row(point, in_flight)
        return self.rows_by_point[point, in_flight]

    def _row(self, point: Point, in_flight: int) -> Row:
        state, sums, batch, stash = self._constant_rows
        if isinstance(point, tuple):
            name = f"between passes, with copies {', '.join(map(str, point)) or 'of nothing'}"
            copies = self.liveness.row_of(name, point)
            return weighted_sum(name, (1, state), (1, sums), (1, batch), (in_flight, stash), (1, copies))
        live = self.liveness.beside_arguments(point)
        if self.in_pass[point]:
            return weighted_sum(live.name, (1, live), (1, state), (1, sums), (1, batch), (in_flight - 1, stash))
        return weighted_sum(live.name, (1, live), (1, state), (1, sums))

    @cached_property
    def in_pass(self) -> NDArray[np.bool_]:
        """At every moment whether a pass runs; otherwise an update does."""
        program_of = self.graph.program_of
        return np.array([program_of(step.op.index) in PASS_KINDS for step in self.liveness.moments], bool)

    @cached_property
    def _stored(self) -> tuple[_Stored, ...]:
        """State, sums, the batch and the stash."""
        graph = self.graph
        in_host_memory = {graph.graph.inputs[i] for i in self.offloaded}
        accumulated = (graph.accumulated(v) for v in graph.accumulators)
        sums = tuple(a for a in accumulated if isinstance(a, int))
        return (
            _Stored(tuple(a for a in graph.arguments.values() if a not in in_host_memory)),
            _Stored(sums, wide=frozenset(sums) - {*graph.parts.values()}),
            _Stored((*graph.blocks.values(),), graph.microbatches),
            _Stored(self._stashed),
        )

    @cached_property
    def _constant_rows(self) -> tuple[Row, ...]:
        """State, sums, the batch and the stash as rows."""
        names = ("state", "sums", "batch", "stash")
        return tuple(self._stored_row(name, stored) for name, stored in zip(names, self._stored, strict=True))

    def _stored_row(self, name: str, stored: _Stored) -> Row:
        constant, nodes = 0.0, dict[int, Floats]()
        types, bindings = self.graph.graph.types, self.model.grouping.bindings
        for v in stored.values:
            nbytes, binding = stored.times * _dense_bytes(types[v], v in stored.wide), bindings.get(v)
            if binding is None or binding.view is not None:
                constant += nbytes
            else:
                column = nbytes * self._shares(binding.group, binding.dims, types[v].shape)
                nodes[binding.group] = nodes[binding.group] + column if binding.group in nodes else column
        return Row(name, constant, nodes, {})

    def _even_bytes(self, stored: _Stored) -> float:
        types = self.graph.graph.types
        return sum(stored.times * _dense_bytes(types[v], v in stored.wide) for v in stored.values) / self.mesh.size

    def _shares(self, group: int, dims: Sequence[int], shape: Sequence[int]) -> Floats:
        """The share of a value on one device under every strategy of a group, padding included."""
        strategies = self.model.grouping.groups[group].strategies
        extents = {factor: shape[d] for d, factor in enumerate(dims) if factor >= 0}
        by_factor = [extents.get(factor, 1) for factor in range(len(strategies.sizes))]
        return share(shares(strategies.result, by_factor, self.mesh.sizes), [*extents])

    @cached_property
    def _stashed(self) -> Sequence[int]:
        return stashed_values(self.graph, self.model.grouping.bindings)

    def penalised_row(self, assignment: Ints, layers: float) -> Row:
        """Bytes that get a penalty: those live at the peak of one microbatch, and `layers` times persistent ones.

        Persistent are the state, accumulators of gradients, and values that passes share. The peak is that of the given
        plan.
        """
        sums = {*self._stored[1].values}
        values = {**self._shared_values, "argument": {*self.graph.arguments.values()}}
        values["value"] = values["value"] | sums
        buffers = enumerate(self.liveness.buffers)
        persistent = self.liveness.row_of("", [i for i, b in buffers if b.value in values.get(b.what, ())])
        _, peak = self.liveness.peak(assignment)
        return weighted_sum(f"{peak.name} + {layers:g} persistent", (1, peak), (layers, persistent))

    def transient(self, sizes: Floats) -> Floats:
        """Bytes beside arguments at every moment, shape (moments,), from the bytes of every buffer."""
        return self.liveness.profile_of(sizes)[:-1]

    def shared_copies(self, sizes: Floats) -> tuple[float, tuple[int, ...]]:
        """Bytes of the copies that passes share, of each value the largest, and their buffers by index.

        `sizes`: bytes of every buffer.
        """
        largest: dict[int, tuple[float, int]] = {}
        for i in self._copies:
            value, size = self.liveness.buffers[i].value, float(sizes[i])
            if size > largest.get(value, (0.0, -1))[0]:
                largest[value] = size, i
        return sum(size for size, _ in largest.values()), tuple(sorted(i for _, i in largest.values()))

    @cached_property
    def _copies(self) -> Sequence[int]:
        """Buffers of results of the prologue, and of copies of these and of arguments, that are live in passes."""
        moments = np.flatnonzero(self.in_pass)
        if not len(moments):
            return ()
        return tuple(
            i
            for i, buffer in enumerate(self.liveness.buffers)
            if buffer.birth <= moments[-1] and buffer.death >= moments[0]
            if buffer.value in self._shared_values.get(buffer.what, ())
        )

    @cached_property
    def _shared_values(self) -> Mapping[str, set[int]]:
        """Kind of a buffer -> values whose buffers of this kind passes share."""
        whole = {a for a in self.graph.whole.values() if isinstance(a, int)}
        return {"value": whole, "copy": whole | {*self.graph.arguments.values()}}


def stashed_values(graph: StageGraph, bindings: Mapping[int, Binding]) -> Sequence[int]:
    """Values that later passes of a stage read of earlier ones or of other stages; `bindings`: of its values."""
    program_of, received = graph.maker, {*graph.received.values()}
    producer = {v: op for op in graph.graph.ops for v in op.outputs}
    stashed: dict[int, None] = {}
    for op in graph.graph.ops:
        program = program_of.get(op.outputs[0], BEGIN) if op.outputs else BEGIN
        # passes that run after others of their microbatch
        if program not in ("B", "W"):
            continue
        stack, visited = [a for a in op.inputs if isinstance(a, int)], set[int]()
        while stack:
            value = stack.pop()
            if value in visited:
                continue
            visited.add(value)
            source_program = program_of.get(value, "F" if value in received else BEGIN)
            has_layout = value in bindings and bindings[value].view is None
            # without a layout of its own it is made where it is read, and what it reads is kept instead
            is_recomputed = value in producer and not has_layout and graph.graph.types[value].rank > 0
            if is_recomputed and source_program != BEGIN:
                stack.extend(a for a in producer[value].inputs if isinstance(a, int))
            elif source_program in PASS_KINDS and PASS_KINDS.index(source_program) < PASS_KINDS.index(program):
                stashed[value] = None
    return tuple(sorted(stashed))


def whole_bytes(nbytes: float) -> int:
    """Bytes rounded up, where less than a thousandth counts as an error of rounding."""
    return math.ceil(nbytes - 1e-3)


def _dense_bytes(type_: Type, wide: bool) -> float:
    return type_.size * (max(type_.itemsize, 4) if wide and "float" in type_.dtype else type_.itemsize)


@dataclass(frozen=True, eq=False)
class StageRows:
    """The rows of a stage with a number of microbatches in flight; a `RowSource`.

    Attributes:
        stage: the memory of its plans.
        in_flight: microbatches between F and the last pass.
    """

    stage: StageLiveness
    in_flight: int

    def peak(self, assignment: Ints) -> tuple[float, Row]:
        """Peak bytes of a plan, rounded up, and the row of the point where it is reached."""
        nbytes, point = max(self._local_peaks(assignment, -math.inf), key=lambda peak: peak[0])
        return float(whole_bytes(nbytes)), self.stage.row(point, self.in_flight)

    def over(self, assignment: Ints, nbytes: float) -> Sequence[Row]:
        """The rows of the highest local peaks of a plan above so many bytes, the highest first."""
        peaks = sorted(self._local_peaks(assignment, nbytes), key=lambda peak: -peak[0])
        return [self.stage.row(point, self.in_flight) for _, point in peaks]

    def rows(self) -> Sequence[Row]:
        """The peaks of two extreme plans: everywhere the cheapest, and everywhere the smallest strategy."""
        at_peak = (self.peak(a)[1] for a in self.stage.liveness.extremes())
        return tuple({row.name: row for row in at_peak}.values())

    def _local_peaks(self, assignment: Ints, above: float) -> Iterator[tuple[float, Point]]:
        """(bytes, point) of the highest local peaks of a plan above so many bytes."""
        stage, n = self.stage, self.in_flight
        state, sums, batch, stash = stage.constants(assignment)
        sizes = stage.liveness.sizes(assignment)
        copies, buffers = stage.shared_copies(sizes)
        if (between := state + sums + batch + n * stash + copies) > above:
            yield between, buffers
        at_moments = state + sums + stage.transient(sizes) + np.where(stage.in_pass, batch + (n - 1) * stash, 0.0)
        yield from ((float(at_moments[m]), m) for m in highest_peaks(at_moments, above))
