"""Virtual CPU devices: several JAX devices on the cores and the memory of one host.

XLA's CPU client gives every virtual device its own queue, but all of them run on one thread pool and in one memory. So
the rates below are of the host or of a core, and `Cluster.local` divides them by the number of devices. A collective is
a rendezvous of threads, followed by copies through the shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from autopar.hardware.description import ClusterFigures, Device
from autopar.hardware.links import Link


@dataclass(frozen=True, slots=True)
class HostModel:
    """Figures of a typical server core, accurate within a factor of two or three; calibrate for better ones.

    Attributes:
        flops_per_core: dtype name -> FLOP/s of one core.
        bandwidth_per_core: rate at which one core reads and writes, bytes/s.
        bandwidth_limit: the same of all cores together, bytes/s.
        rendezvous: time of a collective of few bytes over all devices if each has a core of its own, s.
        kernel_overhead: time to start one kernel on one device, s.
        network_alpha: latency of a message between hosts, s.
        network_bandwidth: bandwidth of a host's network port, bytes/s.
        efficiency: share of `flops_per_core` that large products reach.
        bucket_bytes: size up to which XLA combines all-reduces, bytes; it combines no other collectives on CPU.
        half_rate_extents: rows, columns and contracted extent at each of which the rate of a product is half.
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
        """Memory bandwidth of the whole host, bytes/s."""
        return min(cores * self.bandwidth_per_core, self.bandwidth_limit)

    def copy_bandwidth(self, cores: int) -> float:
        """Rate at which all devices of the host copy in a collective, bytes/s: each byte is read and written once."""
        return self.memory_bandwidth(cores) / 2

    def rendezvous_alpha(self, devices: int, cores: int) -> float:
        """Latency of a collective per participating device, s; threads take turns if cores are fewer than devices."""
        return self.rendezvous * max(1.0, devices / cores) / devices


# float32: two AVX2 multiply-adds of 8 lanes per cycle at 2.5 GHz, which large products reach; float64 has half the
# lanes, and the 16-bit types are widened to float32 first. The rates of products with one small extent agree with the
# half-rate extents within a factor of two, from 1/12 of the rate with 4 columns to 9/10 with 512 (measured).
# A collective of 4 KiB among 2, 4 and 8 of 8 devices on 2 cores takes 37, 65 and 198 us (measured). Beyond the
# last-level cache a server core moves about 10 GB/s; small arrays that stay in cache are several times faster.
HOST = HostModel(
    flops_per_core=MappingProxyType({"float32": 8e10, "float64": 4e10, "bfloat16": 8e10, "float16": 8e10}),
    bandwidth_per_core=1e10,
    bandwidth_limit=1e11,
    rendezvous=4e-5,
    bucket_bytes=2.0**30,  # XLA combined four all-reduces of 200 MB each into one, and never all-gathers
    half_rate_extents=(8.0, 24.0, 24.0),
    kernel_overhead=1e-6,
    network_alpha=2e-4,  # assumption: TCP through the kernel, with the thread that drives it
    network_bandwidth=1.25e9,  # assumption: 10 Gb/s Ethernet
)


def of_host(hosts: int, devices: int, cores: int, memory_bytes: int, name: str = "local cpu") -> ClusterFigures:
    """The cluster of `devices` virtual CPU devices on each of `hosts` machines with `cores` and `memory_bytes`."""
    device = Device(
        "cpu",
        {dtype: rate * cores / devices for dtype, rate in HOST.flops_per_core.items()},
        HOST.memory_bandwidth(cores) / devices,
        memory_bytes // devices,
        HOST.kernel_overhead,
        HOST.efficiency,
        reduce_scatter=False,
        bucket_bytes=HOST.bucket_bytes,
        combines=("all-reduce",),
        half_rate_extents=HOST.half_rate_extents,
        host_bandwidth=HOST.copy_bandwidth(cores) / devices,  # a copy within the same memory, which frees none of it
    )
    intra = Link(HOST.rendezvous_alpha(devices, cores), devices / HOST.copy_bandwidth(cores), "memory")
    inter = Link(HOST.network_alpha, devices / HOST.network_bandwidth)
    return ClusterFigures(name, device, hosts, devices, intra, inter)
