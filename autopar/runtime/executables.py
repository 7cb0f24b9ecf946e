"""A planned step as JAX's ahead-of-time convention has it: lowered, then compiled, then run on arguments."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from autopar import jax_compat
from autopar.codegen import emit as codegen
from autopar.compile import Prepared
from autopar.errors import ArgumentError
from autopar.ir import arguments
from autopar.plans.plan import Plan
from autopar.runtime.single_program import DISPATCH, OneMesh, Staged
from autopar.runtime.watch import patience, watched


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
    _run: Callable[[Sequence[Any]], Sequence[Any]]
    _watched_as: str = ""  # what a first run that does not answer is called; empty: it is not watched
    _ran: threading.Event = field(default_factory=threading.Event)

    def as_text(self) -> str:
        """The compiled HLO of all programs."""
        return "\n".join(p.as_text() for p in self.programs.values())

    def memory_analysis(self) -> Any:
        """Memory statistics of XLA, bytes per device; in a pipeline a dict from names of programs."""
        return self._of_each(lambda program: program.memory_analysis())

    def cost_analysis(self) -> Any:
        """Cost statistics of XLA per device; in a pipeline a dict from names of programs."""
        return self._of_each(lambda program: program.cost_analysis())

    def _of_each(self, ask: Callable[[Any], Any]) -> Any:
        found = {name: ask(program) for name, program in self.programs.items()}
        return found if self.plan.pipelined else found["step"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; arguments are those of the function without the static ones."""
        with arguments.as_arrays(args, kwargs) as given:
            return self.run(given.leaves)

    def run(self, leaves: Sequence[Any]) -> Any:
        """Run the step on flat argument leaves, inside `autopar.ir.arguments.as_arrays`."""
        result = jax.tree.unflatten(self._out_tree, self.flat(leaves))
        return result if self._plain else arguments.to_caller(result, leaves)

    def flat(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run the step on flat argument leaves and return the leaves of the results."""
        with DISPATCH:
            return self._run(leaves) if self._ran.is_set() else self._first_run(leaves)

    def _first_run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        self._ran.set()
        seconds = patience() if self._watched_as else 0.0
        if seconds <= 0:
            return self._run(leaves)
        return watched(lambda: self._run(leaves), self._watched_as, seconds)

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
    _prepared: Prepared
    _name: str = "the step"
    _shardings: tuple[NamedSharding, ...] = ()

    def as_text(self) -> str:
        """The StableHLO; for a pipeline the operations of its stages."""
        pipeline = self._prepared.pipeline
        return self.jax_lowered.as_text() if pipeline is None else str(pipeline.stages)

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Executable:
        """Compile for the devices of this process.

        Args:
            compiler_options: option of XLA -> value, as in `jax.stages.Lowered.compile`.

        Raises:
            ArgumentError: XLA does not know an option.
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
        out_tree, mesh = self._prepared.traced.out_tree, self._prepared.mesh()
        platform = mesh.devices.flat[0].platform
        watched_as = f"{self._name} on {mesh.size} CPU devices" if platform == "cpu" and mesh.size > 1 else ""
        if self._prepared.pipeline is not None:
            step = self._prepared.build(compiler_options)
            weak = tuple(i for i, aval in enumerate(self._prepared.traced.out_avals) if aval.weak_type)
            run = Staged(self.plan, step, step.homes, weak)
            return Executable(self.plan, step.programs, out_tree, run, watched_as)
        needed = codegen.compiler_options(self.plan, self._prepared.traced.graph, platform)
        options = {**needed, **(compiler_options or {})}
        compiled = jax_compat.compiled(self.jax_lowered, options)
        run = OneMesh(self.plan, compiled, self._shardings)
        return Executable(self.plan, {"step": compiled}, out_tree, run, watched_as)


@jax_compat.automatic_axes()
def lower(prepared: Prepared, name: str) -> Lowered:
    """Lower a planned step, which is called so, for the devices at hand."""
    if prepared.pipeline is not None:
        return Lowered(prepared.plan, None, prepared, name)
    mesh = prepared.mesh()
    built = codegen.program(prepared.traced.graph, prepared.plan, prepared.rules(), mesh)
    own = prepared.traced.mesh
    if own is not None and dict(own.shape) == prepared.target.logical.shape:
        typed = Mesh(mesh.devices, mesh.axis_names, axis_types=own.axis_types)
        built = replace(built, out_shardings=tuple(s.update(mesh=typed) for s in built.out_shardings))
    lowered = built.jit().lower(*prepared.traced.in_avals)
    return Lowered(prepared.plan, lowered, prepared, name, built.in_shardings)
