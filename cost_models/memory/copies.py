"""Buffers of copies in other layouts, and of values while readers in other groups want them.

In time order of their last moments t1 <= t2 <= ... the readers of a value x with copy c are served so:

    x -> c       other layout: c until t1;  same: x until t1
    c -> reader  other layout: the reader's own piece;  same: c from the reader before to this one

which is exact if those that want c as it is come first, and linear in one-hot choices, each term on one edge. An
argument is there anyway, and its copy until the last reader: weights gathered for the forward pass stay for the
backward pass. Where the compiler rounds (`narrowing`), a copy is sent and kept rounded, but a value that arithmetic
reads too is not; in the same layout both are one array, whole to the end                               -> _Link.wider
Equal fetches are one where the compiler merges them: what two readers fetch alike is there between them as well. That
is a term of two edges; half of it is counted on each, which is exact if both fetch the same or none does
                                                                                                         -> _Link.half

A result that is the next state of a donated argument goes into that argument's buffer as soon as it is made, and what
leaves a loop's body into that of the loop's result, so that only what it was made as needs a buffer, and only where
that is another layout                                                                             -> _Copies.settled
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.compiler.compiled_program import HALVES, IN_PLACE_OPERAND
from autopar.cost_models.memory.delayed_products import Waiting
from autopar.cost_models.memory.sizes import End, Kind, Sizes
from autopar.cost_models.sharding.groups import projection
from autopar.cost_models.sharding.strategies import StrategySet
from autopar.ir.graph import Atom
from autopar.ir.problem import Floats, Ints


class _Side(NamedTuple):
    """One end of an edge: a node's strategies, its factors for the value's dimensions, assigned or resulting."""

    node: int
    strategies: StrategySet
    dims: tuple[int, ...]
    assigned: bool
    key: tuple[int, tuple[int, ...], bool]  # what its classes depend on


def _side(node: int, strategies: StrategySet, dims: tuple[int, ...], assigned: bool) -> _Side:
    return _Side(node, strategies, dims, assigned, (strategies.index, dims, assigned))


def add_copies(
    sizes: Sizes,
    ends: Sequence[End],
    settling: Sequence[End],
    carried: Sequence[End],
    elsewhere: Collection[int],
    overwritten: Collection[int],
) -> None:
    """Add the buffers of all copies that readers at these ends may need, and of what waits for them to arrive.

    At the `settling` ones of them a result goes into the buffer of the argument whose next state it is, at the
    `carried` ones into that of a loop's result; `elsewhere`: values in a buffer of such; `overwritten`: copies
    in whose memory the result of what reads them last is made.
    """
    copies, goes_back = _Copies(sizes, frozenset(carried), elsewhere, overwritten), frozenset(settling)
    _add_copies(copies, ends, goes_back)
    for run in range(len(sizes.program.runs)):
        again = _Copies(sizes, frozenset(), elsewhere, overwritten, links=copies.links, run=run)
        _add_copies(again, [end for end in ends if end in again.spans], frozenset())


def _add_copies(copies: _Copies, ends: Sequence[End], goes_back: frozenset[End]) -> None:
    sizes, of_value = copies.sizes, dict[int, list[End]]()
    for end in ends:
        single = end[0] not in sizes.model.copies
        if end not in goes_back and not (single and end in copies.carried):
            of_value.setdefault(end[0], []).append(end)
        elif end in copies.spans and single:
            copies.settled(end[0], end)
    for value, ends_of_value in of_value.items():
        read = sorted((e for e in ends_of_value if e in copies.spans), key=lambda e: copies.spans[e][1])
        if read and value not in sizes.model.copies:
            copies.single(value, read[0])
        elif read:
            copies.shared(value, read)


@dataclass(eq=False)
class _Copies:
    """What is known of the ends: when they read, whether only products do, or only what repeats it."""

    sizes: Sizes
    carried: frozenset[End]
    elsewhere: Collection[int]
    overwritten: Collection[int]
    spans: dict[End, tuple[int, int]] = field(default_factory=dict)
    narrow: dict[End, bool] = field(default_factory=dict)
    repeated: dict[End, bool] = field(default_factory=dict)  # readers repeat what is in their layout
    edges: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    links: dict[Hashable, int] = field(default_factory=dict)  # what the bytes of a link depend on -> its number
    ready: dict[int, bool] = field(default_factory=dict)  # by value: `Written.is_ready`
    outliving: dict[int, _Outliving] = field(default_factory=dict)  # what lasts longer than its readers by that name
    transposed_again: dict[tuple[End | int, bool], list[int]] = field(default_factory=dict)  # -> `_transposed_again`
    column_major: frozenset[End] = field(init=False)  # read by LAPACK, in column-major order
    run: int | None = None  # of the further iterations of unrolled loops: the one whose copies these are
    waiting: Waiting = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = Waiting(self.sizes)
        self.column_major = self._column_major()
        lives = self.sizes.lives
        for token, (_, key) in self.sizes.program.tokens.items():
            if self.sizes.program.run_of.get(token) != self.run:
                continue
            end = cast(End, key)
            self.narrow[end] = self.narrow.get(end, True) and token in self.sizes.w.narrow
            self.repeated[end] = self.repeated.get(end, True) and token in self.sizes.w.repeated_through
            if token in lives.birth:
                birth, death = self.spans.get(end, (lives.end, 0))
                self.spans[end] = (
                    min(birth, lives.birth[token]),
                    max(death, lives.death[token] - (token in self.overwritten)),
                )
        for v, earlier in self.sizes.program.transposed_again.items():
            if v in lives.birth and self.run is None:
                end = cast(End, self.sizes.program.pieces[v])
                for read in ((end, True), (end[0] if earlier is None else cast(End, earlier), False)):
                    self.transposed_again.setdefault(read, []).append(v)
        for i, edge in enumerate(self.sizes.model.problem.edges):
            self.edges.setdefault((edge.u, edge.v), []).append(i)

    def _root(self, value: int) -> Atom:
        """The array that a value is, in this iteration."""
        program = self.sizes.program
        root = program.root(value)
        if self.run is None:
            return root
        run = program.runs[self.run]
        return run[value] if value in run else run.get(root, root) if isinstance(root, int) else root

    def _column_major(self) -> frozenset[End]:
        program = self.sizes.program
        if not self.sizes.backend.solves_in_place:
            return frozenset()
        solves = [s for frame in program.top.walk() for s in frame.steps if s.name in IN_PLACE_OPERAND]
        return frozenset(cast(End, program.tokens[v][1]) for s in solves for v in s.inputs if v in program.tokens)

    def single(self, value: int, end: End) -> None:
        """A value with one reader: it has no copy of its own."""
        link = self._link(value, self._binding(value), self._reader(end), [end])
        birth, death = self.spans[end]
        self._fetch(link, end, birth, death)
        self._transposed_again(link, end, True)
        last = self._last(value)
        if last is not None:
            alive_until = self._outlives(value, last, death)
            if not self.repeated.get(end, False):
                link.same("value", alive_until + 1, death)
            link.other("value", alive_until + 1, birth - 1, of_target=False)
            if death > alive_until:
                self.outliving[cast(int, self._root(value))] = _Outliving(link, max(birth - 1, last), death)

    def _fetch(self, link: _Link, end: End, birth: int, death: int) -> None:
        """A copy in another layout, the result of its all-gather before the transposition, and what waits meanwhile."""
        if birth > death:
            return
        link.other("copy", birth, death, of_target=True)
        travels = self.sizes.backend.overlaps and not self._is_ready(link.value)
        if self.sizes.backend.gathers_turn or travels:
            link.gathered(birth, birth if self.sizes.backend.gathers_turn else death, end in self.column_major)
        if self.sizes.backend.splits_all_to_all:
            link.all_to_all(birth)
        if travels and self.waiting.delays(birth):
            self._kept(link, birth)

    def _transposed_again(self, link: _Link, end: End | int, of_target: bool) -> None:
        """What is transposed a second time, for an end that has another layout than the one before.

        Which is a term of two edges where both leave a copy c: in the layout of the later end where that differs from
        c, in that of c where the earlier end's differs. Where both do, it is counted twice. `end`: the later end
        (`of_target`) or the earlier one; the value itself if that is where it is made, whose link is that to c.
        """
        lives = self.sizes.lives
        for v in self.transposed_again.get((end, of_target), ()):
            death = lives.death[v] - (v in self.overwritten)
            link.transposed(self.sizes.kind(v), lives.birth[v], death, of_target or isinstance(end, int))

    def _is_ready(self, value: int) -> bool:
        if value not in self.ready:
            self.ready[value] = self.sizes.w.is_ready(self.sizes.program, value)
        return self.ready[value]

    def _kept(self, link: _Link, moment: int) -> None:
        """What products read that wait until something is gathered (`compiler/delayed_products.py`)."""
        model = self.sizes.model
        runs = model.grouping.groups[model.grouping.bindings[link.value].group].weight
        seconds = np.where(link.gathers(), model.problem.edges[link.edge].table / runs, 0.0)
        for group in self.waiting.kept(moment, float(seconds.max())):
            link.longer_than(group.seconds, seconds, group.nbytes, group.birth, moment - 1)

    def _outlives(self, value: int, last: int, death: int) -> int:
        """Until when another name's readers hold the same array: what is copied for them, as it was up to `death`."""
        array = self.outliving.get(cast(int, self._root(value)))
        if array is None or array.until <= last:
            return last
        array.link.other("value", max(last, array.first) + 1, min(array.until, death), of_target=False)
        return array.until

    def settled(self, value: int, end: End) -> None:
        """A result that goes into another buffer at its one end: as it was made, at the moments that read it so."""
        # until the last reader of the value as it was made; from then on only the other buffer has it
        last, root = self._read_last(value), self._root(value)
        if last is not None and isinstance(root, int):
            link = self._link(value, self._binding(value), self._reader(end), [end])
            link.other("value", self.sizes.lives.birth[root], last, of_target=False)

    def shared(self, value: int, ends: Sequence[End]) -> None:
        """A value with a copy, and its readers in the order of their last moments."""
        model, binding, used = self.sizes.model, self._binding(value), self._used(ends)
        copy = _side(model.copies[value], model.copy_sets[value], tuple(range(len(binding.dims))), False)
        link = self._link(value, binding, copy, used)
        born, first, last = min(self.spans[e][0] for e in used), self.spans[ends[0]][1], self._last(value)
        self._fetch(link, used[0], born, first if last is not None else self.spans[used[-1]][1])
        if last is not None:
            alive_until, until = self._outlives(value, last, first), self.spans[ends[-1]][1]
            link.same("value", alive_until + 1, first)
            link.wider(max(alive_until, first) + 1, until)
            link.other("value", alive_until + 1, born - 1, of_target=False)
            if until > alive_until:
                self.outliving[cast(int, self._root(value))] = _Outliving(link, first, until)
        self._transposed_again(link, value, False)
        # Readers in the order of their last moments: each takes over what the one before it no longer needs.
        before, birth_of_value = first, self.sizes.lives.birth.get(cast(int, self._root(value)), born)
        if not self.carried.isdisjoint(ends):
            link.other("value", birth_of_value, born, of_target=False)
        for end in ends:
            birth, death = self.spans[end]
            link = self._link(value, copy, self._reader(end), [end])
            if end in self.carried:
                link.other("copy", birth_of_value, birth - 1, of_target=False)
                continue
            self._fetch(link, end, birth, death)
            self._transposed_again(link, end, True)
            self._transposed_again(link, end, False)
            link.half(*self._gap(used, end, before=True))
            link.half(*self._gap(used, end, before=False))
            repeats = self.repeated.get(end, False)
            if last is not None:
                if not repeats:
                    link.same("copy", max(before, last) + 1, death)
                link.other("copy", max(before, last) + 1, birth - 1, of_target=False)
            before = before if repeats else max(before, death)

    def _used(self, ends: Sequence[End]) -> Sequence[End]:
        """The ends that a copy is made for: all, or those that are no updates if there are others."""
        moments = self.sizes.lives.moments
        before_update = [e for e in ends if self.spans[e][1] < len(moments)]
        before_update = [e for e in before_update if moments[self.spans[e][1]].op.phase != "update"]
        return before_update if before_update and self.sizes.backend.updates_read_pieces else ends

    def _gap(self, used: Sequence[End], end: End, before: bool) -> tuple[int, int]:
        """The moments between a reader and the one before or after it; none if there is none."""
        birth, death = self.spans[end]
        if end not in used or not self.sizes.backend.merges_fetches:
            return 0, -1
        if before:
            return max((d + 1 for _, d in map(self.spans.__getitem__, used) if d < birth), default=birth), birth - 1
        return death + 1, min((b - 1 for b, _ in map(self.spans.__getitem__, used) if b > death), default=death)

    def _last(self, value: int) -> int | None:
        """The last moment at which a value is there by itself; None if it always is, as part of another, or never."""
        return None if self._root(value) in self.elsewhere else self._read_last(value)

    def _read_last(self, value: int) -> int | None:
        """The last moment at which a value is read as it was made; None for an argument, or if it is never written."""
        program, w = self.sizes.program, self.sizes.w
        root = self._root(value)
        if not isinstance(root, int) or root not in w.values or root in program.graph.names:
            return None
        return self.sizes.lives.death.get(root)

    def _binding(self, value: int) -> _Side:
        binding = self.sizes.model.grouping.bindings[value]
        return _side(binding.group, self.sizes.model.grouping.groups[binding.group].strategies, binding.dims, False)

    def _reader(self, end: End) -> _Side:
        return _side(end[1], self.sizes.model.grouping.groups[end[1]].strategies, end[2], end[3])

    def _link(self, value: int, source: _Side, target: _Side, readers: Sequence[End]) -> _Link:
        (gu, lu), (gv, lv) = (projection(side.strategies, side.dims, side.assigned) for side in (source, target))
        type_ = self.sizes.graph.types[value]
        narrow = type_.dtype == "float32" and all(self.narrow.get(e, False) for e in readers)
        kind = Kind(type_.shape, type_.itemsize / (2 if narrow else 1), 0)
        root = self._root(value)
        own = self.sizes.kind(root) if isinstance(root, int) else kind
        computed_kind = own if own.shape == kind.shape else kind._replace(itemsize=own.itemsize)
        edge = self._edge(source.node, target.node, gu, gv)
        number = self.links.setdefault((source.key, target.key, kind, computed_kind), len(self.links))
        return _Link(self.sizes, value, edge, kind, computed_kind, lu, lv, number)

    def _edge(self, u: int, v: int, gu: Ints, gv: Ints) -> int:
        """The edge between two nodes with these classes."""
        candidates, edges = self.edges[u, v], self.sizes.model.problem.edges
        if len(candidates) == 1:
            return candidates[0]
        return next(i for i in candidates if np.array_equal(edges[i].gu, gu) and np.array_equal(edges[i].gv, gv))


@dataclass(frozen=True, eq=False)
class _Outliving:
    """An array that is there as it was made until `first`, and as it is at the other end of the link until `until`."""

    link: _Link
    first: int
    until: int


class _Link(NamedTuple):
    """One edge that a value goes along, as copies of it are and as it was made, and the layouts of both ends."""

    sizes: Sizes
    value: int
    edge: int
    kind: Kind
    computed_kind: Kind
    sources: NDArray[np.int8]
    targets: NDArray[np.int8]
    number: int

    def other(self, what: str, birth: int, death: int, of_target: bool) -> None:
        """A buffer where the layouts differ, as large as the target's piece or the source's."""
        self._add(what, birth, death, True, of_target)

    def gathered(self, birth: int, death: int, column_major: bool) -> None:
        """The result of an all-gather before it is transposed or rounded; `column_major`: how a matrix is read."""
        if birth <= death:
            wide = self.sizes.backend.widens and self.sizes.graph.types[self.value].dtype in HALVES
            outer = 1 if column_major and len(self.kind.shape) == 2 else 0
            at = self.sizes.at(("gathered", self.number, wide, outer), lambda: self._gathered(wide, outer))
            self.sizes.add("copy", self.value, birth, death, at, edge=self.edge)

    def transposed(self, kind: Kind, birth: int, death: int, of_target: bool) -> None:
        """A transposed copy of this kind where the layouts differ, as large as the target's piece or the source's.

        A reshaped one has as many elements, in dimensions that the layouts do not tell of.
        """
        if birth <= death:
            if len(kind.shape) != len(self.kind.shape):
                kind = self.kind._replace(itemsize=kind.itemsize)
            key = ("transposed", self.number, kind, of_target)
            at = self.sizes.at(key, lambda: self._table(True, of_target, kind))
            self.sizes.add("copy", self.value, birth, death, at, edge=self.edge)

    def longer_than(self, least: float, seconds: Floats, nbytes: float, birth: int, death: int) -> None:
        """Bytes that are there where going along the edge takes longer than so many seconds; `seconds` of both ends."""
        at = self.sizes.at(("waits", self.number, least, nbytes), lambda: np.where(seconds > least, nbytes, 0.0))
        self.sizes.add("value", self.value, birth, death, at, edge=self.edge)

    def half(self, birth: int, death: int) -> None:
        """Half of what is fetched at the other end, where a reader may find what another fetched alike."""
        if birth <= death:
            at = self.sizes.at(("half", self.number), lambda: self._table(True, True, self.kind) / 2)
            self.sizes.add("copy", self.value, birth, death, at, edge=self.edge)

    def wider(self, birth: int, death: int) -> None:
        """What the value as it was made takes beyond a copy, where they are in the same layout: one array, no copy."""
        if birth <= death and self.computed_kind != self.kind:
            at = self.sizes.at(("wider", self.number), self._wider)
            self.sizes.add("value", self.value, birth, death, at, edge=self.edge)

    def _wider(self) -> Floats:
        return np.maximum(self._table(False, False, self.computed_kind) - self._table(False, False, self.kind), 0.0)

    def same(self, what: str, birth: int, death: int) -> None:
        """A buffer where they are the same."""
        self._add(what, birth, death, False, False)

    def _add(self, what: str, birth: int, death: int, differs: bool, of_target: bool) -> None:
        if birth <= death:
            as_computed = what == "value" and self.computed_kind != self.kind
            kind = self.computed_kind if as_computed else self.kind
            key = ("link", self.number, differs, of_target, as_computed)
            at = self.sizes.at(
                key, lambda: self._table(differs, of_target, kind), self.sizes.is_fixed(what, self.value)
            )
            self.sizes.add(what, self.value, birth, death, at, edge=self.edge)

    def all_to_all(self, moment: int) -> None:
        """The pieces that an all-to-all receives, before they are put together."""
        at = self.sizes.at(("all_to_all", self.number), self._all_to_all)
        self.sizes.add("copy", self.value, moment, moment, at, edge=self.edge)

    def _all_to_all(self) -> Floats:
        source, target = self.sources[:, None, :], self.targets[None, :, :]
        moved = np.any((source >= 0) & (target >= 0) & (source != target), axis=-1)
        return np.where(moved, self.sizes.pieces(self.targets, self.kind)[None, :], 0.0)

    def _gathered(self, wide: bool, outer: int) -> Floats:
        """The result of an all-gather in float32, or else before it is transposed: of dimensions but the outer one."""
        kind = self.kind._replace(itemsize=4.0) if wide else self.kind
        transposed = self.gathers(None if wide else outer)
        return np.where(transposed, self.sizes.pieces(self.targets, kind)[None, :], 0.0)

    def gathers(self, but: int | None = None) -> NDArray[np.bool_]:
        """Where dimensions are gathered, other ones than this, shape (sources, targets)."""
        cut = (self.sources >= 0) & (self.sources != (-1 if but is None else but))
        return np.any(cut[:, None, :] & (self.targets[None, :, :] < 0), axis=-1)

    def _table(self, differs: bool, of_target: bool, kind: Kind) -> Floats:
        array = self.sizes.pieces(self.targets if of_target else self.sources, kind)
        other = (self.sources[:, None, :] != self.targets[None]).any(-1)
        return np.where(other == differs, array[None, :] if of_target else array[:, None], 0.0)
