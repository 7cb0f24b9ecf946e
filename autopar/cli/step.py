"""The step that a command is about: its options once, for all commands that plan it.

    @app.command()
    @with_step
    def trace(step: Step, output: Path) -> None: ...

has the arguments and options of `trace` and those of `Step`; what is given for the latter arrives as a `Step`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, get_type_hints

from autopar.cli.options import (
    Attention,
    Batch,
    ClusterName,
    Hosts,
    Layers,
    MemoryBudget,
    MeshSizes,
    Microbatches,
    NoCache,
    PinTexts,
    PlanFile,
    Remat,
    ScheduleName,
    SelectiveScan,
    Seq,
    Solver,
    Stages,
    StrategyTexts,
    TargetOrPlan,
    cache,
    in_stages,
    options,
    pins_of,
)
from autopar.errors import ArgumentError

if TYPE_CHECKING:
    from autopar.plans.plan import Plan
    from autopar.verification.profile.comparison import Profile


@dataclass(frozen=True)
class Step:
    """What was given for a step: its name, sizes, and options of `autopar.plan`."""

    target: TargetOrPlan
    cluster: ClusterName = None
    hosts: Hosts = None
    mesh: MeshSizes = None
    layers: Layers = None
    batch: Batch = None
    seq: Seq = None
    attention: Attention = None
    selective_scan: SelectiveScan = None
    memory_budget: MemoryBudget = None
    remat: Remat = "auto"
    num_microbatches: Microbatches = None
    stages: Stages = "auto"
    schedule: ScheduleName = "auto"
    plan_file: PlanFile = None
    pins: PinTexts = None
    strategies: StrategyTexts = None
    solver: Solver = "auto"
    no_cache: NoCache = False

    @property
    def is_file(self) -> bool:
        """Whether the target is a saved plan."""
        return self.target.endswith(".json")

    def plan(self, **more: Any) -> Plan:
        """The plan, or a saved one that is checked against the function; of a file the plan without its step.

        Args:
            more: further options of `autopar.plan`, for a step that is planned afresh.
        """
        from autopar import api
        from autopar.plans.plan import Plan

        if self.is_file:
            return Plan.load(self.target)
        fn, args = self.loaded()
        with self.remembered():
            return api.plan(fn, *args, **({} if self.plan_file else more), **self._options())

    def loaded(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function and its arguments. ArgumentError for the file of a plan alone."""
        from autopar.zoo import targets

        self._check_has_step()
        return targets.load(
            self.target,
            layers=self.layers,
            batch=self.batch,
            seq=self.seq,
            attention=self.attention,
            selective_scan=self.selective_scan,
        )

    def devices(self, default: int) -> int:
        """The number of devices of the mesh that is asked for, or that a saved plan has; or of the cluster."""
        from autopar.plans.plan import Plan

        asked = options(self.mesh, self.cluster, self.hosts, "auto", None)
        mesh = Plan.load(self.plan_file).mesh_sizes if self.plan_file else asked["mesh"]
        return math.prod(mesh) if mesh else asked["cluster"].num_devices if "cluster" in asked else default

    def _options(self) -> dict[str, Any]:
        """Options of `autopar.plan`: all of them, or those that go with a saved plan."""
        asked: dict[str, Any] = {"pins": pins_of(self.pins, self.strategies)}
        asked |= options(self.mesh, self.cluster, self.hosts, self.solver, self.memory_budget)
        if self.plan_file is None:
            return {**asked, **in_stages(self.stages, self.schedule, self.num_microbatches), "remat": self.remat}
        kept = {name: asked[name] for name in ("mesh", "cluster", "memory_budget", "pins") if name in asked}
        return {**kept, "plan": self.plan_file}

    def profile(self, steps: int) -> Profile:
        """Measured steps on the devices of this machine, with arguments of one value. ArgumentError for a file."""
        from autopar import api
        from autopar.zoo import targets

        fn, args = self.loaded()
        with self.remembered():
            return api.parallelize(fn, **self._options()).profile(*targets.arrays(args), steps=steps)

    def plan_with_step(self) -> Plan:
        """The plan with its step. ArgumentError for the file of a plan alone."""
        self._check_has_step()
        return self.plan()

    def _check_has_step(self) -> None:
        if self.is_file:
            raise ArgumentError(
                f"{self.target} has the plan and not its step: give the step, and the plan as --plan {self.target}"
            )

    def remembered(self) -> Any:
        """The context in which the step is planned again: with the plans that are kept on disk, or without."""
        return cache(not self.no_cache)


def with_step(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the arguments and options of `Step` in place of its parameter `step`.

    An option of the command's own with the name of a field of `Step` is not given to the step.
    """
    own = inspect.signature(command).parameters
    hints: Mapping[str, Any] = {
        **get_type_hints(Step, include_extras=True), **get_type_hints(command, include_extras=True)
    }  # fmt: skip
    first = [_parameter("target", hints["target"], inspect.Parameter.empty)]
    mine = [_parameter(name, hints[name], p.default) for name, p in own.items() if name != "step"]
    rest = [
        _parameter(f.name, hints[f.name], inspect.Parameter.empty if f.default is MISSING else f.default)
        for f in fields(Step)
        if f.name != "target" and f.name not in own
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        step = Step(**{f.name: given.pop(f.name) for f in fields(Step) if f.name not in own})
        command(step=step, **given)

    parameters = [*first, *mine, *rest]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
