"""Eight virtual CPU devices for every test, no kept plans, quick compilation, and a cache of it shared between runs.

XLA partitions as always; LLVM is told to optimise little and XLA to emit simple kernels, and programs compile three
times as fast.
"""

from __future__ import annotations

import gc
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["AUTOPAR_CACHE_DIR"] = ""  # a test that kept plans would pass on yesterday's

import jax
import pytest
from _pytest import runner  # the protocol is public only as a hook
from hypothesis import settings

from autopar.bench.equal.run import quick_flags
from tests.support import effort, mlir_contexts
from tests.support.stack_chunk import in_one_chunk

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick_flags()}".strip()  # read when a backend starts
jax.config.update("jax_num_cpu_devices", 8)
mlir_contexts.reuse()
settings.register_profile("suite", deadline=None)  # how fast a machine is decides no test
settings.load_profile("suite")
if cache := os.environ.get("AUTOPAR_TEST_JAX_CACHE"):
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests that are marked exhaustive to `make exhaustive`."""
    left = [] if effort.ALL else [item for item in items if item.get_closest_marker("exhaustive")]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test with its fixtures in one chunk of the interpreter's stack."""
    return in_one_chunk(lambda: runner.pytest_runtest_protocol(item, nextitem))


def pytest_sessionfinish() -> None:
    """Collect what is left once: pytest does it five times, to hear of errors in finalizers."""
    gc.collect()
    gc.freeze()


gc.set_threshold(200_000, 20, 20)  # graphs of whole programs are large, and few of them are in cycles
