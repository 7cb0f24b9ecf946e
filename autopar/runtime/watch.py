"""Says which step does not answer, where it would otherwise hang in silence.

Virtual CPU devices share the threads of one process: a program whose devices wait for each other in more places than
there are threads never ends. That shows when the program runs for the first time, so that run is watched by a thread of
its own, which ends as soon as the results are there (-> watched). Later runs cost nothing.
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

from autopar.errors import AutoparWarning

#: Environment variable: seconds without an answer after which a first run on CPU is reported; 0 for never.
VARIABLE = "AUTOPAR_PATIENCE"
PATIENCE = 60.0  # s; a long time for a step on virtual devices, and before XLA aborts a collective that nobody joins

LONGEST_PAUSE = 1.0  # s between two looks at the results


def patience() -> float:
    """Seconds that a first run may take before it is reported; 0: for ever."""
    try:
        return float(os.environ.get(VARIABLE) or PATIENCE)
    except ValueError:
        return PATIENCE


def watched(run: Callable[[], Sequence[Any]], what: str, seconds: float) -> Sequence[Any]:
    """What `run` returns; a warning that names the step if that, or the arrays it returns, take longer than this."""
    returned: list[Sequence[Any]] = []
    ended = threading.Event()

    def look() -> None:
        _watch(returned, ended, what, seconds)
        atexit.unregister(stop)

    def stop() -> None:  # an interpreter that exits ends daemon threads: in the runtime's C++ that aborts the process
        ended.set()
        thread.join()

    thread = threading.Thread(target=look, daemon=True, name="autopar watch")
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
    """The array that costs least to keep: all results of a program are there at the same time. Arrays of random keys
    cannot say on every JAX whether they are there."""
    arrays = [x for x in results if isinstance(x, jax.Array) and hasattr(x, "is_ready")]
    return sorted(arrays, key=lambda x: x.nbytes)[:1]


def _watch(returned: Sequence[Sequence[jax.Array]], ended: threading.Event, what: str, seconds: float) -> None:
    deadline, pause = time.monotonic() + seconds, 0.05
    while (left := deadline - time.monotonic()) > 0:
        if ended.wait(min(pause, left)) or (returned and all(map(_answered, returned[0]))):
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
