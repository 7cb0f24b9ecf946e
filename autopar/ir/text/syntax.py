"""The printed form of a graph as records: tokens, types, literals and blocks, each with its line.

`autopar.ir.text.parser` has the grammar, and makes the graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, get_args

import numpy as np

from autopar.errors import GraphTextError
from autopar.ir.graph import Atom, Constant, Phase, Type
from autopar.ir.text import parameters, printer

_T = TypeVar("_T")

_PHASES = get_args(Phase)
_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*)
    |(?P<value>%\d+)|(?P<string>"[^"]*")
    |(?P<number>-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?j?|inf\b|nan\b)|\([^()\s%]*j\)|(?:True|False)\b)
    |(?P<name>[A-Za-z_][\w.-]*)|(?P<sign>[(){}\[\]:,=])""",
    re.VERBOSE,
)
_TYPE = re.compile(r"([A-Za-z][\w]*(?:<\w+>)?)\[([\d,]*)\]")
_TRIPS = re.compile(r"[ \t]+x(\d+|\?)")
#: A block follows, and no operation without results.
_BLOCK = re.compile(r"[A-Za-z_]\w*\(\s*(%\d+\s*:|\)\s*\{)")
#: Blocks that are parameters, closed or open jaxprs; others are regions.
_JAXPR = re.compile(r"(jaxpr|open)\d+")
_ORIGIN = re.compile(r"[ \t]*#[ \t]*(\w+)(?:[ \t]+(?!in[ \t])(\S+))?(?:[ \t]+in[ \t]+([^\n]*?))?[ \t]*(?=\n|$)")


@dataclass(frozen=True, slots=True)
class OpText:
    """One operation as it is written."""

    line: int
    outputs: tuple[tuple[int, Type], ...]
    name: str
    params: str
    inputs: tuple[Atom, ...]
    trips: int | None
    phase: Phase
    source: str
    scopes: str
    blocks: Mapping[str, BodyText]

    @property
    def regions(self) -> Mapping[str, BodyText]:
        return {name: b for name, b in self.blocks.items() if not _JAXPR.fullmatch(name)}

    @property
    def jaxprs(self) -> Mapping[str, BodyText]:
        """Jaxprs among the parameters: "jaxpr0" is a closed one, "open0" an open one."""
        return {name: b for name, b in self.blocks.items() if _JAXPR.fullmatch(name)}


@dataclass(frozen=True, slots=True)
class BodyText:
    """A graph, region or jaxpr as it is written."""

    line: int
    name: str
    inputs: tuple[tuple[int, Type], ...]
    constants: tuple[tuple[int, Type, Any], ...]
    ops: tuple[OpText, ...]
    outputs: tuple[Atom, ...]
    return_line: int


class TextReader:
    """Reads tokens from a text, position by position."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    @property
    def line(self) -> int:
        return 1 + self.text.count("\n", 0, self.at)

    def fail(self, message: str) -> NoReturn:
        raise GraphTextError(f"line {self.line}: {message}")

    def skip(self) -> None:
        while (match := _TOKEN.match(self.text, self.at)) and match.lastgroup == "skip":
            self.at = match.end()

    def peek(self) -> tuple[str, str]:
        """Kind and text of the next token; ("end", "") at the end."""
        self.skip()
        match = _TOKEN.match(self.text, self.at)
        if match is None:
            return ("end", "") if self.at >= len(self.text) else ("unknown", self.text[self.at])
        return str(match.lastgroup), match.group()

    def take(self, *wanted: str) -> str:
        """The next token, which is one of these kinds or signs."""
        kind, text = self.peek()
        if kind not in wanted and text not in wanted:
            self.fail(f"expected {' or '.join(wanted)}, found '{text or 'the end'}'")
        self.at += len(text)
        return text

    def has(self, sign: str) -> bool:
        """Whether the next token is this sign, which is then read."""
        if self.peek()[1] != sign:
            return False
        self.at += len(sign)
        return True

    def separated(self, item: Callable[[], _T], end: str) -> tuple[_T, ...]:
        """Items with commas between them up to a sign, which is read."""
        items: list[_T] = []
        while not self.has(end):
            if items:
                self.take(",")
            items.append(item())
        return tuple(items)

    def value(self) -> int:
        return int(self.take("value")[1:])

    def string(self) -> str:
        return self.take("string")[1:-1]

    def type(self) -> Type:
        self.skip()
        match = _TYPE.match(self.text, self.at)
        if match is None:
            self.fail(f"expected a type such as f32[8,4], found '{self.text[self.at : self.at + 20].splitlines()[0]}'")
        try:
            type_ = _type(match[1], tuple(int(n) for n in match[2].split(",") if n))
        except TypeError as error:
            self.fail(str(error))
        self.at = match.end()
        return type_

    def typed_value(self) -> tuple[int, Type]:
        value = self.value()
        self.take(":")
        return value, self.type()

    def atom(self) -> Atom:
        if self.peek()[0] == "value":
            return self.value()
        if self.peek()[1] == "opaque":
            self.fail("a literal has no written form")
        text = self.take("value", "number")
        self.take(":")
        type_ = self.type()
        number = self.number(text)
        element = self.array(number, type_)[()]
        return Constant(element if str(element) == text else number, type_)  # Python's number if JAX kept that

    def graph(self) -> tuple[BodyText, tuple[str, ...], tuple[str, ...]]:
        """The body, the paths of arguments, the paths of results."""
        paths: list[str] = []
        result_paths: list[str] = []
        self.take("graph")
        body = self.body("graph", lambda: paths.append(self.string()), lambda: result_paths.append(self.string()))
        if self.peek()[0] != "end":
            self.fail(f"expected the end, found '{self.peek()[1]}'")
        return body, tuple(paths), tuple(result_paths)

    def body(
        self,
        name: str,
        after_input: Callable[[], object] = lambda: None,
        after_output: Callable[[], object] = lambda: None,
    ) -> BodyText:
        """What follows the name of a graph, region or jaxpr."""

        def argument() -> tuple[int, Type]:
            value = self.typed_value()
            after_input()
            return value

        def result() -> Atom:
            atom = self.atom()
            after_output()
            return atom

        line = self.line
        self.take("(")
        inputs = self.separated(argument, ")")
        self.take("{")
        constants: list[tuple[int, Type, Any]] = []
        ops: list[OpText] = []
        while not self.has("return"):
            self.statement(constants, ops)
        return_line = self.line
        outputs = self.separated(result, "}")
        return BodyText(line, name, inputs, tuple(constants), tuple(ops), outputs, return_line)

    def statement(self, constants: list[tuple[int, Type, Any]], ops: list[OpText]) -> None:
        """One constant or operation."""
        outputs: tuple[tuple[int, Type], ...] = ()
        self.skip()
        line = self.line
        if self.peek()[0] == "value":
            outputs = self.separated(self.typed_value, "=")
        if self.peek()[0] != "name":
            self.fail(f"expected return or an operation, found '{self.peek()[1] or 'the end'}'")
        name = self.take("name")
        if name == "constant" and outputs:
            constants.append((*outputs[0], self.constant(*outputs[0])))
            return
        params = self.brackets() if self.text.startswith("[", self.at) else ""
        self.take("(")
        inputs = self.separated(self.atom, ")")
        trips = self.trips()
        phase, source, scopes = self.origin()
        blocks: dict[str, BodyText] = {}
        while self.is_block():
            block = self.take("name")
            blocks[block] = self.body(block)
        ops.append(OpText(line, outputs, name, params, inputs, trips, phase, source, scopes, blocks))

    def is_block(self) -> bool:
        self.skip()
        return _BLOCK.match(self.text, self.at) is not None

    def trips(self) -> int | None:
        match = _TRIPS.match(self.text, self.at)
        if match is None:
            return 1
        self.at = match.end()
        return None if match[1] == "?" else int(match[1])

    def origin(self) -> tuple[Phase, str, str]:
        """Phase, source line and scopes from the comment behind an operation."""
        match = _ORIGIN.match(self.text, self.at)
        if match is None:
            return "forward", "", ""
        phase = next((p for p in _PHASES if p == match[1]), None)
        if phase is None:
            self.fail(f"'{match[1]}' is no phase; they are {', '.join(_PHASES)}")
        self.at = match.end()
        return phase, match[2] or "", match[3] or ""

    def brackets(self) -> str:
        """What is between a "[" and the "]" that closes it."""
        depth, start, quote = 0, self.at + 1, ""
        for at in range(self.at, len(self.text)):
            c = self.text[at]
            if quote:
                quote = "" if c == quote else quote
            elif c in "'\"":
                quote = c
            else:
                depth += (c == "[") - (c == "]")
            if depth == 0:
                self.at = at + 1
                return self.text[start:at]
        return self.fail("a '[' that no ']' closes")

    def constant(self, value: int, type_: Type) -> Any:
        self.skip()
        if self.text.startswith("[", self.at):
            return self.array(self.number(f"[{self.brackets()}]"), type_)
        if self.has("full"):
            self.take("(")
            element = self.array(self.number(self.take("number")), Type((), type_.dtype, type_.itemsize))
            self.take(")")
            return np.full(type_.shape, element)
        if self.peek()[0] == "number":
            return self.array(self.number(self.take("number")), type_)
        return self.fail(f"the elements of constant %{value} are not written")

    def number(self, text: str) -> Any:
        """A number, or nested lists of numbers."""
        try:
            return parameters.read(f"elements={text}", {})["elements"]
        except parameters.UnreadableError as error:
            self.fail(str(error))

    def array(self, value: Any, type_: Type) -> Any:
        try:
            array = np.asarray(value, parameters.dtype_of(type_.dtype))
        except (TypeError, ValueError) as error:
            self.fail(f"'{value}' is no {type_}: {error}")
        if array.shape != type_.shape:
            self.fail(f"elements of shape {array.shape} are no {type_}")
        return array


def _type(name: str, shape: tuple[int, ...]) -> Type:
    dtype = printer.long_dtype(name)
    numpy_dtype = parameters.dtype_of(dtype)
    return Type(shape, dtype, numpy_dtype.itemsize if isinstance(numpy_dtype, np.dtype) else 8)
