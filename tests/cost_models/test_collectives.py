"""Collectives: closed forms against numbers worked out by hand, and properties of every price."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.collectives import FLAT, STAGED, collective_time, linear_coefficients
from autopar.errors import ArgumentError
from autopar.hardware.algorithms import ALGORITHMS, COLLECTIVES, envelope, two_level_time
from autopar.hardware.cluster import DEFAULT_AXIS_NAMES, NETWORKS, Cluster, Level, Link, LogicalMesh
from autopar.hardware.description import Device
from autopar.ir.collective import WIRE_FRACTION, wire_bytes

ALPHA, BETA = 1e-5, 1e-9
KINDS = tuple(COLLECTIVES)


def mesh_of(*sizes: int, alpha: float = ALPHA, beta: float = BETA) -> LogicalMesh:
    return Cluster.custom(sizes, alpha, beta, 1e12, 1e11, 2**30).logical_mesh(sizes)


def test_tables_cover_the_same_kinds() -> None:
    assert set(COLLECTIVES) == set(FLAT) == set(STAGED) == set(WIRE_FRACTION)
    for kind, networks in COLLECTIVES.items():
        assert set(networks) == set(NETWORKS)
        assert all(name in ALGORITHMS[kind] for names in networks.values() for name in names)


@pytest.mark.parametrize(
    ("kind", "nbytes", "n", "expected"),
    [
        # Small: three rounds of recursive doubling. Large: 6 rounds and 2 * 7/8 of the bytes.
        ("all-reduce", 8, 8, 3 * ALPHA + 3 * 8 * BETA),
        ("all-reduce", 2**30, 8, 6 * ALPHA + 2 * 7 / 8 * 2**30 * BETA),
        # Six devices: four work in two rounds, the other two hand in before and are told after.
        ("all-reduce", 8, 6, 4 * ALPHA + 4 * 8 * BETA),
        ("all-gather", 2**20, 8, 3 * ALPHA + 7 / 8 * 2**20 * BETA),
        ("reduce-scatter", 2**20, 5, 3 * ALPHA + 4 / 5 * 2**20 * BETA),
        # Bruck over 8: half of the bytes in each of three rounds; over 3: one of three pieces in each of two.
        ("all-to-all", 8, 8, 3 * ALPHA + 1.5 * 8 * BETA),
        ("all-to-all", 2**30, 8, 7 * ALPHA + 7 / 8 * 2**30 * BETA),
        ("all-to-all", 2**30, 3, 2 * ALPHA + 2 / 3 * 2**30 * BETA),
        ("collective-permute", 2**20, 8, ALPHA + 2**20 * BETA),
    ],
)
def test_one_axis_by_hand(kind: str, nbytes: int, n: int, expected: float) -> None:
    assert collective_time(kind, nbytes, (0,), mesh_of(n)) == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 12, 32])
def test_large_messages_move_the_least_bytes(kind: str, n: int) -> None:
    """With no latency the time of one axis is the wire bytes of the lower bound over the bandwidth."""
    time = collective_time(kind, 1e6, (0,), mesh_of(n, alpha=0.0))
    assert time == pytest.approx(wire_bytes(kind, 1e6, n) * BETA)


def test_hierarchical_all_reduce_by_hand() -> None:
    """Two hosts of four: scatter inside, reduce a quarter across, gather inside."""
    cluster = Cluster.custom((2, 4), (1e-5, 1e-6), (1e-9, 1e-10), 1e12, 1e11, 2**30)
    b = 4e6
    staged = (2 * 1e-6 + 0.75 * b * 1e-10) * 2 + 1e-5 + b / 4 * 1e-9
    ring = 14 * 1e-5 + 14 / 8 * b * max(1e-9 / 4, 1e-10)
    for axes, mesh in (((0, 1), cluster.logical_mesh((2, 4))), ((0,), cluster.logical_mesh((8,)))):
        assert collective_time("all-reduce", b, axes, mesh) == pytest.approx(min(staged, ring))


def on(network: str, *shape: int) -> LogicalMesh:
    link, device = Link(ALPHA, BETA, network), Device("d", {"float32": 1e12}, 1e11, 2**30)
    levels = tuple(Level(n, link) for n in shape)
    return Cluster(network, device, 1, math.prod(shape), link, link, levels).logical_mesh(shape)


@pytest.mark.parametrize(
    ("kind", "messages", "volume"),
    [("all-reduce", 14, 14 / 8), ("all-gather", 7, 7 / 8), ("all-to-all", 7, 2.0), ("collective-permute", 1, 1.0)],
)
def test_a_ring_has_no_shortcuts(kind: str, messages: float, volume: float) -> None:
    """A line's rate is one direction's; a ring's counts both, of which a permute uses one."""
    ((alpha, beta),) = linear_coefficients(kind, (0,), on("line", 8))
    assert (alpha, beta) == pytest.approx((messages * ALPHA, volume * BETA))
    ((alpha, beta),) = linear_coefficients(kind, (0,), on("ring", 8))
    directions = 2 if kind == "collective-permute" else 1
    assert (alpha, beta) == pytest.approx((messages * ALPHA, directions * volume * BETA))


@pytest.mark.parametrize("kind", KINDS)
def test_threads_meet_once(kind: str) -> None:
    """In the memory of one host two axes are no more than one of their product, and every thread has to come."""
    ((alpha, beta),) = linear_coefficients(kind, (0,), on("memory", 8))
    assert alpha == 8 * ALPHA
    assert 0 < beta <= 2 * BETA
    assert linear_coefficients(kind, (0, 1), on("memory", 2, 4)) == ((alpha, beta),)


def test_equal_switched_axes_are_one_group_and_rings_are_not() -> None:
    joint = linear_coefficients("all-gather", (0, 1), on("switch", 2, 4))
    assert joint == linear_coefficients("all-gather", (0,), on("switch", 8))
    rings = linear_coefficients("all-gather", (0, 1), on("ring", 4, 4))
    # Two halves, one along the rows first and one along the columns, use both dimensions all the time.
    assert rings == ((pytest.approx(6 * ALPHA), pytest.approx(15 / 16 * BETA / 2)),)
    assert linear_coefficients("all-to-all", (0, 1), on("ring", 4, 4)) == (pytest.approx((6 * ALPHA, BETA)),)


@given(st.lists(st.integers(2, 8), min_size=2, max_size=3), st.sampled_from(["ring", "line"]))
def test_a_torus_takes_in_no_more_than_its_links_bring(shape: list[int], network: str) -> None:
    """Each device lacks (n-1)/n of the result and has one link's rate per dimension; equal dimensions reach that."""
    axes, n = tuple(range(len(shape))), math.prod(shape)
    least = (n - 1) / n * BETA / len(shape)
    slope = linear_coefficients("all-gather", axes, on(network, *shape))[-1][1]
    assert slope >= least * (1 - 1e-9)
    if len(set(shape)) == 1:
        assert slope == pytest.approx(least)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_one_ring_are_that_ring_again(kind: str) -> None:
    """A dimension of 16 under axes (4, 4), all of whose devices talk, has the links that it has under (16,)."""
    device, link = Device("d", {"float32": 1e12}, 1e11, 2**30), Link(ALPHA, BETA, "ring")
    ring = Cluster("ring", device, 1, 16, link, link)
    whole = linear_coefficients(kind, (0,), ring.logical_mesh((16,)))
    assert linear_coefficients(kind, (0, 1), ring.logical_mesh((4, 4))) == whole


def test_two_level_all_reduce_is_the_planners_price() -> None:
    """Where the link between hosts is slow, and never dearer than that: the form that the simulation confirms."""
    rings = ALGORITHMS["reduce-scatter"]["ring"], ALGORITHMS["all-gather"]["ring"]
    for slow, equal in ((1e-8, True), (2e-10, False)):
        mesh = Cluster.custom((4, 8), 1e-6, (slow, 1e-10), 1e12, 1e11, 2**30).logical_mesh((32,))
        form = two_level_time(rings, ALGORITHMS["all-reduce"]["ring"], 4, 8, 1e9, (1e-6, 1e-10), (1e-6, slow))
        price = collective_time("all-reduce", 1e9, (0,), mesh)
        assert price <= form
        assert (price == pytest.approx(form, rel=0.001)) == equal


def test_joint_all_to_all_by_hand() -> None:
    """Two hosts of two, all pairwise: one exchange inside, two across, a quarter of the bytes each."""
    cluster = Cluster.custom((2, 2), 0.0, (1e-9, 1e-10), 1e12, 1e11, 2**30)
    time = collective_time("all-to-all", 4e6, (0, 1), cluster.logical_mesh((2, 2)))
    assert time == pytest.approx(2 * 1e6 * 1e-9 + 1e6 * 1e-10)


def test_groups_of_one_are_free() -> None:
    assert linear_coefficients("all-reduce", (0,), mesh_of(1, 8)) == ((0.0, 0.0),)
    assert linear_coefficients("all-reduce", (), mesh_of(8)) == ((0.0, 0.0),)
    joint, single = (linear_coefficients("all-gather", axes, mesh_of(1, 8)) for axes in ((0, 1), (1,)))
    assert joint == single


def test_unknown_kind_names_the_known() -> None:
    with pytest.raises(ArgumentError, match=r"'all-shuffle' not found\. Known collectives: all-reduce, "):
        collective_time("all-shuffle", 8, (0,), mesh_of(8))


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=3)
kinds = st.sampled_from(KINDS)
logs = st.floats(-12, -3)


@st.composite
def meshes(draw: st.DrawFn) -> LogicalMesh:
    shape = tuple(draw(sizes))
    links = tuple(Link(10 ** draw(logs), 10 ** draw(logs), draw(st.sampled_from(NETWORKS))) for _ in shape)
    return LogicalMesh(DEFAULT_AXIS_NAMES[: len(shape)], shape, links, Device("d", {"float32": 1e12}, 1e11, 2**30))


@given(meshes(), kinds)
def test_arrays_agree_with_numbers(mesh: LogicalMesh, kind: str) -> None:
    axes = tuple(range(len(mesh.sizes)))
    nbytes = np.array([[0, 1, 4096], [10**6, 10**9, 3]])
    times = collective_time(kind, nbytes, axes, mesh)
    assert times.shape == nbytes.shape
    expected = [[collective_time(kind, float(b), axes, mesh) for b in row] for row in nbytes]
    assert times.tolist() == expected


@given(meshes(), kinds, st.floats(0, 1e10), st.floats(1, 10))
def test_more_bytes_never_take_less_and_halves_never_more(
    mesh: LogicalMesh, kind: str, nbytes: float, factor: float
) -> None:
    axes = tuple(range(len(mesh.sizes)))
    fewer, more = (collective_time(kind, b, axes, mesh) for b in (nbytes, nbytes * factor))
    assert fewer <= more * (1 + 1e-12)
    assert more <= fewer * factor * (1 + 1e-12)


@given(meshes(), kinds)
def test_order_of_axes_does_not_matter(mesh: LogicalMesh, kind: str) -> None:
    axes = tuple(range(len(mesh.sizes)))
    assert linear_coefficients(kind, axes, mesh) == linear_coefficients(kind, axes[::-1], mesh)


@given(meshes(), st.floats(1, 1e10))
def test_all_reduce_is_at_most_scatter_and_gather(mesh: LogicalMesh, nbytes: float) -> None:
    axes = tuple(range(len(mesh.sizes)))
    parts = [collective_time(kind, nbytes, axes, mesh) for kind in ("reduce-scatter", "all-gather")]
    assert collective_time("all-reduce", nbytes, axes, mesh) <= sum(parts) * (1 + 1e-9)


lines = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=8)


@given(lines, st.floats(0, 100))
def test_envelope_keeps_the_minimum(pairs: list[tuple[float, float]], b: float) -> None:
    hull = envelope(pairs)
    assert set(hull) <= set(pairs)
    assert min(a + s * b for a, s in hull) == pytest.approx(min(a + s * b for a, s in pairs), rel=1e-9, abs=1e-12)


def test_envelope_drops_what_never_wins() -> None:
    assert envelope([(0, 4), (2, 3), (3, 1), (1, 5), (9, 1)]) == ((0, 4), (3, 1))
    assert envelope([(0, 4), (1, 2), (4, 1)]) == ((0, 4), (1, 2), (4, 1))


def test_link_times_are_seconds_per_device() -> None:
    """A ring all-gather of 450 MB over NVLink at 450 GB/s takes about 7/8 ms."""
    mesh = Cluster.preset("dgx-h100").logical_mesh((8,))
    assert collective_time("all-gather", 450e6, (0,), mesh) == pytest.approx(7 / 8 * 1e-3, rel=0.02)
