"""The devices that JAX sees here as a cluster -> find

Virtual CPU devices share the cores and the memory of their host, so each gets its share of both (-> of_host);
accelerators are looked up by their kind among the presets (-> of_accelerators).
"""

from __future__ import annotations

import os
from typing import Any

from autopar.errors import ClusterError
from autopar.hardware.cluster import Cluster, Device, Link
from autopar.hardware.host import HOST


def find() -> Cluster:
    """See `Cluster.local`."""
    import jax

    devices = jax.devices()
    hosts = jax.process_count()
    if devices[0].platform == "cpu":
        return of_host(hosts, len(devices) // hosts, os.cpu_count() or 1, physical_memory())
    return of_accelerators(devices, hosts)


def of_host(hosts: int, devices: int, cores: int, memory_bytes: int, name: str = "local cpu") -> Cluster:
    """`devices` virtual CPU devices on each of `hosts` machines with `cores` cores and `memory_bytes` bytes."""
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
        host_bandwidth=HOST.copy_bandwidth(cores) / devices,  # a copy within the one memory, which frees nothing
    )
    intra = Link(HOST.meeting_alpha(devices, cores), devices / HOST.copy_bandwidth(cores), "memory")
    inter = Link(HOST.network_alpha, devices / HOST.network_bandwidth)
    return Cluster(name, device, hosts, devices, intra, inter)


def physical_memory() -> int:
    """Bytes of the host's memory; 8 GiB where the platform does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 8 * 2**30


def of_accelerators(devices: list[Any], hosts: int) -> Cluster:
    """The preset whose kinds name this JAX `device_kind`, with the machine's own counts.

    On a torus the topology is the extent of the devices' coordinates.
    """
    from autopar.hardware import files as cluster_files

    kind = str(devices[0].device_kind)
    name = cluster_files.preset_of(kind)
    if name is None:
        known = ", ".join(Cluster.presets())
        raise ClusterError(f"No preset describes a {kind!r}; known presets: {known}. Use Cluster.from_toml or .custom.")
    coords = [tuple(d.coords) for d in devices if getattr(d, "coords", None)]
    if cluster_files.is_torus(name) and coords:
        extents = [max(along) - min(along) + 1 for along in zip(*coords, strict=True)]
        return cluster_files.preset(name, None, "x".join(map(str, extents)), 1)
    one = Cluster.preset(name)
    return Cluster(f"local {name}", one.device, hosts, len(devices) // hosts, one.intra, one.inter)
