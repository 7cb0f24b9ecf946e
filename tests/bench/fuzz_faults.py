"""Faults that were mended, put back one at a time: does `bench fuzz` find each, and after how many programs?

    .venv/bin/python -m tests.bench.fuzz_faults [--programs 5000] [--seed 0] [--fault PATTERN] [--largest 1]

A fault of the microbatch pass changes few programs: what a program does in microbatches is analysed with the fault and
without, and only where the two differ (`fingerprint`) is it run. A fault is found where a program fails that does not
fail without it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autopar import jax_compat
from autopar.bench.fuzz.campaign import flags
from autopar.bench.worker import cpu_devices
from autopar.codegen import emitter
from autopar.errors import AutoparError
from autopar.passes.microbatch import constant_indices, grouped, loop, programs
from autopar.passes.microbatch import split as splitting
from autopar.passes.microbatch.microbatches import Microbatches
from autopar.passes.microbatch.rules import blockwise, gather, table
from autopar.passes.microbatch.rules.types import ANY, ORDERED, Dtypes, OpRules, PartialOperands
from autopar.passes.microbatch.split import split
from autopar.passes.microbatch.states import REDUCTION_KINDS
from autopar.passes.op_groups import merge as op_groups
from autopar.plans import cache as plan_cache

#: What a fault puts in place: (holder, name, value); a holder is a module or a dict.
Patch = tuple[Any, str, Any]


@dataclass(frozen=True)
class Fault:
    """A fault by its title.

    Attributes:
        mode: of `bench fuzz`, in which it shows.
        patches: gives what it puts in place.
        source: what a program's source has to match for it to show.
        analysed: it shows in what the microbatch pass decides.
    """

    title: str
    mode: str
    patches: Callable[[], Sequence[Patch]]
    source: str = ""
    analysed: bool = True


def edited(function: Callable[..., Any], before: str, after: str) -> Any:
    """A function with a piece of its source replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    assert before in source, f"{function.__name__} has no {before!r} any more"
    names = dict(vars(inspect.getmodule(function)))
    exec(compile(source.replace(before, after), f"<{function.__name__}>", "exec"), names)
    return names[function.__name__]


def rule(name: str, **changed: Any) -> Patch:
    return (table.RULES, name, dataclasses.replace(table.RULES[name], **changed))


BOOLEAN = Dtypes("any", ORDERED.contains, "the fault: bits are lost")


def bits_as_extremes() -> Sequence[Patch]:
    both = (("reduce_or", "max"), ("reduce_and", "min"))
    return [(table.RULES, name, OpRules(blockwise.reduction(kind), {kind: BOOLEAN})) for name, kind in both]  # type: ignore[arg-type]


def indices_that_do_not_wrap() -> Sequence[Patch]:
    same = lambda op, x: x.astype("int64")  # noqa: E731
    folded = constant_indices._FOLDED
    return [(constant_indices, "_convert", same), (folded, "convert_element_type", same)]


def rounded_parts() -> Sequence[Patch]:
    return [(loop, "part_dtype", lambda dtype, state: dtype)]


#: Where parts of sums are read: elsewhere totals are complete before anything reads them.
LOOPS = "lax.scan|while_loop|lax.cond|lax.switch"
# Checks of sorted rows
COUNTED = "(v, keys_of[counted]) for v in chain if counted in keys_of"
ANY_KEYS = "(v, k) for v in chain for k in keys_of.values()"
OWN_BLOCK = "own.min(initial=0) >= 0 and own.max(initial=0) < inner and"

FAULTS = (
    Fault("or and and of integers over the batch are max and min", "microbatches", bits_as_extremes),
    Fault("known indices do not wrap in their type", "microbatches", indices_that_do_not_wrap),
    Fault(
        "a fill value is added once per microbatch",
        "microbatches",
        lambda: [rule("gather", partial_operands=(PartialOperands("pi", REDUCTION_KINDS, ANY),))],
        LOOPS,
    ),
    Fault(
        "a sum that wraps is converted before it is complete",
        "microbatches",
        lambda: [(table, "homomorphic", lambda kind, before, after: kind == "sum" or before == after)],
        LOOPS,
    ),
    Fault(
        "bits are folded along the dimension that is cut",
        "microbatches",
        lambda: [rule("bitcast_convert_type", split=blockwise.elementwise)],
        "bitcast_convert_type",
    ),
    Fault(
        "the second loop does not see a total that it reads as it is",
        "microbatches",
        lambda: [(programs, "_by_segment", edited(programs._by_segment, "[1] in (1, 2)", "[1] in (2,)"))],
    ),
    Fault(
        "parts of sums in narrow floats are rounded",
        "microbatches",
        rounded_parts,
        f"({LOOPS})(.|\\n)*float(16|8)|float(16|8)(.|\\n)*({LOOPS})",
        analysed=False,
    ),
    Fault(
        "rows of another block are taken for its own",
        "microbatches",
        lambda: [
            (gather, "_own_block_indices", edited(gather._own_block_indices, "(blocks[0] != own_block).any()", "False"))
        ],
        "arange",
    ),
    Fault(
        "a part of integers is divided",
        "microbatches",
        lambda: [rule("div", partial_operands=table._linear_in("pi"))],
        LOOPS,
    ),
    Fault(
        "a constant is added to every part",
        "microbatches",
        lambda: [rule("add", partial_operands=table._linear_in("pi ip pp"))],
        LOOPS,
    ),
    Fault(
        "reductions that no all-reduce knows are cut over devices",
        "meshes",
        lambda: [(op_groups, "combines", lambda backend, operation, dtype: True)],
        "reduce_or|reduce_and|complex",
        analysed=False,
    ),
    Fault(
        "convolutions in groups are left to the compiler",
        "meshes",
        lambda: [(emitter, "is_grouped", lambda op: False)],
        r"feature_group_count=(?!1\b)|vmap\(jax\.grad",
        analysed=False,
    ),
    Fault(
        "numbers that do not sort the rows are counted as their groups",
        "microbatches",
        lambda: [(splitting, "find_groups", edited(grouped.find_groups, COUNTED, ANY_KEYS))],
        "ragged_dot",
    ),
    Fault(
        "sorted rows are read from another block",
        "microbatches",
        lambda: [(grouped, "_target", edited(grouped._target, OWN_BLOCK, "True or"))],
        "ragged_dot",
    ),
    Fault(
        "sorted rows meet what belongs to their place",
        "microbatches",
        lambda: [(grouped.Groups, "is_uniform", lambda groups, atom, dim: True)],
        "ragged_dot",
    ),
    Fault(
        "sorted rows meet their positions",
        "microbatches",
        lambda: [(grouped, "_rowwise", edited(grouped._rowwise, "replace(s, dim=0) != kind", "False"))],
        "ragged_dot",
    ),
    Fault(
        "layouts of arguments below a byte are checked",
        "meshes",
        lambda: [(jax_compat, "compiled", lambda lowered, options=None: lowered.compile(compiler_options=options))],
        "int4",
        analysed=False,
    ),
)


@contextlib.contextmanager
def put_back(fault: Fault) -> Iterator[None]:
    """The fault in place."""
    undo: list[tuple[Any, str, Any]] = []
    for holder, name, value in fault.patches():
        names = holder if isinstance(holder, dict) else vars(holder)
        undo.append((holder, name, names[name]))
        _set(holder, name, value)
    try:
        yield
    finally:
        for holder, name, value in reversed(undo):
            _set(holder, name, value)


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


# What a program does in microbatches


def fingerprint(value: Any) -> Any:
    """What was decided, comparable: operations by their index, arrays by their bytes."""
    if isinstance(value, Microbatches):
        placed = [(p.op.index, p.outer, p.own_totals, fingerprint(p.rule_result)) for p in _placed(value)]
        return placed, [[(t.value, t.combine) for t in s.totals] for s in value.loops]
    if hasattr(value, "rule_results"):  # a body
        return (
            sorted((i, fingerprint(o)) for i, o in value.rule_results.items()),
            repr(value.input_states),
            repr(value.output_states),
        )
    if hasattr(value, "local_indices"):  # a rule result
        indices = [(i, component, array.tobytes()) for i, (component, array) in value.local_indices.items()]
        return repr(value.results), repr(value.slices), repr(value.params), indices, fingerprint(value.body)
    return [fingerprint(v) for v in value] if isinstance(value, tuple | list) else repr(value)


def _placed(microbatches: Microbatches) -> Iterator[Any]:
    yield from microbatches.prologue
    for accumulation in microbatches.loops:
        yield from (*accumulation.body, *accumulation.after)


def decided(graph: Any, batch: Any, count: int) -> Any:
    """The fingerprint of a step in so many microbatches; of an error, its kind."""
    try:
        return fingerprint(split(graph, count, batch))
    except AutoparError as error:
        return type(error).__name__
    except Exception as error:  # a fault may end in any
        return repr(error)


# Finding them


@dataclass(frozen=True)
class Found:
    """When a fault was found: after how many programs, the seed, and what failed."""

    title: str
    programs: int
    seed: int
    failures: dict[str, str]


def find(faults: Sequence[Fault], seeds: range, largest: int, tell: Callable[[str], None]) -> list[Found]:
    """Go through the seeds until every fault is found."""
    import jax

    from autopar.bench.fuzz import case
    from autopar.bench.fuzz.generator.generate import program
    from autopar.ir.trace import trace

    left, found_faults = list(faults), list[Found]()
    for number, seed in enumerate(seeds, 1):
        if not left:
            break
        drawn = program(seed, largest)
        step = drawn.compiled()
        traced = trace(step.function, *step.arguments)
        batch: Any = drawn.batch or "auto"
        batch = batch if isinstance(batch, str) else loop._leaves_of(traced, batch)
        right = [decided(traced.graph, batch, n) for n in case.COUNTS]
        for fault in list(left):
            if not re.search(fault.source, drawn.source()):
                continue
            with put_back(fault):
                if fault.analysed and [decided(traced.graph, batch, n) for n in case.COUNTS] == right:
                    continue
                row = case.run(drawn, [fault.mode])
            if row.failures and not case.run(drawn, [fault.mode]).failures:
                left.remove(fault)
                found_faults.append(Found(fault.title, number, seed, dict(row.failures)))
                tell(f"{fault.title}: program {number}, seed {seed}: {next(iter(row.failures.values()))[:90]}")
        if number % 50 == 0:
            tell(f"{number} programs, {len(left)} faults left")
        if seed % case.CLEARED == 0:
            jax.clear_caches()
    for fault in left:
        tell(f"{fault.title}: NOT found in {len(seeds)} programs")
    return found_faults


def main(arguments: Sequence[str]) -> int:
    """Go through the faults; status 1 if one is not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--largest", type=int, default=1)
    parser.add_argument("--fault", default="")
    chosen = parser.parse_args(arguments)
    faults = [fault for fault in FAULTS if re.search(chosen.fault, fault.title)]
    seeds = range(chosen.seed, chosen.seed + chosen.programs)
    with plan_cache.off():  # a plan made with a fault would serve the run without it
        found_faults = find(faults, seeds, chosen.largest, lambda text: print(text, flush=True))
    return 0 if len(found_faults) == len(faults) else 1


if __name__ == "__main__":
    import jax

    os.environ["XLA_FLAGS"] = flags()
    cpu_devices(8)
    jax.config.update("jax_enable_x64", True)
    sys.exit(main(sys.argv[1:]))
