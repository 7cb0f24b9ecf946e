"""GPU topologies without a GPU: JAX's CUDA plugin compiles for devices that are only described.

A topology is named as in "h100:8": the kind of device, and the number of devices of one host. Its devices can form a
mesh and be compiled for; nothing runs on them. `GPUS` has the figures that XLA's compiler needs of a device. XLA takes
them as the text of a protocol buffer (GpuTargetConfigProto of openxla/xla).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from autopar.errors import ArgumentError, MeshError

#: Figures that all devices share (CUDA C++ Programming Guide, table of compute capabilities 8.0 and 9.0).
_COMMON: Mapping[str, Any] = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 49152,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}

#: Name -> fields of the description that differ: bytes, bytes/s, GHz, and the compute capability.
GPUS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # NVIDIA H100 Tensor Core GPU Architecture (white paper, 2022), the SXM5 module
        "h100": {
            "core_count": 132,
            "fpus_per_core": 128,
            "shared_memory_per_core": 233472,
            "shared_memory_per_block_optin": 232448,
            "memory_bandwidth": 3352 * 10**9,
            "device_memory_size": 80 * 10**9,
            "l2_cache_size": 50 * 2**20,
            "clock_rate_ghz": 1.98,
            "capability": (9, 0),
        },
        # NVIDIA A100 Tensor Core GPU Architecture (white paper, 2020), the SXM4 module of 80 GB
        "a100": {
            "core_count": 108,
            "fpus_per_core": 64,
            "shared_memory_per_core": 167936,
            "shared_memory_per_block_optin": 166912,
            "memory_bandwidth": 2039 * 10**9,
            "device_memory_size": 80 * 10**9,
            "l2_cache_size": 40 * 2**20,
            "clock_rate_ghz": 1.41,
            "capability": (8, 0),
        },
    }
)

#: Without CUDA's libraries the plugin refuses to load unless this is set, before JAX looks for backends. Compiling for
#: described devices needs none of them.
UNCHECKED = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"

#: Versions of cuDNN and CUDA for which the compiler generates code.
_DNN, _CUDA = (9, 8), (12, 8)


def mesh(topology: str, sizes: Sequence[int], names: Sequence[str]) -> Any:
    """A mesh with Auto axes over the devices of a topology such as "h100:8".

    Raises:
        ArgumentError: no such device is described, or the plugin is not installed.
        MeshError: the topology has another number of devices than the mesh.
    """
    from jax.experimental import topologies

    from autopar import jax_compat

    name, _, number = topology.partition(":")
    if name not in GPUS or not number.isdigit() or int(number) < 1:
        raise ArgumentError(f"topology {topology!r} is not known; it is named like 'h100:8'. Known: {', '.join(GPUS)}")
    if int(number) != math.prod(sizes):
        raise MeshError(
            f"topology {topology!r} has not the {math.prod(sizes)} devices of the plan's mesh {tuple(sizes)}"
        )
    os.environ.setdefault(UNCHECKED, "1")
    try:
        described = topologies.get_topology_desc(
            name, platform="cuda", target_config=target_config(name), topology=f"1x1x{number}"
        )
    except Exception as error:  # the plugin's exception classes are not public
        raise ArgumentError(
            f"the CUDA plugin cannot describe {topology!r} ({str(error).splitlines()[0]:.200}). "
            f"It needs the extra gpu (pip install 'autopar[gpu]'), no GPU; where CUDA's libraries are missing, set "
            f"{UNCHECKED}=1 before JAX starts."
        ) from error
    return jax_compat.auto_mesh(np.array(described.devices).reshape(tuple(sizes)), tuple(names))


def target_config(name: str) -> str:
    """The description of a device as the text of XLA's GpuTargetConfigProto."""
    fields = {**_COMMON, **GPUS[name]}
    lines = [f"  {key}: {value}" for key, value in fields.items() if key != "capability"]
    lines.append(f"  cuda_compute_capability {{ {_version(fields['capability'])} }}")
    versions = [f"dnn_version_info {{ {_version(_DNN)} }}", f"runtime_version {{ {_version(_CUDA)} }}"]
    names = ['platform_name: "CUDA"', f'device_description_str: "{name}"']
    return "\n".join(["gpu_device_info {", *lines, "}", *names, *versions])


def _version(numbers: Sequence[int]) -> str:
    return f"major: {numbers[0]} minor: {numbers[1]}"
