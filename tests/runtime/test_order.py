"""What a step is watched to do: the order of its schedule, a stash within its bound, nothing left behind."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import pytest

from autopar.runtime import PipelineStep
from autopar.runtime.executor import Stash
from autopar.schedules import SCHEDULES, Instruction, Size, bounds
from autopar.zoo import build as zoo
from tests.runtime.test_runtime import pipeline
from tests.support.effort import sample

RANKS, MICROBATCHES = 2, 8


def watched(step: PipelineStep, *args: Any) -> list[tuple[Instruction, Stash]]:
    """The instructions of a step in order, and what its stages hold after each."""
    log: list[tuple[Instruction, Stash]] = []
    replace(step, observer=lambda i, stash: log.append((i, {key: dict(v) for key, v in stash.items()})))(*args)
    return log


TRAINING = [name for name, row in SCHEDULES.items() if row.executable and row.backward]


@pytest.fixture(scope="module", params=sample(TRAINING, ["1f1b", "interleaved-1f1b", "zb-h1"]))
def run(request: pytest.FixtureRequest) -> tuple[PipelineStep, list[tuple[Instruction, Stash]]]:
    """A step by one of the schedules, and what it was watched to do."""
    model = zoo("mlp-toy", layers=4)
    args = jax.jit(model.init)(jax.random.key(0)), model.make_batch(jax.random.key(1))
    borders = (1, 2, 3) if request.param == "interleaved-1f1b" else (2,)
    step = pipeline(model.step, args, (1,) * RANKS, request.param, MICROBATCHES, borders)
    return step, watched(step, *args)


def test_the_order_on_every_rank_is_that_of_the_schedule(
    run: tuple[PipelineStep, list[tuple[Instruction, Stash]]],
) -> None:
    step, log = run
    placement = step.schedule.pipeline.placement
    for rank, instructions in enumerate(step.schedule.lists):
        listed = [i for i in instructions if i.op in ("run", "free", "send")]
        assert [i for i, _ in log if i.op != "update" and placement[i.stage] == rank] == listed


def test_updates_come_after_all_passes(run: tuple[PipelineStep, list[tuple[Instruction, Stash]]]) -> None:
    step, log = run
    first = next(n for n, (i, _) in enumerate(log) if i.op == "update")
    assert {i.op for i, _ in log[first:]} == {"update"}
    assert {i.stage for i, _ in log[first:]} == {*range(len(step.stages.stages))}


def test_the_stash_keeps_within_the_bound_and_reaches_it(
    run: tuple[PipelineStep, list[tuple[Instruction, Stash]]],
) -> None:
    step, log = run
    placement = step.schedule.pipeline.placement
    most: Counter[int] = Counter()
    forward: set[tuple[int, int]] = set()
    for i, stash in log:
        if i.op == "run" and i.kind == "F":
            forward.add((i.stage, i.microbatch))
        # right after a pass its stash is still there, though the list frees it only next
        held = Counter(placement[stage] for stage, _ in {*stash} & forward)
        most.update({rank: max(0, count - most[rank]) for rank, count in held.items()})
    stages = len(step.stages.stages)
    size = Size(RANKS, MICROBATCHES, stages // RANKS)
    assert tuple(most[rank] for rank in range(RANKS)) == bounds(step.schedule.name, size)
    assert not log[-1][1]


def test_zb_h1_puts_off_gradients_of_weights() -> None:
    model = zoo("mlp-toy", layers=4)
    args = jax.jit(model.init)(jax.random.key(0)), model.make_batch(jax.random.key(1))
    step = pipeline(model.step, args, (1, 1), "zb-h1", 4, (2,))
    log = [str(i) for i, _ in watched(step, *args)]
    assert any(log.index(f"W{stage}.{i}") > log.index(f"B{stage}.{i + 1}") for stage in range(RANKS) for i in range(3))
    assert all(log.index(f"W{stage}.{i}") > log.index(f"B{stage}.{i}") for stage in range(RANKS) for i in range(4))


def test_forty_steps_leave_nothing_behind() -> None:
    model = zoo("mlp-toy")
    state, batch = jax.jit(model.init)(jax.random.key(0)), model.make_batch(jax.random.key(1))
    step = pipeline(model.step, (state, batch), (1, 1), donated=range(len(jax.tree.leaves(state))))
    state, metrics = step(state, batch)
    alive: Counter[int] = Counter()
    gc.collect()
    gc.disable()  # nothing may wait for the collector
    try:
        for _ in range(40):
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
            alive[len(jax.live_arrays())] += 1
    finally:
        gc.enable()
    assert len(alive) == 1
