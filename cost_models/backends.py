"""How the compilers of different devices use memory: what they fuse, in which order they run, what they copy.

Each fact was read off buffer assignments and scheduled HLO of compiled train steps (XLA's --xla_dump_to; jaxlib 0.10.2
for CPU, 0.12.0 and libtpu 0.0.51 for TPU v5e); docs/benchmarks.md holds predictions against the compilers. The numbers
were fitted there: a heap of 1.05 times what lives is the median on CPU, and 48 MiB is what temporaries of the steps at
hand had in the 128 MiB of a v5e's vector memory at their peak. GPU was not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cluster import Device


@dataclass(frozen=True)
class Backend:
    """What the memory model knows about one compiler.

    Attributes:
        name: for people.
        runs_eagerly: everything runs as soon as its operands are there, breadth first; otherwise in program order,
            updates as soon as their gradients are there.
        keeps_barriers: recomputation waits for the gradient that needs it; otherwise it is done at once, and
            rematerialisation saves nothing.
        has_library: products and reductions run in kernels of a library, with what is elementwise around them; what
            these kernels read is written (`autopar.cost_models.library`).
        merges_broadcasts: equal broadcasts are one.
        turns_operands: operands of products are brought into one order of dimensions, which is a copy.
        spreads_scalars: scalars in elementwise operations are arrays, one for each scalar and shape.
        products_repeat: products read through what is fused into them, and what costs is repeated like everything else.
        scatters_fuse: a scatter of one element per row is elementwise: a comparison with the index.
        narrows: float32 values that only products read are kept in bfloat16, as products read them.
        sums_in_place: an all-reduce overwrites its operand; otherwise it does not, and stands in for a reduce-scatter.
        tile: arrays are padded to multiples of this in two of their dimensions (rows, columns).
        near_bytes: bytes of on-chip memory that temporaries fill before they go to the device's memory.
        fragmentation: bytes of the heap over bytes alive at its peak.
    """

    name: str
    runs_eagerly: bool = False
    keeps_barriers: bool = True
    has_library: bool = False
    merges_broadcasts: bool = False
    turns_operands: bool = False
    spreads_scalars: bool = False
    products_repeat: bool = False
    scatters_fuse: bool = False
    narrows: bool = False
    sums_in_place: bool = True
    tile: tuple[int, int] = (1, 1)
    near_bytes: float = 0.0
    fragmentation: float = 1.0


CPU = Backend(
    "cpu",
    runs_eagerly=True,
    keeps_barriers=False,
    has_library=True,
    merges_broadcasts=True,
    turns_operands=True,
    spreads_scalars=True,
    sums_in_place=False,
    fragmentation=1.05,
)
TPU = Backend("tpu", products_repeat=True, scatters_fuse=True, narrows=True, tile=(8, 128), near_bytes=48 * 2.0**20)
#: XLA on GPUs: matrix products are library calls, everything light is fused into loops.
GPU = Backend("gpu")

#: Backends by name, as targets of compilation name them.
BACKENDS: Mapping[str, Backend] = {b.name: b for b in (CPU, TPU, GPU)}


def backend_of(device: Device) -> Backend:
    """The backend that compiles for a device, by the device's name; GPU if it tells nothing."""
    name = device.name.lower()
    return next((b for b in (CPU, TPU) if b.name in name), GPU)
