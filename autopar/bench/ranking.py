"""`autopar bench ranking`: does the plan that is predicted to be faster run faster?

Every model gets a dozen plans that differ widely: each is the best one for a machine that does not exist, whose network
or arithmetic is far dearer or cheaper than here, on one or two mesh axes, with the batch free or pinned whole. All are
priced on the figures of this machine, measured just before (`autopar.hardware.measure`), and run in turns in one
process on 8 virtual CPU devices. Per model:

    Spearman's rank correlation of predicted and measured step times, over its plans

Pricing is the planner's own: a strategy has the same number whatever the prices are, so the assignment of one machine
can be looked up in the problem of another. Plans of equal price and equal collectives are one plan.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

import autopar
from autopar import zoo
from autopar.bench import worker
from autopar.bench.step import BENCH_SIZES, DEVICES, Variant, take_turns
from autopar.errors import ArgumentError
from autopar.hardware import measure
from autopar.hardware.cluster import Cluster, LogicalMesh
from autopar.ir.text import seconds
from autopar.ir.text import table as grid
from autopar.ir.trace import trace
from autopar.passes.mesh_search.planner import make_model
from autopar.passes.remat.options import Options
from autopar.plans.builders.one_mesh import make_plan
from autopar.plans.plan import Plan

MOST = 14  # plans of one model
MESHES: tuple[tuple[int, ...], ...] = ((8,), (2, 4), (4, 2))
MODELS = ("mlp-toy", "gpt-3m", "llama3-toy", "moe-toy", "vit-toy", "wresnet-toy", "rnn-toy")

Row = dict[str, Any]


@dataclass(frozen=True)
class Prices:
    """A machine that does not exist: factors on latency, on s/byte of the first axis and of the others, on flop/s."""

    latency: float = 1.0
    first: float = 1.0
    other_axes: float = 1.0
    arithmetic: float = 1.0
    batch_whole: bool = False


PRICES: Mapping[str, Prices] = {
    "fair": Prices(),
    "free network": Prices(latency=1e-3, first=1e-3, other_axes=1e-3),
    "slow network": Prices(latency=10, first=30, other_axes=30),
    "no network": Prices(latency=1e4, first=1e4, other_axes=1e4),
    "first axis slow": Prices(first=1e3, other_axes=1e-2, latency=1e-2),
    "other axes slow": Prices(first=1e-2, other_axes=1e3, latency=1e-2),
    "slow arithmetic": Prices(latency=1e-2, arithmetic=1e-2),
    "batch whole": Prices(batch_whole=True),
    "batch whole, free network": Prices(latency=1e-3, first=1e-3, other_axes=1e-3, batch_whole=True),
    "batch whole, slow network": Prices(latency=10, first=30, other_axes=30, batch_whole=True),
}


def elsewhere(mesh: LogicalMesh, p: Prices) -> LogicalMesh:
    """The mesh as it would be on a machine with these prices."""
    factors = [p.first] + [p.other_axes] * (len(mesh.sizes) - 1)
    links = tuple(
        replace(link, alpha=link.alpha * p.latency, beta=link.beta * f)
        for link, f in zip(mesh.links, factors, strict=True)
    )
    device = replace(mesh.device, peak_flops={d: f * p.arithmetic for d, f in mesh.device.peak_flops.items()})
    return LogicalMesh(mesh.names, mesh.sizes, links, device)


def forced(model: zoo.Model, cluster: Cluster) -> Iterator[tuple[str, Plan, float]]:
    """(name, plan, its price on `cluster` in s) of up to `MOST` plans, no two alike."""
    traced = trace(model.step, *model.abstract_args())
    seen: set[str] = set()
    for sizes in MESHES:
        mesh = cluster.logical_mesh(sizes)
        options = {whole: Options(pins={"batch/*": PartitionSpec()} if whole else None) for whole in (False, True)}
        here_by = {whole: make_model(traced, mesh, chosen).problem for whole, chosen in options.items()}
        for name, prices in PRICES.items():
            planned = make_plan(traced, elsewhere(mesh, prices), name, options[prices.batch_whole])
            here = here_by[prices.batch_whole].value(planned.solution.assignment)
            identity = f"{here:.4g} {sorted(map(str, planned.plan.collectives))}"
            if identity not in seen and len(seen) < MOST:
                seen.add(identity)
                yield f"{'x'.join(map(str, sizes))} {name}", planned.plan, here


def work(spec: Mapping[str, Any]) -> Iterator[Row]:
    """The row of one model, or the error of a calibration."""
    worker.cpu_devices(DEVICES)
    if "calibrate" in spec:
        calibration = measure.calibrate(Cluster.local())
        calibration.cluster.save(spec["calibrate"])
        yield {"median_error": calibration.median_error, "worst_error": calibration.worst_error}
        return
    cluster = Cluster.from_toml(spec["cluster"])
    model = zoo.build(spec["model"], **BENCH_SIZES.get(spec["model"], {}))
    batches = [jax.tree.map(np.asarray, model.make_batch(jax.random.key(i))) for i in range(2)]
    variants: list[Variant] = []
    predicted: list[float] = []
    for name, plan, price in forced(model, cluster):
        step = autopar.parallelize(model.step, plan=plan)
        step.plan(model.abstract_args()[0], batches[0])
        variants.append(Variant(name, step, step.init(model.init, jax.random.key(0))))
        predicted.append(price)
    take_turns(variants, batches, spec["repeats"])
    yield row(spec["model"], variants, predicted)


def rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Spearman's rank correlation; NaN with fewer than two plans."""
    from scipy.stats import spearmanr  # takes half a second, which a worker would spend at each start

    return float(spearmanr(predicted, measured)[0]) if len(measured) > 1 else math.nan  # type: ignore[arg-type]


def row(model: str, variants: Sequence[Variant], predicted: Sequence[float]) -> Row:
    """Predicted and measured seconds of every plan, and their rank correlation."""
    measured = [statistics.median(v.times) for v in variants]
    return {
        "model": model,
        "plans": [v.name for v in variants],
        "predicted_s": list(predicted),
        "measured_s": measured,
        "span": max(measured) / min(measured),
        "spearman": rank_correlation(predicted, measured),
        "ratio": statistics.median(m / p for m, p in zip(measured, predicted, strict=True)),
    }


def run(
    models: Sequence[str], cluster: str | None, repeats: int, tell: Callable[[str], None] = lambda text: None
) -> list[Row]:
    """A row for every model; `cluster` is the TOML file of a calibrated one, None: measured now.

    Raises WorkerError where a worker dies, ArgumentError if there are no models.
    """
    if not models:
        raise ArgumentError(f"no models given; the usual ones: {', '.join(MODELS)}")
    with tempfile.TemporaryDirectory() as folder:
        path = cluster or str(Path(folder, "here.toml"))
        if cluster is None:
            for calibration in worker.lines("autopar.bench.ranking", {"calibrate": path}):
                tell(f"calibrated: median error of the fit {calibration['median_error']:.0%}")
        specs = [{"model": model, "cluster": path, "repeats": repeats} for model in models]
        return worker.collect("autopar.bench.ranking", specs, tell, line)


def line(row: Row) -> str:
    """One row for people."""
    return (
        f"{row['model']:<14} {len(row['plans']):>3} plans  span {row['span']:.1f}  "
        f"Spearman {row['spearman']:.2f}  measured/predicted {row['ratio']:.2f}"
    )


def table(rows: Sequence[Row]) -> str:
    """Every plan, by measured time, then a line per model and the counts."""
    lines: list[str] = []
    for row in rows:
        by_time = sorted(zip(row["plans"], row["predicted_s"], row["measured_s"], strict=True), key=lambda t: t[2])
        plans = [(name, seconds(p), seconds(m)) for name, p, m in by_time]
        lines.append(grid(row["model"], ("", "predicted", "measured"), plans))
    counts = figures(rows)
    last = (
        f"{counts['plans']} plans of {counts['models']} models: Spearman median {counts['spearman_median']:.2f}, "
        f"least {counts['spearman_least']:.2f}; least span {counts['span_least']:.1f}"
    )
    return "\n".join([*lines, *map(line, rows), last])


def figures(rows: Sequence[Row]) -> Row:
    """Counts and correlations of all models."""
    correlations = [r["spearman"] for r in rows]
    return {
        "models": len(rows),
        "plans": sum(len(r["plans"]) for r in rows),
        "spearman_median": statistics.median(correlations),
        "spearman_least": min(correlations),
        "span_least": min(r["span"] for r in rows),
        "plans_least": min(len(r["plans"]) for r in rows),
    }


if __name__ == "__main__":
    worker.serve(work)
