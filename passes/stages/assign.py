"""Which stage runs an operation of the loop over microbatches, and in which of its passes.

A step is cut between layers; stage k holds a run of them. Its forward pass F hands activations to later stages, its
backward pass B hands cotangents to earlier ones, and W adds up gradients of weights that B has put off.

    made cheaply from arguments     in every pass that reads it: broadcasts, casts, masks           -> _free
    made cheaply from something     also in every other pass that reads it: what a layer keeps for its backward pass, or
      much smaller                  hands over, is what a broadcast or a cast was made of           -> _thin
    forward                         F of the stage of its layer
    backward                        B of the latest stage that makes or reads a forward value it reads, holds a
                                    parameter it reads, or the one it is the gradient of, but no later than the
                                    cotangents it reads. Without any of these of their earliest, or, where it makes
                                    no less of them, of the latest stage that reads it
    recomputed                      B of the latest stage that reads it, so that nothing is recomputed for another;
                                    barriers likewise: what stands behind one is what stands before it
                                                                                                    -> _backward
    a sum of partial sums of        once after the loop: each stage accumulates its own, as with tied weights
      different stages                                                                              -> _deferred
    W, if asked for                 what makes partial sums that no pass B reads (Qi et al., 2023, "Zero bubble
                                    pipeline parallelism", section 2), and what only that reads     -> _weights

A backward operation at the latest residual is Alpa's rule (Zheng et al., 2022, section 5.2). Parameters count as well:
the first and the last operations of a layer's backward pass may read nothing else that the layer made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar import jax_compat
from autopar.errors import GraphError
from autopar.ir.graph import Op
from autopar.ir.op_sets import PRODUCTS
from autopar.passes.layers.find import BARRIER, Layers, gradients
from autopar.passes.microbatch.analysis import Microbatches
from autopar.passes.microbatch.programs import Placed, Total
from autopar.passes.microbatch.states import Partial
from autopar.schedules.instructions import Kind

Place = tuple[int, Kind]
"""(stage, pass)."""

Roots = Mapping[int, frozenset[int]]
"""Whole value -> the arguments that it is computed from."""

#: Operations that are not repeated where their results are read, however little they read.
KEPT = (*PRODUCTS, "random_bits", "threefry2x32", "sort", "scatter-add", "scatter", "gather", "cumsum", "pallas_call")


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """The operations of a loop, by pass.

    Attributes:
        places: index of an operation -> where it runs; free ones are not in it.
        made: value -> where it is made; free ones are not in it.
        free: value -> the operation that every reader repeats.
        thin: value -> the operation that every pass repeats which reads it, and the pass in `places` runs.
        deferred: sums over stages, to be done after the loop, in order.
        totals: what the loop hands out.
    """

    places: Mapping[int, Place]
    made: Mapping[int, Place]
    free: Mapping[int, Placed]
    thin: Mapping[int, Placed]
    deferred: tuple[Placed, ...]
    totals: tuple[Total, ...]


def assign(split: Microbatches, layers: Layers, first: Sequence[int], *, weights: bool = False) -> Passes:
    """Where every operation of the loop runs.

    Args:
        split: the step in microbatches, in one loop.
        layers: its layers.
        first: the first layer of every stage; the first of them is 0.
        weights: gradients of weights have a pass of their own.

    Raises:
        GraphError: an earlier stage would need in its forward pass what a later one makes.
    """
    roots = leaves_of(split)
    free = _free(split, roots)
    loop = [p for p in split.loop if not p.op.outputs or p.op.outputs[0] not in free]
    ahead, back = _by_phase(split, loop)
    stages = _forward(split, layers, first, ahead)
    owner = _owners(split, ahead, free, stages, roots)
    stages.update(_backward(split, back, stages, {**roots, **_behind_free(free, roots)}, owner, len(first) - 1))
    deferred, totals = _deferred(loop, stages, split.totals)
    gone = {p.op.index for p in deferred}
    back = [p for p in back if p.op.index not in gone]
    put_off = _put_off(split, back, stages, {t.value for t in totals}) if weights else frozenset[int]()
    places: dict[int, Place] = {p.op.index: (stages[p.op.index], "F") for p in ahead}
    places.update((p.op.index, (stages[p.op.index], "W" if p.op.index in put_off else "B")) for p in back)
    made = {v: places[p.op.index] for p in loop if p.op.index not in gone for v in p.op.outputs}
    return Passes(places, made, free, _thin(split, ahead), deferred, totals)


def handed(split: Microbatches, layers: Layers) -> tuple[frozenset[int], ...]:
    """Per border between layers, the values that stages on its two sides hand over: none that readers make anew."""
    free = _free(split, leaves_of(split))
    ahead, _ = _by_phase(split, [p for p in split.loop if not p.op.outputs or p.op.outputs[0] not in free])
    thin = _thin(split, ahead)

    def sources(value: int) -> frozenset[int]:
        if value in free or value in split.batch:
            return frozenset()
        return frozenset([value]) if value not in thin else frozenset().union(*map(sources, local(thin[value])))

    return tuple(frozenset[int]().union(*map(sources, values)) for values in layers.crossing)


def local(placed: Placed) -> list[int]:
    """Values of the microbatch that an operation reads."""
    return [a for i, a in enumerate(placed.op.inputs) if isinstance(a, int) and i not in placed.outer]


def values(placed: Placed) -> list[int]:
    """All values that an operation reads."""
    return [a for a in placed.op.inputs if isinstance(a, int)]


def whole(placed: Placed) -> list[int]:
    """Whole values that an operation reads."""
    return [a for i, a in enumerate(placed.op.inputs) if isinstance(a, int) and i in placed.outer]


# What every reader repeats


def held(split: Microbatches) -> frozenset[int]:
    """Arguments that stages hold between steps: all but the batch."""
    return frozenset(v for v in split.graph.inputs if v not in split.batch)


def leaves_of(split: Microbatches) -> Roots:
    """Whole value known before the loop -> the arguments that it is computed from."""
    found = {v: frozenset([v]) for v in split.graph.inputs}
    found.update((v, frozenset[int]()) for v, _ in split.flat.constants)
    for placed in split.prologue:
        roots = frozenset[int]().union(*(found[a] for a in placed.op.inputs if isinstance(a, int)))
        found.update(dict.fromkeys(placed.op.outputs, roots))
    return found


def _free(split: Microbatches, roots: Roots) -> Mapping[int, Placed]:
    """Values made cheaply from parameters alone, or from the batch alone, and how."""
    kept = held(split)
    local_roots = {v: frozenset([v]) for v in split.batch}
    free: dict[int, Placed] = {}
    for placed in split.loop:
        op = placed.op
        if op.name in KEPT or op.regions or op.equation.effects or any(a not in local_roots for a in local(placed)):
            continue
        read = frozenset[int]().union(*(roots[a] for a in whole(placed)), *(local_roots[a] for a in local(placed)))
        if read <= kept or not read & kept:
            local_roots.update(dict.fromkeys(op.outputs, read))
            free.update(dict.fromkeys(op.outputs, placed))
    return free


def _behind_free(free: Mapping[int, Placed], roots: Roots) -> Roots:
    """Values that every reader repeats -> the arguments that they are made of."""
    found: dict[int, frozenset[int]] = {}
    for v, placed in free.items():
        read = (found.get(a) or roots.get(a, frozenset[int]()) for a in values(placed))
        found[v] = frozenset[int]().union(*read)
    return found


def _thin(split: Microbatches, ahead: Sequence[Placed]) -> Mapping[int, Placed]:
    """Values made in the forward pass, without products, from values of at most half their bytes; and how."""
    nbytes = [type_.nbytes for type_ in split.graph.types]
    made_of: dict[int, frozenset[int]] = {}
    thin: dict[int, Placed] = {}
    for placed in ahead:
        op = placed.op
        sources = frozenset[int]().union(*(made_of.get(a, frozenset([a])) for a in local(placed)))
        cheap = op.name not in KEPT and not op.regions and not op.equation.effects and len(op.outputs) == 1
        if cheap and sources and 2 * sum(nbytes[v] for v in sources) <= nbytes[op.outputs[0]]:
            made_of[op.outputs[0]] = sources
            thin[op.outputs[0]] = placed
    return thin


# The forward pass


def _by_phase(split: Microbatches, loop: Sequence[Placed]) -> tuple[list[Placed], list[Placed]]:
    """Operations of the forward and of the backward pass; what reads a cotangent belongs to the latter."""
    marked = {inner.index for op in split.graph.ops if op.phase == "backward" for inner in op.walk()}
    ahead: list[Placed] = []
    back: list[Placed] = []
    cotangents: set[int] = set()
    for placed in loop:
        later = placed.op.index in marked or any(a in cotangents for a in local(placed))
        (back if later else ahead).append(placed)
        cotangents.update(placed.op.outputs if later else ())
    return ahead, back


def _forward(split: Microbatches, layers: Layers, first: Sequence[int], ahead: Sequence[Placed]) -> dict[int, int]:
    """The stage of every operation of the forward pass, by index: that of its layer, or of what it reads."""
    stage_of = {
        inner.index: sum(layer >= a for a in first) - 1
        for layer in range(len(layers.layers))
        for op in layers.ops(layer)
        for inner in op.walk()
    }
    stages: dict[int, int] = {}
    made: dict[int, int] = {}
    for placed in ahead:
        op = placed.op
        read = [made[a] for a in local(placed) if a in made]
        stage = stages[op.index] = stage_of.get(op.index, max(read, default=0))
        made.update(dict.fromkeys(op.outputs, stage))
        if max(read, default=0) > stage:
            raise GraphError(f"{op.name} in stage {stage} reads what stage {max(read)} makes; {op.source or 'no line'}")
    return stages


def _owners(
    split: Microbatches,
    ahead: Sequence[Placed],
    free: Mapping[int, Placed],
    stages: Mapping[int, int],
    roots: Roots,
) -> Mapping[int, int]:
    """Arguments that one stage alone reads in its forward pass -> that stage."""
    kept = held(split)
    readers: dict[int, set[int]] = {}
    for placed in ahead:
        read = {leaf for one in cone([placed], free) for v in whole(one) for leaf in roots[v] & kept}
        for leaf in read:
            readers.setdefault(leaf, set()).add(stages[placed.op.index])
    return {leaf: min(readers[leaf]) for leaf in sorted(readers) if len(readers[leaf]) == 1}


def cone(
    placed: Sequence[Placed], free: Mapping[int, Placed], reads: Callable[[Placed], Sequence[int]] = local
) -> list[Placed]:
    """Operations with the free ones that they read, in program order; `reads`: the values of one that count."""
    found = {p.op.index: p for p in placed}
    waiting = list(placed)
    while waiting:
        for a in reads(waiting.pop()):
            if a in free and free[a].op.index not in found:
                found[free[a].op.index] = free[a]
                waiting.append(free[a])
    return [found[i] for i in sorted(found)]


# The backward pass


def _backward(
    split: Microbatches,
    back: Sequence[Placed],
    forward: Mapping[int, int],
    roots: Roots,
    owner: Mapping[int, int],
    last: int,
) -> dict[int, int]:
    """The stage of every operation of the backward pass, by index."""
    ops = [p.op for p in (*split.loop, *split.epilogue)]
    inside = {v for p in split.loop for v in p.op.outputs}
    wanted = gradients(split.graph, ops, split.flat.outputs, inside, owner)
    bodies = _bodies(split, back, roots, owner)
    ahead = [p for p in split.loop if p.op.index in forward]
    residual = {v: forward[p.op.index] for p in ahead for v in p.op.outputs}
    last_read = dict(residual)
    for placed in ahead:
        last_read.update((a, max(residual[a], forward[placed.op.index])) for a in local(placed) if a in residual)
    again: dict[int, int] = {}
    cotangent: dict[int, int] = {}
    stages: dict[int, int] = {}
    behind: dict[int, int] = {}  # what a barrier gives -> what it was given
    latest: dict[int, int] = {}  # what may run where it is read -> the last stage where it has what it reads
    for placed in back:
        op = placed.op
        again_here = op.name == BARRIER or _is_recomputed(op)
        read = values(placed) if again_here else [behind.get(a, a) for a in values(placed)]
        below = [owner[leaf] for v in read for leaf in sorted(roots.get(v, ())) if leaf in owner]
        before = residual if again_here and below else last_read
        below += [stage for a in read for known in (before, again) if (stage := known.get(a)) is not None]
        above = [cotangent[a] for a in read if a in cotangent]
        if again_here and not above:
            below += bodies.get(_body(split, op), ())
        below += [wanted[v] for v in op.outputs if v in wanted]
        stages[op.index] = min([max(below), *above]) if below else min(above, default=last)
        if op.name == BARRIER:
            pairs = zip(op.outputs, op.inputs, strict=True)
            behind.update((v, behind.get(a, a)) for v, a in pairs if isinstance(a, int))
            latest[op.index] = min(above, default=last)
        elif not below and _nbytes(split, op.outputs) >= _nbytes(split, local(placed)):
            latest[op.index] = min(above, default=last)
        if above or not again_here:
            cotangent.update(dict.fromkeys(op.outputs, stages[op.index]))
        elif below:
            again.update(dict.fromkeys(op.outputs, stages[op.index]))
    return _pulled(back, stages, again, latest)


def _nbytes(split: Microbatches, some: Sequence[int]) -> int:
    return sum(split.graph.types[v].nbytes for v in {*some})


def _is_recomputed(op: Op) -> bool:
    return jax_compat.is_rematted(op.name_stack)


def _body(split: Microbatches, op: Op) -> int:
    """Index of the innermost rematerialisation around an operation, -1 if there is none."""
    around = split.flat.remat.get(op.index, ())
    return around[-1].index if around else -1


def _bodies(
    split: Microbatches, back: Sequence[Placed], roots: Roots, owner: Mapping[int, int]
) -> Mapping[int, tuple[int, ...]]:
    """Rematerialised bodies that read the parameters of one stage alone -> that stage."""
    found: dict[int, set[int]] = {}
    for placed in back:
        if _is_recomputed(placed.op):
            read = {owner[leaf] for v in whole(placed) for leaf in roots[v] if leaf in owner}
            found.setdefault(_body(split, placed.op), set()).update(read)
    return {body: tuple(stages) for body, stages in found.items() if len(stages) == 1}


def _pulled(
    back: Sequence[Placed], stages: dict[int, int], again: Mapping[int, int], latest: Mapping[int, int]
) -> dict[int, int]:
    """The stages, with what is recomputed, or has nothing that ties it to a stage, where it is read last."""
    readers: dict[int, int] = {}
    for placed in reversed(back):
        op = placed.op
        if read_in := [readers[v] for v in op.outputs if v in readers]:
            if op.index in latest:
                stages[op.index] = min(latest[op.index], max(read_in))
            elif any(v in again for v in op.outputs):
                stages[op.index] = max(stages[op.index], *read_in)
            elif _is_recomputed(op):
                stages[op.index] = min(stages[op.index], max(read_in))
        for a in local(placed):
            readers[a] = max(readers.get(a, 0), stages[op.index])
    return stages


def _deferred(
    loop: Sequence[Placed], stages: Mapping[int, int], totals: Sequence[Total]
) -> tuple[tuple[Placed, ...], tuple[Total, ...]]:
    """Sums of totals of different stages, to be done after the loop, and the totals that are then left."""
    made_in = {v: stages[p.op.index] for p in loop for v in p.op.outputs}
    mixed: set[int] = set()
    for op in (p.op for p in loop if p.op.name in ("add", "add_any")):
        parts = [a for a in op.inputs if a in made_in]
        if len({made_in[a] for a in parts if isinstance(a, int)}) > 1 or any(a in mixed for a in parts):
            mixed.update(op.outputs)
    wanted = {t.value: t for t in totals}
    found: list[Placed] = []
    for placed in reversed(loop):
        op = placed.op
        if op.outputs and op.outputs[0] in mixed and op.outputs[0] in wanted and wanted[op.outputs[0]].how == "sum":
            del wanted[op.outputs[0]]
            wanted.update((a, Total(a, "sum")) for a in op.inputs if isinstance(a, int))
            found.append(Placed(op, frozenset(range(len(op.inputs)))))
    return tuple(found[::-1]), tuple(wanted[v] for v in sorted(wanted))


def _put_off(
    split: Microbatches, back: Sequence[Placed], stages: Mapping[int, int], totals: set[int]
) -> frozenset[int]:
    """Operations, by index, that make partial sums, or values for those of their stage alone."""
    found: set[int] = set()
    readers: dict[int, set[int]] = {}
    needed = -1
    for placed in reversed(back):
        op, stage = placed.op, stages[placed.op.index]
        partial = any(isinstance(split.states[v], Partial) for v in op.outputs)
        light = op.name not in KEPT and not op.regions and not totals & {*op.outputs}
        read = set[int]().union(*(readers.get(v, set()) for v in op.outputs))
        put_off = (partial and read <= {stage}) or (light and read == {stage})
        if put_off:
            found.add(op.index)
        for a in local(placed):
            readers.setdefault(a, set()).add(stage if put_off else needed)
    return frozenset(found)
