"""Which float32 values XLA's TPU compiler keeps in bfloat16: those that products alone read, which round them anyway.

what a product's kernel writes   if all that is made of it ends in one value, which products read; sums of it, as
                                 for a bias, are made in the same kernel, before it is rounded   -> _ends_in_products
a copy in another layout         by the same rule: it is rounded before it is sent; so is one that a loop reads in every
                                 iteration
what a loop stacks               if products read it as it is, or moved                      -> _products_alone_read
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.cost_models.compiler.compiled_program import Program, Step
from autopar.cost_models.compiler.fusion import KERNEL, LIGHT, LOOP, MOVES, PRODUCT, REDUCTION

#: A reduction whose result becomes this share of its operand again cannot be made in the operand's kernel.
_HALF = 0.5


def narrowed(
    p: Program,
    steps: Sequence[Step],
    readers: Mapping[int, Sequence[Step]],
    thin: set[int],
    leaving: set[int],
    absorbed: Mapping[int, int],
) -> frozenset[int]:
    """Values and tokens kept in half their bytes.

    Args:
        p, steps: the program, and the steps of all its frames.
        readers: value -> the steps that read it.
        thin, leaving, absorbed: see `autopar.cost_models.compiler.written_values`.
    """
    narrowing = _Narrowing(p, steps, readers, thin, leaving, absorbed)
    return frozenset(narrowing.demoted() if p.backend.narrows else ())


@dataclass(frozen=True, eq=False)
class _Narrowing:
    p: Program
    steps: Sequence[Step]
    readers: Mapping[int, Sequence[Step]]
    thin: set[int]
    leaving: set[int]
    absorbed: Mapping[int, int]

    def demoted(self) -> set[int]:
        """All of them."""
        through: dict[int, list[Step]] = {}
        for step in self.steps:
            for v in step.inputs:
                if step.kind != LOOP and v in self.p.tokens:
                    through.setdefault(v, []).append(step)
        heavy = [v for s in self.steps if s.kind in (KERNEL, PRODUCT) for v in s.outputs if v not in self.absorbed]
        results = (v for v in (*heavy, *self.absorbed.values()) if v not in self.leaving)
        demoted = {v for v in results if self._ends_in_products(v, self._readers_inside(v))}
        demoted.update(v for s in self.steps if s.kind == LOOP for v in s.outputs if self._products_alone_read(v))
        demoted.update(v for v, steps in through.items() if self._ends_in_products(v, steps))
        return self._with_constants(demoted, through)

    def _with_constants(self, demoted: set[int], through: Mapping[int, Sequence[Step]]) -> set[int]:
        """The values, with the copies that loops read if all copies of them in the bodies are among the values."""
        copied: dict[int, list[int]] = {}
        for token, source in self.p.source_token.items():
            copied.setdefault(source, []).append(token)
        for v in sorted({v for s in self.steps if s.kind == LOOP for v in s.inputs if v in copied}, reverse=True):
            if v not in through and demoted.issuperset(copied[v]):
                demoted.add(v)
        return demoted

    def _readers_inside(self, value: int) -> list[Step]:
        """Readers of a value; loops read through their bodies."""
        return [r for r in self.readers.get(value, ()) if r.kind != LOOP]

    def _products_alone_read(self, value: int) -> bool:
        """Products alone read what leaves a loop, as it is or moved: it can be rounded where it is made."""
        waiting, seen, products = [value], {value}, False
        while waiting:
            value = waiting.pop()
            for step in self._readers_inside(value):
                if step.kind == LIGHT and step.name in MOVES:
                    waiting.extend(v for v in step.outputs if v not in seen)
                    seen.update(step.outputs)
                elif step.kind != PRODUCT:
                    return False
                products = True
            if value in self.leaving:
                return False
        return products

    def _ends_in_products(self, value: int, readers: Sequence[Step]) -> bool:
        """All that is made of a value ends in one, which products alone read, and reductions beside them."""
        waiting, ends, products, seen = [(value, r) for r in readers], set[int](), False, set[int]()
        while waiting:
            read, step = waiting.pop()
            if step.kind == LIGHT and step.outputs[0] not in self.leaving and step.outputs[0] not in self.thin:
                if id(step) not in seen:
                    seen.add(id(step))
                    output = step.outputs[0]
                    same = read if step.name == "transpose" else output
                    waiting.extend((same, r) for r in self._readers_inside(output))
            elif step.kind == PRODUCT or (step.kind == REDUCTION and not self._spreads_again(step)):
                ends.add(self.p.behind(read))
                products = products or step.kind == PRODUCT
            else:
                return False
        return products and len(ends) == 1

    def _spreads_again(self, reduction: Step) -> bool:
        """What a reduction makes becomes as large as what it read, and so cannot be made in the same kernel."""
        least = _HALF * self.p.type_of(reduction.inputs[0]).nbytes
        return any(self._largest.get(v, -1.0) >= least for v in reduction.outputs)

    @cached_property
    def _largest(self) -> Mapping[int, float]:
        """Value -> bytes of the largest result that light steps make of it, thin ones among them."""
        largest: dict[int, float] = {}
        light, rises = [step for step in reversed(self.steps) if step.kind == LIGHT], True
        while rises:  # one pass but for what is read in other frames than where it is made
            rises = False
            for step in light:
                nbytes = max(self.p.type_of(step.outputs[0]).nbytes, *(largest.get(v, -1.0) for v in step.outputs))
                for v in map(self.p.behind, step.inputs):
                    if nbytes > largest.get(v, -1.0):
                        largest[v], rises = nbytes, True
        return largest
