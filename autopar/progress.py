"""Progress on stderr: what is being planned, with the best plan and bound so far, and what else takes long.

progress=True     every line, at once
progress=None     in a terminal, once it has taken `PATIENCE` seconds; otherwise nothing
progress=False    nothing
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds before the first line in a terminal


class Progress:
    """Progress lines of one call; the latest line is printed after `PATIENCE` seconds, and all later ones at once."""

    def __init__(self, name: str, wanted: bool | None) -> None:
        self._name = name
        self._shown = wanted is True
        self._last = ""
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        if wanted is None and sys.stderr.isatty():
            self._timer = threading.Timer(PATIENCE, self._begin)
            self._timer.daemon = True
            self._timer.start()

    def __call__(self, text: str) -> None:
        """Report the current activity or a result."""
        with self._lock:
            self._last = text
            if self._shown:
                self._print()

    def _begin(self) -> None:
        with self._lock:
            self._shown = True
            if self._last:
                self._print()

    def _print(self) -> None:
        print(f"autopar: {self._name}: {self._last}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Print nothing from now on."""
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._shown = False


@contextmanager
def reporting(name: str, wanted: bool | None) -> Iterator[Progress]:
    """Reports progress on a function, or of a command, until the context ends; `wanted`: the option `progress`."""
    progress = Progress(name, wanted)
    try:
        yield progress
    finally:
        progress.end()
