"""Plans as careless hands leave them: one field of the JSON dropped, doubled, moved, or given another value."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from hypothesis import strategies as st


def deep(depth: int) -> Any:
    nested: Any = []
    for _ in range(depth):
        nested = [nested]
    return nested


#: What a field may be given in place of what it has.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, 7, 8, -1, -2, 64, 10**9, 2**63, -(2**70), 10**400),
    *(0.5, -1.0, 1e300, float("nan"), float("inf"), -0.0),
    *("", "x", "y", "none", "full", "1f1b", "gpipe", "all", "*", "0", "- -", "0 -", "- 0", "+ -", "0 1", "1 0", "9 -"),
    *("-", "0 0 0", "\ud800", "\0", "é", "%", "a" * 300, "out0", "op1.in0", [], {}, [[]], [0], [1, 0], [-1, -1]),
    *([-1, 0], [0, -1], [-2, -1], ["x"], {"x": 1}, {"0": "- -"}, {"a": {"b": {}}}, deep(50)),
)


def _drop(holder: Any, key: Any, _: Any) -> None:
    del holder[key]


def _replace(holder: Any, key: Any, value: Any) -> None:
    holder[key] = value


def _double(holder: Any, key: Any, _: Any) -> None:
    if isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[f"{key}2"] = holder[key]


def _swap(holder: Any, key: Any, value: Any) -> None:
    """It changes places with another, which the value picks."""
    keys = list(range(len(holder))) if isinstance(holder, list) else list(holder)
    other = keys[len(json.dumps(value)) % len(keys)]
    holder[key], holder[other] = holder[other], holder[key]


def _reverse(holder: Any, key: Any, _: Any) -> None:
    if isinstance(holder[key], list):
        holder[key].reverse()


def _nudge(holder: Any, key: Any, _: Any) -> None:
    if isinstance(holder[key], int | float):
        holder[key] += 1


EDITS: Mapping[str, Callable[[Any, Any, Any], None]] = MappingProxyType(
    {"drop": _drop, "replace": _replace, "double": _double, "swap": _swap, "reverse": _reverse, "nudge": _nudge}
)


@st.composite
def edited(draw: st.DrawFn, text: str) -> tuple[str, str]:
    """What was done to a plan's JSON, and the text that is left; each field as likely, however much it holds."""
    if draw(st.integers(0, 19)) == 0:
        where = draw(st.integers(0, len(text) - 1))
        return f"cut off at {where}", text[:where]
    data = json.loads(text)
    holder, path = data, []
    while True:
        keys = list(range(len(holder))) if isinstance(holder, list) else list(holder)
        key = draw(st.sampled_from(keys))
        path.append(key)
        inner = holder[key]
        if not inner or not isinstance(inner, list | dict) or draw(st.integers(0, 3)) == 0:
            break
        holder = inner
    name, value = draw(st.sampled_from(list(EDITS))), copy.deepcopy(draw(st.sampled_from(VALUES)))
    EDITS[name](holder, key, value)
    return f"{name} {path} {value!r:.60}", json.dumps(data)


@st.composite
def laid_out(draw: st.DrawFn, text: str) -> tuple[str, str]:
    """A plan with some layouts changed to others that its mesh has, sums among them; results follow their arguments."""
    data = json.loads(text)
    axes = len(data["mesh_names"])
    done: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        stage = draw(st.sampled_from(data["stages"]))
        layouts = stage[draw(st.sampled_from([name for name in ("values", "uses", "copies") if stage[name]]))]
        key = draw(st.sampled_from(list(layouts)))
        layouts[key] = " ".join(draw(st.sampled_from("--+012")) for _ in range(axes))
        done.append(f"{key}: {layouts[key]}")
    return f"laid out {', '.join(done)}", json.dumps(data)
