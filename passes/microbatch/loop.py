"""A split step as JAX functions: before the loop over microbatches, in it, and after it.

    outer  = prologue(leaves)                          whole values by number, arguments and constants included
    parts  = loop_body(outer, blocks(leaves, k), k)    microbatch k: its part of every total
    outer  = after(outer, totals)                      once, after all microbatches
    leaves = outputs(outer)

`split_step` composes them: automatic gradient accumulation. Sums are computed and accumulated in float32 or wider, and
rounded to the step's own dtype at the end. Rematerialised bodies are rebuilt from those of their operations that run in
the same program, so that the loop's backward pass rematerialises what the user asked for. The shape of every value is
checked against the analysis while it is emitted.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from autopar import jax_compat
from autopar.cost_models.kernels import KERNELS
from autopar.errors import ArgumentError, GraphError
from autopar.ir import control_flow
from autopar.ir.graph import Atom, Graph, Op
from autopar.ir.op_sets import RAGGED_PRODUCTS
from autopar.ir.trace import Traced
from autopar.passes.microbatch.accumulators import Accumulator, accumulator
from autopar.passes.microbatch.microbatches import Microbatches
from autopar.passes.microbatch.programs import AccumulatedValue, AccumulationLoop, PlacedOp
from autopar.passes.microbatch.regions import BlockBody, FlattenedOps, analyse_region, state_of
from autopar.passes.microbatch.rules.table import RULES
from autopar.passes.microbatch.rules.types import RuleResult
from autopar.passes.microbatch.split import split
from autopar.passes.microbatch.states import INVARIANT, SUM, Invariant, Split, State, local_shape, part_dtype
from autopar.rules import manual

#: Arrays by value.
Values = Mapping[int, Any]
Bind = Callable[[jex.JaxprEqn, Sequence[Any]], list[Any]]
"""Binds an equation to operands."""


def slice_block(array: Any, state: Split, count: int, index: Any) -> Any:
    """Block `index` of `count` of a whole array."""
    shape, d = array.shape, state.dim
    inner = shape[d] // state.outer // count
    if state.outer == 1:
        return jax.lax.dynamic_slice_in_dim(array, index * inner, inner, d)
    folded = array.reshape(*shape[:d], state.outer, count, inner, *shape[d + 1 :])
    block = jax.lax.dynamic_index_in_dim(folded, index, d + 1, keepdims=False)
    return block.reshape(*shape[:d], state.outer * inner, *shape[d + 1 :])


@dataclass(frozen=True, eq=False)
class StepPrograms:
    """The JAX functions of a split step. All are pure and may be traced, jitted or sharded separately."""

    split: Microbatches

    @property
    def graph(self) -> Graph:
        return self.split.graph

    def blocks(self, leaves: Sequence[Any], index: Any) -> dict[int, Any]:
        """Microbatch `index` of the arguments that hold the batch."""
        cut = self.split.batch
        arrays = zip(self.graph.inputs, leaves, strict=True)
        return {v: slice_block(array, cut[v], self.split.count, index) for v, array in arrays if v in cut}

    def prologue(self, leaves: Sequence[Any]) -> dict[int, Any]:
        """Whole values known before any microbatch: arguments, constants, and values computed from them."""
        outer = dict(zip(self.graph.inputs, leaves, strict=True))
        outer.update(self.split.flat.constants)
        return self._run_once(self.split.prologue, outer)

    def loop_body(self, loop: AccumulationLoop, outer: Values, blocks: Values, index: Any) -> tuple[Any, ...]:
        """The part of one microbatch in each of the loop's totals.

        Args:
            loop: one of the loops.
            outer: whole values, by number.
            blocks: this microbatch of the batch arguments, by number.
            index: number of the microbatch.
        """
        emitter = _Emitter(self.graph, self.split.flat, self.split.states, self.split.count, outer, dict(blocks), index)
        emitter.run(loop.body, [total.value for total in loop.totals])
        return tuple(emitter.local[total.value] for total in loop.totals)

    def after(self, loop: AccumulationLoop, outer: Values, totals: Sequence[Any]) -> dict[int, Any]:
        """`outer` with the totals, and the values that are computed from them once."""
        values = {t.value: array for t, array in zip(loop.totals, totals, strict=True)}
        return self._run_once(loop.after, {**outer, **values})

    def outputs(self, outer: Values) -> tuple[Any, ...]:
        """Results of the step."""
        return tuple(outer[a] if isinstance(a, int) else jnp.asarray(a.value) for a in self.split.flat.outputs)

    def _run_once(self, placed: Sequence[PlacedOp], outer: dict[int, Any]) -> dict[int, Any]:
        whole: Mapping[int, State] = {}
        inlined = replace(self.split.flat, remat={})  # runs once: all its values are live anyway
        emitter = _Emitter(self.graph, inlined, whole, self.split.count, outer, outer, None)
        emitter.run(placed, [v for p in placed for v in p.op.outputs])
        return outer

    def step(self, leaves: Sequence[Any], unrolled: bool = False) -> tuple[Any, ...]:
        """All microbatches, one after another in one program."""
        outer = self.prologue(leaves)
        for loop in self.split.loops:
            outer = self.after(loop, outer, self._totals(loop, outer, leaves, unrolled))
        return self.outputs(outer)

    def _totals(self, loop: AccumulationLoop, outer: Values, leaves: Sequence[Any], unrolled: bool) -> list[Any]:
        if not loop.totals:
            return []
        accumulators = [self.accumulator(total) for total in loop.totals]

        def iteration(carry: Sequence[Any], index: Any) -> tuple[list[Any], list[Any]]:
            parts = self.loop_body(loop, outer, self.blocks(leaves, index), index)
            of_totals = [*zip(accumulators, carry, parts, strict=True)]
            carried = [None if a.is_stacked else a.add(c, p, index) for a, c, p in of_totals]
            return carried, [p if a.is_stacked else None for a, _, p in of_totals]

        initial = [None if a.is_stacked else a.zero() for a in accumulators]
        carry, stacked = jax.lax.scan(iteration, initial, jnp.arange(self.split.count), unroll=unrolled or 1)
        return [a.finish(s if a.is_stacked else c) for a, c, s in zip(accumulators, carry, stacked, strict=True)]

    def accumulator(self, total: AccumulatedValue, lead: tuple[int, ...] = ()) -> Accumulator:
        """The accumulator of a total.

        Args:
            total: the total.
            lead: extents of additional leading dimensions, along which sums stay unreduced.
        """
        aval = self.aval(total.value)
        shape, state = (*lead, *aval.shape), self.split.states[total.value]
        return accumulator(total.combine, self.split.count, shape, aval.dtype, state)

    def aval(self, value: int) -> Any:
        """Shape and dtype of the whole of a result of an operation."""
        op, type_ = self._makers[value], self.graph.types[value]
        # the equation of a loop may have other results than the operation, see `jax_compat.scan_equation`
        if op.regions and not type_.dtype.startswith("key"):
            return jax.ShapeDtypeStruct(type_.shape, jnp.dtype(type_.dtype))
        return op.equation.outvars[op.outputs.index(value)].aval

    def avals(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Shape and dtype of every input of the graph: the step's arguments, and totals of a loop that ran before."""
        return (*arguments, *map(self.aval, self.graph.inputs[len(arguments) :]))

    @cached_property
    def _makers(self) -> Mapping[int, Op]:
        """Value -> the operation that computes it."""
        return {v: op for op in self.split.flat.ops for v in op.outputs}


@dataclass(frozen=True, eq=False, repr=False)  # jax.jit asks a callable without code for its repr
class SplitStep:
    """A step that runs its batch in microbatches, called like the step.

    Attributes:
        traced: the step.
        programs: the programs that it runs.
        unrolled: the loop's body is emitted once per microbatch.
    """

    traced: Traced
    programs: StepPrograms
    unrolled: bool = False

    @property
    def split(self) -> Microbatches:
        """The program of every operation."""
        return self.programs.split

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = self.traced.leaves(*args, **kwargs)
        return jax.tree.unflatten(self.traced.out_tree, self.programs.step(leaves, self.unrolled))


def split_step(
    traced: Traced,
    count: int,
    batch_argnums: Sequence[int] | Literal["auto"] = "auto",
    *,
    per_microbatch: Sequence[str] = (),
    loops: int = 2,
    shards: int = 1,
    unrolled: bool = False,
) -> SplitStep:
    """The traced step on `count` microbatches: a function with the same arguments and results, to be jitted.

    Args:
        traced: the step.
        count: number of microbatches; the batch has to be divisible by it.
        batch_argnums: positional arguments that hold the batch in their first dimension, or "auto".
        per_microbatch, loops, shards: see `autopar.passes.microbatch.split.split`.
        unrolled: emit the loop's body once per microbatch.

    Raises:
        MicrobatchError: the step cannot be split.
    """
    leaves = batch_argnums if isinstance(batch_argnums, str) else _leaves_of(traced, batch_argnums)
    divided = split(traced.graph, count, leaves, per_microbatch=per_microbatch, loops=loops, shards=shards)
    return SplitStep(traced, StepPrograms(divided), unrolled)


def _leaves_of(traced: Traced, argnums: Sequence[int]) -> tuple[int, ...]:
    """Positions of the leaves of some positional arguments."""
    ends = list(itertools.accumulate((arg.num_leaves for arg in traced.in_tree.children()[0].children()), initial=0))
    unknown = [n for n in argnums if not 0 <= n < len(ends) - 1]
    if unknown:
        raise ArgumentError(f"batch_argnums={tuple(argnums)}: there is no traced argument {unknown[0]}")
    return tuple(leaf for n in argnums for leaf in range(ends[n], ends[n + 1]))


# Emission


@dataclass(frozen=True, eq=False)
class _Emitter:
    """Emits the operations of one program, or of one body in it, while it is traced.

    Attributes:
        graph, flat: the step or a body, with rematerialised bodies inlined.
        states: states of its values; a value without a state is emitted whole.
        count: number of microbatches.
        outer: whole values from outside.
        local: values of this microbatch; grows.
        index: number of the microbatch.
        in_shard_map: the body is that of a `shard_map`, whose operations carry no tags.
    """

    graph: Graph
    flat: FlattenedOps
    states: Mapping[int, State]
    count: int
    outer: Values
    local: dict[int, Any]
    index: Any
    in_shard_map: bool = False

    def run(self, placed: Sequence[PlacedOp], wanted: Sequence[int], depth: int = 0) -> None:
        """Bind operations in order.

        Args:
            placed: the operations.
            wanted: values that are read afterwards.
            depth: number of rematerialised bodies that the operations are in already.
        """
        reads = Counter(a for p in placed for a in p.op.inputs if isinstance(a, int))
        reads.update(wanted)
        for _, group in itertools.groupby(placed, lambda p: self._remat_index(p.op, depth)):
            body = list(group)
            around = self.flat.remat.get(body[0].op.index, ())
            if len(around) > depth:
                inside = Counter(a for p in body for a in p.op.inputs if isinstance(a, int))
                kept = [v for p in body for v in p.op.outputs if reads[v] > inside[v]]
                self._rematerialise(around[depth], body, kept, depth)
            else:
                for iteration in body:
                    self._bind(iteration)

    def _remat_index(self, op: Op, depth: int) -> int:
        """Index of the rematerialisation at this depth around an operation; -1 if there is none."""
        around = self.flat.remat.get(op.index, ())
        return around[depth].index if len(around) > depth else -1

    def _rematerialise(self, op: Op, body: Sequence[PlacedOp], kept: Sequence[int], depth: int) -> None:
        """Emit operations as a rematerialised body, with `kept` as its results."""
        inside = {v for p in body for v in p.op.outputs}
        reads = [(i in p.outer, a) for p in body for i, a in enumerate(p.op.inputs) if isinstance(a, int)]
        outer = list(dict.fromkeys(v for whole, v in reads if whole))
        local = [v for v in dict.fromkeys(v for whole, v in reads if not whole) if v not in inside]

        def emitted(outer_arrays: Sequence[Any], local_arrays: Sequence[Any], index: Any) -> list[Any]:
            values = dict(zip(local, local_arrays, strict=True))
            around = dict(zip(outer, outer_arrays, strict=True))
            emitter = replace(self, outer=around, local=values, index=index)
            emitter.run(body, kept, depth + 1)
            return [values[v] for v in kept]

        operands = ([self.outer[v] for v in outer], [self.local[v] for v in local], self.index)
        flat, tree = jax.tree.flatten(operands)
        with self._emitting(op):
            results = jax_compat.rematerialised(op.equation, lambda *xs: emitted(*jax.tree.unflatten(tree, xs)), flat)
        self.local.update(zip(kept, results, strict=True))

    @property
    def _bound(self) -> Bind:
        return jax_compat.bind_in_body if self.in_shard_map else jax_compat.bind

    def _emitting(self, op: Op) -> AbstractContextManager[None]:
        return jax_compat.emitting(op.equation.source_info, op.name_stack, "" if self.in_shard_map else op.tag)

    def _bind(self, placed: PlacedOp) -> None:
        op, result = placed.op, placed.rule_result
        with self._emitting(op):
            operands = [self._operand(placed, i, atom) for i, atom in enumerate(op.inputs)]
            if result is None and op.name == "scan":
                results = self._scan_whole(op, operands)
            elif result is None:
                results = self._bound(op.equation, operands)
            elif result.body is not None:
                bound = _REGION_EMITTERS[op.name](self, op, result, operands)
                results = in_states(bound, result.results)
            elif result.result_block is not None:
                results = [
                    _BLOCK_EMITTERS.get(op.name, _slice_of_whole)(
                        op, operands, result.result_block, self.count, self.index
                    )
                ]
            elif _needs_float32_sum(op, result):
                results = _sum_in_float32(op, result, operands, self._bound)
            else:
                params = {**op.params, **result.params}
                bound = self._bound(op.equation.replace(params=params), operands)
                results = [
                    _to_float32(x) if s == SUM and _is_narrow(x) else x
                    for x, s in zip(bound, result.results, strict=True)
                ]
        for value, array in zip(op.outputs, results, strict=True):
            self._check(op, value, array)
            self.local[value] = array

    def _operand(self, placed: PlacedOp, position: int, atom: Atom) -> Any:
        """An operand as the operation reads it: own totals scaled, slices taken, constant indices made relative to
        the block.
        """
        if not isinstance(atom, int):
            return atom.value
        if placed.rule_result is not None and position in placed.rule_result.iotas:
            return jax.lax.iota(jnp.dtype(self.graph.types[atom].dtype), placed.rule_result.iotas[position])
        array = (self.outer if position in placed.outer else self.local)[atom]
        if position in placed.own_totals and self.states[atom] == SUM:
            array = (array * np.asarray(self.count, array.dtype)).astype(jnp.dtype(self.graph.types[atom].dtype))
        if placed.rule_result is None:
            return array
        cut = placed.rule_result.slices.get(position)
        array = array if cut is None else slice_block(array, cut, self.count, self.index)
        if position in placed.rule_result.local_indices:
            component, indices = placed.rule_result.local_indices[position]
            array = array.at[..., component].set(indices.astype(array.dtype))
        return array

    def _check(self, op: Op, value: int, array: Any) -> None:
        """GraphError unless a value has the shape and dtype that its state implies."""
        whole = self.graph.types[value].shape
        state = self.states.get(value, INVARIANT)
        wanted = local_shape(whole, state, self.count)
        kept = str(part_dtype(array.dtype, state)) == str(array.dtype)
        if tuple(array.shape) != wanted or not kept:
            at, got = f" at {op.source}" if op.source else "", f"{array.dtype}{array.shape}"
            raise GraphError(f"{op.name}{at} gives {got} on a microbatch, its rule says {wanted} ({state})")

    # Bodies

    def _run_body(self, body: BlockBody, arrays: Sequence[Any]) -> list[Any]:
        """Results of a body on blocks."""
        local = dict(zip(body.region.inputs, in_states(arrays, body.input_states), strict=True))
        local.update(body.flat.constants)
        emitter = replace(self, flat=body.flat, states=body.states, outer={}, local=local)
        placed = [PlacedOp(op, rule_result=body.rule_results[op.index]) for op in body.flat.ops]
        emitter.run(placed, [a for a in body.flat.outputs if isinstance(a, int)])
        return [emitter.body_result(a, state) for a, state in zip(body.flat.outputs, body.output_states, strict=True)]

    def body_result(self, atom: Atom, wanted: State) -> Any:
        """A body's result in the state in which the body returns it."""
        array, state = self.local[atom] if isinstance(atom, int) else atom.value, state_of(atom, self.states)
        if isinstance(wanted, Split) and isinstance(state, Invariant):
            return slice_block(jnp.asarray(array), wanted, self.count, self.index)
        if wanted == SUM and isinstance(state, Invariant):
            array = jnp.where(self.index == 0, array, jnp.zeros_like(array))
        return in_states([array], [wanted])[0]

    def _body_function(self, body: BlockBody) -> control_flow.BodyFunction:
        return lambda arrays: self._run_body(body, arrays)

    def scan(self, op: Op, result: RuleResult, operands: Sequence[Any]) -> list[Any]:
        body, length = result.body, result.params.get("length", op.params["length"])
        return control_flow.scan(op, in_states(operands, body.input_states), self._body_function(body), length)

    def _scan_whole(self, op: Op, operands: Sequence[Any]) -> list[Any]:
        """A scan of whole values, by its region: rematerialisation rewrites that, and not JAX's equation."""
        invariant = [INVARIANT] * len(op.regions[0].inputs)
        body = analyse_region(self.graph, op.regions[0], invariant, self.count)
        assert isinstance(body, BlockBody), "an operation on whole values runs on whole values"
        return self.scan(op, RuleResult((), body=body), operands)

    def while_loop(self, op: Op, result: RuleResult, operands: Sequence[Any]) -> list[Any]:
        bodies: tuple[BlockBody, BlockBody] = result.body
        first = op.params["cond_nconsts"]
        operands = [*operands[:first], *in_states(operands[first:], bodies[1].input_states)]
        test, body = map(self._body_function, bodies)
        batched = self.graph.type_of(op.regions[0].outputs[0]).rank > 0
        return control_flow.while_loop(op, operands, test, body, batched=batched)

    def cond(self, op: Op, result: RuleResult, operands: Sequence[Any]) -> list[Any]:
        return control_flow.cond(operands, [self._body_function(body) for body in result.body])

    def shard_map(self, op: Op, result: RuleResult, operands: Sequence[Any]) -> list[Any]:
        """The body on blocks of the shards, with the number of the microbatch as one more operand."""

        def body(index: Any, *shards: Any) -> list[Any]:
            inside = replace(self, graph=manual.call_of(op).body, outer={}, local={}, index=index, in_shard_map=True)
            return inside._run_body(result.body, shards)

        return jax_compat.shard_mapped(op.equation, body, (jnp.asarray(self.index), *operands), 1)


def in_states(arrays: Sequence[Any], states: Sequence[State]) -> list[Any]:
    """Arrays as a body takes them in these states: zeros that begin a sum of floats below 32 bits become float32."""
    rule_result = zip(arrays, states, strict=True)
    return [_to_float32(x) if s == SUM else x for x, s in rule_result]


def _to_float32(array: Any) -> Any:
    """A float of less than 32 bits in float32; other arrays unchanged."""
    return jnp.asarray(array, jnp.float32) if _is_narrow(array) else array


def _is_narrow(array: Any) -> bool:
    dtype = jax.typeof(array).dtype
    return part_dtype(dtype, SUM) != dtype


_REGION_EMITTERS: Mapping[str, Callable[[_Emitter, Op, RuleResult, Sequence[Any]], list[Any]]] = {
    "scan": _Emitter.scan,
    "while": _Emitter.while_loop,
    "cond": _Emitter.cond,
    manual.MANUAL: _Emitter.shard_map,
}


# Parts of sums in floats of less than 32 bits


def _needs_float32_sum(op: Op, result: RuleResult) -> bool:
    """True if the operation yields parts of a sum that are kept in float32, from operands that may be narrower.

    A kernel is traced for its own types: each of its parts is rounded once, and is converted afterwards.
    """
    if result.results != (SUM,) or op.name in KERNELS or (op.name in RULES and RULES[op.name].identity):
        return False
    (variable,) = op.equation.outvars
    return part_dtype(variable.aval.dtype, SUM) != variable.aval.dtype


def _sum_in_float32(op: Op, result: RuleResult, operands: Sequence[Any], bound: Bind) -> list[Any]:
    """The operation with its result in float32.

    Products of two narrow operands stay narrow, with a float32 result, where devices support that. Convolutions do not:
    they round each part.
    """
    parameter, params = _RESULT_DTYPE.get(op.name), {**op.params, **result.params}
    narrow = all(map(_is_narrow, operands))
    if op.name == "conv_general_dilated" and narrow:
        return [_to_float32(x) for x in bound(op.equation.replace(params=params), operands)]
    if parameter is None or not narrow:
        operands = [_to_float32(x) for x in operands]
    if op.name == "scatter-add":  # its parameters contain a jaxpr for the narrow type
        return [_scatter_add(operands, params)]
    wide = {} if parameter is None else {parameter: np.dtype(np.float32)}
    return bound(op.equation.replace(params={**params, **wide}), operands)


#: Parameter that gives the dtype of the result.
_RESULT_DTYPE: Mapping[str, str] = {
    "convert_element_type": "new_dtype",
    "dot_general": "preferred_element_type",
    **dict.fromkeys(RAGGED_PRODUCTS, "preferred_element_type"),
    "conv_general_dilated": "preferred_element_type",
}


def _scatter_add(operands: Sequence[Any], params: Mapping[str, Any]) -> Any:
    array, indices, updates = operands
    return jax.lax.scatter_add(
        array,
        indices,
        updates,
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )


# Blocks of the results of operations without split operands


def _slice_of_whole(op: Op, operands: Sequence[Any], state: Split, count: int, index: Any) -> Any:
    """The block, cut from the whole result."""
    return slice_block(jax_compat.bind(op.equation, operands)[0], state, count, index)


def _random_bits(op: Op, operands: Sequence[Any], state: Split, count: int, index: Any) -> Any:
    """Bits of Threefry for the counters of one block: counter i, of 64 bits, is the element's position in the whole."""
    shape, width = op.params["shape"], op.params["bit_width"]
    block = local_shape(shape, state, count)
    low = jnp.zeros(block, jnp.uint32)
    for dim in range(len(shape)):
        position = jax.lax.broadcasted_iota(jnp.uint32, block, dim)
        if dim == state.dim:
            inner = jnp.uint32(block[dim] // state.outer)
            position = position // inner * inner * count + index.astype(jnp.uint32) * inner + position % inner
        low += position * jnp.uint32(math.prod(shape[dim + 1 :]))
    first, second = jax.random.key_data(operands[0])
    words = threefry2x32_p.bind(first, second, jnp.zeros_like(low), low)
    # As `jax.random.bits` has it: both words side by side for 64 bits, their exclusive or for fewer.
    bits = getattr(jnp, f"uint{width}")
    return words[0].astype(bits) << 32 | words[1].astype(bits) if width == 64 else (words[0] ^ words[1]).astype(bits)


_BLOCK_EMITTERS: Mapping[str, Callable[[Op, Sequence[Any], Split, int, Any], Any]] = {"random_bits": _random_bits}
