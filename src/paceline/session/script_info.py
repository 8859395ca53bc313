"""The running script: its text, name, arguments and packages."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from paceline.base.journal import replace_file
from paceline.errors import UsageError

MOST_DIFF = 1_000_000  # bytes that are kept
_GIT = 5.0  # seconds for each of its answers
_LIMIT = 200_000  # characters that are kept
VERSIONS = {"python": sys.version.split()[0], "torch": torch.__version__, "paceline": version("paceline")}


def script_text() -> str:
    """The text of the script that runs, as far as it is a file."""
    path = Path(sys.argv[0])
    return path.read_text(errors="replace")[:_LIMIT] if path.is_file() else ""


def script_name() -> str:
    """The file name of the script that runs; empty where it is no file."""
    path = Path(sys.argv[0])
    return path.name if path.is_file() else ""


def refuse_other_script(before: str, text: str, location: Any) -> None:
    """Raises UsageError if the run of a script is continued by a script with another name and another text."""
    now = script_name()
    if before and now and before != now and text != script_text():
        what = f"{location} is the run of the script {before}, but this script is {now}"
        cure = f"use another --run-dir to start a new run, or rename the script to {before} to resume this one"
        raise UsageError(what, cure)


def changed_since(before: str) -> str:
    """Returns a message about what has changed in the script; empty if nothing has."""
    now, names = script_text(), ("script of the checkpoint", "script now")
    lines = list(difflib.unified_diff(before.splitlines(), now.splitlines(), *names, lineterm="", n=1))
    if len(lines) > 30:
        lines[30:] = [f"... and {len(lines) - 30} lines more"]
    what = "the script has changed since the checkpoint; continuing with the new version:"
    return "\n".join([what, *lines]) if before != now else ""


def module_name() -> str | None:
    """The script's name where ``python -m`` runs it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec is not None and spec.origin == sys.argv[0] else None


def packages() -> dict[str, str]:
    """Returns the versions of installed packages, from the names of their metadata folders: opening all files takes
    long.
    """
    versions: dict[str, str] = {}
    for folder in filter(os.path.isdir, sys.path):
        for name in sorted(os.listdir(folder)):
            if match := re.fullmatch(r"(.+)-([^-]+)\.(?:dist|egg)-info", name):
                versions.setdefault(match[1], match[2])
    return versions


def without_secrets(remote: str) -> str:
    """Returns the address of a git remote without user and password."""
    if "://" not in remote:
        return remote.rpartition("@")[2]
    parts = urlsplit(remote)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def code(folder: Path) -> dict[str, Any]:
    """Returns the git `commit`, the `remote`, and whether tracked files are `dirty`. Their changes go to the file
    `diff` of the run folder, mode 0600. Empty if the script is in no repository.
    """
    script = Path(sys.argv[0])
    script_folder = script.resolve().parent if script.is_file() else Path.cwd()
    diffs = "diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD"
    commands = ("rev-parse", "HEAD"), ("config", "--get", "remote.origin.url"), diffs
    with ThreadPoolExecutor(len(commands)) as at_once:
        commit, remote, diff = at_once.map(lambda words: _git(script_folder, *words), commands)
    if not commit:
        return {}
    facts: dict[str, Any] = {
        "commit": commit.decode(),
        "remote": without_secrets((remote or b"").decode(errors="replace")) or None,
    }
    facts |= {"dirty": None if diff is None else bool(diff), "diff": None}
    if diff:
        facts["diff"] = f"changes-{hashlib.sha256(diff).hexdigest()[:12]}.diff"
        replace_file(folder / facts["diff"], diff.decode(errors="replace"))
    return facts


def _git(folder: Path, *words: str) -> bytes | None:
    """Returns the output of a git command, cut to what is kept; None if it fails or takes too long."""
    try:
        with subprocess.Popen(
            ["git", "--no-optional-locks", "-C", folder, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as git:
            timer = threading.Timer(_GIT, git.kill)
            timer.start()
            try:
                assert git.stdout is not None
                output = git.stdout.read(MOST_DIFF)
                if len(output) == MOST_DIFF:  # the rest is left out
                    git.kill()
                    return output
            finally:
                timer.cancel()
        return output.strip(b"\n") if git.returncode == 0 else None
    except OSError:
        return None
