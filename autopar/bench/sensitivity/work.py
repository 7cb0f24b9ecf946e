"""Worker of `autopar bench sensitivity`: plans one program with one number changed at a time.

The program is traced once. Each plan is made in a fork of the process, which has no caches of the plans before it and
runs on one processor, so that all its time is its own. A first plan tells which fields planning reads at all: the
others cannot change it and are not tried.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from autopar import api, zoo
from autopar.bench import memory, worker
from autopar.bench.sensitivity import records
from autopar.bench.sensitivity.programs import PROGRAMS, SECONDS, Program
from autopar.errors import AutoparError
from autopar.ir.trace import trace
from autopar.zoo import targets

#: A variant is given up after so many times the time of the default, and this many seconds.
PATIENCE_RATIO, PATIENCE_SECONDS = 5.0, 10.0

Outcome = dict[str, Any]


def work(spec: Mapping[str, Any]) -> Iterator[Outcome]:
    """A row for each value of each field that the spec names: `program`, and `fields` as [algorithm, field, values]."""
    program = PROGRAMS[spec["program"]]
    model = zoo.build(program.model)
    trace(model.step, *model.abstract_args())  # JAX keeps it, so that forks trace in no time
    budget = _budget(program, model)
    plan = partial(_planned, program, model, budget)
    first = _forked(partial(_reads, plan), math.inf)
    if "error" in first:
        raise worker.WorkerError(f"{spec['program']} has no plan with the default numbers: {first['error']}")
    read = set(map(tuple, first["read"]))
    last, base = "", Outcome()
    for algorithm, field, values in spec["fields"]:
        if (algorithm, field) not in read:
            yield {"program": spec["program"], "algorithm": algorithm, "field": field, "read": False}
            continue
        if algorithm != last:  # again for each record: the machine may be busier than before
            last, base = algorithm, _forked(plan, math.inf)
        for value in values:
            outcome = _forked(partial(_varied, plan, algorithm, field, value), _patience(base))
            row = {"program": spec["program"], "algorithm": algorithm, "field": field, "value": value, "read": True}
            yield {**row, **outcome, **{f"default_{name}": x for name, x in base.items()}}


def _patience(base: Outcome) -> float:
    return PATIENCE_RATIO * base["wall_s"] + PATIENCE_SECONDS


def _budget(program: Program, model: zoo.Model) -> int | None:
    """Bytes per device."""
    if program.budget is None:
        return None
    free = _forked(partial(_planned, program, model, None, free=True), math.inf)
    return int(program.budget * free["peak_bytes"])


def _planned(program: Program, model: zoo.Model, budget: int | None, free: bool = False) -> Outcome:
    """Plan, and say what came out: step time (s), relative gap, peak (bytes), time of planning (s).

    For a Pareto front the step time is the mean of step time over bound, without unit.
    """
    cluster = targets.cluster(program.cluster, program.hosts, program.mesh or None)
    begin, spent = time.perf_counter(), _processor_seconds()
    try:
        if program.points:
            points = memory.run(model, cluster.logical_mesh(program.mesh), program.points)["points"]
            # fronts differ in the number of their points, so each point is compared with its bound
            above = statistics.mean(p["step_s"] / p["lower_s"] for p in points)
            out = {"step_s": above, "gap": above - 1}
        else:
            plan = api.plan(
                model.step,
                *model.abstract_args(),
                mesh=program.mesh or None,
                cluster=cluster,
                memory_budget=budget if not free else 1 << 60,
                remat="none" if free else program.remat,
                offload="none",
                stages=program.stages,
                time_limit=SECONDS,
            )
            peak = plan.peak_memory_bytes
            out = {"step_s": plan.step_time_s, "gap": plan.gap, "peak_bytes": peak}
    except AutoparError as error:
        out = {"step_s": math.inf, "gap": math.inf, "error": f"{type(error).__name__}: {str(error)[:120]}"}
    return {**out, "cpu_s": _processor_seconds() - spent, "wall_s": time.perf_counter() - begin}


def _processor_seconds() -> float:
    """Of this process and of its children that ended (ILP solvers)."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _varied(plan: Callable[[], Outcome], algorithm: str, field: str, value: records.Value) -> Outcome:
    records.replace_in_process(algorithm, field, value)
    return plan()


def _reads(plan: Callable[[], Outcome]) -> Outcome:
    """Which (algorithm, field) planning reads."""
    read: set[tuple[str, str]] = set()
    for algorithm, record in records.RECORDS.items():
        object.__setattr__(record, "__class__", _recording(type(record), algorithm, read))
    return {**plan(), "read": sorted(read)}


def _recording(kind: type, algorithm: str, read: set[tuple[str, str]]) -> type:
    """A subclass of a record's class that notes the fields that are read."""
    names = records.fields(algorithm)

    def getattribute(self: Any, name: str) -> Any:
        if name in names:
            read.add((algorithm, name))
        return object.__getattribute__(self, name)

    return type(kind.__name__, (kind,), {"__slots__": (), "__getattribute__": getattribute})


def _forked(task: Callable[[], Outcome], patience: float) -> Outcome:
    """What a task returns in a fork of this process, on one processor; without a step time if it takes too long."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()  # with its own children, so that all of them can be ended
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            with os.fdopen(writing, "w") as file:
                file.write(json.dumps(task()))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as file:
        limit = None if math.isinf(patience) else patience
        late = not select.select([file], [], [], limit)[0]
        if late:
            os.killpg(child, signal.SIGKILL)
        text = file.read()
    os.waitpid(child, 0)
    if late:
        return {"step_s": math.nan, "gap": math.nan, "cpu_s": patience, "wall_s": patience, "late": True}
    if not text:
        raise worker.WorkerError("a fork that planned died")
    return json.loads(text)


if __name__ == "__main__":
    worker.serve(work)
