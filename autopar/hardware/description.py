"""Devices and clusters as figures, without what follows from them: what files, presets and measurements make.

`autopar.hardware.cluster` adds meshes, parts and constructors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from autopar.errors import ClusterError
from autopar.hardware.dtypes import rate
from autopar.hardware.figures import (
    BANDWIDTH,
    COUNT,
    FIGURE,
    FLAG,
    LEAST_SPEED,
    MEMORY,
    NAME,
    OPTIONAL_BANDWIDTH,
    RATE,
    SHARE,
    FieldRule,
    check,
    each,
    is_count,
    is_figure,
    is_name,
    is_rates,
)
from autopar.hardware.links import Level, Link


@dataclass(frozen=True, slots=True)
class Device:
    """Cost model of one accelerator, or of one virtual device of a host.

    Attributes:
        name: name in plans and reports.
        peak_flops: dtype name -> dense FLOP/s.
        memory_bandwidth: bandwidth of device memory, bytes/s.
        memory_bytes: device memory that programs may use, bytes.
        kernel_overhead: least time of a kernel, seconds.
        efficiency: share of `peak_flops` that large matrix products reach.
        reduce_scatter: whether the backend has a reduce-scatter; XLA on CPU uses an all-reduce and a slice.
        rounds_operands: whether the backend rounds float32 operands of products of default precision to bfloat16 before
            it communicates them.
        tile: rows and columns of the tiles to which arrays are padded in memory.
        overlap: share of the time of a collective that overlaps with computation, for collectives that no operation
            waits for (`autopar.passes.op_groups.overlap`); 0: no overlap.
        bucket_bytes: size up to which such collectives are combined, so that they share the latency, bytes; 0: they
            are not combined.
        combines: kinds of collectives that the backend combines.
        half_rate_extents: rows, columns and contracted extent at each of which the rate of a matrix product is half.
        host_bandwidth: bandwidth between device and host memory in each direction while all devices of the host copy,
            bytes/s; 0: unknown, and no state is offloaded.
        host_memory_bytes: host memory per device, bytes; 0: none apart from device memory.
    """

    name: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    memory_bytes: int
    kernel_overhead: float = 0.0
    efficiency: float = 1.0
    reduce_scatter: bool = True
    rounds_operands: bool = False
    tile: tuple[int, int] = (1, 1)
    overlap: float = 0.0
    bucket_bytes: float = 0.0
    combines: tuple[str, ...] = ("all-reduce", "all-gather", "reduce-scatter")
    half_rate_extents: tuple[float, float, float] = (0.0, 0.0, 0.0)
    host_bandwidth: float = 0.0
    host_memory_bytes: int = 0

    def __post_init__(self) -> None:
        check(f"Device {self.name!r:.60}", self, DEVICE)

    def peak(self, dtype: str) -> float:
        """FLOP/s for a dtype name; for one that is not listed, of the next wider one -> `autopar.hardware.dtypes`."""
        return rate(self.peak_flops, dtype)


#: Field of `Device` -> the rule for its value.
DEVICE: Mapping[str, FieldRule] = MappingProxyType(
    {
        "name": NAME,
        "peak_flops": (f"FLOP/s by dtype, {LEAST_SPEED:g} or more, such as 989e12 for 989 TFLOP/s", is_rates),
        "memory_bandwidth": BANDWIDTH,
        "efficiency": RATE,
        "memory_bytes": MEMORY,
        "host_bandwidth": OPTIONAL_BANDWIDTH,
        **dict.fromkeys(("kernel_overhead", "bucket_bytes", "host_memory_bytes"), FIGURE),
        **dict.fromkeys(("reduce_scatter", "rounds_operands"), FLAG),
        "overlap": SHARE,
        "tile": ("two integers of 1 or more", each(is_count, 2)),
        "half_rate_extents": ("three numbers of 0 or more", each(is_figure, 3)),
        "combines": ("kinds of collectives", each(is_name)),
    }
)


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """The fields of a cluster; `autopar.hardware.cluster.Cluster` describes them."""

    name: str
    device: Device
    hosts: int
    devices_per_host: int
    intra: Link
    inter: Link
    axis_levels: tuple[Level, ...] | None = None
    groups: tuple[ClusterFigures, ...] = ()

    def __post_init__(self) -> None:
        check(f"Cluster {self.name!r:.60}", self, CLUSTER)
        if any(level.size < 1 for level in self.levels):
            raise ClusterError(f"Cluster {self.name!r} has sizes {[v.size for v in self.levels]}; all must be >= 1.")

    @property
    def levels(self) -> tuple[Level, ...]:
        """Levels of the physical network, outermost first."""
        return self.axis_levels or (Level(self.hosts, self.inter), Level(self.devices_per_host, self.intra))

    @property
    def num_devices(self) -> int:
        """Number of devices on all hosts."""
        return math.prod(level.size for level in self.levels)


#: Field of `Cluster` -> the rule for its value.
CLUSTER: Mapping[str, FieldRule] = MappingProxyType(
    {
        "name": NAME,
        "device": ("a Device", lambda value: isinstance(value, Device)),
        **dict.fromkeys(("hosts", "devices_per_host"), COUNT),
        **dict.fromkeys(("intra", "inter"), ("a Link", lambda value: isinstance(value, Link))),
    }
)
