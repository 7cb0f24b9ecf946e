"""Cluster files: TOML to clusters and back, and the presets that come with autopar.

A file has a `name` and one of five bodies:

    hosts       devices_per_host, hosts (default 1), [device], [intra], [inter]               -> _of_hosts
    torus       the same, and [torus]: hosts are parts of a torus of links [intra]            -> _of_torus
    levels      devices_per_host, hosts, [device], [intra], [inter], [[levels]], outermost first, as `text` writes it
    cpu         devices_per_host, [cpu]: virtual devices that share a host                    -> _of_cpu
    groups      [[groups]], each a body of its own or a `preset` with `hosts`; [inter]        -> _of_groups

A link has alpha (s) and bandwidth (bytes/s) or beta (s/byte), `network` unless it is a switch, and for a mesh also
pair_bandwidth or pair, of the link between two neighbours. A device has the fields of
`autopar.hardware.description.Device`, and `kinds` if JAX has other names for it.

A torus has `dimensions`, and `wrap` with `whole`: a dimension wraps around if it is a multiple of `wrap`, and with
`whole` only if all are. [intra] gives one link in one direction. `topologies` lists the available shapes; with `whole`
also any shape of multiples of `wrap` up to `limit`, dimension by dimension.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from importlib import resources
from itertools import permutations
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autopar.errors import ClusterError
from autopar.hardware import heterogeneous
from autopar.hardware.description import ClusterFigures, Device
from autopar.hardware.figures import LINK, check_values, is_count, is_integer
from autopar.hardware.host import of_host
from autopar.hardware.links import Level, Link

Table = Mapping[str, Any]


def presets() -> tuple[str, ...]:
    """Names of the files in cost_models/presets, sorted."""
    files = resources.files("autopar.cost_models").joinpath("presets").iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def preset(name: str, hosts: int | None = None, topology: str | None = None, slices: int = 1) -> ClusterFigures:
    """See `Cluster.preset`."""
    return _from_table(_preset_table(name), f"preset {name}", hosts, topology, slices)


def is_torus(name: str) -> bool:
    """Whether a preset takes a topology."""
    return "torus" in _preset_table(name)


def preset_of(kind: str) -> str | None:
    """The preset whose device kind is `kind`, perhaps after a vendor's name; None if there is none."""
    return next((name for name in presets() if any(kind.endswith(k) for k in _kinds(_preset_table(name)))), None)


def load(path: str | os.PathLike[str], hosts: int | None = None) -> ClusterFigures:
    """See `Cluster.from_toml`."""
    try:
        table = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, TypeError, ValueError) as error:
        raise ClusterError(f"Cluster file {str(path)!r} cannot be read: {error}") from error
    return _from_table(table, str(path), hosts, None, 1)


def _preset_table(name: str) -> dict[str, Any]:
    if not isinstance(name, str) or name not in presets():
        raise ClusterError(f"Cluster preset {name!r} not found. Known presets: {', '.join(presets())}.")
    return tomllib.loads(resources.files("autopar.cost_models").joinpath("presets", f"{name}.toml").read_text("utf-8"))


def _kinds(table: Table) -> Sequence[str]:
    device = table.get("device", {})
    return device.get("kinds", [device["name"]] if device else [])


def _from_table(table: Table, where: str, hosts: int | None, topology: str | None, slices: int) -> ClusterFigures:
    body = next((key for key in BODIES if key in table), "hosts")
    topology = topology if topology is not None else table.get("topology")
    if body != "torus" and (topology is not None or slices != 1):
        raise ClusterError(f"Cluster {where} is no torus, but topology={topology!r} and slices={slices} were given.")
    if hosts is not None and not is_count(hosts):
        raise ClusterError(f"Cluster {where}: hosts={hosts!r:.60} must be at least 1.")
    if not is_count(slices) or not isinstance(topology, str | None):
        raise ClusterError(
            f"Cluster {where}: topology={topology!r:.60} must be text such as '4x8', slices={slices!r:.60} at least 1."
        )
    try:
        if body == "torus":
            return _of_torus(table, where, hosts, topology, slices)
        return BODIES.get(body, _of_hosts)(table, where, hosts)
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        if isinstance(error, ClusterError):
            raise
        raise ClusterError(f"Cluster {where} is not complete: {type(error).__name__} {error}.") from error


def _of_hosts(table: Table, where: str, hosts: int | None) -> ClusterFigures:
    levels = tuple(Level(int(v["size"]), _link(v)) for v in table.get("levels", ()))
    count = hosts if hosts is not None else _count(table, "hosts", where, 1)
    if levels and count != table.get("hosts", 1):
        raise ClusterError(f"Cluster {where} has levels, so hosts={count} cannot replace its {table.get('hosts', 1)}.")
    return ClusterFigures(
        table["name"],
        _device(table["device"]),
        count,
        _count(table, "devices_per_host", where),
        _link(table["intra"]),
        _link(table["inter"]),
        levels or None,
    )


def _of_cpu(table: Table, where: str, hosts: int | None) -> ClusterFigures:
    cpu, devices = table["cpu"], _count(table, "devices_per_host", where)
    count = hosts if hosts is not None else _count(table, "hosts", where, 1)
    return of_host(count, devices, _count(cpu, "cores", where), int(cpu["memory_bytes"]), table["name"])


def _of_groups(table: Table, where: str, hosts: int | None) -> ClusterFigures:
    if hosts is not None:
        raise ClusterError(f"Cluster {where} has groups, so hosts={hosts} has to be said of one of them.")
    groups = tuple(_group(g, f"{where}, group {i}") for i, g in enumerate(table["groups"]))
    return heterogeneous.join(groups, _link(table["inter"]) if "inter" in table else None, table["name"])


def _group(table: Table, where: str) -> ClusterFigures:
    body = _preset_table(table["preset"]) if "preset" in table else table
    return _from_table(body, where, table.get("hosts"), table.get("topology"), table.get("slices", 1))


def _of_torus(table: Table, where: str, hosts: int | None, topology: str | None, slices: int) -> ClusterFigures:
    torus, per_host = table["torus"], _count(table, "devices_per_host", where)
    shape = _topology(torus, where, topology, per_host, hosts)
    link, chips = _link(table["intra"]), prod(shape)
    inside = min(chips, per_host)
    if hosts is not None and hosts * inside != chips:
        raise ClusterError(f"Cluster {where}: topology {topology!r} has {chips // inside} hosts, not hosts={hosts}.")
    dimensions = tuple(Level(size, _dimension(torus, shape, size, link)) for size in shape)
    inter, intra = _link(table["inter"]), max((d.link for d in dimensions), key=lambda dimension: dimension.beta)
    hosts = slices * chips // inside
    return ClusterFigures(
        table["name"], _device(table["device"]), hosts, inside, intra, inter, (Level(slices, inter), *dimensions)
    )  # fmt: skip


def _dimension(torus: Table, shape: Sequence[int], size: int, link: Link) -> Link:
    """The link of one dimension: a ring can use both directions of its links, a line only one."""
    wraps = all(s % torus["wrap"] == 0 for s in (shape if torus["whole"] else (size,)))
    return Link(link.alpha, link.beta / 2, "ring") if wraps else Link(link.alpha, link.beta, "line")


def _topology(torus: Table, where: str, topology: str | None, per_host: int, hosts: int | None) -> tuple[int, ...]:
    """The dimensions of a topology given as text, or of the listed topology with as many chips as `hosts` have."""
    listed: list[str] = torus["topologies"]
    limit = f", or multiples of {torus['wrap']} up to {torus['limit']}" if torus["whole"] else ""
    available = f"Topologies that fit: {', '.join(listed)}{limit}."
    if topology is None:
        chips = per_host * (hosts or 1)
        fitting = [s for s in map(_sizes, listed) if prod(s) == chips]
        if not fitting:
            raise ClusterError(f"Cluster {where}: no topology has hosts={hosts}, {chips} chips. {available}")
        return _padded(fitting[0], torus["dimensions"])
    shape = _padded(_sizes(topology), torus["dimensions"])
    fits = any(p == _padded(_sizes(s), len(shape)) for s in listed for p in permutations(shape))
    if not (len(shape) == torus["dimensions"] and (fits or (torus["whole"] and _whole(torus, shape)))):
        raise ClusterError(f"Cluster {where}: topology {topology!r} does not fit. {available}")
    return shape


def _whole(torus: Table, shape: Sequence[int]) -> bool:
    """Whether a shape consists of whole cubes, and is within the limit in every dimension."""
    within = zip(sorted(shape), sorted(_sizes(torus["limit"])), strict=True)
    return all(s % torus["wrap"] == 0 and 0 < s <= most for s, most in within)


def _sizes(text: str) -> tuple[int, ...]:
    """ "4x8" -> (4, 8); () if the text is not a topology, which then fits nowhere."""
    parts = text.split("x")
    return tuple(map(int, parts)) if all(p.isdecimal() for p in parts) else ()


def _padded(shape: tuple[int, ...], dimensions: int) -> tuple[int, ...]:
    """The shape without dimensions of 1, padded with 1 to `dimensions`; () stays ()."""
    used = tuple(s for s in shape if s != 1)
    return used + (1,) * (dimensions - len(used)) if shape else ()


def _link(table: Table) -> Link:
    values = {name: float(table[name]) for name in LINK if name in table}
    check_values("A link", values, LINK)
    beta = values["beta"] if "beta" in table else 1 / values["bandwidth"]
    pair = 1 / values["pair_bandwidth"] if "pair_bandwidth" in table else values.get("pair", 0.0)
    return Link(values["alpha"], beta, table.get("network", "switch"), pair)


def _count(table: Table, key: str, where: str, default: int | None = None) -> int:
    """An integer of 1 or more. KeyError if it is missing without a default; ClusterError for anything else."""
    value = table[key] if default is None else table.get(key, default)
    if not is_count(value):
        raise ClusterError(f"Cluster {where}: {key}={value!r:.60} must be an integer of at least 1.")
    return value


_READ: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "name": str,
        "peak_flops": lambda table: {str(dtype): float(rate) for dtype, rate in table.items()},
        "memory_bytes": int,
        "host_memory_bytes": int,
        "reduce_scatter": bool,
        "rounds_operands": bool,
        "tile": lambda extents: tuple(map(int, extents)),
        "half_rate_extents": lambda extents: tuple(map(float, extents)),
        "combines": lambda kinds: tuple(map(str, kinds)),
    }
)
"""Field of `Device` -> how to read it; all others are floats."""


def _device(table: Table) -> Device:
    required = [f.name for f in fields(Device) if f.default is MISSING]
    for name in required:
        table[name]  # a KeyError names the missing field
    given_fields = [f.name for f in fields(Device) if f.name in table]
    return Device(**{name: _READ.get(name, float)(table[name]) for name in given_fields})


BODIES: Mapping[str, Callable[[Table, str, int | None], ClusterFigures]] = MappingProxyType(
    {"groups": _of_groups, "cpu": _of_cpu, "levels": _of_hosts, "torus": _of_hosts}
)
"""The key that identifies a body other than plain hosts -> its reader; `_of_torus` also takes a topology."""


def text(cluster: ClusterFigures) -> str:
    """See `Cluster.to_toml`."""
    return "\n".join([f"name = {_quoted(cluster.name)}", *_body(cluster, "")]) + "\n"


def _body(cluster: ClusterFigures, prefix: str) -> list[str]:
    if cluster.groups:
        lines = [*_written(f"[{prefix}inter]", _link_fields(cluster.inter))]
        for group in cluster.groups:
            head = [f"[[{prefix}groups]]", f"name = {_quoted(group.name)}"]
            lines += ["", *head, *_body(group, f"{prefix}groups.")]
        return lines
    lines = [f"hosts = {cluster.hosts}", f"devices_per_host = {cluster.devices_per_host}"]
    lines += _written(f"[{prefix}device]", {f.name: getattr(cluster.device, f.name) for f in fields(Device)})
    lines += _written(f"[{prefix}intra]", _link_fields(cluster.intra))
    lines += _written(f"[{prefix}inter]", _link_fields(cluster.inter))
    for level in cluster.axis_levels or ():
        lines += _written(f"[[{prefix}levels]]", {"size": level.size, **_link_fields(level.link)})
    return lines


def _link_fields(link: Link) -> dict[str, Any]:
    """Fields of a link, with beta and not bandwidth: 1 / (1 / beta) is not always beta."""
    pair = {"pair": link.pair} if link.pair else {}
    return {"alpha": link.alpha, "beta": link.beta, "network": link.network, **pair}


def _written(head: str, values: Mapping[str, Any]) -> list[str]:
    return ["", head, *(f"{key} = {_value(value)}" for key, value in values.items())]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_quoted(str(k))} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_value, value)) + "]"
    return repr(int(value) if is_integer(value) else float(value))


def _quoted(text: str) -> str:
    """A TOML basic string: a JSON string, except for the control character DEL, which JSON does not escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
