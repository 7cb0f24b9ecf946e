"""The programs of a planned stage: which arrays each reads from earlier ones, and how each is emitted.

An array of a stage has a key: a value of the stage's graph in its planned layout, or a copy of it in another layout.
All programs of the stage are traced once in order, to record which keys each reads from earlier ones
-> program_interfaces. Each program is then emitted by itself from those keys -> StageEmitter.emit. A copy that the plan
pays for once is therefore made once:

    copies of blocks            by the first pass that reads them; stored for later passes
    copies of whole values      by `begin`, if the plan shares them; otherwise in each pass
    constants, views            in each program that reads them
    copies in updates           in each update that reads them

Arrays that programs exchange are evenly sharded: axes that would shard a dimension unevenly are dropped -> even.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar.codegen.context import AnyMesh, Context, unreduced_layout
from autopar.codegen.emitter import Emitter
from autopar.ir.graph import Graph, Op
from autopar.ir.layout import PARTIAL, Layout, even, partial_axes, replicated, spec
from autopar.passes.stages.divide import PASS_KINDS
from autopar.passes.stages.graph import BEGIN
from autopar.passes.stages.plan_all import CodegenStage

Key = tuple[int, Layout | None]
"""A value of the graph and the layout of a copy of it; None: in its planned layout."""


@dataclass(frozen=True, eq=False)
class StageEmitter:
    """Emits the programs of one planned stage for a mesh."""

    plan: CodegenStage
    mesh: AnyMesh

    @property
    def graph(self) -> Graph:
        return self.plan.graph.graph

    @cached_property
    def context(self) -> Context:
        return Context(self.graph, self.plan.layouts, self.plan.rules, self.mesh, self.plan.mesh.names)

    @cached_property
    def ops(self) -> Mapping[str, tuple[Op, ...]]:
        """Program -> its operations."""
        programs = self.plan.graph.programs
        return {name: tuple(op for op in self.graph.ops if op.index in ops) for name, ops in programs.items()}

    @cached_property
    def loop_invariant(self) -> frozenset[int]:
        """Arguments and values of `begin`: the same for every microbatch."""
        made_by_begin = {v for v, name in self.plan.graph.maker.items() if name == BEGIN}
        return frozenset({*self.plan.graph.arguments.values(), *made_by_begin})

    # Layouts

    def layout(self, key: Key) -> Layout:
        """The layout of an array of this key between programs."""
        value, copy = key
        layout = copy or self.plan.layout(value) or replicated(len(self.plan.mesh.sizes))
        return even(layout, self.graph.types[value].shape, self.plan.mesh.sizes)

    def lead(self, key: Key) -> tuple[int, ...]:
        """Extents of the leading dimensions of an array of partial sums."""
        return tuple(self.plan.mesh.sizes[axis] for axis in partial_axes(self.layout(key)))

    def sharding(self, key: Key) -> NamedSharding:
        """The sharding of an array of this key."""
        layout = self.layout(key)
        rank = self.graph.types[key[0]].rank + len(partial_axes(layout))
        return NamedSharding(self.mesh, spec(unreduced_layout(layout), rank, self.plan.mesh.names))

    def result_layout(self, position: int) -> Layout:
        """The layout in which a result of the graph leaves the stage; never a partial sum."""
        atom, carried = self.graph.outputs[position], (self.graph.carried or {}).get(position)
        if carried is not None:
            return self.layout((self.graph.inputs[carried], None))
        if not isinstance(atom, int):
            return replicated(len(self.plan.mesh.sizes))
        wanted = self.plan.layouts.uses.get(f"out{position}")
        layout = self.layout((atom, wanted))
        return replicated(len(layout)) if PARTIAL in layout else layout

    def result_sharding(self, position: int) -> NamedSharding:
        """The sharding of a result of the graph."""
        rank = self.graph.type_of(self.graph.outputs[position]).rank
        named = spec(self.result_layout(position), rank, self.plan.mesh.names)
        return NamedSharding(self.mesh, named)

    # Emission

    def new_emitter(self, name: str, inputs: Mapping[Key, Any]) -> Emitter:
        """An emitter for a program with these inputs."""
        emitter = Emitter(self.context, {})
        self.prepare(emitter, name)
        for (value, copy), array in inputs.items():
            if copy is None:
                emitter.define(value, array, "enter")
            else:
                emitter.copies[value, copy] = self.context.constrain(array, copy)
        return emitter

    def prepare(self, emitter: Emitter, name: str) -> None:
        """Defines constants, and the free values and views of earlier programs, which are emitted at each use."""
        for value, array in self.graph.constants:
            emitter.define(value, array, "constant")
        for earlier in self.earlier_programs(name):
            for op in self.ops[earlier]:
                if emitter.is_lazy(op):
                    emitter.lazy.update((value, (op, k)) for k, value in enumerate(op.outputs))

    def earlier_programs(self, name: str) -> tuple[str, ...]:
        """Programs whose values a program may read, in order."""
        names = [*self.plan.graph.programs]
        earlier = names[: names.index(name)]
        in_loop = name in (BEGIN, *PASS_KINDS)
        return tuple(other for other in earlier if in_loop or other not in (BEGIN, *PASS_KINDS))

    def emit(
        self, name: str, inputs: Mapping[Key, Any], wanted: Iterable[Key], results: Iterable[int]
    ) -> ProgramOutputs:
        """Emits one program.

        Args:
            name: the program.
            inputs: the arrays that it reads, by key.
            wanted: keys of the arrays that it writes.
            results: positions of the results of the graph that it writes.
        """
        emitter = self.new_emitter(name, inputs)
        emitter.run(self.ops[name])
        result_arrays = {i: self.result(emitter, i) for i in results}  # first: may make copies that `wanted` names
        return ProgramOutputs({key: self.array_of(emitter, key) for key in wanted}, result_arrays)

    def array_of(self, emitter: Emitter, key: Key) -> Any:
        """The array of a key at the end of a program."""
        value, copy = key
        if copy is not None and self.has_layout(value):
            return emitter.in_layout(value, copy, f"copy of %{value}", emitter.producers.get(value))
        if copy is not None:
            return emitter.copies[value, copy]
        if value in emitter.lazy:
            return emitter.materialise(value, self.layout(key), f"%{value}", emitter.lazy[value][0])
        return emitter.arrays[value]

    def result(self, emitter: Emitter, position: int) -> Any:
        """The array of a result of the graph at the end of a program."""
        return emitter.output(position, self.graph.outputs[position], self.result_layout(position))

    def has_layout(self, value: int) -> bool:
        """Whether the plan has a layout for this value; not so for free values and views."""
        return value in self.plan.layouts.values


@dataclass(frozen=True, slots=True)
class ProgramOutputs:
    """Arrays that a program writes.

    Attributes:
        values: by key.
        results: by position of the result of the graph.
    """

    values: Mapping[Key, Any]
    results: Mapping[int, Any]


@dataclass(frozen=True, eq=False)
class ProgramInterfaces:
    """The arrays that the programs of a stage pass to each other.

    Attributes:
        reads: program -> keys that it reads from arguments and earlier programs, ascending.
        writes: program -> keys that later programs read from it, and its totals.
    """

    reads: Mapping[str, tuple[Key, ...]]
    writes: Mapping[str, tuple[Key, ...]]


def program_interfaces(
    stage: StageEmitter, results: Mapping[str, Sequence[int]], totals: Mapping[str, Sequence[int]]
) -> ProgramInterfaces:
    """The keys that each program of a stage reads and writes, found by tracing all of them.

    Args:
        stage: the stage.
        results: program -> positions of the results of the graph that it writes.
        totals: program -> values of the graph of which it adds one microbatch's part to a total.
    """
    tracer = _InterfaceTracer(stage, results, totals)
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in _types(stage)]
    jax.eval_shape(tracer.run, *avals)
    writes = _writes(tracer, {name: {(v, None) for v in totals.get(name, ())} for name in stage.ops})
    return ProgramInterfaces(
        {n: _sorted(k) for n, k in tracer.reads.items()}, {n: _sorted(k) for n, k in writes.items()}
    )


def _writes(tracer: _InterfaceTracer, totals: Mapping[str, set[Key]]) -> Mapping[str, set[Key]]:
    """Program -> its totals, and what it produces for later programs."""
    writes = dict(totals)
    for keys in tracer.reads.values():
        for key in keys:
            if key in tracer.producers:
                writes[tracer.producers[key]].add(key)
    return writes


def _sorted(keys: Iterable[Key]) -> tuple[Key, ...]:
    return tuple(sorted(keys, key=lambda key: (key[0], key[1] or ())))


def _types(stage: StageEmitter) -> Iterable[tuple[tuple[int, ...], Any]]:
    avals = stage.plan.graph.avals
    return ((aval.shape, aval.dtype) for aval in avals)


@dataclass(eq=False)
class _InterfaceTracer:
    """Emits all programs in order and records what each reads of the others.

    Attributes:
        stage: the stage.
        results, totals: see `program_interfaces`.
        reads: program -> keys that it reads from arguments and earlier programs.
        producers: key -> the program that makes it; none for arguments.
        arrays: key -> array, of all programs so far.
    """

    stage: StageEmitter
    results: Mapping[str, Sequence[int]]
    totals: Mapping[str, Sequence[int]]
    reads: dict[str, dict[Key, None]] = field(default_factory=dict)
    producers: dict[Key, str] = field(default_factory=dict)
    arrays: dict[Key, Any] = field(default_factory=dict)

    def run(self, *leaves: Any) -> None:
        self.arrays.update(((v, None), x) for v, x in zip(self.stage.graph.inputs, leaves, strict=True))
        begin: Emitter | None = None
        for name in self.stage.ops:
            emitter = self._new_emitter(name, begin)
            emitter.run(self.stage.ops[name])
            for value in self.totals.get(name, ()):
                self.producers[value, None] = name
                self.arrays[value, None] = self.stage.array_of(emitter, (value, None))
            for position in self.results.get(name, ()):
                self.stage.result(emitter, position)
            begin = emitter if begin is None else begin
            self._keep(name, emitter)

    def _new_emitter(self, name: str, begin: Emitter | None) -> Emitter:
        reads = self.reads.setdefault(name, {})
        arrays = _Arrays(self._array, reads)
        emitter = Emitter(self.stage.context, arrays)
        if begin is not None:
            emitter.copies = _Copies(lambda key: self._copy(name, key, begin), reads)
        self.stage.prepare(emitter, name)
        return emitter

    def _array(self, value: int) -> Any:
        return self.arrays[value, None]

    def _copy(self, name: str, key: Key, begin: Emitter) -> Any:
        """A copy that an earlier program has made, or that `begin` has to make; None if this program makes it."""
        value, layout = key
        if name not in PASS_KINDS or layout is None:
            return None
        if key not in self.arrays and value in self.stage.loop_invariant:
            if self.stage.plan.layouts.copies.get(value) != layout:
                return None
            self.producers[key] = BEGIN
            self.arrays[key] = self.stage.array_of(begin, key)
        return self.arrays.get(key)

    def _keep(self, name: str, emitter: Emitter) -> None:
        """Records the arrays of a program that later ones may read."""
        arrays: dict[Key, Any] = {(v, None): array for v, array in emitter.arrays.items() if self._produces(name, v)}
        copies: dict[Key, Any] = {}
        if name in PASS_KINDS:
            copies = {key: x for key, x in emitter.copies.items() if key[0] not in self.stage.loop_invariant}
        for key, array in {**arrays, **copies}.items():
            if key not in self.arrays:
                self.producers[key] = name
                self.arrays[key] = array

    def _produces(self, name: str, value: int) -> bool:
        return self.stage.plan.graph.maker.get(value) == name


class _Arrays(dict[int, Any]):
    """Arrays of a program; a missing one is taken from an earlier program and recorded in `reads`."""

    def __init__(self, earlier: Callable[[int], Any], reads: dict[Key, None]) -> None:
        super().__init__()
        self._earlier, self._reads = earlier, reads

    def __missing__(self, value: int) -> Any:
        self._reads[value, None] = None
        array = self[value] = self._earlier(value)
        return array


class _Copies(dict[tuple[int, Layout], Any]):
    """Copies of a program; a missing one is taken from an earlier program, if that has it, and recorded in `reads`."""

    def __init__(self, earlier: Callable[[Key], Any], reads: dict[Key, None]) -> None:
        super().__init__()
        self._earlier, self._reads = earlier, reads

    def get(self, key: tuple[int, Layout], default: Any = None) -> Any:
        if key not in self:
            copy = self._earlier(key)
            if copy is None:
                return default
            self._reads[key] = None
            self[key] = copy
        return self[key]
