"""`autopar launch`: one script in several processes on this machine, connected by `jax.distributed`.

What the processes print is passed through line by line; the last line of process 0 comes last. When a process fails,
it is named, and the others have a while to end by themselves before they are killed, each with the processes that it
started. The exit status is that of the first that failed. Ctrl-C and SIGTERM are passed on to all processes, which have
the same while to end; a second Ctrl-C kills them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from autopar.bench.worker import free_port, process_command
from autopar.cli.options import say
from autopar.errors import ArgumentError

#: Lines of gloo, which tells of each connection.
NOISE = "[Gloo]"
PLATFORMS = ("cpu", "gpu")
POLL = 0.05  # s between two looks at the processes
READS = 2.0  # s for what a process has printed to arrive once it has ended


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
        grace: seconds that other processes have to end once one has failed, or a signal has been passed on.
    """

    script: str
    arguments: Sequence[str]
    processes: int
    devices: int
    platform: str = "cpu"
    heartbeat: int = 30
    grace: float = 10.0


class _Interrupted(Exception):
    """Ctrl-C or SIGTERM reached the launch itself."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def run(launch: Launch) -> int:
    """The exit status of the first process that failed, or 0.

    Raises:
        ArgumentError: the script is no file, or the platform is not known.
    """
    _check(launch)
    address = f"localhost:{free_port()}"
    children: list[_Child] = []
    try:
        with _interruptible():
            for i in range(launch.processes):
                children.append(_Child(_start(launch, address, i), holds_last=i == 0))
            return _status(children, launch.grace)
    except _Interrupted as interrupted:
        return _interrupt(children, interrupted.number, launch.grace)
    finally:
        for child in children:
            child.kill()
        for child in reversed(children):  # the last line of process 0 comes last
            child.finish()


def _check(launch: Launch) -> None:
    if launch.script.startswith("-"):
        raise ArgumentError(f"autopar launch: {launch.script} is no option; autopar launch --help lists them")
    if not Path(launch.script).is_file():
        raise ArgumentError(f"autopar launch: {launch.script} is no file; give a Python script, then its arguments")
    if launch.platform not in PLATFORMS:
        raise ArgumentError(f"autopar launch: platform={launch.platform!r} must be {' or '.join(map(repr, PLATFORMS))}")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """A context in which SIGINT and SIGTERM raise `_Interrupted`; in a thread other than the main one, none does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        raise _Interrupted(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    # a group of its own: what the script starts can be ended with it; reading a terminal would stop such a group
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace", process_group=0
    )


def _status(children: Sequence[_Child], grace: float) -> int:
    while any(child.status is None for child in children) and _first_failed(children) is None:
        time.sleep(POLL)
    failed = _first_failed(children)
    if failed is None:
        return 0
    process, status = failed
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"failed with status {status}"
    say(f"autopar launch: process {process} of {len(children)} {how}")
    _wait(children, grace)
    return _as_shell(status)


def _interrupt(children: Sequence[_Child], number: int, grace: float) -> int:
    """Pass a signal on; returns the exit status."""
    running = [i for i, child in enumerate(children) if child.status is None]
    say(f"autopar launch: {signal.Signals(number).name} is passed on to {len(running)} of {len(children)} processes")
    for child in children:
        child.send(number)
    with contextlib.suppress(KeyboardInterrupt):
        _wait(children, grace)
    return _as_shell(-number)


def _wait(children: Sequence[_Child], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(child.status is None for child in children) and time.monotonic() < deadline:
        time.sleep(POLL)


def _as_shell(status: int) -> int:
    """A status as a shell reports it: 128 and the number of the signal that ended the process."""
    return 128 - status if status < 0 else status


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
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    @property
    def status(self) -> int | None:
        return self.process.poll()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.startswith(NOISE):
                    continue
                shown = self.last if self.holds_last else line
                self.last = line
                sys.stdout.write(shown)
                sys.stdout.flush()

    def send(self, number: int) -> None:
        """Send a signal to the process and to those that it started and that are in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """End the process, with those that it started, if it runs."""
        if self.status is None:
            self.send(signal.SIGKILL)
        self.process.wait()

    def finish(self) -> None:
        self.reader.join(READS)  # not for ever: what the process started may keep its output open
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
