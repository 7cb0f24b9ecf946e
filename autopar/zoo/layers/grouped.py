"""Products over groups of rows: rows [T,D] in groups of given sizes, each times a matrix of [E,D,F] -> [T,F].

ragged_dot    `jax.lax.ragged_dot`
megablox      JAX's Pallas kernels for TPUs (Gale et al., "MegaBlocks", 2023), with tiles of at most `TILE` rows and
              columns; of float32 and bfloat16
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""rows [T,D], matrices [E,D,F], sizes [E] -> [T,F]"""

TILE = 512


def megablox(
    rows: jax.Array, matrices: jax.Array, sizes: jax.Array, *, tile: int = TILE, interpret: bool = False
) -> jax.Array:
    """The product by JAX's kernel, which runs on TPUs, or is interpreted; `tile`: most rows and columns of a tile."""
    # Pallas takes 0.2 s to import, which planning without it need not wait for.
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    tiling = math.gcd(rows.shape[0], tile), min(matrices.shape[1], tile), min(matrices.shape[2], tile)
    return gmm(rows, matrices, sizes.astype(jnp.int32), rows.dtype, tiling, interpret=interpret)
