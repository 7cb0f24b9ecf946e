"""Fits a cluster's figures to measurements, by least squares in the logarithm of the time.

Errors are relative: a kernel of a microsecond counts as much as one of a second. With t the measured seconds,

    product of m x k by k x n    t = o + 2 (m + m_half) (n + n_half) (k + k_half) / rate(dtype)         -> _compute
    pass over b bytes            t = o + b / bandwidth                                                  -> _compute
    collective of b bytes        t = S(n) alpha + V(n) beta b, the line of the best algorithm           -> _link

The first is the roofline of `compute` written out, since the efficiency of a product is 1 / ((1 + m_half / m) ...); it
is fitted to products that are bound by arithmetic, together with the second: the overhead o is the same. The last uses
the very lines from which plans are priced (`algorithms`), so that alpha and beta are what those formulas need,
whatever the network is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autopar.hardware.algorithms import one_level
from autopar.hardware.description import Device
from autopar.hardware.links import Level, Link

if TYPE_CHECKING:
    from autopar.hardware.cluster import Cluster

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of rows x contracted by contracted x columns on every device at once."""

    rows: int
    columns: int
    contracted: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} {self.rows} x {self.contracted} by {self.contracted} x {self.columns}"


@dataclass(frozen=True, slots=True)
class Stream:
    """A pass that reads and writes `nbytes` bytes (both counted) on every device at once."""

    nbytes: int

    def __str__(self) -> str:
        return f"pass over {self.nbytes} bytes"


@dataclass(frozen=True, slots=True)
class Message:
    """A collective of groups of so many devices, all groups at once; `nbytes` per device, as in `collectives`."""

    kind: str
    nbytes: int
    group: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.nbytes} bytes by {self.group}"


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured on the devices of one host: the seconds of one of each.

    Attributes:
        overlap: share of a collective that was hidden behind products that do not wait for it, 0 to 1.
    """

    products: Mapping[Product, float]
    streams: Mapping[Stream, float]
    messages: Mapping[Message, float]
    overlap: float = 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """One measurement beside what the fitted figures say of it, in s."""

    what: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative to the measurement."""
        return abs(self.predicted - self.measured) / self.measured


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted cluster and how well it reproduces each measurement."""

    cluster: Cluster
    fits: tuple[Fit, ...]

    @property
    def median_error(self) -> float:
        """Median relative error of all fits."""
        return statistics.median(f.error for f in self.fits)

    @property
    def worst_error(self) -> float:
        """Largest relative error."""
        return max(f.error for f in self.fits)


def fit(measured: Measured, base: Cluster) -> Calibration:
    """The cluster `base` with its rates, bandwidth, overhead and inner link replaced by fitted ones.

    What is not measured stays: the number of devices, their memory, the link between hosts.
    """
    device, computed = _compute(measured.products, measured.streams, base.device)
    device = replace(device, overlap=measured.overlap)
    link, messages = _link(measured.messages, base, device)
    cluster = replace(base, name=f"calibrated {base.name}", device=device, intra=link)
    return Calibration(cluster, (*computed, *messages))


def _solve(model: Callable[[Floats], Floats], seconds: Floats, start: Sequence[float]) -> Floats:
    """Positive parameters that bring log model closest to log seconds; outliers weigh less (soft l1)."""

    def residuals(logs: Floats) -> Floats:
        return np.log(model(np.exp(logs))) - np.log(seconds)

    # Beyond 20% of difference (0.2 in logarithms) a sample counts linearly instead of by its square.
    return np.exp(least_squares(residuals, np.log(np.asarray(start)), loss="soft_l1", f_scale=0.2).x)


def _compute(
    products: Mapping[Product, float], streams: Mapping[Stream, float], base: Device
) -> tuple[Device, list[Fit]]:
    """Products and passes together: what both have in common is the overhead, which neither tells alone."""
    dtypes = sorted({s.dtype for s in products})
    extents = np.array([[s.rows, s.columns, s.contracted] for s in products], np.float64)
    which = np.array([dtypes.index(s.dtype) for s in products])
    nbytes = np.array([s.nbytes for s in streams], np.float64)
    there, passed = np.array(list(products.values())), np.array(list(streams.values()))
    seconds = np.concatenate([there, passed])

    def model(p: Floats) -> Floats:
        """Of overhead, bandwidth, three extents of half the rate and the rates."""
        return p[0] + np.concatenate([2 * (extents + p[2:5]).prod(1) / p[5:][which], nbytes / p[1]])

    fastest = [max(2 * extents[which == d].prod(1) / there[which == d]) for d in range(len(dtypes))]
    # The fit starts from what the samples show: half of the shortest time as overhead, the best bandwidth seen, half
    # rates at an extent of one vector, and the best rate seen of each type.
    parameters = _solve(model, seconds, [max(min(seconds) / 2, 1e-9), max(nbytes / passed), 8.0, 8.0, 8.0, *fastest])
    rates = dict(zip(dtypes, map(float, parameters[5:]), strict=True))
    scale = rates[dtypes[0]] / base.peak(dtypes[0])
    device = replace(
        base,
        peak_flops={d: rates.get(d, rate * scale) for d, rate in base.peak_flops.items()} | rates,
        efficiency=1.0,
        half_rate_extents=(float(parameters[2]), float(parameters[3]), float(parameters[4])),
        kernel_overhead=float(parameters[0]),
        memory_bandwidth=float(parameters[1]),
    )
    return device, _fits((*products, *streams), seconds, model(parameters))


def _link(samples: Mapping[Message, float], base: Cluster, device: Device) -> tuple[Link, list[Fit]]:
    seconds = np.array(list(samples.values()))
    kinds = sorted({(s.kind, s.group) for s in samples})

    def model(p: Floats) -> Floats:
        link = replace(base.intra, alpha=float(p[0]), beta=float(p[1]))
        lines = {(kind, n): one_level(_run(kind, device), Level(n, link)) for kind, n in kinds}
        return np.array([min(a + b * s.nbytes for a, b in lines[s.kind, s.group]) for s in samples])

    # Logarithms of the parameters are fitted, so that none may start from zero.
    parameters = _solve(model, seconds, [max(base.intra.alpha, 1e-9), max(base.intra.beta, 1e-14)])
    link = replace(base.intra, alpha=float(parameters[0]), beta=float(parameters[1]))
    return link, _fits(samples, seconds, model(parameters))


def _run(kind: str, device: Device) -> str:
    """The collective that runs: without a reduce-scatter, an all-reduce followed by a local slice."""
    return "all-reduce" if kind == "reduce-scatter" and not device.reduce_scatter else kind


def _fits(what: Iterable[Product | Stream | Message], seconds: Floats, predicted: Floats) -> list[Fit]:
    return [Fit(str(w), float(m), float(p)) for w, m, p in zip(what, seconds, predicted, strict=True)]
