"""`paceline run --config FILE`: options, script and arguments of a run, and the script's configuration, in a file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paceline.base.config_file import read_config
from paceline.base.console import RUN_OPTIONS, in_one_line, shown
from paceline.base.script_config import KEY, flat, part_of
from paceline.errors import FormatError, UsageError
from paceline.launch.options import LaunchOptions
from paceline.team.join_options import CONFIG

_SCRIPT = ("script", "module", "arguments", KEY)
_NOT_IN_FILE = {"config", "set", "help", "join", "token-file", "take-over"}
OPTIONS = sorted({name.removeprefix("--") for name in RUN_OPTIONS} - _NOT_IN_FILE)
# Options that are not kept in the run folder: limits of one start, and how it prints.
_OF_ONE_START = {"steps", "max-time", "quiet", "verbose", "debug"}
_FIELDS = {"max_steps": "steps"}  # fields of LaunchOptions whose option has another name


@dataclass(frozen=True)
class RunConfig:
    """What a configuration file says: the `words` of its options, the script, its arguments, and its own part."""

    path: Path
    words: Sequence[str]
    script: str | None
    module: bool
    arguments: Sequence[str] | None
    part: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> RunConfig:
        """Reads a file in YAML, TOML or JSON. UsageError: it has an unknown key, or a value of a wrong kind."""
        try:
            held = read_config(path)
        except FormatError as error:
            raise UsageError(error.what, error.cure) from error
        except OSError as error:
            why = f"--config {in_one_line(path)} could not be read: {error.strerror}"
            raise UsageError(why, "pass a configuration file that exists") from error
        values = {str(key).replace("_", "-"): value for key, value in held.items()}
        known = [*OPTIONS, *_SCRIPT]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
                cure = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}"
                raise UsageError(f"{in_one_line(path)} has the unknown key {shown(key)}", cure)
        arguments = values.get("arguments")
        if arguments is not None and not (isinstance(arguments, list) and all(map(_is_word, arguments))):
            what = f"{in_one_line(path)}: arguments must be a list of texts and numbers"
            raise UsageError(what, f"write values that the script reads with paceline.config() below {KEY}")
        script, module = values.get("script"), values.get("module", False)
        if not isinstance(script, str | None) or not isinstance(module, bool):
            raise UsageError(f"{in_one_line(path)}: script must be a path, and module true or false", "correct them")
        words = [word for name in OPTIONS if name in values for word in _words(name, values[name], path)]
        as_text = None if arguments is None else [_text(one) for one in arguments]
        return cls(path, words, script, module, as_text, part_of(held, path))

    def with_settings(self, settings: Sequence[str]) -> dict[str, Any]:
        """The script's part with changes such as ``optimizer.lr=0.1``. UsageError: it has no such name."""
        part = json.loads(json.dumps(self.part))
        for text in settings:
            name, equals, value = text.partition("=")
            if not equals:
                raise UsageError(f"--set {shown(text)} does not contain '='", "write --set NAME=VALUE")
            *above, last = name.split(".")
            inner: Any = part
            for step in above:
                inner = inner.get(step) if isinstance(inner, dict) else None
            if not isinstance(inner, dict) or last not in inner or isinstance(inner[last], dict):
                names = [*flat(part)]
                near = difflib.get_close_matches(name, names, n=1)
                cure = f"did you mean {near[0]}?" if near else f"the names are {', '.join(names[:20]) or 'none'}"
                raise UsageError(
                    f"--set {shown(name)}: {in_one_line(self.path)} does not have this name in {KEY}", cure
                )
            inner[last] = _value(value)
        return dict(part)


def script_part(part: Mapping[str, Any], path: Path) -> str:
    """The script's part as JSON, for the workers. UsageError: it is too large."""
    text = json.dumps(part)
    if len(text) > CONFIG:  # ASCII
        what = f"{in_one_line(path)}: {KEY} has {len(text):,} bytes, and at most {CONFIG:,} reach the workers"
        raise UsageError(what, "put the name of a file into it, and read that file in the script")
    return text


def effective_config(options: LaunchOptions, folder: str) -> bytes:
    """The configuration of a run with these options, as a file for `--config`: the values that are not defaults."""
    values: dict[str, Any] = {}
    for one in fields(options):
        name, value = _FIELDS.get(one.name, one.name.replace("_", "-")), getattr(options, one.name)
        if name in OPTIONS and name not in _OF_ONE_START and value != one.default:
            values[name] = True if name in ("tensorboard", "heal") else value
    if options.chosen is not None:
        values["plan"] = options.chosen.asked
    values |= {"run-dir": folder, "script": options.module or options.script, "arguments": options.arguments}
    values |= {"module": True} if options.module else {}
    return json.dumps({**values, KEY: json.loads(options.config or "{}")}, indent=1).encode() + b"\n"


def _is_word(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _words(name: str, value: Any, path: Path) -> list[str]:
    """The words of an option on the command line: none if its value is null or false."""
    if name == "plan" and isinstance(value, dict):
        words = {word: setting for word, setting in value.items() if setting is not None and setting is not False}
        if not all(setting is True or _is_word(setting) for setting in words.values()):
            what = f"{in_one_line(path)}: the words of plan must have numbers, texts or true as values"
            raise UsageError(what, "write plan as a text, as on the command line")
        value = " ".join(word if setting is True else f"{word}={_text(setting)}" for word, setting in words.items())
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{name}"]
    if not _is_word(value):
        raise UsageError(f"{in_one_line(path)}: {name} must be a number, a text or true", "correct it")
    return [f"--{name}={_text(value)}"]


def _value(text: str) -> Any:
    """The value of `--set`: what JSON reads in it, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
