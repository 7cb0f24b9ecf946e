"""Warns of a step on CPU that does not end.

Virtual CPU devices share the threads of one process: a program deadlocks if its devices wait for each other in more
places than there are threads. That shows in the first run of a program. A thread watches this run, and ends as soon as
the results are ready (-> warn_if_slow). Later runs are not watched.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.errors import ArgumentError, AutoparWarning

#: Environment variable: seconds without an answer after which a first run on CPU is reported; 0 for never.
VARIABLE = "AUTOPAR_PATIENCE"
PATIENCE = 60.0  # s; long for a step on virtual devices, and before XLA aborts a collective that a device does not join

NAME = "autopar watch"  # of its thread

LONGEST_PAUSE = 1.0  # s between two checks of the results


def patience() -> float:
    """Seconds that a first run may take before a warning; 0: no warning.

    Raises:
        ArgumentError: the variable is no number of seconds.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text or PATIENCE)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < threading.TIMEOUT_MAX:
        raise ArgumentError(f"{VARIABLE}={text!r} must be a number of seconds, 0 for no warning")
    return seconds


def warn_if_slow(run: Callable[[], Sequence[Any]], what: str, seconds: float) -> Sequence[Any]:
    """Call `run`, and warn if it, or the arrays that it returns, are not ready after `seconds`.

    Args:
        run: runs the step.
        what: name of the step in the warning.
        seconds: time until the warning.
    """
    returned: list[Sequence[Any]] = []
    ended = threading.Event()

    def look() -> None:
        _watch(returned, ended, what, seconds)
        atexit.unregister(stop)

    def stop() -> None:  # an interpreter that exits ends daemon threads: in the runtime's C++ that aborts the process
        ended.set()
        thread.join()

    thread = threading.Thread(target=look, daemon=True, name=NAME)
    atexit.register(stop)
    thread.start()
    try:
        results = run()
    except BaseException:
        ended.set()
        raise
    returned.append(_smallest(results))
    return results


def _smallest(results: Sequence[Any]) -> Sequence[jax.Array]:
    """The smallest result, to keep alive as little memory as possible: all results of a program are ready at once.

    Arrays of random keys lack `is_ready` in some releases of JAX.
    """
    arrays = [x for x in results if isinstance(x, jax.Array) and hasattr(x, "is_ready")]
    return sorted(arrays, key=lambda x: x.nbytes)[:1]


def _watch(returned: Sequence[Sequence[jax.Array]], ended: threading.Event, what: str, seconds: float) -> None:
    deadline, pause = time.monotonic() + seconds, 0.05
    while (remaining := deadline - time.monotonic()) > 0:
        if ended.wait(min(pause, remaining)) or (returned and all(map(_answered, returned[0]))):
            return
        pause = min(2 * pause, LONGEST_PAUSE)
    warnings.warn(
        f"{what} has not answered for {seconds:g} s on its first run. It is slow, or its virtual CPU devices wait for "
        "each other and it never ends. Try fewer devices, another mesh, or OPENBLAS_NUM_THREADS=1 if it calls LAPACK. "
        f"{VARIABLE} sets the seconds, 0 for no such warning.",
        AutoparWarning,
        stacklevel=2,
    )


def _answered(array: Any) -> bool:
    return array.is_deleted() or array.is_ready()
