"""`autopar bench step`: autopar's step against the same model sharded by hand, on 8 virtual CPU devices.

The experts write what they would in a paper's code, plain `jax.jit` with in and out shardings and a donated state:

    data        the batch cut over all devices, the state whole            (Li et al., 2020)       `_data`
    megatron    weights by the model's own table, the batch whole          (Shoeybi et al., 2019)  `_megatron`
    fsdp        batch cut; each state leaf cut on its longest dimension    (Rajbhandari et al.,    `_fsdp`
                that divides                                                2020, stage 3)

All steps take turns in one process, in an order that rotates, each on its own state and the same host batch; medians
are compared. One worker per model.
"""

from __future__ import annotations

import fnmatch
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar import jax_compat, zoo
from autopar.bench import worker
from autopar.errors import ArgumentError

DEVICES = 8
WARM_UP = 2  # steps of each variant before the clock starts
TARGET = 1.05  # autopar over the best expert

#: Model -> sizes with which a step takes tens of milliseconds on two cores.
BENCH_SIZES: Mapping[str, Mapping[str, Any]] = {
    "mlp-toy": {"layers": 4, "batch": 16384},
    "gpt-3m": {"layers": 2, "batch": 16, "seq": 64},
    "gpt-toy-scan": {"layers": 4, "batch": 128, "seq": 32},
    "llama3-toy": {"batch": 128, "seq": 32},
    "moe-toy": {"batch": 128, "seq": 32},
    "vit-toy": {"batch": 256},
    "wresnet-toy": {"batch": 64},
    "unet-toy": {"batch": 128},
    "rnn-toy": {"batch": 128, "seq": 32},
}
MODELS = tuple(BENCH_SIZES)

Row = dict[str, Any]
Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(slots=True)
class Variant:
    """A step with its own state; `times` in s."""

    name: str
    step: Step
    state: Any
    times: list[float] = field(default_factory=list)

    def run(self, batch: Any) -> float:
        """Seconds of one step, from host batch to finished results."""
        begin = time.perf_counter()
        self.state, metrics = self.step(self.state, batch)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - begin


# The experts


def _data(path: str, shape: tuple[int, ...], model: zoo.Model) -> PartitionSpec:
    return PartitionSpec()


def _megatron(path: str, shape: tuple[int, ...], model: zoo.Model) -> PartitionSpec:
    for pattern, spec in model.megatron:
        if fnmatch.fnmatch(path, pattern) or fnmatch.fnmatch(path, f"*/{pattern}"):
            fits = len(spec) <= len(shape) and all(n % DEVICES == 0 for n, a in zip(shape, spec, strict=False) if a)
            return PartitionSpec(*("devices" if axis else None for axis in spec)) if fits else PartitionSpec()
    return PartitionSpec()


def _fsdp(path: str, shape: tuple[int, ...], model: zoo.Model) -> PartitionSpec:
    best = max((d for d, n in enumerate(shape) if n % DEVICES == 0), key=lambda d: (shape[d], -d), default=None)
    return PartitionSpec() if best is None else PartitionSpec(*[None] * best, "devices")


@dataclass(frozen=True)
class Expert:
    """Where one school of hand-sharding puts a state leaf, and whether it cuts the batch."""

    place: Callable[[str, tuple[int, ...], zoo.Model], PartitionSpec]
    cuts_batch: bool


EXPERTS: Mapping[str, Expert] = {
    "data": Expert(_data, True),
    "megatron": Expert(_megatron, False),
    "fsdp": Expert(_fsdp, True),
}


def expert(name: str, model: zoo.Model, mesh: Mesh) -> Variant:
    """One expert's step with its state in place."""
    school = EXPERTS[name]
    shapes, _ = model.abstract_args()

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        text = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, school.place(text, leaf.shape, model))

    placed = jax.tree_util.tree_map_with_path(sharding, shapes)
    batch = NamedSharding(mesh, PartitionSpec("devices") if school.cuts_batch else PartitionSpec())
    step = jax.jit(model.step, in_shardings=(placed, batch), out_shardings=(placed, None), donate_argnums=0)
    return Variant(name, step, jax.jit(model.init, out_shardings=placed)(jax.random.key(0)))


def _applies(name: str, model: zoo.Model) -> bool:
    """Megatron needs a table."""
    return name != "megatron" or bool(model.megatron)


def ours(model: zoo.Model, batch: Any) -> tuple[Variant, autopar.Plan]:
    """autopar's step, everything chosen, on the local devices."""
    step = autopar.parallelize(model.step)
    plan = step.plan(model.abstract_args()[0], batch)
    return Variant("autopar", step, step.init(model.init, jax.random.key(0))), plan


# Measuring


def take_turns(variants: Sequence[Variant], batches: Sequence[Any], repeats: int) -> None:
    """Fill in the times; who goes first changes every round."""
    for variant in variants:
        for i in range(WARM_UP):
            variant.run(batches[i % len(batches)])
    for r in range(repeats):
        for k in range(len(variants)):
            variant = variants[(r + k) % len(variants)]
            variant.times.append(variant.run(batches[r % len(batches)]))


def row(model: str, variants: Sequence[Variant], plan: autopar.Plan) -> Row:
    """Medians, the best expert, the ratio of autopar's median to its, and the median of the ratios of each round."""
    times = {v.name: v.times for v in variants}
    medians = {name: statistics.median(t) for name, t in times.items()}
    best = min((name for name in medians if name != "autopar"), key=lambda name: medians[name])
    return {
        "model": model,
        "sizes": dict(BENCH_SIZES.get(model, {})),
        "devices": DEVICES,
        "mesh": list(plan.mesh_sizes),
        "predicted_s": plan.step_time_s,
        "median_s": medians,
        "best_expert": best,
        "ratio": medians["autopar"] / medians[best],
        "paired_ratio": statistics.median(a / b for a, b in zip(times["autopar"], times[best], strict=True)),
        "repeats": len(variants[0].times),
        "raw_s": times,
    }


def work(spec: Mapping[str, Any]) -> Iterator[Row]:
    """The row of one model."""
    worker.cpu_devices(DEVICES)
    name = spec["model"]
    model = zoo.build(name, **BENCH_SIZES.get(name, {}))
    batches = [jax.tree.map(np.asarray, model.make_batch(jax.random.key(i))) for i in range(WARM_UP)]
    mesh = jax_compat.auto_mesh(np.array(jax.devices()[:DEVICES]), ("devices",))
    mine, plan = ours(model, batches[0])
    variants = [mine, *(expert(e, model, mesh) for e in EXPERTS if _applies(e, model))]
    take_turns(variants, batches, spec["repeats"])
    yield row(name, variants, plan)


def run(models: Sequence[str], repeats: int, tell: Callable[[str], None] = lambda text: None) -> list[Row]:
    """A row for every model. WorkerError where one dies, ArgumentError if there are none."""
    if not models:
        raise ArgumentError(f"no models given; with sizes for this benchmark: {', '.join(MODELS)}")
    specs = [{"model": model, "repeats": repeats} for model in models]
    return worker.collect("autopar.bench.step", specs, tell, line)


def line(row: Row) -> str:
    """One row for people."""
    times = "  ".join(f"{name} {1e3 * t:.1f}" for name, t in row["median_s"].items())
    mesh = "x".join(map(str, row["mesh"]))
    ratios = f"ratio to {row['best_expert']} {row['ratio']:.3f}, in pairs {row['paired_ratio']:.3f}"
    return f"{row['model']:<14} mesh {mesh:<6} ms: {times}  {ratios}"


def table(rows: Sequence[Row]) -> str:
    """All rows, and the largest ratio."""
    worst = max(rows, key=lambda r: r["ratio"])
    return "\n".join([*map(line, rows), f"largest ratio: {worst['ratio']:.3f} ({worst['model']}); target {TARGET}"])


if __name__ == "__main__":
    worker.serve(work)
