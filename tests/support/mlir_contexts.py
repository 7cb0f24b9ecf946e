"""A thread of the tests lowers a few programs in each MLIR context, as it does in JAX 0.12.

Older JAX makes a context for every program: 3 ms, of 14 in which a program of one operation is traced, lowered and
compiled, and 1 MB that lives as long as the lowered program. Types, attributes and constants live as long as their
context, so that a context is for a limited number of programs. Tried on JAX 0.10.2.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from jax._src.interpreters import mlir

PROGRAMS = 50  # of a context


class Contexts(threading.local):
    """The context of each thread.

    Attributes:
        new: makes one.
        programs: how many are lowered in one.
    """

    def __init__(self, new: Callable[[], Any], programs: int = PROGRAMS) -> None:
        self.new, self.programs = new, programs
        self.left, self.context = 0, None

    def __call__(self) -> Any:
        if not self.left:
            self.left, self.context = self.programs, self.new()
        self.left -= 1
        return self.context


def reuse() -> None:
    """Have JAX reuse contexts, unless it does."""
    if not hasattr(mlir, "_thread_local_context"):
        mlir.make_ir_context = Contexts(mlir.make_ir_context)
