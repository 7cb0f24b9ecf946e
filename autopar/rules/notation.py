"""A sharding rule: how the dimensions of an operation's operands and results correspond.

A factor is one dimension of the operation's iteration space (Shardy's term). A rule gives every dimension of every
operand and result its factor; factors of operands only are summed over. As text, as in an einsum:

    b m k, k n -> b m n                 a batched matrix product, k is reduced
    b s d -> b s d | keep s             an operation that needs dimension s replicated

A dimension that has several factors (the result of a reshape) is written with its major factor, the only one along
which it can be sharded without moving data. Sources: GSPMD (Xu et al., 2021) section 3; Shardy's op sharding rules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import RuleError
from autopar.rules.sent import Sent

Dims = tuple[int, ...]

_NAMES = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Rule:
    """Factors of an operation.

    Attributes:
        operands: for each operand, the factor of each dimension.
        results: for each result, the factor of each dimension.
        sizes: extent of each factor (the largest number of shards).
        reduced: factors summed over: sharded along them, the operation leaves partial sums.
        need_replication: factors along which the operation cannot be sharded.
        origin: "shardy", "autopar", "custom_partitioning" (what the operation says), or "user".
        sent: collectives of the devices that run it together, besides those that reduce partial sums.
        unread: positions of operands that no result depends on, in whatever layout they are.
        rings: factors whose pieces may be passed round by the devices that they are cut over, instead of gathered.
        passing: (array, times) of operands and results together: how often a device reads or writes its piece for each
            piece that it receives in such a ring.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[int, ...]
    reduced: tuple[int, ...] = ()
    need_replication: tuple[int, ...] = ()
    origin: str = "shardy"
    sent: tuple[Sent, ...] = ()
    unread: tuple[int, ...] = ()
    rings: tuple[int, ...] = ()
    passing: tuple[tuple[int, float], ...] = ()

    @property
    def free(self) -> tuple[int, ...]:
        """Factors along which the operation may be sharded, reduced ones included."""
        return tuple(f for f, size in enumerate(self.sizes) if size > 1 and f not in self.need_replication)

    def __str__(self) -> str:
        text = ", ".join(map(_dims, self.operands)) + " -> " + ", ".join(map(_dims, self.results))
        notes = (("reduce", self.reduced), ("keep", self.need_replication))
        return text + "".join(f" | {word} {_dims(factors)}" for word, factors in notes if factors)


def _name(factor: int) -> str:
    return _NAMES[factor] if factor < len(_NAMES) else f"f{factor}"


def _dims(dims: Dims) -> str:
    return " ".join(map(_name, dims)) or "()"


def parse(text: str, operand_shapes: Sequence[Dims], result_shapes: Sequence[Dims], origin: str = "user") -> Rule:
    """The rule that `text` states, for operands and results of these shapes.

    A name that only operands have is reduced. `keep` lists names that need replication; `1` is a dimension that
    is never sharded.

    Raises:
        RuleError: the text does not parse, or its dimensions do not fit the shapes.
    """
    body, *notes = (part.strip() for part in text.split("|"))
    sides = body.split("->")
    if len(sides) != 2:
        raise RuleError(f"rule '{text}' needs exactly one '->', as in 'b m k, k n -> b m n'")
    index: dict[str, int] = {}
    sizes: list[int] = []
    whole: list[int] = []

    def factors(side: str, shapes: Sequence[Dims], which: str) -> tuple[Dims, ...]:
        lists = [part.split() for part in side.split(",")] if side.strip() else []
        lists = [[] if names == ["()"] else names for names in lists]
        if len(lists) != len(shapes):
            raise RuleError(f"rule '{text}' names {len(lists)} {which}s, the operation has {len(shapes)}")
        return tuple(dimensions(names, tuple(shape), which) for names, shape in zip(lists, shapes, strict=True))

    def dimensions(names: Sequence[str], shape: Dims, which: str) -> Dims:
        if len(names) != len(shape):
            raise RuleError(f"rule '{text}' gives '{' '.join(names)}' for a {which} of shape {shape}")
        return tuple(factor(name, size, which, shape) for name, size in zip(names, shape, strict=True))

    def factor(name: str, size: int, which: str, shape: Dims) -> int:
        if not re.fullmatch(r"[A-Za-z]\w*|1", name):
            raise RuleError(f"rule '{text}': '{name}' is no dimension name")
        if name == "1" or name not in index:
            sizes.append(size)
            index[name] = len(sizes) - 1
            if name == "1":
                whole.append(index[name])
        elif sizes[index[name]] != size:
            raise RuleError(
                f"rule '{text}': '{name}' is {sizes[index[name]]} elsewhere but {size} in a {which} of shape {shape}"
            )
        return index[name]

    operands = factors(sides[0], operand_shapes, "operand")
    results = factors(sides[1], result_shapes, "result")
    need_replication = _need_replication(text, notes, index)
    produced = {f for dims in results for f in dims}
    consumed = sorted({f for dims in operands for f in dims})
    reduced = tuple(f for f in consumed if f not in produced and f not in whole and f not in need_replication)
    return Rule(operands, results, tuple(sizes), reduced, tuple(sorted({*need_replication, *whole})), origin)


def check_syntax(text: str) -> None:
    """RuleError unless `text` has the form of a rule; shapes are checked when it is applied."""
    body = text.split("|")[0] if isinstance(text, str) else ""
    if body.count("->") != 1:
        raise RuleError(f"rule {text!r} needs exactly one '->', as in 'b m k, k n -> b m n'")
    for name in body.replace("->", " ").replace(",", " ").split():
        if not re.fullmatch(r"[A-Za-z]\w*|1|\(\)", name):
            raise RuleError(f"rule '{text}': '{name}' is no dimension name")


def _need_replication(text: str, notes: Sequence[str], index: dict[str, int]) -> list[int]:
    """Factors listed after `keep`."""
    factors: list[int] = []
    for note in notes:
        word, *names = note.split()
        unknown = [n for n in names if n not in index]
        if word not in ("keep", "reduce") or unknown:
            raise RuleError(f"rule '{text}': '{note}' must be 'keep' or 'reduce' and names out of {', '.join(index)}")
        if word == "keep":
            factors.extend(index[n] for n in names)
    return factors
