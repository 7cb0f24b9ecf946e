"""Moves over the batch: totals of every kind, statistics, and narrow sums whose parts must not be rounded."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.bench.fuzz.generator.scope import (
    LARGEST_STAGE,
    Scope,
    Value,
    batched,
    boolean,
    floating,
    integral,
    of_rank,
)
from autopar.bench.fuzz.program import jnp_name

#: {1}: the axes. JAX takes means of integers in float32, the digits of which depend on the order of the terms.
FLOATS = ("jnp.sum({0}, {1})", "jnp.mean({0}, {1})", "jnp.max({0}, {1})", "jnp.min({0}, {1})",
          "jnp.sum({0} * {0}, {1})",
          "jnp.mean({0} * 0.5, {1}, keepdims=True)", "jnp.sum(jnp.abs({0}), {1})")  # fmt: skip
INTEGERS = ("jnp.sum({0}, {1}, dtype={0}.dtype)", "jnp.sum({0}, {1})", "jnp.max({0}, {1})", "jnp.min({0}, {1})",
            "lax.reduce_or({0}, {1})", "lax.reduce_and({0}, {1})", "lax.reduce_xor({0}, {1})",
            "jnp.sum({0} > 1, {1})", "jnp.prod({0}, {1}, dtype={0}.dtype)",
            "jnp.mean({0} % 64, {1}, dtype=jnp.float64)")  # fmt: skip
BOOLS = ("jnp.any({0}, {1})", "jnp.all({0}, {1})", "jnp.sum({0}, {1})", "jnp.mean({0}, {1}, dtype=jnp.float64)",
         "lax.reduce_xor({0}, {1})", "jnp.count_nonzero({0}, {1})")  # fmt: skip
COMPLEX = ("jnp.sum({0}, {1})", "jnp.max({0}, {1})", "jnp.min({0}, {1})", "jnp.mean({0}, {1})")
TABLE: Mapping[str, tuple[str, ...]] = {"f": FLOATS, "i": INTEGERS, "b": BOOLS, "c": COMPLEX}
#: What is only there over one dimension.
SINGLE = ("jnp.argmax({0}, {1})", "jnp.argmin({0}, {1})", "{0}[0]", "{0}[-1]", "jnp.var({0}, {1})",
          "jax.nn.logsumexp({0}, {1})")  # fmt: skip


def after(value: Value) -> int:
    """The stage of a total of a value."""
    return 2 * (value.stage // 2) + 2


def reducible(value: Value) -> bool:
    """A value whose totals are known soon enough."""
    return value.batch is not None and after(value) <= LARGEST_STAGE


def total(scope: Scope) -> Value | None:
    """A reduction over the examples, and perhaps over more."""
    value = scope.find(reducible, lambda v: v.kind in "bi" or v.dtype in ("float64", "complex128"))
    if value is None:
        return None
    return total_of(scope, value)


def total_of(scope: Scope, value: Value) -> Value | None:
    """A total of this value."""
    axes = {value.batch, *(d for d in value.free_dims() if scope.chance(0.5))}
    code = scope.rng.choice(TABLE[value.kind]).replace("{1}", str(tuple(sorted(d for d in axes if d is not None))))
    return scope.emit(code, value, batch=None, stage=after(value), folded=(1, 1))


def single_total(scope: Scope) -> None:
    """What takes one example, or a statistic that parts do not add up to."""
    value = scope.find(reducible, floating, lambda v: v.batch == 0 and v.folded == (1, 1))
    if value is not None:
        code = scope.rng.choice(SINGLE).replace("{1}", "0")
        scope.emit(code, scope.stopped(value), batch=None, stage=after(value), mixed=True, smooth=False)


def narrow_total(scope: Scope) -> None:
    """A sum over the batch in a narrow float, exact as long as its parts are not rounded.

    Zeros and ones, but for a large number in the first example, of which the last has the negative. Ones are in the
    first examples only, so that sums of several totals are exact too.
    """
    value = scope.find(reducible, floating, lambda v: v.folded == (1, 1))
    if value is None or value.batch is None:
        return
    # eight bits JAX does not widen: what XLA makes of such a sum depends on the order of its terms
    dtype, large = scope.rng.choice((("bfloat16", 512), ("float16", 4096)))
    shape = tuple(-1 if d == value.batch else 1 for d in range(value.rank))
    place = f"jnp.arange({scope.names.batch}).reshape({shape})"
    few = f"jnp.where({place} < 16, jnp.round(jnp.clip(jnp.nan_to_num({{0}}), 0, 1)), 0)"
    ends = f"jnp.where({place} == {scope.names.batch - 1}, -{large}, {few})"
    code = f"jnp.where({place} == 0, {large}, {ends}).astype(jnp.{dtype})"
    narrow = scope.emit(code, scope.stopped(value), batch=value.batch, smooth=False)
    if narrow is not None:
        total = scope.emit(f"jnp.sum({{0}}, {value.batch})", narrow, batch=None, stage=after(value))
        scope.values.remove(narrow)
        if total is not None and scope.chance(0.7):
            scope.emit("{0}.astype(jnp.float64)", total)


def wrapped_total(scope: Scope) -> None:
    """A sum over the batch that wraps, converted to something wider."""
    value = scope.find(reducible, integral)
    if value is None:
        return
    dtype = scope.rng.choice(("int8", "uint8", "int16", "uint16", "int32", "uint32"))
    axes = tuple(sorted(d for d in {value.batch} if d is not None))
    code = f"jnp.sum({{0}}.astype(jnp.{jnp_name(dtype)}), {axes}, dtype=jnp.{dtype})"
    total = scope.emit(code, value, batch=None, stage=after(value), folded=(1, 1))
    if total is not None:
        target = scope.rng.choice(("float64", "int64", "float32", "bool_", "uint64", "int8"))
        scope.emit(f"{{0}}.astype(jnp.{target})", total)


def flags(scope: Scope) -> None:
    """Whether any, all, how many examples satisfy something."""
    value = scope.find(reducible, boolean)
    if value is not None:
        total_of(scope, value)


def by_product(scope: Scope) -> None:
    """A product that contracts the examples: a total of outer products."""
    value = scope.find(
        reducible, floating, of_rank(2, 3), lambda v: v.stage == 1 and not v.mixed and v.folded == (1, 1)
    )
    other = value and scope.find(
        batched, floating, of_rank(1, 2), lambda v: v.stage == 1 and not v.mixed and v.folded == (1, 1)
    )
    if value is None or other is None:
        return
    code = f"jnp.tensordot({{0}}, {{1}}, (({value.batch},), ({other.batch},)))"
    scope.emit(code, value, other, batch=None, stage=2, folded=(1, 1))
