"""Steps that run again on other values: the iterations of a loop that is unrolled.

Each iteration defines values of its own, of the types and layouts of the first one's (`Program.like`). They are read as
they are made: copies in other layouts are those of the first iteration, of which one is there at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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

    def atom(self, atom: Atom) -> Atom:
        """What is read instead of an atom or of a copy of it."""
        if not isinstance(atom, int):
            return atom
        behind = self.p.behind(atom)
        return self.known.get(behind, atom)

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
            atom, other = self.atom(read), self.atom(result)
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
