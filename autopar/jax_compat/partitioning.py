"""Sharding rules of `custom_partitioning`, and attention of cuDNN where no GPU is at hand."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src import custom_partitioning_sharding_rule as jax_sharding_rule  # tried on 0.10.2, 0.12.0
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn  # tried on 0.10.2, 0.12.0: what it asks of a GPU
from jax._src.interpreters import mlir as jax_mlir  # tried on 0.10.2, 0.12.0: types of a sharding rule
from jaxlib.mlir import ir  # the same on jaxlib 0.10.2 and 0.12.0


def partitioning_rule(
    rule: Any, arguments: Sequence[Any], operands: Sequence[jax.ShapeDtypeStruct], results: Sequence[Any]
) -> Any:
    """The `sharding_rule` of a `custom_partitioning` as Shardy's attribute. Tried on 0.10.2 and 0.12.0.

    Args:
        rule: an `SdyShardingRule`, or a function of `arguments` and the MLIR types of operands and results that gives
            one, a text, or a text and its keyword arguments.
        arguments: static arguments and mesh.
        operands, results: shapes and types.
    """
    with jax_mlir.make_ir_context(), ir.Location.unknown():
        types: list[list[ir.Type]] = [
            [ir.RankedTensorType.get(t.shape, jax_mlir.dtype_to_ir_type(t.dtype)) for t in of]
            for of in (operands, results)
        ]
        options: Mapping[str, Any] = {}
        if callable(rule):
            rule = rule(*arguments, *types)
            rule, options = rule if isinstance(rule, tuple | list) else (rule, options)
        if isinstance(rule, str):
            rule = jax_sharding_rule.str_to_sdy_sharding_rule(rule, **options)
        return jax_sharding_rule.sdy_sharding_rule_to_mlir(rule, *types)


#: The GPU for which cuDNN's attention is traced where none is at hand: (version of cuDNN, compute capability).
_DESCRIBED_GPU = (91300, (9, 0))
_GPU_LOCK = threading.RLock()


def lacks_cudnn(error: BaseException) -> bool:
    """Whether JAX refuses to trace attention of cuDNN since no GPU is at hand. Tried on 0.10.2 and 0.12.0."""
    return isinstance(error, RuntimeError) and str(error) == "cuDNN is not detected."


@contextlib.contextmanager
def described_gpu() -> Iterator[None]:
    """Inside, and in this thread alone, attention of cuDNN is traced as for a Hopper GPU.

    Tried on 0.10.2 and 0.12.0.
    """
    version, capability = _DESCRIBED_GPU
    thread = threading.get_ident()

    def parsed(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    answers: Mapping[str, Callable[..., Any]] = {
        "check_cudnn_version": lambda: version,
        "check_compute_capability": lambda wanted: capability >= parsed(wanted),
        "is_cuda_compute_capability_equal": lambda wanted: capability == parsed(wanted),
    }

    def answering(name: str, asked: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (answers[name] if threading.get_ident() == thread else asked)(*args)

    with _replaced(jax_cudnn, {name: answering(name, getattr(jax_cudnn, name)) for name in answers}):
        yield


@contextlib.contextmanager
def attention_by_cudnn() -> Iterator[Callable[[], bool]]:
    """Inside, and in this thread alone, `jax.nn.dot_product_attention` is that of cuDNN.

    The result says whether a call asked for another implementation. Tried on 0.10.2 and 0.12.0.
    """
    thread, asked = threading.get_ident(), jax.nn.dot_product_attention
    calls: list[None] = []

    def attention(*args: Any, **options: Any) -> Any:
        if threading.get_ident() != thread or options.get("implementation") == "cudnn":
            return asked(*args, **options)
        calls.append(None)
        return asked(*args, **{**options, "implementation": "cudnn"})

    with _replaced(jax.nn, {"dot_product_attention": attention}):
        yield lambda: bool(calls)


@contextlib.contextmanager
def _replaced(module: Any, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, a module has these functions; one thread at a time is."""
    with _GPU_LOCK:
        before = {name: getattr(module, name) for name in functions}
        try:
            for name, function in functions.items():
                setattr(module, name, function)
            yield
        finally:
            for name, function in before.items():
                setattr(module, name, function)
