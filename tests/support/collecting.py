"""The garbage collector in tests that wait for it: a suite's objects would take it seconds each time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def new_objects_only() -> Iterator[None]:
    """Inside, `gc.collect` looks at the objects alone that were made inside."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
