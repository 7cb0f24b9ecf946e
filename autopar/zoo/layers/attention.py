"""The attention of a transformer by its name, as a function of queries, keys and values that are not scaled yet.

    naive          einsum, softmax and einsum of `nn.attend`: scores [B,H,S,T] are in memory, masked ones are computed
    dot_product    `jax.nn.dot_product_attention(implementation="xla")`: the same products, as JAX writes them
    cudnn          `jax.nn.dot_product_attention(implementation="cudnn")`: one kernel of cuDNN, on GPUs
    splash         JAX's Pallas kernel for TPUs, `splash_attention`, under `jax.vmap` over examples and groups of heads

The last two keep no scores (Dao et al., 2022, "FlashAttention"): for the backward pass one number per query and head is
left, the log-sum-exp of its scores, and blocks of scores that the causal mask leaves out are not computed.

Queries are [B,S,H,K], keys and values [B,T,G,K]. With grouped queries H / G heads of queries share one of keys: query
head h reads key head h // (H / G). No key is repeated in memory but by `dot_product`, whose einsum is grouped as well.
Splash attention is mapped over the groups, so that a group is a grid axis of its own: its index maps would otherwise
divide the head by H / G, and such an axis is not cut -> `autopar.rules.pallas`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, Literal

import jax
from jax import lax

from autopar.errors import ArgumentError

Kernel = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""query [B,S,H,K], key and value [B,T,G,K] -> [B,S,H,K]"""

LANES = 128  # splash attention computes blocks of keys that are a multiple of it
BLOCK = 512  # its largest block of queries and of keys, if the sequence has it as a divisor


def _of_jax(
    implementation: Literal["xla", "cudnn"], query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool
) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=causal, implementation=implementation)


def _splash(query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool) -> jax.Array:
    batch, seq, heads, width = query.shape
    groups = key.shape[2]
    with jax.ensure_compile_time_eval():  # which blocks the mask leaves out is known when the step is traced
        kernel = splash_kernel(heads // groups, seq, key.shape[1], causal=causal, block=BLOCK)
    scaled = lax.mul(query, lax.full_like(query, width**-0.5))
    grouped = scaled.reshape(batch, seq, groups, heads // groups, width).transpose(0, 2, 3, 1, 4)
    mixed = jax.vmap(jax.vmap(kernel))(grouped, key.swapaxes(1, 2), value.swapaxes(1, 2))
    return mixed.transpose(0, 3, 1, 2, 4).reshape(query.shape)


@lru_cache(maxsize=64)
def splash_kernel(heads: int, seq: int, keys: int, *, causal: bool, block: int, interpret: bool = False) -> Any:
    """JAX's kernel for as many heads of queries as share one head of keys.

    Equal calls share it, so that a step which is traced again has the same constants.
    """
    # Pallas takes 0.2 s to import, which planning without it need not wait for.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    mask = splash_attention_mask.CausalMask if causal else splash_attention_mask.FullMask
    rows, columns = math.gcd(seq, block), math.gcd(keys, block)
    blocks = splash_attention_kernel.BlockSizes(
        *(rows, columns, columns), *(rows, columns, columns), block_q_dq=rows, block_kv_dq=columns
    )
    masks = splash_attention_mask.MultiHeadMask([mask((seq, keys)) for _ in range(heads)])
    return splash_attention_kernel.make_splash_mqa(
        masks, block_sizes=blocks, head_shards=1, q_seq_shards=1, interpret=interpret
    )


#: Name -> the kernel, with `causal` as a keyword.
KERNELS: Mapping[str, Callable[..., jax.Array]] = MappingProxyType(
    {"dot_product": partial(_of_jax, "xla"), "cudnn": partial(_of_jax, "cudnn"), "splash": _splash}
)
NAMES = ("naive", *KERNELS)


def kernel_of(name: str, *, causal: bool) -> Kernel | None:
    """The function of one of `NAMES`; None for "naive", which `nn.attend` writes out and which takes a bias as mask."""
    return partial(KERNELS[name], causal=causal) if name in KERNELS else None


def check(target: str, name: str, *, head: int, seq: int, dtype: str) -> None:
    """Refuse what no kernel computes, for heads of `head` elements, `seq` positions and activations of `dtype`.

    Raises:
        ArgumentError: an unknown name, or sizes or a dtype that the kernel does not take.
    """
    given = f"attention={name!r} of {target!r}"
    if name not in NAMES:
        raise ArgumentError(f"{given} is not known; use {', '.join(NAMES)}")
    alternatives = ", ".join(allowed for allowed in NAMES if allowed != name)
    if name == "cudnn" and dtype not in ("bfloat16", "float16"):
        raise ArgumentError(
            f"{given} takes float16 and bfloat16, and this model computes in {dtype}; or use {alternatives}"
        )
    if name == "cudnn" and (head % 8 or head > 256):
        raise ArgumentError(
            f"{given} takes heads of a multiple of 8 and at most 256 elements, not {head}; use {alternatives}"
        )
    if name == "splash" and seq % LANES:
        raise ArgumentError(
            f"{given} takes sequences of a multiple of {LANES} tokens, not {seq}; or use {alternatives}"
        )
