"""Evaluation of a jaxpr, equation by equation.

Calls are opened: the equations of their bodies run in their place. Loops and branches are opened too, iteration by
iteration, unless a subclass runs them whole (`OneByOne.run`). A value is dropped after the last equation that reads it.

Subclasses see each result (`ran`), and the arrays that opened loops make of others (`derived`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat


@dataclass(eq=False)
class OneByOne:
    """An evaluation.

    Attributes:
        iterations: the loops around the equation that runs, outermost first, and the iteration of each.
    """

    iterations: list[tuple[jex.JaxprEqn, int]] = field(default_factory=list)

    def ran(self, equation: jex.JaxprEqn, operands: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        """What counts as the results of an equation that ran whole."""
        return results

    def derived(self, array: Any, source: Any) -> Any:
        """What counts as an array that a loop makes of another one: a slice, or a stack with that slice."""
        return array

    def run(self, equation: jex.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation."""
        open_body = BODIES.get(equation.primitive.name)
        return self.whole(equation, operands) if open_body is None else open_body(self, equation, operands)

    def whole(self, equation: jex.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation that is not opened."""
        return self.ran(equation, operands, jax_compat.bind(equation, operands))

    def evaluate(self, closed: Any, operands: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr, open or closed."""
        jaxpr = getattr(closed, "jaxpr", closed)
        constants = getattr(closed, "consts", ())
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *operands), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jex.Literal) else values[atom]

        last_readers = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.invars if not isinstance(v, jex.Literal)}
        kept = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}
        for i, equation in enumerate(jaxpr.eqns):
            results = self.run(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
            for v in {v for v in equation.invars if not isinstance(v, jex.Literal)} - kept:
                if last_readers[v] == i:
                    del values[v]
        return [read(atom) for atom in jaxpr.outvars]

    @contextmanager
    def iteration(self, equation: jex.JaxprEqn, number: int) -> Iterator[None]:
        """Inside, equations run in this iteration of a loop."""
        self.iterations.append((equation, number))
        yield
        self.iterations.pop()

    # Bodies

    def cond(self, equation: jex.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """The branch that the index selects, which XLA clamps to the branches there are."""
        branches = equation.params["branches"]
        taken = min(max(int(operands[0]), 0), len(branches) - 1)
        return self.evaluate(branches[taken], operands[1:])

    def while_loop(self, equation: jex.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """Iterations as long as the predicate, or that of any example, holds."""
        params = equation.params
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carried, number = list(operands[second:]), 0
        while np.any(goes_on := self.evaluate(params["cond_jaxpr"], [*operands[:first], *carried])[0]):
            with self.iteration(equation, number):
                after = self.evaluate(params["body_jaxpr"], [*operands[first:second], *carried])
            carried = [self._where(goes_on, x, y) for x, y in zip(after, carried, strict=True)]
            number += 1
        return carried

    def _where(self, goes_on: Any, after: Any, before: Any) -> Any:
        """A carried value after an iteration. Under `vmap` an example whose predicate is false keeps its value."""
        if not goes_on.ndim:
            return after
        mask = jnp.expand_dims(goes_on, [*range(goes_on.ndim, after.ndim)])
        return self.derived(jnp.where(mask, after, before), after)

    def scan(self, equation: jex.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """The iterations of a scan."""
        params = equation.params
        constants, carries = jax_compat.scan_counts(params)
        stacks, stacked = operands[constants + carries :], equation.outvars[carries:]
        carried, slices = list(operands[constants:][:carries]), [dict[int, Any]() for _ in stacked]
        indices = range(params["length"])
        for i in reversed(indices) if params["reverse"] else indices:
            reads = [self.derived(x[i], x) for x in stacks]
            with self.iteration(equation, i):
                results = self.evaluate(params["jaxpr"], [*operands[:constants], *carried, *reads])
            carried = results[:carries]
            for by_index, result in zip(slices, results[carries:], strict=True):
                by_index[i] = result
        return [*carried, *(self._stack(s, out.aval) for s, out in zip(slices, stacked, strict=True))]

    def _stack(self, slices: Mapping[int, Any], aval: Any) -> Any:
        if not slices:
            return jnp.zeros(aval.shape, aval.dtype)
        stack = jnp.stack([slices[i] for i in range(len(slices))])
        for each in slices.values():
            stack = self.derived(stack, each)
        return stack


def _call(parameter: str) -> Callable[[OneByOne, jex.JaxprEqn, Sequence[Any]], list[Any]]:
    return lambda evaluation, equation, operands: evaluation.evaluate(equation.params[parameter], operands)


#: Primitive of a call -> its body, opened.
CALLS: Mapping[str, Callable[[OneByOne, jex.JaxprEqn, Sequence[Any]], list[Any]]] = {
    "jit": _call("jaxpr"),
    "pjit": _call("jaxpr"),
    "closed_call": _call("call_jaxpr"),
    "custom_jvp_call": _call("call_jaxpr"),
    "custom_vjp_call": _call("call_jaxpr"),
    jax_compat.REMAT: _call("jaxpr"),
}
#: The same for loops and branches.
LOOPS: Mapping[str, Callable[[OneByOne, jex.JaxprEqn, Sequence[Any]], list[Any]]] = {
    "cond": OneByOne.cond,
    "while": OneByOne.while_loop,
    "scan": OneByOne.scan,
}
#: Both; any other primitive runs whole.
BODIES = {**CALLS, **LOOPS}
