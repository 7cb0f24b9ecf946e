"""Meshes and shardings: the mesh in force, Auto and Explicit axes, and constraints.

A program is planned on Auto axes. Explicit axes, whose shardings are part of types, count as Auto while it is traced
and emitted. Each entry says which versions of JAX it was tried on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax._src import core as jax_core  # tried on 0.10.2, 0.12.0: contexts and effects of equations
from jax._src import mesh as jax_mesh  # tried on 0.10.2, 0.12.0: the mesh in force with its devices
from jax._src import pjit as jax_pjit  # tried on 0.10.2, 0.12.0: the primitive of with_sharding_constraint
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding


def auto_mesh(devices: Any, names: Sequence[str]) -> Mesh:
    """A concrete mesh whose axes are all Auto (0.12 would make them Explicit by default)."""
    return Mesh(devices, tuple(names), axis_types=(AxisType.Auto,) * len(names))


def auto_abstract_mesh(sizes: Sequence[int], names: Sequence[str]) -> AbstractMesh:
    """A mesh without devices whose axes are all Auto."""
    return AbstractMesh(tuple(sizes), tuple(names), axis_types=(AxisType.Auto,) * len(names))


@contextlib.contextmanager
def automatic_axes() -> Iterator[None]:
    """Inside, a mesh that the user set with Explicit axes counts as Auto: autopar chooses the shardings.

    Tried on 0.10.2 and 0.12.0.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or all(kind == AxisType.Auto for kind in mesh.axis_types):
        yield
        return
    with jax.sharding.use_abstract_mesh(mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))):
        yield


def abstract_mesh_in_force(sizes: Sequence[int], names: Sequence[str]) -> contextlib.AbstractContextManager[Any]:
    """Inside, a mesh without devices is in force, with Auto axes of these sizes. Tried on 0.10.2 and 0.12.0."""
    return jax.sharding.use_abstract_mesh(auto_abstract_mesh(sizes, names))


#: Kind of mistake -> what the message has. The first that fits holds.
_CONSTRAINT_MESSAGES = (
    ("no mesh", "with_sharding_constraint requires a non-empty mesh"),
    ("axis", "Resource axis: "),
    ("explicit", "with_sharding_constraint can only refer to Auto axes"),
    ("explicit", "`with_sharding_constraint` acts as an assert"),
    ("other", "with_sharding_constraint"),
    ("other", "A single shardings specification can map every mesh axis to at most one"),
    ("other", "shardings leaf specifications are expected to be PartitionSpec"),
)


def constraint_mistake(error: Exception) -> str | None:
    """The kind of mistake that JAX found in a `with_sharding_constraint`; None if the error is another.

    "no mesh": a PartitionSpec without a mesh; "axis": an axis that the mesh lacks; "explicit": Explicit axes; "other".
    Tried on 0.10.2 and 0.12.0.
    """
    text = str(error)
    return next((kind for kind, part in _CONSTRAINT_MESSAGES if part in text), None)


def lacks_mesh(error: Exception) -> bool:
    """Whether a `with_sharding_constraint` failed for want of a mesh with Auto axes and its names.

    True only if no mesh is set (`jax.set_mesh`). One in force by `with mesh:` alone gives way to another.
    """
    return jax.sharding.get_abstract_mesh().empty and constraint_mistake(error) in ("no mesh", "axis", "explicit")


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Inside, no mesh that the user set is in force, so that programs may run on some of its devices.

    Tried on 0.10.2 and 0.12.0.
    """
    return jax.set_mesh(None)


#: What JAX raises where shardings in types do not fit an operation. Tried on 0.10.2 and 0.12.0.
SHARDING_TYPE_ERROR: type[Exception] = jax_core.ShardingTypeError


def is_explicit(mesh: Any) -> bool:
    """True for a mesh (concrete or abstract) some axes of which are Explicit: shardings over it are part of types."""
    return not mesh.empty and AxisType.Explicit in mesh.axis_types


def explicit_mesh() -> Mesh | AbstractMesh | None:
    """The mesh in force (`jax.set_mesh`) if it is Explicit, with its devices if known. Tried on 0.10.2 and 0.12.0."""
    concrete, abstract = jax_mesh.get_concrete_mesh(), jax.sharding.get_abstract_mesh()
    if not is_explicit(abstract):
        return None
    return concrete if not concrete.empty and concrete.abstract_mesh == abstract else abstract


def explicit_sharding(aval: Any) -> NamedSharding | None:
    """The sharding that a type carries, if it is on an Explicit mesh. Tried on 0.10.2 and 0.12.0."""
    sharding = getattr(aval, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and is_explicit(sharding.mesh) else None


def without_sharding(aval: Any) -> Any:
    """A type without the sharding it carries. Tried on 0.10.2 and 0.12.0."""
    return aval.update(sharding=None) if explicit_sharding(aval) else aval


def on_auto_mesh(value: Any) -> Any:
    """A mesh, or a sharding over one, with all axes Auto; anything else as it is."""
    if isinstance(value, NamedSharding):
        return value.update(mesh=on_auto_mesh(value.mesh)) if is_explicit(value.mesh) else value
    if isinstance(value, Mesh) and is_explicit(value):
        return auto_mesh(value.devices, value.axis_names)
    if isinstance(value, AbstractMesh) and is_explicit(value):
        return value.update_axis_types(dict.fromkeys(value.axis_names, AxisType.Auto))
    return value


def automatic_context(context: Any) -> Any:
    """The context of an equation with Auto axes for Explicit ones. Tried on 0.10.2 and 0.12.0."""
    if not is_explicit(context.cur_abstract_mesh):
        return context
    with context.manager, jax.sharding.use_abstract_mesh(on_auto_mesh(context.cur_abstract_mesh)):
        return jax_core.JaxprEqnContext()


def constraint_equation(equation: jex.JaxprEqn, operand: Any, result: Any, sharding: NamedSharding) -> jex.JaxprEqn:
    """`with_sharding_constraint` in the place of an equation that reshards. Tried on 0.10.2 and 0.12.0."""
    mesh = on_auto_mesh(sharding.mesh)
    params = {
        "sharding": on_auto_mesh(sharding),
        "layout": None,
        "context_mesh": mesh,
        "unconstrained_dims": frozenset(),
    }
    return equation.replace(
        invars=[operand],
        outvars=[result],
        primitive=jax_pjit.sharding_constraint_p,
        params=params,
        effects=jax_core.no_effects,
        ctx=automatic_context(equation.ctx),
    )


def is_concrete_mesh(mesh: Any) -> bool:
    """True for a mesh that holds devices."""
    return isinstance(mesh, Mesh)
