"""Moves that change shapes: permutations, folds, slices, pads, products, windows, scans along a dimension.

Most do not mix examples: they work on dimensions without examples. `across` is the table of those that do not.
"""

from __future__ import annotations

import math
from typing import Any

from autopar.bench.fuzz.generator.scope import Scope, Value, batched, exact, floating, of_rank, plain

EXTENTS = (2, 3, 4, 5, 6, 8)


def _dim(scope: Scope, value: Value) -> int | None:
    """A dimension without examples."""
    free = value.free_dims()
    return scope.rng.choice(free) if free else None


def resized(value: Value, d: int, by: int) -> dict[str, Any]:
    """Where the examples of a value are once it has `by` dimensions more from `d` on."""
    return {"batch": value.batch + by if value.batch is not None and value.batch >= d else value.batch}


def transpose(scope: Scope) -> None:
    """A permutation, the examples anywhere."""
    value = scope.find(of_rank(2, 4))
    if value is None:
        return
    order = list(range(value.rank))
    scope.rng.shuffle(order)
    batch = None if value.batch is None else order.index(value.batch)
    scope.emit(f"jnp.transpose({{0}}, {tuple(order)})", value, batch=batch)


def fold(scope: Scope) -> None:
    """Two neighbouring dimensions in one, examples among them or not; or one in two."""
    value = scope.find(of_rank(1, 4))
    if value is None:
        return
    shape, batch, (before, behind) = value.shape, value.batch, value.folded
    if (before, behind) != (1, 1):
        assert batch is not None
        new = (*shape[:batch], *((before,) if before > 1 else ()), scope.names.batch,
               *((behind,) if behind > 1 else ()), *shape[batch + 1 :])  # fmt: skip
        scope.emit(f"{{0}}.reshape({new})", value, batch=batch + (before > 1), folded=(1, 1))
        return
    if value.rank >= 2 and scope.chance(0.7):
        d = scope.rng.randrange(value.rank - 1)
        new = (*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :])
        if batch is None or batch not in (d, d + 1):
            facts: dict[str, Any] = {} if batch is None or batch < d else {"batch": batch - 1}
        else:
            facts = {"batch": d, "folded": (1, shape[d + 1]) if batch == d else (shape[d], 1)}
        scope.emit(f"{{0}}.reshape({new})", value, **facts)
        return
    d = _dim(scope, value)
    if d is not None and shape[d] % 2 == 0:
        new = (*shape[:d], 2, shape[d] // 2, *shape[d + 1 :])
        scope.emit(f"{{0}}.reshape({new})", value, **resized(value, d, 1))


def extend(scope: Scope) -> None:
    """A new dimension, of one or of several equal entries; or one of one entry less."""
    value = scope.find(of_rank(0, 3))
    if value is None:
        return
    ones = [d for d in value.free_dims() if value.shape[d] == 1]
    if ones:
        scope.emit(f"jnp.squeeze({{0}}, {ones[0]})", value, **resized(value, ones[0], -1))
        return
    d = scope.rng.randint(0, value.rank)
    times = scope.rng.choice((1, 2, 3))
    code = f"jnp.expand_dims({{0}}, {d})" if times == 1 else f"jnp.stack([{', '.join(['{0}'] * times)}], {d})"
    if times == 3:
        shape = (*value.shape[:d], 3, *value.shape[d:])
        code = f"jnp.broadcast_to(jnp.expand_dims({{0}}, {d}), {shape})"
    scope.emit(code, value, **resized(value, d, 1))


def along(scope: Scope) -> None:
    """A slice, a pad, a reversal, a repetition along a dimension without examples."""
    value = scope.find(of_rank(1))
    d = value and _dim(scope, value)
    if value is None or d is None:
        return
    n, index = value.shape[d], ", ".join(":" for _ in range(d))
    lead = f"{index}, " if index else ""
    pads = [(0, 0, 0)] * value.rank
    pads[d] = scope.rng.choice(((1, 0, 0), (0, 2, 0), (1, 1, 1), (0, -1, 0), (2, -1, 0)))
    dtype = {"b": "False"}.get(value.kind, "jnp.asarray(0, {0}.dtype)")
    code = scope.rng.choice((
        f"{{0}}[{lead}1:]", f"{{0}}[{lead}::2]", f"{{0}}[{lead}::-1]", f"{{0}}[{lead}{n // 2}]",
        f"lax.rev({{0}}, ({d},))",
        f"lax.slice_in_dim({{0}}, 0, {max(n - 1, 1)}, axis={d})", f"lax.pad({{0}}, {dtype}, {tuple(pads)})",
        f"jnp.repeat({{0}}, 2, axis={d})", f"jnp.concatenate([{{0}}, {{0}}], axis={d})",
        f"jnp.roll({{0}}, 1, axis={d})",
        f"jnp.tile({{0}}, {tuple(2 if i == d else 1 for i in range(value.rank))})", f"jnp.flip({{0}}, {d})",
    ))  # fmt: skip
    drops = code.endswith(f"{lead}{n // 2}]")
    scope.emit(code, value, **resized(value, d, -1 if drops else 0))


def join(scope: Scope) -> None:
    """Two values of one shape behind each other, in a new dimension or in one without examples; or one in pieces."""
    value = scope.find(of_rank(1, 3), lambda v: v.kind in "bif")
    if value is None:
        return
    d = _dim(scope, value)
    if d is not None and value.shape[d] % 2 == 0 and scope.chance(0.4):
        uneven = f"lax.split({{0}}, (1, {value.shape[d] - 1}), {d})"
        scope.emit_all(scope.rng.choice((f"jnp.split({{0}}, 2, axis={d})", uneven)), value)
        return
    other = scope.find(
        lambda v: (v.shape, v.batch, v.folded, v.dtype) == (value.shape, value.batch, value.folded, value.dtype)
    )
    assert other is not None
    if d is None or scope.chance(0.3):
        at = scope.rng.randint(0, value.rank)
        scope.emit(f"jnp.stack([{{0}}, {{1}}], {at})", value, other, **resized(value, at, 1))
        return
    scope.emit(f"jnp.concatenate([{{0}}, {{1}}], axis={d})", value, other)


LETTERS = "bcdefghij"


def product(scope: Scope) -> None:
    """A product with a new parameter, or of two values, as an einsum with its results' dimensions in any order."""
    value = scope.find(floating, plain, of_rank(1, 4), lambda v: bool(v.free_dims()))
    if value is None:
        return
    letters = LETTERS[: value.rank]
    free = [letters[d] for d in value.free_dims()]
    contracted = scope.rng.sample(free, min(len(free), scope.rng.choice((1, 1, 2))))
    kept = [x for x in letters if x not in contracted]
    extents = dict(zip(letters, value.shape, strict=True))
    shared = [x for x in kept if value.batch is None or x != letters[value.batch]]
    also = shared[:1] if scope.chance(0.25) else []  # a batch dimension of the product, not of the step
    right = [*contracted, *also, "z"]
    scope.rng.shuffle(right)
    extents["z"] = scope.rng.choice(EXTENTS)
    other = scope.param([extents[x] for x in right])
    out = [*kept, "z"]
    if scope.chance(0.5):
        scope.rng.shuffle(out)
    facts: dict[str, Any] = {} if value.batch is None else {"batch": out.index(letters[value.batch])}
    form = f"jnp.einsum('{letters},{''.join(right)}->{''.join(out)}', {{0}}, {{1}})"
    scope.emit(form, value, other, **facts)


def attention(scope: Scope) -> None:
    """A product of two values that both have examples: scores of each example, or outer products."""
    value = scope.find(floating, plain, batched, of_rank(2, 3), lambda v: v.folded == (1, 1))
    if value is None:
        return
    other = scope.find(floating, plain, of_rank(2, 3), lambda v: v.folded == (1, 1) and v.batch is not None)
    assert other is not None
    left, right = list(LETTERS[: value.rank]), list(LETTERS[3 : 3 + other.rank])
    assert value.batch is not None
    assert other.batch is not None
    left[value.batch] = right[other.batch] = "a"
    pairs = [(d, e) for d in value.free_dims() for e in other.free_dims() if value.shape[d] == other.shape[e]]
    summed = scope.rng.choice(pairs) if pairs and scope.chance(0.8) else None
    if summed:
        right[summed[1]] = left[summed[0]]
    out = [x for x in dict.fromkeys((*left, *right)) if summed is None or x != left[summed[0]] or x == "a"]
    if scope.chance(0.3):
        scope.rng.shuffle(out)
    form = f"jnp.einsum('{''.join(left)},{''.join(right)}->{''.join(out)}', {{0}}, {{1}})"
    scope.emit(form, value, other, batch=out.index("a"), folded=(1, 1))


def convolution(scope: Scope) -> None:
    """A convolution of one or two spatial dimensions, with strides, dilations, groups, or another order of dimensions.

    Some are gradients of a kernel for each example.
    """
    value = scope.find(floating, plain, batched, of_rank(3, 4), lambda v: v.folded == (1, 1))
    if value is None or value.batch is None:
        return
    rank = value.rank
    order = [value.batch, *value.free_dims()]
    channels = value.shape[order[-1]]
    divisors = [n for n in range(1, channels + 1) if channels % n == 0]
    groups = scope.rng.choice(divisors[1:] or [1]) if scope.chance(0.3) else 1
    spatial = "HW"[: rank - 2]
    kernel = scope.param((*[2] * (rank - 2), channels // groups, groups * 2))
    strides = tuple(scope.rng.choice((1, 1, 2)) for _ in spatial)
    dilation = tuple(scope.rng.choice((1, 1, 2)) for _ in spatial)
    padding = scope.rng.choice(("'SAME'", "'VALID'", str([(1, 0)] * (rank - 2))))
    lhs_dilation = dilation if padding[0] == "[" else (1,) * (rank - 2)
    out = [*f"N{spatial}C"]
    if scope.chance(0.3):
        scope.rng.shuffle(out)
    options = (
        f"{strides}, {padding}, lhs_dilation={lhs_dilation}, feature_group_count={groups}, "
        f"dimension_numbers=('N{spatial}C', '{spatial}IO', '{''.join(out)}')"
    )
    operand = f"jnp.transpose({{0}}, {tuple(order)})"
    if scope.chance(0.15):
        loss = f"lambda k, x: jnp.sum(jnp.sin(lax.conv_general_dilated(x[None], k, {options})))"
        scope.emit(f"jax.vmap(jax.grad({loss}), (None, 0))({{1}}, {operand})", value, kernel, batch=0)
    else:
        scope.emit(f"lax.conv_general_dilated({operand}, {{1}}, {options})", value, kernel, batch=out.index("N"))


def window(scope: Scope) -> None:
    """A pool over a dimension without examples, with its gradient where it is smooth."""
    value = scope.find(floating, of_rank(2, 4))
    d = value and _dim(scope, value)
    if value is None or d is None or value.shape[d] < 2:
        return
    size = tuple(2 if i == d else 1 for i in range(value.rank))
    strides = tuple(scope.rng.choice((1, 2)) if i == d else 1 for i in range(value.rank))
    begin, operation = scope.rng.choice((("-jnp.inf", "lax.max"), ("0.0", "lax.add"), ("jnp.inf", "lax.min")))
    padding = scope.rng.choice(("SAME", "VALID"))
    if operation == "lax.min":
        value = scope.stopped(value)
    scope.emit(f"lax.reduce_window({{0}}, {begin}, {operation}, {size}, {strides}, '{padding}')", value)


CUMULATIVE = ("lax.cumsum", "lax.cumprod", "lax.cummax", "lax.cummin", "lax.cumlogsumexp")


def cumulate(scope: Scope) -> None:
    """A running sum, product, extreme along a dimension without examples."""
    value = scope.find(exact, of_rank(1))
    d = value and _dim(scope, value)
    if value is None or d is None:
        return
    how = scope.rng.choice(CUMULATIVE[: 5 if value.kind == "f" else 4])
    bounded = "jnp.tanh({0})" if value.kind == "f" else "{0}"
    scope.emit(f"{how}({bounded}, axis={d}, reverse={scope.chance(0.3)})", value)


#: Sorting, and selecting of one entry: the expression, and by how many dimensions its result has more.
ORDERS = (("jnp.sort({0}, axis={1})", 0), ("jnp.argsort({0}, axis={1})", 0), ("jnp.argmax({0}, axis={1})", -1),
          ("jnp.argmin({0}, axis={1})", -1), ("jnp.median({0}, axis={1})", -1))  # fmt: skip


def order(scope: Scope) -> None:
    """Sorting and selecting along a dimension without examples."""
    value = scope.find(exact, of_rank(1))
    d = value and _dim(scope, value)
    if value is None or d is None:
        return
    # XLA on CPU compiles no top_k of four bits.
    if scope.chance(0.3) and value.batch != value.rank - 1 and not value.dtype.endswith("int4"):
        scope.emit_all(f"lax.top_k({{0}}, {max(1, value.shape[-1] - 1)})", value)
        return
    if scope.chance(0.3):
        places = f"lax.broadcasted_iota(jnp.int32, {{0}}.shape, {d})"
        scope.emit_all(f"lax.sort(({{0}}, {places}), dimension={d}, num_keys=1)", value)
        return
    form, by = scope.rng.choice(ORDERS)
    scope.emit(form.replace("{1}", str(d)), value, **resized(value, d, by))


REDUCTIONS = ("jnp.sum({0}, {1})", "jnp.mean({0}, {1})", "jnp.max({0}, {1})", "jnp.min({0}, {1})",
              "jnp.prod(jnp.tanh({0}), {1})", "jax.nn.logsumexp({0}, {1})", "jnp.var({0}, {1})")  # fmt: skip
INTEGER_REDUCTIONS = ("jnp.sum({0}, {1}, dtype={0}.dtype)", "jnp.max({0}, {1})", "jnp.min({0}, {1})",
                      "jnp.prod({0}, {1}, dtype={0}.dtype)", "lax.reduce_or({0}, ({1},))",
                      "lax.reduce_and({0}, ({1},))", "lax.reduce_xor({0}, ({1},))")  # fmt: skip
BOOL_REDUCTIONS = ("jnp.any({0}, {1})", "jnp.all({0}, {1})", "jnp.sum({0}, {1})", "lax.reduce_xor({0}, ({1},))")


def reduce(scope: Scope) -> None:
    """A reduction over a dimension without examples."""
    value = scope.find(of_rank(1), lambda v: v.kind in "bi" or v.dtype == "float64")
    d = value and _dim(scope, value)
    if value is None or d is None:
        return
    table = {"b": BOOL_REDUCTIONS, "i": INTEGER_REDUCTIONS, "f": REDUCTIONS}[value.kind]
    scope.emit(scope.rng.choice(table).replace("{1}", str(d)), value, **resized(value, d, -1))


NORMS = ("jax.nn.softmax({0}, axis={1})", "jax.nn.log_softmax({0}, axis={1})",
         "{0} - jnp.mean({0}, axis={1}, keepdims=True)", "jax.nn.standardize({0}, axis={1})",
         "{0} / (1.0 + jnp.max(jnp.abs({0}), axis={1}, keepdims=True))")  # fmt: skip


def normalise(scope: Scope) -> None:
    """A normalisation along a dimension without examples."""
    value = scope.find(floating, of_rank(1), lambda v: math.prod(v.shape) > 1)
    d = value and _dim(scope, value)
    if value is not None and d is not None and value.shape[d] > 1:
        scope.emit(scope.rng.choice(NORMS).replace("{1}", str(d)), value)


#: Of {0}, of which every example has one or several, times itself and made positive definite.
SQUARE = "jnp.einsum('...ij,...kj->...ik', {0}, {0}) + 2.0 * jnp.eye({n})"
DECOMPOSED = (
    "jnp.linalg.cholesky({s})", "jnp.linalg.slogdet({s})[1]", "jnp.linalg.eigvalsh({s})",
    "jax.scipy.linalg.solve_triangular(jnp.tril({s}), {0}, lower=True)", "jnp.linalg.inv({s})", "jnp.linalg.det({s})",
    "jnp.abs(jnp.linalg.qr({s})[1])", "jnp.linalg.solve({s}, {0})",
)  # fmt: skip


def decompose(scope: Scope) -> None:
    """A decomposition of a small matrix of each example."""
    value = scope.find(floating, plain, of_rank(2, 4), lambda v: v.batch is None or v.batch < v.rank - 2)
    if value is None or not 0 < value.shape[-2] <= value.shape[-1]:
        return
    bounded = scope.emit("jnp.tanh({0})", value)
    code = scope.rng.choice(DECOMPOSED).replace("{s}", f"({SQUARE})").replace("{n}", str(value.shape[-2]))
    if bounded is not None:
        scope.emit(code, bounded)


def spectrum(scope: Scope) -> None:
    """A Fourier transform along the last dimension, and back to floats."""
    value = scope.find(floating, of_rank(1), lambda v: v.batch != v.rank - 1)
    if value is not None and value.shape[-1]:
        scope.emit(scope.rng.choice(("jnp.abs(jnp.fft.rfft({0})) ** 2", "jnp.real(jnp.fft.fft({0}))")), value)


ACROSS = (
    "jnp.cumsum({0}, axis={1})", "jnp.sort({0}, axis={1})", "jnp.roll({0}, 1, axis={1})", "jnp.flip({0}, {1})",
    "lax.cummax({0}, axis={1})", "{0} - jnp.mean({0}, axis={1}, keepdims=True).astype({0}.dtype)",
    "jnp.argsort({0}, axis={1})", "jnp.concatenate([{0}, {0}], axis={1})",
    "{0} == jnp.max({0}, axis={1}, keepdims=True)", "lax.cumsum({0}, axis={1}, reverse=True)",
)  # fmt: skip


def across(scope: Scope) -> None:
    """A reduction over the examples, broadcast to each: exact, though not in microbatches."""
    value = scope.find(batched, exact, lambda v: v.folded == (1, 1))
    if value is None:
        return
    form = scope.rng.choice(ACROSS)
    code = form.replace("{1}", str(value.batch))
    scope.emit(code, scope.stopped(value), mixed=True, smooth=False, folded=(1, 2) if "concat" in form else (1, 1))
