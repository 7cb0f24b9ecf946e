"""Sets of operations that several passes use."""

from __future__ import annotations

#: Operations on the matrix unit: the FLOPs that the usual formulas for transformers count.
PRODUCTS = ("dot_general", "conv_general_dilated")
#: The same over groups of rows.
RAGGED_PRODUCTS = ("ragged_dot", "ragged_dot_general")
#: Both.
ALL_PRODUCTS = (*PRODUCTS, *RAGGED_PRODUCTS)
#: Operations that run as LAPACK kernels on CPU, or contain one.
LAPACK = (
    *("cholesky", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product", "lu", "qr", "schur", "svd"),
    *("triangular_solve", "tridiagonal", "tridiagonal_solve", "custom_linear_solve"),
)
