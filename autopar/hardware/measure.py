"""Times what calibration fits: products, passes over memory and collectives, on all local devices at once.

Every program runs the same on each device (`jax.shard_map`), so that devices that share cores or memory are measured as
they share them. A program does its operation `SHORT` times in a row, each time waiting for the last, and the seconds of
an empty program are taken off: what is left is what the operation costs inside a step, without its dispatch. A program
that is over too soon for that does it `LONG` times.

    products     y_i = a_i b, a_i distinct                       -> _multiply
    passes       y_i = x_i + 1, x_i distinct                     -> _pass
    collectives  x <- f(x), f a collective of equal shape,
                 of all devices or of groups of them             -> _send

All programs are compiled first and then run in turns, `REPEATS` rounds: the shortest time of each counts, since what
else the machine does only ever adds. In turns, for a machine that is slow for a minute then slows all of them, and not
those alone whose turn it is: arithmetic measured slow beside a network measured fast makes plans communicate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar import jax_compat
from autopar.hardware.calibrate import Calibration, Measured, Message, Product, Stream, fit

if TYPE_CHECKING:
    from autopar.hardware.cluster import Cluster

SHORT, LONG = 6, 48
SOON = 1e-2  # s
REPEATS = 15

#: rows, columns, contracted extent; large, and narrow in one or two of the three.
EXTENTS = (
    (512, 512, 512), (1024, 256, 256), (64, 512, 512), (8, 512, 512), (512, 64, 512), (512, 8, 512), (512, 512, 64),
    (1024, 512, 8), (128, 128, 128), (64, 64, 64), (2048, 16, 64), (2048, 64, 16), (4096, 128, 128), (128, 128, 2048),
)  # fmt: skip
# From what a core keeps in its cache to what none does.
STREAM_BYTES = (2**18, 2**20, 2**22, 2**24)
MESSAGE_BYTES = (2**10, 2**14, 2**18, 2**20, 2**22)
GROUP_BYTES = (2**10, 2**18, 2**22)  # the same among devices of smaller groups
OVERLAP_SIDE, OVERLAP_BYTES = 256, 2**20  # of a product and an all-reduce that take about as long on a CPU

Tell = Callable[[str], None]


#: Floating types to multiply in, by platform: those that its programs use.
DTYPES: Mapping[str, tuple[str, ...]] = {"cpu": ("float32",), "gpu": ("float32", "bfloat16"), "tpu": ("bfloat16",)}


def calibrate(base: Cluster, tell: Tell = lambda what: None) -> Calibration:
    """Measure the local devices and fit `base`, which describes them; `tell` hears what is being compiled and timed."""
    return fit(measure(base, tell), base)


def steps(base: Cluster) -> int:
    """How often `measure` will call `tell`."""
    overlap = len(OVERLAP) if jax.local_device_count() > 1 else 0
    return REPEATS + len(_products()) + len(STREAM_BYTES) + len(_messages(base)) + overlap


@dataclass(frozen=True)
class _Trial:
    """A program that does an operation so many times in a row, and what it is run on."""

    program: Callable[..., Any]
    arguments: tuple[Any, ...]
    times: int

    def seconds(self) -> float:
        """Seconds of one run."""
        begin = time.perf_counter()
        jax.block_until_ready(self.program(*self.arguments))
        return time.perf_counter() - begin


Chained = Callable[[int], _Trial]


def measure(base: Cluster, tell: Tell = lambda what: None) -> Measured:
    """Measurements on `jax.local_devices()`, in what such devices can do; `tell` hears what is compiled and timed."""
    mesh = jax_compat.auto_mesh(np.array(jax.local_devices()), ("x",))
    products, streams, messages = _products(), [Stream(nbytes) for nbytes in STREAM_BYTES], _messages(base)
    each = _timed(
        {
            **{str(p): partial(_multiply, mesh, p) for p in products},
            **{str(s): partial(_pass, mesh, s) for s in streams},
            **{str(m): partial(_send, m) for m in messages},
            **({what: partial(_overlap, mesh, what) for what in OVERLAP} if mesh.size > 1 else {}),
        },
        _trial(mesh, lambda x: x, [(8,)], "float32", 1),
        tell,
    )
    return Measured(
        {p: each[str(p)] for p in products},
        {s: each[str(s)] for s in streams},
        {m: each[str(m)] for m in messages},
        _hidden(*(each[what] for what in OVERLAP)) if mesh.size > 1 else 0.0,
    )


def _products() -> list[Product]:
    dtypes = DTYPES.get(jax.devices()[0].platform, ("float32",))
    return [Product(*extents, dtype) for dtype in dtypes for extents in EXTENTS]


def _messages(base: Cluster) -> list[Message]:
    """Of vectors of float32 that the devices of a group share evenly; none where there is one device."""
    devices = jax.local_device_count()
    kinds = [kind for kind in COLLECTIVES if base.device.reduce_scatter or kind != "reduce-scatter"]
    smaller = [n for n in sorted({2, devices // 2}) if 1 < n < devices and devices % n == 0]
    sizes = [(nbytes, devices) for nbytes in MESSAGE_BYTES if devices > 1]
    sizes += [(nbytes, n) for n in smaller for nbytes in GROUP_BYTES]
    return [Message(kind, 4 * max(n, nbytes // 4 // n * n), n) for kind in kinds for nbytes, n in sizes]


def _compiled_trial(chained: Chained) -> _Trial:
    """A trial that has run once: the short one, or the long one if the short is over too soon."""
    trial = chained(SHORT)
    trial.seconds()  # compiles
    if trial.seconds() < SOON:
        trial = chained(LONG)
        trial.seconds()
    return trial


def _timed(chains: Mapping[str, Chained], empty: _Trial, tell: Tell) -> Mapping[str, float]:
    """Seconds of one operation of each; a clock tick at least, so that its logarithm exists."""
    trials: dict[str, _Trial] = {}
    for what, chained in chains.items():
        tell(what)
        trials[what] = _compiled_trial(chained)
    rounds: list[Mapping[str, float]] = []
    nothing: list[float] = []
    for i in range(REPEATS):
        tell(f"round {i + 1} of {REPEATS}")
        nothing.append(empty.seconds())
        rounds.append({what: trial.seconds() for what, trial in trials.items()})
    least = {what: min(r[what] for r in rounds) - min(nothing) for what in trials}
    return {what: max(least[what], 1e-9) / trial.times for what, trial in trials.items()}


def _trial(mesh: Any, local: Callable[..., Any], shapes: Sequence[tuple[int, ...]], dtype: str, times: int) -> _Trial:
    """A program that runs `local`, the whole chain, on arrays of these shapes on every device."""
    spec = PartitionSpec(mesh.axis_names)
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
    arguments = tuple(jax.device_put(jnp.full((mesh.size, *s), 0.5, dtype), place) for s in shapes)
    return _Trial(program, arguments, times)


def _multiply(mesh: Any, product: Product, times: int) -> _Trial:
    shapes = [(product.contracted, product.columns), *[(product.rows, product.contracted)] * times]
    return _trial(mesh, lambda b, *many: [a @ b for a in many], shapes, product.dtype, times)


def _pass(mesh: Any, stream: Stream, times: int) -> _Trial:
    """Half of the bytes are read and half are written, none of them twice: a cache would flatter."""
    return _trial(mesh, lambda *many: [x + 1 for x in many], [(stream.nbytes // 8,)] * times, "float32", times)


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


def _chained(collective: Callable[[Any, int], Any], n: int, times: int, x: Any) -> Any:
    for _ in range(times):
        x = collective(x, n) * 0.5
    return x


def _send(message: Message, times: int) -> _Trial:
    devices = np.array(jax.local_devices()).reshape(-1, message.group)
    mesh = jax_compat.auto_mesh(devices, ("groups", "x"))
    chain = partial(_chained, COLLECTIVES[message.kind], message.group, times)
    return _trial(mesh, chain, [(message.nbytes // 4,)], "float32", times)


OVERLAP = ("products alone", "all-reduces alone", "products beside all-reduces")


def _overlap(mesh: Any, what: str, times: int) -> _Trial:
    """One of `OVERLAP`: products and all-reduces that do not wait for each other."""
    side, length = OVERLAP_SIDE, OVERLAP_BYTES // 4

    def products(x: Any) -> Any:
        for _ in range(times):
            x = x @ x * (1 / side)
        return x

    moves = partial(_chained, COLLECTIVES["all-reduce"], mesh.size, times)
    if what == OVERLAP[0]:
        return _trial(mesh, products, [(side, side)], "float32", times)
    if what == OVERLAP[1]:
        return _trial(mesh, moves, [(length,)], "float32", times)
    both = [(side, side), (length,)]
    return _trial(mesh, lambda x, y: (products(x), moves(y)), both, "float32", times)


def _hidden(compute: float, move: float, both: float) -> float:
    """Share of the shorter of the two that is saved by running them beside each other."""
    return float(np.clip((compute + move - both) / min(compute, move), 0.0, 1.0))
