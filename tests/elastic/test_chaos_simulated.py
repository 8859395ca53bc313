"""A day simulated is a day lived: the account of a run with faults beside that of the same faults simulated."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from warm import environment

from paceline.base.time_accounting import COSTS, USEFUL
from paceline.launch.check import rehearse
from paceline.launch.options import LaunchOptions
from paceline.observe.summary import Summary
from paceline.planner.days import simulate
from paceline.planner.scenarios import from_run, losses_of

STEPS = 300
PATH = environment()["PYTHONPATH"]
SCRIPT = """
import time
from basics import *
def loss(output, batch):
    time.sleep(0.004 * len(output))
    return cross_entropy(output, batch)
for report in make(loss).steps(data, epochs=1000):
    pass
"""
ONE = "kill:1@50.backward,stop:2@110.forward,raise:2@170.reduced,kill:1@230.loading"
OTHER = "stop:1@40.reduced,kill:2@100.forward,exit:1@160.backward,kill:2@220.loading"


@pytest.mark.slow
def test_the_account_of_chaos_is_that_of_its_faults_simulated(tmp_path: Path) -> None:
    """What a loss costs is measured under other faults. As `paceline chaos` does it, the script runs in a folder of its
    own until its step; each line of the account is within a second or a fifth.
    """
    (tmp_path / "train.py").write_text(SCRIPT)
    options = LaunchOptions(script=str(tmp_path / "train.py"), workers=3, max_restarts=20)
    summaries = []
    for number, faults in enumerate((ONE, OTHER)):
        folder = tmp_path / str(number)
        code, _ = rehearse(folder, options, {"steps": STEPS, "reverse": False}, PACELINE_CHAOS=faults, PYTHONPATH=PATH)
        assert code == 0
        summaries.append(Summary(folder / "run"))
    one, lived = summaries
    assert len(lived.lost) == 4
    simulated = simulate(from_run(one).scenario, math.inf, losses=losses_of(OTHER), steps=STEPS)
    useful = [sum(account.get(name, 0.0) for name in USEFUL) for account in (simulated.account, lived.account)]
    assert useful[0] == pytest.approx(useful[1], rel=0.2, abs=1.0)
    for name in {*COSTS} - {"starting"}:  # which depends on what else this machine does, and not on losses
        here, there = (account.get(name, 0.0) for account in (simulated.account, lived.account))
        assert here == pytest.approx(there, rel=0.2, abs=1.0), (name, simulated.account, lived.account)
