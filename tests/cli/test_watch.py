"""`paceline watch`: the folder of a run is real, and so are the terminal and the process that follows it."""

from __future__ import annotations

import io
import os
import pty
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from agents import until
from journals import step, write_run
from launching import paceline
from rich.console import Console
from warm import Process, environment

from paceline.base.journal import Journal, read_journal
from paceline.errors import UsageError
from paceline.observe.summary import Summary
from paceline.observe.team_table import SHOWN
from paceline.observe.watch import watch


def seen(folder: Path) -> str:
    out = io.StringIO()
    assert watch(folder, console=Console(file=out, width=110)) == 0
    return out.getvalue()


def test_a_finished_run_as_it_was(tmp_path: Path) -> None:
    write_run(tmp_path)
    lines = [line.rstrip() for line in seen(tmp_path).splitlines()]
    assert lines[0] == "train.py  finished at step 100"
    assert any(line.startswith("loss") and "3.000 (step 100; 9.000 at step 10)" in line for line in lines)
    assert "samples/s     5,120 (last 2 s)" in lines
    assert "samples/s     5,120 (mean of the run without its first 10% of steps)" in lines
    assert "step time     50 ms (last 2 s): compute 82% reduce 10% data 5% update 3%" in lines
    assert "evaluated     accuracy 0.5000" in lines
    assert "bytes         1 MB per step, 160 Mbit/s sent by worker 0 (last 2 s)" in lines
    assert any(line.startswith("plan") and "data=2 (from --plan)" in line for line in lines)
    assert any(line.endswith("checkpoint of step 100") for line in lines)
    number = Summary(tmp_path).number
    assert number == len(read_journal(tmp_path))
    assert "".join(lines[-1:]).startswith(f"event {number} of ")


def test_a_run_is_followed_to_its_end(tmp_path: Path) -> None:
    """In a terminal, while the journal grows."""
    journal = Journal(tmp_path / "run")
    journal.write("start", workers=2, script="train.py", resumed_from=None)
    journal.write("worker", worker=1, life=0, host="node7", pid=1, what="started")
    reads, writes = pty.openpty()
    command = [sys.executable, "-m", "paceline", "watch", "run"]
    process = Process(command, environment(TERM="xterm", COLUMNS="110"), cwd=tmp_path, stdout=writes, stderr=writes)
    os.close(writes)
    os.set_blocking(reads, False)
    text = ""

    def shows(part: str) -> bool:
        nonlocal text
        with suppress(OSError):  # there is nothing yet
            text += os.read(reads, 1 << 16).decode(errors="replace")
        return part in text

    try:
        until(lambda: shows("node7"))
        journal.write("step", **step(10, computed={"0": 0.25, "1": 0.375}))
        until(lambda: shows("37.5 ms"))
        assert "2.500 (step 10)" in text
        journal.write("lost", workers=[1], why="was killed by SIGKILL", step=10)
        until(lambda: shows("lost worker 1: was killed by SIGKILL"))
        assert process.poll() is None
        journal.write("finished", step=10)
        journal.close()
        until(lambda: shows("finished at step 10"))
        until(lambda: process.poll() is not None)
        assert process.returncode == 0
    finally:
        process.kill()
        os.close(reads)


def test_what_scripts_say_cannot_move_the_cursor(tmp_path: Path) -> None:
    write_run(tmp_path, script="a\x1b[2J\x07[bold]b.py")
    journal = Journal(tmp_path)
    journal.write("log", trainer=0, step=100, values={"x\x1b]0;title\x07": 1.5})
    journal.write("failed", worker=1, host="h\x1b[31m", cause="no\x1b[1A", code=1, text="")
    journal.close()
    text = seen(tmp_path)
    assert r"a\x1b[2J\x07[bold]b.py" in text
    assert r"x\x1b]0;title\x07 1.500" in text
    assert all(char.isprintable() or char == "\n" for char in text)


def test_of_very_many_workers_the_slowest(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("start", workers=1000, script="train.py", resumed_from=None)
    journal.write("step", **step(10, waited_for={"7": 1.0, "999": 0.5}))
    text = seen(tmp_path)
    assert f"and {1000 - SHOWN} faster workers" in text
    assert len(text.splitlines()) < SHOWN + 16
    lines = [line.split() for line in text.splitlines()]
    assert ["7", "up", "100", "ms"] in lines
    assert ["999", "up", "50", "ms"] in lines


def test_the_newest_run_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        watch()
    assert str(caught.value) == "runs/ contains no run; pass a run folder: paceline watch RUN"
    for place, name in enumerate(("older", "newer")):
        write_run(tmp_path / "runs" / name, script=f"{name}.py")
        os.utime(tmp_path / "runs" / name / "journal.jsonl", (place, place))
    assert paceline("watch", "--once", cwd=tmp_path).stdout.startswith("newer.py  finished at step 100\n")
    refused = paceline("watch", "127.0.0.1:29400", cwd=tmp_path, code=2)
    assert refused.stderr == (
        "paceline: the run at 127.0.0.1:29400 requires its reading key; pass --key-file FILE, a copy of the file "
        "reading_key in its run folder\n"
    )
