"""Borders of stages: as good as any by exhaustive search."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.flops import work
from autopar.errors import ArgumentError
from autopar.ir.trace import trace
from autopar.passes.layers import find as layers_pass
from autopar.passes.layers import partition as layer_partition
from autopar.passes.layers.find import Layers


def chain(widths: list[int]) -> Layers:
    """A chain of different products, each a layer."""

    def fn(ws: Any, x: Any) -> Any:
        for i, w in enumerate(ws):
            x = (jnp.tanh, jnp.sin, jnp.cos)[i % 3](x @ w)
        return x.sum()

    ws = [jax.ShapeDtypeStruct((a, b), jnp.float32) for a, b in itertools.pairwise(widths)]
    graph = trace(fn, ws, jax.ShapeDtypeStruct((4, widths[0]), jnp.float32)).graph
    return layer_partition.subdivide(layers_pass.find(graph), len(ws))


def quality(layers: Layers, borders: tuple[int, ...]) -> tuple[float, int, float, tuple[int, ...]]:
    """(FLOPs of the largest stage, bytes that cross, sum of squares of FLOPs, how early): smaller is better."""
    ends = (0, *borders, len(layers.layers))
    amounts = [
        sum(work(layers.graph, op) for i in range(a, b) for op in layers.ops(i)) for a, b in itertools.pairwise(ends)
    ]
    crossing = sum(layers.graph.types[v].nbytes for b in borders for v in layers.crossing[b - 1])
    return max(amounts), crossing, sum(n * n for n in amounts), tuple(-b for b in borders)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 12), min_size=3, max_size=7), st.integers(1, 4))
def test_borders_are_optimal(widths: list[int], stages: int) -> None:
    layers = chain(widths)
    stages = min(stages, len(layers.layers))
    every = itertools.combinations(range(1, len(layers.layers)), stages - 1)
    assert layer_partition.borders(layers, stages) == min(every, key=lambda borders: quality(layers, borders))


def test_stages_below_the_largest_are_even() -> None:
    layers = chain([8] * 8 + [16])  # equal layers, the last of twice the FLOPs
    assert layer_partition.borders(layers, 4) == (3, 5, 7)  # 3, 2, 2 and 2 FLOPs of 512, and not 3, 3, 1 and 2


def test_subdivided_layers_cover_the_same_operations() -> None:
    coarse = chain([8, 8, 8, 8, 8])
    for least in (1, 4, 7, 9):
        layers = layer_partition.subdivide(coarse, least)
        assert len(layers.layers) == max(least, len(coarse.layers))
        assert [op.index for i in range(len(layers.layers)) for op in layers.ops(i)] == [
            op.index for i in range(len(coarse.layers)) for op in coarse.ops(i)
        ]


def test_more_stages_than_operations_are_refused() -> None:
    layers = chain([2, 2])
    with pytest.raises(ArgumentError, match=r"stages=9 are more than the forward pass has operations, 3; use fewer"):
        layer_partition.subdivide(layers, 9)
    with pytest.raises(ArgumentError, match="layers make no 9 stages"):
        layer_partition.borders(layers, 9)
