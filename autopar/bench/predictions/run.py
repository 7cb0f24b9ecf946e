"""`autopar bench predictions`: predicted peak memory against what the compiler reports, over the zoo
programs with dropout, batch norm in half floats and padding masks (`autopar.bench.predictions.programs`), and on CPU
steps around single operations (`autopar.bench.predictions.operations`).

    compiled   = arguments + results - aliased + temporaries of `memory_analysis()`, bytes per device
    predicted  = `Stage.peak_memory_bytes` of the plan on the target's backend
    error      = predicted / compiled - 1

Programs are compiled as they would run, for virtual CPU devices or for a described TPU, and never run. Each model is
planned up to four times, by the memory model of the target's compiler:

    free         as the optimizer likes
    tight        within a budget a quarter of the way from the least peak without recomputation to that of the free plan
    layouts      within the same with nothing recomputed, where the tight plan recomputes something
    recomputed   within one a quarter of the way from the least peak with everything recomputed to the least without,
                 where recomputation saves a tenth

All but "layouts" are planned by default: layers are recomputed where that is the fastest way to fit. What layouts alone
save of the last percent they pay for dearly, in plans that hardly anybody wants; errors are told with and without.

Sizes: on CPU a device holds between 64 MiB and 2 GiB. On TPU the batch is a power of two with which the free plan needs
0.85 to 2 GiB, since much of a smaller program is in on-chip memory (128 MiB), and sequences have 128 tokens or more,
where they can be chosen, since shorter ones do not fill a row of a tile. "mlp-1b:4" is the model in four microbatches.

One worker per model.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from autopar import jax_compat, zoo
from autopar.bench import worker
from autopar.bench.predictions.operations import OPERATIONS
from autopar.bench.predictions.programs import PROGRAMS
from autopar.codegen import emit as codegen
from autopar.codegen.rewrites import accumulate_gradients
from autopar.cost_models.compiler.backends import backend_of
from autopar.errors import ArgumentError
from autopar.hardware import tpu_topology
from autopar.hardware.cluster import Cluster, LogicalMesh
from autopar.ir.trace import Traced, trace
from autopar.passes.microbatch.batch import infer_batch
from autopar.passes.remat.choose import AUTO
from autopar.passes.remat.options import Options
from autopar.passes.remat.rewrite import NONE
from autopar.plans.builders.one_mesh import Planned, make_plan

#: Who prices the plans of a platform; any plan will do.
CLUSTERS: Mapping[str, str] = {"cpu": "dgx-h100", "tpu": "tpu-v5e"}
PLANS = ("free", "tight", "layouts", "recomputed")
BY_ORDER = "layouts"  # planned with an option that is not the default
MOST, BELOW = 0.25, 0.10  # largest errors above and below the compiler's peak that tests allow
TIGHT = 0.25  # position of a tight budget between the least peak (0) and the peak without a budget (1)
WORTH = 0.9  # least peak with recomputation over the one without, below which a plan with it is made

#: Target -> model -> (mesh, sizes); see above.
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
        "dropout-gpt": ((8,), {"layers": 2, "batch": 64, "seq": 128}),
        "dropout-gpt-rbg": ((2, 4), {"layers": 1, "batch": 64, "seq": 128}),
        "padded-encoder": ((8,), {"layers": 2, "batch": 128, "seq": 128}),
        "half-gpt": ((8,), {"layers": 2, "batch": 128, "seq": 128}),
        "half-wresnet": ((8,), {"batch": 4096}),
        "unrolled-muon": ((8,), {"batch": 4096, "width": 1024}),
        "unrolled-mlp": ((8,), {"batch": 32768}),
        "head-integers": ((8,), {"batch": 64}),
        "head-logsumexp": ((8,), {"batch": 64}),
        "head-one-hot": ((8,), {"batch": 64}),
        "set-columns": ((8,), {"batch": 32768}),
        "set-block": ((8,), {"batch": 32768}),
        "rolled-maximum": ((8,), {"batch": 32768}),
        "running-product": ((8,), {"batch": 32768}),
        "looped-rows": ((8,), {"batch": 32768}),
        "resized-linear": ((8,), {"batch": 512}),
        "resized-nearest": ((8,), {"batch": 512}),
        "complex-product": ((8,), {"batch": 32768}),
        "lora-scan": ((8,), {"batch": 16384, "layers": 6}),
        "mlp-1b:4": ((2, 4), {"layers": 2, "batch": 32768}),
        "gpt-10m:4": ((2, 4), {"layers": 3, "batch": 256}),
        "llama3-toy:4": ((8,), {"batch": 8192, "seq": 64}),
    },
    "tpu": {
        "mlp-toy": ((8,), {"layers": 4, "batch": 8388608}),
        "mlp-1b": ((2, 4), {"layers": 2, "batch": 8192}),
        "gpt-3m": ((8,), {"layers": 2, "batch": 1024, "seq": 256}),
        "gpt-10m": ((2, 4), {"layers": 2, "batch": 1024}),
        "gpt-125m": ((8,), {"layers": 2, "batch": 32, "seq": 512, "dtype": "float32"}),
        "gpt-3m-scan": ((2, 4), {"layers": 3, "batch": 512}),
        "gpt-3m-remat": ((8,), {"layers": 3, "batch": 4096}),
        "gpt-3m-scan-remat": ((2, 4), {"layers": 6, "batch": 4096}),
        "gpt-3m-tied": ((8,), {"layers": 2, "batch": 4096}),
        "llama3-toy": ((2, 4), {"batch": 8192, "seq": 128}),
        "llama3-toy-scan": ((8,), {"layers": 3, "batch": 2048, "seq": 128}),
        "moe-toy": ((2, 4), {"batch": 4096, "seq": 128}),
        "wresnet-toy": ((8,), {"batch": 131072}),
        "vit-toy": ((8,), {"batch": 65536}),
        "unet-toy": ((8,), {"batch": 65536}),
        "rnn-toy": ((8,), {"batch": 32768, "seq": 128}),
        "flax-nnx-toy": ((8,), {"batch": 4096, "seq": 128}),
        "flax-linen-toy": ((2, 4), {"batch": 524288}),
        "equinox-toy": ((8,), {"batch": 8388608}),
        "half-gpt": ((8,), {"layers": 2, "batch": 2048, "seq": 256}),
        "mlp-1b:4": ((2, 4), {"layers": 2, "batch": 8192}),
        "gpt-10m:4": ((2, 4), {"layers": 2, "batch": 4096}),
        "gpt-125m:4": ((8,), {"layers": 2, "batch": 128, "seq": 512, "dtype": "float32"}),
        "llama3-toy:4": ((2, 4), {"batch": 32768, "seq": 128}),
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
    return worker.collect("autopar.bench.predictions.run", list(_specs(target, models)), tell, line)


def _specs(target: str, models: Sequence[str] | None) -> Iterator[Row]:
    """What each worker measures: model, mesh and sizes."""
    cases = CASES.get(target.partition(":")[0])
    if cases is None:
        raise ArgumentError(f"target={target!r} is not known. Available: cpu, tpu:v5e:2x4 and the like")
    for model in cases if models is None else models:
        if model not in cases:
            raise ArgumentError(f"{model!r} has no sizes for {target}. Available: {', '.join(cases)}")
        mesh, sizes = cases[model]
        yield {"target": target, "model": model, "mesh": mesh, "sizes": sizes}


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
    by_default = [row for row in rows if row["plan"] != BY_ORDER]
    feet = [f"{_errors(by_default)} ({len(by_default)} plans by default)"] if by_default else []
    feet += [f"{_errors(rows)} (all {len(rows)})"] if len(by_default) < len(rows) else []
    return "\n".join([head, *map(line, rows), *feet])


def _errors(rows: Sequence[Row]) -> str:
    f = figures(rows)
    return f"median error {100 * f['median']:.1f}%, worst {100 * f['worst']:.1f}%, lowest {100 * f['lowest']:+.1f}%"


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Median and largest magnitude of the errors, and the lowest error (an underestimate is negative)."""
    errors = [row["error"] for row in rows]
    magnitudes = list(map(abs, errors))
    return {"rows": len(rows), "median": statistics.median(magnitudes), "worst": max(magnitudes), "lowest": min(errors)}


# One worker


@dataclass(frozen=True, eq=False)
class _Subject:
    """One model to plan: its trace, its mesh, and its plans within budgets."""

    traced: Traced
    mesh: LogicalMesh
    cluster: str

    def plan(self, budget: float | str | None = None, remat: str = NONE) -> Planned:
        return make_plan(self.traced, self.mesh, self.cluster, Options(memory_budget=budget, remat=remat))

    def plans(self) -> Iterator[tuple[str, Planned]]:
        """Each kind of `PLANS` that there is."""
        free = self.plan()
        yield "free", free
        least = self.plan("min")
        budget = between(_peak(least), _peak(free))
        tight = self.plan(budget, AUTO)
        yield "tight", tight
        if any(policy != NONE for policy in tight.plan.remat):
            yield BY_ORDER, self.plan(budget)
        smallest = _peak(self.plan("min", AUTO))
        if smallest < WORTH * _peak(least):
            yield "recomputed", self.plan(between(smallest, _peak(least)), AUTO)


def between(least: float, most: float) -> float:
    """A tight budget, bytes per device; where there is nothing to save, one for the least."""
    return least + TIGHT * max(0.0, most - least) + 1


def _peak(planned: Planned) -> float:
    return planned.plan.stages[0].peak_memory_bytes


def build(model: str, sizes: Mapping[str, Any]) -> zoo.Model:
    """A model of the zoo, `PROGRAMS` or `OPERATIONS` with these sizes; the number of its microbatches is left out."""
    model = model.partition(":")[0]
    programs = {**PROGRAMS, **OPERATIONS}
    return programs[model](**sizes) if model in programs else zoo.build(model, **sizes)


def subject(model: str, sizes: Mapping[str, Any], mesh: Sequence[int], platform: str) -> _Subject:
    """A model on a mesh of devices that the target's compiler is for."""
    built = build(model, sizes)
    name = CLUSTERS[platform]
    logical = Cluster.preset(name, hosts=max(1, math.prod(mesh) // 8)).logical_mesh(mesh)
    if backend_of(logical.device).name != platform:
        logical = replace(logical, device=replace(logical.device, name=platform))
    traced = trace(built.step, *built.abstract_args())
    if microbatches := model.partition(":")[2]:
        traced = accumulate_gradients(traced, int(microbatches), infer_batch(traced.graph), logical.size)
    return _Subject(traced, logical, name)


def measure(planned: Planned, avals: Sequence[Any], target: str) -> Row:
    """What was predicted of a plan, and what the compiler says."""
    begin = time.perf_counter()
    stats = compiled(planned, avals, target).memory_analysis()
    compiled_bytes = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    compiled_bytes += stats.temp_size_in_bytes
    peak, kinds = _peak(planned), planned.plan.stages[0].memory
    return {
        "predicted": peak,
        "compiled": compiled_bytes,
        "error": peak / compiled_bytes - 1,
        "predicted_arguments": sum(kinds.get(k, 0) for k in ("parameters", "optimizer state", "arguments")),
        "compiled_arguments": stats.argument_size_in_bytes,
        "kinds": dict(kinds),
        "recomputed": sum(policy != NONE for policy in planned.plan.remat),
        "compile_s": time.perf_counter() - begin,
    }


def compiled(planned: Planned, avals: Sequence[Any], target: str) -> Any:
    """The plan's program compiled for a target, with the options that it would run with."""
    platform, _, topology = target.partition(":")
    sizes, names = planned.plan.mesh_sizes, planned.plan.mesh_names
    with jax_compat.automatic_axes():
        if platform == "cpu":
            mesh = jax_compat.auto_mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), names)
        else:
            mesh = tpu_topology.mesh(topology, sizes, names)
        lowered = codegen.program(planned.graph, planned.plan, planned.rules, mesh).jit().lower(*avals)
        options = codegen.compiler_options(planned.plan, planned.graph, platform)
        return lowered.compile(compiler_options=dict(options) or None)


def rows(spec: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of one model, in this process."""
    planned_subject = subject(spec["model"], spec["sizes"], spec["mesh"], spec["target"].partition(":")[0])
    for kind, planned in planned_subject.plans():
        yield {**spec, "plan": kind, **measure(planned, planned_subject.traced.in_avals, spec["target"])}


def work(spec: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of one model; see `worker`."""
    worker.cpu_devices(math.prod(spec["mesh"]))
    yield from rows(spec)


if __name__ == "__main__":
    worker.serve(work)
