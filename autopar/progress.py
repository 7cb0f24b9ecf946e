"""Warnings, and progress on stderr: what is being planned, with the best plan and bound so far, what else takes long.

progress=True     every line, at once
progress=None     in a terminal, once it has taken `PATIENCE` seconds; otherwise nothing
progress=False    nothing
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from autopar import jax_compat
from autopar.errors import AutoparWarning

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


def warn(message: str) -> None:
    """An AutoparWarning that points to the user's line."""
    warnings.warn(message, AutoparWarning, stacklevel=_user_stacklevel())


def _user_stacklevel() -> int:
    """The `stacklevel` at which a warning of the caller points to the user's line."""
    files = [frame.f_code.co_filename for frame in jax_compat.frames()]
    # `warnings.warn` counts from `warn`, one frame above this one, as 1
    return next((level for level, file in enumerate(files) if jax_compat.is_own(file)), len(files) - 1)
