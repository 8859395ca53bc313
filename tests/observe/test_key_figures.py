"""The figures that the report, the live page and `paceline watch` share."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from journals import step, write_run
from launching import train_basics
from rich.console import Console

from paceline.base.journal import Journal, read_journal
from paceline.observe.key_figures import KeyFigure, best_values, key_figures, recent_speed, step_count
from paceline.observe.page import render
from paceline.observe.report import write_report
from paceline.observe.summary import Summary
from paceline.observe.watch import watch
from paceline.session.best_checkpoint import BestCheckpoint

KEEPS_BEST = """
from pathlib import Path
t = make()
texts = [str(t.best)]
t.keep_best("accuracy")
texts.append(str(t.best))
for report in t.steps(data, count=4):
    t.log(accuracy=[0.25, 0.75, 0.5, 0.5][report.step - 1])
    texts.append(str(t.best))
if t.main:
    Path("texts").write_text("\\n".join(texts))
"""


def test_the_best_value_is_printed_and_shown_everywhere(tmp_path: Path) -> None:
    train_basics(tmp_path, KEEPS_BEST, 2)
    best = ["best accuracy 0.25 at step 1 (highest so far)", *["best accuracy 0.75 at step 2 (highest so far)"] * 3]
    assert (tmp_path / "texts").read_text().splitlines() == [
        "no best value: keep_best() was not called",
        "no best accuracy yet: evaluate() or log() has not reported a finite value",
        *best,
    ]
    saved = [event.get("best") for event in read_journal(tmp_path / "out") if event["event"] == "checkpoint"]
    assert saved[:2] == [[{"trainer": 0, "name": "accuracy", "mode": "max", "value": value}] for value in (0.25, 0.75)]
    summary = Summary(tmp_path / "out")
    assert best_values(summary) == [KeyFigure("best accuracy", "0.7500", "step 2, highest so far")]
    assert "<dt>best accuracy</dt><dd>0.7500</dd><dd>step 2, highest so far</dd>" in render(summary)
    row = "best accuracy 0.7500 (step 2, highest so far)"
    assert row in " ".join(write_report(tmp_path / "out", width=200).split())
    out = io.StringIO()
    assert watch(tmp_path / "out", once=True, console=Console(file=out, width=120)) == 0
    assert row in " ".join(out.getvalue().split())


def test_the_best_value_before_training() -> None:
    best = BestCheckpoint()
    assert repr(best) == "<BestCheckpoint: no best value: keep_best() was not called>"
    best.follow("loss", "min")
    best.take(0.5, 3)
    assert str(best) == "best loss 0.5 at step 3 (lowest so far)"


def test_steps_of_several_trainers_are_added_up(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("start", workers=1, script="gan.py", resumed_from=None)
    for trainer in (0, 1):
        journal.write("grid", trainer=trainer, phase=0, steps=100, model=("Generator", "Critic")[trainer])
    for done in (10, 20):
        for trainer in (0, 1):
            journal.write("step", **step(done, trainer=trainer))
    summary = Summary(tmp_path)
    assert step_count(summary).text == "step 40 of 200, 20.0%"
    summary.live = True
    assert step_count(summary).text == "step 40 of 200, 20.0%, 8 s left"
    assert [figure.name for figure in key_figures(summary)][:2] == ["loss Generator", "loss Critic"]


def test_recent_figures_are_of_the_last_seconds_and_say_so(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("start", workers=1, script="train.py", resumed_from=None)
    for done in range(10, 110, 10):
        journal.write("step", **step(done, seconds=20.0 if done <= 50 else 10.0))
    figure = recent_speed(Summary(tmp_path))
    assert figure is not None
    assert figure.text == "256 (last 30 s)"
    journal.write("start", workers=1, script="train.py", resumed_from=100)
    assert recent_speed(Summary(tmp_path)) is None, "the last attempt has made no step yet"


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc/locks")
def test_the_report_of_a_run_that_goes_on_says_so(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("start", workers=1, script="train.py", resumed_from=None)
    journal.write("step", **step(10))
    assert write_report(tmp_path).startswith("train.py last seen at step 10: killed, or still running\n")
    assert '<span class="badge unknown" data-state="unknown">No end recorded</span>' in render(Summary(tmp_path))
    holds = "import sys; from pathlib import Path; from paceline.checkpoint.lock import hold_lock; "
    holds += "hold_lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", holds, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert write_report(tmp_path).startswith("train.py running, at step 10\n")
        assert ">Running</span>" in (tmp_path / "report.html").read_text()
        assert holder.stdin is not None
        holder.stdin.close()
    write_run(tmp_path)
    assert write_report(tmp_path).startswith("train.py finished at step 100\n")
