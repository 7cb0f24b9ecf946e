"""`autopar bench plan`: seconds from a Python function to its Plan, each repeat in a fresh process.

`total_s` starts with the function and its abstract arguments and ends with the Plan: tracing, reading the rules,
building the graph of decisions, solving, writing the plan. Importing JAX and autopar and describing the model's shapes
come before; what they load on first use counts. Nothing is kept between repeats: no jit cache, no rules, no plan. With
`from_cache` one process keeps its plan in a new folder, and it is measured how long others take that find it there.
Everything is as a user has it who gives no option: where memory does not suffice, recomputation is searched.
`cpu_s` is the processor time of the same span, of all threads: on a busy machine it is the steadier figure.
"""

from __future__ import annotations

import contextlib
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar import api
from autopar.bench import worker
from autopar.errors import ArgumentError
from autopar.plans import cache as plan_cache
from autopar.zoo import targets

PHASES = (
    *("trace", "cache", "rules", "graph", "liveness", "fold", "presolve", "bound", "eliminate", "ilp", "memory"),
    *("remat", "inter_op", "stages", "one_mesh", "lower_bound", "export"),
)

Result = dict[str, Any]


def run(spec: Mapping[str, Any], repeats: int, tell: Callable[[str], None] = lambda text: None) -> Result:
    """Medians over `repeats` processes.

    Args:
        spec: model; mesh (sizes) or cluster and hosts; layers, batch, seq, attention, selective_scan, solver,
            memory_budget, remat, offload, per_microbatch; from_cache.
        repeats: number of processes.
        tell: hears of each as it ends.

    Raises:
        ArgumentError: repeats below 1, or a plan that is not kept.
        WorkerError: planning failed; the message is the worker's.
    """
    if repeats < 1:
        raise ArgumentError(f"repeats={repeats} must be at least 1")
    measurements: list[Result] = []
    with _folder(spec, tell) as place:
        for i in range(repeats):
            measurements.extend(worker.lines("autopar.bench.plan", {**spec, "folder": place}))
            tell(f"{i + 1}/{repeats}: {measurements[-1]['total_s']:.2f} s")
    return summarise(measurements)


@contextlib.contextmanager
def _folder(spec: Mapping[str, Any], tell: Callable[[str], None]) -> Iterator[str | None]:
    """A folder with the plan, if the spec asks for one."""
    if not spec.get("from_cache"):
        yield None
        return
    with tempfile.TemporaryDirectory() as place:
        (measurement,) = worker.lines("autopar.bench.plan", {**spec, "folder": place})
        if not any(Path(place).iterdir()):
            raise ArgumentError(
                f"from_cache: {spec['model']} has a plan that is not kept: it is {measurement['status']!r} after "
                f"{measurement['total_s']:.1f} s, and more time may give a better one"
            )
        tell(f"kept: {measurement['total_s']:.2f} s")
        yield place


def summarise(measurements: Sequence[Result]) -> Result:
    """Medians of the times, the largest memory, and the raw times; the rest is that of the first process."""
    totals: list[float] = [f["total_s"] for f in measurements]
    phases: dict[str, list[float]] = {p: [f["phases"][p] for f in measurements] for p in PHASES}
    return {
        **measurements[0],
        "total_s": statistics.median(totals),
        "cpu_s": statistics.median(f["cpu_s"] for f in measurements),
        "phases": {p: statistics.median(times) for p, times in phases.items()},
        "peak_rss_bytes": max(f["peak_rss_bytes"] for f in measurements),
        "repeats": len(measurements),
        "raw": {"total_s": totals, "phases": phases},
    }


def work(spec: Mapping[str, Any]) -> Iterator[Result]:
    """One measurement."""
    changes = {name: spec.get(name) for name in ("layers", "batch", "seq", "attention", "selective_scan")}
    fn, args = targets.load(spec["model"], **changes)
    mesh, cluster, folder = spec.get("mesh"), spec.get("cluster"), spec.get("folder")
    target_cluster = targets.cluster(cluster, spec.get("hosts"), mesh) if cluster else None
    begin, begin_cpu = time.perf_counter(), time.process_time()
    with plan_cache.use_folder(Path(folder) if folder else None):
        plan = api.plan(
            fn,
            *args,
            mesh=tuple(mesh) if mesh else None,
            cluster=target_cluster,
            solver=spec.get("solver") or "auto",
            memory_budget=spec.get("memory_budget"),
            remat=spec.get("remat") or "auto",
            offload=spec.get("offload") or "auto",
            per_microbatch=spec.get("per_microbatch") or (),
        )
    total, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    yield {
        "model": spec["model"],
        "mesh": list(plan.mesh_sizes),
        "cluster": plan.cluster,
        "from_cache": bool(folder),
        "total_s": total,
        "cpu_s": cpu,
        "phases": {p: float(plan.phases.get(p, 0.0)) for p in PHASES},
        "variables": plan.variables,
        "variables_unfolded": plan.variables_unfolded,
        "rows": plan.rows,
        "gap": plan.gap,
        "solver": plan.solver,
        "status": plan.solver_status,
        "certified": plan.solver_status == "certified",
        "ilp_calls": int(plan.rows > 0),
        "objective_s": plan.objective_s,
        "step_time_s": plan.step_time_s,
        "peak_rss_bytes": _peak_rss(),
        "stages": len(plan.stages),
        "schedule": plan.schedule,
        "num_microbatches": plan.num_microbatches,
        "mfu": plan.mfu,
        "hfu": plan.hfu,
        "peak_memory_bytes": plan.peak_memory_bytes,
    }


def _peak_rss() -> int:
    """Peak memory of this process, in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def table(result: Result) -> str:
    """The result for people."""
    phases = "  ".join(f"{p} {result['phases'][p]:.2f}" for p in PHASES if result["phases"][p] >= 0.005)
    kept = ", from the cache" if result["from_cache"] else ""
    return "\n".join(
        [
            f"{result['model']} on {'x'.join(map(str, result['mesh']))} of {result['cluster']}: "
            f"{result['total_s']:.2f} s (median of {result['repeats']}{kept}), "
            f"{result['cpu_s']:.2f} s of processor time, {result['peak_rss_bytes'] / 1e9:.2f} GB",
            f"  seconds: {phases}",
            f"  {result['variables_unfolded']:,} variables, {result['variables']:,} folded, {result['rows']:,} rows; "
            f"{result['status']}, gap {result['gap']:.2g}; predicted step {result['step_time_s']:.4g} s",
        ]
    )


if __name__ == "__main__":
    worker.serve(work)
