"""Virtual CPU devices: several JAX devices on the cores and the memory of one host.

XLA's CPU client gives every virtual device its own queue, but all of them run on one thread pool and in one memory. So
the rates below belong to the host or to a core, and `Cluster.local` divides them by the number of devices; a collective
is a rendezvous of threads followed by copies through the shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class HostModel:
    """Figures of a usual server core, right within a factor of two or three; measure for more than that.

    Attributes:
        flops_per_core: dtype name -> flop/s of one core.
        bandwidth_per_core: bytes/s that one core reads and writes.
        bandwidth_limit: bytes/s of all cores together.
        rendezvous: s of one collective of few bytes over all devices where each has a core of its own.
        kernel_overhead: s to start one kernel on one device.
        network_alpha: s of one message between hosts.
        network_bandwidth: bytes/s of a host's network port.
        efficiency: share of `flops_per_core` that large products reach.
        bucket_bytes: bytes up to which XLA makes one all-reduce of several; it combines nothing else here.
        half_rate_extents: rows, columns and contracted extent at which each alone halves the rate of a product.
    """

    flops_per_core: Mapping[str, float] = field(hash=False)
    bandwidth_per_core: float
    bandwidth_limit: float
    rendezvous: float
    kernel_overhead: float
    network_alpha: float
    network_bandwidth: float
    efficiency: float = 1.0
    bucket_bytes: float = 0.0
    half_rate_extents: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def memory_bandwidth(self, cores: int) -> float:
        """bytes/s of the whole host."""
        return min(cores * self.bandwidth_per_core, self.bandwidth_limit)

    def copy_bandwidth(self, cores: int) -> float:
        """bytes/s delivered by all devices of the host in a collective: each byte is read once and written once."""
        return self.memory_bandwidth(cores) / 2

    def meeting_alpha(self, devices: int, cores: int) -> float:
        """s of a collective for each device that takes part: its thread has to come up, with fewer cores in turns."""
        return self.rendezvous * max(1.0, devices / cores) / devices


# float32: two AVX2 multiply-adds of 8 lanes a cycle at 2.5 GHz, which large products were seen to reach; float64 has
# half the lanes, and the 16-bit types are widened to float32 first. Products narrow in one extent were seen to lose as
# much as the half-rate extents say within a factor of two, from 1/12 of the rate with 4 columns to 9/10 with 512.
# A collective of 4 KiB among 2, 4 and 8 of 8 devices on 2 cores was measured to cost 37, 65 and 198 us. Out of the
# last-level cache a server core moves about 10 GB/s; small arrays that stay in cache run several times faster.
HOST = HostModel(
    flops_per_core=MappingProxyType({"float32": 8e10, "float64": 4e10, "bfloat16": 8e10, "float16": 8e10}),
    bandwidth_per_core=1e10,
    bandwidth_limit=1e11,
    rendezvous=4e-5,
    bucket_bytes=2.0**30,  # four of 200 MB each were seen to become one, and gathers never
    half_rate_extents=(8.0, 24.0, 24.0),
    kernel_overhead=1e-6,
    network_alpha=2e-4,  # assumption: TCP through the kernel, with the thread that drives it
    network_bandwidth=1.25e9,  # assumption: 10 Gb/s Ethernet
)
