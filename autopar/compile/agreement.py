"""Several processes, one plan: process 0 plans, the others load its plan.

    process 0     plans, and stores {program, plan} or {program, error} under the number of the plan
    others        wait for it, compare the program with theirs, and load the plan or raise the error

All processes plan in the same order, so that the number is a count in each. The store is that of JAX's coordination
service, which ends a process whose process 0 has died: nobody waits for it for ever. Planning twice would not do, since
a search that a time limit ends need not end alike everywhere.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable

import jax

from autopar import errors, jax_compat
from autopar.compile.call import Call, warn
from autopar.errors import AutoparError, PlanMismatchError
from autopar.ir.graph import graph_hash
from autopar.plans.plan import Plan, from_json
from autopar.plans.schema import parsed
from autopar.runtime.planned_step import PlannedStep

FOLDER = "autopar/plans"
#: Seconds without an answer of process 0 after which the others say that they wait.
PATIENCE = 60.0


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
        PlanMismatchError: this process has traced another program than process 0, or has other options.
        AutoparError: planning failed in process 0.
    """
    store = jax_compat.process_store()
    key = f"{FOLDER}/{store.count(f'{FOLDER}/count/{jax.process_index()}')}"
    program = {"name": name, "graph": graph_hash(call.traced.graph), "options": digest(options)}
    if jax.process_index() == 0:
        return _publish(store, key, program, plan)
    message = json.loads(zlib.decompress(_received(store, key, name)))
    theirs = message["program"]
    if theirs != program:
        what = "plans the function" if theirs["name"] != name else "traced another program for"
        what = "has other options for" if theirs["graph"] == program["graph"] and theirs["name"] == name else what
        raise PlanMismatchError(
            f"process 0 {what} {theirs['name']!r}, and process {jax.process_index()} called {name!r}: every process "
            "runs the same script, with arguments of the same shapes and the same options"
        )
    if "error" in message:
        raise _error(message["error"], message["text"])
    return load(from_json(parsed(message["plan"].encode()), "the plan of process 0"))


def _error(name: str, text: str) -> AutoparError:
    """The error of process 0; one that is not of autopar, or has further fields, as an AutoparError."""
    kind = getattr(errors, name, AutoparError)
    plain = isinstance(kind, type) and issubclass(kind, AutoparError) and kind.__init__ is AutoparError.__init__
    return kind(text) if plain else AutoparError(f"process 0 cannot plan the step: {name}: {text}")


def digest(text: str) -> str:
    """A hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _publish(
    store: jax_compat.ProcessStore, key: str, program: dict[str, str], plan: Callable[[], PlannedStep]
) -> PlannedStep:
    def put(message: dict[str, object]) -> None:
        store.put(key, zlib.compress(json.dumps({"program": program, **message}).encode()))

    try:
        step = plan()
    except BaseException as error:
        put({"error": type(error).__name__, "text": str(error)})
        raise
    put({"plan": step.plan.to_json()})
    return step


def _received(store: jax_compat.ProcessStore, key: str, name: str) -> bytes:
    message = store.get(key, PATIENCE)
    if message is None:
        warn(f"{name}: process {jax.process_index()} has waited {PATIENCE:.0f} s for process 0 to plan it")
    while message is None:
        message = store.get(key, PATIENCE)
    return message
