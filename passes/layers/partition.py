"""Where a chain of layers is cut into stages.

    finer      as many layers as there are stages to be, at least: the layer with the most FLOPs is halved again and
               again, at equal FLOPs give or take `WINDOW`, then where the fewest bytes cross, then latest
    borders    the stages: the largest has the fewest FLOPs possible in its forward pass (a backward pass takes twice
               as many); of all such cuts the one that the fewest bytes cross; of these the latest

The second is exact, in two dynamic programs over (stages so far, layers so far), O(stages layers^2):

    least(k, j)    = min_i max(least(k - 1, i), FLOPs of layers i .. j)          largest stage
    crossing(k, j) = min_i crossing(k - 1, i) + bytes(i)                         over stages no larger than least(p, n)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from autopar.cost_models.flops import work
from autopar.errors import ArgumentError
from autopar.passes.layers.find import WINDOW, Layers, crossing_bytes, divided

#: Sums of FLOPs in another order are still equal.
ROUNDING = 1e-9


def finer(found: Layers, least: int) -> Layers:
    """The layers, halved until there are `least` of them.

    Raises:
        ArgumentError: there are not as many operations.
    """
    while len(found.layers) < least:
        amounts = [(_forward(found, i), layer.stop - layer.start, -i) for i, layer in enumerate(found.layers)]
        candidates = [amount for amount in amounts if amount[1] > 1]
        if not candidates:
            raise ArgumentError(
                f"stages={least} are more than the forward pass has operations, {len(found.forward)}; use fewer"
            )
        found = divided(found, _middle(found, -max(candidates)[2]))
    return found


def _forward(found: Layers, layer: int) -> float:
    return math.fsum(work(found.graph, op) for op in found.ops(layer))


def _middle(found: Layers, layer: int) -> int:
    """The operation in front of which a layer is halved."""
    start, stop = found.layers[layer].start, found.layers[layer].stop
    done = [0.0, *itertools.accumulate(work(found.graph, op) for op in found.ops(layer))]
    total = done[-1] or 1.0
    inner = range(start + 1, stop)
    near = [i for i in inner if abs(done[i - start] / total - 0.5) <= WINDOW]
    return max(near or inner, key=lambda i: (-crossing_bytes(found, i), i))


def _nbytes(found: Layers, values: Sequence[int]) -> int:
    return sum(found.graph.types[v].nbytes for v in values)


def borders(found: Layers, stages: int) -> tuple[int, ...]:
    """The first layer of every stage but the first.

    Raises:
        ArgumentError: fewer layers than stages.
    """
    count = len(found.layers)
    if stages > count:
        raise ArgumentError(f"{count} layers make no {stages} stages")
    before = [0.0, *itertools.accumulate(_forward(found, i) for i in range(count))]
    crossing = [0, *(_nbytes(found, values) for values in found.crossing)]
    limit = _largest(before, stages) * (1 + ROUNDING)
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}  # layers so far -> (bytes, borders negated)
    for k in range(1, stages + 1):
        last = range(k, count - (stages - k) + 1) if k < stages else (count,)
        best = {
            j: min(
                (best[i][0] + crossing[i], (*best[i][1], -i))
                for i in best
                if i < j and before[j] - before[i] <= limit + ROUNDING
            )
            for j in last
            if any(i < j and before[j] - before[i] <= limit + ROUNDING for i in best)
        }
    return tuple(-i for i in best[count][1][1:])


def _largest(before: Sequence[float], stages: int) -> float:
    """FLOPs of the largest stage where they are balanced best."""
    count = len(before) - 1
    least = {0: 0.0}
    for k in range(1, stages + 1):
        least = {
            j: min(max(least[i], before[j] - before[i]) for i in least if i < j)
            for j in range(k, count - (stages - k) + 1)
        }
    return least[count]
