"""What programs of tests are built of: fixed arrays, a perceptron of two layers with its loss, a step of SGD."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def array(*shape: int, dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    """Fixed values between -1 and 1, or small integers."""
    rng = np.random.default_rng([seed, *shape])
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(rng.integers(0, 7, shape).astype(dtype))
    return jnp.asarray(rng.uniform(-1, 1, shape).astype(dtype))


def sgd(params: Any, grads: Any, rate: Any = 0.1) -> Any:
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - x) ** 2)


def two_layers(**dtype: Any) -> dict[str, jax.Array]:
    return {"up": array(8, 32, seed=1, **dtype), "down": array(32, 8, seed=2, **dtype)}
