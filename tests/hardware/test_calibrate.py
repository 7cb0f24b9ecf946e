"""Calibration finds the figures that the measurements were made from."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from autopar.cli import calibration_tables
from autopar.cost_models.collectives import collective_time
from autopar.hardware import measure
from autopar.hardware.calibrate import Measured, Message, Product, Stream, fit
from autopar.hardware.cluster import Cluster, Level, LogicalMesh
from autopar.hardware.description import Device
from autopar.hardware.links import Link

RATE, HALF, OVERHEAD, BANDWIDTH = 2e10, (5.0, 20.0, 35.0), 3e-6, 8e9


def _base(network: str) -> Cluster:
    device = Device("thing", {"float32": 1e9, "bfloat16": 2e9}, 1e9, 2**30, 1e-6, 0.5)
    return Cluster("base", device, 1, 8, Link(1e-6, 1e-10, network), Link(1e-5, 1e-9))


def _measured(link: Link, noise: float, seed: int = 0) -> Measured:
    draw = np.random.default_rng(seed)

    def seen(seconds: float) -> float:
        return seconds * math.exp(noise * draw.standard_normal())

    def product(p: Product) -> float:
        extents = math.prod(n + half for n, half in zip((p.rows, p.columns, p.contracted), HALF, strict=True))
        return seen(OVERHEAD + 2 * extents / RATE)

    def sent(m: Message) -> float:
        mesh = LogicalMesh(("x",), (m.group,), (link,), _base(link.network).device, ((Level(m.group, link),),))
        return seen(collective_time(m.kind, m.nbytes, (0,), mesh))

    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    messages = [Message(kind, nbytes, n) for kind in kinds for nbytes in (2**10, 2**16, 2**22) for n in (2, 8)]
    return Measured(
        {p: product(p) for p in (Product(*extents, "float32") for extents in measure.EXTENTS)},
        {Stream(n): seen(OVERHEAD + n / BANDWIDTH) for n in measure.STREAM_BYTES},
        {m: sent(m) for m in messages},
        0.25,
    )


@pytest.mark.parametrize("network", ["memory", "switch"])
def test_exact_measurements_give_back_the_figures(network: str) -> None:
    link = Link(4e-5, 1e-9, network)
    calibration = fit(_measured(link, 0.0), _base(network))
    device = calibration.cluster.device
    assert device.peak("float32") == pytest.approx(RATE, rel=1e-3)
    assert device.half_rate_extents == pytest.approx(HALF, rel=1e-2)
    assert device.kernel_overhead == pytest.approx(OVERHEAD, rel=2e-2)
    assert device.memory_bandwidth == pytest.approx(BANDWIDTH, rel=1e-3)
    assert (calibration.cluster.intra.alpha, calibration.cluster.intra.beta) == pytest.approx((4e-5, 1e-9), rel=1e-3)
    assert device.overlap == 0.25
    assert calibration.worst_error < 1e-3


def test_noise_moves_the_figures_little_and_shows_as_error() -> None:
    calibration = fit(_measured(Link(4e-5, 1e-9), 0.1), _base("switch"))
    assert calibration.cluster.device.peak("float32") == pytest.approx(RATE, rel=0.3)
    assert calibration.cluster.intra.beta == pytest.approx(1e-9, rel=0.3)
    assert 0.01 < calibration.median_error < 0.2
    assert calibration.median_error <= calibration.worst_error


def test_what_was_not_measured_stays() -> None:
    base = _base("switch")
    fitted_cluster = fit(_measured(Link(4e-5, 1e-9), 0.0), base).cluster
    assert (fitted_cluster.inter, fitted_cluster.hosts, fitted_cluster.devices_per_host) == (base.inter, 1, 8)
    assert fitted_cluster.device.memory_bytes == base.device.memory_bytes
    assert fitted_cluster.device.peak("bfloat16") == pytest.approx(2 * RATE, rel=1e-3)  # as far above float32 as it was


def test_one_device_says_nothing_of_links() -> None:
    base = _base("memory")
    calibration = fit(replace(_measured(Link(4e-5, 1e-9), 0.0), messages={}), base)
    assert (calibration.cluster.intra.alpha, calibration.cluster.intra.beta) == pytest.approx(
        (base.intra.alpha, base.intra.beta)
    )
    assert calibration.cluster.device.peak("float32") == pytest.approx(RATE, rel=1e-3)


def test_measuring_the_devices_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of measurement runs, is positive and is reported; the cluster survives being written and read."""
    monkeypatch.setattr(measure, "EXTENTS", measure.EXTENTS[-6:-1])
    monkeypatch.setattr(measure, "STREAM_BYTES", (2**14, 2**18))
    monkeypatch.setattr(measure, "MESSAGE_BYTES", (2**10, 2**14))
    monkeypatch.setattr(measure, "GROUP_BYTES", (2**12,))
    monkeypatch.setattr(measure, "SHORT", 2)
    monkeypatch.setattr(measure, "LONG", 8)
    monkeypatch.setattr(measure, "REPEATS", 3)
    heard: list[str] = []
    calibration = measure.calibrate(Cluster.local(), heard.append)
    assert len(heard) == len(set(heard)) == measure.steps(Cluster.local())
    assert {f.what for f in calibration.fits} | set(measure.OVERLAP) < set(heard)
    assert all(f.measured > 0 and f.predicted > 0 for f in calibration.fits)
    assert calibration.cluster.num_devices == 8
    assert "error of the fit" in calibration_tables.text(calibration)
