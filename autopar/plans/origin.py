"""What a plan was made for, as far as questions about it need the step, or planning.

A plan is data, and is read without the step. Two kinds of question are not answered by that data: what other layouts
cost, and what the plan would be under other options. A plan that was just made, or was checked against a function
(`parallelize(plan=...)`), refers to an `Origin`, which answers them. It is not saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autopar.ir.graph import Graph
from autopar.ir.layout import Layout
from autopar.ir.text import seconds, size


@dataclass(frozen=True, slots=True)
class Alternative:
    """A layout that some values can have, and the time of the best plan in which all of them have it.

    Attributes:
        layout: the layout.
        local_bytes: bytes of one of the values on a device.
        at_least_s: lower bound on the time (s per step) with this layout.
        exact_s: the time (s per step) of the best plan that was found with this layout; inf if no plan has it. None if
            it was not asked for.
        proven: whether `exact_s` is proven to be the optimum.
    """

    layout: Layout
    local_bytes: int
    at_least_s: float
    exact_s: float | None = None
    proven: bool = False

    @property
    def seconds(self) -> float:
        """The best that is known of the time (s per step): exact, or the lower bound."""
        return self.at_least_s if self.exact_s is None else self.exact_s


@dataclass(frozen=True, slots=True)
class Prices:
    """What the layouts that some values can have cost.

    Attributes:
        subject: what takes the time: "step", or a stage such as "stage 0", whose seconds are those in which it is busy
            per step. Other stages are as planned.
        seconds: what that takes as planned (s per step).
        alternatives: the layouts, the cheapest first; empty if none are priced.
    """

    subject: str
    seconds: float
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class Hint:
    """A change of options, and the plan under it.

    Attributes:
        change: the options, such as "memory_budget=160000000000".
        step_time_s: predicted seconds per step with it.
        saved_s: predicted seconds that it saves, per step of as many examples as planned.
        peak_memory_bytes: predicted peak memory with it, bytes per device.
        examples: number of examples of a step with it, if that changes; otherwise 0.
        batches: how many times as many examples these are.
    """

    change: str
    step_time_s: float
    saved_s: float
    peak_memory_bytes: int
    examples: int = 0
    batches: int = 1

    @property
    def share(self) -> float:
        """The part of the planned time of an example that it saves, 0 to 1."""
        return self.saved_s / (self.step_time_s / self.batches + self.saved_s)

    def __str__(self) -> str:
        n, t = self.examples, self.step_time_s
        per_example = f" of {n:,} examples, {seconds(t / n)} per example" if n else ""
        return (
            f"{self.change}: {seconds(t)} per step{per_example}, {self.share:.1%} less, "
            f"with {size(self.peak_memory_bytes)} of memory per device"
        )


class Origin(Protocol):
    """The step that a plan was made for.

    `exact` solves the problem again for each layout, besides bounding it; `layouts` are those to price, by default all
    that the values can have in common.
    """

    @property
    def graph(self) -> Graph | None:
        """The program that is executed; None for a pipeline, which has one per stage."""
        ...

    def price_values(
        self, values: Sequence[int], *, exact: bool = False, layouts: Sequence[Layout] | None = None
    ) -> Prices:
        """What layouts of these values of `graph` cost."""
        ...

    def price_arguments(
        self, positions: Sequence[int], *, exact: bool = False, layouts: Sequence[Layout] | None = None
    ) -> Prices:
        """What layouts of these argument leaves cost; in a pipeline, leaves that one stage stores."""
        ...

    def pinned(self, position: int) -> str:
        """What fixes the layout of an argument leaf, in words; "" if it is free."""
        ...

    def pinned_value(self, value: int) -> str:
        """What fixes the layout of a value of `graph`, in words; "" if it is free."""
        ...

    def replanned(self, changes: Mapping[str, Any]) -> Any:
        """The best plan under other options, those of `autopar.parallelize`; pins are added to those there are."""
        ...

    def baselines(self) -> Mapping[str, Any]:
        """Name of a strategy that people know -> the best plan of it on one mesh, or why there is none."""
        ...

    def hints(self) -> tuple[Hint, ...]:
        """Changes of options that make the step faster, each planned; the fastest first."""
        ...
