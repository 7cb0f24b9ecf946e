"""A parallel function that threads share: planned once, and handed to the devices one step after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.api import parallel_function, parallelize
from autopar.bench.equal.case import dear
from autopar.runtime.executables import Executable
from tests.programs.steps import array, loss, sgd, two_layers
from tests.programs.test_real_programs import assert_equal

pytestmark = pytest.mark.core
THREADS = 4


def step(params: Any, x: jax.Array) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x)
    return sgd(params, grads), value


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """The results of functions that threads of their own begin to call at the same time."""
    barrier = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        barrier.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, functions))


def test_first_calls_from_threads_plan_and_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[str] = []
    compiled: list[str] = []
    plan, compile_step = parallel_function.plan_step, parallel_function.Lowered.compile

    def slow_plan(*args: Any, **kwargs: Any) -> Any:
        planned.append(threading.current_thread().name)
        time.sleep(0.05)  # so that the other threads come meanwhile
        return plan(*args, **kwargs)

    def counted(*args: Any, **kwargs: Any) -> Any:
        compiled.append(threading.current_thread().name)
        return compile_step(*args, **kwargs)

    monkeypatch.setattr(parallel_function, "plan_step", slow_plan)
    monkeypatch.setattr(parallel_function.Lowered, "compile", counted)
    run = parallelize(step, mesh=(8,), donate_argnums=())
    args = two_layers(), array(16, 8)
    results = at_once(*[lambda: run(*args)] * THREADS)
    assert len(planned) == len(compiled) == 1
    for result in results:
        assert_equal(result, jax.jit(step)(*args))


def test_two_functions_are_handed_to_the_devices_one_after_the_other() -> None:
    inside: list[int] = []
    most: list[int] = []

    def slow(leaves: Sequence[Any]) -> Sequence[Any]:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return leaves

    tree = jax.tree.structure([0])
    plan = parallelize(jnp.sin, mesh=(8,)).plan(array(8))
    steps = [Executable(plan, {}, tree, slow) for _ in range(THREADS)]
    at_once(*[lambda step=step: step.run([0]) for step in steps])
    assert most == [1] * THREADS


def test_a_pipeline_and_a_step_on_the_same_devices_called_from_threads_end() -> None:
    args = two_layers(), array(16, 8)
    options: dict[str, Any] = {"mesh": (8,), "cluster": dear((8,)), "donate_argnums": ()}
    staged, whole = parallelize(step, stages=2, **options), parallelize(step, **options)
    assert staged.plan(*args).collectives
    assert whole.plan(*args).collectives
    results = at_once(*[lambda: [jax.block_until_ready(f(*args)) for f in (staged, whole)]] * THREADS)
    for result in (result for both in results for result in both):
        assert_equal(result, jax.jit(step)(*args))
