"""Equations of `jax.shard_map`: what they say, and the same on another mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax import lax
from jax._src import core as jax_core  # tried on 0.10.2, 0.12.0: contexts and effects of equations
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Specs = tuple[PartitionSpec, ...]


def shard_map_parts(
    equation: jex.JaxprEqn,
) -> tuple[Mapping[str, int], tuple[str, ...], Specs, Specs, jex.ClosedJaxpr]:
    """(mesh, manual axes in its order, specs of operands, of results, body) of a `shard_map`.

    Tried on 0.10.2 and 0.12.0.
    """
    params = equation.params
    mesh, jaxpr = dict(params["mesh"].shape), params["jaxpr"]
    axes = tuple(axis for axis in mesh if axis in params["newly_manual_axes"])
    body = jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jex.ClosedJaxpr(jaxpr, ())
    return mesh, axes, tuple(params["in_specs"]), tuple(params["out_specs"]), body


def bind_on_mesh(equation: jex.JaxprEqn, mesh: Mesh | AbstractMesh, operands: Sequence[Any]) -> list[Any]:
    """Bind a `shard_map` on another mesh with the same axes. Tried on 0.10.2 and 0.12.0.

    The types in the body name the mesh that it was traced for, kind of device included. Where that is another, they are
    those of the same body on this mesh.
    """
    own, context = abstract(equation.params["mesh"]), equation.ctx
    if own != abstract(mesh):
        equation = _Renaming(abstract(mesh)).equation(equation, {})
    params = equation.primitive.get_bind_params({**equation.params, "mesh": mesh})
    with context.manager:
        return list(equation.primitive.bind(*operands, **params))


def shard_mapped(
    equation: jex.JaxprEqn, body: Callable[..., Sequence[Any]], operands: Sequence[Any], added: int
) -> list[Any]:
    """The results of a `shard_map` with another body. Tried on 0.10.2 and 0.12.0.

    Over which axes values vary is not checked again: it was, for the body of the equation.

    Args:
        equation: the `shard_map`.
        body: of the shards of the operands.
        operands: those of the equation, behind others that are whole on every device.
        added: number of those others.
    """
    params = equation.params
    mapped = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=(*(PartitionSpec(),) * added, *params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=False,
    )
    with equation.ctx.manager:
        return list(mapped(*operands))


def bind_in_body(equation: jex.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Bind an equation of the body of a `shard_map` in one whose types do not say over which axes values vary.

    A sum whose result is of equal values on all devices has a primitive of its own where types say so.
    Tried on 0.10.2 and 0.12.0.
    """
    with equation.ctx.manager:
        if equation.primitive.name == "psum_invariant":
            return [lax.psum(x, equation.params["axes"]) for x in operands]
        results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    return list(results) if equation.primitive.multiple_results else [results]


def has_side_effects(equation: jex.JaxprEqn) -> bool:
    """Whether an equation has effects, but for naming a mesh axis. Tried on 0.10.2 and 0.12.0."""
    return not all(isinstance(effect, jax_core.NamedAxisEffect) for effect in equation.effects)


def abstract(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    """A mesh without devices."""
    return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh


@dataclass(frozen=True)
class _Renaming:
    """Programs with another mesh of the same axes in their types."""

    mesh: AbstractMesh

    def closed(self, jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        return jex.ClosedJaxpr(self.jaxpr(jaxpr.jaxpr), jaxpr.consts)

    def jaxpr(self, jaxpr: jex.Jaxpr) -> jex.Jaxpr:
        env: dict[Any, Any] = {}
        constvars, invars = self.variables(jaxpr.constvars, env), self.variables(jaxpr.invars, env)
        equations = [self.equation(e, env) for e in jaxpr.eqns]
        outvars = [self.atom(v, env) for v in jaxpr.outvars]
        return jaxpr.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=equations)

    def variables(self, variables: Sequence[Any], env: dict[Any, Any]) -> list[Any]:
        env.update((v, type(v)(self.aval(v.aval))) for v in variables)
        return [env[v] for v in variables]

    def atom(self, atom: Any, env: Mapping[Any, Any]) -> Any:
        if not isinstance(atom, jex.Literal):
            return env.get(atom, atom)
        value = atom.val.copy() if isinstance(atom.val, np.ndarray) else atom.val  # the copy gets its type anew
        return jex.Literal(value, self.aval(atom.aval))

    def aval(self, aval: Any) -> Any:
        sharding = getattr(aval, "sharding", None)
        return aval.update(sharding=self.value(sharding)) if isinstance(sharding, NamedSharding) else aval

    def equation(self, equation: jex.JaxprEqn, env: dict[Any, Any]) -> jex.JaxprEqn:
        invars = [self.atom(v, env) for v in equation.invars]
        params = {name: self.value(value) for name, value in equation.params.items()}
        outvars, context = self.variables(equation.outvars, env), equation.ctx
        if self.covers(context.cur_abstract_mesh):
            with context.manager, jax.sharding.use_abstract_mesh(self.value(context.cur_abstract_mesh)):
                context = jax_core.JaxprEqnContext()
        return equation.replace(invars=invars, outvars=outvars, params=params, ctx=context)

    def covers(self, mesh: Any) -> bool:
        """Whether this is a mesh of the same axes."""
        return isinstance(mesh, Mesh | AbstractMesh) and mesh.shape == self.mesh.shape

    def value(self, value: Any) -> Any:
        """A parameter; the types of the axes of its mesh stay."""
        if self.covers(value):
            return self.mesh.update_axis_types(dict(zip(value.axis_names, value.axis_types, strict=True)))
        if isinstance(value, NamedSharding) and self.covers(value.mesh):
            return value.update(mesh=self.value(value.mesh))
        if type(value) is tuple:
            return tuple(map(self.value, value))
        if isinstance(value, jex.ClosedJaxpr):
            return self.closed(value)
        return self.jaxpr(value) if isinstance(value, jex.Jaxpr) else value
