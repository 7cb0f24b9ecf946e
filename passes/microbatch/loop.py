"""A split step as JAX functions: what runs once before the loop over microbatches, in it, and after it.

    outer  = prologue(leaves)                       whole values by number, arguments and constants included
    parts  = loop(outer, blocks(leaves, k), k)      one microbatch: a part of every total
    outer  = after(outer, totals)                   once all microbatches are in
    leaves = outputs(outer)

`split_step` composes them: automatic gradient accumulation. Sums are computed and accumulated in float32 or wider, and
rounded to the step's own type at the end. Rematerialised
bodies are put together again from those of their operations that run in the same program, so that the loop's backward
pass recomputes what the user wanted recomputed. The shape of every value is checked against the analysis while it is
emitted.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from autopar import jax_compat
from autopar.errors import ArgumentError, GraphError
from autopar.ir import control_flow
from autopar.ir.graph import Atom, Graph, Op
from autopar.ir.trace import Traced
from autopar.passes.microbatch.analysis import Microbatches, split
from autopar.passes.microbatch.programs import Placed, Sweep, Total
from autopar.passes.microbatch.regions import Body, Flat, state_of
from autopar.passes.microbatch.rule_types import Outcome
from autopar.passes.microbatch.states import INVARIANT, SUM, Invariant, Split, State, local_shape, part_dtype
from autopar.passes.microbatch.table import RULES

#: Arrays by value.
Values = Mapping[int, Any]


def take(array: Any, state: Split, count: int, index: Any) -> Any:
    """Block `index` of `count` of a whole array."""
    shape, d = array.shape, state.dim
    inner = shape[d] // state.outer // count
    if state.outer == 1:
        return jax.lax.dynamic_slice_in_dim(array, index * inner, inner, d)
    folded = array.reshape(*shape[:d], state.outer, count, inner, *shape[d + 1 :])
    block = jax.lax.dynamic_index_in_dim(folded, index, d + 1, keepdims=False)
    return block.reshape(*shape[:d], state.outer * inner, *shape[d + 1 :])


def untake(blocks: Any, state: Split) -> Any:
    """The whole array of its blocks, which are stacked in front."""
    count, *shape = blocks.shape
    d = state.dim
    inner = shape[d] // state.outer
    folded = blocks.reshape(count, *shape[:d], state.outer, inner, *shape[d + 1 :])
    return jnp.moveaxis(folded, 0, d + 1).reshape(*shape[:d], count * shape[d], *shape[d + 1 :])


@dataclass(frozen=True, eq=False)
class Programs:
    """The JAX functions of a split step; all are pure and may be traced, jitted or sharded on their own."""

    split: Microbatches

    @property
    def graph(self) -> Graph:
        return self.split.graph

    def blocks(self, leaves: Sequence[Any], index: Any) -> dict[int, Any]:
        """Microbatch `index` of the arguments that hold the batch."""
        cut = self.split.batch
        arrays = zip(self.graph.inputs, leaves, strict=True)
        return {v: take(array, cut[v], self.split.count, index) for v, array in arrays if v in cut}

    def prologue(self, leaves: Sequence[Any]) -> dict[int, Any]:
        """Whole values known before any microbatch: arguments, constants, and what is computed from them."""
        outer = dict(zip(self.graph.inputs, leaves, strict=True))
        outer.update(self.split.flat.constants)
        return self._once(self.split.prologue, outer)

    def loop(self, sweep: Sweep, outer: Values, blocks: Values, index: Any) -> tuple[Any, ...]:
        """The part that one microbatch has in each of the sweep's totals."""
        scope = _Scope(self.graph, self.split.flat, self.split.states, self.split.count, outer, dict(blocks), index)
        scope.run(sweep.loop, [total.value for total in sweep.totals])
        return tuple(scope.local[total.value] for total in sweep.totals)

    def after(self, sweep: Sweep, outer: Values, totals: Sequence[Any]) -> dict[int, Any]:
        """`outer` with the totals and what is computed from them once."""
        values = {t.value: array for t, array in zip(sweep.totals, totals, strict=True)}
        return self._once(sweep.after, {**outer, **values})

    def outputs(self, outer: Values) -> tuple[Any, ...]:
        """Results of the step."""
        return tuple(outer[a] if isinstance(a, int) else jnp.asarray(a.value) for a in self.split.flat.outputs)

    def _once(self, placed: Sequence[Placed], outer: dict[int, Any]) -> dict[int, Any]:
        whole: Mapping[int, State] = {}
        together = replace(self.split.flat, remat={})  # runs once: nothing is recomputed that is held anyway
        scope = _Scope(self.graph, together, whole, self.split.count, outer, outer, None)
        later = [v for p in placed for v in p.op.outputs]
        scope.run(placed, later)
        return outer

    def step(self, leaves: Sequence[Any], unrolled: bool = False) -> tuple[Any, ...]:
        """All microbatches, one after another in one program."""
        outer = self.prologue(leaves)
        for sweep in self.split.sweeps:
            outer = self.after(sweep, outer, self._totals(sweep, outer, leaves, unrolled))
        return self.outputs(outer)

    def _totals(self, sweep: Sweep, outer: Values, leaves: Sequence[Any], unrolled: bool) -> list[Any]:
        if not sweep.totals:
            return []
        accumulators = [self.accumulator(total) for total in sweep.totals]

        def one(carry: Sequence[Any], index: Any) -> tuple[list[Any], list[Any]]:
            parts = self.loop(sweep, outer, self.blocks(leaves, index), index)
            both = [a.add(c, p) for a, c, p in zip(accumulators, carry, parts, strict=True)]
            return [carried for carried, _ in both], [stacked for _, stacked in both]

        begin = [a.begin for a in accumulators]
        carry, stacked = jax.lax.scan(one, begin, jnp.arange(self.split.count), unroll=unrolled or 1)
        return [a.end(c, s) for a, c, s in zip(accumulators, carry, stacked, strict=True)]

    def accumulator(self, total: Total, lead: tuple[int, ...] = ()) -> Accumulator:
        """How the parts of a total come together; `lead`: extents of dimensions in front that keep sums apart."""
        aval = self.avals[total.value]
        return _ACCUMULATORS[total.how]((*lead, *aval.shape), aval.dtype, self.split.states[total.value])

    @cached_property
    def avals(self) -> Mapping[int, Any]:
        """Shape and dtype of the whole of every value."""
        found: dict[int, Any] = {}
        for op in self.split.flat.ops:
            # the equation of a loop need not fit any more, see `jax_compat.scan_equation`
            found.update((v, x.aval) for v, x in zip(op.outputs, op.equation.outvars, strict=not op.regions))
            plain = [v for v in op.outputs if op.regions and not self.graph.types[v].dtype.startswith("key")]
            types = ((v, self.graph.types[v]) for v in plain)
            found.update((v, jax.ShapeDtypeStruct(t.shape, jnp.dtype(t.dtype))) for v, t in types)
        return found


@dataclass(frozen=True, eq=False, repr=False)  # jax.jit asks a callable without code for its repr
class SplitStep:
    """A step that runs its batch in microbatches, called as the step is.

    Attributes:
        traced: the step.
        programs: what it runs.
        unrolled: the loop's body is emitted once per microbatch.
    """

    traced: Traced
    programs: Programs
    unrolled: bool = False

    @property
    def split(self) -> Microbatches:
        """Which operations stand where."""
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
    sweeps: int = 2,
    shards: int = 1,
    unrolled: bool = False,
) -> SplitStep:
    """The traced step on `count` microbatches: a function with its arguments and results, to be jitted.

    Args:
        traced: the step.
        count: number of microbatches; the batch has to divide by it.
        batch_argnums: positional arguments that hold the batch in their first dimension, or "auto".
        per_microbatch, sweeps, shards: see `autopar.passes.microbatch.analysis.split`.
        unrolled: emit the loop's body once per microbatch.

    Raises:
        MicrobatchError: the step does not fall into microbatches.
    """
    leaves = batch_argnums if isinstance(batch_argnums, str) else _leaves_of(traced, batch_argnums)
    found = split(traced.graph, count, leaves, per_microbatch=per_microbatch, sweeps=sweeps, shards=shards)
    return SplitStep(traced, Programs(found), unrolled)


def _leaves_of(traced: Traced, argnums: Sequence[int]) -> tuple[int, ...]:
    """Positions of the leaves of some positional arguments."""
    args, _ = jax.tree.unflatten(traced.in_tree, range(len(traced.in_avals)))
    unknown = [n for n in argnums if not 0 <= n < len(args)]
    if unknown:
        raise ArgumentError(f"batch_argnums={tuple(argnums)}: there is no traced argument {unknown[0]}")
    return tuple(leaf for n in argnums for leaf in jax.tree.leaves(args[n]))


# Totals


@dataclass(frozen=True, eq=False)
class Accumulator:
    """How the parts of one total come together: (carry, part) -> (carry, what is stacked), and the end of it.

    Attributes:
        zero: gives the carry before all parts; None where parts are stacked in place of added up.
        add, end: the two.
    """

    zero: Callable[[], Any] | None
    add: Callable[[Any, Any], tuple[Any, Any]]
    end: Callable[[Any, Any], Any]

    @property
    def stacks(self) -> bool:
        """Parts are kept one by one."""
        return self.zero is None

    @property
    def begin(self) -> Any:
        """The carry before all parts; None where they are stacked."""
        return None if self.zero is None else self.zero()


#: (shape, dtype, state) of the whole -> how its parts come together.
_Made = Callable[[tuple[int, ...], Any, State], Accumulator]


def _summed(shape: tuple[int, ...], dtype: Any, state: State) -> Accumulator:
    wide = part_dtype(dtype, SUM)
    zero = partial(jnp.zeros, shape, wide)
    return Accumulator(zero, lambda c, p: (c + p.astype(wide), None), lambda c, _: c.astype(dtype))


def _folded(combine: Callable[[Any, Any], Any], neutral: Callable[[Any], Any]) -> _Made:
    """Parts combined by an operation of which `neutral` gives the neutral element of a dtype."""

    def made(shape: tuple[int, ...], dtype: Any, state: State) -> Accumulator:
        zero = partial(jnp.full, shape, neutral(dtype), dtype)
        return Accumulator(zero, lambda c, p: (combine(c, p), None), lambda c, _: c)

    return made


def _least(dtype: Any) -> Any:
    """What loses against everything as a maximum: -inf, or the least number where the dtype has none."""
    return _extreme(dtype, -1)


def _largest(dtype: Any) -> Any:
    return _extreme(dtype, 1)


def _extreme(dtype: Any, sign: int) -> Any:
    if dtype == jnp.bool_:
        return sign > 0
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.iinfo(dtype).min if sign < 0 else jnp.iinfo(dtype).max
    infinity = np.asarray(sign * np.inf).astype(dtype)  # some of eight bits have no infinity, it becomes nan
    return infinity if np.isinf(infinity) else sign * float(jnp.finfo(dtype).max)


def _all_bits(dtype: Any) -> Any:
    return np.invert(np.zeros((), dtype))


def _stacked(shape: tuple[int, ...], dtype: Any, state: State) -> Accumulator:
    assert isinstance(state, Split)
    return Accumulator(None, lambda c, p: (None, p), lambda _, blocks: untake(blocks, state))


def _last(shape: tuple[int, ...], dtype: Any, state: State) -> Accumulator:
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return Accumulator(None, lambda c, p: (None, p), lambda _, blocks: blocks[-1])
    return Accumulator(partial(jnp.zeros, shape, dtype), lambda c, p: (p, None), lambda c, _: c)


_ACCUMULATORS: Mapping[str, _Made] = {
    "sum": _summed,
    "max": _folded(jnp.maximum, _least),
    "min": _folded(jnp.minimum, _largest),
    "and": _folded(jnp.bitwise_and, _all_bits),
    "or": _folded(jnp.bitwise_or, lambda dtype: np.zeros((), dtype)),
    "concatenate": _stacked,
    "last": _last,
}


# Emission


@dataclass(frozen=True, eq=False)
class _Scope:
    """Values of one program, or of one body in it, while it is being traced.

    Attributes:
        states: states of the values in it; of those it does not name, whole values are emitted.
        outer: whole values from outside.
        local: values of this microbatch; grows.
        index: the microbatch.
    """

    graph: Graph
    flat: Flat
    states: Mapping[int, State]
    count: int
    outer: Values
    local: dict[int, Any]
    index: Any

    def run(self, placed: Sequence[Placed], wanted: Sequence[int], depth: int = 0) -> None:
        """Bind operations in order; `wanted`: values that are read afterwards."""
        reads = Counter(a for p in placed for a in p.op.inputs if isinstance(a, int))
        reads.update(wanted)
        for _, group in itertools.groupby(placed, lambda p: self._around(p.op, depth)):
            body = list(group)
            around = self.flat.remat.get(body[0].op.index, ())
            if len(around) > depth:
                inside = Counter(a for p in body for a in p.op.inputs if isinstance(a, int))
                kept = [v for p in body for v in p.op.outputs if reads[v] > inside[v]]
                self._rematerialise(around[depth], body, kept, depth)
            else:
                for one in body:
                    self._bind(one)

    def _around(self, op: Op, depth: int) -> int:
        """Index of the rematerialisation at this depth around an operation, -1 if there is none."""
        around = self.flat.remat.get(op.index, ())
        return around[depth].index if len(around) > depth else -1

    def _rematerialise(self, op: Op, body: Sequence[Placed], kept: Sequence[int], depth: int) -> None:
        inside = {v for p in body for v in p.op.outputs}
        reads = [(i in p.outer, a) for p in body for i, a in enumerate(p.op.inputs) if isinstance(a, int)]
        outer = list(dict.fromkeys(v for whole, v in reads if whole))
        local = [v for v in dict.fromkeys(v for whole, v in reads if not whole) if v not in inside]

        def emitted(outer_arrays: Sequence[Any], local_arrays: Sequence[Any], index: Any) -> list[Any]:
            values = dict(zip(local, local_arrays, strict=True))
            around = dict(zip(outer, outer_arrays, strict=True))
            scope = _Scope(self.graph, self.flat, self.states, self.count, around, values, index)
            scope.run(body, kept, depth + 1)
            return [values[v] for v in kept]

        operands = ([self.outer[v] for v in outer], [self.local[v] for v in local], self.index)
        flat, tree = jax.tree.flatten(operands)
        with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
            results = jax_compat.rematerialised(op.equation, lambda *xs: emitted(*jax.tree.unflatten(tree, xs)), flat)
        self.local.update(zip(kept, results, strict=True))

    def _bind(self, placed: Placed) -> None:
        op, found = placed.op, placed.outcome
        with jax_compat.emitting(op.equation.source_info, op.name_stack, op.tag):
            operands = [self._read(placed, i, atom) for i, atom in enumerate(op.inputs)]
            if found is None:
                results = jax_compat.bind(op.equation, operands)
            elif found.body is not None:
                results = _REGIONS[op.name](self, op, found.body, operands)
            elif found.block is not None:
                results = [_SOURCES.get(op.name, _made_whole)(op, operands, found.block, self.count, self.index)]
            elif _sums_in_single(op, found):
                results = _summed_in_single(op, found, operands)
            else:
                params = {**op.params, **found.params}
                results = jax_compat.bind(op.equation.replace(params=params), operands)
        for value, array in zip(op.outputs, results, strict=True):
            self._check(op, value, array)
            self.local[value] = array

    def _read(self, placed: Placed, position: int, atom: Atom) -> Any:
        if not isinstance(atom, int):
            return atom.value
        array = (self.outer if position in placed.outer else self.local)[atom]
        if position in placed.own and self.states[atom] == SUM:
            array = (array * np.asarray(self.count, array.dtype)).astype(jnp.dtype(self.graph.types[atom].dtype))
        if placed.outcome is None:
            return array
        cut = placed.outcome.cuts.get(position)
        array = array if cut is None else take(array, cut, self.count, self.index)
        if position in placed.outcome.columns:
            component, known = placed.outcome.columns[position]
            array = array.at[..., component].set(known.astype(array.dtype))
        return array

    def _check(self, op: Op, value: int, array: Any) -> None:
        whole = self.graph.types[value].shape
        state = self.states.get(value, INVARIANT)
        wanted = local_shape(whole, state, self.count)
        kept = str(part_dtype(array.dtype, state)) == str(array.dtype)
        if tuple(array.shape) != wanted or not kept:
            at, got = f" at {op.source}" if op.source else "", f"{array.dtype}{array.shape}"
            raise GraphError(f"{op.name}{at} gives {got} on a microbatch, its rule says {wanted} ({state})")

    # Bodies

    def _within(self, body: Body, arrays: Sequence[Any]) -> list[Any]:
        """Results of a body on blocks."""
        local = dict(zip(body.region.inputs, entering(arrays, body.inputs), strict=True))
        local.update(body.flat.constants)
        scope = _Scope(self.graph, body.flat, body.states, self.count, {}, local, self.index)
        placed = [Placed(op, outcome=body.outcomes[op.index]) for op in body.flat.ops]
        scope.run(placed, [a for a in body.flat.outputs if isinstance(a, int)])
        return [scope.handed(a, state) for a, state in zip(body.flat.outputs, body.outputs, strict=True)]

    def handed(self, atom: Atom, wanted: State) -> Any:
        """A body's result in the state in which it is handed on."""
        array = self.local[atom] if isinstance(atom, int) else atom.value
        if isinstance(wanted, Split) and isinstance(state_of(atom, self.states), Invariant):
            return take(jnp.asarray(array), wanted, self.count, self.index)
        return entering([array], [wanted])[0]

    def _running(self, body: Body) -> control_flow.Body:
        return lambda arrays: self._within(body, arrays)

    def scan(self, op: Op, body: Body, operands: Sequence[Any]) -> list[Any]:
        return control_flow.scan(op, entering(operands, body.inputs), self._running(body))

    def while_loop(self, op: Op, bodies: tuple[Body, Body], operands: Sequence[Any]) -> list[Any]:
        first = op.params["cond_nconsts"]
        operands = [*operands[:first], *entering(operands[first:], bodies[1].inputs)]
        test, body = map(self._running, bodies)
        return control_flow.while_loop(op, operands, test, body, batched=False)  # of others none runs on blocks

    def cond(self, op: Op, bodies: Sequence[Body], operands: Sequence[Any]) -> list[Any]:
        return control_flow.cond(operands, [self._running(body) for body in bodies])


def entering(arrays: Sequence[Any], states: Sequence[State]) -> list[Any]:
    """Arrays as a body takes them in these states: zeros that become sums of floats below 32 bits in float32."""
    found = zip(arrays, states, strict=True)
    return [_in_single(x) if s == SUM else x for x, s in found]


def _in_single(array: Any) -> Any:
    """A float of less than 32 bits in float32, anything else as it is."""
    return jnp.asarray(array, jnp.float32) if _is_narrow(array) else array


def _is_narrow(array: Any) -> bool:
    dtype = jax.typeof(array).dtype
    return part_dtype(dtype, SUM) != dtype


_REGIONS: Mapping[str, Callable[[_Scope, Op, Any, Sequence[Any]], list[Any]]] = {
    "scan": _Scope.scan,
    "while": _Scope.while_loop,
    "cond": _Scope.cond,
}


# Parts of sums in floats of less than 32 bits


def _sums_in_single(op: Op, found: Outcome) -> bool:
    """True if the operation makes parts that are kept in float32, of operands that need not be."""
    if found.results != (SUM,) or (op.name in RULES and RULES[op.name].each):
        return False
    (result,) = op.equation.outvars
    return part_dtype(result.aval.dtype, SUM) != result.aval.dtype


def _summed_in_single(op: Op, found: Outcome, operands: Sequence[Any]) -> list[Any]:
    """The operation with its result in float32.

    Products of two narrow operands stay such, with a wide result, where devices have them. Convolutions need not be
    among these: they round each part.
    """
    parameter, params = _RESULT_DTYPE.get(op.name), {**op.params, **found.params}
    narrow = all(map(_is_narrow, operands))
    if op.name == "conv_general_dilated" and narrow:
        return [_in_single(x) for x in jax_compat.bind(op.equation.replace(params=params), operands)]
    if parameter is None or not narrow:
        operands = [_in_single(x) for x in operands]
    if op.name == "scatter-add":  # its parameters hold a jaxpr for the narrow type
        return [_scatter_add(operands, params)]
    wide = {} if parameter is None else {parameter: np.dtype(np.float32)}
    return jax_compat.bind(op.equation.replace(params={**params, **wide}), operands)


#: Parameter that holds the dtype of a result.
_RESULT_DTYPE: Mapping[str, str] = {
    "convert_element_type": "new_dtype",
    "dot_general": "preferred_element_type",
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


# Blocks of what reads nothing split


def _made_whole(op: Op, operands: Sequence[Any], state: Split, count: int, index: Any) -> Any:
    return take(jax_compat.bind(op.equation, operands)[0], state, count, index)


def _random_bits(op: Op, operands: Sequence[Any], state: Split, count: int, index: Any) -> Any:
    """Threefry's bits for the counters of one block: counter i, of 64 bits, is the element's position in the whole."""
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
    bits = getattr(jnp, f"uint{width}")
    return words[0].astype(bits) << 32 | words[1].astype(bits) if width == 64 else (words[0] ^ words[1]).astype(bits)


_SOURCES: Mapping[str, Callable[[Op, Sequence[Any], Split, int, Any], Any]] = {"random_bits": _random_bits}
