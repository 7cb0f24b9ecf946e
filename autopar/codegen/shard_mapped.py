"""Operations that are bound per device, inside `jax.shard_map`: on each device's shards, in the layouts of the plan.

XLA gathers the operands of some operations, and cannot partition kernels            -> autopar.rules.runs_per_device
Partial sums of a device are reduced where it runs, or get leading dimensions        -> split_convolution
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex

from autopar import jax_compat
from autopar.codegen.context import Context
from autopar.errors import RuleError
from autopar.ir.graph import Op
from autopar.ir.layout import REPLICATED, Layout, replicated, spec
from autopar.ir.op_sets import ATTENTION, MEGABLOX_PRODUCTS, RAGGED_PRODUCTS
from autopar.rules import SHARD_MAPPED, context_parallel, convolutions, cudnn, pallas, partitioned, ragged
from autopar.rules.manual import MANUAL

Specs = tuple[jax.sharding.PartitionSpec, ...]


def _bind_locally(context: Context, op: Op) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Binds an operation per device, in `jax.shard_map`.

    XLA would gather the operands. It cannot partition a Pallas kernel: that runs per device even if it is not cut. The
    local call of a kernel with a rule of the user's is not known; it is left to XLA.
    """
    unsharded, names = replicated(len(context.names)), context.names
    operand_layouts = [context.read_layout(atom, f"{op.tag}.in{k}") for k, atom in enumerate(op.inputs)]
    result_layouts = [context.unreduced(op, position, ()) for position in range(len(op.outputs))]
    bind: Callable[[Sequence[Any]], Sequence[Any]] = partial(jax_compat.bind, op.equation)
    is_kernel = op.name == "pallas_call"
    if is_kernel and context.rules[op.signature].origin == "user":
        return bind
    in_order = op.name == "fft" and context.on_cpu  # also of whole arrays, which XLA gathers in any order
    if not is_kernel and not in_order and all(layout == unsharded for layout in result_layouts):
        return bind
    ranks = [context.graph.type_of(atom).rank for atom in op.inputs]
    in_specs = tuple(spec(layout, rank, names) for layout, rank in zip(operand_layouts, ranks, strict=True))
    types = [context.graph.types[v] for v in op.outputs]
    out_specs = tuple(spec(layout, t.rank, names) for layout, t in zip(result_layouts, types, strict=True))
    if is_kernel:
        parts = [_part(context, t.shape, layout) for layout, t in zip(result_layouts, types, strict=True)]
        bind = partial(pallas.bind_part, op.equation, parts, specs=in_specs)
    if in_order:
        bind = partial(_bind_in_order, op)
    return _shard_mapped(context, lambda *shards: bind(shards), in_specs, out_specs)


def _bind_in_order(op: Op, operands: Sequence[Any]) -> list[Any]:
    """Binds an operation whose operands and results are in memory with their dimensions in order.

    XLA may give those of a Fourier transform another order, in which its kernel for CPU fails (JAX 0.10.2).
    """
    in_order = jax_compat.in_row_major_order
    return [in_order(x) for x in jax_compat.bind(op.equation, [in_order(x) for x in operands])]


def _shard_mapped(
    context: Context, run: Callable[..., Sequence[Any]], in_specs: Specs, out_specs: Specs
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function of a device's shards as one of whole operands."""
    local = jax.shard_map(
        lambda *shards: tuple(run(*shards)),
        mesh=context.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )
    return lambda operands: local(*operands)


def _bind_partitioned(context: Context, op: Op) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Binds an operation with `custom_partitioning`: its own `partition` says what each device runs.

    Left to XLA, `partition` gets whatever shardings reach the operation, and fails where its rule does not give them.
    Here they are those of the rule: operands in any other layout are resharded first, results afterwards. Where nothing
    is cut, each device runs the function on whole operands.
    """
    rule = context.rules[op.signature]
    axes = _cut_factors(context, op)
    operands, results = partitioned.specs(rule.operands, axes), partitioned.specs(rule.results, axes)
    if not axes:
        return _shard_mapped(context, jex.jaxpr_as_fun(op.params["call"]), operands, results)
    try:
        call = partitioned.local_call(partitioned.Partitioned.of(op.params), context.mesh, operands, results)
    except RuleError as error:
        name = partitioned.name(op.params)
        raise RuleError(
            f"{name}{f' at {op.source}' if op.source else ''} cannot be cut as its sharding_rule says: operands as "
            f"{', '.join(map(str, operands))} on the mesh {dict(context.mesh.shape)}: {error}. Name what it cannot cut "
            f"in need_replication_factors, or with autopar.register_rule('{name}', ...)"
        ) from error
    return _shard_mapped(context, call.run, call.operands, call.results)


def _bind_attention(context: Context, op: Op) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Binds cuDNN's attention per device; results that lack a factor which is cut are combined there."""
    rule, axes = context.rules[op.signature], _cut_factors(context, op)
    along = tuple(name for name, factor in axes.items() if factor == cudnn.POSITIONS)
    devices = math.prod(context.mesh.shape[name] for name in along)

    def bind(operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
        return jax_compat.bind(op.equation.replace(params=dict(params)), operands)

    def run(*shards: Any) -> list[Any]:
        if along:
            ways = {"gather": cudnn.gathers(rule), "ring": op.tag in context.stage.rings}
            results = context_parallel.run(op.name, bind, op.params, shards, along, devices, **ways)
        else:
            results = bind(shards, op.params)
        for i, dims in enumerate(rule.results):
            lacking = tuple(name for name, factor in axes.items() if factor not in dims)
            combine = {"sum": jax.lax.psum, "max": jax.lax.pmax}.get(cudnn.combined(op.name, i) or "")
            if lacking and combine is not None:
                results[i] = combine(results[i], lacking)
        return results

    return _shard_mapped(context, run, partitioned.specs(rule.operands, axes), partitioned.specs(rule.results, axes))


def _bind_ragged(context: Context, op: Op) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Binds a product over groups of rows per device, on the groups of its rows; partial sums are reduced there.

    What is cut by a rule of the user's is left to XLA. XLA cannot partition a kernel, which runs per device uncut too.
    """
    rule, axes = context.rules[op.signature], _cut_factors(context, op)
    if rule.origin == "user" or not (axes or op.name in MEGABLOX_PRODUCTS):
        return partial(jax_compat.bind, op.equation)
    dimension = ragged.ragged_dimension(op.params)
    rows = tuple(name for name, factor in axes.items() if factor == rule.operands[0][dimension])
    summed = tuple(name for name, factor in axes.items() if factor in rule.reduced)
    (result,) = rule.results
    layout = [result.index(axes[name]) if axes.get(name) in result else REPLICATED for name in context.names]
    scattered = _scattered(context, op, layout, summed)
    if scattered != REPLICATED:
        layout[context.names.index(summed[0])] = scattered

    def run(left: Any, right: Any, sizes: Any, *more: Any) -> list[Any]:
        if rows:
            sizes = ragged.block_sizes(sizes, jax.lax.axis_index(rows), left.shape[dimension])
        (product,) = jax_compat.bind(op.equation, (left, right, sizes, *more))
        if scattered != REPLICATED:
            return [jax.lax.psum_scatter(product, summed, scatter_dimension=scattered, tiled=True)]
        return [jax.lax.psum(product, summed) if summed else product]

    out_specs = (spec(tuple(layout), len(result), context.names),)
    return _shard_mapped(context, run, partitioned.specs(rule.operands, axes), out_specs)


def _scattered(context: Context, op: Op, layout: Sequence[int], summed: Sequence[str]) -> int:
    """The dimension of a result onto which its partial sums over one mesh axis are scattered; REPLICATED: none.

    `layout`: of the result before.
    """
    planned = context.stage.values.get(op.outputs[0])
    if planned is None or len(summed) != 1:
        return REPLICATED
    axis = context.names.index(summed[0])
    onto = planned[axis]
    same = [a for a, dim in enumerate(layout) if dim == onto]
    parts = math.prod(context.mesh.shape[context.names[a]] for a in (*same, axis))
    even = onto >= 0 and not context.graph.types[op.outputs[0]].shape[onto] % parts
    return onto if even and all(a < axis for a in same) else REPLICATED


def split_convolution(context: Context, op: Op, operands: Sequence[Any]) -> tuple[Any, list[int]]:
    """A convolution bound per device, and the mesh axes along which its sum is partial.

    The array has a leading dimension for each of these axes.
    """
    rule, axes = context.rules[op.signature], _cut_factors(context, op)
    kept = [a for a, name in enumerate(context.names) if axes.get(name) in rule.reduced]
    lead = [context.names[a] for a in kept]
    groups = convolutions.group_factor(op, rule)
    devices = math.prod(context.mesh.shape[name] for name, factor in axes.items() if factor == groups)
    local = op.equation.replace(params=convolutions.part(op.params, devices))

    def run(*shards: Any) -> list[Any]:
        (result,) = jax_compat.bind(local, shards)
        return [jax.lax.expand_dims(result, range(len(lead)))]

    (results,) = partitioned.specs(rule.results, axes)
    out_specs = (jax.sharding.PartitionSpec(*lead, *results),)
    with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
        (array,) = _shard_mapped(context, run, partitioned.specs(rule.operands, axes), out_specs)(operands)
    return array, kept


def _bind_manual(context: Context, op: Op) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Binds a `shard_map` of the user's on the devices of the plan."""
    return partial(jax_compat.bind_on_mesh, op.equation, context.mesh)


def _cut_factors(context: Context, op: Op) -> dict[str, int]:
    """Name of a mesh axis -> the factor of an operation that the layouts of its operands cut along it."""
    rule = context.rules[op.signature]
    axes: dict[str, int] = {}
    for k, (atom, dims) in enumerate(zip(op.inputs, rule.operands, strict=True)):
        for name, dim in zip(context.names, context.read_layout(atom, f"{op.tag}.in{k}"), strict=True):
            if dim >= 0 and dims[dim] in rule.free:
                axes.setdefault(name, dims[dim])
    # A `shard_map` takes equal parts alone: axes are taken in their order as long as the factor divides by all of them.
    shards: dict[int, int] = {}
    for name, factor in list(axes.items()):
        shards[factor] = shards.get(factor, 1) * context.mesh.shape[name]
        if rule.sizes[factor] % shards[factor]:
            del axes[name]
            shards[factor] //= context.mesh.shape[name]
    return axes


def _part(context: Context, shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """The shape of a device's part of an array that is cut evenly."""
    part = list(shape)
    for name, dim in zip(context.names, layout, strict=True):
        if dim >= 0:
            part[dim] //= context.mesh.shape[name]
    return tuple(part)


#: Operation -> how it is bound per device, if not as it is.
_LOCAL: Mapping[str, Callable[[Context, Op], Callable[[Sequence[Any]], Sequence[Any]]]] = {
    "custom_partitioning": _bind_partitioned,
    **dict.fromkeys(ATTENTION, _bind_attention),
    **dict.fromkeys(RAGGED_PRODUCTS, _bind_ragged),
    MANUAL: _bind_manual,
}


def binding(context: Context, op: Op) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function of the operands that binds an operation: per device, or as it is written."""
    per_device = _LOCAL.get(op.name, _bind_locally if op.name in SHARD_MAPPED else None)
    return partial(jax_compat.bind, op.equation) if per_device is None else per_device(context, op)
