"""Small uses of every primitive in the table of the microbatch analysis: what `soundness.py` puts through it.

A use is written as the shapes of its operands and a function of the extents and the operands:

    ("ab bc", lambda n, x, y: lax.dot(x, y))

Each letter is an extent from `EXTENTS`. ":i" after a shape stands for indices in and out of bounds, ":p" for booleans,
":k" for raw keys, ":u" for uint32; without any the operand has the dtype under test. Indices are int32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import primitives
from jax.extend.random import threefry2x32_p

from tests.rules.test_partitioned import PRODUCT, TWICE

#: name -> extents by letter: even ones, which fall into two blocks; blocks of one; a dimension of one or none besides.
EXTENTS: Mapping[str, Mapping[str, int]] = {
    "even": {"a": 4, "b": 6, "c": 2},
    "one": {"a": 2, "b": 1, "c": 4},
    "none": {"a": 4, "b": 0, "c": 2},
}
DTYPES = ("bool", "int8", "uint8", "int32", "uint32", "float16", "bfloat16", "float32", "float64", "complex64")


class Use(NamedTuple):
    """One use of a primitive; `call` takes the extents by letter and the operands."""

    primitive: str
    operands: tuple[str, ...]
    call: Callable[..., Any]


def _uses(**uses: Any) -> list[Use]:
    many = {k: v if isinstance(v, list) else [v] for k, v in uses.items()}
    return [Use(k.replace("__", "-"), tuple(shapes.split()), call) for k, v in many.items() for shapes, call in v]


def _plain(shapes: str, function: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    return shapes, lambda n, *xs: function(*xs)


_UNARY = """abs acos acosh asin asinh atan atanh bessel_i0e cbrt ceil clz conj cos cosh digamma erf erf_inv erfc exp
    exp2 expm1 floor imag is_finite lgamma log log1p logistic neg population_count real round rsqrt sign sin sinh sqrt
    square tan tanh"""
_BINARY = """add atan2 complex div eq ge gt igamma igammac le lt max min mul mulhi ne nextafter pow rem
    shift_left shift_right_arithmetic shift_right_logical sub"""


def _named(names: str, shapes: str) -> list[Use]:
    """Functions of jax.lax that have the primitive's name, as far as this version has them."""
    return [_use(name, shapes, getattr(lax, name)) for name in names.split() if hasattr(lax, name)]


def _use(name: str, shapes: str, function: Callable[..., Any]) -> Use:
    return Use(name, tuple(shapes.split()), lambda n, *xs: function(*xs))


def _bound(name: str) -> Callable[..., Any]:
    """The primitive itself, without what jax.lax puts around it."""
    return lambda n, *xs, **params: getattr(primitives, f"{name}_p").bind(*xs, **params)


def _reduced(name: str) -> list[tuple[str, Callable[..., Any]]]:
    reduce = getattr(lax, name)
    return [("ab", lambda n, x: reduce(x, (0,))), ("abc", lambda n, x: reduce(x, (0, 2)))]


def _index(name: str) -> list[tuple[str, Callable[..., Any]]]:
    return [("ab", lambda n, x, axis=axis: getattr(lax, name)(x, axis, jnp.int32)) for axis in (0, 1)]


def _cumulated(name: str) -> list[tuple[str, Callable[..., Any]]]:
    return [("ab", lambda n, x, r=r: getattr(lax, name)(x, axis=1, reverse=r)) for r in (False, True)]


def _square(function: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    return "acc", lambda n, x: function(x)


MODES = ("clip", "fill", "promise_in_bounds")


def _gathers() -> list[tuple[str, Callable[..., Any]]]:
    gathered: list[tuple[str, Callable[..., Any]]] = []
    for mode in MODES:
        shape = "b:r" if mode == "promise_in_bounds" else "b:i"
        gathered += [
            (f"ac {shape}", lambda n, x, i, mode=mode: _rows(x, i, mode)),
            (f"ca {shape}", lambda n, x, i, mode=mode: _rows(x, i, mode)),
            (f"ab a:{shape[-1]}", lambda n, x, i, mode=mode: _batched(x, i, mode)),
            ("ac a:i", lambda n, x, i, mode=mode: x.at[jnp.arange(x.shape[0]), i % max(x.shape[1], 1)].get(mode=mode)),
        ]
    gathered += [("ac b:i", lambda n, x, i, fill=fill: _rows(x, i, "fill", fill)) for fill in (0, 1)]
    gathered.append(("ac c:i", lambda n, x, i: _window(x, i)))
    return gathered


def _rows(x: Any, i: Any, mode: str, fill: Any = None) -> Any:
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(x, i[:, None], numbers, (1, x.shape[1]), mode=mode, fill_value=fill)


def _batched(x: Any, i: Any, mode: str) -> Any:
    numbers = lax.GatherDimensionNumbers((), (1,), (1,), operand_batching_dims=(0,), start_indices_batching_dims=(0,))
    return lax.gather(x, i[:, None], numbers, (1, 1), mode=mode)


def _window(x: Any, i: Any) -> Any:
    """Whole columns, from a start that says nothing: as many rows as there are."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,))
    return lax.gather(x, i[:, None], numbers, x.shape, mode="clip")


_ROWS = lax.ScatterDimensionNumbers((1,), (0,), (0,))
_CELLS = lax.ScatterDimensionNumbers((), (1,), (1,), operand_batching_dims=(0,), scatter_indices_batching_dims=(0,))


def _scatters(name: str) -> list[tuple[str, Callable[..., Any]]]:
    scatter = getattr(lax, name)
    gathered: list[tuple[str, Callable[..., Any]]] = []
    for mode in ("clip", "drop", "promise_in_bounds"):
        kind = "r" if mode == "promise_in_bounds" else "i"
        rows = f"a:{kind}" if name != "scatter" else "a:d"
        gathered += [
            (f"bc {rows} ac", lambda n, x, i, u, mode=mode: scatter(x, i[:, None], u, _ROWS, mode=mode)),
            (f"ab a:{kind} a", lambda n, x, i, u, mode=mode: scatter(x, i[:, None], u, _CELLS, mode=mode)),
            ("ac a:i a", lambda n, x, i, u, mode=mode: _own_row(scatter, x, i, u, mode)),
        ]
    return gathered


def _own_row(scatter: Callable[..., Any], x: Any, i: Any, u: Any, mode: str) -> Any:
    numbers = lax.ScatterDimensionNumbers((), (0, 1), (0, 1))
    columns = jnp.stack([jnp.arange(x.shape[0], dtype=i.dtype), i], 1)
    return scatter(x, columns, u, numbers, mode=mode)


def _pooled(x: Any) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError("differentiated")
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 1), "VALID")


def _zero(x: Any) -> Any:
    return jnp.zeros((), x.dtype)


def _pool(init: Any, function: Callable[..., Any]) -> list[tuple[str, Callable[..., Any]]]:
    windows = (((1, 3), (1, 1), ((0, 0), (1, 1))), ((1, 2), (1, 2), ((0, 0), (0, 0))))

    def pooled(x: Any, window: Any) -> Any:
        return lax.reduce_window(x, np.asarray(init(x.dtype)).astype(x.dtype), function, *window)

    return [("ab", lambda n, x, w=w: pooled(x, w)) for w in windows]


def _triangular_solves() -> list[tuple[str, Callable[..., Any]]]:
    """Several sides are finite: whether a zero times an infinity is nan depends on how many sides there are."""

    def solve(x: Any, y: Any, left: bool) -> Any:
        return lax.linalg.triangular_solve(_definite(x), y, left_side=left, transpose_a=not left)

    return [
        ("acc ac", lambda n, x, y: solve(x, y[..., None], True)),
        ("acc acb", lambda n, x, y: solve(x, _tame(y), True)),
        ("cc ca", lambda n, x, y: solve(x, _tame(y), True)),
        ("cc ac", lambda n, x, y: solve(x, _tame(y), False)),
    ]


def _convolutions() -> list[tuple[str, Callable[..., Any]]]:
    """Not padded: what zeros in the padding make of infinite weights is up to the backend's algorithm.

    Groups are finite: JAX 0.12 may compute them as one convolution with zeros between them, where infinities make nan.
    """

    def conv(x: Any, k: Any, numbers: tuple[str, str, str], **more: Any) -> Any:
        x, k = (_tame(x), _tame(k)) if more and jnp.issubdtype(x.dtype, jnp.inexact) else (x, k)
        return lax.conv_general_dilated(x, k, (1,), "VALID", dimension_numbers=numbers, **more)

    plain = ("NCW", "OIW", "NCW")
    return [
        ("acb acc", lambda n, x, k: conv(x, k, plain)),
        ("bca cca", lambda n, x, k: conv(x, k, ("WNC", "OWI", "CWN"))),
        ("acb acc", lambda n, x, k: conv(x, k[:, :1], plain, feature_group_count=n["c"])),
        ("cab cac", lambda n, x, k: conv(x, k, plain, batch_group_count=n["c"])),
        ("cab acc", lambda n, x, k: conv(x, k[:, :1], plain, feature_group_count=n["a"])),
        ("cab acc", lambda n, x, k: conv(x, k[:, :1], ("NCW", "OIW", "CWN"), feature_group_count=n["a"])),
        ("acb acc", lambda n, x, k: conv(x, k, plain, batch_group_count=n["a"])),
        ("bca cac", lambda n, x, k: conv(x, k[:1], ("WNC", "IOW", "NWC"), feature_group_count=n["a"])),
        ("cab acc", lambda n, x, k: conv(x[:, :1], k[:, :1], plain)),
    ]


def _dots() -> list[tuple[str, Callable[..., Any]]]:
    def dot(contracted: Any, batch: Any = ((), ()), **more: Any) -> Callable[..., Any]:
        return lambda n, x, y: lax.dot_general(x, y, (contracted, batch), **more)

    gathered: list[tuple[str, Callable[..., Any]]] = [
        ("ab bc", dot(((1,), (0,)))),
        ("abc acb", dot(((2,), (1,)), ((0,), (0,)))),
        ("ba bc", dot(((0,), (0,)))),
    ]
    return gathered + [("ba bc", dot(((0,), (0,)), preferred_element_type=jnp.dtype(t))) for t in ("int32", "float32")]


def _horner() -> list[Use]:
    if not hasattr(lax, "polynomial"):
        return []
    return [Use("polynomial", ("ab", "ab"), lambda n, x, y: lax.polynomial(x, (y, y[:1], y)))]


def _keyed(function: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    return "ac:k", lambda n, k: function(jax.random.wrap_key_data(k[..., :2]))


def _bits(key: Any) -> Any:
    return jax.vmap(lambda k: jax.random.bits(k, (3,)))(key)


def _folded(keys: Any, numbers: Any) -> Any:
    return jax.random.key_data(jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys[:, :2]), numbers))


def _split_keys(key: Any) -> Any:
    return jax.random.key_data(jax.vmap(lambda k: jax.random.split(k, 3))(key))


def _pads(*padding: Any) -> list[tuple[str, Callable[..., Any]]]:
    fills = [lambda x: _zero(x), lambda x: jnp.ones((), x.dtype)]
    return [("ab", lambda n, x, p=p, f=f: lax.pad(x, f(x), p)) for p in padding for f in fills]


def _reductions() -> dict[str, Any]:
    names = ("sum", "max", "min", "or", "and", "prod", "xor")
    return {f"reduce_{name}": _reduced(f"reduce_{name}") for name in names}


def _kernels() -> list[tuple[str, Callable[..., Any]]]:
    """Rows in runs of one and two beside a row for all of them, and blocks that change their places."""

    def chosen(x: Any, y: Any, out: Any) -> None:
        out[...] = jnp.where(x[...] == y[...], x[...], y[...])

    def copied(x: Any, out: Any, again: Any) -> None:
        out[...], again[...] = x[...][0], x[...]

    def rows(n: Mapping[str, int], x: Any, y: Any, size: int) -> Any:
        specs = [pl.BlockSpec((size, n["c"]), lambda i: (i, 0)), pl.BlockSpec((1, n["c"]), lambda i: (0, 0))]
        grid, like = (n["a"] // size,), jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(chosen, like, grid=grid, in_specs=specs, out_specs=specs[0], interpret=True)(x, y[:1])

    def moved(n: Mapping[str, int], x: Any) -> Any:
        spec = pl.BlockSpec((1, n["c"], 1), lambda i, j: (i, 0, j))
        out = [pl.BlockSpec((n["c"], 1), lambda i, j: (j, i)), spec]
        like = [jax.ShapeDtypeStruct((n["c"] * n["b"], n["a"]), x.dtype), jax.ShapeDtypeStruct(x.shape, x.dtype)]
        return pl.pallas_call(copied, like, grid=(n["a"], n["b"]), in_specs=[spec], out_specs=out, interpret=True)(x)

    return [*[("ac bc", lambda n, x, y, k=k: rows(n, x, y, k)) for k in (1, 2)], ("acb", moved)]


USES: tuple[Use, ...] = (
    *_named(_UNARY, "ab"),
    *_named(_BINARY, "ab ab"),
    Use("sharding_constraint", ("ab",), lambda n, x: lax.with_sharding_constraint(x, _one_device())),
    *_named("log2 one_minus_square", "ab"),
    *_horner(),
    *_named("select_n", "ab:p ab ab"),
    *_named("clamp regularized_incomplete_beta", "ab ab ab"),
    *[Use("convert_element_type", ("ab",), lambda n, x, t=t: _converted(x, t)) for t in DTYPES],
    *[Use("bitcast_convert_type", (s,), lambda n, x, t=t: lax.bitcast_convert_type(x, t))
      for t in ("uint8", "uint16", "uint32", "int32", "float32") for s in ("ab", "ba", "bac", "bca")],
    *_uses(
        **{"and": _plain("ab ab", lax.bitwise_and), "or": _plain("ab ab", lax.bitwise_or)},
        **{"xor": _plain("ab ab", lax.bitwise_xor), "not": _plain("ab", lax.bitwise_not)},
        add_any=("ab ab", _bound("add_jaxvals")),
        copy=[("ab", _bound("copy"))],
        name=("ab", lambda n, x: checkpoint_name(x, "kept")),
        xla_metadata_value=("ab", lambda n, x: set_xla_metadata(x, tag="kept")),
        betainc=[],
        regularized_incomplete_beta=_plain("ab ab ab", lax.betainc),
        bessel_i1e=_plain("ab", lax.bessel_i1e),
        polygamma=_plain("ab ab", lax.polygamma),
        zeta=_plain("ab ab", lax.zeta),
        eq_to=("ab ab", _bound("eq_to")),
        le_to=("ab ab", _bound("le_to")),
        lt_to=("ab ab", _bound("lt_to")),
        integer_pow=[("ab", lambda n, x, p=p: lax.integer_pow(x, p)) for p in (3, -1)],
        reduce_precision=("ab", lambda n, x: lax.reduce_precision(x, 5, 4)),
        threefry2x32=("b:u b:u a:u a:u", lambda n, p, q, x, y: threefry2x32_p.bind(p[:1] + x, q[:1] + x, x, y)
                      if n["b"] else threefry2x32_p.bind(x, y, x, y)),
        optimization_barrier=("ab ab", lambda n, x, y: lax.optimization_barrier((x, y))),
        broadcast_in_dim=[
            ("ab", lambda n, x: lax.broadcast_in_dim(x, (n["c"], n["a"], n["b"]), (1, 2))),
            ("ac", lambda n, x: lax.broadcast_in_dim(x, (n["a"], n["b"], n["c"]), (0, 2))),
        ],
        reshape=[
            ("acb", lambda n, x: lax.reshape(x, (n["a"] * n["c"], n["b"]))),
            ("bac", lambda n, x: lax.reshape(x, (n["b"] * n["a"] * n["c"],))),
            ("cab", lambda n, x: lax.reshape(x, (n["a"], n["c"], n["b"]))),
            ("cab", lambda n, x: lax.reshape(x, (n["c"], n["a"] * n["b"]), (0, 1, 2))),
            ("bca", lambda n, x: lax.reshape(x, (n["a"] * n["c"], n["b"]), (2, 1, 0))),
            ("ab", lambda n, x: lax.reshape(x, (1, n["a"], 1, n["b"]))),
        ],
        transpose=("abc", lambda n, x: lax.transpose(x, (2, 0, 1))),
        squeeze=("ab", lambda n, x: lax.squeeze(x[:, :1], (1,)) if n["b"] else lax.squeeze(x[:1], (0,))),
        concatenate=[
            ("ab ac", lambda n, x, y: lax.concatenate([x, y], 1)),
            ("ab cb", lambda n, x, y: lax.concatenate([x, y], 0)),
        ],
        split=[
            ("ab", lambda n, x: lax.split(x, (n["b"] // 2, n["b"] - n["b"] // 2), 1)),
            ("ab", lambda n, x: lax.split(x, (n["a"] // 2, n["a"] // 2), 0)),
        ],
        unstack=("abc", lambda n, x: lax.unstack(x, axis=2)),
        stack=("ab ab", lambda n, x, y: lax.stack([x, y], axis=1)),
        tile=[("ab", lambda n, x: lax.tile(x, (1, 2))), ("ab", lambda n, x: lax.tile(x, (2, 1)))],
        pad=_pads(
            ((0, 0, 0), (1, 2, 1)),
            ((1, 0, 0), (0, 0, 0)),
            ((0, 0, 0), (-1, 0, 0)),
            ((2, 4, 0), (0, 0, 0)),
            ((-2, 2, 0), (0, 0, 0)),
        ),
        slice=[
            ("ab", lambda n, x: lax.slice(x, (0, 0), (n["a"], n["b"] // 2))),
            ("ac", lambda n, x: lax.slice(x, (1, 0), (n["a"], n["c"]), (1, 2))),
            ("ac", lambda n, x: lax.slice(x, (n["a"] // 2, 0), (n["a"], n["c"]))),
        ],
        dynamic_slice=[("ac :i", lambda n, x, i: lax.dynamic_slice(x, (i, i), (n["a"], 1)))],
        dynamic_update_slice=[("ac a1 :i", lambda n, x, y, i: lax.dynamic_update_slice(x, y, (i, i)))],
        rev=("ab", lambda n, x: lax.rev(x, (1,))),
        **_reductions(),
        argmax=_index("argmax"),
        argmin=_index("argmin"),
        reduce_window_sum=_pool(lambda t: 0, lax.add),
        reduce_window_max=_pool(lambda t: -jnp.inf if jnp.issubdtype(t, jnp.inexact) else jnp.iinfo(t).min, lax.max),
        reduce_window_min=_pool(lambda t: jnp.inf if jnp.issubdtype(t, jnp.inexact) else jnp.iinfo(t).max, lax.min),
        select_and_scatter_add=("ac ac", lambda n, x, y: jax.vjp(_pooled, x)[1](y[:, : n["c"] - 1])),
        select_and_gather_add=("ac ac", lambda n, x, y: jax.jvp(_pooled, (x,), (y,))),
        cumsum=_cumulated("cumsum"),
        cummax=_cumulated("cummax"),
        cummin=_cumulated("cummin"),
        cumprod=_cumulated("cumprod"),
        cumlogsumexp=_cumulated("cumlogsumexp"),
        sort=[
            ("ab ab", lambda n, x, y: lax.sort((x, y), dimension=1, num_keys=1)),
            ("ab", lambda n, x: lax.sort(x, dimension=0)),
        ],
        top_k=("ab", lambda n, x: lax.top_k(x, min(n["b"], 2))),
        fft=("acb", lambda n, x: lax.fft(x, "fft", (n["c"], n["b"]))),
        cholesky=_square(lambda x: lax.linalg.cholesky(_definite(x), symmetrize_input=False)),
        triangular_solve=_triangular_solves(),
        tridiagonal_solve=[
            ("ab abc", lambda n, x, y: lax.linalg.tridiagonal_solve(*_bands(x), y)),
            ("c ca", lambda n, x, y: lax.linalg.tridiagonal_solve(*_bands(x), y)),
        ],
        lu=_square(lambda x: lax.linalg.lu(_definite(x))),
        qr=_square(lambda x: jnp.abs(lax.linalg.qr(_definite(x))[1])),
        eigh=_square(lambda x: lax.linalg.eigh(_definite(x), symmetrize_input=False)[1]),
        svd=_square(lambda x: lax.linalg.svd(_definite(x), compute_uv=False)),
        householder_product=("acc ac", lambda n, x, y: lax.linalg.householder_product(_tame(x), _tame(y))),
        custom_partitioning=[_plain("ab", TWICE), _plain("ab bc", PRODUCT)],
        dot_general=_dots(),
        conv_general_dilated=_convolutions(),
        gather=_gathers(),
        scatter=_scatters("scatter"),
        scatter__add=_scatters("scatter_add"),
        scatter__mul=_scatters("scatter_mul"),
        scatter__min=_scatters("scatter_min"),
        scatter__max=_scatters("scatter_max"),
        random_bits=_keyed(_bits),
        random_split=_keyed(_split_keys),
        random_wrap=_keyed(jax.random.key_data),
        random_unwrap=_keyed(jax.random.key_data),
        random_seed=("a:u", lambda n, x: jax.random.key_data(jax.vmap(jax.random.key)(x))),
        random_fold_in=("ac:k a:u", lambda n, k, x: _folded(k, x)),
        pallas_call=_kernels(),
    ),
)  # fmt: skip


def _one_device() -> Any:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _converted(x: Any, dtype: str) -> Any:
    """Without jax.lax, which warns of imaginary parts that are lost."""
    return primitives.convert_element_type_p.bind(x, new_dtype=jnp.dtype(dtype), weak_type=False, sharding=None)


def _tame(x: Any) -> Any:
    """Finite and small."""
    return jnp.where(jnp.isfinite(x), x, jnp.ones((), x.dtype)) / 4


def _bands(x: Any) -> tuple[Any, Any, Any]:
    """The three diagonals of systems in which the middle one is the largest."""
    small, last = _tame(x), x.shape[-1] - 1
    at = jnp.arange(x.shape[-1])
    zero = jnp.zeros((), x.dtype)
    return jnp.where(at > 0, small, zero), small + jnp.asarray(8, x.dtype), jnp.where(at < last, small, zero)


def _definite(x: Any) -> Any:
    """Symmetric, positive, with eigenvalues apart from each other."""
    small = _tame(x).real.astype(x.dtype)
    rows = jnp.arange(1, 1 + x.shape[-1]) * 8
    return small + jnp.swapaxes(small, -1, -2) + jnp.diag(rows).astype(x.dtype)
