"""Clusters: levels under logical axes, presets, files and the messages for mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster, Device, Level, Link, LogicalMesh
from autopar.errors import ClusterError, MeshError

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


def test_peak_of_an_unlisted_dtype_is_the_slowest() -> None:
    assert (DEVICE.peak("bfloat16"), DEVICE.peak("int32")) == (2e12, 1e12)


def test_presets_load_and_hold_sane_figures() -> None:
    assert "dgx-h100" in Cluster.presets()
    for name in Cluster.presets():
        cluster = Cluster.preset(name, hosts=2)
        assert cluster.name == name
        assert cluster.num_devices == 2 * cluster.devices_per_host
        assert cluster.intra.beta <= cluster.inter.beta
        assert 0 < cluster.device.efficiency <= 1
        assert cluster.device.peak("bfloat16") >= cluster.device.peak("float32")


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


def test_local_shares_the_host_between_virtual_devices() -> None:
    cluster = Cluster.local()
    cores = os.cpu_count() or 1
    one = cluster.device.peak("float32")
    assert (cluster.hosts, cluster.num_devices) == (1, 8)
    assert cluster.logical_mesh((8,)).device.name == "cpu"
    from autopar.cost_models.host import HOST

    assert one * 8 == pytest.approx(cores * HOST.flops_per_core["float32"])
    assert cluster.intra.alpha > 0


def test_import_needs_no_jax() -> None:
    code = "import sys, autopar.cluster, autopar.cost_models.collectives; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[1]).returncode == 0
