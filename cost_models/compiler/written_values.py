"""Which values of a program get a buffer of their own, once the compiler has fused steps into kernels.

Products, scatters, sorts, loops and reductions write their results to memory. A light step (elementwise, broadcast,
slice, transpose) is fused into whatever reads it, and then its operands are what is read there:

    v is written   if it leaves the program, or is read by a step that takes memory only,
                   or several kernels read it and repeating it is costly, or (on some backends) reads more than it is
                                                                                                   -> _Writing.writes
    sources(v)     = {v} if v is written, else the sources of what it is made from                 -> _Writing.result
    v is absorbed  if one light step, which is written, reads a product: the product's kernel does that step on the
                   way out, and writes its result instead                                          -> _Writing.absorbs
    v is fused     if it is a product's and only the library kernel that contains the product reads it
                                                                                        -> _Writing.fuses_into_kernel
    v is written   if a kernel would emit its code too often                          -> _Writing._duplicates_too_much
    v is written   if it is made of several arrays, and what reads it depends on it
                   by way of memory as well                                                      -> _Writing.detoured
    v is repeated  by light steps, though it is written for others, if it is cheap and
                   made of one array                                                         -> _Writing._is_repeated

That is the rule by which XLA's instruction fusion duplicates producers (openxla/xla,
xla/service/instruction_fusion.cc: `IsExpensive`, `EffectivelyAtMostUnary`). A value is *thin* if it is a broadcast of
something smaller, or made elementwise of one such: it is computed before it is broadcast, and repeated wherever
possible.

Kinds of steps, and what computes a value itself, are in `autopar.cost_models.compiler.fusion`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

from autopar.cost_models.compiler.bf16_demotion import narrowed
from autopar.cost_models.compiler.compiled_program import RESHAPE, ROUND, Program, Step
from autopar.cost_models.compiler.cpu_kernels import kernels
from autopar.cost_models.compiler.fusion import LIGHT, LOOP, PRODUCT, REDUCTION, Fusion
from autopar.cost_models.compiler.operands import multiplies
from autopar.ir.op_sets import BROADCASTS, COSTLY, ELEMENTWISE, JOINS

#: Made from this share of a value's bytes or more, a value counts as made from one of its size.
_HALF = 0.5
_JOINS = (*JOINS, "stack")
_MAX_DUPLICATION = 15  # times that a kernel emits the code of one value (kAllowedCodeDuplication in XLA)


@dataclass(frozen=True, eq=False)
class Written:
    """What is written to memory.

    Attributes:
        values: values that have a buffer of their own, arguments among them.
        sources: value -> the written values and tokens that reading it means reading.
        beneath: written value that is thin or cheap, or a copy of it -> what those read that repeat it instead.
        repeating: steps (by identity) that repeat such values.
        narrow: values that are kept in half their bytes (`autopar.cost_models.compiler.bf16_demotion`).
        absorbed: product whose result is not written -> the result of the light step that its kernel writes instead.
        inner: light step (by identity) that runs in a product's kernel -> what the product reads there.
        repeated_through: tokens that are read by steps alone that repeat what is copied, where that is in their layout.
        library: steps (by identity) that run in kernels of a library.
        across: (step by identity, value) where a step in a loop's body does not repeat what is made outside of it.
    """

    values: frozenset[int]
    sources: Mapping[int, tuple[int, ...]]
    beneath: Mapping[int, tuple[int, ...]]
    repeating: frozenset[int]
    narrow: frozenset[int]
    absorbed: Mapping[int, int] = field(default_factory=dict)
    inner: Mapping[int, frozenset[int]] = field(default_factory=dict)
    repeated_through: frozenset[int] = frozenset()
    library: frozenset[int] = frozenset()
    across: frozenset[tuple[int, int]] = frozenset()

    def has_product(self, step: Step) -> bool:
        """A step that is a product, or runs in the kernel of one."""
        return step.kind == PRODUCT or id(step) in self.inner

    def reads(self, step: Step) -> tuple[int, ...]:
        """Written values and tokens that a step reads."""
        repeats = id(step) in self.repeating
        sources_by_input = [
            self.beneath[v]
            if repeats and v in self.beneath and (id(step), v) not in self.across
            else self.sources.get(v, ())
            for v in step.inputs
        ]
        return (
            sources_by_input[0]
            if len(sources_by_input) == 1
            else tuple(dict.fromkeys([s for sources in sources_by_input for s in sources]))
        )

    def is_ready(self, p: Program, value: int) -> bool:
        """Whether arguments are all that has to be there to make a value, so that a copy can be made at any time."""
        return all(p.behind(s) in p.graph.names for s in self.sources.get(value, (value,)))


def written(p: Program) -> Written:
    """Which values of a program are written, and what reading any value means."""
    writing = _Writing(p, [step for frame in p.top.walk() for step in frame.steps])
    writing.decide()
    return writing.result()


@dataclass(eq=False)
class _Writing:
    p: Program
    steps: list[Step]
    readers: dict[int, list[Step]] = field(default_factory=dict)
    thin: set[int] = field(default_factory=set)
    constant: set[int] = field(default_factory=set)
    broadcasts: set[int] = field(default_factory=set)
    repeated: set[int] = field(default_factory=set)
    weight: dict[int, int] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    kernels: dict[int, frozenset[int]] = field(default_factory=dict)
    leaving: set[int] = field(default_factory=set)
    library: Mapping[int, int] = field(default_factory=dict)
    absorbed: dict[int, Step] = field(default_factory=dict)
    feeding: dict[int, bool] = field(default_factory=dict)  # by step: `_feeds_reduction`
    duplicates: dict[int, dict[int, dict[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        p = self.p
        self.kept = {*p.graph.inputs, *(v for v, _ in p.graph.constants)}
        self.leaving = {p.behind(v) for frame in p.top.walk() for v in frame.leaving}
        self.leaving |= self.barred
        for step in self.steps:
            if step.name in (*BROADCASTS, "spread"):
                self.broadcasts.update(step.outputs)
            if step.kind == LIGHT and self._is_thin(step):
                self.thin.update(step.outputs)
                self.constant.update(() if step.inputs else step.outputs)
            for v in dict.fromkeys(map(p.behind, step.inputs)):
                if not (v in self.thin and self._reads_beneath(step)):
                    self.readers.setdefault(v, []).append(step)
        if p.backend.has_library:
            self.library = kernels(p, self.steps, self.readers, frozenset(self.leaving))
        self._weigh()

    def _reads_beneath(self, step: Step) -> bool:
        """A step that does not read thin values as they are: a thin one, or a division, by the small reciprocal."""
        thin = bool(step.outputs) and step.outputs[0] in self.thin
        return thin or (self.p.backend.has_library and step.name == "div")

    def _is_thin(self, step: Step) -> bool:
        if step.name in ("broadcast_in_dim", "spread"):
            size = self.p.type_of(step.outputs[0]).nbytes
            return sum(self.p.type_of(v).nbytes for v in step.inputs) <= _HALF * size
        if not step.inputs or step.name in _JOINS:
            return False
        inputs = {*map(self.p.behind, step.inputs)}
        return self.thin >= inputs and len(inputs - self.constant) <= 1

    def _weigh(self) -> None:
        """How many values of about its size each light value is made from, at least what it is read from."""
        leaves: dict[int, frozenset[int]] = {}
        nbytes = cache(lambda v: self.p.type_of(v).nbytes)
        for step in self.steps:
            if step.kind != LIGHT:
                continue
            for v in step.outputs:
                least = _HALF * nbytes(v)
                inputs = map(self.p.behind, step.inputs)
                made_of = [x for i in inputs for x in leaves.get(i, (i,))]
                leaves_of_step = frozenset([x for x in made_of if nbytes(x) >= least])
                self.weight[v] = len(leaves_of_step)
                shared = len(self.readers.get(v, ())) > 1 and (len(leaves_of_step) > 1 or self._is_costly(step))
                leaves[v] = frozenset((v,)) if shared else leaves_of_step

    def decide(self) -> None:
        """Decide for every value, readers before what they read."""
        ends = {id(s): s for s in self.steps if s.kind == LIGHT} if self.fusion.products_absorb else {}
        for step in reversed(self.steps):
            for v in step.outputs:
                end = self.absorbs(step, ends) if ends and step.kind == PRODUCT else None
                buffered = step.kind != LIGHT or self.writes(step, v) or self._duplicates_too_much(v)
                buffered = buffered and not self._is_same_array(step)
                if end is not None:
                    self.absorbed[v] = ends.pop(id(end))
                    self.kernels[v] = self._kernels(v)
                elif buffered and not self.fuses_into_kernel(step, v):
                    self.kept.add(v)
                    if self._is_repeated(step):
                        self.repeated.add(v)
                        self.kernels[v] = self._kernels(v, [r for r in self.readers.get(v, ()) if self._repeats(r)])
                else:
                    self.kernels[v] = self._kernels(v)

    @cached_property
    def fusion(self) -> Fusion:
        """What the compiler fuses."""
        return self.p.backend.fusion

    @cached_property
    def makers(self) -> Mapping[int, Step]:
        """Value -> the step that makes it."""
        return {v: step for step in self.steps for v in step.outputs}

    def _duplicates_too_much(self, value: int) -> bool:
        """A kernel that reads a value would emit its code more often than XLA allows.

        It is emitted once per index at which it is read: elementwise steps share their reader's, others have their own.
        (openxla/xla, xla/service/fusion_node_indexing_evaluation.cc.)
        """
        if not self.fusion.cheap_repeats:
            return False
        indices_by_kernel, users = self._indices(value)
        self.duplicates[value] = indices_by_kernel
        most = max((sum(indices.values()) for indices in indices_by_kernel.values()), default=0)
        return most > _MAX_DUPLICATION or (self._branches(value) and max(most, users) > 1)

    def _indices(self, value: int) -> tuple[dict[int, dict[int, int]], int]:
        """Kernel -> what reads a value at an index of its own, and how often it is emitted; and the number of uses."""
        indices_by_kernel: dict[int, dict[int, int]] = {}
        users = 0
        for step in self.readers.get(value, ()):
            v = step.outputs[0] if step.outputs else -1
            inside = self.duplicates.get(v) if step.kind == LIGHT and v not in self.kept else None
            around = {id(step): {id(step): 1}} if inside is None else inside
            users += len(around)
            for kernel, indices in around.items():
                own = indices if step.name in ELEMENTWISE else {id(step): sum(indices.values())}
                indices_by_kernel.setdefault(kernel, {}).update(own)
        return indices_by_kernel, users

    def _branches(self, value: int) -> bool:
        """Code for it has branches, in which nothing is found that was computed in others.

        (openxla/xla, xla/service/elemental_ir_emitter.cc: `OpInvalidatesCache`.)
        """
        maker = self.makers.get(value)
        return maker is not None and maker.name in _JOINS

    def absorbs(self, product: Step, ends: Mapping[int, Step]) -> Step | None:
        """The light step that a product's kernel does on the way out: one of `ends`, which alone is made of it.

        Gradients that updates read are summed over devices in between. A kernel holds one product, the last.
        """
        value = product.outputs[0]
        if value in self.leaving:
            return None
        kernels = [ends.get(kernel) for kernel in self._kernels(value)]
        end = kernels[0] if len(kernels) == 1 else None
        if end is None or end.op.phase == "update" or self._frames[id(end)] != self._frames[id(product)]:
            return None
        same = self.p.type_of(end.outputs[0]).size == self.p.type_of(value).size
        return end if same else None

    def fuses_into_kernel(self, step: Step, value: int) -> bool:
        """Only the library kernel that contains the product reads its result."""
        number, readers = self.library.get(id(step)), self.readers.get(value, ())
        if number is None or step.kind != PRODUCT or value in self.leaving:
            return False
        return bool(readers) and all(self.library.get(id(reader)) == number for reader in readers)

    @cached_property
    def _frames(self) -> Mapping[int, int]:
        """Step (by identity) -> the number of its frame."""
        return {id(step): i for i, frame in enumerate(self.p.top.walk()) for step in frame.steps}

    def _is_repeated(self, step: Step) -> bool:
        """A light step that its light readers repeat, though its result is written for others.

        It is cheap, and reads one array of its rank beside broadcasts. No reader repeats a value from behind a barrier.
        (openxla/xla, xla/service/instruction_fusion.cc: `ComputeGloballyUnfusible`, `EffectivelyAtMostUnary`.)
        """
        repeats = self.p.backend.has_library and self.fusion.cheap_repeats
        if step.kind != LIGHT or not repeats or self._is_costly(step):
            return False
        v = step.outputs[0]
        return v not in self.thin and v not in self.barred and not self._branches(v) and self._is_unary(step)

    @cached_property
    def barred(self) -> frozenset[int]:
        """Values that a barrier keeps in memory for the readers behind it."""
        return frozenset(self.p.behind(v) for barrier in self.p.barriers for v in barrier)

    def _is_same_array(self, step: Step) -> bool:
        """A step that reshapes an array which is written for others and not repeated."""
        if step.name != RESHAPE:
            return False
        v = self.p.behind(step.inputs[0])
        maker = self.makers.get(v)
        if maker is None or maker.kind != LIGHT or self._is_unary(maker):
            return False
        readers = [r for r in self.readers.get(v, ()) if r.name != RESHAPE]
        return v in self.leaving or v in self.detoured or any(r.kind != LIGHT or id(r) in self.library for r in readers)

    def _is_unary(self, step: Step) -> bool:
        """A step that reads one array of its rank beside broadcasts; dimensions of one element do not count."""
        rank = self._rank(step.outputs[0])
        inputs = {*map(self.p.behind, step.inputs)} - self.broadcasts
        return sum(self._rank(v) >= rank for v in inputs) <= 1

    def _rank(self, value: int) -> int:
        return sum(n > 1 for n in self.p.type_of(value).shape)

    @cached_property
    def detoured(self) -> set[int]:
        """Cheap values made of several arrays that are not repeated, since one reader depends on them by way of memory.

        The reader reads a second value, which was made of the first by steps that are not all fused into the reader.
        (openxla/xla, xla/service/instruction_fusion.cc: `CanFuseOnAllPaths`.)
        """
        light = [s for s in self.steps if s.kind == LIGHT and not self._is_costly(s) and not self._is_unary(s)]
        several = [s.outputs[0] for s in light if len(self.readers.get(s.outputs[0], ())) > 1]
        bit = {v: 1 << i for i, v in enumerate(several)}
        ahead: dict[int, int] = {}  # value -> those of them that it is made of
        by_memory: dict[int, int] = {}  # value -> those of them that it is made of by way of memory
        detoured = 0
        for step in self.steps if bit else ():
            fused = step.kind == LIGHT and id(step) not in self.library
            inputs = [*map(self.p.behind, step.inputs)]
            before = detours = 0
            for v in inputs:
                before |= ahead.get(v, 0) | bit.get(v, 0)
                detours |= by_memory.get(v, 0) | (ahead.get(v, 0) if self._is_unfused(v) else 0)
            if fused:
                detoured |= detours & sum(bit.get(v, 0) for v in {*inputs})
            for v in step.outputs if before else ():
                ahead[v], by_memory[v] = before, detours if fused else before
        return {v for v in several if bit[v] & detoured}

    def _is_unfused(self, value: int) -> bool:
        """A value that no light step has fused into it."""
        maker = self.makers.get(value)
        if maker is None or maker.kind != LIGHT or id(maker) in self.library:
            return True
        return self._is_costly(maker) and len(self.readers.get(value, ())) > 1

    def _is_outside(self, value: int, step: Step) -> bool:
        """A value that is made in another frame than a step's: it enters the loop's body in memory."""
        maker = self.makers.get(self.p.behind(value))
        return maker is not None and self._frames[id(maker)] != self._frames[id(step)]

    def _repeats(self, step: Step) -> bool:
        """A step that repeats what it reads where that is cheap: one of a loop fusion."""
        return step.kind == LIGHT and not self._stays(step)

    def _kernels(self, value: int, readers: Sequence[Step] | None = None) -> frozenset[int]:
        """The kernels (identities of their last steps) that read a value, or those of some of its readers."""
        kernels = [*map(self._kernels_at, self.readers.get(value, ()) if readers is None else readers)]
        return kernels[0] if len(kernels) == 1 else frozenset[int]().union(*kernels)

    def _kernels_at(self, step: Step) -> frozenset[int]:
        """The kernels that a step is part of, as far as they read what it reads."""
        if step.kind != LIGHT:
            return frozenset((id(step),))
        v = step.outputs[0]
        fused = self.kernels.get(v, frozenset[int]())
        return fused | {id(step)} if v in self.kept else fused

    def writes(self, step: Step, value: int) -> bool:
        """True if a light step's result gets a buffer of its own."""
        readers = self.readers.get(value, ())
        number = self.library.get(id(step))
        readers_outside = readers if number is None else [r for r in readers if self.library.get(id(r)) != number]
        if value in self.leaving or any(self._needs_memory(value, r) for r in readers_outside):
            return True
        if number is not None or any(id(r) in self.library for r in readers_outside):
            return bool(readers_outside)
        joins = value in self.detoured if self.fusion.cheap_repeats else self.weight[value] > 1
        return len(self._kernels(value)) > 1 and (joins or self._is_costly(step))

    def _is_costly(self, step: Step) -> bool:
        """A step that is not repeated: arithmetic that costs, or what is rounded to bfloat16."""
        if self._multiplies(step):
            return False
        if step.name in COSTLY or self.fusion.is_costly(step.name):
            return self.fusion.is_costly(step.name)
        rounds = step.name in ELEMENTWISE or step.name == ROUND
        return rounds and self.p.backend.widens and self.p.type_of(step.outputs[0]).dtype == "bfloat16"

    def _multiplies(self, step: Step) -> bool:
        """A division that is a multiplication by the reciprocal of what is broadcast."""
        return step.name == "div" and step.op.name == "div" and multiplies(self.p, step.op)

    def _needs_memory(self, value: int, step: Step) -> bool:
        """A step that nothing is fused into; a loop makes thin values in its body, if it does not start from them."""
        if not self.fusion.reads_memory(step.kind):
            return False
        started = (self.p.behind(v) for v, _ in step.taken)
        return not (self.fusion.loops_sink and step.kind == LOOP and value in self.thin and value not in started)

    def _stays(self, step: Step) -> bool:
        """A step that reads thin values from memory: one in a library's kernel, or else one that feeds a reduction."""
        return id(step) in self.library if self.p.backend.has_library else self._feeds_reduction(step)

    def _feeds_reduction(self, step: Step) -> bool:
        """A step is a reduction, or a link of a chain that only a reduction reads; asked once all is decided."""
        chain: list[int] = []
        while id(step) not in self.feeding:
            chain.append(id(step))
            link = step.kind == LIGHT and step.outputs[0] not in self.kept
            readers = self.readers.get(step.outputs[0], ()) if link else ()
            if len(readers) != 1:
                self.feeding[id(step)] = step.kind == REDUCTION
                break
            step = readers[0]
        feeds = self.feeding[id(step)]
        self.feeding.update(dict.fromkeys(chain, feeds))
        return feeds

    def _fused_products(self) -> Mapping[int, int]:
        """Product that is fused into a library kernel -> what the kernel writes."""
        ends: dict[int, int] = {}
        for step in reversed(self.steps) if self.library else ():
            for v in step.outputs if id(step) in self.library else ():
                after = [ends[r.outputs[0]] for r in self.readers.get(v, ()) if r.outputs and r.outputs[0] in ends]
                ends.update((v, end) for end in ((v,) if v in self.kept else after[:1]))
        products = [v for step in self.steps if step.kind == PRODUCT for v in step.outputs]
        return {v: ends[v] for v in products if ends.get(v, v) != v}

    def result(self) -> Written:
        """Sources of every value, producers first."""
        sources: dict[int, tuple[int, ...]] = {v: (v,) for v in self.kept}
        beneath: dict[int, tuple[int, ...]] = {}
        repeating: set[int] = set()
        across: set[tuple[int, int]] = set()
        repeated_through: dict[int, bool] = {}
        may_be_beneath = self.kept & (self.thin | self.repeated)  # asking what repeats others would be for nothing

        def read(value: int, repeats: bool = False) -> tuple[int, ...]:
            behind = self.p.behind(value)
            if value == behind:
                return beneath[value] if repeats and value in beneath else sources.get(value, ())
            if behind in beneath and self.p.backend.has_library:
                repeated_through[value] = repeated_through.get(value, True) and repeats
                beneath[value] = (value, *beneath[behind])
            if value not in sources:
                sources[value] = (value,) if behind in self.kept else (value, *sources.get(behind, ()))
            return beneath[value] if repeats and value in beneath else sources[value]

        for step in self.steps:
            repeats = not may_be_beneath.isdisjoint(map(self.p.behind, step.inputs)) and self._repeats(step)
            if repeats:
                repeating.add(id(step))
            if repeats and self.p.backend.has_library:
                across.update((id(step), v) for v in step.inputs if self._is_outside(v, step))
            read_by = [read(v, repeats and (id(step), v) not in across) for v in step.inputs]
            sources_of_step = (
                read_by[0]
                if len(read_by) == 1
                else tuple(dict.fromkeys([s for sources_of_input in read_by for s in sources_of_input]))
            )
            for v in step.outputs:
                if v not in self.kept:
                    sources[v] = sources_of_step
                elif v in self.thin or v in self.repeated:
                    beneath[v] = sources_of_step
        for frame in self.p.top.walk():
            for v in frame.leaving:
                read(v)
        ends = {v: end.outputs[0] for v, end in self.absorbed.items()}
        ends.update(self._fused_products())
        narrow = narrowed(self.p, self.steps, self.readers, self.thin, self.leaving, ends)
        inner = {id(end): frozenset(sources[v]) for v, end in self.absorbed.items()}
        through = frozenset(token for token, repeats in repeated_through.items() if repeats)
        return Written(
            frozenset(self.kept),
            sources,
            beneath,
            frozenset(repeating),
            narrow,
            ends,
            inner,
            through,
            frozenset(self.library),
            frozenset(across),
        )
