"""The script that runs: its text, its name as a module, and what it runs with."""

from __future__ import annotations

import difflib
import sys
from importlib.metadata import version
from pathlib import Path

import torch

_LIMIT = 200_000  # characters that are kept


def script_text() -> str:
    """The text of the script that runs, as far as it is a file."""
    path = Path(sys.argv[0])
    return path.read_text(errors="replace")[:_LIMIT] if path.is_file() else ""


def changed_since(before: str) -> str:
    """For people, what is another one in the script now; empty where nothing is."""
    now, names = script_text(), ("script of the checkpoint", "script now")
    lines = list(difflib.unified_diff(before.splitlines(), now.splitlines(), *names, lineterm="", n=1))
    if len(lines) > 30:
        lines[30:] = [f"... and {len(lines) - 30} lines more"]
    what = "the script has changed since the checkpoint; continuing with the new one:"
    return "\n".join([what, *lines]) if before != now else ""


def module_name() -> str | None:
    """The script's name where ``python -m`` runs it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec is not None and spec.origin == sys.argv[0] else None


def versions() -> dict[str, str]:
    return {"python": sys.version.split()[0], "torch": torch.__version__, "paceline": version("paceline")}
