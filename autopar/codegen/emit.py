"""From a plan and its graph to one sharded jit program.

Every equation is bound again inside `jax.jit`, with

- a sharding constraint on every value of rank >= 1 that has a planned layout (with fewer constraints the compiler's
  propagation spreads other layouts through the unconstrained operations: up to 2.1 times the bytes were measured);
- a product that only a transpose reads emitted with its operands swapped, in place of both
  (`autopar.codegen.fold_transpose`);
- a constrained copy where a use needs another layout than its value has, one per (value, layout);
- values without a planned layout (free values and views) computed where they are used, once per layout;
- operations that XLA would gather bound per device inside `jax.shard_map` (`autopar.rules.runs_per_device`);
- loops and rematerialised bodies rebuilt, with their bodies emitted in the same way;
- offloaded state copied to device memory at the start of the program, and back at its end
  (`autopar.codegen.host_memory`). The compiler decides when the copies run: libtpu prefetches as early as memory
  allows.

Each binding keeps the user's source line and carries the tag of its operation ("op12", "op12.in0", "out3") in its name
stack, so that each instruction of the compiled program can be traced back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.codegen.context import AnyMesh, Context
from autopar.codegen.emitter import Emitter
from autopar.codegen.host_memory import between_steps, to_device, to_host
from autopar.ir.graph import Graph
from autopar.ir.op_sets import LAPACK
from autopar.ir.train_state import match_state
from autopar.plans.plan import Plan
from autopar.rules import Rule


@dataclass(frozen=True, eq=False)
class Program:
    """A function of flat argument leaves, and the shardings to jit it with."""

    function: Callable[..., tuple[Any, ...]]
    in_shardings: tuple[NamedSharding, ...]
    out_shardings: tuple[NamedSharding, ...]
    donated: tuple[int, ...]

    def jit(self) -> Any:
        """The jitted function of flat leaves."""
        return jax.jit(
            self.function,
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            donate_argnums=self.donated,
            keep_unused=True,
        )


def program(graph: Graph, plan: Plan, rules: Mapping[int, Rule], mesh: AnyMesh, name: str = "step") -> Program:
    """The sharded program of a plan with a single stage on a concrete or abstract mesh; `name`: of the module."""
    context = Context(graph, plan.stages[0], rules, mesh, plan.mesh_names)
    inputs, outputs = in_shardings(plan, mesh), _out_shardings(graph, plan, mesh)

    def function(*leaves: Any) -> tuple[Any, ...]:
        fetched = map(to_device, leaves, inputs)
        emitter = Emitter(context, dict(zip(graph.inputs, fetched, strict=True)))
        for value, array in graph.constants:
            emitter.define(value, array, "constant")
        emitter.run(graph.ops)
        results = (emitter.output(i, atom, plan.outputs[i]) for i, atom in enumerate(graph.outputs))
        return tuple(map(to_host, results, outputs))

    function.__name__ = name  # the compiled module has it, for profilers
    return Program(function, inputs, outputs, plan.donated)


def in_shardings(plan: Plan, mesh: AnyMesh) -> tuple[NamedSharding, ...]:
    """Shardings of the argument leaves between steps on one mesh, memory kind included."""
    return tuple(_sharding(mesh, s, i in plan.offloaded) for i, s in enumerate(plan.in_specs()))


def _out_shardings(graph: Graph, plan: Plan, mesh: AnyMesh) -> tuple[NamedSharding, ...]:
    """Shardings of the results: the next value of an offloaded argument is offloaded too."""
    offloaded = {out for out, position in match_state(graph).items() if position in plan.offloaded}
    return tuple(_sharding(mesh, s, i in offloaded) for i, s in enumerate(plan.out_specs()))


def _sharding(mesh: AnyMesh, partition: PartitionSpec, offloaded: bool) -> NamedSharding:
    return between_steps(NamedSharding(mesh, partition), offloaded)


def compiler_options(plan: Plan, graph: Graph, platform: str) -> Mapping[str, str]:
    """XLA options that the program of a plan without stages needs.

    XLA's CPU compiler removes optimization barriers before it schedules, and then rematerialises values at once instead
    of in the backward pass. Without that pass it keeps the barriers. Tested on jaxlib 0.10.2.
    """
    barriers = {"xla_disable_hlo_passes": "cse_barrier_expander"} if plan.remat and platform == "cpu" else {}
    return {**barriers, **kernel_options(graph, platform)}


def kernel_options(graph: Graph, platform: str) -> Mapping[str, str]:
    """XLA options that programs with LAPACK kernels need on CPU.

    A LAPACK kernel splits a batch over the thread pool that all CPU devices share, and blocks one of its threads until
    the batch is done. In breadth-first order the kernels of several devices can block all threads, and the step never
    ends. The memory-optimized scheduler does not run such kernels concurrently. Tested on jaxlib 0.10.2 and 0.12.0.
    """
    waits = platform == "cpu" and any(op.name in LAPACK for op in graph.walk())
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if waits else {}
