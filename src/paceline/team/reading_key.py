"""The key for reading a run's metrics, and where they are served."""

from __future__ import annotations

import hmac
import json
import secrets
from pathlib import Path

from paceline.base.journal import replace_file
from paceline.base.schema import read_file, read_json
from paceline.errors import FormatError
from paceline.team.auth import NAME as TOKEN

KEY = "reading_key"
TARGETS = "metrics.json"  # what Prometheus's file_sd reads


def reading_key(folder: Path) -> str:
    """Returns the key for reading a run: 32 bytes in hexadecimal, in a file of mode 0600 in the run's folder.

    It is derived from the run's token, so that all hosts have the same key; without a token it is random. The key does
    not reveal the token, and gives no right to change anything.
    """
    path, token = folder / KEY, folder / TOKEN
    if token.exists():
        key = hmac.new(read_file(token).strip(), b"reading", "sha256").hexdigest()
    else:
        key = read_file(path).decode("utf-8", "replace").strip() if path.exists() else secrets.token_hex(32)
    if not path.exists() or read_file(path).decode("utf-8", "replace").strip() != key:
        replace_file(path, key + "\n")
    return key


def write_targets(folder: Path, targets: list[str], instead_of: list[str] | None = None) -> None:
    """Writes where the metrics are served, for Prometheus's file_sd; no targets once the run has ended. With
    `instead_of`, only if the file has these targets.
    """
    path, half = folder / TARGETS, folder / f".{TARGETS}"
    if instead_of is not None:
        from paceline.base.file_types import Targets  # needs msgspec

        try:
            if read_json(path, list[Targets], TARGETS) != _target_groups(instead_of):
                return
        except (FileNotFoundError, FormatError):  # another run has replaced it
            return
    half.write_text(json.dumps(_target_groups(targets)) + "\n")
    half.replace(path)


def _target_groups(targets: list[str]) -> list[dict[str, list[str]]]:
    return [{"targets": targets}] if targets else []
