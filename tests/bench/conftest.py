"""Fixtures of the tests of benchmarks."""

from __future__ import annotations

import pytest

from autopar.bench import worker
from tests.support import processes


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of benchmarks are forked from a process that has imported JAX."""
    monkeypatch.setattr(worker, "lines", processes.worker_lines)
