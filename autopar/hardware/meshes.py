"""From the options `mesh` and `cluster` to meshes to plan for and devices to run on.

`mesh` is a jax Mesh, an AbstractMesh, a tuple of sizes, a {name: size}, or None. None makes every factorisation of the
number of devices into up to two axes a candidate, and its prime factorisation if that has three factors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar import jax_compat
from autopar.errors import MeshError
from autopar.hardware.cluster import DEFAULT_AXIS_NAMES, Cluster, LogicalMesh

#: The cluster whose costs a mesh has if its devices are absent and no cluster is given.
DEFAULT_PRESET = "dgx-h100"
MAX_DEVICES = 2**24  # of a mesh: a hundred times as many as the largest clusters have


@dataclass(frozen=True, eq=False)
class Target:
    """A mesh to plan for.

    Attributes:
        logical: the mesh, with its links.
        cluster: its devices.
        devices: array of devices in the shape of the mesh, if the user gave a concrete mesh.
    """

    logical: LogicalMesh
    cluster: Cluster
    devices: Any = None


def targets(mesh: Any, cluster: Cluster | None, *, local: bool) -> tuple[Target, ...]:
    """The candidate meshes.

    Args:
        mesh: see the module's docstring.
        cluster: the cost models; None: the local devices if `local`, otherwise `DEFAULT_PRESET`.
        local: the plan is to run on the devices of this process.

    Raises:
        MeshError: `mesh` is of no valid type, or its size is not the cluster's.
    """
    sizes, names, devices = _read(mesh)
    if sizes is None:
        whole = cluster or Cluster.local()
        return _distinct([Target(whole.logical_mesh(s), whole) for s in factorisations(whole.num_devices)])
    chosen = cluster or _default_cluster(sizes, local)
    return (Target(chosen.logical_mesh(sizes, names), chosen, devices),)


def _distinct(candidates: Sequence[Target]) -> tuple[Target, ...]:
    """The candidates without meshes that equal another up to the order of axes: with equal links, (4, 2) is (2, 4)."""
    seen: dict[tuple[str, ...], Target] = {}
    for target in candidates:
        seen.setdefault(layouts_key(target.logical), target)
    return tuple(seen.values())


def layouts_key(mesh: LogicalMesh) -> tuple[str, ...]:
    """Equal for meshes that have the same layouts at the same prices: those that differ by order or axes of size 1."""
    axes = zip(mesh.sizes, mesh.links, mesh.levels, strict=True)
    return tuple(sorted(str(axis) for axis in axes if axis[0] > 1))


def num_devices(mesh: Any) -> int | None:
    """The number of devices of a mesh in any of its forms; None for None. Raises MeshError if it is no mesh."""
    sizes, _, _ = _read(mesh)
    return None if sizes is None else math.prod(sizes)


def axes(mesh: Any) -> Mapping[str, int] | tuple[int, ...]:
    """Axes of a mesh, name -> size, or sizes where it has no names; () for None. Raises MeshError if it is no mesh."""
    sizes, names, _ = _read(mesh)
    return dict(zip(names, sizes or (), strict=True)) if names is not None else sizes or ()


def named_axes(mesh: Any) -> Mapping[str, int]:
    """Axes of a mesh, name -> size, with default names where it has none; empty for None.

    Raises:
        MeshError: it is no mesh, or has more axes without names than there are default names.
    """
    sizes, names, _ = _read(mesh)
    if names is None and len(sizes or ()) > len(DEFAULT_AXIS_NAMES):
        raise MeshError(f"mesh={mesh!r:.60} has {len(sizes or ())} axes: name them, as in {{name: size}}")
    return dict(zip(names or DEFAULT_AXIS_NAMES, sizes or (), strict=False))


def _read(mesh: Any) -> tuple[tuple[int, ...] | None, tuple[str, ...] | None, Any]:
    if mesh is None:
        return None, None, None
    if isinstance(mesh, Mapping):
        return _sizes(tuple(mesh.values()), mesh), _names(mesh), None
    if isinstance(mesh, tuple | list):
        return _sizes(tuple(mesh), mesh), None, None
    if hasattr(mesh, "axis_names") and hasattr(mesh, "axis_sizes"):
        devices = mesh.devices if jax_compat.is_concrete_mesh(mesh) else None
        _sizes(tuple(mesh.axis_sizes), mesh)
        return tuple(mesh.axis_sizes), tuple(mesh.axis_names), devices
    raise MeshError(f"mesh={mesh!r} is no jax Mesh, AbstractMesh, tuple of sizes or {{name: size}}")


def _sizes(sizes: tuple[Any, ...], mesh: Any) -> tuple[int, ...]:
    if not sizes or any(not isinstance(s, int) or isinstance(s, bool) or s < 1 for s in sizes):
        raise MeshError(f"mesh={mesh!r}: sizes must be integers of at least 1")
    if math.prod(sizes) > MAX_DEVICES:
        raise MeshError(f"mesh={mesh!r:.60} has more than {MAX_DEVICES:,} devices")
    return sizes


def _names(mesh: Mapping[Any, Any]) -> tuple[str, ...]:
    if any(not isinstance(name, str) or not name for name in mesh):
        raise MeshError(f"mesh={mesh!r}: axis names must be strings")
    return tuple(mesh)


def _default_cluster(sizes: tuple[int, ...], local: bool) -> Cluster:
    count = math.prod(sizes)
    if local:
        here = Cluster.local()
        if count > here.num_devices:
            raise MeshError(
                f"mesh {sizes} needs {count} devices, but only {here.num_devices} are here ({here.name}). "
                "Give a smaller mesh, or on CPU set jax.config.update('jax_num_cpu_devices', n) before the first use."
            )
        if count == here.num_devices:
            return here
        return here.part(0, count) if here.axis_levels else replace(here, hosts=1, devices_per_host=count)
    preset = Cluster.preset(DEFAULT_PRESET)
    inside = math.gcd(count, preset.devices_per_host)
    return replace(preset, hosts=count // inside, devices_per_host=inside)


def factorisations(count: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of meshes of `count` devices: one axis, every ordered pair of factors, and three primes."""
    pairs = [(a, count // a) for a in range(2, count) if count % a == 0]
    primes = _primes(count)
    return ((count,), *pairs, *((primes,) if len(primes) == 3 else ()))


def _primes(n: int) -> tuple[int, ...]:
    factors: list[int] = []
    p = 2
    while n > 1:
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1
    return tuple(factors)


def concrete(target: Target) -> Any:
    """The devices in the shape of the mesh; MeshError if this process has too few."""
    import jax
    import numpy as np

    if target.devices is not None:
        return target.devices
    devices = jax.devices()
    sizes = target.logical.sizes
    if len(devices) < math.prod(sizes):
        raise MeshError(
            f"mesh {sizes} of cluster '{target.cluster.name}' needs {math.prod(sizes)} devices to run on, but only "
            f"{len(devices)} are here. autopar.plan and .plan(...) plan for it without devices."
        )
    return np.array(devices[: math.prod(sizes)]).reshape(sizes)


def submeshes(mesh: Any, parts: Sequence[Sequence[int]]) -> tuple[Any, ...]:
    """Meshes with Auto axes of these sizes on successive devices of a mesh, which may be abstract."""
    names = mesh.axis_names
    if not jax_compat.is_concrete_mesh(mesh):
        return tuple(jax_compat.auto_abstract_mesh(sizes, names) for sizes in parts)
    devices, ends = mesh.devices.flatten(), itertools.accumulate(math.prod(sizes) for sizes in parts)
    return tuple(
        jax_compat.auto_mesh(devices[end - math.prod(sizes) : end].reshape(tuple(sizes)), names)
        for sizes, end in zip(parts, ends, strict=True)
    )


def memory_kinds(target: Target) -> tuple[str, ...]:
    """The kinds of memory that the devices here can address; those of the cluster's if too few are here to run on."""
    try:
        devices = concrete(target)
    except MeshError:
        return jax_compat.DEVICE_MEMORY, jax_compat.HOST_MEMORY
    return jax_compat.memory_kinds(devices.flat[0])
