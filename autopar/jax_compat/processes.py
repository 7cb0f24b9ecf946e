"""What the processes of `jax.distributed` share."""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import distributed  # tried on 0.10.2, 0.12.0: the store that processes share

#: Seconds for which one question to the store listens.
LISTENS = 60.0


@dataclass(frozen=True)
class ProcessStore:
    """Keys and values that the processes of `jax.distributed` share. Tried on 0.10.2 and 0.12.0."""

    client: Any  # None where there is one process

    def put(self, key: str, value: bytes) -> None:
        """Store a value, in place of an earlier one."""
        self.client.key_value_set_bytes(key, value, allow_overwrite=True)

    def get(self, key: str, seconds: float) -> bytes | None:
        """The value of a key; None if there is none after so many seconds."""
        try:
            return bytes(self.client.blocking_key_value_get_bytes(key, int(1000 * seconds)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def count(self, key: str) -> int:
        """How often this has been called with a key."""
        return int(self.client.key_value_increment(key, 1))

    def conversation(self, about: str, waits: Callable[[str], None] = lambda text: None) -> Conversation:
        """The next conversation about something; all processes begin it in the same order.

        Args:
            about: the name of its kind.
            waits: is told once, in words, for which process this one has waited `LISTENS` seconds.
        """
        number = 0 if self.client is None else self.count(f"autopar/{about}/{jax.process_index()}")
        return Conversation(self, f"autopar/{about}/{number}", waits)


@dataclass(frozen=True)
class Conversation:
    """What processes say to each other, each thing once."""

    store: ProcessStore
    prefix: str
    waits: Callable[[str], None]

    def from_first(self, what: str, make: Callable[[], bytes]) -> bytes:
        """What process 0 says, in every process."""
        if jax.process_index() == 0:
            said = make()
            if jax.process_count() > 1:
                self.store.put(f"{self.prefix}/{what}/0", said)
            return said
        return self._heard(what, 0)

    def from_all(self, what: str, make: Callable[[], bytes]) -> list[bytes]:
        """What every process says: in process 0 all of it, elsewhere what the process itself says."""
        said = make()
        if jax.process_index() > 0:
            self.store.put(f"{self.prefix}/{what}/{jax.process_index()}", said)
            return [said]
        return [said, *(self._heard(what, i) for i in range(1, jax.process_count()))]

    def _heard(self, what: str, process: int) -> bytes:
        key = f"{self.prefix}/{what}/{process}"
        if (said := self.store.get(key, LISTENS)) is None:
            self.waits(f"process {jax.process_index()} has waited {LISTENS:.0f} s for the {what} of process {process}")
        while said is None:
            said = self.store.get(key, LISTENS)
        return said


def is_distributed() -> bool:
    """Whether `jax.distributed.initialize` has connected this process to others. Tried on 0.10.2 and 0.12.0."""
    return distributed.global_state.client is not None


def process_store() -> ProcessStore:
    """The store of the processes that `jax.distributed.initialize` has connected."""
    return ProcessStore(distributed.global_state.client)


def end_without_the_others(before: Callable[[], None]) -> None:
    """Let this process end without the barrier at which all processes meet at exit, since one of them is gone.

    The client of the coordination service is left to the end of the process: its destructor would wait at the barrier
    as well, until heartbeats fail. Tried on 0.10.2.

    Args:
        before: called first, at exit.
    """
    atexit.register(_keep_client)
    atexit.register(before)  # what is registered last is called first


def _keep_client() -> None:
    """Leave the client and the service of the coordination to the end of the process."""
    state = distributed.global_state
    for part in (state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
    state.client = state.service = None
