"""Programs in processes of their own: under several seeds of the hashes, or as the worker of a benchmark.

A process for each seed of the hashes imports JAX and the compiler once, without a backend, and is forked for every
program: the imports take longer than most programs.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: The process that is forked: a line of JSON for each program, and the status of its process in return.
TEMPLATE = """
import gc, json, os, sys, traceback
import autopar.compile, autopar.zoo

gc.freeze()
for line in sys.stdin:
    program = json.loads(line)
    child = os.fork()
    if not child:
        for stream, path in ((1, program["out"]), (2, program["err"])):
            os.dup2(os.open(path, os.O_WRONLY), stream)
        status = 1
        try:
            os.environ.clear()
            os.environ.update(program["env"])
            sys.argv = ["-c", *program["arguments"]]
            exec(compile(program["code"], "<string>", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def _environment(seed: str) -> dict[str, str]:
    return {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}


@cache
def _template(seed: str) -> subprocess.Popen[str]:
    """It ends where its input does, with this process at the latest."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", TEMPLATE]
    process = subprocess.Popen(command, cwd=ROOT, env=_environment(seed), stdin=pipe, stdout=pipe, text=True)
    atexit.register(process.communicate)
    return process


def printed(code: str, seed: str, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    """What a process with PYTHONHASHSEED=seed prints that runs `code` in the project's root.

    Args:
        code: a Python program.
        seed: of the hashes.
        arguments: `sys.argv[1:]` of the program.
        env: variables of its environment beside those of this process.
    """
    template = _template(seed)
    assert template.stdin is not None
    assert template.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        out.touch()
        err.touch()
        environment = {**_environment(seed), **(env or {})}
        program = {"code": code, "arguments": arguments, "env": environment, "out": str(out), "err": str(err)}
        template.stdin.write(json.dumps(program) + "\n")
        template.stdin.flush()
        status = template.stdout.readline().strip()
        assert status == "0", err.read_text()
        return out.read_text()


def printed_twice(code: str) -> str:
    """What it prints under two seeds; an assertion fails if that differs or is nothing."""
    first, second = (printed(code, seed) for seed in ("0", "7"))
    assert first == second != ""
    return first


#: Runs a module as `python -m` does; its name is the first argument.
MODULE = "import runpy, sys; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"


def worker_lines(
    module: str, spec: Mapping[str, Any], env: Mapping[str, str] | None = None, patience: float | None = None
) -> Iterator[dict[str, Any]]:
    """What `autopar.bench.worker.lines` yields, from a forked process; a worker that fails is an assertion error."""
    lines = printed(MODULE, "0", module, json.dumps(spec), env=env).splitlines()
    yield from (json.loads(line) for line in lines if line.startswith("{"))
