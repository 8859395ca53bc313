"""Who may read a run's figures, and where they are: two files of its folder. No torch."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from paceline.observe.journal import replace_file

KEY = "reading_key"
TARGETS = "metrics.json"  # what Prometheus's file_sd reads


def reading_key(folder: Path) -> str:
    """The key for reading a run, mode 0600 in its folder, made if there is none: 32 random bytes in hexadecimal. It is
    not the run's token, and nothing can be changed with it.
    """
    path = folder / KEY
    if not path.exists():
        replace_file(path, secrets.token_hex(32) + "\n")
    return path.read_text().strip()


def write_targets(folder: Path, targets: list[str]) -> None:
    """Where the figures are, for Prometheus's file_sd; no target once the run has ended."""
    text = json.dumps([{"targets": targets}] if targets else []) + "\n"
    half = folder / f".{TARGETS}"
    half.write_text(text)
    half.replace(folder / TARGETS)
