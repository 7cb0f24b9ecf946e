"""A train step as data: leaves, and a tree of blocks of nodes, each node one line of Python.

    Leaf    an argument: its name, its type, and the expression that makes its numbers
    Node    names = code(reads, bodies): `code` is a template, {0} the first name read, {b0} the first body
    Block   a function: parameters, nodes, results
    Program leaves, the block of the step, and where each result goes in (state, metrics)

A program is executed from the source that it prints (`Program.source`), so that a failure written to a file is the
program that failed. Bodies may read names of the blocks around them, as closures do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KEY = "key<fry>"  # the dtype of JAX's typed keys, as it prints it
KEYS = {KEY: "threefry2x32", "key<rbg>": "rbg"}


@dataclass(frozen=True, slots=True)
class Type:
    """Dtype and shape of a value."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.shape)

    def abstract(self) -> jax.ShapeDtypeStruct:
        """As JAX has it."""
        dtype: Any = jax.random.key(0, impl=KEYS[self.dtype]).dtype if self.dtype in KEYS else jnp.dtype(self.dtype)
        return jax.ShapeDtypeStruct(self.shape, dtype)

    def zeros(self) -> str:
        """An expression for a value of this type that depends on nothing."""
        if self.dtype in KEYS:
            key = f'jax.random.key(0, impl="{KEYS[self.dtype]}")'
            return f"jax.random.split({key}, {self.shape})" if self.shape else key
        return f"jnp.zeros({self.shape}, jnp.{jnp_name(self.dtype)})"


def type_of(aval: Any) -> Type:
    """The type of an abstract or concrete array."""
    return Type(str(aval.dtype), tuple(aval.shape))


def jnp_name(dtype: str) -> str:
    """How jax.numpy calls a dtype."""
    return "bool_" if dtype == "bool" else dtype


@dataclass(frozen=True, slots=True)
class Leaf:
    """An argument leaf.

    Attributes:
        name: what the step calls it.
        group: "params", "counters" or the name of a positional argument after the state.
        code: numpy expression of its numbers; `rng` is a generator.
        type: of the array.
    """

    name: str
    group: str
    code: str
    type: Type


@dataclass(frozen=True, slots=True)
class Node:
    """One line: `outs = code.format(*reads, b0=name of the first body, ...)`; `many`: the expression is a sequence."""

    outs: tuple[str, ...]
    code: str
    reads: tuple[str, ...] = ()
    bodies: tuple[Block, ...] = ()
    many: bool = False

    def free(self) -> tuple[str, ...]:
        """Names that it reads, those of its bodies included, in order."""
        return tuple(dict.fromkeys((*self.reads, *(name for body in self.bodies for name in body.free()))))


@dataclass(frozen=True, slots=True)
class Block:
    """A function of `params`; `form`: what it returns, {0} the first result. One result is returned alone."""

    name: str
    params: tuple[str, ...]
    nodes: tuple[Node, ...]
    results: tuple[str, ...]
    form: str = ""

    def free(self) -> tuple[str, ...]:
        """Names from around it that it reads."""
        defined = {*self.params, *(out for node in self.nodes for out in node.outs)}
        read = (*(name for node in self.nodes for name in node.free()), *self.results)
        return tuple(dict.fromkeys(name for name in read if name not in defined))

    def free_of_params(self) -> tuple[str, ...]:
        """Names that its nodes read, parameters among them."""
        return replace(self, params=()).free()

    def lines(self, indent: str = "") -> Iterator[str]:
        """Its source."""
        yield f"{indent}def {self.name}({', '.join(self.params)}):"
        inner = indent + "    "
        for node in self.nodes:
            for body in node.bodies:
                yield from body.lines(inner)
            yield f"{inner}{_targets(node)} = {expression(node)}"
        yield f"{inner}return {self._returns()}"

    def _returns(self) -> str:
        form = self.form or ("{0}" if len(self.results) == 1 else tuple_form(len(self.results)))
        return form.format(*self.results)


def _targets(node: Node) -> str:
    return ", ".join(node.outs) + ("," if node.many and len(node.outs) == 1 else "")


def tuple_form(count: int, start: int = 0) -> str:
    """ "({0}, {1},)" of so many places."""
    return f"({''.join(f'{{{i}}}, ' for i in range(start, start + count))})"


def expression(node: Node) -> str:
    """The right-hand side of a node."""
    return node.code.format(*node.reads, **{f"b{i}": body.name for i, body in enumerate(node.bodies)})


@dataclass(frozen=True, slots=True)
class Program:
    """A train step and its arguments.

    Attributes:
        seed: what it was drawn from.
        leaves: argument leaves; the state is those of the groups "params" and "counters".
        block: the step; its parameters are the names of the leaves.
        results: path of a result in (state, metrics), such as "params/w0" or "metrics/m1", and its name.
        batch: which positional arguments hold the batch; empty: autopar is to find them.
        types: of every name, those in bodies included.
    """

    seed: int
    leaves: tuple[Leaf, ...]
    block: Block
    results: tuple[tuple[str, str], ...]
    batch: tuple[int, ...] = ()
    types: Mapping[str, Type] = field(default_factory=dict[str, Type])

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the positional arguments behind the state, in order."""
        return tuple(dict.fromkeys(leaf.group for leaf in self.leaves if leaf.group not in STATE))

    def source(self) -> str:
        """The step as a Python function `step(state, ...)`, and `arguments(rng)` that makes its arguments."""
        return "\n".join([*self._step(), "", "", *self._arguments()]) + "\n"

    def _step(self) -> Iterator[str]:
        yield f"def step({', '.join(['state', *self.groups])}):"
        for leaf in self.leaves:
            source = f'state["{leaf.group}"]' if leaf.group in STATE else leaf.group
            yield f'    {leaf.name} = {source}["{leaf.name}"]'
        for node in self.block.nodes:
            for body in node.bodies:
                yield from body.lines("    ")
            yield f"    {_targets(node)} = {expression(node)}"
        entries: dict[str, list[str]] = {"params": [], "counters": [], "metrics": []}
        for path, name in self.results:
            group, key = path.split("/")
            entries[group].append(f'"{key}": {name}')
        state = f'{{"params": {{{", ".join(entries["params"])}}}, "counters": {{{", ".join(entries["counters"])}}}}}'
        yield f"    return {state}, {{{', '.join(entries['metrics'])}}}"

    def _arguments(self) -> Iterator[str]:
        yield "def arguments(rng):"
        for leaf in self.leaves:
            yield f"    {leaf.name} = {leaf.code}  # {leaf.type.dtype}{list(leaf.type.shape)}"
        groups = {g: ", ".join(f'"{x.name}": {x.name}' for x in self.leaves if x.group == g) for g in self.groups}
        state = {g: ", ".join(f'"{x.name}": {x.name}' for x in self.leaves if x.group == g) for g in STATE}
        group_dicts = ", ".join(f"{{{text}}}" for text in groups.values())
        yield f'    return {{"params": {{{state["params"]}}}, "counters": {{{state["counters"]}}}}}, {group_dicts}'

    def compiled(self) -> Step:
        """The step as a Python function, and its arguments."""
        return load(self.source(), self.seed)


STATE = ("params", "counters")


@dataclass(frozen=True, eq=False)
class Step:
    """A step that can be called."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def namespace() -> dict[str, Any]:
    """What the source of a program may name."""
    return {"jax": jax, "jnp": jnp, "lax": jax.lax, "np": np}


#: The imports of a program in a file of its own.
IMPORTS = "import jax\nimport jax.numpy as jnp\nimport numpy as np\nfrom jax import lax\n"


def load(source: str, seed: int) -> Step:
    """The step of a program's source; lines of its operations are those of the source."""
    names = namespace()
    exec(compile(source, f"fuzz_{seed}.py", "exec"), names)
    return Step(names["step"], tuple(names["arguments"](np.random.default_rng(seed))))


def function(block: Block) -> Callable[..., Any]:
    """A block as a Python function; what it reads from around it must be among its parameters."""
    names = namespace()
    exec(compile("\n".join(block.lines()), f"<{block.name}>", "exec"), names)
    return names[block.name]
