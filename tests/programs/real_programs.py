"""Programs as people write them, each with arguments: what `test_real_programs` runs on eight devices.

A program is a function without arguments that returns (function, arguments) or (function, arguments, options of
`parallelize`). `PROGRAMS` is the table of all of them; shapes are small, batches and widths divide by eight.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.programs.kept_programs import callback_in_a_branch
from tests.programs.steps import array, loss, sgd, two_layers

# Random keys in the state


def dropout(keys: Callable[[int], jax.Array]) -> Any:
    def step(state: Any, x: jax.Array) -> Any:
        key, sub = jax.random.split(state["key"])
        mask = jax.random.bernoulli(sub, 0.5, x.shape)
        grads = jax.grad(lambda p: loss(p, jnp.where(mask, x, 0.0)))(state["params"])
        return {"key": key, "params": sgd(state["params"], grads)}, mask

    return step, ({"key": keys(3), "params": two_layers()}, array(16, 8))


def key_arrays() -> Any:
    def step(keys: jax.Array, x: jax.Array) -> Any:
        noise = jax.vmap(lambda k: jax.random.normal(k, (8,)))(keys)
        return jax.vmap(lambda k: jax.random.fold_in(k, 1))(keys), x + noise

    return step, (jax.random.split(jax.random.key(0), 8), array(8, 8))


# Leaves that are no float arrays


class Batch(NamedTuple):
    x: jax.Array
    label: jax.Array
    valid: jax.Array
    weights: jax.Array | None


@partial(jax.tree_util.register_dataclass, data_fields=["params", "step", "rate"], meta_fields=["name"])
@dataclasses.dataclass(frozen=True)
class Trained:
    params: Any
    step: Any
    rate: Any
    name: str


def mixed_leaves() -> Any:
    def step(state: Trained, batch: Batch) -> Any:
        def masked(params: Any) -> jax.Array:
            logits = jnp.tanh(batch.x @ params["up"]) @ params["down"]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.label)
            return jnp.sum(jnp.where(batch.valid, losses, 0.0)) / jnp.maximum(jnp.sum(batch.valid), 1)

        value, grads = jax.value_and_grad(masked)(state.params)
        new = dataclasses.replace(state, params=sgd(state.params, grads, state.rate), step=state.step + 1)
        return new, {"loss": value, "nothing": None, "step": state.step}

    batch = Batch(array(16, 8), array(16, dtype=jnp.int32), jnp.arange(16) % 3 > 0, None)
    return step, (Trained(two_layers(), 0, 0.5, "a"), batch)


def keyword_arguments() -> Any:
    def step(params: Any, *, x: jax.Array, scale: float = 2.0) -> Any:
        return sgd(params, jax.grad(loss)(params, x * scale))

    def positional(params: Any, batch: Any) -> Any:
        return step(params, **batch)

    return positional, (two_layers(), {"x": array(16, 8), "scale": 0.5})


def static_arguments() -> Any:
    def step(params: Any, activation: str, x: jax.Array, layers: int) -> Any:
        for _ in range(layers):
            x = getattr(jnp, activation)(x @ params["up"]) @ params["down"]
        return x

    return step, (two_layers(), "tanh", array(16, 8), 2), {"static_argnums": (1, 3)}


def empty_states() -> Any:
    def step(state: Any, x: jax.Array) -> Any:
        params, empty, nothing = state
        return (sgd(params, jax.grad(loss)(params, x)), empty, nothing), x.sum()

    return step, ((two_layers(), (), None), array(16, 8))


def zero_sizes() -> Any:
    def step(x: jax.Array, none: jax.Array) -> Any:
        both = jnp.concatenate([x, none], axis=0)
        return both * 2, none.sum(axis=0), jnp.zeros((0, 8)) + x[0]

    return step, (array(16, 8), jnp.zeros((0, 8)))


def scalars_only() -> Any:
    return lambda a, b: (a * 2 + b, jnp.sin(a), a > b), (1.5, 2)


def constants_only() -> Any:
    return lambda x: (3, 2.5, jnp.ones((8, 8)), jnp.arange(8), x), (array(8),)


def numpy_arguments() -> Any:
    return lambda x, y: x @ y + np.float32(1), (
        np.ones((16, 8), np.float32),
        np.arange(64, dtype=np.float32).reshape(8, 8),
    )


def complex_values() -> Any:
    def step(x: jax.Array) -> Any:
        spectrum = jnp.fft.fft(x, axis=-1)
        return spectrum, jnp.abs(spectrum).sum(), jnp.real(jnp.fft.ifft(spectrum * 1j))

    return step, (array(16, 8),)


def half_precision() -> Any:
    def step(params: Any, x: jax.Array) -> Any:
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        grads = jax.grad(lambda p: loss(p, x).astype(jnp.float32))(low)
        return sgd(params, jax.tree.map(lambda g: g.astype(jnp.float32), grads)), grads["up"]

    return step, (two_layers(), array(16, 8, dtype=jnp.bfloat16))


def bits_and_bytes() -> Any:
    def step(x: jax.Array, flags: jax.Array) -> Any:
        packed = (x.astype(jnp.uint8) << 2) ^ jnp.uint8(5)
        return (
            packed,
            flags & (packed > 8),
            lax.population_count(packed),
            lax.bitcast_convert_type(array(8, 8), jnp.int32),
        )

    return step, (array(16, 8, dtype=jnp.int32), jnp.arange(8) % 2 == 0)


# Order of what comes back


def state_only() -> Any:
    return lambda p, x: sgd(p, jax.grad(loss)(p, x)), (two_layers(), array(16, 8))


def loss_first() -> Any:
    def step(params: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return value, sgd(params, grads)

    return step, (two_layers(), array(16, 8))


def batch_first() -> Any:
    def step(x: jax.Array, params: Any) -> Any:
        return sgd(params, jax.grad(loss)(params, x)), jnp.float32(1)

    return step, (array(16, 8), two_layers())


def same_value_twice() -> Any:
    def step(params: Any, x: jax.Array) -> Any:
        y = x @ params["up"]
        return y, y, params["up"], x

    return step, (two_layers(), array(16, 8))


def adam() -> Any:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 10)))

    def step(state: Any, x: jax.Array) -> Any:
        params, opt = state
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), value

    params = two_layers()
    return step, ((params, optimizer.init(params)), array(16, 8))


def flax_train_state() -> Any:
    struct = importlib.import_module("flax.struct")

    @struct.dataclass
    class State:
        params: Any
        momentum: Any
        count: int
        apply: Any = struct.field(pytree_node=False)

    def step(state: Any, x: jax.Array) -> Any:
        grads = jax.grad(state.apply)(state.params, x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state.momentum, grads)
        return state.replace(params=sgd(state.params, momentum), momentum=momentum, count=state.count + 1)

    params = two_layers()
    return step, (State(params, jax.tree.map(jnp.zeros_like, params), 0, loss), array(16, 8))


def equinox_module() -> Any:
    eqx = importlib.import_module("equinox")
    model = eqx.nn.MLP(8, 8, 32, 1, key=jax.random.key(0))
    arrays, rest = eqx.partition(model, eqx.is_array)

    def step(arrays: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(lambda a: jnp.mean(jax.vmap(eqx.combine(a, rest))(x) ** 2))(arrays)
        return jax.tree.map(lambda p, g: p - 0.1 * g, arrays, grads), value

    return step, (arrays, array(16, 8))


# Calls and control flow


def nested_jit() -> Any:
    @jax.jit
    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.jit(jnp.tanh)(x @ w)

    def step(params: Any, x: jax.Array) -> Any:
        return jax.jit(jax.grad(lambda p: layer(p["down"], layer(p["up"], x)).sum()))(params)

    return step, (two_layers(), array(16, 8))


def scan_of_mixed_carries() -> Any:
    def step(w: jax.Array, xs: jax.Array) -> Any:
        def body(carry: Any, x: jax.Array) -> Any:
            h, count, flag, total = carry
            h = jnp.tanh(x @ w + h)
            return (h, count + 1, ~flag, total + h.sum()), (h[:, 0], count)

        init = (jnp.zeros((16, 8)), 0, True, 0.0)
        return lax.scan(body, init, xs)

    return step, (array(8, 8), array(3, 16, 8))


def scan_in_reverse() -> Any:
    def step(w: jax.Array, xs: jax.Array) -> Any:
        def run(w: jax.Array) -> jax.Array:
            h, ys = lax.scan(lambda h, x: (jnp.sin(h @ w + x), h), jnp.zeros((8, 8)), xs, reverse=True, unroll=2)
            return h.sum() + ys.sum()

        return jax.grad(run)(w)

    return step, (array(8, 8), array(4, 8, 8))


def scan_of_a_reshaped_array() -> Any:
    """A carry takes over the buffer of an array of another shape, which is read besides."""

    def fn(x: jax.Array) -> Any:
        grid = jnp.zeros((8, 2), jnp.int32)
        row, total = jax.lax.scan(
            lambda c, _: ((jnp.ones_like(c[0]), c[1] + 1.0), None), (grid.reshape(16), 0.0), length=1
        )[0]
        return x.sum() + total, row, jnp.max(grid, (0, 1))

    return fn, (jnp.ones((8, 6)),)


def scan_without_inputs() -> Any:
    def step(w: jax.Array, x: jax.Array) -> Any:
        return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0]

    return step, (array(8, 8), array(16, 8))


def while_of_unknown_length() -> Any:
    def step(w: jax.Array, x: jax.Array) -> Any:
        def more(carry: Any) -> jax.Array:
            return (jnp.max(jnp.abs(carry[0])) > 0.05) & (carry[1] < 20)

        return lax.while_loop(more, lambda c: (jnp.tanh(c[0] @ w) * 0.5, c[1] + 1), (x, 0))

    return step, (array(8, 8), array(16, 8))


def loops_under_vmap() -> Any:
    def grow(row: jax.Array) -> Any:
        return lax.while_loop(lambda c: c[0].sum() < 20, lambda c: (c[0] * 2, c[1] + 1), (row**2, 0))

    def choose(row: jax.Array) -> jax.Array:
        return lax.cond(row.sum() > 0, jnp.sin, lambda r: jnp.cumsum(r), row)

    return lambda x: (jax.vmap(grow)(x), jax.vmap(choose)(x)), (array(16, 8),)


def fori() -> Any:
    def step(w: jax.Array, x: jax.Array) -> Any:
        fixed = lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w) + i, x)
        return fixed, lax.fori_loop(0, x[0, 0].astype(int) + 2, lambda i, h: h * 2 + i, x)

    return step, (array(8, 8), array(16, 8))


def branches() -> Any:
    def step(w: jax.Array, x: jax.Array, which: int) -> Any:
        a = lax.cond(x.sum() > 0, lambda: x @ w, lambda: x - 1.0)
        b = lax.switch(which, [lambda v: v @ w, lambda v: v, lambda v: jnp.zeros_like(v)], x)
        return jax.grad(lambda w: lax.cond(w.sum() > 0, lambda: (x @ w).sum(), lambda: 0.0))(w), a, b

    return step, (array(8, 8), array(16, 8), 2)


def remat() -> Any:
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def block(params: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ params["up"]) @ params["down"] + x

    def step(params: Any, x: jax.Array) -> Any:
        return jax.value_and_grad(lambda p: jnp.sum(block(p, block(p, x)) ** 2))(params)

    return step, (two_layers(), array(16, 8))


def custom_derivatives() -> Any:
    @jax.custom_vjp
    def clip(x: jax.Array) -> jax.Array:
        return jnp.clip(x, -0.5, 0.5)

    clip.defvjp(lambda x: (clip(x), x), lambda x, g: (jnp.where(jnp.abs(x) < 1, g, 0.0),))

    @jax.custom_jvp
    def log1pexp(x: jax.Array) -> jax.Array:
        return jnp.log1p(jnp.exp(x))

    log1pexp.defjvp(lambda p, t: (log1pexp(p[0]), t[0] * jax.nn.sigmoid(p[0])))
    return lambda w, x: jax.value_and_grad(lambda w: log1pexp(clip(x @ w)).sum())(w), (array(8, 8), array(16, 8))


def vmaps() -> Any:
    def step(w: jax.Array, x: jax.Array) -> Any:
        per_example = jax.vmap(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))), in_axes=(None, 0))(w, x)
        return (
            per_example,
            jax.vmap(jax.vmap(jnp.dot, (None, 0)), (0, None))(x, x),
            jax.jacfwd(lambda v: jnp.sin(v) @ w)(x[0]),
        )

    return step, (array(8, 8), array(16, 8))


# Operations


def sorting() -> Any:
    def step(x: jax.Array) -> Any:
        order = jnp.argsort(x, axis=1)
        keys, values = lax.sort((x, -x), dimension=0, num_keys=1)
        return jnp.sort(x, axis=1), order, keys, values, lax.top_k(x, 3), jnp.argmax(x, axis=0), jnp.median(x, axis=1)

    return step, (array(16, 8),)


def cumulative() -> Any:
    def step(x: jax.Array) -> Any:
        scanned = lax.associative_scan(jnp.multiply, x, axis=0)
        return (
            jnp.cumsum(x, axis=0),
            lax.cummax(x, axis=1, reverse=True),
            jnp.cumprod(x, axis=1),
            scanned,
            jnp.diff(x, axis=0),
        )

    return step, (array(16, 8),)


def taking_and_scattering() -> Any:
    def step(table: jax.Array, i: jax.Array, x: jax.Array) -> Any:
        def read(table: jax.Array) -> jax.Array:
            return jnp.sum(table[i] * x)

        updated = table.at[i].add(x).at[0].set(1.0).at[:, 1].multiply(2.0).at[i, 0].max(3.0)
        row = lax.dynamic_update_slice(table, x[:1], (i[0], 0))
        return (
            jax.grad(read)(table),
            updated,
            jnp.take_along_axis(x, x.argsort(1), 1),
            row,
            lax.dynamic_slice_in_dim(x, i[1], 2),
        )

    return step, (array(16, 8), array(8, dtype=jnp.int32), array(8, 8))


def one_hot_and_einsum() -> Any:
    def step(table: jax.Array, tokens: jax.Array) -> Any:
        hot = jax.nn.one_hot(tokens, 16)
        x = jnp.einsum("bsv,vd->bsd", hot, table)
        scores = jnp.einsum("bqhd,bkhd->bhqk", x.reshape(8, 4, 2, 4), x.reshape(8, 4, 2, 4))
        return jax.nn.softmax(scores), jnp.einsum("bsd,bsd->", x, x), jnp.einsum("bii->bi", scores[:, 0])

    return step, (array(16, 8), array(8, 4, dtype=jnp.int32))


def convolutions() -> Any:
    def step(params: Any, x: jax.Array) -> Any:
        def run(params: Any) -> jax.Array:
            y = lax.conv_general_dilated(x, params["plain"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            y = lax.conv_general_dilated(
                y, params["grouped"], (2, 2), "SAME", feature_group_count=8, dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            return jnp.sum(y**2)

        return jax.value_and_grad(run)(params)

    return step, ({"plain": array(3, 3, 4, 8), "grouped": array(3, 3, 1, 16)}, array(8, 8, 8, 4))


def attention_of_jax() -> Any:
    """Its einsums have dimensions of extent 1, so that operands are transposed and reshaped."""

    def step(params: Any, x: jax.Array) -> Any:
        def run(params: Any) -> jax.Array:
            q, k, v = ((x @ params[name]).reshape(*x.shape[:2], 4, -1) for name in ("q", "k", "v"))
            return jnp.mean(jax.nn.dot_product_attention(q, k, v) ** 2)

        loss, gradients = jax.value_and_grad(run)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), loss

    return step, ({name: array(16, 16) for name in ("q", "k", "v")}, array(8, 4, 16))


def batch_norm_over_an_axis_of_vmap() -> Any:
    """As in `equinox.nn.BatchNorm`."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def normalised(w: jax.Array, row: jax.Array) -> jax.Array:
            h = row @ w
            h, largest = h - lax.pmean(h, "batch"), lax.pmax(jnp.abs(lax.stop_gradient(h)), "batch")
            return jnp.sum(jnp.tanh(h / largest) ** 2)

        over_batch = jax.vmap(normalised, (None, 0), axis_name="batch")
        return jax.value_and_grad(lambda w: jnp.mean(over_batch(w, x)))(w)

    return step, (array(8, 8), array(16, 8))


def shape_changes() -> Any:
    def step(x: jax.Array) -> Any:
        y = jnp.pad(x.reshape(4, 4, 8).transpose(1, 0, 2), ((1, 0), (0, 2), (0, 0)))
        return (
            y,
            jnp.tile(x, (2, 1)),
            jnp.repeat(x, 2, axis=1),
            jnp.flip(x, 0),
            jnp.roll(x, 1, 0),
            x[::2, 1:5],
            jnp.tril(x[:8]),
        )

    return step, (array(16, 8),)


def linear_algebra() -> Any:
    def step(x: jax.Array) -> Any:
        positive = x.T @ x + 8 * jnp.eye(8)
        return (
            jnp.linalg.cholesky(positive),
            jnp.linalg.solve(positive, x.T),
            jnp.linalg.norm(x),
            jnp.linalg.inv(positive),
        )

    return step, (array(16, 8),)


def barriers_and_names() -> Any:
    def step(x: jax.Array, w: jax.Array) -> Any:
        y = lax.optimization_barrier((x @ w, x))
        z = checkpoint_name(y[0], "y")
        return lax.stop_gradient(z) + y[1], lax.reduce_precision(x, 8, 7), jnp.nan_to_num(x), lax.clamp(-0.5, x, 0.5)

    return step, (array(16, 8), array(8, 8))


def closed_over() -> Any:
    table, scale = array(8, 8), np.float32(0.5)
    return lambda x: (x @ table * scale, jax.jit(lambda v: v + table[0])(x)), (array(16, 8),)


PROGRAMS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("typed keys", lambda: dropout(jax.random.key)),
    ("legacy keys", lambda: dropout(jax.random.PRNGKey)),
    ("rbg keys", lambda: dropout(partial(jax.random.key, impl="rbg"))),
    *(
        (program.__name__.replace("_", " "), program)
        for program in (
            key_arrays,
            mixed_leaves,
            keyword_arguments,
            static_arguments,
            empty_states,
            zero_sizes,
            scalars_only,
            constants_only,
            numpy_arguments,
            complex_values,
            half_precision,
            bits_and_bytes,
            state_only,
            loss_first,
            batch_first,
            same_value_twice,
            adam,
            flax_train_state,
            equinox_module,
            nested_jit,
            scan_of_mixed_carries,
            scan_in_reverse,
            scan_of_a_reshaped_array,
            scan_without_inputs,
            while_of_unknown_length,
            loops_under_vmap,
            fori,
            branches,
            remat,
            custom_derivatives,
            vmaps,
            sorting,
            cumulative,
            taking_and_scattering,
            one_hot_and_einsum,
            convolutions,
            attention_of_jax,
            batch_norm_over_an_axis_of_vmap,
            callback_in_a_branch,
            shape_changes,
            linear_algebra,
            barriers_and_names,
            closed_over,
        )
    ),
)
