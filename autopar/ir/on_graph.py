"""What a pass finds in a graph, kept on the graph itself.

Several passes ask the same question of one graph. The answer goes with the graph: once a plan and its step are dropped,
the graph is freed with all that was found in it, and no cache of a module keeps either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from autopar.ir.graph import Graph

P = ParamSpec("P")
R = TypeVar("R")

#: Most answers of one function that a graph keeps: programs rewritten by several policies, say, are as large as it is.
MOST_KEPT = 4


def cached_on_graph(function: Callable[Concatenate[Graph, P], R]) -> Callable[Concatenate[Graph, P], R]:
    """The function, computed once for each graph, and for each of the last other arguments it had for that graph.

    Args:
        function: of a graph, and of hashable arguments.
    """

    @wraps(function)
    def cached(graph: Graph, *args: P.args, **kwargs: P.kwargs) -> R:
        kept = graph.kept.setdefault(function, {})
        key = args, tuple(kwargs.items())
        if key in kept:
            return kept[key]
        result = function(graph, *args, **kwargs)
        if len(kept) >= MOST_KEPT:
            kept.pop(next(iter(kept)), None)  # the oldest
        kept[key] = result
        return result

    return cached
