"""Kills a training run at random times, and looks whether it always resumes from a whole checkpoint.

    python -m tests.checkpoints.killed --rounds 20 [--processes 2]

A run trains for `STEPS` steps, and saves after each of them. It is killed (SIGKILL, all its processes) after a random
time, and started again, until it has been killed often enough; then it goes on to its end. A folder with a half-written
checkpoint after a kill shows that the kill was inside a write. The losses of all steps must be those of a run that is
never killed, to the last bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STEPS, WIDTH, DEVICES = 600, 512, 4
FIRST_S, LAST_S = 0.0, 1.0  # s after the first new checkpoint, between which a run is killed


def train(folder: Path, log: Path) -> None:
    """Train from the newest checkpoint, or from the beginning; a line of the log per step."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import autopar
    from autopar.checkpoints.folder import numbers

    def train_step(state: Any, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ w[0]) @ w[1] - x) ** 2)

        value, gradient = jax.value_and_grad(loss)(state["w"])
        return {"w": state["w"] - 0.3 * gradient, "step": state["step"] + 1}, value

    first = {"w": np.full((8, WIDTH, WIDTH), 1e-3, np.float32), "step": np.int32(0)}
    step = autopar.parallelize(train_step, mesh=(DEVICES,), stages=1)
    x = np.random.default_rng(0).standard_normal((16, WIDTH), np.float32)
    step.plan(first, x)
    state = autopar.restore_checkpoint(folder, step) if numbers(folder) else first
    saving = None
    with log.open("a") as lines:
        for number in range(int(state["step"]), STEPS):
            state, loss = step(state, np.roll(x, number, axis=1))
            if saving is not None:
                saving.wait()
            saving = autopar.save_checkpoint(folder, state)
            if jax.process_index() == 0:
                lines.write(json.dumps([number, float(loss).hex()]) + "\n")
                lines.flush()
    if saving is not None:
        saving.wait()


def started(folder: Path, log: Path, processes: int) -> subprocess.Popen[bytes]:
    """A run in a process group of its own."""
    script = [__file__, "--train", str(folder), str(log)]
    counts = ["--processes", str(processes), "--devices-per-process", str(DEVICES // processes)]
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "AUTOPAR_CACHE_DIR": "", "PYTHONPATH": root}
    command = [sys.executable, "-m", "autopar.cli", "launch", *counts, *script]
    return subprocess.Popen(command, env=env, start_new_session=True, stderr=subprocess.DEVNULL)


def losses(log: Path) -> Mapping[int, set[str]]:
    """Step -> the losses that were logged for it, as hexadecimal numbers."""
    logged: dict[int, set[str]] = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        if line.endswith("]"):  # a line that was cut off by a kill has no end
            number, loss = json.loads(line)
            logged.setdefault(number, set()).add(loss)
    return logged


def lines_of(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def killed(folder: Path, log: Path, processes: int, wait_s: float) -> bool:
    """Kill a run some time after its first new step; True if a half-written checkpoint shows that it was writing."""
    before = lines_of(log)
    run = started(folder, log, processes)
    while lines_of(log) == before and run.poll() is None:
        time.sleep(0.01)
    time.sleep(wait_s)
    assert run.poll() is None, "the run ended before it was killed: more steps are needed"
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    time.sleep(0.2)
    return any(path.name.endswith(".tmp") for path in folder.iterdir())


def main() -> int:
    """Run all rounds; 0 if the losses are those of a run that is never killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", nargs=2, type=Path)
    arguments = parser.parse_args()
    if arguments.train:
        train(*arguments.train)
        return 0
    chance, inside = random.Random(arguments.seed), 0
    with tempfile.TemporaryDirectory() as root:
        folder, log = Path(root, "checkpoints"), Path(root, "killed.log")
        for number in range(arguments.rounds):
            inside += killed(folder, log, arguments.processes, chance.uniform(FIRST_S, LAST_S))
            print(f"round {number + 1}: killed, {inside} inside a write, {len(losses(log))} steps done", flush=True)
        assert started(folder, log, arguments.processes).wait() == 0
        whole_log = Path(root, "whole.log")
        assert started(Path(root, "other"), whole_log, arguments.processes).wait() == 0
        ours, theirs = losses(log), losses(whole_log)
    same = ours == theirs and all(len(values) == 1 for values in ours.values()) and len(ours) == STEPS
    print(
        f"{arguments.rounds} kills, {inside} inside a write; {len(ours)} of {STEPS} steps, losses "
        f"{'equal to the last bit' if same else 'DIFFER'}"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
