"""What stages save memory with: nothing where all fit, and otherwise no more time than layers or state alone take."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.passes.inter_op.savings import Attempt, Savings, SavingsSearch, smallest
from autopar.passes.remat.choose_offload import OFFLOAD


@dataclass(frozen=True)
class Stage:
    """Bytes as given and of each layer and step of state, and the seconds that saving one of these takes."""

    given: int
    layers: int
    layer: tuple[int, int]
    steps: int
    step: tuple[int, int]

    def peak(self, layers: int, steps: int) -> int:
        return self.given - layers * self.layer[0] - steps * self.step[0]

    @property
    def least(self) -> int:
        return self.peak(self.layers, self.steps)


@dataclass
class Step:
    """A step whose plans are their savings."""

    stages: tuple[Stage, ...]
    asked: list[Savings] = field(default_factory=list[Savings])

    def attempt(self, saved: Savings) -> Attempt[Savings]:
        self.asked.append(saved)
        stages = [*zip(self.stages, *saved, strict=True)]
        seconds = sum(layers * s.layer[1] + steps * s.step[1] for s, layers, steps in stages)
        peaks = [s.peak(layers, steps) for s, layers, steps in stages]
        return Attempt(saved, seconds, peaks, range(len(peaks)))

    def copying(self, stage: int, nbytes: float) -> float:
        step_bytes, seconds = self.stages[stage].step
        return nbytes / step_bytes * seconds

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(s.layers for s in self.stages)

    @property
    def state(self) -> list[list[float]]:
        return [[s.step[0]] * s.steps for s in self.stages]

    def best(self, nbytes: float, layers: bool = True, state: bool = True) -> Savings | None:
        can_save = tuple(n * layers for n in self.layers), [steps * state for steps in self.state]
        return SavingsSearch(nbytes, *can_save, self.attempt, self.copying).best()


costs = st.tuples(st.integers(1, 5), st.integers(1, 5))
stages = st.builds(Stage, st.integers(60, 120), st.integers(0, 6), costs, st.integers(0, 6), costs)
steps = st.lists(stages, min_size=1, max_size=4).map(lambda listed: Step(tuple(listed)))


@given(steps, st.integers(0, 130))
def test_a_plan_that_fits_is_found_and_neither_alone_is_faster(step: Step, nbytes: int) -> None:
    best = step.best(nbytes)
    assert (best is None) == (max(s.least for s in step.stages) > nbytes)
    if best is None:
        return
    chosen = step.attempt(best)
    assert chosen.peak <= nbytes
    for alone in (step.best(nbytes, state=False), step.best(nbytes, layers=False)):
        assert alone is None or chosen.seconds * (1 - OFFLOAD.min_gain) <= step.attempt(alone).seconds


@given(steps)
def test_where_all_fit_one_plan_is_made_and_nothing_is_saved(step: Step) -> None:
    none = (0,) * len(step.stages)
    assert step.best(max(s.given for s in step.stages)) == (none, none)
    assert step.asked == [(none, none)]


@given(steps)
def test_the_least_peak_is_that_of_all_savings(step: Step) -> None:
    assert smallest(step.layers, step.state, step.attempt).peak == max(s.least for s in step.stages)


@pytest.mark.parametrize(
    ("nbytes", "layer", "state", "best"),
    [
        pytest.param(80, 1, 9, ((0, 0), (0, 0)), id="none"),
        pytest.param(70, 1, 9, ((1, 0), (0, 0)), id="layers, as they are faster"),
        pytest.param(70, 9, 1, ((0, 0), (2, 0)), id="state, as many bytes as are missing"),
        pytest.param(35, 9, 1, ((3, 0), (4, 0)), id="both, where neither alone suffices"),
        pytest.param(29, 9, 1, None, id="no plan"),
    ],
)
def test_the_faster_of_layers_and_state(nbytes: int, layer: int, state: int, best: Savings | None) -> None:
    """The first stage has 80 bytes, 3 layers of 10, and 4 steps of state of 5; the second always fits."""
    step = Step((Stage(80, 3, (10, layer), 4, (5, state)), Stage(20, 2, (1, 1), 2, (1, 1))))
    assert step.best(nbytes) == best
