"""Moves that are functions of jax.numpy and jax.lax as users write them, each of several operations or an odd one."""

from __future__ import annotations

from typing import Any

from autopar.bench.fuzz.generator import totals
from autopar.bench.fuzz.generator.scope import Scope, batched, floating, integral, of_rank
from autopar.bench.fuzz.generator.shapes import resized

#: Of one float64; {1}: a dimension without examples.
EACH = (
    "jnp.searchsorted(jnp.linspace(-1.0, 1.0, 5), {0})", "jnp.digitize({0}, jnp.array([-0.5, 0.0, 0.5]))",
    "jnp.interp({0}, jnp.linspace(-1.0, 1.0, 4), jnp.array([0.0, 1.0, -1.0, 2.0]))", "jnp.diff({0}, axis={1})",
    "lax.associative_scan(jnp.maximum, {0}, axis={1})", "lax.associative_scan(jnp.add, {0}, axis={1})",
    "lax.reduce({0}, np.float64(0.0), lambda a, b: a + b, ({1},))", "jnp.ptp({0}, axis={1})",
    "jnp.select([{0} > 0.5, {0} > 0.0], [{0}, 2.0 * {0}], -1.0)", "jnp.nansum({0}, axis={1})",
    "jnp.quantile({0}, 0.3, axis={1})", "lax.map(lambda x: jnp.sin(x) * 2.0, {0})",
    "lax.fori_loop(0, 3, lambda i, x: jnp.cos(x) + 0.1 * i, {0})", "jnp.piecewise({0}, [{0} < 0.0], [0.0, 1.0])",
    "jnp.count_nonzero({0} > 0.0, axis={1})", "jnp.linalg.norm({0} + 2.0, axis={1})", "jax.nn.glu({0}, axis={1})",
    "lax.approx_max_k({0}, 1)[0]", "jnp.trapezoid({0}, axis={1})",
    "jnp.polyval(jnp.array([1.0, 0.5, 0.2]), jnp.tanh({0}))",
)  # fmt: skip
#: Of those, what drops the dimension.
DROPS = ("ptp", "lax.reduce", "nansum", "quantile", "count_nonzero", "linalg.norm", "trapezoid")
#: Totals of float64; {1}: the dimension with examples.
TOTALS = (
    "jnp.histogram({0}, bins=4, range=(-2.0, 2.0))[0]", "jnp.nanmax({0}, axis={1})", "jnp.nanmean({0}, axis={1})",
    "jnp.average({0}, axis={1})", "jnp.ptp({0}, axis={1})", "jnp.quantile({0}, 0.5, axis={1})",
    "lax.reduce({0}, np.float64(1.0), lambda a, b: a * b, ({1},))", "jnp.linalg.norm({0}, axis={1})",
    "lax.reduce({0}, np.float64(0.0), lambda a, b: jnp.hypot(a, b), ({1},))", "jnp.std({0}, axis={1})",
    "lax.reduce({0}, np.float64(-1.0), lambda a, b: jnp.maximum(a, b), ({1},))", "jnp.median({0}, axis={1})",
    "lax.reduce({0}, -0.5, lax.max, ({1},))", "jnp.take({0}, 2, axis={1})", "lax.argmax({0}, {1}, jnp.int32)",
    "jnp.sum({0}, axis={1}, where={0} > 0.0)", "jnp.max({0}, axis={1}, where={0} > 0.0, initial=-3.0)",
    "jnp.sum({0}, axis={1}, initial=2.0)", "jnp.all({0} < 2.0, axis={1})",
)  # fmt: skip
#: Totals of integers with one entry for each example.
COUNTS = (
    "jnp.bincount(jnp.abs({0} % 5), length=5)", "jax.ops.segment_sum({0}, {0} % 3, 4)",
    "jax.ops.segment_max({0}, {0} % 3, 4)", "jnp.zeros(4, bool).at[{0} % 4].set(True)",
    "jnp.sum(jax.nn.one_hot({0} % 4, 4), 0)", "jnp.unique({0} % 3, size=3)",
    "jnp.zeros(4, {0}.dtype).at[{0} % 4].set(7)",
)  # fmt: skip


def each(scope: Scope) -> None:
    """A function of each example."""
    value = scope.find(floating, of_rank(1), lambda v: bool(v.free_dims()))
    if value is None:
        return
    d = scope.rng.choice(value.free_dims())
    code = scope.rng.choice(EACH)
    if ("approx" in code or "lax.map" in code) and value.batch in (0, value.rank - 1):
        return
    drops = any(word in code for word in DROPS)
    facts = resized(value, d, -1 if drops else 0)
    scope.emit(code.replace("{1}", str(d)), scope.stopped(value), smooth=False, **facts)


def total(scope: Scope) -> None:
    """A function over the examples."""
    value = scope.find(totals.reducible, floating, lambda v: v.folded == (1, 1))
    if value is not None:
        facts: dict[str, Any] = {"batch": None, "stage": totals.after(value), "smooth": False, "mixed": True}
        scope.emit(scope.rng.choice(TOTALS).replace("{1}", str(value.batch)), scope.stopped(value), **facts)


def count(scope: Scope) -> None:
    """How many examples have which integer."""
    value = scope.find(totals.reducible, batched, integral, of_rank(1, 1), lambda v: v.folded == (1, 1))
    if value is not None:
        facts: dict[str, Any] = {"batch": None, "stage": totals.after(value), "mixed": True}
        scope.emit(scope.rng.choice(COUNTS), value, **facts)


def integer_product(scope: Scope) -> None:
    """A product of integers that contracts the examples, or not: sums that wrap."""
    value = scope.find(integral, batched, of_rank(1, 2), lambda v: v.stage == 1 and not v.mixed and v.batch == 0)
    if value is None or value.folded != (1, 1):
        return
    # XLA on CPU does not compile a wider product of four bits.
    wider = "" if value.dtype.endswith("int4") else scope.rng.choice(("", "", ", preferred_element_type=jnp.int32"))
    facts: dict[str, Any] = {"batch": None, "stage": 2, "mixed": True}
    scope.emit(f"jnp.tensordot({{0}}, {{0}}, ((0,), (0,)){wider})", value, **facts)
