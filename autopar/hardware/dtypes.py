"""The rate of a dtype that a device does not list: hardware without units for it computes in the next wider one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

#: Dtype -> the next wider one in which products are computed. float16 has more digits than bfloat16, and fewer
#: exponents. The units for int8 multiply numbers without a sign too.
WIDER: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e4m3", "float8_e3m4"), "float16"
        ),
        **dict.fromkeys(("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn"), "bfloat16"),
        **dict.fromkeys(("float16", "bfloat16"), "float32"),
        "float32": "float64",
        **dict.fromkeys(("bool", "int2", "uint2", "int4", "uint4", "uint8"), "int8"),
        **dict.fromkeys(("int8", "uint16"), "int16"),
        **dict.fromkeys(("int16", "uint32"), "int32"),
    }
)
#: Dtype of complex numbers -> that of their parts. A product is four: (a + bi)(c + di) = (ac - bd) + (ad + bc) i.
PARTS: Mapping[str, str] = MappingProxyType({"complex64": "float32", "complex128": "float64"})


def rate(rates: Mapping[str, float], dtype: str) -> float:
    """FLOP/s of a dtype: as listed, else of the next wider one that is listed, else the slowest.

    Args:
        rates: dtype name -> FLOP/s, at least one.
        dtype: its name.
    """
    if dtype in rates:
        return rates[dtype]
    if dtype in PARTS:
        return rate(rates, PARTS[dtype]) / 4
    return rate(rates, WIDER[dtype]) if dtype in WIDER else min(rates.values())
