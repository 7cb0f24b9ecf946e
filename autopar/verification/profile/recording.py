"""Calls a function under JAX's profiler and reads the operations that its compiled programs ran.

XLA names every operation that runs: the instruction of the compiled module, the module, the device. Where it says so
depends on the backend:

    statistics of an event      `hlo_op`, `hlo_module`, on CPU `device_ordinal` too (XLA:CPU, XLA:GPU)
    rows of a device's plane    "XLA Ops", and "XLA Modules" for the module that was running (TPU)

On CPU an operation may be finished by another thread, in an event "end: NAME" whose consumer number is the producer
number of the operation's event.
"""

from __future__ import annotations

import bisect
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from autopar.errors import ArgumentError

#: Name of the annotation around each call.
CALL = "autopar.profile"
_END = "end: "
_DEVICE = re.compile(r"/device:\w+:(\d+)")
_NANO = 1e-9


@dataclass(frozen=True, slots=True)
class Event:
    """An operation that ran.

    Attributes:
        module: name of the compiled module.
        name: of the instruction in it.
        device: number of the device among those of this process.
        start_s: start, in seconds of the profiler's clock.
        seconds: how long it took (s).
    """

    module: str
    name: str
    device: int
    start_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Span:
    """A call; `start_s` and `seconds` as of `Event`."""

    start_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Recording:
    """What ran.

    Attributes:
        calls: the calls, in order.
        events: all operations on devices, by start.
    """

    calls: tuple[Span, ...]
    events: tuple[Event, ...]


def record(prepare: Callable[[], Any], call: Callable[[Any], Any], count: int) -> Recording:
    """Profile `call(prepare())` a number of times; the call is timed, and has to wait for what it starts.

    Raises:
        ArgumentError: another profile is being taken in this process.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    with tempfile.TemporaryDirectory() as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as error:
            raise ArgumentError(f"no profile can be taken: {error}. End the other profile first.") from error
        try:
            for _ in range(count):
                arguments = prepare()
                with jax.profiler.TraceAnnotation(CALL):
                    call(arguments)
        finally:
            jax.profiler.stop_trace()
        with warnings.catch_warnings():
            # Python 3.12 and later warn of types of the extension module that have no __module__
            warnings.simplefilter("ignore", DeprecationWarning)
            files = map(str, sorted(Path(folder).rglob("*.xplane.pb")))
            return from_planes(plane for file in files for plane in jax.profiler.ProfileData.from_file(file).planes)


def from_planes(planes: Iterable[Any]) -> Recording:
    """The recording in the planes of a profile (`jax.profiler.ProfileData.planes`)."""
    calls: list[Span] = []
    events: list[Event] = []
    producers: dict[int, int] = {}  # producer number -> position in events
    ends: dict[int, float] = {}
    for plane in planes:
        of_device = _DEVICE.match(plane.name)
        device = int(of_device[1]) if of_device else 0
        lines = {line.name: line for line in plane.lines}
        if of_device and {"XLA Modules", "XLA Ops"} <= lines.keys():
            events.extend(_from_rows(lines["XLA Modules"].events, lines["XLA Ops"].events, device))
            continue
        for e in (e for line in plane.lines for e in line.events):
            if e.name == CALL:
                calls.append(Span(e.start_ns * _NANO, e.duration_ns * _NANO))
                continue
            stats: Mapping[str, Any] = dict(e.stats)
            if e.name.startswith(_END):
                ends[stats.get("_c", -1)] = (e.start_ns + e.duration_ns) * _NANO
            elif "hlo_op" in stats and "hlo_module" in stats:
                number = stats.get("device_ordinal", device)
                producers[stats.get("_p", -1 - len(events))] = len(events)
                start, seconds = e.start_ns * _NANO, e.duration_ns * _NANO
                events.append(Event(str(stats["hlo_module"]), str(stats["hlo_op"]), int(number), start, seconds))
    for number, end in ends.items():
        if (at := producers.get(number)) is not None and end > events[at].start_s + events[at].seconds:
            events[at] = replace(events[at], seconds=end - events[at].start_s)
    in_order = sorted(calls, key=lambda span: span.start_s)
    return Recording(tuple(in_order), tuple(sorted(events, key=lambda e: (e.start_s, e.device, e.name))))


def _from_rows(module_row: Iterable[Any], op_row: Iterable[Any], device: int) -> Iterator[Event]:
    """Operations of a plane that has a row of modules: each belongs to the last module that started before it."""
    modules = sorted((e.start_ns, re.sub(r"\(.*", "", e.name)) for e in module_row)
    starts = [start for start, _ in modules]
    for e in op_row:
        at = bisect.bisect_right(starts, e.start_ns) - 1
        if at >= 0:
            name = re.sub(r" = .*", "", e.name).lstrip("%")  # an event may be named by the whole instruction
            yield Event(modules[at][1], name, device, e.start_ns * _NANO, e.duration_ns * _NANO)
