"""Updates take over the state that they replace, after all passes, and never what the caller keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.errors import StageError
from autopar.runtime import PipelineStep
from autopar.zoo import build as zoo
from tests.runtime.test_runtime import QUICK, assert_close, checked, pipeline
from tests.support.effort import sample


@pytest.fixture(scope="module", autouse=True)
def doubles() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def arguments(name: str) -> tuple[Any, Any, Any]:
    model = zoo(name, dtype="float64")
    return model, jax.jit(model.init)(jax.random.key(0)), model.make_batch(jax.random.key(1))


@pytest.fixture(scope="module")
def donating() -> tuple[PipelineStep, Any, Any, Any]:
    """A step that takes over its state; the model, a state where it belongs, and a batch."""
    model, state, batch = arguments("mlp-toy")
    step = pipeline(model.step, (state, batch), (1, 2), donated=range(len(jax.tree.leaves(state))))
    return step, model, state, batch


def in_place(step: PipelineStep, state: Any) -> Any:
    """A copy of a state where the step holds it."""
    leaves, tree = jax.tree.flatten(state)
    return jax.tree.unflatten(
        tree, [jax.device_put(x.copy(), w) for x, w in zip(leaves, step.argument_shardings, strict=False)]
    )


def addresses(tree: Any) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for shard in x.addressable_shards]


def test_new_state_is_where_old_state_was(donating: tuple[PipelineStep, Any, Any, Any]) -> None:
    step, _, state, batch = donating
    old = jax.block_until_ready(in_place(step, state))
    arrays, where = len(jax.live_arrays()), addresses(old)
    new, metrics = jax.block_until_ready(step(old, batch))
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
    assert len(jax.live_arrays()) == arrays + len(jax.tree.leaves(metrics))
    assert sorted(addresses(new)) == sorted(where)


def test_updates_alias_all_bytes_of_the_state(donating: tuple[PipelineStep, Any, Any, Any]) -> None:
    step, _, state, _ = donating
    programs = {name: program for name, program in step.programs.items() if "update" in name}
    aliased = sum(program.memory_analysis().alias_size_in_bytes for program in programs.values())
    held = (x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(in_place(step, state)))
    assert aliased == sum(held)  # by one device of each stage


def test_arrays_that_lie_elsewhere_are_kept(donating: tuple[PipelineStep, Any, Any, Any]) -> None:
    """Stage 0 is on the very device where these are; what the other stage gets of them may share their memory."""
    step, model, state, batch = donating
    moved = jax.device_put(state, jax.devices()[1])
    before = jax.tree.map(jnp.copy, moved)
    got = step(moved, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves(moved))
    assert_close(moved, before)
    assert_close(got, jax.jit(model.step, compiler_options=QUICK)(state, batch))


def test_an_array_that_is_two_arguments_is_taken_over_once(donating: tuple[PipelineStep, Any, Any, Any]) -> None:
    step, model, state, batch = donating
    state = in_place(step, state)
    adam = state["opt"][0]
    state["opt"] = (adam._replace(nu=adam.mu), *state["opt"][1:])  # both are zeros
    expected = jax.jit(model.step, compiler_options=QUICK)(jax.device_put(state, jax.devices()[0]), batch)
    assert_close(step(state, batch), expected)


CASES = [
    ("gpt-toy-tied", "interleaved-1f1b", (1, 1), (1, 2, 3), 1e-9),
    ("gpt-toy-tied", "zb-h1", (2, 1), (2,), 1e-9),
    ("gpt-toy-master", "1f1b", (2, 2), (2,), 1e-5),  # masters and moments are float32
]


@pytest.mark.parametrize(
    ("name", "schedule", "sizes", "borders", "tolerance"),
    sample(CASES, CASES[1:]),
)
def test_steps_that_take_over_their_state_are_those_of_one_device(
    name: str, schedule: str, sizes: Any, borders: Any, tolerance: float
) -> None:
    """Tied weights, which two stages read; masters, whose update waits for the norm of all gradients."""
    model, state, batch = arguments(name)
    count = len(jax.tree.leaves(state))
    step = pipeline(model.step, (state, batch), sizes, schedule, 4, borders, donated=range(count))
    taken = sum(map(len, step.compiled.donated))
    assert count // 2 < taken <= count
    undivided = jax.jit(model.step, compiler_options=QUICK)
    got, expected = (in_place(step, state), {}), (state, {})
    for _ in range(3):
        got, expected = step(got[0], batch), undivided(expected[0], batch)
        assert_close(got, expected, tolerance)


# Errors


def broken(*args: Any) -> Any:
    raise RuntimeError("no more")


@pytest.mark.parametrize("kind", ["F", "B"])
@pytest.mark.parametrize("stage", [0, 1])
def test_an_error_in_any_pass_leaves_the_state_usable(
    donating: tuple[PipelineStep, Any, Any, Any], stage: int, kind: Any
) -> None:
    """Also in the last pass of all, when the other stage is done with its own."""
    step, model, state, batch = donating
    state = in_place(step, state)
    calls = iter(range(step.stages.split.count - 1))  # all microbatches but the last

    def last(*args: Any) -> Any:
        return broken() if next(calls, None) is None else step.compiled.passes[stage][kind](*args)

    passes = list(step.compiled.passes)
    passes[stage] = {**passes[stage], kind: last}
    failing = replace(step, compiled=replace(step.compiled, passes=tuple(passes)))
    with pytest.raises(StageError, match=rf"^stage {stage} failed in {kind}{stage}\.3: no more") as caught:
        failing(state, batch)
    assert "used up" not in str(caught.value)
    expected = jax.jit(model.step, compiler_options=QUICK)(jax.device_put(state, jax.devices()[0]), batch)
    assert_close(step(state, batch), expected)


def test_updates_that_call_the_host_take_nothing_over() -> None:
    """Nor do those before them: what the host refuses leaves the whole state usable."""
    state = {"a": jnp.eye(4), "b": jnp.eye(4)}
    batch = {"x": jnp.ones((8, 4)), "t": jnp.ones(8, jnp.float32)}
    step = pipeline(checked, (state, batch), (1, 1), count=2, donated=range(2))
    calling = [any(p.op.name == "pure_callback" for p in u.ops) for u in step.stages.updates.programs]
    last = len(calling) - calling[::-1].index(True)
    assert not any(step.compiled.donated[:last])


def test_an_error_in_an_update_says_that_state_may_be_gone(donating: tuple[PipelineStep, Any, Any, Any]) -> None:
    step, _, state, batch = donating
    state = in_place(step, state)
    updates = (*step.compiled.updates[:-1], broken)
    failing = replace(step, compiled=replace(step.compiled, updates=updates))
    with pytest.raises(StageError, match=r"failed in new\d\.3: no more; state may be used up in part: go on from"):
        failing(state, batch)
    assert any(x.is_deleted() for x in jax.tree.leaves(state))
