"""Reads the collectives that XLA emitted from HLO text.

The text of a compiled program is a list of computations. A walk from the entry through every called computation visits
each communication instruction where it runs; a while loop multiplies by its trip count:

    runs(entry) = 1,    runs(body of a while) = runs(its caller) * trips,    runs(any other callee) = runs(its caller)

    text -> computations, instructions          `_module`, `_instructions`
    while -> trips                              `_trips`: XLA's own known_trip_count, else the bound in the condition
    replica_groups -> mesh axes                 `autopar.verification.replica_groups`
    result type -> bytes of each piece          `_piece_bytes`, by the convention of `autopar.ir.collective`

A branch of a conditional counts as if it ran every time: an upper bound. One instruction in HLO may have several
pieces: XLA's combiner merges many all-reduces into one tuple, and each of them is a `Collective` here.

The syntax is that of XLA's HloModule::ToString (openxla/xla, xla/hlo/ir).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

from autopar import jax_compat
from autopar.codegen.tags import last_tag
from autopar.errors import MeshError
from autopar.ir.collective import Collective
from autopar.plans.comparison import group_size
from autopar.verification.replica_groups import communicating_axes

# A broadcast costs a device as much as a permute: the buffer, once. XLA's only ragged exchange is the all-to-all.
PASS_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "all-reduce": "all-reduce",
        "all-gather": "all-gather",
        "reduce-scatter": "reduce-scatter",
        "all-to-all": "all-to-all",
        "ragged-all-to-all": "all-to-all",
        "collective-permute": "collective-permute",
        "collective-broadcast": "collective-permute",
    }
)

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+)\b.*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_RELEVANT = re.compile(r" (?:all-|collective-|reduce-scatter|ragged-)|calls=|body=|_computations?=| call\(")
_CALLEES = re.compile(
    r"\b(?:calls|body|condition|to_apply|branch_computations|true_computation|false_computation|called_computations)="
    r"(?:\{([^}]*)\}|(%?[\w.\-]+))"
)
_ARRAY = re.compile(r"\b(?:pred|[a-z]+?(\d+)\w*)\[([\d,<= ]*)\]")


@dataclass(frozen=True, slots=True)
class _Instruction:
    """One instruction that communicates or calls: its result type, opcode, and the text after the opening bracket."""

    name: str
    type: str
    opcode: str
    rest: str

    @property
    def kind(self) -> str:
        return PASS_KINDS.get(self.opcode.removesuffix("-start"), "")

    @property
    def callees(self) -> tuple[str, ...]:
        names = [many or single for many, single in _CALLEES.findall(self.rest)]
        return tuple(name.strip().lstrip("%") for names_ in names for name in names_.split(","))


@dataclass(frozen=True, slots=True)
class _Module:
    lines: Mapping[str, tuple[str, ...]]
    instructions: Mapping[str, tuple[_Instruction, ...]]
    roots: tuple[str, ...]
    frames: Mapping[int, str]


def collectives(
    hlo_text: str,
    axis_names: Sequence[str],
    axis_sizes: Sequence[int],
    assumed: Mapping[str, int] = MappingProxyType({}),
) -> tuple[Collective, ...]:
    """Every piece that a compiled program communicates, in program order.

    Args:
        hlo_text: `compiled.as_text()` of a program for one mesh.
        axis_names: mesh axes, major to minor: device i of the program has row-major coordinates i in the mesh.
        axis_sizes: devices along each of them.
        assumed: tag of an operation -> trips that a plan assumes for its loop, whatever the text says of it.

    Returns:
        One `Collective` per piece: bytes per device, `count` executions per step, `op` the tag of codegen, `source`
        "file.py:line". Part of an axis (two of four devices, say) is named in Shardy's way, "y:(2)2". Pieces within a
        single device are left out. A loop without a known trip count counts once; `unknown_trip_counts` names it.

    Raises:
        MeshError: the program speaks of a device outside the mesh.
    """
    if len(axis_names) != len(axis_sizes):
        raise MeshError(f"Mesh axes {tuple(axis_names)} and sizes {tuple(axis_sizes)} differ in number.")
    sizes = dict(zip(axis_names, axis_sizes, strict=True))
    module = _module(hlo_text)
    emitted: list[Collective] = []
    for at in _once_per_chain(_walk(module, assumed)):
        axes = communicating_axes(at.instruction.rest, axis_names, axis_sizes)
        kind = _kind(at.instruction, at.computation)
        pieces = _piece_bytes(at.instruction, group_size(axes, sizes)) if axes else ()
        emitted.extend(Collective(kind, axes, nbytes, at.count, at.op, at.source) for nbytes in pieces)
    return tuple(emitted)


@dataclass(frozen=True, slots=True)
class Operation:
    """An instruction of a compiled program, as a profiler names it.

    Attributes:
        kind: that of a collective, also where a fusion contains it; "" for computation.
        runs: executions per run of the program if it begins a collective; 0 for all other instructions.
        calls: it runs other computations, whose instructions have its time: a loop, a branch or a call.
        op: tag of the planned operation, such as "op12"; "" if unknown.
        source: source line of the user, "file.py:line"; "" if unknown.
    """

    kind: str
    runs: int
    calls: bool
    op: str
    source: str


def operations(hlo_text: str) -> Mapping[str, Operation]:
    """Every instruction of a compiled program by name; a collective in a fusion counts as that of the fusion."""
    module = _module(hlo_text)
    fused = {
        c: i.name for body in module.instructions.values() for i in body if i.opcode == "fusion" for c in i.callees
    }
    runs: dict[str, int] = {}
    kinds: dict[str, str] = {}
    for at in _once_per_chain(_walk(module, {})):
        name = fused.get(at.computation, at.instruction.name)
        runs[name] = runs.get(name, 0) + at.count
        kinds[name] = _kind(at.instruction, at.computation)
    out: dict[str, Operation] = {}
    for lines in module.lines.values():
        for i in (_Instruction(*m.groups()) for line in lines if (m := _INSTRUCTION.match(line))):
            kind = kinds.get(i.name) or PASS_KINDS.get(re.sub("-(start|done|update)$", "", i.opcode), "")
            calls = i.opcode in ("while", "conditional", "call")
            tag = last_tag(_quoted("op_name", i.rest))
            out[i.name] = Operation(kind, runs.get(i.name, 0), calls, tag, _source(i.rest, module.frames))
    return out


def unknown_trip_counts(hlo_text: str) -> tuple[str, ...]:
    """Names of the while loops that `collectives` counts once because their trip count cannot be read."""
    module = _module(hlo_text)
    loops = (i for body in module.instructions.values() for i in body if i.opcode == "while")
    return tuple(loop.name for loop in loops if _trips(loop, module) is None)


@dataclass(frozen=True, slots=True)
class _Found:
    """A communication instruction where the walk met it; the caller lends a tag or source that it lacks."""

    instruction: _Instruction
    computation: str
    count: int
    op: str
    source: str


def _walk(module: _Module, assumed: Mapping[str, int]) -> Iterator[_Found]:
    def visit(computation: str, count: int, tag: str, source: str) -> Iterator[_Found]:
        channels: set[int] = set()
        for instruction in module.instructions.get(computation, ()):
            own = last_tag(_quoted("op_name", instruction.rest))
            op = own or tag
            line = _source(instruction.rest, module.frames) or source
            if instruction.kind:
                yield _Found(instruction, computation, count, op, line)
            else:
                loops = instruction.opcode == "while"
                trips = (assumed.get(own) or _trips(instruction, module) or 1) if loops else 1
                inner = chain.from_iterable(visit(callee, count * trips, op, line) for callee in instruction.callees)
                yield from _unseen(inner, channels) if instruction.opcode == "fusion" else inner

    for root in module.roots:
        yield from visit(root, 1, "", "")


def _unseen(occurrences: Iterable[_Found], channels: set[int]) -> Iterator[_Found]:
    """TPU spreads one asynchronous collective over several fusions, each with a copy of it: one per channel counts."""
    for each in occurrences:
        channel = _field("channel_id", each.instruction.rest)
        if not channel or channel not in channels:
            channels.add(channel)
            yield each


def _once_per_chain(occurrences: Iterable[_Found]) -> list[_Found]:
    """TPU may run an asynchronous collective beside a loop, with parts in its body: it runs as often as the outermost.

    Parts of one share a channel and are marked with a chain.
    """
    out: list[_Found] = []
    places: dict[int, int] = {}
    for each in occurrences:
        chained = "chain_id=" in each.instruction.rest
        place = places.setdefault(_field("channel_id", each.instruction.rest), len(out)) if chained else len(out)
        if place == len(out):
            out.append(each)
        elif each.count < out[place].count:
            out[place] = each
    return out


# --- text -------------------------------------------------------------------------------------------------------------


def _module(text: str) -> _Module:
    lines: dict[str, list[str]] = {}
    body: list[str] = []
    entry = ""
    for line in text.splitlines():
        if line[:1].isspace():
            body.append(line)
        elif line.endswith("{") and (header := _HEADER.match(line)):
            body = lines.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
    instructions = {name: tuple(_instructions(body)) for name, body in lines.items()}
    called = {callee for body in instructions.values() for i in body for callee in i.callees}
    roots = (entry,) if entry else tuple(name for name in lines if name not in called)
    return _Module({name: tuple(body) for name, body in lines.items()}, instructions, roots, _frames(text))


def _instructions(lines: Iterable[str]) -> Iterator[_Instruction]:
    """The instructions that communicate or call; the second half of an asynchronous pair is neither."""
    matches = (_INSTRUCTION.match(line) for line in lines if _RELEVANT.search(line))
    for instruction in (_Instruction(*m.groups()) for m in matches if m):
        if not instruction.opcode.endswith(("-done", "-update")) and (instruction.kind or _calls(instruction)):
            yield instruction


def _calls(instruction: _Instruction) -> bool:
    # the to_apply of a reduction is scalar arithmetic; only that of a call is a program
    return bool(instruction.callees) and ("to_apply=" not in instruction.rest or instruction.opcode == "call")


def _kind(instruction: _Instruction, computation: str) -> str:
    # TPU fuses an all-reduce with the slice of its result and runs the two as a reduce-scatter
    scatters = instruction.kind == "all-reduce" and computation.startswith("all-reduce-scatter")
    return "reduce-scatter" if scatters else instruction.kind


def _quoted(key: str, text: str) -> str:
    match = re.search(rf'\b{key}="([^"]*)"', text)
    return match[1] if match else ""


# --- source lines -----------------------------------------------------------------------------------------------------


def _frames(text: str) -> Mapping[int, str]:
    """Stack frame id -> "file.py:line", from the tables before the first computation."""
    tables: dict[str, dict[int, str]] = {}
    table: dict[int, str] = {}
    for line in text.splitlines():
        if line.endswith("{") and line.startswith(("%", "ENTRY")):
            break
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif row := re.match(r"(\d+) (.+)", line):
            table[int(row[1])] = row[2]
    files, places = tables.get("FileNames", {}), tables.get("FileLocations", {})
    ids = {key: _field("file_location_id", frame) for key, frame in tables.get("StackFrames", {}).items()}
    return {key: _place(places[place], files) for key, place in ids.items() if place in places}


def _field(key: str, text: str) -> int:
    match = re.search(rf"\b{key}=(\d+)", text)
    return int(match[1]) if match else 0


def _place(location: str, files: Mapping[int, str]) -> str:
    return file_line(files.get(_field("file_name_id", location), "").strip('"'), _field("line", location))


def file_line(path: str, line: int) -> str:
    """ "file.py:line"; nothing where none is known, or it is one of autopar's own, which no user wrote."""
    of_user = bool(path and line) and not jax_compat.is_ours(path)
    return f"{path.replace(chr(92), '/').rsplit('/', 1)[-1]}:{line}" if of_user else ""


def _source(text: str, frames: Mapping[int, str]) -> str:
    inline = file_line(_quoted("source_file", text), _field("source_line", text))
    return inline or frames.get(_field("stack_frame_id", text), "")


# --- trip counts ------------------------------------------------------------------------------------------------------


def _trips(loop: _Instruction, module: _Module) -> int | None:
    """Iterations of a while loop, or None when the text does not tell."""
    trip_count = re.search(r'known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)', loop.rest)
    if trip_count:
        return int(trip_count[1])
    condition = re.search(r"\bcondition=%?([\w.\-]+)", loop.rest)
    return _bound(condition[1], module) if condition else None


def _bound(condition: str, module: _Module) -> int | None:
    """The one integer that a condition compares its counter with; the counter is taken to run from 0 in steps of 1."""
    names = [condition, *(c for i in module.instructions.get(condition, ()) for c in i.callees)]
    text = "\n".join(line for name in names for line in module.lines.get(name, ()))
    bounds = set(re.findall(r"[su]\d+\[\]\S* constant\((\d+)\)", text))
    directions = set(re.findall(r"direction=(\w+)", text))
    inclusive = {"LT": 0, "GT": 0, "LE": 1, "GE": 1}
    if len(bounds) != 1 or len(directions) != 1 or not directions <= inclusive.keys():
        return None
    return int(bounds.pop()) + inclusive[directions.pop()]


# --- bytes ------------------------------------------------------------------------------------------------------------


def _piece_bytes(instruction: _Instruction, group: int) -> tuple[int, ...]:
    """Bytes per device of each communicated buffer: the larger of operand and result."""
    leaves = tuple(_array_bytes(_result_type(instruction)))
    if instruction.kind == "all-to-all":
        return (sum(leaves),)  # a variadic one has a result for each peer
    return tuple(group * b for b in leaves) if instruction.kind == "reduce-scatter" else leaves


def _result_type(instruction: _Instruction) -> str:
    """The type of what arrives: an asynchronous start returns (operands, results, contexts...)."""
    if not instruction.opcode.endswith("-start"):
        return instruction.type
    parts = _elements(instruction.type)
    # an all-reduce-start returns its results alone, unless it wraps a computation
    plain = instruction.kind == "all-reduce" and not parts[0].startswith("(")
    return instruction.type if plain or len(parts) < 2 else parts[1]


def _elements(type_: str) -> tuple[str, ...]:
    """The element types of a tuple type, "(f32[2], (s32[], u8[4]))" -> "f32[2]", "(s32[], u8[4])"."""
    depth, parts = 0, [""]
    for char in type_.removeprefix("(").removesuffix(")") if type_.startswith("(") else type_:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return tuple(part.strip() for part in parts)


def _array_bytes(type_: str) -> Iterator[int]:
    """Bytes of each array in a type; tokens have none, and 4-bit numbers are taken as stored one to a byte."""
    for bits, shape in _ARRAY.findall(type_):
        yield math.prod(int(n) for n in re.findall(r"\d+", shape)) * max(1, int(bits or 8) // 8)
