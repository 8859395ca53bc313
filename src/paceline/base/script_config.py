"""The script's part of a run's configuration file, which the script reads with `paceline.config()`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.base.config_file import read_config
from paceline.base.console import in_one_line
from paceline.base.environment import variable
from paceline.errors import UsageError

KEY = "config"  # the key of the script's part in a configuration file


def config() -> dict[str, Any]:
    """Reads the script's part of the configuration file of this run.

    Under ``paceline run --config FILE`` this is the value of the file's key ``config``, with the changes of ``--set``.
    Without `paceline run` the environment variable ``PACELINE_CONFIG`` may name such a file. Without both it is empty.

    Returns:
        A dict with text keys, whose values are numbers, texts, bools, None, lists and dicts. Each call returns a new
        one.

    Raises:
        UsageError: PACELINE_CONFIG names a file without such a part.
        FormatError: The file is not valid JSON, YAML or TOML.
        OSError: The file cannot be read.

    Example:
        >>> config = paceline.config()
        >>> optimizer = lambda params: torch.optim.AdamW(params, lr=config["lr"])
    """
    text = variable("PACELINE_CONFIG")
    if not text:
        return {}
    if text.startswith("{"):
        given: dict[str, Any] = json.loads(text)
        return given
    return part_of(read_config(Path(text)), Path(text))


def part_of(fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The script's part of what a configuration file holds. Raises UsageError if it is not a plain mapping."""
    part = fields.get(KEY, {})
    if not isinstance(part, dict):
        raise UsageError(f"{in_one_line(path)}: {KEY} must be a mapping of names to values", "write names below it")
    _check(part, KEY, path)
    return part


def _check(value: Any, name: str, path: Path) -> None:
    """Raises UsageError for a value that JSON does not have, such as a date."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise UsageError(f"{in_one_line(path)}: {name} has the key {key!r}, which is not a text", "quote it")
            _check(inner, f"{name}.{key}", path)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check(inner, f"{name}[{number}]", path)
    elif value is not None and not isinstance(value, bool | int | float | str):
        what = f"{in_one_line(path)}: {in_one_line(name)} is a {type(value).__name__}"
        raise UsageError(f"{what}, and not a number or a text", "quote it")


def flat(part: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested dicts by their dotted names; lists as text."""
    made: dict[str, Any] = {}
    for key, value in part.items():
        if isinstance(value, dict):
            made |= flat(value, f"{prefix}{key}.")
        else:
            made[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return made
