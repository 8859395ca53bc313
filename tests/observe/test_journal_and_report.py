"""Journal, progress line, report and explanation: the files, pipes and pseudo-terminals are real."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import resource
import shutil
import subprocess
import sys
import termios
import warnings
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from journals import GRID, step, write_run
from launching import train_basics
from rich.console import Console
from warm import Process, environment

from paceline.base.console import coloured
from paceline.base.journal import Journal, effective_steps, read_journal
from paceline.errors import UsageError
from paceline.observe import step_totals as ledger
from paceline.observe.progress import Progress
from paceline.observe.report import write_report
from paceline.observe.summary import Summary, explain, facts


# ---- the journal
def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run")
    journal.write(
        "step",
        loss=torch.tensor(2.5, requires_grad=True),
        lr=np.float32(0.5),
        half=torch.tensor([1.0, math.nan], dtype=torch.bfloat16),
        count=np.int64(3),
        bad=[math.nan, math.inf, 1.5],
        waited_for={1: 0.25},
        path=tmp_path,
        flag=True,
        none=None,
        name="a\ud800b",
        event_kind={"x"},
    )
    journal.close()
    (event,) = read_journal(tmp_path / "run")
    assert event.pop("at") > 1_600_000_000
    assert event == {
        "event": "step",
        "loss": 2.5,
        "lr": 0.5,
        "half": [1.0, None],
        "count": 3,
        "bad": [None, None, 1.5],
        "waited_for": {"1": 0.25},
        "path": str(tmp_path),
        "flag": True,
        "none": None,
        "name": "a\\ud800b",
        "event_kind": ["x"],
    }


def test_the_first_line_is_the_version_and_files_are_private(tmp_path: Path) -> None:
    for _ in range(2):
        Journal(tmp_path / "run").close()
    path = tmp_path / "run" / "journal.jsonl"
    (line,) = path.read_text().splitlines()
    assert {k: v for k, v in json.loads(line).items() if k != "at"} == {"event": "journal", "version": 1}
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_without_a_folder_nothing_happens() -> None:
    journal = Journal(None)
    journal.write("step", loss=1.0)
    journal.close()


def test_a_torn_line_is_skipped_and_does_not_swallow_the_next(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("a")
    journal.write("b", text="x" * 100)
    journal.close()
    path = tmp_path / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-50])
    assert [event["event"] for event in read_journal(tmp_path)] == ["a"]
    journal = Journal(tmp_path)
    journal.write("c")
    journal.close()
    assert [event["event"] for event in read_journal(tmp_path)] == ["a", "c"]


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text('{"event":"journal","version":2}\n')
    with pytest.raises(UsageError) as caught:
        read_journal(tmp_path)
    path = tmp_path / "journal.jsonl"
    assert (
        str(caught.value)
        == f"{path} has format version 2, but this version of Paceline reads only up to 1; install a newer Paceline"
    )


def test_lines_of_several_processes_never_interleave(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    script = """
import sys
from pathlib import Path
from paceline.base.journal import Journal
journal = Journal(Path(sys.argv[1]))
sys.stdin.read()
for place in range(500):
    journal.write("step", writer=int(sys.argv[2]), place=place, text=sys.argv[2] * (place * 37 % 5000))
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    writers = [subprocess.Popen([*command, str(k)], stdin=subprocess.PIPE) for k in range(4)]
    for writer in writers:  # all are let go at once
        assert writer.stdin is not None
        writer.stdin.close()
    assert [writer.wait() for writer in writers] == [0] * 4
    events = read_journal(tmp_path)  # a journal just opened takes another's half-written line for torn: a blank follows
    assert sum(map(bool, (tmp_path / "journal.jsonl").read_bytes().splitlines())) == 1 + 4 * 500
    for k in range(4):
        own = [event for event in events if event["writer"] == k]
        assert [event["place"] for event in own] == list(range(500))
        assert all(event["text"] == str(k) * (event["place"] * 37 % 5000) for event in own)


def test_a_full_disk_warns_once_and_later_lines_are_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "journal.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 30, limits[1]))  # Python ignores SIGXFSZ: EFBIG
    try:
        journal.write("torn", text="x" * 100)
        with warnings.catch_warnings(record=True, action="always") as caught:
            journal.write("lost")
            journal.write("lost")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [str(one.message) for one in caught] == [
        f"{tmp_path / 'journal.jsonl'} cannot be written (File too large): training continues, but its report will"
        " have gaps; free space on that disk"
    ]
    journal.write("whole")
    journal.close()
    assert [event["event"] for event in read_journal(tmp_path)] == ["whole"]


def test_a_resumed_attempt_supersedes_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    write_run(tmp_path)
    events = read_journal(tmp_path)
    assert [event["step"] for event in events if event["event"] == "step"] == [
        *range(10, 70, 10),
        *range(60, 110, 10),
    ]
    kept = effective_steps(events)
    assert [event["step"] for event in kept] == list(range(10, 110, 10))
    assert [event["loss"] for event in kept[4:6]] == [5.0, 5.0]  # 10 - 50 / 10, then 8 - 60 / 20
    assert [event["step"] for event in effective_steps(events, "evaluate")] == list(range(60, 110, 10))


def test_an_attempt_from_scratch_supersedes_everything() -> None:
    events = [
        {"event": "step", "step": 5},
        {"event": "start", "resumed_from": None},
        {"event": "step", "step": 1},
    ]
    assert effective_steps(events) == [{"event": "step", "step": 1}]


# ---- progress


def plain_progress(every: float) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(Console(file=out, width=200), every=every), out


def test_plain_lines() -> None:
    progress, out = plain_progress(every=0.0)
    with progress:
        progress.phase({"trainer": 0, "steps": 1200, "text": GRID})
        progress.step(step(10, loss=2.3144))
        progress.line("a line of [bold]the script")
        progress.step(step(20, loss=None, seconds=1.5))
    assert out.getvalue().splitlines() == [
        GRID,
        "step 10/1200  loss 2.314  5,120 samples/s  1:00 left  compute 82% reduce 10% data 5% update 3%",
        "a line of [bold]the script",
        "step 20/1200  loss not finite  2,560 samples/s  1:58 left  compute 82% reduce 10% data 5% update 3%",
    ]


@pytest.mark.parametrize(("epochs", "epoch", "text"), [(3, 1, "  epoch 2/3"), (1, 0, ""), (None, 1, ""), (2, 2, "")])
def test_plain_lines_have_the_epoch_if_there_are_several(epochs: int | None, epoch: int, text: str) -> None:
    """The last case is a later loop of the script: its epochs are counted on from the earlier loop."""
    progress, out = plain_progress(every=0.0)
    progress.phase({"trainer": 0, "steps": 1200, "epochs": epochs})
    progress.step({"trainer": 0, "step": 600, "loss": 2.5, "epoch": epoch})
    assert out.getvalue() == f"step 600/1200{text}  loss 2.500\n"


def test_plain_lines_come_first_then_rarely_and_last() -> None:
    progress, out = plain_progress(every=3600.0)
    for done in range(10, 60, 10):
        progress.step({"step": done, "loss": float(done)})
    progress.close()
    progress.close()
    assert out.getvalue().splitlines() == ["step 10  loss 10.00", "step 50  loss 50.00"]


def test_several_trainers_show_every_loss_by_name_and_one_count() -> None:
    """The count is that of checkpoints and of --steps: of all trainers together."""
    progress, out = plain_progress(every=0.0)
    for trainer, model in enumerate(("Generator", "Critic")):
        progress.phase({"trainer": trainer, "steps": 192, "model": model, "done": [0, 0]})
    for trainer, loss in ((0, 1.5), (1, 0.25)):
        progress.step({"trainer": trainer, "step": 48, "loss": loss, "steps": 48, "seconds": 12.0})
    assert out.getvalue().splitlines()[-1] == "step 96/384  loss Generator 1.500, Critic 0.2500  1:12 left"


def test_trainers_whose_models_are_alike_are_numbered() -> None:
    """A resumed run: the first of them is complete, and the second goes on."""
    progress, out = plain_progress(every=0.0)
    for trainer, loss in ((0, 1.5), (1, 0.25)):
        progress.step({"trainer": trainer, "step": 3, "loss": loss})
    assert out.getvalue().splitlines()[-1] == "step 6  loss trainer 0 1.500, trainer 1 0.2500"
    progress, out = plain_progress(every=0.0)
    progress.phase({"trainer": 1, "steps": 192, "model": "Net", "done": [192, 48]})
    progress.step({"trainer": 1, "step": 96, "loss": 0.25})
    assert out.getvalue().splitlines()[-1] == "step 288/384  loss 0.2500"


def test_rates_are_of_the_last_ten_seconds() -> None:
    progress, out = plain_progress(every=0.0)
    for done, seconds in ((1, 100.0), (2, 5.0), (3, 5.0)):
        progress.step({"step": done, "samples": 1000, "steps": 1, "seconds": seconds})
    assert out.getvalue().splitlines()[-1] == "step 3  200 samples/s"


def live_progress(width: int) -> str:
    """What is on a terminal of that width after some events: the control codes are taken out."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    with pytest.MonkeyPatch.context() as patch, Progress(console) as progress:
        patch.setattr("paceline.observe.progress.REFRESH", 0.0)
        progress.phase({"trainer": 0, "steps": 1200, "epochs": 3, "text": "the grid"})
        progress.step(step(750, loss=2.3144))
        progress.line(coloured("\x1b[31mred\x1b[0m\x1b[2J"))
        progress.evaluate({"trainer": 0, "results": {"accuracy": 0.75, "n": 500}})
        progress.step(step(900, loss=2.25, epoch=2, metrics={"error": 0.5}))
        shown = out.getvalue()
    assert out.getvalue().endswith("\n\x1b[?25h")  # the line stays, and so does the cursor
    assert " left" not in out.getvalue()[len(shown) :]  # nothing is to come
    assert "\x1b[2J" not in out.getvalue()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


def test_the_live_line_holds_all_parts() -> None:
    shown = live_progress(160)
    last = (
        "step 900/1200  ▕███████████████     ▏  epoch 3/3  loss 2.250  error 0.5000 accuracy 0.7500  5,120 samples/s  "
    )
    last += "0:15 left  compute 82% reduce 10% data 5% update 3%"
    assert shown.rstrip().splitlines()[-1].rpartition("\r")[2].rstrip() == last
    assert "the grid\n" in shown
    assert "red\\x1b[2J\n" in shown


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (
            140,
            "step 900/1200  ▕██████████████████████████████          ▏  epoch 3/3  loss 2.250  "
            "error 0.5000 accuracy 0.7500  5,120 samples/s  0:15 left",
        ),
        (100, "step 900/1200  epoch 3/3  loss 2.250  error 0.5000 accuracy 0.7500  5,120 samples/s  0:15 left"),
        (80, "step 900/1200  epoch 3/3  loss 2.250  error 0.5000 accuracy 0.7500  0:15 left"),
        (70, "step 900/1200  loss 2.250  error 0.5000 accuracy 0.7500  0:15 left"),
        (60, "step 900/1200  loss 2.250  error 0.5000 accuracy 0.7500"),
        (30, "step 900/1200  loss 2.250"),
        (20, "step 900/1200"),
    ],
)
def test_a_narrow_terminal_drops_the_least_important(width: int, line: str) -> None:
    assert live_progress(width).rstrip().splitlines()[-1].rpartition("\r")[2].rstrip() == line


TRAINING = """
import sys
from paceline.observe.progress import Progress
with Progress() as progress:
    progress.phase({"steps": 100, "text": "the grid"})
    for done in range(1, 101):
        progress.step({"step": done, "loss": 1.0, "steps": 1, "seconds": 0.1})
        progress.line(f"line {done}")
print("the script's own", file=sys.stderr)
sys.exit(3)
"""


def test_on_a_real_terminal_the_line_is_live() -> None:
    agent, terminal = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", TRAINING],
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(terminal)
    shown = b""
    try:
        while part := os.read(agent, 65536):
            shown += part
    except OSError:  # so ends a pseudo-terminal
        pass
    os.close(agent)
    assert child.wait() == 3
    assert b"step 100/100" in shown
    assert b"\x1b[2K" in shown
    assert b"line 100" in shown


@pytest.mark.parametrize("terminal", [False, True])
def test_a_reader_that_goes_away_does_not_end_the_training(terminal: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    script = (
        TRAINING
        if not terminal
        else TRAINING.replace(
            "Progress()",
            "Progress(__import__('rich.console').console.Console(stderr=True, force_terminal=True))",
        )
    )
    child = subprocess.run([sys.executable, "-c", script], stdout=writer, stderr=writer, check=False)
    os.close(writer)
    assert child.returncode == 3


def test_a_closed_stream_is_survived() -> None:
    progress, out = plain_progress(every=0.0)
    out.close()
    progress.line("nobody reads this")
    progress.step(step(10))
    progress.close()


@pytest.mark.parametrize("kind", ["plain", "none", "rich"])
def test_kinds_of_progress(kind: str) -> None:
    out = io.StringIO()
    with Progress(Console(file=out, width=80, force_terminal=kind != "rich"), kind=kind, every=0.0) as progress:
        progress.phase({"trainer": 0, "steps": 20, "text": GRID})
        progress.step(step(10, steps=5))
    shown = out.getvalue()
    assert GRID in shown
    assert ("step 10/20" in shown) == (kind != "none")
    assert ("▕" in shown) == (kind == "rich")


def screen(written: bytes) -> list[str]:
    """The lines of a terminal after this was written to it: carriage returns, erased lines, and moves of the cursor."""
    lines, row, column = [""], 0, 0
    for match in re.finditer(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)", written.decode()):
        count, command, end, text = match.groups()
        if command == "A":
            row -= int(count or 1)
        elif command == "K" and count == "2":
            lines[row] = ""
        elif end == "\r":
            column = 0
        elif end == "\n":
            row, column = row + 1, 0
            lines += [""] * (row - len(lines) + 1)
        elif text:
            lines[row] = (lines[row].ljust(column)[:column] + text + lines[row][column + len(text) :]).rstrip()
            column += len(text)
    return lines


def test_a_run_on_a_terminal_shows_a_bar(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from basics import *\nimport time\nt = make()\n"
        "for report in t.steps(data, epochs=2):\n    time.sleep(0.1)\n    print('a line', report.step)\n"
    )
    agent, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (40, 120))
    command = [sys.executable, "-m", "paceline", "run", "--run-dir", "out", "train.py"]
    with Process(command, environment(TERM="xterm"), cwd=tmp_path, stdout=terminal, stderr=terminal) as child:
        os.close(terminal)
        shown = b""
        with suppress(OSError):  # so ends a pseudo-terminal
            while part := os.read(agent, 65536):
                shown += part
        assert child.wait() == 0
    os.close(agent)
    lines = screen(shown)
    assert [line for line in lines if line.startswith("a line")] == [f"a line {number}" for number in range(1, 9)]
    (last,) = (line for line in lines if line.startswith("step "))
    assert re.match(r"step 8/8  ▕█{12,40}▏  epoch 2/2  loss [\d.]+  [\d.,]+ samples/s", last)
    without_colours = re.sub(r"\x1b\[[\d;]*m", "", shown.decode())
    assert any(re.search(r"▏  epoch 1/2 .* left", line) for line in without_colours.split("\r"))


# ---- the report


class Page(HTMLParser):
    """Reads a page strictly: every element that is opened is closed, in order."""

    VOID = frozenset(("meta", "br"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def read_page(folder: Path) -> Page:
    return Page((folder / "report.html").read_text())


def test_the_summary_counts_every_step_once(tmp_path: Path) -> None:
    write_run(tmp_path)
    summary = Summary(tmp_path)
    assert (summary.workers, summary.steps_done, summary.samples) == (2, 100, 25_600)
    assert summary.losses == {"": (9.0, 3.0)}
    assert summary.samples_per_second == pytest.approx(5120.0)
    assert summary.speedup == pytest.approx(2.0)
    assert summary.time["compute"] == pytest.approx(4.11)
    assert summary.waited_for == {"1": pytest.approx(0.2)}
    assert (summary.bytes_moved, summary.bytes_per_step) == (100_000_000, 1_000_000.0)
    assert summary.series == {"accuracy": [(float(done), done / 200) for done in range(60, 110, 10)]}
    assert summary.texts == {"sample": (100, "text of step 100")}
    assert (len(summary.attempts), len(summary.grids), len(summary.decisions)) == (2, 1, 1)
    assert summary.finished


def test_the_steady_speed_leaves_the_first_tenth_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for done in range(10, 210, 10):
        journal.write("step", **step(done, seconds=50.0 if done <= 20 else 0.5))
    assert Summary(tmp_path).samples_per_second == pytest.approx(5120.0)


def test_an_attempt_with_nothing_left_to_do_is_not_the_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    journal = Journal(tmp_path)
    journal.write("start", workers=7, resumed_from=100)
    journal.write("finished", step=100, already=True)
    assert Summary(tmp_path).workers == 2


def test_the_page_is_whole_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_report(tmp_path)
    page = read_page(tmp_path)
    raw = (tmp_path / "report.html").read_text()
    assert not re.search(r"https?:|//|@import|url\(", raw)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert not [attrs for _, attrs in page.tags if attrs.keys() & {"src", "href"}]
    for figure in (
        "3.000 step 100; 9.000 at step 10",
        "samples/s 5,120 last 2 s",
        "samples/s 5,120 mean of the run without its first 10% of steps",
        "speedup 2.00\u00d7 compared with 1 worker",
        "train.py Finished 2 workers, plan data=2, device cpu, started ",
        "step 100 of 100 100.0%",
        "25,600 samples",
    ):
        assert figure in page.text
    for text in (
        GRID,
        "compute 82.2%",
        "1 MB per step, 100 MB in total",
        "data=2 (from --plan)",
        "text of step 100",
    ):
        assert text in page.text
    for text in (
        "the forward drew no random numbers",
        "2, the last resumed from step 50",
        "torch 2.13.0",
    ):
        assert text in page.text
    captions = [attrs["aria-label"] for _, attrs in page.tags if attrs.get("class") == "chart"]
    assert captions == [
        "loss: 9.000 to 3.000 over 10 points",
        "samples/s: 5,120 to 5,120 over 10 points",
        "error: 0.0167 to 0.01 over 5 points",
        "accuracy: 0.3000 to 0.5000 over 5 points",
    ]
    assert [path.name for path in tmp_path.iterdir() if "report" in path.name] == ["report.html"]


def test_the_terminal_text(tmp_path: Path) -> None:
    write_run(tmp_path)
    text = re.sub(r" in \d.* m?s$", " in T", write_report(tmp_path, width=200), flags=re.M)
    assert text.splitlines() == [
        "train.py finished at step 100",
        "loss        from 9.000 to 3.000",
        "evaluation  accuracy 0.5000, n 500 (step 100)",
        "done        100 of 100 steps, 25,600 samples in T",
        "speed       5,120 samples/s, 2.00 times as fast as 1 worker (mean of the run without its first 10% of steps); "
        "5,120 samples/s (last 2 s)",
        "time        compute 82% (4.1 s), reduce 10% (0.5 s), data 5% (0.2 s), update 3% (0.1 s)",
        "waited for  worker 1 0.2 s",
        "bytes       1 MB per step, 100 MB in total, sent by worker 0",
        f"report      {tmp_path}/report.html",
    ]
    assert max(map(len, write_report(tmp_path, width=40).splitlines())) <= 40
    assert "\x1b[1;32mtrain.py finished at step 100\x1b[0m" in write_report(tmp_path, colour=True)


def test_a_good_run_ends_with_six_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a console of 80 columns; of a run of seconds it does not say how little of them was training."""
    monkeypatch.chdir(tmp_path)
    run = Path("run")
    write_run(run)
    long = {"accuracy": 0.5, **{f"a metric that has a long name {number}": 1.5 for number in range(3)}}
    for steps, starting, goodput in ((57, 2, []), (2, 0, ["goodput     96% of 1 min 1 s (steps 96%)"])):
        journal = Journal(run)
        journal.write("evaluate", trainer=0, step=100, results=long)
        journal.write("account", seconds={"steps": steps, "starting": starting})
        text = write_report(run, width=80, short=True)
        assert re.sub(r"; \d.* m?s in all", "; T in all", text).splitlines() == [
            "train.py finished at step 100",
            "loss        from 9.000 to 3.000",
            "evaluation  accuracy 0.5000, a metric that has a long name 0 1.500, …",
            *goodput,
            "speed       mean 5,120 samples/s, 2.00x the speed of 1 worker; T in all",
            "report      run/report.html",
        ]
    assert "goodput     96% of 1 min 1 s (steps 96%); starting 2.0 s, waiting 0.2 s" in write_report(run, width=99)
    deep = tmp_path / "folder" / "a-long-name" / "that-a-terminal-of-80-columns-has-no-room-for"
    shutil.copytree(run, deep)
    *others, report = write_report(deep, width=80, short=True).splitlines()
    assert (len(others), report) == (5, f"report      {deep}/report.html")


def test_of_several_trainers_the_losses_are_one_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for trainer, model in enumerate(("Generator", "Critic")):
        journal.write("grid", trainer=trainer, phase=0, model=model)
        for done, loss in ((1, 2.0 + trainer), (192, 0.5 + trainer)):
            journal.write("step", trainer=trainer, step=done, loss=loss)
    journal.write("finished", step=384)
    title, loss, *_ = write_report(tmp_path, width=80, short=True).splitlines()
    assert title == "the run finished at step 384"
    assert loss == "loss    Generator 2.000 to 0.5000, Critic 3.000 to 1.500"


EVIL = "<script>alert('x')</script>\"&"


def test_everything_of_the_users_is_escaped(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("start", script=EVIL, argv=[EVIL], plan=EVIL, plan_origin=EVIL, versions={EVIL: EVIL}, hosts=[EVIL])
    journal.write("grid", text=EVIL, shares=[1])
    journal.write("decision", what=EVIL, why=EVIL)
    for done in (1, 2):
        for trainer in (0, 1):
            fields = {"time": {EVIL: 1.0}, "waited_for": {EVIL: 1.0}, "metrics": {EVIL: 1.0 * done}}
            journal.write("step", **step(done, trainer=trainer, **fields))
        journal.write("evaluate", trainer=0, step=done, results={EVIL: float(done)})
        journal.write("log", step=done, values={EVIL: EVIL, "c": 1.0})
    journal.write("checkpoint", step=2, path=EVIL, seconds=1.0)
    journal.write("failed", worker=1, host=EVIL, cause=EVIL, text=EVIL)
    write_report(tmp_path)
    page = read_page(tmp_path)
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.text.count("<script>alert('x')</script>") > 10


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_hardly_began_has_a_report(tmp_path: Path, steps: int) -> None:
    journal = Journal(tmp_path)
    assert "last seen at step 0: killed, or still running" in write_report(tmp_path)
    assert explain(tmp_path).endswith(f"\n\nNext: run the same command again with --run-dir {tmp_path}")
    for done in range(steps):
        journal.write("step", step=done + 1, loss=math.nan)
    write_report(tmp_path)
    explain(tmp_path)
    titles = [tag for tag, _ in read_page(tmp_path).tags if tag == "section"]
    assert len(titles) == 1 + steps


def test_a_long_run_has_a_small_page(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for done in range(1, 5001):
        journal.write("step", **step(done, loss=1000.0 if done == 2500 else math.sin(done)))
    write_report(tmp_path)
    raw = (tmp_path / "report.html").read_text()
    assert len(raw) < 150_000
    assert "<title>step 2,500: 1,000</title>" in raw


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        Summary(tmp_path)
    assert (
        str(caught.value)
        == f"{tmp_path} is not a run folder: it does not contain journal.jsonl; pass a folder made by --run-dir"
    )


def test_what_each_of_very_many_workers_computed_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "SELDOM", 0.0)
    kept = ledger.StepTotals()
    for number in range(1, 5):
        kept.add(number, 8, {"compute": 0.1}, {worker: worker / 1000 for worker in range(65)})
        if number == 2:
            assert (kept.take(0)["computed"], kept.take(0)["steps"]) == ({}, 0)
    kept.take(0)
    told = {"steps": 4, "computed": {worker: pytest.approx(4 * worker / 1000) for worker in range(65)}}
    assert kept.each() == told
    assert kept.each() is None, "nothing is told twice"
    kept.add(5, 8, {"compute": 0.1}, dict.fromkeys(range(64), 0.5))
    assert kept.take(0)["computed"] == dict.fromkeys(range(64), 0.5), "of fewer in every record"
    assert kept.each() is None


def test_how_busy_a_gpu_is(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("start", workers=1, resumed_from=None)
    for number, gpu in enumerate((0.5, 0.9, None), 1):
        journal.write("step", **step(number, gpu=gpu, seconds=float(number)))
    journal.close()
    assert dict(facts(Summary(tmp_path))["Results"])["computing"] == "worker 0's GPU was busy 77% of the time"


@pytest.mark.gpu
def test_a_run_on_a_gpu_says_how_busy_it_is(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="no NVML: pip install 'paceline[gpu]'")
    train_basics(tmp_path, "list(make().steps(data))\n", 1)
    assert all(0 <= event["gpu"] <= 1 for event in read_journal(tmp_path / "out") if event["event"] == "step")
