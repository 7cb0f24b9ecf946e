"""Measurements in processes of their own: cold caches, bounded memory, and a crash that costs one row.

A worker is `python -m MODULE SPEC`, SPEC a JSON object; each line that it prints is a JSON object. `lines` starts one
and yields what it prints, `launched` a script in several processes; `cpu_devices` is what a worker calls before JAX
starts a backend. `process_command` is how `autopar launch` starts each of several processes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from autopar.errors import AutoparError

TAIL = 3  # lines of a dead worker's last words that are shown
#: For a worker's environment: glibc keeps memory that is freed. Arrays whose pages go back to the system are mapped
#: anew in every step, for up to half of its time.
KEEP = {
    "GLIBC_TUNABLES": f"glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={1 << 36}:glibc.malloc.top_pad={1 << 28}"
}
REFUSED = 3  # exit status of a worker whose work ended in an AutoparError, which it prints last


class WorkerError(AutoparError, RuntimeError):
    """A worker of a benchmark failed; the message is its own error, or its last words if it died."""


class Watch:
    """Kills a child after so many seconds unless it is stopped before; without seconds, never."""

    def __init__(self, child: subprocess.Popen[str], seconds: float | None) -> None:
        self.killed = False
        self._child = child
        self._timer = None if seconds is None else threading.Timer(seconds, self._kill)
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def _kill(self) -> None:
        self.killed = True
        self._child.kill()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def lines(
    module: str, spec: Mapping[str, Any], env: Mapping[str, str] | None = None, patience: float | None = None
) -> Iterator[dict[str, Any]]:
    """The objects that `python -m module` prints for this spec.

    `patience`: seconds without a line after which the worker is killed. WorkerError if it ends with another status
    than 0.
    """
    yield from _printed([sys.executable, "-m", module, json.dumps(spec)], f"{module} {json.dumps(spec)}", env, patience)


def launched(
    processes: int,
    devices: int,
    script: str,
    spec: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
    patience: float | None = None,
) -> Iterator[dict[str, Any]]:
    """The same for a script in several processes of so many virtual devices; one of them prints."""
    counts = ["--processes", str(processes), "--devices-per-process", str(devices)]
    command = [sys.executable, "-m", "autopar.cli", "launch", *counts, script, json.dumps(spec)]
    yield from _printed(command, f"{processes} processes of {script} {json.dumps(spec)}", env, patience)


def free_port() -> int:
    """A port of this machine that nobody listens to."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return int(server.getsockname()[1])


def process_command(
    script: str,
    arguments: Sequence[str],
    *,
    address: str,
    processes: int,
    process: int,
    devices: int,
    heartbeat: int,
    platform: str = "cpu",
) -> list[str]:
    """The command of one of several processes of a script, connected by `jax.distributed`.

    Args:
        script, arguments: a Python file, and its arguments.
        address: host and port of the coordination service, in process 0.
        processes, process: how many there are, and which one it is.
        devices: of a process.
        heartbeat: seconds without a sign of life after which a process counts as dead.
        platform: "cpu" for virtual CPU devices, or "gpu".
    """
    spec = {
        "address": address,
        "processes": processes,
        "process": process,
        "platform": platform,
        "devices": devices,
        "heartbeat": heartbeat,
    }
    return [sys.executable, "-m", "autopar.cli.launched", json.dumps(spec), script, *arguments]


def _printed(
    command: Sequence[str], name: str, env: Mapping[str, str] | None, patience: float | None
) -> Iterator[dict[str, Any]]:
    pipe = subprocess.PIPE
    # stderr goes to a file: a worker that writes more than a pipe holds would wait for a reader
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(command, stdout=pipe, stderr=errors, text=True, env={**os.environ, **(env or {})}) as child,
    ):
        assert child.stdout is not None
        watch = Watch(child, patience)
        for line in child.stdout:
            watch.stop()
            if line.startswith("{"):
                yield json.loads(line)
            watch = Watch(child, patience)
        child.wait()
        watch.stop()
        errors.seek(0)
        words = errors.read().strip().splitlines()
    if watch.killed:
        raise WorkerError(f"{name} was silent for {patience:g} s and was killed")
    if child.returncode == REFUSED:
        raise WorkerError(words[-1])
    if child.returncode != 0:
        raise WorkerError(f"{name} ended with {child.returncode}: {' | '.join(words[-TAIL:])}")


def collect(
    module: str, specs: Iterable[Mapping[str, Any]], tell: Callable[[str], None], line: Callable[[Any], str]
) -> list[dict[str, Any]]:
    """The rows of a worker for each spec, one after another; `tell` hears `line(row)` of each as it comes."""
    rows: list[dict[str, Any]] = []
    for spec in specs:
        for row in lines(module, spec):
            rows.append(row)
            tell(line(row))
    return rows


def serve(work: Callable[[Mapping[str, Any]], Iterator[Mapping[str, Any]]]) -> None:
    """The main function of a worker: print what `work` yields for the spec on the command line; no plan is kept."""
    from autopar.plans import cache as plan_cache

    try:
        with plan_cache.off():
            for row in work(json.loads(sys.argv[1])):
                print(json.dumps(row), flush=True)
    except AutoparError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(REFUSED)


def cpu_devices(count: int) -> None:
    """Use `count` virtual CPU devices; to be called before JAX starts a backend."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    if cache := os.environ.get("AUTOPAR_TEST_JAX_CACHE"):
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
