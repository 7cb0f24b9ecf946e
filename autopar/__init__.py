"""autopar: an auto-parallelizing compiler for JAX.

    @autopar.parallelize
    def train_step(state, batch): ...

The names below are loaded on first use, so that importing autopar costs little and never initialises a backend.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autopar.version import VERSION

__version__ = VERSION
"""Version of autopar, which plans and cached plans record."""

#: public name -> module that defines it
_HOMES = {
    "parallelize": "autopar.api",
    "plan": "autopar.api",
    "gather": "autopar.api",
    "check": "autopar.api",
    "restore_checkpoint": "autopar.api",
    "save_checkpoint": "autopar.api",
    "prefetch": "autopar.compile.batches",
    "Check": "autopar.verification.checking",
    "verify": "autopar.verification.verify",
    "Report": "autopar.verification.verify",
    "Cluster": "autopar.hardware.cluster",
    "Plan": "autopar.plans.plan",
    "Profile": "autopar.verification.profile.comparison",
    "Stage": "autopar.plans.record",
    "register_rule": "autopar.rules.registry",
    "AutoparError": "autopar.errors",
    "AutoparWarning": "autopar.errors",
    "ArgumentError": "autopar.errors",
    "MeshError": "autopar.errors",
    "ClusterError": "autopar.errors",
    "PinError": "autopar.errors",
    "TraceError": "autopar.errors",
    "RuleError": "autopar.errors",
    "SolverError": "autopar.errors",
    "MemoryBudgetError": "autopar.errors",
    "MicrobatchError": "autopar.errors",
    "NanError": "autopar.errors",
    "PlanMismatchError": "autopar.errors",
    "ScheduleError": "autopar.errors",
    "StageError": "autopar.errors",
    "ProcessError": "autopar.errors",
    "CheckpointError": "autopar.errors",
    "DonatedError": "autopar.errors",
    "DifferenceError": "autopar.errors",
}

#: public modules
_MODULES = ("pins",)

__all__ = [
    "AutoparError",
    "AutoparWarning",
    "Check",
    "Cluster",
    "Plan",
    "Profile",
    "Report",
    "Stage",
    "__version__",
    "check",
    "gather",
    "parallelize",
    "pins",
    "plan",
    "prefetch",
    "register_rule",
    "restore_checkpoint",
    "save_checkpoint",
    "verify",
]

if TYPE_CHECKING:
    from autopar import pins
    from autopar.api import check, gather, parallelize, plan, restore_checkpoint, save_checkpoint
    from autopar.compile.batches import prefetch
    from autopar.errors import (
        ArgumentError as ArgumentError,
    )
    from autopar.errors import (
        AutoparError,
        AutoparWarning,
    )
    from autopar.errors import CheckpointError as CheckpointError
    from autopar.errors import ClusterError as ClusterError
    from autopar.errors import DifferenceError as DifferenceError
    from autopar.errors import DonatedError as DonatedError
    from autopar.errors import MemoryBudgetError as MemoryBudgetError
    from autopar.errors import MeshError as MeshError
    from autopar.errors import MicrobatchError as MicrobatchError
    from autopar.errors import NanError as NanError
    from autopar.errors import PinError as PinError
    from autopar.errors import PlanMismatchError as PlanMismatchError
    from autopar.errors import ProcessError as ProcessError
    from autopar.errors import RuleError as RuleError
    from autopar.errors import ScheduleError as ScheduleError
    from autopar.errors import SolverError as SolverError
    from autopar.errors import StageError as StageError
    from autopar.errors import TraceError as TraceError
    from autopar.hardware.cluster import Cluster
    from autopar.plans.plan import Plan
    from autopar.plans.record import Stage
    from autopar.rules.registry import register_rule
    from autopar.verification.checking import Check
    from autopar.verification.profile.comparison import Profile
    from autopar.verification.verify import Report, verify


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"autopar.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_HOMES})
