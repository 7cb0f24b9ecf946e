"""Cluster files: presets and their sources, tori and what fits them, groups, saving and reading again."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.collectives import collective_time
from autopar.errors import ClusterError
from autopar.hardware import files as cluster_files
from autopar.hardware import local as local_cluster
from autopar.hardware.cluster import NETWORKS, Cluster, Level, Link
from autopar.hardware.description import Device
from autopar.hardware.figures import LEAST_MEMORY, LEAST_SPEED

PRESETS = (
    "cpu-host", "dgx-a100", "dgx-h100", "dgx-h200", "p3.16xlarge", "p4d.24xlarge",
    "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e",
)  # fmt: skip


def test_presets_load_and_hold_sane_figures() -> None:
    assert Cluster.presets() == PRESETS
    for name in Cluster.presets():
        cluster = Cluster.preset(name, hosts=2)
        assert cluster.name == name
        assert cluster.num_devices == 2 * cluster.devices_per_host
        assert cluster.intra.beta <= cluster.inter.beta
        assert 0 < cluster.device.efficiency <= 1
        assert cluster.device.peak("bfloat16") >= cluster.device.peak("float32")


@pytest.mark.parametrize("name", PRESETS)
def test_every_figure_of_a_preset_says_where_it_is_from(name: str) -> None:
    """A comment behind each figure, or the table's `source`; names and counts need none."""
    text = resources.files("autopar.cost_models").joinpath("presets", f"{name}.toml").read_text("utf-8")
    figures = [line for line in text.splitlines() if re.match(r"[a-z0-9_]+ = [0-9.]+", line)]
    bare = [line for line in figures if "#" not in line and not re.match(r"(devices_per_host|dimensions) =", line)]
    assert len(figures) >= 3
    assert bare == []


def test_dgx_h100_figures() -> None:
    cluster = Cluster.preset("dgx-h100", hosts=4)
    assert cluster.num_devices == 32
    assert cluster.intra.bandwidth == pytest.approx(450e9)
    assert cluster.inter.bandwidth == pytest.approx(50e9)


def test_unknown_preset_lists_the_known() -> None:
    with pytest.raises(ClusterError, match=r"'dgx-z9' not found\. Known presets:.*dgx-h100"):
        Cluster.preset("dgx-z9")
    with pytest.raises(ClusterError, match="topology='4x8'"):
        Cluster.preset("dgx-h100", topology="4x8")
    with pytest.raises(ClusterError, match="hosts=0 must be at least 1"):
        Cluster.preset("dgx-h100", hosts=0)


def links_of(cluster: Cluster, *shape: int) -> str:
    """Levels of each axis as text, with the rate in links of one direction: "4 ring 2 | 2 line 1/2"."""
    unit = 1 / 50e9  # tpu-v5e
    return " | ".join(
        " * ".join(f"{v.size} {v.link.network} {Fraction(unit / v.link.beta).limit_denominator(64)}" for v in axis)
        for axis in cluster.logical_mesh(shape).levels
    )


@pytest.mark.parametrize(
    ("topology", "shape", "expected"),
    [
        # No side of 16: no wrap-around, one direction of one link.
        ("4x8", (4, 8), "4 line 1 | 8 line 1"),
        ("4x8", (32,), "4 line 1 * 8 line 1"),
        # Two halves of a side: neighbours inside; across, four groups share each link.
        ("4x8", (4, 2, 4), "4 line 1 | 2 line 1/4 | 4 line 1"),
        ("16x16", (16, 16), "16 ring 2 | 16 ring 2"),
        ("8x16", (8, 16), "8 line 1 | 16 ring 2"),
        # A part of a ring is a line; the outermost part closes, and shares its links.
        ("16x16", (16, 4, 4), "16 ring 2 | 4 ring 1/2 | 4 line 1"),
        ("16x16", (64, 4), "16 ring 2 * 4 ring 1/2 | 4 line 1"),
    ],
)
def test_links_under_axes_of_a_torus(topology: str, shape: tuple[int, ...], expected: str) -> None:
    assert links_of(Cluster.preset("tpu-v5e", topology=topology), *shape) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8,), "8 mesh 6"),
        # Two devices have one link between them, four have three each: those to one another.
        ((2, 4), "2 mesh 1 | 4 mesh 3"),
        ((4, 2), "4 mesh 3 | 2 mesh 1"),
        ((2, 2, 2), "2 mesh 1 | 2 mesh 1 | 2 mesh 1"),
    ],
)
def test_axes_of_a_mesh_have_the_links_within_their_groups(shape: tuple[int, ...], expected: str) -> None:
    unit = 1 / 25e9
    levels = Cluster.preset("p3.16xlarge").logical_mesh(shape).levels
    assert " | ".join(f"{v.size} {v.link.network} {round(unit / v.link.beta)}" for (v,) in levels) == expected


def test_two_axes_of_a_mesh_together_have_its_links() -> None:
    mesh = Cluster.preset("p3.16xlarge").part(0, 4).logical_mesh((2, 2))
    assert collective_time("all-reduce", 1e9, (0,), mesh) == pytest.approx(2 / 2 * 1e9 / 25e9, rel=1e-3)
    assert collective_time("all-reduce", 1e9, (0, 1), mesh) == pytest.approx(2 * 3 / 4 * 1e9 / 75e9, rel=2e-3)


def test_tori_wrap_where_the_machine_does() -> None:
    def networks(name: str, topology: str) -> list[str]:
        return [v.link.network for v in Cluster.preset(name, topology=topology).levels[1:]]

    assert networks("tpu-v5p", "4x4x8") == ["ring"] * 3
    assert networks("tpu-v4", "2x2x4") == ["line"] * 3  # no whole cube of 4 x 4 x 4
    assert networks("tpu-v6e", "16x8") == ["ring", "line"]


def test_hosts_or_slices_of_a_torus() -> None:
    assert [v.size for v in Cluster.preset("tpu-v5e", hosts=4).levels] == [1, 4, 8]
    two = Cluster.preset("tpu-v5p", topology="4x4x4", slices=2)
    assert (two.num_devices, two.hosts, two.levels[0]) == (128, 32, Level(2, two.inter))
    assert two.logical_mesh((2, 64)).links[0] == two.inter
    assert Cluster.preset("tpu-v5p", topology="20x4x8").num_devices == 640  # whole cubes, though not listed


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("tpu-v5e", {"topology": "3x5"}, r"'3x5' does not fit\. Topologies that fit: 1x1, 2x2, 2x4, 4x4, 4x8, 8x8"),
        ("tpu-v5e", {"topology": "32x16"}, "does not fit"),
        ("tpu-v5e", {"topology": "4x8x2"}, "does not fit"),
        ("tpu-v5e", {"topology": "four"}, "'four' does not fit"),
        ("tpu-v5p", {"topology": "4x4x6"}, "or multiples of 4 up to 16x16x24"),
        ("tpu-v5p", {"topology": "16x20x20"}, "does not fit"),
        ("tpu-v5e", {"hosts": 3}, r"no topology has hosts=3, 24 chips\. Topologies that fit: 1x1"),
        ("tpu-v5e", {"topology": "4x8", "hosts": 2}, r"topology '4x8' has 4 hosts, not hosts=2"),
    ],
)
def test_topologies_that_fit_are_named(name: str, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.preset(name, **asked)


TOML = """
name = "toy"
hosts = 2
devices_per_host = 4
device = { name = "toy", memory_bandwidth = 1e11, memory_bytes = 1e9, peak_flops = { float32 = 1e12 } }
intra = { alpha = 1e-6, bandwidth = 1e10 }
inter = { alpha = 1e-5, bandwidth = 1e9 }
"""


def test_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "toy.toml"
    path.write_text(TOML)
    assert Cluster.from_toml(path).num_devices == 8
    assert Cluster.from_toml(path, hosts=3).num_devices == 12
    path.write_text(TOML.replace("bandwidth = 1e10", "bandwith = 1e10"))
    with pytest.raises(ClusterError, match=r"toy\.toml is not complete: KeyError 'bandwidth'"):
        Cluster.from_toml(path)
    with pytest.raises(ClusterError, match="cannot be read"):
        Cluster.from_toml(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("hosts = 2", "hosts = 0", "hosts=0 must be an integer of at least 1"),
        ("hosts = 2", "hosts = -2", "hosts=-2 must be an integer of at least 1"),
        ("devices_per_host = 4", "devices_per_host = 2.5", "devices_per_host=2.5 must be an integer of at least 1"),
        ("memory_bytes = 1e9", "memory_bytes = 16", "memory_bytes=16 must be a number of bytes, .* 16e9 for 16 GB"),
        ("memory_bytes = 1e9", "memory_bytes = -1e9", "memory_bytes=-1000000000 must be a number of bytes"),
        ("memory_bandwidth = 1e11", "memory_bandwidth = 819", r"memory_bandwidth=819\.0 must be a number of bytes/s"),
        ("float32 = 1e12", "float32 = 197", r"\{'float32': 197\.0\} must be FLOP/s by dtype"),
        ("bandwidth = 1e10", "bandwidth = 50", r"bandwidth=50\.0 must be a number of bytes/s"),
        ("bandwidth = 1e10", "beta = 50e9", r"beta=50000000000\.0 must be a number of s/byte"),
        ("alpha = 1e-6", "alpha = 5", r"alpha=5\.0 must be a number of seconds"),
    ],
)
def test_figures_in_another_unit_are_refused(tmp_path: Path, right: str, wrong: str, message: str) -> None:
    path = tmp_path / "toy.toml"
    path.write_text(TOML.replace(right, wrong))
    with pytest.raises(ClusterError, match=message):
        Cluster.from_toml(path)


def test_a_cluster_has_hosts_and_devices() -> None:
    cluster = Cluster.preset("dgx-h100")
    for field in ("hosts", "devices_per_host"):
        for count in (0, -1, 2.5):
            with pytest.raises(ClusterError, match=rf"{field}={count} must be an integer of 1 or more"):
                dataclasses.replace(cluster, **{field: count})
    with pytest.raises(ClusterError, match="hosts=0 must be at least 1"):
        Cluster.preset("cpu-host", hosts=0)


GROUPS = """
name = "mixed"
[[groups]]
preset = "p3.16xlarge"
[[groups]]
preset = "p4d.24xlarge"
hosts = 2
"""


def test_groups_and_tori_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(GROUPS)
    groups = [Cluster.preset("p3.16xlarge"), Cluster.preset("p4d.24xlarge", hosts=2)]
    assert Cluster.from_toml(path) == Cluster.joined(groups, name="mixed")
    with pytest.raises(ClusterError, match="has groups, so hosts=2"):
        Cluster.from_toml(path, hosts=2)
    path.write_text(GROUPS.replace("p4d", "p9d"))
    with pytest.raises(ClusterError, match=r"'p9d\.24xlarge' not found\. Known presets"):
        Cluster.from_toml(path)
    text = resources.files("autopar.cost_models").joinpath("presets", "tpu-v5e.toml").read_text("utf-8")
    path.write_text('topology = "4x8"\n' + text)
    assert Cluster.from_toml(path) == Cluster.preset("tpu-v5e", topology="4x8")


positive, speeds = st.floats(1e-12, 1e15), st.floats(LEAST_SPEED, 1e18)
texts = st.text(max_size=12)
networks = st.sampled_from(NETWORKS)
any_link = st.builds(Link, st.floats(0, 1), st.floats(0, 1), networks)
any_device = st.builds(
    Device,
    name=texts,
    peak_flops=st.dictionaries(texts, speeds, min_size=1, max_size=3),
    memory_bandwidth=speeds,
    memory_bytes=st.integers(LEAST_MEMORY, 2**60),
    kernel_overhead=positive,
    efficiency=positive,
    reduce_scatter=st.booleans(),
    overlap=st.floats(0, 1),
    bucket_bytes=positive,
    combines=st.lists(texts, max_size=3).map(tuple),
    half_rate_extents=st.tuples(positive, positive, positive),
    rounds_operands=st.booleans(),
)
any_levels = st.none() | st.lists(st.builds(Level, st.integers(1, 9), any_link), min_size=1, max_size=3).map(tuple)
any_cluster = st.builds(
    Cluster, texts, any_device, st.integers(1, 99), st.integers(1, 99), any_link, any_link, any_levels
)


@given(any_cluster | st.lists(any_cluster, min_size=1, max_size=3).map(Cluster.joined))
def test_saved_clusters_are_read_again(cluster: Cluster) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        cluster.save(path)
        assert Cluster.from_toml(path) == cluster


def test_joined_devices_are_no_slower_than_the_slowest() -> None:
    """The product of this peak and efficiency, divided by the efficiency again, is below the peak."""
    peak, efficiency = LEAST_SPEED, 531795652780329.0
    assert peak * efficiency / efficiency < peak
    preset = Cluster.preset("p3.16xlarge")
    device = dataclasses.replace(preset.device, peak_flops={"float32": peak}, efficiency=efficiency)
    groups = [dataclasses.replace(preset, device=d) for d in (device, dataclasses.replace(device, name="other"))]
    assert Cluster.joined(groups).device.peak_flops == {"float32": peak}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_file(name: str, tmp_path: Path) -> None:
    cluster = Cluster.preset(name, hosts=2)
    cluster.save(tmp_path / "saved.toml")
    assert Cluster.from_toml(tmp_path / "saved.toml") == cluster


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "dgx-h100"),
        ("NVIDIA H200", "dgx-h200"),
        ("NVIDIA A100-SXM4-40GB", "p4d.24xlarge"),
        ("Tesla V100-SXM2-16GB", "p3.16xlarge"),
        ("TPU v4", "tpu-v4"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v6 lite", "tpu-v6e"),
        ("NVIDIA T4", None),
    ],
)
def test_accelerators_are_known_by_jax_names(kind: str, expected: str | None) -> None:
    assert cluster_files.preset_of(kind) == expected


@dataclass(frozen=True)
class Chip:
    device_kind: str
    coords: tuple[int, ...] | None = None


def test_local_accelerators_count_themselves() -> None:
    gpus = local_cluster.of_accelerators([Chip("NVIDIA H200")] * 4, hosts=1)
    assert (gpus.name, gpus.num_devices) == ("local dgx-h200", 4)
    chips = [Chip("TPU v5 lite", (x, y, 0)) for x in range(4) for y in range(8)]
    assert [v.size for v in local_cluster.of_accelerators(chips, hosts=4).levels] == [1, 4, 8]
    with pytest.raises(ClusterError, match=r"No preset describes a 'NVIDIA T4'; known presets: cpu-host, "):
        local_cluster.of_accelerators([Chip("NVIDIA T4")], hosts=1)
