"""Parallel map over forked processes: results come back in the order of the tasks.

    worker w of n     tasks w, w + n, ...     results are pickled through a pipe                        -> results
    barrier           each task stops once, yields a value, and receives the values of all tasks        -> with_barrier

A forked process has everything that the tasks refer to, programs and closures included, which cannot be pickled. It
must not call into a backend of JAX, whose threads it lacks. So the tasks run in this process, one after the other, if a
backend is initialized already, or if there is one processor. They do as well once `jax.distributed` is initialized: a
backend of a forked process would wait for those of all other processes. Otherwise no task runs in this process, not
even a single one: a task may initialize a backend (lowering a program does), and later tasks would then have to run
here.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, NoReturn, TypeAlias, TypeVar, cast

from autopar import jax_compat
from autopar.errors import ArgumentError

T = TypeVar("T")
V = TypeVar("V")

#: Environment variable with the number of processes.
VARIABLE = "AUTOPAR_WORKERS"
#: Most processes without it; few searches have more tasks.
MOST_WORKERS = 8
#: Tasks whose results are compared before the next ones begin. Results depend on it, not on the number of processes.
ABREAST = 2


def workers() -> int:
    """Number of processes for many tasks: that of the environment variable, or the processors at hand, up to 8.

    Raises:
        ArgumentError: the variable is no positive number.
    """
    if text := os.environ.get(VARIABLE, ""):
        if not text.isdecimal() or not int(text):
            raise ArgumentError(f"{VARIABLE}={text!r} must be a number of processes, 1 or more")
        return int(text)
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)


def results(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """The results of the tasks, in order; the first exception of a task is raised here."""
    return with_barrier([partial(_silent, task) for task in tasks])


def _silent(task: Callable[[], T]) -> Generator[None, Sequence[None], T]:
    yield
    return task()


def with_barrier(tasks: Sequence[Callable[[], Generator[V, Sequence[V], T]]]) -> list[T]:
    """The results of tasks that stop once, to yield a value, and receive the values of all tasks, in order."""
    workers = _workers(len(tasks))
    if not workers:
        return in_this_process(tasks)
    children = [_start(tasks[w::workers]) for w in range(workers)]
    try:
        values = _in_order([child.receive() for child in children], len(tasks))
        for child in children:
            child.send(values)
        return _in_order([child.receive() for child in children], len(tasks))
    finally:
        for child in children:  # those started later hold copies of the pipes to earlier ones: first all, then wait
            child.writing.close()
        for child in children:
            child.wait()


def in_this_process(tasks: Sequence[Callable[[], Generator[V, Sequence[V], T]]]) -> list[T]:
    """The same in this process, where side effects of the tasks remain."""
    started = [task() for task in tasks]
    values = [next(task) for task in started]
    return [_end(task, values) for task in started]


def _end(task: Generator[V, Sequence[V], T], values: Sequence[V]) -> T:
    try:
        task.send(values)
    except StopIteration as stop:
        return cast(T, stop.value)
    raise AssertionError(f"{task} stops more than once")


def _in_order(shares: Sequence[list[_Outcome]], tasks: int) -> list[Any]:
    """The outcomes of all tasks, in order; the first exception is raised."""
    outcomes = [shares[i % len(shares)][i // len(shares)] for i in range(tasks)]
    for error in (value for failed, value in outcomes if failed):
        raise error
    return [value for _, value in outcomes]


def _workers(tasks: int) -> int:
    """Number of processes for this many tasks; 0: they run in this process."""
    if jax_compat.backends_are_initialized() or jax_compat.is_distributed() or not hasattr(os, "fork"):
        return 0
    processes = workers()
    return min(processes, tasks) if processes > 1 else 0


_Outcome: TypeAlias = tuple[bool, Any]
"""(it failed, its result or exception)."""


def _outcome(work: Callable[[], Any]) -> _Outcome:
    try:
        return False, work()
    except Exception as error:
        return True, error


@dataclass(frozen=True)
class _Child:
    """A forked process, and the ends of the pipes from it and to it."""

    process: int
    reading: BinaryIO
    writing: BinaryIO

    def receive(self) -> list[_Outcome]:
        try:
            return cast(list[_Outcome], pickle.load(self.reading))
        except EOFError as error:
            raise ChildProcessError(f"planning process {self.process} ended before it was done") from error

    def send(self, values: Sequence[Any]) -> None:
        pickle.dump(values, self.writing)
        self.writing.flush()

    def wait(self) -> None:
        """Wait for its end; one that waits for values ends once nobody can write to it."""
        self.reading.close()
        os.waitpid(self.process, 0)


def _start(tasks: Sequence[Callable[[], Generator[Any, Sequence[Any], Any]]]) -> _Child:
    (from_child, to_parent), (from_parent, to_child) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: there are none without a backend
        process = os.fork()
    if not process:
        os.close(from_child)
        os.close(to_child)
        _run_and_exit(tasks, from_parent, to_parent)
    os.close(to_parent)
    os.close(from_parent)
    return _Child(process, os.fdopen(from_child, "rb"), os.fdopen(to_child, "wb"))


def _run_and_exit(
    tasks: Sequence[Callable[[], Generator[Any, Sequence[Any], Any]]], source: int, target: int
) -> NoReturn:
    """Run the tasks of a forked process, which ends without the cleanup of its parent's state."""
    status = 1
    try:
        with os.fdopen(source, "rb") as received, os.fdopen(target, "wb") as sent:
            _run(tasks, received, sent)
        status = 0
    finally:
        os._exit(status)


def _run(tasks: Sequence[Callable[[], Generator[Any, Sequence[Any], Any]]], received: BinaryIO, sent: BinaryIO) -> None:
    """In the child: runs all tasks up to the barrier, then to their ends."""
    started = [task() for task in tasks]
    pickle.dump([_outcome(partial(next, task)) for task in started], sent)
    sent.flush()
    values = pickle.load(received)
    pickle.dump([_outcome(partial(_end, task, values)) for task in started], sent)
