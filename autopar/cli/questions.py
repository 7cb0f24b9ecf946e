"""Commands that ask about a plan: `explain`, `diff`, `what-if`, `trace`, `profile`, `report`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.options import Json, PinTexts, StrategyTexts, pins_of, report, say, show, sizes, telling
from autopar.cli.step import Step, with_step
from autopar.errors import ArgumentError
from autopar.ir.text import seconds

if TYPE_CHECKING:
    from autopar.plans.plan import Plan

app = typer.Typer()


@app.command()
@with_step
def explain(
    step: Step,
    name: Annotated[
        str, typer.Argument(help="a glob for arguments, out:0, a source line such as model.py:30, or an op")
    ],
    exact: Annotated[bool, typer.Option("--exact", help="solve again for each layout, in place of a bound")] = False,
    as_json: Json = False,
) -> None:
    """Say why values of TARGET have their layouts, what that sends, and what other layouts would cost."""
    explanation = step.plan().explain(name, exact=exact)
    report(as_json, explanation.data(), lambda: str(explanation))


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="a saved plan")],
    after: Annotated[Path, typer.Argument(help="a saved plan of the same step")],
    as_json: Json = False,
) -> None:
    """Show two saved plans side by side: figures, layouts of arguments, and collectives that differ."""
    from autopar.plans.plan import Plan

    with telling("diff", f"reading {before} and {after}"):
        compared = Plan.load(before).diff(Plan.load(after))
        report(as_json, compared.data(), lambda: str(compared))


@app.command()
@with_step
def what_if(
    step: Step,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="an option that changes, as in memory_budget=40GiB")
    ] = None,
    pins: PinTexts = None,
    strategies: StrategyTexts = None,
    output: Annotated[Path | None, typer.Option(help="save the plan under the changes as JSON")] = None,
    as_json: Json = False,
) -> None:
    """Plan TARGET under other options as well, and show both plans side by side."""
    changed = _changes(changes or (), pins_of(pins, strategies), step.hosts)
    plan: Any = step.plan_with_step()
    with step.remembered():
        compared = plan.what_if(**changed)
    if output is not None:
        compared.after.save(output)
    report(as_json, compared.data(), lambda: str(compared))


@app.command()
@with_step
def trace(
    step: Step,
    output: Annotated[Path, typer.Argument(help="the file to write, such as step.trace.json")],
    as_json: Json = False,
) -> None:
    """Write the predicted step of TARGET as a timeline for https://ui.perfetto.dev."""
    plan = step.plan()
    with telling("trace", f"writing {output}"):
        plan.trace(output)
    _written(plan, output, as_json)


@app.command()
@with_step
def profile(
    step: Step,
    steps: Annotated[int, typer.Option(help="steps that are measured")] = 3,
    devices: Annotated[int | None, typer.Option(help="use so many virtual CPU devices")] = None,
    output: Annotated[Path | None, typer.Option(help="write both timelines, for https://ui.perfetto.dev")] = None,
    as_json: Json = False,
) -> None:
    """Run TARGET on the devices of this machine, and print measured times beside the predicted ones."""
    from autopar.bench.worker import cpu_devices

    if devices is not None:
        cpu_devices(devices)
    with telling("profile", f"planning, compiling, measuring steps: {steps}"):
        measured = step.profile(steps)
    if output is not None:
        measured.trace(output)
        say(f"written to {output}")
    report(as_json, measured.data(), lambda: str(measured))


@app.command("report")
@with_step
def report_page(
    step: Step,
    output: Annotated[Path, typer.Argument(help="the page to write, such as plan.html")],
    baselines: Annotated[
        bool, typer.Option("--baselines", help="plan data parallel, ZeRO-1, FSDP and Megatron as well, to compare")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the plan of TARGET as one page for a browser, which needs no network."""
    plan = step.plan()
    with step.remembered(), telling("report", f"writing {output}"):
        plan.report(output, baselines=baselines)
    _written(plan, output, as_json)


def _written(plan: Plan, output: Path, as_json: bool) -> None:
    """Say what a file has: on stderr, or as JSON on stdout."""
    if as_json:
        show({"written_to": str(output), "stages": len(plan.stages), "step_time_s": plan.step_time_s})
    else:
        stages = f"{len(plan.stages)} stages, " if plan.pipelined else ""
        say(f"{stages}{seconds(plan.step_time_s)} per step, written to {output}")


def _changes(changes: Sequence[str], pins: Mapping[str, Any], hosts: int | None) -> dict[str, Any]:
    """Options of `Plan.what_if`. ArgumentError for a text that is no option."""
    changed = dict(_split(text, "--set", "memory_budget=40GiB") for text in changes)
    unknown = [name for name in changed if name not in _VALUES]
    if unknown:
        raise ArgumentError(f"--set {unknown[0]}=: not known. Available: {', '.join(sorted(_VALUES))}")
    values: dict[str, Any] = {name: _VALUES[name](text) for name, text in changed.items()}
    if "cluster" in values:
        from autopar.zoo import targets

        values["cluster"] = targets.cluster(values["cluster"], hosts, values.get("mesh"))
    if pins:
        values["pins"] = pins
    if not values:
        raise ArgumentError("give what changes: --set memory_budget=40GiB, --pin 'params/*/wq=x,None' or --pins fsdp:x")
    return values


def _split(text: str, option: str, example: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ArgumentError(f"{option} {text!r}: give a name and a value, such as {example}")
    return name.strip(), value.strip()


def _count_or_word(text: str) -> Any:
    return int(text) if text.isdecimal() else text


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ArgumentError(f"--set {text!r}: give a number") from error


def _text(text: str) -> Any:
    return text


#: Option of `Plan.what_if` -> its value from text.
_VALUES: Mapping[str, Callable[[str], Any]] = {
    "memory_budget": _text,
    "mesh": sizes,
    "cluster": _text,
    "stages": _count_or_word,
    "num_microbatches": _count_or_word,
    "schedule": _text,
    "remat": _text,
    "offload": _text,
    "gap": _number,
    "time_limit": _number,
}
