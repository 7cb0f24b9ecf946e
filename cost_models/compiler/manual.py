"""What the body of a `shard_map` costs on a device: seconds, and memory beside operands and results.

The body is a program on shards. It is priced as programs without a mesh are:

    kernels         roofline of FLOPs and of bytes of operands and results      -> autopar.cost_models.compute
    light           bytes of the result, if it is written (`fusion.SECONDS`); of arguments that it reads
    collectives     as planned ones, without overlap                            -> autopar.cost_models.collectives
    loops           as often as they run

Memory is what its operations write and later ones read, less operands and results of the `shard_map`: the largest sum
at one operation. What is light is written where a kernel, a collective or the end of a body reads it
                                                                                                      -> workspace_bytes
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache

from autopar.cost_models.collectives import collective_time
from autopar.cost_models.compiler.fusion import CPU, KERNEL, KINDS, LIGHT, LOOP, SECONDS
from autopar.cost_models.compute import op_time, product_efficiency
from autopar.cost_models.flops import computing_dtype, flops
from autopar.hardware.cluster import LogicalMesh
from autopar.hardware.description import Device
from autopar.ir.graph import Atom, Body, Graph, Op, Region
from autopar.ir.keyed import grouped
from autopar.ir.op_sets import PRODUCTS
from autopar.rules.manual import MANUAL, MOST_CACHED, NO_WORK, ManualCall, call_of, kind_of


def seconds(call: ManualCall, mesh: LogicalMesh) -> float:
    """Seconds of one run of a `shard_map`: those of its body on each device, and of its collectives."""
    return compute_seconds(call.body, mesh.device) + sum(
        c.count * collective_time(c.kind, c.bytes, tuple(map(mesh.axis, c.axes)), mesh) for c in call.collectives
    )


@lru_cache(maxsize=MOST_CACHED)
def compute_seconds(body: Graph, device: Device) -> float:
    """Seconds of one run of a body without its collectives."""
    return math.fsum(level.runs * part for level in body.bodies for part in _seconds(body, level, device))


def _seconds(body: Graph, level: Body, device: Device) -> Iterator[float]:
    """Seconds of the operations of one level of a body, each once."""
    readers, arguments = _readers(level.ops, level.outputs), set(level.inputs)
    free: set[int] = set()  # made from constants and scalars alone, where they are read
    for op in level.ops:
        kind = _kind(op)
        if op.name == MANUAL:
            yield compute_seconds(call_of(op).body, device)
        elif op.regions or not kind or kind_of(op):
            continue
        elif kind == LIGHT:
            if all(not isinstance(a, int) or a in free or not body.types[a].shape for a in op.inputs):
                free.update(op.outputs)
                continue
            written = (v for v in op.outputs if SECONDS.is_written(readers.get(v, Counter())))
            moved = (*written, *(a for a in op.inputs if a in arguments and isinstance(a, int)))
            yield sum(body.types[v].nbytes for v in moved) / device.memory_bandwidth
        else:
            yield _kernel_seconds(body, op, device)


def _kind(op: Op) -> str:
    """The kind of an operation; "" for those that compute nothing."""
    if op.regions:
        return LOOP
    return "" if op.name in NO_WORK else KINDS.get(op.name, KERNEL)


def _readers(ops: Sequence[Op], outputs: Sequence[Atom]) -> dict[int, Counter[str]]:
    """Value -> the number of its readers of each kind; a body's end is a kernel."""
    readers: dict[int, Counter[str]] = {}
    for op in ops:
        for atom in op.inputs:
            if isinstance(atom, int):
                readers.setdefault(atom, Counter())[_kind(op) or LIGHT] += 1
    for atom in outputs:
        if isinstance(atom, int):
            readers.setdefault(atom, Counter())[KERNEL] += 1
    return readers


def _kernel_seconds(body: Graph, op: Op, device: Device) -> float:
    operands, results = [body.type_of(a) for a in op.inputs], [body.types[v] for v in op.outputs]
    dtype = computing_dtype(op, operands) if operands else results[0].dtype
    nbytes = sum(t.nbytes for t in (*operands, *results))
    efficiency = _efficiency(op, [t.shape for t in operands], device) if op.name in PRODUCTS else 1.0
    total = flops(op, operands, results)
    return float(op_time(total, nbytes, dtype, device, launches=1, efficiency=efficiency))


def _efficiency(op: Op, shapes: Sequence[tuple[int, ...]], device: Device) -> float:
    """Share of the device's rate at which a product runs."""
    left, right = shapes[:2]
    if op.name == "dot_general":
        (contracted, _), (_, batch) = op.params["dimension_numbers"]
        inner = math.prod(left[d] for d in contracted)
        rows, columns = math.prod(left) // max(1, inner), math.prod(right) // max(1, inner)
        columns //= max(1, math.prod(right[d] for d in batch))
        return float(product_efficiency(rows, columns, inner, device))
    numbers = op.params["dimension_numbers"]
    columns, result = right[numbers.rhs_spec[0]], op.equation.outvars[0].aval.shape
    return float(product_efficiency(math.prod(result) // max(1, columns), columns, math.prod(right) // columns, device))


# Memory


@lru_cache(maxsize=MOST_CACHED)
def workspace_bytes(body: Graph) -> int:
    """Most bytes that a run of a body has in memory at once, beside its arguments and results."""
    return _peak(body, body.ops, body.outputs, {*body.inputs, *body.outputs})


def _peak(body: Graph, ops: Sequence[Op], outputs: Sequence[Atom], elsewhere: Collection[Atom]) -> int:
    """The same of one level; values `elsewhere` are counted by the caller."""
    readers = _readers(ops, outputs)
    written = {v for op in ops for v in op.outputs if not _is_light(op) or CPU.is_written(readers.get(v, Counter()))}
    dying = grouped((moment, v) for v, moment in _last_reads(ops, outputs, written).items())
    here = written.difference(elsewhere)
    live = peak = 0
    for moment, op in enumerate(ops):
        written_bytes = [body.types[v].nbytes for v in op.outputs if v in here]
        freed_bytes = [body.types[v].nbytes for v in dying.get(moment, ()) if v in here]
        overwritten = sum(written_bytes) if _is_light(op) and set(written_bytes) & set(freed_bytes) else 0
        live += sum(written_bytes)
        peak = max(peak, live - overwritten + _inside(body, op))
        live -= sum(freed_bytes)
    return peak


def _is_light(op: Op) -> bool:
    return not op.regions and _kind(op) in ("", LIGHT)


def _last_reads(ops: Sequence[Op], outputs: Sequence[Atom], written: Collection[int]) -> Mapping[int, int]:
    """Value -> the last moment at which it is read; at which it is made, if never.

    What is made of it and not written is made again at each read, and reads it then.
    """
    last = {a: len(ops) for a in outputs if isinstance(a, int)}
    for moment, op in reversed([*enumerate(ops)]):
        for v in op.outputs:
            last.setdefault(v, moment)
        until = max((last[v] for v in op.outputs if v not in written), default=moment)
        for a in op.inputs:
            if isinstance(a, int):
                last[a] = max(last.get(a, until), until)
    return last


def _inside(body: Graph, op: Op) -> int:
    """The peak of what an operation runs: of a nested `shard_map`, or of the largest of its regions."""
    if op.name == MANUAL:
        return workspace_bytes(call_of(op).body)
    return max((_of_region(body, region) for region in op.regions), default=0)


def _of_region(body: Graph, region: Region) -> int:
    return _peak(body, region.ops, region.outputs, region.inputs)
