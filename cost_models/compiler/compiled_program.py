"""A program as a compiler's memory planner meets it: a list of steps, with loops as nested lists.

A *step* is an operation, or what a loop or a backend does beside the operations (`compiler.flatten` makes them):

    reshapes and the like     another name for the same buffer                                -> Program.root
    a use in another layout   reads a *token*, which represents the copy in that layout       -> Program.read

Values that no operation of the graph defines (tokens, transposed and broadcast operands) are numbered behind the
graph's; `Program.like` tells which value of the graph each has the type and layout of.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property

from autopar.cost_models.compiler.backends import Backend
from autopar.cost_models.compiler.fusion import LOOP
from autopar.cost_models.compiler.swapped_products import swapped_products
from autopar.ir.graph import Atom, Graph, Op, Region, Type
from autopar.ir.op_sets import ADDITIONS, RESHAPES, SCATTERS

#: Operations that change some elements of their first operand, in place if nothing else reads it.
OVERWRITES = (*SCATTERS, "dynamic_update_slice")
#: Operation of LAPACK -> the position of the operand that it overwrites with its result.
IN_PLACE_OPERAND: Mapping[str, int] = {
    **dict.fromkeys(("cholesky", "eigh", "lu", "geqrf", "householder_product"), 0),
    "triangular_solve": -1,
}
#: Operations whose result is their operand's buffer under another type.
RENAMINGS = (*RESHAPES, "stop_gradient", "copy", "sharding_constraint")
#: Operations whose operands may change places.
COMMUTATIVE = frozenset((*ADDITIONS, "mul", "max", "min", "and", "or", "xor", "eq", "ne"))
#: Floats that some backends compute in float32, and the name of a step that rounds to one of them.
HALVES, ROUND = ("bfloat16", "float16"), "round to half"
#: The name of a step that reshapes what is cheap to the matrix that a product reads, and may compute it again.
RESHAPE = "reshape cheap"


@dataclass(slots=True, eq=False)
class Step:
    """One thing that a program does.

    Attributes:
        op: the operation, or the one that asks for this step.
        name: the operation's name, or what is done instead ("transpose" of an operand, say).
        kind: its kind in `autopar.cost_models.compiler.fusion`.
        inputs, outputs: values read and defined.
        after: values that must be there before, though they are not read.
        frames: bodies of a loop.
        taken: (value, result) where a loop starts from the value and goes on in its memory.
    """

    op: Op
    name: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    after: tuple[int, ...] = ()
    frames: tuple[Frame, ...] = ()
    taken: tuple[tuple[int, int], ...] = ()

    @property
    def joins(self) -> bool:
        """It is a conditional: its bodies are branches, of which one runs."""
        return self.kind == LOOP and self.name not in ("scan", "while")


@dataclass(slots=True, eq=False)
class Frame:
    """Steps of one body.

    Attributes:
        steps: in program order.
        leaving: what a result or the next iteration takes over.
        carried: (value, result of the loop or conditional) where the value leaves as that result.
        shared: what was made for the sake of several steps -> the value.
        done: operation and what it is done to -> its results.
    """

    steps: list[Step] = field(default_factory=list)
    leaving: tuple[int, ...] = ()
    carried: tuple[tuple[int, int], ...] = ()
    shared: dict[Hashable, int] = field(default_factory=dict)
    done: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)

    def walk(self) -> Iterator[Frame]:
        """This frame and those inside, outer before inner."""
        yield self
        for step in self.steps:
            for inner in step.frames:
                yield from inner.walk()


@dataclass(eq=False)
class Program:
    """A flattened program.

    Attributes:
        graph: where it comes from.
        backend: whose compiler runs it.
        reads: site -> key of the copy that is read there; sites left out read the value itself.
        devices: how many run it.
        views: values that show another; a copy of one is a copy of what it shows, and made into a view again.
        top: the outermost frame.
        alias: value -> the atom whose buffer it is, where that is another.
        like: value made here -> value of the graph with its shape and layout.
        own_types: value made here -> its type.
        tokens: value that is a copy -> (value copied, key).
        source_token: token -> the token that it copies, where what is copied is itself an alias of a copy.
        pieces: value made here of a copy -> the copy's key.
        transposed_again: one of `pieces`, transposed, that is there only where its layout differs from that of an
            earlier transposed copy, or what is converted from it -> the earlier one's key (None: made of the value).
        stacked: result of a loop -> the value of its body that is stored there slice by slice.
        parts: what an unrolled loop stacks -> what is stacked there, in the order of the stack.
        runs: for each further iteration of an unrolled loop, value of its body -> the atom that is there instead.
        run_of: token of such an iteration -> its number in `runs`.
        barriers: what each barrier holds, all of which is written to memory.
        behind_barriers: value -> barriers it is behind, if only light steps are between.
        fenced: values that count as others than those whose buffers they are: they are behind a barrier.
        cheap: results of elementwise operations that are cheap enough to be repeated.
    """

    graph: Graph
    backend: Backend
    reads: Mapping[str, Hashable]
    devices: int = 1
    views: AbstractSet[int] = frozenset()
    top: Frame = field(default_factory=Frame)
    alias: dict[int, Atom] = field(default_factory=dict)
    like: dict[int, int] = field(default_factory=dict)
    own_types: dict[int, Type] = field(default_factory=dict)
    tokens: dict[int, tuple[int, Hashable]] = field(default_factory=dict)
    source_token: dict[int, int] = field(default_factory=dict)
    pieces: dict[int, Hashable] = field(default_factory=dict)
    transposed_again: dict[int, Hashable] = field(default_factory=dict)
    stacked: dict[int, int] = field(default_factory=dict)
    parts: dict[int, tuple[Atom, ...]] = field(default_factory=dict)
    runs: list[Mapping[int, Atom]] = field(default_factory=list)
    run_of: dict[int, int] = field(default_factory=dict)
    barriers: list[tuple[int, ...]] = field(default_factory=list)
    behind_barriers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    fenced: set[int] = field(default_factory=set)
    cheap: set[int] = field(default_factory=set)
    _known: dict[tuple[int, Hashable], int] = field(default_factory=dict)

    def root(self, atom: Atom) -> Atom:
        """The atom whose buffer this is."""
        alias = self.alias
        while isinstance(atom, int) and atom in alias:
            atom = alias[atom]
        return atom

    def identity(self, atom: Atom) -> Hashable:
        """What is equal for atoms that a compiler knows to be equal, under one type."""
        while isinstance(atom, int) and atom in self.alias and atom not in self.fenced:
            atom = self.alias[atom]
        return atom if isinstance(atom, int) else (str(atom), atom.type)

    def type_of(self, value: int) -> Type:
        """Type of a value, of those made here as well."""
        own = self.own_types.get(value)
        return self.graph.types[value] if own is None else own

    def behind(self, value: int) -> int:
        """The value that a token copies; any other value itself."""
        token = self.tokens.get(value)
        return value if token is None else token[0]

    def new(self, like: int, kind: Type | None = None) -> int:
        """A value of the layout of another, and of its type if no other is given."""
        value = len(self.graph.types) + len(self.like)
        self.own_types[value] = self.type_of(like) if kind is None else kind
        self.like[value] = self.like.get(like, like)
        return value

    def is_half(self, value: int) -> bool:
        """A value that the backend computes in float32 and keeps in half the bytes."""
        return self.backend.widens and self.type_of(value).dtype in HALVES

    def read(self, site: str, atom: Atom) -> Atom:
        """What is read at a site: the value, or a token for a copy of it."""
        shown, key = self.root(atom), self.reads.get(site)
        if key is None or not isinstance(shown, int):
            return shown
        behind = self.behind(shown)
        token = self._known.get((behind, key))
        if token is None:
            token = self._known[behind, key] = self.new(behind)
            self.tokens[token] = (behind, key)
            if shown in self.tokens:
                self.source_token[token] = shown
        return token

    @cached_property
    def _copying(self) -> frozenset[str]:
        """Tags of operations that read a copy."""
        return frozenset(site.partition(".")[0] for site in self.reads)

    @cached_property
    def swapped(self) -> Mapping[int, Op]:
        """Product -> the transpose for which it is made with its operands in the other order."""
        return swapped_products(self.graph) if self.backend.swaps_products else {}

    @cached_property
    def scattered_into(self) -> AbstractSet[int]:
        """Operands that scatters update."""
        return {atom for op in self.graph.walk() if op.name in OVERWRITES for atom in values(op.inputs[:1])}

    @cached_property
    def adds_of_scatters(self) -> Mapping[int, int]:
        """Add (by index) -> its operand that is a scatter into zeros with no other reader; both are one scatter."""
        scatters: dict[int, int] = {}  # of an add of two scatters, one is fused
        for v, uses in self.graph.uses.items() if self.backend.accumulates_scatters else ():
            reader = uses[0].op
            if reader is not None and len(uses) == 1 and reader.name in ADDITIONS and self._is_into_zeros(v):
                scatters.setdefault(reader.index, v)
        return scatters

    @cached_property
    def fused_scatters(self) -> frozenset[int]:
        """Results of scatters that are fused into the add that reads them."""
        return frozenset(self.adds_of_scatters.values())

    def _is_into_zeros(self, value: int) -> bool:
        """A scatter of one element or window for every row, or a single one, into zeros."""
        op = self.graph.producers.get(value)
        if op is None or op.name != "scatter-add":
            return False
        single = math.prod(self.graph.type_of(op.inputs[1]).shape[:-1]) == 1
        if not single and not op.params["dimension_numbers"].operand_batching_dims:
            return False
        zeros = self.graph.producers.get(op.inputs[0]) if isinstance(op.inputs[0], int) else None
        if zeros is None or zeros.name != "broadcast_in_dim" or isinstance(zeros.inputs[0], int):
            return False
        return zeros.inputs[0].value == 0

    def operands(self, op: Op) -> tuple[Atom, ...]:
        """What an operation reads."""
        if (tag := op.tag) not in self._copying:
            return tuple(map(self.root, op.inputs))
        return tuple([self.read(f"{tag}.in{k}", atom) for k, atom in enumerate(op.inputs)])

    def results(self, op: Op, region: Region) -> tuple[Atom, ...]:
        """What leaves a body."""
        return tuple(self.read(f"{op.tag}.{region.name}.out{j}", atom) for j, atom in enumerate(region.outputs))


def free_dims(op: Op, k: int) -> list[int]:
    """Dimensions of operand k of a `dot_general` that are neither contracted nor batch dimensions."""
    contracted, batch = op.params["dimension_numbers"]
    return [d for d in range(len(op.equation.invars[k].aval.shape)) if d not in contracted[k] and d not in batch[k]]


def values(atoms: Sequence[Atom]) -> tuple[int, ...]:
    """The distinct values among atoms."""
    integers = [a for a in atoms if isinstance(a, int)]
    return tuple(dict.fromkeys(integers) if len(integers) > 1 else integers)
