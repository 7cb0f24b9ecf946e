"""All buffers of a program: what is in memory, when, and how large under every choice of layouts.

A buffer's bytes depend on one decision, or on the two ends of an edge of the optimization problem:

    an argument        there all the time, whoever owns it afterwards                            -> _Values.arguments
    one that waits     in the host's memory: from its first reader until its successor is made   -> _Values._visit
    a value            its piece in the layout that its group leaves                            -> _Values.others
    unsummed results   the piece that a product makes before its partial sums are added up       -> _Values._unsummed
    copies             in other layouts, for the readers that want them                          -> add_copies
    workspaces         what the body of a `shard_map` has in memory while it runs                  -> _Values._workspace
                       keys and values that devices gather inside attention                        -> _Values._gathered
    what waits         operands of products that are put off while something is gathered         -> Waiting.kept

What takes over the buffer of a donated argument, or of an operand that is read for the last time, needs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from autopar.cost_models.compiler.backends import Backend
from autopar.cost_models.compiler.compiled_program import OVERWRITES, Program, Step
from autopar.cost_models.compiler.flatten import flatten
from autopar.cost_models.compiler.fusion import KERNEL, LOOP, PRODUCT
from autopar.cost_models.compiler.in_place import overwritten
from autopar.cost_models.compiler.lifetimes import Lifetimes, lifetimes
from autopar.cost_models.compiler.manual import workspace_bytes
from autopar.cost_models.compiler.simplifications import hashes
from autopar.cost_models.compiler.written_values import written
from autopar.cost_models.memory.copies import add_copies
from autopar.cost_models.memory.sizes import Buffer, End, Sizes
from autopar.cost_models.sharding.groups import WHOLE, Binding, Model, source_dims
from autopar.cost_models.sharding.strategies import NOTHING, REDUCE_SCATTER, RING, StrategySet
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph, Op
from autopar.ir.op_sets import ATTENTION
from autopar.ir.problem import Floats
from autopar.ir.train_state import in_place
from autopar.rules import cudnn
from autopar.rules.manual import MANUAL, call_of


@dataclass(eq=False)
class Buffers:
    """All buffers of a program, and their sizes under every choice.

    Attributes:
        program, lives: what they were derived from.
        all: the buffers.
        sizes: bytes per device, one run of numbers per kind of buffer: one number if nothing decides, one per strategy
            of the node, or the table of the edge row by row.
    """

    program: Program
    lives: Lifetimes
    all: tuple[Buffer, ...]
    sizes: Floats


def buffers(
    graph: Graph, model: Model, mesh: LogicalMesh, backend: Backend, donated: Sequence[int], hosted: Sequence[int] = ()
) -> Buffers:
    """The buffers of a program whose arguments at these positions are given away, or wait in the host's memory."""
    ends = _ends(model)
    reads = {site: end for end, sites in ends.items() for site in sites}
    program = flatten(graph, backend, reads, mesh.size, model.grouping.views)
    w = written(program)
    lives = lifetimes(program, w)
    makers = {v: step for step in lives.moments for v in step.outputs}
    sizes = Sizes(graph, model, mesh, backend, program, w, lives, makers)
    donated_positions = frozenset(donated)
    within = _within(program, lives, ends)
    values = _Values(sizes, donated_positions, frozenset(graph.inputs[i] for i in hosted), frozenset(within))
    values.arguments()
    taken_over = overwritten(program, w, lives, values.elsewhere)
    values.others(taken_over)
    carried = (*filter(None, within.values()),)
    add_copies(sizes, tuple(ends), _settling(graph, ends, donated_positions), carried, values.elsewhere, taken_over)
    return Buffers(program, lives, tuple(sizes.buffers), sizes.all())


def _ends(model: Model) -> Mapping[End, list[str]]:
    """Readers' ends of edges, as `intra_op` distinguishes them, and the sites that read there."""
    sites_by_end: dict[End, list[str]] = {}
    for use in model.grouping.uses:
        binding = model.grouping.bindings.get(use.value)
        if binding is not None:
            dims = source_dims(binding, use)
            if binding.group != use.consumer or use.assigned or dims != binding.dims:
                sites_by_end.setdefault((binding.value, use.consumer, dims, use.assigned), []).append(use.site)
    return sites_by_end


def _settling(graph: Graph, ends: Mapping[End, Sequence[str]], donated: frozenset[int]) -> tuple[End, ...]:
    """Ends at which nothing but the next state of donated arguments is read."""
    taken = {f"out{out}" for out, position in in_place(graph).items() if position in donated}
    return tuple(end for end, sites in ends.items() if taken.issuperset(sites))


def _within(p: Program, lives: Lifetimes, ends: Mapping[End, Sequence[str]]) -> Mapping[int, End | None]:
    """Values made in the memory of a loop's result -> the end at which nothing else is read, where there is one.

    There the value is made in another group, and takes memory of its own where that lays it out otherwise.
    """
    end_by_value: dict[int, End | None] = {}
    for v, read in lives.within.items():
        end = cast(End, p.tokens[read][1]) if read in p.tokens else None
        if end is None or len(ends[end]) == 1:
            end_by_value[v] = end
    return end_by_value


Place = tuple[int, tuple[int, ...], bool]
"""A group that decides the layout of a value, its factors for the dimensions, and whether as it runs or as it holds."""


def _at(binding: Binding) -> Place:
    return binding.group, binding.dims, False


@dataclass(eq=False)
class _Values:
    """Buffers of what is written, but of what is `within` others."""

    sizes: Sizes
    donated: frozenset[int]
    hosted: frozenset[int]
    within: frozenset[int]

    def arguments(self) -> None:
        """Arguments are there all the time, whoever owns them afterwards, but those that wait elsewhere."""
        for v in self.sizes.graph.inputs:
            if v in self.hosted:
                self._visit(v)
            else:
                self._value("argument", v, 0, self.sizes.lives.end)

    def _visit(self, v: int) -> None:
        """An argument on the device for its update: its successor takes its place, and leaves a moment later."""
        moments = self._touched.get(v)
        if moments:
            self._value("visit", v, moments[0], min(moments[-1] + 1, self.sizes.lives.end))

    @cached_property
    def _touched(self) -> Mapping[int, list[int]]:
        """Argument that waits in the host's memory -> the moments that read it, or read or make its successor."""
        b = self.sizes
        inputs = b.graph.inputs
        of = {v: v for v in self.hosted}
        of.update((successor, inputs[i]) for successor, i in self._successors() if inputs[i] in self.hosted)
        moments: dict[int, list[int]] = {}
        for moment, step in enumerate(b.lives.moments):
            for v in dict.fromkeys(of[v] for v in (*b.w.reads(step), *step.outputs) if v in of):
                moments.setdefault(v, []).append(moment)
        return moments

    def others(self, taken_over: AbstractSet[int]) -> None:
        """Everything else that is written, but what takes over the buffer of an argument or of an operand."""
        b = self.sizes
        p, constants = b.program, (c for c, _ in b.graph.constants)
        skipped = {*b.graph.inputs, *constants, *p.tokens, *p.transposed_again, *self.elsewhere}
        for v, birth in b.lives.birth.items():
            if v not in skipped:
                self._value("value", v, birth, b.lives.death[v] - (v in taken_over))
            if v in b.makers and b.makers[v].op.name == MANUAL and v == b.makers[v].outputs[0]:
                self._workspace(v, b.makers[v].op, birth)
            if v in b.makers and b.makers[v].name in ATTENTION and v == b.makers[v].outputs[0]:
                self._gathered(v, b.makers[v].op, birth)
            if v in b.makers and (b.makers[v].kind in (KERNEL, PRODUCT) or b.makers[v].name == "gather"):
                self._unsummed(v, b.makers[v], birth, written=True)
        for step, moment in self._fused_gathers():
            self._unsummed(step.outputs[0], step, moment, written=False)
        for step in (s for frame in b.program.top.walk() for s in frame.steps) if b.w.absorbed else ():
            for v in (v for v in step.outputs if v in b.w.absorbed):
                self._unsummed(v, step, b.lives.birth[b.w.absorbed[v]], written=False)

    def _fused_gathers(self) -> Iterator[tuple[Step, int]]:
        """Gathers that a kernel does itself, and the moment of that kernel; where they are summed they are written."""
        b = self.sizes
        steps = [s for frame in b.program.top.walk() for s in frame.steps]
        gathers = [s for s in steps if s.name == "gather" and s.outputs[0] not in b.w.values]
        kernels: dict[int, int] = {}  # value that is not written -> the first moment that reads it
        for step in reversed(steps) if gathers else ():
            moments = [moment for v in step.outputs if (moment := b.lives.birth.get(v, kernels.get(v))) is not None]
            for v in map(b.program.behind, step.inputs if moments else ()):
                kernels[v] = min(moments[0], kernels.get(v, moments[0]))
        yield from ((s, kernels[s.outputs[0]]) for s in gathers if s.outputs[0] in kernels)

    @cached_property
    def elsewhere(self) -> frozenset[int]:
        """Values made in the buffer of a loop's result, or of the argument whose next state they are."""
        return self.within.union(successor for successor, position in self._successors() if position in self.donated)

    def _successors(self) -> Iterator[tuple[int, int]]:
        """Results that are the next state of an argument, and its position."""
        for out, position in in_place(self.sizes.graph).items():
            atom = self.sizes.program.read(f"out{out}", self.sizes.graph.outputs[out])
            if isinstance(atom, int):
                yield self.sizes.program.behind(atom), position

    def _value(self, what: str, v: int, birth: int, death: int) -> None:
        b, kind, placed = self.sizes, self.sizes.kind(v), self._placed(v)
        fixed = b.is_fixed(what, v)
        if placed is None:
            at = b.at(kind, lambda: b.laid_out([np.array([n]) for n in kind.shape], kind, 1), fixed)
            b.add(what, v, birth, death, at)
            return
        group, dims, assigned = placed
        s = b.model.grouping.groups[group].strategies
        at = b.at((s.index, dims, kind, assigned), lambda: b.piece_bytes(s, dims, kind, assigned), fixed)
        b.add(what, v, birth, death, at, node=group)

    def _placed(self, v: int) -> Place | None:
        """The group that decides the layout of a value; of free values and views, that of their first reader.

        Random bits that are no hashes of counters have none: every device makes all of them.
        """
        p = self.sizes.program
        piece = cast(End | None, p.pieces.get(v))
        if piece is not None and self.sizes.graph.types[piece[0]].shape == p.type_of(v).shape:
            return piece[1:]
        if self._is_drawn_whole(v):
            return None
        binding = self.sizes.model.grouping.bindings.get(p.like.get(v, v))
        if binding is None or binding.view is None:
            own = None if binding is None else _at(binding)
            return self._borrowed.get(v, own) if own is None or self._is_spread(v) else own
        return self._borrowed.get(
            v, (binding.group, tuple(binding.dims[d] if d >= 0 else WHOLE for d in binding.view), False)
        )

    def _is_spread(self, v: int) -> bool:
        """A broadcast that is written: the compiler makes it as it is read, wherever the plan has it."""
        maker = self.sizes.makers.get(v)
        return self.sizes.backend.has_library and maker is not None and maker.name == "broadcast_in_dim"

    def _is_drawn_whole(self, v: int) -> bool:
        maker = self.sizes.makers.get(v)
        return maker is not None and maker.name == "random_bits" and not hashes(self.sizes.graph, maker.op)

    @cached_property
    def _borrowed(self) -> Mapping[int, Place]:
        """The layout of values without a binding and of views, through any number of steps that keep the shape."""
        p, grouping = self.sizes.program, self.sizes.model.grouping
        bindings = {v: _at(binding) for v, binding in grouping.bindings.items() if binding.view is None}
        wanted: dict[int, Place] = {}  # of free values, by the first operation that reads them in a layout of its own
        for use in grouping.uses:
            if use.value not in grouping.bindings:
                wanted.setdefault(use.value, (use.consumer, use.dims, use.assigned))
        started: dict[int, Place] = {}
        borrowed: dict[int, Place] = {}
        for step in reversed([s for frame in p.top.walk() for s in frame.steps if s.outputs]):
            taken = ((v, r) for v, r in step.taken if p.type_of(v).shape == p.type_of(r).shape)
            started.update((v, bindings[r]) for v, r in taken if r in bindings)
            result = step.outputs[0]
            like = p.like.get(result, result)
            place = bindings.get(like) or borrowed.get(result) or wanted.get(like)
            if step.name in OVERWRITES and place is not None:
                place = (*place[:2], True)  # zeros are as the result before its sums
            if step.kind != LOOP and place is not None:
                shape = p.type_of(result).shape
                borrowed.update((v, place) for v in map(p.behind, step.inputs) if p.type_of(v).shape == shape)
        return wanted | borrowed | started

    def _unsummed(self, v: int, step: Step, moment: int, *, written: bool) -> None:
        """What a product makes before its sums; of one that is not written by itself, what its sums leave as well."""
        b, binding = self.sizes, self.sizes.model.grouping.bindings.get(self.sizes.program.like.get(v, v))
        if binding is None or binding.view is not None:
            return
        group = b.model.grouping.groups[binding.group]
        s, kind = group.strategies, b.kind(v)
        if group.op == step.op.index and (s.after > NOTHING).any():
            key = ("unsummed", s.index, binding.dims, kind, written)
            at = b.at(key, lambda: self._wholes(s, written) * b.piece_bytes(s, binding.dims, kind, assigned=True))
            b.add("unsummed", v, moment, moment, at, node=binding.group)

    def _workspace(self, v: int, op: Op, moment: int) -> None:
        """What the body of a `shard_map` has in memory while it runs."""
        nbytes = workspace_bytes(call_of(op).body)
        at = self.sizes.at(("workspace", nbytes), lambda: np.array([float(nbytes)]))
        self.sizes.add("workspace", v, moment, moment, at)

    def _gathered(self, v: int, op: Op, moment: int) -> None:
        """What devices gather or pass round inside attention whose positions are cut."""
        b, rule = self.sizes, self.sizes.model.grouping.rules[op.signature]
        ways = tuple(cudnn.workspace(op.name, op.params, rule, ring=ring) for ring in (False, True))
        if not any(ways):
            return
        group = b.model.grouping.bindings[v].group
        s, kinds = b.model.grouping.groups[group].strategies, tuple(b.kind(cast(int, atom)) for atom in op.inputs[:2])

        def nbytes() -> Floats:
            gathered, passed = (
                sum((n * b.piece_bytes(s, dims, kinds[i], assigned=True) for i, dims, n in way), np.zeros(len(s)))
                for way in ways
            )
            is_cut, is_ring = (s.assigned == cudnn.POSITIONS).any(1), (s.after == RING).any(1)
            return np.where(is_ring, passed, np.where(is_cut, gathered, 0.0))

        at = b.at(("gathered", s.index, kinds, ways), nbytes)
        b.add("workspace", v, moment, moment, at, node=group)

    def _wholes(self, s: StrategySet, written: bool) -> Floats:
        """How many pieces as large as before its sums a product has while they are made, under each strategy."""
        scattered, summed = (np.any(of, 1).astype(np.float64) for of in (s.after == REDUCE_SCATTER, s.after > NOTHING))
        if self.sizes.backend.sums_in_place:
            return scattered if written else summed
        return summed + scattered  # without a reduce-scatter, the sum is whole as well before a piece is kept
