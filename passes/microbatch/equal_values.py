"""Values that are computed twice: recomputation clones operations, and the total of a clone is that of the original.

Two values are equal if the same operation with the same parameters makes them of equal operands (global value
numbering). Barriers, which keep a compiler from seeing that, hand their operands on as they are. A total that the
backward pass recomputes is thus known as early as that of the forward pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from autopar.ir.graph import Atom, Op

_BARRIER = "optimization_barrier"


def first_equal(ops: Sequence[Op]) -> Mapping[int, int]:
    """Value -> the first value in program order that is equal to it, where that is another one."""
    first: dict[int, int] = {}
    made: dict[Hashable, tuple[int, ...]] = {}
    for op in ops:
        operands = tuple(_key(a, first) for a in op.inputs)
        if op.name == _BARRIER:
            equal = [first.get(a, a) if isinstance(a, int) else v for a, v in zip(op.inputs, op.outputs, strict=True)]
        elif op.regions or op.equation.effects:
            continue
        else:
            equal = made.setdefault((op.signature, operands), op.outputs)
        first.update((v, w) for v, w in zip(op.outputs, equal, strict=True) if v != w)
    return first


def _key(atom: Atom, first: Mapping[int, int]) -> Hashable:
    if isinstance(atom, int):
        return first.get(atom, atom)
    return str(atom.type), np.asarray(atom.value).tobytes()
