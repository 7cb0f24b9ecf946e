"""`autopar launch`: one script in several processes on this machine, connected by `jax.distributed`.

What the processes print is passed through line by line; the last line of process 0 comes last. When a process fails,
it is named, and the others have a while to end by themselves before they are killed. The exit status is that of the
first that failed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from autopar.bench.worker import free_port, process_command

#: Lines of gloo, which tells of each connection.
NOISE = "[Gloo]"
GRACE = 10.0  # s that other processes have to end once one has failed
POLL = 0.05  # s between two looks at the processes


@dataclass(frozen=True, slots=True)
class Launch:
    """What to run.

    Attributes:
        script: a Python file.
        arguments: of the script.
        processes: how many.
        devices: per process.
        platform: "cpu" for virtual CPU devices; else the devices of a process are its share of those here.
        heartbeat: seconds without a sign of life after which a process counts as dead.
    """

    script: str
    arguments: Sequence[str]
    processes: int
    devices: int
    platform: str = "cpu"
    heartbeat: int = 30


def run(launch: Launch) -> int:
    """The exit status of the first process that failed, or 0."""
    address = f"localhost:{free_port()}"
    children = [_Child(_start(launch, address, i), holds_last=i == 0) for i in range(launch.processes)]
    try:
        return _status(children)
    finally:
        for child in children:
            child.kill()
        for child in reversed(children):  # the last line of process 0 comes last
            child.finish()


def _start(launch: Launch, address: str, process: int) -> subprocess.Popen[str]:
    command = process_command(
        launch.script,
        launch.arguments,
        address=address,
        processes=launch.processes,
        process=process,
        devices=launch.devices,
        heartbeat=launch.heartbeat,
        platform=launch.platform,
    )
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace")


def _status(children: Sequence[_Child]) -> int:
    while any(child.status is None for child in children) and _first_failed(children) is None:
        time.sleep(POLL)
    failed = _first_failed(children)
    if failed is None:
        return 0
    process, status = failed
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"failed with status {status}"
    print(f"autopar launch: process {process} of {len(children)} {how}", file=sys.stderr, flush=True)
    deadline = time.monotonic() + GRACE
    while any(child.status is None for child in children) and time.monotonic() < deadline:
        time.sleep(POLL)
    return 128 - status if status < 0 else status  # as a shell reports a signal


def _first_failed(children: Sequence[_Child]) -> tuple[int, int] | None:
    """(process, status) of a process that failed."""
    return next(((i, child.status) for i, child in enumerate(children) if child.status), None)


@dataclass(eq=False)
class _Child:
    """A process, and the thread that passes on what it prints; `holds_last`: its last line is kept until `finish`."""

    process: subprocess.Popen[str]
    holds_last: bool
    reader: threading.Thread = field(init=False)
    last: str = ""

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    @property
    def status(self) -> int | None:
        return self.process.poll()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(NOISE):
                continue
            shown = self.last if self.holds_last else line
            self.last = line
            sys.stdout.write(shown)
            sys.stdout.flush()

    def kill(self) -> None:
        if self.status is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def finish(self) -> None:
        self.reader.join()
        if self.holds_last:
            sys.stdout.write(self.last)
            sys.stdout.flush()


def launch(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="a Python file; its own arguments follow")],
    processes: Annotated[int, typer.Option(min=1, help="how many processes")] = 2,
    devices_per_process: Annotated[int, typer.Option(min=1, help="devices of each process")] = 1,
    platform: Annotated[str, typer.Option(help="cpu: virtual devices; or gpu")] = "cpu",
    heartbeat: Annotated[int, typer.Option(min=1, help="seconds until a silent process counts as dead")] = 30,
) -> Any:
    """Run a script in several processes on this machine, connected by jax.distributed."""
    raise typer.Exit(run(Launch(script, context.args, processes, devices_per_process, platform, heartbeat)))
