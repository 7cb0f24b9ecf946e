"""`autopar bench pipeline`: a pipeline's step against the simulator at measured prices, and what dispatching it takes.

Two ranks on two virtual CPU devices, each to have one core. XLA's CPU client gives all devices of a process one pool of
threads, whatever its flags say (seen on jaxlib 0.10.2 and 0.12.0): a kernel that is large enough runs on as many
threads as there are devices, and a device that waits lends its core to the other, so that no schedule has a bubble. The
model here (`narrow`) has layers of many small products, which jaxlib 0.10.2 runs on one thread, but for a fifth of the
time, and 0.12.0 on all; models of the zoo are for comparison. `threads`, CPU seconds per second while instructions run
one by one, is 1 where a pass has one thread, and less where other processes want the cores: then times mean little.

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
import jax.numpy as jnp

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
MODEL = "narrow"
TINY = "mlp-toy"
WARM_UP = 2
DISPATCHED = 50  # steps of the tiny model

#: Model of the zoo -> sizes with which a pass takes tens of milliseconds on one core.
BENCH_SIZES: Mapping[str, Mapping[str, Any]] = {"gpt-3m": {"layers": 4, "batch": 16}}
LAYERS, PRODUCTS, WIDTH, BATCH = 8, 384, 64, 256  # of `narrow`

#: What there is to keep kernels to one thread.
FLAGS = "--xla_cpu_multi_thread_eigen=false"
BUSY = "import numpy\na = numpy.ones((512, 512), 'float32')\nwhile True:\n    a @ a"

Row = dict[str, Any]
#: Operation, kind, stage, stage that it is for.
Key = tuple[str, str, int, int]


def narrow(layers: int = LAYERS, products: int = PRODUCTS, width: int = WIDTH, batch: int = BATCH) -> zoo.Model:
    """x <- x + tanh(x w), w a diagonal of `products` blocks of `width` x `width`; gradient descent on the mean square.

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
            x = x + jnp.tanh(jnp.matmul(x, w))
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
        return replace(self.step, blocking=True, watch=self.clock)

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
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:RANKS])
    if "dispatch" in spec:
        yield dispatch(spec["dispatch"])
        return
    worker.cpu_devices(RANKS)
    name = spec["model"]
    model = narrow() if name == MODEL else zoo.build(name, **BENCH_SIZES.get(name, {}))
    variants: list[Variant] = []
    for schedule in spec["schedules"]:
        step = built(model, RANKS, 1, schedule, MICROBATCHES)
        variants.append(Variant(step, placed(step, model)))
    for variant in variants:
        for _ in range(WARM_UP):
            variant.run()
    take_turns(variants, spec["repeats"])
    for variant in variants:
        prices = prices_of(variant.clock, len(variant.step.stages.stages), spec["repeats"])
        yield row(name, variant.step.schedule, prices, variant.times, variant.threads)


def take_turns(variants: Sequence[Variant], repeats: int) -> None:
    """A step one by one and a step as it runs, of every schedule in turn."""
    with neighbour() as child:
        for r in range(repeats):
            for k in range(len(variants)):
                variant = variants[(r + k) % len(variants)]
                with awake(child):
                    variant.price()
                variant.times.append(variant.run())


def row(model: str, schedule: Schedule, prices: Prices, times: Sequence[float], threads: Sequence[float]) -> Row:
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
        "threads": statistics.median(threads),
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
        f"ratio {found['ratio']:.3f}; bubble {found['bubble']:.1%}, simulated {found['simulated_bubble']:.1%}; "
        f"threads {found['threads']:.2f}"
    )


def table(found: Row) -> str:
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
