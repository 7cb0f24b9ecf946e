"""Whether a kernel overwrites memory that all runs share before it reads it.

The body is followed from its first equation, with the scalars whose values are fixed where some axes of the grid are at
their start. A buffer counts as overwritten once a store covers all its elements, in every branch that may be taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex
import numpy as np

from autopar.ir.jaxpr.kernel_work import SCALAR
from autopar.rules.pallas.places import called


@dataclass(frozen=True, slots=True)
class Initialisation:
    """Whether the body overwrites its scratch buffers before it reads them, where some axes are at their start.

    Attributes:
        at_start: the axes of `program_id` that are 0.
    """

    at_start: frozenset[int]

    def run(self, jaxpr: Any, scratch: Mapping[Any, int], scalars: dict[Any, Any], written: set[int]) -> bool:
        """Follow a jaxpr; False if it may read a buffer that is not written.

        Args:
            jaxpr: what runs.
            scratch: its variables that are scratch buffers.
            scalars: its scalars whose values are fixed; added to.
            written: buffers that are overwritten so far; added to.
        """
        used = {id(atom) for equation in jaxpr.eqns for atom in equation.invars}
        return all(self._equation(equation, scratch, scalars, written, used) for equation in jaxpr.eqns)

    def _equation(
        self, equation: Any, scratch: Mapping[Any, int], scalars: dict[Any, Any], written: set[int], used: set[int]
    ) -> bool:
        name, operands = equation.primitive.name, equation.invars
        buffers = [scratch.get(atom) if not isinstance(atom, jex.Literal) else None for atom in operands]
        values = [self._value(atom, scalars) for atom in operands]
        if name == "program_id" and equation.params["axis"] in self.at_start:
            scalars[equation.outvars[0]] = 0
        elif name == "cond":
            return self._branches(equation, buffers, values, written)
        elif (inner := called(equation)) is not None:
            return self._call(inner, buffers, values, written)
        elif name == "swap" and buffers[0] is not None and id(equation.outvars[0]) not in used:
            # as many elements as the buffer has, none of them twice
            if operands[1].aval.size == operands[0].aval.size and not any(a.aval.shape for a in operands[2:]):
                written.add(buffers[0])
        elif any(buffer is not None and buffer not in written for buffer in buffers):
            return False
        elif name in SCALAR and all(value is not None for value in values):
            dtype = equation.outvars[0].aval.dtype  # in which the value may wrap
            scalars[equation.outvars[0]] = np.asarray(SCALAR[name](*values)).astype(dtype)[()]
        return True

    @staticmethod
    def _value(atom: Any, scalars: Mapping[Any, Any]) -> Any:
        if not isinstance(atom, jex.Literal):
            return scalars.get(atom)
        return atom.val if np.ndim(atom.val) == 0 else None

    def _call(self, jaxpr: Any, buffers: Sequence[int | None], values: Sequence[Any], written: set[int]) -> bool:
        scratch = {v: buffer for v, buffer in zip(jaxpr.invars, buffers, strict=True) if buffer is not None}
        scalars = {v: value for v, value in zip(jaxpr.invars, values, strict=True) if value is not None}
        return self.run(jaxpr, scratch, scalars, written)

    def _branches(self, equation: Any, buffers: Sequence[int | None], values: Sequence[Any], written: set[int]) -> bool:
        branches = [getattr(branch, "jaxpr", branch) for branch in equation.params["branches"]]
        if values[0] is not None:
            taken = branches[min(max(int(values[0]), 0), len(branches) - 1)]
            return self._call(taken, buffers[1:], values[1:], written)
        after = [set(written) for _ in branches]
        good = all(self._call(b, buffers[1:], values[1:], w) for b, w in zip(branches, after, strict=True))
        written.update(set.intersection(*after))
        return good
