"""The same program in processes whose hashes differ: what it prints must not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def printed(code: str, seed: str, *arguments: str) -> str:
    """What `python -c code arguments` prints with PYTHONHASHSEED=seed, run in the project's root."""
    env = {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed_twice(code: str) -> str:
    """What it prints under two seeds; an assertion fails if that differs or is nothing."""
    first, second = (printed(code, seed) for seed in ("0", "7"))
    assert first == second != ""
    return first
