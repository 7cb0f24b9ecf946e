"""What a reader of a plan wants to know of its surroundings: memory, hosts, and the text of the user's lines.

A plan has the names of files, not their folders, so that it is the same in every checkout. The operations of a step
that was just traced have the whole path. A name that two files of the step have in common says nothing about a line
unless an operation of that line has its path.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace

from autopar import jax_compat
from autopar.hardware.meshes import Target
from autopar.ir.graph import Graph
from autopar.passes.remat import memory_policy
from autopar.plans.plan import Plan
from autopar.plans.record import PlanRecord

MAX_CHARACTERS = 120  # of one line


def described(
    plan: Plan, graph: Graph, target: Target, memory_budget: float | str | None, state: tuple[int, ...]
) -> Plan:
    """The plan with its surroundings.

    Args:
        plan: the plan.
        graph: the step as traced.
        target: the mesh and cluster that it is for.
        memory_budget: bytes per device; None: the memory of the device, which also counts for "min".
        state: positions of the argument leaves that the step returns anew.
    """
    budget = None if memory_budget == "min" else memory_budget
    return replace(
        plan,
        state=state,
        memory_limit_bytes=int(memory_policy.memory_bytes(target.logical, budget)),
        devices_per_host=target.cluster.devices_per_host,
        code=code_of(plan, graph),
    )


def code_of(plan: PlanRecord, graph: Graph) -> Mapping[str, str]:
    """Source line -> its text, for the lines that a plan names.

    Args:
        plan: the plan.
        graph: the step as traced.
    """
    named = {row.source for row in plan.spent} | {c.source for c, _ in plan.sent()}
    named |= {moment.source for stage in plan.stages for moment in stage.over_time}
    paths = _paths(graph, named)
    texts = {line: _text(paths[line], line) for line in sorted(named) if line in paths}
    return {line: text for line, text in texts.items() if text}


def _paths(graph: Graph, lines: Iterable[str]) -> Mapping[str, str]:
    """Source line -> path of its file."""
    of_line: dict[str, str] = {}
    of_name: dict[str, set[str]] = {}
    for op in graph.walk():
        if op.source in of_line:
            continue
        path, line = jax_compat.user_frame(op.equation.source_info)
        name = os.path.basename(path)
        of_name.setdefault(name, set()).add(path)
        if f"{name}:{line}" == op.source:
            of_line[op.source] = path
    unique = {name: next(iter(paths)) for name, paths in of_name.items() if len(paths) == 1}
    resolved = {line: of_line.get(line) or unique.get(line.rpartition(":")[0], "") for line in lines}
    return {line: path for line, path in resolved.items() if path}


def _text(path: str, line: str) -> str:
    number = line.rpartition(":")[2]
    return linecache.getline(path, int(number)).strip()[:MAX_CHARACTERS] if number.isdecimal() else ""
