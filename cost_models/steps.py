"""A program as the compiler's memory planner meets it: a list of steps, with loops as nested lists.

A *step* is an operation, or what a loop or a backend does beside the operations:

    calls and rematerialised bodies     inlined; a recomputation waits for the gradient that needs it   -> _inline
    barriers                            other names for what is held; readers wait for all of it        -> _hold
    loops                               a step with frames: carries are updated in place, stacked
                                        operands read and stacked results written slice by slice        -> _scan
    reshapes and the like               another name for the same buffer                                -> Program.root
    a use in another layout             reads a *token*, which stands for the copy in that layout       -> Program.read
    operands of a product               on some backends turned into one order of dimensions first, once for all
                                        products that want it                                           -> _turned
    smaller operands, elementwise       arrays of the result's shape, one for each operand and shape    -> _spread
    products and sums of half floats    on some backends made in float32, of copies in float32         -> _computed
    products of ragged groups           on some backends of a copy for every group, masked to its rows -> _masked
    products that sum nothing           on some backends multiplications of two broadcasts             -> _outer
    gradients of maxima over windows    on some backends a scatter to places that are found first       -> _pooled
    random bits                         on some backends two words of a hash, joined where they are read  -> _hashed

Values that no operation of the graph defines (tokens, turned and spread operands) are numbered behind the graph's;
`Program.like` tells which value of the graph each has the type and layout of.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property

from autopar import jax_compat
from autopar.cost_models.backends import Backend
from autopar.graph import Atom, Graph, Op, Region, Type

LIGHT, HEAVY, REDUCTION, LOOP, STORE = "light", "heavy", "reduction", "loop", "store"

#: Operations on the matrix unit.
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
#: Operations that change some elements of their first operand, in place if nothing else reads it.
SCATTERS = ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "dynamic_update_slice")
#: Operations that routines of LAPACK do in the memory of one operand -> its place among the operands.
WORKS_IN: Mapping[str, int] = {
    **dict.fromkeys(("cholesky", "eigh", "lu", "geqrf", "householder_product"), 0),
    "triangular_solve": -1,
}
#: Operations whose result is their operand's buffer under another type.
RENAMINGS = ("reshape", "squeeze", "expand_dims", "stop_gradient", "copy", "copy_p", "sharding_constraint")
#: Operations that read through what is fused into them, and write their results.
REDUCTIONS = (
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin",
)  # fmt: skip
#: Elementwise operations that are too dear to be repeated.
COSTLY = (
    "div", "exp", "exp2", "log", "log1p", "expm1", "pow", "tanh", "logistic", "erf", "erfc", "erf_inv", "rsqrt", "sqrt",
    "cbrt", "sin", "cos", "tan", "atan2", "rem", "lgamma", "digamma",
)  # fmt: skip
#: Elementwise operations that are cheap enough to be repeated.
CHEAP = (
    "add", "add_any", "sub", "mul", "neg", "abs", "sign", "max", "min", "square", "integer_pow", "floor", "ceil",
    "round", "is_finite", "not", "and", "or", "xor", "eq", "ne", "lt", "le", "gt", "ge", "select_n", "clamp",
    "nextafter", "convert_element_type", "reduce_precision", "bitcast_convert_type", "real", "imag", "conj", "complex",
    "shift_left", "shift_right_logical", "shift_right_arithmetic",
)  # fmt: skip
#: Operations that move elements; as cheap as those.
MOVES = (
    "broadcast_in_dim", "iota", "transpose", "rev", "slice", "dynamic_slice", "pad", "concatenate", "split",
)  # fmt: skip

ELEMENTWISE = frozenset((*COSTLY, *CHEAP))
#: Floats that some backends compute in float32, and the name of a step that rounds to one of them.
HALVES, ROUND = ("bfloat16", "float16"), "round to half"

#: All other operations stand on their own: they read memory as it is and write their results.
_KIND: Mapping[str, str] = {
    **dict.fromkeys((*COSTLY, *CHEAP, *MOVES), LIGHT),
    **dict.fromkeys(REDUCTIONS, REDUCTION),
}


@dataclass(slots=True, eq=False)
class Step:
    """One thing that a program does.

    Attributes:
        op: the operation, or the one that asks for this step.
        name: the operation's name, or what is done instead ("transpose" of an operand, say).
        kind: LIGHT, HEAVY, REDUCTION, LOOP or STORE (into a loop's stacked results).
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
        made: what was made for the sake of several steps -> the value.
    """

    steps: list[Step] = field(default_factory=list)
    leaving: tuple[int, ...] = ()
    carried: tuple[tuple[int, int], ...] = ()
    made: dict[Hashable, int] = field(default_factory=dict)

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
        made: value made here -> its type.
        tokens: value that is a copy -> (value copied, key).
        through: token -> the token that it copies, where what is copied is itself another name for a copy.
        pieces: value made here of a copy -> the copy's key.
        stacked: result of a loop -> the value of its body that is stored there slice by slice.
        barriers: what each barrier holds, all of which is written to memory.
        behind_barriers: value -> barriers it is behind, if only light steps stand between.
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
    made: dict[int, Type] = field(default_factory=dict)
    tokens: dict[int, tuple[int, Hashable]] = field(default_factory=dict)
    through: dict[int, int] = field(default_factory=dict)
    pieces: dict[int, Hashable] = field(default_factory=dict)
    stacked: dict[int, int] = field(default_factory=dict)
    barriers: list[tuple[int, ...]] = field(default_factory=list)
    behind_barriers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    cheap: set[int] = field(default_factory=set)
    _known: dict[tuple[int, Hashable], int] = field(default_factory=dict)

    def root(self, atom: Atom) -> Atom:
        """The atom whose buffer this is."""
        while isinstance(atom, int) and atom in self.alias:
            atom = self.alias[atom]
        return atom

    def type_of(self, value: int) -> Type:
        """Type of a value, of those made here as well."""
        return self.made[value] if value in self.made else self.graph.types[value]

    def behind(self, value: int) -> int:
        """The value that a token copies; any other value itself."""
        return self.tokens[value][0] if value in self.tokens else value

    def new(self, like: int, kind: Type | None = None) -> int:
        """A value of the layout of another, and of its type if no other is given."""
        value = len(self.graph.types) + len(self.like)
        self.made[value] = self.type_of(like) if kind is None else kind
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
        found = self.behind(shown)
        token = self._known.get((found, key))
        if token is None:
            token = self._known[found, key] = self.new(found)
            self.tokens[token] = (found, key)
            if shown in self.tokens:
                self.through[token] = shown
        return token

    @cached_property
    def _copying(self) -> frozenset[str]:
        """Tags of operations that read a copy."""
        return frozenset(site.partition(".")[0] for site in self.reads)

    @cached_property
    def makers(self) -> Mapping[int, Op]:
        """Value -> the operation that makes it."""
        return {v: op for op in self.graph.walk() for v in op.outputs}

    @cached_property
    def changed(self) -> AbstractSet[int]:
        """Values that scatters change some elements of."""
        return {atom for op in self.graph.walk() if op.name in SCATTERS for atom in values(op.inputs[:1])}

    @cached_property
    def poured(self) -> Mapping[int, int]:
        """Result of a scatter of rows into zeros -> the sum (by index) that alone reads it, where they become one."""
        found: dict[int, int] = {}  # of a sum of two scatters, one is left
        for v, (reader, *others) in self.readers.items() if self.backend.pours_scatters else ():
            if reader is not None and not others and reader.name in ("add", "add_any") and self._is_into_zeros(v):
                found.setdefault(reader.index, v)
        return {v: index for index, v in found.items()}

    @cached_property
    def readers(self) -> Mapping[int, Sequence[Op | None]]:
        """Value -> the operation that reads it, for every place where it is read; None where it leaves."""
        found: dict[int, list[Op | None]] = {}
        for op in self.graph.walk():
            leaving = [atom for region in op.regions for atom in region.outputs]
            for reader, atoms in ((op, op.inputs), (None, leaving)):
                for v in (atom for atom in atoms if isinstance(atom, int)):
                    found.setdefault(v, []).append(reader)
        for v in values(self.graph.outputs):
            found.setdefault(v, []).append(None)
        return found

    def is_renamed(self, op: Op) -> bool:
        """The result is another name for the operand: so is a transpose, if reductions alone read it."""
        if op.name == "transpose" and self.backend.has_library:
            read = self.readers.get(op.outputs[0], ())
            return bool(read) and all(reader is not None and reader.name in REDUCTIONS for reader in read)
        return op.name in RENAMINGS

    def _is_into_zeros(self, value: int) -> bool:
        """A scatter of one element or window per row, into zeros."""
        op = self.makers.get(value)
        if op is None or op.name != "scatter-add" or not op.params["dimension_numbers"].operand_batching_dims:
            return False
        zeros = self.makers.get(op.inputs[0]) if isinstance(op.inputs[0], int) else None
        if zeros is None or zeros.name != "broadcast_in_dim" or isinstance(zeros.inputs[0], int):
            return False
        return zeros.inputs[0].value == 0

    def operands(self, op: Op) -> tuple[Atom, ...]:
        """What an operation reads."""
        if op.tag not in self._copying:
            return tuple(map(self.root, op.inputs))
        return tuple([self.read(f"{op.tag}.in{k}", atom) for k, atom in enumerate(op.inputs)])

    def results(self, op: Op, region: Region) -> tuple[Atom, ...]:
        """What leaves a body."""
        return tuple(self.read(f"{op.tag}.{region.name}.out{j}", atom) for j, atom in enumerate(region.outputs))


def values(atoms: Sequence[Atom]) -> tuple[int, ...]:
    """The distinct values among atoms."""
    return tuple(dict.fromkeys([a for a in atoms if isinstance(a, int)]))


def flatten(
    graph: Graph,
    backend: Backend,
    reads: Mapping[str, Hashable],
    devices: int = 1,
    views: AbstractSet[int] = frozenset(),
) -> Program:
    """The steps of a program; for the rest see `Program`."""
    program = Program(graph, backend, reads, devices, views)
    _emit(program, program.top, graph.ops, ())
    program.top.leaving = values([program.read(f"out{i}", atom) for i, atom in enumerate(graph.outputs)])
    return program


def _emit(p: Program, frame: Frame, ops: Sequence[Op], after: tuple[int, ...]) -> None:
    for op in ops:
        barriers = _barriers(p, op) if p.barriers else ()
        waits = (*after, *(v for i in barriers for v in p.barriers[i])) if barriers else after
        if op.regions:
            _REGIONS.get("remat" if op.name in jax_compat.REMAT else op.name, _branches)(p, frame, op, waits)
            continue
        if isinstance(op.inputs[0] if op.inputs else None, int) and p.is_renamed(op):
            p.alias[op.outputs[0]] = p.operands(op)[0]
        elif op.name == "optimization_barrier":
            barriers = _hold(p, op)
        elif op.outputs[0] in p.poured or _merged(p, frame, op, (after, barriers)):
            continue
        elif (rewritten := _rewritten(p, op)) is not None:
            rewritten(p, frame, op, waits)
            barriers = ()
        else:
            inputs, kind = values([*_prepared(p, frame, op, p.operands(op))]), _kind(p, op)
            if op.name in (*PRODUCTS, *REDUCTIONS):
                _computed(p, frame, Step(op, op.name, kind, inputs, op.outputs, waits))
            else:
                frame.steps.append(Step(op, op.name, kind, inputs, op.outputs, waits))
            barriers = barriers if kind == LIGHT else ()
            p.cheap.update(op.outputs if op.name in CHEAP or op.name in MOVES else ())
        if barriers:
            p.behind_barriers.update(dict.fromkeys(op.outputs, barriers))


def _merged(p: Program, frame: Frame, op: Op, behind: Hashable) -> bool:
    """True for a broadcast that was made before, behind the same, whose result becomes another name for that one."""
    if op.name != "broadcast_in_dim" or not p.backend.merges_broadcasts:
        return False
    (atom,), type_ = p.operands(op), p.graph.types[op.outputs[0]]
    source = atom if isinstance(atom, int) else str(atom)
    key = (source, type_, tuple(op.params["broadcast_dimensions"]), behind, op.outputs[0] in p.changed)
    known = frame.made.setdefault(key, op.outputs[0])
    if known != op.outputs[0]:
        p.alias[op.outputs[0]] = known
    return known != op.outputs[0]


def _barriers(p: Program, op: Op) -> tuple[int, ...]:
    """The barriers that an operation reads from behind."""
    return tuple(dict.fromkeys(i for a in values(op.inputs) for i in p.behind_barriers.get(a, ())))


def _hold(p: Program, op: Op) -> tuple[int, ...]:
    """A barrier gives what it holds other names; where the compiler keeps it, all of it is there before any is read."""
    operands = p.operands(op)
    p.alias.update(zip(op.outputs, operands, strict=True))
    if not p.backend.keeps_barriers:
        return ()
    p.barriers.append(values(operands))
    return (len(p.barriers) - 1,)


def _kind(p: Program, op: Op) -> str:
    if (
        p.backend.scatters_fuse
        and op.name.startswith("scatter")
        and op.params["dimension_numbers"].operand_batching_dims
    ):
        return LIGHT
    return _KIND.get(op.name, HEAVY)


def _computed(p: Program, frame: Frame, step: Step) -> None:
    """A product or a reduction, in float32 if it is one of half floats: of copies, and its result is rounded."""
    inputs = tuple(_widened(p, frame, step.op, v) if p.is_half(v) else v for v in step.inputs)
    rounded = tuple(v for v in step.outputs if p.is_half(v))
    wide = {v: p.new(v, _wide(p.type_of(v))) for v in rounded}
    outputs = tuple(wide.get(v, v) for v in step.outputs)
    frame.steps.append(Step(step.op, step.name, step.kind, inputs, outputs, step.after))
    frame.steps.extend(Step(step.op, ROUND, LIGHT, (wide[v],), (v,)) for v in rounded)


def _widened(p: Program, frame: Frame, op: Op, value: int) -> int:
    """A value in float32, once for all that reads it so."""
    key = ("widened", p.behind(value))
    if key not in frame.made:
        frame.made[key] = _made_of(p, value, _wide(p.type_of(value)))
        frame.steps.append(Step(op, "widen", LIGHT, (value,), (frame.made[key],)))
    return frame.made[key]


def _wide(half: Type) -> Type:
    return Type(half.shape, "float32", 4)


def hashes(graph: Graph, op: Op) -> bool:
    """Whether an operation draws random bits that are hashes of counters, which any device can make a part of."""
    return op.name == "random_bits" and jax_compat.hashes_keys(graph.type_of(op.inputs[0]).dtype)


def _rewritten(p: Program, op: Op) -> Callable[[Program, Frame, Op, tuple[int, ...]], None] | None:
    """What makes the steps that a backend runs instead of an operation; None if it runs the operation."""
    if p.backend.hashes_in_pairs and hashes(p.graph, op):
        return _hashed
    if op.index in p.poured.values():
        return _poured
    if p.backend.multiplies_outer and _sums_nothing(p, op):
        return _outer
    if p.backend.masks_groups and op.name == "ragged_dot_general":
        return _masked
    return _pooled if p.backend.expands_pools and op.name == "select_and_scatter_add" else None


def _poured(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    """A sum with a scatter into zeros, as a scatter into the other operand.

    (openxla/xla, xla/hlo/transforms/simplifiers/algebraic_simplifier.cc: HandleAdd.)
    """
    k, poured = next((k, atom) for k, atom in enumerate(op.inputs) if isinstance(atom, int) and atom in p.poured)
    scatter = p.makers[poured]
    inputs = values((p.operands(op)[1 - k], *p.operands(scatter)[1:]))
    frame.steps.append(Step(op, scatter.name, HEAVY, inputs, op.outputs, after))


def _masked(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    """A product of ragged groups reads its first operand once for every group, zero outside of the group.

    Where the ragged dimension is contracted, it reads the second one so as well. (openxla/xla,
    xla/service/ragged_dot_rewriter.cc.)
    """
    numbers = op.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    groups, operands = p.graph.type_of(op.inputs[2]).shape[-1], p.operands(op)
    masked = [*operands[:2]]
    for k in (0, 1) if numbers.lhs_ragged_dimensions[0] in contracted else (0,):
        for value in values(operands[k : k + 1]):
            type_ = p.type_of(p.behind(value))
            masked[k] = _made_of(p, value, Type(type_.shape, type_.dtype, type_.itemsize * groups))
            frame.steps.append(Step(op, "mask", LIGHT, values((value, *operands[2:])), values(masked[k : k + 1])))
    _computed(p, frame, Step(op, op.name, HEAVY, values(masked), op.outputs, after))


def _made_of(p: Program, value: int, kind: Type | None = None) -> int:
    """A value of this type, or of the same one, that is made of a value or a copy and lies where that does."""
    made = p.new(p.behind(value), kind)
    piece = p.tokens[value][1] if value in p.tokens else p.pieces.get(value)
    if piece is not None:
        p.pieces[made] = piece
    return made


def _sums_nothing(p: Program, op: Op) -> bool:
    """A product whose contracted dimensions have one element, or none is contracted."""
    if op.name != "dot_general":
        return False
    (contracted, _), _ = op.params["dimension_numbers"]
    shape = p.graph.type_of(op.inputs[0]).shape
    return all(shape[d] == 1 for d in contracted)


def _outer(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    """A product without a sum, as a multiplication of operands that are broadcast to its shape.

    (openxla/xla, xla/hlo/transforms/simplifiers/algebraic_simplifier.cc: HandleDot.)
    """
    inputs = values([*_spread(p, frame, op, p.operands(op))])
    frame.steps.append(Step(op, "mul", LIGHT, inputs, op.outputs, after))
    p.cheap.update(op.outputs)


def _pooled(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    """The gradient of a maximum over windows: the places of the maxima, by arrays of all places, and a scatter to them.

    (openxla/xla, xla/service/select_and_scatter_expander.cc.)
    """
    source, operand = values(p.operands(op))
    shape, pooled = p.type_of(operand).shape, p.type_of(source).shape
    places: list[int] = []
    for dim in range(len(shape)):
        key = ("place", shape, dim)
        if key not in frame.made:
            frame.made[key] = p.new(operand, Type(shape, "int32", 4))
            frame.steps.append(Step(op, "iota", HEAVY, (), (frame.made[key],)))
        places.append(frame.made[key])
    zeros, greatest = p.new(operand), p.new(source)
    found, indices = (tuple(p.new(source, Type(pooled, "int32", 4)) for _ in shape) for _ in range(2))
    frame.steps.append(Step(op, "zeros", HEAVY, (), (zeros,)))
    frame.steps.append(Step(op, "reduce_window", HEAVY, (operand, *places), (greatest, *found), after))
    frame.steps.append(Step(op, "concatenate", HEAVY, found, indices))
    frame.steps.append(Step(op, "scatter-add", HEAVY, (zeros, *indices, source), op.outputs, after))


def _hashed(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    """A loop makes the two words of every hash; joining them is elementwise."""
    words = (p.new(op.outputs[0]), p.new(op.outputs[0]))
    frame.steps.append(Step(op, "threefry2x32", HEAVY, values(p.operands(op)), words, after))
    frame.steps.append(Step(op, "xor", LIGHT, words, op.outputs, after))


# What a backend does with operands first


def _prepared(p: Program, frame: Frame, op: Op, operands: tuple[Atom, ...]) -> Iterator[Atom]:
    if op.name in _ORDERS and p.backend.turns_operands:
        order = _ORDERS[op.name]
        yield from (_turned(p, frame, op, a, order(op, k)) for k, a in enumerate(operands) if isinstance(a, int))
    elif op.name in ELEMENTWISE and p.graph.types[op.outputs[0]].rank > 1:
        yield from _spread(p, frame, op, operands)
    else:
        yield from operands


def _turned(p: Program, frame: Frame, op: Op, value: int, order: Sequence[int]) -> int:
    """An operand with its dimensions in this order; matrices are multiplied from either side as they are.

    One that is in order is read as a matrix, which is another name for it, or made a second time if that is cheap.
    """
    if len(order) <= 2 or (
        list(order) == sorted(order) and (op.name != "dot_general" or p.behind(value) not in p.cheap)
    ):
        return value
    key = (p.behind(value), tuple(order))
    if key not in frame.made:
        frame.made[key] = _made_of(p, value)
        frame.steps.append(Step(op, "turn", LIGHT, (value,), (frame.made[key],)))
    return frame.made[key]


def _spread(p: Program, frame: Frame, op: Op, operands: tuple[Atom, ...]) -> Iterator[Atom]:
    """Operands of an elementwise operation as arrays of its shape, one for each smaller operand and shape."""
    shape = p.graph.types[op.outputs[0]].shape
    for original, atom in zip(op.inputs, operands, strict=True):
        type_ = p.graph.type_of(original)
        scalar = not isinstance(atom, int) and not type_.shape
        if type_.shape == shape or not (p.backend.spreads_scalars if scalar else type_.rank):
            yield atom
            continue
        key = (p.behind(atom) if isinstance(atom, int) else str(atom), type_.dtype, shape)
        if key not in frame.made:
            frame.made[key] = p.new(op.outputs[0])
            frame.steps.append(Step(op, "spread", LIGHT, values([atom]), (frame.made[key],)))
        yield frame.made[key]


def _dot_order(op: Op, k: int) -> list[int]:
    """Batch, rows, contracted; batch, contracted, columns."""
    contracted, batch = op.params["dimension_numbers"]
    rank = len(op.equation.invars[k].aval.shape)
    free = [d for d in range(rank) if d not in contracted[k] and d not in batch[k]]
    return [*batch[k], *free, *contracted[k]] if k == 0 else [*batch[k], *contracted[k], *free]


def _conv_order(op: Op, k: int) -> list[int]:
    """Batch, space, features; space, input features, output features."""
    spec = op.params["dimension_numbers"][k]
    return [spec[0], *spec[2:], spec[1]] if k == 0 else [*spec[2:], spec[1], spec[0]]


_ORDERS: Mapping[str, Callable[[Op, int], list[int]]] = {
    "dot_general": _dot_order,
    "conv_general_dilated": _conv_order,
}


# Regions


def _inline(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    operands = p.operands(op)
    held = values(operands) if op.params.get("differentiated") and p.backend.keeps_barriers else ()
    _instead(p, frame, op, op.regions[0], operands, (*after, *held))


def _instead(
    p: Program, frame: Frame, op: Op, region: Region, operands: Sequence[Atom], after: tuple[int, ...]
) -> None:
    """A body instead of the operation that has it."""
    p.alias.update(zip(region.inputs, operands, strict=True))
    _emit(p, frame, region.ops, after)
    p.alias.update(zip(op.outputs, p.results(op, region), strict=True))


def _body(p: Program, region: Region) -> Frame:
    frame = Frame()
    _emit(p, frame, region.ops, ())
    return frame


def _scan(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    region, operands = op.regions[0], p.operands(op)
    constants, carries = jax_compat.scan_counts(op.params)
    first = constants + carries
    p.alias.update(zip(region.inputs[:constants], operands[:constants], strict=True))
    p.alias.update(zip(region.inputs[constants:first], op.outputs[:carries], strict=True))
    operands = (*operands[:first], *(_sliced(p, frame, op, atom) for atom in operands[first:]))
    body = Frame()
    for value, atom in zip(region.inputs[first:], operands[first:], strict=True):
        body.steps.append(Step(op, "slice", LIGHT, values([atom]), (value,)))
    _emit(p, body, region.ops, ())
    results = p.results(op, region)
    stored = zip(op.outputs[carries:], results[carries:], strict=True)
    p.stacked.update((out, p.behind(atom)) for out, atom in stored if isinstance(atom, int))
    body.steps.append(Step(op, "store", STORE, values(results[carries:]), ()))
    body.leaving, body.carried = values(results[:carries]), _carried(results[:carries], op.outputs)
    taken = _taken(operands[constants:first], op.outputs, (*operands[:constants], *operands[first:]))
    frame.steps.append(Step(op, op.name, LOOP, values(operands), op.outputs, after, (body,), taken))


def _sliced(p: Program, frame: Frame, op: Op, atom: Atom) -> Atom:
    """What a loop takes slices of: in bfloat16 a copy in float32, which is made before the loop."""
    if isinstance(atom, int) and p.is_half(atom) and p.type_of(atom).dtype == "bfloat16":
        return _widened(p, frame, op, atom)
    return atom


def _while(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    condition, body = op.regions
    operands = p.operands(op)
    n_cond, n_body = op.params["cond_nconsts"], op.params["body_nconsts"]
    p.alias.update(zip(condition.inputs[:n_cond], operands[:n_cond], strict=True))
    p.alias.update(zip(body.inputs[:n_body], operands[n_cond : n_cond + n_body], strict=True))
    p.alias.update(zip(condition.inputs[n_cond:], op.outputs, strict=True))
    p.alias.update(zip(body.inputs[n_body:], op.outputs, strict=True))
    frames = (_body(p, condition), _body(p, body))
    results = p.results(op, body)
    frames[1].leaving, frames[1].carried = values(results), _carried(results, op.outputs)
    taken = _taken(operands[n_cond + n_body :], op.outputs, operands[: n_cond + n_body])
    frame.steps.append(Step(op, op.name, LOOP, values(operands), op.outputs, after, frames, taken))


def _taken(started: Sequence[Atom], results: Sequence[int], read: Sequence[Atom]) -> tuple[tuple[int, int], ...]:
    """What a loop takes over: what it starts from, unless it is read in every iteration besides."""
    besides = values(read)
    return tuple((a, v) for a, v in zip(started, results, strict=False) if isinstance(a, int) and a not in besides)


def _carried(leaving: Sequence[Atom], results: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """What leaves a body, and the result that it leaves as."""
    return tuple((a, v) for a, v in zip(leaving, results, strict=False) if isinstance(a, int) and a != v)


def _branches(p: Program, frame: Frame, op: Op, after: tuple[int, ...]) -> None:
    """A conditional, or bodies of an unknown kind: each is a frame and leaves its results in the same place.

    Of branches for different platforms there is one, that for the platform.
    """
    operands = p.operands(op)
    for platforms, region in zip(op.params.get("branches_platforms") or (), op.regions, strict=False):
        if platforms is None or p.backend.name in platforms:
            _instead(p, frame, op, region, operands[len(operands) - len(region.inputs) :], after)
            return
    frames: list[Frame] = []
    for region in op.regions:
        p.alias.update(zip(region.inputs, operands[len(operands) - len(region.inputs) :], strict=True))
        frames.append(_body(p, region))
        results = p.results(op, region)
        frames[-1].leaving, frames[-1].carried = values(results), _carried(results, op.outputs)
    frame.steps.append(Step(op, op.name, LOOP, values(operands), op.outputs, after, tuple(frames)))


_REGIONS: Mapping[str, Callable[[Program, Frame, Op, tuple[int, ...]], None]] = {
    "remat": _inline,
    "scan": _scan,
    "while": _while,
}
