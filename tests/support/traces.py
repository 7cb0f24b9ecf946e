"""Models of the zoo, traced once in a process: nothing that reads a `Traced` changes it."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

from autopar import jax_compat, zoo
from autopar.ir.trace import Traced, trace


def traced(target: str, **sizes: Any) -> Traced:
    """The step of a model of these sizes."""
    return _traced(target, tuple(sorted(sizes.items())), jax_compat.trace_context())


@cache
def _traced(target: str, sizes: tuple[tuple[str, Any], ...], _context: Hashable) -> Traced:
    model = zoo.build(target, **dict(sizes))
    return trace(model.step, *model.abstract_args())
