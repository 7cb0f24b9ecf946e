"""Rules that users register for their own primitives: custom calls, Pallas kernels.

The registry is an immutable mapping in a context variable. Registering replaces the mapping, so that planning sees one
value from start to end, and tests can undo their registrations.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from autopar.errors import RuleError
from autopar.rules.notation import check_syntax

_REGISTERED: ContextVar[Mapping[str, str]] = ContextVar("autopar_registered_rules", default=MappingProxyType({}))


def register_rule(primitive: Any, rule: str) -> None:
    """Register a sharding rule for a primitive: `register_rule("my_matmul", "m k, k n -> m n")`.

    Without a rule, every device computes a custom call or a Pallas kernel on whole operands.

    Args:
        primitive: a JAX primitive or its name; the `name` of a `pallas_call`, or the target of an `ffi_call`.
        rule: factors of the dimensions of each operand and each result. A factor of operands only is contracted: where
            it is sharded, the result is a partial sum.

    Raises:
        RuleError: `primitive` is neither a primitive nor a name, or `rule` is no rule.
    """
    name = primitive if isinstance(primitive, str) else getattr(primitive, "name", None)
    if not isinstance(name, str) or not name:
        raise RuleError(f"register_rule needs a primitive or its name, got {primitive!r:.60}")
    check_syntax(rule)
    _REGISTERED.set(MappingProxyType({**_REGISTERED.get(), name: rule}))


def registered_rules() -> Mapping[str, str]:
    """All registered rules: primitive name -> text."""
    return _REGISTERED.get()
