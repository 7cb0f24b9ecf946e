"""Pictures by matplotlib (extra `report`): of a plan, of measurements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@contextmanager
def figure(path: Path, inches: tuple[float, float]) -> Iterator[Figure]:
    """A figure to draw on; written to `path` in the end.

    Raises:
        ArgumentError: matplotlib is not installed, or it does not write files with this ending.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError('a picture needs matplotlib: pip install "autopar[report]"') from error
    drawn = Figure(figsize=inches, layout="constrained")
    yield drawn
    try:
        drawn.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"the picture {str(path)!r} cannot be written: {error}") from error


@contextmanager
def picture(path: Path, title: str, **axes: Any) -> Iterator[Axes]:
    """One pair of axes with a legend; `axes`: labels and scales as matplotlib names them. Errors as for `figure`."""
    with figure(path, (8, 5)) as whole:
        drawn = whole.add_subplot(title=title, **axes)
        yield drawn
        drawn.legend(fontsize="small")
