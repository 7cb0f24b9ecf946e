"""`autopar bench dispatch`: a pipeline's step in one, two and four processes: its instructions, and the simulator.

gpt-toy in two stages under 1F1B runs on four virtual CPU devices, divided among the processes. The plan is the same.

    step            median of steps that are waited for
    instructions    of a process: the passes, transfers and updates that concern its devices
    host            time from one instruction to the next in the thread that walks the list, nothing waited for but
                    transfers between processes; medians by kind
    compute         the passes and updates of the stage that takes longest, each waited for; an update also waits for
                    totals of other stages
    rest            (step - compute) / the most instructions of a process
    transfer        alpha + beta bytes, from arrays that go to and fro between the first and the last device
    simulated       simulation of the schedule's lists at these prices; where processes wait for transfers, these do
                    not overlap with computation
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar import jax_compat, zoo
from autopar.bench import worker
from autopar.bench.pipelines.simulated import Clock, Key, advance
from autopar.compile import plan_step
from autopar.cost_models.pipeline import Prices, simulate, transfer_times
from autopar.ir.text import seconds
from autopar.options import settings
from autopar.passes.stages.divide import Transfer
from autopar.runtime import PipelineStep
from autopar.runtime.executor import Stash
from autopar.runtime.transport import Transport, is_here, place
from autopar.schedules import Instruction

MODEL, BATCH, MICROBATCHES, STAGES = "gpt-toy", 16, 4, 2
DEVICES = 4
PROCESSES = (1, 2, 4)
WARM_UP = 5
SIZES = (2**10, 2**22)  # bytes of a calibrated transfer: latency is seen at the first, bandwidth at the second
REPEATS = 20  # of a calibrated transfer

Row = Mapping[str, Any]


def run(repeats: int, processes: Sequence[int], tell: Callable[[str], None] = lambda text: None) -> list[Row]:
    """A row per number of processes; WorkerError where a launch fails."""
    rows = list[Row]()
    for n in processes:
        (row,) = worker.launched(n, DEVICES // n, __file__, {"repeats": repeats}, {"AUTOPAR_CACHE_DIR": ""})
        rows.append(row)
        tell(line(row))
    return rows


# In a process of a launch


def work(spec: Mapping[str, Any]) -> Iterator[Row]:
    """The row of this number of processes, in process 0."""
    warnings.simplefilter("ignore")
    step, leaves = _built()
    for _ in range(WARM_UP):
        leaves = advance(step, leaves)
    times = list[float]()
    for _ in range(spec["repeats"]):
        begin = time.perf_counter()
        leaves = advance(step, leaves)
        times.append(time.perf_counter() - begin)
    host, leaves = _watched(step, leaves, spec["repeats"])
    alone, leaves = _watched(replace(step, blocking=True), leaves, spec["repeats"])
    sizes = _Sizes(step)
    advance(replace(step, observer=sizes), leaves)
    alpha, beta = calibrated()
    mine = {
        "host": _medians(step, host),
        "alone": _medians(step, alone),
        "begin": alone.beginning(),
        "instructions": _count(step),
    }
    every = _from_all(mine)
    if jax.process_index() > 0:
        return
    measured = statistics.median(times)
    prices = _prices(every, transfer_times(sizes.nbytes, alpha, beta))
    simulated = simulate(step.schedule, prices).seconds
    busy = max(_busy(every, stage) for stage in range(STAGES))
    count = max(x["instructions"] for x in every)
    yield {
        "processes": jax.process_count(),
        "step_s": measured,
        "instructions": [x["instructions"] for x in every],
        "host_us": {op: 1e6 * _host(every, op) for op in ("run", "send", "update")},
        "compute_s": busy,
        "rest_us": 1e6 * (measured - busy) / count,
        "alpha_us": 1e6 * alpha,
        "bandwidth": 1 / beta if beta > 0 else None,
        "transfer_bytes": sorted(sizes.nbytes.values()),
        "simulated_s": simulated,
        "ratio": measured / simulated,
    }


def _built() -> tuple[PipelineStep, list[Any]]:
    """The step, and its arguments where it takes them."""
    model = zoo.build(MODEL, batch=BATCH)
    options = {"stages": STAGES, "mesh": (DEVICES,), "num_microbatches": MICROBATCHES, "schedule": "1f1b"}
    step = plan_step(model.step, model.abstract_args(), {}, settings(options), local=True).build()
    arguments = model.init(jax.random.key(0)), model.make_batch(jax.random.key(1))
    leaves = jax.tree.leaves(jax.tree.map(np.asarray, arguments))
    return step, [x if s is None else place(x, s) for x, s in zip(leaves, step.argument_shardings, strict=True)]


def _watched(step: PipelineStep, leaves: list[Any], repeats: int) -> tuple[Clock, list[Any]]:
    """Times of the instructions of so many steps, and the arguments of the next."""
    clock = Clock()
    watched = replace(step, observer=clock)
    for _ in range(repeats):
        clock.start()
        leaves = advance(watched, leaves)
    return clock, leaves


def _concerns(step: PipelineStep, op: str, stage: int, to: int) -> bool:
    """Whether an instruction has work for this process."""
    stages = (stage, to) if op == "send" else (stage,)
    return op != "free" and any(is_here(step.planned.replicated(s)) for s in stages)


def _count(step: PipelineStep) -> int:
    """The instructions of a step that concern this process."""
    listed = sum(_concerns(step, i.op, i.stage, i.to) for i in step.lowered_schedule.order)
    return listed + sum(_concerns(step, "update", u.stage, -1) for u in step.lowered_schedule.updates)


def _medians(step: PipelineStep, clock: Clock) -> list[tuple[Key, float, int]]:
    """(instruction, its median in s, how often it is in a step) of those that concern this process."""
    steps = len(clock.begins)
    return [
        (key, statistics.median(times), len(times) // steps + (key[:3] == ("run", "F", 0)))  # the first is a beginning
        for key, times in clock.times.items()
        if _concerns(step, key[0], key[2], key[3])
    ]


class _Sizes:
    """Observes a step: the bytes of each transfer."""

    def __init__(self, step: PipelineStep) -> None:
        self.nbytes: dict[tuple[int, int], float] = {}
        self._sends = step.lowered_schedule.sends

    def __call__(self, i: Instruction, stash: Stash) -> None:
        if i.op == "send":
            values = self._sends[Transfer(i.kind, i.stage, i.to)].values
            arrays = [stash[i.to, i.microbatch][v] for v in values]
            self.nbytes[i.stage, i.to] = float(sum(x.size * np.dtype(x.dtype).itemsize for x in arrays))


def calibrated() -> tuple[float, float]:
    """(s, s per byte) of a transfer from the first to the last device, and back."""
    transport, first, last = Transport(), _on(jax.devices()[0]), _on(jax.devices()[-1])
    small, large = (_transfer_seconds(transport, first, last, nbytes) for nbytes in SIZES)
    beta = max(0.0, large - small) / (SIZES[1] - SIZES[0])
    return max(0.0, small - beta * SIZES[0]), beta


def _transfer_seconds(transport: Transport, here: NamedSharding, there: NamedSharding, nbytes: int) -> float:
    """Median seconds of one way of an array that is sent there and back."""
    array = place(np.zeros(nbytes // 4, np.float32), here)
    durations = list[float]()
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for end in (there, here):
            (array,) = transport.move([array], [end])
            if isinstance(array, jax.Array):
                array.block_until_ready()
        durations.append((time.perf_counter() - begin) / 2)
    return statistics.median(durations)


def _on(device: Any) -> NamedSharding:
    return NamedSharding(jax_compat.auto_mesh(np.array([device]), ("x",)), PartitionSpec())


def _from_all(mine: Mapping[str, Any]) -> list[Any]:
    """What every process has measured, in process 0; elsewhere what it has itself."""
    talk = jax_compat.process_store().conversation("dispatch")
    return [json.loads(said) for said in talk.from_all("figures", lambda: json.dumps(mine).encode())]


def _prices(every: Sequence[Any], transfer: Mapping[tuple[int, int], float]) -> Prices:
    """What instructions took in the process that computed longest."""
    slowest: dict[tuple[Any, ...], float] = {}
    for figures in every:
        for key, median, times in figures["alone"]:
            total = median * times if key[0] == "update" else median
            slowest[tuple(key)] = max(total, slowest.get(tuple(key), 0.0))
    begin = max(figures["begin"] for figures in every)
    passes = (tuple(slowest.get(("run", kind, s, -1), 0.0) for s in range(STAGES)) for kind in "FBW")
    update = tuple(slowest.get(("update", "", s, -1), 0.0) + begin / STAGES for s in range(STAGES))
    return Prices(*passes, transfer=transfer, update=update, overlap=len(every) == 1)


def _busy(every: Sequence[Any], stage: int) -> float:
    """s of the passes and updates of a stage in a step, in the process that takes longest."""
    return max(
        sum(median * n for key, median, n in figures["alone"] if key[0] != "send" and key[2] == stage)
        for figures in every
    )


def _host(every: Sequence[Any], op: str) -> float:
    """s from one instruction to the next, of all that are of a kind."""
    return statistics.median(median for figures in every for key, median, _ in figures["host"] if key[0] == op)


def line(row: Row) -> str:
    """One number of processes for people."""
    host = ", ".join(f"{op} {us:.0f} us" for op, us in row["host_us"].items())
    speed = "" if row["bandwidth"] is None else f" and {row['bandwidth'] / 1e9:.2f} GB/s"
    return (
        f"{row['processes']} processes: step {seconds(row['step_s'])}, simulated {seconds(row['simulated_s'])}, ratio "
        f"{row['ratio']:.2f}; {'/'.join(map(str, row['instructions']))} instructions, compute "
        f"{seconds(row['compute_s'])}, rest {row['rest_us']:.0f} us per instruction; on the host {host}; a transfer "
        f"{row['alpha_us']:.0f} us{speed}"
    )


def table(rows: Sequence[Row]) -> str:
    """The steps beside the first."""
    first = rows[0]
    return "\n".join(
        f"{row['processes']} processes: {row['step_s'] / first['step_s']:.2f} of the step in {first['processes']}"
        for row in rows
    )


if __name__ == "__main__":
    worker.serve(work)
