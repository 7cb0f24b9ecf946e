"""Why a device does more than its share: FLOPs per device times devices over those of the single-device program.

    compiled ratio  =  ratio of the plan + what the compiler adds + what its fused loops compute again       -> reasons
                       plans/imbalance.py  both without fusion      fusion at work less fusion switched off

A case fails if an even cut exists and yet much more than an even share is done: padding, extents that do not divide,
and fusion are excused; the plan's choices and what the compiler adds are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar import jax_compat
from autopar.codegen import emit as codegen
from autopar.codegen.rewrites import apply_rewrites
from autopar.cost_models.compiler.backends import CPU
from autopar.ir.trace import trace
from autopar.plans import imbalance
from autopar.plans.plan import Plan
from autopar.rules import rules_of

FLAG = 1.25  # ratio above which there must be reasons


@dataclass(frozen=True)
class Reasons:
    """A line for each reason, and one for each that is no excuse."""

    lines: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()


def explain(step: Callable[..., Any], args: Sequence[Any], plan: Plan, ratio: float) -> Reasons:
    """Reasons for the compiled ratio of a step under a plan on the local devices."""
    traced = apply_rewrites(trace(step, *args), plan)
    rules = rules_of(traced.graph)
    devices = math.prod(plan.mesh_sizes)
    mesh = jax_compat.auto_mesh(np.array(jax.devices()[:devices]).reshape(plan.mesh_sizes), plan.mesh_names)
    each = _unfused(codegen.program(traced.graph, plan, rules, mesh).jit(), traced.in_avals)
    account = imbalance.measure(traced.graph, rules, plan.stages[0], CPU)
    return reasons(account, ratio, each * devices / _unfused(jax.jit(step), args))


def _unfused(function: Any, args: Sequence[Any]) -> float:
    """FLOPs per device when no loop computes again what another one has computed."""
    compiled = function.lower(*args).compile(compiler_options={"xla_disable_hlo_passes": "fusion"})
    return float((compiled.cost_analysis() or {})["flops"])


def reasons(account: imbalance.Imbalance, ratio: float, unfused: float) -> Reasons:
    """Reasons for a ratio: those of the plan, then the compiler's.

    Args:
        account: what the plan says.
        ratio: of the program as it is compiled.
        unfused: of the program compiled without fusion.
    """
    compiler = {"computed again in fused loops": ratio - unfused, "added by the compiler": unfused - account.ratio}
    lines = [f"{what}: +{more:.2f}" for what, more in compiler.items() if more >= imbalance.MIN_SHOWN]
    avoidable = 1.0 + account.avoidable + max(unfused - account.ratio, 0.0)
    failure = f"{avoidable:.2f} of an even share of the FLOPs although an even cut exists"
    return Reasons((*account.lines(), *lines), (failure,) if avoidable > FLAG else ())
