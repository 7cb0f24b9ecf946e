"""Several processes, one plan: process 0 plans, the others load its plan.

    all           say what they are to plan: hashes of program and options
    process 0     compares these with its own, plans, and says the plan or the error
    others        load the plan, or raise the error

All processes plan in the same order. What they say passes through the store of JAX's coordination service, which ends a
process whose process 0 has died: nobody waits for it for ever. Planning twice would not do, since a search that a time
limit ends need not end alike everywhere.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax

from autopar import errors, jax_compat
from autopar.compile.call import Call
from autopar.errors import AutoparError, PlanMismatchError
from autopar.ir.graph import graph_hash
from autopar.ir.text.warning import warn
from autopar.plans.plan import Plan, from_json
from autopar.plans.validation.schema import parsed
from autopar.runtime.planned_step import PlannedStep

#: Note of a pipeline in several processes.
TRANSPORT = "between processes, arrays move by collective permutations in programs over both submeshes, each byte once"


def planned_by_first(
    name: str, call: Call, options: str, plan: Callable[[], PlannedStep], load: Callable[[Plan], PlannedStep]
) -> PlannedStep:
    """The planned step, the same in every process.

    Args:
        name: of the function.
        call: its trace.
        options: text of the options.
        plan: plans it.
        load: makes the step of a plan.

    Raises:
        PlanMismatchError: a process has traced another program than process 0, or has other options.
        AutoparError: planning failed in process 0.
    """
    talk = jax_compat.process_store().conversation("plans", waits=lambda text: warn(f"{name}: {text}"))
    program = {"name": name, "program": graph_hash(call.traced.graph), "options": _digest(options)}
    programs = [json.loads(text) for text in talk.from_all("program", lambda: json.dumps(program).encode())]
    if jax.process_index() > 0:
        answer = json.loads(zlib.decompress(talk.from_first("plan", bytes)))
        if "error" in answer:
            raise _error(answer["error"], answer["text"])
        return load(from_json(parsed(answer["plan"].encode()), "the plan of process 0"))
    answer: dict[str, str] = {}
    try:
        _compare(programs)
        step = _with_transport(plan())
        answer = {"plan": step.plan.to_json()}
    except BaseException as error:
        answer = {"error": type(error).__name__, "text": str(error)}
        raise
    finally:
        talk.from_first("plan", lambda: zlib.compress(json.dumps(answer).encode()))
    return step


def _with_transport(step: PlannedStep) -> PlannedStep:
    """The step, with a note of what moves arrays between the processes of a pipeline."""
    if not step.plan.pipelined:
        return step
    return replace(step, plan=replace(step.plan, notes=(*step.plan.notes, TRANSPORT)))


def _compare(programs: Sequence[Mapping[str, str]]) -> None:
    """PlanMismatchError if a process plans something else than process 0."""
    first, *rest = programs
    name = first["name"]
    for process, theirs in enumerate(rest, 1):
        if theirs == first:
            continue
        different = next(field for field in ("name", "program", "options") if theirs[field] != first[field])
        what = f"{theirs['name']!r} there" if different == "name" else f"the {different} of {name!r} there"
        raise PlanMismatchError(
            f"process 0 plans {name!r}, process {process} differs: {what}. Every process runs the same script, with "
            "arguments of the same shapes and the same options"
        )


def _error(name: str, text: str) -> AutoparError:
    """The error of process 0; one that is not of autopar, or has further fields, as an AutoparError."""
    kind = getattr(errors, name, AutoparError)
    plain = isinstance(kind, type) and issubclass(kind, AutoparError) and "__init__" not in vars(kind)
    return kind(text) if plain else AutoparError(f"process 0 cannot plan the step: {name}: {text}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
