"""Work on several processors: tasks are dealt to forked processes, results come back in order.

    worker w of n     tasks w, w + n, ...     pickled through a pipe

A forked process has everything that the tasks refer to, programs and closures included, which no other way of starting
one could send. It must not call into a backend of JAX, whose threads it lacks: where there is one already, the tasks
run here, one after the other. So they do on one processor. Otherwise none runs here, for a task may start a backend
(lowering a program does), and the tasks that come next would have to run here.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from autopar import jax_compat

T = TypeVar("T")

#: Processes at a time.
WORKERS = 2


def apart(tasks: int) -> bool:
    """Whether so many tasks run in processes of their own, from which their results are sent."""
    return _workers(tasks) > 1


def results(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """What the tasks return, in order; the first exception of any is raised here."""
    workers = _workers(len(tasks))
    if workers < 2:
        return [task() for task in tasks]
    children = [_start(tasks[w::workers]) for w in range(workers)]
    shares = [_collect(child) for child in children]
    outcomes = [shares[i % workers][i // workers] for i in range(len(tasks))]
    for error in (value for failed, value in outcomes if failed):
        raise error
    return [value for _, value in outcomes]


def _workers(tasks: int) -> int:
    """Processes for so many tasks; 1: they run here."""
    here = jax_compat.backends_are_initialized() or not hasattr(os, "sched_getaffinity")
    return 1 if here else min(WORKERS, tasks, len(os.sched_getaffinity(0)))


_Outcome = tuple[bool, Any]
"""(it failed, its result or exception)."""


def _outcomes(tasks: Sequence[Callable[[], Any]]) -> list[_Outcome]:
    found: list[_Outcome] = []
    for task in tasks:
        try:
            found.append((False, task()))
        except Exception as error:
            found.append((True, error))
    return found


def _start(tasks: Sequence[Callable[[], Any]]) -> tuple[int, int]:
    """(process, reading end of its pipe)."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: there are none without a backend
        process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    status = 1
    try:
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(_outcomes(tasks), pipe)
        status = 0
    finally:
        os._exit(status)  # nothing of the parent's is to be cleaned up here


def _collect(child: tuple[int, int]) -> list[_Outcome]:
    process, reading = child
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(process, 0)
    if not data:
        raise ChildProcessError("a planning process ended before it was done")
    return pickle.loads(data)
