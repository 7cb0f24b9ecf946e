"""Fourier transforms on sharded arrays: XLA's kernel for CPU takes one order of dimensions in memory alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.bench.equal.case import dear


def spectrum(weights: dict[str, Any], batch: Any) -> Any:
    """Gradients for a projection of a power spectrum and for a convolution of that."""

    def loss(weights: dict[str, Any]) -> Any:
        power = jnp.abs(jnp.fft.rfft(batch)) ** 2
        mixed = jnp.einsum("bcde,cze->cbzd", power, weights["mix"]).transpose(1, 0, 2, 3)
        dims = ("NHWC", "HWIO", "NHWC")
        out = jax.lax.conv_general_dilated(mixed, weights["kernel"], (2, 1), "VALID", dimension_numbers=dims)
        return jnp.log1p(out * out).sum()

    return jax.grad(loss)(weights)


def test_their_operands_are_in_memory_in_order() -> None:
    """Found by a random program: left to XLA, an internal error of the kernel."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        shapes = {"mix": (3, 8, 2), "kernel": (2, 2, 2, 2)}
        weights = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        batch = rng.normal(size=(8, 3, 2, 3))
        step = autopar.parallelize(spectrum, mesh=(2, 4), cluster=dear((2, 4)), batch_argnums=(1,), num_microbatches=2)
        for ours, theirs in zip(
            jax.tree.leaves(step(weights, batch)), jax.tree.leaves(jax.jit(spectrum)(weights, batch)), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9)
