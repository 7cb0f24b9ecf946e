"""`autopar bench soak`: thousands of steps over several processes; does memory grow, and is the loss one device's?

A pipeline of two stages of gpt-toy in float64 runs under 1F1B. After a tenth of the steps and at the end, after a
collection of garbage, every process counts

    resident    bytes of memory that the system has given to it (Linux)
    buffers     arrays of JAX that are alive, and their bytes

Numbers of buffers have to be equal, and resident memory may grow by `GROWTH` at most: what allocators keep varies. One
device then runs the same steps. Rounding grows over so many: a second run on one device, whose batches have their
examples in reverse order, shows how much. The last loss has to be within `TOLERANCE` of that of one device, or within
`TIMES` what the second run differs by.
"""

from __future__ import annotations

import gc
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax

import autopar
from autopar import jax_compat, zoo
from autopar.bench import worker
from autopar.bench.equal.case import dear

MODEL, BATCH, BATCHES = "gpt-toy", 16, 8
DEVICES = 2  # of a process
GROWTH = 8 * 2**20  # bytes
TOLERANCE, TIMES = 1e-9, 10.0

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Memory:
    """What a process has: bytes of resident memory; number of live arrays, and their bytes on its devices."""

    resident: int
    buffers: int
    buffer_bytes: int


def memory() -> Memory:
    """Of this process, after a collection of garbage."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    arrays = jax.live_arrays()
    here = sum(
        prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize * len(x.sharding.addressable_devices) for x in arrays
    )
    return Memory(pages * os.sysconf("SC_PAGE_SIZE"), len(arrays), here)


def run(steps: int, processes: int = 2) -> Row:
    """The figures of a soak; WorkerError if it ends otherwise."""
    (row,) = worker.launched(processes, DEVICES, __file__, {"steps": steps}, {"AUTOPAR_CACHE_DIR": ""})
    return row


def work(spec: Mapping[str, Any]) -> Iterator[Row]:
    """The figures of all processes, in process 0."""
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")
    steps, devices = spec["steps"], DEVICES * jax.process_count()
    model = zoo.build(MODEL, dtype="float64", batch=BATCH)
    batches = [jax.tree.map(jax.device_get, model.make_batch(jax.random.key(1 + i))) for i in range(BATCHES)]
    first = jax.tree.map(jax.device_get, model.init(jax.random.key(0)))
    options: Any = {"mesh": (devices,), "stages": 2, "num_microbatches": 2, "schedule": "1f1b"}
    step = autopar.parallelize(model.step, cluster=dear((devices,)), **options)
    state, losses, seen = first, list[float](), list[Memory]()
    for number in range(steps):
        state, metrics = step(state, batches[number % BATCHES])
        losses.append(float(metrics["loss"]))
        if number + 1 in (steps // 10, steps):
            seen.append(memory())
    talk = jax_compat.process_store().conversation("soak")
    every = [json.loads(said) for said in talk.from_all("memory", lambda: json.dumps([*map(asdict, seen)]).encode())]
    if jax.process_index() > 0:
        return
    single = _single(model, first, batches, steps)
    reverse = _single(model, first, [jax.tree.map(lambda x: x[::-1], batch) for batch in batches], steps)
    difference, rounding = abs(losses[-1] - single) / abs(single), abs(reverse - single) / abs(single)
    grew = [after["resident"] - before["resident"] for before, after in every]
    same = all(before["buffers"] == after["buffers"] for before, after in every)
    yield {
        "steps": steps,
        "processes": every,
        "first_loss": losses[0],
        "loss": losses[-1],
        "single": single,
        "difference": difference,
        "rounding": rounding,
        "ok": same and max(grew) <= GROWTH and difference <= max(TOLERANCE, TIMES * rounding),
    }


def _single(model: zoo.Model, state: Any, batches: Sequence[Any], steps: int) -> float:
    """The last loss of one device."""
    step, metrics = jax.jit(model.step, donate_argnums=0), dict[str, Any]()
    state = jax.device_put(state, jax.local_devices()[0])
    for number in range(steps):
        state, metrics = step(state, batches[number % BATCHES])
    return float(metrics["loss"])


def table(row: Row) -> str:
    """A line per process, and the loss."""
    lines = [
        f"process {i}: {before['resident'] / 2**20:.1f} MiB resident after {row['steps'] // 10} steps, "
        f"{after['resident'] / 2**20:.1f} MiB after {row['steps']}; {before['buffers']} live arrays "
        f"({before['buffer_bytes']:,} bytes), then {after['buffers']} ({after['buffer_bytes']:,})"
        for i, (before, after) in enumerate(row["processes"])
    ]
    loss = (
        f"the loss fell from {row['first_loss']:.4f} to {row['loss']:.10f}; one device has {row['single']:.10f}, "
        f"relative difference {row['difference']:.1e}; with the examples of each batch in reverse order it has "
        f"{row['rounding']:.1e}"
    )
    return "\n".join((*lines, loss))


if __name__ == "__main__":
    worker.serve(work)
