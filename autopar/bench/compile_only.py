"""`autopar bench compile`: predicted against compiled collectives, FLOPs and bytes, for devices that are not here.

Models of width 512 and more, so that collectives are large; on every mesh of eight devices the plan that autopar finds
and those that pins force:

    free        no pins
    data        the batch cut over all axes, the state whole                     (Li et al., 2020)
    fsdp        the batch cut over all axes; each state leaf cut over all of     (Rajbhandari et al., 2020, stage 3)
                them on its longest dimension that divides
    megatron    parameters by the model's own table over the last axis, the      (Shoeybi et al., 2019)
                batch over the others
    context     tokens cut along their positions over all axes, the state as autopar likes: models with a kernel of
                attention alone                                                 (Dubey et al., 2024, section 3.3.2)
    stages      two stages on halves of the mesh, in four microbatches with batch statistics of their own; no pins

"gpt-splash" and the like have JAX's splash attention, which is compiled for TPUs alone; they are no default.

Each is compiled for the target and compared (`autopar.verification.verify`). Over all rows: Spearman's rank correlation
and the median relative error of FLOPs and of bytes read and written per device against the compiler's cost analysis,
which counts the body of a loop once: models with loops, and stages, are left out there.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autopar import api, zoo
from autopar.bench import worker
from autopar.errors import ArgumentError
from autopar.hardware.cluster import DEFAULT_AXIS_NAMES, Cluster
from autopar.ir.layout import longest_dividing
from autopar.ir.trace import trace
from autopar.verification import verify as verification
from autopar.zoo.model import MIXED
from autopar.zoo.table import FAMILIES

TARGET, STAGES, CONTEXT = "tpu:v5e:2x4", "stages", "context"
#: Options of plans besides pins.
OPTIONS: Mapping[str, Mapping[str, Any]] = {STAGES: {"stages": 2, "num_microbatches": 4, "per_microbatch": "*"}}
MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2))

#: Model -> dimensions that replace those of its family's toy.
SIZES: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"layers": 2, "width": 1024, "hidden": 4096, "batch": 8192},
    "gpt": {"layers": 1, "width": 512, "heads": 8, "vocab": 2048, "seq": 128, "batch": 64},
    "llama3": {
        "layers": 1, "width": 512, "heads": 8, "kv_heads": 8, "hidden": 2048, "vocab": 2048, "seq": 128, "batch": 64,
    },
    "moe": {"width": 512, "heads": 8, "experts": 8, "group": 256, "vocab": 2048, "seq": 128, "batch": 64},
    "vit": {"layers": 1, "width": 512, "heads": 8, "patch": 16, "image": 64, "classes": 1024, "batch": 64},
    "wresnet": {"stages": (1, 1), "channels": 64, "image": 32, "batch": 64},
    "rnn": {"width": 1024, "vocab": 2048, "batch": 64},
    "unet": {"channels": 64, "image": 16, "batch": 64},
}  # fmt: skip
#: Sequences of 16 blocks of 512 positions, two for each of eight devices; fewer heads than devices; bfloat16.
LONG: Mapping[str, Any] = {"attention": "splash", "heads": 4, "seq": 8192, "batch": 8, "precision": MIXED}
#: The same of models with splash attention (in plans along positions they have one example), or with rows in groups.
KERNEL_SIZES: Mapping[str, Mapping[str, Any]] = {
    "gpt-splash": {**SIZES["gpt"], **LONG},
    "llama3-splash": {**SIZES["llama3"], **LONG, "kv_heads": 2},
    "moe-splash": {**SIZES["moe"], **LONG},
    "moe-dropless": {**SIZES["moe"], "dropless": True},
    "moe-megablox": {**SIZES["moe"], "megablox": True},
}

#: Platform -> what prices the plans.
CLUSTERS: Mapping[str, Callable[[], Cluster]] = {
    "cpu": lambda: Cluster.preset("tpu-v5e", topology="2x4"),
    "tpu": lambda: Cluster.preset("tpu-v5e", topology="2x4"),
    "gpu": lambda: Cluster.preset("dgx-h100"),
}

Row = dict[str, Any]
Pins = dict[str, PartitionSpec]


# Forced plans


def _paths(tree: Any) -> list[tuple[str, tuple[int, ...]]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape) for path, leaf in leaves]


def _cut(shape: Sequence[int], axes: Sequence[str], mesh: Mapping[str, int]) -> PartitionSpec:
    """The longest dimension that divides, cut over these axes; replicated if none does."""
    parts = math.prod(mesh[a] for a in axes)
    best = longest_dividing(shape, parts)
    return PartitionSpec() if best is None else PartitionSpec(*[None] * best, tuple(axes))


def _batch(batch: Any, axes: Sequence[str], mesh: Mapping[str, int]) -> Pins:
    parts = math.prod(mesh[a] for a in axes)
    fits = {path: bool(axes) and bool(shape) and shape[0] % parts == 0 for path, shape in _paths(batch)}
    return {f"batch/{path}": PartitionSpec(tuple(axes)) if fit else PartitionSpec() for path, fit in fits.items()}


def _free(model: zoo.Model, mesh: Mapping[str, int]) -> Pins:
    return {}


def _data(model: zoo.Model, mesh: Mapping[str, int]) -> Pins:
    return {"state/*": PartitionSpec(), **_batch(model.abstract_args()[1], tuple(mesh), mesh)}


def _fsdp(model: zoo.Model, mesh: Mapping[str, int]) -> Pins:
    state, batch = model.abstract_args()
    cut = {f"state/{path}": _cut(shape, tuple(mesh), mesh) for path, shape in _paths(state)}
    return {**cut, **_batch(batch, tuple(mesh), mesh)}


def _megatron(model: zoo.Model, mesh: Mapping[str, int]) -> Pins:
    state, batch = model.abstract_args()
    *outer, inner = mesh
    pins = {f"state/{path}": _by_table(path, shape, model, inner, mesh[inner]) for path, shape in _paths(state)}
    return {**pins, **_batch(batch, outer, mesh)}


def _by_table(path: str, shape: Sequence[int], model: zoo.Model, axis: str, size: int) -> PartitionSpec:
    for pattern, spec in model.megatron:
        if fnmatch.fnmatch(path, pattern) or fnmatch.fnmatch(path, f"*/{pattern}"):
            fits = len(spec) <= len(shape) and all(n % size == 0 for n, a in zip(shape, spec, strict=False) if a)
            return PartitionSpec(*(axis if a else None for a in spec)) if fits else PartitionSpec()
    return PartitionSpec()


def _context(model: zoo.Model, mesh: Mapping[str, int]) -> Pins:
    """Tokens [B,S] along their positions."""
    return {f"batch/{path}": PartitionSpec(None, tuple(mesh)) for path, _ in _paths(model.abstract_args()[1])}


PLANS: Mapping[str, Callable[[zoo.Model, Mapping[str, int]], Pins]] = {
    "free": _free,
    "data": _data,
    "fsdp": _fsdp,
    "megatron": _megatron,
    CONTEXT: _context,
    STAGES: _free,
}


# Measuring


def _every_size() -> Mapping[str, Mapping[str, Any]]:
    return {**SIZES, **KERNEL_SIZES}


def build(name: str, school: str = "") -> zoo.Model:
    """The model of a row of `SIZES` or `KERNEL_SIZES`, for a plan."""
    every = _every_size()
    if name not in every:
        raise ArgumentError(f"model {name!r} has no sizes for this benchmark. Available: {', '.join(every)}")
    family = FAMILIES[name.partition("-")[0]]
    sizes = {**every[name], **({"batch": 1} if school == CONTEXT else {})}
    return family.build(f"{name}-wide", dataclasses.replace(family.sizes["toy"], **sizes))


def row(name: str, sizes: Sequence[int], school: str, target: str) -> Row:
    """One plan, compiled for the target and compared."""
    model = build(name, school)
    mesh: dict[str, int] = dict(zip(map(str, DEFAULT_AXIS_NAMES), sizes, strict=False))
    begin = time.perf_counter()
    pins = PLANS[school](model, mesh)
    options: dict[str, Any] = {
        "cluster": CLUSTERS[target.partition(":")[0]](),
        "pins": pins or None,
        **OPTIONS.get(school, {}),
    }
    plan = api.plan(model.step, *model.abstract_args(), mesh=tuple(sizes), **options)
    planned = time.perf_counter()
    report = verification.verify(plan, model.step, *model.abstract_args(), target=target)
    comparison = report.comparison
    return {
        "model": name,
        "mesh": list(sizes),
        "plan": school,
        "target": target,
        "ok": report.ok,
        "predicted_wire_bytes": comparison.predicted_wire_bytes,
        "compiled_wire_bytes": comparison.emitted_wire_bytes,
        "ratio": comparison.ratio,
        "matched": comparison.matched + comparison.joined,
        "exceptions": dict(report.exceptions),
        "unexplained": list(report.mismatches),
        "predicted_flops": plan.flops_per_device,
        "compiled_flops": report.flops,
        "predicted_accessed_bytes": plan.bytes_per_device,
        "compiled_accessed_bytes": report.accessed,
        "predicted_memory": max(stage.peak_memory_bytes for stage in plan.stages),
        "compiled_memory": _peak(report.memory),
        "loops": school == STAGES or _has_loops(model),
        "plan_s": planned - begin,
        "compile_s": time.perf_counter() - planned,
    }


def _peak(memory: Mapping[str, int]) -> int:
    """Bytes per device at the peak, as `autopar bench predictions` counts them."""
    return sum(memory.get(kind, 0) for kind in ("arguments", "results", "temporaries")) - memory.get("aliased", 0)


def _has_loops(model: zoo.Model) -> bool:
    """Cost analyses count the body of a loop once, however often it runs."""
    return any(op.name in ("scan", "while") for op in trace(model.step, *model.abstract_args()).graph.walk())


def work(spec: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of one model: every mesh with every plan."""
    worker.cpu_devices(max(8, *(math.prod(m) for m in spec["meshes"])))
    for sizes in spec["meshes"]:
        for school in spec["plans"]:
            if school == CONTEXT and _every_size()[spec["model"]].get("attention") != "splash":
                continue
            yield row(spec["model"], sizes, school, spec["target"])


def run(
    models: Sequence[str] = tuple(SIZES),
    meshes: Sequence[Sequence[int]] = MESHES,
    plans: Sequence[str] = tuple(PLANS),
    target: str = TARGET,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Rows of all models, a worker for each.

    Raises:
        ArgumentError: an unknown model, plan or target.
        WorkerError: a worker ends with an error.
    """
    _check_known(models, plans, target)
    specs = [{"model": model, "meshes": meshes, "plans": plans, "target": target} for model in models]
    return worker.collect("autopar.bench.compile_only", specs, tell, line)


def _check_known(models: Sequence[str], plans: Sequence[str], target: str) -> None:
    for what, names, available in (("model", models, _every_size()), ("plan", plans, PLANS)):
        for name in names:
            if name not in available:
                raise ArgumentError(f"{what} {name!r} is not known. Available: {', '.join(available)}")
    if target.partition(":")[0] not in CLUSTERS:
        raise ArgumentError(f"target={target!r} does not compile. Available: {', '.join(CLUSTERS)}")


# Figures


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """What holds over all rows: the worst wire ratio, counts, and FLOPs and bytes against the cost analysis."""
    ratios = [r["ratio"] for r in rows]
    counts: dict[str, Any] = {
        "rows": len(rows),
        "ok": sum(r["ok"] for r in rows),
        "exact": sum(not r["exceptions"] and not r["unexplained"] for r in rows),
        "ratio_least": min(ratios, default=1.0),
        "ratio_most": max(ratios, default=1.0),
        "unexplained_rows": sum(bool(r["unexplained"]) for r in rows),
    }
    return {**counts, **_accuracy(rows, "flops"), **_accuracy(rows, "accessed_bytes")}


def _accuracy(rows: Sequence[Row], what: str) -> dict[str, float]:
    """Rank correlation and median error of predictions against the cost analysis, which counts no loops."""
    from scipy.stats import spearmanr  # takes half a second, which a worker would spend at each start

    accuracy: dict[str, float] = {}
    counted = [r for r in rows if r[f"compiled_{what}"] and not r["loops"]]
    pairs = [(r[f"predicted_{what}"], r[f"compiled_{what}"]) for r in counted]
    predicted, compiled = zip(*pairs, strict=True) if pairs else ((), ())
    if len(set(predicted)) > 1 and len(set(compiled)) > 1:
        accuracy[f"{what}_spearman"] = float(spearmanr(predicted, compiled)[0])  # type: ignore[arg-type]
    if pairs:
        accuracy[f"{what}_median_error"] = statistics.median(abs(p / c - 1) for p, c in pairs)
    return accuracy


def line(row: Row) -> str:
    """One row for people."""
    mesh = "x".join(map(str, row["mesh"]))
    exceptions = "".join(f"; {count} x {name}" for name, count in row["exceptions"].items())
    parts = [
        f"{'ok  ' if row['ok'] else 'FAIL'} {row['model']:<8} {mesh:<6} {row['plan']:<9}",
        f"wire MB {row['predicted_wire_bytes'] / 1e6:8.2f} compiled {row['compiled_wire_bytes'] / 1e6:8.2f}",
        f"({row['ratio']:.3f})  {row['matched']:>3} as predicted, {len(row['unexplained'])} unexplained",
        f" flops {_relative(row, 'flops')}  bytes {_relative(row, 'accessed_bytes')}  "
        f"memory {_relative(row, 'memory')}{exceptions}",
    ]
    return " ".join(parts)


def _relative(row: Row, what: str) -> str:
    compiled = row[f"compiled_{what}"]
    return f"{row[f'predicted_{what}'] / compiled:.2f}" if compiled else "-"


def table(rows: Sequence[Row]) -> str:
    """All rows, what no exception explains, and the figures."""
    lines: list[str] = []
    for row in rows:
        lines += [line(row), *(f"       {text}" for text in row["unexplained"])]
    return "\n".join([*lines, *(f"{name}: {value:.4g}" for name, value in figures(rows).items())])


if __name__ == "__main__":
    worker.serve(work)
