"""Bytes alive at once in program order, counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.cost_models.memory.lower_bound import written_bytes
from autopar.ir.trace import trace

ONE = jax.ShapeDtypeStruct((256,), jnp.float32)  # 1 KiB


@pytest.mark.parametrize(
    ("fn", "kib"),
    [
        (lambda x: x, 1),
        (jnp.sin, 2),
        (lambda x: jnp.sin(jnp.sin(jnp.sin(x))), 3),  # the argument, what is read and what is written
        (lambda x: jnp.sin(x) * jnp.cos(x), 4),
        (lambda x: (jnp.sin(x), jnp.cos(jnp.cos(jnp.cos(x)))), 4),  # a result stays
        (jax.grad(lambda x: jnp.sin(jnp.sin(x)).sum()), 5),  # the argument, both cosines, a cotangent and the next
    ],
)
def test_what_is_alive_at_once(fn: Callable[..., Any], kib: int) -> None:
    assert written_bytes(trace(fn, ONE).graph) // 1024 == kib
