"""The command line: `autopar COMMAND TARGET ...`, and `autopar bench MEASUREMENT ...`.

Exit status 0: fine; 1: an AutoparError, or a check that fails; 2: wrong usage, also a name, a file, a size or the value
of an option that is wrong (`WRONG_USAGE`). With --json, stdout holds JSON alone;
progress and errors go to stderr. --debug, anywhere, shows tracebacks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli import bench, questions
from autopar.cli.launch import launch
from autopar.cli.options import (
    Attention,
    Batch,
    Gap,
    Json,
    Layers,
    Offload,
    PerMicrobatch,
    SelectiveScan,
    Seq,
    Target,
    TimeLimit,
    finish,
    report,
    say,
    show,
    telling,
    words,
)
from autopar.cli.step import Step, with_step
from autopar.errors import ArgumentError, AutoparError, ClusterError, MeshError, PinError, ScheduleError

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
@with_step
def plan(
    step: Step,
    offload: Offload = "auto",
    per_microbatch: PerMicrobatch = None,
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
) -> None:
    """Plan TARGET and print the plan as a table, or as JSON."""
    planned = step.plan(
        offload=offload,
        per_microbatch=words(per_microbatch, ()),
        time_limit=time_limit,
        **({} if gap is None else {"gap": gap}),
    )
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
        print(planned.summary(planned.origin.graph if planned.origin else None))
    if hints:
        with step.remembered():
            faster = planned.hints()
        print("\n".join(["", *(f"faster: {hint}" for hint in faster)] if faster else ["", "no other option is faster"]))
    for use in (*((planned.time(),) if time else ()), *((planned.memory(),) if memory else ())):
        print(str(use).lstrip("\n"))


@app.command()
def rules(
    target: Target,
    layers: Layers = None,
    batch: Batch = None,
    seq: Seq = None,
    attention: Attention = None,
    selective_scan: SelectiveScan = None,
    as_json: Json = False,
) -> None:
    """List each distinct operation of TARGET: how often it occurs, name, operands, rule, and whose rule it is."""
    from autopar.zoo import targets

    fn, args = targets.load(
        target, layers=layers, batch=batch, seq=seq, attention=attention, selective_scan=selective_scan
    )
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
@with_step
def verify(
    step: Step,
    against: Annotated[
        str, typer.Option("--target", help="cpu (virtual devices), shardy (any size), tpu:v5e:2x4, gpu:h100:8")
    ] = "shardy",
    as_json: Json = False,
) -> None:
    """Compare the collectives that the plan of TARGET predicts with those that the compiler emits."""
    from autopar.bench.worker import cpu_devices
    from autopar.verification import verify as verification

    if against == "cpu":
        cpu_devices(step.devices(LOCAL_DEVICES))
    planned = step.plan_with_step()
    fn, args = step.loaded()
    with telling("verify", f"compiling for {against}"):
        verified = verification.verify(planned, fn, *args, target=against)
    report(as_json, _report(verified), lambda: str(verified))
    finish(verified.ok)


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


#: Errors that say that what was given on the command line is wrong.
WRONG_USAGE = (ArgumentError, ClusterError, MeshError, PinError, ScheduleError)


def main() -> None:
    """The entry point `autopar`."""
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    try:
        app(arguments)
    except AutoparError as error:
        if "--debug" in sys.argv[1:]:
            raise
        say(f"{type(error).__name__}: {error}")
        sys.exit(2 if isinstance(error, WRONG_USAGE) else 1)
