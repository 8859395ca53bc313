"""Reads a configuration file in JSON, YAML or TOML, and names the line of what cannot be read."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.base.console import in_one_line, shown
from paceline.base.schema import read_file
from paceline.errors import FormatError, UsageError, first_line

_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|(?P<comment>//|/\*|#)')
_DEEPEST = 50  # objects within objects: no configuration has more
_MOST = 100_000  # values: an alias of YAML can stand for as many as an attacker likes


def read_config(path: Path) -> dict[str, Any]:
    """Reads a configuration file: YAML if its name ends in .yaml or .yml, TOML if it ends in .toml, JSON otherwise.

    Raises:
        FormatError: The file is not valid JSON, YAML or TOML, or its top level is not an object with named fields.
        UsageError: PyYAML is needed and not installed.
        OSError: The file cannot be read.
    """
    try:
        text = read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"{in_one_line(path)}: byte {error.start} is not UTF-8", "save the file as UTF-8") from None
    readers = {".yaml": _read_yaml, ".yml": _read_yaml, ".toml": _read_toml}
    value = readers.get(path.suffix.lower(), _read_json)(text, path)
    if not isinstance(value, dict):
        what = f"{in_one_line(path)} holds {_kind(value)}, not an object with named fields"
        raise FormatError(what, "pass the configuration file itself")
    if any(number >= _MOST for number, _ in enumerate(_values(value, path))):
        raise FormatError(f"{in_one_line(path)} has more than {_MOST:,} values", "pass a configuration file")
    return value


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "a text", bool: "true or false", type(None): "nothing"}
    return kinds.get(type(value), "a number")


def _values(value: Any, path: Path, depth: int = 0) -> Iterator[Any]:
    if depth > _DEEPEST:
        raise _too_deep(path)
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield one
        yield from _values(one, path, depth + 1)


def _too_deep(path: Path) -> FormatError:
    return FormatError(f"{in_one_line(path)} is nested too deeply", "pass the configuration file itself")


def _read_json(text: str, path: Path) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise _too_deep(path) from None
    except json.JSONDecodeError as error:
        if comment := _comment(text):
            line, mark = comment
            what = f"{in_one_line(path)}, line {line}: the file has a comment ({mark}), and JSON has none"
            raise FormatError(what, "remove the comments, or rename the file to .yaml if they begin with #") from None
        why = f"{error.msg[:1].lower()}{error.msg[1:]}"
        what = f"{in_one_line(path)}, line {error.lineno}, column {error.colno}: {why}"
        raise FormatError(what, _cure(text, error.pos)) from None
    except _RepeatedNameError as error:
        numbers = [at for at, line in enumerate(text.splitlines(), 1) if json.dumps(error.name) in line]
        where = f", line {numbers[1]}" if len(numbers) > 1 else ""
        what = f"{in_one_line(path)}{where}: the field {shown(error.name)} occurs twice in one object"
        raise FormatError(what, "remove one of them") from None
    except ValueError as error:  # a number of thousands of digits
        raise FormatError(f"{in_one_line(path)}: {first_line(error)}", "correct the number") from None


class _RepeatedNameError(ValueError):
    """An object of a JSON text has a field twice."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise _RepeatedNameError(name)
        fields[name] = value
    return fields


def _comment(text: str) -> tuple[int, str] | None:
    """Line number and mark of the first comment outside of strings."""
    for match in _STRING_OR_COMMENT.finditer(text):
        if match["comment"]:
            return text.count("\n", 0, match.start()) + 1, match["comment"]
    return None


def _cure(text: str, position: int) -> str:
    """What to do about a JSON text that breaks at a position."""
    rest = text[position:].lstrip()
    if rest[:1] in ("}", "]") or text[:position].rstrip().endswith(","):
        return "remove the comma before it"
    if word := re.match(r"[A-Za-z_$<{][A-Za-z_0-9]*", rest):
        known = {"True": "true", "False": "false", "None": "null"}
        if word[0] in known:
            return f"write {known[word[0]]} instead of {word[0]}"
        return f"write a value in place of {word[0]}, or quote it; a template must be filled in first"
    return "correct the file there"


def _read_toml(text: str, path: Path) -> Any:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise _too_deep(path) from None
    except ValueError as error:  # TOMLDecodeError is one
        why = first_line(error)
        raise FormatError(f"{in_one_line(path)}: {why[:1].lower()}{why[1:]}", "correct the file there") from None


def _read_yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        what = f"reading {in_one_line(path)} needs PyYAML, which is not installed"
        raise UsageError(what, "pip install 'paceline[configs]', or pass the configuration as JSON") from None
    try:
        return yaml.load(text, Loader=_loader(yaml))
    except RecursionError:
        raise _too_deep(path) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        why = getattr(error, "problem", None) or first_line(error)
        raise FormatError(f"{in_one_line(path)}{where}: {why}", "correct the file there") from None
    except ValueError as error:  # a date that is none, a number of thousands of digits
        raise FormatError(f"{in_one_line(path)}: {first_line(error)}", "quote the value, or correct it") from None


def _loader(yaml: Any) -> Any:
    """PyYAML's safe loader, which also refuses a field with two values, and reads 1e-5 as a number, as YAML 1.2."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """The loader of a configuration file."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            values: dict[str, Any] = {}
            for key, value in node.value:
                if key.tag.endswith(":merge"):
                    continue
                name, held = repr(self.construct_object(key, deep=True)), self.construct_object(value, deep=True)
                if values.setdefault(name, held) != held:
                    why = f"{name} occurs twice, with different values"
                    raise yaml.constructor.ConstructorError(None, None, why, key.start_mark)
            return super().construct_mapping(node, deep=deep)

    number = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    return Loader
