"""Which steps XLA's CPU compiler runs in kernels of a library (YNNPACK): products, reductions, what is around these.

A kernel starts at a product or a reduction, the last of the program first. That of a product stays alone; that of a
reduction takes in neighbours, nearest first, products that none has taken yet among them:

    up      what makes an operand, if nothing outside the kernel reads that
    down    what reads the kernel's result, if nothing else does

as long as the library knows them (of products those of matrices, the first of which is read row by row), and
elementwise ones have 4,096 elements or more on a device (as seen of JAX 0.10.2; each device is taken to have an even
share). Nothing is fused into such a kernel afterwards: what it reads is in memory,
even a broadcast, and what others read of it as well.
(openxla/xla, xla/backends/cpu/transforms/library_rewriter.cc.)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost_models.compiler.compiled_program import Program, Step, free_dims
from autopar.cost_models.compiler.fusion import LIGHT
from autopar.ir.op_sets import BITWISE, COMPARISONS, COMPLEX_PARTS, ELEMENTWISE, NUMERIC_REDUCTIONS, SELECTIONS

#: Elementwise operations that the library does not know.
_UNKNOWN = frozenset((
    *(*SELECTIONS, *COMPARISONS, *BITWISE, *COMPLEX_PARTS, "nextafter", "bitcast_convert_type", "reduce_precision"),
    *("atan2", "rem", "lgamma", "digamma", "erf_inv"),
))  # fmt: skip
#: Steps that kernels take in.
_KNOWN = frozenset((*ELEMENTWISE, "broadcast_in_dim", "spread")) - _UNKNOWN
_LEAST = 4096  # elements of the result of an elementwise operation that kernels take in


def kernels(
    p: Program, steps: Sequence[Step], readers: Mapping[int, Sequence[Step]], leaving: frozenset[int]
) -> Mapping[int, int]:
    """Step (by identity) -> the number of the library's kernel that it is in; steps of other kernels are left out.

    Args:
        steps: of all frames, in their order.
        readers: value -> the steps that read it.
        leaving: values that leave a frame.
    """
    growth = _Growth(p, readers, leaving, {v: step for step in steps for v in step.outputs})
    for number, step in enumerate(reversed(steps)):
        if _is_product(step):
            growth.kernels.setdefault(id(step), number)
        elif step.name in NUMERIC_REDUCTIONS and id(step) not in growth.kernels:
            growth.grow(step, number)
    return growth.kernels


def _is_product(step: Step) -> bool:
    """A product that the library knows: of matrices, of which the first is read row by row."""
    if step.name != "dot_general":
        return False
    (lhs_contracted, _), _ = step.op.params["dimension_numbers"]
    lhs, rhs = (v.aval.shape for v in step.op.equation.invars)
    rows, columns = (math.prod(shape[d] for d in free_dims(step.op, k)) for k, shape in enumerate((lhs, rhs)))
    by_columns = len(lhs) == 2 and tuple(lhs_contracted) == (0,)
    return min(rows, columns) > 1 and not by_columns


@dataclass(eq=False)
class _Growth:
    p: Program
    readers: Mapping[int, Sequence[Step]]
    leaving: frozenset[int]
    makers: Mapping[int, Step]
    kernels: dict[int, int] = field(default_factory=dict)

    def grow(self, centre: Step, number: int) -> None:
        """Take neighbours into the kernel of a step, until there is none left."""
        self.kernels[id(centre)] = number
        waiting, seen = deque(self._around(centre, number, True)), {id(centre)}
        while waiting:
            step, down = waiting.popleft()
            if id(step) not in seen and id(step) not in self.kernels and self._is_known(step):
                seen.add(id(step))
                self.kernels[id(step)] = number
                waiting.extend(self._around(step, number, down))

    def _around(self, step: Step, number: int, down: bool) -> Iterator[tuple[Step, bool]]:
        for v in map(self.p.behind, step.inputs):
            maker = self.makers.get(v)
            if maker is not None and self._inside(maker, number):
                yield maker, False
        users = [r for v in step.outputs for r in self.readers.get(v, ())]
        if down and len(users) == 1 and self.leaving.isdisjoint(step.outputs):
            yield users[0], True

    def _is_known(self, step: Step) -> bool:
        if step.name in NUMERIC_REDUCTIONS or _is_product(step):
            return True
        if step.kind != LIGHT or step.name not in _KNOWN or any(map(self._is_unknown, (*step.inputs, *step.outputs))):
            return False
        return step.name not in ELEMENTWISE or self.p.type_of(step.outputs[0]).size >= _LEAST * self.p.devices

    def _is_unknown(self, value: int) -> bool:
        """A value of a type that elementwise operations of the library do not take: half floats, and booleans."""
        return self.p.is_half(value) or self.p.type_of(value).dtype == "bool"

    def _inside(self, step: Step, number: int) -> bool:
        """Nothing outside a kernel reads what a step makes."""
        users = [r for v in step.outputs for r in self.readers.get(v, ())]
        return self.leaving.isdisjoint(step.outputs) and all(self.kernels.get(id(r)) == number for r in users)
