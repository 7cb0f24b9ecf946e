"""Moves that keep shapes: functions of one value, of two, conversions, bits, comparisons, choices.

Functions of floats map any input to a moderate output, so that programs of any length stay finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.bench.fuzz.generator.scope import Scope, Value, boolean, floating, integral, like, numeric
from autopar.bench.fuzz.program import jnp_name

#: Smooth functions, of float64 with gradients.
SMOOTH = (
    "jnp.tanh({0})", "jnp.sin({0})", "jnp.cos({0})", "lax.logistic({0})", "jnp.exp(-jnp.abs({0}))",
    "jnp.exp(jnp.tanh({0}))", "jnp.log1p(jnp.abs({0}))", "jnp.log(1.5 + jnp.abs({0}))", "jnp.sqrt(1.0 + {0} * {0})",
    "lax.rsqrt(1.0 + {0} * {0})", "lax.erf({0})", "lax.erfc({0})", "lax.erf_inv(0.9 * jnp.tanh({0}))",
    "jnp.arctan({0})", "jnp.arcsinh({0})", "jnp.arccosh(1.5 + {0} * {0})", "jnp.arctanh(0.5 * jnp.tanh({0}))",
    "jnp.sinh(jnp.tanh({0}))", "jnp.cosh(jnp.tanh({0}))", "jnp.tan(jnp.tanh({0}))", "jnp.arcsin(0.9 * jnp.tanh({0}))",
    "jnp.arccos(0.9 * jnp.tanh({0}))", "jnp.expm1(jnp.tanh({0}))", "lax.cbrt(1.0 + {0} * {0})",
    "lax.lgamma(1.5 + jnp.abs(jnp.tanh({0})))", "lax.digamma(1.5 + jnp.abs(jnp.tanh({0})))",
    "lax.bessel_i0e({0})", "lax.bessel_i1e({0})", "jax.nn.relu({0})", "jax.nn.gelu({0})", "jax.nn.silu({0})",
    "jax.nn.softplus({0})", "jnp.square(jnp.tanh({0}))", "lax.integer_pow(jnp.tanh({0}), 3)", "jnp.abs({0})",
    "-{0}", "jnp.exp2(jnp.tanh({0}))", "jnp.clip({0}, -1.0, 1.0)", "lax.clamp(-1.5, {0}, 1.5)", "0.5 * {0}",
    "{0} + 0.25", "jnp.where({0} > 0.1, {0}, 0.1 * {0})", "jnp.sinc(jnp.tanh({0}))", "jax.nn.elu({0})",
    "lax.optimization_barrier({0})", "jnp.real(lax.complex({0}, 0.5 * {0}) * (1.0 + 2.0j))",
    "jnp.abs(lax.complex(1.0 + {0} * {0}, {0})) - 1.0", "jnp.maximum({0}, 0.1)", "jnp.minimum({0}, 0.3)",
    "1.0 / (1.5 + {0} * {0})", "jnp.power(1.2 + jnp.abs(jnp.tanh({0})), 0.7)",
)  # fmt: skip
#: Functions without gradients, or whose gradients are zero.
STEPS = (
    "jnp.floor({0})", "jnp.ceil({0})", "jnp.round({0})", "jnp.sign({0})", "jnp.trunc({0})",
    "lax.reduce_precision({0}, 8, 7)", "jnp.nextafter({0}, 1.0)", "jnp.isfinite({0})", "jnp.isnan({0})",
    "jnp.signbit({0})", "lax.igamma(1.5, jnp.abs({0}))", "lax.igammac(1.5, jnp.abs({0}))",
    "jax.scipy.special.zeta(2.5 + jnp.abs({0}), 1.5)", "lax.polygamma(1.0, 1.5 + jnp.abs({0}))",
    "jnp.frexp({0})[1]", "jnp.mod({0}, 0.7)", "jnp.fmod({0}, 0.7)",
    "jnp.nan_to_num({0} / 0.0, posinf=2.0, neginf=-2.0)",
)  # fmt: skip
SMOOTH_PAIRS = (
    "{0} + {1}", "{0} - {1}", "{0} * jnp.tanh({1})", "{0} / (1.5 + {1} * {1})", "jnp.maximum({0}, {1})",
    "jnp.minimum({0}, {1})", "jnp.arctan2({0}, 1.5 + jnp.abs({1}))", "jnp.logaddexp({0}, {1})",
    "jnp.hypot({0}, 1.0 + {1} * {1})", "jnp.power(1.2 + jnp.abs(jnp.tanh({0})), jnp.tanh({1}))",
    "jnp.where({0} > {1}, {0}, {1} * 0.5)",
)  # fmt: skip

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
NARROW = (*FLOATS[:3], "float8_e4m3fn", "float8_e5m2", "int4", "uint4")
INTEGER_UNARY = (
    "{0} + {0}", "-{0}", "~{0}", "{0} * {0}", "lax.population_count({0})", "lax.clz({0})", "jnp.abs({0})",
    "jnp.sign({0})", "{0} >> 1", "{0} << 2", "lax.shift_right_logical({0}, jnp.ones_like({0}))", "{0} * 7 + 3",
    "{0} // 3", "{0} % 5", "{0} ^ ({0} >> 2)", "lax.integer_pow({0}, 3)", "jnp.clip({0}, 1, 5)",
)  # fmt: skip
INTEGER_BINARY = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} & {1}", "{0} | {1}", "{0} ^ {1}", "jnp.maximum({0}, {1})",
    "jnp.minimum({0}, {1})", "{0} // (({1} & 3) + 1)", "lax.rem({0}, ({1} & 3) + 1)", "{0} << ({1} & 3)",
    "{0} >> ({1} & 3)", "lax.shift_right_logical({0}, {1} & 3)", "lax.shift_right_arithmetic({0}, {1} & 3)",
)  # fmt: skip
COMPARISONS = ("{0} < {1}", "{0} <= {1}", "{0} > {1}", "{0} >= {1}", "{0} == {1}", "{0} != {1}")
LOGIC = ("{0} & {1}", "{0} | {1}", "{0} ^ {1}", "~{0} | {1}", "jnp.logical_and({0}, ~{1})")
WIDTHS = {"int8": 8, "uint8": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32, "int64": 64, "uint64": 64,
          "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}  # fmt: skip


def smooth(scope: Scope) -> None:
    """A function of one float64."""
    value = scope.find(floating)
    if value:
        scope.emit(scope.rng.choice(SMOOTH), value)


def steps(scope: Scope) -> None:
    """A function of a float64 that has no gradient."""
    value = scope.find(floating)
    if value:
        scope.emit(scope.rng.choice(STEPS), scope.stopped(value), smooth=False)


def pair(scope: Scope) -> None:
    """A function of two float64 of one shape."""
    value = scope.find(floating)
    other = value and scope.find(floating, like(value))
    if value and other:
        scope.emit(scope.rng.choice(SMOOTH_PAIRS), value, other)


def broadcast_pair(scope: Scope) -> None:
    """A value with one of its last dimension, with a scalar known before, or with a new bias."""
    value = scope.find(floating, lambda v: v.rank > 0 and v.batch != v.rank - 1)
    if value is None:
        return
    last = value.shape[-1:]
    other = scope.find(floating, lambda v: v.batch is None and v.shape in (last, ()) and v.stage <= value.stage)
    if other is None or scope.chance(0.4):
        other = scope.param(last)
    scope.emit(scope.rng.choice(SMOOTH_PAIRS), value, other)


def integer(scope: Scope) -> None:
    """Arithmetic of one integer, which may wrap."""
    value = scope.find(integral)
    if value:
        scope.emit(scope.rng.choice(INTEGER_UNARY), value)


def integer_pair(scope: Scope) -> None:
    """Arithmetic of two integers of one type."""
    value = scope.find(integral)
    other = value and scope.find(integral, like(value), lambda v: v.dtype == value.dtype)
    if value and other:
        scope.emit(scope.rng.choice(INTEGER_BINARY), value, other)


def convert(scope: Scope) -> None:
    """A conversion between any two dtypes; of floats to integers only what fits."""
    value = scope.find(lambda v: v.kind in "bif")
    if value is None:
        return
    target = scope.rng.choice((*INTEGERS, *INTEGERS, *FLOATS, *NARROW, "bool", "bool"))
    if scope.chance(0.25):
        target = "float64"
    if value.kind == "f":
        value = scope.stopped(value)
    small = "jnp.clip(jnp.nan_to_num({0}), -7, 7)" if value.kind == "f" and target[0] in "ui" else "{0}"
    small = "jnp.abs(jnp.clip(jnp.nan_to_num({0}), -7, 7))" if value.kind == "f" and target[0] == "u" else small
    scope.emit(f"{small}.astype(jnp.{jnp_name(target)})", value, smooth=False)


def to_float(scope: Scope) -> None:
    """Integers and booleans as moderate float64."""
    value = scope.find(lambda v: v.kind in "bi")
    if value:
        code = "{0}.astype(jnp.float64)" if value.kind == "b" else "({0} % 7).astype(jnp.float64) * 0.25"
        scope.emit(code, value)


def narrow_chain(scope: Scope) -> None:
    """A few examples' own operations in a narrow float, and back."""
    value = scope.find(floating)
    if value is None:
        return
    dtype = scope.rng.choice(NARROW[:5])
    inner = scope.rng.choice(("{} * 2", "{} + 1", "-{}", "jnp.abs({})", "jnp.maximum({}, 0)"))
    text = inner.format(f"jnp.tanh({{0}}).astype(jnp.{dtype})")
    scope.emit(f"({text}).astype(jnp.float64)", scope.stopped(value), smooth=False)


def bitcast(scope: Scope) -> None:
    """The bits of a value as another dtype, of the same width, narrower (a new last dimension), or wider.

    A NaN counts as one: which of its bits are set is not defined, and differs in a step from one batch size to another.
    """
    value = scope.find(lambda v: v.dtype in WIDTHS)
    if value is None:
        return
    if value.kind == "f":
        value = scope.stopped(value)
    target = scope.rng.choice([d for d in sorted(WIDTHS) if d[0] in "ui"])
    source, wanted = WIDTHS[value.dtype], WIDTHS[target]
    if wanted > source and (not value.rank or value.shape[-1] != wanted // source):
        return
    facts: dict[str, Any] = {} if wanted <= source or value.batch != value.rank - 1 else {"batch": None, "stage": 2}
    bits_of = "jnp.where(jnp.isnan({0}), 1, {0})" if value.kind == "f" else "{0}"
    scope.emit(f"lax.bitcast_convert_type({bits_of}, jnp.{target})", value, smooth=False, **facts)


def fold_bits(scope: Scope) -> None:
    """Bits of several narrow integers as one wider one: the last dimension is made to fit, batch or not."""
    value = scope.find(lambda v: v.dtype in ("uint8", "int8", "uint16", "uint32"), lambda v: v.rank >= 1)
    if value is None or value.batch is None or value.folded != (1, 1):
        return
    wide, times = {8: ("uint16", 2), 16: ("uint32", 2), 32: ("uint64", 2)}[WIDTHS[value.dtype]]
    if value.batch == 0 and value.rank == 1 and scope.chance(0.5):
        code = f"lax.bitcast_convert_type({{0}}.reshape({value.shape[0] // times}, {times}), jnp.{wide})"
        scope.emit(code, value, batch=None, stage=2, mixed=True)
        return
    across = f"uint{WIDTHS[value.dtype] * scope.names.batch}"
    if across in WIDTHS and scope.chance(0.5):  # the examples become the bits of one integer
        code = f"lax.bitcast_convert_type(jnp.moveaxis({{0}}, {value.batch}, -1), jnp.{across})"
        scope.emit(code, value, batch=None, stage=2, mixed=True)
        return
    code = f"lax.bitcast_convert_type(jnp.stack([{', '.join(['{0}'] * times)}], -1), jnp.{wide})"
    scope.emit(code, value)


def compare(scope: Scope) -> None:
    """A comparison of two values of one type."""
    value = scope.find(numeric)
    other = value and scope.find(like(value), lambda v: v.dtype == value.dtype)
    if value and other:
        same = value.name == other.name
        scope.emit(scope.rng.choice(COMPARISONS) if not same else "{0} > 0", value, other, smooth=False)


def logic(scope: Scope) -> None:
    """Logic of booleans."""
    value = scope.find(boolean)
    other = value and scope.find(boolean, like(value))
    if value and other:
        scope.emit(scope.rng.choice(LOGIC), value, other)


def choose(scope: Scope) -> None:
    """One of two or three values, by a mask or an integer of the same shape."""
    value = scope.find(numeric)
    if value is None:
        return
    pick: Callable[[Value], bool] = like(value)
    other = scope.find(pick, lambda v: v.dtype == value.dtype) or value
    mask = scope.find(boolean, pick)
    if mask is not None:
        scope.emit("jnp.where({0}, {1}, {2})", mask, value, other)
        return
    which = scope.find(integral, pick)
    if which is not None and value.shape == other.shape == which.shape:
        scope.emit("lax.select_n(({0} % 3).astype(jnp.int32), {1}, {2}, {1})", which, value, other)


def complex_chain(scope: Scope) -> None:
    """Into complex numbers and back."""
    value = scope.find(floating)
    if value is None:
        return
    forms = (
        "lax.complex({0}, jnp.tanh({0}))", "jnp.conj(lax.complex({0}, {0} * {0}))",
        "jnp.exp(1.0j * {0})", "({0} + 0.5j).astype(jnp.complex64)",
    )  # fmt: skip
    scope.emit(scope.rng.choice(forms), scope.stopped(value), smooth=False)


def of_complex(scope: Scope) -> None:
    """A real part of a complex value, or arithmetic of it."""
    value = scope.find(lambda v: v.kind == "c")
    if value:
        exact = ("jnp.real({0})", "jnp.imag({0})", "jnp.conj({0})")
        forms = ("jnp.abs({0})", "{0} * {0}", "{0} + 1.0j", "jnp.exp(1.0j * jnp.imag({0}))")
        # products of complex64 are rounded in one step or in two, as the compiler likes
        scope.emit(scope.rng.choice(exact if value.dtype == "complex64" else (*exact, *forms)), value)


def random_bits(scope: Scope) -> None:
    """Random numbers of a key, as many as a value has, or a mask that drops some of it."""
    value, key = scope.find(floating), scope.find(lambda v: v.kind == "k" and not v.rank)
    if value is None or key is None:
        return
    forms = (
        ("jnp.where(jax.random.bernoulli({1}, 0.7, {0}.shape), {0} / 0.7, 0.0)", None),
        ("{0} + 0.1 * jax.random.normal({1}, {0}.shape)", None),
        ("{0} * jax.random.uniform({1}, {0}.shape, minval=0.5)", None),
        ("jax.random.bits({1}, {0}.shape, jnp.uint8)", 0), ("jax.random.bits({1}, {0}.shape, jnp.uint32)", 0),
        ("jax.random.bits({1}, {0}.shape, jnp.uint64)", 0), ("jax.random.randint({1}, {0}.shape, 0, 11)", 0),
        ("jax.random.bernoulli(jax.random.fold_in({1}, 3), 0.5, {0}.shape)", 0),
        ("jax.random.gumbel({1}, {0}.shape)", 0),
    )  # fmt: skip
    code, stage = scope.rng.choice(forms)
    facts: dict[str, Any] = {"smooth": False} if stage == 0 else {}
    scope.emit(code, value, key, **facts)


def keys(scope: Scope) -> None:
    """Keys of keys, and what they draw: one key for each example, or several for all."""
    key = scope.find(lambda v: v.kind == "k")
    if key is None:
        return
    if key.rank:
        dims = "jax.vmap(" * key.rank + "{}" + ")" * key.rank
        draw = scope.rng.choice(("lambda k: jax.random.normal(k, (3,))", "lambda k: jax.random.bits(k, (2,))",
                                 "lambda k: jax.random.fold_in(k, 5)"))  # fmt: skip
        scope.emit(dims.format(draw) + "({0})", key)
    elif key.batch is None and scope.chance(0.5):
        scope.emit(f"jax.random.split({{0}}, {scope.names.batch})", key, batch=0, stage=1)
    else:
        scope.emit("jax.random.key_data({0})", key)


def special(scope: Scope) -> None:
    """nan, infinities and negative zeros in some places, for comparisons and extremes; never for sums."""
    value = scope.find(floating, lambda v: v.rank > 0)
    if value is None:
        return
    bad = scope.rng.choice(("jnp.inf", "-jnp.inf", "jnp.nan", "-0.0"))
    special_values = scope.emit(f"jnp.where({{0}} > 1.0, {bad}, {{0}})", scope.stopped(value), smooth=False)
    if special_values:
        over = scope.rng.choice(("max", "min"))
        axis = None if value.batch is None else value.batch
        facts: dict[str, Any] = {} if value.batch is None else {"batch": None, "stage": 2 * (value.stage // 2) + 2}
        if value.folded == (1, 1):
            scope.emit(f"jnp.{over}({{0}}, axis={axis})", special_values, **facts)
        scope.values.remove(special_values)
