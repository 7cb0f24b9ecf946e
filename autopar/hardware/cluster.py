"""Clusters: what the devices can do and how fast they talk, with no device needed to say so.

A cluster is a device model and a list of *levels*, outermost first: a host level of `hosts` groups joined by the
`inter` link, each of `devices_per_host` devices joined by the `intra` link; or one level per axis for `Cluster.custom`
and per dimension of a torus (`autopar.hardware.files`). Devices are numbered row-major over the levels, so neighbours
share the innermost level. A logical mesh lays named axes over that numbering, row-major, the last axis innermost; which
links an axis crosses is decided in `autopar.hardware.links`.

`LogicalMesh.links` names the bottleneck of each axis; `LogicalMesh.levels` is what the collective models read, so that
they can price hierarchical algorithms. All bandwidths are per device: devices of one host are taken to have a network
port each, and a slower shared port has to be divided by the number of devices on it.

A cluster of unequal `groups` numbers the devices of its groups one after the other. As a whole it is as slow as its
slowest parts, because a collective waits for all (-> `heterogeneous.join`); `Cluster.part` inside one group has that
group's own device and links.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autopar.errors import ClusterError, MeshError
from autopar.hardware.figures import (
    FIGURE,
    FLAG,
    NAME,
    RATE,
    SHARE,
    Row,
    check,
    each,
    is_count,
    is_figure,
    is_integer,
    is_name,
    is_rates,
)
from autopar.hardware.links import NETWORKS, Level, Link, cut, inner_sizes, piece, slowest

__all__ = ["DEFAULT_AXIS_NAMES", "NETWORKS", "Cluster", "Device", "Level", "Link", "LogicalMesh"]

DEFAULT_AXIS_NAMES = ("x", "y", "z", "w")


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one virtual device of a host.

    Attributes:
        name: shown in plans and reports.
        peak_flops: dtype name -> flop/s, dense.
        memory_bandwidth: bytes/s.
        memory_bytes: bytes that programs may use.
        kernel_overhead: s that a kernel costs however small it is.
        efficiency: share of `peak_flops` that large matrix products reach.
        half_rate_extents: rows, columns and contracted extent at which each alone halves the rate of a product.
        reduce_scatter: the backend has one; XLA on CPU all-reduces and slices instead.
        rounds_operands: the backend rounds float32 operands of products of default precision to bfloat16 before it
            moves them.
        tile: rows and columns of the tiles that arrays are kept in, padding included.
        overlap: share of a collective's time that hides behind computation where the collective has time
            (`autopar.passes.op_groups.overlap`); 0 where nothing hides.
        bucket_bytes: such collectives are combined until they are this large, and share the latency; 0: never.
        combines: kinds of collectives that the backend combines so.
        host_bandwidth: bytes/s, each way, between its memory and its host's while all devices of the host copy; 0: not
            known, and nothing is kept there.
        host_memory_bytes: its share of the host's memory; 0: none apart from its own.
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
        """flop/s for a dtype name; a dtype that is not listed gets the slowest rate, which never flatters."""
        return self.peak_flops.get(dtype) or min(self.peak_flops.values())


#: Field of `Device` -> what it must be.
DEVICE: Mapping[str, Row] = MappingProxyType(
    {
        "name": NAME,
        "peak_flops": ("flop/s above 0 by dtype", is_rates),
        **dict.fromkeys(("memory_bandwidth", "efficiency"), RATE),
        **dict.fromkeys(("memory_bytes", "kernel_overhead", "bucket_bytes"), FIGURE),
        **dict.fromkeys(("host_bandwidth", "host_memory_bytes"), FIGURE),
        **dict.fromkeys(("reduce_scatter", "rounds_operands"), FLAG),
        "overlap": SHARE,
        "tile": ("two integers of 1 or more", each(is_count, 2)),
        "half_rate_extents": ("three numbers of 0 or more", each(is_figure, 3)),
        "combines": ("kinds of collectives", each(is_name)),
    }
)


@dataclass(frozen=True, slots=True)
class LogicalMesh:
    """Named axes over the devices of a cluster, row-major, the last axis innermost.

    Attributes:
        names: axis names.
        sizes: axis sizes, same length.
        links: per axis the slowest link that it crosses.
        device: the device model.
        levels: per axis its levels, outermost first; left out, each axis is one level on its link.
        behind: prices on it are those of collectives that hide behind computation.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[Link, ...]
    device: Device
    levels: tuple[tuple[Level, ...], ...] = ()
    behind: bool = False

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
        """Position of the axis `name`; `MeshError` if there is none."""
        if name not in self.names:
            raise MeshError(f"Axis {name!r} not found. Mesh axes are {self.shape}.")
        return self.names.index(name)

    def behind_computation(self) -> LogicalMesh:
        """The mesh as collectives see it that have time: see `Device.overlap` and `Device.bucket_bytes`."""
        return replace(self, behind=True)

    def group(self, axes: Sequence[int]) -> int:
        """Number of devices in one group that communicates along the axes at these positions."""
        return math.prod(self.sizes[a] for a in axes)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices and the links between them; see the module for its levels.

    Attributes:
        name: shown in plans and reports.
        device: the device model, the same for all; of unequal groups the slowest in every respect.
        hosts: number of hosts.
        devices_per_host: devices on each.
        intra: link between devices of one host.
        inter: link between devices of different hosts, per device.
        axis_levels: replaces the two levels above, outermost first (`Cluster.custom`, tori).
        groups: the clusters of equal devices that it consists of, where there are several (`Cluster.joined`).
    """

    name: str
    device: Device
    hosts: int
    devices_per_host: int
    intra: Link
    inter: Link
    axis_levels: tuple[Level, ...] | None = None
    groups: tuple[Cluster, ...] = ()

    def __post_init__(self) -> None:
        check(f"Cluster {self.name!r:.60}", self, CLUSTER)
        if any(level.size < 1 for level in self.levels):
            raise ClusterError(f"Cluster {self.name!r} has sizes {[v.size for v in self.levels]}; all must be >= 1.")

    @property
    def levels(self) -> tuple[Level, ...]:
        """Levels of the physical cluster, outermost first."""
        return self.axis_levels or (Level(self.hosts, self.inter), Level(self.devices_per_host, self.intra))

    @property
    def num_devices(self) -> int:
        """Devices on all hosts."""
        return math.prod(level.size for level in self.levels)

    @property
    def default_shape(self) -> tuple[int, ...]:
        """The mesh that follows the levels: one axis per level of size above 1."""
        return tuple(level.size for level in self.levels if level.size > 1) or (1,)

    def logical_mesh(self, shape: Sequence[int], names: Sequence[str] | None = None) -> LogicalMesh:
        """Named axes of the given sizes over all devices.

        `names` defaults to the first of ("x", "y", "z", "w"). Raises `MeshError` where the sizes do not multiply to
        the number of devices, are not positive, or outnumber the default names.
        """
        sizes = integers("Mesh sizes", shape, MeshError)
        if math.prod(sizes) != self.num_devices or min(sizes, default=1) < 1:
            raise MeshError(
                f"Mesh sizes {sizes} multiply to {math.prod(sizes)}, but cluster {self.name!r} has "
                f"{self.num_devices} devices ({self._describe_levels()})."
            )
        if names is None and len(sizes) > len(DEFAULT_AXIS_NAMES):
            raise MeshError(f"Mesh sizes {sizes} have {len(sizes)} axes: give `names`, defaults end at 4 axes.")
        axes = tuple(names) if names is not None else DEFAULT_AXIS_NAMES[: len(sizes)]
        levels = self._axis_levels(sizes)
        links = tuple(slowest(levels_of_axis) for levels_of_axis in levels)
        return LogicalMesh(axes, sizes, links, self.device, levels)

    def without_overlap(self) -> Cluster:
        """The same cluster where no communication hides behind computation and none is combined."""
        plain = replace(self.device, overlap=0.0, bucket_bytes=0.0)
        return replace(self, device=plain, groups=tuple(g.without_overlap() for g in self.groups))

    def part(self, first: int, count: int) -> Cluster:
        """The cluster of the `count` devices from number `first` on, such as a pipeline stage has.

        Inside one group of a cluster of several it has that group's device and links. Raises `ClusterError` where the
        devices are not whole groups of one level: a number of whole hosts, or devices of one host.
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
        at = max(i for i, fit in enumerate(fits) if fit)
        return self._of_levels(at, count // inner[at])

    def _of_levels(self, at: int, size: int) -> Cluster:
        """`size` groups of level `at`, with all that is inside them."""
        ones = [Level(1, v.link) for v in self.levels[:at]]
        levels = (*ones, Level(size, piece(at, self.levels[at], 1, size).link), *self.levels[at + 1 :])
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
        return tuple(cut(self.levels, stride, size) for stride, size in zip(strides, sizes, strict=True))

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
        """A cluster from bare figures, one level per axis of `mesh_shape`, the last innermost.

        `alpha` (s) and `beta` (s/byte) are numbers or one number per axis; `peak_flops` (flop/s) is a number for
        every dtype or a mapping from dtype names. Raises `ClusterError` where the lengths differ.
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
        """One cluster of several, such as a host of V100 and two of A100; `inter` joins them, no faster than theirs.

        Raises `ClusterError` where there are no groups.
        """
        from autopar.hardware import heterogeneous

        if not isinstance(groups, list | tuple):
            raise ClusterError(f"Clusters are joined in a list, got {type(groups).__name__} {groups!r:.60}.")
        return heterogeneous.join(tuple(groups), inter, name)

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Names that `preset` knows, sorted."""
        from autopar.hardware import files as cluster_files

        return cluster_files.presets()

    @staticmethod
    def preset(name: str, hosts: int | None = None, topology: str | None = None, slices: int = 1) -> Cluster:
        """A cluster of a known kind.

        Args:
            name: one of `presets()`.
            hosts: number of hosts, default 1.
            topology: for a torus its dimensions, such as "4x8", in place of `hosts`.
            slices: number of such tori, joined by the data centre's network.

        Raises:
            ClusterError: an unknown name, or hosts or a topology that do not fit; the message says what does.
        """
        from autopar.hardware import files as cluster_files

        return cluster_files.preset(name, hosts, topology, slices)

    @staticmethod
    def from_toml(path: str | os.PathLike[str], hosts: int | None = None) -> Cluster:
        """A cluster from a file in the presets' format; `hosts` overrides the file's own number.

        Raises `ClusterError` where the file does not read or is not complete.
        """
        from autopar.hardware import files as cluster_files

        return cluster_files.load(path, hosts)

    def to_toml(self) -> str:
        """The cluster as text that `from_toml` reads again, equal in every figure."""
        from autopar.hardware import files as cluster_files

        return cluster_files.text(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_toml()` to a file. ClusterError where it cannot be written."""
        try:
            Path(path).write_text(self.to_toml(), "utf-8")
        except (OSError, TypeError, ValueError) as error:
            raise ClusterError(f"Cluster {self.name!r} cannot be saved to {path!r:.60}: {error}.") from error

    @staticmethod
    def local() -> Cluster:
        """The devices that JAX sees here, on all processes.

        Virtual CPU devices share the cores and the memory of their host: each gets its share of both, and a
        collective is a copy through that memory. Accelerators are looked up by their kind among the presets;
        `ClusterError` where none fits.
        """
        from autopar.hardware import local as local_cluster

        return local_cluster.find()

    @staticmethod
    def calibrated(tell: Callable[[str], None] = lambda what: None) -> Cluster:
        """The local devices with measured figures: rates of matrix products, memory bandwidth, latency and bandwidth.

        Runs products, passes over memory and collectives on all local devices, which takes half a minute; `tell` hears
        what is being timed. `autopar.cost_models.measure.calibrate` gives the error of the fit as well, `save`
        keeps the result.
        """
        from autopar.cost_models import measure

        return measure.calibrate(tell).cluster


def _per_axis(what: str, value: float | Sequence[float], sizes: tuple[int, ...]) -> tuple[float, ...]:
    values: tuple[Any, ...] = tuple(value) if isinstance(value, list | tuple) else (value,) * len(sizes)
    if not all(map(is_figure, values)):
        raise ClusterError(f"{what}={value!r:.60} must be a number of 0 or more, or one for each mesh axis.")
    if len(values) != len(sizes):
        raise ClusterError(f"{what} has {len(values)} values {values} for {len(sizes)} mesh axes of sizes {sizes}.")
    return tuple(map(float, values))


#: Field of `Cluster` -> what it must be.
CLUSTER: Mapping[str, Row] = MappingProxyType(
    {
        "name": NAME,
        "device": ("a Device", lambda value: isinstance(value, Device)),
        **dict.fromkeys(("hosts", "devices_per_host"), ("an integer", is_integer)),
        **dict.fromkeys(("intra", "inter"), ("a Link", lambda value: isinstance(value, Link))),
    }
)


def integers(what: str, values: Any, error: type[ClusterError | MeshError]) -> tuple[int, ...]:
    """Integers in a list or tuple; an error that names them otherwise."""
    if not isinstance(values, list | tuple) or not all(map(is_integer, values)):
        raise error(f"{what} {values!r:.60} must be integers, such as (2, 4).")
    return tuple(map(int, values))
