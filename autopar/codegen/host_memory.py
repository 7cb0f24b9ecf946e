"""Arrays in host memory between steps, and their copies at the begin and the end of the program that updates them."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar import jax_compat


def between_steps(sharding: NamedSharding, offloaded: bool) -> NamedSharding:
    """The sharding of an array between steps, memory kind included."""
    return sharding.with_memory_kind(jax_compat.HOST_MEMORY) if offloaded else sharding


def to_device(array: Any, sharding: NamedSharding) -> Any:
    """An offloaded array, by its sharding between steps, copied to device memory; any other unchanged."""
    return _copied(array, sharding, jax_compat.DEVICE_MEMORY)


def to_host(array: Any, sharding: NamedSharding) -> Any:
    """An offloaded array, by its sharding between steps, copied to host memory; any other unchanged."""
    return _copied(array, sharding, jax_compat.HOST_MEMORY)


def _copied(array: Any, sharding: NamedSharding, memory: str) -> Any:
    if sharding.memory_kind != jax_compat.HOST_MEMORY:
        return array
    with jax.named_scope("offload"):
        return jax.device_put(array, sharding.with_memory_kind(memory))
