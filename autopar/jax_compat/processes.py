"""What the processes of `jax.distributed` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax._src import distributed  # tried on 0.10.2, 0.12.0: the store that processes share


@dataclass(frozen=True)
class ProcessStore:
    """Keys and values that the processes of `jax.distributed` share. Tried on 0.10.2 and 0.12.0."""

    client: Any

    def put(self, key: str, value: bytes) -> None:
        """Store a value."""
        self.client.key_value_set_bytes(key, value)

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


def process_store() -> ProcessStore:
    """The store of the processes that `jax.distributed.initialize` has connected."""
    return ProcessStore(distributed.global_state.client)
