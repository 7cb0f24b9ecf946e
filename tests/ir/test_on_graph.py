"""What passes find in a graph is kept on it, and goes with it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax.numpy as jnp
import pytest

import autopar
from autopar import zoo
from autopar.ir.graph import Graph
from autopar.ir.on_graph import MOST_KEPT, cached_on_graph
from autopar.ir.trace import trace
from tests.support.collecting import new_objects_only


def test_a_function_is_computed_once_per_graph_and_arguments() -> None:
    graphs = [trace(jnp.sin, jnp.ones(4)).graph for _ in range(2)]
    calls: list[tuple[Graph, int]] = []

    @cached_on_graph
    def count(graph: Graph, number: int) -> int:
        calls.append((graph, number))
        return number + len(graph.ops)

    for number in (1, 1, 2, 1):
        assert [count(graph, number) for graph in graphs] == [number + 1] * 2
    assert calls == [(graph, number) for number in (1, 2) for graph in graphs]
    for number in range(3, 3 + MOST_KEPT):
        count(graphs[0], number)
    assert count(graphs[0], 1) == 2  # computed again: only the last are kept
    assert calls[-1] == (graphs[0], 1)
    assert sum(map(len, graphs[0].kept.values())) == MOST_KEPT


@pytest.mark.parametrize(
    "options",
    [{"mesh": (8,)}, {"mesh": (8,), "remat": "full"}, {"mesh": (8,), "stages": 2, "num_microbatches": 2}],
    ids=str,
)
def test_no_graph_outlives_its_plan(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[weakref.ref[Graph]] = []
    kept = Graph.__dict__["kept"].func

    def seen(graph: Graph) -> Any:
        graphs.append(weakref.ref(graph))
        return kept(graph)

    monkeypatch.setattr(Graph.__dict__["kept"], "func", seen)
    with new_objects_only():
        model = zoo.build("mlp-toy")
        plan = autopar.plan(model.step, *model.abstract_args(), cluster="dgx-h100", **options)
        assert any(graph() is not None for graph in graphs)
        del plan, model
        gc.collect()
    assert not [graph for graph in graphs if graph() is not None]
