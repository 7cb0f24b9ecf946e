"""JAX's Pallas kernels for products over groups of rows, `gmm` and `tgmm` of `megablox`, as one operation.

Either function makes tables of the tiles of rows to visit for each group, and binds a `pallas_call` on

    number of visits, ends [g+1], groups [v] and tiles [v] of visits, first group [1], left [m,k], right

    gmm      right [g,k,n], or [g,n,k] if it is transposed -> [m,n]
    tgmm     right [m,n] -> [g,k,n]

whose grid is known at run time only. The kernel is replaced by the primitive `PRODUCT`, a ragged product with another
implementation: its dimension numbers are those of `jax.lax.ragged_dot_general`, its operands are

    left, right, sizes [g], first group [1]             size i = end i+1 - end i

It calls JAX's function, on parts of the operands for their shapes, which makes tables of their own      -> `_call`
The tables that the kernel had are dead then, as nothing else reads them.

What is in the tables is not derived from the kernel. It is known of JAX's functions, of which the body of the kernel is
a part, so that nothing else can bind it. A kernel is theirs if its body comes from their file, and all of it is what a
call of them with the same shapes and options binds: body, index maps, grid, blocks, scratch memory  -> `_options_of`
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.extend.core.primitives import closed_call_p
from jax.interpreters import mlir
from jax.lax import RaggedDotDimensionNumbers

Params = Mapping[str, Any]

PRODUCT = jex.Primitive("megablox_product")
_MODULE = "jax.experimental.pallas.ops.tpu.megablox.gmm"  # of this name is also the function in the package
_FILE = "/megablox/gmm.py:"
_KERNELS = 256  # kernels whose options are kept
#: Positions of operands of the kernel.
_ENDS, _FIRST, _LEFT, _RIGHT = 1, 4, 5, 6
_CALLS = ("jit", "pjit")
#: Parts are a multiple of as many rows, or of all rows of a tile that has fewer: JAX's own default for a tile.
_LEAST_ROWS = 128


# Which kernels


def as_product(equation: Any, producers: Mapping[Any, Any]) -> Any | None:
    """A call of `PRODUCT` in place of a kernel; None if that is not shown to be one of JAX's.

    One with as many matrices as groups alone, and that adds to no given array. Tried on 0.10.2 and 0.12.0.

    Args:
        equation: of a jaxpr.
        producers: variable of the jaxpr -> the equation that it is a result of.
    """
    if equation.primitive.name != "pallas_call" or _FILE not in _origin(equation.params).replace("\\", "/"):
        return None
    options = _options_of(_Call(equation.params))
    if options is None:
        return None
    ends, first, left, right = (equation.invars[i] for i in (_ENDS, _FIRST, _LEFT, _RIGHT))
    sizes = _summed(ends, producers)
    counts, are_sizes = (ends, False) if sizes is None else (sizes, True)

    def product(left: Any, right: Any, counts: Any, first: Any) -> Any:
        sizes = counts if are_sizes else counts[1:] - counts[:-1]
        return PRODUCT.bind(left, right, sizes, first, **options)

    operands = left, right, counts, first
    closed = jax.make_jaxpr(product)(*(_shape_of(v.aval) for v in operands))
    return equation.replace(primitive=closed_call_p, invars=[*operands], params={"call_jaxpr": closed})


class _Call:
    """The parameters of a call as a key, equal where they are the same objects."""

    __slots__ = ("key", "params")

    def __init__(self, params: Params) -> None:
        self.params = params
        self.key = tuple(id(value) for value in params.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=_KERNELS)
def _options_of(call: _Call) -> Params | None:
    """The parameters of `PRODUCT` for a kernel of JAX's; None if it is none."""
    mapping = call.params["grid_mapping"]
    if (mapping.num_index_operands, mapping.num_inputs, len(mapping.block_mappings)) != (_LEFT - 1, 2, 3):
        return None  # such as one that adds to a given array
    shapes = [block.array_aval.shape for block in mapping.block_mappings]
    groups = call.params["jaxpr"].invars[0].aval.shape[0] - 1
    if max(shapes[1:], key=len)[0] != groups:
        return None
    operands = [*(_shape_of(block.array_aval) for block in mapping.block_mappings[:2])]
    operands += [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (groups, 1)]
    written = _text(call.params)
    for options in _candidates(call.params):
        try:
            traced = jax.make_jaxpr(lambda *arrays, options=options: _call(*arrays, **options))(*operands)
        except (TypeError, ValueError):  # shapes, types or tiles that JAX's function refuses
            continue
        if [_text(kernel) for kernel in _kernels(traced.jaxpr)] == [written]:
            return options
    return None


def _candidates(kernel: Params) -> Iterator[dict[str, Any]]:
    """The parameters of `PRODUCT` that a kernel may come from."""
    blocks = [[getattr(n, "block_size", 1) for n in b.block_shape] for b in kernel["grid_mapping"].block_mappings]
    shared: dict[str, Any] = {
        "tiling": (*blocks[0], blocks[2][-1]),
        "preferred_element_type": kernel["out_avals"][0].dtype,
        "interpret": kernel["interpret"],
    }
    # ranks of the operands and the result -> contracted dimensions, and those of groups
    forms: dict[tuple[int, ...], tuple[tuple[int, int, list[int]], ...]]
    forms = {(2, 3, 2): ((1, 1, [0]), (1, 2, [0])), (2, 2, 3): ((0, 0, []),)}
    for left, right, groups in forms.get(tuple(map(len, blocks)), ()):
        numbers = RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((left,), (right,)), ((), ())),
            lhs_ragged_dimensions=[0],
            rhs_group_dimensions=groups,
        )
        yield {"ragged_dot_dimension_numbers": numbers, **shared}


def _kernels(jaxpr: Any) -> Iterator[Params]:
    """The parameters of the kernels of a jaxpr, inner calls included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params
        elif equation.primitive.name in _CALLS:
            yield from _kernels(equation.params["jaxpr"].jaxpr)


def _origin(kernel: Params) -> str:
    """Name, file and line of the function that is the body of a kernel."""
    return str(kernel["jaxpr"].debug_info.func_src_info)


def _text(kernel: Params) -> str:
    """All of a kernel but the estimate of its cost; equal for equal kernels."""
    mapping = kernel["grid_mapping"]
    blocks = [(b.block_shape, b.array_aval, b.index_map_jaxpr, b.pipeline_mode) for b in mapping.block_mappings]
    kinds = (mapping.grid, mapping.grid_names, mapping.vmapped_dims, mapping.num_index_operands, mapping.scratch_avals)
    rest = ("out_avals", "input_output_aliases", "compiler_params", "interpret", "mesh")
    return "\n".join(map(str, (_origin(kernel), kernel["jaxpr"], *kinds, blocks, *(kernel[name] for name in rest))))


def _summed(ends: Any, producers: Mapping[Any, Any]) -> Any | None:
    """What the ends of groups are the sums of, with 0 in front; None if that is not found."""
    joined = producers.get(ends)
    if joined is None or joined.primitive.name != "concatenate" or len(joined.invars) != 2:
        return None
    zero, sums = map(producers.get, joined.invars)
    if zero is None or sums is None or zero.primitive.name != "broadcast_in_dim" or sums.params.get("name") != "cumsum":
        return None
    inner = sums.params["jaxpr"].jaxpr
    value, sizes = zero.invars[0], sums.invars[0]
    is_sum = [e.primitive.name for e in inner.eqns] == ["cumsum"] and inner.eqns[0].params["reverse"] is False
    starts_at_0 = isinstance(value, jex.Literal) and value.val == 0
    same_type = sizes.aval.dtype == ends.aval.dtype
    return sizes if is_sum and starts_at_0 and same_type and len(sums.invars) == 1 else None


# The product


def row_tile(params: Params) -> int:
    """The number of rows of which the parts of `PRODUCT` have to be a multiple."""
    return math.gcd(params["tiling"][0], _LEAST_ROWS)


def _call(
    left: Any,
    right: Any,
    sizes: Any,
    first: Any,
    *,
    ragged_dot_dimension_numbers: RaggedDotDimensionNumbers,
    tiling: tuple[int, int, int],
    preferred_element_type: Any,
    interpret: Any,
) -> Any:
    """The call of JAX's function."""
    module = importlib.import_module(_MODULE)
    ((_, (contracted,)), _) = ragged_dot_dimension_numbers.dot_dimension_numbers
    keywords = {"group_offset": first[0], "interpret": interpret}
    if contracted == 0:
        return module.tgmm(left.swapaxes(0, 1), right, sizes, preferred_element_type, tiling, **keywords)
    return module.gmm(left, right, sizes, preferred_element_type, tiling, transpose_rhs=contracted == 2, **keywords)


def _on_parts(left: Any, right: Any, sizes: Any, first: Any, *, tiling: tuple[int, int, int], **options: Any) -> Any:
    """The product of parts: a tile has as many rows as divide them, and no more columns than there are."""
    ((_, (contracted,)), _) = options["ragged_dot_dimension_numbers"].dot_dimension_numbers
    columns = right.shape[1 if contracted == 2 else -1]
    tile = math.gcd(tiling[0], left.shape[0]), min(tiling[1], left.shape[1]), min(tiling[2], columns)
    return _call(left, right, sizes, first, tiling=tile, **options)


@PRODUCT.def_abstract_eval
def _type_of_product(left: Any, right: Any, sizes: Any, first: Any, **options: Any) -> Any:
    ((_, (contracted,)), _) = options["ragged_dot_dimension_numbers"].dot_dimension_numbers
    columns = right.shape[1 if contracted == 2 else -1]
    shape = (*sizes.shape, left.shape[1], columns) if contracted == 0 else (left.shape[0], columns)
    return left.update(shape=shape, dtype=options["preferred_element_type"], weak_type=False)


def _shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


PRODUCT.def_impl(_on_parts)
mlir.register_lowering(PRODUCT, mlir.lower_fun(_on_parts, multiple_results=False))
