"""The collectives of a program, from Shardy: without a device and without compilation.

A step lowered for an `AbstractMesh` is StableHLO with shardings. Shardy's passes, which jaxlib contains, propagate the
shardings to all values and turn every reshard into a collective. The result is read here as `Collective`s.

    propagate, reshard, collectives      `partition`, the passes of `PASSES`
    sdy.* operations -> Collective       `collectives`: calls are followed, while loops multiply by their trip count
    local bytes of a result              `_local_bytes`: per dim, ceil(size / devices that share it)
    what the user's own `shard_map`s send `_manual_collectives`: as it is written
    axes of a permute                    `_moved_axes`: those with another place in the operand's sharding
    (bound - start) / step of a loop     `_trips`

The last pass, canonicalize, turns an all-reduce and the slice after it into one reduce-scatter. What XLA's partitioner
does later is not visible here: the order of the steps of a gather over two axes, its own lowering of gather and
scatter, gathers in bf16 on TPU, small reduce-scatters replaced by all-reduces, and that CPU has no reduce-scatter.

Source: Shardy's sdy dialect and its export pipeline (github.com/openxla/shardy, docs).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy
from jax.stages import Lowered

from autopar.codegen.tags import last_tag
from autopar.errors import TraceError
from autopar.ir.collective import Collective
from autopar.plans.comparison import group_size
from autopar.verification.hlo import file_line
from autopar.verification.replica_groups import group_axes, permuted_axes

COLLECTIVES = "builtin.module(func.func(sdy-reshard-to-collectives))"
PASSES = (
    "builtin.module(sdy-propagation-pipeline)",
    "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true}))",
    COLLECTIVES,
    "builtin.module(func.func(canonicalize))",
)

# operation -> kind, and the attribute that names its axes
_COLLECTIVES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "sdy.all_reduce": ("all-reduce", "reduction_axes"),
        "sdy.all_gather": ("all-gather", "gathering_axes"),
        "sdy.reduce_scatter": ("reduce-scatter", "reduce_scatter_axes"),
        "sdy.all_to_all": ("all-to-all", "params"),
        "sdy.collective_permute": ("collective-permute", "out_sharding"),
    }
)
#: The same in the body of a `shard_map` of the user's, whose types are those of shards -> kind.
_MANUAL: Mapping[str, str] = MappingProxyType(
    {
        "stablehlo.all_reduce": "all-reduce",
        "stablehlo.all_gather": "all-gather",
        "stablehlo.reduce_scatter": "reduce-scatter",
        "stablehlo.all_to_all": "all-to-all",
        "stablehlo.collective_permute": "collective-permute",
        "stablehlo.collective_broadcast": "collective-permute",
    }
)
_CONSTANTS = ("sdy.constant", "stablehlo.constant")


def partition(lowered: Lowered | ir.Module) -> ir.Module:
    """A copy of a lowered program in which Shardy has inserted every collective.

    Args:
        lowered: `jax.jit(f, ...).trace(...).lower(lowering_platforms=("cpu",))` with shardings over an `AbstractMesh`
            (or, with devices, `.lower()`), or its StableHLO module; it is not changed.

    Raises:
        TraceError: Shardy rejects the program.
    """
    module = cast(ir.Module, lowered.compiler_ir("stablehlo")) if isinstance(lowered, Lowered) else lowered
    with module.context:
        copy = ir.Module.parse(cast(bytes, module.operation.get_asm(binary=True, enable_debug_info=True)))
        for passes in PASSES:
            if passes == COLLECTIVES:
                _drop_reshards_from_one_device(copy.operation)
            try:
                passmanager.PassManager.parse(passes).run(copy.operation)
            except ir.MLIRError as error:
                raise TraceError(f"Shardy's pass {passes} rejects the program: {error}") from error
    return copy


def _drop_reshards_from_one_device(parent: ir.Operation) -> None:
    """Remove reshards of values that one device has, such as results of callbacks: the next pass rejects them.

    XLA sends such results to the other devices, whatever the plan.
    """
    for block in (block for region in parent.regions for block in region.blocks):
        for op in [op.operation for op in block.operations]:
            _drop_reshards_from_one_device(op)
            maker = op.operands[0].owner if op.name == "sdy.reshard" else None
            if not isinstance(maker, ir.OpView | ir.Operation) or "sdy.sharding" not in maker.attributes:
                continue
            if "@maximal_mesh" in str(maker.attributes["sdy.sharding"]):
                op.results[0].replace_all_uses_with(op.operands[0])
                op.erase()


def collectives(module: ir.Module, assumed: Mapping[str, int] = MappingProxyType({})) -> tuple[Collective, ...]:
    """Every collective of a module that `partition` returned, in program order.

    Bytes are per device. `count` is the product of the trip counts of the loops around it. The trip count of a loop is
    that in `assumed` under the tag of its operation, otherwise the one in the text, and 1 if the bound is not
    constant. A branch counts as if it always ran. A gather over several axes is one `Collective` with all of them; part
    of an axis has Shardy's name, "y:(2)2". A collective without a tag or source line gets those of the call or loop
    around it.
    """
    with module.context:
        ops = [op.operation for op in module.body.operations]
        meshes = [sdy.MeshAttr(op.attributes["mesh"]) for op in ops if op.name == "sdy.mesh"]
        axis_sizes = {axis.name: axis.size for mesh in meshes for axis in map(sdy.MeshAxisAttr, mesh.axes)}
        functions = {_symbol(op, "sym_name"): op for op in ops if op.name == "func.func"}
        roots = [op for name, op in functions.items() if name == "main"] or list(functions.values())[:1]
        return tuple(c for root in roots for c in _walk(root, _Program(functions, axis_sizes, assumed), _Place()))


@dataclass(frozen=True, slots=True)
class _Program:
    functions: Mapping[str, ir.Operation]
    axis_sizes: Mapping[str, int]  # in mesh order
    assumed: Mapping[str, int]  # tag -> trips


@dataclass(frozen=True, slots=True)
class _Place:
    """Context of the walk: executions per step, and tag and source line of the innermost enclosing operation."""

    count: int = 1
    op: str = ""
    source: str = ""

    def inside(self, op: ir.Operation, trips: int = 1) -> _Place:
        location = str(op.location)
        line = re.search(r'"([^"]+)":(\d+):\d+', location)  # the first of a chain of call sites is the innermost
        source = file_line(line[1], int(line[2])) if line else self.source
        return _Place(self.count * trips, _tag(location) or self.op, source)


def _tag(location: str) -> str:
    name = re.search(r'loc\((?:fused(?:<.*?>)?\[)?"([^"]*)"', location)
    return last_tag(name[1] if name else "")


def _walk(parent: ir.Operation, program: _Program, place: _Place) -> Iterator[Collective]:
    for op in (op.operation for region in parent.regions for block in region.blocks for op in block.operations):
        if op.name in _COLLECTIVES:
            yield _collective(op, program.axis_sizes, place.inside(op))
        elif op.name in _MANUAL:
            yield from _manual_collectives(op, program.axis_sizes, place.inside(op))
        elif op.name == "func.call":
            yield from _walk(program.functions[_symbol(op, "callee")], program, place.inside(op))
        elif len(op.regions):
            yield from _walk(op, program, place.inside(op, _runs(op, program)))


def _symbol(op: ir.Operation, attribute: str) -> str:
    return str(op.attributes[attribute]).lstrip("@").strip('"')


def _collective(op: ir.Operation, axis_sizes: Mapping[str, int], place: _Place) -> Collective:
    kind, attribute = _COLLECTIVES[op.name]
    named = _moved_axes(op, axis_sizes) if kind == "collective-permute" else _axis_refs(str(op.attributes[attribute]))
    axes = tuple(sorted(named, key=lambda axis: _mesh_order(axis, axis_sizes)))
    nbytes = _local_bytes(op, axis_sizes) * (group_size(axes, axis_sizes) if kind == "reduce-scatter" else 1)
    return Collective(kind, axes, nbytes, place.count, place.op, place.source)


def _manual_collectives(op: ir.Operation, axis_sizes: Mapping[str, int], place: _Place) -> Iterator[Collective]:
    """A collective that the user wrote, a piece for each operand; its groups are axes by name, or device ids."""
    attribute = op.attributes["source_target_pairs" if "source_target_pairs" in op.attributes else "replica_groups"]
    names, sizes = tuple(axis_sizes), tuple(axis_sizes.values())
    if named := re.findall(r'axis_ref<name = "([^"]+)"', str(attribute)):
        axes = tuple(axis for axis in names if axis in named)
    else:
        groups = np.array(ir.DenseIntElementsAttr(attribute))
        permutes = "source_target_pairs" in op.attributes
        axes = (permuted_axes if permutes else group_axes)(
            [*map(int, groups.ravel() if permutes else groups[0])], names, sizes
        )
    for operand, result in zip(op.operands, op.results, strict=True) if axes else ():
        tensor = ir.RankedTensorType(result.type if _MANUAL[op.name] == "all-gather" else operand.type)
        nbytes = math.prod(tensor.shape) * _item_bytes(tensor.element_type)
        yield Collective(_MANUAL[op.name], axes, nbytes, place.count, place.op, place.source)


# --- layouts ----------------------------------------------------------------------------------------------------------

_Dims = tuple[tuple[str, ...], ...]  # per dim, the axes that split it, major to minor


def _axis_refs(text: str) -> tuple[str, ...]:
    """Axes in an attribute's text: [{"x"}, {"y":(1)2}] -> x, y:(1)2."""
    return tuple(name + part for name, part in re.findall(r'"([^"]+)"(:\(\d+\)\d+)?', text))


def _mesh_order(axis: str, axis_sizes: Mapping[str, int]) -> tuple[int, int]:
    name, _, part = axis.partition(":(")
    return list(axis_sizes).index(name), int(part.partition(")")[0] or 1)


def _dims(sharding: ir.Attribute) -> _Dims:
    dims = map(sdy.DimensionShardingAttr, sdy.TensorShardingAttr(sharding).dimension_shardings)
    return tuple(_axis_refs(str(dim)) for dim in dims)


def _local_bytes(op: ir.Operation, axis_sizes: Mapping[str, int]) -> int:
    """Bytes per device of the result of a collective."""
    tensor = ir.RankedTensorType(op.results[0].type)
    dims = zip(tensor.shape, _dims(op.attributes["out_sharding"]), strict=True)
    return math.prod(-(-size // group_size(axes, axis_sizes)) for size, axes in dims) * _item_bytes(tensor.element_type)


def _item_bytes(element: ir.Type) -> int:
    """Bytes of one element as XLA stores it: a bool or a 4-bit number takes a byte."""
    bits = [int(n) for n in re.findall(r"^\D*(\d+)", str(element).removeprefix("complex<"))]
    return max(1, bits[0] // 8) * (2 if str(element).startswith("complex<") else 1)


def _moved_axes(op: ir.Operation, axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Whole axes along which a permute moves a device's shard: those that index other shards after it."""
    after = _strides(_dims(op.attributes["out_sharding"]), axis_sizes)
    sharding = _sharding(op.operands[0])
    before = _strides(_dims(sharding), axis_sizes) if sharding is not None else {}
    return tuple(axis for axis in axis_sizes if before.get(axis) != after.get(axis))


def _strides(dims: _Dims, axis_sizes: Mapping[str, int]) -> dict[str, dict[str, tuple[int, int]]]:
    """Axis -> its parts in use -> (dim, how many shards of that dim one step along the part skips)."""
    strides: dict[str, dict[str, tuple[int, int]]] = {}
    for dim, axes in enumerate(dims):
        for i, axis in enumerate(axes):
            parts = strides.setdefault(axis.partition(":(")[0], {})
            parts[axis] = dim, group_size(axes[i + 1 :], axis_sizes)
    return strides


def _sharding(value: ir.Value[Any]) -> ir.Attribute | None:
    """The sharding that Shardy has recorded for a value: at its operation, its loop, or its function's argument."""
    if isinstance(value, ir.BlockArgument):
        owner, index = value.owner.owner.operation, value.arg_number
    else:
        owner, index = _producer(value), ir.OpResult(value).result_number
    if "out_sharding" in owner.attributes:
        return owner.attributes["out_sharding"]
    if "sdy.sharding" in owner.attributes:
        return sdy.TensorShardingPerValueAttr(owner.attributes["sdy.sharding"]).shardings[index]
    if "arg_attrs" not in owner.attributes:
        return None
    argument = ir.DictAttr(ir.ArrayAttr(owner.attributes["arg_attrs"])[index])
    return argument["sdy.sharding"] if "sdy.sharding" in argument else None  # noqa: SIM401 - its get is a constructor


def _producer(value: ir.Value[Any]) -> ir.Operation:
    return cast(ir.Operation, value.owner).operation


# --- loops ------------------------------------------------------------------------------------------------------------


def _runs(op: ir.Operation, program: _Program) -> int:
    """How often the regions of an operation run."""
    assumed = program.assumed.get(_tag(str(op.location))) if op.name == "stablehlo.while" else None
    return assumed or _trips(op)


def _trips(loop: ir.Operation) -> int:
    """Iterations of a loop whose counter runs from a constant to a constant in constant steps, else 1."""
    if loop.name != "stablehlo.while":
        return 1
    condition, body = (_terminator(region.blocks[0]) for region in loop.regions)
    test = condition.operands[0]
    if isinstance(test, ir.BlockArgument) or not _is_less_than(_producer(test)):
        return 1
    counter, bound = _producer(test).operands
    if not isinstance(counter, ir.BlockArgument):
        return 1
    start, stop = _integer(loop.operands[counter.arg_number]), _integer(bound)
    step = _step(body.operands[counter.arg_number])
    return 1 if start is None or stop is None or not step else max(0, -(-(stop - start) // step))


def _terminator(block: ir.Block) -> ir.Operation:
    return block.operations[len(block.operations) - 1].operation


def _is_less_than(op: ir.Operation) -> bool:
    return op.name == "stablehlo.compare" and "LT" in str(op.attributes["comparison_direction"])


def _step(value: ir.Value[Any]) -> int | None:
    if isinstance(value, ir.BlockArgument) or _producer(value).name != "stablehlo.add":
        return None
    return next((n for n in map(_integer, _producer(value).operands) if n is not None), None)


def _integer(value: ir.Value[Any]) -> int | None:
    if isinstance(value, ir.BlockArgument) or _producer(value).name not in _CONSTANTS:
        return None
    return int(ir.DenseIntElementsAttr(_producer(value).attributes["value"])[0])
