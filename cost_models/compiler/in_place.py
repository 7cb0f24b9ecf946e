"""Which results are made in the memory of an operand that is read for the last time.

    scatters, dynamic_update_slice   in that of their first operand
    routines of LAPACK               in that of the operand that they work in                  -> IN_PLACE_OPERAND
    light steps                      in that of any operand of as many bytes                   -> _Sharing.operand

Some compilers (`Backend.shares_strictly`) let a light step have an operand's memory only if

    the operand is read elementwise   at the index of the result alone, in the result's shape: no transpose, slice or
                                      reshape is fused in between                              -> _Sharing.elementwise
    in a kernel of the compiler's own none of a library
    neither is another's              in no memory in which a scatter or a loop goes on        -> _Sharing.joined
    the result does not leave         results of the program have memory of their own

and then scatters overwrite copies of their first operand as well. A product over several dimensions is one of matrices:
what reads its result, or makes an operand of it, reshapes, unless it is made of such results and scalars alone, and so
is a matrix as well                                                                             -> _Sharing.matrices
(openxla/xla, xla/hlo/analysis/hlo_dataflow_analysis.cc: `CanShareOperandBufferWithUser`;
xla/service/heap_simulator/heap_simulator.cc: `RunComputation`.)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.cost_models.compiler.compiled_program import (
    IN_PLACE_OPERAND,
    OVERWRITES,
    RESHAPE,
    Program,
    Step,
    free_dims,
)
from autopar.cost_models.compiler.fusion import LIGHT, LOOP
from autopar.cost_models.compiler.lifetimes import Lifetimes
from autopar.cost_models.compiler.operands import is_single
from autopar.cost_models.compiler.written_values import Written
from autopar.ir.graph import Op
from autopar.ir.keyed import grouped
from autopar.ir.op_sets import ELEMENTWISE


def overwritten(p: Program, w: Written, lives: Lifetimes, elsewhere: Collection[int]) -> set[int]:
    """Values and copies in whose memory the step that reads them last makes its result.

    Args:
        p, w, lives: the program, what it writes, and when that lives.
        elsewhere: results that are made in other memory.
    """
    sharing = _Sharing(p, w, lives, elsewhere)
    taken_over = (sharing.operand(moment, step) for moment, step in enumerate(lives.moments) if step.outputs)
    return {v for v in taken_over if v is not None}


@dataclass(eq=False)
class _Sharing:
    p: Program
    w: Written
    lives: Lifetimes
    elsewhere: Collection[int]

    def operand(self, moment: int, step: Step) -> int | None:
        """What a step overwrites."""
        if step.kind == LIGHT:
            return self._of_light(moment, step)
        if step.name in OVERWRITES:
            return self._of_scatter(moment, step)
        if step.name in IN_PLACE_OPERAND and self.p.backend.solves_in_place:
            v = step.inputs[IN_PLACE_OPERAND[step.name]]
            return v if self._is_free(v, moment, step) else None
        return None

    def _is_free(self, v: int, moment: int, step: Step) -> bool:
        """Nothing reads a value later, and the result is as large."""
        p = self.p
        return self.lives.death.get(v) == moment and p.type_of(v).nbytes == p.type_of(step.outputs[0]).nbytes

    def _is_own(self, v: int) -> bool:
        return v not in self.p.tokens and v not in self.p.graph.names

    @cached_property
    def _dying(self) -> Mapping[int, list[int]]:
        """Moment -> what is read for the last time then, but for arguments and copies."""
        return grouped((moment, v) for v, moment in self.lives.death.items() if self._is_own(v))

    def _of_scatter(self, moment: int, step: Step) -> int | None:
        if not self.p.backend.shares_strictly:
            return self._of_light(moment, step)
        for v in self.w.sources.get(step.inputs[0], ()):
            born = self.lives.birth.get(self.p.behind(v), moment)
            if self.p.behind(v) not in self.p.graph.names and born < moment and self._is_free(v, moment, step):
                return v
        return None

    def _of_light(self, moment: int, step: Step) -> int | None:
        dying = [v for v in self._dying.get(moment, ()) if self._is_free(v, moment, step)]
        dying = [v for v in dying if self.lives.birth[v] < moment]
        if not dying or (self.p.backend.shares_strictly and self._has_own_memory(step)):
            return None
        read = {v for v in self.w.reads(step) if v not in self.w.inner.get(id(step), ())}
        if self.p.backend.shares_strictly:
            matrix = step.outputs[0] in self.matrices
            read = {v for v in self.elementwise(step) & read if v not in self.joined}
            read = {v for v in read if (v in self.matrices) == matrix}
        return next((v for v in dying if v in read), None)

    # As some compilers share memory

    def _has_own_memory(self, step: Step) -> bool:
        """A result that has memory of its own, or another's, or is made in the shape of a matrix."""
        v = step.outputs[0]
        reshaped = v in self._reshaped_for_products and v not in self.matrices
        return reshaped or v in self.elsewhere or v in self.joined or v in self._leaving or id(step) in self.w.library

    @cached_property
    def _leaving(self) -> frozenset[int]:
        """Results of the program."""
        return frozenset(map(self.p.behind, self.p.top.leaving))

    @cached_property
    def joined(self) -> frozenset[int]:
        """Values in memory in which scatters, routines of LAPACK, loops and conditionals go on."""
        joined: set[int] = set()
        for step in self.lives.moments:
            if step.kind == LOOP:
                joined.update(step.outputs)
                joined.update(self.p.behind(v) for v, _ in step.taken)
                joined.update(self.p.behind(v) for frame in step.frames for v, _ in frame.carried)
            elif step.name in OVERWRITES or step.name in IN_PLACE_OPERAND:
                v = step.inputs[IN_PLACE_OPERAND.get(step.name, 0)] if step.inputs else step.outputs[0]
                joined.update((*step.outputs, *map(self.p.behind, self.w.sources.get(v, ()))))
        return frozenset(joined)

    def elementwise(self, step: Step) -> set[int]:
        """What a step, with all that is fused into it, reads at the index of its result alone."""
        shape, repeats = self.p.type_of(step.outputs[0]).shape, id(step) in self.w.repeating
        at_index: set[int] = set()
        elsewhere: set[int] = set()
        waiting, seen = [(step, True)], {(id(step), True)}
        while waiting:
            reader, along = waiting.pop()
            along = along and self._is_pointwise(reader)
            for v in reader.inputs:
                behind = self.p.behind(v)
                maker = self._makers.get(behind)
                read = behind in self.w.values and not (repeats and behind in self.w.beneath)
                follows = along and self._fits(behind, shape)
                if maker is None or read or v != behind:
                    (at_index if follows else elsewhere).add(v)
                if maker is not None and not read and (id(maker), follows) not in seen:
                    seen.add((id(maker), follows))
                    waiting.append((maker, follows))
        return at_index - elsewhere

    def _is_pointwise(self, step: Step) -> bool:
        """A step that reads its operands at the index of its result; to reshape what is a matrix does nothing."""
        return step.name in ELEMENTWISE or (step.name == RESHAPE and step.outputs[0] in self.matrices)

    def _fits(self, v: int, shape: tuple[int, ...]) -> bool:
        """A value of this shape, or one that is a matrix, whichever dimensions that has.

        What a product with swapped operands makes is in memory as its transpose.
        """
        type_ = self.p.type_of(self.p.swapped[v].outputs[0] if v in self.p.swapped else v)
        return type_.shape == shape or (v in self.matrices and type_.size == math.prod(shape))

    @cached_property
    def _steps(self) -> list[Step]:
        return [step for frame in self.p.top.walk() for step in frame.steps]

    @cached_property
    def _makers(self) -> Mapping[int, Step]:
        return {v: step for step in self._steps for v in step.outputs}

    @cached_property
    def matrices(self) -> frozenset[int]:
        """Values that are made in other dimensions than they have: those of a matrix, or of a gather's windows.

        (openxla/xla, xla/hlo/transforms/simplifiers/reshape_mover.cc.)
        """
        matrices: set[int] = set()
        scalars: set[int] = set()
        for step in self._steps:
            read = {*map(self.p.behind, step.inputs)}
            if step.name in ("broadcast_in_dim", "spread") and all(self.p.type_of(v).rank == 0 for v in read):
                scalars.update(step.outputs)
                continue
            product = step.name == "gather" or (step.name == "dot_general" and _is_reshaped(step.op))
            arithmetic = step.name in (*ELEMENTWISE, RESHAPE) and not read <= scalars
            if product or (arithmetic and read <= matrices | scalars):
                matrices.update(step.outputs)
        return frozenset(matrices)

    @cached_property
    def _reshaped_for_products(self) -> set[int]:
        """What products alone read, as matrices."""
        reshaped: set[int] = set()
        otherwise = {self.p.behind(v) for frame in self.p.top.walk() for v in frame.leaving}
        for step in self._steps:
            as_matrices = set(_reshapes(self.p, step)) if step.name == "dot_general" else set[int]()
            for v in map(self.p.behind, step.inputs):
                (reshaped if v in as_matrices else otherwise).add(v)
        return reshaped - otherwise


def _reshapes(p: Program, step: Step) -> Iterator[int]:
    """Operands that a product reads as matrices of other dimensions."""
    for k, atom in enumerate(step.op.inputs):
        if isinstance(atom, int) and _merges(step.op, k):
            root = p.root(atom)
            yield p.behind(root) if isinstance(root, int) else atom


def _merges(op: Op, k: int) -> bool:
    """Whether several dimensions of an operand become one, or one of one element none."""
    contracted, _ = op.params["dimension_numbers"]
    return len(free_dims(op, k)) > 1 or len(contracted[k]) > 1 or is_single(op)


def _is_reshaped(op: Op) -> bool:
    """Whether the result of a product is made in other dimensions."""
    return any(len(free_dims(op, k)) > 1 for k in (0, 1)) or is_single(op)
