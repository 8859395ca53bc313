"""The command `paceline from`: reads a configuration file, converts it and prints the result."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.base.config_file import read_config
from paceline.base.console import in_one_line, say
from paceline.errors import UsageError
from paceline.integrations.configs.accelerate import convert_accelerate, fsdp_section
from paceline.integrations.configs.accelerate_fields import ACCELERATE
from paceline.integrations.configs.conversion import REFUSED, UNKNOWN, Conversion, FieldTable
from paceline.integrations.configs.deepspeed import convert_deepspeed
from paceline.integrations.configs.deepspeed_fields import DEEPSPEED
from paceline.integrations.configs.report import json_of, text_of
from paceline.integrations.configs.training_arguments import read_settings

_FEWEST = 20  # one field in so many must be known, or the file is another one


def convert_file(kind: str, path: Path, workers: int = 0, settings: list[str] | None = None) -> Conversion:
    """Converts a configuration file.

    Args:
        kind: "deepspeed", "accelerate" or "fsdp".
        path: JSON, or YAML if its name ends in .yaml or .yml.
        workers: Number of workers; 0: that of the file.
        settings: NAME=VALUE of TrainingArguments, for fields that are "auto".

    Raises:
        FormatError: The file is not valid JSON or YAML.
        UsageError: The file is of another kind, or a setting is unknown.
    """
    config, options = read_config(path), read_settings(settings or [])
    _refuse_other_kinds(kind, config, path)
    if kind == "deepspeed":
        return convert_deepspeed(config, workers, options)
    config = fsdp_section(config) if kind == "fsdp" else config
    return convert_accelerate(config, workers, options, path.parent)


def convert(kind: str, path: Path, workers: int | None, settings: list[str], as_json: bool) -> int:
    """Prints what becomes of a configuration file. Returns 1 if a field of it is refused or unknown."""
    conversion = convert_file(kind, path, workers or 0, settings)
    say(json_of(conversion) if as_json else text_of(conversion, str(path)), sys.stdout)
    return int(any(one.verdict in (REFUSED, UNKNOWN) for one in conversion.settled.values()))


def _refuse_other_kinds(kind: str, config: Mapping[str, Any], path: Path) -> None:
    """Raises UsageError for a file without any field of its kind, and names the kind that it has."""
    tables = {"deepspeed": DEEPSPEED, "accelerate": ACCELERATE}
    tool, other = ("deepspeed", "accelerate") if kind == "deepspeed" else ("accelerate", "deepspeed")
    known = {name: _known(table, config) for name, table in tables.items()}
    if kind == "fsdp" or not config or known[tool] * _FEWEST >= len(config):
        return
    cure = "pass the configuration file; options of a transformers or TRL script are read by paceline.hf"
    if known[other] > 1:
        cure = f"use paceline from {other} {in_one_line(path)}"
    number = "no field" if not known[tool] else f"{known[tool]} of {len(config):,} fields that are those"
    raise UsageError(f"{in_one_line(path)} has {number} of {tables[tool].tool}'s configuration", cure)


def _known(table: FieldTable, config: Mapping[str, Any]) -> int:
    heads = {name.partition(".")[0] for name in table.names()}
    return sum(str(name) in heads for name in config)
