"""The driver: from a function and its arguments to a plan that can be executed.

trace      in the mesh that the user has set, types included
plan       on one mesh, the best of candidates with Auto axes              -> autopar/compile/one_mesh.py
           in stages as the user gives them                                -> autopar/compile/given_stages.py
           in stages that are searched, or on one mesh if that is faster   -> autopar/compile/searched_stages.py
agree      of several processes the first plans, and all others load its plan -> autopar/compile/agreement.py
load       a given plan, checked against the function and mesh             -> autopar/runtime/load.py
origin     what answers questions about the plan                           -> autopar/explain/origin.py
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from autopar import argnums, jax_compat
from autopar.compile.agreement import planned_by_first
from autopar.compile.call import (
    Call,
    in_bytes,
    ordinary_pins,
    warn_of_time_limit,
    with_attention_of_cudnn,
    with_batch,
)
from autopar.compile.given_stages import GivenStages
from autopar.compile.one_mesh import plan_one_mesh
from autopar.compile.searched_stages import excludes_search, search_stages, searches_stages
from autopar.cost_models.compiler.backends import backend_of
from autopar.errors import ArgumentError, TraceError
from autopar.explain.origin import StepOrigin
from autopar.ir.graph import Graph, Op
from autopar.ir.graph import verify as verify_graph
from autopar.ir.op_sets import MEGABLOX_PRODUCTS
from autopar.ir.text.warning import warn
from autopar.ir.trace import attention_of_cudnn, needs_gpu, trace
from autopar.options import Settings, check_one_stage, name_of
from autopar.passes.mesh_search.planner import collector_paused
from autopar.passes.remat.choose import Unfit
from autopar.plans.plan import Plan
from autopar.progress import reporting
from autopar.runtime.load import load
from autopar.runtime.planned_step import PlannedStep

#: Kind of GPU -> most elements of a head that cuDNN's attention takes on it, if less than on Hopper.
MOST_HEAD_DIMS: Mapping[str, int] = {"P100": 0, "V100": 0, "T4": 0, "A100": 128}
MAX_ARRAY_BYTES = 2**53  # of one array, so that the sum over a thousand of them is below 2**63


def plan_step(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], s: Settings, local: bool
) -> PlannedStep:
    """Trace and plan a step.

    Args:
        fn: the step.
        args: its positional arguments, or their shapes.
        kwargs: its keyword arguments.
        s: the settings.
        local: the plan is to run on the devices of this process.

    Raises:
        AutoparError: for its subclasses see `autopar.parallelize`.
    """
    with collector_paused(), reporting(name_of(fn), s.progress) as report:
        begin = time.perf_counter()
        report("tracing")
        traced = trace(fn, *args, static_argnums=s.static_argnums, mesh_axes=s.mesh_axes, **kwargs)
        _check_sizes(name_of(fn), verify_graph(traced.graph))
        _check_attention(name_of(fn), traced.graph, s, local)
        if not local:
            _check_tpu_kernels(name_of(fn), traced.graph, s)
        call = Call(fn, traced, args, local, time.perf_counter() - begin, report, jax_compat.trace_context())
        planning = time.perf_counter()
        step = _with_origin(call, s)
        if s.plan is None:
            warn_of_time_limit(name_of(fn), step, s, time.perf_counter() - planning)
        if local:
            _warn_of_idle_devices(name_of(fn), step.plan.mesh)
        return step


def _warn_of_idle_devices(name: str, mesh: Mapping[str, int]) -> None:
    """Warn of a mesh that does not divide the devices here; half of them, say, may be meant."""
    count, here = math.prod(mesh.values()), jax.device_count()
    if count < here and here % count:
        shown = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
        warn(f"{name}: the mesh ({shown}) leaves {here - count} of the {here} devices here idle")


def _warn_of_another_cluster(name: str, plan: Plan, s: Settings) -> None:
    """Warn of a plan whose times and memory are those of another cluster than the one that is given."""
    if s.cluster is not None and s.cluster.name != plan.cluster:
        warn(
            f"{name}: the plan was made for cluster '{plan.cluster}', and its times and memory are still those. For "
            f"cluster '{s.cluster.name}' plan again, without plan="
        )


def _planned(call: Call, s: Settings) -> PlannedStep:
    """The planned step of a traced call; `s`: without strategies among the pins, the memory budget in bytes."""
    name = name_of(call.fn)
    with jax_compat.automatic_axes():
        if s.plan is not None:
            _warn_of_another_cluster(name, s.plan, s)
            return _loaded(call, s, argnums.donating_no_more(s.plan, call.traced, s))
        if call.local and jax.process_count() > 1:
            options = repr(replace(s, progress=None, debug_nans=None))
            return planned_by_first(name, call, options, lambda: _chosen(call, s), lambda plan: _loaded(call, s, plan))
        return _chosen(call, s)


def _loaded(call: Call, s: Settings, plan: Plan) -> PlannedStep:
    return load(name_of(call.fn), call.traced, plan, s.mesh, s.cluster, local=call.local)


def _chosen(call: Call, s: Settings) -> PlannedStep:
    """The step as the planners choose it."""
    with jax_compat.automatic_axes():
        try:
            return _searched(call, s)
        except Unfit as unfit:
            raise unfit.prove() from None


def _searched(call: Call, s: Settings) -> PlannedStep:
    """The step as the planner of given stages, of searched ones, or of one mesh chooses it. Raises Unfit."""
    name, traced = name_of(call.fn), call.traced
    if s.pipelined:
        return GivenStages(call, s).plan()
    excluded = excludes_search(s, traced)
    if excluded is None and searches_stages(s, traced.graph):
        return search_stages(call, s)
    check_one_stage(s, excluded)
    if s.stages == "search":
        warn(f"{name}: stages are not searched with {excluded}; the step is planned on one mesh")
    return plan_one_mesh(call, s)


def _with_origin(call: Call, s: Settings) -> PlannedStep:
    """The planned step, whose plan refers to the step itself, and can be made again with other options."""
    shapes = [arg if i in s.static_argnums else jax.tree.map(_shape, arg) for i, arg in enumerate(call.args)]
    structure = replace(call, args=shapes, local=False)  # the arrays of the call are not kept

    def replan(changed: Settings, batches: int = 1, fused_attention: bool = False) -> Plan:
        with collector_paused(), reporting(name_of(structure.fn), changed.progress) as report:
            again = replace(structure, report=report)
            if batches > 1:
                again = with_batch(again, changed, batches)
            if fused_attention:
                again = with_attention_of_cudnn(again, changed)
            return _with_origin(again, changed).plan

    with jax_compat.automatic_axes():
        resolved = ordinary_pins(call.traced, in_bytes(call, s))
    step, batch = _planned(call, resolved), argnums.named_batch(call.traced, s)
    return replace(step, plan=replace(step.plan, origin=StepOrigin(step, s, replan, resolved.pins, batch)))


def _shape(leaf: Any) -> Any:
    """Shape and dtype of an array: the classes of a user's structures may ask for them when they are made."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array | np.ndarray) else leaf


def _check_attention(name: str, graph: Graph, s: Settings, local: bool) -> None:
    """TraceError for cuDNN's attention on what is no GPU, or on one whose cuDNN lacks it."""
    op = attention_of_cudnn(graph)
    if op is None:
        return
    if local and (here := jax.default_backend()) != "gpu":
        raise needs_gpu(name, op, f"the devices here are of the kind '{here}'")
    if s.cluster is None:
        return
    device = s.cluster.device
    if backend_of(device).name != "gpu":
        raise needs_gpu(name, op, f"'{s.cluster.name}' has {device.name}")
    most = next((most for kind, most in MOST_HEAD_DIMS.items() if kind in device.name), math.inf)
    widest = max(graph.type_of(a).shape[-1] for a in op.inputs[:3])
    if widest > most:
        raise needs_gpu(name, op, f"on {device.name} for heads of at most {most} elements, not of {widest}")


def _check_tpu_kernels(name: str, graph: Graph, s: Settings) -> None:
    """TraceError for a Pallas kernel that is written for TPUs, in a plan for GPUs."""
    if s.cluster is None or backend_of(s.cluster.device).name != "gpu":
        return
    op = next((op for op in graph.walk() if _is_tpu_kernel(op)), None)
    if op is not None:
        raise TraceError(
            f"{name} uses a Pallas kernel for TPUs{f' at {op.source}' * bool(op.source)}, and '{s.cluster.name}' has "
            f'{s.cluster.device.name}. Plan for TPUs, as with cluster="tpu-v5p", or use another kernel, such as '
            'jax.nn.dot_product_attention(..., implementation="cudnn")'
        )


def _is_tpu_kernel(op: Op) -> bool:
    """Whether an operation is a kernel for TPUs that is not interpreted."""
    if op.name in MEGABLOX_PRODUCTS:
        return not op.params["interpret"]
    return op.name == "pallas_call" and jax_compat.is_tpu_kernel(op.params)


def _check_sizes(name: str, graph: Graph) -> None:
    """ArgumentError for the first value of more than `MAX_ARRAY_BYTES`."""
    if max((t.nbytes for t in graph.types), default=0) <= MAX_ARRAY_BYTES:
        return
    value = next(v for v, t in enumerate(graph.types) if t.nbytes > MAX_ARRAY_BYTES)
    op, path = graph.producers.get(value), graph.names.get(value)
    what = f"the result of {op.name} at {op.source}" if op is not None else f"argument '{path}'" if path else "a value"
    raise ArgumentError(
        f"{what} of {name} is {graph.types[value]}, more than the {MAX_ARRAY_BYTES:.1e} bytes an array may have"
    )
