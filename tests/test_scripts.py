"""What a script does that is no error, and that people would not believe without a word."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from subprocess import PIPE

from launching import train_basics
from warm import Process, environment

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
        "these weights are not trained: nothing went through what steps() returned; "
        "write `for report in trainer.steps(...):`\n"
    )
    said = train_basics(tmp_path, "t = make()\nt.steps(data)\nt.export('out.safetensors')\n", 2).stderr
    assert said.count(told) == 1
    said = train_basics(tmp_path, "t = make()\nlist(t.steps(data))\nt.export('out.safetensors')\n", 2).stderr
    assert told not in said


LOGGER = """
class SummaryWriter:
    def __init__(self, folder, purge_step):
        self.file = open(folder, "a")
    def add_scalar(self, name, value, step):
        print(paceline.join().rank, step, value, file=self.file, flush=True)
data, trainer = data, make(plan="exact micro=3")
"""


def test_the_logger_of_the_documentation_survives_the_loss_of_worker_0(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "docs" / "running.md").read_text()
    (block,) = (b for b in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "SummaryWriter" in b)
    logged = []
    for folder, chaos in ((tmp_path / "whole", ""), (tmp_path / "lost", "kill:0@5.backward")):
        folder.mkdir()
        train_basics(folder, LOGGER + block, 2, chaos=chaos)
        logged.append([line.split()[1:] for line in (folder / "logs").read_text().splitlines()])
    assert [step for step, _ in logged[0]] == [str(step) for step in range(1, 13)]
    assert logged[0] == logged[1]


HIDES = """
class Lookahead(torch.optim.SGD):
    def __init__(self, params, tells):
        super().__init__(params, lr=0.1)
        self.params = [param for group in self.param_groups for param in group["params"]]
        self.slow = [param.detach().clone() for param in self.params]
        self.taken, self.tells = 0, tells
    def step(self, closure=None):
        super().step(closure)
        self.taken += 1
        if self.tells:
            self.state[self.params[0]]["slow"] = self.slow[0]
        if self.taken % 5 == 0:
            for slow, param in zip(self.slow, self.params):
                slow.lerp_(param.detach(), 0.5)
                param.data.copy_(slow)
t = paceline.Trainer(net, cross_entropy, lambda params: Lookahead([p for _, p in params], {}), global_batch=24)
list(t.steps(data))
"""


def test_what_an_optimizer_hides_is_named_at_the_first_checkpoint(tmp_path: Path) -> None:
    told = (
        "Lookahead keeps Lookahead.slow[0] and 3 more tensors outside of its state_dict(): "
        "a resume or a worker's return loses them; keep them in self.state\n"
    )
    assert train_basics(tmp_path, HIDES.replace("{}", "False"), 2).stderr.count(told) == 1
    plain = "list(make().steps(data))\n"
    (tmp_path / "plain").mkdir()
    assert "outside of" not in train_basics(tmp_path / "plain", plain, 1).stderr
