"""Clusters: levels under logical axes, shared links, parts, unequal groups and the messages for mistakes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.collectives import linear_coefficients
from autopar.errors import ClusterError, MeshError
from autopar.hardware.cluster import Cluster, Level, Link, LogicalMesh
from autopar.hardware.description import Device
from autopar.hardware.host import HOST
from autopar.hardware.links import Segment, segment_level

INTRA, INTER = Link(1e-6, 1e-11), Link(5e-6, 1e-10)
DEVICE = Device("d", {"float32": 1e12, "bfloat16": 2e12}, 1e11, 2**30)


def hosts_of(hosts: int, devices: int) -> Cluster:
    return Cluster("test", DEVICE, hosts, devices, INTRA, INTER)


def describe(mesh: LogicalMesh) -> str:
    """Levels of each axis as text: "4 inter * 2 intra | 4 intra"."""
    names = {INTRA: "intra", INTER: "inter"}
    return " | ".join(" * ".join(f"{v.size} {names[v.link]}" for v in axis) for axis in mesh.levels)


@pytest.mark.parametrize(
    ("hosts", "devices", "shape", "expected"),
    [
        (4, 8, (4, 8), "4 inter | 8 intra"),
        (4, 8, (2, 16), "2 inter | 2 inter * 8 intra"),
        (4, 8, (8, 4), "4 inter * 2 intra | 4 intra"),
        (4, 8, (2, 2, 2, 4), "2 inter | 2 inter | 2 intra | 4 intra"),
        (4, 8, (32,), "4 inter * 8 intra"),
        (1, 8, (2, 4), "2 intra | 4 intra"),
        (1, 8, (1, 8), "1 intra | 8 intra"),
        (2, 1, (2,), "2 inter"),
        # Groups of three do not fit hosts of eight: both axes are priced on the slowest link.
        (3, 8, (8, 3), "8 inter | 3 inter"),
        (3, 8, (3, 8), "3 inter | 8 intra"),
        (3, 8, (6, 4), "3 inter * 2 intra | 4 intra"),
    ],
)
def test_levels_under_logical_axes(hosts: int, devices: int, shape: tuple[int, ...], expected: str) -> None:
    assert describe(hosts_of(hosts, devices).logical_mesh(shape)) == expected


def test_link_of_an_axis_is_its_bottleneck() -> None:
    mesh = hosts_of(4, 8).logical_mesh((8, 4))
    assert mesh.links == (INTER, INTRA)
    assert mesh.names == ("x", "y")


def test_axis_of_size_one_takes_no_slow_link() -> None:
    assert hosts_of(1, 8).logical_mesh((1, 8)).links == (INTRA, INTRA)


@given(
    hosts=st.integers(1, 6),
    devices=st.integers(1, 8),
    cuts=st.lists(st.integers(1, 48), max_size=3),
)
def test_levels_multiply_to_the_axis(hosts: int, devices: int, cuts: list[int]) -> None:
    shape, rest = [], hosts * devices
    for cut in cuts:
        shape.append(cut if rest % cut == 0 else 1)
        rest //= shape[-1]
    mesh = hosts_of(hosts, devices).logical_mesh((*shape, rest))
    for size, link, levels in zip(mesh.sizes, mesh.links, mesh.levels, strict=True):
        product = 1
        for level in levels:
            product *= level.size
            assert level.size == 1 or (level.link.alpha <= link.alpha and level.link.beta <= link.beta)
        assert product == size
    assert mesh.size == hosts * devices


def test_wrong_product_names_the_sizes() -> None:
    with pytest.raises(MeshError, match=r"Mesh sizes \(4, 4\) multiply to 16.*32 devices \(4 x 8\)"):
        hosts_of(4, 8).logical_mesh((4, 4))


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(MeshError, match=r"\(-4, -8\)"):
        hosts_of(4, 8).logical_mesh((-4, -8))


def test_fifth_axis_needs_names() -> None:
    cluster = hosts_of(4, 8)
    with pytest.raises(MeshError, match="give `names`"):
        cluster.logical_mesh((2,) * 5)
    assert cluster.logical_mesh((2,) * 5, tuple("abcde")).axis("e") == 4


def test_unknown_and_duplicate_axis_names() -> None:
    with pytest.raises(MeshError, match=r"Axis 'q' not found\. Mesh axes are \{'x': 4, 'y': 8\}"):
        hosts_of(4, 8).logical_mesh((4, 8)).axis("q")
    with pytest.raises(MeshError, match="distinct"):
        hosts_of(4, 8).logical_mesh((4, 8), ("a", "a"))


def test_mesh_is_a_key() -> None:
    a, b = (hosts_of(4, 8).logical_mesh((4, 8)) for _ in range(2))
    assert a == b
    assert len({a, b}) == 1
    assert a.group((0, 1)) == 32
    assert a.shape == {"x": 4, "y": 8}


def test_custom_takes_scalars_and_sequences() -> None:
    cluster = Cluster.custom((4, 2), 1e-6, (1e-9, 1e-10), 1e14, 1e12, 16 * 2**30)
    mesh = cluster.logical_mesh((4, 2))
    assert mesh.links == (Link(1e-6, 1e-9), Link(1e-6, 1e-10))
    assert cluster.default_shape == (4, 2)
    assert mesh.device.peak("bfloat16") == 1e14
    assert cluster.logical_mesh((8,)).levels == ((Level(4, mesh.links[0]), Level(2, mesh.links[1])),)
    with pytest.raises(ClusterError, match="beta has 3 values"):
        Cluster.custom((4, 2), 1e-6, (1e-9, 1e-9, 1e-9), 1e14, 1e12, 1)


@pytest.mark.parametrize(
    ("dtype", "wider", "share"),
    [
        ("bfloat16", "bfloat16", 1),
        ("float16", "float32", 1),  # bfloat16 has fewer digits
        ("float8_e5m2", "bfloat16", 1),
        ("float8_e4m3fn", "float32", 1),
        ("int4", "int8", 1),
        ("uint8", "int8", 1),
        ("bool", "int8", 1),
        ("complex64", "float32", 4),
        ("int16", "float64", 1),  # no wider integers are listed: the slowest
        ("key<fry>", "float64", 1),
    ],
)
def test_peak_of_an_unlisted_dtype_is_that_of_the_next_wider_one(dtype: str, wider: str, share: int) -> None:
    rates = {"float64": 1e12, "float32": 1e14, "bfloat16": 2e14, "int8": 4e14}
    device = dataclasses.replace(DEVICE, peak_flops=rates)
    assert device.peak(dtype) == device.peak(wider) / share


@pytest.mark.parametrize(("n", "network"), [(8, "ring"), (8, "line"), (12, "ring"), (16, "ring")])
def test_shared_links_by_routing_every_message(n: int, network: str) -> None:
    """Groups along one dimension pass a byte to the next: the busiest directed link is what `segment_level` says.

    Neighbours send half each way round where their group closes to a ring, else along the line and back.
    """
    for stride, size in [(s, c) for s in range(1, n) for c in range(2, n + 1) if n % (s * c) == 0]:
        closed = network == "ring" and stride * size == n
        load: Counter[tuple[int, int]] = Counter()
        for first in range(n):
            block, place = first // (stride * size), first // stride % size
            if closed:
                hops = [(first + h) % n for h in range(stride)]
                load.update({(h, 1): Fraction(1, 2) for h in hops})
                load.update({(h, -1): Fraction(1, 2) for h in hops})
            else:
                last = place == size - 1
                target = block * stride * size + first % stride + (0 if last else (place + 1) * stride)
                low, high = sorted((first, target))
                load.update({(h, -1 if last else 1): Fraction(1) for h in range(low, high)})
        link = Link(1e-6, 0.5 if network == "ring" else 1.0, network)  # one direction carries 1 byte/s
        level = segment_level(size, Segment(0, n, link, stride))
        assert level.link.beta == max(load.values())
        assert level.link.network == ("ring" if closed else "line")
        assert level.link.alpha == pytest.approx(stride * 1e-6)


def mixed() -> Cluster:
    return Cluster.joined([Cluster.preset("p3.16xlarge"), Cluster.preset("p4d.24xlarge", hosts=2)], name="mixed")


def test_unequal_groups_are_as_slow_as_their_slowest() -> None:
    cluster, (v100, a100) = mixed(), mixed().groups
    assert (cluster.hosts, cluster.num_devices) == (3, 24)
    for dtype in ("float32", "bfloat16", "float64"):
        rates = [g.device.peak(dtype) * g.device.efficiency for g in (v100, a100)]
        assert cluster.device.peak(dtype) * cluster.device.efficiency == pytest.approx(min(rates))
    assert cluster.device.memory_bytes == v100.device.memory_bytes
    assert cluster.device.memory_bandwidth == v100.device.memory_bandwidth
    assert (cluster.intra, cluster.inter.beta) == (v100.intra, v100.inter.beta)
    mesh = cluster.logical_mesh((3, 8))
    assert mesh.links[0] == cluster.inter
    assert Cluster.joined([a100]).device == a100.device


def test_parts_inside_a_group_keep_their_device() -> None:
    cluster, (v100, a100) = mixed(), mixed().groups
    assert cluster.part(0, 8) == v100
    assert cluster.part(8, 16) == a100
    assert cluster.part(16, 4).device == a100.device
    assert cluster.part(16, 4).intra == a100.intra
    assert cluster.part(0, 16).device.memory_bytes == v100.device.memory_bytes
    with pytest.raises(ClusterError, match="no devices 20 to 27"):
        cluster.part(20, 8)


@pytest.mark.parametrize(
    ("first", "count", "expected"),
    [
        (0, 32, "4 x 8"),
        (8, 16, "2 x 8"),
        (12, 4, "1 x 4"),
        (31, 1, "1 x 1"),
        (4, 8, None),
        (0, 12, None),
        (28, 8, None),
    ],
)
def test_part_of_a_cluster(first: int, count: int, expected: str | None) -> None:
    cluster = hosts_of(4, 8)
    if expected is None:
        with pytest.raises(ClusterError, match=r"of cluster 'test' \(4 x 8\) are no whole hosts"):
            cluster.part(first, count)
        return
    part = cluster.part(first, count)
    assert f"{part.hosts} x {part.devices_per_host}" == expected
    assert (part.num_devices, part.device) == (count, DEVICE)


def test_part_of_a_ring_is_a_line() -> None:
    part = Cluster.preset("tpu-v5e", topology="16x16").part(32, 128)
    assert [(v.size, v.link.network) for v in part.levels] == [(1, "switch"), (8, "line"), (16, "ring")]
    assert (part.hosts, part.num_devices) == (16, 128)


def test_local_shares_the_host_between_virtual_devices() -> None:
    cluster = Cluster.local()
    cores = os.cpu_count() or 1
    flops_per_second = cluster.device.peak("float32")
    assert (cluster.hosts, cluster.num_devices) == (1, 8)
    assert cluster.logical_mesh((8,)).device.name == "cpu"
    assert flops_per_second * 8 == pytest.approx(cores * HOST.flops_per_core["float32"])
    ((pair, _),) = linear_coefficients("all-reduce", (1,), cluster.logical_mesh((4, 2)))
    ((everyone, _),) = linear_coefficients("all-reduce", (0,), cluster.logical_mesh((8,)))
    assert everyone == pytest.approx(HOST.rendezvous * max(1.0, 8 / cores)) == 4 * pair


def test_import_needs_no_jax() -> None:
    code = "import sys, autopar.hardware.cluster, autopar.cost_models.collectives; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[1]).returncode == 0
