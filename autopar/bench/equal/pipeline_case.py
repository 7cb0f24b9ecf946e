"""One case of `autopar bench equal --pipeline`: three steps in stages against three steps on one device.

Criteria are those of `case`: every leaf to 1e-9 in float64, losses to 1e-5 in float32, parameters no further than
ten times what the hand-written data-parallel step differs by; donation, one trace, a new plan for a new shape. Besides,
at least `MIN_LOOP_SHARE` of the FLOPs run in the loop over microbatches, unless the model's examples depend on each
other.

The batch is `BATCH` examples, so that every stage has a few in every microbatch. Layouts of the state are pinned, whole
or as the model's table for tensor parallelism has them; all else is planned at the prices of `case.dear`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

import autopar
from autopar import zoo
from autopar.bench.compile_only import PLANS
from autopar.bench.equal import case as equal_case
from autopar.bench.equal.case import Single
from autopar.bench.worker import cpu_devices, serve
from autopar.errors import ScheduleError
from autopar.hardware import meshes
from autopar.ir.trace import trace
from autopar.passes.inter_op import pipelines
from autopar.passes.microbatch.split import MIN_LOOP_SHARE
from autopar.plans.builders.pipeline import choice_of

DEVICES = 8
#: A loss that compares all examples: stages have no backward pass, and schedules with one are refused.
COMPARED = ("clip-toy",)
#: These, and batch norm over the whole batch: one microbatch.
COUPLED = ("wresnet-toy", "resnet-toy", *COMPARED)

BATCH = 16


@dataclass(frozen=True)
class Row(equal_case.Differences):
    """The result of one case.

    Attributes:
        ok: all of `failures` is empty.
        microbatches: how many the step ran in.
        share: part of the FLOPs that runs in the loop over them.
        refusal: why they are one, where more were refused; why the case did not run, where the schedule was.
        failures: a line for each criterion that does not hold.
    """

    model: str
    schedule: str
    stages: int
    inner: str
    dtype: str
    ok: bool
    microbatches: int = 0
    share: float = 0.0
    refusal: str = ""
    failures: tuple[str, ...] = ()


def case(baseline: Single, schedule: str, stages: int, inner: str, dtype: str) -> Row:
    """All criteria for one model under one schedule."""
    inputs = baseline.inputs
    coupled = inputs.model.name in COUPLED
    ours = equal_case.parallel(inputs, replans=False, **options(inputs.model, schedule, stages, inner))
    numbers, wrong = equal_case.compared(baseline, ours.run, dtype, DEVICES)
    refusal = next((note for note in ours.plan.notes if note.startswith("one microbatch")), "")
    row = Row(
        inputs.model.name,
        schedule,
        stages,
        inner,
        dtype,
        ok=False,
        microbatches=ours.plan.num_microbatches,
        share=_share(baseline, ours.plan),
        **asdict(numbers),
        refusal=refusal,
    )
    failures = (*wrong, *ours.habits, *_split(row, coupled))
    return replace(row, ok=not failures, failures=failures)


def options(model: zoo.Model, schedule: str, stages: int, inner: str) -> Mapping[str, Any]:
    """Stages, and the mesh, prices and pins under which the devices of a stage divide what they are to divide."""
    single = model.name in COUPLED  # one microbatch, which an interleaved schedule does not take
    asked = "auto" if single and schedule == "interleaved-1f1b" else schedule
    mesh = {"pipe": DEVICES} if inner == "data" else {"pipe": stages, "model": DEVICES // stages}
    pins = PLANS["data" if inner == "data" else "megatron"](model, mesh)
    state = {path: spec for path, spec in (pins or {}).items() if path.startswith("state/")}
    cluster = equal_case.dear(tuple(mesh.values()))
    return {"stages": stages, "schedule": asked, "mesh": mesh, "cluster": cluster, "pins": state}


def _share(baseline: Single, plan: autopar.Plan) -> float:
    """Part of the FLOPs in the loop over microbatches."""
    graph = trace(baseline.inputs.model.step, baseline.inputs.state, baseline.inputs.batches[0]).graph
    pipelined = pipelines.assemble(graph, choice_of(plan), meshes.targets(plan.mesh, None, local=True)[0])
    return pipelined.stages.split.loop_share


def _split(row: Row, coupled: bool) -> list[str]:
    if coupled != bool(row.refusal):
        return ["refused although no examples depend on each other" if row.refusal else "not refused"]
    return [] if coupled or row.share >= MIN_LOOP_SHARE else [f"{row.share:.1%} of the FLOPs run in the loop"]


def work(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Rows of one model and dtype under several schedules; an error becomes a failed row."""
    cpu_devices(DEVICES)
    jax.config.update("jax_enable_x64", spec["dtype"] == "float64")
    warnings.simplefilter("ignore")
    baseline = equal_case.single(spec["model"], spec["dtype"], BATCH)
    for asked in spec["cases"]:
        try:
            row = case(baseline, **asked, dtype=spec["dtype"])
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
            expected = isinstance(error, ScheduleError) and spec["model"] in COMPARED
            failed = Row(spec["model"], **asked, dtype=spec["dtype"], ok=expected)
            row = replace(failed, refusal=text) if expected else replace(failed, failures=(text,))
        yield asdict(row)


if __name__ == "__main__":
    serve(work)
