"""Whether a kernel overwrites memory that all runs share before it reads it.

The body is followed from its first equation, with the scalars whose values are fixed where some axes of the grid are at
their start. A buffer counts as overwritten once a store covers all its elements, in every branch that may be taken; or
behind a loop of a known length, whose stores cover them together, as `buffer[i] = x` for each i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex
import numpy as np
from numpy.typing import NDArray

from autopar import jax_compat
from autopar.ir.jaxpr.kernel_work import MOST_POINTS, SCALAR
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
        used = {id(atom) for atoms in (jaxpr.outvars, *(e.invars for e in jaxpr.eqns)) for atom in atoms}
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
        elif name == "scan":
            return self._loop(equation, buffers, values, written)
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

    def _loop(self, equation: Any, buffers: Sequence[int | None], values: Sequence[Any], written: set[int]) -> bool:
        """A loop, of which any iteration may be the first; after it, what it writes in each or in all together."""
        body, constants = equation.params["jaxpr"].jaxpr, jax_compat.scan_counts(equation.params)[0]
        fixed = [*values[:constants], *[None] * (len(values) - constants)]
        after = set(written)
        if not self._call(body, buffers, fixed, after):
            return False
        if equation.params["length"] > 0:
            scratch = {v: buffer for v, buffer in zip(body.invars, buffers, strict=True) if buffer is not None}
            written.update(after, _covered(body, scratch, _counters(equation, values)))
        return True


def _counters(equation: Any, values: Sequence[Any]) -> dict[Any, NDArray[Any]]:
    """The variables in the body of a loop that count its iterations, with their values in each."""
    body, (constants, carries) = equation.params["jaxpr"].jaxpr, jax_compat.scan_counts(equation.params)
    producers = {out: inner for inner in body.eqns for out in inner.outvars}
    counters: dict[Any, NDArray[Any]] = {}
    for variable, result, first in zip(
        body.invars[constants:], body.outvars[:carries], values[constants:], strict=False
    ):
        adds = None if isinstance(result, jex.Literal) else producers.get(result)
        if adds is None or adds.primitive.name != "add" or adds.invars[0] is not variable or first is None:
            continue
        step = adds.invars[1]
        is_counter = isinstance(step, jex.Literal) and np.issubdtype(variable.aval.dtype, np.integer)
        if is_counter and equation.params["length"] <= MOST_POINTS:
            counted = int(first) + int(step.val) * np.arange(equation.params["length"])
            counters[variable] = counted.astype(variable.aval.dtype)  # in which it may wrap
    return counters


def _covered(body: Any, scratch: Mapping[Any, int], values: dict[Any, NDArray[Any]]) -> set[int]:
    """The buffers of which a loop's stores cover every element.

    Args:
        body: of the loop.
        scratch: its variables that are buffers.
        values: its scalars that are known, with their values in each iteration; added to.
    """
    covered: set[int] = set()
    for equation in body.eqns:
        name, operands = equation.primitive.name, equation.invars
        if name == "swap" and not isinstance(operands[0], jex.Literal) and operands[0] in scratch:
            if _covers(jax_compat.slices_written(equation), operands[0].aval.shape, values):
                covered.add(scratch[operands[0]])
        elif name in SCALAR and equation.outvars[0].aval.shape == ():
            arguments = [_in_each(atom, values) for atom in operands]
            by_zero = name in ("div", "rem") and arguments[1] is not None and not np.all(arguments[1])
            if not by_zero and all(argument is not None for argument in arguments):
                result = np.asarray(SCALAR[name](*arguments))
                values[equation.outvars[0]] = result.astype(equation.outvars[0].aval.dtype)
    return covered


def _covers(slices: Sequence[tuple[Any, int]] | None, shape: Sequence[int], values: Mapping[Any, NDArray[Any]]) -> bool:
    """Whether a store into so many elements from these starts, in each iteration, covers a buffer of this shape."""
    if slices is None:
        return False
    parts = [d for d, (_, size) in enumerate(slices) if size != shape[d]]
    if len(parts) != 1:
        return False
    start, size = slices[parts[0]]
    first = _in_each(start, values)
    if first is None:
        return False
    elements = (np.ravel(first)[:, None] + np.arange(size)).ravel()
    return bool(elements.min() >= 0 and np.array_equal(np.unique(elements), np.arange(shape[parts[0]])))


def _in_each(atom: Any, values: Mapping[Any, NDArray[Any]]) -> Any:
    """The values of a scalar in each iteration; None if they are not known."""
    if isinstance(atom, int | np.integer):
        return np.asarray(atom)
    if isinstance(atom, jex.Literal):
        return np.asarray(atom.val) if np.ndim(atom.val) == 0 else None
    return values.get(atom)
