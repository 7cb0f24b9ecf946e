"""One program in parallel, against the plain step in x64.

    microbatches    in 2 and in 4, compiled together with the plain step
    stages          two stages under two schedules
    meshes          sharded over two meshes of 8 virtual devices, every other program in two microbatches: on one mesh
                    the examples come sharded, on the other the planner is free

A program counts as refused where autopar says why it does not run in microbatches or under a schedule, or where
`jax.jit` does not compile the plain step; any other error is a failure, as is a difference (`compare`).
"""

from __future__ import annotations

import faulthandler
import gc
import inspect
import json
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import PartitionSpec

import autopar
from autopar import jax_compat
from autopar.bench.equal.case import dear
from autopar.bench.fuzz import shrink
from autopar.bench.fuzz.compare import difference, unequal
from autopar.bench.fuzz.generator.generate import program
from autopar.bench.fuzz.noise import Noise, noise
from autopar.bench.fuzz.program import Block, Program, Step
from autopar.bench.worker import cpu_devices, serve
from autopar.errors import ArgumentError, AutoparError, MicrobatchError, ScheduleError
from autopar.ir.trace import trace
from autopar.passes.microbatch.loop import split_step
from autopar.plans import cache as plan_cache
from autopar.plans.plan import from_json
from autopar.verification.differences import host

MODES = ("microbatches", "stages", "meshes")
COUNTS = (2, 4)
#: What is said of a loss that depends on no example, such as a regulariser alone.
FEW_OPERATIONS = "more than the forward pass has operations"
DEVICES = 8
TWO_STAGES: Mapping[str, Any] = MappingProxyType({"mesh": (2,), "cluster": dear((2,)), "stages": 2})


@dataclass(frozen=True)
class Row:
    """What one program did.

    Attributes:
        seed: of the program.
        ok: nothing failed.
        failures: variant, such as "2 microbatches" -> what is wrong.
        refusals: variant -> reason.
        uncut: meshes over which nothing was cut.
        primitives: of the plain step, bodies included.
        nodes: equations of the plain step.
        seconds: mode -> processor time that it took, "generate" and "trace" besides.
    """

    seed: int
    ok: bool
    failures: Mapping[str, str] = field(default_factory=dict[str, str])
    refusals: Mapping[str, str] = field(default_factory=dict[str, str])
    uncut: int = 0
    primitives: tuple[str, ...] = ()
    equations: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(eq=False)
class Case:
    """A program with its plain step, computed once; `counts`: numbers of microbatches."""

    program: Program
    counts: Sequence[int] = COUNTS
    failures: dict[str, str] = field(default_factory=dict[str, str])
    refusals: dict[str, str] = field(default_factory=dict[str, str])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    uncut: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Options of `parallelize` in every variant; nothing is donated, since arguments are used again."""
        return {"batch_argnums": self.program.batch or "auto", "donate_argnums": ()}

    @cached_property
    def step(self) -> Step:
        return self.program.compiled()

    @cached_property
    def scheduled(self) -> Callable[..., Any]:
        """The step in two stages under the schedule that autopar chooses, compiled once."""
        return autopar.parallelize(self.step.function, **self.options, **TWO_STAGES)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.step.arguments

    @cached_property
    def plain(self) -> Callable[..., Any]:
        return jax.jit(self.step.function)

    @cached_property
    def jaxpr(self) -> Any:
        return jax_compat.eliminate_dead_code(jax.make_jaxpr(self.step.function)(*self.arguments))

    @cached_property
    def paths(self) -> tuple[str, ...]:
        shapes = jax.eval_shape(self.step.function, *self.arguments)
        leaves = jax.tree_util.tree_flatten_with_path(shapes)[0]
        return tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves)

    @cached_property
    def expected(self) -> list[Any]:
        return jax.tree.leaves(self.plain(*self.arguments))

    @cached_property
    def noise(self) -> Noise:
        return noise(self.plain, self.jaxpr, self.arguments)

    def check(self, variant: str, results: Any, theirs: Sequence[Any]) -> None:
        """Note leaves that differ from the plain step."""
        unequal_leaves = dict(unequal(self.paths, jax.tree.leaves(results), theirs, lambda: self.noise))
        if unequal_leaves:
            self.failures[variant] = ", ".join(
                f"{path} differs by {d:.1e}" for path, d in list(unequal_leaves.items())[:4]
            )

    def attempt(self, variant: str, make: Callable[[], Any]) -> Any:
        """What `make` gives; None, with a note why, where it raises."""
        try:
            return make()
        except (MicrobatchError, ScheduleError) as error:
            self.refusals[variant] = reason(error)
        except Exception as error:
            if isinstance(error, ArgumentError) and FEW_OPERATIONS in str(error):
                self.refusals[variant] = reason(error)
            else:
                self.failures[variant] = failure(error)
        return None


def reason(error: AutoparError) -> str:
    """Why a step was refused, without the names and numbers of this program."""
    text = re.sub(r"fuzz_\d+\.py:\d+", "LINE", f"{type(error).__name__}: {error}")
    text = re.sub(r"[\w-]+ at LINE", "OP at LINE", text)
    return re.sub(r"'[^']*'|\(\d[^)]*\)|\d+%?", "N", text)[:160]


def failure(error: Exception) -> str:
    """An error in one line."""
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:300]


def variants(case: Case, names: Sequence[str]) -> None:
    """Variants one by one."""
    for variant in names:
        results = case.attempt(variant, lambda v=variant: jax.block_until_ready(PARALLEL[v](case)(*case.arguments)))
        if results is not None:
            case.check(variant, results, case.expected)


def in_microbatches(count: int) -> Callable[[Case], Callable[..., Any]]:
    """The step in so many microbatches, jitted."""
    return lambda case: jax.jit(
        split_step(trace(case.step.function, *case.arguments), count, case.program.batch or "auto")
    )


def in_stages(schedule: str, count: int) -> Callable[[Case], Callable[..., Any]]:
    """The step in two stages; where these are refused, which is noted, under the schedule that autopar chooses."""

    def made(case: Case) -> Callable[..., Any]:
        asked: dict[str, Any] = {"schedule": schedule, "num_microbatches": count}
        try:
            step = autopar.parallelize(case.step.function, **asked, **case.options, **TWO_STAGES)
            step.plan(*case.arguments)
        except (MicrobatchError, ScheduleError) as error:
            case.refusals[f"2 stages, {schedule}"] = reason(error)
            step = case.scheduled
        return step

    return made


def on_mesh(mesh: tuple[int, ...], examples: bool = False) -> Callable[[Case], Callable[..., Any]]:
    """The step on a mesh at prices at which cutting pays; `examples`: the examples come sharded over the first axis.

    Every other program runs in two microbatches there, unless that is refused, which is noted without a mesh. The plan
    is written and read before it is run, so that it is checked against the program.
    """

    def made(case: Case) -> Callable[..., Any]:
        asked: dict[str, Any] = {"mesh": mesh, "cluster": dear(mesh), **case.options}
        asked["pins"] = examples_sharded(case) if examples else {}
        step = autopar.parallelize(case.step.function, num_microbatches=1 + case.program.seed % 2, **asked)
        try:
            plan = step.plan(*case.arguments)
        except MicrobatchError:
            step = autopar.parallelize(case.step.function, **asked)
            plan = step.plan(*case.arguments)
        case.uncut += all(d < 0 for layout in (*plan.inputs, *plan.outputs) for d in layout)
        return autopar.parallelize(case.step.function, plan=from_json(json.loads(plan.to_json())), **case.options)

    return made


def examples_sharded(case: Case) -> dict[str, PartitionSpec]:
    """Pins of the arguments that the program says hold the batch, whose dimension 0 is split over the first axis."""
    names = list(inspect.signature(case.step.function).parameters)
    return {
        f"{names[i]}/{name}": PartitionSpec("x")
        for i in case.program.batch
        for name, value in case.arguments[i].items()
        if value.shape[:1] and value.shape[0] % DEVICES == 0
    }


PARALLEL: Mapping[str, Callable[[Case], Callable[..., Any]]] = {
    **{f"{n} microbatches": in_microbatches(n) for n in COUNTS},
    "2 stages, gpipe": in_stages("gpipe", 2),
    "2 stages, 1f1b": in_stages("1f1b", 4),
    "mesh (8,), examples sharded": on_mesh((8,), examples=True),
    "mesh (2, 4)": on_mesh((2, 4)),
}
STAGED = tuple(name for name in PARALLEL if "stages" in name)
CUT = tuple(name for name in PARALLEL if "mesh" in name)


def microbatches(case: Case) -> None:
    """The step in its numbers of microbatches, with the plain step in one program."""
    batch: Any = case.program.batch or "auto"
    traced = trace(case.step.function, *case.arguments)
    counts = {f"{n} microbatches": n for n in case.counts}
    steps = _known({name: case.attempt(name, lambda n=n: split_step(traced, n, batch)) for name, n in counts.items()})
    together = case.attempt("microbatches", lambda: _run_together(case, steps))
    if together is None:
        del (case.failures if "microbatches" in case.failures else case.refusals)["microbatches"]
        together = _known(
            {variant: case.attempt(variant, lambda s=s: jax.jit(s)(*case.arguments)) for variant, s in steps.items()}
        )
        together[""] = case.expected
    theirs = jax.tree.leaves(together.pop(""))
    for variant, results in together.items():
        case.check(variant, results, theirs)


def _known(attempts: Mapping[str, Any]) -> dict[str, Any]:
    """What attempts gave, without those that were refused or failed."""
    return {variant: result for variant, result in attempts.items() if result is not None}


def _run_together(case: Case, steps: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Results of all variants, those of the plain step under ""."""
    if not steps:
        return {"": []}
    both = {"": case.step.function, **steps}
    return jax.jit(lambda *args: {variant: step(*args) for variant, step in both.items()})(*case.arguments)


def stages(case: Case) -> None:
    """Two stages on two devices, under two schedules."""
    variants(case, STAGED)


def meshes(case: Case) -> None:
    """Cut over two meshes of eight devices."""
    variants(case, CUT)


RUN: Mapping[str, Callable[[Case], None]] = {"microbatches": microbatches, "stages": stages, "meshes": meshes}


def run(
    program: Program, modes: Sequence[str] = MODES, generated_s: float = 0.0, counts: Sequence[int] = COUNTS
) -> Row:
    """One program in these modes; `generated_s`: processor time that drawing it took."""
    case = Case(program, counts)
    case.seconds["generate"] = generated_s
    warnings.simplefilter("ignore")
    begin = time.process_time()
    primitives = tuple(sorted(_primitives(case.jaxpr.jaxpr)))
    case.seconds["trace"] = time.process_time() - begin
    for mode in modes:
        begin = time.process_time()
        RUN[mode](case)
        case.seconds[mode] = time.process_time() - begin
    return Row(
        program.seed,
        not case.failures,
        case.failures,
        case.refusals,
        case.uncut,
        primitives,
        sum(1 for _ in _equations(case.jaxpr.jaxpr)),
        {name: round(s, 4) for name, s in case.seconds.items()},
    )


def outcome(program: Program, variant: str) -> str:
    """What fails in one variant: "differs", the first word of an error, or nothing."""
    case = Case(program)
    warnings.simplefilter("ignore")
    try:
        variants(case, [variant])
    except Exception:  # the plain step itself
        return ""
    return kind_of(case.failures.get(variant, ""))


def kind_of(message: str) -> str:
    """What sort of failure a message is of."""
    return "differs" if " differs by " in message else message.split(":")[0]


def shrunk_file(program: Program, variant: str, message: str) -> str:
    """The smallest program that fails alike, as a file."""
    kind = kind_of(message)
    return shrink.standalone(shrink.shrunk(program, lambda p: outcome(p, variant) == kind), variant, message)


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _equations(getattr(value, "jaxpr", value))


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)


def _primitives(jaxpr: Any) -> set[str]:
    return {equation.primitive.name for equation in _equations(jaxpr)}


# A worker


def work(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Rows of some seeds; a program that takes more than `limit` seconds ends the process, and says where it was."""
    cpu_devices(DEVICES)
    jax.config.update("jax_enable_x64", True)
    gc.freeze()
    gc.set_threshold(*COLLECTED)
    for seed in spec["seeds"]:
        faulthandler.dump_traceback_later(spec["limit"], exit=True)
        yield asdict(_row(seed, spec["modes"], spec.get("failures")))
        faulthandler.cancel_dump_traceback_later()
        if seed % CLEARED == 0:
            jax.clear_caches()


#: Thresholds of the garbage collector: at Python's own, it takes an eighth of the time of a program.
COLLECTED = (100_000, 50, 50)
#: Programs between which JAX's caches are emptied: no two programs share much.
CLEARED = 25


def _is_refused_by_jit(seed: int) -> bool:
    """A program that JAX or XLA does not compile for one device, such as some operations of four bits."""
    case = Case(program(seed))
    try:
        _ = case.expected
    except Exception:
        return True
    return False


def _row(seed: int, modes: Sequence[str], failures: str | None) -> Row:
    try:
        begin = time.process_time()
        drawn = program(seed)
        row = run(drawn, modes, time.process_time() - begin)
    except Exception as error:
        plain_failure = {"plain": failure(error)}
        return Row(seed, True, refusals=plain_failure) if _is_refused_by_jit(seed) else Row(seed, False, plain_failure)
    if row.failures and _is_refused_by_jit(seed):
        message = next(iter(row.failures.values()))
        return replace(row, ok=True, failures={}, refusals={**row.refusals, "plain": message})
    for variant, message in list(row.failures.items())[:1] if failures else ():
        faulthandler.cancel_dump_traceback_later()
        text = shrunk_file(drawn, variant, message)
        Path(failures or "", f"seed{seed}.py").write_text(text)
    return row


# A file


def show(step: Callable[..., Any], arguments: tuple[Any, ...], variant: str, batch_argnums: Any, seed: int) -> None:
    """Run a step of a file in one variant beside the plain step, and print each leaf that differs.

    `seed`: of its program, on which the variant may depend.
    """
    leaves = ()
    batch = () if batch_argnums == "auto" else tuple(batch_argnums)
    case = Case(Program(seed, leaves, Block("step", (), (), ()), (), batch))
    case.step = Step(step, arguments)
    with plan_cache.off():
        results = PARALLEL[variant](case)(*arguments)
    for path, ours, theirs in zip(case.paths, jax.tree.leaves(results), case.expected, strict=True):
        print(path, f"differs by {difference(ours, theirs):.1e}", "ours", host(ours), "plain", host(theirs), sep="\n  ")


if __name__ == "__main__":
    serve(work)
