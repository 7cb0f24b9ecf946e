"""Equal programs without what XLA removes, or has another name for.

    dead code       equations that no result needs (JAX's own elimination, which keeps kernels; these too), and carries
                    of a `while` that only the loop itself reads
    cond            with a constant index: a call of the branch that it takes
    linear solve    a call of the solver; its other functions are for differentiation
    psum, pmax      over an axis of `jax.vmap`: a reduction over its dimension
    megablox        JAX's kernels for products over groups of rows: a ragged product without its tables
                    -> `autopar.jax_compat.megablox`

A carry of a `while` is live if

    its result is read behind the loop, or the condition reads it, or the next value of a live carry depends on it

which is a least fixed point, found by adding carries until none is missing. XLA removes the same branches and carries
(`ConditionalSimplifier`, `WhileLoopSimplifier`), so that a plan which priced them would not be the plan that runs.
"""

from __future__ import annotations

from itertools import compress
from typing import Any

import jax.extend.core as jex
from jax.extend.core.primitives import closed_call_p

from autopar import jax_compat
from autopar.ir.op_sets import KERNEL_CALLS
from autopar.jax_compat import megablox


def simplified(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """An equal program that is simpler; arguments are all kept.

    Loops with side effects keep their carries.
    """
    while True:
        jaxpr = jax_compat.eliminate_dead_code(jaxpr)
        smaller = _smaller(jaxpr.jaxpr)
        if smaller is None:
            return jaxpr
        jaxpr = jex.ClosedJaxpr(smaller, jaxpr.consts)


def _smaller(jaxpr: Any) -> Any | None:
    """A jaxpr without what the module's docstring lists, at any depth; None if it has none of it."""
    read = {id(v) for v in (*jaxpr.outvars, *(v for e in jaxpr.eqns for v in e.invars))}
    alive = [e for e in jaxpr.eqns if not _is_dead_kernel(e, read)]
    producers = {v: e for e in alive for v in e.outvars}
    smaller = (megablox.as_product(e, producers) or _smaller_equation(e, read) for e in alive)
    changed = {i: e for i, e in enumerate(smaller) if e is not None}
    if not changed and len(alive) == len(jaxpr.eqns):
        return None
    return jaxpr.replace(eqns=[changed.get(i, e) for i, e in enumerate(alive)])


def _is_dead_kernel(equation: jex.JaxprEqn, read: set[int]) -> bool:
    """Whether it is a kernel whose results nothing reads."""
    is_kernel = equation.primitive.name in KERNEL_CALLS and not equation.effects
    return is_kernel and not any(id(v) in read for v in equation.outvars)


def _smaller_equation(equation: jex.JaxprEqn, read: set[int]) -> jex.JaxprEqn | None:
    """An equation without dead carries and functions, in its bodies too; None if it has none, or is a kernel's.

    `read` holds the identities of the variables that are read.
    """
    if equation.primitive.name in KERNEL_CALLS:
        return None
    if equation.primitive.name == "cond" and isinstance(index := equation.invars[0], jex.Literal):
        return _taken_branch(equation, int(index.val))
    if equation.primitive.name == "custom_linear_solve":
        return _solve_alone(equation)
    if (reduction := jax_compat.reduced_over_dimensions(equation)) is not None:
        return reduction
    params = {name: _smaller_param(value) for name, value in equation.params.items()}
    changed = {name: value for name, value in params.items() if value is not None}
    if changed:
        equation = equation.replace(params={**equation.params, **changed})
    loop = equation.primitive.name == "while" and not equation.effects
    smaller = _live_loop(equation, [id(v) in read for v in equation.outvars]) if loop else None
    return smaller or (equation if changed else None)


def _smaller_param(value: Any) -> Any | None:
    """A parameter of an equation with its jaxprs made smaller; None if none is."""
    if isinstance(value, jex.ClosedJaxpr):
        inner = _smaller(value.jaxpr)
        return None if inner is None else jex.ClosedJaxpr(inner, value.consts)
    if isinstance(value, jex.Jaxpr):
        return _smaller(value)
    if type(value) is tuple:
        items = [_smaller_param(item) for item in value]
        if any(item is not None for item in items):
            return tuple(old if new is None else new for old, new in zip(value, items, strict=True))
    return None


def _taken_branch(equation: jex.JaxprEqn, index: int) -> jex.JaxprEqn:
    """A call of the branch that a `cond` with this constant index takes; an index out of range is clamped."""
    branches = equation.params["branches"]
    branch = branches[min(max(index, 0), len(branches) - 1)]
    return equation.replace(primitive=closed_call_p, invars=equation.invars[1:], params={"call_jaxpr": branch})


def _solve_alone(equation: jex.JaxprEqn) -> jex.JaxprEqn:
    """A call of the function that solves; those that multiply, and solve the transpose, are for differentiation."""
    constants, functions = equation.params["const_lengths"], equation.params["jaxprs"]
    first, end = constants.matvec + constants.vecmat, sum(constants)
    operands = [*equation.invars[first : first + constants.solve], *equation.invars[end:]]
    return equation.replace(primitive=closed_call_p, invars=operands, params={"call_jaxpr": functions.solve})


def _live_loop(equation: jex.JaxprEqn, live: list[bool]) -> jex.JaxprEqn | None:
    """A `while` equation without its dead carries, None if it has none; `live`: whether each result is read."""
    params = equation.params
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    _, of_condition = jax_compat.live_part(condition, [True])
    live = [a or b for a, b in zip(live, of_condition[first:], strict=True)]
    while True:
        _, of_body = jax_compat.live_part(body, live)
        needed = [a or b for a, b in zip(live, of_body[params["body_nconsts"] :], strict=True)]
        if needed == live:
            break
        live = needed
    if all(live):
        return None
    live_condition, _ = jax_compat.live_part(condition, [True], [*[True] * first, *live])
    live_body, of_body = jax_compat.live_part(body, live, [*[False] * params["body_nconsts"], *live])
    kept = [*[True] * first, *of_body[: params["body_nconsts"]], *live]
    return equation.replace(
        invars=list(compress(equation.invars, kept)),
        outvars=list(compress(equation.outvars, live)),
        params={
            **params,
            "cond_jaxpr": live_condition,
            "body_jaxpr": live_body,
            "body_nconsts": sum(kept[first:second]),
        },
    )
