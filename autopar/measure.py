"""Times what calibration fits: products, passes over memory and collectives, on all local devices at once.

Every program runs the same on each device (`jax.shard_map`), so that devices that share cores or memory are measured as
they share them. A program does its operation `CHAIN` times in a row, each time waiting for the last, and the seconds of
an empty program are taken off: what is left is what the operation costs inside a step, without its dispatch.

    products     y_i = a_i b, a_i distinct                       -> products
    passes       x <- x + 1, which a compiler cannot skip        -> streams
    collectives  x <- f(x), f a collective of equal shape        -> messages

The shortest of `REPEATS` runs counts: what else the machine does only ever adds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar import jax_compat
from autopar.cluster import Cluster
from autopar.cost_models.calibrate import Calibration, Measured, Message, Product, Stream, fit

CHAIN = 6
REPEATS = 7

#: rows, columns, contracted extent; large, and narrow in one or two of the three.
EXTENTS = (
    (512, 512, 512), (1024, 256, 256), (64, 512, 512), (8, 512, 512), (512, 64, 512), (512, 8, 512), (512, 512, 64),
    (1024, 512, 8), (128, 128, 128), (64, 64, 64), (2048, 16, 64), (2048, 64, 16), (4096, 128, 128), (128, 128, 2048),
)  # fmt: skip
STREAM_BYTES = (2**18, 2**20, 2**22, 2**24)
MESSAGE_BYTES = (2**10, 2**14, 2**18, 2**20, 2**22)
OVERLAP_SIDE, OVERLAP_BYTES = 256, 2**20  # of a product and an all-reduce that take about as long on a CPU

Tell = Callable[[str], None]


#: Floating types to multiply in, by platform: those that its programs use.
DTYPES: Mapping[str, tuple[str, ...]] = {"cpu": ("float32",), "gpu": ("float32", "bfloat16"), "tpu": ("bfloat16",)}


def calibrate(tell: Tell = lambda what: None) -> Calibration:
    """Measure the local devices and fit `Cluster.local()` to them; `tell` hears what is being timed."""
    base = Cluster.local()
    dtypes = DTYPES.get(jax.devices()[0].platform, ("float32",))
    return fit(measure(dtypes, base.device.reduce_scatter, tell), base)


def steps(base: Cluster) -> int:
    """How often `calibrate` will call `tell`."""
    kinds = len(COLLECTIVES) - (not base.device.reduce_scatter)
    dtypes = DTYPES.get(jax.devices()[0].platform, ("float32",))
    return len(dtypes) * len(EXTENTS) + len(STREAM_BYTES) + kinds * len(MESSAGE_BYTES) + 1


def measure(dtypes: Sequence[str], reduce_scatter: bool, tell: Tell = lambda what: None) -> Measured:
    """Measurements on `jax.local_devices()`; `tell` hears what is being timed.

    Args:
        dtypes: floating types to multiply in.
        reduce_scatter: the backend has one.
    """
    mesh = jax_compat.auto_mesh(np.array(jax.local_devices()), ("x",))
    empty = _seconds(mesh, lambda x: x, [(8,)], "float32")
    products = tuple(_products(mesh, dtypes, empty, tell))
    streams = tuple(_streams(mesh, empty, tell))
    messages = tuple(_messages(mesh, reduce_scatter, empty, tell)) if mesh.size > 1 else ()
    tell("overlap")
    overlap = _overlap(mesh, empty) if mesh.size > 1 else 0.0
    return Measured(products, streams, messages, overlap)


def _seconds(mesh: Any, local: Callable[..., Any], shapes: Sequence[tuple[int, ...]], dtype: str) -> float:
    """Shortest seconds of a program that runs `local` on arrays of these shapes on every device."""
    spec = PartitionSpec("x")
    program = jax.jit(
        jax.shard_map(
            lambda *xs: jax.tree.map(lambda y: y[None], local(*(x[0] for x in xs))),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )
    place = NamedSharding(mesh, spec)
    given = [jax.device_put(jnp.full((mesh.size, *shape), 0.5, dtype), place) for shape in shapes]
    jax.block_until_ready(program(*given))
    return min(_once(program, given) for _ in range(REPEATS))


def _once(program: Callable[..., Any], given: Sequence[Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(program(*given))
    return time.perf_counter() - begin


def _each(total: float, empty: float) -> float:
    """Seconds of one of `CHAIN` operations; a clock tick at least, so that its logarithm exists."""
    return max(total - empty, 1e-9) / CHAIN


def _products(mesh: Any, dtypes: Sequence[str], empty: float, tell: Tell) -> Iterator[Product]:
    for dtype in dtypes:
        for rows, columns, contracted in EXTENTS:
            tell(f"{dtype} {rows} x {contracted} by {contracted} x {columns}")
            shapes = [(contracted, columns), *[(rows, contracted)] * CHAIN]
            total = _seconds(mesh, lambda b, *many: [a @ b for a in many], shapes, dtype)
            yield Product(rows, columns, contracted, dtype, _each(total, empty))


def _streams(mesh: Any, empty: float, tell: Tell) -> Iterator[Stream]:
    def passes(x: Any) -> Any:
        for _ in range(CHAIN):
            x = jax.lax.optimization_barrier(x + 1)
        return x

    for nbytes in STREAM_BYTES:
        tell(f"pass over {nbytes} bytes")
        total = _seconds(mesh, passes, [(nbytes // 8,)], "float32")
        yield Stream(nbytes, _each(total, empty))  # nbytes / 2 read, nbytes / 2 written


def _all_gather(x: Any, n: int) -> Any:
    return jax.lax.all_gather(x[: len(x) // n], "x", tiled=True)


def _reduce_scatter(x: Any, n: int) -> Any:
    return jnp.tile(jax.lax.psum_scatter(x, "x", tiled=True), n)


COLLECTIVES: dict[str, Callable[[Any, int], Any]] = {
    "all-reduce": lambda x, n: jax.lax.psum(x, "x"),
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": lambda x, n: jax.lax.all_to_all(x, "x", 0, 0, tiled=True),
    "collective-permute": lambda x, n: jax.lax.ppermute(x, "x", [(i, (i + 1) % n) for i in range(n)]),
}
"""Kind -> what keeps the shape of a vector of b bytes and communicates b bytes, in the convention of `collectives`."""


def _chained(collective: Callable[[Any, int], Any], n: int, x: Any) -> Any:
    for _ in range(CHAIN):
        x = collective(x, n) * 0.5
    return x


def _messages(mesh: Any, reduce_scatter: bool, empty: float, tell: Tell) -> Iterator[Message]:
    for kind, collective in COLLECTIVES.items():
        if kind == "reduce-scatter" and not reduce_scatter:
            continue
        for nbytes in MESSAGE_BYTES:
            tell(f"{kind} of {nbytes} bytes")
            length = max(mesh.size, nbytes // 4 // mesh.size * mesh.size)
            total = _seconds(mesh, partial(_chained, collective, mesh.size), [(length,)], "float32")
            yield Message(kind, 4 * length, _each(total, empty))


def _overlap(mesh: Any, empty: float) -> float:
    """Share of the shorter of two that is saved by running products and all-reduces that do not wait for each other."""
    n, side, length = mesh.size, OVERLAP_SIDE, OVERLAP_BYTES // 4

    def products(x: Any) -> Any:
        for _ in range(CHAIN):
            x = x @ x * (1 / side)
        return x

    moves = partial(_chained, COLLECTIVES["all-reduce"], n)
    compute = _seconds(mesh, products, [(side, side)], "float32") - empty
    move = _seconds(mesh, moves, [(length,)], "float32") - empty
    both = _seconds(mesh, lambda x, y: (products(x), moves(y)), [(side, side), (length,)], "float32") - empty
    return float(np.clip((compute + move - both) / max(min(compute, move), 1e-9), 0.0, 1.0))
