"""A calibration as text: every measurement beside what the fitted figures say, then the figures.

text(calibration)   the table and a line per kind of measurement
errors(fits)        kind of measurement -> median relative error
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from autopar.hardware.calibrate import Calibration, Fit
from autopar.ir.keyed import grouped
from autopar.ir.text import size, table

HEADS = ("", "measured", "fitted", "error")


def text(calibration: Calibration) -> str:
    """Measurements, errors and figures."""
    device, link = calibration.cluster.device, calibration.cluster.intra
    rows = [(f.what, _micro(f.measured), _micro(f.predicted), f"{f.error:.0%}") for f in calibration.fits]
    rates = ", ".join(f"{rate:.3g} {dtype}" for dtype, rate in sorted(device.peak_flops.items()))
    rows_, columns, contracted = device.half_rate_extents
    return "\n".join(
        [
            table("measurement", HEADS, rows),
            f"error of the fit: median {calibration.median_error:.0%}, largest {calibration.worst_error:.0%}; "
            + ", ".join(f"{kind} {error:.0%}" for kind, error in errors(calibration.fits).items()),
            f"per device: flop/s {rates}; half rate at {rows_:.0f} rows, {columns:.0f} columns, "
            f"{contracted:.0f} contracted; memory {size(device.memory_bandwidth)}/s; kernel "
            f"{1e6 * device.kernel_overhead:.2g} us",
            f"link: {size(link.bandwidth)}/s, {1e6 * link.alpha:.3g} us",
        ]
    )


def errors(fits: Sequence[Fit]) -> Mapping[str, float]:
    """First word of what was measured -> median relative error."""
    kinds = grouped((f.what.split()[0], f.error) for f in fits)
    return {kind: statistics.median(values) for kind, values in sorted(kinds.items())}


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us"
