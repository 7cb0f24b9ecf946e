"""Random bits in the memory model: what dropout keeps from the forward to the backward pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.cost_models.compiler.backends import CPU, GPU, Backend
from autopar.cost_models.memory.liveness import Liveness
from autopar.hardware.cluster import Cluster
from autopar.ir.trace import trace
from autopar.passes.remat.options import Options
from autopar.plans.builders.one_mesh import make_plan

DEVICES = 8
ROWS, WIDTH = 1024, 128
WHOLE = ROWS * WIDTH * 4  # bytes of all activations of one layer


def key(impl: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl))


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(w: Any, x: Any, seed: Any) -> Any:
    """The gradient of a layer with dropout: its mask is read twice."""

    def loss(w: Any) -> Any:
        keep = jax.random.bernoulli(seed, 0.9, x.shape)
        return (jnp.where(keep, jnp.tanh(x @ w), 0.0) @ w).sum()

    return jax.grad(loss)(w)


def kept(impl: str, backend: Backend) -> list[float]:
    """Bytes per device of each array of random words."""
    cluster = Cluster.custom((DEVICES,), 1e-6, 1e-11, {"float32": 1e9}, 1e9, 2**34)
    mesh = cluster.logical_mesh((DEVICES,))
    planned_step = make_plan(trace(step, array(WIDTH, WIDTH), array(ROWS, WIDTH), key(impl)), mesh, "custom", Options())
    lives = Liveness(planned_step.graph, planned_step.model, mesh, backend, planned_step.plan.donated)
    sizes = lives.sizes(planned_step.solution.assignment) / backend.fragmentation
    words = {v for op in planned_step.graph.walk() if op.name == "random_bits" for v in op.outputs}
    return [float(size) for b, size in zip(lives.buffers, sizes, strict=True) if b.value in words]


@pytest.mark.parametrize(("backend", "words"), [(CPU, 2), (GPU, 1)], ids=["cpu", "gpu"])
def test_a_hash_is_made_in_pieces_where_its_readers_are(backend: Backend, words: int) -> None:
    """Between the bits and the first value that has a layout there is a chain of steps that have none."""
    assert kept("threefry2x32", backend) == [WHOLE / DEVICES] * words


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_bits_that_are_no_hashes_are_made_whole_by_every_device(impl: str) -> None:
    assert kept(impl, CPU) == [WHOLE]
