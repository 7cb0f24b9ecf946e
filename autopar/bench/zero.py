"""`autopar bench zero`: the stages of ZeRO as the search finds them, when the memory budget falls and nothing else.

With mixed-precision Adam a worker of N in data parallelism holds, per parameter, and sends per step, in units of what
plain data parallelism sends (Rajbhandari et al., 2020, "ZeRO", sections 5 and 7; `STAGES`):

    data parallel    16 bytes          1       all-reduce of gradients
    ZeRO-1           4 + 12/N          1       optimizer state cut
    ZeRO-2           2 + 14/N          1       gradients cut as well
    ZeRO-3           16/N              1.5     parameters cut as well

The first plan has no budget. What it holds beyond 16 bytes per parameter (activations, and what the clipped gradients
take beside the others) is allowed to all; the budget of each stage is its bytes per parameter and that. Nothing is
pinned: which tensors are cut, and what is sent for it, is the plan's choice. `kept` is its peak less that allowance.

The machine is one on which only communication has a price besides arithmetic: reading and writing memory is free.
Else the search begins with ZeRO-1, which updates less on each device and sends no more than plain data parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar import api, zoo
from autopar.hardware.cluster import Cluster
from autopar.ir.collective import wire_bytes
from autopar.ir.text import seconds, size
from autopar.ir.text import table as grid
from autopar.plans import cache as plan_cache
from autopar.plans.plan import Plan

MODEL = "gpt-10m-remat-master"
SIZES: Mapping[str, Any] = {"layers": 24, "batch": 128, "seq": 128, "dtype": "bfloat16"}
TOLERANCE = 0.01

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """Bytes per parameter that every worker holds, that are cut over all; and bytes sent, of data parallelism's."""

    name: str
    whole: float
    cut: float
    sent: float

    def nbytes(self, workers: int) -> float:
        """Bytes per parameter on each of `workers` devices."""
        return self.whole + self.cut / workers


STAGES = (
    Stage("data parallel", 16, 0, 1),
    Stage("ZeRO-1", 4, 12, 1),
    Stage("ZeRO-2", 2, 14, 1),
    Stage("ZeRO-3", 0, 16, 1.5),
)


def machine(workers: int) -> Cluster:
    """200 Tflop/s, 100 GB/s and 1 us between devices, free memory traffic."""
    return Cluster.custom((workers,), 1e-6, 1e-11, 2e14, 1e18, 80 * 10**9, name="free memory traffic")


def run(
    model: zoo.Model | None = None,
    workers: int = 8,
    stages: Sequence[Stage] = STAGES,
    time_limit: float | None = None,
) -> list[Row]:
    """A row per stage, the first of them without a budget; the default model is `MODEL` with `SIZES`.

    `time_limit`: seconds of planning for each plan, None for that of `autopar.plan`.
    """
    first, *_ = stages
    model = model or zoo.build(MODEL, **SIZES)
    cluster, count = machine(workers), model.parameters()

    def planned(budget: float | None) -> Plan:
        with plan_cache.off():
            return api.plan(
                *(model.step, *model.abstract_args()),
                mesh=(workers,),
                cluster=cluster,
                memory_budget=budget,
                remat="none",
                time_limit=time_limit,
            )

    free = planned(None)
    allowance = free.stages[0].peak_memory_bytes - first.nbytes(workers) * count
    unit = wire_bytes("all-reduce", 2 * count, workers)
    rows: list[Row] = []
    for stage in stages:
        plan = free if stage is first else planned(stage.nbytes(workers) * count + allowance)
        kept, sent = (plan.stages[0].peak_memory_bytes - allowance) / count, plan.wire_bytes() / unit
        rows.append(
            {
                "stage": stage.name,
                "workers": workers,
                "parameters": count,
                "formula_bytes": stage.nbytes(workers),
                "held_bytes": kept,
                "allowance_bytes": allowance / count,
                "formula_sent": stage.sent,
                "sent": sent,
                "step_s": plan.step_time_s,
                "gap": plan.gap,
                "status": plan.solver_status,
                "memory": dict(plan.stages[0].memory),
                "ok": kept <= stage.nbytes(workers) * (1 + TOLERANCE) and sent <= stage.sent * (1 + TOLERANCE),
            }
        )
    return rows


def table(rows: list[Row]) -> str:
    """A line per stage."""
    heads = ("", "bytes/parameter", "kept", "sent at most", "sent", "step", "gap", "reached")
    body = [_cells(row) for row in rows]
    first = rows[0]
    note = (
        f"{first['parameters']:,} parameters on {first['workers']} devices; "
        f"{size(first['allowance_bytes'] * first['parameters'])} beside them"
    )
    return "\n".join([grid("stage of ZeRO", heads, body), note])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row["stage"],
        f"{row['formula_bytes']:.2f}",
        f"{row['held_bytes']:.2f}",
        f"{row['formula_sent']:.1f}",
        f"{row['sent']:.2f}",
        seconds(row["step_s"]),
        f"{row['gap']:.2%}",
        "yes" if row["ok"] else "no",
    )
