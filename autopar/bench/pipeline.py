"""`autopar bench pipeline`: a pipeline's step against the simulator at measured prices, and what dispatching it takes.

Two stages, or chunks of stages, on two virtual CPU devices, each kernel on one thread, for every schedule:

    pass, send, update    every instruction waited for, while another process keeps the other core busy; medians
    simulated             the schedule's lists played at these prices
    measured              the step as it runs, the schedules taking turns; median
    bubble                1 - what both devices compute, by these prices, over twice the step

What begins a step (cutting the batch, empty sums) is priced with the updates. Dispatch is the time from one instruction
to the next in a step of a tiny model that nobody waits for, on submeshes of one and of two devices.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax

from autopar import zoo
from autopar.bench import worker
from autopar.cost_models.pipeline import Prices, simulate
from autopar.prepare import prepare
from autopar.report.text import seconds
from autopar.report.text import table as grid
from autopar.runtime import PipelineStep
from autopar.runtime.run import Stash
from autopar.schedules import Instruction, Schedule
from autopar.settings import settings

RANKS = 2
MICROBATCHES = 4
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1")
MODEL = "gpt-3m"
TINY = "mlp-toy"
WARM_UP = 2
DISPATCHED = 50  # steps of the tiny model

#: Model -> sizes with which a pass takes tens of milliseconds on one core.
BENCH_SIZES: Mapping[str, Mapping[str, Any]] = {"gpt-3m": {"layers": 4, "batch": 16}}

#: Each kernel on one thread, so that two devices are two cores.
FLAGS = "--xla_cpu_multi_thread_eigen=false"
BUSY = "import numpy\na = numpy.ones((512, 512), 'float32')\nwhile True:\n    a @ a"

Row = dict[str, Any]
#: Operation, kind, stage, stage that it is for.
Key = tuple[str, str, int, int]


@dataclass(slots=True)
class Clock:
    """Seconds of every instruction, from the end of the one before; the first of a step comes with its beginning."""

    last: float = 0.0
    first: bool = False
    begins: list[float] = field(default_factory=list)
    times: dict[Key, list[float]] = field(default_factory=dict)

    def start(self) -> None:
        """Begin a step."""
        self.first, self.last = True, time.perf_counter()

    def __call__(self, i: Instruction, stash: Stash) -> None:
        took, self.last = time.perf_counter() - self.last, time.perf_counter()
        found = self.begins if self.first else self.times.setdefault((i.op, i.kind, i.stage, i.to), [])
        found.append(took)
        self.first = False

    def median(self, op: str, kind: str, stage: int, to: int = -1) -> float:
        """s of one instruction; 0 for what there is none of."""
        return statistics.median(self.times.get((op, kind, stage, to), [0.0]))

    def updates(self, stage: int, steps: int) -> float:
        """s of all updates of a stage in a step, which run in one order in each of so many."""
        found = self.times.get(("update", "", stage, -1), [])
        count = len(found) // steps
        return math.fsum(statistics.median(found[k::count]) for k in range(count))

    def beginning(self) -> float:
        """s before the first pass, which is of stage 0."""
        return max(0.0, statistics.median(self.begins) - self.median("run", "F", 0))


@contextlib.contextmanager
def neighbour() -> Iterator[subprocess.Popen[bytes]]:
    """A process that multiplies matrices on one core whenever it is woken; it sleeps at first."""
    env = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")}
    with subprocess.Popen([sys.executable, "-c", BUSY], env=env) as child:
        try:
            child.send_signal(signal.SIGSTOP)
            yield child
        finally:
            child.kill()


@contextlib.contextmanager
def awake(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """While the neighbour works."""
    child.send_signal(signal.SIGCONT)
    try:
        yield
    finally:
        child.send_signal(signal.SIGSTOP)


def built(model: zoo.Model, ranks: int, devices: int, schedule: str, microbatches: int) -> PipelineStep:
    """The model's step as a pipeline on the first devices, as many on every rank."""
    options = settings(
        {"stages": ranks, "mesh": (ranks * devices,), "num_microbatches": microbatches, "schedule": schedule}
    )
    return prepare(model.step, model.abstract_args(), {}, options, local=True).build()


def placed(step: PipelineStep, model: zoo.Model) -> list[Any]:
    """Leaves of arguments, the state where the step holds it."""
    args = model.init(jax.random.key(0)), model.make_batch(jax.random.key(1))
    leaves = jax.tree.leaves(args)
    return [x if home is None else jax.device_put(x.copy(), home) for x, home in zip(leaves, step.homes, strict=True)]


def advance(step: PipelineStep, leaves: Sequence[Any]) -> list[Any]:
    """The arguments of the next step: the new state, the same batch."""
    results = jax.block_until_ready(step.results(leaves))
    state = sum(home is not None for home in step.homes)
    return [*results[:state], *leaves[state:]]


@dataclass(eq=False)
class Variant:
    """One schedule under measurement: its clock has the instructions one by one, `times` whole steps, s."""

    name: str
    step: PipelineStep
    leaves: list[Any]
    clock: Clock = field(default_factory=Clock)
    times: list[float] = field(default_factory=list)

    def run(self) -> float:
        """Seconds of one step."""
        begin = time.perf_counter()
        self.leaves = advance(self.step, self.leaves)
        return time.perf_counter() - begin

    @cached_property
    def alone(self) -> PipelineStep:
        """The step with every instruction waited for."""
        return replace(self.step, blocking=True, watch=self.clock)

    def price(self) -> None:
        """One step in which every instruction is waited for."""
        self.clock.start()
        self.leaves = advance(self.alone, self.leaves)


def prices_of(clock: Clock, stages: int, steps: int) -> Prices:
    """What the instructions of so many steps took."""
    return Prices(
        *(tuple(clock.median("run", kind, s) for s in range(stages)) for kind in "FBW"),
        transfer={(a, to): clock.median(op, kind, a, to) for op, kind, a, to in clock.times if op == "send"},
        update=tuple(clock.updates(s, steps) + clock.beginning() / stages for s in range(stages)),
    )


def work(spec: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of all schedules, or of dispatch."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:RANKS])
    if "dispatch" in spec:
        yield dispatch(spec["dispatch"])
        return
    worker.cpu_devices(RANKS)
    model = zoo.build(spec["model"], **BENCH_SIZES.get(spec["model"], {}))
    variants: list[Variant] = []
    for name in spec["schedules"]:
        step = built(model, RANKS, 1, name, MICROBATCHES)
        variants.append(Variant(name, step, placed(step, model)))
    for variant in variants:
        for _ in range(WARM_UP):
            variant.run()
    take_turns(variants, spec["repeats"])
    for variant in variants:
        prices = prices_of(variant.clock, len(variant.step.stages.stages), spec["repeats"])
        yield row(spec["model"], variant.step.schedule, prices, variant.times)


def take_turns(variants: Sequence[Variant], repeats: int) -> None:
    """A step one by one and a step as it runs, of every schedule in turn."""
    with neighbour() as child:
        for r in range(repeats):
            for k in range(len(variants)):
                variant = variants[(r + k) % len(variants)]
                with awake(child):
                    variant.price()
                variant.times.append(variant.run())


def row(model: str, schedule: Schedule, prices: Prices, times: Sequence[float]) -> Row:
    """A schedule measured and simulated."""
    played, measured = simulate(schedule, prices), statistics.median(times)
    passes = prices.passes(schedule.pipeline.split)
    return {
        "model": model,
        "schedule": schedule.name,
        "microbatches": schedule.pipeline.microbatches,
        "pass_s": {kind: list(passes[kind]) for kind in schedule.pipeline.kinds},
        "once_s": list(prices.update),
        "transfer_s": {f"{a}>{b}": t for (a, b), t in sorted(prices.transfer.items())},
        "simulated_s": played.seconds,
        "measured_s": measured,
        "ratio": measured / played.seconds,
        "simulated_bubble": played.bubble,
        "bubble": 1 - math.fsum(played.busy) / (len(played.busy) * measured),
        "raw_s": list(times),
    }


def dispatch(devices: int) -> Row:
    """Microseconds per instruction on submeshes of so many devices."""
    worker.cpu_devices(RANKS * devices)
    model, clock = zoo.build(TINY), Clock()
    step = built(model, RANKS, devices, "1f1b", MICROBATCHES)
    leaves = placed(step, model)
    for _ in range(WARM_UP):
        leaves = advance(step, leaves)
    watched = replace(step, watch=clock)
    for _ in range(DISPATCHED):
        clock.start()
        leaves = advance(watched, leaves)
    by_op = {
        op: [t for key, found in clock.times.items() if key[0] == op for t in found]
        for op in ("run", "send", "free", "update")
    }
    every = [t for op, found in by_op.items() if op != "free" for t in found]
    return {
        "model": TINY,
        "devices": devices,
        "median_us": 1e6 * statistics.median(every),
        "by_us": {op: 1e6 * statistics.median(found) for op, found in by_op.items()},
    }


def run(model: str, repeats: int, tell: Callable[[str], None] = lambda text: None) -> Row:
    """{"rows": a row per schedule, "dispatch": a row per size of submesh}; WorkerError where a worker dies."""
    env = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()}
    rows: list[Row] = []
    for found in worker.lines(
        "autopar.bench.pipeline", {"model": model, "schedules": SCHEDULES, "repeats": repeats}, env
    ):
        rows.append(found)
        tell(line(found))
    dispatched = [one for n in (1, 2) for one in worker.lines("autopar.bench.pipeline", {"dispatch": n}, env)]
    return {"rows": rows, "dispatch": dispatched, **figures(rows)}


def figures(rows: Sequence[Row]) -> Row:
    """The worst ratio, and the schedules by their measured bubbles, largest first."""
    by_bubble = sorted(rows, key=lambda r: -r["bubble"])
    return {
        "worst_ratio": max((r["ratio"] for r in rows), key=lambda ratio: abs(math.log(ratio))),
        "by_bubble": [r["schedule"] for r in by_bubble],
    }


def line(found: Row) -> str:
    """One row for people."""
    return (
        f"{found['schedule']:<17} measured {seconds(found['measured_s'])}, simulated {seconds(found['simulated_s'])}, "
        f"ratio {found['ratio']:.3f}; bubble {found['bubble']:.1%}, simulated {found['simulated_bubble']:.1%}"
    )


def table(found: Row) -> str:
    """A line per schedule, the passes of the stages, and dispatch."""
    heads = ("", "measured", "simulated", "ratio", "bubble", "simulated", "passes of stages")
    lines = [
        (
            r["schedule"],
            seconds(r["measured_s"]),
            seconds(r["simulated_s"]),
            f"{r['ratio']:.3f}",
            f"{r['bubble']:.1%}",
            f"{r['simulated_bubble']:.1%}",
            "; ".join(f"{kind} {' '.join(map(seconds, times))}" for kind, times in r["pass_s"].items()),
        )
        for r in found["rows"]
    ]
    dispatched = (
        f"dispatch on {d['devices']} device{'s' * (d['devices'] > 1)} per stage: {d['median_us']:.0f} us "
        f"({', '.join(f'{op} {us:.0f}' for op, us in d['by_us'].items())})"
        for d in found["dispatch"]
    )
    return "\n".join([grid("schedule", heads, lines), *dispatched, f"worst ratio {found['worst_ratio']:.3f}"])


if __name__ == "__main__":
    worker.serve(work)
