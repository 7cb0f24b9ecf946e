"""Small random programs on random meshes, for comparing the optimizer with exhaustive search.

A program is a list of instructions drawn from `MOVES`, each of which reads earlier values and appends new ones; it is
run as an ordinary JAX function, so that tracing and rules are the real ones. `draw` repeats until the program has
between 4 and 10 decisions. Equal seeds give equal programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import jax
import jax.numpy as jnp

from autopar.hardware.cluster import Cluster, LogicalMesh

MESHES = ((2, 2), (2, 3), (2, 4), (4, 2), (3, 2))
EXTENTS = (2, 3, 4, 6, 8, 12, 16)

Shape = tuple[int, ...]
Run = Callable[[list[Any], Mapping[str, Any]], None]


@dataclass
class Recipe:
    """A program under construction: shapes of its values, shapes of its parameters, and what to run."""

    rng: Random
    values: list[Shape]
    params: dict[str, Shape] = field(default_factory=dict)
    steps: list[Run] = field(default_factory=list)

    def extent(self) -> int:
        return self.rng.choice(EXTENTS)

    def param(self, *shape: int) -> str:
        name = f"w{len(self.params)}"
        self.params[name] = shape
        return name

    def any(self, least: int = 1) -> int:
        """A value of at least this rank, later ones more often; the input where there is none."""
        fit = [i for i, s in enumerate(self.values) if len(s) >= least] or [0]
        return fit[max(self.rng.randrange(len(fit)), self.rng.randrange(len(fit)))]

    def do(self, shape: Shape, run: Callable[[list[Any], Mapping[str, Any]], Any]) -> int:
        """Append a value of this shape."""
        self.values.append(shape)
        self.steps.append(lambda values, params: values.append(run(values, params)))
        return len(self.values) - 1


def _linear(r: Recipe, source: int | None = None, width: int | None = None) -> int:
    i = r.any() if source is None else source
    shape, n = r.values[i], width or r.extent()
    w = r.param(shape[-1], n)
    return r.do((*shape[:-1], n), lambda v, p: v[i] @ p[w])


def _transpose(r: Recipe) -> None:
    i = r.any(2)
    order = list(range(len(r.values[i])))
    r.rng.shuffle(order)
    r.do(tuple(r.values[i][d] for d in order), lambda v, p: jnp.transpose(v[i], order))


def _reduce(r: Recipe) -> None:
    i = r.any(2)
    dim = r.rng.randrange(len(r.values[i]))
    function = r.rng.choice([jnp.sum, jnp.max])
    r.do(tuple(n for d, n in enumerate(r.values[i]) if d != dim), lambda v, p: function(v[i], axis=dim))


def _elementwise(r: Recipe, source: int | None = None) -> int:
    i = r.any() if source is None else source
    function = r.rng.choice([jnp.tanh, jax.nn.relu, lambda x: 0.5 * x, jnp.negative])
    return r.do(r.values[i], lambda v, p: function(v[i]))


def _residual(r: Recipe) -> None:
    i = r.any()
    j = r.rng.choice([k for k, s in enumerate(r.values) if s == r.values[i]])
    function = r.rng.choice([jnp.add, jnp.multiply, jnp.subtract])
    r.do(r.values[i], lambda v, p: function(v[i], v[j]))


def _diamond(r: Recipe) -> None:
    """One value through two products, joined again; without a function between, both may stay partial sums."""
    i, width = r.any(), r.extent()
    ends = [_linear(r, i, width) for _ in range(2)]
    ends = [_elementwise(r, e) if r.rng.random() < 0.4 else e for e in ends]
    join = r.rng.choice([jnp.add, jnp.add, jnp.multiply])
    r.do(r.values[ends[0]], lambda v, p: join(v[ends[0]], v[ends[1]]))


def _shared(r: Recipe) -> None:
    """One value read by several products, each along another dimension."""
    i = r.any(2)
    rank = len(r.values[i])
    for dim in r.rng.sample(range(rank), r.rng.randint(2, rank)):
        n, extent = r.extent(), r.values[i][dim]
        w = r.param(extent, n)
        shape = (*(x for d, x in enumerate(r.values[i]) if d != dim), n)
        r.do(shape, lambda v, p, dim=dim, w=w: jnp.tensordot(v[i], p[w], ((dim,), (0,))))


def _product(r: Recipe) -> None:
    """A value times its own function or another value, over the last dimension of both."""
    i = r.any(2)
    j = r.rng.choice([k for k, s in enumerate(r.values) if s[-1] == r.values[i][-1] and len(s) == 2] or [i])
    shape = (*r.values[i][:-1], *r.values[j][:-1])
    if len(shape) <= 3 and math.prod(shape) <= 4096:
        r.do(shape, lambda v, p: jnp.tensordot(v[i], v[j], ((-1,), (-1,))))


def _bias(r: Recipe) -> None:
    i = r.any()
    b = r.param(r.values[i][-1])
    r.do(r.values[i], lambda v, p: v[i] + p[b])


def _normalise(r: Recipe) -> None:
    i = r.any(2)
    r.do(r.values[i], lambda v, p: v[i] - jnp.max(v[i], axis=-1, keepdims=True))


def _merge(r: Recipe) -> None:
    i = r.any(2)
    shape = (math.prod(r.values[i][:2]), *r.values[i][2:])
    r.do(shape, lambda v, p: v[i].reshape(shape))


def _cumulate(r: Recipe) -> None:
    i = r.any()
    r.do(r.values[i], lambda v, p: jnp.cumsum(v[i], axis=-1))


MOVES = (
    *(_linear, _linear, _linear, _diamond, _diamond, _shared, _shared, _transpose, _reduce, _residual, _residual),
    *(_elementwise, _product, _bias, _normalise, _merge, _cumulate),
)


@dataclass(frozen=True)
class Program:
    """A function of (params, x) with abstract arguments, and the mesh to plan it for."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: LogicalMesh


def program(seed: int) -> Program:
    """The program of this seed."""
    rng = Random(seed)
    r = Recipe(rng, [tuple(rng.choice(EXTENTS) for _ in range(rng.choice((2, 2, 3))))])
    trains = rng.random() < 0.3
    for _ in range(rng.randint(1, 2) if trains else rng.randint(2, 4)):
        rng.choice(MOVES)(r)
    abstract = lambda s: jax.ShapeDtypeStruct(s, "float32")  # noqa: E731
    args = ({name: abstract(s) for name, s in r.params.items()}, abstract(r.values[0]))
    kept = len(r.values) - 1, rng.randrange(len(r.values))
    return Program(_trained(r.steps) if trains else _applied(r.steps, kept), args, _mesh(rng))


def _values(steps: list[Run], params: Any, x: Any) -> list[Any]:
    values = [x]
    for run in steps:
        run(values, params)
    return values


def _applied(steps: list[Run], kept: tuple[int, ...]) -> Callable[..., Any]:
    """The last value and another one."""

    def step(params: Any, x: Any) -> Any:
        values = _values(steps, params, x)
        return tuple(values[i] for i in kept)

    return step


def _trained(steps: list[Run]) -> Callable[..., Any]:
    """One step of gradient descent on the mean square of the last value."""

    def step(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: jnp.mean(_values(steps, p, x)[-1] ** 2))(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step


def _mesh(rng: Random) -> LogicalMesh:
    """A mesh with prices under which computing and communicating compete."""
    shape = rng.choice(MESHES)
    alpha = tuple(10 ** rng.uniform(-9, -6.5) for _ in shape)
    beta = tuple(10 ** rng.uniform(-11, -8.5) for _ in shape)
    peak, bandwidth = 10 ** rng.uniform(8.5, 11), 10 ** rng.uniform(9, 11)
    overhead = rng.choice((0.0, 1e-8))
    cluster = Cluster.custom(shape, alpha, beta, peak, bandwidth, 10**9, kernel_overhead=overhead)
    overlap, bucket = rng.choice(((0.0, 0.0), (0.5, 0.0), (0.7, 1e4)))
    half = rng.choice(((0.0, 0.0, 0.0), (4.0, 8.0, 6.0)))
    device = replace(cluster.device, overlap=overlap, bucket_bytes=bucket, half_rate_extents=half)
    return replace(cluster, device=device).logical_mesh(shape)
