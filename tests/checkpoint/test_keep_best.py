"""`keep_best`: the checkpoint of the best weights, through losses, a resume and pruning, also behind a URL."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from alone import trainer
from cases import rows
from launching import paceline, train_basics

from paceline.base.journal import read_journal
from paceline.checkpoint.export import export_model
from paceline.checkpoint.inspect import inspect_run
from paceline.errors import UsageError

# The best are those of steps 3, 5 and 9; equal, NaN and infinite ones are not.
SCRIPT = """
import math
values = [0.1, 0.0, 0.5, 0.5, 0.7, math.nan, math.inf, 0.6, {ninth}, 0.2]
t = make(plan="exact micro=3")
t.keep_best("accuracy", mode="{mode}")
for report in t.steps(data, count=10):
    t.export(f"step-{{report.step}}.safetensors")
    {follow}
"""
LOG = "t.log(accuracy={sign}values[report.step - 1])"
EVALUATE = """found = t.evaluate(data, lambda o, b: {{"accuracy": ({sign}values[report.step - 1] * len(o), len(o))}})
    if t.main:
        t.log(**found)"""


def script(mode: str, ninth: float, follow: str) -> str:
    return SCRIPT.format(mode=mode, ninth=ninth, follow=follow.format(sign="-" if mode == "min" else ""))


def best_is(folder: Path, run: str, step: int, value: float, others: set[int]) -> None:
    """The best checkpoint of the run has the weights of `step`, and there are no more than these beside it."""
    url = run if "://" in run else folder / run
    out = folder / f"best-{step}.safetensors"
    assert export_model(url, out, best=True).endswith(f"from step {step} of {url}, the best accuracy: {value}")
    assert out.read_bytes() == (folder / f"step-{step}.safetensors").read_bytes()
    contents = json.loads(inspect_run(url, as_json=True))
    mode = "max" if value > 0 else "min"
    (mark,) = contents["best"]
    assert abs(mark.pop("value") - value) < 1e-12
    assert mark == {"step": step, "trainer": 0, "name": "accuracy", "mode": mode}
    assert {row["step"] for row in contents["checkpoints"]} == others | {step}
    assert f"best of trainer 0: accuracy {value} at step {step}\n" in inspect_run(url)


def test_keep_best_through_a_kill_a_resume_and_pruning(tmp_path: Path) -> None:
    keeps(tmp_path, 3, "3,1,2", "min", EVALUATE, "kill:0@5.writing")


def keeps(folder: Path, workers: int, shares: str, mode: str, follow: str, chaos: str) -> None:
    sign = -1 if mode == "min" else 1
    options = ["--keep", "1", "--save-every", "1", *(["--shares", shares] if shares else [])]
    body = script(mode, 0.6, follow)
    train_basics(folder, body, workers, *options, "--steps", "7", chaos=chaos)
    assert any(event["event"] == "lost" for event in read_journal(folder / "out")) == bool(chaos)
    best_is(folder, "out", 5, sign * 0.7, {7})
    train_basics(folder, body, 1, "--keep", "1", "--save-every", "1")
    best_is(folder, "out", 5, sign * 0.7, {10})


@pytest.mark.slow
@pytest.mark.parametrize("follow", [LOG, EVALUATE], ids=["log", "evaluate"])
@pytest.mark.parametrize(
    ("workers", "shares", "chaos"),
    [
        (1, "", ""),
        (2, "", "kill:1@5.saving"),
        (2, "3,1", "kill:0@5.saving"),
        (3, "", "kill:2@5.saving"),
        (3, "", "kill:1@4.backward"),
        (5, "1,2,2,3,1", "kill:0@5.writing"),
        (5, "", "kill:4@5.backward"),
    ],
)
def test_keep_best_on_any_workers(workers: int, shares: str, chaos: str, follow: str, tmp_path: Path) -> None:
    keeps(tmp_path, workers, shares, "max", follow, chaos)


def test_keep_best_replaces_a_checkpoint_behind_a_url(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kept"
    options = ["--keep", "1", "--checkpoints", url]
    train_basics(tmp_path, script("max", 0.9, LOG), 2, *options)
    best_is(tmp_path, url, 9, 0.9, {10})


def test_export_best_without_keep_best_says_what_to_do(tmp_path: Path) -> None:
    body = "t = make()\nt.keep_best('acuracy')\nfor r in t.steps(data, count=2):\n    t.log(accuracy=r.step)\n"
    train_basics(tmp_path, body, 1)
    done = paceline("export", "out", "m.safetensors", "--best", cwd=tmp_path, code=2)
    assert done.stderr == (
        "paceline: no checkpoint in out is marked as the best of trainer 0; "
        "call trainer.keep_best(NAME) before the training loop, or omit --best\n"
    )
    done = paceline("export", "out", "m.safetensors", "--best", "--step", "2", cwd=tmp_path, code=2)
    assert done.stderr == "paceline: --best and --step cannot be used together; use only one of them\n"


def test_keep_best_refuses_a_log_by_some_workers(tmp_path: Path) -> None:
    body = "t = make()\nt.keep_best('a')\nfor r in t.steps(data, count=2):\n    if t.main:\n        t.log(a=r.step)\n"
    done = train_basics(tmp_path, body, 2, "--max-restarts", "0", code=1)
    assert "log(a=), which keep_best() follows" in re.sub(r"\s+", " ", done.stderr)


@pytest.mark.usefixtures("run")
def test_keep_best_refuses_what_it_cannot_follow() -> None:
    mine = trainer()
    for act, text in (
        (
            lambda: mine.keep_best("a", mode="best"),
            "keep_best() does not know mode 'best'; use mode='max' or mode='min'",
        ),
        (lambda: mine.keep_best("a"), None),
        (lambda: mine.keep_best("b"), "keep_best() already follows 'a'; follow one value per trainer"),
        (
            lambda: mine.log(a="text"),
            (
                "keep_best() follows 'a', which is 'text', not a number; report a number of that name with evaluate()"
                " or log()"
            ),
        ),
    ):
        if text is None:
            act()
            continue
        with pytest.raises(UsageError) as caught:
            act()
        assert str(caught.value) == text


@pytest.mark.usefixtures("run")
def test_keep_best_marks_the_step_whose_weights_are_there() -> None:
    """Between single steps, before the first one, and after the last; not where an inner loop has gone on."""
    mine = trainer()
    mine.keep_best("a", mode="min")
    mine.log(a=9)
    assert (mine.best.value, mine.best.step) == (None, None)
    for number, report in enumerate(mine.steps(rows(1, 45, 10), count=3)):
        assert (mine.best.value, mine.best.step) == (9 - number, number)
        mine.log(a=8 - number)
        assert mine.best.step == report.step - 1
    assert (mine.best.value, mine.best.step) == (6, 3)
    for _ in mine.steps(rows(1, 45, 10), count=2):
        for inner in mine.steps(rows(1, 45, 10), count=2):
            if inner.step in (5, 8):
                mine.log(a=-inner.step)
    assert (mine.best.value, mine.best.step) == (6, 3)
