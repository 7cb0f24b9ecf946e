"""A program under construction: the values that a move may read, and what is known of each.

A move draws values, appends nodes and says what it knows of the results. Types are JAX's own: every node is traced on
abstract values as it is appended, and one that JAX refuses is left out, so that moves need not know every rule of
dtypes and shapes. What moves keep track of is what makes most programs fall into microbatches:

    batch    the dimension that holds the examples, None for a value without them
    stage    0 known before any example, 1 an example's own, 2 a total over the batch, 3 an example's own that reads a
             total, 4 a total of such
    mixed    examples depend on each other: no product and no loss may read it
    smooth   a float64 that a loss may be taken of
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import Any

import jax
import numpy as np

from autopar.bench.fuzz.program import KEYS, Block, Leaf, Node, Type, function, type_of

MOST_ELEMENTS = 4096
LARGEST_STAGE = 4


@dataclass(frozen=True, slots=True)
class Value:
    """A name, its type, and what is known of it; see the module."""

    name: str
    type: Type
    batch: int | None = None
    stage: int = 0
    mixed: bool = False
    smooth: bool = False
    folded: tuple[int, int] = (1, 1)  # elements of other dimensions before and behind the examples in `batch`

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def rank(self) -> int:
        return len(self.type.shape)

    @property
    def dtype(self) -> str:
        return self.type.dtype

    @property
    def kind(self) -> str:
        """ "b" bool, "i" integer, "f" float, "c" complex, "k" key."""
        return kind(self.dtype)

    def free_dims(self) -> list[int]:
        """Dimensions without examples."""
        return [d for d in range(self.rank) if d != self.batch]


def kind(dtype: str) -> str:
    """The kind of a dtype, see `Value.kind`."""
    if dtype in KEYS:
        return "k"
    if dtype.startswith(("bfloat", "float")):
        return "f"
    return {"bool": "b", "complex64": "c", "complex128": "c"}.get(dtype, "i")


@dataclass(eq=False)
class Names:
    """What all blocks of one program share: names, types, and the leaves made so far."""

    batch: int
    types: dict[str, Type] = field(default_factory=dict[str, Type])
    leaves: list[Leaf] = field(default_factory=list[Leaf])
    left_out: int = 0
    _count: Iterator[int] = field(default_factory=itertools.count)

    def fresh(self, prefix: str) -> str:
        return f"{prefix}{next(self._count)}"

    def leaf(self, prefix: str, group: str, code: str, type_: Type) -> str:
        """A new argument leaf; `code` is a numpy expression, {shape} its shape."""
        name = self.fresh(prefix)
        self.leaves.append(Leaf(name, group, code.format(shape=type_.shape), type_))
        self.types[name] = type_
        return name


Pick = Callable[[Value], bool]


@dataclass(eq=False)
class Scope:
    """One block under construction.

    Attributes:
        rng: the source of every choice.
        names: what all blocks of the program share.
        values: what may be read, those of blocks around included.
        nodes: the block so far.
        depth: blocks around this one.
        trained: gives the names of the loss's own parameters where they are differentiated, leaf -> name inside.
        frozen: what is read here must have no gradient.
        closed: nothing may be read but what it is called with; parameters are constants.
    """

    rng: Random
    names: Names
    values: list[Value] = field(default_factory=list[Value])
    nodes: list[Node] = field(default_factory=list[Node])
    depth: int = 0
    trained: dict[str, str] | None = None
    frozen: bool = False
    closed: bool = False

    def inner(self, values: Sequence[Value], frozen: bool = False, closed: bool = False) -> Scope:
        """A block in this one that may read these values."""
        frozen, closed = frozen or self.frozen, closed or self.closed
        return Scope(self.rng, self.names, list(values), [], self.depth + 1, self.trained, frozen, closed)

    def within(self, value: Value, **facts: Any) -> Value:
        """A value under a new name, as a body is called with it."""
        inside = replace(value, name=self.names.fresh("c"), **facts)
        self.names.types[inside.name] = inside.type
        return inside

    def learn(self, value: Value, **facts: Any) -> Value:
        """Know more of a value."""
        updated = replace(value, **facts)
        self.values[self.values.index(value)] = updated
        return updated

    # Drawing

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def find(self, *picks: Pick) -> Value | None:
        """A value for which all hold, later ones more often."""
        fit = [v for v in self.values if all(pick(v) for pick in picks)]
        if not fit:
            return None
        return fit[max(self.rng.randrange(len(fit)), self.rng.randrange(len(fit)))]

    # Appending

    def emit(self, code: str, *reads: Value | str, bodies: Sequence[Block] = (), **facts: Any) -> Value | None:
        """One node with one result; None where JAX refuses it. Facts that are not given are those of the operands."""
        values = self._appended(code, reads, bodies, facts, many=False)
        return values[0] if values else None

    def emit_all(self, code: str, *reads: Value | str, bodies: Sequence[Block] = (), **facts: Any) -> list[Value]:
        """One node with as many results as its expression, a sequence, has; none where JAX refuses it."""
        return self._appended(code, reads, bodies, facts, many=True)

    def _appended(
        self, code: str, reads: Sequence[Value | str], bodies: Sequence[Block], facts: Mapping[str, Any], many: bool
    ) -> list[Value]:
        names = tuple(read.name if isinstance(read, Value) else read for read in reads)
        node = Node(("_",), code, names, tuple(bodies), many)
        types = self.traced(node)
        if types is None or any(np.prod(t.shape, dtype=float) > MOST_ELEMENTS for t in types):
            self.names.left_out += 1
            return []
        outs = tuple(self.names.fresh("v") for _ in types)
        self.nodes.append(replace(node, outs=outs))
        operands = [read for read in reads if isinstance(read, Value)]
        values = [Value(out, t, **_facts(operands, t, facts)) for out, t in zip(outs, types, strict=True)]
        self.names.types.update((v.name, v.type) for v in values)
        self.values.extend(values)
        return values

    def traced(self, node: Node) -> Sequence[Type] | None:
        """Types of a node's results, None if JAX refuses it."""
        if node.bodies:
            return _traced(node, node.free(), tuple(self.names.types[name] for name in node.free()))
        operands = tuple(f"a{i}" for i in range(len(node.reads)))
        return _traced_alone(replace(node, reads=operands), tuple(self.names.types[name] for name in node.reads))

    def block(self, prefix: str, params: Sequence[str], results: Sequence[Value], form: str = "") -> Block:
        """The finished block."""
        names = tuple(v.name for v in results)
        return Block(self.names.fresh(prefix), tuple(params), tuple(self.nodes), names, form)

    def unpack(self, whole: str, parts: Sequence[str]) -> None:
        """At the begin of the block, the parts of a tuple that it is called with."""
        self.nodes.insert(0, Node(tuple(parts), "{0}", (whole,), many=True))

    def param(
        self, shape: Sequence[int], code: str = "rng.normal(size={shape}) * 0.5", dtype: str = "float64"
    ) -> Value:
        """A parameter of the step; where a loss is being made, its name there."""
        type_ = Type(dtype, tuple(shape))
        if self.closed:
            constant = self.emit(f"0.4 * jnp.cos(jnp.arange({math.prod(shape)}.0)).reshape({type_.shape})")
            assert constant is not None
            return constant
        leaf = self.names.leaf("w", "params", code, type_)
        smooth = dtype == "float64" and not self.frozen
        if self.trained is None or dtype != "float64":
            return Value(leaf, type_, smooth=smooth)
        inside = self.trained[leaf] = self.names.fresh("p")
        self.names.types[inside] = type_
        return Value(inside, type_, smooth=smooth)

    def constant(self, code: str) -> Value | None:
        """A value that depends on no argument."""
        return self.emit(code)

    def stopped(self, value: Value) -> Value:
        """The value without its gradient."""
        if not value.smooth and value.kind not in "fc":
            return value
        return self.emit("lax.stop_gradient({0})", value, smooth=False) or value


def _traced(node: Node, names: Sequence[str], types: Sequence[Type]) -> Sequence[Type] | None:
    """Types of the results of a node that reads these."""
    run = function(Block("node", tuple(names), (replace(node, outs=("out",), many=False),), ("out",)))
    try:
        shapes = jax.eval_shape(run, *(t.abstract() for t in types))
    except Exception:  # whatever JAX says of a node that is no program
        return None
    return tuple(map(type_of, jax.tree.leaves(shapes)))


@lru_cache(maxsize=1 << 16)
def _traced_alone(node: Node, types: tuple[Type, ...]) -> Sequence[Type] | None:
    """That of a node without bodies, whose operands are named by their places."""
    names = dict.fromkeys(node.reads)
    return _traced(node, tuple(names), types)


def _facts(operands: Sequence[Value], type_: Type, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a result: what is given, else what all operands have in common."""
    batches = [v for v in operands if v.batch is not None]
    inferred: dict[str, Any] = {
        "batch": batches[0].batch if batches else None,
        "folded": batches[0].folded if batches else (1, 1),
        "stage": max((v.stage for v in operands), default=0),
        "mixed": any(v.mixed for v in operands),
        "smooth": any(v.smooth for v in operands),
    }
    inferred.update(facts)
    if inferred["batch"] is not None and inferred["stage"] in (2, 4):
        inferred["stage"] += 1
    inferred["smooth"] = inferred["smooth"] and type_.dtype == "float64"
    return inferred


# What moves look for


def batched(value: Value) -> bool:
    return value.batch is not None


def plain(value: Value) -> bool:
    """Examples that do not depend on each other, with products allowed."""
    return value.stage <= 1 and not value.mixed


def floating(value: Value) -> bool:
    return value.dtype == "float64"


def integral(value: Value) -> bool:
    return value.kind == "i"


def exact(value: Value) -> bool:
    """An integer, or a float with so many digits that the order of a sum does not show."""
    return integral(value) or floating(value)


def numeric(value: Value) -> bool:
    return value.kind in "if"


def boolean(value: Value) -> bool:
    return value.kind == "b"


def of_rank(least: int, most: int = 9) -> Pick:
    return lambda value: least <= value.rank <= most


def like(value: Value) -> Pick:
    """Of the same shape, with the examples in the same places."""
    return lambda other: (
        other.shape == value.shape
        and (other.batch is None or (other.batch, other.folded) == (value.batch, value.folded))
    )
