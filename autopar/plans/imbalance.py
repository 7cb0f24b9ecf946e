"""Load imbalance of a plan: the share of the FLOPs that every device does, and why it is more than an even share.

    share of an operation     product over its factors of ceil(n / pieces) / n                           -> _running
    its ratio                 devices * share = padding * devices that do the same                       -> _excesses
    ratio of the program      sum of flops * ratio / sum of flops; an even share is 1                    -> measure

What exceeds 1 has a reason, worked out from extents and layouts alone                                   -> _kind

    padded        pieces are uneven: 8 in sixths are pieces of 2, as if there were 12
    indivisible   whole along some mesh axes, and no extents divide by the mesh
    uncuttable    whole, and the rule lets no dimension be cut
    chosen        padded or whole although an even cut exists: that was cheaper

FLOPs are counted as compilers count them: products exactly, moves of data not at all, all else one per element. What
is computed where it is used (constants, iotas, random bits, broadcasts) is left out; it follows its readers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost_models.compiler.backends import Backend
from autopar.cost_models.flops import executed_flops
from autopar.ir.graph import Graph, Op
from autopar.ir.layout import REPLICATED, Layout
from autopar.ir.op_sets import BROADCASTS, CASTS, JOINS, REORDERINGS, RESHAPES, SLICES
from autopar.plans.record import Stage
from autopar.rules import Rule
from autopar.rules.manual import MANUAL

#: Operations that move data and compute nothing.
MOVES = (
    *(*BROADCASTS, *RESHAPES, *REORDERINGS, *JOINS, *SLICES, *CASTS, "dynamic_update_slice", "gather", "scatter"),
    *("copy", "optimization_barrier", "sharding_constraint"),
)

SHOWN = 8  # lines of an imbalance
MIN_SHOWN = 0.005  # ratio below which an excess is not shown
MIN_SHOWN_CHOSEN = 0.05  # and below which a choice is not


@dataclass(frozen=True, slots=True)
class Excess:
    """One reason for doing more than an even share.

    Attributes:
        kind: "padded", "indivisible", "uncuttable" or "chosen".
        why: what happens, with extents and mesh axes.
        ratio: what it adds to the program's ratio.
        part: share of the program's FLOPs that it concerns.
        ops: names of the operations, by FLOPs.
        extents: of the dimensions that could have been cut, were it even; none if `why` names them.
        source: user line of the largest operation.
    """

    kind: str
    why: str
    ratio: float
    part: float
    ops: tuple[str, ...]
    extents: tuple[int, ...]
    source: str

    def __str__(self) -> str:
        of = f": {_some(self.extents, 5)} do not divide" if self.extents else ""
        where = f", first at {self.source}" if self.source else ""
        return f"{self.why}{of}: +{self.ratio:.2f} ({_some(self.ops, 3)}; {self.part:.0%} of the FLOPs{where})"


_Layouts = tuple[Layout | None, ...]


@dataclass(frozen=True, slots=True)
class Imbalance:
    """FLOPs per device over an even share, with what makes them more, the largest first; `total`: all FLOPs."""

    ratio: float
    excesses: tuple[Excess, ...]
    total: float = 0.0

    @property
    def avoidable(self) -> float:
        """What operations add to the ratio that could have been cut evenly."""
        return sum(e.ratio for e in self.excesses if e.kind == "chosen")

    def without(self, *kinds: str) -> Imbalance:
        """The imbalance less these kinds of excess."""
        kept = tuple(e for e in self.excesses if e.kind not in kinds)
        return Imbalance(1.0 + sum(e.ratio for e in kept), kept)

    def lines(self) -> tuple[str, ...]:
        """The excesses worth a line, at most `SHOWN`, then what the others come to."""
        worth = [e for e in self.excesses if e.ratio >= (MIN_SHOWN_CHOSEN if e.kind == "chosen" else MIN_SHOWN)]
        rest = sum(e.ratio for e in worth[SHOWN:])
        more = (f"{len(worth) - SHOWN} other reasons: +{rest:.2f}",) if len(worth) > SHOWN else ()
        return (*map(str, worth[:SHOWN]), *more)


def _some(things: Sequence[object], most: int) -> str:
    shown = ", ".join(map(str, things[:most]))
    return shown + (f" and {len(things) - most} more" if len(things) > most else "")


@dataclass(frozen=True, slots=True)
class _Share:
    """An excess of one operation: `ratio` times an even share of its FLOPs."""

    kind: str
    why: str
    ratio: float
    extents: tuple[int, ...] = ()


@dataclass
class _ExcessGroup:
    """Excesses of one kind and reason, added up."""

    work: float = 0.0
    by_name: dict[str, float] = field(default_factory=dict)
    extents: dict[int, None] = field(default_factory=dict)
    largest: tuple[float, str] = (0.0, "")

    def add(self, op: Op, work: float, piece: _Share) -> None:
        self.work += work * piece.ratio
        self.by_name[op.name] = self.by_name.get(op.name, 0.0) + work
        self.extents.update(dict.fromkeys(piece.extents))
        if work > self.largest[0]:
            self.largest = work, op.source

    def excess(self, kind: str, why: str, total: float) -> Excess:
        names = tuple(sorted(self.by_name, key=lambda name: (-self.by_name[name], name)))
        part = sum(self.by_name.values()) / total
        return Excess(kind, why, self.work / total, part, names, tuple(sorted(self.extents)), self.largest[1])


def measure(graph: Graph, rules: Mapping[int, Rule], stage: Stage, backend: Backend) -> Imbalance:
    """The imbalance of a program under the layouts of a stage, in FLOPs as a backend executes them."""
    names, sizes = tuple(stage.submesh), tuple(stage.submesh.values())
    excess_by_key: dict[tuple[int, _Layouts, _Layouts], tuple[float, tuple[_Share, ...]]] = {}
    groups: dict[tuple[str, str], _ExcessGroup] = {}
    total = 0.0
    for op, weight in _computing(graph, stage):
        read, written = _read(op, stage), tuple([stage.values.get(v) for v in op.outputs])
        key = op.signature, read, written
        if key not in excess_by_key:
            rule = rules[op.signature]
            running = _running(rule, read, written, len(sizes))
            # each device runs its own part of a `shard_map`
            pieces = () if op.name == MANUAL else tuple(_excesses(rule, running, names, sizes))
            operands, results = [graph.type_of(a) for a in op.inputs], [graph.types[v] for v in op.outputs]
            once = executed_flops(op, operands, results, masks_groups=backend.masks_groups)
            excess_by_key[key] = once, pieces
        once, pieces = excess_by_key[key]
        work = weight * once
        total += work
        for piece in pieces:
            groups.setdefault((piece.kind, piece.why), _ExcessGroup()).add(op, work, piece)
    # A program on empty arrays has no FLOPs of which a device could do more than its share.
    excesses = [group.excess(*key, total) for key, group in groups.items()] if total else []
    excesses.sort(key=lambda e: (-e.ratio, e.kind, e.why))
    return Imbalance(1.0 + sum(e.ratio for e in excesses), tuple(excesses), total)


def _computing(graph: Graph, stage: Stage) -> Iterator[tuple[Op, float]]:
    """Leaf operations that compute and whose results have a layout, with executions per step."""
    for op in graph.walk():
        if not op.regions and op.name not in MOVES and any(v in stage.values for v in op.outputs):
            yield op, graph.runs[op.index]


def _read(op: Op, stage: Stage) -> _Layouts:
    """The layouts of the operands as they are read; None for those that are computed for this reader."""
    layouts, uses = stage.values, stage.uses
    return tuple(
        [uses.get(f"{op.tag}.in{k}", layouts.get(a)) if isinstance(a, int) else None for k, a in enumerate(op.inputs)]
    )


def _running(rule: Rule, operands: _Layouts, results: _Layouts, count: int) -> Layout:
    """The factor that each mesh axis cuts while the operation runs: its operands say, or else its results."""
    read = {f for layout, dims in zip(operands, rule.operands, strict=True) if layout is not None for f in dims}
    axes = [REPLICATED] * count
    for layout, dims in zip(results, rule.results, strict=True):
        for axis, dim in enumerate(layout or ()):
            if dim >= 0 and dims[dim] not in read:
                axes[axis] = dims[dim]
    for layout, dims in zip(operands, rule.operands, strict=True):
        for axis, dim in enumerate(layout or ()):
            if dim >= 0:
                axes[axis] = dims[dim]
    return tuple(axes)


def _excesses(rule: Rule, axes: Layout, names: Sequence[str], sizes: Sequence[int]) -> Iterator[_Share]:
    """What adds up to the ratio of an operation less 1, where each axis cuts this factor."""
    parts: dict[int, int] = {}
    for factor, size in zip(axes, sizes, strict=True):
        parts[factor] = parts.get(factor, 1) * size
    divisible, ratio = _divisible(rule, sizes), 1.0
    for factor, n in sorted((f, n) for f, n in parts.items() if f >= 0):
        extent = rule.sizes[factor]
        padded = -(-extent // n) * n
        if padded > extent:
            why = f"{extent} padded to {padded} over {n} devices"
            yield _Share("chosen" if divisible else "padded", why, ratio * (padded / extent - 1))
            ratio *= padded / extent
    if (same := parts.get(REPLICATED, 1)) > 1:
        idle = ", ".join(f"{names[a]}={sizes[a]}" for a, f in enumerate(axes) if f < 0 and sizes[a] > 1)
        yield _whole_share(rule, idle, divisible, ratio * (same - 1))


def _whole_share(rule: Rule, idle: str, divisible: bool, ratio: float) -> _Share:
    """What the mesh axes `idle`, which cut no dimension, add to the ratio."""
    kind, reason = _kind(rule, divisible)
    extents = tuple(sorted({rule.sizes[f] for f in rule.free})) if kind == "indivisible" else ()
    return _Share(kind, f"whole along {idle}{reason}", ratio, extents)


def _divisible(rule: Rule, sizes: Sequence[int]) -> bool:
    """Some map of all mesh axes to factors cuts evenly."""
    return any(
        all(rule.sizes[f] % math.prod(n for g, n in zip(picks, sizes, strict=True) if g == f) == 0 for f in picks)
        for picks in itertools.product(rule.free, repeat=len(sizes))
    )


def _kind(rule: Rule, divisible: bool) -> tuple[str, str]:
    if divisible:
        return "chosen", ", which is cheaper than moving data"
    return ("indivisible", "") if rule.free else ("uncuttable", ", as its rule lets no dimension be cut")
