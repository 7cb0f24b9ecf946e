"""A planned stage cut into its programs: what each reads of those before it, and how each is emitted.

An array of a stage is known by its key: a value of the stage's graph where it lives, or a copy of it in another layout.
Emission (`autopar.codegen.emit`) is run once through all programs of the stage, noting which keys each takes from an
earlier one -> cut. Each program is then emitted by itself from those keys -> Emitter.emit. What the plan pays once is
thus made once:

    copies of blocks            by the pass that first reads them, and kept for the later ones
    copies of whole values      by `begin`, if the plan shares them; otherwise in every pass anew
    constants, views            wherever they are read
    copies in updates           in every update that reads them

Between programs arrays lie in even pieces: where a layout cuts unevenly, those axes are left out -> even.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar.codegen import emit as codegen
from autopar.ir.graph import Graph, Op
from autopar.ir.layout import PARTIAL, REPLICATED, Layout, divides, partial_axes, replicated, spec
from autopar.passes.stages.divide import PASS_KINDS
from autopar.passes.stages.graph import BEGIN
from autopar.passes.stages.plan_all import CodegenStage

Key = tuple[int, Layout | None]
"""A value of the graph and the layout of a copy of it; None: where it lives."""


def even(layout: Layout, shape: Sequence[int], sizes: Sequence[int]) -> Layout:
    """The layout without the axes that cut unevenly."""
    kept = list(replicated(len(sizes)))
    for axis, dim in enumerate(layout):
        kept[axis] = dim
        if dim >= 0 and not divides(tuple(kept), shape, sizes):
            kept[axis] = REPLICATED
    return tuple(kept)


@dataclass(frozen=True, eq=False)
class Emitter:
    """Emits the programs of one planned stage for a mesh."""

    plan: CodegenStage
    mesh: codegen.AnyMesh

    @property
    def graph(self) -> Graph:
        return self.plan.graph.graph

    @cached_property
    def context(self) -> codegen.Context:
        return codegen.Context(self.graph, self.plan.layouts, self.plan.rules, self.mesh, self.plan.mesh.names)

    @cached_property
    def ops(self) -> Mapping[str, tuple[Op, ...]]:
        """Program -> its operations."""
        programs = self.plan.graph.programs
        return {name: tuple(op for op in self.graph.ops if op.index in ops) for name, ops in programs.items()}

    @cached_property
    def once(self) -> frozenset[int]:
        """Arguments and values that passes read whole."""
        made = {v for v, name in self.plan.graph.maker.items() if name == BEGIN}
        return frozenset({*self.plan.graph.arguments.values(), *made})

    # Layouts

    def layout(self, key: Key) -> Layout:
        """How an array of this key lies between programs."""
        value, copy = key
        found = copy or self.plan.layout(value) or replicated(len(self.plan.mesh.sizes))
        return even(found, self.graph.types[value].shape, self.plan.mesh.sizes)

    def lead(self, key: Key) -> tuple[int, ...]:
        """Extents of the leading dimensions of an array of partial sums."""
        return tuple(self.plan.mesh.sizes[axis] for axis in partial_axes(self.layout(key)))

    def sharding(self, key: Key) -> NamedSharding:
        """The sharding of an array of this key."""
        layout = self.layout(key)
        rank = self.graph.types[key[0]].rank + len(partial_axes(layout))
        return NamedSharding(self.mesh, spec(codegen.of_parts(layout), rank, self.plan.mesh.names))

    def result_layout(self, position: int) -> Layout:
        """How a result of the graph is handed out."""
        atom, carried = self.graph.outputs[position], (self.graph.carried or {}).get(position)
        if carried is not None:
            return self.layout((self.graph.inputs[carried], None))
        if not isinstance(atom, int):
            return replicated(len(self.plan.mesh.sizes))
        wanted = self.plan.layouts.uses.get(f"out{position}")
        layout = self.layout((atom, wanted))
        return replicated(len(layout)) if PARTIAL in layout else layout

    def result_sharding(self, position: int) -> NamedSharding:
        rank = self.graph.type_of(self.graph.outputs[position]).rank
        named = spec(self.result_layout(position), rank, self.plan.mesh.names)
        return NamedSharding(self.mesh, named)

    # Emission

    def scope(self, name: str, known: Mapping[Key, Any]) -> codegen.Scope:
        """The scope of a program that begins with these arrays."""
        scope = codegen.Scope(self.context, {})
        self.prepare(scope, name)
        for (value, copy), array in known.items():
            if copy is None:
                scope.define(value, array, "enter")
            else:
                scope.copies[value, copy] = self.context.constrain(array, copy)
        return scope

    def prepare(self, scope: codegen.Scope, name: str) -> None:
        """Constants, and what is made where it is read."""
        for value, array in self.graph.constants:
            scope.define(value, array, "constant")
        for earlier in self.before(name):
            for op in self.ops[earlier]:
                if scope.is_lazy(op):
                    scope.lazy.update((value, (op, k)) for k, value in enumerate(op.outputs))

    def before(self, name: str) -> tuple[str, ...]:
        """Programs whose values a program may read, in order."""
        names = [*self.plan.graph.programs]
        earlier = names[: names.index(name)]
        loop = name in (BEGIN, *PASS_KINDS)
        return tuple(other for other in earlier if loop or other not in (BEGIN, *PASS_KINDS))

    def emit(self, name: str, known: Mapping[Key, Any], wanted: Iterable[Key], results: Iterable[int]) -> Emitted:
        """Run a program on arrays by key.

        Args:
            name: the program.
            known: what it reads.
            wanted: keys that it gives.
            results: positions of results of the graph that it gives.
        """
        scope = self.scope(name, known)
        scope.run(self.ops[name])
        handed = {i: self.result(scope, i) for i in results}  # first: that may make copies which are wanted
        return Emitted({key: self.give(scope, key) for key in wanted}, handed)

    def give(self, scope: codegen.Scope, key: Key) -> Any:
        """The array of a key at the end of a program."""
        value, copy = key
        if copy is not None and self.homed(value):
            return scope.at(value, copy, f"copy of %{value}", scope.makers.get(value))
        if copy is not None:
            return scope.copies[value, copy]
        if value in scope.lazy:
            return scope.materialise(value, self.layout(key), f"%{value}", scope.lazy[value][0])
        return scope.arrays[value]

    def result(self, scope: codegen.Scope, position: int) -> Any:
        return scope.output(position, self.graph.outputs[position], self.result_layout(position))

    def homed(self, value: int) -> bool:
        """The plan says where it lives."""
        return value in self.plan.layouts.values


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a program gives, by key and by position of the result."""

    values: Mapping[Key, Any]
    results: Mapping[int, Any]


@dataclass(frozen=True, eq=False)
class Cuts:
    """How the programs of a stage hang together.

    Attributes:
        reads: program -> keys that it takes from arguments and earlier programs, ascending.
        gives: program -> keys that later ones take from it, or that are totals.
    """

    reads: Mapping[str, tuple[Key, ...]]
    gives: Mapping[str, tuple[Key, ...]]


def cut(emitter: Emitter, results: Mapping[str, Sequence[int]], totals: Mapping[str, Sequence[int]]) -> Cuts:
    """What each program of a stage reads of others.

    Args:
        emitter: the stage.
        results: program -> positions of the results of the graph that it gives.
        totals: program -> values of the graph that it gives parts of.
    """
    found = _Cutter(emitter, results, totals)
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in _types(emitter)]
    jax.eval_shape(found.run, *avals)
    gives: dict[str, set[Key]] = {name: {(v, None) for v in totals.get(name, ())} for name in emitter.ops}
    for keys in found.reads.values():
        for key in keys:
            if key in found.made:
                gives[found.made[key]].add(key)
    return Cuts({n: _sorted(k) for n, k in found.reads.items()}, {n: _sorted(k) for n, k in gives.items()})


def _sorted(keys: Iterable[Key]) -> tuple[Key, ...]:
    return tuple(sorted(keys, key=lambda key: (key[0], key[1] or ())))


def _types(emitter: Emitter) -> Iterable[tuple[tuple[int, ...], Any]]:
    avals = emitter.plan.graph.avals
    return ((aval.shape, aval.dtype) for aval in avals)


@dataclass(eq=False)
class _Cutter:
    """Emits all programs in order.

    Attributes:
        reads: program -> keys that it takes from others.
        made: key -> the program that makes it; arguments are not in it.
        arrays: by key, of all programs so far.
    """

    emitter: Emitter
    results: Mapping[str, Sequence[int]]
    totals: Mapping[str, Sequence[int]]
    reads: dict[str, dict[Key, None]] = field(default_factory=dict)
    made: dict[Key, str] = field(default_factory=dict)
    arrays: dict[Key, Any] = field(default_factory=dict)

    def run(self, *leaves: Any) -> None:
        self.arrays.update(((v, None), x) for v, x in zip(self.emitter.graph.inputs, leaves, strict=True))
        begin: codegen.Scope | None = None
        for name in self.emitter.ops:
            scope = self._scope(name, begin)
            scope.run(self.emitter.ops[name])
            for value in self.totals.get(name, ()):
                self.made[value, None] = name
                self.arrays[value, None] = self.emitter.give(scope, (value, None))
            for position in self.results.get(name, ()):
                self.emitter.result(scope, position)
            begin = scope if begin is None else begin
            self._keep(name, scope)

    def _scope(self, name: str, begin: codegen.Scope | None) -> codegen.Scope:
        noted = self.reads.setdefault(name, {})
        arrays = _Arrays(self._array, noted)
        scope = codegen.Scope(self.emitter.context, arrays)
        if begin is not None:
            scope.copies = _Copies(lambda key: self._copy(name, key, begin), noted)
        self.emitter.prepare(scope, name)
        return scope

    def _array(self, value: int) -> Any:
        return self.arrays[value, None]

    def _copy(self, name: str, key: Key, begin: codegen.Scope) -> Any:
        """A copy that an earlier program made, or that `begin` is to make."""
        value, layout = key
        if name not in PASS_KINDS or layout is None:
            return None
        if key not in self.arrays and value in self.emitter.once:
            if self.emitter.plan.layouts.copies.get(value) != layout:
                return None
            self.made[key] = BEGIN
            self.arrays[key] = self.emitter.give(begin, key)
        return self.arrays.get(key)

    def _keep(self, name: str, scope: codegen.Scope) -> None:
        """What later programs may read of this one."""
        arrays: dict[Key, Any] = {(v, None): array for v, array in scope.arrays.items() if self._makes(name, v)}
        copies: dict[Key, Any] = {}
        if name in PASS_KINDS:
            copies = {key: x for key, x in scope.copies.items() if key[0] not in self.emitter.once}
        for key, array in {**arrays, **copies}.items():
            if key not in self.arrays:
                self.made[key] = name
                self.arrays[key] = array

    def _makes(self, name: str, value: int) -> bool:
        return self.emitter.plan.graph.maker.get(value) == name


class _Arrays(dict[int, Any]):
    """Arrays of a program; what is missing is taken from earlier ones, and noted."""

    def __init__(self, earlier: Callable[[int], Any], noted: dict[Key, None]) -> None:
        super().__init__()
        self._earlier, self._noted = earlier, noted

    def __missing__(self, value: int) -> Any:
        self._noted[value, None] = None
        found = self[value] = self._earlier(value)
        return found


class _Copies(dict[tuple[int, Layout], Any]):
    """Copies of a program; what is missing is taken from earlier ones if they have it, and noted."""

    def __init__(self, earlier: Callable[[Key], Any], noted: dict[Key, None]) -> None:
        super().__init__()
        self._earlier, self._noted = earlier, noted

    def get(self, key: tuple[int, Layout], default: Any = None) -> Any:
        if key not in self:
            found = self._earlier(key)
            if found is None:
                return default
            self._noted[key] = None
            self[key] = found
        return self[key]
