"""Numbers for the programs of the corpus: the same in every process."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np


def normal(*shape, seed=0, dtype=jnp.float32, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)


def uniform(*shape, seed=0, low=0.0, high=1.0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).uniform(low, high, shape), dtype)


def tokens(*shape, below, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, below, shape), jnp.int32)
