"""What is planned: toys at the prices of a real machine, and sizes between a toy and the largest of the zoo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

SECONDS = (
    300.0  # time limit of planning, which is not reached: a limit in time would make the plan depend on the machine
)


@dataclass(frozen=True, slots=True)
class Program:
    """A planning problem.

    Attributes:
        model: zoo name.
        mesh: sizes of the mesh; empty: the search chooses.
        cluster: preset.
        hosts: of the cluster; None: as many as the mesh needs.

        budget: memory budget as a share of the peak without a budget; None: none is given.
        remat: as in `autopar.plan`.
        stages: as in `autopar.plan`.
        points: budgets of a Pareto front, which is then planned in place of one plan.
    """

    model: str
    mesh: tuple[int, ...] = (2, 4)
    cluster: str = "p3.16xlarge"
    hosts: int | None = None

    budget: float | None = None
    remat: Literal["none", "auto"] = "none"
    stages: Literal["auto", "search"] = "auto"
    points: int = 0


PROGRAMS: Mapping[str, Program] = MappingProxyType(
    {
        "mlp-toy 0.7": Program("mlp-toy", (8,), budget=0.7),
        "gpt-toy-scan": Program("gpt-toy-scan"),
        "moe-toy": Program("moe-toy"),
        "t5-toy": Program("t5-toy"),
        "unet-toy": Program("unet-toy"),
        "moe-toy 0.9": Program("moe-toy", (8,), budget=0.9),
        "gpt-toy-scan 0.4 remat": Program("gpt-toy-scan", (8,), budget=0.4, remat="auto"),
        "gpt-toy-scan stages": Program("gpt-toy-scan", (), stages="search"),
        "gpt-2.6b-scan": Program("gpt-2.6b-scan", (4, 8)),
        "llama3-8b": Program("llama3-8b", (4, 8), "dgx-h100"),
        "gpt-toy-scan 0.9": Program("gpt-toy-scan", (8,), budget=0.9),
        "moe-toy 2x4 0.7": Program("moe-toy", budget=0.7),
        "unet-toy 2x4 0.7": Program("unet-toy", budget=0.7),
        "wresnet-toy 0.8": Program("wresnet-toy", (8,), budget=0.8),
        "gpt-toy-scan front": Program("gpt-toy-scan", (8,), points=3),
        "llama3-8b 0.7": Program("llama3-8b", (4, 8), "dgx-h100", budget=0.7),
        "llama3-8b 0.4 remat": Program("llama3-8b", (4, 8), "dgx-h100", budget=0.4, remat="auto"),
        "gpt-2.6b-scan stages": Program("gpt-2.6b-scan", (), hosts=2, stages="search"),
    }
)
