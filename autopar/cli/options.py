"""What the commands share: options, and how text becomes values and values text."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from autopar.cli import completion
from autopar.errors import ArgumentError

Target = Annotated[
    str, typer.Argument(help="zoo name such as llama3-8b, or file.py:function", autocompletion=completion.targets)
]
TargetOrPlan = Annotated[
    str,
    typer.Argument(
        help="zoo name such as llama3-8b, file.py:function, or for some commands a saved plan.json",
        autocompletion=completion.targets_and_plans,
    ),
]
ClusterName = Annotated[
    str | None, typer.Option("--cluster", help="preset, or a TOML file", autocompletion=completion.clusters)
]
Hosts = Annotated[int | None, typer.Option(min=1, help="number of hosts; default: what the mesh needs")]
MeshSizes = Annotated[
    str | None, typer.Option("--mesh", help="axis sizes, such as 32,8; priced as dgx-h100 by default")
]
Layers = Annotated[int | None, typer.Option(help="layers of the model")]
Batch = Annotated[int | None, typer.Option(help="global batch")]
Seq = Annotated[int | None, typer.Option(help="tokens per sequence")]
Attention = Annotated[
    str | None,
    typer.Option(
        help="of gpt, llama3, moe and vit: naive, dot_product, cudnn or splash; default: naive",
        autocompletion=completion.attentions,
    ),
]
SelectiveScan = Annotated[
    str | None,
    typer.Option(
        help="of mamba: associative or pallas; default: associative",
        autocompletion=completion.selective_scans,
    ),
]
Dtype = Annotated[str | None, typer.Option(help="dtype of parameters and computation, such as bfloat16")]
Solver = Annotated[str, typer.Option(help="auto, cbc or highs", autocompletion=completion.values("solver"))]
Gap = Annotated[
    float | None, typer.Option(help="tolerance of the step, against the bound on all plans; default: 0.005, 0: a proof")
]
TimeLimit = Annotated[
    float | None, typer.Option(help="seconds for planning; default: about what compiling takes, 5 at least")
]
MemoryBudget = Annotated[
    str | None, typer.Option(help="bytes per device, as in 12GiB or 80%, or min; default: the device's memory")
]
Remat = Annotated[
    str,
    typer.Option(
        help="what the backward pass computes again: auto, none, dots or full",
        autocompletion=completion.values("remat"),
    ),
]
Offload = Annotated[
    str,
    typer.Option(
        help="optimizer state in the host's memory: auto (what memory forces there), none or all",
        autocompletion=completion.values("offload"),
    ),
]
Microbatches = Annotated[
    int | None, typer.Option("--num-microbatches", min=1, help="parts of the batch, one after the other")
]
Stages = Annotated[
    str,
    typer.Option(
        help="parts of the model, side by side on submeshes: a number, search or auto",
        autocompletion=completion.values("stages"),
    ),
]
ScheduleName = Annotated[
    str,
    typer.Option(
        "--schedule", help="of the stages: auto, gpipe, 1f1b, zb-h1, ...", autocompletion=completion.values("schedule")
    ),
]
PerMicrobatch = Annotated[str | None, typer.Option(help="globs of what microbatches may compute each for itself")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="a saved plan; default: plan afresh")]
PinTexts = Annotated[
    list[str] | None,
    typer.Option("--pin", help="a pin, as in 'params/*/wq=x,None', 'batch=x+y' or 'model.py:30=x'; may be repeated"),
]
StrategyTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--pins",
        help="a strategy and its axis: data_parallel:x, zero1:x, fsdp:x, megatron:y; repeatable",
        autocompletion=completion.strategies,
    ),
]
CorpusModule = Annotated[
    str | None, typer.Option("--corpus", help="module with PROGRAMS; default: tests.corpus.table of this checkout")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON alone on stdout")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="plan afresh, and keep nothing")]
Meshes = Annotated[str | None, typer.Option(help="meshes, such as '8;2,4'")]
Plot = Annotated[Path | None, typer.Option(help="write a picture of it to this file")]
Models = Annotated[str | None, typer.Option(help="zoo names, with commas between")]
Repeats = Annotated[int, typer.Option(min=1, help="how often to measure; medians are shown")]


def say(text: str) -> None:
    """Progress and errors, to stderr."""
    print(text, file=sys.stderr, flush=True)


def show(data: Any) -> None:
    """One line of JSON on stdout."""
    print(json.dumps(data), flush=True)


@contextlib.contextmanager
def telling(command: str, activity: str) -> Iterator[None]:
    """What a command does, on stderr, if that takes long and stderr is a terminal: as planning tells its progress."""
    from autopar.progress import reporting

    with reporting(command, None) as progress:
        progress(activity)
        yield


def report(as_json: bool, data: Any, text: Callable[[], str]) -> None:
    """The result on stdout: JSON, or what people read."""
    if as_json:
        show(data)
    else:
        print(text())


def sizes(text: str) -> tuple[int, ...]:
    """ "32,8" -> (32, 8). ArgumentError if it is no list of positive integers."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ArgumentError(f"mesh {text!r}: give sizes with commas between, such as 32,8") from error
    if any(size < 1 for size in numbers):
        raise ArgumentError(f"mesh {text!r}: sizes must be at least 1")
    return numbers


def mesh_list(text: str | None, default: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """ "8;2,4" -> ((8,), (2, 4))."""
    return default if text is None else tuple(sizes(part) for part in text.split(";"))


def words(text: str | None, default: Sequence[str]) -> tuple[str, ...]:
    """ "a,b" -> ("a", "b")."""
    return tuple(default) if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def options(
    mesh: str | None, cluster: str | None, hosts: int | None, solver: str, memory_budget: str | None
) -> dict[str, Any]:
    """Options of `autopar.plan`."""
    from autopar.zoo import targets

    if hosts is not None and cluster is None:
        raise ArgumentError(f"--hosts {hosts} needs --cluster")
    mesh_sizes = None if mesh is None else sizes(mesh)
    chosen: dict[str, Any] = {"mesh": mesh_sizes, "solver": solver}
    if cluster is not None:
        chosen["cluster"] = targets.cluster(cluster, hosts, mesh_sizes)
    return chosen if memory_budget is None else {**chosen, "memory_budget": memory_budget}


def in_stages(stages: str, schedule: str, num_microbatches: int | None) -> dict[str, Any]:
    """Options of `autopar.plan` that concern stages."""
    count = int(stages) if stages.isdecimal() else stages
    return {"stages": count, "schedule": schedule, "num_microbatches": num_microbatches or "auto"}


def pins_of(pins: Sequence[str] | None, strategies: Sequence[str] | None) -> dict[str, Any]:
    """The option `pins` from the texts of --pin and --pins. ArgumentError for a text that is none."""
    return {**dict(map(_strategy, strategies or ())), **dict(map(_pin, pins or ()))}


def _strategy(text: str) -> tuple[str, Any]:
    """ "fsdp:x+y" -> a strategy over two axes."""
    from jax.sharding import PartitionSpec

    from autopar.passes.strategies import STRATEGIES

    name, separator, axes = (part.strip() for part in text.partition(":"))
    if name not in STRATEGIES or not separator or not axes:
        raise ArgumentError(
            f"--pins {text!r}: give a strategy and its axis, as in fsdp:x. Known: {', '.join(STRATEGIES)}"
        )
    return name, PartitionSpec(_axes(axes))


def _pin(text: str) -> tuple[str, Any]:
    """ "params/*/wq=x+y,None" -> a pin of dimension 0 over two axes."""
    from jax.sharding import PartitionSpec

    name, separator, value = (part.strip() for part in text.rpartition("="))
    if not separator or not name:
        raise ArgumentError(f"--pin {text!r}: give a name and a value, such as 'params/*/wq=x,None'")
    entries = [part.strip() for part in value.split(",")] if value else []
    return name, PartitionSpec(*(None if part in ("None", "-", "") else _axes(part) for part in entries))


def _axes(text: str) -> str | tuple[str, ...]:
    axes = tuple(part.strip() for part in text.split("+"))
    return axes[0] if len(axes) == 1 else axes


def cache(use: bool) -> contextlib.AbstractContextManager[None]:
    """Where plans are made: with those that are kept on disk, or without."""
    from autopar.plans import cache as plan_cache

    return contextlib.nullcontext() if use else plan_cache.off()


def finish(holds: bool) -> NoReturn:
    """End a command that checks something: with status 0 if it holds, else 1."""
    raise typer.Exit(0 if holds else 1)
