"""The command line: `autopar COMMAND TARGET ...`, and `autopar bench MEASUREMENT ...`.

Exit status 0: fine; 1: an AutoparError, or a check that fails; 2: wrong usage. With --json, stdout holds JSON alone;
progress and errors go to stderr. --debug, anywhere, shows tracebacks.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli import bench, questions
from autopar.cli.launch import launch
from autopar.cli.options import (
    Batch,
    ClusterName,
    Gap,
    Hosts,
    Json,
    Layers,
    MemoryBudget,
    MeshSizes,
    Microbatches,
    NoCache,
    Offload,
    PerMicrobatch,
    PinTexts,
    PlanFile,
    Remat,
    ScheduleName,
    Seq,
    Solver,
    Stages,
    StrategyTexts,
    Target,
    TimeLimit,
    cache,
    finish,
    in_stages,
    options,
    pins_of,
    report,
    say,
    show,
    telling,
    words,
)
from autopar.errors import AutoparError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(questions.app)
app.add_typer(bench.app, name="bench")
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(launch)


def _print_version(wanted: bool) -> None:
    if wanted:
        from autopar import jax_compat
        from autopar.version import VERSION

        print(f"autopar {VERSION}, {jax_compat.versions()}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="print versions of autopar and JAX"),
]


@app.callback()
def _options(version: Version = False) -> None:
    del version  # printed by its callback


LOCAL_DEVICES = 8  # virtual CPU devices of `verify --target cpu` without a mesh


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
    remat: Remat = "auto",
    offload: Offload = "auto",
    num_microbatches: Microbatches = None,
    stages: Stages = "auto",
    schedule: ScheduleName = "auto",
    per_microbatch: PerMicrobatch = None,
    pins: PinTexts = None,
    strategies: StrategyTexts = None,
    solver: Solver = "auto",
    gap: Gap = None,
    time_limit: TimeLimit = None,
    output: Annotated[Path | None, typer.Option(help="save the plan as JSON")] = None,
    picture: Annotated[Path | None, typer.Option(help="draw the plan: a .png or .svg file")] = None,
    time: Annotated[bool, typer.Option("--time", help="print where the time goes, by source line or stage")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="print what the memory holds, by kind and in time")] = False,
    hints: Annotated[
        bool, typer.Option("--hints", help="plan under other options too, and print what is faster")
    ] = False,
    as_json: Json = False,
    no_cache: NoCache = False,
) -> None:
    """Plan TARGET and print the plan as a table, or as JSON."""
    from autopar import api
    from autopar.codegen.rewrites import apply_rewrites
    from autopar.ir.trace import trace
    from autopar.zoo import targets

    fn, args = targets.load(target, layers=layers, batch=batch, seq=seq)
    with cache(not no_cache):
        chosen = options(mesh, cluster, hosts, solver, memory_budget)
        asked: dict[str, Any] = {
            **in_stages(stages, schedule, num_microbatches),
            "per_microbatch": words(per_microbatch, ()),
            "pins": pins_of(pins, strategies),
            "remat": remat,
            "offload": offload,
            "time_limit": time_limit,
            **({} if gap is None else {"gap": gap}),
        }
        planned = api.plan(fn, *args, **asked, **chosen)
    if output is not None:
        planned.save(output)
        say(f"saved to {output}")
    if picture is not None:
        planned.picture(picture)
        say(f"drawn to {picture}")
    if as_json:
        print(planned.to_json())
        return
    if not (time or memory):
        print(planned.summary(apply_rewrites(trace(fn, *args), planned).graph))
    if hints:
        with cache(not no_cache):
            faster = planned.hints()
        print("\n".join(["", *(f"faster: {hint}" for hint in faster)] if faster else ["", "no other option is faster"]))
    for use in (*((planned.time(),) if time else ()), *((planned.memory(),) if memory else ())):
        print(str(use).lstrip("\n"))


@app.command()
def rules(target: Target, layers: Layers = None, batch: Batch = None, seq: Seq = None, as_json: Json = False) -> None:
    """List each distinct operation of TARGET: how often it occurs, name, operands, rule, and whose rule it is."""
    from autopar.zoo import targets

    fn, args = targets.load(target, layers=layers, batch=batch, seq=seq)
    for row in _rules(fn, args):
        if as_json:
            show(row)
        else:
            print(f"{row['count']:>6}  {row['name']}({', '.join(row['operands'])})  {row['rule']}  [{row['origin']}]")


def _rules(fn: Any, args: Sequence[Any]) -> list[dict[str, Any]]:
    from autopar.ir.trace import trace
    from autopar.rules import rules_of

    graph = trace(fn, *args).graph
    rules = rules_of(graph)
    leaves = [op for op in graph.walk() if not op.regions]
    counts = Counter(op.signature for op in leaves)  # in the order in which they are met first
    examples = {op.signature: op for op in leaves}
    return [
        {
            "name": examples[s].name, "operands": [str(graph.type_of(a)) for a in examples[s].inputs],
            "rule": str(rules[s]), "origin": rules[s].origin, "count": count,
        }
        for s, count in counts.items()
    ]  # fmt: skip


@app.command()
def verify(
    target: Target,
    against: Annotated[
        str, typer.Option("--target", help="cpu (virtual devices), shardy (any size), tpu:v5e:2x4, gpu:h100:8")
    ] = "shardy",
    plan_file: PlanFile = None,
    cluster: ClusterName = None,
    hosts: Hosts = None,
    mesh: MeshSizes = None,
    layers: Layers = None,
    batch: Batch = None,
    seq: Seq = None,
    num_microbatches: Microbatches = None,
    stages: Stages = "auto",
    schedule: ScheduleName = "auto",
    solver: Solver = "auto",
    as_json: Json = False,
    no_cache: NoCache = False,
) -> None:
    """Compare the collectives that the plan of TARGET predicts with those that the compiler emits."""
    from autopar import api
    from autopar.bench.worker import cpu_devices
    from autopar.plans.plan import Plan
    from autopar.verification import verify as verification
    from autopar.zoo import targets

    saved = None if plan_file is None else Plan.load(plan_file)
    chosen = options(mesh, cluster, hosts, solver, None)
    if against == "cpu":
        cpu_devices(_devices(saved.mesh_sizes if saved else chosen["mesh"], chosen.get("cluster")))
    fn, args = targets.load(target, layers=layers, batch=batch, seq=seq)
    with cache(not no_cache):
        planned = saved or api.plan(fn, *args, **in_stages(stages, schedule, num_microbatches), **chosen)
    with telling("verify", f"compiling for {against}"):
        verified = verification.verify(planned, fn, *args, target=against)
    report(as_json, _report(verified), lambda: str(verified))
    finish(verified.ok)


def _devices(mesh: Sequence[int] | None, cluster: Any) -> int:
    if mesh is not None:
        return math.prod(mesh)
    return LOCAL_DEVICES if cluster is None else cluster.num_devices


def _report(verified: Any) -> dict[str, Any]:
    compared = verified.comparison
    return {
        "ok": verified.ok,
        "target": verified.target,
        "predicted_wire_bytes": compared.predicted_wire_bytes,
        "emitted_wire_bytes": compared.emitted_wire_bytes,
        "ratio": compared.ratio,
        "flops": verified.flops,
        "memory": dict(verified.memory),
        "mismatches": list(verified.mismatches),
    }


Calibrate = Annotated[
    str | None, typer.Option(help="measure the devices here instead, and write their cluster to this TOML file")
]


@app.command()
def clusters(calibrate: Calibrate = None, as_json: Json = False) -> None:
    """List the cluster presets with their figures, or measure the devices at hand."""
    from autopar.cli import cluster_tables as listing
    from autopar.hardware.cluster import Cluster
    from autopar.ir.text import table

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

    from autopar.cli import calibration_tables
    from autopar.hardware import measure
    from autopar.hardware.cluster import Cluster

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("calibrating", total=measure.steps(Cluster.local()))
        calibration = measure.calibrate(
            Cluster.local(), lambda what: progress.update(task, advance=1, description=what)
        )
    calibration.cluster.save(path)
    report(
        as_json,
        {
            **_figures(calibration.cluster.name, calibration.cluster),
            "errors": calibration_tables.errors(calibration.fits),
        },
        lambda: calibration_tables.text(calibration),
    )


def _figures(name: str, cluster: Any) -> Mapping[str, Any]:
    from dataclasses import asdict

    return {"name": name, **asdict(cluster)}


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
