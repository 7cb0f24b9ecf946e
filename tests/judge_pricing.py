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

from autopar.cluster import LogicalMesh
from autopar.cost_models.collectives import collective_time
from autopar.cost_models.compute import conv_flops, op_time
from autopar.graph import Graph, Op, Type
from autopar.layout import Layout, Step, steps
from autopar.rules import Rule
from tests.judge_model import PARTIAL, WHOLE, Factors, Option

SLICE = 1e-8  # s of a local slice
EVEN, PADDED = 1.0, 1.5  # how much longer padding may make a dimension

SCATTERABLE = ("dot_general", "conv_general_dilated", "reduce_sum", "scatter-add", "ragged_dot", "cumsum")
EVEN_ONLY = ("gather", "scatter-add", "scatter", "sort", "reshape", "sharding_constraint")


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


def _fits(axes: Factors, extents: Sequence[int], sizes: Sequence[int], most: float) -> bool:
    """Every factor has an element per piece, and is cut evenly or by one axis with little padding."""
    for f, n in _pieces(axes, sizes).items():
        longer = _padded(extents[f], n) / extents[f]
        if n > extents[f] or longer > most or (longer > 1 and axes.count(f) > 1):
            return False
    return True


def layout_options(shape: Sequence[int], sizes: Sequence[int], most: float) -> tuple[Option, ...]:
    each = [WHOLE, *(d for d, n in enumerate(shape) if n > 1)]
    every = itertools.product(each, repeat=len(sizes))
    return tuple(Option(f, f, ("",) * len(sizes)) for f in every if _fits(f, shape, sizes, most))


def op_options(op: Op, rule: Rule, defers: bool, sizes: Sequence[int], rank: int) -> tuple[Option, ...]:
    """Every map of mesh axes to factors that divides; what is summed may be all-reduced, scattered, or left."""
    each: list[tuple[int, int, str]] = [(WHOLE, WHOLE, "")]
    cuttable = [f for f, n in enumerate(rule.sizes) if n > 1 and f not in rule.kept]
    for f in cuttable:
        if f not in rule.reduced:
            if not rule.results or any(f in dims for dims in rule.results):
                each.append((f, f, ""))
            continue
        each.append((f, WHOLE, "reduce"))
        if op.name in SCATTERABLE and len(rule.results) == 1 and rank > 1:
            each.extend((f, onto, "scatter") for onto in rule.results[0] if onto in cuttable)
        if op.name in SCATTERABLE and defers:
            each.append((f, PARTIAL, "leave"))
    return _joint(each, rule.sizes, sizes, EVEN if op.name in EVEN_ONLY else PADDED)


def sum_options(shape: Sequence[int], stays: bool, sizes: Sequence[int]) -> tuple[Option, ...]:
    """A sum of two values: cut alike, or partial alike along an axis."""
    dims = [d for d, n in enumerate(shape) if n > 1]
    each = [(WHOLE, WHOLE, ""), *((d, d, "") for d in dims), (PARTIAL, WHOLE, "reduce")]
    each += [(PARTIAL, d, "scatter") for d in dims if len(shape) > 1]
    each += [(PARTIAL, PARTIAL, "leave")] * stays
    return _joint(each, shape, sizes, PADDED)


def _joint(
    each: Sequence[tuple[int, int, str]], extents: Sequence[int], sizes: Sequence[int], most: float
) -> tuple[Option, ...]:
    found: list[Option] = []
    for picks in itertools.product(each, repeat=len(sizes)):
        o = Option(*(tuple(p[i] for p in picks) for i in range(3)))  # type: ignore[arg-type]
        if all(_fits(axes, extents, sizes, most) for axes in (o.cut, o.left)) and _ordered(o):
            found.append(o)
    return tuple(found)


def _ordered(o: Option) -> bool:
    """A scatter goes to the minor end of a dimension, one axis to a dimension."""
    for a, ending in enumerate(o.ends):
        others = [b for b, f in enumerate(o.left) if b != a and f == o.left[a]]
        if ending == "scatter" and any(o.ends[b] == "scatter" or b > a for b in others):
            return False
    return True


# Seconds


@dataclass(frozen=True)
class Pricing:
    graph: Graph
    rules: Mapping[int, Rule]
    mesh: LogicalMesh
    moves: dict[tuple[Layout, Layout, Type], float] = field(default_factory=dict)

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
        return op_time(mine, local, types[0].dtype, self.mesh.device, launches=1)

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
        """Collectives that end the partial sums: scattered only if all are, else reduced together."""
        nbytes = sum(
            self.graph.types[v].nbytes * self.share(o.cut, dims, extents)
            for v, dims in zip(op.outputs, factors, strict=True)
        )
        ending = tuple(a for a, e in enumerate(o.ends) if e in ("reduce", "scatter"))
        if any(o.ends[a] == "reduce" for a in ending):
            return collective_time("all-reduce", nbytes, ending, self.mesh)
        total = 0.0
        for axis in ending:
            total += collective_time("reduce-scatter", nbytes, (axis,), self.mesh)
            nbytes /= self.mesh.sizes[axis]
        return total

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
