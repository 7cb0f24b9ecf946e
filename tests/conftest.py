"""Eight virtual CPU devices for every test, no kept plans, quick compilation, and a cache of it shared between runs.

XLA partitions, fuses and assigns memory as always; LLVM is told to optimise little, and programs compile 1.7 times as
fast.
"""

from __future__ import annotations

import gc
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["AUTOPAR_CACHE_DIR"] = ""  # a test that kept plans would pass on yesterday's

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)
if cache := os.environ.get("AUTOPAR_TEST_JAX_CACHE"):
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

gc.set_threshold(200_000, 20, 20)  # graphs of whole programs are large, and few of them are in cycles
