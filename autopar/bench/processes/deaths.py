"""`autopar bench deaths`: one of several processes is killed at a random time; do all others end, and say why?

Every round starts processes of two virtual CPU devices each, without a launcher that would end them, and kills one
(SIGKILL): while it plans and compiles, or while it runs steps. The processes take turns, process 0 included, on which
JAX's coordination service runs. A round holds if all others end within a limit, with an exit status that is not 0, and
with an error that names what has happened:

    in a step       a `ProcessError` that names the process that is gone
    otherwise       the line with which JAX's client ends a process: process 0 is gone, and with it the service, or the
                    heartbeats of another process have failed while this one waited for it, as in planning
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.bench import worker

DEVICES = 2  # of a process
LIMIT_S = 60.0  # in which all others have to end
PHASES = ("plan", "steps")
#: s after the begin of a phase, between which a process is killed
MOMENTS: Mapping[str, tuple[float, float]] = {"plan": (0.0, 4.0), "steps": (0.0, 3.0)}
READY_S = 300.0  # in which a phase begins
POLL = 0.05
#: What an ended process says: ours, and that of JAX's client
NAMED = ("ProcessError: ", "JAX distributed service detected fatal errors")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Deaths:
    """What to try.

    Attributes:
        rounds: how many kills.
        processes: in each round.
        heartbeat: s, of `jax.distributed`.
        seed: of the moments.
        phases: in which a process is killed, in turns.
    """

    rounds: int = 10
    processes: int = 2
    heartbeat: int = 30
    seed: int = 0
    phases: tuple[str, ...] = PHASES


def run(deaths: Deaths, tell: Callable[[str], None] = lambda text: None) -> list[Row]:
    """A row per round."""
    chance, rows = random.Random(deaths.seed), list[Row]()
    for number in range(deaths.rounds):
        phase = deaths.phases[number // deaths.processes % len(deaths.phases)]
        victim = -(number + 1) % deaths.processes  # the last first
        after = chance.uniform(*MOMENTS[phase])
        with tempfile.TemporaryDirectory() as folder:
            row = _round(deaths, victim, phase, after, Path(folder))
        rows.append(row)
        tell(line(row))
    return rows


def _round(deaths: Deaths, victim: int, phase: str, after: float, folder: Path) -> Row:
    """Kill one process in a phase, and wait for the others."""
    of_all: Any = {"processes": deaths.processes, "devices": DEVICES, "heartbeat": deaths.heartbeat}
    address = f"localhost:{worker.free_port()}"
    errors = [folder / f"{i}.err" for i in range(deaths.processes)]
    children = list[subprocess.Popen[str]]()
    try:
        for i, path in enumerate(errors):
            with path.open("w") as stream:
                command = worker.process_command(__file__, [str(folder)], address=address, process=i, **of_all)
                children.append(subprocess.Popen(command, text=True, stdout=subprocess.DEVNULL, stderr=stream))
        _await(folder / f"{victim}.{phase}", children)
        time.sleep(after)
        children[victim].send_signal(signal.SIGKILL)
        begin = time.monotonic()
        survivors = [i for i in range(deaths.processes) if i != victim]
        seconds = {i: _ended(children[i], begin) for i in survivors}
    finally:
        for child in children:
            child.kill()
            child.wait()
    ended: list[Row] = [
        {"process": i, "seconds": seconds[i], "status": children[i].returncode, "said": _error(errors[i])}
        for i in survivors
    ]
    ok = all(e["seconds"] is not None and e["status"] != 0 and any(n in e["said"] for n in NAMED) for e in ended)
    row = {"processes": deaths.processes, "victim": victim, "phase": phase, "after": after}
    return {**row, "survivors": ended, "ok": ok}


def _await(file: Path, children: Sequence[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + READY_S
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name} has not begun within {READY_S:.0f} s"
        assert all(child.poll() is None for child in children), "a process ended before it was killed"
        time.sleep(POLL)


def _ended(child: subprocess.Popen[str], begin: float) -> float | None:
    """Seconds after which a process has ended; None if it has not within the limit."""
    while child.poll() is None:
        if time.monotonic() - begin > LIMIT_S:
            return None
        time.sleep(POLL)
    return time.monotonic() - begin


def _error(path: Path) -> str:
    """The line of an error output that names what has happened, or the last."""
    lines = [text for text in path.read_text(errors="replace").splitlines() if text.strip()]
    return next((text for name in NAMED for text in lines if name in text), lines[-1] if lines else "")


def line(row: Row) -> str:
    """One round for people."""
    ended = "; ".join(
        f"process {e['process']} "
        + ("has NOT ended" if e["seconds"] is None else f"ended after {e['seconds']:.1f} s with {e['status']}")
        + f": {e['said'][:200]}"
        for e in row["survivors"]
    )
    killed = f"process {row['victim']} of {row['processes']} killed {row['after']:.1f} s into {row['phase']}"
    return f"{'ok' if row['ok'] else 'FAIL'} {killed}: {ended}"


def table(rows: Sequence[Row]) -> str:
    """How many rounds hold, and the longest time."""
    slowest = max((e["seconds"] or LIMIT_S for row in rows for e in row["survivors"]), default=0.0)
    good = sum(row["ok"] for row in rows)
    return f"{good} of {len(rows)}: all others ended with a named error, after {slowest:.1f} s at most"


# In a process of a round


def train(folder: Path) -> None:
    """Plan, compile, and run steps for ever; a file tells when a phase begins."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        for layer in w:
            x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
        return jnp.mean(x**2)

    def train_step(w: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, gradient), value

    devices = DEVICES * jax.process_count()
    step = autopar.parallelize(train_step, mesh=(devices,), stages=2, num_microbatches=4, schedule="1f1b")
    w: Any = [{"up": np.full((16, 32), 0.1), "down": np.full((32, 16), 0.1)} for _ in range(4)]
    x = np.linspace(0.0, 1.0, 32 * 16).reshape(32, 16)
    (folder / f"{jax.process_index()}.plan").touch()
    while True:
        w, value = step(w, x)
        float(value)
        (folder / f"{jax.process_index()}.steps").touch()


if __name__ == "__main__":
    train(Path(sys.argv[1]))
