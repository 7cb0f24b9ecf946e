"""JAX's primitives by what they do. Other tables of operations derive from these sets by union and difference.

The sets that are written out here have no primitive in common, but for those that say which set they are part of;
all others are unions.
"""

from __future__ import annotations

# Products

#: Operations on the matrix unit: the FLOPs that the usual formulas for transformers count.
PRODUCTS = ("dot_general", "conv_general_dilated")
#: The same over groups of rows: of XLA, and of JAX's Pallas kernels for TPUs (`autopar.jax_compat.megablox`).
XLA_RAGGED_PRODUCTS = ("ragged_dot_general",)
MEGABLOX_PRODUCTS = ("megablox_product",)
RAGGED_PRODUCTS = (*XLA_RAGGED_PRODUCTS, *MEGABLOX_PRODUCTS)
ALL_PRODUCTS = (*PRODUCTS, *RAGGED_PRODUCTS)

# Reductions

#: Reductions over whole dimensions, of numbers.
NUMERIC_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod")
#: The same of booleans and bits.
LOGICAL_REDUCTIONS = ("reduce_and", "reduce_or")
#: Positions of extreme elements.
INDEX_REDUCTIONS = ("argmax", "argmin")
REDUCTIONS = (*NUMERIC_REDUCTIONS, *LOGICAL_REDUCTIONS, *INDEX_REDUCTIONS)
#: Reductions of all leading parts of a dimension.
CUMULATIVE_REDUCTIONS = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
#: Reductions of windows that slide over an array, and their derivatives.
WINDOW_REDUCTIONS = (
    *("reduce_window_sum", "reduce_window_max", "reduce_window_min"),
    *("select_and_scatter_add", "select_and_gather_add"),
)

# Elementwise operations

#: Sums of two operands; "add_any" adds cotangents.
ADDITIONS = ("add", "add_any")
#: Other arithmetic that takes a few instructions for each element.
ARITHMETIC = (
    *("sub", "mul", "neg", "abs", "sign", "max", "min", "square", "integer_pow", "floor", "ceil", "round"),
    *("nextafter", "one_minus_square", "polynomial", "reduce_precision"),
)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "is_finite")
#: Operations on bits and booleans.
BITWISE = ("not", "and", "or", "xor", "shift_left", "shift_right_logical", "shift_right_arithmetic")
#: Choices between operands, element by element.
SELECTIONS = ("select_n", "clamp")
#: Operations that make or take apart complex numbers.
COMPLEX_PARTS = ("real", "imag", "conj", "complex")
#: Conversions of type.
CASTS = ("convert_element_type", "bitcast_convert_type")
#: Elementwise operations that are cheap enough to be repeated.
CHEAP = (*ADDITIONS, *ARITHMETIC, *COMPARISONS, *BITWISE, *SELECTIONS, *COMPLEX_PARTS, *CASTS)
#: Elementwise operations that are too costly to be repeated.
COSTLY = (
    *("div", "exp", "exp2", "log", "log1p", "log2", "expm1", "pow", "tanh", "logistic", "erf", "erfc", "erf_inv"),
    *("rsqrt", "sqrt", "cbrt", "sin", "cos", "tan", "atan2", "rem", "lgamma", "digamma"),
)
#: Part of `COSTLY`: those that some compilers repeat nevertheless.
SINES = ("sin", "cos", "tan")
#: Elementwise operations that neither model of what compilers fuse knows.
RARE_ELEMENTWISE = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i0e", "bessel_i1e", "clz", "cosh", "eq_to"),
    *("igamma", "igammac", "le_to", "lt_to", "mulhi", "polygamma"),
    *("population_count", "regularized_incomplete_beta", "sinh", "threefry2x32", "zeta"),
)
#: Elementwise operations that compilers fuse with their neighbours.
ELEMENTWISE = frozenset((*CHEAP, *COSTLY))

# Data movement

#: New shapes for the same elements in the same order.
RESHAPES = ("reshape", "squeeze")
#: New orders of the same elements.
REORDERINGS = ("transpose", "rev")
#: Operations that enlarge a value, or make one from nothing.
BROADCASTS = ("broadcast_in_dim", "iota")
#: Parts of an array.
SLICES = ("slice", "dynamic_slice")
#: Operations that set arrays into a larger one.
JOINS = ("pad", "concatenate")
#: Operations that change some elements of their first operand at computed positions.
SCATTERS = ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max")
#: Changes of shape, order and type that keep the values.
RELAYOUTS = (*RESHAPES, "transpose", "convert_element_type")
#: Linear operations on one array, without arithmetic but for a sign: the result is zero if the operand is.
LINEAR_UNARY = (*RELAYOUTS, "copy", "broadcast_in_dim", "slice", "neg")

# Calls of other code

#: Operations that run as LAPACK kernels on CPU, or contain one.
LAPACK = (
    *("cholesky", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product", "lu", "qr", "schur", "svd"),
    *("triangular_solve", "tridiagonal", "tridiagonal_solve"),
)
#: Kernels that the user or a library brings along.
KERNEL_CALLS = ("pallas_call", "ffi_call")
#: cuDNN's fused attention, forward and backward.
ATTENTION = (
    *("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"),
    *("dot_product_attention_fp8_fwd_wrapper", "dot_product_attention_fp8_bwd_wrapper"),
)
#: Calls of Python on one device that return results.
RETURNING_CALLBACKS = ("pure_callback", "io_callback")
#: All calls of Python.
CALLBACKS = (*RETURNING_CALLBACKS, "debug_callback")
