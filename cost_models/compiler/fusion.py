"""What compilers fuse: one table of operations, and one record for each model of a compiler that asks.

A kernel reads arrays from memory and writes arrays to memory. By its kind, an operation

    LIGHT        is computed in the kernels that read its result: elementwise operations, moves
    REDUCTION    has a kernel that computes light operands itself, and writes its result; so has, on some compilers,
    PRODUCT
    KERNEL       has a kernel that reads its operands from memory
    LOOP         has bodies; what enters and leaves them is in memory
    STORE        puts what an iteration makes into the stacked results of a loop

The result of a light operation is written to memory if it has more readers of some kind than compute it themselves
                                                                                                 -> Fusion.is_written

    most readers that compute it   SECONDS   BYTES_ACCESSED   CPU, GPU            TPU
    light operations               1         any              any, if it is not   any, if it is not
                                                              costly to repeat    costly to repeat
    reductions                     0         any              any                 any
    products                       0         1                0                   any
    products of ragged groups      0         0                0                   any
    stores                                                    any                 any
    kernels, loops                 0         0                0                   0

A product's kernel computes what is light and alone reads its result, in BYTES_ACCESSED (one loop) and on TPU (one
operation). What a library's kernel on CPU takes in is in `autopar.cost_models.compiler.cpu_kernels`.

SECONDS is the model behind the objective (`autopar.passes.op_groups.merge`). Seconds have to be a sum over op groups
and their pairs before any layout is known, so that fusion must not depend on layouts or on other choices. Sharding
rules say what is light: what follows an operand. BYTES_ACCESSED follows XLA's cost analysis, which counts kernels and
not buffers (`autopar.cost_models.compiler.hbm_traffic`): a value that two kernels read costs two reads wherever it is
written, and one loop has several results. CPU, GPU and TPU are the records of compilers, by which buffers are found
(`autopar.cost_models.compiler.written_values`).

Where they answer differently about one operation, the compiler's record is right, as far as is known:

    products             on CPU and GPU they are calls of a library, whose operands are in memory. BYTES_ACCESSED was
                         fitted to TPU v5e alone, and counts operands as computed in the kernel everywhere.
    ragged products      of XLA run in a kernel of their own; on TPU what is light is taken to be computed in it, which
                         was never compared with a compiled program.
    scatters             of one element for each row are light on TPU, and kernels in BYTES_ACCESSED.
    gathers              are light and costly on CPU, and kernels in BYTES_ACCESSED and elsewhere.
    joins                along the last dimension are kernels on CPU, and light in BYTES_ACCESSED.
    what is not listed   (factorisations, `dynamic_update_slice`, callbacks, rare elementwise operations) is a kernel to
                         compilers, and light in BYTES_ACCESSED. Reshapes are other names for arrays in memory, and
                         light in BYTES_ACCESSED, unless they copy tiles.
    SECONDS              counts operands, not readers: x * x reads x twice, and so x is written.

Plans contain bytes accessed and are chosen by seconds, so that each of these would change plans. A test keeps the list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.ir.graph import Op
from autopar.ir.op_sets import (
    BROADCASTS,
    COSTLY,
    ELEMENTWISE,
    JOINS,
    PRODUCTS,
    RAGGED_PRODUCTS,
    REDUCTIONS,
    REORDERINGS,
    SINES,
    SLICES,
    XLA_RAGGED_PRODUCTS,
)

LIGHT, REDUCTION, PRODUCT, KERNEL, LOOP, STORE = "light", "reduction", "product", "kernel", "loop", "store"

#: Operations that move elements; as cheap as `CHEAP` elementwise ones.
MOVES = (*BROADCASTS, *REORDERINGS, *SLICES, *JOINS, "split")

#: Operation without bodies -> its kind; all others are kernels.
KINDS: Mapping[str, str] = {
    **dict.fromkeys((*ELEMENTWISE, *MOVES), LIGHT),
    **dict.fromkeys(REDUCTIONS, REDUCTION),
    **dict.fromkeys((*PRODUCTS, *XLA_RAGGED_PRODUCTS), PRODUCT),
}
#: The operations that count as kernels in bytes accessed.
KERNELS = (
    *(*RAGGED_PRODUCTS, "sort", "cumsum", "gather", "scatter", "scatter-add", "rng_bit_generator"),
    *("reduce_window_sum", "reduce_window_max", "select_and_scatter_add", "select_and_gather_add"),
)
_ANY = math.inf
MOST_JOINED = 8  # arrays that are joined in a fused loop (kMaxConcatenateArguments in XLA)
_RUN, _JOINED = 64, 2048  # bytes of a row and of a result that are joined by copies


@dataclass(frozen=True, eq=False)
class Fusion:
    """What one model of a compiler takes to be fused.

    Attributes:
        readers: kind -> number of readers of this kind that compute a light value themselves; 0 for kinds left out.
        kinds: operation -> its kind.
        unlisted: the kind of all other operations.
        repeats: costly operations that are repeated like cheap ones.
        costly: operations that are not repeated besides those that are costly everywhere.
        writes_joins: arrays that are joined along their last dimension, or more than `MOST_JOINED`, are in memory, and
            so is the result, unless it is small.
        cheap_repeats: what is cheap is repeated by every kernel that reads it, however many arrays it is made of, as
            long as none of them depends on it by way of memory; what is made of one array is repeated by kernels that
            can, if it is written for others.
        products_absorb: a product's kernel does what is elementwise to its result, where that is all that reads it.
        scatters_fuse: a scatter of one element per row is elementwise: a comparison with the index.
        loops_sink: a loop makes what is broadcast for it in its body, where that reads it.
        most_inputs: arrays that one fused loop reads; what is made of more is written.
    """

    readers: Mapping[str, float]
    kinds: Mapping[str, str] = field(default_factory=lambda: KINDS)
    unlisted: str = KERNEL
    repeats: tuple[str, ...] = ()
    costly: tuple[str, ...] = ()
    writes_joins: bool = False
    cheap_repeats: bool = False
    products_absorb: bool = False
    scatters_fuse: bool = False
    loops_sink: bool = False
    most_inputs: float = _ANY

    def kind(self, op: Op) -> str:
        """The kind of an operation."""
        if op.regions:
            return LOOP
        if (
            self.scatters_fuse
            and op.name.startswith("scatter")
            and op.params["dimension_numbers"].operand_batching_dims
        ):
            return LIGHT
        if self.writes_joins and op.name in ("concatenate", "stack") and _is_copied_by_rows(op):
            return KERNEL
        return self.kinds.get(op.name, self.unlisted)

    def reads_memory(self, kind: str) -> bool:
        """Whether nothing is fused into operations of a kind."""
        return not self.readers.get(kind, 0)

    def is_written(self, readers: Mapping[str, int]) -> bool:
        """Whether a light value with so many readers of each kind is written to memory."""
        return any(count > self.readers.get(kind, 0) for kind, count in readers.items())

    def is_costly(self, name: str) -> bool:
        """Whether an operation takes too long to be repeated."""
        return name in self.costly or (name in COSTLY and name not in self.repeats)

    def is_cheap(self, name: str) -> bool:
        """Whether an operation is light and not costly."""
        return self.kinds.get(name) == LIGHT and not self.is_costly(name)


def _is_copied_by_rows(op: Op) -> bool:
    """Whether arrays are joined by copies of runs of bytes, in a kernel of its own.

    (openxla/xla, xla/service/cpu/cpu_instruction_fusion.cc: `is_minor_dim_concatenate`.)
    """
    result, dim = op.equation.outvars[0].aval, op.params.get("dimension", op.params.get("axis"))
    if len(op.inputs) > MOST_JOINED:
        return True
    run = result.shape[-1] * result.dtype.itemsize
    return (
        len(result.shape) > 1
        and dim == len(result.shape) - 1
        and run >= _RUN
        and result.size * result.dtype.itemsize >= _JOINED
    )


#: XLA on GPUs: matrix products are library calls, everything light is fused into loops.
GPU = Fusion({LIGHT: _ANY, REDUCTION: _ANY, STORE: _ANY})
CPU = replace(
    GPU,
    kinds={**KINDS, **dict.fromkeys(("gather", "stack", "unstack"), LIGHT)},
    repeats=SINES,
    costly=("gather",),
    cheap_repeats=True,
    writes_joins=True,
)
TPU = Fusion(
    {LIGHT: _ANY, REDUCTION: _ANY, STORE: _ANY, PRODUCT: _ANY},
    repeats=COSTLY,
    products_absorb=True,
    scatters_fuse=True,
    loops_sink=True,
)
BYTES_ACCESSED = Fusion(
    {LIGHT: _ANY, REDUCTION: _ANY, PRODUCT: 1},
    kinds={**KINDS, **dict.fromkeys(KERNELS, KERNEL)},
    unlisted=LIGHT,
    products_absorb=True,
    # Compilers limit fusion, so that chains of residuals are written. Chosen on three small models of 2 to 48 layers
    # compiled for TPU v5e: 8 to 24 are within a third of XLA's figure.
    most_inputs=16,
)
SECONDS = Fusion({LIGHT: 1})
