"""The selective scan of a state-space model by its name (Gu and Dao, 2023, "Mamba", algorithm 2).

    h_t = exp(delta_t A) h_(t-1) + delta_t B_t x_t      h [B,E,N]: a state of N numbers per channel, at first 0
    y_t = C_t h_t                                       summed over N

    associative    `jax.lax.associative_scan`: the states of all steps [B,S,E,N] are in memory, and more of the like
    pallas         a Pallas kernel for TPUs of our own, forward and backward: states are in scratch memory alone

The grid of both kernels is (batch, blocks of channels, chunks of the sequence). A run walks the steps of its chunk;
the state goes from chunk to chunk in scratch memory. The forward pass keeps the state at the start of each chunk. With
these the backward pass computes the states of a chunk again, chunks from last to first, and then walks them back. With
g_t and l_t the gradients by y_t and by h_t,

    l_t = C_t g_t + exp(delta_(t+1) A) l_(t+1)             r_t = exp(delta_t A) l_t h_(t-1)
    dC_t = sum over E of g_t h_t                           dB_t = sum over E of delta_t x_t l_t
    dx_t = delta_t sum over N of B_t l_t                   dA = sum over t of delta_t r_t
    ddelta_t = x_t sum over N of B_t l_t + sum over N of A r_t

Each run writes sums over its own example and channels; those over examples (dA) and blocks of channels (dB, dC) are
outside of the kernel. So runs of other examples and channels are independent of it, and devices may do a part of either
-> `autopar.rules.pallas`. Channels are the last dimension in the kernels, as the lanes of TPUs are, and A is [N,E].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.errors import ArgumentError

Scan = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""x, delta [B,S,E], A [E,N], B, C [B,S,N] -> y [B,S,E], all of one dtype"""

CHANNELS = 128  # of a block, if the model has a multiple of them: the lanes of a TPU
STEPS = 128  # of a chunk, if the sequence has a multiple of them; their states are 1 MiB of scratch memory for N = 16


def associative(x: jax.Array, delta: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """The scan as compositions of affine maps h -> decay h + input, two by two."""
    decay = lax.exp(delta[..., None] * a)
    states = lax.associative_scan(_composed, (decay, (delta * x)[..., None] * b[:, :, None]), axis=1)[1]
    return jnp.einsum("bsen,bsn->bse", states, c, precision="highest")  # TPUs would round float32 to bfloat16


def _composed(first: tuple[jax.Array, jax.Array], then: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return first[0] * then[0], then[0] * first[1] + then[1]


def pallas(
    x: jax.Array, delta: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """The scan by a kernel, which runs on TPUs, or is interpreted."""
    return _scan(interpret, x, delta, a.T, b, c)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(interpret: bool, x: jax.Array, delta: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    return _forward(interpret, x, delta, a, b, c)[0]


def _forward(interpret: bool, x: jax.Array, delta: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
    """y, and the states [B,S/chunk,N,E] at the start of each chunk."""
    call, specs, shapes = _call(x, a, reverse=False)
    return call(
        _forward_kernel,
        name="selective_scan_forward",
        in_specs=[specs["x"], specs["x"], specs["a"], specs["b"], specs["b"]],
        out_specs=[specs["x"], specs["starts"]],
        out_shape=[shapes["x"], shapes["starts"]],
        scratch_shapes=[shapes["state"]],
        interpret=interpret,
    )(x, delta, a, b, c)


def _scan_forward(interpret: bool, *operands: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    y, starts = _forward(interpret, *operands)
    return y, (*operands, starts)


def _scan_backward(interpret: bool, kept: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, ...]:
    call, specs, shapes = _call(kept[0], kept[2], reverse=True)
    dx, ddelta, da, db, dc = call(
        _backward_kernel,
        name="selective_scan_backward",
        in_specs=[specs["x"], specs["x"], specs["a"], specs["b"], specs["b"], specs["starts"], specs["x"]],
        out_specs=[specs["x"], specs["x"], specs["da"], specs["db"], specs["db"]],
        out_shape=[shapes["x"], shapes["x"], shapes["da"], shapes["db"], shapes["db"]],
        scratch_shapes=[shapes["states"], shapes["state"]],
        interpret=interpret,
    )(*kept, gradient)
    return dx, ddelta, da.sum(0), db.sum(1), dc.sum(1)


_scan.defvjp(_scan_forward, _scan_backward)


def _call(x: jax.Array, a: jax.Array, *, reverse: bool) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
    """`pallas_call` with a grid, and the blocks and shapes of its operands, results and scratch memory.

    In reverse, chunks are walked from last to first.
    """
    # Pallas takes 0.2 s to import, which planning without it need not wait for.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (batch, seq, channels), states, dtype = x.shape, a.shape[0], x.dtype
    part, steps = _block(channels, CHANNELS), _block(seq, STEPS)
    chunks, parts = seq // steps, channels // part

    def chunk(k: Any) -> Any:
        return chunks - 1 - k if reverse else k

    specs = {
        "x": pl.BlockSpec((None, steps, part), lambda i, j, k: (i, chunk(k), j)),
        "a": pl.BlockSpec((states, part), lambda i, j, k: (0, j)),
        "b": pl.BlockSpec((None, steps, states), lambda i, j, k: (i, chunk(k), 0)),
        "starts": pl.BlockSpec((None, None, states, part), lambda i, j, k: (i, chunk(k), 0, j)),
        "da": pl.BlockSpec((None, states, part), lambda i, j, k: (i, 0, j)),
        "db": pl.BlockSpec((None, None, steps, states), lambda i, j, k: (i, j, chunk(k), 0)),
    }
    shapes = {
        "x": jax.ShapeDtypeStruct(x.shape, dtype),
        "starts": jax.ShapeDtypeStruct((batch, chunks, states, channels), dtype),
        "da": jax.ShapeDtypeStruct((batch, states, channels), dtype),
        "db": jax.ShapeDtypeStruct((batch, parts, seq, states), dtype),
        "state": pltpu.VMEM((states, part), dtype),
        "states": pltpu.VMEM((steps, states, part), dtype),
    }
    semantics = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))
    return partial(pl.pallas_call, grid=(batch, parts, chunks), compiler_params=semantics), specs, shapes


def _block(extent: int, most: int) -> int:
    return most if extent % most == 0 else extent


def _forward_kernel(x: Any, delta: Any, a: Any, b: Any, c: Any, y: Any, starts: Any, state: Any) -> None:
    """One chunk: the state at its start, then y step by step."""
    _at_the_first_chunk(state)
    starts[...] = state[...]

    def step(t: jax.Array, before: jax.Array) -> jax.Array:
        after = _next_state(before, _row(x, t), _row(delta, t), a[...], _column(b, t))
        _set_row(y, t, jnp.sum(_column(c, t) * after, 0, keepdims=True))
        return after

    state[...] = lax.fori_loop(0, x.shape[0], step, state[...])


def _backward_kernel(
    x: Any, delta: Any, a: Any, b: Any, c: Any, starts: Any, g: Any,
    dx: Any, ddelta: Any, da: Any, db: Any, dc: Any, states: Any, adjoint: Any,
) -> None:  # fmt: skip
    """One chunk: `states` before each step, then the steps back; `adjoint` is exp(delta A) l of the step behind."""
    _at_the_first_chunk(da, adjoint)
    last = x.shape[0] - 1

    def forth(t: jax.Array, before: jax.Array) -> jax.Array:
        states[t] = before
        return _next_state(before, _row(x, t), _row(delta, t), a[...], _column(b, t))

    def back(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        t = last - i
        total, behind = carry
        x_t, delta_t, g_t, b_t, c_t = _row(x, t), _row(delta, t), _row(g, t), _column(b, t), _column(c, t)
        before, decay = states[t], jnp.exp(delta_t * a[...])
        after = decay * before + b_t * (delta_t * x_t)
        adjoint_t = c_t * g_t + behind
        scaled = decay * adjoint_t
        rate, along = scaled * before, jnp.sum(b_t * adjoint_t, 0, keepdims=True)
        _set_row(dx, t, delta_t * along)
        _set_row(ddelta, t, x_t * along + jnp.sum(a[...] * rate, 0, keepdims=True))
        _set_row(db, t, jnp.sum(delta_t * x_t * adjoint_t, 1)[None])
        _set_row(dc, t, jnp.sum(g_t * after, 1)[None])
        return total + delta_t * rate, scaled

    lax.fori_loop(0, x.shape[0], forth, starts[...])
    da[...], adjoint[...] = lax.fori_loop(0, x.shape[0], back, (da[...], adjoint[...]))


def _next_state(h: jax.Array, x: jax.Array, delta: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """exp(delta A) h + delta B x for a state [N,E], of rows x and delta [1,E] and a column b [N,1]."""
    return jnp.exp(delta * a) * h + b * (delta * x)


def _at_the_first_chunk(*sums: Any) -> None:
    from jax.experimental import pallas as pl

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        for total in sums:
            total[...] = jnp.zeros_like(total)


def _row(ref: Any, t: jax.Array) -> jax.Array:
    """Row t of a block, [1,E]."""
    return ref[t][None]


def _column(ref: Any, t: jax.Array) -> jax.Array:
    """Row t of a block as a column, [N,1]."""
    return ref[t][:, None]


def _set_row(ref: Any, t: jax.Array, row: jax.Array) -> None:
    ref[t] = row[0]


#: Name -> the scan.
SCANS: Mapping[str, Scan] = MappingProxyType({"associative": associative, "pallas": pallas})


def check(target: str, name: str) -> None:
    """ArgumentError for what is none of `SCANS`."""
    if name not in SCANS:
        raise ArgumentError(f"selective_scan={name!r} of {target!r} is not known; use {', '.join(SCANS)}")
