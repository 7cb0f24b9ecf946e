"""The devices that JAX reports, as a cluster -> find

Virtual CPU devices share the cores and the memory of their host, so each has its share of both (-> host.of_host).
Accelerators are looked up among the presets by their device kind (-> of_accelerators).
"""

from __future__ import annotations

import os
from typing import Any

from autopar.errors import ClusterError
from autopar.hardware import files as cluster_files
from autopar.hardware.description import ClusterFigures
from autopar.hardware.host import of_host


def find() -> ClusterFigures:
    """See `Cluster.local`."""
    import jax

    devices = jax.devices()
    hosts = jax.process_count()
    if devices[0].platform == "cpu":
        return of_host(hosts, len(devices) // hosts, os.cpu_count() or 1, physical_memory())
    return of_accelerators(devices, hosts)


def physical_memory() -> int:
    """Size of the host's memory in bytes; 8 GiB if the platform does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        # that of a small laptop: a budget that is too small costs time, one that is too large the step
        return 8 * 2**30


def of_accelerators(devices: list[Any], hosts: int) -> ClusterFigures:
    """The preset for this JAX `device_kind`, with the numbers of hosts and devices of this machine.

    On a torus the topology is the extent of the devices' coordinates.

    Raises:
        ClusterError: no preset has this device kind.
    """
    kind = str(devices[0].device_kind)
    name = cluster_files.preset_of(kind)
    if name is None:
        presets = ", ".join(cluster_files.presets())
        raise ClusterError(
            f"No preset describes a {kind!r}; known presets: {presets}. Use Cluster.from_toml or .custom."
        )
    coords = [tuple(d.coords) for d in devices if getattr(d, "coords", None)]
    if cluster_files.is_torus(name) and coords:
        extents = [max(along) - min(along) + 1 for along in zip(*coords, strict=True)]
        return cluster_files.preset(name, None, "x".join(map(str, extents)), 1)
    preset = cluster_files.preset(name)
    return ClusterFigures(f"local {name}", preset.device, hosts, len(devices) // hosts, preset.intra, preset.inter)
