"""What a zoo entry is: a train step, and enough to make its arguments, real or abstract.

A family describes its parameters as a tree of `Param` (a shape and how to draw it), its loss as a function of that
tree and a batch, and passes both to `trainable`, which adds the optimizer. Nothing here knows about sharding: a step of
the zoo is what a user would write.

Mixed precision follows Micikevicius et al. (2018), "Mixed precision training": parameters and Adam moments are kept in
`Precision.params` (float32) and cast to `Precision.compute` (bfloat16) where they are used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

Tree = Any
State = Any
Batch = dict[str, Tree]
Metrics = dict[str, jax.Array]
MegatronTable = tuple[tuple[str, PartitionSpec], ...]


@dataclass(frozen=True)
class Model:
    """One entry of the zoo.

    Attributes:
        name: the target it was built from, such as "gpt-2.6b-scan".
        family: the part before the size, such as "gpt".
        step: (state, batch) -> (new state, metrics), metrics["loss"] a scalar; a plain function, not under jit.
        init: key -> state, a dict with "params", "opt" and for some families "stats" (for flax-linen a `TrainState`).
        make_batch: key -> batch; the same key gives the same batch.
        megatron: the tensor-parallel expert's layout (Shoeybi et al., 2019): a glob over
            `keystr(path, simple=True, separator="/")` of the parameter and its spec over one axis named "model".
        notes: where the dimensions come from and what differs from their source.
    """

    name: str
    family: str
    step: Callable[[State, Batch], tuple[State, Metrics]]
    init: Callable[[jax.Array], State]
    make_batch: Callable[[jax.Array], Batch]
    megatron: MegatronTable = ()
    notes: str = ""

    def abstract_args(self) -> tuple[State, Batch]:
        """(state, batch) as `ShapeDtypeStruct`s: nothing is allocated, whatever the size of the model."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        return jax.eval_shape(self.init, key), jax.eval_shape(self.make_batch, key)

    def parameters(self) -> int:
        """The number of trainable scalars."""
        state, _ = self.abstract_args()
        params = state["params"] if isinstance(state, dict) else state.params
        return sum(leaf.size for leaf in jax.tree.leaves(params))


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtype that parameters are kept in and the one they are used in."""

    params: str
    compute: str


SINGLE = Precision("float32", "float32")
MIXED = Precision("float32", "bfloat16")
HALF = Precision("float32", "float16")  # for devices without bfloat16, such as those that the published sizes ran on


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter: its shape, drawn from a normal distribution with `mean` and `std` (0: constant)."""

    shape: tuple[int, ...]
    std: float = 0.0
    mean: float = 0.0


DRAW = 2**24
"""Numbers drawn at once: XLA compiles every draw anew, so that small arrays share one."""


def draw(spec: Tree, key: jax.Array, dtype: str) -> Tree:
    """Arrays for a tree of `Param`."""
    leaves, treedef = jax.tree.flatten(spec, is_leaf=lambda node: isinstance(node, Param))
    noise = iter(normals([leaf.shape for leaf in leaves if leaf.std], key, dtype))
    return treedef.unflatten([_array(leaf, next(noise) if leaf.std else None, dtype) for leaf in leaves])


def _array(param: Param, noise: jax.Array | None, dtype: str) -> jax.Array:
    return jnp.full(param.shape, param.mean, dtype) if noise is None else param.mean + param.std * noise


def normals(shapes: Sequence[tuple[int, ...]], key: jax.Array, dtype: str) -> list[jax.Array]:
    """Standard normal arrays of the given shapes; run number i of shapes is drawn from `fold_in(key, i)`."""
    arrays: list[jax.Array] = []
    for number, run in enumerate(_runs(shapes)):
        sizes = [math.prod(shape) for shape in run]
        values = jax.random.normal(jax.random.fold_in(key, number), (sum(sizes),), dtype)
        ends = list(itertools.accumulate(sizes))
        pieces = (jax.lax.slice_in_dim(values, end - size, end) for size, end in zip(sizes, ends, strict=True))
        arrays += [piece.reshape(shape) for piece, shape in zip(pieces, run, strict=True)]
    return arrays


def _runs(shapes: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """The shapes in order, in runs of at most `DRAW` numbers or of one shape."""
    runs: list[list[tuple[int, ...]]] = []
    filled = DRAW
    for shape in shapes:
        size = math.prod(shape)
        if filled + size > DRAW:
            runs.append([])
            filled = 0
        runs[-1].append(shape)
        filled += size
    return runs


def norm_spec(width: int) -> dict[str, Param]:
    """Scale and bias of a norm over so many channels."""
    return {"scale": Param((width,), mean=1.0), "bias": Param((width,))}


def stacked(spec: Tree, count: int) -> Tree:
    """The tree of `Param` of `count` equal blocks, stacked along a new leading dimension."""
    return jax.tree.map(
        lambda p: Param((count, *p.shape), p.std, p.mean), spec, is_leaf=lambda node: isinstance(node, Param)
    )


def repeat_blocks(
    block: Callable[..., Tree], params: Tree, x: Tree, *shared: Tree, scan: bool = False, remat: bool = False
) -> Tree:
    """Apply `block(layer_params, x, *shared)` for every layer, whose parameters are as `block_params` makes them.

    The block is under jit, so that JAX traces and differentiates it once and not once per layer. `shared` is what
    layers have in common (masks, rotary tables); it is passed, not closed over, so that all calls share one jaxpr.
    """
    body = jax.checkpoint(jax.jit(block)) if remat else jax.jit(block)
    if scan:
        return jax.lax.scan(lambda carry, layer: (body(layer, carry, *shared), None), x, params)[0]
    for layer in params:
        x = body(layer, x, *shared)
    return x


def block_params(spec: Tree, count: int, *, scan: bool) -> Tree:
    """`count` equal blocks in the form that `repeat_blocks` takes."""
    return stacked(spec, count) if scan else tuple(spec for _ in range(count))


def trainable(
    spec: Tree,
    loss: Callable[[Tree, Batch], jax.Array],
    optimizer: optax.GradientTransformation,
    dtype: str,
) -> tuple[Callable[[jax.Array], State], Callable[[State, Batch], tuple[State, Metrics]]]:
    """(init, step) of a model without mutable statistics: state = {"params", "opt"}, metrics = {"loss"}."""

    @jax.jit
    def init(key: jax.Array) -> State:
        params = draw(spec, key, dtype)
        return {"params": params, "opt": optimizer.init(params)}

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": value}

    return init, step


def trainable_with_statistics(
    spec: Tree,
    stats: Tree,
    loss: Callable[[Tree, Tree, Batch], tuple[jax.Array, Tree]],
    optimizer: optax.GradientTransformation,
    dtype: str,
) -> tuple[Callable[[jax.Array], State], Callable[[State, Batch], tuple[State, Metrics]]]:
    """Like `trainable`, for a loss that also returns statistics: state = {"params", "stats", "opt"}."""

    @jax.jit
    def init(key: jax.Array) -> State:
        params = draw(spec, key, dtype)
        return {"params": params, "stats": draw(stats, key, dtype), "opt": optimizer.init(params)}

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        compute = jax.value_and_grad(loss, has_aux=True)
        (value, stats), grads = compute(state["params"], state["stats"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "stats": stats, "opt": opt}, {"loss": value}

    return init, step


def trainable_with_master(
    spec: Tree,
    loss: Callable[[Tree, Batch], jax.Array],
    optimizer: optax.GradientTransformation,
    dtype: str,
) -> tuple[Callable[[jax.Array], State], Callable[[State, Batch], tuple[State, Metrics]]]:
    """Like `trainable`, in the mixed precision of Micikevicius et al. (2018): state = {"params", "master", "opt"}.

    Parameters and gradients are of `dtype`; the optimizer works on a float32 copy of the parameters, the master. The
    gradients are clipped by their global norm, so that all of them are there before the first is used. With bfloat16
    and Adam a parameter takes 2 + 2 + 12 bytes (Rajbhandari et al., 2020, section 3.1).
    """
    clip = optax.clip_by_global_norm(1.0)

    @jax.jit
    def init(key: jax.Array) -> State:
        params = draw(spec, key, dtype)
        master = _cast(params, "float32")
        return {"params": params, "master": master, "opt": optimizer.init(master)}

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        grads, _ = clip.update(grads, clip.init(grads))
        updates, opt = optimizer.update(_cast(grads, "float32"), state["opt"], state["master"])
        master = optax.apply_updates(state["master"], updates)
        return {"params": _cast(master, dtype), "master": master, "opt": opt}, {"loss": value}

    return init, step


def _cast(tree: Tree, dtype: str) -> Tree:
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def token_batch(batch: int, seq: int, vocab: int) -> Callable[[jax.Array], Batch]:
    """make_batch of a language model: tokens and next tokens, int32[batch, seq]."""

    def make_batch(key: jax.Array) -> Batch:
        text = jax.random.randint(key, (batch, seq + 1), 0, vocab, jnp.int32)
        return {"tokens": text[:, :-1], "labels": text[:, 1:]}

    return make_batch


def lengths_between(key: jax.Array, batch: int, most: int) -> jax.Array:
    """Lengths of padded sequences, int32[batch]: from half of `most`, at least 1, to `most`."""
    return jax.random.randint(key, (batch,), max(1, most // 2), most + 1, jnp.int32)


def ended_text(key: jax.Array, batch: int, seq: int, end: int, words: tuple[int, int]) -> jax.Array:
    """Text of different lengths, int32[batch, seq]: words in [words[0], words[1]), the token `end`, then zeros."""
    length_key, two = jax.random.split(key)
    last = lengths_between(length_key, batch, seq)[:, None] - 1
    text = jax.random.randint(two, (batch, seq), *words, jnp.int32)
    where = jnp.arange(seq)
    return jnp.where(where < last, text, jnp.where(where == last, end, 0))


def image_batch(batch: int, size: int, channels: int, classes: int, dtype: str) -> Callable[[jax.Array], Batch]:
    """make_batch of a classifier: images dtype[batch, size, size, channels] and labels int32[batch]."""

    @jax.jit
    def make_batch(key: jax.Array) -> Batch:
        images, noise = normals([(batch, size, size, channels), (batch,)], key, dtype)
        return {"images": images, "labels": labels_from(noise, classes)}

    return make_batch


def labels_from(noise: jax.Array, classes: int) -> jax.Array:
    """Labels in [0, classes), int32, from normal noise: low digits of it, about uniform."""
    return jnp.abs(noise * 2**16).astype(jnp.int32) % classes


def with_layer_axis(table: Mapping[str, PartitionSpec], names: frozenset[str]) -> MegatronTable:
    """The Megatron table of a scanned model: parameters in `names` carry the layer as their first dimension."""
    return tuple((f"*/{name}", PartitionSpec(None, *spec) if name in names else spec) for name, spec in table.items())
