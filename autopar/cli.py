"""The command line: `autopar COMMAND TARGET ...`, and `autopar bench MEASUREMENT ...`.

Exit status 0: fine; 1: an AutoparError, or a check that fails; 2: wrong usage. With --json, stdout holds JSON alone;
progress and errors go to stderr. --debug, anywhere, shows tracebacks.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.errors import ArgumentError, AutoparError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
bench = typer.Typer(no_args_is_help=True, help="Measurements, as docs/benchmarks.md quotes them.")
app.add_typer(bench, name="bench")

Target = Annotated[str, typer.Argument(help="zoo name such as llama3-8b, or file.py:function")]
ClusterName = Annotated[str | None, typer.Option("--cluster", help="preset, or a TOML file")]
Hosts = Annotated[int | None, typer.Option(help="number of hosts; default: what the mesh needs")]
MeshSizes = Annotated[
    str | None, typer.Option("--mesh", help="axis sizes, such as 32,8; priced as dgx-h100 by default")
]
Layers = Annotated[int | None, typer.Option(help="layers of the model")]
Batch = Annotated[int | None, typer.Option(help="global batch")]
Seq = Annotated[int | None, typer.Option(help="tokens per sequence")]
Solver = Annotated[str, typer.Option(help="auto, cbc or highs")]
MemoryBudget = Annotated[
    str | None, typer.Option(help="bytes per device, as in 12GiB, or min; default: the device's memory")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON alone on stdout")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="plan afresh, and keep nothing")]
Models = Annotated[str | None, typer.Option(help="zoo names, with commas between")]
Repeats = Annotated[int, typer.Option(min=1, help="how often to measure; medians are shown")]

LOCAL_DEVICES = 8  # virtual CPU devices of `verify --target cpu` without a mesh


def say(text: str) -> None:
    """Progress and errors, to stderr."""
    print(text, file=sys.stderr, flush=True)


def show(data: Any) -> None:
    """One line of JSON on stdout."""
    print(json.dumps(data), flush=True)


def sizes(text: str) -> tuple[int, ...]:
    """ "32,8" -> (32, 8). ArgumentError if it is no list of positive integers."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ArgumentError(f"mesh {text!r}: give sizes with commas between, such as 32,8") from error
    if any(size < 1 for size in found):
        raise ArgumentError(f"mesh {text!r}: sizes must be at least 1")
    return found


def words(text: str | None, default: Sequence[str]) -> tuple[str, ...]:
    """ "a,b" -> ("a", "b")."""
    return tuple(default) if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def options(
    mesh: str | None, cluster: str | None, hosts: int | None, solver: str, memory_budget: str | None
) -> dict[str, Any]:
    """Options of `autopar.plan`."""
    from autopar import targets

    if hosts is not None and cluster is None:
        raise ArgumentError(f"--hosts {hosts} needs --cluster")
    found = None if mesh is None else sizes(mesh)
    chosen: dict[str, Any] = {"mesh": found, "solver": solver}
    if cluster is not None:
        chosen["cluster"] = targets.cluster(cluster, hosts, found)
    return chosen if memory_budget is None else {**chosen, "memory_budget": memory_budget}


def _cache(use: bool) -> contextlib.AbstractContextManager[None]:
    """Where plans are made: with those that are kept on disk, or without."""
    from autopar import plan_cache

    return contextlib.nullcontext() if use else plan_cache.off()


@app.command()
def plan(
    target: Target,
    cluster: ClusterName = None,
    hosts: Hosts = None,
    mesh: MeshSizes = None,
    layers: Layers = None,
    batch: Batch = None,
    seq: Seq = None,
    memory_budget: MemoryBudget = None,
    solver: Solver = "auto",
    output: Annotated[Path | None, typer.Option(help="save the plan as JSON")] = None,
    as_json: Json = False,
    no_cache: NoCache = False,
) -> None:
    """Plan TARGET and print the plan as a table, or as JSON."""
    from autopar import api, targets
    from autopar.trace import trace

    fn, args = targets.load(target, layers=layers, batch=batch, seq=seq)
    with _cache(not no_cache):
        found = api.plan(fn, *args, **options(mesh, cluster, hosts, solver, memory_budget))
    if output is not None:
        found.save(output)
        say(f"saved to {output}")
    print(found.to_json() if as_json else found.summary(trace(fn, *args).graph))


@app.command()
def rules(target: Target, layers: Layers = None, batch: Batch = None, seq: Seq = None, as_json: Json = False) -> None:
    """List each distinct operation of TARGET: how often it stands there, name, operands, rule, and whose rule it is."""
    from autopar import targets

    fn, args = targets.load(target, layers=layers, batch=batch, seq=seq)
    for row in _rules(fn, args):
        if as_json:
            show(row)
        else:
            print(f"{row['count']:>6}  {row['name']}({', '.join(row['operands'])})  {row['rule']}  [{row['origin']}]")


def _rules(fn: Any, args: Sequence[Any]) -> list[dict[str, Any]]:
    from autopar.rules import rules_of
    from autopar.trace import trace

    graph = trace(fn, *args).graph
    found = rules_of(graph)
    rows: dict[int, dict[str, Any]] = {}
    for op in graph.walk():
        if op.regions:
            continue
        if op.signature not in rows:
            rule = found[op.signature]
            operands = [str(graph.type_of(a)) for a in op.inputs]
            rows[op.signature] = {
                "name": op.name, "operands": operands, "rule": str(rule), "origin": rule.origin, "count": 0
            }  # fmt: skip
        rows[op.signature]["count"] += 1
    return list(rows.values())


@app.command()
def verify(
    target: Target,
    against: Annotated[
        str, typer.Option("--target", help="cpu (virtual devices), shardy (any size), tpu:v5e:2x4, gpu:h100:8")
    ] = "shardy",
    plan_file: Annotated[Path | None, typer.Option("--plan", help="a saved plan; default: plan afresh")] = None,
    cluster: ClusterName = None,
    hosts: Hosts = None,
    mesh: MeshSizes = None,
    layers: Layers = None,
    batch: Batch = None,
    seq: Seq = None,
    solver: Solver = "auto",
    as_json: Json = False,
    no_cache: NoCache = False,
) -> None:
    """Compare the collectives that the plan of TARGET predicts with those that the compiler emits."""
    from autopar import api, targets, verification
    from autopar.bench.worker import cpu_devices
    from autopar.plans import Plan

    saved = None if plan_file is None else Plan.load(plan_file)
    chosen = options(mesh, cluster, hosts, solver, None)
    if against == "cpu":
        cpu_devices(_devices(saved.mesh_sizes if saved else chosen["mesh"], chosen.get("cluster")))
    fn, args = targets.load(target, layers=layers, batch=batch, seq=seq)
    with _cache(not no_cache):
        planned = saved or api.plan(fn, *args, **chosen)
    found = verification.verify(planned, fn, *args, target=against)
    if as_json:
        show(_report(found))
    else:
        print(found)
    raise typer.Exit(0 if found.ok else 1)


def _devices(mesh: Sequence[int] | None, cluster: Any) -> int:
    if mesh is not None:
        return math.prod(mesh)
    return LOCAL_DEVICES if cluster is None else cluster.num_devices


def _report(found: Any) -> dict[str, Any]:
    compared = found.comparison
    return {
        "ok": found.ok,
        "target": found.target,
        "predicted_wire_bytes": compared.predicted_wire_bytes,
        "emitted_wire_bytes": compared.emitted_wire_bytes,
        "ratio": compared.ratio,
        "flops": found.flops,
        "memory": dict(found.memory),
        "mismatches": list(found.mismatches),
    }


Calibrate = Annotated[
    str | None, typer.Option(help="measure the devices here instead, and write their cluster to this TOML file")
]


@app.command()
def clusters(calibrate: Calibrate = None, as_json: Json = False) -> None:
    """List the cluster presets with their figures, or measure the devices at hand."""
    from autopar.cluster import Cluster
    from autopar.report import clusters as listing
    from autopar.report.text import table

    if calibrate is not None:
        _calibrate(calibrate, as_json)
    elif as_json:
        for name in Cluster.presets():
            show(_figures(name, Cluster.preset(name)))
    else:
        print(table("preset", listing.HEADS, listing.rows(Cluster.presets())))


def _calibrate(path: str, as_json: bool) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from autopar import measure
    from autopar.cluster import Cluster
    from autopar.report import calibration

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("calibrating", total=measure.steps(Cluster.local()))
        found = measure.calibrate(lambda what: progress.update(task, advance=1, description=what))
    found.cluster.save(path)
    if as_json:
        show({**_figures(found.cluster.name, found.cluster), "errors": calibration.errors(found.fits)})
    else:
        print(calibration.text(found))


def _figures(name: str, one: Any) -> Mapping[str, Any]:
    from dataclasses import asdict

    return {"name": name, **asdict(one)}


@bench.command("plan")
def bench_plan(
    model: Annotated[str, typer.Option(help="zoo name, or file.py:function")] = "llama3-8b",
    cluster: ClusterName = None,
    hosts: Hosts = None,
    mesh: MeshSizes = None,
    layers: Layers = None,
    batch: Batch = None,
    seq: Seq = None,
    solver: Solver = "auto",
    repeats: Repeats = 3,
    as_json: Json = False,
) -> None:
    """Time the phases of planning, each repeat in a fresh process. Without mesh and cluster: 32,8."""
    from autopar.bench import plan as measure

    found = sizes(mesh) if mesh is not None else None if cluster is not None else (32, 8)
    spec = {
        "model": model, "mesh": found, "cluster": cluster, "hosts": hosts,
        "layers": layers, "batch": batch, "seq": seq, "solver": solver,
    }  # fmt: skip
    result = measure.run(spec, repeats, say)
    if as_json:
        show(result)
    else:
        print(measure.table(result))


@bench.command("equal")
def bench_equal(
    models: Models = None,
    meshes: Annotated[str | None, typer.Option(help="meshes, such as '8;2,4'")] = None,
    dtypes: Annotated[str | None, typer.Option(help="float32, float64 or both")] = None,
    cluster: Annotated[str, typer.Option(help="dear: plans are really parallel; local: this machine")] = "dear",
    resume: Annotated[Path | None, typer.Option(help="JSONL file that keeps rows")] = None,
    as_json: Json = False,
) -> None:
    """Three parallel steps against three single-device steps, over models and meshes of virtual devices."""
    from autopar.bench import equal

    product = equal.Product(
        words(models, equal.Product.models),
        equal.MESHES if meshes is None else tuple(sizes(part) for part in meshes.split(";")),
        words(dtypes, equal.DTYPES),
        cluster,
    )
    rows = equal.run(product, resume, say)
    if as_json:
        for row in rows:
            show(row)
        show(equal.figures(rows))
    else:
        print(equal.table(rows))
    raise typer.Exit(0 if all(row["ok"] for row in rows) else 1)


@bench.command("step")
def bench_step(
    models: Models = None,
    repeats: Repeats = 20,
    as_json: Json = False,
) -> None:
    """Time autopar's step against the same model sharded by hand, on 8 virtual devices, taking turns."""
    from autopar.bench import step

    rows = step.run(words(models, step.MODELS), repeats, say)
    if as_json:
        show({"rows": rows})
    else:
        print(step.table(rows))


@bench.command("predictions")
def bench_predictions(
    models: Models = None,
    target: Annotated[str, typer.Option(help="cpu (8 virtual devices), or tpu:v5e:2x4 and the like")] = "cpu",
    as_json: Json = False,
) -> None:
    """Predicted peak memory against the compiler's, over models and plans; programs are compiled, never run."""
    from autopar.bench import predictions

    rows = predictions.run(target, None if models is None else words(models, ()), say)
    if as_json:
        show({"rows": rows, **predictions.figures(rows)})
    else:
        print(predictions.table(rows))


@bench.command("compile")
def bench_compile(
    models: Models = None,
    meshes: Annotated[str | None, typer.Option(help="meshes, such as '8;2,4'")] = None,
    plans: Annotated[str | None, typer.Option(help="free, data, fsdp, megatron; with commas between")] = None,
    target: Annotated[str, typer.Option(help="tpu:v5e:2x4, gpu:h100:8 or cpu")] = "tpu:v5e:2x4",
    as_json: Json = False,
) -> None:
    """Compare predicted with compiled collectives, FLOPs and bytes for devices that are not here."""
    from autopar.bench import compile_only

    chosen = compile_only.MESHES if meshes is None else tuple(sizes(part) for part in meshes.split(";"))
    names = words(models, tuple(compile_only.SIZES))
    rows = compile_only.run(names, chosen, words(plans, tuple(compile_only.PLANS)), target, say)
    if as_json:
        show({"rows": rows, **compile_only.figures(rows)})
    else:
        print(compile_only.table(rows))
    raise typer.Exit(0 if all(row["ok"] for row in rows) else 1)


@bench.command("collectives")
def bench_collectives(
    workers: Annotated[int, typer.Option(help="number of devices")] = 8,
    nbytes: Annotated[str | None, typer.Option("--bytes", help="message sizes in bytes, with commas between")] = None,
    cluster: Annotated[str, typer.Option(help="preset, or a TOML file")] = "dgx-h100",
    kind: Annotated[str, typer.Option(help="all-reduce, all-gather, broadcast, ...")] = "all-reduce",
    plot: Annotated[Path | None, typer.Option(help="write a picture of time against bytes")] = None,
    as_json: Json = False,
) -> None:
    """Compare the algorithms of a collective by their closed forms; nothing is measured."""
    from autopar.bench import collectives

    found = collectives.run(workers, collectives.SIZES if nbytes is None else sizes(nbytes), cluster, kind)
    if plot is not None:
        collectives.plot(found, plot)
        say(f"saved to {plot}")
    if as_json:
        show(found)
    else:
        print(collectives.table(found))


@bench.command("memory")
def bench_memory(
    model: Annotated[str, typer.Option(help="zoo name")] = "llama3-8b",
    cluster: ClusterName = None,
    hosts: Hosts = None,
    mesh: MeshSizes = None,
    layers: Layers = None,
    batch: Batch = None,
    seq: Seq = None,
    points: Annotated[int, typer.Option(help="budgets to ask for")] = 8,
    plot: Annotated[Path | None, typer.Option(help="write a picture of time against memory")] = None,
    as_json: Json = False,
) -> None:
    """The Pareto front of step time against peak memory. Without mesh and cluster: 32,8 of dgx-h100."""
    from autopar import targets, zoo
    from autopar.bench import memory

    shape = sizes(mesh) if mesh is not None else (32, 8) if cluster is None else None
    one = targets.cluster(cluster or "dgx-h100", hosts, shape)
    found = memory.run(
        zoo.build(model, layers=layers, batch=batch, seq=seq), one.logical_mesh(shape or one.default_shape), points
    )
    if plot is not None:
        memory.plot(found, plot)
        say(f"saved to {plot}")
    if as_json:
        show(found)
    else:
        print(memory.table(found))


@bench.command("ranking")
def bench_ranking(
    models: Models = None,
    cluster: Annotated[
        Path | None, typer.Option(help="TOML file of a calibrated cluster; default: measure now")
    ] = None,
    repeats: Repeats = 5,
    as_json: Json = False,
) -> None:
    """Predicted against measured step times of widely different plans, on 8 virtual devices."""
    from autopar.bench import ranking

    rows = ranking.run(words(models, ranking.MODELS), None if cluster is None else str(cluster), repeats, say)
    if as_json:
        show({"rows": rows, **ranking.figures(rows)})
    else:
        print(ranking.table(rows))


def main() -> None:
    """The entry point `autopar`."""
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    try:
        app(arguments)
    except AutoparError as error:
        if "--debug" in sys.argv[1:]:
            raise
        say(f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
