"""The instructions of a pipeline and their text form.

A *rank* is a group of devices that runs one list of instructions in order; a *stage* is a part of the model that is
placed on one rank. The value F0.2 is the output of stage 0 in the forward pass of microbatch 2; B1.2 is the cotangent
that stage 1 sends back in its backward pass.

    op          text        what the rank does
    run         F0.2        the forward pass of stage 0 on microbatch 2
                B0.2        its backward pass: all gradients, or only those of its inputs if there are passes W
                W0.2        the gradients of its weights
    send        F0.2>1      send F0.2 to the rank of stage 1; this rank no longer needs its copy
    recv        F0.2<1      receive F0.2 for stage 1
    accumulate  +0.2        add the gradients and other sums of microbatch 2 to those of stage 0, and store its
                            per-example results
    free        -F0.2       drop the stash that F0.2 left for B0.2
                -B0.2       drop what was left for W0.2
    reduce      sum0.2      reduce the sums of stage 0 over its devices and copies; 2 is the last microbatch in them
    update      new0.2      run what stage 0 does once per batch: its weights become the next version

A run whose weights are not version 0 has the version as a suffix, as in F0.2v1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, cast

from autopar.errors import ScheduleError

Op = Literal["run", "send", "recv", "accumulate", "free", "reduce", "update"]
Kind = Literal["F", "B", "W", ""]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of one rank.

    Attributes:
        op: the operation.
        kind: the pass that runs, or the pass whose value is sent, received or freed; "" for other ops.
        stage: the stage that runs, or whose value or gradients these are.
        microbatch: the microbatch; for `reduce` and `update` the last one of the window.
        to: the stage that a sent or received value is for; -1 for other instructions.
        version: number of updates that the weights of a run have had since the start of the list.
    """

    op: Op
    kind: Kind
    stage: int
    microbatch: int
    to: int = -1
    version: int = 0

    def __str__(self) -> str:
        where = f"{self.stage}.{self.microbatch}"
        version = f"v{self.version}" if self.version else ""
        target = "" if self.to < 0 else str(self.to)
        return f"{_BEFORE[self.op]}{self.kind}{where}{_AFTER.get(self.op, '')}{target}{version}"


_BEFORE: Mapping[Op, str] = MappingProxyType(
    {"run": "", "send": "", "recv": "", "accumulate": "+", "free": "-", "reduce": "sum", "update": "new"}
)
_AFTER: Mapping[Op, str] = MappingProxyType({"send": ">", "recv": "<"})

_GRAMMAR: tuple[tuple[Op, str], ...] = (
    ("run", r"(?P<kind>[FBW])(?P<stage>\d+)\.(?P<microbatch>\d+)(?:v(?P<version>\d+))?"),
    ("send", r"(?P<kind>[FB])(?P<stage>\d+)\.(?P<microbatch>\d+)>(?P<to>\d+)"),
    ("recv", r"(?P<kind>[FB])(?P<stage>\d+)\.(?P<microbatch>\d+)<(?P<to>\d+)"),
    ("accumulate", r"\+(?P<stage>\d+)\.(?P<microbatch>\d+)"),
    ("free", r"-(?P<kind>[FB])(?P<stage>\d+)\.(?P<microbatch>\d+)"),
    ("reduce", r"sum(?P<stage>\d+)\.(?P<microbatch>\d+)"),
    ("update", r"new(?P<stage>\d+)\.(?P<microbatch>\d+)"),
)


def parse(text: str) -> Instruction:
    """The instruction that prints as `text`; ScheduleError if there is none."""
    for op, pattern in _GRAMMAR:
        if match := re.fullmatch(pattern, text):
            parts = match.groupdict()
            kind = cast(Kind, parts.get("kind") or "")
            stage, microbatch = int(parts["stage"]), int(parts["microbatch"])
            return Instruction(op, kind, stage, microbatch, int(parts.get("to") or -1), int(parts.get("version") or 0))
    raise ScheduleError(f"'{text}' is no instruction; instructions look like F0.2, F0.2>1, F0.2<1, +0.2, -F0.2, sum0.2")
