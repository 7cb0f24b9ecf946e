"""`autopar bench predictions`: predicted peak memory against what the compiler reports, over the zoo.

    compiled   = arguments + results - aliased + temporaries of `memory_analysis()`, bytes per device
    predicted  = `Liveness.peak` of the plan on the target's backend
    error      = predicted / compiled - 1

Programs are compiled as they would run, for virtual CPU devices or for a described TPU or GPU, and never run. Each
model is planned twice: "free" as the optimizer likes, and "tight" within a budget a quarter of the way from the least
memory of any plan to that of the free one. One worker per model.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar import codegen, jax_compat, tpu_topology, zoo
from autopar.bench import worker
from autopar.cluster import Cluster, LogicalMesh
from autopar.cost_models.backends import BACKENDS
from autopar.cost_models.memory import Liveness
from autopar.cost_models.memory_report import report
from autopar.errors import ArgumentError
from autopar.planning import Options, Planned, make_plan
from autopar.trace import Traced, trace

CLUSTER = "dgx-h100"  # who prices the plans; any plan will do
PLANS = ("free", "tight")
MOST_MEDIAN, MOST = 0.10, 0.25  # what the errors are to stay within
TIGHT = 0.25  # where the tight budget lies between the least peak and that of the free plan

#: Target -> model -> (mesh, sizes) with which a device holds between 64 MiB and 2 GiB.
CASES: Mapping[str, Mapping[str, tuple[tuple[int, ...], Mapping[str, Any]]]] = {
    "cpu": {
        "mlp-toy": ((8,), {"layers": 4, "batch": 524288}),
        "mlp-1b": ((2, 4), {"layers": 2, "batch": 8192}),
        "gpt-3m": ((8,), {"layers": 3, "batch": 64, "seq": 256}),
        "gpt-10m": ((2, 4), {"layers": 3, "batch": 64}),
        "gpt-125m": ((8,), {"layers": 1, "batch": 32, "seq": 256, "dtype": "float32"}),
        "gpt-3m-scan": ((2, 4), {"layers": 6, "batch": 64}),
        "gpt-3m-remat": ((8,), {"layers": 3, "batch": 256}),
        "gpt-3m-scan-remat": ((2, 4), {"layers": 6, "batch": 128}),
        "gpt-3m-tied": ((8,), {"layers": 2, "batch": 256}),
        "llama3-toy": ((2, 4), {"batch": 2048, "seq": 64}),
        "llama3-toy-scan": ((8,), {"layers": 3, "batch": 1024, "seq": 64}),
        "moe-toy": ((2, 4), {"batch": 1024, "seq": 64}),
        "wresnet-toy": ((8,), {"batch": 4096}),
        "vit-toy": ((2, 4), {"batch": 8192}),
        "unet-toy": ((8,), {"batch": 4096}),
        "rnn-toy": ((2, 4), {"batch": 2048, "seq": 64}),
        "flax-nnx-toy": ((8,), {"batch": 8192}),
        "flax-linen-toy": ((2, 4), {"batch": 65536}),
        "equinox-toy": ((8,), {"batch": 524288}),
    },
    "tpu": {
        "mlp-1b": ((2, 4), {"layers": 2, "batch": 8192}),
        "gpt-3m": ((8,), {"layers": 2, "batch": 512, "seq": 256}),
        "gpt-10m": ((2, 4), {"layers": 2, "batch": 512}),
        "gpt-125m": ((8,), {"layers": 2, "batch": 32, "seq": 512, "dtype": "float32"}),
        "gpt-3m-scan": ((2, 4), {"layers": 3, "batch": 512}),
        "gpt-3m-remat": ((8,), {"layers": 3, "batch": 2048}),
        "llama3-toy": ((2, 4), {"batch": 8192, "seq": 64}),
        "moe-toy": ((2, 4), {"batch": 8192, "seq": 64}),
        "vit-toy": ((8,), {"batch": 32768}),
        "rnn-toy": ((8,), {"batch": 16384, "seq": 64}),
    },
}

Row = dict[str, Any]


def run(
    target: str = "cpu", models: Sequence[str] | None = None, tell: Callable[[str], None] = lambda text: None
) -> list[Row]:
    """Rows of a target: "cpu", or "tpu:TOPOLOGY" such as "tpu:v5e:2x4"; `tell` hears of each as it is done.

    Raises:
        ArgumentError: an unknown target, or a model that has no sizes for it.
        WorkerError: a program does not compile.
    """
    cases = CASES.get(target.partition(":")[0])
    if cases is None:
        raise ArgumentError(f"target={target!r} is not known. Available: cpu, tpu:v5e:2x4 and the like")
    specs: list[Row] = []
    for model in cases if models is None else models:
        if model not in cases:
            raise ArgumentError(f"{model!r} has no sizes for {target}. Available: {', '.join(cases)}")
        mesh, sizes = cases[model]
        specs.append({"target": target, "model": model, "mesh": mesh, "sizes": sizes})
    return worker.collect("autopar.bench.predictions", specs, tell, line)


def line(row: Row) -> str:
    """One row for people; bytes in MiB."""
    sizes = " ".join(f"{key}={value}" for key, value in row["sizes"].items())
    mesh = "x".join(map(str, row["mesh"]))
    mib = {key: row[key] / 2**20 for key in ("predicted", "compiled", "predicted_arguments", "compiled_arguments")}
    return (
        f"{row['model']:<18} {sizes:<38} {mesh:<4} {row['plan']:<8}{mib['predicted']:>8.0f} {mib['compiled']:>8.0f} "
        f"{100 * row['error']:>+6.1f}%   {mib['predicted_arguments']:.0f}/{mib['compiled_arguments']:.0f}"
    )


def table(rows: Sequence[Row]) -> str:
    """A line for each row, then the errors of all."""
    head = f"{'model':<18} {'sizes':<38} {'mesh':<4} {'plan':<8}{'MiB':>8} {'compiled':>8} {'error':>7}   arguments"
    f = figures(rows)
    foot = f"median error {100 * f['median']:.1f}%, worst {100 * f['worst']:.1f}%, lowest {100 * f['lowest']:+.1f}%"
    return "\n".join([head, *map(line, rows), foot])


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Median and largest magnitude of the errors, and the lowest error (an underestimate is negative)."""
    errors = [row["error"] for row in rows]
    magnitudes = list(map(abs, errors))
    return {"rows": len(rows), "median": statistics.median(magnitudes), "worst": max(magnitudes), "lowest": min(errors)}


# One worker


def measure(model: str, sizes: Mapping[str, Any], mesh: Sequence[int], target: str, kind: str) -> Row:
    """Plan, predict and compile one model in this process."""
    built = zoo.build(model, **sizes)
    traced = trace(built.step, *built.abstract_args())
    logical = Cluster.preset(CLUSTER, hosts=max(1, math.prod(mesh) // 8)).logical_mesh(mesh)
    planned = make_plan(traced, logical, CLUSTER, Options())
    if kind == "tight":
        planned = make_plan(traced, logical, CLUSTER, Options(memory_budget=_tight_budget(planned, traced, logical)))
    backend = BACKENDS[target.partition(":")[0]]
    memory = report(Liveness(planned.graph, planned.model, logical, backend), planned.solution.assignment)
    begin = time.perf_counter()
    stats = compiled(planned, traced.in_avals, target).memory_analysis()
    found = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    found += stats.temp_size_in_bytes
    kinds = ("parameters", "optimizer state", "arguments")
    return {
        "model": model,
        "sizes": dict(sizes),
        "mesh": list(mesh),
        "plan": kind,
        "target": target,
        "predicted": memory.peak_bytes,
        "compiled": found,
        "error": memory.peak_bytes / found - 1,
        "predicted_arguments": sum(memory.kinds.get(k, 0) for k in kinds),
        "compiled_arguments": stats.argument_size_in_bytes,
        "kinds": dict(memory.kinds),
        "at": memory.at,
        "compile_s": time.perf_counter() - begin,
    }


def _tight_budget(free: Planned, traced: Traced, mesh: LogicalMesh) -> float:
    """Bytes per device."""
    least = make_plan(traced, mesh, CLUSTER, Options(memory_budget="min"))
    smallest, largest = (p.plan.stages[0].peak_memory_bytes for p in (least, free))
    return smallest + TIGHT * (largest - smallest)


def compiled(planned: Planned, avals: Sequence[Any], target: str) -> Any:
    """The plan's program compiled for a target, with the options that it would run with."""
    platform, _, topology = target.partition(":")
    sizes, names = planned.plan.mesh_sizes, planned.plan.mesh_names
    with jax_compat.automatic_axes():
        if platform == "cpu":
            mesh = jax_compat.auto_mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), names)
        else:
            mesh = tpu_topology.mesh(topology, sizes, names)
        return codegen.program(planned.graph, planned.plan, planned.rules, mesh).jit().lower(*avals).compile()


def work(spec: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of one model."""
    worker.cpu_devices(math.prod(spec["mesh"]))
    for kind in PLANS:
        yield measure(spec["model"], spec["sizes"], spec["mesh"], spec["target"], kind)


if __name__ == "__main__":
    worker.serve(work)
