"""`autopar bench pipeline`: a pipeline's step against the simulator at measured prices, and what dispatching it takes.

Two ranks on two virtual CPU devices, each to have one core. Three things would lend a core that waits to the other,
so that no schedule had a bubble, or would drown it in noise:

    kernels   XLA's CPU client gives all devices of a process one pool of threads, whatever its flags say (seen on
              jaxlib 0.10.2 and 0.12.0). Elementwise operations are cut into as many pieces as the process may use cores
              when it compiles: here one. Products use the pool where they are large, and where many wait for nothing:
              the model here (`narrow`) has layers of many small ones, and stages of eight layers; jaxlib 0.10.2 runs
              these on one thread, 0.12.0 on all. Models of the zoo are for comparison
    clocks    cores share caches, memory and power, and may be threads of one core: on each there is a process of idle
              priority, which multiplies matrices whenever nothing else wants the core                  -> neighbours
    memory    arrays whose pages go back to the system when they are freed are mapped anew in every step, for up to half
              of its time: glibc is told to keep them                                            -> worker.KEEP

`threads`, CPU seconds per second while instructions run one by one, is 1 where a pass has one thread, and less where
other processes want the cores: then times mean little.

    pass, send, update    every instruction waited for; medians
    simulated             simulation of the schedule's lists at these costs
    measured              the step as it runs, right after the one that gave prices; the schedules take turns; median
    ratio                 measured over simulated of such a pair of steps; median
    bubble                1 - what both devices compute, by these prices, over twice the step; median over pairs

What begins a step (cutting the batch, empty sums) is priced with the updates. Dispatch is the time from one instruction
to the next in a step of a tiny model that nobody waits for, on submeshes of one and of two devices.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from autopar import zoo
from autopar.bench import worker
from autopar.compile import plan_step
from autopar.cost_models.pipeline import Prices, simulate
from autopar.ir.text import seconds
from autopar.ir.text import table as grid
from autopar.options import settings
from autopar.runtime import PipelineStep
from autopar.runtime.executor import Stash
from autopar.schedules import Instruction, Schedule

RANKS = 2
MICROBATCHES = 2  # the fewer, the more the bubbles of schedules differ
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1")
MODEL = "narrow"
TINY = "mlp-toy"
WARM_UP = 2
DISPATCHED = 50  # steps of the tiny model

#: Model of the zoo -> sizes with which a pass takes tens of milliseconds on one core.
BENCH_SIZES: Mapping[str, Mapping[str, Any]] = {"gpt-3m": {"layers": 4, "batch": 16}}
LAYERS, PRODUCTS, WIDTH, BATCH = 16, 64, 128, 128  # of `narrow`: arrays of a product fit into a core's cache

#: What there is to keep kernels to one thread.
FLAGS = "--xla_cpu_multi_thread_eigen=false"
#: A neighbour on the core of its argument.
BUSY = f"""
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, [int(sys.argv[1])])
import numpy
x, w = numpy.full(({PRODUCTS}, 64, {WIDTH}), 1e-3, "f"), numpy.full(({PRODUCTS}, {WIDTH}, {WIDTH}), 1e-3, "f")
y = x
while True:
    y = x + y @ w
"""

Row = dict[str, Any]
#: Operation, kind, stage, stage that it is for.
Key = tuple[str, str, int, int]


def narrow(layers: int = LAYERS, products: int = PRODUCTS, width: int = WIDTH, batch: int = BATCH) -> zoo.Model:
    """x <- x + max(x w, 0), w a diagonal of `products` blocks of `width` x `width`; gradient descent on the mean x^2.

    A layer's product on b examples is `products` products [b, width] [width, width], which run one after the other.
    """

    def init(key: jax.Array) -> Any:
        shape = (layers, products, width, width)
        return {"params": [*(0.1 * jax.random.normal(key, shape))]}

    def make_batch(key: jax.Array) -> Any:
        return {"x": jax.random.normal(key, (batch, products, width))}

    def loss(params: Any, inputs: Any) -> jax.Array:
        x = inputs["x"].swapaxes(0, 1)
        for w in params:
            x = x + jnp.maximum(jnp.matmul(x, w), 0)
        return jnp.mean(x**2)

    def step(state: Any, inputs: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], inputs)
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, {"loss": value}

    return zoo.Model("narrow", "narrow", step, init, make_batch)


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
        durations = self.begins if self.first else self.times.setdefault((i.op, i.kind, i.stage, i.to), [])
        durations.append(took)
        self.first = False

    def median(self, op: str, kind: str, stage: int, to: int = -1) -> float:
        """s of one instruction; 0 for what there is none of."""
        return statistics.median(self.times.get((op, kind, stage, to), [0.0]))

    def updates(self, stage: int, steps: int) -> float:
        """s of all updates of a stage in a step, which run in one order in each of so many."""
        durations = self.times.get(("update", "", stage, -1), [])
        count = len(durations) // steps
        return math.fsum(statistics.median(durations[k::count]) for k in range(count))

    def repeat(self, r: int, repeats: int) -> Clock:
        """What step r of so many has told."""
        times = {
            key: durations[r * len(durations) // repeats :][: len(durations) // repeats]
            for key, durations in self.times.items()
        }
        return Clock(begins=self.begins[r : r + 1], times=times)

    def beginning(self) -> float:
        """s before the first pass, which is of stage 0."""
        return max(0.0, statistics.median(self.begins) - self.median("run", "F", 0))


@contextlib.contextmanager
def neighbours(cores: Iterable[int]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """While a process of idle priority each keeps these cores busy whenever nothing else wants them."""
    env = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")}
    children = [subprocess.Popen([sys.executable, "-c", BUSY, str(core)], env=env) for core in cores]
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            child.wait()


def confine(cores: Iterable[int]) -> None:
    """Let all threads of this process run on these cores alone."""
    core_list = [*cores]
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), core_list)


def built(model: zoo.Model, ranks: int, devices: int, schedule: str, microbatches: int) -> PipelineStep:
    """The model's step as a pipeline on the first devices, as many on every rank."""
    options = settings(
        {"stages": ranks, "mesh": (ranks * devices,), "num_microbatches": microbatches, "schedule": schedule}
    )
    return plan_step(model.step, model.abstract_args(), {}, options, local=True).build()


def placed(step: PipelineStep, model: zoo.Model) -> list[Any]:
    """Leaves of arguments, the state where the step holds it."""
    args = model.init(jax.random.key(0)), model.make_batch(jax.random.key(1))
    leaves = jax.tree.leaves(args)
    return [
        x if sharding is None else jax.device_put(x.copy(), sharding)
        for x, sharding in zip(leaves, step.argument_shardings, strict=True)
    ]


def advance(step: PipelineStep, leaves: Sequence[Any]) -> list[Any]:
    """The arguments of the next step: the new state, the same batch."""
    results = jax.block_until_ready(step.results(leaves))
    state = sum(sharding is not None for sharding in step.argument_shardings)
    return [*results[:state], *leaves[state:]]


@dataclass(eq=False)
class Variant:
    """One schedule under measurement.

    Attributes:
        step, leaves: the step, and the arguments of the next one.
        clock: times of its instructions one by one.
        times: of whole steps, s.
        threads: CPU seconds per second of steps whose instructions run one by one.
    """

    step: PipelineStep
    leaves: list[Any]
    clock: Clock = field(default_factory=Clock)
    times: list[float] = field(default_factory=list)
    threads: list[float] = field(default_factory=list)

    def run(self) -> float:
        """Seconds of one step."""
        begin = time.perf_counter()
        self.leaves = advance(self.step, self.leaves)
        return time.perf_counter() - begin

    @cached_property
    def alone(self) -> PipelineStep:
        """The step with every instruction waited for."""
        return replace(self.step, blocking=True, observer=self.clock)

    def price(self) -> None:
        """One step in which every instruction is waited for."""
        begin, worked = time.perf_counter(), time.process_time()
        self.clock.start()
        self.leaves = advance(self.alone, self.leaves)
        self.threads.append((time.process_time() - worked) / (time.perf_counter() - begin))


def prices_of(clock: Clock, stages: int, steps: int) -> Prices:
    """What the instructions of so many steps took."""
    return Prices(
        *(tuple(clock.median("run", kind, s) for s in range(stages)) for kind in "FBW"),
        transfer={(a, to): clock.median(op, kind, a, to) for op, kind, a, to in clock.times if op == "send"},
        update=tuple(clock.updates(s, steps) + clock.beginning() / stages for s in range(stages)),
    )


def work(spec: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of all schedules, or of dispatch."""
    cores = sorted(os.sched_getaffinity(0))[:RANKS]
    if "dispatch" in spec:
        confine(cores)
        yield dispatch(spec["dispatch"])
        return
    confine(cores[:1])
    worker.cpu_devices(RANKS)
    name, repeats = spec["model"], spec["repeats"]
    model = narrow() if name == MODEL else zoo.build(name, **BENCH_SIZES.get(name, {}))
    variants: list[Variant] = []
    for schedule in spec["schedules"]:
        step = built(model, RANKS, 1, schedule, MICROBATCHES)
        variants.append(Variant(step, placed(step, model)))
    confine(cores)
    with neighbours(cores):
        take_turns(variants, WARM_UP)
        variants = [replace(v, clock=Clock(), times=[], threads=[]) for v in variants]
        take_turns(variants, repeats)
    for variant in variants:
        yield row(name, variant.step.schedule, variant.clock, variant.times, variant.threads)


def take_turns(variants: Sequence[Variant], repeats: int) -> None:
    """A step one by one and a step as it runs, of every schedule in turn."""
    for r in range(repeats):
        for k in range(len(variants)):
            variant = variants[(r + k) % len(variants)]
            variant.price()
            variant.times.append(variant.run())


def row(model: str, schedule: Schedule, clock: Clock, times: Sequence[float], threads: Sequence[float]) -> Row:
    """A schedule measured and simulated."""
    stages, repeats = len(schedule.pipeline.placement), len(times)
    prices = prices_of(clock, stages, repeats)
    simulated = simulate(schedule, prices)
    pairs = [(simulate(schedule, prices_of(clock.repeat(r, repeats), stages, 1)), t) for r, t in enumerate(times)]
    passes = prices.passes(schedule.pipeline.split)
    return {
        "model": model,
        "schedule": schedule.name,
        "microbatches": schedule.pipeline.microbatches,
        "pass_s": {kind: list(passes[kind]) for kind in schedule.pipeline.kinds},
        "once_s": list(prices.update),
        "transfer_s": {f"{a}>{b}": t for (a, b), t in sorted(prices.transfer.items())},
        "simulated_s": simulated.seconds,
        "measured_s": statistics.median(times),
        "ratio": statistics.median(t / simulation.seconds for simulation, t in pairs),
        "simulated_bubble": simulated.bubble,
        "bubble": statistics.median(
            1 - math.fsum(simulation.busy) / (len(simulation.busy) * t) for simulation, t in pairs
        ),
        "threads": statistics.median(threads),
        "raw_s": list(times),
        "raw_simulated_s": [simulation.seconds for simulation, _ in pairs],
    }


def dispatch(devices: int) -> Row:
    """Microseconds per instruction on submeshes of so many devices."""
    worker.cpu_devices(RANKS * devices)
    model, clock = zoo.build(TINY), Clock()
    step = built(model, RANKS, devices, "1f1b", MICROBATCHES)
    leaves = placed(step, model)
    for _ in range(WARM_UP):
        leaves = advance(step, leaves)
    watched = replace(step, observer=clock)
    for _ in range(DISPATCHED):
        clock.start()
        leaves = advance(watched, leaves)
    by_op = {
        op: [t for key, durations in clock.times.items() if key[0] == op for t in durations]
        for op in ("run", "send", "free", "update")
    }
    every = [t for op, durations in by_op.items() if op != "free" for t in durations]
    return {
        "model": TINY,
        "devices": devices,
        "median_us": 1e6 * statistics.median(every),
        "by_us": {op: 1e6 * statistics.median(durations) for op, durations in by_op.items()},
    }


def run(model: str, repeats: int, tell: Callable[[str], None] = lambda text: None) -> Row:
    """{"rows": a row per schedule, "dispatch": a row per size of submesh}; WorkerError where a worker dies."""
    env = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip(), **worker.KEEP}
    rows: list[Row] = []
    for row in worker.lines(
        "autopar.bench.pipelines.simulated", {"model": model, "schedules": SCHEDULES, "repeats": repeats}, env
    ):
        rows.append(row)
        tell(line(row))
    dispatched = [
        row for n in (1, 2) for row in worker.lines("autopar.bench.pipelines.simulated", {"dispatch": n}, env)
    ]
    return {"rows": rows, "dispatch": dispatched, **figures(rows)}


def figures(rows: Sequence[Row]) -> Row:
    """The worst ratio, and the schedules by their measured bubbles, largest first."""
    by_bubble = sorted(rows, key=lambda r: -r["bubble"])
    return {
        "worst_ratio": max((r["ratio"] for r in rows), key=lambda ratio: abs(math.log(ratio))),
        "by_bubble": [r["schedule"] for r in by_bubble],
    }


def line(row: Row) -> str:
    """One row for people."""
    return (
        f"{row['schedule']:<17} measured {seconds(row['measured_s'])}, simulated {seconds(row['simulated_s'])}, "
        f"ratio {row['ratio']:.3f}; bubble {row['bubble']:.1%}, simulated {row['simulated_bubble']:.1%}; "
        f"threads {row['threads']:.2f}"
    )


def table(result: Row) -> str:
    """A line per schedule, the passes of the stages, and dispatch."""
    heads = ("", "measured", "simulated", "ratio", "bubble", "simulated", "threads", "passes of stages")
    lines = [
        (
            r["schedule"],
            seconds(r["measured_s"]),
            seconds(r["simulated_s"]),
            f"{r['ratio']:.3f}",
            f"{r['bubble']:.1%}",
            f"{r['simulated_bubble']:.1%}",
            f"{r['threads']:.2f}",
            "; ".join(f"{kind} {' '.join(map(seconds, times))}" for kind, times in r["pass_s"].items()),
        )
        for r in result["rows"]
    ]
    dispatched = (
        f"dispatch on {d['devices']} device{'s' * (d['devices'] > 1)} per stage: {d['median_us']:.0f} us "
        f"({', '.join(f'{op} {us:.0f}' for op, us in d['by_us'].items())})"
        for d in result["dispatch"]
    )
    return "\n".join([grid("schedule", heads, lines), *dispatched, f"worst ratio {result['worst_ratio']:.3f}"])


if __name__ == "__main__":
    worker.serve(work)
