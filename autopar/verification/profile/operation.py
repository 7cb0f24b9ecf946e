"""One operation that ran in a measured step."""

from __future__ import annotations

from dataclasses import dataclass

#: Start and end (s).
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that ran.

    Attributes:
        program: name of the program, as in `Executable.programs`.
        instruction: of the schedule, in words; on one mesh the name of the program.
        name: of the instruction in the compiled program.
        kind: that of a collective; "" for computation.
        begins: it begins a collective: false for computation, and for the second half of an asynchronous pair.
        source: source line of the user, "file.py:line"; "" if unknown.
        device: number of the device among those of this process.
        step: number of the step.
        start_s: seconds after the start of the step.
        seconds: how long it took (s); a collective waits for the last of its devices.
    """

    program: str
    instruction: str
    name: str
    kind: str
    begins: bool
    source: str
    device: int
    step: int
    start_s: float
    seconds: float

    @property
    def interval(self) -> Interval:
        """Start and end, in seconds after the start of the step."""
        return self.start_s, self.start_s + self.seconds
