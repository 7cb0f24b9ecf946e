"""`autopar bench memory`: the Pareto front of step time against peak memory, and what falls away along it.

Budgets are searched one after the other (`autopar.passes.memory.pareto`). Each point is a plan, told by its peak, its
step time and, per device: the arguments it keeps (parameters, optimizer state), bytes at the peak by kind, and bytes
sent per step. Beside each point are bytes per parameter, to compare with the stages of ZeRO (Rajbhandari et al.,
2020, section 3): 16 in all for mixed-precision Adam, with N devices 4 + 12/N, 2 + 14/N and 16/N.

`lower_s` is the certified bound: no plan with that peak or less is faster.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar import zoo
from autopar.cost_models.compiler.backends import backend_of
from autopar.cost_models.memory.liveness import Liveness
from autopar.cost_models.memory.report import report
from autopar.cost_models.sharding.groups import Model
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph
from autopar.ir.text import seconds, size
from autopar.ir.text import table as grid
from autopar.ir.trace import trace
from autopar.passes.intra_op import extract
from autopar.passes.memory.pareto import Front, front
from autopar.passes.mesh_search.planner import collector_paused, make_model
from autopar.passes.remat.options import Options
from autopar.plans.views.picture import picture

Result = dict[str, Any]


def run(model: zoo.Model, mesh: LogicalMesh, points: int) -> Result:
    """The front of one model on one mesh at `points` budgets."""
    begin = time.perf_counter()
    traced = trace(model.step, *model.abstract_args())
    after_trace = time.perf_counter()
    with collector_paused():
        problem_model = make_model(traced, mesh, Options())
        liveness = Liveness(traced.graph, problem_model, mesh, backend_of(mesh.device))
        result = front(problem_model.problem, liveness, points)
    spent = time.perf_counter() - after_trace
    return {
        "model": model.name,
        "mesh": list(mesh.sizes),
        "parameters": model.parameters(),
        "trace_s": after_trace - begin,
        "beyond_trace_s": spent,
        "least_bytes_bound": result.least_bytes,
        "points": [
            _point(p.assignment, p.seconds, result, liveness, traced.graph, problem_model, mesh) for p in result.points
        ],
    }


def _point(
    assignment: Any, step_s: float, front: Front, liveness: Liveness, graph: Graph, model: Model, mesh: LogicalMesh
) -> Mapping[str, Any]:
    memory = report(liveness, assignment)
    layouts = extract.layouts(model, assignment)
    planned = extract.collectives(graph, model, assignment, layouts, mesh)
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    return {
        "peak_bytes": memory.peak_bytes,
        "step_s": step_s,
        "lower_s": front.lower(memory.peak_bytes),
        "memory": dict(memory.kinds),
        "wire_bytes": sum(c.bytes_sent(sizes) for c in planned),
    }


def table(result: Result) -> str:
    """A row per point."""
    rows = [_cells(p, result["parameters"]) for p in result["points"]]
    heads = ("", "step", "above the bound", "state", "state bytes/parameter", "gradients", "sent")
    return "\n".join(
        [
            grid("peak per device", heads, rows),
            f"{result['model']} on {tuple(result['mesh'])}: {len(rows)} plans, "
            f"{result['beyond_trace_s']:.1f} s beyond tracing",
        ]
    )


def _cells(point: Mapping[str, Any], parameters: int) -> tuple[str, ...]:
    kinds = point["memory"]
    state = kinds.get("parameters", 0) + kinds.get("optimizer state", 0)
    return (
        size(point["peak_bytes"]),
        seconds(point["step_s"]),
        f"{(point['step_s'] - point['lower_s']) / point['step_s']:.2%}",
        size(state),
        f"{state / parameters:.2f}",
        size(kinds.get("gradients", 0)),
        size(point["wire_bytes"]),
    )


def plot(result: Result, path: Path) -> None:
    """Step time against peak memory with the bound below, as a picture; see `autopar.plans.views.picture`."""
    title = f"{result['model']} on {' x '.join(map(str, result['mesh']))}"
    peaks = [p["peak_bytes"] / 1e9 for p in result["points"]]
    with picture(path, title, xlabel="peak memory per device, GB", ylabel="predicted step, s") as axes:
        axes.step(peaks, [p["step_s"] for p in result["points"]], where="post", marker="o", label="plans")
        axes.plot(
            peaks, [p["lower_s"] for p in result["points"]], linestyle="--", color="0.5", label="no plan is below"
        )
