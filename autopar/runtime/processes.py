"""What several processes of one program have to agree on before a step runs.

Every process calls the step with the same arguments. An argument is a global array, of which each process has the
parts on its devices, or a value that every process has whole. One process cannot tell which: a global array that is on
devices of one process alone looks there like an array of its own. It is global if any process lacks a part of it.
Values that every process has whole are compared by a checksum.

When a process dies, collectives of the others fail, each with an error of the transport that does not say whose fault
it is. The others then call the roll, and name who does not answer.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from autopar import jax_compat
from autopar.errors import ArgumentError, ProcessError
from autopar.runtime.transport import Transport, everywhere, is_key, place

#: Words of errors of collectives and of the coordination service when a process is gone.
LOST = ("gloo", "nccl", "connection reset", "connection closed", "coordinationservice", "unavailable", "heartbeat")
ROLL_CALL = 5.0  # s in which every process that is still there answers


@contextmanager
def lost_processes_named() -> Iterator[None]:
    """Inside, an error because another process is gone becomes a ProcessError that names the process."""
    try:
        yield
    except Exception as error:
        text = f"{error} {error.__cause__ or ''}"
        if jax.process_count() == 1 or not any(word in text.lower() for word in LOST):
            raise
        silent = _silent_processes()
        jax_compat.end_without_the_others(lambda: _last_words(silent))
        who = (
            f"process {', '.join(map(str, silent))} of {jax.process_count()} does not answer" if silent else text[:200]
        )
        raise ProcessError(
            f"the step cannot go on: {who}. End all processes, and go on from a saved state; the first error of the "
            "process that ended is in its own output"
        ) from error


def _silent_processes() -> list[int]:
    """The processes that do not answer a roll call."""
    try:
        return _without("alive", range(jax.process_count()), ROLL_CALL)
    except jax.errors.JaxRuntimeError:  # the store is that of process 0
        return [0]


def _last_words(silent: Sequence[int]) -> None:
    """Say that this process ends. Process 0, with which the store ends, waits until all others there say so."""
    if 0 in silent:
        return
    later = range(1, jax.process_count() if jax.process_index() == 0 else 1)
    _without("ending", [i for i in later if i not in silent], 2 * ROLL_CALL)


def _without(word: str, processes: Sequence[int], seconds: float) -> list[int]:
    """The processes that have not said a word after so many seconds; this one says it."""
    deadline, store = time.monotonic() + seconds, jax_compat.process_store()
    store.put(f"autopar/{word}/{jax.process_index()}", b"here")
    return [i for i in processes if store.get(f"autopar/{word}/{i}", max(0.1, deadline - time.monotonic())) is None]


def agree(leaves: Sequence[Any], paths: Sequence[str]) -> tuple[bool, ...]:
    """Per argument, whether it is a global array; one or two small collectives of all processes.

    Args:
        leaves: the arguments of this process.
        paths: their names in errors.

    Raises:
        ArgumentError: an argument that every process has whole differs between processes.
    """
    is_global = global_arrays(leaves)
    own = [i for i, part in enumerate(is_global) if not part]
    if not own:
        return is_global
    every = _from_all([checksum(leaves[i]) for i in own])
    differs = np.argwhere(every != every[0])  # rows of (process, argument)
    if len(differs):
        process, i = map(int, differs[0])
        raise ArgumentError(
            f"argument '{paths[own[i]]}' of process {process} differs from that of process 0. Every process passes the "
            "same whole value, or its part of a global array: jax.make_array_from_process_local_data(sharding, part)"
        )
    return is_global


def global_arrays(leaves: Sequence[Any]) -> tuple[bool, ...]:
    """Per leaf, whether a process lacks a part of it; all processes call this with the same leaves."""
    is_part = [isinstance(x, jax.Array) and not x.is_fully_addressable for x in leaves]
    return tuple(map(bool, np.any(_from_all(is_part), axis=0, keepdims=True)[0]))


def _from_all(numbers: Sequence[int]) -> np.ndarray:
    """The numbers of all processes, a row for each."""
    return np.asarray(multihost_utils.process_allgather(np.array(numbers, np.uint32)))


def whole(arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    """Every array on the host of every process; all processes call this with the same arrays."""
    if jax.process_count() == 1:
        return [np.asarray(x) for x in arrays]
    transport, is_global = Transport(), global_arrays(arrays)

    def on_host(array: jax.Array, is_global: bool) -> np.ndarray:
        if not is_global:
            return np.asarray(array)
        return np.asarray(transport.move([array], [everywhere()])[0].addressable_shards[0].data)

    return [on_host(x, part) for x, part in zip(arrays, is_global, strict=True)]


def checksum(value: Any) -> int:
    """CRC-32 of a value that this process has whole."""
    array = np.asarray(jax.random.key_data(value) if is_key(value) else value)
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data) if array.size else 0


def host_value(value: Any) -> Any:
    """A value that every process has whole, so that each can place it on its devices; random keys are placed on all."""
    return place(value, everywhere()) if is_key(value) else np.asarray(value)
