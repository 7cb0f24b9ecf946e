"""Surveys a program for the judge: its decisions, who reads what, and tables of seconds, from what a plan means.

Nothing here comes from the model builder: only the Graph, its Rules, the reshard recipe and the prices of one operation
and one collective are shared.

    decisions   one per argument, region border, heavy operation, sum of partial sums, shared copy    -> survey
    alone       weight (roofline + partial sums + light traffic)                                      -> _alone
    in pairs    weight (move between what a decision leaves and what a reader wants)                  -> _between
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar import jax_compat
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Atom, Graph, Op, Region
from autopar.ir.layout import divides
from autopar.rules import Rule
from tests.judge.facts import deferral, hurried, state
from tests.judge.model import ANY, WHOLE, Decision, Factors, Judge, Option, Place, Read, shown
from tests.judge.pricing import EVEN, PADDED, Pricing, layout_options, op_options, sum_options

TRIPS = 10  # of a loop that ends only at run time

NEVER_FOLLOW = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "sharding_constraint")
NEVER_REPEATED = (*NEVER_FOLLOW, "gather", "scatter", "scatter-add", "sort", "rng_bit_generator", "custom_call")


@dataclass
class _Draft:
    name: str
    options: tuple[Option, ...]
    weight: float
    seconds: list[float]
    extents: tuple[int, ...]
    light: list[tuple[frozenset[int], int]] = field(default_factory=list)


@dataclass
class _Survey:
    price: Pricing
    deferring: frozenset[int]
    sums: Mapping[int, bool]
    batch: frozenset[int]
    waited: frozenset[int]
    drafts: list[_Draft] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    light: list[Op] = field(default_factory=list)
    read_by: dict[int, list[str]] = field(default_factory=dict)  # value -> "light" or "heavy", once per operand
    options: dict[object, tuple[tuple[Option, ...], list[float], tuple[int, ...]]] = field(default_factory=dict)
    undivided: set[int] = field(default_factory=set)  # decisions on arguments that some axis only cuts unevenly

    @property
    def graph(self) -> Graph:
        return self.price.graph

    def decide(self, draft: _Draft) -> int:
        self.drafts.append(draft)
        return len(self.drafts) - 1

    def border(self, name: str, value: int, weight: float, most: float = PADDED) -> int:
        """A decision on the layout of a value that comes from outside."""
        decision = self.layout_decision(name, self.graph.types[value].shape, weight, most)
        self.places[value] = Place(decision, value, tuple(range(self.graph.types[value].rank)))
        return decision

    def layout_decision(self, name: str, shape: tuple[int, ...], weight: float, most: float = PADDED) -> int:
        options = layout_options(shape, self.price.mesh.sizes, most)
        return self.decide(_Draft(name, options, weight, [0.0] * len(options), shape))

    def want(
        self, site: str, atom: Atom, decision: int, factors: Factors, weight: float, running: bool = False
    ) -> None:
        if not isinstance(atom, int) or not factors:
            return
        if running or self.places.get(atom) != Place(decision, atom, factors):
            self.reads.append(Read(site, atom, decision, factors, running, weight))

    def settled(self, atom: Atom) -> bool:
        return isinstance(atom, int) and bool(self.graph.types[atom].shape) and atom in self.places

    def firm(self, atom: Atom) -> Place | None:
        place = self.places.get(atom) if isinstance(atom, int) else None
        return place if place is not None and place.view is None else None


def survey(graph: Graph, rules: Mapping[int, Rule], mesh: LogicalMesh) -> Judge:
    """Decisions of a program, and what they cost alone and in pairs."""
    s = _Survey(Pricing(graph, rules, mesh), *deferral(graph), *hurried(graph))
    for value, path in zip(graph.inputs, graph.input_paths, strict=True):
        if graph.types[value].shape:
            entered = s.border(path, value, 1.0, EVEN)
            if _undivided(graph.types[value].shape, mesh.sizes):
                s.undivided.add(entered)
    for value, _ in graph.constants:
        if graph.types[value].shape:
            s.border(f"constant {value}", value, 1.0)
    _visit(s, graph.ops, 1.0)
    kept = state(graph)
    for out, argument in kept.items():
        rank = graph.types[argument].rank
        if rank:
            s.want(f"out{out}", graph.outputs[out], s.places[argument].decision, tuple(range(rank)), 1.0)
    for out, atom in enumerate(graph.outputs):
        if out not in kept and _may_be_uneven(s, atom):
            shape = graph.type_of(atom).shape
            decision = s.layout_decision(f"out{out}", shape, 1.0, EVEN)
            s.want(f"out{out}", atom, decision, tuple(range(len(shape))), 1.0)
    _charge(s)
    return _finish(s)


def _undivided(shape: tuple[int, ...], sizes: Sequence[int]) -> bool:
    """Along some mesh axis an argument of this shape lies whole, although pieces could be uneven."""
    even, padded = (layout_options(shape, sizes, most) for most in (EVEN, PADDED))
    return any(
        all(o.left[a] == WHOLE for o in even) and any(o.left[a] != WHOLE for o in padded) for a in range(len(sizes))
    )


def _may_be_uneven(s: _Survey, atom: Atom) -> bool:
    """A result is handed out in even pieces; one that may be in others, or is a view, is brought into such."""
    if not s.settled(atom):
        return False
    place, shape = s.places[atom], s.graph.type_of(atom).shape  # type: ignore[index]
    layouts = {shown(o.left, place.factors) for o in s.drafts[place.decision].options}
    return place.view is not None or not all(divides(x, shape, s.price.mesh.sizes) for x in layouts)


def _visit(s: _Survey, ops: Sequence[Op], weight: float) -> None:
    for op in ops:
        if op.regions:
            _BODIES[op.name](s, op, weight)
        else:
            _leaf(s, op, weight)


def _large(rule: Rule, dims: Sequence[int]) -> list[int]:
    return sorted(f for f in dims if rule.sizes[f] > 1)


def _leaders(op: Op, rule: Rule, s: _Survey) -> list[int]:
    """Operands with exactly the large factors of the largest result, none of which is summed or kept."""
    if op.name in NEVER_FOLLOW:
        return []
    largest = max(range(len(op.outputs)), key=lambda i: (s.graph.types[op.outputs[i]].size, -i))
    wanted = _large(rule, rule.results[largest])
    bad = len({*wanted}) < len(wanted) or {*rule.reduced, *rule.need_replication} & {*wanted}
    if bad or any({*_large(rule, dims)} - {*wanted} for dims in rule.results):
        return []
    return [k for k, dims in enumerate(rule.operands) if dims and _large(rule, dims) == wanted]


def _leaf(s: _Survey, op: Op, weight: float) -> None:
    rule = s.price.rules[op.signature]
    if not op.outputs:
        return
    repeatable = op.name not in NEVER_REPEATED and not rule.reduced and not op.equation.effects
    if repeatable and not any(s.settled(a) for a in op.inputs):
        _note(s, op, "light")
    elif op.name == "optimization_barrier":
        _barrier(s, op, weight)
    elif view := _view(s, op, rule):
        s.places[op.outputs[0]] = view
        _note(s, op, "light")
    elif op.index not in s.sums and (leaders := [k for k in _leaders(op, rule, s) if s.firm(op.inputs[k])]):
        oldest = {k: s.places[op.inputs[k]].decision for k in leaders}  # type: ignore[index]
        leader = min(leaders, key=lambda k: (oldest[k] in s.undivided, oldest[k], k))
        (_apart if oldest[leader] in s.undivided else _follow)(s, op, rule, leader, weight)
    else:
        _heavy(s, op, rule, weight)


def _note(s: _Survey, op: Op, how: str) -> None:
    for atom in op.inputs:
        if isinstance(atom, int):
            s.read_by.setdefault(atom, []).append(how)


def _barrier(s: _Survey, op: Op, weight: float) -> None:
    _note(s, op, "light")
    for i, (atom, result) in enumerate(zip(op.inputs, op.outputs, strict=True)):
        if place := s.firm(atom):
            s.places[result] = Place(place.decision, result, place.factors)
        elif s.graph.types[result].shape:
            own = tuple(range(s.graph.types[result].rank))
            s.want(f"{op.tag}.in{i}", atom, s.border(f"{op.tag} {result}", result, weight), own, weight)


def _view(s: _Survey, op: Op, rule: Rule) -> Place | None:
    """A broadcast of a settled value, or an elementwise operation on nothing settled but a view."""
    settled = [k for k, a in enumerate(op.inputs) if s.settled(a)]
    leaders = _leaders(op, rule, s)
    if op.name == "broadcast_in_dim" and 0 in settled and 0 not in leaders:
        return _through(s.places[op.inputs[0]], rule, 0)  # type: ignore[index]
    led = op.index not in s.sums and any(s.firm(op.inputs[k]) for k in leaders)
    if led or len(settled) != 1 or settled[0] not in leaders or len(op.outputs) != 1:
        return None
    place = s.places[op.inputs[settled[0]]]  # type: ignore[index]
    return None if place.view is None else _through(place, rule, settled[0])


def _through(place: Place, rule: Rule, operand: int) -> Place:
    dims = place.view if place.view is not None else tuple(range(len(place.factors)))
    seen = {f: dims[i] for i, f in enumerate(rule.operands[operand]) if rule.sizes[f] > 1}
    return Place(place.decision, place.behind, place.factors, tuple(seen.get(f, ANY) for f in rule.results[0]))


def _follow(s: _Survey, op: Op, rule: Rule, leader: int, weight: float) -> None:
    place = s.places[op.inputs[leader]]  # type: ignore[index]
    own = {f: mine for f, mine in zip(rule.operands[leader], place.factors, strict=True) if rule.sizes[f] > 1}
    for value, dims in zip(op.outputs, rule.results, strict=True):
        s.places[value] = Place(place.decision, value, tuple(own.get(f, WHOLE) for f in dims))
    _note(s, op, "light")
    s.light.append(op)
    for k, atom in enumerate(op.inputs):
        if k != leader:
            s.want(f"{op.tag}.in{k}", atom, place.decision, tuple(own.get(f, WHOLE) for f in rule.operands[k]), weight)


def _apart(s: _Survey, op: Op, rule: Rule, leader: int, weight: float) -> None:
    """Like `_follow`, but the operation decides on the layout, which may be uneven, and the leader is read in it."""
    largest = max(op.outputs, key=lambda v: (s.graph.types[v].size, -op.outputs.index(v)))
    decision = s.border(f"{op.tag} {op.name}", largest, weight)
    dims = rule.results[op.outputs.index(largest)]
    own = {f: d for d, f in enumerate(dims) if rule.sizes[f] > 1}
    for value, factors in zip(op.outputs, rule.results, strict=True):
        s.places[value] = Place(decision, value, tuple(own.get(f, WHOLE) for f in factors))
    _note(s, op, "light")
    s.light.append(op)
    for k, atom in enumerate(op.inputs):
        s.want(f"{op.tag}.in{k}", atom, decision, tuple(own.get(f, WHOLE) for f in rule.operands[k]), weight)


def _heavy(s: _Survey, op: Op, rule: Rule, weight: float) -> None:
    """An operation with options of its own."""
    is_sum = op.index in s.sums
    kind = (op.signature, op.index in s.deferring, s.sums.get(op.index), op.index in s.waited)
    if kind not in s.options:
        s.options[kind] = _priced(s, op, rule)
    options, seconds, extents = s.options[kind]
    decision = s.decide(_Draft(f"{op.tag} {op.name}", options, weight, seconds, extents))
    for value, dims in zip(op.outputs, rule.results, strict=True):
        if s.graph.types[value].shape:
            s.places[value] = Place(decision, value, tuple(dims))
    _note(s, op, "light" if is_sum else "heavy")
    if is_sum:
        s.light.append(op)
    for k, atom in enumerate(op.inputs):
        s.want(f"{op.tag}.in{k}", atom, decision, tuple(rule.operands[k]), weight, running=True)


def _priced(s: _Survey, op: Op, rule: Rule) -> tuple[tuple[Option, ...], list[float], tuple[int, ...]]:
    sizes, result = s.price.mesh.sizes, s.graph.types[op.outputs[0]]
    summing = s.price if op.index in s.waited else s.price.unhurried
    if op.index in s.sums:
        options = sum_options(result.shape, s.sums[op.index], sizes)
        own = (tuple(range(result.rank)),)
        return options, [summing.sums(op, own, result.shape, o) for o in options], result.shape
    shapes = [s.graph.type_of(a).shape for a in (*op.inputs, *op.outputs)]
    options = op_options(op, rule, op.index in s.deferring, sizes, shapes)
    seconds = [s.price.running(op, o) + summing.sums(op, rule.results, rule.sizes, o) for o in options]
    return options, seconds, rule.sizes


# Regions


def _enter(s: _Survey, op: Op, region: Region, outer: float, inner: float) -> list[int | None]:
    """Decisions of a scan's inputs; what is scanned over loses its leading dimension."""
    decisions: list[int | None] = []
    for i, (value, atom) in enumerate(zip(region.inputs, op.inputs, strict=True)):
        rank = s.graph.types[value].rank
        decision = s.border(f"{op.tag} enters {value}", value, inner) if rank else None
        decisions.append(decision)
        if decision is not None:
            lead = (WHOLE,) * (s.graph.type_of(atom).rank - rank)
            s.want(f"{op.tag}.in{i}", atom, decision, lead + tuple(range(rank)), outer)
    return decisions


def _body(s: _Survey, region: Region, weight: float) -> None:
    for value, _ in region.constants:
        if s.graph.types[value].shape:
            s.border(f"constant {value}", value, weight)
    _visit(s, region.ops, weight)


def _carried(s: _Survey, op: Op, region: Region, j: int, decision: int | None, weight: float) -> None:
    atom = region.outputs[j]
    if decision is not None and isinstance(atom, int):
        own = tuple(range(s.graph.types[atom].rank))
        s.want(f"{op.tag}.{region.name}.out{j}", atom, decision, own, weight)


def _leave(s: _Survey, op: Op, region: Region, j: int, weight: float, stacked: bool) -> None:
    atom, result = region.outputs[j], op.outputs[j]
    lead = (WHOLE,) * stacked
    rank = s.graph.types[result].rank
    if rank == 0:
        return
    if rank == stacked:
        s.border(f"{op.tag} {result}", result, weight)
    elif place := s.firm(atom):
        s.places[result] = Place(place.decision, result, lead + place.factors)
    else:
        inner = s.graph.type_of(atom)
        decision = s.layout_decision(f"{op.tag} out {j}", inner.shape, weight)
        s.want(f"{op.tag}.{region.name}.out{j}", atom, decision, tuple(range(inner.rank)), weight)
        s.places[result] = Place(decision, result, lead + tuple(range(inner.rank)))


def _scan(s: _Survey, op: Op, weight: float) -> None:
    region, inner = op.regions[0], weight * (op.trips or TRIPS)
    constants, carries = jax_compat.scan_counts(op.params)
    entered = _enter(s, op, region, weight, inner)
    _body(s, region, inner)
    for j in range(carries):
        decision = entered[constants + j]
        _carried(s, op, region, j, decision, inner)
        if decision is not None:
            s.places[op.outputs[j]] = Place(decision, op.outputs[j], tuple(range(s.graph.types[op.outputs[j]].rank)))
    for j in range(carries, len(op.outputs)):
        _leave(s, op, region, j, inner, stacked=True)


def _alias(s: _Survey, op: Op, region: Region, shift: int, weight: float) -> None:
    for i, value in enumerate(region.inputs):
        atom, rank = op.inputs[i + shift], s.graph.types[value].rank
        if place := s.firm(atom):
            s.places[value] = Place(place.decision, value, place.factors)
        elif rank:
            decision = s.border(f"{op.tag} enters {value}", value, weight)
            s.want(f"{op.tag}.in{i + shift}", atom, decision, tuple(range(rank)), weight)


def _remat(s: _Survey, op: Op, weight: float) -> None:
    _alias(s, op, op.regions[0], 0, weight)
    _body(s, op.regions[0], weight)
    for j in range(len(op.outputs)):
        _leave(s, op, op.regions[0], j, weight, stacked=False)


def _cond(s: _Survey, op: Op, weight: float) -> None:
    for region in op.regions:
        _alias(s, op, region, 1, weight)
        _body(s, region, weight)
    for j, result in enumerate(op.outputs):
        if s.graph.types[result].shape:
            decision = s.border(f"{op.tag} out {j}", result, weight)
            for region in op.regions:
                _carried(s, op, region, j, decision, weight)


_BODIES = {"scan": _scan, jax_compat.REMAT: _remat, "cond": _cond}


# Traffic of light operations, tables


def _charge(s: _Survey) -> None:
    """Light operations read arguments from memory, and write what heavy ones, several, or the caller read.

    Where there is state, arguments that are none are new in every step: they are written once more.
    """
    stays = set(state(s.graph).values())
    for position, value in enumerate(s.graph.inputs):
        if stays and position not in stays and value in s.places:
            _traffic(s, value)
    results = {a for a in s.graph.outputs if isinstance(a, int)}
    arguments = {*s.graph.inputs}
    for op in s.light:
        for value in op.outputs:
            readers = s.read_by.get(value, [])
            if value in results or "heavy" in readers or len(readers) > 1:
                _traffic(s, value)
        for k, atom in enumerate(op.inputs):
            if isinstance(atom, int) and atom in arguments and atom in s.places:
                _traffic(s, atom, _read_at(s, op, k))


def _read_at(s: _Survey, op: Op, operand: int) -> Place:
    """An argument is read as it lies, or, if it does not divide, as the reader's result lies."""
    lies, result = s.places[op.inputs[operand]], s.places.get(op.outputs[0])  # type: ignore[index]
    if lies.decision not in s.undivided or result is None:
        return lies
    rule = s.price.rules[op.signature]
    own = dict(zip(rule.results[0], result.factors, strict=True))
    return Place(result.decision, lies.behind, tuple(own.get(f, WHOLE) for f in rule.operands[operand]))


def _traffic(s: _Survey, value: int, at: Place | None = None) -> None:
    place = at or s.places[value]
    factors = frozenset(f for f in place.factors if f >= 0)
    s.drafts[place.decision].light.append((factors, s.graph.types[value].nbytes))


def _alone(s: _Survey, d: _Draft) -> np.ndarray:
    bandwidth = s.price.mesh.device.memory_bandwidth
    share = s.price.share
    traffic = [sum(n * share(o.left, sorted(f), d.extents) for f, n in d.light) / bandwidth for o in d.options]
    return (np.array(d.seconds) + np.array(traffic)) * d.weight


_Side = tuple[int, Factors, bool]  # decision, its factors along a value's dimensions, while running


def _hurried(s: _Survey, read: Read) -> bool:
    """Something before the update waits for this read, and its value depends on the batch."""
    if read.value not in s.batch or read.site.startswith("out"):
        return False
    return s.graph.by_index[int(read.site.partition(".")[0].removeprefix("op"))].phase != "update"


def _edges(s: _Survey, copies: dict[int, int]) -> Iterator[tuple[_Side, _Side, int, float, bool]]:
    """(from, to, value, weight, hurried) of every move; a value with several readers goes to them from one copy."""
    readers: dict[int, dict[_Side, float]] = {}
    waiting: set[tuple[int, _Side]] = set()
    for read in s.reads:
        if not (place := s.places.get(read.value)):
            continue
        factors = read.factors if place.view is None else _behind(place, read.factors)
        side = (read.decision, factors, read.running)
        if side != (place.decision, place.factors, False):
            group = readers.setdefault(place.behind, {})
            group[side] = max(group.get(side, 0.0), read.weight)
            if _hurried(s, read):
                waiting.add((place.behind, side))
    for value, sides in readers.items():
        home = (s.places[value].decision, s.places[value].factors, False)
        if len(sides) > 1:
            once = min(min(sides.values()), s.drafts[home[0]].weight)
            shape = s.graph.types[value].shape
            copies[value] = s.layout_decision(f"copy of {value}", shape, 1.0)
            copy = (copies[value], tuple(range(len(shape))), False)
            yield home, copy, value, once, any((value, side) in waiting for side in sides)
            home = copy
        yield from ((home, side, value, weight, (value, side) in waiting) for side, weight in sides.items())


def _behind(place: Place, factors: Factors) -> Factors:
    assert place.view is not None
    seen = {dim: f for dim, f in zip(place.view, factors, strict=True) if dim != ANY}
    return tuple(seen.get(dim, WHOLE) for dim in range(len(place.factors)))


def _between(s: _Survey, u: _Side, v: _Side, value: int, hurried: bool) -> np.ndarray:
    """Seconds of the move between every pair of options, through the few layouts that they show."""
    type_ = s.graph.types[value]
    ends = [[shown(o.cut if run else o.left, f) for o in s.drafts[d].options] for d, f, run in (u, v)]
    kinds = [list(dict.fromkeys(layouts)) for layouts in ends]
    price = s.price if hurried else s.price.unhurried
    table = np.array([[price.move(a, b, type_) for b in kinds[1]] for a in kinds[0]])
    rows, cols = ([kind.index(x) for x in layouts] for kind, layouts in zip(kinds, ends, strict=True))
    return table[np.ix_(rows, cols)]


def _finish(s: _Survey) -> Judge:
    copies: dict[int, int] = {}
    tables: dict[tuple[int, int], np.ndarray] = {}
    own: dict[int, np.ndarray] = {}
    for u, v, value, weight, waits in list(_edges(s, copies)):
        table = _between(s, u, v, value, waits) * weight
        pair = (min(u[0], v[0]), max(u[0], v[0]))
        if u[0] == v[0]:
            own[u[0]] = own.get(u[0], 0.0) + np.diag(table)
        else:
            tables[pair] = tables.get(pair, 0.0) + (table if u[0] == pair[0] else table.T)
    decisions = tuple(Decision(d.name, d.options, _alone(s, d) + own.get(i, 0.0)) for i, d in enumerate(s.drafts))
    return Judge(decisions, tables, s.places, tuple(s.reads), copies)
