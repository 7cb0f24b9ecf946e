"""Sharding rules of cuDNN's fused attention, as `jax.nn.dot_product_attention(implementation="cudnn")` records it.

    query [b, t, n, h], key and value [b, s, n, h], bias [b, n, t, s], lengths [b]    (or heads before positions)
    output like the query, softmax statistic [b, n, t]; gradients like query, key, value and bias

Batch `b` and heads `n` are free: every score belongs to one example and one head. With fewer heads of keys than of
queries (grouped queries), a cut keeps groups whole: the factor has as many shards as the greatest common divisor of
both counts. Positions of queries `t` are free as well (context parallelism): a device has all keys and values, or its
piece of them if there are as many as queries. Then it gathers the others, or receives them in a ring
-> `autopar.rules.context_parallel`. The dimensions of a head need replication. JAX's own rule for these operations
gives every operand factors of its own, which its `partition` then refuses, so it is of no use here.

What one device lacks is combined after the call, along the axes that cut a factor which a result does not have: the
gradients of keys and values over queries, and that of a bias that all examples share, are sums; the largest magnitudes
of fp8 attention are a maximum                                                                             -> COMBINE

Not cut at all: dropout, whose random numbers depend on the place in the kernel's own operands; paged keys and values,
whose blocks the tables number as a whole; a function of the scores, whose operands may be anything. Packed sequences
are not cut along the batch, whose segments the offsets number as a whole. What else keeps positions whole: `_whole`.

The primitives are those of jax 0.10.2 and 0.12.0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from autopar.ir.op_sets import ATTENTION
from autopar.rules.block_pairs import exchanged
from autopar.rules.notation import Dims, Rule
from autopar.rules.sent import Sent

Shape = tuple[int, ...]
Params = Mapping[str, Any]

#: Operands and results, a letter each: q k v, o (like the query), a (bias), l (lengths), c (offsets), p (page tables),
#: m (softmax statistic), x (largest magnitude). Others follow and are read whole.
OPERANDS, RESULTS = (
    MappingProxyType(dict(zip(ATTENTION, words, strict=True)))
    for words in (("qkvallccpp", "qkvallccppmoo", "qkv", "qkvoom"), ("om", "qkva", "oxxm", "qkvxxxx"))
)
#: Letter of `RESULTS` -> how devices combine a result of this kind that lacks a factor which is cut.
COMBINE: Mapping[str, Literal["sum", "max"]] = MappingProxyType({"a": "sum", "k": "sum", "v": "sum", "x": "max"})

#: The factors that may be free; their places in a rule.
FACTORS = "bnt"
BATCH, HEADS, POSITIONS = range(len(FACTORS))

#: Position in the parameter `layout` -> the dimensions of queries, and of keys if there are as many.
_LAYOUTS = (("b", "t", "n", ""), ("b", "n", "t", ""))
_DIMS: Mapping[str, tuple[str, ...]] = MappingProxyType({"a": ("b", "n", "t", ""), "l": ("b",), "m": ("b", "n", "t")})


def _words(text: str, count: int) -> str:
    return text[:count].ljust(count, ".")


def _letters(word: str, shape: Shape, layout: int, alike: bool) -> tuple[str, ...]:
    dims = _LAYOUTS[layout] if word in "qkvo" else _DIMS.get(word, ())
    if word in "kv" and not alike:
        dims = tuple("" if letter == "t" else letter for letter in dims)
    return dims if len(dims) == len(shape) else ("",) * len(shape)


def _is_fp8(name: str) -> bool:
    return "fp8" in name


def obstacles(name: str, params: Params, operands: Sequence[Shape]) -> Mapping[str, str]:
    """The factors of `FACTORS` that are not free -> why."""
    whole = ""
    if params.get("dropout_rate"):
        whole = "its dropout depends on the place in the kernel's operands"
    elif params.get("score_mod") is not None:
        whole = "a function of its scores is not analysed"
    # Operands 8 and 9 are the page tables of keys and values; those that are not used have one dimension.
    elif not _is_fp8(name) and any(len(operands[i]) == 4 for i in (8, 9)):
        whole = "its keys and values are paged"
    if whole:
        return dict.fromkeys(FACTORS, whole)
    # Operand 6 has the offsets of queries: one row per example if several sequences are packed into each.
    packed = "its sequences are packed across the batch"
    kept = {"b": packed, "t": packed} if not _is_fp8(name) and len(operands[6]) == 2 else {}
    why = _whole(name, params, operands)
    return kept | {"t": why} if why else kept


def _whole(name: str, params: Params, operands: Sequence[Shape]) -> str:
    """Why positions of queries are not cut; empty if they may be."""
    if _is_fp8(name):
        return "positions of fp8 attention are not cut"
    mask, (t, s) = _mask(params), positions(params, operands)
    if mask not in ("NO_MASK", "CAUSAL"):
        return f"positions under a mask of the kind {mask} are not cut"
    if params.get("sliding_window_length"):
        return "positions under a sliding window are not cut"
    if mask == "CAUSAL" and any(params.get("variadic_args", ())):
        return "positions with a bias under a causal mask are not cut"
    if mask == "CAUSAL" and (t != s or t % 2):
        return f"a causal mask of {t} by {s} positions has no two halves"
    return ""


def _mask(params: Params) -> str:
    return getattr(params.get("mask_type"), "name", "")


def is_causal(params: Params) -> bool:
    """Whether a query sees the keys up to its own position alone."""
    return bool(params.get("use_causal_mask", False)) or "CAUSAL" in _mask(params)


def position_dim(params: Params) -> int:
    """The dimension of queries, keys and values that positions are in."""
    return _LAYOUTS[params["layout"]].index("t")


def positions(params: Params, operands: Sequence[Shape]) -> tuple[int, int]:
    """How many positions queries and keys have."""
    dim = position_dim(params)
    return operands[0][dim], operands[1][dim]


def rule(name: str, params: Params, operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    """The rule of an operation of these shapes."""
    kept = obstacles(name, params, operands)
    layout, alike = params["layout"], len({*positions(params, operands)}) == 1
    sides = [
        [
            (shape, _letters(word, shape, layout, alike))
            for word, shape in zip(_words(words[name], len(of)), of, strict=True)
        ]
        for words, of in ((OPERANDS, operands), (RESULTS, results))
    ]
    extents = [(letter, n) for side in sides for shape, of in side for n, letter in zip(shape, of, strict=True)]
    sizes = [math.gcd(*(n for letter, n in extents if letter == factor and n > 1)) or 1 for factor in FACTORS]
    if any(n == 1 for n in _heads_of_keys(sides[0])):
        sizes[HEADS] = 1
    if is_causal(params) and "t" not in kept:
        sizes[POSITIONS] //= 2  # each device has two blocks (`autopar.rules.context_parallel`)

    def factor(letter: str, n: int) -> int:
        if letter and n > 1 and sizes[FACTORS.index(letter)] > 1:
            return FACTORS.index(letter)
        sizes.append(n)
        return len(sizes) - 1

    dims: list[tuple[Dims, ...]] = [
        tuple(tuple(factor(letter, n) for n, letter in zip(shape, of, strict=True)) for shape, of in side)
        for side in sides
    ]
    need = [*(FACTORS.index(letter) for letter in kept), *range(len(FACTORS), len(sizes))]
    own = Rule(dims[0], dims[1], tuple(sizes), (), tuple(sorted(need)), "autopar")
    own = replace(own, rings=(POSITIONS,) if _may_ring(params, own) else ())
    return replace(own, sent=_sent(name, params, own), passing=_passing(name, len(operands)) if own.rings else ())


def _heads_of_keys(operands: Sequence[tuple[Shape, tuple[str, ...]]]) -> list[int]:
    """The number of heads of keys: a single one is shared by all heads of queries."""
    shape, letters = operands[1]
    return [n for n, letter in zip(shape, letters, strict=True) if letter == "n"]


def combined(name: str, result: int) -> Literal["sum", "max"] | None:
    """How devices combine a result that lacks a factor which is cut."""
    return COMBINE.get(RESULTS[name][result])


# Communication


def gathers(own: Rule) -> bool:
    """Whether devices that have pieces of the positions gather keys and values."""
    return POSITIONS in own.operands[1]


def _may_ring(params: Params, own: Rule) -> bool:
    """Whether pieces of keys and values may be passed round: a bias would have to be cut like them."""
    return POSITIONS in own.free and gathers(own) and not any(params.get("variadic_args", ()))


def _sent(name: str, params: Params, own: Rule) -> tuple[Sent, ...]:
    """The collectives of an operation with this rule, wherever it is cut -> `autopar.rules.context_parallel`."""
    produced = {f for dims in own.results for f in dims if f in own.free}
    count, arrays = len(own.operands), (*own.operands, *own.results)
    inside = [
        Sent("all-reduce", count + i, lacking)
        for i, dims in enumerate(own.results)
        if combined(name, i) == "sum" and (lacking := tuple(sorted(produced - {*dims})))
    ]
    if POSITIONS not in own.free:
        return tuple(inside)
    keys, ring = _keys(name, count), False if own.rings else None
    if gathers(own):
        kinds: tuple[Literal["all-gather", "reduce-scatter"], ...] = ("all-gather", "reduce-scatter")
        inside.extend(Sent(kinds[i >= count], i, (POSITIONS,), ring=ring) for i in keys)
    if own.rings:  # gradients go round in float32, and return in the end
        inside.extend(Sent("collective-permute", i, (POSITIONS,), hops=-1, ring=True) for i in keys if i < count)
        inside.extend(Sent("collective-permute", i, (POSITIONS,), 2.0, hops=0, ring=True) for i in keys if i >= count)
    if is_causal(params):  # in two halves
        cut = [i for i, dims in enumerate(arrays) if POSITIONS in dims and i not in keys]
        inside.extend(exchanged(cut, POSITIONS))
        inside.extend(replace(sent, ring=True) for sent in exchanged(keys if own.rings else (), POSITIONS))
    return tuple(inside)


def _keys(name: str, count: int) -> list[int]:
    """Keys and values, and gradients of both, among operands and results; `count`: the operands."""
    return [i for i, word in enumerate(_words(OPERANDS[name], count) + RESULTS[name]) if word in "kv"]


#: A forward pass adds to its output in float32 for each piece, 2 + 2 reads and writes of as many bytes, and writes and
#: reads what it adds. A backward pass does so with all its gradients. Both read their operands.
_ADDED = 6.0


def _passing(name: str, count: int) -> tuple[tuple[int, float], ...]:
    """How often a device reads and writes arrays for each piece that it receives: see `Rule.passing`."""
    operands = [(i, 1.0) for i, word in enumerate(_words(OPERANDS[name], count)) if word in "qkvo"]
    results = [(count + i, _ADDED) for i, word in enumerate(RESULTS[name]) if word in "oqkv"]
    return (*operands, *results)


def workspace(name: str, params: Params, own: Rule, *, ring: bool) -> tuple[tuple[int, Dims, float], ...]:
    """What a device has in memory besides operands and results while it runs a piece of the positions.

                            gathered                              passed round, what is sent and what is received
        of keys             keys and values, gradients of both    keys and values, gradients in float32, before
                            and their sums in float32 if causal   and after they are added to, and those of a block
        of queries          if causal, operands in the order of   the same, and the result in float32
                            their blocks, and the result of one

    Returns:
        (operand, its dimensions, how many such arrays); -1 for a dimension that is whole.
    """
    if not gathers(own):
        return ()
    backward, causal = "bwd" in name, is_causal(params)
    in_blocks = (3.0 if backward else 1.0) * causal  # queries; output and its gradient
    queries, keys = own.operands[:2]
    if ring:
        return (1, keys, 14.0 if backward else 4.0), (0, queries, in_blocks + 3.0)
    gradients = (6.0 if causal else 2.0) if backward else 0.0
    whole = tuple(-1 if f == POSITIONS else f for f in keys)
    return (1, whole, 2.0 + gradients), (0, queries, in_blocks + causal)


# FLOPs


def flops(name: str, params: Params, operands: Sequence[Shape]) -> float:
    """FLOPs of the products: two forward, and the scores once more and four gradients backward.

    Pairs of positions that a causal mask or a window leaves out do not count, as the kernel skips them.
    """
    heads_first = params["layout"] == 1
    (b, t, n, h), (_, s, _, _), (*_, width) = (
        (shape[0], shape[2], shape[1], shape[3]) if heads_first else shape for shape in operands[:3]
    )
    products = 3 * h + 2 * width if "bwd" in name else h + width
    return 2.0 * b * n * _pairs(params, t, s) * products


def _pairs(params: Params, t: int, s: int) -> int:
    """Pairs of a query and a key position that are not masked; query i sees the keys up to i."""
    if not is_causal(params):
        return t * s
    window = params.get("sliding_window_length") or s
    return sum(min(i + 1, s) - min(max(i + 1 - window, 0), s) for i in range(t))
