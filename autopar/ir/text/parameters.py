"""Parameters of operations as Python expressions: `write` and `read` are inverse to each other.

    numbers, strings, None, True, nan, inf      as in Python
    tuples, lists, sets                         as in Python
    dtypes                                      float32
    members of JAX's enumerations               GatherScatterMode.CLIP
    dimension numbers                           GatherDimensionNumbers(offset_dims=(1,), ...)
    meshes and shardings, without devices       AbstractMesh({'x': 2}), NamedSharding({'x': 2}, P('x', None))
    jaxprs                                      jaxpr0 (closed), open0 (open): names of blocks below the operation

Anything else, such as a callback, is written as opaque('function'), which `read` refuses. A parameter is left out if it
has the value that `usual` gives it: a default, or the shape or dtype of the result.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autopar import jax_compat

_DIMENSIONS = (
    jax.lax.ConvDimensionNumbers,
    jax.lax.GatherDimensionNumbers,
    jax.lax.RaggedDotDimensionNumbers,
    jax.lax.ScatterDimensionNumbers,
)
_ENUMERATIONS = (
    jax.lax.AccuracyMode,
    jax.lax.FftType,
    jax.lax.GatherScatterMode,
    jax.lax.Precision,
    jax.lax.RandomAlgorithm,
    jax.lax.RoundingMethod,
    jax.memory.Space,
)
_CLASSES: Mapping[str, Any] = MappingProxyType({c.__name__: c for c in (*_DIMENSIONS, *_ENUMERATIONS)})
_NUMBERS: Mapping[str, float] = MappingProxyType({"nan": math.nan, "inf": math.inf})

_WITH_ACCURACY = (
    *("cbrt", "cos", "exp", "exp2", "expm1", "log", "log1p", "logistic", "rsqrt", "sin", "sqrt", "tan", "tanh"),
)
_SCATTER = {"update_consts": (), "indices_are_sorted": False, "unique_indices": False}
_PRODUCT = {"precision": None, "preferred_element_type": None, "out_sharding": None}

#: Usual values that the type of the first result has.
_SHAPE, _DTYPE = "the result's shape", "the result's dtype"

#: Primitive -> parameters that are not written if they have this value. Tried on JAX 0.10.2.
_USUAL: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        **{name: {"accuracy": None} for name in _WITH_ACCURACY},
        **dict.fromkeys(("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul"), _SCATTER),
        **{name: {"reverse": False} for name in ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")},
        **{name: {"index_dtype": _DTYPE} for name in ("argmax", "argmin")},
        "bitcast_convert_type": {"new_dtype": _DTYPE},
        "broadcast_in_dim": {"shape": _SHAPE, "broadcast_dimensions": (), "sharding": None},
        "conv_general_dilated": {**_PRODUCT, "feature_group_count": 1, "batch_group_count": 1},
        "convert_element_type": {"new_dtype": _DTYPE, "weak_type": False, "sharding": None},
        "dot_general": _PRODUCT,
        "gather": {"unique_indices": False, "indices_are_sorted": False, "fill_value": None},
        "iota": {"dtype": _DTYPE, "shape": _SHAPE, "dimension": 0, "sharding": None},
        "mul": {"out_dtype": None},
        "reduce_sum": {"out_sharding": None},
        "remat2": {"prevent_cse": True, "differentiated": False, "policy": None},
        "reshape": {"new_sizes": _SHAPE, "dimensions": None, "sharding": None},
        "scan": {"reverse": False, "unroll": 1},
        "sharding_constraint": {"layout": None, "unconstrained_dims": frozenset()},
        "slice": {"strides": None},
    }
)


def usual(primitive: str, shape: Sequence[int], dtype: str) -> dict[str, Any]:
    """Parameters of a primitive that are not written if they have this value; shape and dtype of the first result."""
    values = _USUAL.get(primitive, {})
    return {k: tuple(shape) if v is _SHAPE else dtype_of(dtype) if v is _DTYPE else v for k, v in values.items()}


class UnreadableError(ValueError):
    """An expression that is no parameter; the message says which part."""


def write(value: Any, name_of_jaxpr: Callable[[Any], str]) -> str:
    """A parameter as an expression; `name_of_jaxpr` names the block of a jaxpr that is part of it."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, int | float | complex | str):
        return repr(value)
    if isinstance(value, jex.Jaxpr | jex.ClosedJaxpr):
        return name_of_jaxpr(value)
    if isinstance(value, np.dtype):
        return str(value)
    if isinstance(value, NamedSharding):
        return f"NamedSharding({dict(value.mesh.shape)!r}, P{tuple(value.spec)!r})"
    if isinstance(value, Mesh | AbstractMesh):
        return f"AbstractMesh({dict(value.shape)!r})"
    return _write_composite(value, lambda inner: write(inner, name_of_jaxpr))


def _write_composite(value: Any, inner: Callable[[Any], str]) -> str:
    kind = type(value).__name__
    if isinstance(value, _DIMENSIONS):
        return f"{kind}({', '.join(f'{k}={inner(v)}' for k, v in _fields(value).items())})"
    if type(value) is tuple:
        return f"({', '.join(map(inner, value))}{',' if len(value) == 1 else ''})"
    if type(value) is list:
        return f"[{', '.join(map(inner, value))}]"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(inner, value)))}}}" if value else "set()"
    return f"opaque({kind!r})"


def _fields(record: Any) -> Mapping[str, Any]:
    """Fields of a named tuple or dataclass that differ from their defaults."""
    if not isinstance(record, tuple):
        return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    named: Any = record
    return {k: v for k, v in named._asdict().items() if (k, v) not in named._field_defaults.items()}


def read(text: str, jaxprs: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters from "name=expression, ...".

    Args:
        text: what is between the brackets of an operation.
        jaxprs: name of a block -> the jaxpr.

    Raises:
        UnreadableError: it is no such list, or a value is opaque.
    """
    try:
        call = ast.parse(f"f({text})", mode="eval").body
    except SyntaxError as error:
        raise UnreadableError(f"parameters '{text}' are no list of name=value: {error.msg}") from None
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise UnreadableError(f"parameters '{text}' are no list of name=value")
    by_name: dict[str, Any] = {}
    for keyword in call.keywords:
        try:
            by_name[str(keyword.arg)] = _Reader(jaxprs).read(keyword.value)
        except UnreadableError as error:
            raise UnreadableError(f"parameter '{keyword.arg}': {error}") from None
    return by_name


class _Reader:
    """Evaluates the expressions that `write` gives, and no others."""

    def __init__(self, jaxprs: Mapping[str, Any]) -> None:
        self.jaxprs = jaxprs

    def read(self, node: ast.expr) -> Any:
        read = _NODES.get(type(node))
        if read is None:
            raise UnreadableError(f"'{ast.unparse(node)}' is no value")
        return read(self, node)

    def name(self, node: ast.Name) -> Any:
        for table in (self.jaxprs, _NUMBERS):
            if node.id in table:
                return table[node.id]
        try:
            return dtype_of(node.id)
        except TypeError:
            raise UnreadableError(f"'{node.id}' is no dtype and no block below the operation") from None

    def member(self, node: ast.Attribute) -> Any:
        kind = _CLASSES.get(ast.unparse(node.value))
        if kind is None or not hasattr(kind, node.attr):
            raise UnreadableError(
                f"'{ast.unparse(node)}' is no member of {', '.join(c.__name__ for c in _ENUMERATIONS)}"
            )
        return getattr(kind, node.attr)

    def call(self, node: ast.Call) -> Any:
        name = ast.unparse(node.func)
        args = [self.read(a) for a in node.args]
        named = {str(k.arg): self.read(k.value) for k in node.keywords}
        make = _CONSTRUCTORS.get(name) or _CLASSES.get(name)
        if name == "opaque":
            raise UnreadableError(f"a {args[0]} has no written form")
        if make is None:
            raise UnreadableError(f"'{name}' is none of {', '.join((*_CONSTRUCTORS, *_CLASSES))}")
        try:
            return make(*args, **named)
        except (TypeError, ValueError) as error:
            raise UnreadableError(f"'{ast.unparse(node)}': {error}") from None

    def negative(self, node: ast.UnaryOp) -> Any:
        if not isinstance(node.op, ast.USub):
            raise UnreadableError(f"'{ast.unparse(node)}' is no value")
        return -self.read(node.operand)

    def complex_number(self, node: ast.BinOp) -> Any:
        left, right = self.read(node.left), self.read(node.right)
        return left + right if isinstance(node.op, ast.Add) else left - right

    def items(self, nodes: Sequence[ast.expr]) -> list[Any]:
        return [self.read(n) for n in nodes]


_NODES: Mapping[type, Callable[[_Reader, Any], Any]] = MappingProxyType(
    {
        ast.Constant: lambda _, node: node.value,
        ast.Name: _Reader.name,
        ast.Attribute: _Reader.member,
        ast.Call: _Reader.call,
        ast.UnaryOp: _Reader.negative,
        ast.BinOp: _Reader.complex_number,
        ast.Tuple: lambda r, node: tuple(r.items(node.elts)),
        ast.List: lambda r, node: r.items(node.elts),
        ast.Set: lambda r, node: frozenset(r.items(node.elts)),
        ast.Dict: lambda r, node: dict(zip(r.items(node.keys), r.items(node.values), strict=True)),
    }
)


def _mesh(axes: Mapping[str, int]) -> AbstractMesh:
    return jax_compat.auto_abstract_mesh(tuple(axes.values()), tuple(axes))


def _named_sharding(axes: Mapping[str, int], spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(_mesh(axes), spec)


_CONSTRUCTORS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"AbstractMesh": _mesh, "NamedSharding": _named_sharding, "P": PartitionSpec, "set": frozenset}
)

#: Written form of the dtypes of typed PRNG keys -> JAX's name of the generator.
_KEYS: Mapping[str, str] = MappingProxyType({"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"})


def dtype_of(name: str) -> Any:
    """The dtype of this name, "key<fry>" included. TypeError if there is none."""
    if name.startswith("key<"):
        impl = _KEYS.get(name[4:-1])
        if impl is None:
            raise TypeError(f"no generator is called '{name[4:-1]}'")
        return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
    return jnp.dtype(name)
