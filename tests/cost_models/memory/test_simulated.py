"""The memory model against an independent simulation: bytes from decoded layouts, moments one by one."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import zoo
from autopar.cost_models.compiler.backends import BACKENDS
from autopar.cost_models.memory.liveness import Liveness
from autopar.cost_models.memory.report import report
from autopar.cost_models.memory.row import RowSource
from autopar.ir.layout import local_shape
from autopar.ir.train_state import match_state
from autopar.passes.intra_op import extract
from autopar.plans.builders.one_mesh import Planned
from tests.cost_models.memory.test_memory import liveness, planned
from tests.support.effort import examples

MESH = (2, 4)


@cache
def plan_of(name: str) -> Planned:
    model = zoo.build(name)
    return planned(model.step, model.abstract_args(), MESH)


@cache
def toy(name: str, backend: str) -> tuple[Planned, Liveness]:
    return plan_of(name), liveness(plan_of(name), BACKENDS[backend], MESH)


TOYS = ("mlp-toy", "gpt-toy", "gpt-toy-scan-remat", "moe-toy")


def assignments(planned_step: Planned, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array([rng.integers(len(n.cost)) for n in planned_step.model.problem.nodes], np.int64)


@settings(max_examples=examples(15))
@given(st.sampled_from(TOYS), st.sampled_from(sorted(BACKENDS)), st.integers(0, 2**31))
def test_rows_agree_with_the_peak_and_never_exceed_it(name: str, backend: str, seed: int) -> None:
    planned_step, lives = toy(name, backend)
    source: RowSource = lives
    assignment = assignments(planned_step, seed)
    peak_bytes, row = source.peak(assignment)
    assert row.value(planned_step.model.problem, assignment) == pytest.approx(peak_bytes, rel=1e-9)
    moments = np.random.default_rng(seed).integers(0, len(lives.moments) + 1, 5)
    some_rows = [*source.rows(), *(lives.row(int(m)) for m in moments)]
    assert max(r.value(planned_step.model.problem, assignment) for r in some_rows) <= peak_bytes * (1 + 1e-9)


@settings(max_examples=examples(15))
@given(st.sampled_from(TOYS), st.sampled_from(sorted(BACKENDS)), st.integers(0, 2**31))
def test_rows_over_a_bound_are_local_peaks_the_highest_first(name: str, backend: str, seed: int) -> None:
    planned_step, lives = toy(name, backend)
    assignment = assignments(planned_step, seed)
    peak, row = lives.peak(assignment)
    for bound in (0.0, 0.5 * peak, 0.999 * peak):
        over = lives.over(assignment, bound)
        held = [r.value(planned_step.model.problem, assignment) for r in over]
        assert held == sorted(held, reverse=True)
        assert all(h > bound for h in held)
        assert len({r.name for r in over}) == len(over)
        if row.name != lives.row(None).name:  # more than the arguments alone
            assert held[0] == pytest.approx(row.value(planned_step.model.problem, assignment))
    assert not lives.over(assignment, peak * (1 + 1e-9))


@settings(max_examples=examples(15))
@given(st.sampled_from(TOYS), st.sampled_from(("cpu", "gpu")), st.integers(0, 2**31))
def test_sizes_are_those_of_decoded_layouts(name: str, backend: str, seed: int) -> None:
    planned_step, lives = toy(name, backend)
    assignment = assignments(planned_step, seed)
    layouts = extract.layouts(planned_step.model, assignment)
    bindings = planned_step.model.grouping.bindings
    checked = 0
    for buffer, nbytes in zip(lives.buffers, lives.sizes(assignment), strict=True):
        binding = bindings.get(buffer.value)
        own = binding is not None and binding.view is None and buffer.node == binding.group
        if buffer.what in ("argument", "value") and own:
            type_ = planned_step.graph.types[buffer.value]
            pieces = int(np.prod(local_shape(layouts.values[buffer.value], type_.shape, MESH), dtype=np.int64))
            scale = 1.0 if buffer.what == "argument" else lives.backend.fragmentation
            wanted = pieces * type_.itemsize * scale
            if nbytes == pytest.approx(wanted):
                checked += 1
            else:  # a turned operand of the value, in the layout of the product that reads it
                assert backend == "cpu"
    assert checked > len(planned_step.graph.inputs)


@settings(max_examples=examples(15))
@given(st.sampled_from(TOYS), st.sampled_from(sorted(BACKENDS)), st.integers(0, 2**31))
def test_the_peak_is_that_of_a_plain_simulation(name: str, backend: str, seed: int) -> None:
    planned_step, lives = toy(name, backend)
    assignment = assignments(planned_step, seed)
    sizes = lives.sizes(assignment)
    arguments = sum(s for b, s in zip(lives.buffers, sizes, strict=True) if b.what == "argument")
    most = 0.0
    for moment in range(len(lives.moments) + 1):
        held = sum(
            s
            for b, s in zip(lives.buffers, sizes, strict=True)
            if b.what != "argument" and b.birth <= moment <= b.death
        )
        most = max(most, held)
    assert lives.peak(assignment)[0] == pytest.approx(arguments + most, rel=1e-9)


@settings(max_examples=examples(10))
@given(st.sampled_from(TOYS), st.sampled_from(sorted(BACKENDS)), st.integers(0, 2**31))
def test_a_smaller_footprint_is_smaller_in_every_row(name: str, backend: str, seed: int) -> None:
    planned_step, lives = toy(name, backend)
    rng = np.random.default_rng(seed)
    rows = [lives.row(int(m)) for m in rng.integers(0, len(lives.moments) + 1, 6)]
    for node in rng.integers(0, len(planned_step.model.problem.nodes), 40).tolist():
        prints = lives.footprint(node)
        a, b = rng.integers(0, len(prints), 2)
        if (prints[a] <= prints[b]).all():
            assert all(r.nodes[node][a] <= r.nodes[node][b] + 1e-6 for r in rows if node in r.nodes)
    for row in rows:
        for edge, table in row.edges.items():
            assert table.shape == planned_step.model.problem.edges[edge].table.shape


def test_kinds_add_up_to_the_peak_and_name_the_largest() -> None:
    planned_step, lives = toy("gpt-toy", "gpu")
    memory = report(lives, planned_step.solution.assignment)
    assert sum(memory.kinds.values()) == pytest.approx(memory.peak_bytes, abs=8)
    assert memory.largest[0].nbytes == max(t.nbytes for t in memory.largest)
    assert {t.kind for t in memory.largest} <= set(memory.kinds)
    assert planned_step.plan.stages[0].peak_memory_bytes == memory.peak_bytes
    assert dict(planned_step.plan.stages[0].memory) == dict(memory.kinds)
    assert memory.kinds["optimizer state"] == pytest.approx(2 * memory.kinds["parameters"], rel=0.5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["mlp-toy", "gpt-toy"])
def test_new_state_goes_into_the_buffers_of_the_old(name: str, backend: str) -> None:
    """At the end nothing is left beside the arguments but results that are no state."""
    planned_step, lives = toy(name, backend)
    state = {planned_step.graph.outputs[out] for out in match_state(planned_step.graph)}
    other_bytes = sum(planned_step.graph.type_of(a).nbytes for a in planned_step.graph.outputs if a not in state)
    assert lives.profile(planned_step.solution.assignment)[-1] <= 2 * other_bytes
