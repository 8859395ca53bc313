"""Runs a training script with `python`, without a launcher: one worker, at a tenth of the CPU of `paceline run`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

from warm import Process, environment


def python_train(
    folder: Path, body: str | None = None, code: int = 0, script: str = "train.py", **env: str
) -> subprocess.CompletedProcess[str]:
    """`python SCRIPT` in `folder`, with the run folder `out` in it; the exit code must be `code`.

    `body` is the script's text after what basics.py makes; None keeps the script that is there.
    """
    if body is not None:
        (folder / script).write_text("from basics import *\n" + body)
    variables = environment(**{"PACELINE_RUN_DIR": "out", **env})
    with Process([sys.executable, script], variables, cwd=folder, stdout=PIPE, stderr=PIPE) as process:
        stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == code, f"exit code {process.returncode}\n{stdout}\n{stderr}"
    return subprocess.CompletedProcess(script, code, stdout, stderr)
