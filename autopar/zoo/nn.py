"""The layers that the families share, written in few primitives.

Planning starts with a trace, so its time is paid by every user of the zoo: the layers call `lax` where the `jnp`
equivalent would trace an inner jit, contract without transposing (`project`, `attend`), and take tables that do not
depend on the layer (the causal bias, rotary angles) as arguments so that a model builds them once.

Normalisation and softmax run in float32 or wider; everything else in the dtype of the activations, to which `project`
casts its weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax import lax


def project(x: jax.Array, weight: jax.Array, dims: int = 1) -> jax.Array:
    """Contract the last `dims` dimensions of x with the first `dims` of the weight, cast to x's dtype."""
    left = tuple(range(x.ndim - dims, x.ndim))
    contract = (left, tuple(range(dims)))
    return lax.dot_general(x, lax.convert_element_type(weight, x.dtype), (contract, ((), ())))


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x plus a bias over its last `bias.ndim` dimensions, cast to x's dtype."""
    return lax.add(x, _trailing(lax.convert_element_type(bias, x.dtype), x.shape))


def affine(x: jax.Array, weight: jax.Array, bias: jax.Array, dims: int = 1) -> jax.Array:
    """`project`, then `add_bias`."""
    return add_bias(project(x, weight, dims), bias)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Layer normalisation over the last dimension (Ba et al., 2016)."""
    wide = _widen(x)
    centred = lax.sub(wide, _leading(_mean(wide), x.shape))
    return add_bias(_scaled(centred, scale, x.dtype), bias)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root mean square normalisation over the last dimension (Zhang and Sennrich, 2019)."""
    return _scaled(_widen(x), scale, x.dtype)


def gelu(x: jax.Array) -> jax.Array:
    """GELU in the tanh form of GPT-2, by 0.5 (1 + tanh z) = logistic(2 z): z = sqrt(2/pi) (x + 0.044715 x^3)."""
    twice = 2.0 * (2.0 / jnp.pi) ** 0.5
    return x * lax.logistic(x * (x * x * (0.044715 * twice) + twice))


def silu(x: jax.Array) -> jax.Array:
    """x logistic(x)."""
    return lax.mul(x, lax.logistic(x))


def causal_bias(seq: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """dtype[seq, seq], 0 where the key is not after the query, else so low that softmax gives 0."""
    query = lax.broadcasted_iota(jnp.int32, (seq, seq), 0)
    key = lax.broadcasted_iota(jnp.int32, (seq, seq), 1)
    low = float(jnp.finfo(dtype).min) / 2
    return lax.select(query >= key, jnp.zeros((seq, seq), dtype), jnp.full((seq, seq), low, dtype))


def attend(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Scaled attention of query [B,S,H,K] over key, value [B,T,H,K] with bias [S,T] -> [B,H,S,K].

    The result keeps the batch dimensions of the contraction in front; `merge_heads` takes it from there.
    """
    query = lax.mul(query, lax.full_like(query, query.shape[-1] ** -0.5))
    scores = lax.dot_general(query, key, (((3,), (3,)), ((0, 2), (0, 2))))
    scores = scores if bias is None else add_bias(scores, bias)
    return lax.dot_general(softmax(scores), value, (((3,), (1,)), ((0, 1), (0, 2))))


def merge_heads(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[B,H,S,K] by a weight [H,K,D] -> [B,S,D]."""
    return lax.dot_general(x, lax.convert_element_type(weight, x.dtype), (((1, 3), (0, 1)), ((), ())))


def softmax(x: jax.Array) -> jax.Array:
    """Softmax over the last dimension, in float32 or wider, in x's dtype again at the end."""
    wide = _widen(x)
    top = lax.stop_gradient(lax.reduce_max(wide, (x.ndim - 1,)))
    weights = lax.exp(lax.sub(wide, _leading(top, x.shape)))
    total = lax.reduce_sum(weights, (x.ndim - 1,))
    return lax.convert_element_type(lax.div(weights, _leading(total, x.shape)), x.dtype)


def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """x [N,H,W,C] by a kernel [k,k,C,D], cast to x's dtype, k odd, padded by k // 2 -> [N,H/stride,W/stride,D]."""
    pad = kernel.shape[0] // 2
    kernel = lax.convert_element_type(kernel, x.dtype)
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), [(pad, pad)] * 2, dimension_numbers=layout)


def lookup(table: jax.Array, ids: jax.Array, dtype: str) -> jax.Array:
    """Rows of table [V,D] at ids [...], cast to `dtype` -> [...,D]; ids are trusted to be in range."""
    return table.at[ids].get(mode="promise_in_bounds").astype(dtype)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean softmax cross-entropy of logits [...,V] and integer labels [...], in float32 or wider."""
    return optax.softmax_cross_entropy_with_integer_labels(_widen(logits), labels).mean()


def _widen(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.promote_types(x.dtype, jnp.float32))


def _mean(x: jax.Array) -> jax.Array:
    return lax.reduce_sum(x, (x.ndim - 1,)) * (1.0 / x.shape[-1])


def _scaled(x: jax.Array, scale: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    inverse = lax.rsqrt(_mean(lax.square(x)) + 1e-5)
    unit = lax.convert_element_type(lax.mul(x, _leading(inverse, x.shape)), dtype)
    return lax.mul(unit, _trailing(lax.convert_element_type(scale, dtype), x.shape))


def _leading(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, tuple(range(x.ndim)))


def _trailing(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, tuple(range(len(shape) - x.ndim, len(shape))))
