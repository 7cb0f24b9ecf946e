"""Pictures of measurements, by matplotlib (extra `report`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@contextmanager
def picture(path: Path, title: str, **axes: Any) -> Iterator[Axes]:
    """One pair of axes to draw on, with labels and scales as matplotlib names them; written to `path` in the end.

    Raises ArgumentError where matplotlib is not installed or the file's ending is none that it writes.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError('--plot needs matplotlib: pip install "autopar[report]"') from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    drawn = figure.add_subplot(title=title, **axes)
    yield drawn
    drawn.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--plot {str(path)!r} cannot be written: {error}") from error
