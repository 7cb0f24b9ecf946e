"""A planned step in the ahead-of-time convention of `jax.stages`: lowered, then compiled, then run on arguments."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from autopar import jax_compat
from autopar.codegen import emit as codegen
from autopar.errors import ArgumentError
from autopar.ir import arguments
from autopar.ir.text.printer import type_text
from autopar.plans.plan import Plan
from autopar.runtime.faults.nans import CheckedProgram, check_arguments, is_asked
from autopar.runtime.faults.watch import patience, warn_if_slow
from autopar.runtime.planned_step import PlannedStep
from autopar.runtime.processes import lost_processes_named
from autopar.runtime.single_program import DISPATCH_LOCK, PipelineRunner, SingleMeshRunner


@dataclass(frozen=True, eq=False)
class Executable:
    """A compiled step.

    Attributes:
        plan: the plan.
        programs: name -> compiled object of JAX: "step" without stages; "stage 0 F" and so on in a pipeline.
    """

    plan: Plan
    programs: Mapping[str, Any]
    _out_tree: Any
    _run: SingleMeshRunner | PipelineRunner
    _watched_as: str = ""  # name of the step in a warning that its first run does not end; empty: no warning
    _debug_nans: bool = False
    _in_avals: tuple[jax.ShapeDtypeStruct, ...] = ()
    _ran: threading.Event = field(default_factory=threading.Event)

    def as_text(self) -> str:
        """The compiled HLO of all programs."""
        return "\n".join(p.as_text() for p in self.programs.values())

    def memory_analysis(self) -> Any:
        """Memory statistics of XLA, bytes per device; in a pipeline a dict from program names to statistics."""
        return self._of_each(lambda program: program.memory_analysis())

    def cost_analysis(self) -> Any:
        """Cost statistics of XLA per device; in a pipeline a dict from program names to statistics."""
        return self._of_each(lambda program: program.cost_analysis())

    def _of_each(self, ask: Callable[[Any], Any]) -> Any:
        answers = {name: ask(program) for name, program in self.programs.items()}
        return answers if self.plan.pipelined else answers["step"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; arguments are those of the function without the static ones.

        Raises:
            ArgumentError: the arguments have other shapes or dtypes than those that the step is compiled for.
            AutoparError: as a call of the parallelized function.
        """
        with_jit = jax.disable_jit(False) if jax_compat.disables_jit() else nullcontext()
        with with_jit, arguments.as_arrays(args, kwargs) as array_args:
            try:
                return self.run(array_args.leaves)
            except Exception as error:
                self._check_types(array_args.leaves, error)
                raise

    def _check_types(self, leaves: Sequence[Any], cause: Exception) -> None:
        """ArgumentError if arguments are not what the step is compiled for; `cause`: what their use raised."""
        paths, advice = self.plan.input_paths, "compile for these arguments, or call the parallelized function"
        if len(leaves) != len(paths):
            raise ArgumentError(f"the step is compiled for {len(paths)} arrays, got {len(leaves)}; {advice}") from cause
        for path, leaf, wanted in zip(paths, leaves, self._in_avals, strict=True):
            given = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
            if (given.shape, given.dtype) != (wanted.shape, wanted.dtype):
                raise ArgumentError(
                    f"'{path}' is {type_text(given)}, and the step is compiled for {type_text(wanted)}; {advice}"
                ) from cause

    def run(self, leaves: Sequence[Any]) -> Any:
        """Run the step on flat argument leaves, inside `arguments.as_arrays`, and return the results' tree."""
        result = jax.tree.unflatten(self._out_tree, self.flat(leaves))
        return result if self._plain else arguments.to_caller(result, leaves)

    def flat(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run the step on flat argument leaves and return the leaves of the results."""
        with DISPATCH_LOCK, self._guard():
            results = self._run(leaves) if self._ran.is_set() else self._first_run(leaves)
            if self._debug_nans:
                check_arguments(self.plan.input_paths, leaves, results)
            return results

    def _guard(self) -> AbstractContextManager[None]:
        return nullcontext() if jax.process_count() == 1 else lost_processes_named()

    def _first_run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        self._ran.set()
        seconds = patience() if self._watched_as else 0.0
        if seconds <= 0:
            return self._run(leaves)
        return warn_if_slow(lambda: self._run(leaves), self._watched_as, seconds)

    @functools.cached_property
    def taken_at(self) -> Sequence[NamedSharding | None]:
        """Where the step takes each argument leaf; None for one that stays on the host."""
        return self._run.taken_at

    @functools.cached_property
    def _plain(self) -> bool:
        return arguments.is_plain(self._out_tree)


@dataclass(frozen=True, eq=False)
class Lowered:
    """A planned step before compilation, as `jax.stages.Lowered`.

    Attributes:
        plan: the plan.
        jax_lowered: lowered object of JAX; None for a pipeline, whose programs are lowered when they are compiled.
    """

    plan: Plan
    jax_lowered: Any
    _planned: PlannedStep
    _name: str = "the step"
    _shardings: tuple[NamedSharding, ...] = ()
    _jaxpr: Any = None  # of the step on one mesh, if its results are to be searched for NaN
    _debug_nans: bool = False

    def as_text(self) -> str:
        """The StableHLO; for a pipeline the operations of its stages."""
        pipeline = self._planned.pipeline
        return self.jax_lowered.as_text() if pipeline is None else str(pipeline.stages)

    @jax.disable_jit(False)
    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Executable:
        """Compile for the devices of this process.

        Args:
            compiler_options: XLA option -> value, as in `jax.stages.Lowered.compile`.

        Raises:
            ArgumentError: XLA has no such option.
        """
        if not isinstance(compiler_options, Mapping | None):
            raise ArgumentError(f"compiler_options={compiler_options!r:.60} must be a dict from options to values")
        try:
            return self._compiled(compiler_options)
        except jax.errors.JaxRuntimeError as error:
            if compiler_options and "compile option" in str(error):
                raise ArgumentError(f"compiler_options={compiler_options!r:.60}: {error}") from error
            raise

    def _compiled(self, compiler_options: Mapping[str, Any] | None) -> Executable:
        traced, mesh = self._planned.traced, self._planned.mesh()
        out_tree, in_avals = traced.out_tree, traced.in_avals
        platform = mesh.devices.flat[0].platform
        watched_as = f"{self._name} on {mesh.size} CPU devices" if platform == "cpu" and mesh.size > 1 else ""
        run_plan = replace(self.plan, donated=()) if self._debug_nans else self.plan
        if self._planned.pipeline is not None:
            step = self._planned.build(compiler_options, self._debug_nans)
            weak = tuple(i for i, aval in enumerate(traced.out_avals) if aval.weak_type)
            run = PipelineRunner(run_plan, step, step.argument_shardings, weak)
            return Executable(self.plan, step.programs, out_tree, run, watched_as, self._debug_nans, in_avals)
        required = codegen.compiler_options(self.plan, traced.graph, platform)
        compiled = jax_compat.compiled(self.jax_lowered, {**required, **(compiler_options or {})})
        graph, microbatches = traced.graph, self.plan.num_microbatches
        program = CheckedProgram(compiled, self._jaxpr, graph, microbatches) if self._debug_nans else compiled
        run = SingleMeshRunner(run_plan, program, self._shardings)
        return Executable(self.plan, {"step": compiled}, out_tree, run, watched_as, self._debug_nans, in_avals)


@jax_compat.automatic_axes()
def lower(planned: PlannedStep, name: str, debug_nans: bool | None = None) -> Lowered:
    """Lower a planned step for the devices of this process.

    Args:
        planned: the step.
        name: of the step, in warnings.
        debug_nans: the option; None: as JAX's own setting is.
    """
    checked = is_asked(debug_nans)
    if planned.pipeline is not None:
        return Lowered(planned.plan, None, planned, name, _debug_nans=checked)
    mesh = planned.mesh()
    built = codegen.program(planned.traced.graph, planned.plan, planned.rules(), mesh, name)
    own = planned.traced.mesh
    if own is not None and dict(own.shape) == planned.target.logical.shape:
        typed = Mesh(mesh.devices, mesh.axis_names, axis_types=own.axis_types)
        built = replace(built, out_shardings=tuple(s.update(mesh=typed) for s in built.out_shardings))
    if checked:
        built = replace(built, donated=())
    traced = built.jit().trace(*planned.traced.in_avals)
    jaxpr = traced.jaxpr if checked else None
    return Lowered(planned.plan, traced.lower(), planned, name, built.in_shardings, jaxpr, checked)
