"""Functions and calls that are mistakes: what the rows of `tests.programs.mistakes` are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.api import parallelize
from autopar.hardware.cluster import Cluster
from autopar.plans.plan import Plan
from tests.programs.steps import array

X, W = array(16, 8), array(8, 8)
MUTABLE = jax.new_ref(jnp.zeros(()))
LINE = r"mistake\w+\.py:\d+"

#: Rows of mistakes: a title, a function that makes it, its error's class, its message as a pattern.
Mistakes = tuple[tuple[str, Callable[[], Any], type[Exception], str], ...]


def product(w: jax.Array, x: jax.Array) -> Any:
    return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), x.sum()


def planned(fn: Callable[..., Any] = product, args: Sequence[Any] = (W, X), **options: Any) -> Plan:
    return parallelize(fn, **{"mesh": (8,), **options}).plan(*args)


# Functions that cannot be traced


def branches(x: jax.Array) -> Any:
    return x if x.sum() > 0 else -x


def converts(x: jax.Array) -> Any:
    return float(x[0, 0])


def counts(x: jax.Array) -> Any:
    return [x for _ in range(x[0, 0].astype(int))]


def masks(x: jax.Array) -> Any:
    return x[x > 0]


def uses_numpy(x: jax.Array) -> Any:
    return np.asarray(x)


def prints_in_order(x: jax.Array) -> Any:
    jax.debug.print("{}", x.sum(), ordered=True)
    return x


def constrains(x: jax.Array) -> Any:
    mesh = AbstractMesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("rows")))


def mutates(x: jax.Array) -> Any:
    MUTABLE[...] = MUTABLE[...] + x.sum()
    return x * 2


def composes(x: jax.Array) -> Any:
    ref = jax.new_ref(x)
    return jax.lax.composite(lambda ref: ref[...] * 2, "doubled")(ref)


def mutable(x: jax.Array) -> Any:
    return {"y": jax.new_ref(x)}


class Leaky:
    """Keeps a traced value, as a model that stores its last activation would."""

    def __init__(self) -> None:
        self.kept: Any = 0.0

    def keep(self, x: jax.Array) -> Any:
        self.kept = jnp.tanh(x)
        return self.kept @ W

    def keep_in_scan(self, x: jax.Array) -> Any:
        def body(carry: jax.Array, _: None) -> Any:
            self.kept = carry * 2
            return self.kept, None

        return jax.lax.scan(body, x, None, length=2)

    def keep_in_gradient(self, x: jax.Array) -> Any:
        def inner(x: jax.Array) -> jax.Array:
            self.kept = x * 2
            return jnp.sum(x**2)

        return jax.grad(inner)(x)

    def use(self, x: jax.Array) -> Any:
        return x + self.kept


def use_of_a_leak() -> None:
    leaky = Leaky()
    jax.make_jaxpr(leaky.keep)(X)
    planned(leaky.use, (X,))


def closes_over_a_tracer() -> None:
    jax.jit(lambda x: parallelize(lambda w: x @ w, mesh=(8,))(W))(X)


# Arguments and plans


DROPOUT = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


class NoPytree:
    pass


class Counter:
    """An object whose method counts its own calls."""

    def __init__(self) -> None:
        self.count = 0

    @parallelize(mesh=(8,))
    def step(self, x: jax.Array) -> Any:
        self.count += 1
        return x


def sums_over_its_mesh(w: jax.Array, x: jax.Array) -> Any:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    return w - mapped(w).sum(), x.sum()


def mapped_over(shape: tuple[int, ...], names: tuple[str, ...], spec: Any) -> Any:
    mesh = AbstractMesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    return jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=spec, out_specs=spec)


def maps_its_batch(w: jax.Array, x: jax.Array) -> Any:
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    centred = lambda x, w: x @ w - (x @ w).mean(0)  # noqa: E731
    mapped = jax.shard_map(centred, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    return w - jax.grad(lambda w: (mapped(x, w) ** 2).sum())(w), x.sum()


def maps_twice(x: jax.Array) -> Any:
    return mapped_over((2, 4), ("x", "y"), P("x"))(x) + mapped_over((8,), ("x",), P("x"))(x)


def drops_its_update(state: Any, x: jax.Array) -> Any:
    state["w"] = state["w"] - x.sum()
    return x.mean()


def appends(history: list[Any], x: jax.Array) -> Any:
    history.append(jnp.sin(x))
    return x


def in_state(value: Any) -> Any:
    return partial(planned, lambda state: state["w"], ({"w": W, "extra": value},))


def donated_twice() -> None:
    step = parallelize(lambda state, x: ({"w": state["w"] * x.sum()}, 0), mesh=(8,))
    state, _ = step({"w": W}, X)
    step(state, X)
    step(state, X)


def loaded(fn: Callable[..., Any] = product, args: Sequence[Any] = (W, X), **options: Any) -> None:
    parallelize(fn, plan=planned(), **options).plan(*args)


def gathered_after_donation() -> None:
    step = parallelize(lambda state, x: ({"w": state["w"] * x.sum()}, 0), mesh=(8,))
    state, _ = step({"w": W}, X)
    step(state, X)
    autopar.gather(state)


def compiled_with(options: Any) -> None:
    parallelize(product, mesh=(8,), donate_argnums=()).lower(W, X).compile(options)


def cluster_with(**figures: Any) -> Cluster:
    usual = {"alpha": 1e-6, "beta": 1e-9, "peak_flops": 1e12, "memory_bandwidth": 1e11, "memory_bytes": 10**10}
    return Cluster.custom(**{"mesh_shape": (2, 4), **usual, **figures})


def runs_on_too_few() -> None:
    parallelize(product, cluster=Cluster.preset("dgx-h100", hosts=2))(W, X)
