"""What the processes of a launch do in test_processes.py; process 0 prints a JSON object per case.

python -m autopar.cli launch ... launched_steps.py CASE ...
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar import jax_compat
from autopar.bench.equal import case as equal_case
from autopar.bench.equal.pipeline_case import BATCH
from autopar.bench.processes.soak import memory
from autopar.compile.agreement import TRANSPORT
from autopar.errors import AutoparError
from autopar.runtime.faults import watch

DEVICES = 4
ME = jax.process_index()


@cache
def baseline() -> equal_case.Single:
    """Three steps of one device, of one block: every process compiles all of it."""
    return equal_case.single("mlp-toy", "float64", BATCH, layers=1)


def difference(**options: Any) -> Mapping[str, Any]:
    """Largest relative difference of three steps from those of one device."""
    single = baseline()
    ours = equal_case.parallel(single.inputs, replans=False, cluster=equal_case.dear((DEVICES,)), **options)
    numbers, wrong = equal_case.compared(single, ours.run, "float64", DEVICES)
    return {
        "loss": numbers.loss,
        "state": numbers.leaf,
        "wrong": [*wrong, *ours.habits],
        "stages": len(ours.plan.stages),
        "transport": TRANSPORT in ours.plan.notes,
    }


def loss_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A step of two layers."""

    def loss(w: jax.Array) -> jax.Array:
        return (jnp.tanh(x @ w[0]) @ w[1]).var()

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


plain_step = jax.jit(loss_step)


@cache
def in_two_stages() -> Callable[..., Any]:
    """The step in a pipeline of one microbatch, planned and compiled once for the cases that run it."""
    return autopar.parallelize(loss_step, stages=2, mesh=(DEVICES,), num_microbatches=1)


W, X = np.ones((2, 8, 8)), np.linspace(0.0, 1.0, 64).reshape(8, 8)


def refusal(call: Callable[[], Any]) -> Mapping[str, Any]:
    """The error of every process."""
    try:
        call()
        text = "no error"
    except AutoparError as error:
        text = f"{type(error).__name__}: {error}"
    return {"errors": from_all(text)}


def from_all(text: str) -> list[str]:
    """The texts of all processes."""
    store = jax_compat.process_store()
    store.put(f"test/{CASE}/{ME}", text.encode())
    return [(store.get(f"test/{CASE}/{i}", 60.0) or b"").decode() for i in range(jax.process_count())]


def a_batch_that_differs() -> Any:
    return in_two_stages()(W, X + ME)


def a_pin_without_an_argument() -> Any:
    pins = {"weights": jax.sharding.PartitionSpec("x")}
    return autopar.parallelize(loss_step, mesh=(DEVICES,), pins=pins)(W, X)


def a_function_for_each_process() -> Any:
    """Each process multiplies by another number."""
    step = autopar.parallelize(lambda w, x: loss_step(w, x * (2 + ME)), mesh=(DEVICES,))
    return step(W, X)


def a_batch_as_parts() -> Mapping[str, Any]:
    """A batch that is a global array, of which each process makes its part, and results that every process reads."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    rows = len(X) // jax.process_count()
    batch = jax.make_array_from_process_local_data(sharding, X[ME * rows : (ME + 1) * rows])
    step = in_two_stages()
    w, loss = step(W, batch)
    w, loss = step(w, batch)
    plain_w, _ = plain_step(W, X)
    plain_w, plain_loss = plain_step(plain_w, X)
    differs = np.abs(autopar.gather(w) - np.asarray(plain_w)).max()
    return {"loss": abs(float(loss) - float(plain_loss)), "state": float(differs)}


def tied_step(w: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """A step whose first and last layer have the same weights."""

    def loss(w: Any) -> jax.Array:
        y = jnp.tanh(x @ w["ends"])
        for inner in w["inner"]:
            y = y + jnp.tanh(y @ inner)
        return jnp.square(y @ w["ends"].T - x).mean()

    value, gradient = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, gradient), value


def weights_of_two_stages() -> Mapping[str, Any]:
    """Three steps with weights that the first stage and the last one share, whose gradients both compute."""
    cluster = equal_case.dear((DEVICES,))
    options: Mapping[str, Any] = {"stages": 2, "num_microbatches": 2, "schedule": "zb-h1", "cluster": cluster}
    step, single = autopar.parallelize(tied_step, mesh=(DEVICES,), **options), jax.jit(tied_step)
    w: Any = {"ends": np.sin(W[0] * np.arange(8)), "inner": [np.cos(X), np.cos(2 * X)]}
    single_w, losses = w, list[float]()
    for number in range(3):
        w, loss = step(w, X + number)
        single_w, single_loss = single(single_w, X + number)
        losses.append(abs(float(loss) / float(single_loss) - 1))
    differences = equal_case.differences(autopar.gather(w), single_w)
    return {"loss": max(losses), "state": max(differences.values()), "stages": len(step.plan(w, X).stages)}


def prefetched_batches() -> Mapping[str, Any]:
    """Whole batches that are prefetched, for a step on one mesh and for one in stages."""
    batches = [X + number for number in range(4)]
    differences = list[tuple[float, float]]()
    for step in (autopar.parallelize(loss_step, mesh=(DEVICES,), stages=1), in_two_stages()):
        w, loss, single_w, single_loss = W, 0.0, W, 0.0
        for x in autopar.prefetch(iter(batches), step):
            w, loss = step(w, x)
        for x in batches:
            single_w, single_loss = plain_step(single_w, x)
        state = np.abs(autopar.gather(w) - np.asarray(single_w)).max()
        differences.append((abs(float(loss) - float(single_loss)), float(state)))
    losses, states = zip(*differences, strict=True)
    return {"loss": max(losses), "state": max(states)}


def a_checkpoint(folder: str) -> Mapping[str, Any]:
    """A pipeline's state is saved several times without a wait, and restored onto one mesh of all processes."""
    options: Mapping[str, Any] = {"num_microbatches": 1, "donate_argnums": ()}
    state = {"w": W, "count": np.int64(3)}

    def step(state: Any, x: jax.Array) -> Any:
        w, loss = loss_step(state["w"], x)
        return {"w": w, "count": state["count"] + 1}, loss

    pipeline, one_mesh = (autopar.parallelize(step, mesh=(DEVICES,), stages=stages, **options) for stages in (2, 1))
    state, _ = pipeline(state, X)
    savings = [autopar.save_checkpoint(folder, state, pipeline, keep=3) for _ in range(3)]
    names = [saving.wait().name for saving in savings]
    one_mesh.plan(state, X)
    restored = autopar.restore_checkpoint(folder, one_mesh)
    ours, expected = (one_mesh(restored, X)[1], pipeline(state, X)[1])
    return {
        "loss": abs(float(ours) - float(expected)),
        "state": 0.0,
        "w": autopar.gather(state["w"]).tolist(),
        "names": names,
    }


def forty_steps() -> Mapping[str, Any]:
    """Live arrays of every process after ten steps and after forty, and the loss beside that of one device."""
    step = in_two_stages()
    w, single_w, live, loss, expected = W, W, list[tuple[int, int]](), 0.0, 0.0
    for number in range(1, 41):
        w, value = step(w, X)
        single_w, single_value = plain_step(single_w, X)
        loss, expected = float(value), float(single_value)
        if number in (10, 40):
            for thread in threading.enumerate():
                if thread.name == watch.NAME:
                    thread.join()  # it keeps the first step's loss until it has seen that it is ready
            count = memory()
            live.append((count.buffers, count.buffer_bytes))
    every = from_all(json.dumps(live))
    return {"loss": abs(loss - expected), "live": [json.loads(text) for text in every]}


def a_process_that_dies() -> Mapping[str, Any]:
    """Process 1 is killed between two steps."""
    step, w = in_two_stages(), W
    for i in range(4):
        w, loss = step(w, X)
        float(loss)
        if ME == 1 and i == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return {}


def an_infinite_batch() -> Any:
    """The gradient is the product of an infinity and zero."""
    return autopar.parallelize(loss_step, mesh=(DEVICES,), debug_nans=True)(W, np.where(X > 0.5, np.inf, X))


CASES: Mapping[str, Callable[..., Mapping[str, Any]]] = {
    "one mesh": lambda: difference(mesh=(2, 2)),
    "1f1b": lambda: difference(mesh=(DEVICES,), stages=2, schedule="1f1b"),
    "tied": weights_of_two_stages,
    "two stages each": lambda: difference(mesh=(DEVICES,), stages=4, schedule="1f1b"),
    "spanning": lambda: difference(mesh=(DEVICES,), stages=2, schedule="1f1b"),
    "parts": a_batch_as_parts,
    "prefetched": prefetched_batches,
    "batch differs": lambda: refusal(a_batch_that_differs),
    "pin": lambda: refusal(a_pin_without_an_argument),
    "nan": lambda: refusal(an_infinite_batch),
    "death": a_process_that_dies,
    "checkpoint": a_checkpoint,
    "forty": forty_steps,
    "functions": lambda: refusal(a_function_for_each_process),
}

if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    gc.set_threshold(200_000, 20, 20)  # as in conftest.py
    warnings.simplefilter("ignore")
    for argument in sys.argv[1:]:
        CASE, _, folder = argument.partition("=")
        row = CASES[CASE](folder) if folder else CASES[CASE]()
        if ME == 0:
            print("ROW", json.dumps({"case": CASE, **row}), flush=True)
