"""Submeshes of a cluster on which stages are placed: their positions, and the mesh of each number of devices."""

from __future__ import annotations

from autopar.errors import ClusterError
from autopar.hardware.cluster import Cluster, LogicalMesh
from autopar.passes.inter_op.dynamic_program import Placement, placements
from autopar.passes.inter_op.effort import INTER_OP, InterOpEffort


def submeshes(
    cluster: Cluster, effort: InterOpEffort = INTER_OP
) -> tuple[tuple[Placement, ...], dict[int, LogicalMesh]]:
    """All placements on a cluster, and the mesh of every submesh, by its number in `Placement`."""
    hosts = [(g.num_devices // g.devices_per_host, g.devices_per_host) for g in cluster.groups or (cluster,)]
    total, any_size = cluster.num_devices, cluster.num_devices <= effort.any_size
    where = tuple(placements(hosts, lambda n: (any_size or total % n == 0) and _is_part(cluster, n)))
    meshes: dict[int, LogicalMesh] = {}
    for p in where:
        if p.submesh not in meshes:
            n = p.stop - p.start
            part = cluster.part(p.start, n)
            meshes[p.submesh] = part.logical_mesh(shape_of(n, part.devices_per_host))
    return where, meshes


def shape_of(devices: int, per_host: int) -> tuple[int, ...]:
    """The mesh that a submesh is planned on: hosts by devices; on one host with an axis of 2 or 3, if it divides.

    With equal links, axes of 2 and 4 have every layout that one of 8 has, and also those that shard two dimensions.
    """
    if devices > per_host:
        return (devices // per_host, per_host)
    outer = next((f for f in (2, 3) if devices % f == 0 and devices > f), 1)
    return (outer, devices // outer) if outer > 1 else (devices,)


def _is_part(cluster: Cluster, devices: int) -> bool:
    """Whether the first `devices` devices form a part of the cluster; 5 of two hosts with 4 devices do not."""
    try:
        cluster.part(0, devices)
    except ClusterError:
        return False
    return True
