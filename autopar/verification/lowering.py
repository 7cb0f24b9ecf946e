"""How compilers lower planned collectives: known, measured conversions, one function each.

A plan says which bytes have to move; a compiler may know a cheaper way to move them, or lack a kind of collective. Each
conversion maps planned collectives to those that one compiler emits for them. Verification compares with the result:

    XLA       a value of equal elements is not moved                                          -> drop_uniform
              reshards of a value with a common prefix of layouts share that prefix           -> share_prefixes
    CPU       a loop-invariant value is moved before the loop                                 -> hoist_from_loops
              no reduce-scatter: an all-reduce and a local slice                              -> replace_reduce_scatters
              a sum over several dimensions ends in an all-reduce per sharded dimension       -> reduce_by_dimension
    Shardy    the reductions of one operation along several axes are one collective           -> reduce_all_axes_at_once
    TPU       narrow types, equal reductions, small reductions and gathers   -> `autopar.verification.lowering_tpu`

`CONVERSIONS` lists the conversions of each platform, in order. Measurements: docs/decisions/verification.md.
Deviations that cannot be predicted: `autopar.verification.exceptions`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from types import MappingProxyType

from autopar.ir.collective import Collective
from autopar.ir.graph import Op
from autopar.ir.op_sets import RAGGED_PRODUCTS
from autopar.rules.manual import MANUAL
from autopar.verification.dataflow import Context
from autopar.verification.lowering_tpu import (
    Collectives,
    merge_equal_reductions,
    narrow_types,
    replace_small_gathers,
    replace_small_reduce_scatters,
    scatter_joint_sums,
)

Conversion = Callable[[Collectives, Context], tuple[Collective, ...]]


def drop_uniform(planned: Collectives, context: Context) -> tuple[Collective, ...]:
    """XLA computes a value whose elements are all equal where it is read, and moves nothing."""
    return tuple(c for c in planned if context.values.get(c.op, -1) not in context.uniform)


def share_prefixes(planned: Collectives, context: Context) -> tuple[Collective, ...]:
    """Reshards of one value that begin with the same layouts share these steps: equal constraints are one instruction.

    The reshard to a shared copy is planned for the first site that reads the copy.
    """
    runs = Counter(c.op for c in planned)
    ways = {site: context.resharding_steps(site) for site in runs}
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


def hoist_from_loops(planned: Collectives, context: Context) -> tuple[Collective, ...]:
    """A collective that moves a loop-invariant value runs once, before the loop."""
    values, repeats = context.values, context.loop_runs
    return tuple(replace(c, count=max(1, c.count // repeats.get(values.get(c.op, -1), 1))) for c in planned)


def replace_reduce_scatters(planned: Collectives, context: Context) -> tuple[Collective, ...]:
    """XLA on CPU has no reduce-scatter: it becomes an all-reduce of the same operand, and a slice."""
    return tuple(replace(c, kind="all-reduce") if c.kind == "reduce-scatter" else c for c in planned)


def reduce_by_dimension(planned: Collectives, context: Context) -> tuple[Collective, ...]:
    """XLA's partitioner reduces over the operands' dimensions one after the other, unless a reduce-scatter is first.

    GPU and TPU fold such a chain into one all-reduce (XLA's pass all-reduce-folder), which the pipeline of CPU lacks.
    """
    scattered = {c.op for c in planned if c.kind == "reduce-scatter"}
    out: list[Collective] = []
    for c in planned:
        op = context.reduced_op(c) if c.kind == "all-reduce" and c.op not in scattered else None
        factors = context.summed_factors(op) if op is not None else {}
        names = dict.fromkeys(factors.get(axis, -1) for axis in c.axes)
        out += [replace(c, axes=tuple(a for a in c.axes if factors.get(a, -1) == name)) for name in names]
    return tuple(out)


def reduce_all_axes_at_once(planned: Collectives, context: Context) -> tuple[Collective, ...]:
    """Shardy reduces the partial sums of one operation along all axes at once.

    That is a reduce-scatter if the result is sharded along all of them, otherwise an all-reduce.
    """
    sums = [c for c in planned if c.kind in ("reduce-scatter", "all-reduce")]
    out: list[Collective] = []
    for c in planned:
        of_op = [s for s in sums if s.op == c.op]
        if c not in of_op or sum(len(s.axes) for s in of_op) < 2:
            out.append(c)
        elif c is of_op[0]:
            axes = context.along([a for s in of_op for a in s.axes])
            kind = "reduce-scatter" if _ends_cut(context.reduced_op(c), axes, context) else "all-reduce"
            out.append(replace(c, kind=kind, axes=axes))
    return tuple(out)


def _ends_cut(op: Op | None, axes: Sequence[str], context: Context) -> bool:
    """Whether every one of these axes shards the result of an operation."""
    layout = None if op is None else context.plan.stages[0].values.get(op.outputs[0])
    return layout is not None and all(layout[context.plan.mesh_names.index(a)] >= 0 for a in axes)


CONVERSIONS: Mapping[str, tuple[Conversion, ...]] = MappingProxyType(
    {
        "cpu": (drop_uniform, share_prefixes, hoist_from_loops, reduce_by_dimension, replace_reduce_scatters),
        "gpu": (drop_uniform, share_prefixes),
        "shardy": (reduce_all_axes_at_once,),
        "tpu": (
            drop_uniform,
            share_prefixes,
            narrow_types,
            merge_equal_reductions,
            scatter_joint_sums,
            replace_small_reduce_scatters,
            replace_small_gathers,
        ),
    }
)


def lower_collectives(platform: str, context: Context) -> tuple[Collective, ...]:
    """The collectives of a plan as the compiler of a platform is known to emit them."""
    planned: tuple[Collective, ...] = context.plan.collectives
    as_written, chosen = list[Collective](), list[Collective]()
    for c in planned:
        (as_written if _is_explicit(c, context) else chosen).append(c)
    converted = reduce(lambda pieces, convert: convert(pieces, context), CONVERSIONS[platform], tuple(chosen))
    return (*converted, *as_written)


def _is_explicit(c: Collective, context: Context) -> bool:
    """Whether a collective is written in a `shard_map`, of the user's or codegen's: compilers emit it as it is."""
    op = context.reduced_op(c)
    return op is not None and op.name in (MANUAL, *RAGGED_PRODUCTS)
