"""The records of effort of the planner's algorithms, and the values that their fields are tried with.

A field is halved and doubled, the numbers of a tuple are scaled together. `VALUES` has those fields for
which these values mean nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from autopar.compile import call, one_mesh, searched_stages
from autopar.passes.inter_op import (
    effort,
    layer_bounds,
    lower_bound,
    pipelines,
    recompute,
    simulate,
    stage_options,
)
from autopar.passes.layers import find
from autopar.passes.memory import (
    budget,
    cutting_plane,
    lagrangian,
    local_search,
    min_memory,
    path_relinking,
    presolve,
    search_state,
    symmetry_breaking,
)
from autopar.passes.mesh_search import planner
from autopar.passes.remat import choose, choose_offload
from autopar.passes.solver import contraction, dead_end, dual_ascent, elimination, optimize, reduced_problem
from autopar.passes.stages import plan

Value = int | float | tuple[float, ...]

#: Algorithm -> the record that planning uses unless it is given another.
RECORDS: Mapping[str, Any] = MappingProxyType(
    {
        "dual-ascent": dual_ascent.ASCENT,
        "elimination": elimination.ELIMINATION,
        "dead-ends": dead_end.DEAD_ENDS,
        "contraction": contraction.CONTRACTION,
        "reduction": reduced_problem.REDUCTION,
        "optimizer": optimize.OPTIMIZER,
        "memory-presolve": presolve.PRESOLVE,
        "multipliers": lagrangian.MULTIPLIERS,
        "multiplier-steps": lagrangian.STEPS,
        "master-problem": cutting_plane.SIMPLEX,
        "local-search": local_search.LOCAL_SEARCH,
        "mix": symmetry_breaking.MIX,
        "path-relinking": path_relinking.RELINK,
        "memory-search": search_state.SEARCH,
        "least-memory": min_memory.LEAST_MEMORY,
        "budget": budget.BUDGET,
        "meshes": planner.MESHES,
        "layers": find.LAYERS,
        "remat": choose.REMAT,
        "offload": choose_offload.OFFLOAD,
        "stages": plan.STAGE,
        "stage-options": stage_options.STAGE_OPTIONS,
        "inter-op": effort.INTER_OP,
        "layer-bounds": layer_bounds.BOUND,
        "pipeline-bound": lower_bound.PIPELINE_BOUND,
        "recomputation-of-stages": recompute.RECOMPUTE,
        "simulation": simulate.SIMULATION,
        "pipelines": pipelines.PIPELINES,
        "planning": call.PLANNING,
        "one-mesh": one_mesh.ONE_MESH,
        "searched-stages": searched_stages.SEARCHED_STAGES,
    }
)

_SHARE = (0.5, 0.9)

#: (algorithm, field) -> values, where half and double make no sense: shares up to 1, and what is 0.
VALUES: Mapping[tuple[str, str], tuple[Value, ...]] = MappingProxyType(
    {
        ("reduction", "kept"): _SHARE,
        ("multiplier-steps", "share"): (0.3, 1.0),
        ("stage-runs", "longer"): (0.6, 1.0),
        ("searched-stages", "planned_over_forecast"): (0.8, 1.0),
    }
)


def fields(algorithm: str) -> tuple[str, ...]:
    """The fields of the record of an algorithm."""
    return tuple(field.name for field in dataclasses.fields(RECORDS[algorithm]))


def values(algorithm: str, field: str) -> tuple[Value, ...]:
    """The values that a field is tried with, other than its own."""
    own = getattr(RECORDS[algorithm], field)
    candidates = VALUES.get((algorithm, field)) or tuple(_scaled(own, factor) for factor in (0.5, 2.0))
    return tuple(value for value in dict.fromkeys(candidates) if value != own)


def _scaled(value: Value, factor: float) -> Value:
    if isinstance(value, tuple):
        return tuple(factor * x for x in value)
    return max(1, int(factor * value)) if isinstance(value, int) else factor * value


def every(algorithms: tuple[str, ...] = tuple(RECORDS), names: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """(algorithm, field) of these algorithms; `names`: of these fields only, unless empty."""
    for algorithm in algorithms:
        for field in fields(algorithm):
            if not names or field in names:
                yield algorithm, field


def replace_in_process(algorithm: str, field: str, value: Value | list[float]) -> None:
    """Change a default record for the rest of this process.

    Records are frozen, and the planner refers to the one instance of each. A process that plans one variant may
    therefore change it in place before it plans; nothing else may.
    """
    # JSON, in which a worker is told the value, has lists and no tuples
    object.__setattr__(RECORDS[algorithm], field, tuple(value) if isinstance(value, list) else value)
