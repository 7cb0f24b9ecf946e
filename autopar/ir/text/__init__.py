"""Plain text for terminals: tables of fixed width, bytes and seconds with their units."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from autopar.errors import ArgumentError

WIDTH = 110  # columns
NO_WRAP = ("shape", "PartitionSpec", "times", "bytes sent")  # columns that are never broken over lines
LEAST_BUDGET = 4096  # bytes; no device has a memory so small

Rows = list[tuple[str, ...]]


def table(title: str, heads: Sequence[str], rows: Rows) -> str:
    """A table without colour, after an empty line; `title` is the head of the column whose head is empty."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for head in heads:
        grid.add_column(head or title, overflow="fold", no_wrap=head in NO_WRAP, ratio=1 if head == "why" else None)
    for row in rows:
        grid.add_row(*row)
    out = io.StringIO()
    console = Console(
        file=out,
        width=WIDTH,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        highlight=False,
        markup=False,
    )
    console.print(grid)
    return "\n".join(["", *(line.rstrip() for line in out.getvalue().rstrip().splitlines())])


def spec_text(spec: object) -> str:
    """A PartitionSpec in short form: P('x', None)."""
    return str(spec).replace("PartitionSpec", "P").replace(",)", ")")


def size(nbytes: float) -> str:
    """Bytes with a unit, three digits."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"


def size_within(nbytes: float, limit: float) -> str:
    """Bytes beside the most that there may be: "73.2 of 77 GB", or "800 MB of 77 GB"; a limit of 0 is not known."""
    if not limit:
        return size(nbytes)
    (number, unit), (most, of_most) = size(nbytes).split(), size(limit).split()
    return f"{number} of {most} {unit}" if unit == of_most else f"{number} {unit} of {most} {of_most}"


def excess(nbytes: float, limit: float) -> str:
    """By how much bytes are over a limit, in words that go behind them; "" if they are not. 0: no limit is known."""
    return f", {size(nbytes - limit)} too much" if 0 < limit < nbytes else ""


def missing_unit(budget: float) -> Iterator[str]:
    """The suggestion to give a memory budget a unit, if it is so few bytes that 12 was written for 12 GiB."""
    if budget < LEAST_BUDGET:
        yield f"a unit, if bytes were not meant: '{budget:g}GiB'"


def seconds(t: float) -> str:
    """Seconds with a unit, three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if t >= scale:
            return f"{t / scale:.3g} {unit}"
    return "0 s" if t == 0 else f"{t:.2g} s"


def write_file(path: str | os.PathLike[str], text: str, failed: str) -> None:
    """Write a file; ArgumentError, which says what failed, if it cannot be written."""
    try:
        Path(path).write_text(text)
    except (OSError, TypeError, ValueError) as error:
        raise ArgumentError(f"{failed} {path!r}: {error}") from error
