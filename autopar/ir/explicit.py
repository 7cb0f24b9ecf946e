"""Shardings in types, read as pins: functions traced under a mesh whose axes are Explicit.

Under an Explicit mesh JAX carries a sharding in the type of every value, and the user moves values with
`jax.sharding.reshard` or `out_sharding=`. autopar plans with Auto axes. What the user asked for is kept, the rest goes:

    argument on an Explicit mesh, cut in some dimension     a pin of that argument                  -> pin
    reshard(x, P), f(..., out_sharding=P)                   a sharding constraint                   -> plain
    any other type                                          dropped, the planner chooses            -> plain

A type that cuts nothing is no pin: every array made without a thought of shardings has it. Nor is what JAX's own
transposition writes: each product of the backward pass has an `out_sharding`, and each reshard there goes back to the
type of the forward value, which is kept only where it cuts something. Rematerialised operations count as forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import NamedSharding, PartitionSpec

from autopar import jax_compat

#: Parameters that hold the sharding of a result; None says that JAX is to find it.
RESULT_SHARDINGS = ("out_sharding", "sharding")
#: Operations whose result sharding JAX itself derives from types (broadcasts to the shape of the other operand), and
#: the one that is a constraint already.
NOT_ASKED = ("broadcast_in_dim", "iota", "sharding_constraint")


def sharding_of(leaf: Any) -> NamedSharding | None:
    """The sharding of an argument that lies on an Explicit mesh, the mesh with its devices where it has some."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not jax_compat.is_explicit(sharding.mesh):
        return None
    return sharding


def pin(sharding: NamedSharding | None, rank: int) -> PartitionSpec | None:
    """The pin that an argument's sharding is, one entry per dimension; None if it cuts nothing."""
    if sharding is None or not _cuts(sharding.spec):
        return None
    return PartitionSpec(*sharding.spec, *[None] * (rank - len(sharding.spec)))


def _cuts(spec: PartitionSpec) -> bool:
    return any(spec) or bool(_sums(spec))


def _sums(spec: PartitionSpec) -> Any:
    return getattr(spec, "unreduced", None)


def plain(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same program without shardings in types; what the user asked for in it is a sharding constraint."""
    return _closed(jaxpr, False)


def _closed(jaxpr: jex.ClosedJaxpr, transposed: bool) -> jex.ClosedJaxpr:
    return jex.ClosedJaxpr(_open(jaxpr.jaxpr, transposed), [_constant(c) for c in jaxpr.consts])


def _constant(value: Any) -> Any:
    """An array that the function closed over, on Auto axes; its pieces stay where they are."""
    sharding = sharding_of(value) if isinstance(value, jax.Array) else None
    return value if sharding is None else jax.device_put(value, jax_compat.on_auto_mesh(sharding))


def _open(jaxpr: jex.Jaxpr, transposed: bool) -> jex.Jaxpr:
    env: dict[Any, Any] = {}
    constvars, invars = _defined(jaxpr.constvars, env), _defined(jaxpr.invars, env)
    equations = [new for e in jaxpr.eqns for new in _equations(e, env, _transposed(e, transposed))]
    outvars = [_read(v, env) for v in jaxpr.outvars]
    return jaxpr.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=equations)


def _defined(variables: Sequence[Any], env: dict[Any, Any]) -> list[Any]:
    fresh = [type(v)(jax_compat.without_sharding(v.aval)) for v in variables]
    env.update(zip(variables, fresh, strict=True))
    return fresh


def _read(atom: Any, env: Mapping[Any, Any]) -> Any:
    if isinstance(atom, jex.Literal):
        return jex.Literal(atom.val, jax_compat.without_sharding(atom.aval))
    return env[atom]


def _transposed(equation: jex.JaxprEqn, around: bool) -> bool:
    """True for what JAX wrote by transposition; stacks of nested programs begin at the program `around`."""
    stack = str(equation.source_info.name_stack)
    return (around or "transpose(" in stack) and not jax_compat.is_rematted(stack)


def _equations(equation: jex.JaxprEqn, env: dict[Any, Any], transposed: bool) -> list[jex.JaxprEqn]:
    """An equation without shardings, followed by the constraint that it asks for."""
    operands = [_read(v, env) for v in equation.invars]
    asked = _asked(equation, transposed)
    if equation.primitive.name == "reshard":
        if asked is None:
            env[equation.outvars[0]] = operands[0]
            return []
        return [jax_compat.constraint_equation(equation, operands[0], _defined(equation.outvars, env)[0], asked)]
    results = _defined(equation.outvars, env)
    new = equation.replace(
        invars=operands,
        outvars=results,
        params=_parameters(equation, transposed),
        ctx=jax_compat.automatic_context(equation.ctx),
    )
    if asked is None:
        return [new]
    settled = _defined(equation.outvars[:1], env)
    return [new, jax_compat.constraint_equation(equation, results[0], settled[0], asked)]


def _asked(equation: jex.JaxprEqn, transposed: bool) -> NamedSharding | None:
    """The sharding that the user asked for the result, if it is one of an array over Explicit axes."""
    name, params = equation.primitive.name, equation.params
    names = ("dst_sharding",) if name == "reshard" else () if name in NOT_ASKED else RESULT_SHARDINGS
    found = next((s for s in map(params.get, names) if isinstance(s, NamedSharding)), None)
    if found is None or not jax_compat.is_explicit(found.mesh) or not jax_compat.shape_of(equation.outvars[0]):
        return None
    derived = transposed and (name != "reshard" or not _cuts(found.spec))
    return None if derived else found


def _parameters(equation: jex.JaxprEqn, transposed: bool) -> dict[str, Any]:
    constraint = equation.primitive.name == "sharding_constraint"
    return {k: _parameter("" if constraint else k, v, transposed) for k, v in equation.params.items()}


def _parameter(name: str, value: Any, transposed: bool) -> Any:
    """A parameter without Explicit axes: no sharding of the result, Auto axes elsewhere, nested programs likewise."""
    if name in RESULT_SHARDINGS and isinstance(value, NamedSharding) and jax_compat.is_explicit(value.mesh):
        return None
    if type(value) is tuple:
        return tuple(_parameter("", v, transposed) for v in value)
    for kind, convert in _CONVERTED:
        if isinstance(value, kind):
            return convert(value, transposed)
    return jax_compat.on_auto_mesh(value)


#: What nested programs are made of. Where both are one type, as on JAX 0.12, the first row serves.
_CONVERTED: tuple[tuple[type, Callable[[Any, bool], Any]], ...] = ((jex.ClosedJaxpr, _closed), (jex.Jaxpr, _open))
