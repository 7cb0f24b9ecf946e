"""Which operation of a step made a NaN (`debug_nans=True`).

    every program of the step runs; its float results are searched for NaN          -> CheckedProgram
    if there are any, its equations run again one by one on the same operands       -> _Search
    from a NaN of the results back through NaN operands, to an equation that has
    none: that made it. At a program's operands it ends: an argument has it         -> _Search.origin

The walk follows the NaN that reach the results. One that a mask drops, as in `jnp.where(x > 0, jnp.log(x), 0)`, is no
error. A program is run on its operands again, so nothing may be donated to it. Loops run whole, and iteration by
iteration only where they give NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.codegen.tags import last_tag
from autopar.errors import NanError
from autopar.ir.graph import Graph
from autopar.ir.jaxpr.one_by_one import CALLS, LOOPS, OneByOne
from autopar.ir.op_sets import CALLBACKS


@dataclass(frozen=True, slots=True, eq=False)
class CheckedProgram:
    """A compiled program whose results may hold no NaN but those of its operands.

    Attributes:
        program: the compiled object of JAX, to which nothing is donated.
        jaxpr: its jaxpr.
        graph: the operations that the tags of its equations name.
        microbatches: length of a loop of the program that is over microbatches; 1: there is none.
    """

    program: Any
    jaxpr: Any
    graph: Graph
    microbatches: int = 1

    def __call__(self, *operands: Any) -> Any:
        """The results of the program.

        Raises:
            NanError: with the operation that made a NaN, and its source line.
        """
        with jax.debug_nans(False):
            results = self.program(*operands)
            if any(map(holds_nan, jax.tree.leaves(results))):
                with jax_compat.no_mesh():
                    origin = _Search().origin(self.jaxpr, jax.tree.leaves(operands))
                if origin is not None:
                    raise NanError(self._text(origin))
        return results

    def _text(self, origin: _FirstNan) -> str:
        inner = self._is_over_microbatches(origin)
        microbatch = f", microbatch {origin.iterations[0][1]} of {self.microbatches}" if inner else ""
        loops = [f", iteration {i} of the loop{self._line(loop) or ''}" for loop, i in origin.iterations[inner:]]
        where = microbatch + "".join(loops)
        name, line = origin.equation.primitive.name, self._line(origin.equation)
        what = f"a sum over microbatches ({name})" if line is None else f"{name}{line}"
        return f"{what} gives NaN{where}: {origin.cause}"

    def _is_over_microbatches(self, origin: _FirstNan) -> bool:
        """The outermost loop is over microbatches: it has as many iterations, and no source line."""
        loops = [loop for loop, _ in origin.iterations[:1]]
        return any(loop.params.get("length") == self.microbatches > 1 and not self._line(loop) for loop in loops)

    def _line(self, equation: jex.JaxprEqn) -> str | None:
        """The source line of the operation that an equation belongs to; None: autopar adds it around operations."""
        sources = {op.tag: op.source for op in self.graph.walk()}
        source = sources.get(_tag(equation))
        return None if source is None else f" at {source}" if source else ""


def is_asked(debug_nans: bool | None) -> bool:
    """Whether NaN are searched for; None: as JAX's own setting `jax_debug_nans` has it."""
    return jax_compat.debugs_nans() if debug_nans is None else debug_nans


def holds_nan(array: Any) -> bool:
    """Whether a float array holds a NaN; arrays of other types, and those that are in other processes, do not."""
    dtype = getattr(array, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact) or isinstance(array, jax.ShapeDtypeStruct):
        return False
    if isinstance(array, jax.Array) and not array.sharding.addressable_devices:
        return False
    return bool(jnp.isnan(array).any())


def check_arguments(paths: Sequence[str], leaves: Sequence[Any], results: Sequence[Any]) -> None:
    """NanError for results with NaN that no operation made: arguments hold them."""
    if any(map(holds_nan, results)):
        named = [f"'{path}'" for path, leaf in zip(paths, leaves, strict=True) if holds_nan(leaf)]
        raise NanError(f"results of the step are NaN because of NaN in {' and '.join(named[:4]) or 'a constant'}")


@dataclass(frozen=True, slots=True)
class _FirstNan:
    """Where a NaN comes from.

    Attributes:
        equation: what made it.
        cause: what is said of its operands.
        iterations: the loops around it, and the iteration of each.
    """

    equation: jex.JaxprEqn
    cause: str
    iterations: tuple[tuple[jex.JaxprEqn, int], ...]


@dataclass(eq=False)
class _Search(OneByOne):
    """An evaluation that remembers how each NaN came to be.

    Attributes:
        made: id of an array with NaN -> the array, which equation made it in which iterations, and its operands.
        sources: id of an array with NaN that is a slice or a stack -> the arrays that it is made of.
    """

    made: dict[int, tuple[Any, jex.JaxprEqn, tuple[Any, ...], Sequence[Any]]] = field(
        default_factory=dict[int, tuple[Any, jex.JaxprEqn, tuple[Any, ...], Sequence[Any]]]
    )
    sources: dict[int, tuple[Any, list[Any]]] = field(default_factory=dict[int, tuple[Any, list[Any]]])

    def run(self, equation: jex.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
        """A call is opened; a loop or branch runs whole first, and is opened if it gives NaN."""
        if equation.primitive.name in CALLS:
            return super().run(equation, operands)
        results = jax_compat.bind(equation, operands)
        if equation.primitive.name in CALLBACKS:
            results = [_on_any_device(x) for x in results]
        if not any(map(holds_nan, results)):
            return results
        return self._opened(equation, operands, results)

    def _opened(self, equation: jex.JaxprEqn, operands: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        open_body = LOOPS.get(equation.primitive.name)
        if open_body is not None:
            return open_body(self, equation, operands)
        for array in filter(holds_nan, results):
            if not any(array is x for x in operands):
                self.made[id(array)] = (array, equation, tuple(self.iterations), operands)
        return results

    def derived(self, array: Any, source: Any) -> Any:
        """A slice or a stack, whose NaN are those of its source."""
        if holds_nan(source) and holds_nan(array):
            self.sources.setdefault(id(array), (array, []))[1].append(source)
        return array

    def origin(self, jaxpr: Any, operands: Sequence[Any]) -> _FirstNan | None:
        """The equation that made a NaN of the results; None: operands have all of them."""
        results = filter(holds_nan, self.evaluate(jaxpr, operands))
        origins = (self._origin_of(array, operands) for array in results)
        return next((origin for origin in origins if origin is not None), None)

    def _origin_of(self, array: Any, operands: Sequence[Any]) -> _FirstNan | None:
        """The equation that made a NaN of an array; None: an operand of the program has it."""
        reader: _FirstNan | None = None
        while not any(array is x for x in operands):
            if id(array) in self.sources:
                array = self.sources[id(array)][1][0]
            elif id(array) in self.made:
                _, equation, iterations, reads = self.made[id(array)]
                before = [x for x in reads if holds_nan(x)]
                if not before:
                    cause = "an operand is infinite" if any(map(_holds_inf, reads)) else "no operand holds NaN"
                    return _FirstNan(equation, cause, iterations)
                if _tag(equation):
                    reader = _FirstNan(equation, "it reads a constant that holds NaN", iterations)
                array = next((x for x in before if _share_nan(x, array)), before[0])
            else:
                return reader
        return None


def _on_any_device(array: jax.Array) -> jax.Array:
    """A result of a callback, not committed to devices: JAX gives it a sharding that no other operation accepts."""
    return jnp.asarray(np.asarray(array)) if array.is_fully_addressable else array


def _tag(equation: jex.JaxprEqn) -> str:
    """The tag of the operation that an equation belongs to, or ""."""
    return last_tag(str(equation.source_info.name_stack)).split(".")[0]


def _share_nan(operand: Any, result: Any) -> bool:
    """Whether an operand has a NaN where the result has one, as in an operation element by element."""
    return operand.shape == result.shape and bool((jnp.isnan(operand) & jnp.isnan(result)).any())


def _holds_inf(array: Any) -> bool:
    is_float = hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jnp.inexact)
    return is_float and bool(jnp.isinf(array).any())
