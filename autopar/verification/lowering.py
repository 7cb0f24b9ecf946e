"""What a compiler makes of planned collectives: known, measured conversions, one function each.

A plan says which bytes have to move; a compiler may know a cheaper way to move them, or lack a kind of collective. Each
conversion maps planned collectives to what one compiler emits for them, and verification compares with the result:

    XLA       what is one number throughout is not moved                                      -> uniform_left_out
              ways of a value that begin alike share the beginning                            -> beginnings_shared
    CPU       what is the same in every iteration is moved before the loop                    -> hoisted
              no reduce-scatter: an all-reduce and a local slice                              -> without_reduce_scatter
              a sum over several dimensions ends in an all-reduce for each that is cut        -> summed_by_dimension
    Shardy    the sums of one operation along several axes are one collective                 -> summed_at_once
    TPU       narrow types, equal sums, small sums and gathers           -> those of `autopar.verification.lowering_tpu`

`CONVERSIONS` holds what applies to each platform, in order. Measurements: docs/design.md, "Compile-only checks". What
cannot be predicted: `autopar.verification.exceptions`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from types import MappingProxyType

from autopar.ir.collective import Collective
from autopar.ir.graph import Graph, Op
from autopar.plans.plan import Plan
from autopar.verification.dataflow import Context
from autopar.verification.lowering_tpu import Planned, equal_sums_once, narrowed, small_gathers_summed, small_sums_whole

Conversion = Callable[[Planned, Context], tuple[Collective, ...]]


def uniform_left_out(planned: Planned, context: Context) -> tuple[Collective, ...]:
    """XLA makes what is one number throughout where it is read, and moves nothing."""
    return tuple(c for c in planned if context.values.get(c.op, -1) not in context.uniform)


def beginnings_shared(planned: Planned, context: Context) -> tuple[Collective, ...]:
    """Two ways of one value that begin with the same layouts are one so far: equal constraints are one instruction.

    The way to a copy is planned for the first site that reads it.
    """
    runs = Counter(c.op for c in planned)
    ways = {site: context.stops(site) for site in runs}
    copied = {site for site in runs if context.values.get(site) in context.plan.stages[0].copies}
    to_come = {
        site: iter(way[-runs[site] :])
        for site, way in ways.items()
        if len(way) == runs[site] or (len(way) > runs[site] and site in copied)
    }
    seen: set[Hashable] = set()
    out: list[Collective] = []
    for c in planned:
        stop = next(to_come.get(c.op, iter(())), None)
        out += [c] if stop is None or stop not in seen else []
        seen.add(stop)
    return tuple(out)


def hoisted(planned: Planned, context: Context) -> tuple[Collective, ...]:
    """What moves a value that is the same in every iteration moves it once, before the loop."""
    values, repeats = context.values, context.repeats
    return tuple(replace(c, count=max(1, c.count // repeats.get(values.get(c.op, -1), 1))) for c in planned)


def without_reduce_scatter(planned: Planned, context: Context) -> tuple[Collective, ...]:
    """XLA on CPU has no reduce-scatter: one becomes an all-reduce of the same operand, and a slice."""
    return tuple(replace(c, kind="all-reduce") if c.kind == "reduce-scatter" else c for c in planned)


def summed_by_dimension(planned: Planned, context: Context) -> tuple[Collective, ...]:
    """XLA's partitioner sums over the dimensions of the operands one after the other, unless a scatter comes first.

    GPU and TPU fold such a chain into one all-reduce (XLA's pass all-reduce-folder), which the pipeline of CPU lacks.
    """
    scattered = {c.op for c in planned if c.kind == "reduce-scatter"}
    out: list[Collective] = []
    for c in planned:
        op = context.summing(c) if c.kind == "all-reduce" and c.op not in scattered else None
        factors = context.summed_factors(op) if op is not None else {}
        names = dict.fromkeys(factors.get(axis, -1) for axis in c.axes)
        out += [replace(c, axes=tuple(a for a in c.axes if factors.get(a, -1) == name)) for name in names]
    return tuple(out)


def summed_at_once(planned: Planned, context: Context) -> tuple[Collective, ...]:
    """Shardy adds up the partial sums of one operation along all axes at once.

    That is a reduce-scatter where the result ends cut along all of them, else an all-reduce.
    """
    sums: dict[str, list[Collective]] = {}
    for c in planned:
        if c.kind in ("reduce-scatter", "all-reduce"):
            sums.setdefault(c.op, []).append(c)
    out: list[Collective] = []
    for c in planned:
        mine = sums.get(c.op, [])
        if c not in mine or sum(len(s.axes) for s in mine) < 2:
            out.append(c)
        elif c is mine[0]:
            axes = context.along([a for s in mine for a in s.axes])
            kind = "reduce-scatter" if _ends_cut(context.summing(c), axes, context) else "all-reduce"
            out.append(replace(c, kind=kind, axes=axes))
    return tuple(out)


def _ends_cut(op: Op | None, axes: Sequence[str], context: Context) -> bool:
    """Every one of these axes cuts the result of an operation."""
    layout = None if op is None else context.plan.stages[0].values.get(op.outputs[0])
    return layout is not None and all(layout[context.plan.mesh_names.index(a)] >= 0 for a in axes)


CONVERSIONS: Mapping[str, tuple[Conversion, ...]] = MappingProxyType(
    {
        "cpu": (uniform_left_out, beginnings_shared, hoisted, summed_by_dimension, without_reduce_scatter),
        "gpu": (uniform_left_out, beginnings_shared),
        "shardy": (summed_at_once,),
        "tpu": (
            uniform_left_out,
            beginnings_shared,
            narrowed,
            equal_sums_once,
            small_sums_whole,
            small_gathers_summed,
        ),
    }
)


def converted(platform: str, plan: Plan, graph: Graph) -> tuple[Collective, ...]:
    """The collectives of a plan as the compiler of a platform is known to make them."""
    context = Context(graph, plan)
    return reduce(lambda planned, convert: convert(planned, context), CONVERSIONS[platform], plan.collectives)
