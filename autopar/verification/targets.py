"""The compilers that a plan is verified against: meshes to lower for, and what one lowered program emits on them.

    shardy    an abstract mesh, partitioned by Shardy alone       (`autopar.verification.shardy`)
    cpu       virtual devices of this process, XLA
    tpu, gpu  devices of a topology that is only described        (`autopar.hardware`)

`BACKENDS` lists them. Each program is a `jax.jit` lowered for `Backend.platform` on `Backend.mesh`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from autopar import jax_compat
from autopar.codegen.context import AnyMesh
from autopar.errors import MeshError
from autopar.hardware import gpu_topology, tpu_topology
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph
from autopar.ir.op_sets import RETURNING_CALLBACKS
from autopar.passes.op_groups.bindings import assumed_trips
from autopar.verification import hlo, shardy

#: Operations that JAX lowers for devices at hand only. Tried on 0.10.2 and 0.12.0.
LOWERED_FOR_DEVICES = (*RETURNING_CALLBACKS, "inspect_sharding")

TARGETS = ("cpu", "shardy", "tpu:TOPOLOGY (tpu:v5e:2x4)", "gpu:DEVICES (gpu:h100:8)")


@dataclass(frozen=True)
class Axes:
    """Names and sizes of the axes of a mesh."""

    names: Sequence[str]
    sizes: Sequence[int]


@dataclass(frozen=True)
class Emitted:
    """What a target makes of a program.

    Attributes:
        collectives: that it emits, with their executions per call.
        memory: kind of memory -> bytes per device, if the target reports it.
        flops: floating-point operations per device and call, if the target reports them.
        accessed: bytes read and written in device memory per device and call, if the target reports them.
    """

    collectives: tuple[Collective, ...]
    memory: Mapping[str, int] = field(default_factory=dict[str, int])
    flops: float = 0.0
    accessed: float = 0.0


@dataclass(frozen=True)
class Backend:
    """How to compile for one kind of target.

    Attributes:
        platform: JAX's name of the platform to lower for.
        mesh: (axes, program, topology) -> the mesh to lower for.
        emit: (lowered program, its axes, its graph, XLA options that it needs) -> what the target emits.
    """

    platform: str
    mesh: Callable[[Axes, Graph, str], AnyMesh]
    emit: Callable[[jax.stages.Lowered, Axes, Graph, Mapping[str, str]], Emitted]


# Meshes


def _abstract(axes: Axes, graph: Graph, topology: str) -> AnyMesh:
    """A mesh without devices; of local devices if an operation, such as a callback, is lowered only for devices."""
    bound = next((op for op in graph.walk() if op.name in LOWERED_FOR_DEVICES), None)
    if bound is None:
        return jax_compat.auto_abstract_mesh(axes.sizes, axes.names)
    return _of_local_devices(axes, f"for '{bound.name}'{f' at {bound.source}' if bound.source else ''}")


def _local(axes: Axes, graph: Graph, topology: str) -> AnyMesh:
    return _of_local_devices(axes, "with target 'cpu'")


def _of_local_devices(axes: Axes, why: str) -> AnyMesh:
    devices, count = jax.devices(), math.prod(axes.sizes)
    if len(devices) < count:
        raise MeshError(f"verify needs {count} devices for mesh {tuple(axes.sizes)} {why}, {len(devices)} are here")
    return jax_compat.auto_mesh(np.array(devices[:count]).reshape(tuple(axes.sizes)), axes.names)


def _tpu(axes: Axes, graph: Graph, topology: str) -> AnyMesh:
    return tpu_topology.mesh(topology, axes.sizes, axes.names)


def _gpu(axes: Axes, graph: Graph, topology: str) -> AnyMesh:
    return gpu_topology.mesh(topology, axes.sizes, axes.names)


# Programs


def _partitioned(lowered: jax.stages.Lowered, axes: Axes, graph: Graph, needed: Mapping[str, str]) -> Emitted:
    return Emitted(shardy.collectives(shardy.partition(lowered), assumed_trips(graph)))


def _compiled(
    lowered: jax.stages.Lowered, axes: Axes, graph: Graph, needed: Mapping[str, str], options: Mapping[str, str]
) -> Emitted:
    with jax_compat.own_source_lines():
        compiled = lowered.compile(compiler_options={**_merged_options(options, needed)})
    return read(compiled, axes, graph)


def read(compiled: Any, axes: Axes, graph: Graph) -> Emitted:
    """What a compiled program emits; `compiled`: a `jax.stages.Compiled`."""
    stats = compiled.memory_analysis()
    memory = {
        "arguments": stats.argument_size_in_bytes,
        "results": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "host arguments": stats.host_argument_size_in_bytes,
    }
    costs = compiled.cost_analysis() or {}
    collectives = hlo.collectives(compiled.as_text(), axes.names, axes.sizes, assumed_trips(graph))
    return Emitted(collectives, memory, float(costs.get("flops", 0.0)), float(costs.get("bytes accessed", 0.0)))


def _merged_options(*options: Mapping[str, str]) -> dict[str, str]:
    """Compiler options together, with their lists concatenated."""
    names = dict.fromkeys(name for each in options for name in each)
    return {name: ",".join(each[name] for each in options if name in each) for name in names}


def _without(*passes: str) -> Mapping[str, str]:
    """Compiler options that disable these passes.

    Combining only changes the number of pieces in one instruction; without it, the pieces keep their own tags.
    """
    return {"xla_disable_hlo_passes": ",".join(passes)}


_ON_CPU = _without("cpu-all-reduce-combiner")
_ON_GPU = _without("gpu-all-reduce-combiner", "gpu-reduce-scatter-combiner", "gpu-all-gather-combiner")
# libtpu also stages buffers through on-chip memory, and passes those of a collective through all loops that overlap
# with it. Its cost analysis counts both as traffic, so both are disabled.
_ON_TPU = {
    **_without("all-reduce-combiner"),
    "xla_vf_vmem_memory_space_assignment": "false",
    "xla_tpu_enable_async_collective_fusion": "false",
}

BACKENDS: Mapping[str, Backend] = {
    "shardy": Backend("cpu", _abstract, _partitioned),
    "cpu": Backend("cpu", _local, partial(_compiled, options=_ON_CPU)),
    "tpu": Backend("tpu", _tpu, partial(_compiled, options=_ON_TPU)),
    "gpu": Backend("cuda", _gpu, partial(_compiled, options=_ON_GPU)),
}

#: Platforms whose devices need not be present: the target names a topology.
DESCRIBED = ("tpu", "gpu")
