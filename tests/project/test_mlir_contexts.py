"""Programs are the same in a context that others were lowered in as in a new one (tests/support/mlir_contexts.py)."""

from __future__ import annotations

from threading import Thread

import jax
import numpy as np
import pytest
from jax._src.interpreters import mlir

from tests.support.mlir_contexts import Contexts

NEW = mlir.make_ir_context


def lowered(programs: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], int]:
    """Texts of five programs, each of which has a constant, and the number of contexts."""
    calls = list[None]()

    def new() -> object:
        calls.append(None)
        return NEW()

    monkeypatch.setattr(mlir, "make_ir_context", Contexts(new, programs))
    arrays = [np.arange(n + 2.0, dtype=np.float32) for n in range(5)]
    return [jax.jit(lambda x, y=x: x * y + len(y)).lower(x).as_text() for x in arrays], len(calls)


def test_a_program_is_the_same_in_a_context_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, five = lowered(1, monkeypatch)
    shared, three = lowered(2, monkeypatch)
    assert alone == shared
    assert len(set(alone)) == 5
    assert (five, three) == (5, 3)


def test_threads_share_no_context() -> None:
    contexts, taken = Contexts(object, 9), list[object]()
    for _ in range(2):
        thread = Thread(target=lambda: taken.extend((contexts(), contexts())))
        thread.start()
        thread.join()
    first, again, other, _ = taken
    assert first is again is not other
