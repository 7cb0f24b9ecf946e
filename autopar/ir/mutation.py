"""Changes of arguments that are lost.

The containers that a step gets while it is traced are copies of the caller's, as under `jax.jit`: values that it writes
into them reach the caller only through its results. Objects that are structure are the caller's own, and change once,
while tracing, instead of at every step. Refused are

    a value written into an argument, on which no result depends    -> first_unused
    an attribute of an object that is set to another value          -> changed_attribute

Changes of objects of Flax NNX reach the caller's objects (`autopar.ir.arguments`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex
from jax.tree_util import tree_leaves_with_path

from autopar import jax_compat
from autopar.ir.arguments import is_opaque


@dataclass(frozen=True, eq=False)
class ArgumentSnapshot:
    """Arguments before the step: their leaves, and the attributes of those leaves that are objects, by path."""

    leaves: Mapping[Any, Any]
    attributes: Mapping[Any, Mapping[str, Any]]


def snapshot(args: Any) -> ArgumentSnapshot:
    """The arguments to compare with after the step has run."""
    leaves = dict(tree_leaves_with_path(args, is_leaf=is_opaque))
    objects = {path: x for path, x in leaves.items() if not jax_compat.is_tracer(x) and not is_opaque(x)}
    return ArgumentSnapshot(leaves, {path: dict(getattr(x, "__dict__", {})) for path, x in objects.items()})


def overwritten(before: ArgumentSnapshot, args: Any) -> dict[Any, Any]:
    """Traced values that the step has written into its arguments, by path."""
    after = tree_leaves_with_path(args, is_leaf=is_opaque)
    return {path: x for path, x in after if jax_compat.is_tracer(x) and x is not before.leaves.get(path)}


def changed_attribute(before: ArgumentSnapshot) -> tuple[Any, str] | None:
    """Path of an object among the arguments and an attribute of it that the step has set to another value; None if
    none.
    """
    for path, attributes in before.attributes.items():
        after = vars(before.leaves[path]) if attributes else {}
        for name, value in attributes.items():
            if after.get(name) is not value:
                return path, name
    return None


def first_unused(jaxpr: jex.ClosedJaxpr, values: Sequence[Any]) -> Any:
    """The first of these values on which no result of a jaxpr depends; None if there is none.

    Args:
        jaxpr: with its own results only.
        values: variables that were additional results.
    """
    used = {v for e in jax_compat.eliminate_dead_code(jaxpr).jaxpr.eqns for v in e.outvars}
    computed = {v for e in jaxpr.jaxpr.eqns for v in e.outvars}
    return next((v for v in values if isinstance(v, jex.Var) and v in computed and v not in used), None)
