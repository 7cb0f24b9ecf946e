"""The layers that the families share, written in few primitives.

Planning starts with a trace, so its time is paid by every user of the zoo: the layers call `lax` where the `jnp`
equivalent would trace an inner jit, contract without transposing (`project`, `attend`), and take tables that do not
depend on the layer (the causal bias, rotary angles) as arguments so that a model builds them once.

Normalisation and softmax run in float32 or wider; everything else in the dtype of the activations, to which `project`
casts its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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


def dense(params: Mapping[str, jax.Array], x: jax.Array, dims: int = 1) -> jax.Array:
    """`affine` by the kernel and the bias of `params`."""
    return affine(x, params["kernel"], params["bias"], dims)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Layer normalisation over the last dimension (Ba et al., 2016)."""
    wide = widen(x)
    centred = lax.sub(wide, _leading(_mean(wide), x.shape))
    return add_bias(_scaled(centred, scale, x.dtype), bias)


def norm(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """`layer_norm` by the scale and the bias of `params`."""
    return layer_norm(x, params["scale"], params["bias"])


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root mean square normalisation over the last dimension (Zhang and Sennrich, 2019)."""
    return _scaled(widen(x), scale, x.dtype)


def gelu(x: jax.Array) -> jax.Array:
    """GELU in the tanh form of GPT-2, by 0.5 (1 + tanh z) = logistic(2 z): z = sqrt(2/pi) (x + 0.044715 x^3)."""
    twice = 2.0 * (2.0 / jnp.pi) ** 0.5
    return x * lax.logistic(x * (x * x * (0.044715 * twice) + twice))


def silu(x: jax.Array) -> jax.Array:
    """x logistic(x)."""
    return lax.mul(x, lax.logistic(x))


def quick_gelu(x: jax.Array) -> jax.Array:
    """x logistic(1.702 x), the GELU of CLIP (Hendrycks and Gimpel, 2016, section 2)."""
    return lax.mul(x, lax.logistic(1.702 * x))


def erf_gelu(x: jax.Array) -> jax.Array:
    """GELU in its exact form, by the error function."""
    return jax.nn.gelu(x, approximate=False)


def causal_bias(seq: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """dtype[seq, seq], 0 where the key is not after the query, else so low that softmax gives 0."""
    query = lax.broadcasted_iota(jnp.int32, (seq, seq), 0)
    key = lax.broadcasted_iota(jnp.int32, (seq, seq), 1)
    low = float(jnp.finfo(dtype).min) / 2
    return lax.select(query >= key, jnp.zeros((seq, seq), dtype), jnp.full((seq, seq), low, dtype))


def mask_bias(mask: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """dtype[...], 0 where the mask bool[...] holds, else so low that softmax gives 0."""
    low = float(jnp.finfo(dtype).min) / 2
    return lax.select(mask, jnp.zeros(mask.shape, dtype), jnp.full(mask.shape, low, dtype))


def before(lengths: jax.Array, seq: int) -> jax.Array:
    """bool[B,seq], whether a position is before the end of its sequence, from lengths int32[B]."""
    return jnp.arange(seq) < lengths[:, None]


def causal(seq: int) -> jax.Array:
    """bool[seq,seq], whether the key is not after the query."""
    return jnp.arange(seq)[:, None] >= jnp.arange(seq)


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None = None, *, scaled: bool = True
) -> jax.Array:
    """Attention of query [B,S,H,K] over key, value [B,T,H,K] -> [B,H,S,K], scaled by 1/sqrt(K) unless told otherwise.

    The bias is [S,T], [H,S,T] or [B,H,S,T]; a dimension of 1 is broadcast. The result keeps the batch dimensions of
    the contraction in front; `merge_heads` takes it from there.
    """
    query = lax.mul(query, lax.full_like(query, query.shape[-1] ** -0.5)) if scaled else query
    scores = lax.dot_general(query, key, (((3,), (3,)), ((0, 2), (0, 2))))
    scores = scores if bias is None else add_bias(scores, bias)
    return lax.dot_general(softmax(scores), value, (((3,), (1,)), ((0, 1), (0, 2))))


def merge_heads(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[B,H,S,K] by a weight [H,K,D] -> [B,S,D]."""
    return lax.dot_general(x, lax.convert_element_type(weight, x.dtype), (((1, 3), (0, 1)), ((), ())))


def multi_head(
    params: Mapping[str, jax.Array],
    x: jax.Array,
    source: jax.Array,
    bias: jax.Array | None = None,
    *,
    scaled: bool = True,
    kernel: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Attention with queries from x [B,S,D], keys and values from source [B,T,E] -> [B,S,D].

    Weights are wq [D,H,K], wk and wv [E,H,K] and wo [H,K,D]. Each of bq, bk, bv and bo is added where it is there. The
    bias and the scale are those of `attend`. A kernel replaces `attend`, and has its own scale and mask.
    """
    query, value = (_heads(params, name, inputs) for name, inputs in (("q", x), ("v", source)))
    key = _heads(params, "k", source)
    if kernel is None:
        mixed = merge_heads(attend(query, key, value, bias, scaled=scaled), params["wo"])
    else:
        mixed = project(kernel(query, key, value), params["wo"], 2)
    return add_bias(mixed, params["bo"]) if "bo" in params else mixed


def _heads(params: Mapping[str, jax.Array], name: str, x: jax.Array) -> jax.Array:
    y = project(x, params[f"w{name}"])
    return add_bias(y, params[f"b{name}"]) if f"b{name}" in params else y


def softmax(x: jax.Array) -> jax.Array:
    """Softmax over the last dimension, in float32 or wider, in x's dtype again at the end."""
    wide = widen(x)
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


def convolve1d(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """x [N,T,C] by a kernel [k,C/g,D], cast to x's dtype, in g groups, padded by k - 1 -> [N,ceil(T/stride),D]."""
    size = kernel.shape[0]
    return lax.conv_general_dilated(
        x,
        lax.convert_element_type(kernel, x.dtype),
        (stride,),
        [((size - 1) // 2, size // 2)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=x.shape[-1] // kernel.shape[1],
    )


def sinusoids(positions: jax.Array, width: int) -> jax.Array:
    """Sinusoids of positions [N] -> [N, width], cosines before sines (Vaswani et al., 2017, section 3.5)."""
    rates = 10_000.0 ** (-jnp.arange(width // 2, dtype=positions.dtype) / (width // 2))
    angles = positions[:, None] * rates
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)


def lookup(table: jax.Array, ids: jax.Array, dtype: str) -> jax.Array:
    """Rows of table [V,D] at ids [...], cast to `dtype` -> [...,D]; ids are trusted to be in range."""
    return table.at[ids].get(mode="promise_in_bounds").astype(dtype)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean softmax cross-entropy of logits [...,V] and integer labels [...], in float32 or wider."""
    return optax.softmax_cross_entropy_with_integer_labels(widen(logits), labels).mean()


def weighted_cross_entropy(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """`cross_entropy` of each label, averaged with weights [...] that sum to the number of labels that count."""
    losses = optax.softmax_cross_entropy_with_integer_labels(widen(logits), labels)
    weights = weights.astype(losses.dtype)
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def widen(x: jax.Array) -> jax.Array:
    """x in float32, or in its dtype if that is wider."""
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
