"""Values that are computed twice: rematerialisation clones operations, and the total of a clone is that of the
original.

Two values are equal if operations of equal primitive and parameters compute them from equal operands (global value
numbering). Optimisation barriers, which hide this from a compiler, return their operands unchanged. A total that the
backward pass recomputes is thus known as early as that of the forward pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from autopar.ir.graph import Constant, Op

_BARRIER = "optimization_barrier"


def first_equal(ops: Sequence[Op]) -> Mapping[int, int]:
    """Value -> the first value in program order that equals it, if that is another value."""
    representative: dict[int, int] = {}
    computed: dict[Hashable, tuple[int, ...]] = {}
    for op in ops:
        operands = tuple([representative.get(a, a) if isinstance(a, int) else _literal(a) for a in op.inputs])
        if op.name == _BARRIER:
            equal = [x if isinstance(x, int) else v for x, v in zip(operands, op.outputs, strict=True)]
        elif op.regions or op.equation.effects:
            continue
        else:
            equal = computed.setdefault((op.signature, operands), op.outputs)
        if equal is not op.outputs:
            representative.update((v, w) for v, w in zip(op.outputs, equal, strict=True) if v != w)
    return representative


def _literal(constant: Constant) -> Hashable:
    return str(constant.type), np.asarray(constant.value).tobytes()
