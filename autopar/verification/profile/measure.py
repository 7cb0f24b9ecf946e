"""Measures a step: runs it under JAX's profiler, and finds the program and the instruction of every operation.

An operation belongs to the program that has the name of its module. A device runs a program as often as the schedule
says, one run after the other. So the j-th of n executions of an operation on a device is part of run `j R // n` of the
R runs of its program in a step, and the k-th run is the k-th instruction of the schedule that calls the program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar.errors import ArgumentError
from autopar.ir.graph import Graph
from autopar.ir.keyed import grouped
from autopar.plans.plan import Plan
from autopar.plans.views.timeline import instruction_words, simulated
from autopar.runtime.executables import Executable
from autopar.runtime.executor import FIRST_LOOP
from autopar.runtime.single_program import place_argument
from autopar.verification import hlo
from autopar.verification.profile.comparison import PASS, Profile
from autopar.verification.profile.operation import Operation
from autopar.verification.profile.recording import Event, Recording, record

_MODULE = re.compile(r"HloModule ([^\s,]+)")


def profile(
    executable: Executable,
    leaves: Sequence[Any],
    shardings: Sequence[NamedSharding],
    devices: Sequence[Any],
    graph: Graph,
    steps: int,
) -> Profile:
    """Profile a compiled step.

    Args:
        executable: the step.
        leaves: flat arguments, which stay valid.
        shardings: of the arguments, which are copied to the devices before a step is timed.
        devices: those of the plan, in the order of its mesh.
        graph: the program, whose operations have the source lines of the plan.
        steps: how many; one more runs before them.

    Raises:
        ArgumentError: `steps` is no positive integer, an argument has no value, or another profile is being taken.
        DonatedError: an argument was donated to an earlier step.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ArgumentError(f"steps={steps!r:.60} must be an integer of at least 1")
    donated, paths = frozenset(executable.plan.donated), executable.plan.input_paths
    placed = [
        place_argument(leaf, sharding, i in donated, paths[i])
        for i, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True))
    ]

    def arguments() -> list[Any]:
        copies: list[Any] = jax.block_until_ready([x.copy() if i in donated else x for i, x in enumerate(placed)])
        return copies

    def call(step_arguments: list[Any]) -> None:
        jax.block_until_ready(executable.flat(step_arguments))

    call(arguments())  # the first call of a step does more than the others
    return _profile(executable, record(arguments, call, steps), devices, graph)


def _profile(executable: Executable, recording: Recording, devices: Sequence[Any], graph: Graph) -> Profile:
    texts = {name: program.as_text() for name, program in executable.programs.items()}
    programs = {header[1]: name for name, text in texts.items() if (header := _MODULE.match(text))}
    instructions = {name: hlo.operations(text) for name, text in texts.items()}
    runs = _runs(executable.plan, tuple(texts))
    positions = {number: i for i, device in enumerate(devices) if (number := device.local_hardware_id) is not None}
    operations: list[Operation] = []
    for step, call in enumerate(recording.calls):
        mine: dict[tuple[str, int, str], list[Event]] = {}
        for e in recording.events:
            if e.module in programs and call.start_s <= e.start_s < call.start_s + call.seconds:
                mine.setdefault((programs[e.module], e.device, e.name), []).append(e)
        for (program, number, name), events in mine.items():
            of = instructions[program].get(name, hlo.Operation("", 0, False, "", ""))
            if of.calls:
                continue
            for j, e in enumerate(events):
                instruction = runs[program][j * len(runs[program]) // len(events)]
                start, device = e.start_s - call.start_s, positions.get(number, number)
                source = _source(of, graph) if not executable.plan.pipelined else of.source
                operations.append(
                    Operation(
                        *(program, instruction, name, of.kind, of.runs > 0, source, device, step, start, e.seconds)
                    )
                )
    operations.sort(key=lambda o: (o.step, o.start_s, o.device, o.name))
    return Profile(
        executable.plan,
        devices[0].platform,
        len(devices),
        tuple(call.seconds for call in recording.calls),
        tuple(operations),
        {name: len(runs[name]) * sum(o.runs for o in of.values()) for name, of in instructions.items()},
    )


def _source(operation: hlo.Operation, graph: Graph) -> str:
    """The source line of the planned operation, which may be further out than that of the instruction."""
    number = re.match(r"op(\d+)", operation.op)
    planned = graph.by_index.get(int(number[1])) if number else None
    return (planned.source if planned is not None else "") or operation.source


def _runs(plan: Plan, programs: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Name of a program -> the instructions that run it in a step, in order, in words."""
    if not plan.pipelined:
        return {program: (program,) for program in programs}
    schedule, _ = simulated(plan)
    run = (i for instructions in schedule.lists for i in instructions if i.op == "run")
    passes = grouped((f"stage {i.stage} {i.kind}", instruction_words(i)) for i in run)
    loop = tuple(f"microbatch {i}" for i in range(plan.num_microbatches))

    def of(program: str) -> Sequence[str]:
        inner = program.removeprefix(FIRST_LOOP)
        if inner != program and PASS.match(inner):
            return tuple(f"{program}, {microbatch}" for microbatch in loop)
        return passes.get(program, (program,))

    return {program: of(program) for program in programs}
