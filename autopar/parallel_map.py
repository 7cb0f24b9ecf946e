"""Work on several processors: tasks are dealt to forked processes, results come back in order.

    worker w of n     tasks w, w + n, ...     results are pickled through a pipe                        -> results
    in step           half way each task tells all others one value, so that none goes on in vain      -> in_step

A forked process has everything that the tasks refer to, programs and closures included, which no other way of starting
one could send. It must not call into a backend of JAX, whose threads it lacks: where there is one already, the tasks
run here, one after the other. So they do on one processor. Otherwise none runs here, not even a single one, for a task
may start a backend (lowering a program does), and the tasks that come next would have to run here.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, TypeAlias, TypeVar, cast

from autopar import jax_compat

T = TypeVar("T")
V = TypeVar("V")

#: Processes at a time.
WORKERS = 2


def apart(tasks: int) -> bool:
    """Whether so many tasks run in processes of their own, from which their results are sent."""
    return _workers(tasks) > 1


def results(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """What the tasks return, in order; the first exception of any is raised here."""
    return in_step([partial(_silent, task) for task in tasks])


def _silent(task: Callable[[], T]) -> Generator[None, Sequence[None], T]:
    yield
    return task()


def in_step(tasks: Sequence[Callable[[], Generator[V, Sequence[V], T]]]) -> list[T]:
    """The same of tasks that stop once, to yield a value, and are sent the values of all, in order."""
    workers = _workers(len(tasks))
    if not workers:
        return here(tasks)
    children = [_start(tasks[w::workers]) for w in range(workers)]
    try:
        values = _dealt([child.receive() for child in children], len(tasks))
        for child in children:
            child.send(values)
        return _dealt([child.receive() for child in children], len(tasks))
    finally:
        for child in children:  # those started later hold copies of the pipes to earlier ones: first all, then wait
            child.writing.close()
        for child in children:
            child.wait()


def here(tasks: Sequence[Callable[[], Generator[V, Sequence[V], T]]]) -> list[T]:
    """The same in this process, which keeps what the tasks learn."""
    begun = [task() for task in tasks]
    values = [next(one) for one in begun]
    return [_end(one, values) for one in begun]


def _end(one: Generator[V, Sequence[V], T], values: Sequence[V]) -> T:
    try:
        one.send(values)
    except StopIteration as stop:
        return cast(T, stop.value)
    raise AssertionError("a task stops once")


def _dealt(shares: Sequence[list[_Outcome]], tasks: int) -> list[Any]:
    """The outcomes of all tasks, in order; the first exception is raised."""
    outcomes = [shares[i % len(shares)][i // len(shares)] for i in range(tasks)]
    for error in (value for failed, value in outcomes if failed):
        raise error
    return [value for _, value in outcomes]


def _workers(tasks: int) -> int:
    """Processes for so many tasks; 0: they run here."""
    if jax_compat.backends_are_initialized() or not hasattr(os, "sched_getaffinity"):
        return 0
    processors = min(WORKERS, len(os.sched_getaffinity(0)))
    return min(processors, tasks) if processors > 1 else 0


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
            raise ChildProcessError("a planning process ended before it was done") from error

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
    if process:
        os.close(to_parent)
        os.close(from_parent)
        return _Child(process, os.fdopen(from_child, "rb"), os.fdopen(to_child, "wb"))
    status = 1
    try:
        os.close(from_child)
        os.close(to_child)
        with os.fdopen(from_parent, "rb") as told, os.fdopen(to_parent, "wb") as tells:
            _run(tasks, told, tells)
        status = 0
    finally:
        os._exit(status)  # nothing of the parent's is to be cleaned up here


def _run(tasks: Sequence[Callable[[], Generator[Any, Sequence[Any], Any]]], told: BinaryIO, tells: BinaryIO) -> None:
    """In the child: all tasks up to where they stop, then to their ends."""
    begun = [task() for task in tasks]
    pickle.dump([_outcome(partial(next, one)) for one in begun], tells)
    tells.flush()
    values = pickle.load(told)
    pickle.dump([_outcome(partial(_end, one, values)) for one in begun], tells)
