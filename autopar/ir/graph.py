"""The program as autopar sees it: operations in static single assignment form, with regions for loops and branches.

A value is an integer; `Graph.types[value]` is its type. An operation takes atoms (values or literals) and defines
values; `scan`, `while`, `cond` and rematerialised bodies hold regions, whose values are numbered in the same space, so
one flat array can hold a fact about every value of the program. Analyses see nested regions through

    Graph.walk                  every operation, outer before inner, in program order
    Graph.bodies, Graph.runs    every level of the program, with its executions
    Graph.producers, Graph.uses where a value comes from, and where it is read
    control_flow.entries        how operands enter regions
    Copier                      operations again, with values of their own

The printed form (`Graph.__str__`) is what tests are written in; `autopar.ir.text.parser` describes and reads it:

    graph(%0: f32[8,4] "w", %1: f32[2,8] "x") {
      %2: f32[2,4] = dot_general[dimension_numbers=(((1,), (0,)), ((), ()))](%1, %0)  # forward model.py:3
      return %2 "y"
    }
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any, Literal, NamedTuple

import numpy as np

from autopar import jax_compat
from autopar.errors import GraphError
from autopar.ir.text.printer import graph_lines, short_dtype

Phase = Literal["forward", "backward", "update"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "update")

#: Trip count assumed for a loop whose bound is only known at run time.
UNKNOWN_TRIPS = 10


def phase_of(name_stack: Any) -> Phase | None:
    """The phase that JAX's name stack tells of an operation; None if it is not part of a differentiated function."""
    text = str(name_stack)
    if "transpose(" in text:
        return "backward"
    return "forward" if "jvp(" in text else None


@dataclass(frozen=True, slots=True)
class Type:
    """Shape and dtype name of one value. Extended dtypes (typed PRNG keys) keep their own name, as "key<fry>".

    Attributes:
        size: number of elements.
        nbytes: bytes of the whole value on one device.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    size: int = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", math.prod(self.shape))
        object.__setattr__(self, "nbytes", self.size * self.itemsize)

    @property
    def rank(self) -> int:
        return len(self.shape)

    def __str__(self) -> str:
        return f"{short_dtype(self.dtype)}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A literal operand; `value` is JAX's (a scalar, in practice)."""

    value: Any
    type: Type

    def __str__(self) -> str:
        return f"{np.asarray(self.value)!s}" if self.type.rank == 0 else f"const {self.type}"


Atom = int | Constant


def is_zero(atom: Atom) -> bool:
    """True for a literal zero."""
    return isinstance(atom, Constant) and not np.any(np.asarray(atom.value))


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A nested body: its operation defines `inputs`; `outputs` are atoms of the body."""

    name: str
    inputs: tuple[int, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Atom, ...]
    constants: tuple[tuple[int, Any], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operation.

    Attributes:
        index: position in program order, unique in the graph; codegen tags emitted operations with it.
        name: JAX's name of the primitive.
        signature: operations with equal signatures have equal primitive, parameters and operand types.
        inputs, outputs: atoms read, values defined.
        equation: the JAX equation, opaque to every pass; codegen binds it again.
        name_stack: JAX's name stack, enclosing calls included.
        regions: nested bodies; empty for leaves.
        trips: how often the regions run; None if only known at run time.
        source: the user's "file.py:line", empty if none.
    """

    index: int
    name: str
    signature: int
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    equation: Any
    name_stack: Any
    phase: Phase
    source: str
    regions: tuple[Region, ...] = ()
    trips: int | None = 1

    @property
    def tag(self) -> str:
        return f"op{self.index}"

    def walk(self) -> Iterator[Op]:
        """The operation itself and every operation in its regions, outer before inner, in program order."""
        yield self
        for region in self.regions:
            for op in region.ops:
                yield from op.walk()

    @property
    def is_differentiated(self) -> bool:
        """True if JAX differentiates it, or made it by differentiation."""
        return self.phase == "backward" or phase_of(self.name_stack) is not None

    @property
    def params(self) -> Mapping[str, Any]:
        """The primitive's parameters."""
        return self.equation.params


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """One level of a program: its top level, or a region.

    Attributes:
        prefix: of the sites of its results: "" for the top level, "op12.body." for a region.
        inputs: arguments, or inputs of the region.
        runs: executions in one run of the program; a loop of unknown trip count counts `UNKNOWN_TRIPS`.
    """

    prefix: str
    inputs: tuple[int, ...]
    constants: tuple[tuple[int, Any], ...]
    ops: tuple[Op, ...]
    outputs: tuple[Atom, ...]
    runs: int

    def walk(self) -> Iterator[Body]:
        """The body itself and all regions in it, outer before inner, in program order."""
        yield self
        for op in self.ops:
            for r in op.regions:
                runs = self.runs * (op.trips or UNKNOWN_TRIPS)
                yield from Body(f"{op.tag}.{r.name}.", r.inputs, r.constants, r.ops, r.outputs, runs).walk()


class Use(NamedTuple):
    """A place where a value is read: an operand of `op`, or, if `op` is None, a result of the program or of a region.

    `site` is its name in a plan: "op12.in0", "op12.body.out1", "out3".
    """

    op: Op | None
    position: int
    site: str


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often parts of a program run per step, where that is not once, as in the passes of a pipeline stage.

    Attributes:
        ops: index of a top-level operation -> executions per step.
        inputs: argument value -> how often a new value arrives per step.
        results: position -> how often the result is returned per step.
        parts: position of a result -> position of the argument that has all of them along a leading dimension, for
            a part of the program that runs later.
    """

    ops: Mapping[int, int]
    inputs: Mapping[int, int]
    results: Mapping[int, int]
    parts: Mapping[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, eq=False)
class Graph:
    """A traced program.

    Attributes:
        types: type of every value.
        inputs: the argument leaves, in flattening order.
        input_paths: path of each, such as "state/params/w".
        outputs, output_paths: results and their paths.
        constants: values that the function closed over, with their arrays.
        ops: top-level operations in program order.
        effects: names of the program's side effects (debug prints, callbacks).
        repeats: None if all of it runs once per step.
        carried: results that are the next step's arguments, position -> position; None: inferred from paths
            (`autopar.ir.train_state`).
    """

    types: tuple[Type, ...]
    inputs: tuple[int, ...]
    input_paths: tuple[str, ...]
    outputs: tuple[Atom, ...]
    output_paths: tuple[str, ...]
    constants: tuple[tuple[int, Any], ...]
    ops: tuple[Op, ...]
    effects: tuple[str, ...] = ()
    repeats: Repeats | None = None
    carried: Mapping[int, int] | None = None

    def lacks_layouts(self, op: Op, values: Container[int]) -> bool:
        """Whether an operation has results, and none of them is scalar or among these values, those with a layout."""
        return bool(op.outputs) and all(self.types[v].rank and v not in values for v in op.outputs)

    def type_of(self, atom: Atom) -> Type:
        return self.types[atom] if isinstance(atom, int) else atom.type

    def walk(self) -> Iterator[Op]:
        """Every operation, regions included, outer before inner, in program order."""
        return iter(self._all)

    @cached_property
    def kept(self) -> dict[Any, dict[Any, Any]]:
        """What passes found in the graph, by function and its other arguments (`autopar.ir.on_graph`)."""
        return {}

    @cached_property
    def _all(self) -> tuple[Op, ...]:
        return tuple(inner for op in self.ops for inner in op.walk())

    @cached_property
    def by_index(self) -> Mapping[int, Op]:
        return {op.index: op for op in self.walk()}

    @cached_property
    def bodies(self) -> tuple[Body, ...]:
        """The top level and every region, outer before inner, in program order."""
        return tuple(Body("", self.inputs, self.constants, self.ops, self.outputs, 1).walk())

    @cached_property
    def runs(self) -> Mapping[int, int]:
        """Index of every operation -> its executions in one run of the program."""
        return {op.index: body.runs for body in self.bodies for op in body.ops}

    @cached_property
    def producers(self) -> Mapping[int, Op]:
        """Value -> the operation that computes it; arguments, constants and inputs of regions have none."""
        return {v: op for op in self.walk() for v in op.outputs}

    @cached_property
    def uses(self) -> Mapping[int, tuple[Use, ...]]:
        """Value -> where it is read: body by body, in each in program order."""
        return {value: self.uses_of(value) for value in self._readers}

    def is_zero(self, atom: Atom) -> bool:
        """True for a literal zero, and for an array of zeros that a broadcast makes."""
        producer = self.producers.get(atom) if isinstance(atom, int) else None
        if producer is not None and producer.name == "broadcast_in_dim":
            return self.is_zero(producer.inputs[0])
        return is_zero(atom)

    def uses_of(self, value: int) -> tuple[Use, ...]:
        """Where one value is read, in the order of `uses`."""
        uses: list[Use] = []
        for reader in self._readers.get(value, ()):
            if isinstance(reader, Op):
                uses += [Use(reader, k, f"{reader.tag}.in{k}") for k, atom in enumerate(reader.inputs) if atom == value]
            else:
                uses += [Use(None, k, f"{reader.prefix}out{k}") for k, a in enumerate(reader.outputs) if a == value]
        return tuple(uses)

    @cached_property
    def _readers(self) -> Mapping[int, Sequence[Op | Body]]:
        """Value -> the operations that read it, and the bodies that return it, each once."""
        readers: defaultdict[int, list[Op | Body]] = defaultdict(list)
        for body in self.bodies:
            for op in body.ops:
                for atom in dict.fromkeys(op.inputs):
                    if isinstance(atom, int):
                        readers[atom].append(op)
            for atom in dict.fromkeys(body.outputs):
                if isinstance(atom, int):
                    readers[atom].append(body)
        return readers

    @cached_property
    def names(self) -> Mapping[int, str]:
        """Path of each argument value."""
        return dict(zip(self.inputs, self.input_paths, strict=True))

    def __str__(self) -> str:
        return "\n".join(graph_lines(self)) + "\n"


@dataclass(frozen=True, eq=False)
class Copier:
    """Copies operations with results and regions of their own, on renamed operands.

    Attributes:
        fresh: makes a value of the type of another.
        names: value -> its copy; values that are not named stay as they are. Values that copies define are added.
        change: what else becomes different in each copy.
    """

    fresh: Callable[[int], int]
    names: dict[int, int]
    change: Callable[[Op], Op] = lambda op: op

    def op(self, op: Op) -> Op:
        inputs, regions = renamed(op.inputs, self.names), tuple(map(self.region, op.regions))
        return self.change(replace(op, inputs=inputs, outputs=self._values(op.outputs), regions=regions))

    def region(self, region: Region) -> Region:
        inputs = self._values(region.inputs)
        constants = tuple((self._values([v])[0], array) for v, array in region.constants)
        ops = tuple(map(self.op, region.ops))
        return Region(region.name, inputs, ops, renamed(region.outputs, self.names), constants)

    def _values(self, values: Sequence[int]) -> tuple[int, ...]:
        self.names.update((v, self.fresh(v)) for v in values)
        return tuple(self.names[v] for v in values)


def renamed(atoms: Iterable[Atom], names: Mapping[int, int]) -> tuple[Atom, ...]:
    """Atoms in which some values are replaced."""
    return tuple(names.get(a, a) if isinstance(a, int) else a for a in atoms)


def numbered(ops: Sequence[Op], numbers: count[int]) -> tuple[Op, ...]:
    """Operations with indices in program order, outer before inner."""
    renumbered: list[Op] = []
    for op in ops:
        index = next(numbers)
        if not op.regions and op.index == index:
            renumbered.append(op)
            continue
        regions = tuple([replace(r, ops=numbered(r.ops, numbers)) for r in op.regions])
        # `replace` would take three times as long, for nearly every operation of a rewritten program
        what = op.name, op.signature, op.inputs, op.outputs, op.equation, op.name_stack, op.phase, op.source
        renumbered.append(Op(index, *what, regions, op.trips))
    return tuple(renumbered)


# The verifier: its checks are data, each a name and a generator of complaints.


def _defined_once(graph: Graph) -> Iterator[str]:
    seen: dict[int, str] = {}
    for value, where in _definitions(graph):
        if value in seen:
            yield f"%{value} is defined by {seen[value]} and again by {where}"
        seen[value] = where


def _definitions(graph: Graph) -> Iterator[tuple[int, str]]:
    yield from ((v, "the arguments") for v in graph.inputs)
    yield from ((v, "the constants") for v, _ in graph.constants)
    for op in graph.walk():
        yield from ((v, f"op{op.index} {op.name}") for v in op.outputs)
        for region in op.regions:
            yield from ((v, f"op{op.index} {region.name}") for v in (*region.inputs, *(c for c, _ in region.constants)))


def _defined_before_use(graph: Graph) -> Iterator[str]:
    top = {*graph.inputs, *(v for v, _ in graph.constants)}
    yield from _undefined_uses(graph.ops, graph.outputs, top, "the graph")


def _undefined_uses(ops: tuple[Op, ...], outputs: tuple[Atom, ...], defined: set[int], where: str) -> Iterator[str]:
    defined = set(defined)
    for op in ops:
        yield from (
            f"op{op.index} {op.name} reads %{a} before it is defined" for a in sorted(_values(op.inputs) - defined)
        )
        for region in op.regions:
            inner = defined | set(region.inputs) | {v for v, _ in region.constants}
            yield from _undefined_uses(region.ops, region.outputs, inner, f"op{op.index} {region.name}")
        defined |= set(op.outputs)
    yield from (f"{where} returns %{a}, which is not defined" for a in sorted(_values(outputs) - defined))


def _values(atoms: tuple[Atom, ...]) -> set[int]:
    return {a for a in atoms if isinstance(a, int)}


def _typed(graph: Graph) -> Iterator[str]:
    yield from (f"%{v} has no type" for v, _ in _definitions(graph) if not 0 <= v < len(graph.types))


def _ordered(graph: Graph) -> Iterator[str]:
    last = -1
    for op in graph.walk():
        if op.index <= last:
            yield f"op{op.index} {op.name} stands after op{last}"
        last = op.index


def _paths(graph: Graph) -> Iterator[str]:
    if len(graph.inputs) != len(graph.input_paths):
        yield f"{len(graph.inputs)} arguments but {len(graph.input_paths)} paths"
    if len(graph.outputs) != len(graph.output_paths):
        yield f"{len(graph.outputs)} results but {len(graph.output_paths)} paths"


CHECKS: tuple[tuple[str, Callable[[Graph], Iterator[str]]], ...] = (
    ("every value is defined once", _defined_once),
    ("every value is defined before it is used", _defined_before_use),
    ("every value has a type", _typed),
    ("operations are numbered in program order", _ordered),
    ("arguments and results have paths", _paths),
)


def verify(graph: Graph) -> Graph:
    """The graph itself if it satisfies all invariants in `CHECKS`; else GraphError with the first violation."""
    for title, check in CHECKS:
        for complaint in check(graph):
            raise GraphError(f"the graph breaks '{title}': {complaint}")
    return graph


def graph_hash(graph: Graph) -> str:
    """A hash of the program: operations, parameters, types, paths; equal in every process."""
    digest = hashlib.sha256()
    described: dict[int, str] = {}
    types = {t: str(t) for t in set(graph.types)}  # looked up, never iterated
    for op in graph.walk():
        if op.signature not in described:
            params = jax_compat.without_flat_trees(op.params)
            described[op.signature] = f"{op.name} {_stable(params)}{_stable_body(op)}"
        atoms = " ".join(str(a) for a in op.inputs)
        outs = " ".join(f"{v}:{types[graph.types[v]]}" for v in op.outputs)
        digest.update(f"{described[op.signature]}|{atoms}|{outs}|{op.trips}\n".encode())
    for title, paths, atoms in (("in", graph.input_paths, graph.inputs), ("out", graph.output_paths, graph.outputs)):
        for path, atom in zip(paths, atoms, strict=True):
            digest.update(f"{title} {path} {graph.type_of(atom)} {atom}\n".encode())
    if graph.repeats is not None:
        digest.update(repr((graph.repeats, graph.carried)).encode())
    return digest.hexdigest()[:32]


def _stable_body(op: Op) -> str:
    """Text of the program in a `shard_map`: its collectives are in a plan."""
    return re.sub(" at 0x[0-9a-f]+", "", str(op.params["jaxpr"])) if op.name == "shard_map" else ""


_PLAIN = (int, float, bool, str, type(None))


def _stable(value: Any) -> str:
    """Text of a parameter that is the same in every process: nothing that would print an address."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{_stable(v)}" for k, v in sorted(value.items(), key=lambda kv: str(kv[0]))) + "}"
    if isinstance(value, Sequence):
        return "(" + ",".join(map(_stable, value)) + ")"
    if isinstance(value, Set):
        return "{" + ",".join(sorted(map(_stable, value))) + "}"
    if hasattr(value, "axis_names") and hasattr(value, "axis_sizes"):  # a mesh: not its kind of device
        return f"{value.axis_names}{value.axis_sizes}"
    text = str(value)
    return type(value).__name__ if " at 0x" in text or "\n" in text else text
