"""Steps that run again on other values: the iterations of a loop that is unrolled.

Each iteration defines values of its own, of the types and layouts of the first one's (`Program.like`), and reads copies
of its own in other layouts (`Program.runs`). Those in a loop within the loop that is unrolled as well are read as they
are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from autopar.cost_models.compiler.compiled_program import Frame, Program, Step, values
from autopar.ir.graph import Atom


@dataclass(eq=False)
class Repetition:
    """Another run of steps.

    Attributes:
        p: the program.
        known: value of the steps -> the atom that this run has instead.
    """

    p: Program
    known: dict[int, Atom]
    copies: dict[int, int] = field(default_factory=dict)  # token -> that of this run
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self.number = len(self.p.runs)
        self.p.runs.append(self.known)

    def atom(self, atom: Atom) -> Atom:
        """What is read instead of an atom or of a copy of it."""
        instead = self.as_made(atom)
        if instead is atom or not isinstance(instead, int) or atom not in self.p.tokens or atom in self.p.run_of:
            return instead
        token = cast(int, atom)
        if token not in self.copies:
            copy = self.copies[token] = self.p.new(instead)
            self.p.tokens[copy] = (instead, self.p.tokens[token][1])
            self.p.run_of[copy] = self.number
        return self.copies[token]

    def as_made(self, atom: Atom) -> Atom:
        """What is there instead of an atom, or of what it is a copy of."""
        return self.known.get(self.p.behind(atom), atom) if isinstance(atom, int) else atom

    def steps(self, steps: Sequence[Step]) -> Iterator[Step]:
        """The steps of this run, but for those that are there for copies alone."""
        for step in steps:
            if step.outputs and step.outputs[0] in self.p.transposed_again:
                continue
            outputs = tuple(map(self.define, step.outputs))
            frames = tuple(map(self._frame, step.frames))
            taken = tuple((a, v) for a, v in self._pairs(step.taken))
            yield replace(
                step,
                inputs=self._read(step.inputs),
                outputs=outputs,
                after=self._read(step.after),
                frames=frames,
                taken=taken,
            )

    def _read(self, inputs: Sequence[int]) -> tuple[int, ...]:
        return values([self.atom(v) for v in inputs if v not in self.p.transposed_again])

    def _pairs(self, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        for read, result in pairs:
            atom, other = self.atom(read), self.as_made(result)
            if isinstance(atom, int) and isinstance(other, int):
                yield atom, other

    def define(self, value: int) -> int:
        """The value that this run defines instead of one."""
        p, other = self.p, self.p.new(value)
        if value in p.pieces:
            p.pieces[other] = p.pieces[value]
        if value in p.cheap:
            p.cheap.add(other)
        if value in p.stacked:
            p.stacked[other] = p.stacked[value]
        self.known[value] = other
        return other

    def _frame(self, frame: Frame) -> Frame:
        steps = [*self.steps(frame.steps)]
        return Frame(steps, self._read(frame.leaving), (*self._pairs(frame.carried),))
