"""`paceline stop` and `paceline logs`: coming back to a run that somebody else started."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE

from agents import journal, until
from launching import free_port, paceline
from warm import Process, environment

from paceline.base.exit_codes import STOPPED

SLOWLY = """
from basics import *
import time
print("begun", flush=True)
for report in make().steps(data, epochs=1000):
    time.sleep(0.02)
"""


def test_a_run_is_stopped_by_its_folder_and_its_logs_are_followed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLOWLY)
    command = [sys.executable, "-m", "paceline"]
    streams = {"cwd": tmp_path, "stdin": DEVNULL, "stdout": PIPE, "stderr": PIPE}
    run = Process([*command, "run", "--workers", "2", "--run-dir", "run", "train.py"], environment(), **streams)
    until(lambda: (tmp_path / "run/journal.jsonl").exists() and journal(tmp_path / "run", "step"))
    logs = Process([*command, "logs", "-f", "run"], environment(), **streams)
    other = tmp_path / "other"
    other.write_text("0" * 64)
    other.chmod(0o600)
    said = paceline("stop", "run", "--token-file", other, cwd=tmp_path, code=2).stderr
    assert " cannot be stopped: the token is wrong; copy the file token of its run folder here again\n" in said
    assert run.poll() is None
    said = paceline("stop", "run", cwd=tmp_path).stderr
    (stopped,) = journal(tmp_path / "run", "stopped")
    first, last = said.splitlines()
    assert first.startswith("run has done ")
    assert first.endswith("; it saves and stops after the current step")
    assert last == f"run has ended: stopped at step {stopped['step']}"
    assert (run.communicate(timeout=60)[1].splitlines()[-1], run.returncode) == (
        "continue with: paceline run --workers 2 --run-dir run train.py",
        STOPPED,
    )
    out, _ = logs.communicate(timeout=60)
    assert (sorted(line for line in out.splitlines() if "begun" in line), logs.returncode) == (
        ["0 | begun", "1 | begun"],
        0,
    )
    assert paceline("logs", "-n", "1", "run", cwd=tmp_path).stdout.splitlines()[-2:] == ["0 | begun", "1 | begun"]
    said = paceline("stop", "run", cwd=tmp_path, code=2).stderr
    assert said.endswith(" (Connection refused); if the run has ended, `paceline report RUN` shows how\n")


def test_what_cannot_be_come_back_to(tmp_path: Path) -> None:
    def refusal(*words: str) -> str:
        return paceline(*words, cwd=tmp_path, code=2).stderr

    where = f"127.0.0.1:{free_port()}"
    assert refusal("logs", "run") == (
        "paceline: run contains no logs; pass the folder of a run that was started on this host\n"
    )
    assert refusal("stop", "run") == (
        "paceline: the folder run does not exist; pass the run folder, or HOST:PORT "
        "of its coordinator with --token-file\n"
    )
    assert refusal("stop", where) == (
        "paceline: a run at HOST:PORT needs its token; copy the file token of its run folder here, and pass "
        "--token-file FILE\n"
    )
    (tmp_path / "run").mkdir()
    assert refusal("stop", "run") == (
        "paceline: no run was started in run, or its coordinator is on another host; pass the "
        "run folder on the host of its coordinator\n"
    )
