"""A command that hears of a failure, a hang and the end, and holds nobody up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import train_basics

from paceline.launch import notify
from paceline.launch.notify import Notifier

KEEPS = "cat >> told.jsonl"


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "told.jsonl").read_text().splitlines()]


def test_notify_command_gets_failure_and_end(tmp_path: Path) -> None:
    body = (
        "t = make()\n"
        "for report in t.steps(data, count=4):\n"
        "    if report.step == 3 and not pathlib.Path('once').exists():\n"
        "        raise ValueError('no more')\n"
    )
    body = "import pathlib\n" + body
    options = ("--notify", KEEPS, "--max-restarts", "0")
    train_basics(tmp_path, body, 1, *options, "--save-every", "1", code=1)
    (tmp_path / "once").touch()
    done = train_basics(tmp_path, None, 1, *options)
    failed, ended = told(tmp_path)
    assert {key: failed[key] for key in ("event", "run", "script", "step", "worker", "what", "code")} == {
        "event": "failure",
        "step": 3,
        "run": str(tmp_path / "out"),
        "script": "train.py",
        "worker": 0,
        "what": "ValueError: no more",
        "code": 1,
    }
    assert {key: ended[key] for key in ("event", "step", "worker", "what", "code")} == {
        "event": "end",
        "step": 4,
        "worker": None,
        "what": "finished at step 4",
        "code": 0,
    }
    assert "--notify" not in done.stderr


def test_notify_command_that_fails_is_one_line(tmp_path: Path) -> None:
    done = train_basics(tmp_path, "list(make().steps(data, count=1))", 1, "--notify", "echo loud; exit 3")
    assert [line for line in done.stderr.splitlines() if "notify" in line] == [
        "the --notify command for the end failed (exit code 3)"
    ]
    assert "loud" not in done.stdout + done.stderr


def test_notify_command_gets_a_hang_and_is_ended_when_it_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "PATIENCE", 0.5)
    said: list[str] = []
    file = tmp_path / "told.jsonl"
    with Notifier(f"cat >> {file}; sleep 3600 & sleep 3600", "train.py", said.append) as notifier:
        journal = notifier.journal(tmp_path)
        journal.write("step", trainer=0, step=7)
        journal.write(
            "hang", worker=2, life=0, host="a", pid=1, seconds=31.2, line="train.py:9", busy=True, ended=False
        )
        journal.close()
    (hang,) = told(tmp_path)
    assert {key: hang[key] for key in ("event", "step", "worker", "what", "code")} == {
        "event": "hang",
        "step": 7,
        "worker": 2,
        "what": "no progress for 31 s, busy at train.py:9",
        "code": None,
    }
    assert said == ["the --notify command for the hang took longer than 0.5 s and was killed"]


def test_without_notify_no_thread_is_started(tmp_path: Path) -> None:
    with Notifier(None, "train.py", print) as notifier:
        notifier.journal(tmp_path).close()
        notifier.end(tmp_path, 0)
        assert not notifier._threads
