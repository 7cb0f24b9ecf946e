"""What is being planned and what is known so far, on stderr.

progress=True     every line, at once
progress=None     in a terminal, and once planning has taken `PATIENCE` seconds; else nothing
progress=False    nothing
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds without a word in a terminal


class Progress:
    """Lines about one call; the last one is shown when the user's patience ends, and all after it."""

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
        """Say what is done now, or what was found."""
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
        """No word from now on."""
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._shown = False


@contextmanager
def told(name: str, wanted: bool | None) -> Iterator[Progress]:
    """The lines about planning a function, until it is planned."""
    progress = Progress(name, wanted)
    try:
        yield progress
    finally:
        progress.end()
