"""From a jaxpr to a Graph.

    calls (jit, custom_jvp_call, ...)       inlined with new values: one jaxpr may be called often          -> _inline
    operations for differentiation only     no operation: the result is the operand                    -> SAME_VALUES
    scan, while, cond, rematerialisation    operations with regions                                        -> _regions
    anything else                           one operation; an unknown higher-order primitive keeps its body opaque

Phases come from JAX's name stacks: `transpose(` is the backward pass, `jvp(` the forward pass under differentiation. An
operation with neither is forward if a differentiated operation follows it, and update otherwise (`_assign_phases`). An
operation inside a library's function has the source line of the call in the user's own code (`_source`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from autopar import jax_compat
from autopar.errors import TraceError
from autopar.ir.graph import Atom, Constant, Graph, Op, Phase, Region, Type, phase_of
from autopar.ir.jaxpr.kernel_work import with_estimate

#: Primitives whose results are their operands once a program is differentiated. As operations they would give one value
#: two names, and the value would be moved twice. `device_put` is one where it names no sharding: a compiled program has
#: its values where its shardings say. In the body of a `shard_map`, "pvary" changes types alone.
SAME_VALUES = ("stop_gradient", "device_put", "pvary")


@dataclass
class _Builder:
    """State of one construction; local to `build_graph`."""

    types: list[Type] = field(default_factory=list)
    signatures: dict[Any, int] = field(default_factory=dict)
    types_of_avals: dict[Any, Type] = field(default_factory=dict)
    constants: list[tuple[int, Any]] = field(default_factory=list)
    arrays: dict[Atom, Any] = field(default_factory=dict)
    estimates: dict[Any, jex.JaxprEqn] = field(default_factory=dict)
    count: int = 0

    def type_of(self, aval: Any) -> Type:
        key = (aval.shape, aval.dtype) if hasattr(aval, "dtype") else str(aval)
        type_ = self.types_of_avals.get(key)
        if type_ is None:
            type_ = self.types_of_avals[key] = type_of_aval(aval)
        return type_

    def value(self, aval: Any) -> int:
        self.types.append(self.type_of(aval))
        return len(self.types) - 1

    def estimated(self, equation: jex.JaxprEqn, operands: Sequence[Atom]) -> jex.JaxprEqn:
        """The call of a kernel with its FLOPs, which equal calls with the same constants share."""
        arrays = [self.arrays.get(a) for a in operands]
        key = (self.signature(equation, operands), *map(id, arrays))
        first = self.estimates.get(key)
        if first is None:
            first = self.estimates[key] = with_estimate(equation, arrays)
        return equation.replace(params={**equation.params, "cost_estimate": first.params["cost_estimate"]})

    def signature(self, equation: jex.JaxprEqn, operands: Sequence[Atom]) -> int:
        types = tuple((self.types[a] if isinstance(a, int) else a.type) for a in operands)
        literal = tuple(not isinstance(a, int) for a in operands)
        params = tuple(equation.params.items())
        key = (equation.primitive.name, params, types, literal)
        try:
            hash(key)
        except TypeError:
            key = (equation.primitive.name, str(equation.params), types, literal)
        return self.signatures.setdefault(key, len(self.signatures))


def type_of_aval(aval: Any) -> Type:
    """Type of a JAX abstract value; tokens and other non-arrays become rank-0 values of no bytes."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return Type((), str(aval), 0)
    extended = jax.numpy.issubdtype(dtype, jax.dtypes.extended)
    itemsize = 8 if extended else np.dtype(dtype).itemsize
    return Type(tuple(aval.shape), str(dtype), itemsize)


def build_graph(jaxpr: jex.ClosedJaxpr, input_paths: Sequence[str], output_paths: Sequence[str]) -> Graph:
    """The graph of a closed jaxpr; see the module's text."""
    return build_programs(jaxpr, input_paths, output_paths)[0]


def build_programs(
    jaxpr: jex.ClosedJaxpr, input_paths: Sequence[str], output_paths: Sequence[str]
) -> tuple[Graph, Mapping[str, range]]:
    """The graph of a closed jaxpr, and for each named function that it calls the indices of that function's
    operations.
    """
    b = _Builder()
    inputs = tuple(b.value(v.aval) for v in jaxpr.jaxpr.invars)
    env: dict[Any, Atom] = dict(zip(jaxpr.jaxpr.invars, inputs, strict=True))
    constants = _constants(b, jaxpr, env)
    pending_ops: list[_PendingOp] = []
    programs: dict[str, range] = {}
    for equation in jaxpr.jaxpr.eqns:
        first = b.count
        _emit(b, (equation,), env, pending_ops, None, ())
        if jax_compat.callee(equation) is not None:
            programs[equation.params.get("name", equation.primitive.name)] = range(first, b.count)
    outputs = tuple(_read(b, env, v) for v in jaxpr.jaxpr.outvars)
    graph = Graph(
        tuple(b.types),
        inputs,
        tuple(input_paths),
        outputs,
        tuple(output_paths),
        (*constants, *b.constants),
        _assign_phases(pending_ops),
        jax_compat.effect_names(jaxpr),
    )
    return graph, programs


def _constants(b: _Builder, jaxpr: jex.ClosedJaxpr, env: dict[Any, Atom]) -> tuple[tuple[int, Any], ...]:
    constants: list[tuple[int, Any]] = []
    for var, array in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
        value = b.value(var.aval)
        env[var] = value
        b.arrays[value] = array
        constants.append((value, array))
    return tuple(constants)


def _read(b: _Builder, env: dict[Any, Atom], atom: Any) -> Atom:
    if isinstance(atom, jex.Literal):
        return Constant(atom.val, b.type_of(atom.aval))
    return env[atom]


#: Source information of the calls and loops around an operation, outermost first.
_Callers = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _PendingOp:
    """An operation before its phase is known, which depends on the whole program."""

    index: int
    equation: jex.JaxprEqn
    operands: tuple[Atom, ...]
    outputs: tuple[int, ...]
    stack: Any
    signature: int
    phase_mark: Phase | None
    regions: tuple[
        tuple[str, tuple[int, ...], tuple[_PendingOp, ...], tuple[Atom, ...], tuple[tuple[int, Any], ...]], ...
    ]
    trips: int | None
    callers: _Callers


def _emit(
    b: _Builder,
    equations: Sequence[jex.JaxprEqn],
    env: dict[Any, Atom],
    pending_ops: list[_PendingOp],
    outer: Any,
    callers: _Callers,
) -> None:
    for equation in equations:
        operands = tuple([_read(b, env, v) for v in equation.invars])
        stack = equation.source_info.name_stack
        stack = stack if outer is None else outer + stack
        inner = jax_compat.callee(equation)
        if inner is not None:
            _inline(b, equation, inner, operands, env, pending_ops, stack, callers)
        elif equation.primitive.name in SAME_VALUES and not jax_compat.puts_into_sharding(equation):
            env.update(zip(equation.outvars, operands, strict=True))
        else:
            pending_ops.append(_pending_op(b, equation, operands, env, stack, callers))


def _inline(
    b: _Builder,
    equation: jex.JaxprEqn,
    inner: jex.ClosedJaxpr,
    operands: tuple[Atom, ...],
    env: dict[Any, Atom],
    pending_ops: list[_PendingOp],
    stack: Any,
    callers: _Callers,
) -> None:
    local: dict[Any, Atom] = dict(zip(inner.jaxpr.invars, operands, strict=True))
    # Closed-over arrays of inner calls become constants of the graph or region that the call is in.
    b.constants.extend(_constants(b, inner, local))
    _emit(b, inner.jaxpr.eqns, local, pending_ops, stack, (*callers, equation.source_info))
    for var, result in zip(equation.outvars, inner.jaxpr.outvars, strict=True):
        env[var] = _read(b, local, result)


def _pending_op(
    b: _Builder,
    equation: jex.JaxprEqn,
    operands: tuple[Atom, ...],
    env: dict[Any, Atom],
    stack: Any,
    callers: _Callers,
) -> _PendingOp:
    index = b.count
    b.count += 1
    if equation.primitive.name == "pallas_call":
        equation = b.estimated(equation, operands)
    regions, trips = _regions(b, equation, operands, stack, (*callers, equation.source_info))
    outputs = tuple([b.value(v.aval) for v in equation.outvars])
    env.update(zip(equation.outvars, outputs, strict=True))
    signature = b.signature(equation, operands)
    pending = _PendingOp(index, equation, operands, outputs, stack, signature, phase_of(stack), regions, trips, callers)
    if any(jax_compat.is_reference(v.aval) for v in equation.outvars):
        raise TraceError(
            f"a mutable array is made{_at(_source(pending))} ({equation.primitive.name}), and an operation takes it "
            "for which JAX has no rule. Use x.at[...].set(...), or carry the value through the function."
        )
    return pending


def _at(source: str) -> str:
    return f" at {source}" if source else ""


def _regions(
    b: _Builder, equation: jex.JaxprEqn, operands: Sequence[Atom], stack: Any, callers: _Callers
) -> tuple[tuple[Any, ...], int | None]:
    """The bodies of a higher-order equation that autopar understands, and how often they run."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        constants = operands[: jax_compat.scan_counts(params)[0]]
        return (_region(b, "body", params["jaxpr"], stack, callers, constants),), params["length"]
    if name == "while":
        return tuple(_region(b, part, params[f"{part}_jaxpr"], stack, callers) for part in ("cond", "body")), None
    if name == "cond":
        return tuple(_region(b, f"branch{i}", branch, stack, callers) for i, branch in enumerate(params["branches"])), 1
    if name == jax_compat.REMAT:
        return (_region(b, "body", jax_compat.close(params["jaxpr"]), stack, callers, operands),), 1
    return (), 1


def _region(
    b: _Builder, name: str, jaxpr: jex.ClosedJaxpr, stack: Any, callers: _Callers, operands: Sequence[Atom] = ()
) -> Any:
    """A body; `operands`: what its first inputs are, the same whenever it runs."""
    inputs = tuple(b.value(v.aval) for v in jaxpr.jaxpr.invars)
    b.arrays.update({v: b.arrays[a] for v, a in zip(inputs, operands, strict=False) if a in b.arrays})
    env: dict[Any, Atom] = dict(zip(jaxpr.jaxpr.invars, inputs, strict=True))
    constants = _constants(b, jaxpr, env)
    pending_ops: list[_PendingOp] = []
    around, b.constants = b.constants, []
    _emit(b, jaxpr.jaxpr.eqns, env, pending_ops, stack, callers)
    constants, b.constants = (*constants, *b.constants), around
    return name, inputs, tuple(pending_ops), tuple(_read(b, env, v) for v in jaxpr.jaxpr.outvars), constants


def _assign_phases(pending_ops: Sequence[_PendingOp]) -> tuple[Op, ...]:
    """Operations with their phases: those after the last differentiated operation are the update."""
    last = max((i for i, r in enumerate(pending_ops) if r.phase_mark is not None), default=len(pending_ops))
    return tuple([_op(r, r.phase_mark or ("forward" if i <= last else "update")) for i, r in enumerate(pending_ops)])


def _op(pending: _PendingOp, phase: Phase) -> Op:
    return Op(
        index=pending.index,
        name=pending.equation.primitive.name,
        signature=pending.signature,
        inputs=pending.operands,
        outputs=pending.outputs,
        equation=pending.equation,
        name_stack=pending.stack,
        phase=phase,
        source=_source(pending),
        regions=tuple(_finished_regions(pending, phase)),
        trips=pending.trips,
    )


def _finished_regions(pending: _PendingOp, phase: Phase) -> Iterator[Region]:
    """The regions of an operation; operations in them have its phase unless marked."""
    for name, inputs, pending_ops, outputs, constants in pending.regions:
        yield Region(name, inputs, tuple(_op(r, r.phase_mark or phase) for r in pending_ops), outputs, constants)


def _source(pending: _PendingOp) -> str:
    """The user's line; inside a library's function that of the innermost call in the user's own code, if it has one."""
    library = ""
    for source_info in (pending.equation.source_info, *reversed(pending.callers)):
        file, line = jax_compat.user_frame(source_info)
        name = f"{os.path.basename(file)}:{line}" if file else ""
        if name and jax_compat.is_own(file):
            return name
        library = library or name
    return library
