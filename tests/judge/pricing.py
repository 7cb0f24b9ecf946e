"""What an operation may do on a mesh, and the seconds of one operation, one sum and one move, for the judge.

options     every map of mesh axes to factors, and what becomes of partial sums    -> op_options, sum_options
roofline    flops and bytes of the largest piece                                   -> Pricing.running
sums        scattered if all are, else reduced together                            -> Pricing.sums
moves       the steps of the reshard recipe, of a value padded to the finer cut    -> Pricing.move
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.cost_models.collectives import collective_time
from autopar.cost_models.compute import conv_flops, op_time
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph, Op, Type
from autopar.ir.layout import Layout, Step, steps
from autopar.rules import Rule
from tests.judge.model import PARTIAL, WHOLE, Factors, Option

SLICE = 1e-8  # s of a local slice
EVEN, PADDED = 1.0, 1.5  # how much longer padding may make a dimension

SCATTERABLE = ("dot_general", "conv_general_dilated", "reduce_sum", "scatter-add", "ragged_dot", "cumsum")
SCATTERS = ("scatter-add", "scatter")  # only their windows may be cut unevenly


# Options


def _pieces(axes: Factors, sizes: Sequence[int]) -> dict[int, int]:
    """Into how many pieces each factor is cut that is cut at all."""
    parts: dict[int, int] = {}
    for f, size in zip(axes, sizes, strict=True):
        if f >= 0:
            parts[f] = parts.get(f, 1) * size
    return parts


def _padded(extent: int, parts: int) -> int:
    return -(-extent // parts) * parts


def _fits(axes: Factors, extents: Sequence[int], sizes: Sequence[int], most: Sequence[float]) -> bool:
    """Every factor has an element per piece, and is cut evenly or by one axis with little padding."""
    for f, n in _pieces(axes, sizes).items():
        longer = _padded(extents[f], n) / extents[f]
        if n > extents[f] or longer > most[f] or (longer > 1 and axes.count(f) > 1):
            return False
    return True


def layout_options(shape: Sequence[int], sizes: Sequence[int], most: float) -> tuple[Option, ...]:
    each = [WHOLE, *(d for d, n in enumerate(shape) if n > 1)]
    every = itertools.product(each, repeat=len(sizes))
    return tuple(Option(f, f, ("",) * len(sizes)) for f in every if _fits(f, shape, sizes, [most] * len(shape)))


def op_options(
    op: Op, rule: Rule, defers: bool, sizes: Sequence[int], shapes: Sequence[Sequence[int]]
) -> tuple[Option, ...]:
    """Every map of mesh axes to factors that divides; what is summed may be all-reduced, scattered, or left."""
    each: list[tuple[int, int, str]] = [(WHOLE, WHOLE, "")]
    cuttable = [f for f, n in enumerate(rule.sizes) if n > 1 and f not in rule.need_replication]
    for f in cuttable:
        if f not in rule.reduced:
            if not rule.results or any(f in dims for dims in rule.results):
                each.append((f, f, ""))
            continue
        each.append((f, WHOLE, "reduce"))
        if op.name in SCATTERABLE and len(rule.results) == 1 and len(shapes[-1]) > 1:
            each.extend((f, onto, "scatter") for onto in rule.results[0] if onto in cuttable)
        if op.name in SCATTERABLE and defers:
            each.append((f, PARTIAL, "leave"))
    return _joint(each, rule.sizes, sizes, [_longest(op, rule, f, shapes) for f in range(len(rule.sizes))])


def _longest(op: Op, rule: Rule, factor: int, shapes: Sequence[Sequence[int]]) -> float:
    """How much longer padding may make a factor: not at all if it is part of a dimension, or indexes a scatter."""
    where = enumerate(zip((*rule.operands, *rule.results), shapes, strict=True))
    extents = {k: shape[dims.index(factor)] for k, (dims, shape) in where if factor in dims}
    indexed = op.name in SCATTERS and (1 in extents or 2 not in extents)
    return EVEN if indexed or set(extents.values()) != {rule.sizes[factor]} else PADDED


def sum_options(shape: Sequence[int], stays: bool, sizes: Sequence[int]) -> tuple[Option, ...]:
    """A sum of two values: cut alike, or partial alike along an axis."""
    dims = [d for d, n in enumerate(shape) if n > 1]
    each = [(WHOLE, WHOLE, ""), *((d, d, "") for d in dims), (PARTIAL, WHOLE, "reduce")]
    each += [(PARTIAL, d, "scatter") for d in dims if len(shape) > 1]
    each += [(PARTIAL, PARTIAL, "leave")] * stays
    return _joint(each, shape, sizes, [PADDED] * len(shape))


def _joint(
    each: Sequence[tuple[int, int, str]], extents: Sequence[int], sizes: Sequence[int], most: Sequence[float]
) -> tuple[Option, ...]:
    options: list[Option] = []
    for picks in itertools.product(each, repeat=len(sizes)):
        o = Option(*(tuple(p[i] for p in picks) for i in range(3)))  # type: ignore[arg-type]
        fits = all(_fits(axes, extents, sizes, most) for axes in (o.cut, o.left))
        if fits and _ordered(o) and _split(o, extents, sizes):
            options.append(o)
    return tuple(options)


def _ordered(o: Option) -> bool:
    """A scatter goes to the minor end of a dimension, one axis to a dimension."""
    for a, ending in enumerate(o.ends):
        other_axes = [b for b, f in enumerate(o.left) if b != a and f == o.left[a]]
        if ending == "scatter" and any(o.ends[b] == "scatter" or b > a for b in other_axes):
            return False
    return True


def _split(o: Option, extents: Sequence[int], sizes: Sequence[int]) -> bool:
    """Where something is left partial, what is summed over is split into dimensions of parts, which divide it."""
    pieces = _pieces(o.cut, sizes)
    uneven = any(e and f >= 0 and extents[f] % pieces[f] for f, e in zip(o.cut, o.ends, strict=True))
    return not (uneven and "leave" in o.ends)


# Seconds


@dataclass(frozen=True)
class Pricing:
    graph: Graph
    rules: Mapping[int, Rule]
    mesh: LogicalMesh
    moves: dict[tuple[Layout, Layout, Type], float] = field(default_factory=dict)

    @cached_property
    def unhurried(self) -> Pricing:
        """Prices of what nothing waits for."""
        return Pricing(self.graph, self.rules, self.mesh.with_overlap())

    def share(self, axes: Factors, factors: Sequence[int], extents: Sequence[int]) -> float:
        """What one device holds of a value whose dimensions are these factors, padding included."""
        pieces = _pieces(axes, self.mesh.sizes)
        return math.prod(-(-extents[f] // pieces[f]) / extents[f] for f in factors if f in pieces)

    def running(self, op: Op, o: Option) -> float:
        """Roofline of one execution on one device."""
        rule, types = self.rules[op.signature], [self.graph.type_of(a) for a in (*op.inputs, *op.outputs)]
        local = sum(
            t.nbytes * self.share(o.cut, dims, rule.sizes)
            for t, dims in zip(types, (*rule.operands, *rule.results), strict=True)
            if t.shape
        )
        mine = self.flops(op) * self.share(o.cut, range(len(rule.sizes)), rule.sizes)
        return float(op_time(mine, local, types[0].dtype, self.mesh.device, 1, self.efficiency(op, o)))

    def efficiency(self, op: Op, o: Option) -> float:
        """Of a product's piece: rows lie in the left operand alone, columns in the right, the rest is summed."""
        if op.name not in ("dot_general", "conv_general_dilated"):
            return 1.0
        rule, loss = self.rules[op.signature], 1.0
        left, right, result = (*map(set, rule.operands[:2]), set(rule.results[0]))
        kinds = {f: 2 if f not in result else 0 if f not in right else 1 for f in range(len(rule.sizes))}
        for kind, half in enumerate(self.mesh.device.half_rate_extents):
            mine = [f for f, k in kinds.items() if k == kind and not (kind == 1 and f in left)]
            whole = math.prod(rule.sizes[f] for f in mine)
            loss *= 1 + half / (whole * self.share(o.cut, mine, rule.sizes))
        return 1 / loss

    def flops(self, op: Op) -> float:
        types = [self.graph.type_of(a) for a in (*op.inputs, *op.outputs)]
        if op.name == "dot_general":
            return 2.0 * math.prod(self.rules[op.signature].sizes)
        if op.name == "conv_general_dilated":
            names = ("dimension_numbers", "window_strides", "padding", "lhs_dilation", "rhs_dilation")
            more = {n: op.params[n] for n in (*names, "batch_group_count")}
            return float(conv_flops(types[0].shape, types[1].shape, **more))
        return float(max(t.size for t in types))

    def sums(self, op: Op, factors: Sequence[Factors], extents: Sequence[int], o: Option) -> float:
        """Collectives that end the partial sums: reduced together, but for those that are scattered first."""
        nbytes = sum(
            self.graph.types[v].nbytes * self.share(o.cut, dims, extents)
            for v, dims in zip(op.outputs, factors, strict=True)
        )
        ending = [a for a, e in enumerate(o.ends) if e in ("reduce", "scatter")]
        cut = [a for a in ending if o.ends[a] == "scatter"]
        total = 0.0
        if cut and (len(ending) == 1 or (op.name == "dot_general" and self._in_stages(o, ending, cut[0]))):
            scattered = cut if len(ending) == 2 else cut[:1]
            for axis in scattered:
                total += collective_time("reduce-scatter", nbytes, (axis,), self.mesh)
                nbytes /= self.mesh.sizes[axis]
                ending.remove(axis)
        return total + (collective_time("all-reduce", nbytes, tuple(ending), self.mesh) if ending else 0.0)

    def _in_stages(self, o: Option, ending: Sequence[int], first: int) -> bool:
        """A dot's sums are scattered one after another if no axis is idle and no other cuts where the first goes."""
        other_factors = [f for a, f in enumerate(o.cut) if a not in ending and self.mesh.sizes[a] > 1]
        return WHOLE not in other_factors and "leave" not in o.ends and o.left[first] not in other_factors

    def move(self, source: Layout, target: Layout, value: Type) -> float:
        """Seconds to reshard a value; every dimension is padded to the finer of the two cuts."""
        key = (source, target, value)
        if key not in self.moves:
            before, after = (_pieces(layout, self.mesh.sizes) for layout in (source, target))
            finer = {d: max(before.get(d, 1), after.get(d, 1)) for d in (*before, *after)}
            excess = math.prod(_padded(value.shape[d], n) / value.shape[d] for d, n in finer.items())
            recipe = steps(source, target, self.mesh.sizes)
            nbytes = value.nbytes * excess
            self.moves[key] = math.inf if recipe is None else sum(self._step(step, nbytes) for step in recipe)
        return self.moves[key]

    def _step(self, step: Step, nbytes: float) -> float:
        if step.kind == "slice":
            return SLICE
        return collective_time(step.kind, step.fraction * nbytes, step.axes, self.mesh)
