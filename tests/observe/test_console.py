"""What the console says of real runs: few lines, one count, and nothing that is not so."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from subprocess import PIPE

from launching import paceline, train_basics
from warm import Process, environment

TWO = """
class Generator(nn.Sequential): ...
class Critic(nn.Sequential): ...
first, second = (make(model=lambda kind=kind: kind(net())) for kind in (Generator, Critic))
for reports in zip(first.steps(data), second.steps(data)):
    pass
first.evaluate(data, lambda output, batch: {"right": ((output.argmax(1) == batch[1]).sum(), len(output))})
"""


def test_two_trainers_have_one_count_and_names_and_a_good_run_six_lines(tmp_path: Path) -> None:
    said = train_basics(tmp_path, TWO, 2).stderr
    block = said[said.index("train.py finished at step 8\n") :].splitlines()
    grid = "global batch 24 = 8 micro-batches of 3 rows, 4 on each of 2 workers; one epoch = 4 steps; 4 steps"
    grids = [line for line in said.splitlines() if "global batch" in line]
    assert grids == [f"Generator: {grid} of its own", f"Critic: {grid} of its own"]
    assert re.search(r"^step 8/8  loss Generator 0\.\d+, Critic 0\.\d+  ", said, re.M)
    assert [line.split()[0] for line in block] == ["train.py", "loss", "evaluation", "speed", "report"]
    assert re.fullmatch(r"loss +Generator 0\.\d+ to 0\.\d+, Critic 0\.\d+ to 0\.\d+", block[1])
    again = train_basics(tmp_path, None, 2).stderr
    assert "this run had already finished at step 8, so nothing was trained; " in again
    assert "never asked" not in again


def test_all_figures_with_verbose(tmp_path: Path) -> None:
    said = train_basics(tmp_path, "list(make().steps(data))\n", 2, "--verbose", "--plan", "shard=2 zero=1").stderr
    of_model = said[said.index("model: ") : said.index("global batch")].splitlines()
    assert of_model == [
        "model: Sequential, 210 parameters, all trained; each worker holds 1.68 kB of parameters, 1.68 kB of gradients",
        "  0  Linear, 176 parameters",
        "  2  Linear, 34 parameters",
    ]
    assert "\nModel\n  0  Linear, 176 parameters\n" in paceline("explain", "out", cwd=tmp_path).stdout
    block = said[said.index("train.py finished at step 4\n") :].splitlines()
    names = [line.split("  ")[0] for line in block[1:] if not line.startswith(" ")]
    wanted = ["loss", "wall clock", "done", "speed", "time", "bytes", "memory", "report"]
    assert [name for name in names if name != "waited for"] == wanted


ALONE = """
import os, signal
from basics import *
t = make()
for batch in range(3):
    t.step(data[8 * batch : 8 * batch + 8])
for report in t.steps(data, count=40):
    if report.step == 5:
        os.kill(os.getpid(), signal.SIGINT)
"""


def test_without_a_run_folder_nothing_is_said_of_saving_and_the_last_step_is_shown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ALONE)
    with Process([sys.executable, "train.py"], environment(), cwd=tmp_path, stderr=PIPE) as process:
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert "stopping after this step; press Ctrl-C again to stop at once\n" in said
    (stopped,) = re.findall(r"^stopped at step (\d); nothing was saved, because no run folder was given$", said, re.M)
    assert re.match(rf"step {stopped}/43  loss 0\.", said.splitlines()[-1])


def test_a_training_that_stops_itself_has_nothing_left(tmp_path: Path) -> None:
    body = "t = make()\nfor report in t.steps(data, epochs=100):\n    if report.step == 3:\n        t.stop()\n"
    said = train_basics(tmp_path, body, 2).stderr
    (last,) = re.findall(r"^step 3/.*", said, re.M)
    assert " left" not in last
