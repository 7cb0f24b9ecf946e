"""One program of `autopar bench corpus`, in a process of its own: a finding for each check.

    mesh N       three steps on a mesh of virtual devices, each result against the step of one device
    cpu N        the collectives of that plan against those of the compiled program     } `verification`
    shardy N     and against those of Shardy's partitioner                              }
    microbatches as `mesh`, the batch in two parts; or refused, with the line
    stages       as `mesh`, in two stages; or refused, with the line
    memory       predicted peak of a large step against the compiler's
    cpu large    its collectives against those of the compiled program
    flops        what of it runs replicated, and why
    times        seconds of planning beside those that `jax.jit` compiles for

Small steps are planned at the prices of `equal.case.dear`, at which even toys are cut, and run in float64 where the
program can: every leaf is equal to 1e-9 of its magnitude. Where something computes in float32 whatever it is given, a
leaf is equal to 1e-5 (in float16 to 1e-3), or to ten times what a data-parallel step written by hand differs by (Adam
divides rounding by rounding where a gradient is nearly zero). Large steps are in float32.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from autopar import jax_compat
from autopar.bench.corpus import compare as corpus_compare
from autopar.bench.corpus import program as corpus_program
from autopar.bench.corpus.program import Program
from autopar.bench.corpus.run import DEVICES, FAILED, OK, REFUSED
from autopar.bench.equal import case as equal_case
from autopar.bench.worker import cpu_devices, serve
from autopar.codegen.rewrites import apply_rewrites
from autopar.cost_models.compiler.backends import CPU
from autopar.errors import AutoparError
from autopar.ir.arguments import as_arrays, merge_static
from autopar.ir.trace import trace
from autopar.plans import imbalance
from autopar.rules import rules_of
from autopar.runtime.executables import Executable
from autopar.verification import verify as verification

STEPS = 3
#: Relative difference of a leaf that is allowed, by the narrowest dtype of a program; of float16 one rounding.
TOLERANCE: Mapping[str, float] = {"float64": 1e-9, "float32": 1e-5, "float16": 1e-3}
MEMORY = (-0.10, 0.25)  # lowest and highest error of the predicted peak
SMALLEST = 32 * 2**20  # bytes per device from which a predicted peak is compared
REPLICATED = 0.01  # part of the FLOPs that may run replicated
LINE = re.compile(r"[\w.-]+\.py:\d+")


@dataclass(frozen=True)
class Finding:
    """What one check of one program found.

    Attributes:
        program, check: which; `check` as in the module's table.
        state: OK, REFUSED (with a reason and a line) or FAILED.
        value: the largest difference, or the error of a prediction; what it is depends on the check.
        text: the leaf, the reason or the error.
        seconds: the check took.
        figures: numbers beside it, by name.
    """

    program: str
    check: str
    state: str
    value: float = 0.0
    text: str = ""
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, eq=False)
class Subject:
    """A program built at one scale; what several checks need is computed once."""

    program: Program
    scale: int
    x64: bool = False

    @property
    def precision(self) -> str:
        """Of the results."""
        return self.program.precision if self.x64 or self.program.precision != "float64" else "float32"

    @cached_property
    def built(self) -> corpus_program.Built:
        step, args = self.program.built(self.scale)
        return step, self._mapped(_double, args) if self.x64 else args

    @property
    def step(self) -> Callable[..., Any]:
        return self.built[0]

    def arguments(self) -> tuple[Any, ...]:
        """Fresh arrays, since a step may take their memory."""
        return self._mapped(lambda x: x.copy() if isinstance(x, jax.Array) else x, self.built[1])

    def _mapped(self, function: Callable[[Any], Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments with each leaf changed; objects that share something still do."""
        if not self.program.in_place:
            return jax.tree.map(function, args)
        from flax import nnx

        structure, state = nnx.split(args)
        return nnx.merge(structure, jax.tree.map(function, state))

    def jitted(self) -> Any:
        """The step as its author compiles it."""
        if self.program.in_place:
            from flax import nnx

            return nnx.jit(self.step)
        return jax.jit(self.step, static_argnums=_static(self))

    @cached_property
    def single(self) -> list[corpus_compare.Leaves]:
        """Results of the steps on one device."""
        return results(self.jitted(), self.arguments(), self.program)

    @cached_property
    def by_hand(self) -> list[dict[str, float]]:
        """What data parallelism as an expert writes it differs by, step by step: how much rounding does."""
        mesh = jax_compat.auto_mesh(np.array(jax.devices()[:DEVICES]), ("data",))
        args = self.arguments()
        cut = _rows_over(mesh, args[self.program.carried :])
        args = (*args[: self.program.carried], *cut)
        ours = results(self.jitted(), args, self.program)
        return [corpus_compare.differences(x, y) for x, y in zip(ours, self.single, strict=True)]

    def parallel(self, **options: Any) -> Any:
        """The parallel step."""
        return autopar.parallelize(self.step, **{**self.program.options, **options})

    @cached_property
    def whole(self) -> Executable:
        """The step compiled for `DEVICES` devices in a row."""
        cluster = equal_case.dear((DEVICES,))
        cluster = replace(cluster, device=replace(cluster.device, name="cpu"))
        return self.parallel(mesh=(DEVICES,), cluster=cluster).compiled(*self.built[1])


def _double(x: Any) -> Any:
    """An argument of the step in float64; counters in int64, since JAX divides int32 in float32."""
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
    if dtype == jnp.float32:
        return x.astype(jnp.float64)
    return x.astype(jnp.int64) if dtype == jnp.int32 and shape == () else x


def _rows_over(mesh: Any, args: Any) -> Any:
    """Arguments with their first dimension cut over the devices, where it divides."""

    def placed(x: Any) -> Any:
        divides = isinstance(x, jax.Array) and x.ndim > 0 and x.shape[0] % DEVICES == 0
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) if divides else x

    return jax.tree.map(placed, args)


def results(step: Callable[..., Any], args: tuple[Any, ...], program: Program) -> list[corpus_compare.Leaves]:
    """Results of `STEPS` steps, of one where nothing is carried from one to the next."""
    outputs, carried = list[corpus_compare.Leaves](), program.carried
    for _ in range(STEPS if carried else 1):
        out = step(*args)
        outputs.append(corpus_compare.host((args[:carried], out) if program.in_place else out))
        if program.in_place:
            continue
        first = out[:carried] if type(out) is tuple else (out,)
        args = (*first, *args[carried:]) if carried else args
    return outputs


# Checks


@dataclass(frozen=True)
class Outcome:
    """A finding without its names: see `Finding`."""

    state: str
    value: float = 0.0
    text: str = ""
    figures: Mapping[str, float] = field(default_factory=dict[str, float])


def on_mesh(subject: Subject, mesh: Sequence[int]) -> Iterator[tuple[str, Outcome]]:
    """Equality on a mesh, and the plan's collectives against both targets."""
    name = "x".join(map(str, mesh))
    step = subject.parallel(mesh=tuple(mesh), cluster=equal_case.dear(mesh))
    yield f"mesh {name}", _equal(subject, step)
    compiled = step.compiled(*subject.built[1])
    yield (
        f"cpu {name}",
        verified(verification.verify_compiled(compiled, subject.step, *subject.built[1]), compiled.plan),
    )
    yield (
        f"shardy {name}",
        verified(autopar.verify(compiled.plan, subject.step, *subject.built[1], target="shardy"), compiled.plan),
    )


def in_microbatches(subject: Subject) -> Outcome:
    """Two microbatches on a mesh of all devices."""
    step = subject.parallel(mesh=(DEVICES,), cluster=equal_case.dear((DEVICES,)), num_microbatches=2)
    return _unless_refused(lambda: _equal(subject, step))


def in_stages(subject: Subject) -> Outcome:
    """Two stages of half of the devices each."""
    step = subject.parallel(mesh={"devices": DEVICES}, cluster=equal_case.dear((DEVICES,)), stages=2)
    outcome = _unless_refused(lambda: _equal(subject, step))
    if outcome.state != OK:
        return outcome
    notes = step.plan(*subject.built[1]).notes
    refusal = next((note for note in notes if note.startswith("one microbatch")), "")
    return replace(outcome, text=f"{outcome.text}; {refusal}") if refusal else outcome


def _equal(subject: Subject, step: Callable[..., Any]) -> Outcome:
    """The results of a step against those of one device."""
    ours = results(step, subject.arguments(), subject.program)
    leaf_differences = [corpus_compare.differences(x, y) for x, y in zip(ours, subject.single, strict=True)]
    value, path = max(map(corpus_compare.worst, leaf_differences))
    tolerance = TOLERANCE[subject.precision]
    if value <= tolerance:
        return Outcome(OK, value, path)
    if subject.precision == "float64":
        return Outcome(FAILED, value, path)
    excess = [
        above for f, hand in zip(leaf_differences, subject.by_hand, strict=True) for above in _above(f, hand, tolerance)
    ]
    if excess:
        return Outcome(FAILED, *max(excess))
    return Outcome(OK, value, f"{path}, by hand {max(hand[path] for hand in subject.by_hand):.1e}")


def _above(
    leaf_differences: Mapping[str, float], hand: Mapping[str, float], tolerance: float
) -> list[tuple[float, str]]:
    """The leaves that differ by more than rounding can explain."""
    allowed = {path: max(tolerance, equal_case.TIMES_BY_HAND * v) for path, v in hand.items()}
    return [(v, path) for path, v in leaf_differences.items() if not v <= allowed[path]]


def _unless_refused(check: Callable[[], Outcome]) -> Outcome:
    """What a check finds; where the step is refused with a line of its source, that.

    A step in which no argument holds a batch has no line to name.
    """
    try:
        return check()
    except AutoparError as error:
        text = f"{type(error).__name__}: {error}"
        is_explained = LINE.search(text) or "batch_argnums" in text
        return Outcome(REFUSED if is_explained else FAILED, text=text)


def verified(report: autopar.Report, plan: autopar.Plan) -> Outcome:
    """A report; `value` is emitted over predicted bytes less 1."""
    text = "; ".join(report.mismatches[:3]) if not report.ok else ""
    value = report.comparison.ratio - 1 if math.isfinite(report.comparison.ratio) else math.inf
    return Outcome(OK if report.ok else FAILED, value, text, {"wire_bytes": plan.wire_bytes()})


def memory(subject: Subject) -> Outcome:
    """The predicted peak against the compiler's."""
    stats = subject.whole.memory_analysis()
    compiled_bytes = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    compiled_bytes += stats.temp_size_in_bytes
    predicted = subject.whole.plan.stages[0].peak_memory_bytes
    error = predicted / compiled_bytes - 1
    ok = MEMORY[0] <= error <= MEMORY[1] and compiled_bytes >= SMALLEST
    text = (
        ""
        if compiled_bytes >= SMALLEST
        else f"too small to judge at scale {subject.scale}: {compiled_bytes / 2**20:.1f} MiB"
    )
    return Outcome(OK if ok else FAILED, error, text, {"predicted": predicted, "compiled": float(compiled_bytes)})


def replicated(subject: Subject) -> Outcome:
    """The part of the FLOPs that every device does for itself, and the reasons."""
    plan = subject.whole.plan
    with as_arrays(subject.built[1], {}, _static(subject)) as array_args:
        traced = apply_rewrites(trace(subject.step, *array_args.args, static_argnums=_static(subject)), plan)
    account = imbalance.measure(traced.graph, rules_of(traced.graph), plan.stages[0], CPU)
    whole = [excess for excess in account.excesses if excess.why.startswith("whole along")]
    part = sum(excess.part for excess in whole)
    uncut = sum(excess.part for excess in whole if excess.kind == "uncuttable")
    ok = uncut <= REPLICATED
    figures = {"ratio": account.ratio, "uncuttable": uncut, "total": account.total}
    return Outcome(OK if ok else FAILED, part, " | ".join(account.lines()), figures)


def _static(subject: Subject) -> tuple[int, ...]:
    return tuple(subject.program.options.get("static_argnums", ()))


def times(subject: Subject) -> Outcome:
    """Seconds of planning over those that the compiler takes for one device."""
    planning = sum(subject.whole.plan.phases.values())
    begin = time.perf_counter()
    program = lowered(subject)
    lowered_s = time.perf_counter() - begin
    program.compile()
    compiling = time.perf_counter() - begin - lowered_s
    figures = {"plan_s": planning, "lower_s": lowered_s, "compile_s": compiling}
    return Outcome(OK, planning / (lowered_s + compiling), figures=figures)


def lowered(subject: Subject) -> Any:
    """The step lowered for one device; leaf by leaf, since some pytrees hold nothing but arrays."""
    args, static = subject.built[1], _static(subject)
    if subject.program.in_place:
        return subject.jitted().lower(*args)
    leaves, tree = jax.tree.flatten([x for i, x in enumerate(args) if i not in static])
    return jax.jit(lambda *x: subject.step(*merge_static(args, static, jax.tree.unflatten(tree, x)))).lower(*leaves)


Check = tuple[tuple[str, ...], Callable[[Subject], Iterator[tuple[str, Outcome]]]]


def _one(name: str, check: Callable[[Subject], Outcome]) -> Check:
    def only(subject: Subject) -> Iterator[tuple[str, Outcome]]:
        yield name, check(subject)

    return (name,), only


def _mesh(sizes: Sequence[int]) -> Check:
    name = "x".join(map(str, sizes))
    return (f"mesh {name}", f"cpu {name}", f"shardy {name}"), lambda subject: on_mesh(subject, sizes)


def _cpu_large(subject: Subject) -> Outcome:
    return verified(verification.verify_compiled(subject.whole, subject.step, *subject.built[1]), subject.whole.plan)


#: The checks of a small and of a large step: the names of what each finds, and the check.
SMALL: tuple[Check, ...] = (
    _mesh((DEVICES,)),
    _mesh((2, DEVICES // 2)),
    _one("microbatches", in_microbatches),
    _one("stages", in_stages),
)
LARGE: tuple[Check, ...] = (
    _one("memory", memory),
    _one("cpu large", _cpu_large),
    _one("flops", replicated),
    _one("times", times),
)


def findings(subject: Subject, checks: Sequence[Check], wanted: Sequence[str]) -> Iterator[Finding]:
    """A finding for each name that is wanted; an error is one for each name that is left of its check."""
    for names, check in checks:
        left = [name for name in names if name in wanted]
        if not left:
            continue
        begin = time.perf_counter()
        try:
            for name, outcome in check(subject):
                seconds, begin = time.perf_counter() - begin, time.perf_counter()
                if name in left:
                    left.remove(name)
                    yield Finding(
                        subject.program.name,
                        name,
                        outcome.state,
                        outcome.value,
                        outcome.text[:600],
                        seconds,
                        outcome.figures,
                    )
        except Exception as error:
            for name in left:
                yield Finding(subject.program.name, name, FAILED, math.inf, _told(error), time.perf_counter() - begin)


def _told(error: Exception) -> str:
    """An error in one line, with the place in autopar that raised it."""
    where, at = "", error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        where = f" at {code.co_filename.rpartition('/')[2]}:{at.tb_lineno}" if "autopar" in code.co_filename else where
        at = at.tb_next
    return f"{type(error).__name__}{where}: {' '.join(str(error).split())}"[:600]


def work(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The findings of one program; see `worker`."""
    cpu_devices(DEVICES)
    warnings.simplefilter("ignore")
    program = corpus_program.corpus(spec["table"])[spec["program"]]
    large = spec["large"]
    x64 = program.precision == "float64" and not large
    jax.config.update("jax_enable_x64", x64)
    subject = Subject(program, program.large if large else 1, x64)
    for finding in findings(subject, LARGE if large else SMALL, spec["checks"]):
        yield asdict(finding)


if __name__ == "__main__":
    serve(work)
