"""Runs side by side: the list, what differs, and the page."""

from __future__ import annotations

import json
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from journals import step

from paceline.base.journal import Journal
from paceline.cli.main import main
from paceline.errors import UsageError
from paceline.observe.runs import compare, runs

NOW = 1_700_000_000.0
EVIL = "</script><img onerror=x>"


def write(folder: Path, at: float, lr: float, steps: tuple[int, ...], **start: Any) -> None:
    """A run that began so many seconds after NOW."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"event": "journal", "version": 1}]
    about = {
        "workers": 2,
        "plan": "data=2",
        "script": "train.py",
        "argv": ["train.py"],
        "versions": {"torch": "2.13.0"},
    }
    lines.append({"event": "start", **about, **start, "resumed_from": None})
    lines.append({"event": "environment", "packages": {"numpy": "2.0"}, "commit": f"{at:.0f}" * 20, "dirty": False})
    lines.append({"event": "config", "trainer": 0, "values": {"lr": lr, "depth": 3}})
    for number in steps:
        lines.append({"event": "step", **step(number, loss=lr * number)})
    lines.append({"event": "evaluate", "trainer": 0, "step": steps[-1], "results": {"accuracy": lr, "n": 5}})
    lines.append({"event": "finished", "step": steps[-1]})
    texts = (json.dumps({"at": NOW + at + place, **line}) for place, line in enumerate(lines))
    (folder / "journal.jsonl").write_text("".join(f"{text}\n" for text in texts))


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs" / "b", 0, 0.5, (10, 20, 30))
    write(tmp_path / "runs" / "a", 60, 0.25, (10, 20, 40), plan="shard=2", versions={"torch": "2.14.0"})
    return tmp_path


def test_runs_are_listed_by_time(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "run     started           plan     workers  steps  loss   metrics          seconds  ended",
        "runs/b  2023-11-14 22:13  data=2   2        30     15.00  accuracy 0.5000  7.0      finished at step 30",
        "runs/a  2023-11-14 22:14  shard=2  2        40     10.00  accuracy 0.2500  7.0      finished at step 40",
    ]
    assert main(["runs", "runs/a", "./runs/a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "run": "runs/a",
            "began": NOW + 61,
            "plan": "shard=2",
            "workers": 2,
            "steps": 40,
            "loss": 10.0,
            "metrics": {"accuracy": 0.25},
            "seconds": 7.0,
            "ended": "finished at step 40",
        }
    ]


def test_what_cannot_be_read_has_a_line_too(two: Path) -> None:
    (two / "runs" / "later").mkdir()
    (two / "runs" / "later" / "journal.jsonl").write_text('{"event": "journal", "version": 9}\n')
    (two / "runs" / "begun").mkdir()
    Journal(two / "runs" / "begun").close()
    lines = runs().splitlines()
    assert len(lines) == 5
    later = next(line for line in lines if line.startswith("runs/later"))
    assert later.endswith(
        "runs/later/journal.jsonl has format version 9, but this version of Paceline reads only up to 1"
    )
    with pytest.raises(UsageError) as caught:
        runs([two])
    assert str(caught.value) == f"{two} contains no run; pass a folder that contains runs: paceline runs FOLDER"


def test_what_differs_and_what_they_came_to(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "runs/a", "runs/b"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "                  runs/a        runs/b",
        "config lr         0.25          0.5",
        "plan              shard=2       data=2",
        "commit            606060606060  000000000000",
        "version of torch  2.14.0        2.13.0",
        "",
        "                 runs/a  runs/b",
        "loss at step 10  2.500   5.000",
        "loss at step 20  5.000   10.00",
        "",
        "                    runs/a               runs/b",
        "steps               40                   30",
        "samples             7,680                7,680",
        "samples per second  5,120                5,120",
        "goodput             -                    -",
        "total time          7.0 s                7.0 s",
        "ended               finished at step 40  finished at step 30",
    ]
    assert compare([Path("runs/a"), Path("runs/a")]).startswith("the settings of the runs do not differ\n\n")
    with pytest.raises(UsageError) as caught:
        compare([Path("runs/a")])
    assert str(caught.value) == (
        "compare needs at least two run folders; pass two or more: paceline compare runs/a runs/b"
    )


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_overlays_the_curves_and_names_are_text(two: Path) -> None:
    os.rename(two / "runs" / "b", two / "runs" / "b<img onerror=x>")
    write(two / "runs" / "c", 5, 1.0, (10, 20), script=EVIL, argv=[EVIL])
    told = compare([two / "runs" / name for name in ("a", "b<img onerror=x>", "c")], two / "page.html")
    assert EVIL in told
    text = (two / "page.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert not [tag for tag, _ in tags.found if tag in ("script", "img", "link")]
    lines = [attrs["class"] for tag, attrs in tags.found if tag == "polyline"]
    assert lines == ["curve line0", "curve line1", "curve line2"]
    assert re.search(r"connect|https?://(?!www.w3.org)", text) is None
    assert (two / "page.html").stat().st_mode & 0o777 == 0o600
