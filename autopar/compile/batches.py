"""Batches on their way into a compiled step: `prefetch` puts the next ones where the step takes them.

    next        take batches from the iterator until `size` wait behind the one that is returned
                put those that wait onto their devices, if the step is compiled by now
    the step    runs meanwhile: placing a batch and running a step are both asynchronous

All happens in the thread that asks for a batch, so that what JAX says between processes keeps its order, and an error
of the iterator is raised where its batch would have been returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.errors import ArgumentError
from autopar.runtime.executables import Executable
from autopar.runtime.single_program import place_argument

#: Where the leaves of a batch go; None for one that stays as it is.
Shardings = Sequence[NamedSharding | None]


class TakesBatches(Protocol):
    """A parallelized function."""

    def batch_shardings(self, batch: Any) -> Shardings | None:
        """Where the step takes the leaves of a batch; None if none is compiled for it."""
        ...


def shardings(batch: Any, executables: Iterable[Executable]) -> Shardings | None:
    """Where the last executable that has an argument of this structure takes its leaves; None if none has."""
    for executable in reversed(list(executables)):
        try:
            positions = executable.plan.positions(batch)
        except ArgumentError:
            continue
        return [executable.taken_at[i] for i in positions]
    return None


def prefetch(batches: Iterable[Any], step: TakesBatches, size: int = 2) -> Iterator[Any]:
    """Put the next batches where a step takes them, while it runs on those before.

    Arrays of NumPy are copied, so that a loader may use its memory again. Until the step is compiled, and for batches
    of another structure than it was compiled for, batches are returned as they are. With several processes, all of them
    iterate together, and the batch of a pipeline stays where it is.

    Args:
        batches: any iterable of pytrees, such as a loader.
        step: the parallelized function that takes them as one of its arguments, or as several successive ones.
        size: how many batches wait on the devices behind the one that is returned.

    Returns:
        An iterator over the same batches. An error of `batches` is raised in place of the batch that it concerns.

    Raises:
        ArgumentError: `batches` is not iterable, `step` is not parallelized, or `size` is below 1.
    """
    step = getattr(step, "__func__", step)  # of a method
    if not hasattr(step, "batch_shardings"):
        raise ArgumentError(f"step={step!r:.60} must be what autopar.parallelize returns")
    if size < 1:
        raise ArgumentError(f"size={size} must be at least 1")
    if not isinstance(batches, Iterable):
        raise ArgumentError(f"batches={batches!r:.60} must be iterable, over pytrees of arrays")
    return _prefetched(iter(batches), step, size)


def _prefetched(batches: Iterator[Any], step: TakesBatches, size: int) -> Iterator[Any]:
    waiting = deque([_Waiting(batches)])
    while True:
        while len(waiting) <= size and not waiting[-1].is_last:
            waiting.append(_Waiting(batches))
        for item in waiting:
            item.place(step)
        first = waiting.popleft()
        if first.error is not None:
            if isinstance(first.error, StopIteration):
                return
            raise first.error
        yield first.batch


class _Waiting:
    """A batch that waits, or the error of the iterator in its place, which is the last that waits."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batch: Any = None
        self.error: Exception | None = None
        self._is_placed = False
        try:
            self.batch = jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, next(batches))
        except Exception as error:
            self.error = error

    @property
    def is_last(self) -> bool:
        return self.error is not None

    def place(self, step: TakesBatches) -> None:
        """Put the leaves where the step takes them, if that is known and has not happened."""
        if self.is_last or self._is_placed or (where := step.batch_shardings(self.batch)) is None:
            return
        leaves, structure = jax.tree.flatten(self.batch)
        placed = [x if s is None else place_argument(x, s, False, "batch") for x, s in zip(leaves, where, strict=True)]
        self.batch, self._is_placed = jax.tree.unflatten(structure, placed), True
