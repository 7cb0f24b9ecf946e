"""autopar: an auto-parallelizing compiler for JAX.

    @autopar.parallelize
    def train_step(state, batch): ...

The names below are loaded on first use, so that importing autopar costs little and never initialises a backend.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

#: public name -> module that defines it
_HOMES = {
    "parallelize": "autopar.api",
    "plan": "autopar.api",
    "gather": "autopar.api",
    "verify": "autopar.verification",
    "Report": "autopar.verification",
    "Cluster": "autopar.cluster",
    "Plan": "autopar.plans",
    "Stage": "autopar.plans",
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
    "PlanMismatchError": "autopar.errors",
    "DonatedError": "autopar.errors",
}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from autopar.api import gather as gather
    from autopar.api import parallelize as parallelize
    from autopar.api import plan as plan
    from autopar.cluster import Cluster as Cluster
    from autopar.plans import Plan as Plan
    from autopar.plans import Stage as Stage
    from autopar.rules.registry import register_rule as register_rule
    from autopar.verification import Report as Report
    from autopar.verification import verify as verify


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
