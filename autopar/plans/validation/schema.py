"""Frozen dataclasses as JSON: the annotations of their fields are the schema, for writing and for reading.

    dataclass                   an object with exactly its fields, but for those whose metadata say "saved": False
    tuple[X, ...], tuple[X, Y]  a list
    Mapping[str, X]             an object; Mapping[int, X]: its keys are written in decimal
    Listed, Packed              a layout, as a list of integers or as text such as "0 - +" (cut, replicated, partial)
    int, float, str             int: 0 to `MOST`; float: finite; str: what UTF-8 can encode

`form(X).read` takes data of any kind and either returns an X whose fields all have their types, or raises a
`FieldError` that names the field and what was expected there. It descends only as far as the annotations do.

A plan of many stages has ten thousands of entries of few kinds. Lists and objects are read in one expression; only
where that fails, entry by entry, to name the one that does not fit. Layouts and numbers of values are parsed once each.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Annotated, Any, Final, NoReturn, get_args, get_origin, get_type_hints

from autopar.ir.layout import PARTIAL, REPLICATED, Layout

MOST = 2**63 - 1  # largest integer of a plan: byte counts of the largest steps are below 2**50
MOST_DIMENSIONS = 64  # of one array; NumPy's own limit
MOST_DIGITS = 18  # of an integer as key: all of these are below `MOST`

_SIGNS: Final[Mapping[int, str]] = {REPLICATED: "-", PARTIAL: "+"}
_OF_SIGNS: Final[Mapping[str, int]] = {
    **{sign: entry for entry, sign in _SIGNS.items()},
    **{str(dim): dim for dim in range(MOST_DIMENSIONS)},
}


class FieldError(Exception):
    """A value that a field cannot have.

    Attributes:
        path: of the field, such as "stages[0].submesh".
        expected: in words.
        actual: the value, in short.
    """

    def __init__(self, expected: str, actual: str, path: str = "") -> None:
        super().__init__(f"field '{path.removeprefix('.')}' is {actual}, expected {expected}")
        self.path, self.expected, self.actual = path, expected, actual

    def within(self, outer: str) -> FieldError:
        """The same value, seen from the record, list or object that holds it."""
        return FieldError(self.expected, self.actual, outer + self.path)


def shown(value: Any) -> str:
    """A value of any kind, short enough for a message."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return type(value).__name__


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlevel = 2


def _check(fits: bool, expected: str, value: Any) -> None:
    """FieldError for a value that does not fit."""
    if not fits:
        raise FieldError(expected, shown(value))


@dataclass(frozen=True, slots=True)
class Form:
    """How values of one annotation are written and read, to and from what `json` knows; `words` say what they are."""

    words: str
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


# Numbers and text

_TEXT: Final = "text that UTF-8 can encode"
_COUNT: Final = f"an integer from 0 to {MOST}"
_REAL: Final = f"a number between -{MOST} and {MOST}"


def _same(value: Any) -> Any:
    return value


def _text(value: Any) -> str:
    if type(value) is not str or not (value.isascii() or _is_encodable(value)):
        raise FieldError(_TEXT, shown(value))
    return value


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST:
        raise FieldError(_COUNT, shown(value))
    return value


def _real(value: Any) -> float:
    _check(type(value) in (int, float) and abs(value) <= MOST, _REAL, value)  # which nan is not
    return value


# Layouts

_PACKED: Final = "a layout such as '0 - +': for each mesh axis the dimension it cuts, '-' for none, '+' for sums"
_LISTED: Final = f"a layout: for each mesh axis the dimension it cuts, {REPLICATED} for none"


def _pack(layout: Layout) -> str:
    return " ".join(_SIGNS.get(dim) or str(dim) for dim in layout)


@lru_cache(maxsize=4096)  # a plan has many values and few layouts
def _unpacked(text: str) -> Layout | None:
    dims = [_OF_SIGNS.get(part) for part in text.split(" ")]
    known_dims = tuple(dim for dim in dims if dim is not None)
    return known_dims if len(known_dims) == len(dims) else None


def _unpack(value: Any) -> Layout:
    layout = _unpacked(value) if type(value) is str else None
    if layout is None:
        raise FieldError(_PACKED, shown(value))
    return layout


def _unlist(value: Any) -> Layout:
    parts: tuple[Any, ...] = tuple(value) if isinstance(value, list | tuple) else (None,)
    for dim in parts:
        if type(dim) is not int or not PARTIAL <= dim < MOST_DIMENSIONS:
            raise FieldError(_LISTED, shown(value))
    return parts


Listed = Annotated[Layout, Form(_LISTED, list, _unlist)]
Packed = Annotated[Layout, Form(_PACKED, _pack, _unpack)]

_PLAIN: Final[Mapping[Any, Form]] = {
    str: Form(_TEXT, _same, _text),
    int: Form(_COUNT, _same, _count),
    float: Form(_REAL, _same, _real),
}


# Lists, objects and records


@lru_cache(maxsize=64)
def form(hint: Any) -> Form:
    """How values of an annotation are written and read."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return parts[1]
    if origin is tuple:
        return _list_form(form(parts[0]), None if parts[-1] is ... else len(parts))
    if origin is not None and issubclass(origin, Mapping):
        return _object_form(_KEYS[parts[0]], form(parts[1]))
    assert is_dataclass(hint), f"{hint} has no form"
    return _record_form(hint)


def _list_form(item_form: Form, length: int | None) -> Form:
    """A list of any length, or of one."""
    words = f"a list, each {item_form.words}" if length is None else f"a list of {length}, each {item_form.words}"

    def read(value: Any) -> tuple[Any, ...]:
        fits = isinstance(value, list | tuple) and (length is None or len(value) == length)
        _check(fits, words, value)
        try:
            return tuple(map(item_form.read, value))
        except FieldError:
            _locate((f"[{i}]", lambda part=part: item_form.read(part)) for i, part in enumerate(value))

    return Form(words, lambda value: [item_form.write(part) for part in value], read)


def _object_form(key_of: Callable[[Any], Any], item_form: Form) -> Form:
    words = f"an object, each value {item_form.words}"

    def read(value: Any) -> dict[Any, Any]:
        _check(isinstance(value, Mapping), words, value)
        read_item = item_form.read
        try:
            return {key_of(key): read_item(part) for key, part in value.items()}
        except FieldError:
            _locate(
                (f"[{shown(key)}]", lambda key=key, part=part: (key_of(key), read_item(part)))
                for key, part in value.items()
            )

    return Form(words, lambda value: {str(key): item_form.write(part) for key, part in value.items()}, read)


@lru_cache(maxsize=65536, typed=True)  # stages of one program name the same values
def _number(key: Any) -> int:
    """A key in decimal, in the one way that it is written."""
    digits = type(key) is str and key.isascii() and key.isdecimal() and len(key) <= MOST_DIGITS
    _check(digits and str(int(key)) == key, "an integer in decimal as key", key)
    return int(key)


_KEYS: Final[Mapping[Any, Callable[[Any], Any]]] = {str: _text, int: _number}


def _record_form(record: Any) -> Form:
    hints = get_type_hints(record, include_extras=True)
    forms = {f.name: form(hints[f.name]) for f in fields(record) if f.metadata.get("saved", True)}
    readers = [(name, field_form.read) for name, field_form in forms.items()]
    words = f"an object with the fields {', '.join(forms)}"

    def read(value: Any) -> Any:
        _check(isinstance(value, Mapping), words, value)
        if value.keys() != forms.keys():
            _names(value, forms)
        try:
            return record(**{name: read_field(value[name]) for name, read_field in readers})
        except FieldError:
            _locate(
                (f".{name}", lambda name=name, read_field=read_field: read_field(value[name]))
                for name, read_field in readers
            )

    return Form(
        words, lambda value: {name: field_form.write(getattr(value, name)) for name, field_form in forms.items()}, read
    )


def _names(value: Mapping[str, Any], forms: Mapping[str, Form]) -> None:
    """FieldError for a field that is missing, or one that is not known."""
    for name in (*forms, *value):
        if name not in value:
            raise FieldError(forms[name].words, "missing", f".{name}")
        if name not in forms:
            raise FieldError(f"one of {', '.join(forms)}", "not known", f".{name!s:.60}")


def _locate(entries: Iterable[tuple[str, Callable[[], Any]]]) -> NoReturn:
    """FieldError for the first entry that does not fit, with its place in the list or object."""
    for place, read in entries:
        try:
            read()
        except FieldError as error:
            raise error.within(place) from None
    raise AssertionError("every entry fits")


# Text


def parsed(text: str | bytes) -> Any:
    """What JSON text says. ValueError if it is none, nested too deep, or has a key twice in one object."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("lists and objects are nested too deep") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    as_dict = dict(pairs)
    if len(as_dict) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {shown(twice)} is there twice in one object")
    return as_dict
