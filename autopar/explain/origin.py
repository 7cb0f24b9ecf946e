"""The step that a plan was made for, kept to price other layouts and to plan under other options.

other layouts    in the problem of the step, or of a stage, built when first asked for    -> autopar/explain/problems.py
other options    the step is planned again from its trace                                 -> StepOrigin.replanned
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import PartitionSpec

from autopar import jax_compat
from autopar.errors import ArgumentError
from autopar.explain.baselines import baselines
from autopar.explain.hints import Replan, hints
from autopar.explain.problems import Subject, of_stage, whole_step
from autopar.ir.graph import Graph
from autopar.ir.layout import Layout
from autopar.options import Settings, settings
from autopar.passes.mesh_search.planner import collector_paused
from autopar.passes.microbatch.batch import infer_batch
from autopar.passes.op_groups.constraints import Pins, last_pins
from autopar.passes.op_groups.pin_keys import Pinnable
from autopar.plans.origin import Alternative, Hint, Prices
from autopar.plans.plan import Plan
from autopar.progress import reporting
from autopar.runtime.planned_step import PlannedStep

#: Options that `replanned` does not take: they say what the arguments are, or give a plan instead of making one.
KEPT = ("static_argnums", "static_argnames", "plan")


@dataclass(frozen=True, eq=False)
class StepOrigin:
    """The planned step, its options, and a way to plan it again.

    Attributes:
        step: the planned step.
        settings: the options that it was planned with.
        replan: plans the same step with other options, or with a larger batch.
        pins: those of the options, with strategies expanded.
        batch: positions of the argument leaves that hold the batch, if the user names them.
    """

    step: PlannedStep
    settings: Settings
    replan: Replan
    pins: Pins | None = None
    batch: tuple[int, ...] | None = None
    _subjects: dict[int, Subject] = field(default_factory=dict)
    _last_pins: dict[int, Mapping[Pinnable, tuple[str, PartitionSpec]]] = field(default_factory=dict)

    @property
    def graph(self) -> Graph | None:
        """See `autopar.plans.origin.Origin`."""
        return None if self.step.plan.pipelined else self.step.traced.graph

    def price_values(
        self, values: Sequence[int], *, exact: bool = False, layouts: Sequence[Layout] | None = None
    ) -> Prices:
        """See `autopar.plans.origin.Origin`."""
        assert self.graph is not None
        return self._priced(-1, values, exact, layouts)

    def price_arguments(
        self, positions: Sequence[int], *, exact: bool = False, layouts: Sequence[Layout] | None = None
    ) -> Prices:
        """See `autopar.plans.origin.Origin`."""
        number = -1
        if self.graph is None:
            owners = {n for n, stage in enumerate(self.step.plan.stages) if {*positions} & {*stage.arguments}}
            if len(owners) != 1:
                return Prices("step", self.step.plan.step_time_s, ())
            (number,) = owners
        with collector_paused(), jax_compat.automatic_axes():
            values = [self._subject(number).values[i] for i in positions]
        return self._priced(number, values, exact, layouts)

    def _priced(self, number: int, values: Sequence[int], exact: bool, layouts: Sequence[Layout] | None) -> Prices:
        """Prices in the problem of a stage; -1: of the step on one mesh."""
        progress = reporting("explain", self.settings.progress)
        with collector_paused(), jax_compat.automatic_axes(), progress as report:
            report("the problem of the step")
            subject = self._subject(number)
            possible = subject.alternatives.layouts(values)
            wanted = [layout for layout in possible if layouts is None or layout in layouts]
            report(f"bounds of {len(wanted)} layouts")
            alternatives = [
                Alternative(layout, subject.local_bytes(values[0], layout), subject.alternatives.bound(values, layout))
                for layout in wanted
            ]
            if exact:
                solved: list[tuple[float, bool]] = []
                for layout in wanted:
                    report(f"solving again, layout {len(solved) + 1} of {len(wanted)}")
                    solved.append(subject.exact_s(values, layout))
                pairs = zip(alternatives, solved, strict=True)
                alternatives = [replace(a, exact_s=seconds, proven=proven) for a, (seconds, proven) in pairs]
        ranked = sorted(alternatives, key=lambda a: (a.seconds, a.at_least_s))
        return Prices(subject.name, subject.seconds, tuple(ranked))

    def _subject(self, number: int) -> Subject:
        """The problem of a stage, or of the step on one mesh (-1), built once."""
        if (priced_on := self.step.target.cluster.name) != self.step.plan.cluster:
            raise ArgumentError(
                f"the plan was priced on the cluster '{self.step.plan.cluster}', and its step is loaded with "
                f"'{priced_on}': give cluster= as it was then"
            )
        if number not in self._subjects:
            if number < 0:
                self._subjects[number] = whole_step(self.step, replace(self.settings, pins=self.pins), self.batch)
            else:
                fixed = [i for i in self.step.plan.stages[number].arguments if self.pinned(i)]
                self._subjects[number] = of_stage(self.step, self.settings, number, fixed)
        return self._subjects[number]

    def pinned(self, position: int) -> str:
        """See `autopar.plans.origin.Origin`."""
        if position in self.step.traced.pins:
            return "the type of the argument, on an Explicit mesh"
        stages = self.step.plan.stages
        stage = next((n for n, stage in enumerate(stages) if position in stage.arguments), 0)
        return self._pin_of(Pinnable("arg", position), stage)

    def pinned_value(self, value: int) -> str:
        """See `autopar.plans.origin.Origin`."""
        return self._pin_of(Pinnable("value", value), 0)

    def _pin_of(self, of: Pinnable, stage: int) -> str:
        """The pin that holds for a leaf or a value in a stage, in words; "" if there is none."""
        if stage not in self._last_pins:
            graph, stages = self.step.traced.graph, len(self.step.plan.stages)
            self._last_pins[stage] = last_pins(self.pins, graph, self.batch, stage, stages)
        pin = self._last_pins[stage].get(of)
        return "" if pin is None else f"the pin '{pin[0]}'"

    def replanned(self, changes: Mapping[str, Any]) -> Plan:
        """See `autopar.plans.origin.Origin`.

        Raises:
            ArgumentError: an option is unknown, has an invalid value, or is one of `KEPT`.
        """
        for name in KEPT:
            if name in changes:
                raise ArgumentError(f"what_if plans the same step again; {name}= cannot be another")
        pins = {**(self.settings.pins or {}), **(changes.get("pins") or {})}
        checked = settings({**changes, **({"pins": pins} if "pins" in changes else {})})
        return self.replan(replace(self._options, **{name: getattr(checked, name) for name in changes}))

    def baselines(self) -> Mapping[str, Plan | str]:
        """See `autopar.plans.origin.Origin`."""
        return baselines(self.step.plan, self._options, self.replan)

    def hints(self) -> tuple[Hint, ...]:
        """See `autopar.plans.origin.Origin`."""
        return hints(self.step.plan, self._options, self.replan, self._examples)

    @property
    def _examples(self) -> int:
        """The leading extent of the batch; 0 if nothing is told to be the batch."""
        graph = self.step.traced.graph
        leaves = infer_batch(graph) if self.batch is None else self.batch
        shapes = (graph.types[graph.inputs[i]].shape for i in leaves)
        return max((shape[0] for shape in shapes if shape), default=0)

    @property
    def _options(self) -> Settings:
        """The options of the plan; of one that was given, those that ask for its mesh, or its stages."""
        s, plan = self.settings, self.step.plan
        if s.plan is None:
            return s
        pipeline: dict[str, Any] = {"stages": len(plan.ranks), "schedule": plan.schedule} if plan.pipelined else {}
        mesh = plan.mesh if s.mesh is None else s.mesh
        return replace(s, plan=None, mesh=mesh, num_microbatches=plan.num_microbatches, **pipeline)
