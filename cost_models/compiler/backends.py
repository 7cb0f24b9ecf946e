"""How the compilers of different devices use memory: in which order they run, what they copy.

What they fuse is in `autopar.cost_models.compiler.fusion`.

Each fact was read off buffer assignments and scheduled HLO of compiled train steps (XLA's --xla_dump_to; jaxlib 0.10.2
for CPU, 0.12.0 and libtpu 0.0.52 for TPU v5e); docs/benchmarks/peak-memory.md has predictions against the compilers.
The numbers were fitted there: a heap of 1.05 times what lives (CPU) is the median, and 1.12 times (TPU) is as far from
the lowest error that is allowed as from the highest: the heap itself is 1.0 to 1.05 times, the rest is kept longer than
need be; temporaries of up to 32 MiB, a quarter of a v5e's vector memory, stayed there when they were read at once. GPU
was not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost_models.compiler import fusion
from autopar.cost_models.compiler.fusion import Fusion
from autopar.hardware.description import Device


@dataclass(frozen=True)
class Backend:
    """What the memory model knows about one compiler.

    Attributes:
        name: for people.
        fusion: what it fuses.
        platforms: what JAX calls it in `jax.lax.platform_dependent`.
        runs_eagerly: everything runs as soon as its operands are there, breadth first; otherwise in program order,
            updates as soon as their gradients are there.
        solves_in_depth: a program with kernels of LAPACK runs depth first instead, each step right before what reads it
            (see `autopar.codegen.emit.kernel_options`).
        keeps_barriers: recomputation waits for the gradient that needs it; otherwise it is done at once, and
            rematerialisation saves nothing.
        has_library: products and reductions run in kernels of a library, with what is elementwise around them; what
            these kernels read is written (`autopar.cost_models.compiler.cpu_kernels`).
        merges_broadcasts: equal broadcasts are one.
        merges_duplicates: of equal operations on equal operands one is done.
        turns_operands: operands of products are brought into one order of dimensions, which is a copy.
        swaps_products: a product that a transpose alone reads is made with its operands in the other order instead (see
            `autopar.codegen.fold_transpose`), and transposed operands are those of that product.
        spreads_scalars: scalars in elementwise operations are arrays, one for each scalar and shape.
        stores_early: what a loop stacks is stored as soon as it is made; otherwise at the end of the body.
        stacks_first: stacked results of loops are adjacent in the heap, and temporaries around them.
        merges_fetches: what is fetched alike for two readers is fetched once.
        updates_read_pieces: an update reads a parameter as it arrives, and not the copy that products read.
        hashes_in_pairs: a threefry hash is two words, made by a loop; what reads the bits joins the words again.
        transposes_gathers: a gather writes its windows one after the other, and what is wanted otherwise is transposed.
        solves_in_place: factorisations and triangular solves work in the memory of an operand that is read last there.
        shares_strictly: a light step is made in the memory of an operand only if it reads that elementwise, and neither
            is in another's memory; scatters overwrite copies as well (`autopar.cost_models.compiler.in_place`).
        accumulates_scatters: a scatter into zeros that is added to an array scatters into the array.
        masks_groups: a product of ragged groups reads a masked copy of its first operand for each of them, all of which
            it multiplies. On a B200, 64 groups of bfloat16 reach 23 TFLOP/s with jaxlib 0.10.2, 1/64 of what a kernel
            for groups does (marin-community/marin#7012).
        reduces_dots: a product that contracts nothing is a multiplication of broadcasts; one of vectors is a
            multiplication and a reduction.
        splits_reductions: a reduction along the dimension in which its operand is joined is one of each part.
        selects_masked: a multiplication by a converted boolean is a selection.
        expands_pools: the gradient of a maximum over windows finds the places of the maxima and scatters to them.
        widens: products and reductions of bfloat16 and float16 read copies in float32 and write float32, and
            all-gathers make float32; what is rounded to bfloat16 is not repeated.
        narrows: float32 values that only products read are kept in bfloat16, as products read them.
        sums_in_place: an all-reduce overwrites its operand; otherwise it does not, and replaces a reduce-scatter.
        tile: arrays are padded to multiples of this in two of their dimensions (rows, columns).
        gathers_turn: an all-gather puts the pieces one after the other, and is transposed into a second array unless
            they are pieces of the first dimension.
        splits_all_to_all: an all-to-all gives one array for every device, which are put together afterwards.
        overlaps: collectives run beside products: what is read in another layout is fetched as soon as it is made, and
            is there unturned as well meanwhile if it is gathered, or during the product before if it is an argument; a
            product that makes a weight's gradient waits until the next product of the backward pass has run, or longer
            (`autopar.cost_models.memory.delayed_products`).
        near_bytes: temporaries of at most so many bytes stay in on-chip memory if they are read at once, or by the body
            of the loop that makes them.
        fragmentation: bytes of the heap over bytes alive at its peak, of what comes and goes.
    """

    name: str
    fusion: Fusion
    platforms: tuple[str, ...] = ()
    runs_eagerly: bool = False
    solves_in_depth: bool = False
    keeps_barriers: bool = True
    has_library: bool = False
    merges_broadcasts: bool = False
    merges_duplicates: bool = False
    turns_operands: bool = False
    swaps_products: bool = False
    spreads_scalars: bool = False
    stores_early: bool = False
    stacks_first: bool = False
    merges_fetches: bool = False
    updates_read_pieces: bool = False
    hashes_in_pairs: bool = False
    transposes_gathers: bool = False
    solves_in_place: bool = False
    shares_strictly: bool = False
    accumulates_scatters: bool = False
    masks_groups: bool = False
    reduces_dots: bool = False
    splits_reductions: bool = False
    selects_masked: bool = False
    expands_pools: bool = False
    widens: bool = False
    narrows: bool = False
    sums_in_place: bool = True
    gathers_turn: bool = False
    splits_all_to_all: bool = False
    overlaps: bool = False
    tile: tuple[int, int] = (1, 1)
    near_bytes: float = 0.0
    fragmentation: float = 1.0


CPU = Backend(
    "cpu",
    fusion.CPU,
    platforms=("cpu",),
    runs_eagerly=True,
    solves_in_depth=True,
    keeps_barriers=False,
    has_library=True,
    merges_broadcasts=True,
    merges_duplicates=True,
    turns_operands=True,
    swaps_products=True,
    spreads_scalars=True,
    sums_in_place=False,
    stores_early=True,
    hashes_in_pairs=True,
    transposes_gathers=True,
    solves_in_place=True,
    shares_strictly=True,
    accumulates_scatters=True,
    masks_groups=True,
    reduces_dots=True,
    splits_reductions=True,
    selects_masked=True,
    expands_pools=True,
    widens=True,
    gathers_turn=True,
    splits_all_to_all=True,
    fragmentation=1.05,
)
TPU = Backend(
    "tpu",
    fusion.TPU,
    platforms=("tpu",),
    stores_early=True,
    stacks_first=True,
    merges_fetches=True,
    updates_read_pieces=True,
    narrows=True,
    overlaps=True,
    tile=(8, 128),
    near_bytes=32 * 2.0**20,
    fragmentation=1.12,
)
GPU = Backend("gpu", fusion.GPU, platforms=("cuda", "rocm"), masks_groups=True)

#: Backends by name, as targets of compilation name them.
BACKENDS: Mapping[str, Backend] = {b.name: b for b in (CPU, TPU, GPU)}


def backend_of(device: Device) -> Backend:
    """The backend that compiles for a device, by the device's name; GPU if it tells nothing."""
    name = device.name.lower()
    return next((b for b in (CPU, TPU) if b.name in name), GPU)
