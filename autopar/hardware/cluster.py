"""Clusters: cost models of devices and of the links between them; no device needs to be present.

A cluster is a device model and a list of *levels*, outermost first: a host level of `hosts` groups connected by the
`inter` link, each of `devices_per_host` devices connected by the `intra` link; or one level per axis for
`Cluster.custom` and per dimension of a torus (`autopar.hardware.files`). Devices are numbered row-major over levels, so
neighbours share the innermost level. A logical mesh maps named axes onto that numbering, row-major, the last axis
innermost; `autopar.hardware.links` determines which links an axis crosses.

`LogicalMesh.links` gives the bottleneck of each axis. The cost models of collectives read `LogicalMesh.levels`, so that
they can cost hierarchical algorithms. All bandwidths are per device: each device of a host is assumed to have a network
port of its own. The bandwidth of a shared port has to be divided by the number of devices on it.

A cluster of unequal `groups` numbers the devices of its groups one after the other. As a whole it has the slowest
figures of its groups, because a collective waits for all devices (-> `heterogeneous.join`). A `Cluster.part` inside one
group has that group's own device and links.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.errors import ArgumentError, ClusterError, MeshError
from autopar.hardware import files as cluster_files
from autopar.hardware import heterogeneous
from autopar.hardware import local as local_cluster
from autopar.hardware.description import ClusterFigures, Device
from autopar.hardware.figures import LINK, is_integer
from autopar.hardware.links import NETWORKS, Level, Link, axis_levels_of, inner_sizes, level_part, slowest

__all__ = ["DEFAULT_AXIS_NAMES", "NETWORKS", "Cluster", "Device", "Level", "Link", "LogicalMesh"]

DEFAULT_AXIS_NAMES = ("x", "y", "z", "w")


@dataclass(frozen=True, slots=True)
class LogicalMesh:
    """Named axes over the devices of a cluster, row-major, the last axis innermost.

    Attributes:
        names: axis names.
        sizes: axis sizes.
        links: slowest link that each axis crosses.
        device: cost model of every device.
        levels: levels of the network that each axis crosses, outermost first; empty: one level with the link of the
            axis.
        overlapped: whether the cost of collectives assumes that they overlap with computation.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[Link, ...]
    device: Device
    levels: tuple[tuple[Level, ...], ...] = ()
    overlapped: bool = False

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.sizes) == len(self.links) or len(set(self.names)) != len(self.names):
            raise MeshError(
                f"A mesh needs one distinct name and one link per axis, got names {self.names} and "
                f"{len(self.links)} links for sizes {self.sizes}."
            )
        if not self.levels:
            levels = tuple((Level(size, link),) for size, link in zip(self.sizes, self.links, strict=True))
            object.__setattr__(self, "levels", levels)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes)

    @property
    def shape(self) -> dict[str, int]:
        """Axis name -> size, in mesh order."""
        return dict(zip(self.names, self.sizes, strict=True))

    def axis(self, name: str) -> int:
        """The position of an axis.

        Raises:
            MeshError: the mesh has no axis `name`.
        """
        if name not in self.names:
            raise MeshError(f"Axis {name!r} not found. Mesh axes are {self.shape}.")
        return self.names.index(name)

    def with_overlap(self) -> LogicalMesh:
        """The same mesh with collectives that overlap with computation (`Device.overlap`, `Device.bucket_bytes`)."""
        return replace(self, overlapped=True)

    def group(self, axes: Sequence[int]) -> int:
        """Number of devices that communicate with each other along the axes at these positions."""
        return math.prod(self.sizes[a] for a in axes)


@dataclass(frozen=True, slots=True)
class Cluster(ClusterFigures):
    """Devices and the links between them, from which all costs are computed; no device needs to be present.

    Attributes:
        name: name in plans and reports.
        device: cost model of every device; of unequal groups the slowest figure of each kind.
        hosts: number of hosts.
        devices_per_host: number of devices of each host.
        intra: link between devices of one host.
        inter: link between devices of different hosts, per device.
        axis_levels: levels of the network, outermost first, in place of hosts and their devices (`Cluster.custom`,
            tori); None: those two levels.
        groups: clusters of equal devices that it consists of (`Cluster.joined`); empty if all devices are equal.
    """

    groups: tuple[Cluster, ...] = ()

    @staticmethod
    def of(figures: ClusterFigures) -> Cluster:
        """The cluster with these figures."""
        f, groups = figures, tuple(map(Cluster.of, figures.groups))
        return Cluster(f.name, f.device, f.hosts, f.devices_per_host, f.intra, f.inter, f.axis_levels, groups)

    @property
    def default_shape(self) -> tuple[int, ...]:
        """Mesh shape that follows the network: one axis for each level of size above 1."""
        return tuple(level.size for level in self.levels if level.size > 1) or (1,)

    def logical_mesh(self, shape: Sequence[int], names: Sequence[str] | None = None) -> LogicalMesh:
        """A mesh of named axes over all devices.

        Args:
            shape: axis sizes.
            names: axis names; None: the first of "x", "y", "z", "w".

        Raises:
            MeshError: the product of the sizes is not the number of devices, a size is not positive, or there are more
                sizes than default names.
        """
        sizes = integers("Mesh sizes", shape, MeshError)
        if math.prod(sizes) != self.num_devices or min(sizes, default=1) < 1:
            raise MeshError(
                f"Mesh sizes {sizes} multiply to {math.prod(sizes)}, but cluster {self.name!r} has "
                f"{self.num_devices} devices ({self._describe_levels()}). Sizes that fit: {self._fitting_sizes()}."
            )
        if names is None and len(sizes) > len(DEFAULT_AXIS_NAMES):
            raise MeshError(f"Mesh sizes {sizes} have {len(sizes)} axes: give `names`, defaults end at 4 axes.")
        axes = tuple(names) if names is not None else DEFAULT_AXIS_NAMES[: len(sizes)]
        levels = self._axis_levels(sizes)
        links = tuple(slowest(levels_of_axis) for levels_of_axis in levels)
        return LogicalMesh(axes, sizes, links, self.device, levels)

    def without_overlap(self) -> Cluster:
        """The same cluster in which no communication overlaps with computation and none is combined."""
        plain = replace(self.device, overlap=0.0, bucket_bytes=0.0)
        return replace(self, device=plain, groups=tuple(g.without_overlap() for g in self.groups))

    def part(self, first: int, count: int) -> Cluster:
        """The cluster of a range of devices, such as a submesh of a pipeline; inside one group with its own figures.

        Args:
            first: number of the first device.
            count: number of devices.

        Raises:
            ClusterError: the devices are not whole groups of one level: whole hosts, or devices of one host.
        """
        first, count = integers("first device and count", (first, count), ClusterError)
        if self.groups:
            return self._part_of_groups(first, count)
        inner = inner_sizes(self.levels)
        borders = [low * v.size for low, v in zip(inner, self.levels, strict=True)]
        fits = [
            count % low == first % low == 0 and first % high + count <= high
            for low, high in zip(inner, borders, strict=True)
        ]
        if not (first >= 0 and count > 0 and first + count <= self.num_devices and any(fits)):
            raise ClusterError(
                f"Devices {first} to {first + count - 1} of cluster {self.name!r} ({self._describe_levels()}) are no "
                "whole hosts, and no devices of one host."
            )
        level = max(i for i, fit in enumerate(fits) if fit)
        return self._of_levels(level, count // inner[level])

    def _of_levels(self, at: int, size: int) -> Cluster:
        """The cluster of `size` groups of level `at`, with all levels inside them."""
        ones = [Level(1, v.link) for v in self.levels[:at]]
        levels = (*ones, Level(size, level_part(at, self.levels[at], 1, size).link), *self.levels[at + 1 :])
        count = math.prod(v.size for v in levels)
        if self.axis_levels is None:
            sizes, links = [v.size for v in levels], [v.link for v in levels]
            return replace(self, hosts=sizes[0], devices_per_host=sizes[1], inter=links[0], intra=links[1])
        inside = min(count, self.devices_per_host)
        return replace(self, hosts=-(-count // inside), devices_per_host=inside, axis_levels=levels)

    def _part_of_groups(self, first: int, count: int) -> Cluster:
        starts = [sum(g.num_devices for g in self.groups[:i]) for i in range(len(self.groups))]
        edges = [
            (max(first, start), min(first + count, start + g.num_devices))
            for start, g in zip(starts, self.groups, strict=True)
        ]
        parts = [
            g.part(low - start, high - low)
            for (low, high), start, g in zip(edges, starts, self.groups, strict=True)
            if low < high
        ]
        if sum(p.num_devices for p in parts) != count:
            raise ClusterError(f"Cluster {self.name!r} has no devices {first} to {first + count - 1}.")
        return parts[0] if len(parts) == 1 else Cluster.joined(parts, self.inter, name=self.name)

    def _axis_levels(self, sizes: tuple[int, ...]) -> tuple[tuple[Level, ...], ...]:
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        return tuple(axis_levels_of(self.levels, stride, size) for stride, size in zip(strides, sizes, strict=True))

    def _fitting_sizes(self) -> str:
        """Shapes of meshes over all devices, as text: one axis, and two that are as equal as can be."""
        count = self.num_devices
        first = max(n for n in range(1, math.isqrt(count) + 1) if count % n == 0)
        return f"{count}" if first == 1 else f"{count} or {first},{count // first}"

    def _describe_levels(self) -> str:
        return " x ".join(str(level.size) for level in self.levels)

    @staticmethod
    def custom(
        mesh_shape: Sequence[int],
        alpha: float | Sequence[float],
        beta: float | Sequence[float],
        peak_flops: float | Mapping[str, float],
        memory_bandwidth: float,
        memory_bytes: int,
        *,
        name: str = "custom",
        kernel_overhead: float = 0.0,
    ) -> Cluster:
        """A cluster from figures, with one level of the network for each axis of a mesh.

        A message of n bytes along an axis takes alpha + n beta seconds (Hockney, 1994).

        Args:
            mesh_shape: axis sizes, the innermost last.
            alpha: latency of a message, seconds: one number, or one for each axis.
            beta: inverse bandwidth of a device, s/byte: one number, or one for each axis.
            peak_flops: FLOP/s for every dtype, or a mapping from dtype names.
            memory_bandwidth: bandwidth of device memory, bytes/s.
            memory_bytes: memory of a device, bytes.
            name: name in plans and reports.
            kernel_overhead: least time of a kernel, seconds.

        Raises:
            ClusterError: `alpha` or `beta` has another length than `mesh_shape`, or a figure is invalid.
        """
        sizes = integers("mesh_shape", mesh_shape, ClusterError)
        alphas, betas = _per_axis("alpha", alpha, sizes), _per_axis("beta", beta, sizes)
        peaks = dict(peak_flops) if isinstance(peak_flops, Mapping) else {"float32": peak_flops}
        links = tuple(Link(a, b) for a, b in zip(alphas, betas, strict=True)) or (Link(0.0, 0.0),)
        device = Device(f"{name} device", peaks, memory_bandwidth, memory_bytes, kernel_overhead)
        levels = tuple(Level(s, link) for s, link in zip(sizes, links, strict=False))
        return Cluster(name, device, 1, math.prod(sizes), links[-1], links[0], levels or (Level(1, links[0]),))

    @staticmethod
    def joined(groups: Sequence[Cluster], inter: Link | None = None, *, name: str | None = None) -> Cluster:
        """A cluster of several clusters, such as one host with V100 and two with A100.

        Args:
            groups: the clusters; devices are numbered in their order.
            inter: link between them; the slowest of it and of the links between their hosts is used.
            name: name in plans and reports; None: made from their names.

        Raises:
            ClusterError: there are no groups.
        """
        if not isinstance(groups, list | tuple):
            raise ClusterError(f"Clusters are joined in a list, got {type(groups).__name__} {groups!r:.60}.")
        return Cluster.of(heterogeneous.join(tuple(groups), inter, name))

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Names of the presets, sorted; `autopar clusters` prints their figures."""
        return cluster_files.presets()

    @staticmethod
    def preset(name: str, hosts: int | None = None, topology: str | None = None, slices: int = 1) -> Cluster:
        """A cluster from a table of published figures.

        Args:
            name: one of `presets()`.
            hosts: number of hosts; None: 1.
            topology: dimensions of a torus, such as "4x8", in place of `hosts`.
            slices: number of tori, connected by the data centre network.

        Raises:
            ClusterError: the name is unknown, or hosts or topology do not fit; the message states what does.
        """
        return Cluster.of(cluster_files.preset(name, hosts, topology, slices))

    @staticmethod
    def from_toml(path: str | os.PathLike[str], hosts: int | None = None) -> Cluster:
        """A cluster from a file in the format of the presets.

        Args:
            path: the file.
            hosts: number of hosts; None: the number in the file.

        Raises:
            ClusterError: the file cannot be read or is not complete.
        """
        return Cluster.of(cluster_files.load(path, hosts))

    @staticmethod
    def named(text: str, hosts: int | None = None, devices: int | None = None) -> Cluster:
        """The cluster that a text names: "dgx-h100", "dgx-h100:4" (hosts), or the path of a TOML file.

        Args:
            text: a preset, with a number of hosts or without, or a path that ends in ".toml".
            hosts: number of hosts, in place of one in the text.
            devices: without a number of hosts, as many hosts of a preset as have so many devices; None: one.

        Raises:
            ArgumentError: `text` is no text.
            ClusterError: the preset is unknown, the number is none, or the file cannot be read.
        """
        if not isinstance(text, str):
            raise ArgumentError(f"Cluster.named({text!r:.60}): give a name, such as 'dgx-h100', or a TOML file")
        if text.endswith(".toml"):
            return Cluster.from_toml(text, hosts)
        name, colon, count = text.partition(":")
        if colon and not (count.isdecimal() and int(count)):
            raise ClusterError(f"cluster {text!r}: give a number of hosts behind the colon, such as '{name}:4'")
        per_host = Cluster.preset(name).devices_per_host
        needed = max(1, (devices or 0) // per_host)
        return Cluster.preset(name, hosts=hosts or (int(count) if colon else needed))

    def to_toml(self) -> str:
        """The cluster as TOML; a file with this text gives an equal cluster with `from_toml`."""
        return cluster_files.text(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cluster as TOML.

        Raises:
            ClusterError: the file cannot be written.
        """
        try:
            Path(path).write_text(self.to_toml(), "utf-8")
        except (OSError, TypeError, ValueError) as error:
            raise ClusterError(f"Cluster {self.name!r} cannot be saved to {path!r:.60}: {error}.") from error

    @staticmethod
    def local() -> Cluster:
        """The devices of `jax.devices()`, on all processes.

        Accelerators have the figures of the preset of their kind. Each virtual CPU device has its share of the cores
        and the memory of the host; a collective is a copy through this memory.

        Raises:
            ClusterError: no preset has accelerators of this kind.
        """
        return Cluster.of(local_cluster.find())

    @staticmethod
    def calibrated(tell: Callable[[str], None] = lambda what: None) -> Cluster:
        """The local devices with measured rates of matrix products, memory bandwidth, latency and bandwidth.

        Measures matrix products, reads of memory and collectives on all local devices, for about half a minute.
        `autopar.hardware.measure.calibrate` also returns the error of the fit.

        Args:
            tell: called with the name of each measurement when it begins.
        """
        from autopar.hardware import measure

        return measure.calibrate(Cluster.local(), tell).cluster


def _per_axis(what: str, value: float | Sequence[float], sizes: tuple[int, ...]) -> tuple[float, ...]:
    values: tuple[Any, ...] = tuple(value) if isinstance(value, list | tuple) else (value,) * len(sizes)
    requirement, is_valid = LINK[what]
    if not all(map(is_valid, values)):
        raise ClusterError(f"{what}={value!r:.60} must be {requirement}, or one for each mesh axis.")
    if len(values) != len(sizes):
        raise ClusterError(f"{what} has {len(values)} values {values} for {len(sizes)} mesh axes of sizes {sizes}.")
    return tuple(map(float, values))


def integers(what: str, values: Any, error: type[ClusterError | MeshError]) -> tuple[int, ...]:
    """A list or tuple of integers as a tuple; `error` with the name `what` if it is anything else."""
    if not isinstance(values, list | tuple) or not all(map(is_integer, values)):
        raise error(f"{what} {values!r:.60} must be integers, such as (2, 4).")
    return tuple(map(int, values))
