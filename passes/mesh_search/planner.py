"""Planning of a traced function on one mesh, without a pipeline.

    Graph -> rules -> op groups -> problem -> fold, presolve, bound, solve -> MeshSolution

    rules, op groups, problem     -> _model
    fold, presolve, bound, solve  -> Planner._bounded, Planner._finished; under a memory budget Planner._fitting

`autopar.plans.builders.one_mesh` makes the plan of a solution.

This module composes passes. `Planner` repeats the steps with some layers rematerialised, or with some optimizer state
in the host's memory, as `autopar.passes.remat` asks for.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from autopar.cost_models import offload
from autopar.cost_models.compiler.backends import Backend, backend_of
from autopar.cost_models.memory.liveness import Liveness
from autopar.cost_models.memory.report import Memory, report
from autopar.cost_models.memory.row import Row, even_share, smallest
from autopar.cost_models.sharding.groups import Model
from autopar.errors import MemoryBudgetError
from autopar.hardware.cluster import LogicalMesh
from autopar.ir.graph import Graph
from autopar.ir.trace import Traced
from autopar.ir.train_state import in_place
from autopar.passes.intra_op import build as intra_op
from autopar.passes.op_groups import merge as op_groups
from autopar.passes.op_groups.constraints import Pinned, resolve
from autopar.passes.remat import choose as recomputation
from autopar.passes.remat import choose_offload, memory_policy
from autopar.passes.remat import rewrite as remat
from autopar.passes.remat.choose import Effort, RematResult, Unfit
from autopar.passes.remat.estimates import Forecast, forecasts, one_microbatch
from autopar.passes.remat.options import Options
from autopar.passes.solver.optimize import Bounded, Pruned, Solution, bound, finish
from autopar.rules import Rule, rules_of


@dataclass(frozen=True, slots=True)
class MeshEffort:
    """How well a mesh is bounded before it is compared with others."""

    # relative gap of that bound (chosen on T5-large and U-Net-470M)
    rough: float = 0.02


MESHES = MeshEffort()


def make_model(traced: Traced, mesh: LogicalMesh, options: Options) -> Model:
    """The problem whose solutions are the plans of one traced function on one mesh. Raises PinError."""
    clock = _Clock()
    return _model(traced, mesh, options, rules_of(traced.graph, options.rules), clock)[0]


def _model(
    traced: Traced, mesh: LogicalMesh, options: Options, rules: Mapping[int, Rule], clock: _Clock
) -> tuple[Model, Pinned]:
    """The problem and the resolved pins. Raises PinError."""
    axes = None if traced.mesh is None else dict(traced.mesh.shape)
    pinned = resolve(options.pins, traced.graph, mesh, traced.pins, axes, options.batch)
    clock.lap("rules")
    grouping = op_groups.group(traced.graph, rules, mesh, pinned.arguments, pinned.results, pinned_values=pinned.values)
    model = intra_op.build(traced.graph, grouping, mesh)
    clock.lap("graph")
    return model, pinned


@dataclass(frozen=True, eq=False)
class Parts:
    """The step of a program that runs it in microbatches, and the function that makes such programs.

    Rematerialisation is chosen by layer of the step, so a step is rewritten first and split into microbatches then.

    Attributes:
        step: the step.
        split: step -> the program that runs it in microbatches; the step itself for one microbatch.
        count: number of microbatches.
        divides: whether the step falls into so many microbatches, with which it has not been planned.
    """

    step: Traced
    split: Callable[[Graph], Graph] = lambda graph: graph
    count: int = 1
    divides: Callable[[int], bool] = lambda count: True


@dataclass(frozen=True, eq=False)
class _Program:
    """A program with some layers rematerialised, and its problem before any state is moved to the host's memory."""

    graph: Graph
    rules: Mapping[int, Rule]
    model: Model
    pinned: Pinned


@dataclass(frozen=True, eq=False)
class Draft:
    """The problem of a program with some layers rematerialised and some state in the host's memory.

    Attributes:
        policies: rematerialisation policy of each layer; empty if none is rematerialised.
        hosted: positions of the arguments in the host's memory.
        graph: the rewritten program.
        rules: signature of an operation of `graph` -> sharding rule.
        model: the problem; its costs include copies between device and host.
        pinned: the pins.
        alive: makes the liveness model.
    """

    policies: tuple[str, ...]
    hosted: tuple[int, ...]
    graph: Graph
    rules: Mapping[int, Rule]
    model: Model
    pinned: Pinned
    alive: Callable[[], Liveness]

    @cached_property
    def liveness(self) -> Liveness:
        """The memory model of the problem. It is made on demand, as a mesh that is pruned does not need it."""
        return self.alive()

    def host_bytes(self, mesh: LogicalMesh, solution: Solution) -> float:
        """Bytes per device in the host's memory under a solution."""
        return offload.host_bytes(self.model, self.graph, mesh, self.hosted, solution.assignment)


@dataclass(frozen=True, eq=False)
class MeshSolution:
    """The solution of a program on one mesh, from which its plan is made.

    Attributes:
        written: the program as written.
        draft: the problem.
        solution: its solution, with a bound on all plans of the candidate meshes.
        mesh: the mesh.
        cluster_name: the name of its cluster.
        donated: positions of the arguments whose buffers the step may reuse.
        notes: the first notes of the plan.
        phases: phase of planning -> seconds.
    """

    written: Graph
    draft: Draft
    solution: Solution
    mesh: LogicalMesh
    cluster_name: str
    donated: tuple[int, ...]
    notes: tuple[str, ...]
    phases: Mapping[str, float]

    @cached_property
    def memory(self) -> Memory:
        """What a device has in memory at the peak."""
        return report(self.draft.liveness, self.solution.assignment)


@dataclass(eq=False)
class Planner:
    """Plans one program on one mesh, with varying rematerialisation and state in the host's memory.

    Results are cached by (policy of each layer, positions of the arguments in the host's memory).

    Attributes:
        traced: the program as written.
        mesh: the mesh to plan for.
        options: the options of the user.
        parts: the step, and how it is split into microbatches.
        attempts: number of plans tried.
        laps: phase -> seconds.
        drafts: problems.
        programs: rewritten programs by policies.
        solved: problems and solutions that `attempt` returned.
        fastest: solutions without a memory budget.
        bounds: states before the ILP of the problems in `fastest` whose solution is "open".
        forecast: solution -> forecasts of rematerialisation.
        donated: positions of the donated arguments.
        memory_limit: bytes per device, or "min" for the least peak.
        always: positions of the arguments that the user wants in the host's memory.
        leaves: the arguments that may be there.
    """

    traced: Traced
    mesh: LogicalMesh
    options: Options
    parts: Parts
    attempts: int = 0
    laps: dict[str, float] = field(default_factory=dict)
    drafts: dict[tuple[tuple[str, ...], tuple[int, ...]], Draft] = field(default_factory=dict)
    programs: dict[tuple[str, ...], _Program] = field(default_factory=dict)
    solved: dict[tuple[tuple[str, ...], tuple[int, ...]], tuple[Draft, Solution]] = field(default_factory=dict)
    fastest: dict[tuple[tuple[str, ...], tuple[int, ...]], Solution] = field(default_factory=dict)
    bounds: dict[tuple[tuple[str, ...], tuple[int, ...]], Bounded] = field(default_factory=dict)
    forecast: dict[Solution, Mapping[str, Forecast]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.donated = _donated(self.traced.graph, self.options)
        self.memory_limit = memory_policy.memory_limit(self.mesh, self.options.memory_budget)
        self.always, self.leaves = choose_offload.candidates(
            self.traced.graph, self.mesh, self.donated, self.options.offload
        )

    def plan(self, cluster_name: str, cutoff: float = math.inf) -> MeshSolution:
        """The solution whose plan is the best.

        Args:
            cluster_name: recorded in the plan.
            cutoff: s; plans that take as long are of no use to the caller. It is compared first with the bound of the
                program as written, which bounds all plans: rematerialisation and offload only add time to a step.

        Raises:
            Pruned: no plan is below `cutoff` by more than the gap.
            Unfit: no plan fits into the budget of the user.
        """
        begin, counted = time.perf_counter(), sum(self.laps.values())
        if math.isfinite(cutoff):
            self.check(cutoff)
        choice = self.choose(cutoff)
        if math.isfinite(cutoff) and not (choice.fits and choice.seconds < cutoff):
            raise Pruned(self.fastest[self.as_written].lower_bound, self.laps)
        if choice.prove is not None:
            raise Unfit(partial(self._proof, choice.prove))
        assert choice.plan is not None
        draft, solution = choice.plan
        notes = (
            *recomputation.notes(draft.policies),
            *choose_offload.notes(draft.graph, self.mesh, draft.hosted, draft.host_bytes(self.mesh, solution)),
        )
        if self.attempts > 1:
            self._count({"remat": time.perf_counter() - begin - (sum(self.laps.values()) - counted)})
        phases = {**self.laps, "inter_op": 0.0}
        written = self.traced.graph
        return MeshSolution(written, draft, solution, self.mesh, cluster_name, self.donated, notes, phases)

    def _proof(self, prove: Callable[[], MemoryBudgetError]) -> MemoryBudgetError:
        """The error that no plan fits; the search for the smallest plan has the time of a new call."""
        self.options = replace(self.options, first_deadline=memory_policy.first_deadline())
        return prove()

    def bound(self, cutoff: float = math.inf) -> Solution:
        """A solution of the program as written without a memory budget and without an ILP, with a bound on all plans.

        Plans that take `cutoff` (s) or longer need not be found.
        """
        draft, gap = self._draft(*self.as_written), max(MESHES.rough, self.options.gap)
        return self._bounded(draft, cutoff * (1 - self.options.gap), gap, once=True)

    def learn(self, bound: Solution, laps: Mapping[str, float]) -> None:
        """Add a result of `bound`, which may be from another process, and replace the seconds of each phase."""
        if bound.status == "cutoff" or bound.gap <= self.options.gap:
            self.fastest[self.as_written] = bound
        self.laps.clear()  # drafts refer to this dict, so it cannot be replaced
        self.laps.update(laps)

    def fits(self, solution: Solution) -> bool:
        """Whether a plan of the program as written fits into memory."""
        return self.outcome((self._draft(*self.as_written), solution)).fits

    def expected(self, solution: Solution) -> float:
        """An estimate of the step time (s) of the best plan that fits, from a plan of the program as written.

        It is inf if no forecast suffices. Offload is not taken into account.
        """
        free = self.outcome((self._draft(*self.as_written), solution))
        if free.fits or isinstance(self.memory_limit, str) or not any(layers := self.open_to()):
            return free.seconds if free.fits else math.inf
        return recomputation.expected_seconds(free, layers, self.memory_limit, self.forecasts(free))

    def surcharge(self) -> float:
        """An estimate of the time (s) that a plan needs to fit, beyond the program as written; 0 if that may fit.

        The estimate serves for other meshes too: the least memory, a device's even share, is similar on every mesh.
        """
        as_written = self.solved.get(self.as_written)
        if as_written is None or isinstance(self.memory_limit, str):
            return 0.0
        draft, _ = as_written
        room = self.memory_limit + self.leaves.total
        if max(map(smallest, draft.liveness.rows())) <= room:
            return 0.0
        free = self.outcome(as_written)
        results = [self.outcome(solved) for key, solved in self.solved.items() if key != self.as_written]
        return recomputation.overhead([free, *results], self.open_to(), room, self.forecasts(free))

    def outcome(self, planned: tuple[Draft, Solution]) -> RematResult[tuple[Draft, Solution]]:
        """The outcome of a plan: seconds, peak, and whether it fits."""
        draft, solution = planned
        peak, _ = draft.liveness.peak(solution.assignment)
        fits = memory_policy.fits(peak, self.mesh, self.options.memory_budget)
        constrained = not fits or memory_policy.is_constrained(solution)
        return RematResult(draft.policies, planned, solution.objective, peak, fits, constrained, offloaded=draft.hosted)

    def open_to(self) -> tuple[bool, ...]:
        """For each layer, whether rematerialising it saves memory; empty if the user has decided."""
        return self._recomputable if self.options.remat == recomputation.AUTO else ()

    @cached_property
    def _recomputable(self) -> tuple[bool, ...]:
        """For each layer of the step, whether rematerialising it saves memory."""
        return remat.recomputable(self.parts.step.graph)

    def forecasts(self, as_written: RematResult[tuple[Draft, Solution]]) -> Mapping[str, Forecast]:
        """Policy -> forecast of the time and memory of rematerialised layers, from this plan; empty if not known."""
        if as_written.plan is None:
            return {}
        draft, solution = as_written.plan
        if solution not in self.forecast:  # cached, as offload and other meshes need it again
            layered = draft.graph if self.parts.step.graph is self.traced.graph else one_microbatch(draft.graph)
            # forecasts need the layers of the step
            same_layers = layered is not None and remat.recomputable(layered) == self._recomputable
            plan = draft.graph, draft.model, self.mesh, draft.liveness, solution.assignment
            self.forecast[solution] = forecasts(*plan, self._recomputable, layered) if same_layers else {}
        return self.forecast[solution]

    def choose(self, cutoff: float) -> RematResult[tuple[Draft, Solution]]:
        """The best outcome within the memory allowed. See `autopar.passes.remat.choose_offload.choose`."""
        return choose_offload.choose(self.attempt, self.open_to, self.leaves, self.memory_limit, cutoff, self.forecasts)

    def check(self, cutoff: float) -> None:
        """Raise Pruned if the program as written has no plan below `cutoff` (s) by more than the gap. See `plan`."""
        draft, least = self._draft(*self.as_written), cutoff * (1 - self.options.gap)
        solution = self._quick(draft, least)
        if solution.status == "open" and solution.objective >= cutoff:
            solution = self._fastest(draft, least)
        if solution.status == "cutoff" or solution.objective >= cutoff:
            raise Pruned(solution.lower_bound, self.laps)

    def cannot_fit(self, *, anywhere: bool = False) -> bool:
        """Whether memory is too small for all plans, by bounds that need no solution.

        All state that may be in the host's memory is there, and all layers are rematerialised or none is. With
        `anywhere`, the bound is a device's even share, which is valid for every mesh of as many devices.
        """
        layers = self.open_to()
        if not any(layers) or isinstance(self.memory_limit, str):
            return False
        hosted = self.leaves.positions or self.always
        ends = ((), recomputation.uniform(remat.FULL, layers))
        least = partial(even_share, devices=self.mesh.size) if anywhere else smallest
        return all(
            max(map(least, self._peaks(self._policies(policies), hosted))) > self.memory_limit for policies in ends
        )

    def _peaks(self, policies: tuple[str, ...], hosted: tuple[int, ...]) -> Sequence[Row]:
        """The memory row of the peak of a known plan of a program; otherwise rows of its likely peaks.

        If the known plan has less state in the host's memory, that state is left out of the row. It can be on the
        device at other times.
        """
        solved = self.solved.get((policies, hosted)) or self.solved.get((policies, self.always))
        if solved is None:
            return self._draft(policies, hosted).liveness.rows()
        draft, solution = solved
        waiting = frozenset(draft.graph.inputs[i] for i in hosted if draft.hosted != hosted)
        return (draft.liveness.at_peak_without(waiting, solution.assignment),)

    @property
    def as_written(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The policies and the positions in the host's memory that the user asks for, and no others."""
        return self._policies(()), self.always

    def _policies(self, policies: Sequence[str]) -> tuple[str, ...]:
        """These policies, unless the user has given one for all layers."""
        if self.options.remat not in (recomputation.AUTO, remat.NONE):
            policies = recomputation.uniform(self.options.remat, self._recomputable)
        return tuple(policies)

    def attempt(
        self, policies: Sequence[str], hosted: Sequence[int], effort: Effort, cutoff: float
    ) -> RematResult[tuple[Draft, Solution]]:
        """The outcome of planning with these policies and this state in the host's memory.

        Args:
            policies: rematerialisation policy of each layer.
            hosted: positions of the arguments in the host's memory.
            effort: "fastest" ignores the budget, "fitting" searches within it, and "proven" does so even if a bound on
                memory shows that no plan fits, for the error.
            cutoff: s; plans that fit and take as long need not be found.
        """
        self.attempts += 1
        policies, hosted = self._policies(policies), tuple(hosted) or self.always
        if effort != "proven" and (least := self._hopeless(policies, hosted, effort)):
            without_offload = self.solved.get((policies, self.always))  # the same without offload, which is faster
            seconds = without_offload[1].objective if without_offload else math.inf
            return RematResult(policies, None, seconds, least, fits=False, constrained=True, offloaded=hosted)
        draft = self._draft(policies, hosted)
        try:
            solution = self._start(draft) if effort == "fastest" else self._fitting(draft, cutoff)
        except Pruned:
            return RematResult(
                draft.policies, None, math.inf, 0.0, fits=False, constrained=True, offloaded=draft.hosted
            )
        except MemoryBudgetError as error:
            return RematResult(draft.policies, None, math.inf, error.bound_bytes, False, True, error, draft.hosted)
        planned = self.solved[policies, draft.hosted] = (draft, solution)
        return self.outcome(planned)

    def _start(self, draft: Draft) -> Solution:
        """The cheapest plan without a memory budget.

        If that takes an ILP, and the plan found without it does not fit, this plan is returned as it is.
        """
        solution = self._quick(draft)
        goes_on = solution.status == "open" and self.outcome((draft, solution)).fits
        return self._fastest(draft) if goes_on else solution

    def _quick(self, draft: Draft, cutoff: float = math.inf) -> Solution:
        """The solution without a memory budget and without an ILP, "open" if bounds leave a gap. Cached."""
        key = draft.policies, draft.hosted
        solution = self.fastest.get(key)
        if solution is None or (solution.status == "cutoff" and solution.lower_bound < cutoff):
            solution = self.fastest[key] = self._bounded(draft, cutoff, self.options.gap)
        return solution

    def _fastest(self, draft: Draft, cutoff: float = math.inf) -> Solution:
        """The cheapest plan without a memory budget. Cached."""
        key = draft.policies, draft.hosted
        solution = self._quick(draft, cutoff)
        if solution.status == "open":
            self.fastest[key] = self._finished(self.bounds.pop(key))
        return self.fastest[key]

    def _bounded(self, draft: Draft, cutoff: float, gap: float, *, once: bool = False) -> Solution:
        """The solution without an ILP; the state before the ILP is kept in `bounds` if one may improve it."""
        bounded = bound(draft.model.problem, cutoff=cutoff, once=once, **replace(self.options, gap=gap).keywords())
        self._count(bounded.phases)
        solution = bounded.solution
        if solution is None or (solution.status != "cutoff" and self.options.solver != "auto"):
            return self._finished(bounded)
        if solution.status == "open" and not once:
            self.bounds[draft.policies, draft.hosted] = bounded
        return solution

    def _finished(self, bounded: Bounded) -> Solution:
        """The solution of a bounded problem, by ILP if necessary."""
        finished = finish(bounded, solver=self.options.solver, time_limit=self.options.seconds, gap=self.options.gap)
        self._count({name: lap - bounded.phases.get(name, 0.0) for name, lap in finished.phases.items()})
        return finished

    def _fitting(self, draft: Draft, cutoff: float) -> Solution:
        """The cheapest plan that fits. Errors are those of `autopar.passes.remat.memory_policy.solve`."""
        begin, counted = time.perf_counter(), sum(self.laps.values())
        try:
            return memory_policy.solve(
                draft.model.problem,
                draft.liveness,
                self.mesh,
                self.options.memory_budget,
                self.options,
                memory_policy.Remedies(self.options.remat != remat.NONE, self.parts.count, self.parts.divides),
                lambda: self._start(draft),
                cutoff,
            )
        finally:
            elapsed = time.perf_counter() - begin
            self._count({"memory": elapsed - (sum(self.laps.values()) - counted)})

    def _count(self, phases: Mapping[str, float]) -> None:
        """Add to the seconds of these phases."""
        for name, seconds in phases.items():
            self.laps[name] = self.laps.get(name, 0.0) + seconds

    def _everywhere(self, policies: Sequence[str]) -> bool:
        """Whether these policies rematerialise every layer that the planner may rematerialise."""
        open_to = self.open_to() if policies else ()
        return any(open_to) and not any(p == remat.NONE and o for p, o in zip(policies, open_to, strict=True))

    def _hopeless(self, policies: tuple[str, ...], hosted: tuple[int, ...], effort: Effort) -> float:
        """A lower bound (bytes) on the peak of every plan if it exceeds the budget; otherwise 0.

        If the user gives no budget, a plan of the program as written is always returned, so it is never hopeless. A
        plan with rematerialisation or offload chosen by the planner is, if it exceeds the memory of the device.
        """
        moved = hosted != self.always
        chosen = moved or (policies and self.options.remat == recomputation.AUTO)
        within = self.memory_limit if chosen else self.options.memory_budget
        planned_before = moved and (policies, self.always) in self.solved
        if not isinstance(within, float) or (
            effort == "fastest" and not planned_before and not self._everywhere(policies)
        ):
            return 0.0
        least = max(map(smallest, self._peaks(policies, hosted)))
        return least if least > within else 0.0

    def _rules(self, graph: Graph) -> Mapping[int, Rule]:
        """The sharding rules of a rewritten program: those of the program as written, and those of its new barriers."""
        if graph is self.traced.graph or self.parts.step.graph is not self.traced.graph:
            return rules_of(graph, self.options.rules)
        rules = rules_of(self.traced.graph, self.options.rules)
        barriers = tuple(op for op in graph.ops if op.signature not in rules and not op.regions)
        return {**rules, **rules_of(replace(graph, ops=barriers), self.options.rules)}

    def _program(self, policies: tuple[str, ...]) -> _Program:
        """The program with these policies, cached. Raises PinError."""
        if policies not in self.programs:
            clock = _Clock()
            step = self.parts.step
            graph = remat.rewrite(step.graph, policies)
            graph = self.traced.graph if graph is step.graph else self.parts.split(graph)
            rules = self._rules(graph)
            model, pinned = _model(replace(self.traced, graph=graph), self.mesh, self.options, rules, clock)
            self.programs[policies] = _Program(graph, rules, model, pinned)
            self._count(clock.laps)
        return self.programs[policies]

    def _draft(self, policies: tuple[str, ...], hosted: tuple[int, ...]) -> Draft:
        """The problem with these policies and this state in the host's memory, cached. Raises PinError."""
        if (policies, hosted) not in self.drafts:
            p, clock = self._program(policies), _Clock()
            model = offload.priced(p.model, p.graph, self.mesh, hosted)
            clock.lap("graph")
            self._count(clock.laps)
            backend = backend_of(self.mesh.device)
            # as `autopar.codegen.emit.compiler_options` requires of the compiler
            backend = replace(backend, keeps_barriers=True) if policies else backend
            # without a reference to the planner: a cycle with its drafts would delay the release of their memory
            alive = partial(_liveness, p, model, self.mesh, backend, self.donated, hosted, self.laps)
            self.drafts[policies, hosted] = Draft(policies, hosted, p.graph, p.rules, model, p.pinned, alive)
        return self.drafts[policies, hosted]


def _liveness(
    program: _Program,
    model: Model,
    mesh: LogicalMesh,
    backend: Backend,
    donated: Sequence[int],
    hosted: Sequence[int],
    laps: dict[str, float],
) -> Liveness:
    """The memory model of a problem. Its construction time (s) is added to `laps`."""
    begin = time.perf_counter()
    liveness = Liveness(program.graph, model, mesh, backend, donated, hosted)
    laps["liveness"] = laps.get("liveness", 0.0) + time.perf_counter() - begin
    return liveness


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable cyclic garbage collection in the context.

    Planning makes some 10^5 small objects without cycles. Scanning them repeatedly takes up to a fifth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Clock:
    """Measures the seconds of consecutive phases."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Record the time since the last call as this phase."""
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


def _donated(graph: Graph, options: Options) -> tuple[int, ...]:
    """Positions of the arguments whose buffers the step may reuse."""
    if options.donate == "auto":
        return tuple(sorted(in_place(graph).values()))
    return tuple(int(i) for i in options.donate)
