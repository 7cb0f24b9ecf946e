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


def test_so_are_those_that_are_whole_on_every_device() -> None:
    """Microbatches of a single example: XLA gathers the operand of a transform over all other dimensions."""

    def step(filters: Any, batch: Any) -> Any:
        def loss(filters: Any) -> Any:
            return jnp.mean(jnp.abs(jnp.fft.ifft2(jnp.fft.fft2(batch + 0j) * filters)) ** 2)

        value, gradient = jax.value_and_grad(loss)(filters)
        return filters - 0.1 * gradient, value

    filters, batch = np.ones((8, 8), np.float32), np.random.default_rng(0).normal(size=(8, 8, 8)).astype(np.float32)
    options = {"mesh": (4, 2), "cluster": dear((4, 2)), "stages": 2, "num_microbatches": 8, "donate_argnums": ()}
    for ours, theirs in zip(
        autopar.parallelize(step, **options)(filters, batch), jax.jit(step)(filters, batch), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
