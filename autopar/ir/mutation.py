"""Arguments that a step changes, and whose change is lost.

The containers that a step sees while it is traced are copies of the caller's, as under `jax.jit`: what it writes into
them reaches the caller only in what it returns. Objects that are structure are the caller's own, and change once, while
tracing, rather than at every step. Refused is

    a value written into an argument that no result depends on      -> lost
    an attribute of an object that is set to something else         -> changed_attribute

What happens to objects of Flax NNX happens to the caller's (`autopar.ir.arguments`).
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
class Before:
    """Arguments as a step finds them: their leaves, and the attributes of those that are objects, by path."""

    leaves: Mapping[Any, Any]
    attributes: Mapping[Any, Mapping[str, Any]]


def before(args: Any) -> Before:
    """What to compare with when the step has been called."""
    leaves = dict(tree_leaves_with_path(args, is_leaf=is_opaque))
    objects = {path: x for path, x in leaves.items() if not jax_compat.is_tracer(x) and not is_opaque(x)}
    return Before(leaves, {path: dict(getattr(x, "__dict__", {})) for path, x in objects.items()})


def written(found: Before, args: Any) -> dict[Any, Any]:
    """Traced values that the step has written into its arguments, by path."""
    now = tree_leaves_with_path(args, is_leaf=is_opaque)
    return {path: x for path, x in now if jax_compat.is_tracer(x) and x is not found.leaves.get(path)}


def changed_attribute(found: Before) -> tuple[Any, str] | None:
    """Path of an object among the arguments, and an attribute that the step has set to something else."""
    for path, attributes in found.attributes.items():
        now = vars(found.leaves[path]) if attributes else {}
        for name, value in attributes.items():
            if now.get(name) is not value:
                return path, name
    return None


def lost(jaxpr: jex.ClosedJaxpr, values: Sequence[Any]) -> Any:
    """The first of these results of a jaxpr's equations that no other result depends on, or None.

    Args:
        jaxpr: with its own results alone; values: variables that were results besides.
    """
    alive = {v for e in jax_compat.eliminate_dead_code(jaxpr).jaxpr.eqns for v in e.outvars}
    computed = {v for e in jaxpr.jaxpr.eqns for v in e.outvars}
    return next((v for v in values if isinstance(v, jex.Var) and v in computed and v not in alive), None)
