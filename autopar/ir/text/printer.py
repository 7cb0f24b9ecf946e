"""The printed form of a graph, one operation a line; `autopar.ir.text.parser` has the grammar and reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.extend.core as jex
import numpy as np

from autopar import jax_compat
from autopar.ir.text import parameters

if TYPE_CHECKING:
    from autopar.ir.graph import Atom, Graph, Op, Region, Type

#: Columns after which each argument of a graph or body has a line of its own.
WIDTH = 120
#: Largest array, in elements, that is written out.
MAX_ELEMENTS = 64
#: Parameters that are written as regions or trip counts.
WRITTEN_ELSEWHERE = frozenset({"jaxpr", "cond_jaxpr", "body_jaxpr", "branches", "length"})
#: Scatters -> the operation with which each combines updates; a jaxpr that is only this is not written.
COMBINERS = {"scatter-add": "add", "scatter-max": "max", "scatter-min": "min", "scatter-mul": "mul"}


def graph_lines(graph: Graph) -> Iterator[str]:
    """The printed form, line by line."""
    arguments = [f'%{v}: {graph.types[v]} "{p}"' for v, p in zip(graph.inputs, graph.input_paths, strict=True)]
    yield from _head("graph", arguments, "")
    results = [f'{_atom(a)} "{p}"' for a, p in zip(graph.outputs, graph.output_paths, strict=True)]
    yield from _body(graph.types, graph.constants, graph.ops, results, "  ")
    yield "}"


def _head(name: str, arguments: Sequence[str], indent: str) -> Iterator[str]:
    line = f"{indent}{name}({', '.join(arguments)}) {{"
    if len(line) <= WIDTH:
        yield line
        return
    yield f"{indent}{name}("
    yield from (f"{indent}    {a}{',' if i + 1 < len(arguments) else ''}" for i, a in enumerate(arguments))
    yield f"{indent}) {{"


def _body(
    types: Sequence[Type], constants: Sequence[tuple[int, Any]], ops: Sequence[Op], results: Sequence[str], indent: str
) -> Iterator[str]:
    for value, array in constants:
        yield f"{indent}%{value}: {types[value]} = constant {_array(array)}"
    for op in ops:
        yield from _op(types, op, indent)
    yield f"{indent}return {', '.join(results)}".rstrip()


def _op(types: Sequence[Type], op: Op, indent: str) -> Iterator[str]:
    results = ", ".join(f"%{v}: {types[v]}" for v in op.outputs)
    blocks: list[tuple[str, jex.ClosedJaxpr]] = []
    usual = parameters.usual(op.name, *_shape_and_dtype([types[v] for v in op.outputs]))
    params = parameter_list(op.name, op.params, usual, bool(op.regions), blocks)
    trips = "" if not op.regions or op.trips == 1 else f" x{'?' if op.trips is None else op.trips}"
    call = f"{op.name}{params}({', '.join(map(_atom, op.inputs))}){trips}"
    yield f"{indent}{results}{' = ' if results else ''}{call}  # {_origin(op)}"
    for region in op.regions:
        yield from _region(types, region, indent + "  ")
    for name, jaxpr in blocks:
        yield from jaxpr_lines(name, jaxpr, indent + "  ")


def _region(types: Sequence[Type], region: Region, indent: str) -> Iterator[str]:
    yield from _head(region.name, [f"%{v}: {types[v]}" for v in region.inputs], indent)
    yield from _body(types, region.constants, region.ops, list(map(_atom, region.outputs)), indent + "  ")
    yield f"{indent}}}"


def _origin(op: Op) -> str:
    """Phase, source line and scopes of an operation."""
    scopes = str(op.name_stack)
    return f"{op.phase}{' ' if op.source else ''}{op.source}{' in ' if scopes else ''}{scopes}"


def _atom(atom: Atom) -> str:
    return f"%{atom}" if isinstance(atom, int) else literal(atom.value, str(atom.type))


def literal(value: Any, type_: str) -> str:
    """A literal operand, such as 2.0:f32[]."""
    return f"{_array(value)}:{type_}"


def _array(value: Any) -> str:
    """The value that all elements share, or the elements as nested lists."""
    try:
        array = np.asarray(value)
    except TypeError:
        return f"opaque({type(value).__name__!r})"
    if array.size > 1 and (array == array.flat[0]).all():
        return f"full({array.flat[0]})"
    return _elements(array) if array.size <= MAX_ELEMENTS else f"opaque('{array.size} elements')"


def _elements(array: Any) -> str:
    return f"[{', '.join(map(_elements, array))}]" if np.ndim(array) else str(array[()])


def _shape_and_dtype(types: Sequence[Any]) -> tuple[tuple[int, ...], str]:
    """Of the first of these types; (), "" if it is no array."""
    return (types[0].shape, str(types[0].dtype)) if types and hasattr(types[0], "dtype") else ((), "")


def parameter_list(
    name: str,
    params: Mapping[str, Any],
    usual: Mapping[str, Any],
    has_regions: bool,
    blocks: list[tuple[str, jex.ClosedJaxpr]],
) -> str:
    """Parameters between brackets, "" if none is written; appends the jaxprs among them to `blocks`."""

    def name_of(jaxpr: Any) -> str:
        kind = "jaxpr" if isinstance(jaxpr, jex.ClosedJaxpr) else "open"
        blocks.append((f"{kind}{len(blocks)}", jax_compat.close(jaxpr)))
        return blocks[-1][0]

    written = [
        f"{key}={parameters.write(value, name_of)}"
        for key, value in jax_compat.without_flat_trees(params).items()
        if not (has_regions and key in WRITTEN_ELSEWHERE)
        and not (key in usual and type(value) is type(usual[key]) and value == usual[key])
        and not (key == "update_jaxpr" and combines_as_named(name, value))
    ]
    return f"[{', '.join(written)}]" if written else ""


def combines_as_named(name: str, jaxpr: Any) -> bool:
    """Whether the jaxpr of a scatter is the operation that its name says, or None as the name says."""
    if name not in COMBINERS or jaxpr is None:
        return name == "scatter" and jaxpr is None
    names = [e.primitive.name for e in jaxpr.eqns]
    return names == [COMBINERS[name]] and list(jaxpr.eqns[0].invars) == list(jaxpr.invars)


def jaxpr_lines(name: str, closed: jex.ClosedJaxpr, indent: str) -> Iterator[str]:
    """A jaxpr that is a parameter, printed as a region with values numbered from 0; its calls are operations."""
    numbers: dict[Any, int] = {}

    def define(variable: Any) -> str:
        numbers[variable] = len(numbers)
        return f"%{numbers[variable]}: {type_text(variable.aval)}"

    def atom(x: Any) -> str:
        return literal(x.val, type_text(x.aval)) if isinstance(x, jex.Literal) else f"%{numbers[x]}"

    yield from _head(name, list(map(define, closed.jaxpr.invars)), indent)
    for variable, array in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        yield f"{indent}  {define(variable)} = constant {_array(array)}"
    for e in closed.jaxpr.eqns:
        blocks: list[tuple[str, jex.ClosedJaxpr]] = []
        usual = parameters.usual(e.primitive.name, *_shape_and_dtype([v.aval for v in e.outvars]))
        call = f"{e.primitive.name}{parameter_list(e.primitive.name, e.params, usual, False, blocks)}"
        operands = ", ".join(map(atom, e.invars))
        yield f"{indent}  {', '.join(map(define, e.outvars))} = {call}({operands})"
        for inner, block in blocks:
            yield from jaxpr_lines(inner, block, indent + "    ")
    yield f"{indent}  return {', '.join(map(atom, closed.jaxpr.outvars))}".rstrip()
    yield f"{indent}}}"


def type_text(aval: Any) -> str:
    """A JAX type as `autopar.ir.graph.Type` prints it."""
    dtype = getattr(aval, "dtype", None)
    return f"{aval}[]" if dtype is None else f"{short_dtype(str(dtype))}[{','.join(map(str, aval.shape))}]"


#: Beginnings of dtype names and what they are in the printed form; the first that fits counts.
_SHORT = (("float", "f"), ("bfloat", "bf"), ("uint", "u"), ("int", "i"), ("complex", "c"))


def short_dtype(name: str) -> str:
    """The dtype in the printed form: f32, bf16, u8, bool, key<fry>."""
    return next((short + name[len(long) :] for long, short in _SHORT if name.startswith(long)), name)


def long_dtype(name: str) -> str:
    """The dtype that `short_dtype` printed."""
    for long, short in _SHORT:
        if name.startswith(short) and name[len(short) : len(short) + 1].isdigit():
            return long + name[len(short) :]
    return name
