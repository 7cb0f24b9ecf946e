"""Clusters: what the devices can do and how fast they talk, with no device needed to say so.

A cluster is a device model and a list of *levels*, outermost first: a host level of `hosts` groups joined by the
`inter` link, each of `devices_per_host` devices joined by the `intra` link, or one level per axis for
`Cluster.custom`. Devices are numbered row-major over the levels, so neighbours share the innermost level.

A logical mesh lays named axes over that numbering, row-major, the last axis innermost. An axis of size s with inner
stride a covers the device strides [a, a s); cut at the borders of the levels this gives the axis its own levels:

    inside one level                       that level's link
    across a border, dividing it evenly    one level per piece, outermost first (a 16-way axis on hosts of 8 is 2 x 8)
    across a border, not evenly            one level on the slowest link of the cluster

`LogicalMesh.links` names the bottleneck of each axis; `LogicalMesh.levels` is what the collective models read, so that
they can price hierarchical algorithms. All bandwidths are per device and per direction: devices of one host are taken
to have a network port each, and a slower shared port has to be divided by the number of devices on it.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from autopar.cost_models.host import HOST
from autopar.errors import ClusterError, MeshError

DEFAULT_AXIS_NAMES = ("x", "y", "z", "w")
NETWORKS = ("switch", "ring", "memory")


@dataclass(frozen=True, slots=True)
class Link:
    """What one device sees of a network: a message of b bytes takes alpha + beta b seconds.

    Attributes:
        alpha: latency of one message, s.
        beta: inverse bandwidth of one device in one direction, s/byte.
        network: who can talk at once at this rate. "switch": any pairs; "ring": neighbours only, as along an axis of a
            torus; "memory": threads of one host, which meet once per collective and copy.
    """

    alpha: float
    beta: float
    network: str = "switch"

    def __post_init__(self) -> None:
        if self.network not in NETWORKS or self.alpha < 0 or self.beta < 0:
            raise ClusterError(f"{self} is no link: alpha and beta are >= 0, network is one of {', '.join(NETWORKS)}.")

    @property
    def bandwidth(self) -> float:
        """bytes/s; infinite where beta is 0."""
        return 1 / self.beta if self.beta else math.inf


@dataclass(frozen=True, slots=True)
class Level:
    """`size` groups of devices joined by `link`."""

    size: int
    link: Link


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
        reduce_scatter: the backend has one; XLA on CPU all-reduces and slices instead.
        combined_latency: share of its latency that an all-reduce still costs once the compiler has combined it with
            others.
    """

    name: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    memory_bytes: int
    kernel_overhead: float = 0.0
    efficiency: float = 1.0
    reduce_scatter: bool = True
    combined_latency: float = 1.0

    def peak(self, dtype: str) -> float:
        """flop/s for a dtype name; a dtype that is not listed gets the slowest rate, which never flatters."""
        return self.peak_flops.get(dtype) or min(self.peak_flops.values())


@dataclass(frozen=True, slots=True)
class LogicalMesh:
    """Named axes over the devices of a cluster, row-major, the last axis innermost.

    Attributes:
        names: axis names.
        sizes: axis sizes, same length.
        links: per axis the slowest link that it crosses.
        device: the device model.
        levels: per axis its levels, outermost first; left out, each axis is one level on its link.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[Link, ...]
    device: Device
    levels: tuple[tuple[Level, ...], ...] = ()

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

    def group(self, axes: Sequence[int]) -> int:
        """Number of devices in one group that communicates along the axes at these positions."""
        return math.prod(self.sizes[a] for a in axes)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A number of equal devices and the links between them; see the module for its levels.

    Attributes:
        name: shown in plans and reports.
        device: the device model, the same for all.
        hosts: number of hosts.
        devices_per_host: devices on each.
        intra: link between devices of one host.
        inter: link between devices of different hosts, per device.
        axis_levels: replaces the two levels above, outermost first (`Cluster.custom`).
    """

    name: str
    device: Device
    hosts: int
    devices_per_host: int
    intra: Link
    inter: Link
    axis_levels: tuple[Level, ...] | None = None

    def __post_init__(self) -> None:
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
        sizes = tuple(int(s) for s in shape)
        if math.prod(sizes) != self.num_devices or min(sizes, default=1) < 1:
            raise MeshError(
                f"Mesh sizes {sizes} multiply to {math.prod(sizes)}, but cluster {self.name!r} has "
                f"{self.num_devices} devices ({self._describe_levels()})."
            )
        if names is None and len(sizes) > len(DEFAULT_AXIS_NAMES):
            raise MeshError(f"Mesh sizes {sizes} have {len(sizes)} axes: give `names`, defaults end at 4 axes.")
        axes = tuple(names) if names is not None else DEFAULT_AXIS_NAMES[: len(sizes)]
        levels = self._axis_levels(sizes)
        links = tuple(_slowest(levels_of_axis) for levels_of_axis in levels)
        return LogicalMesh(axes, sizes, links, self.device, levels)

    def _axis_levels(self, sizes: tuple[int, ...]) -> tuple[tuple[Level, ...], ...]:
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        return tuple(_cut(self.levels, stride, size) for stride, size in zip(strides, sizes, strict=True))

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
        sizes = tuple(int(s) for s in mesh_shape)
        alphas, betas = _per_axis("alpha", alpha, sizes), _per_axis("beta", beta, sizes)
        peaks = dict(peak_flops) if isinstance(peak_flops, Mapping) else {"float32": float(peak_flops)}
        links = tuple(Link(a, b) for a, b in zip(alphas, betas, strict=True)) or (Link(0.0, 0.0),)
        device = Device(f"{name} device", peaks, memory_bandwidth, int(memory_bytes), kernel_overhead)
        levels = tuple(Level(s, link) for s, link in zip(sizes, links, strict=False))
        return Cluster(name, device, 1, math.prod(sizes), links[-1], links[0], levels or (Level(1, links[0]),))

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Names that `preset` knows, sorted."""
        files = resources.files("autopar.cost_models").joinpath("presets").iterdir()
        return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))

    @staticmethod
    def preset(name: str, hosts: int = 1, topology: str | None = None) -> Cluster:
        """A cluster of `hosts` machines of a known kind. Raises `ClusterError` naming the known ones."""
        if name not in Cluster.presets():
            raise ClusterError(f"Cluster preset {name!r} not found. Known presets: {', '.join(Cluster.presets())}.")
        text = resources.files("autopar.cost_models").joinpath("presets", f"{name}.toml").read_text("utf-8")
        return _from_table(tomllib.loads(text), f"preset {name}", hosts, topology)

    @staticmethod
    def from_toml(path: str | os.PathLike[str], hosts: int | None = None) -> Cluster:
        """A cluster from a file in the presets' format; `hosts` overrides the file's own number."""
        try:
            table = tomllib.loads(Path(path).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ClusterError(f"Cluster file {str(path)!r} cannot be read: {error}") from error
        return _from_table(table, str(path), hosts, None)

    @staticmethod
    def local() -> Cluster:
        """The devices that JAX sees here, on all processes.

        Virtual CPU devices share the cores and the memory of their host: each gets its share of both, and a
        collective is a copy through that memory. Accelerators are looked up by their kind among the presets;
        `ClusterError` where none fits.
        """
        import jax

        devices = jax.devices()
        hosts = jax.process_count()
        per_host = len(devices) // hosts
        if devices[0].platform == "cpu":
            return _host_cluster(hosts, per_host, os.cpu_count() or 1)
        return _accelerator_cluster(devices[0].device_kind, hosts, per_host)


def _slowest(levels: Sequence[Level]) -> Link:
    """The bottleneck of several levels; levels of one group carry nothing unless there are only those."""
    used = [v.link for v in levels if v.size > 1] or [v.link for v in levels]
    slow = max(used, key=lambda link: link.beta)
    return Link(max(link.alpha for link in used), slow.beta, slow.network)


def _cut(levels: Sequence[Level], stride: int, size: int) -> tuple[Level, ...]:
    """The levels, outermost first, of an axis of `size` groups that lie `stride` devices apart."""
    extent = stride * size
    inner = [math.prod(v.size for v in levels[i + 1 :]) for i in range(len(levels))]
    borders = [low * v.size for low, v in zip(inner, levels, strict=True)]
    if any(max(edge, b) % min(edge, b) for edge in (stride, extent) for b in borders):
        return (Level(size, _slowest(levels)),)
    pieces = [
        Level(min(extent, high) // max(stride, low), v.link)
        for low, high, v in zip(inner, borders, levels, strict=True)
        if max(stride, low) < min(extent, high)
    ]
    return tuple(pieces) or (Level(1, levels[-1].link),)


def _per_axis(what: str, value: float | Sequence[float], sizes: tuple[int, ...]) -> tuple[float, ...]:
    values = tuple(map(float, value)) if isinstance(value, Sequence) else (float(value),) * len(sizes)
    if len(values) != len(sizes):
        raise ClusterError(f"{what} has {len(values)} values {values} for {len(sizes)} mesh axes of sizes {sizes}.")
    return values


def _link(table: Mapping[str, Any]) -> Link:
    return Link(float(table["alpha"]), 1 / float(table["bandwidth"]), table.get("network", "switch"))


def _device(table: Mapping[str, Any]) -> Device:
    peaks = {str(dtype): float(rate) for dtype, rate in table["peak_flops"].items()}
    return Device(
        table["name"],
        peaks,
        float(table["memory_bandwidth"]),
        int(table["memory_bytes"]),
        float(table.get("kernel_overhead", 0.0)),
        float(table.get("efficiency", 1.0)),
    )


def _from_table(table: Mapping[str, Any], where: str, hosts: int | None, topology: str | None) -> Cluster:
    """A cluster from parsed TOML; the format is described in presets/dgx-h100.toml."""
    if topology is not None:
        raise ClusterError(f"Cluster {where} has hosts, not a topology, but topology={topology!r} was given.")
    try:
        return Cluster(
            table["name"],
            _device(table["device"]),
            int(hosts if hosts is not None else table.get("hosts", 1)),
            int(table["devices_per_host"]),
            _link(table["intra"]),
            _link(table["inter"]),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ClusterError(f"Cluster {where} is not complete: {type(error).__name__} {error}.") from error


def _host_cluster(hosts: int, devices: int, cores: int) -> Cluster:
    """`devices` virtual CPU devices on each of `hosts` machines with `cores` cores."""
    device = Device(
        "cpu",
        {dtype: rate * cores / devices for dtype, rate in HOST.flops_per_core.items()},
        HOST.memory_bandwidth(cores) / devices,
        _physical_memory() // devices,
        HOST.kernel_overhead,
        HOST.efficiency,
        reduce_scatter=False,
        combined_latency=HOST.combined_latency,
    )
    intra = Link(HOST.collective_alpha(devices, cores), devices / HOST.copy_bandwidth(cores), "memory")
    inter = Link(HOST.network_alpha, devices / HOST.network_bandwidth)
    return Cluster("local cpu", device, hosts, devices, intra, inter)


def _physical_memory() -> int:
    """Bytes of the host's memory; 8 GiB where the platform does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 8 * 2**30


def _accelerator_cluster(kind: str, hosts: int, devices: int) -> Cluster:
    """The preset whose device has this JAX `device_kind`, with the machine's own counts."""
    for name in Cluster.presets():
        preset = Cluster.preset(name)
        if preset.device.name in kind:
            return Cluster(f"local {name}", preset.device, hosts, devices, preset.intra, preset.inter)
    known = ", ".join(Cluster.presets())
    raise ClusterError(f"No preset describes a {kind!r}; known presets: {known}. Use Cluster.from_toml or .custom.")
