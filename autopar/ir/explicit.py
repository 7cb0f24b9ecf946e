"""Shardings in types, read as pins: functions traced under a mesh whose axes are Explicit.

Under an Explicit mesh JAX carries a sharding in the type of every value, and the user moves values with
`jax.sharding.reshard` or `out_sharding=`. autopar plans with Auto axes. Shardings that the user requested are kept, the
others are dropped:

    argument on an Explicit mesh, sharded in some dimension    a pin of that argument                  -> pin
    reshard(x, P), f(..., out_sharding=P)                      a sharding constraint                   -> to_auto_axes
    any other type                                             dropped, the planner chooses            -> to_auto_axes

A replicated type is no pin: every array created without a sharding has it. Nor is a sharding that JAX's own
transposition adds: each product of the backward pass has an `out_sharding`, and each reshard there returns to the type
of the forward value, which is kept only if it is sharded. Rematerialised operations count as forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import NamedSharding, PartitionSpec

from autopar import jax_compat

#: Parameters that give the sharding of a result; None: JAX derives it.
RESULT_SHARDINGS = ("out_sharding", "sharding")
#: Operations whose result sharding JAX itself derives from types (broadcasts to the shape of the other operand), and
#: the operation that is a sharding constraint already.
DERIVED_SHARDINGS = ("broadcast_in_dim", "iota", "sharding_constraint")


def sharding_of(leaf: Any) -> NamedSharding | None:
    """The sharding of an argument on an Explicit mesh; the mesh is concrete if the argument is on devices."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not jax_compat.is_explicit(sharding.mesh):
        return None
    return sharding


def pin(sharding: NamedSharding | None, rank: int) -> PartitionSpec | None:
    """The pin that an argument's sharding implies, one entry per dimension; None if it is replicated."""
    if sharding is None or not _is_sharded(sharding.spec):
        return None
    return PartitionSpec(*sharding.spec, *[None] * (rank - len(sharding.spec)))


def _is_sharded(spec: PartitionSpec) -> bool:
    return any(spec) or bool(_unreduced_axes(spec))


def _unreduced_axes(spec: PartitionSpec) -> Any:
    return getattr(spec, "unreduced", None)


def to_auto_axes(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same program without shardings in types; shardings that the user requested are sharding constraints."""
    return _convert_closed(jaxpr, False)


def _convert_closed(jaxpr: jex.ClosedJaxpr, transposed: bool) -> jex.ClosedJaxpr:
    return jex.ClosedJaxpr(_convert_jaxpr(jaxpr.jaxpr, transposed), [_constant(c) for c in jaxpr.consts])


def _constant(value: Any) -> Any:
    """An array that the function closed over, on Auto axes; its shards stay on their devices."""
    sharding = sharding_of(value) if isinstance(value, jax.Array) else None
    return value if sharding is None else jax.device_put(value, jax_compat.on_auto_mesh(sharding))


def _convert_jaxpr(jaxpr: jex.Jaxpr, transposed: bool) -> jex.Jaxpr:
    env: dict[Any, Any] = {}
    constvars, invars = _new_variables(jaxpr.constvars, env), _new_variables(jaxpr.invars, env)
    equations = [new for e in jaxpr.eqns for new in _convert_equation(e, env, _is_transposed(e, transposed))]
    outvars = [_read(v, env) for v in jaxpr.outvars]
    return jaxpr.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=equations)


def _new_variables(variables: Sequence[Any], env: dict[Any, Any]) -> list[Any]:
    variables_without_shardings = [type(v)(jax_compat.without_sharding(v.aval)) for v in variables]
    env.update(zip(variables, variables_without_shardings, strict=True))
    return variables_without_shardings


def _read(atom: Any, env: Mapping[Any, Any]) -> Any:
    if isinstance(atom, jex.Literal):
        return jex.Literal(atom.val, jax_compat.without_sharding(atom.aval))
    return env[atom]


def _is_transposed(equation: jex.JaxprEqn, enclosing: bool) -> bool:
    """True for operations that JAX wrote by transposition; stacks of nested programs begin at the program
    `enclosing`.
    """
    stack = str(equation.source_info.name_stack)
    return (enclosing or "transpose(" in stack) and not jax_compat.is_rematted(stack)


def _convert_equation(equation: jex.JaxprEqn, env: dict[Any, Any], transposed: bool) -> list[jex.JaxprEqn]:
    """An equation without shardings, followed by the constraint that it requests."""
    operands = [_read(v, env) for v in equation.invars]
    requested = _requested_sharding(equation, transposed)
    if equation.primitive.name == "reshard":
        if requested is None:
            env[equation.outvars[0]] = operands[0]
            return []
        return [
            jax_compat.constraint_equation(equation, operands[0], _new_variables(equation.outvars, env)[0], requested)
        ]
    results = _new_variables(equation.outvars, env)
    new = equation.replace(
        invars=operands,
        outvars=results,
        params=_convert_parameters(equation, transposed),
        ctx=jax_compat.automatic_context(equation.ctx),
    )
    if requested is None:
        return [new]
    constrained = _new_variables(equation.outvars[:1], env)
    return [new, jax_compat.constraint_equation(equation, results[0], constrained[0], requested)]


def _requested_sharding(equation: jex.JaxprEqn, transposed: bool) -> NamedSharding | None:
    """The sharding that the user requested for the result, if the result is an array over Explicit axes."""
    name, params = equation.primitive.name, equation.params
    names = ("dst_sharding",) if name == "reshard" else () if name in DERIVED_SHARDINGS else RESULT_SHARDINGS
    sharding = next((s for s in map(params.get, names) if isinstance(s, NamedSharding)), None)
    if sharding is None or not jax_compat.is_explicit(sharding.mesh) or not jax_compat.shape_of(equation.outvars[0]):
        return None
    derived = transposed and (name != "reshard" or not _is_sharded(sharding.spec))
    return None if derived else sharding


def _convert_parameters(equation: jex.JaxprEqn, transposed: bool) -> dict[str, Any]:
    constraint = equation.primitive.name == "sharding_constraint"
    return {k: _convert_parameter("" if constraint else k, v, transposed) for k, v in equation.params.items()}


def _convert_parameter(name: str, value: Any, transposed: bool) -> Any:
    """A parameter without Explicit axes: no sharding of the result, Auto axes elsewhere, nested programs converted."""
    if name in RESULT_SHARDINGS and isinstance(value, NamedSharding) and jax_compat.is_explicit(value.mesh):
        return None
    if type(value) is tuple:
        return tuple(_convert_parameter("", v, transposed) for v in value)
    for jaxpr_type, convert in _CONVERTERS:
        if isinstance(value, jaxpr_type):
            return convert(value, transposed)
    return jax_compat.on_auto_mesh(value)


#: Types of nested programs. If both are one type, as on JAX 0.12, the first row applies.
_CONVERTERS: tuple[tuple[type, Callable[[Any, bool], Any]], ...] = (
    (jex.ClosedJaxpr, _convert_closed),
    (jex.Jaxpr, _convert_jaxpr),
)
