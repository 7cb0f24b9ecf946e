"""`autopar bench collectives`: every algorithm of a collective by its closed form, side by side.

For `workers` devices of a cluster, one row per algorithm: bytes over all links, bytes that a worker sends on average,
steps, bytes one after the other, and seconds at each message size; then the sizes at which another algorithm becomes
the fastest. Nothing is measured: the forms are those of `autopar.hardware.algorithms`, which the tests confirm
message by message. A single algorithm sees the slowest link between the workers; where they span hosts of equal size,
"two-level" is the ring of `two_level_time`. Additions cost three memory accesses a byte: gamma = 3 / memory bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.cost_models.collectives import collective_time
from autopar.errors import ArgumentError
from autopar.hardware.algorithms import ALGORITHMS, COLLECTIVES, Algorithm, two_level_time
from autopar.hardware.cluster import Cluster
from autopar.hardware.links import slowest
from autopar.ir.keyed import grouped
from autopar.ir.text import seconds as duration
from autopar.ir.text import size
from autopar.ir.text import table as grid
from autopar.plans.views.picture import picture
from autopar.zoo import targets

Result = dict[str, Any]

SIZES = (4_000, 1_000_000, 1_000_000_000)
"""Bytes: latency counts; both count; bandwidth counts."""

TWO_LEVEL = "two-level"

UNSENT = ("copy", "shift", "direct")
"""Not messages between any two workers: copies in one memory, hops along a ring, or no choice at all."""

STYLES = ("-", "--", "-.", ":")
"""Neighbouring lines differ in more than colour."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the collective runs: `workers` devices, all links as the slowest, and those of two levels if it has them.

    Attributes:
        alpha, beta, gamma: s, s/byte, s per byte reduced.
        hosts, per_host: the two levels; (1, workers) where there is one.
        intra, inter: (alpha, beta) of each.
    """

    workers: int
    alpha: float
    beta: float
    gamma: float
    hosts: int
    per_host: int
    intra: tuple[float, float]
    inter: tuple[float, float]


def run(workers: int, sizes: Sequence[int], cluster: str, kind: str = "all-reduce") -> Result:
    """The comparison as one object.

    Args:
        workers: number of devices.
        sizes: message sizes, bytes.
        cluster: a preset, or a TOML file.
        kind: a key of `ALGORITHMS`.

    Raises:
        ArgumentError: fewer than two workers, an unknown kind, or sizes below 1 byte.
        ClusterError: an unknown cluster, or one that has no such number of devices.
    """
    if workers < 2:
        raise ArgumentError(f"workers={workers} must be at least 2")
    if kind not in ALGORITHMS:
        raise ArgumentError(f"Collective {kind!r} not found. Known collectives: {', '.join(ALGORITHMS)}.")
    if not sizes or min(sizes) < 1:
        raise ArgumentError(f"bytes={tuple(sizes)}: give sizes of at least 1 byte")
    part = targets.cluster(cluster, None, (workers,)).part(0, workers)
    setting = _setting(part)
    names = [name for name, a in ALGORITHMS[kind].items() if name not in UNSENT and a.runs_on(workers)]
    rows = [_row(name, ALGORITHMS[kind][name], setting, sizes) for name in names]
    if kind == "all-reduce" and setting.hosts > 1 and setting.per_host > 1:
        rows.append(_two_level_row(setting, sizes))
    return {
        "kind": kind, "workers": workers, "cluster": cluster, "alpha_s": setting.alpha,
        "bandwidth": 1 / setting.beta if setting.beta else math.inf, "gamma_s_per_byte": setting.gamma,
        "bytes": list(sizes), "rows": rows, "crossovers": crossovers(rows), "planner_s": _planner(kind, part, sizes),
    }  # fmt: skip


def _planner(kind: str, cluster: Cluster, sizes: Sequence[int]) -> list[float]:
    """Seconds that a plan would count, for kinds that plans have; a plan may use all links between hosts at once."""
    mesh = cluster.logical_mesh((cluster.num_devices,))
    return [collective_time(kind, b, (0,), mesh) for b in sizes] if kind in COLLECTIVES else []


def _setting(cluster: Cluster) -> Setting:
    workers = cluster.num_devices
    link = slowest(cluster.levels)
    two = (cluster.hosts, cluster.devices_per_host) if cluster.axis_levels is None else (1, workers)
    intra, inter = ((v.alpha, v.beta) for v in (cluster.intra, cluster.inter))
    return Setting(workers, link.alpha, link.beta, 3 / cluster.device.memory_bandwidth, *two, intra, inter)


def _row(name: str, algorithm: Algorithm, at: Setting, sizes: Sequence[int]) -> Result:
    p = at.workers
    times = [algorithm.time(p, b, at.alpha, at.beta, at.gamma) for b in sizes]
    line = (algorithm.time(p, 0, at.alpha, at.beta, at.gamma), algorithm.time(p, 1, 0.0, at.beta, at.gamma))
    moved = algorithm.total(p), algorithm.total(p) / p, algorithm.messages(p), algorithm.volume(p)
    return _figures(name, moved, line, times)


def _two_level_row(at: Setting, sizes: Sequence[int]) -> Result:
    halves, across = ("reduce-scatter", "all-gather"), ALGORITHMS["all-reduce"]["ring"]
    inside = ALGORITHMS[halves[0]]["ring"], ALGORITHMS[halves[1]]["ring"]
    h, d = at.hosts, at.per_host

    def time(nbytes: float) -> float:
        return two_level_time(inside, across, h, d, nbytes, at.intra, at.inter, at.gamma)

    total = h * sum(part.total(d) for part in inside) + across.total(h)
    steps = sum(part.messages(d) for part in inside) + across.messages(h)
    volume = sum(part.volume(d) for part in inside) + across.volume(h) / d
    return _figures(
        TWO_LEVEL, (total, total / at.workers, steps, volume), (time(0), time(1) - time(0)), [time(b) for b in sizes]
    )  # fmt: skip


def _figures(
    name: str, moved: tuple[float, float, float, float], line: tuple[float, float], times: list[float]
) -> Result:
    """Bytes are per byte of the message."""
    total, each, steps, volume = moved
    return {
        "algorithm": name, "total_bytes": total, "bytes_per_worker": each, "steps": int(steps),
        "critical_bytes": volume, "latency_s": line[0], "s_per_byte": line[1], "seconds": times,
    }  # fmt: skip


def crossovers(rows: Sequence[Result]) -> list[Result]:
    """By rising size: from how many bytes on which algorithm is the fastest; the first row's name where two tie."""
    current = min(rows, key=lambda r: (r["latency_s"], r["s_per_byte"]))
    changes: list[Result] = [{"from_bytes": 0.0, "algorithm": current["algorithm"]}]
    while faster := [r for r in rows if r["s_per_byte"] < current["s_per_byte"] * (1 - 1e-9)]:
        meets = [((r["latency_s"] - current["latency_s"]) / (current["s_per_byte"] - r["s_per_byte"])) for r in faster]
        at, slope = min((m, r["s_per_byte"]) for m, r in zip(meets, faster, strict=True))
        current = next(r for m, r in zip(meets, faster, strict=True) if (m, r["s_per_byte"]) == (at, slope))
        changes.append({"from_bytes": at, "algorithm": current["algorithm"]})
    return changes


def table(result: Result) -> str:
    """The result for people; n is the size of the message."""
    heads = ("", "bytes in all", "per worker", "in a row", "steps", *(f"at {size(b)}" for b in result["bytes"]))
    body = [
        (
            row["algorithm"],
            *(f"{row[key]:.2f} n" for key in ("total_bytes", "bytes_per_worker", "critical_bytes")),
            str(row["steps"]),
            *map(duration, row["seconds"]),
        )
        for row in result["rows"]
    ]
    choices = [f"{c['algorithm']} from {size(c['from_bytes'])}" for c in result["crossovers"]]
    link = f"{result['alpha_s'] * 1e6:g} us and {size(result['bandwidth'])}/s at the slowest link"
    title = f"{result['kind']} of n bytes, {result['workers']} workers of {result['cluster']}: {link}"
    return "\n".join(
        [title, grid("algorithm", heads, body), "", f"fastest: {', '.join(choices)}", *_planner_line(result)]
    )


def _planner_line(result: Result) -> list[str]:
    price = ", ".join(map(duration, result["planner_s"]))
    return [f"the planner, over all levels at once: {price}"] if price else []


def plot(result: Result, path: Path) -> None:
    """Seconds against bytes, a line per algorithm, as a picture; see `autopar.plans.views.picture`."""
    title = f"{result['kind']}, {result['workers']} workers of {result['cluster']}"
    sizes = [2.0**k for k in range(6, 33)]
    lines = grouped(((row["latency_s"], row["s_per_byte"]), row["algorithm"]) for row in result["rows"])
    with picture(path, title, xscale="log", yscale="log", xlabel="message, bytes", ylabel="time, s") as axes:
        for i, ((latency, slope), names) in enumerate(lines.items()):
            times = [latency + slope * b for b in sizes]
            axes.plot(sizes, times, label=", ".join(names), color=f"C{i % 10}", linestyle=STYLES[i % len(STYLES)])
        for change in result["crossovers"][1:]:
            axes.axvline(change["from_bytes"], color="0.8", linewidth=1, zorder=0)
