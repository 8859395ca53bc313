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
    """The key for reading a run, mode 0600 in its folder: 32 bytes in hexadecimal, made of the run's token, so that all
    hosts have the same; of a folder without one they are random. Nobody finds the token by it, and nothing can be
    changed with it.
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
    """Where the figures are, for Prometheus's file_sd; no target once the run has ended. With `instead_of` only where
    these are there.
    """
    path, half = folder / TARGETS, folder / f".{TARGETS}"
    if instead_of is not None:
        from paceline.base.file_types import Targets  # needs msgspec

        try:
            if read_json(path, list[Targets], TARGETS) != _told(instead_of):
                return
        except (FileNotFoundError, FormatError):  # it is not ours any more
            return
    half.write_text(json.dumps(_told(targets)) + "\n")
    half.replace(path)


def _told(targets: list[str]) -> list[dict[str, list[str]]]:
    return [{"targets": targets}] if targets else []
