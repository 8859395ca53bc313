"""Wrong values in the place of right ones, for files that a reader must take or refuse."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

DEEP = 3000  # levels; where a text is nested deeper than any value may be
MISSING, EXTRA = object(), object()
WRONG: list[Any] = [
    *(None, [], {}, [None], {"": None}, [[]], {"a": {"b": []}}, "", "text", "\x1b]0;x\x07", "../..", "$tensor", "0"),
    *(True, False, 0, 1, -1, 0.5, -0.5, 1e-308, 1e308, -1e308, 2**31, 2**53, 2**63, 2**70, -(2**70), 10**400, 1e15),
    *(float("nan"), float("inf"), MISSING, EXTRA),
]


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each value within a value is, itself included."""
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths_of(item, (*path, key))


def changed(value: Any, path: tuple[Any, ...], wrong: Any) -> Any:
    """A copy of `value` with another one at `path`."""
    if not path:
        return {} if wrong in (MISSING, EXTRA) else wrong
    made = copy.copy(value)
    held = made
    for step in path[:-1]:
        held[step] = copy.copy(held[step])
        held = held[step]
    if wrong is MISSING:
        del held[path[-1]]
    elif wrong is EXTRA:
        (held.append(held[path[-1]]) if isinstance(held, list) else held.update({"of a later version": [1, {"a": 2}]}))
    else:
        held[path[-1]] = wrong
    return made


def mutated(value: Any) -> st.SearchStrategy[Any]:
    """`value` with one to three wrong ones in it."""
    wrong = st.one_of(st.sampled_from(WRONG), st.integers(), st.floats(), st.text(max_size=8))

    @st.composite
    def some(draw: st.DrawFn) -> Any:
        made = value
        for _ in range(draw(st.integers(1, 3))):
            made = changed(made, draw(st.sampled_from([*paths_of(made)])), draw(wrong))
        return made

    return some()


def garbled(text: bytes) -> st.SearchStrategy[bytes]:
    """`text` cut short, with other bytes in it, or with something nested that no reader follows."""
    deep = b"[" * DEEP + b"]" * DEEP
    odd = st.one_of(st.binary(max_size=8), st.sampled_from([deep, b"\xff\xfe", b"\x00", b'"a":1,"a":2', b"\\ud800"]))

    @st.composite
    def some(draw: st.DrawFn) -> bytes:
        begin = draw(st.integers(0, len(text)))
        return text[:begin] + draw(odd) + text[min(len(text), begin + draw(st.integers(0, 40))) :] * draw(st.booleans())

    return some()


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()
