"""Starting `paceline run` as a user would, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


def paceline(
    *arguments: str | Path,
    cwd: Path,
    code: int | None = 0,
    timeout: float = 240,
    preexec: Callable[[], None] | None = None,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """`paceline ARGUMENTS...`; with `code` the exit code must be that. `preexec` runs in the child before it."""
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=timeout,
        preexec_fn=preexec,
    )
    assert code is None or done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
