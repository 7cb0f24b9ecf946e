"""The options of `parallelize`, `plan` and `check`, checked where they are given.

    accepted type   a key of `Options`, from which editors complete keyword arguments (PEP 692)
    default         a field of `Settings`, whose types are those of checked values
    description     the docstring of `autopar.api.parallelize`
    constraint      a row of `_CHECKS`: what a value must be, in words and as a predicate

`with_options` joins types and defaults in the signature that `inspect.signature` returns.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, TypedDict, TypeVar, get_args, get_type_hints

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autopar.errors import ArgumentError, PinError, ScheduleError
from autopar.hardware import meshes
from autopar.hardware.cluster import Cluster
from autopar.hardware.figures import is_rate
from autopar.passes.op_groups.constraints import Pins
from autopar.passes.remat import choose_offload, memory_policy
from autopar.passes.remat.choose import CHOICES
from autopar.passes.remat.memory_policy import Budget, MemoryShare
from autopar.passes.solver.optimize import SOLVERS
from autopar.plans.plan import Plan
from autopar.schedules import SCHEDULES

#: Schedules that the runtime can walk; "none" is a step without stages.
RUNNABLE: tuple[str, ...] = ("none", *(name for name, row in SCHEDULES.items() if row.executable))

MOST_BYTES = 2.0**53  # of a memory budget, 9 PB: a larger one, infinity among them, bounds no plan either

F = TypeVar("F", bound=Callable[..., Any])


class Options(TypedDict, total=False):
    """Options that `autopar.parallelize`, `autopar.plan` and `autopar.check` take."""

    cluster: Cluster | str | None
    mesh: Mesh | AbstractMesh | list[int] | tuple[int, ...] | Mapping[str, int] | None
    batch_argnums: int | list[int] | tuple[int, ...] | Literal["auto"]
    donate_argnums: int | list[int] | tuple[int, ...] | Literal["auto"]
    static_argnums: int | list[int] | tuple[int, ...]
    static_argnames: str | list[str] | tuple[str, ...]
    memory_budget: float | str | None
    pins: Mapping[str, PartitionSpec | NamedSharding] | None
    solver: Literal["auto", "cbc", "highs"]
    time_limit: float | None
    gap: float
    progress: bool | None
    debug_nans: bool | None
    remat: Literal["auto", "none", "dots", "full"]
    offload: Literal["auto", "none", "all"]
    num_microbatches: int | Literal["auto"]
    stages: int | Literal["auto", "search"]
    schedule: Literal["auto", "none", "inference", "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "zb-h1"]
    per_microbatch: str | list[str] | tuple[str, ...]
    plan: Plan | str | os.PathLike[str] | None


@dataclass(frozen=True)
class Settings:
    """Every option of `parallelize`, checked; defaults are those of `parallelize`."""

    cluster: Cluster | None = None
    mesh: Any = None
    batch_argnums: tuple[int, ...] | str = "auto"
    donate_argnums: tuple[int, ...] | str = "auto"
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    memory_budget: Budget = None
    pins: Pins | None = None
    solver: str = "auto"
    time_limit: float | None = None
    gap: float = memory_policy.GAP
    plan: Plan | None = None
    progress: bool | None = None
    debug_nans: bool | None = None
    remat: str = "auto"
    offload: str = "auto"
    num_microbatches: int | str = "auto"
    stages: int | str = "auto"
    schedule: str = "auto"
    per_microbatch: tuple[str, ...] = ()

    @property
    def mesh_axes(self) -> Mapping[str, int]:
        """Axis name -> size of the mesh of the plan, or to plan for; empty: not known before the search."""
        return self.plan.mesh if self.plan is not None and self.mesh is None else meshes.named_axes(self.mesh)

    @property
    def pipelined(self) -> bool:
        """Several stages are asked for, by their number."""
        return isinstance(self.stages, int) and self.stages > 1


def with_options(fn: F) -> F:
    """The function, with every option, its type and its default in its signature in place of `**options`."""
    signature = inspect.signature(fn, eval_str=True)
    *own, options = signature.parameters.values()
    types = get_type_hints(get_args(options.annotation)[0])
    stated = (
        options.replace(name=f.name, kind=inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=types[f.name])
        for f in fields(Settings)
        if f.name in types
    )
    vars(fn)["__signature__"] = signature.replace(parameters=(*own, *stated))
    return fn


def _is_amount(value: Any) -> bool:
    """A number above zero, infinity among them."""
    return is_rate(value) or (isinstance(value, float) and value == math.inf)


def _is_share(value: Any) -> bool:
    return value == 0 or (is_rate(value) and value <= 1)


def _is_one_of(*choices: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in choices


def _is_count(value: Any) -> bool:
    return _is_one_of("auto")(value) or (isinstance(value, int) and not isinstance(value, bool) and value > 0)


#: option -> (what it must be, the test of it, the error when it is not)
_CHECKS: Mapping[str, tuple[str, Callable[[Any], bool], type[ArgumentError | PinError | ScheduleError]]] = {
    "cluster": (
        "a Cluster, such as Cluster.local(), or the name of one, such as 'dgx-h100'",
        lambda value: value is None or isinstance(value, Cluster),
        ArgumentError,
    ),
    "pins": (
        "a dict from path globs, roles, source lines, 'arg:i' or 'out:i' to PartitionSpecs",
        lambda value: value is None or (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)),
        PinError,
    ),
    "solver": (" or ".join(map(repr, SOLVERS)), _is_one_of(*SOLVERS), ArgumentError),
    "time_limit": ("a number of seconds above zero", lambda value: value is None or _is_amount(value), ArgumentError),
    "gap": ("a relative gap from 0 to 1, such as 0.005", _is_share, ArgumentError),
    "remat": (" or ".join(map(repr, CHOICES)), _is_one_of(*CHOICES), ArgumentError),
    "offload": (" or ".join(map(repr, choose_offload.CHOICES)), _is_one_of(*choose_offload.CHOICES), ArgumentError),
    "num_microbatches": ("'auto' or a number of microbatches", _is_count, ArgumentError),
    "stages": (
        "'auto', 'search' or a number of stages",
        lambda value: _is_one_of("search")(value) or _is_count(value),
        ArgumentError,
    ),
    "schedule": (
        f"'auto' or {' or '.join(map(repr, RUNNABLE))}",
        _is_one_of("auto", *RUNNABLE),
        ScheduleError,
    ),
    **dict.fromkeys(
        ("progress", "debug_nans"),
        ("True, False or None", lambda value: value is None or isinstance(value, bool), ArgumentError),
    ),
    "plan": ("a Plan or the path of one", lambda value: value is None or isinstance(value, Plan), ArgumentError),
}


def settings(options: Mapping[str, Any]) -> Settings:
    """Options of the public functions, checked.

    Raises:
        ArgumentError: naming the option, its value and what is available.
        ClusterError, MeshError: a cluster that is named, and the mesh for which its hosts are counted.
        PinError: pins that are no mapping.
        PlanMismatchError: `plan` is the path of something else.
    """
    fields = Settings.__dataclass_fields__
    for name in options:
        if name not in fields:
            raise ArgumentError(f"option '{name}' is not known. Available: {', '.join(sorted(fields))}")
    options = {name: _plain(value) for name, value in options.items()}
    if isinstance(named := options.get("cluster"), str):
        options = {**options, "cluster": Cluster.named(named, devices=meshes.num_devices(options.get("mesh")))}
    checked = Settings(**{name: _checked(name, value) for name, value in options.items()})
    _check_stages(checked)
    if checked.plan is not None:
        _check_agrees(checked, checked.plan)
    return checked


def for_function(s: Settings, fn: Callable[..., Any]) -> Settings:
    """The settings, with the static parameters of a function by position and by name, as its signature joins them.

    Raises:
        ArgumentError: a position is outside of the signature, or the function has no parameter of a name.
    """
    if not s.static_argnums and not s.static_argnames:
        return s
    try:
        parameters = tuple(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # a function of C without a signature
        _check_not_negative(s.static_argnums)
        return s
    _check_static_names(name_of(fn), s.static_argnames, parameters)
    ordered = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    given = _static_positions(name_of(fn), s.static_argnums, None if any_number else len(ordered))
    positions = (*given, *(i for i, p in enumerate(ordered) if p.name in s.static_argnames))
    named = (p.name for i, p in enumerate(ordered) if i in given and p.kind is p.POSITIONAL_OR_KEYWORD)
    names = (*s.static_argnames, *named)
    return replace(s, static_argnums=tuple(dict.fromkeys(positions)), static_argnames=tuple(dict.fromkeys(names)))


def _static_positions(name: str, positions: Sequence[int], count: int | None) -> tuple[int, ...]:
    """Positions from 0; negative ones count from the last of `count` parameters. `count`: None with `*args`."""
    if count is None:
        _check_not_negative(positions)
        return tuple(positions)
    outside = next((n for n in positions if not -count <= n < count), None)
    if outside is not None:
        raise ArgumentError(f"static_argnums={positions}: {name} has {count} positional parameters, and none {outside}")
    return tuple(n % count for n in positions)


def _check_not_negative(positions: Sequence[int]) -> None:
    if any(n < 0 for n in positions):
        raise ArgumentError(
            f"static_argnums={positions} counts from the last parameter, and the function has no fixed number of them; "
            "give positions of 0 or more"
        )


def _check_static_names(name: str, names: Sequence[str], parameters: Sequence[inspect.Parameter]) -> None:
    """ArgumentError for a name that no parameter has, unless the function takes any keyword."""
    nameable = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [n for n in names if n not in nameable]
    if unknown and all(p.kind is not p.VAR_KEYWORD for p in parameters):
        raise ArgumentError(
            f"static_argnames={tuple(names)}: {name} has no parameter '{unknown[0]}'; it has {', '.join(nameable)}"
        )


def name_of(fn: Callable[..., Any]) -> str:
    """The function's name, for messages."""
    return getattr(fn, "__name__", type(fn).__name__)


def written(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...], Settings | None]:
    """The function behind a parallelized one or a parallelized method, all of its arguments, and its options.

    Any other function is as it was written, whatever it wraps, and has no options.
    """
    outer: Any = getattr(fn, "__func__", fn)
    chosen = getattr(outer, "settings", None)
    if not isinstance(chosen, Settings):
        return fn, tuple(args), None
    owner = () if outer is fn else (getattr(fn, "owner", None),)
    return outer.__wrapped__, (*owner, *args), chosen


def _check_stages(s: Settings) -> None:
    """Options that fit each other."""
    if s.stages == 1:
        check_one_stage(s)
    if s.pipelined and s.schedule == "none":
        choices = ", ".join(map(repr, RUNNABLE[1:]))
        raise ScheduleError(f"schedule='none' is for one stage, and stages={s.stages}; use 'auto' or {choices}")


def _check_agrees(s: Settings, plan: Plan) -> None:
    """ArgumentError for an option of planning that is not what a given plan has."""
    has: Mapping[str, Any] = {
        **dict.fromkeys(("pins", "memory_budget", "remat", "offload")),  # a plan may be as they want it by chance alone
        "num_microbatches": plan.num_microbatches,
        "stages": len(plan.stages),
        "schedule": plan.schedule,
        "per_microbatch": plan.per_microbatch,
    }
    for name, value in has.items():
        asked = getattr(s, name)
        if asked and asked not in (getattr(Settings, name, None), value):
            of_plan = "" if value is None else f", which has {value!r}"
            raise ArgumentError(
                f"{name}={asked!r:.60} does not go with plan={of_plan}: a plan is run as it is. Leave {name} out, or "
                "leave plan out to plan with it."
            )


def check_one_stage(s: Settings, excluded: str | None = None) -> None:
    """ArgumentError for a schedule of several stages, where there is one; `excluded`: what excludes a search."""
    if s.schedule not in ("auto", "none"):
        none = f", and stages are not searched with {excluded}" if s.stages == "search" and excluded else ""
        raise ArgumentError(
            f"schedule={s.schedule!r} orders the stages of a pipeline{none}; give stages=2 or more with it"
        )


def _checked(name: str, value: Any) -> Any:
    value = _CONVERSIONS[name](value) if name in _CONVERSIONS else value
    if name in _CHECKS:
        wanted, holds, error = _CHECKS[name]
        if not holds(value):
            raise error(f"{name}={value!r:.60} must be {wanted}")
    return value


_UNITS: Mapping[str, float] = {
    "": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def budget(value: Any) -> Budget:
    """Bytes per device of a `memory_budget`, "min", or a share of the device's memory. ArgumentError for others."""
    if _is_one_of("min")(value):
        return "min"
    if _is_amount(value):
        return min(float(value), MOST_BYTES)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*", value) if isinstance(value, str) else None
    number, unit = (float(match[1]), match[2].lower()) if match is not None else (0.0, "")
    if unit == "%" and 0 < number <= 100:
        return MemoryShare(number / 100)
    if number == 0 or unit not in _UNITS:
        raise ArgumentError(
            f"memory_budget={value!r:.60} must be bytes per device, a text such as '12GiB' or '500MB', '80%' of a "
            "device's memory, or 'min'"
        )
    return min(number * _UNITS[unit], MOST_BYTES)


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    """Globs as a tuple; one alone may be given as it is."""
    patterns: tuple[Any, ...] = (value,) if isinstance(value, str) else tuple(value) if _is_sequence(value) else (None,)
    if any(not isinstance(pattern, str) or not pattern for pattern in patterns):
        raise ArgumentError(
            f"{name}={value!r:.60} must be globs of source lines, such as 'model.py:30', of scopes or of operations"
        )
    return patterns


def _names(value: Any) -> tuple[str, ...]:
    """Names of parameters as a tuple; one alone may be given as it is."""
    names: tuple[Any, ...] = tuple(value) if _is_sequence(value) else (value,)
    if any(not isinstance(name, str) or not name for name in names):
        raise ArgumentError(f"static_argnames={value!r:.60} must be names of parameters")
    return tuple(dict.fromkeys(names))


def _plain(value: Any) -> Any:
    """NumPy's scalars as Python's, which plans and keys are written with; those of a tuple, list or dict as well."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return {key: _plain(x) for key, x in value.items()} if type(value) is dict else value


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _positions(name: str, value: Any) -> tuple[int, ...] | str:
    """Positions of arguments as a tuple; "auto" where the option knows it."""
    if isinstance(value, str) and value == "auto" and name != "static_argnums":
        return value
    numbers: tuple[Any, ...] = tuple(value) if isinstance(value, list | tuple) else (value,)
    least = "" if name == "static_argnums" else ", 0 or more"
    if any(not isinstance(n, int) or isinstance(n, bool) or (least and n < 0) for n in numbers):
        raise ArgumentError(f"{name}={value!r:.60} must be positions of positional arguments{least}")
    return tuple(dict.fromkeys(numbers))


#: option -> what makes its value that of a field of `Settings`, where users may write it in several ways
_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    **{name: partial(_positions, name) for name in ("batch_argnums", "donate_argnums", "static_argnums")},
    "static_argnames": _names,
    "per_microbatch": partial(_patterns, "per_microbatch"),
    "memory_budget": lambda value: None if value is None else budget(value),
    "schedule": lambda value: value.lower() if isinstance(value, str) else value,
    "plan": lambda value: Plan.load(value) if isinstance(value, str | os.PathLike) else value,
}
