"""The cluster presets as a table: what a device does, and which links join it to others.

rows(presets)   name, devices of the smallest cluster, memory, rates, links
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.hardware.cluster import Cluster, Link
from autopar.ir.text import Rows, size

HEADS = ("", "devices", "memory", "dense peak, flop/s", "in a host", "between hosts")


def rows(names: Sequence[str]) -> Rows:
    """One row per preset, for one host; rates of links are per device and, along a torus, per link and direction."""
    return [_row(name, Cluster.preset(name)) for name in names]


def _row(name: str, cluster: Cluster) -> tuple[str, ...]:
    device = cluster.device
    memory = f"{size(device.memory_bytes)}, {size(device.memory_bandwidth)}/s"
    half = max(("bfloat16", "float16"), key=device.peak)
    peaks = ", ".join(f"{device.peak(dtype) / 1e12:.4g}T {dtype}" for dtype in (half, "float32"))
    return name, f"{cluster.num_devices} x {device.name}", memory, peaks, _link(cluster.intra), _link(cluster.inter)


def _link(link: Link) -> str:
    network = "" if link.network == "switch" else f" {link.network}"
    return f"{size(link.bandwidth)}/s{network}, {link.alpha * 1e6:g} us"
