"""Kills a training run at random times, and looks whether it always resumes from a whole checkpoint.

    python -m tests.checkpoints.killed --rounds 20 [--processes 2]

A run of four devices trains for `STEPS` steps, and saves after each of them: one process on one mesh, several processes
in two stages. One of its processes, chosen at random, is killed (SIGKILL) after a random time. `autopar launch` then
ends the others, and the run is started again, until it has been killed often enough; then it goes on to its end. A
folder with a half-written checkpoint after a kill shows that the kill was inside a write.

    the same      the losses of all steps are those of a run that is never killed, to the last bit
    elsewhere     its last checkpoint is restored onto other meshes, numbers of stages and numbers of processes. The
                  losses of `MORE` further steps there are within `TOLERANCE` of those where it was
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STEPS, MORE, WIDTH, LAYERS, DEVICES = 600, 10, 512, 4, 4
FIRST_S, LAST_S = 0.0, 1.0  # s after the first new checkpoint, between which a run is killed
TOLERANCE = 1e-5  # of a loss
#: Name -> options; with "model" tensor parallelism by pins.
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "one mesh": {"mesh": {"data": 4}, "stages": 1},
    "tensor": {"mesh": {"data": 2, "model": 2}, "stages": 1},
    "two stages": {"mesh": (4,), "stages": 2, "num_microbatches": 4},
    "four stages": {"mesh": (4,), "stages": 4, "num_microbatches": 4},
}


def train(folder: Path, log: Path, layout: str, steps: int) -> None:
    """Train from the newest checkpoint, or from the beginning; a line of the log per step."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import autopar
    from autopar.checkpoints.folder import numbers

    def train_step(state: Any, x: jax.Array) -> Any:
        def loss(w: Any) -> jax.Array:
            y = x
            for layer in w:
                y = y + jnp.tanh(y @ layer["up"]) @ layer["down"]
            return jnp.mean((y - 2.0 * x) ** 2)

        value, gradient = jax.value_and_grad(loss)(state["w"])
        w = jax.tree.map(lambda a, g: a - 0.3 * g, state["w"], gradient)
        return {"w": w, "step": state["step"] + 1}, value

    chance = np.random.default_rng(0)
    weights = 0.02 * chance.standard_normal((LAYERS, 2, WIDTH, WIDTH), np.float32)
    first = {"w": [{"up": up, "down": down} for up, down in weights], "step": np.int32(0)}
    options = LAYOUTS[layout]
    pins = {"pins": autopar.pins.megatron("model")} if layout == "tensor" else {}
    step = autopar.parallelize(train_step, **options, **pins)
    x = chance.standard_normal((16, WIDTH), np.float32)
    step.plan(first, x)
    state = autopar.restore_checkpoint(folder, step) if numbers(folder) else first
    saving = None
    with log.open("a") as lines:
        for number in range(int(autopar.gather(state["step"])), steps):
            state, loss = step(state, np.roll(x, number, axis=1))
            if saving is not None:
                saving.wait()
            saving = autopar.save_checkpoint(folder, state)
            if jax.process_index() == 0:
                lines.write(json.dumps([number, float(loss).hex()]) + "\n")
                lines.flush()
    if saving is not None:
        saving.wait()


def started(folder: Path, log: Path, processes: int, layout: str, steps: int = STEPS) -> subprocess.Popen[bytes]:
    """A run in a process group of its own."""
    script = [__file__, "--train", str(folder), str(log), layout, str(steps)]
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


def children(run: subprocess.Popen[bytes]) -> list[int]:
    """The processes of a launch, in their order."""
    return sorted(map(int, Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()))


def killed(folder: Path, log: Path, processes: int, layout: str, victim: int, wait_s: float) -> bool:
    """Kill a process some time after the first new step; True if a half-written checkpoint shows a write."""
    before = lines_of(log)
    run = started(folder, log, processes, layout)
    while lines_of(log) == before and run.poll() is None:
        time.sleep(0.01)
    time.sleep(wait_s)
    assert run.poll() is None, "the run ended before it was killed: more steps are needed"
    os.kill(children(run)[victim], signal.SIGKILL)
    status = run.wait(timeout=60)
    assert status != 0, "the launch of a process that was killed ended with 0"
    return any(path.name.endswith(".tmp") for path in folder.iterdir())


def elsewhere(root: Path, folder: Path, processes: int, layout: str) -> Mapping[str, float]:
    """Layout -> largest relative difference of the losses of further steps after restoring onto it."""

    def further(name: str, processes: int) -> list[float]:
        log, copy = root / f"{name}.log", root / name
        shutil.copytree(folder, copy)
        assert started(copy, log, processes, name, STEPS + MORE).wait(timeout=300) == 0
        return [float.fromhex(loss) for _, (loss,) in sorted(losses(log).items())]

    expected, names = further(layout, processes), [name for name in LAYOUTS if name != layout]
    assert len(expected) == MORE
    ours = {name: further(name, 2 if processes == 1 else 1) for name in names}
    return {n: max(abs(a - b) / abs(b) for a, b in zip(ls, expected, strict=True)) for n, ls in ours.items()}


def main() -> int:
    """Run all rounds; 0 if all losses are as they must be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", nargs=4)
    arguments = parser.parse_args()
    if arguments.train:
        folder, log, layout, steps = arguments.train
        train(Path(folder), Path(log), layout, int(steps))
        return 0
    processes, chance, inside = arguments.processes, random.Random(arguments.seed), 0
    layout = "one mesh" if processes == 1 else "two stages"
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folder, log = root / "checkpoints", root / "killed.log"
        for number in range(arguments.rounds):
            victim, wait_s = chance.randrange(processes), chance.uniform(FIRST_S, LAST_S)
            inside += killed(folder, log, processes, layout, victim, wait_s)
            steps = len(losses(log))
            print(f"round {number + 1}: process {victim} killed, {inside} inside a write, {steps} steps", flush=True)
        assert started(folder, log, processes, layout).wait() == 0
        whole_log = root / "whole.log"
        assert started(root / "other", whole_log, processes, layout).wait() == 0
        ours, theirs = losses(log), losses(whole_log)
        differences = elsewhere(root, folder, processes, layout)
    same = ours == theirs and all(len(values) == 1 for values in ours.values()) and len(ours) == STEPS
    print(
        f"{arguments.rounds} kills, {inside} inside a write; {len(ours)} of {STEPS} steps, losses "
        f"{'equal to the last bit' if same else 'DIFFER'}"
    )
    for name, difference in differences.items():
        print(f"restored onto '{name}': losses of {MORE} steps within {difference:.1e}")
    return 0 if same and max(differences.values()) <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
