"""Prices and memory of state in the host's memory: counted by hand on a step of one weight and its moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import Cluster
from autopar.cost_models import offload
from autopar.cost_models.compiler.backends import BACKENDS, Backend
from autopar.cost_models.memory.liveness import Liveness
from autopar.cost_models.memory.row import smallest
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph
from autopar.ir.layout import local_shape
from autopar.ir.trace import trace
from autopar.ir.train_state import match_state
from autopar.passes.intra_op.build import layout_at
from autopar.passes.mesh_search.planner import make_model
from autopar.passes.remat.offload import offloadable
from autopar.passes.remat.options import Options
from autopar.passes.solver.optimize import optimize

BANDWIDTH = 1e9  # bytes/s
W, X = jax.ShapeDtypeStruct((64, 128), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)
WHOLE = 64 * 128 * 4  # bytes of the weight, and of its moment


def step(w: Any, m: Any, x: Any) -> Any:
    gradient = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
    m = 0.9 * m + gradient
    return w - 0.1 * m, m


def mesh(sizes: Sequence[int] = (2, 4)) -> LogicalMesh:
    plain = Cluster.custom(sizes, 1e-6, 1e-11, {"float32": 1e12}, 1e12, 2**34)
    device = replace(plain.device, host_bandwidth=BANDWIDTH, host_memory_bytes=2**36)
    return replace(plain, device=device).logical_mesh(sizes)


def program() -> tuple[Graph, Any, tuple[int, ...]]:
    traced = trace(step, W, W, X)
    hosted = offloadable(traced.graph, tuple(match_state(traced.graph).values()))
    assert [traced.graph.input_paths[i] for i in hosted] == ["m"]
    return traced.graph, make_model(traced, mesh(), Options()), hosted


def test_a_piece_is_copied_to_the_device_and_back() -> None:
    graph, model, hosted = program()
    priced = offload.priced(model, graph, mesh(), hosted)
    binding = model.grouping.bindings[graph.inputs[hosted[0]]]
    strategies = model.grouping.groups[binding.group].strategies
    assert len(strategies) > 1
    for choice in range(len(strategies)):
        piece = local_shape(layout_at(strategies, choice, binding.dims, False), W.shape, mesh().sizes)
        before, after = (m.problem.nodes[binding.group].cost[choice] for m in (model, priced))
        assert after - before == pytest.approx(2 * 4 * np.prod(piece) / BANDWIDTH)
    other_groups = [v for v in range(len(model.problem.nodes)) if v != binding.group]
    assert all(model.problem.nodes[v] is priced.problem.nodes[v] for v in other_groups)


def test_what_has_to_be_copied_is_cut() -> None:
    """Each device copies an eighth: 4 KiB at 1 GB/s, there and back."""
    graph, model, hosted = program()
    priced = offload.priced(model, graph, mesh(), hosted)
    assignment = optimize(priced.problem).assignment
    assert offload.host_bytes(priced, graph, mesh(), hosted, assignment) == WHOLE / 8
    assert offload.seconds(WHOLE / 8, mesh()) == pytest.approx(2 * 4096 / 1e9)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=list(BACKENDS))
def test_only_its_visit_takes_device_memory(backend: Backend) -> None:
    graph, model, hosted = program()
    backend = replace(backend, near_bytes=0.0, fragmentation=1.0)
    without, within = (Liveness(graph, model, mesh(), backend, hosted=positions) for positions in ((), hosted))
    choice = optimize(model.problem).assignment
    moment = graph.inputs[hosted[0]]
    held = {b.value: without.sizes(choice)[i] for i, b in enumerate(without.buffers) if b.what == "argument"}

    def arguments(source: Liveness) -> float:
        sizes = source.sizes(choice)
        return sum(sizes[i] for i, b in enumerate(source.buffers) if b.what == "argument")

    assert arguments(without) - arguments(within) == held[moment]
    visits = [b for b in within.buffers if b.what == "visit"]
    assert [b.value for b in visits] == [moment]
    assert 0 < visits[0].birth < visits[0].death <= len(within.moments)
    before, after = without.profile(choice), within.profile(choice)
    there = [m for m in range(len(after)) if visits[0].birth <= m <= visits[0].death]
    change = after - before
    assert all(change[m] == (held[moment] if m in there else 0.0) for m in range(len(after)))


@settings(max_examples=20)
@given(st.sampled_from(sorted(BACKENDS)), st.integers(0, 2**31), st.integers(0, 2**31))
def test_a_peak_without_what_waits_bounds_every_plan_that_has_it_wait(name: str, seen: int, judged: int) -> None:
    graph, model, hosted = program()
    waiting = frozenset(graph.inputs[i] for i in hosted)
    without, within = (Liveness(graph, model, mesh(), BACKENDS[name], hosted=positions) for positions in ((), hosted))
    choice, other = (
        np.array([rng.integers(len(n.cost)) for n in model.problem.nodes])
        for rng in map(np.random.default_rng, (seen, judged))
    )
    row = without.at_peak_without(waiting, choice)
    assert smallest(row) <= within.peak(other)[0] * (1 + 1e-12)
    assert row.value(model.problem, choice) <= within.peak(choice)[0] * (1 + 1e-12)
    assert row.value(model.problem, choice) < without.peak(choice)[0]


def test_nothing_is_priced_where_nothing_is_moved() -> None:
    graph, model, _ = program()
    assert offload.priced(model, graph, mesh(), ()) is model
    assert offload.host_bytes(model, graph, mesh(), (), optimize(model.problem).assignment) == 0
