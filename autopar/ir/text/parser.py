"""The reader of a graph's printed form: `parse(str(graph))` is equal to `graph` in all that planning reads.

    graph       graph(%0: f32[8,4] "path", ...) { constants, operations, return %5 "path", ... }
    constant    %1: f32[2] = constant [1.0, 2.0]                            or full(0.0)
    operation   %2: f32[8] = reduce_sum[axes=(1,)](%0, 2.0:f32[]) x4  # phase file.py:3 in scopes
                  body(%3: f32[8]) { ... }                                  the regions of the operation
                  jaxpr0(%0: f32[], %1: f32[]) { ... }                      jaxprs among its parameters, values from 0

Operands are values or literals with their types. `autopar.ir.text.parameters` has the grammar of parameters and says
which are left out. "x4" is the trip count of the regions, "x?" one known only at run time; 1 if it is not written. The
phase is forward if the comment is not written. Spaces and line breaks between tokens do not count; a line that begins
with "#" is a comment.

Every operation is bound to JAX's primitive again on values of the written types, which checks the types of results.
Values of the program that the text does not have: weak types, devices of meshes, large constants, `Graph.repeats`.
Regions need JAX 0.10, whose loops have the parameters that are written.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count
from typing import Any

import jax
import jax.extend.core as jex

from autopar import jax_compat
from autopar.errors import GraphTextError
from autopar.ir.graph import Atom, Graph, Op, Region, Type, verify
from autopar.ir.jaxpr import type_of_aval
from autopar.ir.text import parameters, printer
from autopar.ir.text.syntax import BodyText, OpText, TextReader

#: A type of 64 bits, which JAX has only in its mode for them.
_WIDE = re.compile(r"\b(f64|i64|u64|c128)\[")


def parse(text: str) -> Graph:
    """The graph of a printed form.

    Raises:
        GraphTextError: the text is no printed form, a value is undefined or defined twice, a type is not that of the
            operation's result, or a parameter cannot be written; with the number of the line.
    """
    reader = TextReader(text)
    body, input_paths, output_paths = reader.graph()
    with jax.enable_x64(True) if _WIDE.search(text) else contextlib.nullcontext():
        return _Builder().graph(body, input_paths, output_paths)


@dataclass
class _Builder:
    """State of one construction.

    Attributes:
        types, lines: type of each value, and the line that defines it.
        constants: arrays of the constants so far.
        signatures: what makes operations equal -> signature, and the equation of the first of them.
    """

    types: dict[int, Type] = field(default_factory=dict)
    lines: dict[int, int] = field(default_factory=dict)
    constants: dict[int, Any] = field(default_factory=dict)
    signatures: dict[Hashable, tuple[int, jex.JaxprEqn]] = field(default_factory=dict)
    indices: Iterator[int] = field(default_factory=count)

    def graph(self, body: BodyText, input_paths: tuple[str, ...], output_paths: tuple[str, ...]) -> Graph:
        g = self.region(body, frozenset())
        types = tuple(self.types.get(v, Type((), "undefined", 0)) for v in range(1 + max(self.types, default=-1)))
        effects = tuple(sorted({str(e) for op in g.ops for e in op.equation.effects}))
        return verify(Graph(types, g.inputs, input_paths, g.outputs, output_paths, g.constants, g.ops, effects))

    def define(self, line: int, values: Sequence[tuple[int, Type]]) -> tuple[int, ...]:
        for value, type_ in values:
            if value in self.types:
                raise GraphTextError(f"line {line}: %{value} is defined in line {self.lines[value]} already")
            self.types[value], self.lines[value] = type_, line
        return tuple(value for value, _ in values)

    def region(self, body: BodyText, outer: frozenset[int]) -> Region:
        """A body; `outer` are the constants around it, the only values from outside that it may read."""
        constants = tuple((v, array) for v, _, array in body.constants)
        outer_constants = outer | {v for v, _ in constants}
        inputs = self.define(body.line, body.inputs)
        self.define(body.line, [(v, t) for v, t, _ in body.constants])
        self.constants.update(constants)
        defined = {*outer_constants, *inputs}
        ops: list[Op] = []
        for op in body.ops:
            _check_defined(op.inputs, defined, op.line)
            ops.append(self.op(op, outer_constants))
            defined.update(ops[-1].outputs)
        _check_defined(body.outputs, defined, body.return_line)
        return Region(body.name, inputs, tuple(ops), body.outputs, constants)

    def op(self, op: OpText, outer_constants: frozenset[int]) -> Op:
        index = next(self.indices)
        regions = {name: self.region(b, outer_constants) for name, b in op.regions.items()}
        params = self.params(op, {name: self.jaxpr(region) for name, region in regions.items()})
        signature, equation = self.signature(op, params)
        outputs = self.define(op.line, op.outputs)
        stack, bodies = jax_compat.name_stack(op.scopes), tuple(regions.values())
        return Op(index, op.name, signature, op.inputs, outputs, equation, stack, op.phase, op.source, bodies, op.trips)

    def jaxpr(self, region: Region) -> jex.ClosedJaxpr:
        """A region as JAX has it, traced from its operations."""

        def evaluate(*arguments: Any) -> list[Any]:
            env = {**self.constants, **dict(zip(region.inputs, arguments, strict=True))}
            read = lambda a: env[a] if isinstance(a, int) else a.value  # noqa: E731
            for op in region.ops:
                env.update(zip(op.outputs, jax_compat.bind(op.equation, list(map(read, op.inputs))), strict=True))
            return list(map(read, region.outputs))

        return jax.make_jaxpr(evaluate)(*(_aval(self.types[v]) for v in region.inputs))

    def params(self, op: OpText, regions: Mapping[str, jex.ClosedJaxpr]) -> dict[str, Any]:
        """Parameters of an operation: usual ones, those that are its regions, and those that are written."""
        types = [t for _, t in op.outputs]
        usual = parameters.usual(op.name, types[0].shape, types[0].dtype) if types else {}
        inner = {name: _inner_jaxpr(b) for name, b in op.jaxprs.items()}
        jaxprs = {name: j if name.startswith("jaxpr") else j.jaxpr for name, j in inner.items()}
        combiner = {"update_jaxpr": _combiner(op)} if op.name.startswith("scatter") else {}
        try:
            written = parameters.read(op.params, jaxprs)
        except parameters.UnreadableError as error:
            raise GraphTextError(f"line {op.line}: {op.name}: {error}") from None
        defaults = {**usual, **combiner, **_region_params(op, regions)}
        return written | {name: value for name, value in defaults.items() if name not in written}

    def signature(self, op: OpText, params: Mapping[str, Any]) -> tuple[int, jex.JaxprEqn]:
        """Equal for operations with equal primitive, parameters, regions and operand types."""
        types = tuple(self.types[a] if isinstance(a, int) else a.type for a in op.inputs)
        literal = tuple(not isinstance(a, int) for a in op.inputs)
        blocks = tuple((name, _key(b)) for name, b in op.blocks.items())
        values: Any = (op.params, op.trips) if blocks else tuple(sorted(params.items(), key=lambda item: item[0]))
        try:
            hash(values)
        except TypeError:
            values = str(params)
        key = op.name, values, types, literal, blocks
        if key not in self.signatures:
            self.signatures[key] = len(self.signatures), _equation(op, types, params)
        signature, equation = self.signatures[key]
        _check_results(op, equation)
        return signature, equation


def _inner_jaxpr(body: BodyText) -> jex.ClosedJaxpr:
    """A jaxpr that is a parameter; its values are numbered apart from those of the program."""
    builder = _Builder()
    return builder.jaxpr(builder.region(body, frozenset()))


def _check_defined(atoms: Sequence[Atom], defined: Set[int], line: int) -> None:
    for atom in atoms:
        if isinstance(atom, int) and atom not in defined:
            raise GraphTextError(f"line {line}: %{atom} is not defined")


def _key(body: BodyText) -> Hashable:
    """Equal for bodies that differ in the numbers of their values alone."""
    numbers: dict[int, int] = {}

    def atom(a: Atom) -> Hashable:
        return numbers.get(a, -1 - a) if isinstance(a, int) else (str(a), a.type)

    def define(values: Sequence[tuple[int, Type]]) -> Hashable:
        numbers.update((v, len(numbers) + i) for i, (v, _) in enumerate(values))
        return tuple(t for _, t in values)

    def op(o: OpText) -> Hashable:
        blocks = tuple((name, _key(b)) for name, b in o.blocks.items())
        return (o.name, o.params, tuple(map(atom, o.inputs)), define(o.outputs), o.trips, blocks)

    constants = tuple(a.tobytes() for _, _, a in body.constants)
    inputs = define(body.inputs), define([(v, t) for v, t, _ in body.constants])
    return inputs, constants, tuple(map(op, body.ops)), tuple(map(atom, body.outputs))


def _region_params(op: OpText, regions: Mapping[str, jex.ClosedJaxpr]) -> dict[str, Any]:
    """The parameters of a loop, branch or rematerialised body that are its regions."""
    if op.name in jax_compat.REMAT and "body" in regions:
        return {"jaxpr": regions["body"].jaxpr}
    if op.name == "scan" and "body" in regions:
        return {"jaxpr": regions["body"], "length": op.trips}
    if op.name == "while" and {"cond", "body"} <= regions.keys():
        return {"cond_jaxpr": regions["cond"], "body_jaxpr": regions["body"]}
    if op.name == "cond" and regions:
        return {"branches": tuple(regions.values())}
    if regions:
        raise GraphTextError(f"line {op.line}: {op.name} has no regions {', '.join(regions)}")
    return {}


def _combiner(op: OpText) -> Any:
    """The jaxpr with which a scatter combines updates, from its name."""
    name = printer.COMBINERS.get(op.name)
    return _scalar_jaxpr(name, op.outputs[0][1].dtype) if name and op.outputs else None


@lru_cache(maxsize=64)  # JAX too has one such jaxpr in a program, so that equal scatters are equal
def _scalar_jaxpr(primitive: str, dtype: str) -> jex.Jaxpr:
    element = _aval(Type((), dtype, 0))
    bind = partial(jax_compat.primitive(primitive).bind, **parameters.usual(primitive, (), dtype))
    return jax.make_jaxpr(bind)(element, element).jaxpr


def _equation(op: OpText, operands: Sequence[Type], params: Mapping[str, Any]) -> jex.JaxprEqn:
    """What JAX records for an operation on operands of these types."""
    try:
        primitive = jax_compat.primitive(op.name)
    except KeyError:
        raise GraphTextError(f"line {op.line}: no operation of JAX is called '{op.name}'") from None
    try:
        record = jax.make_jaxpr(lambda *xs: primitive.bind(*xs, **jax_compat.with_flat_trees(params)))
        equations = record(*map(_aval, operands)).jaxpr.eqns
        if not equations:  # a conversion to the same type, which JAX records for weak types only
            equations = record(*(_aval(t, weak=True) for t in operands)).jaxpr.eqns
        (equation,) = equations
    except (TypeError, ValueError, AssertionError, IndexError, KeyError) as error:
        message = str(error).partition("\n")[0] or type(error).__name__
        raise GraphTextError(f"line {op.line}: {op.name} does not fit its operands: {message}") from error
    return jax_compat.without_source(equation)


def _check_results(op: OpText, equation: jex.JaxprEqn) -> None:
    types = [type_of_aval(v.aval) for v in equation.outvars]
    written = [t for _, t in op.outputs]
    if types != written:
        inferred, wanted = (", ".join(map(str, ts)) or "nothing" for ts in (types, written))
        raise GraphTextError(f"line {op.line}: {op.name} gives {inferred}, not {wanted}")


def _aval(type_: Type, weak: bool = False) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(type_.shape, parameters.dtype_of(type_.dtype), weak_type=weak)
