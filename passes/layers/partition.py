"""Partition of a chain of layers into stages.

    subdivide   gives at least as many layers as stages: halves the layer with the most FLOPs again and again, at equal
                FLOPs within `LayerEffort.balance`, then where the fewest bytes cross, then at the latest such border
    borders     divides layers into stages: minimises the forward FLOPs of the largest stage (a backward pass takes
                twice as many); among equals the bytes that cross; then the sum of the squares of the stages' FLOPs,
                so that the other stages are even too, which memory and stages of one submesh need; then it takes the
                latest borders

`borders` is exact, by two dynamic programs over (stages so far, layers so far), O(stages layers^2):

    least(k, j)    = min_i max(least(k - 1, i), FLOPs of layers i .. j)          largest stage
    crossing(k, j) = min_i crossing(k - 1, i) + bytes(i)                         over stages no larger than least(p, n)
    squares(k, j)  = min_i squares(k - 1, i) + (FLOPs of layers i .. j)^2        over those of equal crossing(k, j)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from autopar.cost_models.flops import work
from autopar.errors import ArgumentError
from autopar.passes.layers.find import LAYERS, Layers, crossing_bytes, with_border

#: Relative and absolute difference (FLOPs) of sums in another order, below which they are equal.
ROUNDING = 1e-9
#: Squares of FLOPs, those of the largest stage being 1, are integers in this unit, so that equal sums are equal.
SQUARES = 1e-12


def subdivide(layers: Layers, count: int) -> Layers:
    """The layers, halved until there are `count` of them.

    Raises:
        ArgumentError: the forward pass has fewer operations.
    """
    while len(layers.layers) < count:
        sizes = [(_forward_flops(layers, i), layer.stop - layer.start, -i) for i, layer in enumerate(layers.layers)]
        candidates = [size for size in sizes if size[1] > 1]
        if not candidates:
            raise ArgumentError(
                f"stages={count} are more than the forward pass has operations, {len(layers.forward)}; use fewer"
            )
        layers = with_border(layers, _middle(layers, -max(candidates)[2]))
    return layers


def _forward_flops(layers: Layers, layer: int) -> float:
    return math.fsum(work(layers.graph, op) for op in layers.ops(layer))


def _middle(layers: Layers, layer: int) -> int:
    """The operation in front of which a layer is halved."""
    start, stop = layers.layers[layer].start, layers.layers[layer].stop
    flops_before = [0.0, *itertools.accumulate(work(layers.graph, op) for op in layers.ops(layer))]
    total = flops_before[-1] or 1.0
    inner = range(start + 1, stop)
    balanced = [i for i in inner if abs(flops_before[i - start] / total - 0.5) <= LAYERS.balance]
    return max(balanced or inner, key=lambda i: (-crossing_bytes(layers, i), i))


def _nbytes(layers: Layers, values: Sequence[int]) -> int:
    return sum(layers.graph.types[v].nbytes for v in values)


def borders(layers: Layers, stages: int) -> tuple[int, ...]:
    """The first layer of every stage but the first.

    Raises:
        ArgumentError: fewer layers than stages.
    """
    count = len(layers.layers)
    if stages > count:
        raise ArgumentError(f"{count} layers make no {stages} stages")
    flops_before = [0.0, *itertools.accumulate(_forward_flops(layers, i) for i in range(count))]
    crossing = [0, *(_nbytes(layers, values) for values in layers.crossing)]
    limit = _largest(flops_before, stages) * (1 + ROUNDING)

    def square(i: int, j: int) -> int:
        return round(((flops_before[j] - flops_before[i]) / (limit or 1.0)) ** 2 / SQUARES)

    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}  # layers -> (bytes, squares, borders negated)
    for k in range(1, stages + 1):
        last = range(k, count - (stages - k) + 1) if k < stages else (count,)
        best = {
            j: min(
                (best[i][0] + crossing[i], best[i][1] + square(i, j), (*best[i][2], -i))
                for i in best
                if i < j and flops_before[j] - flops_before[i] <= limit + ROUNDING
            )
            for j in last
            if any(i < j and flops_before[j] - flops_before[i] <= limit + ROUNDING for i in best)
        }
    return tuple(-i for i in best[count][2][1:])


def _largest(flops_before: Sequence[float], stages: int) -> float:
    """FLOPs of the largest stage, minimised over all partitions."""
    count = len(flops_before) - 1
    smallest_largest = {0: 0.0}
    for k in range(1, stages + 1):
        smallest_largest = {
            j: min(max(smallest_largest[i], flops_before[j] - flops_before[i]) for i in smallest_largest if i < j)
            for j in range(k, count - (stages - k) + 1)
        }
    return smallest_largest[count]
