"""Which partial results a backend's all-reduce can combine: backend -> kind of reduction -> families of types.

An operation that is cut along a dimension which it reduces leaves a partial result on every device, and an all-reduce
combines them. The communication library of a backend knows some reductions of some types only. What it does not know is
not left partial: the planner has no such strategy, and the operand is gathered instead.

Sources: CPU and TPU (described v5e) by compiling every reduction of every type, on CPU also by comparing the numbers
(jaxlib 0.10.2 and 0.12.0, libtpu 0.0.52). GPU by compiling for a described H100, and XLA's `MatchReductionInstruction`
and `IsTypeSupportedByNccl`: bits of integers and the order of complex numbers abort the process in XLA's compiler; a
product of complex numbers compiles, but NCCL multiplies real and imaginary parts by themselves. Types of two bits have
no all-reduce anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

#: Operation -> the reduction that combines its partial results, where that is no sum.
REDUCTIONS: Mapping[str, str] = MappingProxyType(
    {
        "reduce_max": "max",
        "reduce_min": "min",
        "reduce_prod": "mul",
        "reduce_and": "and",
        "reduce_or": "or",
        "reduce_xor": "xor",
    }
)

_ORDERED = ("bool", "int4", "int", "float8", "float")
_NUMBERS = ("int4", "int", "float8", "float", "complex")
#: A gather from pieces masks what each device does not have and adds up, truth values as well.
_SUMMED = ("bool", *_NUMBERS)

KNOWN: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "cpu": {"add": _SUMMED, "mul": _NUMBERS, "max": _ORDERED, "min": _ORDERED, "and": ("bool",), "or": ("bool",)},
        "gpu": {
            "add": _SUMMED,
            "mul": ("int4", "int", "float8", "float"),
            "max": _ORDERED,
            "min": _ORDERED,
            "and": ("bool",),
            "or": ("bool",),
        },
        "tpu": {
            "add": _SUMMED,
            "mul": _NUMBERS,
            "max": (*_ORDERED, "complex"),
            "min": (*_ORDERED, "complex"),
            "and": ("bool", "int"),
            "or": ("bool", "int"),
            "xor": ("bool", "int"),
        },
    }
)

#: What the name of a type begins with -> its family; the first that fits.
_FAMILIES: tuple[tuple[str, str], ...] = (
    ("bool", "bool"),
    *((f"{sign}int{bits}", f"int{bits}") for bits in (2, 4) for sign in ("", "u")),
    ("int", "int"),
    ("uint", "int"),
    ("float8", "float8"),
    ("float4", "float8"),
    ("float", "float"),
    ("bfloat", "float"),
    ("complex", "complex"),
)


def family(dtype: str) -> str:
    """The family of a type by its name: "bool", "int2", "int4", "int", "float8", "float", "complex"; else the name."""
    return next((name for start, name in _FAMILIES if dtype.startswith(start)), dtype)


def combines(backend: str, operation: str, dtype: str) -> bool:
    """Whether a backend (`backends.BACKENDS`) can combine partial results of an operation, of this type."""
    return family(dtype) in KNOWN[backend].get(REDUCTIONS.get(operation, "add"), ())
