"""The steps of a program, in the order in which they are written, and its loops.

    calls, rematerialised bodies   inlined; a recomputation waits for the gradient that needs it          -> _inline
    barriers                       other names for their operands; readers wait for all of them               -> _hold
    loops                          a step with frames: carries are updated in place, stacked operands
                                   read and stacked results written slice by slice                        -> _scan
    unrolled loops                 the steps of every iteration                                       -> _unrolled
    branches by platform           that of the backend, inlined                                           -> _branches
    reshapes and the like          another name for the same buffer                                       -> _emit

`simplifications` holds what a compiler runs instead of an operation, `operands` what it does with operands first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from autopar import jax_compat
from autopar.cost_models.compiler.backends import Backend
from autopar.cost_models.compiler.compiled_program import COMMUTATIVE, Frame, Program, Step, values
from autopar.cost_models.compiler.fusion import KERNEL, LIGHT, LOOP, MOST_JOINED, PRODUCT, REDUCTION, STORE
from autopar.cost_models.compiler.operands import add_normalized, broadcast_key, in_float32, multiplies, prepared
from autopar.cost_models.compiler.repeated_steps import Repetition
from autopar.cost_models.compiler.simplifications import alias_of, simplified
from autopar.ir.graph import Atom, Graph, Op, Region


def flatten(
    graph: Graph,
    backend: Backend,
    reads: Mapping[str, Hashable],
    devices: int = 1,
    views: AbstractSet[int] = frozenset(),
) -> Program:
    """The steps of a program; for the rest see `Program`."""
    program = Program(graph, backend, reads, devices, views)
    _emit(program, program.top, graph.ops, ())
    program.top.leaving = values([program.read(f"out{i}", atom) for i, atom in enumerate(graph.outputs)])
    _drop_unread(program)
    return program


def _drop_unread(p: Program) -> None:
    """Leave out what unrolled loops join if nothing reads it but parts of it."""
    frames = [*p.top.walk()] if p.parts else []
    read = {p.behind(v) for frame in frames for v in frame.leaving}
    read.update(p.behind(v) for frame in frames for step in frame.steps for v in step.inputs)
    for frame in frames:
        frame.steps = [s for s in frame.steps if not s.outputs or s.outputs[0] not in p.parts or s.outputs[0] in read]


def _emit(p: Program, frame: Frame, ops: Sequence[Op], after: tuple[int, ...]) -> None:
    for op in ops:
        barriers = _barriers(p, op) if p.barriers else ()
        waits = (*after, *(v for i in barriers for v in p.barriers[i])) if barriers else after
        if op.regions:
            _REGIONS.get(op.name, _branches)(p, frame, op, waits)
            continue
        if (shown := alias_of(p, op)) is not None:
            p.alias[op.outputs[0]] = p.operands(op)[op.inputs.index(shown)]
        elif op.name == "optimization_barrier":
            barriers = _hold(p, op)
        elif (
            not p.fused_scatters.isdisjoint(op.outputs)
            or _merged(p, frame, op, (after, barriers))
            or _repeated(p, frame, op)
        ):
            continue
        elif (add_steps := simplified(p, op)) is not None:
            add_steps(p, frame, op, waits)
            barriers = ()
        else:
            inputs, kind = values(prepared(p, frame, op, p.operands(op))), p.backend.fusion.kind(op)
            if kind in (PRODUCT, REDUCTION):
                add_normalized(p, frame, Step(op, op.name, kind, inputs, op.outputs, waits))
            else:
                frame.steps.append(Step(op, op.name, kind, inputs, op.outputs, waits))
            barriers = barriers if kind == LIGHT else ()
            p.cheap.update(op.outputs if p.backend.fusion.is_cheap(op.name) or multiplies(p, op) else ())
        if barriers:
            p.behind_barriers.update(dict.fromkeys(op.outputs, barriers))


def _merged(p: Program, frame: Frame, op: Op, behind: Hashable) -> bool:
    """True for a broadcast that was made before, behind the same, whose result becomes another name for that one.

    What a scatter changes is made for it.
    """
    if op.name != "broadcast_in_dim" or not p.backend.merges_broadcasts or op.outputs[0] in p.scattered_into:
        return False
    key = broadcast_key(p, op.inputs[0], op.params["broadcast_dimensions"], p.graph.types[op.outputs[0]], behind)
    first_output = frame.shared.setdefault(key, op.outputs[0])
    if first_output != op.outputs[0]:
        p.alias[op.outputs[0]] = first_output
    return first_output != op.outputs[0]


def _repeated(p: Program, frame: Frame, op: Op) -> bool:
    """True for an operation that was done before on the same operands, whose results become other names for those.

    (openxla/xla, xla/service/hlo_cse.cc.)
    """
    if not p.backend.merges_duplicates or op.equation.effects or op.name == "broadcast_in_dim":
        return False
    operands = [p.identity(atom) for atom in op.inputs]
    key = (op.signature, *(sorted(operands, key=str) if op.name in COMMUTATIVE else operands))
    first_outputs = frame.done.setdefault(key, op.outputs)
    if first_outputs != op.outputs:
        p.alias.update(zip(op.outputs, first_outputs, strict=True))
    return first_outputs != op.outputs


def _barriers(p: Program, op: Op) -> tuple[int, ...]:
    """The barriers that an operation reads from behind."""
    nearest = [p.behind_barriers[a] for a in op.inputs if isinstance(a, int) and a in p.behind_barriers]
    return tuple(dict.fromkeys([i for barriers in nearest for i in barriers])) if nearest else ()


def _hold(p: Program, op: Op) -> tuple[int, ...]:
    """A barrier gives what it holds other names; where the compiler keeps it, all of it is there before any is read."""
    operands = p.operands(op)
    p.alias.update(zip(op.outputs, operands, strict=True))
    if not p.backend.keeps_barriers:
        return ()
    p.fenced.update(op.outputs)
    p.barriers.append(values(operands))
    return (len(p.barriers) - 1,)


# Regions


def _inline(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    operands = p.operands(op)
    again = op.params.get("differentiated") and p.backend.keeps_barriers
    waited = values(operands) if again else ()
    p.fenced.update(op.regions[0].inputs if again else ())
    _inline_region(p, frame, op, op.regions[0], operands, (*after, *waited))


def _inline_region(
    p: Program, frame: Frame, op: Op, region: Region, operands: Sequence[Atom], after: tuple[int, ...]
) -> None:
    """Add the steps of one body in place of the operation that has it."""
    p.alias.update(zip(region.inputs, operands, strict=True))
    _emit(p, frame, region.ops, after)
    p.alias.update(zip(op.outputs, p.results(op, region), strict=True))


def _body(p: Program, region: Region) -> Frame:
    frame = Frame()
    _emit(p, frame, region.ops, ())
    return frame


def _is_unrolled(op: Op) -> bool:
    """Whether no loop is left of a scan: JAX writes all of its iterations, or there is one alone."""
    return 0 < op.params["length"] <= max(1, op.params["unroll"])


def _unrolled(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    """The steps of every iteration; what is stacked is joined at the end, and slices of such a join are its parts."""
    region, operands, length = op.regions[0], p.operands(op), op.params["length"]
    constants, carries = jax_compat.scan_counts(op.params)
    first = constants + carries
    order = range(length)[:: -1 if op.params["reverse"] else 1]
    started, stacks = region.inputs[constants:first], [*zip(region.inputs[first:], operands[first:], strict=True)]
    p.alias.update(zip(region.inputs[:constants], operands[:constants], strict=True))
    template, left = Frame(), tuple[Atom, ...]()
    p.cheap.update(v for v, atom in zip(started, region.outputs, strict=False) if _is_cheap(p, atom))
    if length > 1:  # before the first iteration, whose values have these names afterwards
        _emit(p, template, region.ops, after)
        left = p.results(op, region)
    p.alias.update(zip(started, operands[constants:first], strict=True))
    p.alias.update((v, part) for v, atom in stacks if (part := _part(p, atom, order[0])) is not None)
    frame.steps.extend(Step(op, "slice", LIGHT, values([atom]), (v,)) for v, atom in stacks if v not in p.alias)
    _emit(p, frame, region.ops, after)
    results = [p.results(op, region)]
    for i in order[1:]:
        again = Repetition(p, dict(zip(started, map(partial(_as_made, p), results[-1]), strict=False)))
        for v, atom in stacks:
            if (part := _part(p, atom, i)) is not None:
                again.known[v] = part
            else:
                frame.steps.append(Step(op, "slice", LIGHT, values([atom]), (again.define(v),)))
        frame.steps.extend(again.steps(template.steps))
        results.append(tuple(map(again.as_made, left)))
    p.alias.update(zip(op.outputs[:carries], results[-1], strict=False))
    joined = [*zip(*(results[i] for i in order), strict=True)][carries:]
    for v, parts in zip(op.outputs[carries:], joined, strict=True):
        p.parts[v] = parts
        kind = KERNEL if p.backend.fusion.writes_joins and length > MOST_JOINED else LIGHT
        frame.steps.append(Step(op, "stack", kind, values(parts), (v,), after))


def _is_cheap(p: Program, atom: Atom) -> bool:
    maker = p.graph.producers.get(atom) if isinstance(atom, int) else None
    return maker is not None and p.backend.fusion.is_cheap(maker.name)


def _part(p: Program, atom: Atom, i: int) -> Atom | None:
    """A part of what an unrolled loop stacked, as it was made; None for other arrays."""
    parts = p.parts.get(p.behind(atom)) if isinstance(atom, int) else None
    return None if parts is None else _as_made(p, parts[i])


def _as_made(p: Program, atom: Atom) -> Atom:
    """What an atom is a copy of."""
    return p.behind(atom) if isinstance(atom, int) else atom


def _scan(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    if _is_unrolled(op):
        _unrolled(p, frame, op, after)
        return
    region, operands = op.regions[0], p.operands(op)
    constants, carries = jax_compat.scan_counts(op.params)
    first = constants + carries
    p.alias.update(zip(region.inputs[:first], (*operands[:constants], *op.outputs[:carries]), strict=True))
    operands = (*operands[:first], *(_sliced(p, frame, op, atom) for atom in operands[first:]))
    body = Frame()
    for value, atom in zip(region.inputs[first:], operands[first:], strict=True):
        body.steps.append(Step(op, "slice", LIGHT, values([atom]), (value,)))
    _emit(p, body, region.ops, ())
    results = p.results(op, region)
    stored = zip(op.outputs[carries:], results[carries:], strict=True)
    p.stacked.update((out, p.behind(atom)) for out, atom in stored if isinstance(atom, int))
    body.steps.append(Step(op, "store", STORE, values(results[carries:]), ()))
    body.leaving, body.carried = values(results[:carries]), _carried(results[:carries], op.outputs)
    taken = _taken(operands[constants:first], op.outputs, (*operands[:constants], *operands[first:]))
    frame.steps.append(Step(op, op.name, LOOP, values(operands), op.outputs, after, (body,), taken))


def _sliced(p: Program, frame: Frame, op: Op, atom: Atom) -> Atom:
    """What a loop takes slices of: in bfloat16 a copy in float32, which is made before the loop."""
    if isinstance(atom, int) and p.is_half(atom) and p.type_of(atom).dtype == "bfloat16":
        return in_float32(p, frame, op, atom)
    return atom


def _while(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    condition, body = op.regions
    operands = p.operands(op)
    n_cond, n_body = op.params["cond_nconsts"], op.params["body_nconsts"]
    p.alias.update(zip(condition.inputs[:n_cond], operands[:n_cond], strict=True))
    p.alias.update(zip(body.inputs[:n_body], operands[n_cond : n_cond + n_body], strict=True))
    p.alias.update(zip(condition.inputs[n_cond:], op.outputs, strict=True))
    p.alias.update(zip(body.inputs[n_body:], op.outputs, strict=True))
    frames = (_body(p, condition), _body(p, body))
    results = p.results(op, body)
    frames[1].leaving, frames[1].carried = values(results), _carried(results, op.outputs)
    taken = _taken(operands[n_cond + n_body :], op.outputs, operands[: n_cond + n_body])
    frame.steps.append(Step(op, op.name, LOOP, values(operands), op.outputs, after, frames, taken))


def _taken(started: Sequence[Atom], results: Sequence[int], read: Sequence[Atom]) -> tuple[tuple[int, int], ...]:
    """What a loop takes over: what it starts from, unless it is read in every iteration besides."""
    besides = values(read)
    return tuple((a, v) for a, v in zip(started, results, strict=False) if isinstance(a, int) and a not in besides)


def _carried(leaving: Sequence[Atom], results: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """What leaves a body, and the result that it leaves as."""
    return tuple((a, v) for a, v in zip(leaving, results, strict=False) if isinstance(a, int) and a != v)


def _branches(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    """A conditional, or bodies of an unknown kind: each is a frame and leaves its results in the same place."""
    operands = p.operands(op)
    only = _compiled_branch(p, op)
    if only is not None:
        _inline_region(p, frame, op, only, operands[len(operands) - len(only.inputs) :], after)
        return
    frames: list[Frame] = []
    for region in op.regions:
        p.alias.update(zip(region.inputs, operands[len(operands) - len(region.inputs) :], strict=True))
        frames.append(_body(p, region))
        results = p.results(op, region)
        frames[-1].leaving, frames[-1].carried = values(results), _carried(results, op.outputs)
    frame.steps.append(Step(op, op.name, LOOP, values(operands), op.outputs, after, tuple(frames)))


def _compiled_branch(p: Program, op: Op) -> Region | None:
    """The branch of a `jax.lax.platform_dependent` for the backend; None for other operations, all of whose are."""
    platforms_of: Sequence[Sequence[str] | None] = op.params.get("branches_platforms") or ()
    for platforms, region in zip(platforms_of, op.regions, strict=False):
        if platforms is None or not {*platforms}.isdisjoint(p.backend.platforms):
            return region
    return None


_REGIONS: Mapping[str, Callable[[Program, Frame, Op, tuple[int, ...]], None]] = {
    jax_compat.REMAT: _inline,
    "scan": _scan,
    "while": _while,
}
