"""Reads JSON as typed values and names the field that is wrong.

A type says that once: TypedDicts, lists, dicts and plain
values, with msgspec's limits to numbers. No torch, and msgspec is imported with the first value that is checked.

A checked value stays as JSON made it: it has the type, and the fields that a later version added besides.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import FormatError

T = TypeVar("T")
CURE = "restore it from a copy"
SAME_VERSION = "use the same version of Paceline on all hosts"  # for messages
_SHOWN = 80  # characters of a name
_PIPE = "it is a pipe, not a file"


def open_file(path: str | Path) -> BufferedReader:
    """A file, open for reading. OSError also where a pipe lies in its place: nobody may ever write to that. The pipe of
    a shell's <(...) is read: it has no place in a folder.
    """
    file = open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb")  # noqa: SIM115
    if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
        os.set_blocking(file.fileno(), True)
        if os.path.exists(os.path.realpath(path)):
            file.close()
            raise OSError(errno.EINVAL, _PIPE, str(path))
    return file


def refuse_pipe(path: str | Path) -> None:
    """OSError where a pipe lies in the place of a file that a library opens by its name, and would wait for."""
    if Path(path).is_fifo():
        raise OSError(errno.EINVAL, _PIPE, str(path))


def read_file(path: str | Path) -> bytes:
    """All bytes of a file. OSError, as `open_file` raises it."""
    with open_file(path) as file:
        return file.read()


def read_json(source: Path | bytes, kind: type[T], what: str, cure: str = CURE) -> T:
    """The value of a file or of its bytes, which is of the type `kind`. `what` names it in errors.

    Raises FormatError for any other value or text, with the field that is wrong and its `cure`; OSError.
    """
    data = read_file(source) if isinstance(source, Path) else source
    return check(parse(data, what, cure), kind, what, cure)


def read_message(data: bytes | bytearray, kind: Any, what: str, cure: str = SAME_VERSION) -> Any:
    """The value of a message of the type `kind`, with those fields alone that it names. A decoder made for the type is
    faster than `read_json`, which says what is wrong, and knows what JSON has not: NaN and infinities.
    """
    import msgspec

    try:
        return _decoder(kind)(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return msgspec.convert(read_json(bytes(data), kind, what, cure), kind)


@cache
def _decoder(kind: Any) -> Callable[[bytes | bytearray], Any]:
    import msgspec

    return msgspec.json.Decoder(kind).decode


def parse(data: bytes, what: str, cure: str = CURE) -> Any:
    """The value of a JSON text in UTF-8. Raises FormatError for anything else, and where an object has a name twice."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not UTF-8"
    except RecursionError:
        why = "it is nested too deeply"
    except ValueError as error:  # a text that is no JSON; a number of thousands of digits; a name that occurs twice
        why = str(error).partition(";")[0]
    raise FormatError(f"{what} is damaged: {why}", cure)


def check(value: Any, kind: type[T], what: str, cure: str = CURE) -> T:
    """`value`, which came from JSON and is of the type `kind`. FormatError: it is not, with the field that is wrong."""
    if wrong := find_wrong(value, kind):
        raise FormatError(f"{what} is damaged: {wrong}", cure)
    return value  # type: ignore[no-any-return]


def find_wrong(value: Any, kind: Any) -> str:
    """The first field of a value that is not what `kind` says, and why; empty where all are."""
    if not (text := _trouble(value, kind)):
        return ""
    why, _, where = text.rpartition(" - at ")
    steps = re.findall(r"\.([^.\[`]+)|\[(\d+|\.\.\.)\]", where)
    path: list[Any] = []
    for name, index in steps:
        path.append(name or (_key(value, kind, text, path) if index == "..." else int(index)))
    why = re.sub(" matching regex .*", " of another form", (why or text).replace("`", ""))
    return f"{_path_text(path)}{why[:1].lower()}{why[1:]}"


def _trouble(value: Any, kind: Any) -> str:
    import msgspec

    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return str(error)
    except RecursionError:
        return "It is nested too deeply"
    except UnicodeEncodeError:  # JSON can name half of a surrogate pair
        return "a name in it is not Unicode text"
    return ""


def _key(value: Any, kind: Any, text: str, path: list[Any]) -> str:
    """Which key of the dict at `path` has the trouble: msgspec does not say."""
    held = value
    for step in path:
        held = held[step]
    keys = [*held]
    while len(keys) > 1:
        half = keys[: len(keys) // 2]
        is_in_half = _trouble(_with(value, path, {key: held[key] for key in half}), kind) == text
        keys = half if is_in_half else keys[len(half) :]
    return str(keys[0])


def _with(value: Any, path: list[Any], leaf: Any) -> Any:
    """A copy of `value` with another value at `path`."""
    if not path:
        return leaf
    copy = value.copy()
    copy[path[0]] = _with(value[path[0]], path[1:], leaf)
    return copy


def _path_text(path: Iterable[Any]) -> str:
    """``tensors["a.b"].shape[0]: ``; empty for the whole value."""
    text = ""
    for step in path:
        if isinstance(step, str) and step.isidentifier() and len(step) < _SHOWN:
            text += f".{step}"
        else:
            text += f"[{step if isinstance(step, int) else json.dumps(step[:_SHOWN])}]"
    return text.removeprefix(".") + ": " * bool(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {json.dumps(twice[:_SHOWN])} occurs twice")
    return unique
