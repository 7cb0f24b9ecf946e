"""Prefetched batches are those of the iterator, in its order, where the step takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import ArgumentError

W = {"up": np.linspace(-1.0, 1.0, 8 * 16, dtype=np.float32).reshape(8, 16), "down": np.ones((16, 8), np.float32)}


def train_step(w: Any, batch: Any) -> Any:
    def loss(w: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(batch["x"] @ w["up"]) @ w["down"] - batch["y"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, gradient), value


def batch(number: int, rows: int = 16) -> Any:
    x = np.random.default_rng(number).standard_normal((rows, 8), np.float32)
    return {"x": x, "y": np.tanh(x)}


def parallel(**options: Any) -> Any:
    return autopar.parallelize(train_step, pins=autopar.pins.data_parallel("data"), **options)


ONE_MESH = {"mesh": {"data": 8}}


@pytest.mark.parametrize("options", [ONE_MESH, {"mesh": {"data": 8}, "stages": 2}], ids=["one mesh", "two stages"])
def test_steps_with_prefetched_batches_are_those_without(options: Any) -> None:
    def losses(prefetched: bool) -> list[float]:
        step, w, values = parallel(**options), W, list[float]()
        batches = map(batch, range(5))
        for each in autopar.prefetch(batches, step) if prefetched else batches:
            w, loss = step(w, each)
            values.append(float(loss))
        return values

    ours = losses(prefetched=True)
    assert len(ours) == 5
    assert ours == losses(prefetched=False)


def test_the_first_batch_is_as_it_is_and_later_ones_are_where_the_step_takes_them() -> None:
    step, w = parallel(**ONE_MESH), W
    batches = autopar.prefetch(map(batch, range(4)), step)
    first = next(batches)
    assert isinstance(first["x"], np.ndarray)
    w, _ = step(w, first)
    expected = step.compiled(w, first).taken_at[2]
    for later in batches:
        assert later["x"].sharding.is_equivalent_to(expected, 2)
        assert len(later["x"].sharding.device_set) == 8
        w, _ = step(w, later)


def test_a_pipeline_s_batch_goes_to_the_first_stage_that_reads_it() -> None:
    step, w = parallel(mesh={"data": 8}, stages=2), W
    w, _ = step(w, batch(0))
    (placed,) = autopar.prefetch([batch(1)], step)
    first, last = (stage.rank for stage in step.last_plan.stages)
    assert first != last
    assert len(placed["x"].sharding.device_set) == len(placed["y"].sharding.device_set) == 4
    assert placed["x"].sharding.device_set.isdisjoint(placed["y"].sharding.device_set)
    step(w, placed)


def test_so_many_batches_wait_behind_the_one_that_is_returned() -> None:
    taken: list[int] = []

    def loader() -> Iterator[Any]:
        for number in range(10):
            taken.append(number)
            yield batch(number)

    batches = autopar.prefetch(loader(), parallel(**ONE_MESH), size=3)
    assert taken == []
    next(batches)
    assert taken == [0, 1, 2, 3]
    next(batches)
    assert taken == [0, 1, 2, 3, 4]


def test_a_loader_may_use_its_memory_again() -> None:
    step, memory = parallel(**ONE_MESH), batch(0)
    step(W, memory)

    def loader() -> Iterator[Any]:
        for number in range(4):
            memory["x"][...], memory["y"][...] = batch(number)["x"], batch(number)["y"]
            yield memory

    for number, each in enumerate(autopar.prefetch(loader(), step)):
        np.testing.assert_array_equal(np.asarray(each["x"]), batch(number)["x"])


def test_an_error_of_the_iterator_is_raised_in_place_of_its_batch() -> None:
    def loader() -> Iterator[Any]:
        yield batch(0)
        yield batch(1)
        raise OSError("the disk is gone")

    batches = autopar.prefetch(loader(), parallel(**ONE_MESH), size=4)
    assert [each["x"].shape for each in (next(batches), next(batches))] == [(16, 8)] * 2
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


def test_a_batch_of_another_shape_is_returned_as_it_is() -> None:
    step = parallel(**ONE_MESH)
    step(W, batch(0))
    placed, smaller = autopar.prefetch([batch(1), batch(2, rows=3)], step)
    assert isinstance(placed["x"], jax.Array)
    assert isinstance(smaller["x"], np.ndarray)


@pytest.mark.parametrize(
    ("batches", "step", "size", "words"),
    [
        ([], train_step, 2, "must be what autopar.parallelize returns"),
        ([], parallel(**ONE_MESH), 0, "size=0 must be at least 1"),
        (3, parallel(**ONE_MESH), 2, "batches=3 must be iterable"),
    ],
)
def test_mistakes_are_refused_before_the_first_batch(batches: Any, step: Any, size: int, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        autopar.prefetch(batches, step, size)
