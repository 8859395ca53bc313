"""What a script does that is no error, and that people would not believe without a word."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch.nn.functional as F
from alone import by_hand, same, trainer
from by_hand import built, grid
from cases import mlp, rows
from doc_pages import python_blocks
from launching import paceline, train_basics
from paths import DOCS
from plain_python import python_train
from warm import Process, environment

from paceline.session.run import Run

INTERRUPTED = """
import os, signal, sys
sys.ps1 = "In [1]: "
from basics import *
first = make()
try:
    for report in first.steps(data, count=40):
        if report.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("stopped at", first.steps_done)
print(*[report.step for report in make().steps(data, count=4)])
print(*[report.step for report in first.steps(data, count=2)])
"""


def test_ctrl_c_in_a_notebook_ends_the_cell_alone(tmp_path: Path) -> None:
    """As at the prompt, which sets sys.ps1: what comes after it trains as ever."""
    (tmp_path / "cells.py").write_text(INTERRUPTED)
    command = [sys.executable, "cells.py"]
    with Process(command, environment(), cwd=tmp_path, stdout=PIPE, stderr=PIPE) as process:
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    first, *others = stdout.splitlines()
    assert first in ("stopped at 4", "stopped at 3")
    assert others == ["1 2 3 4", "5 6" if first.endswith("4") else "4 5"]


def test_a_loop_that_nobody_goes_through_is_told_of(tmp_path: Path) -> None:
    told = (
        "these weights are not trained: the loop that steps() returned was not run; "
        "write `for report in trainer.steps(...):`\n"
    )
    said = train_basics(tmp_path, "t = make()\nt.steps(data)\nt.export('out.safetensors')\n", 2, code=2).stderr
    assert said.count(told) == 1
    assert (
        "  UsageError: steps() at train.py:3 returned a loop that the script never ran, so nothing was trained"
        "; write `for report in trainer.steps(...):`\n" in said
    )
    said = train_basics(tmp_path, "t = make()\nlist(t.steps(data))\nt.export('out.safetensors')\n", 2).stderr
    assert told not in said


def test_a_loop_that_nobody_goes_through_ends_without_a_launcher_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from basics import *\nmake().steps(data)\n")
    with Process([sys.executable, "train.py"], environment(), cwd=tmp_path, stdout=PIPE, stderr=PIPE) as process:
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert stderr.endswith(
        "UsageError: steps() at train.py:2 returned a loop that the script never ran, so nothing was trained; "
        "write `for report in trainer.steps(...):`\n"
    )
    assert "Traceback" not in stderr


def test_a_loop_behind_a_condition_is_no_mistake(tmp_path: Path) -> None:
    """One that is not asked for, one that is done, and one beside another that trains."""
    body = "import sys\nt = make()\nif False:\n    list(t.steps(data))\nt.evaluate(data, lambda o, b: {'n': (1, 1)})\n"
    python_train(tmp_path, body)
    body = "t = make()\nlist(t.steps(data))\n"
    python_train(tmp_path, body)
    python_train(tmp_path, body.replace("list(t.steps(data))", "again = t.steps(data)"))
    (tmp_path / "other").mkdir()
    python_train(tmp_path / "other", body + "more = t.steps(data)\n")


def test_a_finished_run_says_so_before_code_misses_what_its_loop_would_yield(tmp_path: Path) -> None:
    body = "t = make()\nfor report in t.steps(data, count=2):\n    pass\nprint(report.loss)\n"
    train_basics(tmp_path, body, 2)
    said = train_basics(tmp_path, body, 2, code=1).stderr
    told = (
        "this run had already finished at step 2, so nothing was trained; use a larger count= or epochs= to train"
        " longer, or another --run-dir\n"
    )
    assert said.count(told) == 1
    assert said.index(told) < said.index("NameError: name 'report' is not defined")
    said = train_basics(tmp_path, body.replace("print(report.loss)", ""), 2).stderr
    assert said.count(told) == 1


def test_a_run_goes_on_with_its_own_script_alone(tmp_path: Path) -> None:
    body = "t = make()\nlist(t.steps(data, count={}))\n"
    train_basics(tmp_path, body.format(2), 2)
    (tmp_path / "train.py").rename(tmp_path / "same.py")
    (tmp_path / "other.py").write_text("from basics import *\n" + body.format(4))
    command = ("run", "--workers", "2", "--run-dir", "out")
    paceline(*command, "same.py", cwd=tmp_path)
    said = paceline(*command, "other.py", cwd=tmp_path, code=2).stderr
    assert (
        f"  UsageError: {tmp_path}/out is the run of the script train.py, but this script is other.py; use another"
        " --run-dir to start a new run, or rename the script to train.py to resume this one\n" in said
    )
    (tmp_path / "moved").mkdir()
    (tmp_path / "other.py").rename(tmp_path / "moved" / "train.py")
    assert "resuming from step 2" in paceline(*command, "moved/train.py", cwd=tmp_path).stderr


@pytest.mark.parametrize(
    ("name", "env"),
    [
        (b"tr\xe4n.py", {}),
        pytest.param(
            "trän.py".encode(),
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PACELINE_COLD_START": "1"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_name_that_the_locale_cannot_encode_is_a_name(name: bytes, env: dict[str, str], tmp_path: Path) -> None:
    script = os.fsdecode(name)
    (tmp_path / script).write_text("from basics import *\nlist(make().steps(data, count=2))\n")
    for _ in range(2):
        paceline("run", "--workers", "2", "--run-dir", "out", script, cwd=tmp_path, **env)
    assert (tmp_path / "out" / "report.html").exists()


def test_a_loss_that_exec_has_made_trains(run: Run) -> None:
    """It has no module, nor has its class."""
    made: dict[str, Any] = {"F": F}
    exec("def loss(output, batch):\n    return F.cross_entropy(output, batch[1])\n", made)
    exec("def forward(model, batch):\n    return model(batch[0])\n", made)
    assert made["loss"].__module__ is None
    mine = trainer(loss=made["loss"], forward=made["forward"])
    list(mine.steps(rows(1, 45, 10), count=3))
    same(mine, by_hand(built(mlp)).train(grid(rows(1, 45, 10), 16, count=3)))


LOGGER = """
class SummaryWriter:
    def __init__(self, folder, purge_step):
        self.file = open(folder, "a")
    def add_scalar(self, name, value, step):
        print(paceline.join().rank, step, value, file=self.file, flush=True)
data, trainer = data, make(plan="exact micro=3")
"""


def test_the_logger_of_the_documentation_survives_the_loss_of_worker_0(tmp_path: Path) -> None:
    text = (DOCS / "howto" / "loggers.md").read_text()
    (block,) = (b for b in python_blocks(text) if "SummaryWriter" in b)
    logged = []
    for folder, chaos in ((tmp_path / "whole", ""), (tmp_path / "lost", "kill:0@5.backward")):
        folder.mkdir()
        train_basics(folder, LOGGER + block, 2, chaos=chaos)
        logged.append([line.split()[1:] for line in (folder / "logs").read_text().splitlines()])
    assert [step for step, _ in logged[0]] == [str(step) for step in range(1, 13)]
    assert logged[0] == logged[1]


def test_a_run_folder_that_is_no_utf8_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('started')")
    done = paceline("run", "--run-dir", os.fsdecode(b"r\xe4"), "train.py", cwd=tmp_path, code=2)
    assert done.stderr == (
        "paceline: --run-dir 'r\\udce4' is not valid UTF-8, and checkpoints cannot be read "
        "from a path like this; choose another "
        "name\n"
    )
