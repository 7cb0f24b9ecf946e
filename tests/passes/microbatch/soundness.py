"""Every line of the table of the microbatch analysis against the whole operation: equal, or refused.

    operation    the uses of `samples.py`
    operands     invariant, zero, split along every dimension (also with an outer stride), a part of every kind
    dtypes       `samples.DTYPES`, as far as the operation takes them
    place        `PLACES`: the step itself, bodies of scan, while, cond, custom_jvp, custom_vjp, jax.checkpoint
    data         small halves, wrap-around, nan, inf, -0, indices in and out of bounds
    extents      `samples.EXTENTS`: even ones, blocks of one, dimensions of one and of none

What the analysis refuses is not run: such a step runs it on the whole batch. What it accepts runs in two microbatches,
many operations in one program, beside the whole. Integers are equal exactly, floats to rounding. Where an operation has
parts of a sum as operands and the whole is no finite number, it is enough that ours is none (see
`autopar.passes.microbatch.rules.table`). So it is where a complex number is not finite: which of its parts are
infinite, and which are nan, depends on the kernel that multiplies.

    python -m tests.passes.microbatch.soundness [--dtype float32] [--place scan] [--primitive gather] [--share 0.1]

runs all, or a part, prints what differs and ends with 1 if anything does.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.ir.graph import Graph, Region
from autopar.ir.op_sets import ATTENTION
from autopar.ir.trace import trace
from autopar.passes.microbatch import regions
from autopar.passes.microbatch.loop import StepPrograms
from autopar.passes.microbatch.regions import BlockBody
from autopar.passes.microbatch.rules import table
from autopar.passes.microbatch.rules.types import Operands, OpRules, PartialOperands
from autopar.passes.microbatch.split import split
from autopar.passes.microbatch.states import (
    INVARIANT,
    REDUCTION_KINDS,
    ZERO,
    Invariant,
    Partial,
    ReductionKind,
    Split,
    State,
)
from tests.passes.microbatch.samples import DTYPES, EXTENTS, USES, Use

COUNT = 2
#: Operands in more states than that are drawn at random.
MOST_STATES = 400
#: Operations in one program.
CHUNK = 60
#: Relative error for which a float counts as equal, in units of its rounding, and the same for matrix decompositions.
ROUNDINGS = 16
DECOMPOSITIONS = (
    "cholesky",
    "triangular_solve",
    "tridiagonal_solve",
    "lu",
    "qr",
    "eigh",
    "svd",
    "householder_product",
    "fft",
)

Line = tuple[str, str]


# Data


def data(shape: Sequence[int], kind: str, dtype: str, seed: int, most: int = 1) -> np.ndarray[Any, Any]:
    """An array that is hard on rules; `kind` as after the colon of a shape, `most` bounds indices."""
    rng = np.random.default_rng(seed)
    if kind == "p":
        return rng.integers(0, 2, shape).astype(bool)
    if kind == "i":
        return rng.integers(-2, most + 3, shape).astype(np.int32)
    if kind == "r":
        return rng.integers(0, max(most, 1), shape).astype(np.int32)
    if kind == "d":
        return np.broadcast_to(np.arange(shape[-1] if shape else 1), shape).astype(np.int32)
    if kind in ("k", "u"):
        return rng.integers(0, 1 << 32, shape, np.uint32)
    return _numbers(rng, shape, jnp.dtype(dtype))


def _numbers(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    if jnp.issubdtype(dtype, np.integer):
        info = jnp.iinfo(dtype)
        small = rng.integers(max(info.min, -3), 4, shape)
        extreme = rng.choice([info.min, info.max, info.max // 2, info.min // 2], shape)
        return np.where(rng.random(shape) < 0.4, extreme, small).astype(dtype)
    halves = rng.integers(-4, 5, shape) / 2
    special = rng.choice([np.nan, np.inf, -np.inf, -0.0], shape)
    return np.where(rng.random(shape) < 0.08, special, halves).astype(dtype)


# Operands in states


class Operand(NamedTuple):
    """One operand of a use: its whole shape, what it holds, and the most that an index may be."""

    shape: tuple[int, ...]
    kind: str
    most: int


def operands_of(use: Use, extents: Mapping[str, int]) -> tuple[Operand, ...]:
    parsed: list[Operand] = []
    for text in use.operands:
        letters, _, kind = text.partition(":")
        shape = tuple(int(x) if x.isdigit() else extents[x] for x in letters)
        most = parsed[0].shape[-1 if use.primitive.startswith("scatter") and len(shape) else 0] if parsed else 1
        parsed.append(Operand(shape, kind, min(most, *(parsed[0].shape or (1,))) if parsed else 1))
    return tuple(parsed)


def states_of(operand: Operand, dtype: str) -> list[State]:
    """States in which an operand is tried."""
    blocks = ((d, n, outer) for d, n in enumerate(operand.shape) for outer in (1, 2))
    # blocks with an outer stride come by a reshape, which says nothing of arrays without elements
    cut: list[State] = [
        Split(d, outer)
        for d, n, outer in blocks
        if n and n % (outer * COUNT) == 0 and (outer == 1 or math.prod(operand.shape))
    ]
    if operand.kind:
        return [INVARIANT, *cut, *([Partial("sum")] if operand.kind in "iu" else [])]
    return [INVARIANT, ZERO, *cut, *(Partial(k) for k in REDUCTION_KINDS if has_parts(k, dtype))]


def has_parts(kind: ReductionKind, dtype: str) -> bool:
    entry = table.RULES[f"reduce_{kind}"]
    return entry.partial_results[kind].contains(jnp.dtype(dtype))


def leaf(operand: Operand, state: State) -> tuple[int, ...]:
    """Shape of the argument from which an operand in a state is made; the batch comes first."""
    if isinstance(state, Partial):
        return (2 * COUNT, *operand.shape)
    if isinstance(state, Split):
        rest = (n for d, n in enumerate(operand.shape) if d != state.dim)
        return (operand.shape[state.dim] // state.outer, *((state.outer,) if state.outer > 1 else ()), *rest)
    return operand.shape


def made(array: Any, operand: Operand, state: State) -> Any:
    """The operand in its state, from its argument."""
    if isinstance(state, Partial):
        return getattr(jax.lax, f"reduce_{state.kind}")(array, (0,))
    if isinstance(state, Split):
        if state.outer > 1:
            array = jnp.moveaxis(jnp.moveaxis(array, 1, 0), (0, 1), (state.dim, state.dim + 1))
            return array.reshape(operand.shape)
        return jnp.moveaxis(array, 0, state.dim)
    return jnp.zeros(operand.shape, array.dtype) if state == ZERO else array


# Cases


@dataclass(frozen=True, eq=False)
class Accepted:
    """A use whose operands are in states in which the analysis lets it run on blocks.

    Attributes:
        lines: lines of the table that it takes.
    """

    number: int
    use: Use
    dtype: str
    extents: str
    operands: tuple[Operand, ...]
    states: tuple[State, ...]
    lines: tuple[Line, ...]

    @property
    def name(self) -> str:
        states = ", ".join(map(str, self.states))
        return f"{self.use.primitive} (use {self.number}) of {self.dtype} {self.use.operands} {self.extents}: {states}"

    @property
    def sums_partial(self) -> bool:
        """Parts of sums are operands."""
        return Partial("sum") in self.states

    def arrays(self) -> list[np.ndarray[Any, Any]]:
        seed = zlib.crc32(self.name.encode())
        shapes = zip(self.operands, map(leaf, self.operands, self.states), strict=True)
        return [data(shape, o.kind, self.dtype, seed + i, o.most) for i, (o, shape) in enumerate(shapes)]

    def run(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        made_operands = map(made, arrays, self.operands, self.states)
        return tuple(jax.tree.leaves(self.use.call(EXTENTS[self.extents], *made_operands)))


def accepted(numbered: tuple[int, Use], dtype: str, extents: str) -> list[Accepted]:
    """The states of a use's operands in which it may run on blocks; none where it does not take the dtype."""
    number, use = numbered
    operands = operands_of(use, EXTENTS[extents])
    graph = _traced(use, operands, dtype, extents)
    if graph is None:
        return []
    region = Region("use", graph.inputs, graph.ops, graph.outputs, graph.constants)
    product = list(itertools.product(*(states_of(o, dtype) for o in operands)))
    if len(product) > MOST_STATES:
        rng = np.random.default_rng(zlib.crc32(f"{use.primitive}{dtype}".encode()))
        product = [product[i] for i in sorted(rng.choice(len(product), MOST_STATES, replace=False))]
    accepted_cases: list[Accepted] = []
    for states in product:
        zeros = ZERO in states and not any(isinstance(s, Partial) for s in states) and use.primitive != "scatter-add"
        if zeros or all(isinstance(s, Invariant) for s in states):  # beside blocks, zeros are like other invariants
            continue
        body = regions.analyse_region(graph, region, states, COUNT)
        if isinstance(body, BlockBody):
            lines = tuple(dict.fromkeys(lines_of(graph, body)))
            accepted_cases.append(Accepted(number, use, dtype, extents, operands, states, lines))
    return accepted_cases


@cache
def _traced(use: Use, operands: tuple[Operand, ...], dtype: str, extents: str) -> Graph | None:
    """The use on whole operands; None where it does not take the dtype."""
    arrays = [data(o.shape, o.kind, dtype, 0, o.most) for o in operands]
    try:
        return trace(lambda *xs: use.call(EXTENTS[extents], *xs), *arrays).graph
    except (TypeError, ValueError, NotImplementedError, AssertionError):
        return None


# Lines of the table


def lines_of(graph: Graph, body: BlockBody) -> Iterator[Line]:
    """The lines that the operations of a body take."""
    for op in body.flat.ops:
        result = body.rule_results[op.index]
        if result is not None and op.name in table.RULES:
            states = tuple(regions.state_of(a, body.states) for a in op.inputs)
            operands = Operands(op, regions.shapes(graph, op.inputs), regions.shapes(graph, op.outputs), states, COUNT)
            yield op.name, line_of(table.RULES[op.name], operands, result.results)


def line_of(entry: OpRules, operands: Operands, results: Sequence[State]) -> str:
    if entry.identity:
        return "identity"
    kinds = [s.kind for s in operands.states if isinstance(s, Partial)]
    if kinds:
        pattern = next(p for p in entry.partial_operands if table.apply_partial(entry, p, operands) is not None)
        return _pattern_line(pattern, kinds[0])
    result_kinds = [s.kind for s in results if isinstance(s, Partial)]
    return f"partial {result_kinds[0]}" if result_kinds else "split"


def _pattern_line(pattern: PartialOperands, kind: ReductionKind) -> str:
    return f"{pattern.pattern} {kind}"


def lines() -> dict[Line, None]:
    """All lines of the table but those of cuDNN, which runs on GPUs alone (tests/rules/test_cudnn.py)."""
    all_lines: dict[Line, None] = {}
    for name, entry in ((name, entry) for name, entry in table.RULES.items() if name not in ATTENTION):
        all_lines.update(dict.fromkeys((name, "identity") for _ in range(entry.identity)))
        all_lines.update(dict.fromkeys((name, "split") for _ in range(entry.split is not None)))
        all_lines.update(dict.fromkeys((name, f"partial {kind}") for kind in entry.partial_results))
        all_lines.update(
            dict.fromkeys((name, _pattern_line(p, kind)) for p in entry.partial_operands for kind in p.kinds)
        )
    return all_lines


# Places: a function of arrays, and these


Function = Callable[[Any], Any]


def _top(run: Function, arrays: Any) -> Any:
    return run(arrays)


def _scan(run: Function, arrays: Any) -> Any:
    """Stacked results and carries of two iterations."""

    def iteration(carry: Any, _: Any) -> Any:
        results = run(arrays)
        return results, results

    return jax.lax.scan(iteration, _zeros(run, arrays), None, length=2)


def _while(run: Function, arrays: Any) -> Any:
    return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, run(arrays)), (0, _zeros(run, arrays)))[1]


def _cond(run: Function, arrays: Any) -> Any:
    """Its other branch gives zeros."""
    return jax.lax.cond(jnp.arange(2)[1] > 0, lambda: run(arrays), lambda: _zeros(run, arrays))


def _zeros(run: Function, arrays: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, arrays))


def _custom_jvp(run: Function, arrays: Any) -> Any:
    function = jax.custom_jvp(run)
    function.defjvp(lambda primals, tangents: (run(*primals), _zeros(run, *primals)))
    return function(arrays)


def _custom_vjp(run: Function, arrays: Any) -> Any:
    function = jax.custom_vjp(run)
    function.defvjp(lambda xs: (run(xs), xs), lambda xs, _: (xs,))
    return function(arrays)


def _remat(run: Function, arrays: Any) -> Any:
    return jax.checkpoint(run)(arrays), _scan(jax.checkpoint(run), arrays)


PLACES: Mapping[str, Callable[[Function, Any], Any]] = {
    "top": _top,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
    "remat": _remat,
}
#: Place -> the loop or branch that has to run on blocks there.
LOOPS: Mapping[str, str] = {"scan": "scan", "while": "while", "cond": "cond", "remat": "scan"}


# Comparison


def differing(cases: Sequence[Accepted], place: str) -> list[str]:
    """What two microbatches give other than the whole, for cases in a place, less those that the backend lacks.

    All in one program; where that fails, or its body does not run on blocks, in two.
    """
    try:
        messages = _differing(cases, place)
    except Exception:
        if len(cases) > 1:
            messages = None
        elif _runs(cases, place):
            raise
        else:
            return []
    if messages is None and len(cases) == 1:
        return [f"{place}: {cases[0].name}: the operation may run on blocks, and the body that it is in may not"]
    middle = len(cases) // 2
    return messages if messages is not None else [*differing(cases[:middle], place), *differing(cases[middle:], place)]


def _runs(cases: Sequence[Accepted], place: str) -> bool:
    """True if the backend can run the cases undivided."""
    step, arguments = _step(cases, place)
    try:
        jax.block_until_ready(_jitted(step)(*arguments))
    except (TypeError, ValueError, OverflowError, NotImplementedError, jax.errors.JaxRuntimeError):
        return False
    return True


def _jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function, compiler_options=dict(jax_compat.quick_compilation()))


def _step(cases: Sequence[Accepted], place: str) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """The cases as a step of (invariant arguments, arguments that hold the batch), and such."""
    arrays = [case.arrays() for case in cases]
    batch = [_kept(c, xs, True) for c, xs in zip(cases, arrays, strict=True)]
    invariant = [_kept(c, xs, False) for c, xs in zip(cases, arrays, strict=True)]

    def run(arrays: Any) -> Any:
        return [c.run(_merged(c, i, b)) for c, i, b in zip(cases, *arrays, strict=True)]

    return lambda invariant, batch: PLACES[place](run, [invariant, batch]), (invariant, batch)


def _differing(cases: Sequence[Accepted], place: str) -> list[str] | None:
    """In one program; None if it does not run on blocks."""
    step, arguments = _step(cases, place)
    traced = trace(step, *arguments)
    first = len(jax.tree.leaves(arguments[0]))
    messages = split(traced.graph, COUNT, range(first, len(traced.in_avals)), min_loop_share=0.0)
    if any(p.op.name == LOOPS.get(place) for p in (*messages.prologue, *messages.epilogue)):
        return None
    programs = StepPrograms(messages)

    def both(*args: Any) -> Any:
        ours = programs.step(jax.tree.leaves(args))
        return jax.tree.unflatten(traced.out_tree, ours), step(*args)

    results = _jitted(both)(*arguments)
    pairs = zip(*(_results(place, tree) for tree in results), strict=True)
    return [message for got, expected in pairs for message in _compared(cases, place, got, expected)]


def _kept(case: Accepted, arrays: Sequence[Any], of_batch: bool) -> list[Any]:
    """The arrays that hold the batch, or the others; None for the rest."""
    return [x if of_batch == b else None for b, x in zip(_is_batch(case), arrays, strict=True)]


def _merged(case: Accepted, invariant: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
    return [b if of_batch else i for of_batch, i, b in zip(_is_batch(case), invariant, batch, strict=True)]


def _is_batch(case: Accepted) -> list[bool]:
    return [not isinstance(s, Invariant) for s in case.states]


def _results(place: str, tree: Any) -> list[Any]:
    """The results of all cases, as often as a place gives them."""
    if place == "scan":
        return list(tree)
    return [tree[0], *tree[1]] if place == "remat" else [tree]


def _compared(cases: Sequence[Accepted], place: str, got: Sequence[Any], expected: Sequence[Any]) -> Iterator[str]:
    for case, ours, whole in zip(cases, got, expected, strict=True):
        for a, b in zip(ours, whole, strict=True):
            if not equal(np.asarray(a), np.asarray(b), case):
                yield f"{place}: {case.name}: {_shown(a)} is not {_shown(b)}"


def _shown(x: Any) -> str:
    return " ".join(str(np.asarray(x)).split())[:160]


def equal(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], case: Accepted) -> bool:
    """Integers, booleans exactly; floats to rounding of their dtype, nan equal to nan."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return bool((a == b).all())
    unit = float(jnp.finfo(a.dtype).eps) * ROUNDINGS * (64 if case.use.primitive in DECOMPOSITIONS else 1)
    wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
    if wide is np.complex128:
        infinite = ~np.isfinite(b)
        if np.isfinite(a[infinite]).any():
            return False
        a, b = np.where(infinite, 0, a), np.where(infinite, 0, b)
    return all(
        _equal(part(a.astype(wide)), part(b.astype(wide)), unit, case.sums_partial) for part in (np.real, np.imag)
    )


def _equal(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], unit: float, sums_partial: bool) -> bool:
    finite = np.isfinite(b)
    with np.errstate(invalid="ignore"):
        near = np.abs(a - b) <= unit * (np.abs(b) + 1)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return bool(np.where(finite, near, same | (sums_partial & ~np.isfinite(a))).all())


# The command


def cases(dtypes: Sequence[str] = DTYPES, primitives: Sequence[str] = ()) -> Iterator[Accepted]:
    """Everything that the analysis accepts."""
    for dtype, extents in itertools.product(dtypes, EXTENTS):
        for numbered in enumerate(USES):
            if not primitives or numbered[1].primitive in primitives:
                yield from accepted(numbered, dtype, extents)


def sample(some_cases: Sequence[Accepted], share: float, seed: int) -> list[Accepted]:
    rng = np.random.default_rng(seed)
    return [case for case in some_cases if rng.random() < share]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Every line of the microbatch table against the whole operation.")
    parser.add_argument("--dtype", action="append", choices=DTYPES, default=[])
    parser.add_argument("--place", action="append", choices=list(PLACES), default=[])
    parser.add_argument("--primitive", action="append", default=[])
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chunk", type=int, default=CHUNK)
    args = parser.parse_args(argv)
    began, wrong, ran = time.time(), 0, 0
    for dtype in args.dtype or DTYPES:
        some_cases = sample(list(cases([dtype], args.primitive)), args.share, args.seed)
        for place in args.place or PLACES:
            for chunk in _chunks(some_cases, args.chunk):
                messages = differing(chunk, place)
                wrong, ran = wrong + len(messages), ran + len(chunk)
                print(*messages, sep="\n", end="\n" if messages else "", flush=True)
        print(f"{dtype}: {ran} cases so far, {wrong} differ, {time.time() - began:.0f} s", flush=True)
    return wrong > 0


def _chunks(some_cases: Sequence[Accepted], size: int) -> Iterator[Sequence[Accepted]]:
    return (some_cases[i : i + size] for i in range(0, len(some_cases), size))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    if folder := os.environ.get("AUTOPAR_TEST_JAX_CACHE"):
        jax.config.update("jax_compilation_cache_dir", folder)
    sys.exit(main())
