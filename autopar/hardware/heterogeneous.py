"""Clusters of unequal groups: a cluster as a whole has the slowest figures of its groups.

Every device does the same share of a program that spans groups, and a collective ends with its last message, so

    rate of a dtype       the smallest peak x efficiency of any group             -> slowest_device
    memory                the smallest
    links                 the slowest in a host, the slowest between hosts        -> join

Groups whose hosts differ in size are counted in hosts of the greatest common size. That costs some neighbours on one
host as if they were on two hosts, but never two hosts as one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import ClusterError
from autopar.hardware.description import ClusterFigures, Device
from autopar.hardware.links import Level, Link, slowest


def slowest_device(devices: Sequence[Device]) -> Device:
    """A device with the worst figures of all devices; peak x efficiency is the smallest of any, for every dtype."""
    if len(set(devices)) == 1 and all(d.peak_flops == devices[0].peak_flops for d in devices):
        return devices[0]
    # a rate is peak times efficiency: the smallest product, over the one efficiency that is kept. A ratio of at least 1
    # is rounded to 1 or more, so that no peak is below the smallest
    efficiency = min(d.efficiency for d in devices)
    dtypes = dict.fromkeys(dtype for d in devices for dtype in d.peak_flops)
    rates = {dtype: min(d.peak(dtype) * (d.efficiency / efficiency) for d in devices) for dtype in dtypes}
    # the larger the extents at which the rate is half, the slower small products are
    rows, columns, contracted = (max(extents) for extents in zip(*(d.half_rate_extents for d in devices), strict=True))
    return replace(
        devices[0],
        name=" + ".join(dict.fromkeys(d.name for d in devices)),
        peak_flops=rates,
        memory_bandwidth=min(d.memory_bandwidth for d in devices),
        memory_bytes=min(d.memory_bytes for d in devices),
        kernel_overhead=max(d.kernel_overhead for d in devices),
        efficiency=efficiency,
        reduce_scatter=all(d.reduce_scatter for d in devices),
        rounds_operands=all(d.rounds_operands for d in devices),
        tile=max(d.tile for d in devices),
        overlap=min(d.overlap for d in devices),
        bucket_bytes=min(d.bucket_bytes for d in devices),
        combines=tuple(k for k in devices[0].combines if all(k in d.combines for d in devices)),
        half_rate_extents=(rows, columns, contracted),
        host_bandwidth=min(d.host_bandwidth for d in devices),
        host_memory_bytes=min(d.host_memory_bytes for d in devices),
    )


def join(groups: tuple[ClusterFigures, ...], inter: Link | None = None, name: str | None = None) -> ClusterFigures:
    """One cluster of `groups`, with their devices one after the other; see `Cluster.joined`."""
    _check_groups(groups, name)
    unit = math.gcd(*(_inside(g) for g in groups))
    between = [g.inter for g in groups] + ([inter] if inter else [])
    return ClusterFigures(
        name or " + ".join(f"{g.hosts} x {g.name}" for g in groups),
        slowest_device([g.device for g in groups]),
        sum(g.num_devices for g in groups) // unit,
        unit,
        _slowest_of([_within(g) for g in groups]),
        _slowest_of(between),
        groups=groups,
    )


def _check_groups(groups: tuple[ClusterFigures, ...], name: str | None) -> None:
    for group in groups:
        if not isinstance(group, ClusterFigures):
            raise ClusterError(f"Cluster {name!r} is joined of clusters, got {type(group).__name__} {group!r:.60}.")
    if not groups:
        raise ClusterError(f"Cluster {name!r} has no groups; it needs at least one.")


def _inside(group: ClusterFigures) -> int:
    """Number of devices that the link inside a host connects; all of a torus."""
    return group.num_devices if group.axis_levels else group.devices_per_host


def _within(group: ClusterFigures) -> Link:
    return slowest(group.axis_levels) if group.axis_levels else group.intra


def _slowest_of(links: Sequence[Link]) -> Link:
    return slowest([Level(2, link) for link in links])
