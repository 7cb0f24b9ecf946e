"""Bytes of small programs, counted by hand: what is in memory, what is fused, what is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cost_models.compiler.hbm_traffic import bytes_accessed
from autopar.hardware.description import Device
from autopar.ir.trace import trace

DEVICE = Device("plain", {"float32": 1e12}, 1e11, 2**30)
N = 64
WHOLE = 4 * N * N  # bytes of a square matrix in float32
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)
ROW = 4 * N


def siblings(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    both = a + b
    return both * a, both * b


def updated(p: jax.Array, m: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    moment = 0.9 * m + g
    return p - moment, moment


def shared(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    half = jnp.tanh(a)
    return half @ b, b @ half


def summed(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    product = a @ b
    return product, product.sum(0)


def loop(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, _: (jnp.tanh(c), None), x, None, length=5)[0]


@pytest.mark.parametrize(
    ("what", "fn", "count", "expected"),
    [
        ("an elementwise chain reads once and writes once", lambda a: jnp.tanh(a * 2) + 1, 1, 2 * WHOLE),
        ("results of one loop read their operands once", siblings, 2, 4 * WHOLE),
        ("what is made of a result element by element comes out of its loop", updated, 3, 5 * WHOLE),
        ("in another shape it does not", lambda a: (a * 2, jnp.tanh(a * 2 + 1)[0]), 1, (1 + 1 + 1) * WHOLE + ROW),
        ("a product", lambda a, b: a @ b, 2, 3 * WHOLE),
        ("what follows a product is fused into it", lambda a, b, c: jnp.tanh(a @ b) * c, 3, 4 * WHOLE),
        ("what comes before one product too", lambda a, b: jnp.tanh(a) @ b, 2, 3 * WHOLE),
        ("what two products read is in memory", shared, 2, (1 + 1) * WHOLE + 2 * 3 * WHOLE),
        ("a sum ends a loop", lambda a: a - a.sum(0), 1, WHOLE + ROW + (WHOLE + ROW + WHOLE)),
        ("a sum of what a loop makes runs in it", summed, 2, 2 * WHOLE + WHOLE + ROW),
        ("constants are not in memory", lambda a: a + jnp.arange(N, dtype=jnp.float32), 1, 2 * WHOLE),
        ("a loop's body counts as often as it runs", loop, 1, 5 * 2 * WHOLE),
    ],
)
def test_one_device(what: str, fn: Callable[..., Any], count: int, expected: int) -> None:
    args = [SQUARE] * count
    plan = autopar.plan(fn, *args, mesh=(1,))
    graph = trace(fn, *args).graph
    assert bytes_accessed(graph, plan.stages[0], plan.collectives, DEVICE) == expected, what


def test_pieces_and_collectives() -> None:
    pins = {"a": jax.sharding.PartitionSpec("x"), "out:0": jax.sharding.PartitionSpec()}
    plan = autopar.plan(lambda a: a * 2, SQUARE, mesh=(4,), pins=pins)
    gathered = WHOLE + WHOLE // 4  # result and operand of the gather
    assert plan.bytes_per_device == 2 * WHOLE // 4 + gathered
    assert plan.flops_per_device == N * N / 4


def test_rounded_operands_are_half_as_large() -> None:
    plan = autopar.plan(shared, SQUARE, SQUARE, mesh=(1,))
    graph = trace(shared, SQUARE, SQUARE).graph
    devices = DEVICE, replace(DEVICE, rounds_operands=True)
    whole, rounded = (bytes_accessed(graph, plan.stages[0], (), device) for device in devices)
    assert whole - rounded == 3 * WHOLE / 2  # written once, read twice


@pytest.mark.parametrize(
    ("shape", "elements"),
    [
        ((8, 128), 1024),
        ((128, 8), 1024),
        ((4, 200), 8 * 256),
        ((2, 3, 64, 128), 6 * 64 * 128),
        ((1, 1, 64), 8 * 64 * 2),
    ],
)
def test_arrays_take_whole_tiles_in_their_best_order(shape: tuple[int, ...], elements: int) -> None:
    plan = autopar.plan(lambda a: a + 1, jax.ShapeDtypeStruct(shape, jnp.float32), mesh=(1,))
    graph = trace(lambda a: a + 1, jax.ShapeDtypeStruct(shape, jnp.float32)).graph
    assert bytes_accessed(graph, plan.stages[0], (), replace(DEVICE, tile=(8, 128))) == 2 * 4 * elements


def test_a_reshape_of_the_last_dimension_copies_tiles() -> None:
    """[8, 64] in tiles of 8 x 128 is 1,024 numbers, [8, 4, 16] 4,096 and [4, 2, 64] 8 x 128 again, the last kept."""

    def elements(*shape: int) -> float:
        x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
        plan = autopar.plan(lambda a: jnp.tanh(a).reshape(shape) * 3, x, mesh=(1,))
        graph = trace(lambda a: jnp.tanh(a).reshape(shape) * 3, x).graph
        return bytes_accessed(graph, plan.stages[0], (), replace(DEVICE, tile=(8, 128))) / 4

    assert elements(8, 4, 16) == (1024 + 1024) + (1024 + 4096) + (4096 + 4096)
    assert elements(4, 2, 64) == 1024 + 2 * 4 * 128 * 2


@pytest.mark.parametrize(
    ("shape", "before", "after", "times"),
    [
        ((1024, 2048), ("x", None), (None, "x"), 4),  # pieces of whole tiles: written, put in front
        ((1024, 2048), (None, "x"), ("x", None), 2),  # put back
        ((16, 16, 1024), ("x", None, None), (None, "x", None), 0),
        # 16 columns at most, eight times as long in tiles; made dense twice
        ((32, 64), ("x", None), (None, "x"), 16 + 36),
    ],
)
def test_an_exchange_of_columns_moves_its_pieces_between_tiles(
    shape: tuple[int, ...], before: tuple[Any, ...], after: tuple[Any, ...], times: int
) -> None:
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    pins = {"a": jax.sharding.PartitionSpec(*before), "out:0": jax.sharding.PartitionSpec(*after)}
    plan = autopar.plan(lambda a: a * 2, x, mesh=(4,), pins=pins)
    graph, (exchange,) = trace(lambda a: a * 2, x).graph, plan.collectives
    assert exchange.kind == "all-to-all"

    def moved(device: Device) -> float:
        stage = plan.stages[0]
        return bytes_accessed(graph, stage, [exchange] * 2, device) - bytes_accessed(graph, stage, [exchange], device)

    assert moved(replace(DEVICE, tile=(8, 128))) - moved(DEVICE) == times * exchange.bytes
