"""The division into stages with the least lower bound on its step.

A stage of layers k .. j - 1 is busy for m t(k, j) s in a step of m microbatches, and the stages in front of it delay it
by their passes of one microbatch, unless backward passes are split. With s stages left, the first of which begins with
layer k on device d, the step takes at least

    G(s, k, d) = min over layers j > k, placements d .. e, and options that fit, of
                 max( m t(k, j) + u(k, j),  t(k, j) + P(s - 1, j, e),  G(s - 1, j, e) )
    P(s, k, d) = min over the same, of  max( m t(k, j),  t(k, j) + P(s - 1, j, e) )

with u for what a stage does once per step, which may run beside the passes of stages in front. Only the sum m t + u is
bounded, so that u is not added to other bounds.

Options have further bounds with a price per byte: within a memory limit a stage takes at least its priced seconds plus
rate (residuals - limit)                                                                                     -> Priced
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.ir.problem import Floats
from autopar.passes.inter_op.dynamic_program import ROUNDING, Question, by_length


class BoundedStage(NamedTuple):
    """A stage of the division, of layers `first` .. `last` - 1.

    Attributes:
        submesh: its number.
        first, last: its first layer, and the layer behind its last.
        option: of its costs.
    """

    submesh: int
    first: int
    last: int
    option: int


@dataclass(frozen=True)
class LeastStep:
    """A lower bound on the step of every division.

    Attributes:
        seconds: the bound; inf if no division fits.
        stages: of a division that reaches it, in order.
    """

    seconds: float
    stages: tuple[BoundedStage, ...]


class Priced(NamedTuple):
    """A bound on the seconds of a stage plus the price of its bytes.

    Attributes:
        rate: s per step for a byte.
        seconds: of the layers i .. j - 1 at [:, i, j], and the price of all but residuals; s per step.
    """

    rate: float
    seconds: Floats

    def least(self, stash: Floats, memory: float) -> Floats:
        """Seconds per step within a memory limit; `stash`: bytes of residuals, with all microbatches in flight."""
        return self.seconds + self.rate * (stash - memory)


def least_step(
    question: Question, priced: Mapping[int, Sequence[Priced]] | None = None, *, splits: bool = False
) -> LeastStep:
    """Lower bound on the step of every division.

    Args:
        question: the problem, with lower bounds for costs.
        priced: submesh -> further bounds on the seconds of its options.
        splits: whether backward passes are split, so that stages behind do not wait for all of a pass.
    """
    q, tables = question, _Tables(question, priced or {}, splits=splits)
    behind = np.full((q.layers + 1, q.devices + 1), np.inf)
    behind[q.layers, q.devices] = 0.0
    levels, best, of_best = [_Level(behind, behind)], np.inf, 0
    for stages in range(1, (q.stages or min(q.layers, q.devices)) + 1):
        longer = tables.longer(levels[-1], stages)
        levels.append(_Level(np.where(longer.step < best, longer.step, np.inf), longer.passes))
        least = float(levels[-1].step[0, 0])
        if stages >= q.fewest and q.stages in (None, stages) and least < best:
            best, of_best = least, stages
        if not np.isfinite(levels[-1].step).any():
            break
    return LeastStep(best * (1 - ROUNDING), tables.read(levels[: of_best + 1]))


class _Level(NamedTuple):
    """G and P for one number of stages, at [layer, device]."""

    step: Floats
    passes: Floats


class _Tables:
    """The tables of the recurrence; arrays by `dynamic_program.by_length`."""

    def __init__(self, question: Question, priced: Mapping[int, Sequence[Priced]], *, splits: bool) -> None:
        q = self.question = question
        self.positions = q.positions()
        self.prices = {n: q.prices[n].by_length(q.prices[n].longest(q.memory[n])) for n, _, _ in self.positions}
        self.busy = {n: q.microbatches * p.times(q.microbatches) for n, p in self.prices.items()}
        self.passes = {n: q.microbatches * p.seconds for n, p in self.prices.items()}
        self.paths = {n: np.zeros_like(p.seconds) if splits else p.seconds for n, p in self.prices.items()}
        self.priced = {
            n: [Priced(rate, by_length(seconds, len(p.seconds[0]) - 1)) for rate, seconds in priced.get(n, ())]
            for n, p in self.prices.items()
        }

    def _options(self, n: int, stages: int) -> Floats:
        """Seconds that the first of so many stages is busy in a step, by option; inf for those that do not fit."""
        in_flight, memory, prices = self.question.in_flight(stages), self.question.memory[n], self.prices[n]
        fits, busy = prices.peaks(in_flight) <= memory, self.busy[n]
        for priced in self.priced[n]:
            busy = np.maximum(busy, priced.least(in_flight * prices.stash, memory))
        return np.where(fits, busy, np.inf)

    def longer(self, behind: _Level, stages: int) -> _Level:
        """Bounds with one more stage in front of the state (layer, device), which makes so many."""
        longer = _Level(*(np.full(table.shape, np.inf) for table in behind))
        for n, starts, stops in self.positions:
            reached = np.isfinite(behind.step[:, stops])
            at, rows = np.flatnonzero(reached.any(0)), np.flatnonzero(reached.any(1))
            if not len(at):
                continue
            seconds, last = self._options(n, stages), _Level(*(table[:, stops[at]] for table in behind))
            best = _Level(*(np.full(table.shape, np.inf) for table in last))
            for length in range(1, min(seconds.shape[1], int(rows[-1]) + 1)):
                first, end = max(rows[0], length), rows[-1] + 1
                here = slice(first - length, end - length)
                tables = seconds, self.passes[n], self.paths[n]
                busy, passes, path = (table[:, length, here, None] for table in tables)
                through = path + last.passes[first:end]
                step = np.maximum(np.maximum(busy, through).min(0), last.step[first:end])
                np.minimum(best.step[here], step, out=best.step[here])
                fits = np.where(np.isfinite(busy), passes, np.inf)
                np.minimum(best.passes[here], np.maximum(fits, through).min(0), out=best.passes[here])
            for table, own in zip(longer, best, strict=True):
                table[:, starts[at]] = np.minimum(table[:, starts[at]], own)
        return longer

    def read(self, levels: Sequence[_Level]) -> tuple[BoundedStage, ...]:
        """The stages of the least bound; ties go to the first placement, then to the fewest layers."""
        stages_read: list[BoundedStage] = []
        layer = device = 0
        for stages in range(len(levels) - 1, 0, -1):
            goal = float(levels[stages].step[layer, device])
            stage, device = self._stage(layer, device, levels[stages - 1], goal, stages)
            stages_read.append(stage)
            layer = stage.last
        return tuple(stages_read)

    def _stage(self, layer: int, device: int, behind: _Level, goal: float, stages: int) -> tuple[BoundedStage, int]:
        """The first of so many stages, and the device behind it."""
        for n, starts, stops in self.positions:
            for stop in stops[starts == device].tolist():
                steps, passes = behind.step[layer:, stop], behind.passes[layer:, stop]
                most = self.paths[n].shape[1]
                through = self.paths[n][:, : len(steps), layer] + passes[:most]
                options = np.maximum(self._options(n, stages)[:, : len(steps), layer], through)
                if len(lengths := np.flatnonzero(np.maximum(options.min(0), steps[:most]) == goal)):
                    length = int(lengths[0])
                    return BoundedStage(n, layer, layer + length, int(options[:, length].argmin())), stop
        raise AssertionError(f"no stage from layer {layer} and device {device} on takes the {goal} s it was found by")
