"""A stage as one graph: what is in it, how often it counts, and what of it leaves the stage."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.cost_models.flops import model_flops
from autopar.ir.graph import Graph, Repeats, graph_hash, verify
from autopar.ir.trace import trace
from autopar.passes.layers.find import find
from autopar.passes.microbatch.loop import StepPrograms
from autopar.passes.microbatch.split import split
from autopar.passes.microbatch.states import local_shape
from autopar.passes.op_groups import unreduced
from autopar.passes.stages.divide import PASS_KINDS, Stages, divide
from autopar.passes.stages.graph import StageGraph, stage_graph
from autopar.passes.stages.isomorphism import canonical_form, renamed
from autopar.zoo import build as zoo
from tests.support.effort import sample
from tests.support.traces import traced

COUNT = 4


def staged(
    name: str, stages: int = 2, *, weights: bool = False, **options: Any
) -> tuple[Stages, list[StageGraph], Any]:
    step = traced(name, **options)
    layers = find(step.graph)
    borders = [round(len(layers.layers) * (i + 1) / stages) for i in range(stages - 1)]
    divided = divide(split(step.graph, COUNT), layers, borders, weights=weights)
    return divided, [stage_graph(divided, s, step.in_avals) for s in range(stages)], step


@pytest.mark.parametrize(
    ("name", "weights"), [("mlp-toy", True), ("gpt-toy-tied", True), ("gpt-toy-remat", True), ("moe-toy", False)]
)
def test_graphs_are_valid_and_have_every_program(name: str, weights: bool) -> None:
    stages, graphs, traced = staged(name, weights=weights)
    carried = [i for g in graphs for i in (g.graph.carried or {}).values()]
    for g in graphs:
        verify(g.graph)
        indices = [op.index for op in g.graph.ops]
        assert indices == [i for ops in g.programs.values() for i in indices if i in ops]
        assert isinstance(g.graph.repeats, Repeats)
        passes = [op.index for op in g.graph.ops if g.program_of(op.index) in PASS_KINDS]
        assert dict(g.graph.repeats.ops) == dict.fromkeys(passes, COUNT)
        for kind, pass_ in stages.stages[g.stage].passes.items():
            for v in (*pass_.writes, *(t.value for t in pass_.totals)):
                state = stages.split.states[v]
                wanted = local_shape(traced.graph.types[v].shape, state, COUNT)
                assert g.graph.type_of(g.local[v]).shape == wanted, kind
    state = jax.tree.leaves(jax.tree.unflatten(traced.in_tree, range(len(traced.in_avals)))[0][0])
    assert len(carried) == len(state)


def without_scopes(graph: Graph) -> str:
    """The printed form without JAX's scopes, which have the numbers of the step's operations."""
    return re.sub(r"(  # \w+( \S+:\d+)?) in .*", r"\1", str(graph))


#: Model -> pairs of isomorphic stages, of four. Experts run on blocks by bodies of their own.
ISOMORPHIC = {"gpt-toy": 2, "gpt-toy-tied": 2, "moe-toy": 0, "gpt-toy-remat": 2, "llama3-toy": 2}
KEPT = ("gpt-toy-tied", "moe-toy", "llama3-toy")


@pytest.mark.parametrize("name", sample(ISOMORPHIC, KEPT))
def test_the_graph_of_an_isomorphic_stage_is_the_traced_one_renamed(name: str) -> None:
    stages, graphs, traced = staged(name, 4, layers=6)
    programs = StepPrograms(stages.split)
    forms = [canonical_form(stages, s, traced.in_avals, programs) for s in range(4)]
    isomorphic = [(a, b) for a in range(4) for b in range(4) if a != b and forms[a].key == forms[b].key]
    assert len(isomorphic) == ISOMORPHIC[name]
    for a, b in [*isomorphic, *((s, s) for s in range(4))]:
        renamed_graph, exact = renamed(graphs[a], forms[a], forms[b]), graphs[b]
        assert without_scopes(renamed_graph.graph) == without_scopes(exact.graph)
        assert graph_hash(renamed_graph.graph) == graph_hash(exact.graph)
        for field in fields(StageGraph):
            if field.name != "graph":
                assert getattr(renamed_graph, field.name) == getattr(exact, field.name), field.name


def test_flops_of_stages_are_those_of_the_step() -> None:
    _, graphs, traced = staged("gpt-toy")
    done = sum(COUNT * model_flops(g.graph) for g in graphs)
    assert done == pytest.approx(model_flops(traced.graph), rel=1e-9)


def test_sent_values_are_received() -> None:
    stages, graphs, _ = staged("gpt-toy", 4, layers=4)
    for transfer, values in stages.transfers.items():
        source, target = graphs[transfer.source], graphs[transfer.target]
        for v in values:
            out = next(i for i, u in source.sent.items() if u == v)
            assert source.graph.type_of(source.graph.outputs[out]) == target.graph.types[target.received[v]]
            assert source.graph.repeats is not None
            assert target.graph.repeats is not None
            assert source.graph.repeats.results[out] == target.graph.repeats.inputs[target.received[v]] == COUNT


def test_middle_stages_are_equal_but_for_names() -> None:
    _, graphs, _ = staged("gpt-toy", 4, layers=4)
    first, other = (re.sub('"[^"]*"', "", without_scopes(graphs[s].graph)) for s in (1, 2))
    assert first == other


# What may stay partial


def partial_totals(step: Any, *args: Any) -> tuple[int, int]:
    """Totals of rank 1 or more, and those that may stay partial sums."""
    traced = trace(step, *args)
    layers = find(traced.graph)
    stages = divide(split(traced.graph, 2), layers, (len(layers.layers) // 2,))
    totals = [0, 0]
    for s in range(2):
        g = stage_graph(stages, s, traced.in_avals)
        chosen = unreduced.find(g.graph)
        inside = {op.index for op in g.graph.walk()} & (
            chosen.products | {i for i, stays in chosen.sums.items() if stays}
        )
        totals[0] += sum(g.graph.type_of(g.local[v]).rank > 0 for v in g.completed_in)
        totals[1] += len(inside & chosen.products)
    return totals[0], totals[1]


@pytest.mark.parametrize("name", ["mlp-toy", "gpt-toy", "gpt-toy-remat", "gpt-toy-scan"])
def test_all_gradients_may_stay_partial(name: str) -> None:
    """Of products, of biases, of embeddings (a scatter), in rematerialised bodies and in scans."""
    model = zoo(name)
    totals, deferred = partial_totals(model.step, *model.abstract_args())
    assert deferred >= totals > 0


def test_what_is_no_sum_does_not_stay_partial() -> None:
    """A maximum over the batch is no sum."""

    def step(p: Any, b: Any) -> Any:
        def loss(p: Any) -> Any:
            x = b["x"]
            for w in p:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2), x.max(0)

        (value, most), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return jax.tree.map(lambda p, g: p - g, p, grads), value, most

    args = [jnp.ones((4, 4))] * 4, {"x": jnp.ones((8, 4))}
    assert partial_totals(step, *args) == (5, 4)
